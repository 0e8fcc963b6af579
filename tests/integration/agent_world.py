"""A bus, an agent process and the control plane's side of the bus, for tests of the agent."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

from dataplane.agent.disk import ProcessRecord
from dataplane.protocol.messages import (
    Acknowledgement,
    Beat,
    Bye,
    Command,
    CreditGrant,
    CreditRequest,
    EngineFacts,
    EngineSpec,
    EngineState,
    Hello,
    KvBatch,
    Progress,
    Telemetry,
    decode,
    encode,
)
from dataplane.protocol.subjects import (
    COMMAND_STREAM,
    COMMAND_SUBJECTS,
    KV_STREAM,
    ROLL_CALL,
    inbox_prefix,
    node_subject,
)
from tests.ports import free_port

NODE = "n1"
ANSWER_S_MAX = 20.0

T = TypeVar("T")

KINDS: dict[str, type[Any]] = {
    "hello": Hello,
    "beat": Beat,
    "bye": Bye,
    "telemetry": Telemetry,
    "ack": Acknowledgement,
    "progress": Progress,
    "kv": KvBatch,
}


def simulated(engine_id: str = "e1", role: str = "both", **options: Any) -> EngineSpec:
    return EngineSpec(
        engine_id=engine_id,
        kind="simulated",
        model="m",
        role=role,
        gpus=1,
        options={"max_num_seqs": 8, "kv_tokens": 16384, "context_tokens_max": 8192, **options},
    )


class Bus:
    """A nats-server with one user for the control plane and one for the node, restartable."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.password = secrets.token_hex(8)
        self._config = folder / "nats.conf"
        self._process: asyncio.subprocess.Process | None = None
        publish = [
            node_subject(NODE, ">"),
            f"$JS.API.CONSUMER.MSG.NEXT.{COMMAND_STREAM}.{NODE}",
            f"$JS.ACK.{COMMAND_STREAM}.{NODE}.>",
        ]
        subscribe = [node_subject(NODE, "credits"), ROLL_CALL, f"{inbox_prefix(NODE)}.>"]
        self._config.write_text(
            f"""
            host: 127.0.0.1
            port: {self.port}
            jetstream {{ store_dir: "{folder / "store"}" }}
            authorization {{ users = [
              {{ user: control, password: "{self.password}" }}
              {{ user: {NODE}, password: "{self.password}", permissions: {{
                   publish: {msgspec.json.encode(publish).decode()},
                   subscribe: {msgspec.json.encode(subscribe).decode()},
                   allow_responses: true }} }}
            ] }}
            """
        )

    async def start(self) -> None:
        program = Path(sysconfig.get_path("scripts")) / "nats-server"
        self._process = await asyncio.create_subprocess_exec(
            program if program.exists() else shutil.which("nats-server") or "nats-server",
            "--config",
            self._config,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(ANSWER_S_MAX):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Control:
    """The control plane's side of the bus: remembers what the node says."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._news = asyncio.Condition()
        self._client = Client()
        self.heard: list[Any] = []

    async def connect(self) -> None:
        async def ignore(_error: Exception) -> None: ...

        self._client = await nats.connect(
            self._bus.url,
            user="control",
            password=self._bus.password,
            reconnect_time_wait=0.1,
            max_reconnect_attempts=-1,
            error_cb=ignore,
        )
        for name, kind in KINDS.items():
            await self._client.subscribe(node_subject("*", name), cb=self._hear(kind))
        await self._client.flush()

    async def make_queue(self) -> None:
        stream = self._client.jetstream()
        await stream.add_stream(
            StreamConfig(
                name=COMMAND_STREAM,
                subjects=[COMMAND_SUBJECTS],
                retention=RetentionPolicy.WORK_QUEUE,
            )
        )
        await stream.add_consumer(
            COMMAND_STREAM,
            ConsumerConfig(
                durable_name=NODE, filter_subject=node_subject(NODE, "cmd"), ack_wait=10
            ),
        )

    async def forget_kv(self) -> None:
        """Empty the stream of KV reports."""
        await self._client.jetstream().purge_stream(KV_STREAM)

    async def close(self) -> None:
        await self._client.close()

    def _hear(self, kind: type[Any]) -> Callable[[Msg], Any]:
        async def hear(message: Msg) -> None:
            async with self._news:
                self.heard.append(decode(message.data, kind))
                self._news.notify_all()

        return hear

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def until(self, found: Callable[[], T | None], seconds: float = ANSWER_S_MAX) -> T:
        """The first truthy value of `found`, asked after each message."""
        async with self._news, asyncio.timeout(seconds):
            while True:
                value = found()
                if value:
                    return value
                await self._news.wait()

    async def engine(
        self,
        engine_id: str,
        state: EngineState,
        *,
        since: int = 0,
        seconds: float = ANSWER_S_MAX,
    ) -> EngineFacts:
        """The engine's facts in the first hello, after message number `since`, with this state."""

        def found() -> EngineFacts | None:
            for message in self.heard[since:]:
                if isinstance(message, Hello):
                    for facts in message.engines:
                        if facts.engine_id == engine_id and facts.state is state:
                            return facts
            return None

        return await self.until(found, seconds)

    async def roll_call(self) -> None:
        await self._client.publish(ROLL_CALL, b"")

    async def command(self, command: Command) -> None:
        await self._client.jetstream().publish(
            node_subject(NODE, "cmd"), encode(command), stream=COMMAND_STREAM
        )

    async def outcome(self, command_id: str, *, since: int = 0) -> Acknowledgement:
        def found() -> Acknowledgement | None:
            for message in self.heard[since:]:
                if isinstance(message, Acknowledgement) and message.command_id == command_id:
                    return message
            return None

        return await self.until(found)

    async def credits(
        self,
        replica_id: str,
        wants: dict[str, tuple[int, int]],
        held: dict[str, tuple[int, int]] | None = None,
        closed: list[str] | None = None,
    ) -> CreditGrant:
        request = CreditRequest(
            replica_id=replica_id, wants=wants, held=held or {}, closed=closed or []
        )
        reply = await self._client.request(node_subject(NODE, "credits"), encode(request), 5)
        return decode(reply.data, CreditGrant)

    async def pending_commands(self) -> int:
        info = await self._client.jetstream().consumer_info(COMMAND_STREAM, NODE)
        return (info.num_pending or 0) + (info.num_ack_pending or 0)


class AgentProcess:
    """`python -m dataplane.agent` on one data folder; may be started again and again."""

    def __init__(self, folder: Path, bus: Bus, *engines: EngineSpec) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._bus = bus
        self._file = folder / "wanted.json"
        self._process: asyncio.subprocess.Process | None = None
        self.environment: dict[str, str] = {}
        self.declare(*engines)

    def declare(self, *engines: EngineSpec) -> None:
        self._file.write_bytes(msgspec.json.encode(engines))

    async def start(self, *arguments: str) -> None:
        with (self.folder / "agent.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "dataplane.agent", "--node", NODE, "--nats-url", self._bus.url),
                *("--data-dir", str(self.folder / "data"), "--engines", str(self._file)),
                *arguments,
                env={
                    **os.environ,
                    "HEADWAY_AGENT_PASSWORD": self._bus.password,
                    **self.environment,
                },
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        async with asyncio.timeout(ANSWER_S_MAX):
            return await self._process.wait()

    def record(self, engine_id: str = "e1") -> ProcessRecord:
        path = self.folder / "data" / "engines" / engine_id / "process.json"
        return msgspec.json.decode(path.read_bytes(), type=ProcessRecord)

    async def clean_up(self) -> None:
        """End the agent and every engine that it has on record."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        for path in self.folder.glob("data/engines/*/process.json"):
            record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
            if record.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(record.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def agent_world(
    folder: Path, *engines: EngineSpec
) -> AsyncIterator[tuple[Bus, Control, AgentProcess]]:
    """A running bus with a listening control side, and an agent that is not started yet."""
    bus = Bus(folder / "bus")
    control = Control(bus)
    agent = AgentProcess(folder / "agent", bus, *engines)
    try:
        await bus.start()
        await control.connect()
        yield bus, control, agent
    finally:
        await agent.clean_up()
        await control.close()
        await bus.kill()


async def answers(port: int) -> bool:
    async with httpx2.AsyncClient(trust_env=False) as client:
        try:
            response = await client.get(f"http://127.0.0.1:{port}/health", timeout=2)
        except httpx2.HTTPError:
            return False
        return response.status_code == 200


async def until_gone(port: int, seconds: float = ANSWER_S_MAX) -> None:
    ends = time.monotonic() + seconds
    while await answers(port):
        assert time.monotonic() < ends, f"something still listens on {port}"
        await asyncio.sleep(0.05)


async def read_stream(port: int, tokens: int, started: asyncio.Event) -> str:
    """A greedy streamed completion; sets `started` at the first chunk, returns all of it."""
    body = {
        "model": "m",
        "prompt": "how far can you count",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    text = ""
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            text += line + "\n"
            started.set()
    return text
