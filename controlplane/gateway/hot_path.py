"""The ASGI callable in front of everything: takes the calls of models itself, hands the rest on.

Reads and checks a call, asks the gate, and leaves an accepted one to `exchange`. Every way out that
is not an answer of an engine is an entry of `wire/outcomes.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controlplane.domain.catalog import Principal
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.gateway import body as bodies
from controlplane.gateway import hints
from controlplane.gateway.body import Body, Flaw
from controlplane.gateway.exchange import Exchange, Send
from controlplane.gateway.server import LINK, Link
from controlplane.gateway.upstream import Upstream
from controlplane.runtime.call import Call, monotonic_ms
from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.tracing import Tracing
from controlplane.wire.openai import model_body, model_list_body
from controlplane.wire.outcomes import error_response

if TYPE_CHECKING:
    from controlplane.runtime.admit import Gate

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

STATE_RETRY_MS: Final = 1_000

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
MODEL_PREFIX: Final = MODELS + "/"

ENDPOINTS: Final = {CHAT: "chat", COMPLETIONS: "completions"}

_BEARER: Final = b"bearer "


class _ClientGone(Exception):
    """The client went away while its body was read."""


class HotPath:
    """`fallback` serves every path that is not a model's. `tracing` None: no spans are built."""

    def __init__(
        self,
        gate: "Gate",
        upstream: Upstream,
        metrics: Metrics,
        fallback: App,
        *,
        tracing: Tracing | None = None,
    ) -> None:
        self._gate = gate
        self._upstream = upstream
        self._metrics = metrics
        self._fallback = fallback
        self._tracing = tracing
        self._started_s = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._fallback(scope, receive, send)
            return
        path: str = scope["path"]
        endpoint = ENDPOINTS.get(path)
        if endpoint is not None:
            if scope["method"] != "POST":
                await self._wrong_method(scope, send, "POST")
                return
            await self._generate(scope, receive, send, endpoint)
            return
        if path == MODELS or path.startswith(MODEL_PREFIX):
            if scope["method"] not in ("GET", "HEAD"):
                await self._wrong_method(scope, send, "GET")
                return
            await self._models(scope, send, path)
            return
        await self._fallback(scope, receive, send)

    # ------------------------------------------------------------ calls

    async def _generate(self, scope: Scope, receive: Receive, send: Send, endpoint: str) -> None:
        received_ms = monotonic_ms()
        link: Link | None = scope.get(LINK)
        headers = hints.wanted(scope["headers"])
        principal = await self._authenticate(headers)
        if isinstance(principal, Refuse):
            await self._refuse(send, None, Flaw(principal, None))
            return
        try:
            raw = await _read_body(receive, headers)
        except _ClientGone:
            return
        if isinstance(raw, Flaw):
            await self._refuse(send, None, raw)
            return
        is_chat = endpoint == "chat"
        body = bodies.parse(raw, is_chat=is_chat)
        if isinstance(body, Flaw):
            await self._refuse(send, None, body)
            return
        if body.left_out:
            self._count_left_out(body)
        said = hints.read(headers, body.left_out)
        if isinstance(said, Flaw):
            await self._refuse(send, None, said)
            return
        call = _call_of(principal, endpoint, body, said, received_ms)
        if link is not None:
            link.cancel_on_loss()
        try:
            await self._admit_and_serve(
                call, body, scope=scope, headers=headers, send=send, link=link
            )
        except asyncio.CancelledError:
            if link is None or not link.is_lost:
                raise
            # The client went away; all that depends on it has been undone.
        finally:
            if link is not None:
                link.keep_on_loss()

    async def _admit_and_serve(
        self,
        call: Call,
        body: Body,
        *,
        scope: Scope,
        headers: dict[bytes, bytes],
        send: Send,
        link: Link | None,
    ) -> None:
        ticket = await self._gate.admit(call)
        if isinstance(ticket, Refuse):
            await self._refuse(send, call, Flaw(ticket, None))
            return
        tracing = self._tracing
        trace = (
            None if tracing is None else tracing.context(ticket.id, headers.get(hints.TRACEPARENT))
        )
        exchange = Exchange(
            self._gate,
            self._upstream,
            self._metrics,
            tracing,
            ticket=ticket,
            call=call,
            body=body,
            path=scope["path"].encode(),
            send=send,
            trace=trace,
            is_client_gone=_never if link is None else link.has_gone,
        )
        await exchange.run()

    async def _authenticate(self, headers: dict[bytes, bytes]) -> Principal | Refuse:
        sent = headers.get(hints.AUTHORIZATION, b"")
        if sent[:7].lower() != _BEARER:
            return Refuse(
                Reason.INVALID_API_KEY, "send an API key as `Authorization: Bearer <key>`"
            )
        try:
            principal = await self._gate.authenticate(sent[7:].strip())
        except StateUnavailable:
            return Refuse(
                Reason.STATE_UNAVAILABLE, "keys can not be checked at present", STATE_RETRY_MS
            )
        if principal is None:
            return Refuse(Reason.INVALID_API_KEY, "the API key is wrong or has been revoked")
        return principal

    def _count_left_out(self, body: Body) -> None:
        for member in body.left_out:
            is_known = member in bodies.STRIPPED or member in bodies.REFUSED
            self._metrics.members_dropped.add(("stripped" if is_known else "unknown",))

    # ------------------------------------------------------------ models

    async def _models(self, scope: Scope, send: Send, path: str) -> None:
        principal = await self._authenticate(hints.wanted(scope["headers"]))
        if isinstance(principal, Refuse):
            await self._refuse(send, None, Flaw(principal, None))
            return
        models = self._gate.models(principal)
        if path == MODELS:
            await _send_json(send, model_list_body(models, self._started_s))
            return
        name = path.removeprefix(MODEL_PREFIX)
        for model in models:
            if model.name == name:
                await _send_json(send, model_body(model, self._started_s))
                return
        # The same words whether it does not exist or is not this tenant's to use.
        refuse = Refuse(Reason.MODEL_NOT_FOUND, f"the model `{name[:100]}` does not exist")
        await self._refuse(send, None, Flaw(refuse, "model"))

    # ------------------------------------------------------------ refusals

    async def _wrong_method(self, scope: Scope, send: Send, allowed: str) -> None:
        refuse = Refuse(
            Reason.METHOD_NOT_ALLOWED, f"`{scope['method']}` is not offered here; use {allowed}"
        )
        await self._refuse(send, None, Flaw(refuse, None), extra=((b"allow", allowed.encode()),))

    async def _refuse(
        self,
        send: Send,
        call: Call | None,
        flaw: Flaw,
        *,
        extra: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        refuse = flaw.refuse
        decision = self._gate.refused(call, refuse)
        status, headers, body = error_response(refuse, decision, flaw.param)
        sent = [(name.encode(), value.encode()) for name, value in headers]
        sent.append((b"content-length", b"%d" % len(body)))
        sent += extra
        model = tenant_class = endpoint = ""
        if call is not None:
            tenant_class, endpoint = call.principal.tenant.tenant_class, call.endpoint
            # A name that is not in the catalogue is the client's text, and no label.
            model = "" if self._gate.knows_model(call.model) is None else call.model
        self._metrics.requests.add((endpoint, model, tenant_class, "refused", refuse.reason))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _call_of(
    principal: Principal, endpoint: str, body: Body, said: hints.Hints, received_ms: float
) -> Call:
    return Call(
        principal=principal,
        endpoint=endpoint,
        model=body.model,
        is_stream=body.is_stream,
        prompt_bytes=body.prompt_bytes,
        prefix_bytes=body.prefix,
        tools_digest=body.tools_digest,
        completion_tokens_max=body.completion_tokens_max,
        n=body.sequences,
        workflow=said.workflow,
        step=said.step,
        session=said.session,
        deadline_ms=said.deadline_ms,
        completion_tokens_hint=said.completion_tokens,
        priority_hint=said.priority,
        client_retries=said.client_retries,
        is_single_engine=body.is_single_engine,
        received_ms=received_ms,
    )


async def _read_body(receive: Receive, headers: dict[bytes, bytes]) -> bytes | Flaw:
    """The whole body. One that says it is too large is refused unread, and thrown away as it comes."""
    declared = headers.get(hints.CONTENT_LENGTH, b"")
    if declared.isdigit() and int(declared) > bodies.BODY_BYTES_MAX:
        return _too_large(int(declared))
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _ClientGone
    body: bytes = message["body"]
    if not message["more_body"]:
        return body
    parts = [body]
    size = len(body)
    while message["more_body"]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        part: bytes = message["body"]
        size += len(part)
        if size > bodies.BODY_BYTES_MAX:
            return _too_large(size)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int) -> Flaw:
    return Flaw(
        Refuse(
            Reason.REQUEST_TOO_LARGE,
            f"the body has at least {size} bytes; at most {bodies.BODY_BYTES_MAX} are taken",
        ),
        None,
    )


async def _send_json(send: Send, value: Any) -> None:
    body = msgspec.json.encode(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _never() -> bool:
    return False
