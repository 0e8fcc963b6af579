"""Calls with an idempotency key, through the whole gateway, with keys in a real PostgreSQL."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import openai
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.ids import ReplicaId
from controlplane.domain.outcome import RequestState
from controlplane.runtime.idempotency import Idempotency
from controlplane.store import catalog, replicas
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from tests.gateway_world import (
    DONE,
    KEY,
    SECOND_KEY,
    TERMS,
    RoundRobinGate,
    ScriptedEngine,
    answer,
    chunked,
    finish,
    hangs,
    role,
    running,
    sends,
    stream,
    token,
    until,
    used,
    whole,
)
from tests.gateway_world import STREAM_HEAD as ENGINE_STREAM_HEAD
from tests.integration.store_world import CLUSTER

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
STREAM = {**CHAT, "stream": True}
EVENTS = (role(), token("a"), token("b"), finish(), used(16, 2), DONE)
SHOWN = b"".join((*EVENTS[:4], DONE))


@dataclass(frozen=True)
class Keys:
    """Two replicas' views of the keys of one database."""

    engine: AsyncEngine
    here: Idempotency
    elsewhere: Idempotency

    async def written(self) -> None:
        async with asyncio.timeout(30):
            while self.here._unwritten or self.elsewhere._unwritten:
                await asyncio.sleep(0.005)


@pytest.fixture
async def keys(clean_database_url: str) -> AsyncIterator[Keys]:
    engine = make_engine(clean_database_url)
    cluster = CLUSTER.replace("id: acme", "id: t1").replace("id: bolt", "id: t2")
    await catalog.apply_cluster(engine, parse_cluster(cluster))
    names = ReplicaId("r1"), ReplicaId("r2")
    for name in names:
        await replicas.register(engine, name)
    made = Keys(engine, *(Idempotency(engine, name) for name in names))
    yield made
    await made.written()
    await engine.dispose()


def key() -> str:
    return f"key-{secrets.token_hex(4)}"


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_call_sent_again_is_answered_again_and_not_run(
    keys: Keys, body: dict[str, object]
) -> None:
    name = key()
    script = sends(stream(*EVENTS)) if body is STREAM else whole(200, answer())
    async with ScriptedEngine(script) as engine:
        gate = RoundRobinGate([engine.address], limits_told=((b"x-ratelimit-a", b"1"),))
        async with running(gate, idempotency=keys.here) as world:
            first = await world.post(body, idempotency_key=name)
            again = [await world.post(body, idempotency_key=name) for _ in range(2)]
    assert first.status == 200
    assert "x-headway-idempotent-replay" not in first.headers
    for second in again:
        assert (second.status, second.body) == (first.status, first.body)
        assert second.headers["x-headway-idempotent-replay"] == "true"
        assert second.headers["x-ratelimit-a"] == "1"
        for same in ("content-type", "x-request-id", "x-headway-decision"):
            assert second.headers[same] == first.headers[same]
    assert len(engine.seen) == len(gate.settlements) == 1
    calls = world.metrics.idempotent_calls
    assert (calls.value(("fresh",)), calls.value(("replayed",))) == (1, 2)


async def test_the_same_key_with_another_body_is_refused(keys: Keys) -> None:
    name = key()
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(RoundRobinGate([engine.address]), idempotency=keys.here) as world,
    ):
        first = await world.post(CHAT, idempotency_key=name)
        for other in ({**CHAT, "max_tokens": 9}, {**CHAT, "user": "u"}, STREAM):
            got = await world.post(other, idempotency_key=name)
            assert (got.status, got.json()["error"]["code"]) == (422, "idempotency_mismatch")
            assert got.headers["x-should-retry"] == "false"
            assert first.headers["x-request-id"] in got.json()["error"]["message"]
        # The order of members is not the body.
        same = dict(reversed(CHAT.items()))
        assert (await world.post(same, idempotency_key=name)).body == first.body
    assert len(engine.seen) == 1


async def test_a_key_belongs_to_one_tenant(keys: Keys) -> None:
    name = key()
    async with (
        ScriptedEngine(whole(200, answer("one")), whole(200, answer("two"))) as engine,
        running(RoundRobinGate([engine.address]), idempotency=keys.here) as world,
    ):
        await world.post(CHAT, idempotency_key=name)
        other = await world.post(CHAT, idempotency_key=name, authorization=f"Bearer {SECOND_KEY}")
    assert other.json()["choices"][0]["message"]["content"] == "two"
    assert "x-headway-idempotent-replay" not in other.headers


