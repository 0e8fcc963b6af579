"""Reports the engines' numbers to the control plane, and tells the credit book what is running.

The numbers themselves are scraped by each engine's keeper.
"""

import asyncio
import time

from dataplane.agent.bus import AgentBus
from dataplane.agent.credits import CreditBook
from dataplane.agent.supervisor import Supervisor
from dataplane.protocol.messages import EngineState, Telemetry

REPORT_S = 0.25


async def report_telemetry(
    bus: AgentBus, supervisor: Supervisor, book: CreditBook, *, node_id: str, agent_epoch: int
) -> None:
    """Publish one message per interval, for ever, of the engines that answered since the last
    one.
    """
    reported: dict[str, int] = {}
    while True:
        engines = []
        for name, keeper in supervisor.keepers.items():
            telemetry, capacity = keeper.telemetry, keeper.capacity
            is_up = keeper.state in {EngineState.SERVING, EngineState.DRAINING}
            if telemetry is None or capacity is None or not is_up:
                continue
            if reported.get(name) == keeper.scrapes:
                continue
            reported[name] = keeper.scrapes
            engines.append(telemetry)
            busy = (
                telemetry.running + telemetry.waiting,
                int(telemetry.kv_used_ratio * capacity.kv_tokens),
            )
            book.observe(name, busy, time.monotonic_ns() // 1_000_000)
        if engines:
            await bus.publish(
                "telemetry",
                Telemetry(node_id=node_id, agent_epoch=agent_epoch, engines=engines),
            )
        await asyncio.sleep(REPORT_S)
