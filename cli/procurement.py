"""A purchase plan on the operator's own machine: the demand comes from the server, the offers from a file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import RenderableType
from rich.text import Text

from cli.client import JsonObject
from cli.failure import CommandFailure, ExitCode
from cli.output import dollars, instant, table
from controlplane.domain.ids import GpuTypeName
from controlplane.scheduler.planner import procure as planner
from controlplane.scheduler.planner.procure import Purchase, Step, Term, offers_of, procure

OFFERS = Path(planner.__file__).with_name("gpu_prices.yaml")
FILE_BYTES_MAX = 1024 * 1024
HOURS_PER_MONTH = 730
SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SPARKS_MAX = 72
_TERMS = {Term.RESERVED: "reserved", Term.ON_DEMAND: "on demand", Term.SPOT: "spot"}


def plan_purchase(
    curve: JsonObject,
    prices: Path | None,
    *,
    deferrable_ratio: float,
    deferrable_h: int,
    risk_ratio: float,
) -> tuple[Purchase, tuple[Step, ...]]:
    """The purchase for a demand curve and its plan, a way of buying at a time."""
    path = prices or OFFERS
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise CommandFailure(ExitCode.USAGE, f"{path} is over {FILE_BYTES_MAX} bytes")
        document = yaml.safe_load(path.read_text())
        # YAML reads an unquoted date as one, and offers hold it as text.
        offers = offers_of(document if isinstance(document, dict) else {})
        purchase = Purchase(
            work_per_s=tuple(curve["work"]),
            work_per_gpu_s={GpuTypeName(gpu): work for gpu, work in curve["work_per_gpu"].items()},
            offers=offers,
            gpus_per_node=curve["gpus_per_node"],
            deferrable_ratio=deferrable_ratio,
            deferrable_h=deferrable_h if deferrable_ratio else 0,
            risk_ratio=risk_ratio,
        )
        return purchase, procure(purchase)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise CommandFailure(
            ExitCode.FAILED,
            f"no purchase can be planned: {error}",
            f"look at the offers in {path}; they name GPU types as the catalogue does",
        ) from error


def bought(curve: JsonObject, purchase: Purchase, steps: tuple[Step, ...]) -> JsonObject:
    """For programs."""
    document: dict[str, Any] = {
        "demand": curve,
        "offers": [asdict(offer) for offer in purchase.offers],
        "growth": [asdict(growth) for growth in purchase.growth],
        "steps": [asdict(step) for step in steps],
    }
    return document


def steps_table(
    curve: JsonObject, purchase: Purchase, steps: tuple[Step, ...]
) -> list[RenderableType]:
    """For people: the demand as a line, what each way of buying adds, what to buy, and where prices stand."""
    work = curve["work"]
    best = steps[-1]
    left_out = curve["classes_left_out"]
    head = Text.assemble(
        ("demand", "bold"),
        f" of {len(work)} hours from {instant(curve['started_at'])}, in GPUs of {curve['unit']}:"
        f" mean {sum(work) / len(work):.1f}, most {max(work):.1f}",
        f"\n{left_out} classes are left out: no type serves them in time" if left_out else "",
    )
    growth = ", ".join(f"x{one.factor:g} ({one.probability:.0%})" for one in purchase.growth)
    used = {(one.gpu_type, one.term) for one in best.bought}
    return [
        head,
        Text(_sparks(work), style="blue"),
        Text(f"it may grow: {growth}", style="dim"),
        Text(""),
        table(
            ("WITH ALSO", ">$/MONTH", ">WORST", ">SAVED", ">REGRET", ">IDLE", ">FAILED"),
            (
                (
                    step.name,
                    dollars(step.micro_usd_per_hour_mean * HOURS_PER_MONTH),
                    dollars(step.micro_usd_per_hour_worst * HOURS_PER_MONTH),
                    f"{step.saved_ratio:.1%}",
                    f"{step.regret_ratio:.1%}",
                    f"{step.reserved_idle_ratio:.1%}",
                    f"{step.failed_ratio:.2%}",
                )
                for step in steps
            ),
        ),
        Text(""),
        table(
            ("BUY", "HOW", ">GPUS", ">AT MOST"),
            (
                (one.gpu_type, _TERMS[one.term], f"{one.gpus_mean:.1f}", f"{one.gpus_max:.1f}")
                for one in best.bought
            ),
        ),
        Text(""),
        table(
            ("PRICE OF", "HOW", ">$/GPU-H", "OF", "SOURCE"),
            (
                (
                    offer.gpu_type,
                    _TERMS[offer.term],
                    dollars(offer.micro_usd_per_gpu_hour),
                    offer.date,
                    offer.source,
                )
                for offer in purchase.offers
                if (offer.gpu_type, offer.term) in used
            ),
        ),
    ]


def _sparks(work: list[float]) -> str:
    """The curve in a line: the most of each of so many parts of it."""
    most = max(work)
    parts = min(SPARKS_MAX, len(work))
    line = ""
    for part in range(parts):
        here = work[part * len(work) // parts : (part + 1) * len(work) // parts]
        level = round(max(here) / most * (len(SPARKS) - 1)) if most > 0 else 0
        line += SPARKS[level]
    return line
