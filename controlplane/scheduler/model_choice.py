"""Which model a task is given, learned from what tenants report of its kind: dollars per success, at a floor.

A task climbs a ladder of models: another try follows a try that was reported as failed. What is chosen
is a chain, the models tried until one succeeds. Beliefs are Beta for success and Gamma for mean dollars,
of each model after each set of models that failed before it: tasks that one model fails at are hard for
the others too. Knows no tenant's key, no store and no clock; chance is a hash of the names it is given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import cos, exp, log, pi, sqrt
from typing import Final

import xxhash

from controlplane.domain.ids import ModelName

LADDER_MAX: Final = 6
TRIES_MAX: Final = 4
# Samples of the beliefs. A choice's propensity is a multiple of one over this many.
DRAWS: Final = 64

# Nothing known of a model: every rate of success is as likely as any other (Bayes, Laplace).
FIRST_PRIOR: Final = (1.0, 1.0)
# After a failure the next model succeeds less often: .27 to .39 by the published runs of four models
# on SWE-bench Verified (500 tasks each, the benchmark's own site), which this is worth two tries of.
RETRY_PRIOR: Final = (0.6, 1.4)
# Who asks for a choice is told when to try again, and is taken to do so until it does not.
FOLLOW_PRIOR: Final = (4.0, 1.0)
# Weight of a guess at the dollars of a try, in tries.
GUESS_TRIES: Final = 1.0
# Squared coefficient of variation of a try's dollars: assumed of few tries, and bounded of many.
VARIATION_FIRST: Final = 1.0
VARIATION_MIN: Final = 0.05
VARIATION_MAX: Final = 4.0
VARIATION_TRIES_MIN: Final = 3.0
# A sampled mean stays within this factor of the observed one.
DOLLARS_FACTOR_MAX: Final = 4.0
# Evidence counts half as much after this time: models, prompts and tasks change.
HALF_LIFE_S: Final = 30 * 86_400.0
# Tries before a model's mean time and dollars may rule it out for a deadline or a budget.
AFFORD_TRIES_MIN: Final = 3.0
# Successful tasks that had the default model by chance, before a saving against it is told.
SAVING_SUCCESSES_MIN: Final = 5
NORMAL_95: Final = 1.959964

_UNIFORM: Final = 2.0**-53
_TINY: Final = 1e-12
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF

# Models that failed at a task, sorted by name.
Failed = tuple[ModelName, ...]
# Models in the order of the ladder, tried until one succeeds.
Chain = tuple[ModelName, ...]


class Why(StrEnum):
    """Why a workflow has its model. The value is the metric label and the word in `explain`."""

    LEARNED = "learned"
    EXPLORED = "explored"
    HELD_OUT = "held_out"
    THIN_EVIDENCE = "thin_evidence"
    FLOOR_OUT_OF_REACH = "floor_out_of_reach"
    CLIMBED = "climbed"
    TOP_OF_LADDER = "top_of_ladder"
    FIXED_LADDER = "fixed_ladder"
    NO_WORKFLOW = "no_workflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceClass:
    """One class of tasks. `ladder` has the cheapest model first and holds `default`.

    The floor of success is `success_floor_ratio`; None: what the default model alone reaches, less
    `margin_ratio`, below which a difference does not count. It is held with `confidence_ratio`. A
    model counts once `outcomes_min` outcomes of it were reported; `explore_ratio` of the tasks try
    what is not known yet, and `holdout_ratio` have the default, so that the saving can be measured
    and a change of the world be seen.
    """

    name: str
    ladder: Chain
    default: ModelName
    success_floor_ratio: float | None = None
    margin_ratio: float = 0.01
    confidence_ratio: float = 0.9
    outcomes_min: int = 20
    explore_ratio: float = 0.1
    holdout_ratio: float = 0.05
    tries_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Decayed sums over tries of one model. `reported` counts those whose outcome the tenant told,
    `climbable` failures after which the chain went on.
    """

    tries: float = 0.0
    successes: float = 0.0
    reported: float = 0.0
    climbable: float = 0.0
    spent_micro_usd: float = 0.0
    spent_squared: float = 0.0
    seconds: float = 0.0

    def plus(self, other: "Evidence") -> "Evidence":
        return Evidence(
            tries=self.tries + other.tries,
            successes=self.successes + other.successes,
            reported=self.reported + other.reported,
            climbable=self.climbable + other.climbable,
            spent_micro_usd=self.spent_micro_usd + other.spent_micro_usd,
            spent_squared=self.spent_squared + other.spent_squared,
            seconds=self.seconds + other.seconds,
        )

    def aged(self, age_s: float) -> "Evidence":
        """What it counts for `age_s` seconds later."""
        ratio = 0.5 ** (max(0.0, age_s) / HALF_LIFE_S)
        return Evidence(
            tries=self.tries * ratio,
            successes=self.successes * ratio,
            reported=self.reported * ratio,
            climbable=self.climbable * ratio,
            spent_micro_usd=self.spent_micro_usd * ratio,
            spent_squared=self.spent_squared * ratio,
            seconds=self.seconds * ratio,
        )


