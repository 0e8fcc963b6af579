"""Breakers and deadlines: tables walked pair by pair."""

from itertools import product

import pytest

from controlplane.domain.outcome import FAULTS, AttemptOutcome
from controlplane.domain.pool import BreakerState, OverrideMode
from controlplane.reliability.breaker import (
    FAULTS_IN_A_ROW_MAX,
    OPEN_MS,
    OPEN_MS_MAX,
    POOL_RULES,
    PROBE_MS_MAX,
    PROBES_MAX,
    SLOW_MS_MIN,
    SLOW_TOKENS_MIN,
    SUCCESSES_TO_CLOSE,
    TRANSITIONS,
    WINDOW_MS,
    WINDOW_OUTCOMES_MIN,
    Breaker,
    Event,
    is_slow,
    may_eject,
)
from controlplane.reliability.deadlines import remaining_ms

# An opening of any length has passed.
LATER = 2 * OPEN_MS_MAX

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

EXPECTED = {
    (CLOSED, Event.TRIPPED): OPEN,
    (CLOSED, Event.SLOWED): OPEN,
    (CLOSED, Event.WAITED): CLOSED,
    (CLOSED, Event.RETAINED): CLOSED,
    (CLOSED, Event.PROBE_FAILED): CLOSED,
    (CLOSED, Event.PROBES_SUCCEEDED): CLOSED,
    (OPEN, Event.TRIPPED): OPEN,
    (OPEN, Event.SLOWED): OPEN,
    (OPEN, Event.WAITED): HALF_OPEN,
    (OPEN, Event.RETAINED): HALF_OPEN,
    (OPEN, Event.PROBE_FAILED): OPEN,
    (OPEN, Event.PROBES_SUCCEEDED): OPEN,
    (HALF_OPEN, Event.TRIPPED): HALF_OPEN,
    (HALF_OPEN, Event.SLOWED): HALF_OPEN,
    (HALF_OPEN, Event.WAITED): HALF_OPEN,
    (HALF_OPEN, Event.RETAINED): HALF_OPEN,
    (HALF_OPEN, Event.PROBE_FAILED): OPEN,
    (HALF_OPEN, Event.PROBES_SUCCEEDED): CLOSED,
}


def in_state(state, rules=None):
    breaker = Breaker("e1") if rules is None else Breaker("e1", rules)
    if state is not CLOSED:
        alternate(breaker, WINDOW_OUTCOMES_MIN, 0)
    if state is HALF_OPEN:
        assert breaker.allows(LATER)
    assert breaker.state is state
    return breaker


def fail(breaker, times, now_ms):
    for _ in range(times):
        breaker.record(AttemptOutcome.SERVER_ERROR, now_ms)


def alternate(breaker, total, step_ms):
    for number in range(total):
        outcome = AttemptOutcome.OK if number % 2 else AttemptOutcome.TIMEOUT
        breaker.record(outcome, number * step_ms)


@pytest.mark.parametrize(("state", "event"), list(product(BreakerState, Event)))
def test_every_state_and_event(state, event):
    breaker = in_state(state)
    breaker._apply(event, LATER)
    assert breaker.state is EXPECTED[state, event]
    assert TRANSITIONS.get((state, event), state) is EXPECTED[state, event]


@pytest.mark.parametrize(("state", "outcome"), list(product(BreakerState, AttemptOutcome)))
def test_every_state_and_outcome(state, outcome):
    breaker = in_state(state)
    breaker.began(LATER)
    breaker.record(outcome, LATER)
    is_reopened = state is HALF_OPEN and outcome in FAULTS
    assert breaker.state is (OPEN if is_reopened else state)


@pytest.mark.parametrize("outcome", sorted(FAULTS))
def test_five_faults_in_a_row_open(outcome):
    breaker = Breaker("e1")
    for number in range(FAULTS_IN_A_ROW_MAX):
        assert breaker.allows(number)
        breaker.record(outcome, number)
    assert not breaker.allows(FAULTS_IN_A_ROW_MAX)
    assert breaker.why == "5 calls failed in a row"


@pytest.mark.parametrize("outcome", sorted(set(AttemptOutcome) - FAULTS))
def test_what_is_not_a_fault_never_opens(outcome):
    breaker = Breaker("e1")
    for number in range(100):
        breaker.record(outcome, number)
    assert breaker.allows(100)


