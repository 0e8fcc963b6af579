"""Who may read the names of tenants in `/metrics`: operators. Nobody else learns who is served, and what it spends."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import StateUnavailable
from controlplane.store import keys

# A key is asked for again after this time; a revoked one is good for as long.
ACCEPTED_S: Final = 60.0
# A scrape waits for PostgreSQL no longer: it is read most when that is away.
ASK_S_MAX: Final = 1.0
KEYS_MAX: Final = 100


class Scrapers:
    """Operators' keys of any role that were accepted lately. `clock_s` tells seconds of a monotonic clock."""

    def __init__(
        self, engine: AsyncEngine, pepper: bytes, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._pepper = pepper
        self._clock_s = clock_s
        self._accepted: dict[bytes, float] = {}

    async def may_name_tenants(self, authorization: str) -> bool:
        """Whether the header is an operator's key. While PostgreSQL is away, one that was accepted stays so."""
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not keys.is_well_formed(key):
            return False
        digest = keys.digest(self._pepper, key)
        until_s = self._accepted.get(digest)
        if until_s is not None and self._clock_s() < until_s:
            return True
        try:
            async with asyncio.timeout(ASK_S_MAX):
                found = await keys.find_operator(self._engine, digest)
        except (StateUnavailable, TimeoutError):
            return until_s is not None
        self._accepted.pop(digest, None)
        if found is None:
            return False
        if len(self._accepted) >= KEYS_MAX:
            self._accepted.clear()
        self._accepted[digest] = self._clock_s() + ACCEPTED_S
        return True
