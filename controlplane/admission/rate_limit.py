"""Rates and calls in flight of one tenant or key: GCRA kept as a debt in integers. No clock.

What was taken is a debt that shrinks at the rate of the limit; a call passes when the debt has room for
it under one minute's worth. In any window of w ms no more passes than the limit times (1 + w / 60,000)
and one call. The debt, unlike a theoretical arrival time, keeps its meaning when the limit changes
under it, and exactly: nothing here is rounded.
"""

from dataclasses import dataclass
from typing import Final

MINUTE_MS: Final = 60_000
# A replica's share of a limit is counted in thousandths, so that a third of 1 a minute is not nothing.
SHARE_SCALE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Standing:
    """How a meter stands: what may be taken at once, and how long until all of the limit may."""

    limit: int
    remaining: int
    reset_ms: int


class Meter:
    """One rate. Debt in units of 1 / (SHARE_SCALE * MINUTE_MS) of what is counted."""

    __slots__ = ("_debt", "_seen_ms")

    def __init__(self) -> None:
        self._debt = 0
        self._seen_ms = 0

    def wait_ms(self, amount: int, limit: int, replicas: int, now_ms: int) -> int:
        """0 when `amount` may be taken now, else the time after which it may.

        An amount above the whole limit passes once the debt is paid, and is paid off for longer.
        """
        rate = _rate(limit, replicas)
        most = max(0, rate * MINUTE_MS - amount * SHARE_SCALE * MINUTE_MS)
        over = self._at(rate, now_ms) - most
        return 0 if over <= 0 else -(-over // rate)

    def take(self, amount: int, limit: int, replicas: int, now_ms: int) -> None:
        """Count `amount`; also what was not foreseen (negative: what was not used after all)."""
        debt = self._at(_rate(limit, replicas), now_ms)
        self._debt = debt + amount * SHARE_SCALE * MINUTE_MS
        self._seen_ms = max(self._seen_ms, now_ms)

    def standing(self, limit: int, replicas: int, now_ms: int) -> Standing:
        """As seen from outside: of the whole limit, taking the other replicas to stand as this one does."""
        rate = _rate(limit, replicas)
        debt = self._at(rate, now_ms)
        free = max(0, rate * MINUTE_MS - debt)
        remaining = min(limit, free * replicas // (SHARE_SCALE * MINUTE_MS))
        return Standing(limit, remaining, -(-debt // rate))

    def is_at_rest(self, limit: int, replicas: int, now_ms: int) -> bool:
        """Whether it says nothing that a fresh one does not say."""
        return self._at(_rate(limit, replicas), now_ms) == 0

    def _at(self, rate: int, now_ms: int) -> int:
        elapsed_ms = max(0, now_ms - self._seen_ms)
        return max(0, self._debt - elapsed_ms * rate)


def calls_share(calls_max: int, replicas: int) -> int:
    """How many calls one replica may keep in flight under a limit for all of them; at least one."""
    return max(1, calls_max // replicas)


def _rate(limit: int, replicas: int) -> int:
    """A replica's share of `limit` a minute: debt units per millisecond."""
    return max(1, limit * SHARE_SCALE // replicas)
