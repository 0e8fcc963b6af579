"""What a move of the planner means to an agent: commands to do it, and commands to take it back. Pure.

Agents load, unload, drain and stop engines, and let them sleep. A move that needs more, or that could not
be taken back, is not executable, and the reason is told in words.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from controlplane.domain.catalog import Catalog, GpuType, Model
from controlplane.domain.ids import EngineId, NodeId
from controlplane.scheduler.planner.problem import Move, MoveKind
from controlplane.store.plans import MoveState, NewMove
from dataplane.protocol.messages import EngineSpec

# Running work gets this long to finish before its engine is stopped.
DRAIN_S_MAX: Final = 300.0
# An agent answers a load when the engine serves; this covers what the plan can not foresee.
STEP_S_MAX: Final = 900.0
ANSWER_S_MAX: Final = 120.0
SIMULATED: Final = "simulated"
# The planner lets engines sleep with their weights in host memory.
SLEEP_LEVEL: Final = 1

Specs = Mapping[EngineId, tuple[NodeId, EngineSpec]]


class StepKind(StrEnum):
    """All but the last two are commands of the protocol; nodes are cordoned in the catalogue."""

    LOAD = "load"
    UNLOAD = "unload"
    DRAIN = "drain"
    SLEEP = "sleep"
    WAKE = "wake"
    CORDON = "cordon"
    UNCORDON = "uncordon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command. `seconds_max`: after that it counts as failed, whatever became of it."""

    kind: StepKind
    engine_id: str
    seconds_max: float
    deadline_s: float = 0.0
    spec: EngineSpec | None = None
    sleep_level: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind),
            "engine_id": self.engine_id,
            "seconds_max": self.seconds_max,
            "deadline_s": self.deadline_s,
            "spec": None if self.spec is None else msgspec.to_builtins(self.spec),
            "sleep_level": self.sleep_level,
        }


