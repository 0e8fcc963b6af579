"""What speaks against a call before any engine is asked, and who may wait."""

from dataclasses import replace

import pytest

from controlplane.admission.decide import decide
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Limits
from controlplane.domain.decision import Admit, Queue, Reason, Refuse
from policies.evaluate import Terms
from tests.decision_builders import NOW_MS, call, engine_row

TERMS = Terms(
    is_allowed=True, denied_by="", region_names=None, gpu_type_names=None, weight=1.0,
    completion_tokens_default=100, completion_tokens_max=1_000, fan_out_max=8, steps_max=10,
    step_gap_ms=0, reserve_ratio=1.0, slo_class=None, may_disaggregate=True,
    priority=5, over_budget_cuts=True, limits=Limits(), cache_ttl_s=0, cache_price_ratio=1.0,
)  # fmt: skip
FULL = (engine_row(seats_taken=8),)


def answer(request, rows=None, terms=TERMS):
    return decide(request, Snapshot(rows or (engine_row(),), {}), terms, NOW_MS)


def test_a_plain_call_is_admitted():
    outcome = answer(call())
    assert isinstance(outcome, Admit)
    assert outcome.placement.decode.engine_id == "engine-0"


@pytest.mark.parametrize(
    ("request_", "terms", "reason", "words"),
    [
        (
            call(),
            replace(TERMS, is_allowed=False, denied_by="no-interns"),
            Reason.FORBIDDEN_BY_POLICY,
            "the rule `no-interns` does not allow `m`",
        ),
        (call(workflow="w", step=10), TERMS, Reason.FORBIDDEN_BY_POLICY, "allows 10 steps"),
        (call(calls_in_flight=8), TERMS, Reason.FAN_OUT_EXCEEDED, "wait for one to end"),
        (
            call(workflow="w", workflow_remaining_micro_usd=0),
            TERMS,
            Reason.INSUFFICIENT_QUOTA,
            "the budget of workflow `w` is spent",
        ),
        (call(deadline_ms=NOW_MS), TERMS, Reason.DEADLINE_UNREACHABLE, "has passed"),
        (
            call(workflow="w", workflow_deadline_ms=NOW_MS),
            TERMS,
            Reason.DEADLINE_UNREACHABLE,
            "the deadline of workflow `w` has passed",
        ),
    ],
)
def test_what_speaks_against_a_call_is_told_with_a_remedy(request_, terms, reason, words):
    outcome = answer(request_, terms=terms)
    assert isinstance(outcome, Refuse)
    assert outcome.reason is reason
    assert words in outcome.detail
    assert outcome.retry_after_ms is None
    assert outcome.rule == terms.denied_by


def test_policy_comes_before_everything_else():
    terms = replace(TERMS, is_allowed=False, denied_by="x")
    outcome = answer(call(calls_in_flight=8, deadline_ms=NOW_MS), terms=terms)
    assert isinstance(outcome, Refuse)
    assert outcome.reason is Reason.FORBIDDEN_BY_POLICY


def test_contention_queues():
    assert answer(call(), FULL) == Queue(Reason.QUEUE_FULL)


def test_a_loading_engine_is_waited_for():
    loading = (engine_row(is_accepting=False, is_warm=False, load_ms=1_000),)
    assert answer(call(), loading) == Queue(Reason.WARMING)


def test_what_waiting_can_not_help_is_refused_at_once():
    outcome = answer(call(), (engine_row(is_suspect=True),))
    assert isinstance(outcome, Refuse)
    assert outcome.reason is Reason.NO_CAPACITY
    assert outcome.retry_after_ms is not None
