"""A breaker under every sequence of events, against a model that keeps everything that happened."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from controlplane.domain.outcome import AttemptOutcome
from controlplane.reliability.breaker import Breaker
from tests.examples import machine_examples

BAD = (
    AttemptOutcome.CONNECT_ERROR, AttemptOutcome.SERVER_ERROR, AttemptOutcome.TIMEOUT,
    AttemptOutcome.BROKEN_STREAM,
)  # fmt: skip
NEUTRAL = (AttemptOutcome.CLIENT_ERROR, AttemptOutcome.BACKPRESSURE, AttemptOutcome.CANCELLED)
# Outcomes are drawn so that each kind is about as likely.
OUTCOMES = st.sampled_from([AttemptOutcome.OK] * 4 + [*BAD, *NEUTRAL])
GAPS_MS = st.sampled_from([0, 1, 400, 999, 4_000, 6_000, 9_999, 10_000, 30_000, 144_000])


class BreakerMachine(RuleBasedStateMachine):
    """One breaker whose caller obeys `allows`, against a list of everything that happened.

    The model knows lists and no windows, deques or counters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker("e1")
        self.now_ms = 0
        self.state = "closed"
        self.since_ms = 0
        self.outcomes: list[tuple[int, bool]] = []
        self.tokens: list[tuple[int, bool]] = []
        self.flying: list[int] = []
        self.successes = 0
        self.failed_probes_in_a_row = 0

    @initialize(start=st.sampled_from(["closed", "open", "half_open"]))
    def begins(self, start: str) -> None:
        """In each state, with three calls under way from before it came about."""
        for _ in range(3):
            self.a_call_is_sent()
        if start != "closed":
            self.now_ms += 1
            self.many_calls_end_at_once(2, "bad")
            self.many_calls_end_at_once(2, "bad")
            self.many_calls_end_at_once(1, "bad")
        if start == "half_open":
            self.now_ms += 6_001
            self.a_call_is_sent()

    @invariant()
    def every_step_has_its_own_instant(self) -> None:
        """So that the model can tell calls that began before from those that began after."""
        self.now_ms += 1

    def moved(self, state: str) -> None:
        self.state, self.since_ms = state, self.now_ms
        self.outcomes, self.tokens, self.successes = [], [], 0

    @rule(gap_ms=GAPS_MS)
    def time_passes(self, gap_ms: int) -> None:
        self.now_ms += gap_ms

    @rule()
    def a_call_is_sent(self) -> None:
        """If it is allowed; the model checks that it was right to allow or refuse it."""
        is_allowed = self.breaker.allows(self.now_ms)
        if self.state == "open":
            waited_ms = self.now_ms - self.since_ms
            whole_ms = min(120_000, 5_000 * 2**self.failed_probes_in_a_row)
            if waited_ms < 0.8 * whole_ms - 1:
                assert not is_allowed, "it tried again too early"
            if waited_ms > 1.2 * whole_ms:
                assert is_allowed, "it did not try again in time"
            if is_allowed:
                self.moved("half_open")
        elif self.state == "half_open":
            probes = sum(
                1
                for began in self.flying
                if began >= self.since_ms and began > self.now_ms - 30_000
            )
            assert is_allowed == (probes < 2)
        else:
            assert is_allowed
        if is_allowed:
            self.breaker.began(self.now_ms)
            self.flying.append(self.now_ms)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=OUTCOMES)
    def a_call_ends(self, data: st.DataObject, outcome: AttemptOutcome) -> None:
        began_ms = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.breaker.record(outcome, self.now_ms, began_ms)
        if outcome in NEUTRAL:
            return
        is_fault = outcome in BAD
        if self.state == "closed":
            self._count(is_fault=is_fault)
        elif self.state == "half_open" and began_ms >= self.since_ms:
            if is_fault:
                self.failed_probes_in_a_row += 1
                self.moved("open")
            else:
                self.successes += 1
                if self.successes == 3:
                    self.moved("closed")

    @rule(burst=st.integers(1, 12), kind=st.sampled_from(["good", "bad"]))
    def many_calls_end_at_once(self, burst: int, kind: str) -> None:
        """Calls of a busy engine, sent and ended at this instant, as long as it is closed."""
        for number in range(burst):
            if self.state != "closed":
                return
            self.breaker.began(self.now_ms)
            outcome = AttemptOutcome.OK if kind == "good" or number % 3 == 2 else BAD[number % 4]
            self.breaker.record(outcome, self.now_ms, self.now_ms)
            self._count(is_fault=outcome in BAD)

    def _count(self, *, is_fault: bool) -> None:
        """A call ended while the breaker was closed."""
        self.outcomes.append((self.now_ms, is_fault))
        recent = [bad for at, bad in self.outcomes if at > self.now_ms - 10_000]
        in_a_row = [bad for _, bad in self.outcomes[-5:]]
        if (len(in_a_row) == 5 and all(in_a_row)) or (
            len(recent) >= 20 and 2 * sum(recent) >= len(recent)
        ):
            self.failed_probes_in_a_row = 0
            self.moved("open")

    @rule(kind=st.sampled_from(["timely", "late"]), times=st.integers(1, 6))
    def first_tokens_come(self, kind: str, times: int) -> None:
        late = kind == "late"
        for _ in range(times):
            self.breaker.first_token(self.now_ms, is_slow=late)
            if self.state == "half_open" and late:
                self.failed_probes_in_a_row += 1
                self.moved("open")
            elif self.state != "half_open":
                self.tokens.append((self.now_ms, late))
                recent = [slow for at, slow in self.tokens if at > self.now_ms - 10_000]
                if (
                    self.state == "closed"
                    and late
                    and len(recent) >= 10
                    and sum(recent) >= 0.8 * len(recent)
                ):
                    self.failed_probes_in_a_row = 0
                    self.moved("open")

    @precondition(lambda self: self.state == "open")
    @rule()
    def it_can_not_be_kept_out(self) -> None:
        self.breaker.retain(self.now_ms)
        self.moved("half_open")
        # Its caller obeys `allows` from here on as well.

    @invariant()
    def it_is_where_the_model_is(self) -> None:
        assert self.breaker.state == self.state


def test_every_sequence() -> None:
    run_state_machine_as_test(
        BreakerMachine,
        settings=settings(
            settings.default, max_examples=machine_examples(100), stateful_step_count=10
        ),
    )
