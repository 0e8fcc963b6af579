"""The one decision about a call that was let in: scope, money, deadline, then the scheduler. No I/O, no clock.

Whether a workflow may begin at all is `load.py`, and for how long a call waits `queue.py`.

The order is policy: the first that objects names the reason.
"""

from dataclasses import replace
from typing import Final

from controlplane.admission.snapshot import Snapshot
from controlplane.domain.decision import (
    Admit,
    Decision,
    Placement,
    Queue,
    Reason,
    Refuse,
)
from controlplane.domain.fleet import fits
from controlplane.domain.request import Request
from controlplane.reliability.deadlines import remaining_ms
from controlplane.scheduler.axes.agentic_scope import is_within_fan_out
from controlplane.scheduler.axes.gpu_type import is_allowed
from controlplane.scheduler.axes.tenant_priority import may_take_seat
from controlplane.scheduler.axes.workflow import HOME_RECOMPUTE_FACTOR
from controlplane.scheduler.legs import WHOLE
from controlplane.scheduler.perf_model import kv_tokens_needed, sequences_on, uncached_prefill_ms
from controlplane.scheduler.place import place
from policies.evaluate import Terms

# Nor does a call wait for its home for more than this share of the time that it was given.
HOME_WAIT_RATIO_MAX: Final = 0.5


def decide(request: Request, snapshot: Snapshot, terms: Terms, now_ms: int) -> Decision:
    """Admit with a placement, queue, or refuse with a reason and what the caller can do."""
    refusal = _rules_out(request, terms, now_ms)
    if refusal is not None:
        return refusal
    if not terms.may_disaggregate and not request.is_single_engine:
        request = replace(request, is_single_engine=True)
    if waits_for_home(request, snapshot, now_ms):
        return Queue(Reason.QUEUE_FULL)
    outcome = place(request, snapshot.rows, snapshot.cached, now_ms)
    if isinstance(outcome, Placement):
        return Admit(outcome)
    if outcome.is_transient:
        return Queue(outcome.reason)
    return Refuse(outcome.reason, outcome.detail, outcome.retry_after_ms)


def waits_for_home(request: Request, snapshot: Snapshot, now_ms: int) -> bool:
    """Whether a call is better off waiting for the engine that holds its context than on another one.

    As long as it has waited less than HOME_RECOMPUTE_FACTOR times what computing the context anew takes,
    and the deadline leaves time for that: going elsewhere early costs every later step its cache
    (a fifth of bounded agents' workflows was lost at a factor of 1, simulated).
    """
    home = request.home
    if home is None:
        return False
    row = next((row for row in snapshot.rows if row.engine_id == home), None)
    if row is None or not row.is_accepting or row.is_suspect or not is_allowed(request, row):
        return False
    cached = snapshot.cached.get(row.index, 0)
    needed = kv_tokens_needed(request, cached, WHOLE)
    has_room = fits(row, needed, now_ms, request.is_preferred)
    if has_room and may_take_seat(request, row, sequences_on(row)):
        return False
    if now_ms >= row.credits_expire_ms or row.seats_bound <= 0:
        return False
    anew_ms = uncached_prefill_ms(request, row, 0) - uncached_prefill_ms(request, row, cached)
    patience_ms = min(
        HOME_RECOMPUTE_FACTOR * anew_ms,
        HOME_WAIT_RATIO_MAX * remaining_ms(request.deadline_ms, request.arrival_ms),
    )
    return now_ms - request.arrival_ms < patience_ms


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
        return Refuse(Reason.FORBIDDEN_BY_POLICY, detail)
    if not is_within_fan_out(request):
        detail = (
            f"the workflow has {request.calls_in_flight:,} calls in flight and scope"
            f" `{request.scope}` allows {request.fan_out_max:,}; wait for one to end"
        )
        return Refuse(Reason.FAN_OUT_EXCEEDED, detail)
    if request.workflow is not None and request.workflow_remaining_micro_usd <= 0:
        detail = (
            f"the budget of workflow `{request.workflow}` is spent; create a workflow with a"
            " larger one"
        )
        return Refuse(Reason.INSUFFICIENT_QUOTA, detail)
    if remaining_ms(request.deadline_ms, now_ms) == 0:
        detail = "the deadline has passed; send the call again with a later one"
        return Refuse(Reason.DEADLINE_UNREACHABLE, detail)
    if request.workflow is not None and remaining_ms(request.workflow_deadline_ms, now_ms) == 0:
        detail = f"the deadline of workflow `{request.workflow}` has passed"
        return Refuse(Reason.DEADLINE_UNREACHABLE, detail, is_final=True)
    return None
