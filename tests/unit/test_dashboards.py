"""Dashboards, rules, alerts and runbooks name only what exists, agree with each other, and are what is generated."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import typer
import yaml

from cli.main import app
from controlplane.settings import Settings
from controlplane.telemetry.metrics import Metrics
from dashboards.board import TEMPO_UID
from dashboards.boards import BOARDS
from dashboards.generate import rendered, stale, write
from tests.dashboard_queries import (
    ADDED,
    FOLDER,
    RULES,
    exposed,
    labels_of,
    panel_queries,
    panels,
    recorded,
    rule_queries,
    rules,
    unit_of,
    variable_queries,
)

ROOT = FOLDER.parent
RUNBOOKS = ROOT / "docs" / "runbooks"
TESTS = FOLDER / "prometheus" / "tests"
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="needs promtool: install Prometheus, on Debian `apt-get install prometheus`",
)
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
COMMAND: Any = typer.main.get_command(app)
PANELS_MAX = 16
SECTIONS = ["What it means", "What tenants feel", "Look at", "Do"]
# Grafana counts rates of these in calls.
REQUESTS_PER_SECOND = "reqps"


def test_the_committed_dashboards_are_what_is_generated(tmp_path: Path) -> None:
    assert stale() == []
    write(tmp_path)
    assert stale(tmp_path) == []
    (tmp_path / "headway-fleet.json").write_text(rendered(BOARDS[0]))
    (tmp_path / "gone.json").write_text("{}")
    assert stale(tmp_path) == ["gone.json", "headway-fleet.json"]


def test_every_metric_and_label_of_a_query_exists() -> None:
    for asked in [*panel_queries(), *rule_queries()]:
        try:
            labels = labels_of(promql_parser.parse(asked.expr))
        except AssertionError as error:
            pytest.fail(f"{asked.where}: {error}")
        shown = set(re.findall(r"{{(\w+)}}", asked.legend))
        assert shown <= labels, f"{asked.where}: the legend names {sorted(shown - labels)}"
    for where, metric, label in variable_queries():
        assert label in exposed()[metric], where


def test_a_name_or_label_that_does_not_exist_is_found() -> None:
    for expr in (
        "headway_no_such_thing",
        "headway_requests",
        'headway_requests_total{tenant="acme"}',
        "sum by (engine) (rate(headway_requests_total[1m]))",
        "histogram_quantile(0.9, sum by (le) (rate(headway_queue_depth[1m])))",
        "sum(headway_leader) / on (model) sum(headway_leader)",
    ):
        with pytest.raises(AssertionError):
            labels_of(promql_parser.parse(expr))


def test_every_panel_says_what_it_asks_and_when_to_worry() -> None:
    titles = [where for where, _ in panels()]
    assert len(set(titles)) == len(titles)
    for where, panel in panels():
        assert panel["title"].endswith("?"), where
        assert len(panel["description"]) > 60, where
        assert panel["fieldConfig"]["defaults"]["unit"], where
        assert panel["datasource"]["uid"] == "${datasource}", where
    for board in BOARDS:
        assert len(board.panels) <= PANELS_MAX, board.uid
        document = json.loads(rendered(board))
        numbers = [panel["id"] for panel in document["panels"]]
        assert len(set(numbers)) == len(numbers)
        assert document["uid"] == board.uid


def test_units_are_those_of_the_metrics() -> None:
    for asked in panel_queries():
        unit = unit_of(promql_parser.parse(asked.expr))
        told = "cps" if asked.unit == REQUESTS_PER_SECOND else asked.unit
        assert told == unit or (told == "none" and unit == "short"), (
            f"{asked.where}: {unit}, not {asked.unit}, is the unit of {asked.expr}"
        )


def test_latency_panels_lead_to_traces() -> None:
    linked = [panel for _, panel in panels() if panel.get("links")]
    assert len(linked) >= 5
    for panel in linked:
        assert "headway.request" in panel["links"][0]["url"]
        assert "${__from}" in panel["links"][0]["url"]
    with_exemplars = {
        target["expr"].partition("_bucket")[0].rpartition("(")[2]
        for _, panel in panels()
        for target in panel["targets"]
        if target["exemplar"]
    }
    assert with_exemplars == {
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_request_duration_seconds",
    }
    [sources] = [
        yaml.safe_load(path.read_text())["datasources"]
        for path in (FOLDER / "provisioning" / "datasources").glob("*.yaml")
    ]
    by_type = {source["type"]: source for source in sources}
    [way] = by_type["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert way == {"name": "trace_id", "datasourceUid": TEMPO_UID}
    assert by_type["tempo"]["uid"] == TEMPO_UID


def test_recording_rules_are_named_by_what_they_count() -> None:
    for name, expr in recorded().items():
        level, what, window = name.split(":")
        assert level == "headway"
        assert re.fullmatch(r"\d+[mh]", window)
        assert f"[{window}]" in expr.prettify()
        assert (unit_of(expr) == "percentunit") is what.endswith("_ratio"), name


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for name, rule in ALERTS.items():
        assert name.startswith("Headway")
        assert set(rule["labels"]) == {"severity"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}
        assert notes["runbook_url"] == f"docs/runbooks/{name}.md"
        labels = labels_of(promql_parser.parse(rule["expr"]))
        named = set(re.findall(r"\$labels\.(\w+)", notes["description"]))
        assert named <= labels, f"{name} tells {sorted(named - labels)}, which it does not have"


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    pages = {path.stem: path.read_text() for path in RUNBOOKS.glob("Headway*.md")}
    assert pages.keys() == ALERTS.keys()
    index = (RUNBOOKS / "README.md").read_text()
    for name, page in pages.items():
        assert page.startswith(f"# {name}\n"), name
        assert re.findall(r"(?m)^## (.*)$", page) == SECTIONS, name
        assert f"({name}.md)" in index, name
        assert "`headway " in page or "\nheadway " in page, name
        for board in re.findall(r"dashboard \*([^*]+)\*", page):
            assert board in {each.title.partition(" / ")[2] for each in BOARDS}, name


def test_pages_name_metrics_that_exist() -> None:
    known = {metric.declaration.name for metric in Metrics().all()} | exposed().keys()
    for path in [*RUNBOOKS.glob("*.md"), FOLDER / "README.md"]:
        named = set(re.findall(r"\b((?:headway|gen_ai_server)_[a-z0-9_]+)", path.read_text()))
        assert named <= known, f"{path.name}: {sorted(named - known)}"


def test_pages_name_commands_that_exist() -> None:
    for path in [*RUNBOOKS.glob("*.md"), FOLDER / "README.md"]:
        text = path.read_text()
        lines = re.findall(r"`headway ([^`]+)`", text)
        lines += re.findall(r"(?m)^(?:\$ )?headway ([^#|\n]+)", text)
        for line in lines:
            check_command(line.split(), f"{path.name}: headway {line}")
    for where, panel in panels():
        for line in re.findall(r"`headway ([^`]+)`", panel["description"]):
            check_command(line.split(), f"{where}: headway {line}")


def check_command(words: list[str], where: str) -> None:
    """The words before the first that is no command are one, and its options are known to it."""
    command = COMMAND
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands"), f"{where}: a group, not a command"
    options = {name for each in command.params for name in each.opts + each.secondary_opts}
    options.add("--help")
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{where}: {word}"


@NEEDS_PROMTOOL
def test_each_alert_fires_and_rests_and_rules_record_what_they_say() -> None:
    files = sorted(TESTS.glob("*.yaml"))
    cases: dict[str, set[bool]] = {}
    for path in files:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for asked in case["promql_expr_test"]:
                for alert in re.findall(r'alertname="(\w+)"', asked["expr"]):
                    cases.setdefault(alert, set()).add(bool(asked["exp_samples"]))
    assert cases == {name: {True, False} for name in ALERTS}
    done = subprocess.run(
        ["promtool", "test", "rules", *(path.name for path in files)],
        cwd=TESTS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_the_configuration_that_is_shown_is_one() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", "prometheus.yaml"],
        cwd=FOLDER / "prometheus", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yaml").read_text())
    assert set(config["rule_files"]) == {path.name for path in RULES}


def test_labels_that_prometheus_adds_are_no_labels_of_ours() -> None:
    for metric in Metrics().all():
        assert ADDED.isdisjoint(metric.declaration.labels)


def test_pages_name_settings_that_exist() -> None:
    known = {f"HEADWAY_{name.upper()}" for name in Settings.model_fields}
    sources = {"HEADWAY_PROMETHEUS_URL", "HEADWAY_TEMPO_URL"}
    for path in [*RUNBOOKS.glob("*.md"), FOLDER / "README.md"]:
        named = set(re.findall(r"\bHEADWAY_[A-Z_]+", path.read_text()))
        assert named <= known | sources, f"{path.name}: {sorted(named - known)}"
