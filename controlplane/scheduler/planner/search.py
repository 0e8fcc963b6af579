"""How the fleet programme is searched: models apart at prices of GPUs, then together, then a few at a time again.

Models meet only in the nodes that they share. So each is solved alone against the shadow prices of
the whole (a column), the columns are put together with the nodes, and what does not fit well is
mended by letting one or two models go at a time. The linear relaxation proves how near the best it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

from controlplane.domain.ids import ModelName
from controlplane.scheduler.planner.inventory import merged
from controlplane.scheduler.planner.places import (
    as_merged,
    find_places,
    place_columns,
    standing_target,
    tidy,
)
from controlplane.scheduler.planner.prices import PoolKey
from controlplane.scheduler.planner.programme import (
    Column,
    EnginePrice,
    Programme,
    Question,
    Relaxation,
    Target,
    engine_loads,
    flows_count,
    hint,
    left_cost,
    needed_engines,
    read_column,
    read_target,
    relax,
    start_micro_usd,
)

# Parts of the time that all columns may take, and that the first whole fleet is sure of.
COLUMNS_TIME_RATIO: Final = 0.4
TOGETHER_TIME_RATIO: Final = 0.25
COLUMN_GAP_RATIO: Final = 0.005
# What is kept back for finding places on nodes.
PLACES_TIME_RATIO: Final = 0.1
MEND_S_MAX: Final = 0.5
# One model at a time mends most and fastest; then two.
MEND_MODELS: Final = (1, 2)
# A fleet that is short of so few models is mended where it is short, before it is thought over anew.
REPAIR_MODELS_MAX: Final = 3
REPAIR_S_MAX: Final = 0.5
# With so few flows the programme is solved in one piece.
FLOWS_WHOLE_MAX: Final = 160
# A part of the time that the piece as a whole may take.
WHOLE_TIME_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best fleet found and the proof: nothing costs less than `bound`."""

    target: Target
    bound: float
    solve_s: float

    @property
    def gap_ratio(self) -> float:
        if self.target.objective <= 0.0:
            return 0.0
        return max(0.0, 1.0 - self.bound / self.target.objective)


class _Solver:
    """CP-SAT with one set of parameters, and the time that it took."""

    def __init__(self, question: Question, seconds_max: float) -> None:
        from ortools.sat.python import cp_model

        self._sat = cp_model
        self.workers = question.problem.limits.workers
        self.left_s = seconds_max
        self.spent_s = 0.0

    def solve(
        self, programme: Programme, seconds_max: float, gap_ratio: float, *, is_small: bool = False
    ) -> Any | None:
        """The solver with a solution in it, or None. Small ones are not worth much preparation."""
        seconds = min(seconds_max, self.left_s)
        if seconds <= 0.0:
            return None
        solver: Any = self._sat.CpSolver()
        solver.parameters.num_workers = self.workers
        solver.parameters.random_seed = 1
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.relative_gap_limit = gap_ratio
        if is_small:
            solver.parameters.cp_model_probing_level = 0
            solver.parameters.linearization_level = 2
        status = solver.solve(programme.cp)
        self.spend(solver.wall_time)
        if status not in (self._sat.OPTIMAL, self._sat.FEASIBLE):
            return None
        return solver

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds
        self.spent_s += seconds


