"""What tenants ask of each model, read from the requests of all replicas; and what was learned of it.

A class of demand is (model, tenant class, scope): what shares a priority, a size and a deadline. A call
without a workflow is a workflow of one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, text
from sqlalchemy.dialects.postgresql import insert as insert_or_update
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName, SloClassName
from controlplane.store import tables
from controlplane.store.leadership import leads
from controlplane.store.session import transaction

# More classes than this are cut, those with the fewest calls first.
CLASSES_MAX = 500
RECENT_MAX = 2_000
SLOTS_MAX = 1_000_000
# Stands for the slot itself, whatever came in it.
NO_CLASS = ""
# Refusals for load count as demand: what was refused would have come.
REFUSED_FOR_LOAD = (
    "shed_overload",
    "queue_full",
    "deadline_unreachable",
    "no_capacity",
    "warming",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassKey:
    model: ModelName
    tenant_class: str
    scope: Scope

    @property
    def class_id(self) -> str:
        return f"{self.model}/{self.tenant_class}/{self.scope}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCounts:
    """What a class brought in an interval. Token sums are of `calls_ended` calls.

    `begun` counts workflows whose first call came, `refused` tries that were refused for load,
    `steps_expected`, `deadline_s` and `value_micro_usd` are means over the workflows seen; `gap_s` the
    mean pause between two steps. None: nothing was seen of it.
    """

    key: ClassKey
    slo_class: SloClassName
    calls: int
    calls_ended: int
    calls_open: int
    begun: int
    refused: float
    steps_expected: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    gap_s: float | None
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentWorkflowRow:
    """One workflow whose calls have ended or are under way. Tokens are means of its ended calls."""

    key: ClassKey
    slo_class: SloClassName
    arrival_s: float
    steps: int
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    gap_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    class_id: str
    started_at: datetime
    body: dict[str, Any]


# A call without a workflow counts as chat, as admission counts it. The first call of a workflow is
# the one that no earlier call of it precedes, whenever that came.
_SEEN = """
    SELECT r.model, t.tenant_class, COALESCE(w.scope, 'chat') AS scope,
           COALESCE(w.slo_class, t.slo_class) AS slo_class,
           r.id, r.workflow_id, r.step, r.state, r.prompt_tokens, r.cached_tokens,
           r.completion_tokens, r.opened_at, r.ended_at, w.steps_expected,
           EXTRACT(epoch FROM w.deadline_at - w.created_at) AS deadline_s,
           w.id IS NULL OR w.created_at >= :since AS is_begun,
           EXTRACT(epoch FROM r.opened_at - lag(r.ended_at) OVER (
               PARTITION BY r.workflow_id, r.model ORDER BY r.opened_at, r.id
           )) AS gap_s
    FROM requests AS r
    JOIN tenants AS t ON t.id = r.tenant_id
    LEFT JOIN workflows AS w ON w.id = r.workflow_id
    WHERE r.opened_at >= :since AND r.opened_at < :until
