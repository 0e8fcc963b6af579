"""A first answer to which node keeps what: the nodes that hold most of what is wanted stay, the others go.

It only gives the solver something to improve on. GPUs and counts of one shape of nodes at a time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Final

from controlplane.scheduler.planner.inventory import Group, pool_indexes
from controlplane.scheduler.planner.prices import PoolKey, serve_best
from controlplane.scheduler.planner.programme import (
    SECONDS_PER_HOUR,
    Column,
    GroupTarget,
    Question,
    Target,
    engine_micro_usd_per_s,
    left_cost,
    left_out_micro_usd,
    start_micro_usd,
)

# Less of a class than this is rounding of the parts that it is dealt out in.
LEFT_RATIO_MIN: Final = 0.005


def find_places(question: Question, rough: Target) -> Target:
    """The engines of `rough`, which only counts them, laid out on the groups of `question`."""
    wanted: dict[int, Counter[int]] = {}
    leaving: Counter[int] = Counter()
    for one in rough.groups:
        need = wanted.setdefault(one.group.shape, Counter())
        need.update(dict(one.kept))
        need.update(dict(one.woken))
        for (_, after), count in one.changed.items():
            need[after] += count
        leaving[one.group.shape] += one.released
    for (shape, pool), count in rough.loaded.items():
        wanted.setdefault(shape, Counter())[pool] += count
    return _place(question, rough, wanted, leaving, rough.bought)


def place_columns(question: Question, columns: Sequence[Column]) -> Target:
    """The engines that columns ask for, on as few nodes as hold them."""
    problem = question.problem
    wanted: dict[int, Counter[int]] = {}
    left: dict[int, float] = {}
    flows: dict[tuple[int, PoolKey], float] = {}
    for column in columns:
        left.update(column.left_ratio)
        flows.update(column.flows)
        for (pool_index, region), count in column.engines.items():
            pool = problem.pools[pool_index]
            missing = max(0, count - question.stock.fixed.get((pool_index, region), 0))
            fitting = [
                index
                for index, shape in enumerate(problem.shapes)
                if shape.region == region
                and shape.gpu_type == pool.gpu_type
                and shape.gpus >= pool.gpus
                and question.nodes(index) > 0
            ]
            for index in fitting:
                each = problem.shapes[index].gpus // pool.gpus
                need = wanted.setdefault(index, Counter())
                part = min(missing, each * question.nodes(index))
                need[pool_index] += part
                missing -= part
    leaving: Counter[int] = Counter()
    bought: dict[int, int] = {}
    for index, shape in enumerate(problem.shapes):
        need = wanted.get(index, Counter())
        gpus = sum(problem.pools[pool].gpus * count for pool, count in need.items())
        there = question.nodes(index) - shape.nodes_more_max
        nodes = -(-gpus // shape.gpus)
        leaving[index] = max(0, there - nodes)
        bought[index] = min(shape.nodes_more_max, max(0, nodes - there))
    start = Target(
        groups=(),
        loaded={},
        bought={},
        engines={},
        left_ratio=tuple(left.get(index, 0.0) for index in range(len(problem.demands))),
        flows=flows,
        objective=0.0,
    )
    return _place(question, start, wanted, leaving, bought)


def serve_with(question: Question, engines: Mapping[PoolKey, int]) -> tuple[Column, float]:
    """What `engines` can do of all planned work, as one column; and the solver's seconds."""
    planned = question.planned
    values = []
    for index, rate in enumerate(planned):
        _, each = left_out_micro_usd(question, index)
        values.append(each / rate if rate > 0.0 else 0.0)
    serving = serve_best(question.problem, question.options, engines, planned, values)
    left: dict[int, float] = {}
    for index, rate in enumerate(planned):
        ratio = 0.0 if rate <= 0.0 else max(0.0, 1.0 - serving.served_per_s[index] / rate)
        left[index] = ratio if ratio > LEFT_RATIO_MIN else 0.0
    column = Column(
        engines=engines,
        flows={
            (flow.demand, flow.pool): flow.per_s / planned[flow.demand] for flow in serving.flows
        },
        left_ratio=left,
        cost=left_cost(question, left),
    )
    return column, serving.solve_s


def standing_target(question: Question) -> Target | None:
    """The fleet that the standing plan leads to, from where things are. None: there is no such plan."""
    indexes = pool_indexes(question.problem)
    engines: Counter[PoolKey] = Counter()
    for one in question.problem.standing:
        pool = indexes.get((one.model, one.gpu_type, one.gpus, one.role))
        if pool is not None:
            engines[pool, one.region] += one.desired
    if not engines:
        return None
    column, _ = serve_with(question, engines)
    return place_columns(question, [column])


