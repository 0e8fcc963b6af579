"""The working-set limit: binds when contexts thrash, never for the first one, and forgets who ended."""

from controlplane.admission import working_set
from controlplane.admission.working_set import FACTOR_MAX, FACTOR_MIN, WorkingSets


def test_a_pool_of_unknown_capacity_has_no_limit():
    sets = WorkingSets()
    assert sets.may_begin("m", 10**9)
    sets.begun("m", "w1", 10**9)
    assert sets.may_begin("m", 10**9)
    assert (sets.factor("other"), sets.live_tokens("other")) == (FACTOR_MAX, 0)
    sets.ended("other", "w1")
    sets.grew("other", "w1", 5)
    assert sets.live_tokens("other") == 0


def test_live_contexts_may_exceed_the_memory_by_the_factor():
    sets = WorkingSets()
    sets.use_capacity("m", 1_000)
    assert sets.may_begin("m", 10**6), "the first one always may"
    sets.begun("m", "w1", 7_000)
    assert sets.may_begin("m", 1_000)
    assert not sets.may_begin("m", 1_001)
    sets.grew("m", "w1", 7_500)
    sets.grew("m", "w1", 100)
    sets.grew("m", "unknown", 100)
    assert sets.live_tokens("m") == 7_500
    assert not sets.may_begin("m", 501)
    sets.begun("m", "w1", 400)
    assert sets.live_tokens("m") == 400
    sets.ended("m", "w1")
    sets.ended("m", "w1")
    assert sets.live_tokens("m") == 0


def test_misses_shrink_the_factor_by_a_part_and_hits_let_it_grow_by_a_step():
    sets = WorkingSets()
    sets.use_capacity("m", 100_000)
    sets.observed("m", 24_000, 0)
    assert sets.factor("m") == FACTOR_MAX, "too little seen"
    sets.observed("m", 1_000, 0)
    assert sets.factor("m") == FACTOR_MAX * 0.8
    sets.observed("m", 25_000, 20_000)
    assert sets.factor("m") == FACTOR_MAX * 0.8 + 0.1
    for _ in range(100):
        sets.observed("m", 25_000, 19_999)
    assert sets.factor("m") == FACTOR_MIN
    for _ in range(100):
        sets.observed("m", 25_000, 30_000)
    assert sets.factor("m") == FACTOR_MAX


def test_workflows_that_are_never_ended_are_forgotten_in_the_end():
    sets = WorkingSets()
    for number in range(working_set.WORKFLOWS_MAX + 10):
        sets.begun("m", f"w{number}", 1)
    assert sets.live_tokens("m") == working_set.WORKFLOWS_MAX
    sets.ended("m", "w0")
    assert sets.live_tokens("m") == working_set.WORKFLOWS_MAX
