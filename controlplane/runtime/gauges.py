"""Gauges that ask their owners when they are read: fleet and its health, queue, retry budgets, journal."""

from collections.abc import Callable
from typing import Final

from controlplane.admission.load import PoolLoad
from controlplane.domain.fleet import EngineRow
from controlplane.domain.money import usd
from controlplane.domain.pool import BreakerState
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime.admit import Gate
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.health import EngineHealth
from controlplane.store.journal import Journal
from controlplane.telemetry.metrics import Labels, Metrics
from dataplane.protocol.messages import EngineFacts, GpuTelemetry

MS_PER_S: Final = 1_000.0


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
    watch_health(metrics, gate.fleet, gate.retries)
    watch_machines(metrics, gate.fleet)


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


# As dashboards show them: the higher, the less gets through.
_STATES: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def _labels(row: EngineRow) -> Labels:
    return (row.engine_id, row.model, row.region)
