"""Weights in GPU memory: free when they are there, a share of the load or the waking when they are not.

An adapter's weights are there or not; loading them is a command's work, and no call's.
"""

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast


def is_warm_in_time(request: Request, row: EngineRow, now_ms: int, before_ms: float) -> bool:
    return row.is_warm or now_ms + before_ms + row.warm_up_ms < request.deadline_ms


def has_adapter(request: Request, row: EngineRow) -> bool:
    return not request.adapter or request.adapter in row.adapters


def turn_ratio(row: EngineRow) -> float:
    """Share in 0..1 of the adapters there that must wait while as many as there are slots are in a batch."""
    loaded = len(row.adapters)
    if loaded <= row.adapter_slots:
        return 0.0
    return 1.0 - row.adapter_slots / loaded


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: warm-up time x price of the engine, spread over the calls expected to share it.

    The warm-up is a load, or a waking from sleep, and the first answer. A call that nobody is expected to
    follow pays all of it. Where more adapters are loaded than a batch can mix, a call is taken to wait for
    a whole one of another adapter as often as its own is not in the batch.
    """
    turn = 0.0
    if request.adapter:
        if request.adapter not in row.adapters:
            return INFEASIBLE
        turn = turn_ratio(row) * forecast.e2e_ms * row.micro_usd_per_ms
    if row.is_warm:
        return turn
    if not is_warm_in_time(request, row, forecast.now_ms, forecast.before_ms):
        return INFEASIBLE
    calls = row.calls_per_load if row.calls_per_load > 1.0 else 1.0  # noqa: FURB136
    return turn + row.warm_up_ms * row.micro_usd_per_ms / calls


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if not has_adapter(request, row):
        return f"the adapter `{request.adapter}` is not loaded there"
    if is_warm_in_time(request, row, forecast.now_ms, forecast.before_ms):
        return None
    left_s = max(0, request.deadline_ms - forecast.now_ms) / MS_PER_S
    doing = "waking" if row.sleep_level else "loading"
    return f"{doing} takes {row.warm_up_ms / MS_PER_S:.1f} s and the deadline is in {left_s:.1f} s"
