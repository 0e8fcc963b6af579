"""What operators declare: regions, GPU types, models, SLO classes, tenants, keys. Slow to change, read-only here."""

from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.domain.ids import (
    GpuTypeName,
    KeyId,
    ModelName,
    NodeId,
    RegionName,
    SloClassName,
    TenantId,
)
from controlplane.domain.money import token_cost_micro_usd


class Scope(StrEnum):
    """The kind of a workflow: how wide it fans out and how long it lives."""

    CHAT = "chat"
    COPILOT = "copilot"
    RESEARCH = "research"
    AUTONOMOUS = "autonomous"


class Role(StrEnum):
    """What an engine computes: prefill only, decode only, or both phases of a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class OperatorRole(StrEnum):
    """Rights of an operator key; each includes the ones before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """One kind of accelerator. Rates are per GPU: bytes/s, dense bf16 FLOP/s, micro-dollars/hour.

    `fp8_flops_per_s` and `fp4_flops_per_s` are dense too, 0 where the GPU has no such units.
    """

    name: GpuTypeName
    hbm_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    price_micro_usd_per_hour: int
    price_source: str
    price_date: str
    fp8_flops_per_s: float = 0.0
    fp4_flops_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model. KV and weights in bytes, prices in micro-dollars per million tokens.

    In a mixture of experts a token uses `parameters_active` of all `parameters` and
    `experts_active` of the `experts` of a layer, which hold `expert_weights_bytes` of the weights in
    all; 0 for a dense model. `kv_heads` is over how many GPUs the KV of a token can be split (1 for
    latent attention), 0 when nothing is said: over any number. An adapter (LoRA) is served by the engines
    of the model that it is `adapter_of`, where it is loaded from `adapter_path` on their nodes.
    """

    name: ModelName
    parameters: int
    layers: int
    hidden_size: int
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens_max: int
    load_ms: int
    price_prompt_micro_usd_per_mtok: int
    price_cached_micro_usd_per_mtok: int
    price_completion_micro_usd_per_mtok: int
    parameters_active: int = 0
    experts: int = 0
    experts_active: int = 0
    expert_weights_bytes: int = 0
    kv_heads: int = 0
    adapter_of: ModelName | None = None
    adapter_path: str = ""

    @property
    def base(self) -> ModelName:
        """The model whose engines serve this one: itself, but for an adapter."""
        return self.adapter_of or self.name

    def cost_micro_usd(self, *, prompt: int, cached: int, completion: int) -> int:
        """What a tenant pays for a call; `cached` counts the part of `prompt` that was reused."""
        return (
            token_cost_micro_usd(prompt - cached, self.price_prompt_micro_usd_per_mtok)
            + token_cost_micro_usd(cached, self.price_cached_micro_usd_per_mtok)
            + token_cost_micro_usd(completion, self.price_completion_micro_usd_per_mtok)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Targets in milliseconds, what a finished call is worth, and what a second of lateness costs."""

    name: SloClassName
    ttft_ms_max: int
    tpot_ms_max: int
    e2e_ms_max: int
    value_micro_usd: int
    late_micro_usd_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine with `gpus` equal GPUs, dialled at `address` (host only; agents report ports)."""

    id: NodeId
    region: RegionName
    gpu_type: GpuTypeName
    gpus: int
    address: str
    is_cordoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`token_budget` is the id of its account in tokens; the one in micro-dollars every tenant has."""

    id: TenantId
    name: str
    tenant_class: str
    slo_class: SloClassName
    is_disabled: bool
    cache_salt: str
    token_budget: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rates and a bound on calls in flight. None: no limit of this kind."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    calls_in_flight_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who calls: a tenant by one of its keys. `key_budgets` are the ids of the key's own accounts."""

    key_id: KeyId
    tenant: Tenant
    key_limits: Limits = Limits()
    key_budgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything declared, at one revision. Dictionaries are never changed after construction.

    `models` have engines of their own; `adapters` are served by those of their models, whose sizes they have.
    """

    revision: int
    regions: tuple[RegionName, ...]
    gpu_types: dict[GpuTypeName, GpuType]
    models: dict[ModelName, Model]
    slo_classes: dict[SloClassName, SloClass]
    nodes: dict[NodeId, Node]
    adapters: dict[ModelName, Model] = field(default_factory=dict)

    def served(self, name: ModelName) -> Model | None:
        """What tenants can ask for by this name."""
        return self.models.get(name) or self.adapters.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoad:
    """What loads of a model into engines of a node took, smoothed over `loads` starts. `started_ms` is
    when the latest began, in milliseconds of Unix time.
    """

    model: ModelName
    node_id: NodeId
    gpus: int
    medium: str
    load_ms: int
    loads: int
    started_ms: int
