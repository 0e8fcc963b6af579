"""Tenants and their budgets."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from controlplane.api.entity_tags import show_version
from controlplane.api.idempotency import IdempotencyKey, mismatch, show_replay
from controlplane.api.security import (
    AdminChangeDep,
    OperatorSeenChangeDep,
    ServicesDep,
    ViewerDep,
)
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Filter,
    Identifier,
    Limit,
    Name,
    Page,
    Slug,
    page_of,
    whole_micro_usd,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused
from controlplane.domain.ids import TenantId
from controlplane.domain.money import MICRO_USD_PER_USD, micro_usd
from controlplane.store import catalog
from controlplane.store.catalog import TenantRecord

router = APIRouter(prefix="/tenants", tags=["tenants"])

BudgetUsd = Annotated[
    float,
    Field(
        ge=0,
        le=1_000_000_000,
        allow_inf_nan=False,
        json_schema_extra={"anyOf": [{"const": 0}, {"minimum": 1 / MICRO_USD_PER_USD}]},
    ),
    AfterValidator(whole_micro_usd),
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

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("budget_usd", "is_disabled")
            ]
        }
    )

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
    _: ViewerDep,
    services: ServicesDep,
    *,
    tenant_class: Filter = None,
    is_disabled: bool | None = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[TenantAnswer]:
    """List tenants with their budgets, newest first."""
    found = await catalog.list_tenants(
        services.engine,
        tenant_class=tenant_class,
        is_disabled=is_disabled,
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, TenantAnswer.model_validate)


@router.get("/{tenant_id}")
async def get_tenant(
    tenant_id: Identifier, _: ViewerDep, services: ServicesDep, response: Response
) -> TenantAnswer:
    """One tenant with its budget."""
    record = await catalog.get_tenant(services.engine, TenantId(tenant_id))
    if record is None:
        raise _missing(tenant_id)
    return _shown(record, response)


@router.post("", status_code=201)
async def create_tenant(
    body: NewTenant,
    by: AdminChangeDep,
    services: ServicesDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> TenantAnswer:
    """Create a tenant. Its keys are created apart. With an `Idempotency-Key`, a tenant that is there as the
    body says is the answer, and no conflict.
    """
    try:
        record = await catalog.create_tenant(
            services.engine,
            tenant_id=TenantId(body.id),
            name=body.name,
            tenant_class=body.tenant_class,
            slo_class=body.slo_class,
            budget_micro_usd=micro_usd(body.budget_usd),
            by=by,
        )
    except ConfigurationError as error:
        raise Refused(Refuse(Reason.NOT_FOUND, str(error))) from error
    if record is None:
        if idempotency_key is None:
            raise Refused(Refuse(Reason.CONFLICT, f"there is a tenant `{body.id}` already"))
        record = await catalog.get_tenant(services.engine, TenantId(body.id))
        if record is None or not _is_as_said(record, body):
            raise mismatch(idempotency_key, f"tenant {body.id}")
        show_replay(response)
    response.headers["location"] = f"/operator/v1/tenants/{record.id}"
    return _shown(record, response)


@router.patch("/{tenant_id}")
async def change_tenant(
    tenant_id: Identifier,
    body: TenantChange,
    by: OperatorSeenChangeDep,
    services: ServicesDep,
    response: Response,
) -> TenantAnswer:
    """Set a tenant's budget, disable it, or let it in again."""
    record = await catalog.change_tenant(
        services.engine,
        TenantId(tenant_id),
        limit_micro_usd=None if body.budget_usd is None else micro_usd(body.budget_usd),
        is_disabled=body.is_disabled,
        by=by,
    )
    if record is None:
        raise _missing(tenant_id)
    if body.is_disabled is not None:
        services.gate.principals.forget()
    return _shown(record, response)


def _shown(record: TenantRecord, response: Response) -> TenantAnswer:
    show_version(response, catalog.version_of_tenant(record))
    return TenantAnswer.model_validate(record)


def _is_as_said(record: TenantRecord, body: NewTenant) -> bool:
    return (record.name, record.tenant_class, record.slo_class, record.limit_micro_usd) == (
        body.name,
        body.tenant_class,
        body.slo_class,
        micro_usd(body.budget_usd),
    )


def _missing(tenant_id: str) -> Refused:
    return Refused(Refuse(Reason.NOT_FOUND, f"there is no tenant `{tenant_id}`"))
