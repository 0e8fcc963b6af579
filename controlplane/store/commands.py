"""Commands to agents: written here first, sent by the leader, ended by the agent's answer."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Row, func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import CommandId, EngineId, NodeId
from controlplane.store import audit, tables
from controlplane.store.audit import LOCAL, Change
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.session import transaction
from dataplane.protocol.messages import CommandKind, EngineSpec, Progress

DETAIL_CHARACTERS_MAX = 2_000
DEADLINE_S_DEFAULT = 30.0
_ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What single kinds of command need beside their engine; empty where they do not."""

    role: str = ""
    sleep_level: int = 0
    reason: str = ""
    adapter: str = ""
    adapter_path: str = ""

    def given(self) -> dict[str, str | int]:
        return {name: value for name, value in asdict(self).items() if value}


NO_ARGUMENTS = Arguments()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandProgress:
    """How far the agent was with it when it last told. `done_ratio` is of the phase, None when unknown."""

    phase: str
    done_ratio: float | None
    elapsed_ms: int
    expected_ms: int
    calls_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """`epoch` is the leader's under which it was last sent, or at which it was written."""

    id: CommandId
    node_id: NodeId
    engine_id: EngineId
    kind: CommandKind
    epoch: int
    deadline_s: float
    spec: EngineSpec | None
    state: str
    detail: str
    created_at: datetime
    sent_at: datetime | None
    ended_at: datetime | None
    arguments: Arguments = NO_ARGUMENTS
    progress: CommandProgress | None = None


async def enqueue(
    engine: AsyncEngine,
    *,
    node_id: NodeId,
    engine_id: EngineId,
    kind: CommandKind,
    deadline_s: float = DEADLINE_S_DEFAULT,
    spec: EngineSpec | None = None,
    arguments: Arguments = NO_ARGUMENTS,
    command_id: CommandId | None = None,
    by: Change = LOCAL,
) -> CommandRecord:
    """Write a command to be sent. The same id again changes nothing and returns what is there.

    Raises ConfigurationError when the node does not exist.
    """
    identifier = command_id or CommandId(f"cmd-{secrets.token_hex(_ID_BYTES)}")
    body = {
        "deadline_s": deadline_s,
        "spec": None if spec is None else msgspec.to_builtins(spec),
        **({"arguments": arguments.given()} if arguments.given() else {}),
    }
    try:
        async with transaction(engine) as connection:
            added = await connection.execute(
                text(
                    """
                    INSERT INTO commands (id, node_id, engine_id, kind, epoch, body)
                    SELECT :id, :node_id, :engine_id, :kind, leader.epoch, CAST(:body AS jsonb)
                    FROM leader
                    ON CONFLICT (id) DO NOTHING
                    """
                ),
                {
                    "id": identifier,
                    "node_id": node_id,
                    "engine_id": engine_id,
                    "kind": str(kind),
                    "body": msgspec.json.encode(body).decode(),
                },
            )
            row = (
                await connection.execute(
                    select(tables.commands).where(tables.commands.c.id == identifier)
                )
            ).one()
            if added.rowcount:
                # Options of an engine may hold a secret of whoever wrote them: their names will do.
                told = {
                    "command": identifier,
                    "node": node_id,
                    "deadline_s": deadline_s,
                    "spec": None
                    if spec is None
                    else {
                        "kind": spec.kind,
                        "model": spec.model,
                        "role": spec.role,
                        "gpus": spec.gpus,
                        "options": sorted(spec.options),
                    },
                    **arguments.given(),
                }
                await audit.note(
                    connection, by, f"engine.{kind}", f"engine:{engine_id}", None, told
                )
    except IntegrityError as error:
        raise ConfigurationError(f"node `{node_id}` does not exist: declare it first") from error
    return _record(row)


def id_of_call(author: str, name: str) -> CommandId:
    """The id of the command that the call `name` of `author` writes, however often it is sent."""
    digest = hashlib.blake2b(
        f"{author}\x00{name}".encode(), digest_size=_ID_BYTES, person=b"command id"
    )
    return CommandId(f"cmd-{digest.hexdigest()}")


async def unsent(engine: AsyncEngine, limit: int) -> list[CommandRecord]:
    """Commands that wait to be sent, oldest first."""
    statement = (
        select(tables.commands)
        .where(tables.commands.c.state == "pending")
        .order_by(tables.commands.c.created_at, tables.commands.c.id)
        .limit(limit)
    )
    async with transaction(engine) as connection:
        return [_record(row) for row in await connection.execute(statement)]


