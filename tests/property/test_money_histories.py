"""10,000 random histories of calls, cancellations, lost answers, crashes and windows that end: I1 and I2 hold.

The same histories run over a ledger in memory, which is this file's own, and over PostgreSQL. The oracle is
the bookkeeping of the history: it shares no code with the store or with the accounts.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.budget import Hold, Unit, Window
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ReplicaId
from controlplane.runtime.accounts import Accounts, BudgetStore, Held, Settlement
from controlplane.store import budgets, records, replicas
from controlplane.store.budgets import BudgetRecord
from controlplane.store.journal import Entry, Journal, OpenedRow, SettledRow
from controlplane.store.reaper import reap
from controlplane.store.session import make_engine
from tests.integration.store_world import Rows, populate

HISTORIES_IN_MEMORY = 9_800
HISTORIES_IN_POSTGRES = 200
STEPS_MAX = 30
# How often a history in memory is checked on its way; at its end it always is.
CHECKED_RATIO = 0.3
NOW = datetime(2026, 11, 1, tzinfo=UTC)

# Per history: what an account may hold, and its window.
LIMITS = {
    "tenant": (Unit.MICRO_USD, 40, Window.TOTAL),
    "tenant:tokens": (Unit.TOKENS, 30, Window.HOUR),
    "key": (Unit.MICRO_USD, 25, Window.HOUR),
    "workflow": (Unit.MICRO_USD, 15, Window.TOTAL),
}
COMBINATIONS = (
    ("tenant",),
    ("tenant", "tenant:tokens"),
    ("tenant", "key"),
    ("tenant", "workflow"),
    ("tenant", "key", "tenant:tokens", "workflow"),
)


@dataclass
class Truth:
    """What is stored: accounts as (limit, spent, reserved, spent in windows that are over)."""

    accounts: dict[str, tuple[int, int, int, int]]
    leases: dict[tuple[str, str, int], int]
    states: dict[str, str]
    ledger: dict[str, dict[str, int]]


class Bank(BudgetStore, Protocol):
    """Where the money is."""

    busy: int

    async def open_accounts(self, seed: int) -> None: ...
    async def register(self, replica_id: str) -> int: ...
    async def write(self, replica_id: str, entries: Sequence[Entry]) -> None: ...
    async def silence(self, replica_id: str) -> None: ...
    async def reap(self) -> None: ...
    async def beat(self, replica_id: str) -> int: ...
    async def end_windows(self, seed: int) -> None: ...
    async def roll_over(self) -> None: ...
    async def truth(self, seed: int) -> Truth: ...


def account_id(seed: int, name: str) -> str:
    kind, _, unit = name.partition(":")
    return f"{kind}:h{seed}" + (f":{unit}" if unit else "")


# ---------------------------------------------------------------- the two banks


@dataclass
class MemoryAccount:
    limit: int
    window: Window
    spent: int = 0
    reserved: int = 0
    past: int = 0
    is_over: bool = False

    def roll(self) -> None:
        if self.is_over:
            self.past += self.spent
            self.spent = 0
            self.is_over = False


class MemoryBank:
    def __init__(self) -> None:
        self.busy = 0
        self.accounts: dict[str, MemoryAccount] = {}
        self.leases: dict[tuple[str, str, int], int] = {}
        self.requests: dict[str, tuple[str, str]] = {}
        self.ledger: dict[str, dict[str, int]] = {}
        self.living: dict[str, bool] = {}
        self.lives: dict[str, int] = {}
        self.silent: set[str] = set()

    async def lease(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        at_least: int,
        wanted: int,
        generation: int,
    ) -> int:
        account = self.accounts[budget_id]
        account.roll()
        free = account.limit - account.spent - account.reserved
        is_now = self.living[replica_id] and self.lives[replica_id] == generation
        if free < at_least or not is_now:
            return 0
        amount = min(wanted, max(at_least, free // 4))
        account.reserved += amount
        key = (budget_id, replica_id, generation)
        self.leases[key] = self.leases.get(key, 0) + amount
        return amount

    async def surrender(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        amount: int,
        generation: int,
    ) -> int:
        key = (budget_id, replica_id, generation)
        returned = min(amount, self.leases.get(key, 0))
        if returned:
            self.leases[key] -= returned
            self.accounts[budget_id].reserved -= returned
        return returned

    async def read(self, engine: AsyncEngine, budget_id: str) -> None:
        return None

    async def open_accounts(self, seed: int) -> None:
        self.__init__()  # type: ignore[misc]
        for name, (_, limit, window) in LIMITS.items():
            self.accounts[account_id(seed, name)] = MemoryAccount(limit, window)

    async def register(self, replica_id: str) -> int:
        if not self.living.get(replica_id, False):
            self.lives[replica_id] = self.lives.get(replica_id, 0) + 1
        self.living[replica_id] = True
        self.silent.discard(replica_id)
        return self.lives[replica_id]

    async def write(self, replica_id: str, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, OpenedRow):
                self.requests.setdefault(entry.id, ("open", replica_id))
            if isinstance(entry, SettledRow) and self.requests[entry.id][0] == "open":
                self.requests[entry.id] = (entry.state, replica_id)
                lives = {charge.generation for charge in entry.charges}
                assert len(lives) == 1
                amounts = {charge.budget_id: charge.amount for charge in entry.charges}
                self.ledger[entry.id] = self._charge(replica_id, lives.pop(), amounts)

    def _charge(self, replica_id: str, life: int, charges: dict[str, int]) -> dict[str, int]:
        leased = {
            name: min(amount, self.leases.get((name, replica_id, life), 0))
            for name, amount in charges.items()
        }
        for name, amount in charges.items():
            account = self.accounts[name]
            if account.spent + account.reserved + amount - leased[name] > account.limit:
                return {}
        for name, amount in charges.items():
            account = self.accounts[name]
            account.spent += amount
            account.reserved -= leased[name]
            if leased[name]:
                self.leases[name, replica_id, life] -= leased[name]
        return {name: amount for name, amount in charges.items() if amount}

    async def silence(self, replica_id: str) -> None:
        self.silent.add(replica_id)

    async def reap(self) -> None:
        for replica_id in self.silent:
            self.living[replica_id] = False
            for request, (state, owner) in self.requests.items():
                if owner == replica_id and state == "open":
                    self.requests[request] = ("lost", owner)
                    self.ledger[request] = {}
            for key, amount in list(self.leases.items()):
                if key[1] == replica_id:
                    self.accounts[key[0]].reserved -= amount
                    del self.leases[key]

    async def beat(self, replica_id: str) -> int:
        return await self.register(replica_id)

    async def end_windows(self, seed: int) -> None:
        for account in self.accounts.values():
            account.is_over |= account.window is not Window.TOTAL

    async def roll_over(self) -> None:
        for account in self.accounts.values():
            account.roll()

    async def truth(self, seed: int) -> Truth:
        return Truth(
            {
                name: (account.limit, account.spent, account.reserved, account.past)
                for name, account in self.accounts.items()
            },
            dict(self.leases),
            {request: state for request, (state, _) in self.requests.items()},
            dict(self.ledger),
        )


class PostgresBank:
    """The store's own functions, and its journal."""

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self.busy = 0
        self.engine = engine
        self.journal = Journal(url)
        self.watch = psycopg.connect(url, autocommit=True)

    async def lease(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        at_least: int,
        wanted: int,
        generation: int,
    ) -> int:
        self.busy += 1
        try:
            return await budgets.lease(
                self.engine, budget_id, replica_id, at_least, wanted, generation
            )
        finally:
            self.busy -= 1

    async def surrender(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        amount: int,
        generation: int,
    ) -> int:
        self.busy += 1
        try:
            return await budgets.surrender(self.engine, budget_id, replica_id, amount, generation)
        finally:
            self.busy -= 1

    async def read(self, engine: AsyncEngine, budget_id: str) -> None:
        return None

    async def open_accounts(self, seed: int) -> None:
        for name, (unit, limit, window) in LIMITS.items():
            self.watch.execute(
                'INSERT INTO budgets (id, unit, "limit", "window", window_started_at)'
                " VALUES (%s, %s, %s, %s, date_trunc('hour', now()))",
                (account_id(seed, name), unit, limit, window),
            )
        self.watch.execute(
            "INSERT INTO tenants (id, name, tenant_class, slo_class, budget_id, cache_salt)"
            " VALUES (%s, '', 'gold', 'interactive', %s, '')",
            (f"h{seed}", account_id(seed, "tenant")),
        )
        self.watch.execute(
            "INSERT INTO workflows (id, tenant_id, kind, scope, steps_expected, slo_class,"
            " budget_id, deadline_at)"
            " VALUES (%s, %s, 'k', 'chat', 1, 'interactive', %s, now() + interval '1 h')",
            (f"h{seed}", f"h{seed}", account_id(seed, "workflow")),
        )

    async def register(self, replica_id: str) -> int:
        generation = await replicas.register(self.engine, ReplicaId(replica_id))
        self._see(replica_id, "now() + interval '1 h'")
        return generation

    def _see(self, replica_id: str, instant: str) -> None:
        self.watch.execute(
            f"UPDATE replicas SET last_seen_at = {instant} WHERE id = %s", (replica_id,)
        )

    async def write(self, replica_id: str, entries: Sequence[Entry]) -> None:
        await self.journal._write(entries)

    async def silence(self, replica_id: str) -> None:
        self._see(replica_id, "'-infinity'")

    async def reap(self) -> None:
        await reap(self.engine, 0)

    async def beat(self, replica_id: str) -> int:
        generation = await replicas.beat(self.engine, ReplicaId(replica_id))
        assert await self.register(replica_id) == generation
        return generation

    async def end_windows(self, seed: int) -> None:
        self.watch.execute(
            "UPDATE budgets SET window_started_at = window_started_at - interval '1 h'"
            " WHERE id = ANY(%s) AND \"window\" <> 'total'",
            ([account_id(seed, name) for name in LIMITS],),
        )

    async def roll_over(self) -> None:
        await asyncio.gather(budgets.roll_over(self.engine), budgets.roll_over(self.engine))

    async def truth(self, seed: int) -> Truth:
        names = [account_id(seed, name) for name in LIMITS]
        return Truth(
            {
                row[0]: row[1:]
                for row in self.watch.execute(
                    'SELECT id, "limit", spent, reserved, (SELECT COALESCE(sum(spent), 0)'
                    " FROM budget_windows WHERE budget_id = id)::int8"
                    " FROM budgets WHERE id = ANY(%s)",
                    (names,),
                )
            },
            {
                row[:3]: row[3]
                for row in self.watch.execute(
                    "SELECT budget_id, replica_id, generation, amount FROM budget_leases"
                    " WHERE budget_id = ANY(%s)",
                    (names,),
                )
            },
            dict(
                self.watch.execute(
                    "SELECT id, state FROM requests WHERE tenant_id = %s", (f"h{seed}",)
                ).fetchall()
            ),
            dict(
                self.watch.execute(
                    "SELECT request_id, charges FROM ledger WHERE tenant_id = %s", (f"h{seed}",)
                ).fetchall()
            ),
        )


