"""Dollars of a day at a floor of success, for every way to scale the fleet with every way to place calls.

Placements are tuned on a fleet that does not change, scalers with their placement, both on days of their own.
On the days of evaluation one knob of each scaler is swept until success lies on both sides of the floor, and
the day's dollars are interpolated there, so that all are compared at the same success.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Any, Final

from cli.simulate.baselines import Config, family
from cli.simulate.contracts import FleetSpec, WorldOptions
from cli.simulate.day.arrivals import Day, DayShape, draw_day
from cli.simulate.day.bought import day_bill, plan_of
from cli.simulate.day.planned import Planned, learned_before
from cli.simulate.day.reactive import Greedy, Hpa, Static
from cli.simulate.day.scaling import Scaled, Scaler
from cli.simulate.deadlines import Deadlines
from cli.simulate.experiments import (
    HEADWAY,
    PROCESSES,
    JobRunner,
    Outcome,
    Pooled,
    Progress,
    outcome_of,
)
from cli.simulate.fleets import fleet, sized
from cli.simulate.stats import finite, interpolated, paired_floor_ratio
from cli.simulate.workloads import capacity_per_s, workload

COLD_START_S: Final = 120.0
PEAK_ENGINES: Final = 4
# Engines that may be on at once, over those that the usual peak takes at load 1.
ENGINES_MOST: Final = 3.0
# Engines that are on when a run begins, at night.
ENGINES_FIRST: Final = 0.4
TUNING_DAYS: Final = (101,)
FIRST_DAY: Final = 1
# Gauges and queues are looked at less often than in minutes of a fixed load: a day has many.
TICK_MS: Final = 1_000.0
TELEMETRY_AGE_S: Final = 0.5

STATIC: Final = "static"
HPA: Final = "hpa"
GREEDY: Final = "wva"
PLANNER: Final = "planner"
REACTIVE: Final = (HPA, GREEDY)
SEPARATOR: Final = "+"
# Placements of baselines that are tried, each with all its settings.
PLACEMENTS: Final = ("sticky", "static-gate", "vllm-priority", "plas")
BEST: Final = "best"
# The knob of each scaler, from the fewest dollars to the most, and where a search begins.
KNOBS: Final[Mapping[str, tuple[float, ...]]] = {
    STATIC: tuple(float(engines) for engines in range(1, 41)),
    HPA: (24.0, 18.0, 14.0, 12.0, 10.0, 8.5, 7.0, 6.0, 5.0, 4.0, 3.2, 2.5, 2.0),
    GREEDY: (0.8, 0.65, 0.5, 0.4, 0.32, 0.25, 0.2, 0.16, 0.125, 0.1, 0.08, 0.06, 0.04),
    PLANNER: (6.0, 4.0, 3.0, 2.5, 2.2, 2.0, 1.85, 1.7, 1.6, 1.5, 1.42, 1.35, 1.3),
}
FIRST_KNOB: Final[Mapping[str, int]] = {STATIC: 5, HPA: 8, GREEDY: 10, PLANNER: 6}
# Other settings of each scaler: seconds over which Kubernetes' autoscaler remembers its highest wish; the
# queue at which the greedy one calls an engine full.
SETTINGS: Final[Mapping[str, tuple[float, ...]]] = {
    STATIC: (0.0,),
    HPA: (300.0, 900.0),
    GREEDY: (5.0,),
    PLANNER: (0.0,),
}
DEFAULT_POLICIES: Final = (
    "static+best",
    "hpa+best",
    "wva+best",
    "planner+best",
    "static+headway",
    "hpa+headway",
    "planner+headway",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DayWanted:
    """`policies` are scaler+placement, of which the placement `best` is the tuned baseline that was best.

    `peak_engines`: the usual day's highest minute is the load 1 of so many engines.
    """

    workload: str = "coding"
    deadlines: Deadlines = Deadlines.OWN
    fleet: str = "homogeneous"
    policies: tuple[str, ...] = DEFAULT_POLICIES
    days: int = 10
    hours: float = 24.0
    peak_engines: int = PEAK_ENGINES
    cold_start_s: float = COLD_START_S
    deferrable_ratio: float = 0.0
    success_ratio_min: float = 0.95

    @property
    def evaluation_days(self) -> tuple[int, ...]:
        return tuple(range(FIRST_DAY, FIRST_DAY + self.days))


@dataclass(frozen=True, slots=True, kw_only=True)
class DayJob:
    """One day under one scaler and one placement. `placement_config` is an index into its settings."""

    wanted: DayWanted
    seed: int
    scaler: str
    setting: float
    knob: float
    placement: str
    placement_config: int
    defers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DayOutcome:
    """`hours`: what was done in time, of what could be, by hour of the played day."""

    outcome: Outcome
    engine_starts: int
    engine_stops: int
    deferred: int
    engines_on_by_minute: tuple[int, ...]
    fleet_usd_by_minute: tuple[float, ...]
    arrivals_per_s_by_minute: tuple[float, ...]
    hours: tuple[tuple[float, float], ...]

    @property
    def fleet_usd(self) -> float:
        return self.outcome.fleet_usd


# ------------------------------------------------------------ one run


def shape_of(wanted: DayWanted) -> DayShape:
    named = fleet(wanted.fleet)
    each = capacity_per_s(workload(wanted.workload), named) / len(named.engines)
    return DayShape(peak_per_s=each * wanted.peak_engines, hours=wanted.hours)


@lru_cache(maxsize=3)
def _day_of(wanted: DayWanted, seed: int) -> Day:
    return draw_day(
        workload(wanted.workload),
        shape_of(wanted),
        seed,
        deadlines=wanted.deadlines,
        deferrable_ratio=wanted.deferrable_ratio,
    )


def day_of(wanted: DayWanted, seed: int) -> Day:
    return _day_of(replace(wanted, policies=(), days=1, success_ratio_min=0.0), seed)


def _placement(job: DayJob) -> Config:
    if job.placement == HEADWAY:
        from cli.simulate.headway import Headway

        return Config(label="", make=Headway)
    return family(job.placement).configs[job.placement_config]


def _scaler(job: DayJob, day: Day, base: FleetSpec) -> Scaler:
    first = max(1, round(ENGINES_FIRST * job.wanted.peak_engines))
    match job.scaler:
        case "static":
            return Static(job.knob)
        case "hpa":
            return Hpa(job.knob, down_s=job.setting, engines_first=first)
        case "wva":
            return Greedy(job.knob, queue_calls=job.setting, engines_first=first)
        case "planner":
            before = learned_before(job.wanted.workload, base.engines[0].model.name, day.shape)
            return Planned(
                job.knob,
                shape=day.shape,
                before=before,
                deferrable_s=day.deferrable_s if job.defers else None,
                engines_first=first,
            )
    raise KeyError(job.scaler)


def run_day(job: DayJob) -> DayOutcome:
    """Play one job. Raises KeyError for an unknown scaler or placement."""
    from cli.simulate.world import play

    wanted = job.wanted
    day, base = day_of(wanted, job.seed), fleet(wanted.fleet)
    shape = day.shape
    scaler, placement = _scaler(job, day, base), _placement(job)
    most = max(scaler.engines_first, ceil(ENGINES_MOST * wanted.peak_engines))
    specs = placement.fitted(sized(base, most))
    specs = replace(
        specs,
        engines=tuple(
            replace(spec, is_on=number < scaler.engines_first, cold_start_s=wanted.cold_start_s)
            for number, spec in enumerate(specs.engines)
        ),
    )
    strategy = Scaled(
        placement.make(), scaler, shape.lead_s, day.deferrable_s if job.defers else None
    )
    options = WorldOptions(
        seed=job.seed,
        horizon_s=shape.horizon_s,
        warm_up_s=shape.lead_s,
        cool_down_s=shape.tail_s,
        tick_ms=TICK_MS,
        telemetry_age_s=TELEMETRY_AGE_S,
    )
    result = play(day.plans, specs, strategy, options)
    ends_s = shape.lead_s + shape.day_s
    measured = [plan for plan in day.plans if shape.lead_s <= plan.arrival_s < ends_s]
    first = round(shape.lead_s / 60.0)
    minutes = slice(first, first + round(shape.day_s / 60.0))
    hours = ceil(shape.hours)
    return DayOutcome(
        outcome=outcome_of(result, measured),
        engine_starts=result.engine_starts,
        engine_stops=strategy.engine_stops,
        deferred=strategy.deferred,
        engines_on_by_minute=result.engines_on_by_minute[minutes],
        fleet_usd_by_minute=tuple(round(usd, 9) for usd in result.fleet_usd_by_minute[minutes]),
        arrivals_per_s_by_minute=tuple(round(rate, 6) for rate in day.curve.per_s[minutes]),
        hours=tuple(
            (strategy.in_time.get(hour, 0.0), strategy.most.get(hour, 0.0)) for hour in range(hours)
        ),
    )


class DayRunner(JobRunner[DayJob, DayOutcome]):
    """Plays days."""

    def __init__(self, processes: int = PROCESSES, progress: Progress | None = None) -> None:
        super().__init__(run_day, _told, processes, progress)


def _told(job: DayJob) -> str:
    return f"{job.scaler} with {job.placement}"


# ------------------------------------------------------------ curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A scaler with its setting, on a placement with its own."""

    scaler: str
    setting: float
    placement: str
    placement_config: int
    defers: bool = False

    @property
    def name(self) -> str:
        return f"{self.scaler}{SEPARATOR}{self.placement}"

    def job(self, wanted: DayWanted, seed: int, knob: float) -> DayJob:
        return DayJob(
            wanted=wanted,
            seed=seed,
            scaler=self.scaler,
            setting=self.setting,
            knob=knob,
            placement=self.placement,
            placement_config=self.placement_config,
            defers=self.defers,
        )


