"""Answers given again: which calls may share one, what it says the second time, who waits for the first.

Only calls whose answer is decided by their body take part, and only those of tenants whose class asks for
it; an answer is never shared between tenants.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from controlplane.admission.response_cache import Flights, Place, ResponseCache, StoredAnswer
from controlplane.domain.outcome import RequestState, Usage
from controlplane.gateway.body import Body
from controlplane.gateway.exchange import Exchange, Send
from controlplane.gateway.recorder import Recorder
from controlplane.runtime.call import Call, monotonic_ms

CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 1024 * 1024
# The longest that a call waits for another one's answer before it goes on by itself.
WAIT_S_MAX: Final = 60.0

HIT: Final = (b"x-headway-cache", b"hit")
MISS: Final = (b"x-headway-cache", b"miss")

_DATA: Final = b"data:"
_USAGE: Final = b'"usage"'

_index = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Deal:
    """How a call that takes part is served: `make` asks an engine, `give` sends what is stored."""

    key: bytes
    ttl_s: int
    make: Callable[[Send], Awaitable[Exchange | None]]
    give: Callable[[StoredAnswer], Awaitable[bool]]


class CachedAnswers:
    """The answers of one replica, and the calls that wait for one to be made."""

    def __init__(self, *, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.cache = ResponseCache(bytes_max=bytes_max, answer_bytes_max=ANSWER_BYTES_MAX)
        self._flights: Flights[asyncio.Future[StoredAnswer | None]] = Flights()

    async def serve(self, call: Call, deal: Deal, send: Send) -> bool:
        """Give the stored answer, or make it, or wait for who is making it. Whether all was answered."""
        key = deal.key
        stored = self.cache.find(key, int(monotonic_ms()))
        if stored is not None:
            return await deal.give(stored)
        me: asyncio.Future[StoredAnswer | None] = asyncio.get_running_loop().create_future()
        if self._flights.join(key, me) is Place.WAITS:
            stored = await self._wait(key, me, call)
            if stored is not None:
                return await deal.give(stored)
        return await self._make(call, deal, send, me)

    async def _wait(
        self, key: bytes, me: "asyncio.Future[StoredAnswer | None]", call: Call
    ) -> StoredAnswer | None:
        """The answer that another call made. None: this call makes its own, and may lead."""
        wait_s = WAIT_S_MAX
        if call.deadline_ms is not None:
            left_ms = call.received_ms + call.deadline_ms - monotonic_ms()
            wait_s = min(wait_s, left_ms / 1000.0)
        try:
            async with asyncio.timeout(wait_s):
                return await me
        except TimeoutError:
            # The answer may have come at the very moment.
            if me.done() and not me.cancelled():
                return me.result()
            self._leave(key, me)
            return None
        except BaseException:
            self._leave(key, me)
            raise

    async def _make(
        self,
        call: Call,
        deal: Deal,
        send: Send,
        me: "asyncio.Future[StoredAnswer | None]",
    ) -> bool:
        recorder = Recorder(send, self.cache.answer_bytes_max)
        stored: StoredAnswer | None = None
        is_made = False
        try:
            exchange = await deal.make(recorder.send)
            if exchange is None:
                return False
            is_made = exchange.state is RequestState.SUCCEEDED
            if is_made and exchange.is_repeatable:
                stored = self._keep(deal, call, exchange.usage, recorder.body)
            return exchange.has_answered
        finally:
            if is_made:
                # An answer that can not be kept is no reason to make the others one by one.
                for waiting in self._flights.land(deal.key, me):
                    if not waiting.done():
                        waiting.set_result(stored)
            else:
                self._leave(deal.key, me)

    def _keep(self, deal: Deal, call: Call, used: Usage, body: bytes | None) -> StoredAnswer | None:
        if body is None:
            return None
        prompt_tokens = used.prompt_tokens
        body = told_again(body, prompt_tokens, is_stream=call.is_stream)
        usage = Usage(prompt_tokens, prompt_tokens, used.completion_tokens, used.is_estimated)
        expires_ms = int(monotonic_ms()) + deal.ttl_s * 1000
        stored = StoredAnswer(body, usage, expires_ms)
        return stored if self.cache.keep(deal.key, stored) else None

    def _leave(self, key: bytes, me: "asyncio.Future[StoredAnswer | None]") -> None:
        leads = self._flights.leave(key, me)
        # One that was cancelled meanwhile leaves by itself, and hands the lead on.
        if leads is not None and not leads.done():
            leads.set_result(None)


def may_repeat(body: Body) -> bool:
    """Whether the body alone decides the answer: one answer, and nothing drawn by chance."""
    read = body.read
    return read.temperature == 0 and body.sequences == 1 and (read.best_of or 1) == 1


def key_of(call: Call, body: Body) -> bytes:
    """What an answer depends on: whose call, of which kind, and every member that an engine gets."""
    parts = [
        call.principal.tenant.id,
        call.endpoint,
        body.read.cache_salt,
        dict(sorted(body.members.items())),
    ]
    return hashlib.sha256(_encode(parts)).digest()


def told_again(body: bytes, prompt_tokens: int, *, is_stream: bool) -> bytes:
    """The answer for the next client: word for word, but that its usage counts all of the prompt as cached."""
    if _USAGE not in body:
        return body
    if not is_stream:
        return _with_usage_cached(body, prompt_tokens)
    return b"\n\n".join(
        _DATA + b" " + _with_usage_cached(event[len(_DATA) :], prompt_tokens)
        if event.startswith(_DATA) and _USAGE in event
        else event
        for event in body.split(b"\n\n")
    )


def _with_usage_cached(body: bytes, prompt_tokens: int) -> bytes:
    members = _index(body)
    usage = members.get("usage")
    if usage is None or not bytes(usage).startswith(b"{"):
        return body
    counts = _decode_object(usage)
    details = counts.get("prompt_tokens_details") or {}
    counts["prompt_tokens_details"] = {**details, "cached_tokens": prompt_tokens}
    members["usage"] = Raw(_encode(counts))
    return _encode(members)
