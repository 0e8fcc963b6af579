"""Models chosen by outcomes, to the calling tenant: the classes it may ask for, and why a workflow has its model."""

from typing import Literal

from fastapi import APIRouter

from controlplane.api.model_choice_answers import ChoiceAnswer, ClassAnswer, choice_of, classes_of
from controlplane.api.security import ServicesDep, TenantDep
from controlplane.api.shapes import Answer, Identifier

router = APIRouter(
    prefix="/v1/model-choice",
    tags=["model choice"],
)


class ClassList(Answer):
    object: Literal["list"] = "list"
    data: list[ClassAnswer]


@router.get("")
async def list_own(principal: TenantDep, services: ServicesDep) -> ClassList:
    """List the classes of tasks that can be asked for instead of a model, and how they stand."""
    return ClassList(data=await classes_of(services, principal.tenant))


@router.get("/{workflow_id}")
async def explain_own(
    workflow_id: Identifier, principal: TenantDep, services: ServicesDep
) -> ChoiceAnswer:
    """Say why a workflow has its model."""
    return await choice_of(services, workflow_id, principal.tenant.id)
