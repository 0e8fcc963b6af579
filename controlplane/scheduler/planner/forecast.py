"""What will arrive: a profile of the week, a deviation from it that fades, and how uncertain both are.

Arrivals of one class, workflows per second. Instants are seconds since 1970, UTC, and come from the
caller. The state is a frozen value that has a JSON form, so that a new leader goes on where the old
one stopped.
"""

from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Final

BIN_S: Final = 900
BINS_PER_DAY: Final = 96
BINS_PER_WEEK: Final = 7 * BINS_PER_DAY

# A bin of the week leans on the same bin of all days as on so many arrivals, and that on all bins:
# what is seen little leans on what is seen more (a gamma prior on a Poisson rate).
WEEK_PRIOR_ARRIVALS: Final = 30.0
DAY_PRIOR_ARRIVALS: Final = 10.0
# What a bin saw a week ago counts this much of what it sees now.
WEEK_KEPT_RATIO: Final = 0.6

# The deviation from the profile is a first-order autoregression with this memory; deviations of that
# length and of 5 to 25 % are what published traces of arrivals show within a day.
MEMORY_S: Final = 7_200.0
VARIANCE_MIN: Final = 0.0025
VARIANCE_MAX: Final = 0.25
VARIANCE_START: Final = 0.02
DEVIATION_MAX: Final = 3.0
DISPERSION_MAX: Final = 50.0
# A count further off than this is bounded (Huber), unless the one before it was as well.
SURPRISE_SIGMA_MAX: Final = 3.0
# The learned variances look back this far: over many times the memory, or they would follow the
# deviation of the hour.
LEARN_S: Final = 86_400.0
# Keeps the logarithm of small counts within reason.
COUNT_OFFSET: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastState:
    """What was learned of one class.

    `arrivals` and `seconds` by bin of the week; `week_seen` is the last week in which a bin was seen.
    What was seen in the bin that is under way (`bin_at`, counted from 1970) is kept apart until it is
    over, or the profile would explain away the deviation from it.
    `deviation` is the logarithm of what arrives over what the profile says, `deviation_variance` how
    sure that is, `variance` that of deviations in the long run; `dispersion_ratio` that of counts
    over Poisson's. `surprise` is 1 or -1 where the last count was far above or below all bounds.
    """

    arrivals: tuple[float, ...] = (0.0,) * BINS_PER_WEEK
    seconds: tuple[float, ...] = (0.0,) * BINS_PER_WEEK
    week_seen: tuple[int, ...] = (0,) * BINS_PER_WEEK
    bin_at: int = 0
    bin_arrivals: float = 0.0
    bin_seconds: float = 0.0
    at_s: float = 0.0
    deviation: float = 0.0
    deviation_variance: float = VARIANCE_START
    variance: float = VARIANCE_START
    dispersion_ratio: float = 1.0
    surprise: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateForecast:
    """Workflows per second at an instant: the mean, its standard deviation, and the burstiness."""

    mean_per_s: float
    spread_per_s: float
    dispersion_ratio: float


