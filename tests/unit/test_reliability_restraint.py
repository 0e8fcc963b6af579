"""Slow start, back-pressure, pace and the price of faults, one by one."""

from itertools import product

import pytest

from controlplane.reliability.restraint import (
    ATTEMPTS_EXPECTED_MAX,
    BACKPRESSURE_MS,
    BACKPRESSURE_MS_MAX,
    CALLS_PER_PROBE,
    FAULT_HALF_LIFE_MS,
    PROBE_INTERVAL_MS_MAX,
    PROBE_INTERVAL_MS_MIN,
    BackPressure,
    FaultRatio,
    ProbePace,
)
from controlplane.reliability.slow_start import TRANSITIONS, Event, PoolRamp, Warmth, ramp_ratio

COLD, RAMPING, WARM = Warmth.COLD, Warmth.RAMPING, Warmth.WARM

EXPECTED = {
    (COLD, Event.PROVED): RAMPING,
    (COLD, Event.RAMPED): COLD,
    (COLD, Event.SEASONED): WARM,
    (COLD, Event.COOLED): COLD,
    (RAMPING, Event.PROVED): RAMPING,
    (RAMPING, Event.RAMPED): WARM,
    (RAMPING, Event.SEASONED): WARM,
    (RAMPING, Event.COOLED): COLD,
    (WARM, Event.PROVED): WARM,
    (WARM, Event.RAMPED): WARM,
    (WARM, Event.SEASONED): WARM,
    (WARM, Event.COOLED): COLD,
}


def in_warmth(warmth):
    ramp = PoolRamp(60_000)
    if warmth is not WARM:
        ramp.apply(Event.COOLED, 0)
    if warmth is RAMPING:
        ramp.apply(Event.PROVED, 0)
    assert ramp.warmth is warmth
    return ramp


@pytest.mark.parametrize(("warmth", "event"), list(product(Warmth, Event)))
def test_every_warmth_and_event(warmth, event):
    ramp = in_warmth(warmth)
    ramp.apply(event, 1)
    assert ramp.warmth is EXPECTED[warmth, event]
    assert TRANSITIONS.get((warmth, event), warmth) is EXPECTED[warmth, event]


def test_a_ramp_goes_from_a_tenth_to_all_in_a_line():
    assert [ramp_ratio(100, now, 1_000) for now in (0, 100, 600, 1_099, 1_100, 9_999)] == [
        pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.55), pytest.approx(0.9991), 1.0, 1.0,
    ]  # fmt: skip
    assert ramp_ratio(100, 100, 0) == 1.0


def test_a_cold_pool_waits_for_its_proof_and_then_ramps():
    ramp = in_warmth(COLD)
    assert ramp.ratio(1_000_000) == 0.0
    assert ramp.remaining_ms(1_000_000) == 60_000
    ramp.apply(Event.PROVED, 1_000_000)
    assert ramp.ratio(1_000_000) == pytest.approx(0.1)
    assert ramp.ratio(1_030_000) == pytest.approx(0.55)
    assert ramp.remaining_ms(1_030_000) == 30_000
    assert ramp.ratio(1_060_000) == 1.0
    assert ramp.warmth is WARM
    assert ramp.remaining_ms(1_060_000) == 0


def test_an_engine_that_refuses_keeps_what_it_holds_until_its_retry_after():
    pressure = BackPressure()
    assert pressure.bound(0) is None
    pressure.refused(7, 0, 3_000)
    assert pressure.bound(2_999) == 7
    assert pressure.bound(3_000) is None
    pressure.refused(7, 10_000, None)
    pressure.refused(5, 10_100, None)
    pressure.refused(6, 10_200, None)
    assert pressure.bound(10_300) == 5, "the least that it was seen to bear"
    assert pressure.bound(10_200 + BACKPRESSURE_MS) is None


def test_a_shorter_retry_after_does_not_end_a_longer_one():
    pressure = BackPressure()
    pressure.refused(1, 0, 10_000)
    pressure.refused(1, 0, 1)
    assert pressure.bound(9_999) == 1


def test_an_engine_that_refuses_all_is_left_alone_for_longer_each_time():
    pressure, now_ms, waits = BackPressure(), 0, []
    for _ in range(8):
        pressure.refused(0, now_ms, None)
        began_ms = now_ms
        while pressure.bound(now_ms) == 0:
            now_ms += 500
        waits.append(now_ms - began_ms)
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    pressure.accepted()
    pressure.refused(0, now_ms, None)
    assert pressure.bound(now_ms + BACKPRESSURE_MS) is None


def test_nobody_is_believed_for_longer_than_a_minute():
    pressure = BackPressure()
    pressure.refused(3, 0, 10**9)
    assert pressure.bound(BACKPRESSURE_MS_MAX - 1) == 3
    assert pressure.bound(BACKPRESSURE_MS_MAX) is None


@pytest.mark.parametrize(
    ("calls", "interval_ms"),
    [
        (0, PROBE_INTERVAL_MS_MAX),
        (1, PROBE_INTERVAL_MS_MAX),
        (100, 10_000),
        (500, 2_000),
        (100_000, PROBE_INTERVAL_MS_MIN),
    ],
)
def test_probes_are_a_hundredth_of_what_the_pool_begins(calls, interval_ms):
    pace = ProbePace()
    assert pace.bound(0) == 1
    pace.began(5, 10_000, calls)
    assert pace.bound(5 + interval_ms - 1) == 0
    assert pace.bound(5 + interval_ms) == 1
    assert CALLS_PER_PROBE == 100


def test_after_a_success_the_next_probe_may_follow_at_once():
    pace = ProbePace()
    pace.began(0, 10_000, 1)
    pace.succeeded()
    assert pace.bound(1) == 1


def test_faults_raise_the_attempts_expected_and_time_heals():
    faults = FaultRatio()
    assert faults.attempts_expected == 1.0
    for _ in range(200):
        faults.add(0, is_fault=True)
    assert faults.attempts_expected == ATTEMPTS_EXPECTED_MAX
    faults.decay(FAULT_HALF_LIFE_MS)
    assert faults.ratio == pytest.approx(0.5)
    assert faults.attempts_expected == pytest.approx(2.0)
    faults.decay(20 * FAULT_HALF_LIFE_MS)
    assert faults.ratio == 0.0


def test_half_of_the_calls_failing_doubles_the_price():
    faults = FaultRatio()
    for number in range(200):
        faults.add(0, is_fault=number % 2 == 0)
    assert faults.attempts_expected == pytest.approx(2.0, rel=0.2)
