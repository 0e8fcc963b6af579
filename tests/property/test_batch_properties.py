"""Joint placement against searches over everything: of assignments, and of orders of real placements."""

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement
from controlplane.scheduler.batch import ARCS_MAX, Asked, assign, place_jointly
from controlplane.scheduler.place import place, still_fits
from tests.decision_builders import NOW_MS, call, engine_row

COST = st.one_of(st.integers(0, 9).map(float), st.just(inf))


@st.composite
def problems(draw):
    columns = draw(st.integers(1, 4))
    costs = draw(
        st.lists(st.lists(COST, min_size=columns, max_size=columns), min_size=0, max_size=4)
    )
    seats = draw(st.lists(st.integers(0, 2), min_size=columns, max_size=columns))
    crowding = draw(
        st.none() | st.lists(st.integers(0, 5).map(float), min_size=columns, max_size=columns)
    )
    return costs, seats, crowding


def total(costs, crowding, columns):
    """Dollars of an assignment: each further call in a column is dearer by its crowding."""
    taken = [column for column in columns if column is not None]
    base = sum(costs[at][column] for at, column in enumerate(columns) if column is not None)
    each = [taken.count(column) for column in range(len(crowding or ()))]
    return base + sum(n * (n - 1) / 2 * more for n, more in zip(each, crowding or (), strict=True))


def every_assignment(costs, seats):
    for columns in product([None, *range(len(seats))], repeat=len(costs)):
        if any(columns.count(at) > most for at, most in enumerate(seats)):
            continue
        if all(at is None or costs[n][at] < inf for n, at in enumerate(columns)):
            yield columns


def seats_first(columns):
    """Who has a seat, earlier calls counting for more than all later ones."""
    return tuple(at is not None for at in columns)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_assignment_is_the_best_of_all(problem):
    costs, seats, crowding = problem
    found = assign(costs, seats, crowding)
    best = max(
        every_assignment(costs, seats),
        key=lambda columns: (seats_first(columns), -total(costs, crowding, columns)),
    )
    assert tuple(found) in set(every_assignment(costs, seats))
    assert seats_first(found) == seats_first(best)
    assert total(costs, crowding, found) == pytest.approx(total(costs, crowding, best), abs=0.01)


def test_the_only_good_seat_is_left_to_whom_it_matters():
    # One after the other: 1 and 10. Together: 2 and 2.
    assert assign([[1.0, 2.0], [2.0, 10.0]], [1, 1]) == [1, 0]


def test_a_call_that_finds_no_seat_keeps_nobody_else_from_one():
    costs = [[1.0, 2.0, inf], [inf, inf, 1.0], [inf, inf, 1.0], [1.0, inf, inf]]
    assert assign(costs, [1, 1, 1]) == [1, 2, None, 0]


def test_keeping_the_cheapest_engines_only_costs_nobody_a_seat():
    columns = ARCS_MAX
    costs = [[float(at) for at in range(columns)] for _ in range(60)]
    found = assign(costs, [1] * columns)
    assert sorted(found) == list(range(60))


# ---------------------------------------------------------------- calls and engines


def a_fleet(random):
    rows = []
    for index in range(random.randint(1, 4)):
        role = random.choice([Role.BOTH, Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE])
        rows.append(
            engine_row(
                index,
                role=role,
                micro_usd_per_ms=random.choice([0.5, 1.0, 3.0]),
                decode_ms_base=random.choice([10.0, 40.0]),
                seats_lent=random.choice([1, 1, 2]),
                seats_taken=random.choice([0, 0, 1]),
                kv_tokens_lent=random.choice([3_000, 100_000]),
                flows_micro_usd_per_s=random.choice([0.0, 500.0]),
            )
        )
    return rows


def some_calls(random, rows):
    asked = []
    for number in range(random.randint(1, 4)):
        request = call(
            id=f"req-{number}",
            tenant=random.choice(["acme", "zoo"]),
            prompt_tokens=random.choice([100, 1_000, 2_500]),
            weight=random.choice([1.0, 4.0]),
            deadline_ms=NOW_MS + random.choice([1_000, 60_000]),
            workflow_deadline_ms=NOW_MS + random.choice([1_000, 60_000]),
            regions=random.choice([1, 1, 1, 2]),
        )
        cached = {
            row.index: request.prompt_tokens * 9 // 10 for row in rows if random.random() < 0.3
        }
        asked.append(Asked(request, cached))
    return asked


