"""Whether a stream may go on, by its rules, and when that is asked again."""

from typing import Final

from controlplane.domain.decision import Refuse
from controlplane.runtime.call import Ticket
from controlplane.runtime.rulings import refusal
from policies.documents import Phase

# Rules on streams are asked again after so many tokens.
STREAM_CHECK_TOKENS: Final = 64


def ruled_out(ticket: Ticket, completion_tokens: int, now_ms: float) -> Refuse | None:
    """What the rules on streams say of an answer that has come so far."""
    policy = ticket.policy
    if not policy.has_rules(Phase.STREAM):
        return None
    spent = ticket.model.cost_micro_usd(
        prompt=ticket.request.prompt_tokens, cached=0, completion=completion_tokens
    )
    live = ticket.live._replace(
        stream_completion_tokens=completion_tokens,
        stream_spent_micro_usd=spent,
        stream_age_ms=int(now_ms - ticket.call.received_ms),
    )
    return refusal(policy.rule(Phase.STREAM, ticket.part, live), is_begun=True)


def next_check(ticket: Ticket, completion_tokens: int) -> None:
    """Set when the relay asks again: before the money held is used up, or for the rules on streams."""
    held, most = ticket.tokens_held, ticket.request.completion_tokens_max
    check_at = held if held < most else 0
    if ticket.policy.has_rules(Phase.STREAM):
        soon = completion_tokens + STREAM_CHECK_TOKENS
        check_at = min(check_at, soon) if check_at else soon
    ticket.tokens_check_at = check_at
