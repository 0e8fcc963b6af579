"""Exports series and spans over OTLP/HTTP, from threads of the SDK's, never on the request path.

Counters and gauges are read through observable instruments. OpenTelemetry has no observable
histogram, so the histograms' data points are appended by the exporter.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramPoints
from opentelemetry.sdk.metrics.export import Metric as ExportedMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from controlplane.telemetry.metrics import Counter, Gauge, Histogram, Labels, Metrics

EXPORT_PERIOD_MS = 15_000
SCOPE = "headway"

# Labels whose OpenTelemetry name is set by a convention; the others become `headway.<label>`.
ATTRIBUTES = {"model": "gen_ai.request.model", "endpoint": "gen_ai.operation.name"}


def resource_of(version: str, replica_id: str) -> Resource:
    return Resource.create(
        {
            "service.name": "headway",
            "service.version": version,
            "service.instance.id": replica_id,
        }
    )


def attributes_of(names: Labels, values: Labels) -> dict[str, str]:
    return {
        ATTRIBUTES.get(name, f"headway.{name}"): str(value)
        for name, value in zip(names, values, strict=True)
    }


class OtlpMetrics:
    """Pushes the series every EXPORT_PERIOD_MS from a thread of the SDK's until it is shut down."""

    def __init__(
        self, metrics: Metrics, resource: Resource, exporter: MetricExporter | None = None
    ) -> None:
        appending = _HistogramAppender(metrics, exporter or OTLPMetricExporter())
        self._reader = PeriodicExportingMetricReader(
            appending, export_interval_millis=EXPORT_PERIOD_MS
        )
        self._provider = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(SCOPE)
        for metric in metrics.all():
            declaration = metric.declaration
            match metric:
                case Counter():
                    meter.create_observable_counter(
                        declaration.otel_name,
                        [_observed(metric)],
                        unit=declaration.unit,
                        description=declaration.help,
                    )
                case Gauge():
                    meter.create_observable_gauge(
                        declaration.otel_name,
                        [_observed(metric)],
                        unit=declaration.unit,
                        description=declaration.help,
                    )
                case Histogram():
                    pass  # Appended by the exporter.

    def flush(self) -> None:
        self._reader.force_flush()

    def shutdown(self) -> None:
        self._provider.shutdown()


def span_processor() -> BatchSpanProcessor:
    """Sends finished spans in batches from a thread of the SDK's."""
    return BatchSpanProcessor(OTLPSpanExporter())


def _observed(metric: Counter | Gauge) -> Callable[[CallbackOptions], Iterable[Observation]]:
    names = metric.declaration.labels

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(value, attributes_of(names, labels)) for labels, value in metric.series()
        ]

    return observe


class _HistogramAppender(MetricExporter):
    """Adds the histograms' points to what the SDK collected, and hands all of it on."""

    def __init__(self, metrics: Metrics, inner: MetricExporter) -> None:
        super().__init__()
        self._histograms = [metric for metric in metrics.all() if isinstance(metric, Histogram)]
        self._inner = inner
        self._started_ns = time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        if not metrics_data.resource_metrics:
            return MetricExportResult.SUCCESS
        points = [self._points(histogram) for histogram in self._histograms]
        # One provider with one meter: all that was collected lies in one scope of one resource.
        [resource] = metrics_data.resource_metrics
        [scope] = resource.scope_metrics
        scopes = [ScopeMetrics(scope.scope, [*scope.metrics, *points], scope.schema_url)]
        whole = MetricsData([ResourceMetrics(resource.resource, scopes, resource.schema_url)])
        return self._inner.export(whole, timeout_millis, **kwargs)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown(timeout_millis, **kwargs)

    def _points(self, histogram: Histogram) -> ExportedMetric:
        declaration = histogram.declaration
        now_ns = time.time_ns()
        points = [
            HistogramDataPoint(
                attributes=attributes_of(declaration.labels, labels),
                start_time_unix_nano=self._started_ns,
                time_unix_nano=now_ns,
                count=distribution.count,
                sum=distribution.sum,
                bucket_counts=tuple(distribution.counts),
                explicit_bounds=declaration.bounds,
                # The extremes are not kept; infinities stand for "unknown" in OTLP.
                min=float("inf"),
                max=float("-inf"),
            )
            for labels, distribution in histogram.series()
        ]
        data = HistogramPoints(points, AggregationTemporality.CUMULATIVE)
        return ExportedMetric(declaration.otel_name, declaration.help, declaration.unit, data)
