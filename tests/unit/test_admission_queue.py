"""The waiting queue in single steps: who is let in, what it tells, who sleeps. The order is in tests/property."""

import pytest

from controlplane.admission.fairness import HAND, SHARDS, hand_of, service_tokens
from controlplane.admission.predict import DrainRate
from controlplane.admission.queue import Answer, Entered, TurnedAway, Waiting, WaitingQueue
from controlplane.domain.decision import Reason
from tests.decision_builders import call


def a_call(name, **changes):
    changes = {"arrival_ms": 0, "deadline_ms": 60_000, "workflow_deadline_ms": 60_000} | changes
    return call(id=name, **changes)


def item(name, *, gives_up_ms=0, idle_until_ms=0, queue_class="standard", **changes):
    return Waiting(
        a_call(name, **changes), name, 10, queue_class,
        gives_up_ms=gives_up_ms, idle_until_ms=idle_until_ms,
    )  # fmt: skip


def goes(_):
    return Answer.GOES


def names(items):
    return [each.ticket for each in items]


def drained(queue, *, per_s, seconds, start_ms=0):
    """Let calls leave at a steady rate, with one always waiting."""
    queue.enter(item("keeper", deadline_ms=10**9, workflow_deadline_ms=10**9), start_ms)
    for number in range(int(per_s * seconds)):
        now_ms = start_ms + int((number + 1) * 1_000 / per_s)
        queue.enter(item(f"d{number}", deadline_ms=10**6), now_ms)
        queue.dispatch(goes, 1, now_ms)
    queue.remove("keeper")


# ---------------------------------------------------------------- bounds


def test_a_later_step_passes_the_bound_up_to_a_quarter_more_and_then_takes_a_first_steps_place():
    queue = WaitingQueue(calls_max=4)
    for number in range(4):
        assert queue.enter(item(f"first-{number}"), 0) == Entered()
    full = queue.enter(item("one-more"), 0)
    assert isinstance(full, TurnedAway)
    assert full.reason is Reason.QUEUE_FULL
    assert full.retry_after_ms == 2_000
    assert queue.enter(item("later-0", is_begun=True), 0) == Entered()
    outcome = queue.enter(item("later-1", is_begun=True), 0)
    assert isinstance(outcome, Entered)
    assert names(outcome.evicted) == ["first-3"]
    for number in range(2, 5):
        outcome = queue.enter(item(f"later-{number}", is_begun=True), 0)
        assert len(outcome.evicted) == 1
    assert isinstance(queue.enter(item("later-5", is_begun=True), 0), TurnedAway)
    assert len(queue) == 5


def test_a_flood_gives_its_places_to_those_who_have_fewer():
    queue = WaitingQueue(calls_max=6)
    for number in range(6):
        queue.enter(item(f"flood-{number}", tenant="flood"), 0)
    evicted = []
    for number in range(4):
        outcome = queue.enter(item(f"other-{number}", tenant="other"), 0)
        evicted += names(outcome.evicted) if isinstance(outcome, Entered) else ["refused"]
    assert evicted == ["flood-5", "flood-4", "flood-3", "refused"]
    assert isinstance(queue.enter(item("flood-6", tenant="flood"), 0), TurnedAway)


def test_a_large_call_may_displace_several_small_ones_of_less_worth():
    queue = WaitingQueue(bytes_max=100)
    for number in range(10):
        queue.enter(item(f"low-{number}", priority=1), 0)
    large = Waiting(a_call("large", priority=2), "large", 25)
    outcome = queue.enter(large, 0)
    assert names(outcome.evicted) == ["low-9", "low-8", "low-7"]
    assert queue.bytes == 95
    assert isinstance(queue.enter(Waiting(a_call("huge", priority=9), "huge", 101), 0), TurnedAway)
    assert queue.bytes == 95


