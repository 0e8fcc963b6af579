"""From the fleet that is there to the fleet that is wanted: named changes, in an order that never starves a model.

Node by node and engine by engine. A round takes as many engines out of service as its limits allow,
and none that the work of this moment needs. It knows nothing of why a fleet is wanted.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from controlplane.domain.ids import EngineId, ModelName, RegionName
from controlplane.scheduler.planner.inventory import SERVING, engine_pool, pool_indexes
from controlplane.scheduler.planner.prices import PoolKey, arriving, serve_best, worth
from controlplane.scheduler.planner.problem import (
    EngineCondition,
    EngineState,
    Move,
    MoveKind,
    NodeState,
)
from controlplane.scheduler.planner.programme import (
    GroupTarget,
    Question,
    Target,
    start_micro_usd,
)

# Value per second that may be lost to rounding of the linear programme.
LOST_TOLERANCE_RATIO: Final = 1e-6
DIGEST_CHARACTERS: Final = 8


@dataclass(slots=True)
class _Change:
    """A change before it has a number. `needs` are changes that make room for it."""

    kind: MoveKind
    node: NodeState
    pool: int | None
    engine: EngineState | None = None
    pool_before: int | None = None
    needs: list["_Change"] = field(default_factory=list)
    number: int = 0
    after: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Room:
    """A node while changes are laid on it. `node` None: it is not there yet. GPUs.

    `staying` are engines that keep their place, with the index of their pool.
    """

    node: NodeState | None
    free_after: int
    free_now: int
    leaving: list[_Change] = field(default_factory=list)
    staying: list[tuple[EngineState, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Layout:
    """All changes of a target, and what did not fit: GPUs that were missing, by shape.

    `micro_usd` is the price of engines that had to change places for others to fit.
    """

    changes: tuple[_Change, ...]
    for_nodes_to_come: int
    gpus_missing: dict[int, int]
    micro_usd: int = 0


def lay_out(question: Question, target: Target) -> Layout:
    """Name the nodes and engines behind the counts of a target.

    Nodes of a group are alike: the last ones are released and emptied, and engines leave as few
    nodes as possible, so that room comes in one piece.
    """
    changes: list[_Change] = []
    rooms: dict[int, list[_Room]] = defaultdict(list)
    missing: Counter[int] = Counter()
    for group in target.groups:
        rooms[group.group.shape].extend(_lay_out_group(question, group, changes, missing))
    for shape, count in target.bought.items():
        size = question.problem.shapes[shape].gpus
        rooms[shape].extend(_Room(None, size, 0) for _ in range(count))
    to_come = 0
    moved_micro_usd = 0
    wanted = [
        (question.problem.pools[pool].gpus, shape, pool)
        for (shape, pool), count in target.loaded.items()
        for _ in range(count)
    ]
    for gpus, shape, pool in sorted(wanted, key=lambda one: (-one[0], one[1], one[2])):
        room = _best_room(rooms[shape], gpus)
        if room is None:
            room, price = _make_room(question, rooms[shape], gpus, changes, shape)
            moved_micro_usd += price
        if room is None:
            missing[shape] += gpus
        elif room.node is None:
            room.free_after -= gpus
            to_come += 1
        else:
            changes.append(_load(room, room.node, pool, gpus))
    return Layout(tuple(changes), to_come, dict(missing), moved_micro_usd)


def _make_room(
    question: Question,
    rooms: Sequence[_Room],
    gpus: int,
    changes: list[_Change],
    shape: int,
) -> tuple[_Room | None, int]:
    """Room in one piece on a node: engines smaller than that change to where they fit. And the price.

    Free GPUs are enough in sum, but lie on several nodes.
    """
    for room in sorted(rooms, key=lambda one: -one.free_after):
        if room.node is None:
            continue
        going: list[tuple[EngineState, int]] = []
        left = gpus - room.free_after
        for engine, pool in sorted(room.staying, key=lambda one: (one[0].gpus, one[0].engine_id)):
            if left <= 0 or engine.gpus >= gpus:
                break
            going.append((engine, pool))
            left -= engine.gpus
        places = _fit_elsewhere([one for one in rooms if one is not room], going)
        if left > 0 or places is None:
            continue
        price = 0
        for (engine, pool), place in zip(going, places, strict=True):
            leave = _Change(MoveKind.UNLOAD, room.node, pool, engine)
            room.leaving.append(leave)
            room.staying.remove((engine, pool))
            room.free_after += engine.gpus
            changes.append(leave)
            if place.node is not None:
                changes.append(_load(place, place.node, pool, engine.gpus))
            else:
                place.free_after -= engine.gpus
            price += start_micro_usd(question.problem, shape, pool)
            price += question.problem.limits.change_micro_usd
        return room, price
    return None, 0


def _fit_elsewhere(
    rooms: Sequence[_Room], going: Sequence[tuple[EngineState, int]]
) -> list[_Room] | None:
    """A room for each engine, the tightest first. None: one of them fits nowhere."""
    free = {id(room): room.free_after for room in rooms}
    places = []
    for engine, _ in sorted(going, key=lambda one: -one[0].gpus):
        fitting = [room for room in rooms if free[id(room)] >= engine.gpus]
        if not fitting:
            return None
        place = min(fitting, key=lambda room: free[id(room)])
        free[id(place)] -= engine.gpus
        places.append(place)
    # In the order in which they were asked for.
    order_ = sorted(range(len(going)), key=lambda one: -going[one][0].gpus)
    answer = list(places)
    for place, index in zip(places, order_, strict=True):
        answer[index] = place
    return answer


def _best_room(rooms: Sequence[_Room], gpus: int) -> _Room | None:
    """Where an engine fits tightest: what is free now before what will be, nodes that are there first."""
    fitting = [room for room in rooms if room.free_after >= gpus]
    if not fitting:
        return None
    return min(fitting, key=lambda room: (room.node is None, room.free_now < gpus, room.free_after))


def _load(room: _Room, node: NodeState, pool: int, gpus: int) -> _Change:
    change = _Change(MoveKind.LOAD, node, pool)
    room.free_after -= gpus
    if room.free_now >= gpus:
        room.free_now -= gpus
    else:
        change.needs = list(room.leaving)
    return change


def _lay_out_group(
    question: Question, target: GroupTarget, changes: list[_Change], missing: Counter[int]
) -> list[_Room]:
    """Changes on the nodes of one group; answers the rooms that are left on nodes that stay."""
    problem = question.problem
    indexes = pool_indexes(problem)
    nodes = target.group.nodes
    stay = len(nodes) - target.released - target.emptied
    leaving: Counter[int] = Counter()
    for index, count in target.group.awake:
        changed = sum(count for (before, _), count in target.changed.items() if before == index)
        leaving[index] = count // len(nodes) * stay - target.kept[index] - changed
    roles = {pair: count for pair, count in target.changed.items() if count}
    wakes = Counter({pool: count for pool, count in target.woken.items() if count})
    rooms: list[_Room] = []
    # From the last node on, so that what leaves is close together; roles change on the first ones.
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        is_released = position >= len(nodes) - target.released
        is_emptied = not is_released and position >= stay
        taken = 0
        going: list[_Change] = []
        staying: list[tuple[EngineState, int]] = []
        asleep = sum(one.condition is EngineCondition.ASLEEP for one in node.engines)
        for engine in node.engines:
            pool = engine_pool(indexes, node, engine)
            if engine.condition is EngineCondition.ASLEEP:
                if is_released:
                    going.append(_Change(MoveKind.UNLOAD, node, pool, engine))
                continue
            if engine.condition is EngineCondition.FAILED:
                going.append(_Change(MoveKind.UNLOAD, node, pool, engine))
                continue
            if engine.condition not in SERVING or pool is None:
                continue
            if is_released or is_emptied or leaving[pool] > 0:
                if not (is_released or is_emptied):
                    leaving[pool] -= 1
                kind = MoveKind.UNLOAD
                can_sleep = problem.pools[pool].wake_s is not None and not is_released
                if can_sleep and asleep < problem.limits.asleep_per_node_max:
                    kind = MoveKind.SLEEP
                    asleep += 1
                going.append(_Change(kind, node, pool, engine))
                continue
            taken += engine.gpus
            if engine.condition is EngineCondition.SERVING:
                staying.append((engine, pool))
        changes.extend(one for one in going if not _is_failed(one))
        size = problem.shapes[target.group.shape].gpus - target.group.gpus_blocked // len(nodes)
        if is_released:
            drain = _Change(MoveKind.DRAIN, node, None)
            drain.needs = [one for one in going if not _is_failed(one)]
            changes.append(drain)
            continue
        held = sum(
            one.gpus
            for one in node.engines
            if one.condition in SERVING or one.condition is EngineCondition.FAILED
        )
        rooms.append(_Room(node, size - taken, max(0, size - held), going, staying))
    rooms.reverse()
    _wake(question, target, rooms, wakes, changes, missing)
    _change_roles(question, rooms, roles, changes)
    return rooms


def _is_failed(change: _Change) -> bool:
    return change.engine is not None and change.engine.condition is EngineCondition.FAILED


def _wake(
    question: Question,
    target: GroupTarget,
    rooms: Sequence[_Room],
    wakes: Counter[int],
    changes: list[_Change],
    missing: Counter[int],
) -> None:
    indexes = pool_indexes(question.problem)
    for room in rooms:
        if room.node is None:
            continue
        for engine in room.node.engines:
            pool = engine_pool(indexes, room.node, engine)
            if engine.condition is not EngineCondition.ASLEEP or pool is None or not wakes[pool]:
                continue
            if room.free_after < engine.gpus:
                continue
            change = _load(room, room.node, pool, engine.gpus)
            change.kind = MoveKind.WAKE
            change.engine = engine
            changes.append(change)
            wakes[pool] -= 1
    for pool_index, count in wakes.items():
        missing[target.group.shape] += count * question.problem.pools[pool_index].gpus


def _change_roles(
    question: Question,
    rooms: Sequence[_Room],
    roles: dict[tuple[int, int], int],
    changes: list[_Change],
) -> None:
    indexes = pool_indexes(question.problem)
    for room in rooms:
        if room.node is None:
            continue
        gone = {id(one.engine) for one in room.leaving}
        for engine in room.node.engines:
            pool = engine_pool(indexes, room.node, engine)
            if engine.condition not in SERVING or id(engine) in gone:
                continue
            for pair, count in roles.items():
                if pair[0] == pool and count > 0:
                    roles[pair] -= 1
                    change = _Change(MoveKind.ROLE, room.node, pair[1], engine, pool_before=pool)
                    room.staying = [one for one in room.staying if one[0] is not engine]
                    changes.append(change)
                    break


# ---------------------------------------------------------------- order and limits


@dataclass(slots=True)
class _Round:
    """What a round has used up of its limits, and the engines that serve while it goes on."""

    question: Question
    target: Target
    serving: dict[PoolKey, int]
    starting: dict[PoolKey, list[int]] = field(default_factory=dict)
    removals: int = 0
    starts: int = 0
    removals_of: Counter[ModelName] = field(default_factory=Counter)
    goals: dict[ModelName, float] = field(default_factory=dict)

    def lost(self, model: ModelName, engines: Mapping[PoolKey, int]) -> float:
        """Value per second of a model's work of this moment that engines can not serve."""
        problem = self.question.problem
        arrivals = [
            rate if demand.model == model else 0.0
            for demand, rate in zip(problem.demands, arriving(problem), strict=True)
        ]
        values = [max(value, 1.0) for value in worth(problem)]
        return serve_best(
            problem, self.question.options, engines, arrivals, values
        ).lost_micro_usd_per_s

    def may_remove(self, key: PoolKey, change: _Change) -> bool:
        """Whether an engine can leave now, if need be after starts of the same round."""
        limits = self.question.problem.limits
        model = self.question.problem.pools[key[0]].model
        serving = sum(
            count
            for (pool, _), count in self.question.stock.serving.items()
            if self.question.problem.pools[pool].model == model
        )
        most = max(1, int(limits.removals_per_model_ratio_max * serving))
        if (
            self.removals >= limits.removals_per_round_max
            or self.removals_of[model] >= most
            or self.serving.get(key, 0) <= 0
        ):
            return False
        rest = dict(self.serving)
        rest[key] -= 1
        if model not in self.goals:
            # No worse than before the round, or than the plan has it in the end.
            before = self.lost(model, self.question.stock.serving)
            wanted = self.lost(model, self.target.engines)
            self.goals[model] = max(before, wanted) * (1.0 + LOST_TOLERANCE_RATIO)
        goal = self.goals[model]
        if self.lost(model, rest) > goal:
            started: set[int] = set()
            for other, numbers in self.starting.items():
                if self.question.problem.pools[other[0]].model == model and numbers:
                    rest[other] = rest.get(other, 0) + len(numbers)
                    started.update(numbers)
            if not started or self.lost(model, rest) > goal:
                return False
            change.after |= started
        self.serving[key] -= 1
        self.removals += 1
        self.removals_of[model] += 1
        return True


