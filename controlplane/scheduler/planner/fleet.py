"""One round of the planner: from a problem to a plan. The same problem gives the same fleet, time permitting.

Money in micro-dollars. It reads no clock: times are those that the solvers count themselves.
"""

from dataclasses import replace
from typing import Final

from controlplane.scheduler.perf_model import MS_PER_S
from controlplane.scheduler.planner.inventory import take_stock, validate
from controlplane.scheduler.planner.loads import (
    options_of,
    planned_arrivals,
    stretch_of,
)
from controlplane.scheduler.planner.moves import Layout, lay_out, order
from controlplane.scheduler.planner.places import LEFT_RATIO_MIN, serve_with
from controlplane.scheduler.planner.prices import (
    PoolKey,
    Serving,
    arriving,
    serve_best,
    shadow_prices,
    worth,
)
from controlplane.scheduler.planner.problem import (
    Assignment,
    DesiredCount,
    DesiredNodes,
    Held,
    Move,
    Plan,
    PlanStatus,
    Prices,
    Problem,
    digest,
)
from controlplane.scheduler.planner.programme import (
    SECONDS_PER_HOUR,
    Question,
    Target,
    keep_group,
)
from controlplane.scheduler.planner.replay_bound import best_stretches
from controlplane.scheduler.planner.search import Found, search

# Deferrable work that waits is offered to valleys so fast that it is gone in this time.
VALLEY_S: Final = 60.0
# Work that must run now comes before work that can wait, whatever each is worth.
MUST_RUN_FACTOR: Final = 1_000.0
BINDING_MAX: Final = 32
# A pool whose KV is used to this part fills up there first.
KV_FULL_RATIO: Final = 0.9


def solve(problem: Problem) -> Plan:
    """The plan for a problem. Raises ValueError when the problem contradicts itself."""
    validate(problem)
    problem = replace(problem, stretches=best_stretches(problem), recent=())
    tag = digest(problem)
    options = tuple(options_of(problem, demand) for demand in problem.demands)
    held = planned_arrivals(problem, options)
    question = Question(
        problem=problem,
        options=options,
        planned=tuple(one.arrivals_per_s for one in held),
        stock=take_stock(problem),
        gpus_less={},
    )
    prices, serving = shadow_prices(problem, options, question.stock.serving)
    stay, stay_s = stay_target(question)
    found, layout = _search(question, stay)
    solve_s = serving.solve_s + stay_s + (found.solve_s if found else 0.0)
    moves: tuple[Move, ...] = ()
    waiting = 0
    if found is None:
        target, bound = stay, 0.0
    elif _is_stay(question, stay, found.target):
        target, bound = stay, min(found.bound, stay.objective)
    else:
        target, bound = found.target, found.bound
        gain = (stay.objective - target.objective) / problem.limits.stands_s * SECONDS_PER_HOUR
        moves, waiting = order(question, target, layout, gain, tag)
    gap = 0.0 if target.objective <= 0.0 else max(0.0, 1.0 - bound / target.objective)
    deferred, deferred_s = _valleys(question, question.stock.serving)
    return Plan(
        made_at_s=problem.now_s,
        problem_digest=tag,
        status=_status(question, found, target, gap),
        desired=_desired(question, target),
        desired_nodes=_desired_nodes(question, target),
        assignment=_assignment(question, target),
        moves=moves,
        moves_waiting=waiting,
        prices=prices,
        stretches=tuple(
            stretch_of(problem, model) for model in sorted({pool.model for pool in problem.pools})
        ),
        held=held,
        deferred=deferred,
        fleet_micro_usd_per_hour=sum(
            one.desired * shape.micro_usd_per_hour
            for one, shape in zip(_desired_nodes(question, target), problem.shapes, strict=True)
        ),
        objective=target.objective,
        bound=bound,
        gap_ratio=gap,
        solve_s=solve_s + deferred_s,
        binding=_binding(question, found, target, layout, waiting, stay, prices),
    )


