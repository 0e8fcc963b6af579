"""What no policy can beat: a fluid linear program, and a clairvoyant schedule for small cases.

Both know every size and deadline beforehand, and grant perfect reuse of prefixes, free placement and
no cold start. With V1 and V2 the successes that they allow, V1 >= V2 >= those of any policy, so the
dollars per success that follow are a floor. Times in seconds, work in engine-seconds.

A step of a batch takes t = base + sum of w_i, where w_i is what sequence i adds to it. Charge each
sequence w_i * t / (t - base): the charges add up to the engine's time. Of a workflow with deadline D
the sums of (t_i - base) over its own steps are at most U = D - gaps - steps * base, and by
Cauchy-Schwarz its charges are then at least

    E = sum w_i + base * (sum sqrt w_i)^2 / U

which is what tight deadlines cost: they forbid large batches.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from cli.simulate.contracts import (
    MICRO_USD_PER_USD,
    MS_PER_S,
    EngineSpec,
    FleetSpec,
    Plan,
    Step,
)

# Tangents to 1/U in a mixed fleet, where a workflow may split its slack over types: slopes relative
# to the one at which the whole workflow runs on one type. More only tighten the bound.
TANGENTS: Final = (0.4, 0.7, 1.0, 1.5, 2.5)
# Instants, from which and to which the programs check that the work between them fits.
WINDOWS_MAX: Final = 24
FLUID_WINDOWS_MAX: Final = 12
# CP-SAT wants integers: hundredths of a second, rounded in favour of the bound.
TICKS_PER_S: Final = 100
SOLVE_S_MAX: Final = 20.0
# In how many parts a workflow may be split over kinds of engines.
PARTS: Final = 100
# In how many parts the value of a workflow is counted.
VALUE_PARTS: Final = 1_000
# Steps of all workflows above which the clairvoyant program keeps its windows of work only.
STEPS_MAX: Final = 2_000
S_PER_HOUR: Final = 3_600.0

Instant = TypeVar("Instant", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`successes` is an upper bound, or what was asked for; `usd_per_success` a lower bound.

    `is_proven` is False where the solver stopped at its limit: the bound holds, but may be loose.
    """

    name: str
    successes: float
    fleet_usd: float
    engines: Mapping[str, float]
    is_proven: bool = True

    @property
    def usd_per_success(self) -> float:
        return self.fleet_usd / self.successes if self.successes > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class _Kind:
    """Equal engines: `count` of them."""

    name: str
    spec: EngineSpec
    count: int


@dataclass(frozen=True, slots=True)
class _Needs:
    """Of a workflow on one kind of engine: `work_s` engine-seconds at least in any batch, `roots` the
    sum of roots of its parts, `steps_s` = steps x base, `kv_token_s` held at least beside the shared prefix.

    Of a workflow with branches the first three are those of the calls that come one after the other and
    take longest; `beside_s` is the work of the others.
    """

    work_s: float
    roots: float
    steps_s: float
    kv_token_s: float
    base_s: float
    beside_s: float = 0.0

    @property
    def alone_s(self) -> float:
        return self.steps_s + self.work_s

    def charged_s(self, slack_s: float) -> float:
        """Engine-seconds at least when its steps may exceed empty ones by `slack_s` in all."""
        return self.all_work_s + self.base_s * self.roots * self.roots / slack_s

    @property
    def all_work_s(self) -> float:
        return self.work_s + self.beside_s


def isolated_s(plan: Plan, spec: EngineSpec) -> float:
    """Seconds from arrival to the end on an idle engine that holds the shared prefix.

    Branches take as long as the longest of them takes alone.
    """
    path, pauses_s = _longest(plan.steps, spec)
    return pauses_s + _sequence(path, spec).alone_s


def engine_work_s(plan: Plan, spec: EngineSpec) -> float:
    """Engine-seconds that the plan adds to the steps that it takes part in, their base not counted."""
    return _needs(plan, spec).all_work_s


def gaps_s(plan: Plan) -> float:
    """Seconds between the steps: that of the last one does not count."""
    return sum(step.gap_s for step in plan.steps[:-1])


