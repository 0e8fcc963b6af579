"""Fleets that can be found by hand or by trying all, and what a plan must never do."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.catalog import Role
from controlplane.scheduler.planner.fleet import solve
from controlplane.scheduler.planner.problem import (
    Demand,
    DesiredCount,
    EngineCondition,
    Limits,
    MoveKind,
    NodeState,
    Plan,
    PlanStatus,
    Problem,
    as_json,
    from_json,
)
from tests.planner_builders import REGION, demand, engine, node, pool, shape

# A change costs next to nothing, but it is not free, so that ties are for what is there.
FREE = Limits(change_micro_usd=1, gap_ratio_max=0.0, gain_ratio_min=0.0)


def _plan(*demands: Demand, **facts: object) -> Plan:
    given_: dict[str, object] = {"now_s": 1_790_000_000.0, "nodes": (), "limits": FREE}
    return solve(Problem(demands=demands, **(given_ | facts)))  # type: ignore[arg-type]


def _counts(plan: Plan) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for one in plan.desired:
        counts[one.gpu_type] += one.desired
    return {gpu: count for gpu, count in counts.items() if count}


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("need", "usd", "fleet"),
    [(100, 6, {"b": 1}), (200, 10, {"a": 1}), (250, 16, {"a": 1, "b": 1}), (350, 20, {"a": 2})],
)
def test_the_cheapest_mix_is_not_the_cheapest_rate(
    need: int, usd: int, fleet: dict[str, int]
) -> None:
    plan = _plan(
        demand(need),
        pools=(pool("a", 200), pool("b", 100)),
        shapes=(shape("a", 10, more=9), shape("b", 6, more=9)),
    )
    assert plan.fleet_micro_usd_per_hour == usd * 1e6
    assert _counts(plan) == fleet
    assert plan.status is PlanStatus.OK
    assert plan.gap_ratio == pytest.approx(0.0, abs=1e-9)


def test_tight_work_gets_the_fast_type_and_loose_work_the_cheap_one() -> None:
    facts = {
        "pools": (pool("fast", 10.0), pool("slow", 4.0)),
        "shapes": (shape("fast", 10, more=9), shape("slow", 2, more=9)),
    }
    assert _counts(_plan(demand(9), **facts)) == {"slow": 3}
    # A workflow takes 100 ms there and 250 ms here.
    assert _counts(_plan(demand(9, deadline_s=0.2), **facts)) == {"fast": 1}
    plan = _plan(demand(9, deadline_s=0.05), **facts)
    assert _counts(plan) == {"fast": 1}
    assert any("can not meet its deadline" in words for words in plan.binding)


def test_kv_bounds_a_fleet_where_it_fills_up_before_gpu_time() -> None:
    # A step of 10 ms and .1 ms a call: 100 calls at the bound, so 100 tokens take 20 ms of an engine.
    kind = replace(
        pool("a", 1e9), decode_ms_base=10.0, decode_ms_per_seq=0.1, kv_tokens_capacity=100_000
    )
    work = demand(30.0, context_tokens=100.0, completion_tokens=100.0)
    facts = {"shapes": (shape("a", 1, more=99),)}
    assert _counts(_plan(work, pools=(kind,), **facts)) == {"a": 1}
    # KV for ten calls of 150 tokens: steps of 11 ms, so 9.09 workflows a second.
    plan = _plan(work, pools=(replace(kind, kv_tokens_capacity=1_500),), **facts)
    assert _counts(plan) == {"a": 4}
    plan = _plan(
        replace(work, arrivals_per_s_now=36.0),
        pools=(replace(kind, kv_tokens_capacity=1_500),),
        **facts,
    )
    assert _counts(plan) == {"a": 4}
    assert any("KV of m/ax1/both" in words for words in plan.binding)


def test_prompts_and_decoding_on_two_engines_where_that_is_cheaper() -> None:
    both = replace(
        pool("a", 1.0), prefill_base_ms=100.0, decode_ms_base=10.0, decode_ms_per_seq=10.0
    )
    pair = (
        replace(both, gpu_type="p", role=Role.PREFILL, prefill_base_ms=10.0),
        replace(both, gpu_type="d", role=Role.DECODE),
    )
    work = demand(4.0, completion_tokens=10.0)
    shapes = (shape("a", 10, more=9), shape("p", 1, more=9), shape("d", 3, more=9))
    one = _plan(work, pools=(both,), shapes=shapes)
    # On one: 100 ms of prompt and 10 tokens of 30 ms shared by two: 250 ms each, four a second.
    assert _counts(one) == {"a": 1}
    two = _plan(work, pools=(both, *pair), shapes=shapes)
    assert _counts(two) == {"p": 1, "d": 1}
    assert two.fleet_micro_usd_per_hour == 4e6


def test_a_class_is_planned_for_at_the_quantile_of_its_floor() -> None:
    facts = {"pools": (pool("a", 1.0),), "shapes": (shape("a", 1, more=999),)}
    # 100 in flight, a standard deviation of 10: 116.4 at 95 %, 123.3 at 99 %.
    assert _counts(_plan(demand(100, success_floor_ratio=0.95), **facts)) == {"a": 117}
    assert _counts(_plan(demand(100, success_floor_ratio=0.99), **facts)) == {"a": 124}
    # Two halves of it share engines, and need no more than the whole.
    halves = [demand(50, class_id=name, success_floor_ratio=0.95) for name in "xy"]
    assert _counts(_plan(*halves, **facts)) == {"a": 117}
    # Variances add up: 10 of the calls, 10 of the forecast.
    plan = _plan(demand(100, success_floor_ratio=0.95, arrivals_per_s_spread=10.0), **facts)
    assert _counts(plan) == {"a": 124}


def test_short_capacity_goes_to_the_higher_priority_and_is_said() -> None:
    works = [
        demand(3, class_id="low", priority=0, arrivals_per_s_spread=0.0),
        demand(3, class_id="high", priority=1),
    ]
    plan = _plan(*works, pools=(pool("a", 1.0),), shapes=(shape("a", 1, more=4),))
    served = {one.class_id: one.ratio for one in plan.assignment}
    assert plan.status is PlanStatus.SHORT
    assert served["high"] == 1.0
    assert served["low"] == pytest.approx(1 / 3, abs=0.02)
    assert any("`low` is left out" in words for words in plan.binding)
    assert any("no more than 4 nodes" in words for words in plan.binding)


def test_work_without_a_floor_is_served_only_where_it_pays() -> None:
    facts = {"pools": (pool("a", 1.0),), "shapes": (shape("a", 3.6, more=9),)}
    # An engine is 1,000 micro-dollars a second and does one workflow in it.
    rich = demand(1, success_floor_ratio=0.0, value_micro_usd=1_500.0)
    poor = replace(rich, value_micro_usd=500.0)
    assert _counts(_plan(rich, **facts)) == {"a": 1}
    assert _counts(_plan(poor, **facts)) == {}
    assert _counts(_plan(replace(poor, success_floor_ratio=0.5), **facts)) == {"a": 1}


def test_deferrable_work_buys_nothing_before_it_must_and_then_only_within_its_bound() -> None:
    facts = {
        "pools": (pool("a", 1.0),),
        "shapes": (shape("a", 1, more=99),),
        "nodes": (node("n1", "a", engine("e1")), node("n2", "a", engine("e2"))),
    }
    batch = demand(3, class_id="batch", deferrable_s=3_600.0)
    plan = _plan(demand(1.0), batch, **facts)
    assert _counts(plan) == {"a": 1}
    # Two engines are there, one is full: a third of the two is the bound of work that can wait.
    assert plan.deferred[0].arrivals_per_s == pytest.approx(2 / 3, rel=1e-6)
    # 3,500 that wait must be gone within the hour: .97 a second, so three engines for a third each.
    waiting = replace(batch, backlog_workflows=3_500.0)
    assert _counts(_plan(waiting, **facts)) == {"a": 3}


# ---------------------------------------------------------------- what is there


def test_a_node_not_heard_of_keeps_what_it_had() -> None:
    known = node("n1", "a", engine("e1"))
    lost = node("n2", "a", engine("e2"), is_known=False)
    facts = {"pools": (pool("a", 1.0),), "shapes": (shape("a", 1, more=9),)}
    # Two are needed and two are there, one of them on a node that is silent.
    plan = _plan(demand(2), nodes=(known, lost), **facts)
    assert (plan.moves, plan.moves_waiting, _counts(plan)) == ((), 0, {"a": 2})
    assert any("1 nodes are not heard of" in words for words in plan.binding)
    # With none needed the silent one is still counted, paid for and left alone.
    plan = _plan(nodes=(known, lost), **facts)
    assert {move.node_id for move in plan.moves} == {"n1"}
    assert _counts(plan) == {"a": 1}
    # A cordoned one is no capacity, and nothing is done to it either.
    plan = _plan(demand(2), nodes=(known, replace(lost, is_known=True, is_cordoned=True)), **facts)
    assert (_counts(plan), plan.moves, plan.moves_waiting) == ({"a": 2}, (), 1)


def test_a_sleeper_is_woken_before_an_engine_is_loaded() -> None:
    asleep = engine("e1", condition=EngineCondition.ASLEEP, sleep_level=1)
    plan = _plan(
        demand(1),
        pools=(pool("a", 1.0, load_s=100.0, wake_s=5.0),),
        shapes=(shape("a", 1),),
        nodes=(
            node("n1", "a", is_releasable=False),
            node("n2", "a", asleep, is_releasable=False),
        ),
    )
    assert [(move.kind, move.node_id) for move in plan.moves] == [(MoveKind.WAKE, "n2")]


def test_a_cold_start_is_bought_only_where_it_pays_within_the_time_a_plan_stands() -> None:
    there = node("n1", "dear", engine("e1"))
    facts = {
        "pools": (pool("dear", 1.0), pool("cheap", 1.0, load_s=900.0)),
        "shapes": (shape("dear", 1.2), shape("cheap", 1, more=1)),
        "nodes": (there,),
    }
    # An hour saves 20 cents, a quarter of an hour of loading costs 25.
    assert _counts(_plan(demand(1), **facts)) == {"dear": 1}
    longer = replace(FREE, stands_s=7_200.0)
    assert _counts(_plan(demand(1), **facts, limits=longer)) == {"cheap": 1}


def test_a_standing_plan_is_followed_while_it_is_as_good_as_any() -> None:
    facts = {
        "pools": (pool("a", 1.0), pool("b", 1.0)),
        "shapes": (shape("a", 1.0, more=2), shape("b", 1.015, more=2)),
        "limits": Limits(change_micro_usd=1),
    }
    assert _counts(_plan(demand(0.9), **facts)) == {"a": 1}
    toward = tuple(
        DesiredCount(
            model=one.model, gpu_type=one.gpu_type, gpus=1, role=one.role, region=REGION,
            desired=int(one.gpu_type == "b"), actual=0,
        )
        for one in facts["pools"]
    )  # fmt: skip
    assert _counts(_plan(demand(0.9), **facts, standing=toward)) == {"b": 1}
    # Not when it is worse than what a gap allows, or does not do the work any more.
    dear = facts | {"shapes": (shape("a", 1.0, more=2), shape("b", 1.03, more=2))}
    assert _counts(_plan(demand(0.9), **dear, standing=toward)) == {"a": 1}
    assert _counts(_plan(demand(1.5), **facts, standing=toward)) == {"a": 2}
    # What is there already stays, whatever a plan led to.
    there = (node("n1", "b", engine("e1")),)
    assert _plan(demand(0.9), **facts, nodes=there).moves == ()


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_five_percent_moves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    pools = (pool("a", 1.0, load_s=60.0), pool("b", 3.0, load_s=60.0))
    shapes = (shape("a", 1, more=60), shape("b", 2.5, more=60))
    limits = Limits()
    work = [demand(rate, class_id=f"c{rate}", success_floor_ratio=0.95) for rate in (20, 7, 3)]
    first = solve(
        Problem(now_s=0.0, demands=tuple(work), pools=pools, shapes=shapes, nodes=(), limits=limits)
    )
    nodes: list[NodeState] = []
    for one in first.desired:
        nodes += [
            node(f"{one.gpu_type}{i}", one.gpu_type, engine(f"{one.gpu_type}{i}-e"))
            for i in range(one.desired)
        ]
    held = first.held
    for minute in range(1, 61):
        noisy = tuple(
            replace(
                one,
                arrivals_per_s_now=one.arrivals_per_s_now * rng.uniform(0.95, 1.05),
                arrivals_per_s_forecast=one.arrivals_per_s_forecast * rng.uniform(0.95, 1.05),
            )
            for one in work
        )
        plan = solve(
            Problem(
                now_s=minute * 10.0, demands=noisy, pools=pools, shapes=shapes, nodes=tuple(nodes),
                limits=limits, held=held,
            )
        )  # fmt: skip
        held = plan.held
        assert (plan.moves, plan.moves_waiting) == ((), 0)
        assert all(one.desired == one.actual for one in plan.desired)
    # A real change is followed at once when work grows, and when it falls.
    for factor, is_more in ((1.3, True), (0.6, False)):
        changed = tuple(
            replace(
                one,
                arrivals_per_s_now=one.arrivals_per_s_now * factor,
                arrivals_per_s_forecast=one.arrivals_per_s_forecast * factor,
            )
            for one in work
        )
        plan = solve(
            Problem(
                now_s=0.0, demands=changed, pools=pools, shapes=shapes, nodes=tuple(nodes),
                limits=limits, held=held,
            )
        )  # fmt: skip
        change = sum(one.desired - one.actual for one in plan.desired)
        assert change > 0 if is_more else change < 0


# ---------------------------------------------------------------- by trying all


@st.composite
def small_fleets(draw: st.DrawFn) -> Problem:
    models = ("m", "n")[: draw(st.integers(1, 2))]
    node_gpus = draw(st.sampled_from([1, 2]))
    pools = [
        pool(
            gpu, draw(st.integers(1, 4)) * gpus, model=model, gpus=gpus,
            load_s=draw(st.sampled_from([0.0, 600.0])),
        )
        for gpu in ("a", "b")
        for model in models
        for gpus in range(1, node_gpus + 1)
    ]  # fmt: skip
    shapes = tuple(
        shape(gpu, draw(st.integers(1, 9)), more=draw(st.integers(0, 2)), gpus=node_gpus)
        for gpu in ("a", "b")
    )
    nodes = []
    for number in range(draw(st.integers(0, 3))):
        gpu = draw(st.sampled_from(["a", "b"]))
        left, engines = node_gpus, []
        while left and draw(st.booleans()):
            gpus = draw(st.integers(1, left))
            left -= gpus
            engines.append(
                engine(f"n{number}e{left}", model=draw(st.sampled_from(models)), gpus=gpus)
            )
        nodes.append(
            node(f"n{number}", gpu, *engines, gpus=node_gpus, is_releasable=draw(st.booleans()))
        )
    # Half a workflow a second off all sums of capacities, so that no rounding decides.
    works = tuple(demand(draw(st.integers(0, 8)) + 0.5, model=model) for model in models)
    limits = replace(FREE, change_micro_usd=draw(st.sampled_from([1, 300_000])))
    return Problem(
        now_s=0.0, demands=works, pools=tuple(pools), shapes=shapes, nodes=tuple(nodes),
        limits=limits,
    )  # fmt: skip


def _configurations(problem: Problem, gpu: str, gpus: int) -> list[tuple[int, ...]]:
    """Every way to fill a node: how many engines of each pool."""
    ranges = [
        range(gpus // one.gpus + 1) if one.gpu_type == gpu else range(1) for one in problem.pools
    ]
    return [
        counts
        for counts in itertools.product(*ranges)
        if sum(n * one.gpus for n, one in zip(counts, problem.pools, strict=True)) <= gpus
    ]


def _cheapest(problem: Problem) -> int | None:
    """Micro-dollars of the best fleet for an hour, by trying all. None: nothing serves the work."""
    fee = problem.limits.change_micro_usd
    choices: list[list[tuple[int, tuple[int, ...]]]] = []
    for one in problem.nodes:
        rent = next(s.micro_usd_per_hour for s in problem.shapes if s.gpu_type == one.gpu_type)
        now = [
            sum(e.model == p.model and e.gpus == p.gpus for e in one.engines)
            if p.gpu_type == one.gpu_type
            else 0
            for p in problem.pools
        ]
        options = []
        for counts in _configurations(problem, one.gpu_type, one.gpus):
            cost = rent
            if not any(counts) and one.is_releasable:
                cost = 0
            for before, after, kind in zip(now, counts, problem.pools, strict=True):
                start = rent * kind.gpus / one.gpus / 3_600.0 * kind.load_s + fee
                cost += max(0, after - before) * start + max(0, before - after) * fee
            options.append((round(cost), counts))
        choices.append(options)
    for kind in problem.shapes:
        for _ in range(kind.nodes_more_max):
            options = [(0, (0,) * len(problem.pools))]
            for counts in _configurations(problem, kind.gpu_type, kind.gpus):
                cost = float(kind.micro_usd_per_hour)
                for count, one in zip(counts, problem.pools, strict=True):
                    rent = kind.micro_usd_per_hour * one.gpus / kind.gpus
                    cost += count * (rent / 3_600.0 * one.load_s + fee)
                options.append((round(cost), counts))
            choices.append(options)
    # Node by node, the least cost for every sum of capacities.
    models = [one.model for one in problem.demands]
    best: dict[tuple[float, ...], int] = {(0.0,) * len(models): 0}
    for options in choices:
        grown: dict[tuple[float, ...], int] = {}
        for able, cost in best.items():
            for more, counts in options:
                sums = tuple(
                    have
                    + sum(
                        n * 1_000.0 / p.prefill_base_ms
                        for n, p in zip(counts, problem.pools, strict=True)
                        if p.model == model
                    )
                    for have, model in zip(able, models, strict=True)
                )
                if cost + more < grown.get(sums, cost + more + 1):
                    grown[sums] = cost + more
        best = grown
    needs = [one.arrivals_per_s_now for one in problem.demands]
    costs = [
        cost
        for able, cost in best.items()
        if all(have > need for have, need in zip(able, needs, strict=True))
    ]
    return min(costs, default=None)


@given(small_fleets())
def test_a_plan_is_the_best_of_all_fleets(problem: Problem) -> None:
    expected = _cheapest(problem)
    plan = solve(problem)
    if expected is None:
        assert plan.status is PlanStatus.SHORT
        return
    assert plan.status is PlanStatus.OK
    # Costs are rounded up to whole micro-dollars, one by one.
    assert plan.objective == pytest.approx(expected, abs=100)
    assert plan.bound <= plan.objective + 1e-6


@given(small_fleets(), st.integers(0, 1), st.integers(1, 3))
def test_more_work_never_costs_less(problem: Problem, which: int, more: int) -> None:
    grown = tuple(
        replace(
            one,
            arrivals_per_s_now=one.arrivals_per_s_now + more,
            arrivals_per_s_forecast=one.arrivals_per_s_forecast + more,
        )
        if index == which % len(problem.demands)
        else one
        for index, one in enumerate(problem.demands)
    )
    assert solve(replace(problem, demands=grown)).objective >= solve(problem).objective - 1e-6


@given(small_fleets())
def test_a_plan_says_again_what_it_said_and_survives_the_wire(problem: Problem) -> None:
    assert from_json(Problem, as_json(problem)) == problem
    plan = solve(problem)
    assert from_json(Plan, as_json(plan)) == plan
    again = replace(solve(problem), solve_s=plan.solve_s)
    assert as_json(again) == as_json(plan)


def test_a_problem_that_contradicts_itself_is_refused() -> None:
    facts = {"pools": (pool("a", 1.0),), "shapes": (shape("a", 1),)}
    with pytest.raises(ValueError, match="no shape"):
        _plan(demand(1), nodes=(node("n1", "b"),), **facts)
    with pytest.raises(ValueError, match="twice"):
        _plan(demand(1), demand(1), **facts)
    with pytest.raises(ValueError, match="no field"):
        from_json(Problem, '{"now": 1}')
    with pytest.raises(ValueError, match="not of type"):
        from_json(Problem, '{"now_s": "1"}')
