"""What operators and the demo read: requests with their attempts and decisions, money, and the
invariants by SQL.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.ids import KeyId, ModelName, ReplicaId, RequestId, TenantId, WorkflowId
from controlplane.store import tables
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.session import transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """`state` is open or one of domain/outcome.py; what a request used is known once it ended."""

    id: RequestId
    tenant_id: TenantId
    key_id: KeyId
    replica_id: ReplicaId
    workflow_id: WorkflowId | None
    step: int
    model: ModelName
    endpoint: str
    is_stream: bool
    state: str
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    is_usage_estimated: bool
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    queue_ms: float | None
    reserved_micro_usd: int
    settled_micro_usd: int | None
    opened_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    number: int
    leg: str
    engine_id: str
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """`record` is the full record, kept of refusals and of a sample.

    `facts` are what the rules of the policy read; `sample_weight` decisions are counted by this one.
    """

    request_id: str
    number: int
    replica_id: str
    verdict: str
    reason: str | None
    decode_engine_id: str | None
    prefill_engine_id: str | None
    cost_micro_usd: float | None
    ttft_ms_predicted: float | None
    cached_tokens_predicted: int | None
    policy_revision: str
    decided_at: datetime
    record: dict[str, Any] | None
    tenant_id: str | None = None
    model: str | None = None
    rule: str | None = None
    facts: dict[str, Any] | None = None
    sample_weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetail:
    request: RequestRecord
    attempts: tuple[AttemptRecord, ...]
    decisions: tuple[DecisionRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpend:
    """Settled money of one tenant, and its account."""

    tenant_id: TenantId
    requests: int
    settled_micro_usd: int
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """None when there was nothing to measure. Milliseconds."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """Aggregates since an instant. `wasted` is what calls of workflows cost that did not succeed.

    `refusals` counts decisions to refuse by reason, `requests_open` those without an end so far.
    """

    workflows: dict[str, int]
    requests: dict[str, int]
    requests_open: int
    settled_micro_usd: int
    wasted_micro_usd: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    refusals: dict[str, int]

    @property
    def cached_token_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def micro_usd_per_success(self) -> float | None:
        """Cost per successful task as tenants pay it; None when nothing succeeded."""
        succeeded = self.workflows.get("succeeded", 0)
        return self.settled_micro_usd / succeeded if succeeded else None


async def list_requests(
    engine: AsyncEngine,
    *,
    tenant: TenantId | None = None,
    state: str | None = None,
    workflow: WorkflowId | None = None,
    model: str | None = None,
    reason: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[RequestRecord]:
    """Newest first. Raises BadCursor."""
    statement = select(tables.requests)
    for column, wanted in (
        (tables.requests.c.tenant_id, tenant),
        (tables.requests.c.state, state),
        (tables.requests.c.workflow_id, workflow),
        (tables.requests.c.model, model),
        (tables.requests.c.reason, reason),
    ):
        if wanted is not None:
            statement = statement.where(column == wanted)
    statement = newest_first(
        statement,
        tables.requests.c.opened_at,
        tables.requests.c.id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [RequestRecord(**_members(row)) for row in rows]
    return page(items, [(item.opened_at, item.id) for item in items], limit)


async def get_request(engine: AsyncEngine, request_id: RequestId) -> RequestDetail | None:
    """A request with its attempts and decisions; None when it was never accepted (see
    `get_decisions`).
    """
    async with transaction(engine) as connection:
        row = (
            await connection.execute(
                select(tables.requests).where(tables.requests.c.id == request_id)
            )
        ).one_or_none()
        if row is None:
            return None
        attempts = await connection.execute(
            select(
                tables.attempts.c.number,
                tables.attempts.c.leg,
                tables.attempts.c.engine_id,
                tables.attempts.c.outcome,
                tables.attempts.c.detail,
            )
            .where(tables.attempts.c.request_id == request_id)
            .order_by(tables.attempts.c.number, tables.attempts.c.leg != "prefill")
        )
        return RequestDetail(
            request=RequestRecord(**_members(row)),
            attempts=tuple(AttemptRecord(**_members(attempt)) for attempt in attempts),
            decisions=await _decisions(connection, request_id),
        )


async def get_decisions(engine: AsyncEngine, request_id: str) -> tuple[DecisionRecord, ...]:
    """Decisions of one request in their order, also of a refused one."""
    async with transaction(engine) as connection:
        return await _decisions(connection, request_id)


async def spend_by_tenant(engine: AsyncEngine) -> list[TenantSpend]:
    """By tenant id."""
    statement = text(
        """
        SELECT tenants.id AS tenant_id,
               count(ledger.request_id) + COALESCE(max(folded.calls), 0) AS requests,
               (COALESCE(sum(ledger.amount_micro_usd), 0)
                + COALESCE(max(folded.amount), 0))::int8 AS settled_micro_usd,
               budgets."limit" AS limit_micro_usd, budgets.spent AS spent_micro_usd,
               budgets.reserved AS reserved_micro_usd
        FROM tenants JOIN budgets ON budgets.id = tenants.budget_id
             LEFT JOIN ledger ON ledger.tenant_id = tenants.id
             LEFT JOIN ledger_folded AS folded
                  ON folded.kind = 'tenant' AND folded.id = tenants.id
        GROUP BY tenants.id, budgets.id ORDER BY tenants.id
        """
    )
    async with transaction(engine) as connection:
        return [TenantSpend(**_members(row)) for row in await connection.execute(statement)]


# What accounts have ever spent, and what the ledger says, with what was folded away, that they were charged.
_SUMS = """
    WITH ever_spent AS (
        SELECT id, unit, spent + COALESCE((SELECT sum(spent) FROM budget_windows
                                     WHERE budget_id = budgets.id), 0) AS amount
        FROM budgets
    ), settled AS (
        SELECT 'tenant' AS kind, tenant_id AS id, amount_micro_usd AS amount FROM ledger
        UNION ALL SELECT 'workflow', workflow_id, amount_micro_usd FROM ledger
        UNION ALL SELECT 'account', charge.key, charge.value::int8
                  FROM ledger, jsonb_each_text(ledger.charges) AS charge
        UNION ALL SELECT kind, id, amount FROM ledger_folded
    ), charged AS (
        SELECT kind, id, sum(amount) AS amount FROM settled GROUP BY kind, id
    )
