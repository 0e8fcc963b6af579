"""Prices that clear a demand, against a plain list of the same workflows that is sorted by worth."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.admission.bids import ASKED_MIN, WHOLE_RATIO, WINDOW_MS_MIN, Bids
from controlplane.admission.levels import SHARES, worth_level

STEP_MS = 200
COUNT = 250


def asked(bids, now_ms, *, priority=5, value=10_000, work_ms=1_000.0, tolerance=4.0):
    bids.asked(
        priority=priority, value_micro_usd=value, work_ms=work_ms, tolerance=tolerance,
        given_ms=1_000.0, now_ms=now_ms,
    )  # fmt: skip


def filled(workflows, count=COUNT):
    """The workflows asked for one after the other, round and round; and when the last one was."""
    bids, now_ms = Bids(), 1
    for number in range(count):
        priority, value, work_ms, tolerance = workflows[number % len(workflows)]
        now_ms += STEP_MS
        asked(bids, now_ms, priority=priority, value=value, work_ms=work_ms, tolerance=tolerance)
    return bids, now_ms


def always(stretch, tolerances):
    return [1.0] * len(tolerances)


def let_in(bids, priority, value, work_ms):
    """The share of such workflows that is let in."""
    level = worth_level(value, work_ms)
    admitted = sum(bids.admits(priority, level * SHARES + share) for share in range(SHARES))
    return admitted / SHARES


workflow = st.tuples(
    st.sampled_from([2, 5, 9]),
    st.sampled_from([1_000, 10_000, 40_000]),
    st.floats(10.0, 60_000.0),
    st.floats(1.0, 50.0),
)


@given(st.lists(workflow, min_size=1, max_size=12), st.floats(0.02, 3.0))
def test_no_more_is_let_in_than_there_is_room_for_and_the_dearest_first(workflows, room):
    bids, now_ms = filled(workflows)
    wanted_per_ms = sum(work for _, _, work, _ in workflows) / len(workflows) / STEP_MS
    bids.clear(now_ms, [1.5], lambda _: room * wanted_per_ms, always)
    shares = [(let_in(bids, p, v, w), p, v, w) for p, v, w, _ in workflows]
    taken = sum(share * work for share, _, _, work in shares) / sum(w for _, _, w, _ in workflows)
    # The latest count a little more than the earliest; half a share of a level is rounded.
    assert taken <= min(1.0, room) * 1.05 + 0.05
    if room > 1.05:
        assert taken == 1.0
        assert bids.price_micro_usd_per_s == 0.0
    for share, _, value, work in shares:
        for other, _, other_value, other_work in shares:
            if worth_level(value, work) > worth_level(other_value, other_work):
                assert share == 1.0 or other == 0.0
    for share, priority, value, work in shares:
        for other, other_priority, other_value, other_work in shares:
            is_equal = worth_level(value, work) == worth_level(other_value, other_work)
            if is_equal and priority > other_priority:
                assert share == 1.0 or other == 0.0


@given(st.lists(workflow, min_size=1, max_size=8))
def test_the_stretch_under_which_most_is_done_in_time_is_chosen(workflows):
    """Twice the room at the fuller stretch, and who tolerates too little is late there. One priority, which is
    too much to be let in whole.
    """
    workflows = [(5, *rest) for _, *rest in workflows]
    bids, now_ms = filled(workflows)
    wanted_per_ms = sum(work for _, _, work, _ in workflows) / len(workflows) / STEP_MS
    room = {1.2: 0.4 * wanted_per_ms, 2.0: 0.8 * wanted_per_ms}

    def in_time(stretch, tolerances):
        return [float(each > 2 * stretch) for each in tolerances]

    bids.clear(now_ms, list(room), room.__getitem__, in_time)
    chosen, best = bids.clearing, {}
    for stretch in room:
        bids.clear(now_ms, [stretch], room.__getitem__, in_time)
        best[stretch] = bids.clearing.value
    if chosen.stretch_ratio == 1.2:
        assert best[2.0] <= best[1.2] * 1.02 + 1e-9
    else:
        assert best[2.0] > best[1.2]


def test_nothing_is_known_of_few_or_for_a_short_time():
    bids, now_ms = Bids(), 1
    for number in range(int(ASKED_MIN) * 4):
        asked(bids, now_ms + number)
    bids.clear(now_ms + 300, [1.5], lambda _: 1.0, always)
    assert bids.clearing is None
    assert bids.admits(0, 0)
    few, now_ms = filled([(5, 1, 1.0, 1.0)], count=10)
    few.clear(now_ms + int(5 * WINDOW_MS_MIN), [1.5], lambda _: 1.0, always)
    assert few.clearing is None


def test_demand_fades():
    bids, now_ms = filled([(5, 10_000, 1_000.0, 4.0)])
    bids.clear(now_ms, [1.5], lambda _: 1.0, always)
    assert bids.clearing.load_ratio == pytest.approx(1_000 / STEP_MS, rel=0.1)
    assert bids.price_micro_usd_per_s > 0.0
    later_ms = now_ms + int(1.3 * WINDOW_MS_MIN)
    bids.clear(later_ms, [1.5], lambda _: 1.0, always)
    expected = math.exp(-1.3) * 1_000 / STEP_MS
    assert bids.clearing is None or bids.clearing.load_ratio == pytest.approx(expected, rel=0.2)


def test_a_priority_that_fits_whole_is_not_slowed_down_for_others():
    """Nine tenths of the value is patient and wants full engines; the tenth of high priority is not."""
    patient = [(2, 10_000, 1_000.0, 40.0)] * 9
    tight = [(9, 10_000, 1_000.0, 1.6)]
    room = {1.2: 3.0, 2.5: 6.0}

    def in_time(stretch, tolerances):
        return [float(each > stretch) for each in tolerances]

    bids, now_ms = filled([*patient, *tight])
    bids.clear(now_ms, list(room), room.__getitem__, in_time)
    assert bids.clearing.stretch_ratio == 1.2
    # Where it asks for more than could be let in whole, it counts like the others.
    many = [(9, 10_000, 1_000.0, 1.6)] * 9
    bids, now_ms = filled([*many, *patient])
    assert WHOLE_RATIO * min(room.values()) < 0.5 * 1_000 / STEP_MS
    bids.clear(now_ms, [1.2, 2.5], {1.2: 0.4, 2.5: 3.0}.__getitem__, in_time)
    assert bids.clearing.stretch_ratio == 2.5
