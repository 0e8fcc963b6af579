"""Keys of tenants and operators. A key is shown once; what is stored is a keyed digest of it."""

import base64
import hashlib
import secrets
import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import (
    ColumnElement,
    Row,
    func,
    insert,
    literal_column,
    not_,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.catalog import Limits, OperatorRole, Principal, Tenant
from controlplane.domain.errors import ConfigurationError, HeadwayError
from controlplane.domain.ids import KeyId, TenantId
from controlplane.store import audit, tables
from controlplane.store.audit import LOCAL, Change, Members
from controlplane.store.catalog import raise_revision
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.session import transaction

KEY_CHARACTERS_MAX = 80
_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_CHARACTERS = 8
_SECRET_BYTES = 32
_SECRET_CHARACTERS = 43
_CHECK_CHARACTERS = 8
_BASE64URL = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")

KeyPrefix = Literal["tenant", "op"]
NO_LIMITS: Final = Limits()


# A key that was replaced works until its end.
_WORKS = or_(tables.api_keys.c.revoked_at.is_(None), tables.api_keys.c.revoked_at > func.now())

_COPY_BUDGETS = text(
    """
    INSERT INTO budgets (id, unit, "limit", "window", window_started_at)
    SELECT replace(id, 'key\\:' || CAST(:old AS text), 'key\\:' || CAST(:new AS text)), unit,
           CASE "window" WHEN 'total' THEN GREATEST("limit" - spent - reserved, 0) ELSE "limit" END,
           "window", window_started_at
    FROM budgets WHERE id IN ('key\\:' || CAST(:old AS text), 'key\\:' || CAST(:old AS text) || '\\:tokens')
    """
)


class KeyExists(HeadwayError):
    """A key of this id has been made already."""

    def __init__(self, key_id: KeyId) -> None:
        super().__init__(f"there is a key `{key_id}` already")
        self.key_id = key_id


class KeyRevoked(HeadwayError):
    """A key has an end already and can not be replaced."""

    def __init__(self, key_id: KeyId) -> None:
        super().__init__(f"key `{key_id}` is revoked or replaced already")


_limits = (
    tables.api_keys.c.requests_per_minute,
    tables.api_keys.c.tokens_per_minute,
    tables.api_keys.c.calls_in_flight_max,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """Of tenant or operator, the other is None. A `revoked_at` that is still to come is that of a key that
    was replaced: it works until then.
    """

    id: KeyId
    tenant_id: TenantId | None
    operator_role: OperatorRole | None
    name: str
    created_at: datetime
    revoked_at: datetime | None
    is_revoked: bool
    limits: Limits


def new_key(prefix: KeyPrefix, key_id: KeyId | None = None) -> tuple[str, KeyId]:
    """A fresh key and its id: `hw-<tenant|op>-<id>-<256 random bits>-<CRC-32>`."""
    key_id = key_id or KeyId("".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARACTERS)))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    body = f"hw-{prefix}-{key_id}-{secret}"
    return f"{body}-{_check(body)}", key_id


def id_of_call(author: str, name: str) -> KeyId:
    """The id of the key that the call `name` of `author` makes: the same however often it is sent."""
    digest_of_call = hashlib.blake2b(
        f"{author}\x00{name}".encode(), digest_size=_ID_CHARACTERS, person=b"key id"
    ).digest()
    return KeyId("".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in digest_of_call))


def is_well_formed(plain: str) -> bool:
    """Whether `plain` can be a key. Keeps garbage away from the database; proves nothing."""
    if len(plain) > KEY_CHARACTERS_MAX or not plain.isascii():
        return False
    body, check = plain[: -_CHECK_CHARACTERS - 1], plain[-_CHECK_CHARACTERS:]
    if plain[-_CHECK_CHARACTERS - 1 : -_CHECK_CHARACTERS] != "-" or _check(body) != check:
        return False
    # The secret's alphabet contains the separator, so it is cut by length.
    head, secret = body[: -_SECRET_CHARACTERS - 1], body[-_SECRET_CHARACTERS:]
    parts = head.split("-")
    return (
        len(parts) == 3  # noqa: PLR2004 - hw, kind, id
        and parts[0] == "hw"
        and parts[1] in {"tenant", "op"}
        and len(parts[2]) == _ID_CHARACTERS
        and body[-_SECRET_CHARACTERS - 1] == "-"
        and set(secret) <= _BASE64URL
    )


