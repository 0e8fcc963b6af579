"""Models by outcomes: beliefs against exact posteriors, chains against enumeration, the floor, and the saving."""

from itertools import accumulate, product
from math import exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.ids import ModelName
from controlplane.scheduler.model_choice import (
    DRAWS,
    FIRST_PRIOR,
    HALF_LIFE_S,
    RETRY_PRIOR,
    VARIATION_MIN,
    Beliefs,
    Choice,
    ChoiceClass,
    Evidence,
    Failed,
    Task,
    Why,
    advise,
    affordable,
    beliefs_of,
    choose,
    evidence_of,
    failed_of,
    fixed_rung,
    saving_of,
)

SMALL, MIDDLE, LARGE = ModelName("small"), ModelName("middle"), ModelName("large")
LADDER = (SMALL, MIDDLE, LARGE)
PRICES = {SMALL: 1.0, MIDDLE: 4.0, LARGE: 10.0}
EVERY = frozenset(LADDER)
KNOWN = 10_000.0

Book = dict[tuple[Failed, ModelName], Evidence]


def tried(
    tries: float, success_ratio: float, usd: float = 1.0, *, climbable: float = 0.0
) -> Evidence:
    """So many tries, all of the same dollars."""
    return Evidence(
        tries=tries,
        successes=tries * success_ratio,
        reported=tries,
        climbable=climbable,
        spent_micro_usd=tries * usd,
        spent_squared=tries * usd * usd,
        seconds=tries * 60.0,
    )


def a_class(**changes: object) -> ChoiceClass:
    members: dict[str, object] = {
        "name": "auto:task", "ladder": LADDER, "default": LARGE, "explore_ratio": 0.0,
        "holdout_ratio": 0.0, "success_floor_ratio": 0.0, "margin_ratio": 0.0,
    }  # fmt: skip
    return ChoiceClass(**{**members, **changes})  # type: ignore[arg-type]


def chosen(beliefs: Beliefs, workflow: str = "w", failed: Failed = ()) -> Choice:
    return choose(beliefs, tenant="t", workflow=workflow, failed=failed, usable=EVERY)


# ---------------------------------------------------------------- beliefs


def beta_weights(first: float, second: float, points: int) -> list[float]:
    """A Beta on a grid, by its density."""
    weights = []
    for at in range(points):
        p = (at + 0.5) / points
        weights.append(p ** (first - 1.0) * (1.0 - p) ** (second - 1.0))
    total = sum(weights)
    return [weight / total for weight in weights]


def gamma_grid(shape: float, points: int) -> list[tuple[float, float]]:
    """A Gamma of mean 1 on a grid of four deviations to each side, by its density."""
    deviation = 1.0 / sqrt(shape)
    values = [1.0 + deviation * 4.0 * (2.0 * (at + 0.5) / points - 1.0) for at in range(points)]
    weights = [value ** (shape - 1.0) * exp(-shape * (value - 1.0)) for value in values]
    total = sum(weights)
    return [(value, weight / total) for value, weight in zip(values, weights, strict=True)]


def test_propensities_are_the_exact_posterior() -> None:
    """The chance that one of two models has the fewer dollars for a success, summed over a grid."""
    book: Book = {((), SMALL): tried(7, 3 / 7, 1e6), ((), LARGE): tried(9, 6 / 9, 1.5e6)}
    points = 200
    small = beta_weights(FIRST_PRIOR[0] + 3, FIRST_PRIOR[1] + 4, points)
    large = beta_weights(FIRST_PRIOR[0] + 6, FIRST_PRIOR[1] + 3, points)
    # Every try cost the same: the least spread that is believed, over tries and the guess's one.
    shapes = (8 / VARIATION_MIN, 10 / VARIATION_MIN)
    price_of_small = (7 * 1e6 + 1.5e6) / 8
    larges = list(accumulate(large, initial=0.0))
    exact = 0.0
    for small_usd, small_weight in gamma_grid(shapes[0], 16):
        for large_usd, large_weight in gamma_grid(shapes[1], 16):
            worth = 1.5e6 * large_usd / (price_of_small * small_usd)
            exact += (
                small_weight
                * large_weight
                * sum(
                    weight * larges[min(points, round((at + 0.5) * worth))]
                    for at, weight in enumerate(small)
                )
            )
    choice_class = a_class(ladder=(SMALL, LARGE), tries_max=1, outcomes_min=1)
    seeds = 80
    found = 0.0
    for seed in range(seeds):
        beliefs = beliefs_of(choice_class, {}, book, seed)
        found += dict(chosen(beliefs).propensities).get(SMALL, 0.0) / seeds
    assert found == pytest.approx(exact, abs=4.0 * sqrt(exact * (1.0 - exact) / (DRAWS * seeds)))


