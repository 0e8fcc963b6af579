"""The simulated world: repeatable, nothing leaks, dollars add up, and the live decision code plays in it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from cli.simulate.contracts import (
    Call,
    ClientRules,
    Cordon,
    EngineDeath,
    EngineSpec,
    Fate,
    FleetSpec,
    Plan,
    Pushes,
    Result,
    SlowEngine,
    Step,
    Waste,
    WorldOptions,
)
from cli.simulate.headway import Headway, HeadwayOptions, shipped_bundle, without
from cli.simulate.world import play
from controlplane.domain.decision import Refuse
from tests.decision_builders import H100, LLAMA_70B_FP8

SPEC = EngineSpec(name="e", model=LLAMA_70B_FP8, gpu=H100, gpus=4)
ROOT = Path(__file__).resolve().parents[2]
HORIZON_S = 80.0
FAULTS = (
    EngineDeath(at_s=20.0, engine=0),
    SlowEngine(at_s=30.0, until_s=50.0, engine=1),
    Cordon(at_s=40.0, until_s=60.0, engine=2),
)


class Push(Pushes):
    """Sends at once to the home, or to where least is in flight; nobody waits."""

    name = "push"

    def arrived(self, call: Call) -> None:
        able = [view for view in self.floor.engines if self.floor.can_take(call, view.index)]
        if not able:
            self.floor.refuse(call, 1_000.0)
        elif call.home >= 0 and self.floor.can_take(call, call.home):
            self.floor.send(call, call.home)
        else:
            self.floor.send(call, min(able, key=lambda view: (view.in_flight, view.index)).index)

    failed = arrived


def fleet(engines: int, **changes: object) -> FleetSpec:
    specs = (
        replace(SPEC, name=f"e{number}", cold_start_s=15.0, **changes) for number in range(engines)
    )
    return FleetSpec(name=f"{engines}", engines=tuple(specs))


def workload(seed: int, per_s: float, *, slack: float = 2.0) -> list[Plan]:
    """Agents of 2 to 8 steps over a shared prefix, one tenant in three urgent."""
    random = Random(seed)
    plans: list[Plan] = []
    at_s = 0.0
    while at_s < HORIZON_S:
        at_s += random.expovariate(per_s)
        steps: list[Step] = []
        context = 1_024
        for _ in range(random.randint(2, 8)):
            new, completion = random.randint(100, 2_000), random.randint(20, 400)
            steps.append(Step(new, context, completion, random.expovariate(0.5)))
            context += new + completion
        alone_s = sum(step.gap_s + 0.2 + 0.012 * step.completion_tokens for step in steps)
        urgent = len(plans) % 3 == 0
        plans.append(
            Plan(
                number=len(plans), tenant=f"t{len(plans) % 6}", workflow_class="agent", arrival_s=at_s,
                steps=tuple(steps), deadline_s=slack * alone_s, priority=9 if urgent else 4,
                weight=4.0 if urgent else 1.0, prefix="tools", prefix_tokens=1_024,
            )
        )  # fmt: skip
    return plans


def options(**changes: object) -> WorldOptions:
    return replace(
        WorldOptions(seed=7, horizon_s=HORIZON_S, warm_up_s=10.0, cool_down_s=10.0), **changes
    )


def check(result: Result) -> None:
    """What holds of every run, whatever the policy and the faults."""
    assert set(result.gauges_at_end.values()) == {0.0}, result.gauges_at_end
    total = result.total
    assert sum(total.fates.values()) == total.started
    for tallies in (result.by_priority, result.by_class):
        assert sum(tally.started for tally in tallies.values()) == total.started
        assert sum(tally.succeeded for tally in tallies.values()) == total.succeeded
    wasted = result.wasted_usd
    assert set(wasted) == set(Waste)
    parts = result.busy_usd + wasted[Waste.IDLE] + wasted[Waste.COLD_START]
    assert parts == pytest.approx(result.fleet_usd, rel=1e-9)
    assert all(usd >= -1e-9 for usd in wasted.values())
    assert result.fleet_usd > 0.0


@pytest.mark.parametrize("maker", [Push, Headway])
@pytest.mark.parametrize("faults", [(), FAULTS])
def test_the_same_seed_gives_the_same_bytes_and_nothing_leaks(maker, faults) -> None:
    plans = workload(3, 2.0)
    first = play(plans, fleet(4), maker(), options(faults=faults, has_log=True))
    again = play(plans, fleet(4), maker(), options(faults=faults, has_log=True))
    check(first)
    assert first.log == again.log
    assert first.digest == again.digest
    assert first.total.succeeded > 0
    assert play(workload(4, 2.0), fleet(4), maker(), options()).digest != first.digest


def test_one_workflow_alone_takes_the_time_of_its_steps_and_gaps() -> None:
    steps = (Step(1_000, 0, 11, 2.0), Step(504, 1_000, 1, 5.0))
    plan = Plan(
        number=0, tenant="t", workflow_class="c", arrival_s=1.0, steps=steps, deadline_s=100.0
    )
    rates = SPEC.rates
    prefill_ms = rates.prefill_base_ms + 1_000 * rates.prefill_ms_per_token
    prefill_ms += rates.prefill_ms_per_token_sq * 1_000 * 1_000 / 2
    decode_ms = sum(
        rates.decode_ms_base + rates.decode_ms_per_seq + rates.decode_ms_per_kv_token * kv
        for kv in range(1_000, 1_010)
    )
    # 1,000 of 1,504 tokens are cached, in whole blocks of 16.
    new = 1_504 - 992
    second_ms = rates.prefill_base_ms + new * rates.prefill_ms_per_token
    second_ms += rates.prefill_ms_per_token_sq * (new * 992 + new * new / 2)
    expected_ms = prefill_ms + decode_ms + second_ms
    for strategy in (Push(), Headway()):
        result = play([plan], fleet(1), strategy, replace(options(), warm_up_s=0.0, has_log=True))
        check(result)
        ends = [float(line.split()[0]) for line in result.log if " end " in line]
        assert ends[-1] == pytest.approx(1_000.0 + 2_000.0 + expected_ms, rel=1e-9)
        assert result.ttft.mean_ms == pytest.approx((prefill_ms + second_ms) / 2, rel=1e-9)
        assert result.cached_tokens == 992
        usd = expected_ms * SPEC.micro_usd_per_hour / 3.6e9 / 1e6 * 1e3
        assert result.busy_usd == pytest.approx(usd, rel=1e-9)


def test_all_agree_where_nothing_is_short() -> None:
    plans = workload(5, 0.05)
    results = [play(plans, fleet(4), strategy, options()) for strategy in (Push(), Headway())]
    for result in results:
        check(result)
        assert result.total.success_ratio == 1.0
    assert results[0].cpst_usd == results[1].cpst_usd
    assert results[0].e2e.mean_ms == pytest.approx(results[1].e2e.mean_ms, rel=0.02)


@pytest.mark.parametrize("maker", [Push, Headway])
def test_more_engines_more_successes(maker) -> None:
    plans = workload(6, 8.0)
    succeeded = []
    for engines in (1, 2):
        result = play(plans, fleet(engines), maker(), options())
        check(result)
        succeeded.append(result.total.succeeded)
    assert succeeded == sorted(succeeded)
    assert succeeded[0] < succeeded[-1]


def test_under_overload_headway_carries_more_to_the_end_and_wastes_less_than_a_push() -> None:
    plans = workload(8, 8.0)
    push, headway = (play(plans, fleet(1), each, options()) for each in (Push(), Headway()))
    check(push)
    check(headway)
    assert push.total.success_ratio < 0.9, "the case is no overload"
    assert headway.total.succeeded > push.total.succeeded
    assert headway.wasted_usd[Waste.LATE] < push.wasted_usd[Waste.LATE]


def test_clients_retry_as_they_are_told_and_give_up() -> None:
    class Refuses(Push):
        name = "refuses"

        def arrived(self, call: Call) -> None:
            if call.tries < 2 or call.plan.number == 1:
                self.floor.refuse(call, 3_000.0, is_final=call.plan.number == 2)
            else:
                super().arrived(call)

    plans = [
        Plan(
            number=number, tenant="t", workflow_class="c", arrival_s=float(number),
            steps=(Step(100, 0, 2),), deadline_s=60.0,
        )
        for number in range(3)
    ]  # fmt: skip
    result = play(plans, fleet(1), Refuses(), replace(options(), warm_up_s=0.0, has_log=True))
    check(result)
    assert result.total.fates == {Fate.SUCCEEDED: 1, Fate.REFUSED: 2}
    again = [line.split() for line in result.log if " again " in line]
    assert [float(words[0]) for words in again if words[2] == "w0-0"] == [3_000.0, 6_000.0]
    assert not any(words[2] == "w2-0" for words in again)
    patient = options(client=ClientRules(retries_max=0), warm_up_s=0.0)
    assert play(plans, fleet(1), Refuses(), patient).total.fates == {Fate.REFUSED: 3}


def test_an_engine_that_dies_costs_its_calls_an_attempt_and_not_their_lives() -> None:
    plans = workload(9, 1.0, slack=8.0)
    death = (EngineDeath(at_s=30.0, engine=0),)
    result = play(plans, fleet(3), Headway(), options(faults=death, has_log=True))
    check(result)
    assert result.wasted_usd[Waste.RETRIES] > 0.0
    assert result.wasted_usd[Waste.COLD_START] > 0.0
    assert result.total.success_ratio > 0.97
    sent_to_the_dead = [
        line for line in result.log
        if " send " in line and line.endswith(" 0\n") and 30_000.0 < float(line.split()[0]) < 45_000.0
    ]  # fmt: skip
    assert sent_to_the_dead == []


def test_an_engine_that_is_stopped_drains_and_is_paid_no_longer() -> None:
    class Sheds(Push):
        name = "sheds"

        def tick(self, now_ms: float) -> None:
            if now_ms == 10_000.0:
                self.floor.stop(0)
            elif now_ms == 70_000.0:
                self.floor.start(0)

    result = play(
        workload(10, 0.5), fleet(2), Sheds(), replace(options(), warm_up_s=0.0, cool_down_s=0.0)
    )
    check(result)
    assert result.engines_on_by_minute == (2, 1)
    assert result.engine_starts == 1
    per_s = SPEC.micro_usd_per_hour / 1e6 / 3_600
    # Drained in less than 20 s, and cold for the last 10 of the 70 measured seconds.
    assert (60 + 10) * per_s < result.fleet_usd_by_minute[0] < (60 + 30) * per_s
    cold_s = 0.0 if result.measured_s <= 70.0 else result.measured_s - 70.0
    assert result.wasted_usd[Waste.COLD_START] == pytest.approx(cold_s * per_s, rel=1e-6)


def check_without(part: str) -> None:
    plans = workload(11, 8.0)
    whole = play(plans, fleet(2), Headway(), options())
    rest = play(plans, fleet(2), Headway(without(part)), options())
    check(rest)
    assert rest.digest != whole.digest
    assert rest.strategy == f"headway-no-{part}"


@pytest.mark.parametrize("part", ["order", "bound", "shedding", "home"])
def test_each_part_can_be_taken_away_and_changes_what_happens(part: str) -> None:
    check_without(part)


@pytest.mark.parametrize("part", ["externality", "workflow"])
def test_each_part_of_placement_can_be_taken_away_and_changes_what_happens(part: str) -> None:
    # In a process that takes the sources of the core, whether it was compiled or not.
    program = (
        "from controlplane.scheduler.compile import prefer_sources; prefer_sources();"
        "from tests.unit.test_simulate_world import check_without;"
        f"check_without({part!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_is_refused_at_the_first_step_was_never_begun_and_what_began_is_not_refused() -> None:
    refused: list[tuple[int, str]] = []

    class Watches(Headway):
        def _answer(self, job, refuse: Refuse) -> None:
            refused.append((job.request.step, refuse.reason))
            super()._answer(job, refuse)

    result = play(
        workload(12, 8.0), fleet(1), Watches(HeadwayOptions(bundle=shipped_bundle())), options()
    )
    check(result)
    assert {step for step, reason in refused if reason == "shed_overload"} == {0}
    # What began ends early only when its deadline is out of reach.
    assert {reason for step, reason in refused if step} <= {"deadline_unreachable"}
    assert result.late_kill_ratio < 0.05


class Witness(Headway):
    """Compares what the fleet knows of engines with what they reported last, whenever it is asked."""

    reported: tuple[tuple[int, int, int], ...] = ()
    compared = 0

    def refreshed(self) -> None:
        super().refreshed()
        self.reported = tuple(
            (view.running, view.waiting, view.kv_tokens_used) for view in self.floor.engines
        )

    def compare(self) -> None:
        for view, (running, waiting, kv_tokens) in zip(
            self.floor.engines, self.reported, strict=True
        ):
            row = self.fleet.row_of(view.spec.name)
            assert (row.running, row.waiting) == (running, waiting)
            assert abs(row.kv_tokens_used - kv_tokens) <= 1
            self.compared += running > 0

    def _request(self, call: Call):
        self.compare()
        return super()._request(call)

    def tick(self, now_ms: float) -> None:
        super().tick(now_ms)
        self.compare()

    def engine_changed(self, engine: int) -> None:
        super().engine_changed(engine)
        self.compare()


def test_headway_decides_on_what_engines_reported_last_and_on_nothing_newer() -> None:
    witness = Witness()
    cordons = tuple(Cordon(at_s=20.05 + at, until_s=40.05 + at, engine=at) for at in range(3))
    result = play(workload(3, 2.0), fleet(4), witness, options(faults=cordons))
    check(result)
    assert witness.compared > 100
