"""Tenants are named in the exposition to operators alone, also while PostgreSQL is away."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.api.scrapers import ACCEPTED_S, Scrapers
from controlplane.domain.catalog import OperatorRole
from controlplane.store import keys
from controlplane.store.session import make_engine
from tests.integration.store_world import ACME
from tests.integration.surfaces import Surfaces, running_surfaces

pytestmark = pytest.mark.anyio

PEPPER = b"a pepper of the tests"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_operators_of_any_role_may_and_nobody_else(engine: AsyncEngine) -> None:
    scrapers = Scrapers(engine, PEPPER)
    for role in OperatorRole:
        _, plain = await keys.create_operator_key(engine, PEPPER, role, "prometheus")
        assert await scrapers.may_name_tenants(f"Bearer {plain}")
        assert not await scrapers.may_name_tenants(f"Basic {plain}")
        assert not await scrapers.may_name_tenants(f"Bearer {plain}x")
    _, tenant = await keys.create_tenant_key(engine, PEPPER, ACME, "sdk")
    _, foreign = await keys.create_operator_key(engine, b"another pepper here", role, "x")
    for other in ("", "Bearer", "Bearer ", f"Bearer {tenant}", f"Bearer {foreign}", tenant):
        assert not await scrapers.may_name_tenants(other), other


async def test_a_revoked_key_is_good_for_a_minute_and_an_accepted_one_while_nobody_can_be_asked(
    engine: AsyncEngine,
) -> None:
    clock = Clock()
    scrapers = Scrapers(engine, PEPPER, clock)
    key_id, plain = await keys.create_operator_key(engine, PEPPER, OperatorRole.VIEWER, "x")
    _, late = await keys.create_operator_key(engine, PEPPER, OperatorRole.VIEWER, "y")
    header = f"Bearer {plain}"
    assert await scrapers.may_name_tenants(header)
    away = scrapers._engine = make_engine("postgresql://u:p@127.0.0.1:1/none")
    clock.now_s = 10 * ACCEPTED_S
    assert await scrapers.may_name_tenants(header)
    assert not await scrapers.may_name_tenants(f"Bearer {late}")
    await away.dispose()
    scrapers._engine = engine
    assert await scrapers.may_name_tenants(header)
    assert await keys.revoke_key(engine, key_id)
    assert await scrapers.may_name_tenants(header)
    clock.now_s += ACCEPTED_S
    assert not await scrapers.may_name_tenants(header)


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


async def test_the_exposition_names_tenants_to_operators_and_gives_exemplars_to_who_asks(
    surfaces: Surfaces,
) -> None:
    metrics = surfaces.replica.metrics
    metrics.tenants.ended("aurora", "succeeded", 1.0)
    metrics.ttft.observe(0.3, ("m", "gold"), trace_id="a" * 32)
    named = 'headway_tenant_spent_usd_total{tenant="aurora"} 1.0'
    for key in (None, "nonsense", surfaces.tenants["aurora"]):
        response = await surfaces.call("GET", "/metrics", key)
        assert response.status_code == 200
        assert "aurora" not in response.text
        assert "trace_id" not in response.text
    for key in surfaces.operators.values():
        assert named in (await surfaces.call("GET", "/metrics", key)).text
    told = await surfaces.client.get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert told.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert 'trace_id="' + "a" * 32 in told.text
    assert told.text.endswith("# EOF\n")


async def test_every_end_of_a_workflow_is_told(surfaces: Surfaces) -> None:
    told: list[str] = []
    surfaces.replica.gate.on_workflow_ended = told.append
    key = surfaces.tenants["aurora"]

    async def begin(deadline_s: float = 60.0) -> str:
        body = {
            "kind": "test", "scope": "chat", "steps_expected": 1, "deadline_s": deadline_s,
        }  # fmt: skip
        made = await surfaces.call("POST", "/v1/workflows", key, body)
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    async def end(name: str, how: str, body: object = None) -> int:
        return (await surfaces.call("POST", f"/v1/workflows/{name}/{how}", key, body)).status_code

    names = [await begin() for _ in range(3)]
    assert await end(names[0], "outcome", {"outcome": "success"}) == 200
    assert await end(names[1], "cancel") == 200
    operated = await surfaces.operate("POST", f"workflows/{names[2]}/cancel")
    assert operated.status_code == 200
    assert told == names
    # A word that comes after the deadline ends the workflow as expired, and is refused.
    late = await begin(0.001)
    assert await end(late, "outcome", {"outcome": "success"}) == 409
    assert told[3:] == [late]
