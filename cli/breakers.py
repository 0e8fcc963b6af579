"""`headway breaker`: which engines and pools get no calls because they failed, and an operator's word."""

from typing import Annotated

import typer

from cli import complete
from cli.client import JsonObject
from cli.operator import Session, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page
from cli.safety import confirm_not_last
from cli.watch import YesOption, confirm

app = typer.Typer(
    no_args_is_help=True, help="Breakers of engines and pools, and how operators hold them."
)

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="`engine:ID` or `pool:MODEL/REGION`.",
        autocompletion=complete.breakers,
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it stands in the audit log.")]


@app.command("list")
@with_session
def list_breakers(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List breakers by target, as the replica that answers sees them."""
    page = page_of(session, "breakers", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("TARGET", "STATE", ">RETRY IN", "HELD", "WHY"),
            (
                (
                    breaker["target"],
                    _state(breaker),
                    f"{breaker['waits_ms'] / 1000:.1f} s" if breaker["waits_ms"] else "-",
                    _held(breaker),
                    breaker["held_because"] or breaker["why"] or "-",
                )
                for breaker in page["data"]
            ),
        ),
    )


@app.command("open")
@with_session
def open_breaker(
    session: Session, target: TargetArgument, *, reason: ReasonOption, is_sure: YesOption = False
) -> None:
    """Send nothing there, whatever its calls say."""
    kind, _, name = target.partition(":")
    if kind == "pool":
        confirm(session, f"no call of {name} is answered there any more", is_sure=is_sure)
    else:
        confirm_not_last(
            session, f"open {target}", lambda engine: engine["id"] == name, is_sure=is_sure
        )
    _hold(session, target, "open", reason, f"{target} is held open: it gets no calls")


@app.command("close")
@with_session
def close_breaker(session: Session, target: TargetArgument, reason: ReasonOption) -> None:
    """Send calls there, however many of them fail."""
    _hold(session, target, "closed", reason, f"{target} is held closed: failures do not stop it")


@app.command("auto")
@with_session
def free_breaker(session: Session, target: TargetArgument, reason: ReasonOption) -> None:
    """Let it follow what it sees again."""
    _hold(session, target, "auto", reason, f"{target} follows what it sees")


def _hold(session: Session, target: str, mode: str, reason: str, sentence: str) -> None:
    document = session.api.post("breakers", {"target": target, "mode": mode, "reason": reason})
    session.out.say(document, sentence)


def _state(breaker: JsonObject) -> str:
    state = str(breaker["state"]).replace("_", "-")
    return f"{state}, in use" if breaker["is_panicking"] else state


def _held(breaker: JsonObject) -> str:
    if breaker["held"] is None:
        return "-"
    return f"{breaker['held']} since {instant(breaker['held_at'])}"
