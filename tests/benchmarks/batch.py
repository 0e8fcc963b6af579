"""Time of placing 64 waiting calls on 100 engines together, solver included, and what it gains.

Thread CPU time, compiled where a compiler exists. Half of the seats are free, and every call has some
engines that hold a part of its prompt.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from statistics import median

from tests.benchmarks.decision import CHILD_S_MAX, ROOT, fleet, full_index, requests

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


def _in_child(variant: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.batch", "--variant", variant],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CHILD_S_MAX,
        check=True,
    )
    return json.loads(done.stdout)


def run() -> dict[str, float]:
    """Flat keys: `batch_64x100_ms` compiled, absent without a compiler; `batch_pure_…` not."""
    from controlplane.scheduler import compile as core

    figures = {f"batch_pure_{key}": value for key, value in _in_child("pure").items()}
    core.refresh()
    if core.is_fresh():
        figures |= {f"batch_{key}": value for key, value in _in_child("compiled").items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=("pure", "compiled"), required=True)
    if parser.parse_args().variant == "pure":
        from controlplane.scheduler.compile import prefer_sources

        prefer_sources()
    json.dump(measure(), sys.stdout)


if __name__ == "__main__":
    main()
