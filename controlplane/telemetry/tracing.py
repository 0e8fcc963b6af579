"""Spans of sampled requests, built from instants when a request has ended.

A request is sampled when its client's `traceparent` says so, else by a hash of its id. The engine
gets a `traceparent` that names this gateway's span, whose ids are derived from the request id, so
that nothing needs to be remembered between the call of the engine and the building of the spans.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import xxhash
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

SCOPE = "headway"
TRACEPARENT_CHARS = 55
_SAMPLED = 0x01
_HEX = frozenset("0123456789abcdef")
_SAMPLING_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids of one request's span: the trace, the client's span (0: none), and ours."""

    trace_id: int
    parent_id: int
    span_id: int
    is_sampled: bool

    def traceparent(self) -> bytes:
        """What the engine is told: our span is the parent of its own."""
        flags = "01" if self.is_sampled else "00"
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{flags}".encode()


@dataclass(frozen=True, slots=True)
class Stage:
    """One timed part of a request, in milliseconds of the monotonic clock."""

    name: str
    start_ms: float
    end_ms: float
    attributes: dict[str, str | int | float | bool]
    is_error: bool = False


class SpanSink(Protocol):
    """Where finished spans go: a span processor of the SDK's."""

    def on_end(self, span: ReadableSpan) -> None: ...
    def shutdown(self) -> None: ...


class Tracing:
    """Decides what is sampled, and hands finished spans to `sink`. Without a sink nothing is built.

    `ratio` in 0..1 is the share of requests sampled when the client's `traceparent` says nothing.
    """

    def __init__(self, sink: SpanSink | None, resource: Resource, ratio: float) -> None:
        self._sink = sink
        self._resource = resource
        self._threshold = int(ratio * _SAMPLING_STEPS)
        self._scope = InstrumentationScope(SCOPE)
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def context(self, request_id: str, traceparent: bytes | None) -> TraceContext | None:
        """The request's place in a trace; None when nothing would be told or built."""
        parent = None if traceparent is None else _parse(traceparent)
        if parent is not None:
            trace_id, parent_id, is_sampled = parent
            return TraceContext(trace_id, parent_id, _span_id(request_id), is_sampled)
        if self._sink is None or not self._threshold:
            return None
        if xxhash.xxh3_64_intdigest(request_id.encode()) % _SAMPLING_STEPS >= self._threshold:
            return None
        trace_id = xxhash.xxh3_128_intdigest(request_id.encode()) or 1
        return TraceContext(trace_id, 0, _span_id(request_id), is_sampled=True)

    def finish(self, context: TraceContext, root: Stage, children: tuple[Stage, ...]) -> None:
        """Build the spans of one ended request: a server span, a client span per engine call."""
        if self._sink is None or not context.is_sampled:
            return
        flags = TraceFlags(_SAMPLED)
        server = SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=flags)
        parent = (
            SpanContext(context.trace_id, context.parent_id, is_remote=True, trace_flags=flags)
            if context.parent_id
            else None
        )
        for number, stage in enumerate(children, start=1):
            ids = SpanContext(
                context.trace_id,
                (context.span_id + number) % 2**64 or 1,
                is_remote=False,
                trace_flags=flags,
            )
            self._sink.on_end(self._span(stage, ids, server, SpanKind.CLIENT))
        self._sink.on_end(self._span(root, server, parent, SpanKind.SERVER))

    def shutdown(self) -> None:
        if self._sink is not None:
            self._sink.shutdown()

    def _span(
        self, stage: Stage, ids: SpanContext, parent: SpanContext | None, kind: SpanKind
    ) -> ReadableSpan:
        return ReadableSpan(
            stage.name,
            context=ids,
            parent=parent,
            resource=self._resource,
            attributes=stage.attributes,
            kind=kind,
            status=Status(StatusCode.ERROR if stage.is_error else StatusCode.UNSET),
            start_time=self._wall_ns(stage.start_ms),
            end_time=self._wall_ns(stage.end_ms),
            instrumentation_scope=self._scope,
        )

    def _wall_ns(self, monotonic_ms: float) -> int:
        return int(monotonic_ms * 1e6) + self._wall_offset_ns


def _span_id(request_id: str) -> int:
    return xxhash.xxh3_64_intdigest(request_id.encode(), 1) or 1


def _parse(header: bytes) -> tuple[int, int, bool] | None:
    """Trace id, span id and sampled flag of a version 00 `traceparent`; None when it is not one."""
    text = header.decode("latin-1")
    if len(text) != TRACEPARENT_CHARS or not text.startswith("00-"):
        return None
    if text[35] != "-" or text[52] != "-":
        return None
    trace, span, flags = text[3:35], text[36:52], text[53:55]
    if not _HEX.issuperset(trace + span + flags):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not trace_id or not span_id:
        return None
    return trace_id, span_id, bool(int(flags, 16) & _SAMPLED)
