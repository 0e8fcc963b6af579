"""Nodes: what is declared, whether the agent is heard, and taking them out of service."""

from datetime import datetime

from fastapi import APIRouter, Response

from controlplane.api.entity_tags import show_version
from controlplane.api.idempotency import IdempotencyKey
from controlplane.api.operator.commands import CommandAnswer, Drain
from controlplane.api.security import OperatorSeenChangeDep, ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Cursor,
    Filter,
    Identifier,
    Limit,
    Page,
    page_of,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import NodeId
from controlplane.runtime.fleet_state import EngineEntry
from controlplane.store import catalog, commands
from controlplane.store.audit import Change
from controlplane.store.catalog import NodeRecord
from dataplane.protocol.messages import CommandKind, EngineState

_ANSWERING = frozenset({EngineState.SERVING, EngineState.DRAINING})

router = APIRouter(prefix="/nodes", tags=["nodes"])


class GpuAnswer(Answer):
    """What the driver says of one GPU. `fault` says why it can not be trusted, empty when it can."""

    index: int
    uuid: str
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilisation_ratio: float
    temperature_c: int
    ecc_uncorrected: int
    xid: int
    fault: str


class NodeAnswer(Answer):
    """`is_heard`: this replica hears the node's agent now. `engines` counts those it declared, `calls`
    those that run on them, and `devices` are its GPUs where it has a driver.
    """

    id: str
    region: str
    gpu_type: str
    gpus: int
    address: str
    is_cordoned: bool
    is_heard: bool
    agent_epoch: int
    engines: int
    calls: int
    devices: list[GpuAnswer]
    last_seen_at: datetime | None
    created_at: datetime


class Drained(Answer):
    """The node as it is now, and the commands that its agent was sent."""

    node: NodeAnswer
    commands: list[CommandAnswer]


@router.get("")
async def list_nodes(
    _: ViewerDep,
    services: ServicesDep,
    *,
    region: Filter = None,
    gpu_type: Filter = None,
    is_cordoned: bool | None = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[NodeAnswer]:
    """List nodes, newest first."""
    found = await catalog.list_nodes(
        services.engine,
        region=region,
        gpu_type=gpu_type,
        is_cordoned=is_cordoned,
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, lambda record: _answer(services, record))


@router.get("/{node_id}")
async def get_node(
    node_id: Identifier, _: ViewerDep, services: ServicesDep, response: Response
) -> NodeAnswer:
    """One node with its GPUs."""
    return _shown(services, await _record(services, NodeId(node_id)), response)


@router.post("/{node_id}/cordon")
async def cordon(
    node_id: Identifier, by: OperatorSeenChangeDep, services: ServicesDep, response: Response
) -> NodeAnswer:
    """Send nothing new to a node. What runs there goes on."""
    return await _set_cordon(services, by, NodeId(node_id), response, is_cordoned=True)


@router.post("/{node_id}/uncordon")
async def uncordon(
    node_id: Identifier, by: OperatorSeenChangeDep, services: ServicesDep, response: Response
) -> NodeAnswer:
    """Let a node take work again."""
    return await _set_cordon(services, by, NodeId(node_id), response, is_cordoned=False)


@router.post("/{node_id}/drain")
async def drain(
    node_id: Identifier,
    by: OperatorSeenChangeDep,
    services: ServicesDep,
    response: Response,
    body: Drain | None = None,
    idempotency_key: IdempotencyKey = None,
) -> Drained:
    """Cordon a node and tell its agent to drain every engine."""
    node = await _set_cordon(services, by, NodeId(node_id), response, is_cordoned=True)
    told = [
        await commands.enqueue(
            services.engine,
            node_id=NodeId(node_id),
            engine_id=engine.id,
            kind=CommandKind.DRAIN,
            deadline_s=(body or Drain()).deadline_s,
            command_id=None
            if idempotency_key is None
            else commands.id_of_call(by.actor, f"drain {engine.id} {idempotency_key}"),
            by=by,
        )
        for engine in await catalog.list_engines(services.engine, NodeId(node_id))
        if engine.state != EngineState.STOPPED
    ]
    return Drained(node=node, commands=[CommandAnswer.model_validate(command) for command in told])


async def _set_cordon(
    services: Services, by: Change, node_id: NodeId, response: Response, *, is_cordoned: bool
) -> NodeAnswer:
    await catalog.set_cordon(services.engine, node_id, is_cordoned=is_cordoned, by=by)
    return _shown(services, await _record(services, node_id), response)


def _shown(services: Services, record: NodeRecord, response: Response) -> NodeAnswer:
    show_version(response, catalog.version_of_node(record))
    return _answer(services, record)


async def _record(services: Services, node_id: NodeId) -> NodeRecord:
    record = await catalog.get_node(services.engine, node_id)
    if record is None:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no node `{node_id}`"))
    return record


def _calls(entry: EngineEntry) -> int:
    """As its agent counted them while it drained it, else as it reports them."""
    if entry.facts.state is EngineState.DRAINING and entry.progress is not None:
        return entry.progress.calls_left
    if entry.facts.state not in _ANSWERING:
        return 0
    return entry.row.running + entry.row.waiting


def _answer(services: Services, record: NodeRecord) -> NodeAnswer:
    heard = services.fleet.nodes.get(record.id)
    return NodeAnswer(
        id=record.id,
        region=record.region,
        gpu_type=record.gpu_type,
        gpus=record.gpus,
        address=record.address,
        is_cordoned=record.is_cordoned,
        is_heard=heard is not None and heard.heard_ms > 0,
        agent_epoch=record.agent_epoch,
        engines=record.engines,
        calls=sum(_calls(entry) for entry in heard.engines.values()) if heard else 0,
        devices=[GpuAnswer.model_validate(gpu) for gpu in heard.gpus] if heard else [],
        last_seen_at=record.last_seen_at,
        created_at=record.created_at,
    )
