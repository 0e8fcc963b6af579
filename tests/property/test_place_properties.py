"""Placement against oracles that share no code with it: an exhaustive search, and a checker of rights."""

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement, Reason
from controlplane.scheduler.axes import AXES
from controlplane.scheduler.explain import candidate_name, explain
from controlplane.scheduler.legs import DECODE, PREFILL, WHOLE
from controlplane.scheduler.perf_model import Forecast
from controlplane.scheduler.place import RETRY_AFTER_MS_MAX, RETRY_AFTER_MS_MIN, Objection, place
from tests.decision_builders import NOW_MS, call, engine_row

EXAMPLES = settings(max_examples=200)


def mostly(usual, *others):
    """A value that is `usual` seven times out of eight: most limits are met, so that calls fit."""
    return st.sampled_from([usual] * 7 * len(others) + list(others))


ROW_FIELDS = st.fixed_dictionaries(
    {
        "region_bit": st.sampled_from([1, 1, 2]),
        "gpu_bit": mostly(1, 2),
        "model": mostly("m", "other"),
        "context_tokens_max": mostly(20, 4, 7),
        "kv_tokens_capacity": st.sampled_from([20, 20, 12, 9, 5]),
        "seats_capacity": mostly(20, 1, 2),
        "micro_usd_per_ms": st.sampled_from([1.0, 1.0, 0.5, 3.0]),
        "prefill_base_ms": st.sampled_from([1.0, 5.0, 5.0, 50.0]),
        "decode_ms_base": mostly(10.0, 50.0),
        "load_ms": st.sampled_from([10, 1_000]),
        "is_accepting": mostly(True, False),  # noqa: FBT003
        "is_suspect": mostly(False, True),  # noqa: FBT003
        "is_warm": mostly(True, False),  # noqa: FBT003
        "running": st.sampled_from([0, 0, 1, 18, 19]),
        "waiting": mostly(0, 1),
        "kv_tokens_used": st.integers(0, 6),
        "seats_lent": st.integers(1, 3),
        "seats_taken": st.sampled_from([0, 0, 1, 2, 3]),
        "kv_tokens_lent": st.integers(4, 12),
        "kv_tokens_taken": st.integers(0, 6),
        "expires_in_ms": st.sampled_from([2, 2, 1, 0]),
        "prefill_tokens_pending": st.sampled_from([0, 0, 0, 2_000, 20_000]),
    }
)


@st.composite
def rows(draw, roles=(Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE)):
    """Up to six engines in two regions, some of them twins; small domains, so that limits are hit."""
    fleet = []
    fields = {}
    for index in range(draw(st.sampled_from([4, 5, 6, 3, 2, 1, 0]))):
        if not fields or draw(st.booleans()):
            fields = {**draw(ROW_FIELDS), "role": draw(st.sampled_from(roles))}
        expires_ms = NOW_MS + fields["expires_in_ms"]
        known = {name: value for name, value in fields.items() if name != "expires_in_ms"}
        fleet.append(engine_row(index, **known, credits_expire_ms=expires_ms))
    return fleet


@st.composite
def calls(draw):
    return call(
        id=draw(st.sampled_from(["a", "b", "c", "d"])),
        arrival_ms=NOW_MS - draw(mostly(0, 3_000)),
        prompt_tokens=draw(st.integers(1, 6)),
        completion_tokens_expected=draw(st.integers(0, 4)),
        regions=draw(mostly(3, 0, 1, 2)),
        gpu_types=draw(mostly(3, 0, 1, 2)),
        weight=draw(st.sampled_from([0.5, 1.0, 2.0, 4.0])),
        ttft_ms_max=draw(st.sampled_from([20, 2_000])),
        tpot_ms_max=draw(st.sampled_from([5, 100])),
        deadline_ms=NOW_MS + draw(mostly(60_000, 1, 12, 200)),
        workflow=draw(st.sampled_from([None, "w"])),
        step=draw(st.integers(0, 2)),
        steps_expected=draw(st.integers(1, 3)),
        workflow_deadline_ms=NOW_MS + draw(mostly(60_000, 50)),
        workflow_remaining_micro_usd=draw(mostly(10_000, 0, 20)),
        calls_in_flight=draw(mostly(0, 1)),
        fan_out_max=draw(mostly(8, 1)),
        step_gap_ms=draw(st.sampled_from([0, 50, 90_000])),
        home=draw(st.sampled_from([None, None, "engine-0", "engine-1"])),
        is_single_engine=draw(mostly(False, True)),  # noqa: FBT003
    )


cached_tokens = st.dictionaries(st.integers(0, 5), st.integers(1, 6), max_size=4)


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
@given(calls(), rows(), cached_tokens)
def test_the_placement_is_the_cheapest_of_all_candidates(request_, fleet, cached):
    outcome = place(request_, fleet, cached, NOW_MS)
    names, least = cheapest(request_, fleet, cached)
    if not names:
        assert isinstance(outcome, Objection)
        return
    assert isinstance(outcome, Placement)
    assert outcome.cost_micro_usd == least
    prefill = None if outcome.prefill is None else outcome.prefill.engine_id
    # Equal prefill legs may differ in time; the tie-break chooses among them before pairs are priced.
    if prefill is None or len([p for p, _ in names if p]) == len(names):
        assert (prefill, outcome.decode.engine_id) in names


