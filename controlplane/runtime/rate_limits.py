"""Rate limits of tenants and keys as one replica holds them: its share of each, in memory, bounded.

A limit is divided by the number of live replicas, so that it needs no store on the way of a request.
The arithmetic is `admission/rate_limit.py`.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from controlplane.admission.rate_limit import MINUTE_MS, Meter, Standing, calls_share
from controlplane.domain.catalog import Limits, Principal

HOLDERS_MAX: Final = 20_000
# Of those over the bound, how many are looked at for each that comes: one with calls in flight stays.
LOOKED_AT_MAX: Final = 8
# When a call in flight will end is not known; a second later it is worth asking again.
CONCURRENCY_RETRY_MS: Final = 1_000
NO_LIMITS: Final = Limits()
SECOND_MS: Final = 1_000

Headers = tuple[tuple[bytes, bytes], ...]


class Limit(StrEnum):
    """Which limit stands in the way."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CALLS_IN_FLIGHT = "calls_in_flight"


@dataclass(frozen=True, slots=True)
class Limited:
    """A call over a limit. `scope` is `tenant` or `key`; `detail` says what to do."""

    which: Limit
    scope: str
    limit: int
    retry_after_ms: int
    detail: str


class Left(NamedTuple):
    """What one replica still lets through of a limit; `reset_ms` until all of it is there again."""

    scope: str
    which: Limit
    limit: int
    remaining: int
    reset_ms: int


class _Holder:
    """The meters of one tenant or key."""

    __slots__ = ("calls", "limits", "requests", "scope", "tokens")

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.limits = NO_LIMITS
        self.requests = Meter()
        self.tokens = Meter()
        self.calls = 0


class Grant:
    """What a call took, to be corrected and released once each. Without limits it holds nothing."""

    __slots__ = ("_holders", "is_corrected", "is_released", "tokens_estimated")

    def __init__(self, holders: tuple[_Holder, ...], tokens_estimated: int) -> None:
        self._holders = holders
        self.tokens_estimated = tokens_estimated
        self.is_corrected = not holders
        self.is_released = not holders

    @property
    def holders(self) -> tuple[_Holder, ...]:
        return self._holders


UNLIMITED: Final = Grant((), 0)


