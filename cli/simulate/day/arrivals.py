"""A day's rate of arrivals, and the workflows that come of it. Pure: the same seed gives the same day.

Times in seconds of the run, which begins `lead_s` before the day, at the hour before midnight. A day may be
played in fewer hours: its curve, the memory of its drift and what work may wait shrink with it; bursts, deadlines
and cold starts do not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from cli.simulate.contracts import Plan
from cli.simulate.deadlines import Deadlines
from cli.simulate.workloads import Workload, draw_plans

HOURS_PER_DAY: Final = 24.0
SECONDS_PER_HOUR: Final = 3_600.0
MINUTE_S: Final = 60.0
# Work of people: a hump before noon and a larger one after it (hour, width in hours, height), as the weekly
# curves of ServeGen (arXiv 2505.09999) and of Azure's LLM services show them. The lowest hour is at night.
HUMPS: Final = ((10.0, 1.8, 0.9), (16.0, 2.3, 1.0))
PEAK_TROUGH_RATIO: Final = 4.0
# How far a whole day is off what the days before tell, as the deviation of a logarithm; how far its hours
# are off the day, and for how long that lasts.
LEVEL_SIGMA: Final = 0.08
DRIFT_SIGMA: Final = 0.07
DRIFT_MEMORY_H: Final = 2.0
# Bursts that nothing announces: as many a day, so many times the rate, for so long.
BURSTS_PER_DAY: Final = 6
BURST_FACTORS: Final = (1.4, 2.0)
BURST_MINUTES: Final = (4.0, 10.0)
# Work that can wait: part of the workflows, and by how much their deadline is later.
DEFERRABLE_H: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DayShape:
    """`peak_per_s`: workflows per second at the usual day's highest minute, bursts apart. `hours` is how long
    the day is played in; before and after it load goes on for `lead_s` and `tail_s`.
    """

    peak_per_s: float
    hours: float = HOURS_PER_DAY
    lead_s: float = 1_200.0
    tail_s: float = 600.0
    peak_trough_ratio: float = PEAK_TROUGH_RATIO
    level_sigma: float = LEVEL_SIGMA
    drift_sigma: float = DRIFT_SIGMA
    bursts_per_day: int = BURSTS_PER_DAY

    @property
    def day_s(self) -> float:
        return self.hours * SECONDS_PER_HOUR

    @property
    def horizon_s(self) -> float:
        return self.lead_s + self.day_s + self.tail_s

    @property
    def compression(self) -> float:
        """How many hours of the day pass in one hour."""
        return HOURS_PER_DAY / self.hours

    def hour_at(self, at_s: float) -> float:
        """The hour of the day, 0..24, at a time of the run."""
        return (at_s - self.lead_s) / SECONDS_PER_HOUR * self.compression % HOURS_PER_DAY


def _humps(hour: float) -> float:
    total = 0.0
    for middle, width, height in HUMPS:
        away = abs(hour - middle)
        away = min(away, HOURS_PER_DAY - away)
        total += height * math.exp(-0.5 * (away / width) ** 2)
    return total


_SAMPLED: Final = tuple(_humps(minute / 60.0) for minute in range(24 * 60))
_LOW: Final = min(_SAMPLED)
_HIGH: Final = max(_SAMPLED)


def usual_ratio(hour: float, peak_trough_ratio: float = PEAK_TROUGH_RATIO) -> float:
    """The rate of the usual day at an hour, over that of its highest minute."""
    trough = 1.0 / peak_trough_ratio
    height = (_humps(hour % HOURS_PER_DAY) - _LOW) / (_HIGH - _LOW)
    return trough + (1.0 - trough) * min(1.0, max(0.0, height))


def usual_mean_ratio(peak_trough_ratio: float = PEAK_TROUGH_RATIO) -> float:
    """The mean over the usual day, over its highest minute."""
    minutes = len(_SAMPLED)
    return sum(usual_ratio(minute / 60.0, peak_trough_ratio) for minute in range(minutes)) / minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class DayCurve:
    """One drawn day: workflows per second in each minute of the run, a rate that `draw_plans` takes."""

    per_s: tuple[float, ...]
    bursts: tuple[tuple[float, float, float], ...]

    def __call__(self, at_s: float) -> float:
        minute = int(at_s // MINUTE_S)
        return self.per_s[max(0, min(len(self.per_s) - 1, minute))]


def day_curve(shape: DayShape, seed: int) -> DayCurve:
    """A day as it comes: the usual one, off in level, drifting, with bursts (start s, seconds, factor).

    The mean of level and drift is 1, so that the usual day is what many days come to.
    """
    random = Random(f"{seed}:day")  # noqa: S311  (a repeatable load, no secret)
    level = _lognormal(random, shape.level_sigma)
    minutes = math.ceil(shape.horizon_s / MINUTE_S)
    kept = math.exp(-MINUTE_S * shape.compression / (DRIFT_MEMORY_H * SECONDS_PER_HOUR))
    drift = random.gauss(0.0, shape.drift_sigma)
    bursts = []
    for _ in range(max(0, round(shape.bursts_per_day * shape.hours / HOURS_PER_DAY))):
        length_s = MINUTE_S * random.uniform(*BURST_MINUTES)
        start_s = shape.lead_s + random.random() * (shape.day_s - length_s)
        bursts.append((start_s, length_s, random.uniform(*BURST_FACTORS)))
    rates = []
    for minute in range(minutes):
        at_s = (minute + 0.5) * MINUTE_S
        usual = usual_ratio(shape.hour_at(at_s), shape.peak_trough_ratio)
        burst = max(
            (
                factor
                for start_s, length_s, factor in bursts
                if start_s <= at_s < start_s + length_s
            ),
            default=1.0,
        )
        off = level * math.exp(drift - 0.5 * shape.drift_sigma**2)
        rates.append(shape.peak_per_s * usual * off * burst)
        drift = kept * drift + math.sqrt(1.0 - kept**2) * random.gauss(0.0, shape.drift_sigma)
    return DayCurve(per_s=tuple(rates), bursts=tuple(sorted(bursts)))


def _lognormal(random: Random, sigma: float) -> float:
    """Of mean 1."""
    return math.exp(random.gauss(0.0, sigma) - 0.5 * sigma**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The workflows of a run, and by how much some of them may wait before they begin, by their number."""

    shape: DayShape
    curve: DayCurve
    plans: tuple[Plan, ...]
    deferrable_s: Mapping[int, float]


