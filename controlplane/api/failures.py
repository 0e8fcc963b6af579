"""Turns every exception of the API into the OpenAI envelope, so that the framework's own bodies
are never seen.
"""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from controlplane.api.request_ids import lines_of
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused, StateUnavailable
from controlplane.store.paging import BadCursor
from controlplane.wire.outcomes import error_response

STATE_RETRY_AFTER_MS = 1_000
VALIDATION_ERRORS_SHOWN_MAX = 5


def install(app: FastAPI) -> None:
    """Registers a handler for everything that a route can raise."""
    app.add_exception_handler(Refused, _refused)
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
    target = f"`{request.method} {request.url.path}`"
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return response_of(Refuse(Reason.NOT_FOUND, f"there is no {target}"))
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "")
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


async def _broken(request: Request, error: Exception) -> Response:
    return response_of(
        Refuse(
            Reason.INTERNAL_ERROR, f"an unexpected {type(error).__name__}; see the server's log"
        ),
        lines_of(request.scope),
    )
