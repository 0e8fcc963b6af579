"""What a bundle grants one tenant for one model and scope, and what its rules say of one call.

Pure: the same bundle and facts give the same answer, which may be kept by revision.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from controlplane.domain.catalog import Limits, Scope, Tenant
from controlplane.domain.ids import ModelName
from policies.attributes import Fact
from policies.compiled import CompiledRule, PhasePart, compiled_of, phases_of
from policies.documents import Admission, Entitlement, Level, Phase, Postpone, TenantClass
from policies.facts import LiveFacts, StaticFacts, as_json, has_unclean
from policies.load import Bundle
from policies.nearest import nearest_pass

# Names told when no rule of the bundle is the reason.
DEFAULT_DENY = "default-deny"
UNKNOWN_CLASS = "unknown-tenant-class"
DISABLED = "tenant-disabled"
NO_COMMON_PLACE = "no-common-region-or-gpu-type"
UNCLEAN_FACTS = "facts-not-plain"

# One ruling of so many is worked out by CEL too.
RECHECK_EVERY: Final = 256
# Sets of fired rules whose ruling is remembered.
RULINGS_KEPT: Final = 4_096

_MS_PER_HOUR: Final = 3_600_000
_HOURS_PER_DAY: Final = 24
_DAYS_PER_WEEK: Final = 7
# 1 January 1970 was a Thursday.
_FIRST_WEEKDAY: Final = 3


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


# ---------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Defer:
    """Run later: in these hours of these weekdays (UTC, 0 is Monday), or when capacity is idle.

    `wait_s_max` bounds the wait for idle capacity, None when only the time counts.
    """

    hours: tuple[int, ...]
    weekdays: tuple[int, ...]
    waits_for_idle: bool
    wait_s_max: int | None

    def opens_in_ms(self, wall_ms: int) -> int:
        """Time from `wall_ms` (Unix, UTC) to the first hour that is open; 0 within one."""
        hour = wall_ms // _MS_PER_HOUR
        for ahead in range(_HOURS_PER_DAY * _DAYS_PER_WEEK):
            day, hour_of_day = divmod(hour + ahead, _HOURS_PER_DAY)
            weekday = (day + _FIRST_WEEKDAY) % _DAYS_PER_WEEK
            if hour_of_day in self.hours and weekday in self.weekdays:
                return max(0, (hour + ahead) * _MS_PER_HOUR - wall_ms)
        # Loading refuses windows without a common hour.
        raise AssertionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What the rules that fired come to. Rules are named `document/rule`, in order.

    Deny goes before shed, shed before defer. `denied_by`, `shed_by` and `defer_by` name the deciding rule,
    and are empty when none did; `message` is its. `is_error`: an enforced rule could not be evaluated,
    which denies; `errors` are all such rules, `audited` those that are only recorded. None: not touched;
    `model` is empty when the call keeps its own.
    """

    fired: tuple[str, ...] = ()
    denied_by: str = ""
    message: str = ""
    is_error: bool = False
    errors: tuple[str, ...] = ()
    shed_by: str = ""
    retry_after_ms: int = 0
    defer: Defer | None = None
    defer_by: str = ""
    queue_class: str | None = None
    completion_tokens_max: int | None = None
    n_max: int | None = None
    region_names: tuple[str, ...] | None = None
    gpu_type_names: tuple[str, ...] | None = None
    model: str = ""
    priority: int | None = None
    reserve_permille: int | None = None
    warnings: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    audited: tuple[str, ...] = ()


# Nothing fired.
NEUTRAL: Final = Ruling()
UNCLEAN: Final = Ruling(
    denied_by=UNCLEAN_FACTS,
    message="names of the call hold control characters or are too long; use plain ones",
    is_error=True,
)


@dataclass(frozen=True, slots=True)
class StaticPart:
    """What the rules come to for one set of static facts. Of one policy; may be kept as long as that is.

    `asked` are the phases in which a rule can fire; in others the ruling is `otherwise`.
    """

    asked: dict[Phase, PhasePart]
    otherwise: Ruling


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleView:
    """One rule as `explain` shows it: what it read, and the nearest change with which it would not fire."""

    rule: str
    phase: Phase
    level: Level
    when: str
    effects: tuple[str, ...]
    message: str
    is_fired: bool
    error: str
    values: tuple[tuple[str, Fact], ...]
    nearest: str