class RateLimits:
    """Owned by one task. Instants are milliseconds of one clock."""

    def __init__(self) -> None:
        self._holders: OrderedDict[str, _Holder] = OrderedDict()
        self._replicas = 1

    def __len__(self) -> int:
        return len(self._holders)

    def use_replicas(self, count: int) -> None:
        """So many replicas share each limit from now on."""
        self._replicas = max(1, count)

    def take(
        self, principal: Principal, limits: Limits, tokens_estimated: int, now_ms: int
    ) -> Grant | Limited:
        """Count a call against its tenant's and its key's limits: all of them, or none.

        A grant must be released when the call ends, and corrected when its tokens are known.
        """
        if limits == NO_LIMITS and principal.key_limits == NO_LIMITS:
            return UNLIMITED
        holders = self._holders_of(principal, limits, now_ms)
        for holder in holders:
            limited = self._objection(holder, tokens_estimated, now_ms)
            if limited is not None:
                return limited
        for holder in holders:
            self._count(holder, 1, tokens_estimated, now_ms)
            holder.calls += 1
        return Grant(holders, tokens_estimated)

    def would_limit(
        self, principal: Principal, limits: Limits, tokens_estimated: int, now_ms: int
    ) -> Limited | None:
        """What `take` would object to at this instant. Counts nothing."""
        if limits == NO_LIMITS and principal.key_limits == NO_LIMITS:
            return None
        for holder in self._holders_of(principal, limits, now_ms):
            limited = self._objection(holder, tokens_estimated, now_ms)
            if limited is not None:
                return limited
        return None

    def left(self, principal: Principal, limits: Limits, now_ms: int) -> list[Left]:
        """What is left here of every limit that a call by this key would be counted against."""
        if limits == NO_LIMITS and principal.key_limits == NO_LIMITS:
            return []
        found: list[Left] = []
        replicas = self._replicas
        for holder in self._holders_of(principal, limits, now_ms):
            scope, its = holder.scope, holder.limits
            for which, meter, limit in (
                (Limit.REQUESTS, holder.requests, its.requests_per_minute),
                (Limit.TOKENS, holder.tokens, its.tokens_per_minute),
            ):
                if limit is not None:
                    standing = meter.standing(limit, replicas, now_ms)
                    found.append(Left(scope, which, limit, standing.remaining, standing.reset_ms))
            most = its.calls_in_flight_max
            if most is not None:
                free = max(0, calls_share(most, replicas) - holder.calls)
                found.append(Left(scope, Limit.CALLS_IN_FLIGHT, most, free, 0))
        return found

    def correct(self, grant: Grant, tokens_used: int, now_ms: int) -> None:
        """The call used so many tokens; only the first correction counts."""
        if grant.is_corrected:
            return
        grant.is_corrected = True
        for holder in grant.holders:
            self._count(holder, 0, tokens_used - grant.tokens_estimated, now_ms)

    def release(self, grant: Grant) -> None:
        """The call is not in flight any more; only the first release counts."""
        if grant.is_released:
            return
        grant.is_released = True
        for holder in grant.holders:
            holder.calls -= 1

    def headers(self, grant: Grant, now_ms: int) -> Headers:
        """`x-ratelimit-*` of an admitted call: of tenant and key, the one with less left."""
        return self._headers(grant.holders, now_ms) if grant.holders else ()

    def headers_for(self, principal: Principal, limits: Limits, now_ms: int) -> Headers:
        """The same for a call that took nothing."""
        if limits == NO_LIMITS and principal.key_limits == NO_LIMITS:
            return ()
        return self._headers(self._holders_of(principal, limits, now_ms), now_ms)

    # ------------------------------------------------------------ inside

    def _holders_of(self, principal: Principal, limits: Limits, now_ms: int) -> tuple[_Holder, ...]:
        """Whoever has a limit of the two, with the limits as they are now."""
        found: list[_Holder] = []
        if limits != NO_LIMITS:
            found.append(self._holder("tenant", principal.tenant.id, limits, now_ms))
        if principal.key_limits != NO_LIMITS:
            found.append(self._holder("key", principal.key_id, principal.key_limits, now_ms))
        return tuple(found)

    def _holder(self, scope: str, name: str, limits: Limits, now_ms: int) -> _Holder:
        key = f"{scope}:{name}"
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = _Holder(scope)
            self._forget(now_ms)
        else:
            self._holders.move_to_end(key)
        holder.limits = limits
        return holder

    def _forget(self, now_ms: int) -> None:
        """Drop holders over the bound, longest unused first; those at rest lose nothing by it."""
        for _ in range(LOOKED_AT_MAX):
            if len(self._holders) <= HOLDERS_MAX:
                return
            key, oldest = next(iter(self._holders.items()))
            if oldest.calls or not self._is_at_rest(oldest, now_ms):
                self._holders.move_to_end(key)
            else:
                del self._holders[key]
        # All of those looked at owe something: the bound counts for more than the rest of a debt.
        unused = next((key for key, each in self._holders.items() if not each.calls), None)
        if unused is not None:
            del self._holders[unused]

    def _is_at_rest(self, holder: _Holder, now_ms: int) -> bool:
        limits, replicas = holder.limits, self._replicas
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return (requests is None or holder.requests.is_at_rest(requests, replicas, now_ms)) and (
            tokens is None or holder.tokens.is_at_rest(tokens, replicas, now_ms)
        )

    def _objection(self, holder: _Holder, tokens: int, now_ms: int) -> Limited | None:
        limits, replicas = holder.limits, self._replicas
        calls_max = limits.calls_in_flight_max
        if calls_max is not None and holder.calls >= calls_share(calls_max, replicas):
            return _limited(holder.scope, Limit.CALLS_IN_FLIGHT, calls_max, CONCURRENCY_RETRY_MS)
        most: Limited | None = None
        for which, meter, limit, amount in (
            (Limit.REQUESTS, holder.requests, limits.requests_per_minute, 1),
            (Limit.TOKENS, holder.tokens, limits.tokens_per_minute, tokens),
        ):
            if limit is None:
                continue
            wait_ms = meter.wait_ms(amount, limit, replicas, now_ms)
            if wait_ms and (most is None or wait_ms > most.retry_after_ms):
                most = _limited(holder.scope, which, limit, wait_ms)
        return most

    def _count(self, holder: _Holder, requests: int, tokens: int, now_ms: int) -> None:
        limits, replicas = holder.limits, self._replicas
        if limits.requests_per_minute is not None and requests:
            holder.requests.take(requests, limits.requests_per_minute, replicas, now_ms)
        if limits.tokens_per_minute is not None and tokens:
            holder.tokens.take(tokens, limits.tokens_per_minute, replicas, now_ms)

    def _headers(self, holders: tuple[_Holder, ...], now_ms: int) -> Headers:
        replicas = self._replicas
        requests: Standing | None = None
        tokens: Standing | None = None
        for holder in holders:
            limits = holder.limits
            if limits.requests_per_minute is not None:
                standing = holder.requests.standing(limits.requests_per_minute, replicas, now_ms)
                requests = _lesser(requests, standing)
            if limits.tokens_per_minute is not None:
                standing = holder.tokens.standing(limits.tokens_per_minute, replicas, now_ms)
                tokens = _lesser(tokens, standing)
        return _as_headers(b"requests", requests) + _as_headers(b"tokens", tokens)


def _lesser(one: Standing | None, other: Standing) -> Standing:
    return other if one is None or other.remaining < one.remaining else one


def _as_headers(name: bytes, standing: Standing | None) -> Headers:
    if standing is None:
        return ()
    return (
        (b"x-ratelimit-limit-" + name, b"%d" % standing.limit),
        (b"x-ratelimit-remaining-" + name, b"%d" % standing.remaining),
        (b"x-ratelimit-reset-" + name, _duration(standing.reset_ms)),
    )


def _duration(ms: int) -> bytes:
    """A time as OpenAI writes it: `0s`, `250ms`, `1.5s`, `6m0s`."""
    if ms == 0:
        return b"0s"
    if ms < SECOND_MS:
        return b"%dms" % ms
    minutes, rest_ms = divmod(ms, MINUTE_MS)
    seconds = f"{rest_ms / SECOND_MS:g}s"
    return f"{minutes}m{seconds}".encode() if minutes else seconds.encode()


_ADVICE: Final = {
    Limit.REQUESTS: "requests a minute; send fewer",
    Limit.TOKENS: "tokens a minute; send less, or lower the answers' token limit",
    Limit.CALLS_IN_FLIGHT: "calls in flight; wait for one to end",
}


def _limited(scope: str, which: Limit, limit: int, retry_after_ms: int) -> Limited:
    detail = f"this {scope} is limited to {limit:,} {_ADVICE[which]}"
    return Limited(which, scope, limit, retry_after_ms, detail)
