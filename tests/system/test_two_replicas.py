"""Two replicas over one fleet: credits and money are shared without a lock, and a dead one is cleaned up after."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx2
import pytest
from openai import APIError, AsyncOpenAI
from sqlalchemy import text

from cli.processes import LocalCluster
from controlplane.store import budgets
from controlplane.store.session import make_engine

from .conftest import check_invariants, free_port
from .test_kills import Load, kill

pytestmark = [pytest.mark.fault, pytest.mark.anyio, pytest.mark.timeout(180)]

REAPED_S_MAX = 30.0


@pytest.fixture
async def second(cluster: LocalCluster) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    environment = {**os.environ, **cluster.serve_environment(), "HEADWAY_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "serve"], env=environment, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx2.AsyncClient(trust_env=False) as http, asyncio.timeout(30):
            while True:
                try:
                    if (await http.get(url + "/health/ready")).status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.1)
        yield process, url
    finally:
        if process.poll() is None:
            process.terminate()
        await asyncio.to_thread(process.wait)


async def lent(cluster: LocalCluster, urls: list[str]) -> dict[str, tuple[int, int]]:
    """Per engine: seats lent to all replicas together, and the engine's capacity."""
    headers = {"authorization": f"Bearer {cluster.operator_key}"}
    totals: dict[str, tuple[int, int]] = {}
    async with httpx2.AsyncClient(headers=headers, trust_env=False) as http:
        for url in urls:
            for row in (await http.get(url + "/operator/v1/engines")).json()["data"]:
                seats, _ = totals.get(row["id"], (0, 0))
                totals[row["id"]] = (seats + row["seats_lent"], row["seats_capacity"])
    return totals


async def test_two_share_and_one_dies(
    cluster: LocalCluster, second: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, url = second
    urls = [cluster.url, url]
    key = cluster.tenant_keys["acme"]
    async with (
        AsyncOpenAI(base_url=urls[0] + "/v1", api_key=key, max_retries=8) as one,
        AsyncOpenAI(base_url=urls[1] + "/v1", api_key=key, max_retries=0) as two,
        Load(one) as load,
    ):
        async with asyncio.timeout(60):
            other = asyncio.create_task(_calls_until_refused(two))
            for _ in range(10):
                await load.finishes(5)
                for engine_id, (seats, capacity) in (await lent(cluster, urls)).items():
                    assert seats <= capacity, engine_id
            assert not other.done()
            kill(process.pid)
            await other
            await load.finishes(40)
    engine = make_engine(cluster.database_url)
    try:
        async with asyncio.timeout(REAPED_S_MAX):
            while True:
                async with engine.begin() as connection:
                    left = await connection.scalar(
                        text(
                            "SELECT count(*) FROM requests JOIN replicas ON replica_id = replicas.id"
                            " WHERE state = 'open' AND ended_at IS NULL"
                            " AND last_seen_at < clock_timestamp() - interval '4 s'"
                        )
                    )
                    held = await connection.scalar(
                        text(
                            "SELECT count(*) FROM budget_leases JOIN replicas"
                            " ON replica_id = replicas.id"
                            " WHERE amount_micro_usd > 0"
                            " AND last_seen_at < clock_timestamp() - interval '4 s'"
                        )
                    )
                if not left and not held:
                    break
                await asyncio.sleep(0.2)
        async with engine.begin() as connection:
            lost = await connection.scalar(
                text("SELECT count(*) FROM requests WHERE state = 'lost'")
            )
        account = await budgets.read(engine, "tenant:acme")
    finally:
        await engine.dispose()
    assert lost, "the dead replica had calls in flight"
    assert account is not None
    await check_invariants(cluster)


async def _calls_until_refused(client: AsyncOpenAI) -> None:
    """Six callers that end when their replica does."""

    async def caller() -> None:
        while True:
            try:
                stream = await client.chat.completions.create(
                    model="small",
                    messages=[{"role": "user", "content": "on and on"}],
                    max_tokens=400,
                    stream=True,
                )
                async for _ in stream:
                    pass
            except (APIError, httpx2.TransportError):
                return

    await asyncio.gather(*(caller() for _ in range(6)))