async def test_a_call_that_is_under_way_is_not_run_twice(keys: Keys) -> None:
    name = key()
    go = asyncio.Event()

    async def waits(seen: object, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await whole(200, answer())(seen, writer)  # type: ignore[arg-type]

    async with ScriptedEngine(waits) as engine:
        gate = RoundRobinGate([engine.address])
        async with (
            running(gate, idempotency=keys.here) as world,
            running(gate, idempotency=keys.elsewhere) as other,
        ):
            first = asyncio.ensure_future(world.post(CHAT, idempotency_key=name))
            await until(lambda: len(engine.seen) == 1)
            for place in (world, other):
                got = await place.post(CHAT, idempotency_key=name)
                assert (got.status, got.json()["error"]["code"]) == (409, "idempotency_in_progress")
                assert (got.headers["x-should-retry"], got.headers["retry-after"]) == ("true", "1")
            go.set()
            assert (await first).status == 200
    assert len(engine.seen) == 1


async def test_another_replica_knows_the_call_and_not_its_answer(keys: Keys) -> None:
    name = key()
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = RoundRobinGate([engine.address])
        async with (
            running(gate, idempotency=keys.here) as world,
            running(gate, idempotency=keys.elsewhere) as other,
        ):
            first = await world.post(CHAT, idempotency_key=name)
            await keys.written()
            got = await other.post(CHAT, idempotency_key=name)
    assert (got.status, got.json()["error"]["code"]) == (409, "response_not_stored")
    assert got.headers["x-should-retry"] == "false"
    assert first.headers["x-request-id"] in got.json()["error"]["message"]
    assert len(engine.seen) == 1


async def test_an_answer_too_large_to_keep_is_not_made_again(keys: Keys) -> None:
    name = key()
    async with (
        ScriptedEngine(whole(200, answer("x" * 1_100_000))) as engine,
        running(RoundRobinGate([engine.address]), idempotency=keys.here) as world,
    ):
        first = await world.post(CHAT, idempotency_key=name)
        assert len(first.body) > 1_100_000
        await keys.written()
        got = await world.post(CHAT, idempotency_key=name)
    assert (got.status, got.json()["error"]["code"]) == (409, "response_not_stored")
    assert len(engine.seen) == 1


async def test_what_failed_or_was_refused_can_be_sent_again(keys: Keys) -> None:
    name = key()
    broken = sends(ENGINE_STREAM_HEAD + chunked(role() + token()), 0.05, b"0\r\n\r\n")
    scripts = [whole(500, {"error": {}}), whole(400, {"error": {"message": "x"}}), broken]
    async with ScriptedEngine(*scripts, sends(stream(*EVENTS))) as engine:
        gate = RoundRobinGate([engine.address], retries_max=0)
        async with running(gate, idempotency=keys.here) as world:
            gate.refusal = Refuse(Reason.QUEUE_FULL, "full", 100)
            statuses = []
            for _ in range(5):
                got = await world.post(STREAM, idempotency_key=name)
                statuses.append(got.status)
                gate.refusal = None
                await keys.written()
            again = await world.post(STREAM, idempotency_key=name)
    # The fourth one broke off after its first token.
    assert statuses == [429, 502, 400, 200, 200]
    assert again.headers["x-headway-idempotent-replay"] == "true"
    assert again.body == SHOWN


async def test_a_client_that_leaves_gives_its_key_back(keys: Keys) -> None:
    name = key()
    async with ScriptedEngine(hangs(), whole(200, answer())) as engine:
        gate = RoundRobinGate([engine.address])
        async with running(gate, idempotency=keys.here) as world:
            async with world.dialled() as client:
                await client.send(CHAT, idempotency_key=name)
                await until(lambda: len(engine.seen) == 1)
            await until(lambda: len(gate.settlements) == 1)
            await keys.written()
            assert (await world.post(CHAT, idempotency_key=name)).status == 200
    assert [one.state for one in gate.settlements] == [
        RequestState.CANCELLED,
        RequestState.SUCCEEDED,
    ]


async def test_a_client_that_leaves_while_its_key_is_looked_up_leaves_no_key_behind(
    keys: Keys,
) -> None:
    name = key()
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = RoundRobinGate([engine.address])
        async with running(gate, idempotency=keys.here) as world:
            # The row is taken by somebody who has not said yet what becomes of it.
            async with keys.engine.connect() as connection, connection.begin() as transaction:
                await connection.execute(
                    text(
                        "INSERT INTO idempotency_keys (tenant_id, key, body_digest, request_id,"
                        " replica_id, expires_at) VALUES ('t1', :key, '', 'x', 'r1', now())"
                    ),
                    {"key": name},
                )
                async with world.dialled() as client:
                    await client.send(CHAT, idempotency_key=name)
                    await asyncio.sleep(0.1)
                await transaction.rollback()
            assert gate.calls == []
            await asyncio.sleep(0.05)
            await keys.written()
            got = await world.post(CHAT, idempotency_key=name)
    assert got.status == 200


async def test_a_replay_after_heartbeats_holds_the_answer_only(keys: Keys) -> None:
    name = key()
    async with ScriptedEngine(sends(stream(*EVENTS))) as engine:
        gate = RoundRobinGate([engine.address])
        gate.gate_open.clear()
        async with running(gate, idempotency=keys.here) as world, world.dialled() as client:
            await client.send(STREAM, idempotency_key=name)
            await until(lambda: bool(gate.calls))
            on_waiting = gate.calls[0].on_waiting
            assert on_waiting is not None
            on_waiting(1, 10)
            gate.gate_open.set()
            first = await client.answer()
            again = await world.post(STREAM, idempotency_key=name)
    assert first.body == b": queued position=1 wait_ms=10\n\n" + SHOWN
    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert again.body == SHOWN


async def test_an_answer_from_the_cache_is_kept_for_its_key_too(keys: Keys) -> None:
    body = {**CHAT, "temperature": 0}
    first_key, second_key = key(), key()
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = RoundRobinGate([engine.address], terms=replace(TERMS, cache_ttl_s=60))
        async with running(gate, idempotency=keys.here) as world:
            made = await world.post(body, idempotency_key=first_key)
            hit = await world.post(body, idempotency_key=second_key)
            replays = [await world.post(body, idempotency_key=k) for k in (first_key, second_key)]
    assert hit.headers["x-headway-cache"] == "hit"
    assert [one.body for one in replays] == [made.body, hit.body]
    assert replays[1].headers["x-request-id"] == hit.headers["x-request-id"]
    assert len(gate.settlements) == 2


async def test_an_answer_cut_at_its_budget_is_an_answer(keys: Keys) -> None:
    name = key()
    pieces = [piece for _ in range(5) for piece in (chunked(token()), 0.005)]
    async with ScriptedEngine(sends(ENGINE_STREAM_HEAD, chunked(role()), *pieces, 9.0)) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=2)
        async with running(gate, idempotency=keys.here) as world:
            first = await world.post(STREAM, idempotency_key=name)
            again = await world.post(STREAM, idempotency_key=name)
    assert first.body.endswith(DONE)
    assert again.body == first.body
    assert len(engine.seen) == 1


