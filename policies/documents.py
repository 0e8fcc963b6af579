"""Shapes of policy documents. Unknown keys are refused: a misspelt limit would be no limit."""

from collections.abc import Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from controlplane.domain.catalog import Scope
from policies.facts import from_json

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
# Globs over model names, which may hold a slash.
GLOB_PATTERN = r"^[A-Za-z0-9._/*?:@+-]{1,255}$"
RULES_MAX = 512
NAMES_MAX = 256
TOKENS_MAX = 10_000_000
CASES_MAX = 64
ANNOTATIONS_MAX = 16
EXPRESSION_BYTES_MAX = 4_096
# Texts of rules end up in headers: printable ASCII, no line breaks.
TEXT_PATTERN = r"^[\x20-\x7e]{1,300}$"
RETRY_AFTER_MS_MAX = 3_600_000
WAIT_S_MAX = 7 * 86_400
HOURS_PER_DAY = 24

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Glob = Annotated[str, StringConstraints(pattern=GLOB_PATTERN)]
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=NAMES_MAX)]
Globs = Annotated[tuple[Glob, ...], Field(min_length=1, max_length=NAMES_MAX)]
Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
Line = Annotated[str, StringConstraints(pattern=TEXT_PATTERN)]
Hour = Annotated[int, Field(ge=0, le=HOURS_PER_DAY)]
Weekday = Annotated[int, Field(ge=0, le=6)]
Priority = Annotated[int, Field(ge=0, le=9)]


class _Document(BaseModel):
    # Validated in strict mode (`load.py`): a number in quotes is text, not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Entitlement(_Document):
    """One rule. It matches when tenant class, tenant id and model all do; globs may hold `*` and `?`.

    A matching `deny` wins over every `allow`. Regions and GPU types of all matching `allow` rules
    are intersected: each rule can only narrow.
    """

    name: Name
    effect: Literal["allow", "deny"]
    tenant_classes: Globs = ("*",)
    tenants: Globs = ("*",)
    models: Globs
    regions: Names | None = None
    gpu_types: Names | None = None

    @model_validator(mode="after")
    def _deny_names_no_places(self) -> "Entitlement":
        if self.effect == "deny" and (self.regions or self.gpu_types):
            msg = "a deny rule can not name regions or gpu_types; name them in the allow rule"
            raise ValueError(msg)
        return self


class Entitlements(_Document):
    kind: Literal["entitlements"]
    version: Literal[1]
    rules: Annotated[tuple[Entitlement, ...], Field(min_length=1, max_length=RULES_MAX)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Entitlements":
        _refuse_twice("rule", (rule.name for rule in self.rules))
        return self


def _refuse_twice(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            msg = f"the {what} name `{name}` is used twice; names are how denials are told"
            raise ValueError(msg)
        seen.add(name)


class ResponseCache(_Document):
    """Answers of deterministic calls are kept for `ttl_s` and given again at `price_ratio` of their cost."""

    ttl_s: Annotated[int, Field(ge=1, le=86_400)]
    price_ratio: Annotated[float, Field(ge=0, le=1)]


class TenantClass(_Document):
    """`weight` scales the value of success and the price of lateness; `priority` orders who is refused
    first when capacity is short (0 goes first); `reserve_ratio` is the share of a call's highest
    possible cost that is held while it runs. When the budget ends in mid-stream the answer is cut
    there or, with `over_budget: finish`, goes on uncharged. Rates are per tenant; null is no limit.
    """

    weight: Annotated[float, Field(gt=0, le=1_000)]
    completion_tokens_default: Tokens
    completion_tokens_max: Tokens
    reserve_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    may_disaggregate: bool = True
    slo_class: Name | None = None
    priority: Annotated[int, Field(ge=0, le=9)] = 5
    over_budget: Literal["cut", "finish"] = "cut"
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10_000_000_000)] | None = None
    calls_in_flight_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    response_cache: ResponseCache | None = None

    @model_validator(mode="after")
    def _default_is_within_max(self) -> "TenantClass":
        if self.completion_tokens_default > self.completion_tokens_max:
            msg = "completion_tokens_default is above completion_tokens_max; lower it"
            raise ValueError(msg)
        return self


class TenantClasses(_Document):
    kind: Literal["tenant_classes"]
    version: Literal[1]
    classes: Annotated[dict[Name, TenantClass], Field(min_length=1, max_length=NAMES_MAX)]


