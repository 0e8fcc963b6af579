"""`headway report`: the last hours or days on one page with plots, for people who would rather look than read."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.client import JsonObject
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import dollars, instant, table
from cli.policy.compare import replayed, seconds_of

BUCKETS: Final = 48
PAGE: Final = 100
WASTERS_MAX: Final = 1_000
WASTERS_SHOWN: Final = 20
CHANGES_SHOWN: Final = 15
HEIGHT_PX: Final = 340
MICRO_USD_PER_USD: Final = 1_000_000
PERCENT: Final = 100

_COLORS: Final = (
    "#00798c", "#edae49", "#8d5a97", "#4c956c", "#d1495b", "#5fa8d3", "#f4a261", "#6a4c93", "#a3b18a",
    "#b5838d",
)  # fmt: skip
_REST_COLOR: Final = "#ced4da"
_STATE_COLORS: Final = {
    "succeeded": "#4c956c",
    "failed": "#d1495b",
    "expired": "#edae49",
    "cancelled": "#9aa5b1",
}
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1180px;margin:32px auto;padding:0 20px}
h1{font-size:26px;margin:0}h2{font-size:19px;margin:36px 0 4px;border-top:1px solid #e4e7eb;padding-top:20px}
p{max-width:80ch;color:#52606d}table{border-collapse:collapse;font-size:13px;width:100%}
td,th{padding:4px 8px;text-align:left;border-bottom:1px solid #e4e7eb}
td.n,th.n{text-align:right;white-space:nowrap}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:20px 0}
.tile{border:1px solid #e4e7eb;border-radius:6px;padding:10px 16px;min-width:130px}
.tile b{display:block;font-size:22px}.tile span{color:#52606d;font-size:13px}
code{background:#f1f3f5;padding:1px 4px;border-radius:3px}
"""


@with_session
def report(
    session: Session,
    *,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="How far back: 90s, 30m, 24h or 7d.")
    ] = "24h",
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one page with plots.", dir_okay=False),
    ] = None,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
    has_shadow: Annotated[
        bool,
        typer.Option(
            "--shadow/--no-shadow", help="Decide the log again by the policies in shadow, if any."
        ),
    ] = True,
) -> None:
    """Report spend, cost per successful task, SLO attainment, refusals and waste.

    With --html as one self-contained page that needs no network.
    """
    seconds = seconds_of(since)
    if html is not None and html.exists() and not is_forced:
        raise CommandFailure(ExitCode.USAGE, f"{html} is there already", "add --force")
    document = read(session, seconds, has_shadow=has_shadow)
    if html is not None:
        try:
            html.write_text(render(document, session.api.url), encoding="utf-8")
        except OSError as error:
            raise CommandFailure(
                ExitCode.USAGE, f"{html} can not be written: {error}", "name another file"
            ) from error
        document["html"] = str(html)
    session.out.show(document, *_lines(document, html))


def read(session: Session, since_s: int, *, has_shadow: bool) -> JsonObject:
    """Everything that the page is drawn from, a page of the API at a time."""
    document = session.api.get("report", since_s=since_s, buckets=BUCKETS)
    wasters: list[JsonObject] = []
    cursor: str | None = None
    while len(wasters) < WASTERS_MAX:
        page = session.api.get("report/wasters", since_s=since_s, limit=PAGE, cursor=cursor)
        wasters += page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    document["wasters"] = wasters
    document["is_wasters_cut"] = cursor is not None
    document["shadow"] = _shadow(session, since_s) if has_shadow else None
    return document


def _shadow(session: Session, since_s: int) -> JsonObject | None:
    """What the candidate would have changed; None when no policies are on trial."""
    rollout = session.api.get("policies/rollout")
    if not rollout["candidate_digest"]:
        return None
    again, is_cut = replayed(session, since_s, "candidate")
    return {**asdict(again), "is_cut": is_cut, "digest": rollout["candidate_digest"]}


# ---------------------------------------------------------------- numbers


