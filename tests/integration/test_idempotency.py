"""A name of a tenant's for a call: one execution, and the same answer as long as it is kept."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ReplicaId, RequestId, TenantId
from controlplane.runtime import idempotency as module
from controlplane.runtime.idempotency import (
    Answer,
    Done,
    Fresh,
    Idempotency,
    InProgress,
    Mismatch,
)
from controlplane.store import replicas
from controlplane.store.journal import Journal
from controlplane.store.reaper import reap
from controlplane.store.session import make_engine
from tests.integration.store_world import ACME, BOLT, R1, R2, Rows

BODY, OTHER = b"b" * 32, b"o" * 32
HELLO = Answer(200, ((b"content-type", b"application/json"),), b"{}")


@pytest.fixture
async def replicas_(engine: AsyncEngine) -> AsyncIterator[tuple[Idempotency, Idempotency]]:
    pair = Idempotency(engine, R1), Idempotency(engine, R2)
    yield pair
    for one in pair:
        assert await one.drain(5) == 0


async def begin(at: Idempotency, request: str, digest: bytes = BODY, tenant: TenantId = ACME):
    return await at.begin(tenant, "key-1", digest, RequestId(request))


async def test_of_fifty_at_once_one_runs(replicas_: tuple[Idempotency, Idempotency]) -> None:
    found = await asyncio.gather(*(begin(replicas_[n % 2], f"q{n}") for n in range(50)))
    fresh = [answer for answer in found if isinstance(answer, Fresh)]
    assert len(fresh) == 1
    others = [answer for answer in found if not isinstance(answer, Fresh)]
    assert set(others) == {InProgress(fresh[0].request_id, module.IN_PROGRESS_RETRY_MS)}


async def test_the_answer_comes_again_where_it_is_kept(
    replicas_: tuple[Idempotency, Idempotency],
) -> None:
    one, two = replicas_
    fresh = await begin(one, "q1")
    assert isinstance(fresh, Fresh)
    one.finish(fresh, HELLO)
    assert await begin(one, "q2") == Done(RequestId("q1"), HELLO)
    assert await begin(one, "q2", OTHER) == Mismatch(RequestId("q1"))
    assert await one.drain(5) == 0
    assert await begin(two, "q3") == Done(RequestId("q1"), None), "known there, and not kept"
    assert await begin(two, "q3", OTHER) == Mismatch(RequestId("q1"))
    assert isinstance(await begin(two, "q4", tenant=BOLT), Fresh), "names are each tenant's own"


async def test_what_is_too_large_is_done_and_not_kept(
    replicas_: tuple[Idempotency, Idempotency],
) -> None:
    one, _ = replicas_
    fresh = await begin(one, "q1")
    assert isinstance(fresh, Fresh)
    one.finish(fresh, HELLO._replace(body=b"x" * (module.ANSWER_BYTES_MAX + 1)))
    # Before PostgreSQL is told, and after.
    assert await begin(one, "q2") == Done(RequestId("q1"), None)
    assert await one.drain(5) == 0
    assert await begin(one, "q2") == Done(RequestId("q1"), None)
    assert one.bytes == 0


async def test_a_failed_call_can_be_sent_again(
    replicas_: tuple[Idempotency, Idempotency],
) -> None:
    one, two = replicas_
    fresh = await begin(one, "q1")
    assert isinstance(fresh, Fresh)
    assert isinstance(await begin(two, "q2", OTHER), Mismatch)
    one.release(fresh)
    assert await one.drain(5) == 0
    again = await begin(two, "q2", OTHER)
    assert isinstance(again, Fresh)
    one.release(fresh)
    assert await one.drain(5) == 0
    assert isinstance(await begin(one, "q3", OTHER), InProgress), "an old end frees nothing"


async def test_memory_is_bounded_and_the_oldest_goes_first(engine: AsyncEngine) -> None:
    keeper = Idempotency(engine, R1, bytes_max=3 * module.ANSWER_BYTES_EXTRA)
    body = HELLO._replace(body=b"x" * 400, headers=())
    for number in range(3):
        fresh = await keeper.begin(ACME, f"key-{number}", BODY, RequestId(f"q{number}"))
        assert isinstance(fresh, Fresh)
        keeper.finish(fresh, body)
        if number == 1:
            assert isinstance(await keeper.begin(ACME, "key-0", BODY, RequestId("z")), Done)
    assert keeper.bytes == 2 * (400 + module.ANSWER_BYTES_EXTRA)
    assert await keeper.drain(5) == 0
    found = [await keeper.begin(ACME, f"key-{n}", BODY, RequestId("z")) for n in range(3)]
    assert found == [
        Done(RequestId("q0"), body), Done(RequestId("q1"), None), Done(RequestId("q2"), body)
    ]  # fmt: skip


async def test_keys_of_a_dead_replica_are_free_unless_the_call_succeeded(
    engine: AsyncEngine, replicas_: tuple[Idempotency, Idempotency], clean_database_url: str
) -> None:
    one, two = replicas_
    for number in range(3):
        await two.begin(ACME, f"key-{number}", BODY, RequestId(f"q{number}"))
    alive = await one.begin(ACME, "key-alive", BODY, RequestId("a"))
    assert isinstance(alive, Fresh)
    journal = Journal(clean_database_url)
    done, open_ = Rows("q0", replica=R2), Rows("q1", replica=R2)
    await journal._write([done.opened(), done.settled(0), open_.opened()])
    await journal._disconnect()
    await replicas.retire(engine, R2)
    await reap(engine, 3_600)
    assert await one.begin(ACME, "key-0", BODY, RequestId("z")) == Done(RequestId("q0"), None)
    assert isinstance(await one.begin(ACME, "key-1", BODY, RequestId("z1")), Fresh), "it was lost"
    assert isinstance(await one.begin(ACME, "key-2", BODY, RequestId("z2")), Fresh), "never opened"
    assert isinstance(await one.begin(ACME, "key-alive", BODY, RequestId("z3")), InProgress)


async def test_a_key_is_free_after_a_day(
    engine: AsyncEngine, replicas_: tuple[Idempotency, Idempotency], clean_database_url: str
) -> None:
    one, two = replicas_
    fresh = await begin(one, "q1")
    assert isinstance(fresh, Fresh)
    one.finish(fresh, HELLO)
    assert await one.drain(5) == 0
    with psycopg.connect(clean_database_url) as connection:
        left = connection.execute(
            "UPDATE idempotency_keys SET expires_at = expires_at - interval '24 h'"
            " RETURNING expires_at - clock_timestamp() < interval '1 s'"
        ).fetchone()
        assert left == (True,)
    again = await begin(two, "q2", OTHER)
    assert isinstance(again, Fresh), "an expired key is taken over"
    with psycopg.connect(clean_database_url) as connection:
        connection.execute("UPDATE idempotency_keys SET expires_at = now() - interval '1 s'")
    await reap(engine, 3_600)
    with psycopg.connect(clean_database_url) as connection:
        assert connection.execute("SELECT count(*) FROM idempotency_keys").fetchone() == (0,)
    kept = one._kept[ACME, "key-1"]
    one._kept[ACME, "key-1"] = kept._replace(expires_ms=0.0)
    assert isinstance(await begin(one, "q3"), Fresh)
    assert one.bytes == 0


async def test_an_outage_runs_nothing_and_loses_no_end() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:9/nothing")
    keeper = Idempotency(engine, ReplicaId("r"))
    with pytest.raises(StateUnavailable):
        await begin(keeper, "q1")
    fresh = Fresh(ACME, "key-1", BODY, RequestId("q1"))
    keeper.finish(fresh, HELLO)
    assert await begin(keeper, "q2") == Done(RequestId("q1"), HELLO), "what is here needs nobody"
    assert await keeper.drain(0.2) == 1
    await engine.dispose()
