"""What may be said of runs over seeds: ratios with a paired bootstrap interval, and where a curve meets a floor.

Knows numbers only. Deterministic: the resampling has a fixed seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

RESAMPLES: Final = 10_000
# Seed of the resampling, so that the same runs give the same interval.
RESAMPLING_SEED: Final = 20_260_101
# Pairs below which an interval says little; what is quoted has at least so many.
SEEDS_MIN: Final = 10
CONFIDENCE_RATIO: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio: its value over all seeds, the bootstrap's median, and the 95 % interval."""

    value: float
    median: float
    low: float
    high: float
    seeds: int

    def excludes(self, ratio: float) -> bool:
        return self.high < ratio or self.low > ratio

    def document(self) -> dict[str, object]:
        return {
            "value": finite(self.value),
            "median": finite(self.median),
            "ci95": [finite(self.low), finite(self.high)],
        }


def finite(value: float) -> float | None:
    """JSON knows no infinity: None stands for it."""
    return round(value, 6) if math.isfinite(value) else None


def paired_ratio(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]
) -> Interval:
    """Ratio of (cost, successes) sums, ours over theirs, seed by seed the same draw of the world.

    CPST is a ratio of sums, so the seeds are resampled in pairs and the sums taken again; a mean of
    ratios would weigh a seed with few successes like one with many. Percentile bootstrap (Efron).
    Infinite where ours has no success, 0 where theirs has none. ValueError on unequal or no seeds.
    """
    import numpy as np

    if not ours or len(ours) != len(theirs):
        raise ValueError("pairs need the same seeds on both sides, and at least one")
    count = len(ours)
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    picks = np.random.default_rng(RESAMPLING_SEED).integers(0, count, size=(RESAMPLES, count))
    # Row 0 is the sample itself.
    picks = np.vstack([np.arange(count)[None, :], picks])
    a_sums, b_sums = a[picks].sum(axis=1), b[picks].sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (a_sums[:, 0] / a_sums[:, 1]) / (b_sums[:, 0] / b_sums[:, 1])
    ratios = np.where(b_sums[:, 1] == 0.0, 0.0, ratios)
    ratios = np.where(a_sums[:, 1] == 0.0, np.inf, ratios)
    low, median, high = _percentiles(ratios[1:])
    return Interval(value=float(ratios[0]), median=median, low=low, high=high, seeds=count)


# Of a quantity, say the dollars of a fleet: what each seed did, and what it could have done at most.
Curve = Sequence[tuple[float, Sequence[tuple[float, float]]]]


def paired_quantity_ratio(
    ours: Curve, theirs: Curve, find: Callable[[Sequence[tuple[float, float]]], float | None]
) -> Interval:
    """Ratio of two quantities that `find` reads off curves of sums over seeds, ours over theirs.

    The same seeds are resampled on both sides and at every point of the curves. A resampling in which
    one of the two is not found counts as infinite, against whichever side it is that is not found.
    ValueError when the seeds differ.
    """
    import numpy as np

    counts = {len(seeds) for curve in (ours, theirs) for _, seeds in curve}
    if len(counts) != 1:
        raise ValueError("all points of both curves need the same seeds")
    count = counts.pop()
    picks = np.random.default_rng(RESAMPLING_SEED).integers(0, count, size=(RESAMPLES, count))
    picks = np.vstack([np.arange(count)[None, :], picks])

    def found(curve: Curve) -> list[float]:
        sums = [(x, np.asarray(seeds, dtype=float)[picks].sum(axis=1)) for x, seeds in curve]
        values = []
        for row in range(len(picks)):
            x = find([(x, float(each[row, 0] / max(each[row, 1], 1e-12))) for x, each in sums])
            values.append(math.inf if x is None else x)
        return values

    pairs = zip(found(ours), found(theirs), strict=True)
    ratios = np.asarray([math.inf if math.isinf(a) else a / b for a, b in pairs])
    low, median, high = _percentiles(ratios[1:])
    return Interval(value=float(ratios[0]), median=median, low=low, high=high, seeds=count)


def paired_floor_ratio(
    ours: Sequence[Sequence[tuple[float, float, float]]],
    theirs: Sequence[Sequence[tuple[float, float, float]]],
    target: float,
) -> Interval:
    """Ratio of the dollars at which two curves reach `target`, ours over theirs.

    Each point of a curve has, of the same seeds in the same order, (dollars, done, could be done); dollars
    are summed over the resampled seeds as what was done is. As `paired_quantity_ratio` else.
    """
    import numpy as np

    counts = {len(point) for curve in (ours, theirs) for point in curve}
    if len(counts) != 1:
        raise ValueError("all points of both curves need the same seeds")
    count = counts.pop()
    picks = np.random.default_rng(RESAMPLING_SEED).integers(0, count, size=(RESAMPLES, count))
    picks = np.vstack([np.arange(count)[None, :], picks])

    def found(curve: Sequence[Sequence[tuple[float, float, float]]]) -> list[float]:
        sums = [np.asarray(point, dtype=float)[picks].sum(axis=1) for point in curve]
        values = []
        for row in range(len(picks)):
            points = [
                (float(each[row, 0]), float(each[row, 1] / max(each[row, 2], 1e-12)))
                for each in sums
            ]
            x = interpolated(points, target)
            values.append(math.inf if x is None else x)
        return values

    pairs = zip(found(ours), found(theirs), strict=True)
    ratios = np.asarray([math.inf if math.isinf(a) else a / b for a, b in pairs])
    low, median, high = _percentiles(ratios[1:])
    return Interval(value=float(ratios[0]), median=median, low=low, high=high, seeds=count)


def _percentiles(ratios: Any) -> tuple[float, float, float]:
    """Order statistics, not interpolated: infinities stay what they are."""
    import numpy as np

    tail = 50.0 * (1.0 - CONFIDENCE_RATIO)
    low, median, high = np.percentile(ratios, [tail, 50.0, 100.0 - tail], method="inverted_cdf")
    return float(low), float(median), float(high)


def interpolated(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The x at which y, taken to rise with x, first reaches `target`, linear between the points.

    Noise may make y fall: then the running maximum counts, for more of x never served less. None
    when no point reaches the target; the smallest x when all do.
    """
    reached: tuple[float, float] | None = None
    for x, y in sorted(points):
        if y >= target:
            if reached is None or y <= reached[1]:
                return x
            x0, y0 = reached
            return x0 + (x - x0) * (target - y0) / (y - y0)
        reached = (x, y if reached is None else max(y, reached[1]))
    return None