def digest(pepper: bytes, plain: str) -> bytes:
    """What is stored of a key. Keyed BLAKE2 is a MAC by design: without the pepper it tells
    nothing.
    """
    return hashlib.blake2b(plain.encode("utf-8", "replace"), key=pepper, digest_size=32).digest()


async def create_tenant_key(
    engine: AsyncEngine,
    pepper: bytes,
    tenant_id: TenantId,
    name: str,
    limits: Limits = NO_LIMITS,
    by: Change = LOCAL,
    key_id: KeyId | None = None,
) -> tuple[KeyId, str]:
    """The id and the key itself, which is not stored.

    Raises ConfigurationError on an unknown tenant, KeyExists when `key_id` is taken.
    """
    plain, key_id = new_key("tenant", key_id)
    try:
        async with transaction(engine) as connection:
            await connection.execute(
                insert(tables.api_keys).values(
                    id=key_id,
                    digest=digest(pepper, plain),
                    tenant_id=tenant_id,
                    name=name,
                    **_limit_columns(limits),
                )
            )
            await raise_revision(connection)
            await _note(connection, by, "key.create", key_id, None)
    except IntegrityError as error:
        _refuse_taken(error, key_id)
        raise ConfigurationError(f"tenant `{tenant_id}` does not exist: create it first") from error
    return key_id, plain


async def create_operator_key(
    engine: AsyncEngine,
    pepper: bytes,
    role: OperatorRole,
    name: str,
    by: Change = LOCAL,
    key_id: KeyId | None = None,
) -> tuple[KeyId, str]:
    """The id and the key itself, which is not stored. Raises KeyExists when `key_id` is taken."""
    plain, key_id = new_key("op", key_id)
    try:
        async with transaction(engine) as connection:
            await connection.execute(
                insert(tables.api_keys).values(
                    id=key_id, digest=digest(pepper, plain), operator_role=str(role), name=name
                )
            )
            await _note(connection, by, "key.create", key_id, None)
    except IntegrityError as error:
        _refuse_taken(error, key_id)
        raise
    return key_id, plain


async def rotate_key(
    engine: AsyncEngine,
    pepper: bytes,
    key_id: KeyId,
    *,
    overlap_s: int,
    by: Change = LOCAL,
    new_id: KeyId | None = None,
) -> tuple[KeyRecord, KeyRecord, str] | None:
    """A new key of the same owner with the same name, limits and budgets, and an end for the old one
    `overlap_s` seconds from now: the old and the new record, and the new key itself, which is not stored.

    A budget for good goes to the new key with what the old one has left of it; one of a window is the same,
    so that in the window of the rotation both may spend it. None when there is no such key. Raises
    KeyRevoked for one that does not work any more or is replaced already, KeyExists when `new_id` is taken,
    PreconditionFailed.
    """
    try:
        async with transaction(engine) as connection:
            before = await _lock(connection, key_id)
            old = await _read(connection, key_id)
            if before is None or old is None:
                return None
            by.hold_to(f"key:{key_id}", before)
            if old.revoked_at is not None:
                raise KeyRevoked(key_id)
            plain, new = new_key("tenant" if old.operator_role is None else "op", new_id)
            await connection.execute(
                insert(tables.api_keys).values(
                    id=new,
                    digest=digest(pepper, plain),
                    tenant_id=old.tenant_id,
                    operator_role=None if old.operator_role is None else str(old.operator_role),
                    name=old.name,
                    **_limit_columns(old.limits),
                )
            )
            await connection.execute(_COPY_BUDGETS, {"old": key_id, "new": new})
            await connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == key_id)
                .values(revoked_at=func.now() + func.make_interval(0, 0, 0, 0, 0, 0, overlap_s))
            )
            await raise_revision(connection)
            await _note(connection, by, "key.create", new, None)
            await _note(connection, by, "key.rotate", key_id, before)
            made, left = await _read(connection, new), await _read(connection, key_id)
    except IntegrityError as error:
        if new_id is not None:
            _refuse_taken(error, new_id)
        raise
    assert made is not None
    assert left is not None
    return left, made, plain


