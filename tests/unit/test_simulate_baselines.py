"""Ports do what their sources say: formulas on a small floor, and all of them in the real world."""

from dataclasses import replace
from random import Random

import pytest

from cli.simulate.baselines import FAMILIES, Config, family
from cli.simulate.baselines.buckets import TokenBuckets
from cli.simulate.baselines.dynamo import DynamoCost
from cli.simulate.baselines.llmd import LlmdTokens, LlmdWeights, Weights
from cli.simulate.baselines.mooncake import Mooncake, Targets
from cli.simulate.baselines.sticky import PlasSticky, StaticGate, StickyFcfs
from cli.simulate.contracts import (
    Call,
    Cordon,
    EngineDeath,
    EngineView,
    Fate,
    Plan,
    Step,
    WorldOptions,
)
from cli.simulate.fleets import fleet, sized
from cli.simulate.workloads import draw_plans, workload
from cli.simulate.world import play

HOMOGENEOUS = fleet("homogeneous")
ALL = [(each.name, config) for each in FAMILIES for config in each.configs]


class SmallFloor:
    """Three equal engines whose caches hold what a test says."""

    def __init__(self, cached=None):
        self.now_ms = 0.0
        self.engines = [EngineView(index, HOMOGENEOUS.engines[index]) for index in range(3)]
        self.random = Random(1)
        self.cached = cached or {}
        self.sent = []
        self.refused = []

    def can_take(self, call, engine):
        return self.engines[engine].is_accepting

    def cached_tokens(self, call, engine):
        return min(self.cached.get(engine, 0), call.prompt_tokens - 1)

    def prefill_ms(self, call, engine):
        rates = self.engines[engine].rates
        new = call.prompt_tokens - self.cached_tokens(call, engine)
        return rates.prefill_base_ms + new * rates.prefill_ms_per_token

    def send(self, call, engine, priority=0.0):
        call.engine = engine
        self.engines[engine].in_flight += 1
        self.sent.append((call.id, engine, priority))

    def refuse(self, call, retry_after_ms, *, is_final=False):
        self.refused.append((call.id, retry_after_ms))


def call(number=0, prompt=1_000, step=0, home=-1, tenant="t"):
    steps = tuple(Step(prompt, 0, 100, 0.0) for _ in range(step + 1))
    plan = Plan(
        number=number,
        tenant=tenant,
        workflow_class="c",
        arrival_s=0.0,
        steps=steps,
        deadline_s=100.0,
    )
    made = Call(plan, step, 0.0, 100_000.0)
    made.home = home
    made.completion_tokens_expected = 100
    return made


def begun(strategy, **floor):
    small = SmallFloor(**floor)
    strategy.begin(small)
    return strategy, small


def test_dynamo_sums_its_blocks():
    """W * prefill + active: at weight 1 the fuller cache loses to the idle engine, at 16 it wins."""
    for weight, expected in ((1.0, 1), (16.0, 0)):
        strategy, floor = begun(DynamoCost(weight), cached={0: 900})
        strategy.arrived(call(1, prompt=1_000, home=0))
        assert floor.sent[-1][1] == 0
        strategy.first_token(call(1))
        floor.cached = {0: 500}
        # Engine 0: 500 to compute and 2,000 held; engines 1, 2: 1,000 and 1,000.
        strategy.arrived(call(2, prompt=1_000))
        cheapest = min(range(3), key=lambda engine: weight * (500, 1_000, 1_000)[engine]
                       + (2_000, 1_000, 1_000)[engine])  # fmt: skip
        assert (floor.sent[-1][1] == 0) == (cheapest == 0) == (expected == 0)


def test_the_ledger_forgets_calls_that_end_expire_or_fail():
    strategy, floor = begun(DynamoCost())
    calls = [call(number) for number in range(4)]
    for each in calls:
        strategy.arrived(each)
    strategy.first_token(calls[0])
    strategy.ended(calls[0])
    strategy.expired(calls[1])
    strategy.ended(calls[2])
    strategy.failed(calls[3])
    strategy.ended(calls[3])
    assert strategy.ledger.prefill_tokens == [0, 0, 0]
    assert strategy.ledger.held_tokens == [0, 0, 0]
    assert len(floor.sent) == 5


def test_llmd_weighs_its_scorers():
    strategy, floor = begun(LlmdWeights(Weights(prefix=3, queue=2, kv=2)), cached={0: 800})
    floor.engines[0].waiting = 4
    floor.engines[1].kv_tokens_used = floor.engines[1].kv_tokens_capacity // 2
    floor.engines[2].waiting = 1
    # Scores: 3 x 0.8 + 0 + 2 = 4.4; 0 + 2 + 1 = 3; 0 + 2 x 3/4 + 2 = 3.5.
    strategy.arrived(call())
    assert floor.sent[-1][1] == 0
    floor.cached = {0: 450}
    # 3 x 0.45 + 0 + 2 = 3.35.
    strategy.arrived(call(1))
    assert floor.sent[-1][1] == 2


def test_llmd_tokens_leaves_the_warm_engine_at_tau():
    rate = HOMOGENEOUS.engines[0].rates.prefill_ms_per_token
    strategy, floor = begun(LlmdTokens(1_500 * rate / 1_000), cached={1: 900})
    engines = []
    for number in range(4):
        strategy.arrived(call(number, prompt=1_000))
        engines.append(floor.sent[-1][1])
    # 1,000 and 2,000 tokens ahead of idle engines: the third is above tau = 1,500.
    assert engines[:2] == [1, 1]
    assert engines[2] != 1


