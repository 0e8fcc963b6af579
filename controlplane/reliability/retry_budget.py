"""How many retries tenants and pools may make: a share of their requests, so that failures do not multiply.

Both legs of a call, and the client's own retries, spend from the same budgets. No clock.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Final

from controlplane.reliability.window import Window

# Retries of one request, whatever its budgets would still allow.
RETRIES_PER_REQUEST_MAX: Final = 2
# Budgets remembered; who has been quiet for longest is forgotten, and begins again with a full one.
TENANTS_KEPT: Final = 10_000
POOLS_KEPT: Final = 1_000
# Tenants looked at, the latest first, to tell how many have none left.
TENANTS_TOLD_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """Retries that a window of ten seconds may hold: `per_request_ratio` x first attempts + `free`."""

    per_request_ratio: float
    free: int


# A quiet tenant may retry once a second.
TENANT_RULES: Final = RetryRules(per_request_ratio=0.1, free=10)
# A pool's budget is what bounds attempts per request when every engine fails, so it gives away less.
POOL_RULES: Final = RetryRules(per_request_ratio=0.1, free=3)


class RetryBudget:
    """INVARIANT I4: in any window, retries made <= ratio x first attempts in it + what is free."""

    __slots__ = ("_requests", "_retries", "_rules")

    def __init__(self, rules: RetryRules = TENANT_RULES) -> None:
        self._rules = rules
        # Retries are never undercounted and requests never overcounted.
        self._requests = Window(is_edge_counted=False)
        self._retries = Window(is_edge_counted=True)

    def note_request(self, now_ms: int) -> None:
        """A first attempt arrived."""
        self._requests.add(now_ms)

    def left(self, now_ms: int) -> int:
        """Whole retries that may still be made at this instant; clients' own may have overdrawn it."""
        self._requests.expire(now_ms)
        self._retries.expire(now_ms)
        allowed = self._requests.total * self._rules.per_request_ratio + self._rules.free
        return max(0, int(allowed - self._retries.total))

    def has_room(self, now_ms: int) -> bool:
        return self.left(now_ms) > 0

    def spend(self, now_ms: int) -> None:
        """A retry is made, whether or not there was room: the client's own does not ask."""
        self._retries.add(now_ms)

    def try_spend(self, now_ms: int) -> bool:
        """Make one retry, if the budget has one left."""
        if not self.has_room(now_ms):
            return False
        self.spend(now_ms)
        return True


class RetryBudgets:
    """The budgets of every tenant and of every pool; a retry needs room in both of its own."""

    __slots__ = ("_pools", "_tenants")

    def __init__(self, *, tenants_kept: int = TENANTS_KEPT, pools_kept: int = POOLS_KEPT) -> None:
        self._tenants = _Kept(TENANT_RULES, tenants_kept)
        self._pools = _Kept(POOL_RULES, pools_kept)

    def note_request(self, tenant: str, pool: str, now_ms: int, client_retries: int) -> None:
        """A request came in. One that the client repeats is a retry, and adds nothing to the budgets."""
        for budget in (self._tenants.of(tenant), self._pools.of(pool)):
            if client_retries > 0:
                budget.spend(now_ms)
            else:
                budget.note_request(now_ms)

    def try_spend(self, tenant: str, pool: str, now_ms: int, *, is_pool_overloaded: bool) -> bool:
        """Make one retry, if both budgets have one left. Never on an overloaded pool: it would not help."""
        if is_pool_overloaded:
            return False
        own, shared = self._tenants.of(tenant), self._pools.of(pool)
        if not own.has_room(now_ms) or not shared.has_room(now_ms):
            return False
        own.spend(now_ms)
        shared.spend(now_ms)
        return True

    # ------------------------------------------------------------ reading

    def pools_left(self, now_ms: int) -> dict[str, int]:
        """Retries left by pool, of those that were called."""
        return {name: budget.left(now_ms) for name, budget in self._pools.latest(POOLS_KEPT)}

    def tenants_spent(self, now_ms: int) -> int:
        """How many of the TENANTS_TOLD_MAX tenants that called last have no retry left."""
        latest = self._tenants.latest(TENANTS_TOLD_MAX)
        return sum(budget.left(now_ms) == 0 for _, budget in latest)


class _Kept:
    """Budgets by name, a bounded number of them."""

    __slots__ = ("_budgets", "_kept_max", "_rules")

    def __init__(self, rules: RetryRules, kept_max: int) -> None:
        self._rules = rules
        self._kept_max = kept_max
        self._budgets: OrderedDict[str, RetryBudget] = OrderedDict()

    def of(self, name: str) -> RetryBudget:
        budget = self._budgets.get(name)
        if budget is not None:
            self._budgets.move_to_end(name)
            return budget
        budget = self._budgets[name] = RetryBudget(self._rules)
        if len(self._budgets) > self._kept_max:
            self._budgets.popitem(last=False)
        return budget

    def latest(self, most: int) -> list[tuple[str, RetryBudget]]:
        return list(islice(reversed(self._budgets.items()), most))