def _place(
    question: Question,
    target: Target,
    wanted: Mapping[int, Counter[int]],
    leaving: Mapping[int, int],
    buying: Mapping[int, int],
) -> Target:
    problem = question.problem
    groups: dict[int, GroupTarget] = {}
    loaded: dict[tuple[int, int], int] = {}
    bought: dict[int, int] = {}
    engines: Counter[PoolKey] = Counter(question.stock.fixed)
    for index, shape in enumerate(problem.shapes):
        need = Counter(wanted.get(index, {}))
        for pool, count in need.items():
            engines[pool, shape.region] += count
        more = _place_shape(
            question, index, need, leaving.get(index, 0), buying.get(index, 0), groups
        )
        if more:
            bought[index] = more
        loaded.update({(index, pool): count for pool, count in need.items() if count > 0})
    placed = replace(
        target,
        groups=tuple(groups[number] for number in range(len(question.stock.groups))),
        loaded=loaded,
        bought=bought,
        engines=dict(engines),
    )
    return replace(placed, objective=price(question, placed))


def tidy(question: Question, target: Target) -> Target:
    """The same fleet with fewer changes: nothing is loaded that could have stayed or woken.

    A solver that stops near the best leaves some of that behind. Nodes are emptied only for engines
    that need a whole one.
    """
    problem = question.problem
    groups = list(target.groups)
    loaded = dict(target.loaded)
    for index, shape in enumerate(problem.shapes):
        here = [number for number, one in enumerate(groups) if one.group.shape == index]
        for number in here:
            groups[number] = _stay_whole(question, groups[number], index, loaded)
        whole = sum(
            count
            for (where, pool), count in loaded.items()
            if where == index and problem.pools[pool].gpus == shape.gpus
        )
        free = target.bought.get(index, 0)
        free += sum(groups[number].emptied for number in here)
        for number in here:
            one = groups[number]
            fewer = min(one.emptied, max(0, free - whole)) if one.group.awake else 0
            groups[number] = replace(one, emptied=one.emptied - fewer)
            free -= fewer
        for number in here:
            groups[number] = _stay(groups[number], index, loaded)
    answer = replace(
        target,
        groups=tuple(groups),
        loaded={key: count for key, count in loaded.items() if count > 0},
    )
    return replace(answer, objective=min(target.objective, price(question, answer)))


def _stay_whole(
    question: Question, one: GroupTarget, shape: int, loaded: dict[tuple[int, int], int]
) -> GroupTarget:
    """Nodes are not emptied of an engine that fills them to load the same again."""
    gpus = question.problem.shapes[shape].gpus
    kept, emptied = dict(one.kept), one.emptied
    for pool, _ in one.group.awake:
        more = min(emptied, loaded.get((shape, pool), 0))
        if more > 0 and question.problem.pools[pool].gpus == gpus:
            kept[pool] += more
            emptied -= more
            loaded[shape, pool] -= more
    return replace(one, kept=kept, emptied=emptied)


