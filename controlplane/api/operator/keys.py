"""Keys of tenants and operators. A plain key is in one answer only, that of its creation."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, model_validator

from controlplane.api.security import (
    AdminChangeDep,
    OperatorChangeDep,
    ServicesDep,
    ViewerDep,
)
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
)
from controlplane.domain.catalog import Limits, OperatorRole
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import KeyId, TenantId
from controlplane.store import catalog, keys
from controlplane.store.keys import NO_LIMITS, KeyRecord

router = APIRouter(prefix="/keys", tags=["keys"])


LimitValue = Annotated[int | None, Field(gt=0, le=2**31 - 1)]


class KeyLimits(Body):
    """Limits of a tenant's key; null is none."""

    requests_per_minute: LimitValue = None
    tokens_per_minute: LimitValue = None
    calls_in_flight_max: LimitValue = None


class KeyChange(KeyLimits):
    """What is to change; what is left out stays, null lifts a limit."""

    @model_validator(mode="after")
    def _something(self) -> "KeyChange":
        if not self.model_fields_set:
            raise ValueError("give a limit")
        return self


class NewKey(KeyLimits):
    """A key of a tenant, or of an operator with a role: exactly one of the two.

    Limits are for keys of tenants.
    """

    name: Name
    tenant_id: Slug | None = None
    operator_role: Annotated[OperatorRole | None, Field(strict=False)] = None

    @model_validator(mode="after")
    def _one_owner(self) -> "NewKey":
        if (self.tenant_id is None) == (self.operator_role is None):
            raise ValueError("give either tenant_id or operator_role")
        if self.tenant_id is None and _limits_of(self) != NO_LIMITS:
            raise ValueError("keys of operators have no limits")
        return self


class KeyAnswer(Answer):
    id: str
    name: str
    tenant_id: str | None
    operator_role: str | None
    created_at: datetime
    revoked_at: datetime | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    calls_in_flight_max: int | None


class CreatedKey(Answer):
    """`key` is shown this once: only its digest is stored."""

    id: str
    key: str


class RevokedKey(Answer):
    id: str
    is_revoked: bool


@router.get("")
async def list_keys(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[KeyAnswer]:
    """List keys, without the keys."""
    found = await keys.list_keys(services.engine, limit=limit, cursor=cursor)
    return page_of(found, _answer)


@router.post("", status_code=201)
async def create_key(body: NewKey, by: AdminChangeDep, services: ServicesDep) -> CreatedKey:
    """Create a key. The answer is the only place where it is ever seen."""
    if body.operator_role is not None:
        key_id, plain = await keys.create_operator_key(
            services.engine, services.pepper, body.operator_role, body.name, by
        )
        return CreatedKey(id=key_id, key=plain)
    tenant = TenantId(body.tenant_id or "")
    if await catalog.get_tenant(services.engine, tenant) is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no tenant `{tenant}`"))
    key_id, plain = await keys.create_tenant_key(
        services.engine, services.pepper, tenant, body.name, _limits_of(body), by
    )
    return CreatedKey(id=key_id, key=plain)


@router.patch("/{key_id}")
async def change_key(
    key_id: Identifier, body: KeyChange, by: OperatorChangeDep, services: ServicesDep
) -> KeyAnswer:
    """Set or lift limits of a tenant's key. Replicas obey within two seconds."""
    record = await keys.get_key(services.engine, KeyId(key_id))
    if record is not None:
        changes = {name: getattr(body, name) for name in body.model_fields_set}
        limits = replace(record.limits, **changes)
        record = await keys.set_limits(services.engine, KeyId(key_id), limits, by)
    if record is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"no tenant has a key `{key_id}`"))
    services.gate.principals.forget()
    return _answer(record)


@router.delete("/{key_id}")
async def revoke_key(key_id: Identifier, by: AdminChangeDep, services: ServicesDep) -> RevokedKey:
    """Revoke a key. Repeating this changes nothing."""
    if await keys.revoke_key(services.engine, KeyId(key_id), by) is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no key `{key_id}`"))
    services.gate.principals.forget()
    return RevokedKey(id=key_id, is_revoked=True)


def _limits_of(body: KeyLimits) -> Limits:
    return Limits(
        requests_per_minute=body.requests_per_minute,
        tokens_per_minute=body.tokens_per_minute,
        calls_in_flight_max=body.calls_in_flight_max,
    )


def _answer(record: KeyRecord) -> KeyAnswer:
    return KeyAnswer(
        id=record.id,
        name=record.name,
        tenant_id=record.tenant_id,
        operator_role=record.operator_role,
        created_at=record.created_at,
        revoked_at=record.revoked_at,
        requests_per_minute=record.limits.requests_per_minute,
        tokens_per_minute=record.limits.tokens_per_minute,
        calls_in_flight_max=record.limits.calls_in_flight_max,
    )