def summary(document: JsonObject) -> JsonObject:
    """The numbers of the tiles. Ratios are null where there is nothing to divide by."""
    totals = document["totals"]
    ended = sum(point["workflows"] for point in document["workflows"])
    succeeded = sum(
        point["workflows"] for point in document["workflows"] if point["state"] == "succeeded"
    )
    spent = sum(point["micro_usd"] for point in document["spend"])
    attained = sum(point["calls_attained"] for point in document["attainment"])
    counted = sum(point["calls"] for point in document["attainment"])
    refused = sum(point["calls"] for point in document["refusals"])
    settled = totals["settled_micro_usd"]
    return {
        "calls": totals["calls"],
        "spent_micro_usd": spent,
        "workflows_ended": ended,
        "workflows_succeeded": succeeded,
        "micro_usd_per_success": spent / succeeded if succeeded else None,
        "attainment_ratio": attained / counted if counted else None,
        "calls_refused": refused,
        "wasted_ratio": totals["wasted_micro_usd"] / settled if settled else None,
        "cached_ratio": totals["cached_tokens"] / totals["prompt_tokens"]
        if totals["prompt_tokens"]
        else None,
    }


def _lines(document: JsonObject, html: Path | None) -> list[Any]:
    """The short form for a terminal."""
    numbers = summary(document)
    document["summary"] = numbers
    lines: list[Any] = [
        table(
            ("", ""),
            (
                ("calls accepted", f"{numbers['calls']:,}"),
                ("calls refused", f"{numbers['calls_refused']:,}"),
                ("spend", dollars(numbers["spent_micro_usd"])),
                (
                    "workflows",
                    f"{numbers['workflows_succeeded']:,} of {numbers['workflows_ended']:,} succeeded",
                ),
                ("cost per successful task", dollars(numbers["micro_usd_per_success"])),
                ("within SLO", _percent(numbers["attainment_ratio"])),
                ("wasted", _percent(numbers["wasted_ratio"])),
                ("prompt tokens cached", _percent(numbers["cached_ratio"])),
            ),
        )
    ]
    if document["wasters"]:
        lines += [
            "\n[bold]what cost most without success[/]",
            table(
                ("WORKFLOW", "TENANT", "STATE", ">CALLS", ">COST"),
                (
                    (one["id"], one["tenant_id"], one["state"], one["calls"],
                     dollars(one["micro_usd"]))
                    for one in document["wasters"][:5]
                ),
            ),
        ]  # fmt: skip
    lines.append(f"\nwritten to {html}" if html is not None else "\n[dim]--html FILE draws it[/]")
    return lines


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


# ---------------------------------------------------------------- the page


def render(document: JsonObject, url: str) -> str:
    """The page as one text, with everything that it needs inside it."""
    numbers = document["summary"] = summary(document)
    begins = datetime.fromisoformat(document["at"]).timestamp() - document["since_s"]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Headway report</title>",
        f"<style>{_STYLE}</style></head><body><h1>Headway report</h1>",
        (
            f"<p>{escape(url)}, from {datetime.fromtimestamp(begins, UTC):%Y-%m-%d %H:%M} to"
            f" {escape(instant(document['at'])[:16])} UTC, in buckets of"
            f" {document['bucket_s'] / 60:g} minutes. Money is what tenants were charged; cost per successful task"
            " (CPST) is all of it over the workflows that succeeded in that time.</p>"
        ),
        _tiles(numbers),
    ]
    is_first = True
    for title, words, figures in _sections(document):
        parts.append(f"<h2>{escape(title)}</h2>")
        if words:
            parts.append(words)
        for figure in figures:
            parts.append(
                figure.to_html(
                    full_html=False, include_plotlyjs=is_first, config={"displaylogo": False}
                )
            )
            is_first = False
    parts.append("</body></html>")
    return "\n".join(parts)


def _sections(document: JsonObject) -> Iterable[tuple[str, str, list[Any]]]:
    yield "Spend", "", [_spend(document)] if document["spend"] else []
    if not document["spend"]:
        yield "", "<p>Nothing was charged in this time.</p>", []
    yield (
        "Workflows and what a successful one costs",
        "" if document["workflows"] else "<p>No workflow ended in this time.</p>",
        [_workflows(document), _cpst(document)] if document["workflows"] else [],
    )
    yield (
        "Attainment of SLO classes",
        (
            "<p>Calls that succeeded within the time to the first token, the time per token and the whole time of"
            " their class, of all that ended and were not cancelled by their clients.</p>"
        ),
        [_attainment(document)] if document["attainment"] else [],
    )
    yield (
        "Refusals",
        "" if document["refusals"] else "<p>Nothing was refused.</p>",
        [_refusals(document)] if document["refusals"] else [],
    )
    yield (
        "What cost without success",
        _wasters(document),
        [_waste_by_tenant(document)] if document["wasters"] else [],
    )
    yield "What the policies in shadow would have changed", _shadow_words(document["shadow"]), []


