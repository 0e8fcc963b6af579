"""Workflows of the calling tenant: create, look, cancel, say how it ended.

Another tenant's do not exist here.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import Field, StringConstraints

from controlplane.api.idempotency import IdempotencyKey, mismatch, show_replay
from controlplane.api.security import ServicesDep, TenantDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Body,
    Cursor,
    Detail,
    Filter,
    Identifier,
    Limit,
    Page,
    Slug,
    Text,
    Usd,
    page_of,
)
from controlplane.api.workflow_answers import (
    RetryAnswer,
    WorkflowAnswer,
    answer,
    end_workflow,
    not_found,
)
from controlplane.domain.catalog import Principal, Scope
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused
from controlplane.domain.ids import SloClassName, WorkflowId
from controlplane.domain.money import MICRO_USD_PER_USD, micro_usd
from controlplane.domain.outcome import WorkflowState
from controlplane.runtime.model_choices import retried
from controlplane.store import workflows
from controlplane.store.model_choice import ChoiceRow
from controlplane.store.workflows import WorkflowRecord

STEPS_EXPECTED_MAX = 100_000
CHOICE_PATTERN = r"^(auto|ladder):[a-z0-9][a-z0-9._-]{0,62}$"
DEADLINE_S_MAX = 30 * 24 * 3600

router = APIRouter(
    prefix="/v1/workflows",
    tags=["workflows"],
)

BUDGET_TOKENS_MAX = 10**15
# Between the instants at which a workflow is written and its deadline is counted from.
CREATION_S_MAX = 10.0


class NewWorkflow(Body):
    """`kind` is the tenant's own word for what the task is; `deadline_s` counts from now.

    `model` asks for a choice by outcomes, `auto:CLASS` or `ladder:NAME`: the model it comes to is that
    of all calls that name it. `retry_of` is a workflow that failed at the same task; its models are
    not tried again.
    """

    kind: Slug
    scope: Annotated[Scope, Field(strict=False)]
    steps_expected: Annotated[int, Field(ge=1, le=STEPS_EXPECTED_MAX)]
    deadline_s: Annotated[float, Field(gt=0, le=DEADLINE_S_MAX, allow_inf_nan=False)]
    budget_usd: Usd | None = None
    budget_tokens: Annotated[int, Field(ge=1, le=BUDGET_TOKENS_MAX)] | None = None
    slo_class: Slug | None = None
    model: Annotated[str, StringConstraints(pattern=CHOICE_PATTERN, max_length=127)] | None = None
    retry_of: Annotated[Text, StringConstraints(min_length=1, max_length=63)] | None = None


class Outcome(Body):
    """What the tenant found when it looked at the result: the meaning of a successful task."""

    outcome: Literal["success", "failure"]
    detail: Detail = ""


@router.post("", status_code=201)
async def create(
    body: NewWorkflow,
    principal: TenantDep,
    services: ServicesDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> WorkflowAnswer:
    """Create a workflow. Name it in each of its calls with the header `x-headway-workflow`.

    A call that is sent again with its `Idempotency-Key` is answered with the workflow that it created.
    """
    if idempotency_key is None:
        record = await _create(body, principal, services, workflows.new_id())
    else:
        workflow_id = workflows.id_of_call(principal.tenant.id, idempotency_key)
        before = await _created(workflow_id, body, idempotency_key, principal, services)
        if before is None:
            try:
                record = await _create(body, principal, services, workflow_id)
            except ConfigurationError:
                # The same call may have come by another way at the same time.
                before = await _created(workflow_id, body, idempotency_key, principal, services)
                if before is None:
                    raise
        if before is not None:
            record = before
            show_replay(response)
    response.headers["location"] = f"/v1/workflows/{record.id}"
    return answer(record)


async def _created(
    workflow_id: WorkflowId,
    body: NewWorkflow,
    idempotency_key: str,
    principal: Principal,
    services: Services,
) -> WorkflowRecord | None:
    """What an earlier call with this key created, None when there was none. Raises Refused when it asked for
    something else.
    """
    record = await workflows.get(services.engine, workflow_id, principal.tenant.id)
    if record is None:
        return None
    budget = None if body.budget_usd is None else micro_usd(body.budget_usd)
    due_s = (record.deadline_at - record.created_at).total_seconds()
    is_same = (
        (record.kind, record.scope, record.steps_expected)
        == (body.kind, body.scope, body.steps_expected)
        and record.slo_class == (body.slo_class or principal.tenant.slo_class)
        and record.budget_limit_micro_usd == budget
        and (body.model is None or record.asked_model == body.model)
        and record.retry_of == body.retry_of
        and abs(due_s - body.deadline_s) < CREATION_S_MAX
    )
    if not is_same:
        raise mismatch(idempotency_key, record.id)
    return record


async def _create(
    body: NewWorkflow, principal: Principal, services: Services, workflow_id: WorkflowId
) -> WorkflowRecord:
    slo_class = principal.tenant.slo_class if body.slo_class is None else body.slo_class
    if slo_class not in services.fleet.catalog.slo_classes:
        known = ", ".join(sorted(services.fleet.catalog.slo_classes))
        raise Refused(
            Refuse(Reason.NOT_FOUND, f"there is no SLO class `{slo_class}`; there are: {known}")
        )
    budget = body.budget_usd
    budget_micro_usd = None if budget is None else micro_usd(budget)
    before = await _retried(body, principal, services)
    asked = body.model or (None if before is None else before.asked_model)
    choice: ChoiceRow | None = None
    if asked is not None:
        chosen = await services.choices.choose(
            principal.tenant,
            asked,
            workflow=workflow_id,
            scope=body.scope,
            deadline_s=body.deadline_s,
            budget_micro_usd=budget_micro_usd,
            retry_of=before,
        )
        if isinstance(chosen, Refuse):
            raise Refused(chosen)
        choice = chosen
    record = await workflows.create(
        services.engine,
        tenant=principal.tenant.id,
        kind=body.kind,
        scope=body.scope,
        steps_expected=body.steps_expected,
        slo_class=SloClassName(slo_class),
        deadline_ms=max(1, round(body.deadline_s * 1_000)),
        budget_micro_usd=budget_micro_usd,
        budget_tokens=body.budget_tokens,
        workflow_id=workflow_id,
        choice=choice,
        retry_of=None if before is None else before.id,
    )
    services.gate.workflows.remember(record)
    return record


@router.get("")
async def list_own(
    principal: TenantDep,
    services: ServicesDep,
    *,
    state: WorkflowState | None = None,
    kind: Filter = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[WorkflowAnswer]:
    """List the tenant's workflows, newest first."""
    found = await workflows.list_workflows(
        services.engine,
        tenant=principal.tenant.id,
        state=state,
        kind=kind,
        limit=limit,
        cursor=cursor,
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
    return await _advised(record, principal, services)


@router.post("/{workflow_id}/cancel")
async def cancel(
    workflow_id: Identifier, principal: TenantDep, services: ServicesDep
) -> WorkflowAnswer:
    """End a workflow without an outcome. Its further calls are refused; repeating this changes
    nothing.
    """
    state = WorkflowState.CANCELLED
    return answer(await end_workflow(services, workflow_id, principal.tenant.id, state, ""))


@router.post("/{workflow_id}/outcome")
async def report_outcome(
    workflow_id: Identifier, body: Outcome, principal: TenantDep, services: ServicesDep
) -> WorkflowAnswer:
    """Say how the task ended. Repeating the same outcome changes nothing, another one is a
    conflict.
    """
    state = WorkflowState.SUCCEEDED if body.outcome == "success" else WorkflowState.FAILED
    record = await end_workflow(services, workflow_id, principal.tenant.id, state, body.detail)
    return await _advised(record, principal, services)


async def _advised(
    record: WorkflowRecord, principal: Principal, services: Services
) -> WorkflowAnswer:
    """A workflow, and when it failed what could be tried next."""
    advice = await services.choices.advice(record, principal.tenant)
    if advice is None:
        return answer(record)
    usd = advice.dollars_micro_usd
    retry = RetryAnswer(
        model=advice.model,
        is_advised=advice.is_advised,
        success_ratio=advice.success_ratio,
        usd=None if usd is None else usd / MICRO_USD_PER_USD,
    )
    return answer(record).model_copy(update={"retry": retry})


async def _retried(
    body: NewWorkflow, principal: Principal, services: Services
) -> WorkflowRecord | None:
    """The workflow that is tried again. Raises Refused when that can not be."""
    if body.retry_of is None:
        return None
    found = await retried(services.engine, WorkflowId(body.retry_of), principal.tenant.id)
    if isinstance(found, Refuse):
        raise Refused(found)
    return found
