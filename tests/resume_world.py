"""Simulated engines in this loop, behind the gateway, and what they would say undisturbed: the oracle of
every test of streams that go on elsewhere.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from controlplane.gateway.upstream import Address
from dataplane.engines.simulated.batching import Finish
from dataplane.engines.simulated.faults import Faults
from dataplane.engines.simulated.loop import Answer as SimulatedAnswer
from dataplane.engines.simulated.loop import Engine
from dataplane.engines.simulated.options import SimulatedOptions
from dataplane.engines.simulated.server import EngineProtocol, Server
from dataplane.engines.simulated.text import TOKEN_BYTES, is_split
from tests.gateway_world import KEY, Answer, Client, World

MODEL = "mock"
OPTIONS = SimulatedOptions(
    context_tokens_max=4096,
    kv_tokens=65_536,
    completion_tokens_mean=10_000,
    split_characters_permille=150,
    draws_by_chance=True,
    allow_faults=True,
)


class Remembering(Engine):
    """Keeps what it was asked for, so that a test can look at its tokens."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.answers: list[SimulatedAnswer] = []

    def submit(self, answer: SimulatedAnswer) -> None:
        self.answers.append(answer)
        super().submit(answer)


@dataclass
class Simulated:
    """One engine of this process."""

    engine: Remembering
    address: Address
    server: uvicorn.Server

    def fault(self, **members: Any) -> None:
        self.engine.use_faults(Faults(**members))


@contextlib.asynccontextmanager
async def simulated_engines(
    count: int, options: SimulatedOptions = OPTIONS
) -> AsyncIterator[list[Simulated]]:
    import socket

    engines: list[Simulated] = []
    tasks: list[asyncio.Future[Any]] = []
    for _ in range(count):
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()[:2]
        engine = Remembering(options, gpus=1, model=MODEL)
        config = uvicorn.Config(
            Server(engine, host, port),
            http=EngineProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="error",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        tasks.append(asyncio.ensure_future(server._serve([listener])))
        tasks.append(asyncio.ensure_future(engine.run()))
        engines.append(Simulated(engine, (host, port), server))
    while not all(one.server.started for one in engines):
        await asyncio.sleep(0.005)
    try:
        yield engines
    finally:
        for one in engines:
            one.server.should_exit = True
            for connection in tuple(one.server.server_state.connections):
                connection.transport.abort()
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.wait(tasks)


@dataclass
class Heard:
    """A stream as a client hears it, answer by answer."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    stop_reasons: dict[int, Any] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False

    def same(self) -> tuple[Any, ...]:
        """What must be as if nothing had happened."""
        counts = None
        if self.usage is not None:
            counts = (self.usage["prompt_tokens"], self.usage["completion_tokens"])
        return (
            self.texts, self.reasons, self.stop_reasons, self.logprobs, self.roles, counts,
            self.error, self.is_done,
        )  # fmt: skip


def is_lossless(got: Heard, engines: list[Simulated], tokens: int) -> bool:
    """Whether each answer is what some engine has for the whole of it, prompt and earlier engines' tokens
    included: none missing, none doubled. `tokens` is the limit that all of them have reached.
    """
    ends = [
        bytes(sequence.tokens)[: -TOKEN_BYTES if is_split(sequence.tokens) else None]
        for engine in engines
        for answer in engine.engine.answers
        for sequence in answer.sequences
        if sequence.finish is Finish.LENGTH
    ]
    texts = [text.encode() for text in got.texts.values()]
    return (
        got.is_done
        and all(len(text) in (TOKEN_BYTES * tokens, TOKEN_BYTES * (tokens - 1)) for text in texts)
        and all(any(end.endswith(text) for end in ends) for text in texts)
    )


def heard(body: bytes) -> Heard:
    got = Heard()
    for one in body.split(b"\n\n"):
        if not one.startswith(b"data: "):
            assert one == b"" or one.startswith(b":"), one
            continue
        assert not got.is_done
        if one == b"data: [DONE]":
            got.is_done = True
            continue
        chunk = json.loads(one[6:])
        if "error" in chunk:
            assert got.error is None
            got.error = chunk["error"]
            continue
        got.ids.add(chunk["id"])
        if chunk.get("usage"):
            got.usage = chunk["usage"]
        assert chunk.get("prompt_token_ids") is None
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in got.reasons
            assert choice.get("token_ids") is None
            assert choice.get("prompt_token_ids") is None
            delta = choice.get("delta", {})
            got.roles[index] = got.roles.get(index, 0) + ("role" in delta)
            text = choice["text"] if "text" in choice else delta.get("content") or ""
            got.texts[index] = got.texts.get(index, "") + text
            told = choice.get("logprobs")
            if told:
                entries = got.logprobs.setdefault(index, [])
                if "content" in told:
                    entries += told["content"]
                else:
                    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                    entries += zip(*(told[name] for name in names), strict=True)
            if choice["finish_reason"]:
                got.reasons[index] = choice["finish_reason"]
                got.stop_reasons[index] = choice.get("stop_reason")
    return got


async def asked(address: Address, body: dict[str, Any], path: str) -> Answer:
    """A call of an engine itself, or of a gateway."""
    reader, writer = await asyncio.open_connection(*address)
    client = Client(reader, writer)
    try:
        await client.send(body, path)
        return await client.answer()
    finally:
        writer.close()


async def through(world: World, body: dict[str, Any], path: str) -> Heard:
    answer = await world.post(body, path, authorization=f"Bearer {KEY}")
    assert answer.status == 200, answer.body
    return heard(answer.body)
