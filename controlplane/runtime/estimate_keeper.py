"""Shares what is learned about sizes with the other replicas, through Postgres, and reads it at the start."""

import asyncio
from collections.abc import Coroutine
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import StateUnavailable
from controlplane.runtime.estimates import HALF_LIFE_ANSWERS, Estimates
from controlplane.runtime.loops import every
from controlplane.store import estimates as store

INTERVAL_S = 15.0
PRUNE_INTERVAL_S = 3_600.0
# Sketches that a pass writes and reads at most; those left over wait for the next pass.
WRITTEN_PER_PASS_MAX = 200
READ_PER_PASS_MAX = 200
# Sketches that are taken in before the event loop gets its turn: less than a millisecond.
USED_AT_ONCE_MAX = 10


class EstimateKeeper:
    """One pass writes what was learned here and reads what others did. Safe to lose or to repeat."""

    def __init__(self, engine: AsyncEngine, estimates: Estimates) -> None:
        self._engine = engine
        self._estimates = estimates
        self._read_to: datetime | None = None

    def loops(self) -> list[Coroutine[None, None, None]]:
        return [
            every(INTERVAL_S, "estimates", self.share),
            every(PRUNE_INTERVAL_S, "estimates_pruned", self.prune),
        ]

    async def share(self) -> None:
        """Raises StateUnavailable; what could not be written is written by a later pass."""
        records = self._estimates.take_fresh(WRITTEN_PER_PASS_MAX)
        try:
            await store.add(self._engine, records, HALF_LIFE_ANSWERS)
        except StateUnavailable:
            self._estimates.give_back(records)
            raise
        known, self._read_to = await store.changed(self._engine, self._read_to, READ_PER_PASS_MAX)
        for first in range(0, len(known), USED_AT_ONCE_MAX):
            self._estimates.use(known[first : first + USED_AT_ONCE_MAX])
            await asyncio.sleep(0)

    async def read_all(self) -> None:
        """Read everything, page by page: at the start. Raises StateUnavailable."""
        while True:
            known, self._read_to = await store.changed(
                self._engine, self._read_to, READ_PER_PASS_MAX
            )
            self._estimates.use(known)
            if len(known) < READ_PER_PASS_MAX:
                return

    async def prune(self) -> None:
        """Raises StateUnavailable."""
        await store.prune(self._engine)
