"""Engines: what agents declared joined with what this replica sees now, and commands to their
agents.
"""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import Field, StringConstraints

from controlplane.api.operator.commands import CommandAnswer, Drain
from controlplane.api.security import OperatorChangeDep, ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Limit,
    Page,
    Slug,
)
from controlplane.api.slices import page_by_name
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import EngineId, ModelName, NodeId
from controlplane.store import catalog, commands
from controlplane.store.audit import Change
from controlplane.store.catalog import EngineRecord
from dataplane.protocol.messages import CommandKind, EngineSpec

OPTIONS_MAX = 64
GPUS_MAX = 1_024

router = APIRouter(prefix="/engines", tags=["engines"])

EngineIdentifier = Annotated[str, Path(max_length=127, pattern=r"^[A-Za-z0-9][A-Za-z0-9_/.-]*$")]


class EngineAnswer(Answer):
    """What is lent and taken is this replica's share; the capacity is the engine's whole."""

    id: str
    node_id: str
    region: str
    gpu_type: str
    gpus: int
    model: str
    role: str
    kind: str
    port: int
    state: str
    is_accepting: bool
    is_suspect: bool
    running: int
    waiting: int
    kv_used_ratio: float
    seats_capacity: int
    seats_lent: int
    seats_taken: int
    kv_tokens_capacity: int
    kv_tokens_lent: int
    kv_tokens_taken: int
    updated_at: datetime


class NewEngine(Body):
    """What a node is to run. `options` are settings of the kind, checked by the agent."""

    node_id: Slug
    kind: Slug
    model: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    role: Literal["both", "prefill", "decode"] = "both"
    gpus: Annotated[int, Field(ge=1, le=GPUS_MAX)] = 1
    options: Annotated[dict[str, str | int | float | bool], Field(max_length=OPTIONS_MAX)] = Field(
        default_factory=dict
    )


@router.get("")
async def list_engines(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[EngineAnswer]:
    """List engines by id."""
    known = {record.id: record for record in await catalog.list_engines(services.engine)}
    rows = {entry.row.engine_id: entry.row for entry in services.fleet.entries()}
    names, next_cursor = page_by_name(known, limit, cursor)
    return Page(
        data=[_answer(services, known[name], rows.get(name)) for name in names],
        next_cursor=next_cursor,
    )


@router.post("/{engine_id:path}/load", status_code=202)
async def load(
    engine_id: EngineIdentifier, body: NewEngine, by: OperatorChangeDep, services: ServicesDep
) -> CommandAnswer:
    """Tell a node's agent to start an engine."""
    if ModelName(body.model) not in services.fleet.catalog.models:
        known = ", ".join(services.fleet.catalog.models)
        raise Refused(
            Refuse(Reason.MODEL_NOT_FOUND, f"there is no model `{body.model}`; there are: {known}")
        )
    spec = EngineSpec(
        engine_id=engine_id,
        kind=body.kind,
        model=body.model,
        role=body.role,
        gpus=body.gpus,
        options=dict(body.options),
    )
    return await _tell(services, by, NodeId(body.node_id), engine_id, CommandKind.LOAD, spec=spec)


@router.post("/{engine_id:path}/unload", status_code=202)
async def unload(
    engine_id: EngineIdentifier,
    by: OperatorChangeDep,
    services: ServicesDep,
    body: Drain | None = None,
) -> CommandAnswer:
    """Tell the agent to drain an engine, stop it and forget it."""
    return await _tell_owner(services, by, engine_id, CommandKind.UNLOAD, body)


@router.post("/{engine_id:path}/drain", status_code=202)
async def drain(
    engine_id: EngineIdentifier,
    by: OperatorChangeDep,
    services: ServicesDep,
    body: Drain | None = None,
) -> CommandAnswer:
    """Tell the agent to let an engine finish what runs and take nothing new."""
    return await _tell_owner(services, by, engine_id, CommandKind.DRAIN, body)


@router.post("/{engine_id:path}/stop", status_code=202)
async def stop(
    engine_id: EngineIdentifier, by: OperatorChangeDep, services: ServicesDep
) -> CommandAnswer:
    """Tell the agent to stop an engine at once."""
    return await _tell_owner(services, by, engine_id, CommandKind.STOP, None)


async def _tell_owner(
    services: Services, by: Change, engine_id: str, kind: CommandKind, body: Drain | None
) -> CommandAnswer:
    for record in await catalog.list_engines(services.engine):
        if record.id == engine_id:
            deadline_s = (body or Drain()).deadline_s
            return await _tell(services, by, record.node_id, engine_id, kind, deadline_s=deadline_s)
    raise Refused(Refuse(Reason.NOT_FOUND, f"there is no engine `{engine_id}`"))


async def _tell(
    services: Services,
    by: Change,
    node_id: NodeId,
    engine_id: str,
    kind: CommandKind,
    *,
    deadline_s: float = commands.DEADLINE_S_DEFAULT,
    spec: EngineSpec | None = None,
) -> CommandAnswer:
    record = await commands.enqueue(
        services.engine,
        node_id=node_id,
        engine_id=EngineId(engine_id),
        kind=kind,
        deadline_s=deadline_s,
        spec=spec,
        by=by,
    )
    return CommandAnswer.model_validate(record)


def _answer(services: Services, record: EngineRecord, row: EngineRow | None) -> EngineAnswer:
    node = services.fleet.catalog.nodes.get(record.node_id)
    return EngineAnswer(
        id=record.id,
        node_id=record.node_id,
        region="" if node is None else node.region,
        gpu_type="" if node is None else node.gpu_type,
        gpus=record.gpus,
        model=record.model,
        role=record.role,
        kind=record.kind,
        port=record.port,
        state=record.state,
        is_accepting=row is not None and row.is_accepting,
        is_suspect=row is not None and row.is_suspect,
        running=0 if row is None else row.running,
        waiting=0 if row is None else row.waiting,
        kv_used_ratio=0.0
        if row is None
        else min(1.0, row.kv_tokens_used / max(1, row.kv_tokens_capacity)),
        seats_capacity=record.seats,
        seats_lent=0 if row is None else row.seats_lent,
        seats_taken=0 if row is None else row.seats_taken,
        kv_tokens_capacity=record.kv_tokens,
        kv_tokens_lent=0 if row is None else row.kv_tokens_lent,
        kv_tokens_taken=0 if row is None else row.kv_tokens_taken,
        updated_at=record.updated_at,
    )
