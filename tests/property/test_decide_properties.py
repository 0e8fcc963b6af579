"""The admission decision: deterministic, monotone in weight, and never without a reason."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controlplane.admission.decide import decide
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Role
from controlplane.domain.decision import Admit, Queue, Reason, Refuse
from policies.evaluate import Terms
from tests.decision_builders import NOW_MS
from tests.property.test_place_properties import EXAMPLES, cases, permits

terms = st.builds(
    Terms,
    is_allowed=st.sampled_from([True, True, True, False]),
    denied_by=st.just("a-rule"),
    region_names=st.none(),
    gpu_type_names=st.none(),
    weight=st.just(1.0),
    completion_tokens_default=st.just(1),
    completion_tokens_max=st.just(10),
    fan_out_max=st.just(8),
    steps_max=st.sampled_from([1, 100]),
    step_gap_ms=st.just(0),
    reserve_ratio=st.just(1.0),
    slo_class=st.none(),
    may_disaggregate=st.booleans(),
)
waiting = st.integers(0, 8)


def snapshot(fleet, cached, waiting_now):
    return Snapshot(tuple(fleet), cached, waiting_now, 8)


@EXAMPLES
@given(cases(), terms, waiting)
def test_the_same_question_has_the_same_answer(many, terms_, waiting_now):
    for request, fleet, cached in many:
        asked = snapshot(fleet, cached, waiting_now)
        assert decide(request, asked, terms_, NOW_MS) == decide(request, asked, terms_, NOW_MS)


@EXAMPLES
@given(cases(), terms, waiting, st.sampled_from([2.0, 8.0]))
def test_more_weight_never_turns_admit_into_refuse(many, terms_, waiting_now, factor):
    for request, fleet, cached in many:
        asked = snapshot(fleet, cached, waiting_now)
        if isinstance(decide(request, asked, terms_, NOW_MS), Admit):
            heavier = replace(request, weight=request.weight * factor)
            assert isinstance(decide(heavier, asked, terms_, NOW_MS), Admit)


@EXAMPLES
@given(cases(), terms, waiting)
def test_every_answer_is_within_the_rules(many, terms_, waiting_now):
    for request, fleet, cached in many:
        match decide(request, snapshot(fleet, cached, waiting_now), terms_, NOW_MS):
            case Admit(placement):
                assert terms_.is_allowed
                assert request.calls_in_flight < request.fan_out_max
                assert permits(placement.decode, request, placement.kv_tokens)
                assert terms_.may_disaggregate or placement.prefill is None
                if request.workflow is not None:
                    assert request.workflow_remaining_micro_usd > 0
                    assert request.workflow_deadline_ms > NOW_MS
                    assert request.step < terms_.steps_max
            case Queue(reason):
                assert reason in {Reason.QUEUE_FULL, Reason.WARMING}
                assert waiting_now < 8
                assert terms_.is_allowed
                # First steps leave two of eight places to later ones.
                assert (request.workflow is not None and request.step > 0) or waiting_now < 6
            case Refuse(reason, detail, retry_after_ms):
                assert isinstance(reason, Reason)
                assert detail
                assert retry_after_ms is None or retry_after_ms > 0
                if reason in {Reason.FORBIDDEN_BY_POLICY, Reason.INSUFFICIENT_QUOTA}:
                    assert retry_after_ms is None


@EXAMPLES
@given(cases(roles=(Role.BOTH,)), terms)
def test_a_longer_deadline_never_turns_admit_into_refuse(many, terms_):
    for request, fleet, cached in many:
        asked = snapshot(fleet, cached, 0)
        if isinstance(decide(request, asked, terms_, NOW_MS), Admit):
            patient = replace(request, deadline_ms=request.deadline_ms + 10_000)
            assert isinstance(decide(patient, asked, terms_, NOW_MS), Admit)
