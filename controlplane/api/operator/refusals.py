"""What is kept of a refusal: what the client was told, and the numbers that kept it out."""

from datetime import datetime
from typing import Any

from fastapi import APIRouter

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.shapes import Answer, Identifier
from controlplane.domain.decision import Quantity, Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.store import records

router = APIRouter(prefix="/refusals", tags=["requests"])


class HurdleAnswer(Answer):
    """One number that kept the call out: what was `there` for it, null where that is not known at the
    decision, and what was `needed`. `of` names the account or the holder of the limit.
    """

    quantity: Quantity
    there: float | None
    needed: float | None
    of: str


class RefusalAnswer(Answer):
    """The last refusal of a call. `facts` are what rules could read; `detail` is what its client was told.

    `decisions` counts those about the call, `waited_ms` from the first of them to this one.
    """

    request_id: str
    tenant_id: str | None
    model: str | None
    reason: Reason | None
    rule: str | None
    detail: str
    retry_after_ms: int | None
    is_final: bool
    hurdles: list[HurdleAnswer]
    facts: dict[str, Any] | None
    ttft_ms_predicted: float | None
    e2e_ms_predicted: float | None
    decisions: int
    waited_ms: int
    replica_id: str
    policy_revision: str
    decided_at: datetime


@router.get("/{request_id}")
async def get_refusal(request_id: Identifier, _: ViewerDep, services: ServicesDep) -> RefusalAnswer:
    """Say what kept a refused call out, in numbers."""
    decisions = await records.get_decisions(services.engine, request_id)
    refused = [decision for decision in decisions if decision.verdict == "refuse"]
    if not refused:
        words = (
            f"there is no decision about a request `{request_id}`"
            if not decisions
            else f"request `{request_id}` was not refused: its last decision is"
            f" `{decisions[-1].verdict}`"
        )
        raise Refused(Refuse(Reason.NOT_FOUND, words))
    decision = refused[-1]
    record = decision.record or {}
    told = record.get("refusal", {})
    feasible = [
        candidate for candidate in record.get("candidates", ()) if candidate["is_feasible"]
    ] or record.get("candidates", ())
    return RefusalAnswer(
        request_id=request_id,
        tenant_id=decision.tenant_id,
        model=decision.model,
        reason=None if decision.reason is None else Reason(decision.reason),
        rule=decision.rule,
        detail=told.get("detail", ""),
        retry_after_ms=told.get("retry_after_ms"),
        is_final=told.get("is_final", False),
        hurdles=[HurdleAnswer.model_validate(hurdle) for hurdle in told.get("hurdles", ())],
        facts=decision.facts,
        ttft_ms_predicted=_least(feasible, "ttft_ms_predicted"),
        e2e_ms_predicted=_least(feasible, "e2e_ms_predicted"),
        decisions=len(decisions),
        waited_ms=int((decision.decided_at - decisions[0].decided_at).total_seconds() * 1000),
        replica_id=decision.replica_id,
        policy_revision=decision.policy_revision,
        decided_at=decision.decided_at,
    )


def _least(candidates: list[dict[str, Any]], name: str) -> float | None:
    """The best that any candidate offers; None when nothing is predicted."""
    return min(
        (candidate[name] for candidate in candidates if candidate[name] is not None), default=None
    )
