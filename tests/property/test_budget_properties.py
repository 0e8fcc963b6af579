"""A slice of a budget under any order of calls: money is neither made nor lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.admission.budget import Slice
from tests.examples import machine_examples

AMOUNT = st.integers(0, 6)


class SliceAgainstBooks(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slice = Slice()
        self.held = []  # open reservations
        self.leased = self.charged = self.surrendered = 0

    @rule(amount=AMOUNT)
    def grow(self, amount):
        self.slice.grow(amount)
        self.leased += amount

    @rule(amount=AMOUNT)
    def reserve(self, amount):
        had = self.leased - self.charged - self.surrendered - sum(self.held)
        assert self.slice.reserve(amount) == (amount <= had)
        if amount <= had:
            self.held.append(amount)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), actual=AMOUNT)
    def settle(self, data, actual):
        reserved = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        free = self.leased - self.charged - self.surrendered - sum(self.held) - reserved
        charged = self.slice.settle(reserved, actual)
        assert charged == min(actual, reserved + free)
        self.charged += charged

    @rule(keep=AMOUNT)
    def surrender(self, keep):
        free = self.leased - self.charged - self.surrendered - sum(self.held)
        given = self.slice.surrender(keep)
        assert given == max(0, free - keep)
        self.surrendered += given

    @rule(extra=st.integers(1, 5))
    def a_second_settlement_is_a_defect(self, extra):
        with pytest.raises(ValueError, match="reserved"):
            self.slice.settle(sum(self.held) + extra, 0)

    @invariant()
    def money_adds_up(self):
        assert self.slice.free >= 0
        assert self.slice.reserved == sum(self.held)
        assert self.leased == (
            self.slice.free + self.slice.reserved + self.charged + self.surrendered
        )


TestSliceAgainstBooks = SliceAgainstBooks.TestCase
TestSliceAgainstBooks.settings = settings(
    max_examples=machine_examples(200), stateful_step_count=30, deadline=None
)


@pytest.mark.parametrize("method", ["grow", "reserve", "surrender"])
def test_negative_amounts_are_defects(method):
    with pytest.raises(ValueError, match="negative"):
        getattr(Slice(), method)(-1)
