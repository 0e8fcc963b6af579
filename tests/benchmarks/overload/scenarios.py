"""The scenarios. Each starts what it needs, plays, and returns figures; none decides whether they are good."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from tests.benchmarks.overload.calls import CallPlayer, Shape, succeeded
from tests.benchmarks.overload.fleet import (
    BASELINE_ADMISSION,
    NODES,
    LabCluster,
    engine_times,
    running,
)
from tests.benchmarks.overload.measure import (
    Cpu,
    Figures,
    Run,
    after_refusals,
    calls_since,
    counts,
    database_now,
    figures,
    jain,
    quantile,
    ratio,
)
from tests.benchmarks.overload.play import Ended, Player
from tests.benchmarks.overload.workload import LOW, TENANTS, DeadlineModel, Plan, plans, stream

# Workflows a second that the fleet finishes at saturation under the shipped policies: scenario `a`.
LOAD_1_RATE = 5.2
WARM_UP_S = 12.0
COOL_DOWN_S = 6.0
# Scenario c: how full the fleet is, how long it is watched before and after, and when it must be well again.
HALVED_LOAD = 0.85
BEFORE_S = 28.0
# What arrives this long before the trigger has mostly ended by then: it is what the time before is judged by.
TYPICAL_S = 12.0
AFTER_S = 30.0
RECOVERY_S = 10.0
# The shortest stretch of arrivals whose success is told.
WINDOW_S = 5.0
FULL_RATIO = 0.95
# Scenario d: calls a second, small enough that capacity plays no part.
FAILING_RATE = 30.0
FAILING_ERROR_RATE = 0.5
HEALTHY_S = 5.0
# Scenario e: tenants of one class and weight, one that floods, and one of the lowest class. Prompts are long
# and cached, so that seats and not prompts are what runs out.
EQUALS = ("t1", "t2", "t3", "t4")
HEAVY = "flood"
LOWEST = "lowest"
FAIR_SHAPE = Shape(prefix_tokens=1_200, prompt_tokens=40, answer_tokens=24)
LIGHT_RATE = 0.8
HEAVY_RATIO = 100.0
BACKLOG_CALLERS = (24, 36, 48, 96)
LOWEST_CALLERS = 36
# Waits below this are not noticed; they count as this much where waits are compared.
WAIT_FLOOR_MS = 100.0
CALIBRATION_SLOTS = (24, 48, 72)
# A deadline that no workflow of the calibration meets.
UNTIMED_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`seconds` is how long a run counts, between its warm-up and its cool-down."""

    seconds: float = 60.0
    seed: int = 1
    rate: float = LOAD_1_RATE
    overload: float = 2.0
    deadlines: DeadlineModel = DeadlineModel.KIND
    has_baseline: bool = True
    warm_up_s: float = WARM_UP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Finished workflows a second by how many run at a time. The highest is load 1.0."""

    finished_per_s: dict[int, float]
    replica_cpu_ratio: dict[int, float]

    @property
    def rate(self) -> float:
        return max(self.finished_per_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """The same fleet at load 1.0 and at a multiple of it, and the baseline at that multiple."""

    normal: Figures
    overloaded: Figures
    baseline: Figures | None

    @property
    def goodput_ratio(self) -> float:
        """Goodput under overload over that at load 1.0."""
        return self.overloaded.goodput / max(self.normal.goodput, 1e-9)


class Way(StrEnum):
    """How half of the capacity goes: a node takes no more calls, or every engine takes twice as long."""

    CORDONED = "cordoned"
    SLOWED = "slowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something done to the fleet, `at_s` from the start of the run."""

    at_s: float
    action: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halved:
    """Shares and rates before, while capacity is halved, in the first seconds after it and later.

    `recovery_s` after the restoration: from then on arrivals do as well as before it, on the whole.
    """

    way: Way
    figures: Figures
    succeeded_before: float
    succeeded_halved: float
    succeeded_after: float
    succeeded_later: float
    goodput_before: float
    goodput_halved: float
    goodput_after: float
    goodput_later: float
    recovery_s: float
    goodput_by_second: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """`calls` are what callers wanted, tries what they sent, attempts what engines were asked."""

    calls: int
    succeeded_ratio: float
    tries_per_call: float
    attempts_per_request: float
    attempts_per_call: float
    errors: dict[str, int]
    next_try_admitted_ratio: float | None
    replica_cpu_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """One run of the light tenants: queue waits in ms, shares, and what the heavy one got through."""

    p99: float
    lowest_p99: float
    succeeded_ratio: float
    lowest_succeeded_ratio: float
    heavy_per_s: float
    cpu: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Waits of light tenants beside a heavy one; finished calls a second when all are backlogged."""

    others_wait_ms_p99_alone: float
    others_wait_ms_p99_crowded: float
    others_succeeded_alone: float
    others_succeeded_crowded: float
    lowest_wait_ms_p99_crowded: float
    lowest_succeeded_crowded: float
    heavy_per_s: float
    backlog_finished: dict[str, float]
    replica_cpu_ratio: float
    callers_cpu_ratio: float

    @property
    def wait_ratio(self) -> float:
        """The others' p99 wait beside the heavy tenant over that alone."""
        crowded = max(self.others_wait_ms_p99_crowded, WAIT_FLOOR_MS)
        return crowded / max(self.others_wait_ms_p99_alone, WAIT_FLOOR_MS)

    @property
    def jain_index(self) -> float:
        """Over the backlogged tenants of equal weight."""
        return jain([self.backlog_finished[tenant] for tenant in EQUALS])


