"""Plans written down as a live Headway would and read back: what comes back is what was written."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.simulate.contracts import Plan, Step
from cli.simulate.recorded import (
    Played,
    RecordedCall,
    RecordedFacts,
    RecordedWorkflow,
    Standing,
    plans_of,
)
from controlplane.domain.catalog import Scope, SloClass
from controlplane.domain.ids import SloClassName

EPOCH_S = 1_700_000_000.0
CALL_S = 2.0
SLO = SloClass(
    name=SloClassName("interactive"), ttft_ms_max=2_000, tpot_ms_max=50, e2e_ms_max=30_000,
    value_micro_usd=50_000, late_micro_usd_per_s=5_000,
)  # fmt: skip


def standing(tenant: str, model: str, scope: Scope, slo_class: str | None) -> Standing:
    del model, scope, slo_class
    return Standing(
        tenant_class="gold", is_allowed=tenant != "banned", priority=7, weight=4.0, slo=SLO
    )


def written(plans: Sequence[Plan]) -> tuple[list[RecordedCall], dict[str, RecordedWorkflow]]:
    """What the journal holds when every step takes CALL_S and finds all that is reusable."""
    calls, workflows = [], {}
    for plan in plans:
        name = f"wf-{plan.number}"
        at_s = EPOCH_S + plan.arrival_s
        if plan.deadline_s is not None:
            workflows[name] = RecordedWorkflow(
                id=name,
                kind=plan.workflow_class,
                scope=plan.scope,
                slo_class="interactive",
                deadline_s=at_s + plan.deadline_s,
            )
        for number, step in enumerate(plan.steps):
            calls.append(
                RecordedCall(
                    id=f"{name}-{number}",
                    tenant=plan.tenant,
                    workflow=name,
                    step=number,
                    model=plan.model,
                    state="succeeded",
                    reason=None,
                    prompt_tokens=step.prompt_tokens,
                    cached_tokens=step.reusable_tokens,
                    completion_tokens=step.completion_tokens,
                    opened_s=at_s,
                    ended_s=at_s + CALL_S,
                )
            )
            at_s += CALL_S + step.gap_s
    return calls, workflows


@st.composite
def many_plans(draw: st.DrawFn) -> list[Plan]:
    """Workflows whose contexts grow, of two tenants; each tenant and kind shares a prefix of its own."""
    plans, at_s = [], 0.0
    for number in range(draw(st.integers(1, 8))):
        tenant = draw(st.sampled_from(("acme", "bolt")))
        kind = draw(st.sampled_from(("coding", "research")))
        shared = {"acme": 512, "bolt": 0}[tenant]
        steps, context = [], shared
        for _ in range(draw(st.integers(1, 6))):
            new = draw(st.integers(1, 5_000))
            steps.append(
                Step(
                    new_tokens=new,
                    reusable_tokens=context,
                    completion_tokens=draw(st.integers(1, 900)),
                    gap_s=float(draw(st.integers(0, 60))),
                )
            )
            context += new
        steps[-1] = replace(steps[-1], gap_s=0.0)
        plans.append(
            Plan(
                number=number,
                tenant=tenant,
                workflow_class=kind,
                arrival_s=at_s,
                steps=tuple(steps),
                deadline_s=float(draw(st.integers(1_000, 9_000))),
                model="small",
                tenant_class="gold",
                priority=7,
                weight=4.0,
                scope=Scope.COPILOT,
                prefix=f"{tenant} small {kind}" if shared else "",
                prefix_tokens=shared,
                ttft_s_max=2.0,
                tpot_s_max=0.05,
                value_usd=0.05,
            )
        )
        at_s += float(draw(st.integers(1, 30)))
    return plans


@settings(max_examples=60, deadline=None)
@given(many_plans())
def test_what_is_written_down_comes_back(plans: list[Plan]) -> None:
    calls, workflows = written(plans)
    # The database tells newest first.
    played = plans_of(calls[::-1], workflows, [], standing)
    assert played.plans == plans
    assert all(ended.is_success for ended in played.ended.values())
    assert not any(played.notes.values())


def call(name: str, **members: object) -> RecordedCall:
    usual = RecordedCall(
        id=name, tenant="acme", workflow=None, step=0, model="small", state="succeeded", reason=None,
        prompt_tokens=1_000, cached_tokens=0, completion_tokens=100, opened_s=EPOCH_S,
        ended_s=EPOCH_S + CALL_S,
    )  # fmt: skip
    return replace(usual, **members)


def refused(name: str, **members: object) -> RecordedFacts:
    usual = RecordedFacts(
        id=name, tenant="acme", model="small", verdict="refuse", reason="shed_overload", at_s=EPOCH_S,
        prompt_tokens=700, scope=Scope.CHAT, kind="", has_workflow=False, step=0, client_retries=0,
    )  # fmt: skip
    return replace(usual, **members)


def replayed(calls: Sequence[RecordedCall], *facts: RecordedFacts) -> Played:
    return plans_of(calls, {}, facts, standing)


def test_a_call_alone_is_a_workflow_of_one_step_due_by_its_slo_class() -> None:
    played = replayed([call("a"), call("b", ended_s=EPOCH_S + 31.0)])
    assert [len(plan.steps) for plan in played.plans] == [1, 1]
    assert {plan.deadline_s for plan in played.plans} == {30.0}
    assert [ended.is_success for ended in played.ended.values()] == [True, False]
    assert played.ended[1].reason == "late"


def test_what_did_not_end_well_gets_the_sizes_of_its_like() -> None:
    cut = call("cut", state="cancelled", prompt_tokens=0, completion_tokens=7)
    played = replayed(
        [call("a"), call("b", prompt_tokens=3_000, completion_tokens=300), cut],
        refused("r"),
        refused("unknown", prompt_tokens=0),
    )
    sizes = sorted(
        (plan.steps[0].prompt_tokens, plan.steps[0].completion_tokens) for plan in played.plans
    )
    assert sizes == [(700, 200), (1_000, 100), (2_000, 200), (2_000, 200), (3_000, 300)]
    assert played.notes["calls whose sizes are estimated"] == 1
    assert played.notes["refused calls, what they needed is estimated"] == 2


def test_later_tries_are_no_further_calls_and_those_that_got_in_are_counted_once() -> None:
    first = [refused(f"r{number}", at_s=EPOCH_S + number) for number in range(6)]
    again = [refused("again", client_retries=1)]
    in_at_last = refused("in", verdict="admit", reason=None, client_retries=1, weight=2)
    played = replayed([call("a")], *first, *again, in_at_last)
    # One call and six first tries, two of which stand for calls that were let in later.
    assert len(played.plans) == 1 + 4
    assert played.notes["refusals of later tries, not played again"] == 1
    assert played.notes["refused calls that were let in later, left out by estimate"] == 2


def test_steps_that_overlap_follow_at_once_and_a_compacted_prompt_keeps_what_was_cached() -> None:
    workflow = RecordedWorkflow(
        id="w", kind="coding", scope=Scope.COPILOT, slo_class="interactive", deadline_s=EPOCH_S + 99
    )
    calls = [
        call("0", workflow="w", prompt_tokens=4_000),
        call("1", workflow="w", step=1, prompt_tokens=900, cached_tokens=256, opened_s=EPOCH_S + 1),
    ]
    (plan,) = plans_of(calls, {"w": workflow}, [], standing).plans
    assert [step.gap_s for step in plan.steps] == [0.0, 0.0]
    assert [step.reusable_tokens for step in plan.steps] == [0, 256]
    assert plan.deadline_s == pytest.approx(99.0)


def test_who_may_not_call_under_a_bundle_is_counted_not_played() -> None:
    played = replayed([call("a", tenant="banned"), call("b")])
    assert [plan.tenant for plan in played.plans] == ["acme"]
    assert played.forbidden == {"banned": 1}
    assert replayed([]).plans == []
