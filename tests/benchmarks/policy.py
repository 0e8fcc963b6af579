"""Time of one ruling over 20 rules: facts built and asked, warm in a loop, and cold after other work.

Thread CPU time, so that other work on the machine does not count. Callers and moments differ from call to
call; a few of a hundred fire a rule.
"""

import time
from statistics import fmean, quantiles

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
        "policy_20_mean_us": round(mean, 2),
        "policy_20_cold_p50_us": round(quantiles(cold, n=100)[49], 2),
        "policy_20_cel_mean_us": round(fmean(by_cel), 2),
        "policy_20_fired_ratio": round(fired / (CALLS + CALLS // 10 + COLD_CALLS), 4),
    }


def _usual():
    from policies.facts import from_json

    return from_json({})


def run() -> dict[str, float]:
    """Flat keys: `policy_20_mean_us` and what it is to be compared with."""
    return measure()


if __name__ == "__main__":
    import json

    print(json.dumps(run()))
