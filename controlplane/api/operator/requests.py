"""Requests, the decisions about them, and why a request went where it went."""

import math
from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Cursor,
    Filter,
    Identifier,
    Limit,
    Page,
    page_of,
)
from controlplane.domain.decision import Explanation, Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import RequestId, TenantId, WorkflowId
from controlplane.domain.outcome import RequestState
from controlplane.scheduler.explain import candidate_name
from controlplane.store import overview, records

router = APIRouter(tags=["requests"])


class RequestAnswer(Answer):
    """One accepted request. Times in milliseconds, money in micro-dollars; null until it has
    ended.
    """

    id: str
    tenant_id: str
    key_id: str
    replica_id: str
    workflow_id: str | None
    step: int
    model: str
    endpoint: str
    is_stream: bool
    state: str
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    is_usage_estimated: bool
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    queue_ms: float | None
    reserved_micro_usd: int
    settled_micro_usd: int | None
    opened_at: datetime
    ended_at: datetime | None


class AttemptAnswer(Answer):
    number: int
    leg: str
    engine_id: str
    outcome: str
    detail: str


class DecisionAnswer(Answer):
    """`number` counts the decisions of one request. The full record is in `explain`."""

    request_id: str
    number: int
    replica_id: str
    tenant_id: str | None
    model: str | None
    verdict: str
    reason: str | None
    rule: str | None
    decode_engine_id: str | None
    prefill_engine_id: str | None
    cost_micro_usd: float | None
    ttft_ms_predicted: float | None
    cached_tokens_predicted: int | None
    policy_revision: str
    decided_at: datetime


class RequestDetail(RequestAnswer):
    attempts: list[AttemptAnswer]
    decisions: list[DecisionAnswer]


class AxisAnswer(Answer):
    """Micro-dollars, or null and an objection in words."""

    axis: str
    cost_micro_usd: float | None
    objection: str | None


class CandidateAnswer(Answer):
    """An engine, or a pair with its prefill engine. Predictions are null where there is none.

    `ttft_correction` and `tpot_correction` say how much longer than published its engines were
    measured to take, which the predictions hold already.
    """

    decode: str
    prefill: str | None
    gpu_type: str
    region: str
    is_feasible: bool
    is_winner: bool
    cached_tokens: int
    ttft_ms_predicted: float | None
    e2e_ms_predicted: float | None
    cost_micro_usd: float | None
    ttft_correction: float
    tpot_correction: float
    axes: list[AxisAnswer]


class QueueAnswer(Answer):
    """Where a call stands that waits now, from 1, and how long it is likely to; null when not known."""

    position: int
    wait_ms_predicted: int | None


class ExplanationAnswer(Answer):
    """A decision: candidates cheapest first, infeasible ones last, and one sentence.

    `queue` is null unless the call waits at this replica.
    """

    request_id: str
    model: str
    winner: str | None
    runner_up: str | None
    reason: Reason | None
    sentence: str
    candidates: list[CandidateAnswer]
    queue: QueueAnswer | None = None


