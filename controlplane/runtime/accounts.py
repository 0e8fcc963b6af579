"""Budgets in memory: one replica's slices of tenants', keys' and workflows' accounts, refilled from Postgres.

A slice is leased before it is spent, so that spent + reserved never passes the limit however many
replicas spend. It belongs to one life of the replica: who was taken for dead and comes back begins
with nothing, and what calls held before is nobody's money. Refills of one account are single-flight; a
slice that runs low is refilled before a call has to wait for it, as long as the account is far from its
limit.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.budget import Hold, Slice, Unit
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ReplicaId
from controlplane.runtime.call import monotonic_ms
from controlplane.store import budgets
from controlplane.store.budgets import BudgetRecord
from controlplane.store.journal import Charge
from controlplane.store.replicas import FIRST_GENERATION

# A slice that nobody used for this long goes back, so that other replicas can have it.
IDLE_MS_MAX = 30_000
ACCOUNTS_MAX = 100_000
SLICE_TOKENS = 500_000
# A slice with less than this part of its size free is refilled in the background.
LOW_DIVISOR = 4
# What no account of a call counts has no bound.
UNBOUNDED = 2**62 - 1


class BudgetStore(Protocol):
    """Where slices come from: the functions of `store/budgets.py`."""

    async def lease(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        at_least: int,
        wanted: int,
        generation: int,
    ) -> int: ...

    async def surrender(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        amount: int,
        generation: int,
    ) -> int: ...

    async def read(self, engine: AsyncEngine, budget_id: str) -> BudgetRecord | None: ...


@dataclass(frozen=True, slots=True)
class Held(Hold):
    """A hold, and the life of the replica in which it is taken. One that names none is of this life."""

    generation: int


class Settlement(NamedTuple):
    """What a call was charged: of each unit, and as the journal wants it, by account."""

    micro_usd: int
    tokens: int
    charges: tuple[Charge, ...]


class Grant(NamedTuple):
    """What a refill brought, and the least that it asked for."""

    amount: int
    at_least: int


class Account:
    """One budget's slice, when it was last used, and the refill under way."""

    __slots__ = ("budget_id", "is_scarce", "refill", "slice", "slice_size", "used_ms", "waiting")

    def __init__(self, budget_id: str, slice_size: int) -> None:
        self.budget_id = budget_id
        self.slice = Slice()
        self.slice_size = slice_size
        self.used_ms = monotonic_ms()
        self.refill: asyncio.Task[Grant] | None = None
        # The last refill brought less than a whole slice: the limit is near.
        self.is_scarce = False
        # Calls that will reserve here once a refill has come.
        self.waiting = 0


