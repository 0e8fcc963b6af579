"""Workflows as both APIs show and end them."""

from datetime import datetime
from typing import Literal

from controlplane.api.services import Services
from controlplane.api.shapes import Answer
from controlplane.domain.catalog import Scope
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.store import workflows
from controlplane.store.audit import Change
from controlplane.store.workflows import WorkflowConflict, WorkflowRecord


class RetryAnswer(Answer):
    """What a workflow with this one as `retry_of` would have as its model, and whether it pays.

    `success_ratio` is how likely it is to succeed, `usd` what it costs, null when that is not known.
    """

    model: str
    is_advised: bool
    success_ratio: float | None
    usd: float | None


class WorkflowAnswer(Answer):
    """Money in micro-dollars. `budget_micro_usd` is null when only the tenant's budget bounds the
    workflow. `model` is what its calls get that name `asked_model`; null: they name their own.
    `retry` is told to its tenant, one workflow at a time, when it failed and a further model of its
    choice is left to try.
    """

    object: Literal["workflow"] = "workflow"
    id: str
    tenant_id: str
    kind: str
    scope: Scope
    slo_class: str
    steps_expected: int
    steps_done: int
    state: WorkflowState
    detail: str
    created_at: datetime
    deadline_at: datetime
    ended_at: datetime | None
    budget_micro_usd: int | None
    spent_micro_usd: int
    asked_model: str | None
    model: str | None
    retry_of: str | None
    retry: RetryAnswer | None = None


def answer(record: WorkflowRecord) -> WorkflowAnswer:
    return WorkflowAnswer(
        id=record.id,
        tenant_id=record.tenant,
        kind=record.kind,
        scope=record.scope,
        slo_class=record.slo_class,
        steps_expected=record.steps_expected,
        steps_done=record.steps_done,
        state=record.state,
        detail=record.outcome_detail,
        created_at=record.created_at,
        deadline_at=record.deadline_at,
        ended_at=record.ended_at,
        budget_micro_usd=record.budget_limit_micro_usd,
        spent_micro_usd=record.spent_micro_usd,
        asked_model=record.asked_model,
        model=record.model,
        retry_of=record.retry_of,
    )


def not_found(workflow_id: str) -> Refused:
    return Refused(Refuse(Reason.WORKFLOW_NOT_FOUND, f"there is no workflow `{workflow_id}`"))


async def end_workflow(
    services: Services,
    workflow_id: str,
    tenant: TenantId | None,
    state: WorkflowState,
    detail: str,
    by: Change | None = None,
) -> WorkflowRecord:
    """The workflow, ended in `state` now or before. `by` names an operator who ends it.

    Raises Refused when it is unknown or ended otherwise.
    """
    ended = await workflows.end(services.engine, WorkflowId(workflow_id), tenant, state, detail, by)
    match ended:
        case None:
            raise not_found(workflow_id)
        case WorkflowConflict(record):
            services.gate.workflows.remember(record)
            if record.state is WorkflowState.EXPIRED:
                # Its tenant's word came too late, and ended it all the same.
                services.gate.workflow_ended(record.id)
            raise Refused(
                Refuse(
                    Reason.CONFLICT,
                    f"workflow `{workflow_id}` has ended as `{record.state}` already",
                )
            )
        case _:
            services.gate.workflows.remember(ended)
            services.gate.workflow_ended(ended.id)
            return ended
