"""First leg of a split call: an engine computes the prompt's KV for the one that will answer.

Failures of the first leg are told as values, since the call goes on without it.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from controlplane.domain.outcome import AttemptOutcome
from controlplane.gateway.upstream import Address, Upstream, UpstreamError
from controlplane.wire.openai import Answer

# vLLM holds transferred KV under a lease of 30 s; a slower prefill is not worth waiting for.
PREFILL_S_MAX: Final = 30.0
OK: Final = 200
TOO_MANY: Final = 429
UNAVAILABLE: Final = 503
TIMED_OUT: Final = 408
UNAUTHORISED: Final = frozenset({401, 403})
CLIENT_ERRORS: Final = range(400, 500)
# KV is held only when the engine stopped for one of these.
_HELD: Final = frozenset({"length", "stop"})

_decode = msgspec.json.Decoder(Answer).decode


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`transfer` goes to the decode engine word for word; `cached_tokens` is None if unreported."""

    transfer: Raw
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Unfilled:
    """The first leg failed; `outcome` says how."""

    outcome: AttemptOutcome
    detail: str


def outcome_of(status: int) -> AttemptOutcome:
    """How a breaker sees an engine's status."""
    if status == OK:
        return AttemptOutcome.OK
    if status in (TOO_MANY, UNAVAILABLE):
        return AttemptOutcome.BACKPRESSURE
    if status == TIMED_OUT:
        return AttemptOutcome.TIMEOUT
    # An engine that asks for a key is set up wrongly; the tenant's request is not at fault.
    if status in CLIENT_ERRORS and status not in UNAUTHORISED:
        return AttemptOutcome.CLIENT_ERROR
    return AttemptOutcome.SERVER_ERROR


async def prefill(
    upstream: Upstream,
    address: Address,
    path: bytes,
    headers: bytes,
    body: bytes,
    *,
    deadline: float,
) -> Prefilled | Unfilled:
    """Run the first leg to its end. `deadline` in seconds of the monotonic clock."""
    try:
        connection = await upstream.post(address, path, headers, body, deadline=deadline)
        try:
            answer = await connection.read()
        except BaseException:
            connection.abort()
            raise
    except UpstreamError as failure:
        return Unfilled(failure.outcome, failure.detail)
    status = connection.status
    connection.release()
    outcome = outcome_of(status)
    if outcome is not AttemptOutcome.OK:
        return Unfilled(outcome, f"status {status}")
    try:
        decoded = _decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Unfilled(AttemptOutcome.SERVER_ERROR, "the answer is not JSON of a completion")
    transfer = decoded.kv_transfer_params
    if not bytes(transfer).startswith(b"{"):
        return Unfilled(AttemptOutcome.SERVER_ERROR, "the answer names no KV to fetch")
    if not decoded.choices or decoded.choices[0].finish_reason not in _HELD:
        return Unfilled(AttemptOutcome.SERVER_ERROR, "the engine did not keep the KV")
    details = None if decoded.usage is None else decoded.usage.prompt_tokens_details
    return Prefilled(transfer, None if details is None else details.cached_tokens)
