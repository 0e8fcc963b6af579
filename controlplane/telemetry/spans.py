"""Spans and log lines of calls that have ended, made in a thread of its own from the records that they left.

Attributes follow OpenTelemetry's GenAI conventions where those have a name; the others begin with `headway.`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import xxhash
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from controlplane.telemetry.tracing import CallRecord, Kept, Leg, TraceContext

SCOPE: Final = "headway"
PROVIDER: Final = "headway"
# Records that wait to be made into spans; a further one is lost, and counted.
RECORDS_MAX: Final = 4_096
PAUSE_S: Final = 0.2
END_S_MAX: Final = 5.0
NANOSECONDS_PER_MILLISECOND: Final = 1e6
DETAIL_CHARACTERS_MAX: Final = 200
SERVER_ERROR: Final = 500

# The conventions' word for what an endpoint does; another one is its own.
OPERATIONS: Final = {"chat": "chat", "completions": "text_completion"}

Attributes = dict[str, str | int | float | bool]

log = logging.getLogger(__name__)


class SpanSink(Protocol):
    """Where finished spans go: a span processor of the SDK's."""

    def on_end(self, span: ReadableSpan) -> None: ...
    def shutdown(self) -> None: ...


class SpanMaker:
    """Takes records from the event loop, and makes of each one line in the log and, with a `sink`, its spans."""

    def __init__(
        self, sink: SpanSink | None, resource: Resource, count: Callable[[tuple[str]], Any]
    ) -> None:
        self._sink = sink
        self._resource = resource
        self._count = count
        self._scope = InstrumentationScope(SCOPE)
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self._records: deque[CallRecord] = deque()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def offer(self, record: CallRecord) -> None:
        """Called on the request path: nothing is woken, nothing waits."""
        if len(self._records) >= RECORDS_MAX:
            self._count(("lost",))
            return
        self._records.append(record)

    def shutdown(self) -> None:
        """Make what is left, hand it over, and end."""
        self._is_ending.set()
        self._thread.join(END_S_MAX)
        if self._sink is not None:
            self._sink.shutdown()

    def _run(self) -> None:
        while not self._is_ending.wait(PAUSE_S):
            self._make_all()
        self._make_all()

    def _make_all(self) -> None:
        records = self._records
        while records:
            record = records.popleft()
            try:
                _log(record)
                if self._sink is not None and record.context is not None:
                    for span in self._spans(record, record.context):
                        self._sink.on_end(span)
            except Exception:
                # The outermost frame of this thread: one record that can not be told must not end it.
                log.exception("spans_failed")
            # Others run between two records: making one takes long for an event loop that waits.
            time.sleep(0)

    def _spans(self, record: CallRecord, context: TraceContext) -> Iterator[ReadableSpan]:
        flags = TraceFlags(TraceFlags.SAMPLED)

        def ids(span_id: int, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(context.trace_id, span_id, is_remote=is_remote, trace_flags=flags)

        server = ids(context.span_id)
        for name, start_ms, end_ms, attributes in _inner_stages(record):
            own = xxhash.xxh3_64_intdigest(f"{record.request_id} {name}".encode()) or 1
            yield self._span(
                name, ids(own), server, SpanKind.INTERNAL, start_ms, end_ms, attributes
            )
        for leg in record.legs:
            yield self._span(
                f"engine {leg.name}",
                ids(leg.span_id),
                server,
                SpanKind.CLIENT,
                leg.start_ms,
                leg.end_ms,
                _of_leg(leg, record),
                is_error=not leg.is_ok,
            )
        parent = ids(context.parent_id, is_remote=True) if context.parent_id else None
        is_error = record.is_failure or record.status >= SERVER_ERROR
        yield self._span(
            _name(record), server, parent, SpanKind.SERVER, record.received_ms, record.settled_ms,
            _of_call(record), is_error=is_error,
        )  # fmt: skip

    def _span(
        self,
        name: str,
        ids: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        start_ms: float,
        end_ms: float,
        attributes: Attributes,
        *,
        is_error: bool = False,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=ids,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(StatusCode.ERROR if is_error else StatusCode.UNSET),
            start_time=self._wall_ns(start_ms),
            end_time=self._wall_ns(max(start_ms, end_ms)),
            instrumentation_scope=self._scope,
        )

    def _wall_ns(self, monotonic_ms: float) -> int:
        return int(monotonic_ms * NANOSECONDS_PER_MILLISECOND) + self._wall_offset_ns


def _inner_stages(record: CallRecord) -> Iterator[tuple[str, float, float, Attributes]]:
    """What happened inside of this program, in its order."""
    end_ms = record.ended_ms if record.admitted_ms is None else record.admitted_ms
    queued_ms = end_ms - record.queue_ms
    decided: Attributes = {"headway.verdict": "admit"}
    if record.state == Kept.REFUSED:
        decided = {"headway.verdict": "refuse", "headway.reason": record.reason}
        if record.rule:
            decided["headway.rule"] = record.rule
    yield "admission", record.received_ms, queued_ms, decided
    if record.queue_ms:
        yield "queue", queued_ms, end_ms, {"headway.queue_ms": record.queue_ms}
    for number, (resume_class, lost_ms, resumed_ms) in enumerate(record.gaps):
        yield f"resume {number + 1}", lost_ms, resumed_ms, {"headway.resume_class": resume_class}
    if record.admitted_ms is not None:
        settled: Attributes = {
            "headway.outcome": record.state,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
        }
        yield "settlement", record.ended_ms, record.settled_ms, settled


def _name(record: CallRecord) -> str:
    operation = OPERATIONS.get(record.endpoint, record.endpoint)
    return f"{operation} {record.model}".strip() or "refused"


def _of_call(record: CallRecord) -> Attributes:
    attributes: Attributes = {
        "gen_ai.provider.name": PROVIDER,
        "http.response.status_code": record.status,
        "headway.request": record.request_id,
        "headway.outcome": record.state,
        "headway.kept": record.kept,
    }
    known: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint, record.endpoint),
        "gen_ai.request.model": record.model_asked,
        "gen_ai.response.model": record.model,
        "gen_ai.request.max_tokens": record.completion_tokens_max,
        "gen_ai.request.temperature": record.temperature,
        "headway.tenant_class": record.tenant_class,
        "headway.workflow": record.workflow,
        "headway.step": record.step,
        "headway.ttft_ms": record.ttft_ms,
        "headway.reason": record.reason,
        "headway.rule": record.rule,
        "error.type": record.reason,
    }
    attributes |= {name: value for name, value in known.items() if value not in (None, "")}
    if record.choices > 1:
        attributes["gen_ai.request.choice.count"] = record.choices
    if record.admitted_ms is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "headway.is_stream": record.is_stream,
            "headway.queue_ms": record.queue_ms,
            "headway.attempts": record.attempts,
            "headway.resumes": len(record.gaps),
        }
    return attributes


def _of_leg(leg: Leg, record: CallRecord) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint, record.endpoint),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": record.model,
        "server.address": leg.host,
        "server.port": leg.port,
        "headway.engine": leg.engine,
        "headway.leg": leg.name,
        "headway.outcome": leg.outcome,
    }
    if not leg.is_ok:
        attributes["error.type"] = leg.outcome
        attributes["headway.detail"] = leg.detail[:DETAIL_CHARACTERS_MAX]
    return attributes


def _log(record: CallRecord) -> None:
    """One line for the call, under the ids by which its trace and its explanation are found."""
    level = logging.WARNING if record.is_failure else logging.INFO
    trace = None if record.context is None else f"{record.context.trace_id:032x}"
    log.log(
        level,
        "call_ended",
        extra={
            "fields": {
                "request": record.request_id,
                "trace": trace,
                "endpoint": record.endpoint or None,
                "model": record.model or None,
                "tenant_class": record.tenant_class or None,
                "workflow": record.workflow,
                "state": str(record.state),
                "reason": str(record.reason) or None,
                "status": record.status,
                "duration_ms": round(record.ended_ms - record.received_ms, 1),
                "attempt": record.attempts,
                "kept": record.kept,
            }
        },
    )
