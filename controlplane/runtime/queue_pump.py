"""Calls that wait for a seat, and the pump that offers them seats whenever something frees one.

The order is the queue's (`admission/queue.py`); a call is bound to an engine only when it leaves.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.admission.queue import Answer, TurnedAway, Waiting, WaitingQueue
from controlplane.domain.decision import Placement, Queue, Reason, Refuse
from controlplane.domain.ids import ModelName
from controlplane.runtime.call import Ticket, monotonic_ms
from controlplane.runtime.credits import CreditKeeper

# Calls offered a seat in one pass, so that a long queue does not hold the event loop.
TRIES_PER_PASS_MAX = 64
# A client that waits hears of it this often: proxies cut what is silent for longer, 15 s at the least.
HEARTBEAT_MS = 5_000

Outcome = Placement | Queue | Refuse
Place = Callable[[Ticket], Outcome]


@dataclass(slots=True)
class Waiter:
    """Who waits: its ticket, since when, the future to resolve, and when it is told next."""

    ticket: Ticket
    queued_ms: float
    outcome: "asyncio.Future[Placement | Refuse]"
    beat_ms: float


class QueuePump:
    """`place` decides and commits one call, `waited` hears how long each call waited, `is_idle` says
    whether a model has capacity to spare; the gate sets them before the first call.
    """

    place: Place
    waited: Callable[[Ticket, float], None]
    is_idle: Callable[[ModelName], bool]

    def __init__(
        self, keeper: CreditKeeper, *, calls_max: int, bytes_max: int, wait_ms_max: int
    ) -> None:
        self._keeper = keeper
        self.queue: WaitingQueue[Waiter] = WaitingQueue(calls_max, bytes_max)
        self._models: set[ModelName] = set()
        self._wait_ms_max = wait_ms_max
        self._is_scheduled = False
        self.calls_max = calls_max

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def depths(self) -> dict[str, int]:
        """Waiting calls by model, without postponed ones."""
        return {model: self.queue.waiting_for(model) for model in self._models}

    def is_waiting_for(self, model: ModelName) -> bool:
        """Whether somebody waits for `model` already; who comes now goes behind."""
        return self.queue.waiting_for(model) > 0

    def wait_ms_of(self, model: ModelName) -> int:
        """How long who comes now is likely to wait; 0 while nobody does."""
        if not self.is_waiting_for(model):
            return 0
        return self.queue.retry_after_ms(model, int(monotonic_ms()))

    def place_of(self, ticket: Ticket) -> tuple[int, int | None] | None:
        """A waiting call's position from 1 and predicted wait in ms; None when it does not wait."""
        position = self.queue.position(ticket.id)
        if position is None:
            return None
        now_ms = int(monotonic_ms())
        return position, self.queue.predicted_wait_ms(ticket.request, now_ms, ticket.queue_class)

    async def wait(self, ticket: Ticket, reason: Reason, cached_tokens: int) -> Placement | Refuse:
        """Wait for a seat. Cancelling gives the place in the queue up.

        A placement has been committed when it is returned; also when the caller is cancelled just
        then, so it must look at what its ticket holds.
        """
        request = ticket.request
        now_ms = monotonic_ms()
        waiter = Waiter(
            ticket, now_ms, asyncio.get_running_loop().create_future(), now_ms + HEARTBEAT_MS
        )
        item = Waiting(
            request,
            waiter,
            ticket.call.prompt_bytes,
            queue_class=ticket.queue_class,
            cached_tokens=cached_tokens,
            gives_up_ms=self._gives_up_ms(ticket, int(now_ms)),
            idle_until_ms=ticket.idle_until_ms,
        )
        entered = self.queue.enter(item, int(now_ms))
        if isinstance(entered, TurnedAway):
            return Refuse(entered.reason, entered.detail, entered.retry_after_ms)
        for evicted in entered.evicted:
            self._resolve(
                evicted.ticket,
                Refuse(
                    Reason.QUEUE_FULL,
                    "the queue is full and a call of higher priority took the place; come back later",
                    self.queue.retry_after_ms(evicted.request.model, int(now_ms)),
                ),
            )
        self._models.add(request.model)
        if reason is Reason.QUEUE_FULL or reason is Reason.NO_CAPACITY:
            self._keeper.contended(request.model)
        self.offer()
        try:
            return await waiter.outcome
        finally:
            self.queue.remove(request.id)

    def contended(self, model: ModelName) -> None:
        """Somebody was refused for load: what the agents could still lend is asked for."""
        self._keeper.contended(model)

    def offer(self) -> None:
        """Something may have freed a seat: look soon, once, however often this is called."""
        if len(self.queue) and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._pass)

    def sweep(self, now_ms: float) -> None:
        """Answer calls whose deadline has come or that have waited as long as any may, and tell the others
        that they still wait. Several times a second.
        """
        for item in self.queue.expire(int(now_ms)):
            self._resolve(item.ticket, self._too_late(item, int(now_ms)))
        for item in self.queue.items():
            waiter = item.ticket
            if now_ms < waiter.beat_ms:
                continue
            waiter.beat_ms = now_ms + HEARTBEAT_MS
            tell = waiter.ticket.call.on_waiting
            if tell is not None:
                position, wait_ms = self.place_of(waiter.ticket) or (0, 0)
                tell(position, wait_ms or 0)

    def _gives_up_ms(self, ticket: Ticket, now_ms: int) -> int:
        """What is begun is carried on until its deadline, and what was postponed has time."""
        request = ticket.request
        if request.is_begun or request.not_before_ms or request.waits_for_idle:
            return 0
        return now_ms + self._wait_ms_max

    def _too_late(self, item: Waiting[Waiter], now_ms: int) -> Refuse:
        request = item.request
        if request.not_before_ms > now_ms:
            return Refuse(
                Reason.DEFERRED,
                f"the rule `{item.ticket.ticket.rule}` postpones this call beyond its deadline; send it"
                " again with a later one, or when its time has come",
                request.not_before_ms - now_ms,
                rule=item.ticket.ticket.rule,
            )
        if now_ms >= request.deadline_ms:
            return Refuse(
                Reason.DEADLINE_UNREACHABLE, "the deadline passed while the call waited", None
            )
        return Refuse(
            Reason.QUEUE_FULL,
            f"no seat became free in {self._wait_ms_max / 1000:g} s",
            self.queue.retry_after_ms(request.model, now_ms),
        )

    def _pass(self) -> None:
        self._is_scheduled = False
        now_ms = monotonic_ms()

        def ask(item: Waiting[Waiter]) -> Answer:
            waiter = item.ticket
            outcome = self.place(waiter.ticket)
            if isinstance(outcome, Queue):
                return Answer.STAYS
            self._resolve(waiter, outcome)
            if isinstance(outcome, Refuse):
                return Answer.LEAVES
            self.waited(waiter.ticket, now_ms - waiter.queued_ms)
            return Answer.GOES

        gone = self.queue.dispatch(ask, TRIES_PER_PASS_MAX, int(now_ms), self.is_idle)
        for item in gone:
            item.ticket.ticket.charge = self.queue.charge_of(item.request.id)
        if len(gone) == TRIES_PER_PASS_MAX:
            self.offer()

    def _resolve(self, waiter: Waiter, outcome: Placement | Refuse) -> None:
        if not waiter.outcome.done():
            waiter.outcome.set_result(outcome)
