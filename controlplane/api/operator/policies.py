"""Policy bundles: their revisions, the rollout of one, and the decisions to replay against another."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field, StringConstraints

from controlplane.api.entity_tags import IfMatch, generation_of, moved_told, show_version
from controlplane.api.security import AdminDep, ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    LIST_LIMIT_MAX,
    Answer,
    Body,
    Cursor,
    Detail,
    Identifier,
    Limit,
    Page,
    Text,
    page_of,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused
from controlplane.runtime.policy_compile import checked
from controlplane.store import policies
from controlplane.store.policies import Mode, Revision, Rollout, RolloutConflict, RolloutMoved
from policies.cases import run_cases
from policies.evaluate import Policy
from policies.load import FILES_MAX

SINCE_S_MAX = 31 * 86_400
# Failed cases told at once; the rest is counted.
CASES_TOLD_MAX = 8

router = APIRouter(prefix="/policies", tags=["policies"])

FileName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.ya?ml$", max_length=105)
]
Why = Annotated[Detail, Field(min_length=1)]
# What the author of a change saw; it is refused when the rollout has moved on.
Generation = Annotated[int | None, Field(ge=0)]
Since = Annotated[
    int, Query(ge=1, le=SINCE_S_MAX, description="Only decisions of the last so many seconds.")
]


class NewRevision(Body):
    """A bundle: its files by name. `is_now`: rules at once, without a time in shadow."""

    files: Annotated[
        dict[FileName, Text],
        Field(
            min_length=1,
            max_length=FILES_MAX,
            json_schema_extra={"additionalProperties": False},
        ),
    ]
    reason: Why
    is_now: bool = False
    generation: Generation = None


class Step(Body):
    reason: Why
    generation: Generation = None


class CanaryStep(Step):
    percent: Annotated[int, Field(ge=1, le=100)]


class RevisionAnswer(Answer):
    digest: str
    author: str
    reason: str
    created_at: datetime


class RevisionFiles(RevisionAnswer):
    files: dict[str, str]


class RolloutAnswer(Answer):
    """`mode`: none, shadow (the candidate rules without effect) or canary (it rules a share of tenants)."""

    generation: int
    active_digest: str | None
    previous_digest: str | None
    candidate_digest: str | None
    mode: str
    canary_percent: int
    changed_by: str
    reason: str
    changed_at: datetime


class FactsAnswer(Answer):
    """A recorded decision with everything that rules could read. It stands for `sample_weight` calls."""

    request_id: str
    number: int
    verdict: str
    reason: str | None
    tenant_id: str | None
    model: str | None
    rule: str | None
    policy_revision: str
    facts: dict[str, Any]
    sample_weight: int
    decided_at: datetime


@router.get("/rollout")
async def rollout(_: ViewerDep, services: ServicesDep, response: Response) -> RolloutAnswer:
    """Which bundle rules, and which one stands beside it."""
    return _shown(await policies.rollout(services.engine), response)


@router.get("/revisions")
async def list_revisions(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[RevisionAnswer]:
    """List revisions, newest first, without their files."""
    found = await policies.list_revisions(services.engine, limit=limit, cursor=cursor)
    return page_of(found, RevisionAnswer.model_validate)


@router.get("/revisions/{digest}")
async def get_revision(digest: Identifier, _: ViewerDep, services: ServicesDep) -> RevisionFiles:
    """Show a revision with its files: by digest, its first characters, or `active`, `previous`,
    `candidate`.
    """
    return RevisionFiles.model_validate(await _found(services, digest))


@router.post("/revisions", status_code=201)
async def apply(
    body: NewRevision,
    operator: AdminDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> RolloutAnswer:
    """Check a bundle, store it, and let it rule in shadow or at once. A bad one changes nothing."""
    policy = await services.compiler.compile(body.files)
    await asyncio.to_thread(_refuse_failing_cases, policy)
    with _conflicts_told(), moved_told(if_match, RolloutMoved):
        changed = await policies.apply(
            services.engine,
            policy.revision,
            body.files,
            author=operator.actor,
            reason=body.reason,
            mode=Mode.NONE if body.is_now else Mode.SHADOW,
            generation=generation_of(if_match, body.generation),
            check=checked(policy),
        )
    await services.policies_changed(policy)
    return _shown(changed, response)


@router.post("/rollout/canary")
async def canary(
    body: CanaryStep,
    operator: AdminDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> RolloutAnswer:
    """Let the candidate rule a share of the tenants."""
    with _conflicts_told(), moved_told(if_match, RolloutMoved):
        changed = await policies.canary(
            services.engine,
            body.percent,
            author=operator.actor,
            reason=body.reason,
            generation=generation_of(if_match, body.generation),
        )
    await services.policies_changed(None)
    return _shown(changed, response)


@router.post("/rollout/promote")
async def promote(
    body: Step,
    operator: AdminDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> RolloutAnswer:
    """Make the candidate the active bundle."""
    with _conflicts_told(), moved_told(if_match, RolloutMoved):
        changed = await policies.promote(
            services.engine,
            author=operator.actor,
            reason=body.reason,
            generation=generation_of(if_match, body.generation),
        )
    await services.policies_changed(None)
    return _shown(changed, response)


@router.post("/rollout/rollback")
async def roll_back(
    body: Step,
    operator: AdminDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> RolloutAnswer:
    """Drop the candidate; without one, make the previous bundle active again."""
    with _conflicts_told(), moved_told(if_match, RolloutMoved):
        changed = await policies.roll_back(
            services.engine,
            author=operator.actor,
            reason=body.reason,
            generation=generation_of(if_match, body.generation),
        )
    await services.policies_changed(None)
    return _shown(changed, response)


@router.get("/facts")
async def list_facts(
    _: ViewerDep,
    services: ServicesDep,
    since_s: Since = 86_400,
    limit: Limit = LIST_LIMIT_MAX,
    cursor: Cursor = None,
) -> Page[FactsAnswer]:
    """List the last recorded decision of each request with its facts, newest first."""
    found = await policies.list_facts(services.engine, since_s=since_s, limit=limit, cursor=cursor)
    return page_of(found, FactsAnswer.model_validate)


@router.get("/facts/{request_id}")
async def get_facts(request_id: Identifier, _: ViewerDep, services: ServicesDep) -> FactsAnswer:
    """Show what the rules could read when a request was decided."""
    found = await policies.facts_of(services.engine, request_id)
    if found is None:
        raise Refused(
            Refuse(
                Reason.NOT_FOUND,
                f"no facts of `{request_id}` are recorded; those of refusals and of a sample are",
            )
        )
    return FactsAnswer.model_validate(found)


def _shown(found: Rollout, response: Response) -> RolloutAnswer:
    show_version(response, str(found.generation))
    return RolloutAnswer.model_validate(found)


def _refuse_failing_cases(policy: Policy) -> None:
    """Raises ConfigurationError when a case of a rule does not come out as it says."""
    report = run_cases(policy)
    if report.failures:
        told = [
            f"rule `{failure.rule}`: case `{failure.case}` should"
            f" {'' if failure.expected else 'not '}fire; mend the rule or the case"
            for failure in report.failures[:CASES_TOLD_MAX]
        ]
        hidden = len(report.failures) - len(told)
        if hidden > 0:
            told.append(f"and {hidden} more")
        raise ConfigurationError("\n".join(told))


async def _found(services: Services, name: str) -> Revision:
    row = await policies.rollout(services.engine)
    digest = _by_name(row, name)
    if digest is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no {name} revision"))
    with _conflicts_told():
        found = await policies.get_revision(services.engine, digest)
    if found is None:
        raise Refused(
            Refuse(Reason.NOT_FOUND, f"there is no revision `{name}`; give at least six characters")
        )
    return found


def _by_name(row: Rollout, name: str) -> str | None:
    match name:
        case "active":
            return row.active_digest
        case "previous":
            return row.previous_digest
        case "candidate":
            return row.candidate_digest
        case _:
            return name


@contextmanager
def _conflicts_told() -> Iterator[None]:
    """A change that does not fit the rollout as it is becomes a refusal in the same words."""
    try:
        yield
    except RolloutConflict as error:
        raise Refused(Refuse(Reason.CONFLICT, str(error))) from error
