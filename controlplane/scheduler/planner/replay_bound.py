"""How far TPOT may stretch on a model's engines: found by replaying the workflows of the last minutes.

A fluid replay in virtual time: one queue by deadline, a bound of calls in flight per engine, all
calls of an engine gain tokens at one rate, prompts stop them for as long as they take. Seconds
outside, milliseconds in the rates of engines. It knows nothing of caches: tokens are as observed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import ceil
from typing import Final

from controlplane.domain.catalog import Role
from controlplane.domain.ids import ModelName
from controlplane.scheduler.perf_model import MS_PER_S, SEATS_BOUND_MIN
from controlplane.scheduler.planner.loads import stretch_of
from controlplane.scheduler.planner.problem import (
    EngineCondition,
    PoolKind,
    Problem,
    RecentWorkflow,
    Stretch,
)

# From "batches hardly pay" to "the loosest that keeps 95 % of workflows in time" (simulated).
STRETCH_RATIOS: Final = (1.2, 1.35, 1.5, 1.75, 2.0, 2.25, 2.5)
DEFERRABLE_RATIOS: Final = (1.05, 1.1, 1.2, 1.35, 1.5)
# With fewer workflows chance decides, and the stretch stays as it is.
WORKFLOWS_MIN: Final = 50
# Another stretch must win by this part of the value in time, or the standing one stays.
GAIN_RATIO_MIN: Final = 0.02
# Less of a token than this is rounding.
TOKEN_ROUNDING: Final = 1e-9
# More engines than this are replayed as so many, with as many workflows less.
ENGINES_MAX: Final = 12
STEPS_MAX: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay came to: workflows in time, their value, and the mean time to finish."""

    in_time: int
    late: int
    value: float
    finish_s_mean: float


class _Engine:
    """Calls that gain tokens together: `odometer` counts the tokens that each has gained so far."""

    __slots__ = ("capacity", "count", "finishing", "kv", "last_ms", "odometer", "pool", "stall_ms")

    def __init__(self, pool: PoolKind) -> None:
        self.pool = pool
        self.odometer = 0.0
        self.last_ms = 0.0
        self.stall_ms = 0.0
        self.count = 0
        self.kv = 0.0
        self.capacity = float(pool.kv_tokens_capacity)
        self.finishing: list[tuple[float, int, int, float]] = []

    def tpot_ms(self) -> float:
        return (
            self.pool.decode_ms_base
            + self.count * self.pool.decode_ms_per_seq
            + self.kv * self.pool.decode_ms_per_kv_token
        )

    def advance(self, now_ms: float) -> None:
        """Let time pass: tokens are gained except while prompts are computed."""
        begun_ms = max(self.last_ms, self.stall_ms)
        if now_ms > begun_ms and self.count:
            self.odometer += (now_ms - begun_ms) / self.tpot_ms()
        self.last_ms = max(self.last_ms, now_ms)

    def prefill_ms(self, flow: RecentWorkflow) -> float:
        return (
            self.pool.prefill_base_ms
            + flow.uncached_tokens * self.pool.prefill_ms_per_token
            + self.pool.prefill_ms_per_token_sq
            * flow.uncached_tokens
            * max(0.0, flow.context_tokens - 0.5 * flow.uncached_tokens)
        )

    def alone_ms(self, flow: RecentWorkflow) -> float:
        """What one step takes with nobody else there: no step takes less."""
        held = flow.context_tokens + 0.5 * flow.completion_tokens
        tpot_ms = (
            self.pool.decode_ms_base
            + self.pool.decode_ms_per_seq
            + held * self.pool.decode_ms_per_kv_token
        )
        return self.prefill_ms(flow) + flow.completion_tokens * tpot_ms

    def take(self, now_ms: float, call: int, flow: RecentWorkflow, tie: int) -> None:
        self.advance(now_ms)
        self.stall_ms = max(now_ms, self.stall_ms) + self.prefill_ms(flow)
        held = flow.context_tokens + 0.5 * flow.completion_tokens
        self.count += 1
        self.kv += held
        goal = self.odometer + flow.completion_tokens
        heappush(self.finishing, (goal, tie, call, held))

    def ends_ms(self, now_ms: float, flow: RecentWorkflow) -> float:
        """When a step would end that is taken now, with who is there now."""
        held = flow.context_tokens + 0.5 * flow.completion_tokens
        tpot_ms = (
            self.tpot_ms() + self.pool.decode_ms_per_seq + held * self.pool.decode_ms_per_kv_token
        )
        begin_ms = max(now_ms, self.stall_ms) + self.prefill_ms(flow)
        return begin_ms + flow.completion_tokens * tpot_ms

    def next_ms(self, now_ms: float) -> float:
        """When the first of its calls ends, as things stand."""
        goal = self.finishing[0][0]
        begin = max(now_ms, self.stall_ms)
        return begin + max(0.0, goal - self.odometer) * self.tpot_ms()

    def release(self) -> list[int]:
        """The calls that have all their tokens: the first, and who ends with it."""
        calls: list[int] = []
        while self.finishing and (
            not calls or self.finishing[0][0] <= self.odometer + TOKEN_ROUNDING
        ):
            _, _, call, held = heappop(self.finishing)
            self.count -= 1
            self.kv = max(0.0, self.kv - held)
            calls.append(call)
        return calls


