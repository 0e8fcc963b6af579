"""What the gauges of health tell, read off a fleet that meets faults, ramps and back-pressure."""

from controlplane.domain.pool import BreakerState, OverrideMode
from controlplane.reliability.retry_budget import POOL_RULES, TENANT_RULES, RetryBudgets
from controlplane.reliability.slow_start import POOL_RAMP_MS, is_held_back
from controlplane.runtime.gauges import watch_health
from controlplane.telemetry.metrics import Gauge, Metrics
from tests.unit.test_reliability_fleet import BUSY, FAULT, NEW_MS, OK, SEATS, World

E0, E1 = ("e0", "small", "us"), ("e1", "small", "us")


def watched(world: World) -> tuple[Metrics, RetryBudgets]:
    metrics, retries = Metrics(), RetryBudgets()
    watch_health(metrics, world.fleet, retries, lambda: world.now_ms)
    return metrics, retries


def read(gauge: Gauge) -> dict[tuple[str, ...], float]:
    return dict(gauge.series())


def test_breakers_of_engines_and_pools_are_told_by_how_little_they_let_through() -> None:
    world = World(4)
    metrics, _ = watched(world)
    assert set(read(metrics.engine_breaker_state).values()) == {0}
    world.call("e0", FAULT, 5)
    assert metrics.engine_breaker_state.value(E0) == 2
    assert metrics.engine_breaker_state.value(E1) == 0
    assert metrics.engine_seats_withheld.value(E0) == SEATS
    assert metrics.engine_seats_withheld.value(E1) == 0
    assert metrics.engine_attempts_expected.value(E0) > 2.5
    assert metrics.engine_attempts_expected.value(E1) == 1
    world.pass_ms(6_500)
    assert metrics.engine_breaker_state.value(E0) == 1, "it may be tried"
    world.fleet.use_overrides({"engine:e1": OverrideMode.OPEN}, world.now_ms)
    assert metrics.engine_breaker_state.value(E1) == 2, "an operator's word goes before"
    [region] = world.fleet.regions()
    assert region.breaker.shown is BreakerState.CLOSED
    assert read(metrics.pool_breaker_state) == {("small", "us"): 0}
    world.fleet.use_overrides({"pool:small/us": OverrideMode.OPEN}, world.now_ms)
    assert read(metrics.pool_breaker_state) == {("small", "us"): 2}


def test_back_pressure_withholds_what_the_engine_does_not_hold_already() -> None:
    world = World(2)
    metrics, _ = watched(world)
    held = [world.begin("e0") for _ in range(3)]
    world.end(world.begin("e0"), BUSY, retry_after_ms=5_000)
    assert metrics.engine_seats_withheld.value(E0) == SEATS - len(held)
    world.pass_ms(5_001)
    assert metrics.engine_seats_withheld.value(E0) == 0


def test_ramps_are_told_for_the_pool_and_for_each_engine() -> None:
    world = World(2, started_ms=NEW_MS)
    metrics, _ = watched(world)
    assert metrics.pool_ramp_ratio.value(("small",)) == 0
    assert metrics.engine_ramp_ratio.value(E0) == 0
    assert metrics.engine_seats_withheld.value(E0) == SEATS - 1, "all but the canary"
    placement = world.begin("e0")
    world.end(placement, OK)
    # What is told of a pool is as old as 100 ms.
    world.pass_ms(101)
    assert 0 < metrics.pool_ramp_ratio.value(("small",)) < 0.2
    world.pass_ms(POOL_RAMP_MS / 2)
    assert 0.5 < metrics.pool_ramp_ratio.value(("small",)) < 0.6
    world.pass_ms(POOL_RAMP_MS)
    assert metrics.pool_ramp_ratio.value(("small",)) == 1
    assert metrics.engine_ramp_ratio.value(E0) == 1
    assert metrics.engine_seats_withheld.value(E0) == 0


def test_retries_left_are_those_that_can_still_be_made() -> None:
    world = World(1)
    metrics, retries = watched(world)
    assert read(metrics.pool_retries_left) == {}
    now = int(world.now_ms)
    for number in range(100):
        retries.note_request(f"t{number % 2}", "small", now, 0)
    assert metrics.pool_retries_left.value(("small",)) == 10 + POOL_RULES.free
    assert metrics.tenants_without_retries.value() == 0
    made = 0
    while retries.try_spend("t0", "small", now, is_pool_overloaded=False):
        made += 1
        assert metrics.pool_retries_left.value(("small",)) == 10 + POOL_RULES.free - made
    assert made == 10 + POOL_RULES.free
    # The pool's is spent first, and clients repeat their calls on their own.
    for _ in range(5 + TENANT_RULES.free):
        retries.note_request("t1", "small", now, 1)
    assert metrics.pool_retries_left.value(("small",)) == 0
    assert metrics.tenants_without_retries.value() == 1
    world.now_ms += 10_200
    assert metrics.tenants_without_retries.value() == 0
    assert metrics.pool_retries_left.value(("small",)) == POOL_RULES.free


def test_the_lowest_priorities_yield_until_the_pool_is_warm() -> None:
    for priority in range(10):
        for ratio in (0.0, 0.1, 0.99):
            assert is_held_back(ratio, priority) is (priority in (0, 1, 2))
        assert not is_held_back(1.0, priority)
