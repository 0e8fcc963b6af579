"""`headway budgets`: what tenants, keys and workflows may spend, in dollars and tokens."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cli import complete
from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.money import micro_usd_given
from cli.operator import Session, with_change, with_session
from cli.output import dollars, instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page
from cli.watch import YesOption, confirm

app = typer.Typer(no_args_is_help=True, help=__doc__.split(": ", 1)[1].capitalize())

BAR_CELLS = 12
# From these shares of the limit on a bar is yellow, and red.
WARM_RATIO, HOT_RATIO = 0.75, 0.95


class Window(StrEnum):
    TOTAL = "total"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Kind(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    WORKFLOW = "workflow"


BudgetArgument = Annotated[
    str,
    typer.Argument(
        metavar="BUDGET",
        help="tenant:ID, key:ID or workflow:ID in dollars; with :tokens at the end in tokens.",
        autocompletion=complete.budgets,
    ),
]


@app.command("list")
@with_session
def list_budgets(
    session: Session,
    kind: Annotated[Kind | None, typer.Option("--kind", help="Whose budgets only.")] = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
) -> None:
    """List budgets with what is left of them."""
    page = page_of(session, "budgets", limit, cursor, kind=kind)
    view = table(("BUDGET", ">LIMIT", ">SPENT", "USED", "WINDOW", "ENDS"), ())
    for budget in page["data"]:
        view.add_row(
            Text(budget["id"], overflow="fold"),
            amount(budget, "limit"),
            amount(budget, "spent"),
            bar(budget),
            budget["window"],
            instant(budget["window_ends_at"])[:16],
        )
    show_page(session, page, view)


@app.command("show")
@with_session
def show_budget(session: Session, budget: BudgetArgument) -> None:
    """Show one budget with the windows that are over."""
    document = session.api.get(f"budgets/{segment(budget)}")
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_row("limit", f"{amount(document, 'limit')} per {document['window']}")
    facts.add_row("spent", amount(document, "spent"))
    facts.add_row("reserved", amount(document, "reserved"))
    facts.add_row("used", bar(document))
    facts.add_row("since", instant(document["window_started_at"]))
    facts.add_row("until", instant(document["window_ends_at"]))
    past = table(
        ("FROM", "TO", ">LIMIT", ">SPENT"),
        (
            (
                instant(window["started_at"]),
                instant(window["ended_at"]),
                amount({**window, "unit": document["unit"]}, "limit"),
                amount({**window, "unit": document["unit"]}, "spent"),
            )
            for window in document["windows"]
        ),
    )
    session.out.show(
        document, f"[bold]{budget}[/]", facts, *(["", past] if document["windows"] else [])
    )


@app.command("set")
@with_change
def set_budget(
    session: Session,
    budget: BudgetArgument,
    limit: Annotated[
        float, typer.Argument(metavar="LIMIT", min=0, help="Dollars, or tokens for a `:tokens` id.")
    ],
    window: Annotated[
        Window | None,
        typer.Option("--window", help="For how long it holds before it begins anew (in UTC)."),
    ] = None,
) -> None:
    """Set a budget. Never below what is spent and reserved in the window that holds."""
    if budget.endswith(":tokens") and not limit.is_integer():
        raise CommandFailure(
            ExitCode.USAGE, f"{limit} is no number of tokens", "give a whole number"
        )
    units = int(limit) if budget.endswith(":tokens") else micro_usd_given(limit)
    changes = {"limit": units, **({"window": window.value} if window else {})}
    document = session.api.patch(f"budgets/{segment(budget)}", changes)
    sentence = f"{budget} may spend {amount(document, 'limit')} per {document['window']}"
    if document["limit"] > units:
        sentence += ": that much is already spent or reserved"
    session.out.say(document, sentence)


@app.command("remove")
@with_change
def remove_budget(session: Session, budget: BudgetArgument, *, is_sure: YesOption = False) -> None:
    """Remove a limit, with its history."""
    confirm(
        session, f"nothing limits what {budget} counted, and its history is gone", is_sure=is_sure
    )
    document = session.api.delete(f"budgets/{segment(budget)}")
    session.out.say(document, f"{budget} is removed")


def amount(budget: JsonObject, name: str) -> str:
    """An amount in the budget's own unit."""
    value: int = budget[name]
    return f"{value:,} tok" if budget["unit"] == "tokens" else dollars(value)


def bar(budget: JsonObject) -> Text:
    """Spent and reserved as a share of the limit."""
    limit = max(1, budget["limit"])
    spent_ratio = min(1.0, budget["spent"] / limit)
    taken_ratio = min(1.0, (budget["spent"] + budget["reserved"]) / limit)
    spent = round(spent_ratio * BAR_CELLS)
    taken = round(taken_ratio * BAR_CELLS)
    colour = (
        "red" if taken_ratio >= HOT_RATIO else "yellow" if taken_ratio >= WARM_RATIO else "green"
    )
    result = Text()
    result.append("█" * spent, style=colour)
    result.append("▒" * (taken - spent), style=colour)
    result.append("·" * (BAR_CELLS - taken), style="dim")
    result.append(f" {round(100 * taken_ratio)}%")
    return result
