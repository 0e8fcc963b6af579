"""Which tenants are named in metrics: the few that spend most. All others are counted together.

A counter of a name begins at 0 when the name is given, and is told once more after it was taken back; what was
counted before and comes after is under OVERFLOW. So no series ever falls, and what all of them grow by is the whole.
Adding is a dictionary look-up; who is named is decided when the series are read.
"""

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final

# The tenants that are named; a limit of labels, whatever the number of tenants.
TENANTS_NAMED_MAX: Final = 20
# Tenants of which a rank is kept; the least of them are forgotten first.
TENANTS_RANKED_MAX: Final = 1_000
# Tenants that may be ranked between two reads; further ones are counted, and ranked when they come again.
TENANTS_PENDING_MAX: Final = 10_000
# Names move no sooner than this after they moved: one read of all series sees the same names throughout.
RANK_INTERVAL_S: Final = 5.0
# A dollar counts half for the rank after so long.
RANK_HALF_LIFE_S: Final = 6 * 3_600.0
# Who wants a name must have spent this many times what the least of the named did: names rest.
TAKE_OVER_RATIO: Final = 1.25
OVERFLOW: Final = "other"
# Calls that cost nothing, and refused ones, rank among themselves, behind every dollar.
_USD_PER_CALL: Final = 1e-9


class NamedTenants:
    """`clock_s` tells seconds of a monotonic clock."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        # The exporter of OpenTelemetry reads from a thread of its own.
        self._lock = Lock()
        self._clock_s = clock_s
        self._ranked_at_s = clock_s()
        self._ranks: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        self._named: set[str] = set()
        # Names that were taken back, to be told once more.
        self._leaving: set[str] = set()
        self._spent: dict[str, float] = {OVERFLOW: 0.0}
        self._requests: dict[tuple[str, ...], float] = {}

    def ended(self, tenant: str, outcome: str, usd: float) -> None:
        """A call of `tenant` ended so, and was charged `usd` dollars. On the request path."""
        with self._lock:
            pending = self._pending
            if tenant in pending or len(pending) < TENANTS_PENDING_MAX:
                pending[tenant] = pending.get(tenant, 0.0) + usd + _USD_PER_CALL
            name = tenant
            if tenant not in self._named:
                if len(self._named) < TENANTS_NAMED_MAX and tenant not in self._leaving:
                    self._give(tenant)
                else:
                    name = OVERFLOW
            self._spent[name] += usd
            key = (name, outcome)
            self._requests[key] = self._requests.get(key, 0.0) + 1

    def spent_usd(self) -> Mapping[tuple[str, ...], float]:
        """Dollars since each name was given, by name."""
        with self._lock:
            self._rank()
            return {(name,): usd for name, usd in self._spent.items()}

    def requests(self) -> Mapping[tuple[str, ...], float]:
        """Ended calls since each name was given, by name and outcome."""
        with self._lock:
            self._rank()
            return {**self._requests}

    def _rank(self) -> None:
        """Take what was spent into the ranks, and let names move by them, now and then."""
        now_s = self._clock_s()
        since_s = now_s - self._ranked_at_s
        if since_s < RANK_INTERVAL_S:
            return
        self._ranked_at_s = now_s
        self._forget_leaving()
        kept = 0.5 ** (since_s / RANK_HALF_LIFE_S)
        ranks = {tenant: rank * kept for tenant, rank in self._ranks.items()}
        for tenant, usd in self._pending.items():
            ranks[tenant] = ranks.get(tenant, 0.0) + usd
        self._pending.clear()
        first = sorted(ranks, key=lambda tenant: (-ranks[tenant], tenant))
        self._ranks = {tenant: ranks[tenant] for tenant in first[:TENANTS_RANKED_MAX]}
        self._move_names(first[:TENANTS_NAMED_MAX])

    def _move_names(self, first: list[str]) -> None:
        """Take names from those that fell behind for those that are clearly before them."""
        ranks = self._ranks
        for tenant in first:
            if tenant in self._named:
                continue
            if len(self._named) >= TENANTS_NAMED_MAX:
                least = min(self._named, key=lambda name: (ranks.get(name, 0.0), name))
                if ranks[tenant] < TAKE_OVER_RATIO * ranks.get(least, 0.0):
                    return
                self._named.remove(least)
                self._leaving.add(least)
            self._give(tenant)

    def _give(self, tenant: str) -> None:
        self._named.add(tenant)
        self._spent[tenant] = 0.0

    def _forget_leaving(self) -> None:
        """What was told once more is gone."""
        for tenant in self._leaving:
            del self._spent[tenant]
        for key in [key for key in self._requests if key[0] in self._leaving]:
            del self._requests[key]
        self._leaving.clear()
