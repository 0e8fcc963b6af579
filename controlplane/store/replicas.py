"""Which control-plane processes live. Who is not seen for long is reaped."""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.ids import ReplicaId
from controlplane.store.session import transaction

_END = text("UPDATE replicas SET ended_at = clock_timestamp() WHERE id = :id AND ended_at IS NULL")

# Accounts first, in the order of their ids, as everyone does who moves money.
_LOCK = text(
    """
    SELECT id FROM budgets
    WHERE id IN (SELECT budget_id FROM budget_leases WHERE replica_id = :id)
    ORDER BY id FOR NO KEY UPDATE
    """
)

# What a lost request used is not known, so it costs nothing: what was held for it returns with the
# slices.
_LOSE = text(
    """
    WITH lost AS (
        UPDATE requests SET state = 'lost', settled_micro_usd = 0, ended_at = clock_timestamp()
        WHERE replica_id = :id AND state = 'open'
        RETURNING id, tenant_id, workflow_id, step
    ), recorded AS (
        INSERT INTO ledger (request_id, tenant_id, workflow_id, amount_micro_usd)
        SELECT id, tenant_id, workflow_id, 0 FROM lost
    ), stepped AS (
        INSERT INTO workflow_steps AS done (workflow_id, step, calls)
        SELECT workflow_id, step, count(*) FROM lost
        WHERE workflow_id IS NOT NULL GROUP BY workflow_id, step ORDER BY workflow_id, step
        ON CONFLICT (workflow_id, step) DO UPDATE SET calls = done.calls + excluded.calls
    )
    SELECT count(*) FROM lost
    """
)

_RETURN = text(
    """
    WITH gone AS (
        DELETE FROM budget_leases WHERE replica_id = :id RETURNING budget_id, amount
    ), returned AS (
        UPDATE budgets SET reserved = reserved - gone.amount
        FROM gone WHERE budgets.id = gone.budget_id
        RETURNING unit, gone.amount
    )
    SELECT COALESCE(sum(amount) FILTER (WHERE unit = 'micro_usd'), 0)::int8 FROM returned
    """
)


async def register(engine: AsyncEngine, replica_id: ReplicaId) -> None:
    """Make a replica known, or known again. It holds no money yet."""
    async with transaction(engine) as connection:
        await connection.execute(
            text(
                """
                INSERT INTO replicas (id) VALUES (:id)
                ON CONFLICT (id) DO UPDATE SET last_seen_at = clock_timestamp(), ended_at = NULL
                """
            ),
            {"id": replica_id},
        )


async def beat(engine: AsyncEngine, replica_id: ReplicaId) -> bool:
    """Sign of life. False: the replica had been reaped; it is known again, but its slices were
    returned.

    A replica that reads False must drop every slice that it holds in memory.
    """
    async with transaction(engine) as connection:
        seen = await connection.execute(
            text(
                "UPDATE replicas SET last_seen_at = clock_timestamp()"
                " WHERE id = :id AND ended_at IS NULL"
            ),
            {"id": replica_id},
        )
    if seen.rowcount:
        return True
    await register(engine, replica_id)
    return False


async def count_live(engine: AsyncEngine, ttl_s: float) -> int:
    """Replicas that have been heard of within `ttl_s`."""
    async with transaction(engine) as connection:
        live = await connection.scalar(
            text(
                "SELECT count(*) FROM replicas WHERE ended_at IS NULL"
                " AND last_seen_at > clock_timestamp() - make_interval(secs => :ttl_s)"
            ),
            {"ttl_s": ttl_s},
        )
    return int(live or 0)


async def retire(engine: AsyncEngine, replica_id: ReplicaId) -> None:
    """An orderly end: what the replica still holds returns at once."""
    async with transaction(engine) as connection:
        await close(connection, replica_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingSummary:
    requests_lost: int
    returned_micro_usd: int


async def close(connection: AsyncConnection, replica_id: ReplicaId) -> ClosingSummary:
    """End a replica, its open requests and its leases. Repeating it changes nothing."""
    values = {"id": replica_id}
    await connection.execute(_END, values)
    await connection.execute(_LOCK, values)
    lost = await connection.scalar(_LOSE, values)
    returned = await connection.scalar(_RETURN, values)
    return ClosingSummary(requests_lost=lost or 0, returned_micro_usd=returned or 0)
