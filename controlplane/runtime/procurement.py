"""The demand of the last days as work per hour, in GPUs of one type: what a purchase is planned from. Pure.

It takes the mix of classes as the same in all hours, so that one number says how much more a GPU of one
type does than one of another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from controlplane.domain.catalog import Catalog, Role
from controlplane.domain.ids import GpuTypeName, SloClassName
from controlplane.runtime.demand import SLOT_S, Sizes, Slot
from controlplane.runtime.planner_problem import TENSOR_PARALLEL_SIZES, by_roofline
from controlplane.scheduler.perf_model import MS_PER_S
from controlplane.scheduler.planner.loads import options_of
from controlplane.scheduler.planner.problem import Demand, PoolKind, Problem
from policies.evaluate import Policy

# Two weeks: more hours than that are more than a purchase programme takes.
HOURS_MAX: Final = 14 * 24
SECONDS_PER_HOUR: Final = 3_600
CLASSES_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandCurve:
    """Work of each hour from `started_at` on, in GPUs of type `unit` kept busy.

    An hour counts as its busiest quarter, since engines must carry that. `work_per_gpu` is what one GPU
    of each type does, in the same unit; types that can not do all of the work in time are left out, and
    so are `classes_left_out` classes that no type can.
    """

    started_at: datetime
    unit: GpuTypeName
    work: tuple[float, ...]
    work_per_gpu: Mapping[GpuTypeName, float]
    gpus_per_node: int
    classes: int
    classes_left_out: int


@dataclass(slots=True)
class _Class:
    needs: Sizes
    workflows: float


def demand_curve(
    slots: Iterable[Slot],
    catalog: Catalog,
    policy: Policy,
    speeds: Mapping[GpuTypeName, float],
) -> DemandCurve | None:
    """The curve of these slots; None when they hold no work that any GPU type could do in time.

    `speeds` says how many times faster than its hardware a type of simulated engines runs.
    """
    per_slot: dict[int, dict[str, float]] = {}
    classes: dict[str, _Class] = {}
    keys = {}
    for slot in slots:
        class_id = slot.key.class_id
        keys[class_id] = slot
        number = int(slot.started_at.timestamp()) // SLOT_S
        per_slot.setdefault(number, {})[class_id] = slot.workflows
        known = classes.get(class_id)
        classes[class_id] = _mixed(known, slot)
    pools = _pools(catalog, speeds)
    seconds: dict[str, dict[GpuTypeName, float]] = {}
    for class_id, entry in sorted(classes.items())[:CLASSES_MAX]:
        demand = _demand(keys[class_id], entry, catalog, policy)
        if demand is not None:
            seconds[class_id] = _gpu_seconds(demand, pools)
    weights = {
        class_id: classes[class_id].workflows * min(found.values())
        for class_id, found in seconds.items()
        if found and classes[class_id].workflows > 0.0
    }
    if not weights:
        return None
    unit = max(
        catalog.gpu_types,
        key=lambda gpu: (
            sum(weight for class_id, weight in weights.items() if gpu in seconds[class_id]),
            -catalog.gpu_types[gpu].price_micro_usd_per_hour,
        ),
    )
    kept = [class_id for class_id in weights if unit in seconds[class_id]]
    total = sum(classes[one].workflows * seconds[one][unit] for one in kept)
    if total <= 0.0:
        return None
    work_per_gpu = {}
    for gpu in catalog.gpu_types:
        if all(gpu in seconds[one] for one in kept):
            here = sum(classes[one].workflows * seconds[one][gpu] for one in kept)
            if here > 0.0:
                work_per_gpu[gpu] = total / here
    quarters = SECONDS_PER_HOUR // SLOT_S
    last = max(per_slot) // quarters
    first = max(min(per_slot) // quarters, last - HOURS_MAX + 1)
    work = []
    for hour in range(first, last + 1):
        busiest = 0.0
        for number in range(hour * quarters, (hour + 1) * quarters):
            came = per_slot.get(number, {})
            needed = sum(came.get(one, 0.0) * seconds[one][unit] for one in kept)
            busiest = max(busiest, needed / SLOT_S)
        work.append(busiest)
    return DemandCurve(
        started_at=datetime.fromtimestamp(first * SECONDS_PER_HOUR, UTC),
        unit=unit,
        work=tuple(work),
        work_per_gpu=work_per_gpu,
        gpus_per_node=max((node.gpus for node in catalog.nodes.values()), default=8),
        classes=len(kept),
        classes_left_out=len(classes) - len(kept),
    )


def _mixed(known: _Class | None, slot: Slot) -> _Class:
    """Sizes as means over workflows."""
    if known is None or known.workflows + slot.workflows <= 0.0:
        return _Class(needs=slot.needs, workflows=slot.workflows)
    part = slot.workflows / (known.workflows + slot.workflows)

    def mean(name: str) -> float:
        before: float = getattr(known.needs, name)
        now: float = getattr(slot.needs, name)
        return before + part * (now - before)

    return _Class(
        needs=Sizes(
            steps=mean("steps"),
            uncached_tokens=mean("uncached_tokens"),
            context_tokens=mean("context_tokens"),
            completion_tokens=mean("completion_tokens"),
            gap_s=mean("gap_s"),
            deadline_s=mean("deadline_s"),
        ),
        workflows=known.workflows + slot.workflows,
    )


def _pools(catalog: Catalog, speeds: Mapping[GpuTypeName, float]) -> tuple[PoolKind, ...]:
    # A type that runs nothing here is compared with those that do, at their speed.
    usual = max(speeds.values(), default=1.0)
    found = (
        by_roofline(catalog, (model, gpu, gpus, Role.BOTH), speeds.get(gpu, usual))
        for model in catalog.models
        for gpu in catalog.gpu_types
        for gpus in TENSOR_PARALLEL_SIZES
    )
    return tuple(kind for kind in found if kind is not None)


def _demand(slot: Slot, entry: _Class, catalog: Catalog, policy: Policy) -> Demand | None:
    rights = policy.bundle.tenant_classes.classes.get(slot.key.tenant_class)
    slo_class = catalog.slo_classes.get(SloClassName(slot.slo_class))
    if rights is None or slo_class is None or slot.key.model not in catalog.models:
        return None
    return Demand(
        class_id=slot.key.class_id,
        model=slot.key.model,
        arrivals_per_s_now=0.0,
        arrivals_per_s_forecast=0.0,
        steps=entry.needs.steps,
        uncached_tokens=entry.needs.uncached_tokens,
        context_tokens=entry.needs.context_tokens,
        completion_tokens=entry.needs.completion_tokens,
        gap_s=entry.needs.gap_s,
        deadline_s=entry.needs.deadline_s,
        value_micro_usd=float(slo_class.value_micro_usd),
    )


def _gpu_seconds(demand: Demand, pools: tuple[PoolKind, ...]) -> dict[GpuTypeName, float]:
    """GPU seconds of one workflow on each type that finishes it in time, at the size that takes least."""
    problem = Problem(now_s=0.0, demands=(demand,), pools=pools, shapes=(), nodes=())
    options = options_of(problem, demand)
    found: dict[GpuTypeName, float] = {}
    for way in () if options.is_late else options.whole:
        pool = pools[way.pool]
        seconds = pool.gpus * way.load.gpu_ms / MS_PER_S
        found[pool.gpu_type] = min(seconds, found.get(pool.gpu_type, seconds))
    return found
