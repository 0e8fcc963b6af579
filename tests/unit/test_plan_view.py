"""What a replica makes of what the leader told it: newer epochs rule, prices end, rows are priced."""

from typing import Any

import pytest

from controlplane.domain.catalog import Catalog
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.plan_view import PlanView, watch
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.store.cluster import parse_cluster
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol.messages import (
    ClassPrice,
    ControlPlan,
    ControlPrices,
    CreditGrant,
    DesiredEngines,
    Hello,
    ModelPace,
    PoolPrice,
    decode,
    encode,
)
from tests.integration.planner_world import GPU, MODEL, REGION, cluster_text, facts

TTL_MS = 60_000


class Clock:
    now_ms = 1_000_000.0

    def __call__(self) -> float:
        return self.now_ms


def _catalog() -> Catalog:
    from controlplane.domain import catalog

    document = parse_cluster(cluster_text({"n1": {"n1/0": MODEL}}))
    return Catalog(
        revision=1,
        regions=document.regions,
        gpu_types={one.name: catalog.GpuType(**one.model_dump()) for one in document.gpu_types},
        models={one.name: catalog.Model(**one.model_dump()) for one in document.models},
        slo_classes={},
        nodes={
            node.id: catalog.Node(
                id=node.id, region=node.region, gpu_type=node.gpu_type, gpus=node.gpus,
                address=node.address, is_cordoned=False,
            )
            for node in document.nodes
        },
    )  # fmt: skip


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = FleetState(PrefixIndex(), TickLog(), engine_ramp_ms=0.0, pool_ramp_ms=0.0)
        self.fleet.use_catalog(_catalog())
        self.hello()
        self.view = PlanView(self.fleet, stretch_ratio_min=lambda: 1.5, clock_ms=self.clock)

    def hello(self) -> None:
        hello = Hello(node_id="n1", agent_epoch=1, version="0", engines=[facts("n1/0", MODEL)])
        assert self.fleet.hello(hello, 1.0)

    @property
    def row(self) -> EngineRow:
        row = self.fleet.row_of("n1/0")
        assert row is not None
        return row


@pytest.fixture
def world() -> World:
    return World()


def prices(epoch: int, number: int, kv: float, made_ms: float, **members: Any) -> ControlPrices:
    return ControlPrices(
        epoch=epoch,
        round=number,
        made_ms=int(made_ms),
        ttl_ms=TTL_MS,
        pools=[
            PoolPrice(
                model=MODEL, gpu_type=GPU, gpus=1, role="both", region=REGION,
                micro_usd_per_gpu_ms=2.0, micro_usd_per_kv_token_s=kv,
            )
        ],
        classes=[
            ClassPrice(class_id="a", model=MODEL, bid_micro_usd=3_000_000.0, served_ratio=0.5)
        ],
        models=members.pop("models", [pace(1.2)]),
    )  # fmt: skip


def pace(ratio: float, bid: float = 0.0) -> ModelPace:
    return ModelPace(
        model=MODEL, ratio=ratio, deferrable_ratio=1.2, bid_micro_usd_per_call=bid, calls_per_s=4.0
    )


