"""Rounds of the planner with the real solver in its own process, real PostgreSQL and a real bus."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.bus import Bus
from controlplane.domain.ids import ModelName, NodeId
from controlplane.runtime.loops import Leadership
from controlplane.runtime.plan_view import PlanView
from controlplane.runtime.planner_loop import PlannerLoop, PlannerSettings, plan_of
from controlplane.runtime.planner_problem import Growth, see_fleet
from controlplane.runtime.planner_process import PlannerProcess
from controlplane.scheduler.planner.problem import MoveKind, PlanStatus
from controlplane.store import catalog, plans, tables
from controlplane.store.plans import Mode, PlanState
from controlplane.store.session import transaction
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol.messages import Bye, Hello
from policies.evaluate import compile_policy
from policies.load import bundle_of, files_of
from tests.integration.planner_world import MODEL, OTHER, PlayedFleet, played_fleet
from tests.integration.store_world import R1, R2

FIXED = Growth(nodes_more_max=0, provision_s=0.0)


class Leading:
    """A leader's planner on a played fleet."""

    def __init__(self, engine: AsyncEngine, played: PlayedFleet, bus: Bus, growth: Growth) -> None:
        self.engine = engine
        self.played = played
        self.bus = bus
        self.metrics = Metrics()
        self.process = PlannerProcess()
        self.view = PlanView(played.fleet, stretch_ratio_min=lambda: 1.5)
        self.leadership = Leadership(engine, R1, 600.0)
        policy = compile_policy(bundle_of(files_of(None)))
        self.planner = PlannerLoop(
            engine=engine,
            bus=bus,
            fleet=played.fleet,
            leader=self.leadership,
            view=self.view,
            metrics=self.metrics,
            policy=lambda: policy,
            author="replica:r1",
            settings=PlannerSettings(interval_s=10.0, solve_s_max=2.0, growth=growth),
            process=self.process,
        )

    async def round(self) -> plans.PlanRecord:
        await self.planner.round()
        assert self.planner.problem == ""
        record = await plans.newest(self.engine)
        assert record is not None
        return record


@pytest.fixture
async def bus(nats_control_url: str) -> AsyncIterator[Bus]:
    made = Bus(nats_control_url, user="", password="", name=f"control-{secrets.token_hex(4)}")
    await made.connect()
    await made.ensure_control_stream()
    yield made
    await made.close()


@pytest.fixture
async def leading(engine: AsyncEngine, bus: Bus) -> AsyncIterator[Leading]:
    """Three engines of one model, one of another, and a node with four free GPUs."""
    nodes = {
        "n1": {"n1/a": MODEL, "n1/b": OTHER},
        "n2": {"n2/a": MODEL, "n2/b": MODEL},
        "n3": {},
    }
    made = Leading(engine, await played_fleet(engine, nodes), bus, FIXED)
    await made.leadership.claim()
    yield made
    await made.planner.close()


async def ask(engine: AsyncEngine, model: str, calls_per_s: float, seconds: int = 600) -> None:
    """Calls of the last minutes, evenly: what the journal of any replica would have written."""
    now = datetime.now(UTC)
    calls = int(calls_per_s * seconds)
    rows = [
        {
            "id": f"{model}-{secrets.token_hex(8)}", "tenant_id": "acme", "key_id": "k",
            "replica_id": R2, "step": 0, "model": model, "endpoint": "chat", "is_stream": False,
            "state": "succeeded", "prompt_tokens": 2_000, "cached_tokens": 0,
            "completion_tokens": 400, "settled_micro_usd": 1, "opened_at": at,
            "ended_at": at + timedelta(seconds=2),
        }
        for number in range(calls)
        for at in [now - timedelta(seconds=(number + 0.5) / calls_per_s)]
    ]  # fmt: skip
    async with transaction(engine) as connection:
        await connection.execute(insert(tables.requests), rows)


