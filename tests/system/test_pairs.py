"""Pairs of simulated engines in a whole Headway: the scheduler's choice, and how the failure of a leg is told.

Prefill engines stand on a node whose GPUs cost a tenth, so that long prompts are cheaper there.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.domain.ids import RequestId
from controlplane.store import records
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from dataplane.agent.disk import ProcessRecord
from dataplane.engines.simulated.options import BLOCK_TOKENS
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of, engines, operator, until_quiet

LEASE_S = 2.0
OPTIONS = f"{{kv_lease_s: {LEASE_S}, kv_handshake_s: 0.3, allow_faults: true, speedup: 2.0}}"
CLUSTER = f"""
regions: [eu-west]
gpu_types:
  - {{name: cheap, hbm_bytes: 80000000000, bandwidth_bytes_per_s: 3.35e12, flops_per_s: 9.89e14,
     price_micro_usd_per_hour: 325000, price_source: test, price_date: 2026-11-01}}
  - {{name: dear, hbm_bytes: 80000000000, bandwidth_bytes_per_s: 3.35e12, flops_per_s: 9.89e14,
     price_micro_usd_per_hour: 3250000, price_source: test, price_date: 2026-11-01}}
models:
  - {{name: small, parameters: 8000000000, layers: 32, hidden_size: 4096,
     weights_bytes: 16000000000, kv_bytes_per_token: 131072, context_tokens_max: 32768,
     load_ms: 2000, price_prompt_micro_usd_per_mtok: 200000, price_cached_micro_usd_per_mtok: 50000,
     price_completion_micro_usd_per_mtok: 600000}}
slo_classes:
  - {{name: interactive, ttft_ms_max: 20000, tpot_ms_max: 1000, e2e_ms_max: 60000,
     value_micro_usd: 10000, late_micro_usd_per_s: 5}}
tenants:
  - {{id: acme, name: Acme, tenant_class: gold, slo_class: interactive, budget_usd: 1000.0}}
nodes:
  - id: n1
    region: eu-west
    gpu_type: cheap
    gpus: 2
    address: 127.0.0.1
    engines:
      - {{engine_id: p0, kind: simulated, model: small, role: prefill, gpus: 1, options: {OPTIONS}}}
      - {{engine_id: p1, kind: simulated, model: small, role: prefill, gpus: 1, options: {OPTIONS}}}
  - id: n2
    region: eu-west
    gpu_type: dear
    gpus: 1
    address: 127.0.0.1
    engines:
      - {{engine_id: d0, kind: simulated, model: small, role: decode, gpus: 1, options: {OPTIONS}}}
