"""What operators set and read of accounts: limits, windows, and what was spent in those that are over."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.admission.budget import Unit, Window
from controlplane.domain.errors import ConfigurationError
from controlplane.store import audit
from controlplane.store.audit import LOCAL, Change, Members
from controlplane.store.budgets import ARCHIVE_SQL, BEGINS_SQL, TOKENS_SUFFIX, unit_of
from controlplane.store.catalog import raise_revision
from controlplane.store.paging import LIMIT_MAX, BadCursor, Page
from controlplane.store.session import transaction

WINDOWS_SHOWN_MAX = 100

BudgetKind = Literal["tenant", "key", "workflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """An account as it stands at this instant, also when its window ended and nobody came by since.

    Amounts are in `unit`. `window_ends_at` is None for a limit that holds for ever.
    """

    id: str
    unit: Unit
    limit: int
    spent: int
    reserved: int
    window: Window
    window_started_at: datetime
    window_ends_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """One window that is over."""

    started_at: datetime
    ended_at: datetime
    limit: int
    spent: int


VIEW_SQL = f"""
    SELECT id, unit, "limit", reserved, "window", begins AS window_started_at,
           CASE WHEN begins > window_started_at THEN 0 ELSE spent END AS spent,
           CASE "window" WHEN 'total' THEN NULL
                         ELSE begins + ('1 ' || "window")::interval END AS window_ends_at
    FROM (SELECT *, {BEGINS_SQL} AS begins FROM budgets) AS account
