"""Calls that wait for room: one queue for all models, its order, its bounds, and what it can tell. No clock.

Calls for a model form a pool. In a pool queue classes share by weight, tenants of a class by virtual
token counters, and among what fairness lets go the earliest workflow deadline goes first
(`fairness.py`). Who waits is bound to an engine only when it leaves, never before. The bounds keep a
burst from eating the process: when the queue is full, what is worth more takes the place of what
is worth less, and a later step of a begun workflow is let in past the bound. The latest instant
that the queue was told is its present.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from heapq import nsmallest
from typing import Final, Generic, TypeVar

from controlplane.admission.displace import Displaceable
from controlplane.admission.fairness import (
    LEEWAY,
    FairFlows,
    Flow,
    FlowKey,
    Leeway,
    Turn,
    service_tokens,
)
from controlplane.admission.order import WEIGHT_MIN, Order, turn_of
from controlplane.admission.predict import DrainRate
from controlplane.domain.decision import Reason
from controlplane.domain.ids import ModelName, RequestId
from controlplane.domain.request import Request
from controlplane.reliability.deadlines import HANG_UP_MS

CALLS_MAX: Final = 4_096
BYTES_MAX: Final = 256 * 1024 * 1024
# Later steps of begun workflows may pass both bounds by this much.
BEGUN_RATIO: Final = 1.25
QUEUE_CLASS: Final = "standard"
CLASS_WEIGHT: Final = 1.0
# Most calls that one arrival may displace, when it is larger than the newest of those worth less.
EVICTIONS_MAX: Final = 16
# The measured rate may double: only what would be late at this part of the wait is called late.
LATE_RATIO: Final = 0.5
RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 60_000
# Told when a pool's rate is not known yet.
RETRY_MS_UNKNOWN: Final = 2_000


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[_T]):
    """One call in the queue: what it is, whom to wake, and the body that it keeps in memory.

    `cached_tokens` of its prompt are thought to be reused and are not charged to its tenant. At
    `gives_up_ms` it has waited as long as any may (0: until its deadline). A call that waits for idle
    capacity is an ordinary one from `idle_until_ms` on (0: never).
    """

    request: Request
    ticket: _T
    body_bytes: int
    queue_class: str = QUEUE_CLASS
    cached_tokens: int = 0
    gives_up_ms: int = 0
    idle_until_ms: int = 0


class Answer(Enum):
    """What can be said to a call that is offered a place.

    GOES: it was placed. LEAVES: it was refused, and nothing is charged. STAYS: what it wants is full,
    so nothing that wants the same is asked in this pass. POOL_FULL: nothing of its model is asked
    again in this pass.
    """

    GOES = auto()
    LEAVES = auto()
    STAYS = auto()
    POOL_FULL = auto()


@dataclass(frozen=True, slots=True)
class Entered(Generic[_T]):
    """The call waits now; `evicted` left the queue for it and must be refused."""

    evicted: tuple[Waiting[_T], ...] = ()


@dataclass(frozen=True, slots=True)
class TurnedAway:
    reason: Reason
    detail: str
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True)
class Charge:
    """What a call was charged in its tenant's counter, so that it can be corrected when it ends."""

    model: ModelName
    queue_class: str
    key: FlowKey
    tokens: int
    weight: float


class _Class(FairFlows["_Entry[_T]"], Generic[_T]):
    """One queue class of a pool: its flows, and its own counter among the classes."""

    __slots__ = ("counter", "name", "weight")

    def __init__(self, name: str, weight: float, leeway: Leeway) -> None:
        super().__init__(leeway)
        self.name = name
        self.weight = weight
        self.counter = 0.0


