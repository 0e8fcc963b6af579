"""What a call takes before it runs and what it leaves behind when it ends: money, rates, counts, the journal.

The one place where a call is opened and where it is closed, each once.
"""

from datetime import UTC, datetime
from typing import Final

from controlplane.admission.budget import Hold, Unit
from controlplane.domain.decision import Hurdle, Quantity, Reason, Refuse
from controlplane.domain.outcome import RequestState, Usage
from controlplane.runtime.accounts import Accounts
from controlplane.runtime.call import Ticket, monotonic_ms
from controlplane.runtime.intake import Intake
from controlplane.runtime.rate_limits import Limit, Limited, RateLimits
from controlplane.runtime.workflow_state import WorkflowEntry, WorkflowStates
from controlplane.store.journal import Journal, OpenedRow, SettledRow

# A stream's hold grows by this part of itself, and by no less than these tokens.
EXTEND_DIVISOR: Final = 4
EXTEND_TOKENS_MIN: Final = 64

_LIMITED: Final = {
    Limit.REQUESTS: Quantity.REQUESTS_PER_MINUTE,
    Limit.TOKENS: Quantity.TOKENS_PER_MINUTE,
    Limit.CALLS_IN_FLIGHT: Quantity.CALLS_IN_FLIGHT,
}


class Books:
    """Owned by one task, but for `take`, which may wait for a refill."""

    def __init__(
        self,
        *,
        replica_id: str,
        accounts: Accounts,
        rates: RateLimits,
        workflows: WorkflowStates,
        intake: Intake,
        journal: Journal,
    ) -> None:
        self._replica_id = replica_id
        self._accounts = accounts
        self._rates = rates
        self._workflows = workflows
        self._intake = intake
        self._journal = journal
        self.in_flight: dict[str, Ticket] = {}

    # ------------------------------------------------------------ before

    def rate(self, ticket: Ticket) -> Refuse | None:
        """Count the call against its tenant's and key's rates, or say which stands in the way."""
        principal, request = ticket.call.principal, ticket.request
        now_ms = int(monotonic_ms())
        tokens = request.prompt_tokens + request.completion_tokens_expected
        taken = self._rates.take(principal, ticket.terms.limits, tokens, now_ms)
        if isinstance(taken, Limited):
            return Refuse(
                Reason.RATE_LIMITED,
                taken.detail,
                taken.retry_after_ms,
                hurdles=(
                    Hurdle(
                        _LIMITED[taken.which], float(taken.limit), taken.limit + 1.0, taken.scope
                    ),
                ),
            )
        ticket.grant = taken
        ticket.rate_headers = self._rates.headers(taken, now_ms)
        return None

    async def take(self, ticket: Ticket) -> Refuse | None:
        """Hold the money. Cancelled or refused, nothing is held. Raises StateUnavailable."""
        short = await self._accounts.reserve_all(ticket.holds)
        return None if short is None else _no_money(short)

    def give_back(self, ticket: Ticket) -> None:
        """A call that was never opened gives its money back whole."""
        self._accounts.settle_all(ticket.holds, micro_usd=0, tokens=0)

    def unrate(self, ticket: Ticket) -> None:
        """A call that did not run used no tokens; that it was asked stays counted."""
        self._rates.correct(ticket.grant, 0, int(monotonic_ms()))
        self._rates.release(ticket.grant)

    # ------------------------------------------------------------ while it runs

    def extend(self, ticket: Ticket, completion_tokens: int) -> bool:
        """Hold money for more of a stream; False when an account does not have it."""
        more = max(EXTEND_TOKENS_MIN, completion_tokens // EXTEND_DIVISOR)
        micro_usd = max(1, ticket.model.cost_micro_usd(prompt=0, cached=0, completion=more))
        raised = self._accounts.try_extend_all(ticket.holds, micro_usd=micro_usd, tokens=more)
        if raised is None:
            return False
        ticket.holds = raised
        ticket.tokens_held = max(ticket.tokens_held, completion_tokens) + more
        return True

    # ------------------------------------------------------------ opened and closed

    def open(self, ticket: Ticket, entry: WorkflowEntry | None) -> None:
        """The call is accepted: it will end in exactly one terminal state."""
        self.in_flight[ticket.id] = ticket
        request, call = ticket.request, ticket.call
        self._intake.tenant_calls[request.tenant] += 1
        if entry is not None:
            entry.calls_in_flight += 1
            entry.step_last = max(entry.step_last, request.step)
        self._journal.opened(
            OpenedRow(
                id=ticket.id,
                tenant_id=request.tenant,
                key_id=call.principal.key_id,
                replica_id=self._replica_id,
                workflow_id=request.workflow,
                step=request.step,
                model=request.model,
                endpoint=call.endpoint,
                is_stream=call.is_stream,
                reserved_micro_usd=ticket.reserved_micro_usd,
                opened_at=datetime.fromtimestamp(ticket.opened_at_s, UTC),
            )
        )

    def close(
        self,
        ticket: Ticket,
        state: RequestState,
        reason: Reason | None,
        usage: Usage,
        cost_micro_usd: int,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
    ) -> int:
        """Money charged and returned, rates corrected, the end journalled; micro-dollars charged."""
        request = ticket.request
        tokens = usage.prompt_tokens + usage.completion_tokens
        charged = self._accounts.settle_all(ticket.holds, micro_usd=cost_micro_usd, tokens=tokens)
        self._rates.correct(ticket.grant, tokens, int(monotonic_ms()))
        self._rates.release(ticket.grant)
        self.in_flight.pop(ticket.id, None)
        calls = self._intake.tenant_calls
        calls[request.tenant] -= 1
        if calls[request.tenant] <= 0:
            del calls[request.tenant]
        is_placed = state is RequestState.SUCCEEDED and not ticket.is_replayed
        if request.workflow is not None:
            entry = self._workflows.entry(request.workflow)
            if entry is not None:
                entry.calls_in_flight -= 1
                entry.spent_here_micro_usd += charged.micro_usd
                if is_placed:
                    entry.home = ticket.placement.decode.engine_id
        elif ticket.call.session is not None and is_placed:
            self._intake.remember_home(ticket)
        self._journal.settled(
            SettledRow(
                id=ticket.id,
                state=str(state),
                reason=None if reason is None else str(reason),
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                is_usage_estimated=usage.is_estimated,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                e2e_ms=e2e_ms,
                queue_ms=ticket.queue_ms,
                settled_micro_usd=charged.micro_usd,
                ended_at=datetime.now(UTC),
                tenant_id=request.tenant,
                workflow_id=request.workflow,
                step=request.step,
                replica_id=self._replica_id,
                charges=charged.charges,
            )
        )
        return charged.micro_usd


def _no_money(hold: Hold) -> Refuse:
    """Names the scope whose budget is spent."""
    scope, _, name = hold.budget_id.partition(":")
    match scope:
        case "tenant":
            whose = "the tenant's budget"
        case "key":
            whose = "the budget of this API key"
        case _:
            whose = f"the budget of workflow `{name.partition(':')[0]}`"
    amount = (
        f"${hold.amount / 1e6:.6f}" if hold.unit is Unit.MICRO_USD else f"{hold.amount:,} tokens"
    )
    return Refuse(
        Reason.INSUFFICIENT_QUOTA,
        f"{whose} does not cover the {amount} that this call may cost; lower its token limit or ask"
        " the operator for more",
        hurdles=(
            Hurdle(
                Quantity.MICRO_USD if hold.unit is Unit.MICRO_USD else Quantity.TOKENS,
                # What the account has left is the database's to say: this replica holds a slice of it.
                there=None,
                needed=float(hold.amount),
                of=hold.budget_id,
            ),
        ),
    )
