"""A referee that others wrote: NVIDIA Dynamo's own router and mock engine on the conversations that are played here.

Both worlds play the same closed-loop conversations of a Mooncake trace on engines that are alike, once
round robin and once by Dynamo's KV cost: its own code there, the port of it here. The two must rank the
routers alike. What the engines differ in is said below and in `docs/simulation.md`.

Dynamo is no dependency: its replay runs in the Python that is named, where `ai-dynamo` and
`ai-dynamo-runtime` are installed.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cli.failure import CommandFailure, ExitCode
from cli.simulate.baselines.balancing import RoundRobin
from cli.simulate.baselines.dynamo import DynamoCost
from cli.simulate.contracts import (
    MS_PER_S,
    ClientRules,
    EngineSpec,
    FleetSpec,
    Plan,
    Result,
    Step,
    Strategy,
    WorldOptions,
)
from cli.simulate.fleets import H100_FP8, LLAMA_8B
from cli.simulate.traces import BLOCK_TOKENS
from cli.simulate.workloads import Workload
from cli.simulate.world import play
from controlplane.scheduler.perf_model import EngineRates

DYNAMO_S_MAX: Final = 300.0
ERROR_CHARACTERS_MAX: Final = 400
# The world's seed; it breaks ties only.
SEED: Final = 1
PATIENCE_S: Final = 86_400.0

# Dynamo 1.6.1's mock engine, as its defaults and its replays of single calls show: 16,384 blocks of 64
# tokens, 256 sequences, 8,192 tokens a step. A step takes 16.50 + 0.015183 n + 4.21e-7 n^2 ms for the n
# prompt tokens in it and 5.74 + 54.01 p - 25.74 p^2 ms for decoding at a share p of KV blocks in use.
MOCKER_KV_TOKENS: Final = 16_384 * 64
MOCKER_SEATS: Final = 256
MOCKER_STEP_TOKENS: Final = 8_192
MOCKER_DECODE_MS: Final = 5.74
MOCKER_KV_MS: Final = 54.01
MOCKER_CHUNK_MS: Final = 16.50142 + 0.01518344 * MOCKER_STEP_TOKENS + 4.209989e-7 * 8_192**2
# The engine of this world has one price for every token of a step: that of the mocker's full chunk.
LIKE_RATES: Final = EngineRates(
    prefill_base_ms=MOCKER_DECODE_MS,
    prefill_ms_per_token=(MOCKER_CHUNK_MS - MOCKER_DECODE_MS) / MOCKER_STEP_TOKENS,
    prefill_ms_per_token_sq=0.0,
    decode_ms_base=MOCKER_DECODE_MS,
    decode_ms_per_seq=(MOCKER_CHUNK_MS - MOCKER_DECODE_MS) / MOCKER_STEP_TOKENS,
    decode_ms_per_kv_token=MOCKER_KV_MS / MOCKER_KV_TOKENS,
    micro_usd_per_ms=H100_FP8.price_micro_usd_per_hour / 3_600_000.0,
    kv_tokens_capacity=MOCKER_KV_TOKENS,
    seats_capacity=MOCKER_SEATS,
    kv_price_micro_usd_per_token_s=0.0,
    load_ms=0,
)

ROUND_ROBIN, KV_ROUTER = "round_robin", "kv_router"
ROUTERS: Final = (ROUND_ROBIN, KV_ROUTER)
# What is run in Dynamo's Python: a trace, workers; one JSON object by router.
_REPLAY: Final = """
import json, sys
from dynamo.replay import run_trace_replay
out = {}
for mode in ("round_robin", "kv_router"):
    report = run_trace_replay([sys.argv[1]], num_workers=int(sys.argv[2]), router_mode=mode,
                              trace_block_size=int(sys.argv[3]))
    out[mode] = {k: v for k, v in report.summary.items() if isinstance(v, (int, float))}
print("\\n" + json.dumps(out))
"""


@dataclass(frozen=True, kw_only=True)
class LikeSpec(EngineSpec):
    """An engine with rates that are told, not worked out from model and GPU."""

    told: EngineRates = LIKE_RATES

    @property
    def rates(self) -> EngineRates:
        return self.told


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a replay came to. Times in milliseconds; `reuse_ratio` of prompt tokens that were cached."""

    requests: int
    reuse_ratio: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    e2e_ms_mean: float

    def document(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in self.__slots__}


# ------------------------------------------------------------ the conversations, for both


def conversations(workload: Workload, requests: int) -> tuple[Plan, ...]:
    """The trace's first conversations, of so many calls together, with whole blocks reused only.

    Every prompt of a block or more begins with the block that all of them share, as in the trace.
    """
    plans: list[Plan] = []
    left = requests
    for arrival in workload.replay:
        if left <= 0:
            break
        body = arrival.body
        has_prefix = body.steps[0].prompt_tokens > BLOCK_TOKENS
        steps = tuple(_whole_blocks(body.steps[:left], has_prefix=has_prefix))
        left -= len(steps)
        plans.append(
            Plan(
                number=len(plans),
                tenant="trace",
                workflow_class=body.workflow_class,
                arrival_s=arrival.at_s - workload.replay[0].at_s,
                steps=steps,
                deadline_s=None,
                prefix="system" if has_prefix else "",
                prefix_tokens=BLOCK_TOKENS if has_prefix else 0,
                scope=body.scope,
            )
        )
    if not plans:
        raise CommandFailure(
            ExitCode.USAGE,
            "the trace has no conversations",
            "give one in Mooncake's format: timestamp, input_length, output_length, hash_ids",
        )
    return tuple(plans)


