"""The server's limits over raw sockets, and every part of uvicorn's protocol that is relied on."""

import asyncio
import json
import time

import pytest

from tests.gateway_world import (
    DONE,
    Client,
    RoundRobinGate,
    ScriptedEngine,
    World,
    answer,
    finish,
    role,
    running,
    sends,
    stream,
    token,
    until,
    whole,
)

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer hw-tenant-test\r\n"


def gate(*addresses: tuple[str, int]) -> RoundRobinGate:
    return RoundRobinGate(list(addresses) or [("127.0.0.1", 1)])


async def refused(client: Client) -> tuple[int, str]:
    """Status and code of an answer after which the server hangs up."""
    got = await client.answer()
    assert got.headers["x-request-id"] == got.headers["x-headway-decision"] != ""
    assert await client.reader.read() == b""
    client.writer.close()
    return got.status, got.json()["error"]["code"]


async def raw(world: World, *pieces: bytes) -> Client:
    client = await world.dial()
    for piece in pieces:
        client.writer.write(piece)
        await client.writer.drain()
        await asyncio.sleep(0.01)
    return client


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"x: " + b"y" * 40_960 + b"\r\n\r\n"],
        [HEAD + b"x: " + b"y" * 20_000, b"y" * 20_000],
        [HEAD] + [b"x: " + b"y" * 8_000 + b"\r\n"] * 5,
        [HEAD + b"x: y\r\n" * 101 + b"\r\n"],
        [b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
    ],
    ids=["one header", "endless header", "many reads", "101 headers", "long path"],
)
async def test_a_large_head_is_refused(pieces: list[bytes]) -> None:
    async with running(gate()) as world:
        client = await raw(world, *pieces)
        assert await refused(client) == (431, "request_too_large")
        assert world.metrics.connections_refused.value(("large head",)) == 1
        assert world.gate.calls == []


async def test_a_head_at_the_limit_is_taken_with_a_large_body_right_behind() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        body = json.dumps({**CHAT, "user": "u" * 200_000}).encode()
        lines = b"x: " + b"y" * 30_000 + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
        client = await raw(world, HEAD + lines + body)
        assert (await client.answer()).status == 200
        client.writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"bad header\r\n\r\n",
        HEAD + b"x: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
    ids=["two lengths", "two content-lengths", "negative", "no colon", "NUL", "TLS", "version"],
)
async def test_a_malformed_head_is_refused_in_the_envelope(request_bytes: bytes) -> None:
    async with running(gate()) as world:
        client = await raw(world, request_bytes)
        assert await refused(client) == (400, "invalid_request")
        assert world.gate.calls == []


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD, HEAD + b"x: y"])
async def test_a_slow_head_is_refused(sent: bytes) -> None:
    async with running(gate()) as world:
        client = await raw(world, sent)
        await until(lambda: len(world.server.server_state.connections) == 1)
        world.sweeper.sweep(time.monotonic() + 4)
        assert len(world.server.server_state.connections) == 1
        world.sweeper.sweep(time.monotonic() + 6)
        assert await refused(client) == (408, "invalid_request")


async def test_a_slow_second_head_is_refused() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        client = await world.dial()
        await client.send(CHAT)
        assert (await client.answer()).status == 200
        client.writer.write(b"POST /v1/chat")
        await client.writer.drain()
        await asyncio.sleep(0.05)
        world.sweeper.sweep(time.monotonic() + 6)
        assert await refused(client) == (408, "invalid_request")


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/workflows"])
async def test_a_slow_body_is_refused(path: bytes) -> None:
    async with running(gate()) as world:
        head = HEAD.replace(b"/v1/chat/completions", path)
        client = await raw(world, head + b"content-length: 100\r\n\r\n{")
        world.sweeper.sweep(time.monotonic() + 14)
        assert len(world.server.server_state.connections) == 1
        world.sweeper.sweep(time.monotonic() + 16)
        if path == b"/v1/chat/completions":
            assert await refused(client) == (408, "invalid_request")
        else:
            # The application has answered without reading it; only the connection ends.
            assert (await client.answer()).body == b"fallback"
            assert await client.reader.read() == b""
            client.writer.close()


async def test_an_idle_connection_is_closed_in_the_end() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        client = await world.dial()
        await client.send(CHAT)
        await client.answer()
        world.sweeper.sweep(time.monotonic() + 70)
        await client.send(CHAT)
        assert (await client.answer()).status == 200
        world.sweeper.sweep(time.monotonic() + 160)
        assert await client.reader.read() == b""
        client.writer.close()


