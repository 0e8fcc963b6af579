"""What operators read over all requests: decisions, and counts for one screen."""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store import tables
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.records import DecisionRecord
from controlplane.store.session import transaction


async def list_decisions(
    engine: AsyncEngine,
    *,
    verdict: str | None = None,
    reason: str | None = None,
    tenant: str | None = None,
    model: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[DecisionRecord]:
    """Newest first. Raises BadCursor."""
    statement = select(tables.decisions)
    if verdict is not None:
        statement = statement.where(tables.decisions.c.verdict == verdict)
    if reason is not None:
        statement = statement.where(tables.decisions.c.reason == reason)
    if tenant is not None:
        statement = statement.where(tables.decisions.c.tenant_id == tenant)
    if model is not None:
        statement = statement.where(tables.decisions.c.model == model)
    statement = newest_first(
        statement,
        tables.decisions.c.decided_at,
        tables.decisions.c.request_id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [DecisionRecord(**row._mapping) for row in rows]  # noqa: SLF001 - the documented way
    return page(items, [(item.decided_at, item.request_id) for item in items], limit)


async def count_running_workflows(engine: AsyncEngine) -> int:
    statement = select(func.count()).where(tables.workflows.c.state == "running")
    async with transaction(engine) as connection:
        return int(await connection.scalar(statement) or 0)
