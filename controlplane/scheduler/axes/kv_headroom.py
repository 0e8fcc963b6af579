"""Room for the call's KV at its peak, against lent credits and against what the engine measures."""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: PLR1730

from controlplane.domain.fleet import EngineRow, fits
from controlplane.domain.request import Request
from controlplane.scheduler.legs import DECODE, PREFILL
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast


def is_measured_room(row: EngineRow, forecast: Forecast) -> bool:
    """The engine's own report leaves room. It counts pinned tokens, where credits count added ones.

    Without it, contexts that are cached but idle would come into use unaccounted.
    """
    return row.kv_tokens_used + forecast.kv_tokens_pinned <= row.kv_tokens_capacity


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars of memory: KV tokens held beyond those already cached x seconds x their price.

    The output grows while it is held, so half of it counts. Feasible when the future peak (after
    Past-Future, LightLLM) passes the one `fits` test and the engine's measured use leaves room.
    """
    if not fits(row, forecast.kv_tokens, forecast.now_ms, request.is_preferred):
        return INFEASIBLE
    if not is_measured_room(row, forecast):
        return INFEASIBLE
    held = float(request.prompt_tokens)
    if forecast.leg != DECODE:
        held -= forecast.cached_tokens
        if held < 0.0:
            held = 0.0
    if forecast.leg != PREFILL:
        held += 0.5 * request.completion_tokens_expected
    return held * (forecast.e2e_ms / MS_PER_S) * row.kv_price_micro_usd_per_token_s


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    need = forecast.kv_tokens
    if not fits(row, need, forecast.now_ms, request.is_preferred):
        if not row.is_accepting:
            return "it does not accept calls"
        if row.is_suspect:
            return "its breaker is open after failures"
        if forecast.now_ms >= row.credits_expire_ms:
            return "its agent lends no credits at present"
        if row.seats_taken >= row.seats_lent:
            return f"all {row.seats_lent:,} lent seats are taken"
        if row.seats_taken >= row.seats_bound + row.seats_over * request.is_preferred:
            return f"it is held to {row.seats_bound:,} calls in flight for now"
        free = row.kv_tokens_lent - row.kv_tokens_taken
        return f"the call needs {need:,} KV tokens and {free:,} are free"
    if not is_measured_room(row, forecast):
        free = max(0, row.kv_tokens_capacity - row.kv_tokens_used)
        pinned = int(forecast.kv_tokens_pinned)
        return f"the call would pin {pinned:,} KV tokens and the engine reports {free:,} free"
    return None