async def test_a_fleet_is_planned_for_what_was_asked(leading: Leading) -> None:
    await ask(leading.engine, OTHER, 100.0, seconds=300)
    record = await leading.round()
    plan = plan_of(record)
    assert plan.status in (PlanStatus.OK, PlanStatus.GAP_OPEN), plan.binding
    wanted = {one.model: 0 for one in plan.desired}
    for one in plan.desired:
        wanted[one.model] += one.desired
    assert wanted[OTHER] > 1
    loads = [move for move in plan.moves if move.kind is MoveKind.LOAD]
    assert {move.model for move in loads} == {OTHER}
    # What each needs to be started is known from the document.
    assert record.document["not_executable"] == {}
    assert record.state is PlanState.PROPOSED
    assert await plans.applying(leading.engine) is None
    # Every replica is told, this one included.
    assert leading.view.plan is not None
    assert leading.view.plan.revision == record.revision
    told = {(one.model, one.role): one.desired for one in leading.view.plan.engines}
    assert told[OTHER, "both"] == wanted[OTHER]
    other = PlanView(leading.played.fleet, stretch_ratio_min=lambda: 1.5)
    await other.join(leading.bus)
    assert other.plan == leading.view.plan
    assert other.prices == leading.view.prices
    # A round that comes to the same is the same revision, confirmed.
    again = await leading.round()
    assert (again.revision, again.digest) == (record.revision, record.digest)
    assert again.confirmed_at > record.confirmed_at
    assert leading.metrics.plan_rounds.value(("planned",)) == 2


async def test_a_planner_that_may_act_begins_and_one_that_may_not_does_not(
    leading: Leading,
) -> None:
    engine = leading.engine
    await ask(engine, OTHER, 100.0, seconds=300)
    await plans.set_control(engine, mode=Mode.ACT, is_paused=True, author="key:k", reason="wait")
    record = await leading.round()
    assert plan_of(record).moves
    assert await plans.applying(engine) is None
    await plans.set_control(engine, is_paused=False, author="key:k", reason="go")
    await leading.round()
    applying = await plans.applying(engine)
    assert applying is not None
    assert (applying.revision, applying.applied_by) == (record.revision, "replica:r1")
    # Nothing else begins beside it, and after it failed a person may look first.
    await leading.round()
    epoch = leading.leadership.epoch
    assert epoch is not None
    await plans.end_plan(
        engine, epoch, applying.revision, PlanState.FAILED, author="replica:r1", reason="a test"
    )
    async with transaction(engine) as connection:
        await connection.execute(text("UPDATE plans SET digest = 'another'"))
    again = await leading.round()
    assert again.revision > applying.revision
    assert plan_of(again).moves
    assert await plans.applying(engine) is None
    async with transaction(engine) as connection:
        await connection.execute(text("UPDATE plans SET ended_at = ended_at - interval '1 h'"))
    await leading.round()
    assert await plans.applying(engine) is not None


