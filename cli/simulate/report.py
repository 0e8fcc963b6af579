"""One HTML file of an experiment's document, with everything that it needs inside it.

Reads documents as `experiments.fixed`, `experiments.floor` and `day.experiment.day` write them. `days` is a list of
{"policy", "engines_on_by_minute", "fleet_usd_by_minute", "arrivals_per_s_by_minute"}.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cli.simulate.experiments import HEADWAY, WITHOUT

Document = Mapping[str, Any]

OURS_COLOR: Final = "#d1495b"
BEST_COLOR: Final = "#00798c"
REFERENCE_COLOR: Final = "#6a4c93"
OTHER_COLORS: Final = (
    "#9aa5b1", "#7b8794", "#b0a999", "#8d99ae", "#a3b18a", "#c9ada7", "#b5838d", "#84a59d", "#adb5bd",
)  # fmt: skip
CAUSE_COLORS: Final[Mapping[str, str]] = {
    "useful": "#4c956c",
    "late": "#d1495b",
    "refused_later_step": "#edae49",
    "bad": "#c9ada7",
    "preempted": "#8d5a97",
    "retries": "#f4a261",
    "cold_start": "#5fa8d3",
    "idle": "#dee2e6",
}
GPU_COLORS: Final = ("#00798c", "#edae49", "#8d5a97", "#4c956c", "#d1495b", "#5fa8d3")
HEIGHT_PX: Final = 420
MINUTES_PER_HOUR: Final = 60

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1180px;margin:32px auto;padding:0 20px}
h1{font-size:26px;margin:0}h2{font-size:19px;margin:36px 0 4px;border-top:1px solid #e4e7eb;padding-top:20px}
p{max-width:80ch;color:#52606d}table{border-collapse:collapse;font-size:13px;width:100%}
td,th{padding:4px 8px;text-align:right;border-bottom:1px solid #e4e7eb;white-space:nowrap}
td:nth-child(-n+3),th:nth-child(-n+3){text-align:left;white-space:normal}
tr.ours td{background:#fdf0f2;font-weight:600}tr.best td{background:#eef7f8}
"""
_INTRODUCTION: Final = (
    "All results are simulated: engines, clients and faults in virtual time, Headway by its live "
    "decision code. Lower cost per successful task (CPST) is better, but alone it rewards "
    "starving the fleet: read it beside success, and at a floor of success. Load 1 is the rate at which "
    "all engines are busy with batches in which a token takes 1.8 times as long as alone. Baselines are "
    "tuned on other seeds; intervals are paired bootstraps over seeds."
)


def write(path: Path, document: Document) -> None:
    """Writes the report, complete, over what was there. Raises OSError when it can not."""
    path.write_text(render(document), encoding="utf-8")


def render(document: Document) -> str:
    """The report as one HTML text."""
    sections: list[tuple[str, str, list[Any]]] = []
    cells = list(document.get("cells", ()))
    for place, group in _groups(cells, "fixed"):
        sections.append((f"Fixed fleet: {place}", _table(group), list(_fixed(group))))
    for place, group in _groups(cells, "floor"):
        sections.append(
            (f"Dollars at a floor of success: {place}", _table(group), list(_floor(group)))
        )
    for place, group in _groups(cells, "day"):
        sections.append(
            (f"A day at a floor of success: {place}", _day_table(group), list(_day_bars(group)))
        )
    for place, group in _groups(cells, "gpu-mix"):
        sections.append((f"GPU types: {place}", _mix_table(group), list(_mix(group))))
    if document.get("days"):
        sections.append(
            ("The fleet over the day", "", [_day(document["days"]), _work(document["days"])])
        )
    if document.get("procurement"):
        sections.append(("How the day is bought", _bought(document), []))
    if document.get("timings"):
        sections.append(("Time of a decision", "", [_timings(document["timings"])]))
    if document.get("what_if"):
        sections.append(("The log again", _what_if(document["what_if"]), []))
    if document.get("bounds"):
        sections.append(("Distance to the bounds", _bounds(document["bounds"]), []))
    return _page(sections)


