"""NATS as the control plane uses it: connect for ever, subscribe, ask, and the stream of commands.

Knows subjects and bytes, not what they mean.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from controlplane.domain.errors import BusUnavailable
from dataplane.protocol import subjects

log = logging.getLogger(__name__)

PING_INTERVAL_S = 2
PINGS_OUTSTANDING_MAX = 2
CONNECTING_S_MAX = 1.0
RECONNECT_WAIT_S = 1
PENDING_MESSAGES_MAX = 4096
PENDING_BYTES_MAX = 8 * 1024 * 1024
REQUEST_TIMEOUT_S = 1.0
EXAMINE_S_MAX = 2
COMMAND_AGE_S_MAX = 3600
COMMAND_ACK_WAIT_S = 30
COMMAND_DELIVERIES_MAX = 20
DUPLICATE_WINDOW_S = 120
# What agents tell of prefix caches, kept in memory for replicas that missed some.
KV_AGE_S_MAX = 600
KV_BYTES_MAX = 32 * 1024 * 1024
KV_MESSAGES_PER_NODE_MAX = 2_048
KV_REPLAY_S_MAX = 0.5
KV_REPLAY_BATCH = 256

# A node that nobody has: asking for its credits is answered at once with "nobody serves this".
NOBODY = "doctor-nobody"

Handler = Callable[[str, bytes], Awaitable[None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFacts:
    """What a look at the bus finds. `may_ask`: a request to an agent reaches the server and is answered;
    `jetstream_problem` and `streams_missing` are empty when all is well, `last_error` when there was none.
    """

    is_connected: bool
    server_version: str
    round_trip_ms: float | None
    payload_bytes_max: int
    may_ask: bool
    jetstream_problem: str
    streams_missing: tuple[str, ...]
    last_error: str


class Bus:
    """One connection. Reconnects for ever; `is_connected` says whether it holds at this instant."""

    def __init__(self, url: str, *, user: str, password: str, name: str) -> None:
        self._url = url
        self._user = user
        self._password = password
        self._name = name
        self._client = Client()
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: asyncio.Future[None] | None = None
        self._last_error = ""

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    async def connect(self) -> None:
        """Connect, retrying until the server is there."""
        self._client = Client()
        # Shielded: a client that is cancelled half-way can not be closed (see `close`).
        self._connecting = asyncio.ensure_future(self._connect(self._client))
        await asyncio.shield(self._connecting)

    async def _connect(self, client: Client) -> None:
        await client.connect(
            self._url,
            user=self._user or None,
            password=self._password or None,
            name=self._name,
            inbox_prefix=subjects.inbox_prefix(self._name).encode(),
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=PINGS_OUTSTANDING_MAX,
            # A command or a report that could not be sent at once is stale when it is sent later.
            pending_size=64 * 1024,
            reconnected_cb=self._reconnected,
            disconnected_cb=self._disconnected,
            error_cb=self._failed,
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._connecting is not None and not self._connecting.done():
            await asyncio.wait({self._connecting}, timeout=CONNECTING_S_MAX)
            self._connecting.cancel()
        if self._client.is_connected or self._client.is_reconnecting:
            await self._client.close()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_reconnect.append(callback)

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler(subject, data)` for each message; subscriptions survive reconnects."""

        async def deliver(message: Msg) -> None:
            outcome = handler(message.subject, message.data)
            if outcome is not None:
                await outcome

        await self._client.subscribe(
            subject,
            cb=deliver,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )

    async def publish(self, subject: str, data: bytes) -> None:
        """Send at most once. Raises BusUnavailable when there is no connection."""
        if not self._client.is_connected:
            raise BusUnavailable("the bus is not connected")
        try:
            await self._client.publish(subject, data)
        except NatsError as error:
            raise BusUnavailable(str(error)) from error

    async def ask(self, subject: str, data: bytes) -> bytes | None:
        """The answer of the one who serves `subject`, or None when nobody does.

        Raises BusUnavailable when there is no connection or no answer in REQUEST_TIMEOUT_S.
        """
        if not self._client.is_connected:
            raise BusUnavailable("the bus is not connected")
        try:
            reply = await self._client.request(subject, data, timeout=REQUEST_TIMEOUT_S)
        except NoRespondersError:
            return None
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"no answer on {subject}: {error}") from error
        return reply.data

    async def ensure_command_stream(self) -> None:
        """Create the work queue of commands when it is missing, as after a loss of the bus's store."""
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.add_stream(
                StreamConfig(
                    name=subjects.COMMAND_STREAM,
                    subjects=[subjects.COMMAND_SUBJECTS],
                    retention=RetentionPolicy.WORK_QUEUE,
                    storage=StorageType.FILE,
                    max_age=COMMAND_AGE_S_MAX,
                    duplicate_window=DUPLICATE_WINDOW_S,
                )
            )
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"the stream of commands can not be made: {error}") from error

    async def ensure_command_consumer(self, node_id: str) -> None:
        """Create the durable consumer that one agent binds to; agents may not create any themselves."""
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.add_consumer(
                subjects.COMMAND_STREAM,
                ConsumerConfig(
                    durable_name=node_id,
                    filter_subject=subjects.node_subject(node_id, "cmd"),
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=COMMAND_ACK_WAIT_S,
                    max_deliver=COMMAND_DELIVERIES_MAX,
                ),
            )
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"the consumer of {node_id} can not be made: {error}") from error

    async def send_command(self, node_id: str, command_id: str, data: bytes) -> None:
        """Store a command for an agent. Sending the same id again within two minutes stores nothing."""
        if not self._client.is_connected:
            raise BusUnavailable("the bus is not connected")
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.publish(
                subjects.node_subject(node_id, "cmd"), data, headers={"Nats-Msg-Id": command_id}
            )
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"command {command_id} was not stored: {error}") from error

    async def ensure_control_stream(self) -> None:
        """Create the stream that keeps the last plan and the last prices, when it is missing."""
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.add_stream(
                StreamConfig(
                    name=subjects.CONTROL_STREAM,
                    subjects=[subjects.CONTROL_PLAN, subjects.CONTROL_PRICES],
                    retention=RetentionPolicy.LIMITS,
                    discard=DiscardPolicy.OLD,
                    storage=StorageType.FILE,
                    max_msgs_per_subject=1,
                )
            )
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"the stream of plans can not be made: {error}") from error

    async def keep(self, subject: str, data: bytes) -> None:
        """Tell subscribers, and keep it for those to come until the next one on the same subject.

        Raises BusUnavailable when it was not stored.
        """
        if not self._client.is_connected:
            raise BusUnavailable("the bus is not connected")
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.publish(subject, data, stream=subjects.CONTROL_STREAM)
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"{subject} was not stored: {error}") from error

    async def last(self, subject: str) -> bytes | None:
        """What was kept last on a subject, None when nothing was. Raises BusUnavailable."""
        if not self._client.is_connected:
            raise BusUnavailable("the bus is not connected")
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            found = await jetstream.get_last_msg(subjects.CONTROL_STREAM, subject)
        except NotFoundError:
            return None
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"no answer about {subject}: {error}") from error
        return found.data

    async def ensure_kv_stream(self) -> None:
        """Create the stream that keeps the latest reports of prefix caches, when it is missing."""
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.add_stream(
                StreamConfig(
                    name=subjects.KV_STREAM,
                    subjects=[subjects.ALL_KV],
                    retention=RetentionPolicy.LIMITS,
                    discard=DiscardPolicy.OLD,
                    storage=StorageType.MEMORY,
                    max_age=KV_AGE_S_MAX,
                    max_bytes=KV_BYTES_MAX,
                    max_msgs_per_subject=KV_MESSAGES_PER_NODE_MAX,
                    duplicate_window=DUPLICATE_WINDOW_S,
                )
            )
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"the stream of KV reports can not be made: {error}") from error

    async def kept_kv(self, node_id: str) -> list[bytes]:
        """The reports of one node's prefix caches that are kept, oldest first. Raises BusUnavailable."""
        if not self._client.is_connected:
            raise BusUnavailable("the bus is not connected")
        jetstream = self._client.jetstream(timeout=REQUEST_TIMEOUT_S)
        kept: list[bytes] = []
        try:
            subscription = await jetstream.pull_subscribe(
                subjects.node_subject(node_id, "kv"),
                stream=subjects.KV_STREAM,
                config=ConsumerConfig(
                    ack_policy=AckPolicy.NONE, inactive_threshold=REQUEST_TIMEOUT_S
                ),
            )
            try:
                pending = (await subscription.consumer_info()).num_pending or 0
                while pending > 0:
                    messages = await subscription.fetch(
                        min(pending, KV_REPLAY_BATCH), timeout=KV_REPLAY_S_MAX
                    )
                    kept += [message.data for message in messages]
                    pending -= len(messages)
            finally:
                await subscription.unsubscribe()
        except (NatsError, TimeoutError) as error:
            raise BusUnavailable(f"no reports of {node_id}: {error}") from error
        return kept

    async def examine(self) -> BusFacts:
        """Ask the server what it grants this client. Changes nothing; raises nothing."""
        client = self._client
        if not client.is_connected:
            return BusFacts(
                is_connected=False,
                server_version="",
                round_trip_ms=None,
                payload_bytes_max=0,
                may_ask=False,
                jetstream_problem="not connected",
                streams_missing=(),
                last_error=self._last_error,
            )
        round_trip_ms: float | None = None
        try:
            round_trip_ms = await client.rtt(timeout=EXAMINE_S_MAX) * 1_000.0
            may_ask = await self.ask(subjects.node_subject(NOBODY, "credits"), b"") is None
        except (NatsError, BusUnavailable, TimeoutError):
            may_ask = False
        problem, missing = "", []
        jetstream = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        try:
            await jetstream.account_info()
            for stream in (subjects.COMMAND_STREAM, subjects.CONTROL_STREAM, subjects.KV_STREAM):
                try:
                    await jetstream.stream_info(stream)
                except NotFoundError:
                    missing.append(stream)
        except (NatsError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
        version = client.connected_server_version
        return BusFacts(
            is_connected=True,
            server_version=".".join(
                str(part) for part in (version.major, version.minor, version.patch)
            ),
            round_trip_ms=round_trip_ms,
            payload_bytes_max=client.max_payload,
            may_ask=may_ask,
            jetstream_problem=problem,
            streams_missing=tuple(missing),
            last_error=self._last_error,
        )

    async def _reconnected(self) -> None:
        log.info("bus_reconnected")
        for callback in self._on_reconnect:
            task = asyncio.ensure_future(callback())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _disconnected(self) -> None:
        log.warning("bus_disconnected")

    async def _failed(self, error: Exception) -> None:
        self._last_error = f"{type(error).__name__}: {error}"
        log.warning("bus_error", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