class ScopeLimits(_Document):
    """`fan_out_max` calls in flight at once, `steps_max` steps in all, `step_gap_ms` the expected pause
    before a next step.
    """

    fan_out_max: Annotated[int, Field(ge=1, le=100_000)]
    steps_max: Annotated[int, Field(ge=1, le=1_000_000)]
    step_gap_ms: Annotated[int, Field(ge=0, le=86_400_000)]


class Scopes(_Document):
    kind: Literal["scopes"]
    version: Literal[1]
    scopes: dict[Scope, ScopeLimits]

    @model_validator(mode="after")
    def _every_scope_is_there(self) -> "Scopes":
        missing = [scope.value for scope in Scope if scope not in self.scopes]
        if missing:
            msg = f"limits for {', '.join(f'`{name}`' for name in missing)} are missing; add them"
            raise ValueError(msg)
        return self


class SloDefaults(_Document):
    """The SLO class of calls of a scope, unless the tenant's class names one. Null: the tenant's own."""

    kind: Literal["slo_defaults"]
    version: Literal[1]
    by_scope: dict[Scope, Name | None]


class QueueClass(_Document):
    """A class of waiting calls: its share among the classes, and the highest priority in it."""

    weight: Annotated[float, Field(gt=0, le=1_000)]
    priority_max: Priority


QUEUE_CLASSES: Final = {
    "interactive": QueueClass(weight=8, priority_max=9),
    "standard": QueueClass(weight=4, priority_max=9),
    "batch": QueueClass(weight=1, priority_max=2),
}


class Admission(_Document):
    """How calls wait and who is refused when capacity is short.

    `order`: by the workflow's deadline, or one of the others of `admission/order.py`. `tpot_stretch_ratio_max` and
    `tpot_stretch_ratio_min` bound how far calls in flight may stretch the time per token of an empty
    engine; between them it is as under which most value ends in time. `is_shedding: false` lets in whatever asks.
    `is_bounding: false` leaves engines without a bound of ours on calls in flight. `queue_classes` are
    the classes that rules can put a call into. A tenant that was given more than another that waits goes
    before it, if its deadlines say so, by `fairness_lead_calls` mean calls at most while a fifth of all
    deadlines is missed, further while fewer are and half as far while most are.
    """

    kind: Literal["admission"]
    version: Literal[1]
    order: Literal["deadline", "slack", "index", "plas", "arrival"] = "deadline"
    is_shedding: bool = True
    is_bounding: bool = True
    tpot_stretch_ratio_max: Annotated[float, Field(gt=1, le=10)] = 2.5
    tpot_stretch_ratio_min: Annotated[float, Field(gt=1, le=10)] = 1.1
    fairness_lead_calls: Annotated[float, Field(ge=0, le=1_000_000)] = 4.0
    queue_classes: Annotated[dict[Name, QueueClass], Field(min_length=1, max_length=NAMES_MAX)] = (
        QUEUE_CLASSES
    )


class Phase(StrEnum):
    """When a rule is asked: a call arrives, a step of a workflow does, a call is about to be sent to
    an engine, or a stream has gone on for some tokens.
    """

    ADMIT = "admit"
    DISPATCH = "dispatch"
    STEP = "step"
    STREAM = "stream"


class Level(StrEnum):
    """Whether rules decide, only warn the client, are only recorded, or are not asked."""

    ENFORCE = "enforce"
    WARN = "warn"
    AUDIT = "audit"
    OFF = "off"


class Shed(_Document):
    """Refused for load; the client may come back after `retry_after_ms`."""

    retry_after_ms: Annotated[int, Field(ge=1, le=RETRY_AFTER_MS_MAX)]


class Clamp(_Document):
    """Lowers what was asked for. Only given bounds hold."""

    max_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> "Clamp":
        if self.max_tokens is None and self.n is None:
            msg = "bounds nothing; give max_tokens or n"
            raise ValueError(msg)
        return self


class Route(_Document):
    """Where the call goes: only these regions and GPU types, or another model. A pool is a model in a
    region: name both.
    """

    regions: Names | None = None
    gpu_types: Names | None = None
    model: Glob | None = None

    @model_validator(mode="after")
    def _goes_somewhere(self) -> "Route":
        if self.regions is None and self.gpu_types is None and self.model is None:
            msg = "goes nowhere; give regions, gpu_types or model"
            raise ValueError(msg)
        if self.model is not None and ("*" in self.model or "?" in self.model):
            msg = "a route names one model; write its name without `*` and `?`"
            raise ValueError(msg)
        return self


