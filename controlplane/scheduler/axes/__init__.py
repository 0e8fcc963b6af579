"""The seven axes, in the order in which they are asked. A further axis is a further module and line."""

from collections.abc import Callable
from typing import NamedTuple

from controlplane.domain.decision import Axis
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.axes import (
    agentic_scope,
    gpu_type,
    kv_headroom,
    latency_budget,
    tenant_priority,
    weight_warmth,
    workflow,
)
from controlplane.scheduler.perf_model import Forecast

CostOf = Callable[[Request, EngineRow, Forecast], float]
ObjectionOf = Callable[[Request, EngineRow, Forecast], str | None]


class AxisFunctions(NamedTuple):
    """`cost` is micro-dollars, infinite when infeasible; `objection` is the same refusal in words."""

    axis: Axis
    cost: CostOf
    objection: ObjectionOf


AXES: tuple[AxisFunctions, ...] = (
    AxisFunctions(Axis.GPU_TYPE, gpu_type.cost, gpu_type.objection),
    AxisFunctions(Axis.KV_HEADROOM, kv_headroom.cost, kv_headroom.objection),
    AxisFunctions(Axis.WEIGHT_WARMTH, weight_warmth.cost, weight_warmth.objection),
    AxisFunctions(Axis.TENANT_PRIORITY, tenant_priority.cost, tenant_priority.objection),
    AxisFunctions(Axis.WORKFLOW, workflow.cost, workflow.objection),
    AxisFunctions(Axis.LATENCY_BUDGET, latency_budget.cost, latency_budget.objection),
    AxisFunctions(Axis.AGENTIC_SCOPE, agentic_scope.cost, agentic_scope.objection),
)