def _figure(title: str, unit: str, **layout: Any) -> Any:
    # Half a second to import, and only for a page.
    import plotly.graph_objects as go

    plots: Any = go
    figure = plots.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=HEIGHT_PX,
        margin={"l": 60, "r": 20, "t": 50, "b": 40},
        yaxis_title=unit,
        yaxis_rangemode="tozero",
        **layout,
    )
    return figure


def _times(document: JsonObject, points: Iterable[JsonObject]) -> list[str]:
    """Every bucket from the first to the last, so that empty ones are seen."""
    present = sorted({point["at"] for point in points})
    if not present:
        return []
    first, last = (datetime.fromisoformat(present[number]).timestamp() for number in (0, -1))
    count = round((last - first) / document["bucket_s"]) + 1
    return [
        datetime.fromtimestamp(first + number * document["bucket_s"], UTC).isoformat()
        for number in range(count)
    ]


def _series(
    times: Sequence[str], points: Iterable[JsonObject], name: str, scale: float = 1.0
) -> list[float]:
    held = {_at(point["at"]): point[name] * scale for point in points}
    return [held.get(_at(time), 0.0) for time in times]


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _spend(document: JsonObject) -> Any:
    figure = _figure("Charged, by tenant", "dollars", barmode="stack")
    points = document["spend"]
    times = _times(document, points)
    sums: dict[str | None, int] = {}
    for point in points:
        sums[point["tenant_id"]] = sums.get(point["tenant_id"], 0) + point["micro_usd"]
    # The dearest at the bottom, and all others on top.
    order = sorted(sums, key=lambda tenant: (tenant is None, -sums[tenant], tenant or ""))
    for number, tenant in enumerate(order):
        figure.add_bar(
            x=times,
            y=_series(
                times,
                [point for point in points if point["tenant_id"] == tenant],
                "micro_usd",
                1 / MICRO_USD_PER_USD,
            ),
            name="all others" if tenant is None else tenant,
            marker_color=_REST_COLOR if tenant is None else _COLORS[number % len(_COLORS)],
        )
    return figure


def _workflows(document: JsonObject) -> Any:
    figure = _figure("Workflows that ended", "workflows", barmode="stack")
    points = document["workflows"]
    times = _times(document, points)
    for state, color in _STATE_COLORS.items():
        of_state = [point for point in points if point["state"] == state]
        if of_state:
            figure.add_bar(
                x=times, y=_series(times, of_state, "workflows"), name=state, marker_color=color
            )
    return figure


def _cpst(document: JsonObject) -> Any:
    figure = _figure("Cost per successful task", "dollars")
    points = document["workflows"]
    times = _times(document, [*points, *document["spend"]])
    spent: dict[float, float] = {}
    for point in document["spend"]:
        spent[_at(point["at"])] = spent.get(_at(point["at"]), 0.0) + point["micro_usd"]
    succeeded = {
        _at(point["at"]): point["workflows"] for point in points if point["state"] == "succeeded"
    }
    values = [
        spent.get(_at(time), 0.0) / MICRO_USD_PER_USD / succeeded[_at(time)]
        if succeeded.get(_at(time))
        else None
        for time in times
    ]
    figure.add_scatter(
        x=times, y=values, mode="lines+markers", name="CPST", line={"color": _COLORS[0], "width": 3}
    )
    return figure


def _attainment(document: JsonObject) -> Any:
    figure = _figure("Calls within all targets of their class", "percent")
    figure.update_yaxes(range=[0, PERCENT + 2])
    points = document["attainment"]
    for number, name in enumerate(sorted({point["slo_class"] for point in points})):
        own = [point for point in points if point["slo_class"] == name]
        figure.add_scatter(
            x=[point["at"] for point in own],
            y=[PERCENT * point["calls_attained"] / point["calls"] for point in own],
            text=[f"{point['calls_attained']:,} of {point['calls']:,} calls" for point in own],
            mode="lines+markers",
            name=name,
            line={"color": _COLORS[number % len(_COLORS)], "width": 2},
        )
    return figure


