"""Streams that wait for a seat: what they are told meanwhile, and how they end."""

import asyncio
import gc
import json
import socket

import openai
import pytest

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.outcome import AttemptOutcome, RequestState
from controlplane.gateway.turn import Turn
from controlplane.runtime.call import Call
from tests.gateway_world import (
    DONE,
    KEY,
    RoundRobinGate,
    ScriptedEngine,
    World,
    answer,
    finish,
    resets_after,
    role,
    running,
    sends,
    stream,
    token,
    until,
    used,
    whole,
)

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
STREAM = {**CHAT, "stream": True}
EVENTS = (role(), token("a"), token("b"), finish(), used(16, 2), DONE)
SHOWN = b"".join((*EVENTS[:4], DONE))


def closed_gate(**members: object) -> RoundRobinGate:
    gate = RoundRobinGate(**members)  # type: ignore[arg-type]
    gate.gate_open.clear()
    return gate


async def tell(world: World, position: int, wait_ms: int) -> None:
    """What the queue does every few seconds."""
    await until(lambda: bool(world.gate.calls))
    on_waiting = world.gate.calls[0].on_waiting
    assert on_waiting is not None
    on_waiting(position, wait_ms)


async def test_a_waiting_stream_is_told_its_place_and_then_gets_its_answer() -> None:
    async with ScriptedEngine(sends(stream(*EVENTS))) as engine:
        gate = closed_gate(engines=[engine.address], limits_told=((b"x-ratelimit-a", b"1"),))
        async with running(gate) as world, world.dialled() as client:
            await client.send(STREAM)
            await until(lambda: bool(gate.calls))
            on_waiting = gate.calls[0].on_waiting
            await tell(world, 3, 1_200)
            status, headers = await client.head()
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            assert headers["x-headway-queue-position"] == "3"
            assert headers["x-headway-predicted-wait-ms"] == "1200"
            assert headers["x-ratelimit-a"] == "1"
            assert headers["x-request-id"] == headers["x-headway-decision"]
            assert await client.chunk() == b": queued position=3 wait_ms=1200\n\n"
            await tell(world, 1, 400)
            assert await client.chunk() == b": queued position=1 wait_ms=400\n\n"
            assert gate.first_tokens == []
            gate.gate_open.set()
            body = b""
            while piece := await client.chunk():
                body += piece
            assert body == SHOWN
            # The call has left the queue: a late word of the pump's reaches nobody.
            assert gate.calls[0].on_waiting is None
            assert on_waiting is not None
            on_waiting(1, 400)
            await client.send(STREAM)
            assert (await client.answer()).body == SHOWN
        [first, _] = gate.settlements
        assert first.state is RequestState.SUCCEEDED
        assert first.ticket_id == headers["x-request-id"]
        assert world.metrics.heartbeats.value(("mock",)) == 2


async def test_a_call_that_is_no_stream_is_told_nothing() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = closed_gate(engines=[engine.address])
        async with running(gate) as world, world.dialled() as client:
            await client.send(CHAT)
            await until(lambda: bool(gate.calls))
            assert gate.calls[0].on_waiting is None
            gate.gate_open.set()
            assert (await client.answer()).json() == answer()


@pytest.mark.parametrize(
    "refuse",
    [
        Refuse(Reason.QUEUE_FULL, "no seat became free", 2_000),
        Refuse(Reason.DEADLINE_UNREACHABLE, "the deadline passed"),
        Refuse(Reason.SHED_OVERLOAD, "others go first", 1_000),
    ],
)
async def test_a_refusal_after_the_head_is_the_streams_last_event(refuse: Refuse) -> None:
    gate = closed_gate(engines=[("", 0)], refusal=refuse)
    async with running(gate) as world, world.dialled() as client:
        await client.send(STREAM)
        await tell(world, 9, 8_000)
        assert (await client.head())[0] == 200
        gate.gate_open.set()
        pieces = []
        while piece := await client.chunk():
            pieces.append(piece)
        [comment, last] = b"".join(pieces).split(b"\n\n")[:-1]
        assert comment.startswith(b": queued")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["message"]) == (refuse.reason, refuse.detail)
        assert gate.refusals == [refuse]
        assert world.metrics.requests.value(("chat", "mock", "gold", "refused", refuse.reason)) == 1
        # The connection goes on to serve.
        gate.refusal = None
        await client.send({**CHAT, "model": 5})
        assert (await client.head())[0] == 400


