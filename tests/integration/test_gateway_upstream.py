"""The upstream client alone, against engines that break HTTP in every way it must survive."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controlplane.domain.outcome import AttemptOutcome
from controlplane.gateway.sweeper import Sweeper
from controlplane.gateway.upstream import (
    BODY_BYTES_MAX,
    Connection,
    SilentError,
    Upstream,
    UpstreamError,
)
from tests.gateway_world import (
    END,
    STREAM_HEAD,
    Script,
    ScriptedEngine,
    chunked,
    hangs,
    resets_after,
    sends,
    until,
    whole,
)

LINES = b"content-type: application/json\r\n"
FOUR = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"


@asynccontextmanager
async def client(*scripts: Script) -> AsyncIterator[tuple[ScriptedEngine, Upstream, Sweeper]]:
    sweeper = Sweeper(0.02)
    upstream = Upstream(sweeper)
    sweeping = asyncio.ensure_future(sweeper.run())
    async with ScriptedEngine(*scripts) as engine:
        try:
            yield engine, upstream, sweeper
        finally:
            upstream.close()
            sweeping.cancel()
            await asyncio.wait({sweeping})


async def ask(engine: ScriptedEngine, upstream: Upstream, seconds: float = 5.0) -> Connection:
    deadline = time.monotonic() + seconds
    return await upstream.post(engine.address, b"/v1/x", LINES, b'{"a":1}', deadline=deadline)


async def fetch(engine: ScriptedEngine, upstream: Upstream, seconds: float = 5.0) -> bytes:
    connection = await ask(engine, upstream, seconds)
    try:
        body = await connection.read()
    except BaseException:
        connection.abort()
        raise
    connection.release()
    return body


async def test_a_connection_is_kept_for_the_next_call() -> None:
    async with client(sends(FOUR)) as (engine, upstream, _):
        for _ in range(5):
            assert await fetch(engine, upstream) == b"abcd"
        assert engine.connections == 1
        assert engine.seen[0].head.startswith("POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")


async def test_every_cut_of_an_answer_reads_the_same() -> None:
    answer = STREAM_HEAD + chunked(b"first") + chunked(b"second") + END
    for cut in range(1, len(answer)):
        async with client(sends(answer[:cut], answer[cut:])) as (engine, upstream, _):
            connection = await ask(engine, upstream)
            pieces = [piece async for piece in _pieces(connection)]
            assert b"".join(pieces) == b"firstsecond"
            connection.release()


async def _pieces(connection: Connection) -> AsyncIterator[bytes]:
    while piece := await connection.next():
        yield piece


async def test_a_reset_at_any_byte_is_one_kind_of_failure() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"
    for cut in range(len(answer)):
        async with client(resets_after(answer[:cut])) as (engine, upstream, _):
            with pytest.raises(UpstreamError) as broken:
                await fetch(engine, upstream)
            assert broken.value.outcome is (
                AttemptOutcome.BROKEN_STREAM if cut else AttemptOutcome.CONNECT_ERROR
            )


async def test_a_stale_kept_connection_costs_one_more_try_and_no_failure() -> None:
    async with client(sends(FOUR), resets_after(b""), sends(FOUR)) as (engine, upstream, _):
        assert await fetch(engine, upstream) == b"abcd"
        # The kept connection breaks before any byte of an answer; a new one is tried.
        assert await fetch(engine, upstream) == b"abcd"
        assert engine.connections == 2
        assert len(engine.seen) == 3


async def test_a_kept_connection_that_breaks_after_a_byte_is_a_failure() -> None:
    async with client(sends(FOUR), resets_after(b"HTTP/1.1 2")) as (engine, upstream, _):
        await fetch(engine, upstream)
        with pytest.raises(UpstreamError) as broken:
            await fetch(engine, upstream)
        assert broken.value.outcome is AttemptOutcome.BROKEN_STREAM
        assert len(engine.seen) == 2


async def test_a_connection_whose_answer_says_close_is_not_kept() -> None:
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"
    async with client(sends(closing)) as (engine, upstream, _):
        await fetch(engine, upstream)
        await fetch(engine, upstream)
        assert engine.connections == 2


async def test_bytes_after_an_answer_poison_the_connection_not_the_next_answer() -> None:
    async with client(sends(FOUR, b"HTTP/1.1 200 OK\r\n"), sends(FOUR)) as (engine, upstream, _):
        assert await fetch(engine, upstream) == b"abcd"
        await asyncio.sleep(0.05)
        assert await fetch(engine, upstream) == b"abcd"
        assert engine.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["not http", "endless head", "many headers", "two lengths", "bad chunk"],
)
async def test_what_is_not_http_is_the_engines_fault(answer: bytes) -> None:
    async with client(hangs(answer)) as (engine, upstream, _):
        with pytest.raises(UpstreamError) as wrong:
            await fetch(engine, upstream)
        assert wrong.value.outcome is AttemptOutcome.SERVER_ERROR
        await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)


async def test_an_interim_answer_is_passed_over() -> None:
    async with client(sends(b"HTTP/1.1 100 Continue\r\n\r\n" + FOUR)) as (engine, upstream, _):
        assert await fetch(engine, upstream) == b"abcd"


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def closes(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: x\r\n\r\nall of it")
        await writer.drain()
        writer.close()

    async with client(closes) as (engine, upstream, _):
        assert await fetch(engine, upstream) == b"all of it"


async def test_silence_ends_at_the_deadline() -> None:
    async with client(hangs()) as (engine, upstream, _):
        started = time.monotonic()
        with pytest.raises(UpstreamError) as late:
            await fetch(engine, upstream, 0.1)
        assert late.value.outcome is AttemptOutcome.TIMEOUT
        assert 0.1 <= time.monotonic() - started < 1
        await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)


async def test_silence_in_the_middle_ends_after_the_longest_pause() -> None:
    async with client(hangs(STREAM_HEAD + chunked(b"x"))) as (engine, upstream, _):
        connection = await ask(engine, upstream)
        assert await connection.next() == b"x"
        connection.expect_flow(0.05)
        with pytest.raises(UpstreamError) as late:
            await connection.next()
        assert late.value.outcome is AttemptOutcome.TIMEOUT


async def test_nobody_listening_and_nobody_answering() -> None:
    async with client(sends(FOUR)) as (engine, upstream, _):
        address = engine.address
    with pytest.raises(UpstreamError) as refused:
        await upstream.post(address, b"/", LINES, b"", deadline=time.monotonic() + 1)
    assert refused.value.outcome is AttemptOutcome.CONNECT_ERROR


async def test_an_answer_that_is_too_large_is_refused() -> None:
    size = BODY_BYTES_MAX + 1_000_000

    async def large(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _piece in range(size // 1_000_000 + 1):
            writer.write(b"x" * 1_000_000)
            await writer.drain()

    async with client(large) as (engine, upstream, _):
        with pytest.raises(UpstreamError) as wrong:
            await fetch(engine, upstream, 30)
        assert wrong.value.outcome is AttemptOutcome.SERVER_ERROR


async def test_a_megabyte_passes() -> None:
    data = b"y" * 1_500_000
    async with client(whole(200, data)) as (engine, upstream, _):
        assert await fetch(engine, upstream) == data


async def test_a_slow_reader_stops_the_engine() -> None:
    sent = 0

    async def endless(_: object, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunked(b"z" * 60_000))
            await writer.drain()
            sent += 60_000

    async with client(endless) as (engine, upstream, _):
        connection = await ask(engine, upstream, 0.2)
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.3)
        # Although its deadline is past: the delay is the reader's.
        assert len(await connection.next()) < 2_000_000
        connection.abort()


async def test_an_idle_connection_is_closed_before_the_engine_does() -> None:
    async with client(sends(FOUR)) as (engine, upstream, sweeper):
        await fetch(engine, upstream)
        assert len(sweeper.watched) == 1
        sweeper.sweep(time.monotonic() + 10)
        assert not sweeper.watched
        await fetch(engine, upstream)
        assert engine.connections == 2


async def test_a_sweep_before_the_first_request_closes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Connection.begin

    def swept(connection: Connection, *arguments: Any, **more: Any) -> None:
        connection.sweep(time.monotonic())
        begin(connection, *arguments, **more)

    monkeypatch.setattr(Connection, "begin", swept)
    async with client(sends(FOUR)) as (engine, upstream, _):
        assert await fetch(engine, upstream) == b"abcd"


async def test_a_released_answer_may_end_a_little_later() -> None:
    begun = STREAM_HEAD + chunked(b"data: [DONE]\n\n")
    async with client(sends(begun, 0.05, END), sends(FOUR)) as (engine, upstream, _):
        connection = await ask(engine, upstream)
        await connection.next()
        connection.release()
        await until(lambda: connection.is_usable and upstream.idle(engine.address) == 1)
        assert await fetch(engine, upstream) == b"abcd"
        assert engine.connections == 1


async def test_cancellation_hangs_up() -> None:
    async with client(hangs()) as (engine, upstream, _):
        asking = asyncio.ensure_future(fetch(engine, upstream))
        await until(lambda: len(engine.seen) == 1)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)


async def test_silence_is_noticed_by_a_process_that_is_always_late() -> None:
    async with client(hangs(STREAM_HEAD + chunked(b"data: {}\n\n"))) as (engine, upstream, _):
        connection = await ask(engine, upstream)
        connection.expect_steady()
        await connection.next()
        looks, began = 0, time.monotonic()
        silent = asyncio.ensure_future(connection.next())
        # Nine tenths of the time are not its own.
        while not silent.done() and looks < 200:
            looks += 1
            await asyncio.sleep(0)
            connection.pardon(0.09)
            connection.look(began + 0.1 * looks)
        with pytest.raises(SilentError):
            await silent
        assert 90 < looks < 120
        connection.abort()


async def test_nobody_is_late_because_this_process_was_held_up() -> None:
    """What is late by the clock only may have been sent in time, and not been read yet."""

    class Late:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def sweep(self, now: float) -> None:
            self.calls.append("sweep")

        def look(self, now: float) -> None:
            self.calls.append("look")

        def pardon(self, late_s: float) -> None:
            assert 0.2 < late_s < 1
            self.calls.append("pardon")

    sweeper, late = Sweeper(period_s=0.1), Late()
    sweeper.watched.add(late)
    sweeper.looked.add(late)
    sweeping = asyncio.create_task(sweeper.run())
    await asyncio.sleep(0.02)
    late.calls.clear()
    time.sleep(0.25)
    await until(lambda: "sweep" in late.calls, 5.0)
    sweeping.cancel()
    assert late.calls[0] == "pardon"
    # A whole period of looks came before anybody was ended.
    assert late.calls.count("look") + late.calls.count("pardon") > 10
