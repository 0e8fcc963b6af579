"""The calibration: fits find known coefficients, and the roofline keeps to measured engines where the tables are."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.simulate import calibration
from controlplane.domain.catalog import GpuType, Model
from controlplane.domain.ids import GpuTypeName
from controlplane.scheduler.calibrate import (
    Run,
    decode_features,
    decode_terms,
    fit,
    is_saturated,
    judge,
)
from controlplane.scheduler.perf_model import (
    EXPERT_CHORD_TOKENS,
    PUBLISHED,
    VLLM,
    Coefficients,
    engine_rates,
    experts_touched_ratio,
    flops_per_s,
    kv_tokens_within,
    step_terms,
)
from tests.decision_builders import H100, LLAMA_70B_FP8

TABLES = Path(os.environ.get(calibration.TRACES_VARIABLE, "/nowhere"))
needs_tables = pytest.mark.skipif(
    not (TABLES / calibration.VLLM_TABLE).is_file(),
    reason=f"{calibration.TRACES_VARIABLE} does not point to the tables",
)

# 4 experts of which a token takes 1, 60 GB of 70 in experts.
EXPERTS = replace(
    LLAMA_70B_FP8,
    parameters_active=17_000_000_000,
    experts=4,
    experts_active=1,
    expert_weights_bytes=60_000_000_000,
)


def run_of(gpu: GpuType, model: Model = LLAMA_70B_FP8, **changes: object) -> Run:
    fields: dict[str, object] = {
        "model": model, "gpu": gpu, "gpus": 4, "family": "dense", "build": "b", "concurrency": 8,
        "prompt_tokens": 1_000, "completion_tokens": 500, "ttft_ms": 100.0, "tpot_ms": 10.0,
    }  # fmt: skip
    return Run(**(fields | changes))  # type: ignore[arg-type]


def gpu(name: str, bandwidth: float, flops: float) -> GpuType:
    return replace(H100, name=GpuTypeName(name), bandwidth_bytes_per_s=bandwidth, flops_per_s=flops)


def test_a_fit_finds_what_made_the_times_and_shrugs_at_outliers() -> None:
    draw = random.Random(3)
    truth = {"a": 2.0, "b": 0.5, "c": 0.0}
    features = [{name: draw.uniform(1, 9) for name in truth} for _ in range(60)]
    times = [sum(each[name] * by for name, by in truth.items()) for each in features]
    assert fit(features, times) == pytest.approx(truth, abs=1e-6)
    for at in range(6):
        times[at] *= 30.0 if at % 2 else 0.4
    assert fit(features, times) == pytest.approx(truth, abs=0.02)
    # What is known already is not fit again.
    known = [0.5 * each["b"] for each in features]
    only_a = [{"a": each["a"]} for each in features]
    assert fit(only_a, times, known) == pytest.approx({"a": 2.0}, abs=0.02)


def test_a_gpu_type_is_judged_by_what_the_others_teach() -> None:
    truth = Coefficients(layer_ms=0.08, kv=3.0, flop=1.0, experts=0.0, expert_layer_ms=0.0)
    kinds = [gpu("x", 1e12, 1e15), gpu("y", 3e12, 1e15), gpu("z", 5e12, 3e15)]
    runs = [
        run_of(
            kind,
            gpus=gpus,
            concurrency=concurrency,
            prompt_tokens=prompt,
            build="slow" if concurrency == 16 else "usual",
        )
        for kind in kinds
        for gpus in (1, 2, 8)
        for concurrency in (1, 16, 64)
        for prompt in (100, 1_000, 20_000)
    ]
    runs = [replace(run, tpot_ms=decode_terms(run).cost_ms(truth)) for run in runs]
    every = frozenset(decode_features(runs[0])) - {"all_reduce"}

    def tpot(run: Run) -> float:
        return run.tpot_ms or 0.0

    told = judge("refit", runs, decode_features, tpot, fitted=every)
    assert told.total.error_p90_ratio < 1e-3
    assert told.coefficients["kv"] == pytest.approx(3.0, rel=1e-3)
    plain = judge("published", runs, decode_features, tpot, fitted=frozenset())
    assert plain.coefficients["kv"] == PUBLISHED.kv
    assert plain.total.error_median_ratio > 0.05
    # A GPU type that differs from the others in what the roofline does not know is missed by as much.
    odd = [replace(run, tpot_ms=2.0 * tpot(run)) if run.gpu.name == "z" else run for run in runs]
    # However many its runs are, they do not count.
    odd += 3 * [run for run in odd if run.gpu.name == "z"]
    told = judge("refit", odd, decode_features, tpot, fitted=every)
    assert {miss.group[2]: round(miss.bias_ratio, 1) for miss in told.groups}["z"] == -0.5
    # Software that takes half as long again everywhere has a factor, learned on the other GPU types.
    slow = [replace(run, tpot_ms=1.5 * tpot(run)) if run.build == "slow" else run for run in runs]
    told = judge("refit", slow, decode_features, tpot, fitted=every, with_factors=True)
    assert told.factors["slow"] / told.factors["usual"] == pytest.approx(1.5, rel=0.02)
    assert told.total.error_median_ratio < 0.02


def test_rates_are_the_steps_of_the_roofline() -> None:
    for coefficients in (PUBLISHED, VLLM):
        for model in (LLAMA_70B_FP8, EXPERTS):
            rates = engine_rates(model, H100, 2, coefficients)
            for sequences in (1, EXPERT_CHORD_TOKENS):
                exact = step_terms(model, H100, 2, sequences=sequences, kv_tokens=70_000).cost_ms(
                    coefficients
                )
                linear = (
                    rates.decode_ms_base
                    + sequences * rates.decode_ms_per_seq
                    + 70_000 * rates.decode_ms_per_kv_token
                )
                assert linear == pytest.approx(exact, rel=1e-9)
    published = engine_rates(LLAMA_70B_FP8, H100, 2)
    real = engine_rates(LLAMA_70B_FP8, H100, 2, VLLM)
    assert real.prefill_base_ms - published.prefill_base_ms == pytest.approx(80 * 0.28)
    # 3.48 and 0.95 ms are those of the published fit, whose model has 80 layers.
    weights_ms = 1.15 * LLAMA_70B_FP8.weights_bytes / (2 * 3.35e9)
    assert published.decode_ms_base == pytest.approx(3.48 + 0.95 + weights_ms)


def test_experts_precision_and_kv_heads() -> None:
    assert experts_touched_ratio(EXPERTS, 1) == 0.25
    assert experts_touched_ratio(EXPERTS, 2) == pytest.approx(1 - 0.75**2)
    assert experts_touched_ratio(LLAMA_70B_FP8, 9) == 0.0
    # A prompt reads all experts, one sequence a quarter of them; tokens pay for what is active.
    rates, dense = engine_rates(EXPERTS, H100, 2), engine_rates(LLAMA_70B_FP8, H100, 2)
    per_ms = 2 * 3.35e9
    assert rates.prefill_base_ms == pytest.approx(
        80 * (0.0435 + 0.011875 + 0.0208) + (1.15 * 10_553_706_496 + 1.43 * 60e9) / per_ms
    )
    assert rates.prefill_ms_per_token == pytest.approx(
        dense.prefill_ms_per_token * 17e9 / LLAMA_70B_FP8.parameters
    )
    both = replace(H100, flops_per_s=1e15, fp8_flops_per_s=2e15)
    assert flops_per_s(LLAMA_70B_FP8, both) == 2e15
    four = replace(LLAMA_70B_FP8, weights_bytes=40_000_000_000)
    assert flops_per_s(four, both) == 1e15, "no units for four bits: weights are widened"
    assert flops_per_s(four, replace(both, fp4_flops_per_s=4e15)) == 4e15
    assert flops_per_s(replace(four, weights_bytes=141_000_000_000), both) == 1e15
    # One KV head on four GPUs: each of them holds, and reads, all of it.
    latent = replace(LLAMA_70B_FP8, kv_heads=1)
    shared = kv_tokens_within(LLAMA_70B_FP8, H100, 4)
    assert kv_tokens_within(latent, H100, 4) == pytest.approx(shared / 4, abs=1)
    assert engine_rates(latent, H100, 4).decode_ms_per_kv_token == pytest.approx(
        4 * engine_rates(LLAMA_70B_FP8, H100, 4).decode_ms_per_kv_token
    )


def test_runs_whose_calls_waited_say_nothing_of_a_batch() -> None:
    assert not is_saturated(run_of(H100))
    room = kv_tokens_within(LLAMA_70B_FP8, H100, 4)
    assert is_saturated(run_of(H100, concurrency=1 + room // 1_500))
    assert is_saturated(run_of(H100, ttft_ms=20_000.0))


@needs_tables
def test_the_roofline_keeps_to_measured_engines_of_gpu_types_left_out() -> None:
    runs, left_out = calibration.vllm_runs(TABLES)
    assert len(runs) > 700
    assert left_out.total() + len(runs) == 941
    told = calibration.calibrations(runs)
    tpot = {way.name: way for way in told["tpot"]}
    assert tpot["published x model"].total.error_median_ratio <= 0.10
    assert tpot["refit x model"].total.error_median_ratio <= 0.10
    # The published fit stays the default because no refit without factors does better.
    assert tpot["as published"].total.error_median_ratio < tpot["refit"].total.error_median_ratio
    for miss in tpot["as published"].groups:
        if miss.group[0] == "Llama-3.1-70B fp8":
            assert miss.error_median_ratio <= 0.06
    ttft = {way.name: way.total.error_median_ratio for way in told["ttft, up to 4 calls"]}
    assert ttft["published + launches"] < 0.65 * ttft["as published"]


@needs_tables
def test_the_command_prints_tables_and_json() -> None:
    app = typer.Typer()
    app.command()(calibration.calibrate)
    printed = CliRunner().invoke(app, ["--traces", str(TABLES)])
    assert printed.exit_code == 0, printed.output
    assert "published x model" in printed.output
    assert "data-parallel attention" in printed.output


def test_without_tables_the_command_says_where_it_looked(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(calibration.calibrate)
    refused = CliRunner().invoke(app, ["--traces", str(tmp_path)])
    assert refused.exit_code == 2
    assert calibration.VLLM_TABLE in refused.output
