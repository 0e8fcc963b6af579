"""What operators decided about breakers, read by every replica when the catalogue's revision rises."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.errors import ConfigurationError
from controlplane.domain.pool import ENGINE_TARGET, POOL_TARGET, OverrideMode
from controlplane.store import audit, tables
from controlplane.store.catalog import raise_revision
from controlplane.store.session import transaction

AUDIT_SUBJECT_CHARACTERS_MAX = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord:
    """How an operator holds a breaker. `actor` is the key by which it was asked for."""

    target: str
    mode: OverrideMode
    actor: str
    reason: str
    created_at: datetime


async def load(engine: AsyncEngine) -> dict[str, OverrideMode]:
    """Every override, by target."""
    return {record.target: record.mode for record in await list_overrides(engine)}


async def list_overrides(engine: AsyncEngine) -> list[OverrideRecord]:
    """Every override, by target. There are as many as operators made."""
    table = tables.breaker_overrides
    async with transaction(engine) as connection:
        rows = (await connection.execute(select(table).order_by(table.c.target))).all()
    return [
        OverrideRecord(
            target=row.target,
            mode=OverrideMode(row.mode),
            actor=row.actor,
            reason=row.reason,
            created_at=row.created_at,
        )
        for row in rows
    ]


async def hold(
    engine: AsyncEngine, *, target: str, mode: OverrideMode, actor: str, reason: str
) -> None:
    """Hold a breaker open or closed until `free`. Raises ConfigurationError when there is no such target."""
    table = tables.breaker_overrides
    async with transaction(engine) as connection:
        before = await _held(connection, target)
        if before is None and not await _exists(connection, target):
            raise ConfigurationError(
                f"there is no breaker `{target}`; `headway breaker list` shows which there are"
            )
        written = insert(table).values(target=target, mode=str(mode), actor=actor, reason=reason)
        await connection.execute(
            written.on_conflict_do_update(
                index_elements=["target"],
                set_={
                    name: written.excluded[name]
                    for name in ("mode", "actor", "reason", "created_at")
                },
            )
        )
        await _note(connection, actor, target, reason, before, {"mode": str(mode)})


async def free(engine: AsyncEngine, *, target: str, actor: str, reason: str) -> bool:
    """Let a breaker follow what it sees again. False when no operator held it."""
    table = tables.breaker_overrides
    async with transaction(engine) as connection:
        before = await _held(connection, target)
        if before is None:
            return False
        await connection.execute(delete(table).where(table.c.target == target))
        await _note(connection, actor, target, reason, before, None)
    return True


async def _held(connection: AsyncConnection, target: str) -> dict[str, Any] | None:
    table = tables.breaker_overrides
    mode = await connection.scalar(
        select(table.c.mode).where(table.c.target == target).with_for_update()
    )
    return None if mode is None else {"mode": mode}


async def _exists(connection: AsyncConnection, target: str) -> bool:
    kind, _, name = target.partition(":")
    asked: ColumnElement[bool]
    if kind == ENGINE_TARGET:
        asked = exists().where(tables.engines.c.id == name)
    elif kind == POOL_TARGET:
        # Names of models may contain a slash, names of regions do not.
        model, _, region = name.rpartition("/")
        asked = and_(
            exists().where(tables.models.c.name == model),
            exists().where(tables.regions.c.name == region),
        )
    else:
        return False
    return bool(await connection.scalar(select(asked)))


async def _note(
    connection: AsyncConnection,
    actor: str,
    target: str,
    reason: str,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    await raise_revision(connection)
    # Last, for it waits for every other change that is being written down.
    await audit.append(
        connection,
        actor,
        "breaker.free" if after is None else "breaker.hold",
        f"breaker:{target}"[:AUDIT_SUBJECT_CHARACTERS_MAX],
        reason,
        before,
        after,
    )
