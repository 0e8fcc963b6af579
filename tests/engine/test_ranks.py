"""Data-parallel ranks of a real vLLM: each an engine of its own, and calls go to the one that was decided.

Eight processes on few cores take minutes to start: `pytest -m slow tests/engine`.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store.cluster import parse_cluster
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of, engines

from .environment import TENANTS, TINY_CATALOGUE, cpu_environment

pytestmark = [
    pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900),
]  # fmt: skip

# Eight processes, on two cores.
READY_S_MAX = 480.0

CLUSTER = (
    TINY_CATALOGUE
    + TENANTS
    + """
nodes:
  - id: n1
    region: lab
    gpu_type: cpu
    gpus: 2
    address: 127.0.0.1
    engines:
      - {{engine_id: v2, kind: vllm, model: tiny, role: both, gpus: 2, profile: data-2,
         options: {options}}}
"""
)


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, vllm: Path, model: Path
) -> AsyncIterator[LocalCluster]:
    os.environ.update(cpu_environment())
    options = {
        "executable": str(vllm / "bin" / "vllm"), "model_path": str(model),
        "startup_s_max": READY_S_MAX, "enforce_eager": True, "max_num_seqs": 8,
        "max_model_len": 4096, "block_size": 32, "kv_cache_memory_bytes": 67108864,
    }  # fmt: skip
    local = LocalCluster(
        data_dir=server_folder / "ranks", port=free_port(),
        cluster=parse_cluster(CLUSTER.format(options=options)), ready_s_max=READY_S_MAX,
    )  # fmt: skip
    await local.start()
    try:
        yield local
    finally:
        await local.stop()


async def answer(client: AsyncOpenAI, prompt: str, tokens: int) -> str:
    """The engine that gave an answer."""
    raw = await client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0
    )
    return raw.headers["x-headway-engine"]


async def generated(cluster: LocalCluster) -> dict[str, float]:
    """Tokens that vLLM counts, by rank."""
    port = (await engines(cluster))[0]["port"]
    async with httpx2.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    found = re.findall(
        r'^vllm:generation_tokens_total{engine="(\d+)"[^}]*} (\S+)', text, re.MULTILINE
    )
    return {rank: float(value) for rank, value in found}


async def test_ranks_are_engines_and_get_the_calls_that_were_decided(cluster: LocalCluster) -> None:
    rows = {str(row["id"]): row for row in await engines(cluster)}
    assert set(rows) == {"v2/0", "v2/1"}
    assert {row["gpus"] for row in rows.values()} == {1}
    assert {row["seats_capacity"] for row in rows.values()} == {8}
    assert rows["v2/0"]["port"] == rows["v2/1"]["port"]
    before = await generated(cluster)
    async with client_of(cluster, "acme") as client:
        served = await asyncio.gather(
            *(answer(client, f"tell me about number {at}", 40) for at in range(16))
        )
    assert set(served) == {"v2/0", "v2/1"}
    after = await generated(cluster)
    for rank in ("0", "1"):
        assert after[rank] - before[rank] == 40 * served.count(f"v2/{rank}")
    await check_invariants(cluster)
