"""A GPU that fails under a serving engine, by the agent itself, a real bus and a stand-in for NVML."""

import asyncio
import time
from pathlib import Path
from typing import Any

from dataplane.agent.disk import AgentDisk
from dataplane.agent.gpu_facts import GpuFacts
from dataplane.agent.main import Agent
from dataplane.agent.settings import AgentSettings
from dataplane.protocol.messages import (
    Command,
    CommandKind,
    CommandState,
    EngineFacts,
    EngineState,
    Telemetry,
)
from tests.integration.agent_world import NODE, Bus, Control, simulated
from tests.unit.nvml_stand_in import NvmlStandIn, StandInGpu

XID = 8


async def test_an_xid_cordons_the_engines_of_its_gpu_and_uncordon_forgives(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus")
    control = Control(bus)
    library = NvmlStandIn([StandInGpu("GPU-a")], wait_s_max=0.05)
    gpus = GpuFacts(library)
    gpus.open()
    settings = AgentSettings(
        node_id=NODE, nats_url=bus.url, password=bus.password, data_dir=tmp_path / "data",
        engines=(simulated(),),
    )  # fmt: skip
    disk = AgentDisk(settings.data_dir)
    agent = Agent(settings, disk, gpus)
    await bus.start()
    running = asyncio.create_task(agent.run())
    try:
        await control.connect()
        await control.make_queue()
        await control.roll_call()
        await control.engine("e1", EngineState.SERVING)
        seen = await control.until(
            lambda: next((one.gpus for one in control.all(Telemetry) if one.gpus), None)
        )
        assert (seen[0].uuid, seen[0].temperature_c, seen[0].fault) == ("GPU-a", 60, "")

        library.events.append((library.gpus[0], XID, 79))
        began_s = time.monotonic()
        cordoned = await control.until(lambda: _cordoned(control))
        print(f"cordoned {time.monotonic() - began_s:.3f} s after the driver told Xid 79")
        assert cordoned.cordon == ("GPU at fault: GPU 0: Xid 79, the GPU has fallen off the bus")
        assert (await control.credits("r1", {"e1": (9, 9_000)})).holds == {"e1": (0, 0)}
        load = Command(
            command_id="l", epoch=1, kind=CommandKind.LOAD, engine_id="e2", spec=simulated("e2")
        )
        await control.command(load)
        refused = await control.outcome("l")
        assert (refused.state, "GPU at fault" in refused.detail) == (CommandState.REFUSED, True)

        await control.command(
            Command(command_id="u", epoch=1, kind=CommandKind.UNCORDON, engine_id="e1")
        )
        assert (await control.outcome("u")).state is CommandState.DONE
        assert gpus.faults() == []
        # One GPU, which is taken.
        await control.command(
            Command(
                command_id="m", epoch=1, kind=CommandKind.LOAD, engine_id="e2",
                spec=simulated("e2"),
            )
        )  # fmt: skip
        full = await control.outcome("m")
        assert (full.state, "needs 1 GPUs" in full.detail) == (CommandState.REFUSED, True)
        assert (await control.credits("r1", {"e1": (9, 9_000)})).holds["e1"][0] == 8
        await control.credits("r1", {"e1": (0, 0)})

        # One that sleeps leaves its GPU to another, and can not wake while that is there.
        async def tell(name: str, kind: CommandKind, engine_id: str, **more: Any) -> str:
            await control.command(
                Command(command_id=name, epoch=1, kind=kind, engine_id=engine_id, **more)
            )
            return (await control.outcome(name)).state

        assert await tell("s", CommandKind.SLEEP, "e1", sleep_level=1) == CommandState.DONE
        spec = simulated("e2")
        assert await tell("n", CommandKind.LOAD, "e2", spec=spec) == CommandState.DONE
        assert await tell("w", CommandKind.WAKE, "e1") == CommandState.REFUSED
        assert await tell("x", CommandKind.UNLOAD, "e2") == CommandState.DONE
        assert await tell("v", CommandKind.WAKE, "e1") == CommandState.DONE
    finally:
        agent.stop()
        await running
        disk.close()
        await control.close()
        await bus.kill()


def _cordoned(control: Control) -> EngineFacts | None:
    for message in reversed(control.heard):
        for facts in getattr(message, "engines", ()):
            if isinstance(facts, EngineFacts) and facts.cordon:
                return facts
    return None
