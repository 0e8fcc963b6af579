"""llm-d's endpoint picker: the weighted sum of scorers, and the token-aware routing of its guides.

Scorers and defaults as documented and in the router's source (2026): prefix-cache-scorer = matched over
prompt; queue-scorer = min-max over reported waiting, 1 when all are equal; kv-cache-utilization-scorer
= 1 - usage; load-aware-scorer = 0.5 (1 - waiting / 128); no-hit-lru-scorer spreads requests that match
nowhere. Gauges are as old as the telemetry; the picker takes the highest score, ties by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cli.simulate.baselines.placing import Counting, Placing
from cli.simulate.contracts import MS_PER_S, Call, EngineView

LOAD_AWARE_WAITING_MAX: Final = 128
# prefix-cache-affinity-filter's default: warm is who holds so much of the prompt.
AFFINITY_RATIO: Final = 0.8
# A prompt of which the engines hold less than one block of 64 tokens matches nowhere.
NO_HIT_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the scorers by name; 0 leaves a scorer out."""

    prefix: float
    queue: float = 0.0
    kv: float = 0.0
    load: float = 0.0
    no_hit: float = 0.0


class LlmdWeights(Placing):
    name = "llm-d"

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self._cold_turns: dict[int, int] = {}
        self._turn = 0

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        weights = self.weights
        prompt = max(1, call.prompt_tokens)
        cached = [self.floor.cached_tokens(call, engine.index) for engine in engines]
        waits = [engine.waiting for engine in engines]
        low, high = min(waits), max(waits)
        is_cold = max(cached) < NO_HIT_TOKENS
        oldest = sorted(engines, key=lambda engine: self._cold_turns.get(engine.index, 0))
        ranks = {engine.index: place for place, engine in enumerate(oldest)}
        spread = max(1, len(engines) - 1)
        scores = [
            weights.prefix * min(1.0, cached[place] / prompt)
            + weights.queue * (1.0 if high == low else (high - engine.waiting) / (high - low))
            + weights.kv * (1.0 - min(1.0, engine.kv_used_ratio))
            + weights.load * 0.5 * max(0.0, 1.0 - engine.waiting / LOAD_AWARE_WAITING_MAX)
            + (weights.no_hit * (1.0 - ranks[engine.index] / spread) if is_cold else 0.0)
            for place, engine in enumerate(engines)
        ]
        best = max(scores)
        chosen = self.floor.random.choice(
            [engine.index for engine, score in zip(engines, scores, strict=True) if score == best]
        )
        if is_cold:
            self._turn += 1
            self._cold_turns[chosen] = self._turn
        return chosen


class LlmdTokens(Counting):
    """Token-aware routing, the guides' default since August 2026: among engines that hold 0.8 of the
    prompt the one with the fewest tokens in flight, unless it is `tau` tokens ahead of the least loaded
    one, where tau = prefill throughput x `penalty_s`.
    """

    name = "llm-d-tokens"

    def __init__(self, penalty_s: float) -> None:
        super().__init__()
        self.penalty_s = penalty_s

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        load = self.ledger.held_tokens
        coldest = min(engines, key=lambda engine: (load[engine.index], engine.index))
        wanted = AFFINITY_RATIO * call.prompt_tokens
        warm = [
            engine for engine in engines if self.floor.cached_tokens(call, engine.index) >= wanted
        ]
        if not warm:
            return coldest.index
        best = min(warm, key=lambda engine: (load[engine.index], engine.index))
        tau_tokens = self.penalty_s * MS_PER_S / best.rates.prefill_ms_per_token
        is_too_far_ahead = load[best.index] - load[coldest.index] > tau_tokens
        return coldest.index if is_too_far_ahead else best.index
