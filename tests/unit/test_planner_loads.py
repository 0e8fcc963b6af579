"""What capacity is planned for: counts less their deviation, a need that falls, sizes that are remembered."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName
from controlplane.runtime.demand import USUAL_WORKFLOWS_MAX, Sizes, Slot, mixed, remembered
from controlplane.scheduler.planner.loads import options_of, planned_arrivals, surely
from controlplane.scheduler.planner.problem import Held, Limits, Problem
from controlplane.store.demand import ClassKey
from tests.planner_builders import demand, pool, shape

NOW_S = 1_790_000_000.0
STILL = Limits(hold_above_ratio=0.0, hold_below_ratio=0.0)


def _planned(now_s: float, rates: dict[str, float], held: tuple[Held, ...]) -> tuple[Held, ...]:
    """At their means: a floor of one half."""
    work = tuple(demand(per_s, class_id=name) for name, per_s in rates.items())
    problem = Problem(
        now_s=now_s, demands=work, pools=(pool("a", 10.0),), shapes=(shape("a", 1, more=99),),
        nodes=(), held=held, limits=STILL,
    )  # fmt: skip
    return planned_arrivals(problem, tuple(options_of(problem, one) for one in work))


def test_a_count_is_taken_less_its_deviation_where_it_exceeds_the_forecast():
    # 100 a second over a second at four times Poisson's variance: 100 give or take 20.
    assert surely(100.0, 4.0, 1.0) == pytest.approx(80.0)
    assert surely(100.0, 4.0, 0.0) == 100.0
    assert surely(0.01, 50.0, 60.0) == 0.0
    work = demand(0.0, arrivals_per_s_now=100.0, arrivals_per_s_forecast=85.0, arrivals_seen_s=1.0)
    problem = Problem(now_s=NOW_S, demands=(work,), pools=(pool("a", 10.0),), shapes=(), nodes=())
    for dispersion, mean in ((1.0, 90.0), (4.0, 85.0)):
        one = replace(work, dispersion_ratio=dispersion)
        (held,) = planned_arrivals(replace(problem, demands=(one,)), (options_of(problem, one),))
        assert held.mean_per_s == pytest.approx(mean)


def test_a_lower_need_frees_nothing_for_ten_minutes_and_then_all_but_the_most_of_that_time():
    held = _planned(NOW_S, {"x": 60.0, "y": 40.0}, ())
    needs = {0: (50.0, 40.0), 200: (45.0, 50.0), 400: (40.0, 40.0), 599: (40.0, 40.0)}
    for after_s, (x, y) in needs.items():
        held = _planned(NOW_S + 10.0 + after_s, {"x": x, "y": y}, held)
        assert sum(one.arrivals_per_s for one in held) == pytest.approx(100.0)
        # What is held is shared as the work is now.
        assert held[0].arrivals_per_s / held[1].arrivals_per_s == pytest.approx(x / y)
    held = _planned(NOW_S + 610.0, {"x": 40.0, "y": 40.0}, held)
    assert sum(one.arrivals_per_s for one in held) == pytest.approx(95.0)
    # More is followed at once; so is what is far less.
    held = _planned(NOW_S + 620.0, {"x": 70.0, "y": 40.0}, held)
    assert sum(one.arrivals_per_s for one in held) == pytest.approx(110.0)
    held = _planned(NOW_S + 630.0, {"x": 30.0, "y": 40.0}, held)
    assert sum(one.arrivals_per_s for one in held) == pytest.approx(70.0)


def test_what_a_class_needs_is_a_mean_over_its_last_workflows():
    needs = Sizes(
        steps=2.0, uncached_tokens=10.0, context_tokens=100.0, completion_tokens=50.0, gap_s=1.0, deadline_s=60.0,
    )  # fmt: skip
    slot = Slot(
        key=ClassKey(model=ModelName("m"), tenant_class="gold", scope=Scope.CHAT),
        slo_class="standard",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        workflows=30.0,
        needs=needs,
    )
    first = remembered(None, slot)
    second = remembered(first, replace(slot, workflows=10.0, needs=replace(needs, steps=6.0)))
    assert (second.needs.steps, second.workflows) == (pytest.approx(3.0), 40.0)
    # A slot as large as the memory leaves nothing of what was before.
    third = remembered(
        second, replace(slot, workflows=USUAL_WORKFLOWS_MAX, needs=replace(needs, steps=9.0))
    )
    assert (third.needs.steps, third.workflows) == (9.0, USUAL_WORKFLOWS_MAX)
    assert mixed(needs, 10.0, replace(needs, steps=8.0), 0.0) == needs
