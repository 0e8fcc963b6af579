"""Loop: borrow capacity from every agent, renew it long before it expires, return what is not needed."""

import asyncio
import logging
from collections.abc import Callable

from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable
from controlplane.domain.fleet import EngineRow
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.fleet_state import FleetState, NodeEntry
from dataplane.protocol import subjects
from dataplane.protocol.messages import (
    CreditGrant,
    CreditRequest,
    ProtocolError,
    decode,
    encode,
)

log = logging.getLogger(__name__)

RENEW_INTERVAL_S = 1.0
# A replica keeps this share of an engine as its working stock, beyond what its calls hold.
STOCK_RATIO = 0.5
# After a call found no free credit, everything is asked for during this time.
CONTENTION_MS = 10_000


class CreditKeeper:
    """Asks each agent for totals, never for increments, so that lost or repeated messages do no harm."""

    def __init__(self, bus: Bus, fleet: FleetState, replica_id: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._replica_id = replica_id
        self._contended_ms: dict[str, float] = {}
        self._nudge = asyncio.Event()

    def contended(self, model: str) -> None:
        """Some call of `model` found no free credit: ask at once, and for everything."""
        self._contended_ms[model] = monotonic_ms()
        self._nudge.set()

    def nudge(self) -> None:
        """Something changed (an agent said hello): ask at once."""
        self._nudge.set()

    async def run(self, granted: Callable[[], None]) -> None:
        """Renew for ever; calls `granted` after each round that brought credits."""
        while True:
            self._nudge.clear()
            nodes = list(self._fleet.nodes.values())
            results = await asyncio.gather(*(self._renew(node) for node in nodes))
            if any(results):
                granted()
            try:
                async with asyncio.timeout(RENEW_INTERVAL_S):
                    await self._nudge.wait()
                    # Many calls can find no credit in one instant; one question answers them all.
                    await asyncio.sleep(0.02)
            except TimeoutError:
                pass

    async def give_back(self) -> None:
        """Return everything, at shutdown."""
        for node in list(self._fleet.nodes.values()):
            wants = {str(engine_id): (0, 0) for engine_id in node.engines}
            message = CreditRequest(replica_id=self._replica_id, wants=wants)
            try:
                await self._bus.ask(subjects.node_subject(node.id, "credits"), encode(message))
            except BusUnavailable:
                continue  # the lease expires by itself

    async def _renew(self, node: NodeEntry) -> bool:
        now_ms = monotonic_ms()
        wants = {
            str(engine_id): self._wanted(entry.row, now_ms)
            for engine_id, entry in node.engines.items()
        }
        if not wants:
            return False
        held = {str(engine_id): in_use(entry.row) for engine_id, entry in node.engines.items()}
        # A closed engine gets no further call from here: from now on, what was asked is what runs.
        closed = [
            str(engine_id)
            for engine_id, entry in node.engines.items()
            if not entry.row.is_accepting
        ]
        message = CreditRequest(replica_id=self._replica_id, wants=wants, held=held, closed=closed)
        try:
            reply = await self._bus.ask(subjects.node_subject(node.id, "credits"), encode(message))
            if reply is None:
                return False
            return self._fleet.granted(decode(reply, CreditGrant), now_ms)
        except (BusUnavailable, ProtocolError) as error:
            log.debug("credits_not_renewed", extra={"fields": {"node": node.id, "why": str(error)}})
            return False

    def _wanted(self, row: EngineRow, now_ms: float) -> tuple[int, int]:
        contended_ms = self._contended_ms.get(row.model, float("-inf"))
        return wanted(row, is_contended=now_ms - contended_ms < CONTENTION_MS)


def wanted(row: EngineRow, *, is_contended: bool) -> tuple[int, int]:
    """Seats and KV tokens that a replica asks for: its calls and a working stock, or all there is; of
    an engine that takes nothing new only what its calls hold.
    """
    if not row.is_accepting:
        return row.seats_taken, row.kv_tokens_taken
    if is_contended:
        return row.seats_capacity, row.kv_tokens_capacity
    seats = row.seats_taken + int(row.seats_capacity * STOCK_RATIO) + 1
    kv_tokens = row.kv_tokens_taken + int(row.kv_tokens_capacity * STOCK_RATIO)
    return min(seats, row.seats_capacity), min(kv_tokens, row.kv_tokens_capacity)


def in_use(row: EngineRow) -> tuple[int, int]:
    """Seats and KV tokens that a replica may be using, whatever it was granted last."""
    if not row.is_accepting:
        return row.seats_taken, row.kv_tokens_taken
    return max(row.seats_lent, row.seats_taken), max(row.kv_tokens_lent, row.kv_tokens_taken)
