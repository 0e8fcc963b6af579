"""How much of its room an engine, or a whole pool, may use while it is new. No clock.

An engine that has just started, or come back, is ramped up; that is useless when all engines of a pool
are new, so a cold pool is ramped as a whole: one call for each engine until the first has proved that
they compute, then a growing share of all. Until it is warm its room is for those that can not wait: the
lowest priorities get what is left over.
"""

from enum import StrEnum
from typing import Final

RAMP_RATIO_MIN: Final = 0.1
ENGINE_RAMP_MS: Final = 30_000
POOL_RAMP_MS: Final = 60_000
# Calls in flight on each engine of a cold pool.
CANARIES_PER_ENGINE: Final = 1
# Priorities below this begin only on idle room while their pool is ramped up.
HELD_BACK_BELOW_PRIORITY: Final = 3


def ramp_ratio(since_ms: float, now_ms: float, length_ms: float) -> float:
    """Share of the room that may be used: from RAMP_RATIO_MIN, in a line, to 1 after `length_ms`."""
    passed_ms = now_ms - since_ms
    if passed_ms >= length_ms:
        return 1.0
    return RAMP_RATIO_MIN + (1.0 - RAMP_RATIO_MIN) * max(0.0, passed_ms) / length_ms


def is_held_back(pool_ratio: float, priority: int) -> bool:
    """Whether work that has not begun yields to all other while the pool's ramp stands at `pool_ratio`.

    Without anybody else it begins all the same: it is the canary that proves the pool.
    """
    return pool_ratio < 1.0 and priority < HELD_BACK_BELOW_PRIORITY


class Warmth(StrEnum):
    COLD = "cold"
    RAMPING = "ramping"
    WARM = "warm"


class Event(StrEnum):
    """What can change the warmth of a pool."""

    PROVED = "proved"  # a call got its first token from a new engine
    RAMPED = "ramped"  # the ramp has come to its end
    SEASONED = "seasoned"  # an engine that has served for long joined, or is there already
    COOLED = "cooled"  # every engine that accepts calls is new


TRANSITIONS: Final[dict[tuple[Warmth, Event], Warmth]] = {
    (Warmth.COLD, Event.PROVED): Warmth.RAMPING,
    (Warmth.COLD, Event.SEASONED): Warmth.WARM,
    (Warmth.RAMPING, Event.SEASONED): Warmth.WARM,
    (Warmth.RAMPING, Event.RAMPED): Warmth.WARM,
    (Warmth.RAMPING, Event.COOLED): Warmth.COLD,
    (Warmth.WARM, Event.COOLED): Warmth.COLD,
}


class PoolRamp:
    """The warmth of one pool. `length_ms` is that of its ramp."""

    __slots__ = ("_since_ms", "length_ms", "warmth")

    def __init__(self, length_ms: float) -> None:
        # Without an engine there is nothing to hold back; the first one decides.
        self.warmth = Warmth.WARM
        self.length_ms = length_ms
        self._since_ms = 0.0

    def apply(self, event: Event, now_ms: float) -> None:
        warmth = TRANSITIONS.get((self.warmth, event), self.warmth)
        if warmth is not self.warmth:
            self.warmth = warmth
            self._since_ms = now_ms

    def ratio(self, now_ms: float) -> float:
        """Share of the pool's room that may be used; 0 while it is cold. Ends a ramp that is over."""
        match self.warmth:
            case Warmth.COLD:
                return 0.0
            case Warmth.RAMPING:
                ratio = ramp_ratio(self._since_ms, now_ms, self.length_ms)
                if ratio >= 1.0:
                    self.apply(Event.RAMPED, now_ms)
                return ratio
            case Warmth.WARM:
                return 1.0

    def remaining_ms(self, now_ms: float) -> float:
        """Until the pool is warm: the whole ramp while it is cold, for when it is proved is not known."""
        match self.warmth:
            case Warmth.COLD:
                return self.length_ms
            case Warmth.RAMPING:
                return max(0.0, self._since_ms + self.length_ms - now_ms)
            case Warmth.WARM:
                return 0.0
