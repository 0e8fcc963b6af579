"""Placement against oracles that share no code with it: an exhaustive search, and a checker of rights."""

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement, Reason
from controlplane.scheduler.axes import AXES
from controlplane.scheduler.explain import candidate_name, explain
from controlplane.scheduler.legs import DECODE, PREFILL, WHOLE
from controlplane.scheduler.perf_model import Forecast
from controlplane.scheduler.place import RETRY_AFTER_MS_MAX, RETRY_AFTER_MS_MIN, Objection, place
from tests.decision_builders import NOW_MS, call, engine_row

EXAMPLES = settings(max_examples=150)
CASES_PER_EXAMPLE = 20
APART = (Role.PREFILL, Role.DECODE, Role.DECODE)


def mostly(random, usual, *others):
    """`usual` five times out of six: most limits are met, so that calls fit and one limit decides."""
    return random.choice(others) if random.randrange(6) == 0 else usual


def a_row(random, index, role, twin):
    """An engine with limits near the sizes of calls; a copy of `twin` half of the time."""
    if twin is not None and random.random() < 0.5:
        fields = {**twin, "role": random.choice([twin["role"], role])}
    else:
        fields = {
            "role": role,
            "region_bit": mostly(random, 1, 2),
            "gpu_bit": mostly(random, 1, 2),
            "model": mostly(random, "m", "other"),
            "context_tokens_max": mostly(random, 20, 4, 7),
            "kv_tokens_capacity": mostly(random, 20, 12, 9, 5),
            "seats_capacity": mostly(random, 20, 1, 2),
            "micro_usd_per_ms": random.choice([1.0, 1.0, 0.5, 3.0]),
            "prefill_base_ms": random.choice([1.0, 5.0, 5.0, 50.0]),
            "decode_ms_base": mostly(random, 10.0, 50.0),
            "load_ms": random.choice([10, 1_000]),
            "is_accepting": mostly(random, True, False),  # noqa: FBT003
            "is_suspect": mostly(random, False, True),  # noqa: FBT003
            "is_warm": mostly(random, True, False),  # noqa: FBT003
            "running": random.choice([0, 0, 1, 18, 19]),
            "waiting": mostly(random, 0, 1),
            "kv_tokens_used": random.randint(0, 6),
            "seats_lent": random.randint(1, 3),
            "seats_taken": mostly(random, 0, 1, 2, 3),
            "kv_tokens_lent": random.randint(4, 14),
            "kv_tokens_taken": random.randint(0, 4),
            "credits_expire_ms": NOW_MS + mostly(random, 2, 1, 0),
            "flows_micro_usd_per_s": random.choice([0.0, 0.0, 200.0, 5_000.0]),
            "flows_ms_per_step": random.choice([0.0, 5.0]),
            "bid_micro_usd": random.choice([0.0, 6_000.0]),
            "offered_ratio": random.choice([0.0, 0.5, 1.0]),
            "prefill_tokens_pending": 0
            if role is Role.PREFILL
            else random.choice([0, 0, 2_000, 20_000]),
        }
    return engine_row(index, **fields), fields


def a_call(random):
    workflow = random.choice([None, "w"])
    return call(
        id=f"req-{random.randrange(100)}",
        arrival_ms=NOW_MS - mostly(random, 0, 3_000),
        prompt_tokens=random.randint(1, 6),
        completion_tokens_expected=random.randint(0, 4),
        regions=mostly(random, 3, 0, 1, 2),
        gpu_types=mostly(random, 3, 0, 1, 2),
        weight=random.choice([0.5, 1.0, 2.0, 4.0]),
        ttft_ms_max=random.choice([20, 2_000]),
        tpot_ms_max=random.choice([5, 100]),
        deadline_ms=NOW_MS + mostly(random, 60_000, 1, 12, 60, 200),
        late_micro_usd_per_s=random.choice([100, 100, 100_000]),
        workflow=workflow,
        step=random.randint(0, 2),
        steps_expected=random.randint(1, 3),
        workflow_deadline_ms=NOW_MS + mostly(random, 60_000, 50),
        workflow_remaining_micro_usd=mostly(random, 10_000, 0, 20),
        calls_in_flight=mostly(random, 0, 1),
        fan_out_max=mostly(random, 8, 1),
        step_gap_ms=random.choice([0, 50, 90_000]),
        home=random.choice([None, None, "engine-0", "engine-1"]),
        is_single_engine=mostly(random, False, True),  # noqa: FBT003
    )


