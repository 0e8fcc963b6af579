"""`headway simulate`: experiments in virtual time with the live decision code, against tuned baselines."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cli.client import DATA_DIR, OperatorClient
from cli.contexts import connection
from cli.failure import CommandFailure, ExitCode
from cli.operator import DataDirOption, KeyOption, UrlOption, reported
from cli.output import Output, table
from cli.simulate.ablate import PARTS
from cli.simulate.calibration import calibrate
from cli.simulate.deadlines import Deadlines
from cli.simulate.referee_command import referee
from cli.simulate.stats import finite

if TYPE_CHECKING:
    from cli.simulate.gpu_mix import MixQuestion

SEEDS_MAX: Final = 1_000
PROCESSES_MAX: Final = 256
LOAD_MAX: Final = 20.0
REPLICAS_MAX: Final = 64
DAYS_MAX: Final = 100
PEAK_ENGINES_MAX: Final = 64
# `day` is played in so many hours at most when it is to be quick.
HOURS_QUICK: Final = 6.0
REPORT_SUFFIX: Final = ".html"

T = TypeVar("T")


class Experiment(StrEnum):
    FIXED = "fixed"
    FLOOR = "floor"
    DAY = "day"
    GPU_MIX = "gpu-mix"
    MODEL_CHOICE = "model-choice"


app = typer.Typer(
    invoke_without_command=True,
    help="Experiments in virtual time: the live decision code against tuned baselines.",
)

app.command("calibrate")(calibrate)
app.command("referee")(referee)


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    experiment: Annotated[
        Experiment, typer.Option("--experiment", help="What is asked.")
    ] = Experiment.FIXED,
    workload: Annotated[
        str,
        typer.Option("--workload", help="coding, chat, bounded, subagents, mix, or trace files."),
    ] = "coding,bounded,mix",
    deadlines: Annotated[
        str, typer.Option("--deadlines", help="own, blurred, class: what deadlines say of sizes.")
    ] = "own",
    load: Annotated[
        str, typer.Option("--load", metavar="L[,L]", help="Work that comes, in fleet capacities.")
    ] = "0.5,1.0,1.5",
    fleet: Annotated[
        str,
        typer.Option(
            "--fleet", help="homogeneous, mixed, pairs, pairs-even, or cluster documents."
        ),
    ] = "homogeneous",
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="P[,P]",
            help="headway and baselines; of `day` scaler+placement; else all.",
        ),
    ] = "",
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=SEEDS_MAX, help="Paired seeds of every cell.")
    ] = 10,
    ablate: Annotated[
        str,
        typer.Option("--ablate", metavar="PART[,PART]", help=f"Also without: {', '.join(PARTS)}."),
    ] = "",
    floor_ratio: Annotated[
        float,
        typer.Option(
            "--floor", min=0.5, max=1.0, help="Success that `floor` and `gpu-mix` hold, as a ratio."
        ),
    ] = 0.95,
    model: Annotated[
        str, typer.Option("--model", help="Of gpu-mix: 70b (fp8, 4 GPUs) or 8b (bf16, one GPU).")
    ] = "70b",
    prices: Annotated[
        str,
        typer.Option(
            "--prices", metavar="NAME|FILE", help="Of gpu-mix: low, mid, list, or a file."
        ),
    ] = "mid",
    gpu_types: Annotated[
        str,
        typer.Option(
            "--gpu-types", metavar="T[,T]", help="Of gpu-mix; else all that have a price."
        ),
    ] = "h100-sxm,a100-80,l40s",
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", min=1, max=REPLICAS_MAX, help="Of headway, which share the engines."
        ),
    ] = 1,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="A quarter of the time simulated; for a first look.")
    ] = False,
    from_log: Annotated[
        str | None,
        typer.Option(
            "--from-log",
            metavar="TIME",
            help="Play what was recorded in the last 90s, 30m, 24h or 7d instead, on --fleet and under"
            " --policies; those of the server where left out.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="BUNDLE",
            help="With --from-log: folder, digest, active, previous or candidate.",
        ),
    ] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = DATA_DIR,
    hours: Annotated[
        float,
        typer.Option(
            "--hours", min=1, max=24, help="Hours that `day` is played in; its curve shrinks."
        ),
    ] = 24.0,
    days: Annotated[
        int, typer.Option("--days", min=1, max=DAYS_MAX, help="Days that `day` is judged on.")
    ] = 10,
    peak_engines: Annotated[
        int,
        typer.Option(
            "--peak-engines", min=1, max=PEAK_ENGINES_MAX, help="Load of `day` at its peak."
        ),
    ] = 4,
    cold_start_s: Annotated[
        float,
        typer.Option("--cold-start", min=0, max=3_600, help="Seconds that engines of `day` load."),
    ] = 120.0,
    deferrable: Annotated[
        float,
        typer.Option("--deferrable", min=0, max=0.9, help="Part of `day` that can wait 8 hours."),
    ] = 0.0,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=PROCESSES_MAX, help="Runs at a time.")
    ] = 2,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", dir_okay=False, help="Cells and bounds.")
    ] = None,
    report_path: Annotated[
        Path | None,
        typer.Option("--report", metavar="OUT.html", dir_okay=False, help="Plots, in one file."),
    ] = None,
) -> None:
    """Play an experiment and tell what came of it. The same seeds give the same document, byte for byte."""
    if context.invoked_subcommand is not None:
        return
    with reported():
        _check_out(json_path, report_path)
        if from_log is None and policies is not None:
            raise CommandFailure(
                ExitCode.USAGE, "--policies goes with --from-log", "use --policy to choose policies"
            )
        if from_log is not None:
            source = context.get_parameter_source("fleet")
            is_given = source is not None and source.name != "DEFAULT"
            found = connection(url, key, data_dir)
            with OperatorClient(found.url, found.key) as api:
                _play_log(
                    api, from_log, fleet if is_given else None, policies, json_path, report_path
                )
            return
        wanted = {
            "workloads": _names(workload),
            "deadlines": tuple(_member(Deadlines, name) for name in _names(deadlines)),
            "loads": tuple(_load(text) for text in _names(load)),
            "fleets": _names(fleet),
            "policies": _names(policy),
            "ablated": tuple(_part(name) for name in _names(ablate)),
            "seeds": seeds,
        }
        if replicas > 1 and experiment not in (Experiment.FIXED, Experiment.FLOOR):
            raise CommandFailure(
                ExitCode.USAGE, "--replicas goes with fixed and floor", "leave it out"
            )
        if experiment is Experiment.DAY:
            spans = {
                "hours": min(hours, HOURS_QUICK) if is_quick else hours,
                "days": days,
                "peak_engines": peak_engines,
                "cold_start_s": cold_start_s,
                "deferrable_ratio": deferrable,
            }
            document = _play_day(wanted, spans, floor_ratio, processes)
        else:
            question = None
            if experiment is Experiment.GPU_MIX:
                question = _mix_question(model, prices, _names(gpu_types), floor_ratio)
            document = _play(
                experiment,
                wanted,
                floor_ratio,
                processes,
                question,
                replicas=replicas,
                is_quick=is_quick,
            )
        if report_path is not None:
            from cli.simulate.report import write

            write(report_path, document)
        document.pop("timings", None)
        if json_path is not None:
            json_path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        out = Output()
        for each in cells_tables(document["cells"]):
            out.console.print(each)
        for path in (json_path, report_path):
            if path is not None:
                out.console.print(f"[dim]written: {path}[/]")


def _play_log(
    api: OperatorClient,
    since: str,
    fleet: str | None,
    policies: str | None,
    json_path: Path | None,
    report_path: Path | None,
) -> None:
    from cli.simulate.from_log import lines, tables, what_if

    with _progress() as report:
        document = what_if(
            api, since, fleet, policies, lambda part, what: report(round(1_000 * part), 1_000, what)
        )
    if report_path is not None:
        from cli.simulate.report import write

        write(report_path, {"what_if": document})
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    out = Output()
    for each in (*tables(document), *lines(document)):
        out.console.print(each)


def _play(
    experiment: Experiment,
    wanted: dict[str, Any],
    floor_ratio: float,
    processes: int,
    question: "MixQuestion | None",
    *,
    replicas: int,
    is_quick: bool,
) -> dict[str, Any]:
    if experiment is Experiment.MODEL_CHOICE:
        return _play_model_choice(wanted["seeds"])
    from cli.simulate.baselines import FAMILIES
    from cli.simulate.experiments import FULL, QUICK, Runner, Wanted, fixed, floor
    from cli.simulate.experiments import Progress as Done
    from cli.simulate.fleets import fleet
    from cli.simulate.workloads import workload

    known = {"headway", *(family.name for family in FAMILIES)}
    for name in wanted["policies"]:
        if name not in known:
            raise CommandFailure(
                ExitCode.USAGE, f"no policy is called `{name}`", f"use {', '.join(sorted(known))}"
            )
    # Files are read before hours are spent.
    for name in wanted["workloads"]:
        workload(name)
    for name in wanted["fleets"]:
        fleet(name)
    asked = Wanted(**wanted, replicas=replicas, span=QUICK if is_quick else FULL)
    with _progress() as report, Runner(processes, Done(report=report)) as runner:
        if question is not None:
            from cli.simulate.gpu_mix import gpu_mix

            return gpu_mix(asked, runner, question)
        if experiment is Experiment.FLOOR:
            return floor(asked, runner, floor_ratio)
        return fixed(asked, runner)


def _play_day(
    wanted: dict[str, Any], spans: dict[str, Any], floor_ratio: float, processes: int
) -> dict[str, Any]:
    """Every workload with every kind of deadlines and every fleet, one day experiment each."""
    from cli.simulate.day.experiment import (
        DEFAULT_POLICIES,
        DayRunner,
        DayWanted,
        day,
        known_policy,
    )
    from cli.simulate.experiments import Progress as Done
    from cli.simulate.fleets import fleet
    from cli.simulate.workloads import workload

    for name in wanted["policies"]:
        if not known_policy(name):
            raise CommandFailure(
                ExitCode.USAGE,
                f"no scaler with a placement is called `{name}`",
                "use static, hpa, wva or planner, then +best, +headway or + a baseline's name",
            )
    asked = [
        DayWanted(
            workload=load,
            deadlines=deadlines,
            fleet=name,
            policies=wanted["policies"] or DEFAULT_POLICIES,
            success_ratio_min=floor_ratio,
            **spans,
        )
        for load in wanted["workloads"]
        for deadlines in wanted["deadlines"]
        for name in wanted["fleets"]
    ]
    # Files are read before hours are spent.
    for each in asked:
        workload(each.workload)
        fleet(each.fleet)
    with _progress() as report, DayRunner(processes, Done(report=report)) as runner:
        documents = [day(each, runner) for each in asked]
    whole = documents[0]
    whole["cells"] = [cell for document in documents for cell in document["cells"]]
    return whole


def _mix_question(
    model: str, prices: str, types: tuple[str, ...], floor_ratio: float
) -> "MixQuestion":
    """The first vector of a file, or one of those that ship by its name."""
    from cli.simulate.gpu_mix import PRICES, MixQuestion, engine_spec, read_prices

    shipped = read_prices(PRICES)
    vector = (
        shipped[prices] if prices in shipped else next(iter(read_prices(Path(prices)).values()))
    )
    priced = tuple(name for name in types if name in vector.usd_per_gpu_hour)
    if not priced:
        raise CommandFailure(
            ExitCode.USAGE, f"`{prices}` has no price of any of {', '.join(types) or 'no types'}"
        )
    for name in priced:
        engine_spec(model, name, vector)
    return MixQuestion(model=model, prices=vector, types=priced, ratio_min=floor_ratio)


def _play_model_choice(seeds: int) -> dict[str, Any]:
    from cli.simulate.model_choice import run

    with _progress() as report:
        return run(
            tuple(range(1, seeds + 1)),
            lambda part: report(round(1_000 * part), 1_000, "model choice"),
        )


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error, told (done, total, what)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("preparing", total=1)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def cells_tables(cells: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """One table for a workload, its deadlines and a fleet: dollars per success, success, fairness."""
    key = itemgetter("experiment", "workload", "deadlines", "fleet")
    for where, group in groupby(_of_mixes(cells), key=itemgetter("experiment", "workload", "load")):
        yield table(
            ("FLEET", "POLICY", ">$/HOUR", ">TO SINGLE", "95 % CI", ">TO BASELINE", ">SUCCESS"),
            (
                (
                    cell["fleet"],
                    cell["policy"],
                    _number(cell["fleet_usd_at_floor"], 2),
                    *_ratio(cell, "fleet_usd_ratio_to_best_single"),
                    _ratio(cell, "fleet_usd_ratio_to_best_baseline")[0],
                    _number(cell["success_ratio"], 3),
                )
                for cell in group
            ),
            title=", ".join(str(part) for part in where),
        )
    others = [cell for cell in cells if cell["experiment"] != Experiment.GPU_MIX]
    for where, group in groupby(others, key=key):
        if where[0] == Experiment.DAY:
            yield _day_table(list(group), where)
            continue
        yield table(
            (">LOAD", "POLICY", ">CPST $", ">RATIO", "95 % CI", ">SUCCESS", ">JAIN"),
            (
                (
                    _number(cell["load"], 2),
                    cell["policy"],
                    _number(cell["cpst_usd"], 4),
                    *_ratio(cell),
                    _number(cell["success_ratio"], 3),
                    _number(cell["jain"], 3),
                )
                for cell in group
            ),
            title=", ".join(str(part) for part in where if part is not None),
        )


def _day_table(cells: Sequence[dict[str, Any]], where: tuple[str, ...]) -> Any:
    return table(
        ("SCALER+PLACEMENT", ">$/DAY", ">RATIO", "95 % CI", ">STATIC", ">STARTS", ">WORST HOUR"),
        (
            (
                cell["policy"],
                _number(cell["fleet_usd_at_floor"], 2),
                *_ratio(cell),
                _number((cell["fleet_usd_ratio_to_static"] or {}).get("value"), 3),
                _number(cell["engine_starts"], 1),
                _number(cell["worst_hour_in_time_ratio"], 3),
            )
            for cell in cells
        ),
        title=", ".join(str(part) for part in where if part is not None),
    )


def _of_mixes(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["experiment"] == Experiment.GPU_MIX]


def _ratio(cell: dict[str, Any], key: str = "") -> tuple[str, str]:
    ratio = cell.get(key) if key else None
    if not key:
        ratio = cell.get("cpst_ratio_to_best_baseline") or cell.get(
            "fleet_usd_ratio_to_best_baseline"
        )
    if ratio is None:
        return "-", "-"
    low, high = ratio["ci95"]
    return _number(ratio["median"], 3), f"{_number(low, 3)}..{_number(high, 3)}"


def _number(value: float | None, digits: int) -> str:
    known = None if value is None else finite(value)
    return "-" if known is None else f"{known:.{digits}f}"


# ------------------------------------------------------------ what was typed


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _member(kind: Callable[[str], T], name: str) -> T:
    try:
        return kind(name)
    except ValueError as error:
        known = ", ".join(str(each) for each in Deadlines)
        raise CommandFailure(
            ExitCode.USAGE, f"no deadlines are called `{name}`", f"use {known}"
        ) from error


def _load(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= LOAD_MAX:
        raise CommandFailure(ExitCode.USAGE, f"`{text}` is no load; use 0 to {LOAD_MAX:g}")
    return value


def _part(name: str) -> str:
    if name not in PARTS:
        raise CommandFailure(
            ExitCode.USAGE, f"no part is called `{name}`", f"use {', '.join(PARTS)}"
        )
    return name


def _check_out(json_path: Path | None, report_path: Path | None) -> None:
    for path in (json_path, report_path):
        if path is not None and not path.parent.is_dir():
            raise CommandFailure(ExitCode.USAGE, f"there is no folder `{path.parent}`")
    if report_path is not None and report_path.suffix != REPORT_SUFFIX:
        raise CommandFailure(
            ExitCode.USAGE, f"a report is a page: `{report_path}` must end in .html"
        )
