"""What a class of work costs on an engine in the long run: GPU time, KV token-seconds, seconds to finish.

Fluid: an engine that is kept at its bound of calls in flight, batches full. GPU milliseconds of a
whole engine, KV token-seconds, workflows per second. It knows nothing of how many engines there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist
from typing import Final

from controlplane.domain.catalog import Role
from controlplane.domain.ids import ModelName
from controlplane.scheduler.perf_model import (
    MS_PER_S,
    SEATS_BOUND_MIN,
    TRANSFER_PER_KV_READ,
)
from controlplane.scheduler.planner.problem import Demand, Held, Limits, PoolKind, Problem, Stretch

# With these 95 % of workflows end in time: 2.0 to 2.5 for tight work where there is room, 1.2 for work
# that fills the gaps between it (simulated, agents on a 70B model).
STRETCH_RATIO_DEFAULT: Final = 2.0
DEFERRABLE_RATIO_DEFAULT: Final = 1.2

# A class that must be served is planned for a part of at most this, whatever its floor says: the tail
# of a normal distribution means nothing beyond.
FLOOR_RATIO_MAX: Final = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One workflow of a class on a kind of engine: engine time, KV held over time, time to finish."""

    gpu_ms: float
    kv_token_s: float
    finish_s: float


def stretch_of(problem: Problem, model: ModelName) -> Stretch:
    for stretch in problem.stretches:
        if stretch.model == model:
            return stretch
    return Stretch(
        model=model, ratio=STRETCH_RATIO_DEFAULT, deferrable_ratio=DEFERRABLE_RATIO_DEFAULT
    )


def deferrable_share(stretch: Stretch) -> float:
    """The part of an engine's work that calls bounded by `deferrable_ratio` can do, 0..1.

    With seats (r - 1) base / each in steps of r base, tokens flow at (r - 1) / r / each.
    """
    low = max(0.0, stretch.deferrable_ratio - 1.0) / max(1.0, stretch.deferrable_ratio)
    high = max(1e-9, stretch.ratio - 1.0) / stretch.ratio
    return min(1.0, low / high)


