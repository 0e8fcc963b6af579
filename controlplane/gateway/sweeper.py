"""One task that looks at everything with a deadline once per period, instead of a timer for each.

Deadlines are therefore kept to within one period. `now` is a coarse clock that costs an attribute.
"""

import asyncio
import logging
import time
from typing import Protocol

PERIOD_S = 1.0

log = logging.getLogger(__name__)


class Watched(Protocol):
    """Something that can be too late. `sweep` is called with seconds of the monotonic clock."""

    def sweep(self, now: float) -> None: ...


class Sweeper:
    """Owns the set of what is watched. Members add and discard themselves."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.period_s = period_s
        self.now = time.monotonic()
        self.watched: set[Watched] = set()

    async def run(self) -> None:
        """Sweep for ever, until cancelled."""
        while True:
            await asyncio.sleep(self.period_s)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        self.now = now
        for watched in tuple(self.watched):
            try:
                watched.sweep(now)
            except Exception:
                # One broken member must not end the deadlines of all others.
                log.exception("a deadline could not be kept")
                self.watched.discard(watched)
