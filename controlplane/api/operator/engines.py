"""Engines: what agents declared joined with what this replica sees now, and commands to their
agents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Response
from pydantic import Field, StringConstraints

from controlplane.api.idempotency import IdempotencyKey, mismatch
from controlplane.api.operator.commands import CommandAnswer, Drain, ProgressAnswer
from controlplane.api.security import OperatorChangeDep, ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import (
    LIST_LIMIT_DEFAULT,
    Answer,
    Body,
    Cursor,
    Filter,
    Limit,
    Page,
    Slug,
    Text,
)
from controlplane.api.slices import page_by_name
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import ConfigurationError, Refused
from controlplane.domain.ids import EngineId, ModelName, NodeId
from controlplane.runtime.fleet_state import EngineEntry
from controlplane.store import catalog, commands
from controlplane.store.audit import Change
from controlplane.store.catalog import EngineRecord
from controlplane.store.commands import NO_ARGUMENTS, Arguments
from dataplane.protocol.messages import (
    Capability,
    CommandKind,
    EngineSpec,
    EngineState,
    Phase,
    engine_of,
)

OPTIONS_MAX = 64
GPUS_MAX = 1_024
PROFILE_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$"

CORDON_CHARACTERS_MAX = 200
PATH_CHARACTERS_MAX = 1_000
# States in which an engine holds no GPU.
_HOLDS_NO_GPU = frozenset({EngineState.STOPPED, EngineState.FAILED, EngineState.SLEEPING})
_UNDER_WAY = frozenset({EngineState.STARTING, EngineState.DRAINING})

router = APIRouter(prefix="/engines", tags=["engines"])

EngineIdentifier = Annotated[str, Path(max_length=127, pattern=r"^[A-Za-z0-9][A-Za-z0-9_/.-]*$")]


@dataclass(frozen=True, slots=True)
class Teller:
    """Who tells an agent something, and the call's own name when it may be sent again."""

    change: Change
    response: Response
    idempotency_key: str | None


async def _teller(
    change: OperatorChangeDep, response: Response, idempotency_key: IdempotencyKey = None
) -> Teller:
    return Teller(change, response, idempotency_key)


TellerDep = Annotated[Teller, Depends(_teller)]

AdapterName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=255)
]


class EngineAnswer(Answer):
    """What is lent and taken is this replica's share; the capacity is the engine's whole.

    `cordon` says why it takes nothing new. `load_ms` is what its start took, from `load_medium`, and
    `wake_ms` its latest waking; 0 when that was not seen. `progress` is null while it stays as it is.
    """

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
    cordon: str
    sleep_level: int
    wake_ms: int
    load_ms: int
    load_medium: str
    capabilities: list[str]
    progress: ProgressAnswer | None
    updated_at: datetime


class NewRole(Drain):
    role: Literal["both", "prefill", "decode"]


class Sleep(Drain):
    """Level 1 keeps the weights in host memory, level 2 drops them."""

    level: Literal[1, 2] = 1


class Cordon(Body):
    """Why; it is shown wherever the engine is."""

    reason: Annotated[Text, StringConstraints(max_length=CORDON_CHARACTERS_MAX)] = ""


class Adapter(Body):
    """A LoRA adapter: the name that requests use, and the folder on the engine's node."""

    name: AdapterName
    path: Annotated[Text, StringConstraints(min_length=1, max_length=PATH_CHARACTERS_MAX)]


class AdapterToUnload(Body):
    name: AdapterName


class NewEngine(Body):
    """What a node is to run. `options` are settings of the kind, checked by the agent.

    `profile` names one that the agent knows; `options` stand above it.
    """

    node_id: Slug
    kind: Slug
    model: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    role: Literal["both", "prefill", "decode"] = "both"
    gpus: Annotated[int, Field(ge=1, le=GPUS_MAX)] = 1
    profile: Annotated[str, StringConstraints(max_length=63, pattern=PROFILE_PATTERN)] = ""
    options: Annotated[dict[str, str | int | float | bool], Field(max_length=OPTIONS_MAX)] = Field(
        default_factory=dict
    )


