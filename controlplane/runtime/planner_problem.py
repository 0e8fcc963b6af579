"""Puts together what the planner is asked: the fleet as it stands, what it could be, and the demand.

Pure but for the wall clock in its arguments: the same facts give the same problem.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from controlplane.domain.catalog import Catalog, Node, Role
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import EngineId, GpuTypeName, ModelName, NodeId
from controlplane.runtime.fleet_state import SPEEDUP_MIN, FleetState
from controlplane.scheduler.perf_model import MS_PER_S
from controlplane.scheduler.planner.problem import (
    Demand,
    EngineCondition,
    EngineState,
    Held,
    Limits,
    NodeShape,
    NodeState,
    PoolKind,
    Problem,
    RecentWorkflow,
    Stretch,
    pool_kind,
)
from controlplane.store.catalog import EngineRecord
from dataplane.protocol.messages import EngineFacts, EngineSpec, engine_of
from dataplane.protocol.messages import EngineState as Told

CONDITIONS: Final[dict[str, EngineCondition]] = {
    Told.STARTING: EngineCondition.STARTING,
    Told.SERVING: EngineCondition.SERVING,
    Told.DRAINING: EngineCondition.DRAINING,
    Told.SLEEPING: EngineCondition.ASLEEP,
    Told.FAILED: EngineCondition.FAILED,
    # A stopped engine holds no GPU: it is left out.
}
# Sizes of an engine that are tried where a model has never run on a GPU type: the smallest that fits.
TENSOR_PARALLEL_SIZES: Final = (1, 2, 4, 8)
SIMULATED: Final = "simulated"

KindKey = tuple[ModelName, GpuTypeName, int, Role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What an autoscaler may do: nodes added to each shape at most, and how long one takes to come.

    0 nodes: the fleet is fixed and paid for, whatever runs on it.
    """

    nodes_more_max: int
    provision_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSeen:
    """The fleet of one replica with what PostgreSQL knows besides: nodes that this one has not heard."""

    nodes: tuple[NodeState, ...]
    pools: tuple[PoolKind, ...]
    shapes: tuple[NodeShape, ...]


def see_fleet(
    fleet: FleetState,
    declared: Iterable[EngineRecord],
    specs: Mapping[EngineId, tuple[NodeId, EngineSpec]],
    growth: Growth,
) -> FleetSeen:
    """Nodes with their engines, and the kinds of engines that could run on them.

    A kind is known from an engine that runs, or from how one is started; its rates are those of a
    running engine where there is one, for they hold what a simulated engine is faster by.
    """
    catalog = fleet.catalog
    written: dict[NodeId, list[EngineRecord]] = {}
    for record in declared:
        written.setdefault(record.node_id, []).append(record)
    nodes = tuple(
        _node(fleet, node, written.get(node.id, []), growth) for node in catalog.nodes.values()
    )
    speeds = speeds_of(fleet, specs)
    return FleetSeen(
        nodes=nodes,
        pools=_kinds(fleet, nodes, specs, speeds),
        shapes=_shapes(catalog, speeds, growth),
    )


def _node(fleet: FleetState, node: Node, written: list[EngineRecord], growth: Growth) -> NodeState:
    entry = fleet.nodes.get(node.id)
    if entry is not None:
        engines = _whole(
            _engine(engine.facts, CONDITIONS[engine.facts.state], engine.row.sleep_level)
            for engine in entry.engines.values()
            if engine.facts.state in CONDITIONS
        )
    else:
        # Not heard of since this replica began: it keeps what it had when it last spoke.
        engines = _whole(
            EngineState(
                engine_id=EngineId(engine_of(record.id)),
                model=record.model,
                role=Role(record.role),
                gpus=record.gpus,
                condition=CONDITIONS[record.state],
                sleep_level=record.sleep_level,
            )
            for record in written
            if record.state in CONDITIONS
        )
    return NodeState(
        node_id=node.id,
        region=node.region,
        gpu_type=node.gpu_type,
        gpus=node.gpus,
        engines=tuple(sorted(engines, key=lambda engine: engine.engine_id)),
        is_known=entry is not None and entry.heard_ms > 0.0,
        is_cordoned=node.is_cordoned,
        is_releasable=growth.nodes_more_max > 0,
        epoch=0 if entry is None else entry.agent_epoch,
    )


