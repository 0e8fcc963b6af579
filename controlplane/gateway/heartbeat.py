"""Signs of life of a stream that waits for a seat: comments, which no client takes for a part of the answer.

The first one sends the head, so from then on the status is 200, and whatever goes wrong is told by the
stream's last event. No event here has an id: with one, clients would take a comment for an event.
"""

from typing import TYPE_CHECKING, Final

from controlplane.domain.decision import Refuse
from controlplane.gateway.answer_heads import id_lines
from controlplane.gateway.turn import Turn
from controlplane.runtime.call import Call
from controlplane.telemetry.metrics import Metrics
from controlplane.wire.outcomes import stream_error_event

if TYPE_CHECKING:
    from controlplane.runtime.admit import Gate

STREAM_HEAD: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Heartbeat:
    """Of one waiting stream. `is_open`: the head has been sent."""

    __slots__ = ("_call", "_gate", "_is_waiting", "_metrics", "_turn", "is_open")

    def __init__(self, turn: Turn, gate: "Gate", metrics: Metrics, call: Call) -> None:
        self._turn = turn
        self._gate = gate
        self._metrics = metrics
        self._call = call
        self._is_waiting = True
        self.is_open = False

    def tell(self, position: int, wait_ms: int) -> None:
        """The call is the `position`-th in line. Never waits: a client that does not read misses it."""
        turn = self._turn
        if not self._is_waiting or (not self.is_open and not self._open(position, wait_ms)):
            return
        comment = b": queued position=%d wait_ms=%d\n\n" % (position, wait_ms)
        if turn.send_now({"type": "http.response.body", "body": comment, "more_body": True}):
            self._metrics.heartbeats.add((self._call.model,))

    def stop(self) -> None:
        """The call waits no more; what comes now is the answer's."""
        self._is_waiting = False
        # The two hold each other, and a call holds its prompt: no work for the garbage collector.
        self._call.on_waiting = None

    def fail(self, refuse: Refuse) -> None:
        """End a stream that was opened, and that nobody is going to answer."""
        event = stream_error_event(refuse)
        self._turn.send_now({"type": "http.response.body", "body": event, "more_body": False})

    def _open(self, position: int, wait_ms: int) -> bool:
        call = self._call
        headers = [
            *STREAM_HEAD,
            (b"x-headway-queue-position", b"%d" % position),
            (b"x-headway-predicted-wait-ms", b"%d" % wait_ms),
            *self._gate.rate_headers(call),
        ]
        if call.request_id is not None:
            headers += id_lines(call.request_id)
        self.is_open = self._turn.send_now(
            {"type": "http.response.start", "status": 200, "headers": headers}
        )
        return self.is_open