Points = dict[float, tuple[DayOutcome, ...]]


def _in_time(days: Sequence[DayOutcome]) -> float:
    return Pooled(outcomes=tuple(day.outcome for day in days)).in_time_ratio


def _usd(days: Sequence[DayOutcome]) -> float:
    return sum(day.fleet_usd for day in days) / max(1, len(days))


def sweep(
    runner: DayRunner, wanted: DayWanted, way: Way, seeds: Sequence[int], start: int
) -> Points:
    """Outcomes by knob, from the last below the floor to the first that holds it, as far as knobs go."""
    knobs = KNOBS[way.scaler]
    points: Points = {}

    def at(index: int) -> bool:
        jobs = [way.job(wanted, seed, knobs[index]) for seed in seeds]
        outcomes = runner.play(jobs)
        points[knobs[index]] = tuple(outcomes[job] for job in jobs)
        return _in_time(points[knobs[index]]) >= wanted.success_ratio_min

    index = min(start, len(knobs) - 1)
    if at(index):
        while index > 0:
            index -= 1
            if not at(index):
                break
    else:
        while index + 1 < len(knobs):
            index += 1
            if at(index):
                break
    return points


def usd_at_floor(points: Points, ratio_min: float) -> float | None:
    """Dollars of a day at the floor; None where no knob reaches it."""
    return interpolated([(_usd(days), _in_time(days)) for days in points.values()], ratio_min)


