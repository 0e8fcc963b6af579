"""Every metric, declared once: name, unit, kind, labels. Feeding one costs a dictionary look-up.

Series are plain numbers that the hot path adds to; Prometheus and OpenTelemetry read them when they
are scraped or exported (`exposition.py`, `otlp.py`). Names follow OpenTelemetry's GenAI conventions
for what a client sees and begin with `headway_` for the rest. Labels take values from closed or
bounded sets only: a tenant appears as its class, and by name only while it is among the few that
spend most (`named_tenants.py`). No workflow and no request is ever a label.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from controlplane.telemetry.named_tenants import OVERFLOW, NamedTenants

# Label sets kept per metric. Further ones are counted together under OVERFLOW, so that a bug
# or a large fleet can not grow the exposition without end.
SERIES_MAX = 2_000

Labels = tuple[str, ...]
Source = Callable[[], Mapping[Labels, float]]


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """`name` is Prometheus' without suffixes; `otel_name` and `unit` (UCUM) are OpenTelemetry's."""

    name: str
    otel_name: str
    unit: str
    kind: Kind
    labels: Labels
    help: str
    bounds: tuple[float, ...] = ()


class Counter:
    """A number per label set that only grows: added to, or asked of a source when it is read."""

    __slots__ = ("_sources", "_values", "declaration")

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self._values: dict[Labels, float] = {}
        self._sources: list[Source] = []

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        values = self._values
        if labels in values:
            values[labels] += amount
            return
        if len(values) >= SERIES_MAX:
            labels = (OVERFLOW,) * len(labels)
        values[labels] = values.get(labels, 0) + amount

    def value(self, labels: Labels = ()) -> float:
        return dict(self.series()).get(labels, 0)

    def total(self) -> float:
        return sum(value for _, value in self.series())

    def watch(self, source: Source) -> None:
        """Ask `source` for its series at every read: sums that their owner keeps and never lowers."""
        self._sources.append(source)

    def series(self) -> Iterator[tuple[Labels, float]]:
        yield from tuple(self._values.items())
        for source in self._sources:
            yield from tuple(source().items())[:SERIES_MAX]


class Gauge:
    """A number per label set that is set, moved, or asked of a source when it is read."""

    __slots__ = ("_sources", "_values", "declaration")

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self._values: dict[Labels, float] = {}
        self._sources: list[Source] = []

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        values = self._values
        if labels in values:
            values[labels] += amount
            return
        if len(values) >= SERIES_MAX:
            labels = (OVERFLOW,) * len(labels)
        values[labels] = values.get(labels, 0) + amount

    def value(self, labels: Labels = ()) -> float:
        return dict(self.series()).get(labels, 0)

    def watch(self, source: Source) -> None:
        """Ask `source` for its series at every read. It must be quick and must not raise."""
        self._sources.append(source)

    def series(self) -> Iterator[tuple[Labels, float]]:
        yield from tuple(self._values.items())
        for source in self._sources:
            yield from tuple(source().items())[:SERIES_MAX]


class Exemplar(NamedTuple):
    """One observation that can be looked up: its value, its trace, and when it was made (Unix seconds)."""

    value: float
    trace_id: str
    at_s: float


class Distribution:
    """One series of a histogram: observations per bucket (the last one is open), and their sum.

    `exemplars` holds the latest traced observation of each bucket that has had one.
    """

    __slots__ = ("counts", "exemplars", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Observations per label set, in buckets whose upper bounds belong to them."""

    __slots__ = ("_bounds", "_values", "declaration")

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self._bounds = declaration.bounds
        self._values: dict[Labels, Distribution] = {}

    def observe(self, value: float, labels: Labels = (), trace_id: str = "") -> None:
        """Count `value`. `trace_id` (32 hexadecimal digits, empty: none) becomes its bucket's exemplar."""
        distribution = self._values.get(labels)
        if distribution is None:
            distribution = self._grow(labels)
        bucket = bisect_left(self._bounds, value)
        distribution.counts[bucket] += 1
        distribution.sum += value
        if trace_id:
            distribution.exemplars[bucket] = Exemplar(value, trace_id, time.time())

    def distribution(self, labels: Labels = ()) -> Distribution:
        return self._values.get(labels) or Distribution(len(self._bounds) + 1)

    def series(self) -> Iterator[tuple[Labels, Distribution]]:
        yield from tuple(self._values.items())

    def _grow(self, labels: Labels) -> Distribution:
        if len(self._values) >= SERIES_MAX:
            labels = (OVERFLOW,) * len(labels)
        return self._values.setdefault(labels, Distribution(len(self._bounds) + 1))


Metric = Counter | Gauge | Histogram

