"""What engines tell of their prefix caches, taken into the prefix index of one replica.

Reports are states and numbered. One that is missing is fetched from the bus; what the bus no longer has
makes the view of that engine void. Nothing here is on the way of a request, and every report is bounded.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable
from controlplane.runtime.call import wall_ms
from controlplane.runtime.fleet_state import EngineEntry, FleetState
from controlplane.telemetry.metrics import Labels, Metrics
from dataplane.protocol import subjects
from dataplane.protocol.messages import KvBatch, KvReset, ProtocolError, Telemetry, decode

log = logging.getLogger(__name__)

# A report that the agent has stored is missing when it has not come after this time.
LATE_S: Final = 0.25
# Reports kept until those before them have been fetched.
HELD_BACK_MAX: Final = 64
# An engine of which the agent says in so many messages nothing, or only of another life, is begun anew.
SILENT_MESSAGES_MAX: Final = 8
# As long after a call's end an agent may take to tell of it.
SETTLE_INTERVAL_S: Final = 2.0

# Reports taken before others of this process have their turn.
REPORTS_PER_TURN_MAX: Final = 8

_APPLIED: Final = "applied"
_REPEATED: Final = "repeated"
_STALE: Final = "stale"
_EARLY: Final = "early"
_WAITING: Final = "waiting"
_MISSED: Final = "missed"
_BUS: Final = "bus"
_ENGINE: Final = "engine"

# A life of an agent and one of an engine: reports are numbered within both.
Life = tuple[int, int]


@dataclass(slots=True)
class Followed:
    """One engine's reports. `seq` is the last that was taken, `told` the last that its agent has stored."""

    life: Life
    index: int
    seq: int
    block_tokens: int
    told: int = 0
    blocks: int = 0
    held_back: list[KvBatch] = field(default_factory=list)
    silent_messages: int = 0

    @property
    def is_missing_some(self) -> bool:
        return bool(self.held_back) or self.told > self.seq