def _needs(plan: Plan, spec: EngineSpec) -> _Needs:
    path, _ = _longest(plan.steps, spec)
    need = _sequence(path, spec, plan.prefix_tokens)
    if len(path) == len(plan.steps):
        return need
    work_s = kv_token_s = 0.0
    for steps, prefix_tokens in _chains(plan.steps, plan.prefix_tokens):
        each = _sequence(steps, spec, prefix_tokens)
        work_s += each.work_s
        kv_token_s += each.kv_token_s
    return replace(need, kv_token_s=kv_token_s, beside_s=max(0.0, work_s - need.work_s))


def _chains(steps: tuple[Step, ...], prefix_tokens: int) -> Iterator[tuple[tuple[Step, ...], int]]:
    """The steps, and those of every branch, with the tokens of their shared prefix."""
    yield steps, prefix_tokens
    for step in steps:
        for branch in step.branches:
            yield from _chains(branch.steps, branch.prefix_tokens)


def _longest(steps: tuple[Step, ...], spec: EngineSpec) -> tuple[Sequence[Step], float]:
    """The calls that come one after the other and take longest alone, and the seconds between them."""
    pauses_s = sum(step.gap_s for step in steps[:-1])
    if not any(step.branches for step in steps):
        return steps, pauses_s
    path: list[Step] = []
    for step in steps:
        path.append(step)
        if step.branches:
            ways = [_longest(branch.steps, spec) for branch in step.branches]
            way, between_s = max(ways, key=lambda each: _sequence(each[0], spec).alone_s + each[1])
            path.extend(way)
            pauses_s += between_s
    return path, pauses_s


def _sequence(steps: Sequence[Step], spec: EngineSpec, prefix_tokens: int = 0) -> _Needs:
    """Of steps one after the other, their branches not counted."""
    rates, slowness = spec.rates, spec.slowness_ratio / MS_PER_S
    base_s = rates.decode_ms_base * slowness
    per_kv_s = rates.decode_ms_per_kv_token * slowness
    work_s = roots = kv_token_s = 0.0
    taken = 0
    for step in steps:
        prefill_s = max(1, step.new_tokens) * rates.prefill_ms_per_token * slowness
        decodes = max(0, step.completion_tokens - 1)
        first_s = rates.decode_ms_per_seq * slowness + per_kv_s * step.prompt_tokens
        last_s = first_s + per_kv_s * decodes
        work_s += prefill_s + decodes * 0.5 * (first_s + last_s)
        # The mean of its ends is below the mean of a concave function between them.
        roots += math.sqrt(prefill_s) + decodes * 0.5 * (math.sqrt(first_s) + math.sqrt(last_s))
        taken += 1 + decodes
        kv_token_s += (1 + decodes) * base_s * _own_tokens(step, prefix_tokens)
    return _Needs(work_s, roots, taken * base_s, kv_token_s, base_s)


def _own_tokens(step: Step, prefix_tokens: int) -> int:
    """What is in memory once for all that share it is not charged to one."""
    return max(0, step.prompt_tokens - prefix_tokens)


def _kinds(fleet: FleetSpec) -> list[_Kind]:
    groups: dict[tuple[object, ...], list[EngineSpec]] = {}
    for spec in fleet.engines:
        key = (
            spec.model.name,
            spec.gpu.name,
            spec.gpus,
            spec.kv_tokens_capacity,
            spec.slowness_ratio,
        )
        groups.setdefault(key, []).append(spec)
    return [
        _Kind(
            f"{specs[0].model.name} on {specs[0].gpus} x {specs[0].gpu.name}", specs[0], len(specs)
        )
        for specs in groups.values()
    ]


def _leaves_s(plan: Plan, end_s: float) -> float:
    """Seconds that the deadline leaves for the steps themselves; without one, all until `end_s`."""
    deadline_s = end_s - plan.arrival_s if plan.deadline_s is None else plan.deadline_s
    return deadline_s - gaps_s(plan)


