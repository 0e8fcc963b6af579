"""Time of one placement decision over 10, 100 and 1,000 engines, compiled and uncompiled.

Thread CPU time, so that other work on the machine does not count. A mixed fleet under load: five GPU
types, busy rows, workflows that live there, prefill/decode pairs among them. A decision is the look-up in a
full prefix index and the placement; half of the prompts have 100,000 tokens. Every decision is for another
request, so that nothing is remembered from the one before. `cold`: as many bytes as the caches hold
are walked before each, as in a process that relays between decisions. Cutting and hashing a prompt
happens once, where it is read, and has a figure of its own.
"""

import gc
import random
import time
from statistics import median, quantiles

from tests.benchmarks.variants import child_main, figures_of

SIZES = (10, 100, 1000)
REQUESTS = 64
ROUNDS = {10: 2000, 100: 1000, 1000: 150}
# Of ten engines one prefills only, one decodes only: pairs compete with single engines.
ROLES = ("both",) * 8 + ("prefill", "decode")
PREFILLER = ROLES.index("prefill")
CHILD_S_MAX = 300
PROMPTS = (300, 12_000, 100_000, 100_000)
BYTES_PER_TOKEN = 4
COLD_BYTES = 3 * 1024 * 1024
COLD_ROUNDS = 200


def fleet(size: int, seed: int):
    """Engine rows of one model with made-up load, from a seed."""
    from controlplane.domain.catalog import GpuType, Model, Role
    from controlplane.domain.fleet import EngineRow
    from controlplane.scheduler.perf_model import engine_rates

    rng = random.Random(seed)
    model = Model(
        name="llama-70b",
        parameters=70_600_000_000,
        layers=80,
        hidden_size=8192,
        weights_bytes=70_600_000_000,
        kv_bytes_per_token=163_840,
        context_tokens_max=131_072,
        load_ms=60_000,
        price_prompt_micro_usd_per_mtok=600_000,
        price_cached_micro_usd_per_mtok=60_000,
        price_completion_micro_usd_per_mtok=2_400_000,
    )
    kinds = [
        ("h100", 80e9, 3.35e12, 989e12, 3_250_000, 2),
        ("h200", 141e9, 4.8e12, 989e12, 3_500_000, 2),
        ("b200", 180e9, 7.7e12, 2250e12, 6_520_000, 1),
        ("a100", 80e9, 2.039e12, 312e12, 1_500_000, 4),
        ("l40s", 48e9, 0.864e12, 362e12, 1_000_000, 4),
    ]
    rows = []
    for index in range(size):
        name, hbm, bandwidth, flops, dollars, gpus = kinds[index % len(kinds)]
        gpu = GpuType(
            name=name,
            hbm_bytes=int(hbm),
            bandwidth_bytes_per_s=bandwidth,
            flops_per_s=flops,
            price_micro_usd_per_hour=dollars,
            price_source="benchmark",
            price_date="2026-11-29",
        )
        rates = engine_rates(model, gpu, gpus)
        row = EngineRow(
            index=index,
            engine_id=f"engine-{index}",
            node_id=f"node-{index // 4}",
            region=f"region-{index % 2}",
            region_bit=1 << index % 2,
            gpu_type=name,
            gpu_bit=1 << index % len(kinds),
            model=model.name,
            role=Role(ROLES[index % len(ROLES)]),
            context_tokens_max=model.context_tokens_max,
            kv_tokens_capacity=rates.kv_tokens_capacity,
            seats_capacity=rates.seats_capacity,
            micro_usd_per_ms=rates.micro_usd_per_ms,
            prefill_base_ms=rates.prefill_base_ms,
            prefill_ms_per_token=rates.prefill_ms_per_token,
            prefill_ms_per_token_sq=rates.prefill_ms_per_token_sq,
            decode_ms_base=rates.decode_ms_base,
            decode_ms_per_seq=rates.decode_ms_per_seq,
            decode_ms_per_kv_token=rates.decode_ms_per_kv_token,
            kv_price_micro_usd_per_token_s=rates.kv_price_micro_usd_per_token_s,
            load_ms=rates.load_ms,
        )
        row.is_accepting = True
        row.is_warm = True
        row.seats_lent = row.seats_capacity
        row.kv_tokens_lent = row.kv_tokens_capacity
        row.credits_expire_ms = 10_000_000
        row.running = row.seats_taken = rng.randrange(row.seats_capacity)
        row.kv_tokens_used = row.kv_tokens_taken = int(row.kv_tokens_capacity * rng.random() * 0.8)
        row.prefill_tokens_pending = rng.choice((0, 0, 0, 2_000, 8_000))
        row.waiting = rng.choice((0, 0, 0, 1))
        row.flows_micro_usd_per_s = rng.random() * 2_000
        row.flows_ms_per_step = rng.random() * 5
        row.bid_micro_usd = rng.choice((5_000.0, 10_000.0))
        row.offered_ratio = rng.random()
        rows.append(row)
    return tuple(rows)


