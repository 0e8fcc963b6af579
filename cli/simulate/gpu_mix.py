"""Which fleet of GPU types holds a floor of success for the fewest dollars: the best single type, or a mix.

The planner proposes (`scheduler/planner`): the demand of the drawn workflows by class and priority, nodes of
every type at their prices, engines in whole numbers. Its times are fluid, so its demand is scaled until a
fleet of its main type alone is as large as simulation finds it has to be. What it proposes, and
mixes with an engine more and less of every other type, are then played with the live placement: of each the
number of engines of the main type is found at which the floor is held, dollars interpolated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cli.failure import CommandFailure, ExitCode
from cli.simulate.baselines import family
from cli.simulate.contracts import EngineSpec, FleetSpec, Plan, all_steps
from cli.simulate.deadlines import Deadlines
from cli.simulate.experiments import (
    HEADWAY,
    SUCCESS_RATIO_FLOOR,
    WITHOUT,
    Cell,
    Given,
    Job,
    Pooled,
    Runner,
    Wanted,
    drawn,
    floor_curve,
    in_measured_time,
    is_ours,
    search,
    tune_in_time,
)
from cli.simulate.fleets import ENGINES_MAX, LLAMA_8B, LLAMA_70B_FP8, REFERENCE
from cli.simulate.stats import Interval, interpolated, paired_quantity_ratio
from cli.simulate.workloads import capacity_per_s, workload
from controlplane.domain.catalog import GpuType, Model
from controlplane.domain.ids import GpuTypeName, RegionName
from controlplane.scheduler.planner.fleet import solve
from controlplane.scheduler.planner.problem import (
    Demand,
    Limits,
    NodeShape,
    PoolKind,
    Problem,
    pool_kind,
)

_GB: Final = 1_000_000_000
PRICES: Final = Path(__file__).with_name("gpu_prices.yaml")
PRICE_FILE_BYTES_MAX: Final = 1024 * 1024
# Engines of the reference type of which load 1 is the capacity.
BASE_ENGINES: Final = 4
# A fleet larger than this many times that is no answer, whatever it costs.
GROWTH_MAX: Final = 6
# Mixes that are played beside the single types.
MIXES_MAX: Final = 4
# Workflows of a class and priority are told to the planner in so many sizes, by their deadlines.
SIZES: Final = 3
# What a workflow is worth to the planner here: more than it costs anywhere, for the floor is to be held.
VALUE_MICRO_USD: Final = 100_000_000
PLAN_S_MAX: Final = 5.0
BASELINES: Final = ("vllm-priority", "llm-d-tokens", "sticky")
_REGION: Final = RegionName("north")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU: GB, TB/s, dense TFLOP/s in bf16 and in fp8 (0: it has none)."""

    hbm_gb: int
    tb_per_s: float
    bf16_tflops: float
    fp8_tflops: float = 0.0


# Vendors' data sheets as in NVIDIA aiconfigurator's system files (Apache-2.0).
HARDWARE: Final[Mapping[str, Hardware]] = {
    "h100-sxm": Hardware(hbm_gb=80, tb_per_s=3.35, bf16_tflops=989, fp8_tflops=1_978),
    "h200": Hardware(hbm_gb=141, tb_per_s=4.8, bf16_tflops=989, fp8_tflops=1_978),
    "a100-80": Hardware(hbm_gb=80, tb_per_s=2.039, bf16_tflops=312),
    "l40s": Hardware(hbm_gb=48, tb_per_s=0.864, bf16_tflops=362, fp8_tflops=733),
}
REFERENCE_TYPE: Final = "h100-sxm"
# Models to serve, and the GPUs of one engine.
MODELS: Final[Mapping[str, tuple[Model, int]]] = {
    "70b": (LLAMA_70B_FP8, 4),
    "8b": (LLAMA_8B, 1),
}


# ------------------------------------------------------------ prices


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceVector:
    """Dollars for an hour of one GPU by type, with where and when they were seen."""

    name: str
    usd_per_gpu_hour: Mapping[str, float]
    source: str
    date: str


class _Vector(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)
    date: Any
    source: Annotated[str, Field(min_length=1)]
    usd_per_gpu_hour: Annotated[
        dict[str, Annotated[float, Field(gt=0.0, le=1_000.0)]], Field(min_length=1)
    ]


class _Vectors(BaseModel):
    model_config = ConfigDict(extra="forbid")
    vectors: Annotated[dict[str, _Vector], Field(min_length=1, max_length=16)]


