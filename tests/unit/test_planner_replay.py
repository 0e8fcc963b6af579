"""Replays whose course can be followed by hand, and the stretch that they lead to."""

from dataclasses import replace

import pytest

from controlplane.domain.ids import ModelName
from controlplane.scheduler.planner.problem import Problem, RecentWorkflow, Stretch
from controlplane.scheduler.planner.replay_bound import best_stretches, replay
from tests.planner_builders import demand, engine, node, pool, shape

# A step takes 10 ms, and 10 ms more for each call; a prompt takes 100 ms.
ENGINE = replace(
    pool("a", 10.0), decode_ms_base=10.0, decode_ms_per_seq=10.0, kv_tokens_capacity=1_000
)


def flow(arrival_s: float = 0.0, **facts: object) -> RecentWorkflow:
    base = RecentWorkflow(
        model=ModelName("m"), arrival_s=arrival_s, steps=1, uncached_tokens=0.0,
        context_tokens=1.0, completion_tokens=10.0, gap_s=0.0, deadline_s=None, value=1.0,
    )  # fmt: skip
    return replace(base, **facts)  # type: ignore[arg-type]


def test_one_call_alone_takes_its_prompt_and_its_steps() -> None:
    assert replay([ENGINE], [flow()], 5.0, 5.0).finish_s_mean == pytest.approx(0.1 + 10 * 0.020)
    # Three steps with a second between them.
    three = replay([ENGINE], [flow(steps=3, gap_s=1.0)], 5.0, 5.0)
    assert three.finish_s_mean == pytest.approx(3 * 0.3 + 2 * 1.0)


def test_two_calls_share_steps_and_wait_for_each_others_prompts() -> None:
    # Both prompts take 200 ms, then ten steps of 30 ms end both.
    both = replay([ENGINE], [flow(), flow()], 5.0, 5.0)
    assert both.finish_s_mean == pytest.approx(0.2 + 10 * 0.030)
    # The second comes after five tokens of the first, which wait for its prompt.
    later = replay([ENGINE], [flow(), flow(0.2)], 5.0, 5.0)
    first = 0.2 + 0.1 + 5 * 0.030
    # The other has five tokens more to go, alone.
    second = first + 5 * 0.020
    assert later.finish_s_mean == pytest.approx((first + second - 0.2) / 2)


def test_the_bound_keeps_calls_waiting_in_the_order_of_their_deadlines() -> None:
    flows = [
        flow(),
        flow(deadline_s=9.0),
        flow(0.005),
        flow(0.01, deadline_s=8.0),
        flow(0.02, deadline_s=1.05),
    ]
    # Two at a time, 500 ms each pair; who has no deadline comes last, alone, for 300 ms.
    bounded = replay([ENGINE], flows, 2.0, 2.0)
    assert (bounded.in_time, bounded.late) == (5, 0)
    assert bounded.finish_s_mean == pytest.approx((0.5 + 0.5 + 0.99 + 0.98 + 1.295) / 5)
    # All at once, 500 ms of prompts and ten steps of 60 ms, the last could only be late: it is dropped.
    open_ = replay([ENGINE], flows, 6.0, 6.0)
    assert (open_.in_time, open_.late) == (4, 1)
    assert open_.finish_s_mean == pytest.approx((4 * 0.9 - 0.015) / 5)
    # With KV for two calls no bound lets more in.
    tight = replace(ENGINE, kv_tokens_capacity=20)
    assert replay([tight], flows, 6.0, 6.0) == bounded


def test_work_that_waits_stays_within_its_own_bound() -> None:
    batch = [flow(is_deferrable=True) for _ in range(4)]
    two = replay([ENGINE], batch, 5.0, 2.0)
    # Two pairs, one after the other.
    assert two.finish_s_mean == pytest.approx((0.5 + 1.0) / 2)
    # Tight work finds room beside two of it, and ends after 700 ms; beside four it would be late.
    tight = [*batch, flow(0.01, deadline_s=0.75)]
    assert replay([ENGINE], tight, 5.0, 2.0).late == 0
    assert replay([ENGINE], tight, 6.0, 5.0).late == 1


def test_what_can_not_be_in_time_is_dropped_at_its_turn_and_costs_nothing() -> None:
    # Its turn comes at 500 ms, and it needs 300 more.
    flows = [flow(), flow(), flow(0.1, deadline_s=0.65), flow(0.2)]
    result = replay([ENGINE], flows, 2.0, 2.0)
    assert (result.in_time, result.late) == (3, 1)
    assert result.finish_s_mean == pytest.approx((0.5 + 0.5 + 0.4 + 0.6) / 4)
    # With a second step and a gap before it even more.
    flows[2] = flow(0.1, deadline_s=1.0, steps=2, gap_s=0.1)
    assert replay([ENGINE], flows, 2.0, 2.0) == result


def _problem(flows: list[RecentWorkflow], stretch: float) -> Problem:
    return Problem(
        now_s=0.0,
        demands=(demand(1.0),),
        pools=(ENGINE,),
        shapes=(shape("a", 1),),
        nodes=(node("n1", "a", engine("e1")),),
        stretches=(Stretch(model=ModelName("m"), ratio=stretch, deferrable_ratio=1.2),),
        recent=tuple(flows),
    )


def test_overload_tightens_the_bound_and_few_workflows_change_nothing() -> None:
    kind = replace(ENGINE, decode_ms_per_seq=1.0, prefill_base_ms=5.0)
    # Ten calls take 2 s for 100 tokens each: five a second. Six come, and half of them have 1.7 s.
    flows = [
        flow(index / 6.0, completion_tokens=100.0, deadline_s=1.7 if index % 2 else 12.0)
        for index in range(200)
    ]
    problem = replace(_problem(flows, 2.5), pools=(kind,))
    (found,) = best_stretches(problem)
    assert found.ratio == 1.5
    assert replay([kind], flows, 1.5, 1.2).in_time > replay([kind], flows, 2.5, 1.2).in_time
    few = replace(problem, recent=tuple(flows[:20]))
    assert best_stretches(few) == few.stretches
    # Where all are in time the standing one stays.
    easy = replace(
        problem, recent=tuple(replace(one, arrival_s=one.arrival_s * 2) for one in flows)
    )
    assert best_stretches(easy) == easy.stretches
