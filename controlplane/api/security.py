"""Who calls: a tenant by its key, or an operator with a role. Keys come as `Authorization: Bearer
…`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPBearer

from controlplane.api.entity_tags import IfMatch, versions_of
from controlplane.api.services import Services
from controlplane.api.shapes import Text
from controlplane.domain.catalog import OperatorRole, Principal
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import KeyId
from controlplane.store import keys
from controlplane.store.audit import Change

KEY_CHARACTERS_MAX = 256
REASON_CHARACTERS_MAX = 500

# The role that a dependency asks for, for whoever writes down what an operation needs.
ROLES: Final[dict[Callable[..., Any], OperatorRole]] = {}

# Each role may do what the ones before it may.
RANKS = {OperatorRole.VIEWER: 0, OperatorRole.OPERATOR: 1, OperatorRole.ADMIN: 2}

_tenant_scheme = HTTPBearer(
    scheme_name="TenantKey", description="A tenant's key, `hw-tenant-…`.", auto_error=False
)
_operator_scheme = HTTPBearer(
    scheme_name="OperatorKey", description="An operator key, `hw-op-…`.", auto_error=False
)


@dataclass(frozen=True, slots=True)
class Operator:
    key_id: KeyId
    role: OperatorRole

    @property
    def actor(self) -> str:
        """As the audit log names who changed something."""
        return f"key:{self.key_id}"


def services_of(request: Request) -> Services:
    return cast("Services", request.app.state.services)


ServicesDep = Annotated[Services, Depends(services_of)]


def _bearer(request: Request) -> str:
    """The key of the request. Raises Refused when there is none that could be one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise _unauthenticated("send a key as `Authorization: Bearer …`")
    if len(key) > KEY_CHARACTERS_MAX or not key.isascii():
        raise _unauthenticated("this is not a Headway key")
    return key


def _unauthenticated(detail: str) -> Refused:
    return Refused(Refuse(Reason.INVALID_API_KEY, detail))


# The schemes only write themselves into the OpenAPI document. FastAPI takes the last dependency of an
# annotation alone, so a scheme stands inside of the check and never beside it.
_TenantScheme = Annotated[object, Security(_tenant_scheme)]
_OperatorScheme = Annotated[object, Security(_operator_scheme)]


async def tenant_of(request: Request, services: ServicesDep, _: _TenantScheme) -> Principal:
    principal = await services.gate.authenticate(_bearer(request).encode())
    if principal is None:
        raise _unauthenticated("the key is unknown, revoked, or not a tenant's")
    return principal


TenantDep = Annotated[Principal, Depends(tenant_of)]


def operator_with(role: OperatorRole) -> Callable[..., Awaitable[Operator]]:
    """A dependency that lets operators of `role` and above pass."""

    async def operator_of(request: Request, services: ServicesDep, _: _OperatorScheme) -> Operator:
        key = _bearer(request)
        found = None
        if keys.is_well_formed(key):
            found = await keys.find_operator(services.engine, keys.digest(services.pepper, key))
        if found is None:
            raise _unauthenticated("the key is unknown, revoked, or not an operator's")
        key_id, held = found
        if RANKS[held] < RANKS[role]:
            raise Refused(
                Refuse(
                    Reason.FORBIDDEN_BY_POLICY,
                    f"this needs the operator role `{role}`; key `{key_id}` has `{held}`",
                )
            )
        return Operator(key_id=key_id, role=held)

    ROLES[operator_of] = role
    return operator_of


ViewerDep = Annotated[Operator, Depends(operator_with(OperatorRole.VIEWER))]
OperatorDep = Annotated[Operator, Depends(operator_with(OperatorRole.OPERATOR))]
AdminDep = Annotated[Operator, Depends(operator_with(OperatorRole.ADMIN))]


Why = Annotated[
    Text,
    Query(
        alias="reason",
        max_length=REASON_CHARACTERS_MAX,
        description="Why: it stands in the audit log.",
    ),
]


async def _operators_change(operator: OperatorDep, why: Why = "") -> Change:
    return Change(actor=operator.actor, reason=why)


async def _admins_change(operator: AdminDep, why: Why = "") -> Change:
    return Change(actor=operator.actor, reason=why)


async def _operators_seen_change(
    by: Annotated[Change, Depends(_operators_change)], if_match: IfMatch = None
) -> Change:
    return replace(by, expected=versions_of(if_match))


async def _admins_seen_change(
    by: Annotated[Change, Depends(_admins_change)], if_match: IfMatch = None
) -> Change:
    return replace(by, expected=versions_of(if_match))


# A change by an operator of this role or above, with the reason that the query gives.
OperatorChangeDep = Annotated[Change, Depends(_operators_change)]
AdminChangeDep = Annotated[Change, Depends(_admins_change)]
# The same of something that has a version, which the author may have seen.
OperatorSeenChangeDep = Annotated[Change, Depends(_operators_seen_change)]
AdminSeenChangeDep = Annotated[Change, Depends(_admins_seen_change)]
