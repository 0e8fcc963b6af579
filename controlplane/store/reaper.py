"""Ends what crashed replicas left open and what nobody ended in time: requests, slices, tenants' names for calls.

Any replica may run it, at any time.
"""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId, WorkflowId
from controlplane.store import idempotency, replicas
from controlplane.store.session import transaction
from controlplane.store.workflows import expire_overdue

REPLICAS_PER_PASS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapSummary:
    replicas_ended: int
    requests_lost: int
    returned_micro_usd: int
    workflows_expired: tuple[WorkflowId, ...]


# Silence counts from PostgreSQL's start at the earliest: while it was away nobody could beat.
_DEAD = """
    (ended_at IS NULL
        AND GREATEST(last_seen_at, pg_postmaster_start_time())
            < clock_timestamp() - make_interval(secs => :ttl_s)
        AND id IS DISTINCT FROM :reaper_id)
    OR (ended_at IS NOT NULL AND (
        EXISTS (SELECT FROM requests WHERE replica_id = replicas.id AND state = 'open')
        OR EXISTS (SELECT FROM budget_leases WHERE replica_id = replicas.id)))
"""

_FIND = text(f"SELECT id FROM replicas WHERE {_DEAD} ORDER BY id LIMIT :limit")  # noqa: S608

# FOR NO KEY UPDATE: requests that refer to the replica can be written meanwhile.
_CLAIM = text(
    f"SELECT id FROM replicas WHERE id = :id AND ({_DEAD})"  # noqa: S608
    " FOR NO KEY UPDATE SKIP LOCKED"
)


async def reap(
    engine: AsyncEngine, ttl_s: float, reaper_id: ReplicaId | None = None
) -> ReapSummary:
    """End replicas not seen for `ttl_s` with their open requests and leases, and overdue workflows.

    `reaper_id` is who asks, and so is alive. Safe to repeat and to run by several at once.
    """
    condition = {"ttl_s": ttl_s, "reaper_id": reaper_id}
    async with transaction(engine) as connection:
        found = await connection.scalars(_FIND, {**condition, "limit": REPLICAS_PER_PASS_MAX})
        dead = list(found)
    ended = lost = returned = 0
    for replica_id in dead:
        # One transaction each: a crash in between leaves the rest for the next pass.
        async with transaction(engine) as connection:
            claimed = await connection.execute(_CLAIM, {**condition, "id": replica_id})
            if claimed.one_or_none() is None:
                continue
            summary = await replicas.close(connection, ReplicaId(replica_id))
        ended += 1
        lost += summary.requests_lost
        returned += summary.returned_micro_usd
    await idempotency.free_orphaned(engine)
    return ReapSummary(
        replicas_ended=ended,
        requests_lost=lost,
        returned_micro_usd=returned,
        workflows_expired=await expire_overdue(engine),
    )
