"""What agents were told, and what became of it."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.shapes import LIST_LIMIT_DEFAULT, Answer, Body, Cursor, Limit, Page, page_of
from controlplane.store import commands

DRAIN_S_MAX = 3_600

router = APIRouter(prefix="/commands", tags=["commands"])


class Drain(Body):
    """Seconds that running work may take before it is ended."""

    deadline_s: Annotated[float, Field(ge=0, le=DRAIN_S_MAX)] = commands.DEADLINE_S_DEFAULT


class CommandAnswer(Answer):
    id: str
    node_id: str
    engine_id: str
    kind: str
    state: str
    detail: str
    created_at: datetime
    sent_at: datetime | None
    ended_at: datetime | None


@router.get("")
async def list_commands(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[CommandAnswer]:
    """List commands, newest first."""
    found = await commands.list_commands(services.engine, limit=limit, cursor=cursor)
    return page_of(found, CommandAnswer.model_validate)
