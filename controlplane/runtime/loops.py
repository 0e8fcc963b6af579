"""The slow loops of a replica. Each pass reads the world, acts, and is safe to run twice or to lose."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable, StateUnavailable
from controlplane.domain.ids import ReplicaId
from controlplane.runtime.accounts import Accounts
from controlplane.runtime.admit import Gate
from controlplane.runtime.agents import Agents
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.decision_log import DecisionLog
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.policy_state import POLICY_INTERVAL_S
from controlplane.runtime.principals import Principals
from controlplane.store import breakers, budgets, catalog, commands, leadership, reaper, replicas
from controlplane.store.reaper import ReapSummary
from dataplane.protocol.messages import Command, encode

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
CATALOG_INTERVAL_S = 1.0
BEAT_INTERVAL_S = 2.0
REAP_INTERVAL_S = 2.0
LEADER_INTERVAL_S = 2.0
COMMAND_INTERVAL_S = 0.25
SURRENDER_INTERVAL_S = 5.0
ROLL_OVER_INTERVAL_S = 5.0
COMMANDS_PER_PASS_MAX = 100
# Nudges that come within this time are one.
NUDGE_GAP_S = 0.02


async def every(
    interval_s: float,
    name: str,
    act: Callable[[], Awaitable[None]],
    *,
    woken: asyncio.Event | None = None,
) -> None:
    """Run `act` for ever, at once when `woken` is set. An unreachable store or bus ends one pass, not
    the loop.
    """
    is_well = True
    while True:
        try:
            await act()
            is_well = True
        except (StateUnavailable, BusUnavailable) as error:
            if is_well:
                log.warning("loop_waits", extra={"fields": {"loop": name, "why": str(error)}})
            is_well = False
        except Exception:
            # Outermost frame of a loop: a defect in one pass must not end the service.
            log.exception("loop_failed", extra={"fields": {"loop": name}})
        if woken is None:
            await asyncio.sleep(interval_s)
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await woken.wait()
                await asyncio.sleep(NUDGE_GAP_S)
        # Before the pass and not after it: what changes meanwhile is seen by another one.
        woken.clear()


def _deaf(_: object) -> None: ...


class Leadership:
    """Whether this replica leads, and under which epoch. Leads only while its claim is surely valid."""

    def __init__(self, engine: AsyncEngine, replica_id: ReplicaId, ttl_s: float) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._ttl_s = ttl_s
        self._epoch: int | None = None
        self._valid_until_ms = float("-inf")

    @property
    def epoch(self) -> int | None:
        """The epoch to act under, or None. Ends at two thirds of the TTL, before another can claim."""
        return self._epoch if monotonic_ms() < self._valid_until_ms else None

    async def claim(self) -> None:
        asked_ms = monotonic_ms()
        self._epoch = await leadership.claim(self._engine, self._replica_id, self._ttl_s)
        if self._epoch is not None:
            self._valid_until_ms = asked_ms + self._ttl_s * 1000.0 * 2 / 3


class Loops:
    def __init__(
        self,
        *,
        engine: AsyncEngine,
        bus: Bus,
        fleet: FleetState,
        agents: Agents,
        accounts: Accounts,
        principals: Principals,
        decisions: DecisionLog,
        gate: Gate,
        leader: Leadership,
        replica_id: ReplicaId,
        replica_ttl_s: float,
        node_silence_ms_max: float,
    ) -> None:
        self._engine = engine
        self._bus = bus
        self._fleet = fleet
        self._agents = agents
        self._accounts = accounts
        self._principals = principals
        self._decisions = decisions
        self._gate = gate
        self._leader = leader
        self._replica_id = replica_id
        self._replica_ttl_s = replica_ttl_s
        self._node_silence_ms_max = node_silence_ms_max
        # Told of each pass that ended what others had left open.
        self.on_reaped: Callable[[ReapSummary], None] = _deaf

    def all(self) -> list[Coroutine[None, None, None]]:
        policies = self._gate.policies
        return [
            every(SWEEP_INTERVAL_S, "sweep", self._sweep),
            every(CATALOG_INTERVAL_S, "catalog", self._read_catalog),
            every(BEAT_INTERVAL_S, "beat", self._beat),
            every(REAP_INTERVAL_S, "reap", self._reap),
            every(LEADER_INTERVAL_S, "leadership", self._leader.claim),
            every(COMMAND_INTERVAL_S, "commands", self._send_commands),
            every(SURRENDER_INTERVAL_S, "surrender", self._accounts.surrender_idle),
            every(POLICY_INTERVAL_S, "policies", policies.refresh, woken=policies.woken),
            every(ROLL_OVER_INTERVAL_S, "roll_over", self._roll_over),
        ]

    async def _sweep(self) -> None:
        now_ms = monotonic_ms()
        if self._bus.is_connected:
            self._fleet.silence(now_ms, self._node_silence_ms_max)
        self._fleet.look_again(now_ms)
        self._gate.sweep(now_ms)
        self._decisions.write_records()

    async def _read_catalog(self) -> None:
        revision = await catalog.catalog_revision(self._engine)
        if revision != self._fleet.catalog.revision:
            self._fleet.use_catalog(await catalog.load_catalog(self._engine))
            self._fleet.use_overrides(await breakers.load(self._engine))
            self._principals.forget()
            await self._agents.roll_call()

    async def _beat(self) -> None:
        generation = await replicas.beat(self._engine, self._replica_id)
        if generation != self._accounts.generation:
            # Reaped while it was cut off: its slices were returned and belong to others by now.
            log.error("replica_was_reaped", extra={"fields": {"replica": self._replica_id}})
            self._accounts.begin_life(generation)
        self._gate.use_replicas(await replicas.count_live(self._engine, self._replica_ttl_s))
        await catalog.touch_nodes(
            self._engine, self._fleet.heard_since(monotonic_ms() - BEAT_INTERVAL_S * 1000.0)
        )

    async def _reap(self) -> None:
        summary = await reaper.reap(self._engine, self._replica_ttl_s, self._replica_id)
        self.on_reaped(summary)
        if summary.requests_lost or summary.workflows_expired:
            log.info(
                "reaped",
                extra={
                    "fields": {
                        "requests_lost": summary.requests_lost,
                        "workflows_expired": len(summary.workflows_expired),
                    }
                },
            )

    async def _roll_over(self) -> None:
        if self._leader.epoch is not None:
            await budgets.roll_over(self._engine)

    async def _send_commands(self) -> None:
        epoch = self._leader.epoch
        if epoch is None:
            return
        for pending in await commands.unsent(self._engine, COMMANDS_PER_PASS_MAX):
            message = Command(
                command_id=pending.id,
                epoch=epoch,
                kind=pending.kind,
                engine_id=pending.engine_id,
                deadline_s=pending.deadline_s,
                spec=pending.spec,
                role=pending.arguments.role,
                sleep_level=pending.arguments.sleep_level,
                reason=pending.arguments.reason,
                adapter=pending.arguments.adapter,
                adapter_path=pending.arguments.adapter_path,
            )
            await self._bus.send_command(pending.node_id, pending.id, encode(message))
            await commands.mark_sent(self._engine, pending.id, epoch)
