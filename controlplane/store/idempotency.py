"""Tenants' own names for calls, so that a call that is sent again is not run again.

Holds which request has a name and whether it ended well; what the tenant was answered is kept
nowhere in PostgreSQL.
"""

from dataclasses import dataclass

from sqlalchemy import delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId, RequestId, TenantId
from controlplane.store import tables
from controlplane.store.session import transaction

KEPT_S = 24 * 3_600
FREED_PER_PASS_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldKey:
    """Who has a key. `is_done`: its request succeeded; else it is under way."""

    body_digest: bytes
    request_id: RequestId
    is_done: bool


_CLAIM = text(
    """
    INSERT INTO idempotency_keys AS held
        (tenant_id, key, body_digest, request_id, replica_id, expires_at)
    VALUES (:tenant_id, :key, :body_digest, :request_id, :replica_id,
            clock_timestamp() + make_interval(secs => :kept_s))
    ON CONFLICT (tenant_id, key) DO UPDATE SET
        body_digest = excluded.body_digest, request_id = excluded.request_id,
        replica_id = excluded.replica_id, state = 'open', created_at = clock_timestamp(),
        expires_at = excluded.expires_at
    WHERE held.expires_at <= clock_timestamp()
    RETURNING request_id
    """
)

# What a replica that is gone left open: done when its request succeeded all the same, free otherwise.
_FREE = text(
    """
    WITH orphaned AS (
        SELECT held.tenant_id, held.key, requests.state IS NOT DISTINCT FROM 'succeeded' AS is_done
        FROM idempotency_keys AS held
             LEFT JOIN replicas ON replicas.id = held.replica_id
             LEFT JOIN requests ON requests.id = held.request_id
        WHERE held.state = 'open' AND (replicas.id IS NULL OR replicas.ended_at IS NOT NULL)
        ORDER BY held.tenant_id, held.key LIMIT :most FOR UPDATE OF held SKIP LOCKED
    ), done AS (
        UPDATE idempotency_keys AS held SET state = 'done' FROM orphaned
        WHERE held.tenant_id = orphaned.tenant_id AND held.key = orphaned.key AND orphaned.is_done
    )
    DELETE FROM idempotency_keys AS held USING orphaned
    WHERE held.tenant_id = orphaned.tenant_id AND held.key = orphaned.key AND NOT orphaned.is_done
    """
)

_EXPIRE = text(
    """
    DELETE FROM idempotency_keys AS held USING (
        SELECT tenant_id, key FROM idempotency_keys WHERE expires_at <= clock_timestamp()
        ORDER BY tenant_id, key LIMIT :most FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE held.tenant_id = old.tenant_id AND held.key = old.key
    """
)


async def claim(
    engine: AsyncEngine,
    *,
    tenant_id: TenantId,
    key: str,
    body_digest: bytes,
    request_id: RequestId,
    replica_id: ReplicaId,
) -> HeldKey | None:
    """Take the key for a request. None: it is taken; else the request that has it already."""
    while True:
        async with transaction(engine) as connection:
            taken = await connection.scalar(
                _CLAIM,
                {
                    "tenant_id": tenant_id,
                    "key": key,
                    "body_digest": body_digest,
                    "request_id": request_id,
                    "replica_id": replica_id,
                    "kept_s": KEPT_S,
                },
            )
            if taken is not None:
                return None
            # A statement of its own sees what the first one had to wait for.
            row = (
                await connection.execute(
                    select(
                        tables.idempotency_keys.c.body_digest,
                        tables.idempotency_keys.c.request_id,
                        tables.idempotency_keys.c.state,
                    ).where(
                        tables.idempotency_keys.c.tenant_id == tenant_id,
                        tables.idempotency_keys.c.key == key,
                    )
                )
            ).one_or_none()
        # Freed in between: it can be taken after all.
        if row is not None:
            return HeldKey(
                body_digest=bytes(row.body_digest),
                request_id=RequestId(row.request_id),
                is_done=row.state == "done",
            )


async def finish(engine: AsyncEngine, tenant_id: TenantId, key: str, request_id: RequestId) -> None:
    """The key's request succeeded. Says nothing of a key that another request has by now."""
    async with transaction(engine) as connection:
        await connection.execute(
            update(tables.idempotency_keys)
            .where(
                tables.idempotency_keys.c.tenant_id == tenant_id,
                tables.idempotency_keys.c.key == key,
                tables.idempotency_keys.c.request_id == request_id,
            )
            .values(state="done")
        )


async def free(engine: AsyncEngine, tenant_id: TenantId, key: str, request_id: RequestId) -> None:
    """The key's request did not succeed: it can be sent again under the same key."""
    async with transaction(engine) as connection:
        await connection.execute(
            delete(tables.idempotency_keys).where(
                tables.idempotency_keys.c.tenant_id == tenant_id,
                tables.idempotency_keys.c.key == key,
                tables.idempotency_keys.c.request_id == request_id,
            )
        )


async def free_orphaned(engine: AsyncEngine) -> None:
    """Free expired keys and those that ended replicas left open, a bounded number a time."""
    async with transaction(engine) as connection:
        await connection.execute(_FREE, {"most": FREED_PER_PASS_MAX})
        await connection.execute(_EXPIRE, {"most": FREED_PER_PASS_MAX})
