"""What the planner is asked and what it answers, as frozen values with a JSON form for store and wire.

Seconds (`_s`), tokens, GPUs; rates of engines in milliseconds as in `scheduler/perf_model`; money in
micro-dollars. It knows nothing of how the answer is found.
"""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from controlplane.domain.catalog import GpuType, Model, Role
from controlplane.domain.ids import EngineId, GpuTypeName, ModelName, NodeId, RegionName
from controlplane.scheduler.perf_model import MS_PER_S, engine_rates

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CLASSES_MAX: Final = 512
NODES_MAX: Final = 2_000
RECENT_WORKFLOWS_MAX: Final = 2_000
JSON_BYTES_MAX: Final = 16 * 1024**2

_T = TypeVar("_T")


class EngineCondition(StrEnum):
    """How an engine stands. Only `serving` and `starting` count as capacity; `asleep` holds no GPU."""

    STARTING = "starting"
    SERVING = "serving"
    ASLEEP = "asleep"
    DRAINING = "draining"
    FAILED = "failed"


class MoveKind(StrEnum):
    """`unload` drains first. `drain` empties a node for good: an autoscaler may take it away."""

    LOAD = "load"
    UNLOAD = "unload"
    ROLE = "role"
    SLEEP = "sleep"
    WAKE = "wake"
    DRAIN = "drain"


class PlanStatus(StrEnum):
    """`short`: some work can not be served whatever is done. `gap_open`: good, not proven near best.

    `failed`: no plan was found in time, so the fleet stays as it is.
    """

    OK = "ok"
    GAP_OPEN = "gap_open"
    SHORT = "short"
    FAILED = "failed"


