"""A node is drained under a hundred streams: none breaks, nothing new goes there, and the agent signals
nothing before every replica knows.

It runs on a fleet of its own, since the drained engines are stopped at the end.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store.cluster import parse_cluster
from tests.ports import free_port

from .conftest import CLUSTER, check_invariants, client_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

STREAMS = 100
TOKENS = 100
DRAIN_S_MAX = 60.0
# So long that its KV is worth moving.
LONG_PROMPT = " ".join(f"{number} boats wait for the tide" for number in range(150))


# A token takes fifty milliseconds, so that a hundred streams cost little, and a fleet that has just
# started is warm, so that all of them run at once.
SLOW = CLUSTER.replace("speedup: 5.0", "speedup: 0.1")
NO_RAMP = {"HEADWAY_ENGINE_RAMP_S": "0", "HEADWAY_POOL_RAMP_S": "0"}


@pytest.fixture(scope="module")
async def fleet(anyio_backend: str, server_folder: Path) -> AsyncIterator[LocalCluster]:
    local = LocalCluster(
        data_dir=server_folder / "drain", port=free_port(), cluster=parse_cluster(SLOW)
    )
    before = dict(os.environ)
    os.environ.update(NO_RAMP)
    try:
        await local.start()
        yield local
    finally:
        os.environ.clear()
        os.environ.update(before)
        await local.stop()


async def stream(client: AsyncOpenAI, number: int, started: asyncio.Event) -> tuple[str, int]:
    """How a stream ended, and how many tokens it had."""
    finish, tokens = "", 0
    async for chunk in await client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": f"question {number}"}],
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        started.set()
        if chunk.choices and chunk.choices[0].finish_reason:
            finish = chunk.choices[0].finish_reason
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return finish, tokens


class Operator:
    """One connection to the operator API: making one costs as much as a hundred tokens."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._http = httpx2.AsyncClient(
            base_url=f"{cluster.url}/operator/v1/",
            headers={"authorization": f"Bearer {cluster.operator_key}"},
            trust_env=False,
            timeout=20,
        )

    async def get(self, path: str) -> dict[str, Any]:
        response = await self._http.get(path)
        response.raise_for_status()
        document: dict[str, Any] = response.json()
        return document

    async def post(self, path: str, body: Any = None) -> dict[str, Any]:
        response = await self._http.post(path, json=body)
        assert response.is_success, response.text
        document: dict[str, Any] = response.json()
        return document

    async def engines(self) -> dict[str, dict[str, Any]]:
        return {str(row["id"]): row for row in (await self.get("engines"))["data"]}

    async def close(self) -> None:
        await self._http.aclose()


@pytest.fixture
async def api(fleet: LocalCluster) -> AsyncIterator[Operator]:
    operator = Operator(fleet)
    yield operator
    await operator.close()


async def headway(cluster: LocalCluster, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", *arguments,
        env={
            **os.environ,
            "HEADWAY_URL": cluster.url,
            "HEADWAY_OPERATOR_KEY": cluster.operator_key,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_node_is_emptied_under_a_hundred_streams(
    fleet: LocalCluster, api: Operator
) -> None:
    await bring_back(fleet, api)
    client = client_of(fleet, "acme", retries=0)
    here = {name for name, row in (await api.engines()).items() if row["node_id"] == "n1"}
    watching = await headway(fleet, "commands", "list", "--node", "n1", "--watch", "--json")
    assert watching.stdout is not None
    await watching.stdout.readline()
    begun = [asyncio.Event() for _ in range(STREAMS)]
    streams = [
        asyncio.create_task(stream(client, number, event)) for number, event in enumerate(begun)
    ]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in begun))

    began_s = time.monotonic()
    told = await api.post("nodes/n1/drain", {"deadline_s": DRAIN_S_MAX})
    names = [command["id"] for command in told["commands"]]
    calls = [told["node"]["calls"]]
    assert len(names) == len(here)
    # What is left of the fleet is full of those hundred: who comes now is told to come again.
    patient = client_of(fleet, "acme")
    later = [
        asyncio.create_task(stream(patient, STREAMS + number, asyncio.Event()))
        for number in range(10)
    ]
    while True:
        listed = [await api.get(f"commands/{name}") for name in names]
        calls.append((await api.get("nodes/n1"))["calls"])
        if all(command["ended_at"] for command in listed):
            break
        assert time.monotonic() - began_s < DRAIN_S_MAX, listed
        await asyncio.sleep(0.2)
    took_s = time.monotonic() - began_s
    print(f"of {STREAMS} streams {calls[0]} on the node: emptied in {took_s:.2f} s ({calls})")
    assert calls[0] > 0
    assert [command["state"] for command in listed] == ["done"] * len(listed), listed

    ended = await asyncio.gather(*streams, *later)
    await client.close()
    await patient.close()
    assert {finish for finish, _ in ended} == {"length"}
    assert {tokens for _, tokens in ended} == {TOKENS}
    # What came later went elsewhere, and what was there went down to nothing.
    stopped = await api.engines()
    assert {stopped[name]["state"] for name in here} == {"stopped"}
    assert calls[-1] == 0
    watching.terminate()
    out, _ = await watching.communicate()
    lines = [json.loads(line) for line in out.splitlines()]
    seen = [
        command["progress"]["phase"]
        for line in lines
        for command in line["data"]
        if command["progress"] is not None
    ]
    assert "draining" in seen
    await check_invariants(fleet)


