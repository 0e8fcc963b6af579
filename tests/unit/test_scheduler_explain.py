"""Sentences that a person reads."""

import pytest

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Axis, Placement, Reason
from controlplane.scheduler.explain import candidate_name, explain
from controlplane.scheduler.place import place
from tests.decision_builders import NOW_MS, call, engine_row

SHORT = call(prompt_tokens=10, completion_tokens_expected=1)


def told(request, rows, cached=None):
    outcome = place(request, rows, cached or {}, NOW_MS)
    winner = outcome if isinstance(outcome, Placement) else None
    reason = None if isinstance(outcome, Placement) else outcome.reason
    return explain(request, rows, cached or {}, NOW_MS, winner, reason)


def named(index, name, **changes):
    return engine_row(index, engine_id=name, **changes)


def test_cached_tokens_are_the_usual_reason():
    explanation = told(
        call(prompt_tokens=4_100), [named(0, "h100-a"), named(1, "l40s-b")], {0: 3_072}
    )
    assert explanation.winner == "h100-a"
    assert explanation.runner_up == "l40s-b"
    assert explanation.sentence.startswith("h100-a won: $0.000")
    assert explanation.sentence.endswith(
        " on l40s-b, mostly because 3,072 of 4,100 prompt tokens are cached there."
    )


@pytest.mark.parametrize(
    ("request_", "loser", "words"),
    [
        (
            call(),
            {"micro_usd_per_ms": 9.0, "gpu_type": "b200"},
            "its GPU time costs less (h100 against b200)",
        ),
        (call(), {"kv_price_micro_usd_per_token_s": 5.0}, "holding the call's KV there costs less"),
        (SHORT, {"is_warm": False, "load_ms": 900}, "its weights are warm"),
        (
            call(),
            {"flows_micro_usd_per_s": 9.0},
            "it delays and displaces others less there",
        ),
        (call(), {"running": 7}, "its tokens are predicted to come faster, by 69 ms in all"),
        (call(workflow="w"), {"running": 7}, "the workflow ends earlier with it"),
        (call(home="a", workflow="w"), {}, "it holds the context of the steps before"),
        (
            call(),
            {"prefill_tokens_pending": 90_000},
            "its first token is predicted 9,000 ms earlier",
        ),
        (
            call(completion_tokens_expected=1, step_gap_ms=1_000),
            {"kv_price_micro_usd_per_token_s": 0.2},
            "keeping the context there for the next step costs less",
        ),
    ],
)
def test_the_axis_that_made_the_difference_is_told(request_, loser, words):
    explanation = told(request_, [named(0, "a"), named(1, "b", **loser)])
    assert explanation.winner == "a"
    assert words in explanation.sentence


def test_a_tie_is_told_as_one():
    assert "a tie" in told(call(), [named(0, "a"), named(1, "b")]).sentence


def test_a_lone_winner_is_told():
    explanation = told(call(), [named(0, "a"), named(1, "b", is_accepting=False)])
    assert explanation.runner_up is None
    assert "no other engine could take the call" in explanation.sentence
    assert [candidate_name(view) for view in explanation.candidates] == ["a", "b"]


def test_a_refusal_tells_what_every_engine_objected():
    explanation = told(call(), [named(0, "a", seats_taken=8), named(1, "b", is_suspect=True)])
    assert explanation.winner is None
    assert explanation.reason is Reason.QUEUE_FULL
    assert "a: all 8 lent seats are taken" in explanation.sentence
    assert "b: its breaker is open after failures" in explanation.sentence
    assert all(not view.is_feasible for view in explanation.candidates)


def test_many_objections_are_counted():
    rows = [named(index, f"e{index}", seats_taken=8) for index in range(5)]
    assert told(call(), rows).sentence.endswith("; and 2 more.")


def test_a_refusal_before_the_scheduler_says_so():
    explanation = explain(call(), [engine_row()], {}, NOW_MS, None, Reason.INSUFFICIENT_QUOTA)
    assert "before any engine was asked" in explanation.sentence
    assert "insufficient_quota" in explanation.sentence


def test_a_pair_is_shown_with_its_prefill_engine_and_objections_of_both():
    rows = [
        named(0, "p", role=Role.PREFILL, micro_usd_per_ms=0.1),
        named(1, "q", role=Role.PREFILL, seats_taken=8),
        named(2, "d", role=Role.DECODE),
    ]
    explanation = told(call(), rows)
    assert explanation.winner == "p+d"
    assert explanation.runner_up == "d"
    assert "p+d won" in explanation.sentence
    by_name = {candidate_name(view): view for view in explanation.candidates}
    assert not by_name["q"].is_feasible
    kv = next(axis for axis in by_name["q"].axes if axis.axis is Axis.KV_HEADROOM)
    assert kv.objection == "all 8 lent seats are taken"
