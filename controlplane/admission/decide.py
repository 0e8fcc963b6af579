"""The one decision about a call that was let in: scope, money, deadline, then the scheduler. No I/O, no clock.

Whether a workflow may begin at all is `load.py`, and for how long a call waits `queue.py`.

The order is policy: the first that objects names the reason.
"""

from dataclasses import replace
from typing import Final

from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Role
from controlplane.domain.decision import (
    Admit,
    Decision,
    Hurdle,
    Placement,
    Quantity,
    Queue,
    Reason,
    Refuse,
)
from controlplane.domain.fleet import EngineRow, fits
from controlplane.domain.request import Request
from controlplane.reliability.deadlines import remaining_ms
from controlplane.scheduler.axes.agentic_scope import is_within_fan_out
from controlplane.scheduler.axes.gpu_type import is_allowed
from controlplane.scheduler.axes.tenant_priority import may_take_seat
from controlplane.scheduler.axes.workflow import HOME_RECOMPUTE_FACTOR
from controlplane.scheduler.legs import WHOLE
from controlplane.scheduler.perf_model import (
    Forecast,
    kv_tokens_needed,
    sequences_on,
    uncached_prefill_ms,
)
from controlplane.scheduler.place import place
from policies.evaluate import Terms

# Nor does a call wait for its home for more than this share of the time that it was given.
HOME_WAIT_RATIO_MAX: Final = 0.5


def prepared(request: Request, terms: Terms, now_ms: int) -> Request | Refuse:
    """The call as it may be placed, or what speaks against it wherever it would run."""
    refusal = _rules_out(request, terms, now_ms)
    if refusal is not None:
        return refusal
    if not terms.may_disaggregate and not request.is_single_engine:
        return replace(request, is_single_engine=True)
    return request


def decide(request: Request, snapshot: Snapshot, terms: Terms, now_ms: int) -> Decision:
    """Admit with a placement, queue, or refuse with a reason and what the caller can do."""
    ready = prepared(request, terms, now_ms)
    if isinstance(ready, Refuse):
        return ready
    request = ready
    home = _home(request, snapshot.rows)
    rows = snapshot.rows
    if home is not None:
        tokens = snapshot.cached.get(home.index, 0)
        if _has_room(request, home, tokens, now_ms):
            if _stays_home(request, home, tokens, now_ms):
                rows = tuple(row for row in rows if row is home or row.role is Role.PREFILL)
        elif _waits_for_home(request, home, tokens, now_ms):
            return Queue(Reason.QUEUE_FULL)
    outcome = place(request, rows, snapshot.cached, now_ms)
    if isinstance(outcome, Placement):
        return Admit(outcome)
    if outcome.is_transient:
        return Queue(outcome.reason)
    # Even an empty engine would be too slow: the same call comes too late again.
    is_final = outcome.reason is Reason.DEADLINE_UNREACHABLE
    return Refuse(outcome.reason, outcome.detail, outcome.retry_after_ms, is_final=is_final)


def _home(request: Request, rows: tuple[EngineRow, ...]) -> EngineRow | None:
    """The engine that holds the context of the call's workflow, if it takes calls."""
    if request.home is None or request.workflow is None:
        return None
    row = next((row for row in rows if row.engine_id == request.home), None)
    if row is None or not row.is_accepting or row.is_suspect or not is_allowed(request, row):
        return None
    return row


def _has_room(request: Request, home: EngineRow, cached_tokens: int, now_ms: int) -> bool:
    sequences = sequences_on(home)
    needed = kv_tokens_needed(request, cached_tokens, WHOLE, sequences)
    return fits(home, needed, now_ms, request.is_preferred) and may_take_seat(
        request, home, sequences
    )


