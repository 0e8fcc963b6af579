"""Runs every benchmark there is, writes `.headway/bench.json` with flat keys, and prints a table.

`python -m tests.benchmarks [NAME …]` runs the named ones. A benchmark that fails is reported, the others
run all the same, and the exit status is 1.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / ".headway" / "bench.json"
# What the figures are aimed at, as an upper limit.
AIMS = {
    "decision_100_p50_us": 50.0,
    "decision_100_p99_us": 200.0,
    "decision_1000_p50_us": 300.0,
    "batch_64x100_ms": 5.0,
    "gateway_c64_cpu_us": 97.0,
    "policy_20_mean_us": 10.0,
}
FAILURE_LINES_MAX = 15


def names() -> list[str]:
    """Benchmarks are the modules of this folder that offer `run() -> dict[str, float]`."""
    folder = Path(__file__).parent
    return sorted(
        path.stem
        for path in folder.glob("*.py")
        if not path.stem.startswith("_") and "\ndef run(" in path.read_text(encoding="utf-8")
    )


def run_all(chosen: list[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Figures by key, and failures by benchmark with the end of their traceback."""
    figures: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name in chosen:
        try:
            figures |= importlib.import_module(f"tests.benchmarks.{name}").run()
        except Exception:  # noqa: BLE001  (one benchmark must not take the others' figures away)
            lines = traceback.format_exc().strip().splitlines()
            failures[name] = "\n".join(lines[-FAILURE_LINES_MAX:])
    return figures, failures


def write(figures: dict[str, float]) -> None:
    """Replace the figures measured now; what other benchmarks wrote before stays."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = json.loads(OUTPUT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    beside = OUTPUT.with_suffix(".new")
    beside.write_text(json.dumps(before | figures, indent=2, sort_keys=True) + "\n", "utf-8")
    beside.replace(OUTPUT)


def show(console: Console, figures: dict[str, float], failures: dict[str, str]) -> None:
    load = os.getloadavg()[0]
    title = f"Benchmarks ({os.cpu_count()} cores, load {load:.1f} at the end)"
    table = Table("figure", "value", "aim", title=title)
    for key, value in sorted(figures.items()):
        aim = AIMS.get(key)
        style = None if aim is None else "green" if value <= aim else "red"
        table.add_row(key, f"{value:,.2f}", "" if aim is None else f"≤ {aim:g}", style=style)
    console.print(table)
    for name, failure in failures.items():
        console.print(f"[red]{name} failed[/red]")
        console.print(failure, markup=False, highlight=False)


def main() -> int:
    known = names()
    chosen = sys.argv[1:] or known
    console = Console()
    unknown = [name for name in chosen if name not in known]
    if unknown:
        console.print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    figures, failures = run_all(chosen)
    write(figures)
    show(console, figures, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
