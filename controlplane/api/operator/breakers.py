"""Breakers of engines and pools: what this replica's have seen, and how operators hold them."""

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from controlplane.api.security import OperatorDep, ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import LIST_LIMIT_DEFAULT, Answer, Body, Limit, Page, Text
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused
from controlplane.domain.pool import ENGINE_TARGET, POOL_TARGET, BreakerState, OverrideMode
from controlplane.reliability.breaker import Breaker
from controlplane.runtime.call import monotonic_ms
from controlplane.store import breakers

TARGET_CHARACTERS_MAX = 383
REASON_CHARACTERS_MAX = 500

router = APIRouter(prefix="/breakers", tags=["breakers"])

Target = Annotated[
    str,
    StringConstraints(pattern=r"^(engine|pool):[\x21-\x7e]+$", max_length=TARGET_CHARACTERS_MAX),
]
After = Annotated[
    str | None,
    Query(max_length=TARGET_CHARACTERS_MAX + 1, description="`next_cursor` of the previous page."),
]


class Hold(StrEnum):
    """`auto` lets the breaker follow what it sees."""

    OPEN = "open"
    CLOSED = "closed"
    AUTO = "auto"


class HoldBody(Body):
    """How a breaker is to be held, and why: the reason stands in the audit log."""

    target: Target
    mode: Annotated[Hold, Field(strict=False)]
    reason: Annotated[Text, StringConstraints(min_length=1, max_length=REASON_CHARACTERS_MAX)]


class BreakerAnswer(Answer):
    """`state` is what counts, `seen` what the breaker made of the calls of this replica alone.

    `seen` is null where this replica knows nothing of the target. `is_panicking`: it is open and its
    engines are used all the same, for too many others are out. `waits_ms`: until it tries again.
    """

    target: str
    state: BreakerState
    seen: BreakerState | None
    why: str
    is_panicking: bool
    waits_ms: int
    held: OverrideMode | None
    held_by: str | None
    held_because: str | None
    held_at: datetime | None


@router.get("")
async def list_breakers(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: After = None
) -> Page[BreakerAnswer]:
    """List breakers by target, engines before pools."""
    answers = [
        answer for answer in await _answers(services) if cursor is None or answer.target > cursor
    ]
    shown = answers[:limit]
    return Page(data=shown, next_cursor=shown[-1].target if len(answers) > limit else None)


@router.post("")
async def hold(operator: OperatorDep, services: ServicesDep, body: HoldBody) -> BreakerAnswer:
    """Hold a breaker open or closed on every replica, or let it follow what it sees again."""
    actor = operator.actor
    if body.mode is Hold.AUTO:
        await breakers.free(services.engine, target=body.target, actor=actor, reason=body.reason)
    else:
        try:
            await breakers.hold(
                services.engine,
                target=body.target,
                mode=OverrideMode(body.mode.value),
                actor=actor,
                reason=body.reason,
            )
        except ConfigurationError as error:
            raise Refused(Refuse(Reason.NOT_FOUND, str(error))) from error
    # The replica that was asked obeys at once, the others within their next look at the catalogue.
    services.fleet.use_overrides(await breakers.load(services.engine))
    for answer in await _answers(services):
        if answer.target == body.target:
            return answer
    raise Refused(
        Refuse(
            Reason.NOT_FOUND,
            f"there is no breaker `{body.target}`; `headway breaker list` shows which there are",
        )
    )


async def _answers(services: Services) -> list[BreakerAnswer]:
    """Breakers that this replica has and those that operators hold, by target."""
    held = {record.target: record for record in await breakers.list_overrides(services.engine)}
    seen = dict(_breakers(services))
    now_ms = int(monotonic_ms())
    answers = []
    for target in sorted(held.keys() | seen.keys()):
        breaker, record = seen.get(target), held.get(target)
        state = BreakerState.CLOSED if breaker is None else breaker.shown
        mode = None if record is None else record.mode
        answers.append(
            BreakerAnswer(
                target=target,
                state=state if mode is None else BreakerState(mode.value),
                seen=None if breaker is None else breaker.state,
                why="" if breaker is None or breaker.state is BreakerState.CLOSED else breaker.why,
                is_panicking=mode is None and breaker is not None and breaker.is_retained,
                waits_ms=0 if breaker is None or mode is not None else breaker.waits_ms(now_ms),
                held=mode,
                held_by=None if record is None else record.actor,
                held_because=None if record is None else record.reason,
                held_at=None if record is None else record.created_at,
            )
        )
    return answers


def _breakers(services: Services) -> Iterator[tuple[str, Breaker]]:
    for entry in services.fleet.entries():
        yield f"{ENGINE_TARGET}:{entry.row.engine_id}", entry.health.breaker
    for region in services.fleet.regions():
        yield f"{POOL_TARGET}:{region.model}/{region.region}", region.breaker
