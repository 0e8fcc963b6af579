"""Feeds the series of one answered call, whoever answered it."""

from controlplane.domain.outcome import RequestState, Usage
from controlplane.runtime.call import Call
from controlplane.telemetry.metrics import Metrics


def count_answer(
    metrics: Metrics,
    call: Call,
    model: str,
    state: RequestState,
    reason: str,
    used: Usage,
    ttft_ms: float | None,
    tpot_ms: float | None,
    e2e_ms: float,
    trace_id: str = "",
) -> None:
    """`model` answered; times are None where there is nothing to measure, `reason` is empty for success.

    `trace_id` names the trace of a sampled call, 32 hexadecimal digits, empty for the others.
    """
    tenant_class = call.principal.tenant.tenant_class
    metrics.requests.add((call.endpoint, model, tenant_class, state, reason))
    labels = (model, tenant_class)
    if ttft_ms is not None:
        metrics.ttft.observe(ttft_ms / 1000.0, labels, trace_id)
    if tpot_ms is not None:
        metrics.tpot.observe(tpot_ms / 1000.0, labels)
    if state is RequestState.SUCCEEDED:
        metrics.e2e.observe(e2e_ms / 1000.0, (call.endpoint, model, tenant_class), trace_id)
    metrics.tokens.add((model, tenant_class, "prompt"), used.prompt_tokens)
    if used.cached_tokens:
        metrics.tokens.add((model, tenant_class, "cached"), used.cached_tokens)
    metrics.tokens.add((model, tenant_class, "completion"), used.completion_tokens)