def _nearest(points: Points, ratio_min: float) -> float:
    """The knob whose success is nearest to the floor."""
    return min(points, key=lambda knob: (abs(_in_time(points[knob]) - ratio_min), knob))


def tune_placement(runner: DayRunner, wanted: DayWanted) -> tuple[str, int]:
    """The baseline's placement, with its setting, that does most in time on a fleet that nearly holds the floor.

    The fleet is the first that holds it with plain stickiness, less one engine.
    """
    sticky = Way(scaler=STATIC, setting=0.0, placement="sticky", placement_config=0)
    points = sweep(runner, wanted, sticky, TUNING_DAYS, FIRST_KNOB[STATIC])
    engines = max(1.0, _nearest(points, wanted.success_ratio_min))
    jobs = {
        (name, index): [
            replace(sticky, placement=name, placement_config=index).job(wanted, seed, engines)
            for seed in TUNING_DAYS
        ]
        for name in PLACEMENTS
        for index in range(len(family(name).configs))
    }
    outcomes = runner.play(job for group in jobs.values() for job in group)
    return max(jobs, key=lambda key: _in_time([outcomes[job] for job in jobs[key]]))


def tune_way(runner: DayRunner, wanted: DayWanted, way: Way) -> tuple[Way, int, float | None]:
    """The setting with the fewest dollars at the floor on the tuning days, the knob's index, the dollars."""
    best: tuple[Way, int, float | None] | None = None
    for setting in SETTINGS[way.scaler]:
        trial = replace(way, setting=setting)
        points = sweep(runner, wanted, trial, TUNING_DAYS, FIRST_KNOB[way.scaler])
        usd = usd_at_floor(points, wanted.success_ratio_min)
        knob = KNOBS[way.scaler].index(_nearest(points, wanted.success_ratio_min))
        if best is None or (usd is not None and (best[2] is None or usd < best[2])):
            best = (trial, knob, usd)
    if best is None:
        raise KeyError(way.scaler)
    return best


# ------------------------------------------------------------ the experiment


