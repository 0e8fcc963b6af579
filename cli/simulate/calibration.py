"""`headway simulate calibrate`: the performance model against tables of measured engines, GPU type by GPU type.

Reads aiconfigurator's silicon table (vLLM rows) and Splitwise's performance table where HEADWAY_TRACES
points to a folder that holds them.
"""

import csv
import gzip
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.failure import CommandFailure, ExitCode
from cli.output import Output, table
from controlplane.domain.catalog import GpuType, Model
from controlplane.domain.ids import GpuTypeName, ModelName
from controlplane.scheduler.calibrate import (
    Calibration,
    Miss,
    Run,
    decode_features,
    is_saturated,
    judge,
    prefill_features,
)

TRACES_VARIABLE: Final = "HEADWAY_TRACES"
VLLM_TABLE: Final = "engine_times_vllm.csv.gz"
SPLITWISE_TABLE: Final = "engine_times_splitwise.csv.gz"
ROWS_MAX: Final = 100_000
ERROR_RATIO_AIM: Final = 0.10
# With so few calls at a time a first token waits for hardly any other prompt.
ALONE_CALLS_MAX: Final = 4

GIGA: Final = 1e9
TERA: Final = 1e12
FP8_BYTES: Final = 1.0
BF16_BYTES: Final = 2.0
# Four bits and a scale: NVFP4 one byte for 16 weights, MXFP4 one for 32, int4 groups of 32 two bytes.
FP4_BYTES: Final = 0.5625


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published architecture. Counts of parameters; `kv_elements` per token and layer."""

    family: str
    parameters: float
    active: float
    layers: int
    hidden: int
    kv_elements: int
    kv_heads: int
    experts: int = 0
    experts_active: int = 0
    expert_size: int = 0
    # Share of the context that a token attends to on average in layers with a sliding window, by 2.
    window_tokens: int = 0


# From the models' published configurations (config.json of each repository on Hugging Face); the
# parameters of experts are layers x experts x 3 x hidden x expert size.
SHAPES: Final = {
    "meta-llama/Llama-3.1-70B": Shape(
        family="dense GQA", parameters=70.55e9, active=70.55e9, layers=80, hidden=8_192,
        kv_elements=2_048, kv_heads=8,
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP8": Shape(
        family="dense GQA", parameters=8.03e9, active=8.03e9, layers=32, hidden=4_096,
        kv_elements=2_048, kv_heads=8,
    ),
    "Qwen/Qwen3-32B": Shape(
        family="dense GQA", parameters=32.76e9, active=32.76e9, layers=64, hidden=5_120,
        kv_elements=2_048, kv_heads=8,
    ),
    "Qwen/Qwen3-235B-A22B-FP8": Shape(
        family="MoE GQA", parameters=235.1e9, active=22.2e9, layers=94, hidden=4_096,
        kv_elements=1_024, kv_heads=4, experts=128, experts_active=8, expert_size=1_536,
    ),
    "MiniMaxAI/MiniMax-M2.5": Shape(
        family="MoE GQA", parameters=228.7e9, active=10.0e9, layers=62, hidden=3_072,
        kv_elements=2_048, kv_heads=8, experts=256, experts_active=8, expert_size=1_536,
    ),
    "openai/gpt-oss-120b": Shape(
        family="MoE GQA", parameters=116.8e9, active=5.1e9, layers=36, hidden=2_880,
        kv_elements=1_024, kv_heads=8, experts=128, experts_active=4, expert_size=2_880,
        window_tokens=128,
    ),
    "moonshotai/Kimi-K2.5": Shape(
        family="MoE MLA", parameters=1_026e9, active=32.0e9, layers=61, hidden=7_168,
        kv_elements=576, kv_heads=1, experts=384, experts_active=8, expert_size=2_048,
    ),
    "llama2-70b": Shape(
        family="dense GQA", parameters=68.98e9, active=68.98e9, layers=80, hidden=8_192,
        kv_elements=2_048, kv_heads=8,
    ),
    "bloom-176b": Shape(
        family="dense MHA", parameters=176.2e9, active=176.2e9, layers=70, hidden=14_336,
        kv_elements=28_672, kv_heads=112,
    ),
}  # fmt: skip


def _gpu(
    name: str, hbm_gb: float, tb_per_s: float, bf16: float, fp8: float = 0.0, fp4: float = 0.0
) -> GpuType:
    """Rates from the vendors' data sheets, dense, as aiconfigurator's system files have them."""
    return GpuType(
        name=GpuTypeName(name),
        hbm_bytes=int(hbm_gb * GIGA),
        bandwidth_bytes_per_s=tb_per_s * TERA,
        flops_per_s=bf16 * TERA,
        price_micro_usd_per_hour=0,
        price_source="",
        price_date="",
        fp8_flops_per_s=fp8 * TERA,
        fp4_flops_per_s=fp4 * TERA,
    )


GPUS: Final = {
    "h100_sxm": _gpu("H100 SXM", 80, 3.35, 989, 1_978),
    "h200_sxm": _gpu("H200 SXM", 141, 4.8, 989, 1_978),
    "b200_sxm": _gpu("B200 SXM", 180, 7.7, 2_250, 4_500, 9_000),
    "b300_sxm": _gpu("B300 SXM", 288, 7.75, 2_250, 4_500, 13_500),
    "a100-80gb": _gpu("A100 80 SXM", 80, 2.039, 312),
    "h100-80gb": _gpu("H100 SXM", 80, 3.35, 989, 1_978),
}

# Bytes of a weight of the experts, or of all where there are none, by the precision told; attention
# and router of models in four bits stay in bf16 where experts alone were quantised.
_BYTES: Final = {"fp8": FP8_BYTES, "fp4": FP4_BYTES, "int4": FP4_BYTES, "": BF16_BYTES}


def model_of(name: str, precision: str, kv_bytes: float, context_tokens: float) -> Model:
    """A model of the catalogue with the sizes of a published one. `kv_bytes` is per element."""
    shape = SHAPES[name]
    expert_parameters = 3.0 * shape.layers * shape.experts * shape.hidden * shape.expert_size
    bytes_each = _BYTES[precision]
    other_bytes = BF16_BYTES if expert_parameters and bytes_each < FP8_BYTES else bytes_each
    expert_weights = expert_parameters * bytes_each
    kv_per_token = shape.layers * shape.kv_elements * kv_bytes
    if shape.window_tokens:
        # Every other layer attends to a window only.
        kv_per_token *= 0.5 * (1.0 + min(1.0, shape.window_tokens / context_tokens))
    return Model(
        name=ModelName(name),
        parameters=int(shape.parameters),
        layers=shape.layers,
        hidden_size=shape.hidden,
        weights_bytes=int(expert_weights + (shape.parameters - expert_parameters) * other_bytes),
        kv_bytes_per_token=max(1, int(kv_per_token)),
        context_tokens_max=1,
        load_ms=0,
        price_prompt_micro_usd_per_mtok=0,
        price_cached_micro_usd_per_mtok=0,
        price_completion_micro_usd_per_mtok=0,
        parameters_active=int(shape.active) if shape.experts else 0,
        experts=shape.experts,
        experts_active=shape.experts_active,
        expert_weights_bytes=int(expert_weights),
        kv_heads=shape.kv_heads,
    )


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if number >= ROWS_MAX:
                raise CommandFailure(
                    ExitCode.FAILED, f"{path.name} has more than {ROWS_MAX:,} rows"
                )
            yield row


def vllm_runs(folder: Path) -> tuple[list[Run], Counter[str]]:
    """Runs of the silicon table that the model speaks of, and why how many others are left out.

    KV is counted as one byte an element: the table does not say, and the published fit counts so.
    """
    runs: list[Run] = []
    left_out: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    for row in _rows(folder / VLLM_TABLE):
        gpu, shape = GPUS.get(row["system"]), SHAPES.get(row["model_path"])
        if row["mode"] != "agg":
            left_out["prefill and decode on different engines"] += 1
            continue
        if gpu is None or shape is None or row["precision"] not in _BYTES:
            left_out["unknown system, model or precision"] += 1
            continue
        if int(row["attention_dp_size"] or 1) > 1:
            left_out["data-parallel attention"] += 1
            continue
        # Experts can be spread over more GPUs than attention is.
        gpus = max(int(row["tp_size"]), int(row["moe_tp_size"] or 1))
        key = (row["model_path"], row["system"], row["precision"], str(gpus), row["batch_size"],
               row["isl"], row["osl"], row["silicon_tpot_ms"])  # fmt: skip
        if key in seen:
            left_out["told twice"] += 1
            continue
        seen.add(key)
        prompt, completion = int(row["isl"]), int(row["osl"])
        run = Run(
            model=model_of(row["model_path"], row["precision"], 1.0, prompt + 0.5 * completion),
            # Four-bit integers are widened as they are read, floats of four bits are computed with.
            gpu=replace(gpu, fp4_flops_per_s=0.0) if row["precision"] == "int4" else gpu,
            gpus=gpus,
            family=shape.family,
            build=f"{row['model_path'].rpartition('/')[2]} {row['precision'] or 'bf16'}",
            concurrency=int(row["batch_size"]),
            prompt_tokens=prompt,
            completion_tokens=completion,
            ttft_ms=float(row["silicon_ttft_ms"]),
            tpot_ms=float(row["silicon_tpot_ms"]),
        )
        if is_saturated(run):
            left_out["calls waited for a seat"] += 1
            continue
        runs.append(run)
    return runs, left_out


def splitwise_runs(folder: Path) -> tuple[list[Run], Counter[str]]:
    """Batches of Splitwise's table (2023, fp16): all prompts at once, then all tokens in step."""
    runs: list[Run] = []
    left_out: Counter[str] = Counter()
    for row in _rows(folder / SPLITWISE_TABLE):
        gpu, shape = GPUS.get(row["hardware"]), SHAPES.get(row["model"])
        if gpu is None or shape is None:
            left_out["power-capped"] += 1
            continue
        prompt, completion = int(row["prompt_size"]), int(row["token_size"])
        run = Run(
            model=model_of(row["model"], "", BF16_BYTES, prompt + 0.5 * completion),
            gpu=gpu,
            gpus=int(row["tensor_parallel"]),
            family=shape.family,
            build=f"{row['model']} fp16",
            concurrency=int(row["batch_size"]),
            prompt_tokens=prompt,
            completion_tokens=completion,
            ttft_ms=float(row["prompt_time"]),
            tpot_ms=float(row["token_time"]),
            is_batch=True,
        )
        if is_saturated(run):
            left_out["more KV than fits"] += 1
            continue
        runs.append(run)
    return runs, left_out