@router.get("/requests")
async def list_requests(
    _: ViewerDep,
    services: ServicesDep,
    *,
    tenant: Filter = None,
    state: RequestState | Literal["open"] | None = None,
    workflow: Filter = None,
    model: Filter = None,
    reason: Reason | None = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[RequestAnswer]:
    """List accepted requests, newest first."""
    found = await records.list_requests(
        services.engine,
        tenant=None if tenant is None else TenantId(tenant),
        state=None if state is None else str(state),
        workflow=None if workflow is None else WorkflowId(workflow),
        model=model,
        reason=None if reason is None else str(reason),
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, RequestAnswer.model_validate)


@router.get("/requests/{request_id}")
async def get_request(request_id: Identifier, _: ViewerDep, services: ServicesDep) -> RequestDetail:
    """Look at one request with its attempts and decisions."""
    found = await records.get_request(services.engine, RequestId(request_id))
    if found is None:
        raise _not_found(request_id)
    return RequestDetail(
        **RequestAnswer.model_validate(found.request).model_dump(),
        attempts=[AttemptAnswer.model_validate(attempt) for attempt in found.attempts],
        decisions=[DecisionAnswer.model_validate(decision) for decision in found.decisions],
    )


@router.get("/requests/{request_id}/explain")
async def explain(request_id: Identifier, _: ViewerDep, services: ServicesDep) -> ExplanationAnswer:
    """Say of the last decision about a request what every axis said of every candidate.

    Recomputed by the replica that decided, for its last decisions; else read from the record that
    is kept of refusals and of a sample.
    """
    explanation = services.explain(request_id)
    if explanation is not None:
        place = services.gate.place_in_queue(request_id)
        queue = (
            None if place is None else QueueAnswer(position=place[0], wait_ms_predicted=place[1])
        )
        return _of_explanation(explanation).model_copy(update={"queue": queue})
    return await _of_record(services, request_id)


@router.get("/decisions")
async def list_decisions(
    _: ViewerDep,
    services: ServicesDep,
    *,
    verdict: Literal["admit", "queue", "refuse"] | None = None,
    reason: Reason | None = None,
    tenant: Filter = None,
    model: Filter = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[DecisionAnswer]:
    """List decisions, newest first, refusals included."""
    found = await overview.list_decisions(
        services.engine,
        verdict=verdict,
        reason=None if reason is None else str(reason),
        tenant=tenant,
        model=model,
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, DecisionAnswer.model_validate)


def _not_found(request_id: str) -> Refused:
    return Refused(Refuse(Reason.NOT_FOUND, f"there is no request `{request_id}`"))


def _of_explanation(explanation: Explanation) -> ExplanationAnswer:
    return ExplanationAnswer(
        request_id=explanation.request_id,
        model=explanation.model,
        winner=explanation.winner,
        runner_up=explanation.runner_up,
        reason=explanation.reason,
        sentence=explanation.sentence,
        candidates=[
            CandidateAnswer(
                decode=candidate.decode,
                prefill=candidate.prefill,
                gpu_type=candidate.gpu_type,
                region=candidate.region,
                is_feasible=candidate.is_feasible,
                is_winner=candidate_name(candidate) == explanation.winner,
                cached_tokens=candidate.cached_tokens,
                ttft_ms_predicted=_finite(candidate.ttft_ms_predicted),
                e2e_ms_predicted=_finite(candidate.e2e_ms_predicted),
                cost_micro_usd=_finite(candidate.cost_micro_usd),
                ttft_correction=candidate.ttft_correction,
                tpot_correction=candidate.tpot_correction,
                axes=[
                    AxisAnswer(
                        axis=view.axis,
                        cost_micro_usd=_finite(view.cost_micro_usd),
                        objection=view.objection,
                    )
                    for view in candidate.axes
                ],
            )
            for candidate in explanation.candidates
        ],
    )


async def _of_record(services: Services, request_id: str) -> ExplanationAnswer:
    decisions = await records.get_decisions(services.engine, request_id)
    if not decisions:
        raise Refused(
            Refuse(Reason.NOT_FOUND, f"there is no decision about a request `{request_id}`")
        )
    for decision in reversed(decisions):
        if decision.record is not None:
            return ExplanationAnswer.model_validate(_with_winner(decision.record))
    decision = decisions[-1]
    raise Refused(
        Refuse(
            Reason.NOT_FOUND,
            f"request `{request_id}` was decided by replica `{decision.replica_id}`:"
            f" {decision.verdict}, {decision.reason or decision.decode_engine_id};"
            " its candidates were not kept."
            " They are, of refusals, of a sample, and of what a replica decided last",
        )
    )


def _with_winner(record: dict[str, Any]) -> dict[str, Any]:
    """The stored record with the winner marked; names as `candidate_name` makes them."""
    candidates = []
    for candidate in record["candidates"]:
        decode, prefill = candidate["decode"], candidate["prefill"]
        name = decode if prefill is None else f"{prefill}+{decode}"
        candidates.append({**candidate, "is_winner": name == record["winner"]})
    return {**record, "candidates": candidates}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
