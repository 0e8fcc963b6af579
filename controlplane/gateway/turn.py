"""One request on a connection, served to the hot path at a third of the cost of uvicorn's own cycle.

Still plain ASGI for the application, which is started when the body is complete, or too large to be
taken, and gets it in one message. The answer's head is written together with its first bytes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from controlplane.domain.decision import Reason, Refuse
from controlplane.wire.outcomes import error_response

if TYPE_CHECKING:
    from controlplane.gateway.server import Link

App = Callable[[Any, Any, Any], Awaitable[None]]

log = logging.getLogger(__name__)

_END: Final = b"0\r\n\r\n"


class _NoEvent:
    """Nobody waits for the messages of a turn: its body comes whole."""

    def set(self) -> None:
        """Nothing."""


class Turn:
    """Takes the place of uvicorn's request cycle; the attributes without underscore are its names."""

    __slots__ = (
        "_head", "_is_chunked", "_is_running", "_link", "_parts", "_scope", "_size", "disconnected",
        "keep_alive", "response_complete", "response_started", "task",
    )  # fmt: skip

    message_event: ClassVar[_NoEvent] = _NoEvent()

    def __init__(self, link: "Link", scope: Any, *, keep_alive: bool) -> None:
        self._link = link
        self._scope = scope
        self._parts: list[bytes] = []
        self._size = 0
        self._head: bytes | None = None
        self._is_chunked = False
        self._is_running = False
        self.task: asyncio.Task[None] | None = None
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_started = False
        self.response_complete = False

    # ------------------------------------------------------------ from the connection

    def add(self, part: bytes, size_max: int) -> None:
        """A piece of the body. Beyond `size_max` the application is asked to refuse it."""
        if self._is_running:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > size_max:
            self.start()

    def start(self) -> None:
        if self._is_running:
            return
        self._is_running = True
        link = self._link
        task = self.task = link.loop.create_task(self._run(link.app))
        link.tasks.add(task)

    async def _run(self, app: App) -> None:
        # The scope names the turn; neither is to outlive the call for holding the other.
        scope, self._scope = self._scope, None
        try:
            await app(scope, self.receive, self.send)
            if not self.response_complete and not self._link.is_lost:
                log.error("a call was left without a whole answer")
                self._link.transport.close()
        except BaseException:
            if not self._link.is_lost:
                log.exception("a call ended in an unexpected error")
                await self._break_off()
        finally:
            if self.task is not None:
                self._link.tasks.discard(self.task)

    async def _break_off(self) -> None:
        if self.response_started:
            self._link.transport.close()
            return
        refuse = Refuse(Reason.INTERNAL_ERROR, "an unexpected error; it is logged")
        status, headers, body = error_response(refuse, None)
        sent = [(name.encode(), value.encode()) for name, value in headers]
        sent.append((b"content-length", b"%d" % len(body)))
        await self.send({"type": "http.response.start", "status": status, "headers": sent})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    # ------------------------------------------------------------ ASGI

    async def receive(self) -> dict[str, Any]:
        """The whole body, once."""
        parts = self._parts
        if self._link.is_lost:
            return {"type": "http.disconnect"}
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: dict[str, Any]) -> None:
        link = self._link
        if link.flow.write_paused and not link.is_lost:
            await link.flow.drain()
        if not link.is_lost:
            self._write(message)

    def send_now(self, message: dict[str, Any]) -> bool:
        """Send without waiting. False, and nothing is sent, when the client is behind or gone."""
        link = self._link
        if link.flow.write_paused or link.is_lost:
            return False
        self._write(message)
        return True

    def _write(self, message: dict[str, Any]) -> None:
        link = self._link
        if message["type"] == "http.response.start":
            self.response_started = True
            self._head = self._render_head(message["status"], message["headers"])
            return
        body: bytes = message["body"]
        is_last = not message.get("more_body", False)
        if self._is_chunked:
            if body:
                body = b"%x\r\n%s\r\n" % (len(body), body)
            if is_last:
                body += _END
        head = self._head
        if head is not None:
            self._head = None
            body = head + body
        link.transport.write(body)
        if is_last:
            self.response_complete = True
            if not self.keep_alive:
                link.transport.close()
            link.on_response_complete()

    def _render_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        # INVARIANT: names are lower case, and no value comes from a client: nothing to check here.
        lines = [STATUS_LINE[HTTPStatus(status)], self._link.default_head()]
        is_sized = False
        for name, value in headers:
            lines.append(b"%s: %s\r\n" % (name, value))
            is_sized = is_sized or name == b"content-length"
        if not is_sized:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)
