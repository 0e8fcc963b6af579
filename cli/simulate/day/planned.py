"""The live planner as a scaler: its demand, forecast, problem and plan, fed with what the world shows.

What it knows: calls that came and ended so far, the engines and their rates, and arrivals of the days before,
from which the forecast was learned. Of the day that is played it knows no more than what has come. A day that
is played in fewer hours has a calendar that runs faster by as much; all else is in the seconds of the run.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from cli.simulate.contracts import MS_PER_S, Call, Condition, EngineView, Floor, Plan
from cli.simulate.day.arrivals import DayShape, day_curve
from cli.simulate.day.scaling import Seen, Wish
from cli.simulate.headway import shipped_bundle
from cli.simulate.workloads import Body, Workload, draw_plans, workload
from controlplane.domain.catalog import Catalog, SloClass
from controlplane.domain.ids import EngineId, ModelName, NodeId, RegionName, SloClassName
from controlplane.runtime.demand import (
    BIN_S,
    HISTORY_S,
    SLOT_S,
    WINDOW_S,
    DemandSeen,
    Expected,
    Slot,
    demands,
    observed,
    remembered,
    sizes,
)
from controlplane.runtime.forecasts import expected_of, learned
from controlplane.runtime.planner_problem import FleetSeen, make_problem
from controlplane.scheduler.planner.fleet import solve
from controlplane.scheduler.planner.forecast import ForecastState
from controlplane.scheduler.planner.loads import DEFERRABLE_RATIO_DEFAULT
from controlplane.scheduler.planner.problem import (
    Demand,
    EngineCondition,
    EngineState,
    Held,
    Limits,
    MoveKind,
    NodeShape,
    NodeState,
    PoolKind,
    Stretch,
    pool_kind,
)
from controlplane.store.demand import ClassCounts, ClassKey
from policies.evaluate import Policy

# The live planner looks every 10 s; a plan changes with what came in minutes.
INTERVAL_S: Final = 60.0
# Days whose arrivals the forecast was learned from, and their first seed: none of them is played.
DAYS_BEFORE: Final = 7
SEED_BEFORE: Final = 9_001
# A midnight, so that the first bin of a week is not special.
MIDNIGHT_S: Final = 1_790_035_200.0
DAY_S: Final = 86_400.0
# Bodies that stand for all of a workload where only arrivals count.
BODIES: Final = 64
SLO_CLASS: Final = SloClassName("standard")
WAITS: Final = "/waits"

_CONDITIONS: Final = {
    Condition.STARTING: EngineCondition.STARTING,
    Condition.SERVING: EngineCondition.SERVING,
    Condition.CORDONED: EngineCondition.SERVING,
    Condition.DRAINING: EngineCondition.DRAINING,
}


@dataclass(slots=True)
class _Bin:
    """What a class brought in one minute."""

    calls: int = 0
    begun: int = 0
    ended: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    gap_s: float = 0.0
    gaps: int = 0
    deadline_s: float = 0.0


def class_key(plan: Plan, model: ModelName) -> ClassKey:
    return ClassKey(model=model, tenant_class=plan.tenant_class, scope=plan.scope)


class Planned:
    """Implements `Scaler` with the planner. `stretch_ratio`: how far it plans that engines are filled."""

    smoothing_s = 30.0

    def __init__(
        self,
        stretch_ratio: float,
        *,
        shape: DayShape,
        before: Mapping[str, ForecastState],
        deferrable_s: Mapping[int, float] | None = None,
        engines_first: int = 1,
        interval_s: float = INTERVAL_S,
        limits: Limits | None = None,
    ) -> None:
        self.engines_first = engines_first
        self.interval_s = interval_s
        self.plans = 0
        self.solve_s = 0.0
        self._ratio = stretch_ratio
        self._shape = shape
        self._states = dict(before)
        self._deferrable_s = deferrable_s or {}
        self._limits = limits or Limits()
        self._policy = Policy(shipped_bundle())
        self._held: tuple[Held, ...] = ()
        self._deferred_per_s = 0.0
        self._bins: dict[tuple[ClassKey, bool], deque[tuple[int, _Bin]]] = defaultdict(
            lambda: deque(maxlen=HISTORY_S // BIN_S + 1)
        )
        self._slots: dict[int, dict[str, int]] = {}
        self._usual: dict[str, Slot] = {}

    # ------------------------------------------------------------ what it hears

    def begin(self, floor: Floor) -> None:
        specs = [view.spec for view in floor.engines]
        first = specs[0]
        self._model = first.model.name
        kinds: dict[str, PoolKind] = {}
        for spec in specs:
            kind = pool_kind(spec.model, spec.gpu, spec.gpus, spec.role)
            if kind is not None:
                kinds[kind.name] = replace(kind, load_s=spec.cold_start_s)
        self._pools = tuple(kinds[name] for name in sorted(kinds))
        self._catalog = Catalog(
            revision=1,
            regions=tuple(dict.fromkeys(RegionName(spec.region) for spec in specs)),
            gpu_types={spec.gpu.name: spec.gpu for spec in specs},
            models={spec.model.name: spec.model for spec in specs},
            slo_classes={
                SLO_CLASS: SloClass(
                    name=SLO_CLASS,
                    ttft_ms_max=10_000,
                    tpot_ms_max=100,
                    e2e_ms_max=600_000,
                    value_micro_usd=10_000,
                    late_micro_usd_per_s=0,
                )
            },
            nodes={},
        )

    def arrived(self, call: Call, now_s: float) -> None:
        entry = self._bin(call, now_s)
        entry.calls += 1
        if call.step_number == 0:
            entry.begun += 1
            entry.deadline_s += max(0.0, call.deadline_ms / MS_PER_S - now_s)
            if not self._can_wait(call.plan):
                slot = int(self._calendar_s(now_s) // SLOT_S)
                counts = self._slots.setdefault(slot, {})
                class_id = class_key(call.plan, self._model).class_id
                counts[class_id] = counts.get(class_id, 0) + 1
        else:
            # A branch begins at once.
            entry.gap_s += call.chain.steps[call.place - 1].gap_s if call.place else 0.0
            entry.gaps += 1

    def ended(self, call: Call, now_s: float) -> None:
        entry = self._bin(call, now_s)
        entry.ended += 1
        entry.prompt += call.prompt_tokens
        entry.cached += call.cached_tokens
        entry.completion += call.step.completion_tokens

    def deferrable_per_s(self) -> float | None:
        return self._deferred_per_s if self._deferrable_s else None

    def _can_wait(self, plan: Plan) -> bool:
        return plan.number in self._deferrable_s

    def _bin(self, call: Call, now_s: float) -> _Bin:
        bins = self._bins[class_key(call.plan, self._model), self._can_wait(call.plan)]
        number = int(now_s // BIN_S)
        if not bins or bins[-1][0] != number:
            bins.append((number, _Bin()))
        return bins[-1][1]

    def _calendar_s(self, now_s: float) -> float:
        return MIDNIGHT_S + (now_s - self._shape.lead_s) * self._shape.compression

    # ------------------------------------------------------------ a round

    def wants(self, seen: Seen) -> Wish:
        now_s = seen.now_s
        nodes = tuple(_node(view) for view in seen.engines if view.condition is not Condition.OFF)
        fleet = FleetSeen(nodes=nodes, pools=self._pools, shapes=self._shapes(seen.engines))
        problem = make_problem(
            fleet,
            self._demands(seen),
            now_s=MIDNIGHT_S + now_s,
            limits=self._limits,
            held=self._held,
            stretches=(
                Stretch(
                    model=self._model,
                    ratio=self._ratio,
                    deferrable_ratio=min(self._ratio, DEFERRABLE_RATIO_DEFAULT),
                ),
            ),
        )
        if not problem.demands:
            return Wish(engines=seen.there)
        plan = solve(problem)
        self._held = plan.held
        self.plans += 1
        self.solve_s += plan.solve_s
        self._deferred_per_s = sum(one.arrivals_per_s for one in plan.deferred)
        draining = sum(view.condition is Condition.DRAINING for view in seen.engines)
        wanted = sum(one.desired for one in plan.desired_nodes) - draining
        going = {
            str(move.node_id)
            for move in plan.moves
            if move.kind in (MoveKind.DRAIN, MoveKind.UNLOAD)
        }
        leaving = [view.index for view in seen.engines if _node_name(view) in going]
        # The disruption budget: no more go than the moves of this round.
        return Wish(engines=max(wanted, seen.there - len(leaving)), leaving=leaving)

    def _shapes(self, engines: Iterable[EngineView]) -> tuple[NodeShape, ...]:
        shapes: dict[tuple[str, str, int], NodeShape] = {}
        for view in engines:
            spec = view.spec
            key = (spec.region, str(spec.gpu.name), spec.gpus)
            more = view.condition is Condition.OFF
            known = shapes.get(key)
            shapes[key] = NodeShape(
                region=RegionName(spec.region),
                gpu_type=spec.gpu.name,
                gpus=spec.gpus,
                micro_usd_per_hour=round(spec.micro_usd_per_hour),
                nodes_more_max=more + (0 if known is None else known.nodes_more_max),
            )
        return tuple(shapes[key] for key in sorted(shapes))

    def _demands(self, seen: Seen) -> tuple[Demand, ...]:
        now_s = seen.now_s
        expected = self._expected(now_s)
        at = datetime.fromtimestamp(self._calendar_s(now_s), UTC)
        found: list[Demand] = []
        for can_wait in (False, True):
            classes = tuple(
                observed(self._counts(key, bins, now_s), _begun(bins, now_s))
                for (key, waits), bins in self._bins.items()
                if waits is can_wait
            )
            told = DemandSeen(at=at, classes=classes, recent=())
            ahead = {} if can_wait else expected
            known = demands(told, ahead, self._usual, self._catalog, self._policy)
            if can_wait:
                known = self._waiting(known, seen)
            found.extend(known)
        return tuple(found)

    def _waiting(self, known: tuple[Demand, ...], seen: Seen) -> tuple[Demand, ...]:
        """Classes of work that can wait, each with its part of what waits."""
        total = sum(one.arrivals_per_s_now for one in known) or 1.0
        return tuple(
            replace(
                one,
                class_id=one.class_id + WAITS,
                deferrable_s=max(BIN_S, seen.deferred_s or 1.0 * HISTORY_S),
                backlog_workflows=seen.deferred * one.arrivals_per_s_now / total,
                arrivals_per_s_spread=0.0,
            )
            for one in known
        )

    def _expected(self, now_s: float) -> dict[str, Expected]:
        calendar_s = self._calendar_s(now_s)
        current = int(calendar_s // SLOT_S)
        for slot in sorted(self._slots):
            if slot < current:
                start = datetime.fromtimestamp(slot * SLOT_S, UTC)
                counts = self._slots.pop(slot)
                self._states = learned(self._states, [(start, counts)])
                self._remember(start, counts, now_s)
        speed = self._shape.compression
        ahead_s = max(pool.load_s for pool in self._pools) * speed
        part_s = calendar_s - current * SLOT_S
        begun = self._slots.get(current, {})
        return {
            class_id: Expected(
                arrivals_per_s=one.arrivals_per_s * speed,
                spread_per_s=one.spread_per_s * speed,
                dispersion_ratio=one.dispersion_ratio,
            )
            for class_id, one in expected_of(
                self._states, begun, calendar_s, part_s, ahead_s
            ).items()
        }

    def _remember(self, start: datetime, begun: Mapping[str, int], now_s: float) -> None:
        """What classes needed in the slot that is over, about; work that can wait has its own measure."""
        seconds = max(float(WINDOW_S), SLOT_S / self._shape.compression)
        for (key, can_wait), bins in self._bins.items():
            counts = self._counts(key, bins, now_s, seconds)
            needs = sizes(counts, self._catalog, self._policy)
            if can_wait or needs is None or not counts.calls_ended or not counts.begun:
                continue
            slot = Slot(
                key=key,
                slo_class=SLO_CLASS,
                started_at=start,
                workflows=float(begun.get(key.class_id, 0)),
                needs=needs,
            )
            self._usual[key.class_id] = remembered(self._usual.get(key.class_id), slot)

    def _counts(
        self,
        key: ClassKey,
        bins: deque[tuple[int, _Bin]],
        now_s: float,
        seconds: float = WINDOW_S,
    ) -> ClassCounts:
        first = int((now_s - seconds) // BIN_S)
        recent = [entry for number, entry in bins if number > first]
        begun = sum(entry.begun for entry in recent)
        gaps = sum(entry.gaps for entry in recent)
        calls = sum(entry.calls for entry in recent)
        ended = sum(entry.ended for entry in recent)
        return ClassCounts(
            key=key,
            slo_class=SLO_CLASS,
            calls=calls,
            calls_ended=ended,
            calls_open=max(0, calls - ended),
            begun=begun,
            refused=0.0,
            steps_expected=None,
            prompt_tokens=sum(entry.prompt for entry in recent),
            cached_tokens=sum(entry.cached for entry in recent),
            completion_tokens=sum(entry.completion for entry in recent),
            gap_s=sum(entry.gap_s for entry in recent) / gaps if gaps else None,
            deadline_s=sum(entry.deadline_s for entry in recent) / begun if begun else None,
        )


def _begun(bins: deque[tuple[int, _Bin]], now_s: float) -> dict[int, int]:
    """Workflows begun in each whole minute of the history, the oldest first."""
    first = int(now_s // BIN_S) - HISTORY_S // BIN_S
    return {number - first: entry.begun for number, entry in bins if number >= first}


def _node_name(view: EngineView) -> str:
    return view.spec.node or view.spec.name


def _node(view: EngineView) -> NodeState:
    spec = view.spec
    return NodeState(
        node_id=NodeId(_node_name(view)),
        region=RegionName(spec.region),
        gpu_type=spec.gpu.name,
        gpus=spec.gpus,
        engines=(
            EngineState(
                engine_id=EngineId(spec.name),
                model=spec.model.name,
                role=spec.role,
                gpus=spec.gpus,
                condition=_CONDITIONS[view.condition],
            ),
        ),
    )


# ------------------------------------------------------------ what the days before taught


@lru_cache(maxsize=8)
def learned_before(name: str, model: ModelName, shape: DayShape) -> Mapping[str, ForecastState]:
    """The forecast of each class after the days before, each drawn with a seed of its own."""
    load = workload(name)
    states: dict[str, ForecastState] = {}
    for number in range(DAYS_BEFORE):
        midnight_s = MIDNIGHT_S - (DAYS_BEFORE - number) * DAY_S
        slots: dict[int, dict[str, int]] = {
            int((midnight_s + slot * SLOT_S) // SLOT_S): {} for slot in range(int(DAY_S // SLOT_S))
        }
        for plan in _arrivals(load, shape, SEED_BEFORE + number):
            at_s = midnight_s + (plan.arrival_s - shape.lead_s) * shape.compression
            counts = slots.get(int(at_s // SLOT_S))
            if counts is not None:
                class_id = class_key(plan, model).class_id
                counts[class_id] = counts.get(class_id, 0) + 1
        states = learned(
            states,
            [
                (datetime.fromtimestamp(slot * SLOT_S, UTC), counts)
                for slot, counts in sorted(slots.items())
            ],
        )
    return states


def _arrivals(load: Workload, shape: DayShape, seed: int) -> tuple[Plan, ...]:
    """Workflows that come on a day; their bodies are a few that stand for all."""
    from random import Random

    random = Random(f"{seed}:bodies")  # noqa: S311  (a repeatable load, no secret)
    bodies: list[Body] = [load.draw(random) for _ in range(BODIES)]
    light = replace(load, draw=lambda random: random.choice(bodies), replay=())
    return draw_plans(
        light, seed=seed, rate_per_s=day_curve(shape, seed), horizon_s=shape.horizon_s
    )