def search(question: Question, stay: Target, seconds_max: float, gap_ratio: float) -> Found:
    """The cheapest fleet to be found in time; stops when it is proven within `gap_ratio` of the best.

    `stay` is the fleet as it stands. Where it, or the fleet that the standing plan leads to, is
    within the gap that the limits allow, it is the answer: a search that stops near the best would
    find others as good, over and over. Time is that of the solvers, by their own clocks.
    """
    solver = _Solver(question, seconds_max)
    models = sorted(
        {
            demand.model
            for demand, rate in zip(question.problem.demands, question.planned, strict=True)
            if rate > 0.0
        }
    )
    coarse = replace(question, stock=merged(question.stock))
    relaxed = relax(Programme(coarse, models, {}))
    solver.spend(relaxed.solve_s)
    bound = relaxed.bound
    standing = standing_target(question)
    candidates = [stay] if standing is None else [stay, standing]
    gap_max = question.problem.limits.gap_ratio_max
    if good := _good_enough(candidates, bound, gap_max):
        return _found(good, bound, solver)
    if repaired := _repair(question, models, stay, solver, gap_ratio):
        candidates.append(repaired)
        if good := _good_enough(candidates, bound, gap_max):
            return _found(good, bound, solver)
    best = min(candidates, key=lambda one: one.objective)
    if flows_count(question) <= FLOWS_WHOLE_MAX:
        everything = Programme(question, models, {})
        hint(everything, best)
        done = solver.solve(everything, seconds_max * WHOLE_TIME_RATIO, gap_ratio / 10.0)
        if done is not None:
            best = _better(best, tidy(question, read_target(everything, done)))
            bound = max(bound, done.best_objective_bound + everything.constant)
            if good := _good_enough(candidates, bound, gap_max):
                return _found(good, bound, solver)
            if best.objective * (1.0 - gap_ratio) <= bound:
                return _found(best, bound, solver)
    # The relaxation with engines rounded up is a fleet already, whatever time is left.
    rounded = [_column_of(question, relaxed, model) for model in models]
    best = _better(best, place_columns(question, rounded))
    solver.left_s -= seconds_max * PLACES_TIME_RATIO
    rough = _rough(coarse, models, best, relaxed, solver, gap_ratio)
    solver.left_s += seconds_max * PLACES_TIME_RATIO
    placed = find_places(question, rough)
    best = _better(best, placed)
    exact = Programme(
        question, (), {model: [_column_of(question, rough, model)] for model in models}
    )
    hint(exact, placed)
    done = solver.solve(exact, seconds_max * PLACES_TIME_RATIO, gap_ratio / 10.0)
    if done is not None:
        best = _better(best, read_target(exact, done))
    best = tidy(question, _mend(question, models, best, relaxed, solver, gap_ratio))
    # What changes little is preferred to what is hardly better.
    good = _good_enough(candidates, best.objective, question.problem.limits.gain_ratio_min)
    return _found(good or best, bound, solver)


def _good_enough(candidates: Sequence[Target], bound: float, gap_ratio: float) -> Target | None:
    """The first of the fleets that is within a gap of the bound."""
    for target in candidates:
        if target.objective * (1.0 - gap_ratio) <= bound:
            return target
    return None


def _repair(
    question: Question,
    models: Sequence[ModelName],
    stay: Target,
    solver: _Solver,
    gap_ratio: float,
) -> Target | None:
    """The fleet as it stands, changed for the models alone whose work it leaves out. None: too many."""
    demands = question.problem.demands
    short = sorted(
        {demand.model for demand, left in zip(demands, stay.left_ratio, strict=True) if left > 0.0}
    )
    if not 0 < len(short) <= REPAIR_MODELS_MAX:
        return None
    pools = question.problem.pools
    others = {
        model: [
            replace(
                _column_of(question, stay, model),
                engines={
                    key: count
                    for key, count in stay.engines.items()
                    if pools[key[0]].model == model
                },
            )
        ]
        for model in models
        if model not in short
    }
    programme = Programme(question, short, others)
    hint(programme, stay)
    done = solver.solve(programme, REPAIR_S_MAX, gap_ratio / 10.0)
    return None if done is None else tidy(question, read_target(programme, done))


def _found(target: Target, bound: float, solver: _Solver) -> Found:
    return Found(target=target, bound=min(bound, target.objective), solve_s=solver.spent_s)


def _rough(
    question: Question,
    models: Sequence[ModelName],
    start: Target,
    relaxed: Relaxation,
    solver: _Solver,
    gap_ratio: float,
) -> Target:
    """The best engine counts while it is left out of account which node holds what."""
    best = as_merged(question, start)
    each_s = solver.left_s * COLUMNS_TIME_RATIO / max(1, len(models))
    # Columns that are best one by one need not fit together; those of the relaxation nearly do.
    columns = {
        model: [
            _column(question, model, relaxed, solver, each_s),
            _column_of(question, relaxed, model),
        ]
        for model in models
    }
    programme = Programme(question, (), columns)
    hint(programme, best)
    done = solver.solve(programme, solver.left_s * TOGETHER_TIME_RATIO, gap_ratio / 4.0)
    if done is not None:
        best = _better(best, read_target(programme, done))
    # Finding places will cost a little more, so half of the gap is left to it.
    return _mend(question, models, best, relaxed, solver, gap_ratio / 2.0)


def _better(one: Target, other: Target) -> Target:
    return one if one.objective <= other.objective else other


