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
from dataplane.agent.credits import CreditBook
from dataplane.agent.disk import AgentDisk, DiskError
from dataplane.agent.gpu_facts import GpuFacts
from dataplane.agent.keeper import EngineKeeper
from dataplane.agent.kv_events import KvReporter
from dataplane.agent.settings import VERSION, AgentSettings, SettingsError, read_settings
from dataplane.agent.supervisor import Supervisor
from dataplane.agent.telemetry import busy_of, report_progress, report_telemetry
from dataplane.protocol.messages import (
    Beat,
    Bye,
    CreditGrant,
    CreditRequest,
    EngineSpec,
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
GPU_READ_S = 1.0
# Between two waits for errors, for a driver that answers a wait at once.
GPU_PAUSE_S = 0.1


def monotonic_ms() -> int:
    return int(time.monotonic() * 1000)


class Agent:
    def __init__(self, settings: AgentSettings, disk: AgentDisk, gpus: GpuFacts) -> None:
        self._settings = settings
        self._gpus = gpus
        self._agent_epoch = disk.next_agent_epoch()
        self._book = CreditBook()
        self._has_news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._supervisor = Supervisor(settings, disk, self._on_engine_change, self._lent)
        self._bus = AgentBus(settings, on_credits=self._on_credits, on_connected=self._introduce)
        self._commands = CommandRunner(
            node_id=settings.node_id,
            agent_epoch=self._agent_epoch,
            bus=self._bus,
            disk=disk,
            supervisor=self._supervisor,
            on_uncordon=self._forgive,
        )
        self._kv = KvReporter(
            self._bus,
            self._supervisor,
            node_id=settings.node_id,
            agent_epoch=self._agent_epoch,
        )
        self._supervisor.on_emptied = self._kv.emptied

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
                    group.create_task(self._report_progress()),
                    group.create_task(self._watch_gpus()),
                    group.create_task(self._supervisor.watch_orphans()),
                    group.create_task(self._kv.run()),
                ]
                await self._stopping.wait()
                await self._supervisor.withdraw()
                await self._say_bye()
                for task in tasks:
                    task.cancel()
        except BaseException:
            # A fault of the agent is none of the engines': the next agent adopts them.
            await self._supervisor.leave()
            raise
        await self._supervisor.close()
        log.info("agent stopped", node=self._settings.node_id)

    async def _introduce(self) -> None:
        """After a connect, or when a replica asks: whoever was away has missed something."""
        await self._hello()
        self._kv.retell()

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
            keepers = list(self._supervisor.keepers.values())
            states = {name: keeper.state for keeper in keepers for name in keeper.names()}
            await self._bus.publish(
                "beat",
                Beat(
                    node_id=self._settings.node_id,
                    agent_epoch=self._agent_epoch,
                    engine_states=states,
                    cordoned=[
                        name for keeper in keepers if keeper.cordon for name in keeper.names()
                    ],
                ),
            )
            self._book.expire(monotonic_ms())
            await asyncio.sleep(BEAT_S)

    async def _report(self) -> None:
        await report_telemetry(
            self._bus,
            self._supervisor,
            self._book,
            self._gpus.now,
            node_id=self._settings.node_id,
            agent_epoch=self._agent_epoch,
            kv_seqs=self._kv.seqs,
        )

    async def _report_progress(self) -> None:
        await report_progress(
            self._bus,
            self._supervisor,
            self._commands.waiting_for,
            node_id=self._settings.node_id,
            agent_epoch=self._agent_epoch,
        )

    async def _watch_gpus(self) -> None:
        """Read the GPUs once a second, and take what the driver tells as soon as it does."""
        if not self._gpus.count:
            return
        read_s = float("-inf")
        while True:
            if time.monotonic() - read_s >= GPU_READ_S:
                read_s = time.monotonic()
                await asyncio.to_thread(self._gpus.read)
            self._supervisor.use_gpus(self._gpus.count, self._gpus.faults())
            if not await asyncio.to_thread(self._gpus.wait):
                await asyncio.sleep(GPU_PAUSE_S)

    def _forgive(self, spec: EngineSpec) -> None:
        self._gpus.forgive(spec)
        self._supervisor.use_gpus(self._gpus.count, self._gpus.faults())

    def _lent(self, engine_id: str) -> tuple[bool, int]:
        """Whether all replicas know that the engine is closed, and the seats of their calls."""
        is_withdrawn = self._book.is_withdrawn(engine_id, monotonic_ms())
        return is_withdrawn, self._book.lent(engine_id)[0]

    async def _say_bye(self) -> None:
        bye = Bye(node_id=self._settings.node_id, agent_epoch=self._agent_epoch)
        try:
            async with asyncio.timeout(BYE_S_MAX):
                await self._bus.publish("bye", bye)
                await self._bus.flush()
        except TimeoutError:
            log.warning("bye not sent")

    def _on_engine_change(self, keeper: EngineKeeper) -> None:
        if keeper.spec.engine_id not in self._supervisor.keepers:
            for name in keeper.names():
                self._book.forget(name)
        elif (
            keeper.state is EngineState.SERVING
            and keeper.capacity is not None
            and not keeper.cordon
        ):
            declared = keeper.declared()
            for facts in declared:
                self._book.open(facts.engine_id, (facts.seats, facts.kv_tokens))
            if keeper.is_adopted and keeper.telemetry is not None:
                keeper.is_adopted = False
                for report, facts in zip(keeper.reports(), declared, strict=False):
                    busy = busy_of(report, facts)
                    self._book.note_unknown(facts.engine_id, busy, monotonic_ms())
        else:
            for name in keeper.names():
                self._book.close(name)
        self._has_news.set()

    async def _on_credits(self, message: Msg) -> None:
        if not message.reply:
            return
        try:
            request = decode(message.data, CreditRequest)
        except ProtocolError as error:
            log.warning("credit request unreadable", detail=str(error))
            return
        self._book.heard(request.replica_id, request.closed)
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
    gpus = GpuFacts.find()
    try:
        agent = Agent(settings, disk, gpus)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        await agent.run()
    finally:
        gpus.close()
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