@router.get("")
async def list_engines(
    _: ViewerDep,
    services: ServicesDep,
    *,
    node: Filter = None,
    model: Filter = None,
    state: EngineState | None = None,
    limit: Limit = LIST_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[EngineAnswer]:
    """List engines by id."""
    known = {
        record.id: record
        for record in await catalog.list_engines(services.engine)
        if (node is None or record.node_id == node)
        and (model is None or record.model == model)
        and (state is None or record.state == state)
    }
    entries = {entry.row.engine_id: entry for entry in services.fleet.entries()}
    names, next_cursor = page_by_name(known, limit, cursor)
    return Page(
        data=[_answer(services, known[name], entries.get(name)) for name in names],
        next_cursor=next_cursor,
    )


@router.get("/{engine_id:path}")
async def get_engine(
    engine_id: EngineIdentifier, _: ViewerDep, services: ServicesDep
) -> EngineAnswer:
    """One engine."""
    for record in await catalog.list_engines(services.engine):
        if record.id == engine_id:
            entries = {entry.row.engine_id: entry for entry in services.fleet.entries()}
            return _answer(services, record, entries.get(record.id))
    raise _missing(engine_id)


@router.post("/{engine_id:path}/load", status_code=202)
async def load(
    engine_id: EngineIdentifier, body: NewEngine, by: TellerDep, services: ServicesDep
) -> CommandAnswer:
    """Tell a node's agent to start an engine."""
    if ModelName(body.model) not in services.fleet.catalog.models:
        models = ", ".join(services.fleet.catalog.models)
        raise Refused(
            Refuse(Reason.MODEL_NOT_FOUND, f"there is no model `{body.model}`; there are: {models}")
        )
    known = await catalog.list_engines(services.engine)
    _check_room(services, engine_id, NodeId(body.node_id), body.gpus, known)
    spec = EngineSpec(
        engine_id=engine_id,
        kind=body.kind,
        model=body.model,
        role=body.role,
        gpus=body.gpus,
        options=dict(body.options),
        profile=body.profile,
    )
    return await _tell(services, by, NodeId(body.node_id), engine_id, CommandKind.LOAD, spec=spec)


@router.post("/{engine_id:path}/unload", status_code=202)
async def unload(
    engine_id: EngineIdentifier,
    by: TellerDep,
    services: ServicesDep,
    body: Drain | None = None,
) -> CommandAnswer:
    """Tell the agent to drain an engine, stop it and forget it."""
    return await _tell_owner(services, by, engine_id, CommandKind.UNLOAD, body)


@router.post("/{engine_id:path}/drain", status_code=202)
async def drain(
    engine_id: EngineIdentifier,
    by: TellerDep,
    services: ServicesDep,
    body: Drain | None = None,
) -> CommandAnswer:
    """Tell the agent to let an engine finish what runs and take nothing new."""
    return await _tell_owner(services, by, engine_id, CommandKind.DRAIN, body)


@router.post("/{engine_id:path}/stop", status_code=202)
async def stop(engine_id: EngineIdentifier, by: TellerDep, services: ServicesDep) -> CommandAnswer:
    """Tell the agent to stop an engine at once."""
    return await _tell_owner(services, by, engine_id, CommandKind.STOP, None)


@router.post("/{engine_id:path}/restart", status_code=202)
async def restart(
    engine_id: EngineIdentifier,
    by: TellerDep,
    services: ServicesDep,
    body: Drain | None = None,
) -> CommandAnswer:
    """Tell the agent to drain an engine and to start it anew."""
    return await _tell_owner(services, by, engine_id, CommandKind.RESTART, body)


@router.post("/{engine_id:path}/role", status_code=202)
async def set_role(
    engine_id: EngineIdentifier, body: NewRole, by: TellerDep, services: ServicesDep
) -> CommandAnswer:
    """Tell the agent to drain an engine and to start it anew in another role."""
    return await _tell_owner(
        services, by, engine_id, CommandKind.ROLE, body, Arguments(role=body.role)
    )


@router.post("/{engine_id:path}/sleep", status_code=202)
async def sleep(
    engine_id: EngineIdentifier,
    by: TellerDep,
    services: ServicesDep,
    body: Sleep | None = None,
) -> CommandAnswer:
    """Tell the agent to let an engine finish and then give its GPU memory back."""
    asked = body or Sleep()
    return await _tell_owner(
        services, by, engine_id, CommandKind.SLEEP, asked, Arguments(sleep_level=asked.level)
    )


@router.post("/{engine_id:path}/wake", status_code=202)
async def wake(engine_id: EngineIdentifier, by: TellerDep, services: ServicesDep) -> CommandAnswer:
    """Tell the agent to bring a sleeping engine's weights back."""
    return await _tell_owner(services, by, engine_id, CommandKind.WAKE)


@router.post("/{engine_id:path}/reset-cache", status_code=202)
async def reset_cache(
    engine_id: EngineIdentifier, by: TellerDep, services: ServicesDep
) -> CommandAnswer:
    """Tell the agent to let an engine forget its prefix cache."""
    return await _tell_owner(services, by, engine_id, CommandKind.RESET_CACHE)


@router.post("/{engine_id:path}/cordon", status_code=202)
async def cordon(
    engine_id: EngineIdentifier,
    by: TellerDep,
    services: ServicesDep,
    body: Cordon | None = None,
) -> CommandAnswer:
    """Send nothing new to an engine. What runs there goes on."""
    arguments = Arguments(reason=(body or Cordon()).reason)
    return await _tell_owner(services, by, engine_id, CommandKind.CORDON, arguments=arguments)


@router.post("/{engine_id:path}/uncordon", status_code=202)
async def uncordon(
    engine_id: EngineIdentifier, by: TellerDep, services: ServicesDep
) -> CommandAnswer:
    """Let an engine take work again, and start it when it was given up."""
    return await _tell_owner(services, by, engine_id, CommandKind.UNCORDON)


@router.post("/{engine_id:path}/load-adapter", status_code=202)
async def load_adapter(
    engine_id: EngineIdentifier, body: Adapter, by: TellerDep, services: ServicesDep
) -> CommandAnswer:
    """Tell the agent to load a LoRA adapter into an engine."""
    arguments = Arguments(adapter=body.name, adapter_path=body.path)
    return await _tell_owner(services, by, engine_id, CommandKind.LORA_LOAD, arguments=arguments)


@router.post("/{engine_id:path}/unload-adapter", status_code=202)
async def unload_adapter(
    engine_id: EngineIdentifier,
    body: AdapterToUnload,
    by: TellerDep,
    services: ServicesDep,
) -> CommandAnswer:
    """Tell the agent to unload a LoRA adapter from an engine."""
    arguments = Arguments(adapter=body.name)
    return await _tell_owner(services, by, engine_id, CommandKind.LORA_UNLOAD, arguments=arguments)


_NEEDED: dict[CommandKind, Capability] = {
    CommandKind.SLEEP: Capability.SLEEP,
    CommandKind.WAKE: Capability.SLEEP,
    CommandKind.RESET_CACHE: Capability.RESET_CACHE,
    CommandKind.LORA_LOAD: Capability.LORA,
    CommandKind.LORA_UNLOAD: Capability.LORA,
}


async def _tell_owner(
    services: Services,
    by: Teller,
    engine_id: str,
    kind: CommandKind,
    body: Drain | None = None,
    arguments: Arguments = NO_ARGUMENTS,
) -> CommandAnswer:
    known = await catalog.list_engines(services.engine)
    own = [record for record in known if _is_of(record.id, engine_id)]
    if not own:
        raise _missing(engine_id)
    record = own[0]
    if kind is CommandKind.WAKE and record.state == EngineState.SLEEPING:
        gpus = sum(rank.gpus for rank in own)
        _check_room(services, engine_id, record.node_id, gpus, known)
    needed = _NEEDED.get(kind)
    if needed is not None and needed not in record.capabilities:
        able = ", ".join(record.capabilities) or "nothing of the kind"
        raise Refused(
            Refuse(
                Reason.INVALID_REQUEST,
                f"engine `{engine_id}` has no `{needed}` (it has: {able}); its kind lacks it,"
                " or its options do not switch it on",
            )
        )
    return await _tell(
        services,
        by,
        record.node_id,
        engine_id,
        kind,
        deadline_s=(body or Drain()).deadline_s,
        arguments=arguments,
    )


def _missing(engine_id: str) -> Refused:
    return Refused(Refuse(Reason.NOT_FOUND, f"there is no engine `{engine_id}`"))


def _is_of(declared: str, engine_id: str) -> bool:
    """Whether this is the engine, or one of its data-parallel ranks."""
    return engine_id in (declared, engine_of(declared))


def _check_room(
    services: Services,
    engine_id: str,
    node_id: NodeId,
    gpus: int,
    known: Sequence[EngineRecord],
) -> None:
    """Refuse what the node has no GPUs for, or an engine that is another node's."""
    node = services.fleet.catalog.nodes.get(node_id)
    if node is None:
        return
    taken = 0
    for record in known:
        if _is_of(record.id, engine_id):
            if record.node_id != node.id:
                raise Refused(
                    Refuse(
                        Reason.CONFLICT,
                        f"engine `{engine_id}` is on node `{record.node_id}`; unload it there first",
                    )
                )
        elif record.node_id == node.id and record.state not in _HOLDS_NO_GPU:
            taken += record.gpus
    if taken + gpus > node.gpus:
        raise Refused(
            Refuse(
                Reason.CONFLICT,
                f"node `{node.id}` has {node.gpus} GPUs, of which {taken} are taken; engine"
                f" `{engine_id}` needs {gpus}",
            )
        )


async def _tell(
    services: Services,
    by: Teller,
    node_id: NodeId,
    engine_id: str,
    kind: CommandKind,
    *,
    deadline_s: float = commands.DEADLINE_S_DEFAULT,
    spec: EngineSpec | None = None,
    arguments: Arguments = NO_ARGUMENTS,
) -> CommandAnswer:
    key = by.idempotency_key
    command_id = None if key is None else commands.id_of_call(by.change.actor, key)
    try:
        record = await commands.enqueue(
            services.engine,
            node_id=node_id,
            engine_id=EngineId(engine_id),
            kind=kind,
            deadline_s=deadline_s,
            spec=spec,
            arguments=arguments,
            command_id=command_id,
            by=by.change,
        )
    except ConfigurationError as error:
        raise Refused(Refuse(Reason.NOT_FOUND, str(error))) from error
    if key is not None and (record.engine_id, record.kind, record.spec, record.arguments) != (
        engine_id,
        kind,
        spec,
        arguments,
    ):
        raise mismatch(key, record.id)
    by.response.headers["location"] = f"/operator/v1/commands/{record.id}"
    return CommandAnswer.model_validate(record)


def _progress(entry: EngineEntry | None, state: str) -> ProgressAnswer | None:
    """How far it is, while it is on its way."""
    if entry is None or entry.progress is None or entry.progress.phase is Phase.SERVING:
        return None
    if state not in _UNDER_WAY and entry.progress.phase is not Phase.WAKING:
        return None
    return ProgressAnswer.model_validate(entry.progress)


def _answer(services: Services, record: EngineRecord, entry: EngineEntry | None) -> EngineAnswer:
    row = None if entry is None else entry.row
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
        cordon=record.cordon,
        sleep_level=record.sleep_level,
        wake_ms=record.wake_ms,
        load_ms=record.load_ms,
        load_medium=record.load_medium,
        capabilities=record.capabilities,
        progress=_progress(entry, record.state),
        updated_at=record.updated_at,
    )
