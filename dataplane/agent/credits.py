"""Lends an engine's capacity, seats and KV tokens, to replicas, and never more than there is.

Pure: instants are milliseconds of one monotonic clock that the caller reads. A loan is an absolute
amount with an end; asking renews it. What a replica may still be using counts as lent, even when
its new grant is smaller, until it says that it holds less or its loan ends.

INVARIANT: for each engine, Σ lent + work of unknown owners ≤ capacity, in seats and in KV tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

CREDIT_TTL_MS = 15_000
# Replicas that may hold credits of one engine; one more gets none.
REPLICAS_MAX = 256
# Work found on an engine that was adopted can hold back capacity at most this long.
UNKNOWN_WORK_MS_MAX = 600_000

# Seats and KV tokens.
Amount = tuple[int, int]
NOTHING: Amount = (0, 0)


def fair_shares(capacity: int, wants: Sequence[int], first: int = 0) -> list[int]:
    """Max-min fair division of `capacity`: nobody gets more than wanted, and only who wants less
    has less.

    What can not be divided goes to those from position `first` on, one each.
    """
    shares = [0] * len(wants)
    left = capacity
    open_ = [at for at, want in enumerate(wants) if want > 0]
    while open_ and left >= len(open_):
        level = min(left // len(open_), *(wants[at] - shares[at] for at in open_))
        for at in open_:
            shares[at] += level
        left -= level * len(open_)
        open_ = [at for at in open_ if shares[at] < wants[at]]
    turn = sorted(open_, key=lambda at: (at - first) % len(wants))
    for at in turn[:left]:
        shares[at] += 1
    return shares


@dataclass(slots=True)
class _Loan:
    """`granted` is what the replica was last told, `lent` what it may be using; lent ≥ granted."""

    wants: Amount
    granted: Amount
    lent: Amount
    expires_ms: int


@dataclass(slots=True)
class _Account:
    capacity: Amount
    is_open: bool = True
    unknown: Amount = NOTHING
    unknown_until_ms: int = 0
    loans: dict[str, _Loan] = field(default_factory=dict)
    # Replicas that know that it is closed.
    closed_by: set[str] = field(default_factory=set)

    def lent(self) -> Amount:
        loans = self.loans.values()
        return sum(loan.lent[0] for loan in loans), sum(loan.lent[1] for loan in loans)


class CreditBook:
    def __init__(self, ttl_ms: int = CREDIT_TTL_MS) -> None:
        self.ttl_ms = ttl_ms
        self._accounts: dict[str, _Account] = {}

    def open(self, engine_id: str, capacity: Amount) -> None:
        """The engine serves. Loans outlast a pause of it, but not a change to less capacity than
        is lent.
        """
        account = self._accounts.get(engine_id)
        if account is None:
            self._accounts[engine_id] = _Account(capacity)
            return
        account.is_open = True
        account.closed_by.clear()
        account.capacity = capacity
        busy = _plus(account.lent(), account.unknown)
        if busy[0] > capacity[0] or busy[1] > capacity[1]:
            account.loans.clear()
            account.unknown = _least(account.unknown, capacity)

    def close(self, engine_id: str) -> None:
        """Lend no more of the engine: loans can be renewed and can shrink, not grow."""
        if account := self._accounts.get(engine_id):
            account.is_open = False

    def forget(self, engine_id: str) -> None:
        self._accounts.pop(engine_id, None)

    def heard(self, replica_id: str, closed: Collection[str]) -> None:
        """The replica sends nothing more to these engines, until it is told that they are open."""
        for engine_id in closed:
            account = self._accounts.get(engine_id)
            if account is not None and not account.is_open:
                account.closed_by.add(replica_id)

    def is_withdrawn(self, engine_id: str, now_ms: int) -> bool:
        """The engine is closed, and every replica that could send to it knows that."""
        account = self._accounts.get(engine_id)
        if account is None:
            return True
        _expire(account, now_ms)
        return not account.is_open and account.loans.keys() <= account.closed_by

    def note_unknown(self, engine_id: str, busy: Amount, now_ms: int) -> None:
        """Work runs on the engine that no loan of this book covers: an earlier agent's."""
        account = self._accounts[engine_id]
        lent = account.lent()
        account.unknown = _least(busy, _minus(account.capacity, lent))
        account.unknown_until_ms = now_ms + UNKNOWN_WORK_MS_MAX

    def observe(self, engine_id: str, busy: Amount, now_ms: int) -> None:
        """The engine's work now: work of unknown owners is never more, and does not grow."""
        account = self._accounts.get(engine_id)
        if account is None or account.unknown == NOTHING:
            return
        if now_ms >= account.unknown_until_ms or busy[0] == 0:
            account.unknown = NOTHING
        else:
            account.unknown = _least(account.unknown, busy)

    def ask(
        self,
        replica_id: str,
        wants: Mapping[str, Amount],
        held: Mapping[str, Amount],
        now_ms: int,
    ) -> dict[str, Amount]:
        """What `replica_id` holds of each engine in `wants` from now on."""
        return {
            engine_id: self._ask(replica_id, engine_id, want, held.get(engine_id, NOTHING), now_ms)
            for engine_id, want in wants.items()
        }

    def _ask(
        self, replica_id: str, engine_id: str, want: Amount, held: Amount, now_ms: int
    ) -> Amount:
        account = self._accounts.get(engine_id)
        if account is None:
            return NOTHING
        _expire(account, now_ms)
        loan = account.loans.pop(replica_id, None)
        if loan is None and len(account.loans) >= REPLICAS_MAX:
            return NOTHING
        room = _minus(_minus(account.capacity, account.unknown), account.lent())
        before = loan.granted if loan else NOTHING
        share = self._share(account, replica_id, want, now_ms) if account.is_open else before
        granted = _least(_least(_positive(want), share), room)
        lent = (
            max(granted[0], min(held[0], room[0])),
            max(granted[1], min(held[1], room[1])),
        )
        if lent != NOTHING or _positive(want) != NOTHING:
            account.loans[replica_id] = _Loan(_positive(want), granted, lent, now_ms + self.ttl_ms)
        return granted

    def _share(self, account: _Account, replica_id: str, want: Amount, now_ms: int) -> Amount:
        """The fair part of one replica, given what every living replica wants."""
        names = sorted([*account.loans, replica_id])
        mine = names.index(replica_id)
        usable = _minus(account.capacity, account.unknown)
        # The indivisible rest moves on with time, so that no replica is always the last.
        first = now_ms // self.ttl_ms % len(names)

        def part(side: int) -> int:
            wants = [
                max(0, want[side]) if name == replica_id else account.loans[name].wants[side]
                for name in names
            ]
            return fair_shares(usable[side], wants, first)[mine]

        return part(0), part(1)

    def expire(self, now_ms: int) -> None:
        """Drop every loan that has ended."""
        for account in self._accounts.values():
            _expire(account, now_ms)

    def lent(self, engine_id: str) -> Amount:
        account = self._accounts.get(engine_id)
        return account.lent() if account else NOTHING

    def unknown(self, engine_id: str) -> Amount:
        account = self._accounts.get(engine_id)
        return account.unknown if account else NOTHING


def _expire(account: _Account, now_ms: int) -> None:
    for replica_id, loan in list(account.loans.items()):
        if loan.expires_ms <= now_ms:
            del account.loans[replica_id]


def _positive(amount: Amount) -> Amount:
    return max(0, amount[0]), max(0, amount[1])


def _least(a: Amount, b: Amount) -> Amount:
    return max(0, min(a[0], b[0])), max(0, min(a[1], b[1]))


def _minus(a: Amount, b: Amount) -> Amount:
    return max(0, a[0] - b[0]), max(0, a[1] - b[1])


def _plus(a: Amount, b: Amount) -> Amount:
    return a[0] + b[0], a[1] + b[1]
