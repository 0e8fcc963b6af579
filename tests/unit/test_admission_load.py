"""Levels, commitments, appointments and the load made of them, one rule at a time."""

import pytest

from controlplane.admission.appointments import (
    EARLY_MS,
    GRACE_MS,
    WAIT_FACTOR,
    WAIT_MS_MAX,
    WAIT_MS_MIN,
    Appointments,
)
from controlplane.admission.commitments import IDLE_MS, Commitment, Commitments, SeatTime
from controlplane.admission.levels import (
    CALM_MS,
    RANKS,
    SHARES,
    WINDOW_MS,
    WORTHS,
    Levels,
    rank,
)
from controlplane.admission.load import (
    CAUTION_MS,
    COMMITTED_RATIO_MIN,
    PoolLoad,
    Room,
    _Begun,
)
from controlplane.admission.shares import ASKED_MS, Shares
from controlplane.domain.decision import Reason
from tests.decision_builders import NOW_MS, call

ROOM = Room(seats=10, call_ms=1_000.0, busy_ratio=1.0)


def workflow(number, **changes):
    fields = {
        "id": f"r{number}",
        "workflow": f"w{number}",
        "steps_expected": 4,
        "step_gap_ms": 0,
        "workflow_deadline_ms": NOW_MS + 8_000,
        "deadline_ms": NOW_MS + 8_000,
    }
    return call(**{**fields, **changes})


# ---------------------------------------------------------------- ranks and levels


def test_priority_outranks_worth_and_worth_the_hash():
    low_but_dear = rank(call(priority=2, weight=1_000.0, value_micro_usd=10**9), 1.0)
    high_but_cheap = rank(call(priority=3, weight=0.01, value_micro_usd=1), 1e9)
    assert high_but_cheap > low_but_dear
    assert rank(call(value_micro_usd=4_000), 1_000) - rank(call(value_micro_usd=1_000), 1_000) == (
        4 * SHARES
    )


def test_all_calls_of_a_workflow_have_one_rank():
    first = call(id="a", workflow="w", step=0)
    assert rank(first, 100) == rank(call(id="b", workflow="w", step=3), 100)
    ranks = {rank(call(workflow=f"w{number}"), 100) % SHARES for number in range(400)}
    assert len(ranks) == SHARES


def test_every_rank_is_within_the_ranks():
    for priority in (-5, 0, 9, 50):
        for work_ms in (0.0, 1.0, 1e12):
            for value in (0, 10**15):
                found = rank(call(priority=priority, value_micro_usd=value), work_ms)
                assert 0 <= found < RANKS


def overloaded_window(levels, now_ms, ranks, wait_ms=1_000):
    for number in ranks:
        levels.admits(number)
    levels.waited(wait_ms, 2_000)
    levels.tick(now_ms)


def test_the_cursor_cuts_from_the_lowest_ranks():
    levels = Levels()
    levels.tick(0)
    ranks = range(1_000, 1_100)
    overloaded_window(levels, WINDOW_MS, ranks)
    assert levels.is_overloaded
    assert [levels.admits(number) for number in (1_004, 1_005, 1_099)] == [False, True, True]


def test_the_cursor_comes_down_again_and_the_pool_calms():
    levels = Levels()
    levels.tick(0)
    now_ms = 0
    for _ in range(5):
        now_ms += WINDOW_MS
        overloaded_window(levels, now_ms, range(1_000, 1_100))
    cut = levels.cursor
    for _ in range(400):
        now_ms += WINDOW_MS
        overloaded_window(levels, now_ms, range(1_000, 1_100), wait_ms=0)
    assert levels.cursor < cut
    assert levels.cursor == 0
    assert not levels.is_overloaded


def test_one_lucky_call_does_not_end_an_overload_at_once():
    levels = Levels()
    levels.tick(0)
    overloaded_window(levels, WINDOW_MS, range(100, 200))
    levels.waited(0, 2_000)
    levels.tick(2 * WINDOW_MS)
    assert levels.is_overloaded
    levels.tick(2 * WINDOW_MS + CALM_MS)
    assert not levels.is_overloaded


def test_a_tick_before_the_window_ends_changes_nothing():
    levels = Levels()
    levels.tick(0)
    levels.admits(5)
    levels.waited(10_000, 1)
    levels.tick(WINDOW_MS - 1)
    assert levels.cursor == 0
    assert not levels.is_overloaded


