"""The ASGI callable in front of everything: takes the calls of models itself, hands the rest on.

Reads and checks a call, asks the gate, and leaves an accepted one to `exchange`. Every way out that
is not an answer of an engine is an entry of `wire/outcomes.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controlplane.admission.response_cache import StoredAnswer
from controlplane.domain.catalog import Principal
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.outcome import RequestState
from controlplane.gateway import body as bodies
from controlplane.gateway import cached, hints, once
from controlplane.gateway.answer_heads import Lines, id_lines, ticket_lines
from controlplane.gateway.body import Body, Flaw
from controlplane.gateway.cached import CachedAnswers, Deal
from controlplane.gateway.counting import count_answer
from controlplane.gateway.exchange import Exchange, Send
from controlplane.gateway.heartbeat import STREAM_HEAD, Heartbeat
from controlplane.gateway.once import Once
from controlplane.gateway.resume_record import Space
from controlplane.gateway.server import LINK, TURN, Link
from controlplane.gateway.turn import Turn
from controlplane.gateway.upstream import Upstream
from controlplane.runtime.call import Call, monotonic_ms
from controlplane.runtime.idempotency import Idempotency
from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.tracing import CallRecord, Kept, Tracing
from controlplane.wire.openai import model_body, model_list_body
from controlplane.wire.outcomes import error_response, stream_error_event
from policies.evaluate import Terms

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


@dataclass(slots=True)
class Job:
    """One checked call and where it came from. `turn` None: it came by uvicorn's own way."""

    call: Call
    body: Body
    path: bytes
    traceparent: bytes | None
    link: Link | None
    turn: Turn | None


