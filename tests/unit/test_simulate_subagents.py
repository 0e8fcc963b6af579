"""Sub-agents: branches run at once, the workflow goes on when the slowest has ended, and has one fate."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from cli.simulate.bounds import engine_work_s, isolated_s
from cli.simulate.contracts import (
    Branch,
    Call,
    EngineDeath,
    EngineSpec,
    Fate,
    FleetSpec,
    Plan,
    Pushes,
    Result,
    Step,
    Waste,
    WorldOptions,
    all_steps,
)
from cli.simulate.fleets import fleet as named_fleet
from cli.simulate.headway import Headway
from cli.simulate.workloads import capacity_per_s, draw_plans, workload
from cli.simulate.world import play
from controlplane.domain.request import Request
from tests.decision_builders import H100, LLAMA_70B_FP8

TRACES = os.environ.get("HEADWAY_TRACES", "")
SPEC = EngineSpec(name="e", model=LLAMA_70B_FP8, gpu=H100, gpus=4)
RATES = SPEC.rates
USD_PER_MS = SPEC.micro_usd_per_hour / 1e6 / 3.6e6
# Differences of two instants of the log, which has them to the nanosecond.
LOG_MS = 2e-6
OPTIONS = WorldOptions(seed=7, horizon_s=200.0, has_log=True)


class Spread(Pushes):
    """Sends each call to the engine that its number tells, and refuses those that it is told to."""

    name = "spread"

    def __init__(self, *, refuses: str = "", sends_again: bool = True) -> None:
        self.refuses = refuses
        self.sends_again = sends_again
        self.gone: list[str] = []
        self.fates: list[Fate] = []

    def arrived(self, call: Call) -> None:
        if call.id == self.refuses:
            self.floor.refuse(call, None, is_final=True)
        else:
            self.floor.send(call, call.step_number % len(self.floor.engines))

    def failed(self, call: Call) -> None:
        if self.sends_again:
            self.floor.send(call, 1)
        else:
            self.floor.refuse(call, None, is_final=True)

    def expired(self, call: Call) -> None:
        self.gone.append(call.id)

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        self.fates.append(fate)


def fleet(engines: int) -> FleetSpec:
    return FleetSpec(
        name="f", engines=tuple(replace(SPEC, name=f"e{number}") for number in range(engines))
    )


def plan(**changes: object) -> Plan:
    """A call, two branches of two calls and of one, and a call that reads what they found."""
    slow = Branch((Step(800, 0, 21, 3.0), Step(340, 800, 31)))
    quick = Branch((Step(600, 0, 11, 9.0),))
    steps = (Step(1_000, 0, 5, 2.0, (slow, quick)), Step(512, 1_000, 2))
    known = Plan(
        number=4, tenant="t", workflow_class="c", arrival_s=1.0, steps=steps, deadline_s=100.0
    )
    return replace(known, **changes)


def alone_ms(new: int, cached: int, completion: int) -> float:
    """A call with nobody beside it, token by token."""
    prompt = new + cached
    prefill = RATES.prefill_base_ms + new * RATES.prefill_ms_per_token
    prefill += RATES.prefill_ms_per_token_sq * (new * cached + new * new / 2)
    each = RATES.decode_ms_base + RATES.decode_ms_per_seq
    return prefill + sum(
        each + RATES.decode_ms_per_kv_token * kv for kv in range(prompt, prompt + completion - 1)
    )


FIRST_MS = alone_ms(1_000, 0, 5)
SLOW_MS = (alone_ms(800, 0, 21), alone_ms(340, 800, 31))
QUICK_MS = alone_ms(600, 0, 11)
# 1,000 of 1,512 tokens are cached, in whole blocks of 16.
LAST_MS = alone_ms(520, 992, 2)


def log_of(result: Result, event: str) -> dict[str, float]:
    words = [line.split() for line in result.log]
    return {line[2]: float(line[0]) for line in words if line[1] == event}


def check(result: Result) -> None:
    assert set(result.gauges_at_end.values()) == {0.0}, result.gauges_at_end
    assert sum(result.total.fates.values()) == result.total.started
    wasted = result.wasted_usd
    parts = result.busy_usd + wasted[Waste.IDLE] + wasted[Waste.COLD_START]
    assert parts == pytest.approx(result.fleet_usd, rel=1e-9)


@pytest.mark.parametrize("maker", [Spread, Headway])
def test_branches_run_at_once_and_the_slowest_of_them_is_waited_for(maker) -> None:
    strategy = maker()
    # w4-1 and w4-2 begin the branches, w4-3 goes on in the first, w4-4 is the parent's.
    engines = 5 if maker is Spread else 1
    result = play([plan()], fleet(engines), strategy, OPTIONS)
    check(result)
    assert result.total.fates == {Fate.SUCCEEDED: 1}
    asked, ended = log_of(result, "ask"), log_of(result, "end")
    assert list(asked) == ["w4-0", "w4-1", "w4-2", "w4-3", "w4-4"]
    assert ended["w4-0"] == pytest.approx(1_000.0 + FIRST_MS, rel=1e-9)
    assert asked["w4-1"] == asked["w4-2"] == ended["w4-0"]
    assert asked["w4-3"] == pytest.approx(ended["w4-1"] + 3_000.0, rel=1e-9)
    # The pause of a branch's last call counts for nothing, the parent's begins with the join.
    assert ended["w4-2"] < ended["w4-3"]
    assert asked["w4-4"] == pytest.approx(ended["w4-3"] + 2_000.0, rel=1e-9)
    if maker is Spread:
        at_ms = 1_000.0 + FIRST_MS
        assert ended["w4-1"] == pytest.approx(at_ms + SLOW_MS[0], rel=1e-9)
        assert ended["w4-2"] == pytest.approx(at_ms + QUICK_MS, rel=1e-9)
        # On another engine than its call before: nothing of its context is there.
        second_ms = alone_ms(1_140, 0, 31)
        assert ended["w4-3"] == pytest.approx(at_ms + SLOW_MS[0] + 3_000.0 + second_ms, rel=1e-9)
        last_ms = alone_ms(1_512, 0, 2)
        assert ended["w4-4"] == pytest.approx(asked["w4-4"] + last_ms, rel=1e-9)
        busy_ms = FIRST_MS + SLOW_MS[0] + QUICK_MS + second_ms + last_ms
        assert result.busy_usd == pytest.approx(busy_ms * USD_PER_MS, rel=1e-9)


def test_every_branch_has_a_context_and_a_home_of_its_own() -> None:
    class Home(Spread):
        name = "home"

        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, int] = {}

        def ended(self, call: Call) -> None:
            self.found[call.id] = call.cached_tokens

        def arrived(self, call: Call) -> None:
            self.floor.send(
                call, call.home if call.home >= 0 else call.step_number % len(self.floor.engines)
            )

    result = play([plan()], fleet(3), Home(), OPTIONS)
    check(result)
    ended = log_of(result, "end")
    asked = log_of(result, "ask")
    sent = {line.split()[2]: int(line.split()[3]) for line in result.log if " send " in line}
    assert sent == {"w4-0": 0, "w4-1": 1, "w4-2": 2, "w4-3": 1, "w4-4": 0}
    # On its own engine each finds what its own call before has left: 800 and 992 tokens in whole blocks.
    assert result.cached_tokens == 800 + 992
    assert ended["w4-3"] - asked["w4-3"] == pytest.approx(SLOW_MS[1], abs=LOG_MS)
    assert ended["w4-4"] - asked["w4-4"] == pytest.approx(LAST_MS, abs=LOG_MS)
    # And on one engine nobody finds what another has left.
    together = Home()
    check(play([plan()], fleet(1), together, OPTIONS))
    assert together.found == {"w4-0": 0, "w4-1": 0, "w4-2": 0, "w4-3": 800, "w4-4": 992}
    # The parent's own context begins with a shared prefix; branches share another, of their kind.
    shared = replace(plan(), prefix="tools", prefix_tokens=1_000)
    step, last = shared.steps
    kin = tuple(replace(branch, prefix_tokens=320) for branch in step.branches)
    kin = tuple(
        replace(each, steps=(replace(each.steps[0], new_tokens=each.steps[0].new_tokens - 320,
                                     reusable_tokens=320), *each.steps[1:]))
        for each in kin
    )  # fmt: skip
    shared = replace(shared, steps=(replace(step, branches=kin), last))
    other = replace(shared, number=5, arrival_s=50.0)
    home = Home()
    check(play([shared, other], fleet(1), home, OPTIONS))
    # Whoever comes first computes it, its sister and the next workflow's branches find it.
    found = [home.found[f"w{number}-{call}"] for number in (4, 5) for call in (1, 2)]
    assert found == [0, 320, 320, 320]


def test_a_refused_branch_ends_its_workflow_once_and_takes_the_others_with_it() -> None:
    strategy = Spread(refuses="w4-2")
    result = play([plan()], fleet(5), strategy, OPTIONS)
    check(result)
    assert strategy.fates == [Fate.REFUSED_LATER]
    # Its sister was on an engine, computing its prompt, and is cancelled: that step ends, and is its last.
    assert strategy.gone == ["w4-1"]
    assert "w4-3" not in log_of(result, "ask")
    busy_ms = FIRST_MS + alone_ms(800, 0, 1)
    assert result.busy_usd == pytest.approx(busy_ms * USD_PER_MS, rel=1e-9)
    wasted_usd = result.wasted_usd[Waste.REFUSED_LATER_STEP]
    assert wasted_usd == pytest.approx(FIRST_MS * USD_PER_MS, rel=1e-9)
    assert result.refusals_final == 1
    assert result.late_kill_ratio == 1.0


def test_an_engine_that_dies_with_a_branch_ends_the_workflow_once_or_not_at_all() -> None:
    many = tuple(Branch((Step(900, 0, 400),)) for _ in range(4))
    wide = plan(steps=(Step(1_000, 0, 5, 0.0, many), Step(512, 1_000, 2)))
    death = (EngineDeath(at_s=2.0, engine=0),)

    class OnOne(Spread):
        name = "one"

        def arrived(self, call: Call) -> None:
            self.floor.send(call, 1 if call.step_number in (0, 4, 5) else 0)

    fatal = OnOne(sends_again=False)
    result = play([wide], fleet(2), fatal, replace(OPTIONS, faults=death))
    check(result)
    # Three died and were refused for good; the fourth ran elsewhere and was hung up on.
    assert fatal.fates == [Fate.REFUSED_LATER]
    assert fatal.gone == ["w4-4"]
    assert result.wasted_usd[Waste.RETRIES] > 0.0
    survived = OnOne()
    result = play([wide], fleet(2), survived, replace(OPTIONS, faults=death))
    check(result)
    assert survived.fates == [Fate.SUCCEEDED]
    # The live code places them again within its budgets, and leaks nothing.
    headway = play([wide], fleet(2), Headway(), replace(OPTIONS, faults=death))
    check(headway)


def test_at_the_deadline_all_branches_are_gone_and_the_workflow_is_late_once() -> None:
    strategy = Spread()
    result = play(
        [plan(deadline_s=(FIRST_MS + QUICK_MS) / 1e3 + 0.05)], fleet(5), strategy, OPTIONS
    )
    check(result)
    assert strategy.fates == [Fate.LATE]
    assert strategy.gone == ["w4-1"]
    assert set(log_of(result, "end")) == {"w4-0", "w4-2"}


class Asked(Headway):
    """Keeps what the live core is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.refused: list[str] = []

    def _request(self, call: Call) -> Request:
        request = super()._request(call)
        self.requests.append(request)
        return request

    def _answer(self, job, refuse) -> None:
        self.refused.append(refuse.reason)
        super()._answer(job, refuse)


