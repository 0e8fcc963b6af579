"""Calls that wait for room, ordered by their workflow's deadline within class weights. No clock.

The order carries the gain under overload (`order` below); the bounds keep a burst from eating the
process. Who waits is bound to an engine only when it leaves, never before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from controlplane.domain.ids import RequestId
from controlplane.domain.request import Request

CALLS_MAX: Final = 4_096
BYTES_MAX: Final = 256 * 1024 * 1024
WEIGHT_MIN: Final = 0.01

# Heaps keep removed entries until they surface; above this many and twice what waits they are rebuilt.
_COMPACT_FROM: Final = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[_T]):
    """One call in the queue: what it is, whom to wake, and the body that it keeps in memory."""

    request: Request
    ticket: _T
    body_bytes: int


def order(request: Request) -> float:
    """Smaller goes first: arrival + time given / weight, in ms.

    Earliest workflow deadline first, with the time from arrival to deadline divided by the weight: of
    two calls with equal deadlines the heavier goes first, and any call's turn comes in time that
    is bounded by its own, so no class starves.
    """
    given_ms = max(0, request.workflow_deadline_ms - request.arrival_ms)
    return request.arrival_ms + given_ms / max(request.weight, WEIGHT_MIN)


class WaitingQueue(Generic[_T]):
    """A queue bounded in calls and bytes. Owned by one task."""

    __slots__ = ("_bytes", "_bytes_max", "_calls_max", "_entries", "_expiry", "_heap", "_sequence")

    def __init__(self, calls_max: int = CALLS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._calls_max = calls_max
        self._bytes_max = bytes_max
        self._entries: dict[RequestId, tuple[int, Waiting[_T]]] = {}
        # (order, sequence, id) and (deadline, sequence, id); an entry whose sequence differs is dead.
        self._heap: list[tuple[float, int, RequestId]] = []
        self._expiry: list[tuple[int, int, RequestId]] = []
        self._sequence = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def calls_max(self) -> int:
        return self._calls_max

    def push(self, item: Waiting[_T]) -> bool:
        """Take a call in; False when a bound would be passed. Raises ValueError when it waits already."""
        request = item.request
        if request.id in self._entries:
            msg = f"request {request.id} waits already"
            raise ValueError(msg)
        if len(self._entries) >= self._calls_max:
            return False
        if self._bytes + item.body_bytes > self._bytes_max:
            return False
        self._sequence += 1
        self._entries[request.id] = (self._sequence, item)
        self._bytes += item.body_bytes
        heappush(self._heap, (order(request), self._sequence, request.id))
        heappush(self._expiry, (request.deadline_ms, self._sequence, request.id))
        return True

    def remove(self, request_id: RequestId) -> Waiting[_T] | None:
        """Take a call out wherever it stands: its client went away."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        item = entry[1]
        self._bytes -= item.body_bytes
        self._compact()
        return item

    def ordered(self) -> Iterator[Waiting[_T]]:
        """Every call, first to go first. The queue must not change while this is read."""
        for _, sequence, request_id in sorted(self._heap):
            entry = self._entries.get(request_id)
            if entry is not None and entry[0] == sequence:
                yield entry[1]

    def pop_ready(
        self, is_ready: Callable[[Waiting[_T]], bool], tries_max: int
    ) -> list[Waiting[_T]]:
        """Take out, in order, the calls that `is_ready` says can go, asking about `tries_max` at most.

        One that can not go does not hold up the next: it may want another model or region.
        """
        ready: list[Waiting[_T]] = []
        kept: list[tuple[float, int, RequestId]] = []
        tries = 0
        while self._heap and tries < tries_max:
            head = heappop(self._heap)
            entry = self._entries.get(head[2])
            if entry is None or entry[0] != head[1]:
                continue
            tries += 1
            if is_ready(entry[1]):
                del self._entries[head[2]]
                self._bytes -= entry[1].body_bytes
                ready.append(entry[1])
            else:
                kept.append(head)
        for head in kept:
            heappush(self._heap, head)
        self._compact()
        return ready

    def expire(self, now_ms: int) -> list[Waiting[_T]]:
        """Take out the calls whose deadline has come, earliest deadline first."""
        expired: list[Waiting[_T]] = []
        while self._expiry and self._expiry[0][0] <= now_ms:
            _, sequence, request_id = heappop(self._expiry)
            entry = self._entries.get(request_id)
            if entry is not None and entry[0] == sequence:
                del self._entries[request_id]
                self._bytes -= entry[1].body_bytes
                expired.append(entry[1])
        self._compact()
        return expired

    def _compact(self) -> None:
        """Forget the dead when they are most of a heap: each is bounded by twice what waits."""
        longest = max(len(self._heap), len(self._expiry))
        if longest <= _COMPACT_FROM + 2 * len(self._entries):
            return
        alive = {sequence for sequence, _ in self._entries.values()}
        self._heap = [head for head in self._heap if head[1] in alive]
        self._expiry = [head for head in self._expiry if head[1] in alive]
        heapify(self._heap)
        heapify(self._expiry)
