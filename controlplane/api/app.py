"""The FastAPI application: routers, failures, and a document that says only what is true."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from controlplane.api import failures, health
from controlplane.api.limits import BodyLimit
from controlplane.api.operator import router as operator_router
from controlplane.api.request_ids import RequestIds
from controlplane.api.services import Services
from controlplane.api.tenant import model_choice, workflows
from controlplane.telemetry.exposition import Exposition

_DESCRIPTION = (
    "Workflows of tenants and the operator API. Chat completions, completions and models are served"
    " at `/v1` in the shape of the OpenAI API. Every error has the OpenAI envelope; its `code` is"
    " one of a closed set of reasons."
)


def create_app(services: Services) -> FastAPI:
    app = FastAPI(
        title="Headway",
        version=version("headway"),
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    app.state.exposition = Exposition(services.metrics)
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestIds, new_id=services.gate.new_id)
    failures.install(app)
    app.include_router(workflows.router)
    app.include_router(model_choice.router)
    app.include_router(operator_router)
    app.include_router(health.router)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI without the framework's 422, which no client ever sees."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
