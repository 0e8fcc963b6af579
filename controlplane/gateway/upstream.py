"""HTTP/1.1 client for engines: kept connections, no task and no timer per call.

It knows HTTP and nothing of tokens. Every way in which an engine can fail is one exception with the
outcome that breakers understand.
"""

import asyncio
import time
from asyncio import AbstractEventLoop, Future, Transport
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

from controlplane.domain.errors import HeadwayError
from controlplane.domain.outcome import AttemptOutcome
from controlplane.gateway.sweeper import Sweeper

CONNECT_S_MAX: Final = 2.0
# With the sweeper's period, less than the 5 s after which vLLM closes an idle connection.
IDLE_S_MAX: Final = 3.0
IDLE_PER_ENGINE_MAX: Final = 256
HEAD_BYTES_MAX: Final = 32 * 1024
HEADERS_MAX: Final = 100
BODY_BYTES_MAX: Final = 32 * 1024 * 1024
# Unread bytes of an answer above which its connection is not read any more.
BUFFER_BYTES_HIGH: Final = 256 * 1024
# After its last byte that matters, how long an answer may take to end and keep its connection.
TAIL_S_MAX: Final = 5.0
COPY_BYTES_MAX: Final = 64 * 1024
# A transfer of KV is over by then: vLLM gives up on an engine that does not answer after 5 s.
ABORT_DEFERRED_S_MAX: Final = 10.0
# A stream is silent after this many of its own mean gaps, and not sooner than this.
SILENT_GAPS: Final = 20
SILENT_S_MIN: Final = 1.0
# So long a silence makes one look at the engine's port; it is enough once the port refuses.
SUSPECT_S: Final = 0.25
KNOCK_S_MAX: Final = 1.0

# Host and port, and whole header lines that every request there carries.
Address = tuple[str, int] | tuple[str, int, bytes]

_NO_BODY_BELOW: Final = 200