def commit(request, placement):
    """Take the credits as the live fleet does; the sums of flows follow the placement's own."""
    assert still_fits(request, placement, NOW_MS)
    placement.decode.seats_taken += 1
    placement.decode.kv_tokens_taken += placement.kv_tokens
    if placement.prefill is not None:
        placement.prefill.seats_taken += 1
        placement.prefill.kv_tokens_taken += request.prompt_tokens


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_together_is_never_worse_than_one_by_one_and_can_be_committed(seed):
    random = Random(seed)
    rows = a_fleet(random)
    asked = some_calls(random, rows)
    before = [row.dynamic() for row in rows]
    joint = place_jointly(asked, rows, NOW_MS)
    assert [row.dynamic() for row in rows] == before, "weighing changes nothing"
    placed = tuple(isinstance(outcome, Placement) for outcome in joint.outcomes)

    # One by one, each alone on rows that the ones before have taken from.
    alone = [row.as_of(row.dynamic()) for row in rows]
    greedy = []
    for each in asked:
        outcome = place(each.request, alone, each.cached, NOW_MS)
        greedy.append(isinstance(outcome, Placement))
        if isinstance(outcome, Placement):
            commit(each.request, outcome)
    assert placed >= tuple(greedy)
    if not joint.is_joint:
        assert joint.gain_micro_usd == 0
        assert joint.placed_more == 0
    elif placed == tuple(greedy):
        assert joint.gain_micro_usd > 0
    for each, outcome in zip(asked, joint.outcomes, strict=True):
        if isinstance(outcome, Placement):
            assert outcome.decode in rows
            commit(each.request, outcome)


def test_two_calls_share_out_two_engines_at_the_least_cost_in_all():
    """The first is a little cheaper where the second has all of its prompt."""
    rows = [engine_row(0, seats_lent=1), engine_row(1, seats_lent=1, micro_usd_per_ms=1.05)]
    asked = [
        Asked(call(id="a"), {}),
        Asked(call(id="b", prompt_tokens=20_000, is_single_engine=True), {0: 19_000}),
    ]
    alone = place(asked[0].request, rows, {}, NOW_MS)
    assert isinstance(alone, Placement)
    assert alone.decode.index == 0
    joint = place_jointly(asked, rows, NOW_MS)
    assert joint.is_joint
    assert [outcome.decode.index for outcome in joint.outcomes] == [1, 0]
    assert joint.gain_micro_usd > 1_000
    assert joint.cost_micro_usd == pytest.approx(
        sum(outcome.cost_micro_usd for outcome in joint.outcomes)
    )


def test_a_seat_more_is_found_by_moving_the_first_call():
    near = engine_row(0, seats_lent=1)
    far = engine_row(1, seats_lent=1, region_bit=2, micro_usd_per_ms=1.1)
    asked = [Asked(call(id="a"), {}), Asked(call(id="b", regions=1), {})]
    joint = place_jointly(asked, [near, far], NOW_MS)
    assert joint.placed_more == 1
    assert [outcome.decode.index for outcome in joint.outcomes] == [1, 0]


def test_pairs_are_weighed_too_and_their_prefill_engine_is_not_taken_twice():
    rows = [
        engine_row(0, role=Role.PREFILL, micro_usd_per_ms=0.1, seats_lent=1),
        engine_row(1, role=Role.DECODE),
        engine_row(2, role=Role.DECODE),
    ]
    joint = place_jointly([Asked(call(id="a"), {}), Asked(call(id="b"), {})], rows, NOW_MS)
    assert [outcome.prefill is not None for outcome in joint.outcomes].count(True) == 1
    assert {outcome.decode.index for outcome in joint.outcomes} == {1, 2}


def test_a_tenant_under_its_floor_comes_first():
    row = engine_row(0, seats_lent=1)
    asked = [
        Asked(call(id="a", tenant="big"), {}),
        Asked(call(id="b", tenant="small"), {}),
    ]
    first, second = place_jointly(asked, [row], NOW_MS).outcomes
    assert isinstance(first, Placement)
    assert not isinstance(second, Placement)
    first, second = place_jointly(asked, [row], NOW_MS, floors={"small": 1}).outcomes
    assert not isinstance(first, Placement)
    assert isinstance(second, Placement)


def test_more_calls_than_are_weighed_together_are_all_answered():
    rows = [engine_row(index, seats_lent=8) for index in range(20)]
    asked = [Asked(replace(call(), id=f"req-{number}"), {}) for number in range(100)]
    joint = place_jointly(asked, rows, NOW_MS)
    assert all(isinstance(outcome, Placement) for outcome in joint.outcomes)