def step_of(document: Mapping[str, Any]) -> Step:
    spec = document["spec"]
    return Step(
        kind=StepKind(document["kind"]),
        engine_id=document["engine_id"],
        seconds_max=float(document["seconds_max"]),
        deadline_s=float(document["deadline_s"]),
        spec=None if spec is None else msgspec.convert(spec, EngineSpec),
        sleep_level=document.get("sleep_level", 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    do: tuple[Step, ...]
    undo: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class NotExecutable:
    why: str


def steps_for(
    move: Move, catalog: Catalog, specs: Specs, engines_on: Iterable[EngineId] = ()
) -> Steps | NotExecutable:
    """The commands of a move. `engines_on` are the engines on its node, which a drain empties."""
    match move.kind:
        case MoveKind.LOAD:
            return _load(move, catalog, specs)
        case MoveKind.UNLOAD:
            return _unload(move, specs)
        case MoveKind.ROLE:
            return _role(move, catalog, specs)
        case MoveKind.DRAIN:
            return _drain(move, specs, engines_on)
        case MoveKind.SLEEP | MoveKind.WAKE:
            return _rest(move, specs)


def _load(move: Move, catalog: Catalog, specs: Specs) -> Steps | NotExecutable:
    spec = _spec_for(move, catalog, specs)
    if isinstance(spec, NotExecutable):
        return spec
    return Steps(
        do=(_loading(spec, move.duration_s),),
        undo=(_unloading(spec.engine_id),),
    )


def _unload(move: Move, specs: Specs) -> Steps | NotExecutable:
    known = specs.get(EngineId(move.engine_id or ""))
    if known is None:
        return NotExecutable(
            f"how `{move.engine_id}` is started is not known, so it could not be brought back;"
            " declare it with `headway apply`"
        )
    spec = known[1]
    return Steps(
        do=(_draining(spec.engine_id), _unloading(spec.engine_id)),
        undo=(_loading(spec, move.duration_s),),
    )


def _role(move: Move, catalog: Catalog, specs: Specs) -> Steps | NotExecutable:
    away = _unload(move, specs)
    if isinstance(away, NotExecutable):
        return away
    spec = _spec_for(move, catalog, specs)
    if isinstance(spec, NotExecutable):
        return spec
    return Steps(
        do=(*away.do, _loading(spec, move.duration_s)),
        undo=(_unloading(spec.engine_id), *away.undo),
    )


def _drain(move: Move, specs: Specs, engines_on: Iterable[EngineId]) -> Steps | NotExecutable:
    do = [_step(StepKind.CORDON, "")]
    undo = []
    for engine_id in sorted(engines_on):
        known = specs.get(engine_id)
        if known is None:
            return NotExecutable(
                f"how `{engine_id}` is started is not known, so it could not be brought back;"
                " declare it with `headway apply`"
            )
        do += [_draining(engine_id), _unloading(engine_id)]
        undo.append(_loading(known[1], move.duration_s))
    return Steps(do=tuple(do), undo=(*undo, _step(StepKind.UNCORDON, "")))


def _rest(move: Move, specs: Specs) -> Steps | NotExecutable:
    known = specs.get(EngineId(move.engine_id or ""))
    if known is None:
        return NotExecutable(f"how `{move.engine_id}` is started is not known")
    spec = known[1]
    if spec.kind != SIMULATED and not spec.options.get("enable_sleep_mode"):
        return NotExecutable(f"`{spec.engine_id}` is started without `enable_sleep_mode`")
    to_sleep = Step(
        kind=StepKind.SLEEP,
        engine_id=spec.engine_id,
        seconds_max=DRAIN_S_MAX + STEP_S_MAX,
        deadline_s=DRAIN_S_MAX,
        sleep_level=SLEEP_LEVEL,
    )
    to_wake = Step(kind=StepKind.WAKE, engine_id=spec.engine_id, seconds_max=STEP_S_MAX)
    if move.kind is MoveKind.SLEEP:
        return Steps(do=(to_sleep,), undo=(to_wake,))
    return Steps(do=(to_wake,), undo=(to_sleep,))


def _spec_for(move: Move, catalog: Catalog, specs: Specs) -> EngineSpec | NotExecutable:
    """How the engine of a load is started: as another one of its kind is, on the same GPU type if any."""
    node = catalog.nodes.get(move.node_id)
    model = None if move.model is None else catalog.models.get(move.model)
    if node is None or model is None or move.engine_id is None or move.role is None:
        return NotExecutable("its node or its model is not declared any more")
    alike = [
        (catalog.nodes[node_id].gpu_type != node.gpu_type, engine_id, spec)
        for engine_id, (node_id, spec) in specs.items()
        if node_id in catalog.nodes
        and (spec.model, spec.role, spec.gpus) == (move.model, str(move.role), move.gpus)
    ]
    own = specs.get(move.engine_id)
    if own is not None and (own[1].model, own[1].role, own[1].gpus) == (
        move.model,
        str(move.role),
        move.gpus,
    ):
        template = own[1]
    elif alike:
        template = min(alike)[2]
    else:
        return NotExecutable(
            f"no engine of `{move.model}` in role `{move.role}` on {move.gpus} GPUs is declared"
            " whose options could be used; declare one with `headway apply`"
        )
    options = dict(template.options)
    if template.kind == SIMULATED:
        # A simulated engine has the physics of the catalogue, unless its own options say otherwise.
        options = {**_physics(catalog.gpu_types[node.gpu_type], model), **options}
    return EngineSpec(
        engine_id=move.engine_id,
        kind=template.kind,
        model=template.model,
        role=template.role,
        gpus=template.gpus,
        options=options,
    )


def _physics(gpu: GpuType, model: Model) -> dict[str, str | int | float | bool]:
    return {
        "hbm_bytes": gpu.hbm_bytes,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        "flops_per_s": gpu.flops_per_s,
        "parameters": model.parameters,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "weights_bytes": model.weights_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "context_tokens_max": model.context_tokens_max,
        "load_ms": model.load_ms,
    }


def _step(kind: StepKind, engine_id: str) -> Step:
    return Step(kind=kind, engine_id=engine_id, seconds_max=ANSWER_S_MAX)


def _loading(spec: EngineSpec, duration_s: float) -> Step:
    return Step(
        kind=StepKind.LOAD,
        engine_id=spec.engine_id,
        seconds_max=STEP_S_MAX + 2.0 * duration_s,
        spec=spec,
    )


def _draining(engine_id: str) -> Step:
    return Step(
        kind=StepKind.DRAIN,
        engine_id=engine_id,
        seconds_max=DRAIN_S_MAX + ANSWER_S_MAX,
        deadline_s=DRAIN_S_MAX,
    )


def _unloading(engine_id: str) -> Step:
    return _step(StepKind.UNLOAD, engine_id)


def new_moves(
    moves: Iterable[Move],
    catalog: Catalog,
    specs: Specs,
    engines_on: Mapping[NodeId, Iterable[EngineId]],
) -> list[NewMove]:
    """The moves of a plan with their commands, as they are handed over to be done."""
    found = []
    for move in moves:
        steps = steps_for(move, catalog, specs, engines_on.get(move.node_id, ()))
        is_executable = isinstance(steps, Steps)
        found.append(
            NewMove(
                number=move.number,
                kind=str(move.kind),
                node_id=move.node_id,
                engine_id=move.engine_id or "",
                state=MoveState.WAITING if is_executable else MoveState.NOT_EXECUTABLE,
                detail="" if isinstance(steps, Steps) else f"not executable: {steps.why}",
                body={
                    "model": move.model,
                    "gpus": move.gpus,
                    "reason": move.reason,
                    "after": list(move.after),
                    "do": [step.as_json() for step in steps.do] if isinstance(steps, Steps) else [],
                    "undo": [step.as_json() for step in steps.undo]
                    if isinstance(steps, Steps)
                    else [],
                    "step": 0,
                    "tries": 0,
                    "since_s": 0.0,
                },
            )
        )
    return found
