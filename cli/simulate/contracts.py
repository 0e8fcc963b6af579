"""What the simulated world, the policies that play in it and the experiments agree on.

A world plays plans (workflows) on a fleet under one strategy and returns a result. A strategy sees
calls and engines and acts through the floor; everything that is random comes from the seed.
Times of the world are milliseconds since it began (`_ms`), those of plans seconds (`_s`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from random import Random
from typing import Any, Final, Protocol

from controlplane.domain.catalog import GpuType, Model, Role, Scope
from controlplane.scheduler.perf_model import EngineRates, engine_rates

MS_PER_S: Final = 1_000.0
MICRO_USD_PER_USD: Final = 1e6
# vLLM's default of --max-num-batched-tokens for an online server, and of --max-num-seqs.
STEP_TOKENS_MAX: Final = 8_192
SEATS_MAX: Final = 256
# An engine that starts: the container, the weights, the graphs. Billed, and it serves nobody.
COLD_START_S: Final = 180.0


# ------------------------------------------------------------ what is asked for


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a workflow. Its prompt is `reusable_tokens` that the context before it began with, and
    `new_tokens` behind them; `gap_s` pass between its end and the next step.

    Of a first step the reusable tokens are the prefix that the plan shares with others. A step may hand
    work to `branches`, which begin at its end and all run at once: `gap_s` begins when the last of them
    has ended.
    """

    new_tokens: int
    reusable_tokens: int
    completion_tokens: int
    gap_s: float = 0.0
    branches: "tuple[Branch, ...]" = ()

    @property
    def prompt_tokens(self) -> int:
        return self.new_tokens + self.reusable_tokens


@dataclass(frozen=True, slots=True)
class Branch:
    """A sub-agent: calls of the same workflow, one after the other, with a context of their own.

    Its prompts begin with `prefix_tokens` that it shares with branches of its `kind` that have as many, of
    all plans with the same prefix.
    """

    steps: tuple[Step, ...]
    prefix_tokens: int = 0
    kind: str = "agent"


