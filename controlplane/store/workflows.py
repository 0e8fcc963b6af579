"""Workflows: created once, ended once. Money and steps are counted by the journal."""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.admission.budget import Unit
from controlplane.domain.catalog import Scope
from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import ModelName, SloClassName, TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.store import audit, model_choice, tables
from controlplane.store.audit import Change
from controlplane.store.budgets import TOKENS_SUFFIX, workflow_budget_id
from controlplane.store.model_choice import ChoiceRow
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.session import transaction

EXPIRED_PER_PASS_MAX = 1_000
DETAIL_CHARACTERS_MAX = 2_000
_ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRecord:
    """One workflow. `model` is what all its calls get that name `asked_model`, None until it is chosen.

    The `budget_` fields are None when it has no budget of its own in micro-dollars,
    `token_budget_id` when it has none in tokens.

    `steps_done` counts steps in which a call succeeded, `spent_micro_usd` what its calls cost so
    far.
    """

    id: WorkflowId
    tenant: TenantId
    kind: str
    scope: Scope
    steps_expected: int
    slo_class: SloClassName
    deadline_at: datetime
    state: WorkflowState
    outcome_detail: str
    created_at: datetime
    ended_at: datetime | None
    budget_id: str | None
    budget_limit_micro_usd: int | None
    budget_spent_micro_usd: int | None
    budget_reserved_micro_usd: int | None
    token_budget_id: str | None
    steps_done: int
    spent_micro_usd: int
    asked_model: str | None = None
    model: ModelName | None = None
    retry_of: WorkflowId | None = None

    @property
    def deadline_epoch_ms(self) -> float:
        return self.deadline_at.timestamp() * 1000.0


@dataclass(frozen=True, slots=True)
class WorkflowConflict:
    """The workflow had ended in another state than the one asked for; nothing was changed."""

    record: WorkflowRecord


def new_id() -> WorkflowId:
    return WorkflowId(f"wf-{secrets.token_hex(_ID_BYTES)}")


def id_of_call(tenant: TenantId, name: str) -> WorkflowId:
    """The id of the workflow that the tenant's call `name` creates, however often it is sent."""
    digest = hashlib.blake2b(
        f"{tenant}\x00{name}".encode(), digest_size=_ID_BYTES, person=b"workflow id"
    )
    return WorkflowId(f"wf-{digest.hexdigest()}")


async def create(
    engine: AsyncEngine,
    *,
    tenant: TenantId,
    kind: str,
    scope: Scope,
    steps_expected: int,
    slo_class: SloClassName,
    deadline_ms: int,
    budget_micro_usd: int | None,
    budget_tokens: int | None = None,
    workflow_id: WorkflowId | None = None,
    choice: ChoiceRow | None = None,
    retry_of: WorkflowId | None = None,
) -> WorkflowRecord:
    """A running workflow, due `deadline_ms` from now by the database's clock. `choice` is of its model.

    Raises ConfigurationError when the tenant or the SLO class does not exist, or the id is taken.
    """
    identifier = workflow_id or new_id()
    budget_id = None if budget_micro_usd is None else workflow_budget_id(identifier)
    try:
        async with transaction(engine) as connection:
            if budget_id is not None:
                await connection.execute(
                    insert(tables.budgets).values(id=budget_id, limit=budget_micro_usd)
                )
            if budget_tokens is not None:
                await connection.execute(
                    insert(tables.budgets).values(
                        id=workflow_budget_id(identifier, Unit.TOKENS),
                        unit=str(Unit.TOKENS),
                        limit=budget_tokens,
                    )
                )
            await connection.execute(
                insert(tables.workflows).values(
                    id=identifier,
                    tenant_id=tenant,
                    kind=kind,
                    scope=str(scope),
                    steps_expected=steps_expected,
                    slo_class=slo_class,
                    budget_id=budget_id,
                    deadline_at=func.clock_timestamp()
                    + func.make_interval(0, 0, 0, 0, 0, 0, deadline_ms / 1000.0),
                    asked_model=None if choice is None else choice.asked_model,
                    model=None if choice is None else choice.model,
                    retry_of=retry_of,
                )
            )
            if choice is not None:
                await model_choice.insert_choice(connection, identifier, tenant, choice)
            record = await _read(connection, identifier, None)
    except IntegrityError as error:
        diagnosis = getattr(error.orig, "diag", None)
        detail = getattr(diagnosis, "message_detail", None) or "a value is out of its range"
        raise ConfigurationError(f"the workflow was not created: {detail.rstrip('.')}") from error
    assert record is not None
    return record


async def get(
    engine: AsyncEngine, workflow_id: WorkflowId, tenant: TenantId | None
) -> WorkflowRecord | None:
    """The workflow, when it exists and belongs to `tenant` (None: whoever's)."""
    async with transaction(engine) as connection:
        return await _read(connection, workflow_id, tenant)


