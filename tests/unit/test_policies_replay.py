"""Recorded calls decided again: verdicts, weights, tenants and reasons, and what no policy decides."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.decision import Reason
from policies.facts import as_json
from policies.replay import ALLOWED, Recorded, Replay, ReplayReport, Verdict, verdict_of
from tests.integration.policy_world import (
    EVENINGS,
    LONG_ANSWERS,
    facts,
    files,
    policy,
    rule,
    tenant,
    without_rules,
)

NIGHTS = rule(
    "nights",
    'tenant.class == "bronze"',
    "defer: {until: {hours: [22, 6]}}",
    '"tenant.class": bronze',
    '"tenant.class": gold',
)
STEPS = rule(
    "steps",
    "workflow.step > 9 || workflow.step == 0",
    "deny: true",
    '"workflow.step": 10',
    '"workflow.step": 9',
    "step",
)
PLAIN, STRICT = policy(without_rules()), policy(files(LONG_ANSWERS, EVENINGS))


def recorded(
    name: str = "q", *, weight: int = 1, ended: tuple[str, str | None, str | None] | None = None,
    who: str = "acme", tenant_class: str = "bronze", **given_: Any,
) -> Recorded:  # fmt: skip
    verdict, reason, rule_name = ended or ("admit", None, None)
    return Recorded(
        request_id=name, verdict=verdict, reason=reason, rule=rule_name, weight=weight,
        facts=as_json(*facts(tenant(who, tenant_class), **given_)),
    )  # fmt: skip


def replayed(bundle: Any, *calls: Recorded) -> ReplayReport:
    again = Replay(bundle)
    again.add_all(calls)
    return again.report()


def changes(report: ReplayReport) -> list[tuple[str, str, str, str, str, int]]:
    return [
        (
            change.tenant, change.reason_before, change.rule_before, change.reason_after,
            change.rule_after, change.calls,
        )
        for change in report.changes
    ]  # fmt: skip


def test_calls_that_end_alike_are_no_change() -> None:
    report = replayed(
        STRICT,
        recorded(weight=32, request__max_tokens=1_000),
        recorded(
            ended=("refuse", "forbidden_by_policy", "made-up/long-answers"),
            request__max_tokens=1_001,
        ),
    )
    assert report.changes == ()
    assert (report.calls, report.calls_changed) == (33, 0)
    assert (report.calls_denied_before, report.calls_denied_after) == (1, 1)
    assert report.fired == {"made-up/long-answers": 1}
    assert report.revision == STRICT.revision


def test_changes_are_told_by_tenant_and_reason_with_their_weights() -> None:
    late = ("refuse", "shed_overload", "made-up/evenings")
    report = replayed(
        STRICT,
        recorded("a", weight=32, request__max_tokens=5_000),
        recorded("b", weight=32, request__max_tokens=5_000),
        recorded("c", who="bolt", weight=32, time__hour=20, tenant__priority=2),
        recorded("d", ended=late, time__hour=3),
        recorded(
            "e", ended=("refuse", "forbidden_by_policy", "old/rule"), request__max_tokens=9_999
        ),
    )
    assert changes(report) == [
        ("acme", "", "", "forbidden_by_policy", "made-up/long-answers", 64),
        ("bolt", "", "", "shed_overload", "made-up/evenings", 32),
        ("acme", "forbidden_by_policy", "old/rule", "forbidden_by_policy",
         "made-up/long-answers", 1),
        ("acme", "shed_overload", "made-up/evenings", "", "", 1),
    ]  # fmt: skip
    assert report.changes[0].examples == ("a", "b")
    assert (report.calls, report.calls_changed) == (98, 98)
    assert (report.calls_denied_before, report.calls_denied_after) == (2, 97)


def test_what_no_policy_decides_stays_as_it_was() -> None:
    calls = [
        recorded(reason, ended=("refuse", reason, None))
        for reason in ("insufficient_quota", "no_capacity", "shed_overload", "queue_full")
    ]
    assert replayed(PLAIN, *calls).changes == ()
    # A policy that now denies is asked first.
    report = replayed(
        STRICT,
        recorded(ended=("refuse", "insufficient_quota", None), request__max_tokens=1_001),
    )
    assert changes(report) == [
        ("acme", "insufficient_quota", "", "forbidden_by_policy", "made-up/long-answers", 1)
    ]
    assert (report.calls_denied_before, report.calls_denied_after) == (1, 1)


def test_entitlements_are_decided_again_too() -> None:
    narrow = without_rules()
    narrow["entitlements.yaml"] = narrow["entitlements.yaml"].replace(
        "gold, silver, bronze", "gold"
    )
    report = replayed(policy(narrow), recorded(), recorded(tenant_class="gold"))
    assert changes(report) == [("acme", "", "", "forbidden_by_policy", "default-deny", 1)]


def test_a_class_gets_the_priority_that_the_other_bundle_gives_it() -> None:
    generous = files(EVENINGS)
    generous["tenant_classes.yaml"] = generous["tenant_classes.yaml"].replace(
        "priority: 2", "priority: 6"
    )
    call = recorded(time__hour=20, tenant__priority=2)
    assert len(replayed(STRICT, call).changes) == 1
    assert replayed(policy(generous), call).changes == ()


def test_steps_are_asked_of_workflows_only_and_postponing_is_no_denial() -> None:
    steps = policy(files(STEPS, NIGHTS))
    report = replayed(
        steps,
        recorded("s", workflow__exists=True, workflow__step=10),
        recorded("t", workflow__exists=False, workflow__step=10, time__hour=12),
        recorded("u", tenant_class="gold", workflow__exists=True, workflow__step=0),
        recorded("v", time__hour=23),
    )
    assert changes(report) == [
        ("acme", "", "", "deferred", "made-up/nights", 1),
        ("acme", "", "", "forbidden_by_policy", "made-up/steps", 1),
    ]
    assert report.calls_denied_after == 1


def test_facts_of_another_version_are_counted_and_left_out() -> None:
    call = recorded(request__max_tokens=5_000)
    odd = [
        Recorded(
            request_id="x", verdict="admit", reason=None, rule=None, weight=32, facts=given_facts
        )
        for given_facts in (
            {**call.facts, "pool.colour": "red"},
            {**call.facts, "request.max_tokens": "many"},
            {**call.facts, "workflow.scope": "galactic"},
        )
    ]
    report = replayed(STRICT, *odd, call)
    assert (report.rows, report.rows_unreadable, report.calls) == (4, 3, 1)


def test_a_verdict_names_the_rule_that_decides() -> None:
    bundle = policy(files(LONG_ANSWERS, EVENINGS, NIGHTS))

    def verdict(**given_: Any) -> Verdict:
        static, live = facts(tenant("acme"), **{"tenant__priority": 2, **given_})
        from policies.documents import Phase

        return verdict_of(bundle.rule(Phase.ADMIT, bundle.static_part(static), live))

    assert verdict(request__max_tokens=1_001, time__hour=20) == Verdict(
        Reason.FORBIDDEN_BY_POLICY, "made-up/long-answers"
    )
    assert verdict(time__hour=20) == Verdict(Reason.SHED_OVERLOAD, "made-up/evenings")
    assert verdict(time__hour=12) == Verdict(Reason.DEFERRED, "made-up/nights")
    assert verdict(tenant__class="gold", time__hour=12) == ALLOWED
    assert [verdict(time__hour=hour).is_denied for hour in (12, 20)] == [False, True]


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_of_the_log_can_be_read(reason: Reason) -> None:
    report = replayed(PLAIN, recorded(ended=("refuse", reason.value, None)))
    is_of_policy = reason in {Reason.FORBIDDEN_BY_POLICY, Reason.POLICY_ERROR, Reason.DEFERRED}
    assert report.calls_changed == is_of_policy


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["acme", "bolt"]),
        st.sampled_from([1, 32]),
        st.sampled_from([999, 1_000, 1_001, 1_002]),
        st.sampled_from(["admitted", "denied", "other"]),
    ),
    max_size=30,
)


@given(CALLS)
def test_sums_are_those_of_a_count_by_hand(calls: list[tuple[str, int, int, str]]) -> None:
    ends = {
        "admitted": ("admit", None, None),
        "denied": ("refuse", "forbidden_by_policy", "made-up/long-answers"),
        "other": ("refuse", "rate_limited", None),
    }
    report = replayed(
        STRICT,
        *(
            recorded(str(at), weight=weight, who=who, ended=ends[end], request__max_tokens=tokens)
            for at, (who, weight, tokens, end) in enumerate(calls)
        ),
    )
    expected: dict[tuple[str, str, str], int] = {}
    for who, weight, tokens, end in calls:
        after = "denied" if tokens > 1_000 else ("other" if end == "other" else "admitted")
        if after != end:
            expected[who, end, after] = expected.get((who, end, after), 0) + weight
    words = {"": "admitted", "forbidden_by_policy": "denied", "rate_limited": "other"}
    assert {
        (change.tenant, words[change.reason_before], words[change.reason_after]): change.calls
        for change in report.changes
    } == expected
    assert report.calls == sum(weight for _, weight, _, _ in calls)
    assert report.calls_changed == sum(expected.values())
