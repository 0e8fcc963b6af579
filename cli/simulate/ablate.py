"""What can be taken away from Headway, one part at a time, to see what it is worth.

Parts of admission are switches of its document. Axes of placement are replaced, for the length of one
decision, by ones that still say what is feasible and cost nothing; that needs the decision core
uncompiled, for compiled functions call each other directly.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from controlplane.domain.decision import Axis
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler import place
from controlplane.scheduler.axes import tenant_priority
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast

# Parts that the admission document switches off.
ADMISSION_PARTS: Final[Mapping[str, Mapping[str, object]]] = {
    "order": {"order": "arrival"},
    "order-for-slack": {"order": "slack"},
    "order-for-index": {"order": "index"},
    "order-for-plas": {"order": "plas"},
    "fairness": {"fairness_lead_calls": 1_000_000.0},
    # The bound stays where it is tightest.
    "moving-bound": {"tpot_stretch_ratio_max": 1.5},
    "bound": {"is_bounding": False},
    "shedding": {"is_shedding": False},
}
HOME: Final = "home"
JOINT: Final = "joint"
# The delay that a call causes to those that live on an engine.
EXTERNALITY: Final = "externality"
AXES: Final = tuple(str(axis) for axis in Axis)
PARTS: Final = (*ADMISSION_PARTS, HOME, JOINT, EXTERNALITY, *AXES)

_Cost = Callable[[Request, EngineRow, Forecast], float]


def is_compiled() -> bool:
    """The decision core is machine code: its parts can not be replaced."""
    return not str(place.__file__).endswith(".py")


@contextmanager
def taken_away(parts: frozenset[str]) -> Iterator[None]:
    """Decide without these axes (or the externality) inside the block. One block at a time."""
    kept: list[tuple[ModuleType, str, Any]] = []

    def swap(module: ModuleType, name: str, other: Any) -> None:
        kept.append((module, name, getattr(module, name)))
        setattr(module, name, other)

    for part in parts:
        if part == EXTERNALITY:
            swap(tenant_priority, "caused_ms", lambda *_: 0.0)
            swap(place, "caused_ms", lambda *_: 0.0)
        else:
            swap(place, part, _free(getattr(place, part)))
    # The lower bound of a price holds terms of the axes: 0 is one of any rest of them.
    swap(place, "floor_micro_usd", lambda *_: 0.0)
    try:
        yield
    finally:
        for module, name, was in reversed(kept):
            setattr(module, name, was)


def _free(cost: _Cost) -> _Cost:
    def feasible_is_free(request: Request, row: EngineRow, forecast: Forecast) -> float:
        return INFEASIBLE if cost(request, row, forecast) == INFEASIBLE else 0.0

    return feasible_is_free
