"""The cluster document: what an operator declares in YAML, checked whole before anything is
written.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from controlplane.domain.errors import ConfigurationError

ENTRIES_MAX = 10_000
# Bytes or floating-point operations a second.
RATE_MIN = 1e6
DOCUMENT_BYTES_MAX = 1024 * 1024

# One token of a bus subject, because agents' subjects carry it.
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?$")]
Name = Annotated[Identifier, Field(max_length=63)]
ModelName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=255)
]
EngineName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_/.-]*$", max_length=127)
]
ProfileName = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$", max_length=63)
]
Address = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:_-]+$", max_length=253)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00]*$")]
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Milliseconds = Annotated[int, Field(gt=0, le=2**31 - 1)]
Bytes = Annotated[int, Field(gt=0, le=2**62)]
# YAML reads 1e12 as text; it is a number all the same. What no hardware is as slow as would only be divided by.
Rate = Annotated[float, Field(ge=RATE_MIN, le=1e30, allow_inf_nan=False, strict=False)]
# Lists of a document become tuples; their entries stay strict.
_Entries = Field(max_length=ENTRIES_MAX, strict=False)
MicroUsd = Annotated[int, Field(ge=0, le=2**53)]
Usd = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GpuTypeDocument(_Strict):
    """Rates are per GPU. The price says where it comes from and of which day it is."""

    name: Name
    hbm_bytes: Bytes
    bandwidth_bytes_per_s: Rate
    flops_per_s: Rate
    price_micro_usd_per_hour: MicroUsd
    price_source: Label
    price_date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    fp8_flops_per_s: Annotated[float, Field(ge=0, le=1e24, allow_inf_nan=False)] = 0.0
    fp4_flops_per_s: Annotated[float, Field(ge=0, le=1e24, allow_inf_nan=False)] = 0.0


class ModelDocument(_Strict):
    name: ModelName
    parameters: Bytes
    layers: Count
    hidden_size: Count
    weights_bytes: Bytes
    kv_bytes_per_token: Bytes
    context_tokens_max: Count
    load_ms: Annotated[int, Field(ge=0, le=2**31 - 1)]
    price_prompt_micro_usd_per_mtok: MicroUsd
    price_cached_micro_usd_per_mtok: MicroUsd
    price_completion_micro_usd_per_mtok: MicroUsd
    parameters_active: Annotated[int, Field(ge=0, le=2**53)] = 0
    experts: Annotated[int, Field(ge=0, le=2**16)] = 0
    experts_active: Annotated[int, Field(ge=0, le=2**16)] = 0
    expert_weights_bytes: Annotated[int, Field(ge=0, le=2**53)] = 0
    kv_heads: Annotated[int, Field(ge=0, le=2**16)] = 0

    @model_validator(mode="after")
    def _parts_are_parts(self) -> Self:
        if self.parameters_active > self.parameters:
            raise ValueError(
                "`parameters_active` counts some of `parameters`, it can not exceed them"
            )
        if self.experts_active > self.experts:
            raise ValueError("`experts_active` can not exceed `experts`")
        if self.expert_weights_bytes > self.weights_bytes:
            raise ValueError("`expert_weights_bytes` can not exceed `weights_bytes`")
        return self


class AdapterDocument(_Strict):
    """A LoRA adapter of a model: served under its own name by the model's engines that have it loaded from
    `path` on their nodes. Prices that are left out are the model's.
    """

    name: ModelName
    adapter_of: ModelName
    path: Label
    price_prompt_micro_usd_per_mtok: MicroUsd | None = None
    price_cached_micro_usd_per_mtok: MicroUsd | None = None
    price_completion_micro_usd_per_mtok: MicroUsd | None = None


class SloClassDocument(_Strict):
    name: Name
    ttft_ms_max: Milliseconds
    tpot_ms_max: Milliseconds
    e2e_ms_max: Milliseconds
    value_micro_usd: MicroUsd
    late_micro_usd_per_s: MicroUsd


class TenantDocument(_Strict):
    """`budget_usd` is the most that the tenant may ever spend."""

    id: Name
    name: Label
    tenant_class: Name
    slo_class: Name
    budget_usd: Usd


class EngineDocument(_Strict):
    """An engine that the node's agent starts. `options` are checked by the adapter of its kind.

    `profile` names an engine profile that the agent knows; `options` stand above it.
    """

    engine_id: EngineName
    kind: Name
    model: ModelName
    role: Literal["prefill", "decode", "both"]
    gpus: Count
    options: dict[str, str | int | float | bool] = {}
    profile: ProfileName = ""


class NodeDocument(_Strict):
    id: Name
    region: Name
    gpu_type: Name
    gpus: Count
    address: Address
    engines: Annotated[tuple[EngineDocument, ...], _Entries] = ()


class ClusterDocument(_Strict):
    """Lists may be left out: what a document does not name stays as it is."""

    regions: Annotated[tuple[Name, ...], _Entries] = ()
    gpu_types: Annotated[tuple[GpuTypeDocument, ...], _Entries] = ()
    models: Annotated[tuple[ModelDocument, ...], _Entries] = ()
    adapters: Annotated[tuple[AdapterDocument, ...], _Entries] = ()
    slo_classes: Annotated[tuple[SloClassDocument, ...], _Entries] = ()
    tenants: Annotated[tuple[TenantDocument, ...], _Entries] = ()
    nodes: Annotated[tuple[NodeDocument, ...], _Entries] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _refuse_duplicates("regions", self.regions)
        _refuse_duplicates("gpu_types", (entry.name for entry in self.gpu_types))
        _refuse_duplicates("models", (entry.name for entry in self.models))
        names = [entry.name for entry in self.models]
        names += [entry.name for entry in self.adapters]
        _refuse_duplicates("models and adapters", names)
        _refuse_duplicates("slo_classes", (entry.name for entry in self.slo_classes))
        _refuse_duplicates("tenants", (entry.id for entry in self.tenants))
        _refuse_duplicates("nodes", (entry.id for entry in self.nodes))
        _refuse_duplicates(
            "engines", (engine.engine_id for node in self.nodes for engine in node.engines)
        )
        for node in self.nodes:
            taken = sum(engine.gpus for engine in node.engines)
            if taken > node.gpus:
                raise ValueError(
                    f"nodes: `{node.id}` has {node.gpus} GPUs and its engines take {taken}"
                )
        return self


def parse_cluster(text: str) -> ClusterDocument:
    """The document in `text` (YAML). Raises ConfigurationError that names the place and the
    problem.
    """
    if len(text.encode("utf-8", "surrogatepass")) > DOCUMENT_BYTES_MAX:
        raise ConfigurationError(f"the document is over {DOCUMENT_BYTES_MAX} bytes")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"the document is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            "the document must be a mapping of regions, gpu_types, models, slo_classes,"
            " tenants and nodes"
        )
    try:
        # An unquoted date is a date to YAML and a text here.
        plain = json.loads(json.dumps(content, default=str))
        return ClusterDocument.model_validate(plain)
    except ValidationError as error:
        raise ConfigurationError(_told(error)) from error


def _refuse_duplicates(where: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{where}: `{name}` is there twice; keep one")
        seen.add(name)


def _told(error: ValidationError) -> str:
    """The first problem, as a place in the document and a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "document"
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    return f"{place}: {first['msg'].removeprefix('Value error, ')}{rest}"
