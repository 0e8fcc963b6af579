"""Gauges that ask their owners when they are read: fleet and its health, queue, retry budgets, journal."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from controlplane.admission.load import PoolLoad
from controlplane.domain.catalog import Catalog
from controlplane.domain.decision import Axis, Explanation
from controlplane.domain.fleet import EngineRow
from controlplane.domain.money import usd
from controlplane.domain.pool import BreakerState
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime.admit import Gate
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.fleet_state import EngineEntry, FleetState
from controlplane.runtime.health import EngineHealth
from controlplane.scheduler.explain import candidate_name
from controlplane.scheduler.perf_model import step_terms
from controlplane.store.journal import Journal
from controlplane.telemetry.metrics import Labels, Metrics
from dataplane.protocol.messages import EngineFacts, GpuTelemetry

MS_PER_S: Final = 1_000.0
PERMILLE: Final = 1_000.0
# What one more explained placement counts for the mean dollars of an axis.
AXIS_GAIN: Final = 0.1
# Prompt tokens that an engine computes in one step at most: vLLM's `max_num_batched_tokens` for serving.
PREFILL_TOKENS_PER_STEP_MAX: Final = 8_192


def watch(metrics: Metrics, gate: Gate, journal: Journal) -> None:
    """Let the gauges of `metrics` read the live state of one replica."""

    def per_engine(field: str) -> dict[Labels, float]:
        return {_labels(row): float(getattr(row, field)) for row in gate.live_rows()}

    metrics.seats_lent.watch(lambda: per_engine("seats_lent"))
    metrics.seats_taken.watch(lambda: per_engine("seats_taken"))
    metrics.kv_tokens_lent.watch(lambda: per_engine("kv_tokens_lent"))
    metrics.kv_tokens_taken.watch(lambda: per_engine("kv_tokens_taken"))
    metrics.queue_depth.watch(
        lambda: {(model,): float(waiting) for model, waiting in gate.pump.depths().items()}
    )

    def per_pool(read: Callable[[PoolLoad], float]) -> Callable[[], dict[Labels, float]]:
        return lambda: {(model,): float(read(load)) for model, load in gate.loads.all()}

    metrics.pool_seats_promised.watch(per_pool(lambda load: load.commitments.seats()))
    metrics.pool_committed_ratio.watch(per_pool(lambda load: load.committed_ratio))
    metrics.pool_stretch_ratio.watch(per_pool(lambda load: load.stretch_ratio))
    metrics.pool_price.watch(per_pool(lambda load: usd(load.price_micro_usd_per_s)))
    metrics.pool_load_ratio.watch(per_pool(lambda load: load.load_ratio))
    metrics.pool_appointments.watch(per_pool(lambda load: len(load.appointments)))
    metrics.pool_level.watch(per_pool(lambda load: load.levels.cursor))
    metrics.journal_depth.watch(lambda: {(): float(journal.entries_waiting)})
    metrics.reserved.watch(
        lambda: {
            (): usd(sum(ticket.reserved_micro_usd for ticket in tuple(gate.in_flight.values())))
        }
    )
    gate.pump.passed = lambda took_ms: metrics.dispatch_time.observe(took_ms / MS_PER_S)
    joint = gate.desk.joint
    metrics.batches.watch(
        lambda: {
            ("better",): float(joint.better),
            ("same",): float(joint.passes - joint.better),
        }
    )
    axes = AxisMeans(metrics)
    gate.decisions.on_explained = axes.explained
    metrics.axis_cost.watch(axes.usd)
    watch_health(metrics, gate.fleet, gate.retries)
    watch_machines(metrics, gate.fleet)
    watch_fleet(metrics, gate.fleet)


class AxisMeans:
    """What each axis has in the cost of placements, over the latest that were explained."""

    def __init__(self, metrics: Metrics) -> None:
        self._objections = metrics.axis_objections
        self._means: dict[Axis, float] = {}
        for axis in Axis:
            # Nothing has objected yet: a rate needs to see that.
            self._objections.add((axis,), 0)

    def explained(self, explanation: Explanation) -> None:
        for candidate in explanation.candidates:
            if candidate_name(candidate) == explanation.winner:
                for view in candidate.axes:
                    before = self._means.get(view.axis, view.cost_micro_usd)
                    self._means[view.axis] = before + AXIS_GAIN * (view.cost_micro_usd - before)
            elif not candidate.is_feasible:
                first = next((view.axis for view in candidate.axes if view.objection), None)
                if first is not None:
                    self._objections.add((first,))

    def usd(self) -> dict[Labels, float]:
        return {(axis,): usd(mean) for axis, mean in tuple(self._means.items())}


def watch_health(
    metrics: Metrics,
    fleet: FleetState,
    retries: RetryBudgets,
    clock_ms: Callable[[], float] = monotonic_ms,
) -> None:
    """Breakers, ramps, restraint and what is left of the retry budgets."""

    def per_engine(read: Callable[[EngineHealth], float]) -> Callable[[], dict[Labels, float]]:
        return lambda: {_labels(entry.row): float(read(entry.health)) for entry in fleet.entries()}

    metrics.engine_breaker_state.watch(per_engine(lambda engine: _STATES[engine.breaker.shown]))
    metrics.engine_ramp_ratio.watch(
        per_engine(lambda engine: fleet.engine_ramp_ratio(engine.row, clock_ms()))
    )
    metrics.engine_seats_withheld.watch(per_engine(lambda engine: engine.seats_withheld))
    metrics.engine_attempts_expected.watch(per_engine(lambda engine: engine.row.attempts_expected))
    metrics.pool_breaker_state.watch(
        lambda: {
            (region.model, region.region): float(_STATES[region.breaker.shown])
            for region in fleet.regions()
        }
    )
    metrics.pool_ramp_ratio.watch(
        lambda: {
            (model,): fleet.pool_ramp_ratio(model, clock_ms()) for model in fleet.catalog.models
        }
    )
    metrics.pool_retries_left.watch(
        lambda: {
            (model,): float(left) for model, left in retries.pools_left(int(clock_ms())).items()
        }
    )
    metrics.tenants_without_retries.watch(
        lambda: {(): float(retries.tenants_spent(int(clock_ms())))}
    )


def watch_machines(metrics: Metrics, fleet: FleetState) -> None:
    """What agents tell of their engines and GPUs."""

    def per_engine(read: Callable[[EngineFacts], float]) -> Callable[[], dict[Labels, float]]:
        return lambda: {_labels(entry.row): float(read(entry.facts)) for entry in fleet.entries()}

    def per_gpu(read: Callable[[GpuTelemetry], float]) -> Callable[[], dict[Labels, float]]:
        return lambda: {
            (node.id, str(gpu.index)): float(read(gpu))
            for node in fleet.nodes.values()
            for gpu in node.gpus
        }

    metrics.engine_cordoned.watch(per_engine(lambda facts: bool(facts.cordon)))
    metrics.engine_sleep_level.watch(per_engine(lambda facts: facts.sleep_level))
    metrics.engine_load_seconds.watch(per_engine(lambda facts: facts.load_ms / MS_PER_S))
    metrics.gpu_memory_used.watch(per_gpu(lambda gpu: gpu.memory_used_bytes))
    metrics.gpu_memory_total.watch(per_gpu(lambda gpu: gpu.memory_total_bytes))
    metrics.gpu_utilisation_ratio.watch(per_gpu(lambda gpu: gpu.utilisation_ratio))
    metrics.gpu_temperature.watch(per_gpu(lambda gpu: gpu.temperature_c))
    metrics.gpu_ecc_uncorrected.watch(per_gpu(lambda gpu: gpu.ecc_uncorrected))
    metrics.gpu_at_fault.watch(per_gpu(lambda gpu: bool(gpu.fault)))


def watch_fleet(
    metrics: Metrics, fleet: FleetState, clock_ms: Callable[[], float] = monotonic_ms
) -> None:
    """Engines and nodes as this replica sees them, with the calls of all replicas."""

    def per_engine(read: Callable[[EngineEntry], float]) -> Callable[[], dict[Labels, float]]:
        return lambda: {_labels(entry.row): float(read(entry)) for entry in fleet.entries()}

    metrics.engine_info.watch(
        lambda: {
            (row.engine_id, row.model, row.region, row.node_id, row.gpu_type, row.role): 1.0
            for row in (entry.row for entry in fleet.entries())
        }
    )
    metrics.engine_accepting.watch(per_engine(lambda entry: entry.row.is_accepting))
    metrics.engine_started.watch(per_engine(lambda entry: entry.facts.started_ms / MS_PER_S))
    metrics.engine_seats.watch(per_engine(lambda entry: entry.row.seats_capacity))
    metrics.engine_running.watch(per_engine(lambda entry: entry.row.running))
    metrics.engine_waiting.watch(per_engine(lambda entry: entry.row.waiting))
    metrics.engine_kv_capacity.watch(per_engine(lambda entry: entry.row.kv_tokens_capacity))
    metrics.engine_kv_used.watch(per_engine(lambda entry: entry.row.kv_tokens_used))
    metrics.hbm.watch(lambda: hbm_by_use(fleet))
    metrics.engine_compute.watch(per_engine(lambda entry: compute_ratio(fleet.catalog, entry)))
    metrics.engines.watch(lambda: engines_by_state(fleet))
    metrics.nodes.watch(lambda: nodes_by_state(fleet))
    metrics.pool_saturation.watch(
        lambda: {
            (model,): fleet.pool(model, clock_ms()).saturation_permille / PERMILLE
            for model in fleet.catalog.models
        }
    )
    metrics.pool_accepting.watch(
        lambda: {
            (model,): float(fleet.pool(model, clock_ms()).engines_accepting)
            for model in fleet.catalog.models
        }
    )
    metrics.slo_target.watch(
        lambda: {
            (slo.name, target): ms / MS_PER_S
            for slo in fleet.catalog.slo_classes.values()
            for target, ms in (
                ("ttft", slo.ttft_ms_max),
                ("tpot", slo.tpot_ms_max),
                ("e2e", slo.e2e_ms_max),
            )
        }
    )


def hbm_by_use(fleet: FleetState) -> dict[Labels, float]:
    """Memory of all engines' GPUs, by model, GPU type, region, and what it is for."""
    found: Counter[Labels] = Counter()
    for entry in fleet.entries():
        row = entry.row
        for kind, size in hbm_bytes(fleet.catalog, entry).items():
            found[row.model, row.gpu_type, row.region, kind] += size
    return {labels: float(size) for labels, size in found.items()}