def _column(
    question: Question,
    model: ModelName,
    relaxed: Relaxation,
    solver: _Solver,
    seconds_max: float,
) -> Column:
    """The cheapest way to serve a model at the relaxation's prices.

    If none is found in time: as the relaxation serves it, with engines rounded up.
    """
    programme = Programme(question, (model,), {}, _engine_prices(question, model, relaxed))
    done = solver.solve(programme, seconds_max, COLUMN_GAP_RATIO, is_small=True)
    if done is None:
        return _column_of(question, relaxed, model)
    return read_column(programme, done.value)


def _engine_prices(
    question: Question, model: ModelName, relaxed: Relaxation
) -> dict[PoolKey, EnginePrice]:
    """What engines of a model cost at the relaxation's prices of GPUs.

    Those of nodes that can not be planned with are free, those that are there need only room.
    """
    problem = question.problem
    prices: dict[PoolKey, list[tuple[int, int]]] = {}
    for pool_index in sorted(question.pools_used()):
        pool = problem.pools[pool_index]
        if pool.model != model:
            continue
        for shape_index, shape in enumerate(problem.shapes):
            if shape.gpu_type != pool.gpu_type or shape.gpus < pool.gpus:
                continue
            key = (pool_index, shape.region)
            room = pool.gpus * relaxed.gpu_micro_usd.get(shape_index, 0.0)
            if key not in prices:
                fixed = question.stock.fixed.get(key, 0)
                there = question.stock.actual.get(key, 0) - fixed
                prices[key] = [(fixed, 0), (there, round(room))]
            start = start_micro_usd(problem, shape_index, pool_index)
            if pool.gpus == shape.gpus:
                start += round(relaxed.empty_node_micro_usd.get(shape_index, 0.0))
            most = question.nodes(shape_index) * (shape.gpus // pool.gpus)
            prices[key].append((most, round(room) + start))
    return {key: tuple(steps) for key, steps in prices.items()}


def _mend(
    question: Question,
    models: Sequence[ModelName],
    best: Target,
    relaxed: Relaxation,
    solver: _Solver,
    gap_ratio: float,
) -> Target:
    """Let a few models go at a time, with the nodes, while all others keep what they have.

    Those first whose engines are filled worst, for they have most to win.
    """
    tried: set[frozenset[ModelName]] = set()
    while solver.left_s > 0.0 and best.objective * (1.0 - gap_ratio) > relaxed.bound:
        waste = {model: _waste(question, model, best, relaxed) for model in models}
        turns = [
            frozenset(some)
            for size in MEND_MODELS
            for some in combinations(models, size)
            if frozenset(some) not in tried
        ]
        if not turns:
            break
        some = min(
            turns,
            key=lambda turn: (len(turn), -sum(waste[model] for model in turn), sorted(turn)),
        )
        tried.add(some)
        others = {
            model: [_column_of(question, best, model)] for model in models if model not in some
        }
        programme = Programme(question, some, others)
        hint(programme, best)
        done = solver.solve(programme, MEND_S_MAX, gap_ratio / 10.0)
        if done is None:
            continue
        found = read_target(programme, done)
        if found.objective < best.objective:
            best = found
            tried = {some}
    return best


def _waste(question: Question, model: ModelName, target: Target, relaxed: Relaxation) -> float:
    """Price of what a model's engines are not filled with, at the relaxation's prices of GPUs."""
    problem = question.problem
    flows = {
        key: ratio for key, ratio in target.flows.items() if problem.demands[key[0]].model == model
    }
    loads = engine_loads(question, flows)
    total = 0.0
    for key, count in target.engines.items():
        pool = problem.pools[key[0]]
        if pool.model != model:
            continue
        price = min(
            (
                relaxed.gpu_micro_usd.get(index, 0.0)
                for index, shape in enumerate(problem.shapes)
                if shape.gpu_type == pool.gpu_type and shape.region == key[1]
            ),
            default=0.0,
        )
        total += price * pool.gpus * (count - loads.get(key, 0.0))
    return total


def _column_of(question: Question, target: Target | Relaxation, model: ModelName) -> Column:
    """What a fleet does for a model, with no more engines than its flows need."""
    demands = question.problem.demands
    flows = {key: ratio for key, ratio in target.flows.items() if demands[key[0]].model == model}
    left = {
        index: target.left_ratio[index]
        for index, demand in enumerate(demands)
        if demand.model == model
    }
    return Column(
        engines=needed_engines(question, flows),
        flows=flows,
        left_ratio=left,
        cost=left_cost(question, left),
    )
