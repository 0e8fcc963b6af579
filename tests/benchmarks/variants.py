"""A benchmark of the core in children of its own: from its sources, and compiled where that is up to date."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def figures_of(name: str, child_s_max: float) -> dict[str, float]:
    """`NAME_pure_KEY` of the sources, and `NAME_KEY` compiled, absent without a compiler."""
    from controlplane.scheduler import compile as core

    figures = {f"{name}_pure_{key}": value for key, value in _child(name, "pure", child_s_max)}
    core.refresh()
    if core.is_fresh():
        figures |= {f"{name}_{key}": value for key, value in _child(name, "compiled", child_s_max)}
    return figures


def _child(name: str, variant: str, child_s_max: float) -> list[tuple[str, float]]:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", "--variant", variant],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=child_s_max,
        check=True,
    )
    return list(json.loads(done.stdout).items())


def child_main(description: str | None, measure: Callable[[], dict[str, float]]) -> None:
    """What such a child does."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--variant", choices=("pure", "compiled"), required=True)
    if parser.parse_args().variant == "pure":
        from controlplane.scheduler.compile import prefer_sources

        prefer_sources()
    json.dump(measure(), sys.stdout)
