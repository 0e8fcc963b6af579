"""What admission promises under overload, in virtual time. Each bound has room for other seeds."""

import pytest

from tests.simulation.overload import World

SEEDS = (1, 2, 3, 4)


def results(**options):
    return [World(seed, **options).run() for seed in SEEDS]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_twice_the_load_costs_the_high_priority_nothing():
    overloaded = results(load=2.0)
    started = sum(result.started[True] for result in overloaded)
    succeeded = sum(result.succeeded[True] for result in overloaded)
    assert succeeded >= 0.995 * started


def test_twice_the_load_finishes_as_much_as_the_seats_can():
    at_capacity = mean(result.finished_per_s for result in results(load=1.0, is_gated=False))
    overloaded = results(load=2.0)
    assert mean(result.finished_per_s for result in overloaded) >= 0.95 * at_capacity
    assert mean(result.wasted_ratio for result in overloaded) <= 0.10
    assert mean(result.late_ratio for result in overloaded) < 0.05


def test_serving_everybody_by_arrival_wastes_most_of_it():
    # The world can tell good from bad: the same load without admission.
    served = results(load=2.0, is_gated=False)
    assert mean(result.wasted_ratio for result in served) >= 0.5
    assert mean(result.finished_per_s for result in served) <= 1.0


def test_who_comes_back_when_told_is_let_in():
    overloaded = results(load=2.0)
    told = sum(result.told for result in overloaded)
    assert told > 200
    assert sum(result.kept for result in overloaded) >= 0.8 * told


def test_the_lowest_class_still_finishes_something():
    assert min(result.success_ratio(is_high=False) for result in results(load=3.0)) > 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_refused_for_long_while_there_is_room(seed):
    result = World(seed, load=0.8).run()
    assert result.success_ratio(is_high=True) == 1.0
    assert result.success_ratio(is_high=False) >= 0.99


def test_lost_seats_come_back_without_a_lasting_collapse():
    halved = results(load=0.85, seconds=150, halved=(30_000, 90_000))
    whole = mean(result.finished_per_s for result in results(load=0.85, seconds=150))
    during = mean(result.finished_between(45_000, 90_000) for result in halved)
    after = mean(result.finished_between(100_000, 140_000) for result in halved)
    assert during >= 0.95 * whole / 0.85 / 2
    assert after >= 0.95 * whole
