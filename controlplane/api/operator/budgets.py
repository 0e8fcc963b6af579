"""Budgets of tenants, keys and workflows, in dollars and tokens."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from controlplane.admission.budget import Unit, Window
from controlplane.api.entity_tags import show_version
from controlplane.api.security import OperatorSeenChangeDep, ServicesDep, ViewerDep
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Identifier,
    Limit,
    Page,
    page_of,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused
from controlplane.store import budget_limits
from controlplane.store.budget_limits import BudgetKind

router = APIRouter(prefix="/budgets", tags=["budgets"])

AMOUNT_MAX = 10**15


class BudgetChange(Body):
    """`limit` is in the account's unit: micro-dollars, or tokens where the id ends in `:tokens`.

    It holds anew in every window, calendar units in UTC; a window that is left out stays, `total` at first.
    """

    limit: Annotated[int, Field(ge=0, le=AMOUNT_MAX)]
    window: Annotated[Window | None, Field(strict=False)] = None


class BudgetAnswer(Answer):
    """Amounts in `unit`. `reserved` is what replicas hold to settle from."""

    id: str
    unit: Unit
    limit: int
    spent: int
    reserved: int
    window: Window
    window_started_at: datetime
    window_ends_at: datetime | None


class WindowAnswer(Answer):
    started_at: datetime
    ended_at: datetime
    limit: int
    spent: int


class BudgetDetail(BudgetAnswer):
    """`windows` are those that are over and in which something was spent, newest first."""

    windows: list[WindowAnswer]


class RemovedBudget(Answer):
    id: str
    is_removed: bool


@router.get("")
async def list_budgets(
    _: ViewerDep,
    services: ServicesDep,
    kind: Annotated[BudgetKind | None, Query(description="Whose budgets.")] = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[BudgetAnswer]:
    """List budgets by id."""
    found = await budget_limits.list_budgets(services.engine, kind=kind, limit=limit, cursor=cursor)
    return page_of(found, BudgetAnswer.model_validate)


@router.get("/{budget_id}")
async def get_budget(
    budget_id: Identifier, _: ViewerDep, services: ServicesDep, response: Response
) -> BudgetDetail:
    """Show a budget with its past windows."""
    found = await budget_limits.get_budget(services.engine, budget_id)
    if found is None:
        raise _missing(budget_id)
    view, windows = found
    answer = BudgetAnswer.model_validate(view)
    show_version(response, budget_limits.version_of_budget(view))
    return BudgetDetail(
        **answer.model_dump(), windows=[WindowAnswer.model_validate(past) for past in windows]
    )


@router.patch("/{budget_id}")
async def set_budget(
    budget_id: Identifier,
    body: BudgetChange,
    by: OperatorSeenChangeDep,
    services: ServicesDep,
    response: Response,
) -> BudgetAnswer:
    """Set a budget; it is made when its owner has none. Never below what is spent and reserved."""
    try:
        view = await budget_limits.set_budget(
            services.engine, budget_id, limit=body.limit, window=body.window, by=by
        )
    except ConfigurationError as error:
        raise Refused(Refuse(Reason.NOT_FOUND, str(error))) from error
    services.gate.principals.forget()
    show_version(response, budget_limits.version_of_budget(view))
    return BudgetAnswer.model_validate(view)


@router.delete("/{budget_id}")
async def remove_budget(
    budget_id: Identifier, by: OperatorSeenChangeDep, services: ServicesDep
) -> RemovedBudget:
    """Remove a limit. The budget in dollars of a tenant or a workflow can not be removed."""
    try:
        is_removed = await budget_limits.remove_budget(services.engine, budget_id, by)
    except ConfigurationError as error:
        raise Refused(Refuse(Reason.CONFLICT, str(error))) from error
    if not is_removed:
        raise _missing(budget_id)
    services.gate.principals.forget()
    return RemovedBudget(id=budget_id, is_removed=True)


def _missing(budget_id: str) -> Refused:
    return Refused(Refuse(Reason.NOT_FOUND, f"there is no budget `{budget_id}`"))
