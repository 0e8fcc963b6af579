"""What can still be done before a deadline."""

from typing import Final

# Clients hang up when their own deadline comes, a moment before ours.
HANG_UP_MS: Final = 500


def remaining_ms(deadline_ms: int, now_ms: int) -> int:
    """Milliseconds left, never negative."""
    return max(0, deadline_ms - now_ms)
