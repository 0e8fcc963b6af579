"""Metrics: declared once, by the conventions, bounded, and read the same by both readers."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.outcome import AttemptOutcome
from controlplane.telemetry.exposition import Exposition
from controlplane.telemetry.metrics import OVERFLOW, SERIES_MAX, Counter, Histogram, Kind, Metrics
from controlplane.telemetry.observer import GateObserver

UNITS = {"s": "_seconds", "{USD}": "_usd"}
# A tenant appears as its class, or among the few that are named; nothing that a client writes is a label.
LABELS = {
    "endpoint", "model", "tenant_class", "outcome", "reason", "kind", "engine", "region", "verdict",
    "leg", "treatment", "cause", "result", "change", "gpu_type", "role", "class_id",
    "choice_class", "why", "table", "resume_class", "node", "gpu", "tenant", "slo_class", "target",
    "state", "scope", "budget_scope", "axis", "version",
}  # fmt: skip


def test_names_units_and_labels_follow_the_conventions() -> None:
    metrics = Metrics().all()
    names = [metric.declaration.name for metric in metrics]
    assert len(set(names)) == len(names)
    assert len({metric.declaration.otel_name for metric in metrics}) == len(names)
    for metric in metrics:
        declaration = metric.declaration
        assert re.fullmatch(r"(headway|gen_ai_server)_[a-z0-9_]+", declaration.name)
        assert not declaration.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert declaration.name.endswith(UNITS.get(declaration.unit, ""))
        assert LABELS.issuperset(declaration.labels), declaration.name
        assert declaration.help.endswith(".")
        assert (declaration.kind is Kind.HISTOGRAM) is bool(declaration.bounds)
        assert list(declaration.bounds) == sorted(set(declaration.bounds))


def test_every_series_is_in_the_exposition_with_its_value() -> None:
    metrics = Metrics()
    metrics.requests.add(("chat", "m", "gold", "succeeded", ""))
    metrics.requests.add(("chat", "m", "gold", "succeeded", ""), 2)
    for value in (0.001, 0.0011, 0.3, 1_000.0):
        metrics.ttft.observe(value, ("m", "gold"))
    metrics.in_flight.add(("m",))
    metrics.in_flight.add(("m",), -1)
    metrics.seats_taken.watch(lambda: {("e1", "m", "r"): 3.0})
    metrics.journal_depth.watch(lambda: {(): 7.0})
    families = {
        family.name: family
        for family in text_string_to_metric_families(
            Exposition(metrics).render(names_tenants=True)[0].decode()
        )
    }
    assert {metric.declaration.name for metric in metrics.all()} == families.keys()
    [sample] = families["headway_requests"].samples
    assert (sample.name, sample.value) == ("headway_requests_total", 3)
    assert sample.labels["tenant_class"] == "gold"
    ttft = families["gen_ai_server_time_to_first_token_seconds"].samples
    buckets = {s.labels["le"]: s.value for s in ttft if s.name.endswith("_bucket")}
    # An upper bound belongs to its bucket.
    assert buckets["0.001"] == 1
    assert buckets["0.005"] == 2
    assert buckets["0.5"] == 3
    assert buckets["30.0"] == 3
    assert buckets["+Inf"] == 4
    assert {s.value for s in ttft if s.name.endswith("_count")} == {4}
    assert families["headway_requests_in_flight"].samples[0].value == 0
    assert families["headway_engine_seats_taken"].samples[0].value == 3
    assert families["headway_journal_entries_pending"].samples[0].value == 7


@pytest.mark.parametrize("kind", [Counter, Histogram])
def test_the_number_of_series_is_bounded(kind: type) -> None:
    metrics = Metrics()
    for number in range(SERIES_MAX + 50):
        if kind is Counter:
            metrics.upstream_errors.add((f"e{number}", "timeout"))
        else:
            metrics.decision_time.observe(1e-5, (f"v{number}",))
    series = dict(
        metrics.upstream_errors.series() if kind is Counter else metrics.decision_time.series()
    )
    assert len(series) == SERIES_MAX + 1
    if kind is Counter:
        assert series[OVERFLOW, OVERFLOW] == 50
        assert metrics.upstream_errors.total() == SERIES_MAX + 50
    else:
        assert metrics.decision_time.distribution((OVERFLOW,)).count == 50


def test_the_gates_reports_become_series() -> None:
    metrics = Metrics()
    observer = GateObserver(metrics)
    observer.decided("refuse", Reason.QUEUE_FULL, 40.0)
    observer.refused(None, Refuse(Reason.INVALID_API_KEY, "x"))
    observer.attempted("prefill", AttemptOutcome.TIMEOUT)
    observer.retried(is_allowed=False)
    assert metrics.admissions.value(("refuse", "queue_full")) == 1
    assert metrics.decision_time.distribution(("refuse",)).sum == pytest.approx(40e-6)
    assert metrics.refusals.value(("invalid_api_key", "")) == 1
    assert metrics.attempts.value(("prefill", "timeout")) == 1
    assert metrics.retries.value(("denied",)) == 1
