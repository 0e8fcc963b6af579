"""Workflows of every tenant."""

from fastapi import APIRouter

from controlplane.api.security import OperatorChangeDep, ServicesDep, ViewerDep
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Cursor,
    Filter,
    Identifier,
    Limit,
    Page,
    page_of,
)
from controlplane.api.workflow_answers import WorkflowAnswer, answer, end_workflow, not_found
from controlplane.domain.ids import TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.store import workflows

router = APIRouter(prefix="/workflows", tags=["operator workflows"])


@router.get("")
async def list_workflows(
    _: ViewerDep,
    services: ServicesDep,
    *,
    tenant: Filter = None,
    state: WorkflowState | None = None,
    kind: Filter = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[WorkflowAnswer]:
    """List workflows, newest first."""
    found = await workflows.list_workflows(
        services.engine,
        tenant=None if tenant is None else TenantId(tenant),
        state=state,
        kind=kind,
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, answer)


@router.get("/{workflow_id}")
async def get_workflow(
    workflow_id: Identifier, _: ViewerDep, services: ServicesDep
) -> WorkflowAnswer:
    """Look at one workflow."""
    record = await workflows.get(services.engine, WorkflowId(workflow_id), None)
    if record is None:
        raise not_found(workflow_id)
    return answer(record)


@router.post("/{workflow_id}/cancel")
async def cancel_workflow(
    workflow_id: Identifier, by: OperatorChangeDep, services: ServicesDep
) -> WorkflowAnswer:
    """End a running workflow: its further calls are refused."""
    record = await end_workflow(
        services,
        workflow_id,
        None,
        WorkflowState.CANCELLED,
        f"cancelled by operator {by.actor.replace(':', ' ')}",
        by,
    )
    return answer(record)
