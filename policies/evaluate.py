"""What a bundle grants one tenant for one model and scope. Pure; its answers may be kept by revision."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from controlplane.domain.catalog import Limits, Scope, Tenant
from controlplane.domain.ids import ModelName
from policies.documents import Entitlement, TenantClass
from policies.load import Bundle

# Names told when no rule of the bundle is the reason.
DEFAULT_DENY = "default-deny"
UNKNOWN_CLASS = "unknown-tenant-class"
DISABLED = "tenant-disabled"
NO_COMMON_PLACE = "no-common-region-or-gpu-type"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Rights and limits of a (tenant, model, scope). None for names of regions and GPU types: all.

    `denied_by` names the rule when `is_allowed` is false, and is empty otherwise. `slo_class` is None
    when the tenant's own applies. Answers are kept for `cache_ttl_s` seconds, 0 is not at all.
    """

    is_allowed: bool
    denied_by: str
    region_names: tuple[str, ...] | None
    gpu_type_names: tuple[str, ...] | None
    weight: float
    completion_tokens_default: int
    completion_tokens_max: int
    fan_out_max: int
    steps_max: int
    step_gap_ms: int
    reserve_ratio: float
    slo_class: str | None
    may_disaggregate: bool
    priority: int
    over_budget_cuts: bool
    limits: Limits
    cache_ttl_s: int
    cache_price_ratio: float


def terms_for(bundle: Bundle, tenant: Tenant, model: ModelName, scope: Scope) -> Terms:
    """Terms of `tenant` for calls of `model` in workflows of `scope`.

    Deny overrides allow; what no rule allows is denied.
    """
    matching = [rule for rule in bundle.entitlements.rules if _matches(rule, tenant, model)]
    allows = [rule for rule in matching if rule.effect == "allow"]
    regions = _common([rule.regions for rule in allows])
    gpu_types = _common([rule.gpu_types for rule in allows])
    tenant_class = bundle.tenant_classes.classes.get(tenant.tenant_class)
    limits = bundle.scopes.scopes[scope]

    cache = tenant_class.response_cache if tenant_class else None
    denied_by = ""
    denying = next((rule.name for rule in matching if rule.effect == "deny"), None)
    if tenant.is_disabled:
        denied_by = DISABLED
    elif tenant_class is None:
        denied_by = UNKNOWN_CLASS
    elif denying is not None:
        denied_by = denying
    elif not allows:
        denied_by = DEFAULT_DENY
    elif regions == () or gpu_types == ():
        denied_by = NO_COMMON_PLACE
    return Terms(
        is_allowed=not denied_by,
        denied_by=denied_by,
        region_names=regions,
        gpu_type_names=gpu_types,
        # Of a class that is not declared nothing is granted; the rest only has to be valid.
        weight=tenant_class.weight if tenant_class else 1.0,
        completion_tokens_default=tenant_class.completion_tokens_default if tenant_class else 1,
        completion_tokens_max=tenant_class.completion_tokens_max if tenant_class else 1,
        fan_out_max=limits.fan_out_max,
        steps_max=limits.steps_max,
        step_gap_ms=limits.step_gap_ms,
        reserve_ratio=tenant_class.reserve_ratio if tenant_class else 1.0,
        slo_class=(tenant_class.slo_class if tenant_class else None)
        or bundle.slo_defaults.by_scope.get(scope),
        may_disaggregate=tenant_class.may_disaggregate if tenant_class else False,
        priority=tenant_class.priority if tenant_class else 0,
        over_budget_cuts=tenant_class is None or tenant_class.over_budget == "cut",
        limits=_limits(tenant_class),
        cache_ttl_s=cache.ttl_s if cache else 0,
        cache_price_ratio=cache.price_ratio if cache else 1.0,
    )


def _limits(tenant_class: TenantClass | None) -> Limits:
    if tenant_class is None:
        return Limits()
    return Limits(
        requests_per_minute=tenant_class.requests_per_minute,
        tokens_per_minute=tenant_class.tokens_per_minute,
        calls_in_flight_max=tenant_class.calls_in_flight_max,
    )


def _matches(rule: Entitlement, tenant: Tenant, model: ModelName) -> bool:
    return (
        _any(rule.tenant_classes, tenant.tenant_class)
        and _any(rule.tenants, tenant.id)
        and _any(rule.models, model)
    )


def _any(globs: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _common(lists: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """What every rule that names places has in common, sorted; None when none does."""
    named = [set(names) for names in lists if names is not None]
    return tuple(sorted(set.intersection(*named))) if named else None
