"""`headway audit`: who changed what and why, in a chain of hashes."""

from typing import Annotated

import typer

from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="Who changed what and why, in a chain of hashes.")


@app.command("list")
@with_session
def list_entries(
    session: Session,
    *,
    subject: Annotated[
        str | None,
        typer.Option("--subject", help="Only this one, or with `*` all that begin so."),
    ] = None,
    limit: LimitOption = 20,
    cursor: CursorOption = None,
) -> None:
    """List changes, newest first."""
    page = page_of(session, "audit", limit, cursor, subject=subject)
    show_page(
        session,
        page,
        table(
            (">ID", "AT", "BY", "CHANGE", "SUBJECT", "REASON"),
            (
                (
                    entry["id"],
                    instant(entry["at"]),
                    entry["actor"],
                    entry["action"],
                    entry["subject"],
                    entry["reason"],
                )
                for entry in page["data"]
            ),
        ),
    )


@app.command("verify")
@with_session
def verify(
    session: Session,
    *,
    head: Annotated[
        str | None,
        typer.Option("--head", help="Hash of an earlier verification, which must be in the chain."),
    ] = None,
) -> None:
    """Walk the whole chain. Keep the head it prints: it shows later that nothing was cut off."""
    found = session.api.get("audit/verify", head=head)
    if not found["is_whole"]:
        if session.out.is_for_programs:
            session.out.document(found)
        raise CommandFailure(
            ExitCode.FAILED,
            f"the chain is broken at entry {found['broken_at']}: {found['why']}",
            "compare the entry with a backup; somebody has written around the program",
        )
    session.out.say(found, f"whole: {found['entries']} entries, head {found['head']}")
