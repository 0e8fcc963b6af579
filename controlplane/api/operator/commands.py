"""What agents were told, and what became of it."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Filter,
    Identifier,
    Limit,
    Page,
    page_of,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused
from controlplane.domain.ids import CommandId, EngineId, NodeId
from controlplane.store import commands

DRAIN_S_MAX = 3_600

router = APIRouter(prefix="/commands", tags=["commands"])


class Drain(Body):
    """Seconds that running work may take before it is ended."""

    deadline_s: Annotated[float, Field(ge=0, le=DRAIN_S_MAX)] = commands.DEADLINE_S_DEFAULT


class ProgressAnswer(Answer):
    """`done_ratio` is the part of the phase that is done, null where nothing tells it; `expected_ms` what
    the same took before, 0 when that was not seen.
    """

    phase: str
    done_ratio: float | None
    elapsed_ms: int
    expected_ms: int
    calls_left: int


class CommandAnswer(Answer):
    id: str
    node_id: str
    engine_id: str
    kind: str
    state: str
    detail: str
    progress: ProgressAnswer | None
    created_at: datetime
    sent_at: datetime | None
    ended_at: datetime | None


@router.get("")
async def list_commands(
    _: ViewerDep,
    services: ServicesDep,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
    node_id: Filter = None,
    engine_id: Filter = None,
    state: Filter = None,
) -> Page[CommandAnswer]:
    """List commands, newest first."""
    found = await commands.list_commands(
        services.engine,
        node_id=None if node_id is None else NodeId(node_id),
        engine_id=None if engine_id is None else EngineId(engine_id),
        state=state,
        limit=limit,
        cursor=cursor,
    )
    return page_of(found, CommandAnswer.model_validate)


@router.get("/{command_id}")
async def get_command(command_id: Identifier, _: ViewerDep, services: ServicesDep) -> CommandAnswer:
    """One command, and how far it is."""
    found = await commands.find(services.engine, [CommandId(command_id)])
    if not found:
        raise Refused(Refuse(Reason.NOT_FOUND, f"there is no command `{command_id}`"))
    return CommandAnswer.model_validate(found[CommandId(command_id)])
