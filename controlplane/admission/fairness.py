"""Whose turn it is among tenants that wait for the same pool: virtual token counters with deadlines. No clock.

Every tenant has a counter of the service it was given: uncached prompt tokens plus weighted completion
tokens, divided by its weight (virtual token counter). Fairness asks for the least counter, and
goodput under overload asks for the earliest deadline, so the two are combined as in earliest
eligible virtual deadline first: of the tenants whose counter is at most LEAD_CALLS mean calls above
the least one, the one whose head is due first goes. Inside that lead deadlines decide alone, which
is where order gains; a tenant beyond it waits however urgent its calls say they are, because
deadlines are the caller's own claim. So two tenants that both wait never drift apart by more than
the lead and one call, and the tenant with the least counter is passed over for a bounded amount
of work only.

That is how it is while deadlines are missed, for then somebody's must be, and fairness decides whose. While
nearly all can be kept, the earliest first keeps them, and holding a tenant back would only make some
late: the lead goes with the square of how rarely they are missed.

A tenant that comes back is lifted to the virtual time, less CREDIT_CALLS mean calls: it can not save
up service for an attack, but one that asks for less than its share stays below those that ask
for more, and goes before them.

Flows are bounded: FLOWS_EXACT tenants have one each, the others share SHARDS, each tenant a hand of
HAND of them by hash, so that one heavy tenant can not fill every queue of another's hand.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

# A completion token costs about twice an uncached prompt token.
COMPLETION_WEIGHT: Final = 2
LEAD_CALLS: Final = 4.0
CREDIT_CALLS: Final = 32.0
# While this share of calls misses its deadline, or is about to, the lead is LEAD_CALLS.
MISSED_RATIO: Final = 0.2
MISSED_RATIO_MIN: Final = 0.001
# Where most are missed it is this part of them.
LEAD_RATIO_MIN: Final = 0.5
MISSED_GAIN: Final = 0.02
# How much one call moves the mean that lead and credit are measured in.
MEAN_GAIN: Final = 0.05

FLOWS_EXACT: Final = 64
SHARDS: Final = 128
HAND: Final = 6
# Counters of tenants that wait for nothing at present; who is forgotten comes back as a stranger.
KEPT_MAX: Final = 1_024

FlowKey = str | int

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Leeway:
    """How far deadlines and the past may pull counters apart, in mean calls of the pool."""

    lead_calls: float = LEAD_CALLS
    credit_calls: float = CREDIT_CALLS


LEEWAY: Final = Leeway()


def service_tokens(prompt_uncached: int, completion: int) -> int:
    """What serving a call costs the pool, in the unit that tenants are charged in."""
    return max(1, prompt_uncached + COMPLETION_WEIGHT * completion)


def hand_of(name: str) -> tuple[int, ...]:
    """HAND distinct shards of SHARDS, dealt by the hash of a name."""
    number = xxh3_64_intdigest(name.encode())
    hand: list[int] = []
    for dealt in range(HAND):
        number, card = divmod(number, SHARDS - dealt)
        for taken in sorted(hand):
            if card >= taken:
                card += 1
        hand.append(card)
    return tuple(hand)


class Turn(NamedTuple, Generic[_T]):
    """A place in a flow. `sequence` is unique, so that nothing after it is ever compared."""

    due_ms: float
    sequence: int
    wants: Hashable
    item: _T


class Flow(Generic[_T]):
    """The calls of one tenant, or of the tenants of one shard, first due first; and what they were given.

    `asked` counts the leading turns that the pass under way is done with. `number` tells flows with
    equal counters apart.
    """

    __slots__ = ("asked", "counter", "key", "number", "turns")

    def __init__(self, key: FlowKey, number: int) -> None:
        self.key = key
        self.number = number
        self.counter = 0.0
        self.turns: list[Turn[_T]] = []
        self.asked = 0


class FairFlows(Generic[_T]):
    """Flows that compete for one pool, by the rule of this module.

    A flow is open while it has a turn that the pass under way has not passed over. Open flows stand in
    two sorted lists: by the turn at their head, and by their counter.
    """

    __slots__ = (
        "_by_counter", "_exact", "_flows", "_heads", "_least", "_leeway", "_missed_ratio", "_numbers", "busy",
        "count", "mean_charge", "virtual",
    )  # fmt: skip

    def __init__(self, leeway: Leeway = LEEWAY) -> None:
        self._leeway = leeway
        self._flows: OrderedDict[FlowKey, Flow[_T]] = OrderedDict()
        self._heads: list[tuple[Turn[_T], Flow[_T]]] = []
        self._by_counter: list[tuple[float, int, Flow[_T]]] = []
        self.busy: dict[FlowKey, Flow[_T]] = {}
        self._numbers = 0
        self._missed_ratio = MISSED_RATIO
        self._exact = 0
        # The least counter among those that `first` could choose from.
        self._least = 0.0
        self.count = 0
        self.virtual = 0.0
        self.mean_charge = 0.0

    @property
    def lead_calls(self) -> float:
        """How far deadlines may go before fairness now, in mean calls."""
        spared = MISSED_RATIO / max(self._missed_ratio, MISSED_RATIO_MIN)
        return self._leeway.lead_calls * max(LEAD_RATIO_MIN, spared * spared)

    def judge(self, *, is_missed: bool) -> None:
        """A call missed its deadline, or kept it; or it came and would, by what is due before it."""
        self._missed_ratio += MISSED_GAIN * (is_missed - self._missed_ratio)

    def due_before(self, turn: tuple[float, int]) -> int:
        """Calls that are due before this one, whosever."""
        return sum(bisect_left(flow.turns, turn) for flow in self.busy.values())

    def key_of(self, tenant: str) -> FlowKey:
        """The flow that a call of `tenant` joins now: its own while there is one, else its hand's shortest."""
        if tenant in self.busy or self._exact < FLOWS_EXACT:
            return tenant
        return min(hand_of(tenant), key=self._length)

    def add(self, key: FlowKey, turn: Turn[_T]) -> None:
        flow = self.busy.get(key)
        if flow is None:
            flow = self._lifted(key)
            self.busy[key] = flow
            self._exact += isinstance(key, str)
        self._close(flow)
        insort(flow.turns, turn)
        self._open(flow)
        self.count += 1

    def remove(self, key: FlowKey, turn: Turn[_T]) -> None:
        """Take out a turn that stands in this flow."""
        flow = self.busy[key]
        self._close(flow)
        del flow.turns[bisect_left(flow.turns, turn)]
        self.count -= 1
        if flow.turns:
            self._open(flow)
        else:
            flow.asked = 0
            del self.busy[key]
            self._exact -= isinstance(key, str)
            self._forget()

    def first(self, stuck: set[Hashable]) -> tuple[Flow[_T], Turn[_T]] | None:
        """Whose turn it is, passing over whatever wants something in `stuck` until the pass ends."""
        while self._by_counter:
            self._least, _, last = self._by_counter[0]
            if last.turns[last.asked].wants in stuck:
                self._skip(last, stuck)
                continue
            most = self._least + self.lead_calls * self.mean_charge
            turn, flow = next(head for head in self._heads if head[1].counter <= most)
            if turn.wants in stuck:
                self._skip(flow, stuck)
                continue
            return flow, turn
        return None

    def end_pass(self) -> None:
        """Everything may be asked again."""
        for flow in self.busy.values():
            if flow.asked:
                self._close(flow)
                flow.asked = 0
                self._open(flow)

    def serve(self, flow: Flow[_T], charge: float) -> None:
        """The turn that `first` named leaves for an engine."""
        self.virtual = max(self.virtual, self._least)
        self._move(flow, charge)
        self._learn(charge)

    def charge(self, tenant: str, charge: float) -> FlowKey:
        """A call was served without waiting. While nobody waits, time passes for everyone."""
        flow = self.busy.get(tenant) or self._lifted(tenant)
        self._move(flow, charge)
        self._learn(charge)
        if not self.busy:
            self.virtual = max(self.virtual, flow.counter)
            self._forget()
        return flow.key

    def correct(self, key: FlowKey, difference: float) -> None:
        """What was charged in advance turned out to be `difference` too little (negative: too much)."""
        flow = self._flows.get(key)
        if flow is not None:
            self._move(flow, difference)

    def ahead(self, key: FlowKey, turn: tuple[float, int]) -> int:
        """About how many calls go before this one: those of its flow that are due earlier, and of each
        other flow those that are due earlier as far as fairness lets them.
        """
        mine = self.busy.get(key)
        own = self.ahead_of_own(key, turn)
        known = mine or self._flows.get(key)
        counter = self.virtual if known is None else known.counter
        mean = self.mean_charge or 1.0
        lead_calls = self.lead_calls
        ahead = own
        for flow in self.busy.values():
            if flow is not mine:
                fair = own + lead_calls + (counter - flow.counter) / mean
                ahead += min(bisect_left(flow.turns, turn), max(0, int(fair)))
        return ahead

    def ahead_of_own(self, key: FlowKey, turn: tuple[float, int]) -> int:
        """Calls of the same flow that are due earlier: they go before it in any case."""
        flow = self.busy.get(key)
        return 0 if flow is None else bisect_left(flow.turns, turn)

    # ------------------------------------------------------------ inside

    def _length(self, shard: int) -> int:
        flow = self.busy.get(shard)
        return 0 if flow is None else len(flow.turns)

    def _open(self, flow: Flow[_T]) -> None:
        if flow.asked < len(flow.turns):
            insort(self._heads, (flow.turns[flow.asked], flow))
            insort(self._by_counter, (flow.counter, flow.number, flow))

    def _close(self, flow: Flow[_T]) -> None:
        if flow.asked < len(flow.turns):
            del self._heads[bisect_left(self._heads, (flow.turns[flow.asked],))]
            del self._by_counter[bisect_left(self._by_counter, (flow.counter, flow.number))]

    def _skip(self, flow: Flow[_T], stuck: set[Hashable]) -> None:
        """Pass over the leading turns of a flow that want something in `stuck`."""
        self._close(flow)
        turns, at, end = flow.turns, flow.asked, len(flow.turns)
        while at < end and turns[at].wants in stuck:
            at += 1
        flow.asked = at
        self._open(flow)

    def _move(self, flow: Flow[_T], difference: float) -> None:
        """Change a counter, wherever its flow stands."""
        if flow.asked < len(flow.turns):
            del self._by_counter[bisect_left(self._by_counter, (flow.counter, flow.number))]
            flow.counter += difference
            insort(self._by_counter, (flow.counter, flow.number, flow))
        else:
            flow.counter += difference

    def _lifted(self, key: FlowKey) -> Flow[_T]:
        """The flow of `key`, brought up to the virtual time less its credit. A stranger has none yet."""
        flow = self._flows.get(key)
        least = self.virtual - self._leeway.credit_calls * self.mean_charge
        if flow is None:
            self._numbers += 1
            flow = self._flows[key] = Flow(key, self._numbers)
            flow.counter = self.virtual
        else:
            self._flows.move_to_end(key)
            flow.counter = max(flow.counter, least)
        return flow

    def _forget(self) -> None:
        """Drop counters over the bound, those used longest ago first."""
        while len(self._flows) > KEPT_MAX:
            key = next(iter(self._flows))
            if key in self.busy:
                # At most FLOWS_EXACT + SHARDS are busy, far fewer than are kept.
                self._flows.move_to_end(key)
            else:
                del self._flows[key]

    def _learn(self, charge: float) -> None:
        if self.mean_charge:
            self.mean_charge += MEAN_GAIN * (charge - self.mean_charge)
        else:
            self.mean_charge = charge