def test_the_live_core_sees_how_many_calls_run_and_its_limit_holds() -> None:
    def wide(number: int, branches: int) -> Plan:
        each = tuple(Branch((Step(400, 0, 60),)) for _ in range(branches))
        steps = (Step(500, 0, 5, 1.0, each), Step(400, 500, 2))
        return plan(number=number, steps=steps, arrival_s=1.0 + 15.0 * number)

    asked = Asked()
    result = play([wide(number, 3) for number in range(10)], fleet(2), asked, OPTIONS)
    check(result)
    assert asked.refused == []
    assert [each.calls_in_flight for each in asked.requests] == [0, 0, 1, 2, 0] * 10
    assert [each.step for each in asked.requests] == [0, 1, 2, 3, 4] * 10
    assert [each.is_begun for each in asked.requests] == [False, True, True, True, True] * 10
    # What is learned counts the calls of branches: of the first few by the world, then by the live code.
    assert asked.requests[10].steps_expected == asked.requests[-5].steps_expected == 5
    limit = asked.requests[0].fan_out_max
    too_wide = Asked()
    result = play([wide(0, limit + 1)], fleet(2), too_wide, OPTIONS)
    check(result)
    assert "fan_out_exceeded" in too_wide.refused
    assert max(each.calls_in_flight for each in too_wide.requests) >= limit


