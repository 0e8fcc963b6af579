"""What a command prints: JSON or YAML for programs, Rich tables for people, failures for all on standard
error.

Rich colours a terminal only, and none when NO_COLOR is set.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.failure import CommandFailure, ExitCode

_MICRO_USD_PER_USD = 1_000_000
_MS_PER_S = 1_000.0


class Format(StrEnum):
    """Tables are for people and may change; the documents of the other two are those of the operator API."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Output:
    """Writes to standard output in one format."""

    def __init__(self, format_: Format = Format.TABLE) -> None:
        self.format = format_
        self.console = Console(highlight=False, soft_wrap=False)

    @classmethod
    def of(cls, output: Format | None, *, as_json: bool) -> "Output":
        """What `--output` and its short form `--json` ask for. Raises CommandFailure when they differ."""
        if as_json and output not in {None, Format.JSON}:
            raise CommandFailure(
                ExitCode.USAGE, f"--json and --output {output} contradict each other", "give one"
            )
        return cls(Format.JSON if as_json else output or Format.TABLE)

    @property
    def is_for_programs(self) -> bool:
        return self.format is not Format.TABLE

    def document(self, document: Any) -> None:
        """Writes one document: JSON, or YAML where that was asked for."""
        if self.format is Format.YAML:
            print(_as_yaml(document), end="")
        else:
            print(json.dumps(document, indent=2, ensure_ascii=False))

    def document_of_many(self, document: Any) -> None:
        """Writes one of a stream of documents at once: a line of JSON, or YAML after `---`."""
        if self.format is Format.YAML:
            print(f"---\n{_as_yaml(document)}", end="", flush=True)
        else:
            print(json.dumps(document, ensure_ascii=False), flush=True)

    def show(self, document: Any, *renderables: Any) -> None:
        """Writes `document` for programs or the renderables for people."""
        if self.is_for_programs:
            self.document(document)
            return
        for renderable in renderables:
            self.console.print(renderable)

    def say(self, document: Any, sentence: str) -> None:
        self.show(document, escape(sentence))


def _as_yaml(document: Any) -> str:
    # Through JSON, so that both formats hold the same and nothing but plain values.
    plain = json.loads(json.dumps(document))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


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
            return escape(harmless(str(value)))


def harmless(text: str) -> str:
    """Text of a tenant without what a terminal would obey: every control character but the end of a line."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


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


def milliseconds(value: float | None) -> str:
    """A time that is as short as it can be: `34 ms`, `1.2 s`, `74 s`."""
    if value is None:
        return "-"
    if value < _MS_PER_S:
        return f"{value:.0f} ms"
    seconds = value / _MS_PER_S
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004


def ago(text: str | None) -> str:
    """How long an RFC 3339 instant is past, by this machine's clock: `34 s`, `12 min`, `3.4 h`, `9 d`."""
    if not text:
        return "-"
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds())
    for unit, length_s, until in (("s", 1, 120), ("min", 60, 120), ("h", 3_600, 48)):
        if seconds < until * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def instant(text: str | None) -> str:
    """An RFC 3339 instant without its fraction, short enough for a table."""
    return text[:19].replace("T", " ") if text else "-"
