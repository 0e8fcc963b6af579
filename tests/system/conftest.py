"""A whole Headway of small simulated engines, kept for the session, and what every fault must leave intact."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store import records
from controlplane.store.cluster import ClusterDocument, parse_cluster
from controlplane.store.session import make_engine
from tests.ports import free_port

CLUSTER = """
regions: [eu-west]
gpu_types:
  - {name: h100-sxm, hbm_bytes: 80000000000, bandwidth_bytes_per_s: 3.35e12, flops_per_s: 9.89e14,
     price_micro_usd_per_hour: 3250000, price_source: test, price_date: 2026-11-01}
models:
  - {name: small, parameters: 8000000000, layers: 32, hidden_size: 4096, weights_bytes: 16000000000,
     kv_bytes_per_token: 131072, context_tokens_max: 32768, load_ms: 2000,
     price_prompt_micro_usd_per_mtok: 200000, price_cached_micro_usd_per_mtok: 50000,
     price_completion_micro_usd_per_mtok: 600000}
slo_classes:
  - {name: interactive, ttft_ms_max: 2000, tpot_ms_max: 100, e2e_ms_max: 60000,
     value_micro_usd: 10000, late_micro_usd_per_s: 500}
tenants:
  - {id: acme, name: Acme, tenant_class: gold, slo_class: interactive, budget_usd: 1000.0}
  - {id: brook, name: Brook, tenant_class: silver, slo_class: interactive, budget_usd: 0.01}
nodes:
  - id: n1
    region: eu-west
    gpu_type: h100-sxm
    gpus: 2
    address: 127.0.0.1
    engines:
      - {engine_id: n1-a, kind: simulated, model: small, role: both, gpus: 1, options: {speedup: 5.0}}
      - {engine_id: n1-b, kind: simulated, model: small, role: both, gpus: 1, options: {speedup: 5.0}}
  - id: n2
    region: eu-west
    gpu_type: h100-sxm
    gpus: 1
    address: 127.0.0.1
    engines:
      - {engine_id: n2-a, kind: simulated, model: small, role: both, gpus: 1, options: {speedup: 5.0}}
"""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def cluster_document() -> ClusterDocument:
    return parse_cluster(CLUSTER)


@pytest.fixture(scope="session")
async def cluster(
    anyio_backend: str, server_folder: Path, cluster_document: ClusterDocument
) -> AsyncIterator[LocalCluster]:
    local = LocalCluster(
        data_dir=server_folder / "cluster", port=free_port(), cluster=cluster_document
    )
    await local.start()
    try:
        yield local
    finally:
        await local.stop()


def client_of(cluster: LocalCluster, tenant: str, *, retries: int = 8) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=cluster.url + "/v1",
        api_key=cluster.tenant_keys[tenant],
        max_retries=retries,
        timeout=30.0,
    )


async def operator(cluster: LocalCluster, path: str) -> dict[str, object]:
    async with httpx2.AsyncClient(
        base_url=cluster.url,
        headers={"authorization": f"Bearer {cluster.operator_key}"},
        timeout=5.0,
        trust_env=False,
    ) as http:
        response = await http.get(path)
        response.raise_for_status()
        document: dict[str, object] = response.json()
        return document


async def engines(cluster: LocalCluster) -> list[dict[str, object]]:
    return (await operator(cluster, "/operator/v1/engines"))["data"]  # type: ignore[return-value]


async def until_quiet(cluster: LocalCluster, seconds_max: float = 30.0) -> None:
    """Wait until nothing is open, in memory and in Postgres; fail with what is left otherwise."""
    left: object = "no answer"
    engine = make_engine(cluster.database_url)
    try:
        async with asyncio.timeout(seconds_max):
            while True:
                try:
                    rows = await engines(cluster)
                    busy = {
                        str(row["id"]): row["seats_taken"] for row in rows if row["seats_taken"]
                    }
                    still_open = await records.list_requests(engine, state="open")
                    if not busy and not still_open.items:
                        return
                    left = (busy, [item.id for item in still_open.items])
                except httpx2.HTTPError as error:
                    left = error
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not quiet after {seconds_max} s: {left}")
    finally:
        await engine.dispose()


async def check_invariants(cluster: LocalCluster) -> None:
    """I1 and I2 by SQL over everything that was ever accepted, I3 by the replica's own gauges."""
    await until_quiet(cluster)
    engine = make_engine(cluster.database_url)
    try:
        found = await records.invariants(engine)
    finally:
        await engine.dispose()
    assert found, "no invariant was checked"
    assert all(found.values()), found
    for row in await engines(cluster):
        assert row["seats_taken"] == 0, row
        assert row["kv_tokens_taken"] == 0, row
        assert row["seats_lent"] <= row["seats_capacity"], row  # type: ignore[operator]
        assert row["kv_tokens_lent"] <= row["kv_tokens_capacity"], row  # type: ignore[operator]
