"""Which GPU: may this call run there, does its context fit, and what does the GPU time cost."""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: PLR1730

from collections.abc import Sequence
from typing import Final

from controlplane.domain.catalog import Role
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.flow import steps_left
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast, alone_ms

# A workflow that is expected to end in time on no type may begin on one that is this much slower than the
# fastest, pauses counted: its size is a guess, and its deadline may know better. As in the planner.
LATE_FINISH_RATIO_MAX: Final = 1.25
# Calls may take so many times as long as alone where engines are full, by the loosest
# bound of calls in flight.
SHARED_RATIO: Final = 2.5

_PREFILL_ROLE: Final = Role.PREFILL


def is_allowed(request: Request, row: EngineRow) -> bool:
    """The engine serves the model, and policy allows its region and GPU type."""
    return (
        row.model == request.model
        and (row.region_bit & request.regions) != 0
        and (row.gpu_bit & request.gpu_types) != 0
    )


def work_ms(request: Request, row: EngineRow) -> float:
    """Expected milliseconds of the workflow's calls, this one and those to come, on an empty engine like this."""
    prompt, added = request.prompt_tokens, request.completion_tokens_expected
    total_ms = alone_ms(row.rates, prompt, prompt, added)
    later = steps_left(request)
    if later > 0:
        total_ms += later * alone_ms(row.rates, prompt + added, added, added)
    return total_ms


def has_types(rows: Sequence[EngineRow]) -> bool:
    """Whether the rows are of more than one GPU type."""
    first = rows[0].gpu_bit if rows else 0
    for row in rows:  # noqa: SIM110  (a generator is slower, compiled)
        if row.gpu_bit != first:
            return True
    return False


def types_in_time(
    request: Request, rows: Sequence[EngineRow], now_ms: int, tolerance: float
) -> int:
    """Of the GPU types that policy allows, as bits, those on which a workflow that begins can end in time.

    A slow type spoils every tight workflow that is put on it, however cheap it is, so where one type can end a
    workflow in time the others are no choice: it waits for one that can. Expected sizes say which can; so
    does `tolerance`, how many times longer than on an empty engine its calls may take (0: not known),
    where its deadline knows its size better. The fastest always may. Of a type, the first engine that accepts
    calls speaks for all. A workflow that has a home stays there, and a lone call has its own deadline.
    """
    if request.workflow is None or request.home is not None:
        return request.gpu_types
    bits: list[int] = []
    works_ms: list[float] = []
    seen = 0
    for row in rows:
        if row.gpu_bit & seen or not row.is_accepting or row.role is _PREFILL_ROLE:
            continue
        if not is_allowed(request, row):
            continue
        seen |= row.gpu_bit
        bits.append(row.gpu_bit)
        works_ms.append(work_ms(request, row))
    if len(bits) < 2:  # noqa: PLR2004  (nothing to choose from)
        return request.gpu_types
    pauses_ms = float(steps_left(request) * request.step_gap_ms)
    fastest_ms = min(works_ms)
    limit_ms = request.workflow_deadline_ms - now_ms - pauses_ms
    if fastest_ms > limit_ms:
        limit_ms = (fastest_ms + pauses_ms) * LATE_FINISH_RATIO_MAX - pauses_ms
    if tolerance > 0.0:
        tolerated_ms = fastest_ms * tolerance / SHARED_RATIO
        if tolerated_ms < fastest_ms:
            tolerated_ms = fastest_ms
        if tolerated_ms < limit_ms:
            limit_ms = tolerated_ms
    allowed = request.gpu_types
    for at in range(len(bits)):
        if works_ms[at] > limit_ms:
            allowed &= ~bits[at]
    return allowed


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
