"""NATS comes back with an empty store: nothing in it was needed, and commands reach their agents again."""

import asyncio
import os
import shutil
import signal

import httpx2
import pytest

from cli.processes import NATS_FOLDER, LocalCluster

from .conftest import check_invariants, engines

pytestmark = [pytest.mark.fault, pytest.mark.anyio, pytest.mark.timeout(180)]

RECOVERY_S_MAX = 60.0
ENGINE = "n2-a"


async def obeyed(http: httpx2.AsyncClient, kind: str) -> None:
    """Give a command and wait until its agent has obeyed it."""
    response = await http.post(f"/operator/v1/engines/{ENGINE}/{kind}", json={})
    response.raise_for_status()
    command = response.json()
    try:
        async with asyncio.timeout(RECOVERY_S_MAX):
            while command.get("state") != "done":
                await asyncio.sleep(0.2)
                command = (await http.get(f"/operator/v1/commands/{command['id']}")).json()
    except TimeoutError:
        pytest.fail(f"not obeyed: {command}")


async def test_commands_are_obeyed_after_the_bus_has_lost_its_store(cluster: LocalCluster) -> None:
    headers = {"authorization": f"Bearer {cluster.operator_key}"}
    async with httpx2.AsyncClient(
        base_url=cluster.url, headers=headers, timeout=10.0, trust_env=False
    ) as http:
        # Every node has said hello and has its queue.
        await obeyed(http, "cordon")
        victim = cluster.pids()["nats"]
        os.kill(victim, signal.SIGKILL)
        shutil.rmtree(cluster.data_dir / NATS_FOLDER / "jetstream")
        async with asyncio.timeout(RECOVERY_S_MAX):
            while cluster.pids().get("nats") in (None, victim):
                await asyncio.sleep(0.1)
        await obeyed(http, "uncordon")
        async with asyncio.timeout(RECOVERY_S_MAX):
            while not all(row["is_accepting"] for row in await engines(cluster)):
                await asyncio.sleep(0.2)
    await check_invariants(cluster)
