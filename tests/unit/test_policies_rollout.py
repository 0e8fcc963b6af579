"""When a candidate is taken back: how far denials rise, for how long, over how many calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rollout import Change, RolloutWatch, change_of

SECOND = 1_000
CALLS_PER_SECOND = 10


def run(
    watch: RolloutWatch, seconds: range, newly_denied_percent: int, *, per_second: int = 10
) -> int:
    """Calls at an even rate, asked once a second. The second of the first answer, or -1."""
    due = 0
    for second in seconds:
        for call in range(per_second):
            due += newly_denied_percent
            is_risen = due >= 100
            due -= 100 * is_risen
            watch.note(
                Change.NEWLY_DENIED if is_risen else Change.NEITHER_DENIES,
                second * SECOND + call * SECOND // per_second,
            )
        if watch.why_back((second + 1) * SECOND):
            return second
    return -1


def test_change_of_every_pair() -> None:
    assert {
        (active, candidate): change_of(active_denies=active, candidate_denies=candidate)
        for active in (False, True)
        for candidate in (False, True)
    } == {
        (False, False): Change.NEITHER_DENIES,
        (False, True): Change.NEWLY_DENIED,
        (True, False): Change.NEWLY_ALLOWED,
        (True, True): Change.BOTH_DENY,
    }


@pytest.mark.parametrize("percent", [3, 10, 100])
def test_a_rise_of_more_than_two_points_goes_back_after_a_minute(percent: int) -> None:
    at = run(RolloutWatch(), range(200), percent, per_second=100)
    assert 59 <= at <= 64


@pytest.mark.parametrize("percent", [0, 1, 2])
def test_a_rise_of_up_to_two_points_stays(percent: int) -> None:
    assert run(RolloutWatch(), range(300), percent, per_second=100) == -1


def test_a_rise_shorter_than_a_minute_stays() -> None:
    watch = RolloutWatch()
    assert run(watch, range(45), 50) == -1
    assert run(watch, range(45, 300), 0) == -1
    # The clock of a later rise begins anew.
    assert run(watch, range(300, 350), 50) == -1
    assert 359 <= run(watch, range(350, 400), 50) <= 362


def test_denials_that_the_active_bundle_gives_as_well_are_no_rise() -> None:
    watch = RolloutWatch()
    for second in range(200):
        for change in (Change.BOTH_DENY, Change.NEWLY_DENIED, Change.NEWLY_ALLOWED):
            watch.note(change, second * SECOND)
        assert watch.why_back(second * SECOND) == ""


def test_few_calls_prove_nothing_and_neither_does_silence() -> None:
    watch = RolloutWatch()
    for second in range(19):
        watch.note(Change.NEWLY_DENIED, second * SECOND)
        assert watch.why_back(second * SECOND) == ""
    watch.note(Change.NEWLY_DENIED, 19 * SECOND)
    for second in range(19, 200):
        assert watch.why_back(second * SECOND) == ""


def test_rare_calls_are_gathered_for_longer() -> None:
    """One call in five seconds: never twenty in ten seconds, and still a rise."""
    watch = RolloutWatch()
    back = -1
    for second in range(0, 600, 5):
        watch.note(Change.NEWLY_DENIED, second * SECOND)
        if watch.why_back(second * SECOND):
            back = second
            break
    assert 100 <= back <= 200


def test_one_error_of_a_rule_is_enough_and_is_named() -> None:
    watch = RolloutWatch()
    watch.note(Change.NEITHER_DENIES, 0)
    watch.erred("night/batch")
    watch.erred("other/rule")
    assert "`night/batch`" in watch.why_back(0)


@given(st.lists(st.tuples(st.sampled_from(list(Change)), st.integers(0, 900)), max_size=300))
def test_counts_are_those_of_a_plain_tally(calls: list[tuple[Change, int]]) -> None:
    watch, now_ms = RolloutWatch(), 0
    for change, gap_ms in calls:
        now_ms += gap_ms
        watch.note(change, now_ms)
    assert watch.calls == len(calls)
    assert watch.changes == {
        change: sum(given is change for given, _ in calls) for change in Change
    }


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Change)), st.sampled_from([0, 100, 3_000])),
        min_size=20,
        max_size=120,
    )
)
def test_goes_back_only_when_the_last_calls_show_a_rise(calls: list[tuple[Change, int]]) -> None:
    """The oracle counts by hand over every suffix that the watch may look at."""
    watch, now_ms = RolloutWatch(), 0
    seen: list[tuple[int, int]] = []
    weights = {Change.NEWLY_DENIED: 1, Change.NEWLY_ALLOWED: -1}
    for change, gap_ms in calls:
        now_ms += gap_ms
        watch.note(change, now_ms)
        seen.append((now_ms, weights.get(change, 0)))
        if watch.why_back(now_ms):
            suffixes = (seen[-count:] for count in range(20, len(seen) + 1))
            assert any(
                sum(rise for _, rise in suffix) * 100 > 2 * len(suffix) for suffix in suffixes
            )
            assert now_ms - seen[0][0] >= 60_000
