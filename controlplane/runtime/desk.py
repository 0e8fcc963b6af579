"""The desk: where calls meet load, queue and engines, decision by decision. No clock, no task, no money, no journal.

The gate (`admit.py`) works here in real time and `headway simulate` in virtual time; what is decided,
committed, given back and learned is the same code. Between a decision and its commit nothing else
happens, so what fitted when it was decided still fits when it is taken, and `fits` is asked again all
the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar

from controlplane.admission.decide import decide, home_until_ms, prepared
from controlplane.admission.fairness import Leeway, service_tokens
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.catalog import Role
from controlplane.domain.decision import Admit, Decision, Placement, Queue, Reason, Refuse
from controlplane.domain.fleet import EngineRow, fits
from controlplane.domain.ids import ModelName, RequestId, WorkflowId
from controlplane.domain.outcome import RequestState, Usage
from controlplane.domain.request import Request
from controlplane.reliability.deadlines import HANG_UP_MS
from controlplane.reliability.retry_budget import RETRIES_PER_REQUEST_MAX, RetryBudgets
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.rulings import PoolView
from controlplane.runtime.waiting_line import Outcome, WaitingLine, Waits
from controlplane.scheduler.axes.gpu_type import has_types, types_in_time
from controlplane.scheduler.batch import CALLS_MAX, Asked, Joint, place_jointly
from controlplane.scheduler.place import object_to, still_fits
from controlplane.scheduler.split import is_worth_splitting, other_prefill, without_prefill
from policies.documents import Admission
from policies.evaluate import Terms

# Calls, and free seats, from which on they are weighed together.
CALLS_MIN: Final = 2


class Job(Waits, Protocol):
    """One call on its way, from admission to its end. The desk writes what is not a property.

    `is_holding_prefill` and `is_holding_decode` say which credits are still taken; `decided_ms` is when
    the placement was, `home_until_ms` until when the call waits for its home. `decode_cached_tokens` of the
    prompt were thought to be on the engine that decodes before it was to get them. `left` is where a stream
    ran that has moved, while its seat there is still held.
    """

    placement: Placement
    decided_ms: float
    home_until_ms: float
    attempt: int
    attempts_failed: tuple[EngineRow, ...]
    is_holding_prefill: bool
    is_holding_decode: bool
    is_first_token_seen: bool
    decode_cached_tokens: int
    left: Placement | None

    @property
    def terms(self) -> Terms: ...


J = TypeVar("J", bound=Job)

# The rules of dispatch on a call: what they make of its request, or why it may not run.
Ruled = Callable[[J, float], Request | Refuse]
# Told of each decision that is not a repeated "wait": the call, cached tokens by row, the instant.
Recorded = Callable[[J, Mapping[int, int], Decision, float], None]


@dataclass(slots=True)
class JointSums:
    """What weighing waiting calls together came to: how often, how often it was better, by how much."""

    passes: int = 0
    better: int = 0
    gain_micro_usd: float = 0.0
    placed_more: int = 0

    def add(self, joint: Joint) -> None:
        self.passes += 1
        self.better += joint.is_joint
        self.gain_micro_usd += joint.gain_micro_usd
        self.placed_more += joint.placed_more


class Desk(Generic[J]):
    """Owned by one task. All instants are milliseconds of one monotonic clock."""

    def __init__(
        self, fleet: FleetState, loads: PoolLoads, line: WaitingLine[J], retries: RetryBudgets
    ) -> None:
        self.fleet = fleet
        self.loads = loads
        self.line = line
        self.retries = retries
        self.rule: Ruled[J] = _no_rules
        self.record: Recorded[J] = _deaf
        # A call was placed; and something was given back that a waiting call could use.
        self.committed: Callable[[J], None] = _deaf
        self.freed: Callable[[], None] = _deaf
        # Calls that have no home and wait are placed together where several seats are free.
        self.is_joint = True
        self.joint = JointSums()
        self._planned: dict[RequestId, Placement] = {}
        line.place = self.place
        line.before = self._plan_jointly
        line.waited = self._waited
        line.is_idle = self.is_idle
        loads.is_waiting = line.is_waiting_for

    # ------------------------------------------------------------ in

    def begin(self, job: J, now_ms: float) -> Refuse | None:
        """Ask the pool's load: first steps only, and not of what is postponed, which waits for room."""
        request = job.request
        if request.is_begun:
            self.loads.continues(request, int(now_ms))
            return None
        if _is_postponed(request):
            return None
        return self.loads.may_begin(request, int(now_ms))

    def ask(self, job: J, now_ms: float) -> Outcome:
        """Where a call that was let in runs, or that it must wait; who comes behind others does."""
        request = job.request
        is_postponed = _is_postponed(request)
        outcome: Outcome
        if is_postponed or self.line.is_waiting_for(request.model):
            outcome = Queue(Reason.NO_CAPACITY)
        else:
            outcome = self.place(job, now_ms)
        if isinstance(outcome, Queue) and not is_postponed and self.loads.may_exceed(request):
            job.request = request = replace(request, is_preferred=True)
            outcome = self.place(job, now_ms)
        if isinstance(outcome, Placement):
            job.charge = self.line.queue.charge(request, job.queue_class, outcome.cached_tokens)
            self.loads.waited(request, 0.0)
        return outcome

    def enter(self, job: J, now_ms: float) -> Refuse | list[tuple[J, Refuse]]:
        """Let a call wait: why it can not, or who had to leave for it."""
        cached = max(self.cached(job.request).values(), default=0)
        return self.line.enter(job, cached, now_ms)

    # ------------------------------------------------------------ decisions

    def place(self, job: J, now_ms: float) -> Outcome:
        """Decide on the rows as they are, and take what was decided, without a pause in between."""
        if job.is_holding_decode:
            msg = f"{job.id} is placed while it still holds an engine"
            raise RuntimeError(msg)
        request = job.request
        is_waiting = job.id in self.line.queue
        planned = self._planned.pop(job.id, None) if self._planned else None
        if planned is not None and still_fits(request, planned, int(now_ms)):
            self.record(job, self.cached(request), Admit(planned), now_ms)
            self._commit(job, planned, now_ms)
            return planned
        rows = self._rows_left(job)
        if is_waiting and not self._has_seat(job, rows, now_ms):
            return Queue(Reason.QUEUE_FULL)
        # What is decided on is what is recorded; who waits is asked anew, on the types that there are then.
        job.request = self._on_one_engine(self._on_types_in_time(request, rows, now_ms))
        decision, cached = self.decide(job, rows, now_ms)
        if isinstance(decision, Queue):
            job.home_until_ms = home_until_ms(request, Snapshot(rows, cached))
        if not (isinstance(decision, Queue) and is_waiting):
            self.record(job, cached, decision, now_ms)
        if not isinstance(decision, Admit):
            job.request = request
            return decision
        request = job.request
        placement = decision.placement
        if not still_fits(request, placement, int(now_ms)):
            return Queue(Reason.NO_CAPACITY)
        self._commit(job, placement, now_ms)
        return placement

    def _plan_jointly(self, now_ms: float) -> None:
        """Before waiting calls are asked in order: where those without a home go, if several seats are free.

        Only a plan: a call that goes before may take a seat of it, and then the call is placed alone.
        """
        self._planned.clear()
        if not self.is_joint or len(self.line) < CALLS_MIN:
            return
        for model in self.line.models():
            if self.line.queue.waiting_for(model) < CALLS_MIN:
                continue
            rows = self.fleet.rows_for(model)
            if _seats_free(rows) < CALLS_MIN:
                continue
            asked = []
            for item in self.line.queue.soonest(model, CALLS_MAX):
                request = self._ready(item.ticket, now_ms)
                if request is not None:
                    request = self._on_one_engine(self._on_types_in_time(request, rows, now_ms))
                    asked.append(Asked(request, self.cached(request)))
            if len(asked) < CALLS_MIN:
                continue
            joint = place_jointly(asked, rows, int(now_ms))
            self.joint.add(joint)
            for each, outcome in zip(asked, joint.outcomes, strict=True):
                if isinstance(outcome, Placement):
                    self._planned[each.request.id] = outcome

    def _ready(self, job: J, now_ms: float) -> Request | None:
        """The call as it may be placed anywhere now; None when it may not: it has a home, an engine has failed it,
        or something speaks against it.
        """
        if job.request.home is not None or job.attempts_failed:
            return None
        ruled = self.rule(job, now_ms)
        if isinstance(ruled, Refuse):
            return None
        ready = prepared(ruled, job.terms, int(now_ms))
        return None if isinstance(ready, Refuse) else ready

    def _on_types_in_time(
        self, request: Request, rows: tuple[EngineRow, ...], now_ms: float
    ) -> Request:
        """The call, of a workflow that begins, on GPU types on which it can end in time."""
        if request.workflow is None or request.home is not None or not has_types(rows):
            return request
        size = self.loads.of(request.model).size(request, now_ms)
        tolerance = 0.0 if size is None else size.tolerance
        allowed = types_in_time(request, rows, int(now_ms), tolerance)
        return request if allowed == request.gpu_types else replace(request, gpu_types=allowed)

    def _on_one_engine(self, request: Request) -> Request:
        """The call, kept on one engine where its prompt is short, or mostly there, beside a hand-over."""
        decodes = self.fleet.decodes_of_pairs(request.model)
        if request.is_single_engine or not decodes:
            return request
        if is_worth_splitting(request, decodes, self.cached(request)):
            return request
        return replace(request, is_single_engine=True)

    def _has_seat(self, job: J, rows: tuple[EngineRow, ...], now_ms: float) -> bool:
        """Whether any engine that a waiting call could go to has a seat: cheap, for most of the time none has.

        The rules of dispatch are asked once there is one.
        """
        request = job.request
        instant_ms, preferred = int(now_ms), request.is_preferred
        if request.home is not None and now_ms < job.home_until_ms:
            home = self.fleet.row_of(request.home)
            if home is not None and home.is_accepting and not home.is_suspect:
                return fits(home, 0, instant_ms, preferred)
        return any(
            row.role is not Role.PREFILL and fits(row, 0, instant_ms, preferred) for row in rows
        )

    def decide(
        self, job: J, rows: tuple[EngineRow, ...], now_ms: float
    ) -> tuple[Decision, Mapping[int, int]]:
        """The rules of dispatch, then the pure decision; with the cached prompt tokens by row index."""
        request = self.rule(job, now_ms)
        if isinstance(request, Refuse):
            return request, {}
        request = self._on_one_engine(request)
        cached = self.cached(request)
        return decide(request, Snapshot(rows, cached), job.terms, int(now_ms)), cached

    def turned_away(self, job: J, refuse: Refuse, now_ms: float) -> Refuse:
        """The queue turned a call away, which is recorded. When no engine has its weights yet, that is why."""
        request = job.request
        cached = self.cached(request)
        if refuse.reason is Reason.QUEUE_FULL:
            rows = self.fleet.rows_for(request.model)
            objection = object_to(request, rows, cached, int(now_ms))
            if objection.reason is Reason.WARMING:
                refuse = Refuse(objection.reason, objection.detail, objection.retry_after_ms)
        self.record(job, cached, refuse, now_ms)
        return refuse

    def cached(self, request: Request) -> dict[int, int]:
        """Prompt tokens that each engine is thought to hold, by row index."""
        if not request.prefix:
            return {}
        return self.fleet.prefixes.cached(
            request.prefix, request.prefix_tokens, request.prompt_tokens - 1
        )

    # ------------------------------------------------------------ while it runs

    def first_token(self, job: J, ttft_ms: float, now_ms: float) -> None:
        """The engine's first token, `ttft_ms` after the placement was decided. Once for each placement."""
        if job.is_first_token_seen:
            return
        job.is_first_token_seen = True
        placement = job.placement
        self.fleet.prefilled(job.request, placement)
        self.fleet.first_token(
            placement.prefill or placement.decode,
            placement.ttft_ms_predicted,
            ttft_ms,
            now_ms,
            request=job.request,
            cached_tokens=placement.cached_tokens,
        )

    def retry(self, job: J, failed: EngineRow, now_ms: float) -> bool | None:
        """Place a call again after a failure before its first byte, elsewhere and within the budgets.

        None: it may not be tried again, whatever the budgets. False: they, or the engines, do not allow it.
        """
        request = job.request
        if job.attempt >= RETRIES_PER_REQUEST_MAX or now_ms >= request.deadline_ms:
            return None
        job.attempts_failed = (*job.attempts_failed, failed)
        rows = self._rows_left(job)
        if not rows or not self.try_retry(request, now_ms):
            return False
        self.release(job)
        job.attempt += 1
        decision, cached = self.decide(job, rows, now_ms)
        self.record(job, cached, decision, now_ms)
        if not isinstance(decision, Admit):
            return False
        if not still_fits(request, decision.placement, int(now_ms)):
            return False
        self._commit(job, decision.placement, now_ms)
        return True

    def unheld(self, job: J, row: EngineRow) -> None:
        """A leg failed: unless it came as far as a token, its prompt is not believed to be on the engine."""
        if not job.is_first_token_seen:
            is_prefill = row is job.placement.prefill
            kept = job.placement.cached_tokens if is_prefill else job.decode_cached_tokens
            self.fleet.unheld(row, job.request, kept)

    def prefill_failed(
        self, job: J, failed: EngineRow, now_ms: float, *, is_retried: bool = True
    ) -> bool:
        """The first leg of a pair failed: the prompt goes to another prefill engine, else to who decodes.

        True: another one, whose credits are taken, and a retry spent. The decode engine stays what it is.
        Without `is_retried` no other one is asked.
        """
        request, before = job.request, job.placement
        job.attempts_failed = (*job.attempts_failed, failed)
        # What was to arrive there did not.
        self.fleet.unheld(before.decode, request, job.decode_cached_tokens)
        cached = self.cached(request)
        after = None
        may_retry = job.attempt < RETRIES_PER_REQUEST_MAX and now_ms < request.deadline_ms
        if is_retried and may_retry:
            rows = self._rows_left(job)
            after = other_prefill(request, before, rows, cached, int(now_ms))
            if after is not None and not self.try_retry(request, now_ms):
                after = None
        is_elsewhere = after is not None
        if after is None:
            after = without_prefill(before, job.decode_cached_tokens)
        self.fleet.prefill_moved(request, before, after)
        job.placement = after
        self._route(request, after)
        if is_elsewhere:
            job.attempt += 1
            job.is_holding_prefill = True
        self.committed(job)
        return is_elsewhere

    def prefill_kept(self, job: J, holder: EngineRow) -> bool:
        """Whether who decodes now can fetch what `holder` computed for an earlier attempt; then it will."""
        before = job.placement
        if not holder.is_accepting or not holder.pair_key:
            return False
        if holder.pair_key != before.decode.pair_key:
            return False
        self.release_prefill(job)
        after = without_prefill(before, job.decode_cached_tokens)
        self.fleet.prefill_moved(job.request, before, after)
        job.placement = after
        self.committed(job)
        return True

    def elsewhere(self, job: J, left: EngineRow, now_ms: float, *, is_free: bool) -> Outcome | None:
        """Where a stream can go on; nothing is committed (see `move`), and it keeps what it holds.

        `left` is the engine that it leaves. Who is not `is_free` spends a retry of the budgets. None: it
        may not be moved.
        """
        request = job.request
        if now_ms >= request.deadline_ms:
            return None
        if left not in job.attempts_failed:
            job.attempts_failed = (*job.attempts_failed, left)
        rows = self._rows_left(job)
        if not rows or not (is_free or self.try_retry(request, now_ms)):
            return None
        # One engine for both, at once: its client has been reading already. Its home, if that was it, is lost.
        home = None if request.home == left.engine_id else request.home
        job.request = request = replace(
            request, is_single_engine=True, is_preferred=True, home=home
        )
        decision, cached = self.decide(job, rows, now_ms)
        self.record(job, cached, decision, now_ms)
        if not isinstance(decision, Admit):
            return decision
        if not still_fits(request, decision.placement, int(now_ms)):
            return Queue(Reason.NO_CAPACITY)
        return decision.placement

    def move(
        self, job: J, placement: Placement, now_ms: float, *, keeps_left: bool = False
    ) -> None:
        """Give back what a stream holds, and take what `elsewhere` has just found for it.

        With `keeps_left` the seat that it leaves stays held until `let_go`: nobody ends an engine while a seat
        of it is held, and KV may still be fetched from it.
        """
        left = job.placement
        if keeps_left:
            self.let_go(job)
            self.release_prefill(job)
            job.left, job.is_holding_decode = left, False
        else:
            self.release(job)
        job.attempt += 1
        self._commit(job, placement, now_ms)

    def let_go(self, job: J) -> None:
        """Give back the seat on the engine that a stream has left, if it still holds one."""
        left, job.left = job.left, None
        if left is not None:
            self.fleet.release_decode(left)
            self.freed()

    def goes_on(self, job: J) -> None:
        """The engine that a stream was moved to has begun to answer: the prompt is computed."""
        self.let_go(job)
        if not job.is_first_token_seen:
            job.is_first_token_seen = True
            self.fleet.prefilled(job.request, job.placement)

    def leave_out(self, job: J, feature: str) -> None:
        """Keep the call from the engines of its model that lack `feature`, as from those that have failed it."""
        lacking = tuple(
            row
            for row in self.fleet.rows_for(job.request.model)
            if feature in row.lacks and row not in job.attempts_failed
        )
        if lacking:
            job.attempts_failed = (*job.attempts_failed, *lacking)

    def _rows_left(self, job: J) -> tuple[EngineRow, ...]:
        """Engines of the call's model that have not failed it, by name: an engine's row may be another one since."""
        rows = self.fleet.rows_for(job.request.model)
        if not job.attempts_failed:
            return rows
        failed = {row.engine_id for row in job.attempts_failed}
        return tuple(row for row in rows if row.engine_id not in failed)

    def try_retry(self, request: Request, now_ms: float) -> bool:
        """Spend a retry of the tenant's and the pool's budgets; also for a client that is to come again."""
        return self.retries.try_spend(
            request.tenant,
            request.model,
            int(now_ms),
            is_pool_overloaded=self.loads.of(request.model).levels.is_overloaded,
        )

    # ------------------------------------------------------------ out

    def release(self, job: J) -> None:
        """Give back whatever credits the call still holds."""
        self.let_go(job)
        if not job.is_holding_decode:
            return
        job.is_holding_decode = False
        if not job.is_first_token_seen:
            self.fleet.prefilled(job.request, job.placement)
        self.fleet.release_decode(job.placement)
        self.release_prefill(job)
        self.freed()

    def release_prefill(self, job: J) -> None:
        """The prefill leg has ended, and with it its credits."""
        if job.is_holding_prefill:
            job.is_holding_prefill = False
            self.fleet.release_prefill(job.request, job.placement)
            self.freed()

    def ended(
        self,
        job: J,
        state: RequestState,
        usage: Usage,
        tpot_ms: float | None,
        now_ms: float,
        *,
        is_moved: bool = False,
    ) -> None:
        """What a call that has ended teaches of its pool, and what of it stays promised. Once.

        One that `is_moved` was answered by several engines, and teaches nothing of the last one's pace.
        """
        request = job.request
        if job.charge is not None:
            uncached = max(0, usage.prompt_tokens - usage.cached_tokens)
            self.line.queue.correct(job.charge, service_tokens(uncached, usage.completion_tokens))
            job.charge = None
        if state is RequestState.SUCCEEDED:
            placement = job.placement
            if not usage.is_estimated:
                self.fleet.prefixes.measure(request.prefix, usage.prompt_tokens)
            if usage.is_estimated or is_moved:
                self.fleet.served(placement, request.id, 0, 0, None)
            else:
                self.fleet.served(
                    placement,
                    request.id,
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    usage.cached_tokens,
                )
                self.fleet.reused(
                    placement,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=usage.completion_tokens,
                )
            if not is_moved:
                self.loads.learn(
                    request,
                    placement.decode,
                    now_ms - job.decided_ms,
                    placement.cached_tokens,
                    usage,
                )
            if not is_moved and tpot_ms is not None and usage.completion_tokens > 1:
                decode_ms = placement.e2e_ms_predicted - placement.ttft_ms_predicted
                expected = max(1, request.completion_tokens_expected - 1)
                self.fleet.paced(placement.decode, decode_ms / expected, tpot_ms)
            is_in_time = now_ms <= request.workflow_deadline_ms
            self.loads.step_ended(request, int(now_ms), is_in_time=is_in_time)
            return
        self.fleet.prefixes.unserved(request.id)
        is_late = now_ms >= request.workflow_deadline_ms - HANG_UP_MS
        if state is RequestState.EXPIRED or (state is RequestState.CANCELLED and is_late):
            self.loads.missed(request)
        if request.is_begun:
            self.loads.step_ended(request, int(now_ms), is_in_time=None)
        else:
            self.loads.dropped(request, int(now_ms))

    def workflow_ended(self, workflow: WorkflowId, now_ms: float) -> None:
        """A workflow has ended, by its tenant's word: what was promised to it is free."""
        self.loads.ended(workflow, int(now_ms))
        self.fleet.workflow_ended(workflow)
        self.freed()

    # ------------------------------------------------------------ time

    def use_rules(self, admission: Admission) -> None:
        self.loads.use_rules(admission)
        self.line.queue.use_rules(
            admission.order,
            {name: each.weight for name, each in admission.queue_classes.items()},
            Leeway(lead_calls=admission.fairness_lead_calls),
        )

    def tick(self, now_ms: float) -> None:
        """Let time pass for the pools' loads. Several times a second."""
        for model, load in self.loads.all():
            oldest_ms = self.line.queue.oldest_wait_ms(model, int(now_ms))
            if oldest_ms:
                load.levels.waited(oldest_ms, self._ttft_ms_max(model))
        self.loads.tick(int(now_ms))

    # ------------------------------------------------------------ what it can tell

    def view(self, model: ModelName, now_ms: float) -> PoolView:
        """What rules may read of a pool."""
        facts = self.fleet.pool(model, now_ms)
        return PoolView(
            self.line.queue.waiting_for(model),
            self.line.wait_ms_of(model, now_ms),
            facts.saturation_permille,
            facts.kv_used_permille,
            facts.breaker,
            self.loads.is_overloaded(model),
        )

    def is_idle(self, model: ModelName, now_ms: float) -> bool:
        """Whether a model has capacity to spare for work that can wait."""
        return self.loads.is_idle(model, now_ms)

    # ------------------------------------------------------------ inside

    def _commit(self, job: J, placement: Placement, now_ms: float) -> None:
        request = job.request
        self.fleet.take(request, placement, now_ms)
        job.decode_cached_tokens = placement.cached_tokens
        if placement.prefill is not None:
            job.decode_cached_tokens = self.cached(request).get(placement.decode.index, 0)
        job.is_holding_prefill = placement.prefill is not None
        self._route(request, placement)
        job.is_holding_decode = True
        job.placement = placement
        job.is_first_token_seen = False
        job.decided_ms = now_ms
        self.fleet.began(placement, now_ms)
        self.committed(job)

    def _route(self, request: Request, placement: Placement) -> None:
        """Both engines of a placement will hold the prompt."""
        for row in (placement.decode, placement.prefill):
            if row is not None:
                self.fleet.prefixes.routed(
                    row.index,
                    request.prefix,
                    request.prompt_tokens,
                    request.prefix_tokens,
                    request.id,
                )

    def _waited(self, job: J, wait_ms: float) -> None:
        if not _is_postponed(job.request):
            self.loads.waited(job.request, wait_ms)

    def _ttft_ms_max(self, model: ModelName) -> int:
        """The tightest target of those that wait for `model`."""
        return min(
            (
                item.request.ttft_ms_max
                for item in self.line.queue.items()
                if item.request.model == model
            ),
            default=1,
        )


def _seats_free(rows: tuple[EngineRow, ...]) -> int:
    """Seats that calls could take at once, on engines that decode."""
    return sum(
        max(0, min(row.seats_lent, row.seats_bound) - row.seats_taken)
        for row in rows
        if row.role is not Role.PREFILL and row.is_accepting and not row.is_suspect
    )


def _is_postponed(request: Request) -> bool:
    return request.not_before_ms > 0 or request.waits_for_idle


def _no_rules(job: J, _: float) -> Request | Refuse:
    return job.request


def _deaf(*_: object) -> None: ...
