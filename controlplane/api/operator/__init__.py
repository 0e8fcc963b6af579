"""The operator API under /operator/v1: one module per thing that operators look at or change."""

from fastapi import APIRouter

from controlplane.api.operator import (
    audit,
    breakers,
    budgets,
    catalog,
    commands,
    engines,
    keys,
    model_choice,
    nodes,
    plans,
    policies,
    requests,
    status,
    tenants,
    workflows,
)
from controlplane.api.shapes import ErrorBody

_ERRORS = (400, 401, 403, 404, 409, 500, 503)

router = APIRouter(
    prefix="/operator/v1",
    responses={status: {"model": ErrorBody} for status in _ERRORS},
)
for _module in (
    status,
    catalog,
    nodes,
    engines,
    tenants,
    keys,
    workflows,
    requests,
    commands,
    plans,
    policies,
    breakers,
    budgets,
    model_choice,
    audit,
):
    router.include_router(_module.router)