def order(
    question: Question, target: Target, layout: Layout, gain_micro_usd_per_hour: float, tag: str
) -> tuple[tuple[Move, ...], int]:
    """The moves of this round, in order, and how many more the target takes.

    First what starts in free room; then what leaves, where the rest can do the work of this moment;
    then what starts in the room that became free; nodes that are empty for good come last.
    """
    limits = question.problem.limits
    state = _Round(question, target, dict(question.stock.serving))
    done: list[_Change] = []

    def accept(change: _Change) -> None:
        change.number = len(done) + 1
        change.after |= {one.number for one in change.needs}
        done.append(change)

    starts = [one for one in layout.changes if one.kind in (MoveKind.LOAD, MoveKind.WAKE)]
    leaves = [
        one
        for one in layout.changes
        if one.kind in (MoveKind.UNLOAD, MoveKind.SLEEP, MoveKind.ROLE)
    ]
    for change in starts:
        if not change.needs and state.starts < limits.starts_per_round_max:
            accept(change)
            state.starts += 1
            state.starting.setdefault(_key(change), []).append(change.number)
    # What makes room for an engine goes before what only empties a node.
    wanted = {id(one) for change in starts for one in change.needs}
    leaves += [one for change in starts for one in change.needs if _is_failed(one)]
    for change in sorted(_once(leaves), key=lambda one: (id(one) not in wanted, one.node.node_id)):
        if _holds_capacity(change):
            before = change.pool_before if change.pool_before is not None else change.pool
            if before is None or not state.may_remove((before, change.node.region), change):
                continue
        accept(change)
    for change in starts:
        if (
            change.needs
            and all(one.number for one in change.needs)
            and state.starts < limits.starts_per_round_max
        ):
            accept(change)
            state.starts += 1
    for change in layout.changes:
        if change.kind is MoveKind.DRAIN and all(one.number for one in change.needs):
            accept(change)
    every = _once([*layout.changes, *leaves])
    gpus = sum(_gpus(question, one) for one in every) or 1
    moves = tuple(
        _move(question, target, one, gain_micro_usd_per_hour * _gpus(question, one) / gpus, tag)
        for one in done
    )
    return moves, len(every) - len(done) + layout.for_nodes_to_come


