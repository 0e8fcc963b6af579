"""Slices of budgets in memory over a real PostgreSQL: never more than the limit, and no lost refill."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.budget import Hold, Unit
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ReplicaId
from controlplane.runtime import accounts as module
from controlplane.runtime.accounts import UNBOUNDED, Accounts
from controlplane.store import budgets, replicas
from controlplane.store.session import make_engine

pytestmark = pytest.mark.anyio

World = tuple[AsyncEngine, ReplicaId]


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[World]:
    engine = make_engine(postgres_url)
    replica = ReplicaId(f"r-{secrets.token_hex(4)}")
    await replicas.register(engine, replica)
    yield engine, replica
    await engine.dispose()


async def budget(engine: AsyncEngine, limit: int, unit: Unit = Unit.MICRO_USD) -> str:
    name = f"tenant:{secrets.token_hex(4)}" + (":tokens" if unit is Unit.TOKENS else "")
    async with engine.begin() as connection:
        await connection.execute(
            text('INSERT INTO budgets (id, unit, "limit") VALUES (:id, :unit, :limit)'),
            {"id": name, "unit": str(unit), "limit": limit},
        )
    return name


def usd(name: str, amount: int) -> Hold:
    return Hold(name, Unit.MICRO_USD, amount)


async def quiet(accounts: Accounts) -> None:
    """Until no refill is under way."""
    async with asyncio.timeout(30):
        while accounts._tasks:
            await asyncio.sleep(0.005)


async def reserved(engine: AsyncEngine, name: str) -> int:
    record = await budgets.read(engine, name)
    assert record is not None
    return record.reserved


async def test_many_at_once_get_what_the_limit_pays_for(world: World) -> None:
    engine, replica = world
    name = await budget(engine, 1_000)
    accounts = Accounts(engine, replica, slice_micro_usd=150)
    holds = (usd(name, 90),)
    answers = await asyncio.gather(*(accounts.reserve_all(holds) for _ in range(64)))
    assert answers.count(None) == 11
    assert set(answers) == {None, holds[0]}
    free, held = accounts.totals()[name]
    assert held == 990
    assert await reserved(engine, name) == free + held <= 1_000


async def test_a_cancelled_caller_loses_no_money(world: World) -> None:
    engine, replica = world
    name = await budget(engine, 10_000)
    accounts = Accounts(engine, replica, slice_micro_usd=400)
    task = asyncio.create_task(accounts.reserve_all((usd(name, 300),)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await quiet(accounts)
    assert accounts.totals() == {name: (400, 0)}
    assert await reserved(engine, name) == 400, "what was leased is what is held"


async def test_one_account_short_gives_the_others_back(world: World) -> None:
    engine, replica = world
    rich, poor = await budget(engine, 10_000), await budget(engine, 50)
    tokens = await budget(engine, 10_000, Unit.TOKENS)
    accounts = Accounts(engine, replica, slice_micro_usd=100, slice_tokens=200)
    holds = (usd(rich, 80), Hold(tokens, Unit.TOKENS, 70), usd(poor, 80))
    assert await accounts.reserve_all(holds) == holds[2]
    await quiet(accounts)
    assert [held for _, held in accounts.totals().values()] == [0, 0, 0]
    for name in (rich, tokens):
        assert accounts.totals()[name][0] == await reserved(engine, name) > 0


async def test_a_call_cancelled_at_its_second_account_gives_the_first_back(world: World) -> None:
    engine, replica = world
    first, second = await budget(engine, 10_000), await budget(engine, 10_000)
    accounts = Accounts(engine, replica, slice_micro_usd=100)
    assert await accounts.reserve_all((usd(first, 10),)) is None
    await quiet(accounts)
    task = asyncio.create_task(accounts.reserve_all((usd(first, 10), usd(second, 10))))
    await asyncio.sleep(0)
    assert accounts.totals()[first][1] == 20, "it waits for the second"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert accounts.totals()[first][1] == 10
    await quiet(accounts)


async def test_an_outage_holds_nothing() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:9/nothing")
    accounts = Accounts(engine, ReplicaId("r"), 100)
    holds = (usd("tenant:a", 1),)
    answers = await asyncio.gather(
        *(accounts.reserve_all(holds) for _ in range(3)), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {StateUnavailable}
    assert accounts.totals() == {"tenant:a": (0, 0)}
    await engine.dispose()


async def test_two_replicas_share_a_budget_and_give_it_back(world: World) -> None:
    engine, one = world
    two = ReplicaId(f"r-{secrets.token_hex(4)}")
    await replicas.register(engine, two)
    name = await budget(engine, 1_000)
    first, second = Accounts(engine, one, 700), Accounts(engine, two, 700)
    small = (usd(name, 100),)
    assert await first.reserve_all(small) is None
    assert first.totals()[name] == (150, 100), "near its limit, a quarter of what is left"
    large = (usd(name, 700),)
    assert await second.reserve_all(large) is None
    assert await second.reserve_all(small) == small[0], "the first holds the rest as its slice"
    assert first.settle_all(small, micro_usd=40, tokens=9).charges == ((name, 40, 1),)
    await first.surrender_all()
    assert await second.reserve_all(small) is None
    # The charge of 40 is still to be journalled and stays reserved until then.
    assert await reserved(engine, name) == 40 + sum(second.totals()[name])


async def test_idle_slices_return(world: World) -> None:
    engine, replica = world
    name = await budget(engine, 10_000)
    accounts = Accounts(engine, replica, slice_micro_usd=500)
    holds = (usd(name, 100),)
    assert await accounts.reserve_all(holds) is None
    accounts.settle_all(holds, micro_usd=0, tokens=0)
    await accounts.surrender_idle()
    assert accounts.totals()[name] == (500, 0), "it was used just now"
    accounts._accounts[name].used_ms -= module.IDLE_MS_MAX + 1
    await accounts.surrender_idle()
    assert name not in accounts.totals()
    assert await reserved(engine, name) == 0


async def test_a_slice_that_runs_low_is_refilled_before_anyone_waits(world: World) -> None:
    engine, replica = world
    name = await budget(engine, 100_000)
    accounts = Accounts(engine, replica, slice_micro_usd=400)
    assert await accounts.reserve_all((usd(name, 290),)) is None
    assert accounts.totals()[name] == (110, 290)
    assert not accounts._tasks, "more than a quarter is free"
    assert await accounts.reserve_all((usd(name, 20),)) is None
    await quiet(accounts)
    assert accounts.totals()[name] == (490, 310)


async def test_a_charge_is_what_the_poorest_account_of_its_unit_can_pay(world: World) -> None:
    engine, replica = world
    rich, poor = await budget(engine, 10_000), await budget(engine, 100)
    tokens = await budget(engine, 10_000, Unit.TOKENS)
    accounts = Accounts(engine, replica, slice_micro_usd=1_000, slice_tokens=1_000)
    holds = (usd(rich, 60), usd(poor, 60), Hold(tokens, Unit.TOKENS, 60))
    assert await accounts.reserve_all(holds) is None
    assert accounts.charge_at_most(holds, Unit.MICRO_USD) == 60
    assert accounts.charge_at_most(holds[:1], Unit.TOKENS) == UNBOUNDED
    settlement = accounts.settle_all(holds, micro_usd=70, tokens=80)
    assert settlement == (60, 80, ((rich, 60, 1), (poor, 60, 1), (tokens, 80, 1)))
    with pytest.raises(ValueError, match="is settled"):
        accounts.settle_all(holds, micro_usd=0, tokens=0)
    with pytest.raises(ValueError, match="is settled"):
        accounts.settle_all((usd("tenant:nobody", 1),), micro_usd=0, tokens=0)


async def test_a_hold_grows_by_what_is_free_and_asks_for_more(world: World) -> None:
    engine, replica = world
    rich, poor = await budget(engine, 100_000), await budget(engine, 100)
    accounts = Accounts(engine, replica, slice_micro_usd=200)
    holds = (usd(rich, 100), usd(poor, 100))
    assert await accounts.reserve_all(holds) is None
    assert accounts.try_extend(holds[0], 60)
    assert not accounts.try_extend(holds[0], 60)
    await quiet(accounts)
    assert accounts.try_extend(holds[0], 60), "the refill has come"
    raised = (usd(rich, 220), holds[1])
    before = accounts.totals()[rich]
    assert accounts.try_extend_all(raised, micro_usd=10, tokens=0) is None
    assert accounts.totals()[rich] == before, "all or nothing"
    grown = accounts.try_extend_all(raised[:1], micro_usd=10, tokens=0)
    assert grown == (usd(rich, 230),)
    await quiet(accounts)
    assert accounts.settle_all((*grown, holds[1]), micro_usd=100, tokens=0).micro_usd == 100
    assert [held for _, held in accounts.totals().values()] == [0, 0]
