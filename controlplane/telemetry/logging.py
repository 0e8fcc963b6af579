"""One JSON line per event on standard error. No prompt, no completion, no key is ever a field.

Events carry fields from a closed list. What other libraries log through the standard library
becomes an event too, cut to MESSAGE_CHARS_MAX and with keys blotted out.
"""

import logging
import re
import sys
import time
from typing import TextIO

import msgspec

from controlplane.domain.errors import HeadwayError

MESSAGE_CHARS_MAX = 2_000
VALUE_CHARS_MAX = 200

# The closed list; a field that is not here is refused, so that none can leak by accident.
FIELDS = frozenset(
    {
        "attempt", "cause", "child", "command", "decision", "detail", "duration_ms", "endpoint",
        "engine", "entries", "epoch", "error", "kept", "kind", "leg", "loop", "model", "moves", "node", "outcome",
        "path", "pause_s", "pid", "port", "reason", "region", "replica", "request", "requests",
        "requests_lost", "revision", "scope", "signal", "state", "status", "step", "subject", "tenant_class", "trace",
        "url", "version", "was", "why", "workflow", "workflows_expired",
    }
)  # fmt: skip

_KEY = re.compile(r"hw-(tenant|op)-([0-9A-Za-z]{1,16})[-0-9A-Za-z_]*")
_BEARER = re.compile(r"(?i)\b(bearer)\s+\S+")
_DSN_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]+@")

Field = str | int | float | bool | None


class UnknownFieldError(HeadwayError):
    """A log call names a field that is not on the closed list."""


def redact(text: str) -> str:
    """The text without secrets: keys keep their public id, URLs lose their password."""
    text = _KEY.sub(r"hw-\1-\2-…", text)
    text = _BEARER.sub(r"\1 …", text)
    return _DSN_PASSWORD.sub(r"\1…@", text)


class EventLog:
    """Writes events. `fixed` fields (replica, node) stand on every line."""

    def __init__(self, stream: TextIO | None = None, **fixed: Field) -> None:
        _check(fixed)
        self._stream = stream or sys.stderr
        self._fixed = fixed

    def event(self, name: str, level: str = "info", **fields: Field) -> None:
        _check(fields)
        self._write(name, level, None, fields)

    def message(self, name: str, level: str, message: str) -> None:
        """Something that another library has said, in its own words."""
        self._write(name, level, redact(message)[:MESSAGE_CHARS_MAX], {})

    def record(self, record: logging.LogRecord, trace: str | None) -> None:
        """An event of ours that came through the standard library: its message is its name.

        Fields are given as `extra={"fields": {...}}`; one that is not on the list, or not known, is left out.
        """
        given = getattr(record, "fields", {})
        fields = {
            name: value for name, value in given.items() if name in FIELDS and value is not None
        }
        # What failed stands at the end of a trace, whoever called at its beginning.
        message = None if trace is None else redact(trace)[-MESSAGE_CHARS_MAX:]
        self._write(record.getMessage(), record.levelname.lower(), message, fields)

    def _write(self, name: str, level: str, message: str | None, fields: dict[str, Field]) -> None:
        line: dict[str, Field] = {"at": _instant(), "level": level, "event": name, **self._fixed}
        for key, value in fields.items():
            line[key] = redact(value)[:VALUE_CHARS_MAX] if isinstance(value, str) else value
        if message is not None:
            line["message"] = message
        # JSON escapes control characters, so that one event is one line.
        self._stream.write(msgspec.json.encode(line).decode() + "\n")
        self._stream.flush()


class _Handler(logging.Handler):
    def __init__(self, events: EventLog) -> None:
        super().__init__()
        self._events = events
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        trace = self._formatter.formatException(record.exc_info) if record.exc_info else None
        if hasattr(record, "fields") or record.name.startswith("controlplane."):
            self._events.record(record, trace)
            return
        message = record.getMessage()
        if trace is not None:
            room = MESSAGE_CHARS_MAX - min(len(message), MESSAGE_CHARS_MAX // 2)
            message += "\n" + redact(trace)[-room:]
        self._events.message(record.name, record.levelname.lower(), message)


def configure(events: EventLog, level: str) -> None:
    """Send everything that is logged through the standard library to `events`."""
    root = logging.getLogger()
    for handler in tuple(root.handlers):
        root.removeHandler(handler)
    root.addHandler(_Handler(events))
    root.setLevel(level.upper())


def _check(fields: dict[str, Field]) -> None:
    if not FIELDS.issuperset(fields):
        unknown = ", ".join(sorted(set(fields) - FIELDS))
        raise UnknownFieldError(f"not on the list of log fields: `{unknown}`")


def _instant() -> str:
    now = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return f"{whole}.{int(now % 1 * 1000):03d}Z"