# What can happen: a call wants to run, or an engine's first call ends.
_READY: Final = 0
_DONE: Final = 1


def replay(
    pools: Sequence[PoolKind],
    flows: Sequence[RecentWorkflow],
    stretch_ratio: float,
    deferrable_ratio: float,
) -> Replayed:
    """Run workflows on one engine of each of `pools`, calls in flight bounded by the ratios.

    Later steps come when the one before has ended and the gap is over. A call whose workflow can not
    be in time any more is dropped when its turn comes. Everything that arrived is run to its end.
    """
    engines = [_Engine(pool) for pool in pools]
    bounds = [_seats(engine, flows, stretch_ratio) for engine in engines]
    bounds_deferrable = [
        min(most, _seats(engine, flows, deferrable_ratio))
        for engine, most in zip(engines, bounds, strict=True)
    ]
    ties = count()
    events: list[tuple[float, int, int, int, int]] = []
    versions = [0] * len(engines)
    steps_left = [flow.steps for flow in flows]
    least_ms = [min(engine.alone_ms(flow) for engine in engines) for flow in flows]
    queue: list[tuple[bool, float, int, int]] = []
    in_time = late = 0
    value = finish_s = 0.0
    for index, flow in enumerate(flows):
        heappush(events, (flow.arrival_s * MS_PER_S, next(ties), _READY, index, 0))

    def end(index: int, now_ms: float, *, is_in_time: bool) -> None:
        nonlocal in_time, late, value, finish_s
        finish_s += now_ms / MS_PER_S - flows[index].arrival_s
        if is_in_time:
            in_time += 1
            value += flows[index].value
        else:
            late += 1

    while events:
        now_ms, _, kind, index, version = heappop(events)
        if kind == _READY:
            flow = flows[index]
            deadline = float("inf") if flow.deadline_s is None else flow.arrival_s + flow.deadline_s
            heappush(queue, (flow.is_deferrable, deadline, next(ties), index))
        else:
            if version != versions[index]:
                continue
            engine = engines[index]
            engine.advance(now_ms)
            for call in engine.release():
                steps_left[call] -= 1
                flow = flows[call]
                if steps_left[call] > 0:
                    ready_ms = now_ms + flow.gap_s * MS_PER_S
                    heappush(events, (ready_ms, next(ties), _READY, call, 0))
                else:
                    end(call, now_ms, is_in_time=_is_in_time(flow, now_ms))
            _schedule(events, engine, index, versions, now_ms, next(ties))
        waiting: list[tuple[bool, float, int, int]] = []
        while queue:
            entry = heappop(queue)
            flow = flows[entry[3]]
            place = _place(engines, bounds_deferrable if flow.is_deferrable else bounds, flow)
            left = steps_left[entry[3]]
            # What comes after this step is counted as if nobody else were there.
            after_ms = (left - 1) * (least_ms[entry[3]] + flow.gap_s * MS_PER_S)
            ends_ms = now_ms + least_ms[entry[3]]
            if place is not None:
                ends_ms = engines[place].ends_ms(now_ms, flow)
            if not _is_in_time(flow, ends_ms + after_ms):
                end(entry[3], now_ms, is_in_time=False)
                continue
            if place is None:
                waiting.append(entry)
                # Who comes later in the queue and needs no less waits as well.
                break
            engines[place].take(now_ms, entry[3], flow, next(ties))
            _schedule(events, engines[place], place, versions, now_ms, next(ties))
        for entry in waiting:
            heappush(queue, entry)
    return Replayed(
        in_time=in_time, late=late, value=value, finish_s_mean=finish_s / max(1, len(flows))
    )


def _schedule(
    events: list[tuple[float, int, int, int, int]],
    engine: _Engine,
    index: int,
    versions: list[int],
    now_ms: float,
    tie: int,
) -> None:
    versions[index] += 1
    if engine.finishing:
        heappush(events, (engine.next_ms(now_ms), tie, _DONE, index, versions[index]))


def _is_in_time(flow: RecentWorkflow, now_ms: float) -> bool:
    return flow.deadline_s is None or now_ms / MS_PER_S <= flow.arrival_s + flow.deadline_s