def day(wanted: DayWanted, runner: DayRunner) -> dict[str, Any]:
    """The document that `--json` writes."""
    placement, config = "", 0
    if any(name.endswith(SEPARATOR + BEST) for name in wanted.policies):
        placement, config = tune_placement(runner, wanted)
    tuned: dict[str, tuple[Way, int, float | None]] = {}
    curves: dict[str, Points] = {}
    for name in wanted.policies:
        scaler, _, where = name.partition(SEPARATOR)
        is_best = where == BEST
        way = Way(
            scaler=scaler,
            setting=0.0,
            placement=placement if is_best else where,
            placement_config=config if is_best else 0,
        )
        if way.name in tuned:
            continue
        tuned[way.name] = tune_way(runner, wanted, way)
        chosen, knob, _ = tuned[way.name]
        curves[way.name] = sweep(runner, wanted, chosen, wanted.evaluation_days, knob)
    reactive, static = _cheapest(tuned, REACTIVE), _cheapest(tuned, (STATIC,))
    cells = [
        _cell(wanted, name, tuned[name], points, curves, reactive, static)
        for name, points in curves.items()
    ]
    document: dict[str, Any] = {"cells": cells, "bounds": {}, "days": _days(wanted, curves)}
    ours = f"{PLANNER}{SEPARATOR}{HEADWAY}"
    if ours in curves:
        document["procurement"] = _procured(runner, wanted, tuned[ours], curves[ours])
        if wanted.deferrable_ratio > 0.0:
            document["deferral"] = _deferral(runner, wanted, tuned[ours], curves[ours])
    return document


def _cheapest(
    tuned: Mapping[str, tuple[Way, int, float | None]], scalers: Iterable[str]
) -> str | None:
    """Of these scalers with a baseline's placement, the cheapest by tuning: evaluation must not choose."""
    usd = {
        name: usd
        for name, (way, _, usd) in tuned.items()
        if way.scaler in scalers and way.placement != HEADWAY and usd is not None
    }
    return min(usd, key=lambda name: usd[name], default=None)


def _curve(points: Points) -> list[list[tuple[float, float, float]]]:
    return [
        [(one.fleet_usd, one.outcome.in_time, one.outcome.in_time_most) for one in days]
        for days in points.values()
    ]


def _ratio(points: Points, base: Points | None, ratio_min: float) -> dict[str, object] | None:
    if base is None or usd_at_floor(points, ratio_min) is None:
        return None
    if usd_at_floor(base, ratio_min) is None:
        return None
    return paired_floor_ratio(_curve(points), _curve(base), ratio_min).document()


def _cell(
    wanted: DayWanted,
    name: str,
    tuned: tuple[Way, int, float | None],
    points: Points,
    curves: Mapping[str, Points],
    reactive: str | None,
    static: str | None,
) -> dict[str, Any]:
    ratio_min = wanted.success_ratio_min
    way = tuned[0]
    knob = _nearest(points, ratio_min)
    nearest = points[knob]
    usd = usd_at_floor(points, ratio_min)
    base = None if reactive is None else curves[reactive]
    starts = _starts_at_floor(points, ratio_min)
    base_starts = None if base is None else _starts_at_floor(base, ratio_min)
    return (
        {
            "experiment": "day",
            "workload": wanted.workload,
            "deadlines": str(wanted.deadlines),
            "fleet": wanted.fleet,
            "load": float(wanted.peak_engines),
            "policy": name,
            "config": _label(way, knob),
            "best_baseline": reactive,
            "cpst_ratio_to_best_baseline": None,
        }
        | Pooled(outcomes=tuple(one.outcome for one in nearest)).document()
        | {
            "hours": wanted.hours,
            "cold_start_s": wanted.cold_start_s,
            "success_ratio_min": ratio_min,
            "fleet_usd_at_floor": None if usd is None else round(usd, 6),
            "fleet_usd_ratio_to_best_baseline": _ratio(points, base, ratio_min),
            "fleet_usd_ratio_to_static": _ratio(
                points, None if static is None else curves[static], ratio_min
            ),
            "engine_starts": starts,
            "engine_starts_ratio_to_best_baseline": round(starts / base_starts, 6)
            if starts is not None and base_starts
            else None,
            "worst_hour_in_time_ratio": _worst_hour(nearest),
            "curve": sorted(
                [round(_usd(days), 6), round(_in_time(days), 6), knob]
                for knob, days in points.items()
            ),
        }
    )


def _label(way: Way, knob: float) -> str:
    words = {
        STATIC: f"{knob:g} engines",
        HPA: f"{knob:g} calls an engine, {way.setting:g} s before it shrinks",
        GREEDY: f"full at {knob:g} of KV or {way.setting:g} calls waiting",
        PLANNER: f"stretch {knob:g}",
    }[way.scaler]
    if way.placement == HEADWAY:
        return words
    label = family(way.placement).configs[way.placement_config].label
    return f"{words}; {label}" if label else words


