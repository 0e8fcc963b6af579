"""Everything that one screen of an operator shows, in one answer: pools, engines, tenants, workflows, calls,
refusals, breakers, the plan, commands under way, budgets near their end.

Only the parts that are asked for are read.
"""

from collections import Counter
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Final

from fastapi import APIRouter, Query

from controlplane.api.health import own_problems, readiness_problems
from controlplane.api.operator import breakers, engines
from controlplane.api.operator.breakers import BreakerAnswer
from controlplane.api.operator.budgets import BudgetAnswer
from controlplane.api.operator.commands import CommandAnswer
from controlplane.api.operator.engines import EngineAnswer
from controlplane.api.operator.status import Gauges, JournalStatus, gauges_of
from controlplane.api.security import Operator, ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import LIST_LIMIT_DEFAULT, LIST_LIMIT_MAX, Answer, Limit, Text
from controlplane.api.workflow_answers import WorkflowAnswer
from controlplane.api.workflow_answers import answer as workflow_answer
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ModelName, TenantId, WorkflowId
from controlplane.domain.money import usd
from controlplane.domain.outcome import WorkflowState
from controlplane.domain.pool import BreakerState
from controlplane.runtime.call import monotonic_ms
from controlplane.store import commands, operations, overview, plans, workflows
from controlplane.store.workflows import WorkflowRecord

WINDOW_S_DEFAULT: Final = 300
WINDOW_S_MAX: Final = 3_600
# A budget is told of when this much of it is spent.
BUDGET_NEAR_RATIO: Final = 0.8
BUDGETS_SHOWN_MAX: Final = 20
# Calls are listed newest first, so that this costs little: only an idle engine's are looked for to its end.
CALLS_WINDOW_S: Final = 900
# Commands that are looked at for those that have not ended.
COMMANDS_READ_MAX: Final = 200
PERMILLE: Final = 1_000.0

router = APIRouter(tags=["status"])


class Part(StrEnum):
    """What an overview may hold beside the replica's own state. `readiness` has no list of its own: with it
    the schema is looked at too, on a connection of its own, which takes a while.
    """

    POOLS = "pools"
    ENGINES = "engines"
    TENANTS = "tenants"
    WORKFLOWS = "workflows"
    CALLS = "calls"
    REFUSALS = "refusals"
    BREAKERS = "breakers"
    PLAN = "plan"
    COMMANDS = "commands"
    BUDGETS = "budgets"
    READINESS = "readiness"


class ReplicaState(Answer):
    """The replica that answers. `problems` says why it should get no traffic, empty when it should."""

    id: str
    version: str
    is_ready: bool
    problems: list[str]
    is_leader: bool
    is_bus_connected: bool
    catalog_revision: int
    policy_revision: str
    policy_problem: str
    nodes_heard: int
    nodes_declared: int
    engines_accepting: int
    engines_known: int
    workflows_running: int
    gauges: Gauges
    journal: JournalStatus


class PoolAnswer(Answer):
    """The engines of one model as a whole. Ratios reach 1 where nothing more fits.

    Seats bound, taken and promised are this replica's, saturation and KV those of the engines with the
    calls of all replicas. `price_usd_per_s` is what a second of work must be worth to begin, `load_ratio`
    work asked for over what can be done, 0 before either is known. `regions_open` are regions whose
    breaker is open.
    """

    model: str
    engines: int
    engines_accepting: int
    calls_in_flight: int
    calls_waiting: int
    wait_ms: int
    seats_bound: int
    seats_taken: int
    seats_promised: float
    committed_ratio: float
    saturation_ratio: float
    kv_used_ratio: float
    price_usd_per_s: float
    load_ratio: float
    appointments: int
    is_overloaded: bool
    breaker: BreakerState
    regions_open: list[str]
    ramp_ratio: float
    warm_in_ms: int


class TenantActivityAnswer(Answer):
    """Counts of the window; budget as it stands. `calls` were accepted, `calls_refused` were not or had to
    leave the queue. Money in micro-dollars, times in milliseconds.
    """

    id: str
    tenant_class: str
    slo_class: str
    is_disabled: bool
    calls: int
    calls_open: int
    calls_succeeded: int
    calls_failed: int
    calls_refused: int
    workflows_running: int
    settled_micro_usd: int
    ttft_ms_p50: float | None
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int


class CallAnswer(Answer):
    """One accepted call with the engines that it was last placed on; the rest as in the list of requests."""

    id: str
    tenant_id: str
    workflow_id: str | None
    step: int
    model: str
    state: str
    reason: str | None
    is_stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    queue_ms: float | None
    settled_micro_usd: int | None
    reserved_micro_usd: int
    opened_at: datetime
    ended_at: datetime | None
    decode_engine_id: str | None
    prefill_engine_id: str | None


class RefusalsAnswer(Answer):
    """Calls refused for one reason; `share_ratio` of all that were asked for. `example` can be explained.

    `tenant_most`, `model_most` and `rule_most`: whose most of them are, null where that is not recorded.
    """

    reason: str
    calls: int
    share_ratio: float
    tenants: int
    tenant_most: str | None
    model_most: str | None
    rule_most: str | None
    example: str
    last_at: datetime