"""

_COUNTS = text(
    f"""
    WITH seen AS ({_SEEN})
    SELECT model, tenant_class, scope, min(slo_class) AS slo_class,
           count(*) AS calls,
           count(*) FILTER (WHERE state = 'succeeded') AS calls_ended,
           count(*) FILTER (WHERE state = 'open') AS calls_open,
           count(*) FILTER (WHERE workflow_id IS NULL)
               + count(DISTINCT workflow_id) FILTER (WHERE is_begun) AS begun,
           avg(COALESCE(steps_expected, 1))::float8 AS steps_expected,
           COALESCE(sum(prompt_tokens) FILTER (WHERE state = 'succeeded'), 0)::int8 AS prompt_tokens,
           COALESCE(sum(cached_tokens) FILTER (WHERE state = 'succeeded'), 0)::int8 AS cached_tokens,
           COALESCE(sum(completion_tokens) FILTER (WHERE state = 'succeeded'), 0)::int8
               AS completion_tokens,
           avg(gap_s) FILTER (WHERE workflow_id IS NOT NULL AND gap_s >= 0)::float8 AS gap_s,
           avg(deadline_s)::float8 AS deadline_s
    FROM seen
    GROUP BY model, tenant_class, scope
    ORDER BY calls DESC, model, tenant_class, scope
    LIMIT :classes_max
    """  # noqa: S608 - parts of this file
)

_REFUSED = text(
    """
    SELECT d.model, t.tenant_class, COALESCE(d.facts ->> 'workflow.scope', 'chat') AS scope,
           min(t.slo_class) AS slo_class, sum(d.sample_weight)::float8 AS refused
    FROM decisions AS d JOIN tenants AS t ON t.id = d.tenant_id
    WHERE d.decided_at >= :since AND d.decided_at < :until
      AND d.verdict = 'refuse' AND d.reason = ANY (:reasons) AND d.model IS NOT NULL
    GROUP BY d.model, t.tenant_class, COALESCE(d.facts ->> 'workflow.scope', 'chat')
    LIMIT :classes_max
    """
)

# Workflows that began, by class and minute.
_ARRIVALS = text(
    """
    WITH first AS (
        SELECT r.model, t.tenant_class, COALESCE(w.scope, 'chat') AS scope,
               COALESCE(r.workflow_id, r.id) AS workflow_id, min(r.opened_at) AS at
        FROM requests AS r
        JOIN tenants AS t ON t.id = r.tenant_id
        LEFT JOIN workflows AS w ON w.id = r.workflow_id
        WHERE r.opened_at >= :since AND r.opened_at < :until
          AND (w.id IS NULL OR w.created_at >= :since)
        GROUP BY r.model, t.tenant_class, COALESCE(w.scope, 'chat'), COALESCE(r.workflow_id, r.id)
    )
    SELECT model, tenant_class, scope,
           floor(EXTRACT(epoch FROM at - CAST(:since AS timestamptz)) / :bin_s)::int AS bin,
           count(*) AS begun
    FROM first
    GROUP BY model, tenant_class, scope, bin
    ORDER BY model, tenant_class, scope, bin
    """
)

_RECENT = text(
    f"""
    WITH seen AS ({_SEEN})
    SELECT model, tenant_class, scope, min(slo_class) AS slo_class,
           EXTRACT(epoch FROM min(opened_at))::float8 AS arrival_s,
           count(*) AS steps,
           avg(prompt_tokens)::float8 AS prompt_tokens,
           avg(cached_tokens)::float8 AS cached_tokens,
           avg(completion_tokens)::float8 AS completion_tokens,
           COALESCE(avg(gap_s) FILTER (WHERE workflow_id IS NOT NULL AND gap_s >= 0), 0)::float8
               AS gap_s,
           min(deadline_s)::float8 AS deadline_s
    FROM seen
    WHERE is_begun AND state = 'succeeded' AND completion_tokens > 0
    GROUP BY model, tenant_class, scope, COALESCE(workflow_id, id)
    ORDER BY min(opened_at) DESC
    LIMIT :rows_max
    """  # noqa: S608 - parts of this file
)


async def now(engine: AsyncEngine) -> datetime:
    """The database's clock, by which requests are stamped."""
    async with transaction(engine) as connection:
        instant: datetime = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
    return instant


async def counts(engine: AsyncEngine, since: datetime, until: datetime) -> list[ClassCounts]:
    """What each class brought in [since, until), the busiest first, refused work included."""
    interval = {"since": since, "until": until, "classes_max": CLASSES_MAX}
    async with transaction(engine) as connection:
        seen = (await connection.execute(_COUNTS, interval)).all()
        refused = (
            await connection.execute(_REFUSED, {**interval, "reasons": list(REFUSED_FOR_LOAD)})
        ).all()
    left = {_key(row): row for row in refused}
    found = []
    for row in seen:
        turned_away = left.pop(_key(row), None)
        found.append(
            ClassCounts(
                key=_key(row),
                slo_class=SloClassName(row.slo_class),
                calls=row.calls,
                calls_ended=row.calls_ended,
                calls_open=row.calls_open,
                begun=row.begun,
                refused=0.0 if turned_away is None else turned_away.refused,
                steps_expected=row.steps_expected,
                prompt_tokens=row.prompt_tokens,
                cached_tokens=row.cached_tokens,
                completion_tokens=row.completion_tokens,
                gap_s=row.gap_s,
                deadline_s=row.deadline_s,
            )
        )
    # What was refused altogether has nothing measured but that it came.
    found.extend(
        ClassCounts(
            key=key,
            slo_class=SloClassName(row.slo_class),
            calls=0,
            calls_ended=0,
            calls_open=0,
            begun=0,
            refused=row.refused,
            steps_expected=None,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            gap_s=None,
            deadline_s=None,
        )
        for key, row in left.items()
    )
    return found[:CLASSES_MAX]


