"""What a report of the last hours or days is drawn from: points in time, totals, and what was wasted."""

from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.shapes import LIST_LIMIT_DEFAULT, Answer, Limit, Page
from controlplane.store import report

SINCE_S_MIN: Final = 60
SINCE_S_MAX: Final = 31 * 86_400
BUCKETS_MAX: Final = 200

router = APIRouter(prefix="/report", tags=["status"])

Since = Annotated[
    int, Query(ge=SINCE_S_MIN, le=SINCE_S_MAX, description="The last so many seconds.")
]


class TotalsAnswer(Answer):
    """Over calls that began within the time. Money in micro-dollars."""

    calls: int
    calls_succeeded: int
    settled_micro_usd: int
    wasted_micro_usd: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class SpendAnswer(Answer):
    """`tenant_id` is null for all tenants that have no line of their own."""

    at: datetime
    tenant_id: str | None
    calls: int
    micro_usd: int


class WorkflowsAnswer(Answer):
    """Workflows that ended in one state, and what they cost in their whole life."""

    at: datetime
    state: str
    workflows: int
    micro_usd: int


class AttainmentAnswer(Answer):
    """Calls of an SLO class that began in the bucket and have ended; `calls_attained` were within all targets."""

    at: datetime
    slo_class: str
    calls: int
    calls_attained: int


class RefusalPointAnswer(Answer):
    at: datetime
    reason: str
    calls: int


class ReportAnswer(Answer):
    """Points are of buckets of `bucket_s` seconds that begin at their `at`; empty buckets have none."""

    at: datetime
    since_s: int
    bucket_s: int
    totals: TotalsAnswer
    spend: list[SpendAnswer]
    workflows: list[WorkflowsAnswer]
    attainment: list[AttainmentAnswer]
    refusals: list[RefusalPointAnswer]


class WasterAnswer(Answer):
    """A workflow that ended without success, and what it cost in micro-dollars."""

    id: str
    tenant_id: str
    kind: str
    scope: str
    state: str
    steps_expected: int
    calls: int
    micro_usd: int
    created_at: datetime
    ended_at: datetime


@router.get("")
async def read_report(
    _: ViewerDep,
    services: ServicesDep,
    since_s: Since = 86_400,
    buckets: Annotated[
        int, Query(ge=1, le=BUCKETS_MAX, description="Parts that the time is cut into.")
    ] = 48,
) -> ReportAnswer:
    """Spend, ends of workflows, attainment of SLO classes and refusals over time, with totals."""
    bucket_s = max(1, since_s // buckets)
    found = await report.read(services.engine, since_s=since_s, bucket_s=bucket_s)
    return ReportAnswer(
        at=datetime.now(UTC),
        since_s=since_s,
        bucket_s=bucket_s,
        totals=TotalsAnswer.model_validate(found.totals),
        spend=[SpendAnswer.model_validate(point) for point in found.spend],
        workflows=[WorkflowsAnswer.model_validate(point) for point in found.workflows],
        attainment=[AttainmentAnswer.model_validate(point) for point in found.attainment],
        refusals=[RefusalPointAnswer.model_validate(point) for point in found.refusals],
    )


@router.get("/wasters")
async def list_wasters(
    _: ViewerDep,
    services: ServicesDep,
    since_s: Since = 86_400,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Annotated[
        str | None,
        Query(
            pattern=r"^[0-9]{1,18}:[\x21-\x7e]{1,63}$",
            description="`next_cursor` of the previous page.",
        ),
    ] = None,
) -> Page[WasterAnswer]:
    """List workflows that ended without success, the dearest first."""
    after = None
    if cursor is not None:
        micro_usd, identifier = cursor.split(":", 1)
        after = (int(micro_usd), identifier)
    found = await report.wasters(services.engine, since_s=since_s, limit=limit + 1, after=after)
    shown = found[:limit]
    more = f"{shown[-1].micro_usd}:{shown[-1].id}" if len(found) > limit else None
    return Page(data=[WasterAnswer.model_validate(one) for one in shown], next_cursor=more)
