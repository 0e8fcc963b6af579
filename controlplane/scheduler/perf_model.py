"""How long a call takes on an engine: a roofline of GPU, model and load. Times in milliseconds.

Coefficients: fit on 165 vLLM runs of Llama-3.1-70B fp8 on H100, H200 and B200, tensor parallel 1-8,
concurrency 4-64, from NVIDIA aiconfigurator's published silicon measurements (Apache-2.0):

    TPOT ms = 3.48 + 0.95 log2(tp) + 1.15 W/(tp BW) + 1.68 KV/(tp BW) + 2.10 FLOP/(tp F)

with W the bytes of weights, KV the bytes of KV that a step reads, FLOP = 2 P (sequences + prefill
tokens), BW bytes/s and F dense FLOP/s of one GPU. The two overheads are launches and all-reduces of
80 layers, so they are kept per layer. A mixture of experts adds two terms, fit on runs of
MiniMax-M2.5, gpt-oss-120b and Kimi-K2.5 of the same table with the others fixed: routing, per layer,
and the reading of the experts that the tokens of a step touch. `calibrate.py` holds all of it against
the table, with the GPU type left out; what is missed on an engine is learned online (`correction.py`).
"""

# What runs for every engine compares instead of calling max() and min(), which cost as much as the
# rest of a term where the core is not compiled.
# ruff: noqa: FURB136, PLR1730

from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import Final

from controlplane.domain.catalog import GpuType, Model
from controlplane.domain.fleet import EngineRow, Rates
from controlplane.domain.request import Request
from controlplane.scheduler.legs import DECODE, PREFILL

# 3.48 and 0.95 ms over the 80 layers of the model of the fit.
STEP_OVERHEAD_MS_PER_LAYER: Final = 0.0435
STEP_OVERHEAD_MS_PER_LAYER_DOUBLING: Final = 0.011875
WEIGHT_READ_FACTOR: Final = 1.15
KV_READ_FACTOR: Final = 1.68
FLOP_FACTOR: Final = 2.10
EXPERT_OVERHEAD_MS_PER_LAYER: Final = 0.0208
EXPERT_READ_FACTOR: Final = 1.43
# What vLLM adds to a prompt: kernels launched one by one where no CUDA graph fits, tokenisation, HTTP.
# Fit on its runs of up to four calls at a time; a simulated engine follows the roofline alone.
VLLM_PREFILL_MS_PER_LAYER: Final = 0.28

# Below these, weights are held in 8 and in 4 bits, scales included.
BITS_PER_PARAMETER_8_MAX: Final = 10.0
BITS_PER_PARAMETER_4_MAX: Final = 6.0
# Rows are linear in the batch, the share of experts touched is not: it is taken along the chord from
# one token to this many.
EXPERT_CHORD_TOKENS: Final = 64
# Slopes are read off at this distance, where they are not lost beside the overheads.
_MANY: Final = 1e9

# vLLM's default of --gpu-memory-utilization, and what activations and CUDA graphs take of it.
HBM_USABLE_RATIO: Final = 0.90
ACTIVATION_BYTES_PER_GPU: Final = 2 * 1024**3

# vLLM's default of --max-num-seqs.
SEATS_MAX: Final = 256
# Calls in flight are bounded so that TPOT stays within this multiple of an empty engine's at the
# nominal context, the loosest value that keeps 95 % of workflows in time (simulated).
TPOT_STRETCH_MAX: Final = 2.5
CONTEXT_TOKENS_NOMINAL: Final = 4096

# Memory bandwidth of a GPU over that of its network card (H100: 3.35 TB/s over 50 GB/s), divided by
# KV_READ_FACTOR: moving a token's KV to another engine against reading it once in a decode step.
TRANSFER_PER_KV_READ: Final = 40.0

# A call that waits inside an engine is taken to bring this many prompt tokens, when it is not ours.
WAITING_TOKENS_EACH: Final = 1024

