"""The world in virtual time: workflows come, a strategy sends their calls to engines, clients wait, retry and hang up.

One heap of events, one thread, no clock: the same plans, fleet, strategy and options give the same log
of events, byte for byte.
"""

import hashlib
import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import xxhash

from cli.simulate.contracts import (
    MICRO_USD_PER_USD,
    MS_PER_S,
    Call,
    Chain,
    ClientRules,
    Condition,
    Cordon,
    EngineDeath,
    EngineView,
    Fate,
    FleetSpec,
    Plan,
    Progress,
    Quantiles,
    Result,
    SlowEngine,
    Strategy,
    Tally,
    Waste,
    WorldOptions,
    all_steps,
)
from cli.simulate.engine import Engine, Running
from controlplane.domain.catalog import Role
from controlplane.scheduler.perf_model import TRANSFER_PER_KV_READ

MS_PER_HOUR: Final = 3_600_000.0
MS_PER_MINUTE: Final = 60_000.0
# What is thought of a class before any of its workflows has ended.
COMPLETION_TOKENS_FIRST: Final = 256
STEPS_FIRST: Final = 4
# How much one more call or workflow counts for what is known of its class, at the least.
LEARNING_GAIN: Final = 0.01
# A completion token weighs this many prompt tokens in a tenant's service, as in admission's fairness.
COMPLETION_SERVICE: Final = 2
BACKOFF_JITTER_RATIO: Final = 0.25
PROGRESS_EVENTS: Final = 4_096
_WASTE_OF: Final = {
    Fate.BAD: Waste.BAD,
    Fate.LATE: Waste.LATE,
    Fate.REFUSED: Waste.RETRIES,
    Fate.REFUSED_LATER: Waste.REFUSED_LATER_STEP,
    Fate.FAILED: Waste.RETRIES,
}


def play(
    plans: Sequence[Plan],
    fleet: FleetSpec,
    strategy: Strategy,
    options: WorldOptions,
    progress: Progress | None = None,
) -> Result:
    """Play plans, sorted by arrival, on a fleet. Raises ValueError for a plan that no engine can hold."""
    return World(plans, fleet, strategy, options).run(progress)


@dataclass(slots=True, eq=False)
class Flow:
    """One workflow on its way: its calls that were asked for and have not ended, and what it has cost.

    `asked` counts its calls so far, `chains` its contexts; `home` is where a call of it ended last.
    """

    plan: Plan
    deadline_ms: float
    is_measured: bool
    calls: dict[str, Call] = field(default_factory=dict)
    asked: int = 0
    chains: int = 1
    home: int = -1
    gpu_usd: float = 0.0
    lost_usd: float = 0.0
    preempted_usd: float = 0.0
    fate: Fate | None = None


@dataclass(slots=True, eq=False)
class Served:
    """One engine's life: its process, whether it may get calls, and for how long it was paid."""

    engine: Engine
    view: EngineView
    usd_per_ms: float
    is_up: bool
    on_since_ms: float | None
    is_cordoned: bool = False
    is_stopping: bool = False
    scheduled: int = -1
    life: int = 0
    busy_ms_before: float = 0.0
    on: list[tuple[float, float]] = field(default_factory=list)
    cold: list[tuple[float, float]] = field(default_factory=list)

    @property
    def condition(self) -> Condition:
        if self.on_since_ms is None:
            return Condition.OFF
        if not self.is_up:
            return Condition.STARTING
        if self.is_stopping:
            return Condition.DRAINING
        return Condition.CORDONED if self.is_cordoned else Condition.SERVING

    def busy_ms_at(self, now_ms: float) -> float:
        return self.busy_ms_before + self.engine.busy_ms_at(now_ms)


@dataclass(slots=True, eq=False)
class Pair:
    """A call on two engines. `first` is its part on the one that computes the prompt; `to` is the other one's
    process when the call was sent there. `is_held`: the KV is computed, and has still to move.
    """

    call: Call
    prefill: Served
    decode: Served
    to: Engine
    priority: float
    first: Running
    is_computed: bool = False
    is_held: bool = False