async def calibrate(settings: Settings) -> Calibration:
    """Scenario a: workflows without a deadline, a fixed number of them at a time."""
    finished: dict[int, float] = {}
    cpus: dict[int, float] = {}
    async with running(TENANTS) as cluster:
        for slots in CALIBRATION_SLOTS:
            player = Player(cluster, seed=settings.seed + slots)
            cpu = Cpu.of(cluster)
            try:
                ended = await player.closed_loop(
                    untimed_plans(settings, settings.seed + slots),
                    slots=slots,
                    seconds=settings.warm_up_s + settings.seconds,
                )
            finally:
                await player.close()
            done = sum(not end.has_died and end.ended_s >= settings.warm_up_s for end in ended)
            finished[slots] = done / settings.seconds
            cpus[slots] = cpu.ratios()[0]
    return Calibration(finished_per_s=finished, replica_cpu_ratio=cpus)


async def overload(settings: Settings) -> Overload:
    """Scenario b: load 1.0, then a multiple of it, then the baseline at that multiple."""
    async with running(TENANTS) as cluster:
        normal = await open_run(cluster, settings, name="load 1.0", load=1.0)
        name = f"load {settings.overload:g}"
        overloaded = await open_run(cluster, settings, name=name, load=settings.overload)
    baseline = None
    if settings.has_baseline:
        async with running(TENANTS, admission=BASELINE_ADMISSION) as cluster:
            name = f"sticky FCFS {settings.overload:g}"
            baseline = await open_run(cluster, settings, name=name, load=settings.overload)
    return Overload(normal=normal, overloaded=overloaded, baseline=baseline)


def untimed_plans(settings: Settings, seed: int) -> Iterator[Plan]:
    """Workflows without end whose deadlines play no part."""
    found = stream(seed=seed, times=engine_times(), deadlines=settings.deadlines)
    return (replace(plan, deadline_s=UNTIMED_S) for plan in found)


async def open_run(cluster: LabCluster, settings: Settings, *, name: str, load: float) -> Figures:
    """One open-loop run at a multiple of load 1.0."""
    until_s = settings.warm_up_s + settings.seconds
    run = await played(
        cluster, settings, load=load, counts_from_s=settings.warm_up_s, counts_until_s=until_s
    )
    return figures(name, run, times=engine_times())