async def bring_back(fleet: LocalCluster, api: Operator) -> None:
    """Every engine serves, whatever other tests did with it."""
    await api.post("nodes/n1/uncordon")
    for name, row in (await api.engines()).items():
        words = {
            "stopped": ("load", name, "--node", name[:2], "--model", "small",
                        "--kind", "simulated", "--option", "speedup=0.1"),
            "sleeping": ("wake", name),
        }.get(row["state"])  # fmt: skip
        if words is None:
            continue
        told = await headway(fleet, "engines", *words, "--watch", "--json")
        out, err = await told.communicate()
        assert told.returncode == 0, err
        assert json.loads(out.splitlines()[-1])["data"][0]["state"] == "done"


async def test_the_kv_of_a_long_stream_goes_along(fleet: LocalCluster, api: Operator) -> None:
    await bring_back(fleet, api)

    async def listen(client: AsyncOpenAI, begun: asyncio.Event) -> tuple[str, str, str]:
        answer = await client.completions.with_raw_response.create(
            model="small", prompt=LONG_PROMPT, max_tokens=TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        pieces = []
        async for chunk in answer.parse():
            begun.set()
            pieces.extend(choice.text for choice in chunk.choices)
        headers = answer.headers
        return "".join(pieces), headers["x-headway-engine"], headers["x-request-id"]

    async with client_of(fleet, "acme", retries=0) as client:
        wanted, at, _ = await listen(client, asyncio.Event())
        begun = asyncio.Event()
        going = asyncio.create_task(listen(client, begun))
        await begun.wait()
        running = [name for name, row in (await api.engines()).items() if row["seats_taken"]]
        assert running == [at], "the prompt is warm there"
        told = await api.post(f"engines/{at}/drain", {"deadline_s": DRAIN_S_MAX})
        text, began_at, request = await going
    assert (text, began_at) == (wanted, at)
    await check_invariants(fleet)
    attempts = (await api.get(f"requests/{request}"))["attempts"]
    engines = {one["leg"]: one["engine_id"] for one in attempts}
    assert engines.keys() == {"whole", "hand_over", "continue"}
    assert engines["whole"] == engines["hand_over"] == at != engines["continue"]
    async with asyncio.timeout(DRAIN_S_MAX):
        while not (command := await api.get(f"commands/{told['id']}"))["ended_at"]:
            await asyncio.sleep(0.1)
    assert command["state"] == "done"


async def test_a_drained_node_comes_back_and_an_engine_sleeps_until_it_is_woken(
    fleet: LocalCluster, api: Operator
) -> None:
    await bring_back(fleet, api)
    asleep = await headway(fleet, "engines", "sleep", "n1-a", "--level", "2", "--watch")
    out, err = await asleep.communicate()
    assert asleep.returncode == 0, err
    rows = await api.engines()
    assert (rows["n1-a"]["state"], rows["n1-a"]["sleep_level"]) == ("sleeping", 2)
    assert rows["n1-b"]["load_ms"] > 0
    listed = await headway(fleet, "engines", "list")
    out, _ = await listed.communicate()
    assert "asleep" in out.decode()
    woken = await headway(fleet, "engines", "wake", "n1-a", "--watch", "--json")
    out, err = await woken.communicate()
    assert woken.returncode == 0, err
    refused = await headway(fleet, "engines", "stop", "n1-a", "--json")
    _, err = await refused.communicate()
    assert (refused.returncode, b"--yes" in err) == (2, True)
    rows = await api.engines()
    assert (rows["n1-a"]["state"], rows["n1-a"]["sleep_level"]) == ("serving", 0)
    # Nobody is awake: the first call that waits wakes one.
    for name in ("n1-a", "n1-b", "n2-a"):
        resting = await headway(fleet, "engines", "sleep", name, "--yes", "--watch")
        _, err = await resting.communicate()
        assert resting.returncode == 0, err
    async with client_of(fleet, "acme") as client:
        assert await stream(client, 0, asyncio.Event()) == ("length", TOKENS)
    states = sorted(row["state"] for row in (await api.engines()).values())
    assert states == ["serving", "sleeping", "sleeping"]
    made = (await api.get("commands?limit=1"))["data"][0]
    assert (made["kind"], made["id"].split("-")[0]) == ("wake", "wake")
