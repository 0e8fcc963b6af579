"""Turns every exception of the API into the OpenAI envelope, so that the framework's own bodies
are never seen.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from controlplane.api.request_ids import HEADERS, lines_of
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import (
    ConfigurationError,
    PreconditionFailed,
    Refused,
    StateUnavailable,
)
from controlplane.store.paging import BadCursor
from controlplane.wire.outcomes import error_response

log = logging.getLogger(__name__)

STATE_RETRY_AFTER_MS = 1_000
VALIDATION_ERRORS_SHOWN_MAX = 5
PATH_CHARACTERS_SHOWN_MAX = 200
OPERATIONS_SHOWN_MAX = 20


def install(app: FastAPI) -> None:
    """Registers a handler for everything that a route can raise."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(PreconditionFailed, _moved_on)
    app.add_exception_handler(StateUnavailable, _state_unavailable)
    app.add_exception_handler(ConfigurationError, _wrong_words)
    app.add_exception_handler(BadCursor, _wrong_words)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(Exception, _broken)


def response_of(refusal: Refuse, extra: Mapping[str, str] | None = None) -> Response:
    status, headers, body = error_response(refusal, None)
    return Response(
        body, status, headers={**dict(headers), **(extra or {})}, media_type="application/json"
    )


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return response_of(error.refusal)


async def _moved_on(_: Request, error: Exception) -> Response:
    return response_of(Refuse(Reason.PRECONDITION_FAILED, str(error)))


async def _state_unavailable(_: Request, error: Exception) -> Response:
    return response_of(
        Refuse(
            Reason.STATE_UNAVAILABLE,
            f"the database can not be asked now: {error}",
            STATE_RETRY_AFTER_MS,
        )
    )


async def _wrong_words(_: Request, error: Exception) -> Response:
    return response_of(Refuse(Reason.INVALID_REQUEST, str(error)))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    words = "; ".join(
        f"`{'.'.join(str(part) for part in problem['loc'])}`: {problem['msg'].lower()}"
        for problem in problems[:VALIDATION_ERRORS_SHOWN_MAX]
    )
    hidden = len(problems) - VALIDATION_ERRORS_SHOWN_MAX
    if hidden > 0:
        words += f"; and {hidden} more"
    return response_of(Refuse(Reason.INVALID_REQUEST, words))


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    target = f"`{request.method} {request.url.path[:PATH_CHARACTERS_SHOWN_MAX]}`"
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            offered = _offered(request)
            return response_of(Refuse(Reason.NOT_FOUND, f"there is no {target}; {offered}"))
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = ", ".join(_methods_of(request))
            return response_of(
                Refuse(Reason.METHOD_NOT_ALLOWED, f"{target} is not offered; allowed: {allowed}"),
                {"allow": allowed},
            )
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return response_of(Refuse(Reason.REQUEST_TOO_LARGE, str(error.detail)))
        case status if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return response_of(Refuse(Reason.INVALID_REQUEST, str(error.detail)))
        case _:
            return response_of(Refuse(Reason.INTERNAL_ERROR, str(error.detail)))


def _methods_of(request: Request) -> list[str]:
    """What the path takes: the framework names the methods of the first route alone."""
    path = request.scope["path"]
    found: dict[str, set[str]] = {}
    for route in iter_route_contexts(request.app.routes):
        if route.path is not None and compile_path(route.path)[0].match(path):
            found.setdefault(route.path, set()).update(route.methods or ())
    # An id may hold slashes, so what comes after one may be taken for a part of it: the longer path is meant.
    return sorted(found[max(found, key=len)]) if found else []


def _offered(request: Request) -> str:
    """What there is under the same first part of the path, so that who guessed wrong need not guess again."""
    first = request.url.path.split("/")[1]
    operations = [
        f"{method.upper()} {path}"
        for path, methods in request.app.openapi()["paths"].items()
        if path.split("/")[1] == first
        for method in methods
    ]
    if not 0 < len(operations) <= OPERATIONS_SHOWN_MAX:
        return "`GET /openapi.json` tells what there is"
    return f"offered: {', '.join(operations)}"


async def _broken(request: Request, error: Exception) -> Response:
    ids = lines_of(request.scope)
    request_id, path = ids.get(HEADERS[0]), request.scope["path"]
    log.error(
        "call_failed", exc_info=error, extra={"fields": {"request": request_id, "path": path}}
    )
    return response_of(
        Refuse(
            Reason.INTERNAL_ERROR, f"an unexpected {type(error).__name__}; see the server's log"
        ),
        ids,
    )
