"""First leg of a split call: an engine computes the prompt's KV for the one that will answer.

What the two engines are told depends on the connector that they have declared. What the first one answers
goes to the second one word for word. Failures of the first leg are told as values, since the call goes on
without it.

INVARIANT: nothing is fetched that may not be there any more. A decode engine that reads blocks after their
lease has ended gets another prompt's KV, does not notice, and keeps it in its prefix cache under the name of
this prompt.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from controlplane.domain.fleet import EngineRow
from controlplane.domain.outcome import AttemptOutcome
from controlplane.domain.transfer import FETCHING, Connector, KvSource
from controlplane.gateway.upstream import Address, Upstream, UpstreamError
from controlplane.wire.openai import Answer

# A lease begins when the prompt is computed, at some time during the first leg, so that it is counted from
# the leg's begin; the rest is for the second call to get to its engine, which then renews it.
LEASE_USABLE_RATIO: Final = 0.8
# How long a first leg may take: a multiple of what the pair was predicted to need, but at least so long, and
# never more than a part of what is left until the deadline, for the other engine needs the rest of it.
PATIENCE_RATIO: Final = 10.0
PATIENCE_S_MIN: Final = 5.0
DEADLINE_RATIO: Final = 0.5
# From asking an engine for an answer with KV from elsewhere to its first token.
FETCH_S_MAX: Final = 20.0
OK: Final = 200
TOO_MANY: Final = 429
UNAVAILABLE: Final = 503
TIMED_OUT: Final = 408
UNAUTHORISED: Final = frozenset({401, 403})
CLIENT_ERRORS: Final = range(400, 500)
# KV is held only when the engine stopped for one of these; by Mooncake for the first one alone.
_ENDS: Final = frozenset({"length", "stop"})
_ENDS_OF_MOONCAKE: Final = frozenset({"length"})

# What vLLM's NIXL connectors expect of the leg that computes the prompt's KV for somebody else.
_ASKED_OF_NIXL: Final = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class _Held(msgspec.Struct, frozen=True):
    """Without these members a decode engine waits for ever, and its core dies when the call is left."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[Raw]


_decode = msgspec.json.Decoder(Answer).decode
_held = msgspec.json.Decoder(_Held).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`row` holds the KV until `until_s`, in seconds of the monotonic clock.

    `transfer` goes to the decode engine word for word, None where that one finds the KV by itself;
    `request_id` is the id under which both engines must know the call. `cached_tokens` is None if unreported.
    """

    row: EngineRow
    transfer: Raw | None
    cached_tokens: int | None
    until_s: float
    request_id: str
    is_fetched: bool


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


def id_of_attempt(request_id: str, attempt: int) -> str:
    """The id that engines are told, another one for each attempt.

    Engines that push match two calls by their id: what an abandoned attempt left must not match the next.
    """
    return f"{request_id}-{attempt}" if attempt else request_id


def patience_s(source: KvSource, predicted_ms: float, left_s: float | None) -> float:
    """How long a first leg may take. `left_s` seconds remain until the call's deadline, None: no end."""
    most = max(PATIENCE_S_MIN, PATIENCE_RATIO * predicted_ms / 1000.0)
    most = min(most, LEASE_USABLE_RATIO * source.lease_s)
    return most if left_s is None else min(most, DEADLINE_RATIO * left_s)


async def prefill(
    upstream: Upstream,
    row: EngineRow,
    source: KvSource,
    address: Address,
    path: bytes,
    headers: bytes,
    body: bytes,
    *,
    request_id: str,
    now_s: float,
    deadline_s: float,
) -> Prefilled | Unfilled:
    """Run the first leg to its end. Instants are seconds of the monotonic clock.

    `body` holds what `asked` says, and asks for one token.
    """
    try:
        connection = await upstream.post(address, path, headers, body, deadline=deadline_s)
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
    ends = _ENDS_OF_MOONCAKE if source.connector is Connector.MOONCAKE else _ENDS
    if not decoded.choices or decoded.choices[0].finish_reason not in ends:
        return Unfilled(AttemptOutcome.SERVER_ERROR, "the engine did not keep the KV")
    transfer = _transfer(source, request_id, decoded.kv_transfer_params)
    is_fetched = source.connector in FETCHING
    if is_fetched and transfer is None:
        return Unfilled(AttemptOutcome.SERVER_ERROR, "the answer names no KV to fetch")
    details = None if decoded.usage is None else decoded.usage.prompt_tokens_details
    return Prefilled(
        row,
        transfer,
        None if details is None else details.cached_tokens,
        now_s + LEASE_USABLE_RATIO * source.lease_s,
        request_id,
        is_fetched,
    )


def asked(source: KvSource, request_id: str) -> Raw | None:
    """What the first engine is told beside the prompt."""
    match source.connector:
        case Connector.NIXL | Connector.NIXL_PUSH:
            return _ASKED_OF_NIXL
        case Connector.MOONCAKE:
            return Raw(
                _encode(
                    {
                        "do_remote_decode": True,
                        "do_remote_prefill": False,
                        "transfer_id": f"transfer-{request_id}",
                    }
                )
            )
        case Connector.SHARED_FOLDER:
            return None


def _transfer(source: KvSource, request_id: str, answered: Raw) -> Raw | None:
    """What the second engine is told: what the first one answered, unless the connector answers nothing.

    None: nothing that could be fetched.
    """
    match source.connector:
        case Connector.NIXL | Connector.NIXL_PUSH:
            try:
                held = _held(answered)
            except msgspec.MsgspecError:
                return None
            return answered if held.remote_request_id and held.remote_block_ids else None
        case Connector.MOONCAKE:
            if not (source.engine_id and source.bootstrap):
                return None
            return Raw(
                _encode(
                    {
                        "do_remote_decode": False,
                        "do_remote_prefill": True,
                        "transfer_id": f"transfer-{request_id}",
                        "remote_engine_id": source.engine_id,
                        "remote_bootstrap_addr": source.bootstrap,
                    }
                )
            )
        case Connector.SHARED_FOLDER:
            return None
