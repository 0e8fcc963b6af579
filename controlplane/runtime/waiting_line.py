"""Calls that wait for a seat, and who of them leaves: for an engine, refused, or out of time. No clock and no tasks.

The order is the queue's (`admission/queue.py`); a call is bound to an engine only when it leaves. Who is
told of it, and how, is up to whoever owns the line.
"""

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from controlplane.admission.queue import Answer, Charge, TurnedAway, Waiting, WaitingQueue
from controlplane.domain.decision import Placement, Queue, Reason, Refuse
from controlplane.domain.ids import ModelName, RequestId
from controlplane.domain.request import Request

# Calls offered a seat in one pass, so that a long queue does not hold the event loop.
TRIES_PER_PASS_MAX: Final = 64

Outcome = Placement | Queue | Refuse


class Waits(Protocol):
    """What the line must know of a call."""

    request: Request
    charge: Charge | None
    queue_class: str
    idle_until_ms: int
    rule: str

    @property
    def id(self) -> RequestId: ...

    @property
    def prompt_bytes(self) -> int: ...


J = TypeVar("J", bound=Waits)


class WaitingLine(Generic[J]):
    """`place` decides and commits one call at an instant, `waited` hears how long each one waited, `is_idle`
    says whether a model has capacity to spare. Owned by one task.
    """

    def __init__(self, *, calls_max: int, bytes_max: int, wait_ms_max: int) -> None:
        self.queue: WaitingQueue[J] = WaitingQueue(calls_max, bytes_max)
        self.place: Callable[[J, float], Outcome]
        self.waited: Callable[[J, float], None]
        self.is_idle: Callable[[ModelName, float], bool]
        # Told before the calls are asked one by one.
        self.before: Callable[[float], None] = _nothing
        self._models: set[ModelName] = set()
        self._since_ms: dict[RequestId, float] = {}
        self._wait_ms_max = wait_ms_max

    def __len__(self) -> int:
        return len(self.queue)

    def models(self) -> set[ModelName]:
        """Those that some call has waited for."""
        return self._models

    def is_waiting_for(self, model: ModelName) -> bool:
        """Whether somebody waits for `model` already; who comes now goes behind."""
        return self.queue.waiting_for(model) > 0

    def wait_ms_of(self, model: ModelName, now_ms: float) -> int:
        """How long who comes now is likely to wait; 0 while nobody does."""
        return self.queue.retry_after_ms(model, int(now_ms)) if self.is_waiting_for(model) else 0

    def place_of(self, job: J, now_ms: float) -> tuple[int, int | None] | None:
        """A waiting call's position from 1 and predicted wait in ms; None when it does not wait."""
        position = self.queue.position(job.id)
        if position is None:
            return None
        return position, self.queue.predicted_wait_ms(job.request, int(now_ms), job.queue_class)

    # ------------------------------------------------------------ in and out

    def enter(self, job: J, cached_tokens: int, now_ms: float) -> Refuse | list[tuple[J, Refuse]]:
        """Let a call wait: why it can not, or who had to leave for it, with what they are told."""
        request = job.request
        if is_postponed_too_far(request):
            return postponed_too_far(job, int(now_ms))
        item = Waiting(
            request,
            job,
            job.prompt_bytes,
            queue_class=job.queue_class,
            cached_tokens=cached_tokens,
            gives_up_ms=self._gives_up_ms(request, int(now_ms)),
            idle_until_ms=job.idle_until_ms,
        )
        entered = self.queue.enter(item, int(now_ms))
        if isinstance(entered, TurnedAway):
            return Refuse(entered.reason, entered.detail, entered.retry_after_ms)
        self._models.add(request.model)
        self._since_ms[job.id] = now_ms
        left = []
        for evicted in entered.evicted:
            del self._since_ms[evicted.request.id]
            refuse = Refuse(
                Reason.QUEUE_FULL,
                "the queue is full and a call of higher priority took the place; come back later",
                self.queue.retry_after_ms(evicted.request.model, int(now_ms)),
            )
            left.append((evicted.ticket, refuse))
        return left

    def remove(self, job: J) -> bool:
        """Its client went away. Whether it waited."""
        self._since_ms.pop(job.id, None)
        return self.queue.remove(job.id) is not None

    def offer(self, now_ms: float) -> tuple[list[tuple[J, Placement | Refuse]], bool]:
        """Offer what is free to those that wait, in order: who left, and whether there may be more.

        A placement has been committed when it is returned.
        """
        left: list[tuple[J, Placement | Refuse]] = []
        self.before(now_ms)

        def ask(item: Waiting[J]) -> Answer:
            job = item.ticket
            outcome = self.place(job, now_ms)
            if isinstance(outcome, Queue):
                return Answer.STAYS
            waited_ms = now_ms - self._since_ms.pop(job.id)
            left.append((job, outcome))
            if isinstance(outcome, Refuse):
                return Answer.LEAVES
            self.waited(job, waited_ms)
            return Answer.GOES

        gone = self.queue.dispatch(
            ask, TRIES_PER_PASS_MAX, int(now_ms), lambda model: self.is_idle(model, now_ms)
        )
        for item in gone:
            item.ticket.charge = self.queue.charge_of(item.request.id)
        return left, len(gone) == TRIES_PER_PASS_MAX

    def expire(self, now_ms: float) -> list[tuple[J, Refuse]]:
        """Who has waited until its deadline or as long as any may, with what it is told."""
        late = []
        for item in self.queue.expire(int(now_ms)):
            self._since_ms.pop(item.request.id, None)
            late.append((item.ticket, self._too_late(item, int(now_ms))))
        return late

    # ------------------------------------------------------------ inside

    def _gives_up_ms(self, request: Request, now_ms: int) -> int:
        """Workflows have deadlines of their own, and what was postponed has time."""
        if request.workflow is not None or request.not_before_ms or request.waits_for_idle:
            return 0
        return now_ms + self._wait_ms_max

    def _too_late(self, item: Waiting[J], now_ms: int) -> Refuse:
        request = item.request
        if request.not_before_ms > now_ms:
            return postponed_too_far(item.ticket, now_ms)
        if now_ms >= request.deadline_ms:
            return Refuse(
                Reason.DEADLINE_UNREACHABLE, "the deadline passed while the call waited", None
            )
        return Refuse(
            Reason.QUEUE_FULL,
            f"no seat became free in {self._wait_ms_max / 1000:g} s",
            self.queue.retry_after_ms(request.model, now_ms),
        )


def is_postponed_too_far(request: Request) -> bool:
    """Whether a rule postpones the call beyond its deadline, so that waiting is in vain."""
    return request.not_before_ms >= request.deadline_ms


def postponed_too_far(job: Waits, now_ms: int) -> Refuse:
    """What such a call is told: when its time comes."""
    request, rule = job.request, job.rule
    return Refuse(
        Reason.DEFERRED,
        f"the rule `{rule}` postpones this call beyond its deadline; send it again with a later one,"
        " or when its time has come",
        request.not_before_ms - now_ms,
        rule=rule,
    )


def _nothing(_: float) -> None: ...
