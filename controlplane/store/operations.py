"""What one screen of operators needs, asked of PostgreSQL in few queries that are bounded in time and rows."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.budget import Unit, Window
from controlplane.store.budget_limits import VIEW_SQL, BudgetView
from controlplane.store.session import transaction

ROWS_MAX: Final = 500

# The last word about each call that was refused within the window.
_REFUSED = """
    SELECT DISTINCT ON (request_id) request_id, reason, tenant_id, model, rule, decided_at
    FROM decisions
    WHERE verdict = 'refuse' AND decided_at > clock_timestamp() - make_interval(secs => :window_s)
    ORDER BY request_id, number DESC
"""

_REFUSALS = text(
    f"""
    WITH refused AS ({_REFUSED})
    SELECT reason, count(*) AS calls, count(DISTINCT tenant_id) AS tenants,
           mode() WITHIN GROUP (ORDER BY tenant_id) AS tenant_most,
           mode() WITHIN GROUP (ORDER BY model) AS model_most,
           mode() WITHIN GROUP (ORDER BY rule) AS rule_most,
           (array_agg(request_id ORDER BY decided_at DESC))[1] AS example,
           max(decided_at) AS last_at
    FROM refused GROUP BY reason ORDER BY calls DESC, reason
    """  # noqa: S608 - a constant of this program
)

# Calls that waited are opened and refused; those that were refused at once are not opened.
_ASKED = text(
    f"""
    WITH refused AS ({_REFUSED})
    SELECT (SELECT count(*) FROM requests
            WHERE opened_at > clock_timestamp() - make_interval(secs => :window_s))
           + (SELECT count(*) FROM refused
              WHERE NOT EXISTS (SELECT FROM requests WHERE requests.id = refused.request_id))
    """  # noqa: S608
)

_TENANTS = text(
    f"""
    WITH called AS (
        SELECT tenant_id, count(*) AS calls,
               count(*) FILTER (WHERE state = 'open') AS calls_open,
               count(*) FILTER (WHERE state = 'succeeded') AS calls_succeeded,
               count(*) FILTER (WHERE state IN ('failed', 'lost')) AS calls_failed,
               COALESCE(sum(settled_micro_usd), 0)::int8 AS settled_micro_usd,
               percentile_cont(0.5) WITHIN GROUP (ORDER BY ttft_ms) AS ttft_ms_p50
        FROM requests WHERE opened_at > clock_timestamp() - make_interval(secs => :window_s)
        GROUP BY tenant_id
    ), refused AS (
        SELECT tenant_id, count(*) AS calls_refused FROM ({_REFUSED}) AS last GROUP BY tenant_id
    ), working AS (
        SELECT tenant_id, count(*) AS workflows_running FROM workflows
        WHERE state = 'running' GROUP BY tenant_id
    )
    SELECT tenants.id, tenant_class, slo_class, is_disabled,
           COALESCE(calls, 0) AS calls, COALESCE(calls_open, 0) AS calls_open,
           COALESCE(calls_succeeded, 0) AS calls_succeeded,
           COALESCE(calls_failed, 0) AS calls_failed,
           COALESCE(calls_refused, 0) AS calls_refused,
           COALESCE(workflows_running, 0) AS workflows_running,
           COALESCE(settled_micro_usd, 0)::int8 AS settled_micro_usd, ttft_ms_p50,
           account."limit" AS limit_micro_usd, account.spent AS spent_micro_usd,
           account.reserved AS reserved_micro_usd
    FROM tenants JOIN ({VIEW_SQL}) AS account ON account.id = tenants.budget_id
         LEFT JOIN called ON called.tenant_id = tenants.id
         LEFT JOIN refused ON refused.tenant_id = tenants.id
         LEFT JOIN working ON working.tenant_id = tenants.id
    ORDER BY COALESCE(calls, 0) + COALESCE(calls_refused, 0) DESC, tenants.id
    LIMIT :limit
    """  # noqa: S608
)

_BUDGETS_NEAR = text(
    f"""
    SELECT * FROM ({VIEW_SQL}) AS account
    WHERE "limit" > 0 AND spent >= :ratio * "limit"
          AND NOT EXISTS (SELECT FROM workflows
                          WHERE 'workflow:' || workflows.id = account.id AND state <> 'running')
    ORDER BY spent::float8 / "limit" DESC, id LIMIT :limit
    """  # noqa: S608
)

# Engines of a call: those of its last decision that placed it.
_PLACED = """
    LATERAL (
        SELECT decode_engine_id, prefill_engine_id FROM decisions
        WHERE request_id = requests.id AND verdict = 'admit' ORDER BY number DESC LIMIT 1
    ) AS placed
"""

_CALLS = f"""
    SELECT requests.id, tenant_id, workflow_id, step, model, state, reason, is_stream,
           prompt_tokens, cached_tokens, completion_tokens, ttft_ms, tpot_ms, e2e_ms, queue_ms,
           settled_micro_usd, reserved_micro_usd, opened_at, ended_at,
           placed.decode_engine_id, placed.prefill_engine_id
    FROM requests LEFT JOIN {_PLACED} ON true
