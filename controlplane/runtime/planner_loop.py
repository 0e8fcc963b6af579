"""Plans the fleet while its replica leads: reads, solves in another process, stores, tells, and begins.

A round that fails leaves the last plan standing; its age is a metric.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.load import stretch_first
from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable
from controlplane.domain.ids import EngineId, ModelName, NodeId
from controlplane.runtime import demand as demands
from controlplane.runtime.call import wall_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.forecasts import Forecasts
from controlplane.runtime.loops import Leadership, every
from controlplane.runtime.plan_moves import PlanMoves
from controlplane.runtime.plan_steps import Specs, new_moves
from controlplane.runtime.plan_view import PlanView
from controlplane.runtime.planner_problem import FleetSeen, Growth, make_problem, see_fleet
from controlplane.runtime.planner_process import PlannerProcess, PlanNotMade
from controlplane.scheduler.planner.problem import (
    Held,
    Limits,
    MoveKind,
    Plan,
    PlanStatus,
    Problem,
    Stretch,
    from_builtins,
)
from controlplane.store import catalog, plans
from controlplane.store.plans import Mode, MoveState, NewMove, PlanConflict, PlanRecord, PlanState
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol import subjects
from dataplane.protocol.messages import (
    ClassPrice,
    ControlPlan,
    ControlPrices,
    DesiredEngines,
    DesiredNodes,
    ModelPace,
    PoolPrice,
    ProtocolError,
    encode,
)
from policies.evaluate import Policy

log = logging.getLogger(__name__)

# Prices are void after so many rounds that were not made.
PRICES_ROUNDS_MAX: Final = 6
# A proposal that no round confirmed for this long is not applied: the fleet may have changed.
APPLY_AGE_S_MAX: Final = 900.0
# After a plan failed, a person has this long to look before the planner acts again.
FAILED_PAUSE_S: Final = 600.0
# A message holds this many pools, classes and models; a larger fleet is told of its dearest.
TOLD_MAX: Final = 128
MS_PER_S: Final = 1000.0
MOVES_INTERVAL_S: Final = 1.0
EXPIRE_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """`interval_s` between two rounds; `solve_s_max` is the solver's share of one."""

    interval_s: float
    solve_s_max: float
    growth: Growth


