"""Accounts of tenants, keys and workflows, and the slices that replicas lease from them.

INVARIANT I2 is the CHECK on `budgets`. Every writer locks the account first and its leases after,
so that the sum of an account's leases is its `reserved` at every commit. A window that is over ends
with the first lease after it, or when the leader comes by: what was spent is kept as history and
the account counts from zero, while slices stay with who holds them.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.admission.budget import Unit, Window
from controlplane.domain.ids import KeyId, ReplicaId, TenantId, WorkflowId
from controlplane.store import audit, tables
from controlplane.store.audit import LOCAL, Change
from controlplane.store.replicas import FIRST_GENERATION
from controlplane.store.session import transaction

WINDOWS_PER_PASS_MAX = 1_000
TOKENS_SUFFIX = ":tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecord:
    """Amounts are in `unit`. `reserved` is what replicas hold as slices.

    `spent` counts from `window_started_at`; what was spent in a window that ended since is not in
    it.
    """

    id: str
    unit: Unit
    limit: int
    spent: int
    reserved: int
    window: Window
    window_started_at: datetime


def tenant_budget_id(tenant_id: TenantId, unit: Unit = Unit.MICRO_USD) -> str:
    return _budget_id("tenant", tenant_id, unit)


def key_budget_id(key_id: KeyId, unit: Unit = Unit.MICRO_USD) -> str:
    return _budget_id("key", key_id, unit)


def workflow_budget_id(workflow_id: WorkflowId, unit: Unit = Unit.MICRO_USD) -> str:
    return _budget_id("workflow", workflow_id, unit)


def unit_of(budget_id: str) -> Unit:
    """What an account of this id counts."""
    return Unit.TOKENS if budget_id.endswith(TOKENS_SUFFIX) else Unit.MICRO_USD


def _budget_id(kind: str, owner: str, unit: Unit) -> str:
    return f"{kind}:{owner}" if unit is Unit.MICRO_USD else f"{kind}:{owner}{TOKENS_SUFFIX}"


# Where the window that holds now began. CASE keeps `total` away from date_trunc, which does not know
# it.
BEGINS_SQL = """
    CASE "window" WHEN 'total' THEN window_started_at
                  ELSE date_trunc("window", clock_timestamp(), 'UTC') END
"""

# Spent money of a window that is over becomes history, once: the account is locked.
ARCHIVE_SQL = """
    INSERT INTO budget_windows AS past (budget_id, started_at, ended_at, "limit", spent)
    SELECT id, window_started_at, begins, "limit", spent FROM due WHERE spent > 0
    ON CONFLICT (budget_id, started_at)
        DO UPDATE SET spent = past.spent + excluded.spent, ended_at = excluded.ended_at
