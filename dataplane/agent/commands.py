"""Obeys the leader's commands from the JetStream work queue: each once, none of an old epoch.

A command is acknowledged to the queue after its result is on disk and told; until then the queue is
kept informed that work goes on, and delivers it again after a crash of the agent.
"""

import asyncio
from collections.abc import Callable
from typing import assert_never

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from dataplane.agent import log
from dataplane.agent.bus import AgentBus
from dataplane.agent.disk import AgentDisk, CommandResult, DiskError
from dataplane.agent.keeper import Refusal
from dataplane.agent.supervisor import Supervisor
from dataplane.engines.base import EngineError
from dataplane.protocol.messages import (
    Acknowledgement,
    Command,
    CommandKind,
    CommandState,
    EngineSpec,
    ProtocolError,
    decode,
)
from dataplane.protocol.subjects import COMMAND_STREAM

FETCH_S = 5.0
RETRY_S = 1.0
IN_PROGRESS_S = 5.0
# A node is drained by a command for each of its engines.
COMMANDS_IN_FLIGHT_MAX = 128
RESULTS_KEPT_MAX = 256
DRAIN_S_MAX = 24 * 3600.0


class CommandRunner:
    def __init__(
        self,
        *,
        node_id: str,
        agent_epoch: int,
        bus: AgentBus,
        disk: AgentDisk,
        supervisor: Supervisor,
        on_uncordon: Callable[[EngineSpec], None] = lambda _: None,
    ) -> None:
        """`on_uncordon` is told of each engine whose operator trusts it again."""
        self._on_uncordon = on_uncordon
        self._obeyed: dict[str, Command] = {}
        self._node_id = node_id
        self._agent_epoch = agent_epoch
        self._bus = bus
        self._disk = disk
        self._supervisor = supervisor
        self._memory = disk.commands()
        self._results = {result.command_id: result for result in self._memory.results}
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._no_queue = ""
        self._places = asyncio.Semaphore(COMMANDS_IN_FLIGHT_MAX)

    async def run(self) -> None:
        """Take commands for ever; without a connection or a queue, wait for one."""
        subscription: JetStreamContext.PullSubscription | None = None
        client = None
        try:
            while True:
                if self._bus.client is not client:
                    client, subscription = self._bus.client, None
                try:
                    if client is None or not client.is_connected:
                        await asyncio.sleep(RETRY_S)
                        continue
                    if subscription is None:
                        subscription = await client.jetstream().pull_subscribe_bind(
                            consumer=self._node_id, stream=COMMAND_STREAM
                        )
                    await self._take(subscription)
                except nats.errors.TimeoutError:
                    continue
                except nats.errors.Error as error:
                    if _is_cancelled():
                        # The client tells a cancellation in a closed connection as an error.
                        raise asyncio.CancelledError from error
                    # The control plane may not have made the queue yet.
                    self._log_no_queue(f"{type(error).__name__}: {error}")
                    subscription = None
                    await asyncio.sleep(RETRY_S)
        finally:
            for task in self._in_flight.values():
                task.cancel()

    def _log_no_queue(self, detail: str) -> None:
        """Say what is wrong once, until it is something else."""
        if detail != self._no_queue:
            self._no_queue = detail
            log.warning("no command queue", detail=detail)

    async def _take(self, subscription: JetStreamContext.PullSubscription) -> None:
        async with self._places:
            for message in await subscription.fetch(1, timeout=FETCH_S):
                await self._accept(message)

    async def _accept(self, message: Msg) -> None:
        try:
            command = decode(message.data, Command)
        except ProtocolError as error:
            log.warning("command unreadable", detail=str(error))
            await message.term()
            return
        if command.command_id in self._in_flight:
            await message.in_progress()
            return
        task = asyncio.create_task(self._obey(command, message))
        self._in_flight[command.command_id] = task
        task.add_done_callback(lambda _: self._in_flight.pop(command.command_id, None))

    async def _obey(self, command: Command, message: Msg) -> None:
        async with self._places:
            work = asyncio.ensure_future(self._result(command))
            self._obeyed[command.command_id] = command
            try:
                while not work.done():
                    await asyncio.wait({work}, timeout=IN_PROGRESS_S)
                    if not work.done():
                        await _tell(message.in_progress())
                result = work.result()
            finally:
                work.cancel()
                self._obeyed.pop(command.command_id, None)
        told = await self._bus.publish(
            "ack",
            Acknowledgement(
                node_id=self._node_id,
                agent_epoch=self._agent_epoch,
                command_id=command.command_id,
                state=result.state,
                detail=result.detail,
            ),
        )
        # Untold, it comes again, and is then answered from memory.
        if told:
            await _tell(message.ack())

    async def _result(self, command: Command) -> CommandResult:
        """The first result of this command, which is on disk when this returns."""
        known = self._results.get(command.command_id)
        if known is not None:
            return known
        if command.epoch < self._memory.epoch:
            result = CommandResult(
                command_id=command.command_id,
                state=CommandState.STALE_EPOCH,
                detail=f"epoch {command.epoch} is older than {self._memory.epoch}",
            )
            self._remember(result)
            return result
        if command.epoch > self._memory.epoch:
            self._memory.epoch = command.epoch
            self._disk.save_commands(self._memory)
        state, detail = CommandState.DONE, ""
        try:
            await self._run(command)
        except Refusal as error:
            state, detail = CommandState.REFUSED, str(error)
        except (EngineError, DiskError, OSError) as error:
            state, detail = CommandState.FAILED, str(error)
        result = CommandResult(command_id=command.command_id, state=state, detail=detail)
        self._remember(result)
        log.info(
            "command done",
            command=command.command_id,
            kind=command.kind,
            engine=command.engine_id,
            state=state,
            detail=detail,
        )
        return result

    async def _run(self, command: Command) -> None:
        supervisor, engine_id = self._supervisor, command.engine_id
        deadline_s = min(max(0.0, command.deadline_s), DRAIN_S_MAX)
        match command.kind:
            case CommandKind.LOAD:
                if command.spec is None or command.spec.engine_id != engine_id:
                    raise Refusal("a load command needs the specification of its engine")
                await supervisor.load(command.spec)
            case CommandKind.UNLOAD:
                await supervisor.unload(engine_id, deadline_s)
            case CommandKind.DRAIN:
                await supervisor.drain(engine_id, deadline_s)
            case CommandKind.STOP:
                await supervisor.stop(engine_id)
            case CommandKind.RESTART:
                await supervisor.restart(engine_id, deadline_s)
            case CommandKind.ROLE:
                await supervisor.set_role(engine_id, command.role, deadline_s)
            case CommandKind.SLEEP:
                await supervisor.sleep(engine_id, command.sleep_level, deadline_s)
            case CommandKind.WAKE:
                await supervisor.wake(engine_id)
            case CommandKind.RESET_CACHE:
                await supervisor.reset_cache(engine_id)
            case CommandKind.CORDON:
                supervisor.cordon(engine_id, command.reason)
            case CommandKind.UNCORDON:
                self._on_uncordon(supervisor.uncordon(engine_id))
            case CommandKind.LORA_LOAD:
                await supervisor.load_adapter(engine_id, command.adapter, command.adapter_path)
            case CommandKind.LORA_UNLOAD:
                await supervisor.unload_adapter(engine_id, command.adapter)
            case _:
                assert_never(command.kind)

    def waiting_for(self, engine_id: str) -> list[str]:
        """Commands that are being obeyed for this engine."""
        return [name for name, command in self._obeyed.items() if command.engine_id == engine_id]

    def _remember(self, result: CommandResult) -> None:
        self._results[result.command_id] = result
        self._memory.results = [*self._memory.results, result][-RESULTS_KEPT_MAX:]
        self._results = {kept.command_id: kept for kept in self._memory.results}
        self._disk.save_commands(self._memory)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _tell(sending: asyncio.Future[None] | object) -> None:
    """Await an acknowledgement to the queue; a lost one only means that the command comes again."""
    try:
        await sending  # type: ignore[misc]
    except nats.errors.Error as error:
        log.warning("command not acknowledged", detail=str(error))
