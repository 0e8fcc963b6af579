"""A real `vllm serve`: its flags by role, profile and hardware, and its numbers.

Facts of vLLM 0.32 that shape this file: engines that move KV to each other need the same connector
(`kv_connectors.py`); usage has cached tokens only with `--enable-prompt-tokens-
details`; SIGTERM without `--shutdown-timeout` ends running streams as if they were complete.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from dataplane.engines.base import (
    EngineCapacity,
    EngineError,
    EngineTraits,
    Fetch,
    Launch,
    attached_port,
    read_options,
)
from dataplane.engines.exposition import read_adapters, read_capacity, read_telemetry
from dataplane.engines.kv_connectors import (
    BYTES_PER_GIB,
    MOONCAKE,
    HostCache,
    check_connector,
    check_host_cache,
    connector_of,
    declared,
    host_cache_flags,
    launch_flags,
    ports_of,
)
from dataplane.engines.kv_wire import (
    RANKED_STEM,
    REPLAY_MESSAGES,
    SOCKET_STEM,
    KvEndpoints,
    kv_sockets,
)
from dataplane.engines.profiles import read_pairs
from dataplane.protocol.messages import EngineSpec, EngineTelemetry, Feature, KvTransfer

ROLES = ("prefill", "decode", "both")

# Drafts are a model's own; these need its weights beside those of the engine's model.
_DRAFT_MODELS: Final = frozenset({"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator"})
_LOOKUPS: Final = frozenset({"ngram", "ngram_gpu"})
# The model says itself, or the method works out, how many tokens are drafted.
_OWN_TOKENS: Final = frozenset({"suffix", "mtp"})
_METHODS: Final = _DRAFT_MODELS | _LOOKUPS | _OWN_TOKENS
_ADAPTER_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# How an engine's devices are named, by the maker of the accelerator.
_DEVICES_VARIABLES: Final = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}


class VllmOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of kind `vllm`; each is the flag of `vllm serve` of the same name unless said
    otherwise.

    `executable`: the `vllm` to run, perhaps of another virtual environment. `attach`: the URL of a
    `vllm serve` on this node that runs already and is only watched; the other options then describe
    it. `model_path`: what is loaded when it is not the served name. `visible_devices`: the GPUs of this
    engine, needed when engines share a node, as the variable of `accelerator` names them. `max_num_seqs`
    is always passed, so that the seats are known; it is one rank's. `kv_connector` is how KV gets to and
    from other engines (`kv_connectors.py`), NIXL for engines of role prefill or decode unless it says
    otherwise; `kv_lease_s` is how long a prompt's KV is held for another engine, 0 as long as vLLM does;
    `kv_shared_folder` belongs to `shared_folder`. `speculative_*`: members of `--speculative-config`.
    `lora_adapters`: `name=path`, separated by commas. `lora_at_run_time` lets commands load further ones.
    `dev_mode` opens the endpoints by which the cache is reset, and with
    `enable_sleep_mode` those of sleep: to everybody who reaches the engine's port.
    """

    executable: str = "vllm"
    attach: str = ""
    model_path: str = ""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    max_num_queued_reqs: int = 0
    long_prefill_token_threshold: int = 0
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float = 0.0
    kv_cache_memory_bytes: int = 0
    block_size: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    load_format: str = ""
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Literal["", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = ""
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    dev_mode: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    scheduling_policy: Literal["", "fcfs", "priority"] = ""
    kv_offloading_backend: Literal["", "native", "lmcache"] = ""
    kv_offloading_size: float = 0.0
    speculative_method: str = ""
    speculative_tokens: int = 0
    speculative_model: str = ""
    speculative_draft_tensor_parallel_size: int = 0
    speculative_prompt_lookup_min: int = 0
    speculative_prompt_lookup_max: int = 0
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    lora_adapters: str = ""
    lora_at_run_time: bool = False
    shutdown_timeout_s: int = 30
    visible_devices: str = ""
    kv_connector: str = ""
    kv_shared_folder: str = ""
    kv_lease_s: int = 0
    kv_load_failure_policy: str = "recompute"
    accelerator: Literal["cuda", "rocm", "xpu"] = "cuda"
    startup_s_max: float = 1800.0


# Options that become `--name value` when they are set.
_VALUE_FLAGS = (
    "max_num_batched_tokens", "max_model_len", "max_num_queued_reqs",
    "long_prefill_token_threshold", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "block_size", "dtype", "kv_cache_dtype", "quantization", "load_format", "tool_call_parser",
    "reasoning_parser", "scheduling_policy", "prefix_caching_hash_algo",
)  # fmt: skip
_SWITCHES = ("enforce_eager", "enable_expert_parallel", "enable_sleep_mode")
_NOT_NEGATIVE = (
    "max_num_batched_tokens", "max_model_len", "max_num_queued_reqs",
    "long_prefill_token_threshold", "tensor_parallel_size", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "block_size", "kv_lease_s", "kv_offloading_size",
    "speculative_tokens", "speculative_draft_tensor_parallel_size",
    "speculative_prompt_lookup_min", "speculative_prompt_lookup_max", "max_loras",
    "max_lora_rank", "max_cpu_loras", "shutdown_timeout_s",
)  # fmt: skip
_POSITIVE = (
    "max_num_seqs", "pipeline_parallel_size", "data_parallel_size", "startup_s_max",
)  # fmt: skip


def _kv_events(endpoints: KvEndpoints) -> str:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints.events,
        "replay_endpoint": endpoints.replay,
        "buffer_steps": REPLAY_MESSAGES,
    }
    return msgspec.json.encode(config).decode()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


