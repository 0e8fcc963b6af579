"""What of a call is kept, which ids it has, and the spans and the line that are made of its record."""

import json
import logging
from collections import Counter
from dataclasses import replace

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from controlplane.telemetry.spans import SpanMaker
from controlplane.telemetry.tracing import CallRecord, Leg, Sampling, Tracing, leg_span_id

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
EVERYTHING = Sampling(ratio=1.0)


class Laid:
    """Records that were handed on."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []

    def offer(self, record: CallRecord) -> None:
        self.records.append(record)


class Kept:
    """A sink that keeps spans in memory."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def shutdown(self) -> None:
        pass


class World:
    def __init__(self, sampling: Sampling, *, is_exporting: bool = True) -> None:
        self.laid = Laid()
        self.counts: Counter[str] = Counter()
        self.now_ms = 0.0
        self.tracing = Tracing(
            self.laid,
            sampling,
            is_exporting=is_exporting,
            now_ms=lambda: self.now_ms,
            count=self.counts.update,
        )


def record(**changes: object) -> CallRecord:
    whole = CallRecord(
        request_id="req-1", context=None, endpoint="chat", model_asked="auto:x", model="m",
        tenant_class="gold", workflow="wf-1", step=2, is_stream=True, received_ms=1_000.0,
        admitted_ms=1_150.0, queue_ms=100.0, ended_ms=1_900.0, settled_ms=1_901.0, ttft_ms=400.0,
        state="succeeded", reason="", rule="", status=200, is_failure=False, attempts=1, legs=(), gaps=(),
        completion_tokens_max=64, choices=1, temperature=0.5, prompt_tokens=10, cached_tokens=4,
        completion_tokens=20,
    )  # fmt: skip
    return replace(whole, **changes)


def header(flags: str = "01") -> bytes:
    return f"00-{TRACE}-{SPAN}-{flags}".encode()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"state": "refused", "reason": "queue_full", "admitted_ms": None}, "refused"),
        ({"state": "failed", "is_failure": True}, "failed"),
        ({"gaps": (("continue", 1.0, 2.0),)}, "resumed"),
        ({"ended_ms": 1_000.0 + 9_999.0}, None),
        ({"ended_ms": 1_000.0 + 10_000.0}, "slow"),
        ({"ttft_ms": 2_000.0}, "slow"),
        ({"ttft_ms": None}, None),
    ],
)
def test_what_became_of_a_call_decides_whether_it_is_kept(
    changes: dict[str, object], why: str | None
) -> None:
    world = World(Sampling(ratio=0.0))
    context = world.tracing.context("req-1", None)
    world.tracing.ended(record(context=context, **changes))
    assert [one.kept for one in world.laid.records] == ([] if why is None else [why])
    assert dict(world.counts) == ({} if why is None else {why: 1})


def test_a_storm_of_refusals_is_not_one_of_spans() -> None:
    world = World(Sampling(ratio=0.0, kept_per_s_max=10.0))
    for _ in range(1_000):
        world.tracing.ended(record(state="refused"))
    assert (world.counts["refused"], world.counts["over_limit"]) == (10, 990)
    world.now_ms += 500.0
    for _ in range(100):
        world.tracing.ended(record(state="refused"))
    assert world.counts["refused"] == 15
    # What the client or the share asked for is not counted against it.
    sampled = world.tracing.context("req-2", header())
    world.tracing.ended(record(context=sampled))
    assert world.counts["sampled"] == 1


def test_a_clients_word_decides_and_is_passed_on() -> None:
    world = World(Sampling(ratio=0.0))
    context = world.tracing.context("req-1", header())
    assert context is not None
    told = context.traceparent(leg_span_id("req-1", 0)).decode()
    version, trace, span, flags = told.split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert int(span, 16) == leg_span_id("req-1", 0) != context.span_id
    unsampled = world.tracing.context("req-1", header("00"))
    assert unsampled is not None
    assert unsampled.traceparent(7).endswith(b"-00")
    assert unsampled.exemplar == ""
    world.tracing.ended(record(context=unsampled))
    assert world.laid.records == []


