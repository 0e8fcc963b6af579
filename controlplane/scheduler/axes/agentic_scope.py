"""The kind of workflow: how many calls at once, and what its context costs until the next step."""

from math import log

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.legs import PREFILL
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast, prefill_ms


def is_within_fan_out(request: Request) -> bool:
    return request.calls_in_flight < request.fan_out_max


def keep_micro_usd(hold_micro_usd: float, recompute_micro_usd: float) -> float:
    """Expected dollars of a context until it is used again, held for the best time and then let go.

    `hold_micro_usd` is holding it over the median pause m. Pauses have a heavy tail: P(longer than t) =
    1 / (1 + t / m) fits those of coding agents (median 9 s; 74 and 924 s at 0.9 and 0.99 are 81 and 891 s
    there; published Claude Code sessions, kv-cache-tester, Apache-2.0). Continuum's tau* (arXiv
    2511.02230) is the time up to which the chance of use in the next second is worth the holding; with this tail
    tau* = m (recompute / hold - 1), and the cost there is hold (1 + ln(recompute / hold)).
    """
    if hold_micro_usd <= 0.0:
        return 0.0
    ratio = recompute_micro_usd / hold_micro_usd
    if ratio <= 1.0:
        return recompute_micro_usd
    return hold_micro_usd * (1.0 + log(ratio))


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars that the next step will find here: holding this context, or computing it again.

    An engine that is full evicts before the pause ends, so of what holding saves the saturated share is
    lost: kept + saturation x (recompute - kept).
    """
    if not is_within_fan_out(request):
        return INFEASIBLE
    if request.step_gap_ms <= 0 or forecast.leg == PREFILL:
        return 0.0
    context = request.prompt_tokens + request.completion_tokens_expected
    recompute = prefill_ms(row, context, context) * row.micro_usd_per_ms
    hold = context * (request.step_gap_ms / MS_PER_S) * row.kv_price_micro_usd_per_token_s
    kept = keep_micro_usd(hold, recompute)
    return kept + forecast.kv_saturation * (recompute - kept)


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    del row, forecast
    if is_within_fan_out(request):
        return None
    return (
        f"{request.calls_in_flight:,} calls of the workflow are in flight and its scope "
        f"`{request.scope}` allows {request.fan_out_max:,}"
    )