def _starts_at_floor(points: Points, ratio_min: float) -> float | None:
    """Engine starts a day, interpolated where the dollars are."""
    usd = usd_at_floor(points, ratio_min)
    if usd is None:
        return None
    known = sorted(
        (_usd(days), sum(one.engine_starts for one in days) / len(days)) for days in points.values()
    )
    for (x0, y0), (x1, y1) in pairwise(known):
        if x0 <= usd <= x1 and x1 > x0:
            return round(y0 + (y1 - y0) * (usd - x0) / (x1 - x0), 3)
    return round(min(known, key=lambda point: abs(point[0] - usd))[1], 3)


def _worst_hour(days: Sequence[DayOutcome]) -> float:
    """The lowest part in time of any hour of the played day, all days together."""
    ratios = []
    for hour in range(max(len(one.hours) for one in days)):
        done = sum(one.hours[hour][0] for one in days)
        most = sum(one.hours[hour][1] for one in days)
        if most > 0.0:
            ratios.append(done / most)
    return round(min(ratios, default=1.0), 6)


def _days(wanted: DayWanted, curves: Mapping[str, Points]) -> list[dict[str, Any]]:
    """The first day of evaluation under each policy, at the knob nearest to the floor."""
    told = []
    for name, points in curves.items():
        one = points[_nearest(points, wanted.success_ratio_min)][0]
        told.append(
            {
                "policy": name,
                "seed": one.outcome.seed,
                "engines_on_by_minute": list(one.engines_on_by_minute),
                "fleet_usd_by_minute": list(one.fleet_usd_by_minute),
                "arrivals_per_s_by_minute": list(one.arrivals_per_s_by_minute),
            }
        )
    return told


def _procured(
    runner: DayRunner,
    wanted: DayWanted,
    tuned: tuple[Way, int, float | None],
    points: Points,
) -> dict[str, Any]:
    """The engine-hours of the days of evaluation as bought by a plan made from the tuning days."""
    knob = _nearest(points, wanted.success_ratio_min)
    jobs = [tuned[0].job(wanted, seed, knob) for seed in TUNING_DAYS]
    before = runner.play(jobs)
    spec = fleet(wanted.fleet).engines[0]
    plan = plan_of([before[job].engines_on_by_minute for job in jobs], spec.gpu.name, spec.gpus)
    bills = [day_bill(plan, one.engines_on_by_minute) for one in points[knob]]
    on_demand = sum(bill.on_demand_only_usd for bill in bills)
    return {
        "policy": tuned[0].name,
        "plan": plan.document(),
        "usd": finite(sum(bill.usd for bill in bills)),
        "on_demand_only_usd": finite(on_demand),
        "ratio": finite(sum(bill.usd for bill in bills) / on_demand),
        "ratio_by_day": [finite(bill.usd / bill.on_demand_only_usd) for bill in bills],
        "spot_failed_ratio": finite(
            sum(bill.spot_failed_ratio for bill in bills) / max(1, len(bills))
        ),
    }


def _deferral(
    runner: DayRunner,
    wanted: DayWanted,
    tuned: tuple[Way, int, float | None],
    points: Points,
) -> dict[str, Any]:
    """The same days and deadlines, with work that can wait begun at once against kept for valleys; and, on
    knobs of the second, what it costs when it can not wait at all.
    """
    way, knob, _ = tuned
    ratio_min = wanted.success_ratio_min
    waits = sweep(runner, wanted, replace(way, defers=True), wanted.evaluation_days, knob)
    rigid = sweep(runner, replace(wanted, deferrable_ratio=0.0), way, wanted.evaluation_days, knob)
    return {
        "deferrable_ratio": wanted.deferrable_ratio,
        "usd_kept_waiting": usd_at_floor(waits, ratio_min),
        "usd_begun_at_once": usd_at_floor(points, ratio_min),
        "usd_not_deferrable": usd_at_floor(rigid, ratio_min),
        "ratio_to_not_deferrable": _ratio(waits, rigid, ratio_min),
        "ratio_begun_at_once": _ratio(points, rigid, ratio_min),
        "deferred": sum(one.deferred for one in waits[_nearest(waits, ratio_min)]),
        "worst_hour_in_time_ratio": _worst_hour(waits[_nearest(waits, ratio_min)]),
    }


def known_policy(name: str) -> bool:
    scaler, _, placement = name.partition(SEPARATOR)
    return scaler in KNOBS and placement in (*PLACEMENTS, BEST, HEADWAY)
