"""The agent's connection to NATS: connects and reconnects for ever, and says nothing while it is
away.

What is published while there is no connection is dropped, never buffered: a late telemetry or a
late acknowledgement is worth less than none.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from dataplane.agent import log
from dataplane.agent.settings import AgentSettings
from dataplane.protocol.messages import encode
from dataplane.protocol.subjects import ROLL_CALL, inbox_prefix, node_subject

CONNECT_S_MAX = 3
RECONNECT_S = 1
PING_S = 2
PINGS_UNANSWERED_MAX = 2
PENDING_BYTES_MAX = 256 * 1024
REQUESTS_PENDING_MAX = 1024
REQUEST_BYTES_PENDING_MAX = 8 * 1024 * 1024
# The same error is logged once in this time.
ERROR_LOG_S = 60.0

Handler = Callable[[Msg], Awaitable[None]]


class AgentBus:
    """`on_connected` is called after each connect and reconnect, when the subscriptions stand."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        on_credits: Handler,
        on_connected: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._on_credits = on_credits
        self._on_connected = on_connected
        self._last_error: tuple[str, float] = ("", 0.0)
        self.client: Client | None = None

    @property
    def is_connected(self) -> bool:
        return self.client is not None and self.client.is_connected

    async def publish(self, kind: str, message: msgspec.Struct) -> bool:
        """Send to a subject of this node; False when there is no connection."""
        client = self.client
        if client is None or not client.is_connected:
            return False
        try:
            await client.publish(node_subject(self._settings.node_id, kind), encode(message))
        except nats.errors.Error as error:
            await self._on_error(error)
            return False
        return True

    async def store(self, kind: str, message: msgspec.Struct, name: str, seconds: float) -> bool:
        """Send to a subject of this node, and wait until the bus has stored it; False when it has not.

        It may have been heard all the same. A message of the same `name` is stored once.
        """
        client = self.client
        if client is None or not client.is_connected:
            return False
        jetstream = client.jetstream(timeout=seconds)
        try:
            await jetstream.publish(
                node_subject(self._settings.node_id, kind),
                encode(message),
                headers={"Nats-Msg-Id": name},
            )
        except (nats.errors.Error, nats.js.errors.Error) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The client tells a cancellation in a closed connection as an error.
                raise asyncio.CancelledError from error
            await self._on_error(error)
            return False
        return True

    async def run(self) -> None:
        """Hold a connection for ever. The client reconnects by itself; one that gave up is
        replaced.
        """
        while True:
            client = Client()
            closed = asyncio.Event()
            try:
                await self._connect(client, closed)
                self.client = client
                await self._on_connected()
                await closed.wait()
            except (nats.errors.Error, OSError) as error:
                await self._on_error(error)
            finally:
                self.client = None
                if not client.is_closed:
                    await client.close()
            await asyncio.sleep(RECONNECT_S)

    async def flush(self) -> None:
        if self.client is not None and self.client.is_connected:
            try:
                await self.client.flush(CONNECT_S_MAX)
            except nats.errors.Error as error:
                await self._on_error(error)

    async def _connect(self, client: Client, closed: asyncio.Event) -> None:
        node_id = self._settings.node_id

        async def on_closed() -> None:
            closed.set()

        async def on_disconnected() -> None:
            log.warning("bus away")

        await client.connect(
            self._settings.nats_url,
            user=node_id,
            password=self._settings.password,
            name=f"agent {node_id}",
            inbox_prefix=inbox_prefix(node_id),
            connect_timeout=CONNECT_S_MAX,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_S,
            ping_interval=PING_S,
            max_outstanding_pings=PINGS_UNANSWERED_MAX,
            pending_size=PENDING_BYTES_MAX,
            error_cb=self._on_error,
            closed_cb=on_closed,
            disconnected_cb=on_disconnected,
            reconnected_cb=self._on_connected,
        )
        await client.subscribe(
            node_subject(node_id, "credits"),
            cb=self._on_credits,
            pending_msgs_limit=REQUESTS_PENDING_MAX,
            pending_bytes_limit=REQUEST_BYTES_PENDING_MAX,
        )
        await client.subscribe(ROLL_CALL, cb=self._on_roll_call)

    async def _on_roll_call(self, _message: Msg) -> None:
        await self._on_connected()

    async def _on_error(self, error: Exception) -> None:
        words = f"{type(error).__name__}: {error}"
        now_s = asyncio.get_running_loop().time()
        last_words, last_s = self._last_error
        if words != last_words or now_s - last_s >= ERROR_LOG_S:
            self._last_error = (words, now_s)
            log.warning("bus error", detail=words)
