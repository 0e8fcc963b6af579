"""Kill -9 of each part in the middle of load: the rest goes on, and every accepted call ends once."""

import asyncio
import os
import signal
from typing import Self

import pytest
from openai import APIError, AsyncOpenAI

from cli.processes import LocalCluster

from .conftest import check_invariants, client_of, engines

pytestmark = [pytest.mark.fault, pytest.mark.anyio, pytest.mark.timeout(180)]

CALLERS = 12
RECOVERY_S_MAX = 30.0


class Load:
    """Callers that stream one answer after the other, retrying as the SDK does, until they are told to stop."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self._stop = asyncio.Event()
        self.finished = 0
        self.failed = 0
        self.silent_truncations = 0

    async def call(self, number: int) -> None:
        wanted = 60
        stream = await self._client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": f"question {number} " + "word " * 200}],
            max_tokens=wanted,
            stream=True,
            stream_options={"include_usage": True},
        )
        finish = usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].finish_reason:
                finish = chunk.choices[0].finish_reason
        if finish is None or usage is None:
            self.silent_truncations += 1

    async def caller(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                await self.call(number)
                self.finished += 1
            except APIError:
                self.failed += 1
                await asyncio.sleep(0.1)
            number += 1000

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self.caller(number)) for number in range(CALLERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def finishes(self, count: int) -> None:
        """Wait for so many more answers."""
        goal = self.finished + count
        async with asyncio.timeout(RECOVERY_S_MAX):
            while self.finished < goal:
                await asyncio.sleep(0.05)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def survive(cluster: LocalCluster, name: str, pid: int) -> None:
    """Load, kill, load again; nothing but the victim is started again."""
    others = {child: number for child, number in cluster.pids().items() if number != pid}
    async with client_of(cluster, "acme") as client, Load(client) as load:
        await load.finishes(20)
        kill(pid)
        await load.finishes(60)
        await asyncio.sleep(1.0)
        await load.finishes(20)
    assert load.silent_truncations == 0, name
    await check_invariants(cluster)
    now = cluster.pids()
    assert {child: now[child] for child in others} == others, name


async def test_engine(cluster: LocalCluster) -> None:
    victim = cluster.engine_pids()["n1-a"]
    await survive(cluster, "engine", victim)
    async with asyncio.timeout(RECOVERY_S_MAX):
        while not all(row["is_accepting"] for row in await engines(cluster)):
            await asyncio.sleep(0.2)
    assert cluster.engine_pids()["n1-a"] != victim


async def test_agent_and_its_engines_go_on(cluster: LocalCluster) -> None:
    before = cluster.engine_pids()
    await survive(cluster, "agent", cluster.pids()["agent n1"])
    assert cluster.engine_pids() == before


async def test_nats(cluster: LocalCluster) -> None:
    await survive(cluster, "nats", cluster.pids()["nats"])


async def test_control_plane(cluster: LocalCluster) -> None:
    await survive(cluster, "serve", cluster.pids()["serve"])


async def test_postgres(cluster: LocalCluster) -> None:
    await survive(cluster, "postgres", cluster.pids()["postgres"])
