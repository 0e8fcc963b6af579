"""Keys of tenants and operators. A plain key is in one answer only, that of its creation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import ConfigDict, Field, model_validator

from controlplane.api.entity_tags import show_version
from controlplane.api.idempotency import IdempotencyKey
from controlplane.api.security import (
    AdminChangeDep,
    AdminSeenChangeDep,
    OperatorSeenChangeDep,
    ServicesDep,
    ViewerDep,
)
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
)
from controlplane.domain.catalog import Limits, OperatorRole
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import KeyId, TenantId
from controlplane.store import catalog, keys
from controlplane.store.keys import NO_LIMITS, KeyExists, KeyRecord, KeyRevoked

router = APIRouter(prefix="/keys", tags=["keys"])

# How long a key that was replaced goes on working.
OVERLAP_S_DEFAULT = 24 * 3_600
OVERLAP_S_MAX = 30 * 24 * 3_600


LimitValue = Annotated[int | None, Field(gt=0, le=2**31 - 1)]


class KeyLimits(Body):
    """Limits of a tenant's key; null is none."""

    requests_per_minute: LimitValue = None
    tokens_per_minute: LimitValue = None
    calls_in_flight_max: LimitValue = None


class KeyChange(KeyLimits):
    """What is to change; what is left out stays, null lifts a limit."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    @model_validator(mode="after")
    def _something(self) -> "KeyChange":
        if not self.model_fields_set:
            raise ValueError("give a limit")
        return self


class NewKey(KeyLimits):
    """A key of a tenant, or of an operator with a role: exactly one of the two.

    Limits are for keys of tenants.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["tenant_id"],
                    "properties": {
                        "tenant_id": {"type": "string"},
                        "operator_role": {"type": "null"},
                    },
                },
                {
                    "required": ["operator_role"],
                    "properties": {
                        "operator_role": {"type": "string"},
                        **{
                            name: {"type": "null"}
                            for name in ("tenant_id", *KeyLimits.model_fields)
                        },
                    },
                },
            ]
        }
    )

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


class Rotation(Body):
    """`overlap_s`: for how many seconds the old key goes on working beside the new one."""

    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_S_MAX)] = OVERLAP_S_DEFAULT


class KeyAnswer(Answer):
    """A `revoked_at` that is still to come is that of a key that was replaced: it works until then."""

    id: str
    name: str
    tenant_id: str | None
    operator_role: str | None
    created_at: datetime
    revoked_at: datetime | None
    is_revoked: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    calls_in_flight_max: int | None


class CreatedKey(Answer):
    """`key` is shown this once: only its digest is stored."""

    id: str
    key: str


class RotatedKey(CreatedKey):
    """The new key, and the old one with the time from which on it is refused."""

    replaces: str
    replaced_works_until: datetime


class RevokedKey(Answer):
    id: str
    is_revoked: bool