class Window(_Document):
    """Hours of the day, from and up to (22 to 6 goes over midnight), on some weekdays (0 is Monday). UTC."""

    hours: tuple[Hour, Hour] = (0, HOURS_PER_DAY)
    weekdays: Annotated[tuple[Weekday, ...], Field(min_length=1, max_length=7)] | None = None

    @model_validator(mode="after")
    def _is_a_window(self) -> "Window":
        first, end = self.hours
        if first == end:
            msg = "the window has no hours; give two different ones"
            raise ValueError(msg)
        return self

    def hours_open(self) -> frozenset[int]:
        first, end = self.hours
        length = (end - first) % HOURS_PER_DAY or HOURS_PER_DAY
        return frozenset((first + offset) % HOURS_PER_DAY for offset in range(length))

    def weekdays_open(self) -> frozenset[int]:
        return frozenset(range(7) if self.weekdays is None else self.weekdays)


class Postpone(_Document):
    """Waits for a window of time, or for idle capacity, there for `max_wait_s` seconds at most."""

    until: Literal["idle"] | Window
    max_wait_s: Annotated[int, Field(ge=1, le=WAIT_S_MAX)] | None = None

    @model_validator(mode="after")
    def _idle_has_an_end(self) -> "Postpone":
        if (self.until == "idle") != (self.max_wait_s is not None):
            msg = "max_wait_s belongs to `until: idle`, and is needed there; mend one of them"
            raise ValueError(msg)
        return self


class Case(_Document):
    """A test of a rule: with `given` attributes, and the usual value of all others, it fires or not."""

    name: Name
    given: dict[str, int | str | bool] = {}
    fires: bool

    @model_validator(mode="after")
    def _facts_are_facts(self) -> "Case":
        from_json(self.given)
        return self


EFFECTS: Final = (
    "deny", "shed", "queue_class", "clamp", "route", "priority", "reserve_permille", "defer", "warn",
    "annotate",
)  # fmt: skip
# What can still be done at each phase: a call on its way can not be lowered any more.
EFFECTS_BY_PHASE: Final[dict[Phase, frozenset[str]]] = {
    Phase.ADMIT: frozenset(EFFECTS),
    Phase.STEP: frozenset(EFFECTS) - {"shed"},
    Phase.DISPATCH: frozenset({"deny", "route"}),
    Phase.STREAM: frozenset({"deny"}),
}


