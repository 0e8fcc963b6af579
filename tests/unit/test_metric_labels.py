"""However many tenants and workflows there are: label sets stay few, names go to those that spend, nothing is lost."""

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from controlplane.domain.catalog import Scope
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.ids import WorkflowId
from controlplane.domain.outcome import RequestState, Usage, WorkflowState
from controlplane.runtime.figures import count_workflow
from controlplane.store.figures import EndedWorkflow
from controlplane.telemetry.exposition import CONTENT_TYPE, OPENMETRICS, Exposition
from controlplane.telemetry.metrics import Histogram, Metrics
from controlplane.telemetry.named_tenants import (
    OVERFLOW,
    RANK_HALF_LIFE_S,
    RANK_INTERVAL_S,
    TAKE_OVER_RATIO,
    TENANTS_NAMED_MAX,
    NamedTenants,
)
from controlplane.telemetry.observer import CAPACITY_REASONS, GateObserver

TENANTS = 10_000
WORKFLOWS = 100_000
# All series of a replica, whatever the number of tenants and workflows; engines and models add theirs.
SERIES_MAX = 6_000
CLASSES = ("gold", "silver", "bronze")
USED = Usage(10, 0, 10, is_estimated=False)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ticket_of(tenant: str, tenant_class: str, *, workflow: str | None = None) -> Any:
    """What the observer reads of a ticket."""
    owner = SimpleNamespace(id=tenant, tenant_class=tenant_class, slo_class="interactive")
    call = SimpleNamespace(principal=SimpleNamespace(tenant=owner), received_ms=0.0)
    request = SimpleNamespace(ttft_ms_max=100, tpot_ms_max=10, deadline_ms=1_000, workflow=workflow)
    return SimpleNamespace(
        call=call,
        request=request,
        model=SimpleNamespace(name="small"),
        queue_ms=0.0,
        is_replayed=True,
        static=SimpleNamespace(tenant_slo_class="interactive"),
    )


def ended_workflow(number: int, state: WorkflowState, **changes: Any) -> EndedWorkflow:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    fields: dict[str, Any] = {
        "id": WorkflowId(f"wf-{number}"),
        "scope": list(Scope)[number % len(Scope)],
        "tenant_class": CLASSES[number % len(CLASSES)],
        "slo_class": "interactive",
        "state": state,
        "steps_expected": 4,
        "steps_done": number % 5,
        "spent_micro_usd": number % 1_000,
        "created_at": began,
        "ended_at": began + timedelta(seconds=number % 600),
    }
    return EndedWorkflow(**{**fields, **changes})


def series_of(metrics: Metrics) -> int:
    return sum(
        len(tuple(metric.series()))
        * (len(metric.declaration.bounds) + 3 if isinstance(metric, Histogram) else 1)
        for metric in metrics.all()
    )


