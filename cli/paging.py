"""Lists of the operator API, a page at a time."""

from typing import Annotated, Any

import typer
from rich.table import Table

from cli.client import JsonObject
from cli.operator import Session

LIST_LIMIT_MAX = 500

LimitOption = Annotated[
    int, typer.Option("--limit", min=1, max=LIST_LIMIT_MAX, help="Most entries to show.")
]
CursorOption = Annotated[
    str | None, typer.Option("--cursor", help="Continue after this entry of the last page.")
]


def page_of(
    session: Session, path: str, limit: int, cursor: str | None, **query: Any
) -> JsonObject:
    return session.api.get(path, limit=limit, cursor=cursor, **query)


def show_page(session: Session, page: JsonObject, view: Table) -> None:
    """Prints a page; for people with the words that lead to the next one."""
    if not session.out.is_for_programs and not page["data"]:
        session.out.console.print("nothing here")
        return
    session.out.show(page, view)
    if page.get("next_cursor") and not session.out.is_for_programs:
        session.out.console.print(f"[dim]more with --cursor {page['next_cursor']}[/]")