def test_who_waits_already_can_not_come_again():
    queue = WaitingQueue()
    queue.enter(item("a"), 0)
    with pytest.raises(ValueError, match="request a waits already"):
        queue.enter(item("a"), 0)


def test_a_call_that_its_tenants_own_backlog_makes_late_is_turned_away_and_a_later_step_never():
    queue = WaitingQueue()
    drained(queue, per_s=2, seconds=10)
    for number in range(100):
        queue.enter(item(f"b{number}", deadline_ms=100_000, workflow_deadline_ms=20_000), 10_000)
    # A hundred calls at twice the two a second take 25 s.
    late = {"deadline_ms": 34_000, "workflow_deadline_ms": 34_000, "arrival_ms": 10_000}
    outcome = queue.enter(item("late", **late), 10_000)
    assert isinstance(outcome, TurnedAway)
    assert outcome.reason is Reason.DEADLINE_UNREACHABLE
    assert outcome.retry_after_ms == pytest.approx(50_500, rel=0.05)
    assert queue.enter(item("other", tenant="other", **late), 10_000) == Entered()
    assert queue.enter(item("begun", is_begun=True, **late), 10_000) == Entered()
    in_time = late | {"deadline_ms": 37_000, "workflow_deadline_ms": 37_000}
    assert queue.enter(item("in-time", **in_time), 10_000) == Entered()


# ---------------------------------------------------------------- time


def test_patience_ends_a_wait_before_the_deadline():
    queue = WaitingQueue()
    queue.enter(item("patient"), 0)
    queue.enter(item("tired", gives_up_ms=5_000), 0)
    assert queue.expire(4_999) == []
    assert names(queue.expire(5_000)) == ["tired"]
    assert names(queue.expire(60_000)) == ["patient"]


def test_a_postponed_call_sleeps_until_its_time_and_can_be_removed_before():
    queue = WaitingQueue()
    queue.enter(item("night", not_before_ms=10_000), 0)
    queue.enter(item("gone", not_before_ms=9_000), 0)
    assert (queue.waiting_for("m"), len(queue)) == (0, 2)
    assert queue.position("night") is None
    assert queue.dispatch(goes, 9, 8_999) == []
    assert queue.remove("gone") is not None
    assert queue.dispatch(goes, 9, 9_999) == []
    assert names(queue.dispatch(goes, 9, 10_000)) == ["night"]
    assert len(queue) == 0


def test_a_call_for_idle_capacity_goes_when_nobody_waits_and_the_pool_is_idle():
    queue = WaitingQueue()
    queue.enter(item("idle", waits_for_idle=True), 0)
    queue.enter(item("ordinary"), 0)
    assert names(queue.dispatch(goes, 1, 0, lambda _: True)) == ["ordinary"]
    assert queue.dispatch(goes, 9, 0) == []
    assert queue.dispatch(lambda _: Answer.STAYS, 9, 0, lambda _: True) == []
    assert names(queue.dispatch(goes, 9, 0, lambda model: model == "m")) == ["idle"]
    assert queue.charge_of("idle") is not None
    assert len(queue) == 0


def test_a_call_for_idle_capacity_becomes_an_ordinary_one_at_its_time():
    queue = WaitingQueue()
    queue.enter(item("idle", waits_for_idle=True, idle_until_ms=5_000), 0)
    assert queue.dispatch(goes, 9, 4_999) == []
    assert queue.waiting_for("m") == 0
    queue.expire(5_000)
    assert queue.waiting_for("m") == 1
    assert names(queue.dispatch(goes, 9, 5_000)) == ["idle"]


def test_expired_calls_leave_from_wherever_they_stand():
    queue = WaitingQueue()
    queue.enter(item("asleep", not_before_ms=90_000), 0)
    queue.enter(item("idle", waits_for_idle=True, idle_until_ms=80_000), 0)
    queue.enter(item("waits"), 0)
    assert names(queue.expire(60_000)) == ["asleep", "idle", "waits"]
    assert (len(queue), queue.bytes, queue.waiting_for("m")) == (0, 0, 0)