def _page(sections: Sequence[tuple[str, str, Sequence[Any]]]) -> str:
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Headway: simulated</title>",
        f"<style>{_STYLE}</style></head><body><h1>Headway in the simulated world</h1>",
        f"<p>{html.escape(_INTRODUCTION)}</p>",
    ]
    is_first = True
    for title, before, figures in sections:
        parts.append(f"<h2>{html.escape(title)}</h2>{before}")
        for figure in figures:
            parts.append(
                figure.to_html(
                    full_html=False, include_plotlyjs=is_first, config={"displaylogo": False}
                )
            )
            is_first = False
    parts.append("</body></html>")
    return "\n".join(parts)


def _groups(cells: Sequence[Document], experiment: str) -> Iterable[tuple[str, list[Document]]]:
    groups: dict[str, list[Document]] = {}
    for cell in cells:
        if cell["experiment"] == experiment:
            place = f"{cell['workload']}, deadlines {cell['deadlines']}, {cell['fleet']} fleet"
            if experiment == "gpu-mix":
                # All fleets of one question stand side by side.
                place = f"{cell['model']}, {cell['workload']}, load {cell['load']:g}, prices {cell['prices']}"
            groups.setdefault(place, []).append(cell)
    return groups.items()


def _is_ours(policy: str) -> bool:
    return policy == HEADWAY or policy.startswith(HEADWAY + WITHOUT)


def _look(cells: Sequence[Document]) -> dict[str, dict[str, Any]]:
    """Colour, width and dash of every policy: ours and the best baselines stand out."""
    best = {cell.get("best_baseline") for cell in cells}
    looks: dict[str, dict[str, Any]] = {}
    others = 0
    for policy in dict.fromkeys(cell["policy"] for cell in cells):
        if policy == HEADWAY:
            looks[policy] = {"color": OURS_COLOR, "width": 4}
        elif _is_ours(policy):
            looks[policy] = {"color": OURS_COLOR, "width": 1.5, "dash": "dot"}
        elif policy in best:
            looks[policy] = {"color": BEST_COLOR, "width": 3}
        elif policy == "edf-true-sizes":
            looks[policy] = {"color": REFERENCE_COLOR, "width": 2, "dash": "dash"}
        else:
            looks[policy] = {"color": OTHER_COLORS[others % len(OTHER_COLORS)], "width": 1.5}
            others += 1
    return looks


def _figure(title: str, x: str, y: str, **layout: Any) -> Any:
    import plotly.graph_objects as go

    plots: Any = go
    figure = plots.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=HEIGHT_PX,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        xaxis_title=x,
        yaxis_title=y,
        **layout,
    )
    return figure


def _fixed(cells: Sequence[Document]) -> Iterable[Any]:
    looks = _look(cells)
    loads = sorted({cell["load"] for cell in cells})
    if len(loads) > 1:
        yield _over_load(cells, looks, "cpst_usd", "Cost per successful task", "dollars", "log")
        yield _over_load(cells, looks, "success_ratio", "Success", "part of workflows", "linear")
    for load in loads:
        here = sorted(
            (cell for cell in cells if cell["load"] == load),
            key=lambda cell: cell["cpst_usd"] or float("inf"),
        )
        yield _dollars(here, f"Where the dollars went, load {load:g}")
        yield _attainment(here, f"Success by priority of the tenant's class, load {load:g}")
        yield _bars(
            here, looks, "jain", f"Fairness, load {load:g}", "Jain's index, service over weight"
        )


def _over_load(
    cells: Sequence[Document],
    looks: Mapping[str, Mapping[str, Any]],
    key: str,
    title: str,
    unit: str,
    scale: str,
) -> Any:
    figure = _figure(title, "load", unit, yaxis_type=scale)
    for policy, look in looks.items():
        points = sorted((cell["load"], cell[key]) for cell in cells if cell["policy"] == policy)
        figure.add_scatter(
            x=[load for load, _ in points],
            y=[value for _, value in points],
            name=policy,
            mode="lines+markers",
            line=dict(look),
        )
    return figure


def _dollars(cells: Sequence[Document], title: str) -> Any:
    figure = _figure(title, "part of the fleet's dollars", "", barmode="stack")
    names = [cell["policy"] for cell in cells]
    causes = [cause for cause in CAUSE_COLORS if cause != "useful"]
    useful = [
        max(0.0, 1.0 - sum(cell["wasted_usd"].values()) / max(cell["fleet_usd"], 1e-9))
        for cell in cells
    ]
    figure.add_bar(
        y=names, x=useful, name="useful", orientation="h", marker_color=CAUSE_COLORS["useful"]
    )
    for cause in causes:
        parts = [
            cell["wasted_usd"].get(cause, 0.0) / max(cell["fleet_usd"], 1e-9) for cell in cells
        ]
        if any(parts):
            figure.add_bar(
                y=names,
                x=parts,
                name=cause.replace("_", " "),
                orientation="h",
                marker_color=CAUSE_COLORS[cause],
            )
    figure.update_yaxes(autorange="reversed")
    return figure


