"""A fleet of small nodes whose agents are played by the test, and hand-made plans for it."""

from dataclasses import asdict
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Role
from controlplane.domain.ids import EngineId, GpuTypeName, ModelName, NodeId, RegionName
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.planner.problem import (
    DesiredCount,
    Move,
    MoveKind,
    Plan,
    PlanStatus,
    Prices,
)
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.store.catalog import apply_cluster, load_catalog
from controlplane.store.cluster import parse_cluster
from dataplane.protocol.messages import EngineFacts, EngineState, Hello

MODEL = ModelName("org/small")
OTHER = ModelName("org/other")
GPU = GpuTypeName("h100")
REGION = RegionName("eu")

_MODEL = """
  - name: {name}
    parameters: 8_000_000_000
    layers: 32
    hidden_size: 4096
    weights_bytes: 16_000_000_000
    kv_bytes_per_token: 131_072
    context_tokens_max: 32_768
    load_ms: 20_000
    price_prompt_micro_usd_per_mtok: 200_000
    price_cached_micro_usd_per_mtok: 50_000
    price_completion_micro_usd_per_mtok: 800_000
"""


def cluster_text(nodes: dict[str, dict[str, str]], gpus: int = 4) -> str:
    """Nodes with their engines by id, each with its model."""
    lines = [
        "regions: [eu]",
        "gpu_types:",
        "  - {name: h100, hbm_bytes: 80000000000, bandwidth_bytes_per_s: 3.35e+12,",
        "     flops_per_s: 9.89e+14, price_micro_usd_per_hour: 2500000, price_source: list,",
        '     price_date: "2026-11-01"}',
        "models:",
        _MODEL.format(name=MODEL).strip("\n"),
        _MODEL.format(name=OTHER).strip("\n"),
        "slo_classes:",
        "  - {name: interactive, ttft_ms_max: 1000, tpot_ms_max: 50, e2e_ms_max: 30000,",
        "     value_micro_usd: 10000, late_micro_usd_per_s: 100}",
        "tenants:",
        "  - {id: acme, name: Acme, tenant_class: gold, slo_class: interactive, budget_usd: 1.0}",
        "nodes:",
    ]
    for node, engines in nodes.items():
        lines.append(f"  - id: {node}")
        lines.append(
            f"    region: eu\n    gpu_type: h100\n    gpus: {gpus}\n    address: 127.0.0.1"
        )
        if engines:
            lines.append("    engines:")
        lines.extend(
            f"      - {{engine_id: {engine}, kind: simulated, model: {model}, role: both, gpus: 1,"
            " options: {speedup: 20}}"
            for engine, model in engines.items()
        )
    return "\n".join(lines)


def facts(engine_id: str, model: str, state: EngineState = EngineState.SERVING) -> EngineFacts:
    return EngineFacts(
        engine_id=engine_id, model=model, role="both", port=9000, kind="simulated", state=state,
        gpus=1, seats=32, kv_tokens=200_000, block_tokens=16, context_tokens_max=32_768,
        started_ms=1, speedup=20.0,
    )  # fmt: skip


class PlayedFleet:
    """Which engines each node has; `say` tells the replica's fleet."""

    def __init__(self, fleet: FleetState, nodes: dict[str, dict[str, str]]) -> None:
        self.fleet = fleet
        self.nodes = {node: dict(engines) for node, engines in nodes.items()}

    def say(self, node: str | None = None) -> None:
        for name in [node] if node else list(self.nodes):
            engines = [facts(engine, model) for engine, model in self.nodes[name].items()]
            assert self.fleet.hello(
                Hello(node_id=name, agent_epoch=1, version="0", engines=engines), 1.0
            )

    def snapshot(self) -> dict[str, dict[str, str]]:
        return {node: dict(engines) for node, engines in self.nodes.items()}


async def played_fleet(engine: AsyncEngine, nodes: dict[str, dict[str, str]]) -> PlayedFleet:
    await apply_cluster(engine, parse_cluster(cluster_text(nodes)))
    fleet = FleetState(PrefixIndex(), TickLog())
    fleet.use_catalog(await load_catalog(engine))
    played = PlayedFleet(fleet, nodes)
    played.say()
    return played


def move(
    number: int,
    kind: MoveKind,
    node: str,
    engine: str | None,
    model: str | None = MODEL,
    after: tuple[int, ...] = (),
    **members: Any,
) -> Move:
    return Move(
        number=number,
        kind=kind,
        node_id=NodeId(node),
        engine_id=None if engine is None else EngineId(engine),
        model=None if model is None else ModelName(model),
        role=Role.BOTH,
        gpus=1,
        reason="a test",
        gain_micro_usd_per_hour=1.0,
        after=after,
        **members,
    )


def plan(*moves: Move, wanted: int = 2, **members: Any) -> Plan:
    return Plan(
        **{
            "made_at_s": 1.0,
            "problem_digest": "0" * 64,
            "status": PlanStatus.OK,
            "desired": (
                DesiredCount(
                    model=MODEL, gpu_type=GPU, gpus=1, role=Role.BOTH, region=REGION,
                    desired=wanted, actual=2,
                ),
            ),
            "desired_nodes": (),
            "assignment": (),
            "moves": moves,
            "moves_waiting": 0,
            "prices": Prices(),
            "stretches": (),
            "held": (),
            "deferred": (),
            "fleet_micro_usd_per_hour": 5_000_000.0,
            "objective": 1.0,
            "bound": 1.0,
            "gap_ratio": 0.0,
            "solve_s": 0.1,
            "binding": (),
            **members,
        }
    )  # fmt: skip


def document(of: Plan) -> dict[str, Any]:
    import json

    return {"plan": json.loads(json.dumps(asdict(of))), "not_executable": {}}