# ---------------------------------------------------------------- one history


@dataclass
class Gated:
    """A bank whose every call stops before and after it happens, until the history lets it go on."""

    bank: Bank
    points: list["asyncio.Future[None]"] = field(default_factory=list)

    async def lease(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        at_least: int,
        wanted: int,
        generation: int,
    ) -> int:
        await self._point()
        amount = await self.bank.lease(engine, budget_id, replica_id, at_least, wanted, generation)
        await self._point()
        return amount

    async def surrender(
        self,
        engine: AsyncEngine,
        budget_id: str,
        replica_id: ReplicaId,
        amount: int,
        generation: int,
    ) -> int:
        await self._point()
        returned = await self.bank.surrender(engine, budget_id, replica_id, amount, generation)
        await self._point()
        return returned

    async def read(self, engine: AsyncEngine, budget_id: str) -> BudgetRecord | None:
        return await self.bank.read(engine, budget_id)

    async def _point(self) -> None:
        point = asyncio.get_running_loop().create_future()
        self.points.append(point)
        await point


@dataclass
class Call:
    id: str
    holds: tuple[Hold, ...]
    life: int
    used: tuple[int, int] | None = None
    settlement: Settlement | None = None
    # It ended in another life than the one in which its money was held.
    is_of_another_life: bool = False
    is_stored: bool = False
    # What the ledger must say: None while it must say nothing.
    expected: dict[str, int] | None = None


