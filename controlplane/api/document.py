"""The OpenAPI document: what the routes declare, completed by what holds for every operation.

Refusals are the same everywhere, so their statuses, codes and headers are derived here, from the one table of
outcomes, for routes that come later as well.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts

from controlplane.api import model_calls
from controlplane.api.security import RANKS, ROLES
from controlplane.domain.catalog import OperatorRole
from controlplane.domain.decision import Reason
from controlplane.wire.outcomes import OUTCOMES

Operation = dict[str, Any]
# By name: what it says, whether every answer has it, and its values.
Headers = dict[str, tuple[str, bool, dict[str, Any]]]

_VALIDATION_SCHEMAS: Final = ("HTTPValidationError", "ValidationError")
_ROLE: Final = "x-headway-role"
_CODES_OF_CONNECTIONS: Final[dict[int, tuple[Reason, ...]]] = {
    # Said by the server itself, before any operation is known.
    HTTPStatus.REQUEST_TIMEOUT: (Reason.INVALID_REQUEST,),
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: (Reason.REQUEST_TOO_LARGE,),
}
# An engine's own refusal of a body, in its words.
_CODES_OF_ENGINES: Final[dict[int, tuple[Reason, ...]]] = {
    HTTPStatus.UNPROCESSABLE_ENTITY: (Reason.INVALID_REQUEST,),
    HTTPStatus.NOT_FOUND: (Reason.INVALID_REQUEST,),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (Reason.INVALID_REQUEST,),
}

_TAGS: Final = {
    "models": "Calls of models, in the shape of OpenAI's API.",
    "workflows": "Tasks of many calls, with a deadline and a budget: of the calling tenant.",
    "model choice": "Models that are chosen by the outcomes that tenants report.",
    "status": "One replica on one screen.",
    "catalogue": "What is declared: regions, GPU types, models, SLO classes.",
    "nodes": "Machines with GPUs.",
    "engines": "Inference servers, and what their agents are told.",
    "tenants": "Who pays, and how much at most.",
    "keys": "Keys of tenants and operators.",
    "operator workflows": "Workflows of every tenant.",
    "requests": "Accepted requests, and why they went where they went.",
    "commands": "What agents were told, and what became of it.",
    "plans": "What the planner wants of the fleet.",
    "policies": "Policy bundles and their rollout.",
    "breakers": "Breakers of engines and pools.",
    "budgets": "Accounts of tenants, keys and workflows.",
    "audit": "Who changed what and why.",
    "health": "Probes and metrics, without a key.",
}

_RETRY_HEADERS: Final[Headers] = {
    "x-headway-reason": ("Why: one of a closed set, the `code` of the body.", True, {"type": "string"}),
    "x-should-retry": (
        "Whether asking again helps; OpenAI's SDKs obey it.", True, {"type": "string", "enum": ["true", "false"]},
    ),
    "retry-after": (
        "Whole seconds to wait, where there is an honest estimate.", False, {"type": "integer", "minimum": 1},
    ),
    "retry-after-ms": ("The same in milliseconds.", False, {"type": "integer", "minimum": 1}),
    "x-headway-rule": ("The policy rule that decided.", False, {"type": "string"}),
}  # fmt: skip
_ID_HEADERS: Final[Headers] = {
    "x-request-id": ("The id under which this answer is known.", True, {"type": "string", "minLength": 1}),
    "x-headway-decision": (
        "The same, as `headway explain` takes it.", True, {"type": "string", "minLength": 1},
    ),
}  # fmt: skip
_TAG_HEADERS: Final[Headers] = {
    "etag": (
        "Names this answer for `If-None-Match`, and what was declared, before its dot, for `If-Match`.",
        True,
        {"type": "string", "pattern": '^"[!#-~]+"$'},
    ),
    "cache-control": ("No shared cache may keep it.", True, {"type": "string"}),
}  # fmt: skip

# What can be done with an answer: the operation, its parameter, and where the answer holds it.
_LINKS: Final[dict[str, dict[str, tuple[str, str, str]]]] = {
    "workflows_create": {
        "look": ("workflows_get", "workflow_id", "$response.body#/id"),
        "cancel": ("workflows_cancel", "workflow_id", "$response.body#/id"),
        "outcome": ("workflows_report_outcome", "workflow_id", "$response.body#/id"),
        "choice": ("model_choice_explain_own", "workflow_id", "$response.body#/id"),
        "operator_look": ("operator_workflows_get_workflow", "workflow_id", "$response.body#/id"),
        "operator_cancel": (
            "operator_workflows_cancel_workflow", "workflow_id", "$response.body#/id",
        ),
    },
    "tenants_create_tenant": {
        "look": ("tenants_get_tenant", "tenant_id", "$response.body#/id"),
        "change": ("tenants_change_tenant", "tenant_id", "$response.body#/id"),
    },
    "keys_create_key": {
        "look": ("keys_get_key", "key_id", "$response.body#/id"),
        "change": ("keys_change_key", "key_id", "$response.body#/id"),
        "rotate": ("keys_rotate_key", "key_id", "$response.body#/id"),
        "revoke": ("keys_revoke_key", "key_id", "$response.body#/id"),
    },
    "keys_rotate_key": {
        "look": ("keys_get_key", "key_id", "$response.body#/id"),
        "old": ("keys_get_key", "key_id", "$response.body#/replaces"),
        "revoke": ("keys_revoke_key", "key_id", "$response.body#/replaces"),
    },
    "nodes_list_nodes": {"look": ("nodes_get_node", "node_id", "$response.body#/data/0/id")},
    "engines_list_engines": {"look": ("engines_get_engine", "engine_id", "$response.body#/data/0/id")},
    "engines_cordon": {"look": ("commands_get_command", "command_id", "$response.body#/id")},
    "budgets_list_budgets": {"look": ("budgets_get_budget", "budget_id", "$response.body#/data/0/id")},
    "requests_list_requests": {
        "look": ("requests_get_request", "request_id", "$response.body#/data/0/id"),
        "explain": ("requests_explain", "request_id", "$response.body#/data/0/id"),
    },
    "plans_list_plans": {"look": ("plans_get_plan", "revision", "$response.body#/data/0/revision")},
    "policies_list_revisions": {
        "look": ("policies_get_revision", "digest", "$response.body#/data/0/digest"),
    },
    "list_models": {"look": ("get_model", "model", "$response.body#/data/0/id")},
}  # fmt: skip


def operation_id(route: APIRoute) -> str:
    """A name that stays: what it is about and what it does."""
    tag = str(route.tags[0]) if route.tags else "api"
    return f"{tag} {route.name}".replace(" ", "_")


def role_of(dependant: Dependant) -> OperatorRole | None:
    """The role that a route needs, None where it needs none of an operator."""
    found = [ROLES[dependant.call]] if dependant.call in ROLES else []
    found += [role for one in dependant.dependencies if (role := role_of(one)) is not None]
    return max(found, key=RANKS.__getitem__, default=None)


def document_of(app: FastAPI) -> dict[str, Any]:
    """The whole document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
        )
        schemas = document["components"]["schemas"]
        for name in _VALIDATION_SCHEMAS:
            schemas.pop(name, None)
        schemas.update(model_calls.SCHEMAS)
        _close_error_codes(schemas)
        roles = dict(_roles(app))
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                # Nobody is ever told of a mistake in the framework's words.
                operation["responses"].pop("422", None)
                _complete(operation, path, method, roles.get((path, method)))
        for path, operations in model_calls.PATHS.items():
            document["paths"][path] = {
                method: _completed_call(operation) for method, operation in operations.items()
            }
        document["components"]["responses"] = {
            f"Refusal{status}": _refusal(status) for status in _statuses()
        }
        app.openapi_schema = document
    return app.openapi_schema


