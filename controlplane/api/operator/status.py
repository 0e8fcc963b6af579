"""The state of one replica on one screen, and the invariants over all of PostgreSQL."""

from importlib.metadata import version

from fastapi import APIRouter

from controlplane.api.health import readiness_problems
from controlplane.api.operator.tenants import TenantAnswer, tenants_page
from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import LIST_LIMIT_MAX, Answer
from controlplane.store import overview, records

router = APIRouter(tags=["status"])


class Gauges(Answer):
    """What this replica has under way; all of it returns to zero when nothing runs."""

    calls_in_flight: int
    calls_waiting: int
    seats_taken: int
    kv_tokens_taken: int
    prefill_tokens_pending: int
    workflow_calls_in_flight: int


class JournalStatus(Answer):
    entries: int
    is_full: bool


class Status(Answer):
    """`are_credits_within_capacity`: no engine lent this replica more than it has."""

    version: str
    replica_id: str
    is_ready: bool
    problems: list[str]
    is_leader: bool
    is_bus_connected: bool
    catalog_revision: int
    policy_revision: str
    nodes_heard: int
    nodes_declared: int
    engines_accepting: int
    engines_known: int
    workflows_running: int
    gauges: Gauges
    are_credits_within_capacity: bool
    journal: JournalStatus
    tenants: list[TenantAnswer]


class Invariants(Answer):
    """Each invariant that can be asked of PostgreSQL, and whether it holds now."""

    invariants: dict[str, bool]


@router.get("/status")
async def status(_: ViewerDep, services: ServicesDep) -> Status:
    """The state of this replica, its fleet and the tenants' money."""
    problems = await readiness_problems(services)
    fleet = services.fleet
    rows = [entry.row for entry in fleet.entries()]
    return Status(
        version=version("headway"),
        replica_id=services.replica_id,
        is_ready=not problems,
        problems=problems,
        is_leader=services.leader.epoch is not None,
        is_bus_connected=services.bus.is_connected,
        catalog_revision=fleet.catalog.revision,
        policy_revision=services.gate.policy_revision,
        nodes_heard=sum(node.heard_ms > 0 for node in fleet.nodes.values()),
        nodes_declared=len(fleet.catalog.nodes),
        engines_accepting=sum(row.is_accepting for row in rows),
        engines_known=len(rows),
        workflows_running=await overview.count_running_workflows(services.engine),
        gauges=gauges_of(services),
        are_credits_within_capacity=all(
            row.seats_lent <= row.seats_capacity and row.kv_tokens_lent <= row.kv_tokens_capacity
            for row in rows
        ),
        journal=JournalStatus(
            entries=services.journal.entries_waiting, is_full=services.journal.is_full
        ),
        tenants=(await tenants_page(services, LIST_LIMIT_MAX, None)).data,
    )


def gauges_of(services: Services) -> Gauges:
    """What is under way at this instant."""
    rows = [entry.row for entry in services.fleet.entries()]
    return Gauges(
        calls_in_flight=len(services.gate.in_flight),
        calls_waiting=services.gate.pump.waiting,
        seats_taken=sum(row.seats_taken for row in rows),
        kv_tokens_taken=sum(row.kv_tokens_taken for row in rows),
        prefill_tokens_pending=sum(row.prefill_tokens_pending for row in rows),
        workflow_calls_in_flight=services.gate.workflows.in_flight(),
    )


@router.get("/invariants")
async def invariants(_: ViewerDep, services: ServicesDep) -> Invariants:
    """Check the invariants over all of PostgreSQL. Reads every open request and every account."""
    return Invariants(invariants=await records.invariants(services.engine))