class _Mean:
    """A mean that follows: of few values their own, of many mostly the latest."""

    __slots__ = ("count", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(LEARNING_GAIN, 1.0 / self.count) * (value - self.value)


class World:
    """Implements `Floor`. Runs once."""

    def __init__(
        self, plans: Sequence[Plan], fleet: FleetSpec, strategy: Strategy, options: WorldOptions
    ) -> None:
        self.now_ms = 0.0
        self.random = Random(f"strategy {options.seed}")  # noqa: S311  # a simulation
        self._plans = sorted(plans, key=lambda plan: (plan.arrival_s, plan.number))
        self._fleet = fleet
        self._strategy = strategy
        self._options = options
        self._client: ClientRules = options.client
        self._from_ms = options.warm_up_s * MS_PER_S
        self._until_ms = (options.horizon_s - options.cool_down_s) * MS_PER_S
        self._served = [
            Served(
                Engine(spec),
                EngineView(index, spec),
                spec.micro_usd_per_hour / MICRO_USD_PER_USD / MS_PER_HOUR,
                is_up=spec.is_on,
                on_since_ms=0.0 if spec.is_on else None,
            )
            for index, spec in enumerate(fleet.engines)
        ]
        self.engines: Sequence[EngineView] = tuple(served.view for served in self._served)
        self._is_live = options.telemetry_age_s <= 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._next_plan = 0
        self._flows: dict[int, Flow] = {}
        self._measured_left = 0
        self._completions: dict[str, _Mean] = {}
        self._steps: dict[str, _Mean] = {}
        self._wall_s = 0.0
        self._decisions = 0
        self._log: list[str] = []
        self._digest = hashlib.sha256()
        self._book = _Book()
        self._busy_from: list[float] = [0.0] * len(self._served)
        self._busy_until: list[float] = [0.0] * len(self._served)
        self._starts = 0
        self._pairs: dict[str, Pair] = {}
        self._pair_calls = 0

    # ------------------------------------------------------------ the run

    def run(self, progress: Progress | None = None) -> Result:
        self._check()
        began_s = time.perf_counter()
        self._prepare()
        events = 0
        heap = self._heap
        horizon_ms = max(1.0, self._options.horizon_s * MS_PER_S)
        while heap:
            self.now_ms, _, act, arguments = heapq.heappop(heap)
            act(*arguments)
            events += 1
            if progress is not None and events % PROGRESS_EVENTS == 0:
                progress(min(1.0, self.now_ms / horizon_ms))
        return self._result(time.perf_counter() - began_s)

    def _check(self) -> None:
        largest: dict[str, int] = {}
        for served in self._served:
            if served.engine.spec.role is Role.PREFILL:
                continue
            name = str(served.engine.spec.model.name)
            largest[name] = max(largest.get(name, 0), served.engine.capacity)
        anywhere = max(largest.values(), default=0)
        for plan in self._plans:
            room = largest.get(plan.model, 0) if plan.model else anywhere
            needed = max(
                step.prompt_tokens + step.completion_tokens for step in all_steps(plan.steps)
            )
            if needed > room:
                msg = f"workflow {plan.number} has a context of {needed} tokens and no engine holds it"
                raise ValueError(msg)

    def _prepare(self) -> None:
        options = self._options
        for fault in options.faults:
            at_ms = fault.at_s * MS_PER_S
            match fault:
                case EngineDeath(engine=engine):
                    self._at(at_ms, self._die, engine)
                case SlowEngine(engine=engine, until_s=until_s, factor=factor):
                    self._at(at_ms, self._slow_down, engine, factor)
                    self._at(until_s * MS_PER_S, self._slow_down, engine, 1.0)
                case Cordon(engine=engine, until_s=until_s):
                    self._at(at_ms, self._cordon, engine, is_cordoned=True)
                    self._at(until_s * MS_PER_S, self._cordon, engine, is_cordoned=False)
        self._at(self._from_ms, self._measure, self._busy_from)
        self._at(self._until_ms, self._measure, self._busy_until)
        self._tell(self._strategy.begin, self)
        self._refresh()
        if self._plans:
            self._at(self._plans[0].arrival_s * MS_PER_S, self._arrive)
        self._at(options.tick_ms, self._tick)

    def _at(self, when_ms: float, act: Callable[..., None], *arguments: Any, **named: Any) -> None:
        if named:
            arguments = (*arguments, *named.values())
        self._sequence += 1
        heapq.heappush(self._heap, (when_ms, self._sequence, act, arguments))

    def _tell(self, hear: Callable[..., None], *arguments: Any) -> None:
        """Let the strategy hear of something, and take its time."""
        began_s = time.perf_counter()
        hear(*arguments)
        self._wall_s += time.perf_counter() - began_s

    def _note(self, event: str, call_id: str, engine: int) -> None:
        line = f"{self.now_ms:.6f} {event} {call_id} {engine}\n"
        self._digest.update(line.encode())
        if self._options.has_log:
            self._log.append(line)

    @property
    def _is_busy(self) -> bool:
        return self._next_plan < len(self._plans) or bool(self._flows)

    def _tick(self) -> None:
        self._tell(self._strategy.tick, self.now_ms)
        if self._is_live:
            self._tell(self._strategy.refreshed)
        if self._is_busy:
            self._at(self.now_ms + self._options.tick_ms, self._tick)

    def _refresh(self) -> None:
        """Read the engines' gauges, as agents do at an interval."""
        for served in self._served:
            # One that is off was looked at when it went off.
            if served.on_since_ms is not None:
                self._look(served)
        self._tell(self._strategy.refreshed)
        if not self._is_live and (self._is_busy or self.now_ms == 0.0):
            self._at(self.now_ms + self._options.telemetry_age_s * MS_PER_S, self._refresh)

    def _look(self, served: Served) -> None:
        engine, view = served.engine, served.view
        view.running = engine.running
        view.waiting = engine.waiting
        view.kv_tokens_used = engine.kv_used_at(self.now_ms)
        view.prefill_tokens_waiting = engine.prefill_tokens_waiting

    def _measure(self, busy_ms: list[float]) -> None:
        for index, served in enumerate(self._served):
            busy_ms[index] = served.busy_ms_at(self.now_ms)

    # ------------------------------------------------------------ what a strategy does

    def can_take(self, call: Call, engine: int) -> bool:
        served = self._served[engine]
        spec = served.engine.spec
        if (
            served.view.condition is not Condition.SERVING
            or (call.plan.model and call.plan.model != spec.model.name)
            or spec.role is Role.PREFILL
        ):
            return False
        step = call.step
        return step.prompt_tokens + step.completion_tokens <= served.engine.capacity

    def can_prefill(self, call: Call, engine: int) -> bool:
        served = self._served[engine]
        spec = served.engine.spec
        return (
            spec.role is Role.PREFILL
            and served.view.condition is Condition.SERVING
            and (not call.plan.model or call.plan.model == spec.model.name)
            and call.prompt_tokens <= served.engine.capacity
        )

    def cached_tokens(self, call: Call, engine: int) -> int:
        return self._served[engine].engine.match(call)

    def prefill_ms(self, call: Call, engine: int) -> float:
        rates = self._served[engine].engine.spec.rates
        prompt = call.prompt_tokens
        new = prompt - self.cached_tokens(call, engine)
        pairs = new * (prompt - 0.5 * new)
        return (
            rates.prefill_base_ms
            + new * rates.prefill_ms_per_token
            + pairs * rates.prefill_ms_per_token_sq
        )

    def send(
        self, call: Call, engine: int, priority: float = 0.0, prefill: int | None = None
    ) -> None:
        if not call.is_waiting:
            msg = f"{call.id} is sent though it does not wait"
            raise ValueError(msg)
        if not self.can_take(call, engine):
            msg = f"{call.id} is sent to engine {engine}, which can not take it"
            raise ValueError(msg)
        served = self._served[engine]
        first = None if prefill is None else self._first_of_pair(call, engine, prefill)
        call.is_waiting = False
        call.engine = engine
        call.prefill = -1
        call.sent_ms = self.now_ms
        served.view.in_flight += 1
        self._decisions += 1
        self._note("send", call.id, engine)
        if first is not None:
            self._begin_pair(call, first, served, priority)
            return
        served.engine.add(call, priority, self.now_ms)
        self._schedule(served)

    def refuse(self, call: Call, retry_after_ms: float | None, *, is_final: bool = False) -> None:
        if not call.is_waiting:
            msg = f"{call.id} is refused though it does not wait"
            raise ValueError(msg)
        call.is_waiting = False
        self._decisions += 1
        flow = self._flows[call.plan.number]
        client = self._client
        self._note("refuse", call.id, -1)
        if flow.is_measured:
            self._book.refusals += 1
        if is_final or call.tries >= client.retries_max:
            if flow.is_measured:
                self._book.refusals_final += 1
                self._book.refusals_final_later += call.step_number > 0
            fate = Fate.REFUSED_LATER if call.step_number else Fate.REFUSED
            flow.calls.pop(call.id, None)
            # Told when the strategy has returned: it is in the middle of refusing.
            self._at(self.now_ms, self._end_if_live, flow, fate)
            return
        call.tries += 1
        call.is_between_tries = True
        if (
            retry_after_ms is not None
            and 0.0 < retry_after_ms <= client.retry_after_s_max * MS_PER_S
        ):
            wait_ms = retry_after_ms
        else:
            wait_ms = (
                min(client.backoff_s_max, client.backoff_s * 2.0 ** (call.tries - 1)) * MS_PER_S
            )
            chance = xxhash.xxh3_64_intdigest(
                f"{self._options.seed} {call.id} {call.tries}".encode()
            )
            wait_ms *= 1.0 - BACKOFF_JITTER_RATIO * (chance % 4_096) / 4_096
        self._at(self.now_ms + wait_ms, self._ask_again, flow, call)

    def start(self, engine: int) -> None:
        served = self._served[engine]
        if served.on_since_ms is not None:
            if served.is_stopping:
                served.is_stopping = False
                self._changed(served)
            return
        served.on_since_ms = self.now_ms
        served.is_stopping = False
        self._starts += 1
        self._load(served)

    def stop(self, engine: int) -> None:
        served = self._served[engine]
        if served.on_since_ms is None or served.is_stopping:
            return
        served.is_stopping = True
        self._changed(served)
        self._turn_off(served)

    # ------------------------------------------------------------ pairs

    def _first_of_pair(self, call: Call, engine: int, prefill: int) -> Served:
        """Raises ValueError when the two can not share the call."""
        served = self._served[prefill]
        if not self.can_prefill(call, prefill):
            msg = f"{call.id} is sent to engine {prefill}, which can not compute its prompt"
            raise ValueError(msg)
        if served.engine.spec.region != self._served[engine].engine.spec.region:
            msg = f"{call.id} is sent to engines {prefill} and {engine}, in two regions"
            raise ValueError(msg)
        return served

    def _begin_pair(self, call: Call, prefill: Served, decode: Served, priority: float) -> None:
        call.prefill = prefill.view.index
        prefill.view.in_flight += 1
        self._note("prefill", call.id, call.prefill)
        first = prefill.engine.add(call, priority, self.now_ms, is_prefill=True)
        self._pairs[call.id] = Pair(call, prefill, decode, decode.engine, priority, first)
        self._schedule(prefill)

    def _computed(self, prefill: Served, running: Running) -> None:
        """The prompt is computed: the other engine is asked to go on."""
        call = running.call
        pair = self._pairs[call.id]
        pair.is_computed = pair.is_held = True
        prefill.view.in_flight -= 1
        self._note("prefilled", call.id, call.prefill)
        self._tell(self._strategy.prefilled, call)
        decode = pair.decode
        if decode.engine is not pair.to:
            # It is another process than the call was sent to, or none.
            self._break_up(pair)
            decode.view.in_flight -= 1
            self._lose(call)
            self._turn_off(decode)
            return
        cached_tokens = max(0, running.cached_tokens)
        decode.engine.receive(call, pair.priority, cached_tokens, self.now_ms)
        self._schedule(decode)

    def _transfer_ms(self, pair: Pair, tokens: int) -> float:
        """KV of so many tokens over the network, by the performance model; the slower end sets the pace."""
        slowest = max(
            pair.prefill.engine.spec.rates.decode_ms_per_kv_token,
            pair.decode.engine.spec.rates.decode_ms_per_kv_token,
        )
        return tokens * slowest * TRANSFER_PER_KV_READ

    def _moved(self, decode: Served, engine: Engine, running: Running) -> None:
        """The prompt's KV has come over."""
        if decode.engine is not engine or running.is_gone:
            return
        call = running.call
        self._note("moved", call.id, call.engine)
        self._end_holding(self._pairs[call.id])
        engine.fetched(running, self.now_ms)
        self._schedule(decode)

    def _end_holding(self, pair: Pair) -> None:
        """The prefill engine need not keep the KV any longer."""
        if pair.is_held:
            pair.is_held = False
            prefill = pair.prefill
            prefill.engine.hand_over(pair.call, self.now_ms)
            self._schedule(prefill)
            self._turn_off(prefill)

    def _leave_prefill(self, call: Call, flow: Flow) -> None:
        """The client hung up: what there is of its call on a prefill engine ends, and is paid."""
        pair = self._pairs.pop(call.id, None)
        if pair is None:
            return
        prefill = pair.prefill
        if not pair.is_computed:
            prefill.engine.cancel(call, self.now_ms)
            prefill.view.in_flight -= 1
            self._schedule(prefill)
        self._pay(flow, prefill, pair.first)
        self._end_holding(pair)
        self._turn_off(prefill)

    def _break_up(self, pair: Pair) -> None:
        """The call has lost one of its engines, and with it what the prefill engine did for it."""
        call = pair.call
        del self._pairs[call.id]
        flow = self._flows[call.plan.number]
        flow.lost_usd += pair.first.gpu_ms * pair.prefill.usd_per_ms
        self._end_holding(pair)

    def _lose_first(self, pair: Pair) -> None:
        """The prefill engine died before the KV had moved."""
        call, decode = pair.call, pair.decode
        is_asked, pair.is_held = pair.is_computed, False
        self._break_up(pair)
        if is_asked:
            decode.engine.cancel(call, self.now_ms)
            self._schedule(decode)
        decode.view.in_flight -= 1
        self._lose(call)
        self._turn_off(decode)

    # ------------------------------------------------------------ engines

    def _schedule(self, served: Served) -> None:
        engine = served.engine
        for running in engine.take_fetching():
            pair = self._pairs[running.call.id]
            moved_ms = self.now_ms + self._transfer_ms(pair, running.fetched_tokens)
            self._at(moved_ms, self._moved, served, engine, running)
        if engine.segment is not None and engine.version != served.scheduled:
            served.scheduled = engine.version
            self._at(engine.ends_ms, self._advance, served, engine, engine.version)
        if self._is_live:
            self._look(served)

    def _advance(self, served: Served, engine: Engine, version: int) -> None:
        if served.engine is not engine or engine.version != version:
            return
        happened = engine.advance()
        for running in happened.first:
            call = running.call
            call.first_token_ms = self.now_ms
            self._note("first", call.id, call.engine)
            self._tell(self._strategy.first_token, call)
        for running in happened.filled:
            self._computed(served, running)
        for running in happened.ended:
            self._end_call(served, running)
        if served.engine is engine:
            self._schedule(served)
        self._turn_off(served)

    def _end_call(self, served: Served, running: Running) -> None:
        call = running.call
        plan = call.plan
        flow = self._flows[plan.number]
        served.view.in_flight -= 1
        call.ended_ms = self.now_ms
        call.gpu_ms = running.gpu_ms
        call.cached_tokens = max(0, running.cached_tokens)
        self._pay(flow, served, running)
        pair = self._pairs.pop(call.id, None)
        if pair is not None:
            self._pair_calls += 1
            call.gpu_ms += pair.first.gpu_ms
            self._pay(flow, pair.prefill, pair.first)
        flow.home = call.chain.home = call.engine
        del flow.calls[call.id]
        self._note("end", call.id, call.engine)
        self._book.calls_all += 1
        self._mean(self._completions, plan.workflow_class, COMPLETION_TOKENS_FIRST).add(
            call.step.completion_tokens
        )
        if flow.is_measured:
            self._book.step(call, running, self.now_ms)
        if self._from_ms <= self.now_ms < self._until_ms:
            computed = call.prompt_tokens - max(0, running.cached_tokens)
            service = computed + COMPLETION_SERVICE * call.step.completion_tokens
            self._book.service[plan.tenant] += service
        self._tell(self._strategy.ended, call)
        if call.step.branches:
            self._branch_out(flow, call)
        else:
            self._go_on(flow, call.chain)

    def _branch_out(self, flow: Flow, call: Call) -> None:
        """Begin what the step hands to others; the chain goes on when all of it has ended."""
        chain = call.chain
        chain.open = len(call.step.branches)
        for branch in call.step.branches:
            own = Chain(flow.plan, flow.chains, branch)
            own.parent = chain
            flow.chains += 1
            self._at(self.now_ms, self._ask, flow, own)

    def _go_on(self, flow: Flow, chain: Chain) -> None:
        """The chain's step has ended, and so have its branches: on to what comes next, if anything does."""
        if chain.place + 1 < len(chain.steps):
            gap_ms = chain.steps[chain.place].gap_s * MS_PER_S
            chain.place += 1
            self._at(self.now_ms + gap_ms, self._ask, flow, chain)
        elif chain.parent is not None:
            chain.parent.open -= 1
            if not chain.parent.open:
                self._go_on(flow, chain.parent)
        else:
            is_late = self.now_ms > flow.deadline_ms
            good = Fate.SUCCEEDED if flow.plan.is_good else Fate.BAD
            self._end(flow, Fate.LATE if is_late else good)

    def _pay(self, flow: Flow, served: Served, running: Running) -> None:
        flow.gpu_usd += running.gpu_ms * served.usd_per_ms
        flow.preempted_usd += running.preempted_ms * served.usd_per_ms

    def _load(self, served: Served) -> None:
        """The engine loads its weights; it is a new process from now on."""
        served.life += 1
        served.busy_ms_before += served.engine.busy_ms
        slowness_ratio = served.engine.slowness_ratio
        self._book.preemptions += served.engine.preemptions
        served.engine = Engine(served.engine.spec)
        served.engine.slowness_ratio = slowness_ratio
        served.scheduled = -1
        served.is_up = False
        ready_ms = self.now_ms + served.engine.spec.cold_start_s * MS_PER_S
        served.cold.append((self.now_ms, ready_ms))
        self._changed(served)
        self._at(ready_ms, self._loaded, served, served.life)

    def _loaded(self, served: Served, life: int) -> None:
        if served.life == life and served.on_since_ms is not None:
            served.is_up = True
            served.view.began_ms = self.now_ms
            self._changed(served)

    def _changed(self, served: Served) -> None:
        served.view.condition = served.condition
        served.view.life = served.life
        self._look(served)
        self._note(served.view.condition, "-", served.view.index)
        self._tell(self._strategy.engine_changed, served.view.index)

    def _turn_off(self, served: Served) -> None:
        engine = served.engine
        if (
            not served.is_stopping
            or served.view.in_flight
            or engine.segment is not None
            or engine.is_holding
        ):
            return
        began_ms = served.on_since_ms
        if began_ms is None:
            return
        served.on.append((began_ms, self.now_ms))
        served.on_since_ms = None
        served.is_stopping = served.is_up = False
        served.engine.forget()
        if served.cold and served.cold[-1][1] > self.now_ms:
            served.cold[-1] = (served.cold[-1][0], self.now_ms)
        self._changed(served)

    def _die(self, index: int) -> None:
        served = self._served[index]
        if served.on_since_ms is None or not served.is_up:
            return
        self._note("dies", "-", index)
        lost = served.engine.die(self.now_ms)
        # Of prompts that are held for others the strategy has heard; they are no longer in flight.
        served.view.in_flight -= sum(not served.engine.is_held(running) for running in lost)
        self._load(served)
        for running in lost:
            call = running.call
            pair = self._pairs.get(call.id)
            if pair is not None:
                if pair.first is running:
                    self._lose_first(pair)
                    continue
                self._break_up(pair)
            flow = self._flows[call.plan.number]
            flow.lost_usd += running.gpu_ms * served.usd_per_ms
            self._lose(call)

    def _lose(self, call: Call) -> None:
        """An engine that the call needed is gone: it waits again."""
        call.engine = call.prefill = -1
        call.first_token_ms = 0.0
        call.is_waiting = True
        self._tell(self._strategy.failed, call)

    def _slow_down(self, index: int, factor: float) -> None:
        served = self._served[index]
        served.engine.slow_down(factor, self.now_ms)
        self._schedule(served)

    def _cordon(self, index: int, is_cordoned: bool) -> None:
        self._served[index].is_cordoned = is_cordoned
        self._changed(self._served[index])

    # ------------------------------------------------------------ workflows and clients

    def _arrive(self) -> None:
        plan = self._plans[self._next_plan]
        self._next_plan += 1
        if self._next_plan < len(self._plans):
            following_ms = self._plans[self._next_plan].arrival_s * MS_PER_S
            self._at(max(self.now_ms, following_ms), self._arrive)
        deadline_ms = (
            float("inf") if plan.deadline_s is None else self.now_ms + plan.deadline_s * MS_PER_S
        )
        flow = Flow(plan, deadline_ms, self._from_ms <= self.now_ms < self._until_ms)
        if plan.number in self._flows:
            msg = f"two workflows have the number {plan.number}"
            raise ValueError(msg)
        self._flows[plan.number] = flow
        if flow.is_measured:
            self._measured_left += 1
            self._book.started(plan)
        if plan.deadline_s is not None and self._client.do_hang_up:
            self._at(deadline_ms, self._hang_up, flow, None)
        self._ask(flow, Chain(plan))

    def _ask(self, flow: Flow, chain: Chain) -> None:
        if flow.fate is not None:
            return
        plan, step_number = flow.plan, flow.asked
        call = Call(plan, step_number, self.now_ms, flow.deadline_ms, chain)
        name = plan.workflow_class
        call.home = chain.home
        call.workflow_home = flow.home
        expected = self._mean(self._completions, name, COMPLETION_TOKENS_FIRST).value
        call.completion_tokens_expected = max(1, int(expected))
        steps = self._mean(self._steps, name, STEPS_FIRST).value
        call.steps_expected = max(step_number + 1, int(steps + 0.5))
        flow.asked += 1
        flow.calls[call.id] = call
        if plan.deadline_s is None:
            self._at(self.now_ms + self._client.patience_s * MS_PER_S, self._hang_up, flow, call)
        self._note("ask", call.id, call.home)
        self._tell(self._strategy.arrived, call)

    def _ask_again(self, flow: Flow, call: Call) -> None:
        if flow.fate is not None:
            return
        call.is_between_tries = False
        call.asked_ms = self.now_ms
        call.is_waiting = True
        if flow.is_measured:
            self._book.tries += 1
        self._note("again", call.id, call.tries)
        self._tell(self._strategy.arrived, call)

    def _hang_up(self, flow: Flow, of: Call | None) -> None:
        """The client's time has come: of its workflow, or of one call."""
        if flow.fate is not None or (of is not None and of.id not in flow.calls):
            return
        fate = Fate.LATE
        calls = flow.calls.values()
        if calls and all(call.is_between_tries for call in calls):
            later = any(call.step_number > 0 for call in calls)
            fate = Fate.REFUSED_LATER if later else Fate.REFUSED
        self._abandon(flow)
        self._end(flow, fate)

    def _abandon(self, flow: Flow) -> None:
        """The client hangs up on all calls that it has on their way."""
        # Those that wait go first: room that the others leave is not for them.
        for call in sorted(flow.calls.values(), key=lambda call: call.engine >= 0):
            if call.is_between_tries or call.id not in flow.calls:
                continue
            if call.engine >= 0:
                served = self._served[call.engine]
                self._leave_prefill(call, flow)
                running = served.engine.cancel(call, self.now_ms)
                served.view.in_flight -= 1
                if running is not None:
                    self._pay(flow, served, running)
                self._schedule(served)
            call.is_waiting = False
            self._note("hang_up", call.id, call.engine)
            self._tell(self._strategy.expired, call)
            if call.engine >= 0:
                self._turn_off(self._served[call.engine])
        flow.calls.clear()

    def _end_if_live(self, flow: Flow, fate: Fate) -> None:
        if flow.fate is None:
            self._abandon(flow)
            self._end(flow, fate)

    def _end(self, flow: Flow, fate: Fate) -> None:
        flow.fate = fate
        plan = flow.plan
        del self._flows[plan.number]
        if fate in (Fate.SUCCEEDED, Fate.BAD):
            self._mean(self._steps, plan.workflow_class, STEPS_FIRST).add(plan.calls)
        self._note(fate, f"w{plan.number}", -1)
        if flow.is_measured:
            self._measured_left -= 1
            self._book.ended(flow, fate)
        self._tell(self._strategy.workflow_ended, plan, fate)
        if not self._measured_left and self._next_plan == len(self._plans):
            self._at(max(self.now_ms, self._until_ms), self._dismiss)

    def _dismiss(self) -> None:
        """Nobody who is measured is left: those who came to keep up the load hang up."""
        if not self._measured_left:
            for flow in list(self._flows.values()):
                self._hang_up(flow, None)

    @staticmethod
    def _mean(means: dict[str, _Mean], name: str, first: float) -> _Mean:
        mean = means.get(name)
        if mean is None:
            mean = means[name] = _Mean(first)
        return mean

    # ------------------------------------------------------------ the result

    def _result(self, wall_s: float) -> Result:
        book = self._book
        from_ms, until_ms = self._from_ms, self._until_ms
        fleet_usd = busy_usd = cold_usd = 0.0
        minutes = max(1, int(-(-self._options.horizon_s * MS_PER_S // MS_PER_MINUTE)))
        usd_by_minute = [0.0] * minutes
        on_by_minute = [0] * minutes
        for index, served in enumerate(self._served):
            book.preemptions += served.engine.preemptions
            on = list(served.on)
            if served.on_since_ms is not None:
                on.append((served.on_since_ms, max(self.now_ms, until_ms)))
            for began_ms, ended_ms in on:
                fleet_usd += _overlap(began_ms, ended_ms, from_ms, until_ms) * served.usd_per_ms
                for minute in range(minutes):
                    at_ms = minute * MS_PER_MINUTE
                    paid_ms = _overlap(began_ms, ended_ms, at_ms, at_ms + MS_PER_MINUTE)
                    usd_by_minute[minute] += paid_ms * served.usd_per_ms
                    on_by_minute[minute] += began_ms <= at_ms < ended_ms
            busy_usd += (self._busy_until[index] - self._busy_from[index]) * served.usd_per_ms
            for began_ms, ended_ms in served.cold:
                cold_usd += _overlap(began_ms, ended_ms, from_ms, until_ms) * served.usd_per_ms
        wasted = dict.fromkeys(Waste, 0.0) | book.wasted
        wasted[Waste.COLD_START] = cold_usd
        wasted[Waste.IDLE] = fleet_usd - busy_usd - cold_usd
        gauges = {
            "running": float(sum(served.engine.running for served in self._served)),
            "waiting": float(sum(served.engine.waiting for served in self._served)),
            "kv_tokens_pinned": float(sum(served.engine.pinned for served in self._served)),
            "prefill_tokens": float(
                sum(served.engine.prefill_tokens_waiting for served in self._served)
            ),
            "in_flight": float(sum(view.in_flight for view in self.engines)),
            "pairs": float(len(self._pairs)),
            "workflows": float(len(self._flows)),
            "with_strategy": float(self._strategy.waiting),
            **self._strategy.gauges(),
        }
        weights = {plan.tenant: plan.weight for plan in self._plans}
        return Result(
            strategy=self._strategy.name,
            seed=self._options.seed,
            measured_s=(until_ms - from_ms) / MS_PER_S,
            total=book.total,
            by_priority=dict(sorted(book.by_priority.items())),
            by_class=dict(sorted(book.by_class.items())),
            weighted_successes=book.weighted_successes,
            expected_successes=book.expected_successes,
            fleet_usd=fleet_usd,
            busy_usd=busy_usd,
            wasted_usd=wasted,
            late_kill_ratio=book.refusals_final_later / max(1, book.refusals_final),
            refusals=book.refusals,
            refusals_final=book.refusals_final,
            tries=book.tries,
            ttft=_quantiles(book.ttft_ms),
            tpot=_quantiles(book.tpot_ms),
            e2e=_quantiles(book.e2e_ms),
            ttft_by_priority={
                priority: _quantiles(values)
                for priority, values in sorted(book.ttft_ms_by_priority.items())
            },
            good_steps=book.good_steps,
            steps=len(book.ttft_ms),
            prompt_tokens=book.prompt_tokens,
            cached_tokens=book.cached_tokens,
            preemptions=book.preemptions,
            service_by_tenant=dict(sorted(book.service.items())),
            jain=_jain(
                [book.service.get(tenant, 0.0) / weights[tenant] for tenant in book.tenants]
            ),
            fleet_usd_by_minute=tuple(usd_by_minute),
            engines_on_by_minute=tuple(on_by_minute),
            engine_starts=self._starts,
            decisions=self._decisions,
            decision_us_mean=self._wall_s * 1e6 / max(1, self._decisions),
            calls_per_wall_minute=book.calls_all / max(wall_s, 1e-9) * 60.0,
            gauges_at_end=gauges,
            digest=self._digest.hexdigest(),
            log=tuple(self._log),
            pair_calls=self._pair_calls,
        )


class _Book:
    """What is counted of measured workflows."""

    def __init__(self) -> None:
        self.total = Tally()
        self.by_priority: dict[int, Tally] = {}
        self.by_class: dict[str, Tally] = {}
        self.tenants: dict[str, None] = {}
        self.service: defaultdict[str, float] = defaultdict(float)
        self.wasted: dict[Waste, float] = {}
        self.weighted_successes = 0.0
        self.expected_successes = 0.0
        self.refusals = self.refusals_final = self.refusals_final_later = self.tries = 0
        self.ttft_ms: list[float] = []
        self.tpot_ms: list[float] = []
        self.e2e_ms: list[float] = []
        self.ttft_ms_by_priority: defaultdict[int, list[float]] = defaultdict(list)
        self.good_steps = self.prompt_tokens = self.cached_tokens = 0
        self.preemptions = 0
        self.calls_all = 0

    def _tallies(self, plan: Plan) -> tuple[Tally, Tally, Tally]:
        return (
            self.total,
            self.by_priority.setdefault(plan.priority, Tally()),
            self.by_class.setdefault(plan.workflow_class, Tally()),
        )

    def started(self, plan: Plan) -> None:
        self.tenants[plan.tenant] = None
        for tally in self._tallies(plan):
            tally.started += 1

    def ended(self, flow: Flow, fate: Fate) -> None:
        plan = flow.plan
        for tally in self._tallies(plan):
            tally.fates[fate] = tally.fates.get(fate, 0) + 1
        if fate is Fate.SUCCEEDED:
            self.weighted_successes += plan.weight
        if fate in (Fate.SUCCEEDED, Fate.BAD):
            self.expected_successes += plan.good_ratio
        waste = _WASTE_OF.get(fate)
        if waste is not None:
            self._waste(waste, flow.gpu_usd - flow.preempted_usd)
        self._waste(Waste.PREEMPTED, flow.preempted_usd)
        self._waste(Waste.RETRIES, flow.lost_usd)

    def _waste(self, waste: Waste, usd: float) -> None:
        self.wasted[waste] = self.wasted.get(waste, 0.0) + usd

    def step(self, call: Call, running: Running, now_ms: float) -> None:
        plan, step = call.plan, call.step
        ttft_ms = call.first_token_ms - call.arrived_ms
        e2e_ms = now_ms - call.arrived_ms
        self.ttft_ms.append(ttft_ms)
        self.e2e_ms.append(e2e_ms)
        self.ttft_ms_by_priority[plan.priority].append(ttft_ms)
        tpot_ms = 0.0
        if step.completion_tokens > 1:
            tpot_ms = (now_ms - call.first_token_ms) / (step.completion_tokens - 1)
            self.tpot_ms.append(tpot_ms)
        self.good_steps += (
            ttft_ms <= plan.ttft_s_max * MS_PER_S and tpot_ms <= plan.tpot_s_max * MS_PER_S
        )
        self.prompt_tokens += step.prompt_tokens
        self.cached_tokens += max(0, running.cached_tokens)


def _overlap(began_ms: float, ended_ms: float, from_ms: float, until_ms: float) -> float:
    return max(0.0, min(ended_ms, until_ms) - max(began_ms, from_ms))


def _quantiles(values: list[float]) -> Quantiles:
    """Nearest rank."""
    if not values:
        return Quantiles()
    ordered = sorted(values)
    last = len(ordered) - 1
    return Quantiles(
        p50_ms=ordered[round(0.50 * last)],
        p90_ms=ordered[round(0.90 * last)],
        p99_ms=ordered[round(0.99 * last)],
        mean_ms=sum(ordered) / len(ordered),
    )


def _jain(values: list[float]) -> float:
    """Jain's index of fairness (Jain, Chiu, Hawe 1984): 1 when all are equal, 1/n when one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