# ---------------------------------------------------------------- commitments


def commitment(**changes):
    fields = {
        "work_ms": 4_000.0, "pauses_ms": 2_000, "deadline_ms": 10_000, "lanes": 1, "priority": 5, "tenant": "acme",
        "idle_ms_max": IDLE_MS, "last_ms": 0,
    }  # fmt: skip
    return Commitment(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "now_ms", "seats"),
    [
        ({}, 0, 4_000 / (10_000 - 2_000)),
        ({"deadline_ms": 100_000}, 0, 4_000 / (2 * 6_000 - 2_000)),
        ({}, 5_000, 1.0),
        ({"lanes": 3}, 7_000, 3.0),
        ({}, 10_000, 0.0),
        ({"deadline_ms": 10**6}, IDLE_MS + 1, 0.0),
        ({"work_ms": 0.0}, 0, 0.0),
    ],
)
def test_seats_are_work_over_the_time_for_it(changes, now_ms, seats):
    assert commitment(**changes).seats(now_ms) == pytest.approx(seats)


def test_the_sum_follows_what_is_put_and_ended():
    commitments = Commitments()
    commitments.put("a", commitment(), 0)
    commitments.put("b", commitment(priority=9), 0)
    assert commitments.seats() == pytest.approx(1.0)
    assert commitments.seats(6) == pytest.approx(0.5)
    commitments.put("a", commitment(work_ms=0.0), 0)
    assert commitments.seats() == pytest.approx(0.5)
    commitments.end("b", 0)
    commitments.end("b", 0)
    assert commitments.seats() == 0.0


def test_time_passes_at_a_tick():
    commitments = Commitments()
    commitments.put("a", commitment(), 0)
    commitments.tick(4_000)
    assert commitments.seats() == pytest.approx(1.0)
    commitments.tick(10_000)
    assert len(commitments) == 0


def test_seat_time_is_learned_in_proportion_to_the_work():
    seat_time = SeatTime()
    short = call(prompt_tokens=1, completion_tokens_expected=100)
    assert seat_time.call_ms(short, 777.0) == 777.0
    seat_time.learn(short, 1_000.0)
    double = call(prompt_tokens=1, completion_tokens_expected=200)
    assert seat_time.call_ms(double, 777.0) == pytest.approx(2_000.0, rel=0.01)


# ---------------------------------------------------------------- appointments


def book(appointments, key, tier=0, work_ms=1_000.0, now_ms=0, most=10**9, seats_free=1.0):
    return appointments.book(
        key, work_ms=work_ms, seats=0.5, tier=tier, seats_free=seats_free, now_ms=now_ms,
        wait_ms_max=most,
    )  # fmt: skip


def test_who_books_later_comes_later_and_who_is_worth_more_sooner():
    appointments = Appointments()
    each = WAIT_FACTOR * 1_000
    assert book(appointments, "a") == WAIT_MS_MIN + each
    assert book(appointments, "b") == WAIT_MS_MIN + 2 * each
    assert book(appointments, "c", tier=1) == WAIT_MS_MIN + each
    assert book(appointments, "d") == WAIT_MS_MIN + 4 * each
    assert appointments.seats(0) == 2.0
    assert appointments.seats(1) == 0.5
    assert appointments.tier_highest == 1


def test_an_appointment_is_due_a_little_early_and_kept_once():
    appointments = Appointments()
    wait_ms = book(appointments, "a")
    assert not appointments.is_due("a", wait_ms - EARLY_MS - 1)
    assert appointments.is_due("a", wait_ms - EARLY_MS)
    appointments.keep("a")
    appointments.keep("a")
    assert (appointments.kept, len(appointments), appointments.tier_highest) == (1, 0, -1)
    assert not appointments.is_due("a", wait_ms)


def test_who_comes_too_early_is_told_the_rest_of_the_same_wait():
    appointments = Appointments()
    wait_ms = book(appointments, "a", work_ms=10_000.0)
    assert book(appointments, "a", now_ms=5_000) == wait_ms - 5_000
    assert len(appointments) == 1