def _search(question: Question, stay: Target) -> tuple[Found | None, Layout]:
    """The best fleet whose engines fit on nodes one by one, as near as the time allows.

    None: the solvers found no answer at all.
    """
    limits = question.problem.limits
    gap = max(limits.gap_ratio_max - limits.gain_ratio_min, limits.gap_ratio_max / 4.0)
    try:
        found = search(question, stay, limits.solve_s_max, gap)
    except RuntimeError:
        return None, Layout((), 0, {})
    layout = lay_out(question, found.target)
    seconds_left = limits.solve_s_max - found.solve_s
    if layout.gpus_missing and seconds_left > limits.solve_s_max / 2.0:
        # Room that is given up for a better fit was no part of the question, so the bound stays.
        again = search(replace(question, gpus_less=layout.gpus_missing), stay, seconds_left, gap)
        second = lay_out(question, again.target)
        if sum(second.gpus_missing.values()) < sum(layout.gpus_missing.values()):
            solve_s = found.solve_s + again.solve_s
            found, layout = replace(again, bound=found.bound, solve_s=solve_s), second
    if layout.micro_usd:
        dearer = found.target.objective + layout.micro_usd
        found = replace(found, target=replace(found.target, objective=dearer))
    return found, layout


def stay_target(question: Question) -> tuple[Target, float]:
    """The fleet as it stands, as a target: its price with the work it leaves out. And solver seconds."""
    problem = question.problem
    column, solve_s = serve_with(question, question.stock.actual)
    rent = sum(
        round(shape.micro_usd_per_hour / SECONDS_PER_HOUR * problem.limits.stands_s)
        * question.stock.nodes_actual.get(index, 0)
        for index, shape in enumerate(problem.shapes)
    )
    target = Target(
        groups=tuple(keep_group(group) for group in question.stock.groups),
        loaded={},
        bought={},
        engines=dict(question.stock.actual),
        left_ratio=tuple(column.left_ratio[index] for index in range(len(problem.demands))),
        flows=column.flows,
        objective=float(rent + column.cost),
    )
    return target, solve_s


def _is_stay(question: Question, stay: Target, target: Target) -> bool:
    """Whether changing is not worth it: no more work is served, and too little is saved."""
    if any(
        before > after + LEFT_RATIO_MIN
        for before, after in zip(stay.left_ratio, target.left_ratio, strict=True)
    ):
        return False
    saved = stay.objective - target.objective
    return saved <= question.problem.limits.gain_ratio_min * stay.objective


def _valleys(question: Question, engines: dict[PoolKey, int]) -> tuple[tuple[Held, ...], float]:
    """How fast each class of deferrable work may run now: what tight work leaves, within its bound."""
    problem = question.problem
    if not any(demand.deferrable_s > 0.0 for demand in problem.demands):
        return (), 0.0
    arrivals = arriving(problem)
    values = worth(problem)
    for index, demand in enumerate(problem.demands):
        if demand.deferrable_s > 0.0:
            arrivals[index] = demand.arrivals_per_s_now + demand.backlog_workflows / VALLEY_S
        else:
            values[index] *= MUST_RUN_FACTOR
    serving: Serving = serve_best(problem, question.options, engines, arrivals, values)
    return (
        tuple(
            Held(class_id=demand.class_id, arrivals_per_s=serving.served_per_s[index])
            for index, demand in enumerate(problem.demands)
            if demand.deferrable_s > 0.0
        ),
        serving.solve_s,
    )


# ---------------------------------------------------------------- the plan's parts


def _status(question: Question, found: Found | None, target: Target, gap: float) -> PlanStatus:
    if found is None:
        return PlanStatus.FAILED
    for demand, left in zip(question.problem.demands, target.left_ratio, strict=True):
        if demand.success_floor_ratio > 0.0 and left > LEFT_RATIO_MIN:
            return PlanStatus.SHORT
    return PlanStatus.OK if gap <= question.problem.limits.gap_ratio_max else PlanStatus.GAP_OPEN


def _desired(question: Question, target: Target) -> tuple[DesiredCount, ...]:
    actual = question.stock.actual
    answer = []
    for key in sorted({*target.engines, *actual}):
        desired, there = target.engines.get(key, 0), actual.get(key, 0)
        if desired or there:
            pool = question.problem.pools[key[0]]
            answer.append(
                DesiredCount(
                    model=pool.model,
                    gpu_type=pool.gpu_type,
                    gpus=pool.gpus,
                    role=pool.role,
                    region=key[1],
                    desired=desired,
                    actual=there,
                )
            )
    return tuple(answer)


def _desired_nodes(question: Question, target: Target) -> tuple[DesiredNodes, ...]:
    released: dict[int, int] = {}
    for group in target.groups:
        released[group.group.shape] = released.get(group.group.shape, 0) + group.released
    return tuple(
        DesiredNodes(
            region=shape.region,
            gpu_type=shape.gpu_type,
            gpus=shape.gpus,
            desired=question.stock.nodes_actual.get(index, 0)
            - released.get(index, 0)
            + target.bought.get(index, 0),
            actual=question.stock.nodes_actual.get(index, 0),
        )
        for index, shape in enumerate(question.problem.shapes)
    )