# ---------------------------------------------------------------- passes


def test_a_full_home_does_not_hold_up_other_homes_and_is_asked_once():
    queue = WaitingQueue()
    for number in range(20):
        queue.enter(item(f"e1-{number}", home="e1", workflow_deadline_ms=number), 0)
    queue.enter(item("e2", home="e2"), 0)
    queue.enter(item("free"), 0)
    asked = []

    def ask(each):
        asked.append(each.ticket)
        return Answer.STAYS if each.request.home == "e1" else Answer.GOES

    assert sorted(names(queue.dispatch(ask, 64, 0))) == ["e2", "free"]
    assert asked.count("e1-0") == 1
    assert len(asked) == 3
    assert names(queue.dispatch(goes, 1, 0)) == ["e1-0"], "the next pass asks again"


def test_a_pool_that_uses_up_the_tries_comes_last_in_the_next_pass():
    queue = WaitingQueue()
    for number in range(4):
        queue.enter(item(f"m{number}"), 0)
        queue.enter(item(f"n{number}", model="n"), 0)
    assert names(queue.dispatch(goes, 2, 0)) == ["m0", "m1"]
    assert names(queue.dispatch(goes, 2, 0)) == ["n0", "n1"]
    assert names(queue.dispatch(goes, 9, 0)) == ["m2", "m3", "n2", "n3"]


def test_a_class_that_was_away_has_saved_up_nothing():
    queue = WaitingQueue()
    for number in range(20):
        queue.enter(item(f"s{number}"), 0)
    queue.dispatch(goes, 10, 0)
    for number in range(10):
        queue.enter(item(f"b{number}", queue_class="batch"), 0)
    gone = names(queue.dispatch(goes, 8, 0))
    assert [name[0] for name in gone].count("s") in {3, 4}


def test_an_ask_that_fails_leaves_the_queue_whole():
    queue = WaitingQueue()
    queue.enter(item("stuck", home="e1", workflow_deadline_ms=1), 0)
    queue.enter(item("fails"), 0)

    def ask(each):
        if each.ticket == "fails":
            raise RuntimeError
        return Answer.STAYS

    with pytest.raises(RuntimeError):
        queue.dispatch(ask, 9, 0)
    assert names(queue.dispatch(goes, 9, 0)) == ["stuck", "fails"]


def test_other_rules_put_what_waits_in_another_order():
    queue = WaitingQueue(class_weights={"batch": 1.0, "standard": 4.0})
    queue.enter(item("first", workflow_deadline_ms=50_000, queue_class="batch"), 0)
    queue.enter(item("second", arrival_ms=1, workflow_deadline_ms=1_000), 1)
    queue.enter(item("asleep", not_before_ms=5), 1)
    queue.enter(item("idle", waits_for_idle=True, idle_until_ms=9), 1)
    queue.use_rules("deadline", {"batch": 1.0, "standard": 4.0})
    queue.use_rules("deadline", {"batch": 1.0, "standard": 400.0})
    queue.use_rules("arrival", {})
    assert names(queue.dispatch(goes, 9, 9)) == ["first", "asleep", "idle", "second"]
    assert (len(queue), queue.waiting_for("m")) == (0, 0)


# ---------------------------------------------------------------- what it tells


def test_position_counts_what_goes_before():
    queue = WaitingQueue(class_weights={"standard": 4.0, "batch": 1.0})
    for number in range(8):
        queue.enter(item(f"a{number}", tenant="a", workflow_deadline_ms=1_000 + number), 0)
    queue.enter(item("b", tenant="b", workflow_deadline_ms=5_000), 0)
    queue.enter(item("c", tenant="c", queue_class="batch"), 0)
    # One of batch is taken to go with every four.
    assert [queue.position(f"a{number}") for number in range(4)] == [1, 2, 3, 5]
    # All of a's calls are due earlier, and fairness lets four of them go before; and one of batch.
    assert queue.position("b") == 6
    # One of batch goes for four of standard.
    assert queue.position("c") == 5
    assert queue.position("nobody") is None