def _attainment(cells: Sequence[Document], title: str) -> Any:
    figure = _figure(title, "", "part of workflows", barmode="group")
    for priority in sorted(
        {key for cell in cells for key in cell["success_by_priority"]}, reverse=True
    ):
        figure.add_bar(
            x=[cell["policy"] for cell in cells],
            y=[cell["success_by_priority"].get(priority) for cell in cells],
            name=f"priority {priority}",
        )
    return figure


def _bars(
    cells: Sequence[Document],
    looks: Mapping[str, Mapping[str, Any]],
    key: str,
    title: str,
    unit: str,
) -> Any:
    figure = _figure(title, "", unit)
    figure.add_bar(
        x=[cell["policy"] for cell in cells],
        y=[cell[key] for cell in cells],
        marker_color=[looks[cell["policy"]]["color"] for cell in cells],
    )
    return figure


def _floor(cells: Sequence[Document]) -> Iterable[Any]:
    looks = _look(cells)
    for load in sorted({cell["load"] for cell in cells}):
        here = [cell for cell in cells if cell["load"] == load]
        reached = sorted(
            (cell for cell in here if cell["fleet_usd_at_floor"] is not None),
            key=lambda cell: cell["fleet_usd_at_floor"],
        )
        least = here[0]["success_ratio_min"]
        title = f"Fleet that does {least:.0%} in time, load {load:g}"
        yield _bars(reached, looks, "fleet_usd_at_floor", title, "dollars per hour")
        figure = _figure("In time by fleet", "dollars per hour", "part of workflows")
        for cell in here:
            figure.add_scatter(
                x=[point[0] for point in cell["curve"]],
                y=[point[1] for point in cell["curve"]],
                name=cell["policy"],
                mode="lines+markers",
                line=dict(looks[cell["policy"]]),
            )
        figure.add_hline(y=least, line_dash="dash", line_color="#52606d")
        yield figure


def _mix(cells: Sequence[Document]) -> Iterable[Any]:
    """Dollars at the floor by fleet, stacked by the types that they go to."""
    for policy in dict.fromkeys(cell["policy"] for cell in cells):
        here = sorted(
            (
                cell
                for cell in cells
                if cell["policy"] == policy and cell["fleet_usd_at_floor"] is not None
            ),
            key=lambda cell: cell["fleet_usd_at_floor"],
        )
        types = sorted({gpu for cell in here for gpu in cell["composition_usd_per_hour"]})
        title = f"Fleet that does {cells[0]['success_ratio_min']:.0%} in time, {policy}"
        figure = _figure(title, "", "dollars per hour", barmode="stack")
        for number, gpu in enumerate(types):
            figure.add_bar(
                x=[cell["fleet"] for cell in here],
                y=[cell["composition_usd_per_hour"].get(gpu, 0.0) for cell in here],
                text=[f"{cell['composition'].get(gpu, 0.0):.2f}" for cell in here],
                name=gpu,
                marker_color=GPU_COLORS[number % len(GPU_COLORS)],
            )
        yield figure


def _mix_table(cells: Sequence[Document]) -> str:
    head = (
        "fleet", "policy", "setting", "$ per hour", "ratio to best single type", "95 %", "ratio to best baseline",
        "success", "in time",
    )  # fmt: skip
    rows = []
    for cell in sorted(cells, key=lambda cell: cell["fleet_usd_at_floor"] or float("inf")):
        single = cell["fleet_usd_ratio_to_best_single"] or {}
        interval = single.get("ci95") or (None, None)
        columns = (
            cell["fleet"],
            cell["policy"],
            cell["config"],
            _number(cell["fleet_usd_at_floor"], 2),
            _number(single.get("value"), 3),
            "" if None in interval else f"{interval[0]:.3f}-{interval[1]:.3f}",
            _number((cell["fleet_usd_ratio_to_best_baseline"] or {}).get("value"), 3),
            _number(cell["success_ratio"], 3),
            _number(cell["in_time_ratio"], 3),
        )
        rows.append(_row(columns, "td", "ours" if _is_ours(cell["policy"]) else ""))
    source = html.escape(f"Prices: {cells[0]['price_source']}, {cells[0]['price_date']}.")
    return f"<p>{source}</p><table>{_row(head, 'th', '')}{''.join(rows)}</table>"


