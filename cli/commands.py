"""`headway commands`: what agents were told, and what became of it."""

from typing import Annotated

import typer
from rich.table import Table

from cli import complete
from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of
from cli.watch import WatchOption, progress_of, show_list, watch

app = typer.Typer(no_args_is_help=True, help="What agents were told, and what became of it.")

OPEN = ("pending", "sent")


@app.command("list")
@with_session
def list_commands(
    session: Session,
    *,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    node: Annotated[str | None, typer.Option("--node", help="Only of this node.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Only of this engine.")] = None,
    is_watched: WatchOption = False,
) -> None:
    """List commands, newest first."""

    def read() -> JsonObject:
        return page_of(session, "commands", limit, cursor, node_id=node, engine_id=engine)

    show_list(session, read, _table, is_watched=is_watched)


@app.command("show")
@with_session
def show(
    session: Session,
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", help="Command id.", autocompletion=complete.commands)
    ],
    *,
    is_watched: WatchOption = False,
) -> None:
    """Show one command; with --watch until its end, which decides the exit code."""
    follow(session, [command], is_watched=is_watched)


def follow(session: Session, ids: list[str], *, is_watched: bool) -> None:
    """Show commands, with `is_watched` until all of them have ended.

    Raises CommandFailure when one of them did not succeed.
    """

    def read() -> JsonObject:
        found = [session.api.get(f"commands/{segment(one)}") for one in ids]
        return {"object": "list", "data": found, "next_cursor": None}

    if not is_watched:
        page = read()
        session.out.show(page["data"][0] if len(ids) == 1 else page, _table(page))
        return
    ended = watch(session, read, _table, is_over=_all_ended)
    for command in ended.get("data", ()):
        if command["state"] not in (*OPEN, "done"):
            raise CommandFailure(
                ExitCode.FAILED,
                f"{command['kind']} {command['engine_id']}: {command['state']}:"
                f" {command['detail']}",
            )


def _all_ended(page: JsonObject) -> bool:
    return all(command["state"] not in OPEN for command in page["data"])


def _table(page: JsonObject) -> Table:
    return table(
        ("COMMAND", "KIND", "ENGINE", "STATE", "CREATED", "DETAIL"),
        (
            (
                command["id"],
                command["kind"],
                command["engine_id"],
                command["state"],
                instant(command["created_at"]),
                command["detail"]
                or (progress_of(command["progress"]) if command["state"] in OPEN else ""),
            )
            for command in page["data"]
        ),
    )
