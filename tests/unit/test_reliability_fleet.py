"""Breakers, ramps, bounds and pace of a whole fleet, from agents' reports to rows and facts."""

import heapq
from dataclasses import replace
from itertools import count

import msgspec
import pytest

from controlplane.domain.decision import Placement
from controlplane.domain.fleet import SEATS_UNBOUNDED, fits
from controlplane.domain.ids import ModelName, NodeId, RegionName
from controlplane.domain.outcome import AttemptOutcome
from controlplane.domain.pool import BreakerState, OverrideMode
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.health import SEATS_OVER
from controlplane.scheduler.perf_model import seats_within
from controlplane.scheduler.place import place
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import (
    Beat,
    CreditGrant,
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Hello,
    Telemetry,
)
from tests.unit.test_runtime_fleet_state import catalog, facts, request

NOW = 1_000_000.0
WALL = 1_700_000_000_000.0
SMALL = ModelName("small")
SEATS = 20
NEW_MS = int(WALL)

OK, FAULT, BUSY = AttemptOutcome.OK, AttemptOutcome.SERVER_ERROR, AttemptOutcome.BACKPRESSURE


class World:
    """Engines `e0`, `e1`… on node n1 (us), `f0`… on node n2 (eu), with all their seats lent."""

    def __init__(
        self,
        us: int,
        eu: int = 0,
        *,
        started_ms: int = 1,
        speedup: float = 1.0,
        now_ms: float = NOW,
    ) -> None:
        self.now_ms = now_ms
        self.fleet = FleetState(PrefixIndex(), TickLog(), wall_ms=lambda: WALL)
        base = catalog()
        nodes = {
            **base.nodes,
            NodeId("n2"): replace(
                base.nodes[NodeId("n1")], id=NodeId("n2"), region=RegionName("eu")
            ),
        }
        self.fleet.use_catalog(replace(base, nodes=nodes))
        self.speedup = speedup
        self.engines = {
            "n1": {f"e{number}": started_ms for number in range(us)},
            "n2": {f"f{number}": started_ms for number in range(eu)},
        }
        self.say()
        self.lend()

    def say(self, **states: EngineState) -> None:
        """Both agents say hello; engines that are not named are serving."""
        for node, engines in self.engines.items():
            told = [
                EngineFacts(
                    engine_id=name, model="small", role="both", port=9000, kind="simulated",
                    state=states.get(name, EngineState.SERVING), gpus=1, seats=SEATS,
                    kv_tokens=1_000_000, block_tokens=16, context_tokens_max=32_768,
                    started_ms=started_ms, speedup=self.speedup,
                )
                for name, started_ms in engines.items()
            ]  # fmt: skip
            self.fleet.hello(
                Hello(node_id=node, agent_epoch=1, version="0", engines=told), self.now_ms
            )

    def lend(self, seats: int = SEATS) -> None:
        for node, engines in self.engines.items():
            grant = CreditGrant(
                node_id=node, agent_epoch=1, ttl_ms=10**9,
                holds=dict.fromkeys(engines, (seats, 1_000_000)),
            )  # fmt: skip
            self.fleet.granted(grant, self.now_ms)

    def row(self, name: str):
        row = self.fleet.row_of(name)
        assert row is not None
        return row

    @property
    def rows(self):
        return self.fleet.rows_for(SMALL)

    def suspects(self) -> list[str]:
        return sorted(str(row.engine_id) for row in self.rows if row.is_suspect)

    def begin(self, name: str, tokens: int = 1_000) -> Placement:
        placement = Placement(self.row(name), None, 0, tokens, 10.0, 100.0, 1.0)
        self.fleet.take(request(tokens), placement)
        self.fleet.began(placement, self.now_ms)
        return placement

    def end(
        self, placement: Placement, outcome: AttemptOutcome, retry_after_ms: int | None = None
    ) -> None:
        self.fleet.attempted(placement.decode, outcome, self.now_ms, retry_after_ms=retry_after_ms)
        self.fleet.release_decode(placement)

    def call(self, name: str, outcome: AttemptOutcome, times: int = 1) -> None:
        for _ in range(times):
            self.end(self.begin(name), outcome)

    def pass_ms(self, milliseconds: float) -> None:
        """Time passes, and the sweep looks at the end of it."""
        self.now_ms += milliseconds
        self.fleet.look_again(self.now_ms)

    def pool(self):
        self.now_ms += 101
        return self.fleet.pool(SMALL, self.now_ms)


