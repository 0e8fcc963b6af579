"""Recorded calls as plans: what the tenants of a live Headway asked for, to be played in the simulated world.

Pure. What a log can not tell is estimated, and counted in `Played.notes`:

    sizes       Calls that did not end well have no usage. Of those whose facts were recorded the prompt is
                known; else it is the mean of calls that ended well of the same kind (workflow kind,
                tenant, everybody, in this order), and so are their completion tokens.
    reuse       A prompt not shorter than the one before it begins with that one; of a shorter one it is
                what the engine found cached. First steps share a prefix by (tenant, model, kind) when an
                engine found one: the median of what it found, in prompts that are longer.
    refusals    A refusal keeps no workflow: each is a workflow of one step. Those that came back and were let
                in are in the log twice: as many of the first tries are left out as the sampled facts say.
    order       Calls of a workflow are played one after the other, with the pauses between them; calls that
                overlapped follow at once.
    deadlines   A workflow's own; of calls without one the end-to-end target of their SLO class.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Final

from cli.simulate.contracts import MICRO_USD_PER_USD, MS_PER_S, Plan, Step
from controlplane.domain.catalog import Scope, SloClass

SUCCEEDED: Final = "succeeded"
# Kind of a call that belongs to no workflow.
SINGLE: Final = "single"
# Prompt and answer where nothing in the log tells of any.
PROMPT_TOKENS_UNKNOWN: Final = 1_024
COMPLETION_TOKENS_UNKNOWN: Final = 256
DEADLINE_S_MIN: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """An accepted call. Instants in seconds of one clock; tokens are 0 where none were reported."""

    id: str
    tenant: str
    workflow: str | None
    step: int
    model: str
    state: str
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    opened_s: float
    ended_s: float | None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    settled_micro_usd: int = 0

    @property
    def is_good(self) -> bool:
        return self.state == SUCCEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWorkflow:
    id: str
    kind: str
    scope: Scope
    slo_class: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFacts:
    """What the rules read of a call, as far as it tells of its size. It stands for `weight` calls."""

    id: str
    tenant: str
    model: str
    verdict: str
    reason: str | None
    at_s: float
    prompt_tokens: int
    scope: Scope
    kind: str
    has_workflow: bool
    step: int
    client_retries: int
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a policy bundle and the catalogue make of (tenant, model, scope, SLO class)."""

    tenant_class: str
    is_allowed: bool
    priority: int
    weight: float
    slo: SloClass


