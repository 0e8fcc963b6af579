"""Forgets old rows, bit by bit, while this replica leads. What may go is told in store/retention."""

import asyncio
from collections.abc import Mapping
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.runtime.loops import Leadership, every
from controlplane.store import retention
from controlplane.store.retention import Forgettable
from controlplane.telemetry.metrics import Metrics

RETENTION_INTERVAL_S: Final = 10.0
# Together 2,000 rows of a table a second at the most, in transactions of some milliseconds.
ROWS_PER_BATCH_MAX: Final = 500
BATCHES_PER_PASS_MAX: Final = 40
# Leaves the connection and the disk to others between two batches.
BATCH_PAUSE_S: Final = 0.05


class Retention:
    """`kept_days` is the age in days at which rows of a table go; the rest bounds a pass."""

    def __init__(
        self,
        engine: AsyncEngine,
        leader: Leadership,
        metrics: Metrics,
        kept_days: Mapping[Forgettable, int],
        *,
        rows_per_batch_max: int = ROWS_PER_BATCH_MAX,
        batches_per_pass_max: int = BATCHES_PER_PASS_MAX,
    ) -> None:
        self._engine = engine
        self._leader = leader
        self._metrics = metrics
        self._kept_days = dict(kept_days)
        self._rows_per_batch_max = rows_per_batch_max
        self._batches_per_pass_max = batches_per_pass_max

    async def forget(self) -> None:
        """One pass over all tables; a follower does nothing. Raises StateUnavailable."""
        for table, days in self._kept_days.items():
            for _ in range(self._batches_per_pass_max):
                if self._leader.epoch is None:
                    return
                gone = await retention.forget(
                    self._engine, table, days=days, rows_max=self._rows_per_batch_max
                )
                if gone:
                    self._metrics.rows_forgotten.add((str(table),), gone)
                if gone < self._rows_per_batch_max:
                    break
                await asyncio.sleep(BATCH_PAUSE_S)

    async def run(self) -> None:
        """Pass after pass, for ever."""
        await every(RETENTION_INTERVAL_S, "retention", self.forget)
