"""The workflow's fate: its own deadline, its budget, and the engine that holds its context."""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: FURB136

from typing import Final

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.legs import PREFILL
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast, prefill_ms

# Locality is near-absolute: leaving home costs this many times the recomputing of the context. At 1
# a fifth of bounded agents' workflows is lost under overload, at 30 and above nothing (simulated).
HOME_RECOMPUTE_FACTOR: Final = 30.0


def is_within_budget(request: Request, row: EngineRow, forecast: Forecast) -> bool:
    """What the workflow has left covers the GPU time of this leg here."""
    if request.workflow is None:
        return True
    return forecast.gpu_ms * row.micro_usd_per_ms <= request.workflow_remaining_micro_usd


def lateness_ms(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """How late the workflow ends if this step runs here and the later ones follow it.

    A later step computes what this one adds to the context and decodes as much, after the gap.
    """
    end_ms = forecast.now_ms + forecast.before_ms + forecast.e2e_ms
    steps_left = request.steps_expected - request.step - 1
    if steps_left > 0:
        added = request.completion_tokens_expected
        next_ms = prefill_ms(row, added, request.prompt_tokens + added) + forecast.decode_ms
        end_ms += steps_left * (request.step_gap_ms + next_ms)
    late_ms = end_ms - request.workflow_deadline_ms
    return late_ms if late_ms > 0.0 else 0.0


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: weighted lateness of the workflow, plus the price of leaving its home engine.

    lateness x late price x weight, and HOME_RECOMPUTE_FACTOR x the dollars of computing here what
    the home engine has. A session without a workflow has a home too. A prefill leg decides neither:
    the decode engine is where the context stays.
    """
    if not is_within_budget(request, row, forecast):
        return INFEASIBLE
    if forecast.leg == PREFILL:
        return 0.0
    total = 0.0
    if request.workflow is not None:
        late_ms = lateness_ms(request, row, forecast)
        total = late_ms / MS_PER_S * request.late_micro_usd_per_s * request.weight
    if request.home is not None and request.home != row.engine_id:
        total += HOME_RECOMPUTE_FACTOR * forecast.prefill_ms * row.micro_usd_per_ms
    return total


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if is_within_budget(request, row, forecast):
        return None
    predicted = forecast.gpu_ms * row.micro_usd_per_ms
    left = request.workflow_remaining_micro_usd
    return f"the call would cost ${predicted / 1e6:.6f} and the workflow has ${left / 1e6:.6f} left"