class UpstreamError(HeadwayError):
    """An engine can not be reached, did not answer in time, or does not speak HTTP."""

    def __init__(self, outcome: AttemptOutcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        # Not a byte of the call can have reached an engine.
        self.is_unsent = False


class SilentError(UpstreamError):
    """An engine that was saying something says nothing any more. The connection can be read on."""


class LeavingError(SilentError):
    """The engine is well and is to be left. The connection can be read on."""


@dataclass(slots=True)
class _Pool:
    """`flowing` are streams whose silence is watched; `is_refusing`: the port took no connection lately."""

    address: Address
    host_header: bytes
    idle: "deque[Connection]"
    flowing: "set[Connection]" = field(default_factory=set)
    is_refusing: bool = False
    knocking: "asyncio.Task[None] | None" = None

    def knock(self) -> None:
        """See whether the engine still takes connections, unless that is being seen already."""
        if self.knocking is None:
            self.knocking = asyncio.get_running_loop().create_task(self._knock())

    async def _knock(self) -> None:
        try:
            async with asyncio.timeout(KNOCK_S_MAX):
                _, writer = await asyncio.open_connection(self.address[0], self.address[1])
            writer.close()
            self.is_refusing = False
        except TimeoutError:
            self.is_refusing = False
        except OSError:
            self.is_refusing = True
        finally:
            self.knocking = None
        if self.is_refusing:
            now = time.monotonic()
            for connection in tuple(self.flowing):
                connection.look(now)


class Connection(asyncio.Protocol):
    """One connection, and the one exchange on it at a time."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_content_length",
        "_deadline",
        "_failure",
        "_has_body",
        "_head_bytes",
        "_headers",
        "_idle_since",
        "_is_closed",
        "_is_closing_on_byte",
        "_is_complete",
        "_is_fetching_kv",
        "_is_keep_alive",
        "_is_leaving",
        "_is_paused",
        "_is_released",
        "_is_silent",
        "_loop",
        "_parser",
        "_pieces",
        "_pieces_looked",
        "_pieces_since_s",
        "_pool",
        "_quiet_since_s",
        "_received",
        "_silence_s",
        "_sweeper",
        "_timeout_words",
        "_transport",
        "_usual_s",
        "_waiter",
        "content_type",
        "has_head",
        "retry_after_ms",
        "status",
    )  # fmt: skip

    def __init__(self, loop: AbstractEventLoop, sweeper: Sweeper, pool: _Pool) -> None:
        self._loop = loop
        self._sweeper = sweeper
        self._pool = pool
        self._transport: Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: Future[None] | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._received = 0
        self._headers = 0
        self._head_bytes = 0
        self._content_length = -1
        self._idle_since = 0.0
        self._deadline = 0.0
        self._silence_s = 0.0
        # What arrived since the flow is watched: pieces, those at the last look, and when it last grew.
        self._pieces = self._pieces_looked = 0
        self._pieces_since_s = self._quiet_since_s = 0.0
        # A silence of so long is not usual.
        self._usual_s = SILENT_S_MIN
        self._is_silent = self._is_leaving = False
        self._timeout_words = ""
        self._failure: UpstreamError | None = None
        self._has_body = False
        self._is_closed = False
        self._is_closing_on_byte = False
        self._is_complete = True
        self._is_fetching_kv = False
        self._is_keep_alive = True
        self._is_paused = False
        self._is_released = True
        self.has_head = False
        self.status = 0
        self.content_type = b""
        self.retry_after_ms: int | None = None

    # ------------------------------------------------------------ as an exchange's owner sees it

    def begin(
        self, request: tuple[bytes, ...], deadline: float, *, is_fetching_kv: bool = False
    ) -> None:
        """Send a request. By `deadline` (monotonic seconds) its head and first byte must arrive.

        With `is_fetching_kv`, one that is late is hung up as by `abort_after_first_byte`.
        """
        assert self._transport is not None
        self._chunks.clear()
        self._buffered = self._received = self._headers = self._head_bytes = 0
        self._content_length = -1
        self._failure = None
        self._is_complete = self._is_keep_alive = self._is_released = False
        self._is_closing_on_byte = self._has_body = False
        self.has_head = False
        self.status = 0
        self.content_type = b""
        self.retry_after_ms = None
        self._deadline = deadline
        self._silence_s = 0.0
        self._timeout_words = "no answer in time"
        self._is_fetching_kv = is_fetching_kv
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)

    @property
    def is_untouched(self) -> bool:
        """Nothing of an answer has arrived."""
        return self._received == 0

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self.has_head:
            await self._wait()

    async def next(self) -> bytes:
        """The bytes that have arrived since the last call, waiting for some; empty at the end."""
        while not self._chunks:
            if self._is_complete:
                return b""
            if self._is_leaving:
                self._is_leaving = False
                raise LeavingError(AttemptOutcome.CANCELLED, "the engine is drained")
            await self._wait()
            if self._is_silent and not self._chunks:
                self._is_silent = False
                raise SilentError(AttemptOutcome.TIMEOUT, "the engine fell silent")
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def read(self) -> bytes:
        """The whole body."""
        while not self._is_complete:
            if self._buffered > BODY_BYTES_MAX:
                raise UpstreamError(
                    AttemptOutcome.SERVER_ERROR,
                    f"an answer of more than {BODY_BYTES_MAX} bytes",
                )
            self._resume()
            await self._wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        return data

    def expect_flow(self, silence_s: float) -> None:
        """From now on, no two pieces of the answer may be more than `silence_s` apart."""
        self._silence_s = silence_s
        self._timeout_words = f"nothing arrived for {silence_s:g} s"
        self._deadline = self._sweeper.now + silence_s + self._sweeper.period_s

    def expect_steady(self) -> None:
        """From now on, `next` raises SilentError when the answer stops flowing as it did so far.

        An answer that has not begun is late only when its engine's port refuses.
        """
        self._pieces = self._pieces_looked = 1 if self._chunks else 0
        self._pieces_since_s = self._quiet_since_s = time.monotonic()
        self._usual_s = 0.0 if self._pieces else SILENT_S_MIN
        self._pool.flowing.add(self)
        self._sweeper.looked.add(self)

    def leave(self) -> None:
        """Let `next` raise LeavingError once, if the answer is still on its way."""
        self._is_leaving = True
        self._wake()

    def look(self, now: float) -> None:
        """Whether nothing has come for longer than is usual. A reader that is not waiting is the slow one."""
        pieces = self._pieces
        if pieces != self._pieces_looked or self._is_paused or self._waiter is None:
            self._pieces_looked, self._quiet_since_s = pieces, now
            if pieces:
                self._usual_s = SILENT_GAPS * (now - self._pieces_since_s) / pieces
            return
        quiet_s = now - self._quiet_since_s
        if quiet_s < SUSPECT_S:
            return
        if quiet_s < self._usual_s:
            return
        if self._pool.is_refusing or (pieces and quiet_s >= SILENT_S_MIN):
            self._quiet_since_s = now
            self._is_silent = True
            self._wake()
        else:
            self._pool.knock()

    def pardon(self, late_s: float) -> None:
        """Leave `late_s` out of the silence so far; a process that is always late still notices one."""
        self._quiet_since_s += late_s

    def release(self) -> None:
        """The owner needs no more. A complete answer's connection is kept for the next call."""
        if self._is_released:
            return
        self._is_released = True
        self._unwatch()
        if self._is_complete:
            self._keep()
            return
        # The end has most likely been sent already; wait a little for it in the background.
        self._chunks.clear()
        self._buffered = 0
        self._resume()
        self._deadline = self._sweeper.now + TAIL_S_MAX

    def abort(self) -> None:
        """Hang up, so that the engine stops working on the answer."""
        if self._is_released:
            return
        self._is_released = True
        self.shut()

    def abort_after_first_byte(self) -> None:
        """Hang up when the answer's body begins: no engine may lose a call while it fetches KV for it.

        The head says nothing: engines send it before they have computed a token. After ABORT_DEFERRED_S_MAX
        no transfer is under way any more, whatever the answer, and it is hung up.
        """
        if self._is_released:
            return
        self._is_released = True
        if self._has_body:
            self.shut()
            return
        self._is_closing_on_byte = True
        self._deadline = self._sweeper.now + ABORT_DEFERRED_S_MAX

    def shut(self) -> None:
        """Close whatever state it is in."""
        self._is_keep_alive = False
        self._forget()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    @property
    def is_usable(self) -> bool:
        """Idle, open, and not about to be closed by the engine."""
        return (
            self._is_keep_alive
            and not self._is_closed
            and self._transport is not None
            and not self._transport.is_closing()
            and self._sweeper.now - self._idle_since < IDLE_S_MAX
        )

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("Transport", transport)
        # Until its first request begins it is as good as kept; a sweep may come in between.
        self._idle_since = time.monotonic()
        self._sweeper.watched.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            # Bytes that nobody asked for: whatever they are, the next answer would be misread.
            self._is_keep_alive = False
            self.shut()
            return
        self._received += len(data)
        self._pieces += 1
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(AttemptOutcome.SERVER_ERROR, f"not HTTP: {error}")
            return
        except httptools.HttpParserUpgrade:
            self._fail(AttemptOutcome.SERVER_ERROR, "an upgrade that nobody asked for")
            return
        if not self.has_head and self._head_bytes > HEAD_BYTES_MAX:
            self._fail(AttemptOutcome.SERVER_ERROR, f"a head of more than {HEAD_BYTES_MAX} bytes")
            return
        if self._silence_s:
            self._deadline = self._sweeper.now + self._silence_s + self._sweeper.period_s
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self.has_head or self._is_complete):
            waiter.set_result(None)
        if self._is_complete and self._is_released:
            self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._is_keep_alive = False
        if self._is_complete:
            self._forget()
            return
        if exc is None and self.has_head and self._content_length < 0:
            # Without a length and without chunks, the end of the connection ends the answer.
            self._is_complete = True
            self._forget()
            self._wake()
            return
        outcome = AttemptOutcome.BROKEN_STREAM if self._received else AttemptOutcome.CONNECT_ERROR
        self._fail(outcome, f"the connection broke: {exc or 'closed by the engine'}")

    # ------------------------------------------------------------ httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADERS_MAX:
            self._fail(AttemptOutcome.SERVER_ERROR, f"more than {HEADERS_MAX} headers")
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value
        elif name == b"content-length":
            self._content_length = int(value)
        elif name == b"transfer-encoding":
            self._content_length = max(self._content_length, 0)
        elif name == b"retry-after":
            self.retry_after_ms = _seconds_ms(value)
        elif name == b"retry-after-ms" and value.isdigit():
            self.retry_after_ms = int(value[:9])

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _NO_BODY_BELOW:
            # An interim answer; the real head follows.
            self._headers = 0
            self._content_length = -1
            return
        self.status = status
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        if self._is_closing_on_byte:
            self.shut()
            return
        if self._is_released:
            return
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > BUFFER_BYTES_HIGH and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if not self.has_head:
            return
        self._is_complete = True
        self._is_keep_alive = self._parser.should_keep_alive()

    # ------------------------------------------------------------ deadlines

    def sweep(self, now: float) -> None:
        if self._is_complete:
            if now - self._idle_since > IDLE_S_MAX:
                self.shut()
            return
        # A paused connection is the reader's delay, not the engine's.
        if now >= self._deadline and not self._is_paused:
            if self._is_released:
                self.shut()
                return
            if self._is_fetching_kv and not self._has_body:
                self._failure = UpstreamError(AttemptOutcome.TIMEOUT, self._timeout_words)
                self.abort_after_first_byte()
                self._wake()
                return
            self._fail(AttemptOutcome.TIMEOUT, self._timeout_words)

    # ------------------------------------------------------------ inside

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None
        if self._failure is not None and not self._chunks:
            raise self._failure

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def _keep(self) -> None:
        idle = self._pool.idle
        if not self._is_keep_alive or self._is_closed or len(idle) >= IDLE_PER_ENGINE_MAX:
            self.shut()
            return
        self._resume()
        self._idle_since = self._sweeper.now
        idle.append(self)

    def _fail(self, outcome: AttemptOutcome, detail: str) -> None:
        if self._failure is None:
            self._failure = UpstreamError(outcome, detail)
        self.shut()
        self._wake()

    def _unwatch(self) -> None:
        """Nobody reads the answer any more: its silence means nothing."""
        if self in self._pool.flowing:
            self._pool.flowing.discard(self)
            self._sweeper.looked.discard(self)

    def _forget(self) -> None:
        self._unwatch()
        self._sweeper.watched.discard(self)
        if self in self._pool.idle:
            self._pool.idle.remove(self)


