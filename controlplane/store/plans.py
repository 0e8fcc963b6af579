"""Plans of the fleet: what the planner wants, which of it is being done, and what operators allow.

Plans are documents here; their members are known to `scheduler/planner/problem.py`. Whatever the
leader writes is written under its epoch, so that one which was replaced changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    delete,
    exists,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import EngineId, NodeId
from controlplane.store import audit, tables
from controlplane.store.leadership import leads
from controlplane.store.paging import BadCursor, Page
from controlplane.store.session import transaction
from dataplane.protocol.messages import EngineSpec

LIST_MAX = 500
# Older plans that nobody applied are forgotten; those that were applied stay.
PLANS_KEPT_MAX = 2_000
MOVES_MAX = 10_000
DETAIL_CHARACTERS_MAX = 2_000
SUBJECT = "planner"


class Mode(StrEnum):
    """`off`: no plans. `propose`: plans and prices, no moves unless asked. `act`: moves are carried out."""

    OFF = "off"
    PROPOSE = "propose"
    ACT = "act"


class PlanState(StrEnum):
    """`failed`: a move failed, and its node was brought back to what it had. `cancelled`: stopped before
    its end by an operator.
    """

    PROPOSED = "proposed"
    APPLYING = "applying"
    APPLIED = "applied"
    FAILED = "failed"
    CANCELLED = "cancelled"


class MoveState(StrEnum):
    """`stuck`: neither done nor brought back, a person must look. `not_executable`: agents can not do it."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNDOING = "undoing"
    UNDONE = "undone"
    STUCK = "stuck"
    CANCELLED = "cancelled"
    NOT_EXECUTABLE = "not_executable"


class PlanConflict(Exception):
    """What was asked does not fit the state of the planner; nothing was changed."""