def _refusals(document: JsonObject) -> Any:
    figure = _figure("Calls refused, by reason", "calls", barmode="stack")
    points = document["refusals"]
    times = _times(document, points)
    for number, reason in enumerate(sorted({point["reason"] for point in points})):
        figure.add_bar(
            x=times,
            y=_series(times, [point for point in points if point["reason"] == reason], "calls"),
            name=reason,
            marker_color=_COLORS[number % len(_COLORS)],
        )
    return figure


def _waste_by_tenant(document: JsonObject) -> Any:
    figure = _figure("Dollars of workflows that did not succeed, by tenant", "", barmode="stack")
    sums: dict[str, dict[str, float]] = {}
    for one in document["wasters"]:
        own = sums.setdefault(one["tenant_id"], {})
        own[one["state"]] = own.get(one["state"], 0.0) + one["micro_usd"] / MICRO_USD_PER_USD
    most = sorted(sums, key=lambda tenant: sum(sums[tenant].values()), reverse=True)
    tenants = most[: len(_COLORS)][::-1]
    for state, color in _STATE_COLORS.items():
        if any(state in sums[tenant] for tenant in tenants):
            figure.add_bar(
                y=tenants,
                x=[sums[tenant].get(state, 0.0) for tenant in tenants],
                name=state,
                orientation="h",
                marker_color=color,
            )
    figure.update_layout(xaxis_title="dollars")
    return figure


def _tiles(numbers: JsonObject) -> str:
    tiles = (
        (dollars(numbers["micro_usd_per_success"]), "per successful task"),
        (dollars(numbers["spent_micro_usd"]), "charged"),
        (
            f"{numbers['workflows_succeeded']:,} / {numbers['workflows_ended']:,}",
            "workflows succeeded",
        ),
        (_percent(numbers["attainment_ratio"]), "of calls within their SLO"),
        (f"{numbers['calls_refused']:,}", "calls refused"),
        (_percent(numbers["wasted_ratio"]), "of the dollars without success"),
        (_percent(numbers["cached_ratio"]), "of prompt tokens cached"),
    )
    return (
        "<div class=tiles>"
        + "".join(
            f"<div class=tile><b>{escape(value)}</b><span>{escape(words)}</span></div>"
            for value, words in tiles
        )
        + "</div>"
    )


def _wasters(document: JsonObject) -> str:
    wasters = document["wasters"]
    if not wasters:
        return "<p>No workflow cost anything without success.</p>"
    more = " or more" if document["is_wasters_cut"] else ""
    total = sum(one["micro_usd"] for one in wasters)
    rows = "".join(
        f"<tr><td><code>{escape(one['id'])}</code></td><td>{escape(one['tenant_id'])}</td>"
        f"<td>{escape(one['kind'])}</td><td>{escape(one['state'])}</td>"
        f"<td class=n>{one['calls']:,}</td><td class=n>{escape(dollars(one['micro_usd']))}</td></tr>"
        for one in wasters[:WASTERS_SHOWN]
    )
    return (
        f"<p>{len(wasters):,}{more} workflows cost {escape(dollars(total))} and did not succeed; the dearest"
        " first. <code>headway explain ID</code> says where it went.</p>"
        "<table><tr><th>workflow<th>tenant<th>kind<th>state<th class=n>calls<th class=n>cost</tr>"
        f"{rows}</table>"
    )


def _shadow_words(shadow: JsonObject | None) -> str:
    if shadow is None:
        return (
            "<p>No policies are on trial. <code>headway policy apply FOLDER --reason WHY</code> lets a bundle"
            " rule in shadow.</p>"
        )
    changed = shadow["calls_changed"]
    head = (
        f"<p>Revision <code>{escape(shadow['digest'][:12])}</code> decided {shadow['calls']:,} calls of the log"
        f" again{' (the log was cut)' if shadow['is_cut'] else ''}: {changed:,} would have ended otherwise.</p>"
    )
    if not shadow["changes"]:
        return head
    rows = "".join(
        f"<tr><td>{escape(change['tenant'])}</td><td>{escape(_ended(change, 'before'))}</td>"
        f"<td>{escape(_ended(change, 'after'))}</td><td class=n>{change['calls']:,}</td></tr>"
        for change in shadow["changes"][:CHANGES_SHOWN]
    )
    return f"{head}<table><tr><th>tenant<th>before<th>after<th class=n>calls</tr>{rows}</table>"


def _ended(change: JsonObject, when: str) -> str:
    reason, rule = change[f"reason_{when}"], change[f"rule_{when}"]
    return f"{reason} {rule}".strip() if reason else "let through"
