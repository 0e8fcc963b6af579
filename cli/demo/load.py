"""The demo's load as pure data: which workflow arrives when, with which steps.

Knows no clock and no network. Fitted to published statistics, scaled down to what a laptop carries;
nothing is copied from a trace.

bounded agent
    Calls a task p50 12, p99 37; 65.0 % of tasks succeed.
    Source: SWE-bench Verified, gpt-5 on mini-SWE-agent.
coding
    Calls a task p50 2, p90 17; growth a step p50 646, p90 3,510 tokens; output p50 216, p90 898
    tokens; gap p50 9 s, p90 74 s; 14.3 k tokens of shared prefix.
    Source: kv-cache-tester (Claude Code), 7,196 tasks of 49,334 calls.
chat
    Two turns and more, mean 2.97, p90 5; input p50 6,909, mean 12,035 tokens; output p50 350,
    p90 597 tokens; gap p50 126 s, p90 486 s.
    Source: Mooncake conversation trace, 1,981 sessions of several turns.
arrivals
    Gamma; coefficient of variation of clients p50 1.21 and 1.03, p90 3.95; the first client has
    30 % of the requests, the first five 77 %.
    Source: ServeGen, m-small and deepseek-r1.

The agent's growth, outputs and gaps are those of coding: they are steps of the same loop.
Spreads are lognormal through the two published quantiles.
"""

import math
from dataclasses import dataclass
from random import Random

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
)
from controlplane.domain.catalog import Scope

# What a laptop's two cores carry, relative to the published sizes.
PROMPT_TOKENS_SCALE = 1 / 16
COMPLETION_TOKENS_SCALE = 1 / 6
COMPLETION_TOKENS_MIN = 20
COMPLETION_TOKENS_MAX = 120
PROMPT_TOKENS_NEW_MIN = 8
PROMPT_TOKENS_NEW_MAX = 600
STEPS_MAX = 20
GAP_S_MAX = 2.0

# Kinds of the mix, weights as in the protocol's mixed workload (agentic code, chat, bounded agent).
KIND_WEIGHTS = {"coding": 50, "chat": 30, "agent": 20}

# Shares follow rank ** -0.82: the exponent for which the first of many holds 30 % and the first
# five 77 %, as in ServeGen.
TENANT_SHARE_EXPONENT = 0.82

AGENT_SUCCESS_RATIO = 0.65
_SHARED_PREFIX_TOKENS = 14_300

# Words of about four bytes with their blank: one token each for the engines' byte-level estimate.
_WORDS = (
    "run", "the", "test", "file", "path", "code", "read", "open", "line", "diff", "loop", "call",
    "type", "node", "plan", "step", "fail", "pass", "edit", "list", "find", "tree", "make", "task",
)  # fmt: skip
_BYTES_PER_TOKEN = 4


_CHAT_TURNS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLoad:
    """A workflow's deadline is `slack` times its isolated time; smaller is more urgent."""

    tenant: str
    rank: int
    arrival_cv: float
    slack: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One call: what the user or a tool adds, the answer's length, and the pause before it."""

    prompt_tokens_new: int
    completion_tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPlan:
    """`is_solved` is the drawn quality of the result if every step completes."""

    name: str
    tenant: str
    kind: str
    scope: Scope
    model_size: str
    arrival_s: float
    deadline_s: float
    prefix_tokens: int
    is_solved: bool
    steps: tuple[StepPlan, ...]


def shares(tenants: tuple[TenantLoad, ...]) -> dict[str, float]:
    """Each tenant's share of the workflows, by rank."""
    weights = {load.tenant: load.rank**-TENANT_SHARE_EXPONENT for load in tenants}
    total = sum(weights.values())
    return {tenant: weight / total for tenant, weight in weights.items()}


def arrivals_s(random: Random, count: int, cv: float, window_s: float) -> list[float]:
    """`count` instants in 0..window_s, their gaps Gamma with coefficient of variation `cv`.

    The gaps are normalised to the window, so that the number of arrivals is not left to the draw.
    """
    shape = 1 / cv**2
    gaps = [random.gammavariate(shape, 1.0) for _ in range(count + 1)]
    total = sum(gaps) or 1.0
    instants, elapsed = [], 0.0
    for gap in gaps[:count]:
        elapsed += gap
        instants.append(window_s * elapsed / total)
    return instants


