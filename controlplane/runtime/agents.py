"""The bus's side of the fleet: agents' reports come in, roll calls and commands go out."""

import logging
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable, StateUnavailable
from controlplane.domain.ids import CommandId, NodeId
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.credits import CreditKeeper
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.kv_view import KvView
from controlplane.runtime.queue_pump import QueuePump
from controlplane.store import catalog, commands, weight_loads
from dataplane.protocol import subjects
from dataplane.protocol.messages import (
    Acknowledgement,
    Beat,
    Bye,
    Hello,
    Progress,
    ProtocolError,
    Telemetry,
    decode,
)

log = logging.getLogger(__name__)

ROLL_CALL_INTERVAL_MS = 1_000


class Agents:
    """Subscriptions of one replica. A report that can not be understood is logged and dropped."""

    def __init__(
        self,
        bus: Bus,
        fleet: FleetState,
        keeper: CreditKeeper,
        pump: QueuePump,
        engine: AsyncEngine,
        kv_view: KvView | None = None,
    ) -> None:
        self._kv_view = kv_view
        self._bus = bus
        self._fleet = fleet
        self._keeper = keeper
        self._pump = pump
        self._engine = engine
        self._rolled_ms = float("-inf")
        self._declared: dict[str, tuple[int, tuple[object, ...]]] = {}

    async def join(self) -> None:
        """Subscribe, make the stream of commands, and ask who is there."""
        await self._bus.subscribe(subjects.ALL_HELLOS, self._on_hello)
        await self._bus.subscribe(subjects.ALL_BEATS, self._on_beat)
        await self._bus.subscribe(subjects.ALL_BYES, self._on_bye)
        await self._bus.subscribe(subjects.ALL_TELEMETRY, self._on_telemetry)
        await self._bus.subscribe(subjects.ALL_ACKNOWLEDGEMENTS, self._on_acknowledgement)
        await self._bus.subscribe(subjects.ALL_PROGRESS, self._on_progress)
        self._bus.on_reconnect(self._rejoin)
        await self._rejoin()

    async def _rejoin(self) -> None:
        self._fleet.grace(monotonic_ms())
        # The bus may have come back without its store: each hello makes its node's consumer once more.
        self._declared.clear()
        try:
            await self._bus.ensure_command_stream()
        except BusUnavailable as error:
            log.warning("command_stream_missing", extra={"fields": {"why": str(error)}})
        await self.roll_call()
        self._keeper.nudge()

    async def roll_call(self) -> None:
        """Ask every agent to say hello; at most once a second."""
        now_ms = monotonic_ms()
        if now_ms - self._rolled_ms < ROLL_CALL_INTERVAL_MS:
            return
        self._rolled_ms = now_ms
        try:
            await self._bus.publish(subjects.ROLL_CALL, b"{}")
        except BusUnavailable:
            return  # the reconnect asks again

    async def _on_hello(self, subject: str, data: bytes) -> None:
        message = _understood(subject, data, Hello)
        if message is None or not self._fleet.hello(message, monotonic_ms()):
            return
        self._keeper.nudge()
        self._pump.offer()
        facts = (message.agent_epoch, tuple(message.engines))
        if self._declared.get(message.node_id) == facts:
            return
        try:
            await self._bus.ensure_command_consumer(message.node_id)
            await catalog.upsert_engines(
                self._engine, NodeId(message.node_id), message.agent_epoch, message.engines
            )
            if await weight_loads.add(self._engine, NodeId(message.node_id), message.engines):
                await self.read_load_times()
        except (BusUnavailable, StateUnavailable) as error:
            log.warning(
                "hello_not_recorded", extra={"fields": {"node": message.node_id, "why": str(error)}}
            )
            return
        self._declared[message.node_id] = facts

    async def _on_beat(self, subject: str, data: bytes) -> None:
        message = _understood(subject, data, Beat)
        if message is None:
            return
        is_known = self._fleet.beat(message, monotonic_ms())
        # What a node's last hello said could not be recorded, or the bus has lost its queue since.
        is_recorded = message.node_id in self._declared
        if not is_known or (not is_recorded and NodeId(message.node_id) in self._fleet.nodes):
            await self.roll_call()

    def _on_bye(self, subject: str, data: bytes) -> None:
        message = _understood(subject, data, Bye)
        if message is not None:
            self._fleet.bye(message)

    def _on_telemetry(self, subject: str, data: bytes) -> None:
        message = _understood(subject, data, Telemetry)
        if message is not None:
            self._fleet.telemetry(message, monotonic_ms())
            if self._kv_view is not None:
                self._kv_view.on_telemetry(message)

    async def read_load_times(self) -> None:
        """Take what loads were measured to need. Raises StateUnavailable."""
        self._fleet.use_load_times(await weight_loads.load_all(self._engine))

    async def _on_progress(self, subject: str, data: bytes) -> None:
        message = _understood(subject, data, Progress)
        if message is None or not self._fleet.progress(message):
            return
        try:
            await commands.note_progress(self._engine, message)
        except StateUnavailable:
            log.debug("progress_lost", extra={"fields": {"engine": message.engine_id}})

    async def _on_acknowledgement(self, subject: str, data: bytes) -> None:
        message = _understood(subject, data, Acknowledgement)
        if message is None:
            return
        try:
            await commands.finish(
                self._engine, CommandId(message.command_id), str(message.state), message.detail
            )
        except StateUnavailable:
            log.warning("acknowledgement_lost", extra={"fields": {"command": message.command_id}})


_M = TypeVar("_M", Hello, Beat, Bye, Telemetry, Acknowledgement, Progress)


def _understood(subject: str, data: bytes, kind: type[_M]) -> _M | None:
    """The message, when it is one and comes from the node that it names."""
    try:
        message = decode(data, kind)
    except ProtocolError as error:
        log.warning("message_refused", extra={"fields": {"subject": subject, "why": str(error)}})
        return None
    if message.node_id != subjects.node_of(subject):
        log.warning("message_forged", extra={"fields": {"subject": subject}})
        return None
    return message