def _day(days: Sequence[Document]) -> Any:
    figure = _figure("Engines that are on", "hour", "engines")
    for day in days:
        engines = day["engines_on_by_minute"]
        is_ours = _is_ours(day["policy"])
        figure.add_scatter(
            x=[minute / MINUTES_PER_HOUR for minute in range(len(engines))],
            y=engines,
            name=f"{day['policy']}: ${sum(day['fleet_usd_by_minute']):,.0f}",
            line={"shape": "hv", "width": 3 if is_ours else 1.5},
        )
    return figure


def _work(days: Sequence[Document]) -> Any:
    """What came, which is the same under every policy."""
    figure = _figure("Workflows that come", "hour", "per second")
    rates = days[0].get("arrivals_per_s_by_minute", ())
    figure.add_scatter(
        x=[minute / MINUTES_PER_HOUR for minute in range(len(rates))],
        y=list(rates),
        line={"color": REFERENCE_COLOR},
    )
    return figure


def _is_planned(policy: str) -> bool:
    return policy.startswith("planner+")


def _day_bars(cells: Sequence[Document]) -> Iterable[Any]:
    reached = sorted(
        (cell for cell in cells if cell["fleet_usd_at_floor"] is not None),
        key=lambda cell: cell["fleet_usd_at_floor"],
    )
    least = cells[0]["success_ratio_min"]
    for key, title, unit in (
        ("fleet_usd_at_floor", f"A day with {least:.0%} in time", "dollars"),
        ("engine_starts", "Engine starts a day, there", "starts"),
    ):
        figure = _figure(title, "", unit)
        figure.add_bar(
            x=[cell["policy"] for cell in reached],
            y=[cell[key] for cell in reached],
            marker_color=[
                OURS_COLOR
                if _is_planned(cell["policy"])
                else BEST_COLOR
                if cell["policy"] == cell["best_baseline"]
                else OTHER_COLORS[0]
                for cell in reached
            ],
        )
        yield figure
    figure = _figure("In time by dollars of the day", "dollars", "part of workflows")
    for cell in cells:
        figure.add_scatter(
            x=[point[0] for point in cell["curve"]],
            y=[point[1] for point in cell["curve"]],
            name=cell["policy"],
            mode="lines+markers",
            line={"width": 3 if _is_planned(cell["policy"]) else 1.5},
        )
    figure.add_hline(y=least, line_dash="dash", line_color="#52606d")
    yield figure


def _day_table(cells: Sequence[Document]) -> str:
    head = (
        "scaler + placement", "setting", "hours", "$ of the day", "ratio to best reactive", "95 %", "ratio to static",
        "starts", "in time there", "worst hour",
    )  # fmt: skip
    rows = []
    for cell in sorted(cells, key=lambda cell: cell["fleet_usd_at_floor"] or float("inf")):
        ratio = cell["fleet_usd_ratio_to_best_baseline"] or {}
        low, high = ratio.get("ci95") or (None, None)
        columns = (
            cell["policy"],
            cell["config"],
            f"{cell['hours']:g}",
            _number(cell["fleet_usd_at_floor"], 2),
            _number(ratio.get("value"), 3),
            "" if low is None or high is None else f"{low:.3f}-{high:.3f}",
            _number((cell["fleet_usd_ratio_to_static"] or {}).get("value"), 3),
            _number(cell["engine_starts"], 1),
            _number(cell["in_time_ratio"], 3),
            _number(cell["worst_hour_in_time_ratio"], 3),
        )
        mark = (
            "ours"
            if _is_planned(cell["policy"])
            else ("best" if cell["policy"] == cell["best_baseline"] else "")
        )
        rows.append(_row(columns, "td", mark))
    return f"<table>{_row(head, 'th', '')}{''.join(rows)}</table>"


