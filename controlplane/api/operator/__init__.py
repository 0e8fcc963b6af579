"""The operator API under /operator/v1: one module per thing that operators look at or change."""

from fastapi import APIRouter

from controlplane.api.operator import (
    audit,
    breakers,
    budgets,
    catalog,
    commands,
    doctor,
    engines,
    keys,
    model_choice,
    nodes,
    overview,
    plans,
    policies,
    refusals,
    report,
    requests,
    settings,
    status,
    tenants,
    workflows,
)
from controlplane.api.shapes import ErrorBody

# Every refusal has this shape; which ones an operation can answer with is derived in `document.py`.
router = APIRouter(prefix="/operator/v1", responses={400: {"model": ErrorBody}})
for _module in (
    status,
    overview,
    settings,
    doctor,
    report,
    catalog,
    nodes,
    engines,
    tenants,
    keys,
    workflows,
    requests,
    refusals,
    commands,
    plans,
    policies,
    breakers,
    budgets,
    model_choice,
    audit,
):
    router.include_router(_module.router)