def _whole(declared: Iterable[EngineState]) -> list[EngineState]:
    """Engines as they are started and stopped: data-parallel ranks of one are one, with the GPUs of all."""
    engines: dict[EngineId, EngineState] = {}
    for one in declared:
        known = engines.get(one.engine_id)
        engines[one.engine_id] = (
            one if known is None else replace(known, gpus=known.gpus + one.gpus)
        )
    return list(engines.values())


def _engine_id(facts: EngineFacts) -> EngineId:
    return EngineId(facts.engine_id if facts.rank < 0 else engine_of(facts.engine_id))


def _engine(facts: EngineFacts, condition: EngineCondition, sleep_level: int) -> EngineState:
    is_asleep = sleep_level > 0 and condition is EngineCondition.SERVING
    return EngineState(
        engine_id=_engine_id(facts),
        model=ModelName(facts.model),
        role=Role(facts.role),
        gpus=facts.gpus,
        condition=EngineCondition.ASLEEP if is_asleep else condition,
        sleep_level=sleep_level,
    )


def speeds_of(
    fleet: FleetState, specs: Mapping[EngineId, tuple[NodeId, EngineSpec]]
) -> dict[GpuTypeName, float]:
    """How many times faster than its hardware a GPU type runs, and how many times dearer: 1 for real ones."""
    running: dict[GpuTypeName, float] = {}
    for entry in fleet.entries():
        speed = max(entry.facts.speedup, SPEEDUP_MIN)
        running[entry.row.gpu_type] = max(speed, running.get(entry.row.gpu_type, speed))
    declared: dict[GpuTypeName, float] = {}
    for node_id, spec in specs.values():
        node = fleet.catalog.nodes.get(node_id)
        told = spec.options.get("speedup", 1.0)
        if node is None or spec.kind != SIMULATED or not isinstance(told, int | float):
            continue
        speed = max(float(told), SPEEDUP_MIN)
        declared[node.gpu_type] = max(speed, declared.get(node.gpu_type, speed))
    return {**declared, **running}


def _kinds(
    fleet: FleetState,
    nodes: tuple[NodeState, ...],
    specs: Mapping[EngineId, tuple[NodeId, EngineSpec]],
    speeds: Mapping[GpuTypeName, float],
) -> tuple[PoolKind, ...]:
    catalog = fleet.catalog
    found: dict[KindKey, PoolKind] = {}
    entries = tuple(fleet.entries())
    ranks = Counter(_engine_id(entry.facts) for entry in entries)
    for entry in entries:
        row, together = entry.row, ranks[_engine_id(entry.facts)]
        gpus = entry.facts.gpus * together
        key = (row.model, row.gpu_type, gpus, row.role)
        if key not in found and row.seats_capacity > 0 and row.kv_tokens_capacity > 0:
            found[key] = _measured(row, gpus, together)
    asked: set[KindKey] = set()
    for node_id, spec in specs.values():
        node = catalog.nodes.get(node_id)
        if node is not None:
            asked.add((ModelName(spec.model), node.gpu_type, spec.gpus, Role(spec.role)))
    for state in nodes:
        asked.update(
            (engine.model, state.gpu_type, engine.gpus, engine.role) for engine in state.engines
        )
    sizes = {node.gpu_type: 0 for node in catalog.nodes.values()}
    for node in catalog.nodes.values():
        sizes[node.gpu_type] = max(sizes[node.gpu_type], node.gpus)
    for model in catalog.models:
        for gpu_type, gpus_most in sizes.items():
            if any(key[:2] == (model, gpu_type) for key in (*found, *asked)):
                continue
            for gpus in TENSOR_PARALLEL_SIZES:
                key = (model, gpu_type, gpus, Role.BOTH)
                if gpus <= gpus_most and by_roofline(catalog, key, 1.0) is not None:
                    asked.add(key)
                    break
    for key in asked - found.keys():
        kind = by_roofline(catalog, key, speeds.get(key[1], 1.0))
        if kind is not None:
            found[key] = kind
    return tuple(found[key] for key in sorted(found))