def test_the_share_sampled_without_a_clients_trace() -> None:
    tracing = World(Sampling(ratio=0.1)).tracing
    contexts = [tracing.context(f"req-{n}", None) for n in range(20_000)]
    sampled = sum(context is not None and context.is_sampled for context in contexts)
    assert 0.08 < sampled / len(contexts) < 0.12
    assert tracing.context("req-7", None) == tracing.context("req-7", None)
    silent = World(EVERYTHING, is_exporting=False).tracing
    assert silent.context("req-1", None) is None
    assert silent.context("req-1", header()) is not None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00-short",
        header().upper(),
        b"01" + header()[2:],
        header() + b"x",
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        header()[:35] + b"_" + header()[36:],
        b"\xff" * 55,
    ],
)
def test_a_malformed_header_is_no_trace(value: bytes) -> None:
    context = World(Sampling(), is_exporting=False).tracing.context("req-1", value)
    assert context is None


def spans_of(one: CallRecord) -> dict[str, ReadableSpan]:
    kept, counts = Kept(), Counter[str]()
    maker = SpanMaker(kept, Resource.create({}), counts.update)
    maker.offer(one)
    maker.shutdown()
    assert len({span.name for span in kept.spans}) == len(kept.spans)
    return {span.name: span for span in kept.spans}


def test_one_trace_from_the_client_to_the_settlement() -> None:
    context = World(EVERYTHING).tracing.context("req-1", header())
    assert context is not None
    leg = Leg(
        name="whole", engine="n1-a", host="10.0.0.1", port=8000, span_id=leg_span_id("req-1", 0), start_ms=1_150.0,
        end_ms=1_500.0, outcome="ok", is_ok=True, detail="",
    )  # fmt: skip
    lost = Leg(
        name="continue", engine="n1-b", host="10.0.0.2", port=8001, span_id=leg_span_id("req-1", 1),
        start_ms=1_500.0, end_ms=1_900.0, outcome="broken_stream", is_ok=False, detail="gone",
    )  # fmt: skip
    spans = spans_of(
        record(context=context, legs=(leg, lost), gaps=(("continue", 1_480.0, 1_520.0),))
    )
    assert set(spans) == {
        "chat m", "admission", "queue", "engine whole", "engine continue", "resume 1", "settlement",
    }  # fmt: skip
    root = spans["chat m"]
    assert root.parent is not None
    assert root.parent.span_id == int(SPAN, 16)
    assert root.kind is SpanKind.SERVER
    assert {span.context.trace_id for span in spans.values()} == {int(TRACE, 16)}
    assert len({span.context.span_id for span in spans.values()}) == len(spans)
    for name, span in spans.items():
        if name != "chat m":
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id, name
    lengths_ms = {
        name: round((span.end_time - span.start_time) / 1e6)  # type: ignore[operator]
        for name, span in spans.items()
    }
    assert lengths_ms == {
        "chat m": 901, "admission": 50, "queue": 100, "engine whole": 350, "engine continue": 400,
        "resume 1": 40, "settlement": 1,
    }  # fmt: skip
    assert spans["engine whole"].context.span_id == leg_span_id("req-1", 0)
    assert spans["engine whole"].kind is SpanKind.CLIENT
    assert spans["engine continue"].status.status_code is StatusCode.ERROR
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.model"] == "auto:x"
    assert root.attributes["gen_ai.response.model"] == "m"
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert "error.type" not in root.attributes


def test_a_refusal_is_a_trace_of_what_decided() -> None:
    context = World(EVERYTHING).tracing.context("req-1", header())
    refused = record(
        context=context, admitted_ms=None, state="refused", reason="queue_full", rule="r", status=429, queue_ms=0.0,
        endpoint="completions",
    )  # fmt: skip
    spans = spans_of(refused)
    assert set(spans) == {"text_completion m", "admission"}
    assert spans["admission"].attributes == {
        "headway.verdict": "refuse", "headway.reason": "queue_full", "headway.rule": "r",
    }  # fmt: skip
    root = spans["text_completion m"]
    assert root.attributes is not None
    assert root.attributes["error.type"] == "queue_full"
    assert root.status.status_code is StatusCode.UNSET


def test_each_kept_call_is_one_line_under_its_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "controlplane.telemetry.spans")
    context = World(EVERYTHING).tracing.context("req-1", header())
    spans_of(record(context=context, kept="slow"))
    [line] = [entry for entry in caplog.records if entry.getMessage() == "call_ended"]
    fields = line.fields  # type: ignore[attr-defined]
    assert (fields["request"], fields["trace"], fields["kept"]) == ("req-1", TRACE, "slow")
    assert fields["duration_ms"] == 900.0
    json.dumps(fields)
