"""Invariant I4: in every window, retries stay within what each tenant and each pool may spend."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.reliability.retry_budget import (
    POOL_RULES,
    TENANT_RULES,
    RetryBudget,
    RetryBudgets,
)
from controlplane.reliability.window import WINDOW_MS, Window
from tests.examples import machine_examples

# Gaps on and around the edges of the ten-second window and its slices.
GAP_MS = st.sampled_from([0, 1, 50, 99, 100, 101, 900, 4_999, 9_899, 9_900, 9_999, 10_000, 10_001])


@settings(max_examples=machine_examples(50))
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


# Who does what, where: two tenants and two pools, so that budgets are shared in every way.
STEP = st.tuples(
    GAP_MS,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["m", "n"]),
    st.sampled_from(["request", "burst", "client retry", "retries", "overloaded"]),
)


@settings(max_examples=machine_examples(50))
@given(st.lists(STEP, max_size=40))
def test_a_retry_needs_room_with_its_tenant_and_with_its_pool(steps):
    budgets = RetryBudgets()
    now_ms = 0
    first: list[tuple[int, str, str]] = []
    again: list[tuple[int, str, str]] = []

    def within(entries, place, name):
        return sum(1 for entry in entries if entry[0] > now_ms - 10_000 and entry[place] == name)

    for gap_ms, tenant, pool, step in steps:
        now_ms += gap_ms
        if step in {"request", "burst"}:
            for _ in range(60 if step == "burst" else 1):
                budgets.note_request(tenant, pool, now_ms, 0)
                first.append((now_ms, tenant, pool))
        elif step == "client retry":
            budgets.note_request(tenant, pool, now_ms, 2)
            again.append((now_ms, tenant, pool))
        elif step == "overloaded":
            assert not budgets.try_spend(tenant, pool, now_ms, is_pool_overloaded=True)
        else:
            for _ in range(12):
                if not budgets.try_spend(tenant, pool, now_ms, is_pool_overloaded=False):
                    break
                again.append((now_ms, tenant, pool))
                assert within(again, 1, tenant) <= 0.1 * within(first, 1, tenant) + 10
                assert within(again, 2, pool) <= 0.1 * within(first, 2, pool) + 3


@settings(max_examples=machine_examples(50))
@given(st.lists(st.tuples(GAP_MS, st.integers(1, 3)), max_size=60))
def test_a_window_never_misses_on_the_side_that_it_must_not(steps):
    more, less = Window(is_edge_counted=True), Window(is_edge_counted=False)
    now_ms, at = 0, []
    for gap_ms, times in steps:
        now_ms += gap_ms
        for _ in range(times):
            more.add(now_ms)
            less.add(now_ms)
            at.append(now_ms)
        exact = sum(1 for instant in at if instant > now_ms - WINDOW_MS)
        assert less.total <= exact <= more.total
        assert len(more._slices) <= WINDOW_MS // 100 + 2


@pytest.mark.parametrize("per_s", [10, 20, 50, 200])
def test_when_half_of_all_calls_fail_attempts_per_request_stay_below_the_bound(per_s):
    """Ten tenants with a pool in common, and clients that retry twice what failed at the door."""
    random, budgets = Random(7), RetryBudgets()
    attempts = requests = 0
    comes_back: dict[int, list[tuple[str, int]]] = {}
    for number in range(60 * per_s):
        now_ms = number * 1_000 // per_s
        arrivals = [(f"t{random.randrange(10)}", 0), *comes_back.pop(number, [])]
        for tenant, client_retries in arrivals:
            budgets.note_request(tenant, "m", now_ms, client_retries)
            requests += client_retries == 0
            attempts += 1
            tries = 0
            is_failed = random.random() < 0.5
            while (
                is_failed
                and tries < 2
                and budgets.try_spend(tenant, "m", now_ms, is_pool_overloaded=False)
            ):
                tries += 1
                attempts += 1
                is_failed = random.random() < 0.5
            if is_failed and client_retries == 0 and random.random() < 0.02:
                # Most clients are told not to come back; a few do all the same.
                comes_back.setdefault(number + 2 * per_s, []).append((tenant, 1))
    assert attempts / requests <= 1.15, attempts / requests


def test_a_busy_tenant_gets_a_tenth():
    budget = RetryBudget(TENANT_RULES)
    for number in range(1_000):
        budget.note_request(number)
    allowed = sum(budget.try_spend(1_000) for _ in range(1_000))
    assert allowed == 110


def test_a_quiet_tenant_may_retry_once_a_second_and_a_quiet_pool_three_times_in_ten():
    for rules, free in ((TENANT_RULES, 10), (POOL_RULES, 3)):
        budget = RetryBudget(rules)
        assert sum(budget.try_spend(0) for _ in range(20)) == free


def test_the_budget_comes_back_when_the_window_has_passed():
    budget = RetryBudget()
    assert sum(budget.try_spend(0) for _ in range(20)) == 10
    assert not budget.try_spend(9_999)
    assert budget.try_spend(10_200)


def test_a_client_that_repeats_itself_spends_whether_or_not_there_is_room():
    budgets = RetryBudgets()
    for _ in range(50):
        budgets.note_request("a", "m", 0, 1)
    assert not budgets.try_spend("b", "m", 0, is_pool_overloaded=False), "the pool's is spent"
    assert not budgets.try_spend("a", "n", 0, is_pool_overloaded=False), "the tenant's is spent"
    assert budgets.try_spend("b", "n", 0, is_pool_overloaded=False)


def test_a_refused_retry_costs_the_other_budget_nothing():
    budgets = RetryBudgets()
    for _ in range(3):
        assert budgets.try_spend("a", "m", 0, is_pool_overloaded=False)
    for _ in range(100):
        assert not budgets.try_spend("a", "m", 0, is_pool_overloaded=False)
    assert sum(budgets.try_spend("a", "n", 0, is_pool_overloaded=False) for _ in range(9)) == 3


def test_a_bounded_number_of_budgets_is_kept_and_the_quietest_goes():
    budgets = RetryBudgets(tenants_kept=2, pools_kept=1)
    for _ in range(11):
        budgets.note_request("a", "m", 0, 1)
    budgets.note_request("b", "m", 0, 0)
    budgets.note_request("a", "m", 0, 0)
    budgets.note_request("c", "m", 0, 0)
    assert len(budgets._tenants._budgets) == 2
    assert not budgets.try_spend("a", "fresh", 0, is_pool_overloaded=False), "a is remembered"
    assert len(budgets._pools._budgets) == 1


def test_memory_of_a_retry_budget_does_not_grow_with_traffic():
    budget = RetryBudget()
    for number in range(50_000):
        budget.note_request(number)
    assert len(budget._requests._slices) <= WINDOW_MS // 100 + 1
