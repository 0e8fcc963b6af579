"""Generators against the published statistics, traces against theirs, deadlines against their definition."""

import gzip
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from cli.failure import CommandFailure
from cli.simulate.bounds import gaps_s, isolated_s
from cli.simulate.deadlines import SLACKS, Deadlines
from cli.simulate.fleets import REFERENCE, fleet, sized
from cli.simulate.workloads import (
    CONTEXT_TOKENS_MAX,
    TENANT_CLASSES,
    capacity_per_s,
    draw_plans,
    tenant_shares,
    workload,
)

TRACES = os.environ.get("HEADWAY_TRACES", "")
NAMES = ["coding", "chat", "bounded", "mix"]


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def plans(name, **changes):
    wanted = {"seed": 1, "rate_per_s": 1.0, "horizon_s": 4_000.0} | changes
    return draw_plans(workload(name), **wanted)


def test_coding_has_the_published_quantiles():
    drawn = plans("coding")
    steps = [step for plan in drawn for step in plan.steps]
    later = [step.new_tokens for plan in drawn for step in plan.steps[1:]]
    assert quantile([len(plan.steps) for plan in drawn], 0.5) == 2
    assert quantile([len(plan.steps) for plan in drawn], 0.9) == pytest.approx(17, rel=0.15)
    assert fmean(len(plan.steps) for plan in drawn) == pytest.approx(6.76, rel=0.2)
    assert quantile([step.completion_tokens for step in steps], 0.5) == pytest.approx(216, rel=0.1)
    assert quantile([step.completion_tokens for step in steps], 0.9) == pytest.approx(898, rel=0.1)
    # Published: 646 tokens of growth, 727 of them uncached; an answer is part of what is added.
    assert 600 < quantile(later, 0.5) < 1_100
    assert quantile([step.gap_s for step in steps], 0.5) == pytest.approx(9, rel=0.1)
    assert quantile([step.gap_s for step in steps], 0.9) == pytest.approx(74, rel=0.15)


