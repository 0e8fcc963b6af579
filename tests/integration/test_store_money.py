"""Money under concurrency and faults: leases, settlements, replays, dead and cut-off replicas.

The oracle is the bookkeeping in this file and plain SQL; it shares no code with the store.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId
from controlplane.store import budgets, records, replicas
from controlplane.store.journal import Entry, Journal, OpenedRow, SettledRow
from controlplane.store.reaper import reap
from controlplane.store.session import make_engine
from tests.integration.store_world import BOLT, R1, R2, Rows, populate

# ---------------------------------------------------------------- single functions


async def test_of_64_at_once_at_most_10_are_granted(engine: AsyncEngine) -> None:
    # The tenant's budget pays for ten leases of one micro-dollar.
    grants = await asyncio.gather(
        *(budgets.lease(engine, "tenant:bolt", (R1, R2)[n % 2], 1, 1) for n in range(64))
    )
    assert sum(grants) == 10
    account = await budgets.read(engine, "tenant:bolt")
    assert account is not None
    assert (account.reserved, account.spent) == (10, 0)
    assert (await records.invariants(engine))["I2"]


@pytest.mark.parametrize(
    ("at_least", "wanted", "granted"),
    # Of ten: what is needed, or a quarter of what is left if that is more and as much is wanted.
    [
        (1, 4, 2),
        (1, 2, 2),
        (10, 10, 10),
        (10, 99, 10),
        (3, 99, 3),
        (11, 11, 0),
        (11, 99, 0),
        (0, 0, 1),
    ],
)
async def test_a_lease_is_between_what_is_needed_and_what_is_wanted(
    engine: AsyncEngine, at_least: int, wanted: int, granted: int
) -> None:
    assert await budgets.lease(engine, "tenant:bolt", R1, at_least, wanted) == granted


async def test_nobody_else_gets_a_lease(engine: AsyncEngine) -> None:
    assert await budgets.lease(engine, "tenant:nobody", R1, 1, 1) == 0
    assert await budgets.lease(engine, "tenant:bolt", ReplicaId("stranger"), 1, 1) == 0
    await replicas.retire(engine, R2)
    assert await budgets.lease(engine, "tenant:bolt", R2, 1, 1) == 0
    account = await budgets.read(engine, "tenant:bolt")
    assert account is not None
    assert account.reserved == 0


async def test_no_more_than_the_slice_is_surrendered(engine: AsyncEngine) -> None:
    await budgets.lease(engine, "tenant:bolt", R1, 6, 6)
    await budgets.lease(engine, "tenant:bolt", R2, 3, 3)
    assert await budgets.surrender(engine, "tenant:bolt", R1, 4) == 4
    assert await budgets.surrender(engine, "tenant:bolt", R1, 4) == 2
    assert await budgets.surrender(engine, "tenant:bolt", R1, 4) == 0
    assert await budgets.surrender(engine, "tenant:nobody", R1, 4) == 0
    account = await budgets.read(engine, "tenant:bolt")
    assert account is not None
    assert account.reserved == 3
    assert (await records.invariants(engine))["I2"]


async def test_a_limit_stops_at_what_is_taken(engine: AsyncEngine) -> None:
    await budgets.lease(engine, "tenant:bolt", R1, 6, 6)
    assert await budgets.set_limit(engine, "tenant:bolt", 2) == 6
    assert await budgets.set_limit(engine, "tenant:bolt", 8) == 8
    assert await budgets.lease(engine, "tenant:bolt", R1, 2, 99) == 2
    assert await budgets.set_limit(engine, "tenant:nobody", 8) is None


async def test_a_silent_replica_is_reaped_and_a_live_one_is_not(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    await budgets.lease(engine, "tenant:bolt", R1, 4, 4)
    await budgets.lease(engine, "tenant:bolt", R2, 5, 5)
    journal = Journal(clean_database_url)
    for name, replica in (("a", R1), ("b", R2)):
        journal.opened(Rows(name, tenant=BOLT, replica=replica).opened(2))
    await journal._write(list(journal._entries))
    await journal._disconnect()

    with psycopg.connect(clean_database_url) as connection:
        connection.execute("UPDATE replicas SET last_seen_at = now() - interval '1 day'")
        connection.execute(
            "UPDATE replicas SET last_seen_at = now() + interval '1 h' WHERE id='r2'"
        )
    # PostgreSQL itself has not been up for a day, so nobody can have been silent for that long.
    assert (await reap(engine, 86_000)).replicas_ended == 0
    assert (await reap(engine, 0, R1)).replicas_ended == 0
    summary = await reap(engine, 0)
    assert (summary.replicas_ended, summary.requests_lost, summary.returned_micro_usd) == (1, 1, 4)
    again = await reap(engine, 0)
    assert (again.replicas_ended, again.requests_lost, again.returned_micro_usd) == (0, 0, 0)

    lost, open_ = (await records.list_requests(engine)).items[::-1]
    assert (lost.id, lost.state, lost.settled_micro_usd) == ("a", "lost", 0)
    assert (open_.id, open_.state, open_.settled_micro_usd) == ("b", "open", None)
    account = await budgets.read(engine, "tenant:bolt")
    assert account is not None
    assert (account.reserved, account.spent) == (5, 0)


# ---------------------------------------------------------------- any order of faults

TENANT_LIMIT = 12
WORKFLOW_LIMIT = 5
_examples = count()


@dataclass
class Memory:
    """What one replica knows. `free` is the unreserved part of its slice, per account."""

    id: str
    journal: Journal
    free: dict[str, int] = field(default_factory=dict)
    # Charges that were settled in memory and are not in the database yet, per account.
    pending: dict[str, int] = field(default_factory=dict)
    is_alive: bool = True
    # One more each time that it was reaped while it lived: what it held before is nobody's.
    generation: int = 1


@dataclass
class Call:
    id: str
    replica: Memory
    rows: Rows
    accounts: tuple[str, ...]
    reserved: int
    generation: int
    is_in_flight: bool = True
    is_stored: bool = False
    charged: int | None = None
    # What the ledger must say: None while it must say nothing.
    expected: int | None = None


class Money:
    """Two tenants, one workflow, two replicas with a journal each; any step may be followed by any.

    `at` picks a replica, the other numbers are whatever the step needs.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.engine = make_engine(url)
        self.watch = psycopg.connect(url, autocommit=True)
        self.calls: dict[str, Call] = {}
        self.numbers = count()
        self.seen: Counter[str] = Counter()
        example = next(_examples)
        self.tenants = [f"t{example}a", f"t{example}b"]
        self.workflow = f"w{example}"
        self.accounts = [*(f"tenant:{t}" for t in self.tenants), f"workflow:{self.workflow}"]
        self._declare()
        self.replicas = [self._start(f"x{example}-{n}") for n in range(2)]

    def _declare(self) -> None:
        for tenant in self.tenants:
            self.watch.execute(
                'INSERT INTO budgets (id, "limit") VALUES (%s, %s)',
                (f"tenant:{tenant}", TENANT_LIMIT),
            )
            self.watch.execute(
                "INSERT INTO tenants (id, name, tenant_class, slo_class, budget_id, cache_salt)"
                " VALUES (%s, '', 'gold', 'interactive', %s, '')",
                (tenant, f"tenant:{tenant}"),
            )
        self.watch.execute(
            'INSERT INTO budgets (id, "limit") VALUES (%s, %s)',
            (self.accounts[2], WORKFLOW_LIMIT),
        )
        self.watch.execute(
            "INSERT INTO workflows (id, tenant_id, kind, scope, steps_expected, slo_class,"
            " budget_id, deadline_at)"
            " VALUES (%s, %s, 'k', 'chat', 1, 'interactive', %s, now() + interval '1 h')",
            (self.workflow, self.tenants[0], self.accounts[2]),
        )

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def _start(self, replica_id: str) -> Memory:
        self.run(replicas.register(self.engine, ReplicaId(replica_id)))
        self._see(replica_id)
        return Memory(replica_id, Journal(self.url))

    def _see(self, replica_id: str) -> None:
        self.watch.execute(
            "UPDATE replicas SET last_seen_at = now() + interval '1 h' WHERE id = %s", (replica_id,)
        )

    def _silence(self, replica: Memory) -> None:
        self.watch.execute(
            "UPDATE replicas SET last_seen_at = '-infinity' WHERE id = %s", (replica.id,)
        )

    def _alive(self, at: int) -> Memory:
        living = [replica for replica in self.replicas if replica.is_alive]
        return living[at % len(living)]

    def _busiest(self) -> Memory:
        living = [replica for replica in self.replicas if replica.is_alive]
        return max(living, key=lambda replica: replica.journal.entries_waiting)

    # ------------------------------------------------------------ steps

    def lease(self, at: int, account: int, amount: int, more: int) -> None:
        replica, name = self._alive(at), self.accounts[account % 3]
        self._lease(replica, name, amount + 1, amount + 1 + more)

    def _lease(self, replica: Memory, name: str, least: int, wanted: int) -> None:
        # A grant that another life asked for, and whose question arrives now, gives nothing.
        for generation in range(1, replica.generation):
            stale = budgets.lease(self.engine, name, ReplicaId(replica.id), 1, 9, generation)
            assert self.run(stale) == 0
        granted = self.run(
            budgets.lease(
                self.engine, name, ReplicaId(replica.id), least, wanted, replica.generation
            )
        )
        assert granted == 0 or least <= granted <= wanted
        replica.free[name] = replica.free.get(name, 0) + granted

    def surrender(self, at: int, account: int, amount: int, _: int) -> None:
        replica, name = self._alive(at), self.accounts[account % 3]
        for generation in range(1, replica.generation):
            stale = budgets.surrender(self.engine, name, ReplicaId(replica.id), 9, generation)
            assert self.run(stale) == 0
        amount = min(amount, replica.free.get(name, 0))
        returned = self.run(
            budgets.surrender(self.engine, name, ReplicaId(replica.id), amount, replica.generation)
        )
        assert returned == amount
        replica.free[name] = replica.free.get(name, 0) - amount

    def admit(self, at: int, tenant: int, amount: int, _: int) -> None:
        """Reserve in every account, leasing what is missing; even tenants' calls are a workflow's."""
        replica = self._alive(at)
        in_workflow = tenant % 3 == 0
        names = (self.accounts[tenant % 2], *((self.accounts[2],) if in_workflow else ()))
        if in_workflow:
            names = (self.accounts[0], self.accounts[2])
        for name in names:
            missing = amount - replica.free.get(name, 0)
            if missing > 0:
                self._lease(replica, name, missing, missing + 1)
        if any(replica.free.get(name, 0) < amount for name in names):
            self.seen["refused"] += 1
            return
        for name in names:
            replica.free[name] = replica.free.get(name, 0) - amount
        number = next(self.numbers)
        rows = Rows(
            f"{replica.id}-{number}",
            tenant=names[0].removeprefix("tenant:"),
            replica=replica.id,
            workflow=self.workflow if in_workflow else None,
            workflow_budget=self.accounts[2] if in_workflow else None,
            step=number % 2,
        )
        self.calls[rows.id] = Call(rows.id, replica, rows, names, amount, replica.generation)
        replica.journal.opened(rows.opened(amount))
        replica.journal.decided(rows.decided())

    def settle(self, _: int, pick: int, actual: int, more: int) -> None:
        flying = [c for c in self.calls.values() if c.is_in_flight and c.replica.is_alive]
        if not flying:
            return
        call = flying[pick % len(flying)]
        replica = call.replica
        # Never more than the reservation and what is free, in any of its accounts.
        if call.generation == replica.generation:
            charged = min(
                actual + more // 2, *(call.reserved + replica.free.get(n, 0) for n in call.accounts)
            )
            for name in call.accounts:
                replica.free[name] = replica.free.get(name, 0) + call.reserved - charged
                replica.pending[name] = replica.pending.get(name, 0) + charged
        else:
            charged = min(actual + more // 2, call.reserved)
            self.seen["of another life"] += 1
        call.is_in_flight, call.charged = False, charged
        replica.journal.attempted(call.rows.attempted())
        row = call.rows.settled(charged)
        charges = tuple(charge._replace(generation=call.generation) for charge in row.charges)
        replica.journal.settled(row._replace(charges=charges))

    def flush(self, *_: int) -> None:
        replica = self._busiest()
        batch = list(replica.journal._entries)
        if batch:
            self.run(replica.journal._write(batch))
            replica.journal._done(len(batch))
            self._written(replica, batch)

    def flush_and_lose_the_answer(self, size: int, more: int, *_: int) -> None:
        """The commit happened and nobody knows: the same entries will be written again."""
        replica = self._busiest()
        batch = list(replica.journal._entries)[: 2 + 2 * size + more]
        if batch:
            self.seen["replayed"] += any(isinstance(entry, SettledRow) for entry in batch)
            self.run(replica.journal._write(batch))
            self._written(replica, batch)

    def lose_the_connection(self, *_: int) -> None:
        """The backend is killed while the flush waits for a lock: nothing of it may remain."""
        replica = self._busiest()
        batch = list(replica.journal._entries)
        # What charges nothing has no lock to wait for.
        if not any(isinstance(entry, SettledRow) and entry.settled_micro_usd for entry in batch):
            return
        self.seen["killed"] += 1
        with psycopg.connect(self.url) as blocker:
            blocker.execute("SELECT FROM budgets WHERE id = ANY(%s) FOR UPDATE", (self.accounts,))
            self.run(self._flush_and_kill(replica, batch))

    async def _flush_and_kill(self, replica: Memory, batch: list[Entry]) -> None:
        flushing = asyncio.create_task(replica.journal._write(batch))
        while not flushing.done():
            killed = self.watch.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND datname = current_database()"
            ).fetchall()
            if killed:
                break
            await asyncio.sleep(0.002)
        with pytest.raises(psycopg.OperationalError):
            await flushing
        await replica.journal._disconnect()

    def die(self, at: int, *_: int) -> None:
        """Memory and unwritten entries are gone; another replica starts."""
        replica = self._alive(at)
        replica.is_alive = False
        self._silence(replica)
        self.run(replica.journal._disconnect())
        self.replicas.append(self._start(f"{replica.id}+"))

    def cut_off(self, at: int, *_: int) -> None:
        """The replica lives but is not seen: it is reaped, and learns of it by its next beat."""
        replica = self._alive(at)
        self._silence(replica)
        self.reap()
        replica.generation += 1
        assert self.run(replicas.beat(self.engine, ReplicaId(replica.id))) == replica.generation
        self._see(replica.id)
        replica.free.clear()
        replica.pending.clear()

    def reap(self, *_: int) -> None:
        """Two reapers at once."""

        async def both() -> None:
            await asyncio.gather(reap(self.engine, 0), reap(self.engine, 0))

        self.run(both())
        silent = {
            row[0]
            for row in self.watch.execute("SELECT id FROM replicas WHERE ended_at IS NOT NULL")
        }
        for call in self.calls.values():
            if call.replica.id in silent and call.is_stored and call.expected is None:
                call.expected = 0
                self.seen["lost"] += 1

    def _written(self, replica: Memory, batch: list[Entry]) -> None:
        for entry in batch:
            if isinstance(entry, OpenedRow):
                self.calls[entry.id].is_stored = True
            if isinstance(entry, SettledRow):
                call = self.calls[entry.id]
                if call.expected is not None:
                    continue
                call.expected = call.charged
                self.seen["charged"] += bool(call.charged)
                if call.generation == replica.generation:
                    for name in call.accounts:
                        replica.pending[name] -= call.charged or 0

    # ------------------------------------------------------------ the oracle

    def check(self) -> None:
        accounts = {
            row[0]: row[1:]
            for row in self.watch.execute(
                'SELECT id, "limit", spent, reserved FROM budgets WHERE id = ANY(%s)',
                (self.accounts,),
            )
        }
        leases = {
            row[:3]: row[3]
            for row in self.watch.execute(
                "SELECT budget_id, replica_id, generation, amount FROM budget_leases"
                " WHERE budget_id = ANY(%s)",
                (self.accounts,),
            )
        }
        ledger: dict[str, int] = dict(
            self.watch.execute(
                "SELECT request_id, amount_micro_usd FROM ledger WHERE tenant_id = ANY(%s)",
                (self.tenants,),
            ).fetchall()
        )
        states: dict[str, str] = dict(
            self.watch.execute(
                "SELECT id, state FROM requests WHERE tenant_id = ANY(%s)", (self.tenants,)
            ).fetchall()
        )
        for name, (limit, spent, reserved) in accounts.items():
            assert spent >= 0
            assert reserved >= 0
            assert spent + reserved <= limit
            assert reserved == sum(amount for key, amount in leases.items() if key[0] == name)
            assert spent == sum(
                ledger.get(call.id, 0) for call in self.calls.values() if name in call.accounts
            )
        for call in self.calls.values():
            assert (call.id in states) == call.is_stored
            assert (call.id in ledger) == (call.expected is not None)
            if call.is_stored:
                assert (states[call.id] == "open") == (call.expected is None)
            if call.expected is not None and ledger[call.id] != call.expected:
                # Charged in full, or not at all: what held its money was returned, and the account
                # could not pay.
                assert call.generation < call.replica.generation
                assert ledger[call.id] == 0
                self.seen["dropped"] += 1
        for replica in self.replicas:
            assert replica.journal.entries_dropped == 0
            if replica.generation == 1:
                assert replica.journal.charges_dropped == 0
            if not replica.is_alive:
                continue
            for name in self.accounts:
                reserved = sum(
                    call.reserved
                    for call in self.calls.values()
                    if call.replica is replica
                    and call.is_in_flight
                    and call.generation == replica.generation
                    and name in call.accounts
                )
                held = replica.free.get(name, 0) + reserved + replica.pending.get(name, 0)
                lent = {
                    generation: amount
                    for (account, owner, generation), amount in leases.items()
                    if (account, owner) == (name, replica.id)
                }
                assert lent.pop(replica.generation, 0) == held
                assert not lent

    def check_end(self) -> None:
        """Everyone leaves: nothing is open and nothing is reserved."""
        for replica in self.replicas:
            replica.is_alive = False
            self._silence(replica)
        self.reap()
        self.check()
        assert self.watch.execute(
            "SELECT sum(reserved) FROM budgets WHERE id = ANY(%s)", (self.accounts,)
        ).fetchone() == (0,)
        assert self.run(records.invariants(self.engine)) == {"I1": True, "I2": True}

    def close(self) -> None:
        for replica in self.replicas:
            self.run(replica.journal._disconnect())
        self.run(self.engine.dispose())
        self.runner.close()
        self.watch.close()