@EXAMPLES
@given(calls(), rows(roles=(Role.PREFILL, Role.DECODE, Role.DECODE)), cached_tokens)
def test_pairs_are_the_cheapest_where_prefill_is_apart(request_, fleet, cached):
    apart = replace(request_, is_single_engine=False, home=None, ttft_ms_max=20)
    outcome = place(apart, fleet, cached, NOW_MS)
    names, least = cheapest(apart, fleet, cached)
    assert isinstance(outcome, Placement) == bool(names)
    if isinstance(outcome, Placement):
        assert outcome.cost_micro_usd == least
        assert outcome.prefill is None or outcome.prefill.region_bit == outcome.decode.region_bit


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
            # One seat in sixteen is kept for tenants of weight two or more.
            request.weight >= 2
            or max(row.running, row.seats_taken) < row.seats_capacity - row.seats_capacity // 16,
        )
    )


@EXAMPLES
@given(calls(), rows(), cached_tokens)
def test_nothing_infeasible_is_ever_placed(request_, fleet, cached):
    outcome = place(request_, fleet, cached, NOW_MS)
    if isinstance(outcome, Objection):
        return
    row, prefill = outcome.decode, outcome.prefill
    whole = request_.prompt_tokens + request_.completion_tokens_expected
    held = min(cached.get(row.index, 0), request_.prompt_tokens) if prefill is None else 0
    assert outcome.kv_tokens == whole - held
    assert permits(row, request_, whole - held)
    assert row.kv_tokens_used + whole <= row.kv_tokens_capacity
    assert row.role is not Role.PREFILL
    assert request_.calls_in_flight < request_.fan_out_max
    assert request_.deadline_ms > NOW_MS + row.decode_ms_base * (prefill is not None)
    if prefill is not None:
        assert not request_.is_single_engine
        assert prefill.role is Role.PREFILL
        assert prefill.region_bit == row.region_bit
        assert permits(prefill, request_, request_.prompt_tokens)
    for used in filter(None, (row, prefill)):
        assert used.is_warm or request_.deadline_ms > NOW_MS + used.load_ms


@EXAMPLES
@given(calls(), rows(), cached_tokens, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(request_, fleet, cached, random):
    shuffled = list(fleet)
    random.shuffle(shuffled)
    assert place(request_, fleet, cached, NOW_MS) == place(request_, shuffled, cached, NOW_MS)


@EXAMPLES
@given(calls(), rows(), cached_tokens, st.sampled_from([1.0, 2.0, 4.0, 16.0]))
def test_more_weight_never_turns_a_placement_into_an_objection(request_, fleet, cached, factor):
    if isinstance(place(request_, fleet, cached, NOW_MS), Placement):
        heavier = replace(request_, weight=request_.weight * factor)
        assert isinstance(place(heavier, fleet, cached, NOW_MS), Placement)


@EXAMPLES
@given(calls(), rows(), cached_tokens)
def test_an_objection_says_why_and_when(request_, fleet, cached):
    outcome = place(request_, fleet, cached, NOW_MS)
    if isinstance(outcome, Placement):
        return
    assert outcome.detail
    waits = outcome.reason in {Reason.QUEUE_FULL, Reason.WARMING, Reason.NO_CAPACITY}
    assert (outcome.retry_after_ms is not None) == waits
    if outcome.retry_after_ms is not None:
        assert RETRY_AFTER_MS_MIN <= outcome.retry_after_ms <= 1.5 * RETRY_AFTER_MS_MAX
    serving = [row for row in fleet if row.model == "m" and row.role is not Role.PREFILL]
    if outcome.reason is Reason.NO_CAPACITY:
        assert (
            not any(
                permits(row, request_, 0) and row.is_warm and not request_.workflow
                for row in serving
            )
            or request_.calls_in_flight >= request_.fan_out_max
        )


@EXAMPLES
@given(calls(), rows(), cached_tokens)
def test_what_is_explained_is_what_was_decided(request_, fleet, cached):
    outcome = place(request_, fleet, cached, NOW_MS)
    winner = outcome if isinstance(outcome, Placement) else None
    reason = outcome.reason if isinstance(outcome, Objection) else None
    told = explain(request_, fleet, cached, NOW_MS, winner, reason)
    assert told.sentence.endswith(".")
    feasible = [view for view in told.candidates if view.is_feasible]
    assert [view.cost_micro_usd for view in feasible] == sorted(
        view.cost_micro_usd for view in feasible
    )
    for view in told.candidates:
        assert all(
            (axis.cost_micro_usd == inf) == (axis.objection is not None) for axis in view.axes
        )
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


def test_the_examples_reach_every_outcome():
    """A property whose examples never get to the point proves nothing."""
    seen = Counter()

    @settings(
        max_examples=300, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(calls(), rows(), cached_tokens)
    def look(request_, fleet, cached):
        outcome = place(request_, fleet, cached, NOW_MS)
        names, _ = cheapest(request_, fleet, cached)
        if isinstance(outcome, Placement):
            seen["single" if outcome.prefill is None else "pair"] += 1
            seen["tie"] += len(names) > 1
        else:
            seen[outcome.reason] += 1

    look()
    assert seen["single"] >= 40
    assert seen["pair"] >= 2
    assert seen["tie"] >= 3
    assert {
        Reason.QUEUE_FULL,
        Reason.NO_CAPACITY,
        Reason.DEADLINE_UNREACHABLE,
        Reason.FORBIDDEN_BY_POLICY,
        Reason.CONTEXT_LENGTH_EXCEEDED,
    } <= set(seen)