def test_chat_and_bounded_have_the_published_quantiles():
    chats = plans("chat")
    longer = [len(plan.steps) for plan in chats if len(plan.steps) > 1]
    firsts = [plan.steps[0].prompt_tokens for plan in chats]
    assert len(longer) / len(chats) == pytest.approx(0.244, abs=0.03)
    assert fmean(longer) == pytest.approx(2.97, rel=0.1)
    assert quantile(firsts, 0.5) == pytest.approx(6_909, rel=0.1)
    assert fmean(firsts) == pytest.approx(12_035, rel=0.15)
    agents = plans("bounded")
    assert quantile([len(plan.steps) for plan in agents], 0.5) == pytest.approx(30, rel=0.2)
    good = fmean(plan.is_good for plan in agents)
    assert good == pytest.approx(fmean((0.650, 0.648, 0.706)), abs=0.03)
    assert good == pytest.approx(fmean(plan.good_ratio for plan in agents), abs=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_repeatable_ordered_and_coherent(name):
    drawn = plans(name, horizon_s=800.0)
    assert drawn == plans(name, horizon_s=800.0)
    assert drawn != plans(name, horizon_s=800.0, seed=2)
    assert [plan.number for plan in drawn] == list(range(len(drawn)))
    assert [plan.arrival_s for plan in drawn] == sorted(plan.arrival_s for plan in drawn)
    assert len(drawn) == pytest.approx(800, abs=24)
    for plan in drawn:
        assert 0.0 <= plan.arrival_s <= 800.0
        assert plan.steps[0].reusable_tokens == plan.prefix_tokens
        for before, after in zip(plan.steps, plan.steps[1:], strict=False):
            # The context before it, whole, or what an agent kept of it.
            assert after.reusable_tokens in {before.prompt_tokens, plan.prefix_tokens}
            assert after.new_tokens > 0
        assert max(step.prompt_tokens for step in plan.steps) <= CONTEXT_TOKENS_MAX


def test_tenants_skew_as_published_and_shares_follow():
    shares = sorted(tenant_shares().values(), reverse=True)
    assert sum(shares) == pytest.approx(1.0)
    assert (shares[0], sum(shares[:5]), sum(shares[:10])) == (
        pytest.approx(0.30, abs=0.01),
        pytest.approx(0.77, abs=0.01),
        pytest.approx(0.93, abs=0.01),
    )
    drawn = plans("coding")
    first = sum(plan.tenant == "tenant-00" for plan in drawn) / len(drawn)
    assert first == pytest.approx(shares[0], abs=0.001)


def test_deadlines_change_nothing_else_and_are_what_they_say():
    own, blurred, by_class = (
        plans("coding", deadlines=deadlines, horizon_s=600.0)
        for deadlines in (Deadlines.OWN, Deadlines.BLURRED, Deadlines.CLASS)
    )
    assert [replace(plan, deadline_s=None) for plan in own] == [
        replace(plan, deadline_s=None) for plan in blurred
    ]
    slack = {priority: SLACKS[level] for level, (_, priority, _) in enumerate(TENANT_CLASSES)}
    for plan in own:
        assert plan.deadline_s == pytest.approx(slack[plan.priority] * isolated_s(plan, REFERENCE))
    assert len({(plan.priority, plan.deadline_s) for plan in by_class}) == len(SLACKS)
    blurs = [math.log(b.deadline_s / a.deadline_s) for a, b in zip(own, blurred, strict=True)]
    assert fmean(blurs) == pytest.approx(0.0, abs=0.1)
    assert math.sqrt(fmean(blur**2 for blur in blurs)) == pytest.approx(0.8, rel=0.1)


def test_people_take_their_own_time_in_a_chat():
    for plan in plans("chat", horizon_s=300.0):
        people_s = gaps_s(plan)
        slack = (plan.deadline_s - people_s) / (isolated_s(plan, REFERENCE) - people_s)
        assert min(abs(slack - each) for each in SLACKS) < 1e-6


def test_a_rate_that_changes_brings_workflows_when_it_is_high():
    drawn = plans("coding", rate_per_s=lambda at_s: 2.0 if at_s < 1_000 else 0.5, horizon_s=2_000.0)
    early = sum(plan.arrival_s < 1_000 for plan in drawn)
    assert len(drawn) == pytest.approx(2_500, abs=24)
    assert early / len(drawn) == pytest.approx(0.8, abs=0.03)


def test_capacity_grows_with_the_fleet_and_falls_with_slow_engines():
    load = workload("coding")
    one, two = (capacity_per_s(load, sized(fleet("homogeneous"), count)) for count in (1, 2))
    assert two == pytest.approx(2 * one)
    slow = sized(fleet("homogeneous"), 1)
    slow = replace(slow, engines=(replace(slow.engines[0], slowness_ratio=2.0),))
    assert capacity_per_s(load, slow) == pytest.approx(one / 2)


# ------------------------------------------------------------ traces


def test_a_conversation_is_chained_by_its_blocks_and_its_times_are_spread(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
        {"timestamp": 30_000, "input_length": 700, "output_length": 7, "hash_ids": [1, 8]},
        {"timestamp": 60_000, "input_length": 1_700, "output_length": 6, "hash_ids": [1, 2, 4, 5]},
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    sessions = [arrival.body.steps for arrival in workload(str(path)).replay]
    # That two begin with everybody's first block does not make them one.
    assert sorted(len(steps) for steps in sessions) == [1, 1, 2]
    (two,) = [steps for steps in sessions if len(steps) == 2]
    assert two[1].reusable_tokens == 1_024
    assert two[1].new_tokens == 1_700 - 1_024
    assert two[0].gap_s == pytest.approx(60.0, abs=3.0)
    assert len({arrival.at_s for arrival in workload(str(path)).replay}) == 3


def test_steps_are_cut_into_tasks_where_people_speak(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(
        "trace_id,agent,t_s,input_tokens,output_tokens,reusable_prefix_tokens,api_time_s,input_types\n"
        "a,main,0,20000,10,0,2,text\n"
        "a,main,12,20500,20,19968,3,tool_result\n"
        "a,main,90,21000,30,20480,1,text\n",
        encoding="utf-8",
    )
    load = workload(str(path))
    bodies = {plan.steps for plan in draw_plans(load, seed=1, rate_per_s=1.0, horizon_s=50.0)}
    assert sorted(len(steps) for steps in bodies) == [1, 2]
    (two,) = [steps for steps in bodies if len(steps) == 2]
    assert two[0].gap_s == pytest.approx(10.0)
    assert (two[1].new_tokens, two[1].reusable_tokens) == (532, two[0].prompt_tokens)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "{]", '{"timestamp": 1}'])
def test_what_is_no_trace_says_so(tmp_path, text):
    path = tmp_path / "broken"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CommandFailure, match="not a trace"):
        workload(str(path))
    with pytest.raises(CommandFailure, match="no workload is called"):
        workload(str(tmp_path / "missing"))


@pytest.mark.skipif(not TRACES, reason="HEADWAY_TRACES names no folder of traces")
def test_recorded_conversations_chain_as_published():
    """8,124 sessions, 1,981 of them of several turns with 2.97 in the mean."""
    path = Path(TRACES) / "mooncake_conversation.jsonl.gz"
    if not path.is_file():
        pytest.skip("no conversations there")
    lengths = [len(arrival.body.steps) for arrival in workload(str(path)).replay]
    longer = [length for length in lengths if length > 1]
    assert sum(lengths) == 12_031
    assert len(lengths) == pytest.approx(8_124, rel=0.02)
    assert len(longer) == pytest.approx(1_981, rel=0.03)
    assert fmean(longer) == pytest.approx(2.97, rel=0.03)


@pytest.mark.skipif(not TRACES, reason="HEADWAY_TRACES names no folder of traces")
def test_the_generator_is_like_the_recorded_tasks():
    path = Path(TRACES) / "agent_coding_steps.csv.gz"
    if not path.is_file():
        pytest.skip("no coding steps there")
    recorded = draw_plans(workload(str(path)), seed=1, rate_per_s=1.0, horizon_s=4_000.0)
    drawn = plans("coding")
    for measure in (
        lambda plan: [len(plan.steps)],
        lambda plan: [step.completion_tokens for step in plan.steps],
        lambda plan: [step.gap_s for step in plan.steps[:-1]],
    ):
        own = [value for plan in drawn for value in measure(plan)]
        real = [value for plan in recorded for value in measure(plan)]
        assert quantile(own, 0.5) == pytest.approx(quantile(real, 0.5), rel=0.15)
        assert quantile(own, 0.9) == pytest.approx(quantile(real, 0.9), rel=0.35)