def draw_day(
    load: Workload,
    shape: DayShape,
    seed: int,
    *,
    deadlines: Deadlines = Deadlines.OWN,
    deferrable_ratio: float = 0.0,
) -> Day:
    """A day of a workload. Arrivals of each tenant are gamma distributed around the drawn curve.

    Work that can wait has its deadline up to `DEFERRABLE_H` hours later, but none of it may be carried out
    of the day, where nobody would pay for it. What comes is the same whatever part of it can wait.
    """
    curve = day_curve(shape, seed)
    plans = draw_plans(
        load, seed=seed, rate_per_s=curve, horizon_s=shape.horizon_s, deadlines=deadlines
    )
    if deferrable_ratio <= 0.0:
        return Day(shape=shape, curve=curve, plans=plans, deferrable_s={})
    random = Random(f"{seed}:deferrable")  # noqa: S311  (a repeatable load, no secret)
    ends_s = shape.lead_s + shape.day_s
    waits: dict[int, float] = {}
    kept = []
    for plan in plans:
        can_wait = random.random() < deferrable_ratio
        if can_wait and plan.deadline_s is not None:
            longest_s = DEFERRABLE_H / shape.compression * SECONDS_PER_HOUR
            wait_s = min(longest_s, ends_s - plan.arrival_s - plan.deadline_s)
            if wait_s > 0.0:
                waits[plan.number] = wait_s
                plan = replace(plan, deadline_s=plan.deadline_s + wait_s)  # noqa: PLW2901
        kept.append(plan)
    return Day(shape=shape, curve=curve, plans=tuple(kept), deferrable_s=waits)
