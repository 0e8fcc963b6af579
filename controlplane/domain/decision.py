"""What a decision can say: admit with a placement, queue, or refuse with a reason from a closed set."""

from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.domain.fleet import EngineRow


class Reason(StrEnum):
    """Why a request did not succeed. The value is the metric label, the API's `code` and the word in `explain`."""

    INVALID_API_KEY = "invalid_api_key"
    FORBIDDEN_BY_POLICY = "forbidden_by_policy"
    INVALID_REQUEST = "invalid_request"
    REQUEST_TOO_LARGE = "request_too_large"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    WORKFLOW_NOT_FOUND = "workflow_not_found"
    WORKFLOW_ENDED = "workflow_ended"
    CONFLICT = "conflict"
    PRECONDITION_FAILED = "precondition_failed"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    RESPONSE_NOT_STORED = "response_not_stored"
    POLICY_ERROR = "policy_error"
    INSUFFICIENT_QUOTA = "insufficient_quota"
    RATE_LIMITED = "rate_limited"
    SHED_OVERLOAD = "shed_overload"
    DEFERRED = "deferred"
    QUEUE_FULL = "queue_full"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    FAN_OUT_EXCEEDED = "fan_out_exceeded"
    NO_CAPACITY = "no_capacity"
    WARMING = "warming"
    STATE_UNAVAILABLE = "state_unavailable"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    STREAM_INTERRUPTED = "stream_interrupted"
    INTERNAL_ERROR = "internal_error"


class Axis(StrEnum):
    """The seven things that can stand in the way of a placement, in the order in which they are asked."""

    GPU_TYPE = "gpu_type"
    KV_HEADROOM = "kv_headroom"
    WEIGHT_WARMTH = "weight_warmth"
    TENANT_PRIORITY = "tenant_priority"
    WORKFLOW = "workflow"
    LATENCY_BUDGET = "latency_budget"
    AGENTIC_SCOPE = "agentic_scope"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call runs: on `decode` alone, or prefilled on `prefill` and decoded on `decode`.

    `kv_tokens` is what the decode engine's credits are charged, `cached_tokens` the prompt tokens
    predicted to be reused, times in milliseconds from the decision.
    """

    decode: EngineRow
    prefill: EngineRow | None
    cached_tokens: int
    kv_tokens: int
    ttft_ms_predicted: float
    e2e_ms_predicted: float
    cost_micro_usd: float


@dataclass(frozen=True, slots=True)
class Admit:
    placement: Placement


@dataclass(frozen=True, slots=True)
class Queue:
    """Nothing fits at this instant, and something that can free capacity is under way."""

    reason: Reason


class Quantity(StrEnum):
    """What a call may have had too little of, with its unit."""

    WORTH_MICRO_USD_PER_S = "worth_micro_usd_per_s"
    SEATS = "seats"
    TIME_MS = "time_ms"
    MICRO_USD = "micro_usd"
    TOKENS = "tokens"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CALLS_IN_FLIGHT = "calls_in_flight"
    STEPS = "steps"


@dataclass(frozen=True, slots=True)
class Hurdle:
    """A number that kept a call out: what was there for it, and what would have let it in.

    `there` is None where that is not known at the instant of the decision; `of` names the account or
    who holds the limit, empty for the pool.
    """

    quantity: Quantity
    there: float | None
    needed: float
    of: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """`retry_after_ms` is an honest estimate, or None when there is none; `detail` says what to do.

    `decision` is the id under which the refusal can be explained, empty before it is recorded; `rule`
    names the policy rule that decided, empty when none did. `is_final` tells the client not to come
    back, also where the reason alone would let it. `hurdles` are told beside: refusals that differ in
    nothing else are the same.
    """

    reason: Reason
    detail: str
    retry_after_ms: int | None = None
    decision: str = ""
    rule: str = ""
    is_final: bool = False
    hurdles: tuple[Hurdle, ...] = field(default=(), compare=False)


Decision = Admit | Queue | Refuse


@dataclass(frozen=True, slots=True)
class AxisView:
    """What one axis said of one candidate: dollars, or an objection in words."""

    axis: Axis
    cost_micro_usd: float
    objection: str | None


@dataclass(frozen=True, slots=True)
class CandidateView:
    """One candidate of a past decision. A pair is shown with its prefill engine.

    `ttft_correction` and `tpot_correction` say how much longer than published its engines were
    measured to take, which the predictions hold already.
    """

    decode: str
    prefill: str | None
    gpu_type: str
    region: str
    axes: tuple[AxisView, ...]
    cached_tokens: int
    ttft_ms_predicted: float
    e2e_ms_predicted: float
    cost_micro_usd: float
    is_feasible: bool
    ttft_correction: float = 1.0
    tpot_correction: float = 1.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision as a person reads it: candidates cheapest first, infeasible ones last, and one sentence."""

    request_id: str
    model: str
    candidates: tuple[CandidateView, ...]
    winner: str | None
    runner_up: str | None
    reason: Reason | None
    sentence: str