# ---------------------------------------------------------------- ejection and panic


def test_at_most_half_are_kept_out_and_the_rest_is_paced_while_one_works() -> None:
    world = World(4)
    for name in ("e0", "e1", "e2"):
        world.call(name, FAULT, 5)
    assert world.suspects() == ["e0", "e1"]
    assert world.row("e2").seats_bound == 0, "its last call was just now"
    assert world.row("e3").seats_bound == SEATS_UNBOUNDED
    assert world.pool().engines_accepting == 2


def test_when_all_fail_half_stays_in_use_without_restraint() -> None:
    world = World(4)
    for name in ("e0", "e1", "e2", "e3"):
        world.call(name, FAULT, 5)
    world.pass_ms(250)
    assert world.suspects() == ["e0", "e1"]
    assert {world.row(name).seats_bound for name in ("e2", "e3")} == {SEATS_UNBOUNDED}


def test_the_last_engine_is_never_kept_out() -> None:
    world = World(1)
    world.call("e0", FAULT, 100)
    assert fits(world.row("e0"), 1, int(world.now_ms))
    world.call("e0", OK, 3)
    world.pass_ms(250)
    assert world.row("e0").seats_bound == SEATS_UNBOUNDED


def test_an_engine_comes_back_when_its_pool_has_shrunk() -> None:
    world = World(2)
    world.call("e0", FAULT, 5)
    assert world.suspects() == ["e0"]
    del world.engines["n1"]["e1"]
    world.say()
    world.pass_ms(250)
    assert world.suspects() == []


def test_half_open_lets_two_probes_through_and_three_successes_close_slowly() -> None:
    world = World(2)
    world.call("e0", FAULT, 5)
    world.pass_ms(6_001)
    assert world.suspects() == []
    first, second = world.begin("e0"), world.begin("e0")
    assert world.suspects() == ["e0"], "both places are taken"
    world.end(first, AttemptOutcome.CANCELLED)
    assert world.suspects() == []
    world.end(second, OK)
    world.call("e0", OK, 2)
    row = world.row("e0")
    assert row.seats_bound == SEATS // 10
    world.pass_ms(15_000)
    assert row.seats_bound == 11
    world.pass_ms(15_000)
    assert row.seats_bound == SEATS_UNBOUNDED
    assert not world.fleet._health._engines[row.index].is_restless


def test_a_pool_that_works_again_does_not_wait_out_long_openings() -> None:
    world = World(2)
    for name in ("e0", "e1"):
        world.call(name, FAULT, 5)
    assert world.suspects() == ["e0"]
    for _ in range(6):
        # Probes of the one that is kept out keep failing.
        world.pass_ms(130_000)
        world.call("e0", FAULT)
    world.call("e1", OK, 3)
    world.pass_ms(6_001)
    assert world.suspects() == []