def test_samples_of_chains_are_what_enumeration_says() -> None:
    """With much evidence a chain comes to the sum over all ways in which its tries can end."""
    rates = {
        ((), SMALL): (0.6, 1e6), (failed_of([SMALL]), MIDDLE): (0.3, 4e6),
        (failed_of([SMALL, MIDDLE]), LARGE): (0.2, 9e6), ((), MIDDLE): (0.65, 5e6),
        ((), LARGE): (0.68, 10e6), (failed_of([SMALL]), LARGE): (0.35, 9e6),
        (failed_of([MIDDLE]), LARGE): (0.25, 9e6),
    }  # fmt: skip
    book: Book = {key: tried(1e7, ratio, usd) for key, (ratio, usd) in rates.items()}
    beliefs = beliefs_of(a_class(), PRICES, book, 1)
    # Everybody tries again: nothing is climbable that was not climbed.
    assert beliefs.follow_ratio > 0.999999
    for at, chain in enumerate(beliefs.chains):
        success = dollars = 0.0
        for ends in product((True, False), repeat=len(chain)):
            weight, spent = 1.0, 0.0
            for place, is_won in enumerate(ends):
                ratio, usd = rates[failed_of(chain[:place]), chain[place]]
                weight *= ratio if is_won else 1.0 - ratio
                if not any(ends[:place]):
                    spent += usd
            success += weight * any(ends)
            dollars += weight * spent
        assert sum(beliefs.success[at]) / DRAWS == pytest.approx(success, abs=2e-3), chain
        assert sum(beliefs.dollars[at]) / DRAWS == pytest.approx(dollars, rel=2e-3), chain


def test_little_evidence_spreads_and_much_does_not() -> None:
    def spread(tries: float) -> float:
        book: Book = {((), SMALL): tried(tries, 0.5)}
        values = beliefs_of(a_class(), PRICES, book, 3).success[0]
        mean = sum(values) / DRAWS
        return sqrt(sum((value - mean) ** 2 for value in values) / DRAWS)

    for tries in (8, 200):
        exact = sqrt(0.25 / (tries + 3.0))
        assert spread(tries) == pytest.approx(exact, rel=0.35)


@pytest.mark.parametrize(("tries", "success_ratio"), [(0, 0.0), (1, 1.0), (4, 0.25)])
def test_samples_have_the_mean_and_variance_of_their_beta(tries: int, success_ratio: float) -> None:
    choice_class = a_class(ladder=(SMALL, LARGE), tries_max=1)
    book: Book = {((), SMALL): tried(tries, success_ratio)}
    values = [
        value
        for seed in range(150)
        for value in beliefs_of(choice_class, {}, book, seed).success[0]
    ]
    wins, losses = 1.0 + tries * success_ratio, 1.0 + tries * (1.0 - success_ratio)
    mean = wins / (wins + losses)
    variance = mean * (1.0 - mean) / (wins + losses + 1.0)
    found = sum(values) / len(values)
    assert found == pytest.approx(mean, abs=4.0 * sqrt(variance / len(values)))
    assert sum((value - found) ** 2 for value in values) / len(values) == pytest.approx(
        variance, rel=0.06
    )


def test_the_same_names_give_the_same_choice() -> None:
    book: Book = {((), SMALL): tried(30, 0.5), ((), LARGE): tried(30, 0.6, 10.0)}
    choice_class = a_class(explore_ratio=0.3, holdout_ratio=0.1)
    first, second = (beliefs_of(choice_class, PRICES, dict(book), 9) for _ in range(2))
    for number in range(50):
        assert chosen(first, f"w{number}") == chosen(second, f"w{number}")


# ---------------------------------------------------------------- choosing


