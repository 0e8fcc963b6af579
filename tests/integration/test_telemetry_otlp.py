"""OTLP export against a real HTTP receiver: counters, gauges, histograms and spans arrive."""

import http.server
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.otlp import OtlpMetrics, resource_of
from controlplane.telemetry.tracing import Stage, Tracing


class Receiver(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, list[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_metrics_arrive_with_their_values(receiver: Receiver) -> None:
    metrics = Metrics()
    metrics.requests.add(("chat", "m", "gold", "succeeded", ""), 3)
    metrics.queue_depth.watch(lambda: {("m",): 5.0})
    for value in (0.0005, 0.02, 99.0):
        metrics.ttft.observe(value, ("m", "gold"))
    exporter = OTLPMetricExporter(endpoint=f"{receiver.url}/v1/metrics")
    pushing = OtlpMetrics(metrics, resource_of("1", "r1"), exporter)
    pushing.flush()
    pushing.shutdown()
    request = ExportMetricsServiceRequest.FromString(receiver.bodies["/v1/metrics"][0])
    [resource] = request.resource_metrics
    assert {a.key: a.value.string_value for a in resource.resource.attributes}[
        "service.name"
    ] == "headway"
    found = {m.name: m for scope in resource.scope_metrics for m in scope.metrics}
    [point] = found["headway.requests"].sum.data_points
    assert point.as_int == 3
    assert {a.key: a.value.string_value for a in point.attributes}["gen_ai.request.model"] == "m"
    assert found["headway.queue.depth"].gauge.data_points[0].as_double == 5
    [histogram] = found["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (histogram.count, sum(histogram.bucket_counts)) == (3, 3)
    assert histogram.bucket_counts[0] == histogram.bucket_counts[-1] == 1
    assert len(histogram.bucket_counts) == len(histogram.explicit_bounds) + 1
    assert found["gen_ai.server.time_to_first_token"].unit == "s"


def test_spans_arrive_as_one_trace(receiver: Receiver) -> None:
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces"))
    tracing = Tracing(processor, resource_of("1", "r1"), 1.0)
    context = tracing.context("req-1", None)
    assert context is not None
    stage = Stage("chat m", 0.0, 5.0, {"gen_ai.usage.output_tokens": 3})
    tracing.finish(context, stage, (Stage("engine whole", 1.0, 4.0, {}),))
    tracing.shutdown()
    request = ExportTraceServiceRequest.FromString(receiver.bodies["/v1/traces"][0])
    spans = request.resource_spans[0].scope_spans[0].spans
    assert {span.name for span in spans} == {"chat m", "engine whole"}
    assert len({span.trace_id for span in spans}) == 1