def _bought(document: Document) -> str:
    bought = document["procurement"]
    rows = [
        ("Engine-hours of the day, all on demand", f"${bought['on_demand_only_usd']:,.2f}"),
        ("By the plan that was made of other days", f"${bought['usd']:,.2f}"),
        ("Ratio", f"{bought['ratio']:.3f}"),
        ("GPUs reserved", f"{bought['plan']['reserved_gpus']:g}"),
        (
            "Work that interruptions of spot are expected to fail",
            f"{bought['spot_failed_ratio']:.2%}",
        ),
    ]
    deferral = document.get("deferral")
    if deferral:
        ratio = deferral["ratio_to_not_deferrable"] or {}
        rows.append(
            (
                f"Dollars when {deferral['deferrable_ratio']:.0%} of the work can wait, over none",
                _number(ratio.get("value"), 3),
            )
        )
    return f"<table>{''.join(_row(row, 'td', '') for row in rows)}</table>"


def _timings(timings: Sequence[Document]) -> Any:
    sums: dict[str, list[float]] = {}
    for timing in timings:
        sums.setdefault(timing["policy"], []).append(timing["decision_us_mean"])
    means = sorted((sum(values) / len(values), policy) for policy, values in sums.items())
    figure = _figure("Time of the policy per decision, mean", "", "microseconds", yaxis_type="log")
    figure.add_bar(
        x=[policy for _, policy in means],
        y=[value for value, _ in means],
        marker_color=[OURS_COLOR if _is_ours(policy) else OTHER_COLORS[0] for _, policy in means],
    )
    return figure


def _table(cells: Sequence[Document]) -> str:
    is_floor = cells[0]["experiment"] == "floor"
    ratio_key = "fleet_usd_ratio_to_best_baseline" if is_floor else "cpst_ratio_to_best_baseline"
    value_key = "fleet_usd_at_floor" if is_floor else "cpst_usd"
    head = (
        "load", "policy", "setting", "$ per hour" if is_floor else "CPST $", "ratio to best baseline", "95 %",
        "success", "in time", "late kills", "Jain",
    )  # fmt: skip
    rows = []
    for cell in sorted(
        cells,
        key=lambda cell: (
            cell["load"],
            cell[value_key] if cell[value_key] is not None else float("inf"),
        ),
    ):
        ratio = cell.get(ratio_key) or {}
        interval = ratio.get("ci95") or (None, None)
        columns = (
            f"{cell['load']:g}",
            cell["policy"],
            cell["config"],
            _number(cell[value_key], 4 if not is_floor else 2),
            _number(ratio.get("value"), 3),
            "" if None in interval else f"{interval[0]:.3f}-{interval[1]:.3f}",
            _number(cell["success_ratio"], 3),
            _number(cell["in_time_ratio"], 3),
            _number(cell["late_kill_ratio"], 3),
            _number(cell["jain"], 3),
        )
        mark = (
            "ours"
            if cell["policy"] == HEADWAY
            else ("best" if cell["policy"] == cell["best_baseline"] else "")
        )
        rows.append(_row(columns, "td", mark))
    return f"<table>{_row(head, 'th', '')}{''.join(rows)}</table>"


def _what_if(document: Document) -> str:
    """What was recorded beside what was simulated, as `from_log.what_if` tells it."""
    from cli.simulate.from_log import WORLDS, sums

    head = _row(("", *WORLDS.values()), "th", "")
    rows = [_row(line, "td", "") for line in sums(document)]
    notes = "".join(
        f"<p>{count:,} {html.escape(name)}</p>" for name, count in document["notes"].items()
    )
    return f"<table>{head}{''.join(rows)}</table>{notes}"


def _bounds(bounds: Mapping[str, Any]) -> str:
    rows = []
    for place, bound in bounds.items():
        floor = bound["L1"].get("cpst_usd", bound["L1"].get("fleet_usd_at_floor"))
        for policy, distance in sorted(
            bound["distance"].items(), key=lambda entry: (entry[1] is None, entry[1])
        ):
            mark = "ours" if policy == HEADWAY else ""
            above = "" if distance is None else f"{distance:+.0%}"
            rows.append(_row((place, policy, "", _number(floor, 4), above), "td", mark))
    head = _row(("cell", "policy", "", "L1, dollars", "above it"), "th", "")
    return f"<table>{head}{''.join(rows)}</table>"


def _row(columns: Iterable[str], tag: str, mark: str) -> str:
    cells = "".join(f"<{tag}>{html.escape(column)}</{tag}>" for column in columns)
    return f'<tr class="{mark}">{cells}</tr>'


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