StandingOf = Callable[[str, str, Scope, str | None], Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a workflow of the log ended. `reason` of the refusal, or of the failure, that ended it."""

    tenant: str
    slo_class: str
    is_success: bool
    reason: str


@dataclass(slots=True, kw_only=True)
class Played:
    """Plans sorted by arrival, how each ended in the log, and what was estimated or left out, counted.

    `forbidden` counts workflows by tenant that the bundle's entitlements let nobody send.
    """

    plans: list[Plan] = field(default_factory=list)
    ended: dict[int, Ended] = field(default_factory=dict)
    calls_of: dict[int, list[RecordedCall]] = field(default_factory=dict)
    forbidden: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.plans[-1].arrival_s if self.plans else 0.0


class Sizes:
    """Mean sizes of calls that ended well, by kind, by tenant, and of all."""

    def __init__(self, calls: Iterable[tuple[str, RecordedCall]]) -> None:
        self._sums: dict[tuple[str, str], list[RecordedCall]] = defaultdict(list)
        for kind, call in calls:
            if call.is_good and call.prompt_tokens > 0:
                for key in self._keys(kind, call.tenant):
                    self._sums[key].append(call)

    @staticmethod
    def _keys(kind: str, tenant: str) -> tuple[tuple[str, str], ...]:
        return (kind, tenant), ("", tenant), ("", "")

    def of(self, kind: str, tenant: str) -> tuple[int, int]:
        """Prompt and completion tokens."""
        for key in self._keys(kind, tenant):
            known = self._sums.get(key)
            if known:
                return (
                    round(mean(call.prompt_tokens for call in known)),
                    max(1, round(mean(call.completion_tokens for call in known))),
                )
        return PROMPT_TOKENS_UNKNOWN, COMPLETION_TOKENS_UNKNOWN


@dataclass(frozen=True, slots=True)
class _Group:
    """The calls of one workflow, in order."""

    calls: tuple[RecordedCall, ...]
    workflow: RecordedWorkflow | None

    @property
    def kind(self) -> str:
        return SINGLE if self.workflow is None else self.workflow.kind

    @property
    def scope(self) -> Scope:
        return Scope.CHAT if self.workflow is None else self.workflow.scope

    @property
    def prefix_key(self) -> tuple[str, str, str]:
        return self.calls[0].tenant, self.calls[0].model, self.kind


def plans_of(
    calls: Sequence[RecordedCall],
    workflows: Mapping[str, RecordedWorkflow],
    facts: Sequence[RecordedFacts],
    standing_of: StandingOf,
) -> Played:
    """The log as plans. Nothing in it: no plans."""
    played = Played()
    groups = [*_groups(calls, workflows, played)]
    sizes = Sizes((group.kind, call) for group in groups for call in group.calls)
    prompts = {each.id: each.prompt_tokens for each in facts}
    prefixes = _prefixes(groups)
    accepted = {call.id for call in calls}
    refused = _first_tries([each for each in facts if each.id not in accepted], facts, played)
    starts = [group.calls[0].opened_s for group in groups] + [each.at_s for each in refused]
    if not starts:
        return played
    epoch_s = min(starts)
    drafts = [
        *(
            _of_group(group, sizes, prompts, prefixes, standing_of, epoch_s, played)
            for group in groups
        ),
        *(_of_refusal(each, sizes, standing_of, epoch_s, played) for each in refused),
    ]
    kept = sorted(
        (draft for draft in drafts if draft is not None),
        key=lambda draft: (draft[0].arrival_s, draft[3]),
    )
    for number, (plan, ended, own, _) in enumerate(kept):
        played.plans.append(_numbered(plan, number))
        played.ended[number] = ended
        played.calls_of[number] = own
    return played


_Draft = tuple[Plan, Ended, list[RecordedCall], str]


def _groups(
    calls: Sequence[RecordedCall], workflows: Mapping[str, RecordedWorkflow], played: Played
) -> Iterable[_Group]:
    by_workflow: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: (call.opened_s, call.id)):
        if call.state == "open":
            played.notes["calls still open, left out"] += 1
        elif call.workflow is None:
            yield _Group((call,), None)
        elif call.workflow in workflows:
            by_workflow[call.workflow].append(call)
        else:
            played.notes["calls of workflows that are not in the log, played alone"] += 1
            yield _Group((call,), None)
    for name, own in by_workflow.items():
        own.sort(key=lambda call: (call.step, call.opened_s, call.id))
        yield _Group(tuple(own), workflows[name])


def _prefixes(groups: Iterable[_Group]) -> dict[tuple[str, str, str], int]:
    """Tokens of the prefix that first steps share, by (tenant, model, kind)."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for group in groups:
        first = group.calls[0]
        if first.is_good and 0 < first.cached_tokens < first.prompt_tokens:
            found[group.prefix_key].append(first.cached_tokens)
    return {key: round(median(values)) for key, values in found.items()}


def _first_tries(
    facts: Sequence[RecordedFacts], sample: Sequence[RecordedFacts], played: Played
) -> list[RecordedFacts]:
    """Refused calls by their first try, without as many, evenly spread, as were let in at a later one."""
    refused = [each for each in facts if each.verdict == "refuse"]
    first = sorted(
        (each for each in refused if each.client_retries == 0),
        key=lambda each: (each.at_s, each.id),
    )
    played.notes["refusals of later tries, not played again"] = len(refused) - len(first)
    returned = sum(
        each.weight for each in sample if each.verdict != "refuse" and each.client_retries > 0
    )
    dropped = min(len(first), returned)
    played.notes["refused calls that were let in later, left out by estimate"] = dropped
    if not dropped:
        return first
    keep = len(first) - dropped
    return [first[place * len(first) // keep] for place in range(keep)]


def _of_group(
    group: _Group,
    sizes: Sizes,
    prompts: Mapping[str, int],
    prefixes: Mapping[tuple[str, str, str], int],
    standing_of: StandingOf,
    epoch_s: float,
    played: Played,
) -> _Draft | None:
    first, workflow = group.calls[0], group.workflow
    slo_class = None if workflow is None else workflow.slo_class
    standing = standing_of(first.tenant, first.model, group.scope, slo_class)
    last = group.calls[-1]
    deadline_at_s = (
        first.opened_s + standing.slo.e2e_ms_max / MS_PER_S
        if workflow is None
        else workflow.deadline_s
    )
    is_whole = all(call.is_good for call in group.calls)
    is_success = is_whole and (last.ended_s or 0.0) <= deadline_at_s
    bad = next((call for call in group.calls if not call.is_good), None)
    reason = "" if is_success else "late" if bad is None else bad.reason or bad.state
    ended = Ended(
        tenant=first.tenant,
        slo_class=standing.slo.name,
        is_success=is_success,
        reason=reason,
    )
    if not standing.is_allowed:
        played.forbidden[first.tenant] += 1
        return None
    if deadline_at_s <= first.opened_s:
        played.notes["workflows whose deadline had passed when they came, left out"] += 1
        return None
    shared = prefixes.get(group.prefix_key, 0)
    steps: list[Step] = []
    for call, after in zip(group.calls, [*group.calls[1:], None], strict=True):
        prompt, completion = call.prompt_tokens, call.completion_tokens
        if not call.is_good or prompt <= 0:
            played.notes["calls whose sizes are estimated"] += 1
            usual = sizes.of(group.kind, call.tenant)
            prompt = prompts.get(call.id) or prompt or usual[0]
            completion = usual[1]
        if not steps:
            shared = shared if shared < prompt else 0
            reusable = shared
        elif prompt >= steps[-1].prompt_tokens:
            reusable = steps[-1].prompt_tokens
        else:
            reusable = max(shared if shared < prompt else 0, min(call.cached_tokens, prompt - 1))
        reusable = min(reusable, prompt - 1)
        gap_s = 0.0
        if after is not None and call.ended_s is not None:
            gap_s = max(0.0, after.opened_s - call.ended_s)
        steps.append(
            Step(
                new_tokens=prompt - reusable,
                reusable_tokens=reusable,
                completion_tokens=max(1, completion),
                gap_s=gap_s,
            )
        )
    plan = _plan(
        standing,
        tenant=first.tenant,
        model=first.model,
        kind=group.kind,
        scope=group.scope,
        arrival_s=first.opened_s - epoch_s,
        steps=tuple(steps),
        deadline_s=deadline_at_s - first.opened_s,
        prefix=" ".join(group.prefix_key) if shared else "",
        prefix_tokens=shared,
    )
    return plan, ended, list(group.calls), first.workflow or first.id


def _of_refusal(
    each: RecordedFacts, sizes: Sizes, standing_of: StandingOf, epoch_s: float, played: Played
) -> _Draft | None:
    kind = each.kind if each.has_workflow else SINGLE
    standing = standing_of(each.tenant, each.model, each.scope, None)
    ended = Ended(
        tenant=each.tenant,
        slo_class=standing.slo.name,
        is_success=False,
        reason=each.reason or "refused",
    )
    if not standing.is_allowed:
        played.forbidden[each.tenant] += 1
        return None
    played.notes["refused calls, what they needed is estimated"] += 1
    usual = sizes.of(kind, each.tenant)
    plan = _plan(
        standing,
        tenant=each.tenant,
        model=each.model,
        kind=kind,
        scope=each.scope,
        arrival_s=each.at_s - epoch_s,
        steps=(
            Step(
                new_tokens=each.prompt_tokens or usual[0],
                reusable_tokens=0,
                completion_tokens=usual[1],
            ),
        ),
        deadline_s=standing.slo.e2e_ms_max / MS_PER_S,
        prefix="",
        prefix_tokens=0,
    )
    return plan, ended, [], each.id


def _plan(
    standing: Standing,
    *,
    tenant: str,
    model: str,
    kind: str,
    scope: Scope,
    arrival_s: float,
    steps: tuple[Step, ...],
    deadline_s: float,
    prefix: str,
    prefix_tokens: int,
) -> Plan:
    slo = standing.slo
    return Plan(
        number=0,
        tenant=tenant,
        workflow_class=kind,
        arrival_s=arrival_s,
        steps=steps,
        deadline_s=max(DEADLINE_S_MIN, deadline_s),
        model=model,
        tenant_class=standing.tenant_class,
        priority=standing.priority,
        weight=standing.weight,
        scope=scope,
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        ttft_s_max=slo.ttft_ms_max / MS_PER_S,
        tpot_s_max=slo.tpot_ms_max / MS_PER_S,
        value_usd=slo.value_micro_usd / MICRO_USD_PER_USD,
    )


def _numbered(plan: Plan, number: int) -> Plan:
    return replace(plan, number=number)
