"""What the command line makes of the server's numbers: health, advice, ways into the system, what is the last."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from cli.contexts import Source, connection
from cli.failure import CommandFailure
from cli.output import Format, Output, cell
from cli.refusal import ways_in
from cli.report import render
from cli.safety import left_without
from cli.standing import Severity, findings_of, is_healthy
from cli.top.views import POOLS, arranged

REPLICA = {
    "problems": [], "is_bus_connected": True, "nodes_declared": 2, "nodes_heard": 2,
    "policy_problem": "", "journal": {"is_full": False},
}  # fmt: skip
POOL = {
    "model": "m", "engines": 2, "engines_accepting": 2, "regions_open": [], "saturation_ratio": 0.5,
    "kv_used_ratio": 0.5, "calls_waiting": 0, "wait_ms": 0,
}  # fmt: skip


def refusal(**changes: object) -> dict[str, Any]:
    told: dict[str, Any] = {
        "request_id": "r", "reason": "shed_overload", "rule": None, "model": "m", "facts": None,
        "hurdles": [], "retry_after_ms": None, "is_final": False, "e2e_ms_predicted": None,
    }  # fmt: skip
    return told | changes


def hurdle(quantity: str, there: float | None, needed: float, of: str = "") -> dict[str, Any]:
    return {"quantity": quantity, "there": there, "needed": needed, "of": of}


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({}, None),
        ({"replica": REPLICA | {"nodes_heard": 1}}, "warning"),
        ({"replica": REPLICA | {"nodes_heard": 0}}, "error"),
        ({"replica": REPLICA | {"is_bus_connected": False, "nodes_heard": 0}}, "error"),
        ({"replica": REPLICA | {"problems": ["the replica is stopping"]}}, "error"),
        ({"pools": [POOL | {"engines_accepting": 0}]}, "error"),
        ({"pools": [POOL | {"engines_accepting": 1}]}, "warning"),
        ({"pools": [POOL | {"saturation_ratio": 0.9}]}, "warning"),
        ({"pools": [POOL | {"saturation_ratio": 0.899}]}, None),
        ({"pools": [POOL | {"kv_used_ratio": 1.0, "calls_waiting": 4}]}, "warning"),
        # Where nothing is declared to run, nothing is full.
        ({"pools": [POOL | {"engines": 0, "engines_accepting": 0, "saturation_ratio": 1.0}]}, None),
    ],
)
def test_health_is_what_works_and_advice_what_is_short(
    change: dict[str, Any], severity: str | None
) -> None:
    found = findings_of({"replica": REPLICA, "pools": [POOL], **change})
    assert [str(one.severity) for one in found] == ([] if severity is None else [severity])
    assert is_healthy(found) is (severity != "error")
    assert all(one.command.startswith("headway ") for one in found)


def test_refusals_are_a_trouble_only_when_they_are_many_and_not_somebodys_own() -> None:
    for reason, share, severity in (
        ("no_capacity", 0.02, Severity.ERROR),
        ("no_capacity", 0.009, Severity.NOTE),
        ("shed_overload", 0.01, Severity.WARNING),
        ("rate_limited", 0.9, Severity.NOTE),
        ("of_a_newer_server", 0.9, Severity.NOTE),
    ):
        told = {
            "reason": reason, "calls": 1, "share_ratio": share, "tenants": 1, "tenant_most": "acme",
            "model_most": None, "rule_most": None, "example": "req-1",
        }  # fmt: skip
        [found] = findings_of({"replica": REPLICA, "refusals": [told]})
        assert found.severity is severity, reason
        assert "acme" in found.words


def test_ways_in_tell_both_numbers() -> None:
    price = hurdle("worth_micro_usd_per_s", 250.0, 1_000.0)
    [way] = ways_in(refusal(hurdles=[price]))
    assert "$0.001000" in way
    assert "$0.000250" in way
    # Worth enough and refused all the same: more money would not help.
    [way] = ways_in(refusal(hurdles=[hurdle("worth_micro_usd_per_s", 1_000.0, 1_000.0)]))
    assert "priority" in way
    seats, time = ways_in(
        refusal(hurdles=[hurdle("seats", 0.25, 1.5), hurdle("time_ms", 2_000, 5_500)])
    )
    assert ("1.50" in seats, "0.25" in seats) == (True, True)
    assert ("3.5 s later" in time, "5.5 s" in time) == (True, True)
    facts = {"request.deadline_ms": 4_000, "workflow.deadline_slack_ms": 2**62 - 1}
    [way] = ways_in(refusal(reason="deadline_unreachable", facts=facts, e2e_ms_predicted=9_100.0))
    assert ("9.1 s" in way, "4.0 s" in way) == (True, True)
    # Of a call's own time and its workflow's, the shorter one counts.
    facts |= {"workflow.deadline_slack_ms": 2_000}
    [way] = ways_in(refusal(reason="deadline_unreachable", facts=facts, e2e_ms_predicted=9_100.0))
    assert "2.0 s were left" in way
    [way] = ways_in(refusal(retry_after_ms=1_500))
    assert "1.5 s" in way
    [way] = ways_in(refusal(is_final=True))
    assert "again" in way


def test_a_model_is_left_alone_only_when_its_last_decoder_goes() -> None:
    """Against every fleet of three engines, counted by hand."""
    shapes = list(product(("a", "b"), ("both", "prefill"), (True, False)))
    for fleet in product(shapes, repeat=3):
        engines = [
            {"id": number, "model": model, "role": role, "is_accepting": accepting}
            for number, (model, role, accepting) in enumerate(fleet)
        ]
        expected = []
        for model in ("a", "b"):
            able = [
                number
                for number, (its, role, accepting) in enumerate(fleet)
                if its == model and role == "both" and accepting
            ]
            if able == [0]:
                expected.append(model)
        assert left_without(engines, lambda engine: engine["id"] == 0) == expected


def test_rows_without_a_value_come_last_in_either_order() -> None:
    rows = [
        POOL | {"model": name, "saturation_ratio": ratio, "engines": engines,
                "calls_in_flight": 0, "breaker": "closed", "is_overloaded": False,
                "ramp_ratio": 1.0, "seats_taken": 0, "seats_bound": 0, "seats_promised": 0.0,
                "price_usd_per_s": 0.0, "load_ratio": 0.0}
        for name, ratio, engines in (("x", 0.2, 1), ("y", 1.0, 0), ("z", 0.7, 1))
    ]  # fmt: skip
    for is_descending, expected in ((True, "zxy"), (False, "xzy")):
        found = arranged(POOLS, rows, sort=4, is_descending=is_descending, wanted="")
        assert "".join(row["model"] for row in found) == expected
    [only] = arranged(POOLS, rows, sort=0, is_descending=False, wanted="Z")
    assert only["model"] == "z"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A folder with a local server, a context in use, and an empty environment."""
    (tmp_path / ".headway").mkdir()
    (tmp_path / ".headway" / "operator.json").write_text('{"url": "http://local", "key": "l"}')
    (tmp_path / "config.yaml").write_text(
        "current: c\ncontexts:\n  c: {url: 'http://c', key: kc}\n  d: {url: 'http://d', key: kd}\n"
    )
    (tmp_path / "config.yaml").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_CONFIG", str(tmp_path / "config.yaml"))
    for name in ("HEADWAY_URL", "HEADWAY_OPERATOR_KEY", "HEADWAY_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_nearest_word_names_the_server(places: pytest.MonkeyPatch) -> None:
    data = Path(".headway")
    found = connection(None, None, Path("elsewhere"), None)
    assert (found.url, found.key, found.url_source) == ("http://c", "kc", Source.CONTEXT_CURRENT)
    # A local server of this folder is nearer than a context that was put in use some day.
    assert connection(None, None, data, None).url_source is Source.LOCAL
    places.setenv("HEADWAY_CONTEXT", "d")
    assert connection(None, None, data, None).key == "kd"
    places.setenv("HEADWAY_URL", "http://e")
    places.setenv("HEADWAY_OPERATOR_KEY", "ke")
    assert connection(None, None, data, None).key == "ke"
    assert connection(None, None, data, "c").key == "kc"
    assert connection("http://o", "ko", data, None).url == "http://o"
    with pytest.raises(CommandFailure, match="belongs to http://c"):
        connection("http://o", None, data, "c")


def test_formats_do_not_contradict_each_other() -> None:
    assert Output.of(None, as_json=False).format is Format.TABLE
    assert Output.of(None, as_json=True).format is Format.JSON
    assert Output.of(Format.YAML, as_json=False).is_for_programs
    with pytest.raises(CommandFailure):
        Output.of(Format.TABLE, as_json=True)


def test_text_of_tenants_can_not_command_a_terminal_or_a_page(tmp_path: Path) -> None:
    nasty = "\x1b]0;owned\x07<script>alert(1)</script>[red]"
    assert cell(nasty).isprintable()
    assert Text.from_markup(cell(nasty)).plain.endswith("</script>[red]")
    waster = {
        "id": "wf-1", "tenant_id": "acme", "kind": nasty, "state": "failed", "calls": 2,
        "micro_usd": 5,
    }  # fmt: skip
    change = {
        "tenant": "acme", "reason_before": "", "rule_before": "", "reason_after": "shed_overload",
        "rule_after": nasty, "calls": 3,
    }  # fmt: skip
    page = render(
        {
            "at": "2026-11-30T12:00:00+00:00", "since_s": 3_600, "bucket_s": 60, "spend": [],
            "workflows": [], "attainment": [], "refusals": [], "wasters": [waster],
            "is_wasters_cut": False,
            "totals": {
                "calls": 0, "settled_micro_usd": 0, "wasted_micro_usd": 0, "prompt_tokens": 0,
                "cached_tokens": 0,
            },
            "shadow": {"digest": "d" * 64, "calls": 90, "calls_changed": 3, "is_cut": False,
                       "changes": [change]},
        },
        "http://headway",
    )  # fmt: skip
    assert "<script>alert" not in page
    assert "3 would have ended otherwise" in page
    assert "90 calls of the log" in page
    assert "let through" in page
