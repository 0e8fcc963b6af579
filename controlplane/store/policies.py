"""Policy revisions and the one row that says which of them rule. Knows files and digests, no rules.

A change of the row happens only while its generation is the one that its author saw, raises it, and
writes the audit log in the same transaction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Select, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.dml import ReturningUpdate

from controlplane.store import audit, tables
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.session import transaction

# The audit log's word for the rollout row.
SUBJECT = "policy"
DIGEST_PREFIX_CHARACTERS_MIN = 6
FACTS_PER_PAGE_MAX = 500


class Mode(StrEnum):
    """What the candidate does: not there, rules without effect, or rules a share of the tenants."""

    NONE = "none"
    SHADOW = "shadow"
    CANARY = "canary"


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionRecord:
    digest: str
    author: str
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """`files` maps the names of a bundle's files to their text."""

    digest: str
    files: dict[str, str]
    author: str
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What trying the rules of a bundle out has told the program whose digest is `checker`."""

    checker: str
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Which bundle rules, and which one stands beside it. `active_digest` is None before the first."""

    generation: int
    active_digest: str | None
    previous_digest: str | None
    candidate_digest: str | None
    mode: Mode
    canary_percent: int
    changed_by: str
    reason: str
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRecord:
    """A decision with what the rules read. It stands for `sample_weight` decisions."""

    request_id: str
    number: int
    verdict: str
    reason: str | None
    tenant_id: str | None
    model: str | None
    rule: str | None
    policy_revision: str
    facts: dict[str, Any]
    sample_weight: int
    decided_at: datetime


class RolloutConflict(Exception):
    """The change does not fit what rules now; the words say why and what to do."""


class RolloutMoved(RolloutConflict):
    """The rollout is at another generation than the author of a change saw."""


# ---------------------------------------------------------------- reading


async def rollout(engine: AsyncEngine) -> Rollout:
    async with transaction(engine) as connection:
        return await _rollout(connection, select(tables.policy_rollout))


async def get_revision(engine: AsyncEngine, digest: str) -> Revision | None:
    """The revision with this digest, or the only one whose digest begins so (at least six characters).

    Raises RolloutConflict when several do.
    """
    if len(digest) < DIGEST_PREFIX_CHARACTERS_MIN:
        return None
    column = tables.policy_revisions.c.digest
    async with transaction(engine) as connection:
        rows = (
            await connection.execute(
                select(tables.policy_revisions)
                .where(column.startswith(digest, autoescape=True))
                .limit(2)
            )
        ).all()
    if len(rows) > 1:
        raise RolloutConflict(f"several revisions begin with `{digest}`; give more of the digest")
    return Revision(**rows[0]._mapping) if rows else None  # noqa: SLF001 - the documented way


async def report_of(engine: AsyncEngine, digest: str, checker: str) -> dict[str, Any] | None:
    """What a program of this digest found when it checked a revision; None when none did."""
    checks = tables.policy_checks.c
    statement = select(checks.report).where(checks.digest == digest, checks.checker == checker)
    async with transaction(engine) as connection:
        found: dict[str, Any] | None = (await connection.execute(statement)).scalar_one_or_none()
    return found