def _tpot(run: Run) -> float:
    return run.tpot_ms or 0.0


def _ttft(run: Run) -> float:
    return run.ttft_ms or 0.0


# The five published coefficients, and what a mixture of experts adds.
_NONE: Final[frozenset[str]] = frozenset()
_DECODE: Final = frozenset(
    {
        "layer_ms",
        "layer_ms_per_doubling",
        "expert_layer_ms",
        "weights",
        "experts",
        "kv",
        "flop",
        "all_reduce",
    }
)
_PREFILL: Final = (_DECODE - {"kv", "layer_ms"}) | {"flop_queued", "prefill_layer_ms"}


def calibrations(runs: Sequence[Run]) -> dict[str, list[Calibration]]:
    """Ways to predict each time, by the time: the roofline as it stands, with a factor per model, and refit."""
    paced = [run for run in runs if run.tpot_ms]
    first = [run for run in runs if run.ttft_ms]
    alone = [run for run in first if run.is_batch or run.concurrency <= ALONE_CALLS_MAX]
    queued = frozenset({"flop_queued"})
    launched = queued | {"prefill_layer_ms"}
    told = {
        "tpot": [
            judge("as published", paced, decode_features, _tpot, fitted=_NONE),
            judge("published x model", paced, decode_features, _tpot, fitted=_NONE, with_factors=True),
            judge("refit", paced, decode_features, _tpot, fitted=_DECODE),
            judge("refit x model", paced, decode_features, _tpot, fitted=_DECODE, with_factors=True),
        ]
    }  # fmt: skip
    for name, chosen in ((f"ttft, up to {ALONE_CALLS_MAX} calls", alone), ("ttft", first)):
        told[name] = [
            judge("as published", chosen, prefill_features, _ttft, fitted=_NONE),
            judge("published + launches", chosen, prefill_features, _ttft, fitted=launched),
            judge("published + launches x model", chosen, prefill_features, _ttft, fitted=launched, with_factors=True),
            judge("refit", chosen, prefill_features, _ttft, fitted=_PREFILL),
            judge("refit x model", chosen, prefill_features, _ttft, fitted=_PREFILL, with_factors=True),
        ]  # fmt: skip
    return told


