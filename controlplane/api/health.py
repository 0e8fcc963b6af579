"""Probes and the Prometheus exposition. No key: they say nothing about tenants."""

import asyncio
from typing import Literal, cast

from fastapi import APIRouter, Request, Response

from controlplane.api.security import ServicesDep
from controlplane.api.services import Services
from controlplane.api.shapes import Answer
from controlplane.domain.errors import StateUnavailable
from controlplane.store import migrate
from controlplane.telemetry.exposition import CONTENT_TYPE, Exposition

READY_CHECK_S_MAX = 2.0

router = APIRouter(tags=["health"])


class Live(Answer):
    status: Literal["live"] = "live"


class Ready(Answer):
    """`problems` says why the replica should get no traffic; empty when it should."""

    status: Literal["ready", "not_ready"]
    problems: list[str]


@router.get("/health/live")
async def live() -> Live:
    """The process answers."""
    return Live()


@router.get("/health/ready", responses={503: {"model": Ready}})
async def ready(services: ServicesDep, response: Response) -> Ready:
    """The replica should get traffic: Postgres answers, the schema is current, the journal has
    room.
    """
    problems = await readiness_problems(services)
    if problems:
        response.status_code = 503
    return Ready(status="not_ready" if problems else "ready", problems=problems)


async def readiness_problems(services: Services) -> list[str]:
    problems = []
    try:
        async with asyncio.timeout(READY_CHECK_S_MAX):
            if not await _is_schema_current(services):
                problems.append(
                    "the schema is not the one of this program: run `headway db upgrade`"
                )
    except StateUnavailable as error:
        problems.append(f"PostgreSQL can not be asked: {error}")
    except TimeoutError:
        problems.append(f"PostgreSQL did not answer within {READY_CHECK_S_MAX:g} s")
    if services.journal.is_full:
        problems.append("the journal is full: PostgreSQL has been away or slow for too long")
    policies = services.gate.policies
    if not policies.is_loaded:
        problems.append(f"no policies that PostgreSQL names can be used: {policies.problem}")
    if services.gate.is_draining:
        problems.append("the replica is stopping")
    return problems


async def _is_schema_current(services: Services) -> bool:
    """Asks on a connection of its own, off the loop, so that a full pool does not look like an
    outage.
    """
    url = services.engine.url.render_as_string(hide_password=False)
    return await asyncio.to_thread(migrate.is_current, url)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus exposition of this replica."""
    exposition = cast("Exposition", request.app.state.exposition)
    return Response(exposition.render(), headers={"content-type": CONTENT_TYPE})