"""

# Each query finds one violation. I1 holds at rest: an open request is an accepted one without an
# end.
_VIOLATIONS = {
    "I1": (
        "SELECT FROM requests WHERE state = 'open'",
        """SELECT FROM requests LEFT JOIN ledger ON ledger.request_id = requests.id
           WHERE state <> 'open' AND ledger.amount_micro_usd IS DISTINCT FROM settled_micro_usd""",
        """SELECT FROM ledger JOIN requests ON requests.id = ledger.request_id
           WHERE requests.state = 'open'""",
    ),
    "I2": (
        'SELECT FROM budgets WHERE spent + reserved > "limit"',
        """SELECT FROM budgets WHERE reserved <> (
               SELECT COALESCE(sum(amount), 0) FROM budget_leases WHERE budget_id = budgets.id)""",
        """SELECT FROM tenants JOIN ever_spent ON ever_spent.id = tenants.budget_id
                LEFT JOIN charged ON charged.kind = 'tenant' AND charged.id = tenants.id
           WHERE ever_spent.amount <> COALESCE(charged.amount, 0)""",
        """SELECT FROM workflows JOIN ever_spent ON ever_spent.id = workflows.budget_id
                LEFT JOIN charged ON charged.kind = 'workflow' AND charged.id = workflows.id
           WHERE ever_spent.amount <> COALESCE(charged.amount, 0)""",
        # Accounts that may be younger than what their owner spent, by what each call was charged.
        """SELECT FROM ever_spent
                LEFT JOIN charged ON charged.kind = 'account' AND charged.id = ever_spent.id
           WHERE (unit = 'tokens' OR starts_with(ever_spent.id, 'key:'))
                 AND ever_spent.amount <> COALESCE(charged.amount, 0)""",
        """SELECT FROM workflows
                LEFT JOIN charged ON charged.kind = 'workflow' AND charged.id = workflows.id
           WHERE (SELECT COALESCE(sum(spent_micro_usd), 0) FROM workflow_steps
                  WHERE workflow_id = workflows.id) <> COALESCE(charged.amount, 0)""",
    ),
}


async def invariants(engine: AsyncEngine) -> dict[str, bool]:
    """Whether I1 (at rest) and I2 hold over everything that is stored, in one snapshot."""
    async with transaction(engine) as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        found = {}
        for name, queries in _VIOLATIONS.items():
            violated = [
                await connection.scalar(text(f"{_SUMS} SELECT EXISTS ({query})"))
                for query in queries
            ]
            found[name] = not any(violated)
        return found


async def demo_summary(engine: AsyncEngine, since: datetime) -> DemoSummary:
    """Aggregates over workflows, requests and decisions that began at `since` or later."""
    values = {"since": since}
    async with transaction(engine) as connection:
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        workflows = await connection.execute(
            text("SELECT state, count(*) FROM workflows WHERE created_at >= :since GROUP BY state"),
            values,
        )
        requests = await connection.execute(
            text("SELECT state, count(*) FROM requests WHERE opened_at >= :since GROUP BY state"),
            values,
        )
        refusals = await connection.execute(
            text(
                "SELECT reason, count(*) FROM decisions"
                " WHERE decided_at >= :since AND verdict = 'refuse' GROUP BY reason"
            ),
            values,
        )
        totals = (
            await connection.execute(
                text(
                    """
                    SELECT
                        COALESCE(sum(settled_micro_usd), 0)::int8 AS settled,
                        COALESCE(sum(settled_micro_usd) FILTER (
                            WHERE workflows.state IS DISTINCT FROM 'succeeded'
                                  AND (workflow_id IS NOT NULL OR requests.state <> 'succeeded')
                        ), 0)::int8 AS wasted,
                        COALESCE(sum(prompt_tokens), 0)::int8 AS prompt,
                        COALESCE(sum(cached_tokens), 0)::int8 AS cached,
                        COALESCE(sum(completion_tokens), 0)::int8 AS completion,
                        percentile_cont(ARRAY[0.5, 0.9, 0.99])
                            WITHIN GROUP (ORDER BY ttft_ms) AS ttft,
                        percentile_cont(ARRAY[0.5, 0.9, 0.99])
                            WITHIN GROUP (ORDER BY tpot_ms) AS tpot
                    FROM requests LEFT JOIN workflows ON workflows.id = requests.workflow_id
                    WHERE opened_at >= :since
                    """
                ),
                values,
            )
        ).one()
    by_state = {state: int(count) for state, count in requests}
    return DemoSummary(
        workflows={state: int(count) for state, count in workflows},
        requests=by_state,
        requests_open=by_state.get("open", 0),
        settled_micro_usd=totals.settled,
        wasted_micro_usd=totals.wasted,
        ttft_ms=_percentiles(totals.ttft),
        tpot_ms=_percentiles(totals.tpot),
        prompt_tokens=totals.prompt,
        cached_tokens=totals.cached,
        completion_tokens=totals.completion,
        refusals={reason or "unknown": int(count) for reason, count in refusals},
    )


async def _decisions(connection: AsyncConnection, request_id: str) -> tuple[DecisionRecord, ...]:
    rows = await connection.execute(
        select(tables.decisions)
        .where(tables.decisions.c.request_id == request_id)
        .order_by(tables.decisions.c.number)
    )
    return tuple(DecisionRecord(**_members(row)) for row in rows)


def _percentiles(values: list[float] | None) -> Percentiles:
    if values is None:
        return Percentiles(p50=None, p90=None, p99=None)
    return Percentiles(p50=values[0], p90=values[1], p99=values[2])


def _members(row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    return dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's documented way to a mapping
