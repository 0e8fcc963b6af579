"""Shows what changes: a live table for people, a JSON document per line for programs, until what is
watched has come to its end or somebody presses Ctrl-C.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table

from cli.client import JsonObject
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session
from cli.paging import show_page

LOOK_S = 0.5
MS_PER_S = 1_000

WatchOption = Annotated[bool, typer.Option("--watch", help="Go on and show what changes.")]


def never(_document: JsonObject) -> bool:
    return False


def watch(
    session: Session,
    read: Callable[[], JsonObject],
    view: Callable[[JsonObject], RenderableType],
    *,
    is_over: Callable[[JsonObject], bool] = never,
    every_s: float = LOOK_S,
) -> JsonObject:
    """Show what `read` returns, again and again; the last of it. For programs each that differs."""
    document: JsonObject = {}
    with contextlib.suppress(KeyboardInterrupt):
        if session.out.is_for_programs:
            before: Any = None
            while True:
                document = read()
                if document != before:
                    session.out.document_of_many(document)
                    before = document
                if is_over(document):
                    return document
                time.sleep(every_s)
        with Live(console=session.out.console, auto_refresh=False) as live:
            while True:
                document = read()
                live.update(view(document), refresh=True)
                if is_over(document):
                    return document
                time.sleep(every_s)
    return document


def show_list(
    session: Session,
    read: Callable[[], JsonObject],
    view: Callable[[JsonObject], Table],
    *,
    is_watched: bool,
) -> None:
    """Show a page that `read` fetches, with `is_watched` again and again."""
    if is_watched:
        watch(session, read, view)
        return
    page = read()
    show_page(session, page, view(page))


def confirm(session: Session, words: str, *, is_sure: bool) -> None:
    """Ask before something that ends running work or shuts somebody out; `--yes` says so beforehand.

    Raises CommandFailure when it is not confirmed, also where there is nobody at a terminal to ask.
    """
    if is_sure:
        return
    if session.out.is_for_programs or not sys.stdin.isatty():
        raise CommandFailure(ExitCode.USAGE, f"{words}: not confirmed", "add --yes")
    if not typer.confirm(f"{words}. Go on?", err=True):
        raise CommandFailure(ExitCode.USAGE, "nothing was done")


YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def progress_of(document: JsonObject | None) -> str:
    """`loading 50 %, 34 s of about 70 s`: only what is known."""
    if document is None:
        return ""
    words = str(document["phase"])
    if document["done_ratio"] is not None:
        words += f" {document['done_ratio']:.0%}"
    if document["calls_left"]:
        words += f", {document['calls_left']} calls left"
    words += f", {document['elapsed_ms'] / MS_PER_S:.0f} s"
    if document["expected_ms"]:
        words += f" of about {document['expected_ms'] / MS_PER_S:.0f} s"
    return words
