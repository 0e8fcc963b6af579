"""The audit log: who changed what and why, and whether its chain is whole."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.shapes import LIST_LIMIT_DEFAULT, Answer, Cursor, Limit, Page, Text, page_of
from controlplane.store import audit

SUBJECT_CHARACTERS_MAX = 255

router = APIRouter(prefix="/audit", tags=["audit"])

Subject = Annotated[
    Text | None,
    Query(
        max_length=SUBJECT_CHARACTERS_MAX,
        description="Only this subject, or with `*` at the end all that begin so.",
    ),
]
Head = Annotated[
    str | None,
    Query(pattern=r"^[0-9a-f]{64}$", description="Hash of an entry that must be in the chain."),
]


class AuditAnswer(Answer):
    """`before` and `after`: the subject's members around the change, null where there was none."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    reason: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    prev_hash: str
    hash: str


class VerificationAnswer(Answer):
    """`head` is the hash of the last entry that fits: keep it, and give it to a later verification."""

    entries: int
    head: str
    is_whole: bool
    broken_at: int | None
    why: str


@router.get("")
async def list_entries(
    _: ViewerDep,
    services: ServicesDep,
    *,
    subject: Subject = None,
    actor: Annotated[Text | None, Query(max_length=SUBJECT_CHARACTERS_MAX)] = None,
    action: Annotated[Text | None, Query(max_length=SUBJECT_CHARACTERS_MAX)] = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[AuditAnswer]:
    """List changes, newest first."""
    found = await audit.list_entries(
        services.engine, subject=subject, actor=actor, action=action, limit=limit, cursor=cursor
    )
    return page_of(found, AuditAnswer.model_validate)


@router.get("/verify")
async def verify(_: ViewerDep, services: ServicesDep, head: Head = None) -> VerificationAnswer:
    """Walk the whole chain. Reads every entry."""
    found = await audit.verify(services.engine, head)
    return VerificationAnswer(
        entries=found.entries,
        head=found.head,
        is_whole=found.broken_at is None,
        broken_at=found.broken_at,
        why=found.why,
    )
