"""Rules once more over recorded facts, and tells what another bundle would have decided differently.

Pure. A recorded call is told as the decision log has it: verdict, reason, rule and facts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from controlplane.domain.catalog import Scope, Tenant
from controlplane.domain.decision import Reason
from controlplane.domain.ids import ModelName, SloClassName, TenantId
from policies.documents import Phase
from policies.evaluate import Defer, Policy, Ruling, StaticPart, Terms, terms_for
from policies.facts import LiveFacts, StaticFacts, from_json

# What of a bundle does not change from call to call is kept for so many tenants, models and flags.
KEPT_MAX: Final = 4_096
# Request ids shown of each change.
EXAMPLES_MAX: Final = 3
# Reasons that a policy can give. Any other refusal was decided elsewhere, whatever the policy said.
POLICY_REASONS: Final = frozenset(
    {Reason.FORBIDDEN_BY_POLICY, Reason.POLICY_ERROR, Reason.DEFERRED}
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a bundle says of a call: let through (`reason` None), or why not and by which rule."""

    reason: Reason | None
    rule: str

    @property
    def is_denied(self) -> bool:
        """Whether the call is turned away; a postponed one is not."""
        return self.reason not in (None, Reason.DEFERRED)


ALLOWED: Final = Verdict(None, "")


def verdict_of(ruling: Ruling) -> Verdict:
    """A ruling in one word. Deny before shed before defer."""
    if ruling.is_error:
        return Verdict(Reason.POLICY_ERROR, ruling.denied_by)
    if ruling.denied_by:
        return Verdict(Reason.FORBIDDEN_BY_POLICY, ruling.denied_by)
    if ruling.shed_by:
        return Verdict(Reason.SHED_OVERLOAD, ruling.shed_by)
    if ruling.defer is not None:
        return Verdict(Reason.DEFERRED, ruling.defer_by)
    return ALLOWED


