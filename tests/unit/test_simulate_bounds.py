"""Bounds bound: the closed form against drawn schedules, L1 >= L2 >= every policy in the real world."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.simulate.baselines import FAMILIES
from cli.simulate.baselines.sticky import StickyFcfs
from cli.simulate.bounds import _Needs as Needs
from cli.simulate.bounds import clairvoyant, fluid, fluid_fleet, isolated_s
from cli.simulate.contracts import Plan, Step, WorldOptions
from cli.simulate.fleets import A100, REFERENCE, fleet, sized
from cli.simulate.workloads import draw_plans, workload
from cli.simulate.world import play

ONE = sized(fleet("homogeneous"), 1)
MIXED = replace(
    ONE,
    name="two kinds",
    engines=(ONE.engines[0], replace(ONE.engines[0], name="a", node="a", gpu=A100)),
)


@given(
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6),
    st.floats(0.5, 3.0),
    st.floats(0.0, 20.0),
    st.randoms(use_true_random=False),
)
def test_no_split_of_the_slack_is_charged_less_than_the_closed_form(weights, base, more, random):
    """A step that lasts base + u charges w (base + u) / u. Whatever the u are that fit the deadline."""
    slack = sum(weights) + more
    roots = sum(math.sqrt(weight) for weight in weights)
    least = Needs(sum(weights), roots, base * len(weights), 0.0, base).charged_s(slack)
    # Away from zero: quotients of the least floats there are do not add up.
    cuts = [1e-6 + random.random() for _ in weights]
    spare = [more * cut / sum(cuts) for cut in cuts]
    drawn = sum(
        weight * (base + weight + extra) / (weight + extra)
        for weight, extra in zip(weights, spare, strict=True)
    )
    assert least <= drawn * (1 + 1e-9)
    # And the best split reaches it, where it may: u in proportion to the roots.
    best = [slack * math.sqrt(weight) / roots for weight in weights]
    reached = sum(weight * (base + u) / u for weight, u in zip(weights, best, strict=True))
    assert least == pytest.approx(reached)


def plan(number=0, **changes):
    steps = (
        Step(new_tokens=4_000, reusable_tokens=0, completion_tokens=200, gap_s=3.0),
        Step(new_tokens=900, reusable_tokens=4_000, completion_tokens=300, gap_s=9.0),
    )
    fields = {
        "number": number,
        "tenant": "t",
        "workflow_class": "c",
        "arrival_s": 0.0,
        "steps": steps,
    }
    return Plan(**(fields | {"deadline_s": 1_000.0} | changes))


def test_the_isolated_time_is_what_the_world_takes():
    """Less what attention of the prompt adds, which the bound may leave out."""
    result = play([plan()], ONE, StickyFcfs(), WorldOptions(seed=1, horizon_s=100.0))
    taken_s = (2 * result.e2e.mean_ms) / 1_000 + 3.0
    assert isolated_s(plan(), REFERENCE) <= taken_s
    assert isolated_s(plan(), REFERENCE) == pytest.approx(taken_s, rel=0.01)


@pytest.mark.parametrize("fleet_spec", [ONE, MIXED], ids=["one", "mixed"])
@pytest.mark.parametrize(("name", "rate_per_s", "count"), [("coding", 0.5, 40), ("chat", 3.0, 60)])
def test_no_policy_beats_the_clairvoyant_bound_nor_that_the_fluid_one(
    fleet_spec, name, rate_per_s, count
):
    plans = draw_plans(workload(name), seed=5, rate_per_s=rate_per_s, horizon_s=count / rate_per_s)
    tight = [replace(each, deadline_s=0.7 * each.deadline_s) for each in plans]
    span_s = max(each.arrival_s + each.deadline_s for each in tight) - tight[0].arrival_s
    first = fluid(tight, fleet_spec, horizon_s=span_s, billed_s=span_s)
    second = clairvoyant(tight, fleet_spec, horizon_s=span_s, billed_s=span_s, solve_s_max=5.0)
    assert second.successes <= first.successes + 1e-6
    assert first.successes <= len(tight)
    for family in FAMILIES:
        config = family.configs[0]
        result = play(
            tight, config.fitted(fleet_spec), config.make(), WorldOptions(seed=5, horizon_s=span_s)
        )
        assert result.expected_successes <= second.successes + 1e-6, family.name


def test_the_fluid_bound_binds_under_overload_and_grows_with_the_fleet():
    plans = draw_plans(workload("bounded"), seed=3, rate_per_s=1.0, horizon_s=200.0)
    plans = [replace(each, deadline_s=1.2 * isolated_s(each, REFERENCE)) for each in plans]
    span_s = 200.0 + max(each.deadline_s for each in plans)
    sizes = [
        fluid(plans, sized(ONE, engines), horizon_s=span_s, billed_s=span_s).successes
        for engines in (1, 2, 4)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.8 * sum(each.good_ratio for each in plans)


def test_work_that_is_due_soon_is_bounded_by_the_time_until_then():
    """A crowd that wants 2,000 tokens computed within three seconds, and one latecomer with all the time."""
    prompt = (Step(new_tokens=2_000, reusable_tokens=0, completion_tokens=1),)
    crowd = [plan(number, steps=prompt, deadline_s=3.0) for number in range(100)]
    late = plan(100, steps=prompt, arrival_s=2_000.0, deadline_s=2_000.0)
    plans = [*crowd, late]
    first = fluid(plans, ONE, horizon_s=4_000.0, billed_s=4_000.0).successes
    second = clairvoyant(plans, ONE, horizon_s=4_000.0, billed_s=4_000.0).successes
    played = play(plans, ONE, StickyFcfs(), WorldOptions(seed=1, horizon_s=4_000.0))
    assert 20 < played.expected_successes <= second <= first + 1e-6
    assert first <= 1.25 * played.expected_successes + 1


def test_the_free_fleet_holds_its_floor_and_no_smaller_one_does():
    plans = draw_plans(workload("coding"), seed=3, rate_per_s=0.4, horizon_s=400.0)
    span_s = 400.0 + max(each.deadline_s for each in plans)
    free = fluid_fleet(plans, ONE, horizon_s=span_s, billed_s=span_s, success_ratio_min=0.95)
    (engines,) = free.engines.values()
    floor = 0.95 * len(plans)
    assert free.successes == pytest.approx(floor, rel=1e-6)
    assert free.fleet_usd == pytest.approx(engines * ONE.usd_per_hour * span_s / 3_600, rel=1e-6)
    whole = math.ceil(engines)
    enough = fluid(plans, sized(ONE, whole), horizon_s=span_s, billed_s=span_s)
    assert enough.successes >= floor - 1e-6
    if whole > 1:
        less = fluid(plans, sized(ONE, whole - 1), horizon_s=span_s, billed_s=span_s)
        assert less.successes < floor


def test_a_deadline_that_nothing_can_meet_is_no_success():
    hopeless = plan(deadline_s=0.5)
    bound = fluid([hopeless], ONE, horizon_s=100.0, billed_s=100.0)
    assert bound.successes == pytest.approx(0.0)
    assert clairvoyant([hopeless], ONE, horizon_s=100.0, billed_s=100.0).successes == pytest.approx(
        0.0
    )
