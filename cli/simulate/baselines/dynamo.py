"""NVIDIA Dynamo's KV-aware router: the worker with the lowest

    overlap_weight * potential_prefill_blocks + potential_active_blocks

where prefill blocks are those that the worker has still to compute, this request's uncached ones among
them, and active blocks all that its requests hold. Temperature 0, as in its default; the router counts what it sent.
Source: Dynamo's router documentation; the default weight is 1.
"""

from collections.abc import Sequence

from cli.simulate.baselines.placing import Counting
from cli.simulate.contracts import Call, EngineView


class DynamoCost(Counting):
    name = "dynamo"

    def __init__(self, overlap_weight: float = 1.0) -> None:
        super().__init__()
        self.overlap_weight = overlap_weight

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        ledger = self.ledger
        logits = [
            self.overlap_weight
            * (ledger.prefill_tokens[engine.index] + self.uncached(call, engine.index))
            + ledger.held_tokens[engine.index]
            + call.prompt_tokens
            for engine in engines
        ]
        lowest = min(logits)
        return self.floor.random.choice(
            [engine.index for engine, logit in zip(engines, logits, strict=True) if logit == lowest]
        )
