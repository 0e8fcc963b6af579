"""Shapes of policy documents. Unknown keys are refused: a misspelt limit would be no limit."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from controlplane.domain.catalog import Scope

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
# Globs over model names, which may hold a slash.
GLOB_PATTERN = r"^[A-Za-z0-9._/*?:@+-]{1,255}$"
RULES_MAX = 512
NAMES_MAX = 256
TOKENS_MAX = 10_000_000

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Glob = Annotated[str, StringConstraints(pattern=GLOB_PATTERN)]
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=NAMES_MAX)]
Globs = Annotated[tuple[Glob, ...], Field(min_length=1, max_length=NAMES_MAX)]
Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]


class _Document(BaseModel):
    # Validated in strict mode (`load.py`): a number in quotes is text, not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Entitlement(_Document):
    """One rule. It matches when tenant class, tenant id and model all do; globs may hold `*` and `?`.

    A matching `deny` wins over every `allow`. Regions and GPU types of all matching `allow` rules
    are intersected: each rule can only narrow.
    """

    name: Name
    effect: Literal["allow", "deny"]
    tenant_classes: Globs = ("*",)
    tenants: Globs = ("*",)
    models: Globs
    regions: Names | None = None
    gpu_types: Names | None = None

    @model_validator(mode="after")
    def _deny_names_no_places(self) -> "Entitlement":
        if self.effect == "deny" and (self.regions or self.gpu_types):
            msg = "a deny rule can not name regions or gpu_types; name them in the allow rule"
            raise ValueError(msg)
        return self


class Entitlements(_Document):
    kind: Literal["entitlements"]
    version: Literal[1]
    rules: Annotated[tuple[Entitlement, ...], Field(min_length=1, max_length=RULES_MAX)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Entitlements":
        seen: set[str] = set()
        for rule in self.rules:
            if rule.name in seen:
                msg = f"the rule name `{rule.name}` is used twice; names are how denials are told"
                raise ValueError(msg)
            seen.add(rule.name)
        return self


class ResponseCache(_Document):
    """Answers of deterministic calls are kept for `ttl_s` and given again at `price_ratio` of their cost."""

    ttl_s: Annotated[int, Field(ge=1, le=86_400)]
    price_ratio: Annotated[float, Field(ge=0, le=1)]


class TenantClass(_Document):
    """`weight` scales the value of success and the price of lateness; `priority` orders who is refused
    first when capacity is short (0 goes first); `reserve_ratio` is the share of a call's highest
    possible cost that is held while it runs. When the budget ends in mid-stream the answer is cut
    there or, with `over_budget: finish`, goes on uncharged. Rates are per tenant; null is no limit.
    """

    weight: Annotated[float, Field(gt=0, le=1_000)]
    completion_tokens_default: Tokens
    completion_tokens_max: Tokens
    reserve_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    may_disaggregate: bool = True
    slo_class: Name | None = None
    priority: Annotated[int, Field(ge=0, le=9)] = 5
    over_budget: Literal["cut", "finish"] = "cut"
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10_000_000_000)] | None = None
    calls_in_flight_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    response_cache: ResponseCache | None = None

    @model_validator(mode="after")
    def _default_is_within_max(self) -> "TenantClass":
        if self.completion_tokens_default > self.completion_tokens_max:
            msg = "completion_tokens_default is above completion_tokens_max; lower it"
            raise ValueError(msg)
        return self


class TenantClasses(_Document):
    kind: Literal["tenant_classes"]
    version: Literal[1]
    classes: Annotated[dict[Name, TenantClass], Field(min_length=1, max_length=NAMES_MAX)]


class ScopeLimits(_Document):
    """`fan_out_max` calls in flight at once, `steps_max` steps in all, `step_gap_ms` the expected pause
    before a next step.
    """

    fan_out_max: Annotated[int, Field(ge=1, le=100_000)]
    steps_max: Annotated[int, Field(ge=1, le=1_000_000)]
    step_gap_ms: Annotated[int, Field(ge=0, le=86_400_000)]


class Scopes(_Document):
    kind: Literal["scopes"]
    version: Literal[1]
    scopes: dict[Scope, ScopeLimits]

    @model_validator(mode="after")
    def _every_scope_is_there(self) -> "Scopes":
        missing = [scope.value for scope in Scope if scope not in self.scopes]
        if missing:
            msg = f"limits for {', '.join(f'`{name}`' for name in missing)} are missing; add them"
            raise ValueError(msg)
        return self


class SloDefaults(_Document):
    """The SLO class of calls of a scope, unless the tenant's class names one. Null: the tenant's own."""

    kind: Literal["slo_defaults"]
    version: Literal[1]
    by_scope: dict[Scope, Name | None]


class Admission(_Document):
    """How calls wait and who is refused when capacity is short.

    `order`: by the workflow's deadline, or by arrival. `tpot_stretch_ratio_max` and
    `tpot_stretch_ratio_min` bound how far calls in flight may stretch the time per token of an empty
    engine, at rest and under overload. `is_shedding: false` turns levels and commitments off.
    `is_bounding: false` leaves engines without a bound of ours on calls in flight.
    """

    kind: Literal["admission"]
    version: Literal[1]
    order: Literal["deadline", "arrival"] = "deadline"
    is_shedding: bool = True
    is_bounding: bool = True
    tpot_stretch_ratio_max: Annotated[float, Field(gt=1, le=10)] = 2.5
    tpot_stretch_ratio_min: Annotated[float, Field(gt=1, le=10)] = 1.5


Document = Entitlements | TenantClasses | Scopes | SloDefaults | Admission

DOCUMENTS: dict[str, type[Document]] = {
    "entitlements": Entitlements,
    "tenant_classes": TenantClasses,
    "scopes": Scopes,
    "slo_defaults": SloDefaults,
    "admission": Admission,
}