@pytest.mark.parametrize("name", ["", "with space", "k" * 256, "schlüssel"])
async def test_a_key_that_is_none_is_refused(keys: Keys, name: str) -> None:
    async with (
        running(RoundRobinGate([("", 0)]), idempotency=keys.here) as world,
        world.dialled() as client,
    ):
        data = b'{"model":"mock","messages":[{}]}'
        client.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
            b"idempotency-key: %s\r\ncontent-length: %d\r\n\r\n"
            % (KEY.encode(), name.encode(), len(data))
            + data
        )
        got = await client.answer()
    assert (got.status, got.json()["error"]["param"]) == (400, "idempotency-key")


async def test_without_a_store_of_keys_no_call_with_one_runs() -> None:
    async with running(RoundRobinGate([("", 0)])) as world:
        got = await world.post(CHAT, idempotency_key="k")
        assert (got.status, got.json()["error"]["param"]) == (400, "idempotency-key")


async def test_no_call_runs_while_keys_can_not_be_looked_up() -> None:
    engine = make_engine("postgresql://nobody:x@127.0.0.1:1/none")
    idempotency = Idempotency(engine, ReplicaId("r1"))
    gate = RoundRobinGate([("", 0)])
    async with running(gate, idempotency=idempotency) as world:
        got = await world.post(CHAT, idempotency_key="k")
        assert (got.status, got.json()["error"]["code"]) == (503, "state_unavailable")
        assert got.headers["retry-after"] == "1"
        assert gate.calls == []
    await idempotency.drain(0.01)
    await engine.dispose()


async def test_the_official_sdk_repeats_a_call_with_its_key(keys: Keys) -> None:
    """The SDK asks again after a lost answer, with the same headers: it must not pay twice."""
    async with ScriptedEngine(whole(200, answer("once"))) as engine:
        gate = RoundRobinGate([engine.address])
        async with (
            running(gate, idempotency=keys.here) as world,
            openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
        ):
            headers = {"Idempotency-Key": key()}
            texts = []
            for _ in range(2):
                made = await client.chat.completions.create(
                    model="mock",
                    messages=[{"role": "user", "content": "hi"}],
                    extra_headers=headers,
                )
                texts.append(made.choices[0].message.content)
            with pytest.raises(openai.UnprocessableEntityError) as mismatch:
                await client.chat.completions.create(
                    model="mock",
                    messages=[{"role": "user", "content": "ho"}],
                    extra_headers=headers,
                )
    assert texts == ["once", "once"]
    assert mismatch.value.code == "idempotency_mismatch"
    assert len(engine.seen) == 1
