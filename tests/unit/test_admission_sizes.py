"""What deadlines tell of sizes, learned from workflows that ended."""

from math import exp
from random import Random

import pytest

from controlplane.admission.sizes import ENDED_MIN, LINES_MAX, Sizes
from controlplane.admission.tabs import KEPT_MS, TABS_MAX, Tab, Tabs
from controlplane.domain.catalog import Scope


def learned(pairs, tenant="a", priority=5, tolerance=3.0):
    sizes = Sizes()
    for given_ms, work_ms in pairs:
        sizes.learn(
            tenant, Scope.AUTONOMOUS, priority, given_ms=given_ms, tokens=1.0, work_ms=work_ms,
            tolerance=tolerance,
        )  # fmt: skip
    return sizes


def of(sizes, given_ms, tenant="a", scope=Scope.AUTONOMOUS, priority=5, tokens=1.0):
    return sizes.of(tenant, scope, priority, given_ms=given_ms, tokens=tokens)


def test_nothing_is_told_before_enough_have_ended():
    sizes = learned([(1_000, 100)] * (ENDED_MIN - 1))
    assert of(sizes, 1_000) is None
    sizes = learned([(1_000, 100)] * (2 * ENDED_MIN))
    assert of(sizes, 1_000).work_ms == pytest.approx(100)


def test_deadlines_that_go_with_sizes_tell_them():
    random = Random(1)
    pairs = [(3 * work, work) for work in (exp(random.uniform(4, 10)) for _ in range(400))]
    sizes = learned(pairs)
    for work_ms in (200.0, 2_000.0, 15_000.0):
        found = of(sizes, 3 * work_ms)
        assert found.work_ms == pytest.approx(work_ms, rel=0.25)
        assert found.tolerance == pytest.approx(3.0, rel=0.05)
        assert found.slack_ms == pytest.approx(2 * found.work_ms, rel=0.1)


def test_deadlines_that_say_nothing_leave_the_mean():
    """With one deadline for all, and with deadlines drawn apart from the work."""
    random = Random(2)
    works = [exp(random.gauss(6.0, 1.0)) for _ in range(600)]
    mean = sum(works[-300:]) / 300
    same = learned([(10_000, work) for work in works])
    assert of(same, 10_000).work_ms == pytest.approx(mean, rel=0.35)
    drawn = learned([(exp(random.uniform(7, 10)), work) for work in works])
    low, high = of(drawn, exp(7)).work_ms, of(drawn, exp(10)).work_ms
    assert 0.4 < low / high < 2.5


def test_what_is_expected_of_a_lone_call_counts():
    sizes = Sizes()
    for tokens in (100.0, 200.0, 400.0) * 10:
        sizes.learn(
            "a", Scope.CHAT, 5, given_ms=5_000, tokens=tokens, work_ms=12 * tokens, tolerance=2.0
        )
    assert of(sizes, 5_000, scope=Scope.CHAT, tokens=1_000.0).work_ms == pytest.approx(12_000)


def test_a_stranger_is_taken_for_one_of_its_priority_then_for_anyone():
    sizes = learned([(1_000, 100)] * 20, tenant="a", priority=9)
    for _ in range(20):
        sizes.learn("b", Scope.AUTONOMOUS, 2, given_ms=1_000, tokens=1, work_ms=900, tolerance=9.0)
    assert of(sizes, 1_000, tenant="new", priority=9).work_ms == pytest.approx(100)
    assert of(sizes, 1_000, tenant="new", priority=2).work_ms == pytest.approx(900)
    assert 100 < of(sizes, 1_000, tenant="new", priority=5).work_ms < 900


def test_lines_are_bounded():
    sizes = Sizes()
    for number in range(LINES_MAX + 50):
        sizes.learn(f"t{number}", Scope.CHAT, 5, given_ms=1_000, tokens=1, work_ms=1, tolerance=1)
    assert len(sizes._lines) <= LINES_MAX


def tab(deadline_ms):
    return Tab(
        tenant="a", scope=Scope.CHAT, priority=5, begun_ms=0, deadline_ms=deadline_ms, tokens=1.0,
        is_urgent=False,
    )  # fmt: skip


def test_tabs_that_nobody_closes_are_forgotten():
    tabs = Tabs()
    tabs.open("w1", tab(1_000))
    tabs.open("w2", tab(90_000))
    tabs.tick(1_000 + KEPT_MS)
    assert len(tabs) == 2
    tabs.tick(1_001 + KEPT_MS)
    assert tabs.get("w1") is None
    assert tabs.close("w2") is not None
    assert tabs.close("w2") is None
    for number in range(TABS_MAX + 1):
        tabs.open(str(number), tab(1))
    assert len(tabs) == TABS_MAX
