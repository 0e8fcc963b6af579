"""The fleet as an integer programme: engines kept, started, stopped and nodes had, against the work to be served.

Built once as a CP-SAT model; the linear relaxation is the same model without integrality. Money in whole
micro-dollars over the time that a plan stands. It knows nothing of how it is searched.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from controlplane.domain.catalog import Role
from controlplane.domain.ids import GpuTypeName, ModelName, RegionName
from controlplane.scheduler.perf_model import MS_PER_S
from controlplane.scheduler.planner.inventory import Group, Inventory
from controlplane.scheduler.planner.loads import ClassOptions, deferrable_share, stretch_of
from controlplane.scheduler.planner.prices import (
    FLOW_RATIO_MIN,
    PoolKey,
    regions_of,
    ways_of,
    worth,
)
from controlplane.scheduler.planner.problem import Problem

SECONDS_PER_HOUR: Final = 3_600.0
MICRO_USD_PER_USD: Final = 1_000_000.0
# A class's arrivals are dealt out in parts of about this much of an engine.
FLOW_PART_ENGINES: Final = 0.02
FLOW_PARTS_MIN: Final = 10
FLOW_PARTS_MAX: Final = 2_000
# Engines are counted in units of this fraction where flows are weighed against them.
ENGINE_UNITS: Final = 100_000
# Less of an engine than this is rounding.
ENGINE_ROUNDING: Final = 1e-6
# Leaving out work that has a floor costs this many times what serving it would, at its dearest.
LEFT_OUT_FACTOR: Final = 10

Term = tuple[int, Any]
# What engines of a pool cost when nodes are left out of account: how many at how many micro-dollars
# each, the cheapest first.
EnginePrice = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way to serve all work of a model: engines of each pool, and what is left out.

    `flows` are parts of a class's arrivals by (class index, pool), 0..1. `cost` is the price of what
    is left out; engines are priced where columns are put together.
    """

    engines: Mapping[PoolKey, int]
    flows: Mapping[tuple[int, PoolKey], float]
    left_ratio: Mapping[int, float]
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTarget:
    """What becomes of a group: nodes released, nodes emptied, engines kept, woken, changed in role.

    `kept` and `woken` by pool index; `changed` by (pool before, pool after).
    """

    group: Group
    released: int
    emptied: int
    kept: Mapping[int, int]
    woken: Mapping[int, int]
    changed: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A fleet: what becomes of each group, engines that are new by (shape, pool), nodes to be added.

    `engines` counts what the fleet then has of each pool. `left_ratio` is the part of each class that
    it leaves out, `flows` who serves the rest. Money as the module says.
    """

    groups: tuple[GroupTarget, ...]
    loaded: Mapping[tuple[int, int], int]
    bought: Mapping[int, int]
    engines: Mapping[PoolKey, int]
    left_ratio: tuple[float, ...]
    flows: Mapping[tuple[int, PoolKey], float]
    objective: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """`bound`: nothing costs less. Prices of a GPU by shape, and of a whole empty node.

    `flows` and `left_ratio` are as in `Target`; engines are not whole there.
    """

    bound: float
    flows: Mapping[tuple[int, PoolKey], float]
    left_ratio: tuple[float, ...]
    gpu_micro_usd: Mapping[int, float]
    empty_node_micro_usd: Mapping[int, float]
    solve_s: float


def engine_micro_usd_per_s(problem: Problem, shape: int, pool: int) -> float:
    """Rent of the part of a node that an engine holds."""
    node = problem.shapes[shape]
    return problem.pools[pool].gpus / node.gpus * node.micro_usd_per_hour / SECONDS_PER_HOUR


def start_micro_usd(problem: Problem, shape: int, pool: int) -> int:
    """What it costs to load an engine: its machine while it loads, and the change."""
    rent = engine_micro_usd_per_s(problem, shape, pool)
    return ceil(rent * problem.pools[pool].load_s) + problem.limits.change_micro_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem with what was derived from it once: where classes may run, what to plan for."""

    problem: Problem
    options: tuple[ClassOptions, ...]
    planned: tuple[float, ...]
    stock: Inventory
    gpus_less: Mapping[int, int]

    def pools_used(self) -> set[int]:
        return {
            way.pool
            for ways, rate in zip(self.options, self.planned, strict=True)
            if rate > 0.0
            for way in ways.every()
        }

    def nodes(self, shape: int) -> int:
        """Nodes of a shape that may be planned with: there, or to be added."""
        there = sum(len(group.nodes) for group in self.stock.groups if group.shape == shape)
        return there + self.problem.shapes[shape].nodes_more_max

    def dearest_micro_usd_per_s(self, pool: int) -> float:
        """Rent of an engine of a pool where it is dearest."""
        return max(
            (
                engine_micro_usd_per_s(self.problem, index, pool)
                for index, shape in enumerate(self.problem.shapes)
                if shape.gpu_type == self.problem.pools[pool].gpu_type
            ),
            default=0.0,
        )