NOTHING: Final = Evidence()
# What is known of a (tenant, class): evidence of a model after models that failed before it.
Book = Mapping[tuple[Failed, ModelName], Evidence]


def evidence_of(
    *, is_success: bool, is_reported: bool, can_climb: bool, spent_micro_usd: float, seconds: float
) -> Evidence:
    """One try. What expired is a failure that was not reported: late is not a success."""
    return Evidence(
        tries=1.0,
        successes=1.0 if is_success else 0.0,
        reported=1.0 if is_reported else 0.0,
        climbable=0.0 if is_success or not can_climb else 1.0,
        spent_micro_usd=spent_micro_usd,
        spent_squared=spent_micro_usd * spent_micro_usd,
        seconds=seconds,
    )


def failed_of(models: Iterable[ModelName]) -> Failed:
    return tuple(sorted(set(models)))


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Samples of what each chain comes to, for one (tenant, class) at one state of its evidence.

    `success[c][i]`, `dollars[c][i]` (micro-dollars) and `cpst[c][i]`, the second over the first, are
    of chain `c` in sample `i`; `holds_ratio[c]` is the share of samples in which it reaches the floor,
    `follow_ratio` how often a failed task is tried again.
    """

    choice_class: ChoiceClass
    book: Book
    chains: tuple[Chain, ...]
    success: tuple[tuple[float, ...], ...]
    dollars: tuple[tuple[float, ...], ...]
    cpst: tuple[tuple[float, ...], ...]
    holds_ratio: tuple[float, ...]
    follow_ratio: float

    def evidence(self, model: ModelName, failed: Failed = ()) -> Evidence:
        return self.book.get((failed, model), NOTHING)

    def is_known(self, model: ModelName) -> bool:
        """Whether enough outcomes of a first try were reported. The default is the tenant's own word."""
        if model == self.choice_class.default:
            return True
        return self.evidence(model).reported >= self.choice_class.outcomes_min


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The model of a workflow, the chain that it begins, and how likely each model was to be chosen.

    `can_climb`: the chain goes on when this model fails.
    """

    model: ModelName
    why: Why
    chain: Chain
    propensity: float
    default_propensity: float
    propensities: tuple[tuple[ModelName, float], ...]
    can_climb: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What another try of a failed task would be, and whether it pays or the floor asks for it.

    None: not known.
    """

    model: ModelName
    is_advised: bool
    success_ratio: float | None
    dollars_micro_usd: float | None


# ---------------------------------------------------------------- beliefs