def plan(epoch: int, number: int, revision: int, made_ms: float = 1_000_000.0) -> ControlPlan:
    return ControlPlan(
        epoch=epoch, round=number, revision=revision, made_ms=int(made_ms), status="ok",
        gap_ratio=0.01, solve_s=0.5, moves=1, nodes=[],
        engines=[
            DesiredEngines(
                model=MODEL, gpu_type=GPU, gpus=gpus, role="both", region=REGION,
                desired=3, actual=2,
            )
            for gpus in (1, 2)
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("epoch", "number", "is_news"), [(4, 9, False), (5, 2, False), (5, 3, True), (6, 0, True)]
)
def test_an_older_leader_or_round_is_not_obeyed(
    world: World,
    epoch: int,
    number: int,
    is_news: bool,  # noqa: FBT001
) -> None:
    base = world.row.kv_price_micro_usd_per_token_s
    assert world.view.take_plan(plan(5, 3, revision=7))
    assert world.view.take_prices(prices(5, 3, 1.0, world.clock.now_ms))
    assert world.view.take_plan(plan(epoch, number, revision=8)) is is_news
    assert world.view.take_prices(prices(epoch, number, 9.0, world.clock.now_ms)) is is_news
    assert world.view.plan is not None
    assert world.view.plan.revision == (8 if is_news else 7)
    shadow = world.row.kv_price_micro_usd_per_token_s - base
    assert shadow == pytest.approx(9.0 if is_news else 1.0)


def test_prices_are_added_to_the_rent_and_end_with_their_time(world: World) -> None:
    base = world.row.kv_price_micro_usd_per_token_s
    decided = world.row.dynamic()
    assert world.view.take_prices(prices(1, 1, 0.25, world.clock.now_ms))
    assert world.row.kv_price_micro_usd_per_token_s == pytest.approx(base + 0.25)
    # A decision of before is explained at the price of before.
    assert world.row.as_of(decided).kv_price_micro_usd_per_token_s == base
    # An engine that speaks again keeps its pool's price.
    world.hello()
    assert world.row.kv_price_micro_usd_per_token_s == pytest.approx(base + 0.25)
    world.clock.now_ms += TTL_MS
    world.view.expire()
    assert world.view.prices is not None
    world.clock.now_ms += 1
    world.view.expire()
    assert world.view.prices is None
    assert world.row.kv_price_micro_usd_per_token_s == base
    assert not world.view.take_prices(prices(1, 2, 0.25, world.clock.now_ms - TTL_MS - 1))
    # Nor one of a leader whose clock is far ahead, which would never end.
    assert not world.view.take_prices(prices(1, 2, 0.25, world.clock.now_ms + 120_000))


def test_the_planner_only_narrows_the_pace_and_not_below_what_policy_allows(world: World) -> None:
    grant = CreditGrant(node_id="n1", agent_epoch=1, ttl_ms=60_000, holds={"n1/0": (32, 200_000)})
    assert world.fleet.granted(grant, 1.0)

    def bound(ratio: float) -> int:
        world.fleet.use_stretch(ModelName(MODEL), ratio)
        return world.row.seats_bound

    wide, middle, least = bound(2.5), bound(1.8), bound(1.5)
    assert least < middle < wide
    for number, (told, seats) in enumerate(((1.8, middle), (1.2, least), (4.0, wide))):
        world.view.take_prices(prices(1, number, 0.0, world.clock.now_ms, models=[pace(told)]))
        assert bound(2.5) == seats
    assert bound(1.5) == least
    world.clock.now_ms += TTL_MS + 1
    world.view.expire()
    assert bound(2.5) == wide


def test_bids_are_told_to_rows_only_where_capacity_is_short(world: World) -> None:
    told = prices(1, 1, 0.0, world.clock.now_ms, models=[pace(2.0, bid=77.0)])
    assert world.view.take_prices(told)
    assert world.row.bid_micro_usd == 77.0
    world.view.take_prices(prices(1, 2, 0.0, world.clock.now_ms, models=[]))
    world.hello()
    assert ModelName(MODEL) not in world.fleet._bids


def test_gauges_show_what_was_told(world: World) -> None:
    metrics = Metrics()
    watch(metrics, world.view)
    assert dict(metrics.desired_engines.series()) == {}
    assert dict(metrics.plan_age.series()) == {}
    world.view.take_plan(decode(encode(plan(1, 1, revision=4)), ControlPlan))
    world.view.take_prices(decode(encode(prices(1, 1, 0.25, world.clock.now_ms)), ControlPrices))
    world.clock.now_ms += 5_000
    labels = (MODEL, GPU, "both", REGION)
    assert dict(metrics.desired_engines.series()) == {labels: 6.0}
    assert metrics.plan_age.value() == pytest.approx(5.0)
    assert metrics.plan_revision.value() == 4
    assert metrics.pool_kv_shadow_price.value(labels) == pytest.approx(0.25e-6)
    assert metrics.pool_gpu_shadow_price.value(labels) == pytest.approx(2e-3)
    assert metrics.class_bid_price.value(("a",)) == 3.0