async def list_revisions(
    engine: AsyncEngine, *, limit: int = 50, cursor: str | None = None
) -> Page[RevisionRecord]:
    """Newest first, without the files. Raises BadCursor."""
    revisions = tables.policy_revisions.c
    statement = newest_first(
        select(revisions.digest, revisions.author, revisions.reason, revisions.created_at),
        revisions.created_at,
        revisions.digest,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [RevisionRecord(**row._mapping) for row in rows]  # noqa: SLF001 - the documented way
    return page(items, [(item.created_at, item.digest) for item in items], limit)


async def list_facts(
    engine: AsyncEngine, *, since_s: int, limit: int = FACTS_PER_PAGE_MAX, cursor: str | None = None
) -> Page[FactsRecord]:
    """The last decision of each request of the last `since_s` seconds, newest first.

    A call that waited has several; only the last says how it ended. Raises BadCursor.
    """
    later = tables.decisions.alias("later")
    is_last = ~(
        select(later.c.number)
        .where(
            later.c.request_id == tables.decisions.c.request_id,
            later.c.number > tables.decisions.c.number,
            later.c.facts.is_not(None),
        )
        .exists()
    )
    statement = newest_first(
        _facts().where(
            tables.decisions.c.decided_at
            > func.now() - func.make_interval(0, 0, 0, 0, 0, 0, since_s),
            is_last,
        ),
        tables.decisions.c.decided_at,
        tables.decisions.c.request_id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [FactsRecord(**row._mapping) for row in rows]  # noqa: SLF001 - the documented way
    return page(items, [(item.decided_at, item.request_id) for item in items], limit)


async def facts_of(engine: AsyncEngine, request_id: str) -> FactsRecord | None:
    """The last decision of a request that holds facts."""
    statement = (
        _facts()
        .where(tables.decisions.c.request_id == request_id)
        .order_by(tables.decisions.c.number.desc())
        .limit(1)
    )
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    return None if row is None else FactsRecord(**row._mapping)  # noqa: SLF001 - the documented way


def _facts() -> Select[Any]:
    decisions = tables.decisions.c
    return select(
        decisions.request_id, decisions.number, decisions.verdict, decisions.reason,
        decisions.tenant_id, decisions.model, decisions.rule, decisions.policy_revision,
        decisions.facts, decisions.sample_weight, decisions.decided_at,
    ).where(decisions.facts.is_not(None))  # fmt: skip


# ---------------------------------------------------------------- changing


async def bootstrap(
    engine: AsyncEngine,
    digest: str,
    files: Mapping[str, str],
    *,
    author: str,
    check: Check | None = None,
) -> Rollout:
    """Make a bundle the first to rule, when none does. Returns what rules then, whoever was first."""
    async with transaction(engine) as connection:
        row = await _locked(connection)
        if row.active_digest is not None:
            return row
        reason = "the first bundle, from the folder of the replica that started first"
        await _store(connection, digest, files, author=author, reason=reason, check=check)
        return await _write(connection, row, author, "bootstrap", reason, {"active_digest": digest})


async def apply(
    engine: AsyncEngine,
    digest: str,
    files: Mapping[str, str],
    *,
    author: str,
    reason: str,
    mode: Mode,
    generation: int | None = None,
    check: Check | None = None,
) -> Rollout:
    """Store a checked bundle, with what checking it told, and set it beside the active one in shadow,
    or make it active (mode NONE).

    Raises RolloutConflict.
    """
    async with transaction(engine) as connection:
        row = await _locked(connection, generation)
        if digest == row.active_digest:
            raise RolloutConflict(f"revision {digest[:12]} is active already; nothing was changed")
        await _store(connection, digest, files, author=author, reason=reason, check=check)
        if mode is Mode.NONE:
            action, changes = "apply", _activation(row, digest)
        else:
            action = "shadow"
            changes = {"candidate_digest": digest, "mode": Mode.SHADOW, "canary_percent": 0}
        return await _write(connection, row, author, action, reason, changes)


async def canary(
    engine: AsyncEngine, percent: int, *, author: str, reason: str, generation: int | None = None
) -> Rollout:
    """Let the candidate rule `percent` of the tenants. Raises RolloutConflict."""
    async with transaction(engine) as connection:
        row = await _locked(connection, generation)
        if row.candidate_digest is None:
            raise RolloutConflict("there is no candidate; apply a bundle first")
        return await _write(
            connection,
            row,
            author,
            "canary",
            reason,
            {"mode": Mode.CANARY, "canary_percent": percent},
        )


async def promote(
    engine: AsyncEngine, *, author: str, reason: str, generation: int | None = None
) -> Rollout:
    """Make the candidate the active bundle. Raises RolloutConflict."""
    async with transaction(engine) as connection:
        row = await _locked(connection, generation)
        if row.candidate_digest is None:
            raise RolloutConflict("there is no candidate; apply a bundle first")
        return await _write(
            connection, row, author, "promote", reason, _activation(row, row.candidate_digest)
        )


async def roll_back(
    engine: AsyncEngine, *, author: str, reason: str, generation: int | None = None
) -> Rollout:
    """Drop the candidate; without one, make the previous bundle active again. Raises RolloutConflict."""
    async with transaction(engine) as connection:
        row = await _locked(connection, generation)
        if row.candidate_digest is not None:
            changes: dict[str, Any] = {
                "candidate_digest": None,
                "mode": Mode.NONE,
                "canary_percent": 0,
            }
        elif row.previous_digest is not None:
            changes = _activation(row, row.previous_digest)
        else:
            raise RolloutConflict(
                "there is neither a candidate nor a previous bundle; nothing to go back to"
            )
        return await _write(connection, row, author, "rollback", reason, changes)


def _activation(row: Rollout, digest: str) -> dict[str, Any]:
    return {
        "active_digest": digest,
        "previous_digest": row.active_digest,
        "candidate_digest": None,
        "mode": Mode.NONE,
        "canary_percent": 0,
    }


async def _locked(connection: AsyncConnection, generation: int | None = None) -> Rollout:
    """The row, which nobody else changes until the transaction ends."""
    row = await _rollout(connection, select(tables.policy_rollout).with_for_update())
    if generation is not None and row.generation != generation:
        raise RolloutMoved(
            f"the rollout is at generation {row.generation} and was changed by `{row.changed_by}`;"
            f" you saw {generation}: look again and repeat"
        )
    return row


async def _rollout(
    connection: AsyncConnection, statement: Select[Any] | ReturningUpdate[Any]
) -> Rollout:
    row = (await connection.execute(statement)).one()
    members = dict(row._mapping)  # noqa: SLF001 - the documented way
    del members["id"]
    return Rollout(**{**members, "mode": Mode(members["mode"])})


async def keep_check(engine: AsyncEngine, digest: str, check: Check) -> None:
    """Keep what checking a revision told, for other replicas of the same program."""
    async with transaction(engine) as connection:
        await _keep_check(connection, digest, check)


async def _keep_check(connection: AsyncConnection, digest: str, check: Check) -> None:
    await connection.execute(
        insert(tables.policy_checks)
        .values(digest=digest, checker=check.checker, report=dict(check.report))
        .on_conflict_do_nothing()
    )


async def _store(
    connection: AsyncConnection,
    digest: str,
    files: Mapping[str, str],
    *,
    author: str,
    reason: str,
    check: Check | None,
) -> None:
    """Keep a revision. One that is there already stays as it was first stored."""
    await connection.execute(
        insert(tables.policy_revisions)
        .values(digest=digest, files=dict(files), author=author, reason=reason)
        .on_conflict_do_nothing()
    )
    if check is not None:
        await _keep_check(connection, digest, check)


async def _write(
    connection: AsyncConnection,
    row: Rollout,
    author: str,
    action: str,
    reason: str,
    changes: Mapping[str, Any],
) -> Rollout:
    """Change the row that `_locked` gave, and say so in the audit log."""
    changed = await _rollout(
        connection,
        update(tables.policy_rollout)
        .where(tables.policy_rollout.c.generation == row.generation)
        .values(
            **changes,
            generation=row.generation + 1,
            changed_by=author,
            reason=reason,
            changed_at=func.clock_timestamp(),
        )
        .returning(tables.policy_rollout),
    )
    await audit.append(
        connection, author, f"policy.{action}", SUBJECT, reason, _members(row), _members(changed)
    )
    return changed


def _members(row: Rollout) -> dict[str, Any]:
    return {
        "generation": row.generation,
        "active": row.active_digest,
        "candidate": row.candidate_digest,
        "mode": str(row.mode),
        "canary_percent": row.canary_percent,
    }
