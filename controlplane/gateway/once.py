"""Calls with an `Idempotency-Key`: each is run once, and sending it again brings the answer again.

Which key is whose is known to `runtime/idempotency.py`; here it is turned into answers.
"""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import RequestId
from controlplane.gateway.answer_heads import id_lines
from controlplane.gateway.body import Body
from controlplane.gateway.heartbeat import STREAM_HEAD
from controlplane.gateway.recorder import Recorder, Send
from controlplane.runtime.call import Call
from controlplane.runtime.idempotency import (
    ANSWER_BYTES_MAX,
    Answer,
    Done,
    Fresh,
    Idempotency,
    InProgress,
    Mismatch,
)
from controlplane.telemetry.metrics import Metrics

STATE_RETRY_MS: Final = 1_000
REPLAY: Final = (b"x-headway-idempotent-replay", b"true")

_encode = msgspec.json.Encoder().encode

Serve = Callable[[Send], Awaitable[bool]]


class Once:
    """Runs calls that have a key."""

    def __init__(self, idempotency: Idempotency, metrics: Metrics) -> None:
        self._idempotency = idempotency
        self._metrics = metrics

    async def run(
        self, call: Call, request_id: RequestId, body: Body, send: Send, serve: Serve
    ) -> Answer | Refuse | None:
        """Serve a call whose key is fresh, then None; else the answer to replay, or why there is none.

        `serve` says whether the client has got its answer. When it has not, the key is free again.
        """
        key = call.idempotency_key
        assert key is not None
        fresh = Fresh(call.principal.tenant.id, key, body_digest(call, body), request_id)
        try:
            begun = await self._idempotency.begin(*fresh)
        except StateUnavailable:
            self._idempotency.release(fresh)
            return Refuse(
                Reason.STATE_UNAVAILABLE,
                "idempotency keys can not be looked up at present; try again",
                STATE_RETRY_MS,
            )
        except BaseException:
            # Cancelled while the key was perhaps being taken: nobody else could free it.
            self._idempotency.release(fresh)
            raise
        if not isinstance(begun, Fresh):
            return self._known(key, begun)
        self._metrics.idempotent_calls.add(("fresh",))
        recorder = Recorder(send, ANSWER_BYTES_MAX)
        is_answered = False
        try:
            is_answered = await serve(recorder.send)
        finally:
            if is_answered:
                self._idempotency.finish(fresh, _answer(call, request_id, recorder))
            else:
                self._idempotency.release(fresh)
        return None

    def _known(self, key: str, begun: InProgress | Done | Mismatch) -> Answer | Refuse:
        count = self._metrics.idempotent_calls.add
        match begun:
            case InProgress(request_id, retry_after_ms):
                count(("in_progress",))
                return Refuse(
                    Reason.IDEMPOTENCY_IN_PROGRESS,
                    f"the call with the key `{key}` is under way as `{request_id}`; come back later",
                    retry_after_ms,
                )
            case Mismatch(request_id):
                count(("mismatch",))
                return Refuse(
                    Reason.IDEMPOTENCY_MISMATCH,
                    f"the key `{key}` belongs to `{request_id}`, whose body was another one;"
                    " take another key for another call",
                )
            case Done(request_id, None):
                count(("not_stored",))
                return Refuse(
                    Reason.RESPONSE_NOT_STORED,
                    f"the call with the key `{key}` succeeded as `{request_id}`, and its answer is"
                    " not kept here; take another key to run it again",
                )
            case Done(_, answer):
                count(("replayed",))
                assert answer is not None
                return answer


def body_digest(call: Call, body: Body) -> bytes:
    """What must be the same when a key is sent again: the endpoint and every member of the body."""
    members = sorted((body.members | body.left_out).items())
    return hashlib.sha256(_encode([call.endpoint, dict(members)])).digest()


def _answer(call: Call, request_id: RequestId, recorder: Recorder) -> Answer | None:
    """The answer as it is told again; what headers say of that moment is left out."""
    body = recorder.body
    if body is None:
        return None
    head = (
        STREAM_HEAD
        if call.is_stream
        else (
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        )
    )
    return Answer(recorder.status, (*head, *id_lines(request_id)), body)
