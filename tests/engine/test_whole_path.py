"""The whole path on a real vLLM: the official SDK, the gate, credits of a real agent, settled money."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store import records
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of, operator

from .environment import READY_S_MAX, TENANTS, TINY_CATALOGUE, cpu_environment

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(600)]

CLUSTER = (
    TINY_CATALOGUE
    + TENANTS
    + """
nodes:
  - id: n1
    region: lab
    gpu_type: cpu
    gpus: 1
    address: 127.0.0.1
    engines:
      - {{engine_id: v1, kind: vllm, model: tiny, role: both, gpus: 1, options: {{
         executable: {executable}, model_path: {model}, max_num_seqs: 16, max_model_len: 4096,
         block_size: 32, kv_cache_memory_bytes: 67108864, enforce_eager: true,
         startup_s_max: {ready_s_max} }} }}
"""
)


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, vllm: Path, model: Path
) -> AsyncIterator[LocalCluster]:
    os.environ.update(cpu_environment())
    document = parse_cluster(
        CLUSTER.format(executable=vllm / "bin" / "vllm", model=model, ready_s_max=READY_S_MAX)
    )
    local = LocalCluster(
        data_dir=server_folder / "vllm", port=free_port(), cluster=document, ready_s_max=READY_S_MAX
    )
    await local.start()
    try:
        yield local
    finally:
        await local.stop()


async def settled(cluster: LocalCluster) -> records.RequestRecord:
    await check_invariants(cluster)
    engine = make_engine(cluster.database_url)
    try:
        return (await records.list_requests(engine, limit=1)).items[0]
    finally:
        await engine.dispose()


async def stream(client: AsyncOpenAI, prompt: str, tokens: int) -> tuple[str, object]:
    text, usage = "", None
    chunks = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in chunks:
        usage = chunk.usage or usage
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text, usage


async def test_a_streamed_chat_is_settled_to_the_token(cluster: LocalCluster) -> None:
    prompt = "Tell me about the sea, and about the wind. " * 20
    async with client_of(cluster, "acme") as client:
        first, usage = await stream(client, prompt, 200)
        record = await settled(cluster)
        assert first
        assert (record.state, record.completion_tokens) == ("succeeded", 200)
        assert record.prompt_tokens == usage.prompt_tokens  # type: ignore[attr-defined]
        assert not record.is_usage_estimated
        assert record.ttft_ms is not None
        paid = (record.prompt_tokens - record.cached_tokens) * 1_000_000
        paid += record.cached_tokens * 100_000 + record.completion_tokens * 2_000_000
        assert record.settled_micro_usd == pytest.approx(paid / 1_000_000, abs=2)

        # Greedy and cached: the same words, and most of the prompt is not paid in full again.
        again, _ = await stream(client, prompt, 200)
        record = await settled(cluster)
        assert again == first
        assert record.cached_tokens > record.prompt_tokens // 2


async def test_completions_and_errors_of_the_engine(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        answer = await client.completions.create(
            model="tiny", prompt="once upon a time", max_tokens=16, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        models = [model async for model in await client.models.list()]
        assert models[0].model_extra == {"max_model_len": 4096} | (models[0].model_extra or {})


async def test_a_client_that_leaves_is_charged_for_what_it_got(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        chunks = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "count for ever"}],
            max_tokens=3000,
            temperature=0,
            stream=True,
        )
        seen = 0
        async for _ in chunks:
            seen += 1
            if seen == 20:
                break
        await chunks.close()
    record = await settled(cluster)
    assert record.state == "cancelled"
    assert 0 < record.completion_tokens < 3000
    # The engine's own count comes with its next report.
    async with asyncio.timeout(20):
        while await running(cluster) != [0]:
            await asyncio.sleep(0.1)


async def running(cluster: LocalCluster) -> list[int]:
    found = await operator(cluster, "/operator/v1/engines")
    return [row["running"] for row in found["data"]]  # type: ignore[attr-defined]
