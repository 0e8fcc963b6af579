"""Which models workflows were given, and what became of them: counted once, merged over replicas, fading."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.ids import ModelName, TenantId, WorkflowId
from controlplane.scheduler.model_choice import HALF_LIFE_S, Evidence, Failed, Task, Why, failed_of
from controlplane.store import tables
from controlplane.store.session import transaction

COUNTED_PER_PASS_MAX: Final = 500
# What a workflow's calls cost is written a moment after they end.
SETTLE_S: Final = 2.0
EVIDENCE_READ_MAX: Final = 100_000
# Newest tasks that a saving is worked out from.
TASKS_READ_MAX: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """The model of a workflow. `record` is what it was chosen by, in members of JSON.

    `task_id` is the first workflow of the task, None when it is this one. `failed` are the models that
    failed before.
    """

    task_id: WorkflowId | None
    asked_model: str
    model: ModelName
    default_model: ModelName
    failed: Failed
    why: Why
    propensity: float
    default_propensity: float
    can_climb: bool
    policy_revision: str
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRecord:
    """A choice as it is remembered. `outcome` and `spent_micro_usd` are None until it is counted."""

    workflow_id: WorkflowId
    task_id: WorkflowId
    tenant: TenantId
    asked_model: str
    model: ModelName
    default_model: ModelName
    failed: Failed
    why: Why
    propensity: float
    default_propensity: float
    policy_revision: str
    record: Mapping[str, Any]
    chosen_at: datetime
    outcome: str | None
    spent_micro_usd: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRow:
    """Evidence as it stood at `updated_at`."""

    tenant: TenantId
    asked_model: str
    model: ModelName
    failed: Failed
    evidence: Evidence
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Counted:
    """How many workflows of a model ended so, in one pass."""

    asked_model: str
    model: str
    outcome: str
    workflows: int


async def insert_choice(
    connection: AsyncConnection, workflow: WorkflowId, tenant: TenantId, choice: ChoiceRow
) -> None:
    """Within the transaction that creates the workflow, or that gives it its model."""
    await connection.execute(
        insert(tables.model_choices).values(
            workflow_id=workflow,
            task_id=choice.task_id or workflow,
            tenant_id=tenant,
            asked_model=choice.asked_model,
            model=choice.model,
            default_model=choice.default_model,
            failed_before=_joined(choice.failed),
            why=str(choice.why),
            propensity=min(1.0, choice.propensity),
            default_propensity=min(1.0, choice.default_propensity),
            can_climb=choice.can_climb,
            policy_revision=choice.policy_revision,
            record=dict(choice.record),
        )
    )


async def give_model(
    engine: AsyncEngine, workflow: WorkflowId, tenant: TenantId, choice: ChoiceRow
) -> tuple[str, ModelName] | None:
    """Give a workflow without a model this one, unless another call was first.

    Returns what was asked for and the model that the workflow has now; None: it does not exist.
    """
    workflows = tables.workflows
    async with transaction(engine) as connection:
        given = await connection.execute(
            update(workflows)
            .where(
                workflows.c.id == workflow,
                workflows.c.tenant_id == tenant,
                workflows.c.model.is_(None),
            )
            .values(asked_model=choice.asked_model, model=choice.model)
        )
        if given.rowcount:
            await insert_choice(connection, workflow, tenant, choice)
            return choice.asked_model, choice.model
        row = (
            await connection.execute(
                select(workflows.c.asked_model, workflows.c.model).where(
                    workflows.c.id == workflow, workflows.c.tenant_id == tenant
                )
            )
        ).one_or_none()
    return None if row is None else (row.asked_model, row.model)


async def get(
    engine: AsyncEngine, workflow: WorkflowId, tenant: TenantId | None
) -> ChoiceRecord | None:
    """The choice of a workflow that belongs to `tenant` (None: whoever's)."""
    table = tables.model_choices
    statement = select(table).where(table.c.workflow_id == workflow)
    if tenant is not None:
        statement = statement.where(table.c.tenant_id == tenant)
    async with transaction(engine) as connection:
        row = (await connection.execute(statement)).one_or_none()
    return None if row is None else _choice(row)


_COUNT = text(
    """
    WITH ended AS (
        SELECT choice.workflow_id, choice.tenant_id, choice.asked_model, choice.model,
               choice.failed_before, choice.can_climb, workflows.state,
               GREATEST(0, extract(epoch FROM workflows.ended_at - workflows.created_at))
                   AS seconds,
               COALESCE(
                   (SELECT sum(spent_micro_usd) FROM workflow_steps
                    WHERE workflow_steps.workflow_id = choice.workflow_id), 0
               )::bigint AS spent
        FROM model_choices AS choice JOIN workflows ON workflows.id = choice.workflow_id
        WHERE choice.counted_at IS NULL AND workflows.state <> 'running'
              AND workflows.ended_at <= now() - make_interval(secs => :settle_s)
        ORDER BY choice.workflow_id LIMIT :most
        FOR NO KEY UPDATE OF choice SKIP LOCKED
    ), counted AS (
        UPDATE model_choices SET
            counted_at = now(), outcome = ended.state, spent_micro_usd = ended.spent
        FROM ended WHERE model_choices.workflow_id = ended.workflow_id
    ), sums AS (
        SELECT tenant_id, asked_model, model, failed_before,
               count(*) AS tries,
               count(*) FILTER (WHERE state = 'succeeded') AS successes,
               count(*) FILTER (WHERE state <> 'expired') AS reported,
               count(*) FILTER (WHERE state <> 'succeeded' AND can_climb) AS climbable,
               sum(spent) AS spent_micro_usd,
               sum(spent::double precision * spent) AS spent_squared,
               sum(seconds) AS seconds
        FROM ended WHERE state IN ('succeeded', 'failed', 'expired')
        GROUP BY tenant_id, asked_model, model, failed_before
    ), written AS (
        INSERT INTO model_evidence AS known
            (tenant_id, asked_model, model, failed_before, tries, successes, reported, climbable,
             spent_micro_usd, spent_squared, seconds, updated_at)
        SELECT tenant_id, asked_model, model, failed_before, tries, successes, reported, climbable,
               spent_micro_usd, spent_squared, seconds, clock_timestamp()
        FROM sums ORDER BY tenant_id, asked_model, model, failed_before
        ON CONFLICT (tenant_id, asked_model, model, failed_before) DO UPDATE SET
            (tries, successes, reported, climbable, spent_micro_usd, spent_squared, seconds,
             updated_at) = (
                SELECT known.tries * aged + excluded.tries,
                       known.successes * aged + excluded.successes,
                       known.reported * aged + excluded.reported,
                       known.climbable * aged + excluded.climbable,
                       known.spent_micro_usd * aged + excluded.spent_micro_usd,
                       known.spent_squared * aged + excluded.spent_squared,
                       known.seconds * aged + excluded.seconds,
                       GREATEST(known.updated_at, excluded.updated_at)
                FROM (
                    SELECT power(
                        0.5,
                        GREATEST(0, extract(epoch FROM excluded.updated_at - known.updated_at))
                            / :half_life_s
                    )::double precision AS aged
                ) AS fading
             )
    )
    SELECT asked_model, model, state, count(*) AS workflows
    FROM ended GROUP BY asked_model, model, state
    """
)


async def count_outcomes(engine: AsyncEngine, *, settle_s: float = SETTLE_S) -> list[Counted]:
    """Add workflows that have ended to the evidence, each once, whoever counts besides.

    A bounded number a time. What expired is a failure that was not reported; what was cancelled says
    nothing.
    """
    async with transaction(engine) as connection:
        rows = await connection.execute(
            _COUNT,
            {"settle_s": settle_s, "most": COUNTED_PER_PASS_MAX, "half_life_s": HALF_LIFE_S},
        )
        return [Counted(row.asked_model, row.model, row.state, row.workflows) for row in rows]


async def evidence_since(engine: AsyncEngine, since: datetime | None) -> list[EvidenceRow]:
    """Evidence that changed at `since` or later, oldest change first; None: all of it."""
    table = tables.model_evidence
    statement = select(table).order_by(table.c.updated_at).limit(EVIDENCE_READ_MAX)
    if since is not None:
        statement = statement.where(table.c.updated_at >= since)
    async with transaction(engine) as connection:
        return [_evidence(row) for row in await connection.execute(statement)]


async def evidence_of_tenant(
    engine: AsyncEngine, tenant: TenantId | None, asked_model: str | None
) -> list[EvidenceRow]:
    """Evidence of a tenant and class, None: of all, the newest first."""
    table = tables.model_evidence
    statement = select(table).order_by(table.c.updated_at.desc()).limit(EVIDENCE_READ_MAX)
    if tenant is not None:
        statement = statement.where(table.c.tenant_id == tenant)
    if asked_model is not None:
        statement = statement.where(table.c.asked_model == asked_model)
    async with transaction(engine) as connection:
        return [_evidence(row) for row in await connection.execute(statement)]


_TASKS = text(
    """
    SELECT first.model = first.default_model AS is_default_first, first.default_propensity,
           first.outcome = 'succeeded' AS is_first_success, first.spent_micro_usd AS first_spent,
           whole.is_success, whole.spent
    FROM (
        SELECT * FROM model_choices
        WHERE tenant_id = :tenant AND asked_model = :asked_model AND workflow_id = task_id
              AND outcome IN ('succeeded', 'failed', 'expired')
        ORDER BY chosen_at DESC LIMIT :most
    ) AS first CROSS JOIN LATERAL (
        SELECT bool_or(outcome = 'succeeded') AS is_success, sum(spent_micro_usd) AS spent,
               bool_or(counted_at IS NULL) AS is_open
        FROM model_choices WHERE model_choices.task_id = first.workflow_id
    ) AS whole
    WHERE NOT whole.is_open
    """
)


async def tasks(engine: AsyncEngine, tenant: TenantId, asked_model: str) -> list[Task]:
    """The newest tasks of a class that are over, each with all its tries."""
    async with transaction(engine) as connection:
        rows = await connection.execute(
            _TASKS, {"tenant": tenant, "asked_model": asked_model, "most": TASKS_READ_MAX}
        )
        return [
            Task(
                is_success=row.is_success,
                spent_micro_usd=float(row.spent),
                is_default_first=row.is_default_first,
                default_propensity=row.default_propensity,
                is_first_success=row.is_first_success,
                first_spent_micro_usd=float(row.first_spent),
            )
            for row in rows
        ]


async def now(engine: AsyncEngine) -> datetime:
    """The database's clock, by which evidence fades."""
    async with transaction(engine) as connection:
        instant: datetime = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
        return instant


def _joined(failed: Failed) -> str:
    # Names of models hold no comma.
    return ",".join(failed)


def _split(failed: str) -> Failed:
    return failed_of(ModelName(name) for name in failed.split(",") if name)


def _choice(row: Row[Any]) -> ChoiceRecord:
    return ChoiceRecord(
        workflow_id=row.workflow_id,
        task_id=row.task_id,
        tenant=row.tenant_id,
        asked_model=row.asked_model,
        model=row.model,
        default_model=row.default_model,
        failed=_split(row.failed_before),
        why=Why(row.why),
        propensity=row.propensity,
        default_propensity=row.default_propensity,
        policy_revision=row.policy_revision,
        record=row.record,
        chosen_at=row.chosen_at,
        outcome=row.outcome,
        spent_micro_usd=row.spent_micro_usd,
    )


def _evidence(row: Row[Any]) -> EvidenceRow:
    return EvidenceRow(
        tenant=row.tenant_id,
        asked_model=row.asked_model,
        model=row.model,
        failed=_split(row.failed_before),
        evidence=Evidence(
            tries=row.tries,
            successes=row.successes,
            reported=row.reported,
            climbable=row.climbable,
            spent_micro_usd=row.spent_micro_usd,
            spent_squared=row.spent_squared,
            seconds=row.seconds,
        ),
        updated_at=row.updated_at,
    )
