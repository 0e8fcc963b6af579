"""Slices of budgets in memory over a real PostgreSQL: never more than the limit, and no lost refill."""

import asyncio
import secrets

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId
from controlplane.runtime import accounts as module
from controlplane.runtime.accounts import Accounts
from controlplane.store import budgets, replicas
from controlplane.store.session import make_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(postgres_url: str):
    engine = make_engine(postgres_url)
    replica = ReplicaId(f"r-{secrets.token_hex(4)}")
    await replicas.register(engine, replica)
    yield engine, replica
    await engine.dispose()


async def budget(engine: AsyncEngine, limit: int) -> str:
    name = f"tenant:{secrets.token_hex(4)}"
    async with engine.begin() as connection:
        await connection.execute(
            text("INSERT INTO budgets (id, limit_micro_usd) VALUES (:id, :limit)"),
            {"id": name, "limit": limit},
        )
    return name


async def test_many_at_once_get_what_the_limit_pays_for(world) -> None:
    engine, replica = world
    name = await budget(engine, 1_000)
    accounts = Accounts(engine, replica, slice_micro_usd=150)
    answers = await asyncio.gather(*(accounts.reserve_refilling(name, 90) for _ in range(64)))
    assert sum(answers) == 11
    assert accounts.totals()[name] == (10, 990)
    record = await budgets.read(engine, name)
    assert record is not None
    assert record.reserved_micro_usd == 1_000


async def test_a_cancelled_caller_loses_no_money(world) -> None:
    engine, replica = world
    name = await budget(engine, 1_000)
    accounts = Accounts(engine, replica, slice_micro_usd=400)
    task = asyncio.create_task(accounts.reserve_refilling(name, 300))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while accounts.totals().get(name) != (400, 0):
            await asyncio.sleep(0.01)
    record = await budgets.read(engine, name)
    assert record is not None
    assert record.reserved_micro_usd == 400, "what was leased is what is held"


async def test_two_replicas_share_a_budget_and_give_it_back(world) -> None:
    engine, one = world
    two = ReplicaId(f"r-{secrets.token_hex(4)}")
    await replicas.register(engine, two)
    name = await budget(engine, 1_000)
    first, second = Accounts(engine, one, 700), Accounts(engine, two, 700)
    assert await first.reserve_refilling(name, 100)
    assert await second.reserve_refilling(name, 300)
    assert not await second.reserve_refilling(name, 100), "the first holds the rest as its slice"
    assert first.settle(name, 100, 40) == 40
    await first.surrender_all()
    assert await second.reserve_refilling(name, 600)
    record = await budgets.read(engine, name)
    assert record is not None
    # The charge of 40 is still to be journalled and stays reserved until then.
    assert second.totals()[name] == (60, 900)
    assert record.reserved_micro_usd == 40 + 60 + 900


async def test_idle_slices_return(world) -> None:
    engine, replica = world
    name = await budget(engine, 1_000)
    accounts = Accounts(engine, replica, slice_micro_usd=500)
    assert await accounts.reserve_refilling(name, 100)
    accounts.settle(name, 100, 0)
    await accounts.surrender_idle()
    assert accounts.totals()[name] == (500, 0), "it was used just now"
    accounts._accounts[name].used_ms -= module.IDLE_MS_MAX + 1
    await accounts.surrender_idle()
    assert name not in accounts.totals()
    record = await budgets.read(engine, name)
    assert record is not None
    assert record.reserved_micro_usd == 0
