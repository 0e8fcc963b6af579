"""What a client says of its call besides the prompt: workflow, session, deadline, priority.

Headway's own names are strict: a wrong value is refused. Names of other products and agents are
hints: what can not be understood is ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from controlplane.domain.decision import Reason, Refuse
from controlplane.gateway.body import Flaw

ID_CHARS_MAX: Final = 128
STEP_MAX: Final = 1_000_000
DEADLINE_MS_MAX: Final = 24 * 3_600_000
HINT_BYTES_MAX: Final = 8_192
RETRIES_MAX: Final = 100
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
TOKENS_HINT_MAX: Final = 10_000_000
# The official SDK sends its read time-out with every call; its default says nothing about a call.
READ_TIMEOUT_DEFAULT_S: Final = 600.0

WORKFLOW: Final = b"x-headway-workflow"
STEP: Final = b"x-headway-step"
DEADLINE: Final = b"x-headway-deadline-ms"
DRY_RUN: Final = b"x-headway-dry-run"
IDEMPOTENCY_KEY: Final = b"idempotency-key"
RETRY_COUNT: Final = b"x-stainless-retry-count"
READ_TIMEOUT: Final = b"x-stainless-read-timeout"
AUTHORIZATION: Final = b"authorization"
TRACEPARENT: Final = b"traceparent"
CONTENT_LENGTH: Final = b"content-length"

# Sessions by header, most telling first: ours, then Claude Code, Codex, OpenCode, Dynamo, routers.
SESSIONS: Final = (
    b"x-headway-session",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-id",
    b"x-dynamo-session-id",
    b"x-session-affinity",
)

WANTED: Final = frozenset(
    {
        AUTHORIZATION, CONTENT_LENGTH, TRACEPARENT, WORKFLOW, STEP, DEADLINE, DRY_RUN,
        IDEMPOTENCY_KEY, RETRY_COUNT, READ_TIMEOUT, *SESSIONS,
    }
)  # fmt: skip

# OpenAI's tiers as a priority: higher is sooner.
SERVICE_TIERS: Final = {"priority": 1, "flex": -1}

_HINTING: Final = frozenset(
    {"metadata", "nvext", "vllm_xargs", "prompt_cache_key", "service_tier", "priority"}
)
_SESSION_SET: Final = frozenset(SESSIONS)
_BOOLEANS: Final = {b"true": True, b"false": False}
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Hints:
    workflow: str | None = None
    step: int | None = None
    session: str | None = None
    deadline_ms: int | None = None
    completion_tokens: int | None = None
    priority: int | None = None
    client_retries: int = 0
    idempotency_key: str | None = None
    is_dry_run: bool = False


def wanted(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers that anything here reads; of a repeated one the last."""
    return {name: value for name, value in headers if name in WANTED}


def read(headers: Mapping[bytes, bytes], left_out: Mapping[str, Raw]) -> Hints | Flaw:
    """Hints of the headers first, then of the body's members that engines do not get."""
    hints = Hints()
    if WORKFLOW in headers:
        workflow = _identifier(headers[WORKFLOW])
        if workflow is None:
            return _wrong(WORKFLOW, "is not an id")
        hints.workflow = workflow
    if STEP in headers:
        step = _natural(headers[STEP], STEP_MAX)
        if step is None:
            return _wrong(STEP, f"is not a number in 0..{STEP_MAX}")
        hints.step = step
    if DEADLINE in headers:
        deadline_ms = _natural(headers[DEADLINE], DEADLINE_MS_MAX)
        if not deadline_ms:
            return _wrong(DEADLINE, f"is not a number of milliseconds in 1..{DEADLINE_MS_MAX}")
        hints.deadline_ms = deadline_ms
    if IDEMPOTENCY_KEY in headers:
        key = _identifier(headers[IDEMPOTENCY_KEY], IDEMPOTENCY_KEY_CHARS_MAX)
        if key is None:
            words = f"is not 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable characters without spaces"
            return _wrong(IDEMPOTENCY_KEY, words)
        hints.idempotency_key = key
    if DRY_RUN in headers:
        asked = headers[DRY_RUN]
        if asked not in _BOOLEANS:
            return _wrong(DRY_RUN, "is neither `true` nor `false`")
        hints.is_dry_run = _BOOLEANS[asked]
    if not _SESSION_SET.isdisjoint(headers):
        for name in SESSIONS:
            if name in headers and (session := _identifier(headers[name])) is not None:
                hints.session = session
                break
    if RETRY_COUNT in headers:
        hints.client_retries = _natural(headers[RETRY_COUNT], RETRIES_MAX) or 0
    if hints.deadline_ms is None and READ_TIMEOUT in headers:
        hints.deadline_ms = _read_timeout_ms(headers[READ_TIMEOUT])
    if left_out and not _HINTING.isdisjoint(left_out):
        return _read_members(hints, left_out)
    return hints


