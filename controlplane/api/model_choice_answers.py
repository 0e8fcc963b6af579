"""Models chosen by outcomes, as both APIs show them: how a class stands, and why a workflow has its model."""

from datetime import datetime
from typing import Any, Literal

from controlplane.api.services import Services
from controlplane.api.shapes import Answer
from controlplane.domain.catalog import Tenant
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import TenantId, WorkflowId
from controlplane.runtime.model_choices import Standing, model_view, sentence_of
from controlplane.scheduler.model_choice import Why, chain_views, saving_of
from controlplane.store import model_choice as store
from controlplane.store.model_choice import ChoiceRecord

_MICRO_USD = 1e6


class ModelAnswer(Answer):
    """A model's first tries. Its rate of success lies within the range with 95 % belief.

    `tries` fade with time. `is_known`: it counts. Null: never tried.
    """

    model: str
    tries: float
    successes: float
    reported: float
    success_ratio_low: float
    success_ratio_high: float
    usd: float | None
    seconds: float | None
    is_known: bool
    is_usable: bool


class ChainAnswer(Answer):
    """Models tried until one succeeds. `holds_floor_ratio`: how sure it is that the floor is held."""

    chain: list[str]
    success_ratio: float
    usd: float
    usd_per_success: float
    holds_floor_ratio: float


class SavingAnswer(Answer):
    """Against one try of the default model, by tasks that had it by chance; bounds of 95 % confidence."""

    tasks: int
    tasks_default: int
    tasks_uncovered: int
    usd_per_success: float
    usd_per_success_default: float
    saved_ratio: float
    saved_ratio_low: float
    saved_ratio_high: float
    success_ratio: float
    success_ratio_default: float
    success_gain_low: float
    success_gain_high: float


class ClassAnswer(Answer):
    """A class for one tenant, asked for as the model `asked_model`. `saving` is null until enough tasks
    had the default model.
    """

    object: Literal["model_choice_class"] = "model_choice_class"
    tenant_id: str
    asked_model: str
    default_model: str
    ladder: list[str]
    success_floor_ratio: float | None
    follow_ratio: float
    models: list[ModelAnswer]
    chains: list[ChainAnswer]
    saving: SavingAnswer | None


class ChoiceAnswer(Answer):
    """Why a workflow has its model. `record` is what was known when it was chosen."""

    object: Literal["model_choice"] = "model_choice"
    workflow_id: str
    task_id: str
    tenant_id: str
    asked_model: str
    model: str
    default_model: str
    failed_before: list[str]
    why: Why
    sentence: str
    propensity: float
    chosen_at: datetime
    policy_revision: str
    outcome: str | None
    spent_micro_usd: int | None
    record: dict[str, Any]


async def classes_of(services: Services, tenant: Tenant) -> list[ClassAnswer]:
    """How every class stands that the tenant may ask for."""
    return [
        await _class(services, tenant, standing)
        for standing in await services.choices.standings(tenant)
    ]


async def choice_of(services: Services, workflow_id: str, tenant: TenantId | None) -> ChoiceAnswer:
    """Raises Refused when the workflow is unknown or asked for a model by its name."""
    record = await store.get(services.engine, WorkflowId(workflow_id), tenant)
    if record is None:
        raise Refused(
            Refuse(Reason.NOT_FOUND, f"there is no workflow `{workflow_id}` whose model was chosen")
        )
    return _choice(record)


async def _class(services: Services, tenant: Tenant, standing: Standing) -> ClassAnswer:
    asked, beliefs = standing.asked, standing.beliefs
    saving = saving_of(await store.tasks(services.engine, tenant.id, asked.name))
    return ClassAnswer(
        tenant_id=tenant.id,
        asked_model=asked.name,
        default_model=asked.default,
        ladder=list(asked.ladder),
        success_floor_ratio=beliefs.choice_class.success_floor_ratio,
        follow_ratio=beliefs.follow_ratio,
        models=[
            ModelAnswer(**model_view(beliefs, model), is_usable=model in standing.usable)
            for model in asked.ladder
        ],
        chains=[
            ChainAnswer(
                chain=list(view.chain),
                success_ratio=view.success_ratio,
                usd=view.dollars_micro_usd / _MICRO_USD,
                usd_per_success=view.dollars_micro_usd / view.success_ratio / _MICRO_USD,
                holds_floor_ratio=view.holds_ratio,
            )
            for view in chain_views(beliefs)
        ],
        saving=None
        if saving is None
        else SavingAnswer(
            tasks=saving.tasks,
            tasks_default=saving.tasks_default,
            tasks_uncovered=saving.tasks_uncovered,
            usd_per_success=saving.cpst_micro_usd / _MICRO_USD,
            usd_per_success_default=saving.cpst_default_micro_usd / _MICRO_USD,
            saved_ratio=saving.saved_ratio,
            saved_ratio_low=saving.saved_ratio_low,
            saved_ratio_high=saving.saved_ratio_high,
            success_ratio=saving.success_ratio,
            success_ratio_default=saving.success_ratio_default,
            success_gain_low=saving.success_gain_low,
            success_gain_high=saving.success_gain_high,
        ),
    )


def _choice(record: ChoiceRecord) -> ChoiceAnswer:
    return ChoiceAnswer(
        workflow_id=record.workflow_id,
        task_id=record.task_id,
        tenant_id=record.tenant,
        asked_model=record.asked_model,
        model=record.model,
        default_model=record.default_model,
        failed_before=list(record.failed),
        why=record.why,
        sentence=sentence_of(record),
        propensity=record.propensity,
        chosen_at=record.chosen_at,
        policy_revision=record.policy_revision,
        outcome=record.outcome,
        spent_micro_usd=record.spent_micro_usd,
        record=dict(record.record),
    )