class Policy:
    """A compiled bundle. Rulings are remembered; apart from that it never changes."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle: Final = bundle
        self.revision: Final = bundle.revision
        # Rulings in which the generated function and CEL differed: a defect, never expected.
        self.disagreements = 0
        self._phases = phases_of(
            [rule for rule in compiled_of(bundle.rules) if rule.level is not Level.OFF]
        )
        self._rulings: dict[tuple[Phase, int, int], Ruling] = {}
        self._asked = 0

    def has_rules(self, phase: Phase) -> bool:
        return phase in self._phases

    def static_part(self, static: StaticFacts) -> StaticPart:
        if has_unclean(static):
            return StaticPart({}, UNCLEAN)
        parts = {phase: rules.part(static) for phase, rules in self._phases.items()}
        return StaticPart(
            {phase: part for phase, part in parts.items() if not part.is_settled}, NEUTRAL
        )

    def rule(self, phase: Phase, part: StaticPart, live: LiveFacts) -> Ruling:
        """NEUTRAL when nothing fired."""
        asked = part.asked.get(phase)
        if asked is None:
            return part.otherwise
        fired, erred = self._phases[phase].fired(asked, live)
        self._asked += 1
        if self._asked % RECHECK_EVERY == 0:
            expected = self._phases[phase].oracle(asked.static, live)
            if expected != (fired, erred):
                self.disagreements += 1
                fired, erred = expected
        if not fired and not erred:
            return NEUTRAL
        ruling = self._rulings.get((phase, fired, erred))
        return self._ruling(phase, fired, erred) if ruling is None else ruling

    def oracle(
        self, phase: Phase, static: StaticFacts, live: LiveFacts
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Rules that fire and rules that fail, worked out by CEL alone: what `rule` has to agree with."""
        rules = self._phases.get(phase)
        if rules is None:
            return (), ()
        fired, erred = rules.oracle(static, live)
        return (
            tuple(rule.name for rule in rules.named(fired)),
            tuple(rule.name for rule in rules.named(erred)),
        )

    def explain(self, phase: Phase, static: StaticFacts, live: LiveFacts) -> list[RuleView]:
        """Every rule of the phase, those that fired first."""
        rules = self._phases.get(phase)
        if rules is None:
            return []
        facts = as_json(static, live)
        fired, erred = rules.oracle(static, live)
        views = [
            RuleView(
                rule=rule.name,
                phase=phase,
                level=rule.level,
                when=rule.rule.when,
                effects=rule.rule.effects,
                message=rule.rule.message,
                is_fired=bool(fired >> index & 1),
                error=rules.why(rule, facts) if erred >> index & 1 else "",
                values=tuple((name, facts[name]) for name in sorted(rule.reads)),
                nearest=nearest_pass(rule.condition, rule.tree, facts)
                if fired >> index & 1
                else "",
            )
            for index, rule in enumerate(rules.rules)
        ]
        return sorted(views, key=lambda view: (not (view.is_fired or view.error), view.rule))

    def _ruling(self, phase: Phase, fired: int, erred: int) -> Ruling:
        rules = self._phases[phase]
        ruling = combine(rules.named(fired), rules.named(erred), self.bundle.admission)
        if len(self._rulings) < RULINGS_KEPT:
            self._rulings[phase, fired, erred] = ruling
        return ruling


def compile_policy(bundle: Bundle) -> Policy:
    """Raises ConfigurationError when the CEL library is not the one that rules were written for."""
    return Policy(bundle)


