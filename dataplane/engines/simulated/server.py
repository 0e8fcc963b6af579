"""The HTTP surface: a plain ASGI callable, and a protocol class that tells a request when its
client is gone.

Few Python steps per token: one `send` per delivery, no task and no queue per request.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dataplane.engines.simulated.batching import Finish
from dataplane.engines.simulated.controls import EngineControls
from dataplane.engines.simulated.faults import Death, ErrorRate, Faults
from dataplane.engines.simulated.loop import HANG_POLL_S, Answer, Engine
from dataplane.engines.simulated.text import (
    chat_tokens,
    id_tokens,
    text_tokens,
    token_ids,
)
from dataplane.engines.simulated.transfer import PULL_PATH, RENEW_PATH, PullRequest
from dataplane.engines.simulated.wire import (
    ChatBody,
    ChunkWriter,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    WireError,
    check_model,
    make_answer,
    transfer_params,
    whole_answer,
)

VERSION = "0.32.0-simulated"
BODY_BYTES_MAX = 64 * 1024 * 1024
# Keys of the ASGI scope that EngineProtocol fills in or reads.
TRANSPORT = "simulated.transport"
ON_DISCONNECT = "simulated.on_disconnect"

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_PLAIN = (b"content-type", b"text/plain; charset=utf-8")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_LOAD_FAILED = "The KV of the prompt could not be loaded."
_BUSY = "The engine is currently busy and cannot accept new requests. Please try again later."

_MISSING = re.compile(r"Object missing required field `(\w+)`")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_chat_body = msgspec.json.Decoder(ChatBody)
_completion_body = msgspec.json.Decoder(CompletionBody)


class EngineProtocol(HttpToolsProtocol):
    """Puts the transport into the scope, and calls back when it closes under an unfinished
    answer.
    """

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("Scope", self.scope)[TRANSPORT] = self.transport

    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            on_disconnect = cast("Scope", cycle.scope).get(ON_DISCONNECT)
            if on_disconnect is not None:
                on_disconnect()


class Dropped(Exception):
    """The connection was closed on purpose."""


class Server:
    """One engine's routes. `host` and `port` are where other engines reach it."""

    def __init__(self, engine: Engine, host: str, port: int) -> None:
        self._engine = engine
        self._host = host
        self._port = port
        self._created = int(time.time())
        self._numbers = count(1)
        self._error_rate = ErrorRate()
        self._controls = EngineControls(engine)
        self._routes = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", PULL_PATH): self._pull,
            ("POST", RENEW_PATH): self._renew,
        }
        self._routes |= dict.fromkeys(self._controls.routes, self._control)
        if engine.options.allow_faults:
            self._routes["POST", "/fault"] = self._fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            is_known = any(path == scope["path"] for _, path in self._routes)
            status, words = (405, "Method Not Allowed") if is_known else (404, "Not Found")
            await _respond(send, status, _JSON, msgspec.json.encode({"detail": words}))
            return
        try:
            await route(scope, receive, send)
        except WireError as error:
            await _respond(send, error.status, _JSON, error.body())
        except Dropped:
            scope[TRANSPORT].close()

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _decode(_chat_body, await _read(receive))
        await self._generate(body, "chatcmpl", scope, send)

    async def _completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _decode(_completion_body, await _read(receive))
        await self._generate(body, "cmpl", scope, send)

    async def _generate(
        self, body: ChatBody | CompletionBody, prefix: str, scope: Scope, send: Send
    ) -> None:
        engine = self._engine
        faults = engine.faults
        if faults.drop_before_first_byte:
            raise Dropped
        if body.model not in self._controls.adapters:
            check_model(body.model, engine.model)
        if engine.death is not Death.NONE and engine.death is not Death.ABORT:
            raise Dropped
        if faults.error_rate and self._error_rate.strikes(faults.error_rate):
            raise WireError(500, "EngineCore encountered an issue. See stack trace for the cause.")
        queued_max = engine.options.max_num_queued_reqs
        if faults.refuse or (queued_max and engine.in_flight >= queued_max):
            engine.metrics.rejections += 1
            raise WireError(503, _BUSY, kind="ServiceUnavailableError")
        name = _header(scope, b"x-request-id") or f"{self._created}{next(self._numbers)}"
        request_id = f"{prefix}-{name}"
        answer = make_answer(body, request_id, engine.options)
        if answer.sequences[0].is_pinned:
            # A client may repeat an id; what waits for its pull must stay apart.
            answer.request_id = f"{request_id}-{next(self._numbers)}"
        session = _header(scope, b"x-session-id")
        for sequence in answer.sequences:
            sequence.session = session
        scope[ON_DISCONNECT] = lambda: engine.cancel(answer)
        engine.submit(answer)
        if body.stream:
            await self._stream(answer, body, scope, send)
        else:
            await self._whole(answer, body, send)

    async def _whole(self, answer: Answer, body: ChatBody | CompletionBody, send: Send) -> None:
        engine = self._engine
        while not answer.is_done:
            await answer.wait()
            if engine.death is Death.ABORT:
                engine.abort(answer)
            elif engine.death is not Death.NONE:
                engine.cancel(answer)
                raise Dropped
            self._check_cut(answer)
            if 0 < engine.faults.error_after_tokens <= answer.generated:
                engine.cancel(answer)
                raise WireError(
                    500, "EngineCore encountered an issue. See stack trace for the cause."
                )
        if answer.is_cancelled:
            return
        if any(sequence.finish is Finish.ERROR for sequence in answer.sequences):
            raise WireError(500, _LOAD_FAILED)
        params = transfer_params(answer, self._host, self._port, engine.gpus)
        if engine.faults.kv_withheld:
            params = None
        if engine.faults.kv_finish_reason and answer.sequences[0].is_pinned:
            answer.sequences[0].finish = Finish(engine.faults.kv_finish_reason)
        data = whole_answer(
            answer,
            is_chat=isinstance(body, ChatBody),
            created=int(time.time()),
            model=engine.model,
            params=params,
            has_token_ids=bool(body.return_token_ids),
        )
        await _respond(send, 200, _JSON, data)

    async def _stream(
        self, answer: Answer, body: ChatBody | CompletionBody, scope: Scope, send: Send
    ) -> None:
        engine = self._engine
        faults = engine.faults
        writer = ChunkWriter(answer, body, int(time.time()), engine.model)
        await send({"type": "http.response.start", "status": 200, "headers": [_SSE]})
        while True:
            if engine.death is Death.NONE:
                await answer.wait()
            if answer.is_cancelled:
                return
            if engine.death is not Death.NONE and not answer.is_done:
                await self._die(answer, writer, scope, send)
                return
            if 0 < faults.cut_after_tokens <= answer.generated:
                data = writer.take(faults.cut_after_tokens)
                await send({"type": "http.response.body", "body": data, "more_body": True})
                engine.cancel(answer)
                scope[TRANSPORT].close()
                return
            if 0 < faults.error_after_tokens <= answer.generated:
                engine.cancel(answer)
                error = WireError(500, "EngineCore encountered an issue.")
                data = writer.take() + b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": False})
                return
            if any(sequence.finish is Finish.ERROR for sequence in answer.sequences):
                data = b"data: " + WireError(500, _LOAD_FAILED).body() + b"\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": False})
                return
            data = writer.take()
            if answer.is_done:
                data += writer.ending()
                await send({"type": "http.response.body", "body": data, "more_body": False})
                return
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _die(self, answer: Answer, writer: ChunkWriter, scope: Scope, send: Send) -> None:
        """End a stream in the way in which its engine died."""
        engine = self._engine
        match engine.death:
            case Death.ABORT:
                engine.abort(answer)
                data = writer.take() + writer.ending()
            case Death.ERROR:
                error = WireError(500, "EngineCore encountered an issue.")
                data = writer.take() + b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"
            case Death.DONE:
                data = b"data: [DONE]\n\n"
            case Death.EOF:
                data = b""
            case _:
                if engine.death is Death.SILENT and writer.has_begun:
                    while engine.death is Death.SILENT and not answer.is_cancelled:
                        await answer.wait()
                engine.cancel(answer)
                scope[TRANSPORT].close()
                return
        engine.cancel(answer)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _check_cut(self, answer: Answer) -> None:
        if 0 < self._engine.faults.cut_after_tokens <= answer.generated:
            self._engine.cancel(answer)
            raise Dropped

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        model = self._engine.model
        card = {
            "id": model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": model,
            "parent": None,
            "max_model_len": self._engine.options.context_tokens_max,
            "permission": [],
        }
        adapters = [
            {**card, "id": name, "root": path, "parent": model, "max_model_len": None}
            for name, path in self._controls.adapters.items()
        ]
        data = msgspec.json.encode({"object": "list", "data": [card, *adapters]})
        await _respond(send, 200, _JSON, data)

    async def _health(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _respond(send, 200, _JSON, b"")

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _respond(send, 200, _TEXT, self._engine.exposition())

    async def _version(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _respond(send, 200, _JSON, msgspec.json.encode({"version": VERSION}))

    async def _tokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = _decode(msgspec.json.Decoder(TokenizeBody), await _read(receive))
        check_model(body.model, self._engine.model)
        if body.messages is not None:
            tokens = token_ids(chat_tokens(body.messages, b""))
        else:
            tokens = token_ids(text_tokens(body.prompt or ""))
        reply = {
            "count": len(tokens),
            "max_model_len": self._engine.options.context_tokens_max,
            "tokens": tokens,
            "token_strs": None,
        }
        await _respond(send, 200, _JSON, msgspec.json.encode(reply))

    async def _detokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = _decode(msgspec.json.Decoder(DetokenizeBody), await _read(receive))
        check_model(body.model, self._engine.model)
        if self._engine.death is not Death.NONE:
            raise Dropped
        text = id_tokens(body.tokens).decode(errors="replace")
        await _respond(send, 200, _JSON, msgspec.json.encode({"prompt": text}))

    async def _pull(self, _scope: Scope, receive: Receive, send: Send) -> None:
        request = _decode(msgspec.json.Decoder(PullRequest), await _read(receive))
        while self._engine.faults.kv_unreachable:
            await asyncio.sleep(HANG_POLL_S)
        reply = self._engine.hand_over(request)
        await _respond(send, 200, _JSON, msgspec.json.encode(reply))

    async def _renew(self, _scope: Scope, receive: Receive, send: Send) -> None:
        request = _decode(msgspec.json.Decoder(PullRequest), await _read(receive))
        is_held = self._engine.leases.renew(request.remote_request_id, time.perf_counter())
        await _respond(send, 200, _JSON, msgspec.json.encode({"is_held": is_held}))

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._controls.routes[scope["method"], scope["path"]]
        status, is_json, body = await answer(scope, await _read(receive))
        await _respond(send, status, _JSON if is_json else _PLAIN, body)

    async def _fault(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self._engine.use_faults(_decode(msgspec.json.Decoder(Faults), await _read(receive)))
        await _respond(send, 200, _JSON, msgspec.json.encode(self._engine.faults))


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        missing = _MISSING.match(str(error))
        param = f"body.{missing[1]}" if missing else None
        raise WireError(400, str(error), param, kind="Bad Request") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(400, str(error), kind="Bad Request") from error


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def _read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts = bytearray(body)
    while message.get("more_body"):
        message = await receive()
        parts += message.get("body", b"")
        if len(parts) > BODY_BYTES_MAX:
            raise WireError(413, f"The body is over {BODY_BYTES_MAX} bytes.")
    return bytes(parts)


async def _respond(send: Send, status: int, kind: tuple[bytes, bytes], body: bytes) -> None:
    headers = [kind, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
