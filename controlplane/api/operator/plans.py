"""Plans of the fleet: what the planner wants and why, what became of it, and what it may do."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import Field

from controlplane.api.entity_tags import IfMatch, generation_of, moved_told, show_version
from controlplane.api.security import AdminDep, OperatorDep, ServicesDep, ViewerDep
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Detail,
    Limit,
    Page,
    page_of,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.runtime.demand import slot_of
from controlplane.runtime.plan_steps import new_moves
from controlplane.runtime.planner_loop import APPLY_AGE_S_MAX, plan_of
from controlplane.runtime.planner_problem import speeds_of
from controlplane.runtime.procurement import HOURS_MAX, demand_curve
from controlplane.store import demand, plans
from controlplane.store.plans import (
    Mode,
    MoveRecord,
    PlanConflict,
    PlannerControl,
    PlannerMoved,
    PlanRecord,
    PlanState,
)

router = APIRouter(prefix="/plans", tags=["plans"])

Revision = Annotated[int, Path(ge=1, le=2**62, description="Number of a plan.")]
Why = Annotated[Detail, Field(min_length=1)]
# What the author of a change saw; it is refused when the planner has changed since.
Generation = Annotated[int | None, Field(ge=0)]


class Change(Body):
    """Why something is changed; it stands in the audit log."""

    reason: Why
    generation: Generation = None


class ModeChange(Change):
    mode: Annotated[Mode, Field(strict=False)]


class Application(Body):
    reason: Why


class ControlAnswer(Answer):
    """`off`: no plans. `propose`: plans and prices, no move unless one is asked for. `act`: moves are
    carried out. While `is_paused`, no move begins; those that run are watched to their end.
    """

    generation: int
    mode: Mode
    is_paused: bool
    changed_by: str
    reason: str
    changed_at: datetime


class PlanSummary(Answer):
    """`confirmed_at`: when the latest round came to the same. Money in micro-dollars."""

    revision: int
    epoch: int
    status: str
    state: str
    moves: int
    moves_not_executable: int
    moves_waiting: int
    fleet_micro_usd_per_hour: float
    gap_ratio: float
    solve_s: float
    binding: list[str]
    made_at: datetime
    confirmed_at: datetime
    applied_by: str | None
    ended_at: datetime | None


class MoveAnswer(Answer):
    """One move of a plan. `state` is proposed until the plan is applied."""

    number: int
    kind: str
    node_id: str
    engine_id: str
    model: str | None
    role: str | None
    reason: str
    gain_micro_usd_per_hour: float
    duration_s: float
    after: list[int]
    state: str
    detail: str
    began_at: datetime | None
    ended_at: datetime | None


class PlanAnswer(PlanSummary):
    """A plan in full. `plan` has its numbers as the planner gave them: desired engines and nodes, prices,
    how far engines may be filled, the part of each class that a pool serves.
    """

    digest: str
    problem_digest: str
    plan: dict[str, Any]
    move_states: list[MoveAnswer]


class CurrentAnswer(Answer):
    """What the planner may do, its newest plan, and the one that is being applied. `problem`: why the
    latest round of the leader made none, empty when it did or another replica leads. `age_s` counts from
    the latest round that this replica heard of.
    """

    control: ControlAnswer
    is_leader: bool
    problem: str
    age_s: float | None
    newest: PlanAnswer | None
    applying: PlanAnswer | None


class DesiredEnginesAnswer(Answer):
    model: str
    gpu_type: str
    gpus: int
    role: str
    region: str
    desired: int
    actual: int


class DesiredNodesAnswer(Answer):
    region: str
    gpu_type: str
    gpus: int
    desired: int
    actual: int


class DesiredAnswer(Answer):
    """For an autoscaler: how many nodes of each shape the newest plan wants, and which engines on them.
    Follow it only while `age_s` is small.
    """

    revision: int
    made_at: datetime
    age_s: float
    status: str
    nodes: list[DesiredNodesAnswer]
    engines: list[DesiredEnginesAnswer]


class ProcurementAnswer(Answer):
    """Work of each hour from `started_at` on, in GPUs of type `unit` kept busy; an hour counts as its
    busiest quarter. `work_per_gpu` is what one GPU of each type does, in the same unit.
    """

    started_at: datetime
    unit: str
    work: list[float]
    work_per_gpu: dict[str, float]
    gpus_per_node: int
    classes: int
    classes_left_out: int


@router.get("")
async def list_plans(
    _: ViewerDep,
    services: ServicesDep,
    *,
    state: PlanState | None = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[PlanSummary]:
    """List plans, newest first. A plan is listed once for as long as rounds come to the same."""
    found = await plans.list_plans(services.engine, state=state, limit=limit, cursor=cursor)
    return page_of(found, lambda record: PlanSummary(**_summary(record)))


@router.get("/current")
async def current(_: ViewerDep, services: ServicesDep, response: Response) -> CurrentAnswer:
    """What the planner may do, what it wants, and what is being done of it."""
    control = await plans.control(services.engine)
    show_version(response, str(control.generation))
    newest = await plans.newest(services.engine)
    applying = await plans.applying(services.engine)
    return CurrentAnswer(
        control=_control(control),
        is_leader=services.leader.epoch is not None,
        problem=services.planner.problem,
        age_s=services.plan_view.age_s(),
        newest=None if newest is None else await _answer(services, newest),
        applying=None if applying is None else await _answer(services, applying),
    )


@router.get("/desired", responses={404: {}})
async def desired(_: ViewerDep, services: ServicesDep) -> DesiredAnswer:
    """How many engines and nodes the newest plan wants: what an autoscaler follows."""
    record = await plans.newest(services.engine)
    if record is None:
        raise Refused(Refuse(Reason.NOT_FOUND, "there is no plan yet"))
    document = record.document["plan"]
    return DesiredAnswer(
        revision=record.revision,
        made_at=record.made_at,
        age_s=max(0.0, (datetime.now(UTC) - record.confirmed_at).total_seconds()),
        status=record.status,
        nodes=[DesiredNodesAnswer(**entry) for entry in document["desired_nodes"]],
        engines=[DesiredEnginesAnswer(**entry) for entry in document["desired"]],
    )


@router.get("/procurement", responses={404: {}})
async def procurement(_: ViewerDep, services: ServicesDep) -> ProcurementAnswer:
    """The demand of the last two weeks as work per hour: what `headway plan procure` plans from."""
    fleet = services.fleet
    since = datetime.now(UTC) - timedelta(hours=HOURS_MAX)
    slots = [slot_of(record) for record in await demand.slots(services.engine, since)]
    specs = await plans.engine_specs(services.engine)
    curve = await asyncio.to_thread(
        demand_curve,
        slots,
        fleet.catalog,
        services.gate.policies.policy,
        speeds_of(fleet, specs),
    )
    if curve is None:
        raise Refused(
            Refuse(
                Reason.NOT_FOUND,
                "no demand is written down yet that a declared GPU type could serve in time; the leader"
                " writes a slot every quarter of an hour",
            )
        )
    return ProcurementAnswer.model_validate(curve)


@router.get("/{revision:int}")
async def get_plan(revision: Revision, _: ViewerDep, services: ServicesDep) -> PlanAnswer:
    """Show a plan with its moves and what became of them."""
    return await _answer(services, await _found(services, revision))


@router.post("/mode")
async def set_mode(
    body: ModeChange,
    operator: AdminDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> ControlAnswer:
    """Let the planner rest, propose, or act."""
    with _conflicts_told(), moved_told(if_match, PlannerMoved):
        changed = await plans.set_control(
            services.engine,
            mode=body.mode,
            author=f"key:{operator.key_id}",
            reason=body.reason,
            generation=generation_of(if_match, body.generation),
        )
    return _shown(changed, response)


@router.post("/pause")
async def pause(
    body: Change,
    operator: OperatorDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> ControlAnswer:
    """Begin no further move. What runs is watched to its end."""
    return await _set_paused(services, body, operator.key_id, response, if_match, is_paused=True)


@router.post("/resume")
async def resume(
    body: Change,
    operator: OperatorDep,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> ControlAnswer:
    """Let moves begin again."""
    return await _set_paused(services, body, operator.key_id, response, if_match, is_paused=False)


@router.post("/{revision:int}/apply", status_code=202)
async def apply(
    revision: Revision, body: Application, operator: OperatorDep, services: ServicesDep
) -> PlanAnswer:
    """Carry out the moves of a plan that the planner proposed."""
    record = await _found(services, revision)
    with _conflicts_told():
        try:
            plan = plan_of(record)
        except ValueError as error:
            raise PlanConflict(f"plan {revision} was written by another version") from error
        if (await plans.control(services.engine)).mode is Mode.OFF:
            raise PlanConflict("the planner is off; `headway plan mode propose` lets it plan again")
        fleet = services.fleet
        moves = new_moves(
            plan.moves,
            fleet.catalog,
            await plans.engine_specs(services.engine),
            {node.id: list(node.engines) for node in fleet.nodes.values()},
        )
        applied = await plans.apply(
            services.engine,
            revision,
            moves,
            author=f"key:{operator.key_id}",
            reason=body.reason,
            age_s_max=APPLY_AGE_S_MAX,
        )
    return await _answer(services, applied)


async def _set_paused(
    services: ServicesDep,
    body: Change,
    key_id: str,
    response: Response,
    if_match: str | None,
    *,
    is_paused: bool,
) -> ControlAnswer:
    with _conflicts_told(), moved_told(if_match, PlannerMoved):
        changed = await plans.set_control(
            services.engine,
            is_paused=is_paused,
            author=f"key:{key_id}",
            reason=body.reason,
            generation=generation_of(if_match, body.generation),
        )
    return _shown(changed, response)


async def _found(services: ServicesDep, revision: int) -> PlanRecord:
    record = await plans.get_plan(services.engine, revision)
    if record is None:
        raise Refused(
            Refuse(
                Reason.NOT_FOUND,
                f"there is no plan {revision}; `headway plan history` lists them",
            )
        )
    return record


async def _answer(services: ServicesDep, record: PlanRecord) -> PlanAnswer:
    done = {move.number: move for move in await plans.moves_of(services.engine, record.revision)}
    told = record.document["not_executable"]
    return PlanAnswer(
        **_summary(record),
        digest=record.digest,
        problem_digest=record.problem_digest,
        plan=record.document["plan"],
        move_states=[
            _move(move, done.get(move["number"]), told.get(str(move["number"]), ""))
            for move in record.document["plan"]["moves"]
        ],
    )


def _move(move: dict[str, Any], done: MoveRecord | None, not_executable: str) -> MoveAnswer:
    state = "not_executable" if not_executable else "proposed"
    return MoveAnswer(
        number=move["number"],
        kind=move["kind"],
        node_id=move["node_id"],
        engine_id=move["engine_id"] or "",
        model=move["model"],
        role=move["role"],
        reason=move["reason"],
        gain_micro_usd_per_hour=move["gain_micro_usd_per_hour"],
        duration_s=move["duration_s"],
        after=move["after"],
        state=state if done is None else str(done.state),
        detail=not_executable if done is None else done.detail,
        began_at=None if done is None else done.began_at,
        ended_at=None if done is None else done.ended_at,
    )


def _summary(record: PlanRecord) -> dict[str, Any]:
    plan = record.document["plan"]
    return {
        "revision": record.revision,
        "epoch": record.epoch,
        "status": record.status,
        "state": str(record.state),
        "moves": len(plan["moves"]),
        "moves_not_executable": len(record.document["not_executable"]),
        "moves_waiting": plan["moves_waiting"],
        "fleet_micro_usd_per_hour": plan["fleet_micro_usd_per_hour"],
        "gap_ratio": plan["gap_ratio"],
        "solve_s": plan["solve_s"],
        "binding": plan["binding"],
        "made_at": record.made_at,
        "confirmed_at": record.confirmed_at,
        "applied_by": record.applied_by,
        "ended_at": record.ended_at,
    }


def _shown(control: PlannerControl, response: Response) -> ControlAnswer:
    show_version(response, str(control.generation))
    return _control(control)


def _control(control: PlannerControl) -> ControlAnswer:
    return ControlAnswer.model_validate(control)


@contextmanager
def _conflicts_told() -> Iterator[None]:
    """What does not fit the state of the planner becomes a refusal in the same words."""
    try:
        yield
    except PlanConflict as error:
        raise Refused(Refuse(Reason.CONFLICT, str(error))) from error
