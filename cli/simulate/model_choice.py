"""The experiment `model-choice`: a class of tasks, four models, and what each way to choose among them costs.

Tasks are drawn from published statistics of four models (below), hard ones hard for all of them. The
learner is the code that chooses in a live replica; it begins with nothing and hears how each task ended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from statistics import NormalDist
from typing import Any, Final

from cli.simulate.stats import finite, paired_ratio
from controlplane.domain.ids import ModelName
from controlplane.scheduler.model_choice import (
    NOTHING,
    Beliefs,
    Chain,
    ChoiceClass,
    Evidence,
    Failed,
    Saving,
    Task,
    advise,
    beliefs_of,
    choose,
    evidence_of,
    failed_of,
    saving_of,
)

TASKS: Final = 2_000
SEEDS: Final = tuple(range(1, 11))
# Points of the regret curve.
CURVE_POINTS: Final = 20
# The learner looks at its evidence again when it has grown by a fiftieth.
REFRESH_RATIO: Final = 0.02
MICRO_USD_PER_USD: Final = 1e6
# Spread of a model's dollars about their mean: 99 of 100 tasks take less than about three times the
# median number of calls (published: 37 of 12, and 120 of 47), as with a Gamma of this shape.
DOLLARS_SHAPE: Final = 2.5

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One model on SWE-bench Verified, 500 tasks, the same agent (source: the benchmark's own site).

    `usd` is the mean of a task, `failed_usd_ratio` the share of the money that went to failures,
    `price` the list price in dollars per million completion tokens. `loading` is how much of success is the
    task's difficulty, `hardness` how fast dollars fall with it: fitted, so that ladders of these models
    reach what the published runs say they would (success within .002, dollars within .4 %).
    """

    name: ModelName
    success_ratio: float
    usd: float
    failed_usd_ratio: float
    price: float
    loading: float
    hardness: float

    def success_at(self, difficulty: float) -> float:
        """Success of tasks of this difficulty (a standard normal): one factor, probit."""
        threshold = _NORMAL.inv_cdf(self.success_ratio)
        spread = (1.0 - self.loading**2) ** 0.5
        return _NORMAL.cdf((threshold - self.loading * difficulty) / spread)

    def usd_at(self, difficulty: float, *, is_success: bool) -> float:
        """Mean dollars of such tasks; over all difficulties they come to the published means."""
        threshold = _NORMAL.inv_cdf(self.success_ratio)
        # E[exp(-h z) given success] for z normal, by completing the square.
        shifted = _NORMAL.cdf(threshold + self.loading * self.hardness)
        scale = exp(self.hardness**2 / 2.0)
        if is_success:
            mean = self.usd * (1.0 - self.failed_usd_ratio) / self.success_ratio
            norm = scale * shifted / self.success_ratio
        else:
            mean = self.usd * self.failed_usd_ratio / (1.0 - self.success_ratio)
            norm = scale * (1.0 - shifted) / (1.0 - self.success_ratio)
        return mean * exp(-self.hardness * difficulty) / norm


# Cheapest first.
MODELS: Final = (
    PublishedModel(
        name=ModelName("gpt-5-mini"), success_ratio=0.598, usd=0.035, failed_usd_ratio=0.40,
        price=2.0, loading=0.8625, hardness=0.0,
    ),
    PublishedModel(
        name=ModelName("gpt-5"), success_ratio=0.650, usd=0.280, failed_usd_ratio=0.32,
        price=10.0, loading=0.999, hardness=0.2446,
    ),
    PublishedModel(
        name=ModelName("sonnet-4"), success_ratio=0.648, usd=0.371, failed_usd_ratio=0.35,
        price=15.0, loading=0.8964, hardness=0.2630,
    ),
    PublishedModel(
        name=ModelName("sonnet-4.5"), success_ratio=0.706, usd=0.558, failed_usd_ratio=0.28,
        price=15.0, loading=0.9348, hardness=0.0780,
    ),
)  # fmt: skip
LADDER: Final[Chain] = tuple(model.name for model in MODELS)
PRICES: Final[Mapping[ModelName, float]] = {model.name: model.price for model in MODELS}
# The large models that a tenant may have as its default, and what then begins at the default.
DEFAULTS: Final = (ModelName("gpt-5"), ModelName("sonnet-4.5"))
# Fixed ladders that are shown beside the learner.
FIXED: Final[tuple[Chain, ...]] = (
    (LADDER[0], LADDER[1]),
    (LADDER[0], LADDER[3]),
    (LADDER[0], LADDER[1], LADDER[2]),
    LADDER,
)


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """What each model would make of one task, whichever is asked: the same under every policy."""

    is_success: Mapping[ModelName, bool]
    usd: Mapping[ModelName, float]


