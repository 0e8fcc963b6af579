"""uvicorn's HTTP/1.1 protocol with limits on heads, slow senders and slow readers.

An application is told at once when its client goes away. This builds on inner parts of uvicorn,
whose version is locked; `test_gateway_server.py` holds every part that is relied on.
"""

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controlplane.domain.decision import Reason
from controlplane.gateway.answer_heads import id_lines
from controlplane.gateway.body import BODY_BYTES_MAX
from controlplane.gateway.hints import CONTENT_LENGTH
from controlplane.gateway.sweeper import Sweeper
from controlplane.gateway.turn import Turn
from controlplane.telemetry.metrics import Metrics
from controlplane.wire.outcomes import envelope

HEAD_BYTES_MAX: Final = 32 * 1024
HEADERS_MAX: Final = 100
# How long a client may take to send a head, and then a body.
HEAD_S_MAX: Final = 5.0
BODY_S_MAX: Final = 15.0
# How long a client may take none of an answer that waits for it.
STALL_S_MAX: Final = 30.0
KEEP_ALIVE_S: Final = 75
BACKLOG: Final = 4_096
GRACEFUL_S_MAX: Final = 20

# Served by `turn.py`; any other spelling of these takes uvicorn's way to the same application.
HOT_PATHS: Final = {
    b"/v1/chat/completions": "/v1/chat/completions",
    b"/v1/completions": "/v1/completions",
}

# Where an ASGI application finds the connection of its request, and the turn that serves it.
LINK: Final = "headway.link"
TURN: Final = "headway.turn"


