"""Money in memory: one replica's slices of tenants' and workflows' budgets, refilled from Postgres.

A slice is leased before it is spent, so that spent + reserved never passes the limit however many
replicas spend. Refills of one account are single-flight.
"""

import asyncio
import logging

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.budget import Slice
from controlplane.domain.ids import ReplicaId
from controlplane.runtime.call import monotonic_ms
from controlplane.store import budgets

log = logging.getLogger(__name__)

# A slice that nobody used for this long goes back, so that other replicas can have it.
IDLE_MS_MAX = 30_000
ACCOUNTS_MAX = 100_000


class Account:
    """One budget's slice, when it was last used, and the refill under way."""

    __slots__ = ("budget_id", "refill", "slice", "used_ms")

    def __init__(self, budget_id: str) -> None:
        self.budget_id = budget_id
        self.slice = Slice()
        self.used_ms = monotonic_ms()
        self.refill: asyncio.Future[int] | None = None


class Accounts:
    def __init__(self, engine: AsyncEngine, replica_id: ReplicaId, slice_micro_usd: int) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._slice_micro_usd = slice_micro_usd
        self._accounts: dict[str, Account] = {}
        self._tasks: set[asyncio.Task[int]] = set()

    async def reserve_refilling(self, budget_id: str, amount_micro_usd: int) -> bool:
        """Reserve, leasing more from Postgres while that helps. False: the budget is spent.

        Awaits only when the slice held here is too small. Raises StateUnavailable when Postgres
        can not be asked.
        """
        account = self._accounts.get(budget_id)
        if account is None:
            account = self._accounts[budget_id] = Account(budget_id)
        while True:
            account.used_ms = monotonic_ms()
            if account.slice.reserve(amount_micro_usd):
                return True
            if account.refill is not None:
                # Somebody else's refill may not suffice for both: look again after it.
                await asyncio.shield(account.refill)
                if account.slice.reserve(amount_micro_usd):
                    return True
                if account.refill is not None:
                    continue
            granted = await self._refill(account, amount_micro_usd)
            if granted == 0:
                return account.slice.reserve(amount_micro_usd)

    def settle(self, budget_id: str, reserved_micro_usd: int, actual_micro_usd: int) -> int:
        """Turn a reservation into a charge; what is returned was charged, never above what is held."""
        account = self._accounts.get(budget_id)
        if account is None:
            msg = f"budget {budget_id} was settled without a reservation"
            raise RuntimeError(msg)
        account.used_ms = monotonic_ms()
        return account.slice.settle(reserved_micro_usd, actual_micro_usd)

    def charge_at_most(self, budget_id: str, reserved_micro_usd: int) -> int:
        """The most that a settlement of this reservation can charge at this instant."""
        account = self._accounts.get(budget_id)
        return 0 if account is None else reserved_micro_usd + account.slice.free

    async def surrender_idle(self) -> None:
        """Give back what idle accounts hold beyond their reservations."""
        now_ms = monotonic_ms()
        for account in list(self._accounts.values()):
            is_idle = now_ms - account.used_ms > IDLE_MS_MAX and account.refill is None
            if is_idle or len(self._accounts) > ACCOUNTS_MAX:
                await self._surrender(account)

    async def surrender_all(self) -> None:
        for account in list(self._accounts.values()):
            await self._surrender(account)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Per budget: micro-dollars (free, reserved) held here."""
        return {
            budget_id: (account.slice.free, account.slice.reserved)
            for budget_id, account in self._accounts.items()
        }

    def drop_free(self) -> None:
        """Forget what is free here without returning it: it has been returned already."""
        for account in self._accounts.values():
            account.slice.surrender(0)

    async def _surrender(self, account: Account) -> None:
        """Give back what is free. Raises StateUnavailable; an amount whose return is then unknown stays
        leased until this replica ends, since keeping it here could spend it twice.
        """
        if account.slice.free:
            await budgets.read(self._engine, account.budget_id)
            amount = account.slice.surrender(0)
            await budgets.surrender(self._engine, account.budget_id, self._replica_id, amount)
        if account.slice.reserved == 0 and account.slice.free == 0 and account.refill is None:
            self._accounts.pop(account.budget_id, None)

    async def _refill(self, account: Account, needed: int) -> int:
        """Lease from Postgres. The caller's cancellation does not cancel it: the grant must not be lost."""
        task = asyncio.ensure_future(self._lease(account, needed))
        account.refill = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _lease(self, account: Account, needed: int) -> int:
        try:
            granted = await budgets.lease(
                self._engine,
                account.budget_id,
                self._replica_id,
                max(1, needed - account.slice.free),
                max(needed, self._slice_micro_usd),
            )
            account.slice.grow(granted)
            return granted
        finally:
            account.refill = None
