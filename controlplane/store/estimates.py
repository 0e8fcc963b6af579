"""What replicas have learned about sizes, added up: histograms whose old weights fade as others come."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store import tables
from controlplane.store.session import transaction

# Rows of a tenant's traffic not seen for so long say nothing of what it will send.
KEPT_DAYS_MAX = 30
# Commits of others may become visible a little after rows that are newer by the clock of their start.
OVERLAP_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """A histogram of one quantity at one level; `scope` and `tenant_id` are empty at wider levels.

    Weights are per bucket, the newest observation's is 1. `observations` have been added in all.
    """

    model: str
    scope: str
    tenant_id: str
    quantity: str
    weights: tuple[float, ...]
    observations: int


# As many observations as are added let those before fade; a histogram of another shape is replaced.
_ADD = text("""
INSERT INTO size_estimates AS known
       (model, scope, tenant_id, quantity, weights, observations, updated_at)
VALUES (:model, :scope, :tenant_id, :quantity, :weights, :observations, clock_timestamp())
ON CONFLICT (model, scope, tenant_id, quantity) DO UPDATE SET
    weights = CASE
        WHEN cardinality(known.weights) <> cardinality(excluded.weights) THEN excluded.weights
        ELSE (
            SELECT array_agg(was * power(0.5, excluded.observations / CAST(:half_life AS float8))
                             + added ORDER BY at)
            FROM unnest(known.weights, excluded.weights) WITH ORDINALITY AS both_of (was, added, at)
        )
    END,
    observations = known.observations + excluded.observations,
    updated_at = clock_timestamp()
""")

_PRUNE = text("DELETE FROM size_estimates WHERE updated_at < now() - make_interval(days => :days)")


async def add(engine: AsyncEngine, records: Sequence[SizeRecord], half_life: int) -> None:
    """Add what one replica has seen. `half_life` is in observations. Raises StateUnavailable.

    Repeated after a commit whose answer was lost, it counts twice: a little too much of the latest.
    """
    if not records:
        return
    # In one order, so that two replicas never wait in a ring.
    ordered = sorted(
        records, key=lambda record: (record.model, record.scope, record.tenant_id, record.quantity)
    )
    async with transaction(engine) as connection:
        await connection.execute(
            _ADD,
            [
                {
                    "model": record.model,
                    "scope": record.scope,
                    "tenant_id": record.tenant_id,
                    "quantity": record.quantity,
                    "weights": list(record.weights),
                    "observations": record.observations,
                    "half_life": half_life,
                }
                for record in ordered
            ],
        )


async def changed(
    engine: AsyncEngine, since: datetime | None, records_max: int
) -> tuple[list[SizeRecord], datetime]:
    """What was added to since, oldest change first, and the instant to ask from next.

    None asks for everything. Rows of one transaction have instants of their own, so pages of two rows
    and more get on. After a page that is not full, the next begins OVERLAP_S before now, so
    that commits in flight are not missed: taking a row twice changes nothing. Raises
    StateUnavailable.
    """
    table = tables.size_estimates
    statement = select(table).order_by(table.c.updated_at).limit(records_max)
    if since is not None:
        statement = statement.where(table.c.updated_at >= since)
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
        now = (
            await connection.execute(
                text("SELECT now() - make_interval(secs => :s)"), {"s": OVERLAP_S}
            )
        ).scalar_one()
    records = [
        SizeRecord(
            model=row.model,
            scope=row.scope,
            tenant_id=row.tenant_id,
            quantity=row.quantity,
            weights=tuple(row.weights),
            observations=row.observations,
        )
        for row in rows
    ]
    if len(rows) == records_max:
        return records, rows[-1].updated_at
    return records, now


async def prune(engine: AsyncEngine) -> int:
    """Forget what nobody has added to for KEPT_DAYS_MAX; how many rows. Raises StateUnavailable."""
    async with transaction(engine) as connection:
        return (await connection.execute(_PRUNE, {"days": KEPT_DAYS_MAX})).rowcount
