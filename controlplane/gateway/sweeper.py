"""One task that looks at everything with a deadline once per period, instead of a timer for each.

Deadlines are therefore kept to within one period, two when this process was held up; what must be noticed
sooner is looked at ten times as often. `now` is a coarse clock that costs an attribute.
"""

import asyncio
import logging
import time
from typing import Protocol

PERIOD_S = 1.0
LOOKS_PER_PERIOD = 10
# A look that comes so many times too late tells of this process and not of engines: what they have sent meanwhile
# may not have been read yet.
HELD_UP_RATIO = 3.0

log = logging.getLogger(__name__)


class Watched(Protocol):
    """Something that can be too late. `sweep` is called with seconds of the monotonic clock."""

    def sweep(self, now: float) -> None: ...


class Looked(Protocol):
    """Something that may have fallen silent. `look` is called like `sweep`, and more often."""

    def look(self, now: float) -> None: ...

    def pardon(self, late_s: float) -> None:
        """For so long nobody could have been heard: it does not count as silence."""


class Sweeper:
    """Owns the sets of what is watched. Members add and discard themselves."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.period_s = period_s
        self.now = time.monotonic()
        self.watched: set[Watched] = set()
        self.looked: set[Looked] = set()

    async def run(self) -> None:
        """Sweep for ever, until cancelled."""
        was_put_off = False
        while True:
            is_held_up = False
            for _ in range(LOOKS_PER_PERIOD):
                is_held_up = await self._next_look() or is_held_up
            if is_held_up and not was_put_off:
                # What came in meanwhile is read first, for once.
                self.now = time.monotonic()
                was_put_off = True
                continue
            was_put_off = False
            self.sweep(time.monotonic())

    async def _next_look(self) -> bool:
        """Whether it came too late to tell of anybody else."""
        look_s = self.period_s / LOOKS_PER_PERIOD
        slept_s = time.monotonic()
        await asyncio.sleep(look_s)
        now = time.monotonic()
        late_s = now - slept_s - look_s
        if late_s <= (HELD_UP_RATIO - 1.0) * look_s:
            self.look(now)
            return False
        for looked in self.looked:
            looked.pardon(late_s)
        return True

    def look(self, now: float) -> None:
        for looked in tuple(self.looked):
            try:
                looked.look(now)
            except Exception:
                log.exception("a silence could not be looked at")
                self.looked.discard(looked)

    def sweep(self, now: float) -> None:
        self.now = now
        for watched in tuple(self.watched):
            try:
                watched.sweep(now)
            except Exception:
                # One broken member must not end the deadlines of all others.
                log.exception("a deadline could not be kept")
                self.watched.discard(watched)
