"""How many retries a tenant and pool may make: a share of its requests, so that failures do not multiply.

Both legs of a call, and the client's own retries, spend from the same budget. No clock.
"""

from collections import deque
from typing import Final

WINDOW_MS: Final = 10_000
RETRIES_PER_REQUEST_RATIO: Final = 0.1
# What a quiet tenant may retry as well, per second of the window.
RETRIES_PER_S_FREE: Final = 1
# The window is counted in slices of this length, so that its memory does not grow with traffic.
SLICE_MS: Final = 100


class _Window:
    """A count over the last WINDOW_MS, to the slice.

    The slice that the window's edge cuts is counted whole when `is_edge_counted`, else not at all:
    retries are never undercounted and requests never overcounted.
    """

    __slots__ = ("_is_edge_counted", "_slices", "total")

    def __init__(self, *, is_edge_counted: bool) -> None:
        self._is_edge_counted = is_edge_counted
        self._slices: deque[list[int]] = deque()
        self.total = 0

    def add(self, now_ms: int) -> None:
        self.expire(now_ms)
        number = now_ms // SLICE_MS
        if self._slices and self._slices[-1][0] >= number:
            self._slices[-1][1] += 1
        else:
            self._slices.append([number, 1])
        self.total += 1

    def expire(self, now_ms: int) -> None:
        edge = (now_ms - WINDOW_MS) // SLICE_MS
        while self._slices and self._slices[0][0] <= edge - self._is_edge_counted:
            self.total -= self._slices.popleft()[1]


class RetryBudget:
    """INVARIANT I4: in any window, retries <= 10 % of the requests in it + 1 per second."""

    __slots__ = ("_requests", "_retries")

    def __init__(self) -> None:
        self._requests = _Window(is_edge_counted=False)
        self._retries = _Window(is_edge_counted=True)

    def note_request(self, now_ms: int) -> None:
        """A first attempt arrived."""
        self._requests.add(now_ms)

    def try_spend(self, now_ms: int) -> bool:
        """Make one retry, if the budget has one left."""
        self._requests.expire(now_ms)
        self._retries.expire(now_ms)
        if self._retries.total + 1 > self.allowed():
            return False
        self._retries.add(now_ms)
        return True

    def allowed(self) -> float:
        """Retries that the window may hold, by the requests counted so far."""
        free = RETRIES_PER_S_FREE * WINDOW_MS / 1000
        return self._requests.total * RETRIES_PER_REQUEST_RATIO + free
