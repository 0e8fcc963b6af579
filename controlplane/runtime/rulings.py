"""What rules may read of a call, and what their rulings come to together. Asks policies, decides nothing else."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

from controlplane.domain.catalog import Model, Scope
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import UNLIMITED_MICRO_USD
from controlplane.runtime.call import Call, wall_ms
from controlplane.runtime.workflow_state import WorkflowEntry
from policies.documents import Admission
from policies.evaluate import NEUTRAL, Defer, Ruling, Terms
from policies.facts import LiveFacts, StaticFacts

RETRY_AFTER_MS_LEAST: Final = 1
SECOND_MS: Final = 1_000.0


class PoolView(NamedTuple):
    """What rules may read of a pool. Milliseconds, thousandths."""

    queue_depth: int
    queue_wait_ms: int
    saturation_permille: int
    kv_used_permille: int
    breaker: str
    is_overloaded: bool


class Sizes(NamedTuple):
    """A call as it is asked for, before any rule lowers it: its sizes, its own deadline (an instant), the time
    until the deadline that counts, and the engine that holds its context.
    """

    prompt_tokens: int
    completion_tokens_max: int
    cost_micro_usd: int
    step: int
    steps_expected: int
    spent_micro_usd: int
    remaining_micro_usd: int
    slack_ms: int
    calls_in_flight: int
    deadline_ms: float
    home: EngineRow | None


class Clock:
    """UTC hour, weekday and minute, worked out once a second."""

    __slots__ = ("_until_ms", "now")

    def __init__(self) -> None:
        self._until_ms = 0.0
        self.now = (0, 0, 0)

    def read(self) -> tuple[int, int, int]:
        now_ms = wall_ms()
        if now_ms >= self._until_ms or now_ms < self._until_ms - SECOND_MS:
            instant = datetime.fromtimestamp(now_ms / SECOND_MS, UTC)
            self.now = (instant.hour, instant.weekday(), instant.minute)
            self._until_ms = now_ms + SECOND_MS
        return self.now


def static_facts(
    call: Call, model: Model, terms: Terms, slo_class: str, entry: WorkflowEntry | None
) -> StaticFacts:
    tenant = call.principal.tenant
    return StaticFacts(
        tenant_id=tenant.id,
        tenant_class=tenant.tenant_class,
        tenant_priority=terms.priority,
        tenant_slo_class=slo_class,
        key_id=call.principal.key_id,
        model_name=model.name,
        model_context_tokens_max=model.context_tokens_max,
        request_endpoint=call.endpoint,
        request_is_stream=call.is_stream,
        request_has_tools=call.tools_digest != 0,
        workflow_exists=entry is not None,
        workflow_scope=str(Scope.CHAT if entry is None else entry.record.scope),
        workflow_kind="" if entry is None else entry.record.kind,
    )


def live_facts(
    call: Call, sizes: Sizes, pool: PoolView, tenant_calls: int, clock: tuple[int, int, int]
) -> LiveFacts:
    hour, weekday, minute = clock
    steps_left = max(1, sizes.steps_expected - sizes.step)
    return LiveFacts(
        call.n,
        sizes.prompt_tokens,
        sizes.completion_tokens_max,
        sizes.cost_micro_usd,
        call.deadline_ms or 0,
        call.priority_hint or 0,
        call.client_retries,
        tenant_calls,
        sizes.step,
        sizes.steps_expected,
        sizes.spent_micro_usd,
        min(sizes.remaining_micro_usd, UNLIMITED_MICRO_USD),
        sizes.cost_micro_usd * steps_left,
        sizes.slack_ms,
        sizes.calls_in_flight,
        pool.queue_depth,
        pool.queue_wait_ms,
        pool.saturation_permille,
        pool.kv_used_permille,
        pool.breaker,
        pool.is_overloaded,
        hour,
        weekday,
        minute,
        "" if sizes.home is None else sizes.home.region,
    )


def joined(first: Ruling, second: Ruling, admission: Admission) -> Ruling:
    """Two phases' rulings on one call: what is stricter holds, whichever said it.

    Loading has seen to it that no two rules that can fire together name different models.
    """
    if first is NEUTRAL:
        return second
    if second is NEUTRAL:
        return first
    denying = first if first.denied_by else second
    return replace(
        denying,
        fired=first.fired + second.fired,
        errors=first.errors + second.errors,
        shed_by=first.shed_by or second.shed_by,
        retry_after_ms=max(first.retry_after_ms, second.retry_after_ms),
        defer=_both(first.defer, second.defer),
        defer_by=first.defer_by or second.defer_by,
        queue_class=_lighter(first.queue_class, second.queue_class, admission),
        completion_tokens_max=_least(first.completion_tokens_max, second.completion_tokens_max),
        n_max=_least(first.n_max, second.n_max),
        region_names=_common(first.region_names, second.region_names),
        gpu_type_names=_common(first.gpu_type_names, second.gpu_type_names),
        model=second.model or first.model,
        priority=_least(first.priority, second.priority),
        reserve_permille=max(first.reserve_permille or 0, second.reserve_permille or 0) or None,
        warnings=tuple(dict.fromkeys(first.warnings + second.warnings)),
        annotations=tuple(sorted({**dict(second.annotations), **dict(first.annotations)}.items())),
        audited=first.audited + second.audited,
    )


def refusal(ruling: Ruling, *, is_begun: bool) -> Refuse | None:
    """What a ruling refuses. What has begun is not shed."""
    if ruling.denied_by:
        reason = Reason.POLICY_ERROR if ruling.is_error else Reason.FORBIDDEN_BY_POLICY
        detail = f"the rule `{ruling.denied_by}` forbids this call: {ruling.message}"
        return Refuse(reason, detail, rule=ruling.denied_by)
    if ruling.shed_by and not is_begun:
        detail = f"the rule `{ruling.shed_by}` sheds this call: {ruling.message}"
        retry_ms = max(RETRY_AFTER_MS_LEAST, ruling.retry_after_ms)
        return Refuse(Reason.SHED_OVERLOAD, detail, retry_ms, rule=ruling.shed_by)
    return None


def _lighter(first: str | None, second: str | None, admission: Admission) -> str | None:
    if first is None or second is None:
        return second if first is None else first
    classes = admission.queue_classes
    return min((first, second), key=lambda name: (classes[name].weight, name))


def _both(first: Defer | None, second: Defer | None) -> Defer | None:
    """Run when both allow it. Windows without a common hour can not be kept: the first one holds then."""
    if first is None or second is None:
        return second if first is None else first
    hours = tuple(hour for hour in first.hours if hour in second.hours)
    weekdays = tuple(day for day in first.weekdays if day in second.weekdays)
    is_common = bool(hours and weekdays)
    return Defer(
        hours=hours if is_common else first.hours,
        weekdays=weekdays if is_common else first.weekdays,
        waits_for_idle=first.waits_for_idle or second.waits_for_idle,
        wait_s_max=_least(first.wait_s_max, second.wait_s_max),
    )


def _least(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _common(
    first: tuple[str, ...] | None, second: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return tuple(name for name in first if name in second)
