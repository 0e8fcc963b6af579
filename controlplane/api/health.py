"""Probes and the Prometheus exposition. Without a key they say nothing about tenants."""

import asyncio
from typing import Literal, assert_never, cast

from fastapi import APIRouter, Request, Response

from controlplane.api.scrapers import Scrapers
from controlplane.api.security import ServicesDep
from controlplane.api.services import Services
from controlplane.api.shapes import Answer
from controlplane.domain.errors import StateUnavailable
from controlplane.store import migrate
from controlplane.store.migrate import Standing
from controlplane.telemetry.exposition import OPENMETRICS, Exposition

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
    """The replica should get traffic: Postgres answers, its schema is this program's or a newer one,
    the journal has room.
    """
    problems = await readiness_problems(services)
    if problems:
        response.status_code = 503
    return Ready(status="not_ready" if problems else "ready", problems=problems)


async def readiness_problems(services: Services) -> list[str]:
    problems = []
    try:
        async with asyncio.timeout(READY_CHECK_S_MAX):
            if problem := _schema_problem(await _schema(services)):
                problems.append(problem)
    except StateUnavailable as error:
        problems.append(f"PostgreSQL can not be asked: {error}")
    except TimeoutError:
        problems.append(f"PostgreSQL did not answer within {READY_CHECK_S_MAX:g} s")
    return [*problems, *own_problems(services)]


def own_problems(services: Services) -> list[str]:
    """What the replica knows by itself, without asking PostgreSQL."""
    problems = []
    if services.journal.is_full:
        problems.append("the journal is full: PostgreSQL has been away or slow for too long")
    policies = services.gate.policies
    if not policies.is_loaded:
        problems.append(f"no policies that PostgreSQL names can be used: {policies.problem}")
    if services.gate.is_draining:
        problems.append("the replica is stopping")
    return problems


def _schema_problem(standing: Standing) -> str:
    """Why this program can not work with a schema; empty when it can."""
    match standing:
        case Standing.CURRENT | Standing.NEWER:
            return ""
        case Standing.EMPTY:
            return "the database has no schema: run `headway db upgrade`"
        case Standing.OLDER:
            return "the schema is older than this program: run `headway db upgrade`"
        case Standing.FOREIGN:
            return "the schema is at a revision that is none of Headway's: check DATABASE_URL"
        case _:
            assert_never(standing)


async def _schema(services: Services) -> Standing:
    """Asks on a connection of its own, off the loop, so that a full pool does not look like an
    outage.
    """
    url = services.engine.url.render_as_string(hide_password=False)
    return await asyncio.to_thread(migrate.standing, url)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, OPENMETRICS: {}}}},
)
async def metrics(request: Request) -> Response:
    """Exposition of this replica for Prometheus, with exemplars for who accepts OpenMetrics.

    Series that name tenants are added for an operator's key, and left out without one.
    """
    exposition = cast("Exposition", request.app.state.exposition)
    scrapers = cast("Scrapers", request.app.state.scrapers)
    headers = request.headers
    names_tenants = await scrapers.may_name_tenants(headers.get("authorization", ""))
    body, content_type = exposition.render(headers.get("accept", ""), names_tenants=names_tenants)
    return Response(body, headers={"content-type": content_type})
