"""Workloads of the evaluation: seeded generators fitted to published statistics, and tenants that skew.

coding
    A task of a coding agent. Steps p50 2, p90 17 (mean 6.8, p99 80); the context grows by p50 646,
    p90 3,510 tokens a step; answers p50 216, p90 898 tokens; tools take p50 9 s, p90 74 s. It begins
    with 14.3 k tokens of tools and system prompt, and with a history of its session of which 16 k
    tokens are kept. Source: kv-cache-tester (Claude Code), 7,196 tasks of 49,334 calls.
chat
    A conversation: 24 % go on after the first turn, to 2.97 turns in the mean (p90 5). First prompt
    p50 6.9 k, mean 12.0 k tokens; later turns add p50 476, p90 4.6 k; answers p50 350, p90 597; people
    take p50 126 s, p90 486 s. Source: Mooncake conversation trace, 8,124 sessions.
bounded
    An agent on one issue, of three equally frequent kinds: calls p50 12 (p99 37), 33, and 47 (p99 120);
    65.0, 64.8 and 70.6 % of the results are good enough, however long it ran. Prompts grow like
    coding's, from 14.3 k shared tokens and a task of p50 1.5 k tokens. Source: SWE-bench Verified,
    mini-SWE-agent with gpt-5, sonnet-4 and sonnet-4.5 (success, calls).
subagents
    A task of a coding agent in a session that uses sub-agents: 16 % of the tasks hand work to them, mostly
    at the beginning, to 1.65 at once in the mean (at most 4), and wait for all. Such a task has p50 24,
    p90 54 calls of its own, another p50 9, p90 37. A sub-agent has a context of its own and p50 11, p90 16
    calls; it begins with 9.7 k shared tokens, grows by p50 2.5 k, p90 13 k a call, and reports p50 3.0 k
    tokens, which its parent reads. Source: kv-cache-tester, the 9 of 355 sessions that have sub-agents;
    all of them ask one model here, most of the recorded ones a smaller one than their parent.
mix
    Workflows of coding, chat and bounded at 50 : 30 : 20, and one tenant that comes in bursts.

Tenants: 24; the first has 30 % of the workflows, the first five 77 %, the first ten 93 %; gaps between
arrivals Gamma with a coefficient of variation of 1, 1.2 and 5.5 (ServeGen, m-small), 13 for the burst
tenant (Azure 2023 code). Spreads are lognormal through two published quantiles.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Final

from cli.published import (
    AGENT_STEPS,
    CHAT_GAP_S,
    CHAT_INPUT_TOKENS,
    CHAT_OUTPUT_TOKENS,
    CHAT_TURNS_MEAN,
    CODING_GAP_S,
    CODING_GROWTH_TOKENS,
    CODING_OUTPUT_TOKENS,
    CODING_STEPS,
    SUBAGENT_CALL,
    SUBAGENT_GAP_S,
    SUBAGENT_GROWTH_TOKENS,
    SUBAGENT_OTHER_STEPS,
    SUBAGENT_OUTPUT_TOKENS,
    SUBAGENT_PREFIX_TOKENS,
    SUBAGENT_REPORT_TOKENS,
    SUBAGENT_STEPS,
    SUBAGENT_TASK_RATIO,
    SUBAGENT_TASK_STEPS,
    SUBAGENT_TIMES,
    SUBAGENT_TOLD_TOKENS,
    SUBAGENT_WIDTHS,
    Z99,
    Spread,
)
from cli.simulate.bounds import engine_work_s, gaps_s, isolated_s
from cli.simulate.contracts import Branch, EngineSpec, FleetSpec, Plan, Step
from cli.simulate.deadlines import SLACKS, Deadlines, deadline_s, mean
from cli.simulate.fleets import REFERENCE
from controlplane.domain.catalog import Scope

# Context that a model is served with; agents compact what they carry before it is full.
CONTEXT_TOKENS_MAX: Final = 110_000
PREFIX_TOKENS: Final = 14_300
HISTORY_TOKENS_MAX: Final = 16_000
COMPLETION_TOKENS_MAX: Final = 8_192
PROMPT_TOKENS_NEW_MIN: Final = 16
STEPS_MAX: Final = 100
TOOL_GAP_S_MAX: Final = 120.0
HUMAN_GAP_S_MAX: Final = 600.0
CHAT_TURNS_MAX: Final = 40
CHAT_GOES_ON_RATIO: Final = 1_981 / 8_124

TENANTS: Final = 24
# Shares exp(-0.5 (rank - 1)^0.78): 30 % for the first, 77 % for five, 93 % for ten.
_SHARE_SCALE: Final = 0.5
_SHARE_EXPONENT: Final = 0.78
ARRIVAL_CVS: Final = (1.2, 1.0, 5.5, 1.2, 1.0, 1.2)
BURST_CV: Final = 13.0
BURST_RANK: Final = 5
# Classes of the default policies: priority and weight as they grant them.
TENANT_CLASSES: Final = (("gold", 9, 4.0), ("silver", 5, 2.0), ("bronze", 2, 1.0))
# TTFT and TPOT targets by class, in seconds.
_TARGETS_S: Final = ((2.0, 0.05), (10.0, 0.1), (30.0, 0.2))
# Draws that the mean isolated time of a class is taken from.
CLASS_SAMPLE: Final = 2_000
# How full engines are at load 1: a token takes so many times as long as on an empty engine. At this
# packing the rate is what a first-come gate sustains with no deadlines (coding: 0.44 workflows per second).
CAPACITY_STRETCH: Final = 1.8


# Published contexts, less the shared prefix: p50 103.7 k, p90 233.6 k.
CODING_HISTORY_TOKENS: Final = Spread.through(89_400, 219_300)
# Kinds of bounded agents: steps, and the probability that a result is good enough. Only the medians of the
# second are published: it is taken to spread like the third.
BOUNDED_KINDS: Final = (
    (AGENT_STEPS, 0.650),
    (Spread(median=33, sigma=math.log(120 / 47) / Z99), 0.648),
    (Spread(median=47, sigma=math.log(120 / 47) / Z99), 0.706),
)
# The longest recorded sub-agent has 24.
BRANCH_STEPS_MAX: Final = 24
_NO_BRANCHES: Final[Mapping[int, tuple[Branch, ...]]] = {}
BOUNDED_TASK_TOKENS: Final = Spread.through(1_500, 4_000)
CHAT_GROWTH_TOKENS: Final = Spread.through(476, 4_640)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a workflow does, whoever asks and whenever."""

    workflow_class: str
    steps: tuple[Step, ...]
    scope: Scope
    prefix_tokens: int
    is_good: bool = True
    # Probability that it is good enough, of which `is_good` is the draw.
    good_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A body that comes at a given time, of a trace that is replayed instead of drawn."""

    at_s: float
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`draw` makes one body. `replay`, where there is one, gives the order and relative times instead.

    `weights` are the classes that it consists of, with their share of the workflows.
    """

    name: str
    weights: Mapping[str, float]
    draw: Callable[[Random], Body]
    has_bursts: bool = False
    replay: tuple[Arrival, ...] = ()


