"""What is counted of workflows, budgets and the fleet's cost, from a real PostgreSQL: once, in time, by one replica."""

import asyncio
from datetime import UTC, datetime

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import SloClassName, TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.runtime.figures import (
    COUNTED_WITHIN_S,
    ENDED_WAITING_MAX,
    SETTLE_MS,
    SUMS_INTERVAL_MS,
    Figures,
)
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.perf_model import MS_PER_HOUR
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.store import budgets, catalog, workflows
from controlplane.store.journal import Journal
from controlplane.store.reaper import ReapSummary, reap
from controlplane.store.session import make_engine
from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.named_tenants import OVERFLOW, TENANTS_NAMED_MAX
from dataplane.protocol.messages import Hello
from tests.integration.store_world import ACME, R1, Rows

pytestmark = pytest.mark.anyio

TTL_S = 60.0


class World:
    """Figures of one replica over `engine`, with a clock and a leader's claim of the test's own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.metrics = Metrics()
        self.fleet = FleetState(PrefixIndex(), TickLog())
        self.now_ms = 1_000_000.0
        self.is_leading = True
        self.figures = Figures(
            engine,
            metrics=self.metrics,
            fleet=self.fleet,
            is_leading=lambda: self.is_leading,
            is_bus_connected=lambda: True,
            replica_ttl_s=TTL_S,
            version="1",
            clock_ms=lambda: self.now_ms,
        )

    async def look(self, after_ms: float = SETTLE_MS) -> None:
        self.now_ms += after_ms
        await self.figures.look()

    def ended(self) -> dict[tuple[str, ...], float]:
        return dict(self.metrics.workflows_ended.series())


@pytest.fixture
async def world(engine: AsyncEngine) -> World:
    made = World(engine)
    made.fleet.use_catalog(await catalog.load_catalog(engine))
    return made


async def begin(engine: AsyncEngine, *, deadline_ms: int = 600_000) -> WorkflowId:
    record = await workflows.create(
        engine,
        tenant=ACME,
        kind="test",
        scope=Scope.RESEARCH,
        steps_expected=4,
        slo_class=SloClassName("interactive"),
        deadline_ms=deadline_ms,
        budget_micro_usd=None,
    )
    return record.id


async def spend(url: str, workflow: WorkflowId, *micro_usd: int) -> None:
    """Money leased, and a settled call of so much for each step."""
    engine = make_engine(url)
    await budgets.lease(engine, "tenant:acme", R1, sum(micro_usd), sum(micro_usd))
    await engine.dispose()
    journal = Journal(url)
    for step, each in enumerate(micro_usd):
        rows = Rows(f"{workflow}-{step}", workflow=workflow, step=step, at=datetime.now(UTC))
        journal.opened(rows.opened(each))
        journal.settled(rows.settled(each))
    writing = asyncio.create_task(journal.run())
    assert await journal.drain(10.0) == 0
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_a_workflow_is_counted_once_with_all_it_cost(
    engine: AsyncEngine, world: World, clean_database_url: str
) -> None:
    workflow = await begin(engine)
    await workflows.end(engine, workflow, ACME, WorkflowState.SUCCEEDED)
    world.figures.workflow_ended(workflow)
    # Its last calls are written after its end was told.
    await world.look(after_ms=SETTLE_MS - 1)
    assert world.ended() == {}
    await spend(clean_database_url, workflow, 30_000, 0, 12_000)
    await world.look(after_ms=1)
    labels = ("research", "gold", "interactive", "succeeded")
    assert world.ended() == {labels: 1}
    for _ in range(2):
        world.figures.workflow_ended(workflow)
        await world.look()
    assert world.ended() == {labels: 1}
    cost = world.metrics.workflow_cost.distribution(("research", "succeeded"))
    assert (cost.count, cost.sum) == (1, pytest.approx(0.042))
    assert world.metrics.workflow_steps.distribution(("research", "succeeded")).sum == 3
    assert world.metrics.wasted.total() == 0


async def test_what_expired_is_told_by_the_reaper_and_is_waste(
    engine: AsyncEngine, world: World, clean_database_url: str
) -> None:
    workflow = await begin(engine, deadline_ms=1_000)
    running = await begin(engine)
    await spend(clean_database_url, workflow, 1_000, 1_000)
    summary = ReapSummary(
        replicas_ended=0, requests_lost=0, returned_micro_usd=0, workflows_expired=()
    )
    while not summary.workflows_expired:
        summary = await reap(engine, TTL_S)
        await asyncio.sleep(0.05)
    assert summary.workflows_expired == (workflow,)
    world.figures.reaped(summary)
    # One that still runs is not counted, whoever says that it ended.
    world.figures.workflow_ended(running)
    await world.look()
    assert world.ended() == {("research", "gold", "interactive", "expired"): 1}
    assert dict(world.metrics.wasted.series()) == {("workflow_expired",): pytest.approx(0.002)}
    assert world.metrics.late_kills.value(("research", "expired")) == 1


async def test_an_end_that_is_old_was_counted_by_who_saw_it(
    engine: AsyncEngine, world: World
) -> None:
    workflow = await begin(engine)
    await workflows.end(engine, workflow, ACME, WorkflowState.FAILED)
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE workflows SET ended_at = ended_at - make_interval(secs => :old)"),
            {"old": COUNTED_WITHIN_S},
        )
    world.figures.workflow_ended(workflow)
    await world.look()
    assert world.ended() == {}


async def test_without_postgres_nothing_is_lost_and_too_much_is_told(
    engine: AsyncEngine, world: World, clean_database_url: str
) -> None:
    workflow = await begin(engine)
    await workflows.end(engine, workflow, ACME, WorkflowState.CANCELLED)
    away = World(make_engine("postgresql://u:p@127.0.0.1:1/none"))
    away.fleet.use_catalog(world.fleet.catalog)
    away.figures.workflow_ended(workflow)
    with pytest.raises(StateUnavailable):
        await away.look()
    assert away.metrics.store_reachable.value() == 0
    away.figures._engine = engine
    await away.look()
    assert away.metrics.store_reachable.value() == 1
    assert away.ended() == {("research", "gold", "interactive", "cancelled"): 1}
    for number in range(ENDED_WAITING_MAX + 3):
        away.figures.workflow_ended(WorkflowId(f"wf-{number}"))
    assert away.metrics.workflows_uncounted.value() == 3


async def test_sums_are_told_by_the_leader_alone(
    engine: AsyncEngine, world: World, clean_database_url: str
) -> None:
    workflow = await begin(engine)
    await spend(clean_database_url, workflow, 200_000)
    await budgets.lease(engine, "tenant:acme", R1, 50_000, 50_000)
    world.is_leading = False
    await world.look()
    assert dict(world.metrics.budget.series()) == {}
    assert world.metrics.leads.value() == 0
    world.is_leading = True
    await world.look()
    assert world.metrics.leads.value() == 1
    assert world.metrics.replicas_live.value() == 2
    assert world.metrics.budget.value(("tenant", "limit")) == pytest.approx(1.00001)
    assert world.metrics.budget.value(("tenant", "spent")) == pytest.approx(0.2)
    assert world.metrics.tenant_budget.value(("acme", "reserved")) == pytest.approx(0.05)
    assert world.metrics.tenant_budget.value((OVERFLOW, "limit")) == 0
    assert world.metrics.workflows_running.value(("research",)) == 1
    assert world.metrics.workflows_running.value(("chat",)) == 0
    world.is_leading = False
    await world.look()
    for gauge in (
        world.metrics.budget,
        world.metrics.tenant_budget,
        world.metrics.workflows_running,
        world.metrics.replicas_live,
    ):
        assert dict(gauge.series()) == {}, gauge.declaration.name


async def test_tenants_beyond_the_named_stand_together(engine: AsyncEngine, world: World) -> None:
    count = TENANTS_NAMED_MAX + 30
    async with engine.begin() as connection:
        await connection.execute(
            text(
                'INSERT INTO budgets (id, "limit", spent)'
                " SELECT 'tenant:t' || n, 1000000, n * 1000 FROM generate_series(1, :count) n"
            ),
            {"count": count},
        )
        await connection.execute(
            text(
                "INSERT INTO tenants (id, name, tenant_class, slo_class, budget_id, cache_salt)"
                " SELECT 't' || n, 't', 'gold', 'interactive', 'tenant:t' || n, 'x'"
                " FROM generate_series(1, :count) n"
            ),
            {"count": count},
        )
    await world.look(after_ms=SUMS_INTERVAL_MS)
    told = {
        tenant: usd
        for (tenant, kind), usd in world.metrics.tenant_budget.series()
        if kind == "spent"
    }
    assert told.keys() == {
        *(f"t{number}" for number in range(count, count - TENANTS_NAMED_MAX, -1)),
        OVERFLOW,
    }
    assert told[OVERFLOW] == pytest.approx(sum(range(1, 31)) / 1_000)
    assert sum(told.values()) == pytest.approx(world.metrics.budget.value(("tenant", "spent")))
    assert TenantId("acme") not in told


async def test_the_fleet_costs_while_its_nodes_are_heard_and_somebody_leads(
    world: World,
) -> None:
    hello = Hello(node_id="n1", agent_epoch=1, version="1", engines=[])
    await world.look()
    world.fleet.hello(hello, world.now_ms)
    await world.look(after_ms=36_000)
    # Eight GPUs at $2.50 an hour for a hundredth of one; n2 was never heard.
    cost = world.metrics.fleet_cost
    assert dict(cost.series()) == {("h100", "eu"): pytest.approx(8 * 2.5 / 100)}
    world.is_leading = False
    await world.look(after_ms=MS_PER_HOUR)
    world.is_leading = True
    await world.look(after_ms=MS_PER_HOUR)
    assert cost.total() == pytest.approx(0.2), "another replica led, and counted"
    world.fleet.silence(world.now_ms + 60_000, 1_000)
    await world.look(after_ms=36_000)
    assert cost.total() == pytest.approx(0.2)