"""


@pytest.fixture(scope="module")
async def pairs(anyio_backend: str, server_folder: Path) -> AsyncIterator[LocalCluster]:
    local = LocalCluster(
        data_dir=server_folder / "pairs", port=free_port(), cluster=parse_cluster(CLUSTER)
    )
    await local.start()
    try:
        async with asyncio.timeout(90):
            while {row["state"] for row in await engines(local)} != {"serving"}:
                await asyncio.sleep(0.1)
        yield local
    finally:
        await local.stop()


def port_of(cluster: LocalCluster, engine_id: str) -> int:
    [path] = cluster.data_dir.rglob(f"{engine_id}/process.json")
    return msgspec.json.decode(path.read_bytes(), type=ProcessRecord).ports[0]


async def http(cluster: LocalCluster, engine_id: str, method: str, path: str, **more: Any) -> str:
    async with httpx2.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{port_of(cluster, engine_id)}{path}"
        return (await client.request(method, url, **more)).text


async def fault(cluster: LocalCluster, engine_id: str, **faults: Any) -> None:
    await http(cluster, engine_id, "POST", "/fault", json=faults)


async def ask(client: AsyncOpenAI, prompt: str, tokens: int = 8) -> str:
    answer = await client.completions.create(
        model="small", prompt=prompt, max_tokens=tokens, temperature=0
    )
    return answer.choices[0].text


async def legs(cluster: LocalCluster) -> list[tuple[int, str, str, str]]:
    """Legs of the last call, as an operator reads them."""
    await check_invariants(cluster)
    engine = make_engine(cluster.database_url)
    try:
        last = (await records.list_requests(engine, limit=1)).items[0]
        detail = await records.get_request(engine, RequestId(last.id))
    finally:
        await engine.dispose()
    assert detail is not None
    return [(one.number, one.leg, one.engine_id, one.outcome) for one in detail.attempts]


async def cached(cluster: LocalCluster) -> tuple[int, int, int]:
    """Of the last call: prompt tokens thought to be cached, told to be, and all."""
    engine = make_engine(cluster.database_url)
    try:
        last = (await records.list_requests(engine, limit=1)).items[0]
    finally:
        await engine.dispose()
    told = await operator(cluster, f"/operator/v1/requests/{last.id}/explain")
    won = next(one for one in told["candidates"] if one["is_winner"])  # type: ignore[attr-defined]
    return won["cached_tokens"], last.cached_tokens, last.prompt_tokens


async def counted(cluster: LocalCluster, leg: str) -> float:
    async with httpx2.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{cluster.url}/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("headway_prefill_fallbacks_total{") and f'leg="{leg}"' in line
    )


def prompt_of(name: str) -> str:
    return f"{name}: " + "a prompt that is long enough to be moved " * 300


async def test_the_failure_of_a_leg_is_told_counted_and_survived(pairs: LocalCluster) -> None:
    async with client_of(pairs, "acme", retries=0) as client:
        await ask(client, "short")
        assert [leg[1:] for leg in await legs(pairs)] == [("whole", "d0", "ok")]

        await ask(client, prompt_of("moved"))
        found = await legs(pairs)
        assert [(leg, engine[0], outcome) for _, leg, engine, outcome in found] == [
            ("prefill", "p", "ok"),
            ("decode", "d", "ok"),
        ]

        # The decode engine holds what it has fetched, and is thought to: the prompt is not moved again.
        await ask(client, prompt_of("moved"))
        assert [leg[1:] for leg in await legs(pairs)] == [("whole", "d0", "ok")]
        predicted, told, prompt = await cached(pairs)
        assert told == (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert abs(predicted - told) <= BLOCK_TOKENS

        # One prefill engine fails: the other one is asked, and the call is a retry of the budget.
        await fault(pairs, "p0", kv_withheld=True)
        for number in range(20):
            # Which of the two is asked first is a hash's choice.
            await ask(client, prompt_of(f"without it {number}"))
            found = await legs(pairs)
            if len(found) > 2:
                break
        await fault(pairs, "p0")
        assert [leg for _, leg, _, _ in found] == ["prefill", "prefill", "decode"]
        assert [number for number, _, _, _ in found] == [0, 1, 1]
        assert found[0][2] != found[1][2]
        assert await counted(pairs, "prefill") == 1

        # Both fail: the decode engine does it alone.
        for engine in ("p0", "p1"):
            await fault(pairs, engine, drop_before_first_byte=True)
        await ask(client, prompt_of("alone"))
        found = await legs(pairs)
        assert found[-1][1:] == ("whole", "d0", "ok")
        assert {leg for _, leg, _, _ in found[:-1]} == {"prefill"}
        assert await counted(pairs, "whole") == 1

        # It hangs, and the deadline is not far: half of the time is left for the other engine.
        for engine in ("p0", "p1"):
            await fault(pairs, engine, hang=True)
        answer = await client.completions.create(
            model="small", prompt=prompt_of("hanging"), max_tokens=8, temperature=0,
            extra_headers={"x-headway-deadline-ms": "4000"},
        )  # fmt: skip
        assert answer.choices[0].finish_reason
        assert (await legs(pairs))[-1][1] == "whole"
        for engine in ("p0", "p1"):
            await fault(pairs, engine)
    await until_quiet(pairs)
    async with asyncio.timeout(3 * LEASE_S):
        for engine in ("p0", "p1", "d0"):
            while "kv_cache_usage_perc" in (text := await metrics(pairs, engine)):
                if used(text) == 0:
                    break
                await asyncio.sleep(0.1)


async def metrics(cluster: LocalCluster, engine_id: str) -> str:
    return await http(cluster, engine_id, "GET", "/metrics")


def used(text: str) -> float:
    return next(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:kv_cache_usage_perc{")
    )
