"""A small HTTP/1.1 client for the engines of one node: over kept connections, a few times a second.

A general client costs ten times the CPU per request, and an idle agent does nothing else.
"""

import asyncio
from typing import cast

import httptools

from dataplane.engines.controls import Call

BODY_BYTES_MAX = 16 * 1024 * 1024
# Kept connections of one engine: a scrape and a health check at most go on together.
IDLE_MAX = 2
OK = 200


class BadStatus(OSError):
    """The engine answered, and not with 200."""

    def __init__(self, path: str, status: int, body: bytes) -> None:
        super().__init__(f"{path}: status {status}")
        self.status = status
        self.body = body


class _Connection(asyncio.Protocol):
    """One connection with at most one request under way."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_reused = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body. Raises OSError when the connection breaks."""
        if self._transport is None or not self.is_open:
            raise ConnectionResetError("the connection is closed")
        self._body = bytearray()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(f"the engine closed the connection: {exc or 'end of data'}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            self._fail(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > BODY_BYTES_MAX:
            self.close()
            self._fail(f"an answer is over {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), bytes(self._body)))
        if not self._parser.should_keep_alive():
            self.close()

    def _fail(self, words: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError(words))


class Probe:
    """Asks the engines that listen on `host`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._name = f"[{host}]" if ":" in host else host
        self._idle: dict[int, list[_Connection]] = {}

    async def get(self, port: int, path: str, timeout_s: float) -> bytes:
        """Body of a 200 answer. Raises OSError otherwise, BadStatus when there was another."""
        return await self.call(port, Call(method="GET", path=path), timeout_s)

    async def call(self, port: int, call: Call, timeout_s: float) -> bytes:
        """Body of a 200 answer. Raises OSError otherwise, BadStatus when there was another."""
        head = f"{call.method} {call.path} HTTP/1.1\r\nhost: {self._name}:{port}\r\naccept: */*\r\n"
        if call.method != "GET":
            head += f"content-type: application/json\r\ncontent-length: {len(call.body)}\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._ask(port, head.encode() + b"\r\n" + call.body)
        except TimeoutError as error:
            raise OSError(f"{call.path}: no answer in {timeout_s:.1f} s") from error
        if status != OK:
            raise BadStatus(call.path, status, body)
        return body

    async def _ask(self, port: int, request: bytes) -> tuple[int, bytes]:
        while True:
            connection = await self._connection(port)
            try:
                answer = await connection.ask(request)
            except ConnectionError:
                # The engine may close a kept connection at any time; that says nothing of it.
                if not connection.is_reused:
                    raise
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            idle = self._idle.setdefault(port, [])
            if connection.is_open and len(idle) < IDLE_MAX:
                connection.is_reused = True
                idle.append(connection)
            else:
                connection.close()
            return answer

    async def _connection(self, port: int) -> _Connection:
        idle = self._idle.get(port, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, port)
        return connection

    def forget(self, port: int) -> None:
        """Close what is kept to an engine that is gone."""
        for connection in self._idle.pop(port, []):
            connection.close()

    def close(self) -> None:
        for port in list(self._idle):
            self.forget(port)