PROFILE_OPTIONS: Final[Mapping[str, str]] = {
    "context_tokens_max": "max_model_len",
    "eager": "enforce_eager",
    "parallel.tensor": "tensor_parallel_size",
    "parallel.pipeline": "pipeline_parallel_size",
    "parallel.data": "data_parallel_size",
    "parallel.experts": "enable_expert_parallel",
    "batch.seats": "max_num_seqs",
    "batch.tokens_per_step": "max_num_batched_tokens",
    "batch.chunked_prefill": "enable_chunked_prefill",
    "batch.long_prompt_tokens": "long_prefill_token_threshold",
    "batch.queued_calls_max": "max_num_queued_reqs",
    "batch.order": "scheduling_policy",
    "prefix_cache.enabled": "enable_prefix_caching",
    "prefix_cache.hash": "prefix_caching_hash_algo",
    "kv_cache.dtype": "kv_cache_dtype",
    "kv_cache.block_tokens": "block_size",
    "kv_cache.bytes": "kv_cache_memory_bytes",
    "kv_cache.memory_ratio": "gpu_memory_utilization",
    "kv_offload.backend": "kv_offloading_backend",
    "kv_offload.host_gib": "kv_offloading_size",
    "kv_transfer.connector": "kv_connector",
    "kv_transfer.on_failure": "kv_load_failure_policy",
    "kv_transfer.lease_s": "kv_lease_s",
    "kv_transfer.folder": "kv_shared_folder",
    "speculative.method": "speculative_method",
    "speculative.tokens": "speculative_tokens",
    "speculative.model": "speculative_model",
    "speculative.draft_tensor": "speculative_draft_tensor_parallel_size",
    "speculative.lookup_tokens_min": "speculative_prompt_lookup_min",
    "speculative.lookup_tokens_max": "speculative_prompt_lookup_max",
    "weights.quantization": "quantization",
    "weights.dtype": "dtype",
    "weights.load_format": "load_format",
    "adapters.slots": "max_loras",
    "adapters.rank_max": "max_lora_rank",
    "adapters.host_slots": "max_cpu_loras",
    "adapters.at_run_time": "lora_at_run_time",
    "adapters.loaded": "lora_adapters",
    "sleep.enabled": "enable_sleep_mode",
    "answers.tool_calls": "tool_call_parser",
    "answers.reasoning": "reasoning_parser",
}


