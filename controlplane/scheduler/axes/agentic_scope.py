"""The kind of workflow: how many calls at once, and what its context costs until the next step."""

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.legs import PREFILL
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast, prefill_ms


def is_within_fan_out(request: Request) -> bool:
    return request.calls_in_flight < request.fan_out_max


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars that the next step will find here: holding this context, or computing it again.

    The tau* rule (after Continuum, arXiv 2511.02230): holding K tokens over the expected gap costs
    K x gap x price of a KV token-second, and is worth it while that is below the cost of
    computing them again. An engine that is full evicts before the gap ends, so of the recompute
    the saturated share is paid anyway: min(recompute, hold + saturation x recompute).
    """
    if not is_within_fan_out(request):
        return INFEASIBLE
    if request.step_gap_ms <= 0 or forecast.leg == PREFILL:
        return 0.0
    context = request.prompt_tokens + request.completion_tokens_expected
    recompute = prefill_ms(row, context, context) * row.micro_usd_per_ms
    hold = context * (request.step_gap_ms / MS_PER_S) * row.kv_price_micro_usd_per_token_s
    return min(recompute, hold + forecast.kv_saturation * recompute)


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    del row, forecast
    if is_within_fan_out(request):
        return None
    return (
        f"{request.calls_in_flight:,} calls of the workflow are in flight and its scope "
        f"`{request.scope}` allows {request.fan_out_max:,}"
    )