def _patience_ms(request: Request, home: EngineRow, cached_tokens: int) -> float:
    """How long a call had better wait for its home: HOME_RECOMPUTE_FACTOR times what computing the context
    anew takes, and no longer than the deadline leaves time for.

    Going elsewhere early costs every later step its cache (a fifth of bounded agents' workflows was lost
    at a factor of 1, simulated).
    """
    anew_ms = uncached_prefill_ms(request, home, 0)
    anew_ms -= uncached_prefill_ms(request, home, cached_tokens)
    given_ms = remaining_ms(request.deadline_ms, request.arrival_ms)
    return min(HOME_RECOMPUTE_FACTOR * anew_ms, HOME_WAIT_RATIO_MAX * given_ms)


def home_until_ms(request: Request, snapshot: Snapshot) -> float:
    """Until when a call waits for its home at the most, 0 without one: who asks again before then, while the
    home has no seat, need not ask at all.
    """
    home = _home(request, snapshot.rows)
    if home is None:
        return 0.0
    return request.arrival_ms + _patience_ms(request, home, snapshot.cached.get(home.index, 0))


def _waits_for_home(request: Request, home: EngineRow, cached_tokens: int, now_ms: int) -> bool:
    """Whether a call is better off waiting for its home, which is full, than on another engine."""
    if now_ms >= home.credits_expire_ms or home.seats_bound <= 0:
        return False
    return now_ms - request.arrival_ms < _patience_ms(request, home, cached_tokens)


def _stays_home(request: Request, home: EngineRow, cached_tokens: int, now_ms: int) -> bool:
    """Whether a call goes to its home, which has room, without a look at other engines: the first token
    would come there within the time that is worth waiting for it.
    """
    forecast = Forecast(request, home, cached_tokens, now_ms, WHOLE, 0.0)
    queued_ms = now_ms - request.arrival_ms + forecast.ttft_ms - forecast.prefill_ms
    return queued_ms < _patience_ms(request, home, cached_tokens)


def _rules_out(request: Request, terms: Terms, now_ms: int) -> Refuse | None:
    """What speaks against the call wherever it would run."""
    if not terms.is_allowed:
        detail = f"the rule `{terms.denied_by}` does not allow `{request.model}` to this tenant"
        return Refuse(Reason.FORBIDDEN_BY_POLICY, detail, rule=terms.denied_by)
    if request.workflow is not None and request.step >= terms.steps_max:
        detail = (
            f"scope `{request.scope}` allows {terms.steps_max:,} steps; end the workflow and begin"
            " another one"
        )
        hurdle = Hurdle(Quantity.STEPS, float(terms.steps_max), request.step + 1.0, request.scope)
        return Refuse(Reason.FORBIDDEN_BY_POLICY, detail, hurdles=(hurdle,))
    if not is_within_fan_out(request):
        detail = (
            f"the workflow has {request.calls_in_flight:,} calls in flight and scope"
            f" `{request.scope}` allows {request.fan_out_max:,}; wait for one to end"
        )
        hurdle = Hurdle(
            Quantity.CALLS_IN_FLIGHT,
            float(request.fan_out_max),
            request.calls_in_flight + 1.0,
            request.scope,
        )
        return Refuse(Reason.FAN_OUT_EXCEEDED, detail, hurdles=(hurdle,))
    if request.workflow is not None and request.workflow_remaining_micro_usd <= 0:
        detail = (
            f"the budget of workflow `{request.workflow}` is spent; create a workflow with a"
            " larger one"
        )
        return Refuse(Reason.INSUFFICIENT_QUOTA, detail)
    if remaining_ms(request.deadline_ms, now_ms) == 0:
        detail = "the deadline has passed; send the call again with a later one"
        return Refuse(Reason.DEADLINE_UNREACHABLE, detail, is_final=True)
    if request.workflow is not None and remaining_ms(request.workflow_deadline_ms, now_ms) == 0:
        detail = f"the deadline of workflow `{request.workflow}` has passed"
        return Refuse(Reason.DEADLINE_UNREACHABLE, detail, is_final=True)
    return None
