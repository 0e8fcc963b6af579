"""When a workflow that is not begun may come back: a place in a queue that is not kept waiting.

A refusal names a time, and whoever returns then goes before whoever comes for the first time, so that
the time named is honest. No clock.
"""

from dataclasses import dataclass
from typing import Final

APPOINTMENTS_MAX: Final = 10_000
WAIT_MS_MIN: Final = 1_000
# What is booked is served later than its share of the seats says: more urgent work comes in between.
WAIT_FACTOR: Final = 2.0
# Nobody is told to come back later than this; official clients wait up to two minutes.
WAIT_MS_MAX: Final = 60_000
# Clients' timers and ours differ: who comes this early is on time.
EARLY_MS: Final = 250
# A place is kept for late comers for this long, and for this share of the wait.
GRACE_MS: Final = 5_000
GRACE_RATIO: Final = 0.25


@dataclass(frozen=True, slots=True)
class Appointment:
    """`work_ms` of seat time that begin at `due_ms`, need `seats` and are `tier` in worth."""

    due_ms: int
    until_ms: int
    work_ms: float
    seats: float
    tier: int


@dataclass(slots=True)
class _Booked:
    count: int = 0
    work_ms: float = 0.0
    seats: float = 0.0


class Appointments:
    """One pool's. Higher tiers are served first: who books waits for those of its tier and above."""

    __slots__ = ("_by_key", "_by_tier", "kept", "missed")

    def __init__(self) -> None:
        self._by_key: dict[str, Appointment] = {}
        self._by_tier: dict[int, _Booked] = {}
        self.kept = 0
        self.missed = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def tier_highest(self) -> int:
        """The highest tier that waits for its time, -1 when nobody does."""
        return max(self._by_tier, default=-1)

    def seats(self, tier_min: int) -> float:
        """Seats that those booked in this tier or above will need."""
        return sum(booked.seats for tier, booked in self._by_tier.items() if tier >= tier_min)

    def work_ms(self, tier_min: int) -> float:
        return sum(booked.work_ms for tier, booked in self._by_tier.items() if tier >= tier_min)

    def book(
        self,
        key: str,
        *,
        work_ms: float,
        seats: float,
        tier: int,
        seats_free: float,
        now_ms: int,
        wait_ms_max: int,
    ) -> int | None:
        """Milliseconds until `key` may come back; None when that is more than `wait_ms_max`.

        `seats_free` is what workflows of this tier may come to hold together. Who has an appointment
        keeps it; once its time has passed without room, it is asked to come a moment later.
        """
        known = self._by_key.get(key)
        if known is not None:
            return max(WAIT_MS_MIN, known.due_ms - now_ms)
        wait_ms = self.wait_ms(work_ms, tier, seats_free)
        if wait_ms > min(wait_ms_max, WAIT_MS_MAX) or len(self._by_key) >= APPOINTMENTS_MAX:
            return None
        due_ms = now_ms + int(wait_ms)
        until_ms = due_ms + GRACE_MS + int(GRACE_RATIO * wait_ms)
        self._by_key[key] = Appointment(due_ms, until_ms, work_ms, seats, tier)
        booked = self._by_tier.setdefault(tier, _Booked())
        booked.count += 1
        booked.work_ms += work_ms
        booked.seats += seats
        return int(wait_ms)

    def wait_ms(self, work_ms: float, tier: int, seats_free: float) -> float:
        """Milliseconds until there is likely to be room for so much more work of this tier."""
        return WAIT_MS_MIN + WAIT_FACTOR * (self.work_ms(tier) + work_ms) / max(seats_free, 1e-6)

    def is_known(self, key: str) -> bool:
        """Whether `key` was told to come back, and may still."""
        return key in self._by_key

    def is_due(self, key: str, now_ms: int) -> bool:
        appointment = self._by_key.get(key)
        return appointment is not None and now_ms >= appointment.due_ms - EARLY_MS

    def keep(self, key: str) -> None:
        """The workflow has come and was let in."""
        if self._remove(key):
            self.kept += 1

    def tick(self, now_ms: int) -> None:
        """Forget those who did not come."""
        late = [key for key, appointment in self._by_key.items() if appointment.until_ms < now_ms]
        for key in late:
            self._remove(key)
            self.missed += 1

    def _remove(self, key: str) -> bool:
        appointment = self._by_key.pop(key, None)
        if appointment is None:
            return False
        booked = self._by_tier[appointment.tier]
        booked.count -= 1
        booked.work_ms -= appointment.work_ms
        booked.seats -= appointment.seats
        if booked.count == 0:
            del self._by_tier[appointment.tier]
        return True