def read_prices(path: Path = PRICES) -> Mapping[str, PriceVector]:
    """Price vectors by name. Raises CommandFailure when there is no such file or it is not as documented."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandFailure(ExitCode.USAGE, f"`{path}` can not be read: {error}") from error
    if len(text) > PRICE_FILE_BYTES_MAX:
        raise CommandFailure(ExitCode.USAGE, f"`{path}` is over {PRICE_FILE_BYTES_MAX:,} bytes")
    try:
        document = _Vectors.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError, ValueError) as error:
        raise CommandFailure(
            ExitCode.USAGE, f"`{path}` holds no price vectors: {error}", f"see {PRICES.name}"
        ) from error
    return {
        name: PriceVector(
            name=name,
            usd_per_gpu_hour=dict(each.usd_per_gpu_hour),
            source=each.source,
            date=str(each.date),
        )
        for name, each in document.vectors.items()
    }


def engine_spec(model: str, gpu: str, prices: PriceVector) -> EngineSpec:
    """One engine of `model` on GPUs of a type, at its price. Raises CommandFailure for what is not known."""
    if model not in MODELS:
        raise CommandFailure(ExitCode.USAGE, f"no model is called `{model}`", "use 70b or 8b")
    if gpu not in HARDWARE or gpu not in prices.usd_per_gpu_hour:
        known = ", ".join(name for name in HARDWARE if name in prices.usd_per_gpu_hour)
        raise CommandFailure(
            ExitCode.USAGE, f"`{gpu}` has no rates or no price in `{prices.name}`", f"use {known}"
        )
    served, gpus = MODELS[model]
    hardware = HARDWARE[gpu]
    return EngineSpec(
        name=gpu,
        model=served,
        gpus=gpus,
        gpu=GpuType(
            name=GpuTypeName(gpu),
            hbm_bytes=hardware.hbm_gb * _GB,
            bandwidth_bytes_per_s=hardware.tb_per_s * 1e12,
            flops_per_s=hardware.bf16_tflops * 1e12,
            fp8_flops_per_s=hardware.fp8_tflops * 1e12,
            price_micro_usd_per_hour=round(prices.usd_per_gpu_hour[gpu] * 1e6),
            price_source=prices.source,
            price_date=prices.date,
        ),
    )


# ------------------------------------------------------------ proposals


def demands_of(
    plans: Sequence[Plan], measured_s: float, model: Model, ratio_min: float
) -> tuple[Demand, ...]:
    """The drawn workflows as the planner sees them: means by class, priority and size, per second.

    By size, for a mean deadline says of the short ones that they had more time than they have.
    """
    groups: dict[tuple[str, int, int], list[Plan]] = {}
    for name, priority in sorted({(plan.workflow_class, plan.priority) for plan in plans}):
        alike = [plan for plan in plans if (plan.workflow_class, plan.priority) == (name, priority)]
        alike.sort(key=lambda plan: (plan.deadline_s or 0.0, plan.number))
        for number, plan in enumerate(alike):
            size = number * SIZES // len(alike)
            groups.setdefault((name, priority, size), []).append(plan)
    demands = []
    for (name, priority, size), group in groups.items():
        steps = [step for plan in group for step in all_steps(plan.steps)]
        pauses = [step.gap_s for plan in group for step in plan.steps[:-1]]
        deadlines = [plan.deadline_s for plan in group if plan.deadline_s is not None]
        rate = len(group) / measured_s
        demands.append(
            Demand(
                class_id=f"{name}-{priority}-{size}",
                model=model.name,
                priority=priority,
                arrivals_per_s_now=rate,
                arrivals_per_s_forecast=rate,
                steps=len(steps) / len(group),
                uncached_tokens=_mean(step.new_tokens for step in steps),
                context_tokens=_mean(step.prompt_tokens for step in steps),
                completion_tokens=_mean(step.completion_tokens for step in steps),
                gap_s=_mean(pauses),
                deadline_s=_mean(deadlines) if deadlines else None,
                value_micro_usd=VALUE_MICRO_USD,
                success_floor_ratio=ratio_min,
            )
        )
    return tuple(demands)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def propose(
    demands: Sequence[Demand], pools: Sequence[PoolKind], usd_per_hour: Mapping[str, float]
) -> dict[str, int]:
    """Engines by GPU type that the planner buys for a demand, from nothing. `usd_per_hour`: of an engine.

    Types that it does not want are left out. Raises CommandFailure where no plan is found.
    """
    shapes = tuple(
        NodeShape(
            region=_REGION,
            gpu_type=pool.gpu_type,
            gpus=pool.gpus,
            micro_usd_per_hour=round(usd_per_hour[pool.gpu_type] * 1e6),
            nodes_more_max=ENGINES_MAX,
        )
        for pool in pools
    )
    limits = Limits(starts_per_round_max=ENGINES_MAX, change_micro_usd=0, solve_s_max=PLAN_S_MAX)
    plan = solve(
        Problem(
            now_s=0.0,
            demands=tuple(demands),
            pools=tuple(replace(pool, load_s=0.0) for pool in pools),
            shapes=shapes,
            nodes=(),
            limits=limits,
        )
    )
    wanted = {str(each.gpu_type): each.desired for each in plan.desired if each.desired > 0}
    if not wanted:
        raise CommandFailure(
            ExitCode.FAILED, f"the planner proposes no fleet: {'; '.join(plan.binding)}"
        )
    return wanted


def _scaled(demands: Sequence[Demand], factor: float) -> list[Demand]:
    return [
        replace(
            demand,
            arrivals_per_s_now=demand.arrivals_per_s_now * factor,
            arrivals_per_s_forecast=demand.arrivals_per_s_forecast * factor,
        )
        for demand in demands
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Engines beside a number of engines of `main` that is looked for; none: a single type."""

    main: str
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        parts = [f"{count} {gpu}" for gpu, count in self.beside]
        return " + ".join([self.main, *parts])

    def engines(self, main: float) -> dict[str, float]:
        return {self.main: main} | dict(self.beside)


