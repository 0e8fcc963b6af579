"""Old rows go in the order of their age, a bounded number a time, and never what money or open calls need."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId
from controlplane.runtime.loops import Leadership
from controlplane.runtime.retention import Retention
from controlplane.store import records, retention
from controlplane.store.journal import Journal
from controlplane.store.retention import Forgettable
from controlplane.store.session import make_engine
from controlplane.telemetry.metrics import Metrics
from tests.integration.store_world import Rows, populate

pytestmark = pytest.mark.anyio

DAYS = 31
NEVER = (
    "requests",
    "ledger",
    "workflows",
    "workflow_steps",
    "budgets",
    "budget_windows",
    "audit_log",
)


@pytest.fixture
async def engine(clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(clean_database_url)
    await populate(engine)
    yield engine
    await engine.dispose()


async def write(url: str, *, days_ago: float, names: list[str], is_settled: bool = True) -> None:
    """Calls of so long ago with a decision and an attempt each."""
    at = datetime.now(UTC) - timedelta(days=days_ago)
    journal = Journal(url)
    for name in names:
        rows = Rows(name, at=at)
        journal.opened(rows.opened())
        journal.decided(rows.decided())
        journal.attempted(rows.attempted())
        if is_settled:
            journal.settled(rows.settled())
    writing = asyncio.create_task(journal.run())
    assert await journal.drain(10.0) == 0
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def count(engine: AsyncEngine, table: str) -> int:
    async with engine.begin() as connection:
        return int(await connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


async def age_attempts(engine: AsyncEngine) -> None:
    """Attempts are dated when they are written: give them the age of their calls."""
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "UPDATE attempts SET created_at = requests.opened_at"
                " FROM requests WHERE requests.id = attempts.request_id"
            )
        )


async def left(engine: AsyncEngine, table: str) -> set[str]:
    async with engine.begin() as connection:
        return set(await connection.scalars(text(f"SELECT request_id FROM {table}")))


@pytest.mark.parametrize("table", [Forgettable.DECISIONS, Forgettable.ATTEMPTS])
async def test_the_oldest_go_first_and_open_calls_keep_theirs(
    engine: AsyncEngine, clean_database_url: str, table: Forgettable
) -> None:
    await write(clean_database_url, days_ago=40, names=["open"], is_settled=False)
    await write(clean_database_url, days_ago=DAYS + 2, names=["oldest"])
    await write(clean_database_url, days_ago=DAYS + 1, names=["older"])
    await write(clean_database_url, days_ago=DAYS - 1, names=["young"])
    await age_attempts(engine)
    before = {name: await count(engine, name) for name in NEVER}
    assert await retention.forget(engine, table, days=DAYS, rows_max=1) == 1
    assert await left(engine, table) == {"open", "older", "young"}
    assert await retention.forget(engine, table, days=DAYS, rows_max=10) == 1
    assert await retention.forget(engine, table, days=DAYS, rows_max=10) == 0
    assert await left(engine, table) == {"open", "young"}
    assert {name: await count(engine, name) for name in NEVER} == before


async def test_commands_go_when_they_have_ended(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        for name, state, days in (
            ("pending", "pending", 90), ("sent", "sent", 90), ("done", "done", 32),
            ("failed", "failed", 32), ("young", "done", 30),
        ):  # fmt: skip
            await connection.execute(
                text(
                    "INSERT INTO commands (id, node_id, engine_id, kind, epoch, body, state,"
                    " created_at, ended_at) VALUES (:id, 'n1', 'n1/0', 'load', 1, '{}', :state,"
                    " now() - make_interval(days => :days), CASE WHEN :is_ended"
                    " THEN now() - make_interval(days => :days) END)"
                ),
                {"id": name, "state": state, "days": days,
                 "is_ended": state in {"done", "failed"}},
            )  # fmt: skip
    assert await retention.forget(engine, Forgettable.COMMANDS, days=DAYS, rows_max=10) == 2
    async with engine.begin() as connection:
        kept = set(await connection.scalars(text("SELECT id FROM commands")))
    assert kept == {"pending", "sent", "young"}


async def test_the_leader_alone_forgets_in_batches_and_money_still_adds_up(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    await write(clean_database_url, days_ago=40, names=[f"q{number}" for number in range(5)])
    await age_attempts(engine)
    leader, follower = (Leadership(engine, ReplicaId(name), 60.0) for name in ("r1", "r2"))
    await leader.claim()
    await follower.claim()
    metrics = Metrics()
    kept = dict.fromkeys(Forgettable, DAYS)

    def forgetful(who: Leadership) -> Retention:
        return Retention(engine, who, metrics, kept, rows_per_batch_max=2, batches_per_pass_max=2)

    await forgetful(follower).forget()
    assert await count(engine, "decisions") == 5
    one = forgetful(leader)
    await one.forget()
    assert (await count(engine, "decisions"), await count(engine, "attempts")) == (1, 1)
    await one.forget()
    assert (await count(engine, "decisions"), await count(engine, "attempts")) == (0, 0)
    assert dict(metrics.rows_forgotten.series()) == {("decisions",): 5, ("attempts",): 5}
    assert await count(engine, "ledger") == await count(engine, "requests") == 5
    assert all((await records.invariants(engine)).values())