def coding_body(random: Random) -> Body:
    history = min(HISTORY_TOKENS_MAX, round(CODING_HISTORY_TOKENS.draw(random)))
    count = _within(CODING_STEPS.draw(random), 1, STEPS_MAX)
    return _agent_body(random, "coding", Scope.COPILOT, history, count, 1.0)


def subagents_body(random: Random) -> Body:
    history = min(HISTORY_TOKENS_MAX, round(CODING_HISTORY_TOKENS.draw(random)))
    hands_out = random.random() < SUBAGENT_TASK_RATIO
    calls = SUBAGENT_TASK_STEPS if hands_out else SUBAGENT_OTHER_STEPS
    # Who hands work out reads what comes back.
    count = _within(calls.draw(random), 1 + hands_out, STEPS_MAX)
    branches: dict[int, tuple[Branch, ...]] = {}
    if hands_out:
        times = random.choices(range(1, len(SUBAGENT_TIMES) + 1), SUBAGENT_TIMES)[0]
        for _ in range(times):
            place = _within(SUBAGENT_CALL.draw(random), 1, count - 1) - 1
            width = random.choices(range(1, len(SUBAGENT_WIDTHS) + 1), SUBAGENT_WIDTHS)[0]
            branches[place] = tuple(_branch(random) for _ in range(width))
    return _agent_body(random, "subagents", Scope.COPILOT, history, count, 1.0, branches)


