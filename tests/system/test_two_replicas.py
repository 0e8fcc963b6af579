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
from sqlalchemy.ext.asyncio import AsyncEngine

from cli.processes import LocalCluster
from controlplane.store.session import make_engine
from tests.ports import free_port

from .conftest import check_invariants
from .test_kills import Load, kill

pytestmark = [pytest.mark.fault, pytest.mark.anyio, pytest.mark.timeout(400)]

REAPED_S_MAX = 30.0
ENGINES = "/operator/v1/engines"


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
    """Per engine: seats lent to both replicas together, and the engine's capacity.

    The first replica is read before and after the second and its smaller number counts: what moved
    from one to the other in between must not be seen twice.
    """
    headers = {"authorization": f"Bearer {cluster.operator_key}"}
    seen: list[dict[str, tuple[int, int]]] = []
    async with httpx2.AsyncClient(headers=headers, trust_env=False, timeout=30) as http:
        while len(seen) < 3:
            response = await http.get((urls[0], urls[1], urls[0])[len(seen)] + ENGINES)
            if response.status_code == 503:
                # A small machine under load: the pool of connections was busy for a second.
                seen.clear()
                continue
            rows = response.raise_for_status().json()["data"]
            seen.append({row["id"]: (row["seats_lent"], row["seats_capacity"]) for row in rows})
    before, other, after = seen
    return {
        name: (min(before[name][0], after[name][0]) + other[name][0], other[name][1])
        for name in other
    }


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
        # Half a minute alone, for the callers share this process's core; other tests may take the other one.
        async with asyncio.timeout(240):
            other = asyncio.create_task(_calls_until_refused(two))
            for _ in range(10):
                await load.finishes(5)
                for engine_id, (seats, capacity) in (await lent(cluster, urls)).items():
                    assert seats <= capacity, engine_id
            assert not other.done()
            replica_id = await _replica_id(cluster, url)
            kill(process.pid)
            await other
            await load.finishes(40)
    engine = make_engine(cluster.database_url)
    try:
        async with asyncio.timeout(REAPED_S_MAX):
            while not await _is_reaped(engine, replica_id):
                await asyncio.sleep(0.2)
        async with engine.begin() as connection:
            lost = await connection.scalar(
                text("SELECT count(*) FROM requests WHERE state = 'lost' AND replica_id = :id"),
                {"id": replica_id},
            )
    finally:
        await engine.dispose()
    assert lost, "the dead replica had calls in flight"
    await check_invariants(cluster)


async def _replica_id(cluster: LocalCluster, url: str) -> str:
    headers = {"authorization": f"Bearer {cluster.operator_key}"}
    async with httpx2.AsyncClient(headers=headers, trust_env=False, timeout=30) as http:
        return str((await http.get(url + "/operator/v1/status")).json()["replica_id"])


async def _is_reaped(engine: AsyncEngine, replica_id: str) -> bool:
    """Nothing of the replica is open, and it holds no money."""
    async with engine.begin() as connection:
        left = await connection.scalar(
            text(
                "SELECT (SELECT count(*) FROM replicas WHERE id = :id AND ended_at IS NULL)"
                " + (SELECT count(*) FROM requests WHERE replica_id = :id AND state = 'open')"
                " + (SELECT count(*) FROM budget_leases WHERE replica_id = :id)"
            ),
            {"id": replica_id},
        )
    return left == 0


async def _calls_until_refused(client: AsyncOpenAI) -> None:
    """Six callers that end when their replica does."""

    async def caller() -> None:
        while True:
            try:
                stream = await client.chat.completions.create(
                    model="small",
                    messages=[{"role": "user", "content": "on and on"}],
                    max_tokens=4000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for _ in stream:
                    pass
            except (APIError, httpx2.TransportError):
                return

    await asyncio.gather(*(caller() for _ in range(6)))
