"""Every message on the bus, as msgspec structs encoded to JSON. At most 64 KiB each.

A message carries `v`, its major version. `decode` refuses an unknown major; unknown members of a
known major are ignored, so that minor additions pass.
"""

from enum import StrEnum
from typing import TypeVar

import msgspec

MAJOR = 1
MESSAGE_BYTES_MAX = 64 * 1024

_M = TypeVar("_M", bound=msgspec.Struct)


class ProtocolError(Exception):
    """A message that can not be understood."""


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class CommandKind(StrEnum):
    LOAD = "load"
    UNLOAD = "unload"
    DRAIN = "drain"
    STOP = "stop"


class CommandState(StrEnum):
    DONE = "done"
    FAILED = "failed"
    STALE_EPOCH = "stale_epoch"


class EngineFacts(msgspec.Struct, kw_only=True, frozen=True):
    """An engine as its agent declares it. The host is the node's registered address, never from here.

    `speedup` is how many times faster than its hardware a simulated engine runs; 1 for a real one.
    """

    engine_id: str
    model: str
    role: str
    port: int
    kind: str
    state: EngineState
    gpus: int
    seats: int
    kv_tokens: int
    block_tokens: int
    context_tokens_max: int
    started_ms: int
    speedup: float = 1.0


class Hello(msgspec.Struct, kw_only=True, frozen=True):
    """An agent introduces itself: at start, after a reconnect, and when its engines change.

    `agent_epoch` grows with every start of the agent. Credits of an older epoch are void.
    """

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    version: str
    engines: list[EngineFacts]


class Beat(msgspec.Struct, kw_only=True, frozen=True):
    """Sign of life, once a second. A changed `state_digest` means that a hello follows."""

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    engine_states: dict[str, EngineState]


class Bye(msgspec.Struct, kw_only=True, frozen=True):
    v: int = MAJOR
    node_id: str
    agent_epoch: int


class EngineTelemetry(msgspec.Struct, kw_only=True, frozen=True):
    """Gauges now, and counters since the engine's start. Ratio in 0..1, sums in seconds, counts in requests."""

    engine_id: str
    running: int
    waiting: int
    kv_used_ratio: float
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft_seconds_sum: float = 0.0
    ttft_count: int = 0
    itl_seconds_sum: float = 0.0
    itl_count: int = 0


class Telemetry(msgspec.Struct, kw_only=True, frozen=True):
    v: int = MAJOR
    node_id: str
    agent_epoch: int
    engines: list[EngineTelemetry]


class CreditRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A replica asks for, renews or returns credits of every engine of one node, in one message.

    `wants` maps engine id to the total the replica wants to hold (seats, kv_tokens), never to an
    increment, so that a repeated or lost message changes nothing. Zero returns everything.
    `held` maps engine id to the most that the replica may have in flight until it reads the answer:
    the larger of what it was lent and what its calls take. What is held is not lent to others.
    """

    v: int = MAJOR
    replica_id: str
    wants: dict[str, tuple[int, int]]
    held: dict[str, tuple[int, int]] = {}


class CreditGrant(msgspec.Struct, kw_only=True, frozen=True):
    """The totals that the replica holds from now on, for `ttl_ms` counted from when it asked."""

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    ttl_ms: int
    holds: dict[str, tuple[int, int]]


class EngineSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What a load command starts. `options` are settings of the engine kind, checked by its adapter."""

    engine_id: str
    kind: str
    model: str
    role: str
    gpus: int
    options: dict[str, str | int | float | bool] = {}


class Command(msgspec.Struct, kw_only=True, frozen=True):
    """Told by the leader. Obeyed once: a repeated `command_id` is answered with the first result.

    `epoch` is the leader's; an agent refuses a lower one than it has seen. `deadline_s` bounds a drain.
    """

    v: int = MAJOR
    command_id: str
    epoch: int
    kind: CommandKind
    engine_id: str
    deadline_s: float = 30.0
    spec: EngineSpec | None = None


class Acknowledgement(msgspec.Struct, kw_only=True, frozen=True):
    v: int = MAJOR
    node_id: str
    agent_epoch: int
    command_id: str
    state: CommandState
    detail: str = ""


class PoolPrice(msgspec.Struct, kw_only=True, frozen=True):
    """What more capacity of one pool would save, beyond its rent: micro-dollars per millisecond of an engine
    and per KV token-second. 0 where there is enough.
    """

    model: str
    gpu_type: str
    gpus: int
    role: str
    region: str
    micro_usd_per_gpu_ms: float
    micro_usd_per_kv_token_s: float


class ClassPrice(msgspec.Struct, kw_only=True, frozen=True):
    """The value, in micro-dollars, that one workflow of a class displaces where it displaces least."""

    class_id: str
    model: str
    bid_micro_usd: float
    served_ratio: float


class ModelPace(msgspec.Struct, kw_only=True, frozen=True):
    """How far calls in flight may stretch the time per token of a model's empty engine; work that can wait
    may stretch it only by `deferrable_ratio`. `bid_micro_usd_per_call` is what a call displaces, 0 when
    there is enough for all, and `calls_per_s` what is forecast to come.
    """

    model: str
    ratio: float
    deferrable_ratio: float
    bid_micro_usd_per_call: float
    calls_per_s: float


class ControlPrices(msgspec.Struct, kw_only=True, frozen=True):
    """The leader tells all replicas what capacity is worth now. Void `ttl_ms` after `made_ms` (milliseconds
    of the Unix epoch): a price of scarcity that is old is worse than none. `round` counts within `epoch`.
    """

    v: int = MAJOR
    epoch: int
    round: int
    made_ms: int
    ttl_ms: int
    pools: list[PoolPrice]
    classes: list[ClassPrice]
    models: list[ModelPace]


class DesiredEngines(msgspec.Struct, kw_only=True, frozen=True):
    model: str
    gpu_type: str
    gpus: int
    role: str
    region: str
    desired: int
    actual: int


class DesiredNodes(msgspec.Struct, kw_only=True, frozen=True):
    region: str
    gpu_type: str
    gpus: int
    desired: int
    actual: int


class ControlPlan(msgspec.Struct, kw_only=True, frozen=True):
    """The leader tells all replicas what the fleet should be. It stands until a later one is told."""

    v: int = MAJOR
    epoch: int
    round: int
    revision: int
    made_ms: int
    status: str
    gap_ratio: float
    solve_s: float
    moves: int
    engines: list[DesiredEngines]
    nodes: list[DesiredNodes]


_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """JSON bytes of a message. Raises ProtocolError when it is over MESSAGE_BYTES_MAX."""
    data = _encoder.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        msg = f"a {type(message).__name__} of {len(data)} bytes is over the limit of {MESSAGE_BYTES_MAX}"
        raise ProtocolError(msg)
    return data


class _Version(msgspec.Struct):
    v: int = 0


def decode(data: bytes, kind: type[_M]) -> _M:
    """The message in `data`. Raises ProtocolError on an unknown major version or a wrong shape."""
    if len(data) > MESSAGE_BYTES_MAX:
        msg = f"a message of {len(data)} bytes is over the limit of {MESSAGE_BYTES_MAX}"
        raise ProtocolError(msg)
    try:
        version = msgspec.json.decode(data, type=_Version).v
        if version != MAJOR:
            msg = f"{kind.__name__} has major version {version}; this program speaks {MAJOR}"
            raise ProtocolError(msg)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error
