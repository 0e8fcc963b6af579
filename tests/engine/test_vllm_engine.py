"""A real `vllm serve` under a real agent: start, answer, telemetry, death without orphans, stop.

Skipped without the environment of install_vllm.py, which `make test-engine` builds first.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from dataplane.agent.process import session_members
from dataplane.protocol.messages import EngineSpec, EngineState, Telemetry
from tests.engine.install_vllm import FINISHED, environment_folder
from tests.integration.agent_world import AgentProcess, Control, agent_world

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

READY_S_MAX = 240.0
TOKENS = 600


@pytest.fixture(scope="module")
def vllm() -> Path:
    folder = environment_folder()
    if not (folder / FINISHED).exists():
        pytest.skip(f"no vLLM in {folder}; run tests/engine/install_vllm.py")
    return folder


@pytest.fixture(scope="module")
def model(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    maker = Path(__file__).with_name("tiny_model.py")
    subprocess.run([vllm / "bin" / "python", maker, folder], check=True, capture_output=True)
    return folder


@pytest.fixture
async def world(
    vllm: Path, model: Path, tmp_path: Path
) -> AsyncIterator[tuple[Control, AgentProcess]]:
    spec = EngineSpec(
        engine_id="v1",
        kind="vllm",
        model="tiny",
        role="both",
        gpus=1,
        options={
            "executable": str(vllm / "bin" / "vllm"),
            "model_path": str(model),
            "max_num_seqs": 16,
            "max_model_len": 4096,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 * 1024 * 1024,
            "enforce_eager": True,
            "startup_s_max": READY_S_MAX,
        },
    )
    async with agent_world(tmp_path, spec) as (_, control, agent):
        agent.environment = cpu_environment()
        yield control, agent


def cpu_environment() -> dict[str, str]:
    """For engines that share the cores of a small machine, and can not reach a model hub."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "NIXL_PTHR_DELAY_US": "1000",
    }


async def test_a_real_engine_lives_under_the_agent(world: tuple[Control, AgentProcess]) -> None:
    control, agent = world
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


async def stream_chat(port: int) -> list[dict]:
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