def _once(changes: Sequence[_Change]) -> list[_Change]:
    return list({id(one): one for one in changes}.values())


def _holds_capacity(change: _Change) -> bool:
    return change.engine is not None and change.engine.condition is EngineCondition.SERVING


def _key(change: _Change) -> PoolKey:
    return (-1 if change.pool is None else change.pool, change.node.region)


def _gpus(question: Question, change: _Change) -> int:
    if change.engine is not None:
        return change.engine.gpus
    return 0 if change.pool is None else question.problem.pools[change.pool].gpus


def _move(
    question: Question, target: Target, change: _Change, gain_micro_usd_per_hour: float, tag: str
) -> Move:
    problem = question.problem
    pool = None if change.pool is None else problem.pools[change.pool]
    engine_id = None if change.engine is None else change.engine.engine_id
    if change.kind is MoveKind.LOAD:
        engine_id = EngineId(f"{change.node.node_id}-{tag[:DIGEST_CHARACTERS]}-{change.number}")
    duration_s = 0.0
    if pool is not None and change.kind is MoveKind.LOAD:
        duration_s = pool.load_s
    elif pool is not None and change.kind is MoveKind.WAKE:
        duration_s = pool.wake_s or 0.0
    return Move(
        number=change.number,
        kind=change.kind,
        node_id=change.node.node_id,
        engine_id=engine_id,
        model=change.engine.model if change.engine else (pool.model if pool else None),
        role=pool.role if pool else (change.engine.role if change.engine else None),
        role_before=None if change.pool_before is None else problem.pools[change.pool_before].role,
        gpus=_gpus(question, change),
        sleep_level=1 if change.kind is MoveKind.SLEEP else 0,
        reason=_reason(question, target, change),
        gain_micro_usd_per_hour=gain_micro_usd_per_hour,
        duration_s=duration_s,
        after=tuple(sorted(change.after)),
    )