def beliefs_of(
    choice_class: ChoiceClass, prices: Mapping[ModelName, float], book: Book, seed: int
) -> Beliefs:
    """Samples by `seed`: the same for the same evidence, and little moved by a little more of it.

    `prices` (any unit, the same for all) stand in for dollars of models that were never tried.
    """
    chains = _chains(choice_class)
    default = choice_class.default
    retried = sum(entry.tries for (failed, _), entry in book.items() if failed)
    climbable = sum(entry.climbable for entry in book.values())
    not_retried = max(0.0, climbable - retried)
    retries, stops = FOLLOW_PRIOR[0] + retried, FOLLOW_PRIOR[1] + not_retried
    follow = [_beta(_Stream(seed, f"follow {draw}"), retries, stops) for draw in range(DRAWS)]
    tries = {
        (failed_of(chain[:at]), chain[at])
        for chain in (*chains, (default,))
        for at in range(len(chain))
    }
    success_of = {key: _success_draws(key, book, seed) for key in tries}
    dollars_of = {key: _dollar_draws(key, book, prices, default, seed) for key in tries}
    alone = success_of[(), default]
    success: list[tuple[float, ...]] = []
    dollars: list[tuple[float, ...]] = []
    for chain in chains:
        keys = [(failed_of(chain[:at]), chain[at]) for at in range(len(chain))]
        of_chain = [
            _walk(
                [(success_of[key][draw], dollars_of[key][draw]) for key in keys],
                follow[draw],
                alone[draw],
                chain.index(default) if default in chain else -1,
            )
            for draw in range(DRAWS)
        ]
        success.append(tuple(reached for reached, _ in of_chain))
        dollars.append(tuple(spent for _, spent in of_chain))
    fixed = choice_class.success_floor_ratio
    floors = [reached - choice_class.margin_ratio if fixed is None else fixed for reached in alone]
    return Beliefs(
        choice_class=choice_class,
        book=book,
        chains=chains,
        success=tuple(success),
        dollars=tuple(dollars),
        cpst=tuple(
            tuple(usd / max(_TINY, won) for usd, won in zip(spent, reached, strict=True))
            for spent, reached in zip(dollars, success, strict=True)
        ),
        holds_ratio=tuple(
            sum(reached >= floor for reached, floor in zip(of_chain, floors, strict=True)) / DRAWS
            for of_chain in success
        ),
        follow_ratio=retries / (retries + stops),
    )


def _chains(choice_class: ChoiceClass) -> tuple[Chain, ...]:
    """Every rising part of the ladder, the shortest first: 1 to `tries_max` of up to LADDER_MAX models."""
    ladder = choice_class.ladder[:LADDER_MAX]
    longest = min(choice_class.tries_max, TRIES_MAX, len(ladder))
    return tuple(
        chain for length in range(1, longest + 1) for chain in combinations(ladder, length)
    )


def _walk(
    tries: Sequence[tuple[float, float]], follow: float, default_alone: float, default_at: int
) -> tuple[float, float]:
    """Success and dollars of a chain whose tries succeed and cost as given, when so many go on climbing."""
    reached, spent, arrives = 0.0, 0.0, 1.0
    for success, dollars in tries:
        reached += arrives * success
        spent += arrives * dollars
        arrives *= (1.0 - success) * follow
    if default_at >= 0:
        # A task that the default model alone would do is done when the chain comes to it, or before:
        # samples of separate beliefs may not say otherwise.
        comes = follow**default_at
        reached = max(reached, comes * default_alone + (1.0 - comes) * tries[0][0])
    return min(1.0, reached), spent


def _success_draws(key: tuple[Failed, ModelName], book: Book, seed: int) -> list[float]:
    failed, model = key
    entry = book.get(key, NOTHING)
    first, second = RETRY_PRIOR if failed else FIRST_PRIOR
    failures = max(0.0, entry.tries - entry.successes)
    name = f"{','.join(failed)}>{model}"
    return [
        _beta(_Stream(seed, f"success {draw} {name}"), first + entry.successes, second + failures)
        for draw in range(DRAWS)
    ]


def _dollar_draws(
    key: tuple[Failed, ModelName],
    book: Book,
    prices: Mapping[ModelName, float],
    default: ModelName,
    seed: int,
) -> list[float]:
    """Samples of the mean: Gamma around it, as narrow as the tries and their spread make it."""
    failed, model = key
    entry = book.get(key, NOTHING)
    mean = (entry.spent_micro_usd + GUESS_TRIES * _guess(key, book, prices, default)) / (
        entry.tries + GUESS_TRIES
    )
    shape = (entry.tries + GUESS_TRIES) / _variation(entry)
    name = f"{','.join(failed)}>{model}"
    return [
        mean
        * min(
            DOLLARS_FACTOR_MAX,
            max(
                1.0 / DOLLARS_FACTOR_MAX,
                _gamma(_Stream(seed, f"dollars {draw} {name}"), shape) / shape,
            ),
        )
        for draw in range(DRAWS)
    ]


