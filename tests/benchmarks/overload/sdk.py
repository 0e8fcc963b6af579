"""A caller that behaves on the wire like the official OpenAI SDK, at a tenth of its CPU.

Which answers are asked for again, after what pause and with which headers is the SDK's; a test plays both
against the same server.
"""

import asyncio
import email.utils
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx2
import msgspec

RETRIES_MAX = 2
BACKOFF_S_FIRST = 0.5
BACKOFF_S_MAX = 8.0
BACKOFF_JITTER_RATIO = 0.25
# A server may ask for this long a pause; when it asks for more the SDK gives up.
RETRY_AFTER_S_MAX = 120.0
READ_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
_DATA = b"data: "
_DONE = b"[DONE]"
_AGAIN = frozenset({408, 409, 429})
# Statuses that say: not now, rather than: broken.
REFUSALS = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One HTTP call. `status` 0: no answer came. `retry_after_s`: what a refusal asked for.

    `is_refused`: by its status, or by an error before the first token in a stream that had begun.
    """

    status: int
    reason: str
    retry_after_s: float | None
    at_s: float
    is_refused: bool = False

    @property
    def is_admitted(self) -> bool:
        return 0 < self.status < 400 and not self.is_refused


@dataclass(slots=True, kw_only=True)
class Reply:
    """What came of one logical call. `error` is the code of an error, inside a stream or as status."""

    tries: list[Try] = field(default_factory=list)
    text: str = ""
    error: str = ""
    body: Any = None

    @property
    def is_ok(self) -> bool:
        return not self.error


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """The pause that a server asks for: milliseconds first, then seconds, then a date."""
    for name, divisor in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            return float(value) / divisor
        except ValueError:
            continue
    parsed = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return None if parsed is None else email.utils.mktime_tz(parsed) - wall_s


def may_retry(status: int, headers: Mapping[str, str], wall_s: float) -> bool:
    """Whether the SDK asks again, as long as it has retries left."""
    asked_s = retry_after_s(headers, wall_s)
    if asked_s is not None and math.isfinite(asked_s) and asked_s > RETRY_AFTER_S_MAX:
        return False
    told = headers.get("x-should-retry")
    if told in {"true", "false"}:
        return told == "true"
    return status in _AGAIN or status >= 500


def pause_s(retries: int, headers: Mapping[str, str], wall_s: float, random: Random) -> float:
    """How long the SDK waits before retry number `retries` + 1."""
    asked_s = retry_after_s(headers, wall_s)
    if asked_s is not None and math.isfinite(asked_s) and 0 < asked_s <= RETRY_AFTER_S_MAX:
        return asked_s
    backoff_s = min(BACKOFF_S_FIRST * 2.0**retries, BACKOFF_S_MAX)
    return backoff_s * (1 - BACKOFF_JITTER_RATIO * random.random())


class Caller:
    """Calls of many tenants over one pool of connections."""

    def __init__(self, url: str, *, seed: int = 0, retries_max: int = RETRIES_MAX) -> None:
        self._random = Random(f"{seed}:pauses")
        self._retries_max = retries_max
        self._http = httpx2.AsyncClient(
            base_url=url,
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(
        self, path: str, body: Any, key: str, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One logical call, with its retries. Cancelling it hangs up."""
        is_stream = isinstance(body, dict) and bool(body.get("stream"))
        content = msgspec.json.encode(body)
        reply = Reply()
        for retries in range(self._retries_max + 1):
            request = self._http.build_request(
                "POST",
                path,
                content=content,
                headers={
                    "authorization": f"Bearer {key}",
                    "content-type": "application/json",
                    "x-stainless-retry-count": str(retries),
                    "x-stainless-read-timeout": str(READ_TIMEOUT_S),
                    **(headers or {}),
                },
            )
            told: Mapping[str, str] = {}
            try:
                response = await self._http.send(request, stream=True)
            except httpx2.RequestError as error:
                reply.tries.append(
                    Try(status=0, reason="", retry_after_s=None, at_s=time.monotonic())
                )
                reply.error = type(error).__name__
            else:
                is_final = await self._take(response, reply, is_stream=is_stream)
                told = response.headers
                if is_final or not may_retry(response.status_code, told, time.time()):
                    return reply
            if retries < self._retries_max:
                await asyncio.sleep(pause_s(retries, told, time.time(), self._random))
        return reply

    async def _take(self, response: httpx2.Response, reply: Reply, *, is_stream: bool) -> bool:
        """Read one answer into `reply`; whether it is the last one whatever its status says."""
        headers = response.headers
        status = response.status_code
        asked_s = retry_after_s(headers, time.time()) if status >= 400 else None
        reason = headers.get("x-headway-reason", "")
        reply.tries.append(
            Try(
                status=status,
                reason=reason,
                retry_after_s=asked_s,
                at_s=time.monotonic(),
                is_refused=status in REFUSALS,
            )
        )
        try:
            if status >= 400:
                await response.aread()
                reply.error = reason or str(status)
                return False
            reply.error = ""
            if is_stream:
                await self._take_stream(response, reply)
            else:
                reply.body = msgspec.json.decode(await response.aread())
                choices = reply.body.get("choices") if isinstance(reply.body, dict) else None
                if choices:
                    reply.text = choices[0]["message"]["content"] or ""
        except httpx2.RequestError as error:
            # The SDK has handed the answer over by now: it does not ask again.
            reply.error = type(error).__name__
        finally:
            await response.aclose()
        return True

    async def _take_stream(self, response: httpx2.Response, reply: Reply) -> None:
        parts: list[str] = []
        is_done = False
        async for line in response.aiter_lines():
            raw = line.encode()
            if not raw.startswith(_DATA):
                continue
            raw = raw[len(_DATA) :]
            if raw == _DONE:
                is_done = True
                continue
            event = msgspec.json.decode(raw)
            if "error" in event:
                reply.error = str(event["error"].get("code") or "stream_error")
                if not parts:
                    reply.tries[-1] = replace(reply.tries[-1], is_refused=True)
                break
            if event.get("choices"):
                parts.append(event["choices"][0].get("delta", {}).get("content") or "")
        reply.text = "".join(parts)
        if not is_done and not reply.error:
            reply.error = "truncated"