def test_how_often_a_model_is_chosen_is_its_propensity() -> None:
    book: Book = {
        ((), SMALL): tried(12, 0.5, 1e6), ((), MIDDLE): tried(12, 0.55, 1.2e6),
        ((), LARGE): tried(40, 0.7, 2e6),
    }  # fmt: skip
    choice_class = a_class(
        explore_ratio=0.3, holdout_ratio=0.1, outcomes_min=10, success_floor_ratio=0.45
    )
    beliefs = beliefs_of(choice_class, PRICES, book, 5)
    propensities = dict(chosen(beliefs).propensities)
    assert sum(propensities.values()) == pytest.approx(1.0)
    count = 6_000
    found = dict.fromkeys(LADDER, 0)
    for number in range(count):
        choice = chosen(beliefs, f"w{number}")
        found[choice.model] += 1
        assert choice.propensity == pytest.approx(propensities[choice.model])
        assert choice.default_propensity == pytest.approx(propensities[LARGE])
        assert choice.chain[0] == choice.model
    for model in LADDER:
        expected = propensities.get(model, 0.0)
        assert found[model] / count == pytest.approx(
            expected, abs=4.5 * sqrt(max(expected, 1e-3) * (1.0 - expected) / count)
        )
    assert len([share for share in propensities.values() if share > 0.05]) >= 2


def test_thin_evidence_leaves_the_default_and_is_not_explored_when_told_so() -> None:
    book: Book = {((), SMALL): tried(19, 0.9, 1.0), ((), LARGE): tried(5, 0.5, 10.0)}
    beliefs = beliefs_of(a_class(), PRICES, book, 1)
    assert chosen(beliefs).model == LARGE
    assert chosen(beliefs).why is Why.THIN_EVIDENCE
    assert dict(chosen(beliefs).propensities) == {LARGE: 1.0}
    enough: Book = {**book, ((), SMALL): tried(20, 0.9, 1.0)}
    assert chosen(beliefs_of(a_class(), PRICES, enough, 1)).model == SMALL
    # Outcomes that nobody reported are none.
    silent = Evidence(tries=500, successes=0, reported=0)
    assert chosen(beliefs_of(a_class(), PRICES, {((), SMALL): silent}, 1)).model == LARGE


@given(
    rates=st.tuples(*[st.sampled_from([0.2, 0.4, 0.5, 0.6, 0.8, 0.95])] * 3),
    tries=st.tuples(*[st.sampled_from([20, 60, 400])] * 3),
    floor=st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    seed=st.integers(0, 1_000),
)
def test_what_is_learned_holds_the_floor_with_confidence(
    rates: tuple[float, ...], tries: tuple[int, ...], floor: float, seed: int
) -> None:
    """Of the rate that the evidence allows, sampled apart with a generator of its own."""
    book: Book = {
        ((), model): tried(count, rate, price)
        for model, count, rate, price in zip(LADDER, tries, rates, (1.0, 4.0, 10.0), strict=True)
    }
    choice_class = a_class(success_floor_ratio=floor, tries_max=1)
    choice = chosen(beliefs_of(choice_class, PRICES, book, seed), f"w{seed}")
    if choice.why is Why.FLOOR_OUT_OF_REACH:
        assert choice.model == LARGE
        return
    entry = book[(), choice.model]
    random = Random(seed)
    wins, losses = 1.0 + entry.successes, 1.0 + entry.tries - entry.successes
    samples = 2_000
    above = sum(random.betavariate(wins, losses) >= floor for _ in range(samples)) / samples
    # The choice sees DRAWS samples: allow for their number.
    assert above >= 0.9 - 3.5 * sqrt(0.09 / DRAWS)


def test_a_chain_to_the_default_needs_no_proof_while_failures_are_tried_again() -> None:
    """A task that the default does alone is done when the chain comes to it."""
    book: Book = {
        ((), SMALL): tried(20, 0.5, 1.0, climbable=10.0),
        (failed_of([SMALL]), LARGE): tried(10, 0.1, 10.0),
        ((), LARGE): tried(60, 0.65, 10.0),
    }
    choice_class = a_class(success_floor_ratio=None, margin_ratio=0.05)
    beliefs = beliefs_of(choice_class, PRICES, book, 2)
    holds = dict(zip(beliefs.chains, beliefs.holds_ratio, strict=True))
    assert holds[SMALL, LARGE] > 0.9
    assert holds[SMALL,] < 0.2
    assert holds[LARGE,] == 1.0
    # Of ten failures nobody tried again: then the first model has to hold the floor.
    alone: Book = {key: entry for key, entry in book.items() if not key[0]}
    left = beliefs_of(choice_class, PRICES, alone, 2)
    assert dict(zip(left.chains, left.holds_ratio, strict=True))[SMALL, LARGE] < 0.5