class PlannerLoop:
    """Rounds of one replica. It owns the solver's process."""

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        bus: Bus,
        fleet: FleetState,
        leader: Leadership,
        view: PlanView,
        metrics: Metrics,
        policy: Callable[[], Policy],
        author: str,
        settings: PlannerSettings,
        process: PlannerProcess | None = None,
        clock_ms: Callable[[], float] = wall_ms,
    ) -> None:
        """`policy` is the bundle that rules; `author` stands in the audit log."""
        self._engine = engine
        self._bus = bus
        self._fleet = fleet
        self._leader = leader
        self._view = view
        self._metrics = metrics
        self._policy = policy
        self._author = author
        self._settings = settings
        self._process = process or PlannerProcess()
        self._clock_ms = clock_ms
        self._forecasts = Forecasts(engine)
        self._slots = demands.SlotBook(engine)
        self._round = 0
        # Why the latest round made no plan; empty when it did.
        self.problem = ""

    @property
    def interval_s(self) -> float:
        return self._settings.interval_s

    async def close(self) -> None:
        await self._process.end()

    async def round(self) -> None:
        """One round, while this replica leads. Raises StateUnavailable."""
        epoch = self._leader.epoch
        if epoch is None:
            self._forecasts.forget()
            await self._process.end()
            return
        control = await plans.control(self._engine)
        if control.mode is Mode.OFF:
            await self._process.end()
            return
        specs = await plans.engine_specs(self._engine)
        problem = await self._look(epoch, specs)
        if not problem.nodes or not problem.pools:
            return
        try:
            plan = await self._process.solve(problem)
        except PlanNotMade as error:
            self._metrics.plan_rounds.add((str(error.failure),))
            self.problem = str(error)
            log.error(  # noqa: TRY400 - the traceback says nothing
                "plan_not_made", extra={"fields": {"why": str(error)}}
            )
            return
        self._metrics.plan_rounds.add(("planned",))
        self.problem = ""
        moves = new_moves(plan.moves, self._fleet.catalog, specs, self._engines())
        record = await self._store(epoch, plan, moves)
        if record is None:
            return
        self._round += 1
        await self._publish(epoch, record, plan, problem)
        if control.mode is Mode.ACT and not control.is_paused:
            await self._begin(epoch, record, plan, moves)

    # ------------------------------------------------------------ reading

    async def _look(self, epoch: int, specs: Specs) -> Problem:
        policy, fleet = self._policy(), self._fleet
        seen = await demands.look(self._engine)
        written = await self._slots.close(epoch, seen.at, fleet.catalog, policy)
        fleet_seen = see_fleet(
            fleet, await catalog.list_engines(self._engine), specs, self._settings.growth
        )
        expected = await self._forecasts.expect(epoch, seen, written, _ahead_s(fleet_seen))
        standing = await plans.newest(self._engine)
        models = frozenset(pool.model for pool in fleet_seen.pools)
        return make_problem(
            fleet_seen,
            demands.demands(seen, expected, self._forecasts.usual, fleet.catalog, policy),
            now_s=seen.at.timestamp(),
            limits=Limits(solve_s_max=self._settings.solve_s_max),
            held=() if standing is None else _held(standing),
            stretches=self._stretches(policy, models),
            recent=demands.recent_workflows(seen, fleet.catalog, policy, models),
        )

    def _stretches(self, policy: Policy, models: frozenset[ModelName]) -> tuple[Stretch, ...]:
        """Where the last minutes say nothing: all that policy allows, and a cautious one for work that waits."""
        admission = policy.bundle.admission
        return tuple(
            Stretch(
                model=model,
                ratio=admission.tpot_stretch_ratio_max,
                deferrable_ratio=stretch_first(
                    admission.tpot_stretch_ratio_min, admission.tpot_stretch_ratio_max
                ),
            )
            for model in sorted(models)
        )

    def _engines(self) -> dict[NodeId, list[EngineId]]:
        return {node.id: list(node.engines) for node in self._fleet.nodes.values()}

    # ------------------------------------------------------------ what came of it

    async def _store(self, epoch: int, plan: Plan, moves: list[NewMove]) -> PlanRecord | None:
        document = {
            "plan": _builtins(plan),
            "not_executable": {
                str(move.number): move.detail
                for move in moves
                if move.state is MoveState.NOT_EXECUTABLE
            },
        }
        record = await plans.record(
            self._engine,
            epoch=epoch,
            digest=digest_of(plan),
            problem_digest=plan.problem_digest,
            status=str(plan.status),
            document=document,
        )
        if record is not None and record.made_at == record.confirmed_at:
            log.info(
                "plan_made",
                extra={
                    "fields": {
                        "revision": record.revision,
                        "status": str(plan.status),
                        "moves": len(plan.moves),
                    }
                },
            )
            await plans.forget_old(self._engine)
        return record

    async def _publish(self, epoch: int, record: PlanRecord, plan: Plan, problem: Problem) -> None:
        """Tell all replicas. What can not be told now is told by the next round."""
        made_ms = int(self._clock_ms())
        told = _plan_message(epoch, self._round, made_ms, record, plan)
        prices = _prices_message(
            epoch,
            self._round,
            made_ms,
            int(self._settings.interval_s * PRICES_ROUNDS_MAX * MS_PER_S),
            plan,
            problem,
        )
        # The leader does not depend on the bus to know its own plan.
        self._view.take_plan(told)
        self._view.take_prices(prices)
        try:
            await self._bus.keep(subjects.CONTROL_PLAN, encode(told))
            await self._bus.keep(subjects.CONTROL_PRICES, encode(prices))
        except (BusUnavailable, ProtocolError) as error:
            log.warning("plan_not_told", extra={"fields": {"why": str(error)}})

    async def _begin(
        self, epoch: int, record: PlanRecord, plan: Plan, moves: list[NewMove]
    ) -> None:
        """Let the moves begin, unless there are none, others are under way, or the last ones failed."""
        if plan.status is PlanStatus.FAILED or record.state is not PlanState.PROPOSED:
            return
        if all(move.state is MoveState.NOT_EXECUTABLE for move in moves):
            return
        if await plans.applying(self._engine) is not None:
            return
        ended = await plans.last_ended(self._engine)
        if ended is not None and ended[0] is PlanState.FAILED and ended[1] < FAILED_PAUSE_S:
            return
        try:
            await plans.apply(
                self._engine,
                record.revision,
                moves,
                author=self._author,
                reason="the planner acts by itself",
                age_s_max=APPLY_AGE_S_MAX,
                epoch=epoch,
            )
        except PlanConflict as error:
            log.info("plan_not_begun", extra={"fields": {"why": str(error)}})


def planner_loops(
    planner: PlannerLoop, moves: PlanMoves, view: PlanView
) -> list[Coroutine[None, None, None]]:
    """The loops of a replica for plans: rounds, moves, and the end of old prices."""

    async def rounds() -> None:
        # Nothing is known of a fleet that has just begun to speak.
        await asyncio.sleep(planner.interval_s)
        await every(planner.interval_s, "planner", planner.round)

    async def expire() -> None:
        view.expire()

    return [
        rounds(),
        every(MOVES_INTERVAL_S, "plan_moves", moves.advance),
        every(EXPIRE_INTERVAL_S, "plan_prices", expire),
    ]


def plan_of(record: PlanRecord) -> Plan:
    """The plan in a stored document. Raises ValueError when another version wrote it."""
    return from_builtins(Plan, record.document["plan"])