class _Pool(Generic[_T]):
    """Calls for one model. Catalogues hold few models, so pools are kept for their counters and rate."""

    __slots__ = ("classes", "idle", "model", "rate", "virtual", "waiting")

    def __init__(self, model: ModelName) -> None:
        self.model = model
        self.classes: dict[str, _Class[_T]] = {}
        self.idle: list[Turn[_Entry[_T]]] = []
        self.rate = DrainRate()
        self.virtual = 0.0
        # Calls in the classes, without those that wait for idle capacity; first come, first.
        self.waiting: dict[int, _Entry[_T]] = {}

    def first(
        self, stuck: set[Hashable]
    ) -> tuple[_Class[_T], Flow["_Entry[_T]"], Turn["_Entry[_T]"]] | None:
        """Of the class that was given least for its weight, whose turn it is there."""
        busy = [each for each in self.classes.values() if each.count]
        busy.sort(key=_class_turn)
        for each in busy:
            found = each.first(stuck)
            if found is not None:
                return each, found[0], found[1]
        return None

    def serve(self, queue_class: _Class[_T], flow: Flow["_Entry[_T]"], entry: "_Entry[_T]") -> None:
        """The turn that `first` named leaves for an engine."""
        self.virtual = max(self.virtual, queue_class.counter)
        queue_class.counter += entry.tokens / queue_class.weight
        queue_class.serve(flow, entry.tokens / entry.weight)


@dataclass(slots=True, eq=False)
class _Entry(Generic[_T]):
    """A waiting call and where it stands: in a flow of a class, among the idle, or postponed."""

    item: Waiting[_T]
    sequence: int
    turn: Turn["_Entry[_T]"] | None
    ends_ms: int
    tokens: int
    weight: float
    pool: _Pool[_T]
    queue_class: _Class[_T] | None = None
    key: FlowKey = ""
    wakes_ms: int = 0


