"""Every answer of the API carries an id under which it can be asked about, as those of model calls do."""

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Where a handler of failures finds the id: those that run outside of every middleware set it themselves.
SCOPE_KEY: Final = "headway.request_id"
HEADERS: Final = ("x-request-id", "x-headway-decision")

Lines = dict[str, str]


class RequestIds:
    """ASGI middleware. An answer that names an id of its own keeps it."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str]) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[SCOPE_KEY] = self._new_id()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name for name, _ in message["headers"]}
                lines = [
                    (name.encode(), request_id.encode())
                    for name in HEADERS
                    if name.encode() not in named
                ]
                message = {**message, "headers": [*message["headers"], *lines]}
            await send(message)

        await self._app(scope, receive, with_id)


def lines_of(scope: Scope) -> Lines:
    """The headers of an answer that no middleware sees; none for a request that never had an id."""
    request_id = scope.get(SCOPE_KEY)
    return {} if request_id is None else dict.fromkeys(HEADERS, str(request_id))
