"""Operators hold breakers: stored, audited, obeyed by every replica, shown by API and command line."""

import json
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import ConfigurationError
from controlplane.domain.pool import OverrideMode
from controlplane.store import audit, breakers
from controlplane.store.catalog import apply_cluster, catalog_revision, upsert_engines
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from dataplane.protocol.messages import EngineFacts, EngineState, Hello
from tests.integration.surfaces import DEMO, Surfaces, running_surfaces, served
from tests.integration.test_cli import Headway

ENGINE = "engine:l40s-8b-a"
POOL = "pool:llama-3.1-8b/us-east"
FACTS = EngineFacts(
    engine_id="l40s-8b-a", model="llama-3.1-8b", role="both", port=9000, kind="simulated",
    state=EngineState.SERVING, gpus=1, seats=32, kv_tokens=200_000, block_tokens=16,
    context_tokens_max=32_768, started_ms=1,
)  # fmt: skip


@pytest.fixture
async def engine(clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    made = make_engine(clean_database_url)
    await apply_cluster(made, parse_cluster(DEMO.read_text()))
    await upsert_engines(made, "us-l40s", 1, [FACTS])
    yield made
    await made.dispose()


@pytest.fixture
async def surfaces(
    engine: AsyncEngine, clean_database_url: str, nats_control_url: str
) -> AsyncIterator[Surfaces]:
    """A replica that hears the agent of node `us-l40s` with one engine."""
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        hello = Hello(node_id="us-l40s", agent_epoch=1, version="0", engines=[FACTS])
        assert running.replica.fleet.hello(hello, 1.0)
        yield running


async def test_held_breakers_are_stored_audited_and_told_to_all(engine: AsyncEngine) -> None:
    revision = await catalog_revision(engine)
    await breakers.hold(
        engine, target=ENGINE, mode=OverrideMode.OPEN, actor="key-1", reason="it burns"
    )
    await breakers.hold(
        engine, target=POOL, mode=OverrideMode.CLOSED, actor="key-1", reason="a test"
    )
    assert await breakers.load(engine) == {
        ENGINE: OverrideMode.OPEN,
        POOL: OverrideMode.CLOSED,
    }
    await breakers.hold(
        engine, target=ENGINE, mode=OverrideMode.CLOSED, actor="key-2", reason="no longer"
    )
    [record, _] = await breakers.list_overrides(engine)
    assert (record.mode, record.actor, record.reason) == (
        OverrideMode.CLOSED,
        "key-2",
        "no longer",
    )
    assert await breakers.free(engine, target=ENGINE, actor="key-2", reason="done")
    assert not await breakers.free(engine, target=ENGINE, actor="key-2", reason="done")
    assert await breakers.load(engine) == {POOL: OverrideMode.CLOSED}
    assert await catalog_revision(engine) == revision + 4
    entries = (await audit.list_entries(engine, subject=f"breaker:{ENGINE}")).items
    assert [(entry.action, entry.actor, entry.before, entry.after) for entry in entries] == [
        ("breaker.free", "key-2", {"mode": "closed"}, None),
        ("breaker.hold", "key-2", {"mode": "open"}, {"mode": "closed"}),
        ("breaker.hold", "key-1", None, {"mode": "open"}),
    ]
    assert (await audit.verify(engine)).broken_at is None


@pytest.mark.parametrize(
    "target",
    ["engine:nothing", "pool:llama-3.1-8b/nowhere", "pool:llama-3.1-8b", "pool:/us-east", "x:y"],
)
async def test_what_does_not_exist_is_not_held(engine: AsyncEngine, target: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no breaker"):
        await breakers.hold(
            engine, target=target, mode=OverrideMode.OPEN, actor="key-1", reason="a slip"
        )
    assert await breakers.load(engine) == {}


async def test_the_replica_that_is_asked_obeys_at_once(surfaces: Surfaces) -> None:
    row = surfaces.replica.fleet.row_of("l40s-8b-a")
    assert row is not None

    async def hold(target: str, mode: str, role: str = "operator") -> dict[str, object]:
        body = {"target": target, "mode": mode, "reason": "a test"}
        response = await surfaces.operate("POST", "breakers", body, role)
        return {**response.json(), "status": response.status_code}

    held = await hold(ENGINE, "open")
    assert (held["status"], held["state"], held["held"]) == (200, "open", "open")
    assert (held["seen"], held["held_because"]) == ("closed", "a test")
    assert row.is_suspect
    assert (await hold(ENGINE, "closed"))["state"] == "closed"
    assert not row.is_suspect
    assert (await hold(POOL, "open"))["status"] == 200
    freed = await hold(ENGINE, "auto")
    assert (freed["state"], freed["held"]) == ("closed", None)
    assert (await hold("engine:nothing", "open"))["status"] == 404
    assert (await hold("engine:nothing", "auto"))["status"] == 404
    assert (await hold("nothing", "open"))["status"] == 400
    assert (await hold(ENGINE, "ajar"))["status"] == 400
    assert (await hold(ENGINE, "open", "viewer"))["status"] == 403


async def test_breakers_are_listed_in_pages(surfaces: Surfaces) -> None:
    body = {"target": POOL, "mode": "open", "reason": "a test"}
    assert (await surfaces.operate("POST", "breakers", body)).status_code == 200
    whole = (await surfaces.operate("GET", "breakers", role="viewer")).json()
    targets = [breaker["target"] for breaker in whole["data"]]
    assert targets == [ENGINE, POOL]
    assert whole["next_cursor"] is None
    first = (await surfaces.operate("GET", "breakers?limit=1", role="viewer")).json()
    assert [breaker["target"] for breaker in first["data"]] == [ENGINE]
    rest = await surfaces.operate(
        "GET", f"breakers?limit=1&cursor={first['next_cursor']}", role="viewer"
    )
    assert [breaker["target"] for breaker in rest.json()["data"]] == [POOL]


async def test_the_command_line_lists_opens_closes_and_frees(
    surfaces: Surfaces, tmp_path: object
) -> None:
    async with served(surfaces) as url:
        headway = Headway(tmp_path, url, surfaces.operators["admin"])
        alone = await headway("breaker", "open", ENGINE, "--reason", "it burns")
        assert alone.code == 2
        assert "leaves no engine that accepts calls for llama-3.1-8b" in " ".join(alone.err.split())
        opened = await headway("breaker", "open", ENGINE, "--reason", "it burns", "--yes")
        assert (opened.code, opened.err) == (0, "")
        assert "gets no calls" in opened.out
        listed = await headway("breaker", "list")
        assert listed.code == 0
        assert max(len(line) for line in listed.out.splitlines()) <= 80, listed.out
        assert "it burns" in " ".join(listed.out.split())
        [breaker, *_] = json.loads((await headway("breaker", "list", "--json")).out)["data"]
        assert (breaker["target"], breaker["held"]) == (ENGINE, "open")
        assert (await headway("breaker", "close", ENGINE, "--reason", "a test")).code == 0
        assert (await headway("breaker", "auto", ENGINE, "--reason", "done")).code == 0
        missing = await headway("breaker", "open", "engine:no", "--reason", "a slip")
        assert missing.code == 1
        assert "there is no breaker `engine:no`" in " ".join(missing.err.split())
        assert (await headway("breaker", "open", ENGINE)).code == 2