class KvView:
    """`wall_ms` is the clock by which engines say when something happened; after `late_s` seconds a report
    that was stored is missing.
    """

    def __init__(
        self,
        bus: Bus,
        fleet: FleetState,
        metrics: Metrics,
        *,
        wall_ms: Callable[[], float] = wall_ms,
        late_s: float = LATE_S,
    ) -> None:
        self._late_s = late_s
        self._bus = bus
        self._fleet = fleet
        self._metrics = metrics
        self._wall_ms = wall_ms
        self._engines: dict[str, Followed] = {}
        self._repairs: dict[str, asyncio.Task[None]] = {}
        metrics.kv_blocks.watch(lambda: self._each(lambda followed: followed.blocks))
        metrics.kv_sessions.watch(
            lambda: self._each(lambda followed: fleet.prefixes.sessions_on(followed.index))
        )

    def __len__(self) -> int:
        """Engines that are followed."""
        return len(self._engines)

    async def join(self) -> None:
        """Subscribe, and make the stream that keeps the reports."""
        await self._bus.subscribe(subjects.ALL_KV, self.on_report)
        self._bus.on_reconnect(self._make_stream)
        await self._make_stream()

    def close(self) -> None:
        """Fetch nothing more."""
        for task in self._repairs.values():
            task.cancel()

    async def settle(self) -> None:
        """Forget what is over. Every SETTLE_INTERVAL_S."""
        if self._bus.is_connected:
            self._fleet.prefixes.settle()
        for engine_id, followed in list(self._engines.items()):
            entry = self._fleet.entry_of(engine_id)
            if entry is None or entry.row.index != followed.index:
                del self._engines[engine_id]

    # ------------------------------------------------------------ hearing

    def on_report(self, subject: str, data: bytes) -> None:
        """Take one report as the bus delivers it."""
        try:
            batch = decode(data, KvBatch)
        except ProtocolError as error:
            self._metrics.kv_batches.add(("refused",))
            log.warning(
                "message_refused", extra={"fields": {"subject": subject, "why": str(error)}}
            )
            return
        if batch.node_id != subjects.node_of(subject):
            self._metrics.kv_batches.add(("refused",))
            log.warning("message_forged", extra={"fields": {"subject": subject}})
            return
        result = self._take(batch)
        self._metrics.kv_batches.add((result,))
        if result in {_EARLY, _WAITING}:
            self._repair(batch.node_id, self._late_s if result == _EARLY else 0.0)

    def on_telemetry(self, message: Telemetry) -> None:
        """An agent says which reports it has stored: those that do not come are missing."""
        for report in message.engines:
            entry = self._fleet.entry_of(report.engine_id)
            if entry is None or self._fleet.epoch_of(entry.row.node_id) != message.agent_epoch:
                continue
            told = message.kv_seqs.get(report.engine_id)
            followed = self._known(report.engine_id, entry)
            if followed is None:
                if told is not None:
                    # Calls that go there from now on will be told of; of earlier ones nothing is known.
                    self._follow(entry, message.agent_epoch, told)
            elif told is None or followed.life[0] != message.agent_epoch:
                followed.silent_messages += 1
                if followed.silent_messages >= SILENT_MESSAGES_MAX:
                    self._metrics.kv_clears.add(("silent",))
                    self._fleet.prefixes.unfollow(followed.index)
                    del self._engines[report.engine_id]
            else:
                followed.silent_messages = 0
                followed.told = told
                if followed.is_missing_some:
                    self._repair(message.node_id, self._late_s)

    # ------------------------------------------------------------ inside

    def _take(self, batch: KvBatch) -> str:
        """Take a report that is the next one, or that needs none before it. What became of it."""
        entry = self._fleet.entry_of(batch.engine_id)
        if entry is None or entry.row.node_id != batch.node_id:
            return _STALE
        life = (batch.agent_epoch, batch.started_ms)
        now = (self._fleet.epoch_of(entry.row.node_id), entry.facts.started_ms)
        if life != now:
            # The agent's introduction comes on another way than its reports.
            return _EARLY if life > now else _STALE
        followed = self._known(batch.engine_id, entry)
        if followed is None or followed.life != life:
            if followed is not None and batch.reset is KvReset.NONE:
                if batch.seq > 1:
                    return _EARLY
                self._void(followed, _MISSED)
            followed = self._follow(entry, batch.agent_epoch, batch.seq - 1)
        if batch.seq <= followed.seq:
            return _REPEATED
        if batch.seq > followed.seq + 1 and batch.reset is KvReset.NONE:
            followed.held_back.append(batch)
            del followed.held_back[:-HELD_BACK_MAX]
            return _WAITING
        self._apply(followed, batch)
        self._take_held_back(followed)
        return _APPLIED

    def _known(self, engine_id: str, entry: EngineEntry) -> Followed | None:
        """How an engine is followed, unless it has begun a new life or has another place since."""
        followed = self._engines.get(engine_id)
        if followed is None or followed.index != entry.row.index:
            return None
        return followed if followed.life[1] == entry.facts.started_ms else None

    def _follow(self, entry: EngineEntry, agent_epoch: int, seq: int) -> Followed:
        followed = Followed(
            (agent_epoch, entry.facts.started_ms),
            entry.row.index,
            seq,
            entry.facts.block_tokens,
        )
        self._engines[entry.row.engine_id] = followed
        self._fleet.prefixes.follow(followed.index, followed.block_tokens)
        return followed

    def _apply(self, followed: Followed, batch: KvBatch) -> None:
        prefixes, index = self._fleet.prefixes, followed.index
        followed.seq = batch.seq
        followed.blocks = batch.blocks
        followed.block_tokens = batch.block_tokens or followed.block_tokens
        if batch.reset is KvReset.VOID:
            self._void(followed, str(batch.reason or _MISSED))
        prefixes.follow(index, followed.block_tokens)
        if batch.reset is KvReset.RETELL:
            prefixes.doubt(index)
        if batch.held:
            prefixes.told(index, batch.held)
        if batch.is_told:
            prefixes.undoubt(index)
        metrics = self._metrics
        metrics.kv_events.add((batch.engine_id,), batch.events)
        if batch.gaps:
            metrics.kv_gaps.add((_ENGINE,), batch.gaps)
        if batch.replayed:
            metrics.kv_replayed.add((_ENGINE,), batch.replayed)
        if batch.oldest_ms:
            metrics.kv_lag.observe(max(0.0, self._wall_ms() - batch.oldest_ms) / 1000.0)

    def _void(self, followed: Followed, reason: str) -> None:
        """Nothing is known of the engine's cache but what is told from now on."""
        self._metrics.kv_clears.add((reason,))
        self._fleet.prefixes.forget(followed.index)
        self._fleet.prefixes.follow(followed.index, followed.block_tokens)

    def _take_held_back(self, followed: Followed) -> None:
        held_back = followed.held_back
        while held_back and held_back[0].seq <= followed.seq + 1:
            batch = held_back.pop(0)
            if batch.seq == followed.seq + 1:
                self._apply(followed, batch)

    # ------------------------------------------------------------ what is missing

    def _repair(self, node_id: str, after_s: float) -> None:
        """Fetch what is missing of a node, unless that is being done."""
        if node_id not in self._repairs:
            task = asyncio.ensure_future(self._fetch(node_id, after_s))
            self._repairs[node_id] = task
            task.add_done_callback(lambda _: self._repairs.pop(node_id, None))

    async def _fetch(self, node_id: str, after_s: float) -> None:
        if after_s:
            # Another way may have been quicker than that of the report.
            was_missing = self._missing(node_id)
            await asyncio.sleep(after_s)
            if was_missing and not self._missing(node_id):
                return
        is_gap = bool(self._missing(node_id))
        if is_gap:
            self._metrics.kv_gaps.add((_BUS,))
        try:
            kept = await self._bus.kept_kv(node_id)
        except BusUnavailable as error:
            log.warning(
                "kv_reports_missing", extra={"fields": {"node": node_id, "why": str(error)}}
            )
            kept = []
        taken = 0
        for at, data in enumerate(kept):
            if at % REPORTS_PER_TURN_MAX == 0:
                await asyncio.sleep(0)
            try:
                batch = decode(data, KvBatch)
            except ProtocolError:
                continue
            if batch.node_id == node_id:
                taken += self._take(batch) == _APPLIED
        if taken:
            self._metrics.kv_replayed.add((_BUS,), taken)
        for followed in self._missing(node_id):
            self._give_up(followed)

    def _give_up(self, followed: Followed) -> None:
        """What is missing is missing for good."""
        self._void(followed, _MISSED)
        held_back, followed.held_back = followed.held_back, []
        followed.seq = max(followed.told, held_back[-1].seq if held_back else 0)
        # States, so that of several the last counts, and losses among them go before gains.
        for batch in held_back:
            self._fleet.prefixes.told(followed.index, batch.held)

    def _missing(self, node_id: str) -> list[Followed]:
        """Engines of a node of which reports are missing."""
        return [
            followed
            for entry in self._fleet.entries_on(node_id)
            if (followed := self._known(entry.row.engine_id, entry)) is not None
            and followed.is_missing_some
        ]

    async def _make_stream(self) -> None:
        try:
            await self._bus.ensure_kv_stream()
        except BusUnavailable as error:
            log.warning("kv_stream_missing", extra={"fields": {"why": str(error)}})

    def _each(self, read: Callable[[Followed], float]) -> Mapping[Labels, float]:
        found: dict[Labels, float] = {}
        for engine_id, followed in self._engines.items():
            entry = self._fleet.entry_of(engine_id)
            if entry is not None:
                row = entry.row
                found[(row.engine_id, row.model, row.region)] = float(read(followed))
        return found
