"""A real vLLM is drained in the middle of a long stream, and hands the KV of it to the one that goes on.

The oracle is what the same call said while nothing happened, and vLLM's own counters.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store.cluster import parse_cluster
from tests.ports import free_port
from tests.system.conftest import client_of

from .environment import (
    PREFILL_ENVIRONMENT,
    READY_S_MAX,
    TENANTS,
    TINY_CATALOGUE,
    cpu_environment,
)
from .test_pairs import last_request, metric, ports, until_serving

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(900)]

ENGINES = """
nodes:
  - id: n1
    region: lab
    gpu_type: cpu
    gpus: 2
    address: 127.0.0.1
    engines:
      - {{engine_id: v1, kind: vllm, model: tiny, role: both, gpus: 1, options: &options {{
         executable: {executable}, model_path: {model}, max_num_seqs: 16, max_model_len: 4096,
         block_size: 32, kv_cache_memory_bytes: 67108864, enforce_eager: true,
         startup_s_max: {ready_s_max}, kv_connector: nixl }} }}
      - {{engine_id: v2, kind: vllm, model: tiny, role: both, gpus: 1, options: *options}}
"""
PROMPT = " ".join(f"{number} boats wait for the tide" for number in range(260))
TOKENS = 1_000
# A stream is left as soon as its engine is drained.
LEAVES_AT_ONCE = {"HEADWAY_STREAM_LEAVE_S": "0"}


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, vllm: Path, model: Path
) -> AsyncIterator[LocalCluster]:
    os.environ.update(cpu_environment() | PREFILL_ENVIRONMENT | LEAVES_AT_ONCE)
    text = (TINY_CATALOGUE + ENGINES + TENANTS).format(
        executable=vllm / "bin" / "vllm", model=model, ready_s_max=READY_S_MAX
    )
    local = LocalCluster(
        data_dir=server_folder / "hand-over",
        port=free_port(),
        cluster=parse_cluster(text),
        ready_s_max=READY_S_MAX,
    )
    await local.start()
    try:
        await until_serving(local, {"v1", "v2"})
        yield local
    finally:
        await local.stop()
        for name in LEAVES_AT_ONCE:
            os.environ.pop(name)


async def listen(
    client: AsyncOpenAI, on_piece: asyncio.Event | None = None
) -> tuple[str, tuple[str, str | None, Any]]:
    answer = await client.completions.with_raw_response.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    engine = answer.headers["x-headway-engine"]
    text, reason, used, pieces = "", None, None, 0
    async for chunk in answer.parse():
        pieces += 1
        if chunk.usage:
            used = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
        if on_piece is not None and pieces > 20:
            on_piece.set()
    return engine, (text, reason, used)


async def test_kv_goes_along_with_a_stream(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        engine, wanted = await listen(client)
        other = {"v1": "v2", "v2": "v1"}[engine]
        port = ports(cluster)[other]
        before = {name: await metric(port, name) for name in MOVED}
        is_flowing = asyncio.Event()
        stream = asyncio.create_task(listen(client, is_flowing))
        await is_flowing.wait()
        async with httpx2.AsyncClient(
            base_url=cluster.url,
            headers={"authorization": f"Bearer {cluster.operator_key}"},
            trust_env=False,
        ) as http:
            told = await http.post(f"/operator/v1/engines/{engine}/drain", json={"deadline_s": 60})
            assert told.is_success, told.text
        began, got = await stream
        assert began == engine
        assert got == wanted
        after = {name: await metric(port, name) for name in MOVED}
    prompt_tokens = wanted[2][0]
    grown = {name: after[name] - before[name] for name in MOVED}
    assert grown["external_prefix_cache_hits_total"] >= prompt_tokens
    assert grown["nixl_num_failed_transfers_total"] == 0
    _, attempts = await last_request(cluster)
    assert {one.leg for one in attempts} == {"whole", "hand_over", "continue"}


MOVED = ("external_prefix_cache_hits_total", "nixl_num_failed_transfers_total")
