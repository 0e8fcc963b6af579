"""Keys of tenants and operators. A plain key is in one answer only, that of its creation."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, model_validator

from controlplane.api.security import AdminDep, ServicesDep, ViewerDep
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
from controlplane.domain.catalog import OperatorRole
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import KeyId, TenantId
from controlplane.store import catalog, keys

router = APIRouter(prefix="/keys", tags=["keys"])


class NewKey(Body):
    """A key of a tenant, or of an operator with a role: exactly one of the two."""

    name: Name
    tenant_id: Slug | None = None
    operator_role: Annotated[OperatorRole | None, Field(strict=False)] = None

    @model_validator(mode="after")
    def _one_owner(self) -> "NewKey":
        if (self.tenant_id is None) == (self.operator_role is None):
            raise ValueError("give either tenant_id or operator_role")
        return self


class KeyAnswer(Answer):
    id: str
    name: str
    tenant_id: str | None
    operator_role: str | None
    created_at: datetime
    revoked_at: datetime | None


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
    return page_of(found, KeyAnswer.model_validate)


@router.post("", status_code=201)
async def create_key(body: NewKey, _: AdminDep, services: ServicesDep) -> CreatedKey:
    """Create a key. The answer is the only place where it is ever seen."""
    if body.operator_role is not None:
        key_id, plain = await keys.create_operator_key(
            services.engine, services.pepper, body.operator_role, body.name
        )
        return CreatedKey(id=key_id, key=plain)
    tenant = TenantId(body.tenant_id or "")
    if await catalog.get_tenant(services.engine, tenant) is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no tenant `{tenant}`"))
    key_id, plain = await keys.create_tenant_key(
        services.engine, services.pepper, tenant, body.name
    )
    return CreatedKey(id=key_id, key=plain)


@router.delete("/{key_id}")
async def revoke_key(key_id: Identifier, _: AdminDep, services: ServicesDep) -> RevokedKey:
    """Revoke a key. Repeating this changes nothing."""
    if await keys.revoke_key(services.engine, KeyId(key_id)) is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no key `{key_id}`"))
    services.gate.principals.forget()
    return RevokedKey(id=key_id, is_revoked=True)
