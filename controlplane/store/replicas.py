"""Which control-plane processes live. Who is not seen for long is reaped.

A replica that was reaped and comes back begins another life, under the next generation: what it was
lent before was returned, so what it still holds of that is nobody's money.
"""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.ids import ReplicaId
from controlplane.store.session import transaction

# The life of a replica that was never taken for dead.
FIRST_GENERATION = 1

_END = text("UPDATE replicas SET ended_at = clock_timestamp() WHERE id = :id AND ended_at IS NULL")

_REGISTER = text(
    """
    INSERT INTO replicas AS known (id) VALUES (:id)
    ON CONFLICT (id) DO UPDATE SET
        last_seen_at = clock_timestamp(), ended_at = NULL,
        generation = known.generation + (known.ended_at IS NOT NULL)::int
    RETURNING generation
    """
)

# Accounts first, in the order of their ids, as everyone does who moves money.
_LOCK = text(
    """
    SELECT id FROM budgets
    WHERE id IN (SELECT budget_id FROM budget_leases
                 WHERE replica_id = :id AND generation < :before)
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
        DELETE FROM budget_leases WHERE replica_id = :id AND generation < :before
        RETURNING budget_id, amount
    ), total AS (
        SELECT budget_id, sum(amount)::int8 AS amount FROM gone GROUP BY budget_id
    ), returned AS (
        UPDATE budgets SET reserved = reserved - total.amount
        FROM total WHERE budgets.id = total.budget_id
        RETURNING unit, total.amount
    )
    SELECT COALESCE(sum(amount) FILTER (WHERE unit = 'micro_usd'), 0)::int8 FROM returned
    """
)


async def register(engine: AsyncEngine, replica_id: ReplicaId) -> int:
    """Make a replica known, or known again; the generation of its life, which holds no money yet if it
    is another one.
    """
    async with transaction(engine) as connection:
        generation = int(await connection.scalar(_REGISTER, {"id": replica_id}) or FIRST_GENERATION)
        if generation > FIRST_GENERATION:
            # A lease that was under way while the replica was reaped.
            before = {"id": replica_id, "before": generation}
            await connection.execute(_LOCK, before)
            await connection.execute(_RETURN, before)
    return generation


async def beat(engine: AsyncEngine, replica_id: ReplicaId) -> int:
    """Sign of life; the generation of the life that the replica is in.

    A replica that reads another one than it knows had been reaped: what it holds in memory was
    returned, and it must drop it.
    """
    async with transaction(engine) as connection:
        generation = await connection.scalar(
            text(
                "UPDATE replicas SET last_seen_at = clock_timestamp()"
                " WHERE id = :id AND ended_at IS NULL RETURNING generation"
            ),
            {"id": replica_id},
        )
    return await register(engine, replica_id) if generation is None else int(generation)


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
    leases = {"id": replica_id, "before": 2**62}
    await connection.execute(_END, values)
    await connection.execute(_LOCK, leases)
    lost = await connection.scalar(_LOSE, values)
    returned = await connection.scalar(_RETURN, leases)
    return ClosingSummary(requests_lost=lost or 0, returned_micro_usd=returned or 0)