def load_of(demand: Demand, pool: PoolKind, ratio: float) -> Load:
    """What a workflow of `demand` takes of an engine of `pool` whose TPOT may stretch by `ratio`.

    A prefill engine does the prompts alone, a decode engine the rest. `finish_s` is that of the legs
    done here, gaps not counted.
    """
    held = demand.context_tokens + 0.5 * demand.completion_tokens
    prefill_ms = (
        pool.prefill_base_ms
        + demand.uncached_tokens * pool.prefill_ms_per_token
        + pool.prefill_ms_per_token_sq
        * demand.uncached_tokens
        * max(0.0, demand.context_tokens - 0.5 * demand.uncached_tokens)
    )
    each_ms = pool.decode_ms_per_seq + pool.decode_ms_per_kv_token * held
    seats = float(pool.seats_capacity)
    if each_ms > 0.0:
        stretched = (ratio - 1.0) * pool.decode_ms_base / each_ms
        seats = min(seats, max(float(SEATS_BOUND_MIN), stretched))
    # Where KV holds fewer, steps are shorter and KV is what runs out: its capacity has a price of its own.
    seats_held = max(1.0, min(seats, pool.kv_tokens_capacity / max(1.0, held)))
    decode_ms = demand.completion_tokens * (pool.decode_ms_base + seats_held * each_ms)
    gpu_ms = prefill_ms + demand.completion_tokens * (pool.decode_ms_base / seats + each_ms)
    if pool.role is Role.PREFILL:
        decode_ms, gpu_ms = 0.0, prefill_ms
    elif pool.role is Role.DECODE:
        # The KV comes over the network, which takes none of the engine's time.
        transfer_ms = demand.context_tokens * pool.decode_ms_per_kv_token * TRANSFER_PER_KV_READ
        gpu_ms -= prefill_ms
        prefill_ms = transfer_ms
    busy_ms = demand.steps * (prefill_ms + decode_ms)
    return Load(
        gpu_ms=demand.steps * gpu_ms,
        kv_token_s=held * busy_ms / MS_PER_S,
        finish_s=busy_ms / MS_PER_S,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to do one leg of a class's work: the pool's index in `Problem.pools`, and the load."""

    pool: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOptions:
    """Where a class can run in time: on one engine, or its prompts and its decoding on two.

    `is_late` says that it can nowhere: then the fastest ways are all there is.
    """

    whole: tuple[Option, ...]
    prefill: tuple[Option, ...]
    decode: tuple[Option, ...]
    is_late: bool
    finish_s_best: float

    def every(self) -> tuple[Option, ...]:
        return self.whole + self.prefill + self.decode


# A class that can nowhere be in time may use what is this much slower than the fastest.
LATE_FINISH_RATIO_MAX: Final = 1.25


def options_of(problem: Problem, demand: Demand) -> ClassOptions:
    """The pools that finish a workflow of `demand` before its deadline at the model's stretch.

    That a slow type spoils every tight workflow that is put on it is a condition, not a preference.
    """
    ratio = stretch_of(problem, demand.model).ratio
    ways: dict[Role, list[Option]] = {role: [] for role in Role}
    for index, pool in enumerate(problem.pools):
        if pool.model != demand.model or pool.kv_tokens_capacity < (
            demand.context_tokens + demand.completion_tokens
        ):
            continue
        if demand.gpu_types and pool.gpu_type not in demand.gpu_types:
            continue
        ways[pool.role].append(Option(pool=index, load=load_of(demand, pool, ratio)))
    gaps_s = max(0.0, demand.steps - 1.0) * demand.gap_s
    limit_s = float("inf") if demand.deadline_s is None else demand.deadline_s - gaps_s
    if demand.deadline_s is not None:
        limit_s += demand.deferrable_s
    prefill_best = min((way.load.finish_s for way in ways[Role.PREFILL]), default=float("inf"))
    decode_best = min((way.load.finish_s for way in ways[Role.DECODE]), default=float("inf"))
    whole_best = min((way.load.finish_s for way in ways[Role.BOTH]), default=float("inf"))
    best_s = min(whole_best, prefill_best + decode_best)
    is_late = best_s > limit_s
    if is_late:
        limit_s = best_s * LATE_FINISH_RATIO_MAX
    return ClassOptions(
        whole=tuple(way for way in ways[Role.BOTH] if way.load.finish_s <= limit_s),
        prefill=tuple(
            way for way in ways[Role.PREFILL] if way.load.finish_s + decode_best <= limit_s
        ),
        decode=tuple(
            way for way in ways[Role.DECODE] if way.load.finish_s + prefill_best <= limit_s
        ),
        is_late=is_late,
        finish_s_best=best_s + gaps_s,
    )


# ---------------------------------------------------------------- how much must be planned for


def must_run_per_s(demand: Demand) -> float:
    """Deferrable workflows per second that can not wait: all that waits, within what it may wait.

    By Little's law a queue that is served at this rate keeps nobody longer than `deferrable_s`.
    """
    return demand.backlog_workflows / demand.deferrable_s


def planned_arrivals(problem: Problem, options: Sequence[ClassOptions]) -> tuple[Held, ...]:
    """Workflows per second of each class that capacity must carry.

    The mean is what is forecast, or what surely arrives now where that is more: a count less its own
    deviation, or the larger of two numbers would lie above the truth most of the time. On top of it come `z` standard
    deviations, at the quantile of the class's success floor: of the calls in flight (Poisson, times
    the dispersion) and of the forecast. Classes of a model share engines, so deviations add up in
    squares and each class bears its part of their sum (Euler's allocation).
    """
    held = {one.class_id: one for one in problem.held}
    limits = problem.limits
    means = []
    for demand in problem.demands:
        if demand.deferrable_s > 0.0:
            mean, recent = must_run_per_s(demand), 0.0
        else:
            now = surely(demand.arrivals_per_s_now, demand.dispersion_ratio, demand.arrivals_seen_s)
            mean = max(now, demand.arrivals_per_s_forecast)
            recent = surely(
                demand.arrivals_per_s_recent_max,
                demand.dispersion_ratio,
                demand.arrivals_recent_s,
            )
        before = held.get(demand.class_id)
        means.append(mean if before is None else hold(mean, recent, before.mean_per_s, limits))
    shares = _deviations(problem, options, means)
    answer: list[Held] = []
    for demand, mean, share in zip(problem.demands, means, shares, strict=True):
        need = mean * (1.0 + share)
        before = held.get(demand.class_id)
        if before is not None and before.mean_per_s == mean:
            # The deviations of the other classes of the model change a little as well.
            need = hold(need, 0.0, before.arrivals_per_s, limits)
        answer.append(Held(class_id=demand.class_id, arrivals_per_s=need, mean_per_s=mean))
    return _settled(problem, options, answer)


def _settled(
    problem: Problem, options: Sequence[ClassOptions], needs: Sequence[Held]
) -> tuple[Held, ...]:
    """What is held of each model while its need is lower, so that no engine goes that is wanted back soon.

    Weighed by engine time over all classes: of some classes more and of others less changes nothing. When
    the need was lower for `hold_below_s`, the most of that time is held from then on.
    """
    before = {one.class_id: one for one in problem.held}
    answer = list(needs)
    groups: dict[ModelName, list[int]] = {}
    for index, demand in enumerate(problem.demands):
        if demand.class_id in before and options[index].every():
            groups.setdefault(demand.model, []).append(index)
    for indexes in groups.values():
        weights = [min(way.load.gpu_ms for way in options[index].every()) for index in indexes]
        held = [before[problem.demands[index].class_id] for index in indexes]

        def total(rates: Sequence[float], weights: Sequence[float] = weights) -> float:
            return sum(rate * weight for rate, weight in zip(rates, weights, strict=True))

        need = [needs[index].arrivals_per_s for index in indexes]
        standing = total([one.arrivals_per_s for one in held])
        far = standing * (1.0 - problem.limits.hold_far_ratio)
        if total(need) >= standing or total(need) < far:
            continue
        since_s = max(one.lower_since_s for one in held) or problem.now_s
        lower = [one.lower_arrivals_per_s for one in held]
        most = need if total(need) >= total(lower) else lower
        rates = [rate * standing / total(need) for rate in need]
        if problem.now_s - since_s >= problem.limits.hold_below_s:
            rates, since_s, most = most, problem.now_s, need
        for index, rate, low in zip(indexes, rates, most, strict=True):
            answer[index] = replace(
                needs[index],
                arrivals_per_s=rate,
                lower_since_s=since_s,
                lower_arrivals_per_s=low,
            )
    return tuple(answer)


def surely(per_s: float, dispersion_ratio: float, seconds: float) -> float:
    """A rate that was counted over `seconds`, less the standard deviation of that count; 0 s: as it is."""
    if seconds <= 0.0:
        return per_s
    return max(0.0, per_s - sqrt(per_s * dispersion_ratio / seconds))


def hold(need: float, recent: float, before: float, limits: Limits) -> float:
    """What to plan for when `before` was planned for: the same, unless the need left the band.

    A need that fell counts as the highest of the last minutes (`recent`).
    """
    if need > before * (1.0 + limits.hold_above_ratio):
        return need
    lowered = max(need, recent)
    return before if lowered >= before * (1.0 - limits.hold_below_ratio) else lowered


def _deviations(
    problem: Problem, options: Sequence[ClassOptions], means: Sequence[float]
) -> list[float]:
    """For each class, what its deviation adds to its mean, as a ratio."""
    engines: list[float] = []
    relative: list[float] = []
    for demand, ways, mean in zip(problem.demands, options, means, strict=True):
        loads = [way.load for way in ways.whole] or [way.load for way in ways.decode]
        if mean <= 0.0 or not loads or demand.deferrable_s > 0.0:
            engines.append(0.0)
            relative.append(0.0)
            continue
        least = min(loads, key=lambda load: load.gpu_ms)
        in_flight = mean * least.finish_s
        variance = demand.dispersion_ratio / max(in_flight, 1e-9)
        variance += (demand.arrivals_per_s_spread / mean) ** 2
        engines.append(mean * least.gpu_ms / MS_PER_S)
        relative.append(sqrt(variance))
    total: dict[ModelName, float] = {}
    for demand, load, ratio in zip(problem.demands, engines, relative, strict=True):
        total[demand.model] = total.get(demand.model, 0.0) + (load * ratio) ** 2
    answer = []
    for demand, load, ratio in zip(problem.demands, engines, relative, strict=True):
        joint = sqrt(total[demand.model])
        z = quantile_z(demand.success_floor_ratio)
        answer.append(z * ratio * (load * ratio / joint) if joint > 0.0 else 0.0)
    return answer


def quantile_z(floor_ratio: float) -> float:
    """Standard deviations above the mean that a normal variable stays under with this probability."""
    inside = min(max(floor_ratio, 1.0 - FLOOR_RATIO_MAX), FLOOR_RATIO_MAX)
    return max(0.0, NormalDist().inv_cdf(inside))
