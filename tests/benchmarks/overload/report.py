"""Figures as tables for people, and as JSON for programs."""

import os
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.overload.measure import Figures
from tests.benchmarks.overload.scenarios import Calibration, Failing, Fairness, Halved, Overload


def as_json(result: Any) -> Any:
    """Plain members of a result, with what it works out from them."""
    if isinstance(result, tuple):
        return [as_json(each) for each in result]
    derived = {
        name: getattr(result, name)
        for name, member in vars(type(result)).items()
        if isinstance(member, property)
    }
    return asdict(result) | derived


def show(console: Console, result: Any) -> None:
    match result:
        case Calibration():
            _show_calibration(console, result)
        case Overload():
            runs = [result.normal, result.overloaded]
            runs += [] if result.baseline is None else [result.baseline]
            show_runs(console, "Overload", runs)
            console.print(f"goodput over that at load 1.0: {result.goodput_ratio:.3f}")
        case Failing():
            _show_plain(console, "Every engine fails half of its calls", result)
        case Fairness():
            _show_plain(console, "Fairness", result)
        case tuple():
            _show_halved(console, result)
            show_runs(console, "Whole runs", [each.figures for each in result])
        case _:
            raise TypeError(type(result).__name__)


def show_runs(console: Console, title: str, runs: list[Figures]) -> None:
    """One column per run."""
    load = os.getloadavg()[0]
    cores = os.cpu_count()
    table = Table(
        "", *(run.name for run in runs), title=f"{title} ({cores} cores, load {load:.1f})"
    )

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    row("offered, workflows/s", *(f"{run.offered:.2f}" for run in runs))
    row("finished in time, workflows/s", *(f"{run.goodput:.2f}" for run in runs))
    row("arrived", *(str(run.arrived) for run in runs))
    row("succeeded", *(f"{run.succeeded_ratio:.3f}" for run in runs))
    row("… of high priority", *(f"{run.high_succeeded_ratio:.4f}" for run in runs))
    row("… of low priority", *(f"{run.low_succeeded_ratio:.3f}" for run in runs))
    row("fates", *(told(run.fates) for run in runs))
    row("… of high priority", *(told(run.high_fates) for run in runs))
    row("errors", *(told(run.errors) for run in runs))
    row("… of high priority", *(told(run.high_errors) for run in runs))
    row("engine time, s", *(f"{run.engine_s:.1f}" for run in runs))
    row("… wasted on what died", *(f"{run.wasted_ratio:.3f}" for run in runs))
    row("late kills of all that died", *(f"{run.late_kill_ratio:.3f}" for run in runs))
    row(
        "admitted on the next try",
        *(
            "none refused"
            if run.next_try_admitted_ratio is None
            else f"{run.next_try_admitted_ratio:.3f} of {run.tries_after_refusal}"
            for run in runs
        ),
    )
    row(
        "retry-after p50, p99, s",
        *(f"{run.retry_after_s_p50:.1f}, {run.retry_after_s_p99:.1f}" for run in runs),
    )
    row("HTTP tries per call", *(f"{run.tries_per_call:.3f}" for run in runs))
    row("engine attempts per request", *(f"{run.attempts_per_request:.3f}" for run in runs))
    row("prompt tokens from cache", *(f"{run.cached_ratio:.3f}" for run in runs))
    row("later steps at home", *(f"{run.at_home_ratio:.3f}" for run in runs))
    row(
        "queue wait p50, p99, ms",
        *(f"{run.queue_ms_p50:.0f}, {run.queue_ms_p99:.0f}" for run in runs),
    )
    row(
        "high priority e2e p50, p99, s",
        *(f"{run.high_e2e_s_p50:.1f}, {run.high_e2e_s_p99:.1f}" for run in runs),
    )
    row(
        "CPU of replica, callers (cores)",
        *(f"{run.replica_cpu_ratio:.2f}, {run.callers_cpu_ratio:.2f}" for run in runs),
    )
    row("callers late at most, s", *(f"{run.lateness_s_max:.2f}" for run in runs))
    console.print(table)


def told(numbers: dict[str, int]) -> str:
    return "\n".join(f"{count} {name}" for name, count in numbers.items()) or "none"


def _show_calibration(console: Console, result: Calibration) -> None:
    table = Table("workflows at a time", "finished/s", "replica CPU", title="Capacity")
    for slots, finished in result.finished_per_s.items():
        cpu = result.replica_cpu_ratio[slots]
        table.add_row(str(slots), f"{finished:.2f}", f"{cpu:.2f}")
    console.print(table)
    console.print(f"load 1.0 is {result.rate:.2f} workflows a second")


def _show_halved(console: Console, results: tuple[Halved, ...]) -> None:
    title = "Capacity halved and restored"
    table = Table("", *(result.way for result in results), title=title)
    for phase in ("before", "halved", "after", "later"):
        table.add_row(
            f"{phase}: succeeded, finished/s",
            *(
                f"{getattr(result, f'succeeded_{phase}'):.3f},"
                f" {getattr(result, f'goodput_{phase}'):.2f}"
                for result in results
            ),
        )
    table.add_row("s until as well as before", *(f"{result.recovery_s:.0f}" for result in results))
    console.print(table)
    for result in results:
        seconds = " ".join(map(str, result.goodput_by_second))
        console.print(f"finished in each second, {result.way}: {seconds}")


def _show_plain(console: Console, title: str, result: Any) -> None:
    """One row per member."""
    table = Table("", "value", title=title)
    for name, value in as_json(result).items():
        match value:
            case dict():
                shown = "\n".join(f"{key}: {_number(each)}" for key, each in value.items())
            case _:
                shown = _number(value)
        table.add_row(name.replace("_", " "), shown)
    console.print(table)


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
