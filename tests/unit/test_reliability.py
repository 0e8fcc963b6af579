"""Breakers, retry budgets and deadlines: tables walked pair by pair."""

from itertools import product

import pytest

from controlplane.domain.outcome import FAULTS, AttemptOutcome
from controlplane.reliability.breaker import (
    FAULTS_IN_A_ROW_MAX,
    OPEN_MS,
    OPEN_MS_MAX,
    PROBE_MS_MAX,
    PROBES_MAX,
    SUCCESSES_TO_CLOSE,
    TRANSITIONS,
    WINDOW_MS,
    WINDOW_OUTCOMES_MIN,
    Breaker,
    Event,
    State,
    may_eject,
)
from controlplane.reliability.deadlines import remaining_ms
from controlplane.reliability.retry_budget import RetryBudget

EXPECTED = {
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.CLOSED, Event.WAITED): State.CLOSED,
    (State.CLOSED, Event.PROBE_FAILED): State.CLOSED,
    (State.CLOSED, Event.PROBES_SUCCEEDED): State.CLOSED,
    (State.OPEN, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.WAITED): State.HALF_OPEN,
    (State.OPEN, Event.PROBE_FAILED): State.OPEN,
    (State.OPEN, Event.PROBES_SUCCEEDED): State.OPEN,
    (State.HALF_OPEN, Event.TRIPPED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.WAITED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.PROBE_FAILED): State.OPEN,
    (State.HALF_OPEN, Event.PROBES_SUCCEEDED): State.CLOSED,
}


def in_state(state):
    breaker = Breaker()
    if state is not State.CLOSED:
        fail(breaker, FAULTS_IN_A_ROW_MAX, 0)
    if state is State.HALF_OPEN:
        assert breaker.allows(OPEN_MS)
    assert breaker.state is state
    return breaker


def fail(breaker, times, now_ms):
    for _ in range(times):
        breaker.record(AttemptOutcome.SERVER_ERROR, now_ms)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_state_and_event(state, event):
    breaker = in_state(state)
    breaker._apply(event, OPEN_MS)
    assert breaker.state is EXPECTED[state, event]
    assert TRANSITIONS.get((state, event), state) is EXPECTED[state, event]


@pytest.mark.parametrize(("state", "outcome"), list(product(State, AttemptOutcome)))
def test_every_state_and_outcome(state, outcome):
    breaker = in_state(state)
    breaker.began(OPEN_MS)
    breaker.record(outcome, OPEN_MS)
    is_reopened = state is State.HALF_OPEN and outcome in FAULTS
    assert breaker.state is (State.OPEN if is_reopened else state)


@pytest.mark.parametrize("outcome", sorted(FAULTS))
def test_five_faults_in_a_row_open(outcome):
    breaker = Breaker()
    for number in range(FAULTS_IN_A_ROW_MAX):
        assert breaker.allows(number)
        breaker.record(outcome, number)
    assert not breaker.allows(FAULTS_IN_A_ROW_MAX)


@pytest.mark.parametrize("outcome", sorted(set(AttemptOutcome) - FAULTS))
def test_what_is_not_a_fault_never_opens(outcome):
    breaker = Breaker()
    for number in range(100):
        breaker.record(outcome, number)
    assert breaker.allows(100)


def test_neutral_outcomes_do_not_break_a_row_of_faults_but_a_success_does():
    breaker = Breaker()
    fail(breaker, FAULTS_IN_A_ROW_MAX - 1, 0)
    breaker.record(AttemptOutcome.CLIENT_ERROR, 0)
    fail(breaker, 1, 0)
    assert breaker.state is State.OPEN
    breaker = Breaker()
    fail(breaker, FAULTS_IN_A_ROW_MAX - 1, 0)
    breaker.record(AttemptOutcome.OK, 0)
    fail(breaker, 1, 0)
    assert breaker.state is State.CLOSED


def alternate(breaker, total, step_ms):
    for number in range(total):
        outcome = AttemptOutcome.OK if number % 2 else AttemptOutcome.TIMEOUT
        breaker.record(outcome, number * step_ms)