def test_a_region_that_fails_is_left_while_another_serves() -> None:
    world = World(2, 3)
    # No engine fails five times in a row, and the region fails as a whole.
    for number in range(24):
        world.call(("e0", "e1")[number // 2 % 2], (FAULT, OK)[number % 2])
    [us] = [region for region in world.fleet.regions() if region.region == "us"]
    assert us.breaker.shown is BreakerState.OPEN
    assert world.suspects() == ["e0", "e1"]
    assert world.pool().breaker is BreakerState.CLOSED, "the other region lets all through"
    world.pass_ms(6_001)
    assert world.suspects() == []
    probes = [world.begin("e0"), world.begin("e1")]
    assert world.suspects() == ["e0", "e1"], "two probes for the whole region"
    for probe in probes:
        world.end(probe, OK)
    world.call("e0", OK)
    assert us.breaker.shown is BreakerState.CLOSED
    assert world.suspects() == []


def test_the_only_region_is_not_left_and_tells_that_it_fails() -> None:
    world = World(4)
    for number in range(20):
        world.call(f"e{number % 4}", (FAULT, OK)[number // 4 % 2])
    assert world.pool().breaker is BreakerState.OPEN
    assert len(world.suspects()) <= 2
    for _ in range(3):
        world.call(next(str(row.engine_id) for row in world.rows if not row.is_suspect), OK)
    assert world.pool().breaker is BreakerState.CLOSED


def test_slow_first_tokens_keep_one_engine_out_but_not_a_pool_that_is_short() -> None:
    world = World(2)
    for _ in range(20):
        world.fleet.first_token(world.row("e0"), 100.0, 20_000.0, world.now_ms)
        world.fleet.first_token(world.row("e1"), 100.0, 20_000.0, world.now_ms)
    assert world.suspects() == [], "all are slow: none is to blame"
    world.pass_ms(11_000)
    for _ in range(20):
        world.fleet.first_token(world.row("e1"), 100.0, 90.0, world.now_ms)
    for _ in range(20):
        world.fleet.first_token(world.row("e0"), 100.0, 20_000.0, world.now_ms)
    assert world.suspects() == ["e0"]


def test_prefill_engines_do_not_count_for_those_that_decode() -> None:
    world = World(1)
    prefills = [
        msgspec.structs.replace(facts(f"p{number}"), role="prefill", seats=SEATS)
        for number in range(3)
    ]
    both = msgspec.structs.replace(facts("e0"), seats=SEATS)
    world.fleet.hello(
        Hello(node_id="n1", agent_epoch=1, version="0", engines=[both, *prefills]), world.now_ms
    )
    world.call("e0", FAULT, 5)
    assert world.suspects() == []
    assert world.pool().engines == 1


# ---------------------------------------------------------------- operators


def test_operators_hold_engines_open_beyond_half_and_closed_whatever_they_do() -> None:
    world = World(2)
    world.fleet.use_overrides(
        {"engine:e0": OverrideMode.OPEN, "engine:e1": OverrideMode.OPEN}, world.now_ms
    )
    assert world.suspects() == ["e0", "e1"]
    world.fleet.use_overrides({"engine:e0": OverrideMode.CLOSED}, world.now_ms)
    assert world.suspects() == []
    world.call("e0", FAULT, 50)
    world.pass_ms(250)
    assert world.suspects() == []
    assert world.row("e0").seats_bound == SEATS_UNBOUNDED
    world.fleet.use_overrides({}, world.now_ms)
    assert world.suspects() == ["e0"], "what it has seen counts again"


def test_operators_hold_a_pool_open_and_engines_that_come_later_too() -> None:
    world = World(1)
    world.fleet.use_overrides(
        {"pool:small/us": OverrideMode.OPEN, "engine:f0": OverrideMode.OPEN}, world.now_ms
    )
    assert world.suspects() == ["e0"]
    world.engines["n2"] = {"f0": 1, "f1": 1}
    world.engines["n1"]["e1"] = 1
    world.say()
    assert world.suspects() == ["e0", "e1", "f0"]
    assert world.pool().engines_accepting == 1
    world.fleet.use_overrides({}, world.now_ms)
    assert world.suspects() == []


def test_a_restarted_engine_is_judged_anew() -> None:
    world = World(2)
    world.call("e0", FAULT, 5)
    assert world.row("e0").attempts_expected > 2
    world.engines["n1"]["e0"] = 2
    world.say()
    assert world.suspects() == []
    assert world.row("e0").attempts_expected == 1.0


# ---------------------------------------------------------------- back-pressure, price


def test_back_pressure_bounds_an_engine_by_what_it_holds_until_its_retry_after() -> None:
    world = World(2)
    held = [world.begin("e0") for _ in range(5)]
    world.end(held.pop(), BUSY, 4_000)
    row = world.row("e0")
    assert row.seats_bound == 4
    assert not fits(row, 1, int(world.now_ms))
    world.end(held.pop(), OK)
    assert fits(row, 1, int(world.now_ms))
    world.pass_ms(3_999)
    assert row.seats_bound == 4
    world.pass_ms(1)
    assert row.seats_bound == SEATS_UNBOUNDED
    assert world.suspects() == []


def test_where_calls_fail_the_price_rises_and_time_lowers_it() -> None:
    world = World(2)
    world.call("e0", FAULT, 2)
    assert world.row("e0").attempts_expected == pytest.approx(1.5625)
    assert world.row("e1").attempts_expected == 1.0
    world.pass_ms(60_000)
    assert world.row("e0").attempts_expected == 1.0


class Calls:
    """A pool under load by the real placement: one engine works and the others fail within 5 ms."""

    def __init__(self, world: World, per_s: float, *, failing: set[str], work_ms: float) -> None:
        self.world = world
        self.failing = failing
        self.work_ms = work_ms
        self.gap_ms = 1_000 / per_s
        self.sent: dict[str, int] = {str(row.engine_id): 0 for row in world.rows}
        self.running: list[tuple[float, int, Placement]] = []
        self.waiting = 0
        self.numbers = count()

    def run(self, seconds: float) -> dict[str, int]:
        """Calls that were sent to each engine."""
        world = self.world
        self.sent = dict.fromkeys(self.sent, 0)
        until = world.now_ms + 1_000 * seconds
        arrival, sweep = world.now_ms, world.now_ms
        while world.now_ms < until:
            ends = [self.running[0][0]] if self.running else []
            world.now_ms = min(arrival, sweep, *ends)
            if world.now_ms == sweep:
                world.fleet.look_again(world.now_ms)
                sweep += 250
            if world.now_ms == arrival:
                self.waiting += 1
                arrival += self.gap_ms
            while self.running and self.running[0][0] <= world.now_ms:
                _, _, placement = heapq.heappop(self.running)
                is_failing = str(placement.decode.engine_id) in self.failing
                world.end(placement, FAULT if is_failing else OK)
            self.dispatch()
        return self.sent

    def dispatch(self) -> None:
        world = self.world
        while self.waiting:
            number = next(self.numbers)
            asked = replace(
                request(1_000), id=f"r{number}", arrival_ms=int(world.now_ms),
                deadline_ms=int(world.now_ms) + 600_000, ttft_ms_max=10_000, tpot_ms_max=1_000,
                weight=10.0,
            )  # fmt: skip
            placement = place(asked, world.rows, {}, int(world.now_ms))
            if not isinstance(placement, Placement):
                return
            self.waiting -= 1
            name = str(placement.decode.engine_id)
            self.sent[name] += 1
            world.fleet.take(asked, placement)
            world.fleet.began(placement, world.now_ms)
            took_ms = 5.0 if name in self.failing else self.work_ms
            heapq.heappush(self.running, (world.now_ms + took_ms, number, placement))


@pytest.mark.parametrize("failing", [{"e1"}, {"e1", "e2"}, {"e1", "e2", "e3"}])
def test_who_fails_fast_gets_less_than_a_fiftieth_within_ten_seconds(failing: set[str]) -> None:
    """With one engine of four that works and is full: the others are free at every instant."""
    world = World(4)
    calls = Calls(world, 30, failing=failing, work_ms=1_500)
    calls.run(10)
    sent = calls.run(60)
    lost = sum(sent[name] for name in failing)
    assert lost < 0.02 * sum(sent.values()), sent
    assert sent["e0"] > 500


def test_an_engine_that_works_again_is_used_again() -> None:
    world = World(4)
    calls = Calls(world, 40, failing={"e1", "e2", "e3"}, work_ms=1_500)
    calls.run(30)
    calls.failing = set()
    calls.run(60)
    sent = calls.run(20)
    assert min(sent.values()) > 0.1 * sum(sent.values()), sent


# ---------------------------------------------------------------- slow start and cold pools


def test_an_engine_that_was_seen_starting_is_ramped() -> None:
    world = World(2)
    world.engines["n1"]["e2"] = NEW_MS
    world.say(e2=EngineState.STARTING)
    world.lend()
    world.now_ms += 100_000
    world.say()
    assert world.row("e2").seats_bound == 2
    world.pass_ms(10_000)
    assert world.row("e2").seats_bound == 8
    world.pass_ms(20_000)
    assert world.row("e2").seats_bound == SEATS_UNBOUNDED
    assert world.row("e0").seats_bound == SEATS_UNBOUNDED
    assert world.pool().ramp_ratio == 1.0


def test_of_an_engine_that_was_not_seen_starting_the_age_counts() -> None:
    world = World(1)
    world.engines["n1"].update(young=int(WALL) - 15_000, old=int(WALL) - 30_000)
    world.say()
    world.lend()
    assert world.row("young").seats_bound == 11
    assert world.row("old").seats_bound == SEATS_UNBOUNDED


def test_a_clock_that_is_ahead_makes_an_engine_new_and_no_older() -> None:
    world = World(1)
    world.engines["n1"]["ahead"] = int(WALL) + 3_600_000
    world.say()
    world.lend()
    assert world.row("ahead").seats_bound == 2


def test_a_beat_of_an_engine_that_begins_to_serve_is_enough() -> None:
    world = World(1)
    world.engines["n1"]["e1"] = NEW_MS
    world.say(e1=EngineState.STARTING)
    world.lend()
    beat = Beat(
        node_id="n1", agent_epoch=1,
        engine_states={"e0": EngineState.SERVING, "e1": EngineState.SERVING},
    )  # fmt: skip
    world.fleet.beat(beat, world.now_ms)
    assert world.row("e1").seats_bound == 2


def test_a_silent_node_that_comes_back_is_not_new() -> None:
    world = World(1)
    world.fleet.silence(world.now_ms + 10_000, 4_000)
    beat = Beat(node_id="n1", agent_epoch=1, engine_states={"e0": EngineState.SERVING})
    world.fleet.beat(beat, world.now_ms + 20_000)
    assert world.row("e0").seats_bound == SEATS_UNBOUNDED


def test_a_cold_pool_waits_for_one_answer_and_ramps_as_a_whole() -> None:
    world = World(3, started_ms=NEW_MS)
    assert [row.seats_bound for row in world.rows] == [1, 1, 1]
    assert (world.pool().ramp_ratio, world.pool().warm_in_ms) == (0.0, 60_000)
    first = world.begin("e0")
    world.begin("e1")
    assert not fits(world.row("e0"), 1, int(world.now_ms))
    world.pass_ms(100_000)
    assert [row.seats_bound for row in world.rows] == [1, 1, 1], "time alone proves nothing"
    world.fleet.first_token(first.decode, 10.0, 20.0, world.now_ms)
    assert [row.seats_bound for row in world.rows] == [2, 2, 2]
    assert world.fleet.pool_ramp_ratio(SMALL, world.now_ms + 101) == pytest.approx(0.1, abs=0.01)
    world.pass_ms(30_000)
    assert [row.seats_bound for row in world.rows] == [11, 11, 11]
    world.pass_ms(30_000)
    assert [row.seats_bound for row in world.rows] == [SEATS_UNBOUNDED] * 3
    facts_now = world.pool()
    assert (facts_now.ramp_ratio, facts_now.warm_in_ms) == (1.0, 0)


def test_simulated_engines_warm_up_at_their_own_speed() -> None:
    world = World(2, started_ms=NEW_MS, speedup=10.0)
    world.call("e0", OK)
    world.pass_ms(6_000)
    assert [row.seats_bound for row in world.rows] == [SEATS_UNBOUNDED] * 2


def test_a_pool_with_one_seasoned_engine_is_not_cold() -> None:
    world = World(1)
    world.engines["n1"]["e1"] = NEW_MS
    world.say()
    world.lend()
    assert world.pool().ramp_ratio == 1.0
    assert world.row("e1").seats_bound == 2


def test_a_pool_is_cold_again_when_all_its_engines_are_replaced() -> None:
    world = World(2)
    world.engines["n1"] = {"e8": NEW_MS, "e9": NEW_MS}
    world.say()
    world.lend()
    assert world.pool().ramp_ratio == 0.0
    world.call("e8", OK)
    assert world.pool().ramp_ratio > 0.0


def test_ramps_of_no_length_are_none() -> None:
    fleet = FleetState(
        PrefixIndex(), TickLog(), engine_ramp_ms=0, pool_ramp_ms=0, wall_ms=lambda: WALL
    )
    fleet.use_catalog(catalog())
    told = msgspec.structs.replace(facts(), started_ms=int(WALL))
    fleet.hello(Hello(node_id="n1", agent_epoch=1, version="0", engines=[told]), NOW)
    assert fleet.pool(SMALL, NOW).ramp_ratio == 1.0
    assert fleet.row_of("e1").seats_bound == SEATS_UNBOUNDED


def test_engines_that_load_tell_when_they_are_ready() -> None:
    world = World(1)
    world.engines["n1"] = {"e1": NEW_MS}
    world.say(e1=EngineState.STARTING)
    pool = world.pool()
    assert (pool.engines, pool.engines_accepting) == (1, 0)
    assert pool.warm_in_ms == 1_000, "a load of one second, and never less than that"
    assert pool.saturation_permille == 1_000


# ---------------------------------------------------------------- the bound by pace


def test_calls_in_flight_are_bounded_so_that_the_pace_stays_within_the_stretch() -> None:
    world = World(1)
    row = world.row("e0")
    world.fleet.use_stretch(SMALL, 1.5)
    each_ms = row.decode_ms_per_seq + row.decode_ms_per_kv_token * 4_096
    seats = row.seats_bound
    assert 2 <= seats < SEATS
    assert (seats - 1) * each_ms < 0.5 * row.decode_ms_base <= seats * each_ms
    for _ in range(seats):
        assert fits(row, 1, int(world.now_ms))
        world.begin("e0", 4_046)
    assert not fits(row, 1, int(world.now_ms))
    world.fleet.use_stretch(SMALL, None)
    assert fits(row, 1, int(world.now_ms))
    assert row.seats_bound == SEATS_UNBOUNDED


def test_a_preferred_call_may_exceed_the_pace_a_little_and_nothing_else() -> None:
    world = World(1)
    row = world.row("e0")
    world.fleet.use_stretch(SMALL, 1.5)
    for _ in range(row.seats_bound + SEATS_OVER):
        assert fits(row, 1, int(world.now_ms), 1)
        world.begin("e0", 4_046)
    assert not fits(row, 1, int(world.now_ms), 1)
    assert row.seats_over == SEATS_OVER
    # An engine that pushes back is not sent more, whoever asks.
    refused = world.begin("e0", 4_046)
    world.end(refused, AttemptOutcome.BACKPRESSURE)
    assert row.seats_over == 0 or row.seats_bound + row.seats_over <= row.seats_taken
    assert not fits(row, 1, int(world.now_ms), 1)
    world.fleet.use_stretch(SMALL, None)
    assert row.seats_over == 0


def test_the_bound_follows_the_contexts_that_are_sent() -> None:
    world = World(1)
    row = world.row("e0")
    world.fleet.use_stretch(SMALL, 1.5)
    world.call("e0", OK)
    for _ in range(500):
        world.end(world.begin("e0", 1_000), OK)
    short = row.seats_bound
    for _ in range(2_000):
        world.end(world.begin("e0", 30_000), OK)
    assert row.seats_bound < short
    assert row.seats_bound == seats_within(row, 1.5, 30_050)


def test_a_share_of_the_bound_goes_with_the_share_of_the_seats() -> None:
    world = World(1)
    world.fleet.use_stretch(SMALL, 1.5)
    row = world.row("e0")
    whole = row.seats_bound
    world.lend(SEATS // 2)
    assert row.seats_bound == pytest.approx(whole / 2, abs=1)
    world.lend(0)
    assert row.seats_bound == 1


def test_a_ramp_is_of_the_bound_and_not_of_the_seats() -> None:
    world = World(1)
    world.fleet.use_stretch(SMALL, 1.5)
    world.engines["n1"]["e1"] = int(WALL) - 15_000
    world.say()
    world.lend()
    whole = world.row("e0").seats_bound
    assert world.row("e1").seats_bound == max(1, int(0.55 * whole))


def test_no_bound_is_below_two_nor_above_the_seats() -> None:
    world = World(1)
    row = world.row("e0")
    assert seats_within(row, 1.0, 4_096) == 2
    assert seats_within(row, 1_000.0, 4_096) == SEATS


# ---------------------------------------------------------------- facts


def test_facts_of_a_pool_count_all_replicas_and_are_a_tenth_of_a_second_old() -> None:
    world = World(2)
    engines = [
        EngineTelemetry(engine_id=f"e{number}", running=10, waiting=0, kv_used_ratio=0.25)
        for number in range(2)
    ]
    world.fleet.telemetry(Telemetry(node_id="n1", agent_epoch=1, engines=engines), world.now_ms)
    world.begin("e0")
    first = world.fleet.pool(SMALL, world.now_ms)
    assert (first.engines, first.engines_accepting) == (2, 2)
    assert (first.seats_bound_total, first.seats_taken_total) == (2 * SEATS, 1)
    assert (first.saturation_permille, first.kv_used_permille) == (500, 250)
    world.begin("e0")
    assert world.fleet.pool(SMALL, world.now_ms + 100) is first
    assert world.fleet.pool(SMALL, world.now_ms + 101).seats_taken_total == 2
    world.fleet.use_stretch(SMALL, 1.1)
    world.now_ms += 101
    assert world.pool().saturation_permille == 1_000


def test_a_model_without_engines_has_facts_too() -> None:
    nothing = World(1).fleet.pool(ModelName("other"), NOW)
    assert (nothing.engines, nothing.saturation_permille) == (0, 1_000)
    assert nothing.breaker is BreakerState.CLOSED
    assert nothing.warm_in_ms == 0