async def revoke_key(engine: AsyncEngine, key_id: KeyId, by: Change = LOCAL) -> KeyRecord | None:
    """The key, revoked now or before; None when there is no such key."""
    async with transaction(engine) as connection:
        before = await _lock(connection, key_id)
        if before is not None:
            by.hold_to(f"key:{key_id}", before)
        changed = await connection.execute(
            update(tables.api_keys)
            .where(tables.api_keys.c.id == key_id, _WORKS)
            .values(revoked_at=func.now())
        )
        if changed.rowcount:
            await raise_revision(connection)
            await _note(connection, by, "key.revoke", key_id, before)
        return await _read(connection, key_id)


async def get_key(engine: AsyncEngine, key_id: KeyId) -> KeyRecord | None:
    async with transaction(engine) as connection:
        return await _read(connection, key_id)


async def set_limits(
    engine: AsyncEngine, key_id: KeyId, limits: Limits, by: Change = LOCAL
) -> KeyRecord | None:
    """Replace the limits of a tenant's key; None when no tenant has such a key."""
    async with transaction(engine) as connection:
        before = await _lock(connection, key_id)
        if before is not None:
            by.hold_to(f"key:{key_id}", before)
        changed = await connection.execute(
            update(tables.api_keys)
            .where(tables.api_keys.c.id == key_id, tables.api_keys.c.tenant_id.is_not(None))
            .values(**_limit_columns(limits))
        )
        if changed.rowcount == 0:
            return None
        await raise_revision(connection)
        await _note(connection, by, "key.limit", key_id, before)
        return await _read(connection, key_id)


# Accounts that a call by this key is held in besides its tenant's in micro-dollars.
_ACCOUNTS: ColumnElement[Any] = literal_column(
    """
    ARRAY(SELECT budgets.id FROM budgets
          WHERE budgets.id IN ('key:' || api_keys.id, 'key:' || api_keys.id || ':tokens',
                               'tenant:' || tenants.id || ':tokens')
          ORDER BY budgets.id)
    """,
)


async def find_principal(engine: AsyncEngine, digest: bytes) -> Principal | None:
    """Whose key has this digest; None for unknown and revoked ones. A disabled tenant is found."""
    statement = (
        select(
            tables.api_keys.c.id.label("key_id"),
            tables.tenants.c.id,
            tables.tenants.c.name,
            tables.tenants.c.tenant_class,
            tables.tenants.c.slo_class,
            tables.tenants.c.is_disabled,
            tables.tenants.c.cache_salt,
            *_limits,
            _ACCOUNTS.label("accounts"),
        )
        .join_from(tables.api_keys, tables.tenants)
        .where(tables.api_keys.c.digest == digest, _WORKS)
    )
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return None
    own = tuple(account for account in row.accounts if account.startswith("key:"))
    tenants_own = [account for account in row.accounts if not account.startswith("key:")]
    return Principal(
        key_id=row.key_id,
        key_limits=_limits_of(row),
        key_budgets=own,
        tenant=Tenant(
            id=row.id,
            name=row.name,
            tenant_class=row.tenant_class,
            slo_class=row.slo_class,
            is_disabled=row.is_disabled,
            cache_salt=row.cache_salt,
            token_budget=tenants_own[0] if tenants_own else None,
        ),
    )


async def find_operator(engine: AsyncEngine, digest: bytes) -> tuple[KeyId, OperatorRole] | None:
    """The operator key with this digest and its role; None for unknown and revoked ones."""
    statement = select(tables.api_keys.c.id, tables.api_keys.c.operator_role).where(
        tables.api_keys.c.digest == digest,
        _WORKS,
        tables.api_keys.c.operator_role.is_not(None),
    )
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    return None if row is None else (KeyId(row.id), OperatorRole(row.operator_role))


