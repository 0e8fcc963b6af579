"""Who a key belongs to, remembered for a short while so that a request does not ask Postgres.

Entries are refreshed behind a caller's back, one query at a time for each key, so that neither an
expiry nor a burst makes calls wait. A key that Postgres can not be asked about is believed for
PRINCIPAL_STALE_MS_MAX after it was last seen valid: an outage of the store must not turn tenants away.
"""

import asyncio
from collections import OrderedDict

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Principal
from controlplane.domain.errors import StateUnavailable
from controlplane.runtime.call import monotonic_ms
from controlplane.store import keys

# A revoked key is refused within the sum of these and one query.
PRINCIPAL_FRESH_MS = 1_000
PRINCIPAL_USABLE_MS = 2_000
PRINCIPAL_STALE_MS_MAX = 600_000
PRINCIPALS_MAX = 20_000
UNKNOWN_MS_MAX = 2_000
UNKNOWNS_MAX = 10_000


class Principals:
    def __init__(self, engine: AsyncEngine, pepper: bytes) -> None:
        self._engine = engine
        self._pepper = pepper
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[Principal | None]] = {}

    async def find(self, plain: str) -> Principal | None:
        """The principal of a key, or None. Raises StateUnavailable when nothing is known of it."""
        digest = keys.digest(self._pepper, plain)
        now_ms = monotonic_ms()
        entry = self._known.get(digest)
        if entry is not None:
            age_ms = now_ms - entry[1]
            if age_ms < PRINCIPAL_FRESH_MS:
                return entry[0]
            if age_ms < PRINCIPAL_USABLE_MS:
                self._ask(digest)
                return entry[0]
        elif not keys.is_well_formed(plain):
            return None
        unknown_ms = self._unknown.get(digest)
        if unknown_ms is not None and now_ms - unknown_ms < UNKNOWN_MS_MAX:
            return None
        try:
            # The query goes on when this caller is cancelled: others wait for it as well.
            return await asyncio.shield(self._ask(digest))
        except StateUnavailable:
            if entry is not None and now_ms - entry[1] < PRINCIPAL_STALE_MS_MAX:
                return entry[0]
            raise

    def forget(self) -> None:
        """After a change of keys or tenants: ask again for each, but keep what an outage may need."""
        expired_ms = monotonic_ms() - PRINCIPAL_USABLE_MS
        for digest, (principal, seen_ms) in self._known.items():
            self._known[digest] = (principal, min(seen_ms, expired_ms))
        self._unknown.clear()

    def _ask(self, digest: bytes) -> "asyncio.Task[Principal | None]":
        task = self._asked.get(digest)
        if task is None:
            task = self._asked[digest] = asyncio.ensure_future(self._read(digest))
            task.add_done_callback(lambda done: self._answered(digest, done))
        return task

    def _answered(self, digest: bytes, done: "asyncio.Task[Principal | None]") -> None:
        self._asked.pop(digest, None)
        if not done.cancelled():
            done.exception()  # An outage is told to those who wait, and to nobody else.

    async def _read(self, digest: bytes) -> Principal | None:
        found = await keys.find_principal(self._engine, digest)
        now_ms = monotonic_ms()
        if found is None:
            self._known.pop(digest, None)
            self._unknown[digest] = now_ms
            if len(self._unknown) > UNKNOWNS_MAX:
                self._unknown.popitem(last=False)
            return None
        self._known[digest] = (found, now_ms)
        self._known.move_to_end(digest)
        if len(self._known) > PRINCIPALS_MAX:
            self._known.popitem(last=False)
        return found
