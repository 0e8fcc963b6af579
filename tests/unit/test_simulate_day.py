"""A day: its curve against its own integral, Kubernetes' formula by hand, bills that add up, work that can wait."""

import json
import math
from dataclasses import replace

import pytest

from cli.simulate.baselines.sticky import StickyFcfs
from cli.simulate.contracts import Condition, FleetSpec, Plan, Step, WorldOptions
from cli.simulate.day.arrivals import (
    BURST_FACTORS,
    DayShape,
    day_curve,
    draw_day,
    usual_mean_ratio,
    usual_ratio,
)
from cli.simulate.day.bought import day_bill, plan_of
from cli.simulate.day.experiment import DayRunner, DayWanted, Way, day
from cli.simulate.day.planned import Planned, learned_before
from cli.simulate.day.reactive import Greedy, Hpa, hpa_desired
from cli.simulate.day.scaling import WAIT_S_MIN, Scaled, Seen, Simple, Wish
from cli.simulate.fleets import REFERENCE, fleet, sized
from cli.simulate.report import render
from cli.simulate.stats import interpolated, paired_floor_ratio
from cli.simulate.workloads import workload
from cli.simulate.world import play
from controlplane.scheduler.planner.forecast import forecast
from controlplane.scheduler.planner.procure import SPOT_RATIO_MAX, Term

CALM = DayShape(peak_per_s=0.4, level_sigma=0.0, drift_sigma=0.0, bursts_per_day=0)


# ------------------------------------------------------------ the curve


def test_the_curve_has_two_humps_a_peak_over_trough_of_four_and_the_integral_that_is_told():
    day_ = day_curve(CALM, 1)
    lead = round(CALM.lead_s / 60)
    minutes = day_.per_s[lead : lead + 24 * 60]
    assert max(minutes) == pytest.approx(0.4, rel=1e-4)
    assert max(minutes) / min(minutes) == pytest.approx(4.0, rel=1e-3)
    # A maximum is a minute above both neighbours and well above what lies between it and the next.
    peaks = [
        minute
        for minute in range(1, len(minutes) - 1)
        if minutes[minute - 1] < minutes[minute] >= minutes[minute + 1]
    ]
    assert [round(minute / 60) for minute in peaks] == [10, 16]
    assert min(minutes[peaks[0] : peaks[1]]) < 0.95 * minutes[peaks[0]]
    # Simpson's rule on the usual day, in steps of another width.
    width, count = 24.0 / 480, 480
    total = sum(
        (1 if index in (0, count) else 4 if index % 2 else 2) * usual_ratio(index * width)
        for index in range(count + 1)
    )
    integral_s = total * width / 3.0 * 3_600.0 * 0.4
    assert sum(minutes) * 60.0 == pytest.approx(integral_s, rel=1e-3)
    assert usual_mean_ratio() * 86_400.0 * 0.4 == pytest.approx(integral_s, rel=1e-3)
    # As many workflows come as the curve says.
    drawn = draw_day(workload("chat"), replace(CALM, hours=1.0), 1)
    wanted = sum(drawn.curve.per_s) * 60.0
    assert len(drawn.plans) == pytest.approx(wanted, abs=24)