class PlannerMoved(PlanConflict):
    """The planner is at another generation than the author of a change saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerControl:
    """What operators allow the planner. A paused one begins no move; what runs is watched to its end."""

    generation: int
    mode: Mode
    is_paused: bool
    changed_by: str
    reason: str
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """`confirmed_at`: when the latest round came to the same. `applied_by` is who let its moves begin."""

    revision: int
    epoch: int
    digest: str
    problem_digest: str
    status: str
    state: PlanState
    document: dict[str, Any]
    made_at: datetime
    confirmed_at: datetime
    applied_by: str | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMove:
    """A move as it is handed over to be done: `waiting`, or `not_executable` with the reason."""

    number: int
    kind: str
    node_id: NodeId
    engine_id: str
    state: MoveState
    detail: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    revision: int
    number: int
    kind: str
    node_id: NodeId
    engine_id: str
    state: MoveState
    detail: str
    body: dict[str, Any]
    began_at: datetime | None
    ended_at: datetime | None


# ---------------------------------------------------------------- what operators allow


async def control(engine: AsyncEngine) -> PlannerControl:
    async with transaction(engine) as connection:
        return _control((await connection.execute(select(tables.planner_control))).one())


async def set_control(
    engine: AsyncEngine,
    *,
    mode: Mode | None = None,
    is_paused: bool | None = None,
    author: str,
    reason: str,
    generation: int | None = None,
) -> PlannerControl:
    """Change what is given, and write it down. With `generation`, only while it is that one.

    Raises PlanConflict.
    """
    table = tables.planner_control
    async with transaction(engine) as connection:
        before = _control((await connection.execute(select(table).with_for_update())).one())
        if generation is not None and generation != before.generation:
            raise PlannerMoved(
                f"the planner is at generation {before.generation}, not {generation}; look at it again"
            )
        changes = {
            "mode": before.mode if mode is None else mode,
            "is_paused": before.is_paused if is_paused is None else is_paused,
        }
        if changes == {"mode": before.mode, "is_paused": before.is_paused}:
            return before
        row = (
            await connection.execute(
                update(table)
                .values(
                    mode=str(changes["mode"]),
                    is_paused=changes["is_paused"],
                    generation=before.generation + 1,
                    changed_by=author,
                    reason=reason,
                    changed_at=func.clock_timestamp(),
                )
                .returning(table)
            )
        ).one()
        after = _control(row)
        action = "mode" if mode is not None else "pause" if is_paused else "resume"
        await audit.append(
            connection,
            author,
            f"{SUBJECT}.{action}",
            SUBJECT,
            reason,
            {"mode": str(before.mode), "is_paused": before.is_paused},
            {"mode": str(after.mode), "is_paused": after.is_paused},
        )
        return after


# ---------------------------------------------------------------- plans


async def record(
    engine: AsyncEngine,
    *,
    epoch: int,
    digest: str,
    problem_digest: str,
    status: str,
    document: dict[str, Any],
) -> PlanRecord | None:
    """Note what a round came to: a further revision, or the newest one confirmed when it wants the same.

    None when another leader than that of `epoch` leads.
    """
    plans = tables.plans
    async with transaction(engine) as connection:
        if not await leads(connection, epoch):
            return None
        newest = (await connection.execute(_newest())).one_or_none()
        if newest is not None and newest.digest == digest:
            # The same changes, with newer prices and measurements beside them.
            row = await connection.execute(
                update(plans)
                .where(plans.c.revision == newest.revision)
                .values(
                    confirmed_at=func.clock_timestamp(),
                    problem_digest=problem_digest,
                    status=status,
                    document=document,
                )
                .returning(plans)
            )
            return _plan(row.one())
        now = func.clock_timestamp()
        row = await connection.execute(
            insert(plans)
            .values(
                epoch=epoch,
                digest=digest,
                problem_digest=problem_digest,
                status=status,
                document=document,
                made_at=now,
                confirmed_at=now,
            )
            .returning(plans)
        )
        return _plan(row.one())


async def newest(engine: AsyncEngine) -> PlanRecord | None:
    async with transaction(engine) as connection:
        row = (await connection.execute(_newest())).one_or_none()
    return None if row is None else _plan(row)


async def applying(engine: AsyncEngine) -> PlanRecord | None:
    """The plan whose moves are under way."""
    statement = select(tables.plans).where(tables.plans.c.state == str(PlanState.APPLYING))
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    return None if row is None else _plan(row)


async def last_ended(engine: AsyncEngine) -> tuple[PlanState, float] | None:
    """How the plan that ended last ended, and how many seconds ago."""
    plans = tables.plans.c
    statement = (
        select(
            plans.state,
            func.extract("epoch", func.clock_timestamp() - plans.ended_at).label("ago_s"),
        )
        .where(plans.ended_at.is_not(None))
        .order_by(plans.ended_at.desc())
        .limit(1)
    )
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    return None if row is None else (PlanState(row.state), float(row.ago_s))


async def get_plan(engine: AsyncEngine, revision: int) -> PlanRecord | None:
    statement = select(tables.plans).where(tables.plans.c.revision == revision)
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    return None if row is None else _plan(row)


async def list_plans(
    engine: AsyncEngine,
    *,
    state: PlanState | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[PlanRecord]:
    """Newest first, without who serves which class, which is most of a plan. Raises BadCursor."""
    plans = tables.plans
    limit = max(1, min(limit, LIST_MAX))
    shortened = plans.c.document.op("#-")(text("'{plan,assignment}'")).label("document")
    columns: list[ColumnElement[Any]] = [one for one in plans.c if one is not plans.c.document]
    statement: Select[Any] = (
        select(*columns, shortened).order_by(plans.c.revision.desc()).limit(limit + 1)
    )
    if cursor is not None:
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < len(str(2**63))):
            raise BadCursor("the cursor is not one of this list")
        statement = statement.where(plans.c.revision < int(cursor))
    if state is not None:
        statement = statement.where(plans.c.state == str(state))
    async with transaction(engine) as connection:
        items = [_plan(row) for row in await connection.execute(statement)]
    if len(items) <= limit:
        return Page(tuple(items), None)
    return Page(tuple(items[:limit]), str(items[limit - 1].revision))


async def forget_old(engine: AsyncEngine, kept_max: int = PLANS_KEPT_MAX) -> int:
    """Forget plans that nobody applied, but for the latest ones. Returns how many."""
    plans = tables.plans
    bound = (
        select(plans.c.revision)
        .order_by(plans.c.revision.desc())
        .offset(kept_max)
        .limit(1)
        .scalar_subquery()
    )
    async with transaction(engine) as connection:
        gone = await connection.execute(
            delete(plans).where(plans.c.revision <= bound, plans.c.state == str(PlanState.PROPOSED))
        )
    return gone.rowcount


# ---------------------------------------------------------------- applying


async def apply(
    engine: AsyncEngine,
    revision: int,
    moves: Sequence[NewMove],
    *,
    author: str,
    reason: str,
    age_s_max: float,
    epoch: int | None = None,
) -> PlanRecord:
    """Let the moves of a proposed plan begin.

    With `epoch`, only while the leader of that epoch leads. Raises PlanConflict when there is no such
    plan, it is not a proposal any more, nobody confirmed it for `age_s_max` seconds, it has no move that
    can be carried out, or another plan is being applied.
    """
    plans = tables.plans
    async with transaction(engine) as connection:
        if epoch is not None and not await leads(connection, epoch):
            raise PlanConflict("another replica leads by now")
        statement = select(
            plans,
            func.extract("epoch", func.clock_timestamp() - plans.c.confirmed_at).label("age_s"),
        ).where(plans.c.revision == revision)
        row = (await connection.execute(statement.with_for_update())).one_or_none()
        if row is None:
            raise PlanConflict(f"there is no plan {revision}; `headway plan history` lists them")
        if row.state != PlanState.PROPOSED:
            raise PlanConflict(f"plan {revision} is {row.state} already")
        if row.age_s > age_s_max:
            raise PlanConflict(
                f"plan {revision} is {row.age_s:.0f} s old, and the fleet may have changed since:"
                " apply a newer one"
            )
        if not moves:
            raise PlanConflict(f"plan {revision} has no moves")
        if all(move.state is MoveState.NOT_EXECUTABLE for move in moves):
            raise PlanConflict(f"no move of plan {revision} can be carried out: {moves[0].detail}")
        if len(moves) > MOVES_MAX:
            raise PlanConflict(f"plan {revision} has more than {MOVES_MAX} moves")
        try:
            changed = await connection.execute(
                update(plans)
                .where(plans.c.revision == revision)
                .values(state=str(PlanState.APPLYING), applied_by=author)
                .returning(plans)
            )
        except IntegrityError as error:
            raise PlanConflict("another plan is being applied; wait for its end") from error
        await connection.execute(
            insert(tables.plan_moves),
            [
                {
                    "revision": revision,
                    "number": move.number,
                    "kind": move.kind,
                    "node_id": move.node_id,
                    "engine_id": move.engine_id,
                    "state": str(move.state),
                    "detail": move.detail[:DETAIL_CHARACTERS_MAX],
                    "body": move.body,
                }
                for move in moves
            ],
        )
        applied = _plan(changed.one())
        await audit.append(
            connection,
            author,
            f"{SUBJECT}.apply",
            f"plan:{revision}",
            reason,
            {"state": row.state},
            {"state": str(applied.state), "moves": len(moves)},
        )
        return applied


async def moves_of(engine: AsyncEngine, revision: int) -> list[MoveRecord]:
    """The moves of a plan that is or was applied, in their order."""
    table = tables.plan_moves
    statement = select(table).where(table.c.revision == revision).order_by(table.c.number)
    async with transaction(engine) as connection:
        return [_move(row) for row in await connection.execute(statement)]


async def set_move(
    engine: AsyncEngine,
    epoch: int,
    move: MoveRecord,
    state: MoveState,
    *,
    detail: str | None = None,
    body: dict[str, Any] | None = None,
) -> bool:
    """Note how a move stands. False when another leader leads, or it has changed since it was read."""
    table = tables.plan_moves
    values: dict[str, Any] = {"state": str(state)}
    if detail is not None:
        values["detail"] = detail.replace("\x00", "")[:DETAIL_CHARACTERS_MAX]
    if body is not None:
        values["body"] = body
    if move.began_at is None and state is MoveState.RUNNING:
        values["began_at"] = func.clock_timestamp()
    if state not in (MoveState.WAITING, MoveState.RUNNING, MoveState.UNDOING):
        values["ended_at"] = func.clock_timestamp()
    async with transaction(engine) as connection:
        changed = await connection.execute(
            update(table)
            .where(
                table.c.revision == move.revision,
                table.c.number == move.number,
                table.c.state == str(move.state),
                _is_epoch(epoch),
            )
            .values(values)
        )
    return changed.rowcount > 0


async def end_plan(
    engine: AsyncEngine, epoch: int, revision: int, state: PlanState, *, author: str, reason: str
) -> bool:
    """Note how the application of a plan ended, and write it down."""
    plans = tables.plans
    async with transaction(engine) as connection:
        changed = await connection.execute(
            update(plans)
            .where(
                plans.c.revision == revision,
                plans.c.state == str(PlanState.APPLYING),
                _is_epoch(epoch),
            )
            .values(state=str(state), ended_at=func.clock_timestamp())
        )
        if changed.rowcount == 0:
            return False
        await audit.append(
            connection,
            author,
            f"{SUBJECT}.{state}",
            f"plan:{revision}",
            reason,
            {"state": str(PlanState.APPLYING)},
            {"state": str(state)},
        )
    return True


# ---------------------------------------------------------------- how engines are started


async def engine_specs(engine: AsyncEngine) -> dict[EngineId, tuple[NodeId, EngineSpec]]:
    """How engines are started, by id: as last loaded by a command, else as a document declared it."""
    loaded = text(
        """
        SELECT DISTINCT ON (engine_id) engine_id, node_id, body -> 'spec' AS body
        FROM commands
        WHERE kind = 'load' AND state = 'done' AND body -> 'spec' <> 'null'
        ORDER BY engine_id, created_at DESC
        """
    )
    async with transaction(engine) as connection:
        declared = (await connection.execute(select(tables.engine_specs))).all()
        rows = [*declared, *(await connection.execute(loaded)).all()]
    return {
        EngineId(row.engine_id): (NodeId(row.node_id), msgspec.convert(row.body, EngineSpec))
        for row in rows
    }


# ---------------------------------------------------------------- inside


def _is_epoch(epoch: int) -> ColumnElement[bool]:
    return exists().where(tables.leader.c.epoch == epoch)


def _newest() -> Select[Any]:
    return select(tables.plans).order_by(tables.plans.c.revision.desc()).limit(1)


def _control(row: Row[Any]) -> PlannerControl:
    return PlannerControl(
        generation=row.generation,
        mode=Mode(row.mode),
        is_paused=row.is_paused,
        changed_by=row.changed_by,
        reason=row.reason,
        changed_at=row.changed_at,
    )


def _plan(row: Row[Any]) -> PlanRecord:
    return PlanRecord(
        revision=row.revision,
        epoch=row.epoch,
        digest=row.digest,
        problem_digest=row.problem_digest,
        status=row.status,
        state=PlanState(row.state),
        document=row.document,
        made_at=row.made_at,
        confirmed_at=row.confirmed_at,
        applied_by=row.applied_by,
        ended_at=row.ended_at,
    )


def _move(row: Row[Any]) -> MoveRecord:
    return MoveRecord(
        revision=row.revision,
        number=row.number,
        kind=row.kind,
        node_id=NodeId(row.node_id),
        engine_id=row.engine_id,
        state=MoveState(row.state),
        detail=row.detail,
        body=row.body,
        began_at=row.began_at,
        ended_at=row.ended_at,
    )
