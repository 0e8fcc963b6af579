"""The one table from a reason to HTTP, and the OpenAI error envelope.

No other module names a status for a reason.
"""

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from controlplane.domain.decision import Reason, Refuse

MESSAGE_CHARS_MAX = 2_000
MILLISECONDS_PER_SECOND = 1_000


class Retry(StrEnum):
    """Whether asking again helps. `LATER` may name a time, `AGAIN` and `NEVER` never do."""

    NEVER = "never"
    AGAIN = "again"
    LATER = "later"


class Outcome(NamedTuple):
    """How a reason looks to a client.

    `retry` is told as `x-should-retry`, which the official SDKs obey before any rule of their own
    about the status; a `retry-after` goes with it only when the refusal holds an estimate.
    """

    status: int
    error_type: str
    retry: Retry


_WRONG = "invalid_request_error"
_LIMIT = "rate_limit_error"
_SERVER = "server_error"

OUTCOMES: dict[Reason, Outcome] = {
    Reason.INVALID_API_KEY: Outcome(401, "authentication_error", Retry.NEVER),
    Reason.FORBIDDEN_BY_POLICY: Outcome(403, "permission_error", Retry.NEVER),
    Reason.INVALID_REQUEST: Outcome(400, _WRONG, Retry.NEVER),
    Reason.REQUEST_TOO_LARGE: Outcome(413, _WRONG, Retry.NEVER),
    Reason.NOT_FOUND: Outcome(404, _WRONG, Retry.NEVER),
    Reason.METHOD_NOT_ALLOWED: Outcome(405, _WRONG, Retry.NEVER),
    Reason.MODEL_NOT_FOUND: Outcome(404, _WRONG, Retry.NEVER),
    Reason.WORKFLOW_NOT_FOUND: Outcome(404, _WRONG, Retry.NEVER),
    Reason.WORKFLOW_ENDED: Outcome(409, _WRONG, Retry.NEVER),
    Reason.CONFLICT: Outcome(409, _WRONG, Retry.NEVER),
    Reason.PRECONDITION_FAILED: Outcome(412, _WRONG, Retry.NEVER),
    Reason.CONTEXT_LENGTH_EXCEEDED: Outcome(400, _WRONG, Retry.NEVER),
    # OpenAI's own convention: 429, told apart from a rate limit by its code. Waiting does not help.
    Reason.INSUFFICIENT_QUOTA: Outcome(429, "insufficient_quota", Retry.NEVER),
    Reason.IDEMPOTENCY_IN_PROGRESS: Outcome(409, "idempotency_error", Retry.LATER),
    Reason.IDEMPOTENCY_MISMATCH: Outcome(422, "idempotency_error", Retry.NEVER),
    Reason.RESPONSE_NOT_STORED: Outcome(409, "idempotency_error", Retry.NEVER),
    # A rule that can not be evaluated denies; the fault is the operator's, not the caller's.
    Reason.POLICY_ERROR: Outcome(500, _SERVER, Retry.NEVER),
    Reason.RATE_LIMITED: Outcome(429, _LIMIT, Retry.LATER),
    Reason.SHED_OVERLOAD: Outcome(429, _LIMIT, Retry.LATER),
    Reason.DEFERRED: Outcome(429, _LIMIT, Retry.LATER),
    Reason.QUEUE_FULL: Outcome(429, _LIMIT, Retry.LATER),
    Reason.DEADLINE_UNREACHABLE: Outcome(429, _LIMIT, Retry.LATER),
    Reason.FAN_OUT_EXCEEDED: Outcome(429, _LIMIT, Retry.LATER),
    Reason.NO_CAPACITY: Outcome(503, _SERVER, Retry.LATER),
    Reason.WARMING: Outcome(503, _SERVER, Retry.LATER),
    Reason.STATE_UNAVAILABLE: Outcome(503, _SERVER, Retry.LATER),
    # Nothing of the answer has reached the client, so asking again repeats nothing.
    Reason.UPSTREAM_ERROR: Outcome(502, _SERVER, Retry.LATER),
    Reason.UPSTREAM_TIMEOUT: Outcome(504, _SERVER, Retry.LATER),
    # Said inside a stream that began with 200; the status is never seen.
    Reason.STREAM_INTERRUPTED: Outcome(200, _SERVER, Retry.NEVER),
    Reason.INTERNAL_ERROR: Outcome(500, _SERVER, Retry.AGAIN),
}

Headers = tuple[tuple[str, str], ...]


def envelope(message: str, error_type: str, param: str | None, code: str) -> dict[str, Any]:
    """The OpenAI error body as members of JSON."""
    return {
        "error": {
            "message": message[:MESSAGE_CHARS_MAX],
            "type": error_type,
            "param": param,
            "code": code,
        }
    }


def error_response(
    refuse: Refuse, decision_id: str | None, param: str | None = None
) -> tuple[int, Headers, bytes]:
    """Status, headers and body that tell a client of a refusal or a failure.

    `decision_id` is the id that `headway explain` takes; it doubles as the request id.
    """
    outcome = OUTCOMES[refuse.reason]
    is_final = refuse.is_final or outcome.retry is Retry.NEVER
    headers = [
        ("content-type", "application/json"),
        ("x-headway-reason", str(refuse.reason)),
        ("x-should-retry", "false" if is_final else "true"),
    ]
    if refuse.rule:
        headers.append(("x-headway-rule", refuse.rule))
    if decision_id:
        headers.append(("x-headway-decision", decision_id))
        headers.append(("x-request-id", decision_id))
    if outcome.retry is Retry.LATER and not is_final and refuse.retry_after_ms is not None:
        wait_ms = max(1, refuse.retry_after_ms)
        # Whole seconds, rounded up: a client that reads only this one never comes too early.
        headers.append(("retry-after", str(-(-wait_ms // MILLISECONDS_PER_SECOND))))
        headers.append(("retry-after-ms", str(wait_ms)))
    body = envelope(refuse.detail, outcome.error_type, param, refuse.reason)
    return outcome.status, tuple(headers), msgspec.json.encode(body)


def stream_error_event(refuse: Refuse) -> bytes:
    """The one event that ends a stream which can not be finished. No `[DONE]` follows it."""
    outcome = OUTCOMES[refuse.reason]
    body = msgspec.json.encode(envelope(refuse.detail, outcome.error_type, None, refuse.reason))
    return b"data: " + body + b"\n\n"