# More than any sum of dollars: the cost of what is not feasible. A literal, so that C sees a constant.
INFEASIBLE: Final = 1e999

MS_PER_S: Final = 1000.0
MS_PER_HOUR: Final = 3_600_000.0


@dataclass(frozen=True, kw_only=True)
class EngineRates:
    """The products that do not depend on a request. Milliseconds, micro-dollars, tokens."""

    prefill_base_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_token_sq: float
    decode_ms_base: float
    decode_ms_per_seq: float
    decode_ms_per_kv_token: float
    micro_usd_per_ms: float
    kv_tokens_capacity: int
    seats_capacity: int
    kv_price_micro_usd_per_token_s: float
    load_ms: int


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What the roofline's terms are multiplied by. Overheads are milliseconds per layer."""

    layer_ms: float = STEP_OVERHEAD_MS_PER_LAYER
    layer_ms_per_doubling: float = STEP_OVERHEAD_MS_PER_LAYER_DOUBLING
    expert_layer_ms: float = EXPERT_OVERHEAD_MS_PER_LAYER
    weights: float = WEIGHT_READ_FACTOR
    experts: float = EXPERT_READ_FACTOR
    kv: float = KV_READ_FACTOR
    flop: float = FLOP_FACTOR
    prefill_layer_ms: float = 0.0


PUBLISHED: Final = Coefficients()
VLLM: Final = Coefficients(prefill_layer_ms=VLLM_PREFILL_MS_PER_LAYER)


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """What a step has to do, in the time that perfect hardware takes for it: layers, then milliseconds."""

    layers: float
    layer_doublings: float
    expert_layers: float
    weights_ms: float
    experts_ms: float
    kv_ms: float
    flop_ms: float

    def cost_ms(self, by: Coefficients) -> float:
        return (
            by.layer_ms * self.layers
            + by.layer_ms_per_doubling * self.layer_doublings
            + by.expert_layer_ms * self.expert_layers
            + by.weights * self.weights_ms
            + by.experts * self.experts_ms
            + by.kv * self.kv_ms
            + by.flop * self.flop_ms
        )


def flops_per_s(model: Model, gpu: GpuType) -> float:
    """Dense FLOP/s of one GPU in the precision of the model's weights.

    Where the GPU has no units of that precision, weights are widened as they are read.
    """
    bits = 8.0 * model.weights_bytes / model.parameters
    if bits <= BITS_PER_PARAMETER_4_MAX:
        return gpu.fp4_flops_per_s or gpu.flops_per_s
    if bits <= BITS_PER_PARAMETER_8_MAX:
        return gpu.fp8_flops_per_s or gpu.flops_per_s
    return gpu.flops_per_s


def experts_touched_ratio(model: Model, tokens: float) -> float:
    """Share of the experts that a step of `tokens` tokens reads, each token choosing for itself."""
    if model.experts == 0 or model.experts_active == 0:
        return 0.0
    return 1.0 - float((1.0 - model.experts_active / model.experts) ** tokens)


