"""`headway commands`: what agents were told, and what became of it."""

import typer

from cli.operator import Session, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="What agents were told, and what became of it.")


@app.command("list")
@with_session
def list_commands(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List commands, newest first."""
    page = page_of(session, "commands", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("COMMAND", "KIND", "ENGINE", "STATE", "CREATED", "DETAIL"),
            (
                (
                    command["id"],
                    command["kind"],
                    command["engine_id"],
                    command["state"],
                    instant(command["created_at"]),
                    command["detail"],
                )
                for command in page["data"]
            ),
        ),
    )