class Accounts:
    def __init__(
        self,
        engine: AsyncEngine,
        replica_id: ReplicaId,
        slice_micro_usd: int,
        slice_tokens: int = SLICE_TOKENS,
        store: BudgetStore = budgets,
        generation: int = FIRST_GENERATION,
    ) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._slice_sizes = {Unit.MICRO_USD: slice_micro_usd, Unit.TOKENS: slice_tokens}
        self._store = store
        self._accounts: dict[str, Account] = {}
        self._generation = generation
        self._tasks: set[asyncio.Task[Grant]] = set()

    @property
    def generation(self) -> int:
        """The life of this replica as PostgreSQL counts it."""
        return self._generation

    # ------------------------------------------------------------ calls

    async def reserve_all(self, holds: tuple[Hold, ...]) -> Hold | None:
        """Reserve every hold or none; the one that its account does not cover, or None when all are taken.

        No two holds are of one account. Awaits only where a slice held here is too small. Raises
        StateUnavailable when Postgres can not be asked, or took this replica for dead meanwhile; then,
        and when it is cancelled, nothing is held.
        """
        for at, hold in enumerate(holds):
            self._require_now(hold)
            account = self._account(hold)
            if account.slice.reserve(hold.amount):
                self._refill_low(account)
                continue
            try:
                is_reserved = await self._reserve_refilling(account, hold)
            except BaseException:
                self._release(holds[:at])
                raise
            if not is_reserved:
                self._release(holds[:at])
                return hold
        return None

    def settle_all(self, holds: tuple[Hold, ...], *, micro_usd: int, tokens: int) -> Settlement:
        """End the holds of one call with what it used; what is returned was charged.

        All accounts of one unit are charged the same, and never more than each of them can pay: its
        hold, and what is free beside it. A hold of an earlier life returns nothing to this one; what
        its call used is for PostgreSQL to take from the account, if that can pay.
        """
        micro_usd = min(micro_usd, self.charge_at_most(holds, Unit.MICRO_USD))
        tokens = min(tokens, self.charge_at_most(holds, Unit.TOKENS))
        charges: list[Charge] = []
        for hold in holds:
            amount = micro_usd if hold.unit is Unit.MICRO_USD else tokens
            generation = self._life_of(hold)
            if generation == self._generation:
                self._account(hold).slice.settle(hold.amount, amount)
            charges.append(Charge(hold.budget_id, amount, generation))
        return Settlement(micro_usd, tokens, tuple(charges))

    def charge_at_most(self, holds: tuple[Hold, ...], unit: Unit) -> int:
        """The most that `settle_all` can charge in this unit at this instant; UNBOUNDED without holds in it."""
        most = UNBOUNDED
        for hold in holds:
            if hold.unit is unit:
                is_of_now = self._life_of(hold) == self._generation
                free = self._account(hold).slice.free if is_of_now else 0
                most = min(most, hold.amount + free)
        return most

    def try_extend(self, hold: Hold, more: int) -> bool:
        """Raise a hold by `more` out of what is free here, at once or not at all.

        True: the caller goes on with a hold of `amount + more`. What is missing is asked for behind the
        caller's back, so that a later try can succeed. A hold of an earlier life has no money to count:
        its call is not stopped for that.
        """
        if self._life_of(hold) != self._generation:
            return True
        account = self._account(hold)
        if account.slice.reserve(more):
            self._refill_low(account)
            return True
        if account.refill is None:
            self._begin_refill(account, more)
        return False

    def try_extend_all(
        self, holds: tuple[Hold, ...], *, micro_usd: int, tokens: int
    ) -> tuple[Hold, ...] | None:
        """The holds, each raised by what its unit says; None when one can not be, and none was then."""
        raised: list[Hold] = []
        for hold in holds:
            more = micro_usd if hold.unit is Unit.MICRO_USD else tokens
            if not self.try_extend(hold, more):
                for before, after in zip(holds, raised, strict=False):
                    added = after.amount - before.amount
                    self._release((replace(before, amount=added),))
                return None
            raised.append(replace(hold, amount=hold.amount + more))
        return tuple(raised)

    # ------------------------------------------------------------ upkeep

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
        """Per budget: (free, reserved) held here, in the budget's unit."""
        return {
            budget_id: (account.slice.free, account.slice.reserved)
            for budget_id, account in self._accounts.items()
        }

    def begin_life(self, generation: int) -> None:
        """Postgres took this replica for dead: what it held, free or reserved, was returned already."""
        self._generation = generation
        for account in self._accounts.values():
            account.slice = Slice()
        # Nobody waits for what another life asked for.
        self._accounts = {}

    # ------------------------------------------------------------ inside

    def _account(self, hold: Hold) -> Account:
        account = self._accounts.get(hold.budget_id)
        if account is None:
            size = self._slice_sizes[hold.unit]
            account = self._accounts[hold.budget_id] = Account(hold.budget_id, size)
        account.used_ms = monotonic_ms()
        return account

    def _life_of(self, hold: Hold) -> int:
        return hold.generation if isinstance(hold, Held) else self._generation

    def _require_now(self, hold: Hold) -> None:
        if self._life_of(hold) != self._generation:
            raise StateUnavailable(
                "this replica was taken for dead while the call waited for money"
            )

    def _release(self, holds: tuple[Hold, ...]) -> None:
        for hold in holds:
            if self._life_of(hold) == self._generation:
                self._account(hold).slice.settle(hold.amount, 0)

    async def _reserve_refilling(self, account: Account, hold: Hold) -> bool:
        """Reserve, leasing more from Postgres while that helps. False: the budget is spent."""
        amount = hold.amount
        account.waiting += 1
        try:
            while not account.slice.reserve(amount):
                refill = account.refill or self._begin_refill(account, amount)
                # Others wait for it as well, and a grant must not be lost: it goes on when this
                # caller is cancelled.
                grant = await asyncio.shield(refill)
                self._require_now(hold)
                missing = amount - account.slice.free
                if grant.amount == 0 and missing >= grant.at_least:
                    return False
        finally:
            account.waiting -= 1
        return True

    def _refill_low(self, account: Account) -> None:
        if (
            account.slice.free * LOW_DIVISOR < account.slice_size
            and account.refill is None
            and not account.is_scarce
        ):
            self._begin_refill(account, 1)

    def _begin_refill(self, account: Account, needed: int) -> "asyncio.Task[Grant]":
        task = asyncio.ensure_future(self._lease(account, needed))
        account.refill = task
        self._tasks.add(task)
        task.add_done_callback(self._refilled)
        return task

    def _refilled(self, task: "asyncio.Task[Grant]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # An outage is told to those who wait, and to nobody else.

    async def _lease(self, account: Account, needed: int) -> Grant:
        generation = self._generation
        at_least = max(1, needed - account.slice.free)
        wanted = max(needed, account.slice_size)
        try:
            granted = await self._store.lease(
                self._engine, account.budget_id, self._replica_id, at_least, wanted, generation
            )
        finally:
            account.refill = None
        account.is_scarce = granted < wanted
        if generation == self._generation:
            account.slice.grow(granted)
        return Grant(granted, at_least)

    async def _surrender(self, account: Account) -> None:
        """Give back what is free. Raises StateUnavailable; an amount whose return is then unknown stays
        leased until this replica ends, since keeping it here could spend it twice.
        """
        if account.slice.free:
            await self._store.read(self._engine, account.budget_id)
            amount = account.slice.surrender(0)
            await self._store.surrender(
                self._engine, account.budget_id, self._replica_id, amount, self._generation
            )
        is_used = account.slice.reserved or account.slice.free or account.refill or account.waiting
        # Another one may stand in its place by now.
        if not is_used and self._accounts.get(account.budget_id) is account:
            del self._accounts[account.budget_id]