class Judge:
    """One bundle, asked for many calls: entitlements first, then the rules of a phase."""

    __slots__ = ("_parts", "_terms", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._terms: dict[tuple[Tenant, ModelName, Scope], Terms] = {}
        self._parts: dict[StaticFacts, StaticPart] = {}

    def terms(self, tenant: Tenant, model: ModelName, scope: Scope) -> Terms:
        key = (tenant, model, scope)
        terms = self._terms.get(key)
        if terms is None:
            if len(self._terms) >= KEPT_MAX:
                self._terms.clear()
            terms = self._terms[key] = terms_for(self.policy.bundle, tenant, model, scope)
        return terms

    def ruling(self, terms: Terms, phase: Phase, static: StaticFacts, live: LiveFacts) -> Ruling:
        """What the rules of a phase say. The tenant's priority is the one that this bundle gives it."""
        if static.tenant_priority != terms.priority:
            static = static._replace(tenant_priority=terms.priority)
        part = self._parts.get(static)
        if part is None:
            if len(self._parts) >= KEPT_MAX:
                self._parts.clear()
            part = self._parts[static] = self.policy.static_part(static)
        return self.policy.rule(phase, part, live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A decision of the log. It stands for `weight` calls."""

    request_id: str
    verdict: str
    reason: str | None
    rule: str | None
    weight: int
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayChange:
    """Calls of one tenant that would end otherwise. An empty reason is a call that is let through."""

    tenant: str
    reason_before: str
    rule_before: str
    reason_after: str
    rule_after: str
    calls: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """`calls` are weighted, `rows` are rows of the log. `fired` counts calls by rule of the other bundle."""

    revision: str
    rows: int
    rows_unreadable: int
    calls: int
    calls_changed: int
    calls_denied_before: int
    calls_denied_after: int
    changes: tuple[ReplayChange, ...]
    fired: dict[str, int]


@dataclass(slots=True)
class _Tally:
    calls: int = 0
    examples: list[str] = field(default_factory=list)


_Key = tuple[str, str, str, str, str]


class Replay:
    """Takes in recorded calls one by one, so that a log of any length fits."""

    def __init__(self, policy: Policy) -> None:
        self._judge = Judge(policy)
        self._rows = self._unreadable = 0
        self._calls = self._denied_before = self._denied_after = 0
        self._changed: dict[_Key, _Tally] = {}
        self._fired: dict[str, int] = {}

    def add_all(self, calls: Iterable[Recorded]) -> None:
        for call in calls:
            self.add(call)

    def add(self, call: Recorded) -> None:
        self._rows += 1
        try:
            static, live = from_json(call.facts)
            scope = Scope(static.workflow_scope)
        except ValueError:
            self._unreadable += 1
            return
        before, by_policy = _before(call)
        after = self._decide(call.weight, scope, static, live)
        if after == ALLOWED and before.is_denied and not by_policy:
            # It was refused by something that no policy decides, and still would be.
            after = before
        self._calls += call.weight
        self._denied_before += call.weight * before.is_denied
        self._denied_after += call.weight * after.is_denied
        if before == after:
            return
        key = (
            static.tenant_id,
            before.reason or "",
            before.rule,
            after.reason or "",
            after.rule,
        )
        tally = self._changed.setdefault(key, _Tally())
        tally.calls += call.weight
        if len(tally.examples) < EXAMPLES_MAX:
            tally.examples.append(call.request_id)

    def report(self) -> ReplayReport:
        changes = [
            ReplayChange(
                tenant=tenant,
                reason_before=reason_before,
                rule_before=rule_before,
                reason_after=reason_after,
                rule_after=rule_after,
                calls=tally.calls,
                examples=tuple(tally.examples),
            )
            for (tenant, reason_before, rule_before, reason_after, rule_after), tally in (
                sorted(self._changed.items(), key=lambda item: (-item[1].calls, item[0]))
            )
        ]
        return ReplayReport(
            revision=self._judge.policy.revision,
            rows=self._rows,
            rows_unreadable=self._unreadable,
            calls=self._calls,
            calls_changed=sum(change.calls for change in changes),
            calls_denied_before=self._denied_before,
            calls_denied_after=self._denied_after,
            changes=tuple(changes),
            fired=dict(sorted(self._fired.items(), key=lambda item: (-item[1], item[0]))),
        )

    def _decide(self, weight: int, scope: Scope, static: StaticFacts, live: LiveFacts) -> Verdict:
        """The verdict of a call before it is sent to an engine: the first phase that lets it not through."""
        terms = self._judge.terms(_tenant(static), ModelName(static.model_name), scope)
        if not terms.is_allowed:
            return Verdict(Reason.FORBIDDEN_BY_POLICY, terms.denied_by)
        found = ALLOWED
        for phase in (Phase.ADMIT, Phase.STEP, Phase.DISPATCH):
            is_step = static.workflow_exists and live.workflow_step > 0
            if phase is Phase.STEP and not is_step:
                continue
            ruling = self._judge.ruling(terms, phase, static, live)
            for rule in ruling.fired:
                self._fired[rule] = self._fired.get(rule, 0) + weight
            verdict = verdict_of(ruling)
            if verdict.is_denied:
                return verdict
            if ruling.defer is not None and not _is_open(ruling.defer, live):
                found = verdict
        return found


def _before(call: Recorded) -> tuple[Verdict, bool]:
    """How a recorded call ended, and whether a policy decided that."""
    if call.verdict != "refuse" or call.reason is None:
        return ALLOWED, True
    reason, rule = Reason(call.reason), call.rule or ""
    return Verdict(reason, rule), bool(rule) or reason in POLICY_REASONS


def _is_open(defer: Defer, live: LiveFacts) -> bool:
    """Whether what a call is postponed to is there already."""
    return (
        not defer.waits_for_idle
        and live.time_hour in defer.hours
        and live.time_weekday in defer.weekdays
    )


def _tenant(static: StaticFacts) -> Tenant:
    """The tenant as far as a bundle looks at it. A disabled one is refused before facts are recorded."""
    return Tenant(
        id=TenantId(static.tenant_id),
        name="",
        tenant_class=static.tenant_class,
        slo_class=SloClassName(static.tenant_slo_class),
        is_disabled=False,
        cache_salt="",
    )
