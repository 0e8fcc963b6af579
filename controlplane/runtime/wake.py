"""Wakes an engine that sleeps when calls wait for its model and none that is awake takes them.

More than one engine of a model is woken by the planner, which knows what that costs; this sees to it
that nobody waits in vain. Every replica looks at its own queue, and the same engine is woken once.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Role
from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import CommandId, ModelName
from controlplane.runtime.fleet_state import EngineEntry, FleetState, NodeEntry
from controlplane.store import commands
from controlplane.store.audit import Change
from dataplane.protocol.messages import CommandKind, EngineState

log = logging.getLogger(__name__)

WAKE_INTERVAL_S: Final = 0.5
# A waking that failed is tried again after about this time.
AGAIN_S: Final = 60.0
AUTHOR: Final = "headway"
_HOLDS_NO_GPU: Final = (EngineState.STOPPED, EngineState.FAILED, EngineState.SLEEPING)


class WakeOnDemand:
    """`waiting` tells how many calls wait for each model; `clock_s` is seconds of Unix time."""

    def __init__(
        self,
        engine: AsyncEngine,
        fleet: FleetState,
        waiting: Callable[[], Mapping[str, int]],
        *,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._waiting = waiting
        self._clock_s = clock_s
        self._told: dict[str, tuple[str, float]] = {}

    async def look(self) -> None:
        """One pass. Raises StateUnavailable."""
        for model, calls in self._waiting().items():
            if calls and (entry := self._to_wake(ModelName(model))) is not None:
                await self._wake(entry, model)

    def _to_wake(self, model: ModelName) -> EngineEntry | None:
        """The engine that is awake soonest; None when one is awake, or on its way, or none sleeps."""
        entries = [
            entry
            for entry in self._fleet.entries()
            if entry.row.model == model and entry.row.role is not Role.PREFILL
        ]
        if any(_serves_soon(entry) for entry in entries):
            return None
        asleep = [entry for entry in entries if self._can_wake(entry)]
        return min(
            asleep, key=lambda entry: (entry.row.warm_up_ms, entry.row.engine_id), default=None
        )

    def _can_wake(self, entry: EngineEntry) -> bool:
        node = self._fleet.catalog.nodes.get(entry.row.node_id)
        heard = self._fleet.nodes.get(entry.row.node_id)
        return (
            entry.facts.state is EngineState.SLEEPING
            and not entry.facts.cordon
            and node is not None
            and not node.is_cordoned
            and heard is not None
            and heard.heard_ms > 0.0
            and _gpus_taken(heard) + entry.facts.gpus <= node.gpus
        )

    async def _wake(self, entry: EngineEntry, model: str) -> None:
        engine_id, now_s = entry.row.engine_id, self._clock_s()
        # It tells what its latest waking took, which is another time after each.
        asleep = f"{engine_id} {entry.facts.started_ms} {entry.facts.wake_ms}"
        told = self._told.get(engine_id)
        if told is not None and told[0] == asleep and now_s - told[1] < AGAIN_S:
            return
        self._told[engine_id] = (asleep, now_s)
        # The same for all replicas that look at about the same time.
        digest = hashlib.sha256(f"{asleep} {int(now_s / AGAIN_S)}".encode()).hexdigest()[:24]
        try:
            await commands.enqueue(
                self._engine,
                node_id=entry.row.node_id,
                engine_id=engine_id,
                kind=CommandKind.WAKE,
                command_id=CommandId(f"wake-{digest}"),
                by=Change(actor=AUTHOR, reason=f"calls wait for `{model}`, and it sleeps"),
            )
        except ConfigurationError as error:
            log.warning("wake_untold", extra={"fields": {"engine": engine_id, "why": str(error)}})


def _gpus_taken(node: NodeEntry) -> int:
    """Of a node, by engines that are awake: one that sleeps has given its memory back."""
    return sum(
        other.facts.gpus
        for other in node.engines.values()
        if other.facts.state not in _HOLDS_NO_GPU
    )


def _serves_soon(entry: EngineEntry) -> bool:
    """It takes calls, or loads or wakes already and then will."""
    row = entry.row
    return (row.is_accepting and not row.is_suspect) or (
        entry.facts.state is EngineState.STARTING and not entry.facts.cordon
    )
