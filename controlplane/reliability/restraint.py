"""What holds an engine back that is alive but must get less: back-pressure, faults, and pace. No clock.

An engine that refuses or fails is free at once, so that it looks like the best place for the next call.
Each rule here answers with a bound on the calls in flight there, or with a price.
"""

from typing import Final

# An engine that refuses without saying for how long, and the most that it is believed.
BACKPRESSURE_MS: Final = 1_000
BACKPRESSURE_MS_MAX: Final = 60_000

# Share of a pool's calls that goes to an engine which fails and may not be kept out: one in so many.
CALLS_PER_PROBE: Final = 100
PROBE_INTERVAL_MS_MIN: Final = 1_000
PROBE_INTERVAL_MS_MAX: Final = 120_000

FAULT_GAIN: Final = 0.2
FAULT_HALF_LIFE_MS: Final = 5_000.0
# The most attempts that a price is multiplied by.
ATTEMPTS_EXPECTED_MAX: Final = 50.0
# A ratio that has decayed below this is nothing.
_FAULT_RATIO_MIN: Final = 0.005


class BackPressure:
    """429 and 503 of an engine: it holds what it holds, and gets no more until its Retry-After.

    Who refuses while it holds nothing of ours is left alone, each time for twice as long.
    """

    __slots__ = ("_bound", "_until_ms", "_wait_ms")

    def __init__(self) -> None:
        self._bound = 0
        self._until_ms = 0.0
        self._wait_ms = BACKPRESSURE_MS

    def refused(self, held: int, now_ms: float, retry_after_ms: int | None) -> None:
        """It refused a call and holds `held` others of ours."""
        wait_ms = BACKPRESSURE_MS if retry_after_ms is None else retry_after_ms
        if held <= 0:
            wait_ms = max(wait_ms, self._wait_ms)
            if now_ms >= self._until_ms:
                self._wait_ms = min(BACKPRESSURE_MS_MAX, 2 * self._wait_ms)
        is_over = now_ms >= self._until_ms
        self._bound = max(0, held) if is_over else min(self._bound, max(0, held))
        wait_ms = max(1, min(BACKPRESSURE_MS_MAX, wait_ms))
        self._until_ms = max(self._until_ms, now_ms + wait_ms)

    def accepted(self) -> None:
        """It served a call to its end: what it refuses from here on is another matter."""
        self._wait_ms = BACKPRESSURE_MS

    def bound(self, now_ms: float) -> int | None:
        """Calls in flight that it may have, None when it has not refused of late."""
        return self._bound if now_ms < self._until_ms else None


class ProbePace:
    """One call at a time for an engine that fails while others of its pool work, and seldom."""

    __slots__ = ("_next_ms",)

    def __init__(self) -> None:
        self._next_ms = 0.0

    def began(self, now_ms: float, window_ms: int, calls: int) -> None:
        """A call goes there, when the pool began `calls` in the last `window_ms`."""
        interval_ms = CALLS_PER_PROBE * window_ms / max(1, calls)
        self._next_ms = now_ms + min(PROBE_INTERVAL_MS_MAX, max(PROBE_INTERVAL_MS_MIN, interval_ms))

    def succeeded(self) -> None:
        """It served a call: the next may follow at once."""
        self._next_ms = 0.0

    def bound(self, now_ms: float) -> int:
        return 1 if now_ms >= self._next_ms else 0


class FaultRatio:
    """Share of faults among the latest calls, forgotten with time, and the attempts that follow from it."""

    __slots__ = ("_at_ms", "ratio")

    def __init__(self) -> None:
        self.ratio = 0.0
        self._at_ms = 0.0

    def add(self, now_ms: float, *, is_fault: bool) -> None:
        self.decay(now_ms)
        self.ratio += FAULT_GAIN * (is_fault - self.ratio)

    def decay(self, now_ms: float) -> None:
        """Time heals: an engine that no call is sent to could not prove that it works again."""
        if self.ratio:
            self.ratio *= 0.5 ** (max(0.0, now_ms - self._at_ms) / FAULT_HALF_LIFE_MS)
            if self.ratio < _FAULT_RATIO_MIN:
                self.ratio = 0.0
        self._at_ms = now_ms

    @property
    def attempts_expected(self) -> float:
        """How often a call must be sent until it succeeds, if failures are independent."""
        return min(ATTEMPTS_EXPECTED_MAX, 1.0 / max(1e-9, 1.0 - self.ratio))
