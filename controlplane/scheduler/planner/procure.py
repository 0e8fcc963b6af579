"""What to buy: reserved, on demand and spot GPUs for demand that rises and falls and is not known for sure.

A linear programme in two stages: reservations are made before it is known how demand grows, all else
after. GPUs, micro-dollars, hours; work in units per second that a GPU of a type does so many of. It
knows nothing of single nodes and engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from typing import Any, Final

from controlplane.domain.ids import GpuTypeName

# Less than this of a GPU, or of a probability, is rounding.
ROUNDING: Final = 1e-6
HOURS_MAX: Final = 24 * 14
SECONDS_PER_HOUR: Final = 3_600.0
# More of the work than this is never put on machines that can be taken away, whatever they cost.
SPOT_RATIO_MAX: Final = 0.5


class Term(StrEnum):
    RESERVED = "reserved"
    ON_DEMAND = "on_demand"
    SPOT = "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """GPUs of a type at a price, and where the price stands. Spot is taken away so often an hour."""

    gpu_type: GpuTypeName
    term: Term
    micro_usd_per_gpu_hour: int
    source: str
    date: str
    interruptions_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One way that demand may turn out: so many times what is expected, with a probability."""

    factor: float
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """What to buy for.

    `work_per_s` is the work of each hour. `work_per_gpu_s` is what one GPU of a type does. An
    interruption costs a machine `restart_s`, and fails the work of `exposed_s`; at most
    `failed_ratio_max` of all work may fail so. Of the work `deferrable_ratio` may wait up to
    `deferrable_h` hours, and fills at most `deferrable_share` of what a GPU can do.
    `risk_ratio` weighs the mean of the worst fifth of outcomes against the mean of all (0: only that).
    """

    work_per_s: tuple[float, ...]
    work_per_gpu_s: Mapping[GpuTypeName, float]
    offers: tuple[Offer, ...]
    growth: tuple[Growth, ...] = (
        Growth(factor=0.8, probability=0.25),
        Growth(factor=1.0, probability=0.5),
        Growth(factor=1.25, probability=0.25),
    )
    gpus_per_node: int = 8
    restart_s: float = 300.0
    exposed_s: float = 120.0
    failed_ratio_max: float = 0.01
    deferrable_ratio: float = 0.0
    deferrable_h: int = 0
    deferrable_share: float = 1.0
    risk_ratio: float = 0.0