def test_half_of_enough_outcomes_opens():
    breaker = Breaker()
    alternate(breaker, WINDOW_OUTCOMES_MIN - 1, 1)
    assert breaker.state is State.CLOSED
    alternate(breaker, WINDOW_OUTCOMES_MIN, 1)
    assert breaker.state is State.OPEN


def test_old_outcomes_do_not_count():
    breaker = Breaker()
    alternate(breaker, 200, 2 * WINDOW_MS // WINDOW_OUTCOMES_MIN)
    assert breaker.state is State.CLOSED


def test_an_open_breaker_waits_and_lets_three_probes_through():
    breaker = in_state(State.OPEN)
    assert not breaker.allows(OPEN_MS - 1)
    for _ in range(PROBES_MAX):
        assert breaker.allows(OPEN_MS)
        breaker.began(OPEN_MS)
    assert not breaker.allows(OPEN_MS)
    breaker.record(AttemptOutcome.CANCELLED, OPEN_MS)
    assert breaker.allows(OPEN_MS)


def test_a_lost_probe_frees_its_place():
    breaker = in_state(State.HALF_OPEN)
    for _ in range(PROBES_MAX):
        breaker.began(OPEN_MS)
    assert not breaker.allows(OPEN_MS + PROBE_MS_MAX - 1)
    assert breaker.allows(OPEN_MS + PROBE_MS_MAX)


def test_three_successes_close_and_a_fault_doubles_the_wait():
    breaker = in_state(State.HALF_OPEN)
    for _ in range(SUCCESSES_TO_CLOSE):
        assert breaker.state is State.HALF_OPEN
        breaker.began(OPEN_MS)
        breaker.record(AttemptOutcome.OK, OPEN_MS)
    assert breaker.state is State.CLOSED

    breaker = in_state(State.HALF_OPEN)
    now_ms, open_ms = OPEN_MS, OPEN_MS
    for _ in range(8):
        fail(breaker, 1, now_ms)
        open_ms = min(OPEN_MS_MAX, 2 * open_ms)
        assert not breaker.allows(now_ms + open_ms - 1)
        now_ms += open_ms
        assert breaker.allows(now_ms)


def test_after_closing_the_wait_is_short_again_and_the_window_empty():
    breaker = in_state(State.HALF_OPEN)
    fail(breaker, 1, OPEN_MS)
    now_ms = OPEN_MS + 2 * OPEN_MS
    assert breaker.allows(now_ms)
    for _ in range(SUCCESSES_TO_CLOSE):
        breaker.record(AttemptOutcome.OK, now_ms)
    fail(breaker, FAULTS_IN_A_ROW_MAX - 1, now_ms)
    assert breaker.state is State.CLOSED
    fail(breaker, 1, now_ms)
    assert breaker.allows(now_ms + OPEN_MS)


def test_a_busy_engine_is_judged_by_a_bounded_memory():
    breaker = Breaker()
    for _ in range(5_000):
        breaker.record(AttemptOutcome.OK, 0)
    assert len(breaker._outcomes) <= 1_024


@pytest.mark.parametrize(
    ("ejected", "pool", "expected"),
    [
        (0, 1, False),
        (0, 2, True),
        (1, 2, False),
        (1, 4, True),
        (2, 4, False),
        (2, 5, False),
        (0, 0, False),
    ],
)
def test_at_most_half_of_a_pool_is_kept_out_and_never_the_last(ejected, pool, expected):
    assert may_eject(ejected, pool) is expected


def test_a_quiet_tenant_may_retry_once_a_second():
    budget = RetryBudget()
    assert sum(budget.try_spend(0) for _ in range(11)) == 10


def test_memory_of_a_retry_budget_does_not_grow_with_traffic():
    budget = RetryBudget()
    for number in range(50_000):
        budget.note_request(number)
    assert len(budget._requests._slices) <= WINDOW_MS // 100 + 1


def test_deadlines():
    assert remaining_ms(100, 40) == 60
    assert remaining_ms(100, 140) == 0
