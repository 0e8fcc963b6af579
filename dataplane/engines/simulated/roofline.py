"""How long one step of the engine takes on a given GPU: a fitted roofline.

Source of the constants: an additive fit on 165 measured vLLM runs of Llama-3.1-70B fp8 on H100,
H200 and B200, tensor parallel 1 to 8, concurrency 4 to 64 (silicon sample of ai-
dynamo/aiconfigurator, Oct 2025); mean absolute error of TPOT 7.3 %, and 7 to 10 % on a GPU type
left out of the fit:

    ms = 3.48 + 0.95 log2(tp) + 1.15 W / (tp BW) + 1.68 KV / (tp BW) + 2.10 FLOP / (tp F)

for the model's 80 layers, to which the first two terms are proportional. W are the bytes of weights
and KV the bytes of KV cache read in the step, BW is in bytes/ms and F in FLOP/ms per GPU. FLOP is
2 P per token computed, and for prefill 4 L d (n_new n_context - n_new^2 / 2) for attention.
"""

import math
from dataclasses import dataclass

from dataplane.engines.simulated.options import SimulatedOptions

STEP_MS_PER_LAYER = 3.48 / 80
STEP_MS_PER_LAYER_LOG2_GPUS = 0.95 / 80
WEIGHTS_FACTOR = 1.15
KV_FACTOR = 1.68
FLOP_FACTOR = 2.10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step on one engine: fixed, and per unit of work."""

    base_s: float
    per_token_s: float
    per_kv_token_s: float
    per_attention_pair_s: float

    def step_s(self, tokens: int, kv_tokens: int, attention_pairs: float) -> float:
        """Seconds for `tokens` computed, `kv_tokens` read by decoding, `attention_pairs` of
        prefill.
        """
        return (
            self.base_s
            + tokens * self.per_token_s
            + kv_tokens * self.per_kv_token_s
            + attention_pairs * self.per_attention_pair_s
        )


def step_times(options: SimulatedOptions, gpus: int) -> StepTimes:
    bandwidth = gpus * options.bandwidth_bytes_per_s
    flops = gpus * options.flops_per_s
    layer_ms = STEP_MS_PER_LAYER + STEP_MS_PER_LAYER_LOG2_GPUS * math.log2(gpus)
    fixed_s = options.layers * layer_ms / 1000
    speedup = options.speedup
    return StepTimes(
        base_s=(fixed_s + WEIGHTS_FACTOR * options.weights_bytes / bandwidth) / speedup,
        per_token_s=FLOP_FACTOR * 2 * options.parameters / flops / speedup,
        per_kv_token_s=KV_FACTOR * options.kv_bytes_per_token / bandwidth / speedup,
        per_attention_pair_s=FLOP_FACTOR
        * 4
        * options.layers
        * options.hidden_size
        / flops
        / speedup,
    )