def a_case(seed, roles=None):
    """A call, up to six engines and what they hold, all from one seed."""
    random = Random(seed)
    if roles is None:
        roles = random.choice([(Role.BOTH,), (Role.BOTH, Role.PREFILL, Role.DECODE), APART, APART])
    fleet, twin = [], None
    for index in range(random.choice([5, 6] if roles is APART else [4, 5, 6, 3, 2, 1, 0])):
        row, twin = a_row(random, index, random.choice(roles), twin)
        fleet.append(row)
    cached = {random.randrange(6): random.randint(1, 6) for _ in range(random.randrange(4))}
    request = a_call(random)
    if roles is APART:
        # Where decode engines have a backlog of prompts, a call that is in a hurry goes to a pair.
        request = replace(
            request, is_single_engine=False, home=None, ttft_ms_max=20, late_micro_usd_per_s=100_000
        )
    return request, fleet, cached


def cases(roles=None):
    """Many small cases from one number: plain random values reach further than drawing each field."""
    return st.integers(0, 2**32 - 1).map(
        lambda seed: [a_case(f"{seed}/{number}", roles) for number in range(CASES_PER_EXAMPLE)]
    )


def axis_sum(request, row, cached, leg, before_ms=0.0):
    forecast = Forecast(request, row, cached.get(row.index, 0), NOW_MS, leg, before_ms)
    total = 0.0
    for axis in AXES:
        total += axis.cost(request, row, forecast)
    return total, forecast


def cheapest(request, fleet, cached):
    """All candidates of least cost as {(prefill or None, decode)}, by brute force over the axes."""
    found = {}
    for row in fleet:
        if row.role is not Role.PREFILL:
            found[None, row.engine_id] = axis_sum(request, row, cached, WHOLE)[0]
    if not request.is_single_engine:
        for region in (1, 2):
            legs = [
                (*axis_sum(request, row, cached, PREFILL), row)
                for row in fleet
                if row.role is Role.PREFILL and row.region_bit == region
            ]
            least = min((leg[0] for leg in legs), default=inf)
            for cost, forecast, prefill in legs:
                if cost != least or cost == inf:
                    continue
                for row in fleet:
                    if row.role is not Role.PREFILL and row.region_bit == region:
                        rest = axis_sum(request, row, cached, DECODE, forecast.ttft_ms)[0]
                        found[prefill.engine_id, row.engine_id] = cost + rest
    least = min(found.values(), default=inf)
    return (
        ({name for name, cost in found.items() if cost == least}, least)
        if least < inf
        else (set(), inf)
    )


@EXAMPLES
@given(cases())
def test_the_placement_is_the_cheapest_of_all_candidates(many):
    for request, fleet, cached in many:
        outcome = place(request, fleet, cached, NOW_MS)
        names, least = cheapest(request, fleet, cached)
        assert isinstance(outcome, Placement) == bool(names)
        if isinstance(outcome, Placement):
            prefill = None if outcome.prefill is None else outcome.prefill.engine_id
            assert outcome.cost_micro_usd == least
            assert (prefill, outcome.decode.engine_id) in names


def permits(row, request, kv_tokens):
    """May the row take this much? Written from the field's documentation, sharing no code."""
    return all(
        (
            row.model == request.model,
            row.region_bit & request.regions,
            row.gpu_bit & request.gpu_types,
            row.is_accepting,
            not row.is_suspect,
            row.credits_expire_ms > NOW_MS,
            row.seats_lent - row.seats_taken >= 1,
            row.kv_tokens_lent - row.kv_tokens_taken >= kv_tokens,
            request.prompt_tokens + request.completion_tokens_expected <= row.context_tokens_max,
            # With more calls than seats they would wait inside the engine.
            max(row.running, row.seats_taken) < row.seats_capacity,
        )
    )


@EXAMPLES
@given(cases())
def test_nothing_infeasible_is_ever_placed(many):
    for request, fleet, cached in many:
        outcome = place(request, fleet, cached, NOW_MS)
        if isinstance(outcome, Objection):
            continue
        row, prefill = outcome.decode, outcome.prefill
        whole = request.prompt_tokens + request.completion_tokens_expected
        held = min(cached.get(row.index, 0), request.prompt_tokens) if prefill is None else 0
        assert outcome.kv_tokens == whole - held
        assert permits(row, request, whole - held)
        assert row.kv_tokens_used + whole <= row.kv_tokens_capacity
        assert row.role is not Role.PREFILL
        assert request.calls_in_flight < request.fan_out_max
        if prefill is not None:
            assert not request.is_single_engine
            assert prefill.role is Role.PREFILL
            assert prefill.region_bit == row.region_bit
            assert permits(prefill, request, request.prompt_tokens)
        for used in filter(None, (row, prefill)):
            assert used.is_warm or request.deadline_ms > NOW_MS + used.load_ms
        # However it is cached, a prompt needs one step that is not a decode step.
        first = row if prefill is None else prefill
        assert request.deadline_ms > NOW_MS + first.prefill_base_ms


