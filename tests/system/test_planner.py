"""The planner on a whole Headway: demand that outgrows its engines is given more, and nobody notices."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from cli.processes import LocalCluster
from controlplane.store import plans, tables
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine, transaction
from tests.ports import free_port

from .conftest import CLUSTER, client_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

HELLO = [{"role": "user", "content": "hello, how are you today?"}]
WAIT_S_MAX = 90.0
ENGINE = "options: {speedup: 5.0}}"


def two_models() -> str:
    """The small cluster with a second model: one engine of it, and a node with room."""
    small = CLUSTER[CLUSTER.index("  - {name: small") : CLUSTER.index("slo_classes:")]
    text = CLUSTER.replace(
        "slo_classes:", small.replace("name: small", "name: other") + "slo_classes:"
    )
    text = text.replace(
        "engine_id: n2-a, kind: simulated, model: small",
        "engine_id: n2-a, kind: simulated, model: other",
    )
    return text.replace(
        "    gpus: 1\n    address: 127.0.0.1\n    engines:\n      - {engine_id: n2-a",
        "    gpus: 4\n    address: 127.0.0.1\n    engines:\n      - {engine_id: n2-a",
    )


@pytest.fixture
async def planning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    monkeypatch.setenv("HEADWAY_PLANNER_INTERVAL_S", "2")
    local = LocalCluster(
        data_dir=folder / "cluster", port=free_port(), cluster=parse_cluster(two_models())
    )
    await local.start()
    try:
        yield local
    finally:
        await local.stop()


async def ask(engine: AsyncEngine, model: str, calls_per_s: float, seconds: int) -> None:
    """What replicas would have journalled of this many calls in the last minutes."""
    now = datetime.now(UTC)
    async with transaction(engine) as connection:
        replica = (await connection.execute(select(tables.replicas.c.id).limit(1))).scalar_one()
        rows = [
            {
                "id": secrets.token_hex(12), "tenant_id": "acme", "key_id": "k",
                "replica_id": replica, "step": 0, "model": model, "endpoint": "chat",
                "is_stream": False, "state": "succeeded", "prompt_tokens": 2_000,
                "cached_tokens": 0, "completion_tokens": 400, "settled_micro_usd": 1,
                "opened_at": at, "ended_at": at + timedelta(seconds=2),
            }
            for number in range(int(calls_per_s * seconds))
            for at in [now - timedelta(seconds=(number + 0.5) / calls_per_s)]
        ]  # fmt: skip
        await connection.execute(insert(tables.requests), rows)


async def operate(cluster: LocalCluster, method: str, path: str, body: object = None) -> Any:
    async with httpx2.AsyncClient(
        base_url=f"{cluster.url}/operator/v1/",
        headers={"authorization": f"Bearer {cluster.operator_key}"},
        timeout=10.0,
        trust_env=False,
    ) as http:
        response = await http.request(method, path, json=body)
        response.raise_for_status()
        return response.json()


async def until(found: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(WAIT_S_MAX):
        while not (value := await found()):
            await asyncio.sleep(0.3)
        return value


async def test_demand_that_outgrows_its_engines_is_given_more(planning: LocalCluster) -> None:
    engine = make_engine(planning.database_url)
    failures: list[Exception] = []
    served = 0

    async def call_all_along() -> None:
        nonlocal served
        async with client_of(planning, "acme", retries=2) as client:
            while True:
                for model in ("small", "other"):
                    try:
                        await client.chat.completions.create(
                            model=model, messages=HELLO, max_tokens=8
                        )
                        served += 1
                    except Exception as error:  # noqa: BLE001 - counted
                        failures.append(error)
                await asyncio.sleep(0.1)

    calling = asyncio.create_task(call_all_along())
    try:
        await ask(engine, "other", 30.0, seconds=400)
        # It proposes, and moves nothing by itself.
        proposed = await until(lambda: _proposal(engine))
        assert await plans.applying(engine) is None
        assert (await operate(planning, "GET", "plans/current"))["control"]["mode"] == "propose"
        # An operator lets it act: engines are loaded by the node's agent and serve.
        await operate(planning, "POST", "plans/mode", {"mode": "act", "reason": "a test"})

        async def grown() -> list[str]:
            found = (await operate(planning, "GET", "engines"))["data"]
            names = [one["id"] for one in found if one["model"] == "other" and one["is_accepting"]]
            return names if len(names) > 1 else []

        await until(grown)
        ended = await until(lambda: _ended(engine))
        assert ended.state == "applied", [
            move.detail for move in await plans.moves_of(engine, ended.revision)
        ]
        assert proposed.revision <= ended.revision

        # The next plan has what it wanted.
        async def settled() -> bool:
            current = await operate(planning, "GET", "plans/current")
            return current["newest"]["moves"] == 0 and current["applying"] is None

        await until(settled)
        metrics = (await _scrape(planning)).splitlines()
        [desired] = [
            line
            for line in metrics
            if line.startswith("headway_desired_engines{") and 'model="other"' in line
        ]
        assert float(desired.rsplit(" ", 1)[1]) > 1
        # The solver is killed: the plan stands, and the next round has another solver.
        [age] = [line for line in metrics if line.startswith("headway_plan_age_seconds ")]
        assert float(age.rsplit(" ", 1)[1]) < 30
        solver = _solver(planning)
        solver.kill()

        async def replaced() -> bool:
            other = _solver(planning, is_needed=False)
            return other is not None and other.pid != solver.pid

        await until(replaced)
    finally:
        calling.cancel()
        await engine.dispose()
    assert served > 10
    assert failures == []


async def _proposal(engine: AsyncEngine) -> plans.PlanRecord | None:
    record = await plans.newest(engine)
    return record if record is not None and record.document["plan"]["moves"] else None


async def _ended(engine: AsyncEngine) -> plans.PlanRecord | None:
    for record in (await plans.list_plans(engine)).items:
        if record.ended_at is not None:
            return record
    return None


async def _scrape(cluster: LocalCluster) -> str:
    async with httpx2.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        response = await http.get("/metrics")
        response.raise_for_status()
        return response.text


def _solver(cluster: LocalCluster, *, is_needed: bool = True) -> psutil.Process | None:
    for child in psutil.Process(cluster.pids()["serve"]).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as one too
            if any("planner_worker" in word for word in child.cmdline()):
                return child
    assert not is_needed
    return None
