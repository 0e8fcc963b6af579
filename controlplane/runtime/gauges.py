"""Gauges that ask their owners when they are read: fleet, queue, journal."""

from collections.abc import Callable

from controlplane.admission.load import PoolLoad
from controlplane.domain.fleet import EngineRow
from controlplane.runtime.admit import Gate
from controlplane.store.journal import Journal
from controlplane.telemetry.metrics import Labels, Metrics


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
    metrics.pool_price.watch(per_pool(lambda load: load.price_micro_usd_per_s / 1e6))
    metrics.pool_appointments.watch(per_pool(lambda load: len(load.appointments)))
    metrics.pool_level.watch(per_pool(lambda load: load.levels.cursor))
    metrics.journal_depth.watch(lambda: {(): float(journal.entries_waiting)})


def _labels(row: EngineRow) -> Labels:
    return (row.engine_id, row.model, row.region)
