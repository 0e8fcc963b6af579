"""The one leader: a row with an epoch that grows with every change of holder and fences the one
before.
"""

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.ids import ReplicaId
from controlplane.store import tables
from controlplane.store.session import transaction

_CLAIM = text(
    """
    UPDATE leader SET
        epoch = epoch + CASE WHEN holder IS NOT DISTINCT FROM :id THEN 0 ELSE 1 END,
        holder = :id,
        expires_at = clock_timestamp() + make_interval(secs => :ttl_s)
    WHERE holder = :id OR holder IS NULL OR expires_at < clock_timestamp()
    RETURNING epoch
    """
)


async def claim(engine: AsyncEngine, replica_id: ReplicaId, ttl_s: float) -> int | None:
    """Become or stay leader for `ttl_s` seconds. Returns the epoch; None when another one leads."""
    async with transaction(engine) as connection:
        epoch = await connection.scalar(_CLAIM, {"id": str(replica_id), "ttl_s": ttl_s})
    return None if epoch is None else int(epoch)


async def leads(connection: AsyncConnection, epoch: int) -> bool:
    """Whether `epoch` is the leader's, which it then stays until the transaction ends."""
    leader = tables.leader.c
    held = await connection.scalar(
        select(leader.epoch).where(leader.epoch == epoch).with_for_update(read=True)
    )
    return held is not None


async def release(engine: AsyncEngine, replica_id: ReplicaId) -> None:
    """Let another replica lead at once. The epoch still grows when one does."""
    async with transaction(engine) as connection:
        await connection.execute(
            text("UPDATE leader SET holder = NULL WHERE holder = :id"), {"id": str(replica_id)}
        )
