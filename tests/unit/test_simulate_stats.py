"""Intervals against enumeration, interpolation against a scan."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.simulate.stats import interpolated, paired_quantity_ratio, paired_ratio


def enumerated(ours, theirs, ratio_of):
    """Every resampling of the seeds once: what drawn ones come near to."""
    picks = itertools.product(range(len(ours)), repeat=len(ours))
    ratios = sorted(ratio_of([ours[i] for i in pick], [theirs[i] for i in pick]) for pick in picks)

    def at(share):
        return ratios[max(0, math.ceil(share * len(ratios)) - 1)]

    return at(0.025), at(0.5), at(0.975)


def cpst_ratio(ours, theirs):
    def cpst(pairs):
        return sum(cost for cost, _ in pairs) / sum(successes for _, successes in pairs)

    return cpst(ours) / cpst(theirs)


OURS = [(100.0, 50), (100.0, 20), (130.0, 61), (100.0, 33), (90.0, 40)]
THEIRS = [(100.0, 41), (100.0, 18), (130.0, 44), (100.0, 30), (90.0, 39)]


def test_the_interval_is_that_of_all_resamplings():
    interval = paired_ratio(OURS, THEIRS)
    low, median, high = enumerated(OURS, THEIRS, cpst_ratio)
    assert interval.value == pytest.approx(cpst_ratio(OURS, THEIRS))
    assert interval.low == pytest.approx(low, abs=0.004)
    assert interval.median == pytest.approx(median, abs=0.004)
    assert interval.high == pytest.approx(high, abs=0.004)
    assert interval.excludes(1.0)


def test_seeds_are_paired():
    """Costs that differ widely by seed and alike on both sides leave no doubt about their ratio."""
    theirs = [(10.0**power, 10) for power in range(8)]
    ours = [(0.9 * cost, successes) for cost, successes in theirs]
    interval = paired_ratio(ours, theirs)
    assert (interval.low, interval.high) == (pytest.approx(0.9), pytest.approx(0.9))


def test_no_success_is_infinitely_dear_and_unequal_seeds_are_an_error():
    assert paired_ratio([(1.0, 0)], [(1.0, 5)]).value == math.inf
    assert paired_ratio([(1.0, 5)], [(1.0, 0)]).value == 0.0
    assert paired_ratio([(1.0, 0)], [(1.0, 5)]).document()["value"] is None
    with pytest.raises(ValueError, match="same seeds"):
        paired_ratio([(1.0, 1)], [(1.0, 1), (1.0, 1)])


CURVES = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 10)),
    min_size=1,
    max_size=6,
    unique_by=lambda p: p[0],
)


@given(CURVES, st.integers(0, 10))
def test_interpolation_finds_the_first_crossing(points, target):
    """Against a scan of the rising hull in small steps."""
    found = interpolated(points, target)
    ordered = sorted(points)
    highest = list(itertools.accumulate((y for _, y in ordered), max))
    if highest[-1] < target:
        assert found is None
        return
    scanned = None
    steps = 2_000
    for ((x0, _), y0), ((x1, _), y1) in itertools.pairwise(zip(ordered, highest, strict=True)):
        for step in range(steps + 1):
            if y0 + (y1 - y0) * step / steps >= target - 1e-9:
                scanned = x0 + (x1 - x0) * step / steps
                break
        if scanned is not None:
            break
    assert found == pytest.approx(ordered[0][0] if scanned is None else scanned, abs=0.02)


def test_a_floor_read_off_curves_is_resampled_at_every_point_alike():
    ours = [(10.0, [(8.0, 10.0), (9.0, 10.0)]), (20.0, [(10.0, 10.0), (10.0, 10.0)])]
    theirs = [(20.0, [(8.0, 10.0), (9.0, 10.0)]), (40.0, [(10.0, 10.0), (10.0, 10.0)])]
    interval = paired_quantity_ratio(ours, theirs, lambda points: interpolated(points, 0.95))
    assert interval.value == pytest.approx(0.5)
    # Twice as dear in every draw: no draw says anything else.
    assert (interval.low, interval.high) == (pytest.approx(0.5), pytest.approx(0.5))