def _reason(question: Question, target: Target, change: _Change) -> str:
    region: RegionName = change.node.region
    if change.pool is None:
        return f"no work needs node `{change.node.node_id}` in {region}"
    name = question.problem.pools[change.pool].name
    if _is_failed(change):
        return f"an engine of {name} that failed holds the GPUs of another"
    wanted = target.engines.get((change.pool, region), 0)
    there = question.stock.actual.get((change.pool, region), 0)
    return f"{name} in {region} has {there} engines and needs {wanted}"


def inverse(move: Move) -> Move | None:
    """The move that takes `move` back. None where nothing but an operator can: a node given away."""
    back = {
        MoveKind.LOAD: MoveKind.UNLOAD,
        MoveKind.UNLOAD: MoveKind.LOAD,
        MoveKind.SLEEP: MoveKind.WAKE,
        MoveKind.WAKE: MoveKind.SLEEP,
        MoveKind.ROLE: MoveKind.ROLE,
    }
    if move.kind not in back:
        return None
    kind = back[move.kind]
    is_role = move.kind is MoveKind.ROLE
    return replace(
        move,
        kind=kind,
        role=move.role_before if is_role else move.role,
        role_before=move.role if is_role else None,
        sleep_level=1 if kind is MoveKind.SLEEP else 0,
        reason=f"takes back move {move.number}",
        gain_micro_usd_per_hour=-move.gain_micro_usd_per_hour,
        after=(),
    )
