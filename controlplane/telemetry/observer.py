"""What the gate reports, turned into series. The gate owns the shape of what it reports."""

from typing import Any, Protocol

from controlplane.domain.decision import Placement, Refuse
from controlplane.domain.money import usd
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.telemetry.metrics import Metrics

MICROSECONDS_PER_SECOND = 1e6
MILLISECONDS_PER_SECOND = 1e3


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


class GateObserver:
    """Adds integers; called on the request path."""

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
        metrics.settled.add((model, tenant_class, state), usd(charged_micro_usd))
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

    def refused(self, call: _Caller | None, refuse: Refuse) -> None:
        tenant_class = "" if call is None else call.principal.tenant.tenant_class
        self._metrics.refusals.add((refuse.reason, tenant_class))

    def attempted(self, leg: str, outcome: AttemptOutcome) -> None:
        self._metrics.attempts.add((leg, outcome))

    def prefill_failed(self, model: str, *, is_elsewhere: bool) -> None:
        self._metrics.prefill_fallbacks.add((model, "prefill" if is_elsewhere else "whole"))

    def retried(self, *, is_allowed: bool) -> None:
        self._metrics.retries.add(("allowed" if is_allowed else "denied",))
