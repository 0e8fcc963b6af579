"""What a dashboard is here: questions, each with its queries, its unit, and when to worry.

Grafana's JSON is made of it.

A panel's title is a question or a fact, and its description says what is normal and what to do when it is not.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

TAG: Final = "headway"
COLUMNS: Final = 24
STAT_HEIGHT: Final = 4
PANEL_HEIGHT: Final = 8
# The data sources that `provisioning/` declares.
PROMETHEUS: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TEMPO_UID: Final = "tempo"
ALL: Final = ".*"

Palette = tuple[tuple[float | None, str], ...]
# From the first value on, the colour.
LOW_IS_BAD: Final[Palette] = ((None, "red"), (0.9, "orange"), (0.95, "green"))
FULL_IS_BAD: Final[Palette] = ((None, "green"), (0.8, "orange"), (0.95, "red"))
ANY_IS_BAD: Final[Palette] = ((None, "green"), (1.0, "red"))
UP_OR_DOWN: Final[Palette] = ((None, "red"), (1.0, "green"))
BREAKER_STATES: Final = {
    "0": ("closed", "green"),
    "1": ("half-open", "orange"),
    "2": ("open", "red"),
}
ONE_OR_ZERO: Final = {"0": ("no", "red"), "1": ("yes", "green")}


class Unit(StrEnum):
    """Grafana's names of the units that are used here."""

    SECONDS = units.Seconds
    USD = units.Dollars
    RATIO = units.PercentUnit
    BYTES = units.BytesIEC
    CELSIUS = units.Celsius
    COUNT = units.Short
    REQUESTS_PER_SECOND = units.RequestsPerSecond
    PER_SECOND = units.CountsPerSecond
    NUMBER = units.NoUnit


class Kind(StrEnum):
    LINES = "lines"
    AREAS = "areas"
    NUMBER = "number"
    BARS = "bars"
    STATES = "states"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """`legend` names each series by its labels. `has_exemplars`: dots that lead to traces are drawn."""

    expr: str
    legend: str = ""
    has_exemplars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    palette: Palette = ()
    values: dict[str, tuple[str, str]] | None = None
    most: float | None = None
    # Links to the traces behind it.
    is_latency: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice of label values for all panels; `query` is Grafana's `label_values(METRIC, LABEL)`."""

    name: str
    label: str
    query: str
    is_multi: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading, and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


MODEL: Final = Variable(
    name="model", label="Model", query="label_values(headway_pool_engines_accepting, model)"
)
TENANT_CLASS: Final = Variable(
    name="tenant_class",
    label="Tenant class",
    query="label_values(headway_slo_calls_total, tenant_class)",
)
REGION: Final = Variable(name="region", label="Region", query="label_values(headway_nodes, region)")
SCOPE: Final = Variable(
    name="scope", label="Scope", query="label_values(headway_workflows_ended_total, scope)"
)
TENANT: Final = Variable(
    name="tenant", label="Tenant", query="label_values(headway_tenant_spent_usd_total, tenant)"
)


def grafana(board: Board) -> model.Dashboard:
    """The dashboard as Grafana reads it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Headway")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)  # noqa: FBT003 - the builder's own way
            .include_vars(True)  # noqa: FBT003
            .keep_time(True)  # noqa: FBT003
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for variable in board.variables:
        made.with_variable(_variable(variable))
    for row in board.rows:
        made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made.with_panel(_panel(panel))
    built = made.build()
    # Links to one panel go by its number.
    for number, each in enumerate(built.panels or (), start=1):
        each.id_val = number
    return built


def _variable(variable: Variable) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .query({"query": variable.query, "refId": variable.name})
        .datasource(PROMETHEUS)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(variable.is_multi)
        .include_all(variable.is_multi)
    )
    if variable.is_multi:
        made.all_value(ALL).current(model.VariableOption(text="All", value="$__all"))
    return made


def _panel(panel: Panel) -> Builder[model.Panel]:
    made: Any
    match panel.kind:
        case Kind.NUMBER:
            made = (
                stat.Panel()
                .height(STAT_HEIGHT)
                .graph_mode(looks.BigValueGraphMode.NONE)
                .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
                .color_mode(
                    looks.BigValueColorMode.VALUE if panel.palette else looks.BigValueColorMode.NONE
                )
            )
        case Kind.BARS:
            made = (
                bargauge.Panel()
                .height(PANEL_HEIGHT)
                .orientation(looks.VizOrientation.HORIZONTAL)
                .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            )
        case Kind.STATES:
            made = statetimeline.Panel().height(PANEL_HEIGHT).show_value(looks.VisibilityMode.NEVER)
        case _:
            made = (
                timeseries.Panel()
                .height(PANEL_HEIGHT)
                .line_width(1)
                .fill_opacity(40 if panel.kind is Kind.AREAS else 5)
                .show_points(looks.VisibilityMode.NEVER)
                .legend(
                    common.VizLegendOptions()
                    .display_mode(looks.LegendDisplayMode.LIST)
                    .placement(looks.LegendPlacement.BOTTOM)
                    .show_legend(True)  # noqa: FBT003
                )
                .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI))
            )
            if panel.kind is Kind.AREAS:
                made.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
            if panel.palette:
                made.thresholds_style(
                    common.GraphThresholdsStyleConfig().mode(looks.GraphTresholdsStyleMode.DASHED)
                )
    made.title(panel.title).description(panel.description).span(panel.width)
    made.unit(str(panel.unit)).datasource(PROMETHEUS)
    if panel.unit is Unit.RATIO:
        made.min(0)
    if panel.most is not None:
        made.max(panel.most)
    if panel.palette:
        made.thresholds(
            dashboard.ThresholdsConfig()
            .mode(model.ThresholdsMode.ABSOLUTE)
            .steps([model.Threshold(value=value, color=color) for value, color in panel.palette])
        )
    if panel.values is not None:
        texts = {
            value: model.ValueMappingResult(text=text, color=color)
            for value, (text, color) in panel.values.items()
        }
        made.mappings([model.ValueMap(options=texts)])
    if panel.is_latency:
        made.links([_traces()])
    for number, query in enumerate(panel.queries):
        made.with_target(_target(query, number, is_instant=panel.kind is Kind.BARS))
    built: Builder[model.Panel] = made
    return built


def _target(query: Query, number: int, *, is_instant: bool) -> prometheus.Dataquery:
    made = (
        prometheus.Dataquery()
        .expr(query.expr)
        .ref_id(chr(ord("A") + number))
        .legend_format(query.legend or "__auto")
        .exemplar(query.has_exemplars)
    )
    return made.instant() if is_instant else made.range()


def _traces() -> dashboard.DashboardLink:
    """To the traces of the same time; the attribute `headway.request` of one is what `explain` takes."""
    query = '{resource.service.name="headway" && span.headway.request != ""}'
    traces = {"refId": "A", "queryType": "traceql", "query": query}
    shown = {"from": "${__from}", "to": "${__to}"}
    panes = json.dumps({"a": {"datasource": TEMPO_UID, "queries": [traces], "range": shown}})
    return (
        dashboard.DashboardLink("Traces: `headway explain` takes their headway.request")
        .type(model.DashboardLinkType.LINK)
        # Grafana fills in what `${…}` names, if it is not encoded.
        .url(f"/explore?schemaVersion=1&orgId=1&panes={quote(panes, safe='${}')}")
        .target_blank(True)  # noqa: FBT003
    )