def fluid(
    plans: Sequence[Plan],
    fleet: FleetSpec,
    *,
    horizon_s: float,
    billed_s: float,
) -> Bound:
    """L1 on a fixed fleet: the most value that fits into the engines' time and memory.

    `horizon_s` is how long the engines may work on these plans, tails included, `billed_s` the part of
    it that is paid. A workflow is worth its `good_ratio`, for no policy sees the draw: compare with
    `Result.expected_successes`.
    """
    return _fluid("L1", plans, fleet, horizon_s, billed_s, success_ratio_min=None)


def fluid_fleet(
    plans: Sequence[Plan],
    fleet: FleetSpec,
    *,
    horizon_s: float,
    billed_s: float,
    success_ratio_min: float,
) -> Bound:
    """L1 on a free fleet: the fewest dollars for a floor of success, engines of the fleet's kinds divisible.

    Dollars are convex in the successes asked for and nothing costs nothing, so dollars per success
    are least at the floor itself. Infinite when deadlines allow the floor on no fleet. Raises
    RuntimeError when the solver fails.
    """
    return _fluid("L1 free fleet", plans, fleet, horizon_s, billed_s, success_ratio_min)


def _fluid(
    name: str,
    plans: Sequence[Plan],
    fleet: FleetSpec,
    horizon_s: float,
    billed_s: float,
    success_ratio_min: float | None,
) -> Bound:
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver("fluid", pywraplp.Solver.GLOP_LINEAR_PROGRAMMING)
    infinity = solver.infinity()
    kinds = _kinds(fleet)
    end_s = min((plan.arrival_s for plan in plans), default=0.0) + horizon_s
    counts, times, tokens = [], [], []
    for kind in kinds:
        least = kind.count if success_ratio_min is None else 0.0
        most = kind.count if success_ratio_min is None else infinity
        count = solver.NumVar(least, most, "")
        time, kv = solver.Constraint(-infinity, 0.0), solver.Constraint(-infinity, 0.0)
        time.SetCoefficient(count, -horizon_s)
        kv.SetCoefficient(count, -horizon_s * kind.spec.kv_tokens_capacity)
        counts.append(count)
        times.append(time)
        tokens.append(kv)
    values: list[tuple[float, Any]] = []
    spans: list[tuple[float, float]] = []
    charges: list[list[tuple[Any, float]]] = [[] for _ in kinds]
    for plan in plans:
        spans.append((plan.arrival_s, plan.arrival_s + _leaves_s(plan, end_s) + gaps_s(plan)))
        for taken in charges:
            taken.append((None, 0.0))
        value = plan.good_ratio
        leaves_s = _leaves_s(plan, end_s)
        if leaves_s <= 0.0:
            continue
        whole = solver.Constraint(-infinity, 1.0)
        slack = solver.Constraint(-infinity, 0.0)
        for index, kind in enumerate(kinds):
            need = _needs(plan, kind.spec)
            # A workflow that moves between kinds pays each kind's base for the steps it takes there.
            spare_s = leaves_s - need.steps_s
            if spare_s <= need.work_s and len(kinds) == 1:
                continue
            share = solver.NumVar(0.0, 1.0, "")
            whole.SetCoefficient(share, 1.0)
            tokens[index].SetCoefficient(share, need.kv_token_s)
            values.append((value, share))
            if len(kinds) == 1:
                times[index].SetCoefficient(share, need.charged_s(spare_s))
                charges[index][-1] = (share, need.charged_s(spare_s))
                continue
            spent = solver.NumVar(0.0, infinity, "")
            charged = solver.NumVar(0.0, infinity, "")
            times[index].SetCoefficient(charged, 1.0)
            charges[index][-1] = (charged, 1.0)
            # `spent` is a part of what the deadline leaves, which all kinds share; work adds to its own
            # steps at least once.
            slack.SetCoefficient(spent, 1.0)
            slack.SetCoefficient(share, -spare_s / leaves_s)
            own = solver.Constraint(0.0, infinity)
            own.SetCoefficient(spent, 1.0)
            own.SetCoefficient(share, -need.work_s / leaves_s)
            # (S x)^2 / u >= 2 k S x - k^2 u for every k; k = 0 is the work alone.
            slope = need.roots / spare_s if spare_s > 0.0 else 0.0
            for k in (0.0, *(slope * factor for factor in TANGENTS)):
                tangent = solver.Constraint(0.0, infinity)
                tangent.SetCoefficient(charged, 1.0)
                tangent.SetCoefficient(share, -need.all_work_s - need.base_s * 2.0 * k * need.roots)
                tangent.SetCoefficient(spent, need.base_s * k * k * leaves_s)
    # Between any two instants no more than the engines' time, of what must be done between them.
    for low, high in _windows(spans, FLUID_WINDOWS_MAX):
        for count, taken in zip(counts, charges, strict=True):
            within = solver.Constraint(-infinity, 0.0)
            within.SetCoefficient(count, low - high)
            for (released, due), (variable, charge) in zip(spans, taken, strict=True):
                if variable is not None and low <= released and due <= high:
                    within.SetCoefficient(variable, charge)
    hours = billed_s / S_PER_HOUR
    objective = solver.Objective()
    if success_ratio_min is None:
        for value, share in values:
            objective.SetCoefficient(share, value)
        objective.SetMaximization()
    else:
        floor = success_ratio_min * sum(plan.good_ratio for plan in plans)
        reached = solver.Constraint(floor, infinity)
        for value, share in values:
            reached.SetCoefficient(share, value)
        for kind, count in zip(kinds, counts, strict=True):
            objective.SetCoefficient(count, kind.spec.micro_usd_per_hour * hours)
        objective.SetMinimization()
    status = solver.Solve()
    if status == pywraplp.Solver.INFEASIBLE:
        return Bound(name=name, successes=0.0, fleet_usd=math.inf, engines={})
    if status != pywraplp.Solver.OPTIMAL:
        raise RuntimeError(f"the fluid program ended with status {status}")
    engines = {
        kind.name: float(count.solution_value()) for kind, count in zip(kinds, counts, strict=True)
    }
    return Bound(
        name=name,
        successes=float(sum(value * share.solution_value() for value, share in values)),
        fleet_usd=_usd(kinds, engines, hours),
        engines=engines,
    )


