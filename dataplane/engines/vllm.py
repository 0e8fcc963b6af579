"""A real `vllm serve`: its flags by role, and its numbers.

Facts of vLLM 0.32 that shape this file: a P/D pair needs the NIXL connector on both sides and a
port of its own for the side channel; usage has cached tokens only with `--enable-prompt-tokens-
details`; SIGTERM without `--shutdown-timeout` ends running streams as if they were complete.
"""

import shutil
from collections.abc import Sequence
from typing import Literal

import msgspec

from dataplane.engines.base import EngineCapacity, EngineError, Fetch, Launch, read_options
from dataplane.engines.exposition import read_capacity, read_telemetry
from dataplane.protocol.messages import EngineSpec, EngineTelemetry

ROLES = ("prefill", "decode", "both")

# `recompute`: a decode engine that can not pull the KV computes it, instead of failing the request.
_KV_TRANSFER = {
    "prefill": '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}',
    "decode": '{"kv_connector":"NixlConnector","kv_role":"kv_consumer",'
    '"kv_load_failure_policy":"recompute"}',
}


class VllmOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of kind `vllm`; each is the flag of `vllm serve` of the same name unless said
    otherwise.

    `executable`: the `vllm` to run, perhaps of another virtual environment. `model_path`: what is
    loaded when it is not the served name. `visible_devices`: the GPUs of this engine, as in
    CUDA_VISIBLE_DEVICES, needed when engines share a node. `max_num_seqs` is always passed, so
    that the seats are known.
    """

    executable: str = "vllm"
    model_path: str = ""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    max_num_queued_reqs: int = 0
    tensor_parallel_size: int = 0
    gpu_memory_utilization: float = 0.0
    kv_cache_memory_bytes: int = 0
    block_size: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    load_format: str = ""
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    scheduling_policy: Literal["", "fcfs", "priority"] = ""
    shutdown_timeout_s: int = 30
    visible_devices: str = ""
    startup_s_max: float = 1800.0


# Options that become `--name value` when they are set.
_VALUE_FLAGS = (
    "max_num_batched_tokens", "max_model_len", "max_num_queued_reqs", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "block_size", "dtype", "kv_cache_dtype", "quantization",
    "load_format", "tool_call_parser", "reasoning_parser", "scheduling_policy",
)  # fmt: skip
_SWITCHES = ("enforce_eager", "enable_auto_tool_choice")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class VllmKind:
    name = "vllm"
    health_path = "/health"
    metrics_path = "/metrics"
    # What runs on a node is the node's own word, never a command's.
    local_options = frozenset({"executable"})

    def check(self, spec: EngineSpec) -> None:
        options = read_options(spec, VllmOptions)
        if spec.role not in ROLES:
            raise EngineError(
                f"engine `{spec.engine_id}`: no role `{spec.role}`; there are: {', '.join(ROLES)}"
            )
        if (options.model_path or spec.model).startswith("-") or spec.model.startswith("-"):
            raise EngineError(f"engine `{spec.engine_id}`: a model's name can not start with `-`")
        if options.max_num_seqs < 1:
            raise EngineError(f"engine `{spec.engine_id}`: `max_num_seqs` must be at least 1")
        if options.startup_s_max <= 0 or options.shutdown_timeout_s < 0:
            raise EngineError(f"engine `{spec.engine_id}`: time limits must be positive")
        if shutil.which(options.executable) is None:
            raise EngineError(
                f"engine `{spec.engine_id}`: no executable `{options.executable}`; install vLLM"
                " (`pip install headway[vllm]`) or set option `executable` to the path of a `vllm`"
            )

    def ports_needed(self, spec: EngineSpec) -> int:
        """A P/D engine listens on a second port for transfers."""
        return 2 if spec.role in _KV_TRANSFER else 1

    def startup_s_max(self, spec: EngineSpec) -> float:
        return read_options(spec, VllmOptions).startup_s_max

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch:
        options = read_options(spec, VllmOptions)
        tensor_parallel_size = options.tensor_parallel_size or spec.gpus
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
        if tensor_parallel_size > 1:
            argv += ["--tensor-parallel-size", str(tensor_parallel_size)]
        for name in _VALUE_FLAGS:
            if value := getattr(options, name):
                argv.append(f"{_flag(name)}={value}")
        argv += [_flag(name) for name in _SWITCHES if getattr(options, name)]
        environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if options.visible_devices:
            environment["CUDA_VISIBLE_DEVICES"] = options.visible_devices
        if transfer := _KV_TRANSFER.get(spec.role):
            argv += ["--kv-transfer-config", transfer]
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports[1])
        return Launch(argv=tuple(argv), environment=environment)

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        seats = read_options(spec, VllmOptions).max_num_seqs
        return read_capacity(
            spec.engine_id, seats, await fetch(self.metrics_path), await fetch("/v1/models")
        )

    def telemetry(self, engine_id: str, exposition: bytes) -> EngineTelemetry:
        return read_telemetry(engine_id, exposition)