def _read_members(hints: Hints, left_out: Mapping[str, Raw]) -> Hints | Flaw:
    metadata = _object(left_out, "metadata")
    if "headway_workflow" in metadata and hints.workflow is None:
        named = metadata["headway_workflow"]
        hints.workflow = _identifier(named.encode()) if isinstance(named, str) else None
        if hints.workflow is None:
            return _wrong(b"metadata.headway_workflow", "is not an id")
    if "headway_step" in metadata and hints.step is None:
        # OpenAI's metadata holds strings only; a plain number is taken as well.
        hints.step = _natural(str(metadata["headway_step"]).encode(), STEP_MAX)
        if hints.step is None:
            return _wrong(b"metadata.headway_step", f"is not a number in 0..{STEP_MAX}")
    agentic = _inner(_object(left_out, "vllm_xargs"), "agentic_context")
    nvext = _object(left_out, "nvext")
    agent_hints, agent = _inner(nvext, "agent_hints"), _inner(nvext, "agent_context")
    if hints.session is None:
        key = left_out.get("prompt_cache_key")
        for named in (
            agentic.get("program_id"),
            agentic.get("session_id"),
            agent.get("session_id"),
            None if key is None or len(memoryview(key)) > HINT_BYTES_MAX else _decode(key),
        ):
            if isinstance(named, str) and (session := _identifier(named.encode())) is not None:
                hints.session = session
                break
    hints.completion_tokens = _tokens(agentic.get("expected_output_length"))
    if hints.completion_tokens is None:
        hints.completion_tokens = _tokens(agent_hints.get("osl"))
    if hints.deadline_ms is None:
        seconds = agentic.get("deadline_seconds")
        if isinstance(seconds, int | float) and 0 < seconds * 1000 <= DEADLINE_MS_MAX:
            hints.deadline_ms = max(1, int(seconds * 1000))
    tier = left_out.get("service_tier")
    own = left_out.get("priority")
    for number in (
        agentic.get("priority"),
        agent_hints.get("priority"),
        None if tier is None else SERVICE_TIERS.get(str(_small(tier))),
        # vLLM's own member counts the other way: lower is sooner.
        -lower if isinstance(lower := None if own is None else _small(own), int) else None,
    ):
        if isinstance(number, int) and not isinstance(number, bool):
            hints.priority = max(-100, min(100, number))
            break
    return hints


def _object(members: Mapping[str, Raw], name: str) -> dict[str, Any]:
    value = members.get(name)
    found = None if value is None else _small(value)
    return found if isinstance(found, dict) else {}


def _inner(members: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = members.get(name)
    return found if isinstance(found, dict) else {}


def _small(value: Raw) -> Any:
    return None if len(memoryview(value)) > HINT_BYTES_MAX else _decode(value)


def _identifier(value: bytes, chars_max: int = ID_CHARS_MAX) -> str | None:
    """An id of printable ASCII without spaces, or None."""
    if not 0 < len(value) <= chars_max or not value.isascii():
        return None
    text = value.decode("ascii")
    return text if text.isprintable() and " " not in text else None


def _natural(value: bytes, most: int) -> int | None:
    if not value.isdigit() or len(value) > len(str(most)):
        return None
    number = int(value)
    return number if number <= most else None


def _tokens(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= TOKENS_HINT_MAX:
        return None
    return value


def _read_timeout_ms(value: bytes) -> int | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    # False for NaN as well.
    if not 0 < seconds < READ_TIMEOUT_DEFAULT_S:
        return None
    return max(1, int(seconds * 1000))


def _wrong(name: bytes, words: str) -> Flaw:
    text = name.decode()
    return Flaw(Refuse(Reason.INVALID_REQUEST, f"`{text}` {words}"), text)
