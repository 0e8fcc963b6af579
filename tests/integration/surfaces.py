"""A replica with its catalogue and keys, for tests of what stands on top of it."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import uvicorn
import yaml

from controlplane.bootstrap import Replica, running_replica
from controlplane.domain.catalog import OperatorRole
from controlplane.domain.ids import TenantId
from controlplane.settings import Settings
from controlplane.store import keys
from controlplane.store.catalog import apply_cluster
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine

PEPPER = "a pepper for tests, long enough"
DEMO = Path(__file__).parents[2] / "cli" / "clusters" / "demo.yaml"


@dataclass(frozen=True, slots=True)
class Surfaces:
    """`tenants` maps tenant to key, `operators` role to key."""

    replica: Replica
    client: httpx2.AsyncClient
    tenants: dict[str, str]
    operators: dict[str, str]

    async def call(
        self, method: str, path: str, key: str | None = None, body: object = None
    ) -> httpx2.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.request(method, path, headers=headers, json=body)

    async def operate(
        self, method: str, path: str, body: object = None, role: str = "admin"
    ) -> httpx2.Response:
        return await self.call(method, f"/operator/v1/{path}", self.operators[role], body)


@asynccontextmanager
async def running_surfaces(database_url: str, nats_url: str) -> AsyncIterator[Surfaces]:
    """The demo's catalogue on a database of the test's own, no agents, requests over ASGI."""
    engine = make_engine(database_url)
    await apply_cluster(engine, parse_cluster(DEMO.read_text()))
    tenants, operators = {}, {}
    for tenant in yaml.safe_load(DEMO.read_text())["tenants"]:
        name = tenant["id"]
        _, tenants[name] = await keys.create_tenant_key(
            engine, PEPPER.encode(), TenantId(name), "test"
        )
    for role in OperatorRole:
        _, operators[role.value] = await keys.create_operator_key(
            engine, PEPPER.encode(), role, "test"
        )
    await engine.dispose()
    settings = Settings.model_validate(
        {"DATABASE_URL": database_url, "NATS_URL": nats_url, "pepper": PEPPER, "drain_s_max": 0}
    )
    async with running_replica(settings) as replica:
        transport = httpx2.ASGITransport(app=replica.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://headway") as client:
            yield Surfaces(replica, client, tenants, operators)
    # A connection whose making was cancelled is closed when it is collected. Until then PostgreSQL
    # waits for its password, and DROP DATABASE waits for that.
    gc.collect()


@asynccontextmanager
async def served(surfaces: Surfaces) -> AsyncIterator[str]:
    """The replica on a port of the loopback address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(surfaces.replica.app, log_level="warning", lifespan="off")
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