def test_neutral_outcomes_do_not_break_a_row_of_faults_but_a_success_does():
    breaker = Breaker("e1")
    fail(breaker, FAULTS_IN_A_ROW_MAX - 1, 0)
    breaker.record(AttemptOutcome.CLIENT_ERROR, 0)
    fail(breaker, 1, 0)
    assert breaker.state is OPEN
    breaker = Breaker("e1")
    fail(breaker, FAULTS_IN_A_ROW_MAX - 1, 0)
    breaker.record(AttemptOutcome.OK, 0)
    fail(breaker, 1, 0)
    assert breaker.state is CLOSED


def test_half_of_enough_outcomes_opens():
    breaker = Breaker("e1")
    alternate(breaker, WINDOW_OUTCOMES_MIN - 1, 1)
    assert breaker.state is CLOSED
    alternate(breaker, WINDOW_OUTCOMES_MIN, 1)
    assert breaker.state is OPEN
    assert breaker.why == "11 of 20 calls failed"


def test_old_outcomes_do_not_count():
    breaker = Breaker("e1")
    alternate(breaker, 200, 2 * WINDOW_MS // WINDOW_OUTCOMES_MIN)
    assert breaker.state is CLOSED


def test_a_row_of_faults_does_not_open_the_breaker_of_a_pool():
    breaker = Breaker("m/eu", POOL_RULES)
    fail(breaker, WINDOW_OUTCOMES_MIN - 1, 0)
    assert breaker.state is CLOSED
    fail(breaker, 1, 0)
    assert breaker.state is OPEN


def test_a_first_token_is_slow_beyond_the_floor_and_the_prediction():
    assert not is_slow(0.0, SLOW_MS_MIN)
    assert is_slow(0.0, SLOW_MS_MIN + 1)
    assert not is_slow(5_000.0, 15_000.0)
    assert is_slow(5_000.0, 15_001.0)


def test_slow_first_tokens_open_an_engine_but_no_pool():
    for rules, expected in ((None, OPEN), (POOL_RULES, CLOSED)):
        breaker = in_state(CLOSED, rules)
        for number in range(SLOW_TOKENS_MIN):
            assert breaker.state is CLOSED
            breaker.first_token(number, is_slow=number >= 2)
        assert breaker.state is expected, rules
    assert breaker.slow_share == 0.8


def test_fewer_slow_first_tokens_than_four_in_five_are_borne():
    breaker = Breaker("e1")
    for number in range(100):
        breaker.first_token(number, is_slow=number % 5 > 1)
    assert breaker.state is CLOSED
    for number in range(100):
        breaker.first_token(2 * WINDOW_MS * number, is_slow=True)
    assert breaker.state is CLOSED, "they are too few to tell"


def test_a_slow_probe_has_failed():
    breaker = in_state(HALF_OPEN)
    breaker.first_token(LATER, is_slow=False)
    assert breaker.state is HALF_OPEN
    breaker.first_token(LATER, is_slow=True)
    assert breaker.state is OPEN


def test_an_open_breaker_waits_and_lets_two_probes_through():
    breaker = in_state(OPEN)
    wait_ms = breaker.waits_ms(0)
    assert 0.8 * OPEN_MS <= wait_ms <= 1.2 * OPEN_MS
    assert not breaker.allows(wait_ms - 1)
    for number in range(PROBES_MAX):
        assert breaker.allows(wait_ms)
        breaker.began(wait_ms + number)
    assert not breaker.allows(wait_ms)
    breaker.record(AttemptOutcome.CANCELLED, wait_ms, wait_ms)
    assert breaker.allows(wait_ms), "a neutral outcome frees the probe's place"


def test_openings_differ_by_name_and_repeat_for_one():
    waits = set()
    for number in range(50):
        breaker = Breaker(f"e{number}")
        fail(breaker, FAULTS_IN_A_ROW_MAX, 0)
        again = Breaker(f"e{number}")
        fail(again, FAULTS_IN_A_ROW_MAX, 0)
        assert breaker.waits_ms(0) == again.waits_ms(0)
        waits.add(breaker.waits_ms(0))
    assert len(waits) > 40
    assert min(waits) < 0.85 * OPEN_MS
    assert max(waits) > 1.15 * OPEN_MS


def test_a_lost_probe_frees_its_place():
    breaker = in_state(HALF_OPEN)
    for _ in range(PROBES_MAX):
        breaker.began(LATER)
    assert not breaker.allows(LATER + PROBE_MS_MAX - 1)
    assert breaker.allows(LATER + PROBE_MS_MAX)


def test_calls_that_began_before_neither_close_nor_reopen():
    breaker = in_state(HALF_OPEN)
    breaker.began(LATER)
    for outcome in AttemptOutcome:
        breaker.record(outcome, LATER + 1, LATER - 1)
    assert breaker.state is HALF_OPEN
    breaker.began(LATER)
    assert not breaker.allows(LATER + 1), "nor did they free the probe's place"


def test_three_successes_close_and_a_fault_doubles_the_wait():
    breaker = in_state(HALF_OPEN)
    for _ in range(SUCCESSES_TO_CLOSE):
        assert breaker.state is HALF_OPEN
        breaker.began(LATER)
        breaker.record(AttemptOutcome.OK, LATER, LATER)
    assert breaker.state is CLOSED

    breaker = in_state(HALF_OPEN)
    now_ms, open_ms = LATER, OPEN_MS
    for _ in range(8):
        fail(breaker, 1, now_ms)
        open_ms = min(OPEN_MS_MAX, 2 * open_ms)
        wait_ms = breaker.waits_ms(now_ms)
        assert 0.8 * open_ms <= wait_ms <= 1.2 * open_ms
        now_ms += wait_ms
        assert breaker.allows(now_ms)


def test_after_closing_the_wait_is_short_again_and_the_window_empty():
    breaker = in_state(HALF_OPEN)
    fail(breaker, 1, LATER)
    assert breaker.allows(2 * LATER)
    for _ in range(SUCCESSES_TO_CLOSE):
        breaker.record(AttemptOutcome.OK, 2 * LATER)
    fail(breaker, FAULTS_IN_A_ROW_MAX - 1, 2 * LATER)
    assert breaker.state is CLOSED
    fail(breaker, 1, 2 * LATER)
    assert breaker.waits_ms(2 * LATER) <= 1.2 * OPEN_MS


def test_who_can_not_be_kept_out_is_probed_by_what_it_gets():
    breaker = in_state(OPEN)
    breaker.retain(1)
    assert breaker.state is HALF_OPEN
    assert breaker.shown is OPEN, "operators still see that it fails"
    for _ in range(SUCCESSES_TO_CLOSE):
        breaker.began(2)
        breaker.record(AttemptOutcome.OK, 2, 2)
    assert (breaker.state, breaker.shown, breaker.is_retained) == (CLOSED, CLOSED, False)
    breaker.retain(3)
    assert not breaker.is_retained


def test_what_works_again_shortens_the_wait_of_what_failed_with_it():
    breaker = in_state(HALF_OPEN)
    now_ms = LATER
    for _ in range(6):
        fail(breaker, 1, now_ms)
        now_ms += LATER
        breaker.allows(now_ms)
    fail(breaker, 1, now_ms)
    assert breaker.waits_ms(now_ms) > 0.8 * OPEN_MS_MAX
    breaker.hasten(now_ms)
    assert breaker.waits_ms(now_ms) <= 1.2 * OPEN_MS


@pytest.mark.parametrize("state", list(BreakerState))
def test_an_operator_goes_before_what_was_seen(state):
    breaker = in_state(state)
    breaker.override = OverrideMode.OPEN
    assert (breaker.allows(LATER), breaker.shown, breaker.is_trusted) == (False, OPEN, False)
    breaker.override = OverrideMode.CLOSED
    for _ in range(PROBES_MAX + 1):
        breaker.began(LATER)
    assert (breaker.allows(LATER), breaker.shown, breaker.is_trusted) == (True, CLOSED, True)
    breaker.override = None
    assert breaker.is_trusted is (state is CLOSED)


def test_a_busy_engine_is_judged_by_a_bounded_memory():
    breaker = Breaker("e1")
    for _ in range(5_000):
        breaker.record(AttemptOutcome.OK, 0)
        breaker.first_token(0, is_slow=False)
    assert len(breaker._outcomes) == len(breaker._tokens) == 1_024


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


def test_deadlines():
    assert remaining_ms(100, 40) == 60
    assert remaining_ms(100, 140) == 0
