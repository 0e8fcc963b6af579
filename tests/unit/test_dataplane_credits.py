"""The credit book: what replicas believe they hold is never more than there is, whatever is lost
or late.
"""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dataplane.agent.credits import CREDIT_TTL_MS, UNKNOWN_WORK_MS_MAX, CreditBook, fair_shares

E = "e"
TTL = 10
REPLICAS = ("a", "b", "c")
AMOUNTS = st.tuples(st.integers(0, 6), st.integers(0, 12))


class Replica:
    """A replica as the protocol asks it to be: it trusts no credit after the time it asked plus
    the TTL.
    """

    def __init__(self) -> None:
        self.lent = (0, 0)
        self.expires = 0
        self.taken = (0, 0)

    def usable(self, now: int) -> tuple[int, int]:
        return self.lent if now < self.expires else (0, 0)

    def in_flight_max(self, now: int) -> tuple[int, int]:
        """Calls that run, and those it may still start."""
        usable = self.usable(now)
        return max(usable[0], self.taken[0]), max(usable[1], self.taken[1])


class CreditMachine(RuleBasedStateMachine):
    """The oracle is the replicas' own view. It never looks into the book."""

    @initialize(capacity=st.tuples(st.integers(0, 6), st.integers(0, 12)))
    def build(self, capacity: tuple[int, int]) -> None:
        self.book = CreditBook(TTL)
        self.book.open(E, capacity)
        self.capacity = capacity
        self.now = 0
        self.replicas = {name: Replica() for name in REPLICAS}

    @rule(name=st.sampled_from(REPLICAS), want=AMOUNTS, is_lost=st.booleans())
    def ask(self, name: str, want: tuple[int, int], *, is_lost: bool) -> None:
        replica = self.replicas[name]
        held = replica.in_flight_max(self.now)
        granted = self.book.ask(name, {E: want}, {E: held}, self.now)[E]
        assert granted[0] <= want[0]
        assert granted[1] <= want[1]
        if not is_lost:
            replica.lent = granted
            replica.expires = self.now + TTL

    @rule(name=st.sampled_from(REPLICAS), want=AMOUNTS)
    def request_is_lost(self, name: str, want: tuple[int, int]) -> None:
        """Nothing reaches the agent, and nothing changes."""

    @rule(name=st.sampled_from(REPLICAS), data=st.data())
    def take(self, name: str, data: st.DataObject) -> None:
        replica = self.replicas[name]
        usable = replica.usable(self.now)
        seats = data.draw(st.integers(replica.taken[0], max(replica.taken[0], usable[0])))
        tokens = data.draw(st.integers(replica.taken[1], max(replica.taken[1], usable[1])))
        replica.taken = (seats, tokens)

    @rule(name=st.sampled_from(REPLICAS))
    def finish(self, name: str) -> None:
        self.replicas[name].taken = (0, 0)

    @rule(step=st.integers(1, TTL))
    def wait(self, step: int) -> None:
        """Time passes; a replica that lets its credits run out has finished its calls by then."""
        self.now += step
        for replica in self.replicas.values():
            if self.now >= replica.expires:
                replica.taken = (0, 0)
        self.book.expire(self.now)

    @rule()
    def pause(self) -> None:
        self.book.close(E)
        self.book.open(E, self.capacity)

    @invariant()
    def never_more_than_there_is(self) -> None:
        if not hasattr(self, "book"):
            return
        for side in (0, 1):
            believed = sum(r.in_flight_max(self.now)[side] for r in self.replicas.values())
            assert believed <= self.capacity[side]
            assert self.book.lent(E)[side] <= self.capacity[side]


TestCredits = CreditMachine.TestCase


def dealt(capacity: int, wants: Sequence[int]) -> list[int]:
    """One by one to who has least and wants more: the same division, found the slow way."""
    shares = [0] * len(wants)
    for _ in range(capacity):
        hungry = [at for at in range(len(wants)) if shares[at] < wants[at]]
        if not hungry:
            break
        shares[min(hungry, key=lambda at: (shares[at], at))] += 1
    return shares


@given(st.integers(0, 12), st.lists(st.integers(0, 6), max_size=5))
def test_shares_are_max_min_fair(capacity: int, wants: list[int]) -> None:
    assert fair_shares(capacity, wants) == dealt(capacity, wants)