class VllmKind:
    name = "vllm"
    health_path = "/health"
    metrics_path = "/metrics"
    # What runs on a node, which server there is watched and where prompts' KV is written is the node's own
    # word, never a command's.
    local_options = frozenset({"executable", "attach", "kv_shared_folder"})
    profile_options = PROFILE_OPTIONS

    def check_settings(self, spec: EngineSpec) -> None:
        options = read_options(spec, VllmOptions)
        try:
            _check(spec, options)
        except ValueError as error:
            raise EngineError(f"engine `{spec.engine_id}`: {error}") from error
        check_connector(
            spec,
            options.kv_connector,
            options.kv_shared_folder,
            options.kv_load_failure_policy,
            lease_s=options.kv_lease_s,
            ranks=options.data_parallel_size,
            pipeline=options.pipeline_parallel_size,
        )
        check_host_cache(
            spec,
            HostCache(gib=options.kv_offloading_size, backend=options.kv_offloading_backend),
            has_prefix_cache=options.enable_prefix_caching,
        )

    def check(self, spec: EngineSpec) -> None:
        self.check_settings(spec)
        options = read_options(spec, VllmOptions)
        if not options.attach and shutil.which(options.executable) is None:
            raise EngineError(
                f"engine `{spec.engine_id}`: no executable `{options.executable}`; install vLLM"
                " (`pip install headway[vllm]`) or set option `executable` to the path of a `vllm`"
            )

    def traits(self, spec: EngineSpec) -> EngineTraits:
        options = read_options(spec, VllmOptions)
        lacks = set()
        if not options.enable_prefix_caching:
            lacks |= {Feature.PREFIX_CACHE, Feature.PREFIX_REPORTS, Feature.KV_EVENTS}
        if options.attach:
            # Where it publishes, if it does, is not known.
            lacks.add(Feature.KV_EVENTS)
        ranks = options.data_parallel_size
        gpus = spec.gpus // ranks
        shares_experts = options.enable_expert_parallel
        return EngineTraits(
            gpus=gpus,
            ranks=ranks,
            has_ranks=ranks > 1,
            pipeline=options.pipeline_parallel_size,
            expert_gpus=spec.gpus if shares_experts else 0,
            speculative_tokens=options.speculative_tokens,
            kv_host_bytes=int(options.kv_offloading_size * BYTES_PER_GIB) // ranks,
            adapter_slots=options.max_loras,
            adapters=tuple(read_pairs(options.lora_adapters)),
            lacks=frozenset(lacks),
        )

    def ports_needed(self, spec: EngineSpec) -> int:
        """The HTTP server's, then the connector's: one for each data-parallel rank, counting up."""
        options = read_options(spec, VllmOptions)
        return 1 + ports_of(
            connector_of(spec.role, options.kv_connector), options.data_parallel_size
        )

    def ports_given(self, spec: EngineSpec, host: str) -> list[int]:
        attach = read_options(spec, VllmOptions).attach
        return [attached_port(attach, host)] if attach else []

    def transfer(self, spec: EngineSpec, ports: Sequence[int]) -> KvTransfer | None:
        options = read_options(spec, VllmOptions)
        return declared(
            spec,
            connector_of(spec.role, options.kv_connector),
            ports,
            shared_folder=options.kv_shared_folder,
            lease_s=options.kv_lease_s,
        )

    def startup_s_max(self, spec: EngineSpec) -> float:
        return read_options(spec, VllmOptions).startup_s_max

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch:
        options = read_options(spec, VllmOptions)
        if options.attach:
            # Ending it ends nothing else: the server that is watched is not the agent's.
            return Launch(argv=(sys.executable, "-m", "dataplane.engines.attached"))
        argv = [
            options.executable, "serve", options.model_path or spec.model,
            "--served-model-name", spec.model,
            "--host", host, "--port", str(ports[0]),
            "--max-num-seqs", str(options.max_num_seqs),
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
            "--shutdown-timeout", str(options.shutdown_timeout_s),
            "--enable-prefix-caching" if options.enable_prefix_caching
            else "--no-enable-prefix-caching",
        ]  # fmt: skip
        if not options.enable_chunked_prefill:
            argv.append("--no-enable-chunked-prefill")
        for name, size in (
            ("tensor_parallel_size", _tensor(spec, options)),
            ("pipeline_parallel_size", options.pipeline_parallel_size),
            ("data_parallel_size", options.data_parallel_size),
        ):
            if size > 1:
                argv += [_flag(name), str(size)]
        for name in _VALUE_FLAGS:
            if value := getattr(options, name):
                argv.append(f"{_flag(name)}={value}")
        argv += [_flag(name) for name in _SWITCHES if getattr(options, name)]
        if options.lora_at_run_time and options.data_parallel_size > 1:
            # Only the API server that was asked would know of a loaded adapter, and vLLM refuses to.
            argv += ["--api-server-count", "1"]
        if options.enable_auto_tool_choice or options.tool_call_parser:
            argv.append("--enable-auto-tool-choice")
        argv += _speculative(options)
        argv += _adapters(options)
        environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if options.dev_mode or options.enable_sleep_mode:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        if options.visible_devices:
            environment[_DEVICES_VARIABLES[options.accelerator]] = options.visible_devices
        if options.lora_at_run_time:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        cache = HostCache(gib=options.kv_offloading_size, backend=options.kv_offloading_backend)
        if connector := connector_of(spec.role, options.kv_connector):
            flags, more = launch_flags(
                spec,
                connector,
                host,
                ports,
                shared_folder=options.kv_shared_folder,
                lease_s=options.kv_lease_s,
                policy=options.kv_load_failure_policy,
                cache=cache,
            )
            argv += flags
            environment |= more
        else:
            argv += host_cache_flags(cache)
        if endpoints := self.kv_endpoints(spec, host, ports[0]):
            argv += ["--kv-events-config", _kv_events(endpoints)]
        return Launch(argv=tuple(argv), environment=environment)

    def kv_endpoints(self, spec: EngineSpec, host: str, port: int) -> KvEndpoints | None:
        """Of the first rank, where there are several. None without a prefix cache, of a server that is only
        watched, and where no private socket can be made.
        """
        options = read_options(spec, VllmOptions)
        if options.attach or not options.enable_prefix_caching:
            return None
        try:
            stem = RANKED_STEM if options.data_parallel_size > 1 else SOCKET_STEM
            return kv_sockets(host, port, stem)
        except (EngineError, OSError):
            return None

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        options = read_options(spec, VllmOptions)
        return read_capacity(
            spec.engine_id,
            options.max_num_seqs * options.data_parallel_size,
            await fetch(self.metrics_path),
            await fetch("/v1/models"),
            spec.model,
        )

    async def loaded_adapters(self, spec: EngineSpec, fetch: Fetch) -> frozenset[str]:
        return read_adapters(spec.engine_id, await fetch("/v1/models"))

    def telemetry(self, engine_id: str, exposition: bytes, rank: int = -1) -> EngineTelemetry:
        return read_telemetry(engine_id, exposition, rank)