# More of what moves money than of what breaks, or nothing would be left to break.
STEPS = (
    *[Money.admit] * 6,
    *[Money.settle] * 6,
    *[Money.flush] * 3,
    *[Money.flush_and_lose_the_answer] * 2,
    Money.lease,
    Money.surrender,
    *[Money.lose_the_connection] * 2,
    Money.die,
    Money.cut_off,
    Money.reap,
)
small = st.integers(0, 4)


def test_money_survives_any_order_of_faults(clean_database_url: str) -> None:
    async def declare() -> None:
        engine = make_engine(clean_database_url)
        await populate(engine)
        await engine.dispose()

    asyncio.run(declare())
    seen: Counter[str] = Counter()

    # Shrinking would take minutes: the steps are printed, and the failing blob repeats them.
    @settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(
        st.lists(
            st.tuples(st.sampled_from(STEPS), st.integers(0, 2), small, small, small),
            min_size=20,
            max_size=40,
        )
    )
    def check(steps: list[tuple[Any, int, int, int, int]]) -> None:
        money = Money(clean_database_url)
        try:
            for step, *numbers in steps:
                step(money, *numbers)
                money.check()
            money.check_end()
        finally:
            seen.update(money.seen)
            money.close()

    check()
    # A property that never met a fault proves nothing.
    assert (
        min(
            seen[name]
            for name in ("charged", "replayed", "killed", "lost", "refused", "of another life")
        )
        > 0
    ), seen