def step_terms(
    model: Model,
    gpu: GpuType,
    gpus: int,
    *,
    sequences: float,
    kv_tokens: float,
    prefill_tokens: float = 0.0,
    attention_pairs: float = 0.0,
    expert_gpus: int = 0,
) -> StepTerms:
    """One step that decodes `sequences`, reads `kv_tokens`, and computes `prefill_tokens` of prompts.

    `attention_pairs` counts each pair of a prompt token and a token before it; a pair costs 4 L d FLOP.
    KV that has fewer heads than there are GPUs is held, and read, by several of them. Experts are read
    from `expert_gpus` GPUs, from all when it is 0.
    """
    bytes_per_ms = gpus * gpu.bandwidth_bytes_per_s / MS_PER_S
    flops_per_ms = gpus * flops_per_s(model, gpu) / MS_PER_S
    kv_gpus = gpus if model.kv_heads == 0 or model.kv_heads > gpus else model.kv_heads
    tokens = sequences + prefill_tokens
    flop = (
        2.0 * (model.parameters_active or model.parameters) * tokens
        + 4.0 * model.layers * model.hidden_size * attention_pairs
    )
    return StepTerms(
        layers=model.layers,
        layer_doublings=model.layers * log2(gpus),
        expert_layers=model.layers if model.experts else 0,
        weights_ms=(model.weights_bytes - model.expert_weights_bytes) / bytes_per_ms,
        experts_ms=(
            experts_touched_ratio(model, tokens)
            * model.expert_weights_bytes
            * gpus
            / (expert_gpus or gpus)
            / bytes_per_ms
        ),
        kv_ms=kv_tokens * model.kv_bytes_per_token * gpus / kv_gpus / bytes_per_ms,
        flop_ms=flop / flops_per_ms,
    )


def kv_tokens_within(model: Model, gpu: GpuType, gpus: int) -> int:
    """Tokens whose KV fits beside the weights on `gpus` GPUs, 0 when the weights do not fit."""
    kv_gpus = gpus if model.kv_heads == 0 or model.kv_heads > gpus else model.kv_heads
    usable_bytes = gpus * (gpu.hbm_bytes * HBM_USABLE_RATIO - ACTIVATION_BYTES_PER_GPU)
    bytes_left = (usable_bytes - model.weights_bytes) * kv_gpus / gpus
    return max(0, int(bytes_left / model.kv_bytes_per_token))