def _seats(engine: _Engine, flows: Sequence[RecentWorkflow], ratio: float) -> int:
    """As `perf_model.seats_within`, at the context that these workflows hold on average."""
    tokens = sum(
        (flow.context_tokens + 0.5 * flow.completion_tokens) * flow.steps for flow in flows
    )
    context = tokens / max(1, sum(flow.steps for flow in flows))
    each_ms = engine.pool.decode_ms_per_seq + engine.pool.decode_ms_per_kv_token * context
    if each_ms <= 0.0:
        return engine.pool.seats_capacity
    seats = ceil((ratio - 1.0) * engine.pool.decode_ms_base / each_ms)
    return min(engine.pool.seats_capacity, max(SEATS_BOUND_MIN, seats))


def _place(engines: Sequence[_Engine], bounds: Sequence[int], flow: RecentWorkflow) -> int | None:
    """The engine with the most room that may take the call, or None. One that is idle takes any."""
    needed = flow.context_tokens + flow.completion_tokens
    best: int | None = None
    best_room = 0.0
    for index, engine in enumerate(engines):
        room = 1.0 - engine.count / bounds[index]
        if engine.count and (room <= 0.0 or engine.kv + needed > engine.capacity):
            continue
        if best is None or room > best_room:
            best, best_room = index, room
    return best


# ---------------------------------------------------------------- the best


def best_stretches(problem: Problem) -> tuple[Stretch, ...]:
    """The stretch of each model: found anew where `recent` says enough of it, else as it stands."""
    recent: dict[ModelName, list[RecentWorkflow]] = {}
    for flow in problem.recent:
        recent.setdefault(flow.model, []).append(flow)
    answer = []
    for model in sorted({pool.model for pool in problem.pools}):
        standing = stretch_of(problem, model)
        flows = recent.get(model, [])
        pools = _engines_of(problem, model)
        if len(flows) >= WORKFLOWS_MIN and pools:
            answer.append(_best(*_thinned(pools, flows), standing))
        else:
            answer.append(standing)
    return tuple(answer)


def _engines_of(problem: Problem, model: ModelName) -> list[PoolKind]:
    """The engines that serve both phases of a model now. Pairs are bounded by their decode engines."""
    kinds = {(pool.model, pool.gpu_type, pool.gpus, pool.role): pool for pool in problem.pools}
    engines = []
    for node in problem.nodes:
        if node.is_cordoned:
            continue
        for engine in node.engines:
            pool = kinds.get((engine.model, node.gpu_type, engine.gpus, engine.role))
            is_up = engine.condition is EngineCondition.SERVING
            if pool is not None and is_up and pool.role is Role.BOTH and pool.model == model:
                engines.append(pool)
    return engines


def _thinned(
    pools: list[PoolKind], flows: list[RecentWorkflow]
) -> tuple[list[PoolKind], list[RecentWorkflow]]:
    """Fewer engines with as many workflows each, and no more steps than a replay takes."""
    every = ceil(len(pools) / ENGINES_MAX)
    flows = sorted(flows, key=lambda flow: flow.arrival_s)
    kept = flows[::every]
    first_s = kept[0].arrival_s
    steps = 0
    for index, flow in enumerate(kept):
        steps += flow.steps
        if steps > STEPS_MAX:
            kept = kept[:index]
            break
    return pools[::every], [replace(flow, arrival_s=flow.arrival_s - first_s) for flow in kept]


def _best(pools: Sequence[PoolKind], flows: Sequence[RecentWorkflow], standing: Stretch) -> Stretch:
    total = sum(flow.value for flow in flows) or 1.0

    def score(ratio: float, deferrable_ratio: float) -> float:
        result = replay(pools, flows, ratio, min(ratio, deferrable_ratio))
        # Where all end in time, the sooner is the better.
        return result.value / total - 1e-9 * result.finish_s_mean

    ratio = _choose(
        STRETCH_RATIOS, standing.ratio, lambda one: score(one, standing.deferrable_ratio)
    )
    deferrable = standing.deferrable_ratio
    if any(flow.is_deferrable for flow in flows):
        ratios = tuple(one for one in DEFERRABLE_RATIOS if one <= ratio)
        deferrable = _choose(ratios, deferrable, lambda one: score(ratio, one))
    return Stretch(model=standing.model, ratio=ratio, deferrable_ratio=min(ratio, deferrable))


def _choose(ratios: Sequence[float], standing: float, score: Callable[[float], float]) -> float:
    scores = {ratio: score(ratio) for ratio in (*ratios, standing)}
    best = max(ratios, key=lambda ratio: scores[ratio])
    return best if scores[best] > scores[standing] + GAIN_RATIO_MIN else standing
