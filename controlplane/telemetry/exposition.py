"""Renders the series by a custom collector of prometheus_client: in Prometheus' text format, or in OpenMetrics
for a scraper that asks for it, which alone carries the exemplars that lead from a bucket to a trace.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from controlplane.telemetry.metrics import Counter, Distribution, Gauge, Metric, Metrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OPENMETRICS = "application/openmetrics-text"
# The label under which a tenant stands by name.
TENANT = "tenant"

Bucket = tuple[str, float] | tuple[str, float, Exemplar]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Exposition:
    """Reads every series of `metrics` when Prometheus asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._whole = _registry(metrics.all())
        self._nameless = _registry(
            tuple(each for each in metrics.all() if TENANT not in each.declaration.labels)
        )

    def render(self, accept: str = "", *, names_tenants: bool = False) -> tuple[bytes, str]:
        """The series in the format that `accept`, a header of HTTP, asks for, and its content type.

        Series with names of tenants are for those alone who may see them.
        """
        registry = self._whole if names_tenants else self._nameless
        if OPENMETRICS in accept:
            body: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry), CONTENT_TYPE


class _Series(Collector):
    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for metric in self._metrics:
            yield _family(metric)


def _registry(metrics: tuple[Metric, ...]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Series(metrics))
    return registry


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


def _cumulative(bounds: tuple[float, ...], distribution: Distribution) -> list[Bucket]:
    total = 0
    buckets: list[Bucket] = []
    for at, count in enumerate(distribution.counts):
        total += count
        name = str(float(bounds[at])) if at < len(bounds) else "+Inf"
        seen = distribution.exemplars.get(at)
        if seen is None:
            buckets.append((name, total))
        else:
            traced = Exemplar({"trace_id": seen.trace_id}, seen.value, seen.at_s)
            buckets.append((name, total, traced))
    return buckets