async def test_a_planner_that_is_off_rests_and_one_that_does_not_lead_too(
    leading: Leading,
) -> None:
    await ask(leading.engine, MODEL, 1.0, seconds=100)
    await plans.set_control(leading.engine, mode=Mode.OFF, author="key:k", reason="enough")
    await leading.planner.round()
    assert await plans.newest(leading.engine) is None
    assert leading.process.pid is None
    await plans.set_control(leading.engine, mode=Mode.PROPOSE, author="key:k", reason="again")
    await leading.round()
    assert leading.process.pid is not None
    async with transaction(leading.engine) as connection:
        await connection.execute(text("UPDATE leader SET epoch = epoch + 1"))
    before = await plans.newest(leading.engine)
    await leading.planner.round()
    # It was replaced while it solved: nothing of it is kept.
    assert await plans.newest(leading.engine) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_solver_that_dies_or_hangs_ends_a_round_and_the_plan_stands(
    leading: Leading, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.runtime import planner_process

    monkeypatch.setattr(planner_process, "SLACK_S_MAX", -1.0)
    await ask(leading.engine, MODEL, 1.0, seconds=100)
    record = await leading.round()
    assert leading.process.pid is not None
    os.kill(leading.process.pid, number)
    await asyncio.sleep(0.2)
    await leading.planner.round()
    rounds = leading.metrics.plan_rounds
    failed = rounds.value(("crashed",)) + rounds.value(("timed_out",))
    # A death that is seen before the round begins is mended by it.
    assert failed == 1 or number is signal.SIGKILL
    assert bool(leading.planner.problem) == bool(failed)
    assert leading.view.plan is not None
    assert leading.view.plan.revision == record.revision
    if failed:
        assert (await plans.newest(leading.engine)) == record
    await leading.round()


async def test_nodes_that_are_not_heard_keep_what_they_had(leading: Leading) -> None:
    fleet, engine = leading.played.fleet, leading.engine
    from tests.integration.planner_world import facts

    await catalog.upsert_engines(engine, NodeId("n1"), 1, [facts("n1/a", MODEL)])
    fleet.bye(Bye(node_id="n1", agent_epoch=1))
    fleet.nodes[NodeId("n2")].heard_ms = 0.0
    declared = await catalog.list_engines(engine)
    seen = see_fleet(fleet, declared, await plans.engine_specs(engine), FIXED)
    nodes = {node.node_id: node for node in seen.nodes}
    assert [(node, nodes[NodeId(node)].is_known) for node in ("n1", "n2", "n3")] == [
        ("n1", False), ("n2", False), ("n3", True),
    ]  # fmt: skip
    assert [one.engine_id for one in nodes[NodeId("n1")].engines] == ["n1/a"]
    assert len(nodes[NodeId("n2")].engines) == 2
    await ask(engine, OTHER, 100.0, seconds=300)
    plan = plan_of(await leading.round())
    assert {move.node_id for move in plan.moves} <= {"n3"}
    kinds = {(pool.model, pool.gpus) for pool in seen.pools}
    assert kinds == {(MODEL, 1), (OTHER, 1)}


async def test_kinds_are_measured_from_engines_and_priced_as_they_run(leading: Leading) -> None:
    fleet = leading.played.fleet
    specs = await plans.engine_specs(leading.engine)
    seen = see_fleet(fleet, [], specs, FIXED)
    row = fleet.row_of("n1/a")
    assert row is not None
    [kind] = [pool for pool in seen.pools if pool.model == MODEL]
    assert (kind.decode_ms_base, kind.load_s) == (row.decode_ms_base, row.load_ms / 1000)
    # 20 times as fast costs 20 times as much.
    [shape] = [shape for shape in seen.shapes if shape.region == "eu" and shape.gpus == 4]
    assert shape.micro_usd_per_hour == 4 * 2_500_000 * 20
    # Where no engine runs, the roofline says the same, as fast as those of its type.
    for name in list(leading.played.nodes):
        fleet.bye(Bye(node_id=name, agent_epoch=1))
    unseen = see_fleet(fleet, [], specs, FIXED)
    [computed] = [pool for pool in unseen.pools if pool.model == MODEL]
    assert computed.decode_ms_base == pytest.approx(kind.decode_ms_base)
    assert computed.prefill_ms_per_token == pytest.approx(kind.prefill_ms_per_token)
    elastic = see_fleet(fleet, [], specs, replace(FIXED, nodes_more_max=3, provision_s=60.0))
    assert {shape.nodes_more_max for shape in elastic.shapes} == {3}
    assert all(node.is_releasable for node in elastic.nodes)
    assert ModelName(OTHER) in {pool.model for pool in elastic.pools}


async def test_data_parallel_ranks_are_one_engine_to_the_planner(leading: Leading) -> None:
    from tests.integration.planner_world import facts

    fleet = leading.played.fleet
    ranks = [msgspec.structs.replace(facts(f"n3/v/{rank}", MODEL), rank=rank) for rank in (0, 1)]
    fleet.hello(Hello(node_id="n3", agent_epoch=1, version="0", engines=ranks), 1.0)
    await catalog.upsert_engines(leading.engine, NodeId("n3"), 1, ranks)
    one = fleet.row_of("n3/v/0")
    assert one is not None
    for heard in (True, False):
        if not heard:
            fleet.bye(Bye(node_id="n3", agent_epoch=1))
        declared = await catalog.list_engines(leading.engine)
        seen = see_fleet(fleet, declared, {}, FIXED)
        [node] = [node for node in seen.nodes if node.node_id == "n3"]
        assert [(engine.engine_id, engine.gpus) for engine in node.engines] == [("n3/v", 2)]
        [kind] = [pool for pool in seen.pools if (pool.model, pool.gpus) == (MODEL, 2)]
        if heard:
            assert kind.seats_capacity == 2 * one.seats_capacity
            assert kind.kv_tokens_capacity == 2 * one.kv_tokens_capacity
            assert kind.decode_ms_base == one.decode_ms_base
            assert kind.decode_ms_per_seq == one.decode_ms_per_seq / 2
