"""The journal: what is appended is written once, whatever the text in it and whatever breaks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import RequestId, SloClassName
from controlplane.embedded.postgres import EmbeddedPostgres
from controlplane.store import budgets, journal, migrate, overview, records, workflows
from controlplane.store.journal import ENTRIES_MAX, Journal
from controlplane.store.session import make_engine, transaction
from tests.integration.store_world import ACME, R1, R2, Rows, populate


@contextlib.asynccontextmanager
async def running(url: str) -> AsyncIterator[Journal]:
    writer = Journal(url)
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_whole_life_of_a_call_is_written(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    made = await workflows.create(
        engine,
        tenant=ACME,
        kind="k",
        scope=Scope.CHAT,
        steps_expected=2,
        slo_class=SloClassName("interactive"),
        deadline_ms=60_000,
        budget_micro_usd=1_000,
    )
    assert made.budget_id is not None
    assert await budgets.lease(engine, "tenant:acme", R1, 500, 500) == 500
    assert await budgets.lease(engine, made.budget_id, R1, 500, 500) == 500
    rows = Rows("q1", workflow=made.id, workflow_budget=made.budget_id, step=1)
    async with running(clean_database_url) as writer:
        writer.opened(rows.opened(300))
        writer.decided(rows.decided())
        writer.decided(rows.decided(1)._replace(record={"a": [1, None, "ü\\\"'"]}))
        writer.attempted(rows.attempted(0, 'engine said "no\\thing",\n{} NULL'))
        writer.attempted(rows.attempted(1))
        writer.settled(rows.settled(120))
        assert await writer.drain(5) == 0
        assert writer.requests_settled == 1

    found = await records.get_request(engine, RequestId("q1"))
    assert found is not None
    call = found.request
    assert (call.state, call.settled_micro_usd, call.reserved_micro_usd) == ("succeeded", 120, 300)
    assert (call.prompt_tokens, call.cached_tokens, call.completion_tokens) == (1000, 128, 50)
    assert (call.ttft_ms, call.tpot_ms, call.e2e_ms, call.queue_ms) == (31.5, 11.25, 600.0, 0.0)
    assert abs(call.opened_at - rows.at) < timedelta(microseconds=2)
    assert call.is_stream
    assert call.reason is None
    assert [a.detail for a in found.attempts] == ['engine said "no\\thing",\n{} NULL', ""]
    assert [d.record for d in found.decisions] == [None, {"a": [1, None, "ü\\\"'"]}]
    assert found.decisions[0].cost_micro_usd == 12.5

    for budget_id, limit in (("tenant:acme", 1_000_000), (made.budget_id, 1_000)):
        account = await budgets.read(engine, budget_id)
        assert account is not None
        assert account.limit == limit
        assert (account.spent, account.reserved) == (120, 380)
    after = await workflows.get(engine, made.id, ACME)
    assert after is not None
    assert (after.steps_done, after.spent_micro_usd) == (1, 120)
    assert await records.invariants(engine) == {"I1": True, "I2": True}

    summary = await records.demo_summary(engine, rows.at - timedelta(seconds=1))
    assert summary.requests == {"succeeded": 1}
    assert summary.requests_open == 0
    assert (summary.settled_micro_usd, summary.wasted_micro_usd) == (120, 120)
    assert summary.cached_token_ratio == 0.128
    assert summary.ttft_ms.p99 == 31.5
    assert summary.micro_usd_per_success is None
    spend = {entry.tenant_id: entry for entry in await records.spend_by_tenant(engine)}
    assert (spend[ACME].requests, spend[ACME].settled_micro_usd) == (1, 120)
    assert len((await overview.list_decisions(engine)).items) == 2


async def test_a_refusal_has_a_decision_and_no_request(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    rows = Rows("q1")
    async with running(clean_database_url) as writer:
        writer.decided(rows.decided()._replace(verdict="refuse", reason="queue_full"))
        await writer.drain(5)
    assert await records.get_request(engine, RequestId("q1")) is None
    assert [d.reason for d in await records.get_decisions(engine, "q1")] == ["queue_full"]
    summary = await records.demo_summary(engine, rows.at)
    assert summary.refusals == {"queue_full": 1}


async def test_a_charge_beyond_the_slice_is_taken_from_the_account(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    """As after a reaping of a replica that was only cut off; above the limit nothing is charged."""
    assert await budgets.lease(engine, "tenant:bolt", R2, 3, 3) == 3
    assert await budgets.lease(engine, "tenant:bolt", R1, 2, 2) == 2
    async with running(clean_database_url) as writer:
        for name, charged in (("a", 6), ("b", 2)):
            rows = Rows(name, tenant="bolt")
            writer.opened(rows.opened())
            writer.settled(rows.settled(charged))
            await writer.drain(5)
        assert (writer.charges_dropped, writer.entries_dropped) == (1, 0)
    account = await budgets.read(engine, "tenant:bolt")
    assert account is not None
    # 2 of the 6 from the slice, 4 from the 5 that were free; the 1 left does not pay for 2.
    assert (account.spent, account.reserved) == (6, 3)
    settled = {r.id: r.settled_micro_usd for r in (await records.list_requests(engine)).items}
    assert settled == {"a": 6, "b": 0}
    assert await records.invariants(engine) == {"I1": True, "I2": True}


async def test_bad_rows_are_left_out_and_the_others_are_written(
    engine: AsyncEngine, clean_database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await budgets.lease(engine, "tenant:acme", R1, 1_000, 1_000)
    writer = Journal(clean_database_url)
    for number in range(50):
        rows = Rows(f"q{number}", tenant="nobody" if number == 17 else ACME)
        opened, decided = rows.opened(), rows.decided()
        if number == 23:
            decided = decided._replace(record={"secret": "\x00"})
        if number == 31:
            opened = opened._replace(model="\ud800")
        settled = rows.settled(1)
        if number == 42:
            settled = settled._replace(prompt_tokens=2**40)
        writer.opened(opened)
        writer.decided(decided)
        writer.settled(settled)
    task = asyncio.create_task(writer.run())
    assert await writer.drain(20) == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    states: dict[str, str] = {}
    cursor = None
    while True:
        found = await records.list_requests(engine, limit=20, cursor=cursor)
        states.update({item.id: item.state for item in found.items})
        cursor = found.next_cursor
        if cursor is None:
            break
    assert set(states) == {f"q{n}" for n in range(50)} - {"q17", "q31"}
    # Its usage could not be written, so it is the reaper's to end.
    assert states.pop("q42") == "open"
    assert set(states.values()) == {"succeeded"}
    assert len(await records.get_decisions(engine, "q22")) == 1
    assert len(await records.get_decisions(engine, "q23")) == 0
    assert (await records.invariants(engine))["I2"]
    assert writer.entries_dropped == 4
    logged = " ".join(str(record.__dict__) for record in caplog.records)
    assert "q17" in logged
    assert "secret" not in logged
    assert "nobody" not in logged


HOSTILE = st.text(
    alphabet=st.sampled_from("a\"\\{},\n\tüNUL '\x7f😀"), max_size=12
) | st.sampled_from(["NULL", "", "\\", '"', "{}", "\\n", "\\u0041"])


async def test_any_text_comes_back_as_it_went_in(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    writer = Journal(clean_database_url)
    numbers = iter(range(10**9))

    async def roundtrip(texts: list[str]) -> None:
        name = f"q{next(numbers)}"
        rows = Rows(name)
        await writer._flush(
            [rows.opened(), *(rows.attempted(n, detail) for n, detail in enumerate(texts))]
        )
        found = await records.get_request(engine, RequestId(name))
        assert found is not None
        assert [attempt.detail for attempt in found.attempts] == texts

    samples: list[list[str]] = []

    @settings(max_examples=100)
    @given(st.lists(HOSTILE, min_size=1, max_size=5))
    def collect(texts: list[str]) -> None:
        samples.append(texts)

    collect()
    for sample in samples:
        await roundtrip(sample)
    await writer._disconnect()


async def test_batches_larger_than_a_flush_are_cut(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    async with running(clean_database_url) as writer:
        for number in range(1_500):
            rows = Rows(f"q{number}")
            writer.opened(rows.opened())
            writer.settled(rows.settled(0))
        assert writer.entries_waiting == 3_000
        assert await writer.drain(20) == 0
        assert writer.flushes == 3_000 / journal.FLUSH_ENTRIES_MAX
    assert await records.invariants(engine) == {"I1": True, "I2": True}
    summary = await records.demo_summary(engine, datetime.now(UTC) - timedelta(hours=1))
    assert summary.requests == {"succeeded": 1_500}


async def test_a_few_entries_are_written_soon_without_a_full_batch(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    async with running(clean_database_url) as writer:
        for name in ("a", "b"):
            writer.opened(Rows(name).opened())
            async with asyncio.timeout(30):
                while writer.entries_waiting:
                    await asyncio.sleep(0.01)
        assert writer.flushes == 2
    assert len((await records.list_requests(engine)).items) == 2


def test_the_journal_says_when_it_is_full() -> None:
    writer = Journal("postgresql://u:p@127.0.0.1:1/none")
    row = Rows("q").opened()
    for _ in range(ENTRIES_MAX - 1):
        writer.opened(row)
    assert not writer.is_full
    writer.opened(row)
    assert writer.is_full


async def test_connections_killed_all_the_time_lose_and_double_nothing(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    calls = 2_000
    assert await budgets.lease(engine, "tenant:acme", R1, calls, calls) == calls
    killed = 0
    async with running(clean_database_url) as writer:
        with psycopg.connect(clean_database_url, autocommit=True) as killer:
            for number in range(calls):
                rows = Rows(f"q{number}")
                writer.opened(rows.opened(1))
                writer.settled(rows.settled(1))
                if number % 100 == 50:
                    await asyncio.sleep(0.03)
                    killed += len(
                        killer.execute(
                            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                        ).fetchall()
                    )
        assert await writer.drain(30) == 0
        assert writer.entries_dropped == 0
    assert killed > 0
    await engine.dispose()
    account = await budgets.read(engine, "tenant:acme")
    assert account is not None
    assert (account.spent, account.reserved) == (calls, 0)
    assert await records.invariants(engine) == {"I1": True, "I2": True}


def kill_tree(pid: int) -> None:
    """The server and its backends: one that lives on for a moment could still take a flush."""
    server = psutil.Process(pid)
    for process in (*server.children(recursive=True), server):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


async def test_postgres_killed_in_mid_flush_and_started_again(folder: Path) -> None:
    """The whole server dies at once; the journal keeps its entries and writes them afterwards."""
    server = EmbeddedPostgres(folder / "postgres")
    url = await server.start()
    await asyncio.to_thread(migrate.upgrade, url)
    engine = make_engine(url)
    await populate(engine)
    assert await budgets.lease(engine, "tenant:acme", R1, 600, 600) == 600
    async with running(url) as writer:
        for number in range(600):
            rows = Rows(f"q{number}")
            writer.opened(rows.opened(1))
            writer.settled(rows.settled(1))
            if number == 300:
                await asyncio.sleep(0.02)
                assert server.pid is not None
                kill_tree(server.pid)
                await server.wait()
        await asyncio.sleep(0.3)
        assert writer.entries_waiting > 0
        assert await server.start() == url
        assert await writer.drain(30) == 0
    account = await budgets.read(engine, "tenant:acme")
    assert account is not None
    assert (account.spent, account.reserved) == (600, 0)
    assert await records.invariants(engine) == {"I1": True, "I2": True}
    async with transaction(engine) as connection:
        assert await connection.scalar(text("SELECT count(*) FROM ledger")) == 600
    await engine.dispose()
    await server.stop()
