"""The workflow's fate: its own deadline, its budget, and the engine that holds its context."""

from typing import Final

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.flow import own_ms, steps_left, urgency_micro_usd_per_s
from controlplane.scheduler.legs import PREFILL
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast

# Locality is near-absolute: leaving home costs this many times the recomputing of the context. At 1
# a fifth of bounded agents' workflows is lost under overload, at 30 and above nothing (simulated).
HOME_RECOMPUTE_FACTOR: Final = 30.0
# Predicted times err by about 7 % (`perf_model.py`): costs that lie closer together than this are equal.
HINT_RATIO: Final = 0.05


def is_within_budget(request: Request, row: EngineRow, forecast: Forecast) -> bool:
    """What the workflow has left covers the GPU time of this leg here."""
    if request.workflow is None:
        return True
    return forecast.gpu_ms * row.micro_usd_per_ms <= request.workflow_remaining_micro_usd


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: time to the workflow's end at its urgency, weighted lateness, and leaving home.

    Time until the workflow ends x what a second of it is worth now; what it ends after its deadline x
    late price x weight; and HOME_RECOMPUTE_FACTOR x the dollars of computing here what the home engine
    has. A session without a workflow is a client's hint: leaving its engine costs HINT_RATIO of the GPU
    time, which decides between near-equals only. A prefill leg decides none of this: the decode engine
    is where the context stays.
    """
    if not is_within_budget(request, row, forecast):
        return INFEASIBLE
    if forecast.leg == PREFILL:
        return 0.0
    time_ms = own_ms(request, row, forecast.before_ms + forecast.e2e_ms, forecast.tpot_ms)
    total = time_ms / MS_PER_S * urgency_micro_usd_per_s(request, forecast.now_ms)
    end_ms = forecast.now_ms + time_ms + steps_left(request) * request.step_gap_ms
    if end_ms > request.workflow_deadline_ms and request.workflow is not None:
        late_s = (end_ms - request.workflow_deadline_ms) / MS_PER_S
        total += late_s * request.late_micro_usd_per_s * request.weight
    if request.home is not None and request.home != row.engine_id:
        if request.workflow is not None:
            total += HOME_RECOMPUTE_FACTOR * forecast.prefill_ms * row.micro_usd_per_ms
        else:
            total += HINT_RATIO * forecast.gpu_ms * row.micro_usd_per_ms
    return total


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if is_within_budget(request, row, forecast):
        return None
    predicted = forecast.gpu_ms * row.micro_usd_per_ms
    left = request.workflow_remaining_micro_usd
    return f"the call would cost ${predicted / 1e6:.6f} and the workflow has ${left / 1e6:.6f} left"
