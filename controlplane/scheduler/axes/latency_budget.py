"""The call's own targets: how late its first token, its pace and its end are predicted to be."""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: FURB136, PLR1730

from typing import Final

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.legs import DECODE, PREFILL
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast

# Predictions err by about this share, so the risk of missing the deadline begins before the
# predicted end reaches it and is certain this share after it.
PREDICTION_ERROR_RATIO: Final = 0.2


def is_reachable(request: Request, forecast: Forecast) -> bool:
    """Even a lower bound meets the deadline. A mean would refuse what could have succeeded.

    Calls that are ahead, on the engine or in the queue, are not in it: their prompts may be cached, and
    they may end or be given up at any moment.
    """
    least_ms = forecast.before_ms + forecast.ttft_ms_least + forecast.decode_ms_least
    return forecast.now_ms + least_ms < request.deadline_ms


def risk_ratio(predicted_ms: float, left_ms: float) -> float:
    """Chance in 0..1 that something predicted to take `predicted_ms` is not done in `left_ms`."""
    if left_ms <= 0.0:
        return 1.0
    over = predicted_ms / left_ms - (1.0 - PREDICTION_ERROR_RATIO)
    if over <= 0.0:
        return 0.0
    risk = over / (2.0 * PREDICTION_ERROR_RATIO)
    return risk if risk < 1.0 else 1.0


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: weight x (late price x predicted lateness + value x risk of the deadline).

    Lateness is TTFT beyond its target, backlog included, plus each token's excess over the TPOT
    target. A prefill leg answers for the lateness that it causes, its decode leg for what is added
    to that, so that the two add up to the lateness of the pair.
    """
    del row
    if not is_reachable(request, forecast):
        return INFEASIBLE
    waited_ms = forecast.now_ms - request.arrival_ms + forecast.before_ms
    late_ms = waited_ms + forecast.ttft_ms - request.ttft_ms_max
    if late_ms < 0.0:
        late_ms = 0.0
    if forecast.leg == PREFILL:
        return request.weight * request.late_micro_usd_per_s * late_ms / MS_PER_S
    if forecast.leg == DECODE:
        already_ms = waited_ms - request.ttft_ms_max
        if already_ms > 0.0:
            late_ms -= already_ms
    slow_ms = forecast.tpot_ms - request.tpot_ms_max
    if slow_ms > 0.0 and request.completion_tokens_expected > 1:
        late_ms += slow_ms * (request.completion_tokens_expected - 1)
    end_ms = forecast.before_ms + forecast.e2e_ms
    risk = risk_ratio(end_ms, request.deadline_ms - forecast.now_ms)
    return request.weight * (
        request.late_micro_usd_per_s * late_ms / MS_PER_S + request.value_micro_usd * risk
    )


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    del row
    if is_reachable(request, forecast):
        return None
    first_s = (forecast.before_ms + forecast.ttft_ms_least) / MS_PER_S
    left_s = max(0, request.deadline_ms - forecast.now_ms) / MS_PER_S
    if first_s >= left_s or forecast.decode_ms_least <= 0.0:
        least = f"the first token takes at least {first_s:.2f} s"
    else:
        least_s = first_s + forecast.decode_ms_least / MS_PER_S
        least = f"an answer of {request.completion_tokens_least:,} tokens takes at least {least_s:.2f} s"
    return f"{least} and the deadline is in {left_s:.2f} s"
