"""Weights in GPU memory: free when they are there, a share of the load or the waking when they are not."""

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast


def is_warm_in_time(request: Request, row: EngineRow, now_ms: int, before_ms: float) -> bool:
    return row.is_warm or now_ms + before_ms + row.warm_up_ms < request.deadline_ms


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: warm-up time x price of the engine, spread over the calls expected to share it.

    The warm-up is a load, or a waking from sleep, and the first answer. A call that nobody is expected to
    follow pays all of it.
    """
    if row.is_warm:
        return 0.0
    if not is_warm_in_time(request, row, forecast.now_ms, forecast.before_ms):
        return INFEASIBLE
    calls = row.calls_per_load if row.calls_per_load > 1.0 else 1.0  # noqa: FURB136
    return row.warm_up_ms * row.micro_usd_per_ms / calls


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if is_warm_in_time(request, row, forecast.now_ms, forecast.before_ms):
        return None
    left_s = max(0, request.deadline_ms - forecast.now_ms) / MS_PER_S
    doing = "waking" if row.sleep_level else "loading"
    return f"{doing} takes {row.warm_up_ms / MS_PER_S:.1f} s and the deadline is in {left_s:.1f} s"