def _assignment(question: Question, target: Target) -> tuple[Assignment, ...]:
    problem = question.problem
    return tuple(
        Assignment(
            class_id=problem.demands[index].class_id,
            model=problem.pools[key[0]].model,
            gpu_type=problem.pools[key[0]].gpu_type,
            gpus=problem.pools[key[0]].gpus,
            role=problem.pools[key[0]].role,
            region=key[1],
            ratio=ratio,
        )
        for (index, key), ratio in sorted(target.flows.items())
    )


def _binding(
    question: Question,
    found: Found | None,
    target: Target,
    layout: Layout,
    waiting: int,
    stay: Target,
    prices: Prices,
) -> tuple[str, ...]:
    """What holds the plan back, in words, the worst first."""
    problem = question.problem
    limits = problem.limits
    words: list[str] = []
    if found is None:
        words.append("the solvers found no plan: the fleet stays as it is")
    words += _left_words(question, target)
    for index, shape in enumerate(problem.shapes):
        if shape.nodes_more_max and target.bought.get(index, 0) == shape.nodes_more_max:
            words.append(f"no more than {shape.nodes_more_max} nodes of {shape.name} can be had")
    for demand, ways in zip(problem.demands, question.options, strict=True):
        if ways.is_late and demand.deadline_s is not None and ways.every():
            words.append(
                f"class `{demand.class_id}` can not meet its deadline of {demand.deadline_s:g} s: "
                f"the fastest engines take {ways.finish_s_best:.0f} s"
            )
    words += [
        f"{price.model} on {price.gpu_type}x{price.gpus} in {price.region} is short now: "
        f"a GPU second more saves ${price.micro_usd_per_gpu_ms * MS_PER_S / 1e6:.4f}"
        for price in prices.pools
        if price.micro_usd_per_gpu_ms > 0.0
    ]
    words += _kv_words(question, target)
    unknown = [node for node in problem.nodes if not node.is_known]
    if unknown:
        engines = sum(question.stock.fixed.values())
        words.append(
            f"{len(unknown)} nodes are not heard of: their {engines} engines count as before"
        )
    if layout.for_nodes_to_come:
        words.append(f"{layout.for_nodes_to_come} engines wait for nodes that are to be added")
    if layout.gpus_missing and target is not stay:
        words.append(
            f"engines of {sum(layout.gpus_missing.values())} GPUs find no node with so many free"
        )
    if waiting > layout.for_nodes_to_come:
        words.append(
            f"{waiting - layout.for_nodes_to_come} moves wait for a later round: a round removes "
            f"at most {limits.removals_per_round_max} engines, none that is needed now"
        )
    if found is not None and target is stay and stay.objective > found.target.objective:
        saved = 1.0 - found.target.objective / stay.objective
        words.append(
            f"the fleet stays: a change would save {saved:.1%}, less than "
            f"{limits.gain_ratio_min:.1%}"
        )
    return tuple(words[:BINDING_MAX])


def _left_words(question: Question, target: Target) -> list[str]:
    words = []
    for demand, ways, left in zip(
        question.problem.demands, question.options, target.left_ratio, strict=True
    ):
        if left <= LEFT_RATIO_MIN:
            continue
        if not ways.every():
            why = f"no kind of engine holds model `{demand.model}` and a context so long"
        elif demand.success_floor_ratio <= 0.0:
            why = "it is worth less than what it costs, and has no floor"
        else:
            why = "there are not enough GPUs for it"
        words.append(f"{left:.0%} of class `{demand.class_id}` is left out: {why}")
    return words


def _kv_words(question: Question, target: Target) -> list[str]:
    problem = question.problem
    loads = [{way.pool: way.load for way in ways.every()} for ways in question.options]
    used: dict[PoolKey, float] = {}
    for (index, key), ratio in target.flows.items():
        rate = question.planned[index] * ratio
        used[key] = used.get(key, 0.0) + rate * loads[index][key[0]].kv_token_s
    words = []
    for key in sorted(used):
        pool = problem.pools[key[0]]
        capacity = pool.kv_tokens_capacity * target.engines.get(key, 0)
        if capacity and used[key] >= KV_FULL_RATIO * capacity:
            words.append(
                f"KV of {pool.name} in {key[1]} fills up first: {used[key] / capacity:.0%} is used"
            )
    return words