def test_who_does_not_come_is_forgotten():
    appointments = Appointments()
    wait_ms = book(appointments, "a")
    appointments.tick(wait_ms + GRACE_MS)
    assert len(appointments) == 1
    appointments.tick(2 * wait_ms + GRACE_MS)
    assert (appointments.missed, len(appointments)) == (1, 0)
    assert appointments.work_ms(0) == 0.0


def test_no_time_is_named_that_is_too_late():
    appointments = Appointments()
    assert book(appointments, "a", most=WAIT_MS_MIN) is None
    assert book(appointments, "a", work_ms=float(WAIT_MS_MAX)) is None
    assert len(appointments) == 0


# ---------------------------------------------------------------- the load of a pool


def test_workflows_begin_until_the_seats_are_promised():
    load = PoolLoad(2.5)
    begun = 0
    while load.may_begin(workflow(begun), ROOM, NOW_MS) is None:
        begun += 1
    # Each needs 4 s of a seat within 8 s; 95 % of 10 seats are promised.
    assert begun == 19
    refused = load.may_begin(workflow(100), ROOM, NOW_MS)
    assert refused.reason is Reason.SHED_OVERLOAD
    assert not refused.is_final or refused.retry_after_ms is None


def test_a_refusal_without_time_to_wait_is_final():
    load = PoolLoad(2.5)
    for number in range(40):
        load.may_begin(workflow(number), ROOM, NOW_MS)
    refused = load.may_begin(workflow(100, workflow_deadline_ms=NOW_MS + 4_000), ROOM, NOW_MS)
    assert refused.is_final
    assert refused.retry_after_ms is None


def test_higher_priority_begins_where_lower_has_filled_the_pool():
    load = PoolLoad(2.5)
    for number in range(40):
        load.may_begin(workflow(number, priority=2), ROOM, NOW_MS)
    assert load.may_begin(workflow(100, priority=2), ROOM, NOW_MS) is not None
    assert load.may_begin(workflow(101, priority=9), ROOM, NOW_MS) is None


def test_who_was_told_a_time_goes_before_who_comes_first():
    load = PoolLoad(2.5)
    for number in range(19):
        load.may_begin(workflow(number), ROOM, NOW_MS)
    late = NOW_MS + 200_000
    told = load.may_begin(workflow(50, workflow_deadline_ms=late), ROOM, NOW_MS)
    for number in range(2):
        load.dropped(workflow(number), NOW_MS)
    back_ms = NOW_MS + told.retry_after_ms
    # Two seats' worth is free: the newcomer's and the returning one's. The third is one too many.
    new = workflow(60, workflow_deadline_ms=back_ms + 8_000)
    other = workflow(61, workflow_deadline_ms=back_ms + 8_000)
    assert load.may_begin(new, ROOM, NOW_MS) is None
    assert load.may_begin(other, ROOM, NOW_MS) is not None
    assert load.may_begin(workflow(50, workflow_deadline_ms=late), ROOM, back_ms) is None


def test_what_ends_gives_its_promise_back():
    load = PoolLoad(2.5)
    first = workflow(1, workflow_deadline_ms=NOW_MS + 5_000)
    assert load.may_begin(first, ROOM, NOW_MS) is None
    before = load.commitments.seats()
    load.step_ended(first, ROOM, NOW_MS)
    assert 0.0 < load.commitments.seats() < before
    last = workflow(1, step=3, is_begun=True)
    load.continues(last, ROOM, NOW_MS)
    load.step_ended(last, ROOM, NOW_MS)
    assert load.commitments.seats() == 0.0


def test_a_pool_takes_one_that_is_larger_than_itself():
    load = PoolLoad(2.5)
    huge = workflow(1, steps_expected=1_000)
    assert load.may_begin(huge, Room(0.5, 1_000.0, 0.0), NOW_MS) is None


def test_the_price_is_what_the_first_in_waiting_offers():
    load = PoolLoad(2.5)
    assert load.price_micro_usd_per_s == 0.0
    for number in range(60):
        load.may_begin(
            workflow(number, workflow_deadline_ms=NOW_MS + 60_000, value_micro_usd=4_096_000),
            ROOM,
            NOW_MS,
        )
    # 4,096,000 micro-dollars for 4 s of a seat, told apart by half a doubling.
    assert load.price_micro_usd_per_s == pytest.approx(1_024_000, rel=0.5)
    assert load.appointments.tier_highest // WORTHS == 5