def mixes_around(proposed: Mapping[str, int], main: str, types: Sequence[str]) -> list[Mix]:
    """The proposal's other types beside `main`, and neighbours: an engine more and one less of each type."""
    centre = {gpu: proposed.get(gpu, 0) for gpu in types if gpu != main}
    found = [centre]
    for gpu, count in centre.items():
        found += [centre | {gpu: count + change} for change in (1, -1)]
    mixes = []
    for counts in found:
        beside = tuple((gpu, count) for gpu, count in counts.items() if count > 0)
        mix = Mix(main=main, beside=beside)
        if beside and min(counts.values()) >= 0 and mix not in mixes:
            mixes.append(mix)
    return mixes[:MIXES_MAX]


# ------------------------------------------------------------ the experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class MixQuestion:
    """What is asked beside `Wanted`: which model, at whose prices, on which types (empty: all priced)."""

    model: str
    prices: PriceVector
    types: tuple[str, ...] = ()
    ratio_min: float = SUCCESS_RATIO_FLOOR

    def specs(self) -> dict[str, EngineSpec]:
        """By type, those that hold the model."""
        types = self.types or tuple(
            name for name in HARDWARE if name in self.prices.usd_per_gpu_hour
        )
        specs = {gpu: engine_spec(self.model, gpu, self.prices) for gpu in types}
        return {gpu: spec for gpu, spec in specs.items() if spec.rates.kv_tokens_capacity > 0}


def fleet_of(specs: Mapping[str, EngineSpec], counts: Mapping[str, float]) -> FleetSpec:
    engines = [
        replace(specs[gpu], name=f"{gpu}-{number}", node=f"{gpu}-{number}")
        for gpu, count in counts.items()
        for number in range(round(count))
    ]
    name = " + ".join(f"{round(count)} {gpu}" for gpu, count in counts.items() if round(count))
    return FleetSpec(name=name, engines=tuple(engines[:ENGINES_MAX]))


