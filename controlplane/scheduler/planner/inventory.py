"""What is there: nodes sorted into groups that are alike, engines counted by pool.

Nodes of one shape that hold the same engines can stand for each other, so the solver counts them
instead of naming them. It knows nothing of demand.
"""

from collections import Counter
from dataclasses import dataclass, replace

from controlplane.domain.catalog import Role
from controlplane.domain.ids import GpuTypeName, ModelName
from controlplane.scheduler.planner.prices import PoolKey
from controlplane.scheduler.planner.problem import (
    CLASSES_MAX,
    NODES_MAX,
    RECENT_WORKFLOWS_MAX,
    EngineCondition,
    EngineState,
    NodeState,
    Problem,
)

SERVING = (EngineCondition.SERVING, EngineCondition.STARTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes of one shape with the same engines. `awake` and `asleep`: pool index, engines of all nodes.

    `gpus_blocked` of all nodes are held by what no plan may touch: engines that drain, or of kinds
    not known here; `nodes_unblocked` hold nothing such. Where nodes are not alike, engines are only
    counted, and where they stand is left out of account.
    """

    shape: int
    nodes: tuple[NodeState, ...]
    awake: tuple[tuple[int, int], ...]
    asleep: tuple[tuple[int, int], ...]
    gpus_blocked: int
    nodes_unblocked: int
    is_releasable: bool
    is_alike: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """`fixed` counts the engines of nodes that are not heard of, `actual` all that are capacity.

    `serving` leaves out of `actual` what has not started yet. `nodes_fixed` counts, by shape, the
    nodes that are paid for and not in a group.
    """

    groups: tuple[Group, ...]
    fixed: dict[PoolKey, int]
    actual: dict[PoolKey, int]
    serving: dict[PoolKey, int]
    nodes_fixed: dict[int, int]
    nodes_actual: dict[int, int]


def pool_indexes(problem: Problem) -> dict[tuple[ModelName, GpuTypeName, int, Role], int]:
    return {
        (pool.model, pool.gpu_type, pool.gpus, pool.role): index
        for index, pool in enumerate(problem.pools)
    }


def validate(problem: Problem) -> None:
    """Raises ValueError where a problem contradicts itself or exceeds what is planned for."""
    if len(problem.demands) > CLASSES_MAX or len(problem.nodes) > NODES_MAX:
        raise ValueError(f"a plan covers at most {CLASSES_MAX} classes and {NODES_MAX} nodes")
    if len(problem.recent) > RECENT_WORKFLOWS_MAX:
        raise ValueError(f"a replay takes at most {RECENT_WORKFLOWS_MAX} workflows")
    for what, names in (
        ("class", [demand.class_id for demand in problem.demands]),
        ("pool", [pool.name for pool in problem.pools]),
        ("shape", [shape.name for shape in problem.shapes]),
        ("node", [str(node.node_id) for node in problem.nodes]),
    ):
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise ValueError(f"{what} `{twice[0]}` stands twice in the problem")
    shapes = {(shape.region, shape.gpu_type, shape.gpus) for shape in problem.shapes}
    for node in problem.nodes:
        if (node.region, node.gpu_type, node.gpus) not in shapes:
            raise ValueError(f"node `{node.node_id}` has no shape in the problem")
    for demand in problem.demands:
        if demand.arrivals_per_s_now < 0.0 or demand.arrivals_per_s_forecast < 0.0:
            raise ValueError(f"class `{demand.class_id}` has negative arrivals")


def engine_pool(
    indexes: dict[tuple[ModelName, GpuTypeName, int, Role], int],
    node: NodeState,
    engine: EngineState,
) -> int | None:
    return indexes.get((engine.model, node.gpu_type, engine.gpus, engine.role))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Likeness:
    """What nodes must have in common to stand for each other. Counts of one node."""

    shape: int
    awake: tuple[tuple[int, int], ...]
    asleep: tuple[tuple[int, int], ...]
    gpus_blocked: int
    is_releasable: bool


def _group(likeness: _Likeness, nodes: list[NodeState]) -> Group:
    size = len(nodes)
    return Group(
        shape=likeness.shape,
        nodes=tuple(nodes),
        awake=tuple((pool, each * size) for pool, each in likeness.awake),
        asleep=tuple((pool, each * size) for pool, each in likeness.asleep),
        gpus_blocked=likeness.gpus_blocked * size,
        nodes_unblocked=0 if likeness.gpus_blocked else size,
        is_releasable=likeness.is_releasable,
    )


def merged(stock: Inventory) -> Inventory:
    """The same, with all nodes of a shape in one group: smaller, and never dearer to change."""
    together: dict[tuple[int, bool], list[Group]] = {}
    for group in stock.groups:
        together.setdefault((group.shape, group.is_releasable), []).append(group)
    answer = []
    for (shape, is_releasable), groups in together.items():
        awake: Counter[int] = Counter()
        asleep: Counter[int] = Counter()
        for group in groups:
            awake.update(dict(group.awake))
            asleep.update(dict(group.asleep))
        answer.append(
            Group(
                shape=shape,
                nodes=tuple(node for group in groups for node in group.nodes),
                awake=tuple(sorted(awake.items())),
                asleep=tuple(sorted(asleep.items())),
                gpus_blocked=sum(group.gpus_blocked for group in groups),
                nodes_unblocked=sum(group.nodes_unblocked for group in groups),
                is_releasable=is_releasable,
                is_alike=False,
            )
        )
    return replace(stock, groups=tuple(answer))


def take_stock(problem: Problem) -> Inventory:
    """Sort the nodes of a problem and count their engines. The problem must be valid."""
    indexes = pool_indexes(problem)
    shapes = {
        (shape.region, shape.gpu_type, shape.gpus): i for i, shape in enumerate(problem.shapes)
    }
    groups: dict[_Likeness, list[NodeState]] = {}
    fixed: Counter[PoolKey] = Counter()
    actual: Counter[PoolKey] = Counter()
    serving: Counter[PoolKey] = Counter()
    nodes_fixed: Counter[int] = Counter()
    nodes_actual: Counter[int] = Counter()
    for node in sorted(problem.nodes, key=lambda one: one.node_id):
        shape = shapes[node.region, node.gpu_type, node.gpus]
        nodes_actual[shape] += 1
        if node.is_cordoned:
            nodes_fixed[shape] += 1
            continue
        awake: Counter[int] = Counter()
        asleep: Counter[int] = Counter()
        blocked = 0
        for engine in node.engines:
            pool = engine_pool(indexes, node, engine)
            if engine.condition in SERVING and pool is not None:
                awake[pool] += 1
                actual[pool, node.region] += 1
                if engine.condition is EngineCondition.SERVING:
                    serving[pool, node.region] += 1
            elif engine.condition is EngineCondition.ASLEEP:
                if pool is not None:
                    asleep[pool] += 1
            elif engine.condition is not EngineCondition.FAILED:
                blocked += engine.gpus
        if not node.is_known:
            nodes_fixed[shape] += 1
            for pool, count in awake.items():
                fixed[pool, node.region] += count
            continue
        key = _Likeness(
            shape=shape,
            awake=tuple(sorted(awake.items())),
            asleep=tuple(sorted(asleep.items())),
            gpus_blocked=min(blocked, node.gpus),
            is_releasable=node.is_releasable and not blocked,
        )
        groups.setdefault(key, []).append(node)
    return Inventory(
        groups=tuple(_group(key, nodes) for key, nodes in groups.items()),
        fixed=dict(fixed),
        actual=dict(actual),
        serving=dict(serving),
        nodes_fixed=dict(nodes_fixed),
        nodes_actual=dict(nodes_actual),
    )
