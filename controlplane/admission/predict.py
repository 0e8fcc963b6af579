"""How fast a pool's queue drains, learned from the calls that leave it while others wait. No clock.

Only time in which the queue had calls counts: a pool that nobody waits for says nothing about
what it could do.
"""

from math import exp
from typing import Final

MEMORY_MS: Final = 10_000
# Less observed time than this is an accident, not a rate.
BUSY_MS_MIN: Final = 500
WAIT_MS_MAX: Final = 3_600_000


class DrainRate:
    """Calls that leave per busy millisecond, exponentially weighted over MEMORY_MS."""

    __slots__ = ("_busy_ms", "_left", "_until_ms")

    def __init__(self) -> None:
        self._left = 0.0
        self._busy_ms = 0.0
        # The instant up to which busy time is counted; None while nobody waits.
        self._until_ms: int | None = None

    def began(self, now_ms: int) -> None:
        """Somebody waits from now on."""
        if self._until_ms is None:
            self._until_ms = now_ms

    def left(self, now_ms: int) -> None:
        """One call left for an engine."""
        self._left, self._busy_ms = self._at(now_ms)
        self._left += 1.0
        if self._until_ms is not None:
            self._until_ms = max(self._until_ms, now_ms)

    def emptied(self, now_ms: int) -> None:
        """Nobody waits any more."""
        self._left, self._busy_ms = self._at(now_ms)
        self._until_ms = None

    def per_ms(self, now_ms: int) -> float | None:
        """Calls per millisecond; None while too little is known."""
        left, busy_ms = self._at(now_ms)
        if busy_ms < BUSY_MS_MIN or left <= 0.0:
            return None
        return left / busy_ms

    def wait_ms(self, calls: float, now_ms: int) -> int | None:
        """How long it takes until `calls` have left; None while too little is known."""
        rate = self.per_ms(now_ms)
        return None if rate is None else int(min(WAIT_MS_MAX, calls / rate))

    def _at(self, now_ms: int) -> tuple[float, float]:
        """(left, busy time) as they stand at `now_ms`."""
        if self._until_ms is None or now_ms <= self._until_ms:
            return self._left, self._busy_ms
        kept = exp((self._until_ms - now_ms) / MEMORY_MS)
        return self._left * kept, self._busy_ms * kept + MEMORY_MS * (1.0 - kept)