def combine(
    fired: Sequence[CompiledRule], erred: Sequence[CompiledRule], admission: Admission
) -> Ruling:
    """What rules in the order of their names come to. The order of documents does not matter."""
    enforced = [rule for rule in fired if rule.level is Level.ENFORCE]
    warned = [rule for rule in fired if rule.level is Level.WARN]
    denying = [rule for rule in enforced if rule.rule.deny]
    broken = [rule for rule in erred if rule.level is Level.ENFORCE]
    shedding = [rule for rule in enforced if rule.rule.shed is not None]
    deferring = [rule for rule in enforced if rule.rule.defer is not None]
    regions = _common([rule.rule.route.regions for rule in enforced if rule.rule.route])
    gpu_types = _common([rule.rule.route.gpu_types for rule in enforced if rule.rule.route])
    denied_by, message = "", ""
    if denying:
        denied_by, message = denying[0].name, denying[0].rule.message
    elif broken:
        denied_by, message = broken[0].name, "the rule could not be evaluated; tell the operator"
    elif regions == () or gpu_types == ():
        denied_by, message = NO_COMMON_PLACE, "rules leave no region or GPU type in common"
    elif shedding:
        message = shedding[0].rule.message
    elif deferring:
        message = deferring[0].rule.message
    return Ruling(
        fired=tuple(rule.name for rule in (*enforced, *warned)),
        denied_by=denied_by,
        message=message,
        is_error=bool(broken) and not denying,
        errors=tuple(rule.name for rule in erred),
        shed_by=shedding[0].name if shedding else "",
        retry_after_ms=max(
            (rule.rule.shed.retry_after_ms for rule in shedding if rule.rule.shed), default=0
        ),
        defer=_deferred([rule.rule.defer for rule in deferring if rule.rule.defer]),
        defer_by=deferring[0].name if deferring else "",
        queue_class=_queue_class(enforced, admission),
        completion_tokens_max=_least(
            rule.rule.clamp.max_tokens if rule.rule.clamp else None for rule in enforced
        ),
        n_max=_least(rule.rule.clamp.n if rule.rule.clamp else None for rule in enforced),
        region_names=regions,
        gpu_type_names=gpu_types,
        model=next(
            (
                rule.rule.route.model
                for rule in enforced
                if rule.rule.route and rule.rule.route.model
            ),
            "",
        ),
        priority=_least(rule.rule.priority for rule in enforced),
        reserve_permille=_greatest(rule.rule.reserve_permille for rule in enforced),
        warnings=_warnings(enforced, warned),
        annotations=_annotations((*enforced, *warned)),
        audited=tuple(rule.name for rule in fired if rule.level is Level.AUDIT),
    )


def _warnings(enforced: Sequence[CompiledRule], warned: Sequence[CompiledRule]) -> tuple[str, ...]:
    """Texts of `warn`, and what rules at level warn would have done."""
    texts = [rule.rule.warn for rule in enforced if rule.rule.warn is not None]
    for rule in warned:
        if set(rule.rule.effects) - {"warn", "annotate"}:
            texts.append(rule.rule.message)
        if rule.rule.warn is not None:
            texts.append(rule.rule.warn)
    return tuple(dict.fromkeys(texts))


def _annotations(rules: Iterable[CompiledRule]) -> tuple[tuple[str, str], ...]:
    """Sorted; of one key the first rule's by name."""
    found: dict[str, str] = {}
    for rule in sorted(rules, key=lambda rule: rule.name):
        for key, text in (rule.rule.annotate or {}).items():
            found.setdefault(key, text)
    return tuple(sorted(found.items()))


def _deferred(postpones: Sequence[Postpone]) -> Defer | None:
    """Only when every rule allows it."""
    if not postpones:
        return None
    hours = set(range(_HOURS_PER_DAY))
    weekdays = set(range(_DAYS_PER_WEEK))
    for postpone in postpones:
        if postpone.until != "idle":
            hours &= postpone.until.hours_open()
            weekdays &= postpone.until.weekdays_open()
    return Defer(
        hours=tuple(sorted(hours)),
        weekdays=tuple(sorted(weekdays)),
        waits_for_idle=any(postpone.until == "idle" for postpone in postpones),
        wait_s_max=_least(postpone.max_wait_s for postpone in postpones),
    )


def _queue_class(enforced: Sequence[CompiledRule], admission: Admission) -> str | None:
    """The one of least weight."""
    names = {rule.rule.queue_class for rule in enforced if rule.rule.queue_class is not None}
    classes = admission.queue_classes
    return min(names, key=lambda name: (classes[name].weight, name)) if names else None


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _greatest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