def _roles(app: FastAPI) -> Iterator[tuple[tuple[str, str], OperatorRole]]:
    for route in iter_route_contexts(app.routes):
        dependant = getattr(route, "dependant", None)
        role = None if dependant is None else role_of(dependant)
        if role is not None and route.path_format is not None:
            for method in route.methods or ():
                yield (route.path_format, method.lower()), role


def _statuses() -> list[int]:
    own = {outcome.status for outcome in OUTCOMES.values() if outcome.status != HTTPStatus.OK}
    return sorted(own | {int(status) for status in _CODES_OF_CONNECTIONS})


def _codes_of(status: int) -> list[str]:
    known = [str(reason) for reason, outcome in OUTCOMES.items() if outcome.status == status]
    more = (*_CODES_OF_CONNECTIONS.get(status, ()), *_CODES_OF_ENGINES.get(status, ()))
    return sorted({*known, *map(str, more)})


def _refusal(status: int) -> dict[str, Any]:
    codes = _codes_of(status)
    narrowed = {"properties": {"error": {"properties": {"code": {"enum": codes}}}}}
    example = next((r for r, outcome in OUTCOMES.items() if outcome.status == status), None)
    error_type = "invalid_request_error" if example is None else OUTCOMES[example].error_type
    return {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(f'`{code}`' for code in codes)}.",
        "headers": _headers(_RETRY_HEADERS, _ID_HEADERS),
        "content": {
            "application/json": {
                "schema": {"allOf": [{"$ref": "#/components/schemas/ErrorBody"}, narrowed]},
                "example": {
                    "error": {
                        "message": "what is wrong, and what to do about it",
                        "type": error_type,
                        "param": None,
                        "code": codes[0],
                    }
                },
            }
        },
    }


