"""Fleets to simulate: four by name, any other from a cluster document.

Prices and rates are data with a source; rates are dense FLOP/s at the precision of the served model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

from cli.documents import read_cluster
from cli.failure import CommandFailure, ExitCode
from cli.simulate.contracts import EngineSpec, FleetSpec
from controlplane.domain.catalog import GpuType, Model, Role
from controlplane.domain.ids import GpuTypeName, ModelName
from controlplane.store.cluster import ClusterDocument

_GB: Final = 1_000_000_000
PRICE_SOURCE: Final = "price index, median of on-demand offers"
PRICE_DATE: Final = "2026-09-30"
ENGINES_MAX: Final = 256


def gpu_type(
    name: str, *, hbm_gb: int, tb_per_s: float, tflops: float, usd_per_hour: float
) -> GpuType:
    """Rates per GPU: GB of memory, TB/s, dense TFLOP/s; the price on demand."""
    return GpuType(
        name=GpuTypeName(name),
        hbm_bytes=hbm_gb * _GB,
        bandwidth_bytes_per_s=tb_per_s * 1e12,
        flops_per_s=tflops * 1e12,
        price_micro_usd_per_hour=round(usd_per_hour * 1e6),
        price_source=PRICE_SOURCE,
        price_date=PRICE_DATE,
    )


# Vendors' data sheets as in NVIDIA aiconfigurator's system files (Apache-2.0): fp8 where the GPU has
# fp8 (H100, L40S), else bf16. Prices: middle of the published ranges of 2026.
H100_FP8: Final = gpu_type("h100-sxm", hbm_gb=80, tb_per_s=3.35, tflops=1_978, usd_per_hour=3.25)
A100: Final = gpu_type("a100-80", hbm_gb=80, tb_per_s=2.039, tflops=312, usd_per_hour=1.50)
L40S_FP8: Final = gpu_type("l40s", hbm_gb=48, tb_per_s=0.864, tflops=733, usd_per_hour=1.15)

# Llama-3.1-70B (80 layers, 8 KV heads of 128) with weights and KV in fp8.
LLAMA_70B_FP8: Final = Model(
    name=ModelName("llama-3.1-70b"),
    parameters=70_600_000_000,
    layers=80,
    hidden_size=8_192,
    weights_bytes=70_600_000_000,
    kv_bytes_per_token=163_840,
    context_tokens_max=131_072,
    load_ms=40_000,
    price_prompt_micro_usd_per_mtok=600_000,
    price_cached_micro_usd_per_mtok=150_000,
    price_completion_micro_usd_per_mtok=1_200_000,
)
# Llama-3.1-8B (32 layers, 8 KV heads of 128) in bf16.
LLAMA_8B: Final = Model(
    name=ModelName("llama-3.1-8b"),
    parameters=8_030_000_000,
    layers=32,
    hidden_size=4_096,
    weights_bytes=16_060_000_000,
    kv_bytes_per_token=131_072,
    context_tokens_max=131_072,
    load_ms=10_000,
    price_prompt_micro_usd_per_mtok=100_000,
    price_cached_micro_usd_per_mtok=25_000,
    price_completion_micro_usd_per_mtok=200_000,
)

GPUS_PER_ENGINE: Final = 4
# What deadlines are measured on, and what capacity is told in.
REFERENCE: Final = EngineSpec(
    name="reference", model=LLAMA_70B_FP8, gpu=H100_FP8, gpus=GPUS_PER_ENGINE
)
_NAMED: Final = {
    "homogeneous": (H100_FP8,) * 4,
    "mixed": (H100_FP8, H100_FP8, A100, A100, L40S_FP8, L40S_FP8),
    "pairs": (H100_FP8,) * 4,
    "pairs-even": (H100_FP8,) * 4,
}
# Of fleets whose engines do not all do both; the first one can serve alone.
_ROLES: Final = {
    "pairs": (Role.DECODE, Role.PREFILL, Role.DECODE, Role.DECODE),
    "pairs-even": (Role.DECODE, Role.PREFILL, Role.DECODE, Role.PREFILL),
}


def fleet(name: str) -> FleetSpec:
    """`homogeneous`: 4 engines of 4 H100. `mixed`: 2 each of 4 H100, 4 A100, 4 L40S. `pairs`: as
    homogeneous, but one computes prompts for the others. `pairs-even`: two do, for the other two. Else a
    file.

    A file is a cluster document as `headway apply` takes it: its engines, on its GPU types and models.
    Raises CommandFailure when there is no such file, or it has no engines.
    """
    if name in _NAMED:
        return FleetSpec(
            name=name,
            engines=tuple(
                replace(
                    REFERENCE,
                    name=f"{gpu.name}-{number}",
                    node=f"node-{number}",
                    gpu=gpu,
                    role=_ROLES[name][number] if name in _ROLES else Role.BOTH,
                )
                for number, gpu in enumerate(_NAMED[name])
            ),
        )
    path = Path(name)
    if not path.is_file():
        raise CommandFailure(
            ExitCode.USAGE,
            f"no fleet and no file is called `{name}`",
            "use homogeneous, mixed, pairs, pairs-even or a cluster document",
        )
    return from_document(name, read_cluster(path))


def from_document(name: str, document: ClusterDocument) -> FleetSpec:
    """The engines of a cluster document, each on its node's GPUs. Raises CommandFailure when it has none."""
    gpus = {entry.name: entry for entry in document.gpu_types}
    models = {entry.name: entry for entry in document.models}
    engines = tuple(
        EngineSpec(
            name=engine.engine_id,
            model=Model(**models[engine.model].model_dump()),
            gpu=GpuType(**gpus[node.gpu_type].model_dump()),
            gpus=engine.gpus,
            role=Role(engine.role),
            region=node.region,
            node=node.id,
        )
        for node in document.nodes
        for engine in node.engines
    )
    if not engines:
        raise CommandFailure(ExitCode.USAGE, f"`{name}` declares no engine")
    return FleetSpec(name=name, engines=engines)


def sized(base: FleetSpec, engines: int) -> FleetSpec:
    """As many engines as asked for, going round through those of `base` in order."""
    return FleetSpec(
        name=base.name,
        engines=tuple(
            replace(
                base.engines[number % len(base.engines)],
                name=f"{base.engines[number % len(base.engines)].gpu.name}-{number}",
                node=f"node-{number}",
            )
            for number in range(max(1, min(ENGINES_MAX, engines)))
        ),
    )
