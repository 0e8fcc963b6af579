"""Sums over all replicas for gauges: how workflows ended, what budgets stand at, what runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import TenantId, WorkflowId
from controlplane.store.session import transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWorkflow:
    """How a workflow ended. `steps_done` counts steps in which a call succeeded."""

    id: WorkflowId
    scope: str
    tenant_class: str
    slo_class: str
    state: str
    steps_expected: int
    steps_done: int
    spent_micro_usd: int
    created_at: datetime
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSum:
    """Accounts in micro-dollars: all of one scope, or the one of a tenant."""

    limit: int
    spent: int
    reserved: int


_ENDED = text(
    """
    SELECT w.id, w.scope, t.tenant_class, w.slo_class, w.state, w.steps_expected, w.created_at,
           w.ended_at,
           coalesce(s.steps_done, 0) AS steps_done, coalesce(s.spent_micro_usd, 0) AS spent_micro_usd
    FROM workflows w
    JOIN tenants t ON t.id = w.tenant_id
    LEFT JOIN LATERAL (
        SELECT count(*) FILTER (WHERE calls_succeeded > 0) AS steps_done,
               sum(spent_micro_usd)::bigint AS spent_micro_usd
        FROM workflow_steps WHERE workflow_id = w.id
    ) s ON true
    WHERE w.id = ANY(:ids) AND w.ended_at > clock_timestamp() - make_interval(secs => :within_s)
    """
)

_BUDGETS = text(
    """
    SELECT split_part(id, ':', 1) AS budget_scope, sum("limit")::bigint AS "limit",
           sum(spent)::bigint AS spent, sum(reserved)::bigint AS reserved
    FROM budgets
    WHERE unit = 'micro_usd' AND (id LIKE 'tenant:%' OR id LIKE 'key:%')
    GROUP BY 1
    """
)

_TENANTS = text(
    """
    SELECT t.id AS tenant, b."limit", b.spent, b.reserved
    FROM tenants t JOIN budgets b ON b.id = t.budget_id
    ORDER BY b.spent DESC, t.id LIMIT :named_max
    """
)

_RUNNING = text(
    "SELECT scope, count(*) AS running FROM workflows WHERE state = 'running' GROUP BY scope"
)


async def ended_workflows(
    engine: AsyncEngine, ids: Sequence[WorkflowId], within_s: float
) -> list[EndedWorkflow]:
    """Those of `ids` that ended in the last `within_s` seconds. Raises StateUnavailable."""
    async with transaction(engine) as connection:
        rows = await connection.execute(_ENDED, {"ids": list(ids), "within_s": within_s})
        return [EndedWorkflow(**row._mapping) for row in rows]  # noqa: SLF001 - the documented way


async def budget_sums(engine: AsyncEngine) -> dict[str, BudgetSum]:
    """Accounts of tenants and keys, added up by whose they are. Raises StateUnavailable."""
    async with transaction(engine) as connection:
        return {
            row.budget_scope: BudgetSum(limit=row.limit, spent=row.spent, reserved=row.reserved)
            for row in await connection.execute(_BUDGETS)
        }


async def tenant_budgets(engine: AsyncEngine, named_max: int) -> dict[TenantId, BudgetSum]:
    """The accounts of the `named_max` tenants that spent most. Raises StateUnavailable."""
    async with transaction(engine) as connection:
        return {
            TenantId(row.tenant): BudgetSum(limit=row.limit, spent=row.spent, reserved=row.reserved)
            for row in await connection.execute(_TENANTS, {"named_max": named_max})
        }


async def running_workflows(engine: AsyncEngine) -> dict[str, int]:
    """Workflows under way by their scope. Raises StateUnavailable."""
    async with transaction(engine) as connection:
        return {row.scope: row.running for row in await connection.execute(_RUNNING)}