class Upstream:
    """Kept connections to all engines."""

    def __init__(self, sweeper: Sweeper) -> None:
        self._sweeper = sweeper
        self._pools: dict[Address, _Pool] = {}

    async def post(
        self,
        address: Address,
        path: bytes,
        headers: bytes,
        body: bytes,
        *,
        deadline: float,
        is_fetching_kv: bool = False,
    ) -> Connection:
        """Send a POST and wait for the head of its answer. The caller must release or abort.

        `headers` are whole lines. `deadline` is in seconds of the monotonic clock.
        A kept connection that the engine has closed meanwhile costs one more try on a new one.
        With `is_fetching_kv`, cancellation hangs up only when the answer has begun.
        """
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = _make_pool(address)
        head = b"POST %s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (
            path,
            pool.host_header,
            headers,
            len(body),
        )
        # A large body is not copied once more to be sent with its head.
        request = (head + body,) if len(body) < COPY_BYTES_MAX else (head, body)
        is_sent = False
        while pool.idle:
            connection = pool.idle.pop()
            if not connection.is_usable:
                connection.shut()
                continue
            try:
                return await self._exchange(
                    connection, request, deadline, is_fetching_kv=is_fetching_kv
                )
            except UpstreamError as failure:
                is_stale = failure.outcome is AttemptOutcome.CONNECT_ERROR
                if not (is_stale and connection.is_untouched):
                    raise
                is_sent = True
                break
        try:
            connection = await self._connect(pool)
        except UpstreamError as failure:
            failure.is_unsent = not is_sent
            raise
        return await self._exchange(connection, request, deadline, is_fetching_kv=is_fetching_kv)

    def suspect(self, address: Address) -> None:
        """A stream of an engine was lost: see at once whether the others are, which can not tell by themselves."""
        pool = self._pools.get(address)
        if pool is not None and pool.flowing:
            pool.knock()

    def flowing(self, address: Address) -> int:
        """Streams of an engine that could go on elsewhere."""
        pool = self._pools.get(address)
        return 0 if pool is None else len(pool.flowing)

    def leave(self, address: Address) -> None:
        """An engine is drained: streams that can go on elsewhere need not end there."""
        pool = self._pools.get(address)
        if pool is not None:
            for connection in tuple(pool.flowing):
                connection.leave()

    def idle(self, address: Address) -> int:
        """Connections kept open to an engine, ready for a call."""
        pool = self._pools.get(address)
        return 0 if pool is None else len(pool.idle)

    def close(self) -> None:
        for pool in self._pools.values():
            while pool.idle:
                pool.idle.pop().shut()
            if pool.knocking is not None:
                pool.knocking.cancel()

    async def _exchange(
        self,
        connection: Connection,
        request: tuple[bytes, ...],
        deadline: float,
        *,
        is_fetching_kv: bool,
    ) -> Connection:
        connection.begin(request, deadline, is_fetching_kv=is_fetching_kv)
        try:
            await connection.head()
        except asyncio.CancelledError:
            if is_fetching_kv:
                connection.abort_after_first_byte()
            else:
                connection.abort()
            raise
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self, pool: _Pool) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            # Only a new connection pays for a timer of its own.
            async with asyncio.timeout(CONNECT_S_MAX):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._sweeper, pool), pool.address[0], pool.address[1]
                )
        except TimeoutError:
            raise UpstreamError(
                AttemptOutcome.CONNECT_ERROR, f"no connection within {CONNECT_S_MAX:g} s"
            ) from None
        except OSError as error:
            raise UpstreamError(
                AttemptOutcome.CONNECT_ERROR, f"no connection: {error.strerror or error}"
            ) from error
        pool.is_refusing = False
        return connection


def _make_pool(address: Address) -> _Pool:
    host, port = address[0], address[1]
    shown = f"[{host}]" if ":" in host else host
    lines = address[2] if len(address) == 3 else b""  # noqa: PLR2004 - narrows the union
    return _Pool(address, f"host: {shown}:{port}\r\n".encode() + lines, deque())


def _seconds_ms(value: bytes) -> int | None:
    """`retry-after` in milliseconds; None for a date, which no engine sends."""
    return int(value[:6]) * 1000 if value.isdigit() else None
