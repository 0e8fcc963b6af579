"""The gate: one call through key, rules, rates, load, money, decision, credits; and the one place where it is settled.

Deciding is pure and happens elsewhere; here decisions are committed. Between a decision and its commit
nothing awaits, so what fitted when it was decided still fits when it is taken, and `fits` is asked
again all the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from controlplane.admission.decide import decide
from controlplane.admission.fairness import service_tokens
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Model, Principal, Scope
from controlplane.domain.decision import Admit, Decision, Placement, Queue, Reason, Refuse
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName, RequestId, WorkflowId
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.domain.request import Request
from controlplane.reliability.retry_budget import RETRIES_PER_REQUEST_MAX, RetryBudgets
from controlplane.runtime.accounts import Accounts
from controlplane.runtime.books import Books
from controlplane.runtime.call import Call, Ticket, monotonic_ms
from controlplane.runtime.decision_log import DecisionLog
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.intake import Intake, Prepared
from controlplane.runtime.policy_state import PolicyState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.principals import Principals
from controlplane.runtime.queue_pump import QueuePump
from controlplane.runtime.rate_limits import RateLimits
from controlplane.runtime.rulings import PoolView, refusal
from controlplane.runtime.workflow_state import WorkflowStates
from controlplane.scheduler.place import object_to, still_fits
from controlplane.store.journal import AttemptRow, Journal
from policies.documents import Phase
from policies.evaluate import Terms, terms_for

# A pool is idle for postponed work below this saturation, and while nobody waits for it.
IDLE_PERMILLE_MAX: Final = 500
HANG_UP_MS: Final = 500
# Rules on streams are asked again after so many tokens.
STREAM_CHECK_TOKENS: Final = 64

_UNREADABLE: Final = Refuse(
    Reason.STATE_UNAVAILABLE, "state can not be read at present; try again", 2_000
)
_NOTHING_USED: Final = Usage(0, 0, 0, is_estimated=False)


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
        self._retries = RetryBudgets()
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
        intake.view = self._view
        pump.place = self._place_waiting
        pump.waited = self._waited
        pump.is_idle = self._is_idle
        loads.is_waiting = pump.is_waiting_for

    # ------------------------------------------------------------ before admission

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
            for name, model in sorted(self.fleet.catalog.models.items())
            if terms_for(bundle, principal.tenant, name, Scope.CHAT).is_allowed
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
            return _told(prepared)
        ticket, request = prepared.ticket, prepared.ticket.request
        now_ms = int(monotonic_ms())
        answer: dict[str, Any] = {
            "model": request.model,
            "priority": request.priority,
            "queue_class": ticket.queue_class,
            "completion_tokens_max": request.completion_tokens_max,
            "reserved_usd": ticket.reserved_micro_usd / 1e6,
            "warnings": list(ticket.warnings),
        }
        try:
            short = await self._books.take(ticket)
        except StateUnavailable:
            short = _UNREADABLE
        if short is not None:
            return answer | _told(short)
        self._books.give_back(ticket)
        if not request.is_begun and not self.loads.would_begin(request, now_ms):
            shed = Refuse(Reason.SHED_OVERLOAD, f"`{request.model}` is overloaded")
            return answer | _told(shed)
        decision, _ = self._decide(ticket, self.fleet.rows_for(request.model), now_ms)
        is_postponed = request.not_before_ms > 0 or request.waits_for_idle
        if is_postponed or self.pump.is_waiting_for(request.model):
            decision = Queue(Reason.DEFERRED if is_postponed else Reason.QUEUE_FULL)
        match decision:
            case Refuse():
                return answer | _told(decision)
            case Queue(reason):
                wait_ms = self.pump.queue.predicted_wait_ms(request, now_ms, ticket.queue_class)
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
        """Ask the pool's load: first steps only, and not of what is postponed, which waits for room."""
        request = ticket.request
        now_ms = int(monotonic_ms())
        if request.is_begun:
            self.loads.continues(request, now_ms)
            return None
        if request.not_before_ms or request.waits_for_idle:
            return None
        refuse = self.loads.may_begin(request, now_ms)
        if refuse is not None:
            self.pump.contended(request.model)
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
        request = ticket.request
        try:
            is_postponed = request.not_before_ms > 0 or request.waits_for_idle
            if is_postponed or self.pump.is_waiting_for(request.model):
                outcome: Placement | Queue | Refuse = Queue(Reason.NO_CAPACITY)
            else:
                outcome = self._decide_and_commit(ticket)
            if (
                isinstance(outcome, Queue)
                and not is_postponed
                and self.loads.is_below_part(request)
            ):
                # The seats are others' for the most part: this call may exceed the pace a little.
                ticket.request = request = replace(request, is_preferred=True)
                outcome = self._decide_and_commit(ticket)
            if isinstance(outcome, Queue):
                self._books.open(ticket, entry)
                queued_ms, decided = monotonic_ms(), ticket.decisions
                cached = max(self._cached(request).values(), default=0)
                outcome = await self.pump.wait(ticket, outcome.reason, cached)
                ticket.queue_ms = monotonic_ms() - queued_ms
                if isinstance(outcome, Refuse) and ticket.decisions == decided:
                    # The queue's word, not a decision on rows, which has been recorded already.
                    outcome = self._waited_in_vain(ticket, outcome)
            elif isinstance(outcome, Placement):
                ticket.charge = self.pump.queue.charge(
                    request, ticket.queue_class, outcome.cached_tokens
                )
                self.loads.waited(request, 0.0)
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
        self._set_check(ticket, 0)
        return ticket

    def _waited_in_vain(self, ticket: Ticket, refuse: Refuse) -> Refuse:
        """Record that the queue turned a call away. When no engine has its weights yet, that is why."""
        request, now_ms = ticket.request, int(monotonic_ms())
        cached = self._cached(request)
        if refuse.reason is Reason.QUEUE_FULL:
            rows = self.fleet.rows_for(request.model)
            objection = object_to(request, rows, cached, now_ms)
            if objection.reason is Reason.WARMING:
                refuse = Refuse(objection.reason, objection.detail, objection.retry_after_ms)
        self._record(ticket, cached, refuse, now_ms)
        return refuse

    def _place_waiting(self, ticket: Ticket) -> Placement | Queue | Refuse:
        """The pump's try for a call that has its place in the queue already."""
        if ticket.is_settled or ticket.is_holding_decode:
            msg = f"{ticket.id} was placed or ended while it waited"
            raise RuntimeError(msg)
        return self._decide_and_commit(ticket)

    def _decide_and_commit(self, ticket: Ticket) -> Placement | Queue | Refuse:
        """Decide on the rows as they are, and take what was decided, without a pause in between."""
        request = ticket.request
        started_ms = monotonic_ms()
        now_ms = int(started_ms)
        decision, cached = self._decide(ticket, self.fleet.rows_for(request.model), now_ms)
        if ticket.id in self.in_flight and isinstance(decision, Queue):
            return decision
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

    def _decide(
        self, ticket: Ticket, rows: tuple[EngineRow, ...], now_ms: int
    ) -> tuple[Decision, Mapping[int, int]]:
        """The rules of dispatch, then the pure decision; with the cached prompt tokens by row index."""
        request = ticket.request
        if ticket.policy.has_rules(Phase.DISPATCH):
            ruled = self._dispatched(ticket)
            if isinstance(ruled, Refuse):
                return ruled, {}
            request = ruled
        cached = self._cached(request)
        return decide(request, Snapshot(rows, cached), ticket.terms, now_ms), cached

    def _dispatched(self, ticket: Ticket) -> Request | Refuse:
        """What the rules of dispatch make of a call, with the pool as it is now."""
        view = self._view(ticket.request.model)
        live = ticket.live._replace(
            pool_queue_depth=view.queue_depth,
            pool_queue_wait_ms=view.queue_wait_ms,
            pool_saturation_permille=view.saturation_permille,
            pool_kv_used_permille=view.kv_used_permille,
            pool_breaker=view.breaker,
            pool_is_overloaded=view.is_overloaded,
        )
        ruling = ticket.policy.rule(Phase.DISPATCH, ticket.part, live)
        refuse = refusal(ruling, is_begun=ticket.request.is_begun)
        if refuse is not None:
            return refuse
        request = ticket.request
        if ruling.region_names is None and ruling.gpu_type_names is None:
            return request
        return replace(
            request,
            regions=request.regions & self.fleet.region_mask(ruling.region_names),
            gpu_types=request.gpu_types & self.fleet.gpu_mask(ruling.gpu_type_names),
        )

    def _record(
        self, ticket: Ticket, cached: Mapping[int, int], decision: Decision, now_ms: int
    ) -> None:
        self.decisions.record(ticket, cached, decision, now_ms=now_ms)
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
        """Place the call again after a failure before its first byte, elsewhere and within the budgets.

        The failed attempt has been reported by `attempted`. False: the failure stands.
        """
        del outcome, detail
        if ticket.attempt >= RETRIES_PER_REQUEST_MAX or self.is_draining:
            return False
        now_ms = monotonic_ms()
        request = ticket.request
        if now_ms >= request.deadline_ms:
            return False
        ticket.attempts_failed = (*ticket.attempts_failed, failed)
        rows = tuple(
            row for row in self.fleet.rows_for(request.model) if row not in ticket.attempts_failed
        )
        if not rows or not self._retries.try_spend(
            request.tenant,
            request.model,
            int(now_ms),
            is_pool_overloaded=self.loads.of(request.model).levels.is_overloaded,
        ):
            self._observer.retried(is_allowed=False)
            return False
        self._release(ticket)
        ticket.attempt += 1
        decision, cached = self._decide(ticket, rows, int(now_ms))
        self._record(ticket, cached, decision, int(now_ms))
        is_placed = isinstance(decision, Admit) and still_fits(
            request, decision.placement, int(now_ms)
        )
        self._observer.retried(is_allowed=is_placed)
        if isinstance(decision, Admit) and is_placed:
            self._commit(ticket, decision.placement, now_ms)
        return is_placed

    def may_return(self, ticket: Ticket) -> bool:
        """Whether a client whose call has failed may send it again: it spends from the same budgets."""
        request = ticket.request
        return self._retries.try_spend(
            request.tenant,
            request.model,
            int(monotonic_ms()),
            is_pool_overloaded=self.loads.of(request.model).levels.is_overloaded,
        )

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

    def may_continue(self, ticket: Ticket, completion_tokens: int) -> Refuse | None:
        """Whether a stream that has come so far may go on; None when it may, and then it is asked later."""
        policy = ticket.policy
        if policy.has_rules(Phase.STREAM):
            spent = ticket.model.cost_micro_usd(
                prompt=ticket.request.prompt_tokens, cached=0, completion=completion_tokens
            )
            live = ticket.live._replace(
                stream_completion_tokens=completion_tokens,
                stream_spent_micro_usd=spent,
                stream_age_ms=int(monotonic_ms() - ticket.call.received_ms),
            )
            refuse = refusal(policy.rule(Phase.STREAM, ticket.part, live), is_begun=True)
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
        self._set_check(ticket, completion_tokens)
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
        self._release(ticket)
        now_ms = monotonic_ms()
        request = ticket.request
        if not ticket.is_replayed:
            if state is RequestState.SUCCEEDED and not usage.is_estimated:
                self._estimates.learn(request, ticket.call, usage)
            self._load_settled(ticket, state, usage, now_ms)
        cost = self._cost(ticket, usage)
        charged = self._books.close(ticket, state, reason, usage, cost, ttft_ms, tpot_ms, e2e_ms)
        self._observer.settled(ticket, state, usage, charged)
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
        """A workflow has ended, by its tenant's word: what was promised to it is free."""
        self.loads.ended(workflow, int(monotonic_ms()))
        self.pump.offer()

    # ------------------------------------------------------------ upkeep

    def sweep(self, now_ms: float) -> None:
        """Several times a second: levels move, calls that waited too long are answered."""
        admission = self.policies.policy.bundle.admission
        self.loads.use_rules(admission)
        self.pump.queue.use_rules(
            admission.order,
            {name: each.weight for name, each in admission.queue_classes.items()},
        )
        for model, load in self.loads.all():
            oldest_ms = self.pump.queue.oldest_wait_ms(model, int(now_ms))
            if oldest_ms:
                load.levels.waited(oldest_ms, self._ttft_ms_max(model))
        self.loads.tick(int(now_ms))
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
        facts = self.fleet.pool(model)
        return PoolView(
            self.pump.queue.waiting_for(model),
            self.pump.wait_ms_of(model),
            facts.saturation_permille,
            facts.kv_used_permille,
            facts.breaker,
            self.loads.is_overloaded(model),
        )

    def _is_idle(self, model: ModelName) -> bool:
        return self.fleet.pool(
            model
        ).saturation_permille < IDLE_PERMILLE_MAX and not self.pump.is_waiting_for(model)

    def _waited(self, ticket: Ticket, wait_ms: float) -> None:
        if not ticket.request.not_before_ms and not ticket.request.waits_for_idle:
            self.loads.waited(ticket.request, wait_ms)

    def _ttft_ms_max(self, model: ModelName) -> int:
        """The tightest target of those that wait for `model`."""
        return min(
            (
                item.request.ttft_ms_max
                for item in self.pump.queue.items()
                if item.request.model == model
            ),
            default=1,
        )

    def _set_check(self, ticket: Ticket, completion_tokens: int) -> None:
        """When the relay asks again: before the money held is used up, or for the rules on streams."""
        held, most = ticket.tokens_held, ticket.request.completion_tokens_max
        check_at = held if held < most else 0
        if ticket.policy.has_rules(Phase.STREAM):
            soon = completion_tokens + STREAM_CHECK_TOKENS
            check_at = min(check_at, soon) if check_at else soon
        ticket.tokens_check_at = check_at

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
        self._release(ticket)
        self._load_settled(ticket, state, _NOTHING_USED, monotonic_ms())
        if ticket.id in self.in_flight:
            ticket.is_settled = True
            e2e_ms = monotonic_ms() - ticket.call.received_ms
            self._books.close(ticket, state, reason, _NOTHING_USED, 0, None, None, e2e_ms)
            self._observer.settled(ticket, state, _NOTHING_USED, 0)
            return
        self._books.give_back(ticket)
        self._books.unrate(ticket)

    def _load_settled(
        self, ticket: Ticket, state: RequestState, usage: Usage, now_ms: float
    ) -> None:
        """What a call that has ended teaches of its pool, and what of it stays promised."""
        request = ticket.request
        if ticket.charge is not None:
            uncached = max(0, usage.prompt_tokens - usage.cached_tokens)
            self.pump.queue.correct(
                ticket.charge, service_tokens(uncached, usage.completion_tokens)
            )
            ticket.charge = None
        if state is RequestState.SUCCEEDED:
            self.loads.learn(
                request, now_ms - ticket.decided_ms, ticket.placement.cached_tokens, usage
            )
            is_in_time = now_ms <= request.workflow_deadline_ms
            self.loads.step_ended(request, int(now_ms), is_in_time=is_in_time)
            return
        # Clients hang up when their own deadline comes, a moment before ours.
        is_late = now_ms >= request.workflow_deadline_ms - HANG_UP_MS
        if state is RequestState.EXPIRED or (state is RequestState.CANCELLED and is_late):
            self.loads.missed(request)
        if request.is_begun:
            self.loads.step_ended(request, int(now_ms), is_in_time=None)
        else:
            self.loads.dropped(request, int(now_ms))

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
        request = ticket.request
        self._retries.note_request(
            request.tenant, request.model, int(monotonic_ms()), ticket.call.client_retries
        )


def _told(refuse: Refuse) -> dict[str, Any]:
    return {
        "verdict": "refuse",
        "reason": refuse.reason,
        "detail": refuse.detail,
        "rule": refuse.rule or None,
        "retry_after_ms": refuse.retry_after_ms,
    }
