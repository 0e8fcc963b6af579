"""What a command prints: JSON for programs, Rich tables for people, failures for both on standard
error.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.failure import CommandFailure

_MICRO_USD_PER_USD = 1_000_000


class Output:
    """`is_json` decides which of the two forms a command writes to standard output."""

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        self.console = Console(highlight=False, soft_wrap=False)

    def document(self, document: Any) -> None:
        """Writes JSON, indented, one document."""
        print(json.dumps(document, indent=2, ensure_ascii=False))

    def show(self, document: Any, *renderables: Any) -> None:
        """Writes `document` for programs or the renderables for people."""
        if self.is_json:
            self.document(document)
            return
        for renderable in renderables:
            self.console.print(renderable)

    def say(self, document: Any, sentence: str) -> None:
        self.show(document, escape(sentence))


def fail(failure: CommandFailure) -> None:
    """Writes a failure to standard error."""
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(failure.message)}")
    if failure.remedy:
        console.print(f"[dim]hint:[/] {escape(failure.remedy)}")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> Table:
    """A table that fits 80 columns. A name that starts with `>` makes its column right-aligned."""
    result = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in columns:
        result.add_column(
            name.lstrip(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
        )
    for row in rows:
        result.add_row(*(cell(value) for value in row))
    return result


def cell(value: object) -> str:
    """A value as a table shows it: `-` for nothing, yes or no, no markup."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case _:
            return escape(str(value))


def dollars(micro_usd: float | None) -> str:
    """Dollars with as many digits as the size asks for."""
    if micro_usd is None:
        return "-"
    amount = micro_usd / _MICRO_USD_PER_USD
    if amount == 0:
        return "$0"
    if abs(amount) >= 1:
        return f"${amount:,.2f}"
    digits = 4 if abs(amount) >= 0.01 else 6  # noqa: PLR2004  (below a cent, cents say nothing)
    return f"${amount:.{digits}f}"


def instant(text: str | None) -> str:
    """An RFC 3339 instant without its fraction, short enough for a table."""
    return text[:19].replace("T", " ") if text else "-"
