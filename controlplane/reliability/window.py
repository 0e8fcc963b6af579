"""Counts over the last seconds, in memory that does not grow with traffic. No clock."""

from collections import deque
from typing import Final

WINDOW_MS: Final = 10_000
# A window is counted in slices of this length.
SLICE_MS: Final = 100


class Window:
    """A count over the last WINDOW_MS, to the slice.

    The slice that the window's edge cuts is counted whole when `is_edge_counted`, else not at all:
    whoever must not undercount, or overcount, chooses.
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
