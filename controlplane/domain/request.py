"""One call as the decision core sees it: numbers and names, no text of the tenant's."""

from dataclasses import dataclass

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import EngineId, ModelName, RequestId, TenantId, WorkflowId

# What a workflow without a budget of its own has left.
UNLIMITED_MICRO_USD = 2**62 - 1


@dataclass(frozen=True)  # no `slots`: the compiled core turns the fields into C members itself
class Request:
    """All instants are milliseconds of one monotonic clock; tokens are estimates made before tokenisation.

    `prefix` holds chained digests of the prompt over the position grid, shallowest first, and
    `prefix_tokens` the prompt tokens up to each of them. `regions` and `gpu_types` are bit masks of
    what policy allows (bits as in the fleet's tables). `home` is the engine that served the
    workflow's previous step. `step_gap_ms` is the expected pause before the workflow's next step,
    0 when this is its last one. `calls_in_flight` counts the workflow's other calls.
    `is_single_engine` forbids splitting prefill from decode. `priority` orders who is refused first
    when capacity is short (higher stays longer); `is_begun` marks a later step of a workflow that was
    admitted, which is never refused for load. A postponed call runs from `not_before_ms` on (0: at
    once), or only on idle capacity when `waits_for_idle`. A preferred call's tenant has less than its part of a
    contended pool. Nine answers in ten have at most `completion_tokens_high` tokens (0: not known). Hardly
    any falls short of `completion_tokens_least` tokens: a lower bound. `model` is the one whose engines can
    serve the call, and `adapter` must be loaded there, empty when none is asked for.
    """

    id: RequestId
    tenant: TenantId
    model: ModelName
    arrival_ms: int
    prompt_tokens: int
    completion_tokens_max: int
    completion_tokens_expected: int
    prefix: tuple[int, ...]
    prefix_tokens: tuple[int, ...]
    regions: int
    gpu_types: int
    weight: float
    ttft_ms_max: int
    tpot_ms_max: int
    deadline_ms: int
    value_micro_usd: int
    late_micro_usd_per_s: int
    scope: Scope
    workflow: WorkflowId | None
    step: int
    steps_expected: int
    workflow_deadline_ms: int
    workflow_spent_micro_usd: int
    workflow_remaining_micro_usd: int
    calls_in_flight: int
    fan_out_max: int
    step_gap_ms: int
    home: EngineId | None
    is_single_engine: bool
    priority: int
    is_begun: bool
    not_before_ms: int
    waits_for_idle: bool
    is_preferred: bool
    completion_tokens_high: int = 0
    completion_tokens_least: int = 1
    adapter: str = ""