def digest_of(plan: Plan) -> str:
    """Names what a plan wants: the same for two rounds that come to the same fleet and moves."""
    wants = {
        "engines": [
            [one.model, one.gpu_type, one.gpus, str(one.role), one.region, one.desired]
            for one in plan.desired
        ],
        "nodes": [[one.region, one.gpu_type, one.gpus, one.desired] for one in plan.desired_nodes],
        "moves": [
            [
                str(one.kind),
                one.node_id,
                # Each round names the engines that it would load anew.
                None if one.kind is MoveKind.LOAD else one.engine_id,
                one.model,
                None if one.role is None else str(one.role),
                one.gpus,
                list(one.after),
            ]
            for one in plan.moves
        ],
        "is_failed": plan.status is PlanStatus.FAILED,
    }
    return hashlib.sha256(json.dumps(wants, sort_keys=True).encode()).hexdigest()


def _builtins(plan: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(plan)))  # type: ignore[no-any-return]


def _held(record: PlanRecord) -> tuple[Held, ...]:
    try:
        return plan_of(record).held
    except ValueError:
        # Another version of this program wrote it: the plan begins anew.
        return ()


def _ahead_s(seen: FleetSeen) -> float:
    """When a move that is made now takes effect: the slowest load, and a node's coming where one may."""
    load_s = max((pool.load_s for pool in seen.pools), default=0.0)
    provision_s = max(
        (shape.provision_s for shape in seen.shapes if shape.nodes_more_max > 0), default=0.0
    )
    return load_s + provision_s


def _plan_message(
    epoch: int, number: int, made_ms: int, record: PlanRecord, plan: Plan
) -> ControlPlan:
    return ControlPlan(
        epoch=epoch,
        round=number,
        revision=record.revision,
        made_ms=made_ms,
        status=str(plan.status),
        gap_ratio=plan.gap_ratio,
        solve_s=plan.solve_s,
        moves=len(plan.moves),
        engines=[
            DesiredEngines(
                model=one.model,
                gpu_type=one.gpu_type,
                gpus=one.gpus,
                role=str(one.role),
                region=one.region,
                desired=one.desired,
                actual=one.actual,
            )
            for one in plan.desired[:TOLD_MAX]
        ],
        nodes=[
            DesiredNodes(
                region=one.region,
                gpu_type=one.gpu_type,
                gpus=one.gpus,
                desired=one.desired,
                actual=one.actual,
            )
            for one in plan.desired_nodes[:TOLD_MAX]
        ],
    )


def _prices_message(
    epoch: int, number: int, made_ms: int, ttl_ms: int, plan: Plan, problem: Problem
) -> ControlPrices:
    """Pools that are not short cost their rent, so only those that are, are named."""
    short = sorted(
        (
            pool
            for pool in plan.prices.pools
            if pool.micro_usd_per_gpu_ms > 0.0 or pool.micro_usd_per_kv_token_s > 0.0
        ),
        key=lambda pool: -pool.micro_usd_per_gpu_ms,
    )
    return ControlPrices(
        epoch=epoch,
        round=number,
        made_ms=made_ms,
        ttl_ms=ttl_ms,
        pools=[
            PoolPrice(
                model=pool.model,
                gpu_type=pool.gpu_type,
                gpus=pool.gpus,
                role=str(pool.role),
                region=pool.region,
                micro_usd_per_gpu_ms=pool.micro_usd_per_gpu_ms,
                micro_usd_per_kv_token_s=pool.micro_usd_per_kv_token_s,
            )
            for pool in short[:TOLD_MAX]
        ],
        classes=[
            ClassPrice(
                class_id=one.class_id,
                model=one.model,
                bid_micro_usd=one.bid_micro_usd,
                served_ratio=one.served_ratio,
            )
            for one in plan.prices.classes[:TOLD_MAX]
        ],
        models=_paces(plan, problem)[:TOLD_MAX],
    )


def _paces(plan: Plan, problem: Problem) -> list[ModelPace]:
    """What a replica needs of each model; a call's bid is that of the average call of its model."""
    bids = {one.class_id: one.bid_micro_usd for one in plan.prices.classes}
    calls: dict[ModelName, float] = {}
    worth: dict[ModelName, float] = {}
    for demand in problem.demands:
        calls_per_s = demand.arrivals_per_s_forecast * demand.steps
        calls[demand.model] = calls.get(demand.model, 0.0) + calls_per_s
        bid = bids.get(demand.class_id, 0.0)
        worth[demand.model] = worth.get(demand.model, 0.0) + demand.arrivals_per_s_forecast * bid
    return [
        ModelPace(
            model=stretch.model,
            ratio=stretch.ratio,
            deferrable_ratio=stretch.deferrable_ratio,
            bid_micro_usd_per_call=worth.get(stretch.model, 0.0) / calls[stretch.model]
            if calls.get(stretch.model)
            else 0.0,
            calls_per_s=calls.get(stretch.model, 0.0),
        )
        for stretch in plan.stretches
    ]
