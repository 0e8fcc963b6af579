"""A real `vllm serve` under a real agent: start, answer, telemetry, death without orphans, stop."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from dataplane.agent.process import session_members
from dataplane.protocol.messages import EngineState, Telemetry
from tests.engine.environment import READY_S_MAX, cpu_environment, tiny_engine
from tests.integration.agent_world import agent_world

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 600


async def test_a_real_engine_lives_under_the_agent(vllm: Path, model: Path, tmp_path: Path) -> None:
    spec = tiny_engine("v1", "both", vllm, model)
    async with agent_world(tmp_path, spec) as (_, control, agent):
        agent.environment = cpu_environment()
        await agent.start()
        facts = await control.engine("v1", EngineState.SERVING, seconds=READY_S_MAX)
        assert facts.seats == 16
        assert (facts.block_tokens, facts.context_tokens_max) == (32, 4096)
        assert facts.kv_tokens >= 4096

        chunks = await stream_chat(facts.port)
        usage = chunks[-1]["usage"]
        assert (usage["completion_tokens"], chunks[-1]["choices"]) == (TOKENS, [])
        telemetry = await control.until(
            lambda: next(
                (
                    engine
                    for message in control.all(Telemetry)
                    for engine in message.engines
                    if engine.generation_tokens == TOKENS and engine.running == 0
                ),
                None,
            )
        )
        assert telemetry.ttft_count == 1
        assert telemetry.itl_count > 0
        assert telemetry.prompt_tokens == usage["prompt_tokens"]
        assert telemetry.prefix_queries_tokens > 0

        record = agent.record("v1")
        members = session_members(record.pid, record.start_ticks)
        assert len(members) > 1, "the engine core is a process of its own"
        before = len(control.heard)
        os.kill(record.pid, signal.SIGKILL)
        await control.engine("v1", EngineState.STARTING, since=before)
        await until_dead(members)
        again = await control.engine("v1", EngineState.SERVING, since=before, seconds=READY_S_MAX)
        assert again.started_ms > facts.started_ms

        record = agent.record("v1")
        members = session_members(record.pid, record.start_ticks)
        assert await agent.stop() == 0
        await until_dead(members)


async def test_a_real_pair_moves_the_prompts_kv(vllm: Path, model: Path, tmp_path: Path) -> None:
    try:
        await check_a_pair(vllm, model, tmp_path / "first")
    except httpx2.RemoteProtocolError:
        # The CPU build of the transfer library can take its engine down; a new pair has one more try.
        await check_a_pair(vllm, model, tmp_path / "second")


async def check_a_pair(vllm: Path, model: Path, folder: Path) -> None:
    folder.mkdir()
    pair = (tiny_engine("p", "prefill", vllm, model), tiny_engine("d", "decode", vllm, model))
    async with agent_world(folder, *pair) as (_, control, agent):
        agent.environment = cpu_environment()
        await agent.start()
        prefill = await control.engine("p", EngineState.SERVING, seconds=READY_S_MAX)
        decode = await control.engine("d", EngineState.SERVING, seconds=READY_S_MAX)
        body = {"prompt": "a prompt to be moved " * 30, "max_tokens": 24, "temperature": 0}
        first = await complete(
            prefill.port,
            {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
        )
        params = first["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        moved = await complete(decode.port, {**body, "kv_transfer_params": params})
        computed = await complete(prefill.port, body)
        assert moved["choices"][0]["text"] == computed["choices"][0]["text"]
        assert await external_hits(decode.port) == moved["usage"]["prompt_tokens"]


async def external_hits(port: int) -> float:
    async with httpx2.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total{")
    )


async def complete(port: int, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx2.AsyncClient(trust_env=False, timeout=120) as client:
        response = await client.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "tiny", **body},
            headers={"x-request-id": "moved"},
        )
    assert response.status_code == 200, response.text
    return response.json()


async def stream_chat(port: int) -> list[dict[str, Any]]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say something long."}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=120) as client,
        client.stream(
            "POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body
        ) as response,
    ):
        assert response.status_code == 200
        return [
            msgspec.json.decode(line.removeprefix("data: "))
            async for line in response.aiter_lines()
            if line.startswith("data: {")
        ]


async def until_dead(pids: list[int], seconds: float = 15.0) -> None:
    ends = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]:
        assert time.monotonic() < ends, f"processes {left} are left over"
        await asyncio.sleep(0.1)