async def test_an_engine_that_fails_before_its_first_token_is_replaced_behind_an_open_head() -> (
    None
):
    async with (
        ScriptedEngine(resets_after(b"")) as broken,
        ScriptedEngine(sends(stream(*EVENTS))) as sound,
    ):
        gate = closed_gate(engines=[broken.address, sound.address])
        async with running(gate) as world, world.dialled() as client:
            await client.send(STREAM)
            await tell(world, 1, 10)
            gate.gate_open.set()
            got = await client.answer()
    assert got.body == b": queued position=1 wait_ms=10\n\n" + SHOWN
    assert [a[2] for a in gate.attempts] == [AttemptOutcome.CONNECT_ERROR, AttemptOutcome.OK]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (whole(400, b'{"error": {"message": "too long",\n "code": 400}}'), "invalid_request"),
        (whole(500, {"error": {}}), "upstream_error"),
        (whole(503, {"error": {}}), "no_capacity"),
    ],
)
async def test_an_engines_refusal_behind_an_open_head_is_one_event(
    script: object, code: object
) -> None:
    async with ScriptedEngine(script) as engine:  # type: ignore[arg-type]
        gate = closed_gate(engines=[engine.address], retries_max=0)
        async with running(gate) as world, world.dialled() as client:
            await client.send(STREAM)
            await tell(world, 1, 10)
            gate.gate_open.set()
            got = await client.answer()
    assert got.status == 200
    [_, last] = got.body.split(b"\n\n")[:-1]
    assert b"\n" not in last
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
    assert gate.settlements[0].state is RequestState.FAILED


async def test_a_client_that_leaves_after_a_heartbeat_leaves_the_queue() -> None:
    gate = closed_gate(engines=[("", 0)])
    async with running(gate) as world, world.dialled() as client:
        await client.send(STREAM)
        await tell(world, 2, 100)
        await client.head()
        on_waiting = gate.calls[0].on_waiting
        client.writer.transport.abort()
        await until(lambda: gate.waiting_cancelled == 1, 1.0)
        assert on_waiting is not None
        on_waiting(1, 100)
        assert world.metrics.heartbeats.value(("mock",)) == 1


async def test_a_client_that_does_not_read_misses_heartbeats_and_costs_no_memory() -> None:
    gate = closed_gate(engines=[("", 0)])
    async with running(gate) as world, world.dialled() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(STREAM)
        await until(lambda: bool(gate.calls))
        [link] = world.server.server_state.connections
        # The kernel's buffers are filled sooner when they are small.
        for transport, option in (
            (link.transport, socket.SO_SNDBUF),
            (client.writer.transport, socket.SO_RCVBUF),
        ):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 4_096)
        on_waiting = gate.calls[0].on_waiting
        assert on_waiting is not None
        last = -1.0
        for _ in range(400):
            for _ in range(1_000):
                on_waiting(1, 10)
            await asyncio.sleep(0)
            told = world.metrics.heartbeats.value(("mock",))
            if told == last:
                break
            last = told
        else:
            pytest.fail("heartbeats were sent for ever")
        assert link.transport.get_write_buffer_size() < 200_000
        client.writer.transport.abort()
        await until(lambda: gate.waiting_cancelled == 1)


async def test_a_shutdown_ends_an_open_stream_with_an_error() -> None:
    gate = closed_gate(engines=[("", 0)])
    async with running(gate) as world, world.dialled() as client:
        await client.send(STREAM)
        await tell(world, 2, 100)
        await client.head()
        [task] = world.server.server_state.tasks
        task.cancel()
        pieces = []
        while piece := await client.chunk():
            pieces.append(piece)
        assert json.loads(pieces[-1].removeprefix(b"data: "))["error"]["code"] == "no_capacity"
        assert b"[DONE]" not in b"".join(pieces)


async def test_the_official_sdk_reads_past_heartbeats() -> None:
    async with ScriptedEngine(sends(stream(*EVENTS))) as engine:
        gate = closed_gate(engines=[engine.address])
        async with (
            running(gate) as world,
            openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
        ):

            async def wait_a_while() -> None:
                for position in (3, 2, 1):
                    await tell(world, position, 100)
                    await asyncio.sleep(0.01)
                gate.gate_open.set()

            waiting = asyncio.ensure_future(wait_a_while())
            texts = []
            async for chunk in await client.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": "hi"}], stream=True
            ):
                texts += [choice.delta.content or "" for choice in chunk.choices]
            await waiting
    assert "".join(texts) == "ab"


async def test_the_official_sdk_raises_a_refusal_that_follows_heartbeats() -> None:
    gate = closed_gate(engines=[("", 0)], refusal=Refuse(Reason.QUEUE_FULL, "no seat", 2_000))
    async with (
        running(gate) as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
    ):

        async def wait_a_while() -> None:
            await tell(world, 1, 100)
            gate.gate_open.set()

        waiting = asyncio.ensure_future(wait_a_while())
        stream_ = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError) as refused:
            await anext(aiter(stream_))
        await waiting
    assert refused.value.code == "queue_full"


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_an_answered_call_is_no_work_for_the_garbage_collector(
    body: dict[str, object],
) -> None:
    """A call holds its prompt: in a cycle of references, megabytes would wait for a collection."""
    script = sends(stream(*EVENTS)) if body is STREAM else whole(200, answer())
    async with ScriptedEngine(script) as engine:
        gate = RoundRobinGate([engine.address], keeps=False)
        async with running(gate) as world, world.dialled() as client:
            gc.collect()
            gc.disable()
            try:
                for _ in range(5):
                    await client.send(body)
                    await client.answer()
                await asyncio.sleep(0.05)
                kinds = [type(one) for one in gc.get_objects()]
            finally:
                gc.enable()
            # The connection keeps the last turn until the next one.
            assert (kinds.count(Call), kinds.count(Turn)) == (0, 1)
