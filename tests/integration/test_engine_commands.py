"""Commands that can not be right are refused by the operator API, before any agent hears of them."""

from collections.abc import AsyncIterator

import pytest

from controlplane.runtime.wake import WakeOnDemand
from controlplane.store import commands
from controlplane.store.catalog import upsert_engines
from controlplane.store.session import make_engine
from dataplane.protocol.messages import (
    EngineFacts,
    EngineState,
    GpuTelemetry,
    Hello,
    Phase,
    Progress,
    Telemetry,
)
from tests.integration.surfaces import Surfaces, running_surfaces

NODE, MODEL = "us-l40s", "llama-3.1-8b"


def facts(engine_id: str, **changes: object) -> EngineFacts:
    members = {
        "engine_id": engine_id, "model": MODEL, "role": "both", "port": 9000, "kind": "vllm",
        "state": EngineState.SERVING, "gpus": 1, "seats": 32, "kv_tokens": 200_000,
        "block_tokens": 16, "context_tokens_max": 32_768, "started_ms": 1, **changes,
    }  # fmt: skip
    return EngineFacts(**members)


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


async def declare(surfaces: Surfaces, url: str, *engines: EngineFacts) -> None:
    """As an agent does: to the fleet, and to PostgreSQL."""
    engine = make_engine(url)
    await upsert_engines(engine, NODE, 1, engines)
    await engine.dispose()
    fleet = surfaces.replica.fleet
    assert fleet.hello(
        Hello(node_id=NODE, agent_epoch=1, version="0", engines=list(engines)), 1_000.0
    )


async def refused(surfaces: Surfaces, path: str, body: object = None, status: int = 400) -> str:
    response = await surfaces.operate("POST", f"engines/{path}", body)
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


async def test_what_can_not_be_right_is_refused_with_the_reason(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    await declare(
        surfaces, clean_database_url,
        facts("a", capabilities=["reset_cache"]),
        facts("b", state=EngineState.SLEEPING, sleep_level=1, capabilities=["sleep"]),
        facts("c", state=EngineState.FAILED, cordon="crash loop"),
    )  # fmt: skip
    for path, body in (
        ("a/sleep", None), ("a/wake", None), ("a/load-adapter", {"name": "x", "path": "/x"}),
        ("b/reset-cache", None), ("c/unload-adapter", {"name": "x"}),
    ):  # fmt: skip
        words = await refused(surfaces, path, body)
        assert words.startswith(f"engine `{path[0]}` has no"), words
    assert "reset_cache" in await refused(surfaces, "a/sleep")
    for path, body in (
        ("a/role", {"role": "oracle"}), ("a/role", {}), ("b/sleep", {"level": 3}),
        ("a/load-adapter", {"name": "../x", "path": "/x"}), ("a/cordon", {"reason": "x" * 201}),
        ("a/restart", {"deadline_s": -1}),
    ):  # fmt: skip
        await refused(surfaces, path, body)
    assert "no engine `z`" in await refused(surfaces, "z/restart", status=404)

    # Two GPUs: `a` has one, `b` sleeps and `c` has failed.
    load = {"node_id": NODE, "kind": "vllm", "model": MODEL, "gpus": 2}
    assert "of which 1 are taken" in await refused(surfaces, "d/load", load, 409)
    elsewhere = {**load, "gpus": 1, "node_id": "us-h100"}
    words = await refused(surfaces, "a/load", elsewhere, 409)
    assert f"is on node `{NODE}`" in words
    assert (await surfaces.operate("POST", "engines/d/load", {**load, "gpus": 1})).is_success
    await declare(
        surfaces, clean_database_url,
        facts("a"), facts("d"), facts("b", state=EngineState.SLEEPING, capabilities=["sleep"]),
    )  # fmt: skip
    assert "of which 2 are taken" in await refused(surfaces, "b/wake", status=409)


async def test_engines_nodes_and_commands_show_what_agents_tell(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    await declare(
        surfaces, clean_database_url,
        facts("a", state=EngineState.STARTING, load_ms=0),
        facts("b", cordon="by command: fan", load_ms=9, load_medium="disk"),
    )  # fmt: skip
    fleet = surfaces.replica.fleet
    told = Progress(
        node_id=NODE, agent_epoch=1, sequence=1, engine_id="a", phase=Phase.LOADING,
        done_ratio=0.25, elapsed_ms=3_000, expected_ms=9_000,
    )  # fmt: skip
    assert fleet.progress(told)
    gpu = GpuTelemetry(
        index=1, uuid="GPU-1", name="L40S", memory_used_bytes=2**30, memory_total_bytes=2**35,
        fault="Xid 79",
    )  # fmt: skip
    fleet.telemetry(Telemetry(node_id=NODE, agent_epoch=1, engines=[], gpus=[gpu]), 1_000.0)
    rows = {row["id"]: row for row in (await surfaces.operate("GET", "engines")).json()["data"]}
    assert rows["a"]["progress"] == {
        "phase": "loading", "done_ratio": 0.25, "elapsed_ms": 3_000, "expected_ms": 9_000,
        "calls_left": 0,
    }  # fmt: skip
    assert (rows["b"]["cordon"], rows["b"]["is_accepting"]) == ("by command: fan", False)
    assert (rows["b"]["load_ms"], rows["b"]["load_medium"]) == (9, "disk")
    assert rows["b"]["progress"] is None
    node = (await surfaces.operate("GET", f"nodes/{NODE}")).json()
    assert node["devices"][0]["fault"] == "Xid 79"
    assert (await surfaces.operate("GET", "nodes/none")).status_code == 404
    made = (await surfaces.operate("POST", "engines/b/uncordon")).json()
    found = (await surfaces.operate("GET", f"commands/{made['id']}")).json()
    assert (found["kind"], found["progress"]) == ("uncordon", None)
    assert (await surfaces.operate("GET", "commands/none")).status_code == 404
    listed = (await surfaces.operate("GET", "commands?engine_id=a")).json()["data"]
    assert listed == []


async def test_the_engine_that_wakes_soonest_is_woken_once_for_those_that_wait(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    asleep = {"state": EngineState.SLEEPING, "sleep_level": 1, "capabilities": ["sleep"]}
    await declare(
        surfaces, clean_database_url,
        facts("a", wake_ms=9_000, **asleep), facts("b", wake_ms=2_000, **asleep),
        facts("c", wake_ms=1_000, cordon="by command", **asleep),
    )  # fmt: skip
    waiting = {MODEL: 0}
    now_s = [600.0]
    engine = make_engine(clean_database_url)
    replicas = [
        WakeOnDemand(engine, surfaces.replica.fleet, lambda: waiting, clock_s=lambda: now_s[0])
        for _ in range(2)
    ]

    async def woken() -> list[str]:
        for replica in replicas:
            await replica.look()
        return [one.engine_id for one in (await commands.list_commands(engine)).items]

    assert await woken() == []
    waiting[MODEL] = 3
    assert await woken() == ["b"]
    now_s[0] += 1.0
    assert await woken() == ["b"]
    # It slept again since: its waking took another time.
    await declare(surfaces, clean_database_url, facts("b", wake_ms=2_100, **asleep))
    assert await woken() == ["b", "b"]
    await declare(surfaces, clean_database_url, facts("a"), facts("b", wake_ms=2_200, **asleep))
    assert await woken() == ["b", "b"], "one that is awake takes them"
    await engine.dispose()
