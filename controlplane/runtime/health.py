"""What breakers, ramps, back-pressure and pace make of the engines: who is kept out, and how many calls each may have.

Keeps the state machines of `reliability/` beside the rows and writes their verdicts into the rows:
`is_suspect`, `seats_bound` and `attempts_expected`. Owned by `runtime/fleet_state.py`, which tells it
what happens.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from controlplane.domain.catalog import Role
from controlplane.domain.fleet import SEATS_UNBOUNDED, EngineRow
from controlplane.domain.ids import ModelName, RegionName
from controlplane.domain.outcome import FAULTS, AttemptOutcome
from controlplane.domain.pool import (
    ENGINE_TARGET,
    POOL_TARGET,
    BreakerState,
    OverrideMode,
    PoolFacts,
)
from controlplane.domain.request import Request
from controlplane.reliability.breaker import POOL_RULES, Breaker, is_slow, may_eject
from controlplane.reliability.restraint import BackPressure, FaultRatio, ProbePace
from controlplane.reliability.slow_start import (
    CANARIES_PER_ENGINE,
    Event,
    PoolRamp,
    Warmth,
    ramp_ratio,
)
from controlplane.reliability.window import WINDOW_MS, Window
from controlplane.scheduler.perf_model import (
    CONTEXT_TOKENS_NOMINAL,
    kv_tokens_on,
    seats_within,
    sequences_on,
)
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import EngineFacts, EngineState

log = logging.getLogger(__name__)

# How much of what an engine's next call holds counts for what its calls hold on average.
CONTEXT_GAIN: Final = 0.01
POOL_FACTS_MS_MAX: Final = 100.0
# Above this share of slow first tokens the whole pool is short of capacity, and no engine is to blame.
POOL_SLOW_SHARE_MAX: Final = 0.5
SPEEDUP_MIN: Final = 0.01
WARM_IN_MS_MIN: Final = 1_000
# Calls beyond an engine's pace that tenants with less than their part may have there.
SEATS_OVER: Final = 2
# A price changes when the attempts expected have moved by this share.
ATTEMPTS_STEP_RATIO: Final = 0.02
FULL_PERMILLE: Final = 1_000


@dataclass(slots=True)
class EngineHealth:
    """What is known of one engine's health, for as long as its process lives.

    `met_generation` is the process whose age was looked at, `ramp_since_ms` when it began to serve or
    came back. `is_proven`: it has answered, or has served for long. `is_held`: it was kept out or
    paced since its breaker opened. `pace_seats` and `restraint` are the two parts of `seats_bound`.
    """

    row: EngineRow
    breaker: Breaker
    speedup: float
    pressure: BackPressure = field(default_factory=BackPressure)
    pace: ProbePace = field(default_factory=ProbePace)
    faults: FaultRatio = field(default_factory=FaultRatio)
    starting_since_ms: float | None = None
    met_generation: int | None = None
    ramp_since_ms: float | None = None
    is_proven: bool = False
    is_held: bool = False
    is_paced: bool = False
    # Something in it changes with time alone.
    is_restless: bool = False
    context_tokens: float = float(CONTEXT_TOKENS_NOMINAL)
    calls: int = 0
    pace_seats: int = SEATS_UNBOUNDED
    restraint: int = SEATS_UNBOUNDED

    @property
    def seats_withheld(self) -> int:
        """Seats lent to this replica that the engine's health, not its pace, keeps empty."""
        lent = self.row.seats_lent
        if self.row.is_suspect:
            return lent
        return max(0, min(self.pace_seats, lent) - self.restraint)


@dataclass(slots=True)
class RegionHealth:
    """The engines of one model in one region, which share a network and a cause of failing."""

    model: ModelName
    region: RegionName
    breaker: Breaker
    is_out: bool = False


@dataclass(slots=True)
class PoolHealth:
    """The engines of one model: how warm they are and how much they are sent."""

    ramp: PoolRamp
    begun: Window
    facts: PoolFacts | None = None
    facts_ms: float = 0.0