def engine_rates(
    model: Model,
    gpu: GpuType,
    gpus: int,
    coefficients: Coefficients = PUBLISHED,
    pipeline: int = 1,
    expert_gpus: int = 0,
) -> EngineRates:
    """Rates of `model` on `gpus` GPUs of one type: `pipeline` stages of tensor parallel GPUs.

    A step passes through all stages, each of which reads its part of the weights on its own GPUs alone:
    its fixed time is that of one stage's GPUs with all of the model. Sequences and prompts are spread over
    as many batches as there are stages, which run at the same time, so that what they add is divided.
    Experts are read from `expert_gpus` GPUs, those of other data-parallel ranks included (0: from `gpus`).

    `kv_tokens_capacity` is 0 when the weights do not fit. A KV token-second is priced at the share of
    the engine that it occupies: then holding KV for tau costs as much as computing it again exactly
    at tau* = prefill time per token x capacity (the break-even of Continuum, arXiv 2511.02230).
    """
    tensor = max(1, gpus // pipeline)

    def step_ms(sequences: float, kv_tokens: float, prefill_tokens: float, pairs: float) -> float:
        return step_terms(
            model,
            gpu,
            tensor,
            sequences=sequences,
            kv_tokens=kv_tokens,
            prefill_tokens=prefill_tokens,
            attention_pairs=pairs,
            expert_gpus=expert_gpus // pipeline,
        ).cost_ms(coefficients)

    idle_ms = step_ms(0.0, 0.0, 0.0, 0.0)
    chord_ms = step_ms(EXPERT_CHORD_TOKENS, 0.0, 0.0, 0.0) - step_ms(1.0, 0.0, 0.0, 0.0)
    per_seq_alone_ms = chord_ms / (EXPERT_CHORD_TOKENS - 1)
    base_ms = step_ms(1.0, 0.0, 0.0, 0.0) - per_seq_alone_ms
    per_seq_ms = per_seq_alone_ms / pipeline
    per_kv_token_ms = (step_ms(0.0, _MANY, 0.0, 0.0) - idle_ms) / _MANY / pipeline
    per_pair_ms = (step_ms(0.0, 0.0, 0.0, _MANY) - idle_ms) / _MANY
    bytes_per_ms = (expert_gpus // pipeline or tensor) * gpu.bandwidth_bytes_per_s / MS_PER_S
    # A prompt touches all experts, once, and then pays for its FLOPs alone.
    experts_ms = coefficients.experts * model.expert_weights_bytes / bytes_per_ms
    parameters = model.parameters_active or model.parameters
    per_token_ms = (
        coefficients.flop * 2.0 * parameters * MS_PER_S / (gpus * flops_per_s(model, gpu))
    )

    micro_usd_per_ms = gpus * gpu.price_micro_usd_per_hour / MS_PER_HOUR
    kv_tokens = kv_tokens_within(model, gpu, gpus)
    stretch_ms = (TPOT_STRETCH_MAX - 1.0) * base_ms
    seats = int(stretch_ms / (per_seq_ms + per_kv_token_ms * CONTEXT_TOKENS_NOMINAL))
    return EngineRates(
        prefill_base_ms=idle_ms + experts_ms + coefficients.prefill_layer_ms * model.layers,
        prefill_ms_per_token=per_token_ms,
        prefill_ms_per_token_sq=per_pair_ms / pipeline,
        decode_ms_base=base_ms,
        decode_ms_per_seq=per_seq_ms,
        decode_ms_per_kv_token=per_kv_token_ms,
        micro_usd_per_ms=micro_usd_per_ms,
        kv_tokens_capacity=kv_tokens,
        seats_capacity=max(2, min(SEATS_MAX, seats)),
        kv_price_micro_usd_per_token_s=micro_usd_per_ms * MS_PER_S / max(1, kv_tokens),
        load_ms=model.load_ms,
    )


# With fewer calls in flight an engine's batches do not pay.
SEATS_BOUND_MIN: Final = 2


def seats_within(row: EngineRow, tpot_stretch_ratio: float, context_tokens: float) -> int:
    """Calls in flight with which TPOT stays within `tpot_stretch_ratio` of an empty engine's.

    Each call adds its own FLOPs and the reading of its KV to a step; `context_tokens` is what a call
    of this engine holds on average. Never more than the engine has seats. By the published rates: what is
    learned of an engine that is always as full tells its pace well, and badly how much of it is
    whose, so that a bound made of it would move with its own effect.
    """
    rates = row.published
    stretch_ms = (tpot_stretch_ratio - 1.0) * rates.decode_ms_base
    each_ms = rates.decode_ms_per_seq + rates.decode_ms_per_kv_token * context_tokens
    if each_ms <= 0.0:
        return row.seats_capacity
    seats = ceil(stretch_ms / each_ms)
    if seats < SEATS_BOUND_MIN:
        seats = SEATS_BOUND_MIN
    return seats if seats < row.seats_capacity else row.seats_capacity


def prefill_ms(row: EngineRow, new_tokens: int, context: int) -> float:
    """Time to compute the last `new_tokens` of a context of `context` tokens on an idle engine."""
    return (
        row.prefill_base_ms
        + new_tokens * row.prefill_ms_per_token
        + row.prefill_ms_per_token_sq
        * (float(new_tokens) * context - 0.5 * new_tokens * new_tokens)
    )


def alone_ms(rates: Rates, prompt_tokens: int, new_tokens: int, completion_tokens: int) -> float:
    """Time of a call on an empty engine of these rates: `new_tokens` of its prompt are computed, then the answer
    is decoded.
    """
    new = float(max(1, new_tokens))
    pairs = new * prompt_tokens - 0.5 * new * new
    first_ms = (
        rates.prefill_base_ms
        + new * rates.prefill_ms_per_token
        + pairs * rates.prefill_ms_per_token_sq
    )
    context = prompt_tokens + 0.5 * completion_tokens
    each_ms = (
        rates.decode_ms_base + rates.decode_ms_per_seq + rates.decode_ms_per_kv_token * context
    )
    decodes = completion_tokens - 1 if completion_tokens > 1 else 0
    return first_ms + decodes * each_ms


def tpot_ms(row: EngineRow, sequences: int, kv_tokens: int, prefill_tokens: int) -> float:
    """One step of a batch of `sequences` that holds `kv_tokens`, with `prefill_tokens` mixed in."""
    return (
        row.decode_ms_base
        + sequences * row.decode_ms_per_seq
        + kv_tokens * row.decode_ms_per_kv_token
        + prefill_tokens * row.prefill_ms_per_token
    )


def uncached_prefill_ms(request: Request, row: EngineRow, cached_tokens: int) -> float:
    """Time to compute what of the prompt is not cached, on an idle engine.

    An engine always computes the last token, to have something to sample from.
    """
    prompt = float(request.prompt_tokens)
    uncached = prompt - cached_tokens
    if uncached < 1.0:
        uncached = 1.0
    return (
        row.prefill_base_ms
        + uncached * row.prefill_ms_per_token
        + row.prefill_ms_per_token_sq * uncached * (prompt - 0.5 * uncached)
    )


def decode_gpu_ms(request: Request, row: EngineRow) -> float:
    """Time of the engine that decoding uses up, as opposed to the time that it takes.

    Steps are shared: a call pays its own FLOPs and KV reads, and of the weights' read one seat's
    part, whoever else is there, so that the price does not depend on the load.
    """
    expected = float(request.completion_tokens_expected)
    return expected * (
        row.decode_ms_base / (row.seats_capacity or 1)
        + row.decode_ms_per_seq
        + (request.prompt_tokens + 0.5 * expected) * row.decode_ms_per_kv_token
    )


def sequences_on(row: EngineRow) -> int:
    """Calls on the engine. Reports lag, own calls are known at once: the larger is nearer to now."""
    return row.running if row.running > row.seats_taken else row.seats_taken


def kv_tokens_on(row: EngineRow) -> int:
    return row.kv_tokens_used if row.kv_tokens_used > row.kv_tokens_taken else row.kv_tokens_taken


def completion_tokens_reserved(request: Request, others: int) -> int:
    """Output tokens that one more call reserves beside `others` on an engine.

    Alone the high quantile; beside others nearer to the mean, for what n answers exceed their sum by grows
    with the root of n: mean + (high - mean) / sqrt(n). The mean by Swanson's rule, 0.3, 0.4 and 0.3 of the
    quantiles 0.1, 0.5 and 0.9, the lowest as far below the median, by ratio, as the highest is above. That
    calls end one after the other, which Past-Future (LightLLM, arXiv 2507.10150) also counts on, does not
    hold for a burst that began together.
    """
    median = request.completion_tokens_expected
    high = request.completion_tokens_high
    if high <= median:
        return median
    mean = 0.4 * median + 0.3 * (high + median * median / high)
    return int(mean + (high - mean) / sqrt(others + 1.0))


def kv_tokens_needed(request: Request, cached_tokens: int, leg: int, others: int = 0) -> int:
    """KV that is charged to the engine's credits: what the call adds at its future peak.

    After Past-Future (LightLLM): a call's peak is its prompt plus the output still to come, by quantile;
    `others` are the calls there already. Prompt tokens that the engine holds already are not added
    again. A decode leg receives the whole prompt.
    """
    if leg == PREFILL:
        return request.prompt_tokens
    completion = completion_tokens_reserved(request, others)
    if leg == DECODE:
        return request.prompt_tokens + completion
    added = request.prompt_tokens - cached_tokens
    return (added if added > 0 else 0) + completion


class Forecast:
    """What is predicted of one call, or one leg of it, on one engine. Milliseconds, tokens, ratios.

    `before_ms` passes before the leg can begin: the prefill of a decode leg. `kv_tokens` are charged
    to credits; `kv_tokens_pinned` are in use at the peak, cached or not, for what is in use can not be
    evicted. `prefill_ms` computes the uncached prompt. `gpu_ms` is the time of the engine that the call
    uses up, as opposed to the times that it takes: `ttft_ms`, `ttft_ms_least` (its lower bound:
    nobody else there), `tpot_ms` (mean step), `decode_ms` (first token to last), `decode_ms_least` (its
    lower bound: the shortest answer, on an engine without anybody else), `e2e_ms`.
    """

    __slots__ = (
        "before_ms", "cached_tokens", "decode_ms", "decode_ms_least", "e2e_ms", "gpu_ms", "kv_saturation", "kv_tokens",
        "kv_tokens_pinned", "leg", "now_ms", "prefill_ms", "sequences", "tpot_ms", "ttft_ms", "ttft_ms_least",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        row: EngineRow,
        cached_tokens: int,
        now_ms: int,
        leg: int,
        before_ms: float,
    ) -> None:
        prompt = float(request.prompt_tokens)
        expected = 0.0 if leg == PREFILL else float(request.completion_tokens_expected)
        sequences = sequences_on(row)
        kv_tokens_there = float(kv_tokens_on(row))
        context = prompt + 0.5 * expected
        self.cached_tokens = cached_tokens
        self.now_ms = now_ms
        self.leg = leg
        self.before_ms = before_ms
        self.sequences = sequences
        self.kv_tokens = kv_tokens_needed(request, cached_tokens, leg, sequences)
        self.kv_tokens_pinned = prompt + expected

        capacity = float(row.kv_tokens_capacity)
        used = kv_tokens_there + self.kv_tokens
        self.kv_saturation = used / capacity if used < capacity else 1.0

        prefill_ms = uncached_prefill_ms(request, row, cached_tokens)
        self.prefill_ms = prefill_ms
        # How far a load has come is not reported, so all of it is counted.
        warm_up_ms = 0.0 if row.is_warm else float(row.warm_up_ms)
        load_ms = sequences * row.decode_ms_per_seq + kv_tokens_there * row.decode_ms_per_kv_token
        tpot_ms = (
            row.decode_ms_base
            + load_ms
            + row.decode_ms_per_seq
            + context * row.decode_ms_per_kv_token
        )
        if leg == DECODE:
            # The KV arrives over the network, then the call takes part in one step.
            transfer_ms = prompt * row.decode_ms_per_kv_token * TRANSFER_PER_KV_READ
            ttft_ms = transfer_ms + tpot_ms + warm_up_ms
            self.ttft_ms_least = transfer_ms + row.decode_ms_base + warm_up_ms
        else:
            # Prompts accepted before this one are computed first; the running batch shares the step.
            backlog = float(row.waiting * WAITING_TOKENS_EACH)
            if backlog < row.prefill_tokens_pending:
                backlog = float(row.prefill_tokens_pending)
            busy_ms = backlog * row.prefill_ms_per_token + load_ms
            ttft_ms = busy_ms + prefill_ms + warm_up_ms
            # What was learned of a slow engine may pass; a lower bound does not count on it.
            slow = row.ttft_correction if row.ttft_correction > 1.0 else 1.0
            self.ttft_ms_least = prefill_ms / slow + warm_up_ms
        decode_ms = 0.0
        self.decode_ms_least = 0.0
        gpu_ms = 0.0 if leg == DECODE else prefill_ms
        if leg != PREFILL:
            if request.completion_tokens_least > 1:
                slow = row.tpot_correction if row.tpot_correction > 1.0 else 1.0
                self.decode_ms_least = (
                    (request.completion_tokens_least - 1.0) * row.decode_ms_base / slow
                )
            decode_ms = (expected - 1.0) * tpot_ms if expected > 1.0 else 0.0
            gpu_ms += decode_gpu_ms(request, row)
        self.ttft_ms = ttft_ms
        self.tpot_ms = tpot_ms
        self.decode_ms = decode_ms
        self.e2e_ms = ttft_ms + decode_ms
        self.gpu_ms = gpu_ms
