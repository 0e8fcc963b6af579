"""Old rows go in the order of their age, a bounded number a time, and never what money or open calls need."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ReplicaId, SloClassName
from controlplane.runtime.loops import Leadership
from controlplane.runtime.retention import Retention
from controlplane.store import records, retention, workflows
from controlplane.store.journal import Charge, Journal
from controlplane.store.retention import Forgettable
from controlplane.store.session import make_engine
from controlplane.telemetry.metrics import Metrics
from tests.integration.store_world import ACME, BOLT, Rows, populate

pytestmark = pytest.mark.anyio

DAYS = 31
NEVER = (
    "ledger_folded",
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
    # Settled a moment ago by PostgreSQL's clock, whatever the call's own says.
    assert await count(engine, "ledger") == await count(engine, "requests") == 5
    assert all((await records.invariants(engine)).values())


# ---------------------------------------------------------------- folding


async def age_ledger(engine: AsyncEngine, days: int, ids: Iterable[str]) -> None:
    """As if these had been settled so long ago: what no one may do to a ledger, hence the triggers away."""
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE ledger DISABLE TRIGGER USER"))
        await connection.execute(
            text(
                "UPDATE ledger SET settled_at = now() - make_interval(days => :days)"
                " WHERE request_id = ANY(:ids)"
            ),
            {"days": days, "ids": list(ids)},
        )
        await connection.execute(text("ALTER TABLE ledger ENABLE TRIGGER USER"))


@pytest.mark.parametrize("seed", range(12))
async def test_folding_keeps_every_sum(
    engine: AsyncEngine, clean_database_url: str, seed: int
) -> None:
    """Calls of two tenants and four workflows, of which some run, of several ages; the oracle is a list."""
    random = Random(seed)
    async with engine.begin() as connection:
        await connection.execute(text('UPDATE budgets SET "limit" = 1000000'))
        # The key's account and the tokens' are in every call, or in none.
        for name, unit in (("key:k1", "micro_usd"), ("tenant:acme:tokens", "tokens")):
            await connection.execute(
                text('INSERT INTO budgets (id, unit, "limit") VALUES (:id, :unit, 1000000)'),
                {"id": name, "unit": unit},
            )
    flows: dict[str, tuple[str, str | None]] = {}
    for number in range(4):
        tenant = random.choice((ACME, BOLT))
        made = await workflows.create(
            engine, tenant=tenant, kind="k", scope=Scope.CHAT, steps_expected=2,
            slo_class=SloClassName("interactive"), deadline_ms=60_000,
            budget_micro_usd=random.choice((None, 50_000)), budget_tokens=None,
            workflow_id=f"wf{number}", choice=None, retry_of=None,
        )  # fmt: skip
        flows[made.id] = (tenant, made.budget_id)
    journal = Journal(clean_database_url)
    calls: list[tuple[str, str, str | None, int, int]] = []
    for number in range(random.randrange(5, 25)):
        flow = random.choice((None, None, *flows))
        tenant, budget = flows[flow] if flow else (random.choice((ACME, BOLT)), None)
        rows = Rows(
            f"q{number}", tenant=tenant, workflow=flow, workflow_budget=budget,
            step=random.randrange(2),
        )  # fmt: skip
        cost = random.randrange(0, 50)
        journal.opened(rows.opened())
        journal.attempted(rows.attempted())
        settled = rows.settled(cost, random.choice(("succeeded", "failed")))
        further = [Charge("key:k1", cost)]
        if tenant == ACME:
            further.append(Charge("tenant:acme:tokens", random.randrange(90)))
        journal.settled(settled._replace(charges=(*settled.charges, *further)))
        calls.append((rows.id, tenant, flow, cost, random.choice((1, 29, 35, 70))))
    writing = asyncio.create_task(journal.run())
    assert await journal.drain(10.0) == 0
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    for days in {days for *_, days in calls}:
        await age_ledger(engine, days, (name for name, *_, of in calls if of == days))
    ended = {flow for flow in flows if random.random() < 0.6}
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE workflows SET state = 'failed', ended_at = now() WHERE id = ANY(:ids)"),
            {"ids": list(ended)},
        )
    assert all((await records.invariants(engine)).values())

    kept_days = random.choice((31, 60))
    gone = {
        name for name, _, flow, _, days in calls
        if days > kept_days and (flow is None or flow in ended)
    }  # fmt: skip
    folded = 0
    while True:
        batch = await retention.forget(
            engine, Forgettable.REQUESTS, days=kept_days, rows_max=random.randrange(1, 5)
        )
        assert all((await records.invariants(engine)).values())
        spent = {row.tenant_id: row for row in await records.spend_by_tenant(engine)}
        for tenant in (ACME, BOLT):
            of_tenant = [cost for _, whose, _, cost, _ in calls if whose == tenant]
            assert spent[tenant].settled_micro_usd == sum(of_tenant)
            assert spent[tenant].requests == len(of_tenant)
        folded += batch
        if not batch:
            break
    assert folded == len(gone)
    for table in ("ledger", "attempts"):
        assert await left(engine, table) == {name for name, *_ in calls} - gone
    assert await count(engine, "requests") == len(calls) - len(gone)
    async with engine.begin() as connection:
        sums = await connection.execute(text("SELECT kind, id, calls, amount FROM ledger_folded"))
        found = {(kind, of): (times, amount) for kind, of, times, amount in sums}
    for kind, of in {("tenant", ACME), ("tenant", BOLT), *(("workflow", flow) for flow in flows)}:
        costs = [
            cost for name, tenant, flow, cost, _ in calls
            if name in gone and of == (tenant if kind == "tenant" else flow)
        ]  # fmt: skip
        assert found.get((kind, of), (0, 0)) == (len(costs), sum(costs)), (kind, of)


async def test_nobody_takes_from_the_ledger_or_its_sums_what_is_not_old_and_over(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    await write(clean_database_url, days_ago=0, names=["old", "young"])
    await age_ledger(engine, 40, ["old"])
    assert await retention.forget(engine, Forgettable.REQUESTS, days=31, rows_max=10) == 1
    for statement in (
        "DELETE FROM ledger", "UPDATE ledger SET amount_micro_usd = 0",
        "DELETE FROM ledger_folded", "UPDATE ledger_folded SET amount = 7", "TRUNCATE ledger_folded",
        "INSERT INTO ledger_folded VALUES ('tenant', 'bolt', 1, 7)",
    ):  # fmt: skip
        with pytest.raises(DBAPIError, match="refused"):
            async with engine.begin() as connection:
                await connection.execute(text(statement))
    assert all((await records.invariants(engine)).values())
