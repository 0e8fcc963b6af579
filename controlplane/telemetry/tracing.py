"""Which calls leave a trace, and under which ids.

A call is kept when its client's `traceparent` says so, by a share of the others, and always when it was
refused, failed, was slow or lost an engine: that is known when it has ended, and until then nothing is built.
Ids follow from the request id, so that engines can be told of spans that do not exist yet. Knows nothing of how
spans are made (`spans.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import xxhash

TRACEPARENT_CHARS: Final = 55
# Engine calls of one request that have span ids of their own; further ones share the last.
LEGS_TOLD_MAX: Final = 64
MILLISECONDS_PER_SECOND: Final = 1_000.0
_SAMPLED: Final = 0x01
_HEX: Final = frozenset("0123456789abcdef")
_SAMPLING_STEPS: Final = 10_000
# Seeds of the hash that makes span ids: the request's own, then one for each engine call.
_ROOT_SEED: Final = 1
_LEG_SEED: Final = 16


class Kept(StrEnum):
    """Why a call leaves a trace and a line in the log."""

    SAMPLED = "sampled"
    REFUSED = "refused"
    FAILED = "failed"
    RESUMED = "resumed"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`ratio` in 0..1 is the share of calls that are kept when nothing else says so. A call is slow that took
    `slow_ms` to its end or `ttft_slow_ms` to its first token. At most `kept_per_s_max` calls a second are
    kept for what became of them: a storm of refusals must not become one of spans.
    """

    ratio: float = 0.0
    slow_ms: float = 10_000.0
    ttft_slow_ms: float = 2_000.0
    kept_per_s_max: float = 100.0


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids of one request's span: the trace, the client's span (0: none), and ours."""

    trace_id: int
    parent_id: int
    span_id: int
    is_sampled: bool

    @property
    def exemplar(self) -> str:
        """The trace as a metric's exemplar names it; empty when nobody keeps its spans."""
        return f"{self.trace_id:032x}" if self.is_sampled else ""

    def traceparent(self, span_id: int) -> bytes:
        """What an engine is told: `span_id`, our span of the call to it, is the parent of its own."""
        flags = "01" if self.is_sampled else "00"
        return f"00-{self.trace_id:032x}-{span_id:016x}-{flags}".encode()


# Not frozen: these are made on the request path, and setting members through a guard costs.
@dataclass(slots=True, kw_only=True)
class Leg:
    """One call of an engine. Milliseconds of the monotonic clock; `is_ok`: it ended as it should."""

    name: str
    engine: str
    host: str
    port: int
    span_id: int
    start_ms: float
    end_ms: float
    outcome: str
    is_ok: bool
    detail: str


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """What a call leaves behind when it has ended: instants and facts, nothing of prompt, answer or key.

    Milliseconds of the monotonic clock, None where there is no such instant. `admitted_ms`: it had an engine,
    of which `queue_ms` were spent in line. `settled_ms`: its money was settled, which began at `ended_ms`.
    `gaps` are the times in which a stream had no engine. `status` is what its client was told.
    """

    request_id: str
    context: TraceContext | None
    endpoint: str
    model_asked: str
    model: str
    tenant_class: str
    workflow: str | None
    step: int | None
    is_stream: bool
    received_ms: float
    admitted_ms: float | None
    queue_ms: float
    ended_ms: float
    settled_ms: float
    ttft_ms: float | None
    state: str
    reason: str
    rule: str
    status: int
    is_failure: bool
    attempts: int
    legs: tuple[Leg, ...]
    gaps: tuple[tuple[str, float, float], ...]
    completion_tokens_max: int | None
    choices: int
    temperature: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kept: str = ""


class Records(Protocol):
    """Where records of kept calls go; taking one only lays it aside."""

    def offer(self, record: CallRecord) -> None: ...


class Tracing:
    """Decides what is kept, and hands its records on. `is_exporting`: spans are built of them, so engines are told of
    ours also when the client told nothing.
    """

    def __init__(
        self,
        records: Records | None,
        sampling: Sampling,
        *,
        is_exporting: bool,
        now_ms: Callable[[], float],
        count: Callable[[tuple[str]], Any],
    ) -> None:
        self._records = records
        self._sampling = sampling
        self._is_exporting = is_exporting
        self._threshold = int(sampling.ratio * _SAMPLING_STEPS)
        self._now_ms = now_ms
        self._count = count
        # What may be kept for its end: a bucket that holds a second's worth.
        self._allowance = sampling.kept_per_s_max
        self._allowed_ms = now_ms()

    def context(self, request_id: str, traceparent: bytes | None) -> TraceContext | None:
        """The request's place in a trace; None when nothing would be told or built."""
        parent = None if traceparent is None else _parse(traceparent)
        if parent is not None:
            trace_id, parent_id, is_sampled = parent
            return TraceContext(trace_id, parent_id, _span_id(request_id, _ROOT_SEED), is_sampled)
        if not self._is_exporting:
            return None
        text = request_id.encode()
        is_sampled = xxhash.xxh3_64_intdigest(text) % _SAMPLING_STEPS < self._threshold
        trace_id = xxhash.xxh3_128_intdigest(text) or 1
        return TraceContext(trace_id, 0, _span_id(request_id, _ROOT_SEED), is_sampled)

    def ended(self, record: CallRecord) -> None:
        """A call has ended: lay its record aside if it is to be kept."""
        if self._records is None:
            return
        kept = self._why(record)
        if kept is None:
            return
        if kept is not Kept.SAMPLED and not self._is_allowed():
            self._count(("over_limit",))
            return
        record.kept = kept
        self._count((kept,))
        self._records.offer(record)

    def why(
        self,
        context: TraceContext | None,
        *,
        is_failure: bool,
        is_resumed: bool,
        e2e_ms: float,
        ttft_ms: float | None,
    ) -> Kept | None:
        """Why an accepted call would be kept; None: nobody needs to write its record. Milliseconds."""
        if is_failure:
            return Kept.FAILED
        if is_resumed:
            return Kept.RESUMED
        sampling = self._sampling
        if e2e_ms >= sampling.slow_ms or (ttft_ms is not None and ttft_ms >= sampling.ttft_slow_ms):
            return Kept.SLOW
        if context is not None and context.is_sampled:
            return Kept.SAMPLED
        return None

    def _why(self, record: CallRecord) -> Kept | None:
        if record.state == Kept.REFUSED:
            return Kept.REFUSED
        return self.why(
            record.context,
            is_failure=record.is_failure,
            is_resumed=bool(record.gaps),
            e2e_ms=record.ended_ms - record.received_ms,
            ttft_ms=record.ttft_ms,
        )

    def _is_allowed(self) -> bool:
        most = self._sampling.kept_per_s_max
        now_ms = self._now_ms()
        gained = (now_ms - self._allowed_ms) * most / MILLISECONDS_PER_SECOND
        self._allowance = min(max(most, 1.0), self._allowance + gained)
        self._allowed_ms = now_ms
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True


def leg_span_id(request_id: str, number: int) -> int:
    """The span of the request's engine call `number`, counted from 0."""
    return _span_id(request_id, _LEG_SEED + min(number, LEGS_TOLD_MAX))


def _span_id(request_id: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(request_id.encode(), seed) or 1


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
