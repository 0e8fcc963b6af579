"""Reasons of an objection, one by one, and the shape of a placement."""

import pytest

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement, Reason
from controlplane.scheduler.place import Objection, place, still_fits
from tests.decision_builders import NOW_MS, call, engine_row

FULL = {"seats_taken": 8}


@pytest.mark.parametrize(
    ("request_", "rows", "reason"),
    [
        (call(), [], Reason.NO_CAPACITY),
        (call(), [engine_row(model="other")], Reason.NO_CAPACITY),
        (call(), [engine_row(is_accepting=False)], Reason.NO_CAPACITY),
        (call(), [engine_row(is_suspect=True)], Reason.NO_CAPACITY),
        (call(), [engine_row(is_accepting=False, is_warm=False, load_ms=9)], Reason.WARMING),
        # It will not be warm in time.
        (call(), [engine_row(is_accepting=False, is_warm=False)], Reason.NO_CAPACITY),
        (call(), [engine_row(**FULL)], Reason.QUEUE_FULL),
        (call(), [engine_row(kv_tokens_taken=99_000)], Reason.QUEUE_FULL),
        (call(), [engine_row(kv_tokens_used=99_000)], Reason.QUEUE_FULL),
        (call(), [engine_row(credits_expire_ms=NOW_MS)], Reason.QUEUE_FULL),
        (call(), [engine_row(seats_capacity=16, running=16, seats_lent=16)], Reason.QUEUE_FULL),
        (call(deadline_ms=NOW_MS + 50), [engine_row()], Reason.DEADLINE_UNREACHABLE),
        # Waiting would not help a call that can not make it anyway.
        (call(deadline_ms=NOW_MS + 50), [engine_row(**FULL)], Reason.DEADLINE_UNREACHABLE),
        (
            call(workflow="w", workflow_remaining_micro_usd=1),
            [engine_row()],
            Reason.INSUFFICIENT_QUOTA,
        ),
        (call(calls_in_flight=8), [engine_row()], Reason.FAN_OUT_EXCEEDED),
        (call(prompt_tokens=100_000), [engine_row()], Reason.CONTEXT_LENGTH_EXCEEDED),
        (call(), [engine_row(kv_tokens_capacity=1_000)], Reason.CONTEXT_LENGTH_EXCEEDED),
        (call(regions=2), [engine_row()], Reason.FORBIDDEN_BY_POLICY),
        # What will pass comes before what will not.
        (call(), [engine_row(0, is_suspect=True), engine_row(1, **FULL)], Reason.QUEUE_FULL),
        (call(), [engine_row(0, region_bit=4), engine_row(1, **FULL)], Reason.QUEUE_FULL),
    ],
)
def test_the_most_informative_reason_is_given(request_, rows, reason):
    outcome = place(request_, rows, {}, NOW_MS)
    assert isinstance(outcome, Objection)
    assert outcome.reason is reason
    assert outcome.is_transient == (reason in {Reason.QUEUE_FULL, Reason.WARMING})


def test_a_prefill_engine_alone_serves_nobody():
    outcome = place(call(), [engine_row(role=Role.PREFILL)], {}, NOW_MS)
    assert isinstance(outcome, Objection)
    assert outcome.reason is Reason.NO_CAPACITY


def test_the_engine_with_the_prompt_wins():
    outcome = place(call(), [engine_row(0), engine_row(1), engine_row(2)], {1: 900}, NOW_MS)
    assert isinstance(outcome, Placement)
    assert outcome.decode.index == 1
    assert (outcome.cached_tokens, outcome.kv_tokens) == (900, 200)


def test_home_is_left_only_when_waiting_there_costs_more():
    # No value: only lateness speaks against waiting at home.
    request = call(home="engine-0", workflow="w", late_micro_usd_per_s=2_000, value_micro_usd=0)
    # Leaving costs 30 x 110 micro-dollars more, as much as 1.65 s of lateness; the target is 2 s.
    stay = place(request, [engine_row(0, prefill_tokens_pending=30_000), engine_row(1)], {}, NOW_MS)
    leave = place(
        request, [engine_row(0, prefill_tokens_pending=40_000), engine_row(1)], {}, NOW_MS
    )
    assert isinstance(stay, Placement)
    assert isinstance(leave, Placement)
    assert (stay.decode.index, leave.decode.index) == (0, 1)


def pair_fleet():
    """Prefill is ten times cheaper on its own engine, far enough to pay for the transfer."""
    return [
        engine_row(0, role=Role.PREFILL, micro_usd_per_ms=0.1),
        engine_row(1, role=Role.DECODE, decode_ms_per_kv_token=0.0001),
        engine_row(2, role=Role.DECODE, region_bit=2, decode_ms_per_kv_token=0.0001),
    ]


def test_a_pair_is_taken_when_it_is_cheaper_and_stays_in_one_region():
    outcome = place(call(), pair_fleet(), {0: 500}, NOW_MS)
    assert isinstance(outcome, Placement)
    assert outcome.prefill is not None
    assert (outcome.prefill.index, outcome.decode.index) == (0, 1)
    assert outcome.cached_tokens == 500
    assert outcome.kv_tokens == 1_100


def test_a_call_that_needs_one_engine_gets_one():
    outcome = place(call(is_single_engine=True), pair_fleet(), {}, NOW_MS)
    assert isinstance(outcome, Placement)
    assert outcome.prefill is None


def test_the_commit_asks_both_engines_again():
    outcome = place(call(), pair_fleet(), {}, NOW_MS)
    assert isinstance(outcome, Placement)
    assert outcome.prefill is not None
    assert still_fits(call(), outcome, NOW_MS)
    outcome.prefill.seats_taken = 8
    assert not still_fits(call(), outcome, NOW_MS)
    outcome.prefill.seats_taken = 0
    outcome.decode.kv_tokens_taken = 99_000
    assert not still_fits(call(), outcome, NOW_MS)