class Link(HttpToolsProtocol):
    """One client connection. An application may ask to be cancelled when the client goes away."""

    sweeper: ClassVar[Sweeper]
    metrics: ClassVar[Metrics]
    new_id: ClassVar[Callable[[], str]]
    rendered_for: ClassVar[list[tuple[bytes, bytes]] | None] = None
    rendered: ClassVar[bytes] = b""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.is_lost = False
        self.task: asyncio.Task[Any] | None = None
        # The turn whose body is being received.
        self.turn: Turn | None = None
        self._since = self.sweeper.now
        # A fresh connection owes a head; between calls it is idle, neither in a head nor in a body.
        self._is_in_head = True
        self._is_in_body = False
        self._head_bytes = 0
        self._stalled_bytes = 0
        self._stalled_since = 0.0

    def cancel_on_loss(self) -> None:
        """Cancel the running task when the client goes away, until `keep_on_loss`."""
        cycle = self.cycle
        self.task = cycle.task if isinstance(cycle, Turn) else asyncio.current_task()

    def keep_on_loss(self) -> None:
        self.task = None

    def has_gone(self) -> bool:
        return self.is_lost

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.sweeper.watched.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.sweeper.watched.discard(self)
        task = self.task
        super().connection_lost(exc)
        if task is not None:
            self.task = None
            task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_in_body:
            super().data_received(data)
            return
        self._head_bytes += len(data)
        super().data_received(data)
        # Still in the head: all that has arrived belongs to it, be it one endless line.
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    # ------------------------------------------------------------ httptools callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[LINK] = self  # type: ignore[typeddict-unknown-key]
        self._is_in_head = True
        self._since = self.sweeper.now

    def on_headers_complete(self) -> None:
        headers = self.headers
        # A head that came whole in one read is measured without its separators.
        if len(headers) > HEADERS_MAX or (
            self._head_bytes > HEAD_BYTES_MAX
            and len(self.url) + sum(len(name) + len(value) for name, value in headers)
            > HEAD_BYTES_MAX
        ):
            self._refuse_head()
            return
        self._is_in_head = False
        self._is_in_body = True
        self._since = self.sweeper.now
        self._head_bytes = 0
        if not self._begin_turn():
            super().on_headers_complete()

    def _begin_turn(self) -> bool:
        """Take a call of the hot path: a plain POST, with none other under way on the connection."""
        path = HOT_PATHS.get(self.url)
        parser, cycle = self.parser, self.cycle
        if (
            path is None
            or self.expect_100_continue
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or parser.should_upgrade()
            or not (cycle is None or cycle.response_complete)
        ):
            return False
        scope = self.scope
        scope["method"] = "POST"
        scope["path"] = path
        turn = Turn(self, scope, keep_alive=parser.should_keep_alive())
        scope[TURN] = turn  # type: ignore[typeddict-unknown-key]
        self.turn = turn
        self.cycle = turn  # type: ignore[assignment]
        if _declared_bytes(self.headers) > BODY_BYTES_MAX:
            # Refused by its head: the client need not send what nobody reads.
            turn.start()
        return True

    def default_head(self) -> bytes:
        """Header lines of every answer (`date`), rendered once each time uvicorn changes them."""
        defaults = self.server_state.default_headers
        cls = type(self)
        if cls.rendered_for is not defaults:
            cls.rendered_for = defaults
            cls.rendered = b"".join(b"%s: %s\r\n" % pair for pair in defaults)
        return cls.rendered

    def on_body(self, body: bytes) -> None:
        turn = self.turn
        if turn is not None:
            turn.add(body, BODY_BYTES_MAX)
        elif self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        turn = self.turn
        if turn is not None:
            self.turn = None
            turn.start()
        elif self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # As uvicorn's, without its timer for each call: `sweep` closes idle connections.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._since = self.sweeper.now
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        words = msg.rstrip(".").lower()
        self._refuse("malformed", HTTPStatus.BAD_REQUEST, Reason.INVALID_REQUEST, words)

    # ------------------------------------------------------------ deadlines

    def sweep(self, now: float) -> None:
        age = now - self._since
        if self._is_in_head:
            if age > HEAD_S_MAX:
                self._refuse_slow("slow head", "the head did not arrive in time")
        elif self._is_in_body:
            if age > BODY_S_MAX:
                self._refuse_slow("slow body", "the body did not arrive in time")
        elif age > KEEP_ALIVE_S and self.cycle.response_complete:
            self.transport.close()
        if self.flow.write_paused:
            self._sweep_stall(now)
        else:
            self._stalled_bytes = 0

    def _sweep_stall(self, now: float) -> None:
        waiting = self.transport.get_write_buffer_size()
        if self._stalled_bytes == 0 or waiting < self._stalled_bytes:
            self._stalled_bytes = waiting
            self._stalled_since = now
        elif now - self._stalled_since > STALL_S_MAX:
            self.metrics.connections_refused.add(("stalled reader",))
            self.transport.abort()

    # ------------------------------------------------------------ refusals below the application

    def _refuse_head(self) -> None:
        self._refuse(
            "large head",
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            Reason.REQUEST_TOO_LARGE,
            f"the head has more than {HEAD_BYTES_MAX} bytes or {HEADERS_MAX} headers",
        )

    def _refuse_slow(self, cause: str, words: str) -> None:
        self._refuse(cause, HTTPStatus.REQUEST_TIMEOUT, Reason.INVALID_REQUEST, words)

    def _refuse(self, cause: str, status: HTTPStatus, reason: Reason, words: str) -> None:
        """Answer and hang up; only hang up when that would fall into, or follow, another answer."""
        if self.transport.is_closing():
            return
        self.metrics.connections_refused.add((cause,))
        cycle = self.cycle
        is_owed = cycle is None or not cycle.response_started
        if self._is_in_head:
            is_owed = cycle is None or cycle.response_complete
        if is_owed:
            body = msgspec.json.encode(envelope(words, "invalid_request_error", None, reason))
            ids = b"".join(b"%s: %s\r\n" % line for line in id_lines(type(self).new_id()))
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nx-should-retry: false\r\n"
                b"x-headway-reason: %s\r\n%scontent-length: %d\r\nconnection: close\r\n\r\n"
                % (status, status.phrase.encode(), reason.encode(), ids, len(body))
                + body
            )
        self.transport.close()


def _declared_bytes(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of the body by its `content-length`, 0 when the head does not tell."""
    for name, value in headers:
        if name == CONTENT_LENGTH and value.isdigit():
            return int(value)
    return 0


def link_class(sweeper: Sweeper, metrics: Metrics, new_id: Callable[[], str]) -> type[Link]:
    """The protocol class that uvicorn makes one of for each connection."""
    members = {"sweeper": sweeper, "metrics": metrics, "new_id": staticmethod(new_id)}
    return type("BoundLink", (Link,), members)


def make_server(
    app: Callable[..., Any],
    sweeper: Sweeper,
    metrics: Metrics,
    *,
    new_id: Callable[[], str],
    host: str,
    port: int,
) -> uvicorn.Server:
    """A server for `app`. The caller runs `serve()`, and the sweeper beside it.

    `new_id` names what is refused before it reaches `app`.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=link_class(sweeper, metrics, new_id),
        ws="none",
        lifespan="off",
        loop="uvloop",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_S_MAX,
    )
    return uvicorn.Server(config)
