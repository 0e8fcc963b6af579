"""The FastAPI application: routers, failures, and a document that says only what is true."""

from importlib.metadata import version

from fastapi import FastAPI

from controlplane.api import failures, health
from controlplane.api.document import document_of, operation_id
from controlplane.api.entity_tags import EntityTags
from controlplane.api.limits import BodyLimit
from controlplane.api.operator import router as operator_router
from controlplane.api.request_ids import RequestIds
from controlplane.api.scrapers import Scrapers
from controlplane.api.services import Services
from controlplane.api.tenant import model_choice, workflows
from controlplane.telemetry.exposition import Exposition

_DESCRIPTION = (
    "Calls of models in the shape of OpenAI's API, workflows of tenants, and the operator API. Every error"
    " has the OpenAI envelope; its `code` is one of a closed set of reasons. Lists are pages: `next_cursor`"
    " of one is `cursor` of the next. Times are of the server, money in micro-dollars where a name says so."
    " `HEAD` and `OPTIONS` are not offered."
)


def create_app(services: Services) -> FastAPI:
    app = FastAPI(
        title="Headway",
        version=version("headway"),
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    app.state.services = services
    app.state.exposition = Exposition(services.metrics)
    app.state.scrapers = Scrapers(services.engine, services.pepper)
    app.add_middleware(EntityTags)
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestIds, new_id=services.gate.new_id)
    failures.install(app)
    app.include_router(workflows.router)
    app.include_router(model_choice.router)
    app.include_router(operator_router)
    app.include_router(health.router)
    app.openapi = lambda: document_of(app)  # type: ignore[method-assign]
    return app