class Programme:
    """The work of `models` as flows that are dealt out, of all others by one of their `columns`.

    `engine_prices` replaces the nodes: then an engine has a price instead of a place.
    """

    def __init__(
        self,
        question: Question,
        models: Collection[ModelName],
        columns: Mapping[ModelName, Sequence[Column]],
        engine_prices: Mapping[PoolKey, EnginePrice] | None = None,
    ) -> None:
        from ortools.sat.python import cp_model

        self._sum: Any = cp_model.LinearExpr.weighted_sum
        self.question = question
        self.problem = question.problem
        self.cp: Any = cp_model.CpModel()
        self.models = frozenset(models)
        self.columns = columns
        self.cost: list[Term] = []
        self.constant = 0
        self.supply: dict[PoolKey, list[Term]] = {}
        self.supply_fixed: dict[PoolKey, int] = dict(question.stock.fixed)
        self.keep: list[dict[int, Any]] = []
        self.wake: list[dict[int, Any]] = []
        self.change: list[dict[tuple[int, int], Any]] = []
        self.release: list[Any] = []
        self.empty: list[Any] = []
        self.load: dict[tuple[int, int], Any] = {}
        self.buy: dict[int, Any] = {}
        self.flow: dict[tuple[int, PoolKey], Any] = {}
        self.left: dict[int, Any] = {}
        self.left_cost: list[Term] = []
        self.parts: dict[int, int] = {}
        self.choice: dict[ModelName, list[Any]] = {}
        self.room_rows: dict[int, int] = {}
        self.whole_rows: dict[int, int] = {}
        self.used = question.pools_used()
        self.siblings = _siblings(self.problem, self.used)
        if engine_prices is None:
            self._fleet()
        else:
            self._priced(engine_prices)
        self._work()
        self._chosen()
        self.cost.extend(self.left_cost)
        self.cp.minimize(self.expression(self.cost))

    def expression(self, terms: Sequence[Term]) -> Any:
        return self._sum([variable for _, variable in terms], [weight for weight, _ in terms])

    def _at_most(self, terms: Sequence[Term], limit: int) -> int:
        return int(self.cp.add(self.expression(terms) <= limit).index)

    # ------------------------------------------------------------ engines and nodes

    def _priced(self, prices: Mapping[PoolKey, EnginePrice]) -> None:
        self.supply_fixed = {}
        for key, steps in prices.items():
            terms = self.supply.setdefault(key, [])
            for most, micro_usd in steps:
                engines = self.cp.new_int_var(0, most, "")
                self.cost.append((micro_usd, engines))
                terms.append((1, engines))

    def _fleet(self) -> None:
        stands_s = self.problem.limits.stands_s
        room: dict[int, list[Term]] = {}
        room_fixed: dict[int, int] = {}
        whole: dict[int, list[Term]] = {}
        for group in self.question.stock.groups:
            shape = self.problem.shapes[group.shape]
            size = len(group.nodes)
            rent = round(shape.micro_usd_per_hour / SECONDS_PER_HOUR * stands_s)
            self.constant += rent * size
            release = self.cp.new_int_var(0, size if group.is_releasable else 0, "")
            empty = self.cp.new_int_var(0, group.nodes_unblocked, "")
            self._at_most([(1, release), (1, empty)], size)
            self.cost.append((-rent, release))
            self.release.append(release)
            self.empty.append(empty)
            taken = self._kept(group, release, empty) + self._woken(group, release)
            gpus = shape.gpus * size - group.gpus_blocked
            gone = [(shape.gpus, release), *taken]
            if not group.is_alike:
                # Whatever stays where it is leaves the nodes that are to be empty.
                self._at_most([*gone, (shape.gpus, empty)], gpus)
            room.setdefault(group.shape, []).extend(gone)
            room_fixed[group.shape] = room_fixed.get(group.shape, 0) + gpus
            whole.setdefault(group.shape, []).append((-1, empty))
        for index, shape in enumerate(self.problem.shapes):
            rent = round(shape.micro_usd_per_hour / SECONDS_PER_HOUR * stands_s)
            self.constant += rent * self.question.stock.nodes_fixed.get(index, 0)
            taken = room.get(index, [])
            ready = whole.get(index, [])
            if shape.nodes_more_max > 0:
                buy = self.cp.new_int_var(0, shape.nodes_more_max, "")
                wait = shape.micro_usd_per_hour / SECONDS_PER_HOUR * shape.provision_s
                self.cost.append((rent + round(wait), buy))
                self.buy[index] = buy
                taken.append((-shape.gpus, buy))
                ready.append((-1, buy))
            if self.question.nodes(index) == 0:
                continue
            full = self._loaded(index, taken)
            less = self.question.gpus_less.get(index, 0)
            self.room_rows[index] = self._at_most(taken, max(0, room_fixed.get(index, 0) - less))
            if full:
                # An engine as large as a node needs a node that holds nothing else.
                self.whole_rows[index] = self._at_most(full + ready, 0)

    def _loaded(self, index: int, taken: list[Term]) -> list[Term]:
        """Engines that are new on nodes of a shape; answers those that fill a whole node."""
        shape = self.problem.shapes[index]
        full: list[Term] = []
        for pool_index in sorted(self.used):
            pool = self.problem.pools[pool_index]
            if pool.gpu_type != shape.gpu_type or pool.gpus > shape.gpus:
                continue
            most = self.question.nodes(index) * (shape.gpus // pool.gpus)
            load = self.cp.new_int_var(0, most, "")
            self.load[index, pool_index] = load
            self.cost.append((start_micro_usd(self.problem, index, pool_index), load))
            taken.append((pool.gpus, load))
            if pool.gpus == shape.gpus:
                full.append((1, load))
            self.supply.setdefault((pool_index, shape.region), []).append((1, load))
        return full

    def _kept(self, group: Group, release: Any, empty: Any) -> list[Term]:
        """Engines that stay awake, or change their role in place; answers the GPUs that they take."""
        change_cost = self.problem.limits.change_micro_usd
        region = self.problem.shapes[group.shape].region
        kept: dict[int, Any] = {}
        changes: dict[tuple[int, int], Any] = {}
        taken: list[Term] = []
        for pool_index, count in group.awake:
            pool = self.problem.pools[pool_index]
            keep = self.cp.new_int_var(0, count, "")
            kept[pool_index] = keep
            parts = [(1, keep)]
            self.supply.setdefault((pool_index, region), []).append((1, keep))
            for other_index in self.siblings[pool_index]:
                change = self.cp.new_int_var(0, count, "")
                self.supply.setdefault((other_index, region), []).append((1, change))
                changes[pool_index, other_index] = change
                parts.append((1, change))
            if group.is_alike:
                each = count // len(group.nodes)
                self._at_most([*parts, (each, release), (each, empty)], count)
            elif len(parts) > 1:
                self._at_most(parts, count)
            taken.extend((pool.gpus, variable) for _, variable in parts)
            # What is not kept as it is costs a change.
            self.constant += change_cost * count
            self.cost.append((-change_cost, keep))
        self.keep.append(kept)
        self.change.append(changes)
        return taken

    def _woken(self, group: Group, release: Any) -> list[Term]:
        region = self.problem.shapes[group.shape].region
        woken: dict[int, Any] = {}
        taken: list[Term] = []
        for pool_index, count in group.asleep:
            pool = self.problem.pools[pool_index]
            if pool_index not in self.used or pool.wake_s is None:
                continue
            wake = self.cp.new_int_var(0, count, "")
            if group.is_alike:
                self._at_most([(1, wake), (count // len(group.nodes), release)], count)
            rent = engine_micro_usd_per_s(self.problem, group.shape, pool_index)
            cost = ceil(rent * pool.wake_s) + self.problem.limits.change_micro_usd
            self.cost.append((cost, wake))
            taken.append((pool.gpus, wake))
            self.supply.setdefault((pool_index, region), []).append((1, wake))
            woken[pool_index] = wake
        self.wake.append(woken)
        return taken

    # ------------------------------------------------------------ work

    def _work(self) -> None:
        gpu: dict[PoolKey, list[Term]] = {}
        kv: dict[PoolKey, list[Term]] = {}
        waiting: dict[PoolKey, list[Term]] = {}
        regions = regions_of(self.problem)
        for index, demand in enumerate(self.problem.demands):
            rate = self.question.planned[index]
            if demand.model not in self.models or rate <= 0.0:
                continue
            parts = parts_of(self.question, index)
            self.parts[index] = parts
            left = self.cp.new_int_var(0, parts, "")
            self.left[index] = left
            served: list[Term] = [(1, left)]
            legs: dict[RegionName, list[Term]] = {}
            for way, key in ways_of(self.problem, index, self.question.options[index], regions):
                if key not in self.supply and key not in self.supply_fixed:
                    continue
                pool = self.problem.pools[way.pool]
                flow = self.cp.new_int_var(0, parts, "")
                self.flow[index, key] = flow
                engines = rate * way.load.gpu_ms / MS_PER_S
                tokens = rate * way.load.kv_token_s / max(1, pool.kv_tokens_capacity)
                weight = ceil(engines / parts * ENGINE_UNITS)
                gpu.setdefault(key, []).append((weight, flow))
                kv.setdefault(key, []).append((ceil(tokens / parts * ENGINE_UNITS), flow))
                if demand.deferrable_s > 0.0:
                    waiting.setdefault(key, []).append((weight, flow))
                if pool.role is not Role.PREFILL:
                    served.append((1, flow))
                if pool.role is not Role.BOTH:
                    sign = 1 if pool.role is Role.PREFILL else -1
                    legs.setdefault(key[1], []).append((sign, flow))
            self.cp.add(self.expression(served) == parts)
            for terms in legs.values():
                self.cp.add(self.expression(terms) == 0)
            self._left_out(index, left, parts)
        for key, terms in gpu.items():
            self._within(key, terms, ENGINE_UNITS)
        for key, terms in kv.items():
            self._within(key, terms, ENGINE_UNITS)
        for key, terms in waiting.items():
            share = deferrable_share(stretch_of(self.problem, self.problem.pools[key[0]].model))
            self._within(key, terms, int(ENGINE_UNITS * share))

    def _within(self, key: PoolKey, terms: Sequence[Term], units: int) -> None:
        limits = [(-units * weight, variable) for weight, variable in self.supply.get(key, [])]
        self._at_most([*terms, *limits], units * self.supply_fixed.get(key, 0))

    def _left_out(self, index: int, left: Any, parts: int) -> None:
        fixed, each = left_out_micro_usd(self.question, index)
        self.left_cost.append((ceil(each / parts), left))
        if fixed > 0:
            short = self.cp.new_bool_var("")
            self._at_most([(1, left), (-parts, short)], 0)
            self.left_cost.append((fixed, short))

    def _chosen(self) -> None:
        needs: dict[PoolKey, list[Term]] = {}
        for model, columns in self.columns.items():
            if model in self.models:
                continue
            picks = [self.cp.new_bool_var("") for _ in columns]
            self.choice[model] = picks
            self.cp.add_exactly_one(picks)
            for pick, column in zip(picks, columns, strict=True):
                self.cost.append((column.cost, pick))
                for key, count in column.engines.items():
                    if count > 0:
                        needs.setdefault(key, []).append((count, pick))
        for key, terms in needs.items():
            supply = [(-weight, variable) for weight, variable in self.supply.get(key, [])]
            self._at_most([*terms, *supply], self.supply_fixed.get(key, 0))


def _siblings(problem: Problem, used: Collection[int]) -> list[list[int]]:
    """For each pool, the pools that differ from it in the role alone and have work."""
    alike: dict[tuple[ModelName, GpuTypeName, int], list[int]] = {}
    for index, pool in enumerate(problem.pools):
        alike.setdefault((pool.model, pool.gpu_type, pool.gpus), []).append(index)
    return [
        [
            other
            for other in alike[pool.model, pool.gpu_type, pool.gpus]
            if other in used and other != index
        ]
        for index, pool in enumerate(problem.pools)
    ]


def flows_count(question: Question) -> int:
    """How many flows a programme of all models has."""
    regions = regions_of(question.problem)
    return sum(
        len(ways_of(question.problem, index, question.options[index], regions))
        for index, rate in enumerate(question.planned)
        if rate > 0.0
    )


def parts_of(question: Question, index: int) -> int:
    """In how many parts a class's arrivals are dealt out."""
    loads = [way.load.gpu_ms for way in question.options[index].every()]
    engines = question.planned[index] * max(loads, default=0.0) / MS_PER_S
    return min(FLOW_PARTS_MAX, max(FLOW_PARTS_MIN, ceil(engines / FLOW_PART_ENGINES)))


def left_out_micro_usd(question: Question, index: int) -> tuple[int, float]:
    """What it costs to leave out anything of a class, and to leave out all of it.

    Work without a floor costs its value. What has one also costs more than any engine, so that
    nothing is left out to save money, and more by its rank, so that short capacity goes to the
    highest priority.
    """
    problem = question.problem
    demand = problem.demands[index]
    rate = question.planned[index] * problem.limits.stands_s
    value = worth(problem)[index]
    if demand.success_floor_ratio <= 0.0:
        return 0, rate * value
    ranks = sorted({one.priority for one in problem.demands})
    per_workflow = 0.0
    engine = 0.0
    for way in question.options[index].every():
        rent = question.dearest_micro_usd_per_s(way.pool)
        per_workflow = max(per_workflow, rent * way.load.gpu_ms / MS_PER_S)
        engine = max(engine, rent * (problem.limits.stands_s + problem.pools[way.pool].load_s))
    rank = 1 + ranks.index(demand.priority)
    return ceil(LEFT_OUT_FACTOR * engine), rate * (value + LEFT_OUT_FACTOR * rank * per_workflow)


def keep_group(group: Group) -> GroupTarget:
    """A group that stays as it is."""
    return GroupTarget(
        group=group,
        released=0,
        emptied=0,
        kept=dict(group.awake),
        woken={pool: 0 for pool, _ in group.asleep},
        changed={},
    )


def left_cost(question: Question, left_ratio: Mapping[int, float]) -> int:
    """Price of what is left out, as the programme counts it."""
    total = 0.0
    for index, ratio in left_ratio.items():
        if ratio > 0.0:
            fixed, each = left_out_micro_usd(question, index)
            total += fixed + each * ratio
    return ceil(total)


def needed_engines(
    question: Question, flows: Mapping[tuple[int, PoolKey], float]
) -> dict[PoolKey, int]:
    """Whole engines of each pool that flows need."""
    loads = engine_loads(question, flows)
    return {key: ceil(load - ENGINE_ROUNDING) for key, load in loads.items()}


def engine_loads(
    question: Question, flows: Mapping[tuple[int, PoolKey], float]
) -> dict[PoolKey, float]:
    """Engines of each pool that flows fill: with GPU time, with KV, with what may be deferrable."""
    problem = question.problem
    gpu: dict[PoolKey, float] = {}
    kv: dict[PoolKey, float] = {}
    waiting: dict[PoolKey, float] = {}
    loads = [{way.pool: way.load for way in ways.every()} for ways in question.options]
    for (index, key), ratio in flows.items():
        pool = problem.pools[key[0]]
        load = loads[index][key[0]]
        rate = question.planned[index] * ratio
        engines = rate * load.gpu_ms / MS_PER_S
        gpu[key] = gpu.get(key, 0.0) + engines
        kv[key] = kv.get(key, 0.0) + rate * load.kv_token_s / max(1, pool.kv_tokens_capacity)
        if problem.demands[index].deferrable_s > 0.0:
            share = deferrable_share(stretch_of(problem, pool.model))
            waiting[key] = waiting.get(key, 0.0) + engines / max(share, 1.0 / ENGINE_UNITS)
    return {key: max(gpu[key], kv[key], waiting.get(key, 0.0)) for key in gpu}


def read_target(programme: Programme, solver: Any) -> Target:
    """What the solver found, as a fleet."""

    def value(variable: Any) -> int:
        return int(solver.value(variable))

    question = programme.question
    flows = {key: value(one) / programme.parts[key[0]] for key, one in programme.flow.items()}
    left = {index: value(one) / programme.parts[index] for index, one in programme.left.items()}
    for model, picks in programme.choice.items():
        for pick, column in zip(picks, programme.columns[model], strict=True):
            if value(pick):
                flows.update(column.flows)
                left.update(column.left_ratio)
    engines = dict(programme.supply_fixed)
    for key, terms in programme.supply.items():
        engines[key] = engines.get(key, 0) + sum(value(one) for _, one in terms)
    return Target(
        groups=tuple(
            GroupTarget(
                group=group,
                released=value(programme.release[number]),
                emptied=value(programme.empty[number]),
                kept={pool: value(one) for pool, one in programme.keep[number].items()},
                woken={pool: value(one) for pool, one in programme.wake[number].items()},
                changed={pair: value(one) for pair, one in programme.change[number].items()},
            )
            for number, group in enumerate(question.stock.groups)
        ),
        loaded={key: value(one) for key, one in programme.load.items() if value(one)},
        bought={key: value(one) for key, one in programme.buy.items() if value(one)},
        engines=engines,
        left_ratio=tuple(left.get(index, 0.0) for index in range(len(question.problem.demands))),
        flows={key: ratio for key, ratio in flows.items() if ratio > 0.0},
        objective=solver.objective_value + programme.constant,
    )


def hint(programme: Programme, target: Target) -> None:
    """Tell the solver of a fleet that it can only improve on."""
    add = programme.cp.add_hint
    for number, group in enumerate(target.groups):
        add(programme.release[number], group.released)
        add(programme.empty[number], group.emptied)
        for pool, variable in programme.keep[number].items():
            add(variable, group.kept[pool])
        for pool, variable in programme.wake[number].items():
            add(variable, group.woken.get(pool, 0))
        for pair, variable in programme.change[number].items():
            add(variable, group.changed.get(pair, 0))
    for key, variable in programme.load.items():
        add(variable, target.loaded.get(key, 0))
    for shape, variable in programme.buy.items():
        add(variable, target.bought.get(shape, 0))
    for place, variable in programme.flow.items():
        add(variable, round(target.flows.get(place, 0.0) * programme.parts[place[0]]))
    for index, variable in programme.left.items():
        add(variable, round(target.left_ratio[index] * programme.parts[index]))


def read_column(programme: Programme, value: Any) -> Column:
    """The counts, flows and left-overs of the one model that a programme is about.

    `value` reads a variable: a solver's `value`, or a callback's.
    """
    return Column(
        engines={
            key: sum(int(value(one)) for _, one in terms) for key, terms in programme.supply.items()
        },
        flows={
            key: int(value(one)) / programme.parts[key[0]]
            for key, one in programme.flow.items()
            if int(value(one)) > 0
        },
        left_ratio={
            index: int(value(one)) / programme.parts[index] for index, one in programme.left.items()
        },
        cost=sum(weight * int(value(one)) for weight, one in programme.left_cost),
    )


def relax(programme: Programme) -> Relaxation:
    """The same programme without integrality, by GLOP: a lower bound, and what room is worth.

    Raises RuntimeError when the solver finds no optimum.
    """
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("GLOP")  # type: ignore[no-untyped-call]
    model = programme.cp.proto
    variables = [
        solver.NumVar(one.domain[0], one.domain[len(one.domain) - 1], "") for one in model.variables
    ]
    rows = []
    scales = []
    infinity = solver.infinity()
    for constraint in model.constraints:
        linear = constraint.linear
        low, high = linear.domain[0], linear.domain[len(linear.domain) - 1]
        weights = _collected(linear.vars, linear.coeffs)
        # The solver's tolerances are for numbers near 1.
        scale = float(max((abs(weight) for weight in weights.values()), default=1) or 1)
        row = solver.Constraint(
            low / scale if low > -_CP_INFINITY else -infinity,
            high / scale if high < _CP_INFINITY else infinity,
        )
        rows.append(row)
        scales.append(scale)
        for number, weight in weights.items():
            row.SetCoefficient(variables[number], weight / scale)
    objective = solver.Objective()
    objective.SetMinimization()
    for number, weight in _collected(model.objective.vars, model.objective.coeffs).items():
        objective.SetCoefficient(variables[number], weight / MICRO_USD_PER_USD)
    status = solver.Solve()
    if status != pywraplp.Solver.OPTIMAL:
        raise RuntimeError(f"the relaxed fleet programme has no optimum: status {status}")

    def price(number: int) -> float:
        return max(0.0, -float(rows[number].dual_value()) * MICRO_USD_PER_USD / scales[number])

    def ratio(index: int, variable: Any) -> float:
        part = float(variables[variable.index].solution_value()) / programme.parts[index]
        return part if part > FLOW_RATIO_MIN else 0.0

    flows = {key: ratio(key[0], one) for key, one in programme.flow.items()}
    left = {index: ratio(index, one) for index, one in programme.left.items()}
    return Relaxation(
        bound=objective.Value() * MICRO_USD_PER_USD + programme.constant,
        flows={key: part for key, part in flows.items() if part > 0.0},
        left_ratio=tuple(left.get(index, 0.0) for index in range(len(programme.problem.demands))),
        gpu_micro_usd={shape: price(number) for shape, number in programme.room_rows.items()},
        empty_node_micro_usd={
            shape: price(number) for shape, number in programme.whole_rows.items()
        },
        solve_s=solver.wall_time() / MS_PER_S,
    )


# CP-SAT writes an open bound as one end of the 64-bit integers.
_CP_INFINITY: Final = 2**60


def _collected(numbers: Sequence[int], weights: Sequence[int]) -> dict[int, int]:
    total: dict[int, int] = {}
    for number, weight in zip(numbers, weights, strict=True):
        total[number] = total.get(number, 0) + weight
    return total
