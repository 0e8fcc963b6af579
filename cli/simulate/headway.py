"""Headway in the simulated world: the live desk, queue, loads, fleet view and decision core, fed as live ones are.

What agents send comes as the same messages; what the intake would make of a call is made here from the
plan's numbers. Not simulated: money, rules and HTTP.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import xxhash

from cli.simulate.ablate import (
    ADMISSION_PARTS,
    AXES,
    EXTERNALITY,
    HOME,
    JOINT,
    is_compiled,
    taken_away,
)
from cli.simulate.contracts import MS_PER_S, Call, Condition, EngineView, Fate, Floor, Plan
from cli.simulate.engine import Context
from controlplane.admission.queue import QUEUE_CLASS, Charge
from controlplane.domain.catalog import Catalog, Limits, Node
from controlplane.domain.decision import Decision, Placement, Queue, Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import (
    EngineId,
    ModelName,
    NodeId,
    RegionName,
    RequestId,
    TenantId,
    WorkflowId,
)
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.domain.request import UNLIMITED_MICRO_USD, Request
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime.desk import Desk
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.waiting_line import WaitingLine
from controlplane.scheduler.prefix_index import GRID, PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.wire.outcomes import OUTCOMES, Retry
from dataplane.protocol.messages import (
    Beat,
    CreditGrant,
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Hello,
    KvTransfer,
    Telemetry,
)
from policies.documents import Admission
from policies.evaluate import Terms
from policies.load import Bundle, load_bundle

# The world's clock begins at 0, which the fleet takes for "never"; its own begins here.
EPOCH_MS: Final = 1_000_000
AGENT_EPOCH: Final = 1
AGENT_INTERVAL_MS: Final = 1_000
CREDIT_TTL_MS: Final = 10_000
# The live defaults (`controlplane/settings.py`).
QUEUE_CALLS_MAX: Final = 1_024
QUEUE_BYTES_MAX: Final = 256 * 1024 * 1024
QUEUE_WAIT_MS_MAX: Final = 30_000
TICKS_KEPT: Final = 1_024
# A call without a deadline is given this long, and a finished workflow loses its worth in so many seconds
# of lateness.
DEADLINE_MS: Final = 600_000
LATE_S: Final = 50
BYTES_PER_TOKEN: Final = 4
# What clients ask for at most, when they need less.
COMPLETION_TOKENS_MAX: Final = 4_096
_BOUNDARIES: Final = tuple(boundary // BYTES_PER_TOKEN for boundary in GRID)
# Odd, so that products of 64 bits stay distinct (2^64 over the golden ratio).
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_NOTHING_USED: Final = Usage(0, 0, 0, is_estimated=False)
_STATES: Final = {
    Condition.STARTING: EngineState.STARTING,
    Condition.SERVING: EngineState.SERVING,
    Condition.CORDONED: EngineState.SERVING,
    Condition.DRAINING: EngineState.DRAINING,
    Condition.OFF: EngineState.STOPPED,
}


@cache
def shipped_bundle() -> Bundle:
    """The policies that ship."""
    return load_bundle(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadwayOptions:
    """`admission` None: the bundle's. `is_homing` False: later steps go wherever it is cheapest. `is_joint`
    False: calls that wait are placed one after the other. `axes_off`: see `ablate.py`.
    """

    name: str = "headway"
    bundle: Bundle = field(default_factory=shipped_bundle)
    admission: Admission | None = None
    is_homing: bool = True
    is_joint: bool = True
    axes_off: frozenset[str] = frozenset()


class SimulatedJob:
    """One try of a call, as the desk wants it."""

    __slots__ = (
        "attempt", "attempts_failed", "call", "charge", "decided_ms", "decode_cached_tokens",
        "home_until_ms", "id", "idle_until_ms",
        "is_first_token_seen", "is_holding_decode", "is_holding_prefill", "left", "placement", "prompt_bytes",
        "queue_class", "request", "rule", "terms",
    )  # fmt: skip

    placement: Placement

    def __init__(self, call: Call, request: Request, terms: Terms) -> None:
        self.id = request.id
        self.call = call
        self.request = request
        self.terms = terms
        self.prompt_bytes = request.prompt_tokens * BYTES_PER_TOKEN
        self.queue_class = QUEUE_CLASS
        self.idle_until_ms = 0
        self.rule = ""
        self.charge: Charge | None = None
        self.decided_ms = 0.0
        self.home_until_ms = 0.0
        self.attempt = 0
        self.attempts_failed: tuple[EngineRow, ...] = ()
        self.is_holding_prefill = False
        self.is_holding_decode = False
        self.is_first_token_seen = False
        self.decode_cached_tokens = 0
        self.left: Placement | None = None

    @property
    def n(self) -> int:
        return 1


class Contexts:
    """Chained digests of workflows' prompts on the position grid, as the gateway would find them."""

    def __init__(self) -> None:
        self._by_workflow: dict[int, dict[Context, list[int]]] = {}

    def prefix(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Digests, shallowest first, and the prompt tokens up to each; as far as they are reusable they are
        those of the step before, else of the shared prefix.
        """
        plan, chain, step = call.plan, call.chain, call.step
        contexts = self._by_workflow.setdefault(plan.number, {})
        digests: list[int] = []
        if call.place:
            digests = contexts.get(chain.key, digests)[: _count(step.reusable_tokens)]
        elif chain.prefix:
            digests.extend(_digests(f"shared {chain.prefix}", 0, _count(chain.prefix_tokens)))
        count = _count(step.prompt_tokens)
        digests.extend(_digests(f"{plan.number} {call.step_number}", len(digests), count))
        contexts[chain.key] = digests
        return tuple(digests), _BOUNDARIES[: len(digests)]

    def forget(self, plan: Plan) -> None:
        self._by_workflow.pop(plan.number, None)


def _digests(what: str, begin: int, end: int) -> Iterator[int]:
    """Digests of 64 bits for the boundaries `begin` to `end`, as even as those of real prompts."""
    seed = xxhash.xxh3_64_intdigest(what.encode())
    for depth in range(begin, end):
        mixed = (seed + depth * _GOLDEN) & _MASK
        mixed = (mixed ^ mixed >> 31) * _GOLDEN & _MASK
        yield mixed ^ mixed >> 29


def _count(tokens: int) -> int:
    """Boundaries of the grid within so many tokens."""
    low, high = 0, len(_BOUNDARIES)
    while low < high:
        middle = (low + high) // 2
        if _BOUNDARIES[middle] <= tokens:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class _Sign:
    """What an agent says once a second while its engines are in these conditions."""

    conditions: tuple[Condition, ...]
    beat: Beat
    grant: CreditGrant


def _sign_of(node: NodeId, conditions: tuple[Condition, ...], views: Sequence[EngineView]) -> _Sign:
    on = [view for view in views if view.condition is not Condition.OFF]
    states = {view.spec.name: _STATES[view.condition] for view in on}
    holds = {view.spec.name: (view.spec.seats, view.kv_tokens_capacity) for view in on}
    return _Sign(
        conditions,
        Beat(node_id=node, agent_epoch=AGENT_EPOCH, engine_states=states),
        CreditGrant(node_id=node, agent_epoch=AGENT_EPOCH, ttl_ms=CREDIT_TTL_MS, holds=holds),
    )


class Headway:
    """Implements `Strategy` with the code that decides in a live replica."""

    floor: Floor

    def __init__(self, options: HeadwayOptions | None = None) -> None:
        self._options = options or HeadwayOptions()
        self.admission = self._options.admission or self._options.bundle.admission
        self._now_ms = float(EPOCH_MS)
        self.fleet = FleetState(PrefixIndex(), TickLog(TICKS_KEPT), wall_ms=lambda: self._now_ms)
        self.loads = PoolLoads(self.fleet, self.admission)
        self.line: WaitingLine[SimulatedJob] = WaitingLine(
            calls_max=QUEUE_CALLS_MAX, bytes_max=QUEUE_BYTES_MAX, wait_ms_max=QUEUE_WAIT_MS_MAX
        )
        desk = AblatedDesk if self._options.axes_off else Desk[SimulatedJob]
        self.desk: Desk[SimulatedJob] = desk(self.fleet, self.loads, self.line, RetryBudgets())
        if isinstance(self.desk, AblatedDesk):
            self.desk.parts = self._options.axes_off
        self.desk.freed = self._freed
        self.desk.is_joint = self._options.is_joint
        self._is_freed = False
        self._estimates = Estimates()
        self._spent: Counter[int] = Counter()
        # Calls that were let in and have not ended, by workflow; and those that ended workflows left.
        self._calls: Counter[int] = Counter()
        self._calls_left = 0
        self._contexts = Contexts()
        self._terms: dict[tuple[float, int, str], Terms] = {}
        self._engine_of: dict[str, int] = {}
        self._nodes: dict[NodeId, list[int]] = {}
        self._agents_ms = 0.0
        self._signs: dict[NodeId, _Sign] = {}
        self._told: dict[int, tuple[int, int, int]] = {}
        # What agents said last of each engine, while the fleet has not heard it, and when they did.
        self._reported: list[tuple[int, int, int]] = []
        self._reported_ms = 0.0

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def waiting(self) -> int:
        return len(self.line)

    def gauges(self) -> Mapping[str, float]:
        rows = [entry.row for entry in self.fleet.entries()]
        return {
            "seats_taken": float(sum(row.seats_taken for row in rows)),
            "kv_tokens_taken": float(sum(row.kv_tokens_taken for row in rows)),
            "prefill_tokens_pending": float(sum(row.prefill_tokens_pending for row in rows)),
            "workflow_calls": float(self._calls_left + self._calls.total()),
        }

    # ------------------------------------------------------------ the fleet, as agents tell it

    def begin(self, floor: Floor) -> None:
        self.floor = floor
        self._read_clock()
        for view in floor.engines:
            spec = view.spec
            self._engine_of[spec.name] = view.index
            self._nodes.setdefault(NodeId(spec.node or spec.name), []).append(view.index)
        self._declare()
        for node in self._nodes:
            self._hello(node)
        self._agents()
        self.desk.use_rules(self.admission)
        self.desk.tick(self._now_ms)

    def _read_clock(self) -> None:
        self._hear()
        self._now_ms = self.floor.now_ms + EPOCH_MS

    def _declare(self) -> None:
        specs = [view.spec for view in self.floor.engines]
        nodes = {}
        for name, indexes in self._nodes.items():
            first = specs[indexes[0]]
            views = [self.floor.engines[index] for index in indexes]
            nodes[name] = Node(
                id=name,
                region=RegionName(first.region),
                gpu_type=first.gpu.name,
                gpus=sum(view.spec.gpus for view in views),
                address="simulated",
                is_cordoned=any(view.condition is Condition.CORDONED for view in views),
            )
        self.fleet.use_catalog(
            Catalog(
                revision=1,
                regions=tuple(dict.fromkeys(RegionName(spec.region) for spec in specs)),
                gpu_types={spec.gpu.name: spec.gpu for spec in specs},
                models={spec.model.name: spec.model for spec in specs},
                slo_classes={},
                nodes=nodes,
            )
        )

    def _hello(self, node: NodeId) -> None:
        engines = [
            EngineFacts(
                engine_id=view.spec.name,
                model=view.spec.model.name,
                role=view.spec.role,
                port=0,
                kind="simulated",
                state=_STATES[view.condition],
                gpus=view.spec.gpus,
                seats=view.spec.seats,
                kv_tokens=view.kv_tokens_capacity,
                block_tokens=16,
                context_tokens_max=view.spec.model.context_tokens_max,
                transfer=KvTransfer(connector="nixl"),
                # Engines that are there when the world begins have served for long.
                started_ms=int(EPOCH_MS + view.began_ms) if view.life else 0,
            )
            for view in (self.floor.engines[index] for index in self._nodes[node])
            if view.condition is not Condition.OFF
        ]
        message = Hello(node_id=node, agent_epoch=AGENT_EPOCH, version="", engines=engines)
        self.fleet.hello(message, self._now_ms)

    def _agents(self) -> None:
        """Signs of life and credits, once a second."""
        self._agents_ms = self._now_ms
        for node, indexes in self._nodes.items():
            conditions = tuple(self.floor.engines[index].condition for index in indexes)
            sign = self._signs.get(node)
            if sign is None or sign.conditions != conditions:
                views = [self.floor.engines[index] for index in indexes]
                sign = self._signs[node] = _sign_of(node, conditions, views)
            self.fleet.beat(sign.beat, self._now_ms)
            self.fleet.granted(self._lent(sign.grant), self._now_ms)

    def _lent(self, offer: CreditGrant) -> CreditGrant:
        """What an agent lends of what there is: everything, to one replica."""
        return offer

    def _contended(self, model: ModelName) -> None:
        """A call found no free credit. There is nobody else who could have it."""

    def engine_changed(self, engine: int) -> None:
        self._read_clock()
        spec = self.floor.engines[engine].spec
        self._declare()
        self._hello(NodeId(spec.node or spec.name))
        self._agents()
        self._pass()

    def refreshed(self) -> None:
        """Keep what agents say until the fleet is next read: of reports that nobody reads only the last counts."""
        self._reported_ms = self.floor.now_ms + EPOCH_MS
        self._reported = [
            (view.running, view.waiting, view.kv_tokens_used) for view in self.floor.engines
        ]

    def _hear(self) -> None:
        """Tell the fleet what agents said last, as of when they said it."""
        reported, self._reported = self._reported, []
        if not reported:
            return
        engines, told = self.floor.engines, self._told
        for node, indexes in self._nodes.items():
            reports = []
            for index in indexes:
                gauges = reported[index]
                # An agent repeats itself; the fleet does nothing with what it knows.
                if told.get(index) != gauges:
                    told[index] = gauges
                    running, waiting, kv_tokens_used = gauges
                    view = engines[index]
                    reports.append(
                        EngineTelemetry(
                            engine_id=view.spec.name,
                            running=running,
                            waiting=waiting,
                            kv_used_ratio=kv_tokens_used / view.kv_tokens_capacity,
                        )
                    )
            if reports:
                message = Telemetry(node_id=node, agent_epoch=AGENT_EPOCH, engines=reports)
                self.fleet.telemetry(message, self._reported_ms)

    def tick(self, now_ms: float) -> None:
        self._hear()
        self._now_ms = now_ms + EPOCH_MS
        if self._now_ms - self._agents_ms >= AGENT_INTERVAL_MS:
            self._agents()
        self.fleet.look_again(self._now_ms)
        self.desk.use_rules(self.admission)
        self.desk.tick(self._now_ms)
        for job, refuse in self.line.expire(self._now_ms):
            self._refuse(job, self.desk.turned_away(job, refuse, self._now_ms))
        self._pass()

    # ------------------------------------------------------------ calls

    def arrived(self, call: Call) -> None:
        self._read_clock()
        request = self._request(call)
        job = SimulatedJob(call, request, self._terms_of(call.plan))
        call.own = job
        now_ms = self._now_ms
        self.desk.retries.note_request(request.tenant, request.model, int(now_ms), call.tries)
        refuse = self.desk.begin(job, now_ms)
        if refuse is not None:
            # Load refuses before anything is held; nothing was promised that could be given back.
            self._contended(request.model)
            self._answer(job, refuse)
            return
        self._calls[call.plan.number] += 1
        outcome = self.desk.ask(job, now_ms)
        match outcome:
            case Placement():
                self._send(job)
            case Refuse():
                self._refuse(job, outcome)
            case Queue():
                entered = self.desk.enter(job, now_ms)
                if isinstance(entered, Refuse):
                    self._refuse(job, self.desk.turned_away(job, entered, now_ms))
                else:
                    for evicted, why in entered:
                        self._refuse(evicted, self.desk.turned_away(evicted, why, now_ms))
                    if outcome.reason in (Reason.QUEUE_FULL, Reason.NO_CAPACITY):
                        self._contended(request.model)
                self._is_freed = True
        self._pass_if_freed()

    def prefilled(self, call: Call) -> None:
        self._read_clock()
        job: SimulatedJob = call.own
        self._prefill_ended(job, AttemptOutcome.OK)
        self._pass_if_freed()

    def first_token(self, call: Call) -> None:
        self._read_clock()
        job: SimulatedJob = call.own
        self.desk.first_token(job, self._now_ms - job.decided_ms, self._now_ms)

    def ended(self, call: Call) -> None:
        self._read_clock()
        job: SimulatedJob = call.own
        completion_tokens = call.step.completion_tokens
        usage = Usage(call.prompt_tokens, call.cached_tokens, completion_tokens, is_estimated=False)
        tpot_ms = None
        if completion_tokens > 1:
            tpot_ms = (call.ended_ms - call.first_token_ms) / (completion_tokens - 1)
        row = job.placement.decode
        self.fleet.attempted(row, AttemptOutcome.OK, self._now_ms, began_ms=job.decided_ms)
        self.desk.release(job)
        self._estimates.learn(job.request, job, usage)
        spec = self.floor.engines[call.engine].spec
        self._spent[call.plan.number] += spec.model.cost_micro_usd(
            prompt=usage.prompt_tokens, cached=usage.cached_tokens, completion=completion_tokens
        )
        self._closed(job, RequestState.SUCCEEDED, usage, tpot_ms)
        self._pass()

    def failed(self, call: Call) -> None:
        self._read_clock()
        job: SimulatedJob = call.own
        row = job.placement.decode
        if job.is_holding_prefill:
            # The relay does without its first leg: the other engine computes the prompt.
            self._prefill_ended(job, AttemptOutcome.CONNECT_ERROR)
            engine = self._engine_of[row.engine_id]
            if self.floor.can_take(call, engine):
                self.floor.send(call, engine)
                self._pass_if_freed()
                return
        self.fleet.attempted(
            row, AttemptOutcome.CONNECT_ERROR, self._now_ms, began_ms=job.decided_ms
        )
        if self.desk.retry(job, row, self._now_ms):
            self._send(job)
        else:
            self.desk.release(job)
            self._closed(job, RequestState.FAILED, _NOTHING_USED, None)
            may_return = self.desk.try_retry(job.request, self._now_ms)
            self.floor.refuse(call, None, is_final=not may_return)
        self._pass_if_freed()

    def expired(self, call: Call) -> None:
        self._read_clock()
        job: SimulatedJob = call.own
        if job.is_holding_prefill:
            self._prefill_ended(job, AttemptOutcome.CANCELLED)
        elif job.is_holding_decode:
            row = job.placement.decode
            self.fleet.attempted(
                row, AttemptOutcome.CANCELLED, self._now_ms, began_ms=job.decided_ms
            )
        else:
            self.line.remove(job)
        self.desk.release(job)
        self._closed(job, RequestState.CANCELLED, _NOTHING_USED, None)
        self._pass_if_freed()

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        self._read_clock()
        self._contexts.forget(plan)
        self._spent.pop(plan.number, None)
        self._calls_left += self._calls.pop(plan.number, 0)
        tenant, model = TenantId(plan.tenant), self._model_of(plan)
        if fate in (Fate.SUCCEEDED, Fate.BAD):
            self._estimates.learn_steps(tenant, plan.scope, model, plan.calls)
        self.desk.workflow_ended(WorkflowId(f"w{plan.number}"), self._now_ms)
        self._pass_if_freed()

    # ------------------------------------------------------------ inside

    def _closed(
        self, job: SimulatedJob, state: RequestState, usage: Usage, tpot_ms: float | None
    ) -> None:
        self._calls[job.call.plan.number] -= 1
        self.desk.ended(job, state, usage, tpot_ms, self._now_ms)

    def _freed(self) -> None:
        self._is_freed = True

    def _pass_if_freed(self) -> None:
        if self._is_freed:
            self._pass()

    def _pass(self) -> None:
        """Offer seats to those that wait, as the pump does when its turn comes."""
        self._is_freed = False
        may_be_more = len(self.line) > 0
        while may_be_more:
            left, may_be_more = self.line.offer(self._now_ms)
            for job, outcome in left:
                if isinstance(outcome, Refuse):
                    self._refuse(job, outcome)
                else:
                    self._send(job)

    def _send(self, job: SimulatedJob) -> None:
        placement = job.placement
        prefill = placement.prefill
        self.floor.send(
            job.call,
            self._engine_of[placement.decode.engine_id],
            prefill=None if prefill is None else self._engine_of[prefill.engine_id],
        )

    def _prefill_ended(self, job: SimulatedJob, outcome: AttemptOutcome) -> None:
        """The first leg of a pair is over, and its credits are free."""
        prefill = job.placement.prefill
        if prefill is not None:
            self.fleet.attempted(prefill, outcome, self._now_ms, began_ms=job.decided_ms)
            self.desk.release_prefill(job)

    def _refuse(self, job: SimulatedJob, refuse: Refuse) -> None:
        """End a call that was let in and never ran."""
        self.desk.release(job)
        self._closed(job, RequestState.REFUSED, _NOTHING_USED, None)
        self._answer(job, refuse)

    def _answer(self, job: SimulatedJob, refuse: Refuse) -> None:
        outcome = OUTCOMES[refuse.reason]
        is_final = refuse.is_final or outcome.retry is Retry.NEVER
        wait_ms = refuse.retry_after_ms if outcome.retry is Retry.LATER else None
        self.floor.refuse(job.call, wait_ms, is_final=is_final)

    def _model_of(self, plan: Plan) -> ModelName:
        return ModelName(plan.model or self.floor.engines[0].spec.model.name)

    def _terms_of(self, plan: Plan) -> Terms:
        key = (plan.weight, plan.priority, plan.scope)
        terms = self._terms.get(key)
        if terms is None:
            limits = self._options.bundle.scopes.scopes[plan.scope]
            terms = self._terms[key] = Terms(
                is_allowed=True,
                denied_by="",
                region_names=None,
                gpu_type_names=None,
                weight=plan.weight,
                completion_tokens_default=COMPLETION_TOKENS_MAX,
                completion_tokens_max=COMPLETION_TOKENS_MAX,
                fan_out_max=limits.fan_out_max,
                steps_max=limits.steps_max,
                step_gap_ms=limits.step_gap_ms,
                reserve_ratio=1.0,
                slo_class=None,
                may_disaggregate=True,
                priority=plan.priority,
                over_budget_cuts=True,
                limits=Limits(),
                cache_ttl_s=0,
                cache_price_ratio=1.0,
            )
        return terms

    def _request(self, call: Call) -> Request:
        """What the intake would make of the call."""
        plan, step_number = call.plan, call.step_number
        now_ms = int(self._now_ms)
        model = self._model_of(plan)
        tenant = TenantId(plan.tenant)
        terms = self._terms_of(plan)
        completion_max = max(COMPLETION_TOKENS_MAX, call.step.completion_tokens)
        steps_left = self._estimates.steps_remaining(tenant, plan.scope, model, step_number)
        steps_expected = (
            call.steps_expected if steps_left is None else step_number + round(steps_left)
        )
        deadline_ms = now_ms + DEADLINE_MS
        if plan.deadline_s is not None:
            deadline_ms = int(call.deadline_ms) + EPOCH_MS
        digests, boundaries = self._contexts.prefix(call)
        value = int(plan.value_usd * 1e6)
        return Request(
            id=RequestId(f"{call.id}-{call.tries}"),
            tenant=tenant,
            model=model,
            arrival_ms=now_ms,
            prompt_tokens=call.prompt_tokens,
            completion_tokens_max=completion_max,
            completion_tokens_expected=self._estimates.completion_tokens(
                tenant, model, completion_max, None, plan.scope
            ),
            completion_tokens_high=self._estimates.completion_tokens_high(
                tenant, model, completion_max, plan.scope
            ),
            prefix=digests,
            prefix_tokens=boundaries,
            regions=self.fleet.region_mask(None),
            gpu_types=self.fleet.gpu_mask(None),
            weight=plan.weight,
            ttft_ms_max=int(plan.ttft_s_max * MS_PER_S),
            tpot_ms_max=max(1, int(plan.tpot_s_max * MS_PER_S)),
            deadline_ms=deadline_ms,
            value_micro_usd=value,
            late_micro_usd_per_s=value // LATE_S,
            scope=plan.scope,
            workflow=WorkflowId(f"w{plan.number}"),
            step=step_number,
            steps_expected=max(step_number + 1, steps_expected),
            workflow_deadline_ms=deadline_ms,
            workflow_spent_micro_usd=self._spent[plan.number],
            workflow_remaining_micro_usd=UNLIMITED_MICRO_USD,
            calls_in_flight=self._calls[plan.number],
            fan_out_max=terms.fan_out_max,
            step_gap_ms=terms.step_gap_ms if step_number + 1 < steps_expected else 0,
            home=self._home(call, model),
            is_single_engine=False,
            priority=plan.priority,
            is_begun=step_number > 0,
            not_before_ms=0,
            waits_for_idle=False,
            is_preferred=False,
        )

    def _home(self, call: Call, model: ModelName) -> EngineId | None:
        if call.workflow_home < 0 or not self._options.is_homing:
            return None
        row = self.fleet.row_of(self.floor.engines[call.workflow_home].spec.name)
        return (
            row.engine_id if row is not None and row.is_accepting and row.model == model else None
        )


# ------------------------------------------------------------ variants


class AblatedDesk(Desk[SimulatedJob]):
    """A desk that decides without some axes of placement."""

    parts: frozenset[str] = frozenset()

    def decide(
        self, job: SimulatedJob, rows: tuple[EngineRow, ...], now_ms: float
    ) -> tuple[Decision, Mapping[int, int]]:
        with taken_away(self.parts):
            return super().decide(job, rows, now_ms)


def without(part: str, options: HeadwayOptions | None = None) -> HeadwayOptions:
    """Headway with one of `ablate.PARTS` taken away. Raises KeyError for an unknown part, RuntimeError for
    one that can not be taken from a compiled decision core.
    """
    known = options or HeadwayOptions()
    named = replace(known, name=f"{known.name}-no-{part}")
    if part == HOME:
        return replace(named, is_homing=False)
    if part == JOINT:
        return replace(named, is_joint=False)
    if part in ADMISSION_PARTS:
        admission = known.admission or known.bundle.admission
        changed = admission.model_copy(update=dict(ADMISSION_PARTS[part]))
        return replace(named, admission=changed)
    if part != EXTERNALITY and part not in AXES:
        raise KeyError(part)
    if is_compiled():
        msg = f"`{part}` can not be taken away: the decision core is compiled; set HEADWAY_PURE=1"
        raise RuntimeError(msg)
    return replace(named, axes_off=known.axes_off | {part})