# The part of outcomes whose mean is called the risk.
TAIL_RATIO: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bought:
    """GPUs of a type and a term: reserved all the time, else on average and at most."""

    gpu_type: GpuTypeName
    term: Term
    gpus_mean: float
    gpus_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one more way of buying adds. Money an hour, `saved_ratio` against on demand only.

    `regret_ratio` is what knowing the growth beforehand would have saved. `reserved_idle_ratio` is
    the part of reserved capacity that is paid for and not used, `failed_ratio` the part of work that
    interruptions are expected to fail.
    """

    name: str
    micro_usd_per_hour_mean: float
    micro_usd_per_hour_worst: float
    micro_usd_per_hour_tail: float
    saved_ratio: float
    regret_ratio: float
    reserved_idle_ratio: float
    failed_ratio: float
    bought: tuple[Bought, ...]


def offers_of(document: Mapping[str, object]) -> tuple[Offer, ...]:
    """Offers from a decoded document (`offers`: a list of objects). Raises ValueError where it is wrong."""
    listed = document.get("offers")
    if not isinstance(listed, list) or not listed:
        raise ValueError("a price document has a list `offers`")
    answer = []
    for number, one in enumerate(listed, start=1):
        if not isinstance(one, dict):
            raise ValueError(f"offer {number} is not an object")  # noqa: TRY004 - one kind of refusal
        try:
            offer = Offer(
                gpu_type=GpuTypeName(str(one["gpu_type"])),
                term=Term(one["term"]),
                micro_usd_per_gpu_hour=round(float(one["usd_per_gpu_hour"]) * 1e6),
                source=str(one["source"]),
                date=str(one["date"]),
                interruptions_per_hour=float(one.get("interruptions_per_hour", 0.0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"offer {number} is wrong: {error}") from error
        if offer.micro_usd_per_gpu_hour <= 0 or offer.interruptions_per_hour < 0.0:
            raise ValueError(f"offer {number} has a price or a rate of interruptions below 0")
        answer.append(offer)
    return tuple(answer)


def procure(purchase: Purchase) -> tuple[Step, ...]:
    """The cheapest way to buy, one way more at a time: on demand, reserved, spot, work that waits.

    Each step is the optimum of its programme, with reservations in whole nodes. The last step is the
    plan. Raises ValueError when nothing on offer can do the work or the question contradicts itself.
    """
    _validate(purchase)
    tight = replace(purchase, deferrable_ratio=0.0)
    trials = [
        ("on demand", {Term.ON_DEMAND}, tight),
        ("reserved", {Term.ON_DEMAND, Term.RESERVED}, tight),
        ("spot", {Term.ON_DEMAND, Term.RESERVED, Term.SPOT}, tight),
    ]
    if purchase.deferrable_ratio > 0.0:
        trials.append(("work that waits", set(Term), purchase))
    steps: list[Step] = []
    for name, terms, question in trials:
        solution = _whole_nodes(question, terms)
        base = steps[0].micro_usd_per_hour_mean if steps else solution.mean
        steps.append(_step(name, question, terms, solution, base))
    return tuple(steps)


def _validate(purchase: Purchase) -> None:
    if not 0 < len(purchase.work_per_s) <= HOURS_MAX or min(purchase.work_per_s) < 0.0:
        raise ValueError(f"work is given for 1 to {HOURS_MAX} hours and is not negative")
    if abs(sum(one.probability for one in purchase.growth) - 1.0) > ROUNDING:
        raise ValueError("probabilities of growth do not add up to 1")
    usable = [
        offer
        for offer in purchase.offers
        if offer.term is Term.ON_DEMAND and purchase.work_per_gpu_s.get(offer.gpu_type, 0.0) > 0.0
    ]
    if not usable:
        raise ValueError("no GPU type that can do the work is offered on demand")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    """Micro-dollars an hour of each growth, and the GPUs: reserved, and by growth and hour."""

    costs: tuple[float, ...]
    mean: float
    reserved: Mapping[GpuTypeName, float]
    gpus: Mapping[tuple[int, int, int], float]
    failed: float
    used: float


def _whole_nodes(purchase: Purchase, terms: set[Term]) -> _Solution:
    """Solved once freely, then with reservations rounded to nodes, up or down, whichever is cheaper."""
    free = _solve(purchase, terms, None)
    size = purchase.gpus_per_node
    best: _Solution | None = None
    for up in (False, True):
        fixed = {
            gpu: float(
                (ceil(count / size - ROUNDING) if up else int(count / size + ROUNDING)) * size
            )
            for gpu, count in free.reserved.items()
        }
        if not fixed:
            return free
        trial = _solve(purchase, terms, fixed)
        if best is None or trial.mean < best.mean:
            best = trial
    return best or free


def _solve(
    purchase: Purchase, terms: set[Term], reserved: Mapping[GpuTypeName, float] | None
) -> _Solution:
    """Minimise (1 - r) mean cost + r mean of the worst fifth, subject in each hour of each growth to

        sum_types work_per_gpu (reserved + on demand + spot (1 - time lost)) >= tight + deferred work
    where deferred work of an hour is done within the hours that it may wait.
    """
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("GLOP")  # type: ignore[no-untyped-call]
    infinity = solver.infinity()
    objective = solver.Objective()
    objective.SetMinimization()
    hours = len(purchase.work_per_s)
    offers = [
        (number, offer)
        for number, offer in enumerate(purchase.offers)
        if offer.term in terms and purchase.work_per_gpu_s.get(offer.gpu_type, 0.0) > 0.0
    ]
    dollars = 1e6
    hold: dict[int, Any] = {}
    for number, offer in offers:
        if offer.term is Term.RESERVED:
            count = None if reserved is None else reserved.get(offer.gpu_type, 0.0)
            hold[number] = solver.NumVar(count or 0.0, infinity if count is None else count, "")
    threshold = solver.NumVar(0.0, infinity, "")
    objective.SetCoefficient(threshold, purchase.risk_ratio)
    rented: dict[tuple[int, int, int], Any] = {}
    costs: list[list[tuple[float, Any]]] = []
    for scenario, growth in enumerate(purchase.growth):
        terms_cost = [
            (offer.micro_usd_per_gpu_hour / dollars, hold[number])
            for number, offer in offers
            if number in hold
        ]
        waits = _waiting(solver, purchase, growth.factor)
        for hour, work in enumerate(purchase.work_per_s):
            total = work * growth.factor
            tight = total * (1.0 - purchase.deferrable_ratio)
            enough = solver.Constraint(tight, infinity)
            failing = solver.Constraint(-infinity, total * purchase.failed_ratio_max)
            lent = solver.Constraint(-infinity, total * SPOT_RATIO_MAX)
            bound = solver.Constraint(-infinity, 0.0)
            if waits:
                enough.SetCoefficient(waits[hour], -1.0)
                bound.SetCoefficient(waits[hour], 1.0)
            for number, offer in offers:
                does = purchase.work_per_gpu_s[offer.gpu_type]
                if number in hold:
                    gpus = hold[number]
                else:
                    gpus = solver.NumVar(0.0, infinity, "")
                    rented[scenario, hour, number] = gpus
                    terms_cost.append((offer.micro_usd_per_gpu_hour / dollars / hours, gpus))
                lost = time_lost_ratio(purchase, offer)
                enough.SetCoefficient(gpus, does * (1.0 - lost))
                bound.SetCoefficient(gpus, -does * purchase.deferrable_share)
                if offer.term is Term.SPOT:
                    failing.SetCoefficient(gpus, does * failed_ratio(purchase, offer))
                    lent.SetCoefficient(gpus, does)
        costs.append(terms_cost)
        for weight, variable in terms_cost:
            before = objective.GetCoefficient(variable)
            share = growth.probability * (1.0 - purchase.risk_ratio)
            objective.SetCoefficient(variable, before + share * weight)
        if purchase.risk_ratio > 0.0:
            # Conditional value at risk (Rockafellar and Uryasev, 2000).
            above = solver.NumVar(0.0, infinity, "")
            row = solver.Constraint(-infinity, 0.0)
            row.SetCoefficient(above, -1.0)
            row.SetCoefficient(threshold, -1.0)
            for weight, variable in terms_cost:
                row.SetCoefficient(variable, row.GetCoefficient(variable) + weight)
            objective.SetCoefficient(above, purchase.risk_ratio * growth.probability / TAIL_RATIO)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise ValueError("the purchase has no optimum: the offers can not do the work")
    values = tuple(
        sum(weight * variable.solution_value() for weight, variable in one) * dollars
        for one in costs
    )
    gpus = {place: variable.solution_value() for place, variable in rented.items()}
    reserved_now = {
        purchase.offers[number].gpu_type: variable.solution_value()
        for number, variable in hold.items()
    }
    done = failed = 0.0
    for (scenario, _, number), count in gpus.items():
        offer = purchase.offers[number]
        work = count * purchase.work_per_gpu_s[offer.gpu_type] / hours
        done += (
            purchase.growth[scenario].probability * work * (1.0 - time_lost_ratio(purchase, offer))
        )
        failed += purchase.growth[scenario].probability * work * failed_ratio(purchase, offer)
    return _Solution(
        costs=values,
        mean=_mean(purchase, values),
        reserved=reserved_now,
        gpus=gpus,
        failed=failed,
        used=done,
    )


def _waiting(solver: Any, purchase: Purchase, factor: float) -> list[Any]:
    """Deferred work done in each hour: never before it came, never later than it may wait."""
    if purchase.deferrable_ratio <= 0.0:
        return []
    hours = len(purchase.work_per_s)
    came = [work * factor * purchase.deferrable_ratio for work in purchase.work_per_s]
    done = [solver.NumVar(0.0, solver.infinity(), "") for _ in range(hours)]
    for hour in range(hours):
        least = sum(came[: max(0, hour + 1 - purchase.deferrable_h)])
        if hour == hours - 1:
            least = sum(came)
        row = solver.Constraint(least, sum(came[: hour + 1]))
        for before in range(hour + 1):
            row.SetCoefficient(done[before], 1.0)
    return done


def time_lost_ratio(purchase: Purchase, offer: Offer) -> float:
    """The part of its time that an offer's machine spends starting again, 0..1."""
    return min(0.9, offer.interruptions_per_hour * purchase.restart_s / SECONDS_PER_HOUR)