def _speculative(options: VllmOptions) -> list[str]:
    if not options.speculative_method:
        return []
    members = {
        "method": options.speculative_method,
        "num_speculative_tokens": options.speculative_tokens,
        "model": options.speculative_model,
        "draft_tensor_parallel_size": options.speculative_draft_tensor_parallel_size,
        "prompt_lookup_min": options.speculative_prompt_lookup_min,
        "prompt_lookup_max": options.speculative_prompt_lookup_max,
    }
    said = {name: value for name, value in members.items() if value}
    return ["--speculative-config", msgspec.json.encode(said).decode()]


def _adapters(options: VllmOptions) -> list[str]:
    if not options.max_loras:
        return []
    argv = ["--enable-lora", "--max-loras", str(options.max_loras)]
    if options.max_lora_rank:
        argv += ["--max-lora-rank", str(options.max_lora_rank)]
    if options.max_cpu_loras:
        argv += ["--max-cpu-loras", str(options.max_cpu_loras)]
    pairs = read_pairs(options.lora_adapters)
    if pairs:
        argv += ["--lora-modules", *(f"{name}={path}" for name, path in pairs.items())]
    return argv


def _tensor(spec: EngineSpec, options: VllmOptions) -> int:
    others = options.pipeline_parallel_size * options.data_parallel_size
    return options.tensor_parallel_size or max(1, spec.gpus // others)


# ---------------------------------------------------------------- what contradicts itself


def _check(spec: EngineSpec, options: VllmOptions) -> None:
    """Raise ValueError, in words for the operator, when no engine can be like this."""
    if spec.role not in ROLES:
        raise ValueError(f"no role `{spec.role}`; there are: {', '.join(ROLES)}")
    if (options.model_path or spec.model).startswith("-") or spec.model.startswith("-"):
        raise ValueError("a model's name can not start with `-`")
    for name in _NOT_NEGATIVE:
        if getattr(options, name) < 0:
            raise ValueError(f"`{name}` can not be negative")
    for name in _POSITIVE:
        if getattr(options, name) <= 0:
            raise ValueError(f"`{name}` must be at least 1")
    if options.gpu_memory_utilization > 1:
        raise ValueError("`gpu_memory_utilization` is at most 1")
    if options.enable_auto_tool_choice and not options.tool_call_parser:
        raise ValueError("`enable_auto_tool_choice` needs a `tool_call_parser`")
    _check_gpus(spec, options)
    _check_batch(options)
    _check_speculative(options)
    _check_adapters(spec, options)
    if not options.enable_prefix_caching and options.prefix_caching_hash_algo:
        raise ValueError("`prefix_caching_hash_algo` is of no use without prefix caching")
    if options.attach:
        attached_port(options.attach)
        if options.kv_connector == MOONCAKE:
            raise ValueError(f"the `{MOONCAKE}` port of an attached server is not known")


def _check_gpus(spec: EngineSpec, options: VllmOptions) -> None:
    tensor, pipeline, data = (
        _tensor(spec, options),
        options.pipeline_parallel_size,
        options.data_parallel_size,
    )
    if tensor * pipeline * data != spec.gpus:
        raise ValueError(
            f"it has `gpus: {spec.gpus}`, but tensor {tensor} x pipeline {pipeline} x data {data}"
            f" parallel take {tensor * pipeline * data}"
        )
    if options.enable_expert_parallel and tensor * data == 1:
        raise ValueError(
            "experts are shared by tensor and data parallel GPUs, and there is only one"
        )


def _check_batch(options: VllmOptions) -> None:
    tokens, context = options.max_num_batched_tokens, options.max_model_len
    if not options.enable_chunked_prefill and 0 < tokens < context:
        raise ValueError(
            f"without chunked prefill a step must hold a whole prompt, but {tokens} tokens a step"
            f" are less than the context of {context}"
        )
    if 0 < tokens < options.max_num_seqs:
        raise ValueError(
            f"{options.max_num_seqs} sequences decode a token each in a step of {tokens} tokens;"
            " raise the tokens or lower the seats"
        )


def _check_speculative(options: VllmOptions) -> None:
    method, model = options.speculative_method, options.speculative_model
    if not method:
        for name in VllmOptions.__struct_fields__:
            if name.startswith("speculative_") and getattr(options, name):
                raise ValueError(f"`{name}` is set without a `speculative_method`")
        return
    if method not in _METHODS:
        raise ValueError(
            f"no speculative method `{method}`; there are: {', '.join(sorted(_METHODS))}"
        )
    if method in _DRAFT_MODELS and not model:
        raise ValueError(f"the speculative method `{method}` needs a `speculative_model`")
    if method not in _DRAFT_MODELS and model:
        raise ValueError(f"the speculative method `{method}` takes no model of its own")
    if method not in _OWN_TOKENS and not options.speculative_tokens:
        raise ValueError(f"the speculative method `{method}` needs `speculative_tokens`")
    least, most = options.speculative_prompt_lookup_min, options.speculative_prompt_lookup_max
    if method not in _LOOKUPS and (least or most):
        raise ValueError(f"the speculative method `{method}` looks nothing up in the prompt")
    if least and most and least > most:
        raise ValueError(f"it looks up at least {least} and at most {most} tokens in the prompt")
    if options.speculative_draft_tensor_parallel_size and method not in _DRAFT_MODELS:
        raise ValueError(f"the speculative method `{method}` has no draft model to spread")


def _check_adapters(spec: EngineSpec, options: VllmOptions) -> None:
    pairs = read_pairs(options.lora_adapters)
    if not options.max_loras:
        for name in ("max_lora_rank", "max_cpu_loras", "lora_adapters", "lora_at_run_time"):
            if getattr(options, name):
                raise ValueError(f"`{name}` is set without slots for adapters (`max_loras`)")
        return
    if options.max_lora_rank and options.max_lora_rank not in _ADAPTER_RANKS:
        raise ValueError(
            f"`max_lora_rank` is {options.max_lora_rank}; vLLM takes"
            f" {', '.join(map(str, _ADAPTER_RANKS))}"
        )
    if 0 < options.max_cpu_loras < options.max_loras:
        raise ValueError(
            f"{options.max_cpu_loras} adapters in host memory can not fill {options.max_loras} slots"
        )
    if spec.model in pairs:
        raise ValueError(f"an adapter can not have the name of its model `{spec.model}`")