async def test_calls_on_one_connection_follow_each_other() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        client = await world.dial()
        for path in ("/v1/chat/completions", "/v1/other", "/v1/chat/completions?x=1"):
            await client.send(CHAT, path)
            got = await client.answer()
            assert got.status == 200
            assert "date" in got.headers
            assert "server" not in got.headers
        client.writer.close()
        assert len(world.gate.calls) == 2


async def test_pipelined_calls_are_answered_in_order() -> None:
    texts = [f"answer {number}" for number in range(5)]
    scripts = [whole(200, answer(text)) for text in texts]
    async with ScriptedEngine(*scripts) as engine, running(gate(engine.address)) as world:
        client = await world.dial()
        body = json.dumps(CHAT).encode()
        one = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        client.writer.write(one * 5)
        for text in texts:
            got = await client.answer()
            assert got.json()["choices"][0]["message"]["content"] == text
        client.writer.close()


async def test_a_body_in_many_pieces_and_chunks_is_one_body() -> None:
    body = json.dumps({**CHAT, "user": "u" * 300_000}).encode()
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        pieces = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
        client = await raw(world, HEAD + b"content-length: %d\r\n\r\n" % len(body), *pieces)
        assert (await client.answer()).status == 200
        client.writer.close()
        chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
        client = await raw(
            world, HEAD + b"transfer-encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"
        )
        assert (await client.answer()).status == 200
        client.writer.close()


async def test_a_body_that_says_that_it_is_too_large_is_refused_before_it_comes() -> None:
    async with running(gate()) as world:
        client = await raw(world, HEAD + b"content-length: 1000000000\r\n\r\n")
        async with asyncio.timeout(5):
            got = await client.answer()
        assert (got.status, got.json()["error"]["code"]) == (413, "request_too_large")
        assert world.gate.calls == []
        client.writer.close()


async def test_a_chunked_body_without_end_is_refused_when_it_is_too_large() -> None:
    async with running(gate()) as world:
        piece = b"10000\r\n%s\r\n" % (b"x" * 65_536)
        client = await raw(world, HEAD + b"transfer-encoding: chunked\r\n\r\n")
        client.writer.write(piece * 70)
        got = await client.answer()
        assert (got.status, got.json()["error"]["code"]) == (413, "request_too_large")
        client.writer.transport.abort()
        await asyncio.sleep(0)


async def test_expect_100_continue_is_answered() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        body = json.dumps(CHAT).encode()
        lines = b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
        client = await raw(world, HEAD + lines)
        assert (await client.head())[0] == 100
        client.writer.write(body)
        assert (await client.answer()).status == 200
        client.writer.close()


async def test_http_1_0_gets_its_answer_and_the_end() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(gate(engine.address)) as world,
    ):
        body = json.dumps(CHAT).encode()
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
        client = await raw(world, head + b"content-length: %d\r\n\r\n" % len(body) + body)
        got = await client.answer()
        assert (got.status, got.json()) == (200, answer())
        assert await client.reader.read() == b""
        client.writer.close()


async def test_connection_close_is_obeyed() -> None:
    async with (
        ScriptedEngine(sends(stream(role(), token(), finish(), DONE))) as engine,
        running(gate(engine.address)) as world,
    ):
        client = await world.dial()
        await client.send({**CHAT, "stream": True}, connection="close")
        got = await client.answer()
        assert got.headers["connection"] == "close"
        assert got.body.endswith(DONE)
        assert await client.reader.read() == b""
        client.writer.close()


async def test_shutting_down_lets_a_running_stream_end() -> None:
    slow = sends(stream(role(), token())[:-5], 0.4, b"0\r\n\r\n")
    finished = stream(role(), token(), finish(), DONE)
    cut = finished.index(b"data: [DONE]") - 6
    async with (
        ScriptedEngine(sends(finished[:cut], 0.4, finished[cut:]), slow) as engine,
        running(gate(engine.address)) as world,
    ):
        client = await world.dial()
        await client.send({**CHAT, "stream": True})
        await client.head()
        first = await client.chunk()
        world.server.should_exit = True
        rest = b""
        while piece := await client.chunk():
            rest += piece
        assert (first + rest).endswith(DONE)
        client.writer.close()
        await until(lambda: len(world.gate.settlements) == 1)