def calibrate(
    traces: Annotated[
        Path | None,
        typer.Option(
            "--traces", metavar="FOLDER", help=f"Where the tables lie; else {TRACES_VARIABLE}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Hold the performance model against measured engines, with each GPU type left out in turn."""
    folder = traces or Path(os.environ.get(TRACES_VARIABLE, ""))
    found = {
        name: reader(folder)
        for name, file, reader in (
            ("vLLM", VLLM_TABLE, vllm_runs),
            ("Splitwise 2023", SPLITWISE_TABLE, splitwise_runs),
        )
        if (folder / file).is_file()
    }
    if not found:
        raise typer.BadParameter(
            f"there is no {VLLM_TABLE} in {folder or '.'}", param_hint="--traces"
        )
    out = Output.of(None, as_json=as_json)
    document: dict[str, Any] = {}
    for name, (runs, left_out) in found.items():
        told = calibrations(runs)
        document[name] = {
            "runs": len(runs),
            "left_out": dict(left_out),
            **{time: [asdict(each) for each in ways] for time, ways in told.items()},
        }
        if not as_json:
            _show(out, name, len(runs), left_out, told)
    if as_json:
        out.document(document)


def _show(
    out: Output, name: str, runs: int, left_out: Counter[str], told: dict[str, list[Calibration]]
) -> None:
    skipped = ", ".join(f"{count} {why}" for why, count in left_out.most_common())
    out.console.print(f"[bold]{name}[/]: {runs} runs; left out: {skipped or 'none'}")
    for time, ways in told.items():
        out.console.print(
            table(
                ("way", ">median", ">p90", ">bias"),
                [(way.name, *_numbers(way.total)) for way in ways],
                title=f"{time.upper()}: error on GPU types left out, all runs",
            )
        )
        best = min(ways, key=lambda way: way.total.error_median_ratio)
        plain = {miss.group: miss for miss in ways[0].groups}
        out.console.print(
            table(
                (
                    "model",
                    "family",
                    "GPU",
                    ">runs",
                    ">published",
                    f">{best.name}",
                    ">p90",
                    ">bias",
                    "",
                ),
                [
                    (
                        *miss.group,
                        miss.runs,
                        f"{plain[miss.group].error_median_ratio:.1%}",
                        *_numbers(miss),
                        "" if _is_within(miss) else "misses",
                    )
                    for miss in best.groups
                ],
                title=f"{time.upper()} by model and GPU type: {best.name}",
            )
        )
        out.console.print(
            "  ".join(f"{name} {value:.4g}" for name, value in best.coefficients.items())
        )
        for build in sorted({miss.group[0] for miss in best.groups if not _is_within(miss)}):
            if build in _WHY:
                out.console.print(f"  {build}: {_WHY[build]}")
        if best.factors:
            out.console.print(
                "  ".join(f"{build} x {factor:.2f}" for build, factor in best.factors.items())
            )


def _is_within(miss: Miss) -> bool:
    return miss.error_median_ratio <= ERROR_RATIO_AIM


# Why a build is missed, as far as the table itself shows it.
_WHY: Final = {
    "Llama-3.1-8B-Instruct-FP8 fp8": (
        "its prompts must have been cached: 64 calls of 2,000 tokens would take 95 % of peak FLOP/s;"
        " and there is one GPU type only, so no factor is learned"
    ),
    "Qwen3-235B-A22B-FP8 fp8": (
        "one GPU type only, so no factor is learned: its software takes twice the roofline, whatever"
        " the batch and the context"
    ),
    "Qwen3-32B fp8": "two runs on one GPU type",
    "gpt-oss-120b fp4": (
        "Hopper widens four-bit experts as it reads them, Blackwell computes in four bits: one factor"
        " does not fit both"
    ),
    "Kimi-K2.5 int4": "four-bit integers on the two GPU types are of different builds, 0.15.1 and 0.16.0",
    "Llama-3.1-70B fp4": "measured on one GPU type only, so no factor is learned",
}


def _numbers(miss: Miss) -> tuple[str, str, str]:
    return (
        f"{miss.error_median_ratio:.1%}",
        f"{miss.error_p90_ratio:.0%}",
        f"{miss.bias_ratio:+.0%}",
    )
