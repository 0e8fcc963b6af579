"""The live view as a terminal application: one table at a time, keys in the footer, a line that says how it is."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from cli.client import JsonObject, segment
from cli.explain import explanation
from cli.output import milliseconds
from cli.refusal import refusal_lines
from cli.standing import Severity, findings_of, is_healthy
from cli.top.poll import AWAY_PAUSE_S_MAX, ROWS_MAX, Away, Poller
from cli.top.views import (
    VIEWS,
    Column,
    Scope,
    View,
    arranged,
    calls_of,
    columns_for,
    opened,
)

INTERVAL_S_DEFAULT: Final = 2.0
INTERVAL_S_MIN: Final = 0.5
INTERVAL_S_MAX: Final = 60.0
# Counting costs the server more the longer this is, and it is asked for again and again.
WINDOW_S: Final = 120
# From this width on all columns are shown.
WIDE_FROM: Final = 120
CELL_PADDING: Final = 1
NAME_WIDTH_MIN: Final = 8
# What the line at the top needs, whatever table is below it.
HEAD_PARTS: Final = ("pools", "refusals")


@dataclass(slots=True)
class Order:
    """How a view is sorted, for as long as the program runs."""

    column: int
    is_descending: bool


class Explained(ModalScreen[None]):
    """Why one request went where it went, or was refused."""

    BINDINGS: ClassVar = [
        Binding("escape,q,backspace", "dismiss", "Back"),
        Binding("down,j", "down", "Down", show=False),
        Binding("up,k", "up", "Up", show=False),
    ]
    DEFAULT_CSS = """
    Explained { background: $background; }
    Explained VerticalScroll { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    """

    def __init__(self, request_id: str, read: Callable[[str], Any]) -> None:
        super().__init__()
        self._request_id = request_id
        self._read = read

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(f"reading {self._request_id} …", style="dim"), id="words")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.run_worker(self._load(), exclusive=True)

    async def _load(self) -> None:
        words = await self._read(self._request_id)
        self.query_one("#words", Static).update(words)

    def action_down(self) -> None:
        self.query_one(VerticalScroll).scroll_down(animate=False)

    def action_up(self) -> None:
        self.query_one(VerticalScroll).scroll_up(animate=False)


class Top(App[int]):
    """The application. Its exit value is 0, or that of ExitCode when the server refused the key."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 2; padding: 0 1; }
    #away { height: auto; max-height: 3; padding: 0 1; background: darkred; color: white; display: none; }
    #table { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }
    #nothing { height: 1fr; padding: 1 2; color: $text-muted; display: none; }
    #filter { height: 1; border: none; padding: 0 1; display: none; }
    """
    BINDINGS: ClassVar = [
        *(
            Binding(
                view.key,
                f"show('{view.name}')",
                # The first stands in the footer for all of them.
                "Views" if number == 0 else view.title,
                key_display="1-6",
                show=number == 0,
            )
            for number, view in enumerate(VIEWS.values())
        ),
        Binding("enter", "open", "Open", key_display="ret"),
        Binding("escape,backspace", "leave_scope", "Back", key_display="esc"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "reverse", "Reverse", key_display="S"),
        Binding("a", "sort(-1)", "Sort before", show=False),
        Binding("c", "calls", "Calls"),
        Binding("space", "pause", "Pause", key_display="spc"),
        Binding("plus,equals_sign", "faster", "Faster", show=False),
        Binding("minus", "slower", "Slower", show=False),
        Binding("r", "refresh_now", "Now", show=False),
        Binding("q,ctrl+c", "leave", "Quit", key_display="q"),
    ]

    def __init__(
        self, poller: Poller, *, view: str = "pools", interval_s: float = INTERVAL_S_DEFAULT
    ) -> None:
        super().__init__()
        self._poller = poller
        self.interval_s = min(INTERVAL_S_MAX, max(INTERVAL_S_MIN, interval_s))
        self.scopes = [Scope(view)]
        self.orders = {name: Order(one.sort, one.is_descending) for name, one in VIEWS.items()}
        self.wanted = ""
        self.is_paused = False
        self.overview: JsonObject | None = None
        self.away: Away | None = None
        self.polls = 0
        self._of: Scope | None = None
        self._away_since: datetime | None = None
        self.rows: list[JsonObject] = []
        self._filled: tuple[object, ...] = ()
        self._again = asyncio.Event()
        self.exit_code = 0

    # ------------------------------------------------------------ what is there

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="away")
        yield DataTable(
            id="table", cursor_type="row", zebra_stripes=False, cell_padding=CELL_PADDING
        )
        yield Static(id="nothing")
        yield Input(
            id="filter", placeholder="text to look for; enter keeps it, esc drops it", compact=True
        )
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self._show_head()
        self.query_one(DataTable).focus()
        self.run_worker(self._poll(), name="poll", exclusive=True, group="poll")

    def on_resize(self) -> None:
        self._fill()
        self._show_head()

    @property
    def scope(self) -> Scope:
        return self.scopes[-1]

    @property
    def view(self) -> View:
        return VIEWS[self.scope.view]

    @property
    def is_shown(self) -> bool:
        """Whether what is on the screen is of the scope that was gone to."""
        return self._of == self.scope

    # ------------------------------------------------------------ asking

    async def _poll(self) -> None:
        """One request after another: the next is sent no sooner than the interval after the last answer."""
        pause_s = self.interval_s
        while True:
            if not self.is_paused or self._of != self.scope:
                asked = self.scope
                parts = dict.fromkeys((VIEWS[asked.view].part, *HEAD_PARTS))
                self.polls += 1
                answer = await self._poller.overview(list(parts), asked.only, WINDOW_S)
                pause_s = self._take(asked, answer, pause_s)
            self._again.clear()
            try:
                await asyncio.wait_for(self._again.wait(), pause_s)
            except TimeoutError:
                continue

    def _take(self, asked: Scope, answer: JsonObject | Away, pause_s: float) -> float:
        """Show an answer, or that there is none; the pause before the next question, in seconds."""
        if isinstance(answer, Away):
            if self.away is None:
                self._away_since = datetime.now(UTC)
            self.away = answer
            pause_s = min(AWAY_PAUSE_S_MAX, max(self.interval_s, 2.0 * pause_s))
        else:
            self.away, self._away_since = None, None
            pause_s = self.interval_s
            if asked == self.scope:
                self.overview, self._of = answer, asked
                self._fill()
        self._show_head()
        return pause_s

    # ------------------------------------------------------------ showing

    def _show_head(self) -> None:
        head = self.query_one("#head", Static)
        head.update(Group(self._state_line(), self._place_line()))
        away = self.query_one("#away", Static)
        away.display = self.away is not None
        if self.away is not None and self._away_since is not None:
            since = (datetime.now(UTC) - self._away_since).total_seconds()
            remedy = "check --key and the role of the key" if self.away.is_final else "asking again"
            old = "" if self.overview is None else f"; below is {str(self.overview['at'])[11:19]}"
            away.update(
                Text(
                    f"no answer from {self._poller.url} for {since:.0f} s: {self.away.words};"
                    f" {remedy}{old}",
                    no_wrap=False,
                )
            )

    def _state_line(self) -> RenderableType:
        overview = self.overview
        if overview is None:
            return Text(f"{self._poller.url}: asking …", style="dim")
        replica, gauges = overview["replica"], overview["replica"]["gauges"]
        findings = findings_of(overview)
        is_well = is_healthy(findings)
        line = Text(no_wrap=True, overflow="ellipsis")
        if self.away is not None:
            line.append(" AWAY ", style="white on red")
        else:
            style = "black on green" if is_well else "white on red"
            line.append(" HEALTHY " if is_well else " NOT HEALTHY ", style=f"bold {style}")
        line.append(
            f" {gauges['calls_in_flight'] - gauges['calls_waiting']} run,"
            f" {gauges['calls_waiting']} wait, {replica['engines_accepting']}"
            f"/{replica['engines_known']} engines, {replica['workflows_running']} flows"
        )
        refused = sum(one["calls"] for one in overview.get("refusals") or ())
        if refused:
            share = refused / max(1, overview["calls_asked"] or 1)
            line.append(f", {share:.1%} refused", style="yellow")
        worst = next((one for one in findings if one.severity is not Severity.NOTE), None)
        if worst is not None:
            line.append(f"  {worst.words}", style="red" if not is_well else "yellow")
        return line

    def _place_line(self) -> RenderableType:
        order = self.orders[self.view.name]
        column = self.view.columns[order.column]
        line = Text(no_wrap=True, overflow="ellipsis")
        for crumb in self.scope.crumbs:
            line.append(f"{crumb} > ", style="dim")
        line.append(self.view.title, style="bold reverse")
        more = "+" if len(self.rows) >= ROWS_MAX else ""
        line.append(f" {len(self.rows)}{more}", style="dim")
        line.append(
            f"  by {column.head.lower()} {'▼' if order.is_descending else '▲'}", style="dim"
        )
        if self.wanted:
            line.append(f"  /{self.wanted}", style="bold yellow")
        if self.is_paused:
            line.append("  paused", style="bold yellow")
        elif self.overview is not None:
            line.append(
                f"  {str(self.overview['at'])[11:19]} every {self.interval_s:g} s", style="dim"
            )
        return line

    def _fill(self) -> None:
        """Put the rows into the table; the cursor stays on the row that it is on."""
        table = self.query_one(DataTable)
        nothing = self.query_one("#nothing", Static)
        view, order = self.view, self.orders[self.view.name]
        rows = list((self.overview or {}).get(view.part) or ()) if self._of == self.scope else []
        self.rows = arranged(
            view,
            rows,
            sort=order.column,
            is_descending=order.is_descending,
            wanted=self.wanted,
        )
        is_known = self._of == self.scope
        nothing.display = not self.rows
        table.display = bool(self.rows)
        if not self.rows:
            words = f"nothing matches `{self.wanted}`" if rows else view.nothing
            nothing.update(words if is_known else "…")
            self._filled = ()
            return
        shown = columns_for(view, self.size.width, WIDE_FROM)
        cells = [[_cell(column.shown(row)) for _, column in shown] for row in self.rows]
        widths = _widths([column for _, column in shown], cells, self.size.width)
        heads = [
            _head(column, is_sorted=number == order.column, is_descending=order.is_descending)
            for number, column in shown
        ]
        keys = [view.identity(row) for row in self.rows]
        shape = (view.name, tuple(keys), tuple(widths), tuple(head.plain for head in heads))
        fitted = [
            [
                _fit(cell, width, is_right=column.is_right)
                for cell, width, (_, column) in zip(line, widths, shown, strict=True)
            ]
            for line in cells
        ]
        if shape == self._filled:
            for key, line in zip(keys, fitted, strict=True):
                for (number, _), cell in zip(shown, line, strict=True):
                    table.update_cell(key, str(number), cell)
            return
        at = self._row_key(table)
        scrolled = table.scroll_y
        table.clear(columns=True)
        for (number, column), head, width in zip(shown, heads, widths, strict=True):
            table.add_column(
                _fit(head, width, is_right=column.is_right), key=str(number), width=width
            )
        for key, line in zip(keys, fitted, strict=True):
            table.add_row(*line, key=key)
        is_same_view = bool(self._filled) and self._filled[0] == view.name
        self._filled = shape
        if is_same_view and at in keys:
            table.move_cursor(row=keys.index(at), scroll=False)
            table.scroll_to(y=scrolled, animate=False, immediate=True)

    def _row_key(self, table: DataTable[Any]) -> str:
        if not table.row_count:
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _row(self) -> JsonObject | None:
        table = self.query_one(DataTable)
        if not self.rows or not table.is_valid_row_index(table.cursor_row):
            return None
        return self.rows[table.cursor_row]

    # ------------------------------------------------------------ keys

    def _go(self, scopes: list[Scope]) -> None:
        self.scopes = scopes
        self._filled = ()
        self._fill()
        self._show_head()
        self._again.set()

    def action_show(self, name: str) -> None:
        self._drop_filter()
        self._go([Scope(name)])

    def action_leave_scope(self) -> None:
        if self.wanted:
            self._drop_filter()
            self._fill()
            self._show_head()
        elif len(self.scopes) > 1:
            self._go(self.scopes[:-1])

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Go into the row under the cursor."""
        row = self._row()
        if row is None:
            return
        if self.view.explains is not None:
            self.push_screen(Explained(self.view.explains(row), self._explain))
            return
        scope = opened(self.scope, row)
        if scope is not None:
            self._drop_filter()
            self._go([*self.scopes, scope])

    def action_calls(self) -> None:
        scope = calls_of(self.scope, self._row())
        if scope is not None and self.view.name != "requests":
            self._drop_filter()
            self._go([*self.scopes, scope])

    def action_sort(self, step: int) -> None:
        """To the next column that is shown."""
        order = self.orders[self.view.name]
        numbers = [number for number, _ in columns_for(self.view, self.size.width, WIDE_FROM)]
        here = numbers.index(order.column) if order.column in numbers else 0
        order.column = numbers[(here + step) % len(numbers)]
        self._fill()
        self._show_head()

    def action_reverse(self) -> None:
        order = self.orders[self.view.name]
        order.is_descending = not order.is_descending
        self._fill()
        self._show_head()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        order = self.orders[self.view.name]
        number = int(str(event.column_key.value))
        if order.column == number:
            order.is_descending = not order.is_descending
        order.column = number
        self._fill()
        self._show_head()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.value = self.wanted
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.wanted = event.value
        self._fill()
        self._show_head()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._close_filter()

    def on_key(self, event: Any) -> None:
        if event.key == "escape" and self.focused is self.query_one("#filter", Input):
            event.stop()
            event.prevent_default()
            self._drop_filter()
            self._fill()
            self._show_head()

    def _drop_filter(self) -> None:
        self.wanted = ""
        self._close_filter()

    def _close_filter(self) -> None:
        box = self.query_one("#filter", Input)
        with box.prevent(Input.Changed):
            box.value = self.wanted
        box.display = False
        self.query_one(DataTable).focus()

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self._show_head()
        if not self.is_paused:
            self._again.set()

    def action_faster(self) -> None:
        self.interval_s = max(INTERVAL_S_MIN, self.interval_s / 2)
        self._show_head()
        self._again.set()

    def action_slower(self) -> None:
        self.interval_s = min(INTERVAL_S_MAX, self.interval_s * 2)
        self._show_head()

    def action_refresh_now(self) -> None:
        self._again.set()

    def action_leave(self) -> None:
        self.exit(self.exit_code)

    # ------------------------------------------------------------ explaining

    async def _explain(self, request_id: str) -> RenderableType:
        """The explanation of a request; of a refused one also what would have let it in."""
        answer = await self._poller.get(f"requests/{segment(request_id)}/explain")
        parts: list[RenderableType] = []
        if isinstance(answer, Away):
            parts.append(Text(answer.words, style="yellow"))
        else:
            parts += [
                Text.from_markup(part) if isinstance(part, str) else part
                for part in explanation(answer, self.size.width - 4)
            ]
        if isinstance(answer, Away) or answer["winner"] is None:
            refusal = await self._poller.get(f"refusals/{segment(request_id)}")
            if not isinstance(refusal, Away):
                parts += [Text(""), *(Text.from_markup(line) for line in refusal_lines(refusal))]
        detail = await self._poller.get(f"requests/{segment(request_id)}")
        if not isinstance(detail, Away):
            parts += [Text(""), Text.from_markup(_outcome(detail))]
        return Group(*parts)


def _outcome(detail: JsonObject) -> str:
    """How a request ended, and which engines it ran on."""
    tries = ", ".join(
        f"{attempt['engine_id']} {attempt['outcome']}" for attempt in detail["attempts"]
    )
    words = [
        f"{detail['state']}{': ' + detail['reason'] if detail['reason'] else ''}",
        f"first token {milliseconds(detail['ttft_ms'])}",
        f"in all {milliseconds(detail['e2e_ms'])}",
        (
            f"{detail['prompt_tokens']:,} prompt tokens, {detail['cached_tokens']:,} of them cached,"
            f" {detail['completion_tokens']:,} out"
        ),
    ]
    if tries:
        words.append(f"tried {tries}")
    return escape("; ".join(words))


def _cell(shown: Text | str) -> Text:
    return shown if isinstance(shown, Text) else Text(shown)


def _head(column: Column, *, is_sorted: bool, is_descending: bool) -> Text:
    mark = ("▼" if is_descending else "▲") if is_sorted else ""
    return Text(f"{column.head}{mark}")


def _fit(text: Text, width: int, *, is_right: bool) -> Text:
    """Cut to the width, or put to the right of it."""
    fitted = text.copy()
    if fitted.cell_len > width:
        fitted.truncate(width, overflow="ellipsis")
    elif is_right:
        fitted.pad_left(width - fitted.cell_len)
    return fitted


def _widths(columns: list[Column], lines: list[list[Text]], width: int) -> list[int]:
    """What columns need; the widest give way where that is more than there is."""
    needed = [
        min(
            column.width_max,
            # Room for the mark of the order.
            max(len(column.head) + 1, *(line[number].cell_len for line in lines)),
        )
        for number, column in enumerate(columns)
    ]
    room = width - 1 - 2 * CELL_PADDING * len(columns)
    while sum(needed) > room and max(needed) > NAME_WIDTH_MIN:
        widest = max(range(len(needed)), key=lambda number: needed[number])
        needed[widest] -= 1
    return needed
