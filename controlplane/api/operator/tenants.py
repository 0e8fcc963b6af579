"""Tenants and their budgets."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import AfterValidator, Field, model_validator

from controlplane.api.security import (
    AdminChangeDep,
    OperatorChangeDep,
    ServicesDep,
    ViewerDep,
)
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Identifier,
    Limit,
    Name,
    Page,
    Slug,
    page_of,
    whole_micro_usd,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import TenantId
from controlplane.domain.money import micro_usd
from controlplane.store import budgets, catalog
from controlplane.store.catalog import TenantRecord

router = APIRouter(prefix="/tenants", tags=["tenants"])

BudgetUsd = Annotated[
    float, Field(ge=0, le=1_000_000_000, allow_inf_nan=False), AfterValidator(whole_micro_usd)
]


class NewTenant(Body):
    """`budget_usd` is the most that the tenant may ever spend."""

    id: Slug
    name: Name
    tenant_class: Slug
    slo_class: Slug
    budget_usd: BudgetUsd


class TenantChange(Body):
    """What is to change; what is left out stays.

    A budget is never set below what is spent and reserved.
    """

    budget_usd: BudgetUsd | None = None
    is_disabled: bool | None = None

    @model_validator(mode="after")
    def _something(self) -> "TenantChange":
        if self.budget_usd is None and self.is_disabled is None:
            raise ValueError("give budget_usd or is_disabled")
        return self


class TenantAnswer(Answer):
    """Money in micro-dollars. `reserved` is what replicas hold to settle from."""

    id: str
    name: str
    tenant_class: str
    slo_class: str
    is_disabled: bool
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int
    created_at: datetime


async def tenants_page(services: Services, limit: int, cursor: str | None) -> Page[TenantAnswer]:
    found = await catalog.list_tenants(services.engine, limit=limit, cursor=cursor)
    return page_of(found, TenantAnswer.model_validate)


@router.get("")
async def list_tenants(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[TenantAnswer]:
    """List tenants with their budgets, newest first."""
    return await tenants_page(services, limit, cursor)


@router.post("", status_code=201)
async def create_tenant(body: NewTenant, by: AdminChangeDep, services: ServicesDep) -> TenantAnswer:
    """Create a tenant. Its keys are created apart."""
    record = await catalog.create_tenant(
        services.engine,
        tenant_id=TenantId(body.id),
        name=body.name,
        tenant_class=body.tenant_class,
        slo_class=body.slo_class,
        budget_micro_usd=micro_usd(body.budget_usd),
        by=by,
    )
    if record is None:
        raise Refused(Refuse(Reason.CONFLICT, f"there is a tenant `{body.id}` already"))
    return TenantAnswer.model_validate(record)


@router.patch("/{tenant_id}")
async def change_tenant(
    tenant_id: Identifier, body: TenantChange, by: OperatorChangeDep, services: ServicesDep
) -> TenantAnswer:
    """Set a tenant's budget, disable it, or let it in again."""
    tenant = TenantId(tenant_id)
    record = await _existing(services, tenant)
    if body.budget_usd is not None:
        limit = micro_usd(body.budget_usd)
        await budgets.set_limit(services.engine, record.budget_id, limit, by)
    if body.is_disabled is not None:
        await catalog.set_disabled(services.engine, tenant, is_disabled=body.is_disabled, by=by)
        services.gate.principals.forget()
    return TenantAnswer.model_validate(await _existing(services, tenant))


async def _existing(services: Services, tenant: TenantId) -> TenantRecord:
    record = await catalog.get_tenant(services.engine, tenant)
    if record is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no tenant `{tenant}`"))
    return record
