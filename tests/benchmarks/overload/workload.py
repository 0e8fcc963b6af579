"""What arrives: workflows of several steps with growing contexts, pauses and deadlines. Pure and repeatable.

Two kinds, a short chat and a longer agent. Three ways to set a deadline, since how much a deadline tells
about a workflow's true size decides how much ordering by it can gain.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from random import Random

from dataplane.engines.simulated.roofline import StepTimes

HIGH_SHARE = 0.3
STREAM_SHARE = 0.25
SIZE_SIGMA = 0.8
# Tokens that the chat template puts around each message.
MESSAGE_TOKENS = 8
_WORDS = (
    "run", "the", "test", "file", "path", "code", "read", "open", "line", "diff", "loop", "call",
    "type", "node", "plan", "step", "fail", "pass", "edit", "list", "find", "tree", "make", "task",
)  # fmt: skip
_TOKEN_BYTES = 4


class DeadlineModel(StrEnum):
    """A workflow's deadline is its slack times: a typical size of its kind, its own size, its own size blurred."""

    KIND = "kind"
    OWN = "own"
    BLURRED = "blurred"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Ranges are uniform, both ends in; tokens and seconds. `share` of all workflows."""

    name: str
    scope: str
    share: float
    prefix_tokens: int
    steps: tuple[int, int]
    first_tokens: tuple[int, int]
    growth_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    gap_s: tuple[float, float]


KINDS = (
    Kind(
        name="chat", scope="chat", share=0.4, prefix_tokens=160, steps=(2, 2),
        first_tokens=(240, 560), growth_tokens=(40, 120), answer_tokens=(16, 32), gap_s=(0.4, 1.0),
    ),
    Kind(
        name="agent", scope="autonomous", share=0.6, prefix_tokens=320, steps=(3, 6),
        first_tokens=(480, 1_120), growth_tokens=(60, 200), answer_tokens=(12, 32),
        gap_s=(0.1, 0.4),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tenant, its class and how much longer than alone its workflows may take."""

    tenant: str
    tenant_class: str
    slack: float
    is_high: bool


HIGH = Tier(tenant="high", tenant_class="gold", slack=4.0, is_high=True)
LOW = Tier(tenant="low", tenant_class="bronze", slack=6.0, is_high=False)
TIERS = (HIGH, LOW)
TENANTS = {tier.tenant: tier.tenant_class for tier in TIERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    prompt_tokens_new: int
    answer_tokens: int
    gap_s: float
    is_stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One workflow. `arrival_s` from the start of the run, `deadline_s` from its arrival."""

    number: int
    kind: Kind
    tier: Tier
    arrival_s: float
    deadline_s: float
    steps: tuple[Step, ...]


def plans(
    *, seed: int, times: StepTimes, rate: float, until_s: float, deadlines: DeadlineModel
) -> list[Plan]:
    """Poisson arrivals of `rate` workflows a second."""
    random = Random(f"{seed}:arrivals")
    found: list[Plan] = []
    arrival_s = random.expovariate(rate)
    for plan in stream(seed=seed, times=times, deadlines=deadlines):
        if arrival_s >= until_s:
            break
        found.append(replace(plan, arrival_s=arrival_s))
        arrival_s += random.expovariate(rate)
    return found


def stream(*, seed: int, times: StepTimes, deadlines: DeadlineModel) -> Iterator[Plan]:
    """Workflows without end, all arriving at 0."""
    random = Random(f"{seed}:workflows")
    typical = {kind.name: typical_s(kind, times) for kind in KINDS}
    owed = 0.0
    for number in count():
        # Spread evenly: in any ten workflows three are of high priority.
        owed += HIGH_SHARE
        tier = HIGH if owed >= 1.0 else LOW
        owed -= 1.0 if tier is HIGH else 0.0
        kind = random.choices(KINDS, [kind.share for kind in KINDS])[0]
        steps = tuple(
            Step(
                prompt_tokens_new=random.randint(
                    *(kind.growth_tokens if at else kind.first_tokens)
                ),
                answer_tokens=random.randint(*kind.answer_tokens),
                gap_s=random.uniform(*kind.gap_s) if at else 0.0,
                is_stream=random.random() < STREAM_SHARE,
            )
            for at in range(random.randint(*kind.steps))
        )
        size_s = typical[kind.name]
        if deadlines is not DeadlineModel.KIND:
            size_s = alone_s(kind.prefix_tokens, steps, times)
        if deadlines is DeadlineModel.BLURRED:
            size_s *= math.exp(random.gauss(0.0, SIZE_SIGMA))
        yield Plan(
            number=number,
            kind=kind,
            tier=tier,
            arrival_s=0.0,
            deadline_s=tier.slack * size_s,
            steps=steps,
        )


def alone_s(prefix_tokens: int, steps: tuple[Step, ...], times: StepTimes) -> float:
    """Seconds that a workflow takes with the fleet to itself and its prefix cached."""
    context = prefix_tokens
    total_s = 0.0
    for step in steps:
        total_s += step.gap_s + prefill_s(step.prompt_tokens_new, context, times)
        context += step.prompt_tokens_new + MESSAGE_TOKENS
        total_s += step.answer_tokens * times.step_s(1, context, 0)
        context += step.answer_tokens + MESSAGE_TOKENS
    return total_s


def typical_s(kind: Kind, times: StepTimes) -> float:
    """`alone_s` of a workflow of `kind` with the middle of every range."""
    middle = [sum(span) / 2 for span in (kind.first_tokens, kind.growth_tokens, kind.answer_tokens)]
    steps = tuple(
        Step(
            prompt_tokens_new=round(middle[1] if at else middle[0]),
            answer_tokens=round(middle[2]),
            gap_s=sum(kind.gap_s) / 2 if at else 0.0,
            is_stream=False,
        )
        for at in range(round(sum(kind.steps) / 2))
    )
    return alone_s(kind.prefix_tokens, steps, times)


def prefill_s(tokens: int, cached_tokens: int, times: StepTimes) -> float:
    """Seconds to compute `tokens` of prompt after `cached_tokens` of it."""
    pairs = tokens * (cached_tokens + tokens) - tokens * tokens / 2
    return times.step_s(tokens, 0, pairs)


def text(random: Random, tokens: int) -> str:
    """Text of `tokens` tokens: words of four bytes with their blank."""
    words = [random.choice(_WORDS) for _ in range(tokens)]
    return " ".join(word.ljust(_TOKEN_BYTES - 1)[: _TOKEN_BYTES - 1] for word in words) + " "