# ---------------------------------------------------------------- the question


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Work of one class: workflows that arrive, what each needs, what it is worth.

    Arrivals are workflows per second: seen now, forecast for the time when a move made now takes
    effect, the standard deviation of that forecast, and the highest need of the last minutes (0:
    unknown). `arrivals_seen_s` is the time over which those of now were counted, `arrivals_recent_s`
    that of each of the last minutes (0: no count, but known). `dispersion_ratio` is the variance of
    arrivals over a Poisson stream's. The tokens are those of one step: `uncached_tokens` are computed,
    `context_tokens` is the whole prompt with what is cached. `gap_s` lies between two steps.
    `deadline_s` counts from arrival to the end of the last step; None: there is none.
    `value_micro_usd` is what one workflow in time is worth, and `weight` scales it.
    `success_floor_ratio` is the part of workflows that must find capacity. Work with `deferrable_s`
    above 0 may start that much later; `backlog_workflows` of it wait already.
    Empty `regions` or `gpu_types` mean any.
    """

    class_id: str
    model: ModelName
    priority: int = 0
    weight: float = 1.0
    arrivals_per_s_now: float
    arrivals_per_s_forecast: float
    arrivals_per_s_spread: float = 0.0
    arrivals_per_s_recent_max: float = 0.0
    arrivals_seen_s: float = 0.0
    arrivals_recent_s: float = 0.0
    dispersion_ratio: float = 1.0
    steps: float = 1.0
    uncached_tokens: float
    context_tokens: float
    completion_tokens: float
    gap_s: float = 0.0
    deadline_s: float | None = None
    value_micro_usd: float
    success_floor_ratio: float = 0.95
    deferrable_s: float = 0.0
    backlog_workflows: float = 0.0
    regions: tuple[RegionName, ...] = ()
    gpu_types: tuple[GpuTypeName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """Engines that are alike: a model on so many GPUs of a type in a role. Rates as in `EngineRates`.

    `load_s` passes from the order to serving, `wake_s` from asleep; `wake_s` None: it can not sleep.
    """

    model: ModelName
    gpu_type: GpuTypeName
    gpus: int
    role: Role
    prefill_base_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_token_sq: float
    decode_ms_base: float
    decode_ms_per_seq: float
    decode_ms_per_kv_token: float
    kv_tokens_capacity: int
    seats_capacity: int
    load_s: float
    wake_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}/{self.gpu_type}x{self.gpus}/{self.role}"


def pool_kind(
    model: Model, gpu: GpuType, gpus: int, role: Role = Role.BOTH, wake_s: float | None = None
) -> PoolKind | None:
    """What `model` is on `gpus` GPUs of a type, by the roofline. None when its weights do not fit."""
    rates = engine_rates(model, gpu, gpus)
    if rates.kv_tokens_capacity <= 0:
        return None
    return PoolKind(
        model=model.name,
        gpu_type=gpu.name,
        gpus=gpus,
        role=role,
        prefill_base_ms=rates.prefill_base_ms,
        prefill_ms_per_token=rates.prefill_ms_per_token,
        prefill_ms_per_token_sq=rates.prefill_ms_per_token_sq,
        decode_ms_base=rates.decode_ms_base,
        decode_ms_per_seq=rates.decode_ms_per_seq,
        decode_ms_per_kv_token=rates.decode_ms_per_kv_token,
        kv_tokens_capacity=rates.kv_tokens_capacity,
        seats_capacity=rates.seats_capacity,
        load_s=rates.load_ms / MS_PER_S,
        wake_s=wake_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """Nodes that can be had: a region, a GPU type, GPUs a node, dollars of the whole node.

    `nodes_more_max` is how many an autoscaler may add to those that are there (0: a fixed fleet), each
    `provision_s` after it was asked for.
    """

    region: RegionName
    gpu_type: GpuTypeName
    gpus: int
    micro_usd_per_hour: int
    nodes_more_max: int = 0
    provision_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.region}/{self.gpu_type}x{self.gpus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One engine on a node. `sleep_level` as vLLM counts it: 0 awake, 1 weights kept in host memory."""

    engine_id: EngineId
    model: ModelName
    role: Role
    gpus: int
    condition: EngineCondition
    sleep_level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node as it was last heard of.

    A node that is not known now keeps what it had: its engines count, and nothing moves there. A
    cordoned one counts for nothing and nothing moves there either. One that is not releasable is paid
    for in any case.
    """

    node_id: NodeId
    region: RegionName
    gpu_type: GpuTypeName
    gpus: int
    engines: tuple[EngineState, ...] = ()
    is_known: bool = True
    is_cordoned: bool = False
    is_releasable: bool = True
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Arrivals of a class, workflows per second, that a plan is made for.

    `mean_per_s` is what was expected, `arrivals_per_s` what capacity must carry, with what comes on
    top for its floor. `lower_since_s`: since when all work of the model needs less than what is held (0: it
    does not); `lower_arrivals_per_s` is this class's part of the most that it needed since.
    """

    class_id: str
    arrivals_per_s: float
    mean_per_s: float = 0.0
    lower_since_s: float = 0.0
    lower_arrivals_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredCount:
    """Engines wanted of a kind in a region, against those that count as capacity now."""

    model: ModelName
    gpu_type: GpuTypeName
    gpus: int
    role: Role
    region: RegionName
    desired: int
    actual: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """How far TPOT of a model's engines may rise over an empty engine's, as a ratio.

    `deferrable_ratio` is the lower bound of work that can wait, so that it leaves room to tight work.
    """

    model: ModelName
    ratio: float
    deferrable_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentWorkflow:
    """One workflow of the last minutes, for the replay that finds the stretch. Tokens a step."""

    model: ModelName
    arrival_s: float
    steps: int
    uncached_tokens: float
    context_tokens: float
    completion_tokens: float
    gap_s: float
    deadline_s: float | None
    value: float
    is_deferrable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a round may do.

    At most `removals_per_round_max` engines are taken out of service in a round, and of one model
    `removals_per_model_ratio_max` of those serving (one at least); at most `starts_per_round_max` are
    started. Arrivals between `hold_below_ratio` under and `hold_above_ratio` over those that the
    standing plan was made for count as unchanged, and capacity goes down only to the most that was
    needed in `hold_below_s` of a lower need, unless that is `hold_far_ratio` lower. A choice is taken
    to stand for `stands_s`: a move must earn its cost within it, and all moves together save
    `gain_ratio_min` of what staying costs, unless work would be left out. `change_micro_usd` is charged
    to each engine started or stopped, over the machine time of its start. `asleep_per_node_max` bounds
    what host memory holds.
    """

    removals_per_round_max: int = 4
    removals_per_model_ratio_max: float = 0.25
    starts_per_round_max: int = 64
    hold_above_ratio: float = 0.05
    hold_below_ratio: float = 0.10
    hold_below_s: float = 600.0
    hold_far_ratio: float = 0.3
    gain_ratio_min: float = 0.01
    stands_s: float = 3_600.0
    change_micro_usd: int = 10_000
    asleep_per_node_max: int = 1
    solve_s_max: float = 3.5
    gap_ratio_max: float = 0.02
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a plan depends on. `now_s` is seconds since 1970, UTC.

    `held` and `standing` (its desired engines) come from the standing plan: while that is as good as
    any, it is followed to its end. `recent` replaces `stretches` for the models that it names.
    """

    now_s: float
    demands: tuple[Demand, ...]
    pools: tuple[PoolKind, ...]
    shapes: tuple[NodeShape, ...]
    nodes: tuple[NodeState, ...]
    limits: Limits = Limits()
    held: tuple[Held, ...] = ()
    standing: tuple[DesiredCount, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    recent: tuple[RecentWorkflow, ...] = ()


# ---------------------------------------------------------------- the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrice:
    """What one more unit of a pool's capacity would save, beyond its rent. 0 where it is not short.

    GPU time is that of a whole engine, as in `Forecast.gpu_ms`.
    """

    model: ModelName
    gpu_type: GpuTypeName
    gpus: int
    role: Role
    region: RegionName
    micro_usd_per_gpu_ms: float
    micro_usd_per_kv_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPrice:
    """`bid_micro_usd`: the value that one workflow of the class displaces where it costs least.

    Below it a workflow is worth less than what it takes from others. `served_ratio` is the part of
    the class's arrivals that today's capacity serves at best.
    """

    class_id: str
    model: ModelName
    bid_micro_usd: float
    served_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    pools: tuple[PoolPrice, ...] = ()
    classes: tuple[ClassPrice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredNodes:
    """Nodes wanted of a shape, against those that are there: what an autoscaler follows."""

    region: RegionName
    gpu_type: GpuTypeName
    gpus: int
    desired: int
    actual: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The part of a class's planned arrivals that a pool serves, by the plan."""

    class_id: str
    model: ModelName
    gpu_type: GpuTypeName
    gpus: int
    role: Role
    region: RegionName
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change. `number` orders the round; it may begin when the moves in `after` are done.

    `load` names a new engine; `role` changes to `role` from `role_before`. `drain` has no engine.
    `gain_micro_usd_per_hour` is what it saves each hour as a part of the plan, negative when it buys
    capacity. `duration_s` is how long it is expected to take.
    """

    number: int
    kind: MoveKind
    node_id: NodeId
    engine_id: EngineId | None = None
    model: ModelName | None = None
    role: Role | None = None
    role_before: Role | None = None
    gpus: int = 0
    sleep_level: int = 0
    reason: str
    gain_micro_usd_per_hour: float
    duration_s: float = 0.0
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `objective` and `bound` are micro-dollars over `Limits.stands_s`.

    They count rent, starts and the value of work left out; no plan costs less than `bound`, and
    `gap_ratio` is how far `objective` may lie above the best. `binding` says in words what holds the
    plan back. `held` goes into the next problem. `deferred` names the classes whose work waits for a
    valley, with the part that runs now.
    """

    made_at_s: float
    problem_digest: str
    status: PlanStatus
    desired: tuple[DesiredCount, ...]
    desired_nodes: tuple[DesiredNodes, ...]
    assignment: tuple[Assignment, ...]
    moves: tuple[Move, ...]
    moves_waiting: int
    prices: Prices
    stretches: tuple[Stretch, ...]
    held: tuple[Held, ...]
    deferred: tuple[Held, ...]
    fleet_micro_usd_per_hour: float
    objective: float
    bound: float
    gap_ratio: float
    solve_s: float
    binding: tuple[str, ...]


# ---------------------------------------------------------------- JSON


def as_json(value: "DataclassInstance") -> str:
    """Canonical JSON: the same value gives the same bytes. Raises ValueError on NaN or infinity."""
    return json.dumps(asdict(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(kind: type[_T], text: str | bytes) -> _T:
    """The value that `as_json` wrote. Raises ValueError when it is anything else."""
    if len(text) > JSON_BYTES_MAX:
        raise ValueError(f"JSON of a planner value exceeds {JSON_BYTES_MAX} bytes")
    return from_builtins(kind, json.loads(text))


def from_builtins(kind: type[_T], value: object) -> _T:
    """As `from_json`, of what is decoded already (a JSONB column). Raises ValueError."""
    decoded: _T = _decode(kind, value, kind.__name__)
    return decoded


def digest(problem: Problem) -> str:
    """Names a problem: SHA-256 of its canonical JSON, hexadecimal."""
    return sha256(as_json(problem).encode()).hexdigest()


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, value: object, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_fields(kind, value, where)
    origin = get_origin(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"`{where}` is not a list")
        return tuple(_decode(get_args(kind)[0], item, f"{where}[]") for item in value)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (inner,) = (part for part in get_args(kind) if part is not NoneType)
        return _decode(inner, value, where)
    plain = getattr(kind, "__supertype__", kind)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if issubclass(plain, StrEnum):
        return plain(value)
    if type(value) is not plain:
        raise ValueError(f"`{where}` is not of type {plain.__name__}")
    return value


def _decode_fields(kind: type, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"`{where}` is not an object")  # noqa: TRY004 - one kind of refusal
    hints = _hints(kind)
    known = {field.name for field in fields(kind)}
    if unknown := value.keys() - known:
        raise ValueError(f"`{where}` has no field {sorted(unknown)}")
    try:
        return kind(**{name: _decode(hints[name], value[name], name) for name in value})
    except TypeError as error:
        raise ValueError(f"`{where}` lacks a field: {error}") from error