async def list_workflows(
    engine: AsyncEngine,
    *,
    tenant: TenantId | None = None,
    state: WorkflowState | None = None,
    kind: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[WorkflowRecord]:
    """Newest first. Raises BadCursor."""
    statement = _selected()
    if tenant is not None:
        statement = statement.where(tables.workflows.c.tenant_id == tenant)
    if state is not None:
        statement = statement.where(tables.workflows.c.state == str(state))
    if kind is not None:
        statement = statement.where(tables.workflows.c.kind == kind)
    statement = newest_first(
        statement,
        tables.workflows.c.created_at,
        tables.workflows.c.id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        items = [_record(row) for row in await connection.execute(statement)]
    return page(items, [(item.created_at, item.id) for item in items], limit)


async def end(
    engine: AsyncEngine,
    workflow_id: WorkflowId,
    tenant: TenantId | None,
    state: WorkflowState,
    detail: str = "",
    by: Change | None = None,
) -> WorkflowRecord | WorkflowConflict | None:
    """End a running workflow in `state`. Asking again for the state it ended in changes nothing.

    A workflow past its deadline has expired, whatever is said of it afterwards. None: no such
    workflow. `by` names an operator who ends it; tenants end theirs without a note.
    """
    async with transaction(engine) as connection:
        ended = await connection.execute(
            text(
                """
                UPDATE workflows SET
                    state = CASE WHEN deadline_at <= clock_timestamp() THEN 'expired'
                                 ELSE :state END,
                    outcome_detail = CASE WHEN deadline_at <= clock_timestamp() THEN outcome_detail
                                          ELSE :detail END,
                    ended_at = clock_timestamp()
                WHERE id = :id AND state = 'running'
                      AND (CAST(:tenant AS text) IS NULL OR tenant_id = :tenant)
                """
            ),
            {
                "id": workflow_id,
                "tenant": tenant,
                "state": str(state),
                "detail": detail[:DETAIL_CHARACTERS_MAX],
            },
        )
        record = await _read(connection, workflow_id, tenant)
        if by is not None and record is not None and ended.rowcount:
            await audit.note(
                connection,
                by,
                "workflow.end",
                f"workflow:{workflow_id}",
                {"state": str(WorkflowState.RUNNING)},
                {"state": str(record.state)},
            )
    if record is None or record.state is state:
        return record
    return WorkflowConflict(record)


async def expire_overdue(engine: AsyncEngine) -> tuple[WorkflowId, ...]:
    """End running workflows whose deadline has passed, a bounded number a time.

    Returns which.
    """
    overdue = (
        select(tables.workflows.c.id)
        .where(
            tables.workflows.c.state == "running",
            tables.workflows.c.deadline_at <= func.clock_timestamp(),
        )
        .order_by(tables.workflows.c.deadline_at)
        .limit(EXPIRED_PER_PASS_MAX)
        .with_for_update(skip_locked=True)
    )
    async with transaction(engine) as connection:
        ended = await connection.execute(
            update(tables.workflows)
            .where(tables.workflows.c.id.in_(overdue))
            .values(state=str(WorkflowState.EXPIRED), ended_at=func.clock_timestamp())
            .returning(tables.workflows.c.id)
        )
        return tuple(WorkflowId(identifier) for identifier in ended.scalars())


def _selected() -> Select[Any]:
    steps = (
        select(
            tables.workflow_steps.c.workflow_id,
            func.count().filter(tables.workflow_steps.c.calls_succeeded > 0).label("steps_done"),
            func.sum(tables.workflow_steps.c.spent_micro_usd).label("spent_micro_usd"),
        )
        .where(tables.workflow_steps.c.workflow_id == tables.workflows.c.id)
        .group_by(tables.workflow_steps.c.workflow_id)
        .lateral("steps")
    )
    token_budgets = tables.budgets.alias("token_budgets")
    return (
        select(
            tables.workflows,
            tables.budgets.c.limit.label("budget_limit"),
            tables.budgets.c.spent.label("budget_spent"),
            tables.budgets.c.reserved.label("budget_reserved"),
            token_budgets.c.id.label("token_budget_id"),
            func.coalesce(steps.c.steps_done, 0).label("steps_done"),
            func.coalesce(steps.c.spent_micro_usd, 0).label("spent"),
        )
        .select_from(tables.workflows)
        .outerjoin(tables.budgets, tables.budgets.c.id == tables.workflows.c.budget_id)
        .outerjoin(
            token_budgets,
            token_budgets.c.id == "workflow:" + tables.workflows.c.id + TOKENS_SUFFIX,
        )
        .outerjoin(steps, text("true"))
    )


async def _read(
    connection: AsyncConnection, workflow_id: WorkflowId, tenant: TenantId | None
) -> WorkflowRecord | None:
    statement = _selected().where(tables.workflows.c.id == workflow_id)
    if tenant is not None:
        statement = statement.where(tables.workflows.c.tenant_id == tenant)
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else _record(row)


def _record(row: Row[Any]) -> WorkflowRecord:
    return WorkflowRecord(
        id=row.id,
        tenant=row.tenant_id,
        kind=row.kind,
        scope=Scope(row.scope),
        steps_expected=row.steps_expected,
        slo_class=row.slo_class,
        deadline_at=row.deadline_at,
        state=WorkflowState(row.state),
        outcome_detail=row.outcome_detail,
        created_at=row.created_at,
        ended_at=row.ended_at,
        budget_id=row.budget_id,
        budget_limit_micro_usd=row.budget_limit,
        budget_spent_micro_usd=row.budget_spent,
        budget_reserved_micro_usd=row.budget_reserved,
        token_budget_id=row.token_budget_id,
        steps_done=int(row.steps_done),
        spent_micro_usd=int(row.spent),
        asked_model=row.asked_model,
        model=row.model,
        retry_of=row.retry_of,
    )