def _branch(random: Random) -> Branch:
    count = _within(SUBAGENT_STEPS.draw(random), 1, BRANCH_STEPS_MAX)
    steps = []
    reusable, new = SUBAGENT_PREFIX_TOKENS, SUBAGENT_TOLD_TOKENS
    for number in range(count):
        if reusable + new > CONTEXT_TOKENS_MAX:
            reusable, new = SUBAGENT_PREFIX_TOKENS, HISTORY_TOKENS_MAX
        is_report = number + 1 == count
        answer = SUBAGENT_REPORT_TOKENS if is_report else SUBAGENT_OUTPUT_TOKENS
        output = _within(answer.draw(random), 1, COMPLETION_TOKENS_MAX)
        gap_s = min(TOOL_GAP_S_MAX, SUBAGENT_GAP_S.draw(random))
        steps.append(
            Step(new_tokens=new, reusable_tokens=reusable, completion_tokens=output, gap_s=gap_s)
        )
        reusable += new
        growth = _within(SUBAGENT_GROWTH_TOKENS.draw(random), 0, CONTEXT_TOKENS_MAX // 4)
        new = max(growth, output + PROMPT_TOKENS_NEW_MIN)
    return Branch(tuple(steps), SUBAGENT_PREFIX_TOKENS)


def bounded_body(random: Random) -> Body:
    task = _within(BOUNDED_TASK_TOKENS.draw(random), PROMPT_TOKENS_NEW_MIN, HISTORY_TOKENS_MAX)
    steps, good_ratio = random.choice(BOUNDED_KINDS)
    count = _within(steps.draw(random), 1, STEPS_MAX)
    return _agent_body(random, "bounded", Scope.AUTONOMOUS, task, count, good_ratio)


def _agent_body(
    random: Random,
    name: str,
    scope: Scope,
    first_tokens: int,
    count: int,
    good_ratio: float,
    branches: Mapping[int, tuple[Branch, ...]] = _NO_BRANCHES,
) -> Body:
    steps = []
    reusable, new = PREFIX_TOKENS, first_tokens
    for number in range(count):
        beside = branches.get(number, ())
        if reusable + new > CONTEXT_TOKENS_MAX:
            # The agent sums up what it carries and goes on from there.
            reusable, new = PREFIX_TOKENS, HISTORY_TOKENS_MAX
        output = _within(CODING_OUTPUT_TOKENS.draw(random), 1, COMPLETION_TOKENS_MAX)
        gap_s = min(TOOL_GAP_S_MAX, CODING_GAP_S.draw(random))
        steps.append(
            Step(
                new_tokens=new,
                reusable_tokens=reusable,
                completion_tokens=output,
                gap_s=gap_s,
                branches=beside,
            )
        )
        reusable += new
        # The answer is part of what the next prompt adds, and so are the reports of branches.
        growth = _within(CODING_GROWTH_TOKENS.draw(random), 0, CONTEXT_TOKENS_MAX // 4)
        reports = sum(branch.steps[-1].completion_tokens for branch in beside)
        new = max(growth, output + reports + PROMPT_TOKENS_NEW_MIN)
    return Body(
        workflow_class=name,
        steps=tuple(steps),
        scope=scope,
        prefix_tokens=PREFIX_TOKENS,
        is_good=random.random() < good_ratio,
        good_ratio=good_ratio,
    )


def chat_body(random: Random) -> Body:
    turns = 1
    if random.random() < CHAT_GOES_ON_RATIO:
        # Two turns, then a geometric number of further ones with the published mean.
        more_mean = CHAT_TURNS_MEAN - 2
        stays = more_mean / (1 + more_mean)
        turns = min(CHAT_TURNS_MAX, 2 + math.floor(math.log(1 - random.random()) / math.log(stays)))
    steps = []
    reusable, new = (
        0,
        _within(CHAT_INPUT_TOKENS.draw(random), PROMPT_TOKENS_NEW_MIN, CONTEXT_TOKENS_MAX // 2),
    )
    for _ in range(turns):
        if reusable + new > CONTEXT_TOKENS_MAX:
            break
        output = _within(CHAT_OUTPUT_TOKENS.draw(random), 1, COMPLETION_TOKENS_MAX)
        gap_s = min(HUMAN_GAP_S_MAX, CHAT_GAP_S.draw(random))
        steps.append(
            Step(new_tokens=new, reusable_tokens=reusable, completion_tokens=output, gap_s=gap_s)
        )
        reusable += new
        growth = _within(CHAT_GROWTH_TOKENS.draw(random), 0, CONTEXT_TOKENS_MAX // 4)
        new = max(growth, output + PROMPT_TOKENS_NEW_MIN)
    return Body(workflow_class="chat", steps=tuple(steps), scope=Scope.CHAT, prefix_tokens=0)


_BODIES: Final[Mapping[str, Callable[[Random], Body]]] = {
    "coding": coding_body,
    "chat": chat_body,
    "bounded": bounded_body,
    "subagents": subagents_body,
}
_MIX: Final[Mapping[str, float]] = {"coding": 0.5, "chat": 0.3, "bounded": 0.2}


def _mixed_body(random: Random) -> Body:
    name = random.choices(list(_MIX), list(_MIX.values()))[0]
    return _BODIES[name](random)


_NAMED: Final[Mapping[str, Workload]] = {
    **{name: Workload(name=name, weights={name: 1.0}, draw=draw) for name, draw in _BODIES.items()},
    "mix": Workload(name="mix", weights=_MIX, draw=_mixed_body, has_bursts=True),
}


def workload(name: str) -> Workload:
    """`coding`, `chat`, `bounded`, `subagents`, `mix`, or the path of a trace.

    Raises CommandFailure when it is none of these, or the file can not be read as a trace.
    """
    if name in _NAMED:
        return _NAMED[name]
    from cli.simulate.traces import read_trace

    return read_trace(name)


def shares() -> tuple[float, ...]:
    """Each tenant's share of the workflows, by rank."""
    weights = [math.exp(-_SHARE_SCALE * rank**_SHARE_EXPONENT) for rank in range(TENANTS)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def tenant_name(rank: int) -> str:
    return f"tenant-{rank:02d}"


def tenant_shares() -> Mapping[str, float]:
    """Each tenant's share of the workflows, by name."""
    return {tenant_name(rank): share for rank, share in enumerate(shares())}


def draw_plans(
    load: Workload,
    *,
    seed: int,
    rate_per_s: float | Callable[[float], float],
    horizon_s: float,
    deadlines: Deadlines = Deadlines.OWN,
    reference: EngineSpec = REFERENCE,
) -> tuple[Plan, ...]:
    """All workflows that come in 0..horizon_s, in order of arrival. The same arguments, the same plans.

    `rate_per_s` is in workflows; a function of the time in seconds makes a day, of which the integral
    counts. How many come of each tenant follows from the rate and is not left to the draw, when they
    come is. Deadlines are measured on `reference`; what is asked for is its model.
    """
    clock = _Clock(rate_per_s, horizon_s)
    drawn = _replayed(load, seed, clock) if load.replay else _drawn(load, seed, clock)
    means_s = class_means_s(load.name, reference) or {
        name: mean([work_s(body, reference) for _, _, body in drawn if body.workflow_class == name])
        for name in load.weights
    }
    blurs = Random(f"{seed}:deadlines")  # noqa: S311  (a repeatable load, no secret)
    return tuple(
        _plan(number, rank, at_s, body, deadlines, means_s, reference, blurs)
        for number, (at_s, rank, body) in enumerate(sorted(drawn, key=lambda entry: entry[:2]))
    )


class _Clock:
    """Operational time: a rate that changes is one of 1 on a clock that runs faster or slower."""

    def __init__(self, rate_per_s: float | Callable[[float], float], horizon_s: float) -> None:
        self.horizon_s = horizon_s
        self._knots: list[tuple[float, float]] = [(0.0, 0.0)]
        if not callable(rate_per_s):
            self._knots.append((horizon_s, rate_per_s * horizon_s))
        else:
            pieces = max(1, math.ceil(horizon_s / RATE_STEP_S))
            width_s, total = horizon_s / pieces, 0.0
            for piece in range(pieces):
                total += max(0.0, rate_per_s((piece + 0.5) * width_s)) * width_s
                self._knots.append(((piece + 1) * width_s, total))
        self.total = self._knots[-1][1]
        self._piece = 0

    def at_s(self, share: float) -> float:
        """The instant by which `share` of all workflows have come."""
        import bisect

        wanted = share * self.total
        index = bisect.bisect_left(self._knots, wanted, key=lambda knot: knot[1])
        if index == 0:
            return 0.0
        (before_s, before), (after_s, after) = self._knots[index - 1 : index + 1]
        return before_s + (after_s - before_s) * (wanted - before) / (after - before)


# A rate that is a function of time is taken as constant for so long.
RATE_STEP_S: Final = 60.0
# Part of all workflows that have come when the last one comes.
SHARE_MAX: Final = 1.0 - 1e-9


def _drawn(load: Workload, seed: int, clock: _Clock) -> list[tuple[float, int, Body]]:
    drawn: list[tuple[float, int, Body]] = []
    for rank, share in enumerate(shares()):
        random = Random(f"{seed}:{load.name}:{rank}")  # noqa: S311  (a repeatable load, no secret)
        wanted = clock.total * share
        count = math.floor(wanted) + (random.random() < wanted - math.floor(wanted))
        is_bursty = load.has_bursts and rank == BURST_RANK
        cv = BURST_CV if is_bursty else ARRIVAL_CVS[rank % len(ARRIVAL_CVS)]
        shape = 1 / cv**2
        gaps = [random.gammavariate(shape, 1.0) for _ in range(count + 1)]
        total = sum(gaps) or 1.0
        passed = 0.0
        for gap in gaps[:count]:
            passed += gap
            # The last gap of a burst may be nothing: all come before the end.
            come = min(passed / total, SHARE_MAX)
            drawn.append((clock.at_s(come), rank, load.draw(random)))
    return drawn


def _replayed(load: Workload, seed: int, clock: _Clock) -> list[tuple[float, int, Body]]:
    """The trace from a drawn place on, round and round, at the wanted rate instead of its own."""
    random = Random(f"{seed}:{load.name}")  # noqa: S311  (a repeatable load, no secret)
    count = round(clock.total)
    first = random.randrange(len(load.replay))
    span_s = load.replay[-1].at_s - load.replay[0].at_s or 1.0
    each_s = span_s / len(load.replay)
    start_s = load.replay[first].at_s
    drawn = []
    for number in range(count):
        turns, index = divmod(first + number, len(load.replay))
        own_s = turns * (span_s + each_s) + load.replay[index].at_s - start_s
        share = min(SHARE_MAX, own_s / (count * each_s))
        rank = random.choices(range(TENANTS), shares())[0]
        drawn.append((clock.at_s(share), rank, load.replay[index].body))
    return drawn


@lru_cache(maxsize=64)
def class_means_s(name: str, reference: EngineSpec) -> Mapping[str, float]:
    """Mean isolated time of each class of a named workload, in seconds. Empty when it has no such name."""
    if name not in _NAMED:
        return {}
    random = Random(f"class:{name}")  # noqa: S311  (a repeatable load, no secret)
    return {
        each: mean([work_s(_BODIES[each](random), reference) for _ in range(CLASS_SAMPLE)])
        for each in _NAMED[name].weights
    }


def capacity_per_s(load: Workload, fleet: FleetSpec) -> float:
    """Workflows per second that a fleet serves at load 1: all engines busy, packed so that a step takes
    `CAPACITY_STRETCH` times as long as on an empty engine, every reusable prefix reused.

    A step of t = base + work carries t - base of work, so a workflow of `work` seconds takes up
    work * stretch / (stretch - 1) of an engine. Mean over a fixed sample of the workload.
    """
    random = Random(f"capacity:{load.name}")  # noqa: S311  (a repeatable load, no secret)
    plans = [_plain(load.draw(random)) for _ in range(CLASS_SAMPLE)]
    packing = CAPACITY_STRETCH / (CAPACITY_STRETCH - 1.0)
    per_engine: dict[int, float] = {}
    total = 0.0
    for spec in fleet.engines:
        key = hash((spec.model.name, spec.gpu.name, spec.gpus, spec.slowness_ratio))
        if key not in per_engine:
            per_engine[key] = 1.0 / (mean([engine_work_s(plan, spec) for plan in plans]) * packing)
        total += per_engine[key]
    return total


def work_s(body: Body, reference: EngineSpec) -> float:
    """Isolated time less what people take between the turns of a chat: that is not ours to save."""
    return isolated_s(_plain(body), reference) - _human_s(body)


def _human_s(body: Body) -> float:
    return gaps_s(_plain(body)) if body.scope is Scope.CHAT else 0.0


def _plain(body: Body) -> Plan:
    return Plan(
        number=0,
        tenant="",
        workflow_class=body.workflow_class,
        arrival_s=0.0,
        steps=body.steps,
        deadline_s=None,
        prefix_tokens=body.prefix_tokens,
    )


def _plan(
    number: int,
    rank: int,
    at_s: float,
    body: Body,
    deadlines: Deadlines,
    means_s: Mapping[str, float],
    reference: EngineSpec,
    blurs: Random,
) -> Plan:
    level = rank % len(TENANT_CLASSES)
    tenant_class, priority, weight = TENANT_CLASSES[level]
    ttft_s, tpot_s = _TARGETS_S[level]
    plain = _plain(body)
    within_s = deadline_s(
        deadlines,
        isolated_s=work_s(body, reference),
        class_mean_s=means_s[body.workflow_class],
        slack=SLACKS[level],
        random=blurs,
    )
    return replace(
        plain,
        number=number,
        tenant=tenant_name(rank),
        arrival_s=at_s,
        deadline_s=within_s + _human_s(body),
        model=reference.model.name,
        tenant_class=tenant_class,
        priority=priority,
        weight=weight,
        scope=body.scope,
        prefix=f"prefix-{rank:02d}" if body.prefix_tokens else "",
        is_good=body.is_good,
        good_ratio=body.good_ratio,
        ttft_s_max=ttft_s,
        tpot_s_max=tpot_s,
    )


def _within(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))
