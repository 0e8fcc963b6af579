"""Every message on the bus, as msgspec structs encoded to JSON. At most 64 KiB each.

A message carries `v`, its major version. `decode` refuses an unknown major; unknown members of a
known major are ignored, so that minor additions pass.
"""

from enum import StrEnum
from typing import TypeVar

import msgspec

MAJOR = 1
MESSAGE_BYTES_MAX = 64 * 1024
# Between an engine's id and the number of a data-parallel rank, in the id under which each rank is declared.
RANK_SEPARATOR = "/"

_M = TypeVar("_M", bound=msgspec.Struct)


class ProtocolError(Exception):
    """A message that can not be understood."""


def engine_of(declared: str) -> str:
    """The engine of which `declared` is a data-parallel rank; the engine itself, when it is none."""
    whole, separator, rank = declared.rpartition(RANK_SEPARATOR)
    return whole if separator and rank.isdigit() else declared


class EngineState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    STOPPED = "stopped"
    FAILED = "failed"


class CommandKind(StrEnum):
    LOAD = "load"
    UNLOAD = "unload"
    DRAIN = "drain"
    STOP = "stop"
    RESTART = "restart"
    ROLE = "role"
    SLEEP = "sleep"
    WAKE = "wake"
    RESET_CACHE = "reset_cache"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    LORA_LOAD = "lora_load"
    LORA_UNLOAD = "lora_unload"


class CommandState(StrEnum):
    """How a command ended. `refused`: it could not be right, and nothing was done."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    STALE_EPOCH = "stale_epoch"


class KvTransfer(msgspec.Struct, kw_only=True, frozen=True):
    """How KV gets from one engine to another: a connector both must have, and a domain both must be in.

    `connector`: `nixl`, `nixl_push`, `mooncake` or `shared_folder`. `domain` names a further border that KV
    does not cross, such as a shared folder; empty: the region alone. `lease_s`: for so long a prompt's KV is
    held, in seconds. `engine_id` and `bootstrap_port` are how Mooncake finds the engine.
    """

    connector: str
    domain: str = ""
    lease_s: float = 30.0
    engine_id: str = ""
    bootstrap_port: int = 0


class Capability(StrEnum):
    """What an engine can be told beside start and stop."""

    SLEEP = "sleep"
    RESET_CACHE = "reset_cache"
    LORA = "lora"


class Medium(StrEnum):
    """Where an engine's weights were read from, as far as its agent can know."""

    PAGE_CACHE = "page_cache"
    DISK = "disk"
    NETWORK = "network"
    UNKNOWN = "unknown"


class Phase(StrEnum):
    """What an engine is at, on its way from one state to another.

    `closing`: replicas are told that it takes nothing new, and answer that they know; `draining`:
    its running work ends.
    """

    STARTING = "starting"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    CLOSING = "closing"
    DRAINING = "draining"
    STOPPING = "stopping"
    FALLING_ASLEEP = "falling asleep"
    WAKING = "waking"


class Feature(StrEnum):
    """What the control plane uses of an engine without telling it so; what engines are told is a `Capability`.

    `kv_use`: it tells how full its KV cache is. `latencies`: it sums times to the first token and
    between tokens. `prefix_cache`: it keeps what it computed of a prompt for the next one.
    `prefix_reports`: usage tells the cached tokens of a prompt. `cache_salt`: a request can keep its
    prefix from other tenants. `kv_events`: it tells which blocks it stores. `token_ids`: an answer can
    carry its tokens, and a prompt can be tokens.
    """

    KV_USE = "kv_use"
    LATENCIES = "latencies"
    PREFIX_CACHE = "prefix_cache"
    PREFIX_REPORTS = "prefix_reports"
    CACHE_SALT = "cache_salt"
    KV_EVENTS = "kv_events"
    TOKEN_IDS = "token_ids"  # noqa: S105 - tokens of text


