"""Every query of dashboards, rules and variables, as the committed files have them; and what a query is, by its AST.

Units are derived from the suffixes of metric names alone, without the generator's own word for them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import promql_parser
import yaml

from controlplane.telemetry.metrics import Kind, Metrics

FOLDER: Final = Path(__file__).parent.parent / "dashboards"
RULES: Final = (FOLDER / "prometheus" / "rules.yaml", FOLDER / "prometheus" / "alerts.yaml")
# What Prometheus itself adds.
ADDED: Final = frozenset({"instance", "job"})
BUILT_IN: Final[Mapping[str, frozenset[str]]] = {
    "up": ADDED,
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
}
_VARIABLE: Final = re.compile(r"label_values\((\w+), (\w+)\)")
_OVER_TIME: Final = frozenset({"rate", "increase"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One query: where it stands, what it asks, and what the panel says of it; empty where none does."""

    where: str
    expr: str
    unit: str = ""
    legend: str = ""


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Panels of every dashboard with where they stand; rows are flat in the files."""
    for path in sorted((FOLDER / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield f"{path.stem}: {panel['title']}", panel


def panel_queries() -> list[Asked]:
    return [
        Asked(
            where,
            filled(target["expr"]),
            panel["fieldConfig"]["defaults"]["unit"],
            target["legendFormat"],
        )
        for where, panel in panels()
        for target in panel["targets"]
    ]


def variable_queries() -> list[tuple[str, str, str]]:
    """Where a variable stands, and the metric and the label whose values it lists."""
    found = []
    for path in sorted((FOLDER / "grafana").glob("*.json")):
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                matched = _VARIABLE.fullmatch(variable["query"]["query"])
                assert matched, variable
                found.append((f"{path.stem}: ${variable['name']}", *matched.groups()))
    return found


def rules() -> list[dict[str, Any]]:
    """Recording rules and alerts, in the order of the files."""
    return [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def rule_queries() -> list[Asked]:
    return [Asked(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


def record_queries() -> list[Asked]:
    return [Asked(rule["record"], rule["expr"]) for rule in rules() if "record" in rule]


def metrics_of(node: Any) -> set[str]:
    """Names of what a query reads."""
    names: set[str] = set()

    def note(each: Any) -> None:
        if type(each).__name__ == "VectorSelector":
            names.add(each.name)
        elif type(each).__name__ == "MatrixSelector":
            names.add(each.vector_selector.name)

    promql_parser.walk(node, note)
    return names


def filled(expr: str) -> str:
    """The query with Grafana's variables filled in: all values, and a minute."""
    expr = expr.replace("$__rate_interval", "1m")
    return re.sub(r"\$\w+", ".*", expr)


# ------------------------------------------------------------ what a query is


@cache
def recorded() -> dict[str, Any]:
    """Recording rules by their names, parsed."""
    return {
        rule["record"]: promql_parser.parse(rule["expr"]) for rule in rules() if "record" in rule
    }


@cache
def exposed() -> dict[str, frozenset[str]]:
    """Series by the names under which Prometheus has them, and their labels."""
    found = {}
    for metric in Metrics().all():
        declaration = metric.declaration
        labels = frozenset(declaration.labels) | ADDED
        match declaration.kind:
            case Kind.COUNTER:
                found[f"{declaration.name}_total"] = labels
            case Kind.GAUGE:
                found[declaration.name] = labels
            case Kind.HISTOGRAM:
                found[f"{declaration.name}_bucket"] = labels | {"le"}
                found[f"{declaration.name}_sum"] = found[f"{declaration.name}_count"] = labels
    return found


def labels_of(node: Any) -> frozenset[str]:
    """Labels that the series of a query can have. Raises AssertionError for names that do not exist."""
    match type(node).__name__:
        case "VectorSelector":
            labels = _selected(node.name)
            named = {matcher.name for matcher in node.matchers.matchers}
            assert named <= labels, f"{node.name} has no label {sorted(named - labels)}"
            return labels
        case "MatrixSelector":
            return labels_of(node.vector_selector)
        case "SubqueryExpr" | "ParenExpr" | "UnaryExpr":
            return labels_of(node.expr)
        case "AggregateExpr":
            inner = labels_of(node.expr)
            if "topk" in node.prettify()[:5]:
                return inner
            if node.modifier is None:
                return frozenset()
            listed = frozenset(node.modifier.labels)
            assert listed <= inner, f"no label {sorted(listed - inner)} in {node.expr.prettify()}"
            is_by = node.modifier.type == promql_parser.AggModifierType.By
            return listed if is_by else inner - listed
        case "Call":
            held = [labels_of(each) for each in node.args]
            labels = frozenset().union(*held)
            return labels - {"le"} if node.func.name == "histogram_quantile" else labels
        case "BinaryExpr":
            left, right = labels_of(node.lhs), labels_of(node.rhs)
            matching = None if node.modifier is None else node.modifier.matching
            if matching is not None:
                missing = frozenset(matching.labels) - (left | right)
                assert not missing, f"no label {sorted(missing)} in {node.prettify()}"
            return left or right
        case "NumberLiteral" | "StringLiteral":
            return frozenset()
    raise AssertionError(f"not known: {type(node).__name__}")


def _selected(name: str) -> frozenset[str]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in recorded():
        return labels_of(recorded()[name])
    assert name in exposed(), f"no metric `{name}`"
    return exposed()[name]


def unit_of(node: Any) -> str:
    """Grafana's name of a query's unit, by the suffixes of its metrics: `_seconds`, `_usd`, `_ratio` and so on."""
    match type(node).__name__:
        case "VectorSelector":
            if node.name in recorded():
                return unit_of(recorded()[node.name])
            return _unit_of_name(node.name)
        case "MatrixSelector":
            return unit_of(node.vector_selector)
        case "SubqueryExpr" | "ParenExpr" | "UnaryExpr" | "AggregateExpr":
            return unit_of(node.expr)
        case "Call":
            match node.func.name:
                case "rate":
                    inner = unit_of(node.args[0])
                    return "cps" if inner == "short" else f"{inner}/s"
                case "changes":
                    return "short"
                case "histogram_quantile":
                    return unit_of(node.args[1]).removesuffix("/s").replace("cps", "short")
            return unit_of(node.args[0])
        case "BinaryExpr":
            return _unit_of_both(node)
    return "none"


def _unit_of_both(node: Any) -> str:
    left, right = unit_of(node.lhs), unit_of(node.rhs)
    text = node.prettify()
    if "3600 *" in text[:6] and right.endswith("/s"):
        return right.removesuffix("/s")
    if left == "none" or right == "none":
        return right if left == "none" else left
    if _divides(node):
        if left == right:
            return "percentunit"
        # Dollars a task are dollars; tasks a dollar are a number.
        return left if right in {"short", "cps"} else "none"
    return left


def _divides(node: Any) -> bool:
    """The parser does not tell an operator's name: it stands between both sides of the text."""
    return re.sub(r"\s+", "", node.prettify()).startswith(
        re.sub(r"\s+", "", node.lhs.prettify()) + "/"
    )


def _unit_of_name(name: str) -> str:
    name = re.sub(r"_(total|bucket|sum|count)$", "", name)
    for ending, unit in (
        ("_usd_per_second", "currencyUSD"),
        ("_usd_per_token_second", "currencyUSD"),
        ("_seconds", "s"),
        ("_usd", "currencyUSD"),
        ("_ratio", "percentunit"),
        ("_bytes", "bytes"),
        ("_celsius", "celsius"),
    ):
        if name.endswith(ending):
            return unit
    return "short"