def test_ten_thousand_tenants_and_a_hundred_thousand_workflows_leave_few_series() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    observer = GateObserver(metrics)
    chance = random.Random(7)
    spent: dict[str, int] = defaultdict(int)
    states = [state for state in WorkflowState if state is not WorkflowState.RUNNING]
    for number in range(WORKFLOWS):
        rank = min(int(chance.paretovariate(0.6)), TENANTS) - 1
        tenant = f"tenant-{rank if rank > 0 else number % TENANTS}"
        ticket = ticket_of(tenant, CLASSES[number % 3], workflow=f"wf-{number}")
        micro_usd = number % 97
        spent[tenant] += micro_usd
        observer.settled(ticket, RequestState.SUCCEEDED, USED, micro_usd)
        observer.measured(
            ticket, RequestState.SUCCEEDED, None, micro_usd, ttft_ms=1.0, tpot_ms=1.0, e2e_ms=9.0
        )
        if number % 5 == 0:
            reason = list(Reason)[number % len(Reason)]
            observer.refused(ticket.call, Refuse(reason, "x"))
        count_workflow(metrics, ended_workflow(number, states[number % len(states)]))
        if number % 10_000 == 0:
            clock.now_s += RANK_INTERVAL_S
            Exposition(metrics).render(names_tenants=True)
    assert len(spent) > TENANTS * 0.9
    assert series_of(metrics) < SERIES_MAX
    text = Exposition(metrics).render(names_tenants=True)[0].decode()
    assert "wf-" not in text
    clock.now_s += RANK_INTERVAL_S
    named = {labels[0] for labels, _ in metrics.tenant_spent.series()}
    assert len(named) <= 2 * TENANTS_NAMED_MAX + 1
    assert OVERFLOW in named
    first = sorted(spent, key=lambda tenant: -spent[tenant])[: TENANTS_NAMED_MAX // 2]
    assert set(first) <= named, "who spends most by far is named"


def test_no_dollar_and_no_call_is_lost_or_counted_twice() -> None:
    """An oracle of its own: what every series grows by between reads, however names move."""
    clock = Clock()
    tenants = NamedTenants(clock)
    chance = random.Random(11)
    grown_usd = grown_calls = 0.0
    before_usd: dict[tuple[str, ...], float] = {}
    before_calls: dict[tuple[str, ...], float] = {}
    whole_usd = whole_calls = 0
    moved = set()
    for turn in range(200):
        for _ in range(50):
            # The big spenders of one time are not those of another.
            tenant = f"t{(turn // 40) * 100 + int(chance.expovariate(0.05))}"
            usd = chance.randrange(5)
            tenants.ended(tenant, "succeeded", usd)
            whole_usd += usd
            whole_calls += 1
        clock.now_s += RANK_HALF_LIFE_S / 4
        now_usd, now_calls = dict(tenants.spent_usd()), dict(tenants.requests())
        moved |= {name for (name,) in now_usd}
        grown_usd += sum(
            value - before_usd.get(key, 0.0) if value >= before_usd.get(key, 0.0) else value
            for key, value in now_usd.items()
        )
        grown_calls += sum(
            value - before_calls.get(key, 0.0) if value >= before_calls.get(key, 0.0) else value
            for key, value in now_calls.items()
        )
        assert all(now_usd[key] >= before_usd.get(key, 0.0) for key in [(OVERFLOW,)])
        assert len(now_usd) <= 2 * TENANTS_NAMED_MAX + 1
        before_usd, before_calls = now_usd, now_calls
    assert len(moved) > 3 * TENANTS_NAMED_MAX, "names have moved"
    assert (grown_usd, grown_calls) == (whole_usd, whole_calls)


def test_a_name_rests_until_another_is_clearly_before_it() -> None:
    clock = Clock()
    tenants = NamedTenants(clock)

    def spent() -> dict[tuple[str, ...], float]:
        clock.now_s += RANK_INTERVAL_S
        return dict(tenants.spent_usd())

    for number in range(TENANTS_NAMED_MAX):
        tenants.ended(f"t{number}", "succeeded", 10.0)
    tenants.ended("new", "succeeded", 10.0 * TAKE_OVER_RATIO - 0.1)
    assert ("new",) not in spent()
    assert spent()[OVERFLOW,] == pytest.approx(10.0 * TAKE_OVER_RATIO - 0.1)
    tenants.ended("new", "refused", 0.3)
    told = spent()
    assert told["new",] == 0.0
    assert told["t0",] == 10.0, "a name that was taken is told once more"
    tenants.ended("t0", "succeeded", 1.0)
    tenants.ended("new", "succeeded", 3.0)
    told = spent()
    assert told["new",] == 3.0
    assert ("t0",) not in told
    assert tenants.requests()["new", "succeeded"] == 1
    assert ("t0", "succeeded") not in tenants.requests()
    assert len(told) == TENANTS_NAMED_MAX + 1


@pytest.mark.parametrize(
    ("state", "ttft_ms", "tpot_ms", "e2e_ms", "result"),
    [
        (RequestState.SUCCEEDED, 100.0, 10.0, 1_000.0, "met"),
        (RequestState.SUCCEEDED, 100.1, 99.0, 9_999.0, "ttft"),
        (RequestState.SUCCEEDED, 1.0, 10.1, 9_999.0, "tpot"),
        (RequestState.SUCCEEDED, None, None, 1_000.1, "deadline"),
        (RequestState.SUCCEEDED, None, None, 999.0, "met"),
        (RequestState.FAILED, 1.0, 1.0, 1.0, "failed"),
        (RequestState.EXPIRED, None, None, 1.0, "deadline"),
        (RequestState.CANCELLED, 500.0, None, 1.0, None),
    ],
)
def test_a_call_keeps_its_targets_or_misses_the_first_of_them(
    state: RequestState,
    ttft_ms: float | None,
    tpot_ms: float | None,
    e2e_ms: float,
    result: str | None,
) -> None:
    metrics = Metrics()
    reason = Reason.UPSTREAM_ERROR if state is RequestState.FAILED else None
    GateObserver(metrics).measured(
        ticket_of("acme", "gold"), state, reason, 5, ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms
    )
    counted = dict(metrics.slo_calls.series())
    assert counted == ({} if result is None else {("interactive", "gold", result): 1})
    assert metrics.tenant_requests.value(("acme", state)) == 1


def test_who_sends_nonsense_or_spends_its_budget_was_promised_nothing() -> None:
    metrics = Metrics()
    for reason in (Reason.INVALID_REQUEST, Reason.INSUFFICIENT_QUOTA, Reason.FORBIDDEN_BY_POLICY):
        GateObserver(metrics).measured(
            ticket_of("acme", "gold"), RequestState.FAILED, reason, 5,
            ttft_ms=1.0, tpot_ms=None, e2e_ms=1.0,
        )  # fmt: skip
    assert dict(metrics.slo_calls.series()) == {}
    assert metrics.tenant_requests.value(("acme", "failed")) == 3


def test_refusals_for_want_of_capacity_miss_and_those_at_limits_do_not() -> None:
    metrics = Metrics()
    observer = GateObserver(metrics)
    for reason in Reason:
        observer.refused(ticket_of("acme", "gold").call, Refuse(reason, "x"))
    counted = dict(metrics.slo_calls.series())
    assert counted == {("interactive", "gold", "refused"): len(CAPACITY_REASONS)}
    assert {Reason.INSUFFICIENT_QUOTA, Reason.RATE_LIMITED, Reason.INVALID_REQUEST}.isdisjoint(
        CAPACITY_REASONS
    )
    assert metrics.tenant_requests.value(("acme", "refused")) == len(Reason)


def test_dollars_are_wasted_once() -> None:
    metrics = Metrics()
    observer = GateObserver(metrics)
    observer.settled(ticket_of("a", "gold"), RequestState.SUCCEEDED, USED, 1_000_000)
    observer.settled(ticket_of("a", "gold"), RequestState.CANCELLED, USED, 2_000_000)
    # A call of a workflow is judged when that ends.
    observer.settled(ticket_of("a", "gold", workflow="w"), RequestState.FAILED, USED, 4_000_000)
    count_workflow(metrics, ended_workflow(0, WorkflowState.EXPIRED, spent_micro_usd=4_000_000))
    count_workflow(metrics, ended_workflow(1, WorkflowState.SUCCEEDED, spent_micro_usd=8_000_000))
    assert dict(metrics.wasted.series()) == {
        ("call_cancelled",): 2.0,
        ("workflow_expired",): 4.0,
    }


@pytest.mark.parametrize(
    ("state", "steps_done", "is_late"),
    [
        (WorkflowState.EXPIRED, 2, True),
        (WorkflowState.EXPIRED, 1, False),
        (WorkflowState.CANCELLED, 4, True),
        (WorkflowState.FAILED, 4, False),
        (WorkflowState.SUCCEEDED, 4, False),
    ],
)
def test_a_late_kill_is_of_half_done_work_and_not_the_tenants_word(
    state: WorkflowState, steps_done: int, *, is_late: bool
) -> None:
    metrics = Metrics()
    count_workflow(metrics, ended_workflow(0, state, steps_done=steps_done))
    assert bool(metrics.late_kills.total()) is is_late


def test_exemplars_stand_in_the_bucket_of_their_value_and_only_in_openmetrics() -> None:
    metrics = Metrics()
    labels = ("m", "gold")
    metrics.ttft.observe(0.3, labels, trace_id="a" * 32)
    metrics.ttft.observe(0.4, labels, trace_id="b" * 32)
    metrics.ttft.observe(99.0, labels, trace_id="c" * 32)
    metrics.ttft.observe(0.001, labels)
    exposition = Exposition(metrics)
    plain, plain_type = exposition.render("text/plain")
    assert plain_type == CONTENT_TYPE
    assert b"trace_id" not in plain
    asked = f"{OPENMETRICS};version=1.0.0,text/plain;q=0.5"
    body, content_type = exposition.render(asked, names_tenants=True)
    assert content_type.startswith(OPENMETRICS)
    families = {each.name: each for each in text_string_to_metric_families(body.decode())}
    assert {metric.declaration.name for metric in metrics.all()} == families.keys()
    found = {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for sample in families["gen_ai_server_time_to_first_token_seconds"].samples
        if sample.exemplar is not None
    }
    assert found == {"0.5": ("b" * 32, 0.4), "+Inf": ("c" * 32, 99.0)}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_tenants_are_named_to_operators_alone(accept: str) -> None:
    metrics = Metrics()
    metrics.tenants.ended("acme-secret", "succeeded", 1.0)
    metrics.tenant_budget.watch(lambda: {("acme-secret", "spent"): 1.0})
    exposition = Exposition(metrics)
    told, _ = exposition.render(accept, names_tenants=True)
    assert told.count(b"acme-secret") == 3
    hidden, _ = exposition.render(accept)
    assert b"acme-secret" not in hidden
    assert b"headway_tenant_spent_usd" not in hidden
    assert b"headway_leader" in hidden
