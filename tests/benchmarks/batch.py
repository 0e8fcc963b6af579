"""Time of placing 64 waiting calls on 100 engines together, solver included, and what it gains.

Thread CPU time, compiled where a compiler exists. Half of the seats are free, and every call has some
engines that hold a part of its prompt.
"""

import gc
import random
import time
from statistics import median

from tests.benchmarks.decision import CHILD_S_MAX, fleet, full_index, requests
from tests.benchmarks.variants import child_main, figures_of

CALLS = 64
ENGINES = 100
ROUNDS = 15


def measure() -> dict[str, float]:
    """Milliseconds for one batch in this process, and the dollars saved against one by one."""
    from controlplane.scheduler.batch import Asked, place_jointly, warm_up

    warm_up()
    rng = random.Random(7)
    rows = fleet(ENGINES, seed=1)
    for row in rows:
        row.seats_taken = rng.choice((row.seats_capacity, row.seats_capacity - 1))
        row.running = row.seats_taken
    index, shared = full_index(rows, seed=4)
    asked = [
        Asked(each, index.cached(each.prefix, each.prefix_tokens, each.prompt_tokens - 1))
        for each in requests(rows, index, shared, seed=2)[:CALLS]
    ]
    gc.collect()
    gc.freeze()
    times = []
    joint = None
    for _ in range(ROUNDS):
        started = time.thread_time_ns()
        joint = place_jointly(asked, rows, 1_000_050)
        times.append((time.thread_time_ns() - started) / 1e6)
    assert joint is not None
    alone = joint.cost_micro_usd + joint.gain_micro_usd
    return {
        "64x100_ms": round(median(times), 2),
        "64x100_gain_ratio": round(joint.gain_micro_usd / alone, 4),
        "64x100_placed_more": float(joint.placed_more),
    }


def run() -> dict[str, float]:
    """Flat keys: `batch_64x100_ms` compiled, absent without a compiler; `batch_pure_…` not."""
    return figures_of("batch", CHILD_S_MAX)


if __name__ == "__main__":
    child_main(__doc__, measure)
