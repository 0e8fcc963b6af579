"""Time of one ruling over 20 rules, in a replica that serves 64 connections and by itself; and of a reload.

In the replica the key's static part is looked up, the facts are built and the rules are asked as for any
call; by itself the same is asked in a loop, warm, and cold after other work. Thread CPU time, so that other
work on the machine does not count, without the cost of asking for it. Engines and client are those of
`relay`, or with HEADWAY_BENCH_HARNESS its mock engine and load client.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

# Where the replica under test writes what it timed, when it ends.
REPORT_VARIABLE = "HEADWAY_BENCH_REPORT"
CONNECTIONS = 64
SECONDS = 5
RELOADS = 5
RELOAD_S_MAX = 30.0
CALIBRATION_CALLS = 20_000

CALLS = 20_000
COLD_CALLS = 300
# Larger than the processor's second-level cache: what a busy process does between two calls.
COLD_BYTES = 8 * 1024 * 1024
CEL_CALLS = 1_000

# What operators ask for: limits by class, overload, budgets, breakers, hours, context, scopes.
CONDITIONS = (
    'tenant.class == "bronze" && request.max_tokens > 8192',
    'tenant.class == "silver" && request.max_tokens > 16384',
    "pool.is_overloaded && pool.queue_wait_ms > 15000 && tenant.priority <= 2 && workflow.step == 0",
    "pool.is_overloaded && pool.queue_wait_ms > 45000 && tenant.priority <= 5 && workflow.step == 0",
    "request.prompt_tokens + request.max_tokens > model.context_tokens_max",
    "tenant.calls_in_flight >= 200",
    "workflow.exists && workflow.calls_in_flight >= 64",
    "workflow.exists && workflow.step > workflow.steps_expected * 4",
    "workflow.remaining_micro_usd < request.cost_micro_usd",
    "workflow.expected_remaining_micro_usd > workflow.remaining_micro_usd * 2",
    "workflow.exists && workflow.deadline_slack_ms < -5000",
    'pool.breaker == "open"',
    'pool.breaker in ["half_open", "open"] && tenant.priority < 5',
    "pool.kv_used_permille > 970 && request.prompt_tokens > 30000",
    "pool.saturation_permille > 990 && tenant.priority <= 1",
    "request.has_tools && request.n > 4",
    'time.hour >= 8 && time.hour < 18 && time.weekday < 5 && tenant.class == "bronze" && request.n > 1',
    'region.home != "" && !region.home.startsWith("eu") && tenant.id in ["globex", "initech"]',
    "request.client_retries > 3",
    'workflow.scope == "autonomous" && request.cost_micro_usd > 5000000',
)


def files() -> dict[str, str]:
    """The shipped bundle with these 20 rules in place of its own."""
    from policies.load import files_of

    kept = {name: text for name, text in files_of(None).items() if "kind: rules" not in text}
    tests = "    tests: [{name: a, fires: true}, {name: b, fires: false}]\n"
    rules = "".join(
        f"  - name: rule-{number}\n    phase: admit\n    when: {condition!r}\n    deny: true\n"
        f"    message: refused by rule {number}\n{tests}"
        for number, condition in enumerate(CONDITIONS)
    )
    kept["rules.yaml"] = f"kind: rules\nversion: 1\nname: bench\nlevel: enforce\nrules:\n{rules}"
    return kept


def callers():
    from policies.facts import from_json

    for tenant_class, priority in (("gold", 9), ("silver", 5), ("bronze", 2)):
        for is_in_workflow in (False, True):
            yield from_json(
                {
                    "tenant.id": f"tenant-{tenant_class}",
                    "tenant.class": tenant_class,
                    "tenant.priority": priority,
                    "model.name": "llama-3.3-70b",
                    "workflow.exists": is_in_workflow,
                    "workflow.scope": "autonomous" if is_in_workflow else "chat",
                    "request.has_tools": is_in_workflow,
                }
            )[0]


def measure() -> dict[str, float]:
    from policies.documents import Phase
    from policies.evaluate import NEUTRAL, compile_policy
    from policies.facts import LiveFacts
    from policies.load import bundle_of

    policy = compile_policy(bundle_of(files()))
    parts = [policy.static_part(static) for static in callers()]
    unlimited = 2**62 - 1
    is_overloaded = False
    fired = 0

    def ask(number: int) -> None:
        nonlocal fired
        live = LiveFacts(
            1, 500 + number % 3000, 256 + number % 9000, 400 + number % 700, 0, 0, 0, number % 50,
            number % 7, 6, 1_000, unlimited, 5_000, 60_000, number % 3, number % 20, number % 4_000,
            number % 1_000, 300 + number % 500, "closed", is_overloaded, 10, 2, 30, "eu",
        )  # fmt: skip
        if policy.rule(Phase.ADMIT, parts[number % len(parts)], live) is not NEUTRAL:
            fired += 1

    for number in range(CALLS // 10):
        ask(number)
    started = time.thread_time_ns()
    for number in range(CALLS):
        ask(number)
    mean = (time.thread_time_ns() - started) / 1_000 / CALLS

    other = bytearray(COLD_BYTES)
    cold = []
    for number in range(COLD_CALLS):
        other[:] = bytes(COLD_BYTES)
        started = time.perf_counter_ns()
        ask(number * 61)
        cold.append((time.perf_counter_ns() - started) / 1_000)

    statics = list(callers())
    by_cel = []
    for number in range(CEL_CALLS):
        _, live = _usual()
        started = time.thread_time_ns()
        policy.oracle(Phase.ADMIT, statics[number % len(statics)], live)
        by_cel.append((time.thread_time_ns() - started) / 1_000)
    return {
        "policy_20_loop_mean_us": round(mean, 2),
        "policy_20_cold_p50_us": round(quantiles(cold, n=100)[49], 2),
        "policy_20_cel_mean_us": round(fmean(by_cel), 2),
        "policy_20_fired_ratio": round(fired / (CALLS + CALLS // 10 + COLD_CALLS), 4),
    }


def _usual():
    from policies.facts import from_json

    return from_json({})


def run() -> dict[str, float]:
    """Flat keys: `policy_20_mean_us` in a live replica, `policy_reload_…`, and what to compare them with."""
    return measure() | asyncio.run(in_a_replica())


# ---------------------------------------------------------------- in a live replica


async def in_a_replica() -> dict[str, float]:
    """20 rules under load, then reloads of the bundle under load."""
    from tests.benchmarks import whole_path

    folder = Path(tempfile.mkdtemp(prefix="headway-bench-"))
    folder.chmod(0o755)
    bundle = folder / "policies"
    bundle.mkdir()
    for name, text in files().items():
        (bundle / name).write_text(text)
    report = folder / "timed.json"
    body = folder / "small.json"
    message = {"role": "user", "content": "Say hello to the world, please."}
    sent = {"model": "mock", "messages": [message], "max_tokens": 8}
    body.write_text(json.dumps(sent, separators=(",", ":")))
    further = {"HEADWAY_POLICIES_PATH": str(bundle), REPORT_VARIABLE: str(report)}
    command = (sys.executable, "-m", "tests.benchmarks.policy", "serve")
    with _engines(folder, whole_path.MOCK_PORTS):
        async with whole_path.replica(folder, command, further) as (_, key):
            await _load(folder, whole_path.PORT, key, SECONDS)
            reloads = await _reloads(folder, whole_path.PORT, key)
    timed = json.loads(report.read_text())
    return {
        "policy_20_mean_us": round(timed["mean_us"], 2),
        "policy_20_live_calls": float(timed["calls"]),
        **reloads,
    }


@contextlib.contextmanager
def _engines(folder: Path, ports: tuple[int, ...]) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.benchmarks.relay", "engine"]
    harness = os.environ.get("HEADWAY_BENCH_HARNESS")
    if harness:
        from tests.benchmarks import whole_path

        whole_path.build(Path(harness), folder)
        command = [str(folder / "mockd")]
    running = [subprocess.Popen([*command, str(port)]) for port in ports]
    try:
        yield
    finally:
        for engine in running:
            engine.kill()
            engine.wait()


async def _load(folder: Path, port: int, key: str, seconds: float) -> dict[str, Any]:
    body, count = str(folder / "small.json"), str(CONNECTIONS)
    if (folder / "loadc").exists():
        command = [str(folder / "loadc"), "-p", str(port), "-c", count, "-d", f"{seconds:g}"]
        command += ["-b", body, "-a", key]
    else:
        command = [sys.executable, "-m", "tests.benchmarks.relay", "load"]
        command += [str(port), body, count, str(seconds), key]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await client.communicate()
    report: dict[str, Any] = json.loads(told)
    return report


async def _reloads(folder: Path, port: int, key: str) -> dict[str, float]:
    """How long after a change of the bundle the replica rules by it, while it serves, and what that costs."""
    from controlplane.store import policies
    from controlplane.store.policies import Mode
    from controlplane.store.session import make_engine
    from policies.load import bundle_of

    before = await _load(folder, port, key, SECONDS)
    engine = make_engine((folder / "database.url").read_text())
    seconds: list[float] = []
    loading = asyncio.create_task(_load(folder, port, key, 3.0 * RELOADS))
    try:
        for number in range(RELOADS):
            changed = files()
            changed["rules.yaml"] = changed["rules.yaml"].replace("8192", str(8_193 + number))
            digest = bundle_of(changed).revision
            asked_s = time.time()
            await policies.apply(
                engine, digest, changed, author="key:bench", reason="benchmark", mode=Mode.NONE
            )
            while (at := _in_use_at(folder / "serve.log", digest)) is None:
                if time.time() - asked_s > RELOAD_S_MAX:
                    raise RuntimeError("the bundle was not taken up")
                await asyncio.sleep(0.05)
            seconds.append(at - asked_s)
    finally:
        during = await loading
        await engine.dispose()
    return {
        "policy_reload_p50_s": round(median(seconds), 2),
        "policy_reload_max_s": round(max(seconds), 2),
        "policy_reload_calls_failed": float(during["errors"]),
        "policy_reload_rps_ratio": round(
            during["done"] / during["secs"] / (before["done"] / before["secs"]), 2
        ),
        "policy_reload_latency_p99_ratio": round(during["lat"]["p99"] / before["lat"]["p99"], 2),
    }


def _in_use_at(log: Path, digest: str) -> float | None:
    """When the replica said that it rules by a bundle, in seconds since the epoch."""
    for line in log.read_text().splitlines():
        if "policy_in_use" in line and digest in line:
            at = datetime.fromisoformat(json.loads(line)["at"])
            return at.timestamp()
    return None


def _serve() -> int:
    """`headway serve` in which the parts of a ruling are timed, in this process's own thread."""
    from controlplane import main
    from controlplane.runtime import intake
    from policies.evaluate import Policy

    spent_ns = {"part": 0, "facts": 0, "rule": 0}
    calls = dict.fromkeys(spent_ns, 0)
    clock = time.thread_time_ns

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            started = clock()
            result = function(*arguments)
            spent_ns[name] += clock() - started
            calls[name] += 1
            return result

        return wrapped

    spent_ns["nothing"] = calls["nothing"] = 0
    nothing = timed("nothing", lambda *_: None)
    intake.live_facts = timed("facts", intake.live_facts)
    intake.Intake._part = timed("part", intake.Intake._part)  # type: ignore[method-assign]
    Policy.rule = timed("rule", Policy.rule)  # type: ignore[method-assign]
    status = main.main()
    for _ in range(CALIBRATION_CALLS):
        nothing(1, 2, 3, 4, 5)
    clock_ns = spent_ns["nothing"] / calls["nothing"]
    mean_ns = sum(spent_ns[name] / calls[name] - clock_ns for name in ("part", "facts", "rule"))
    report = {"mean_us": mean_ns / 1_000, "calls": calls["rule"], "clock_us": clock_ns / 1_000}
    Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(report))
    return status


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        sys.exit(_serve())
    print(json.dumps(run()))
