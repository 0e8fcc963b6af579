"""The gate: one call through key, rules, rates, load, money, decision, credits; and the one place where it is settled.

What is decided and committed is the desk's (`desk.py`); the gate adds the clock, the money, the journal
and who has to wait.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from controlplane.domain.catalog import Model, Principal, Role, Scope
from controlplane.domain.decision import Decision, Placement, Queue, Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName, RequestId, WorkflowId
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.domain.request import Request
from controlplane.domain.transfer import Connector, KvSource
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime.accounts import Accounts
from controlplane.runtime.books import Books
from controlplane.runtime.call import Call, Ticket, monotonic_ms
from controlplane.runtime.decision_log import DecisionLog
from controlplane.runtime.desk import Desk
from controlplane.runtime.dry_run import dry_run, told
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.intake import Intake, Prepared
from controlplane.runtime.policy_state import PolicyState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.principals import Principals
from controlplane.runtime.queue_pump import QueuePump
from controlplane.runtime.rate_limits import RateLimits
from controlplane.runtime.rulings import PoolView, refusal
from controlplane.runtime.stream_check import next_check, ruled_out
from controlplane.runtime.workflow_state import WorkflowStates
from controlplane.store.journal import AttemptRow, Journal
from dataplane.protocol.messages import Feature
from policies.documents import Phase
from policies.evaluate import Terms, terms_for

# How long a stream that lost its engine waits for a seat on another.
RESUME_WAIT_S_MAX: Final = 10.0

_UNREADABLE: Final = Refuse(
    Reason.STATE_UNAVAILABLE, "state can not be read at present; try again", 2_000
)
_NOTHING_USED: Final = Usage(0, 0, 0, is_estimated=False)


def _deaf(_: object) -> None: ...


class Observer(Protocol):
    """What the gate tells the counters. Implementations add integers, nothing more."""

    def decided(self, verdict: str, reason: str, duration_us: float) -> None: ...
    def settled(
        self, ticket: Ticket, state: RequestState, usage: Usage, charged_micro_usd: int
    ) -> None: ...
    def measured(
        self,
        ticket: Ticket,
        state: RequestState,
        reason: Reason | None,
        charged_micro_usd: int,
        *,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
    ) -> None: ...
    def first_token(self, model: str, predicted_ms: float, actual_ms: float) -> None: ...
    def refused(self, call: Call | None, refuse: Refuse) -> None: ...
    def attempted(self, leg: str, outcome: AttemptOutcome) -> None: ...
    def retried(self, *, is_allowed: bool) -> None: ...
    def prefill_failed(self, model: str, *, is_elsewhere: bool) -> None: ...


class Gate:
    """One replica's door. Synchronous but for what may have to ask PostgreSQL or wait in the queue."""

    def __init__(
        self,
        *,
        replica_id: str,
        fleet: FleetState,
        accounts: Accounts,
        principals: Principals,
        workflows: WorkflowStates,
        policies: PolicyState,
        intake: Intake,
        journal: Journal,
        decisions: DecisionLog,
        estimates: Estimates,
        pump: QueuePump,
        rates: RateLimits,
        loads: PoolLoads,
        observer: Observer,
    ) -> None:
        self.replica_id = replica_id
        self.fleet = fleet
        self.accounts = accounts
        self.principals = principals
        self.workflows = workflows
        self.policies = policies
        self.decisions = decisions
        self.pump = pump
        self.loads = loads
        self._rates = rates
        self._intake = intake
        self._estimates = estimates
        self._journal = journal
        self._observer = observer
        self.desk: Desk[Ticket] = Desk(fleet, loads, pump.line, RetryBudgets())
        self.desk.rule = self._dispatched
        self.desk.record = self._record
        self.desk.committed = self._committed
        self.desk.freed = pump.offer
        self._books = Books(
            replica_id=replica_id,
            accounts=accounts,
            rates=rates,
            workflows=workflows,
            intake=intake,
            journal=journal,
        )
        self.in_flight = self._books.in_flight
        self.is_draining = False
        # Told of each workflow that was ended here, perhaps more than once.
        self.on_workflow_ended: Callable[[WorkflowId], None] = _deaf
        intake.view = self._view
        pump.place = self._place_waiting
        pump.is_idle = lambda model: self.desk.is_idle(model, monotonic_ms())

    # ------------------------------------------------------------ before admission

    @property
    def retries(self) -> RetryBudgets:
        return self.desk.retries

    @property
    def policy_revision(self) -> str:
        return self.policies.policy.revision

    def new_id(self) -> RequestId:
        return self._intake.new_id()

    def models(self, principal: Principal) -> list[Model]:
        """Models that this tenant may use, by name."""
        bundle = self.policies.policy_for(principal.tenant.id).bundle
        return [
            model
            for name, model in sorted(
                {**self.fleet.catalog.models, **self.fleet.catalog.adapters}.items()
            )
            if terms_for(bundle, principal.tenant, name, Scope.CHAT).is_allowed
        ]

    def knows_model(self, name: str) -> Model | None:
        return self.fleet.catalog.served(ModelName(name))

    async def authenticate(self, plain_key: bytes) -> Principal | None:
        """The owner of a key, or None. Raises StateUnavailable when that can not be found out."""
        try:
            plain = plain_key.decode("ascii")
        except UnicodeDecodeError:
            return None
        principal = await self.principals.find(plain)
        return None if principal is None or principal.tenant.is_disabled else principal

    def cache_terms(self, call: Call) -> Terms | Refuse:
        """The terms that a call for its model has, without asking the rules."""
        model = self._intake.model_of(call)
        if isinstance(model, Refuse):
            return model
        return self._intake.rights_of(call, model, None).terms

    def rate_headers(self, call: Call) -> tuple[tuple[bytes, bytes], ...]:
        """`x-ratelimit-*` for a call that took nothing of its limits."""
        terms = self.cache_terms(call)
        if isinstance(terms, Refuse):
            return ()
        return self._rates.headers_for(call.principal, terms.limits, int(monotonic_ms()))

    # ------------------------------------------------------------ admission

    async def admit(self, call: Call) -> Ticket | Refuse:
        """Decide on a call. Awaits only for an unknown workflow, for money, and in the queue.

        A ticket that is returned holds credits and money, and must be settled exactly once.
        """
        prepared = await self._prepare(call)
        if isinstance(prepared, Refuse):
            return prepared
        ticket = prepared.ticket
        # Money before load: who has none would only be told to come back for nothing.
        refuse = self._books.rate(ticket) or await self._take(ticket)
        if refuse is not None:
            return self._refuse(ticket, refuse)
        refuse = self._begin(ticket)
        if refuse is not None:
            self._books.give_back(ticket)
            self._books.unrate(ticket)
            return self._refuse(ticket, refuse)
        self._note_request(ticket)
        return await self._decide_or_wait(prepared)

    async def admit_cached(self, call: Call, usage: Usage) -> Ticket | Refuse:
        """Take a call whose answer is there already: rules, rates and money, but no engine and no load.

        The ticket has no placement and must be settled exactly once.
        """
        prepared = await self._prepare(call)
        if isinstance(prepared, Refuse):
            return prepared
        ticket = prepared.ticket
        refuse = self._books.rate(ticket)
        if refuse is not None:
            return self._refuse(ticket, refuse)
        ticket.is_replayed = True
        cost = self._cost(ticket, usage)
        tokens = usage.prompt_tokens + usage.completion_tokens
        ticket.reserved_micro_usd = cost
        ticket.holds = tuple(
            replace(hold, amount=cost if hold.unit == "micro_usd" else tokens)
            for hold in ticket.holds
        )
        refuse = await self._take(ticket)
        if refuse is not None:
            return self._refuse(ticket, refuse)
        self._books.open(ticket, prepared.workflow)
        return ticket

    async def dry_run(self, call: Call) -> dict[str, Any]:
        """What would be decided now, in members of JSON. Takes nothing and commits to nothing."""
        prepared = await self._prepare(call)
        if isinstance(prepared, Refuse):
            return told(prepared)
        return await dry_run(prepared.ticket, self.desk, self._books, self._rates)

    async def _prepare(self, call: Call) -> Prepared | Refuse:
        """The call with its terms and rules applied, or why it is not looked at further."""
        if self.is_draining:
            return Refuse(Reason.NO_CAPACITY, "this replica is shutting down; send it again", 1_000)
        if self._journal.is_full:
            return Refuse(
                Reason.STATE_UNAVAILABLE, "state can not be written at present; try again", 2_000
            )
        try:
            prepared = await self._intake.prepare(call)
        except StateUnavailable:
            return _UNREADABLE
        if isinstance(prepared, Prepared) and prepared.refuse is not None:
            return self._refuse(prepared.ticket, prepared.refuse)
        return prepared

    def _begin(self, ticket: Ticket) -> Refuse | None:
        """Ask the pool's load; when it refuses, what the agents could still lend is asked for."""
        refuse = self.desk.begin(ticket, monotonic_ms())
        if refuse is not None:
            self.pump.contended(ticket.request.model)
        return refuse

    async def _take(self, ticket: Ticket) -> Refuse | None:
        """Hold the money of a call that was rated; without it, or cancelled, the rate is given back too."""
        try:
            refuse = await self._books.take(ticket)
        except StateUnavailable:
            refuse = _UNREADABLE
        except BaseException:
            self._books.unrate(ticket)
            raise
        if refuse is not None:
            self._books.unrate(ticket)
        return refuse

    async def _decide_or_wait(self, prepared: Prepared) -> Ticket | Refuse:
        """From here on money is held: every way out gives it back or hands it to the ticket."""
        ticket, entry = prepared.ticket, prepared.workflow
        try:
            outcome = self._asked(ticket)
            if isinstance(outcome, Queue):
                self._books.open(ticket, entry)
                queued_ms, decided = monotonic_ms(), ticket.decisions
                cached = max(self.desk.cached(ticket.request).values(), default=0)
                outcome = await self.pump.wait(ticket, outcome.reason, cached)
                ticket.queue_ms = monotonic_ms() - queued_ms
                if isinstance(outcome, Refuse) and ticket.decisions == decided:
                    # The queue's word, not a decision on rows, which has been recorded already.
                    outcome = self.desk.turned_away(ticket, outcome, monotonic_ms())
        except BaseException:
            # The client went away while the call waited.
            self._end_unplaced(ticket, RequestState.CANCELLED, None)
            raise
        if isinstance(outcome, Refuse):
            state = (
                RequestState.EXPIRED
                if outcome.reason in (Reason.DEADLINE_UNREACHABLE, Reason.DEFERRED)
                else RequestState.REFUSED
            )
            self._end_unplaced(ticket, state, outcome.reason)
            return replace(outcome, decision=ticket.id)
        if ticket.id not in self.in_flight:
            self._books.open(ticket, entry)
        next_check(ticket, 0)
        return ticket

    def _place_waiting(self, ticket: Ticket) -> Placement | Queue | Refuse:
        """The pump's try for a call that has its place in the queue already."""
        if ticket.is_settled:
            msg = f"{ticket.id} ended while it waited"
            raise RuntimeError(msg)
        started_ms = monotonic_ms()
        outcome = self.desk.place(ticket, started_ms)
        if not isinstance(outcome, Queue):
            self._observe(outcome, started_ms)
        return outcome

    def _asked(self, ticket: Ticket) -> Placement | Queue | Refuse:
        started_ms = monotonic_ms()
        decided = ticket.decisions
        outcome = self.desk.ask(ticket, started_ms)
        if ticket.decisions > decided:
            self._observe(outcome, started_ms)
        return outcome

    def _observe(self, outcome: Placement | Queue | Refuse, started_ms: float) -> None:
        duration_us = (monotonic_ms() - started_ms) * 1000.0
        match outcome:
            case Placement():
                self._observer.decided("admit", "", duration_us)
            case Queue(reason):
                self._observer.decided("queue", reason, duration_us)
            case Refuse(reason=reason):
                self._observer.decided("refuse", reason, duration_us)

    def _dispatched(self, ticket: Ticket, now_ms: float) -> Request | Refuse:
        """What the rules of dispatch make of a call, with the pool as it is now."""
        request = ticket.request
        if not ticket.policy.has_rules(Phase.DISPATCH):
            return request
        view = self.desk.view(request.model, now_ms)
        live = ticket.live._replace(
            pool_queue_depth=view.queue_depth,
            pool_queue_wait_ms=view.queue_wait_ms,
            pool_saturation_permille=view.saturation_permille,
            pool_kv_used_permille=view.kv_used_permille,
            pool_breaker=view.breaker,
            pool_is_overloaded=view.is_overloaded,
        )
        ruling = ticket.policy.rule(Phase.DISPATCH, ticket.part, live)
        refuse = refusal(ruling, is_begun=request.is_begun)
        if refuse is not None:
            return refuse
        if ruling.region_names is None and ruling.gpu_type_names is None:
            return request
        return replace(
            request,
            regions=request.regions & self.fleet.region_mask(ruling.region_names),
            gpu_types=request.gpu_types & self.fleet.gpu_mask(ruling.gpu_type_names),
        )

    def _record(
        self, ticket: Ticket, cached: Mapping[int, int], decision: Decision, now_ms: float
    ) -> None:
        self.decisions.record(ticket, cached, decision, now_ms=int(now_ms))
        ticket.decisions += 1

    def _committed(self, ticket: Ticket) -> None:
        placement = ticket.placement
        ticket.decode_url = self.fleet.address_of(placement.decode)
        ticket.prefill_url = (
            None if placement.prefill is None else self.fleet.address_of(placement.prefill)
        )
        ticket.kv_source = (
            None if placement.prefill is None else self.fleet.kv_source_of(placement.prefill)
        )

    # ------------------------------------------------------------ while it runs

    def retry(
        self, ticket: Ticket, failed: EngineRow, outcome: AttemptOutcome, detail: str
    ) -> bool:
        """Place the call again after a failure before its first byte, elsewhere and within the budgets.

        The failed attempt has been reported by `attempted`. False: the failure stands.
        """
        del outcome, detail
        if self.is_draining:
            return False
        is_placed = self.desk.retry(ticket, failed, monotonic_ms())
        if is_placed is None:
            return False
        self._observer.retried(is_allowed=is_placed)
        return is_placed

    def prefill_failed(self, ticket: Ticket, failed: EngineRow, outcome: AttemptOutcome) -> None:
        """The first leg failed, as `attempted` was told: the ticket says who computes the prompt now.

        Another prefill engine, within the retry budgets, or with no `prefill_url` the decode engine alone,
        as when the mistake is the client's, which the decode engine will tell.
        """
        is_elsewhere = self.desk.prefill_failed(
            ticket,
            failed,
            monotonic_ms(),
            is_retried=outcome is not AttemptOutcome.CLIENT_ERROR,
        )
        self._observer.prefill_failed(ticket.model.name, is_elsewhere=is_elsewhere)

    def prefill_kept(self, ticket: Ticket, holder: EngineRow) -> bool:
        """Whether the KV that `holder` computed for an earlier attempt can go to who decodes now.

        Then no prefill leg is run: its credits are given back, and the ticket has no `prefill_url`.
        """
        return self.desk.prefill_kept(ticket, holder)

    def leave_out(self, ticket: Ticket, feature: Feature) -> None:
        """Never give the call to an engine that lacks `feature`; those that it knows now."""
        self.desk.leave_out(ticket, feature)

    def elsewhere(self, ticket: Ticket, left: EngineRow) -> Placement | Queue | Refuse | None:
        """Where a stream that has begun can go on, other than on `left`; `move` takes it there.

        The first move of a stream is free, for an engine that dies takes many streams at once and each of
        them is placed by the scheduler where there is room; further ones spend from the retry budgets.
        """
        return self.desk.elsewhere(ticket, left, monotonic_ms(), is_free=ticket.resumes == 0)

    def move(self, ticket: Ticket, placement: Placement, *, keeps_left: bool = False) -> None:
        """Give a stream to the engine that `elsewhere` has just named.

        With `keeps_left` the engine that it leaves is held, until `let_go` or until the stream goes on.
        """
        self.desk.move(ticket, placement, monotonic_ms(), keeps_left=keeps_left)
        ticket.resumes += 1

    def let_go(self, ticket: Ticket) -> None:
        """The engine that the stream has left is not needed any more."""
        self.desk.let_go(ticket)

    def hand_over_source(self, left: EngineRow, to: EngineRow) -> KvSource | None:
        """How `to` fetches KV of a stream from an engine that is left alive; None: it can not."""
        if left.role is not Role.BOTH or not left.pair_key or left.pair_key != to.pair_key:
            return None
        source = self.fleet.kv_source_of(left)
        return source if source is not None and source.connector is Connector.NIXL else None

    async def resume(self, ticket: Ticket, left: EngineRow) -> bool:
        """Give a stream whose engine was lost to another one, or wait for a seat for a while, and hold none
        meanwhile. False: there is none for it.
        """
        outcome = self.elsewhere(ticket, left)
        if isinstance(outcome, Placement):
            self.move(ticket, outcome)
            return True
        if not isinstance(outcome, Queue):
            return False
        if not isinstance(await self._wait_to_resume(ticket, outcome.reason), Placement):
            return False
        ticket.resumes += 1
        return True

    async def _wait_to_resume(self, ticket: Ticket, reason: Reason) -> Placement | Refuse | None:
        self.desk.release(ticket)
        charge = ticket.charge
        cached = max(self.desk.cached(ticket.request).values(), default=0)
        outcome: Placement | Refuse | None
        try:
            async with asyncio.timeout(RESUME_WAIT_S_MAX):
                outcome = await self.pump.wait(ticket, reason, cached)
        except TimeoutError:
            # It may have been placed at the very moment.
            outcome = ticket.placement if ticket.is_holding_decode else None
        if charge is not None and ticket.charge is not charge:
            # Its tenant is charged once for it.
            self.pump.queue.correct(charge, 0)
        if isinstance(outcome, Placement):
            ticket.attempt += 1
        return outcome

    def goes_on(self, ticket: Ticket) -> None:
        """The engine that a stream was given to has begun to answer."""
        self.desk.goes_on(ticket)

    def may_return(self, ticket: Ticket) -> bool:
        """Whether a client whose call has failed may send it again: it spends from the same budgets."""
        return self.desk.try_retry(ticket.request, monotonic_ms())

    def attempted(
        self,
        ticket: Ticket,
        row: EngineRow,
        leg: str,
        outcome: AttemptOutcome,
        detail: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        """How one call of one engine ended. The prefill leg's credits end with it."""
        self.fleet.attempted(
            row,
            outcome,
            monotonic_ms(),
            began_ms=ticket.decided_ms,
            retry_after_ms=retry_after_ms,
        )
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
        if outcome is not AttemptOutcome.OK and outcome is not AttemptOutcome.CANCELLED:
            self.desk.unheld(ticket, row)
        if leg == "prefill":
            self.desk.release_prefill(ticket)

    def first_token(self, ticket: Ticket, ttft_ms: float) -> None:
        """Engine's first token, `ttft_ms` after the placement was decided."""
        if not ticket.is_first_token_seen:
            predicted_ms = ticket.placement.ttft_ms_predicted
            self._observer.first_token(ticket.model.name, predicted_ms, ttft_ms)
        self.desk.first_token(ticket, ttft_ms, monotonic_ms())

    def may_continue(self, ticket: Ticket, completion_tokens: int) -> Refuse | None:
        """Whether a stream that has come so far may go on; None when it may, and then it is asked later."""
        refuse = ruled_out(ticket, completion_tokens, monotonic_ms())
        if refuse is not None:
            return refuse
        if completion_tokens >= ticket.tokens_held and not self._books.extend(
            ticket, completion_tokens
        ):
            if ticket.terms.over_budget_cuts:
                return Refuse(
                    Reason.INSUFFICIENT_QUOTA,
                    f"the budget ended after {completion_tokens:,} tokens of this answer",
                    decision=ticket.id,
                )
            # It goes on; what the accounts can not pay in the end is not charged.
            ticket.tokens_held = ticket.request.completion_tokens_max
        next_check(ticket, completion_tokens)
        return None

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
        self.desk.release(ticket)
        if not ticket.is_replayed:
            if state is RequestState.SUCCEEDED and not usage.is_estimated:
                self._estimates.learn(ticket.request, ticket.call, usage)
            is_moved = ticket.resumes > 0
            self.desk.ended(ticket, state, usage, tpot_ms, monotonic_ms(), is_moved=is_moved)
        cost = self._cost(ticket, usage)
        charged = self._books.close(ticket, state, reason, usage, cost, ttft_ms, tpot_ms, e2e_ms)
        self._observer.settled(ticket, state, usage, charged)
        self._observer.measured(
            ticket, state, reason, charged, ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms
        )
        self.pump.offer()

    def refused(self, call: Call | None, refuse: Refuse) -> str:
        """Count a refusal; the id under which it can be explained."""
        self._observer.refused(call, refuse)
        asked = None if call is None else call.request_id
        return refuse.decision or asked or self.new_id()

    def place_in_queue(self, request_id: str) -> tuple[int, int | None] | None:
        """Position from 1 and predicted wait in ms of a call that waits here; None of any other."""
        ticket = self.in_flight.get(request_id)
        return None if ticket is None else self.pump.place_of(ticket)

    def workflow_ended(self, workflow: WorkflowId) -> None:
        """A workflow has ended: what was promised to it is free."""
        self.desk.workflow_ended(workflow, monotonic_ms())
        self.on_workflow_ended(workflow)

    # ------------------------------------------------------------ upkeep

    def sweep(self, now_ms: float) -> None:
        """Several times a second: levels move, calls that waited too long are answered."""
        self.desk.use_rules(self.policies.policy.bundle.admission)
        self.desk.tick(now_ms)
        self.pump.sweep(now_ms)
        self.pump.offer()

    def use_replicas(self, count: int) -> None:
        """How many replicas share limits and engines, this one included."""
        self._rates.use_replicas(count)
        self.loads.use_replicas(count)

    def live_rows(self) -> Iterator[EngineRow]:
        for entry in self.fleet.entries():
            yield entry.row

    # ------------------------------------------------------------ inside

    def _view(self, model: ModelName) -> PoolView:
        return self.desk.view(model, monotonic_ms())

    def _cost(self, ticket: Ticket, usage: Usage) -> int:
        cost = ticket.model.cost_micro_usd(
            prompt=usage.prompt_tokens,
            cached=min(usage.cached_tokens, usage.prompt_tokens),
            completion=usage.completion_tokens,
        )
        return int(cost * ticket.terms.cache_price_ratio) if ticket.is_replayed else cost

    def _refuse(self, ticket: Ticket, refuse: Refuse) -> Refuse:
        """A refusal before the scheduler was asked; it is recorded like one of the scheduler's."""
        self._record(ticket, {}, refuse, int(monotonic_ms()))
        return replace(refuse, decision=ticket.id)

    def _end_unplaced(self, ticket: Ticket, state: RequestState, reason: Reason | None) -> None:
        """End a call that never ran: its money goes back whole."""
        # The queue may have placed it at the very moment in which its client went away.
        self.desk.release(ticket)
        self.desk.ended(ticket, state, _NOTHING_USED, None, monotonic_ms())
        if ticket.id in self.in_flight:
            ticket.is_settled = True
            e2e_ms = monotonic_ms() - ticket.call.received_ms
            self._books.close(ticket, state, reason, _NOTHING_USED, 0, None, None, e2e_ms)
            self._observer.settled(ticket, state, _NOTHING_USED, 0)
            if state is RequestState.CANCELLED:
                # A refusal is counted when it is told.
                self._observer.measured(
                    ticket, state, reason, 0, ttft_ms=None, tpot_ms=None, e2e_ms=e2e_ms
                )
            return
        self._books.give_back(ticket)
        self._books.unrate(ticket)

    def _note_request(self, ticket: Ticket) -> None:
        request = ticket.request
        self.retries.note_request(
            request.tenant, request.model, int(monotonic_ms()), ticket.call.client_retries
        )
