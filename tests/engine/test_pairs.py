"""Prefill and decode on real vLLM: the official SDK, the scheduler's own choice, the NIXL transfer, the death of a leg.

Two nodes whose GPU types have other prices, so that a long prompt is cheaper on the prefill engine; a third engine
serves the same weights under another name and says what is right.
"""

import asyncio
import os
import signal
import time
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
from dataplane.agent.process import session_members
from tests.engine.environment import PREFILL_ENVIRONMENT, READY_S_MAX, cpu_environment
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of, operator

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(1500)]

# A real transfer takes seconds on a busy machine without a GPU, and vLLM renews a lease in whole seconds.
LEASE_S = 12
CLUSTER = """
regions: [lab]
gpu_types:
  - {{name: cheap, hbm_bytes: 16000000000, bandwidth_bytes_per_s: 2.0e10, flops_per_s: 1.0e11,
     price_micro_usd_per_hour: 10000, price_source: test, price_date: 2026-11-01}}
  - {{name: dear, hbm_bytes: 16000000000, bandwidth_bytes_per_s: 2.0e10, flops_per_s: 1.0e11,
     price_micro_usd_per_hour: 1000000, price_source: test, price_date: 2026-11-01}}
models:
  - &model {{name: tiny, parameters: 1340000, layers: 2, hidden_size: 128, weights_bytes: 2950000,
     kv_bytes_per_token: 512, context_tokens_max: 4096, load_ms: 20000,
     price_prompt_micro_usd_per_mtok: 1000000, price_cached_micro_usd_per_mtok: 100000,
     price_completion_micro_usd_per_mtok: 2000000}}
  - {{<<: *model, name: plain}}
slo_classes:
  - {{name: interactive, ttft_ms_max: 60000, tpot_ms_max: 2000, e2e_ms_max: 240000,
     value_micro_usd: 10000, late_micro_usd_per_s: 5}}
tenants:
  - {{id: acme, name: Acme, tenant_class: gold, slo_class: interactive, budget_usd: 100.0}}
nodes:
  - id: n2
    region: lab
    gpu_type: dear
    gpus: 2
    address: 127.0.0.1
    engines:
      - {{engine_id: d, kind: vllm, model: tiny, role: decode, gpus: 1, options: &options {{
         executable: {executable}, model_path: {model}, max_num_seqs: 16, max_model_len: 4096,
         block_size: 32, kv_cache_memory_bytes: 67108864, enforce_eager: true,
         startup_s_max: {ready_s_max}, kv_lease_s: {lease_s} }} }}
      - {{engine_id: v, kind: vllm, model: plain, role: both, gpus: 1, options: *options}}
  - id: n1
    region: lab
    gpu_type: cheap
    gpus: 1
    address: 127.0.0.1
    engines:
      - {{engine_id: p, kind: vllm, model: tiny, role: prefill, gpus: 1, options: {{
         <<: *options, executable: {prefill_executable} }} }}
"""


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, vllm: Path, model: Path
) -> AsyncIterator[LocalCluster]:
    os.environ.update(cpu_environment())
    executable = server_folder / "vllm-that-prefills"
    lines = [f"export {name}={value}" for name, value in PREFILL_ENVIRONMENT.items()]
    started = f'exec {vllm / "bin" / "vllm"} "$@"'
    executable.write_text("\n".join(["#!/bin/sh", *lines, started, ""]))
    executable.chmod(0o755)
    document = parse_cluster(
        CLUSTER.format(
            executable=vllm / "bin" / "vllm",
            prefill_executable=executable,
            model=model,
            ready_s_max=READY_S_MAX,
            lease_s=LEASE_S,
        )
    )
    local = LocalCluster(
        data_dir=server_folder / "pairs",
        port=free_port(),
        cluster=document,
        ready_s_max=READY_S_MAX,
    )
    await local.start()
    try:
        await until_serving(local, {"p", "d", "v"})
        yield local
    finally:
        await local.stop()


async def rows(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    found = await operator(cluster, "/operator/v1/engines")
    return {row["id"]: row for row in found["data"]}  # type: ignore[attr-defined]


async def until_serving(cluster: LocalCluster, engines: set[str]) -> None:
    async with asyncio.timeout(READY_S_MAX):
        while True:
            now = await rows(cluster)
            if all(name in now and now[name]["state"] == "serving" for name in engines):
                return
            await asyncio.sleep(0.5)


def ports(cluster: LocalCluster) -> dict[str, int]:
    """Where engines listen, by the records that agents keep of their processes."""
    return {name: record.ports[0] for name, record in processes(cluster).items()}


def processes(cluster: LocalCluster) -> dict[str, ProcessRecord]:
    found = {}
    for path in cluster.data_dir.rglob("process.json"):
        record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
        found[record.spec.engine_id] = record
    return found


async def metric(port: int, name: str, labels: str = "") -> float:
    async with httpx2.AsyncClient(trust_env=False, timeout=30) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"vllm:{name}{{") and labels in line
    )