async def played(
    cluster: LabCluster,
    settings: Settings,
    *,
    load: float,
    counts_from_s: float,
    counts_until_s: float,
    events: tuple[Event, ...] = (),
) -> Run:
    """Play arrivals at a multiple of load 1.0, with what happens to the fleet meanwhile."""
    offered = settings.rate * load
    planned = plans(
        seed=settings.seed,
        times=engine_times(),
        rate=offered,
        until_s=counts_until_s + COOL_DOWN_S,
        deadlines=settings.deadlines,
    )
    since = await database_now(cluster)
    player = Player(cluster, seed=settings.seed)
    cpu = Cpu.of(cluster)
    happening = asyncio.create_task(_happen(events))
    try:
        ended = await player.open_loop(planned, counts_until_s=counts_until_s)
        cpu_ratios = cpu.ratios()
        await happening
    finally:
        happening.cancel()
        await player.close()
    return Run(
        offered=offered,
        counts_from_s=counts_from_s,
        counts_until_s=counts_until_s,
        ended=ended,
        calls=await calls_since(cluster, since),
        cpu=cpu_ratios,
        lateness_s_max=player.lateness_s_max,
    )


async def _happen(events: tuple[Event, ...]) -> None:
    started_s = time.monotonic()
    for event in events:
        await asyncio.sleep(max(0.0, event.at_s - (time.monotonic() - started_s)))
        await event.action()


async def halved(settings: Settings) -> tuple[Halved, ...]:
    """Scenario c: half of the capacity away and back, once seen by the control plane and once not."""
    found = []
    for way in Way:
        async with running(TENANTS) as cluster:
            found.append(await _halved(cluster, settings, way))
    return tuple(found)


async def _halved(cluster: LabCluster, settings: Settings, way: Way) -> Halved:
    begins_s = settings.warm_up_s + BEFORE_S
    ends_s = begins_s + settings.seconds
    until_s = ends_s + AFTER_S
    match way:
        case Way.CORDONED:
            halve = partial(cluster.cordon, NODES[0], is_cordoned=True)
            restore = partial(cluster.cordon, NODES[0], is_cordoned=False)
        case Way.SLOWED:
            halve = partial(cluster.fault, slow_factor=2.0)
            restore = partial(cluster.fault, slow_factor=1.0)
    run = await played(
        cluster,
        settings,
        load=HALVED_LOAD,
        counts_from_s=settings.warm_up_s,
        counts_until_s=until_s,
        events=(Event(at_s=begins_s, action=halve), Event(at_s=ends_s, action=restore)),
    )

    def arrived(since_s: float, until_s: float) -> list[Ended]:
        return [end for end in run.ended if since_s <= end.plan.arrival_s < until_s]

    before = ratio(arrived(settings.warm_up_s, begins_s - TYPICAL_S))

    well_s = (
        float(after_s)
        for after_s in range(int(AFTER_S - WINDOW_S) + 1)
        if ratio(arrived(ends_s + after_s, until_s)) >= FULL_RATIO * before
    )
    return Halved(
        way=way,
        figures=figures(f"halved, {way}", run, times=engine_times()),
        succeeded_before=before,
        succeeded_halved=ratio(arrived(begins_s, ends_s)),
        succeeded_after=ratio(arrived(ends_s, ends_s + RECOVERY_S)),
        succeeded_later=ratio(arrived(ends_s + RECOVERY_S, until_s)),
        goodput_before=run.goodput(settings.warm_up_s, begins_s),
        goodput_halved=run.goodput(begins_s, ends_s),
        goodput_after=run.goodput(ends_s, ends_s + RECOVERY_S),
        goodput_later=run.goodput(ends_s + RECOVERY_S, until_s),
        recovery_s=next(well_s, AFTER_S),
        goodput_by_second=tuple(
            int(run.goodput(float(second), second + 1.0)) for second in range(int(until_s))
        ),
    )


async def failing(settings: Settings) -> Failing:
    """Scenario d: after a while of health, every engine fails half of its calls."""
    async with running(TENANTS) as cluster:
        return await failing_run(cluster, settings)


