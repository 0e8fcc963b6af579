"""A fleet that grows and shrinks under any strategy: what a scaler sees, what it wants, and how that is done.

`Scaled` passes everything on to the strategy that places calls, and starts and stops engines as the scaler
says. A start takes the engine's cold start and is paid from the order on; an engine that is stopped takes
nothing new, is paid until its last call has ended, and has an empty cache when it comes again.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cli.simulate.contracts import (
    MS_PER_S,
    Call,
    Condition,
    EngineView,
    Fate,
    Floor,
    Plan,
    Strategy,
)

# Load is read so often, and told to scalers as the mean over their `smoothing_s`.
SAMPLE_S: Final = 5.0
SECONDS_PER_HOUR: Final = 3_600.0
# Work that can wait begins at the latest when so much of its wait has passed, and is not kept for less.
LATEST_RATIO: Final = 0.9
WAIT_S_MIN: Final = 60.0
# What counts as there: it takes calls, or will when it has loaded.
THERE: Final = (Condition.SERVING, Condition.STARTING, Condition.CORDONED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a scaler sees. `load`: calls in flight and in the queue, a mean over the scaler's smoothing.

    `waiting` are calls in the strategy's queue now. `there` counts engines that serve or start. `deferred`
    workflows are kept waiting, on average for `deferred_s` more at most.
    """

    now_s: float
    load: float
    waiting: int
    there: int
    engines: Sequence[EngineView]
    deferred: int = 0
    deferred_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Engines wanted. `leaving`: which ones go first; empty leaves the choice to who carries it out."""

    engines: int
    leaving: Collection[int] = ()


class Scaler(Protocol):
    """Says how many engines there should be. A new instance for every run."""

    @property
    def interval_s(self) -> float:
        """Time between two looks."""
        ...

    @property
    def smoothing_s(self) -> float: ...

    @property
    def engines_first(self) -> int:
        """Engines that are on when the run begins, and the least there is ever."""
        ...

    def begin(self, floor: Floor) -> None: ...

    def arrived(self, call: Call, now_s: float) -> None:
        """A step of a workflow has come for the first time."""
        ...

    def ended(self, call: Call, now_s: float) -> None: ...

    def wants(self, seen: Seen) -> Wish: ...

    def deferrable_per_s(self) -> float | None:
        """How many workflows a second that can wait may begin now; None: none is kept waiting."""
        ...


class Simple:
    """A scaler that looks at load alone."""

    interval_s = 15.0
    smoothing_s = 30.0
    engines_first = 1

    def begin(self, floor: Floor) -> None:
        del floor

    def arrived(self, call: Call, now_s: float) -> None:
        del call, now_s

    def ended(self, call: Call, now_s: float) -> None:
        del call, now_s

    def deferrable_per_s(self) -> float | None:
        return None


@dataclass(slots=True)
class _Waiting:
    """A first call that may wait, until it must begin."""

    call: Call
    latest_s: float


class Scaled:
    """Implements `Strategy` around one that places, with a scaler beside it.

    `deferrable_s` says of a plan's number by how much the workflow may begin later; the scaler says how
    fast such work may begin, and what has waited long enough begins in any case. `in_time` and `most` sum
    the chances to be good enough, of those that ended in time and of all, by hour since `from_s`.
    """

    floor: Floor

    def __init__(
        self,
        inner: Strategy,
        scaler: Scaler,
        from_s: float = 0.0,
        deferrable_s: Mapping[int, float] | None = None,
    ) -> None:
        self.inner = inner
        self.scaler = scaler
        self.in_time: dict[int, float] = {}
        self.most: dict[int, float] = {}
        self._from_s = from_s
        self.engine_stops = 0
        self.deferred = 0
        self._deferrable_s = deferrable_s or {}
        self._waiting: deque[_Waiting] = deque()
        self._begun: set[int] = set()
        self._samples: deque[float] = deque(maxlen=max(1, round(scaler.smoothing_s / SAMPLE_S)))
        self._sampled_s = self._looked_s = 0.0
        self._credit = 0.0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def waiting(self) -> int:
        return self.inner.waiting + len(self._waiting)

    def gauges(self) -> Mapping[str, float]:
        return {**self.inner.gauges(), "deferred_waiting": float(len(self._waiting))}

    # ------------------------------------------------------------ passed on

    def begin(self, floor: Floor) -> None:
        self.floor = floor
        self.scaler.begin(floor)
        self.inner.begin(floor)

    def arrived(self, call: Call) -> None:
        now_s = self.floor.now_ms / MS_PER_S
        if call.tries == 0:
            if call.step_number == 0:
                self._count(self.most, call.plan)
            self.scaler.arrived(call, now_s)
            if self._holds(call, now_s):
                return
        self.inner.arrived(call)

    def prefilled(self, call: Call) -> None:
        self.inner.prefilled(call)

    def first_token(self, call: Call) -> None:
        self.inner.first_token(call)

    def ended(self, call: Call) -> None:
        self.scaler.ended(call, self.floor.now_ms / MS_PER_S)
        self.inner.ended(call)

    def failed(self, call: Call) -> None:
        self.inner.failed(call)

    def expired(self, call: Call) -> None:
        if self._waiting:
            for entry in self._waiting:
                if entry.call is call:
                    self._waiting.remove(entry)
                    return
        self.inner.expired(call)

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        if fate in (Fate.SUCCEEDED, Fate.BAD):
            self._count(self.in_time, plan)
        self.inner.workflow_ended(plan, fate)

    def engine_changed(self, engine: int) -> None:
        self.inner.engine_changed(engine)

    def refreshed(self) -> None:
        self.inner.refreshed()

    def tick(self, now_ms: float) -> None:
        now_s = now_ms / MS_PER_S
        if now_s - self._sampled_s >= SAMPLE_S:
            self._release(now_s, now_s - self._sampled_s)
            self._sampled_s = now_s
            in_flight = sum(engine.in_flight for engine in self.floor.engines)
            self._samples.append(float(in_flight + self.inner.waiting))
            if now_s - self._looked_s >= self.scaler.interval_s:
                self._looked_s = now_s
                self._scale(now_s)
        self.inner.tick(now_ms)

    def _count(self, sums: dict[int, float], plan: Plan) -> None:
        hour = int((plan.arrival_s - self._from_s) // SECONDS_PER_HOUR)
        sums[hour] = sums.get(hour, 0.0) + plan.good_ratio

    # ------------------------------------------------------------ engines

    def _scale(self, now_s: float) -> None:
        engines = self.floor.engines
        there = [engine for engine in engines if engine.condition in THERE]
        seen = Seen(
            now_s=now_s,
            load=sum(self._samples) / len(self._samples),
            waiting=self.inner.waiting,
            there=len(there),
            engines=engines,
            deferred=len(self._waiting),
            deferred_s=sum(max(0.0, one.latest_s - now_s) for one in self._waiting)
            / max(1, len(self._waiting)),
        )
        wish = self.scaler.wants(seen)
        wanted = max(1, min(len(engines), wish.engines))
        for engine in engines:
            if len(there) >= wanted:
                break
            # One that drains is not taken back: an autoscaler that ended a process can not either.
            if engine.condition is Condition.OFF:
                self.floor.start(engine.index)
                there.append(engine)
        if len(there) > wanted:
            first = set(wish.leaving)
            there.sort(
                key=lambda engine: (
                    engine.index not in first,
                    engine.condition is not Condition.STARTING,
                    engine.in_flight,
                    -engine.index,
                )
            )
            for engine in there[: len(there) - wanted]:
                self.engine_stops += 1
                self.floor.stop(engine.index)

    # ------------------------------------------------------------ work that can wait

    def _holds(self, call: Call, now_s: float) -> bool:
        """Whether the call is kept waiting for a valley: the first of a workflow that may begin later."""
        if call.step_number or self.scaler.deferrable_per_s() is None:
            return False
        wait_s = self._deferrable_s.get(call.plan.number, 0.0)
        if wait_s < WAIT_S_MIN:
            return False
        self.deferred += 1
        self._waiting.append(_Waiting(call=call, latest_s=now_s + LATEST_RATIO * wait_s))
        return True

    def _release(self, now_s: float, passed_s: float) -> None:
        """Let begin what must, and as much of the rest as the scaler allows; who must begin first goes first."""
        if not self._waiting:
            self._credit = 0.0
            return
        per_s = self.scaler.deferrable_per_s() or 0.0
        self._credit = min(self._credit + per_s * passed_s, max(1.0, per_s * 2.0 * passed_s))
        ordered = sorted(self._waiting, key=lambda entry: entry.latest_s)
        self._waiting = deque(ordered)
        while self._waiting and (self._credit >= 1.0 or self._waiting[0].latest_s <= now_s):
            entry = self._waiting.popleft()
            if entry.latest_s > now_s:
                self._credit -= 1.0
            self.inner.arrived(entry.call)
