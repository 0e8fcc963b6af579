"""What can still be done before a deadline."""


def remaining_ms(deadline_ms: int, now_ms: int) -> int:
    """Milliseconds left, never negative."""
    return max(0, deadline_ms - now_ms)
