"""`python -m tests.benchmarks.overload --scenario b --seconds 30 [--json FILE]`: one scenario, one report.

a: capacity. b: twice the load, against load 1.0 and sticky first come, first served. c: half of the capacity away
and back. d: every engine fails half of its calls. e: one tenant at 100 times the others, and all backlogged.
Engines and callers keep real time: on a busy machine run it with a higher priority (`nice -n -10`).
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.benchmarks.overload import scenarios
from tests.benchmarks.overload.report import as_json, show
from tests.benchmarks.overload.scenarios import LOAD_1_RATE, Settings
from tests.benchmarks.overload.workload import DeadlineModel

TERMINATED = 128 + signal.SIGTERM
SCENARIOS = {
    "a": scenarios.calibrate,
    "b": scenarios.overload,
    "c": scenarios.halved,
    "d": scenarios.failing,
    "e": scenarios.unfair,
}


async def _until_told(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Play a scenario; SIGTERM cancels it, so that its clusters are ended."""
    task = asyncio.ensure_future(scenario)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overload")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each run counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=LOAD_1_RATE, help="workflows/s of load 1.0")
    parser.add_argument("--overload", type=float, default=2.0, help="multiple of load 1.0")
    parser.add_argument("--deadlines", type=DeadlineModel, default=DeadlineModel.KIND)
    parser.add_argument("--no-baseline", action="store_true", help="leave sticky FCFS out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    settings = Settings(
        seconds=arguments.seconds,
        seed=arguments.seed,
        rate=arguments.rate,
        overload=arguments.overload,
        deadlines=arguments.deadlines,
        has_baseline=not arguments.no_baseline,
    )
    try:
        result = asyncio.run(_until_told(SCENARIOS[arguments.scenario](settings)))
    except asyncio.CancelledError:
        return TERMINATED
    show(Console(), result)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(result), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
