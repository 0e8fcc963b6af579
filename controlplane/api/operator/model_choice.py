"""Models chosen by outcomes, of every tenant: the classes that policy offers, how they stand, and why."""

from typing import Literal

from fastapi import APIRouter

from controlplane.api.model_choice_answers import ChoiceAnswer, ClassAnswer, choice_of, classes_of
from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import Answer, Filter, Identifier
from controlplane.domain.catalog import Tenant
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import TenantId
from controlplane.store import catalog
from controlplane.store import model_choice as store

# Tenants whose classes one answer shows, those with the newest outcomes.
TENANTS_SHOWN_MAX = 20

router = APIRouter(prefix="/model-choice", tags=["model choice"])


class OfferedAnswer(Answer):
    """A class as the ruling policies offer it."""

    asked_model: str
    ladder: list[str]
    default_model: str
    tenants: list[str]
    tenant_classes: list[str]
    success_floor_ratio: float | None
    outcomes_min: int
    explore_ratio: float
    holdout_ratio: float
    tries_max: int


class Offered(Answer):
    object: Literal["list"] = "list"
    is_enabled: bool
    data: list[OfferedAnswer]


class ClassList(Answer):
    object: Literal["list"] = "list"
    data: list[ClassAnswer]


@router.get("", responses={404: {}})
async def list_classes(
    _: ViewerDep,
    services: ServicesDep,
    tenant: Filter = None,
) -> ClassList:
    """Show how classes stand: of one tenant, or of those with the newest outcomes."""
    if tenant is not None:
        return ClassList(data=await classes_of(services, await _tenant(services, tenant)))
    rows = await store.evidence_of_tenant(services.engine, None, None)
    newest = dict.fromkeys(row.tenant for row in rows)
    answers = []
    for name in list(newest)[:TENANTS_SHOWN_MAX]:
        known = {row.asked_model for row in rows if row.tenant == name}
        of_tenant = await classes_of(services, await _tenant(services, name))
        answers += [answer for answer in of_tenant if answer.asked_model in known]
    return ClassList(data=answers)


@router.get("/classes")
async def offered(_: ViewerDep, services: ServicesDep) -> Offered:
    """List the classes that the active policies offer."""
    document = services.gate.policies.policy.bundle.model_choice
    return Offered(
        is_enabled=document.is_enabled,
        data=[
            OfferedAnswer(
                asked_model=f"auto:{name}",
                ladder=list(document.ladders[of_class.ladder]),
                default_model=of_class.default,
                tenants=list(of_class.tenants),
                tenant_classes=list(of_class.tenant_classes),
                success_floor_ratio=of_class.success_floor_ratio,
                outcomes_min=of_class.outcomes_min,
                explore_ratio=of_class.explore_ratio,
                holdout_ratio=of_class.holdout_ratio,
                tries_max=of_class.tries_max,
            )
            for name, of_class in sorted(document.classes.items())
        ],
    )


@router.get("/workflows/{workflow_id}")
async def explain_choice(
    workflow_id: Identifier, _: ViewerDep, services: ServicesDep
) -> ChoiceAnswer:
    """Say why a workflow has its model."""
    return await choice_of(services, workflow_id, None)


async def _tenant(services: Services, tenant: str) -> Tenant:
    record = await catalog.get_tenant(services.engine, TenantId(tenant))
    if record is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no tenant `{tenant}`"))
    return Tenant(
        id=record.id,
        name=record.name,
        tenant_class=record.tenant_class,
        slo_class=record.slo_class,
        is_disabled=record.is_disabled,
        # It separates caches, of which nothing is read here.
        cache_salt="",
    )
