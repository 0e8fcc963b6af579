"""Cached tokens as predicted against what engines tell, in a conversation through a whole Headway."""

import re

import httpx2
import pytest

from cli.processes import LocalCluster

from .conftest import client_of, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TURNS = 8
ERROR_RATIO_MAX = 0.01


async def counted(cluster: LocalCluster) -> dict[str, float]:
    """Prompt tokens by kind, as the replica counts them."""
    async with httpx2.AsyncClient(base_url=cluster.url) as client:
        text = (await client.get("/metrics")).text
    found = re.findall(
        r'^headway_prefix_tokens_total\{.*kind="(\w+)".*\} (\S+)', text, re.MULTILINE
    )
    return {kind: float(value) for kind, value in found}


async def test_the_engine_reuses_what_was_predicted(cluster: LocalCluster) -> None:
    before = await counted(cluster)
    said = [{"role": "user", "content": "Tell me a story of a clockmaker. " * 60}]
    async with client_of(cluster, "acme") as client:
        for turn in range(TURNS):
            answer = await client.chat.completions.create(
                model="small", messages=said, max_tokens=24, temperature=1.0
            )
            said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            said.append({"role": "user", "content": f"And then, in chapter {turn}? " * 20})
    await until_quiet(cluster)
    after = await counted(cluster)
    moved = {kind: value - before.get(kind, 0.0) for kind, value in after.items()}
    assert moved["actual"] > 0.5 * moved["prompt"]
    assert moved["error"] <= ERROR_RATIO_MAX * moved["prompt"], moved
    async with httpx2.AsyncClient(base_url=cluster.url) as client:
        text = (await client.get("/metrics")).text
    told = re.findall(r"^headway_kv_events_total\{.*\} (\S+)", text, re.MULTILINE)
    assert sum(map(float, told)) > 0, "engines tell of their caches, through accounts of their own"
