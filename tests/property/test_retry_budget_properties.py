"""Invariant I4: in every window, retries stay within a tenth of the requests plus one per second."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.reliability.retry_budget import RetryBudget

# Gaps on and around the edges of the ten-second window and its slices.
GAP_MS = st.sampled_from([0, 1, 50, 99, 100, 101, 900, 4_999, 9_899, 9_900, 9_999, 10_000, 10_001])


@given(
    st.lists(
        st.tuples(GAP_MS, st.sampled_from(["request", "retry", "burst", "retries"])), max_size=40
    )
)
def test_retries_in_any_window_stay_within_the_budget(steps):
    budget = RetryBudget()
    now_ms = 0
    requests, retries = [], []
    for gap_ms, step in steps:
        now_ms += gap_ms
        for _ in range(30 if step == "burst" else 12 if step == "retries" else 1):
            if step in {"request", "burst"}:
                budget.note_request(now_ms)
                requests.append(now_ms)
            elif budget.try_spend(now_ms):
                retries.append(now_ms)
                spent = sum(1 for at in retries if at > now_ms - 10_000)
                made = sum(1 for at in requests if at > now_ms - 10_000)
                assert spent <= 0.1 * made + 10


def test_a_busy_tenant_gets_a_tenth():
    budget = RetryBudget()
    for number in range(1_000):
        budget.note_request(number)
    allowed = sum(budget.try_spend(1_000) for _ in range(1_000))
    assert allowed == 110


def test_the_budget_comes_back_when_the_window_has_passed():
    budget = RetryBudget()
    assert sum(budget.try_spend(0) for _ in range(20)) == 10
    assert not budget.try_spend(9_999)
    assert budget.try_spend(10_200)