class Rule(_Document):
    """When the condition `when` (CEL) holds, the effects do. `message` is told to who is refused."""

    name: Name
    phase: Phase
    when: Annotated[str, Field(min_length=1)]
    deny: Literal[True] | None = None
    shed: Shed | None = None
    queue_class: Name | None = None
    clamp: Clamp | None = None
    route: Route | None = None
    priority: Priority | None = None
    reserve_permille: Annotated[int, Field(ge=1, le=1_000)] | None = None
    defer: Postpone | None = None
    warn: Line | None = None
    annotate: dict[Name, Line] | None = Field(None, min_length=1, max_length=ANNOTATIONS_MAX)
    message: Line
    tests: Annotated[tuple[Case, ...], Field(min_length=2, max_length=CASES_MAX)]

    @field_validator("when", mode="before")
    @classmethod
    def _true_is_a_condition(cls, value: object) -> object:
        # YAML reads a plain `true` as a value of its own.
        return str(value).lower() if isinstance(value, bool) else value

    @property
    def effects(self) -> tuple[str, ...]:
        return tuple(name for name in EFFECTS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _is_whole(self) -> "Rule":
        if len(self.when.encode(errors="replace")) > EXPRESSION_BYTES_MAX:
            msg = f"`when` is over {EXPRESSION_BYTES_MAX:,} bytes; split the rule"
            raise ValueError(msg)
        if not self.effects:
            msg = f"has no effect; give one of {', '.join(EFFECTS)}"
            raise ValueError(msg)
        late = [name for name in self.effects if name not in EFFECTS_BY_PHASE[self.phase]]
        if late:
            can = ", ".join(name for name in EFFECTS if name in EFFECTS_BY_PHASE[self.phase])
            msg = f"`{late[0]}` can not be done at phase {self.phase}; use {can}, or another phase"
            raise ValueError(msg)
        if self.phase is Phase.DISPATCH and self.route is not None and self.route.model is not None:
            msg = "another model can not be named at phase dispatch; route to it at phase admit"
            raise ValueError(msg)
        _refuse_twice("test", (case.name for case in self.tests))
        if {case.fires for case in self.tests} != {True, False}:
            msg = "needs a test in which it fires and one in which it does not; add the other"
            raise ValueError(msg)
        return self


class Rules(_Document):
    """Rules that stand or fall together: one level for all. A bundle may hold many of these documents."""

    kind: Literal["rules"]
    version: Literal[1]
    name: Name
    level: Level
    rules: Annotated[tuple[Rule, ...], Field(min_length=1, max_length=RULES_MAX)]

    @field_validator("level", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        # YAML reads a plain `off` as false.
        return Level.OFF.value if value is False else value

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Rules":
        _refuse_twice("rule", (rule.name for rule in self.rules))
        return self


LADDER_MODELS_MAX: Final = 6
TRIES_MAX: Final = 4

# A model's own name: a ladder's rungs are told one by one.
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,254}$")]
Ladder = Annotated[tuple[ModelName, ...], Field(min_length=1, max_length=LADDER_MODELS_MAX)]


class ModelChoiceClass(_Document):
    """A class of tasks, asked for as the model `auto:NAME`. `default` is what its tenants would use
    without it, a model of the `ladder`.

    The floor of success is `success_floor_ratio`; null is what the default alone reaches, less
    `margin_ratio`. `outcomes_min` outcomes of a model must have been reported before it counts;
    `explore_ratio` of the tasks try what is not known yet, `holdout_ratio` have the default. A task
    has `tries_max` tries: workflows that name the failed one before them.
    """

    ladder: Name
    default: ModelName
    tenant_classes: Globs = ("*",)
    tenants: Globs = ("*",)
    success_floor_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    margin_ratio: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    confidence_ratio: Annotated[float, Field(ge=0.5, lt=1)] = 0.9
    outcomes_min: Annotated[int, Field(ge=1, le=100_000)] = 20
    explore_ratio: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    holdout_ratio: Annotated[float, Field(ge=0, lt=0.5)] = 0.05
    tries_max: Annotated[int, Field(ge=1, le=TRIES_MAX)] = 3

    def is_for(self, tenant: str, tenant_class: str) -> bool:
        """Whether a tenant may ask for it; its models have entitlements of their own."""
        return any(fnmatchcase(tenant, glob) for glob in self.tenants) and any(
            fnmatchcase(tenant_class, glob) for glob in self.tenant_classes
        )


class ModelChoice(_Document):
    """Models chosen by outcomes. `ladders` have the cheapest model first; one can be asked for as the
    model `ladder:NAME`, which climbs it without learning. Without this document nothing is chosen.
    """

    kind: Literal["model_choice"]
    version: Literal[1]
    is_enabled: bool = False
    ladders: Annotated[dict[Name, Ladder], Field(max_length=NAMES_MAX)] = {}
    classes: Annotated[dict[Name, ModelChoiceClass], Field(max_length=NAMES_MAX)] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> "ModelChoice":
        for name, ladder in self.ladders.items():
            if len(set(ladder)) < len(ladder):
                msg = f"the ladder `{name}` names a model twice; a task tries each once"
                raise ValueError(msg)
        for name, of_class in self.classes.items():
            rungs = self.ladders.get(of_class.ladder)
            if rungs is None:
                msg = f"the class `{name}` names the ladder `{of_class.ladder}`, which is not here"
                raise ValueError(msg)
            if of_class.default not in rungs:
                msg = (
                    f"the default model `{of_class.default}` of the class `{name}` is not on its"
                    f" ladder `{of_class.ladder}`; add it there"
                )
                raise ValueError(msg)
        return self


Document = Entitlements | TenantClasses | Scopes | SloDefaults | Admission | ModelChoice | Rules

DOCUMENTS: dict[str, type[Document]] = {
    "entitlements": Entitlements,
    "tenant_classes": TenantClasses,
    "scopes": Scopes,
    "slo_defaults": SloDefaults,
    "admission": Admission,
    "model_choice": ModelChoice,
    "rules": Rules,
}
