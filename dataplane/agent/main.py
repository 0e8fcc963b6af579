"""The agent of one node: runs its engines, lends their capacity, reports, obeys. Entry and main
loop.

It needs the control plane and NATS for none of its engines' work, and goes on without them.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence

import uvloop
from nats.aio.msg import Msg

from dataplane.agent import log
from dataplane.agent.bus import AgentBus
from dataplane.agent.commands import CommandRunner
from dataplane.agent.credits import Amount, CreditBook
from dataplane.agent.disk import AgentDisk, DiskError
from dataplane.agent.keeper import EngineKeeper
from dataplane.agent.settings import VERSION, AgentSettings, SettingsError, read_settings
from dataplane.agent.supervisor import Supervisor
from dataplane.agent.telemetry import report_telemetry
from dataplane.protocol.messages import (
    Beat,
    Bye,
    CreditGrant,
    CreditRequest,
    EngineState,
    Hello,
    ProtocolError,
    decode,
    encode,
)

BEAT_S = 1.0
# Changes that come together are told in one hello.
HELLO_SETTLE_S = 0.02
BYE_S_MAX = 2.0


def monotonic_ms() -> int:
    return int(time.monotonic() * 1000)


class Agent:
    def __init__(self, settings: AgentSettings, disk: AgentDisk) -> None:
        self._settings = settings
        self._agent_epoch = disk.next_agent_epoch()
        self._book = CreditBook()
        self._has_news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._supervisor = Supervisor(settings, disk, self._on_engine_change)
        self._bus = AgentBus(settings, on_credits=self._on_credits, on_connected=self._hello)
        self._commands = CommandRunner(
            node_id=settings.node_id,
            agent_epoch=self._agent_epoch,
            bus=self._bus,
            disk=disk,
            supervisor=self._supervisor,
        )

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Run until `stop`. Then says bye and ends the engines, or leaves them, as the settings
        say.
        """
        log.info("agent started", node=self._settings.node_id, agent_epoch=self._agent_epoch)
        await self._supervisor.start()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._bus.run()),
                    group.create_task(self._commands.run()),
                    group.create_task(self._beat()),
                    group.create_task(self._tell_news()),
                    group.create_task(self._report()),
                ]
                await self._stopping.wait()
                await self._say_bye()
                for task in tasks:
                    task.cancel()
        except BaseException:
            # A fault of the agent is none of the engines': the next agent adopts them.
            await self._supervisor.leave()
            raise
        await self._supervisor.close()
        log.info("agent stopped", node=self._settings.node_id)

    async def _hello(self) -> None:
        await self._bus.publish(
            "hello",
            Hello(
                node_id=self._settings.node_id,
                agent_epoch=self._agent_epoch,
                version=VERSION,
                engines=self._supervisor.facts(),
            ),
        )

    async def _tell_news(self) -> None:
        while True:
            await self._has_news.wait()
            await asyncio.sleep(HELLO_SETTLE_S)
            self._has_news.clear()
            await self._hello()

    async def _beat(self) -> None:
        while True:
            states = {name: keeper.state for name, keeper in self._supervisor.keepers.items()}
            await self._bus.publish(
                "beat",
                Beat(
                    node_id=self._settings.node_id,
                    agent_epoch=self._agent_epoch,
                    engine_states=states,
                ),
            )
            self._book.expire(monotonic_ms())
            await asyncio.sleep(BEAT_S)

    async def _report(self) -> None:
        await report_telemetry(
            self._bus,
            self._supervisor,
            self._book,
            node_id=self._settings.node_id,
            agent_epoch=self._agent_epoch,
        )

    async def _say_bye(self) -> None:
        bye = Bye(node_id=self._settings.node_id, agent_epoch=self._agent_epoch)
        try:
            async with asyncio.timeout(BYE_S_MAX):
                await self._bus.publish("bye", bye)
                await self._bus.flush()
        except TimeoutError:
            log.warning("bye not sent")

    def _on_engine_change(self, keeper: EngineKeeper) -> None:
        engine_id = keeper.spec.engine_id
        if engine_id not in self._supervisor.keepers:
            self._book.forget(engine_id)
        elif keeper.state is EngineState.SERVING and keeper.capacity is not None:
            capacity: Amount = (keeper.capacity.seats, keeper.capacity.kv_tokens)
            self._book.open(engine_id, capacity)
            if keeper.is_adopted and keeper.telemetry is not None:
                keeper.is_adopted = False
                used = int(keeper.telemetry.kv_used_ratio * keeper.capacity.kv_tokens)
                busy = (keeper.telemetry.running + keeper.telemetry.waiting, used)
                self._book.note_unknown(engine_id, busy, monotonic_ms())
        else:
            self._book.close(engine_id)
        self._has_news.set()

    async def _on_credits(self, message: Msg) -> None:
        if not message.reply:
            return
        try:
            request = decode(message.data, CreditRequest)
        except ProtocolError as error:
            log.warning("credit request unreadable", detail=str(error))
            return
        holds = self._book.ask(request.replica_id, request.wants, request.held, monotonic_ms())
        grant = CreditGrant(
            node_id=self._settings.node_id,
            agent_epoch=self._agent_epoch,
            ttl_ms=self._book.ttl_ms,
            holds=holds,
        )
        await message.respond(encode(grant))


async def _serve(settings: AgentSettings) -> None:
    disk = AgentDisk(settings.data_dir)
    try:
        agent = Agent(settings, disk)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        await agent.run()
    finally:
        disk.close()


def run(settings: AgentSettings) -> int:
    """Run an agent until SIGTERM or SIGINT; its exit status."""
    log.set_up_logging()
    try:
        uvloop.run(_serve(settings))
    except DiskError as error:
        log.warning("agent can not start", detail=str(error))
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    except SettingsError as error:
        sys.exit(f"headway agent: {error}")
    sys.exit(run(settings))
