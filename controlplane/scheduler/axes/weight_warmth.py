"""Weights in GPU memory: free when they are there, a share of their loading when they are not."""

from typing import Final

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast

# Calls over which the price of one load is spread, for each seat of the engine: a load pays off when
# every seat then serves this many. A planner's forecast of demand would stand here.
CALLS_PER_SEAT_PER_LOAD: Final = 20


def is_warm_in_time(request: Request, row: EngineRow, now_ms: int, before_ms: float) -> bool:
    return row.is_warm or now_ms + before_ms + row.load_ms < request.deadline_ms


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: load time x price of the engine, spread over the calls expected of one load."""
    if row.is_warm:
        return 0.0
    if not is_warm_in_time(request, row, forecast.now_ms, forecast.before_ms):
        return INFEASIBLE
    calls = CALLS_PER_SEAT_PER_LOAD * max(1, row.seats_capacity)
    return row.load_ms * row.micro_usd_per_ms / calls


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if is_warm_in_time(request, row, forecast.now_ms, forecast.before_ms):
        return None
    left_s = max(0, request.deadline_ms - forecast.now_ms) / MS_PER_S
    return f"loading takes {row.load_ms / MS_PER_S:.1f} s and the deadline is in {left_s:.1f} s"