class EngineFacts(msgspec.Struct, kw_only=True, frozen=True):
    """An engine as its agent declares it. The host is the node's registered address, never from here.

    `speedup` is how many times faster than its hardware a simulated engine runs; 1 for a real one.
    `transfer` is how it hands KV to others or gets it from them; None: not at all.
    `cordon` says why it takes nothing new, empty when it does. `sleep_level` is 1 or 2 while it
    sleeps and `wake_ms` what its latest waking took, 0 when it never woke. `load_ms` is what its
    start took until it served, 0 when that was not seen, from `load_medium`.
    `lacks` names the features that it does not have, which nobody may imitate. An engine of several
    data-parallel ranks is declared once for each: `rank` is what requests name, -1 without ranks, and
    `gpus`, seats and KV are one rank's. `expert_gpus` share the experts of a mixture, all ranks counted (0: as
    `gpus`). `speculative_tokens` are drafted before each step, `kv_host_bytes` hold KV that left the GPUs.
    At most `adapter_slots` adapters answer in one batch; `adapters` are those that are loaded.
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
    transfer: KvTransfer | None = None
    cordon: str = ""
    sleep_level: int = 0
    wake_ms: int = 0
    load_ms: int = 0
    load_medium: str = ""
    capabilities: list[str] = []
    lacks: list[str] = []
    profile: str = ""
    pipeline: int = 1
    rank: int = -1
    expert_gpus: int = 0
    speculative_tokens: int = 0
    kv_host_bytes: int = 0
    adapter_slots: int = 0
    adapters: list[str] = []


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
    """Sign of life, once a second. States or cordons that differ from the hello mean that one was lost."""

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    engine_states: dict[str, EngineState]
    cordoned: list[str] = []


class Bye(msgspec.Struct, kw_only=True, frozen=True):
    v: int = MAJOR
    node_id: str
    agent_epoch: int


class EngineTelemetry(msgspec.Struct, kw_only=True, frozen=True):
    """Gauges now, and counters since the engine's start. Ratio in 0..1, sums in seconds, counts in requests.

    `kv_used_ratio` is None where the engine does not tell. Of `drafts` made by speculative decoding,
    `draft_tokens_accepted` tokens were kept. `steps` of the model were done, 0 where that is not told.
    """

    engine_id: str
    running: int
    waiting: int
    kv_used_ratio: float | None
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft_seconds_sum: float = 0.0
    ttft_count: int = 0
    itl_seconds_sum: float = 0.0
    itl_count: int = 0
    drafts: int = 0
    draft_tokens_accepted: int = 0
    steps: int = 0


class GpuTelemetry(msgspec.Struct, kw_only=True, frozen=True):
    """One GPU of a node. Utilisation in 0..1; `ecc_uncorrected` counts errors since the driver was loaded.

    `xid` is the last error that the driver told, 0 for none. `fault` says why the GPU can not be
    trusted, empty when it can.
    """

    index: int
    uuid: str
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilisation_ratio: float = 0.0
    temperature_c: int = 0
    ecc_uncorrected: int = 0
    xid: int = 0
    fault: str = ""


class Telemetry(msgspec.Struct, kw_only=True, frozen=True):
    """`gpus` is empty in most messages: GPUs are looked at less often than engines. `kv_seqs` maps each engine
    whose KV events are followed to the number of its last batch, so that a lost batch is missed even when
    none comes after it.
    """

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    engines: list[EngineTelemetry]
    gpus: list[GpuTelemetry] = []
    kv_seqs: dict[str, int] = {}


class Progress(msgspec.Struct, kw_only=True, frozen=True):
    """How far an engine is on its way to another state, and the commands that wait for that.

    `sequence` grows within an agent's epoch. `done_ratio` is the part of the phase that is done,
    None where nothing tells it; `elapsed_ms` counts from the begin of the whole way and
    `expected_ms` is what the same way took before, 0 when it was never seen. `calls_left` are
    those that a drain waits for.
    """

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    sequence: int
    engine_id: str
    phase: Phase
    command_ids: list[str] = []
    done_ratio: float | None = None
    elapsed_ms: int = 0
    expected_ms: int = 0
    calls_left: int = 0


class KvReset(StrEnum):
    """What becomes of all that was told before: it holds, it is void, or it is told again.

    After RETELL every session that is not named until the batch with `is_told` is void.
    """

    NONE = "none"
    VOID = "void"
    RETELL = "retell"


class KvResetReason(StrEnum):
    """Why what was told before does not hold: the follower began, the engine began anew, events were lost
    for good, the engine emptied its cache, or it holds more than is followed.
    """

    FOLLOWED = "followed"
    RESTARTED = "restarted"
    LOST = "lost"
    CLEARED = "cleared"
    OVERFLOW = "overflow"


class KvBatch(msgspec.Struct, kw_only=True, frozen=True):
    """What an engine's prefix cache holds of the sessions that were served there, as far as it changed.

    `held` maps a session to the leading tokens of its sequence that are cached, whole blocks only; 0 when
    nothing is. It is a state and not a step: the last one counts, and a repeated one changes nothing.
    `seq` counts from 1 within one life of the agent and one of the engine (`started_ms`).
    `blocks` are cached now; `events`, `gaps` and `replayed` (messages) were counted since the batch before.
    `oldest_ms` is when the engine told the oldest event of this batch, milliseconds of the Unix epoch,
    0 when there was none.
    """

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    engine_id: str
    started_ms: int
    seq: int
    block_tokens: int
    blocks: int
    held: dict[str, int]
    reset: KvReset = KvReset.NONE
    reason: KvResetReason | None = None
    is_told: bool = False
    events: int = 0
    gaps: int = 0
    replayed: int = 0
    oldest_ms: int = 0


class CreditRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A replica asks for, renews or returns credits of every engine of one node, in one message.

    `wants` maps engine id to the total the replica wants to hold (seats, kv_tokens), never to an
    increment, so that a repeated or lost message changes nothing. Zero returns everything.
    `held` maps engine id to the most that the replica may have in flight until it reads the answer:
    the larger of what it was lent and what its calls take. What is held is not lent to others.
    `closed` are the engines that the replica knows to take nothing new: it sends them no further
    call, and holds of them only what its running calls take.
    """

    v: int = MAJOR
    replica_id: str
    wants: dict[str, tuple[int, int]]
    held: dict[str, tuple[int, int]] = {}
    closed: list[str] = []


