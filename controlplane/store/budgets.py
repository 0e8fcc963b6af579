"""Accounts of tenants and workflows, and the slices that replicas lease from them.

INVARIANT I2 is the CHECK on `budgets`. Every writer locks the account first and its leases after,
so that the sum of an account's leases is its `reserved` at every commit.
"""

from dataclasses import dataclass

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId, TenantId, WorkflowId
from controlplane.store import tables
from controlplane.store.session import transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecord:
    """Micro-dollars. `reserved` is what replicas hold as slices."""

    id: str
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int


def tenant_budget_id(tenant_id: TenantId) -> str:
    return f"tenant:{tenant_id}"


def workflow_budget_id(workflow_id: WorkflowId) -> str:
    return f"workflow:{workflow_id}"


_LEASE = text(
    """
    WITH account AS (
        SELECT id, limit_micro_usd - spent_micro_usd - reserved_micro_usd AS free
        FROM budgets WHERE id = :budget_id FOR NO KEY UPDATE
    ), granted AS (
        SELECT account.id, LEAST(free, :wanted) AS amount
        FROM account, replicas
        WHERE free >= :at_least
              AND replicas.id = :replica_id AND replicas.ended_at IS NULL
    ), moved AS (
        UPDATE budgets SET reserved_micro_usd = reserved_micro_usd + granted.amount
        FROM granted WHERE budgets.id = granted.id
    )
    INSERT INTO budget_leases AS lease (budget_id, replica_id, amount_micro_usd)
    SELECT id, :replica_id, amount FROM granted
    ON CONFLICT (budget_id, replica_id)
        DO UPDATE SET amount_micro_usd = lease.amount_micro_usd + excluded.amount_micro_usd
    RETURNING (SELECT amount FROM granted)
    """
)


async def lease(
    engine: AsyncEngine, budget_id: str, replica_id: ReplicaId, at_least: int, wanted: int
) -> int:
    """Add micro-dollars of the account to the replica's slice: between `at_least` and `wanted`, or
    0.

    0 also for an unknown account, and for a replica that is not registered or has been reaped.
    """
    at_least = max(at_least, 1)
    async with transaction(engine) as connection:
        amount = await connection.scalar(
            _LEASE,
            {
                "budget_id": budget_id,
                "replica_id": replica_id,
                "at_least": at_least,
                "wanted": max(at_least, wanted),
            },
        )
    return int(amount or 0)


async def surrender(engine: AsyncEngine, budget_id: str, replica_id: ReplicaId, amount: int) -> int:
    """Give `amount` micro-dollars of the slice back, at most what the slice holds.

    Returns how much.
    """
    async with transaction(engine) as connection:
        account = (
            await connection.execute(
                select(tables.budgets.c.id)
                .where(tables.budgets.c.id == budget_id)
                .with_for_update(key_share=True)
            )
        ).one_or_none()
        if account is None:
            return 0
        # A statement after the lock sees every lease that was committed before it.
        returned = await connection.scalar(
            text(
                """
                WITH held AS (
                    SELECT LEAST(amount_micro_usd, :amount) AS amount FROM budget_leases
                    WHERE budget_id = :budget_id AND replica_id = :replica_id
                ), kept AS (
                    UPDATE budget_leases SET amount_micro_usd = amount_micro_usd - held.amount
                    FROM held WHERE budget_id = :budget_id AND replica_id = :replica_id
                )
                UPDATE budgets SET reserved_micro_usd = reserved_micro_usd - held.amount
                FROM held WHERE id = :budget_id
                RETURNING held.amount
                """
            ),
            {"budget_id": budget_id, "replica_id": replica_id, "amount": max(amount, 0)},
        )
    return int(returned or 0)


async def set_limit(engine: AsyncEngine, budget_id: str, limit_micro_usd: int) -> int | None:
    """Set the limit, never below what is spent and reserved.

    Returns the limit set; None if unknown.
    """
    async with transaction(engine) as connection:
        effective = await connection.scalar(
            text(
                """
                UPDATE budgets
                SET limit_micro_usd = GREATEST(:limit, spent_micro_usd + reserved_micro_usd)
                WHERE id = :budget_id RETURNING limit_micro_usd
                """
            ),
            {"budget_id": budget_id, "limit": limit_micro_usd},
        )
    return None if effective is None else int(effective)


async def read(engine: AsyncEngine, budget_id: str) -> BudgetRecord | None:
    async with transaction(engine) as connection:
        row = (
            await connection.execute(select(tables.budgets).where(tables.budgets.c.id == budget_id))
        ).one_or_none()
    return None if row is None else BudgetRecord(**row._mapping)  # noqa: SLF001
