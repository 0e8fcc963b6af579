"""The one decision about a call that was let in: scope, money, deadline, then the scheduler. No I/O, no clock.

Whether a workflow may begin at all is `load.py`, and for how long a call waits `queue.py`.

The order is policy: the first that objects names the reason.
"""

from dataclasses import replace

from controlplane.admission.snapshot import Snapshot
from controlplane.domain.decision import (
    Admit,
    Decision,
    Placement,
    Queue,
    Reason,
    Refuse,
)
from controlplane.domain.request import Request
from controlplane.reliability.deadlines import remaining_ms
from controlplane.scheduler.axes.agentic_scope import is_within_fan_out
from controlplane.scheduler.place import place
from policies.evaluate import Terms


def decide(request: Request, snapshot: Snapshot, terms: Terms, now_ms: int) -> Decision:
    """Admit with a placement, queue, or refuse with a reason and what the caller can do."""
    refusal = _rules_out(request, terms, now_ms)
    if refusal is not None:
        return refusal
    if not terms.may_disaggregate and not request.is_single_engine:
        request = replace(request, is_single_engine=True)
    outcome = place(request, snapshot.rows, snapshot.cached, now_ms)
    if isinstance(outcome, Placement):
        return Admit(outcome)
    if outcome.is_transient:
        return Queue(outcome.reason)
    return Refuse(outcome.reason, outcome.detail, outcome.retry_after_ms)


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
        return Refuse(Reason.DEADLINE_UNREACHABLE, detail)
    return None
