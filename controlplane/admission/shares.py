"""What part of a pool each tenant may have while several want it: its weight over the weights of all who ask.

Max-min over the seats that are promised: who has less than its part goes before who has more, and a part
that is not asked for is free for the others. Knows no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# A tenant counts as one that wants the pool for this long after it asked.
ASKED_MS: Final = 5_000
TENANTS_MAX: Final = 10_000


@dataclass(slots=True)
class _Asking:
    weight: float
    asked_ms: int
    seats: float = 0.0


class Shares:
    """Seats promised to each tenant of one pool, and who has asked lately."""

    __slots__ = ("_tenants", "_weights")

    def __init__(self) -> None:
        self._tenants: dict[str, _Asking] = {}
        self._weights = 0.0

    def asked(self, tenant: str, weight: float, now_ms: int) -> None:
        """A tenant asks: its part counts from now on."""
        known = self._tenants.get(tenant)
        if known is None:
            if len(self._tenants) >= TENANTS_MAX:
                self.tick(now_ms)
            self._tenants[tenant] = _Asking(weight, now_ms)
            self._weights += weight
            return
        self._weights += weight - known.weight
        known.weight = weight
        known.asked_ms = now_ms

    def add(self, tenant: str, seats: float) -> None:
        """Seats that were promised to a tenant, or given back by it."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.seats = max(0.0, known.seats + seats)

    def use_seats(self, by_tenant: Mapping[str, float]) -> None:
        """All seats summed up anew: differences of floats drift."""
        for tenant, asking in self._tenants.items():
            asking.seats = by_tenant.get(tenant, 0.0)

    def seats(self, tenant: str) -> float:
        known = self._tenants.get(tenant)
        return 0.0 if known is None else known.seats

    def part(self, tenant: str) -> float:
        """The tenant's part of the whole, 0..1; 1 while nobody else wants the pool."""
        known = self._tenants.get(tenant)
        return 1.0 if known is None or self._weights <= 0.0 else known.weight / self._weights

    def tick(self, now_ms: int) -> None:
        """Forget who holds nothing and has not asked for a while."""
        gone = [
            tenant
            for tenant, asking in self._tenants.items()
            if asking.seats <= 0.0 and now_ms - asking.asked_ms > ASKED_MS
        ]
        for tenant in gone:
            del self._tenants[tenant]
        # Summed up anew: differences of floats drift.
        self._weights = sum(asking.weight for asking in self._tenants.values())