class PlanState(Answer):
    """The planner: what it may do, and its newest plan, whose members are null before there is one.

    `age_s` counts from the latest round that this replica heard of.
    """

    mode: str
    is_paused: bool
    problem: str
    age_s: float | None
    revision: int | None
    status: str | None
    state: str | None
    moves: int | None
    moves_not_executable: int | None
    fleet_micro_usd_per_hour: float | None
    binding: list[str]


class Overview(Answer):
    """`at` is the server's clock, `window_s` the time that counts are of; parts that were not asked for are null.
    `calls` are the newest of at least the last 15 minutes, of a workflow all.

    `calls_asked` counts calls of the window, accepted or not; null without the part `refusals`.
    """

    at: datetime
    window_s: int
    replica: ReplicaState
    calls_asked: int | None = None
    pools: list[PoolAnswer] | None = None
    engines: list[EngineAnswer] | None = None
    tenants: list[TenantActivityAnswer] | None = None
    workflows: list[WorkflowAnswer] | None = None
    calls: list[CallAnswer] | None = None
    refusals: list[RefusalsAnswer] | None = None
    breakers: list[BreakerAnswer] | None = None
    plan: PlanState | None = None
    commands: list[CommandAnswer] | None = None
    budgets: list[BudgetAnswer] | None = None


Window = Annotated[
    int, Query(ge=10, le=WINDOW_S_MAX, description="Counts are of the last so many seconds.")
]
Only = Annotated[Text | None, Query(max_length=255)]


@router.get("/overview")
async def read_overview(
    operator: ViewerDep,
    services: ServicesDep,
    *,
    part: Annotated[list[Part] | None, Query(description="Parts to read; all if none.")] = None,
    window_s: Window = WINDOW_S_DEFAULT,
    model: Only = None,
    engine: Only = None,
    tenant: Only = None,
    workflow: Only = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
) -> Overview:
    """The state of this replica, its fleet and its callers on one screen.

    `model`, `engine`, `tenant` and `workflow` narrow the parts that list those.
    """
    wanted = set(part or Part)
    view = Overview(
        at=datetime.now(UTC), window_s=window_s, replica=await _replica(services, wanted)
    ).model_dump()
    if Part.POOLS in wanted:
        view["pools"] = [pool for pool in _pools(services) if model in {None, pool.model}]
    if Part.ENGINES in wanted:
        view["engines"] = await _engines(operator, services, model)
    if Part.TENANTS in wanted:
        found = await operations.tenants(services.engine, window_s, limit)
        view["tenants"] = [TenantActivityAnswer.model_validate(record) for record in found]
    if Part.WORKFLOWS in wanted:
        view["workflows"] = await _workflows(services, tenant, workflow, limit)
    if Part.CALLS in wanted:
        calls = await operations.calls(
            services.engine,
            window_s=max(window_s, CALLS_WINDOW_S),
            limit=limit,
            tenant_id=tenant,
            workflow_id=workflow,
            engine_id=engine,
            model=model,
        )
        view["calls"] = [CallAnswer.model_validate(record) for record in calls]
    if Part.REFUSALS in wanted:
        view["calls_asked"], view["refusals"] = await _refusals(services, window_s)
    if Part.BREAKERS in wanted:
        view["breakers"] = await _breakers(operator, services)
    if Part.PLAN in wanted:
        view["plan"] = await _plan(services)
    if Part.COMMANDS in wanted:
        told = await commands.list_commands(services.engine, limit=COMMANDS_READ_MAX)
        view["commands"] = [
            CommandAnswer.model_validate(command)
            for command in told.items
            if command.state in {"pending", "sent"}
        ]
    if Part.BUDGETS in wanted:
        near = await operations.budgets_near_end(
            services.engine, BUDGET_NEAR_RATIO, BUDGETS_SHOWN_MAX
        )
        view["budgets"] = [BudgetAnswer.model_validate(budget) for budget in near]
    return Overview.model_validate(view)


async def _replica(services: Services, wanted: set[Part]) -> ReplicaState:
    """Also without PostgreSQL: then a problem says so, and the rest is still worth seeing."""
    is_asked = Part.READINESS in wanted
    problems = await readiness_problems(services) if is_asked else own_problems(services)
    workflows_running = 0
    try:
        workflows_running = await overview.count_running_workflows(services.engine)
    except StateUnavailable as error:
        if not is_asked:
            problems.append(f"PostgreSQL can not be asked: {error}")
    fleet = services.fleet
    rows = [entry.row for entry in fleet.entries()]
    policies = services.gate.policies
    return ReplicaState(
        id=services.replica_id,
        version=version("headway"),
        is_ready=not problems,
        problems=problems,
        is_leader=services.leader.epoch is not None,
        is_bus_connected=services.bus.is_connected,
        catalog_revision=fleet.catalog.revision,
        policy_revision=services.gate.policy_revision,
        policy_problem=policies.problem,
        nodes_heard=sum(node.heard_ms > 0 for node in fleet.nodes.values()),
        nodes_declared=len(fleet.catalog.nodes),
        engines_accepting=sum(row.is_accepting for row in rows),
        engines_known=len(rows),
        workflows_running=workflows_running,
        gauges=gauges_of(services),
        journal=JournalStatus(
            entries=services.journal.entries_waiting, is_full=services.journal.is_full
        ),
    )