def _measured(row: EngineRow, gpus: int, ranks: int) -> PoolKind:
    """A kind by what an engine of it does; one of several `ranks` shares all its work among them.

    What each of them spends on a token or a call is then spent on as many at once.
    """
    return PoolKind(
        model=row.model,
        gpu_type=row.gpu_type,
        gpus=gpus,
        role=row.role,
        prefill_base_ms=row.prefill_base_ms,
        prefill_ms_per_token=row.prefill_ms_per_token / ranks,
        prefill_ms_per_token_sq=row.prefill_ms_per_token_sq / ranks,
        decode_ms_base=row.decode_ms_base,
        decode_ms_per_seq=row.decode_ms_per_seq / ranks,
        decode_ms_per_kv_token=row.decode_ms_per_kv_token / ranks,
        kv_tokens_capacity=row.kv_tokens_capacity * ranks,
        seats_capacity=row.seats_capacity * ranks,
        load_s=row.load_ms / MS_PER_S,
    )


def by_roofline(catalog: Catalog, key: KindKey, speed: float) -> PoolKind | None:
    """A kind that runs nowhere yet, `speed` times as fast as its hardware. None: its weights do not fit."""
    name, gpu_type, gpus, role = key
    model, gpu = catalog.models.get(name), catalog.gpu_types.get(gpu_type)
    if model is None or gpu is None:
        return None
    kind = pool_kind(model, gpu, gpus, role)
    if kind is None or speed == 1.0:
        return kind
    return replace(
        kind,
        prefill_base_ms=kind.prefill_base_ms / speed,
        prefill_ms_per_token=kind.prefill_ms_per_token / speed,
        prefill_ms_per_token_sq=kind.prefill_ms_per_token_sq / speed,
        decode_ms_base=kind.decode_ms_base / speed,
        decode_ms_per_seq=kind.decode_ms_per_seq / speed,
        decode_ms_per_kv_token=kind.decode_ms_per_kv_token / speed,
        load_s=kind.load_s / speed,
    )


def _shapes(
    catalog: Catalog, speeds: Mapping[GpuTypeName, float], growth: Growth
) -> tuple[NodeShape, ...]:
    shapes = {}
    for node in catalog.nodes.values():
        price = catalog.gpu_types[node.gpu_type].price_micro_usd_per_hour
        shapes[node.region, node.gpu_type, node.gpus] = NodeShape(
            region=node.region,
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            micro_usd_per_hour=round(price * node.gpus * speeds.get(node.gpu_type, 1.0)),
            nodes_more_max=growth.nodes_more_max,
            provision_s=growth.provision_s,
        )
    return tuple(shapes[key] for key in sorted(shapes))


def make_problem(
    seen: FleetSeen,
    demands: tuple[Demand, ...],
    *,
    now_s: float,
    limits: Limits,
    held: tuple[Held, ...] = (),
    stretches: tuple[Stretch, ...] = (),
    recent: tuple[RecentWorkflow, ...] = (),
) -> Problem:
    """The problem of one round. Classes of models that no engine could serve stay in: the plan is short
    then, and says so.
    """
    return Problem(
        now_s=now_s,
        demands=demands,
        pools=seen.pools,
        shapes=seen.shapes,
        nodes=seen.nodes,
        limits=limits,
        held=held,
        stretches=stretches,
        recent=recent,
    )
