"""What the live view can show: its tables, their columns, and where each row leads. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rich.text import Text

from cli.client import JsonObject
from cli.output import dollars, harmless, milliseconds
from cli.status import gauge, state_of
from cli.watch import progress_of

Value = str | float | int | None

MS_PER_S: Final = 1_000.0
TOKENS_PER_K: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `value` is what rows are sorted by, `shown` what stands there; `is_wide` columns are left
    out where there is no room for them, `width_max` bounds the others.
    """

    head: str
    value: Callable[[JsonObject], Value]
    shown: Callable[[JsonObject], Text | str]
    is_right: bool = False
    is_wide: bool = False
    width_max: int = 40


@dataclass(frozen=True, slots=True)
class Scope:
    """A view, narrowed to what a row before it named. `crumbs` say how it was come to."""

    view: str
    only: Mapping[str, str] = field(default_factory=dict)
    crumbs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A table over one part of the overview. `leads_to` is the view that a row opens, narrowed by the row's
    identity under the name `narrows`; `is_explained` rows open their explanation.
    """

    name: str
    title: str
    key: str
    part: str
    columns: tuple[Column, ...]
    identity: Callable[[JsonObject], str]
    leads_to: str = ""
    narrows: str = ""
    sort: int = 0
    is_descending: bool = True
    explains: Callable[[JsonObject], str] | None = None
    nothing: str = "nothing here"


def _text(name: str) -> Callable[[JsonObject], str]:
    return lambda row: harmless(str(row[name])) if row[name] not in {None, ""} else "-"


def _number(name: str) -> Callable[[JsonObject], Value]:
    return lambda row: row[name]


def _name(head: str, name: str, **more: Any) -> Column:
    return Column(head=head, value=_text(name), shown=_text(name), **more)


def _count(head: str, name: str, **more: Any) -> Column:
    return Column(
        head=head, value=_number(name), shown=lambda row: f"{row[name]:,}", is_right=True, **more
    )


def _gauge(head: str, name: str, **more: Any) -> Column:
    return Column(head=head, value=_number(name), shown=lambda row: gauge(row[name]), **more)


def _saturation(row: JsonObject) -> Text | str:
    # Where nothing is, everything is full.
    return gauge(row["saturation_ratio"]) if row["engines"] else "-"


def _ms(head: str, name: str, **more: Any) -> Column:
    return Column(
        head=head,
        value=_number(name),
        shown=lambda row: milliseconds(row[name]),
        is_right=True,
        **more,
    )


def _money(head: str, name: str, **more: Any) -> Column:
    return Column(
        head=head, value=_number(name), shown=lambda row: dollars(row[name]), is_right=True, **more
    )


def tokens(value: int) -> str:
    return f"{value / TOKENS_PER_K:.1f}k" if value >= 10 * TOKENS_PER_K else str(value)


def _clock(name: str) -> Callable[[JsonObject], str]:
    return lambda row: str(row[name])[11:19] if row[name] else "-"


def _engine_state(row: JsonObject) -> Text:
    if row["cordon"]:
        return Text("cordoned", style="yellow")
    if row["sleep_level"]:
        return Text(f"asleep {row['sleep_level']}", style="dim")
    if row["is_suspect"]:
        return Text("suspect", style="bold red")
    if row["state"] == "serving":
        if row["is_accepting"]:
            return Text("ok", style="green")
        return Text("not accepting", style="bold red")
    style = "bold red" if row["state"] == "failed" else "yellow"
    return Text(str(row["state"]), style=style)


def _call_state(row: JsonObject) -> Text:
    styles = {"succeeded": "green", "open": "cyan", "cancelled": "dim"}
    words = row["reason"] or ("running" if row["state"] == "open" else row["state"])
    return Text(str(words), style=styles.get(row["state"], "red"))


def _workflow_state(row: JsonObject) -> Text:
    styles = {"succeeded": "green", "running": "cyan", "cancelled": "dim"}
    return Text(str(row["state"]), style=styles.get(row["state"], "red"))


def _seconds_left(row: JsonObject) -> float | None:
    """Until the deadline of a running workflow, by the clock of whoever looks."""
    if row["state"] != "running":
        return None
    deadline = datetime.fromisoformat(row["deadline_at"])
    return (deadline - datetime.now(deadline.tzinfo)).total_seconds()


def _left(row: JsonObject) -> Text:
    seconds = _seconds_left(row)
    if seconds is None:
        return Text("-")
    return Text(milliseconds(max(0.0, seconds) * MS_PER_S), style="red" if seconds < 0 else "")


def _engine_of(row: JsonObject) -> str:
    decode, prefill = row["decode_engine_id"], row["prefill_engine_id"]
    return f"{prefill}+{decode}" if prefill else str(decode or "-")


def _used_ratio(row: JsonObject) -> float:
    used: int = row["spent_micro_usd"] + row["reserved_micro_usd"]
    return used / max(1, int(row["limit_micro_usd"]))


POOLS: Final = View(
    name="pools",
    title="pools",
    key="1",
    part="pools",
    identity=_text("model"),
    leads_to="engines",
    narrows="model",
    sort=4,
    nothing="no model is declared: `headway apply FILE`",
    columns=(
        _name("MODEL", "model", width_max=28),
        Column(
            head="ENGINES",
            value=_number("engines_accepting"),
            shown=lambda row: f"{row['engines_accepting']}/{row['engines']}",
            is_right=True,
        ),
        _count("RUN", "calls_in_flight"),
        _count("WAIT", "calls_waiting"),
        Column(
            head="SATURATION",
            value=lambda row: row["saturation_ratio"] if row["engines"] else None,
            shown=_saturation,
        ),
        Column(
            head="KV",
            value=_number("kv_used_ratio"),
            shown=lambda row: f"{row['kv_used_ratio']:.0%}" if row["engines"] else "-",
            is_right=True,
        ),
        Column(
            head="SEATS",
            value=_number("seats_taken"),
            shown=lambda row: f"{row['seats_taken']}/{row['seats_bound']}",
            is_right=True,
            is_wide=True,
        ),
        Column(
            head="PROMISED",
            value=_number("seats_promised"),
            shown=lambda row: f"{row['seats_promised']:.1f}",
            is_right=True,
            is_wide=True,
        ),
        _ms("WAIT TIME", "wait_ms", is_wide=True),
        Column(
            head="PRICE $/S",
            value=_number("price_usd_per_s"),
            shown=lambda row: f"{row['price_usd_per_s']:.5f}" if row["price_usd_per_s"] else "-",
            is_right=True,
            is_wide=True,
        ),
        Column(
            head="ASKED",
            value=_number("load_ratio"),
            shown=lambda row: f"{row['load_ratio']:.2f}x" if row["load_ratio"] else "-",
            is_right=True,
            is_wide=True,
        ),
        Column(head="STATE", value=lambda row: state_of(row).plain, shown=state_of),
    ),
)

ENGINES: Final = View(
    name="engines",
    title="engines",
    key="2",
    part="engines",
    identity=_text("id"),
    leads_to="requests",
    narrows="engine",
    sort=4,
    nothing="no engine is known: look at the agents with `headway nodes list`",
    columns=(
        _name("ENGINE", "id", width_max=28),
        _name("MODEL", "model", is_wide=True),
        _name("GPU", "gpu_type", width_max=10),
        _name("ROLE", "role", is_wide=True),
        _count("RUN", "running"),
        _count("WAIT", "waiting"),
        _gauge("KV", "kv_used_ratio"),
        Column(
            head="SEATS",
            value=_number("seats_taken"),
            shown=lambda row: f"{row['seats_taken']}/{row['seats_lent']}",
            is_right=True,
        ),
        _name("NODE", "node_id", is_wide=True),
        _name("REGION", "region", is_wide=True),
        Column(head="STATE", value=lambda row: _engine_state(row).plain, shown=_engine_state),
        Column(
            head="PROGRESS",
            value=lambda row: progress_of(row["progress"]),
            shown=lambda row: row["cordon"] or progress_of(row["progress"]),
            is_wide=True,
        ),
    ),
)

TENANTS: Final = View(
    name="tenants",
    title="tenants",
    key="3",
    part="tenants",
    identity=_text("id"),
    leads_to="workflows",
    narrows="tenant",
    sort=2,
    nothing="no tenant: `headway tenants create`",
    columns=(
        _name("TENANT", "id", width_max=24),
        _name("CLASS", "tenant_class", width_max=8),
        _count("CALLS", "calls"),
        _count("RUN", "calls_open"),
        Column(
            head="REFUSED",
            value=_number("calls_refused"),
            shown=lambda row: Text(
                f"{row['calls_refused']:,}", style="yellow" if row["calls_refused"] else ""
            ),
            is_right=True,
        ),
        _count("FAILED", "calls_failed", is_wide=True),
        _count("FLOWS", "workflows_running", is_wide=True),
        _ms("TTFT P50", "ttft_ms_p50", is_wide=True),
        _money("SPENT", "settled_micro_usd"),
        Column(
            head="BUDGET USED",
            value=_used_ratio,
            shown=lambda row: gauge(_used_ratio(row)),
        ),
        _money("BUDGET", "limit_micro_usd", is_wide=True),
        Column(
            head="STATE",
            value=lambda row: "disabled" if row["is_disabled"] else "",
            shown=lambda row: Text("disabled", style="red") if row["is_disabled"] else "ok",
            is_wide=True,
        ),
    ),
)

WORKFLOWS: Final = View(
    name="workflows",
    title="workflows",
    key="4",
    part="workflows",
    identity=_text("id"),
    leads_to="requests",
    narrows="workflow",
    sort=3,
    nothing="no workflow; `c` shows the requests",
    columns=(
        _name("WORKFLOW", "id", width_max=27),
        _name("TENANT", "tenant_id", width_max=14),
        Column(
            head="STEPS",
            value=_number("steps_done"),
            shown=lambda row: f"{row['steps_done']}/{row['steps_expected']}",
            is_right=True,
        ),
        _money("SPENT", "spent_micro_usd"),
        _name("KIND", "kind", is_wide=True, width_max=20),
        _name("SCOPE", "scope", is_wide=True),
        _name("SLO", "slo_class", is_wide=True),
        _name("MODEL", "model", is_wide=True, width_max=20),
        _money("BUDGET", "budget_micro_usd", is_wide=True),
        Column(head="LEFT", value=_seconds_left, shown=_left, is_right=True),
        Column(head="STATE", value=lambda row: str(row["state"]), shown=_workflow_state),
    ),
)

REQUESTS: Final = View(
    name="requests",
    title="requests",
    key="5",
    part="calls",
    identity=_text("id"),
    explains=_text("id"),
    sort=1,
    nothing="no request in the last minutes",
    columns=(
        _name("REQUEST", "id", width_max=22),
        Column(head="AT", value=_text("opened_at"), shown=_clock("opened_at")),
        _name("TENANT", "tenant_id", width_max=12),
        _name("MODEL", "model", is_wide=True, width_max=20),
        Column(head="ENGINE", value=_engine_of, shown=_engine_of, is_wide=True, width_max=28),
        Column(
            head="PROMPT",
            value=_number("prompt_tokens"),
            shown=lambda row: tokens(row["prompt_tokens"]),
            is_right=True,
            is_wide=True,
        ),
        Column(
            head="CACHED",
            value=_number("cached_tokens"),
            shown=lambda row: tokens(row["cached_tokens"]),
            is_right=True,
            is_wide=True,
        ),
        _count("OUT", "completion_tokens"),
        _ms("QUEUE", "queue_ms", is_wide=True),
        _ms("TTFT", "ttft_ms"),
        _ms("E2E", "e2e_ms", is_wide=True),
        _money("COST", "settled_micro_usd"),
        Column(
            head="STATE",
            value=lambda row: _call_state(row).plain,
            shown=_call_state,
            width_max=16,
        ),
    ),
)

REFUSALS: Final = View(
    name="refusals",
    title="refusals",
    key="6",
    part="refusals",
    identity=_text("reason"),
    explains=_text("example"),
    sort=1,
    nothing="nothing is refused",
    columns=(
        _name("REASON", "reason", width_max=24),
        _count("CALLS", "calls"),
        Column(
            head="SHARE",
            value=_number("share_ratio"),
            shown=lambda row: f"{row['share_ratio']:.1%}",
            is_right=True,
        ),
        _count("TENANTS", "tenants"),
        _name("MOSTLY", "tenant_most", width_max=14),
        _name("MODEL", "model_most", width_max=18),
        _name("RULE", "rule_most", is_wide=True),
        _name("EXAMPLE", "example", is_wide=True),
        Column(head="LAST", value=_text("last_at"), shown=_clock("last_at"), is_wide=True),
    ),
)

VIEWS: Final = {
    view.name: view for view in (POOLS, ENGINES, TENANTS, WORKFLOWS, REQUESTS, REFUSALS)
}


def opened(scope: Scope, row: JsonObject) -> Scope | None:
    """The scope that a row leads to; None where it leads to its explanation, or nowhere."""
    view = VIEWS[scope.view]
    if not view.leads_to:
        return None
    name = view.identity(row)
    return Scope(view.leads_to, {view.narrows: name}, (*scope.crumbs, f"{view.title} {name}"))


def calls_of(scope: Scope, row: JsonObject | None) -> Scope | None:
    """The requests of a row, or of the scope where no row is; None where neither narrows requests."""
    view = VIEWS[scope.view]
    if row is not None and view.narrows in {"model", "tenant", "workflow", "engine"}:
        name = view.identity(row)
        return Scope("requests", {view.narrows: name}, (*scope.crumbs, f"{view.title} {name}"))
    return Scope("requests", scope.only, scope.crumbs) if scope.only else None


def arranged(
    view: View, rows: list[JsonObject], *, sort: int, is_descending: bool, wanted: str
) -> list[JsonObject]:
    """The rows that hold the text `wanted` anywhere, in the order of a column; what has no value comes last."""
    needle = wanted.casefold()
    kept = [
        row
        for row in rows
        if not needle
        or any(needle in _plain(column.shown(row)).casefold() for column in view.columns)
    ]
    column = view.columns[sort]
    there = [row for row in kept if column.value(row) is not None]
    absent = [row for row in kept if column.value(row) is None]
    there.sort(key=view.identity)
    there.sort(key=column.value, reverse=is_descending)  # type: ignore[arg-type]
    return [*there, *absent]


def columns_for(view: View, width: int, wide_from: int) -> list[tuple[int, Column]]:
    """The columns that are shown at a width, with their numbers."""
    return [
        (number, column)
        for number, column in enumerate(view.columns)
        if not column.is_wide or width >= wide_from
    ]


def _plain(shown: Text | str) -> str:
    return shown.plain if isinstance(shown, Text) else shown
