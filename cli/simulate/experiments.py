"""Experiments on a fleet that does not change: dollars per success at a load, and dollars for a floor of success.

fixed   Per cell (workload, deadlines, fleet, load): every family of baselines is tuned on seeds of its
        own, all policies then play the same evaluation seeds, and the ratio of Headway's dollars per
        success to those of the baseline that was best in tuning gets a paired bootstrap interval.
floor   The fleet's dollars with which each policy holds a floor of workflows done in time: a few seeds
        find the size by bisection, all play around it, and between sizes dollars are interpolated.

Runs are spread over processes; the same arguments give the same document, whatever the number of them.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from cli.simulate.baselines import FAMILIES, Config, Family, family
from cli.simulate.bounds import Bound, fluid, fluid_fleet
from cli.simulate.contracts import EngineSpec, FleetSpec, Plan, Result, WorldOptions
from cli.simulate.deadlines import Deadlines
from cli.simulate.fleets import REFERENCE, fleet, sized
from cli.simulate.stats import Interval, finite, interpolated, paired_quantity_ratio, paired_ratio
from cli.simulate.workloads import capacity_per_s, draw_plans, workload

HEADWAY: Final = "headway"
# Between Headway's name and a part that is taken away.
WITHOUT: Final = " without "
TUNING_SEEDS: Final = (101, 102)
EVALUATION_SEED_FIRST: Final = 11
PROCESSES: Final = 2
SUCCESS_RATIO_FLOOR: Final = 0.95
# Fleets that `floor` tries at most, as a multiple of the one it begins with.
GROWTH_MAX: Final = 6
# Seeds that find where the floor is; the others are played around it.
SCOUT_SEEDS: Final = 2
# Seeds for which the bounds are solved; each takes seconds.
BOUND_SEEDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Seconds of a run: what is not measured before, what is, and how long load goes on after."""

    warm_up_s: float
    measured_s: float
    cool_down_s: float

    @property
    def horizon_s(self) -> float:
        return self.warm_up_s + self.measured_s + self.cool_down_s