"""  # noqa: S608

# From the engine's latest decisions, which are in the order of their time.
_CALLS_ON = text(
    f"""
    SELECT * FROM ({_CALLS}) AS calls
    WHERE id IN (
        SELECT request_id FROM decisions
        WHERE (decode_engine_id = :engine_id OR prefill_engine_id = :engine_id)
              AND decided_at > clock_timestamp() - make_interval(secs => :window_s)
        ORDER BY decided_at DESC LIMIT :limit
    )
    ORDER BY opened_at DESC, id DESC LIMIT :limit
    """  # noqa: S608
)

_CALLS_OF_WORKFLOW = text(
    f"""{_CALLS} WHERE workflow_id = :workflow_id
        ORDER BY opened_at DESC, requests.id DESC LIMIT :limit"""
)

_CALLS_NEWEST = text(
    f"""{_CALLS}
        WHERE opened_at > clock_timestamp() - make_interval(secs => :window_s)
              AND (CAST(:tenant_id AS text) IS NULL OR tenant_id = :tenant_id)
              AND (CAST(:model AS text) IS NULL OR model = :model)
        ORDER BY opened_at DESC, requests.id DESC LIMIT :limit"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCount:
    """Calls refused for one reason in a window; whose they are most often, and the latest of them."""

    reason: str
    calls: int
    tenants: int
    tenant_most: str | None
    model_most: str | None
    rule_most: str | None
    example: str
    last_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantActivity:
    """What a tenant did in a window, and its account in dollars as it stands. Money in micro-dollars."""

    id: str
    tenant_class: str
    slo_class: str
    is_disabled: bool
    calls: int
    calls_open: int
    calls_succeeded: int
    calls_failed: int
    calls_refused: int
    workflows_running: int
    settled_micro_usd: int
    ttft_ms_p50: float | None
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One accepted call and the engines that it was last placed on, None before it was."""

    id: str
    tenant_id: str
    workflow_id: str | None
    step: int
    model: str
    state: str
    reason: str | None
    is_stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    queue_ms: float | None
    settled_micro_usd: int | None
    reserved_micro_usd: int
    opened_at: datetime
    ended_at: datetime | None
    decode_engine_id: str | None
    prefill_engine_id: str | None


async def refusals(engine: AsyncEngine, window_s: float) -> tuple[int, list[RefusalCount]]:
    """Calls that were asked for in the last `window_s` seconds, and the refused ones by reason, most first."""
    async with transaction(engine) as connection:
        asked = await connection.scalar(_ASKED, {"window_s": window_s})
        rows = await connection.execute(_REFUSALS, {"window_s": window_s})
        found = [RefusalCount(**row._mapping) for row in rows]  # noqa: SLF001 - the documented way
    return int(asked or 0), found


async def tenants(engine: AsyncEngine, window_s: float, limit: int) -> list[TenantActivity]:
    """Tenants, those that asked for most in the last `window_s` seconds first."""
    async with transaction(engine) as connection:
        rows = await connection.execute(_TENANTS, {"window_s": window_s, "limit": _bounded(limit)})
        return [TenantActivity(**row._mapping) for row in rows]  # noqa: SLF001


async def budgets_near_end(engine: AsyncEngine, ratio: float, limit: int) -> list[BudgetView]:
    """Accounts of which at least `ratio` is spent, the fullest first; those of ended workflows are left out."""
    async with transaction(engine) as connection:
        rows = await connection.execute(_BUDGETS_NEAR, {"ratio": ratio, "limit": _bounded(limit)})
        return [
            BudgetView(
                **{
                    **row._mapping,  # noqa: SLF001
                    "unit": Unit(row.unit),
                    "window": Window(row.window),
                }
            )
            for row in rows
        ]


async def calls(
    engine: AsyncEngine,
    *,
    window_s: float,
    limit: int,
    tenant_id: str | None = None,
    workflow_id: str | None = None,
    engine_id: str | None = None,
    model: str | None = None,
) -> list[CallRecord]:
    """Calls, newest first: of a workflow all, else those opened in the last `window_s` seconds.

    A workflow stands above an engine, and both above tenant and model.
    """
    values: dict[str, Any] = {"limit": _bounded(limit)}
    if workflow_id is not None:
        statement = _CALLS_OF_WORKFLOW
        values["workflow_id"] = workflow_id
    elif engine_id is not None:
        statement = _CALLS_ON
        values |= {"engine_id": engine_id, "window_s": window_s}
    else:
        statement = _CALLS_NEWEST
        values |= {"tenant_id": tenant_id, "model": model, "window_s": window_s}
    async with transaction(engine) as connection:
        rows = await connection.execute(statement, values)
        return [CallRecord(**row._mapping) for row in rows]  # noqa: SLF001


def _bounded(limit: int) -> int:
    return max(1, min(limit, ROWS_MAX))