class WaitingQueue(Generic[_T]):
    """Owned by one task. `class_weights` are the shares of the queue classes; others weigh CLASS_WEIGHT."""

    __slots__ = (
        "_bytes", "_bytes_max", "_calls_max", "_charges", "_class_weights", "_displaceable", "_entries",
        "_expiry", "_leeway",        "_now_ms", "_order", "_pools", "_sequence", "_sleeping",
    )  # fmt: skip

    def __init__(
        self,
        calls_max: int = CALLS_MAX,
        bytes_max: int = BYTES_MAX,
        order: Order = "deadline",
        class_weights: Mapping[str, float] | None = None,
        leeway: Leeway = LEEWAY,
    ) -> None:
        self._calls_max = calls_max
        self._bytes_max = bytes_max
        self._order: Order = order
        self._class_weights = dict(class_weights or {})
        self._leeway = leeway
        self._entries: dict[RequestId, _Entry[_T]] = {}
        self._pools: dict[ModelName, _Pool[_T]] = {}
        # (instant, sequence, entry), soonest first.
        self._expiry: list[tuple[int, int, _Entry[_T]]] = []
        self._sleeping: list[tuple[int, int, _Entry[_T]]] = []
        self._displaceable: Displaceable[_Entry[_T]] = Displaceable()
        self._charges: dict[RequestId, Charge] = {}
        self._sequence = 0
        self._bytes = 0
        self._now_ms = 0

    # ------------------------------------------------------------ what it holds

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

    def items(self) -> Iterator[Waiting[_T]]:
        """Every call, in no order. The queue must not change while this is read."""
        return (entry.item for entry in self._entries.values())

    def waiting_for(self, model: ModelName) -> int:
        """Calls that want this model now: without postponed ones and those that wait for idle capacity."""
        pool = self._pools.get(model)
        return 0 if pool is None else len(pool.waiting)

    def use_rules(
        self, order: Order, class_weights: Mapping[str, float], leeway: Leeway | None = None
    ) -> None:
        """Go by other rules from now on (`leeway` None: as before); what waits is put in order anew."""
        leeway = leeway or self._leeway
        if order == self._order and class_weights == self._class_weights and leeway == self._leeway:
            return
        self._leeway = leeway
        self._order = order
        self._class_weights = dict(class_weights)
        for entry in self._entries.values():
            self._withdraw(entry)
        for pool in self._pools.values():
            pool.classes.clear()
            pool.virtual = 0.0
        for entry in self._entries.values():
            self._line_up(entry)

    # ------------------------------------------------------------ in

    def enter(self, item: Waiting[_T], now_ms: int) -> Entered[_T] | TurnedAway:
        """Take a call in, if need be in the place of others. Raises ValueError when it waits already."""
        self._now_ms = max(self._now_ms, now_ms)
        request = item.request
        if request.id in self._entries:
            msg = f"request {request.id} waits already"
            raise ValueError(msg)
        if not request.is_begun and self._is_late(item):
            detail = (
                "this tenant's calls that wait already take longer than the deadline allows; send it"
                " with a later deadline, or when they are done"
            )
            retry_ms = self.retry_after_ms(request.model, now_ms)
            self._judge_class(item)
            return TurnedAway(Reason.DEADLINE_UNREACHABLE, detail, retry_ms)
        victims: list[_Entry[_T]] = []
        if not self._has_room(item, BEGUN_RATIO if request.is_begun else 1.0):
            found = self._victims(item)
            if found is None:
                detail = f"{len(self._entries):,} calls wait already; come back later"
                retry_ms = self.retry_after_ms(request.model, now_ms)
                self._judge_class(item)
                return TurnedAway(Reason.QUEUE_FULL, detail, retry_ms)
            victims = found
        for victim in victims:
            _judge(victim, is_missed=True)
            self._drop(victim)
        self._insert(item)
        return Entered(tuple(victim.item for victim in victims))

    # ------------------------------------------------------------ out

    def remove(self, request_id: RequestId) -> Waiting[_T] | None:
        """Take a call out wherever it stands: its client went away."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if self._now_ms >= entry.ends_ms - HANG_UP_MS:
            _judge(entry, is_missed=True)
        self._drop(entry)
        return entry.item

    def expire(self, now_ms: int) -> list[Waiting[_T]]:
        """Take out the calls whose time has come, soonest first, and wake the postponed ones."""
        self._now_ms = max(self._now_ms, now_ms)
        expired: list[Waiting[_T]] = []
        while self._expiry and self._expiry[0][0] <= now_ms:
            entry = self._expiry[0][2]
            _judge(entry, is_missed=True)
            self._drop(entry)
            expired.append(entry.item)
        self._wake()
        return expired

    def dispatch(
        self,
        ask: Callable[[Waiting[_T]], Answer],
        tries_max: int,
        now_ms: int,
        is_idle: Callable[[ModelName], bool] = lambda _: False,
    ) -> list[Waiting[_T]]:
        """Take out, in order, the calls that can go, asking about `tries_max` at most.

        Who goes is charged to its tenant. Calls that wait for idle capacity are asked when nobody else
        waits for their model and `is_idle` of it. `ask` must not change the queue.
        """
        self._now_ms = max(self._now_ms, now_ms)
        self._wake()
        self._charges.clear()
        gone: list[Waiting[_T]] = []
        tries_left = tries_max
        for pool in list(self._pools.values()):
            if not pool.waiting and not pool.idle:
                continue
            if tries_left <= 0:
                break
            tries_left = self._offer(pool, ask, tries_left, gone)
            if tries_left > 0 and pool.idle and not pool.waiting and is_idle(pool.model):
                tries_left = self._offer_idle(pool, ask, tries_left, gone, is_idle)
            if tries_left <= 0:
                # The next pass begins with the others.
                self._pools[pool.model] = self._pools.pop(pool.model)
        return gone

    # ------------------------------------------------------------ fairness

    def charge(
        self, request: Request, queue_class: str = QUEUE_CLASS, cached_tokens: int = 0
    ) -> Charge:
        """Count a call that was placed without waiting."""
        pool = self._pool(request.model)
        each = self._class(pool, queue_class)
        tokens = _tokens(request, cached_tokens)
        weight = max(request.weight, WEIGHT_MIN)
        key = each.charge(self._flow_name(request), tokens / weight)
        return Charge(request.model, each.name, key, tokens, weight)

    def charge_of(self, request_id: RequestId) -> Charge | None:
        """What the last `dispatch` charged for a call that it let go; None when it was not one of them."""
        return self._charges.get(request_id)

    def correct(self, charge: Charge, tokens_used: int) -> None:
        """The call has ended: count what it used instead of what was thought."""
        pool = self._pools.get(charge.model)
        each = None if pool is None else pool.classes.get(charge.queue_class)
        if each is not None:
            each.correct(charge.key, (tokens_used - charge.tokens) / charge.weight)

    # ------------------------------------------------------------ what it can tell

    def soonest(self, model: ModelName, count: int) -> list[Waiting[_T]]:
        """The calls of a model that are due first, at most `count`, whatever fairness makes of their order."""
        pool = self._pools.get(model)
        if pool is None:
            return []
        entries = nsmallest(count, pool.waiting.values(), key=_due)
        return [entry.item for entry in entries]

    def position(self, request_id: RequestId) -> int | None:
        """About the how manieth of its model a call is, from 1; None when it does not wait for its turn.

        Counts what is due earlier, in its class as far as fairness between tenants lets it go before,
        and of the other classes their share. What arrives later is not foreseen.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.turn is None or entry.queue_class is None:
            return None
        return self._rank(entry.pool, entry.queue_class, entry.key, entry.turn[:2])

    def predicted_wait_ms(
        self, request: Request, now_ms: int, queue_class: str = QUEUE_CLASS
    ) -> int | None:
        """How long a call that waits, or would wait from now on, is likely to; None: nothing is known."""
        pool = self._pools.get(request.model)
        if pool is None:
            return None
        rank = self.position(request.id)
        if rank is None:
            each = pool.classes.get(self._class_name(queue_class))
            if each is None:
                rank = len(pool.waiting) + 1
            else:
                key = each.key_of(self._flow_name(request))
                rank = self._rank(pool, each, key, (self._turn_ms(request), self._sequence + 1))
        return pool.rate.wait_ms(rank, now_ms)

    def retry_after_ms(self, model: ModelName, now_ms: int) -> int:
        """When it is worth asking again: when what waits now has left, within limits and without jitter."""
        pool = self._pools.get(model)
        wait_ms = None if pool is None else pool.rate.wait_ms(len(pool.waiting) + 1, now_ms)
        if wait_ms is None:
            return RETRY_MS_UNKNOWN
        return min(RETRY_MS_MAX, max(RETRY_MS_MIN, wait_ms))

    def oldest_wait_ms(self, model: ModelName, now_ms: int) -> int:
        """How long the call has waited that came first; 0 when none waits."""
        pool = self._pools.get(model)
        if pool is None or not pool.waiting:
            return 0
        return max(0, now_ms - next(iter(pool.waiting.values())).item.request.arrival_ms)

    # ------------------------------------------------------------ inside

    def _pool(self, model: ModelName) -> _Pool[_T]:
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = _Pool(model)
        return pool

    def _class_name(self, name: str) -> str:
        return "" if self._order == "arrival" else name

    def _class(self, pool: _Pool[_T], asked: str) -> _Class[_T]:
        name = self._class_name(asked)
        each = pool.classes.get(name)
        if each is None:
            weight = max(self._class_weights.get(name, CLASS_WEIGHT), WEIGHT_MIN)
            each = pool.classes[name] = _Class(name, weight, self._leeway)
        return each

    def _flow_name(self, request: Request) -> str:
        return "" if self._order == "arrival" else request.tenant

    def _turn_ms(self, request: Request) -> float:
        return turn_of(request, self._order)

    def _has_room(self, item: Waiting[_T], ratio: float) -> bool:
        return (
            len(self._entries) < int(self._calls_max * ratio)
            and self._bytes + item.body_bytes <= self._bytes_max * ratio
        )

    def _is_late(self, item: Waiting[_T]) -> bool:
        """Whether its own tenant's calls that go first outlast its deadline even at twice the pool's rate.

        A lower bound: the others are taken to stand back, and the rate to be better than it is.
        """
        request = item.request
        pool = self._pools.get(request.model)
        each = None if pool is None else pool.classes.get(self._class_name(item.queue_class))
        if pool is None or each is None or request.not_before_ms or request.waits_for_idle:
            return False
        turn = (self._turn_ms(request), self._sequence + 1)
        ahead = each.ahead_of_own(each.key_of(self._flow_name(request)), turn)
        wait_ms = pool.rate.wait_ms(ahead, self._now_ms)
        ends_ms = _ends_ms(item)
        return wait_ms is not None and self._now_ms + wait_ms * LATE_RATIO > ends_ms

    def _judge_class(self, item: Waiting[_T]) -> None:
        """A call could not even wait: for its class that is a deadline that is not kept."""
        pool = self._pool(item.request.model)
        self._class(pool, item.queue_class).judge(is_missed=True)

    def _victims(self, item: Waiting[_T]) -> list[_Entry[_T]] | None:
        """The first steps that make room for `item`, or None when there are not enough worth less."""
        ratio = BEGUN_RATIO if item.request.is_begun else 1.0
        calls_over = len(self._entries) + 1 - int(self._calls_max * ratio)
        bytes_over = self._bytes + item.body_bytes - self._bytes_max * ratio
        victims: list[_Entry[_T]] = []
        for victim in self._displaceable.worth_less(item.request):
            if (calls_over <= 0 and bytes_over <= 0) or len(victims) == EVICTIONS_MAX:
                break
            victims.append(victim)
            calls_over -= 1
            bytes_over -= victim.item.body_bytes
        return victims if calls_over <= 0 and bytes_over <= 0 else None

    def _insert(self, item: Waiting[_T]) -> None:
        request = item.request
        self._now_ms = max(self._now_ms, request.arrival_ms)
        self._sequence += 1
        entry = _Entry(
            item=item,
            sequence=self._sequence,
            turn=None,
            ends_ms=_ends_ms(item),
            tokens=_tokens(request, item.cached_tokens),
            weight=max(request.weight, WEIGHT_MIN),
            pool=self._pool(request.model),
        )
        self._entries[request.id] = entry
        self._bytes += item.body_bytes
        insort(self._expiry, (entry.ends_ms, entry.sequence, entry))
        if not request.is_begun:
            self._displaceable.add(request, entry)
        self._line_up(entry)

    def _line_up(self, entry: _Entry[_T]) -> None:
        """Give an entry that stands nowhere its place."""
        item, pool = entry.item, entry.pool
        request = item.request
        turn = Turn(self._turn_ms(request), entry.sequence, _wants(request), entry)
        if request.not_before_ms > self._now_ms:
            entry.wakes_ms = request.not_before_ms
            insort(self._sleeping, (entry.wakes_ms, entry.sequence, entry))
            return
        entry.turn = turn
        if request.waits_for_idle and not 0 < item.idle_until_ms <= self._now_ms:
            insort(pool.idle, turn)
            if item.idle_until_ms:
                entry.wakes_ms = item.idle_until_ms
                insort(self._sleeping, (entry.wakes_ms, entry.sequence, entry))
            return
        each = self._class(pool, item.queue_class)
        if not each.count:
            each.counter = max(each.counter, pool.virtual)
        entry.queue_class = each
        entry.key = each.key_of(self._flow_name(request))
        wait_ms = pool.rate.wait_ms(each.due_before(turn[:2]), self._now_ms)
        if wait_ms is not None and self._now_ms + wait_ms > entry.ends_ms:
            each.judge(is_missed=True)
        each.add(entry.key, turn)
        if not pool.waiting:
            pool.rate.began(self._now_ms)
        pool.waiting[entry.sequence] = entry

    def _withdraw(self, entry: _Entry[_T]) -> None:
        """Take an entry from where it stands; it is still in the queue."""
        pool = entry.pool
        if entry.wakes_ms:
            at = bisect_left(self._sleeping, (entry.wakes_ms, entry.sequence))
            del self._sleeping[at]
            entry.wakes_ms = 0
        if entry.queue_class is not None and entry.turn is not None:
            entry.queue_class.remove(entry.key, entry.turn)
            entry.queue_class = None
            del pool.waiting[entry.sequence]
            if not pool.waiting:
                pool.rate.emptied(self._now_ms)
        elif entry.turn is not None:
            del pool.idle[bisect_left(pool.idle, entry.turn)]
        entry.turn = None

    def _drop(self, entry: _Entry[_T]) -> None:
        """An entry leaves the queue."""
        request = entry.item.request
        self._withdraw(entry)
        del self._entries[request.id]
        self._bytes -= entry.item.body_bytes
        del self._expiry[bisect_left(self._expiry, (entry.ends_ms, entry.sequence))]
        if not request.is_begun:
            self._displaceable.remove(request)

    def _wake(self) -> None:
        while self._sleeping and self._sleeping[0][0] <= self._now_ms:
            entry = self._sleeping[0][2]
            self._withdraw(entry)
            self._line_up(entry)

    def _offer(
        self,
        pool: _Pool[_T],
        ask: Callable[[Waiting[_T]], Answer],
        tries_left: int,
        gone: list[Waiting[_T]],
    ) -> int:
        """Ask a pool's calls in order; the tries that are left."""
        stuck: set[Hashable] = set()
        try:
            while tries_left > 0:
                found = pool.first(stuck)
                if found is None:
                    break
                queue_class, flow, turn = found
                tries_left -= 1
                answer = ask(turn.item.item)
                if answer is Answer.POOL_FULL:
                    break
                if answer is Answer.STAYS:
                    stuck.add(turn.wants)
                    continue
                queue_class.judge(is_missed=answer is Answer.LEAVES)
                if answer is Answer.GOES:
                    entry = turn.item
                    pool.serve(queue_class, flow, entry)
                    pool.rate.left(self._now_ms)
                    self._charges[entry.item.request.id] = Charge(
                        pool.model, queue_class.name, flow.key, entry.tokens, entry.weight
                    )
                self._drop(turn.item)
                gone.append(turn.item.item)
        finally:
            for each in pool.classes.values() if stuck else ():
                each.end_pass()
        return tries_left

    def _offer_idle(
        self,
        pool: _Pool[_T],
        ask: Callable[[Waiting[_T]], Answer],
        tries_left: int,
        gone: list[Waiting[_T]],
        is_idle: Callable[[ModelName], bool],
    ) -> int:
        """Ask the calls that wait for idle capacity for as long as there is some."""
        stuck: set[Hashable] = set()
        for turn in list(pool.idle):
            if tries_left <= 0 or not is_idle(pool.model):
                break
            if turn.wants in stuck:
                continue
            tries_left -= 1
            item = turn.item.item
            answer = ask(item)
            if answer is Answer.POOL_FULL:
                break
            if answer is Answer.STAYS:
                stuck.add(turn.wants)
                continue
            self._drop(turn.item)
            gone.append(item)
            if answer is Answer.GOES:
                self._charges[item.request.id] = self.charge(
                    item.request, item.queue_class, item.cached_tokens
                )
        return tries_left

    def _rank(
        self, pool: _Pool[_T], mine: _Class[_T], key: FlowKey, turn: tuple[float, int]
    ) -> int:
        rank = mine.ahead(key, turn) + 1
        ahead = rank
        for each in pool.classes.values():
            if each is not mine and each.count:
                ahead += min(each.count, int(rank * each.weight / mine.weight))
        return ahead


def _due(entry: _Entry[_T]) -> tuple[float, int]:
    return (0.0, 0) if entry.turn is None else (entry.turn.due_ms, entry.sequence)


def _class_turn(queue_class: _Class[_T]) -> tuple[float, str]:
    return queue_class.counter, queue_class.name


def _judge(entry: _Entry[_T], *, is_missed: bool) -> None:
    if entry.queue_class is not None:
        entry.queue_class.judge(is_missed=is_missed)


def _tokens(request: Request, cached_tokens: int) -> int:
    uncached = max(0, request.prompt_tokens - cached_tokens)
    return service_tokens(uncached, request.completion_tokens_expected)


def _ends_ms(item: Waiting[_T]) -> int:
    deadline_ms = item.request.deadline_ms
    return min(deadline_ms, item.gives_up_ms) if item.gives_up_ms else deadline_ms


def _wants(request: Request) -> Hashable:
    """What must be free for a call: its home, or any engine that it may use."""
    if request.home is not None:
        return (request.home, request.is_preferred)
    return (request.regions, request.gpu_types, request.is_preferred)