# Upper bounds in seconds; those of the GenAI conventions, widened for small models.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5)
_E2E_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_KV_LAG_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_DECISION_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 1e-1)
_WORKFLOW_S = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 21_600, 86_400)
_WORKFLOW_USD = (
    1e-5,
    1e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    50,
)
_STEPS = (1, 2, 3, 5, 8, 12, 20, 35, 60, 100, 250, 500, 1_000)


class Metrics:
    """All series of one process: fed by the gateway, by the gate, and read off their owners."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """`clock_s` tells seconds of a monotonic clock, by which the ranks of tenants age."""
        self._all: list[Metric] = []

        # What a client sees.
        self.requests = self._counter(
            "headway_requests", "headway.requests", "{request}",
            ("endpoint", "model", "tenant_class", "outcome", "reason"),
            "Calls answered, by how they ended; the reason is empty for success.",
        )  # fmt: skip
        self.ttft = self._histogram(
            "gen_ai_server_time_to_first_token_seconds", "gen_ai.server.time_to_first_token", "s",
            ("model", "tenant_class"),
            "Arrival to first token of streams, queueing included.",
            bounds=_TTFT_S,
        )  # fmt: skip
        self.tpot = self._histogram(
            "gen_ai_server_time_per_output_token_seconds", "gen_ai.server.time_per_output_token",
            "s",
            ("model", "tenant_class"),
            "Mean time per token after the first, of one stream.",
            bounds=_TPOT_S,
        )  # fmt: skip
        self.e2e = self._histogram(
            "gen_ai_server_request_duration_seconds", "gen_ai.server.request.duration", "s",
            ("endpoint", "model", "tenant_class"),
            "Arrival to last byte of finished calls.",
            bounds=_E2E_S,
        )  # fmt: skip
        self.tokens = self._counter(
            "headway_tokens", "headway.tokens", "{token}", ("model", "tenant_class", "kind"),
            "Tokens used; the kind is prompt, cached (a part of prompt) or completion.",
        )  # fmt: skip
        self.prefix_tokens = self._counter(
            "headway_prefix_tokens", "headway.prefix.tokens", "{token}", ("model", "kind"),
            "Prompt tokens of finished calls: all (prompt), taken to be cached (predicted), cached as the engine"
            " told (actual), and how far the two lie apart (error); error over prompt is the mean error.",
        )  # fmt: skip
        self.in_flight = self._gauge(
            "headway_requests_in_flight", "headway.requests.in_flight", "{request}", ("model",),
            "Accepted calls that have not ended.",
        )  # fmt: skip
        self.disconnects = self._counter(
            "headway_client_disconnects", "headway.client.disconnects", "{request}", ("model",),
            "Calls whose client went away before the end.",
        )  # fmt: skip
        self.upstream_errors = self._counter(
            "headway_upstream_errors", "headway.upstream.errors", "{error}", ("engine", "outcome"),
            "Engine calls that failed, by engine and by how.",
        )  # fmt: skip
        self.members_dropped = self._counter(
            "headway_request_members_dropped", "headway.request.members_dropped", "{member}",
            ("treatment",),
            "Members of request bodies not forwarded: unknown ones and stripped ones.",
        )  # fmt: skip
        self.connections_refused = self._counter(
            "headway_connections_refused", "headway.connections.refused", "{connection}",
            ("cause",),
            "Connections closed by a limit of the server before a call was read.",
        )  # fmt: skip
        self.traces = self._counter(
            "headway_traces", "headway.traces", "{trace}", ("cause",),
            "Calls that left a trace and a log line, by why; over_limit and lost ones did not.",
        )  # fmt: skip
        self.heartbeats = self._counter(
            "headway_queue_heartbeats", "headway.queue.heartbeats", "{comment}", ("model",),
            "Comments sent to streams that wait for a seat.",
        )  # fmt: skip
        self.streams_cut = self._counter(
            "headway_streams_cut", "headway.streams.cut", "{stream}", ("model",),
            "Streams ended in the middle because their budget was spent.",
        )  # fmt: skip
        self.stream_resumes = self._counter(
            "headway_stream_resumes", "headway.stream.resumes", "{stream}", ("resume_class", "outcome"),
            "Streams that lost their engine, by how they can go on elsewhere (continue, replay, lossless, none)"
            " and by what came of it: resumed, ended (only the end was lost), diverged, not_possible or no_engine.",
        )  # fmt: skip
        self.resume_gap = self._histogram(
            "headway_stream_resume_gap_seconds", "headway.stream.resume.gap", "s", ("resume_class",),
            "From the loss of a stream's engine to the next engine's first new words.",
            bounds=_QUEUE_S,
        )  # fmt: skip
        self.resume_tokens = self._counter(
            "headway_stream_resume_tokens", "headway.stream.resume.tokens", "{token}", ("resume_class",),
            "Tokens of moved streams that a second engine had to say again.",
        )  # fmt: skip
        self.resume_bytes = self._gauge(
            "headway_stream_record_bytes", "headway.stream.record.bytes", "By", (),
            "Bytes kept of running streams, so that other engines can go on with them.",
        )  # fmt: skip
        self.cached_answers = self._counter(
            "headway_response_cache_calls", "headway.response_cache.calls", "{request}",
            ("tenant_class", "result"),
            "Calls that may share answers; the result is hit or miss.",
        )  # fmt: skip
        self.cache_bytes = self._gauge(
            "headway_response_cache_bytes", "headway.response_cache.bytes", "By", (),
            "Bytes of the answers that are kept to be given again.",
        )  # fmt: skip
        self.idempotent_calls = self._counter(
            "headway_idempotent_calls", "headway.idempotent.calls", "{request}", ("result",),
            "Calls with an idempotency key: fresh, replayed, in_progress, mismatch or not_stored.",
        )  # fmt: skip

        self.slo_calls = self._counter(
            "headway_slo_calls", "headway.slo.calls", "{request}",
            ("slo_class", "tenant_class", "result"),
            "Ended calls by whether they kept their targets: met, or what was missed first: ttft, tpot, deadline,"
            " failed or refused. Calls that their client left are not counted.",
        )  # fmt: skip
        self.slo_target = self._gauge(
            "headway_slo_target_seconds", "headway.slo.target", "s", ("slo_class", "target"),
            "What an SLO class asks for: ttft, tpot (of each token after the first) and e2e.",
        )  # fmt: skip
        self.placement_ttft = self._histogram(
            "headway_placement_ttft_seconds", "headway.placement.ttft", "s", ("model", "kind"),
            "From a placement to its first token, as it was predicted when it was decided (predicted), as it was"
            " (actual), and how far the two lie apart (error).",
            bounds=_TTFT_S,
        )  # fmt: skip

        # What the gate decides and settles.
        self.admissions = self._counter(
            "headway_admissions", "headway.admissions", "{decision}", ("verdict", "reason"),
            "Decisions, by verdict; a queued call is decided again when it is placed.",
        )  # fmt: skip
        self.refusals = self._counter(
            "headway_refusals", "headway.refusals", "{request}", ("reason", "tenant_class"),
            "Calls refused, by reason.",
        )  # fmt: skip
        self.decision_time = self._histogram(
            "headway_decision_duration_seconds", "headway.decision.duration", "s", ("verdict",),
            "Time of one decision over the fleet.",
            bounds=_DECISION_S,
        )  # fmt: skip
        self.queue_time = self._histogram(
            "headway_queue_duration_seconds", "headway.queue.duration", "s", ("model",
            "tenant_class"),
            "Time that placed calls spent waiting for a seat.",
            bounds=_QUEUE_S,
        )  # fmt: skip
        self.settled = self._counter(
            "headway_settled_usd", "headway.settled", "{USD}", ("model", "tenant_class", "outcome"),
            "Dollars charged to tenants.",
        )  # fmt: skip
        self.attempts = self._counter(
            "headway_attempts", "headway.attempts", "{attempt}", ("leg", "outcome"),
            "Calls of engines, by leg (whole, prefill, decode) and by how they ended.",
        )  # fmt: skip
        self.retries = self._counter(
            "headway_retries", "headway.retries", "{retry}", ("verdict",),
            "Retries wanted after a failure before the first byte, allowed or denied.",
        )  # fmt: skip
        for verdict in ("allowed", "denied"):
            self.retries.add((verdict,), 0)

        self.prefill_fallbacks = self._counter(
            "headway_prefill_fallbacks", "headway.prefill.fallbacks", "{request}", ("model", "leg"),
            "First legs of pairs that failed, by what was done instead: another prefill, or the whole call"
            " on the engine that decodes.",
        )  # fmt: skip

        self.tenant_spent = self._counter(
            "headway_tenant_spent_usd", "headway.tenant.spent", "{USD}", ("tenant",),
            "Dollars charged, by name for the tenants that spend most, the others together as other.",
        )  # fmt: skip
        self.tenant_requests = self._counter(
            "headway_tenant_requests", "headway.tenant.requests", "{request}", ("tenant", "outcome"),
            "Calls by how they ended, by name for the tenants that spend most, the others together as other.",
        )  # fmt: skip
        self.wasted = self._counter(
            "headway_wasted_usd", "headway.wasted", "{USD}", ("cause",),
            "Dollars charged for nothing: to workflows that did not succeed (workflow_failed, workflow_expired,"
            " workflow_cancelled) and to calls without a workflow that did not (call_failed, call_cancelled,"
            " call_expired).",
        )  # fmt: skip
        self.reserved = self._gauge(
            "headway_calls_reserved_usd", "headway.calls.reserved", "{USD}", (),
            "Dollars held for calls of this replica that have not ended.",
        )  # fmt: skip
        self.budget = self._gauge(
            "headway_budget_usd", "headway.budget", "{USD}", ("budget_scope", "kind"),
            "Budgets in dollars of tenants and keys, added up: their limit, what is spent in the window that holds,"
            " and what replicas hold of them in advance (reserved). Told by the leader.",
        )  # fmt: skip
        self.tenant_budget = self._gauge(
            "headway_tenant_budget_usd", "headway.tenant.budget", "{USD}", ("tenant", "kind"),
            "The same for each tenant, by name for those that spent most, the others together as other.",
        )  # fmt: skip
        self.fleet_cost = self._counter(
            "headway_fleet_cost_usd", "headway.fleet.cost", "{USD}", ("gpu_type", "region"),
            "What GPUs of nodes that are heard cost, at the price of their type, while this replica led.",
        )  # fmt: skip

        # Workflows, counted where their end was told.
        self.workflows_ended = self._counter(
            "headway_workflows_ended", "headway.workflows.ended", "{workflow}",
            ("scope", "tenant_class", "slo_class", "state"),
            "Workflows that ended: succeeded and failed by their tenant's word, cancelled, or expired.",
        )  # fmt: skip
        self.workflows_running = self._gauge(
            "headway_workflows_running", "headway.workflows.running", "{workflow}", ("scope",),
            "Workflows under way on all replicas. Told by the leader.",
        )  # fmt: skip
        self.workflow_spent = self._counter(
            "headway_workflow_spent_usd", "headway.workflow.spent", "{USD}",
            ("scope", "tenant_class", "state"),
            "Dollars that ended workflows were charged.",
        )  # fmt: skip
        self.workflow_cost = self._histogram(
            "headway_workflow_cost_usd", "headway.workflow.cost", "{USD}", ("scope", "state"),
            "What one workflow was charged in all.",
            bounds=_WORKFLOW_USD,
        )  # fmt: skip
        self.workflow_steps = self._histogram(
            "headway_workflow_steps", "headway.workflow.steps", "{step}", ("scope", "state"),
            "Steps of one workflow in which a call succeeded.",
            bounds=_STEPS,
        )  # fmt: skip
        self.workflow_time = self._histogram(
            "headway_workflow_duration_seconds", "headway.workflow.duration", "s", ("scope", "state"),
            "From a workflow's creation to its end.",
            bounds=_WORKFLOW_S,
        )  # fmt: skip
        self.late_kills = self._counter(
            "headway_workflow_late_kills", "headway.workflow.late_kills", "{workflow}", ("scope", "state"),
            "Workflows that expired or were cancelled after half of their expected steps had been paid for.",
        )  # fmt: skip
        self.workflows_uncounted = self._counter(
            "headway_workflows_uncounted", "headway.workflows.uncounted", "{workflow}", (),
            "Ended workflows that were not looked at any more, because too many ended at once.",
        )  # fmt: skip

        # The life of policy bundles.
        self.policy_load_failures = self._counter(
            "headway_policy_load_failures", "headway.policy.load_failures", "{failure}", (),
            "Policy revisions that could not be used; the one before them rules on.",
        )  # fmt: skip
        self.policy_comparisons = self._counter(
            "headway_policy_comparisons", "headway.policy.comparisons", "{request}", ("change",),
            "Calls ruled by the active and the candidate bundle, by what the candidate changes.",
        )  # fmt: skip
        self.policy_rollbacks = self._counter(
            "headway_policy_rollbacks", "headway.policy.rollbacks", "{rollback}", (),
            "Candidate bundles that this replica took back by itself.",
        )  # fmt: skip

        # The replica itself.
        self.build = self._gauge(
            "headway_build_info", "headway.build", "1", ("version",),
            "1, for the version that runs.",
        )  # fmt: skip
        self.leads = self._gauge(
            "headway_leader", "headway.leader", "1", (),
            "1 while this replica leads: it alone plans, sends commands and reads sums for all.",
        )  # fmt: skip
        self.store_reachable = self._gauge(
            "headway_postgres_reachable", "headway.postgres.reachable", "1", (),
            "1 when PostgreSQL answered this replica's latest question, asked every few seconds.",
        )  # fmt: skip
        self.bus_connected = self._gauge(
            "headway_nats_connected", "headway.nats.connected", "1", (),
            "1 while this replica is connected to NATS.",
        )  # fmt: skip
        self.replicas_live = self._gauge(
            "headway_replicas_live", "headway.replicas.live", "{replica}", (),
            "Replicas that PostgreSQL heard of lately. Told by the leader.",
        )  # fmt: skip
        self.requests_lost = self._counter(
            "headway_requests_lost", "headway.requests.lost", "{request}", (),
            "Calls of replicas that died, ended by this one; nothing was charged for them.",
        )  # fmt: skip
        self.nodes = self._gauge(
            "headway_nodes", "headway.nodes", "{node}", ("gpu_type", "region", "state"),
            "Nodes of the catalogue: heard, silent (heard once, and not lately) or unknown (never heard here).",
        )  # fmt: skip
        self.engines = self._gauge(
            "headway_engines", "headway.engines", "{engine}",
            ("model", "gpu_type", "role", "region", "state"),
            "Engines by what they do: starting, serving, draining, sleeping, stopped or failed as their agents tell,"
            " cordoned, or silent with their node.",
        )  # fmt: skip
        self.engine_info = self._gauge(
            "headway_engine_info", "headway.engine", "1",
            ("engine", "model", "region", "node", "gpu_type", "role"),
            "1, for where an engine runs and what it is.",
        )  # fmt: skip
        self.engine_accepting = self._gauge(
            "headway_engine_accepting", "headway.engine.accepting", "1",
            ("engine", "model", "region"),
            "1 for an engine that takes new work, by its agent and as far as this replica hears.",
        )  # fmt: skip
        self.engine_started = self._gauge(
            "headway_engine_start_time_seconds", "headway.engine.start_time", "s",
            ("engine", "model", "region"),
            "Unix time of an engine's latest start; it changes with each cold start.",
        )  # fmt: skip
        self.engine_seats = self._gauge(
            "headway_engine_seats_capacity", "headway.engine.seats.capacity", "{seat}",
            ("engine", "model", "region"), "Seats that an engine has, for all replicas.",
        )  # fmt: skip
        self.engine_running = self._gauge(
            "headway_engine_calls_running", "headway.engine.calls.running", "{request}",
            ("engine", "model", "region"), "Calls in an engine's batch, of all replicas.",
        )  # fmt: skip
        self.engine_waiting = self._gauge(
            "headway_engine_calls_waiting", "headway.engine.calls.waiting", "{request}",
            ("engine", "model", "region"), "Calls that wait inside an engine, of all replicas.",
        )  # fmt: skip
        self.engine_kv_capacity = self._gauge(
            "headway_engine_kv_tokens_capacity", "headway.engine.kv_tokens.capacity", "{token}",
            ("engine", "model", "region"), "KV tokens that an engine can hold.",
        )  # fmt: skip
        self.engine_kv_used = self._gauge(
            "headway_engine_kv_tokens_used", "headway.engine.kv_tokens.used", "{token}",
            ("engine", "model", "region"), "KV tokens that an engine holds, as it tells.",
        )  # fmt: skip
        self.hbm = self._gauge(
            "headway_hbm_bytes", "headway.hbm", "By",
            ("model", "gpu_type", "region", "kind"),
            "Memory of engines' GPUs by what it is for: weights, kv_used, kv_free, and the rest (other), by the"
            " catalogue and what the engines tell.",
        )  # fmt: skip
        self.engine_compute = self._gauge(
            "headway_engine_compute_ratio", "headway.engine.compute.ratio", "1",
            ("engine", "model", "region"),
            "Share of arithmetic in what an engine's next step must do, by the roofline: above a half it is bound"
            " by compute, below by memory.",
        )  # fmt: skip
        self.pool_saturation = self._gauge(
            "headway_pool_saturation_ratio", "headway.pool.saturation.ratio", "1", ("model",),
            "Used over usable seats of a model's engines, with the calls of all replicas; at 1 nothing more fits.",
        )  # fmt: skip
        self.pool_accepting = self._gauge(
            "headway_pool_engines_accepting", "headway.pool.engines.accepting", "{engine}", ("model",),
            "Engines of a model of the catalogue that take new work.",
        )  # fmt: skip

        # What the scheduler weighs.
        self.dispatch_time = self._histogram(
            "headway_dispatch_duration_seconds", "headway.dispatch.duration", "s", (),
            "Time of one pass over the queue, placing calls together where several seats are free.",
            bounds=_DECISION_S,
        )  # fmt: skip
        self.batches = self._counter(
            "headway_batches", "headway.batches", "{batch}", ("result",),
            "Times that waiting calls were weighed together: better than one after the other, or the same.",
        )  # fmt: skip
        self.axis_cost = self._gauge(
            "headway_axis_cost_usd", "headway.axis.cost", "{USD}", ("axis",),
            "Mean dollars of each axis in what placements cost, over the latest explained ones; below 0 it speaks for"
            " the engine that was taken.",
        )  # fmt: skip
        self.axis_objections = self._counter(
            "headway_axis_objections", "headway.axis.objections", "{candidate}", ("axis",),
            "Engines that could not take a call, by the first axis that objected, over refusals and some other calls.",
        )  # fmt: skip

        # State that others hold; each gauge asks its owner when it is read.
        self.queue_depth = self._gauge(
            "headway_queue_depth", "headway.queue.depth", "{request}", ("model",),
            "Calls that wait for a seat.",
        )  # fmt: skip
        self.pool_seats_promised = self._gauge(
            "headway_pool_seats_promised", "headway.pool.seats.promised", "{seat}", ("model",),
            "Seats that the workflows which this replica let in need to end in time.",
        )  # fmt: skip
        self.pool_committed_ratio = self._gauge(
            "headway_pool_committed_ratio", "headway.pool.committed.ratio", "1", ("model",),
            "Share of a pool's seats that may be promised.",
        )  # fmt: skip
        self.pool_stretch_ratio = self._gauge(
            "headway_pool_stretch_ratio", "headway.pool.stretch.ratio", "1", ("model",),
            "How far calls in flight may stretch the time per token of an empty engine.",
        )  # fmt: skip
        self.pool_price = self._gauge(
            "headway_pool_price_usd_per_second", "headway.pool.price", "{USD}/s", ("model",),
            "What a second of work must be worth to begin; 0 while there is room for all.",
        )  # fmt: skip
        self.pool_load_ratio = self._gauge(
            "headway_pool_load_ratio", "headway.pool.load.ratio", "1", ("model",),
            "Work that is asked for over what the pool can do in that time; 0 before that is known.",
        )  # fmt: skip
        self.pool_appointments = self._gauge(
            "headway_pool_appointments", "headway.pool.appointments", "{workflow}", ("model",),
            "Workflows that were told when to come back.",
        )  # fmt: skip
        self.pool_level = self._gauge(
            "headway_pool_level", "headway.pool.level", "1", ("model",),
            "Rank below which workflows do not begin; 0 refuses nobody.",
        )  # fmt: skip
        self.pool_ramp_ratio = self._gauge(
            "headway_pool_ramp_ratio", "headway.pool.ramp.ratio", "1", ("model",),
            "Share of its room that a pool may use while it is warmed up; 0 cold, 1 warm.",
        )  # fmt: skip
        self.pool_breaker_state = self._gauge(
            "headway_pool_breaker_state", "headway.pool.breaker.state", "1", ("model", "region"),
            "Breaker of a model in a region: 0 closed, 1 half-open, 2 open.",
        )  # fmt: skip
        self.pool_retries_left = self._gauge(
            "headway_pool_retries_left", "headway.pool.retries.left", "{retry}", ("model",),
            "Retries that the budget of a pool still allows in the window that holds.",
        )  # fmt: skip
        self.tenants_without_retries = self._gauge(
            "headway_tenants_without_retries", "headway.tenants.without_retries", "{tenant}", (),
            "Of the tenants that called of late, those whose retry budget is spent.",
        )  # fmt: skip
        self.engine_breaker_state = self._gauge(
            "headway_engine_breaker_state", "headway.engine.breaker.state", "1",
            ("engine", "model", "region"),
            "Breaker of an engine: 0 closed, 1 half-open, 2 open.",
        )  # fmt: skip
        self.engine_cordoned = self._gauge(
            "headway_engine_cordoned", "headway.engine.cordoned", "1",
            ("engine", "model", "region"),
            "1 for an engine that its agent keeps from new work: by command, crash loop or GPU.",
        )  # fmt: skip
        self.engine_sleep_level = self._gauge(
            "headway_engine_sleep_level", "headway.engine.sleep.level", "1",
            ("engine", "model", "region"),
            "0 awake, 1 weights in host memory, 2 weights dropped.",
        )  # fmt: skip
        self.engine_load_seconds = self._gauge(
            "headway_engine_load_seconds", "headway.engine.load.duration", "s",
            ("engine", "model", "region"),
            "What the engine's start took until it served.",
        )  # fmt: skip
        self.gpu_memory_used = self._gauge(
            "headway_gpu_memory_used_bytes", "headway.gpu.memory.used", "By", ("node", "gpu"),
            "Memory in use on a GPU, as its driver tells.",
        )  # fmt: skip
        self.gpu_memory_total = self._gauge(
            "headway_gpu_memory_total_bytes", "headway.gpu.memory.total", "By", ("node", "gpu"),
            "Memory of a GPU.",
        )  # fmt: skip
        self.gpu_utilisation_ratio = self._gauge(
            "headway_gpu_utilisation_ratio", "headway.gpu.utilisation", "1", ("node", "gpu"),
            "Share of time in which some kernel ran on a GPU.",
        )  # fmt: skip
        self.gpu_temperature = self._gauge(
            "headway_gpu_temperature_celsius", "headway.gpu.temperature", "Cel", ("node", "gpu"),
            "Temperature of a GPU.",
        )  # fmt: skip
        self.gpu_ecc_uncorrected = self._gauge(
            "headway_gpu_ecc_uncorrected_errors", "headway.gpu.ecc.uncorrected", "{error}",
            ("node", "gpu"),
            "Memory errors that could not be corrected since the driver was loaded.",
        )  # fmt: skip
        self.gpu_at_fault = self._gauge(
            "headway_gpu_at_fault", "headway.gpu.at_fault", "1", ("node", "gpu"),
            "1 for a GPU that can not be trusted, after an Xid error or a memory error.",
        )  # fmt: skip
        self.engine_ramp_ratio = self._gauge(
            "headway_engine_ramp_ratio", "headway.engine.ramp.ratio", "1",
            ("engine", "model", "region"),
            "Share of its room that an engine may use while it, or its pool, is new.",
        )  # fmt: skip
        self.engine_seats_withheld = self._gauge(
            "headway_engine_seats_withheld", "headway.engine.seats.withheld", "{seat}",
            ("engine", "model", "region"),
            "Seats lent that ramp, back-pressure or a doubtful breaker keep empty.",
        )  # fmt: skip
        self.engine_attempts_expected = self._gauge(
            "headway_engine_attempts_expected", "headway.engine.attempts.expected", "{attempt}",
            ("engine", "model", "region"),
            "How often a call must be sent to an engine until it succeeds, by its latest faults.",
        )  # fmt: skip
        self.seats_lent = self._gauge(
            "headway_engine_seats_lent", "headway.engine.seats.lent", "{seat}",
            ("engine", "model", "region"), "Seats that an engine's agent has lent to this replica.",
        )  # fmt: skip
        self.seats_taken = self._gauge(
            "headway_engine_seats_taken", "headway.engine.seats.taken", "{seat}",
            ("engine", "model", "region"), "Seats that calls of this replica hold.",
        )  # fmt: skip
        self.kv_tokens_lent = self._gauge(
            "headway_engine_kv_tokens_lent", "headway.engine.kv_tokens.lent", "{token}",
            ("engine", "model", "region"),
            "KV tokens that an engine's agent has lent to this replica.",
        )  # fmt: skip
        self.kv_tokens_taken = self._gauge(
            "headway_engine_kv_tokens_taken", "headway.engine.kv_tokens.taken", "{token}",
            ("engine", "model", "region"), "KV tokens that calls of this replica may come to hold.",
        )  # fmt: skip
        self.policy_disagreements = self._gauge(
            "headway_policy_disagreements", "headway.policy.disagreements", "{ruling}", (),
            "Spot checks in which generated rules and CEL did not agree; anything above 0 is a defect.",
        )  # fmt: skip
        self.journal_depth = self._gauge(
            "headway_journal_entries_pending", "headway.journal.entries.pending", "{entry}", (),
            "Journal entries not yet written to the database.",
        )  # fmt: skip

        self.rows_forgotten = self._counter(
            "headway_store_rows_forgotten", "headway.store.rows.forgotten", "{row}", ("table",),
            "Rows that were deleted because of their age while this replica led.",
        )  # fmt: skip

        # What the planner wants; read from what the leader told this replica last.
        self.plan_rounds = self._counter(
            "headway_plan_rounds", "headway.plan.rounds", "{round}", ("result",),
            "Rounds of the planner while this replica led: planned, crashed, timed_out or refused.",
        )  # fmt: skip
        self.plan_moves = self._counter(
            "headway_plan_moves", "headway.plan.moves", "{move}", ("kind", "result"),
            "Moves of plans that ended while this replica led: done, failed, undone or stuck.",
        )  # fmt: skip
        self.plan_age = self._gauge(
            "headway_plan_age_seconds", "headway.plan.age", "s", (),
            "Time since the leader last made a plan; it stands until the next one.",
        )  # fmt: skip
        self.plan_revision = self._gauge(
            "headway_plan_revision", "headway.plan.revision", "1", (),
            "Revision of the plan that stands.",
        )  # fmt: skip
        self.plan_gap = self._gauge(
            "headway_plan_gap_ratio", "headway.plan.gap.ratio", "1", (),
            "How far the plan may lie above the best one, by the solver's bound.",
        )  # fmt: skip
        self.plan_solve_time = self._gauge(
            "headway_plan_solve_seconds", "headway.plan.solve", "s", (),
            "Time that the solver took for the plan.",
        )  # fmt: skip
        self.desired_engines = self._gauge(
            "headway_desired_engines", "headway.desired.engines", "{engine}",
            ("model", "gpu_type", "role", "region"),
            "Engines that the plan wants.",
        )  # fmt: skip
        self.desired_nodes = self._gauge(
            "headway_desired_nodes", "headway.desired.nodes", "{node}", ("gpu_type", "region"),
            "Nodes that the plan wants: what an autoscaler follows.",
        )  # fmt: skip
        self.pool_kv_shadow_price = self._gauge(
            "headway_pool_kv_shadow_price_usd_per_token_second", "headway.pool.kv.shadow_price",
            "{USD}/s", ("model", "gpu_type", "role", "region"),
            "What one more KV token-second would save, beyond its rent.",
        )  # fmt: skip
        self.pool_gpu_shadow_price = self._gauge(
            "headway_pool_gpu_shadow_price_usd_per_second", "headway.pool.gpu.shadow_price",
            "{USD}/s", ("model", "gpu_type", "role", "region"),
            "What one more second of an engine would save, beyond its rent.",
        )  # fmt: skip
        self.class_bid_price = self._gauge(
            "headway_class_bid_price_usd", "headway.class.bid_price", "{USD}", ("class_id",),
            "Value that one workflow of a class displaces; below it, it is worth less than its place.",
        )  # fmt: skip

        # What engines tell of their prefix caches.
        self.kv_events = self._counter(
            "headway_kv_events", "headway.kv.events", "{event}", ("engine",),
            "Blocks stored, removed or cleared, as engines told their agents.",
        )  # fmt: skip
        self.kv_batches = self._counter(
            "headway_kv_batches", "headway.kv.batches", "{message}", ("result",),
            "Reports of prefix caches: applied, repeated, waiting for those before them, early or stale (of a later or"
            " an earlier life of engine or agent) or refused.",
        )  # fmt: skip
        self.kv_gaps = self._counter(
            "headway_kv_gaps", "headway.kv.gaps", "{gap}", ("leg",),
            "Times that messages were missing, between engine and agent (engine) or agent and replica (bus).",
        )  # fmt: skip
        self.kv_replayed = self._counter(
            "headway_kv_replayed", "headway.kv.replayed", "{message}", ("leg",),
            "Messages that were asked for again and came, engine to agent (engine) or agent to replica (bus).",
        )  # fmt: skip
        self.kv_clears = self._counter(
            "headway_kv_clears", "headway.kv.clears", "{clear}", ("reason",),
            "Times that all that was known of an engine's prefix cache was given up: restarted, lost, cleared,"
            " overflow, missed (between agent and replica) or silent.",
        )  # fmt: skip
        self.kv_lag = self._histogram(
            "headway_kv_lag_seconds", "headway.kv.lag", "s", (),
            "From an engine's event to when this replica decides by it; the oldest event of each report.",
            bounds=_KV_LAG_S,
        )  # fmt: skip
        self.kv_blocks = self._gauge(
            "headway_engine_kv_blocks_cached", "headway.engine.kv.blocks.cached", "{block}",
            ("engine", "model", "region"),
            "Different blocks in the prefix cache of an engine that is followed.",
        )  # fmt: skip
        self.kv_sessions = self._gauge(
            "headway_engine_kv_calls_cached", "headway.engine.kv.calls.cached", "{request}",
            ("engine", "model", "region"),
            "Calls of this replica of which an engine is known to hold something.",
        )  # fmt: skip

        # Models chosen by outcomes.
        self.model_choices = self._counter(
            "headway_model_choices", "headway.model_choices", "{workflow}",
            ("choice_class", "model", "why"),
            "Workflows, and calls without one, that were given a model, by what decided.",
        )  # fmt: skip
        self.model_outcomes = self._counter(
            "headway_model_outcomes", "headway.model_outcomes", "{workflow}",
            ("choice_class", "model", "outcome"),
            "Workflows with a chosen model that ended and were counted here, by how they ended.",
        )  # fmt: skip

        self.tenants = NamedTenants(clock_s)
        self.tenant_spent.watch(self.tenants.spent_usd)
        self.tenant_requests.watch(self.tenants.requests)

    def all(self) -> tuple[Metric, ...]:
        return tuple(self._all)

    def _counter(self, name: str, otel: str, unit: str, labels: Labels, words: str) -> Counter:
        counter = Counter(
            Declaration(
                name=name, otel_name=otel, unit=unit, kind=Kind.COUNTER, labels=labels, help=words
            )
        )
        if not labels:
            # A rate needs to see a series at nothing before the first event.
            counter.add((), 0)
        self._all.append(counter)
        return counter

    def _gauge(self, name: str, otel: str, unit: str, labels: Labels, words: str) -> Gauge:
        gauge = Gauge(
            Declaration(
                name=name, otel_name=otel, unit=unit, kind=Kind.GAUGE, labels=labels, help=words
            )
        )
        self._all.append(gauge)
        return gauge

    def _histogram(
        self,
        name: str,
        otel: str,
        unit: str,
        labels: Labels,
        words: str,
        *,
        bounds: tuple[float, ...],
    ) -> Histogram:
        histogram = Histogram(
            Declaration(
                name=name,
                otel_name=otel,
                unit=unit,
                kind=Kind.HISTOGRAM,
                labels=labels,
                help=words,
                bounds=bounds,
            )
        )
        self._all.append(histogram)
        return histogram
