"""A fleet of breakers, ramps and restraints, used as the gate uses it: what must hold, and that all comes back."""

import logging

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from controlplane.domain.fleet import SEATS_UNBOUNDED, fits
from controlplane.domain.outcome import AttemptOutcome
from controlplane.domain.pool import BreakerState, OverrideMode
from tests.examples import machine_examples
from tests.unit.test_reliability_fleet import SEATS, World

BAD = (
    AttemptOutcome.CONNECT_ERROR, AttemptOutcome.SERVER_ERROR, AttemptOutcome.TIMEOUT,
    AttemptOutcome.BROKEN_STREAM,
)  # fmt: skip
NEUTRAL = (AttemptOutcome.CLIENT_ERROR, AttemptOutcome.BACKPRESSURE, AttemptOutcome.CANCELLED)
# Outcomes are drawn so that each kind is about as likely.
OUTCOMES = st.sampled_from([AttemptOutcome.OK] * 4 + [*BAD, *NEUTRAL])
GAPS_MS = st.sampled_from([0, 1, 400, 999, 4_000, 6_000, 9_999, 10_000, 30_000, 144_000])


class FleetMachine(RuleBasedStateMachine):
    """Three engines in one region and one in another, used as the gate uses them."""

    @initialize(failing=st.lists(st.sampled_from(["e0", "e1", "e2", "f0"]), unique=True))
    def a_fleet(self, failing: list[str]) -> None:
        self.world = World(3, 1)
        self.flying: list = []
        self.held: dict[str, OverrideMode] = {}
        for name in failing:
            self.world.call(name, AttemptOutcome.TIMEOUT, 5)

    @rule(gap_ms=GAPS_MS)
    def time_passes(self, gap_ms: int) -> None:
        self.world.pass_ms(gap_ms)

    @rule(number=st.integers(0, 3))
    def a_call_is_sent_where_it_fits(self, number: int) -> None:
        row = self.world.row(("e0", "e1", "e2", "f0")[number])
        if fits(row, 100, int(self.world.now_ms)):
            assert row.seats_taken < row.seats_bound
            [breaker] = [
                entry.health.breaker for entry in self.world.fleet.entries() if entry.row is row
            ]
            if (
                breaker.state is BreakerState.HALF_OPEN
                and not breaker.is_retained
                and breaker.override is None
            ):
                assert len(breaker._probes) < 2
            self.flying.append(self.world.begin(str(row.engine_id), 100))

    @rule(number=st.integers(0, 3), outcome=OUTCOMES, times=st.integers(1, 8))
    def calls_come_and_go(self, number: int, outcome: AttemptOutcome, times: int) -> None:
        row = self.world.row(("e0", "e1", "e2", "f0")[number])
        for _ in range(times):
            if not fits(row, 100, int(self.world.now_ms)):
                return
            self.world.end(self.world.begin(str(row.engine_id), 100), outcome)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=OUTCOMES, retry_after_ms=st.sampled_from([None, 0, 2_000]))
    def a_call_ends(
        self, data: st.DataObject, outcome: AttemptOutcome, retry_after_ms: int | None
    ) -> None:
        placement = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.world.end(placement, outcome, retry_after_ms)

    @rule(number=st.integers(0, 3), mode=st.sampled_from([None, *OverrideMode]))
    def an_operator_decides(self, number: int, mode: OverrideMode | None) -> None:
        target = ("engine:e0", "engine:f0", "pool:small/us", "pool:small/eu")[number]
        self.held.pop(target, None)
        if mode is not None:
            self.held[target] = mode
        self.world.fleet.use_overrides(dict(self.held), self.world.now_ms)

    @rule(stretch=st.sampled_from([None, 1.05, 1.5]))
    def the_pace_changes(self, stretch: float | None) -> None:
        self.world.fleet.use_stretch(self.world.rows[0].model, stretch)

    @rule(seats=st.integers(0, SEATS))
    def credits_change(self, seats: int) -> None:
        self.world.lend(seats)

    @invariant()
    def breakers_keep_out_at_most_half(self) -> None:
        if not hasattr(self, "world"):
            return
        if OverrideMode.OPEN in self.held.values():
            return
        assert len(self.world.suspects()) <= len(self.world.rows) // 2

    @invariant()
    def operators_are_obeyed(self) -> None:
        if not hasattr(self, "world"):
            return
        suspects = self.world.suspects()
        for name in ("e0", "f0"):
            mode = self.held.get(f"engine:{name}")
            if mode is not None:
                assert (name in suspects) == (mode is OverrideMode.OPEN)

    @invariant()
    def what_is_written_into_rows_has_its_bounds(self) -> None:
        if not hasattr(self, "world"):
            return
        for row in self.world.rows:
            assert 0 <= row.seats_bound <= SEATS_UNBOUNDED
            assert 1.0 <= row.attempts_expected <= 50.0
            assert row.seats_taken == sum(placement.decode is row for placement in self.flying)
        facts = self.world.pool()
        assert 0 <= facts.saturation_permille <= 1_000
        assert facts.engines_accepting == 4 - len(self.world.suspects())

    def teardown(self) -> None:
        """When all works and operators let go, everything comes back."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.fleet.use_overrides({}, world.now_ms)
        world.fleet.use_stretch(world.rows[0].model, None)
        world.lend()
        for placement in self.flying:
            world.end(placement, AttemptOutcome.OK)
        for _ in range(4):
            # Longer than any opening, ramp, pace or memory of faults.
            world.pass_ms(150_000)
            for row in world.rows * 3:
                if fits(row, 100, int(world.now_ms)):
                    world.end(world.begin(str(row.engine_id), 100), AttemptOutcome.OK)
        for row in world.rows:
            assert not row.is_suspect
            assert row.seats_bound == SEATS_UNBOUNDED
            assert row.attempts_expected == 1.0


def test_every_sequence(caplog: pytest.LogCaptureFixture) -> None:
    # Thousands of warnings would be kept.
    caplog.set_level(logging.CRITICAL, logger="controlplane.runtime.health")
    run_state_machine_as_test(
        FleetMachine,
        settings=settings(
            settings.default, max_examples=machine_examples(100), stateful_step_count=6
        ),
    )
