"""Which GPU: may this call run there, does its context fit, and what does the GPU time cost."""

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast


def is_allowed(request: Request, row: EngineRow) -> bool:
    """The engine serves the model, and policy allows its region and GPU type."""
    return (
        row.model == request.model
        and (row.region_bit & request.regions) != 0
        and (row.gpu_bit & request.gpu_types) != 0
    )


def is_context_within(request: Request, row: EngineRow) -> bool:
    """The expected context fits the engine. Sizes are estimates; the engine judges exact ones."""
    context = request.prompt_tokens + request.completion_tokens_expected
    return context <= row.context_tokens_max


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars of GPU time: engine milliseconds that the call uses up x price x attempts.

    Where calls fail of late, each success is expected to cost several of them.
    """
    if not is_allowed(request, row) or not is_context_within(request, row):
        return INFEASIBLE
    return forecast.gpu_ms * row.micro_usd_per_ms * row.attempts_expected


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    del forecast
    if row.model != request.model:
        return f"it serves `{row.model}`"
    if not row.region_bit & request.regions:
        return f"policy does not allow region `{row.region}`"
    if not row.gpu_bit & request.gpu_types:
        return f"policy does not allow GPU type `{row.gpu_type}`"
    if not is_context_within(request, row):
        context = request.prompt_tokens + request.completion_tokens_expected
        return f"a context of {context:,} tokens is over its {row.context_tokens_max:,}"
    return None
