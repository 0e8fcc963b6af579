"""The experiment on the choice of model: its tasks are the published ones, and it plays fair."""

from dataclasses import replace

import pytest

from cli.simulate.model_choice import (
    DEFAULTS,
    LADDER,
    MODELS,
    DrawnTask,
    class_of,
    drawn_task,
    play_fixed,
    play_learned,
    play_oracle,
    run,
)

# Success, dollars a task: published runs of 500 tasks, and what ladders of them come to.
PUBLISHED = {
    (0,): (0.598, 0.035),
    (1,): (0.650, 0.280),
    (2,): (0.648, 0.371),
    (3,): (0.706, 0.558),
    (0, 1): (0.706, 0.136),
    (0, 3): (0.756, 0.249),
    (0, 1, 2): (0.756, 0.233),
    (0, 1, 2, 3): (0.794, 0.359),
}
TASKS = 20_000


@pytest.fixture(scope="module")
def tasks() -> list[DrawnTask]:
    return [drawn_task(1, number) for number in range(TASKS)]


@pytest.mark.parametrize("rungs", PUBLISHED)
def test_drawn_tasks_are_like_the_published(rungs: tuple[int, ...], tasks: list[DrawnTask]) -> None:
    """Within what 20,000 tasks of a binomial allow, and the fit of a few thousandths."""
    success, usd = PUBLISHED[rungs]
    played = play_fixed(tuple(LADDER[rung] for rung in rungs), tasks)
    assert played.successes / TASKS == pytest.approx(success, abs=0.012)
    assert played.usd / TASKS == pytest.approx(usd, rel=0.03)


def test_the_oracle_was_not_fitted_and_agrees(tasks: list[DrawnTask]) -> None:
    """Published: .081 a task at .794, known beforehand."""
    played = play_oracle(tasks)
    assert played.successes / TASKS == pytest.approx(0.794, abs=0.012)
    # The cheapest in dollars that were drawn, not in dollars on average, is a little cheaper.
    assert 0.070 < played.usd / TASKS < 0.083


def test_dollars_of_all_difficulties_are_the_published_mean() -> None:
    steps = 4_000
    for model in MODELS:
        success = usd = 0.0
        for step in range(steps):
            difficulty = -6.0 + 12.0 * (step + 0.5) / steps
            weight = 2.718281828459045 ** (-difficulty * difficulty / 2.0) / 2.5066282746310002
            weight *= 12.0 / steps
            ratio = model.success_at(difficulty)
            success += weight * ratio
            usd += weight * ratio * model.usd_at(difficulty, is_success=True)
            usd += weight * (1.0 - ratio) * model.usd_at(difficulty, is_success=False)
        assert success == pytest.approx(model.success_ratio, abs=1e-3)
        assert usd == pytest.approx(model.usd, rel=1e-3)


def test_the_learner_hears_only_of_what_it_tried() -> None:
    """Worlds that differ in models it is not told of are the same to it."""
    choice_class = replace(class_of(DEFAULTS[0]), ladder=LADDER[:2], tries_max=2)
    tasks = [drawn_task(7, number) for number in range(200)]
    others = [
        DrawnTask(
            {**task.is_success, LADDER[2]: True, LADDER[3]: True},
            {**task.usd, LADDER[2]: 0.0, LADDER[3]: 0.0},
        )
        for task in tasks
    ]
    first = play_learned(choice_class, tasks, 7)
    assert first == play_learned(choice_class, others, 7)
    assert len(first.spent_usd) == 200
    assert first.tries > 200


def test_learned_from_nothing_it_beats_the_default_and_succeeds_as_often() -> None:
    document = run((1,), tasks_count=600)
    for default in DEFAULTS:
        of_default = {
            cell["policy"]: cell
            for cell in document["cells"]
            if cell["workload"] == f"swe, default {default}"
        }
        learned, plain = of_default["headway"], of_default[f"always {default}"]
        assert plain["cpst_ratio_to_best_baseline"]["median"] == 1.0
        assert learned["cpst_ratio_to_best_baseline"]["median"] < 0.85
        assert learned["success_ratio"] > plain["success_ratio"] - 0.02
        assert learned["regret_usd"][-1]["tasks"] == 600
        # Nobody who holds the floor is cheaper than who knows beforehand.
        bound = document["bounds"][f"swe, default {default}"]
        assert {"headway", f"always {default}", "oracle"} <= set(bound["distance"])
        assert all(distance >= 0.0 for distance in bound["distance"].values())


def test_the_same_seeds_give_the_same_document() -> None:
    assert run((3,), tasks_count=60) == run((3,), tasks_count=60)