def test_mooncake_rejects_what_would_be_late_and_spares_what_has_begun():
    targets = Targets(ttft_s=0.001, tbt_s=1.0)
    strategy, floor = begun(Mooncake(targets))
    strategy.arrived(call())
    assert (len(floor.refused), len(floor.sent)) == (1, 0)
    strategy, floor = begun(Mooncake(replace(targets, spares_begun=True)))
    strategy.arrived(call(1, step=1))
    assert (len(floor.refused), len(floor.sent)) == (0, 1)
    strategy, floor = begun(Mooncake(replace(targets, is_rejecting=False)), cached={2: 900})
    strategy.arrived(call(2))
    assert floor.sent[-1][1] == 2


def test_mooncake_predicts_the_load_at_which_decoding_begins():
    """Calls whose uniform decode time will be over do not count against the next one."""
    tbt_s = (HOMOGENEOUS.engines[0].rates.decode_ms_base + 1.0) / 1_000
    for decode_s, is_refused in ((None, True), (5.0, False), (100.0, True)):
        targets = Targets(ttft_s=100.0, tbt_s=tbt_s, decode_s=decode_s)
        strategy, floor = begun(Mooncake(targets))
        for view in floor.engines[1:]:
            view.condition = None
        floor.can_take = lambda call, engine: engine == 0
        first = call(1, prompt=100)
        strategy.arrived(first)
        floor.now_ms = 10.0
        strategy.first_token(first)
        floor.now_ms = 10_000.0
        strategy.arrived(call(2, prompt=60_000))
        # Alone, 60,000 tokens of context are above the target too.
        assert floor.refused
        floor.refused.clear()
        strategy.ledger.held_tokens[0] += 50_000
        strategy.arrived(call(3, prompt=100))
        assert bool(floor.refused) == is_refused, decode_s


def test_sticky_goes_home_and_the_gate_counts_workflows():
    strategy, floor = begun(StickyFcfs())
    floor.engines[2].in_flight = 50
    strategy.arrived(call(1, step=1, home=2))
    assert floor.sent[-1][1] == 2
    strategy, floor = begun(StickyFcfs(16))
    floor.engines[2].in_flight = 50
    strategy.arrived(call(1, step=1, home=2))
    assert floor.sent[-1][1] != 2
    gate, floor = begun(StaticGate(1))
    calls = [call(number) for number in range(5)]
    for each in calls:
        gate.arrived(each)
    assert [name for name, _, _ in floor.sent] == ["w0-0", "w1-0", "w2-0"]
    assert gate.waiting == 2
    gate.expired(calls[3])
    gate.workflow_ended(calls[0].plan, Fate.SUCCEEDED)
    assert floor.sent[-1][0] == "w4-0"
    assert gate.waiting == 0


def test_plas_puts_programs_with_more_service_behind():
    strategy, floor = begun(PlasSticky(1.0, moves_short=False))
    served = call(1)
    strategy.arrived(served)
    served.arrived_ms, served.first_token_ms, served.ended_ms = 0.0, 100.0, 5_100.0
    strategy.ended(served)
    strategy.arrived(call(1, step=1, home=0))
    strategy.arrived(call(2))
    by_name = {name: priority for name, _, priority in floor.sent}
    # 5 s of service at a quantum of 1 s: level 1 + log2(5).
    assert by_name["w1-1"] == 3.0
    assert by_name["w2-0"] == 0.0


def test_a_bucket_is_overdrawn_once_and_tells_when_it_is_full_enough():
    strategy, floor = begun(TokenBuckets(1.0, {"t": 0.001}, spares_begun=False))
    strategy.arrived(call(1, prompt=100_000))
    assert floor.sent
    strategy.arrived(call(2, prompt=1_000))
    ((_, wait_ms),) = floor.refused
    floor.now_ms = wait_ms + 1.0
    strategy.arrived(call(2, prompt=1_000))
    assert len(floor.sent) == 2
    # Another tenant has a bucket of its own.
    strategy.arrived(call(3, tenant="other"))
    assert len(floor.sent) == 3


# ------------------------------------------------------------ in the real world

QUIET = draw_plans(workload("coding"), seed=7, rate_per_s=0.02, horizon_s=400.0)
BUSY = draw_plans(workload("mix"), seed=7, rate_per_s=0.8, horizon_s=100.0)
FAULTS = (
    EngineDeath(at_s=30.0, engine=0),
    EngineDeath(at_s=31.0, engine=1),
    Cordon(at_s=40.0, until_s=80.0, engine=2),
    Cordon(at_s=40.0, until_s=80.0, engine=3),
)


@pytest.mark.parametrize(
    ("name", "config"), ALL, ids=[f"{name} {each.label}" for name, each in ALL]
)
def test_every_policy_agrees_when_idle_and_leaks_nothing_under_faults(name, config: Config):
    idle = play(
        QUIET, config.fitted(HOMOGENEOUS), config.make(), WorldOptions(seed=7, horizon_s=400.0)
    )
    assert idle.expected_successes == pytest.approx(len(QUIET)), name
    options = WorldOptions(seed=7, horizon_s=100.0, faults=FAULTS)
    hit = play(BUSY, config.fitted(HOMOGENEOUS), config.make(), options)
    assert not any(hit.gauges_at_end.values()), name
    assert hit.total.started == len(BUSY)
    again = play(BUSY, config.fitted(HOMOGENEOUS), config.make(), options)
    assert again.digest == hit.digest


def test_a_setting_bounds_what_engines_take():
    tight, loose = (
        config.fitted(HOMOGENEOUS).engines[0].seats
        for config in family("vllm-priority").configs[:2]
    )
    assert 2 <= tight < loose < HOMOGENEOUS.engines[0].seats
    assert family("sticky").configs[0].fitted(HOMOGENEOUS) is HOMOGENEOUS
    assert len(sized(HOMOGENEOUS, 6).engines) == 6
