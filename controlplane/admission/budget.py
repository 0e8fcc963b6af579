"""One replica's slice of one account: leased from Postgres, spent here without asking; and what a call holds of it.

An account counts micro-dollars or tokens. Amounts of one account are never compared with another's.
"""

from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What an account counts."""

    MICRO_USD = "micro_usd"
    TOKENS = "tokens"


class Window(StrEnum):
    """For how long a limit holds before it begins anew: calendar units in UTC, or for ever."""

    TOTAL = "total"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Hold:
    """What one call keeps reserved in one account, in the account's unit."""

    budget_id: str
    unit: Unit
    amount: int


class Slice:
    """What was leased and not yet charged, split into `free` and `reserved`. Whole units of the account.

    INVARIANT: free >= 0, reserved >= 0, and everything grown = free + reserved + charged + surrendered:
    no order of calls makes money or loses any.
    """

    __slots__ = ("_free", "_reserved")

    def __init__(self) -> None:
        self._free = 0
        self._reserved = 0

    @property
    def free(self) -> int:
        """What can still be reserved."""
        return self._free

    @property
    def reserved(self) -> int:
        """What calls in flight hold."""
        return self._reserved

    def grow(self, amount: int) -> None:
        """Add a lease that Postgres granted."""
        _require_amount(amount)
        self._free += amount

    def reserve(self, amount: int) -> bool:
        """Hold `amount` for a call, or False when less is free."""
        _require_amount(amount)
        if amount > self._free:
            return False
        self._free -= amount
        self._reserved += amount
        return True

    def settle(self, reserved: int, actual: int) -> int:
        """End a reservation of `reserved` with a charge of `actual`; what was charged.

        A call may cost more than was held for it. The rest is taken from what is free and never
        from other calls' reservations, so the charge can be less than `actual`. Raises ValueError when
        less than `reserved` is held: the reservation was settled before.
        """
        _require_amount(reserved)
        _require_amount(actual)
        if reserved > self._reserved:
            msg = f"an amount of {reserved} is settled and {self._reserved} is reserved"
            raise ValueError(msg)
        charged = min(actual, reserved + self._free)
        self._reserved -= reserved
        self._free += reserved - charged
        return charged

    def surrender(self, keep: int) -> int:
        """Give back what is free beyond `keep`; how much that is."""
        _require_amount(keep)
        amount = max(0, self._free - keep)
        self._free -= amount
        return amount


def _require_amount(amount: int) -> None:
    if amount < 0:
        msg = f"an amount of {amount} is negative"
        raise ValueError(msg)