@router.get("")
async def list_keys(
    _: ViewerDep,
    services: ServicesDep,
    *,
    tenant: Filter = None,
    operator_role: OperatorRole | None = None,
    is_revoked: bool | None = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[KeyAnswer]:
    """List keys, newest first, without the keys."""
    found = await keys.list_keys(
        services.engine,
        tenant=None if tenant is None else TenantId(tenant),
        operator_role=operator_role,
        is_revoked=is_revoked,
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, _answer)


@router.post("", status_code=201)
async def create_key(
    body: NewKey,
    by: AdminChangeDep,
    services: ServicesDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> CreatedKey:
    """Create a key. The answer is the only place where it is ever seen; a call that is sent again with its
    `Idempotency-Key` makes no second key, and is told which one it made.
    """
    key_id = None if idempotency_key is None else keys.id_of_call(by.actor, idempotency_key)
    with _taken_told():
        if body.operator_role is not None:
            key_id, plain = await keys.create_operator_key(
                services.engine, services.pepper, body.operator_role, body.name, by, key_id
            )
        else:
            tenant = TenantId(body.tenant_id or "")
            if await catalog.get_tenant(services.engine, tenant) is None:
                raise Refused(Refuse(Reason.NOT_FOUND, f"there is no tenant `{tenant}`"))
            key_id, plain = await keys.create_tenant_key(
                services.engine, services.pepper, tenant, body.name, _limits_of(body), by, key_id
            )
    _show_secret(response, key_id)
    return CreatedKey(id=key_id, key=plain)


@router.get("/{key_id}")
async def get_key(
    key_id: Identifier, _: ViewerDep, services: ServicesDep, response: Response
) -> KeyAnswer:
    """One key, without the key."""
    record = await keys.get_key(services.engine, KeyId(key_id))
    if record is None:
        raise _missing(key_id)
    show_version(response, keys.version_of_key(record))
    return _answer(record)


@router.post("/{key_id}/rotate", status_code=201)
async def rotate_key(
    key_id: Identifier,
    by: AdminSeenChangeDep,
    services: ServicesDep,
    response: Response,
    body: Rotation | None = None,
    idempotency_key: IdempotencyKey = None,
) -> RotatedKey:
    """Replace a key by a new one of the same owner, name, limits and budgets. The old one goes on working for
    `overlap_s` seconds, so that nothing fails while callers change over. An operator may rotate its own.
    """
    new_id = None
    if idempotency_key is not None:
        new_id = keys.id_of_call(by.actor, f"{key_id} {idempotency_key}")
        if await keys.get_key(services.engine, new_id) is not None:
            raise _not_stored(new_id)
    with _taken_told():
        rotated = await keys.rotate_key(
            services.engine,
            services.pepper,
            KeyId(key_id),
            overlap_s=(body or Rotation()).overlap_s,
            by=by,
            new_id=new_id,
        )
    if rotated is None:
        raise _missing(key_id)
    old, new, plain = rotated
    services.gate.principals.forget()
    _show_secret(response, new.id)
    assert old.revoked_at is not None
    return RotatedKey(id=new.id, key=plain, replaces=old.id, replaced_works_until=old.revoked_at)


@router.patch("/{key_id}")
async def change_key(
    key_id: Identifier,
    body: KeyChange,
    by: OperatorSeenChangeDep,
    services: ServicesDep,
    response: Response,
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
    show_version(response, keys.version_of_key(record))
    return _answer(record)


@router.delete("/{key_id}")
async def revoke_key(
    key_id: Identifier, by: AdminSeenChangeDep, services: ServicesDep
) -> RevokedKey:
    """Revoke a key. Repeating this changes nothing. Nobody revokes the key that it calls with: an operator
    would stand before a closed door.
    """
    if by.actor == f"key:{key_id}":
        raise Refused(
            Refuse(Reason.CONFLICT, "this is the key that you call with; revoke it with another")
        )
    if await keys.revoke_key(services.engine, KeyId(key_id), by) is None:
        raise _missing(key_id)
    services.gate.principals.forget()
    return RevokedKey(id=key_id, is_revoked=True)


def _missing(key_id: str) -> Refused:
    return Refused(Refuse(Reason.NOT_FOUND, f"there is no key `{key_id}`"))


def _not_stored(key_id: str) -> Refused:
    return Refused(
        Refuse(
            Reason.RESPONSE_NOT_STORED,
            f"this call has made key `{key_id}`, which was shown then and is kept nowhere;"
            " revoke it and create one with another `Idempotency-Key`",
        )
    )


@contextmanager
def _taken_told() -> Iterator[None]:
    """A key that was made already, or has an end already, becomes a refusal."""
    try:
        yield
    except KeyExists as error:
        raise _not_stored(error.key_id) from error
    except KeyRevoked as error:
        raise Refused(Refuse(Reason.CONFLICT, str(error))) from error


def _show_secret(response: Response, key_id: str) -> None:
    """Where the key is found from now on; what was made is kept by no cache."""
    response.headers["location"] = f"/operator/v1/keys/{key_id}"
    response.headers["cache-control"] = "no-store"


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
        is_revoked=record.is_revoked,
        requests_per_minute=record.limits.requests_per_minute,
        tokens_per_minute=record.limits.tokens_per_minute,
        calls_in_flight_max=record.limits.calls_in_flight_max,
    )