async def last_request(
    cluster: LocalCluster,
) -> tuple[records.RequestRecord, list[records.AttemptRecord]]:
    await check_invariants(cluster)
    engine = make_engine(cluster.database_url)
    try:
        record = (await records.list_requests(engine, limit=1)).items[0]
        detail = await records.get_request(engine, RequestId(record.id))
        assert detail is not None
        return record, list(detail.attempts)
    finally:
        await engine.dispose()


def prompt_of(name: str, sentences: int = 60) -> str:
    return f"{name}: " + "tell me about the sea, and about the wind. " * sentences


async def chat(client: AsyncOpenAI, model: str, content: str, tokens: int = 40) -> str:
    text = ""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text


async def test_a_long_prompt_is_moved_and_answered_as_by_a_plain_engine(
    cluster: LocalCluster,
) -> None:
    where = ports(cluster)
    async with client_of(cluster, "acme") as client:
        for number in range(3):
            content = prompt_of(f"moved {number}")
            before = await metric(where["d"], "external_prefix_cache_hits_total")
            answer = await chat(client, "tiny", content)
            record, attempts = await last_request(cluster)
            hits = await metric(where["d"], "external_prefix_cache_hits_total") - before
            assert answer == await chat(client, "plain", content)
            assert (record.cached_tokens, record.completion_tokens) == (0, 40)
            legs = [(one.leg, one.engine_id, one.outcome) for one in attempts]
            # Once it is measured how long a transfer takes on this machine, one engine may be cheaper.
            if number and legs == [("whole", "d", "ok")]:
                continue
            assert legs == [("prefill", "p", "ok"), ("decode", "d", "ok")]
            assert hits == record.prompt_tokens
    assert await metric(where["d"], "nixl_num_failed_transfers_total") == 0
    assert (
        await metric(where["d"], "prompt_tokens_by_source_total", 'source="external_kv_transfer"')
        > 0
    )


async def test_a_repeated_prompt_is_predicted_and_told_as_cached(cluster: LocalCluster) -> None:
    """The decode engine holds what it fetched: the next call of the same prompt stays there, whole."""
    content = prompt_of("again")
    async with client_of(cluster, "acme") as client:
        first = await chat(client, "tiny", content)
        again = await chat(client, "tiny", content)
    record, attempts = await last_request(cluster)
    assert again == first
    assert [(one.leg, one.engine_id) for one in attempts] == [("whole", "d")]
    async with httpx2.AsyncClient(
        base_url=cluster.url,
        headers={"authorization": f"Bearer {cluster.operator_key}"},
        trust_env=False,
    ) as http:
        told = (await http.get(f"/operator/v1/requests/{record.id}/explain")).json()
    won = next(one for one in told["candidates"] if one["is_winner"])
    block = 32
    assert record.cached_tokens == (record.prompt_tokens - 1) // block * block
    assert abs(won["cached_tokens"] - record.cached_tokens) <= block


async def test_a_short_prompt_stays_on_one_engine(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        await chat(client, "tiny", "hello there")
    _, attempts = await last_request(cluster)
    assert [(one.leg, one.engine_id) for one in attempts] == [("whole", "d")]


async def test_a_client_that_leaves_while_kv_moves_leaves_both_engines_well(
    cluster: LocalCluster,
) -> None:
    where = ports(cluster)
    async with client_of(cluster, "acme", retries=0) as client:
        for after_s in (0.0, 0.02, 0.05, 0.1, 0.3):
            content = prompt_of(f"left after {after_s}")
            call = asyncio.ensure_future(chat(client, "tiny", content))
            await asyncio.sleep(after_s)
            call.cancel()
            await asyncio.wait({call})
        content = prompt_of("after they left")
        assert await chat(client, "tiny", content) == await chat(client, "plain", content)
    await until_free(where)


async def until_free(where: dict[str, int]) -> None:
    """No block is held when the longest lease is over."""
    began = time.monotonic()
    while True:
        used = {name: await metric(port, "kv_cache_usage_perc") for name, port in where.items()}
        if not any(used.values()):
            return
        assert time.monotonic() - began < LEASE_S + 15, used
        await asyncio.sleep(0.2)


async def test_the_prefill_engine_dies_in_the_middle(cluster: LocalCluster) -> None:
    where = ports(cluster)
    contents = [prompt_of(f"dying {number}", 80) for number in range(12)]
    # A pool that has just begun takes few at a time; who is turned away comes back.
    async with client_of(cluster, "acme", retries=8) as client:
        right = [await chat(client, "plain", content) for content in contents]
        calls = [asyncio.ensure_future(chat(client, "tiny", content)) for content in contents]
        await asyncio.sleep(0.15)
        kill_session(cluster, "p")
        answers = await asyncio.gather(*calls)
    assert answers == right
    await check_invariants(cluster)
    await until_free({name: where[name] for name in ("d", "v")})
    assert await metric(where["v"], "num_requests_running") == 0
    # What was believed to be fetched and was not is no longer thought to be cached: the truth stays true.
    async with client_of(cluster, "acme", retries=2) as client:
        assert [await chat(client, "tiny", content) for content in contents] == right


def kill_session(cluster: LocalCluster, name: str) -> None:
    """As when a machine loses an engine: its API server and its core at once."""
    record = processes(cluster)[name]
    for pid in session_members(record.pid, record.start_ticks):
        os.kill(pid, signal.SIGKILL)
