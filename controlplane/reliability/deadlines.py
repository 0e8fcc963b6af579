"""What is left before a deadline, for the decision and for the wait on an engine. No clock."""

from typing import Final

# What a hop costs at least: taken off before a deadline is passed on.
HOP_MS: Final = 5
# An engine's answer is never waited for less than this: below it only the time-out is measured.
TIMEOUT_MS_MIN: Final = 50


def remaining_ms(deadline_ms: int, now_ms: int) -> int:
    """Milliseconds left, never negative."""
    return max(0, deadline_ms - now_ms)


def upstream_timeout_ms(deadline_ms: int, now_ms: int, most_ms: int) -> int:
    """How long to wait for an engine: what is left after the hop, at most `most_ms`."""
    return max(TIMEOUT_MS_MIN, min(most_ms, remaining_ms(deadline_ms, now_ms) - HOP_MS))