@given(st.integers(0, 12), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 9))
def test_the_turn_moves_only_the_indivisible_rest(
    capacity: int, wants: list[int], first: int
) -> None:
    turned = fair_shares(capacity, wants, first)
    assert sum(turned) == sum(fair_shares(capacity, wants))
    for share, other in zip(turned, fair_shares(capacity, wants), strict=True):
        assert abs(share - other) <= 1


def ask(book: CreditBook, name: str, want: tuple[int, int], now: int = 0) -> tuple[int, int]:
    return book.ask(name, {E: want}, {}, now)[E]


def opened(seats: int = 10, tokens: int = 100) -> CreditBook:
    book = CreditBook()
    book.open(E, (seats, tokens))
    return book


def test_asking_again_changes_nothing() -> None:
    book = opened()
    assert ask(book, "a", (4, 40)) == (4, 40)
    assert ask(book, "a", (4, 40)) == (4, 40)
    assert book.lent(E) == (4, 40)


def test_zero_returns_everything() -> None:
    book = opened()
    ask(book, "a", (10, 100))
    ask(book, "a", (0, 0))
    assert book.lent(E) == (0, 0)
    assert ask(book, "b", (10, 100)) == (10, 100)


def test_two_that_want_all_come_to_a_half_each() -> None:
    book = opened()
    assert ask(book, "a", (10, 100)) == (10, 100)
    assert ask(book, "b", (10, 100)) == (0, 0)
    assert ask(book, "a", (10, 100)) == (5, 50)
    assert ask(book, "b", (10, 100)) == (5, 50)


def test_a_dead_replicas_credits_end() -> None:
    book = opened()
    ask(book, "a", (10, 100))
    assert ask(book, "b", (10, 100), CREDIT_TTL_MS - 1) == (0, 0)
    assert ask(book, "b", (10, 100), CREDIT_TTL_MS) == (10, 100)


def test_no_replica_is_always_the_last() -> None:
    book = opened(1, 100)
    seen = set()
    for turn in range(4):
        now = turn * CREDIT_TTL_MS
        for name in ("a", "b", "a", "b"):
            if ask(book, name, (1, 1), now)[0]:
                seen.add(name)
    assert seen == {"a", "b"}


def test_a_closed_engine_lends_no_more() -> None:
    book = opened()
    ask(book, "a", (4, 40))
    book.close(E)
    assert ask(book, "a", (9, 90)) == (4, 40)
    assert ask(book, "a", (2, 20)) == (2, 20)
    assert ask(book, "b", (1, 1)) == (0, 0)


def test_unknown_work_is_held_back_until_it_drains() -> None:
    book = opened()
    book.note_unknown(E, (6, 60), 0)
    assert ask(book, "a", (10, 100)) == (4, 40)
    book.observe(E, (8, 80), 1)
    assert ask(book, "a", (10, 100)) == (4, 40)
    book.observe(E, (2, 30), 2)
    assert ask(book, "a", (10, 100)) == (8, 70)
    book.observe(E, (5, 50), 3)
    assert ask(book, "a", (10, 100)) == (8, 70)
    book.observe(E, (0, 5), 4)
    assert ask(book, "a", (10, 100)) == (10, 100)


def test_unknown_work_is_not_held_back_for_ever() -> None:
    book = opened()
    book.note_unknown(E, (6, 60), 0)
    book.observe(E, (9, 90), UNKNOWN_WORK_MS_MAX)
    assert ask(book, "a", (10, 100)) == (10, 100)


def test_a_smaller_engine_voids_what_it_can_not_hold() -> None:
    book = opened()
    ask(book, "a", (10, 100))
    book.open(E, (4, 40))
    assert book.lent(E) == (0, 0)
    assert ask(book, "a", (10, 100)) == (4, 40)


def test_nonsense_is_worth_nothing() -> None:
    book = opened()
    assert book.ask("a", {"other": (1, 1)}, {}, 0) == {"other": (0, 0)}
    assert ask(book, "a", (-5, 7)) == (0, 7)
    assert book.ask("b", {E: (1, 1)}, {E: (99, 999)}, 0)[E] == (1, 1)
    assert book.lent(E) == (10, 100)