def _stay(one: GroupTarget, shape: int, loaded: dict[tuple[int, int], int]) -> GroupTarget:
    """Keep what a group gives up and its shape loads; wake what sleeps there. Room stays the same."""
    size = len(one.group.nodes)
    staying = size - one.released - one.emptied
    kept, woken = dict(one.kept), dict(one.woken)
    for pool, count in one.group.awake:
        changed = sum(n for (before, _), n in one.changed.items() if before == pool)
        more = min(count // size * staying - kept[pool] - changed, loaded.get((shape, pool), 0))
        if more > 0:
            kept[pool] += more
            loaded[shape, pool] -= more
        # An engine that is awake comes before the same that sleeps.
        more = min(count // size * staying - kept[pool] - changed, woken.get(pool, 0))
        if more > 0:
            kept[pool] += more
            woken[pool] -= more
    for pool, count in one.group.asleep:
        if pool in woken:
            most = count // size * (size - one.released)
            more = min(most - woken[pool], loaded.get((shape, pool), 0))
            if more > 0:
                woken[pool] += more
                loaded[shape, pool] -= more
    return replace(one, kept=kept, woken=woken)


def price(question: Question, target: Target) -> float:
    """What a fleet costs over the time that a plan stands, as the programme counts it."""
    problem = question.problem
    limits = problem.limits
    total = 0.0
    for index, shape in enumerate(problem.shapes):
        per_s = shape.micro_usd_per_hour / SECONDS_PER_HOUR
        rent = round(per_s * limits.stands_s)
        bought = target.bought.get(index, 0)
        total += rent * question.stock.nodes_actual.get(index, 0)
        total += (rent + round(per_s * shape.provision_s)) * bought
    for one in target.groups:
        shape = problem.shapes[one.group.shape]
        total -= round(shape.micro_usd_per_hour / SECONDS_PER_HOUR * limits.stands_s) * one.released
        for pool, count in one.group.awake:
            total += limits.change_micro_usd * (count - one.kept[pool])
        for pool, count in one.woken.items():
            wake_s = problem.pools[pool].wake_s or 0.0
            rent_per_s = engine_micro_usd_per_s(problem, one.group.shape, pool)
            total += (ceil(rent_per_s * wake_s) + limits.change_micro_usd) * count
    for (shape_index, pool), count in target.loaded.items():
        total += start_micro_usd(problem, shape_index, pool) * count
    return total + left_cost(question, dict(enumerate(target.left_ratio)))


def as_merged(question: Question, target: Target) -> Target:
    """The same fleet, told of the groups of `question`, in which nodes of a shape are merged."""
    groups = []
    for group in question.stock.groups:
        parts = [
            one
            for one in target.groups
            if one.group.shape == group.shape and one.group.is_releasable == group.is_releasable
        ]
        kept: Counter[int] = Counter()
        woken: Counter[int] = Counter()
        changed: Counter[tuple[int, int]] = Counter()
        for one in parts:
            kept.update(dict(one.kept))
            woken.update(dict(one.woken))
            changed.update(dict(one.changed))
        groups.append(
            GroupTarget(
                group=group,
                released=sum(one.released for one in parts),
                emptied=sum(one.emptied for one in parts if one.group.nodes_unblocked),
                kept=dict(kept),
                woken=dict(woken),
                changed=dict(changed),
            )
        )
    return replace(target, groups=tuple(groups))


def _place_shape(
    question: Question,
    shape_index: int,
    need: Counter[int],
    leaving: int,
    bought: int,
    groups: dict[int, GroupTarget],
) -> int:
    """Keep what is needed on the nodes that hold most of it; takes it off `need`. Answers nodes bought."""
    pools = question.problem.pools
    shape = question.problem.shapes[shape_index]
    here = [
        (number, group)
        for number, group in enumerate(question.stock.groups)
        if group.shape == shape_index
    ]
    nodes = [
        (not group.is_releasable, _useful(question, group, need), number)
        for number, group in here
        for _ in group.nodes
    ]
    nodes.sort(key=lambda one: (one[0], one[1]), reverse=True)
    there = Counter[int]()
    for _, group in here:
        there.update(dict(group.awake))
    # An engine as large as a node that is new takes a node that holds nothing.
    whole = sum(
        max(0, count - there[pool])
        for pool, count in need.items()
        if pools[pool].gpus == shape.gpus
    )
    whole = max(0, whole - bought)
    stay = len(nodes) - leaving
    kept: dict[int, Counter[int]] = {number: Counter() for number, _ in here}
    emptied: Counter[int] = Counter()
    released: Counter[int] = Counter()
    free = bought * shape.gpus
    by_number = dict(here)
    for place, (_, _, number) in enumerate(nodes):
        group = by_number[number]
        size = len(group.nodes)
        free_here = shape.gpus - group.gpus_blocked // size
        wanted_gpus = sum(pools[pool].gpus * count for pool, count in need.items())
        if place >= stay and group.is_releasable and free >= wanted_gpus:
            released[number] += 1
            continue
        if place >= stay - whole and group.nodes_unblocked:
            emptied[number] += 1
            free += free_here
            continue
        for pool, count in group.awake:
            part = min(count // size, need[pool])
            kept[number][pool] += part
            need[pool] -= part
            free_here -= part * pools[pool].gpus
        free += free_here
    for number, group in here:
        groups[number] = GroupTarget(
            group=group,
            released=released[number],
            emptied=emptied[number]
            if group.awake
            else group.nodes_unblocked and len(group.nodes) - released[number],
            kept={pool: kept[number][pool] for pool, _ in group.awake},
            woken={pool: 0 for pool, _ in group.asleep},
            changed={},
        )
    missing = sum(pools[pool].gpus * count for pool, count in need.items()) - free
    more = max(0, -(-missing // shape.gpus))
    return min(shape.nodes_more_max, bought + more)


def _useful(question: Question, group: Group, need: Mapping[int, int]) -> int:
    """GPUs of a node of the group that hold engines which are wanted."""
    size = len(group.nodes)
    return sum(
        question.problem.pools[pool].gpus * min(count // size, need.get(pool, 0))
        for pool, count in group.awake
    )
