"""What the gauges of health tell, read off a fleet that meets faults, ramps and back-pressure."""

from controlplane.domain.decision import Axis, AxisView, CandidateView, Explanation
from controlplane.domain.pool import BreakerState, OverrideMode
from controlplane.reliability.retry_budget import POOL_RULES, TENANT_RULES, RetryBudgets
from controlplane.reliability.slow_start import POOL_RAMP_MS, is_held_back
from controlplane.runtime.gauges import AxisMeans, compute_ratio, watch_fleet, watch_health
from controlplane.telemetry.metrics import Gauge, Metrics
from dataplane.protocol.messages import EngineState
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


def test_engines_and_nodes_are_told_by_what_they_do() -> None:
    world = World(3, 1)
    metrics = Metrics()
    watch_fleet(metrics, world.fleet, lambda: world.now_ms)
    world.say(e1=EngineState.DRAINING)
    labels = ("small", "h100", "both", "us")
    assert read(metrics.engines) == {
        (*labels, "serving"): 2,
        (*labels, "draining"): 1,
        ("small", "h100", "both", "eu", "serving"): 1,
    }
    assert read(metrics.nodes) == {("h100", "us", "heard"): 1, ("h100", "eu", "heard"): 1}
    assert metrics.engine_accepting.value(("e1", "small", "us")) == 0
    assert metrics.pool_accepting.value(("small",)) == 3
    world.fleet.silence(world.now_ms + 10_000, 5_000)
    assert {labels[-1] for labels in read(metrics.engines)} == {"silent"}
    assert {labels[-1] for labels in read(metrics.nodes)} == {"silent"}
    world.pass_ms(101)
    assert metrics.pool_accepting.value(("small",)) == 0


def test_memory_of_an_engine_adds_up_to_its_gpus() -> None:
    world = World(1)
    metrics = Metrics()
    watch_fleet(metrics, world.fleet, lambda: world.now_ms)
    [entry] = world.fleet.entries()
    gpu, model = (
        world.fleet.catalog.gpu_types[entry.row.gpu_type],
        world.fleet.catalog.models[entry.row.model],
    )
    entry.row.kv_tokens_used = 1_000
    told = {kind: size for (*_, kind), size in read(metrics.hbm).items()}
    assert told["weights"] == model.weights_bytes
    assert told["kv_used"] == 1_000 * model.kv_bytes_per_token
    assert told["kv_used"] + told["kv_free"] == (
        entry.row.kv_tokens_capacity * model.kv_bytes_per_token
    )
    assert sum(told.values()) >= gpu.hbm_bytes


def test_decoding_is_bound_by_memory_and_prompts_by_compute() -> None:
    world = World(1)
    [entry] = world.fleet.entries()
    catalog = world.fleet.catalog
    assert compute_ratio(catalog, entry) == 0
    entry.row.running, entry.row.kv_tokens_used = 4, 4_000
    few = compute_ratio(catalog, entry)
    entry.row.running = 64
    many = compute_ratio(catalog, entry)
    assert 0 < few < many < 0.5
    entry.row.prefill_tokens_pending = 8_000
    assert compute_ratio(catalog, entry) > 0.5
    entry.row.prefill_tokens_pending = 10**9
    assert compute_ratio(catalog, entry) < 1


def test_axes_tell_the_mean_of_the_winners_and_the_first_objections_of_the_others() -> None:
    metrics = Metrics()
    axes = AxisMeans(metrics)

    def view(name: str, cost: float, objection: str | None = None) -> CandidateView:
        return CandidateView(
            decode=name, prefill=None, gpu_type="g", region="r", cached_tokens=0,
            axes=(
                AxisView(Axis.GPU_TYPE, cost, None),
                AxisView(Axis.KV_HEADROOM, -cost / 2, objection),
                AxisView(Axis.WORKFLOW, 0.0, objection),
            ),
            ttft_ms_predicted=1.0, e2e_ms_predicted=1.0, cost_micro_usd=cost,
            is_feasible=objection is None,
        )  # fmt: skip

    def told(cost: float) -> Explanation:
        return Explanation(
            request_id="r", model="m", candidates=(view("a", cost), view("b", 9e9, "full")),
            winner="a", runner_up=None, reason=None, sentence="",
        )  # fmt: skip

    axes.explained(told(1_000_000))
    assert axes.usd()[Axis.GPU_TYPE,] == 1
    assert axes.usd()[Axis.KV_HEADROOM,] == -0.5
    for _ in range(100):
        axes.explained(told(3_000_000))
    assert 2.99 < axes.usd()[Axis.GPU_TYPE,] < 3
    counted = dict(metrics.axis_objections.series())
    assert counted == {(axis,): 101 if axis is Axis.KV_HEADROOM else 0 for axis in Axis}