def test_stretch_falls_while_promises_are_broken_and_rises_while_more_is_wanted():
    load = PoolLoad(2.5)
    for second in range(20):
        load.ended(is_in_time=False)
        load.tick(second * 1_000, 1.5, 2.5)
    assert load.stretch_ratio == 1.5
    assert load.committed_ratio == pytest.approx(COMMITTED_RATIO_MIN)
    for number in range(40):
        load.may_begin(workflow(number), ROOM, NOW_MS)
    for second in range(20, 20 + CAUTION_MS // 1_000 - 1):
        load.may_begin(workflow(second), ROOM, NOW_MS)
        load.tick(second * 1_000, 1.5, 2.5)
    assert load.stretch_ratio == 1.5
    for second in range(40, 200):
        load.may_begin(workflow(second), ROOM, NOW_MS)
        load.ended(is_in_time=True)
        load.tick(second * 1_000, 1.5, 2.5)
    assert load.stretch_ratio == 2.5


def test_pauses_are_learned_and_never_eat_up_the_deadline():
    load = PoolLoad(2.5)
    said = workflow(1, step_gap_ms=126_000)
    assert load.gaps.pauses_ms(said, NOW_MS) == 4_000
    assert load.may_begin(said, ROOM, NOW_MS) is None
    load.step_ended(said, ROOM, NOW_MS + 500)
    load.continues(workflow(1, step=1, step_gap_ms=126_000), ROOM, NOW_MS + 800)
    assert load.gaps.pauses_ms(said, NOW_MS) == 3 * 300


def test_who_has_less_than_its_part_goes_before_who_has_more():
    load = PoolLoad(2.5)
    for number in range(60):
        load.may_begin(workflow(number, tenant="heavy"), ROOM, NOW_MS)
    held = load.commitments.shares.seats("heavy")
    assert load.may_begin(workflow(70, tenant="heavy"), ROOM, NOW_MS) is not None
    # Half of the pool is each one's part; the light tenant may go over what is promised, to a limit.
    begun = 0
    while load.may_begin(workflow(100 + begun, tenant="light"), ROOM, NOW_MS) is None:
        begun += 1
    assert begun == 5
    told = load.may_begin(workflow(200, tenant="light"), ROOM, NOW_MS)
    assert told.retry_after_ms == WAIT_MS_MIN, "the next room is this tenant's"
    assert load.commitments.shares.seats("heavy") == held


def test_every_priority_has_its_least_share():
    load = PoolLoad(2.5)
    for number in range(60):
        load.may_begin(workflow(number, tenant="high", priority=9), ROOM, NOW_MS)
    assert load.may_begin(workflow(100, tenant="low", priority=1), ROOM, NOW_MS) is None
    assert load.may_begin(workflow(101, tenant="low", priority=1), ROOM, NOW_MS) is None
    assert load.may_begin(workflow(102, tenant="low", priority=1), ROOM, NOW_MS) is not None


def test_parts_follow_weights_and_forget_who_stays_away():
    shares = Shares()
    shares.asked("a", 3.0, 0)
    assert shares.part("a") == 1.0
    shares.asked("b", 1.0, 0)
    assert (shares.part("a"), shares.part("b")) == (0.75, 0.25)
    shares.add("b", 2.0)
    shares.tick(ASKED_MS + 1)
    assert shares.part("b") == 1.0
    assert shares.seats("a") == 0.0
    shares.add("b", -5.0)
    assert shares.seats("b") == 0.0


# ---------------------------------------------------------------- by price


# Two calls at a time, each as fast as alone: two milliseconds of work in each.
SEATS_AT = 2.0


def of_size(number, work_ms, times=3.0, **changes):
    """A workflow that is given so many times the time that it needs."""
    deadline_ms = changes.pop("now_ms", NOW_MS) + int(times * work_ms)
    fields = {"steps_expected": 1, "workflow_deadline_ms": deadline_ms, "deadline_ms": deadline_ms}
    return workflow(number, **{**fields, **changes})


def end(load, request, now_ms, work_ms):
    load.served(request, seat_ms=work_ms, alone_ms=work_ms, published_ms=work_ms)
    load.workflow_ended(request.workflow, now_ms)


def priced(works=(300, 3_000), load_ratio=2.0, room=ROOM, times=3.0):
    """A pool that was asked for `load_ratio` times what it can do, in workflows of these sizes."""
    load, now_ms, number = PoolLoad(1.5), NOW_MS, 0
    pause_ms = sum(works) / len(works) / (SEATS_AT * load_ratio)
    while load.bids.clearing is None or number < 800:
        number += 1
        now_ms = NOW_MS + int(number * pause_ms)
        work_ms = works[number % len(works)]
        request = of_size(number, work_ms, times, now_ms=now_ms)
        if load.may_begin(request, room, now_ms) is None:
            end(load, request, now_ms + work_ms, work_ms)
        load.tick(now_ms, 1.5, 1.5, lambda _: SEATS_AT)
        assert number < 20_000
    return load, now_ms


def test_under_overload_what_is_worth_more_a_second_is_let_in():
    load, now_ms = priced()
    assert load.price_micro_usd_per_s > 0.0
    assert load.bids.clearing.load_ratio == pytest.approx(2.0, rel=0.25)
    small = of_size("small", 300, now_ms=now_ms)
    large = of_size("large", 3_000, now_ms=now_ms)
    assert load.would_begin(small, ROOM, now_ms)
    assert not all(
        load.would_begin(of_size(f"l{number}", 3_000, now_ms=now_ms), ROOM, now_ms)
        for number in range(64)
    )
    dear = of_size("dear", 3_000, now_ms=now_ms, value_micro_usd=50 * large.value_micro_usd)
    assert load.would_begin(dear, ROOM, now_ms)
    assert load.may_begin(small, ROOM, now_ms) is None
    assert load.tabs.get("wsmall") is not None


def test_who_is_not_worth_its_time_is_told_so_finally_and_a_lone_call_to_come_back():
    load, now_ms = priced()
    load.commitments.put("other", promised(now_ms), now_ms)
    refused = [
        refuse
        for number in range(64)
        if (refuse := load.may_begin(of_size(f"l{number}", 30_000, now_ms=now_ms), ROOM, now_ms))
    ]
    assert len(refused) == 64
    assert all(each.is_final and each.reason is Reason.SHED_OVERLOAD for each in refused)
    assert "needs about" in refused[0].detail
    # Of a lone call promises decide, whatever the price is.
    load.commitments.put("flood", promised(now_ms, seats=1_000), now_ms)
    alone = call(
        id="alone", workflow=None, prompt_tokens=500_000, completion_tokens_expected=500_000,
        deadline_ms=now_ms + 90_000, workflow_deadline_ms=now_ms + 90_000,
    )  # fmt: skip
    refuse = load.may_begin(alone, ROOM, now_ms)
    assert not refuse.is_final
    assert refuse.retry_after_ms == WAIT_MS_MAX


def promised(now_ms, seats=1):
    return Commitment(
        work_ms=1_000.0 * seats, pauses_ms=0, deadline_ms=now_ms + 1_000, lanes=seats, priority=5,
        tenant="other", idle_ms_max=60_000, last_ms=now_ms,
    )  # fmt: skip


def test_a_pool_without_anybody_takes_one_whatever_it_is_worth():
    load, now_ms = priced()
    assert not len(load.commitments)
    assert load.may_begin(of_size("huge", 60_000, now_ms=now_ms), ROOM, now_ms) is None


def test_at_half_the_load_everyone_is_let_in():
    load, now_ms = priced(load_ratio=0.5)
    assert load.price_micro_usd_per_s == 0.0
    load.commitments.put("other", promised(now_ms), now_ms)
    assert load.would_begin(of_size("large", 3_000, now_ms=now_ms), ROOM, now_ms)


def test_a_burst_of_promises_raises_the_price_at_once():
    load, now_ms = priced(load_ratio=1.5)
    dearest = int(load.bids.clearing.level)
    small = of_size("small", 300, now_ms=now_ms)
    assert load.would_begin(small, ROOM, now_ms)
    load.commitments.put("flood", promised(now_ms, seats=1_000), now_ms)
    assert not load.would_begin(small, ROOM, now_ms)
    assert load.bids.clearing.level == dearest


def test_who_asks_for_little_does_not_pay_for_a_flood():
    load, now_ms = priced(works=(1_000,), load_ratio=20.0)
    load.commitments.put("flood", promised(now_ms, seats=5), now_ms)
    load.commitments.shares.asked("t", 1.0, now_ms)
    load.commitments.shares.asked("other", 1.0, now_ms)
    load.commitments.tick(now_ms)
    few = [of_size(f"f{n}", 1_000, now_ms=now_ms, tenant="small") for n in range(64)]
    many = [of_size(f"m{n}", 1_000, now_ms=now_ms, tenant="other") for n in range(64)]
    load.commitments.shares.asked("small", 1.0, now_ms)
    assert all(load.would_begin(each, ROOM, now_ms) for each in few)
    assert sum(load.would_begin(each, ROOM, now_ms) for each in many) < 10


def test_who_can_not_spare_the_time_of_a_call_is_urgent():
    load, now_ms = priced(works=(300, 1_000, 3_000), load_ratio=0.5)
    patient = of_size("patient", 10_000, now_ms=now_ms)
    assert load.may_begin(patient, ROOM, now_ms) is None
    assert not load.is_urgent(patient)
    tight = of_size("tight", 100, now_ms=now_ms)
    assert load.may_begin(tight, ROOM, now_ms) is None
    assert load.is_urgent(tight)
    assert not load.is_urgent(of_size("unknown", 100, now_ms=now_ms))


def test_engines_are_emptied_while_tight_workflows_end_late():
    """Calls must be slowed down by more than those can bear that are late."""
    load, now_ms = priced(works=(1_000,), load_ratio=0.5, times=1.8)
    before = load._in_time_ratios(1.5, [1.8])[0]
    for number in range(60):
        request = of_size(f"late{number}", 1_000, 1.8, now_ms=now_ms)
        load.may_begin(request, ROOM, now_ms)
        load.served(request, seat_ms=900, alone_ms=900, published_ms=900)
        load.workflow_ended(request.workflow, now_ms + 1_801)
    assert load._in_time_ratios(1.5, [1.8])[0] < before - 0.2
    assert load._in_time_ratios(1.1, [1.8])[0] > load._in_time_ratios(1.5, [1.8])[0]
    # What no emptiness could have kept is no reason to empty engines further.
    assert load._in_time_ratios(1.1, [1.8])[0] > 0.7


def test_a_rate_that_was_looked_at_for_a_second_is_not_taken_for_a_small_one():
    """Work that is begun evenly is told the same after one second as after many, and after a pause anew."""
    begun = _Begun()
    for start_ms in (5_000, 500_000):
        for number in range(300):
            now_ms = start_ms + 100 * number
            begun.add(400.0, now_ms)
            if number >= 15:
                assert begun.seats(now_ms) == pytest.approx(4.0, rel=0.1)


def test_all_engines_slow_down_and_what_is_known_of_workflows_stands():
    """Half as much fits while calls take twice as long, and all of it at once when they are well again."""
    load, now_ms = priced(works=(1_000,), load_ratio=0.8)
    asked = of_size("asked", 1_000, now_ms=now_ms)
    work_ms, tolerance = load.size(asked, now_ms)
    fits_per_ms = load._work_per_ms(SEATS_AT, 1.5)
    slowed = load._in_time_ratios(1.5, [tolerance])[0]

    def play(calls, times):
        """Workflows that still end in time, on engines that take `times` as long and are known to."""
        nonlocal now_ms
        for number in range(calls):
            now_ms += 2_000
            request = of_size(f"{times}-{number}", 1_000, now_ms=now_ms)
            load._open(request, load._size(request, now_ms), now_ms)
            spent_ms = 1_000 * times
            load.served(request, seat_ms=spent_ms, alone_ms=spent_ms, published_ms=1_000)
            load.workflow_ended(request.workflow, now_ms + spent_ms)

    play(300, 2)
    assert load.size(asked, now_ms).work_ms == pytest.approx(2 * work_ms, rel=0.1)
    assert load.size(asked, now_ms).tolerance == pytest.approx(tolerance / 2, rel=0.1)
    assert load._work_per_ms(SEATS_AT, 1.5) == pytest.approx(fits_per_ms / 2, rel=0.1)
    assert load._in_time_ratios(1.5, [tolerance])[0] < slowed - 0.1
    play(200, 1)
    assert load.size(asked, now_ms).work_ms == pytest.approx(work_ms, rel=0.1)
    assert load._work_per_ms(SEATS_AT, 1.5) == pytest.approx(fits_per_ms, rel=0.1)
