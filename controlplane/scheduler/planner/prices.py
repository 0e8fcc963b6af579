"""Shadow prices: what one more unit of a pool's capacity would save, by a linear programme over classes and pools.

Rates in workflows per second, engine time in milliseconds, KV in token-seconds, values in micro-dollars.
It knows nothing of nodes and of what it costs to change them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.domain.catalog import Role
from controlplane.domain.ids import RegionName
from controlplane.scheduler.perf_model import MS_PER_S
from controlplane.scheduler.planner.loads import (
    ClassOptions,
    Option,
    deferrable_share,
    must_run_per_s,
    stretch_of,
)
from controlplane.scheduler.planner.problem import (
    ClassPrice,
    PoolPrice,
    Prices,
    Problem,
)

# A pool of engines: the kind's index in `Problem.pools`, and the region.
PoolKey = tuple[int, RegionName]

# Duals and flows below are rounding of the solver, whose numbers are near 1.
DUAL_MIN: Final = 1e-9
FLOW_RATIO_MIN: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Workflows per second of a class (by its index) that a pool serves, in whole or one leg of."""

    demand: int
    pool: PoolKey
    role: Role
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The best use of given engines: what is served, and what more capacity would be worth.

    `lost_micro_usd_per_s` is the value of what is left out.
    """

    lost_micro_usd_per_s: float
    served_per_s: tuple[float, ...]
    flows: tuple[Flow, ...]
    micro_usd_per_gpu_ms: Mapping[PoolKey, float]
    micro_usd_per_kv_token_s: Mapping[PoolKey, float]
    solve_s: float


def regions_of(problem: Problem) -> tuple[RegionName, ...]:
    return tuple(sorted({shape.region for shape in problem.shapes}))


def ways_of(
    problem: Problem, demand: int, options: ClassOptions, regions: Sequence[RegionName]
) -> list[tuple[Option, PoolKey]]:
    """Every pool, region by region, that a class may use for some leg."""
    allowed = problem.demands[demand].regions or regions
    return [
        (way, (way.pool, region))
        for region in regions
        if region in allowed
        for way in options.every()
    ]


def serve_best(
    problem: Problem,
    options: Sequence[ClassOptions],
    engines: Mapping[PoolKey, float],
    arrivals_per_s: Sequence[float],
    values: Sequence[float],
) -> Serving:
    """The most value that `engines` can serve of `arrivals_per_s`, each workflow worth its `values`.

    minimise    sum_c values_c left_c
    subject to  served_c + left_c = arrivals_c
                sum_c flow_cp gpu_ms_cp     <= 1,000 engines_p      (dual: price of a GPU millisecond)
                sum_c flow_cp kv_token_s_cp <= kv_tokens engines_p  (dual: price of a KV token-second)
    of work that can wait no more than its share of the GPU time; prompts computed apart are decoded
    in the same region. Raises RuntimeError when the solver finds no optimum.
    """
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("GLOP")  # type: ignore[no-untyped-call]
    infinity = solver.infinity()
    objective = solver.Objective()
    objective.SetMinimization()
    # The solver's tolerances are for numbers near 1: flows are parts of a class's arrivals, capacity
    # is in engines, value in parts of the most that a class is worth.
    unit = max(
        (rate * value for rate, value in zip(arrivals_per_s, values, strict=True)), default=0.0
    )
    unit = unit if unit > 0.0 else 1.0
    gpu: dict[PoolKey, Any] = {}
    kv: dict[PoolKey, Any] = {}
    waiting: dict[PoolKey, Any] = {}
    variables: list[tuple[int, PoolKey, Role, Any]] = []
    regions = regions_of(problem)
    left: list[Any] = []
    for index, demand in enumerate(problem.demands):
        rate = arrivals_per_s[index]
        rest = solver.NumVar(0.0, 1.0, "")
        objective.SetCoefficient(rest, rate * values[index] / unit)
        left.append(rest)
        balance = solver.Constraint(1.0, 1.0)
        balance.SetCoefficient(rest, 1.0)
        legs: dict[RegionName, Any] = {}
        if rate <= 0.0:
            continue
        for way, key in ways_of(problem, index, options[index], regions):
            count = engines.get(key, 0.0)
            if count <= 0.0:
                continue
            pool = problem.pools[way.pool]
            flow = solver.NumVar(0.0, infinity, "")
            variables.append((index, key, pool.role, flow))
            if key not in gpu:
                gpu[key] = solver.Constraint(-infinity, float(count))
                kv[key] = solver.Constraint(-infinity, float(count))
            busy = rate * way.load.gpu_ms / MS_PER_S
            gpu[key].SetCoefficient(flow, busy)
            kv[key].SetCoefficient(flow, rate * way.load.kv_token_s / pool.kv_tokens_capacity)
            if demand.deferrable_s > 0.0:
                if key not in waiting:
                    share = deferrable_share(stretch_of(problem, demand.model))
                    waiting[key] = solver.Constraint(-infinity, count * share)
                waiting[key].SetCoefficient(flow, busy)
            if pool.role is not Role.PREFILL:
                balance.SetCoefficient(flow, 1.0)
            if pool.role is not Role.BOTH:
                region = key[1]
                if region not in legs:
                    legs[region] = solver.Constraint(0.0, 0.0)
                legs[region].SetCoefficient(flow, 1.0 if pool.role is Role.PREFILL else -1.0)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("the linear programme of the shadow prices has no optimum")
    flows = tuple(
        Flow(
            demand=index,
            pool=key,
            role=role,
            per_s=variable.solution_value() * arrivals_per_s[index],
        )
        for index, key, role, variable in variables
        if variable.solution_value() > FLOW_RATIO_MIN
    )
    return Serving(
        lost_micro_usd_per_s=objective.Value() * unit,
        served_per_s=tuple(
            rate * min(1.0, max(0.0, 1.0 - rest.solution_value()))
            for rate, rest in zip(arrivals_per_s, left, strict=True)
        ),
        flows=flows,
        micro_usd_per_gpu_ms={
            key: _price(row.dual_value()) * unit / MS_PER_S for key, row in gpu.items()
        },
        micro_usd_per_kv_token_s={
            key: _price(row.dual_value()) * unit / problem.pools[key[0]].kv_tokens_capacity
            for key, row in kv.items()
        },
        solve_s=solver.wall_time() / MS_PER_S,
    )


def _price(dual: float) -> float:
    # More capacity lowers what is lost: the dual of an upper bound is negative or 0.
    return -dual if dual < -DUAL_MIN else 0.0


def worth(problem: Problem) -> list[float]:
    """Micro-dollars that one workflow of each class is worth, weighted."""
    return [demand.value_micro_usd * demand.weight for demand in problem.demands]


def arriving(problem: Problem) -> list[float]:
    """Workflows per second of each class that want to run now."""
    return [
        must_run_per_s(demand)
        if demand.deferrable_s > 0.0
        else max(demand.arrivals_per_s_now, demand.arrivals_per_s_forecast)
        for demand in problem.demands
    ]


def shadow_prices(
    problem: Problem, options: Sequence[ClassOptions], engines: Mapping[PoolKey, float]
) -> tuple[Prices, Serving]:
    """Prices of capacity and bids of classes, for the engines that are there."""
    arrivals = arriving(problem)
    serving = serve_best(problem, options, engines, arrivals, worth(problem))
    pools = tuple(
        PoolPrice(
            model=problem.pools[key[0]].model,
            gpu_type=problem.pools[key[0]].gpu_type,
            gpus=problem.pools[key[0]].gpus,
            role=problem.pools[key[0]].role,
            region=key[1],
            micro_usd_per_gpu_ms=serving.micro_usd_per_gpu_ms.get(key, 0.0),
            micro_usd_per_kv_token_s=serving.micro_usd_per_kv_token_s.get(key, 0.0),
        )
        for key in sorted(engines)
        if engines[key] > 0.0
    )
    classes = tuple(
        ClassPrice(
            class_id=demand.class_id,
            model=demand.model,
            bid_micro_usd=_bid(problem, index, options[index], engines, serving),
            served_ratio=1.0
            if arrivals[index] <= 0.0
            else min(1.0, serving.served_per_s[index] / arrivals[index]),
        )
        for index, demand in enumerate(problem.demands)
    )
    return Prices(pools=pools, classes=classes), serving


def _bid(
    problem: Problem,
    index: int,
    options: ClassOptions,
    engines: Mapping[PoolKey, float],
    serving: Serving,
) -> float:
    """What a workflow displaces where that is least: on one engine, or on two of a region."""
    best = float("inf")
    by_region: dict[RegionName, dict[Role, float]] = {}
    for way, key in ways_of(problem, index, options, regions_of(problem)):
        if engines.get(key, 0.0) <= 0.0:
            continue
        cost = way.load.gpu_ms * serving.micro_usd_per_gpu_ms.get(key, 0.0)
        cost += way.load.kv_token_s * serving.micro_usd_per_kv_token_s.get(key, 0.0)
        legs = by_region.setdefault(key[1], {})
        role = problem.pools[way.pool].role
        legs[role] = min(cost, legs.get(role, cost))
    for legs in by_region.values():
        if Role.BOTH in legs:
            best = min(best, legs[Role.BOTH])
        if Role.PREFILL in legs and Role.DECODE in legs:
            best = min(best, legs[Role.PREFILL] + legs[Role.DECODE])
    return 0.0 if best == float("inf") else best