def test_days_differ_in_level_drift_and_bursts_and_a_shorter_one_keeps_its_form():
    shape = DayShape(peak_per_s=0.4)
    for seed in (1, 2):
        curve = day_curve(shape, seed)
        assert len(curve.bursts) == 6
        for start_s, length_s, factor in curve.bursts:
            assert 240.0 <= length_s <= 600.0
            assert BURST_FACTORS[0] <= factor <= BURST_FACTORS[1]
            # The minute in its middle is that much over one without the burst.
            middle = int((start_s + length_s / 2.0) // 60.0)
            without = day_curve(replace(shape, bursts_per_day=0), seed)
            usual = usual_ratio(shape.hour_at((middle + 0.5) * 60.0)) * 0.4
            assert curve.per_s[middle] / usual > factor * math.exp(-0.6)
            assert without.bursts == ()
    levels = [
        sum(day_curve(replace(CALM, hours=1.0, level_sigma=0.08), seed).per_s)
        for seed in range(100)
    ]
    usual = sum(day_curve(replace(CALM, hours=1.0), 1).per_s)
    logs = [math.log(level / usual) for level in levels]
    assert sum(logs) / 100 == pytest.approx(-0.0032, abs=0.025)
    assert math.sqrt(sum(one**2 for one in logs) / 100) == pytest.approx(0.08, abs=0.02)
    short = replace(CALM, hours=6.0)
    assert short.hour_at(short.lead_s + 1.5 * 3_600.0) == pytest.approx(6.0)
    assert len(day_curve(DayShape(peak_per_s=0.4, hours=6.0), 1).bursts) == 2


# ------------------------------------------------------------ scalers


@pytest.mark.parametrize(
    ("current", "load", "target", "desired"),
    [
        # The documentation's own example: 200m against a target of 100m doubles, 50m halves.
        (1, 200.0, 100.0, 2),
        (4, 200.0, 100.0, 2),
        # Within a tenth of 1 nothing changes; just outside it rounds up.
        (10, 109.0, 10.0, 10),
        (10, 91.0, 10.0, 10),
        (10, 111.0, 10.0, 12),
        (10, 89.0, 10.0, 9),
        (3, 0.0, 8.0, 0),
    ],
)
def test_kubernetes_formula_by_hand(current, load, target, desired):
    assert hpa_desired(current, load, target) == desired


class _View:
    def __init__(self, kv: float, waiting: int, condition: Condition = Condition.SERVING) -> None:
        self.kv_used_ratio = kv
        self.waiting = waiting
        self.condition = condition


def _seen(now_s: float, load: float, there: int, engines=(), waiting: int = 0) -> Seen:
    return Seen(now_s=now_s, load=load, waiting=waiting, there=there, engines=engines)


def test_the_highest_wish_of_the_window_counts_when_it_shrinks():
    hpa = Hpa(10.0, down_s=300.0)
    assert hpa.wants(_seen(0.0, 60.0, 4)).engines == 6
    # At once upwards, but no more than four engines or as many as there are.
    assert hpa.wants(_seen(15.0, 200.0, 2)).engines == 6
    hpa = Hpa(10.0, down_s=300.0)
    assert hpa.wants(_seen(0.0, 60.0, 6)).engines == 6
    assert hpa.wants(_seen(15.0, 40.0, 6)).engines == 6
    assert hpa.wants(_seen(300.0, 20.0, 6)).engines == 6
    assert hpa.wants(_seen(301.0, 20.0, 6)).engines == 4
    assert hpa.wants(_seen(602.0, 20.0, 4)).engines == 2


def test_the_greedy_scaler_by_hand():
    greedy = Greedy(0.8)
    # Spare of .05 is under the trigger of .1; so is a spare queue of 2 under 3.
    assert greedy.wants(_seen(0.0, 0.0, 2, (_View(0.75, 0), _View(0.75, 0)))).engines == 3
    assert greedy.wants(_seen(0.0, 0.0, 2, (_View(0.1, 3), _View(0.1, 3)))).engines == 3
    # One that starts is waited for.
    starting = (_View(0.75, 0), _View(0.75, 0), _View(0.0, 0, Condition.STARTING))
    assert greedy.wants(_seen(0.0, 0.0, 3, starting)).engines == 3
    # Three at .5 are two at .75, which have too little; three at .4 are two at .6, which have enough.
    assert greedy.wants(_seen(0.0, 0.0, 3, (_View(0.5, 0),) * 3)).engines == 3
    assert greedy.wants(_seen(0.0, 0.0, 3, (_View(0.4, 0),) * 3)).engines == 2
    # All full: one more, and never fewer.
    assert greedy.wants(_seen(0.0, 0.0, 1, (_View(0.9, 0),))).engines == 2
    assert greedy.wants(_seen(0.0, 0.0, 1, (_View(0.0, 0),))).engines == 1


class _Script(Simple):
    """Wants what is written for the time."""

    interval_s = 5.0
    smoothing_s = 5.0

    def __init__(self, *wishes: tuple[float, int], first: int = 1) -> None:
        self.wishes = wishes
        self.engines_first = first
        self.leaving: dict[float, int] = {}

    def wants(self, seen: Seen) -> Wish:
        engines, leaving = self.engines_first, ()
        for at_s, wanted in self.wishes:
            if seen.now_s >= at_s:
                engines = wanted
                leaving = (self.leaving[at_s],) if at_s in self.leaving else ()
        return Wish(engines=engines, leaving=leaving)


def _plan(number: int, at_s: float, completion: int, deadline_s: float | None = None) -> Plan:
    return Plan(
        number=number,
        tenant="t",
        workflow_class="chat",
        arrival_s=at_s,
        steps=(Step(new_tokens=1_000, reusable_tokens=0, completion_tokens=completion),),
        deadline_s=deadline_s,
        model=REFERENCE.model.name,
    )


def _fleet(engines: int, on: int, cold_start_s: float) -> FleetSpec:
    specs = sized(fleet("homogeneous"), engines)
    return replace(
        specs,
        engines=tuple(
            replace(spec, is_on=number < on, cold_start_s=cold_start_s)
            for number, spec in enumerate(specs.engines)
        ),
    )


def test_a_cold_start_and_a_drain_are_paid_to_the_second():
    # The second engine is wanted from 10 s to 200 s and loads until 110 s; a call that comes at 150 s
    # finds the first one busy and runs there past the order to stop.
    plans = [_plan(0, 140.0, 4_000), _plan(1, 150.0, 8_000), _plan(2, 390.0, 10)]
    script = _Script((10.0, 2), (200.0, 1))
    script.leaving = {200.0: 1}
    scaled = Scaled(StickyFcfs(), script)
    options = WorldOptions(
        seed=1, horizon_s=400.0, tick_ms=1_000.0, telemetry_age_s=0.5, has_log=True
    )
    result = play(plans, _fleet(2, 1, 100.0), scaled, options)
    ends_s = next(
        float(line.split()[0]) / 1e3 for line in result.log if line.split()[1:3] == ["end", "w1-0"]
    )
    assert ends_s > 205.0
    sent = {
        line.split()[2]: int(line.split()[3]) for line in result.log if line.split()[1] == "send"
    }
    assert (sent["w0-0"], sent["w1-0"]) == (0, 1)
    # 13 dollars an hour: the first engine all the time, the second from the order to its last token.
    paid_s = 400.0 + (ends_s - 10.0)
    assert result.fleet_usd == pytest.approx(paid_s * 13.0 / 3_600.0, rel=1e-9)
    assert result.wasted_usd["cold_start"] == pytest.approx(100.0 * 13.0 / 3_600.0, rel=1e-9)
    total = result.busy_usd + result.wasted_usd["idle"] + result.wasted_usd["cold_start"]
    assert total == pytest.approx(result.fleet_usd)
    assert (result.engine_starts, scaled.engine_stops) == (1, 1)
    assert scaled.most == {0: 3.0}
    assert scaled.in_time == {0: 3.0}


OPTIONS = WorldOptions(seed=1, horizon_s=400.0, tick_ms=1_000.0, telemetry_age_s=0.5)


def test_an_engine_that_was_drained_comes_back_with_an_empty_cache():
    # Steps come at about 0, 61, 122 and 183 s, each with what came before in its prompt.
    steps = tuple(
        Step(new_tokens=2_000, reusable_tokens=2_000 * number, completion_tokens=20, gap_s=60.0)
        for number in range(4)
    )
    plan = replace(_plan(0, 0.0, 1), steps=steps)
    stays = play([plan], _fleet(2, 1, 1.0), Scaled(StickyFcfs(), _Script()), OPTIONS)
    assert stays.cached_tokens == 2_000 * (1 + 2 + 3)
    moves = _Script((5.0, 2), (30.0, 1), (90.0, 2), (150.0, 1))
    moves.leaving = {30.0: 0, 150.0: 1}
    goes = play([plan], _fleet(2, 1, 1.0), Scaled(StickyFcfs(), moves), OPTIONS)
    # The second step finds another engine, the third its context there, the last the first engine again,
    # which has forgotten what it computed.
    assert goes.cached_tokens == 4_000


# ------------------------------------------------------------ the planner


TINY = DayShape(peak_per_s=0.1, hours=1.0, lead_s=300.0, tail_s=60.0)


def test_the_planner_knows_the_usual_day_and_nothing_of_the_one_that_is_played():
    shape = DayShape(peak_per_s=0.4, hours=6.0)
    states = learned_before("chat", REFERENCE.model.name, shape)
    midnight_s = Planned(2.0, shape=shape, before=states)._calendar_s(shape.lead_s)
    ratios = []
    for hour in range(24):
        told = sum(
            forecast(state, midnight_s + hour * 3_600.0).mean_per_s for state in states.values()
        )
        # A calendar that runs four times as fast sees a fourth of the rate.
        ratios.append(told / (0.1 * usual_ratio(hour)))
    # Tenants whose calls come in clumps leave single hours uncertain.
    assert sum(ratios) / 24 == pytest.approx(1.0, abs=0.15)
    assert 0.5 < min(ratios) < max(ratios) < 1.6


def test_the_planner_grows_with_what_comes_and_holds_its_fleet_over_noise():
    shape = replace(TINY, peak_per_s=0.35)
    drawn = draw_day(workload("coding"), shape, 3)
    before = learned_before("coding", REFERENCE.model.name, shape)

    def played(ratio: float):
        planner = Planned(ratio, shape=shape, before=before, engines_first=2)
        scaled = Scaled(StickyFcfs(), planner, shape.lead_s)
        result = play(
            drawn.plans, _fleet(9, 2, 30.0), scaled, replace(OPTIONS, horizon_s=shape.horizon_s)
        )
        return result, planner, scaled

    result, planner, scaled = played(2.0)
    tighter, _, _ = played(1.5)
    on = result.engines_on_by_minute
    night, noon = on[8:18], on[28:50]
    assert sum(noon) / len(noon) > 1.5 * sum(night) / len(night)
    # Filling engines less takes more of them and ends more in time.
    assert tighter.fleet_usd > result.fleet_usd
    assert tighter.expected_successes >= result.expected_successes
    assert planner.plans > 50
    # A plan a minute, and few of them change anything.
    assert result.engine_starts + scaled.engine_stops < planner.plans / 2


# ------------------------------------------------------------ work that can wait


def test_work_that_can_wait_is_never_late_for_waiting_on_a_calm_day():
    shape = replace(TINY, level_sigma=0.0, drift_sigma=0.0, bursts_per_day=0)
    load = workload("chat")
    at_once = draw_day(load, shape, 4)
    waits = draw_day(load, shape, 4, deferrable_ratio=0.3)
    assert [plan.arrival_s for plan in at_once.plans] == [plan.arrival_s for plan in waits.plans]
    assert [plan.steps for plan in at_once.plans] == [plan.steps for plan in waits.plans]
    assert 0.2 < len(waits.deferrable_s) / len(waits.plans) < 0.4
    ends_s = shape.lead_s + shape.day_s
    for before, after in zip(at_once.plans, waits.plans, strict=True):
        longer_s = after.deadline_s - before.deadline_s
        assert longer_s == pytest.approx(waits.deferrable_s.get(after.number, 0.0))
        assert longer_s <= 8.0 / 24.0 * 3_600.0 + 1e-6
        if longer_s:
            assert after.arrival_s + after.deadline_s <= ends_s + 1e-6
    before = learned_before("chat", REFERENCE.model.name, shape)
    planner = Planned(
        2.0, shape=shape, before=before, deferrable_s=waits.deferrable_s, engines_first=3
    )
    scaled = Scaled(StickyFcfs(), planner, shape.lead_s, waits.deferrable_s)
    options = replace(OPTIONS, horizon_s=shape.horizon_s, has_log=True)
    result = play(waits.plans, _fleet(3, 3, 30.0), scaled, options)
    assert scaled.deferred == sum(wait_s >= WAIT_S_MIN for wait_s in waits.deferrable_s.values())
    late = {int(line.split()[2][1:]) for line in result.log if line.split()[1] == "late"}
    assert not late & set(waits.deferrable_s)
    assert all(value == 0.0 for value in result.gauges_at_end.values())


class _Never(_Script):
    def deferrable_per_s(self) -> float:
        return 0.0


def test_what_has_waited_as_long_as_it_may_begins_in_any_case():
    plans = [_plan(0, 10.0, 100, 300.0), _plan(1, 20.0, 100, 300.0)]
    scaled = Scaled(StickyFcfs(), _Never(), 0.0, {0: 120.0})
    options = replace(OPTIONS, has_log=True)
    result = play(plans, _fleet(1, 1, 1.0), scaled, options)
    begun_s = {
        line.split()[2]: float(line.split()[0]) / 1e3
        for line in result.log
        if line.split()[1] == "send"
    }
    assert begun_s["w1-0"] == pytest.approx(20.0)
    assert 118.0 <= begun_s["w0-0"] <= 124.0
    assert result.total.succeeded == 2


# ------------------------------------------------------------ what is bought


def test_a_day_is_billed_by_the_minute_as_it_was_planned():
    minutes = [2] * 720 + [6] * 720
    plan = plan_of([minutes], REFERENCE.gpu.name, 4)
    prices = {one.term: one.micro_usd_per_gpu_hour / 1e6 for one in plan.purchase.offers}
    bill = day_bill(plan, minutes)
    assert bill.on_demand_only_usd == pytest.approx((2 + 6) * 4 * 12 * prices[Term.ON_DEMAND])
    reserved = plan.reserved_gpus
    assert reserved % 4 == 0
    usd = reserved * 24 * prices[Term.RESERVED]
    for engines in (2, 6):
        rest = max(0.0, 4 * engines - reserved)
        lent = min(rest, SPOT_RATIO_MAX * 4 * engines) // 4 * 4
        # Once in three hours a spot machine is away for five minutes.
        usd += 12 * lent / (1.0 - 0.33 * 300.0 / 3_600.0) * prices[Term.SPOT]
        usd += 12 * (rest - lent) * prices[Term.ON_DEMAND]
    assert bill.usd == pytest.approx(usd)
    assert bill.usd < bill.on_demand_only_usd


# ------------------------------------------------------------ the experiment


WANTED = DayWanted(
    workload="coding",
    policies=("static+sticky", "hpa+sticky"),
    days=1,
    hours=1.0,
    peak_engines=1,
    success_ratio_min=0.6,
    cold_start_s=30.0,
)


@pytest.fixture(scope="module")
def document():
    with DayRunner(processes=1) as runner:
        return day(WANTED, runner)


def test_the_same_seed_gives_the_same_day_in_any_number_of_processes(document):
    ways = [
        Way(scaler=scaler, setting=setting, placement="sticky", placement_config=0)
        for scaler, setting in (("hpa", 300.0), ("planner", 0.0))
    ]
    jobs = [way.job(WANTED, 7, 2.0) for way in ways]
    with DayRunner(processes=1) as alone, DayRunner(processes=2) as together:
        one, two = alone.play(jobs), together.play(jobs)
    for job in jobs:
        # Times of this machine are no part of the document.
        first, second = (
            replace(
                each[job],
                outcome=replace(each[job].outcome, decision_us_mean=0.0, calls_per_wall_minute=0.0),
            )
            for each in (one, two)
        )
        assert first == second
    with DayRunner(processes=1) as runner:
        again = day(WANTED, runner)
    assert json.dumps(again, allow_nan=False) == json.dumps(document)


def test_dollars_at_the_floor_are_read_off_the_curve(document):
    cells = {cell["policy"]: cell for cell in document["cells"]}
    assert set(cells) == {"static+sticky", "hpa+sticky"}
    for cell in cells.values():
        assert cell["experiment"] == "day"
        assert cell["leaks"] == 0
        points = [(usd, in_time) for usd, in_time, _ in cell["curve"]]
        usd = interpolated(points, 0.6)
        assert cell["fleet_usd_at_floor"] == (None if usd is None else pytest.approx(usd, abs=1e-4))
    for one in document["days"]:
        assert len(one["engines_on_by_minute"]) == 60
    page = render(document)
    assert "A day at a floor of success" in page


def test_a_ratio_at_a_floor_by_hand():
    # Half-way between 10 and 20 dollars against 30: what is done at the floor is 1 of 2.
    ours = [[(10.0, 0.0, 2.0)], [(20.0, 2.0, 2.0)]]
    theirs = [[(30.0, 1.0, 2.0)]]
    ratio = paired_floor_ratio(ours, theirs, 0.5)
    assert ratio.value == pytest.approx(15.0 / 30.0)
    assert (ratio.low, ratio.high) == (pytest.approx(0.5), pytest.approx(0.5))
    with pytest.raises(ValueError, match="same seeds"):
        paired_floor_ratio(ours, [[(30.0, 1.0, 2.0)] * 2], 0.5)