def _close_error_codes(schemas: dict[str, Any]) -> None:
    members = schemas["ErrorDetail"]["properties"]
    members["type"]["enum"] = sorted({outcome.error_type for outcome in OUTCOMES.values()})
    members["code"] = {"type": "string", "enum": sorted(str(reason) for reason in Reason)}


def _headers(*kinds: Headers) -> dict[str, Any]:
    return {
        name: {"description": description, "required": is_required, "schema": schema}
        for kind in kinds
        for name, (description, is_required, schema) in kind.items()
    }


def _completed_call(operation: Operation) -> Operation:
    """A call of a model, which has no route here."""
    whole = {**operation, "responses": dict(operation["responses"])}
    has_body = "requestBody" in whole
    for status in (400, 401, 408, 431, 500, 503, *(() if has_body else (404,))):
        whole["responses"].setdefault(str(status), {})
    _add_answers(whole, is_tagged=False)
    _link(whole)
    return whole


def _complete(operation: Operation, path: str, method: str, role: OperatorRole | None) -> None:
    responses = operation["responses"]
    if path.startswith(("/v1/", "/operator/")):
        for status in _possible(operation, method, is_operators=role is not None):
            responses.setdefault(str(status), {})
    else:
        for status in (408, 431, 500):
            responses.setdefault(str(status), {})
    if role is not None:
        operation[_ROLE] = str(role)
        words = operation.get("description", "")
        operation["description"] = f"{words}\n\nNeeds the operator role `{role}` or a higher one."
    is_tagged = path.startswith(("/v1/", "/operator/"))
    if is_tagged and method == "get":
        operation.setdefault("parameters", []).append(
            {
                "name": "If-None-Match",
                "in": "header",
                "required": False,
                "schema": {"type": "string"},
                "description": "`ETag`s that were seen: the answer is 304 while it is one of them.",
            }
        )
        responses["304"] = {
            "description": "It is as it was seen.",
            "headers": _headers(_TAG_HEADERS, _ID_HEADERS),
        }
    _add_answers(operation, is_tagged=is_tagged)
    _link(operation)


def _possible(operation: Operation, method: str, *, is_operators: bool) -> Iterator[int]:
    """Statuses of refusals that an operation of this kind can answer with."""
    yield from (400, 401, 408, 431, 500, 503)
    if is_operators:
        yield 403
    for parameter in operation.get("parameters", ()):
        _close(parameter)
    parameters = {parameter["name"].lower() for parameter in operation.get("parameters", ())}
    kinds = {parameter["in"] for parameter in operation.get("parameters", ())}
    has_body = "requestBody" in operation
    if has_body:
        yield 413
    if "path" in kinds or has_body:
        yield 404
    if method != "get":
        yield 409
    if "if-match" in parameters:
        yield 412
    if "idempotency-key" in parameters:
        yield 422
    if not is_operators and method == "post":
        # A model that is asked for may be forbidden, or its choice may be limited.
        yield 403


def _close(parameter: dict[str, Any]) -> None:
    """A parameter that may be left out is not one that may be null."""
    schema = parameter["schema"]
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if kinds:
        rest = {name: value for name, value in schema.items() if name != "anyOf"}
        parameter["schema"] = {**rest, **kinds[0]} if len(kinds) == 1 else {**rest, "anyOf": kinds}


def _add_answers(operation: Operation, *, is_tagged: bool) -> None:
    """Headers of every answer, and the shape of refusals that say nothing of their own."""
    responses = operation["responses"]
    for status, response in responses.items():
        if status.startswith("2"):
            kinds = [_ID_HEADERS, *([_TAG_HEADERS] if is_tagged else [])]
            response["headers"] = {**_headers(*kinds), **response.get("headers", {})}
            if status == "201":
                response["headers"].setdefault(
                    "location",
                    {"description": "Where it is found.", "schema": {"type": "string"}},
                )
        elif status != "304" and not response.get("content"):
            responses[status] = {"$ref": f"#/components/responses/Refusal{status}"}
    operation["responses"] = dict(sorted(responses.items()))


def _link(operation: Operation) -> None:
    links = _LINKS.get(operation["operationId"])
    if links is None:
        return
    for status, response in operation["responses"].items():
        if status in ("200", "201", "202"):
            response["links"] = {
                name: {"operationId": target, "parameters": {parameter: expression}}
                for name, (target, parameter, expression) in links.items()
            }
