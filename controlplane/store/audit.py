"""The audit log: every change that an operator or a replica made, in a chain of hashes.

Each entry's hash covers its members and the hash before it, so an entry that is changed, removed or
slipped in later breaks the chain from there on. Knows nothing of what is changed.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.errors import PreconditionFailed
from controlplane.store import tables
from controlplane.store.paging import BadCursor, Page
from controlplane.store.session import transaction

# What the first entry names as the hash before it.
GENESIS = "0" * 64
LIST_MAX = 500
VERIFY_ENTRIES_PER_QUERY = 1_000
# One entry is appended at a time. Any constant will do: it names the lock.
APPEND_LOCK = 0x4845_4144_4155_44
# Of a digest that tells two states of one thing apart.
VERSION_BYTES = 8

Members = dict[str, Any]
SUBJECT_CHARACTERS_MAX = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Who changes something, and why: `key:ID` of an operator, or what acts by itself.

    `expected` are versions of which the subject must still have one, None when any will do.
    """

    actor: str
    reason: str = ""
    expected: frozenset[str] | None = None

    def hold_to(self, subject: str, before: Members | None) -> None:
        """Raises PreconditionFailed when the members of `subject`, which the caller holds locked, have a
        version that is not expected.
        """
        if self.expected is None:
            return
        if before is None:
            raise PreconditionFailed(f"there is no `{subject}` that could be as you saw it")
        version = version_of(before)
        if version not in self.expected:
            raise PreconditionFailed(
                f"`{subject}` is at version `{version}`, not as you saw it; look again and repeat"
            )


def version_of(members: Members) -> str:
    """A name for what operators declared of something: the same for the same members, whenever."""
    written = json.dumps(members, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(written.encode(), digest_size=VERSION_BYTES).hexdigest()


# A process that reaches the database itself, without anybody's key.
LOCAL = Change(actor="local")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """`before` and `after` are the subject's members around the change, None where there was none."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    reason: str
    before: Members | None
    after: Members | None
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`broken_at` is the first entry that does not fit, None when the chain is whole; `head` the hash of
    the last entry that fits. Keep it elsewhere: only who knows a head sees that later entries are gone.
    """

    entries: int
    head: str
    broken_at: int | None
    why: str


def hash_of(entry: AuditEntry) -> str:
    """The hash that an entry must have."""
    covered = [
        entry.id,
        entry.at.astimezone(UTC).isoformat(timespec="microseconds"),
        entry.actor,
        entry.action,
        entry.subject,
        entry.reason,
        entry.before,
        entry.after,
        entry.prev_hash,
    ]
    written = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(written.encode()).hexdigest()


async def append(
    connection: AsyncConnection,
    actor: str,
    action: str,
    subject: str,
    reason: str,
    before: Members | None,
    after: Members | None,
) -> AuditEntry:
    """Add an entry in the caller's transaction. Must be its last statement that takes a lock.

    Appends wait for each other until their transactions end, so that the chain has one order; whoever
    took another lock after this one could wait for a writer that waits for it.
    """
    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": APPEND_LOCK})
    head = (
        await connection.execute(
            select(tables.audit_log.c.id, tables.audit_log.c.hash)
            .order_by(tables.audit_log.c.id.desc())
            .limit(1)
        )
    ).one_or_none()
    # The clock is PostgreSQL's, and the members are hashed as PostgreSQL gives them back.
    stored = (
        await connection.execute(
            text("SELECT clock_timestamp(), CAST(:before AS jsonb), CAST(:after AS jsonb)"),
            {"before": json.dumps(before), "after": json.dumps(after)},
        )
    ).one()
    members: Members = {
        "id": 1 if head is None else head.id + 1,
        "at": stored[0],
        "actor": actor,
        "action": action,
        "subject": subject,
        "reason": reason,
        "before": stored[1],
        "after": stored[2],
        "prev_hash": GENESIS if head is None else head.hash,
    }
    unsigned = AuditEntry(**members, hash="")
    members["hash"] = hash_of(unsigned)
    await connection.execute(insert(tables.audit_log).values(**members))
    return AuditEntry(**members)


async def note(
    connection: AsyncConnection,
    by: Change,
    action: str,
    subject: str,
    before: Members | None,
    after: Members | None,
) -> None:
    """Write a change down in the caller's transaction, as its last statement. What changed nothing is
    no change.
    """
    if before != after:
        cut = subject[:SUBJECT_CHARACTERS_MAX]
        await append(connection, by.actor, action, cut, by.reason, before, after)


async def list_entries(
    engine: AsyncEngine,
    *,
    subject: str | None = None,
    actor: str | None = None,
    action: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[AuditEntry]:
    """Newest first; `subject` names one thing or, with `*` at its end, all that begin so.

    Raises BadCursor.
    """
    limit = max(1, min(limit, LIST_MAX))
    statement = select(tables.audit_log).order_by(tables.audit_log.c.id.desc()).limit(limit + 1)
    if subject is not None and subject.endswith("*"):
        statement = statement.where(
            tables.audit_log.c.subject.startswith(subject[:-1], autoescape=True)
        )
    elif subject is not None:
        statement = statement.where(tables.audit_log.c.subject == subject)
    if actor is not None:
        statement = statement.where(tables.audit_log.c.actor == actor)
    if action is not None:
        statement = statement.where(tables.audit_log.c.action == action)
    if cursor is not None:
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < len(str(2**63))):
            raise BadCursor("the cursor is not one of this list")
        statement = statement.where(tables.audit_log.c.id < int(cursor))
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    entries = [AuditEntry(**row._mapping) for row in rows]  # noqa: SLF001 - the documented way
    if len(entries) <= limit:
        return Page(tuple(entries), None)
    return Page(tuple(entries[:limit]), str(entries[limit - 1].id))


async def verify(engine: AsyncEngine, known_head: str | None = None) -> Verification:
    """Walk the whole chain. With `known_head`, some entry must have that hash."""
    seen, last_id, head = 0, 0, GENESIS
    is_known = known_head in (None, GENESIS)
    while True:
        async with transaction(engine) as connection:
            rows = (
                await connection.execute(
                    select(tables.audit_log)
                    .where(tables.audit_log.c.id > last_id)
                    .order_by(tables.audit_log.c.id)
                    .limit(VERIFY_ENTRIES_PER_QUERY)
                )
            ).all()
        if not rows:
            break
        for row in rows:
            entry = AuditEntry(**row._mapping)  # noqa: SLF001 - the documented way
            if problem := _problem(entry, last_id, head):
                return Verification(entries=seen, head=head, broken_at=entry.id, why=problem)
            seen, last_id, head = seen + 1, entry.id, entry.hash
            is_known = is_known or head == known_head
    if not is_known:
        return Verification(
            entries=seen,
            head=head,
            broken_at=last_id + 1,
            why=f"no entry has the hash `{known_head}`: entries at the end are gone",
        )
    return Verification(entries=seen, head=head, broken_at=None, why="")


def _problem(entry: AuditEntry, last_id: int, head: str) -> str:
    """Why an entry does not follow on (last_id, head), empty when it does."""
    if entry.id != last_id + 1:
        return f"entry {last_id + 1} is missing"
    if entry.prev_hash != head:
        return "it does not name the hash of the entry before it"
    if entry.hash != hash_of(entry):
        return "its hash is not that of its members"
    return ""
