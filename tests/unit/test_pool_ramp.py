"""While a cold pool warms up, the lowest priorities begin only on room that nobody else wants."""

from controlplane.admission.appointments import WAIT_MS_MIN
from controlplane.domain.decision import Reason
from controlplane.domain.ids import ModelName
from controlplane.reliability.slow_start import HELD_BACK_BELOW_PRIORITY, POOL_RAMP_MS
from controlplane.runtime.pool_loads import PoolLoads
from policies.load import load_bundle
from tests.decision_builders import call
from tests.unit.test_reliability_fleet import NEW_MS, OK, World

MODEL = ModelName("small")
LOW, HIGH = HELD_BACK_BELOW_PRIORITY - 1, HELD_BACK_BELOW_PRIORITY


def begins(loads: PoolLoads, world: World, priority: int) -> tuple[Reason | None, int | None]:
    now_ms = int(world.now_ms)
    request = call(
        id=f"r{priority}", model=MODEL, priority=priority, workflow=None, arrival_ms=now_ms,
        deadline_ms=now_ms + 60_000, workflow_deadline_ms=now_ms + 60_000,
    )  # fmt: skip
    would = loads.would_begin(request, now_ms)
    refuse = loads.may_begin(request, now_ms)
    loads.dropped(request, now_ms)
    assert would is (refuse is None)
    return (None, None) if refuse is None else (refuse.reason, refuse.retry_after_ms)


def test_the_lowest_priority_yields_until_the_pool_is_warm() -> None:
    world = World(2, started_ms=NEW_MS)
    loads = PoolLoads(world.fleet, load_bundle(None).admission)
    assert begins(loads, world, LOW) == (None, None), "nobody else: it is the canary"
    canary = world.begin("e0")
    told = world.fleet.pool(MODEL, world.now_ms + 200).warm_in_ms
    world.now_ms += 200
    assert begins(loads, world, LOW) == (Reason.SHED_OVERLOAD, max(WAIT_MS_MIN, told))
    assert begins(loads, world, HIGH) == (None, None)
    world.end(canary, OK)
    world.now_ms += 2 * POOL_RAMP_MS
    world.lend()
    world.fleet.look_again(world.now_ms)
    assert world.begin("e0")
    assert begins(loads, world, LOW) == (None, None), "warm"
    loads.is_waiting = lambda _: True
    assert begins(loads, world, LOW) == (None, None), "load alone says who begins on a warm pool"
