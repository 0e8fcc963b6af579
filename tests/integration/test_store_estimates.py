"""Sizes shared by replicas over PostgreSQL: added up, faded, read at the start, forgotten in the end."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.runtime.estimate_keeper import EstimateKeeper
from controlplane.runtime.estimates import BUCKETS, Estimates
from controlplane.store import estimates as store
from controlplane.store.estimates import SizeRecord
from controlplane.store.session import make_engine, transaction
from tests.decision_builders import call

ACME, SMALL = TenantId("acme"), ModelName("small")


class OneCall:
    prompt_bytes = 400
    n = 1


@pytest.fixture
async def engine(clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(clean_database_url)
    yield engine
    await engine.dispose()


def learn(estimates: Estimates, lengths: list[int]) -> None:
    for length in lengths:
        usage = Usage(100, 0, length, is_estimated=False)
        estimates.learn(call(tenant=ACME, model=SMALL), OneCall(), usage)


def median(estimates: Estimates) -> int:
    return estimates.completion_tokens(ACME, SMALL, 10_000, None, Scope.CHAT)


async def test_replicas_share_what_they_learn_and_a_later_one_begins_with_it(
    engine: AsyncEngine,
) -> None:
    replicas = [Estimates(), Estimates()]
    keepers = [EstimateKeeper(engine, each) for each in replicas]
    alone = Estimates()
    for _ in range(4):
        for replica, length in zip(replicas, (100, 2_000), strict=True):
            learn(replica, [length] * 10)
            learn(alone, [length] * 10)
        for keeper in keepers:
            await keeper.share()
    await keepers[0].share()
    alone.learn_steps(ACME, Scope.RESEARCH, SMALL, 5)
    late = Estimates()
    await EstimateKeeper(engine, late).read_all()
    for estimates in (*replicas, late):
        assert median(estimates) == median(alone)
        assert estimates.completion_tokens_high(
            ACME, SMALL, 10_000, Scope.CHAT
        ) == alone.completion_tokens_high(ACME, SMALL, 10_000, Scope.CHAT)
    async with transaction(engine) as connection:
        rows = (
            await connection.execute(
                text("SELECT scope, tenant_id, observations FROM size_estimates ORDER BY 1, 2")
            )
        ).all()
    assert [tuple(row) for row in rows] == [("", "", 80), ("chat", "", 80), ("chat", "acme", 80)]


async def test_what_can_not_be_written_is_written_later(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    estimates = Estimates()
    learn(estimates, [300] * 20)
    nowhere = make_engine("postgresql://127.0.0.1:1/none")
    with pytest.raises(StateUnavailable):
        await EstimateKeeper(nowhere, estimates).share()
    await nowhere.dispose()
    learn(estimates, [300] * 20)
    await EstimateKeeper(engine, estimates).share()
    records, _ = await store.changed(engine, None, 10)
    assert {record.observations for record in records} == {40}
    assert {round(sum(record.weights), 6) for record in records} == {
        round(sum(0.5 ** (age / 64) for age in range(40)), 6)
    }


async def test_pages_reach_every_row_and_old_ones_are_forgotten(engine: AsyncEngine) -> None:
    records = [
        SizeRecord(
            model=f"m{number}",
            scope="",
            tenant_id="",
            quantity="steps",
            weights=tuple([1.0] * BUCKETS),
            observations=BUCKETS,
        )
        for number in range(7)
    ]
    await store.add(engine, records, 64)
    seen: list[str] = []
    since = None
    while True:
        found, since = await store.changed(engine, since, 3)
        seen += [record.model for record in found]
        if len(found) < 3:
            break
    assert sorted(set(seen)) == [f"m{number}" for number in range(7)]
    # A histogram of another shape is not added to, it is replaced.
    await store.add(
        engine,
        [SizeRecord(model="m1", scope="", tenant_id="", quantity="steps", weights=(2.0,), observations=1)],
        64,
    )  # fmt: skip
    async with transaction(engine) as connection:
        await connection.execute(
            text(
                "UPDATE size_estimates SET updated_at = now() - interval '31 days' WHERE model > 'm1'"
            )
        )
    assert await store.prune(engine) == 5
    left, _ = await store.changed(engine, None, 10)
    assert {record.model: len(record.weights) for record in left} == {"m0": BUCKETS, "m1": 1}