def drawn_task(seed: int, number: int) -> DrawnTask:
    random = Random(f"{seed}/{number}")  # noqa: S311 - a simulation
    difficulty = random.gauss(0.0, 1.0)
    is_success: dict[ModelName, bool] = {}
    usd: dict[ModelName, float] = {}
    for model in MODELS:
        won = random.random() < model.success_at(difficulty)
        mean = model.usd_at(difficulty, is_success=won)
        is_success[model.name] = won
        usd[model.name] = mean * random.gammavariate(DOLLARS_SHAPE, 1.0 / DOLLARS_SHAPE)
    return DrawnTask(is_success, usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy over the tasks of one seed. `spent_usd` and `is_success` are by task, in order."""

    spent_usd: tuple[float, ...]
    is_success: tuple[bool, ...]
    tries: int
    failed_usd: float
    saving: Saving | None = None
    first_shares: Mapping[str, float] | None = None

    @property
    def usd(self) -> float:
        return sum(self.spent_usd)

    @property
    def successes(self) -> int:
        return sum(self.is_success)

    @property
    def cpst_usd(self) -> float:
        return self.usd / self.successes if self.successes else float("inf")


def play_fixed(chain: Chain, tasks: Sequence[DrawnTask]) -> Run:
    """Each task climbs the chain until a model succeeds."""
    spent: list[float] = []
    won: list[bool] = []
    tries, lost = 0, 0.0
    for task in tasks:
        usd, is_won = 0.0, False
        for model in chain:
            usd += task.usd[model]
            tries += 1
            is_won = task.is_success[model]
            if is_won:
                break
        spent.append(usd)
        won.append(is_won)
        lost += 0.0 if is_won else usd
    return Run(spent_usd=tuple(spent), is_success=tuple(won), tries=tries, failed_usd=lost)


def play_oracle(tasks: Sequence[DrawnTask]) -> Run:
    """The cheapest model that succeeds, known beforehand; nothing is spent where none does."""
    spent = tuple(
        min((task.usd[name] for name in LADDER if task.is_success[name]), default=0.0)
        for task in tasks
    )
    won = tuple(any(task.is_success.values()) for task in tasks)
    return Run(spent_usd=spent, is_success=won, tries=sum(won), failed_usd=0.0)


class Learner:
    """Chooses for the tasks of one (tenant, class), and hears how they ended."""

    def __init__(self, choice_class: ChoiceClass, seed: int) -> None:
        self._class = choice_class
        self._seed = seed
        self._book: dict[tuple[Failed, ModelName], Evidence] = {}
        self._tries = 0
        self._tries_seen = 0
        self.beliefs: Beliefs = beliefs_of(choice_class, PRICES, self._book, seed)

    def hear(
        self, failed: Failed, model: ModelName, usd: float, *, is_success: bool, can_climb: bool
    ) -> None:
        told = evidence_of(
            is_success=is_success,
            is_reported=True,
            can_climb=can_climb,
            spent_micro_usd=usd * MICRO_USD_PER_USD,
            seconds=0.0,
        )
        key = (failed, model)
        self._book[key] = self._book.get(key, NOTHING).plus(told)
        self._tries += 1
        if self._tries - self._tries_seen > REFRESH_RATIO * self._tries_seen:
            self._tries_seen = self._tries
            self.beliefs = beliefs_of(self._class, PRICES, dict(self._book), self._seed)


def play_learned(choice_class: ChoiceClass, tasks: Sequence[DrawnTask], seed: int) -> Run:
    """The tenant reports every outcome, and tries again where it is told that this pays."""
    learner = Learner(choice_class, seed)
    usable = frozenset(LADDER)
    tenant = f"tenant-{seed}"
    spent: list[float] = []
    won: list[bool] = []
    told: list[Task] = []
    firsts: dict[str, int] = {}
    tries, lost = 0, 0.0
    for number, task in enumerate(tasks):
        usd, failed = 0.0, Failed(())
        while True:
            name = f"task-{number}-{len(failed)}"
            choice = choose(
                learner.beliefs, tenant=tenant, workflow=name, failed=failed, usable=usable
            )
            is_won, cost = task.is_success[choice.model], task.usd[choice.model]
            usd += cost
            tries += 1
            learner.hear(failed, choice.model, cost, is_success=is_won, can_climb=choice.can_climb)
            if not failed:
                first, first_cost, is_first_won = choice, cost, is_won
            failed = failed_of((*failed, choice.model))
            advice = None if is_won else advise(learner.beliefs, failed, usable)
            if advice is None or not advice.is_advised:
                break
        firsts[first.model] = firsts.get(first.model, 0) + 1
        spent.append(usd)
        won.append(is_won)
        lost += 0.0 if is_won else usd
        told.append(
            Task(
                is_success=is_won,
                spent_micro_usd=usd * MICRO_USD_PER_USD,
                is_default_first=first.model == choice_class.default,
                default_propensity=first.default_propensity,
                is_first_success=is_first_won,
                first_spent_micro_usd=first_cost * MICRO_USD_PER_USD,
            )
        )
    return Run(
        spent_usd=tuple(spent),
        is_success=tuple(won),
        tries=tries,
        failed_usd=lost,
        saving=saving_of(told),
        first_shares={name: count / len(tasks) for name, count in sorted(firsts.items())},
    )


def class_of(default: ModelName) -> ChoiceClass:
    """What the experiment gives the learner: the floor is what the default alone reaches."""
    return ChoiceClass(
        name="swe",
        ladder=LADDER,
        default=default,
        outcomes_min=10,
        explore_ratio=0.25,
        holdout_ratio=0.02,
    )


def run(
    seeds: Sequence[int] = SEEDS,
    progress: Callable[[float], None] = lambda _: None,
    tasks_count: int = TASKS,
) -> dict[str, Any]:
    """Every policy for each default, on the same tasks. `progress` is told the share that is done.

    Cells have the members of every experiment; those without a meaning here are null. Added are
    `regret_usd` (by tasks: mean and 95 % interval of dollars lost against the best chain known
    beforehand, successes counted at its CPST), `saving` (the learner's own word) and `first_shares`.
    """
    cells: list[dict[str, Any]] = []
    bounds: dict[str, Any] = {}
    runs: dict[str, dict[str, list[Run]]] = {default: {} for default in DEFAULTS}
    for at, seed in enumerate(seeds):
        tasks = [drawn_task(seed, number) for number in range(tasks_count)]
        shown = {f"always {name}": play_fixed((name,), tasks) for name in LADDER}
        shown |= {" > ".join(chain): play_fixed(chain, tasks) for chain in FIXED}
        oracle = play_oracle(tasks)
        for number, default in enumerate(DEFAULTS):
            learned = play_learned(class_of(default), tasks, seed)
            for policy, played in {"headway": learned, **shown, "oracle": oracle}.items():
                runs[default].setdefault(policy, []).append(played)
            progress((at * len(DEFAULTS) + number + 1) / (len(seeds) * len(DEFAULTS)))
    for default in DEFAULTS:
        of_default = runs[default]
        baseline = _best_baseline(of_default, f"always {default}")
        for policy, played_runs in of_default.items():
            cells.append(_cell(default, policy, played_runs, of_default[baseline], seeds))
        _add_regret(cells[-len(of_default)], of_default, default)
        bounds[_workload(default)] = _bound(of_default, f"always {default}")
    return {"cells": cells, "bounds": bounds}


def _workload(default: ModelName) -> str:
    return f"swe, default {default}"


def _bound(of_default: Mapping[str, Sequence[Run]], default_policy: str) -> dict[str, Any]:
    """The least that as many successes as the default's can cost: the cheapest tasks, known beforehand.

    Who has more successes paid at least the dollars of that many cheapest ones, which are dearer on
    average: no policy that holds the floor is below it. `distance` is of those that hold it.
    """
    usd, successes = 0.0, 0
    for oracle, default in zip(of_default["oracle"], of_default[default_policy], strict=True):
        prices = sorted(
            spent for spent, won in zip(oracle.spent_usd, oracle.is_success, strict=True) if won
        )
        usd += sum(prices[: default.successes])
        successes += default.successes
    floor = usd / max(1, successes)
    return {
        "L1": {"seeds": len(of_default["oracle"]), "cpst_usd": finite(floor)},
        "distance": {
            policy: finite(
                sum(one.usd for one in played) / sum(one.successes for one in played) / floor - 1.0
            )
            for policy, played in of_default.items()
            if sum(one.successes for one in played) >= successes > 0
        },
    }


def _best_baseline(of_default: Mapping[str, Sequence[Run]], default_policy: str) -> str:
    """The cheapest single model that succeeds as often as the default: a choice without a ladder."""
    floor = sum(played.successes for played in of_default[default_policy])
    holding = [
        policy
        for policy, played in of_default.items()
        if policy.startswith("always ") and sum(one.successes for one in played) >= floor
    ]
    return min(
        holding,
        key=lambda policy: (
            sum(one.usd for one in of_default[policy])
            / sum(one.successes for one in of_default[policy])
        ),
    )


def _cell(
    default: ModelName,
    policy: str,
    played: Sequence[Run],
    baseline: Sequence[Run],
    seeds: Sequence[int],
) -> dict[str, Any]:
    ratio = paired_ratio(
        [(one.usd, one.successes) for one in played],
        [(one.usd, one.successes) for one in baseline],
    )
    tasks = sum(len(one.spent_usd) for one in played)
    successes = sum(one.successes for one in played)
    cell: dict[str, Any] = {
        "experiment": "model-choice",
        "workload": _workload(default),
        "deadlines": None,
        "fleet": None,
        "load": None,
        "policy": policy,
        "seeds": list(seeds),
        "cpst_usd": finite(sum(one.usd for one in played) / max(1, successes)),
        "cpst_ratio_to_best_baseline": ratio.document(),
        "success_ratio": finite(successes / tasks),
        "goodput_per_s": None,
        "fleet_usd_at_floor": None,
        "late_kill_ratio": 0.0,
        "jain": None,
        "wasted_usd": {"failed_tasks": finite(sum(one.failed_usd for one in played))},
        "tries_per_task": finite(sum(one.tries for one in played) / tasks),
    }
    savings = [one.saving for one in played if one.saving is not None]
    if savings:
        truth = 1.0 - ratio.value
        cell["saving"] = {
            "saved_ratio": finite(sum(saving.saved_ratio for saving in savings) / len(savings)),
            "seeds_told": len(savings),
            # Of how many seeds the interval that the learner tells holds what was really saved.
            "seeds_covering": sum(
                saving.saved_ratio_low <= truth <= saving.saved_ratio_high for saving in savings
            ),
        }
        cell["first_shares"] = {
            name: finite(
                sum((one.first_shares or {}).get(name, 0.0) for one in played) / len(played)
            )
            for name in LADDER
        }
    return cell


def _add_regret(
    cell: dict[str, Any], of_default: Mapping[str, Sequence[Run]], default: ModelName
) -> None:
    """Dollars that the learner lost against the best fixed policy that holds the floor."""
    floor = sum(one.successes for one in of_default[f"always {default}"])
    best = min(
        (
            policy
            for policy, played in of_default.items()
            if policy not in ("headway", "oracle") and sum(one.successes for one in played) >= floor
        ),
        key=lambda policy: (
            sum(one.usd for one in of_default[policy])
            / sum(one.successes for one in of_default[policy])
        ),
    )
    cell["best_known_beforehand"] = best
    price = sum(one.usd for one in of_default[best]) / sum(
        one.successes for one in of_default[best]
    )
    curves = [_regret(one, price) for one in of_default["headway"]]
    points = []
    for at in range(1, CURVE_POINTS + 1):
        tasks = len(curves[0]) * at // CURVE_POINTS
        values = sorted(curve[tasks - 1] for curve in curves)
        tail = len(values) * 25 // 1_000
        points.append(
            {
                "tasks": tasks,
                "mean": finite(sum(values) / len(values)),
                "range95": [finite(values[tail]), finite(values[-1 - tail])],
            }
        )
    cell["regret_usd"] = points


def _regret(played: Run, price: float) -> list[float]:
    total = 0.0
    curve = []
    for spent, is_won in zip(played.spent_usd, played.is_success, strict=True):
        total += spent - (price if is_won else 0.0)
        curve.append(total)
    return curve