def _guess(
    key: tuple[Failed, ModelName],
    book: Book,
    prices: Mapping[ModelName, float],
    default: ModelName,
) -> float:
    """Dollars of a try before there is one: those of a first try, or the default's by their prices."""
    failed, model = key
    price = max(_TINY, prices.get(model, 1.0))
    if failed and (first := book.get(((), model), NOTHING)).tries > 0.0:
        return first.spent_micro_usd / first.tries
    known = book.get(((), default), NOTHING)
    if known.tries > 0.0:
        return known.spent_micro_usd / known.tries * price / max(_TINY, prices.get(default, 1.0))
    seen = [
        entry.spent_micro_usd / entry.tries / max(_TINY, prices.get(name, 1.0))
        for (before, name), entry in book.items()
        if not before and entry.tries > 0.0
    ]
    return price * (sum(seen) / len(seen) if seen else 1.0)


def _variation(entry: Evidence) -> float:
    if entry.tries < VARIATION_TRIES_MIN or entry.spent_micro_usd <= 0.0:
        return VARIATION_FIRST
    mean = entry.spent_micro_usd / entry.tries
    squared = entry.spent_squared / entry.tries / (mean * mean) - 1.0
    return min(VARIATION_MAX, max(VARIATION_MIN, squared))


def success_range(entry: Evidence, failed: Failed) -> tuple[float, float]:
    """Where a model's rate of success lies with 95 % belief: the normal approximation of the Beta."""
    first, second = RETRY_PRIOR if failed else FIRST_PRIOR
    wins = first + entry.successes
    count = first + second + entry.tries
    mean = wins / count
    half = NORMAL_95 * sqrt(mean * (1.0 - mean) / (count + 1.0))
    return max(0.0, mean - half), min(1.0, mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """What a chain comes to on average over the beliefs."""

    chain: Chain
    success_ratio: float
    dollars_micro_usd: float
    holds_ratio: float


def chain_views(beliefs: Beliefs) -> list[ChainView]:
    """Every chain, the one with the fewest dollars for a success first."""
    views = [
        ChainView(
            chain=chain,
            success_ratio=max(_TINY, sum(beliefs.success[at]) / DRAWS),
            dollars_micro_usd=sum(beliefs.dollars[at]) / DRAWS,
            holds_ratio=beliefs.holds_ratio[at],
        )
        for at, chain in enumerate(beliefs.chains)
    ]
    return sorted(views, key=lambda view: view.dollars_micro_usd / view.success_ratio)


# ---------------------------------------------------------------- choosing


def choose(
    beliefs: Beliefs, *, tenant: str, workflow: str, failed: Failed, usable: frozenset[ModelName]
) -> Choice:
    """The model of a workflow whose task the models of `failed` have failed at before.

    `usable` are the models that exist, are allowed and can be paid and awaited. The default model
    stands in when none is.
    """
    if failed:
        return _climb(beliefs, tenant, workflow, failed, usable)
    choice_class = beliefs.choice_class
    default = choice_class.default
    possible = _possible(beliefs, (), usable)
    allowed = [at for at in possible if _is_allowed(beliefs, at)]
    plausible = [at for at in possible if _is_plausible(beliefs, at)]
    explore = choice_class.explore_ratio if plausible else 0.0
    holdout = choice_class.holdout_ratio
    known, unknown = _shares(beliefs, allowed, 0), _shares(beliefs, plausible, 0)
    propensities: dict[ModelName, float] = {default: holdout}
    for share, ratio in ((known, 1.0 - holdout - explore), (unknown, explore)):
        for model, part in share.items():
            if ratio > 0.0:
                propensities[model] = propensities.get(model, 0.0) + ratio * part
    if not allowed:
        propensities[default] += 1.0 - holdout - explore

    luck = _Stream(0, f"{tenant}\0{workflow}").uniform()
    chain: Chain = (default,)
    if luck < holdout:
        why = Why.HELD_OUT
    elif luck < holdout + explore:
        chain = _best(beliefs, plausible, (luck - holdout) / explore)
        why = Why.EXPLORED
    elif allowed:
        chain = _best(beliefs, allowed, (luck - holdout - explore) / (1.0 - holdout - explore))
        why = _why(beliefs, possible, allowed)
    else:
        why = Why.FLOOR_OUT_OF_REACH
    model = chain[0]
    return Choice(
        model=model,
        why=why,
        chain=chain,
        propensity=propensities[model],
        default_propensity=propensities[default],
        propensities=tuple(sorted(propensities.items())),
        can_climb=len(chain) > 1,
    )


def advise(beliefs: Beliefs, failed: Failed, usable: frozenset[ModelName]) -> Advice | None:
    """What to try after `failed`; None: no further model of the ladder can be tried."""
    going_on = _possible(beliefs, failed, usable)
    if not going_on:
        return None
    stopping = [at for at, chain in enumerate(beliefs.chains) if failed_of(chain) == failed]
    holding = [at for at in going_on if _holds(beliefs, at)]
    depth = len(failed)
    shares = _shares(beliefs, holding or going_on, depth)
    model = max(shares, key=lambda name: (shares[name], name))
    best = min(
        (at for at in (holding or going_on) if beliefs.chains[at][depth] == model),
        key=lambda at: sum(beliefs.dollars[at]) / max(_TINY, sum(beliefs.success[at])),
    )
    pays = sum(
        beliefs.cpst[best][draw] <= min(beliefs.cpst[at][draw] for at in stopping)
        for draw in range(DRAWS)
    ) if stopping else DRAWS  # fmt: skip
    is_short = not any(_holds(beliefs, at) for at in stopping)
    entry = beliefs.evidence(model, failed)
    first, second = RETRY_PRIOR
    return Advice(
        model=model,
        is_advised=is_short or pays * 2 >= DRAWS,
        success_ratio=(first + entry.successes) / (first + second + entry.tries),
        dollars_micro_usd=entry.spent_micro_usd / entry.tries if entry.tries > 0.0 else None,
    )


def fixed_rung(ladder: Chain, failed: Failed, usable: frozenset[ModelName]) -> Choice | None:
    """The first model of a ladder above those that failed, else its highest. None: none is usable."""
    rungs = [model for model in ladder if model in usable]
    if not rungs:
        return None
    tried = [at for at, model in enumerate(ladder) if model in failed]
    above = [model for model in ladder[max(tried) + 1 :] if model in usable] if tried else rungs
    model = above[0] if above else rungs[-1]
    return Choice(
        model=model,
        why=Why.FIXED_LADDER if above else Why.TOP_OF_LADDER,
        chain=tuple(above or (model,)),
        propensity=1.0,
        default_propensity=1.0,
        propensities=((model, 1.0),),
        can_climb=len(above) > 1,
    )


def affordable(
    beliefs: Beliefs, failed: Failed, *, deadline_s: float, budget_micro_usd: float | None
) -> frozenset[ModelName]:
    """Models whose mean time fits the deadline and whose mean dollars fit the budget, as far as known."""
    kept = []
    for model in beliefs.choice_class.ladder:
        entry = beliefs.evidence(model, failed)
        if entry.tries < AFFORD_TRIES_MIN:
            entry = beliefs.evidence(model)
        if entry.tries >= AFFORD_TRIES_MIN:
            if entry.seconds / entry.tries > deadline_s:
                continue
            if (
                budget_micro_usd is not None
                and entry.spent_micro_usd / entry.tries > budget_micro_usd
            ):
                continue
        kept.append(model)
    return frozenset(kept)


def _climb(
    beliefs: Beliefs, tenant: str, workflow: str, failed: Failed, usable: frozenset[ModelName]
) -> Choice:
    going_on = _possible(beliefs, failed, usable)
    depth = len(failed)
    if not going_on:
        top = fixed_rung(beliefs.choice_class.ladder, failed, usable)
        if top is not None:
            return top
        default = beliefs.choice_class.default
        return Choice(
            model=default,
            why=Why.TOP_OF_LADDER,
            chain=(default,),
            propensity=1.0,
            default_propensity=1.0,
            propensities=((default, 1.0),),
            can_climb=False,
        )
    holding = [at for at in going_on if _holds(beliefs, at)] or going_on
    shares = _shares(beliefs, holding, depth)
    luck = _Stream(0, f"{tenant}\0{workflow}").uniform()
    chain = _best(beliefs, holding, luck)
    model = chain[depth]
    return Choice(
        model=model,
        why=Why.CLIMBED,
        chain=chain[depth:],
        propensity=shares[model],
        default_propensity=shares.get(beliefs.choice_class.default, 0.0),
        propensities=tuple(sorted(shares.items())),
        can_climb=len(chain) > depth + 1,
    )


def _possible(beliefs: Beliefs, failed: Failed, usable: frozenset[ModelName]) -> list[int]:
    """Chains that go on from where the task stands, by models that can be used."""
    depth = len(failed)
    return [
        at
        for at, chain in enumerate(beliefs.chains)
        if len(chain) > depth
        and failed_of(chain[:depth]) == failed
        and usable.issuperset(chain[depth:])
    ]


def _holds(beliefs: Beliefs, at: int) -> bool:
    return beliefs.holds_ratio[at] >= beliefs.choice_class.confidence_ratio


def _is_allowed(beliefs: Beliefs, at: int) -> bool:
    """Enough is known of its first model, and it holds the floor with confidence."""
    return beliefs.is_known(beliefs.chains[at][0]) and _holds(beliefs, at)


def _is_plausible(beliefs: Beliefs, at: int) -> bool:
    """Worth exploring: it is not known with confidence to miss the floor."""
    return beliefs.holds_ratio[at] > 1.0 - beliefs.choice_class.confidence_ratio


def _why(beliefs: Beliefs, possible: Sequence[int], allowed: Sequence[int]) -> Why:
    """Whether the choice was one: with one model to begin with, the others' evidence is too thin."""
    begins = {beliefs.chains[at][0] for at in allowed}
    waiting = {beliefs.chains[at][0] for at in possible} - begins
    if begins == {beliefs.choice_class.default} and any(
        not beliefs.is_known(model) for model in waiting
    ):
        return Why.THIN_EVIDENCE
    return Why.LEARNED


def _best_of(beliefs: Beliefs, candidates: Sequence[int], draw: int) -> int:
    """The fewest dollars for a success; of equals the one that was listed first, which is the shorter."""
    return min(candidates, key=lambda at: (beliefs.cpst[at][draw], at))


def _best(beliefs: Beliefs, candidates: Sequence[int], luck: float) -> Chain:
    """Thompson's rule: what is best in one sample. `luck` in 0..1 names the sample."""
    draw = min(DRAWS - 1, int(luck * DRAWS))
    return beliefs.chains[_best_of(beliefs, candidates, draw)]


def _shares(beliefs: Beliefs, candidates: Sequence[int], depth: int) -> dict[ModelName, float]:
    """How often each model is next, over all samples."""
    shares: dict[ModelName, float] = {}
    if candidates:
        for draw in range(DRAWS):
            model = beliefs.chains[_best_of(beliefs, candidates, draw)][depth]
            shares[model] = shares.get(model, 0.0) + 1.0 / DRAWS
    return shares


# ---------------------------------------------------------------- what it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task from its first try to its last. `first_` is of the first workflow alone."""

    is_success: bool
    spent_micro_usd: float
    is_default_first: bool
    default_propensity: float
    is_first_success: bool
    first_spent_micro_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Against one try of the default model. Dollars are micro-dollars for each successful task.

    Bounds hold with 95 % confidence. `tasks_uncovered` could not have had the default and are left out.
    """

    tasks: int
    tasks_uncovered: int
    tasks_default: int
    cpst_micro_usd: float
    cpst_default_micro_usd: float
    saved_ratio: float
    saved_ratio_low: float
    saved_ratio_high: float
    success_ratio: float
    success_ratio_default: float
    success_gain_low: float
    success_gain_high: float


def saving_of(tasks: Iterable[Task]) -> Saving | None:
    """The saving by inverse propensity: tasks that had the default by chance stand for all that could have.

    Ratio estimators (Hajek) with the variance of their linear parts, on the logarithm for dollars
    (Horvitz and Thompson 1952; Owen, Monte Carlo theory, chapter 9). None: too few to tell.
    """
    every = list(tasks)
    covered = [task for task in every if task.default_propensity > 0.0]
    weights = [1.0 / task.default_propensity if task.is_default_first else 0.0 for task in covered]
    count = len(covered)
    lucky = sum(
        task.is_first_success for task, weight in zip(covered, weights, strict=True) if weight
    )
    spent = sum(task.spent_micro_usd for task in covered)
    won = sum(task.is_success for task in covered)
    spent_default = sum(
        weight * task.first_spent_micro_usd for task, weight in zip(covered, weights, strict=True)
    )
    won_default = sum(
        weight * task.is_first_success for task, weight in zip(covered, weights, strict=True)
    )
    if lucky < SAVING_SUCCESSES_MIN or not won or spent <= 0.0 or spent_default <= 0.0:
        return None
    weight_sum = sum(weights)
    success, success_default = won / count, won_default / weight_sum
    log_variance = gain_variance = 0.0
    for task, weight in zip(covered, weights, strict=True):
        of_log = (
            task.spent_micro_usd / spent
            - task.is_success / won
            - weight * task.first_spent_micro_usd / spent_default
            + weight * task.is_first_success / won_default
        )
        of_gain = (task.is_success - success) / count - weight * (
            task.is_first_success - success_default
        ) / weight_sum
        log_variance += of_log * of_log
        gain_variance += of_gain * of_gain
    cpst, cpst_default = spent / won, spent_default / won_default
    middle, half = log(cpst / cpst_default), NORMAL_95 * sqrt(log_variance)
    gain, gain_half = success - success_default, NORMAL_95 * sqrt(gain_variance)
    return Saving(
        tasks=count,
        tasks_uncovered=len(every) - count,
        tasks_default=sum(weight > 0.0 for weight in weights),
        cpst_micro_usd=cpst,
        cpst_default_micro_usd=cpst_default,
        saved_ratio=1.0 - exp(middle),
        saved_ratio_low=1.0 - exp(middle + half),
        saved_ratio_high=1.0 - exp(middle - half),
        success_ratio=success,
        success_ratio_default=success_default,
        success_gain_low=gain - gain_half,
        success_gain_high=gain + gain_half,
    )


# ---------------------------------------------------------------- chance that is no chance


class _Stream:
    """Uniform numbers that a seed and a name decide: the hash of a counter."""

    __slots__ = ("_counter", "_seed")

    def __init__(self, seed: int, name: str) -> None:
        self._seed = xxhash.xxh3_64_intdigest(name.encode(), seed & _MASK)
        self._counter = 0

    def uniform(self) -> float:
        """In the open interval from 0 to 1."""
        self._counter += 1
        digest = xxhash.xxh3_64_intdigest(self._counter.to_bytes(8, "little"), self._seed)
        return ((digest >> 11) + 0.5) * _UNIFORM


def _normal(stream: _Stream) -> float:
    return sqrt(-2.0 * log(stream.uniform())) * cos(2.0 * pi * stream.uniform())


def _gamma(stream: _Stream, shape: float) -> float:
    """Gamma of scale 1 (Marsaglia and Tsang, A simple method for generating gamma variables, 2000)."""
    if shape < 1.0:
        return _gamma(stream, shape + 1.0) * float(stream.uniform() ** (1.0 / shape))
    third = shape - 1.0 / 3.0
    scale = 1.0 / sqrt(9.0 * third)
    while True:
        normal = _normal(stream)
        cubed = (1.0 + scale * normal) ** 3
        if cubed <= 0.0:
            continue
        if log(stream.uniform()) < 0.5 * normal * normal + third * (1.0 - cubed + log(cubed)):
            return third * cubed


def _beta(stream: _Stream, first: float, second: float) -> float:
    one = _gamma(stream, first)
    return one / max(_TINY, one + _gamma(stream, second))