async def arrivals(
    engine: AsyncEngine, since: datetime, until: datetime, bin_s: int
) -> dict[ClassKey, dict[int, int]]:
    """Workflows that began, by class and number of the bin of `bin_s` seconds from `since` on."""
    found: dict[ClassKey, dict[int, int]] = {}
    async with transaction(engine) as connection:
        rows = await connection.execute(_ARRIVALS, {"since": since, "until": until, "bin_s": bin_s})
        for row in rows:
            found.setdefault(_key(row), {})[row.bin] = row.begun
    return found


async def recent(
    engine: AsyncEngine, since: datetime, until: datetime, rows_max: int = RECENT_MAX
) -> list[RecentWorkflowRow]:
    """Workflows that began in [since, until) and have a finished call, newest first."""
    async with transaction(engine) as connection:
        rows = (
            await connection.execute(
                _RECENT, {"since": since, "until": until, "rows_max": rows_max}
            )
        ).all()
    return [
        RecentWorkflowRow(
            key=_key(row),
            slo_class=SloClassName(row.slo_class),
            arrival_s=row.arrival_s,
            steps=row.steps,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            completion_tokens=row.completion_tokens,
            gap_s=row.gap_s,
            deadline_s=row.deadline_s or 0.0,
        )
        for row in rows
    ]


# ---------------------------------------------------------------- what was learned


async def load_forecasts(engine: AsyncEngine) -> dict[str, dict[str, Any]]:
    """What the planner has learned of each class, by the class's id."""
    async with transaction(engine) as connection:
        rows = (await connection.execute(select(tables.forecasts))).all()
    return {row.class_id: row.state for row in rows}


async def save_forecasts(
    engine: AsyncEngine, epoch: int, states: Mapping[str, dict[str, Any]]
) -> bool:
    """Keep what was learned. False when another leader than that of `epoch` leads."""
    if not states:
        return True
    statement = insert_or_update(tables.forecasts)
    async with transaction(engine) as connection:
        if not await leads(connection, epoch):
            return False
        await connection.execute(
            statement.on_conflict_do_update(
                index_elements=["class_id"],
                set_={"state": statement.excluded.state, "updated_at": func.clock_timestamp()},
            ),
            [{"class_id": class_id, "state": states[class_id]} for class_id in sorted(states)],
        )
    return True


async def last_slot(engine: AsyncEngine) -> datetime | None:
    """The start of the latest slot that is written down."""
    async with transaction(engine) as connection:
        started: datetime | None = await connection.scalar(
            select(func.max(tables.demand_slots.c.started_at))
        )
    return started


async def add_slot(
    engine: AsyncEngine, epoch: int, started_at: datetime, bodies: Mapping[str, dict[str, Any]]
) -> bool:
    """Write down what a slot that is over brought, once. False: another leader leads, or it is there."""
    async with transaction(engine) as connection:
        if not await leads(connection, epoch):
            return False
        there = await connection.scalar(
            select(func.count()).where(tables.demand_slots.c.started_at == started_at)
        )
        if there:
            return False
        await connection.execute(
            insert(tables.demand_slots),
            [
                {"class_id": class_id, "started_at": started_at, "body": body}
                # A slot in which nothing came is a slot too.
                for class_id, body in sorted({NO_CLASS: {}, **bodies}.items())
            ],
        )
    return True


async def slots(engine: AsyncEngine, since: datetime) -> list[SlotRecord]:
    """Slots from `since` on, oldest first."""
    table = tables.demand_slots
    statement = (
        select(table)
        .where(table.c.started_at >= since, table.c.class_id != NO_CLASS)
        .order_by(table.c.started_at, table.c.class_id)
        .limit(SLOTS_MAX)
    )
    async with transaction(engine) as connection:
        rows: Sequence[Any] = (await connection.execute(statement)).all()
    return [
        SlotRecord(class_id=row.class_id, started_at=row.started_at, body=row.body) for row in rows
    ]


async def slot_starts(engine: AsyncEngine, since: datetime) -> list[datetime]:
    """The starts of the slots that are written down, oldest first, empty ones included."""
    table = tables.demand_slots
    statement = (
        select(table.c.started_at)
        .where(table.c.started_at >= since, table.c.class_id == NO_CLASS)
        .order_by(table.c.started_at)
    )
    async with transaction(engine) as connection:
        return list(await connection.scalars(statement))


async def forget_slots(engine: AsyncEngine, before: datetime) -> None:
    async with transaction(engine) as connection:
        await connection.execute(
            delete(tables.demand_slots).where(tables.demand_slots.c.started_at < before)
        )


def _key(row: Any) -> ClassKey:
    return ClassKey(
        model=ModelName(row.model), tenant_class=row.tenant_class, scope=Scope(row.scope)
    )