def bin_of(at_s: float) -> int:
    """The quarter of an hour within the week; weeks begin on Thursday, as time does."""
    return int(at_s // BIN_S) % BINS_PER_WEEK


def profile_per_s(state: ForecastState, at_s: float) -> float:
    """What usually arrives at this time of the week, between the middles of the two nearest bins."""
    before = at_s - BIN_S / 2.0
    part = before / BIN_S - before // BIN_S
    first = bin_of(before)
    return (1.0 - part) * _bin_per_s(state, first) + part * _bin_per_s(
        state, (first + 1) % BINS_PER_WEEK
    )


def _bin_per_s(state: ForecastState, number: int) -> float:
    seconds = sum(state.seconds)
    if seconds <= 0.0:
        return state.bin_arrivals / state.bin_seconds if state.bin_seconds > 0.0 else 0.0
    overall = sum(state.arrivals) / seconds
    same = range(number % BINS_PER_DAY, BINS_PER_WEEK, BINS_PER_DAY)
    day = _leaning(
        sum(state.arrivals[one] for one in same),
        sum(state.seconds[one] for one in same),
        overall,
        DAY_PRIOR_ARRIVALS,
    )
    return _leaning(state.arrivals[number], state.seconds[number], day, WEEK_PRIOR_ARRIVALS)


def _leaning(arrivals: float, seconds: float, prior_per_s: float, weight: float) -> float:
    """A rate that was seen, as if `weight` arrivals at the prior rate had been seen besides."""
    if prior_per_s <= 0.0:
        return arrivals / max(seconds, BIN_S)
    return (arrivals + weight) / (seconds + weight / prior_per_s)


def observe(state: ForecastState, at_s: float, arrivals: int, span_s: float) -> ForecastState:
    """Learn that `arrivals` workflows came in the `span_s` seconds that end at `at_s`.

    The deviation is followed by a Kalman filter whose observation is the logarithm of the count over
    what the profile expects, with the noise of a count. Raises ValueError on a span that is not
    positive, a negative count, or an instant before the last.
    """
    if span_s <= 0.0 or arrivals < 0 or at_s < state.at_s:
        raise ValueError("arrivals are observed forward in time, over a span above 0")
    middle = at_s - span_s / 2.0
    expected = profile_per_s(state, middle) * span_s
    followed = _drift(state, at_s)
    if expected > 0.0:
        followed = _follow(followed, arrivals, expected, 1.0 - exp(-span_s / LEARN_S))
    return _count(replace(followed, at_s=at_s), middle, float(arrivals), span_s)


def _drift(state: ForecastState, at_s: float) -> ForecastState:
    """The deviation as it is to be expected at a later instant: nearer to 0, and less sure."""
    if state.at_s <= 0.0:
        return state
    kept = exp(-max(0.0, at_s - state.at_s) / MEMORY_S)
    return replace(
        state,
        deviation=state.deviation * kept,
        deviation_variance=state.deviation_variance * kept**2 + state.variance * (1.0 - kept**2),
    )


def _follow(
    state: ForecastState, arrivals: int, expected: float, learn_ratio: float
) -> ForecastState:
    predicted = expected * exp(state.deviation)
    noise = state.dispersion_ratio / (predicted + COUNT_OFFSET)
    surprise = log((arrivals + COUNT_OFFSET) / (predicted + COUNT_OFFSET))
    most = SURPRISE_SIGMA_MAX * sqrt(state.deviation_variance + noise)
    direction = 0 if abs(surprise) <= most else (1 if surprise > 0.0 else -1)
    # One count that is far off is an outage or a burst; two in a row are how things are now.
    if direction and direction != state.surprise:
        surprise = direction * most
    gain = state.deviation_variance / (state.deviation_variance + noise)
    deviation = max(-DEVIATION_MAX, min(DEVIATION_MAX, state.deviation + gain * surprise))
    # Of a count's squared error, what the uncertain mean explains is not burstiness.
    explained = predicted**2 * state.deviation_variance
    error = min(
        abs(arrivals - predicted),
        SURPRISE_SIGMA_MAX * sqrt(explained + predicted * state.dispersion_ratio),
    )
    burst = max(0.0, error**2 - explained) / (predicted + COUNT_OFFSET)
    dispersion = state.dispersion_ratio + learn_ratio * (burst - state.dispersion_ratio)
    uncertain = (1.0 - gain) * state.deviation_variance
    variance = state.variance + learn_ratio * (deviation**2 + uncertain - state.variance)
    return replace(
        state,
        deviation=deviation,
        deviation_variance=uncertain,
        variance=max(VARIANCE_MIN, min(VARIANCE_MAX, variance)),
        dispersion_ratio=max(1.0, min(DISPERSION_MAX, dispersion)),
        surprise=direction,
    )


def _count(state: ForecastState, at_s: float, arrivals: float, span_s: float) -> ForecastState:
    bin_at = int(at_s // BIN_S)
    if bin_at == state.bin_at:
        return replace(
            state,
            bin_arrivals=state.bin_arrivals + arrivals,
            bin_seconds=state.bin_seconds + span_s,
        )
    learned = state if state.bin_seconds <= 0.0 else _learn_bin(state)
    return replace(learned, bin_at=bin_at, bin_arrivals=arrivals, bin_seconds=span_s)


def _learn_bin(state: ForecastState) -> ForecastState:
    number = state.bin_at % BINS_PER_WEEK
    week = state.bin_at // BINS_PER_WEEK
    kept = WEEK_KEPT_RATIO ** max(0, week - state.week_seen[number])
    if state.seconds[number] <= 0.0:
        kept = 0.0
    return replace(
        state,
        arrivals=_with(state.arrivals, number, state.arrivals[number] * kept + state.bin_arrivals),
        seconds=_with(state.seconds, number, state.seconds[number] * kept + state.bin_seconds),
        week_seen=(*state.week_seen[:number], week, *state.week_seen[number + 1 :]),
    )


def _with(values: tuple[float, ...], number: int, value: float) -> tuple[float, ...]:
    return (*values[:number], value, *values[number + 1 :])


def forecast(state: ForecastState, at_s: float) -> RateForecast:
    """What arrives at an instant that is not before the last observation."""
    later = _drift(state, at_s)
    usual = profile_per_s(state, at_s)
    # Mean and deviation of a lognormal variable.
    mean = usual * exp(later.deviation + 0.5 * later.deviation_variance)
    return RateForecast(
        mean_per_s=mean,
        spread_per_s=mean * sqrt(max(0.0, exp(later.deviation_variance) - 1.0)),
        dispersion_ratio=state.dispersion_ratio,
    )
