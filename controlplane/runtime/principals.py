"""Who a key belongs to, remembered for a short while so that a request does not ask Postgres.

A key that Postgres can not be asked about is believed for PRINCIPAL_STALE_MS_MAX after it was last seen
valid: an outage of the store must not turn tenants away.
"""

from collections import OrderedDict

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Principal
from controlplane.domain.errors import StateUnavailable
from controlplane.runtime.call import monotonic_ms
from controlplane.store import keys

PRINCIPAL_MS_MAX = 2_000
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

    def recall(self, digest: bytes) -> Principal | None:
        """The principal, when it was seen valid just now."""
        entry = self._known.get(digest)
        if entry is None or monotonic_ms() - entry[1] > PRINCIPAL_MS_MAX:
            return None
        return entry[0]

    async def find(self, plain: str) -> Principal | None:
        """The principal of a key, or None. Raises StateUnavailable when nothing is known of it."""
        digest = keys.digest(self._pepper, plain)
        now_ms = monotonic_ms()
        if (principal := self.recall(digest)) is not None:
            return principal
        if not keys.is_well_formed(plain):
            return None
        unknown_ms = self._unknown.get(digest)
        if unknown_ms is not None and now_ms - unknown_ms < UNKNOWN_MS_MAX:
            return None
        try:
            found = await keys.find_principal(self._engine, digest)
        except StateUnavailable:
            entry = self._known.get(digest)
            if entry is not None and now_ms - entry[1] < PRINCIPAL_STALE_MS_MAX:
                return entry[0]
            raise
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

    def forget(self) -> None:
        """After a change of keys or tenants: ask again for each."""
        self._known.clear()
        self._unknown.clear()
