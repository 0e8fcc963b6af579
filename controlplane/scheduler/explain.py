"""Why a call went where it went: every candidate over the seven axes, by the functions that decided.

Works on rows as they stood at the decision (`tick_log.py`); costs about a millisecond per hundred
candidates, so it runs when somebody asks and for refusals, never per request.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.domain.catalog import Role
from controlplane.domain.decision import (
    Axis,
    AxisView,
    CandidateView,
    Explanation,
    Placement,
    Reason,
)
from controlplane.domain.fleet import EngineRow
from controlplane.domain.money import usd
from controlplane.domain.request import Request
from controlplane.scheduler.axes import AXES
from controlplane.scheduler.legs import DECODE, PREFILL, WHOLE
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast
from controlplane.scheduler.place import PrefillChoice, object_to, prefill_choices

# Objections told in one sentence; the table has them all.
OBJECTIONS_TOLD_MAX: Final = 3


def explain(
    request: Request,
    rows: Sequence[EngineRow],
    cached: Mapping[int, int],
    now_ms: int,
    winner: Placement | None,
    reason: Reason | None,
) -> Explanation:
    """The decision again, in full. `winner` and `reason` are what was decided, None where not."""
    held = dict(cached)
    views = [
        _single(request, row, held, now_ms)
        for row in rows
        if row.role is not Role.PREFILL and row.model == request.model
    ]
    views += _pairs(request, rows, held, now_ms)
    winner_name = None if winner is None else _name(winner.decode, winner.prefill)
    views.sort(
        key=lambda view: (
            not view.is_feasible,
            view.cost_micro_usd,
            # Among equals the tie-break chose.
            candidate_name(view) != winner_name,
            candidate_name(view),
        )
    )
    won = next((view for view in views if candidate_name(view) == winner_name), None)
    rival = next((view for view in views if view.is_feasible and view is not won), None)
    sentence = (
        _refusal(request, rows, held, now_ms, reason, views)
        if won is None
        else _victory(request, won, rival)
    )
    return Explanation(
        request_id=request.id,
        model=request.model,
        candidates=tuple(views),
        winner=winner_name,
        runner_up=None if won is None or rival is None else candidate_name(rival),
        reason=reason,
        sentence=sentence,
    )


def candidate_name(view: CandidateView) -> str:
    """`engine`, or `prefill engine+decode engine`: as `winner` and `runner_up` name candidates."""
    return view.decode if view.prefill is None else f"{view.prefill}+{view.decode}"


def _name(decode: EngineRow, prefill: EngineRow | None) -> str:
    return str(decode.engine_id) if prefill is None else f"{prefill.engine_id}+{decode.engine_id}"


def _axes(request: Request, row: EngineRow, forecast: Forecast) -> tuple[AxisView, ...]:
    return tuple(
        AxisView(
            entry.axis,
            entry.cost(request, row, forecast),
            entry.objection(request, row, forecast),
        )
        for entry in AXES
    )


def _total(axes: tuple[AxisView, ...]) -> float:
    """The sum in the order of `AXES`, as `price` adds it up."""
    total = 0.0
    for view in axes:
        total += view.cost_micro_usd
    return total


def _single(
    request: Request, row: EngineRow, held: dict[int, int], now_ms: int, leg: int = WHOLE
) -> CandidateView:
    tokens = held.get(row.index, 0)
    forecast = Forecast(request, row, tokens, now_ms, leg, 0.0)
    axes = _axes(request, row, forecast)
    total = _total(axes)
    return CandidateView(
        decode=str(row.engine_id),
        prefill=None,
        gpu_type=row.gpu_type,
        region=row.region,
        axes=axes,
        cached_tokens=min(tokens, request.prompt_tokens),
        ttft_ms_predicted=forecast.ttft_ms,
        e2e_ms_predicted=forecast.e2e_ms,
        cost_micro_usd=total,
        is_feasible=total < INFEASIBLE,
        ttft_correction=row.ttft_correction,
        tpot_correction=row.tpot_correction,
    )


def _pair(
    request: Request,
    prefill: PrefillChoice,
    decode: EngineRow,
    held: dict[int, int],
    now_ms: int,
) -> CandidateView:
    tokens = held.get(prefill.row.index, 0)
    first = Forecast(request, prefill.row, tokens, now_ms, PREFILL, 0.0)
    second = Forecast(request, decode, held.get(decode.index, 0), now_ms, DECODE, first.ttft_ms)
    first_axes = _axes(request, prefill.row, first)
    second_axes = _axes(request, decode, second)
    axes = tuple(
        AxisView(
            one.axis,
            one.cost_micro_usd + two.cost_micro_usd,
            _both(prefill.row, one.objection, decode, two.objection),
        )
        for one, two in zip(first_axes, second_axes, strict=True)
    )
    # Legs are priced one by one and then added.
    total = _total(first_axes) + _total(second_axes)
    return CandidateView(
        decode=str(decode.engine_id),
        prefill=str(prefill.row.engine_id),
        gpu_type=decode.gpu_type,
        region=decode.region,
        axes=axes,
        cached_tokens=min(tokens, request.prompt_tokens),
        ttft_ms_predicted=first.ttft_ms + second.ttft_ms,
        e2e_ms_predicted=first.ttft_ms + second.ttft_ms + second.decode_ms,
        cost_micro_usd=total,
        is_feasible=total < INFEASIBLE,
        ttft_correction=prefill.row.ttft_correction,
        tpot_correction=decode.tpot_correction,
    )


def _both(
    prefill: EngineRow, first: str | None, decode: EngineRow, second: str | None
) -> str | None:
    told = [
        f"`{row.engine_id}`: {words}"
        for row, words in ((prefill, first), (decode, second))
        if words is not None
    ]
    return "; ".join(told) or None


def _pairs(
    request: Request, rows: Sequence[EngineRow], held: dict[int, int], now_ms: int
) -> list[CandidateView]:
    """Pairs as `place` weighs them, and prefill engines that object, each as a candidate of its own."""
    prefills = [row for row in rows if row.role is Role.PREFILL and row.model == request.model]
    if request.is_single_engine or not prefills:
        return []
    choices = prefill_choices(request, rows, held, now_ms)
    views = [
        _pair(request, choices[row.pair_key], row, held, now_ms)
        for row in rows
        if row.role is not Role.PREFILL and row.model == request.model and row.pair_key in choices
    ]
    legs = [_single(request, row, held, now_ms, PREFILL) for row in prefills]
    return views + [leg for leg in legs if not leg.is_feasible]


def _victory(request: Request, won: CandidateView, rival: CandidateView | None) -> str:
    name, cost = candidate_name(won), usd(won.cost_micro_usd)
    if rival is None:
        others = "no other engine could take the call"
        return f"{name} won at ${cost:.6f}: {others}."
    against = usd(rival.cost_micro_usd)
    begin = f"{name} won: ${cost:.6f} against ${against:.6f} on {candidate_name(rival)}"
    gains = [
        (theirs.cost_micro_usd - ours.cost_micro_usd, ours.axis)
        for ours, theirs in zip(won.axes, rival.axes, strict=True)
    ]
    gain, axis = max(gains, key=lambda entry: entry[0])
    if won.cost_micro_usd > rival.cost_micro_usd:
        return f"{begin}, for it was placed together with others that waited, at the least cost in all."
    if gain <= 0.0 or won.cost_micro_usd == rival.cost_micro_usd:
        return f"{begin}, a tie that the hash of request and engine broke."
    return f"{begin}, mostly because {_because(request, axis, won, rival)}."


def _because(request: Request, axis: Axis, won: CandidateView, rival: CandidateView) -> str:
    """The axis with the largest difference, in words."""
    is_cached_more = won.cached_tokens > rival.cached_tokens
    if axis in {Axis.GPU_TYPE, Axis.KV_HEADROOM} and is_cached_more:
        cached, prompt = won.cached_tokens, request.prompt_tokens
        return f"{cached:,} of {prompt:,} prompt tokens are cached there"
    match axis:
        case Axis.GPU_TYPE:
            return f"its GPU time costs less ({won.gpu_type} against {rival.gpu_type})"
        case Axis.KV_HEADROOM:
            return "holding the call's KV there costs less"
        case Axis.WEIGHT_WARMTH:
            return "its weights are warm"
        case Axis.TENANT_PRIORITY:
            return "it delays and displaces others less there"
        case Axis.WORKFLOW:
            if request.home is not None and won.decode == request.home:
                return "it holds the context of the steps before"
            if request.workflow is not None:
                return "the workflow ends earlier with it"
            return _sooner(won, rival)
        case Axis.LATENCY_BUDGET:
            return _sooner(won, rival)
        case Axis.AGENTIC_SCOPE:
            return "keeping the context there for the next step costs less"


def _sooner(won: CandidateView, rival: CandidateView) -> str:
    """Whether it is the first token or those after it that come earlier."""
    first_ms = rival.ttft_ms_predicted - won.ttft_ms_predicted
    rest_ms = rival.e2e_ms_predicted - won.e2e_ms_predicted - first_ms
    if first_ms > 0 and first_ms >= rest_ms:
        return f"its first token is predicted {first_ms:,.0f} ms earlier"
    return f"its tokens are predicted to come faster, by {rest_ms:,.0f} ms in all"


def _refusal(
    request: Request,
    rows: Sequence[EngineRow],
    held: dict[int, int],
    now_ms: int,
    reason: Reason | None,
    views: list[CandidateView],
) -> str:
    """What every engine objected, or the rule before the engines that decided."""
    objections = [
        f"{candidate_name(view)}: {words}"
        for view in views
        if view.prefill is None
        for words in [next((axis.objection for axis in view.axes if axis.objection), None)]
        if words is not None
    ]
    if any(view.is_feasible for view in views):
        return f"refused before any engine was asked: {reason or 'no reason recorded'}."
    detail = object_to(request, rows, held, now_ms).detail
    if not objections:
        return f"nothing could take the call: {detail}."
    told = "; ".join(objections[:OBJECTIONS_TOLD_MAX])
    more = len(objections) - OBJECTIONS_TOLD_MAX
    rest = f"; and {more:,} more" if more > 0 else ""
    return f"nothing could take the call: {detail}. {told}{rest}."