@EXAMPLES
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(many, random):
    for request, fleet, cached in many:
        shuffled = list(fleet)
        random.shuffle(shuffled)
        assert place(request, fleet, cached, NOW_MS) == place(request, shuffled, cached, NOW_MS)


@EXAMPLES
@given(cases(), st.sampled_from([2.0, 4.0, 16.0]))
def test_more_weight_never_turns_a_placement_into_an_objection(many, factor):
    for request, fleet, cached in many:
        if isinstance(place(request, fleet, cached, NOW_MS), Placement):
            heavier = replace(request, weight=request.weight * factor)
            assert isinstance(place(heavier, fleet, cached, NOW_MS), Placement)


@EXAMPLES
@given(cases())
def test_an_objection_says_why_and_when(many):
    for request, fleet, cached in many:
        outcome = place(request, fleet, cached, NOW_MS)
        if isinstance(outcome, Placement):
            continue
        assert outcome.detail
        waits = outcome.reason in {Reason.QUEUE_FULL, Reason.WARMING, Reason.NO_CAPACITY}
        assert (outcome.retry_after_ms is not None) == waits
        if outcome.retry_after_ms is not None:
            assert RETRY_AFTER_MS_MIN <= outcome.retry_after_ms <= 1.5 * RETRY_AFTER_MS_MAX
        serving = [row for row in fleet if row.model == "m" and row.role is not Role.PREFILL]
        if outcome.reason is Reason.NO_CAPACITY:
            whole = request.prompt_tokens + request.completion_tokens_expected
            assert not any(
                permits(row, request, 0) and row.kv_tokens_capacity >= whole for row in serving
            )


@EXAMPLES
@given(cases())
def test_what_is_explained_is_what_was_decided(many):
    for request, fleet, cached in many:
        outcome = place(request, fleet, cached, NOW_MS)
        winner = outcome if isinstance(outcome, Placement) else None
        reason = outcome.reason if isinstance(outcome, Objection) else None
        told = explain(request, fleet, cached, NOW_MS, winner, reason)
        assert told.sentence.endswith(".")
        feasible = [view for view in told.candidates if view.is_feasible]
        costs = [view.cost_micro_usd for view in feasible]
        assert costs == sorted(costs)
        for view in told.candidates:
            for axis in view.axes:
                assert (axis.cost_micro_usd == inf) == (axis.objection is not None)
        if winner is None:
            assert not feasible
            assert told.winner is None
        else:
            first = told.candidates[0]
            assert candidate_name(first) == told.winner
            assert first.cost_micro_usd == winner.cost_micro_usd
            assert first.ttft_ms_predicted == winner.ttft_ms_predicted
            assert first.e2e_ms_predicted == winner.e2e_ms_predicted
            assert first.cached_tokens == winner.cached_tokens


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_equal_engines_share_ties_evenly(size):
    fleet = [engine_row(index, engine_id=f"h100-{'abcdefg'[index]}") for index in range(size)]
    wins = [0] * size
    for number in range(3_000):
        outcome = place(call(id=f"req-replica-{number:x}"), fleet, {}, NOW_MS)
        assert isinstance(outcome, Placement)
        wins[outcome.decode.index] += 1
    assert min(wins) > 0.8 * 3_000 / size
    assert max(wins) < 1.2 * 3_000 / size


def test_the_cases_reach_every_outcome():
    """A property whose cases never get to the point proves nothing."""
    seen = Counter()
    for number in range(3_000):
        request, fleet, cached = a_case(f"reach/{number}")
        outcome = place(request, fleet, cached, NOW_MS)
        if isinstance(outcome, Placement):
            seen["single" if outcome.prefill is None else "pair"] += 1
            seen["tie"] += len(cheapest(request, fleet, cached)[0]) > 1
        else:
            seen[outcome.reason] += 1
    assert seen["single"] >= 300, seen
    assert min(seen["pair"], seen["tie"]) >= 40, seen
    reasons = [reason for reason in seen if isinstance(reason, Reason)]
    assert len(reasons) == 8, seen
    assert min(seen[reason] for reason in reasons) >= 5, seen