def hbm_bytes(catalog: Catalog, entry: EngineEntry) -> dict[str, int]:
    """What the memory of an engine's GPUs is for; empty when its model or GPU type is not declared."""
    row = entry.row
    model, gpu = catalog.models.get(row.model), catalog.gpu_types.get(row.gpu_type)
    if model is None or gpu is None:
        return {}
    capacity, used = row.kv_tokens_capacity, min(row.kv_tokens_used, row.kv_tokens_capacity)
    kinds = {
        "weights": model.weights_bytes,
        "kv_used": used * model.kv_bytes_per_token,
        "kv_free": (capacity - used) * model.kv_bytes_per_token,
    }
    return {**kinds, "other": max(0, entry.facts.gpus * gpu.hbm_bytes - sum(kinds.values()))}


def compute_ratio(catalog: Catalog, entry: EngineEntry) -> float:
    """Share of arithmetic in an engine's next step: its batch, and the prompts that this replica sent.

    By the terms of `perf_model.step_terms` on perfect hardware, 0..1; 0 for an engine without work.
    """
    row = entry.row
    model, gpu = catalog.models.get(row.model), catalog.gpu_types.get(row.gpu_type)
    prompts = min(row.prefill_tokens_pending, PREFILL_TOKENS_PER_STEP_MAX)
    if model is None or gpu is None or not (row.running or prompts):
        return 0.0
    terms = step_terms(
        model,
        gpu,
        entry.facts.gpus,
        sequences=row.running,
        kv_tokens=row.kv_tokens_used,
        prefill_tokens=prompts,
        attention_pairs=0.5 * prompts * prompts,
    )
    return terms.flop_ms / (terms.flop_ms + terms.weights_ms + terms.experts_ms + terms.kv_ms)


def engines_by_state(fleet: FleetState) -> dict[Labels, float]:
    """Engines of the fleet; one whose node is silent says nothing of itself, and cordons come before."""
    counted: Counter[Labels] = Counter()
    for node in tuple(fleet.nodes.values()):
        for entry in tuple(node.engines.values()):
            row = entry.row
            state = "cordoned" if entry.facts.cordon else str(entry.facts.state)
            if not node.heard_ms:
                state = "silent"
            counted[row.model, row.gpu_type, row.role, row.region, state] += 1
    return {labels: float(count) for labels, count in counted.items()}


def nodes_by_state(fleet: FleetState) -> dict[Labels, float]:
    """Nodes of the catalogue by whether their agents are heard."""
    counted: Counter[Labels] = Counter()
    for declared in fleet.catalog.nodes.values():
        node = fleet.nodes.get(declared.id)
        state = "unknown" if node is None else "heard" if node.heard_ms else "silent"
        counted[declared.gpu_type, declared.region, state] += 1
    return {labels: float(count) for labels, count in counted.items()}


# As dashboards show them: the higher, the less gets through.
_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def _labels(row: EngineRow) -> Labels:
    return (row.engine_id, row.model, row.region)
