"""`headway model-choice`: which models tasks are given by their outcomes, what that saves, and why."""

from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.markup import escape
from rich.table import Table

from cli.client import JsonObject, segment
from cli.operator import Session, with_session
from cli.output import instant, table

app = typer.Typer(no_args_is_help=True, help="Models chosen by outcomes: how they stand, and why.")

_BAR_WIDTH = 24
_CHAINS_SHOWN_MAX = 5


@app.command("show")
@with_session
def show(
    session: Session,
    *,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")] = None,
) -> None:
    """Show how each class stands: success by model, dollars per success by chain, and the saving."""
    document = session.api.get("model-choice", tenant=tenant)
    if not document["data"] and not session.out.is_for_programs:
        session.out.console.print(
            "no outcome yet; `headway model-choice classes` shows what can be asked for"
        )
        return
    parts: list[Any] = []
    for standing in document["data"]:
        parts += [*_standing(standing), ""]
    session.out.show(document, *parts)


@app.command("classes")
@with_session
def classes(session: Session) -> None:
    """List the classes of tasks that the active policies offer."""
    document = session.api.get("model-choice/classes")
    if not document["is_enabled"] and not session.out.is_for_programs:
        session.out.console.print(
            "[dim]models are not chosen by outcomes: `is_enabled` is false in the policy document"
            " `model_choice`[/]"
        )
    session.out.show(
        document,
        table(
            ("ASK FOR", "LADDER", "DEFAULT", ">FLOOR", ">EXPLORES", ">HELD OUT", ">TRIES"),
            (
                (
                    offered["asked_model"],
                    " > ".join(offered["ladder"]),
                    offered["default_model"],
                    _percent(offered["success_floor_ratio"]) or "as the default",
                    _percent(offered["explore_ratio"]),
                    _percent(offered["holdout_ratio"]),
                    offered["tries_max"],
                )
                for offered in document["data"]
            ),
        ),
    )


@app.command("explain")
@with_session
def explain(
    session: Session,
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="Workflow id.")],
) -> None:
    """Explain why a workflow has its model."""
    document = session.api.get(f"model-choice/workflows/{segment(workflow)}")
    record = document["record"]
    parts: list[Any] = [
        (
            f"[bold]{escape(document['workflow_id'])}[/] asked for"
            f" [bold]{escape(document['asked_model'])}[/] at {instant(document['chosen_at'])}"
        ),
        escape(document["sentence"]),
    ]
    if record.get("models"):
        parts.append(_models(record["models"]))
    if record.get("chains"):
        parts.append(_chains(record["chains"]))
    for name, words in (("not_allowed", "not allowed"), ("not_affordable", "does not fit")):
        if record.get(name):
            parts.append(f"[dim]{words}: {escape(', '.join(record[name]))}[/]")
    session.out.show(document, *parts)


def _standing(standing: JsonObject) -> list[Any]:
    saving = standing["saving"]
    parts: list[Any] = [
        (
            f"[bold]{escape(standing['asked_model'])}[/] for {escape(standing['tenant_id'])},"
            f" by default {escape(standing['default_model'])}"
        ),
        _models(standing["models"]),
        _chains(standing["chains"]),
    ]
    if saving is None:
        parts.append("[dim]the saving is not known: too few tasks had the default by chance[/]")
    else:
        parts.append(
            f"saves [bold]{saving['saved_ratio']:.0%}[/] of the dollars per success"
            f" ({saving['saved_ratio_low']:.0%} to {saving['saved_ratio_high']:.0%} with 95 %"
            f" confidence): ${saving['usd_per_success']:.4f} against"
            f" ${saving['usd_per_success_default']:.4f}; success {saving['success_ratio']:.1%}"
            f" against {saving['success_ratio_default']:.1%}, over {saving['tasks']} tasks"
        )
    return parts


def _models(models: list[JsonObject]) -> Table:
    view = table(("MODEL", ">TRIES", ">SUCCESS", "", ">$ A TRY", ""), ())
    for model in models:
        low, high = model["success_ratio_low"], model["success_ratio_high"]
        usd = model["usd"]
        view.add_row(
            escape(model["model"]),
            f"{model['tries']:.0f}",
            f"{low:.0%}-{high:.0%}",
            Bar(1.0, low, high, width=_BAR_WIDTH),
            "-" if usd is None else f"{usd:.4f}",
            "" if model["is_known"] else "[dim]thin[/]",
        )
    return view


def _chains(chains: list[JsonObject]) -> Table:
    return table(
        ("CHAIN", ">SUCCESS", ">$ A TASK", ">$ A SUCCESS", ">HOLDS FLOOR"),
        (
            (
                " > ".join(chain["chain"]),
                f"{chain['success_ratio']:.1%}",
                f"{chain['usd']:.4f}",
                f"{chain['usd'] / chain['success_ratio']:.4f}" if chain["success_ratio"] else "-",
                f"{chain['holds_floor_ratio']:.0%}",
            )
            for chain in chains[:_CHAINS_SHOWN_MAX]
        ),
    )


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"
