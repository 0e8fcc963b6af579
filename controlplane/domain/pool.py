"""The engines of one model as a whole: what policies, admission and operators ask of a pool."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from controlplane.domain.ids import ModelName

# Breakers are named `engine:ID` and `pool:MODEL/REGION`.
ENGINE_TARGET: Final = "engine"
POOL_TARGET: Final = "pool"


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class OverrideMode(StrEnum):
    """What an operator decided about a breaker, whatever it has seen."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One model's engines at an instant. Prefill engines are left out: they hold no call for long.

    `seats_bound_total` and `seats_taken_total` are this replica's; the two saturations are of the
    engines as a whole, with the calls of all replicas, and reach 1,000 where nothing more should go.
    `breaker` is that of the best region. `ramp_ratio` is below 1 while a cold pool warms up, and
    `warm_in_ms` estimates how long that still takes (0: it is warm, or nothing is under way).
    """

    model: ModelName
    engines: int
    engines_accepting: int
    seats_bound_total: int
    seats_taken_total: int
    saturation_permille: int
    kv_used_permille: int
    breaker: BreakerState
    ramp_ratio: float
    warm_in_ms: int