def test_a_deadline_is_measured_on_the_longest_way_and_load_on_all_work() -> None:
    ours = plan()
    first, last = ours.steps
    slow, quick = first.branches
    in_a_row = replace(ours, steps=(replace(first, branches=()), *slow.steps, last))
    # Only the pauses differ: the parent's comes after the join.
    assert isolated_s(ours, SPEC) == pytest.approx(isolated_s(in_a_row, SPEC), rel=1e-12)
    beside = replace(ours, steps=quick.steps)
    work_s = engine_work_s(in_a_row, SPEC) + engine_work_s(beside, SPEC)
    assert engine_work_s(ours, SPEC) == pytest.approx(work_s, rel=1e-12)
    assert ours.calls == len(list(all_steps(ours.steps))) == 5


def test_the_workload_has_the_recorded_quantiles_and_is_played_without_a_leak() -> None:
    load = workload("subagents")
    plans = draw_plans(load, seed=1, rate_per_s=1.0, horizon_s=4_000.0)
    widths = [len(step.branches) for each in plans for step in each.steps if step.branches]
    hands_out = [each for each in plans if any(step.branches for step in each.steps)]
    branches = [branch for each in hands_out for step in each.steps for branch in step.branches]
    assert len(hands_out) / len(plans) == pytest.approx(18 / 110, abs=0.02)
    assert sum(widths) / len(widths) == pytest.approx(38 / 23, rel=0.08)
    calls = sorted(len(branch.steps) for branch in branches)
    assert calls[len(calls) // 2] == pytest.approx(11, abs=1)
    assert calls[int(0.9 * len(calls))] == pytest.approx(16, abs=1)
    assert all(not each.steps[-1].branches for each in plans)
    spec = named_fleet("homogeneous")
    some = draw_plans(load, seed=3, rate_per_s=0.9 * capacity_per_s(load, spec), horizon_s=240.0)
    played = replace(OPTIONS, horizon_s=240.0)
    first, again = (play(some, spec, Headway(), played) for _ in range(2))
    check(first)
    assert first.digest == again.digest
    assert first.total.succeeded > 0


def test_agents_of_a_trace_are_branches_of_the_step_in_whose_pause_they_ran(tmp_path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(
        "trace_id,agent,t_s,input_tokens,output_tokens,reusable_prefix_tokens,api_time_s,input_types\n"
        "a,main,0,20000,10,0,2,text\n"
        "a,main,12,20500,20,19968,3,tool_result\n"
        "a,main,90,21000,30,20480,1,tool_result\n"
        # As it was, in the second pause; and told as of its end, 60 s long, in the same one.
        "a,agent_001:Explore,20,10000,100,0,4,text\n"
        "a,agent_001:Explore,30,12500,3000,9984,10,tool_result\n"
        "a,agent_002:Explore,80,9980,2900,9700,60,text\n"
        "b,agent_001,0,9980,50,0,1,text\n",
        encoding="utf-8",
    )
    bodies = {each.steps for each in draw_plans(
        workload(str(path)), seed=1, rate_per_s=1.0, horizon_s=50.0)}  # fmt: skip
    # Without a parent an agent is a task of its own.
    assert sorted(len(steps) for steps in bodies) == [1, 3]
    (three,) = [steps for steps in bodies if len(steps) == 3]
    assert [len(step.branches) for step in three] == [0, 2, 0]
    first, second = three[1].branches
    assert [step.completion_tokens for step in first.steps] == [100, 3_000]
    assert first.steps[0].prompt_tokens == 10_000
    assert first.steps[1].new_tokens == 12_500 - 9_984
    assert first.steps[0].gap_s == pytest.approx(6.0)
    assert (len(second.steps), second.kind) == (1, "Explore")
    # They ended at 40 and 80 s; the parent went on at 90.
    assert three[1].gap_s == pytest.approx(10.0)


@pytest.mark.skipif(not TRACES, reason="HEADWAY_TRACES names no folder of traces")
def test_recorded_sub_agents_are_all_found() -> None:
    """38 of 425 calls in 18 tasks, handed out 23 times: what the generator is fitted to."""
    path = Path(TRACES) / "agent_coding_steps.csv.gz"
    if not path.is_file():
        pytest.skip("no coding steps there")
    load, random = workload(str(path)), Random(1)
    bodies = {body.steps: body for body in (load.draw(random) for _ in range(80_000))}
    hands_out = [steps for steps in bodies if any(step.branches for step in steps)]
    widths = Counter(len(step.branches) for steps in hands_out for step in steps if step.branches)
    calls = sum(len(list(all_steps(steps))) - len(steps) for steps in hands_out)
    assert (len(hands_out), calls, widths) == (18, 425, {1: 14, 2: 4, 3: 4, 4: 1})


def test_plans_without_branches_are_played_as_ever() -> None:
    steps = (Step(1_000, 0, 11, 2.0), Step(504, 1_000, 7, 5.0), Step(300, 1_504, 3))
    plans = [plan(number=number, arrival_s=0.3 * number, steps=steps) for number in range(40)]
    result = play(plans, fleet(2), Spread(refuses="w7-1"), OPTIONS)
    check(result)
    assert result.total.fates == {Fate.SUCCEEDED: 39, Fate.REFUSED_LATER: 1}
    # Of a world in which a workflow could have one call at a time only.
    assert result.digest == "3b4bb39402d803c529931219d2fa53129b313f13f696ae8b42677bf75f5cdb2e"