class FleetHealth:
    """Health by engine, by (model, region) and by model. All instants are monotonic milliseconds."""

    def __init__(
        self,
        rows_for: Callable[[ModelName], tuple[EngineRow, ...]],
        ticks: TickLog,
        *,
        engine_ramp_ms: float,
        pool_ramp_ms: float,
        wall_ms: Callable[[], float],
    ) -> None:
        self._rows_for = rows_for
        self._ticks = ticks
        self._engine_ramp_ms = engine_ramp_ms
        self._pool_ramp_ms = pool_ramp_ms
        self._wall_ms = wall_ms
        self._engines: dict[int, EngineHealth] = {}
        self._regions: dict[tuple[str, str], RegionHealth] = {}
        self._pools: dict[str, PoolHealth] = {}
        self._stretch: dict[str, float] = {}
        self._overrides: dict[str, OverrideMode] = {}

    # ------------------------------------------------------------ reading

    def regions(self) -> list[RegionHealth]:
        return [self._regions[key] for key in sorted(self._regions)]

    def pool(self, model: ModelName, now_ms: float) -> PoolFacts:
        pool = self._pools.get(model)
        if pool is None:
            return self._facts(model, PoolRamp(self._pool_ramp_ms), now_ms)
        if pool.facts is None or now_ms - pool.facts_ms > POOL_FACTS_MS_MAX:
            pool.facts = self._facts(model, pool.ramp, now_ms)
            pool.facts_ms = now_ms
        return pool.facts

    def ramp_ratio(self, row: EngineRow, now_ms: float) -> float:
        """Share of its room that an engine may use: 0 in a cold pool, 1 when it and its pool are warm."""
        return self._ramp_ratio(self._engines[row.index], now_ms)

    # ------------------------------------------------------------ engines come and go

    def joined(self, row: EngineRow, facts: EngineFacts) -> EngineHealth:
        """An engine, or a new process of one, of which nothing is known yet. `declared` follows."""
        self._set_suspect(row, is_suspect=False)
        if row.attempts_expected > 1.0:
            self._ticks.before_change(row)
            row.attempts_expected = 1.0
        breaker = Breaker(str(row.engine_id))
        breaker.override = self._overrides.get(f"{ENGINE_TARGET}:{row.engine_id}")
        engine = EngineHealth(row, breaker, max(facts.speedup, SPEEDUP_MIN))
        self._engines[row.index] = engine
        if row.model not in self._pools:
            self._pools[row.model] = PoolHealth(
                PoolRamp(self._pool_ramp_ms), Window(is_edge_counted=True)
            )
        return engine

    def declared(self, row: EngineRow, state: EngineState, now_ms: float) -> None:
        """Its agent says anew what it is, or that it accepts calls now."""
        engine = self._engines[row.index]
        if state is EngineState.STARTING:
            if engine.starting_since_ms is None:
                engine.starting_since_ms = now_ms
        elif state is not EngineState.SERVING:
            engine.starting_since_ms = None
        self._set_pace(engine)
        self._meet(engine, now_ms)
        self._judge(engine, now_ms)
        self._rebound(engine, now_ms)

    def left(self, row: EngineRow) -> None:
        del self._engines[row.index]

    def lent(self, row: EngineRow, now_ms: float) -> None:
        """Its credits changed, and with them this replica's share of its bound."""
        engine = self._engines[row.index]
        self._set_pace(engine)
        self._rebound(engine, now_ms)

    # ------------------------------------------------------------ what operators and the planner say

    def use_stretch(self, model: ModelName, tpot_stretch_ratio: float | None) -> None:
        if self._stretch.get(model) == tpot_stretch_ratio:
            return
        if tpot_stretch_ratio is None:
            del self._stretch[model]
        else:
            self._stretch[model] = tpot_stretch_ratio
        for engine in self._engines_of(model):
            self._set_pace(engine)
            self._apply_bound(engine)

    def seats_at(self, model: ModelName, tpot_stretch_ratio: float) -> float:
        """Seats of engines that take calls when they are paced by this stretch, for all replicas together.

        What their health withholds now is taken off.
        """
        total = 0.0
        for engine in self._engines_of(model):
            row = engine.row
            if row.is_accepting and not row.is_suspect and row.role is not Role.PREFILL:
                seats = seats_within(row, tpot_stretch_ratio, engine.context_tokens)
                total += seats * min(1.0, engine.restraint / max(1, engine.pace_seats))
        return total

    def use_overrides(self, overrides: Mapping[str, OverrideMode], now_ms: float) -> None:
        if overrides == self._overrides:
            return
        self._overrides = dict(overrides)
        for region in self._regions.values():
            region.breaker.override = self._overrides.get(
                f"{POOL_TARGET}:{region.model}/{region.region}"
            )
            self._judge_region(region, now_ms)
        for engine in self._engines.values():
            engine.breaker.override = self._overrides.get(f"{ENGINE_TARGET}:{engine.row.engine_id}")
        self._judge_all(self._engines.values(), now_ms)

    # ------------------------------------------------------------ what calls teach

    def dispatched(self, row: EngineRow, request: Request) -> None:
        """A call was given to this row, whose change is being logged. O(1)."""
        engine = self._engines.get(row.index)
        if engine is None or engine.row is not row:
            return
        context = request.prompt_tokens + 0.5 * request.completion_tokens_expected
        engine.calls += 1
        gain = max(CONTEXT_GAIN, 1.0 / engine.calls)
        engine.context_tokens += gain * (context - engine.context_tokens)
        if row.model in self._stretch:
            self._set_pace(engine)
            _set_bound(engine)

    def began(self, row: EngineRow, now_ms: float) -> None:
        """A call goes there."""
        engine = self._engines[row.index]
        begun = self._pools[row.model].begun
        begun.add(int(now_ms))
        region = self._region(row)
        if region.breaker.state is not BreakerState.CLOSED:
            region.breaker.began(int(now_ms))
            self._judge_region(region, now_ms)
        if engine.breaker.state is not BreakerState.CLOSED:
            engine.breaker.began(int(now_ms))
            engine.pace.began(now_ms, WINDOW_MS, begun.total)
            self._judge(engine, now_ms)
            self._rebound(engine, now_ms)

    def attempted(
        self,
        row: EngineRow,
        outcome: AttemptOutcome,
        now_ms: float,
        began_ms: float | None,
        retry_after_ms: int | None,
    ) -> None:
        """How a call ended, while it still holds its seat."""
        engine = self._engines[row.index]
        began = None if began_ms is None else int(began_ms)
        was = engine.breaker.state
        engine.breaker.record(outcome, int(now_ms), began)
        if outcome in FAULTS:
            engine.faults.add(now_ms, is_fault=True)
            engine.is_restless = True
        elif outcome is AttemptOutcome.OK:
            self._answered(engine, now_ms)
            engine.pressure.accepted()
            engine.pace.succeeded()
            if engine.faults.ratio:
                engine.faults.add(now_ms, is_fault=False)
        elif outcome is AttemptOutcome.BACKPRESSURE:
            engine.pressure.refused(row.seats_taken - 1, now_ms, retry_after_ms)
            engine.is_restless = True
        region = self._region(row)
        region_was = region.breaker.state
        region.breaker.record(outcome, int(now_ms), began)
        if (
            region.breaker.state is not BreakerState.CLOSED
            or region_was is not region.breaker.state
        ):
            self._tell(region.breaker, region_was, {"model": row.model, "region": row.region})
            self._judge_region(region, now_ms)
        self._tell(engine.breaker, was, {"engine": row.engine_id})
        if engine.breaker.state is BreakerState.CLOSED and was is not BreakerState.CLOSED:
            self._closed(engine, now_ms)
        if engine.is_restless or row.is_suspect or engine.breaker.state is not BreakerState.CLOSED:
            self._settle(engine, now_ms)

    def first_token(
        self, row: EngineRow, predicted_ms: float, actual_ms: float, now_ms: float
    ) -> None:
        engine = self._engines[row.index]
        self._answered(engine, now_ms)
        late = is_slow(predicted_ms, actual_ms)
        shared = self._region(row).breaker
        shared.first_token(int(now_ms), is_slow=late)
        if late and shared.slow_share > POOL_SLOW_SHARE_MAX:
            return
        was = engine.breaker.state
        engine.breaker.first_token(int(now_ms), is_slow=late)
        if was is not engine.breaker.state:
            self._tell(engine.breaker, was, {"engine": row.engine_id})
            self._settle(engine, now_ms)

    def look_again(self, now_ms: float) -> None:
        """Let time pass."""
        for region in self._regions.values():
            if region.breaker.state is not BreakerState.CLOSED:
                self._judge_region(region, now_ms)
        for engine in self._engines.values():
            if engine.met_generation != engine.row.generation:
                self._meet(engine, now_ms)
            if engine.is_restless or engine.row.is_suspect:
                self._settle(engine, now_ms)
        for model, pool in self._pools.items():
            self._check_cooled(ModelName(model), now_ms)
            if pool.ramp.warmth is not Warmth.WARM:
                pool.ramp.ratio(now_ms)
                self._rebound_pool(ModelName(model), now_ms)

    # ------------------------------------------------------------ who is kept out

    def _judge(self, engine: EngineHealth, now_ms: float) -> None:
        """Whether the engine gets calls at all, and whether only now and then.

        INVARIANT: of the engines of a model that accept calls, breakers keep out at most half, and
        never the last; an operator may close more.
        """
        row, breaker = engine.row, engine.breaker
        is_own = not breaker.allows(int(now_ms))
        region = self._region(row)
        is_forced = breaker.override is OverrideMode.OPEN or (
            breaker.override is None and region.breaker.override is OverrideMode.OPEN
        )
        is_regional = breaker.override is None and region.is_out
        is_out = is_forced or ((is_own or is_regional) and self._may_leave(row))
        if is_out:
            breaker.is_retained = False
        elif is_own and not breaker.is_retained:
            breaker.retain(int(now_ms))
        self._set_suspect(row, is_suspect=is_out)
        was_paced = engine.is_paced
        engine.is_paced = (
            not is_out and breaker.is_retained and breaker.override is None
        ) and self._has_trusted_peer(row)
        if engine.is_paced and not was_paced:
            engine.pace.began(now_ms, WINDOW_MS, self._pools[row.model].begun.total)
        engine.is_held = engine.is_held or is_out or engine.is_paced
        if breaker.state is not BreakerState.CLOSED:
            engine.is_restless = True

    def _judge_region(self, region: RegionHealth, now_ms: float) -> None:
        """A region is left only while the model is served elsewhere."""
        breaker = region.breaker
        is_out = not breaker.allows(int(now_ms))
        if is_out and breaker.override is None and not self._is_served_elsewhere(region):
            breaker.retain(int(now_ms))
            is_out = False
        elif is_out:
            breaker.is_retained = False
        if is_out != region.is_out:
            region.is_out = is_out
            here = [
                engine
                for engine in self._engines_of(region.model)
                if engine.row.region == region.region
            ]
            self._judge_all(here, now_ms)

    def _judge_all(self, engines: Iterable[EngineHealth], now_ms: float) -> None:
        for engine in engines:
            self._judge(engine, now_ms)
            self._rebound(engine, now_ms)

    def _settle(self, engine: EngineHealth, now_ms: float) -> None:
        """Bring everything up to date that outcomes and time have changed."""
        engine.faults.decay(now_ms)
        self._set_attempts(engine)
        is_pressed = engine.pressure.bound(now_ms) is not None
        engine.is_restless = is_pressed or engine.faults.ratio > 0.0
        self._judge(engine, now_ms)
        self._rebound(engine, now_ms)

    def _may_leave(self, row: EngineRow) -> bool:
        pool = [peer for peer in self._peers(row) if peer.is_accepting or peer is row]
        ejected = sum(peer.is_suspect for peer in pool if peer is not row)
        return may_eject(ejected, len(pool))

    def _has_trusted_peer(self, row: EngineRow) -> bool:
        """Another engine could serve what this one is sent."""
        return any(
            peer.is_accepting
            and not peer.is_suspect
            and peer is not row
            and self._engines[peer.index].breaker.is_trusted
            for peer in self._peers(row)
        )

    def _is_served_elsewhere(self, region: RegionHealth) -> bool:
        return any(
            row.is_accepting
            and row.region != region.region
            and self._engines[row.index].breaker.is_trusted
            and self._region(row).breaker.is_trusted
            for row in self._rows_for(region.model)
        )

    def _peers(self, row: EngineRow) -> Iterator[EngineRow]:
        """Engines that do the same for the same model, with itself."""
        is_prefill = row.role is Role.PREFILL
        for peer in self._rows_for(row.model):
            if (peer.role is Role.PREFILL) == is_prefill:
                yield peer

    def _engines_of(self, model: ModelName) -> list[EngineHealth]:
        return [self._engines[row.index] for row in self._rows_for(model)]

    def _region(self, row: EngineRow) -> RegionHealth:
        key = (row.model, row.region)
        region = self._regions.get(key)
        if region is None:
            breaker = Breaker(f"{row.model}/{row.region}", POOL_RULES)
            breaker.override = self._overrides.get(f"{POOL_TARGET}:{row.model}/{row.region}")
            region = self._regions[key] = RegionHealth(row.model, row.region, breaker)
            region.is_out = breaker.override is OverrideMode.OPEN
        return region

    def _closed(self, engine: EngineHealth, now_ms: float) -> None:
        """Its probes succeeded: it comes back slowly, and what failed with it may try sooner."""
        if engine.is_held:
            engine.is_held = False
            engine.ramp_since_ms = now_ms
        if not self._has_trusted_peer(engine.row):
            for peer in self._engines_of(engine.row.model):
                if peer.breaker.state is not BreakerState.CLOSED:
                    peer.breaker.hasten(int(now_ms))

    # ------------------------------------------------------------ how many calls

    def _rebound(self, engine: EngineHealth, now_ms: float) -> None:
        """Work out what holds the engine back, and write the bound that follows."""
        row = engine.row
        restraint = SEATS_UNBOUNDED
        ratio = self._ramp_ratio(engine, now_ms)
        if self._pools[row.model].ramp.warmth is Warmth.COLD:
            restraint = CANARIES_PER_ENGINE
        elif ratio < 1.0:
            restraint = max(1, int(ratio * min(engine.pace_seats, row.seats_lent)))
            engine.is_restless = True
        held = engine.pressure.bound(now_ms)
        if held is not None:
            restraint = min(restraint, held)
        if engine.is_paced:
            restraint = min(restraint, engine.pace.bound(now_ms))
        engine.restraint = restraint
        self._apply_bound(engine)

    def _ramp_ratio(self, engine: EngineHealth, now_ms: float) -> float:
        """The engine's own ramp or its pool's, whichever allows less."""
        ratio = self._pools[engine.row.model].ramp.ratio(now_ms)
        since_ms = engine.ramp_since_ms
        if since_ms is None:
            return ratio
        own = ramp_ratio(since_ms, now_ms, self._engine_ramp_ms / engine.speedup)
        if own >= 1.0:
            engine.ramp_since_ms = None
        return min(ratio, own)

    def _set_pace(self, engine: EngineHealth) -> None:
        """The part of this replica in the calls in flight that keep the engine at its pace."""
        row = engine.row
        stretch = self._stretch.get(row.model)
        if stretch is None or row.role is Role.PREFILL or row.seats_capacity <= 0:
            engine.pace_seats = SEATS_UNBOUNDED
            return
        seats = seats_within(row, stretch, engine.context_tokens)
        engine.pace_seats = max(1, int(seats * row.seats_lent / row.seats_capacity + 0.5))

    def _apply_bound(self, engine: EngineHealth) -> None:
        row = engine.row
        if min(engine.pace_seats, engine.restraint) != row.seats_bound:
            self._ticks.before_change(row)
            _set_bound(engine)

    def _rebound_pool(self, model: ModelName, now_ms: float) -> None:
        for engine in self._engines_of(model):
            self._rebound(engine, now_ms)

    # ------------------------------------------------------------ warmth

    def _meet(self, engine: EngineHealth, now_ms: float) -> None:
        """The first sight of a process that accepts calls: is it new?"""
        row = engine.row
        if not row.is_accepting or engine.met_generation == row.generation:
            return
        engine.met_generation = row.generation
        # Who was seen starting begins now; of who was not, the age is known only by the agent's clock.
        age_ms = 0.0
        if engine.starting_since_ms is None:
            age_ms = max(0.0, self._wall_ms() - row.generation)
        engine.starting_since_ms = None
        if age_ms >= self._engine_ramp_ms / engine.speedup:
            engine.is_proven = True
            self._warmed(engine, Event.SEASONED, now_ms)
            return
        engine.ramp_since_ms = now_ms - age_ms
        engine.is_restless = True
        self._check_cooled(row.model, now_ms)

    def _check_cooled(self, model: ModelName, now_ms: float) -> None:
        """A pool in which no engine that accepts calls has ever answered is cold."""
        accepting = [engine for engine in self._engines_of(model) if engine.row.is_accepting]
        ramp = self._pools[model].ramp
        if (
            not accepting
            or ramp.warmth is Warmth.COLD
            or any(engine.is_proven for engine in accepting)
        ):
            return
        ramp.length_ms = self._pool_ramp_ms / max(engine.speedup for engine in accepting)
        ramp.apply(Event.COOLED, now_ms)
        log.info("pool_cold", extra={"fields": {"model": model}})
        self._rebound_pool(model, now_ms)

    def _answered(self, engine: EngineHealth, now_ms: float) -> None:
        if not engine.is_proven:
            engine.is_proven = True
            self._warmed(engine, Event.PROVED, now_ms)

    def _warmed(self, engine: EngineHealth, event: Event, now_ms: float) -> None:
        ramp = self._pools[engine.row.model].ramp
        warmth = ramp.warmth
        ramp.apply(event, now_ms)
        if ramp.warmth is not warmth:
            self._rebound_pool(engine.row.model, now_ms)

    # ------------------------------------------------------------ the pool as a whole

    def _facts(self, model: ModelName, ramp: PoolRamp, now_ms: float) -> PoolFacts:
        engines = [
            engine for engine in self._engines_of(model) if engine.row.role is not Role.PREFILL
        ]
        accepting = [
            engine for engine in engines if engine.row.is_accepting and not engine.row.is_suspect
        ]
        rows = [engine.row for engine in accepting]
        room = sum(self._room(engine, now_ms) for engine in accepting)
        kv_tokens = sum(row.kv_tokens_capacity for row in rows)
        return PoolFacts(
            model=model,
            engines=len(engines),
            engines_accepting=len(accepting),
            seats_bound_total=sum(min(row.seats_bound, row.seats_lent) for row in rows),
            seats_taken_total=sum(engine.row.seats_taken for engine in engines),
            saturation_permille=_permille(sum(map(sequences_on, rows)), room),
            kv_used_permille=_permille(sum(map(kv_tokens_on, rows)), kv_tokens),
            breaker=self._best_breaker(model),
            ramp_ratio=ramp.ratio(now_ms),
            warm_in_ms=self._warm_in_ms(engines, ramp, now_ms),
        )

    def _room(self, engine: EngineHealth, now_ms: float) -> int:
        """Calls that the engine should have in flight at most, those of all replicas together."""
        row = engine.row
        seats = row.seats_capacity
        stretch = self._stretch.get(row.model)
        if stretch is not None:
            seats = seats_within(row, stretch, engine.context_tokens)
        ramping = max(1, int(seats * self._ramp_ratio(engine, now_ms)))
        # Back-pressure and pace are this replica's own findings, taken to hold for the others too.
        return min(ramping, engine.restraint) if engine.restraint < ramping else ramping

    def _best_breaker(self, model: ModelName) -> BreakerState:
        """Of the regions in which the model is served, that which lets most through."""
        order = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)
        regions = {row.region for row in self._rows_for(model)}
        shown = [
            region.breaker.shown
            for region in self._regions.values()
            if region.model == model and region.region in regions
        ]
        return min(shown, key=order.index, default=BreakerState.CLOSED)

    def _warm_in_ms(self, engines: list[EngineHealth], ramp: PoolRamp, now_ms: float) -> int:
        if any(engine.row.is_accepting for engine in engines):
            return int(ramp.remaining_ms(now_ms))
        loading = [
            engine.row.load_ms - (now_ms - engine.starting_since_ms)
            for engine in engines
            if engine.starting_since_ms is not None
        ]
        loading += [float(engine.row.warm_up_ms) for engine in engines if engine.row.sleep_level]
        return max(WARM_IN_MS_MIN, int(min(loading))) if loading else 0

    # ------------------------------------------------------------ rows

    def _set_suspect(self, row: EngineRow, *, is_suspect: bool) -> None:
        if is_suspect != row.is_suspect:
            self._ticks.before_change(row)
            row.is_suspect = is_suspect

    def _set_attempts(self, engine: EngineHealth) -> None:
        row, attempts = engine.row, engine.faults.attempts_expected
        is_moved = abs(attempts - row.attempts_expected) > ATTEMPTS_STEP_RATIO * attempts
        if is_moved or (attempts == 1.0 and row.attempts_expected != 1.0):
            self._ticks.before_change(row)
            row.attempts_expected = attempts

    def _tell(self, breaker: Breaker, was: BreakerState, fields: dict[str, str]) -> None:
        if breaker.state is not was:
            log.warning(
                "breaker_moved",
                extra={
                    "fields": {**fields, "was": was, "status": breaker.state, "why": breaker.why}
                },
            )


def _permille(used: int, usable: int) -> int:
    return FULL_PERMILLE if usable <= 0 else min(FULL_PERMILLE, FULL_PERMILLE * used // usable)


def _set_bound(engine: EngineHealth) -> None:
    """The lower of pace and health; pace alone may be exceeded a little."""
    row = engine.row
    row.seats_bound = min(engine.pace_seats, engine.restraint)
    row.seats_over = min(SEATS_OVER, engine.restraint - row.seats_bound)
