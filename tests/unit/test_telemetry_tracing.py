"""Spans: sampled by the client's word or by hash, told to engines, built from instants afterwards."""

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from controlplane.telemetry.tracing import Stage, Tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Kept:
    """A sink that keeps spans in memory."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def shutdown(self) -> None:
        self.spans.clear()


def header(flags: str = "01") -> bytes:
    return f"00-{TRACE}-{SPAN}-{flags}".encode()


def test_a_clients_trace_goes_on_through_the_gateway_to_the_engine() -> None:
    kept = Kept()
    tracing = Tracing(kept, Resource.create({}), 0.0)
    context = tracing.context("req-1", header())
    assert context is not None
    version, trace, span, flags = context.traceparent().decode().split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert span not in (SPAN, "0" * 16)
    root = Stage("chat m", 1_000.0, 3_000.0, {"a": 1})
    attempt = Stage("engine whole", 1_100.0, 2_900.0, {"b": "c"}, is_error=True)
    tracing.finish(context, root, (attempt,))
    child, server = kept.spans
    assert server.parent is not None
    assert server.parent.span_id == int(SPAN, 16)
    assert server.context.trace_id == int(TRACE, 16)
    assert server.context.span_id == int(span, 16)
    assert server.kind is SpanKind.SERVER
    assert child.parent is not None
    assert child.parent.span_id == server.context.span_id
    assert child.kind is SpanKind.CLIENT
    assert child.context.span_id != server.context.span_id
    assert child.status.status_code is StatusCode.ERROR
    assert server.end_time is not None
    assert server.start_time is not None
    assert server.end_time - server.start_time == 2_000_000_000


def test_a_trace_that_is_not_sampled_is_passed_on_and_not_built() -> None:
    kept = Kept()
    tracing = Tracing(kept, Resource.create({}), 1.0)
    context = tracing.context("req-1", header("00"))
    assert context is not None
    assert context.traceparent().endswith(b"-00")
    tracing.finish(context, Stage("x", 0, 1, {}), ())
    assert kept.spans == []


def test_the_share_sampled_without_a_client_trace() -> None:
    tracing = Tracing(Kept(), Resource.create({}), 0.1)
    sampled = [tracing.context(f"req-{n}", None) is not None for n in range(20_000)]
    assert 0.08 < sum(sampled) / len(sampled) < 0.12
    assert tracing.context("req-7", None) == tracing.context("req-7", None)
    assert Tracing(None, Resource.create({}), 1.0).context("req-1", None) is None
    assert Tracing(Kept(), Resource.create({}), 0.0).context("req-1", None) is None


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
    assert Tracing(Kept(), Resource.create({}), 0.0).context("req-1", value) is None