def test_waits_are_predicted_from_the_rate_at_which_others_left():
    queue = WaitingQueue()
    request = a_call("new", arrival_ms=20_000, workflow_deadline_ms=50_000)
    assert queue.predicted_wait_ms(request, 0) is None
    assert queue.retry_after_ms("m", 0) == 2_000
    drained(queue, per_s=4, seconds=20)
    assert queue.predicted_wait_ms(request, 20_000) == pytest.approx(250, rel=0.1)
    for number in range(39):
        queue.enter(
            item(f"x{number}", arrival_ms=20_000, deadline_ms=10**6, workflow_deadline_ms=40_000),
            20_000,
        )
    assert queue.predicted_wait_ms(request, 20_000) == pytest.approx(10_000, rel=0.1)
    other = a_call("batch", arrival_ms=20_000)
    assert queue.predicted_wait_ms(other, 20_000, "batch") == pytest.approx(10_000, rel=0.1)
    waiting = queue.predicted_wait_ms(next(queue.items()).request, 20_000)
    assert waiting == pytest.approx(250, rel=0.1)
    assert queue.retry_after_ms("m", 20_000) == pytest.approx(10_000, rel=0.1)
    # When nothing leaves any more the rate falls.
    assert queue.predicted_wait_ms(request, 40_000) > 60_000


def test_the_oldest_wait_is_that_of_the_first_to_come():
    queue = WaitingQueue()
    assert queue.oldest_wait_ms("m", 5) == 0
    queue.enter(item("a", arrival_ms=100), 100)
    queue.enter(item("b", arrival_ms=200, workflow_deadline_ms=300), 200)
    assert queue.oldest_wait_ms("m", 1_000) == 900
    queue.remove("a")
    assert queue.oldest_wait_ms("m", 1_000) == 800


def test_what_a_call_used_is_counted_instead_of_what_was_thought():
    queue = WaitingQueue()
    queue.enter(item("a", tenant="a", prompt_tokens=100, completion_tokens_expected=50), 0)
    queue.dispatch(goes, 1, 0)
    charge = queue.charge_of("a")
    assert charge.tokens == service_tokens(100, 50) == 200
    assert queue.charge_of("b") is None
    queue.correct(charge, 100_000)
    queue.correct(queue.charge(a_call("c", tenant="b")), 0)
    queue.enter(item("rich", tenant="a", workflow_deadline_ms=1), 0)
    queue.enter(item("poor", tenant="b", workflow_deadline_ms=50_000), 0)
    assert names(queue.dispatch(goes, 9, 0)) == ["poor", "rich"]


def test_a_hand_is_distinct_steady_and_spread():
    hands = [hand_of(f"tenant-{number}") for number in range(400)]
    assert hands == [hand_of(f"tenant-{number}") for number in range(400)]
    assert all(len(set(hand)) == HAND for hand in hands)
    held = [sum(shard in hand for hand in hands) for shard in range(SHARDS)]
    assert min(held) > 0
    assert max(held) < 3 * 400 * HAND / SHARDS


def test_a_rate_forgets_in_busy_time_only():
    rate = DrainRate()
    rate.began(0)
    assert rate.per_ms(100_000) is None
    rate = DrainRate()
    rate.began(0)
    for now_ms in range(100, 20_001, 100):
        rate.left(now_ms)
    rate.emptied(20_000)
    before = rate.per_ms(20_000)
    assert before == pytest.approx(0.01, rel=0.1)
    assert rate.per_ms(10**7) == before
    assert rate.wait_ms(10**9, 10**7) == 3_600_000
    rate.began(10**7)
    rate.began(10**7 + 5)
    assert rate.per_ms(10**7 + 10_000) == pytest.approx(before / 2.4, rel=0.2)