"""  # noqa: S608 - a constant of this program

_OWNERS: dict[str, str] = {
    "tenant": "SELECT FROM tenants WHERE id = :owner",
    "key": "SELECT FROM api_keys WHERE id = :owner AND tenant_id IS NOT NULL",
    "workflow": "SELECT FROM workflows WHERE id = :owner",
}

# A change of the window ends the one that holds: what was spent in it is history.
_CHANGE = text(
    f"""
    WITH due AS (
        SELECT id, "limit", spent, window_started_at, clock_timestamp() AS begins
        FROM budgets WHERE id = :id AND "window" <> CAST(:window AS text) FOR NO KEY UPDATE
    ), archived AS ({ARCHIVE_SQL})
    UPDATE budgets SET
        "window" = :window, spent = 0,
        window_started_at = CASE CAST(:window AS text) WHEN 'total' THEN due.begins
                            ELSE date_trunc(CAST(:window AS text), due.begins, 'UTC') END
    FROM due WHERE budgets.id = due.id
    """  # noqa: S608 - a constant of this program
)


async def list_budgets(
    engine: AsyncEngine,
    *,
    kind: BudgetKind | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[BudgetView]:
    """By id. Raises BadCursor."""
    if cursor is not None and "\x00" in cursor:
        raise BadCursor("the cursor is not one of this list")
    limit = max(1, min(limit, LIMIT_MAX))
    statement = text(
        f"{VIEW_SQL} WHERE id > :after AND starts_with(id, :kind) ORDER BY id LIMIT :most"
    )
    values = {"after": cursor or "", "kind": f"{kind}:" if kind else "", "most": limit + 1}
    async with transaction(engine) as connection:
        found = [_view(row) for row in await connection.execute(statement, values)]
    items = found[:limit]
    return Page(tuple(items), items[-1].id if len(found) > limit else None)


async def get_budget(
    engine: AsyncEngine, budget_id: str
) -> tuple[BudgetView, Sequence[WindowRecord]] | None:
    """The account and its last windows that are over, newest first; None when there is none."""
    async with transaction(engine) as connection:
        view = await _read(connection, budget_id)
        if view is None:
            return None
        past = await connection.execute(
            text(
                'SELECT started_at, ended_at, "limit", spent FROM budget_windows'
                " WHERE budget_id = :id ORDER BY started_at DESC LIMIT :most"
            ),
            {"id": budget_id, "most": WINDOWS_SHOWN_MAX},
        )
        windows = [
            WindowRecord(
                started_at=row.started_at, ended_at=row.ended_at, limit=row.limit, spent=row.spent
            )
            for row in past
        ]
    return view, windows


async def set_budget(
    engine: AsyncEngine,
    budget_id: str,
    *,
    limit: int,
    window: Window | None = None,
    by: Change = LOCAL,
) -> BudgetView:
    """Set what may be spent in each window, never below what is spent and reserved in this one.

    The account is made when its owner has none of this unit. Without `window` that stays as it is.
    Raises ConfigurationError without an owner, PreconditionFailed.
    """
    kind, _, owner = budget_id.partition(":")
    unit = unit_of(budget_id)
    owner = owner.removesuffix(TOKENS_SUFFIX)
    async with transaction(engine) as connection:
        query = _OWNERS.get(kind)
        is_owned = query is not None and await connection.scalar(
            text(f"SELECT EXISTS ({query})"),
            {"owner": owner},
        )
        if not is_owned:
            raise ConfigurationError(
                f"the budget `{budget_id}` has no owner: write tenant:ID, key:ID or workflow:ID,"
                f" with {TOKENS_SUFFIX} at the end for tokens"
            )
        values = {
            "id": budget_id,
            "unit": str(unit),
            "limit": limit,
            "window": window and str(window),
        }
        before = await _lock(connection, budget_id)
        by.hold_to(f"budget:{budget_id}", before)
        made = await connection.execute(
            text(
                'INSERT INTO budgets (id, unit, "limit") VALUES (:id, :unit, :limit)'
                " ON CONFLICT (id) DO NOTHING"
            ),
            values,
        )
        if made.rowcount:
            # Replicas learn which accounts a key has together with the key.
            await raise_revision(connection)
        await connection.execute(_CHANGE, values)
        await connection.execute(
            text('UPDATE budgets SET "limit" = GREATEST(:limit, spent + reserved) WHERE id = :id'),
            values,
        )
        view = await _read(connection, budget_id)
        assert view is not None
        await audit.note(
            connection, by, "budget.set", f"budget:{budget_id}", before, _members(view)
        )
    return view


async def remove_budget(engine: AsyncEngine, budget_id: str, by: Change = LOCAL) -> bool:
    """Lift a limit: the account goes with its history. False when there is none.

    Raises ConfigurationError for one that its owner can not be without.
    """
    async with transaction(engine) as connection:
        is_needed = await connection.scalar(
            text(
                "SELECT EXISTS (SELECT FROM tenants WHERE budget_id = :id)"
                " OR EXISTS (SELECT FROM workflows WHERE budget_id = :id)"
            ),
            {"id": budget_id},
        )
        if is_needed:
            raise ConfigurationError(
                f"the budget `{budget_id}` can not be removed: give it a higher limit"
            )
        before = await _lock(connection, budget_id)
        if before is None:
            return False
        by.hold_to(f"budget:{budget_id}", before)
        await connection.execute(text("DELETE FROM budgets WHERE id = :id"), {"id": budget_id})
        await raise_revision(connection)
        await audit.note(connection, by, "budget.remove", f"budget:{budget_id}", before, None)
        return True


async def _lock(connection: AsyncConnection, budget_id: str) -> Members | None:
    """What operators set of an account, which nobody else changes until the transaction ends."""
    rows = await connection.execute(
        text('SELECT "limit", "window" FROM budgets WHERE id = :id FOR UPDATE'), {"id": budget_id}
    )
    row = rows.one_or_none()
    return None if row is None else {"limit": row.limit, "window": row.window}


def version_of_budget(view: BudgetView) -> str:
    """The version of what `set_budget` and `remove_budget` change."""
    return audit.version_of(_members(view))


def _members(view: BudgetView) -> Members:
    return {"limit": view.limit, "window": str(view.window)}


async def _read(connection: AsyncConnection, budget_id: str) -> BudgetView | None:
    rows = await connection.execute(text(f"{VIEW_SQL} WHERE id = :id"), {"id": budget_id})
    row = rows.one_or_none()
    return None if row is None else _view(row)


def _view(row: Row[*tuple[Any, ...]]) -> BudgetView:
    return BudgetView(
        id=row.id,
        unit=Unit(row.unit),
        limit=row.limit,
        spent=row.spent,
        reserved=row.reserved,
        window=Window(row.window),
        window_started_at=row.window_started_at,
        window_ends_at=row.window_ends_at,
    )
