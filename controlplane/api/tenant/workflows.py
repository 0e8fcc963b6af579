"""Workflows of the calling tenant: create, look, cancel, say how it ended.

Another tenant's do not exist here.
"""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field

from controlplane.api.security import ServicesDep, TenantDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Body,
    Cursor,
    Detail,
    ErrorBody,
    Identifier,
    Limit,
    Page,
    Slug,
    Usd,
    page_of,
)
from controlplane.api.workflow_answers import WorkflowAnswer, answer, end_workflow, not_found
from controlplane.domain.catalog import Principal, Scope
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import SloClassName, WorkflowId
from controlplane.domain.money import MICRO_USD_PER_USD
from controlplane.domain.outcome import WorkflowState
from controlplane.store import workflows

STEPS_EXPECTED_MAX = 100_000
DEADLINE_S_MAX = 30 * 24 * 3600

router = APIRouter(
    prefix="/v1/workflows",
    tags=["workflows"],
    responses={status: {"model": ErrorBody} for status in (400, 401, 404, 409, 503)},
)

BUDGET_TOKENS_MAX = 10**15


class NewWorkflow(Body):
    """`kind` is the tenant's own word for what the task is; `deadline_s` counts from now."""

    kind: Slug
    scope: Annotated[Scope, Field(strict=False)]
    steps_expected: Annotated[int, Field(ge=1, le=STEPS_EXPECTED_MAX)]
    deadline_s: Annotated[float, Field(gt=0, le=DEADLINE_S_MAX, allow_inf_nan=False)]
    budget_usd: Usd | None = None
    budget_tokens: Annotated[int, Field(ge=1, le=BUDGET_TOKENS_MAX)] | None = None
    slo_class: Slug | None = None


class Outcome(Body):
    """What the tenant found when it looked at the result: the meaning of a successful task."""

    outcome: Literal["success", "failure"]
    detail: Detail = ""


@router.post("", status_code=201)
async def create(body: NewWorkflow, principal: TenantDep, services: ServicesDep) -> WorkflowAnswer:
    """Create a workflow. Name it in each of its calls with the header `x-headway-workflow`."""
    slo_class = principal.tenant.slo_class if body.slo_class is None else body.slo_class
    if slo_class not in services.fleet.catalog.slo_classes:
        known = ", ".join(sorted(services.fleet.catalog.slo_classes))
        raise Refused(
            Refuse(
                Reason.INVALID_REQUEST, f"there is no SLO class `{slo_class}`; there are: {known}"
            )
        )
    budget = body.budget_usd
    record = await workflows.create(
        services.engine,
        tenant=principal.tenant.id,
        kind=body.kind,
        scope=body.scope,
        steps_expected=body.steps_expected,
        slo_class=SloClassName(slo_class),
        deadline_ms=max(1, round(body.deadline_s * 1_000)),
        budget_micro_usd=None if budget is None else max(1, round(budget * MICRO_USD_PER_USD)),
        budget_tokens=body.budget_tokens,
    )
    services.gate.workflows.remember(record)
    return answer(record)


@router.get("")
async def list_own(
    principal: TenantDep,
    services: ServicesDep,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[WorkflowAnswer]:
    """List the tenant's workflows, newest first."""
    found = await workflows.list_workflows(
        services.engine, tenant=principal.tenant.id, limit=limit, cursor=cursor
    )
    return page_of(found, answer)


@router.get("/{workflow_id}")
async def get(
    workflow_id: Identifier, principal: TenantDep, services: ServicesDep
) -> WorkflowAnswer:
    """Look at one workflow."""
    record = await workflows.get(services.engine, WorkflowId(workflow_id), principal.tenant.id)
    if record is None:
        raise not_found(workflow_id)
    return answer(record)


@router.post("/{workflow_id}/cancel")
async def cancel(
    workflow_id: Identifier, principal: TenantDep, services: ServicesDep
) -> WorkflowAnswer:
    """End a workflow without an outcome. Its further calls are refused; repeating this changes
    nothing.
    """
    return await _end(workflow_id, principal, services, WorkflowState.CANCELLED, "")


@router.post("/{workflow_id}/outcome")
async def report_outcome(
    workflow_id: Identifier, body: Outcome, principal: TenantDep, services: ServicesDep
) -> WorkflowAnswer:
    """Say how the task ended. Repeating the same outcome changes nothing, another one is a
    conflict.
    """
    state = WorkflowState.SUCCEEDED if body.outcome == "success" else WorkflowState.FAILED
    return await _end(workflow_id, principal, services, state, body.detail)


async def _end(
    workflow_id: str,
    principal: Principal,
    services: Services,
    state: WorkflowState,
    detail: str,
) -> WorkflowAnswer:
    record = await end_workflow(services, workflow_id, principal.tenant.id, state, detail)
    return answer(record)