def failed_ratio(purchase: Purchase, offer: Offer) -> float:
    """The part of an offer's work that interruptions fail: what is under way when they come, 0..1."""
    return min(1.0, offer.interruptions_per_hour * purchase.exposed_s / SECONDS_PER_HOUR)


def _mean(purchase: Purchase, costs: Sequence[float]) -> float:
    return sum(one.probability * cost for one, cost in zip(purchase.growth, costs, strict=True))


def _tail(purchase: Purchase, costs: Sequence[float]) -> float:
    """Mean cost of the worst fifth of outcomes."""
    left, total = TAIL_RATIO, 0.0
    for cost, one in sorted(zip(costs, purchase.growth, strict=True), key=lambda pair: -pair[0]):
        part = min(left, one.probability)
        total += part * cost
        left -= part
    return total / TAIL_RATIO


def _step(
    name: str, purchase: Purchase, terms: set[Term], solution: _Solution, base: float
) -> Step:
    knowing = 0.0
    for growth in purchase.growth:
        alone = replace(purchase, growth=(replace(growth, probability=1.0),), risk_ratio=0.0)
        knowing += growth.probability * _solve(alone, terms, None).mean
    hours = len(purchase.work_per_s)
    work = sum(purchase.work_per_s) / hours
    work *= sum(one.factor * one.probability for one in purchase.growth)
    able = sum(count * purchase.work_per_gpu_s[gpu] for gpu, count in solution.reserved.items())
    by_reserved = max(0.0, work - solution.used)
    bought = [
        Bought(gpu_type=gpu, term=Term.RESERVED, gpus_mean=count, gpus_max=count)
        for gpu, count in solution.reserved.items()
        if count > 0.0
    ]
    for number, offer in enumerate(purchase.offers):
        counts = [
            (purchase.growth[scenario].probability * count / hours, count)
            for (scenario, _, which), count in solution.gpus.items()
            if which == number
        ]
        if counts and max(count for _, count in counts) > ROUNDING:
            bought.append(
                Bought(
                    gpu_type=offer.gpu_type,
                    term=offer.term,
                    gpus_mean=sum(part for part, _ in counts),
                    gpus_max=max(count for _, count in counts),
                )
            )
    return Step(
        name=name,
        micro_usd_per_hour_mean=solution.mean,
        micro_usd_per_hour_worst=max(solution.costs),
        micro_usd_per_hour_tail=_tail(purchase, solution.costs),
        saved_ratio=0.0 if base <= 0.0 else 1.0 - solution.mean / base,
        regret_ratio=0.0 if solution.mean <= 0.0 else max(0.0, 1.0 - knowing / solution.mean),
        reserved_idle_ratio=0.0 if able <= 0.0 else max(0.0, 1.0 - by_reserved / able),
        failed_ratio=0.0 if work <= 0.0 else solution.failed / work,
        bought=tuple(bought),
    )
