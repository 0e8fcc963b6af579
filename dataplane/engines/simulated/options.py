"""Settings of a simulated engine: the GPU, the model, the limits, and the faults it may be told
to have.
"""

from typing import Literal

import msgspec

from dataplane.engines.base import EngineError

BLOCK_TOKENS = 16


class SimulatedOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options of kind `simulated`. GPU rates are per GPU; sizes in bytes, bytes/s and FLOP/s.

    The defaults are one H100 SXM (fp8) that serves Llama-3.1-8B in fp8 with a bf16 KV cache.
    `kv_tokens` 0 derives the KV pool from what the weights leave free; `speedup` divides every
    modelled time. `kv_connector` moves KV; `kv_lease_s` is how long it is held for another engine, and
    `kv_handshake_s` how long one that does not answer is waited for; `kv_load_failure_policy` is what becomes
    of a call whose KV does not come. `completion_tokens_mean` is the mean length of an answer that no limit cuts;
    in `split_characters_permille` of a thousand tokens the last character ends in the next one. With
    `draws_by_chance`, answers that are sampled without a seed are another each time. `wake_ms` 0 derives the
    time of a waking from `load_ms`.
    """

    hbm_bytes: int = 80_000_000_000
    bandwidth_bytes_per_s: float = 3.35e12
    flops_per_s: float = 1.978e15
    parameters: int = 8_030_000_000
    layers: int = 32
    hidden_size: int = 4096
    weights_bytes: int = 8_030_000_000
    kv_bytes_per_token: int = 131_072
    context_tokens_max: int = 131_072
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int = 0
    gpu_memory_utilization: float = 0.9
    kv_tokens: int = 0
    enable_prefix_caching: bool = True
    load_ms: int = 0
    wake_ms: int = 0
    speedup: float = 1.0
    completion_tokens_mean: int = 128
    split_characters_permille: int = 0
    draws_by_chance: bool = False
    transfer_bytes_per_s: float = 50e9
    transfer_latency_ms: float = 5.0
    kv_connector: Literal["", "nixl"] = "nixl"
    kv_lease_s: float = 30.0
    kv_handshake_s: float = 5.0
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    shutdown_timeout_s: float = 30.0
    allow_faults: bool = False
    fault_error_rate: float = 0.0
    fault_drop_before_first_byte: bool = False
    fault_cut_after_tokens: int = 0
    fault_error_after_tokens: int = 0
    fault_hang: bool = False
    fault_refuse: bool = False
    fault_slow_factor: float = 1.0


_POSITIVE = (
    "hbm_bytes", "bandwidth_bytes_per_s", "flops_per_s", "parameters", "layers", "hidden_size",
    "weights_bytes", "kv_bytes_per_token", "context_tokens_max", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "speedup", "completion_tokens_mean",
    "transfer_bytes_per_s", "kv_lease_s", "kv_handshake_s", "fault_slow_factor",
)  # fmt: skip


def check_options(options: SimulatedOptions, gpus: int) -> None:
    """Raise EngineError when a number makes no sense or the model does not fit."""
    for name in SimulatedOptions.__struct_fields__:
        value = getattr(options, name)
        if isinstance(value, str):
            continue
        if value < 0 or (name in _POSITIVE and value <= 0):
            raise EngineError(f"option `{name}` must be positive; it is {value}")
    if gpus < 1:
        raise EngineError(f"an engine needs at least one GPU; it has {gpus}")
    if options.gpu_memory_utilization > 1 or options.fault_error_rate > 1:
        raise EngineError("`gpu_memory_utilization` and `fault_error_rate` are at most 1")
    if kv_blocks(options, gpus) * BLOCK_TOKENS < options.context_tokens_max:
        raise EngineError(
            f"the KV cache holds {kv_blocks(options, gpus) * BLOCK_TOKENS} tokens, less than one"
            f" context of {options.context_tokens_max}; lower `context_tokens_max` or raise `gpus`"
        )


def kv_blocks(options: SimulatedOptions, gpus: int) -> int:
    """Blocks of KV cache: `kv_tokens`, or the usable HBM of all GPUs less the weights."""
    tokens = options.kv_tokens or int(
        (gpus * options.hbm_bytes * options.gpu_memory_utilization - options.weights_bytes)
        / options.kv_bytes_per_token
    )
    return max(0, tokens) // BLOCK_TOKENS