class _World:
    """One workload at one load, on any fleet of the question's types."""

    def __init__(
        self,
        runner: Runner,
        wanted: Wanted,
        question: MixQuestion,
        load: tuple[str, Deadlines, float],
    ) -> None:
        self.runner = runner
        self.wanted = wanted
        self.question = question
        self.specs = question.specs()
        self.workload, self.deadlines, self.load = load
        # Load is told in capacities of the reference type, whoever sells it. Deadlines are those of people who are
        # used to the reference engine, whichever model answers them.
        served, _ = MODELS[question.model]
        free = PriceVector(
            name="free", usd_per_gpu_hour=dict.fromkeys(HARDWARE, 1.0), source="", date=""
        )
        engine = engine_spec(question.model, REFERENCE_TYPE, free)
        base = FleetSpec(name="base", engines=(engine,) * BASE_ENGINES)
        self.reference = replace(REFERENCE, model=replace(REFERENCE.model, name=served.name))
        self.rate_per_s = self.load * capacity_per_s(workload(self.workload), base)

    def usd_per_hour(self, mix: Mix, main: float) -> float:
        """Of the fleet, in dollars, by its types' prices."""
        return sum(
            count * self.specs[gpu].micro_usd_per_hour / 1e6
            for gpu, count in mix.engines(main).items()
        )

    def cell(self, mix: Mix, main: int) -> Cell:
        fleet = fleet_of(self.specs, mix.engines(main))
        return Cell(
            workload=self.workload,
            deadlines=self.deadlines,
            fleet=fleet.name,
            load=self.load,
            given=Given(fleet=fleet, rate_per_s=self.rate_per_s, reference=self.reference),
        )

    def pooled(self, mix: Mix, main: int, policy: str, config: int, seeds: Sequence[int]) -> Pooled:
        cell = self.cell(mix, main)
        jobs = [
            Job(cell=cell, policy=policy, config=config, seed=seed, span=self.wanted.span)
            for seed in seeds
        ]
        outcomes = self.runner.play(jobs)
        return Pooled(outcomes=tuple(outcomes[job] for job in jobs))

    def curve(self, mix: Mix, policy: str, config: int, start: int) -> dict[int, Pooled]:
        least = 0 if mix.beside else 1
        return floor_curve(
            lambda main, seeds: self.pooled(mix, main, policy, config, seeds),
            start=max(least, start),
            ratio_min=self.question.ratio_min,
            seeds=self.wanted.evaluation_seeds,
            least=least,
            most=BASE_ENGINES * GROWTH_MAX,
        )

    def floor_usd(self, mix: Mix, curve: Mapping[int, Pooled]) -> float | None:
        points = [(self.usd_per_hour(mix, n), each.in_time_ratio) for n, each in curve.items()]
        return interpolated(points, self.question.ratio_min)

    def samples(
        self, mix: Mix, curve: Mapping[int, Pooled]
    ) -> list[tuple[float, list[tuple[float, float]]]]:
        return [
            (
                self.usd_per_hour(mix, main),
                [(outcome.in_time, outcome.in_time_most) for outcome in each.outcomes],
            )
            for main, each in sorted(curve.items())
        ]


@dataclass(frozen=True, slots=True)
class _Found:
    mix: Mix
    policy: str
    config: int
    curve: Mapping[int, Pooled]
    usd: float | None


def gpu_mix(wanted: Wanted, runner: Runner, question: MixQuestion) -> dict[str, Any]:
    """Dollars per hour at the floor of every single type and of mixes around the planner's proposal."""
    cells: list[dict[str, Any]] = []
    proposals: dict[str, Any] = {}
    without = (HEADWAY + WITHOUT + part for part in wanted.ablated)
    names = [*(wanted.policies or (HEADWAY, *BASELINES)), *without]
    for name in wanted.workloads:
        for deadlines in wanted.deadlines:
            for load in wanted.loads:
                world = _World(runner, wanted, question, (name, deadlines, load))
                found, proposal = _search(world, names)
                cells += _cells(world, found)
                proposals[f"{name}/{deadlines}/{question.model}/{load:g}"] = proposal
    return {"cells": cells, "bounds": {}, "proposals": proposals}


def _search(world: _World, names: Sequence[str]) -> tuple[list[_Found], dict[str, Any]]:
    found: list[_Found] = []
    tuned: dict[str, int] = {}
    singles = [Mix(main=gpu) for gpu in world.specs]
    for mix in singles:
        start = _start(world, mix, names)
        if start is None:
            most = BASE_ENGINES * GROWTH_MAX
            for name in names:
                # No number of these engines holds the floor: that is shown, at the most there may be.
                pool = world.pooled(mix, most, name, 0, world.wanted.evaluation_seeds)
                found.append(_Found(mix, name, 0, {most: pool}, None))
            continue
        # Settings are those of the type alone; a mix has those of its main type.
        configs = {
            name: index
            for name, (index, _) in tune_in_time(
                world.runner, world.cell(mix, start), names, world.wanted.span
            ).items()
        }
        for name in names:
            config = configs.get(name, 0)
            tuned[f"{mix.main}/{name}"] = config
            curve = world.curve(mix, name, config, start)
            found.append(_Found(mix, name, config, curve, world.floor_usd(mix, curve)))
    reached = [each for each in found if each.usd is not None and is_ours(each.policy)]
    reached = reached or [each for each in found if each.usd is not None]
    if not reached:
        return found, {"planner": {}, "scale": None}
    best = min(reached, key=lambda each: each.usd or 0.0)
    proposal, scale = _proposal(world, best)
    main = best.mix.main
    price = world.usd_per_hour(Mix(main=main), 1)
    for mix in mixes_around(proposal, main, tuple(world.specs)):
        # What the others cost is no longer spent on the main type, in a first guess.
        left = (best.usd or 0.0) - world.usd_per_hour(mix, 0)
        for name in names:
            config = tuned.get(f"{main}/{name}", 0)
            curve = world.curve(mix, name, config, max(0, round(left / price)))
            found.append(_Found(mix, name, config, curve, world.floor_usd(mix, curve)))
    return found, {"planner": proposal, "scale": round(scale, 6), "main": main}


