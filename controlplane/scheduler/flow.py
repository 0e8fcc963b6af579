"""What one more call, and the steps after it, mean to an engine: how urgent they are, how long they make steps.

The two halves of placement by externality: delay costs the newcomer its own urgency, and what it slows
down costs the urgency of all who live there. Knows a request and a row, and no clock.
"""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: FURB136, PLR1730

from typing import Final

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.legs import DECODE, PREFILL
from controlplane.scheduler.perf_model import MS_PER_S, prefill_ms

# With less time than this left, urgency grows no further.
LEFT_MS_MIN: Final = 1_000.0


def steps_left(request: Request) -> int:
    """Steps expected after this one."""
    left = request.steps_expected - request.step - 1
    return left if left > 0 else 0


def urgency_micro_usd_per_s(request: Request, now_ms: int) -> float:
    """What a second of delay costs now: weighted value over the time left, pauses between steps taken off.

    The time that is still needed is not known; with every length up to the time left equally likely,
    a delay of d makes it miss with chance d / left. Among classes whose deadline is a multiple of the
    time needed this is the order of 1 / (multiple - 1) that was best in simulation.
    """
    left_ms = float(request.workflow_deadline_ms - now_ms)
    left_ms -= float(steps_left(request)) * request.step_gap_ms
    if left_ms < LEFT_MS_MIN:
        left_ms = LEFT_MS_MIN
    return request.weight * request.value_micro_usd / left_ms * MS_PER_S


def step_ms_added(request: Request, row: EngineRow) -> float:
    """Milliseconds by which a decode step of the engine is longer while the call takes part."""
    context = request.prompt_tokens + 0.5 * request.completion_tokens_expected
    return row.decode_ms_per_seq + context * row.decode_ms_per_kv_token


def duty_ratio(request: Request, call_ms: float) -> float:
    """Share of its life that the workflow has a call in flight: call over call and pause."""
    if request.step_gap_ms <= 0 or call_ms <= 0.0:
        return 1.0
    return call_ms / (call_ms + request.step_gap_ms)


def own_ms(request: Request, row: EngineRow, call_ms: float, tpot_ms: float) -> float:
    """Time until the workflow ends if this step runs here and the later ones follow, without pauses.

    `call_ms` is what this step takes, what passes before it included, and `tpot_ms` its mean step. A later
    step computes what this one adds to the context and decodes as much. It meets the mean of the load
    as it is and of what the flows that live there bring on average (half and half, simulated).
    """
    later = steps_left(request)
    if later == 0:
        return call_ms
    added = request.completion_tokens_expected
    usual_ms = row.decode_ms_base + step_ms_added(request, row) + row.flows_ms_per_step
    decode_ms = (added - 1.0) * 0.5 * (tpot_ms + usual_ms) if added > 1 else 0.0
    return call_ms + later * (prefill_ms(row, added, request.prompt_tokens + added) + decode_ms)


def caused_ms(request: Request, row: EngineRow, leg: int, uncached_ms: float) -> float:
    """Delay of each other call there while it shares the engine: the prompt's computing, and longer steps.

    `uncached_ms` computes the prompt. Of all steps of the workflow, which will live where its first step
    goes.
    """
    if leg == PREFILL:
        return uncached_ms
    expected = request.completion_tokens_expected
    decode_ms = expected * step_ms_added(request, row)
    total_ms = decode_ms
    if leg != DECODE:
        total_ms += uncached_ms
    later = steps_left(request)
    if later > 0:
        next_ms = prefill_ms(row, expected, request.prompt_tokens + expected)
        total_ms += later * (next_ms + decode_ms)
    return total_ms
