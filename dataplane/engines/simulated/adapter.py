"""How an agent starts a simulated engine. Imports nothing of its server."""

import sys
from collections.abc import Sequence

import msgspec

from dataplane.engines.base import EngineCapacity, EngineError, Fetch, Launch, read_options
from dataplane.engines.exposition import read_capacity, read_telemetry
from dataplane.engines.simulated.options import SimulatedOptions, check_options
from dataplane.protocol.messages import EngineSpec, EngineTelemetry

# Beyond the modelled load time, for the interpreter to start on a busy machine.
START_MARGIN_S = 30.0


class SimulatedKind:
    name = "simulated"
    health_path = "/health"
    metrics_path = "/metrics"
    local_options: frozenset[str] = frozenset()

    def check(self, spec: EngineSpec) -> None:
        if spec.role not in {"prefill", "decode", "both"}:
            raise EngineError(f"engine `{spec.engine_id}`: no role `{spec.role}`")
        try:
            check_options(read_options(spec, SimulatedOptions), spec.gpus)
        except EngineError as error:
            raise EngineError(f"engine `{spec.engine_id}`: {error}") from error

    def ports_needed(self, spec: EngineSpec) -> int:
        del spec
        return 1

    def startup_s_max(self, spec: EngineSpec) -> float:
        options = read_options(spec, SimulatedOptions)
        return START_MARGIN_S + options.load_ms / 1000 / options.speedup

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch:
        return Launch(
            argv=(
                sys.executable, "-m", "dataplane.engines.simulated",
                "--host", host, "--port", str(ports[0]),
                "--model", spec.model, "--gpus", str(spec.gpus),
                "--options", msgspec.json.encode(spec.options).decode(),
            )
        )  # fmt: skip

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        seats = read_options(spec, SimulatedOptions).max_num_seqs
        return read_capacity(
            spec.engine_id, seats, await fetch(self.metrics_path), await fetch("/v1/models")
        )

    def telemetry(self, engine_id: str, exposition: bytes) -> EngineTelemetry:
        return read_telemetry(engine_id, exposition)
