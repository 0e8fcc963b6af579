"""The gate: one call through key, terms, money, decision, credits; and the one place where it is settled.

Deciding is pure and happens elsewhere; here decisions are committed. Between a decision and its commit
nothing awaits, so what fitted when it was decided still fits when it is taken, and `fits` is asked
again all the same.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from controlplane.admission.decide import decide
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Model, Principal, Scope
from controlplane.domain.decision import Admit, Decision, Placement, Queue, Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.domain.request import Request
from controlplane.reliability.retry_budget import RetryBudget
from controlplane.runtime.accounts import Accounts
from controlplane.runtime.call import Call, Ticket, monotonic_ms
from controlplane.runtime.decision_log import DecisionLog
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.intake import Intake, Prepared
from controlplane.runtime.principals import Principals
from controlplane.runtime.queue_pump import QueuePump
from controlplane.runtime.workflow_state import WorkflowEntry, WorkflowStates
from controlplane.scheduler.place import still_fits
from controlplane.store.journal import AttemptRow, Journal, OpenedRow, SettledRow
from policies.evaluate import terms_for
from policies.load import Bundle

RETRIES_MAX = 2
RETRY_BUDGETS_KEPT = 10_000


class Observer(Protocol):
    """What the gate tells the counters. Implementations add integers, nothing more."""

    def decided(self, verdict: str, reason: str, duration_us: float) -> None: ...
    def settled(
        self, ticket: Ticket, state: RequestState, usage: Usage, charged_micro_usd: int
    ) -> None: ...
    def refused(self, call: Call | None, refuse: Refuse) -> None: ...
    def attempted(self, leg: str, outcome: AttemptOutcome) -> None: ...
    def retried(self, *, is_allowed: bool) -> None: ...


class Gate:
    """One replica's door. Every method but `authenticate` and `admit` is synchronous."""

    def __init__(
        self,
        *,
        replica_id: str,
        fleet: FleetState,
        accounts: Accounts,
        principals: Principals,
        workflows: WorkflowStates,
        intake: Intake,
        journal: Journal,
        decisions: DecisionLog,
        estimates: Estimates,
        pump: QueuePump,
        bundle: Bundle,
        observer: Observer,
    ) -> None:
        self.replica_id = replica_id
        self.fleet = fleet
        self.accounts = accounts
        self.principals = principals
        self.workflows = workflows
        self.decisions = decisions
        self.pump = pump
        self._intake = intake
        self._estimates = estimates
        self._journal = journal
        self._bundle = bundle
        self._observer = observer
        self._retry_budgets: OrderedDict[tuple[str, str], RetryBudget] = OrderedDict()
        self.in_flight: dict[str, Ticket] = {}
        self.is_draining = False
        pump.place = self._place_waiting

    # ------------------------------------------------------------ before admission

    @property
    def policy_revision(self) -> str:
        return self._bundle.revision

    def models(self, principal: Principal) -> list[Model]:
        """Models that this tenant may use, by name."""
        return [
            model
            for name, model in sorted(self.fleet.catalog.models.items())
            if terms_for(self._bundle, principal.tenant, name, Scope.CHAT).is_allowed
        ]

    def knows_model(self, name: str) -> Model | None:
        return self.fleet.catalog.models.get(ModelName(name))

    async def authenticate(self, plain_key: bytes) -> Principal | None:
        """The owner of a key, or None. Raises StateUnavailable when that can not be found out."""
        try:
            plain = plain_key.decode("ascii")
        except UnicodeDecodeError:
            return None
        principal = await self.principals.find(plain)
        return None if principal is None or principal.tenant.is_disabled else principal

    # ------------------------------------------------------------ admission

    async def admit(self, call: Call) -> Ticket | Refuse:
        """Decide on a call. Awaits only for an unknown workflow, for money, and in the queue.

        A ticket that is returned holds credits and money, and must be settled exactly once.
        """
        if self.is_draining:
            return Refuse(Reason.NO_CAPACITY, "this replica is shutting down; send it again", 1_000)
        if self._journal.is_full:
            return Refuse(
                Reason.STATE_UNAVAILABLE, "state can not be written at present; try again", 2_000
            )
        try:
            prepared = await self._intake.prepare(call)
            if isinstance(prepared, Refuse):
                return prepared
            if prepared.refuse is not None:
                return self._refuse(prepared.ticket, prepared.refuse)
            refusal = await self._reserve_money(prepared)
        except StateUnavailable:
            return Refuse(
                Reason.STATE_UNAVAILABLE, "state can not be read at present; try again", 2_000
            )
        if refusal is not None:
            return refusal
        return await self._decide_or_wait(prepared)

    async def _decide_or_wait(self, prepared: Prepared) -> Ticket | Refuse:
        """From here on money is held: every way out gives it back or hands it to the ticket."""
        ticket, entry = prepared.ticket, prepared.workflow
        self._note_request(ticket)
        try:
            if self.pump.is_waiting_for(ticket.request.model):
                outcome: Placement | Queue | Refuse = Queue(Reason.NO_CAPACITY)
            else:
                outcome = self._decide_and_commit(ticket, self.pump.waiting)
            if isinstance(outcome, Queue):
                self._open(ticket, entry)
                queued_ms = monotonic_ms()
                outcome = await self.pump.wait(ticket, outcome.reason)
                ticket.queue_ms = monotonic_ms() - queued_ms
        except BaseException:
            # The client went away while the call waited.
            self._end_unplaced(ticket, RequestState.CANCELLED, None)
            raise
        if isinstance(outcome, Refuse):
            state = (
                RequestState.EXPIRED
                if outcome.reason is Reason.DEADLINE_UNREACHABLE
                else RequestState.REFUSED
            )
            self._end_unplaced(ticket, state, outcome.reason)
            return replace(outcome, decision=ticket.id)
        if ticket.id not in self.in_flight:
            self._open(ticket, entry)
        return ticket

    def _place_waiting(self, ticket: Ticket) -> Placement | Queue | Refuse:
        """The pump's try for a call that has its place in the queue already."""
        if ticket.is_settled or ticket.is_holding_decode:
            msg = f"{ticket.id} was placed or ended while it waited"
            raise RuntimeError(msg)
        return self._decide_and_commit(ticket, 0)

    def _decide_and_commit(self, ticket: Ticket, waiting: int) -> Placement | Queue | Refuse:
        """Decide on the rows as they are, and take what was decided, without a pause in between.

        `waiting` counts the calls in the queue before this one.
        """
        request = ticket.request
        started_ms = monotonic_ms()
        now_ms = int(started_ms)
        rows = self.fleet.rows_for(request.model)
        cached = self._cached(request)
        snapshot = Snapshot(
            rows=rows, cached=cached, waiting=waiting, waiting_max=self.pump.calls_max
        )
        decision = decide(request, snapshot, ticket.terms, now_ms)
        is_still_waiting = ticket.id in self.in_flight and isinstance(decision, Queue)
        if is_still_waiting:
            return Queue(Reason.NO_CAPACITY)
        self._record(ticket, cached, decision, now_ms)
        duration_us = (monotonic_ms() - started_ms) * 1000.0
        match decision:
            case Admit(placement):
                self._observer.decided("admit", "", duration_us)
                if not still_fits(request, placement, now_ms):
                    return Queue(Reason.NO_CAPACITY)
                self._commit(ticket, placement, started_ms)
                return placement
            case Queue(reason):
                self._observer.decided("queue", reason, duration_us)
                return decision
            case Refuse(reason=reason):
                self._observer.decided("refuse", reason, duration_us)
                return decision

    def _record(
        self, ticket: Ticket, cached: Mapping[int, int], decision: Decision, now_ms: int
    ) -> None:
        self.decisions.record(
            ticket.request,
            cached,
            decision,
            now_ms=now_ms,
            number=ticket.decisions,
            revision=self._bundle.revision,
        )
        ticket.decisions += 1

    def _commit(self, ticket: Ticket, placement: Placement, now_ms: float) -> None:
        request = ticket.request
        self.fleet.take(request, placement)
        prompt_tokens = request.prompt_tokens
        self.fleet.prefixes.routed(placement.decode.index, request.prefix, prompt_tokens)
        ticket.decode_url = self.fleet.address_of(placement.decode)
        ticket.prefill_url = None
        ticket.is_holding_prefill = False
        if placement.prefill is not None:
            self.fleet.prefixes.routed(placement.prefill.index, request.prefix, prompt_tokens)
            ticket.prefill_url = self.fleet.address_of(placement.prefill)
            ticket.is_holding_prefill = True
        ticket.is_holding_decode = True
        ticket.placement = placement
        ticket.is_first_token_seen = False
        ticket.decided_ms = now_ms
        self.fleet.began(placement, now_ms)

    # ------------------------------------------------------------ while it runs

    def retry(
        self, ticket: Ticket, failed: EngineRow, outcome: AttemptOutcome, detail: str
    ) -> bool:
        """Place the call again after a failure before its first byte, elsewhere and within the budget.

        The failed attempt has been reported by `attempted`. False: the failure stands.
        """
        del outcome, detail
        if ticket.attempt >= RETRIES_MAX or self.is_draining:
            return False
        now_ms = monotonic_ms()
        if now_ms >= ticket.request.deadline_ms:
            return False
        budget = self._retry_budget(ticket)
        ticket.attempts_failed = (*ticket.attempts_failed, failed)
        rows = tuple(
            row
            for row in self.fleet.rows_for(ticket.request.model)
            if row not in ticket.attempts_failed
        )
        if not rows or not budget.try_spend(int(now_ms)):
            self._observer.retried(is_allowed=False)
            return False
        self._release(ticket)
        ticket.attempt += 1
        cached = self._cached(ticket.request)
        snapshot = Snapshot(rows=rows, cached=cached, waiting=0, waiting_max=0)
        decision = decide(ticket.request, snapshot, ticket.terms, int(now_ms))
        self._record(ticket, cached, decision, int(now_ms))
        is_placed = isinstance(decision, Admit) and still_fits(
            ticket.request, decision.placement, int(now_ms)
        )
        self._observer.retried(is_allowed=is_placed)
        if isinstance(decision, Admit) and is_placed:
            self._commit(ticket, decision.placement, now_ms)
        return is_placed

    def attempted(
        self, ticket: Ticket, row: EngineRow, leg: str, outcome: AttemptOutcome, detail: str = ""
    ) -> None:
        """How one call of one engine ended. The prefill leg's credits end with it."""
        self.fleet.attempted(row, outcome, monotonic_ms())
        self._observer.attempted(leg, outcome)
        self._journal.attempted(
            AttemptRow(
                request_id=ticket.id,
                number=ticket.attempt,
                leg=leg,
                engine_id=row.engine_id,
                outcome=str(outcome),
                detail=detail[:200],
            )
        )
        if leg == "prefill":
            self._release_prefill(ticket)

    def first_token(self, ticket: Ticket, ttft_ms: float) -> None:
        """Engine's first token, `ttft_ms` after the placement was decided."""
        if ticket.is_first_token_seen:
            return
        ticket.is_first_token_seen = True
        placement = ticket.placement
        self.fleet.prefilled(ticket.request, placement)
        row = placement.prefill or placement.decode
        self.fleet.first_token(row, placement.ttft_ms_predicted, ttft_ms)

    def settle(
        self,
        ticket: Ticket,
        state: RequestState,
        usage: Usage,
        reason: Reason | None,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
    ) -> None:
        """Credits back, money charged, the outcome journalled, the estimates taught. Once."""
        if ticket.is_settled:
            return
        ticket.is_settled = True
        self._release(ticket)
        cost = ticket.model.cost_micro_usd(
            prompt=usage.prompt_tokens,
            cached=min(usage.cached_tokens, usage.prompt_tokens),
            completion=usage.completion_tokens,
        )
        if state is RequestState.SUCCEEDED and not usage.is_estimated:
            self._estimates.learn(ticket.request, ticket.call, usage)
        self._close(ticket, state, reason, usage, cost, ttft_ms, tpot_ms, e2e_ms)
        self.pump.offer()

    def refused(self, call: Call | None, refuse: Refuse) -> str:
        """Count a refusal; the id under which it can be explained."""
        self._observer.refused(call, refuse)
        return refuse.decision or self._intake.new_id()

    # ------------------------------------------------------------ inside

    async def _reserve_money(self, prepared: Prepared) -> Refuse | None:
        """Hold the estimated cost in the tenant's account and, when it has one, in the workflow's."""
        ticket, entry = prepared.ticket, prepared.workflow
        amount = ticket.reserved_micro_usd
        accounts = self.accounts
        if not await accounts.reserve_refilling(ticket.tenant_budget, amount):
            return self._refuse(ticket, _no_money("the tenant's budget", amount))
        workflow_budget = ticket.workflow_budget
        if workflow_budget is None or entry is None:
            return None
        try:
            is_reserved = await accounts.reserve_refilling(workflow_budget, amount)
        except BaseException:
            accounts.settle(ticket.tenant_budget, amount, 0)
            raise
        if not is_reserved:
            accounts.settle(ticket.tenant_budget, amount, 0)
            return self._refuse(
                ticket, _no_money(f"the budget of workflow `{entry.record.id}`", amount)
            )
        return None

    def _refuse(self, ticket: Ticket, refuse: Refuse) -> Refuse:
        """A refusal before the scheduler was asked; it is recorded like one of the scheduler's."""
        self._record(ticket, {}, refuse, int(monotonic_ms()))
        return replace(refuse, decision=ticket.id)

    def _open(self, ticket: Ticket, entry: WorkflowEntry | None) -> None:
        """The call is accepted: it will end in exactly one terminal state."""
        self.in_flight[ticket.id] = ticket
        request, call = ticket.request, ticket.call
        if entry is not None:
            entry.calls_in_flight += 1
            entry.step_last = max(entry.step_last, request.step)
        self._journal.opened(
            OpenedRow(
                id=ticket.id,
                tenant_id=request.tenant,
                key_id=call.principal.key_id,
                replica_id=self.replica_id,
                workflow_id=request.workflow,
                step=request.step,
                model=request.model,
                endpoint=call.endpoint,
                is_stream=call.is_stream,
                reserved_micro_usd=ticket.reserved_micro_usd,
                opened_at=datetime.fromtimestamp(ticket.opened_at_s, UTC),
            )
        )

    def _end_unplaced(self, ticket: Ticket, state: RequestState, reason: Reason | None) -> None:
        """End a call that never ran: its money goes back whole."""
        # The queue may have placed it at the very moment in which its client went away.
        self._release(ticket)
        if ticket.id in self.in_flight:
            ticket.is_settled = True
            e2e_ms = monotonic_ms() - ticket.call.received_ms
            self._close(ticket, state, reason, _NOTHING_USED, 0, None, None, e2e_ms)
            return
        self.accounts.settle(ticket.tenant_budget, ticket.reserved_micro_usd, 0)
        if ticket.workflow_budget is not None:
            self.accounts.settle(ticket.workflow_budget, ticket.reserved_micro_usd, 0)

    def _close(
        self,
        ticket: Ticket,
        state: RequestState,
        reason: Reason | None,
        usage: Usage,
        cost_micro_usd: int,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
    ) -> None:
        request = ticket.request
        accounts = self.accounts
        # Both accounts are charged the same: never more than either can pay.
        charged = min(
            cost_micro_usd,
            accounts.charge_at_most(ticket.tenant_budget, ticket.reserved_micro_usd),
        )
        if ticket.workflow_budget is not None:
            charged = min(
                charged, accounts.charge_at_most(ticket.workflow_budget, ticket.reserved_micro_usd)
            )
            accounts.settle(ticket.workflow_budget, ticket.reserved_micro_usd, charged)
        accounts.settle(ticket.tenant_budget, ticket.reserved_micro_usd, charged)
        self.in_flight.pop(ticket.id, None)
        if request.workflow is not None:
            entry = self.workflows.entry(request.workflow)
            if entry is not None:
                entry.calls_in_flight -= 1
                entry.spent_here_micro_usd += charged
                if state is RequestState.SUCCEEDED:
                    entry.home = ticket.placement.decode.engine_id
        elif ticket.call.session is not None and state is RequestState.SUCCEEDED:
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
                settled_micro_usd=charged,
                ended_at=datetime.now(UTC),
                tenant_id=request.tenant,
                workflow_id=request.workflow,
                step=request.step,
                replica_id=self.replica_id,
                tenant_budget_id=ticket.tenant_budget,
                workflow_budget_id=ticket.workflow_budget,
            )
        )
        self._observer.settled(ticket, state, usage, charged)

    def _release(self, ticket: Ticket) -> None:
        """Give back whatever credits the ticket still holds."""
        if not ticket.is_holding_decode:
            return
        ticket.is_holding_decode = False
        if not ticket.is_first_token_seen:
            self.fleet.prefilled(ticket.request, ticket.placement)
        self.fleet.release_decode(ticket.placement)
        self._release_prefill(ticket)
        self.pump.offer()

    def _release_prefill(self, ticket: Ticket) -> None:
        if ticket.is_holding_prefill:
            ticket.is_holding_prefill = False
            self.fleet.release_prefill(ticket.request, ticket.placement)
            self.pump.offer()

    def _cached(self, request: Request) -> dict[int, int]:
        """Prompt tokens that each engine is thought to hold, by row index."""
        if not request.prefix:
            return {}
        tokens = request.prefix_tokens
        most = request.prompt_tokens - 1
        return {
            index: min(tokens[depth - 1], most)
            for index, depth in self.fleet.prefixes.match(request.prefix).items()
            if depth
        }

    def _note_request(self, ticket: Ticket) -> None:
        budget = self._retry_budget(ticket)
        now_ms = int(monotonic_ms())
        budget.note_request(now_ms)
        if ticket.call.client_retries:
            # The client's own retry spends from the same budget, whether or not there is any left.
            budget.try_spend(now_ms)

    def _retry_budget(self, ticket: Ticket) -> RetryBudget:
        key = (ticket.request.tenant, ticket.request.model)
        budget = self._retry_budgets.get(key)
        if budget is None:
            budget = self._retry_budgets[key] = RetryBudget()
            if len(self._retry_budgets) > RETRY_BUDGETS_KEPT:
                self._retry_budgets.popitem(last=False)
        return budget

    def live_rows(self) -> Iterator[EngineRow]:
        for entry in self.fleet.entries():
            yield entry.row


_NOTHING_USED = Usage(0, 0, 0, is_estimated=False)


def _no_money(whose: str, amount: int) -> Refuse:
    return Refuse(
        Reason.INSUFFICIENT_QUOTA,
        f"{whose} does not cover the ${amount / 1e6:.6f} that this call may cost;"
        " lower its token limit or ask the operator for more",
    )
