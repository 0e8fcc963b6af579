"""Entity tags: what a client has seen of a thing, so that it fetches only what changed and changes only what it saw.

A tag is `"WHOLE"` or `"VERSION.WHOLE"`. WHOLE is a digest of the answer and decides about `304`; VERSION names
what operators declared of the thing and alone decides about `412`, so that money which is spent meanwhile makes
nobody's change fail.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import xxhash
from fastapi import Header, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.domain.errors import PreconditionFailed

TAGS_CHARACTERS_MAX: Final = 1_024
GENERATION_DIGITS_MAX: Final = 18

_TAG: Final = re.compile(r'"([!#-~]*)"')
_STRONG_TAG: Final = re.compile(r'(?<!W/)"([!#-~]*)"')
_JSON: Final = "application/json"
_OK: Final = range(200, 300)
_NOT_MODIFIED: Final = 304
_CACHED_BY_ONE: Final = "private, no-cache"

IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=TAGS_CHARACTERS_MAX,
        description="Change it only while it is as one of these `ETag`s showed it; else the answer is 412.",
    ),
]


def versions_of(if_match: str | None) -> frozenset[str] | None:
    """Versions that an `If-Match` names; None when any will do. What is no tag names none, and so fails."""
    if if_match is None or if_match == "*":
        return None
    return frozenset(tag.partition(".")[0] for tag in _STRONG_TAG.findall(if_match))


def generation_of(if_match: str | None, given: int | None) -> int | None:
    """The generation that a change holds to: that of `If-Match`, else the one that its body gives, if any.

    Raises PreconditionFailed for a tag that no generation ever had.
    """
    versions = versions_of(if_match)
    if versions is None:
        return given
    [version, *others] = versions or {""}
    if others or not version.isdecimal() or len(version) > GENERATION_DIGITS_MAX:
        raise PreconditionFailed("send the one `ETag` that you saw")
    if given not in (None, int(version)):
        raise PreconditionFailed("`If-Match` and `generation` name different generations")
    return int(version)


@contextmanager
def moved_told(if_match: str | None, moved: type[Exception]) -> Iterator[None]:
    """Whoever sent an `If-Match` is told by 412 that what it saw has moved on; others as before."""
    try:
        yield
    except moved as error:
        if if_match is None:
            raise
        raise PreconditionFailed(str(error)) from error


def show_version(response: Response, version: str) -> None:
    """Let the answer's tag begin with the version of what it shows."""
    response.headers["etag"] = f'"{version}"'


class EntityTags:
    """ASGI middleware. Gives every JSON answer of the API a tag, and 304 to who has seen it already.

    What only one client may see is marked so for caches.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        parts: list[bytes] = []

        async def tagged(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start is None:
                await send(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            head, start = start, None
            await _send_tagged(scope, send, head, b"".join(parts))

        await self._app(scope, receive, tagged)


def _is_json(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return start["status"] in _OK and headers.get("content-type", "").startswith(_JSON)


async def _send_tagged(scope: Scope, send: Send, start: Message, body: bytes) -> None:
    headers = MutableHeaders(raw=list(start["headers"]))
    whole = xxhash.xxh3_64_hexdigest(body)
    version = headers.get("etag", "").strip('"')
    tag = f"{version}.{whole}" if version else whole
    headers["etag"] = f'"{tag}"'
    headers.setdefault("cache-control", _CACHED_BY_ONE)
    status = start["status"]
    if scope["method"] == "GET" and _has_seen(Headers(scope=scope), tag):
        status, body = _NOT_MODIFIED, b""
        del headers["content-length"]
        del headers["content-type"]
    await send({**start, "status": status, "headers": headers.raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _has_seen(headers: Headers, tag: str) -> bool:
    """`If-None-Match` compares weakly (RFC 9110, 13.1.2): a `W/` in front of a tag does not matter."""
    seen = headers.get("if-none-match")
    if seen is None:
        return False
    return seen.strip() == "*" or tag in _TAG.findall(seen)