async def find(engine: AsyncEngine, ids: Sequence[CommandId]) -> dict[CommandId, CommandRecord]:
    """The commands with these ids that exist."""
    if not ids:
        return {}
    statement = select(tables.commands).where(tables.commands.c.id.in_(ids))
    async with transaction(engine) as connection:
        records = [_record(row) for row in await connection.execute(statement)]
    return {record.id: record for record in records}


_PROGRESS = text("""
UPDATE commands SET progress = CAST(:told AS jsonb)
WHERE id = ANY(:ids) AND node_id = :node_id AND ended_at IS NULL
  AND (progress IS NULL OR ((progress->>'epoch')::bigint, (progress->>'sequence')::bigint)
                         < (CAST(:epoch AS bigint), CAST(:sequence AS bigint)))
""")


async def mark_sent(engine: AsyncEngine, command_id: CommandId, epoch: int) -> bool:
    """Note that the leader of `epoch` sent it. False: another one leads by now, or it was
    answered.
    """
    async with transaction(engine) as connection:
        marked = await connection.execute(
            update(tables.commands)
            .where(
                tables.commands.c.id == command_id,
                tables.commands.c.state == "pending",
                select(tables.leader.c.epoch).scalar_subquery() == epoch,
            )
            .values(state="sent", epoch=epoch, sent_at=func.clock_timestamp())
        )
    return marked.rowcount > 0


async def finish(engine: AsyncEngine, command_id: CommandId, state: str, detail: str) -> bool:
    """Note the agent's answer: done, failed, refused or stale_epoch. The first answer stands."""
    async with transaction(engine) as connection:
        ended = await connection.execute(
            update(tables.commands)
            .where(
                tables.commands.c.id == command_id,
                tables.commands.c.state.in_(("pending", "sent")),
            )
            .values(
                state=state,
                detail=detail.replace("\x00", "")[:DETAIL_CHARACTERS_MAX],
                ended_at=func.clock_timestamp(),
            )
        )
    return ended.rowcount > 0


async def note_progress(engine: AsyncEngine, message: Progress) -> None:
    """Note how far an agent is with the commands that it names. Later news stands, and none counts
    after the end. Raises StateUnavailable.
    """
    if not message.command_ids:
        return
    told = {
        "epoch": message.agent_epoch,
        "sequence": message.sequence,
        "phase": str(message.phase),
        "done_ratio": message.done_ratio,
        "elapsed_ms": message.elapsed_ms,
        "expected_ms": message.expected_ms,
        "calls_left": message.calls_left,
    }
    async with transaction(engine) as connection:
        await connection.execute(
            _PROGRESS,
            {
                "ids": message.command_ids,
                "node_id": message.node_id,
                "told": msgspec.json.encode(told).decode(),
                "epoch": message.agent_epoch,
                "sequence": message.sequence,
            },
        )


async def list_commands(
    engine: AsyncEngine,
    *,
    node_id: NodeId | None = None,
    engine_id: EngineId | None = None,
    state: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[CommandRecord]:
    """Newest first. Raises BadCursor."""
    statement = select(tables.commands)
    if node_id is not None:
        statement = statement.where(tables.commands.c.node_id == node_id)
    if engine_id is not None:
        statement = statement.where(tables.commands.c.engine_id == engine_id)
    if state is not None:
        statement = statement.where(tables.commands.c.state == state)
    statement = newest_first(
        statement,
        tables.commands.c.created_at,
        tables.commands.c.id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        items = [_record(row) for row in await connection.execute(statement)]
    return page(items, [(item.created_at, item.id) for item in items], limit)


def _record(row: Row[Any]) -> CommandRecord:
    spec = row.body.get("spec")
    return CommandRecord(
        id=row.id,
        node_id=row.node_id,
        engine_id=row.engine_id,
        kind=CommandKind(row.kind),
        epoch=row.epoch,
        deadline_s=float(row.body["deadline_s"]),
        spec=None if spec is None else msgspec.convert(spec, EngineSpec),
        state=row.state,
        detail=row.detail,
        created_at=row.created_at,
        sent_at=row.sent_at,
        ended_at=row.ended_at,
        arguments=Arguments(**row.body.get("arguments", {})),
        progress=_progress(row.progress),
    )


def _progress(told: dict[str, Any] | None) -> CommandProgress | None:
    if told is None:
        return None
    return CommandProgress(
        phase=told["phase"],
        done_ratio=told["done_ratio"],
        elapsed_ms=told["elapsed_ms"],
        expected_ms=told["expected_ms"],
        calls_left=told["calls_left"],
    )
