"""GCRA against its promise, told by exact fractions and by counting windows."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admission.rate_limit import Meter
from tests.examples import machine_examples

STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 500, 1_000, 9_999, 30_000, 60_000]),
        st.sampled_from([1, 1, 2, 5, 11]),
        st.sampled_from([0, 0, -1, 3]),
    ),
    max_size=40,
)


@settings(max_examples=machine_examples(50))
@given(limit=st.integers(1, 12), replicas=st.sampled_from([1, 2, 3]), steps=STEPS)
def test_a_meter_is_a_bucket_of_one_minute_that_leaks_at_the_rate(limit, replicas, steps):
    # The share, in thousandths; the bucket is kept as a fraction.
    share = Fraction(max(1, limit * 1_000 // replicas), 1_000)
    meter, owed, now = Meter(), Fraction(0), 0
    for passed, amount, later in steps:
        now += passed
        owed = max(Fraction(0), owed - share * passed / 60_000)
        room = max(Fraction(0), share - amount)
        wait_ms = meter.wait_ms(amount, limit, replicas, now)
        over = owed - room
        assert wait_ms >= 0
        if over <= 0:
            assert wait_ms == 0
            meter.take(amount, limit, replicas, now)
            owed += amount
        else:
            exact = over * 60_000 / share
            assert exact <= wait_ms < exact + 1, "the first whole millisecond at which it passes"
        standing = meter.standing(limit, replicas, now)
        assert standing.remaining == min(limit, int(max(Fraction(0), share - owed) * replicas))
        assert meter.is_at_rest(limit, replicas, now) == (owed == 0)
        # What a call used beyond, or did not use of, what was thought.
        meter.take(later, limit, replicas, now)
        owed = max(Fraction(0), owed + later)


@settings(max_examples=machine_examples(50))
@given(
    limit=st.integers(1, 20),
    gaps=st.lists(st.sampled_from([0, 0, 1, 100, 2_999, 3_000, 20_000, 60_000]), max_size=80),
)
def test_no_window_passes_more_than_the_limit_and_its_length_allow(limit, gaps):
    meter, now, passed = Meter(), 0, []
    for gap in gaps:
        now += gap
        if meter.wait_ms(1, limit, 1, now) == 0:
            meter.take(1, limit, 1, now)
            passed.append(now)
    for first, start in enumerate(passed):
        for last in range(first, len(passed)):
            window_ms = passed[last] - start
            assert last - first + 1 <= limit * (1 + window_ms / 60_000) + 1


@given(limit=st.integers(1, 20), debt=st.integers(1, 60), amount=st.integers(1, 30))
def test_who_waits_as_told_passes_and_not_a_millisecond_before(limit, debt, amount):
    meter = Meter()
    meter.take(debt, limit, 1, 0)
    wait_ms = meter.wait_ms(amount, limit, 1, 0)
    assert meter.wait_ms(amount, limit, 1, wait_ms) == 0
    if wait_ms:
        assert meter.wait_ms(amount, limit, 1, wait_ms - 1) == 1
