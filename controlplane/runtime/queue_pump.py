"""Calls that wait for a seat, and the pump that offers them seats whenever something frees one.

The order is the queue's (`admission/queue.py`); a call is bound to an engine only when it leaves.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.admission.queue import Waiting, WaitingQueue
from controlplane.domain.decision import Placement, Queue, Reason, Refuse
from controlplane.runtime.call import Ticket, monotonic_ms
from controlplane.runtime.credits import CreditKeeper

# Calls offered a seat in one pass, so that a long queue does not hold the event loop.
TRIES_PER_PASS_MAX = 64
RETRY_MS = 2_000

Outcome = Placement | Queue | Refuse
Place = Callable[[Ticket], Outcome]


@dataclass(slots=True)
class Waiter:
    """Who waits: its ticket, since when, and the future to resolve."""

    ticket: Ticket
    queued_ms: float
    outcome: "asyncio.Future[Placement | Refuse]"


class QueuePump:
    """`place` decides and commits one call; the gate sets it before the first call."""

    place: Place

    def __init__(
        self, keeper: CreditKeeper, *, calls_max: int, bytes_max: int, wait_ms_max: int
    ) -> None:
        self._keeper = keeper
        self._queue: WaitingQueue[Waiter] = WaitingQueue(calls_max, bytes_max)
        self._models: Counter[str] = Counter()
        self._wait_ms_max = wait_ms_max
        self._is_scheduled = False
        self.calls_max = calls_max

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def depths(self) -> dict[str, int]:
        """Waiting calls by model."""
        return dict(self._models)

    def is_waiting_for(self, model: str) -> bool:
        """Whether somebody waits for `model` already; who comes now goes behind."""
        return model in self._models

    async def wait(self, ticket: Ticket, reason: Reason) -> Placement | Refuse:
        """Wait for a seat. Cancelling gives the place in the queue up.

        A placement has been committed when it is returned; also when the caller is cancelled just
        then, so it must look at what its ticket holds.
        """
        request = ticket.request
        waiter = Waiter(ticket, monotonic_ms(), asyncio.get_running_loop().create_future())
        body_bytes = ticket.call.prompt_bytes
        if not self._queue.push(Waiting(request, waiter, body_bytes)):
            return Refuse(
                Reason.QUEUE_FULL,
                f"{len(self._queue)} calls wait already; come back later",
                RETRY_MS,
            )
        self._models[request.model] += 1
        if reason is Reason.QUEUE_FULL or reason is Reason.NO_CAPACITY:
            self._keeper.contended(request.model)
        self.offer()
        try:
            return await waiter.outcome
        finally:
            if self._queue.remove(request.id) is not None:
                self._left(request.model)

    def offer(self) -> None:
        """Something may have freed a seat: look soon, once, however often this is called."""
        if self._models and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._pass)

    def expire(self, now_ms: int) -> None:
        """Answer calls whose deadline has come, or that have waited as long as any may."""
        for item in self._queue.expire(now_ms):
            self._left(item.request.model)
            self._resolve(
                item.ticket,
                Refuse(
                    Reason.DEADLINE_UNREACHABLE, "the deadline passed while the call waited", None
                ),
            )
        tired = [
            item
            for item in self._queue.ordered()
            if now_ms - item.ticket.queued_ms > self._wait_ms_max
        ]
        for item in tired:
            self._queue.remove(item.request.id)
            self._left(item.request.model)
            seconds = self._wait_ms_max / 1000
            self._resolve(
                item.ticket,
                Refuse(Reason.QUEUE_FULL, f"no seat became free in {seconds:g} s", RETRY_MS),
            )

    def _pass(self) -> None:
        self._is_scheduled = False
        blocked: set[str] = set()

        def is_ready(item: Waiting[Waiter]) -> bool:
            # Once a model's first call does not fit, none of its later ones is asked: small calls
            # would overtake large ones for ever.
            model = item.request.model
            if model in blocked:
                return False
            outcome = self.place(item.ticket.ticket)
            if isinstance(outcome, Queue):
                blocked.add(model)
                return False
            self._resolve(item.ticket, outcome)
            return True

        ready = self._queue.pop_ready(is_ready, TRIES_PER_PASS_MAX)
        for item in ready:
            self._left(item.request.model)
        if len(ready) == TRIES_PER_PASS_MAX:
            self.offer()

    def _left(self, model: str) -> None:
        self._models[model] -= 1
        if self._models[model] <= 0:
            del self._models[model]

    def _resolve(self, waiter: Waiter, outcome: Placement | Refuse) -> None:
        if not waiter.outcome.done():
            waiter.outcome.set_result(outcome)
