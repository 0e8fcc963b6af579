"""How an agent starts a simulated engine. Imports nothing of its server."""

import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dataplane.engines.base import (
    EngineCapacity,
    EngineError,
    EngineTraits,
    Fetch,
    Launch,
    read_options,
)
from dataplane.engines.exposition import read_adapters, read_capacity, read_telemetry
from dataplane.engines.kv_wire import KvEndpoints, kv_sockets
from dataplane.engines.simulated.options import SimulatedOptions, check_options
from dataplane.protocol.messages import EngineSpec, EngineTelemetry, Feature, KvTransfer

# Beyond the modelled load time, for the interpreter to start on a busy machine.
START_MARGIN_S = 30.0

# What an engine without a prefix cache has not.
_OF_PREFIX_CACHE: Final = frozenset(
    {Feature.PREFIX_CACHE, Feature.PREFIX_REPORTS, Feature.KV_EVENTS}
)

PROFILE_OPTIONS: Final[Mapping[str, str]] = {
    "context_tokens_max": "context_tokens_max",
    "batch.seats": "max_num_seqs",
    "batch.tokens_per_step": "max_num_batched_tokens",
    "batch.queued_calls_max": "max_num_queued_reqs",
    "prefix_cache.enabled": "enable_prefix_caching",
    "kv_cache.memory_ratio": "gpu_memory_utilization",
}


class SimulatedKind:
    name = "simulated"
    health_path = "/health"
    metrics_path = "/metrics"
    local_options: frozenset[str] = frozenset()
    profile_options = PROFILE_OPTIONS

    def check_settings(self, spec: EngineSpec) -> None:
        self.check(spec)

    def check(self, spec: EngineSpec) -> None:
        if spec.role not in {"prefill", "decode", "both"}:
            raise EngineError(f"engine `{spec.engine_id}`: no role `{spec.role}`")
        try:
            check_options(read_options(spec, SimulatedOptions), spec.gpus)
        except EngineError as error:
            raise EngineError(f"engine `{spec.engine_id}`: {error}") from error

    def traits(self, spec: EngineSpec) -> EngineTraits:
        options = read_options(spec, SimulatedOptions)
        return EngineTraits(
            gpus=spec.gpus,
            # Whatever is loaded, every sequence of a batch can be another adapter's.
            adapter_slots=options.max_num_seqs,
            lacks=frozenset() if options.enable_prefix_caching else _OF_PREFIX_CACHE,
        )

    def ports_needed(self, spec: EngineSpec) -> int:
        del spec
        return 1

    def ports_given(self, spec: EngineSpec, host: str) -> list[int]:
        del spec, host
        return []

    def transfer(self, spec: EngineSpec, ports: Sequence[int]) -> KvTransfer | None:
        """It can give and take in every role, as vLLM with `kv_role: kv_both`."""
        del ports
        options = read_options(spec, SimulatedOptions)
        if not options.kv_connector:
            return None
        return KvTransfer(connector=options.kv_connector, lease_s=options.kv_lease_s)

    def startup_s_max(self, spec: EngineSpec) -> float:
        options = read_options(spec, SimulatedOptions)
        return START_MARGIN_S + options.load_ms / 1000 / options.speedup

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch:
        argv = [
            sys.executable, "-m", "dataplane.engines.simulated",
            "--host", host, "--port", str(ports[0]),
            "--model", spec.model, "--gpus", str(spec.gpus),
            "--options", msgspec.json.encode(spec.options).decode(),
        ]  # fmt: skip
        if endpoints := self.kv_endpoints(spec, host, ports[0]):
            argv += ["--kv-events", endpoints.events, "--kv-replay", endpoints.replay]
        return Launch(argv=tuple(argv))

    def kv_endpoints(self, spec: EngineSpec, host: str, port: int) -> KvEndpoints | None:
        """None without a prefix cache, and where no private socket can be made."""
        if not read_options(spec, SimulatedOptions).enable_prefix_caching:
            return None
        try:
            return kv_sockets(host, port)
        except (EngineError, OSError):
            return None

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        seats = read_options(spec, SimulatedOptions).max_num_seqs
        return read_capacity(
            spec.engine_id, seats, await fetch(self.metrics_path), await fetch("/v1/models")
        )

    async def loaded_adapters(self, spec: EngineSpec, fetch: Fetch) -> frozenset[str]:
        return read_adapters(spec.engine_id, await fetch("/v1/models"))

    def telemetry(self, engine_id: str, exposition: bytes, rank: int = -1) -> EngineTelemetry:
        return read_telemetry(engine_id, exposition, rank)