def _start(world: _World, mix: Mix, names: Sequence[str]) -> int | None:
    """The smallest fleet of one type with which any policy, as first set, holds the floor on one seed."""

    def is_enough(main: int) -> bool:
        return any(
            world.pooled(mix, main, name, 0, world.wanted.evaluation_seeds[:1]).in_time_ratio
            >= world.question.ratio_min
            for name in names
        )

    return search(is_enough, start=BASE_ENGINES, least=1, most=BASE_ENGINES * GROWTH_MAX)


def _proposal(world: _World, best: _Found) -> tuple[dict[str, int], float]:
    """The planner's fleet for the demand at which it, with the best type alone, buys what simulation needs."""
    seed, span = world.wanted.evaluation_seeds[0], world.wanted.span
    plans = in_measured_time(drawn(world.cell(best.mix, 1), seed, span), span)
    model, gpus = MODELS[world.question.model]
    demands = demands_of(plans, span.measured_s, model, world.question.ratio_min)
    pools = {
        gpu: pool
        for gpu, spec in world.specs.items()
        if (pool := pool_kind(model, spec.gpu, gpus)) is not None
    }
    usd = {gpu: world.usd_per_hour(Mix(main=gpu), 1) for gpu in pools}
    main = best.mix.main
    alone = propose(demands, [pools[main]], usd)[main]
    needed = (best.usd or 0.0) / usd[main]
    scale = needed / alone
    return propose(_scaled(demands, scale), list(pools.values()), usd), scale


def _cells(world: _World, found: Sequence[_Found]) -> list[dict[str, Any]]:
    reached = [each for each in found if each.usd is not None]

    def cheapest(some: Iterable[_Found]) -> _Found | None:
        return min(some, key=lambda each: each.usd or 0.0, default=None)

    singles = [each for each in reached if not each.mix.beside]
    baseline = cheapest(each for each in singles if not is_ours(each.policy))
    cells = []
    for each in found:
        single = cheapest(other for other in singles if other.policy == each.policy)
        nearest = min(
            each.curve.values(),
            key=lambda pool: abs(pool.in_time_ratio - world.question.ratio_min),
        )
        main = None
        if each.usd is not None:
            left = each.usd - world.usd_per_hour(each.mix, 0)
            main = left / world.usd_per_hour(Mix(main=each.mix.main), 1)
        cells.append(
            {
                "experiment": "gpu-mix",
                "workload": world.workload,
                "deadlines": str(world.deadlines),
                "fleet": each.mix.name,
                "load": world.load,
                "policy": each.policy,
                "config": ""
                if is_ours(each.policy)
                else family(each.policy).configs[each.config].label,
                "model": world.question.model,
                "prices": world.question.prices.name,
                "price_source": world.question.prices.source,
                "price_date": world.question.prices.date,
                "is_mix": bool(each.mix.beside),
                "composition": None if main is None else _rounded(each.mix.engines(main)),
                "composition_usd_per_hour": None if main is None else _dollars(world, each, main),
                "best_baseline": None if baseline is None else baseline.policy,
                "best_single": None if single is None else single.mix.name,
            }
            | nearest.document()
            | {
                "success_ratio_min": world.question.ratio_min,
                "fleet_usd_at_floor": None if each.usd is None else round(each.usd, 6),
                "cpst_ratio_to_best_baseline": None,
                "fleet_usd_ratio_to_best_single": _ratio(world, each, single),
                "fleet_usd_ratio_to_best_baseline": _ratio(world, each, baseline),
                "curve": [
                    [round(world.usd_per_hour(each.mix, n), 6), round(pool.in_time_ratio, 6)]
                    for n, pool in sorted(each.curve.items())
                ],
            }
        )
    return cells


def _rounded(counts: Mapping[str, float]) -> dict[str, float]:
    return {gpu: round(count, 6) for gpu, count in counts.items()}


def _dollars(world: _World, each: _Found, main: float) -> dict[str, float]:
    return {
        gpu: round(count * world.specs[gpu].micro_usd_per_hour / 1e6, 6)
        for gpu, count in each.mix.engines(main).items()
    }


def _ratio(world: _World, ours: _Found, theirs: _Found | None) -> dict[str, object] | None:
    if theirs is None or ours.usd is None:
        return None
    ratio: Interval = paired_quantity_ratio(
        world.samples(ours.mix, ours.curve),
        world.samples(theirs.mix, theirs.curve),
        lambda points: interpolated(points, world.question.ratio_min),
    )
    return ratio.document()