def full_index(rows, seed: int):
    """A prefix index with as many chunks as it keeps, and all engines' shared prefix among them."""
    from controlplane.scheduler.prefix_index import HOLDINGS_MAX, PrefixIndex

    rng = random.Random(seed)
    index = PrefixIndex()
    shared = tuple(range(1, 20))
    each = HOLDINGS_MAX // len(rows)
    for row in rows:
        index.set_capacity(row.index, 1 << 40)
        for _ in range(each // 40):
            index.routed(row.index, tuple(rng.getrandbits(62) for _ in range(40)), 100_000)
        index.routed(row.index, shared, 8_000)
    return index, shared


def requests(rows, index, shared, seed: int):
    """Requests as they are decided on: half are first steps behind a shared prefix, half go on at home."""
    from controlplane.domain.catalog import Scope
    from controlplane.domain.request import Request
    from controlplane.scheduler.prefix_index import GRID

    rng = random.Random(seed)
    size = len(rows)
    made = []
    for number in range(REQUESTS):
        prompt = rng.choice(PROMPTS)
        home = rng.choice([at for at in range(size) if at % len(ROLES) != PREFILLER])
        is_first = number % 2 == 0
        grid = [end // BYTES_PER_TOKEN for end in GRID if end <= prompt * BYTES_PER_TOKEN]
        own = tuple(rng.getrandbits(62) for _ in grid[len(shared) :])
        prefix = shared[: len(grid)] + own
        if not is_first:
            held = len(grid) * 15 // 16
            index.routed(home, prefix[:held], grid[held - 1] if held else 0, tuple(grid[:held]))
        request = Request(
            id=f"request-{number}",
            tenant="tenant",
            model="llama-70b",
            arrival_ms=1_000_000,
            prompt_tokens=prompt,
            completion_tokens_max=1_024,
            completion_tokens_expected=300,
            prefix=prefix,
            prefix_tokens=tuple(grid),
            regions=3,
            gpu_types=31,
            weight=rng.choice((1.0, 2.0, 4.0)),
            ttft_ms_max=2_000,
            tpot_ms_max=60,
            deadline_ms=1_120_000,
            value_micro_usd=5_000,
            late_micro_usd_per_s=300,
            scope=Scope.AUTONOMOUS,
            workflow="workflow",
            step=0 if is_first else 2,
            steps_expected=6,
            workflow_deadline_ms=1_300_000,
            workflow_spent_micro_usd=10_000,
            workflow_remaining_micro_usd=1_000_000,
            calls_in_flight=0,
            fan_out_max=8,
            step_gap_ms=9_000,
            home=None if is_first else f"engine-{home}",
            is_single_engine=False,
            priority=5,
            is_begun=False,
            not_before_ms=0,
            waits_for_idle=False,
            is_preferred=False,
        )
        made.append(request)
    return made


def hashing() -> float:
    """Microseconds to cut and hash a prompt of 100,000 tokens, and to write down where it went."""
    from controlplane.scheduler.prefix_index import PrefixIndex

    rng = random.Random(3)
    index = PrefixIndex()
    index.set_capacity(0, 1_000_000)
    prompts = [rng.randbytes(100_000 * BYTES_PER_TOKEN) for _ in range(40)]
    times = []
    for raw in prompts * 2:
        started = time.thread_time_ns()
        prefix, boundaries = index.chain(raw, 1)
        index.routed(0, prefix, 100_000, boundaries)
        times.append((time.thread_time_ns() - started) / 1_000)
    return round(median(times), 2)


def measure() -> dict[str, float]:
    """Microseconds per decision in this process, whichever variant it imports."""
    from controlplane.scheduler.place import place

    figures: dict[str, float] = {}
    for size in SIZES:
        rows = fleet(size, seed=1)
        index, shared = full_index(rows, seed=4)
        asked = requests(rows, index, shared, seed=2)
        gc.collect()
        gc.freeze()
        walked = bytearray(COLD_BYTES)
        for kind, rounds in (("", ROUNDS[size]), ("_cold", COLD_ROUNDS)):
            times = []
            for number in range(rounds):
                request = asked[number % len(asked)]
                if kind:
                    walked[::64] = walked[::64]
                started = time.thread_time_ns()
                cached = index.cached(
                    request.prefix, request.prefix_tokens, request.prompt_tokens - 1
                )
                place(request, rows, cached, 1_000_050)
                times.append((time.thread_time_ns() - started) / 1_000)
            cuts = quantiles(times[len(times) // 10 :], n=100)
            figures[f"{size}{kind}_p50_us"] = round(cuts[49], 2)
            figures[f"{size}{kind}_p99_us"] = round(cuts[98], 2)
    figures["prefix_100k_us"] = hashing()
    return figures


def run() -> dict[str, float]:
    """Flat keys: `decision_100_p50_us` compiled, absent without a compiler; `decision_pure_…` not."""
    return figures_of("decision", CHILD_S_MAX)


if __name__ == "__main__":
    child_main(__doc__, measure)
