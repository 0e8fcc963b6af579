"""OTLP export against a real HTTP receiver: counters, gauges and histograms arrive."""

from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.otlp import OtlpMetrics, resource_of
from tests.otlp_receiver import Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


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
