"""What the forecast learns of made-up weeks whose rate is known."""

import math
import random

import pytest

from controlplane.scheduler.planner.forecast import (
    BIN_S,
    ForecastState,
    forecast,
    observe,
    profile_per_s,
)
from controlplane.scheduler.planner.problem import as_json, from_json

MONDAY = 1_790_000_000 // 604_800 * 604_800 + 4 * 86_400.0
DAY_S = 86_400.0
LEAD_S = 300.0


def usual(at_s: float) -> float:
    """Workflows a second: a hump in the afternoon, little at the weekend."""
    hour = at_s % DAY_S / 3_600.0
    is_weekend = int(at_s // DAY_S) % 7 in (2, 3)
    return (0.2 + math.exp(-(((hour - 14.0) / 4.0) ** 2))) * (0.3 if is_weekend else 1.0)


def poisson(rng: random.Random, mean: float) -> int:
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count += 1
        left += rng.expovariate(1.0)
    return count


def learn(
    seed: int, days: int, step_s: float = 300.0
) -> tuple[ForecastState, list[tuple[float, float, float]]]:
    """The state after some days; of the last, (forecast, its deviation, the true rate) each step."""
    rng = random.Random(seed)
    state, drift = ForecastState(), 0.0
    told: list[tuple[float, float, float]] = []
    due: list[tuple[float, float, float]] = []
    for step in range(1, int(days * DAY_S / step_s) + 1):
        at_s = MONDAY + step * step_s
        kept = math.exp(-step_s / 7_200.0)
        drift = drift * kept + rng.gauss(0.0, 0.1 * math.sqrt(1.0 - kept**2))
        rate = usual(at_s - step_s / 2.0) * math.exp(drift)
        state = observe(state, at_s, poisson(rng, rate * step_s), step_s)
        if step * step_s > (days - 7) * DAY_S:
            while due and due[0][0] <= at_s:
                _, mean, spread = due.pop(0)
                told.append((mean, spread, rate))
            ahead = forecast(state, at_s + LEAD_S)
            due.append((at_s + LEAD_S, ahead.mean_per_s, ahead.spread_per_s))
    return state, told


@pytest.mark.parametrize("seed", [1, 2])
def test_a_forecast_is_near_and_knows_how_near(seed: int) -> None:
    state, told = learn(seed, 21)
    errors = [abs(mean - rate) / rate for mean, _, rate in told]
    inside = [abs(mean - rate) <= 1.645 * spread for mean, spread, rate in told]
    assert sum(errors) / len(errors) < 0.08
    # Nine in ten within the bounds of nine in ten.
    assert 0.8 <= sum(inside) / len(inside) <= 0.98
    assert state.dispersion_ratio == pytest.approx(1.0, abs=0.2)
    # What deviates is the drift, and the profile as long as it is young.
    assert 0.005 < state.variance < 0.05
    # The weekend is known as such, and so are noon and night.
    for day in range(7):
        for hour in (3.0, 14.0):
            at_s = MONDAY + 21 * DAY_S + day * DAY_S + hour * 3_600.0
            assert profile_per_s(state, at_s) == pytest.approx(usual(at_s), rel=0.35)


def test_what_is_not_known_leans_on_what_is() -> None:
    state = ForecastState()
    assert forecast(state, MONDAY).mean_per_s == 0.0
    for quarter in range(1, 5):
        state = observe(state, MONDAY + quarter * BIN_S, 90, BIN_S)
    for hours in (1.5, 30.0, 100.0):
        assert profile_per_s(state, MONDAY + hours * 3_600.0) == pytest.approx(0.1, rel=1e-6)


def test_bursts_raise_the_dispersion_and_one_outage_does_not() -> None:
    def after(counts: list[int]) -> ForecastState:
        state = ForecastState()
        for step, count in enumerate(counts, start=1):
            state = observe(state, MONDAY + step * BIN_S, count, BIN_S)
        return state

    rng = random.Random(5)
    calm = after([poisson(rng, 450.0) for _ in range(400)])
    bursty = after([poisson(rng, rng.choice([300.0, 600.0])) for _ in range(400)])
    assert calm.dispersion_ratio < 2.0
    assert bursty.dispersion_ratio > 4.0
    dead = after([450] * 40 + [0] + [450] * 4)
    assert dead.dispersion_ratio < 2.0
    assert forecast(dead, dead.at_s + LEAD_S).mean_per_s == pytest.approx(0.5, rel=0.15)
    # Three times as much for half an hour is how things are now.
    risen = after([450] * 40 + [1_350] * 2)
    assert forecast(risen, risen.at_s + LEAD_S).mean_per_s > 1.0
    # It fades: in half a day little of it is left.
    assert forecast(risen, risen.at_s + DAY_S / 2).mean_per_s < 0.75


def test_the_state_survives_its_json_and_goes_forward_only() -> None:
    state, _ = learn(3, 8)
    again = from_json(ForecastState, as_json(state))
    assert again == state
    assert observe(again, state.at_s + 60.0, 3, 60.0) == observe(state, state.at_s + 60.0, 3, 60.0)
    for at_s, arrivals, span_s in (
        (state.at_s - 1.0, 0, 60.0),
        (state.at_s, -1, 60.0),
        (state.at_s, 0, 0.0),
    ):
        with pytest.raises(ValueError, match="forward"):
            observe(state, at_s, arrivals, span_s)
