"""The admission decision: deterministic, monotone in weight, and never without a reason."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controlplane.admission.decide import decide
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Limits, Role
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
    priority=st.just(5),
    over_budget_cuts=st.booleans(),
    limits=st.just(Limits()),
    cache_ttl_s=st.just(0),
    cache_price_ratio=st.just(1.0),
)


def snapshot(fleet, cached):
    return Snapshot(tuple(fleet), cached)


@EXAMPLES
@given(cases(), terms)
def test_the_same_question_has_the_same_answer(many, terms_):
    for request, fleet, cached in many:
        asked = snapshot(fleet, cached)
        assert decide(request, asked, terms_, NOW_MS) == decide(request, asked, terms_, NOW_MS)


@EXAMPLES
@given(cases(), terms, st.sampled_from([2.0, 8.0]))
def test_more_weight_never_turns_admit_into_refuse(many, terms_, factor):
    for request, fleet, cached in many:
        asked = snapshot(fleet, cached)
        if isinstance(decide(request, asked, terms_, NOW_MS), Admit):
            heavier = replace(request, weight=request.weight * factor)
            assert isinstance(decide(heavier, asked, terms_, NOW_MS), Admit)


@EXAMPLES
@given(cases(), terms)
def test_every_answer_is_within_the_rules(many, terms_):
    for request, fleet, cached in many:
        match decide(request, snapshot(fleet, cached), terms_, NOW_MS):
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
                assert terms_.is_allowed
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
        asked = snapshot(fleet, cached)
        if isinstance(decide(request, asked, terms_, NOW_MS), Admit):
            patient = replace(request, deadline_ms=request.deadline_ms + 10_000)
            # It may have time to wait for its home now.
            assert isinstance(decide(patient, asked, terms_, NOW_MS), Admit | Queue)


@EXAMPLES
@given(cases(roles=(Role.BOTH,)), terms)
def test_a_call_leaves_a_home_that_is_full_only_after_waiting(many, terms_):
    for request, fleet, cached in many:
        home = next((row for row in fleet if row.engine_id == request.home), None)
        # A session without a workflow is a hint, and nobody waits for it.
        is_bound = home is not None and request.workflow is not None
        if not is_bound or has_room(home, kv_tokens(request, home, cached)):
            continue
        match decide(request, snapshot(fleet, cached), terms_, NOW_MS):
            case Admit():
                serves = home.model == request.model
                is_usable = serves and home.is_accepting and not home.is_suspect
                is_lent = home.credits_expire_ms > NOW_MS
                is_allowed = home.region_bit & request.regions and home.gpu_bit & request.gpu_types
                given_ms = request.deadline_ms - request.arrival_ms
                waited_ms = NOW_MS - request.arrival_ms
                # Without a cache there nothing is lost by going elsewhere.
                saved_ms = prefill_ms(home, request, 0) - prefill_ms(home, request, cached)
                patience_ms = min(30.0 * saved_ms, 0.5 * given_ms)
                assert not (is_usable and is_lent and is_allowed) or waited_ms >= patience_ms
            case _:
                pass


def has_room(row, kv_tokens_needed):
    return (
        row.seats_taken < min(row.seats_lent, row.seats_bound)
        and row.kv_tokens_taken + kv_tokens_needed <= row.kv_tokens_lent
    )


def kv_tokens(request, row, cached):
    """KV that the call adds on the row at its peak, worked out anew."""
    held = cached.get(row.index, 0)
    return max(0, request.prompt_tokens - held) + request.completion_tokens_expected


def prefill_ms(row, request, cached):
    held = cached.get(row.index, 0) if cached else 0
    new = max(1, request.prompt_tokens - held)
    return new * row.prefill_ms_per_token + row.prefill_ms_per_token_sq * new * (
        request.prompt_tokens - 0.5 * new
    )
