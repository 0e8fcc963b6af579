"""Hints: our own names are strict, everybody else's are ignored when they can not be understood."""

import json
from typing import Any

import pytest

from controlplane.gateway import hints
from controlplane.gateway.body import Body, Flaw, parse
from controlplane.gateway.hints import Hints


def said(headers: dict[str, str] | None = None, **members: Any) -> Hints | Flaw:
    raw = json.dumps({"model": "m", "messages": [{}], **members}).encode()
    body = parse(raw, is_chat=True)
    assert isinstance(body, Body)
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return hints.read(hints.wanted(pairs), body.left_out)


def test_nothing_said() -> None:
    assert said({"user-agent": "x"}) == Hints()


def test_our_headers() -> None:
    headers = {
        "x-headway-workflow": "wf-1",
        "x-headway-step": "3",
        "x-headway-deadline-ms": "1500",
        "x-headway-session": "s",
        "x-stainless-retry-count": "2",
        "x-stainless-read-timeout": "30",
    }
    assert said(headers) == Hints("wf-1", 3, "s", 1_500, None, None, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-headway-workflow", ""),
        ("x-headway-workflow", "a b"),
        ("x-headway-workflow", "w" * 129),
        ("x-headway-workflow", "\u00e9"),
        ("x-headway-step", "-1"),
        ("x-headway-step", "1.0"),
        ("x-headway-step", "99999999999999999999"),
        ("x-headway-deadline-ms", "0"),
        ("x-headway-deadline-ms", "soon"),
    ],
)
def test_our_headers_are_strict(name: str, value: str) -> None:
    flaw = said({name: value})
    assert isinstance(flaw, Flaw)
    assert flaw.param == name


def test_metadata_names_the_workflow_and_headers_win() -> None:
    metadata = {"headway_workflow": "wf-2", "headway_step": "4"}
    found = said(metadata=metadata)
    assert isinstance(found, Hints)
    assert (found.workflow, found.step) == ("wf-2", 4)
    found = said({"x-headway-workflow": "wf-1", "x-headway-step": "0"}, metadata=metadata)
    assert isinstance(found, Hints)
    assert (found.workflow, found.step) == ("wf-1", 0)
    assert isinstance(said(metadata={"headway_step": "x"}), Flaw)
    assert isinstance(said(metadata={"headway_workflow": 5}), Flaw)


@pytest.mark.parametrize(
    "header",
    ["x-claude-code-session-id", "session-id", "x-session-id", "x-session-affinity", "session_id"],
)
def test_sessions_of_agents(header: str) -> None:
    found = said({header: "abc"}, prompt_cache_key="other")
    assert isinstance(found, Hints)
    assert found.session == "abc"


def test_hints_of_other_control_planes() -> None:
    found = said(
        vllm_xargs={
            "agentic_context": {
                "program_id": "p1",
                "deadline_seconds": 2.5,
                "expected_output_length": 90,
                "priority": 3,
            }
        }
    )
    assert found == Hints(None, None, "p1", 2_500, 90, 3, 0)
    found = said(
        nvext={
            "agent_hints": {"osl": 70, "priority": -2},
            "agent_context": {"session_id": "s2"},
        },
        service_tier="priority",
    )
    assert found == Hints(None, None, "s2", None, 70, -2, 0)
    assert said(service_tier="flex", prompt_cache_key="k") == Hints(session="k", priority=-1)
    assert said(priority=5) == Hints(priority=-5)


@pytest.mark.parametrize(
    "members",
    [
        {"nvext": "x"},
        {"nvext": {"agent_hints": [1]}},
        {"nvext": {"agent_hints": {"osl": True, "priority": "high"}}},
        {"vllm_xargs": {"agentic_context": {"deadline_seconds": -1, "priority": True}}},
        {"vllm_xargs": {"agentic_context": {"program_id": "x" * 10_000}}},
        {"service_tier": {"a": 1}},
        {"prompt_cache_key": ["a"]},
        {"metadata": {"other": "x"}},
    ],
)
def test_what_is_not_understood_is_ignored(members: dict[str, Any]) -> None:
    assert said(**members) == Hints()


def test_the_sdks_default_time_out_says_nothing() -> None:
    for value in ("600", "600.0", "nan", "-1", "x", "1e9"):
        assert said({"x-stainless-read-timeout": value}) == Hints()
    assert said({"x-stainless-read-timeout": "0.5"}) == Hints(deadline_ms=500)
    assert said({"x-stainless-retry-count": "many"}) == Hints()


def test_an_idempotency_key_and_a_dry_run_are_read() -> None:
    found = said({"idempotency-key": "k" * 255, "x-headway-dry-run": "true"})
    assert isinstance(found, Hints)
    assert (found.idempotency_key, found.is_dry_run) == ("k" * 255, True)
    found = said({"x-headway-dry-run": "false"})
    assert isinstance(found, Hints)
    assert (found.idempotency_key, found.is_dry_run) == (None, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idempotency-key", ""),
        ("idempotency-key", "k" * 256),
        ("idempotency-key", "a b"),
        ("idempotency-key", "a\tb"),
        ("idempotency-key", "\u00e9"),
        ("x-headway-dry-run", "1"),
        ("x-headway-dry-run", "True"),
        ("x-headway-dry-run", ""),
    ],
)
def test_a_key_or_a_dry_run_that_is_none_is_refused(name: str, value: str) -> None:
    flaw = said({name: value})
    assert isinstance(flaw, Flaw)
    assert flaw.param == name
