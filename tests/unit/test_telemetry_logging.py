"""Log lines: one line of JSON per event, closed fields, no secrets."""

import io
import json
import logging

import pytest

from controlplane.telemetry.logging import EventLog, UnknownFieldError, configure, redact

KEY = "hw-tenant-ab12cd34-" + "A" * 43 + "-1a2b3c4d"


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    stream = io.StringIO()
    events = EventLog(stream, replica="r1")
    events.event("call_refused", "warning", reason="queue_full", detail="a\nb\x1b[31m" + "x" * 900)
    [line] = lines(stream)
    assert line["event"] == "call_refused"
    assert (line["level"], line["replica"], line["reason"]) == ("warning", "r1", "queue_full")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert len(str(line["detail"])) <= 200


def test_fields_off_the_list_are_refused() -> None:
    events = EventLog(io.StringIO())
    for field in ("prompt", "authorization", "messages", "api_key"):
        with pytest.raises(UnknownFieldError, match=field):
            events.event("x", **{field: "y"})


def test_secrets_are_blotted_out() -> None:
    text = f"key {KEY} auth Bearer abc.def dsn postgresql://u:s3cret@h/db"
    shown = redact(text)
    assert "AAAA" not in shown
    assert "hw-tenant-ab12cd34-…" in shown
    assert "abc.def" not in shown
    assert "s3cret" not in shown
    assert "@h/db" in shown


def test_what_libraries_log_becomes_events() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        configure(EventLog(stream), "info")
        logging.getLogger("some.library").info("hello %s", KEY)
        logging.getLogger("x").debug("not this")
        try:
            int("boom\n" + KEY)
        except ValueError:
            logging.getLogger("y").exception("failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    # Servers that other tests started in this process may speak at any time.
    first, second = (line for line in lines(stream) if line["event"] in {"some.library", "x", "y"})
    assert first["event"] == "some.library"
    assert second["level"] == "error"
    assert "ValueError" in str(second["message"])
    assert "AAAA" not in stream.getvalue()


def test_our_events_keep_their_fields_and_lose_those_off_the_list() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        configure(EventLog(stream), "info")
        logging.getLogger("controlplane.runtime.loops").warning(
            "loop_waits", extra={"fields": {"loop": "reap", "why": KEY, "prompt": "secret"}}
        )
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    [line] = [line for line in lines(stream) if line["event"] == "loop_waits"]
    assert (line["event"], line["level"], line["loop"]) == ("loop_waits", "warning", "reap")
    assert "prompt" not in line
    assert "AAAA" not in stream.getvalue()
