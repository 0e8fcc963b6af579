"""Reports the engines' numbers and their ways to the control plane, and tells the credit book what is
running.

The numbers themselves are scraped by each engine's keeper.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import count

from dataplane.agent.bus import AgentBus
from dataplane.agent.credits import CreditBook
from dataplane.agent.keeper import EngineKeeper
from dataplane.agent.supervisor import Supervisor
from dataplane.protocol.messages import (
    EngineFacts,
    EngineState,
    EngineTelemetry,
    GpuTelemetry,
    Phase,
    Progress,
    Telemetry,
)

REPORT_S = 0.25
GPU_REPORT_S = 1.0
PROGRESS_S = 0.5
_UP = frozenset({EngineState.SERVING, EngineState.DRAINING, EngineState.SLEEPING})
_UNDER_WAY = frozenset({EngineState.STARTING, EngineState.DRAINING})


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def busy_of(report: EngineTelemetry, facts: EngineFacts) -> tuple[int, int]:
    """Calls on the engine and the KV tokens that they hold.

    An engine that does not tell its KV use is taken to hold a seat's part of it for each call.
    """
    calls = report.running + report.waiting
    if report.kv_used_ratio is None:
        return calls, min(facts.kv_tokens, calls * facts.kv_tokens // max(1, facts.seats))
    return calls, int(report.kv_used_ratio * facts.kv_tokens)


async def report_telemetry(
    bus: AgentBus,
    supervisor: Supervisor,
    book: CreditBook,
    gpus: Callable[[], list[GpuTelemetry]],
    *,
    node_id: str,
    agent_epoch: int,
    kv_seqs: Callable[[], dict[str, int]],
) -> None:
    """Publish one message per interval, for ever, of the engines that answered since the last
    one, and once a second of the GPUs.
    """
    reported: dict[str, int] = {}
    gpus_s = float("-inf")
    while True:
        engines = []
        for name, keeper in supervisor.keepers.items():
            telemetry, capacity = keeper.telemetry, keeper.capacity
            if telemetry is None or capacity is None or keeper.state not in _UP:
                continue
            if reported.get(name) == keeper.scrapes:
                continue
            reported[name] = keeper.scrapes
            for report, facts in zip(keeper.reports(), keeper.declared(), strict=False):
                engines.append(report)
                book.observe(facts.engine_id, busy_of(report, facts), now_ms())
        found: list[GpuTelemetry] = []
        if time.monotonic() - gpus_s >= GPU_REPORT_S:
            gpus_s = time.monotonic()
            found = gpus()
        if engines or found:
            await bus.publish(
                "telemetry",
                Telemetry(
                    node_id=node_id,
                    agent_epoch=agent_epoch,
                    engines=engines,
                    gpus=found,
                    kv_seqs=kv_seqs(),
                ),
            )
        await asyncio.sleep(REPORT_S)


async def report_progress(
    bus: AgentBus,
    supervisor: Supervisor,
    waiting_for: Callable[[str], list[str]],
    *,
    node_id: str,
    agent_epoch: int,
) -> None:
    """Tell, twice a second and for ever, how far every engine is that is on its way somewhere."""
    numbers = count(1)
    under_way: set[str] = set()
    while True:
        for name, keeper in list(supervisor.keepers.items()):
            commands = waiting_for(name)
            is_under_way = keeper.state in _UNDER_WAY or keeper.phase is Phase.WAKING
            if not is_under_way and not commands and name not in under_way:
                continue
            # Its arrival is told once, too.
            (under_way.add if is_under_way or commands else under_way.discard)(name)
            phase, done_ratio = keeper.progress()
            for declared in keeper.names():
                await bus.publish(
                    "progress",
                    Progress(
                        node_id=node_id,
                        agent_epoch=agent_epoch,
                        sequence=next(numbers),
                        engine_id=declared,
                        phase=phase,
                        command_ids=commands,
                        done_ratio=done_ratio,
                        elapsed_ms=_elapsed_ms(keeper),
                        expected_ms=keeper.expected_ms(),
                        calls_left=keeper.calls_left,
                    ),
                )
        await asyncio.sleep(PROGRESS_S)


def _elapsed_ms(keeper: EngineKeeper) -> int:
    return max(0, int((time.monotonic() - keeper.phase_since_s) * 1000))
