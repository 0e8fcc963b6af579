"""Small fleets and demand for tests of the planner, with capacities that can be added up by hand."""

from controlplane.domain.catalog import Role
from controlplane.domain.ids import EngineId, GpuTypeName, ModelName, NodeId, RegionName
from controlplane.scheduler.planner.problem import (
    Demand,
    EngineCondition,
    EngineState,
    NodeShape,
    NodeState,
    PoolKind,
)

REGION = RegionName("here")


def pool(
    gpu: str,
    per_s: float,
    *,
    model: str = "m",
    gpus: int = 1,
    load_s: float = 0.0,
    kv_tokens: int = 10**9,
    role: Role = Role.BOTH,
    wake_s: float | None = None,
) -> PoolKind:
    """An engine that does `per_s` workflows of one step a second, whatever their tokens."""
    return PoolKind(
        model=ModelName(model),
        gpu_type=GpuTypeName(gpu),
        gpus=gpus,
        role=role,
        prefill_base_ms=1_000.0 / per_s,
        prefill_ms_per_token=0.0,
        prefill_ms_per_token_sq=0.0,
        decode_ms_base=0.0,
        decode_ms_per_seq=0.0,
        decode_ms_per_kv_token=0.0,
        kv_tokens_capacity=kv_tokens,
        seats_capacity=256,
        load_s=load_s,
        wake_s=wake_s,
    )


def demand(per_s: float, **changes: object) -> Demand:
    """Work that is planned for at its mean: a floor of one half is no deviation above it."""
    model = changes.get("model", "m")
    facts: dict[str, object] = {
        "class_id": f"work-{model}",
        "model": model,
        "arrivals_per_s_now": per_s,
        "arrivals_per_s_forecast": per_s,
        "uncached_tokens": 1.0,
        "context_tokens": 1.0,
        "completion_tokens": 0.0,
        "value_micro_usd": 1e6,
        "success_floor_ratio": 0.5,
    }
    return Demand(**(facts | changes))  # type: ignore[arg-type]


def shape(gpu: str, usd_per_hour: float, *, more: int = 0, gpus: int = 1) -> NodeShape:
    return NodeShape(
        region=REGION,
        gpu_type=GpuTypeName(gpu),
        gpus=gpus,
        micro_usd_per_hour=round(usd_per_hour * 1e6),
        nodes_more_max=more,
    )


def engine(name: str, *, model: str = "m", gpus: int = 1, **changes: object) -> EngineState:
    facts: dict[str, object] = {"role": Role.BOTH, "condition": EngineCondition.SERVING}
    return EngineState(
        engine_id=EngineId(name),
        model=ModelName(model),
        gpus=gpus,
        **(facts | changes),  # type: ignore[arg-type]
    )


def node(name: str, gpu: str, *engines: EngineState, gpus: int = 1, **changes: object) -> NodeState:
    return NodeState(
        node_id=NodeId(name),
        region=REGION,
        gpu_type=GpuTypeName(gpu),
        gpus=gpus,
        engines=engines,
        **changes,  # type: ignore[arg-type]
    )