def _usd(kinds: Sequence[_Kind], engines: Mapping[str, float], hours: float) -> float:
    return sum(
        engines[kind.name] * kind.spec.micro_usd_per_hour * hours / MICRO_USD_PER_USD
        for kind in kinds
    )


def clairvoyant(
    plans: Sequence[Plan],
    fleet: FleetSpec,
    *,
    horizon_s: float,
    billed_s: float,
    solve_s_max: float = SOLVE_S_MAX,
) -> Bound:
    """L2: the most workflows that a schedule with full knowledge completes in time, for small cases.

    Workflows whole or not at all; steps in order with their gaps, each at least as long as alone; seats
    and memory at every instant; and between any two instants no more work than the engines have time
    for. Engines of one kind are pooled and speeds inside a batch left free, so a real schedule may do
    less: it is a bound. Where the solver does not close it, its best bound counts; never above L1.
    Raises RuntimeError when the solver fails.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    kinds = _kinds(fleet)
    start_s = min((plan.arrival_s for plan in plans), default=0.0)
    end_s = start_s + horizon_s
    end = math.ceil(horizon_s * TICKS_PER_S)
    is_detailed = sum(len(plan.steps) for plan in plans) <= STEPS_MAX
    chosen, charges, spans = [], [], []
    seats: list[list[Any]] = [[] for _ in kinds]
    held: list[list[int]] = [[] for _ in kinds]
    for plan in plans:
        done = model.new_bool_var("")
        chosen.append(done)
        released = math.floor((plan.arrival_s - start_s) * TICKS_PER_S)
        leaves_s = _leaves_s(plan, end_s)
        due = min(end, released + math.ceil((leaves_s + gaps_s(plan)) * TICKS_PER_S) + 1)
        spans.append((released, due))
        per_kind: list[tuple[int, Any]] = []
        if min(_needs(plan, kind.spec).alone_s for kind in kinds) > leaves_s:
            model.add(done == 0)
            charges.append([(0, done) for _ in kinds])
            continue
        if len(kinds) == 1:
            need = _needs(plan, kinds[0].spec)
            spare_s = max(leaves_s - need.steps_s, need.work_s)
            per_kind.append((math.floor(need.charged_s(spare_s) * TICKS_PER_S), PARTS * done))
        else:
            # On several kinds the work alone is charged, to the kind that takes the workflow's share.
            parts = []
            for kind in kinds:
                part = model.new_int_var(0, PARTS, "")
                parts.append(part)
                per_kind.append(
                    (math.floor(_needs(plan, kind.spec).all_work_s * TICKS_PER_S), part)
                )
            model.add(sum(parts) == PARTS * done)
        charges.append(per_kind)
        if is_detailed:
            _steps(model, plan, kinds, done, (released, due), seats, held)
    for index, kind in enumerate(kinds):
        if seats[index]:
            calls = len(seats[index])
            model.add_cumulative(seats[index], [1] * calls, kind.count * kind.spec.seats)
            model.add_cumulative(
                seats[index], held[index], kind.count * kind.spec.kv_tokens_capacity
            )
        for low, high in _windows(spans, WINDOWS_MAX):
            inside = [
                charges[number][index]
                for number, (released, due) in enumerate(spans)
                if low <= released and due <= high
            ]
            if inside:
                model.add(
                    sum(work * part for work, part in inside) <= kind.count * PARTS * (high - low)
                )
    model.maximize(
        sum(
            round(plan.good_ratio * VALUE_PARTS) * done
            for plan, done in zip(plans, chosen, strict=True)
        )
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = solve_s_max
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status in {cp_model.MODEL_INVALID, cp_model.INFEASIBLE}:
        # Doing nothing is always feasible.
        raise RuntimeError(f"the clairvoyant program ended with {solver.status_name(status)}")
    at_most = fluid(plans, fleet, horizon_s=horizon_s, billed_s=billed_s).successes
    engines = {kind.name: float(kind.count) for kind in kinds}
    return Bound(
        name="L2",
        successes=min(math.floor(solver.best_objective_bound + 1e-6) / VALUE_PARTS, at_most),
        fleet_usd=_usd(kinds, engines, billed_s / S_PER_HOUR),
        engines=engines,
        is_proven=status == cp_model.OPTIMAL,
    )


def _steps(
    model: Any,
    plan: Plan,
    kinds: Sequence[_Kind],
    done: Any,
    span: tuple[int, int],
    seats: list[list[Any]],
    held: list[list[int]],
) -> None:
    """Optional intervals of the plan's own steps, one for each kind of engine that might take it."""
    ready: Any = span[0]
    for step in plan.steps:
        start, end = model.new_int_var(*span, ""), model.new_int_var(*span, "")
        model.add(start >= ready).only_enforce_if(done)
        takers = []
        for index, kind in enumerate(kinds):
            alone_s = _sequence((step,), kind.spec).alone_s
            shortest = math.floor(alone_s * TICKS_PER_S)
            if shortest > span[1] - span[0]:
                continue
            taken = model.new_bool_var("")
            size = model.new_int_var(shortest, span[1] - span[0], "")
            seats[index].append(model.new_optional_interval_var(start, size, end, taken, ""))
            held[index].append(_own_tokens(step, plan.prefix_tokens))
            takers.append(taken)
        model.add(sum(takers) == done)
        ready = end + math.floor(step.gap_s * TICKS_PER_S)


def _windows(
    spans: Sequence[tuple[Instant, Instant]], instants_max: int
) -> list[tuple[Instant, Instant]]:
    """Pairs of a release and a deadline, thinned out, the widest pair among them."""
    lows = sorted({low for low, _ in spans})
    highs = sorted({high for _, high in spans}, reverse=True)
    return [
        (low, high)
        for low in lows[:: math.ceil(len(lows) / instants_max) or 1]
        for high in highs[:: math.ceil(len(highs) / instants_max) or 1]
        if low < high
    ]
