"""Shadow prices against what a little more capacity changes, and bids against what is served."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from controlplane.scheduler.planner.loads import options_of
from controlplane.scheduler.planner.prices import (
    PoolKey,
    Serving,
    arriving,
    serve_best,
    shadow_prices,
    worth,
)
from controlplane.scheduler.planner.problem import Problem
from tests.planner_builders import REGION, demand, pool, shape

# A step by which capacity is changed to see what it is worth, as a part of an engine.
STEP = 1e-4


@st.composite
def shortages(draw: st.DrawFn) -> tuple[Problem, dict[PoolKey, float]]:
    """Classes that compete for two pools, of which some is short of GPU time or of KV."""
    pools = tuple(
        replace(
            pool(gpu, draw(st.floats(5.0, 500.0)), kv_tokens=draw(st.integers(20, 200))),
            decode_ms_base=draw(st.floats(10.0, 90.0)),
            decode_ms_per_seq=draw(st.floats(0.1, 5.0)),
            decode_ms_per_kv_token=draw(st.floats(0.0, 0.2)),
        )
        for gpu in ("a", "b")
    )
    works = tuple(
        demand(
            draw(st.floats(0.1, 50.0)),
            class_id=f"c{number}",
            context_tokens=draw(st.floats(1.0, 9.0)),
            completion_tokens=draw(st.floats(0.0, 9.0)),
            value_micro_usd=draw(st.floats(10.0, 1_000.0)),
            weight=draw(st.sampled_from([1.0, 2.0])),
        )
        for number in range(draw(st.integers(1, 4)))
    )
    problem = Problem(
        now_s=0.0, demands=works, pools=pools, shapes=(shape("a", 1), shape("b", 1)), nodes=()
    )
    engines = {(index, REGION): draw(st.floats(0.3, 3.0)) for index in range(2)}
    return problem, engines


def _serve(problem: Problem, engines: dict[PoolKey, float]) -> Serving:
    options = [options_of(problem, one) for one in problem.demands]
    return serve_best(problem, options, engines, arriving(problem), worth(problem))


@given(shortages(), st.integers(0, 1))
def test_a_price_is_what_one_unit_more_saves(
    case: tuple[Problem, dict[PoolKey, float]], which: int
) -> None:
    problem, engines = case
    key = (which, REGION)
    serving = _serve(problem, engines)
    # An engine more is 1,000 ms of GPU time and its KV, each second.
    engine = 1_000.0 * serving.micro_usd_per_gpu_ms[key] + (
        problem.pools[which].kv_tokens_capacity * serving.micro_usd_per_kv_token_s[key]
    )
    more = _serve(problem, engines | {key: engines[key] + STEP}).lost_micro_usd_per_s
    less = _serve(problem, engines | {key: engines[key] - STEP}).lost_micro_usd_per_s
    above = (serving.lost_micro_usd_per_s - more) / STEP
    below = (less - serving.lost_micro_usd_per_s) / STEP
    scale = 1.0 + max(above, below)
    # Loss is convex in capacity: a price lies between what is won by more and what is lost by less.
    assert above - 1e-3 * scale <= engine <= below + 1e-3 * scale


@given(shortages())
def test_who_is_served_bids_enough_and_who_is_not_bids_too_little(
    case: tuple[Problem, dict[PoolKey, float]],
) -> None:
    problem, engines = case
    options = [options_of(problem, one) for one in problem.demands]
    prices, serving = shadow_prices(problem, options, engines)
    values = worth(problem)
    for index, one in enumerate(prices.classes):
        tolerance = 1e-4 * max(values)
        if one.served_ratio > 1e-6:
            assert values[index] >= one.bid_micro_usd - tolerance
        if one.served_ratio < 1.0 - 1e-6:
            assert values[index] <= one.bid_micro_usd + tolerance
    # What is lost, added up by class.
    lost = sum(
        value * (rate - served)
        for value, rate, served in zip(values, arriving(problem), serving.served_per_s, strict=True)
    )
    assert serving.lost_micro_usd_per_s == pytest.approx(lost, rel=1e-6, abs=1e-6)


@given(shortages())
def test_flows_stay_within_what_engines_can_do(
    case: tuple[Problem, dict[PoolKey, float]],
) -> None:
    problem, engines = case
    serving = _serve(problem, engines)
    assume(serving.flows)
    for key, count in engines.items():
        gpu_ms = kv = 0.0
        for flow in serving.flows:
            if flow.pool == key:
                one, kind = problem.demands[flow.demand], problem.pools[key[0]]
                each_ms = kind.decode_ms_per_seq + kind.decode_ms_per_kv_token * (
                    one.context_tokens + one.completion_tokens / 2
                )
                bound = min(kind.seats_capacity, max(2.0, kind.decode_ms_base / each_ms))
                held = one.context_tokens + one.completion_tokens / 2
                there = max(1.0, min(bound, kind.kv_tokens_capacity / held))
                decode_ms = one.completion_tokens * (kind.decode_ms_base + there * each_ms)
                gpu_ms += flow.per_s * (
                    kind.prefill_base_ms
                    + one.completion_tokens * (kind.decode_ms_base / bound + each_ms)
                )
                kv += flow.per_s * (kind.prefill_base_ms + decode_ms) / 1_000.0 * held
        assert gpu_ms <= 1_000.0 * count * (1 + 1e-6)
        assert kv <= problem.pools[key[0]].kv_tokens_capacity * count * (1 + 1e-6)


def test_nothing_costs_anything_where_there_is_room() -> None:
    problem = Problem(
        now_s=0.0,
        demands=(demand(1.0),),
        pools=(pool("a", 2.0),),
        shapes=(shape("a", 1),),
        nodes=(),
    )
    options = [options_of(problem, one) for one in problem.demands]
    prices, _ = shadow_prices(problem, options, {(0, REGION): 1})
    assert [one.micro_usd_per_gpu_ms for one in prices.pools] == [0.0]
    assert [(one.bid_micro_usd, one.served_ratio) for one in prices.classes] == [(0.0, 1.0)]
    # Twice as much as an engine can do: a workflow displaces one of its own worth.
    prices, _ = shadow_prices(replace(problem, demands=(demand(4.0),)), options, {(0, REGION): 1})
    assert prices.pools[0].micro_usd_per_gpu_ms == pytest.approx(2_000.0)
    assert prices.classes[0].bid_micro_usd == pytest.approx(1e6)
    assert prices.classes[0].served_ratio == pytest.approx(0.5)