# Workflows of agents live for up to an hour: before 20 minutes a world is emptier than it will be.
FULL: Final = Span(warm_up_s=1_200.0, measured_s=2_400.0, cool_down_s=600.0)
QUICK: Final = Span(warm_up_s=300.0, measured_s=600.0, cool_down_s=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A fleet told engine by engine, work in workflows per second, and what deadlines are measured on."""

    fleet: FleetSpec
    rate_per_s: float
    reference: EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One world. `load` 1 is the capacity of `fleet` as named; `engines` plays it on another number.

    `given`: what is played instead of the named fleet. Headway is `replicas` of it that share the engines.
    """

    workload: str
    deadlines: Deadlines
    fleet: str
    load: float
    engines: int | None = None
    given: Given | None = None
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of one policy. `config` is the index of its setting; Headway has one."""

    cell: Cell
    policy: str
    config: int
    seed: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What experiments keep of a run. Ratios of workflows by priority and class are (good, started)."""

    seed: int
    successes: int
    in_time: float
    in_time_most: float
    started: int
    fleet_usd: float
    wasted_usd: Mapping[str, float]
    late_kill_ratio: float
    jain: float
    measured_s: float
    by_priority: Mapping[int, tuple[int, int]]
    by_class: Mapping[str, tuple[int, int]]
    ttft_p99_ms: float
    good_steps: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    decision_us_mean: float
    calls_per_wall_minute: float
    digest: str
    leaks: Mapping[str, float]


@dataclass(slots=True)
class Progress:
    """Told of every run that is done: how many are, of how many, and what is going on."""

    report: Callable[[int, int, str], None] | None = None
    done: int = 0
    total: int = 0

    def expect(self, runs: int) -> None:
        self.total += runs

    def step(self, what: str) -> None:
        self.done += 1
        if self.report is not None:
            self.report(self.done, max(self.total, self.done), what)


# ------------------------------------------------------------ one run


def _fleet_of(cell: Cell) -> FleetSpec:
    if cell.given is not None:
        return cell.given.fleet
    named = fleet(cell.fleet)
    return named if cell.engines is None else sized(named, cell.engines)


@lru_cache(maxsize=4)
def _drawn(
    name: str,
    deadlines: Deadlines,
    rate_per_s: float,
    reference: EngineSpec,
    seed: int,
    horizon_s: float,
) -> tuple[Plan, ...]:
    return draw_plans(
        workload(name),
        seed=seed,
        rate_per_s=rate_per_s,
        horizon_s=horizon_s,
        deadlines=deadlines,
        reference=reference,
    )


@lru_cache(maxsize=64)
def _rate_per_s(name: str, load: float, fleet_name: str) -> float:
    return load * capacity_per_s(workload(name), fleet(fleet_name))


def drawn(cell: Cell, seed: int, span: Span) -> tuple[Plan, ...]:
    """The workflows of a cell; another number of engines, or another fleet given, meets the same ones."""
    given = cell.given
    if given is None:
        rate_per_s, reference = _rate_per_s(cell.workload, cell.load, cell.fleet), REFERENCE
    else:
        rate_per_s, reference = given.rate_per_s, given.reference
    return _drawn(cell.workload, cell.deadlines, rate_per_s, reference, seed, span.horizon_s)


def _config_of(job: Job) -> Config:
    if job.policy == HEADWAY or job.policy.startswith(HEADWAY + WITHOUT):
        from cli.simulate.headway import Headway, without

        part = job.policy.partition(WITHOUT)[2]
        replicas = job.cell.replicas
        if replicas > 1:
            from cli.simulate.replicas import Replicated

            options = without(part) if part else None
            return Config(label="", make=lambda: Replicated(replicas, options))
        return Config(label="", make=Headway if not part else lambda: Headway(without(part)))
    return family(job.policy).configs[job.config]


def run(job: Job) -> Outcome:
    """Play one job. Raises KeyError for an unknown policy."""
    from cli.simulate.world import play

    config, span = _config_of(job), job.span
    result = play(
        drawn(job.cell, job.seed, span),
        config.fitted(_fleet_of(job.cell)),
        config.make(),
        WorldOptions(
            seed=job.seed,
            horizon_s=span.horizon_s,
            warm_up_s=span.warm_up_s,
            cool_down_s=span.cool_down_s,
        ),
    )
    return outcome_of(result, in_measured_time(drawn(job.cell, job.seed, span), span))


def in_measured_time(plans: Iterable[Plan], span: Span) -> list[Plan]:
    until_s = span.horizon_s - span.cool_down_s
    return [plan for plan in plans if span.warm_up_s <= plan.arrival_s < until_s]


def outcome_of(result: Result, measured: Sequence[Plan]) -> Outcome:
    return Outcome(
        seed=result.seed,
        successes=result.total.succeeded,
        in_time=result.expected_successes,
        in_time_most=sum(plan.good_ratio for plan in measured),
        started=result.total.started,
        fleet_usd=result.fleet_usd,
        wasted_usd={str(cause): usd for cause, usd in result.wasted_usd.items()},
        late_kill_ratio=result.late_kill_ratio,
        jain=result.jain,
        measured_s=result.measured_s,
        by_priority={
            priority: (tally.succeeded, tally.started)
            for priority, tally in result.by_priority.items()
        },
        by_class={
            name: (tally.succeeded, tally.started) for name, tally in result.by_class.items()
        },
        ttft_p99_ms=result.ttft.p99_ms,
        good_steps=result.good_steps,
        steps=result.steps,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        decision_us_mean=result.decision_us_mean,
        calls_per_wall_minute=result.calls_per_wall_minute,
        digest=result.digest,
        leaks={name: value for name, value in result.gauges_at_end.items() if value},
    )


class Seeded(Protocol):
    """A job, told apart by its parts."""

    @property
    def seed(self) -> int: ...

    def __hash__(self) -> int: ...


J = TypeVar("J", bound=Seeded)
R = TypeVar("R")


class JobRunner(Generic[J, R]):
    """Plays jobs in processes of its own, each once: the same job again costs nothing. `told` names a job."""

    def __init__(
        self,
        play_one: Callable[[J], R],
        told: Callable[[J], str],
        processes: int = PROCESSES,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self._play_one = play_one
        self._told = told
        self._known: dict[J, R] = {}
        self._pool = (
            ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
            if processes > 1
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def play(self, jobs: Iterable[J]) -> dict[J, R]:
        """Outcomes by job. What a run raises is raised here."""
        wanted = list(dict.fromkeys(jobs))
        # Runs of one world after one another: a process draws its plans once.
        fresh = sorted((job for job in wanted if job not in self._known), key=lambda job: job.seed)
        self.progress.expect(len(fresh))
        spread = map if self._pool is None else self._pool.map
        for job, outcome in zip(fresh, spread(self._play_one, fresh), strict=True):
            self._known[job] = outcome
            self.progress.step(self._told(job))
        return {job: self._known[job] for job in wanted}


class Runner(JobRunner[Job, Outcome]):
    """Plays jobs on fleets that do not change."""

    def __init__(self, processes: int = PROCESSES, progress: Progress | None = None) -> None:
        super().__init__(run, _told, processes, progress)


def _told(job: Job) -> str:
    return f"{job.policy} on {job.cell.workload} at {job.cell.load:g}"


# ------------------------------------------------------------ sums over seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """Outcomes of one policy over seeds."""

    outcomes: tuple[Outcome, ...]

    @property
    def cpst_usd(self) -> float:
        successes = sum(outcome.successes for outcome in self.outcomes)
        usd = sum(outcome.fleet_usd for outcome in self.outcomes)
        return usd / successes if successes else float("inf")

    @property
    def success_ratio(self) -> float:
        started = sum(outcome.started for outcome in self.outcomes)
        return sum(outcome.successes for outcome in self.outcomes) / max(1, started)

    @property
    def in_time_ratio(self) -> float:
        """Of what could be good enough, the part that ended in time: success but for its luck."""
        most = sum(outcome.in_time_most for outcome in self.outcomes)
        return sum(outcome.in_time for outcome in self.outcomes) / most if most else 1.0

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return [(outcome.fleet_usd, outcome.successes) for outcome in self.outcomes]

    def document(self) -> dict[str, Any]:
        runs = len(self.outcomes)
        seconds = sum(outcome.measured_s for outcome in self.outcomes)
        causes = sorted({cause for outcome in self.outcomes for cause in outcome.wasted_usd})
        return {
            "seeds": runs,
            "cpst_usd": finite(self.cpst_usd),
            "success_ratio": round(self.success_ratio, 6),
            "in_time_ratio": round(self.in_time_ratio, 6),
            "goodput_per_s": round(
                sum(outcome.successes for outcome in self.outcomes) / max(1e-9, seconds), 6
            ),
            "late_kill_ratio": _mean(outcome.late_kill_ratio for outcome in self.outcomes),
            "jain": _mean(outcome.jain for outcome in self.outcomes),
            "fleet_usd": round(sum(outcome.fleet_usd for outcome in self.outcomes), 6),
            "wasted_usd": {
                cause: round(
                    sum(outcome.wasted_usd.get(cause, 0.0) for outcome in self.outcomes), 6
                )
                for cause in causes
            },
            "success_by_priority": _ratios(outcome.by_priority for outcome in self.outcomes),
            "success_by_class": _ratios(outcome.by_class for outcome in self.outcomes),
            "ttft_p99_ms": _mean(outcome.ttft_p99_ms for outcome in self.outcomes),
            "good_step_ratio": round(
                sum(outcome.good_steps for outcome in self.outcomes)
                / max(1, sum(outcome.steps for outcome in self.outcomes)),
                6,
            ),
            "cached_ratio": round(
                sum(outcome.cached_tokens for outcome in self.outcomes)
                / max(1, sum(outcome.prompt_tokens for outcome in self.outcomes)),
                6,
            ),
            "leaks": sum(bool(outcome.leaks) for outcome in self.outcomes),
        }

    def timing(self) -> dict[str, Any]:
        """What differs from run to run of the same seed: times of this machine."""
        return {
            "decision_us_mean": _mean(outcome.decision_us_mean for outcome in self.outcomes),
            "calls_per_wall_minute": _mean(
                outcome.calls_per_wall_minute for outcome in self.outcomes
            ),
        }


def _mean(values: Iterable[float]) -> float:
    all_values = list(values)
    return round(sum(all_values) / max(1, len(all_values)), 6)


def _ratios(parts: Iterable[Mapping[Any, tuple[int, int]]]) -> dict[str, float]:
    sums: dict[str, tuple[int, int]] = {}
    for part in parts:
        for key, (good, started) in part.items():
            before = sums.get(str(key), (0, 0))
            sums[str(key)] = (before[0] + good, before[1] + started)
    return {key: round(good / max(1, started), 6) for key, (good, started) in sums.items()}


# ------------------------------------------------------------ fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to run. `policies` empty: all of them. `ablated` are parts of Headway to take away."""

    workloads: tuple[str, ...] = ("coding", "bounded", "mix")
    deadlines: tuple[Deadlines, ...] = (Deadlines.OWN,)
    loads: tuple[float, ...] = (0.5, 1.0, 1.5)
    fleets: tuple[str, ...] = ("homogeneous",)
    policies: tuple[str, ...] = ()
    seeds: int = 10
    ablated: tuple[str, ...] = ()
    replicas: int = 1
    span: Span = FULL
    has_bounds: bool = True

    def names(self) -> list[str]:
        chosen = self.policies or (HEADWAY, *(each.name for each in FAMILIES))
        return [*chosen, *(HEADWAY + WITHOUT + part for part in self.ablated)]

    def cells(self) -> list[Cell]:
        return [
            Cell(workload=load, deadlines=deadlines, fleet=name, load=level, replicas=self.replicas)
            for load in self.workloads
            for deadlines in self.deadlines
            for name in self.fleets
            for level in self.loads
        ]

    @property
    def evaluation_seeds(self) -> tuple[int, ...]:
        return tuple(range(EVALUATION_SEED_FIRST, EVALUATION_SEED_FIRST + self.seeds))


def is_ours(policy: str) -> bool:
    return policy == HEADWAY or policy.startswith(HEADWAY + WITHOUT)


def _families(policies: Sequence[str]) -> list[Family]:
    return [family(name) for name in policies if not is_ours(name)]


def tune(
    runner: Runner, cell: Cell, policies: Sequence[str], span: Span
) -> dict[str, tuple[int, float]]:
    """The best setting of every family by dollars per success on the tuning seeds, and those dollars."""
    families = _families(policies)
    jobs = {
        (each.name, index): [
            Job(cell=cell, policy=each.name, config=index, seed=seed, span=span)
            for seed in TUNING_SEEDS
        ]
        for each in families
        for index in range(len(each.configs))
    }
    outcomes = runner.play(job for group in jobs.values() for job in group)
    best: dict[str, tuple[int, float]] = {}
    for (name, index), group in jobs.items():
        usd = Pooled(outcomes=tuple(outcomes[job] for job in group)).cpst_usd
        if name not in best or usd < best[name][1]:
            best[name] = (index, usd)
    return best


def fixed(wanted: Wanted, runner: Runner) -> dict[str, Any]:
    """Dollars per success of every policy in every cell; the document that `--json` writes."""
    cells, bounds, timings = [], {}, []
    for cell in wanted.cells():
        names = wanted.names()
        tuned = tune(runner, cell, names, wanted.span)
        jobs = {
            name: [
                Job(
                    cell=cell,
                    policy=name,
                    config=tuned.get(name, (0, 0.0))[0],
                    seed=seed,
                    span=wanted.span,
                )
                for seed in wanted.evaluation_seeds
            ]
            for name in names
        }
        outcomes = runner.play(job for group in jobs.values() for job in group)
        pooled = {
            name: Pooled(outcomes=tuple(outcomes[job] for job in group))
            for name, group in jobs.items()
        }
        baselines = [each.name for each in _families(names) if not each.is_reference]
        best = min(baselines, key=lambda name: tuned[name][1], default=None)
        for name in names:
            ratio = None if best is None else paired_ratio(pooled[name].pairs, pooled[best].pairs)
            cells.append(_cell("fixed", cell, name, tuned, best, ratio) | pooled[name].document())
            timings.append(_where(cell) | {"policy": name} | pooled[name].timing())
        if wanted.has_bounds:
            bounds[_key(cell)] = _bounds(cell, wanted, pooled)
    return {"cells": cells, "bounds": bounds, "timings": timings}


def _where(cell: Cell) -> dict[str, Any]:
    return {
        "workload": cell.workload,
        "deadlines": str(cell.deadlines),
        "fleet": cell.fleet,
        "load": cell.load,
    } | ({"replicas": cell.replicas} if cell.replicas > 1 else {})


def _key(cell: Cell) -> str:
    return f"{cell.workload}/{cell.deadlines}/{cell.fleet}/{cell.load:g}"


def _cell(
    experiment: str,
    cell: Cell,
    name: str,
    tuned: Mapping[str, tuple[int, float]],
    best: str | None,
    ratio: Interval | None,
) -> dict[str, Any]:
    config = family(name).configs[tuned[name][0]].label if name in tuned else ""
    return (
        {"experiment": experiment}
        | _where(cell)
        | {
            "policy": name,
            "config": config,
            "best_baseline": best,
            "cpst_ratio_to_best_baseline": None if ratio is None else ratio.document(),
            "fleet_usd_at_floor": None,
        }
    )


def _bounds(cell: Cell, wanted: Wanted, pooled: Mapping[str, Pooled]) -> dict[str, Any]:
    """L1 over the first seeds, and how far each policy's dollars are above it on the same seeds."""
    seeds = wanted.evaluation_seeds[:BOUND_SEEDS]
    bounds = [_fluid_of(cell, seed, wanted.span) for seed in seeds]
    successes = sum(bound.successes for bound in bounds)
    usd = sum(bound.fleet_usd for bound in bounds)
    floor = usd / successes if successes else float("inf")
    document: dict[str, Any] = {"L1": {"seeds": len(seeds), "cpst_usd": finite(floor)}}
    document["distance"] = {}
    for name, each in pooled.items():
        mine = each.outcomes[: len(seeds)]
        expected = sum(outcome.in_time for outcome in mine)
        paid = sum(outcome.fleet_usd for outcome in mine)
        own = paid / expected if expected else float("inf")
        document["distance"][name] = finite(own / floor - 1.0) if floor else None
    return document


def _fluid_of(cell: Cell, seed: int, span: Span) -> Bound:
    measured = in_measured_time(drawn(cell, seed, span), span)
    return fluid(
        measured, _fleet_of(cell), horizon_s=_tail_s(measured, span), billed_s=span.measured_s
    )


def _tail_s(measured: Sequence[Plan], span: Span) -> float:
    """From the first arrival to the last deadline: so long may engines work on what is measured."""
    last_s = max(
        (plan.arrival_s + (plan.deadline_s or span.horizon_s) for plan in measured), default=0.0
    )
    return max(span.measured_s, last_s - min((plan.arrival_s for plan in measured), default=0.0))


# ------------------------------------------------------------ floor


def floor(wanted: Wanted, runner: Runner, ratio_min: float = SUCCESS_RATIO_FLOOR) -> dict[str, Any]:
    """Dollars per hour of fleet with which every policy does `ratio_min` of the workflows in time.

    `load` is told in capacities of the named fleet, whose engines are repeated to make a larger one.
    Every family is tuned at the size at which the first of them reaches the floor.
    """
    cells, bounds = [], {}
    for cell in wanted.cells():
        names = wanted.names()
        families = [each for each in _families(names) if not each.is_reference]
        start = _size_at(runner, cell, families, ratio_min, wanted.span)
        tuned = tune_in_time(runner, replace(cell, engines=start), names, wanted.span)
        curves: dict[str, dict[int, Pooled]] = {}
        for name in names:
            config = tuned.get(name, (0, 0.0))[0]
            curves[name] = _curve(runner, cell, name, config, start, ratio_min, wanted)
        floors = {name: _usd_at(cell, curve, ratio_min) for name, curve in curves.items()}
        reaching = [each.name for each in families if floors[each.name] is not None]
        best = min(reaching, key=lambda name: floors[name] or 0.0, default=None)
        for name in names:
            ratio = None
            if best is not None and floors[name] is not None:
                ratio = paired_quantity_ratio(
                    _samples(cell, curves[name]),
                    _samples(cell, curves[best]),
                    lambda points: interpolated(points, ratio_min),
                )
            nearest = min(
                curves[name].values(), key=lambda each: abs(each.in_time_ratio - ratio_min)
            )
            cells.append(
                _cell("floor", cell, name, tuned, best, None)
                | nearest.document()
                | {
                    "fleet_usd_at_floor": floors[name],
                    "fleet_usd_ratio_to_best_baseline": None if ratio is None else ratio.document(),
                    "success_ratio_min": ratio_min,
                    "curve": [
                        [_usd_per_hour(cell, engines), round(pool.in_time_ratio, 6)]
                        for engines, pool in sorted(curves[name].items())
                    ],
                }
            )
        if wanted.has_bounds:
            bounds[_key(cell)] = _fleet_bound(cell, wanted, ratio_min, floors)
    return {"cells": cells, "bounds": bounds}


def _jobs(cell: Cell, name: str, config: int, seeds: Iterable[int], span: Span) -> list[Job]:
    return [Job(cell=cell, policy=name, config=config, seed=seed, span=span) for seed in seeds]


def _pool(runner: Runner, jobs: Sequence[Job]) -> Pooled:
    outcomes = runner.play(jobs)
    return Pooled(outcomes=tuple(outcomes[job] for job in jobs))


def search(is_enough: Callable[[int], bool], *, start: int, least: int, most: int) -> int | None:
    """The smallest size within `least..most` that is enough, if more always is: doubling, then bisection.

    None when `most` is not.
    """
    if is_enough(start):
        high, step = start, 1
        low = least - 1
        while high - step >= least:
            if not is_enough(high - step):
                low = high - step
                break
            high, step = high - step, 2 * step
    else:
        low, step = start, 1
        while True:
            high = min(most, low + step)
            if high <= low:
                return None
            if is_enough(high):
                break
            low, step = high, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def floor_curve(
    play: Callable[[int, Sequence[int]], Pooled],
    *,
    start: int,
    ratio_min: float,
    seeds: Sequence[int],
    least: int,
    most: int,
) -> dict[int, Pooled]:
    """Success by size on all seeds, from the last size below the floor to one beyond that which holds it.

    A few seeds find the place; all of them are played only around it. A size more on each side, so that
    every resampling of the seeds finds its floor. Only the largest size where that does not hold it.
    """
    scouts = seeds[:SCOUT_SEEDS]
    found = search(
        lambda size: play(size, scouts).in_time_ratio >= ratio_min,
        start=start,
        least=least,
        most=most,
    )
    if found is None:
        return {most: play(most, seeds)}
    curve = {found: play(found, seeds)}
    while curve[max(curve)].in_time_ratio < ratio_min and max(curve) < most:
        curve[max(curve) + 1] = play(max(curve) + 1, seeds)
    while curve[min(curve)].in_time_ratio >= ratio_min and min(curve) > least:
        curve[min(curve) - 1] = play(min(curve) - 1, seeds)
    for size in (min(curve) - 1, max(curve) + 1):
        if least <= size <= most:
            curve[size] = play(size, seeds)
    return curve


def _size_at(
    runner: Runner, cell: Cell, families: Sequence[Family], ratio_min: float, span: Span
) -> int:
    """The smallest fleet with which any baseline, as first set, reaches the floor on a tuning seed."""
    base = len(fleet(cell.fleet).engines)

    def is_enough(engines: int) -> bool:
        return any(
            _pool(
                runner,
                _jobs(replace(cell, engines=engines), each.name, 0, TUNING_SEEDS[:1], span),
            ).in_time_ratio
            >= ratio_min
            for each in families
        )

    most = base * GROWTH_MAX
    return search(is_enough, start=base, least=1, most=most) or most


def tune_in_time(
    runner: Runner, cell: Cell, policies: Sequence[str], span: Span
) -> dict[str, tuple[int, float]]:
    """The setting of every family that leaves the least undone in time on the tuning seeds, and how much.

    On the first seed all play, on the others the better half of them.
    """
    best: dict[str, tuple[int, float]] = {}
    for each in _families(policies):

        def missed(index: int, seeds: Sequence[int], name: str = each.name) -> float:
            return 1.0 - _pool(runner, _jobs(cell, name, index, seeds, span)).in_time_ratio

        indexes = list(range(len(each.configs)))
        if len(indexes) > 1:
            indexes.sort(key=lambda index: missed(index, TUNING_SEEDS[:1]))
            del indexes[max(2, (len(indexes) + 1) // 2) :]
        scores = {index: missed(index, TUNING_SEEDS) for index in sorted(indexes)}
        index = min(scores, key=scores.__getitem__)
        best[each.name] = (index, scores[index])
    return best


def _curve(
    runner: Runner,
    cell: Cell,
    name: str,
    config: int,
    start: int,
    ratio_min: float,
    wanted: Wanted,
) -> dict[int, Pooled]:
    """Success by the number of engines, around the one that holds the floor."""
    return floor_curve(
        lambda engines, seeds: _pool(
            runner, _jobs(replace(cell, engines=engines), name, config, seeds, wanted.span)
        ),
        start=start,
        ratio_min=ratio_min,
        seeds=wanted.evaluation_seeds,
        least=1,
        most=len(fleet(cell.fleet).engines) * GROWTH_MAX,
    )


def _usd_per_hour(cell: Cell, engines: int) -> float:
    return round(sized(fleet(cell.fleet), engines).usd_per_hour, 6)


def _usd_at(cell: Cell, curve: Mapping[int, Pooled], ratio_min: float) -> float | None:
    points = [(_usd_per_hour(cell, engines), each.in_time_ratio) for engines, each in curve.items()]
    usd = interpolated(points, ratio_min)
    return None if usd is None else round(usd, 6)


def _samples(
    cell: Cell, curve: Mapping[int, Pooled]
) -> list[tuple[float, list[tuple[float, float]]]]:
    """By fleet, in dollars per hour: what each seed did in time, of what it could."""
    return [
        (
            _usd_per_hour(cell, engines),
            [(outcome.in_time, outcome.in_time_most) for outcome in each.outcomes],
        )
        for engines, each in sorted(curve.items())
    ]


def _fleet_bound(
    cell: Cell, wanted: Wanted, ratio_min: float, floors: Mapping[str, float | None]
) -> dict[str, Any]:
    hours = wanted.span.measured_s / 3_600.0
    per_hour = []
    for seed in wanted.evaluation_seeds[:BOUND_SEEDS]:
        measured = in_measured_time(drawn(cell, seed, wanted.span), wanted.span)
        bound = fluid_fleet(
            measured,
            fleet(cell.fleet),
            horizon_s=_tail_s(measured, wanted.span),
            billed_s=wanted.span.measured_s,
            success_ratio_min=ratio_min,
        )
        per_hour.append(bound.fleet_usd / hours)
    usd = sum(per_hour) / max(1, len(per_hour))
    return {
        "L1": {"seeds": len(per_hour), "fleet_usd_at_floor": finite(usd)},
        "distance": {
            name: None if each is None or not usd else finite(each / usd - 1.0)
            for name, each in floors.items()
        },
    }