def test_a_failure_climbs_and_the_top_stays() -> None:
    book: Book = {((), model): tried(KNOWN, 0.5, PRICES[model]) for model in LADDER}
    beliefs = beliefs_of(a_class(), PRICES, book, 4)
    second = chosen(beliefs, failed=failed_of([SMALL]))
    assert second.why is Why.CLIMBED
    assert second.model in (MIDDLE, LARGE)
    third = chosen(beliefs, failed=failed_of([SMALL, MIDDLE]))
    assert third.model == LARGE
    fourth = chosen(beliefs, failed=failed_of(LADDER))
    assert (fourth.model, fourth.why) == (LARGE, Why.TOP_OF_LADDER)
    assert advise(beliefs, failed_of(LADDER), EVERY) is None


def test_advice_says_whether_another_try_pays() -> None:
    cheap: Book = {
        ((), SMALL): tried(KNOWN, 0.5, 1.0), ((), LARGE): tried(KNOWN, 0.55, 40.0),
        (failed_of([SMALL]), MIDDLE): tried(KNOWN, 0.6, 1.0),
        (failed_of([SMALL]), LARGE): tried(KNOWN, 0.2, 40.0),
    }  # fmt: skip
    advice = advise(beliefs_of(a_class(), PRICES, cheap, 1), failed_of([SMALL]), EVERY)
    assert advice is not None
    assert (advice.model, advice.is_advised) == (MIDDLE, True)
    assert advice.success_ratio == pytest.approx(0.6, abs=0.01)
    dear: Book = {**cheap, (failed_of([SMALL]), MIDDLE): tried(KNOWN, 0.01, 30.0)}
    advice = advise(beliefs_of(a_class(), PRICES, dear, 1), failed_of([SMALL]), EVERY)
    assert advice is not None
    assert not advice.is_advised
    # Below the floor another try is advised whatever it costs.
    floor = a_class(success_floor_ratio=0.55)
    advice = advise(beliefs_of(floor, PRICES, dear, 1), failed_of([SMALL]), EVERY)
    assert advice is not None
    assert advice.is_advised


def test_what_can_not_be_paid_or_awaited_is_left_out() -> None:
    book: Book = {((), SMALL): tried(5, 0.5, 1e6), ((), LARGE): tried(5, 0.5, 10e6)}
    beliefs = beliefs_of(a_class(), PRICES, book, 1)
    # Of the middle one nothing is known: it may fit.
    assert affordable(beliefs, (), deadline_s=60, budget_micro_usd=2e6) == {SMALL, MIDDLE}
    assert affordable(beliefs, (), deadline_s=60, budget_micro_usd=None) == EVERY
    assert affordable(beliefs, (), deadline_s=59, budget_micro_usd=None) == {MIDDLE}
    choice = choose(
        beliefs, tenant="t", workflow="w", failed=failed_of([SMALL]), usable=frozenset({MIDDLE})
    )
    assert choice.model == MIDDLE


@pytest.mark.parametrize(
    ("failed", "usable", "model", "why"),
    [
        ((), EVERY, SMALL, Why.FIXED_LADDER),
        ((SMALL,), EVERY, MIDDLE, Why.FIXED_LADDER),
        ((MIDDLE, SMALL), EVERY, LARGE, Why.FIXED_LADDER),
        ((LARGE, MIDDLE, SMALL), EVERY, LARGE, Why.TOP_OF_LADDER),
        ((), frozenset({LARGE}), LARGE, Why.FIXED_LADDER),
        ((SMALL,), frozenset({SMALL}), SMALL, Why.TOP_OF_LADDER),
    ],
)
def test_a_ladder_is_climbed_rung_by_rung(
    failed: Failed, usable: frozenset[ModelName], model: ModelName, why: Why
) -> None:
    rung = fixed_rung(LADDER, failed, usable)
    assert rung is not None
    assert (rung.model, rung.why) == (model, why)
    assert fixed_rung(LADDER, failed, frozenset()) is None


