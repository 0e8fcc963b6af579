"""`headway status`: one screen that says whether all is well, what is short or refused, and what to do."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.budgets import amount, bar
from cli.client import JsonObject
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import cell, instant, table
from cli.standing import Finding, Severity, findings_of, is_healthy
from cli.watch import WatchOption, progress_of, watch

WINDOW_S_DEFAULT: Final = 300
WATCH_S: Final = 2.0
ROWS_SHOWN_MAX: Final = 8
FINDINGS_SHOWN_MAX: Final = 12
GAUGE_CELLS: Final = 8
WARM_RATIO, HOT_RATIO = 0.7, 0.9
WIDE_COLUMNS_MIN: Final = 120
MS_PER_S: Final = 1_000.0
SECONDS_PER_MINUTE: Final = 60

_MARKS: Final = {
    Severity.ERROR: Text("✗", style="bold red"),
    Severity.WARNING: Text("!", style="bold yellow"),
    Severity.NOTE: Text("·", style="dim"),
}
# What needs PostgreSQL is left out when it is away; these the replica knows by itself.
_WITHOUT_POSTGRES: Final = ("readiness", "pools")


@with_session
def status(
    session: Session,
    *,
    window_s: Annotated[
        int,
        typer.Option("--window", min=10, max=3_600, help="Seconds that refusals are counted over."),
    ] = WINDOW_S_DEFAULT,
    is_watched: WatchOption = False,
) -> None:
    """Show whether the control plane is healthy, what is short or refused and why, and what to do.

    Exit code 0: healthy. 1: something does not work. 3: the server does not answer.
    """

    def read() -> JsonObject:
        return _read(session, window_s)

    def view(overview: JsonObject) -> RenderableType:
        return Group(*screen(overview, session))

    if is_watched:
        overview = watch(session, read, view, every_s=WATCH_S)
    else:
        overview = read()
        session.out.show(overview, view(overview))
    if overview and not overview["is_healthy"]:
        raise typer.Exit(int(ExitCode.FAILED))


def _read(session: Session, window_s: int) -> JsonObject:
    """The overview with what it means; without what PostgreSQL knows while that is away."""
    parts = ["readiness", "pools", "refusals", "breakers", "plan", "commands", "budgets"]
    try:
        overview = session.api.get("overview", part=parts, window_s=window_s)
    except CommandFailure as failure:
        if failure.reason != "state_unavailable":
            raise
        overview = session.api.get("overview", part=list(_WITHOUT_POSTGRES), window_s=window_s)
    findings = findings_of(overview)
    return {
        "is_healthy": is_healthy(findings),
        **overview,
        "findings": [
            {"severity": str(one.severity), "words": one.words, "command": one.command}
            for one in findings
        ],
    }


def screen(overview: JsonObject, session: Session) -> Iterator[RenderableType]:
    """The lines of the screen, from the most to the least urgent."""
    width = session.out.console.width
    yield from _head(overview, session)
    pools = overview.get("pools") or ()
    if pools:
        yield Text("")
        yield _pools(pools, width)
    if overview.get("refusals"):
        yield Text("")
        yield from _refusals(overview, width)
    out = [one for one in overview.get("breakers") or () if one["state"] != "closed"]
    if out:
        yield Text("")
        yield table(
            ("BREAKER", "STATE", ">TRIES IN", "WHY"),
            (
                (
                    one["target"],
                    str(one["state"]).replace("_", "-"),
                    f"{one['waits_ms'] / MS_PER_S:.0f} s" if one["waits_ms"] else "-",
                    one["held_because"] or one["why"],
                )
                for one in out[:ROWS_SHOWN_MAX]
            ),
        )
    if overview.get("commands"):
        yield Text("")
        yield table(
            ("COMMAND", "ENGINE", "STATE", "PROGRESS"),
            (
                (one["kind"], one["engine_id"], one["state"], progress_of(one["progress"]))
                for one in overview["commands"][:ROWS_SHOWN_MAX]
            ),
        )
    if overview.get("budgets"):
        yield Text("")
        yield _budgets(overview["budgets"][:ROWS_SHOWN_MAX])
    yield Text("")
    yield from _advice(
        [Finding(**{**one, "severity": Severity(one["severity"])}) for one in overview["findings"]],
        width,
    )


def _head(overview: JsonObject, session: Session) -> Iterator[RenderableType]:
    replica, gauges = overview["replica"], overview["replica"]["gauges"]
    is_well = overview["is_healthy"]
    where = session.api.url
    if session.connection is not None and session.connection.context:
        where += f" ({session.connection.context})"
    yield Text.assemble(
        (
            " HEALTHY " if is_well else " NOT HEALTHY ",
            f"bold {'black on green' if is_well else 'white on red'}",
        ),
        "  ",
        (where, "bold"),
        (f"  {instant(overview['at'])} UTC", "dim"),
    )
    plan = overview.get("plan")
    yield Text(
        f"replica {replica['id']}{', leads' if replica['is_leader'] else ''}, version"
        f" {replica['version']}, policy {replica['policy_revision'][:12]}, catalogue"
        f" {replica['catalog_revision']}",
        style="dim",
    )
    yield Text(
        f"{gauges['calls_in_flight'] - gauges['calls_waiting']} calls run,"
        f" {gauges['calls_waiting']} wait; {replica['workflows_running']} workflows;"
        f" {replica['nodes_heard']} of {replica['nodes_declared']} nodes heard,"
        f" {replica['engines_accepting']} of {replica['engines_known']} engines accept"
    )
    if plan is not None:
        yield _plan_line(plan)


def _plan_line(plan: JsonObject) -> Text:
    line = Text(f"planner: {plan['mode']}{', paused' if plan['is_paused'] else ''}")
    if plan["revision"] is not None:
        line.append(
            f"; plan {plan['revision']} {str(plan['status']).replace('_', ' ')}, {plan['state']},"
            f" {plan['moves']} moves"
        )
    if plan["age_s"] is not None:
        line.append(f", {plan['age_s']:.0f} s old")
    return line


def _pools(pools: Iterable[JsonObject], width: int) -> RenderableType:
    """The pools that are asked for most first; those with nothing at all are left to the last line."""
    is_wide = width >= WIDE_COLUMNS_MIN
    columns = ["POOL", ">ENGINES", ">RUN", ">WAIT", "SATURATION", ">KV"]
    if is_wide:
        columns += [">SEATS", ">PROMISED", ">PRICE $/S", ">LOAD", ">BACK LATER"]
    columns.append("STATE")
    view = table(columns, ())
    rows = sorted(
        pools,
        key=lambda pool: (-pool["saturation_ratio"], -pool["calls_waiting"], pool["model"]),
    )
    idle = [pool for pool in rows if not pool["engines"]]
    for pool in [pool for pool in rows if pool["engines"]][:ROWS_SHOWN_MAX]:
        cells: list[RenderableType] = [
            cell(pool["model"]),
            f"{pool['engines_accepting']}/{pool['engines']}",
            str(pool["calls_in_flight"]),
            _waiting(pool),
            gauge(pool["saturation_ratio"]),
            f"{pool['kv_used_ratio']:.0%}",
        ]
        if is_wide:
            cells += [
                f"{pool['seats_taken']}/{pool['seats_bound']}",
                f"{pool['seats_promised']:.1f}",
                f"{pool['price_usd_per_s']:.5f}" if pool["price_usd_per_s"] else "-",
                f"{pool['load_ratio']:.2f}" if pool["load_ratio"] else "-",
                str(pool["appointments"] or "-"),
            ]
        view.add_row(*cells, state_of(pool))
    shown = sum(bool(pool["engines"]) for pool in rows)
    parts: list[RenderableType] = [view] if shown else []
    if shown > ROWS_SHOWN_MAX:
        parts.append(Text(f"and {shown - ROWS_SHOWN_MAX} pools with less to do", style="dim"))
    if idle:
        names = ", ".join(pool["model"] for pool in idle[:ROWS_SHOWN_MAX])
        more = f" and {len(idle) - ROWS_SHOWN_MAX} more" if len(idle) > ROWS_SHOWN_MAX else ""
        parts.append(Text(f"no engines of {names}{more}", style="dim"))
    return Group(*parts)


def _waiting(pool: JsonObject) -> str:
    if not pool["calls_waiting"]:
        return "0"
    return f"{pool['calls_waiting']} ({pool['wait_ms'] / MS_PER_S:.1f} s)"


def gauge(ratio: float) -> Text:
    """A share of the whole as a short bar and a number, coloured by how little is left."""
    filled = round(min(1.0, max(0.0, ratio)) * GAUGE_CELLS)
    colour = "red" if ratio >= HOT_RATIO else "yellow" if ratio >= WARM_RATIO else "green"
    return Text.assemble(
        ("█" * filled, colour), ("·" * (GAUGE_CELLS - filled), "dim"), f" {ratio:.0%}"
    )


def state_of(pool: JsonObject) -> Text:
    """What a pool is in, the worst of it."""
    if not pool["engines_accepting"]:
        return Text("down" if pool["engines"] else "no engines", style="bold red")
    if pool["breaker"] == "open":
        return Text("breaker open", style="bold red")
    if pool["is_overloaded"]:
        return Text("overloaded", style="bold yellow")
    if pool["ramp_ratio"] < 1.0:
        return Text(f"warming {pool['ramp_ratio']:.0%}", style="yellow")
    if pool["saturation_ratio"] >= HOT_RATIO:
        return Text("full", style="yellow")
    return Text("ok", style="green")


def _refusals(overview: JsonObject, width: int) -> Iterator[RenderableType]:
    refusals = overview["refusals"]
    refused, asked = sum(one["calls"] for one in refusals), overview["calls_asked"]
    window = overview["window_s"]
    time = f"{window / SECONDS_PER_MINUTE:g} min" if window >= SECONDS_PER_MINUTE else f"{window} s"
    yield Text.assemble(
        ("REFUSED", "bold"),
        f" in the last {time}: {refused:,} of {asked:,} calls ({refused / max(1, asked):.1%})",
    )
    is_wide = width >= WIDE_COLUMNS_MIN
    columns = ["REASON", ">CALLS", ">SHARE", "MOSTLY"]
    view = table([*columns, "EXAMPLE"] if is_wide else columns, ())
    for one in refusals[:ROWS_SHOWN_MAX]:
        mostly = ", ".join(
            name
            for name in (one["tenant_most"], one["model_most"], one["rule_most"])
            if name is not None
        )
        row = [cell(one["reason"]), f"{one['calls']:,}", f"{one['share_ratio']:.1%}", cell(mostly)]
        view.add_row(*row, *([cell(one["example"])] if is_wide else []))
    yield view


def _budgets(budgets: Iterable[JsonObject]) -> Table:
    view = table(("BUDGET", ">LIMIT", ">SPENT", "USED", "WINDOW"), ())
    for one in budgets:
        view.add_row(
            Text(one["id"], overflow="fold"),
            amount(one, "limit"),
            amount(one, "spent"),
            bar(one),
            one["window"],
        )
    return view


def _advice(findings: list[Finding], width: int) -> Iterator[RenderableType]:
    if not findings:
        yield Text("nothing to do", style="green")
        return
    yield Text("WHAT TO DO NEXT", style="bold")
    view = Table(box=None, pad_edge=False, show_header=False)
    view.add_column(width=1)
    view.add_column(overflow="fold", ratio=1)
    if width >= WIDE_COLUMNS_MIN:
        view.add_column(overflow="fold", ratio=1)
    for finding in findings[:FINDINGS_SHOWN_MAX]:
        command = Text(f"$ {finding.command}" if finding.command else "", style="cyan")
        words = Text(finding.words)
        if width >= WIDE_COLUMNS_MIN:
            view.add_row(_MARKS[finding.severity], words, command)
        else:
            view.add_row(_MARKS[finding.severity], Group(words, command))
    yield view
    if len(findings) > FINDINGS_SHOWN_MAX:
        yield Text(
            escape(f"and {len(findings) - FINDINGS_SHOWN_MAX} more; --json has them"), style="dim"
        )