async def failing_run(cluster: LabCluster, settings: Settings) -> Failing:
    shape = Shape(prefix_tokens=0, prompt_tokens=32, answer_tokens=4)
    player = CallPlayer(cluster, seed=settings.seed)
    cpu = Cpu.of(cluster)
    try:
        await player.open_loop(LOW.tenant, shape, rate=FAILING_RATE, seconds=HEALTHY_S)
        since = await database_now(cluster)
        await cluster.fault(error_rate=FAILING_ERROR_RATE)
        done = await player.open_loop(
            LOW.tenant, shape, rate=FAILING_RATE, seconds=settings.seconds
        )
    finally:
        await player.close()
        await cluster.fault()
    rows = [row for row in await calls_since(cluster, since) if row.attempts]
    attempts = sum(row.attempts for row in rows)
    tries = [call.reply.tries for call in done]
    again = after_refusals(tries)
    return Failing(
        calls=len(done),
        succeeded_ratio=sum(call.reply.is_ok for call in done) / len(done),
        tries_per_call=sum(map(len, tries)) / len(done),
        attempts_per_request=attempts / max(1, len(rows)),
        attempts_per_call=attempts / len(done),
        errors=counts(call.reply.error for call in done if not call.reply.is_ok),
        next_try_admitted_ratio=sum(again) / len(again) if again else None,
        replica_cpu_ratio=cpu.ratios()[0],
    )


async def unfair(settings: Settings) -> Fairness:
    """Scenario e: one tenant at 100 times the others, then all of them backlogged at once."""
    tenants = dict.fromkeys((*EQUALS, HEAVY), "silver") | {LOWEST: "bronze"}
    async with running(tenants) as cluster:
        alone = await _waits(cluster, settings, heavy_ratio=0.0)
        crowded = await _waits(cluster, settings, heavy_ratio=HEAVY_RATIO)
        since = await database_now(cluster)
        player = CallPlayer(cluster, seed=settings.seed)
        callers = dict(zip(EQUALS, BACKLOG_CALLERS, strict=True)) | {LOWEST: LOWEST_CALLERS}
        cpu = Cpu.of(cluster)
        try:
            finished = await player.backlog(
                callers, FAIR_SHAPE, seconds=settings.seconds, counts_from_s=settings.warm_up_s
            )
        finally:
            await player.close()
        cpu_ratios = cpu.ratios()
        await calls_since(cluster, since)
    return Fairness(
        others_wait_ms_p99_alone=alone.p99,
        others_wait_ms_p99_crowded=crowded.p99,
        others_succeeded_alone=alone.succeeded_ratio,
        others_succeeded_crowded=crowded.succeeded_ratio,
        lowest_wait_ms_p99_crowded=crowded.lowest_p99,
        lowest_succeeded_crowded=crowded.lowest_succeeded_ratio,
        heavy_per_s=crowded.heavy_per_s,
        backlog_finished={tenant: count / settings.seconds for tenant, count in finished.items()},
        replica_cpu_ratio=max(crowded.cpu[0], cpu_ratios[0]),
        callers_cpu_ratio=max(crowded.cpu[1], cpu_ratios[1]),
    )


async def _waits(cluster: LabCluster, settings: Settings, *, heavy_ratio: float) -> Waits:
    """Queue waits of the light tenants, with a heavy one at a multiple of each of them."""
    player = CallPlayer(cluster, seed=settings.seed)
    since = await database_now(cluster)
    cpu = Cpu.of(cluster)
    rates = dict.fromkeys((*EQUALS, LOWEST), LIGHT_RATE)
    if heavy_ratio:
        rates[HEAVY] = LIGHT_RATE * heavy_ratio
    until_s = time.monotonic() + settings.seconds
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {
                tenant: group.create_task(
                    player.open_loop(tenant, FAIR_SHAPE, rate=rate, seconds=settings.seconds)
                )
                for tenant, rate in rates.items()
            }
    finally:
        await player.close()
    cpu_ratios = cpu.ratios()
    calls = {tenant: task.result() for tenant, task in tasks.items()}
    rows = await calls_since(cluster, since)
    others = [call for tenant in EQUALS for call in calls[tenant]]
    heavy = calls.get(HEAVY, [])
    return Waits(
        p99=quantile([row.queue_ms for row in rows if row.tenant in EQUALS], 0.99),
        lowest_p99=quantile([row.queue_ms for row in rows if row.tenant == LOWEST], 0.99),
        succeeded_ratio=succeeded(others),
        lowest_succeeded_ratio=succeeded(calls[LOWEST]),
        heavy_per_s=sum(call.reply.is_ok and call.ended_s < until_s for call in heavy)
        / settings.seconds,
        cpu=cpu_ratios,
    )