class CreditGrant(msgspec.Struct, kw_only=True, frozen=True):
    """The totals that the replica holds from now on, for `ttl_ms` counted from when it asked."""

    v: int = MAJOR
    node_id: str
    agent_epoch: int
    ttl_ms: int
    holds: dict[str, tuple[int, int]]


class EngineSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What a load command starts. `options` are settings of the engine kind, checked by its adapter.

    `profile` names a profile that the agent knows; `options` stand above what it says.
    """

    engine_id: str
    kind: str
    model: str
    role: str
    gpus: int
    options: dict[str, str | int | float | bool] = {}
    profile: str = ""


class Command(msgspec.Struct, kw_only=True, frozen=True):
    """Told by the leader. Obeyed once: a repeated `command_id` is answered with the first result.

    `epoch` is the leader's; an agent refuses a lower one than it has seen. `deadline_s` bounds the
    wait for running work. `role`, `sleep_level`, `reason` and the adapter's name and path are what
    the kinds of command that are named like them need.
    """

    v: int = MAJOR
    command_id: str
    epoch: int
    kind: CommandKind
    engine_id: str
    deadline_s: float = 30.0
    spec: EngineSpec | None = None
    role: str = ""
    sleep_level: int = 0
    reason: str = ""
    adapter: str = ""
    adapter_path: str = ""


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