class HotPath:
    """`fallback` serves every path that is not a model's. `tracing` None: no spans are built;
    `idempotency` None: calls with a key are refused.
    """

    def __init__(
        self,
        gate: "Gate",
        upstream: Upstream,
        metrics: Metrics,
        fallback: App,
        *,
        tracing: Tracing | None = None,
        idempotency: Idempotency | None = None,
    ) -> None:
        self._gate = gate
        self._upstream = upstream
        self._metrics = metrics
        self._fallback = fallback
        self._tracing = tracing
        self._once = None if idempotency is None else Once(idempotency, metrics)
        self._cached = CachedAnswers()
        self._space = Space()
        metrics.resume_bytes.watch(lambda: {(): self._space.taken})
        metrics.cache_bytes.watch(lambda: {(): self._cached.cache.bytes})
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
            await self._refuse(
                send, None, Flaw(principal, None), traceparent=headers.get(hints.TRACEPARENT)
            )
            return
        try:
            raw = await _read_body(receive, headers)
        except _ClientGone:
            return
        if isinstance(raw, Flaw):
            await self._refuse(send, None, raw, traceparent=headers.get(hints.TRACEPARENT))
            return
        is_chat = endpoint == "chat"
        body = bodies.parse(raw, is_chat=is_chat)
        if isinstance(body, Flaw):
            await self._refuse(send, None, body, traceparent=headers.get(hints.TRACEPARENT))
            return
        if body.left_out:
            self._count_left_out(body)
        said = hints.read(headers, body.left_out)
        if isinstance(said, Flaw):
            await self._refuse(send, None, said, traceparent=headers.get(hints.TRACEPARENT))
            return
        call = _call_of(principal, endpoint, body, said, received_ms)
        path = scope["path"].encode()
        job = Job(call, body, path, headers.get(hints.TRACEPARENT), link, scope.get(TURN))
        if link is not None:
            link.cancel_on_loss()
        try:
            if said.is_dry_run:
                await self._dry_run(job, send)
            elif said.idempotency_key is not None:
                await self._answer_once(job, said.idempotency_key, send)
            elif body.read.temperature == 0:
                await self._answer(job, send)
            else:
                await self._serve(job, send)
        except asyncio.CancelledError:
            if link is None or not link.is_lost:
                raise
            # The client went away; all that depends on it has been undone.
        finally:
            if link is not None:
                link.keep_on_loss()

    async def _answer(self, job: Job, send: Send) -> bool:
        """Answer a call from the stored answers or by an engine. Whether the client has its answer."""
        if cached.may_repeat(job.body):
            terms = self._gate.cache_terms(job.call)
            # Terms that refuse the call are told by the gate's own decision on it.
            if isinstance(terms, Terms) and terms.is_allowed and terms.cache_ttl_s > 0:
                return await self._answer_shared(job, terms.cache_ttl_s, send)
        exchange = await self._serve(job, send)
        return exchange is not None and exchange.has_answered

    async def _serve(
        self, job: Job, send: Send, extra_head: Lines | None = None
    ) -> Exchange | None:
        """Admit a call and let an engine answer it. None: it was refused, and told so."""
        call, link = job.call, job.link
        heartbeat: Heartbeat | None = None
        if call.is_stream and job.turn is not None:
            heartbeat = Heartbeat(job.turn, self._gate, self._metrics, call)
            call.on_waiting = heartbeat.tell
            if call.request_id is None:
                call.request_id = self._gate.new_id()
        try:
            ticket = await self._gate.admit(call)
        except BaseException:
            if heartbeat is not None and heartbeat.is_open:
                heartbeat.fail(Refuse(Reason.NO_CAPACITY, "the call could not be answered"))
            raise
        finally:
            if heartbeat is not None:
                heartbeat.stop()
        if isinstance(ticket, Refuse):
            await self._refuse(
                send, call, Flaw(ticket, None), heartbeat=heartbeat, traceparent=job.traceparent
            )
            return None
        admitted_ms = monotonic_ms()
        tracing = self._tracing
        exchange = Exchange(
            self._gate,
            self._upstream,
            self._metrics,
            tracing,
            ticket=ticket,
            call=call,
            body=job.body,
            path=job.path,
            send=send,
            trace=None if tracing is None else tracing.context(ticket.id, job.traceparent),
            admitted_ms=admitted_ms,
            is_client_gone=_never if link is None else link.has_gone,
            is_head_sent=heartbeat is not None and heartbeat.is_open,
            extra_head=extra_head,
            space=self._space,
        )
        await exchange.run()
        return exchange

    # ------------------------------------------------------------ without an engine

    async def _answer_shared(self, job: Job, ttl_s: int, send: Send) -> bool:
        tenant_class = job.call.principal.tenant.tenant_class

        async def make(recording: Send) -> Exchange | None:
            self._metrics.cached_answers.add((tenant_class, "miss"))
            return await self._serve(job, recording, [cached.MISS])

        async def give(stored: StoredAnswer) -> bool:
            return await self._give_stored(job, stored, send)

        deal = Deal(cached.key_of(job.call, job.body), ttl_s, make, give)
        return await self._cached.serve(job.call, deal, send)

    async def _give_stored(self, job: Job, stored: StoredAnswer, send: Send) -> bool:
        """A stored answer is a call like others: admitted, charged, settled; only no engine works."""
        call, used = job.call, stored.usage
        ticket = await self._gate.admit_cached(call, used)
        if isinstance(ticket, Refuse):
            await self._refuse(send, call, Flaw(ticket, None), traceparent=job.traceparent)
            return False
        now_ms = monotonic_ms()
        e2e_ms = now_ms - call.received_ms
        ttft_ms = e2e_ms if call.is_stream else None
        state = RequestState.SUCCEEDED
        # Nothing can go wrong any more that would be the call's.
        self._gate.settle(ticket, state, used, None, ttft_ms, None, e2e_ms)
        self._metrics.cached_answers.add((call.principal.tenant.tenant_class, "hit"))
        model = ticket.model.name
        count_answer(self._metrics, call, model, state, "", used, ttft_ms, None, e2e_ms)
        ttl_s = max(0, stored.expires_ms - int(now_ms)) // 1000
        headers = [*ticket_lines(ticket), cached.HIT, (b"x-headway-cache-ttl", b"%d" % ttl_s)]
        await _send_stored(send, call, stored.body, headers)
        return True

    async def _answer_once(self, job: Job, key: str, send: Send) -> None:
        call = job.call
        if self._once is None:
            words = "idempotency keys are not offered here; send the call without one"
            param = hints.IDEMPOTENCY_KEY.decode()
            await self._refuse(send, call, Flaw(Refuse(Reason.INVALID_REQUEST, words), param))
            return
        call.idempotency_key = key
        request_id = call.request_id = self._gate.new_id()

        async def serve(recording: Send) -> bool:
            return await self._answer(job, recording)

        known = await self._once.run(call, request_id, job.body, send, serve)
        if isinstance(known, Refuse):
            await self._refuse(send, call, Flaw(known, None), traceparent=job.traceparent)
        elif known is not None:
            self._metrics.requests.add(
                (call.endpoint, self._model_label(call), call.principal.tenant.tenant_class,
                 RequestState.SUCCEEDED, "")
            )  # fmt: skip
            headers = [*known.headers, once.REPLAY, *self._gate.rate_headers(call)]
            await send({"type": "http.response.start", "status": known.status, "headers": headers})
            await send({"type": "http.response.body", "body": known.body, "more_body": False})

    async def _dry_run(self, job: Job, send: Send) -> None:
        """What would be decided; nothing is reserved, asked or charged."""
        flaw = bodies.flaw_of_parts(job.body)
        if flaw is not None:
            await self._refuse(send, job.call, flaw, traceparent=job.traceparent)
            return
        decided = await self._gate.dry_run(job.call)
        ids = id_lines(self._gate.new_id())
        await _send_json(send, decided, (*ids, (b"x-headway-dry-run", b"true")))

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
        ids = tuple(id_lines(self._gate.new_id()))
        if path == MODELS:
            await _send_json(send, model_list_body(models, self._started_s), ids)
            return
        name = path.removeprefix(MODEL_PREFIX)
        for model in models:
            if model.name == name:
                await _send_json(send, model_body(model, self._started_s), ids)
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
        heartbeat: Heartbeat | None = None,
        traceparent: bytes | None = None,
    ) -> None:
        refuse = flaw.refuse
        decision = self._gate.refused(call, refuse)
        status, headers, body = error_response(refuse, decision, flaw.param)
        if self._tracing is not None:
            self._tracing.ended(
                self._record_of_refusal(call, refuse, decision, status, traceparent)
            )
        sent = [(name.encode(), value.encode()) for name, value in headers]
        sent.append((b"content-length", b"%d" % len(body)))
        sent += extra
        model = tenant_class = endpoint = ""
        if call is not None:
            tenant_class, endpoint = call.principal.tenant.tenant_class, call.endpoint
            sent += self._gate.rate_headers(call)
            model = self._model_label(call)
        self._metrics.requests.add((endpoint, model, tenant_class, "refused", refuse.reason))
        if heartbeat is not None and heartbeat.is_open:
            # The status has been told; what is left is the stream's last event.
            event = stream_error_event(refuse)
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _record_of_refusal(
        self,
        call: Call | None,
        refuse: Refuse,
        request_id: str,
        status: int,
        traceparent: bytes | None,
    ) -> CallRecord:
        """`call` None: it was not understood, and what it was about is not known."""
        assert self._tracing is not None
        now_ms = monotonic_ms()
        model = "" if call is None else self._model_label(call)
        return CallRecord(
            request_id=request_id,
            context=self._tracing.context(request_id, traceparent),
            endpoint="" if call is None else call.endpoint,
            model_asked=model,
            model=model,
            tenant_class="" if call is None else call.principal.tenant.tenant_class,
            # One that does not exist is the client's text.
            workflow=None
            if call is None or refuse.reason is Reason.WORKFLOW_NOT_FOUND
            else call.workflow,
            step=None if call is None else call.step,
            is_stream=call is not None and call.is_stream,
            received_ms=now_ms if call is None else call.received_ms,
            admitted_ms=None,
            queue_ms=0.0,
            ended_ms=now_ms,
            settled_ms=now_ms,
            ttft_ms=None,
            state=Kept.REFUSED,
            reason=refuse.reason,
            rule=refuse.rule,
            status=status,
            is_failure=False,
            attempts=0,
            legs=(),
            gaps=(),
            completion_tokens_max=None if call is None else call.completion_tokens_max,
            choices=1 if call is None else call.n,
            temperature=None,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
        )

    def _model_label(self, call: Call) -> str:
        """A name that is not in the catalogue is the client's text, and no label."""
        return "" if self._gate.knows_model(call.model) is None else call.model


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


async def _send_stored(send: Send, call: Call, body: bytes, headers: Lines) -> None:
    """An answer that was given before, in one piece."""
    if call.is_stream:
        headers += STREAM_HEAD
    else:
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_json(send: Send, value: Any, extra: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    body = msgspec.json.encode(value)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *extra,
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _never() -> bool:
    return False
