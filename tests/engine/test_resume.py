"""A real vLLM loses its core in the middle of sixteen streams, and another goes on with each of them.

The oracle is what the same calls said while nothing happened. Other ways for an engine to end belong here too:
give `end_of` one more.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store import records
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of

from .environment import READY_S_MAX, cpu_environment
from .test_whole_path import CLUSTER as ONE_ENGINE

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(600)]

# Longer than what an engine has said before its clients hear of it.
TOKENS = 1_000
STREAMS = 16
SECOND_ENGINE = """
      - {{engine_id: v2, kind: vllm, model: tiny, role: both, gpus: 1, options: {{
         executable: {executable}, model_path: {model}, max_num_seqs: 16, max_model_len: 4096,
         block_size: 32, kv_cache_memory_bytes: 67108864, enforce_eager: true,
         startup_s_max: {ready_s_max} }} }}
"""
CLUSTER = ONE_ENGINE.replace("gpus: 1\n    address", "gpus: 2\n    address") + SECOND_ENGINE[1:]
WORDS = [
    "the",
    "sea",
    "and",
    "the",
    "wind",
    "above",
    "a",
    "quiet",
    "harbour",
    "where",
    "boats",
    "wait",
    "for",
    "the",
    "tide",
]


@dataclass
class Heard:
    """One stream as its client heard it."""

    engine: str = ""
    text: str = ""
    reason: str | None = None
    usage: tuple[int, int] = (0, 0)

    @property
    def same(self) -> tuple[object, ...]:
        return self.text, self.reason, self.usage


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, vllm: Path, model: Path
) -> AsyncIterator[LocalCluster]:
    os.environ.update(cpu_environment())
    document = parse_cluster(
        CLUSTER.format(executable=vllm / "bin" / "vllm", model=model, ready_s_max=READY_S_MAX)
    )
    local = LocalCluster(
        data_dir=server_folder / "pair", port=free_port(), cluster=document, ready_s_max=READY_S_MAX
    )
    await local.start()
    try:
        yield local
    finally:
        await local.stop()


def calls() -> list[dict[str, Any]]:
    """Half of them chats; one seeded, one held to a schema."""
    made: list[dict[str, Any]] = []
    for number in range(STREAMS):
        text = " ".join(WORDS[(number * 5 + at) % len(WORDS)] for at in range(10 + 6 * number))
        body: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}
        if number % 2:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        made.append(body)
    made[2] |= {"temperature": 1, "seed": 11}
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 200}}}
    schema["required"] = ["a"]
    made[3]["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "one", "schema": schema},
    }
    return made


async def listen(
    client: AsyncOpenAI, body: dict[str, Any], on_piece: Callable[[Heard], None]
) -> Heard:
    while True:
        got = Heard()
        try:
            await hear(client, body, on_piece, got)
        except APIError:
            if got.text:
                raise
            # It met the engine that has just ended, and had not begun: sent again like any call.
            await asyncio.sleep(0.5)
        else:
            return got


async def hear(
    client: AsyncOpenAI, body: dict[str, Any], on_piece: Callable[[Heard], None], got: Heard
) -> None:
    create = (
        client.chat.completions if "messages" in body else client.completions
    ).with_raw_response
    answer = await create.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **body
    )
    # A stream that was opened while it waited does not tell its engine.
    got.engine = answer.headers.get("x-headway-engine", "")
    async for chunk in answer.parse():
        if chunk.usage:
            got.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            got.text += (choice.text if delta is None else delta.content) or ""
            got.reason = choice.finish_reason or got.reason
        on_piece(got)


def core_of(pid: int) -> int:
    """The process in which the engine computes, below the one that listens."""
    for child in psutil.Process(pid).children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()):
            return child.pid
    raise AssertionError("no engine core")


def kill_core(pid: int) -> None:
    os.kill(core_of(pid), signal.SIGKILL)


async def test_streams_outlive_the_core_of_their_engine(cluster: LocalCluster) -> None:
    await streams_outlive(cluster, kill_core)


async def streams_outlive(cluster: LocalCluster, end: Callable[[int], None]) -> None:
    """All streams say what they said before when `end` is done to one of two engines in between."""
    bodies = calls()
    async with client_of(cluster, "acme", retries=20) as client:
        first = await asyncio.gather(*(listen(client, body, lambda _: None) for body in bodies))
        # Four more know how they are stopped: by a text that takes several tokens.
        for number in (4, 5, 8, 9):
            stop = first[number].text[400:412]
            if len(stop) == 12 and "\ufffd" not in stop:
                bodies[number]["stop"] = [stop]
        wanted = await asyncio.gather(*(listen(client, body, lambda _: None) for body in bodies))
        for number in range(STREAMS):
            if "stop" not in bodies[number]:
                assert wanted[number].same == first[number].same, "the engine is not deterministic"

        begun: dict[int, Heard] = {}
        pieces: dict[int, int] = {}
        ended: list[str] = []

        def on_piece(got: Heard) -> None:
            begun[id(got)] = got
            pieces[id(got)] = pieces.get(id(got), 0) + 1
            is_time = len(begun) == STREAMS or pieces[id(got)] > TOKENS // 2
            if not ended and got.engine and is_time and pieces[id(got)] > 20:
                ended.append(got.engine)
                end(cluster.engine_pids()[got.engine])

        got = await asyncio.gather(*(listen(client, body, on_piece) for body in bodies))
    assert ended
    for number, (have, want) in enumerate(zip(got, wanted, strict=True)):
        assert have.same == want.same, f"{number} {bodies[number]}"
    await check_invariants(cluster)
    assert await resumed(cluster) > 1
    engine = make_engine(cluster.database_url)
    try:
        newest = (await records.list_requests(engine, limit=3 * STREAMS)).items
    finally:
        await engine.dispose()
    # Calls that had not begun were sent again, and are no stream's.
    last = [one for one in newest if one.state == "succeeded"][:STREAMS]
    assert sum(one.completion_tokens for one in last) == sum(one.usage[1] for one in got)
    unbegun = newest[: newest.index(last[-1])]
    assert all(one.completion_tokens == 0 for one in unbegun if one.state != "succeeded")


async def resumed(cluster: LocalCluster) -> float:
    async with httpx2.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{cluster.url}/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("headway_stream_resumes_total{") and 'outcome="resumed"' in line
    )