"""

# What is far from its limit is leased in whole slices. Near it a lease takes no more than a quarter
# of what is left, or what is needed: the last of the money must not lie where nobody asks for it.
_LEASE = text(
    f"""
    WITH account AS (
        SELECT id, "limit", spent, reserved, window_started_at, {BEGINS_SQL} AS begins
        FROM budgets WHERE id = :budget_id FOR NO KEY UPDATE
    ), due AS (
        SELECT * FROM account WHERE begins > window_started_at
    ), archived AS ({ARCHIVE_SQL}
    ), left_over AS (
        SELECT id, begins, begins > window_started_at AS is_due,
               "limit" - reserved - CASE WHEN begins > window_started_at THEN 0 ELSE spent END
                   AS free
        FROM account
    ), granted AS (
        SELECT left_over.id, LEAST(:wanted, GREATEST(:at_least, free / 4)) AS amount
        FROM left_over, replicas
        WHERE free >= :at_least
              AND replicas.id = :replica_id AND replicas.ended_at IS NULL
              AND replicas.generation = :generation
    ), moved AS (
        UPDATE budgets SET
            reserved = reserved + COALESCE((SELECT amount FROM granted), 0),
            spent = CASE WHEN left_over.is_due THEN 0 ELSE spent END,
            window_started_at = left_over.begins
        FROM left_over
        WHERE budgets.id = left_over.id
              AND (left_over.is_due OR EXISTS (SELECT FROM granted))
    )
    INSERT INTO budget_leases AS lease (budget_id, replica_id, generation, amount)
    SELECT id, :replica_id, :generation, amount FROM granted
    ON CONFLICT (budget_id, replica_id, generation) DO UPDATE SET amount = lease.amount + excluded.amount
    RETURNING (SELECT amount FROM granted)
    """  # noqa: S608 - parts of it stand above
)

_ROLL_OVER = text(
    f"""
    WITH due AS (
        SELECT id, "limit", spent, window_started_at, {BEGINS_SQL} AS begins
        FROM budgets WHERE "window" <> 'total' AND window_started_at < {BEGINS_SQL}
        ORDER BY id LIMIT :most FOR NO KEY UPDATE SKIP LOCKED
    ), archived AS ({ARCHIVE_SQL})
    UPDATE budgets SET spent = 0, window_started_at = due.begins
    FROM due WHERE budgets.id = due.id
    """  # noqa: S608 - parts of it stand above
)


async def lease(
    engine: AsyncEngine,
    budget_id: str,
    replica_id: ReplicaId,
    at_least: int,
    wanted: int,
    generation: int = FIRST_GENERATION,
) -> int:
    """Add some of the account to the slice of a replica's life: between `at_least` and `wanted`, or 0.

    0 also for an unknown account, and for a replica that is not registered, has been reaped, or is in
    another life by now.
    """
    at_least = max(at_least, 1)
    async with transaction(engine) as connection:
        amount = await connection.scalar(
            _LEASE,
            {
                "budget_id": budget_id,
                "replica_id": replica_id,
                "generation": generation,
                "at_least": at_least,
                "wanted": max(at_least, wanted),
            },
        )
    return int(amount or 0)


async def surrender(
    engine: AsyncEngine,
    budget_id: str,
    replica_id: ReplicaId,
    amount: int,
    generation: int = FIRST_GENERATION,
) -> int:
    """Give `amount` of the slice of this life back, at most what the slice holds.

    Returns how much.
    """
    async with transaction(engine) as connection:
        if await _lock(connection, budget_id) is None:
            return 0
        # A statement after the lock sees every lease that was committed before it.
        returned = await connection.scalar(
            text(
                """
                WITH held AS (
                    SELECT LEAST(amount, :amount) AS amount FROM budget_leases
                    WHERE budget_id = :budget_id AND replica_id = :replica_id
                          AND generation = :generation
                ), kept AS (
                    UPDATE budget_leases SET amount = budget_leases.amount - held.amount
                    FROM held WHERE budget_id = :budget_id AND replica_id = :replica_id
                          AND generation = :generation
                )
                UPDATE budgets SET reserved = reserved - held.amount
                FROM held WHERE id = :budget_id
                RETURNING held.amount
                """
            ),
            {
                "budget_id": budget_id,
                "replica_id": replica_id,
                "generation": generation,
                "amount": max(amount, 0),
            },
        )
    return int(returned or 0)


async def roll_over(engine: AsyncEngine) -> int:
    """End the windows that are over, a bounded number a time; how many. Safe to run by several."""
    async with transaction(engine) as connection:
        ended = await connection.execute(_ROLL_OVER, {"most": WINDOWS_PER_PASS_MAX})
        return ended.rowcount


async def set_limit(
    engine: AsyncEngine, budget_id: str, limit: int, by: Change = LOCAL
) -> int | None:
    """Set the limit, never below what is spent and reserved.

    Returns the limit set; None if unknown.
    """
    async with transaction(engine) as connection:
        before = await _lock(connection, budget_id)
        if before is None:
            return None
        effective = await connection.scalar(
            text(
                """
                UPDATE budgets SET "limit" = GREATEST(:limit, spent + reserved)
                WHERE id = :budget_id RETURNING "limit"
                """
            ),
            {"budget_id": budget_id, "limit": limit},
        )
        await audit.note(
            connection,
            by,
            "budget.set",
            f"budget:{budget_id}",
            {"limit": before.limit},
            {"limit": int(effective)},
        )
    return int(effective)


async def read(engine: AsyncEngine, budget_id: str) -> BudgetRecord | None:
    async with transaction(engine) as connection:
        row = (
            await connection.execute(select(tables.budgets).where(tables.budgets.c.id == budget_id))
        ).one_or_none()
    return None if row is None else _record(row)


async def _lock(connection: AsyncConnection, budget_id: str) -> BudgetRecord | None:
    statement = select(tables.budgets).where(tables.budgets.c.id == budget_id)
    row = (await connection.execute(statement.with_for_update(key_share=True))).one_or_none()
    return None if row is None else _record(row)


def _record(row: Row[tuple[object, ...]]) -> BudgetRecord:
    return BudgetRecord(
        id=row.id,
        unit=Unit(row.unit),
        limit=row.limit,
        spent=row.spent,
        reserved=row.reserved,
        window=Window(row.window),
        window_started_at=row.window_started_at,
    )
