"""Revisions, the rollout row, the decision log's facts, and the audit chain, in real PostgreSQL."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store import audit, policies
from controlplane.store.audit import GENESIS, AuditEntry, hash_of
from controlplane.store.journal import Journal
from controlplane.store.paging import BadCursor
from controlplane.store.policies import Mode, RolloutConflict
from controlplane.store.session import make_engine, transaction
from tests.integration.store_world import Rows

A, B, C = "a" * 64, "b" * 64, "c" * 64
FILES = {"scopes.yaml": "kind: scopes\n", "ümlaut.yaml": "# \U0001f600 \t\n"}


@pytest.fixture
async def engine(clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(clean_database_url)
    yield engine
    await engine.dispose()


async def start(engine: AsyncEngine) -> None:
    await policies.bootstrap(engine, A, FILES, author="replica:r1")


async def shadow(engine: AsyncEngine, digest: str = B) -> policies.Rollout:
    return await policies.apply(
        engine, digest, FILES, author="key:k1", reason="try it", mode=Mode.SHADOW
    )


def place(row: policies.Rollout) -> tuple[object, ...]:
    return (
        row.active_digest, row.previous_digest, row.candidate_digest, str(row.mode),
        row.canary_percent,
    )  # fmt: skip


# ---------------------------------------------------------------- rollout


async def test_before_the_first_start_nothing_rules(engine: AsyncEngine) -> None:
    assert place(await policies.rollout(engine)) == (None, None, None, "none", 0)


async def test_one_of_many_first_starts_wins_and_all_see_it(engine: AsyncEngine) -> None:
    digests = [f"{number:064x}" for number in range(8)]
    rows = await asyncio.gather(
        *(policies.bootstrap(engine, digest, FILES, author="replica:r") for digest in digests)
    )
    assert len({row.active_digest for row in rows}) == 1
    assert {row.generation for row in rows} == {1}
    assert len((await audit.list_entries(engine)).items) == 1


async def test_way_of_a_bundle_from_shadow_to_active_and_back(engine: AsyncEngine) -> None:
    await start(engine)
    assert place(await shadow(engine)) == (A, None, B, "shadow", 0)
    row = await policies.canary(engine, 10, author="key:k1", reason="a few")
    assert place(row) == (A, None, B, "canary", 10)
    row = await policies.promote(engine, author="key:k1", reason="well")
    assert place(row) == (B, A, None, "none", 0)
    row = await policies.roll_back(engine, author="key:k1", reason="not so well")
    assert place(row) == (A, B, None, "none", 0)
    assert row.generation == 5
    actions = [entry.action for entry in (await audit.list_entries(engine)).items]
    assert actions == [
        "policy.rollback", "policy.promote", "policy.canary", "policy.shadow", "policy.bootstrap",
    ]  # fmt: skip


async def test_rollback_drops_the_candidate_first(engine: AsyncEngine) -> None:
    await start(engine)
    await policies.apply(engine, B, FILES, author="k", reason="now", mode=Mode.NONE)
    await shadow(engine, C)
    row = await policies.roll_back(engine, author="key:k1", reason="no")
    assert place(row) == (B, A, None, "none", 0)


async def test_changes_that_do_not_fit_are_refused_with_words(engine: AsyncEngine) -> None:
    await start(engine)
    with pytest.raises(RolloutConflict, match="no candidate"):
        await policies.canary(engine, 10, author="k", reason="r")
    with pytest.raises(RolloutConflict, match="no candidate"):
        await policies.promote(engine, author="k", reason="r")
    with pytest.raises(RolloutConflict, match="nothing to go back to"):
        await policies.roll_back(engine, author="k", reason="r")
    with pytest.raises(RolloutConflict, match="active already"):
        await policies.apply(engine, A, FILES, author="k", reason="r", mode=Mode.SHADOW)
    with pytest.raises(RolloutConflict, match=r"generation 1 .* you saw 7"):
        await policies.apply(engine, B, FILES, author="k", reason="r", mode=Mode.NONE, generation=7)
    assert (await policies.rollout(engine)).generation == 1
    # What was refused left neither a revision nor an entry behind.
    assert [item.digest for item in (await policies.list_revisions(engine)).items] == [A]
    assert len((await audit.list_entries(engine)).items) == 1


async def test_of_two_changes_from_one_generation_one_happens(engine: AsyncEngine) -> None:
    await start(engine)
    generation = (await shadow(engine)).generation
    results = await asyncio.gather(
        policies.promote(engine, author="x", reason="r", generation=generation),
        *(
            policies.roll_back(engine, author="y", reason="r", generation=generation)
            for _ in range(5)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(result, RolloutConflict) for result in results) == 5
    assert (await policies.rollout(engine)).generation == generation + 1


@dataclass(frozen=True)
class Model:
    """What rules, by hand. Each step answers None when it must be refused."""

    active: str
    previous: str | None = None
    candidate: str | None = None
    percent: int = 0

    def activated(self, digest: str) -> "Model":
        return Model(digest, previous=self.active)

    def shadow(self, digest: str) -> "Model | None":
        if digest == self.active:
            return None
        return Model(self.active, self.previous, digest)

    def now(self, digest: str) -> "Model | None":
        return None if digest == self.active else self.activated(digest)

    def canary(self, percent: int) -> "Model | None":
        return None if self.candidate is None else replace(self, percent=percent)

    def promote(self) -> "Model | None":
        return None if self.candidate is None else self.activated(self.candidate)

    def roll_back(self) -> "Model | None":
        if self.candidate is not None:
            return Model(self.active, self.previous)
        return None if self.previous is None else self.activated(self.previous)

    @property
    def mode(self) -> str:
        return "none" if self.candidate is None else ("canary" if self.percent else "shadow")


EVENTS = ("shadow", "now", "canary", "promote", "roll_back")


async def test_any_way_of_changes_is_that_of_the_model(engine: AsyncEngine) -> None:
    """From each mode by each change, refused ones included; every change is one entry of the log."""
    dice = random.Random(7)
    await start(engine)
    model, generation, pairs = Model(A), 1, set()
    by = {"author": "k", "reason": "r"}
    for _ in range(60):
        untried = [event for event in EVENTS if (model.mode, event) not in pairs]
        # Where everything was tried, on towards the modes where it was not.
        event = dice.choice(untried or ["shadow", "canary"])
        digest, percent = dice.choice([A, B, C]), dice.choice([1, 100])
        pairs.add((model.mode, event))
        match event:
            case "shadow":
                change = policies.apply(engine, digest, FILES, mode=Mode.SHADOW, **by)
                after = model.shadow(digest)
            case "now":
                change = policies.apply(engine, digest, FILES, mode=Mode.NONE, **by)
                after = model.now(digest)
            case "canary":
                change, after = policies.canary(engine, percent, **by), model.canary(percent)
            case "promote":
                change, after = policies.promote(engine, **by), model.promote()
            case _:
                change, after = policies.roll_back(engine, **by), model.roll_back()
        if after is None:
            with pytest.raises(RolloutConflict):
                await change
        else:
            await change
            model, generation = after, generation + 1
        row = await policies.rollout(engine)
        assert place(row) == (
            model.active, model.previous, model.candidate, model.mode, model.percent,
        )  # fmt: skip
        assert row.generation == generation
    assert len(pairs) == 3 * len(EVENTS)
    found = await audit.verify(engine)
    assert (found.entries, found.broken_at) == (generation, None)


async def test_a_revision_is_read_whole_by_any_unambiguous_beginning(engine: AsyncEngine) -> None:
    await start(engine)
    near = A[:10] + "0" * 54
    await shadow(engine, near)
    found = await policies.get_revision(engine, near[:11])
    assert found is not None
    assert (found.digest, found.files, found.author, found.reason) == (
        near, FILES, "key:k1", "try it",
    )  # fmt: skip
    with pytest.raises(RolloutConflict, match="give more"):
        await policies.get_revision(engine, A[:10])
    assert await policies.get_revision(engine, A[:5]) is None
    assert await policies.get_revision(engine, "%%%%%%%%") is None


async def test_a_revision_stays_as_it_was_first_stored(engine: AsyncEngine) -> None:
    await start(engine)
    await shadow(engine)
    await policies.apply(
        engine, B, {"other.yaml": ""}, author="z", reason="again", mode=Mode.SHADOW
    )
    found = await policies.get_revision(engine, B)
    assert found is not None
    assert (found.files, found.author) == (FILES, "key:k1")
    for statement in ("UPDATE policy_revisions SET author = 'x'", "DELETE FROM policy_revisions"):
        with pytest.raises(IntegrityError, match="append-only"):
            async with transaction(engine) as connection:
                await connection.execute(text(statement))


async def test_revisions_are_listed_newest_first_over_pages(engine: AsyncEngine) -> None:
    await start(engine)
    for number in range(5):
        await shadow(engine, f"{number:064x}")
    seen: list[str] = []
    cursor = None
    while True:
        found = await policies.list_revisions(engine, limit=2, cursor=cursor)
        seen += [item.digest for item in found.items]
        cursor = found.next_cursor
        if cursor is None:
            break
    assert seen == [f"{number:064x}" for number in reversed(range(5))] + [A]


# ---------------------------------------------------------------- facts


async def test_the_last_decision_with_facts_stands_for_its_request(
    clean_database_url: str, engine: AsyncEngine
) -> None:
    facts: dict[str, Any] = {"tenant.id": "acme", "workflow.remaining_micro_usd": 2**62 - 1}
    now = datetime.now(UTC)
    queued = (
        Rows("q", at=now)
        .decided(0)
        ._replace(verdict="queue", reason="no_capacity", facts=facts, sample_weight=32)
    )
    refused = Rows("q", at=now + timedelta(seconds=1)).decided(1)._replace(
        verdict="refuse", reason="forbidden_by_policy", rule="night/batch", facts=facts,
        tenant_id="acme", model="org/small",
    )  # fmt: skip
    rows = [
        queued, refused, queued._replace(request_id="w"), Rows("plain", at=now).decided(),
        queued._replace(request_id="old", decided_at=now - timedelta(hours=2)),
    ]  # fmt: skip
    journal = Journal(clean_database_url)
    writing = asyncio.create_task(journal.run())
    for row in rows:
        journal.decided(row)
    assert await journal.drain(5) == 0
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert journal.entries_dropped == 0

    found = (await policies.list_facts(engine, since_s=3_600)).items
    assert [(item.request_id, item.number, item.sample_weight) for item in found] == [
        ("q", 1, 1), ("w", 0, 32),
    ]  # fmt: skip
    assert found[0].facts == facts
    assert (found[0].tenant_id, found[0].model, found[0].rule) == (
        "acme", "org/small", "night/batch",
    )  # fmt: skip
    one = await policies.list_facts(engine, since_s=3_600, limit=1)
    two = await policies.list_facts(engine, since_s=3_600, limit=1, cursor=one.next_cursor)
    assert (*one.items, *two.items) == found
    single = await policies.facts_of(engine, "q")
    assert single == found[0]
    assert await policies.facts_of(engine, "plain") is None


# ---------------------------------------------------------------- audit


async def write(
    engine: AsyncEngine, number: int, members: dict[str, Any] | None = None
) -> AuditEntry:
    async with transaction(engine) as connection:
        return await audit.append(
            connection, f"key:{number}", "breaker.open", f"engine:{number}", "why", members, None
        )


async def test_an_empty_chain_is_whole(engine: AsyncEngine) -> None:
    found = await audit.verify(engine)
    assert (found.entries, found.head, found.broken_at) == (0, GENESIS, None)


async def test_entries_of_many_writers_at_once_are_one_chain(engine: AsyncEngine) -> None:
    await asyncio.gather(*(write(engine, number) for number in range(10)))
    found = await audit.verify(engine)
    assert (found.entries, found.broken_at) == (10, None)
    entries = (await audit.list_entries(engine, limit=500)).items
    assert [entry.id for entry in entries] == list(range(10, 0, -1))
    assert found.head == entries[0].hash
    assert len({entry.actor for entry in entries}) == 10


async def test_members_are_hashed_as_postgresql_keeps_them(engine: AsyncEngine) -> None:
    members = {
        "b": 1.50, "a": 1e25, "c": [1, 2.0, None, True], "d": {"z": "ü\U0001f600\n", "y": 2**62},
        "e": 0.1 + 0.2, "f": -0.0,
    }  # fmt: skip
    entry = await write(engine, 1, members)
    assert entry.hash == hash_of(entry)
    assert (await audit.verify(engine)).broken_at is None
    assert (await audit.list_entries(engine)).items == (entry,)


async def test_an_entry_of_a_change_that_did_not_happen_is_not_there(engine: AsyncEngine) -> None:
    await write(engine, 1)
    async with engine.connect() as connection:
        await audit.append(connection, "a", "b", "c", "d", None, None)
        await connection.rollback()
    await write(engine, 2)
    found = await audit.verify(engine)
    assert (found.entries, found.broken_at) == (2, None)


TAMPERING = [
    ("UPDATE audit_log SET actor = 'key:9' WHERE id = 3", 3),
    ("UPDATE audit_log SET reason = 'better' WHERE id = 1", 1),
    ("UPDATE audit_log SET before = '{\"x\": 2}' WHERE id = 3", 3),
    ("UPDATE audit_log SET after = '{}' WHERE id = 5", 5),
    ("UPDATE audit_log SET at = at + interval '1 microsecond' WHERE id = 2", 2),
    ("UPDATE audit_log SET subject = 'engine:x', action = 'breaker.auto' WHERE id = 4", 4),
    ("DELETE FROM audit_log WHERE id = 3", 4),
    ("DELETE FROM audit_log WHERE id = 1", 2),
    ("DELETE FROM audit_log WHERE id = 3; UPDATE audit_log SET id = id - 1 WHERE id > 3", 3),
    ("UPDATE audit_log SET hash = repeat('0', 64) WHERE id = 4", 4),
]


@pytest.mark.parametrize(("statement", "broken_at"), TAMPERING)
async def test_who_goes_around_the_triggers_breaks_the_chain(
    clean_database_url: str, engine: AsyncEngine, statement: str, broken_at: int
) -> None:
    for number in range(1, 6):
        await write(engine, number, {"x": number})
    with psycopg.connect(clean_database_url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(statement)
    found = await audit.verify(engine)
    assert found.broken_at == broken_at
    assert found.entries < 5
    assert ("is missing" in found.why) == (statement.startswith("DELETE") and ";" not in statement)


async def test_who_changes_an_entry_and_its_hash_breaks_the_next(
    clean_database_url: str, engine: AsyncEngine
) -> None:
    for number in range(1, 6):
        await write(engine, number)
    third = (await audit.list_entries(engine)).items[2]
    forged = replace(third, reason="a better one")
    with psycopg.connect(clean_database_url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(
            "UPDATE audit_log SET reason = %s, hash = %s WHERE id = 3",
            (forged.reason, hash_of(forged)),
        )
    found = await audit.verify(engine)
    assert (found.broken_at, found.entries) == (4, 3)


async def test_who_knows_a_head_sees_that_the_end_was_cut_off(
    clean_database_url: str, engine: AsyncEngine
) -> None:
    for number in range(1, 6):
        await write(engine, number)
    head = (await audit.verify(engine)).head
    await write(engine, 6)
    assert (await audit.verify(engine, head)).broken_at is None
    with psycopg.connect(clean_database_url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM audit_log WHERE id > 4")
    assert (await audit.verify(engine)).broken_at is None
    found = await audit.verify(engine, head)
    assert found.broken_at == 5
    assert head in found.why


@pytest.mark.parametrize(
    "statement",
    ["UPDATE audit_log SET reason = ''", "DELETE FROM audit_log", "TRUNCATE audit_log"],
)
async def test_the_log_refuses_changes(engine: AsyncEngine, statement: str) -> None:
    await write(engine, 1)
    with pytest.raises(IntegrityError, match="append-only"):
        async with transaction(engine) as connection:
            await connection.execute(text(statement))


async def test_entries_are_listed_by_subject_and_page(engine: AsyncEngine) -> None:
    for number in (1, 2, 11, 12):
        await write(engine, number)
    some = (await audit.list_entries(engine, subject="engine:1*")).items
    assert [entry.subject for entry in some] == ["engine:12", "engine:11", "engine:1"]
    assert [e.id for e in (await audit.list_entries(engine, subject="engine:1")).items] == [1]
    assert (await audit.list_entries(engine, subject="engine:%*")).items == ()
    first = await audit.list_entries(engine, limit=3)
    rest = await audit.list_entries(engine, limit=3, cursor=first.next_cursor)
    assert [entry.id for entry in (*first.items, *rest.items)] == [4, 3, 2, 1]
    assert rest.next_cursor is None
    for cursor in ("", "x", "-1", "9" * 40, "1.5", "²"):
        with pytest.raises(BadCursor):
            await audit.list_entries(engine, cursor=cursor)


def test_every_member_counts_for_the_hash() -> None:
    entry = AuditEntry(
        id=1, at=datetime(2026, 1, 1, tzinfo=UTC), actor="a", action="b", subject="c", reason="d",
        before=None, after={"x": 1}, prev_hash=GENESIS, hash="",
    )  # fmt: skip
    changed: list[dict[str, Any]] = [
        {"id": 2}, {"at": entry.at + timedelta(microseconds=1)}, {"actor": "b"}, {"action": "a"},
        {"subject": "d"}, {"reason": ""}, {"before": {}}, {"after": {"x": 2}}, {"prev_hash": "1"},
        # Text moved over the border of two members.
        {"actor": "ab", "action": ""},
    ]  # fmt: skip
    hashes = {hash_of(entry), *(hash_of(replace(entry, **members)) for members in changed)}
    assert len(hashes) == len(changed) + 1
    # The zone in which an instant is written does not count.
    moved = entry.at.astimezone(tz=datetime.now().astimezone().tzinfo)
    assert hash_of(replace(entry, at=moved)) == hash_of(entry)