def _pools(services: Services) -> list[PoolAnswer]:
    gate, fleet = services.gate, services.fleet
    now_ms = monotonic_ms()
    in_flight = Counter(ticket.request.model for ticket in gate.in_flight.values())
    loads = dict(gate.loads.all())
    open_regions: dict[ModelName, list[str]] = {}
    for region in fleet.regions():
        if region.breaker.shown is BreakerState.OPEN:
            open_regions.setdefault(region.model, []).append(region.region)
    answers = []
    for model in sorted(fleet.catalog.models):
        facts, view, load = (
            fleet.pool(model, now_ms),
            gate.desk.view(model, now_ms),
            loads.get(model),
        )
        answers.append(
            PoolAnswer(
                model=model,
                engines=facts.engines,
                engines_accepting=facts.engines_accepting,
                # Those that wait are under way too.
                calls_in_flight=max(0, in_flight[model] - view.queue_depth),
                calls_waiting=view.queue_depth,
                wait_ms=view.queue_wait_ms,
                seats_bound=facts.seats_bound_total,
                seats_taken=facts.seats_taken_total,
                seats_promised=0.0 if load is None else load.commitments.seats(),
                committed_ratio=0.0 if load is None else load.committed_ratio,
                saturation_ratio=facts.saturation_permille / PERMILLE,
                kv_used_ratio=facts.kv_used_permille / PERMILLE,
                price_usd_per_s=0.0 if load is None else usd(load.price_micro_usd_per_s),
                load_ratio=0.0 if load is None else load.load_ratio,
                appointments=0 if load is None else len(load.appointments),
                is_overloaded=view.is_overloaded,
                breaker=facts.breaker,
                regions_open=open_regions.get(model, []),
                ramp_ratio=facts.ramp_ratio,
                warm_in_ms=facts.warm_in_ms,
            )
        )
    return answers


async def _engines(operator: Operator, services: Services, model: str | None) -> list[EngineAnswer]:
    page = await engines.list_engines(operator, services, limit=LIST_LIMIT_MAX)
    return [engine for engine in page.data if model in {None, engine.model}]


async def _workflows(
    services: Services, tenant: str | None, workflow: str | None, limit: int
) -> list[WorkflowAnswer]:
    """One, those of a tenant, or the running ones of all; newest first."""
    records: list[WorkflowRecord]
    if workflow is not None:
        one = await workflows.get(services.engine, WorkflowId(workflow), None)
        records = [] if one is None else [one]
    else:
        page = await workflows.list_workflows(
            services.engine,
            tenant=None if tenant is None else TenantId(tenant),
            state=WorkflowState.RUNNING if tenant is None else None,
            limit=limit,
        )
        records = list(page.items)
    return [workflow_answer(record) for record in records]


async def _refusals(services: Services, window_s: int) -> tuple[int, list[RefusalsAnswer]]:
    asked, counts = await operations.refusals(services.engine, window_s)
    return asked, [
        RefusalsAnswer(
            reason=count.reason,
            calls=count.calls,
            share_ratio=min(1.0, count.calls / max(1, asked)),
            tenants=count.tenants,
            tenant_most=count.tenant_most,
            model_most=count.model_most,
            rule_most=count.rule_most,
            example=count.example,
            last_at=count.last_at,
        )
        for count in counts
    ]


async def _breakers(operator: Operator, services: Services) -> list[BreakerAnswer]:
    """Those that are not closed, and those that operators hold."""
    page = await breakers.list_breakers(operator, services, LIST_LIMIT_MAX, None)
    return [
        breaker
        for breaker in page.data
        if breaker.state is not BreakerState.CLOSED or breaker.held is not None
    ]


async def _plan(services: Services) -> PlanState:
    control = await plans.control(services.engine)
    newest = await plans.newest(services.engine)
    plan = None if newest is None else newest.document["plan"]
    return PlanState(
        mode=str(control.mode),
        is_paused=control.is_paused,
        problem=services.planner.problem,
        age_s=services.plan_view.age_s(),
        revision=None if newest is None else newest.revision,
        status=None if newest is None else newest.status,
        state=None if newest is None else str(newest.state),
        moves=None if plan is None else len(plan["moves"]),
        moves_not_executable=None if newest is None else len(newest.document["not_executable"]),
        fleet_micro_usd_per_hour=None if plan is None else plan["fleet_micro_usd_per_hour"],
        binding=[] if plan is None else plan["binding"],
    )
