"""Renders the series in Prometheus' text format, by a custom collector of prometheus_client."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from controlplane.telemetry.metrics import Counter, Distribution, Gauge, Metric, Metrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Exposition(Collector):
    """Reads every series of `metrics` when Prometheus asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics.all():
            yield _family(metric)


def _family(metric: Metric) -> Family:
    declaration = metric.declaration
    match metric:
        case Counter():
            counter = CounterMetricFamily(
                declaration.name, declaration.help, labels=declaration.labels
            )
            for labels, value in metric.series():
                counter.add_metric(labels, value)
            return counter
        case Gauge():
            gauge = GaugeMetricFamily(declaration.name, declaration.help, labels=declaration.labels)
            for labels, value in metric.series():
                gauge.add_metric(labels, value)
            return gauge
        case _:
            histogram = HistogramMetricFamily(
                declaration.name, declaration.help, labels=declaration.labels
            )
            for labels, distribution in metric.series():
                buckets = _cumulative(declaration.bounds, distribution)
                histogram.add_metric(labels, buckets, distribution.sum)
            return histogram


def _cumulative(bounds: tuple[float, ...], distribution: Distribution) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*bounds, float("inf")), distribution.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
    return buckets
