"""What the report of a time is made of: sums by time and tenant, by class and by reason, and what was wasted."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store.session import transaction

# Tenants with a line of their own; the others are one line together.
TENANTS_SHOWN_MAX: Final = 10
STATEMENT_MS_MAX: Final = 10_000

_SINCE = "clock_timestamp() - make_interval(secs => :since_s)"
_BIN = "date_bin(make_interval(secs => :bucket_s), {at}, TIMESTAMPTZ '2000-01-01')"

_SPEND = text(
    f"""
    WITH paid AS (
        SELECT {_BIN.format(at="settled_at")} AS at, tenant_id, count(*) AS calls,
               sum(amount_micro_usd)::int8 AS micro_usd
        FROM ledger WHERE settled_at > {_SINCE} GROUP BY 1, 2
    ), top AS (
        SELECT tenant_id FROM paid GROUP BY tenant_id
        ORDER BY sum(micro_usd) DESC, tenant_id LIMIT {TENANTS_SHOWN_MAX}
    )
    SELECT at, CASE WHEN tenant_id IN (SELECT tenant_id FROM top) THEN tenant_id END AS tenant_id,
           sum(calls)::int8 AS calls, sum(micro_usd)::int8 AS micro_usd
    FROM paid GROUP BY 1, 2 ORDER BY 1, 2 NULLS LAST
    """  # noqa: S608 - constants of this program
)

_WORKFLOWS = text(
    f"""
    SELECT {_BIN.format(at="ended_at")} AS at, state, count(*) AS workflows,
           COALESCE(sum(steps.micro_usd), 0)::int8 AS micro_usd
    FROM workflows LEFT JOIN LATERAL (
        SELECT sum(spent_micro_usd) AS micro_usd FROM workflow_steps WHERE workflow_id = workflows.id
    ) AS steps ON true
    WHERE ended_at > {_SINCE} GROUP BY 1, 2 ORDER BY 1, 2
    """  # noqa: S608
)

# A call attains its class's targets when it succeeded within all of them that it has a time for. Calls that
# their clients cancelled say nothing; the class is the workflow's, else the tenant's.
_ATTAINMENT = text(
    f"""
    SELECT {_BIN.format(at="opened_at")} AS at, slo_classes.name AS slo_class,
           count(*) AS calls,
           count(*) FILTER (
               WHERE requests.state = 'succeeded'
                     AND COALESCE(ttft_ms <= ttft_ms_max, true)
                     AND COALESCE(tpot_ms <= tpot_ms_max, true)
                     AND COALESCE(e2e_ms <= e2e_ms_max, true)
           ) AS calls_attained
    FROM requests JOIN tenants ON tenants.id = requests.tenant_id
         LEFT JOIN workflows ON workflows.id = requests.workflow_id
         JOIN slo_classes
              ON slo_classes.name = COALESCE(workflows.slo_class, tenants.slo_class)
    WHERE opened_at > {_SINCE}
          AND requests.state NOT IN ('open', 'cancelled')
    GROUP BY 1, 2 ORDER BY 1, 2
    """  # noqa: S608
)

_REFUSALS = text(
    f"""
    SELECT {_BIN.format(at="decided_at")} AS at, reason, count(DISTINCT request_id) AS calls
    FROM decisions WHERE verdict = 'refuse' AND decided_at > {_SINCE}
    GROUP BY 1, 2 ORDER BY 1, 2
    """  # noqa: S608
)

_TOTALS = text(
    f"""
    SELECT count(*) AS calls,
           count(*) FILTER (WHERE requests.state = 'succeeded') AS calls_succeeded,
           COALESCE(sum(settled_micro_usd), 0)::int8 AS settled_micro_usd,
           COALESCE(sum(settled_micro_usd) FILTER (
               WHERE CASE WHEN workflow_id IS NULL THEN requests.state <> 'succeeded'
                          ELSE workflows.state NOT IN ('running', 'succeeded') END
           ), 0)::int8 AS wasted_micro_usd,
           COALESCE(sum(prompt_tokens), 0)::int8 AS prompt_tokens,
           COALESCE(sum(cached_tokens), 0)::int8 AS cached_tokens,
           COALESCE(sum(completion_tokens), 0)::int8 AS completion_tokens
    FROM requests LEFT JOIN workflows ON workflows.id = requests.workflow_id
    WHERE opened_at > {_SINCE}
    """  # noqa: S608
)

_WASTERS = text(
    f"""
    SELECT * FROM (
        SELECT workflows.id, tenant_id, kind, scope, state, steps_expected, created_at, ended_at,
               sum(spent_micro_usd)::int8 AS micro_usd, sum(calls)::int8 AS calls
        FROM workflows JOIN workflow_steps ON workflow_id = workflows.id
        WHERE ended_at > {_SINCE} AND state NOT IN ('running', 'succeeded')
        GROUP BY workflows.id
    ) AS spent
    WHERE micro_usd > 0
          AND (CAST(:micro_usd AS int8) IS NULL OR (micro_usd, id) < (:micro_usd, :id))
    ORDER BY micro_usd DESC, id DESC LIMIT :limit
    """  # noqa: S608
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendPoint:
    """What one tenant was charged in a bucket of time that begins at `at`; None: all tenants without a line."""

    at: datetime
    tenant_id: str | None
    calls: int
    micro_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPoint:
    """Workflows that ended in one state, and what they cost in their whole life."""

    at: datetime
    state: str
    workflows: int
    micro_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentPoint:
    """Calls of one SLO class that began in the bucket and have ended, and those within all targets."""

    at: datetime
    slo_class: str
    calls: int
    calls_attained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalPoint:
    at: datetime
    reason: str
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Over calls that began within the time. `wasted` is what calls cost whose task did not succeed."""

    calls: int
    calls_succeeded: int
    settled_micro_usd: int
    wasted_micro_usd: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waster:
    """A workflow that ended without success, and what it cost."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    totals: Totals
    spend: tuple[SpendPoint, ...]
    workflows: tuple[WorkflowPoint, ...]
    attainment: tuple[AttainmentPoint, ...]
    refusals: tuple[RefusalPoint, ...]


async def read(engine: AsyncEngine, *, since_s: int, bucket_s: int) -> Report:
    """The last `since_s` seconds in buckets of `bucket_s`, in one snapshot. Raises StateUnavailable."""
    values: dict[str, Any] = {"since_s": since_s, "bucket_s": bucket_s}
    async with transaction(engine) as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        # It sums up days; who asks waits for it, and nobody asks often.
        await connection.execute(text(f"SET LOCAL statement_timeout = {STATEMENT_MS_MAX}"))
        total = (await connection.execute(_TOTALS, {"since_s": since_s})).one()
        spend = await connection.execute(_SPEND, values)
        workflows = await connection.execute(_WORKFLOWS, values)
        attainment = await connection.execute(_ATTAINMENT, values)
        refusals = await connection.execute(_REFUSALS, values)
        return Report(
            totals=Totals(**total._mapping),  # noqa: SLF001 - the documented way
            spend=tuple(SpendPoint(**row._mapping) for row in spend),  # noqa: SLF001
            workflows=tuple(WorkflowPoint(**row._mapping) for row in workflows),  # noqa: SLF001
            attainment=tuple(AttainmentPoint(**row._mapping) for row in attainment),  # noqa: SLF001
            refusals=tuple(RefusalPoint(**row._mapping) for row in refusals),  # noqa: SLF001
        )


async def wasters(
    engine: AsyncEngine, *, since_s: int, limit: int, after: tuple[int, str] | None
) -> list[Waster]:
    """Workflows that ended without success, the dearest first, from `after` (cost and id) on."""
    micro_usd, identifier = after or (None, "")
    values = {"since_s": since_s, "limit": limit, "micro_usd": micro_usd, "id": identifier}
    async with transaction(engine) as connection:
        rows = await connection.execute(_WASTERS, values)
        return [Waster(**row._mapping) for row in rows]  # noqa: SLF001
