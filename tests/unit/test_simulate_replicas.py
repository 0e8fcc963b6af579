"""Replicas of Headway in the simulated world: agents never lend an engine twice, and nothing leaks."""

import pytest

from cli.simulate.contracts import EngineDeath, WorldOptions
from cli.simulate.fleets import fleet
from cli.simulate.replicas import Replicated
from cli.simulate.world import play
from tests.unit.test_simulate_pairs import chats, check, pairs_fleet


class Witness(Replicated):
    """Adds up what all replicas hold of every engine, and keeps the most that any of them had there."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.most_seats = 0.0
        self.busy: set[int] = set()

    def tick(self, now_ms: float) -> None:
        super().tick(now_ms)
        for view in self.floor.engines:
            rows = [replica.fleet.row_of(view.spec.name) for replica in self.replicas]
            seats = sum(row.seats_lent for row in rows if row is not None)
            kv_tokens = sum(row.kv_tokens_lent for row in rows if row is not None)
            assert seats <= view.spec.seats
            assert kv_tokens <= view.kv_tokens_capacity
            self.most_seats = max(self.most_seats, seats / view.spec.seats)
            self.busy.update(at for at, row in enumerate(rows) if row and row.seats_taken)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("roles", ["homogeneous", "pairs"])
def test_replicas_share_every_engine_and_nothing_leaks(count: int, roles: str) -> None:
    spec = pairs_fleet() if roles == "pairs" else fleet(roles)
    options = WorldOptions(seed=3, horizon_s=120.0, faults=(EngineDeath(at_s=40.0, engine=1),))
    plans = chats(0.8)
    witness = Witness(count)
    first = play(plans, spec, witness, options)
    check(first)
    assert witness.busy == set(range(count))
    # Under contention next to everything is lent, whatever cannot be divided.
    assert witness.most_seats > 0.95
    assert first.total.succeeded > 0
    if count == 2:
        assert play(plans, spec, Replicated(count), options).digest == first.digest