def all_steps(steps: tuple[Step, ...]) -> Iterator[Step]:
    """The steps and those of their branches, each followed by its branches'."""
    for step in steps:
        yield step
        for branch in step.branches:
            yield from all_steps(branch.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One workflow. Succeeds when every step ends by `arrival_s + deadline_s` and `is_good` was drawn,
    with probability `good_ratio`.

    `number` is unique in a run. `workflow_class` names its kind (what sizes may be learned by),
    `prefix` the shared prefix of `prefix_tokens` that its prompts begin with (empty: none). `priority`
    is 0..9 (higher stays longer), `weight` the share and the worth of its tenant. `deadline_s` None:
    whenever it ends. The targets are of each step: goodput counts who met them, success does not.
    """

    number: int
    tenant: str
    workflow_class: str
    arrival_s: float
    steps: tuple[Step, ...]
    deadline_s: float | None
    model: str = ""
    tenant_class: str = "standard"
    priority: int = 5
    weight: float = 1.0
    scope: Scope = Scope.AUTONOMOUS
    prefix: str = ""
    prefix_tokens: int = 0
    is_good: bool = True
    good_ratio: float = 1.0
    ttft_s_max: float = 10.0
    tpot_s_max: float = 0.1
    value_usd: float = 0.05

    @property
    def calls(self) -> int:
        """Its steps and those of their branches."""
        return sum(1 for _ in all_steps(self.steps))


# ------------------------------------------------------------ what serves it


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine: a model on `gpus` GPUs of one type. The price is that of its GPUs.

    `slowness_ratio` is how many times slower it really is than the performance model says. An engine
    that is not `is_on` at first is off, and costs nothing until it is started.
    """

    name: str
    model: Model
    gpu: GpuType
    gpus: int
    role: Role = Role.BOTH
    region: str = "north"
    node: str = ""
    seats: int = SEATS_MAX
    step_tokens_max: int = STEP_TOKENS_MAX
    kv_tokens: int = 0
    slowness_ratio: float = 1.0
    cold_start_s: float = COLD_START_S
    is_on: bool = True

    @cached_property
    def rates(self) -> EngineRates:
        """Rates of the performance model, before `slowness_ratio`."""
        return engine_rates(self.model, self.gpu, self.gpus)

    @property
    def kv_tokens_capacity(self) -> int:
        """KV tokens that fit: as told, else what the GPUs' memory leaves beside the weights."""
        return self.kv_tokens or self.rates.kv_tokens_capacity

    @property
    def micro_usd_per_hour(self) -> float:
        return float(self.gpus * self.gpu.price_micro_usd_per_hour)


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    name: str
    engines: tuple[EngineSpec, ...]

    @property
    def usd_per_hour(self) -> float:
        """Of all engines, as if all were on."""
        return sum(engine.micro_usd_per_hour for engine in self.engines) / MICRO_USD_PER_USD


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeath:
    """The engine's process dies with all calls on it, and is back, empty, after its cold start."""

    at_s: float
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEngine:
    """Every step of the engine takes `factor` times as long until `until_s`."""

    at_s: float
    until_s: float
    engine: int
    factor: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """The engine finishes what it has and takes nothing new until `until_s`."""

    at_s: float
    until_s: float
    engine: int


Fault = EngineDeath | SlowEngine | Cordon


# ------------------------------------------------------------ what happens to a call


class Fate(StrEnum):
    """How a workflow ended. The values are words in results and logs."""

    SUCCEEDED = "succeeded"
    BAD = "bad"  # in time, but its answer was not good enough
    LATE = "late"
    REFUSED = "refused"  # at its first step
    REFUSED_LATER = "refused_later"
    FAILED = "failed"  # its engine died and nobody took it on


class Waste(StrEnum):
    """What dollars of the fleet went into that did not end in a success."""

    LATE = "late"
    REFUSED_LATER_STEP = "refused_later_step"
    BAD = "bad"
    PREEMPTED = "preempted"
    RETRIES = "retries"
    COLD_START = "cold_start"
    IDLE = "idle"


class Chain:
    """A context, and the steps that go on in it one after the other: a plan's own, or those of a branch.

    `key` names the context, in a run: the plan's number for its own. `home` is the engine that its step
    before ran on, or -1; `place` that of its present step; `open` counts the branches of that step that have
    not ended, `parent` is whose branch it is.
    """

    __slots__ = ("home", "key", "open", "parent", "place", "prefix", "prefix_tokens", "steps")

    def __init__(self, plan: Plan, number: int = 0, branch: Branch | None = None) -> None:
        self.key: int | tuple[int, int] = plan.number if branch is None else (plan.number, number)
        self.steps = plan.steps if branch is None else branch.steps
        self.prefix = plan.prefix
        self.prefix_tokens = plan.prefix_tokens
        if branch is not None:
            has_prefix = bool(plan.prefix) and branch.prefix_tokens > 0
            self.prefix = (
                f"{plan.prefix} {branch.kind} {branch.prefix_tokens}" if has_prefix else ""
            )
            self.prefix_tokens = branch.prefix_tokens
        self.home = -1
        self.place = 0
        self.open = 0
        self.parent: Chain | None = None


class Call:
    """One step of one plan on its way. The world writes to it; strategies read, and may keep what they
    like in `own`.

    `step_number` counts the workflow's calls as they come, branches' among them; `place` is the step's in
    its `chain`. `completion_tokens_expected` and `steps_expected` are what was learned of the workflow's
    class so far. True sizes are in `plan`, for clairvoyant strategies only. `deadline_ms` is the workflow's,
    `asked_ms` when this try came, `arrived_ms` when the step's first try came. `cached_tokens` of its
    prompt were found in the cache, as the engine reports at its end. `engine` is -1 while it
    is on none; `prefill` is the engine that computes its prompt for that one, -1 when that one does so
    itself; `home` is the engine that the chain's step before ran on, or -1, and `workflow_home` the one
    where a call of the workflow ended last.
    """

    __slots__ = (
        "arrived_ms", "asked_ms", "cached_tokens", "chain", "completion_tokens_expected", "deadline_ms",
        "ended_ms", "engine", "first_token_ms", "gpu_ms", "home", "id", "is_between_tries", "is_waiting",
        "own", "place", "plan", "prefill", "sent_ms", "step", "step_number", "steps_expected", "tries",
        "workflow_home",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        step_number: int,
        now_ms: float,
        deadline_ms: float,
        chain: Chain | None = None,
    ) -> None:
        if chain is None:
            chain = Chain(plan)
            chain.place = step_number
        self.plan = plan
        self.chain = chain
        self.place = chain.place
        self.step = chain.steps[chain.place]
        self.step_number = step_number
        self.id = f"w{plan.number}-{step_number}"
        self.arrived_ms = now_ms
        self.asked_ms = now_ms
        self.deadline_ms = deadline_ms
        self.completion_tokens_expected = 0
        self.steps_expected = 1
        self.tries = 0
        self.engine = -1
        self.prefill = -1
        self.home = -1
        self.workflow_home = -1
        self.sent_ms = 0.0
        self.first_token_ms = 0.0
        self.ended_ms = 0.0
        self.gpu_ms = 0.0
        self.cached_tokens = 0
        # With the strategy, which owes an answer: send it or refuse it.
        self.is_waiting = True
        # Refused, and its client will come again.
        self.is_between_tries = False
        self.own: Any = None

    @property
    def prompt_tokens(self) -> int:
        return self.step.prompt_tokens

    @property
    def is_last(self) -> bool:
        """Nothing of the workflow comes after it, whatever still runs beside it."""
        chain = self.chain
        if self.step.branches or self.place + 1 < len(chain.steps):
            return False
        while chain.parent is not None:
            chain = chain.parent
            if chain.place + 1 < len(chain.steps):
                return False
        return True


# ------------------------------------------------------------ what a strategy sees and does


class Condition(StrEnum):
    """What an engine does, as its agent and its operators say."""

    OFF = "off"
    STARTING = "starting"
    SERVING = "serving"
    CORDONED = "cordoned"
    DRAINING = "draining"


class EngineView:
    """An engine as a router sees it. `in_flight` counts what this router sent and is always fresh; the
    gauges that the engine reports are as old as the world's telemetry.

    `running` and `waiting` are calls, `kv_tokens_used` those held by running calls (what is cached for
    later is not counted), `prefill_tokens_waiting` prompt tokens not computed yet. `life` counts the
    engine's processes: in another life its cache is empty. `began_ms` is when this one began to serve.
    """

    __slots__ = (
        "began_ms", "condition", "in_flight", "index", "kv_tokens_capacity", "kv_tokens_used", "life",
        "prefill_tokens_waiting", "rates", "running", "spec", "waiting",
    )  # fmt: skip

    def __init__(self, index: int, spec: EngineSpec) -> None:
        self.index = index
        self.spec = spec
        self.rates = spec.rates
        self.kv_tokens_capacity = spec.kv_tokens_capacity
        self.condition = Condition.SERVING if spec.is_on else Condition.OFF
        self.life = 0
        self.began_ms = 0.0
        self.in_flight = 0
        self.running = 0
        self.waiting = 0
        self.kv_tokens_used = 0
        self.prefill_tokens_waiting = 0

    @property
    def is_accepting(self) -> bool:
        return self.condition is Condition.SERVING

    @property
    def kv_used_ratio(self) -> float:
        return self.kv_tokens_used / self.kv_tokens_capacity


class Floor(Protocol):
    """The world as a strategy may touch it."""

    @property
    def now_ms(self) -> float: ...

    @property
    def engines(self) -> Sequence[EngineView]:
        """All engines by index, also those that accept nothing."""
        ...

    @property
    def random(self) -> Random:
        """For strategies that draw; seeded by the run, used by nobody else."""
        ...

    def can_take(self, call: Call, engine: int) -> bool:
        """The engine accepts calls, serves the model, answers calls, and holds a context of this size."""
        ...

    def can_prefill(self, call: Call, engine: int) -> bool:
        """The engine computes prompts for others, accepts calls, serves the model, and holds this prompt."""
        ...

    def cached_tokens(self, call: Call, engine: int) -> int:
        """Tokens of the call's prompt that the engine's cache holds now."""
        ...

    def prefill_ms(self, call: Call, engine: int) -> float:
        """Time to compute what of the call's prompt the engine does not hold, with nobody else there."""
        ...

    def send(
        self, call: Call, engine: int, priority: float = 0.0, prefill: int | None = None
    ) -> None:
        """Give the call to an engine, which queues it if it must. Engines serve smaller `priority`
        first, then by arrival. `prefill` computes the prompt first, and its KV moves to `engine`, which is in
        the same region.

        Raises ValueError when the call is not waiting, `can_take` or `can_prefill` is false, or the engines
        are in two regions.
        """
        ...

    def refuse(self, call: Call, retry_after_ms: float | None, *, is_final: bool = False) -> None:
        """Answer 429. None tells no time: clients back off by themselves. `is_final`: do not come back."""
        ...

    def start(self, engine: int) -> None:
        """Turn an engine on: it accepts calls after its cold start, and costs from now on."""
        ...

    def stop(self, engine: int) -> None:
        """Drain an engine and turn it off when its last call has ended."""
        ...


class Strategy(Protocol):
    """A policy of admission and placement. A new instance for every run; keep no state elsewhere.

    Every call that `arrived` or `failed` must in time be sent or refused, unless it `expired` before.
    """

    @property
    def name(self) -> str: ...

    @property
    def waiting(self) -> int:
        """Calls that arrived and were neither sent nor refused."""
        ...

    def begin(self, floor: Floor) -> None: ...

    def arrived(self, call: Call) -> None:
        """A call, or a try of it after a refusal, has come."""
        ...

    def prefilled(self, call: Call) -> None:
        """`call.prefill` has computed the prompt, and has a call less in flight."""
        ...

    def first_token(self, call: Call) -> None:
        """Its engine has the prompt's KV and has sent the first token."""
        ...

    def ended(self, call: Call) -> None:
        """The call has all its tokens; `call.engine` is where it ran."""
        ...

    def failed(self, call: Call) -> None:
        """An engine that it needed died before its end: it waits again, for another or a refusal.

        Of a pair: the prefill engine until the KV has moved, and the other one from then on. That one is
        asked only when the prompt is computed, so that its death is not noticed before.
        """
        ...

    def expired(self, call: Call) -> None:
        """The client hung up, at its deadline or because another call has ended its workflow: the call is
        gone, wherever it was.

        `call.engine` is where it ran or stood, -1 when it was with the strategy.
        """
        ...

    def workflow_ended(self, plan: Plan, fate: Fate) -> None: ...

    def engine_changed(self, engine: int) -> None:
        """An engine began or ceased to accept, or its cache was lost. Read its view."""
        ...

    def refreshed(self) -> None:
        """The gauges of all engine views were read anew."""
        ...

    def tick(self, now_ms: float) -> None:
        """Every `WorldOptions.tick_ms`."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """What must be 0 when every call has ended, by name, beside `waiting`."""
        ...


class Pushes:
    """Answers of a strategy that wants to hear of nothing; a place to begin from."""

    floor: Floor

    @property
    def waiting(self) -> int:
        return 0

    def begin(self, floor: Floor) -> None:
        self.floor = floor

    def prefilled(self, call: Call) -> None: ...

    def first_token(self, call: Call) -> None: ...

    def ended(self, call: Call) -> None: ...

    def expired(self, call: Call) -> None: ...

    def workflow_ended(self, plan: Plan, fate: Fate) -> None: ...

    def engine_changed(self, engine: int) -> None: ...

    def refreshed(self) -> None: ...

    def tick(self, now_ms: float) -> None: ...

    def gauges(self) -> Mapping[str, float]:
        return {}


# ------------------------------------------------------------ how a run is made


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """How clients behave, as OpenAI's SDK does: `retries_max` tries more after a refusal, when told
    (`Retry-After` of at most `retry_after_s_max`), else after `backoff_s * 2^n` of at most
    `backoff_s_max`, less up to a quarter by chance. They hang up at their workflow's deadline, and
    without one when a call takes longer than `patience_s`.
    """

    retries_max: int = 2
    retry_after_s_max: float = 60.0
    backoff_s: float = 0.5
    backoff_s_max: float = 8.0
    patience_s: float = 600.0
    do_hang_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """Workflows that come in `warm_up_s..horizon_s - cool_down_s` are measured, and so are the fleet's
    dollars in that time; `horizon_s` is when the last one may come. Who is not measured hangs up when all
    others have ended.

    `telemetry_age_s`: how old what engines report is when a strategy reads it, 0 for live.
    """

    seed: int
    horizon_s: float
    warm_up_s: float = 0.0
    cool_down_s: float = 0.0
    tick_ms: float = 250.0
    telemetry_age_s: float = 0.1
    client: ClientRules = field(default_factory=ClientRules)
    faults: tuple[Fault, ...] = ()
    has_log: bool = False


@dataclass(slots=True)
class Tally:
    """Measured workflows of one kind, by fate."""

    started: int = 0
    fates: dict[Fate, int] = field(default_factory=dict)

    @property
    def succeeded(self) -> int:
        return self.fates.get(Fate.SUCCEEDED, 0)

    @property
    def success_ratio(self) -> float:
        return self.succeeded / self.started if self.started else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of measured steps, in milliseconds. Zeros when there were none."""

    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    mean_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. Dollars are those of the measured time; workflows those that came in it.

    INVARIANT: busy_usd + wasted idle + wasted cold start = fleet_usd, up to rounding.

    `weighted_successes` count a workflow by its weight; `expected_successes` sum the `good_ratio` of
    those that ended in time, whatever was drawn. `wasted_usd` has a value for every cause.
    `late_kill_ratio`: refusals of later steps over all final refusals. `jain` is Jain's index of
    service over weight of the tenants that asked, where service is uncached prompt tokens and twice
    the completion tokens of measured time. `good_steps` met their TTFT and TPOT targets.
    `gauges_at_end` are all 0 when nothing leaks. `digest` is the SHA-256 of the log of events: the
    same seed gives the same digest.
    """

    strategy: str
    seed: int
    measured_s: float
    total: Tally
    by_priority: Mapping[int, Tally]
    by_class: Mapping[str, Tally]
    weighted_successes: float
    expected_successes: float
    fleet_usd: float
    busy_usd: float
    wasted_usd: Mapping[Waste, float]
    late_kill_ratio: float
    refusals: int
    refusals_final: int
    tries: int
    ttft: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    ttft_by_priority: Mapping[int, Quantiles]
    good_steps: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    service_by_tenant: Mapping[str, float]
    jain: float
    fleet_usd_by_minute: tuple[float, ...]
    engines_on_by_minute: tuple[int, ...]
    engine_starts: int
    decisions: int
    decision_us_mean: float
    calls_per_wall_minute: float
    gauges_at_end: Mapping[str, float]
    digest: str
    log: tuple[str, ...] = ()
    # Calls that ended on a pair, measured or not.
    pair_calls: int = 0

    @property
    def cpst_usd(self) -> float:
        """Dollars of the fleet over successes; infinite without any."""
        return self.fleet_usd / self.total.succeeded if self.total.succeeded else float("inf")

    @property
    def goodput_per_s(self) -> float:
        """Workflows per second that succeeded."""
        return self.total.succeeded / self.measured_s if self.measured_s else 0.0


StrategyMaker = Callable[[], Strategy]
# Told how much of a run is done, 0..1.
Progress = Callable[[float], None]

# `cli.simulate.world.play(plans, fleet, strategy, options, progress=None) -> Result`
Play = Callable[[Sequence[Plan], FleetSpec, Strategy, WorldOptions], Result]
