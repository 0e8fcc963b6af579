"""The pump: offers seats to the calls that wait whenever something frees one, and wakes who leaves the line.

Who leaves, and why, is the line's (`waiting_line.py`); here are the tasks that wait and the clock.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from controlplane.admission.queue import WaitingQueue
from controlplane.domain.decision import Placement, Reason, Refuse
from controlplane.domain.ids import ModelName, RequestId
from controlplane.runtime.call import Ticket, monotonic_ms
from controlplane.runtime.credits import CreditKeeper
from controlplane.runtime.waiting_line import Outcome, WaitingLine

# A client that waits hears of it this often: proxies cut what is silent for longer, 15 s at the least.
HEARTBEAT_MS: Final = 5_000


@dataclass(slots=True)
class Waiter:
    """Who waits: its ticket, the future to resolve, and when it is told next."""

    ticket: Ticket
    outcome: "asyncio.Future[Placement | Refuse]"
    beat_ms: float


def _deaf(_: float) -> None: ...


class QueuePump:
    """`place` decides and commits one call, `waited` hears how long each call waited, `is_idle` says
    whether a model has capacity to spare; the gate sets them before the first call.
    """

    def __init__(
        self, keeper: CreditKeeper, *, calls_max: int, bytes_max: int, wait_ms_max: int
    ) -> None:
        self._keeper = keeper
        self.line: WaitingLine[Ticket] = WaitingLine(
            calls_max=calls_max, bytes_max=bytes_max, wait_ms_max=wait_ms_max
        )
        self.place: Callable[[Ticket], Outcome]
        self.is_idle: Callable[[ModelName], bool]
        self.line.place = lambda ticket, _: self.place(ticket)
        self.line.is_idle = lambda model, _: self.is_idle(model)
        self._waiters: dict[RequestId, Waiter] = {}
        self._is_scheduled = False
        self.calls_max = calls_max
        # Told how many milliseconds each pass over the queue took.
        self.passed: Callable[[float], None] = _deaf

    @property
    def waited(self) -> Callable[[Ticket, float], None]:
        return self.line.waited

    @waited.setter
    def waited(self, hear: Callable[[Ticket, float], None]) -> None:
        self.line.waited = hear

    @property
    def queue(self) -> WaitingQueue[Ticket]:
        return self.line.queue

    @property
    def waiting(self) -> int:
        return len(self.line)

    def depths(self) -> dict[str, int]:
        """Waiting calls by model, without postponed ones."""
        return {model: self.queue.waiting_for(model) for model in self.line.models()}

    def is_waiting_for(self, model: ModelName) -> bool:
        """Whether somebody waits for `model` already; who comes now goes behind."""
        return self.line.is_waiting_for(model)

    def place_of(self, ticket: Ticket) -> tuple[int, int | None] | None:
        """A waiting call's position from 1 and predicted wait in ms; None when it does not wait."""
        return self.line.place_of(ticket, monotonic_ms())

    async def wait(self, ticket: Ticket, reason: Reason, cached_tokens: int) -> Placement | Refuse:
        """Wait for a seat. Cancelling gives the place in the queue up.

        A placement has been committed when it is returned; also when the caller is cancelled just
        then, so it must look at what its ticket holds.
        """
        now_ms = monotonic_ms()
        entered = self.line.enter(ticket, cached_tokens, now_ms)
        if isinstance(entered, Refuse):
            return entered
        outcome: asyncio.Future[Placement | Refuse] = asyncio.get_running_loop().create_future()
        self._waiters[ticket.id] = Waiter(ticket, outcome, now_ms + HEARTBEAT_MS)
        for evicted, refuse in entered:
            self._resolve(evicted, refuse)
        if reason is Reason.QUEUE_FULL or reason is Reason.NO_CAPACITY:
            self._keeper.contended(ticket.request.model)
        self.offer()
        try:
            return await outcome
        finally:
            self.line.remove(ticket)
            self._waiters.pop(ticket.id, None)

    def contended(self, model: ModelName) -> None:
        """Somebody was refused for load: what the agents could still lend is asked for."""
        self._keeper.contended(model)

    def offer(self) -> None:
        """Something may have freed a seat: look soon, once, however often this is called."""
        if len(self.line) and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._pass)

    def sweep(self, now_ms: float) -> None:
        """Answer calls whose deadline has come or that have waited as long as any may, and tell the others
        that they still wait. Several times a second.
        """
        for ticket, refuse in self.line.expire(now_ms):
            self._resolve(ticket, refuse)
        for waiter in self._waiters.values():
            if now_ms < waiter.beat_ms or waiter.outcome.done():
                continue
            waiter.beat_ms = now_ms + HEARTBEAT_MS
            tell = waiter.ticket.call.on_waiting
            if tell is not None:
                position, wait_ms = self.place_of(waiter.ticket) or (0, 0)
                tell(position, wait_ms or 0)

    def _pass(self) -> None:
        self._is_scheduled = False
        began_ms = monotonic_ms()
        left, may_be_more = self.line.offer(began_ms)
        self.passed(monotonic_ms() - began_ms)
        for ticket, outcome in left:
            self._resolve(ticket, outcome)
        if may_be_more:
            self.offer()

    def _resolve(self, ticket: Ticket, outcome: Placement | Refuse) -> None:
        waiter = self._waiters.get(ticket.id)
        if waiter is not None and not waiter.outcome.done():
            waiter.outcome.set_result(outcome)
