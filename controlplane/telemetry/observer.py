"""What the gate reports, turned into series. The gate owns the shape of what it reports."""

from enum import StrEnum
from typing import Any, Final, Protocol

from controlplane.domain.decision import Placement, Reason, Refuse
from controlplane.domain.money import usd
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.telemetry.metrics import Metrics

MICROSECONDS_PER_SECOND = 1e6
MILLISECONDS_PER_SECOND = 1e3


# Refusals that break a promise to a tenant: neither its mistake nor the end of its money or rates.
CAPACITY_REASONS: Final = frozenset(
    {
        Reason.SHED_OVERLOAD,
        Reason.QUEUE_FULL,
        Reason.DEADLINE_UNREACHABLE,
        Reason.NO_CAPACITY,
        Reason.WARMING,
        Reason.STATE_UNAVAILABLE,
        Reason.POLICY_ERROR,
        Reason.INTERNAL_ERROR,
    }
)


# Ends of accepted calls that do so; others are the client's mistake, or a limit that its tenant set.
FAILURE_REASONS: Final = CAPACITY_REASONS | {
    Reason.UPSTREAM_ERROR,
    Reason.UPSTREAM_TIMEOUT,
    Reason.STREAM_INTERRUPTED,
}


class SloResult(StrEnum):
    """What became of a call's targets; of several that were missed, the first in this order."""

    MET = "met"
    REFUSED = "refused"
    FAILED = "failed"
    TTFT = "ttft"
    TPOT = "tpot"
    DEADLINE = "deadline"


class _Caller(Protocol):
    """The part of a call that is counted: whose it is."""

    @property
    def principal(self) -> Any: ...


class _Settled(Protocol):
    """The part of a ticket that is counted."""

    @property
    def call(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def queue_ms(self) -> float: ...
    @property
    def is_replayed(self) -> bool: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def request(self) -> Any: ...
    @property
    def static(self) -> Any: ...


class GateObserver:
    """Adds numbers; called on the request path."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def decided(self, verdict: str, reason: str, duration_us: float) -> None:
        self._metrics.admissions.add((verdict, reason))
        self._metrics.decision_time.observe(duration_us / MICROSECONDS_PER_SECOND, (verdict,))

    def settled(
        self, ticket: _Settled, state: RequestState, usage: Usage, charged_micro_usd: int
    ) -> None:
        metrics = self._metrics
        tenant_class = ticket.call.principal.tenant.tenant_class
        model = ticket.model.name
        charged_usd = usd(charged_micro_usd)
        metrics.settled.add((model, tenant_class, state), charged_usd)
        is_in_vain = charged_micro_usd > 0 and state is not RequestState.SUCCEEDED
        # What a workflow was charged is judged when the workflow ends.
        if is_in_vain and ticket.request.workflow is None:
            metrics.wasted.add((f"call_{state}",), charged_usd)
        if ticket.queue_ms > 0:
            metrics.queue_time.observe(
                ticket.queue_ms / MILLISECONDS_PER_SECOND, (model, tenant_class)
            )

        if state is RequestState.SUCCEEDED and not usage.is_estimated and not ticket.is_replayed:
            predicted = ticket.placement.cached_tokens
            add = metrics.prefix_tokens.add
            add((model, "prompt"), usage.prompt_tokens)
            add((model, "predicted"), predicted)
            add((model, "actual"), usage.cached_tokens)
            add((model, "error"), abs(predicted - usage.cached_tokens))

    def measured(
        self,
        ticket: _Settled,
        state: RequestState,
        reason: Reason | None,
        charged_micro_usd: int,
        *,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
    ) -> None:
        """A call that was not refused has ended: whose it was, and whether it kept its targets.

        To a client that went away, or that is to blame, nothing is promised any more.
        """
        tenant = ticket.call.principal.tenant
        self._metrics.tenants.ended(tenant.id, state, usd(charged_micro_usd))
        is_at_fault = state is RequestState.FAILED and reason not in FAILURE_REASONS
        if state is RequestState.CANCELLED or is_at_fault:
            return
        request = ticket.request
        if state is RequestState.EXPIRED:
            result = SloResult.DEADLINE
        elif state is not RequestState.SUCCEEDED:
            result = SloResult.FAILED
        elif ttft_ms is not None and ttft_ms > request.ttft_ms_max:
            result = SloResult.TTFT
        elif tpot_ms is not None and tpot_ms > request.tpot_ms_max:
            result = SloResult.TPOT
        elif ticket.call.received_ms + e2e_ms > request.deadline_ms:
            result = SloResult.DEADLINE
        else:
            result = SloResult.MET
        slo_class = ticket.static.tenant_slo_class
        self._metrics.slo_calls.add((slo_class, tenant.tenant_class, result))

    def first_token(self, model: str, predicted_ms: float, actual_ms: float) -> None:
        """How well a placement's first token was foretold; both in milliseconds from the decision."""
        observe = self._metrics.placement_ttft.observe
        observe(predicted_ms / MILLISECONDS_PER_SECOND, (model, "predicted"))
        observe(actual_ms / MILLISECONDS_PER_SECOND, (model, "actual"))
        observe(abs(predicted_ms - actual_ms) / MILLISECONDS_PER_SECOND, (model, "error"))

    def refused(self, call: _Caller | None, refuse: Refuse) -> None:
        tenant_class = ""
        if call is not None:
            tenant = call.principal.tenant
            tenant_class = tenant.tenant_class
            self._metrics.tenants.ended(tenant.id, RequestState.REFUSED, 0.0)
            if refuse.reason in CAPACITY_REASONS:
                # Of the class of its tenant: what its workflow's class is, may not have been read yet.
                labels = (tenant.slo_class, tenant_class, SloResult.REFUSED)
                self._metrics.slo_calls.add(labels)
        self._metrics.refusals.add((refuse.reason, tenant_class))

    def attempted(self, leg: str, outcome: AttemptOutcome) -> None:
        self._metrics.attempts.add((leg, outcome))

    def prefill_failed(self, model: str, *, is_elsewhere: bool) -> None:
        self._metrics.prefill_fallbacks.add((model, "prefill" if is_elsewhere else "whole"))

    def retried(self, *, is_allowed: bool) -> None:
        self._metrics.retries.add(("allowed" if is_allowed else "denied",))