def _whole_blocks(steps: Sequence[Step], *, has_prefix: bool) -> Iterator[Step]:
    for step in steps:
        reusable = step.reusable_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        if has_prefix and step.prompt_tokens > BLOCK_TOKENS:
            reusable = max(BLOCK_TOKENS, reusable)
        yield replace(step, new_tokens=step.prompt_tokens - reusable, reusable_tokens=reusable)


def as_mooncake(plans: Iterable[Plan]) -> Iterator[str]:
    """The plans as lines of Dynamo's trace format: turns of a session wait `delay` ms for the one before."""
    # Block 0 is the shared one.
    fresh = 1
    for plan in plans:
        blocks: list[int] = [0] if plan.prefix else []
        gap_s = 0.0
        for number, step in enumerate(plan.steps):
            blocks = blocks[: step.reusable_tokens // BLOCK_TOKENS]
            while len(blocks) * BLOCK_TOKENS < step.prompt_tokens:
                blocks.append(fresh)
                fresh += 1
            row: dict[str, Any] = {"session_id": f"s{plan.number}"}
            if number == 0:
                row["timestamp"] = round(plan.arrival_s * MS_PER_S, 3)
            else:
                row["delay"] = round(gap_s * MS_PER_S, 3)
            row["input_length"] = step.prompt_tokens
            row["output_length"] = step.completion_tokens
            row["hash_ids"] = blocks
            yield json.dumps(row)
            gap_s = step.gap_s


# ------------------------------------------------------------ the two worlds


def ours(plans: Sequence[Plan], workers: int) -> dict[str, Judged]:
    """The conversations in this world, by router."""
    engines = tuple(
        LikeSpec(
            name=f"like-{number}",
            node=f"node-{number}",
            model=LLAMA_8B,
            gpu=H100_FP8,
            gpus=1,
            seats=MOCKER_SEATS,
            step_tokens_max=MOCKER_STEP_TOKENS,
            kv_tokens=MOCKER_KV_TOKENS,
        )
        for number in range(workers)
    )
    makers: dict[str, type[Strategy]] = {ROUND_ROBIN: RoundRobin, KV_ROUTER: DynamoCost}
    options = WorldOptions(
        seed=SEED,
        horizon_s=plans[-1].arrival_s + 1.0,
        telemetry_age_s=0.0,
        client=ClientRules(patience_s=PATIENCE_S),
    )
    fleet = FleetSpec(name="like", engines=engines)
    return {name: _judged(play(plans, fleet, make(), options)) for name, make in makers.items()}


def _judged(result: Result) -> Judged:
    return Judged(
        requests=result.steps,
        reuse_ratio=result.cached_tokens / max(1, result.prompt_tokens),
        ttft_ms_mean=result.ttft.mean_ms,
        ttft_ms_p50=result.ttft.p50_ms,
        ttft_ms_p90=result.ttft.p90_ms,
        ttft_ms_p99=result.ttft.p99_ms,
        tpot_ms_p50=result.tpot.p50_ms,
        e2e_ms_mean=result.e2e.mean_ms,
    )


def theirs(plans: Sequence[Plan], workers: int, python: str) -> dict[str, Judged]:
    """The conversations in Dynamo's replay, by router. Raises CommandFailure when it can not be run."""
    with tempfile.TemporaryDirectory(prefix="headway-referee-") as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("\n".join(as_mooncake(plans)) + "\n")
        command = [python, "-c", _REPLAY, str(trace), str(workers), str(BLOCK_TOKENS)]
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=DYNAMO_S_MAX,
                env={**os.environ, "DYN_LOG": "warn"},
                cwd=folder,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CommandFailure(
                ExitCode.FAILED, f"Dynamo's replay did not run: {error}"
            ) from error
    if ran.returncode != 0:
        raise CommandFailure(
            ExitCode.FAILED,
            f"Dynamo's replay failed: {ran.stderr.strip()[-ERROR_CHARACTERS_MAX:]}",
            "install `ai-dynamo` and `ai-dynamo-runtime` where --dynamo-python points",
        )
    summaries = json.loads(ran.stdout.strip().splitlines()[-1])
    return {name: _of_summary(summaries[name]) for name in ROUTERS}


def _of_summary(summary: Mapping[str, float]) -> Judged:
    return Judged(
        requests=int(summary["completed_requests"]),
        reuse_ratio=summary["prefix_cache_reused_ratio"],
        ttft_ms_mean=summary["mean_ttft_ms"],
        ttft_ms_p50=summary["median_ttft_ms"],
        ttft_ms_p90=summary["p90_ttft_ms"],
        ttft_ms_p99=summary["p99_ttft_ms"],
        tpot_ms_p50=summary["median_tpot_ms"],
        e2e_ms_mean=summary["mean_e2e_latency_ms"],
    )


def agrees(one: Mapping[str, Judged], other: Mapping[str, Judged]) -> bool:
    """Whether both rank the routers alike, by reuse and by mean time to first token."""
    return _ranks(one) == _ranks(other)


def _ranks(judged: Mapping[str, Judged]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    by_reuse = sorted(judged, key=lambda name: -judged[name].reuse_ratio)
    by_ttft = sorted(judged, key=lambda name: judged[name].ttft_ms_mean)
    return tuple(by_reuse), tuple(by_ttft)