def plan_load(
    *,
    seed: int,
    window_s: float,
    workflows: int,
    tenants: tuple[TenantLoad, ...],
    speedup: float,
) -> tuple[WorkflowPlan, ...]:
    """All workflows in order of arrival. The same arguments give the same plan on every machine."""
    plans = []
    for load in tenants:
        random = Random(f"{seed}:{load.tenant}")  # noqa: S311  (a repeatable load, no secret)
        count = max(1, round(workflows * shares(tenants)[load.tenant]))
        for number, arrival in enumerate(arrivals_s(random, count, load.arrival_cv, window_s)):
            plans.append(_workflow(random, load, number, arrival, speedup))
    return tuple(sorted(plans, key=lambda plan: (plan.arrival_s, plan.name)))


def text(random: Random, tokens: int) -> str:
    """Text of about `tokens` tokens at four bytes each."""
    size = tokens * _BYTES_PER_TOKEN
    words: list[str] = []
    length = 0
    while length < size:
        word = random.choice(_WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


def _workflow(
    random: Random, load: TenantLoad, number: int, arrival_s: float, speedup: float
) -> WorkflowPlan:
    kind = random.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    if kind == "chat":
        steps = tuple(_chat_step(random, speedup) for _ in range(_chat_turns(random)))
        scope, model_size, is_solved = Scope.CHAT, "small", True
    else:
        spread = AGENT_STEPS if kind == "agent" else CODING_STEPS
        count = min(STEPS_MAX, max(1, round(spread.draw(random))))
        steps = tuple(_coding_step(random, speedup) for _ in range(count))
        scope = Scope.AUTONOMOUS if kind == "agent" else Scope.COPILOT
        model_size = "large" if kind == "agent" else "small"
        is_solved = random.random() < AGENT_SUCCESS_RATIO
    return WorkflowPlan(
        name=f"{load.tenant}-{kind}-{number}",
        tenant=load.tenant,
        kind=kind,
        scope=scope,
        model_size=model_size,
        arrival_s=arrival_s,
        deadline_s=load.slack * _isolated_s(steps, speedup),
        prefix_tokens=round(_SHARED_PREFIX_TOKENS * PROMPT_TOKENS_SCALE),
        is_solved=is_solved,
        steps=steps,
    )


def _chat_turns(random: Random) -> int:
    """Two turns and then a geometric number of further ones with the published mean."""
    more_mean = CHAT_TURNS_MEAN - _CHAT_TURNS_MIN
    ratio = more_mean / (1 + more_mean)
    more = math.floor(math.log(1 - random.random()) / math.log(ratio))
    return min(STEPS_MAX, _CHAT_TURNS_MIN + more)


def _chat_step(random: Random, speedup: float) -> StepPlan:
    return _step(
        prompt=CHAT_INPUT_TOKENS.draw(random),
        completion=CHAT_OUTPUT_TOKENS.draw(random),
        gap_s=CHAT_GAP_S.draw(random) / speedup,
    )


def _coding_step(random: Random, speedup: float) -> StepPlan:
    return _step(
        prompt=CODING_GROWTH_TOKENS.draw(random),
        completion=CODING_OUTPUT_TOKENS.draw(random),
        gap_s=CODING_GAP_S.draw(random) / speedup,
    )


def _step(*, prompt: float, completion: float, gap_s: float) -> StepPlan:
    return StepPlan(
        prompt_tokens_new=_within(
            prompt * PROMPT_TOKENS_SCALE, PROMPT_TOKENS_NEW_MIN, PROMPT_TOKENS_NEW_MAX
        ),
        completion_tokens=_within(
            completion * COMPLETION_TOKENS_SCALE, COMPLETION_TOKENS_MIN, COMPLETION_TOKENS_MAX
        ),
        gap_s=min(GAP_S_MAX, gap_s),
    )


def _within(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


# An unloaded 70B engine: 25 ms a token (an 8B one is faster) and half a second to the first one.
_ISOLATED_TPOT_S = 0.025
_ISOLATED_TTFT_S = 0.5
# A laptop's own time per call, which no speed-up shortens.
_CALL_OVERHEAD_S = 0.15


def _isolated_s(steps: tuple[StepPlan, ...], speedup: float) -> float:
    """Time that the workflow takes on an idle fleet, in seconds of the wall clock."""
    return sum(
        step.gap_s
        + _CALL_OVERHEAD_S
        + (_ISOLATED_TTFT_S + step.completion_tokens * _ISOLATED_TPOT_S) / speedup
        for step in steps
    )