def test_evidence_fades_by_half_and_adds_up() -> None:
    one = evidence_of(
        is_success=False, is_reported=True, can_climb=True, spent_micro_usd=30.0, seconds=4.0
    )
    two = evidence_of(
        is_success=True, is_reported=True, can_climb=True, spent_micro_usd=10.0, seconds=2.0
    )
    assert one.plus(two) == Evidence(
        tries=2.0, successes=1.0, reported=2.0, climbable=1.0, spent_micro_usd=40.0,
        spent_squared=1_000.0, seconds=6.0,
    )  # fmt: skip
    assert one.aged(HALF_LIFE_S).spent_micro_usd == pytest.approx(15.0)
    assert one.aged(-5.0) == one


def test_after_a_failure_the_prior_is_the_published_one() -> None:
    beliefs = beliefs_of(a_class(tries_max=2), PRICES, {}, 1)
    advice = advise(beliefs, failed_of([SMALL]), EVERY)
    assert advice is not None
    assert advice.success_ratio == pytest.approx(RETRY_PRIOR[0] / sum(RETRY_PRIOR))


# ---------------------------------------------------------------- the saving


def test_saving_of_a_hand_case() -> None:
    """Half of the tasks had the default, at $10 and 50 %; the others cost $2 and all succeed."""
    default = [
        Task(
            is_success=is_won, spent_micro_usd=10.0, is_default_first=True, default_propensity=0.5,
            is_first_success=is_won, first_spent_micro_usd=10.0,
        )
        for is_won in [True, False] * 10
    ]  # fmt: skip
    cheap = [
        Task(
            is_success=True, spent_micro_usd=2.0, is_default_first=False, default_propensity=0.5,
            is_first_success=True, first_spent_micro_usd=2.0,
        )
        for _ in range(20)
    ]  # fmt: skip
    saving = saving_of([*default, *cheap])
    assert saving is not None
    assert saving.cpst_default_micro_usd == pytest.approx(20.0)
    assert saving.cpst_micro_usd == pytest.approx((200.0 + 40.0) / 30.0)
    assert saving.saved_ratio == pytest.approx(1.0 - 8.0 / 20.0)
    assert saving.success_ratio == pytest.approx(0.75)
    assert saving.success_ratio_default == pytest.approx(0.5)
    assert saving.saved_ratio_low < saving.saved_ratio < saving.saved_ratio_high
    assert saving_of(cheap) is None
    assert saving_of(default[:4]) is None


def test_the_interval_of_a_saving_covers_the_truth() -> None:
    """Worlds in which the true saving is known: hard tasks have the default more often than easy ones."""
    # Propensity of the default, and how much easier its tasks are.
    kinds = ((0.1, 0.25), (0.3, 0.0), (0.6, -0.25))
    success = sum(
        easier + propensity * 0.6 + (1.0 - propensity) * 0.7 for propensity, easier in kinds
    ) / len(kinds)
    dollars = sum(propensity * 5.0 + (1.0 - propensity) for propensity, _ in kinds) / len(kinds)
    true_ratio = dollars / success / (5.0 / 0.6)
    covered = gains = 0
    worlds = 200
    for world in range(worlds):
        random = Random(world)
        tasks = []
        for _ in range(400):
            propensity, easier = random.choice(kinds)
            is_default = random.random() < propensity
            ratio, mean = (0.6, 5.0) if is_default else (0.7, 1.0)
            is_won = random.random() < ratio + easier
            spent = random.gammavariate(2.0, mean / 2.0)
            tasks.append(
                Task(
                    is_success=is_won, spent_micro_usd=spent, is_default_first=is_default,
                    default_propensity=propensity, is_first_success=is_won,
                    first_spent_micro_usd=spent,
                )
            )  # fmt: skip
        saving = saving_of(tasks)
        assert saving is not None
        covered += saving.saved_ratio_low <= 1.0 - true_ratio <= saving.saved_ratio_high
        gains += saving.success_gain_low <= success - 0.6 <= saving.success_gain_high
    # 95 % of 200 less four standard deviations.
    assert covered >= 177
    assert gains >= 177
