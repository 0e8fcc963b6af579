"""What would become of a call that comes now, told in members of JSON. Takes nothing and commits to nothing."""

from typing import Any

from controlplane.domain.decision import Admit, Queue, Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.runtime.books import Books
from controlplane.runtime.call import Ticket, monotonic_ms
from controlplane.runtime.desk import Desk
from controlplane.runtime.rate_limits import RateLimits
from controlplane.runtime.waiting_line import is_postponed_too_far, postponed_too_far


async def dry_run(
    ticket: Ticket, desk: Desk[Ticket], books: Books, rates: RateLimits
) -> dict[str, Any]:
    """The verdict on a call that its rules let through, and what it was made of."""
    request = ticket.request
    now_ms = int(monotonic_ms())
    answer: dict[str, Any] = {
        "model": ticket.model.name,
        "priority": request.priority,
        "queue_class": ticket.queue_class,
        "completion_tokens_max": request.completion_tokens_max,
        "reserved_usd": ticket.reserved_micro_usd / 1e6,
        "warnings": list(ticket.warnings),
    }
    principal, limits = ticket.call.principal, ticket.terms.limits
    answer["rate_limits"] = [each._asdict() for each in rates.left(principal, limits, now_ms)]
    tokens = request.prompt_tokens + request.completion_tokens_expected
    limited = rates.would_limit(principal, limits, tokens, now_ms)
    if limited is not None:
        over = Refuse(Reason.RATE_LIMITED, limited.detail, limited.retry_after_ms)
        return answer | told(over)
    try:
        short = await books.take(ticket)
    except StateUnavailable:
        short = Refuse(
            Reason.STATE_UNAVAILABLE, "state can not be read at present; try again", 2_000
        )
    if short is not None:
        return answer | told(short)
    books.give_back(ticket)
    if not request.is_begun and not desk.loads.would_begin(request, now_ms):
        shed = Refuse(Reason.SHED_OVERLOAD, f"`{request.model}` is overloaded")
        return answer | told(shed)
    if is_postponed_too_far(request):
        return answer | told(postponed_too_far(ticket, now_ms))
    decision, _ = desk.decide(ticket, desk.fleet.rows_for(request.model), now_ms)
    is_postponed = request.not_before_ms > 0 or request.waits_for_idle
    if is_postponed or desk.line.is_waiting_for(request.model):
        decision = Queue(Reason.DEFERRED if is_postponed else Reason.QUEUE_FULL)
    match decision:
        case Refuse():
            return answer | told(decision)
        case Queue(reason):
            wait_ms = desk.line.queue.predicted_wait_ms(request, now_ms, ticket.queue_class)
            return answer | {"verdict": "queue", "reason": reason, "wait_ms_predicted": wait_ms}
        case Admit(placement):
            prefill = placement.prefill
            return answer | {
                "verdict": "admit",
                "reason": None,
                "engine": placement.decode.engine_id,
                "prefill_engine": None if prefill is None else prefill.engine_id,
                "ttft_ms_predicted": placement.ttft_ms_predicted,
                "e2e_ms_predicted": placement.e2e_ms_predicted,
                "gpu_usd_predicted": placement.cost_micro_usd / 1e6,
            }


def told(refuse: Refuse) -> dict[str, Any]:
    return {
        "verdict": "refuse",
        "reason": refuse.reason,
        "detail": refuse.detail,
        "rule": refuse.rule or None,
        "retry_after_ms": refuse.retry_after_ms,
    }