async def list_keys(
    engine: AsyncEngine,
    *,
    tenant: TenantId | None = None,
    operator_role: OperatorRole | None = None,
    is_revoked: bool | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[KeyRecord]:
    """Newest first, revoked ones included. Raises BadCursor."""
    statement = select(*_columns)
    if tenant is not None:
        statement = statement.where(tables.api_keys.c.tenant_id == tenant)
    if operator_role is not None:
        statement = statement.where(tables.api_keys.c.operator_role == str(operator_role))
    if is_revoked is not None:
        statement = statement.where(not_(_WORKS) if is_revoked else _WORKS)
    statement = newest_first(
        statement,
        tables.api_keys.c.created_at,
        tables.api_keys.c.id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [_record(row) for row in rows]
    return page(items, [(item.created_at, item.id) for item in items], limit)


_columns = (
    tables.api_keys.c.id,
    tables.api_keys.c.tenant_id,
    tables.api_keys.c.operator_role,
    tables.api_keys.c.name,
    tables.api_keys.c.created_at,
    tables.api_keys.c.revoked_at,
    not_(_WORKS).label("is_revoked"),
    *_limits,
)


def version_of_key(record: KeyRecord) -> str:
    """The version of what `set_limits`, `revoke_key` and `rotate_key` change."""
    return audit.version_of(_members(record) or {})


def _refuse_taken(error: IntegrityError, key_id: KeyId) -> None:
    """Raises KeyExists when it was the id that is taken."""
    diagnosis = getattr(error.orig, "diag", None)
    if getattr(diagnosis, "constraint_name", None) == tables.api_keys.primary_key.name:
        raise KeyExists(key_id) from error


async def _lock(connection: AsyncConnection, key_id: KeyId) -> Members | None:
    """A key's members, which nobody else changes until the transaction ends."""
    held = select(tables.api_keys.c.id).where(tables.api_keys.c.id == key_id).with_for_update()
    await connection.execute(held)
    return _members(await _read(connection, key_id))


async def _note(
    connection: AsyncConnection, by: Change, action: str, key_id: KeyId, before: Members | None
) -> None:
    after = _members(await _read(connection, key_id))
    await audit.note(connection, by, action, f"key:{key_id}", before, after)


def _members(record: KeyRecord | None) -> Members | None:
    """What the audit log tells of a key: never its digest."""
    if record is None:
        return None
    return {
        "name": record.name,
        "tenant": record.tenant_id,
        "operator_role": record.operator_role,
        "is_revoked": record.is_revoked,
        **_end_of(record),
        **_limit_columns(record.limits),
    }


def _end_of(record: KeyRecord) -> Members:
    """When a key that was replaced ends, while that is still to come."""
    if record.revoked_at is None or record.is_revoked:
        return {}
    return {"revoked_at": record.revoked_at.isoformat()}


async def _read(connection: AsyncConnection, key_id: KeyId) -> KeyRecord | None:
    row = (
        await connection.execute(select(*_columns).where(tables.api_keys.c.id == key_id))
    ).one_or_none()
    return None if row is None else _record(row)


def _record(row: Row[*tuple[Any, ...]]) -> KeyRecord:
    return KeyRecord(
        id=KeyId(row.id),
        tenant_id=row.tenant_id,
        operator_role=row.operator_role,
        name=row.name,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
        is_revoked=row.is_revoked,
        limits=_limits_of(row),
    )


def _limits_of(row: Row[*tuple[Any, ...]]) -> Limits:
    return Limits(
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        calls_in_flight_max=row.calls_in_flight_max,
    )


def _limit_columns(limits: Limits) -> dict[str, int | None]:
    return {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "calls_in_flight_max": limits.calls_in_flight_max,
    }


def _check(body: str) -> str:
    return f"{zlib.crc32(body.encode('utf-8', 'replace')):08x}"