@dataclass
class Replica:
    id: str
    gated: Gated
    accounts: Accounts
    entries: list[Entry] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    flying: dict[str, Call] = field(default_factory=dict)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    is_alive: bool = True
    # PostgreSQL may hold more for it than it knows of.
    has_lost_an_answer: bool = False
    life: int = 1


class History:
    """Two replicas, four accounts, and whatever happens to them."""

    def __init__(self, seed: int, bank: Bank, engine: AsyncEngine, seen: Counter[str]) -> None:
        self.seed = seed
        self.bank = bank
        self.engine = engine
        self.seen = seen
        self.random = random.Random(seed)
        self.replicas: list[Replica] = []
        self.calls: dict[str, Call] = {}

    async def run(self) -> None:
        await self.bank.open_accounts(self.seed)
        for _ in range(2):
            await self._start()
        for _ in range(self.random.randrange(10, STEPS_MAX)):
            step: Callable[[History], object] = self.random.choice(STEPS)
            result = step(self)
            if asyncio.iscoroutine(result):
                await result
            await self._still()
            if isinstance(self.bank, MemoryBank) and self.random.random() < CHECKED_RATIO:
                await self.check()
        await self._end()

    async def _start(self) -> None:
        replica_id = f"h{self.seed}-{len(self.replicas)}"
        await self.bank.register(replica_id)
        gated = Gated(self.bank)
        accounts = Accounts(self.engine, ReplicaId(replica_id), 6, 5, gated)
        self.replicas.append(Replica(replica_id, gated, accounts))

    async def _still(self) -> None:
        """Until everything waits for a point or is done."""
        for _ in range(4):
            await asyncio.sleep(0)
            while self.bank.busy:
                await asyncio.sleep(0)

    def _any(self) -> Replica:
        return self.random.choice([replica for replica in self.replicas if replica.is_alive])

    def _fullest(self) -> Replica:
        living = [replica for replica in self.replicas if replica.is_alive]
        return max(living, key=lambda replica: len(replica.entries))

    # ------------------------------------------------------------ steps

    def call(self) -> None:
        replica = self._any()
        amount = self.random.randrange(9)
        holds = tuple(
            Held(
                account_id(self.seed, name),
                LIMITS[name][0],
                amount + self.random.randrange(2),
                replica.life,
            )
            for name in self.random.choice(COMBINATIONS)
        )
        call = Call(f"{replica.id}-{len(self.calls)}", holds, replica.life)
        self.calls[call.id] = replica.calls[call.id] = call
        replica.tasks.append(asyncio.ensure_future(self._serve(replica, call)))

    async def _serve(self, replica: Replica, call: Call) -> None:
        try:
            short = await replica.accounts.reserve_all(call.holds)
        except StateUnavailable:
            self.seen["away"] += 1
            return
        if short is not None:
            self.seen["refused"] += 1
            assert short in call.holds
            return
        # What is held is of the life in which it was asked for.
        assert call.life == replica.life
        replica.flying[call.id] = call
        replica.entries.append(self._rows(replica, call).opened(call.holds[0].amount))

    def _rows(self, replica: Replica, call: Call) -> Rows:
        in_workflow = any(hold.budget_id.startswith("workflow:") for hold in call.holds)
        return Rows(
            call.id,
            tenant=f"h{self.seed}",
            replica=replica.id,
            workflow=f"h{self.seed}" if in_workflow else None,
            at=NOW,
        )

    def cancel(self) -> None:
        """The client goes away while money is reserved for its call."""
        waiting = [task for replica in self.replicas for task in replica.tasks if not task.done()]
        if waiting:
            self.seen["cancelled"] += 1
            self.random.choice(waiting).cancel()

    def go_on(self) -> None:
        waiting = [
            point for replica in self.replicas for point in replica.gated.points if not point.done()
        ]
        for point in self.random.sample(waiting, min(len(waiting), self.random.randrange(1, 5))):
            point.set_result(None)

    def lose_an_answer(self) -> None:
        """Before or after it was committed: the replica can not know."""
        replica = self._any()
        points = [point for point in replica.gated.points if not point.done()]
        if points:
            replica.has_lost_an_answer = True
            self.random.choice(points).set_exception(StateUnavailable("lost"))

    def extend(self) -> None:
        replica = self._any()
        if replica.flying:
            call = self.random.choice(list(replica.flying.values()))
            more, tokens = self.random.randrange(4), self.random.randrange(4)
            raised = replica.accounts.try_extend_all(call.holds, micro_usd=more, tokens=tokens)
            if raised is not None:
                self.seen["extended"] += 1
                assert {hold.generation for hold in raised if isinstance(hold, Held)} == {call.life}
                call.holds = raised

    def settle(self) -> None:
        """Whatever it used, also more than was held."""
        for replica in self.replicas:
            if replica.is_alive and replica.flying and self.random.random() < 0.7:
                call = replica.flying.pop(self.random.choice(list(replica.flying)))
                used = (self.random.randrange(12), self.random.randrange(12))
                self._settle(replica, call, used)

    def _settle(self, replica: Replica, call: Call, used: tuple[int, int]) -> None:
        settlement = replica.accounts.settle_all(call.holds, micro_usd=used[0], tokens=used[1])
        call.settlement, call.used = settlement, used
        call.is_of_another_life = call.life != replica.life
        row = self._rows(replica, call).settled(settlement.micro_usd)
        replica.entries.append(row._replace(charges=settlement.charges))

    async def flush(self) -> None:
        replica = self._fullest()
        await self._write(replica, replica.entries)
        replica.entries.clear()

    async def flush_and_lose_the_answer(self) -> None:
        """A part is committed and nobody knows: the same entries are written again."""
        replica = self._fullest()
        batch = replica.entries[: self.random.randint(1, 1 + len(replica.entries))]
        self.seen["replayed"] += any(isinstance(entry, SettledRow) for entry in batch)
        await self._write(replica, batch)

    async def _write(self, replica: Replica, batch: list[Entry]) -> None:
        if not batch:
            return
        await self.bank.write(replica.id, batch)
        for entry in batch:
            if isinstance(entry, OpenedRow):
                self.calls[entry.id].is_stored = True
            if isinstance(entry, SettledRow):
                call = self.calls[entry.id]
                if call.expected is None:
                    assert {charge.generation for charge in entry.charges} == {call.life}
                    call.expected = {
                        charge.budget_id: charge.amount for charge in entry.charges if charge.amount
                    }
                    self.seen["charged"] += bool(call.expected)

    async def surrender(self) -> None:
        """Everything idle goes back."""
        replica = self._any()
        replica.tasks.append(asyncio.ensure_future(self._surrender(replica)))

    async def _surrender(self, replica: Replica) -> None:
        try:
            await replica.accounts.surrender_all()
        except StateUnavailable:
            replica.has_lost_an_answer = True
        except asyncio.CancelledError:
            replica.has_lost_an_answer = True
            raise

    async def die(self) -> None:
        """Memory and unwritten entries are gone; another replica starts."""
        if self.random.random() < 0.5:
            return
        replica = self._any()
        await self._kill(replica)
        await self._start()

    async def _kill(self, replica: Replica) -> None:
        replica.is_alive = False
        self.seen["died"] += 1
        await self.bank.silence(replica.id)
        tasks = [*replica.tasks, *replica.accounts._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cut_off(self) -> None:
        """The replica lives but is not seen: it is reaped, and learns of it by its next beat."""
        if self.random.random() < 0.5:
            return
        replica = self._any()
        await self.bank.silence(replica.id)
        await self.reap()
        self.seen["of another life"] += len(replica.flying)
        replica.life = await self.bank.beat(replica.id)
        assert replica.life != replica.accounts.generation
        replica.accounts.begin_life(replica.life)
        replica.has_lost_an_answer = False

    async def reap(self) -> None:
        await self.bank.reap()
        truth = await self.bank.truth(self.seed)
        for call in self.calls.values():
            if call.expected is None and truth.states.get(call.id) == "lost":
                call.expected = {}
                self.seen["lost"] += 1

    async def end_windows(self) -> None:
        self.seen["windows"] += 1
        await self.bank.end_windows(self.seed)
        if self.random.random() < 0.5:
            await self.bank.roll_over()

    # ------------------------------------------------------------ the oracle

    async def check(self) -> None:
        truth = await self.bank.truth(self.seed)
        for name, (limit, spent, reserved, past) in truth.accounts.items():
            assert spent >= 0
            assert reserved >= 0
            assert spent + reserved <= limit
            assert reserved == sum(n for key, n in truth.leases.items() if key[0] == name)
            assert spent + past == sum(charges.get(name, 0) for charges in truth.ledger.values())
        for call in self.calls.values():
            assert (call.id in truth.states) == call.is_stored
            assert (call.id in truth.ledger) == (call.expected is not None)
            if call.is_stored:
                assert (truth.states[call.id] == "open") == (call.expected is None)
            if call.expected is not None and truth.ledger[call.id] != call.expected:
                # In full, or not at all: what held its money was returned, and an account could not pay.
                assert truth.ledger[call.id] == {}
                assert call.life < self._owner(call).life
                self.seen["dropped"] += 1
            if call.settlement is not None:
                self._check_settlement(call)
        for replica in self.replicas:
            if replica.is_alive:
                self._check_replica(replica, truth)

    def _owner(self, call: Call) -> Replica:
        return next(replica for replica in self.replicas if call.id in replica.calls)

    def _check_settlement(self, call: Call) -> None:
        """Accounts of one unit are charged the same, and no more than was used."""
        assert call.settlement is not None
        assert call.used is not None
        for unit, used in zip((Unit.MICRO_USD, Unit.TOKENS), call.used, strict=True):
            charges = _amounts(call.settlement)
            of_unit = {charges[hold.budget_id] for hold in call.holds if hold.unit is unit}
            assert len(of_unit) <= 1
            # What was held for it is always there.
            held = min((hold.amount for hold in call.holds if hold.unit is unit), default=0)
            most = held if call.is_of_another_life else used
            assert all(min(used, held) <= amount <= min(used, most) for amount in of_unit)

    def _check_replica(self, replica: Replica, truth: Truth) -> None:
        """What it holds is leased to it. A call that waits for its second account holds the first."""
        totals = replica.accounts.totals()
        is_quiet = all(task.done() for task in [*replica.tasks, *replica.accounts._tasks])
        for name in truth.accounts:
            free, reserved = totals.get(name, (0, 0))
            assert free >= 0
            of_calls = sum(
                hold.amount
                for call in replica.flying.values()
                for hold in call.holds
                if hold.budget_id == name and call.life == replica.life
            )
            assert reserved >= of_calls
            unwritten = sum(
                _amounts(call.settlement).get(name, 0)
                for call in replica.calls.values()
                if call.settlement is not None
                and call.expected is None
                and call.life == replica.life
            )
            held = free + reserved + unwritten
            leased = truth.leases.get((name, replica.id, replica.life), 0)
            assert held <= leased
            if is_quiet:
                assert reserved == of_calls
                assert held == leased or replica.has_lost_an_answer

    async def _end(self) -> None:
        """What waits goes on; then everyone leaves: nothing is open and nothing is reserved."""
        while any(
            not task.done() for r in self.replicas for task in [*r.tasks, *r.accounts._tasks]
        ):
            for replica in self.replicas:
                for point in replica.gated.points:
                    if not point.done():
                        point.set_result(None)
            await self._still()
        await self.check()
        for replica in self.replicas:
            if replica.is_alive and self.random.random() < 0.5:
                for call in replica.flying.values():
                    self._settle(replica, call, (3, 3))
                replica.flying.clear()
                await self._write(replica, replica.entries)
        for replica in self.replicas:
            if replica.is_alive:
                await self._kill(replica)
        await self.reap()
        await self.check()
        truth = await self.bank.truth(self.seed)
        assert all(reserved == 0 for _, _, reserved, _ in truth.accounts.values())
        assert set(truth.ledger) == {call.id for call in self.calls.values() if call.is_stored}


def _amounts(settlement: Settlement) -> dict[str, int]:
    return {charge.budget_id: charge.amount for charge in settlement.charges}


STEPS: tuple[Callable[[History], object], ...] = (
    *[History.call] * 7,
    *[History.go_on] * 8,
    *[History.settle] * 5,
    *[History.flush] * 2,
    *[History.flush_and_lose_the_answer] * 2,
    History.extend,
    History.extend,
    History.cancel,
    History.lose_an_answer,
    History.surrender,
    History.die,
    History.cut_off,
    History.reap,
    History.end_windows,
)
FAULTS = (
    "refused",
    "charged",
    "replayed",
    "cancelled",
    "away",
    "lost",
    "died",
    "extended",
    "windows",
    "of another life",
)


async def run_histories(seeds: range, bank: Bank, engine: AsyncEngine) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            await History(seed, bank, engine, seen).run()
        except AssertionError as error:
            raise AssertionError(f"the history with seed {seed} breaks an invariant") from error
    # A property that never met a fault proves nothing.
    assert min(seen[name] for name in FAULTS) > len(seeds) // 200, seen


@pytest.mark.timeout(300)
async def test_histories_in_memory() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:9/nothing")
    await run_histories(range(HISTORIES_IN_MEMORY), MemoryBank(), engine)
    await engine.dispose()


@pytest.mark.timeout(300)
async def test_histories_in_postgres(clean_database_url: str) -> None:
    engine = make_engine(clean_database_url)
    await populate(engine)
    bank = PostgresBank(clean_database_url, engine)
    first = HISTORIES_IN_MEMORY
    await run_histories(range(first, first + HISTORIES_IN_POSTGRES), bank, engine)
    assert bank.journal.entries_dropped == 0
    assert await records.invariants(engine) == {"I1": True, "I2": True}
    bank.watch.close()
    await bank.journal._disconnect()
    await engine.dispose()


async def test_a_refusal_to_another_life_is_none_to_this_one() -> None:
    """The first life asks and is reaped before its question arrives; the second asks as well."""
    engine = make_engine("postgresql://nobody@127.0.0.1:9/nothing")
    bank = MemoryBank()
    await bank.open_accounts(0)
    await bank.register("r")
    gated = Gated(bank)
    accounts = Accounts(engine, ReplicaId("r"), 6, 5, gated)
    name = account_id(0, "tenant")
    first = asyncio.ensure_future(accounts.reserve_all((Held(name, Unit.MICRO_USD, 4, 1),)))
    await asyncio.sleep(0.001)
    await bank.silence("r")
    await bank.reap()
    accounts.begin_life(await bank.beat("r"))
    second = asyncio.ensure_future(accounts.reserve_all((Held(name, Unit.MICRO_USD, 4, 2),)))
    while not (first.done() and second.done()):
        await asyncio.sleep(0.001)
        for point in gated.points:
            if not point.done():
                point.set_result(None)
    assert isinstance(first.exception(), StateUnavailable)
    assert second.result() is None, "its account has all of its money"
    assert accounts.totals()[name] == (2, 4)
    await engine.dispose()


async def test_a_grant_from_before_a_reaping_is_void() -> None:
    """Its answer comes when the money belongs to others already."""
    engine = make_engine("postgresql://nobody@127.0.0.1:9/nothing")
    bank = MemoryBank()
    await bank.open_accounts(0)
    await bank.register("r")
    gated = Gated(bank)
    accounts = Accounts(engine, ReplicaId("r"), 6, 5, gated)
    name = account_id(0, "tenant")
    hold = Held(name, Unit.MICRO_USD, 4, 1)
    task = asyncio.ensure_future(accounts.reserve_all((hold,)))
    await asyncio.sleep(0.001)
    gated.points[0].set_result(None)
    await asyncio.sleep(0.001)
    assert bank.leases == {(name, "r", 1): 6}, "granted, and the answer is under way"
    await bank.silence("r")
    await bank.reap()
    accounts.begin_life(await bank.beat("r"))
    while not task.done():
        for point in gated.points:
            if not point.done():
                point.set_result(None)
        await asyncio.sleep(0.001)
    assert isinstance(task.exception(), StateUnavailable)
    assert accounts.totals() == {}
    assert bank.leases == {}
    await engine.dispose()
