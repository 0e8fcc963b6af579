"""`headway simulate --from-log TIME`: what was recorded, played on another fleet or under other policies.

Read through the operator API, newest first and bounded; no prompt, no answer and no key is in it. The
same plans are played twice by the live code: on the fleet and under the policies as they are, which shows
how far the world is from what was recorded, and on those that were asked for.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from cli.client import JsonObject, OperatorClient
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session
from cli.output import Output, table
from cli.policy.sources import compiled, read_any
from cli.simulate.contracts import (
    MICRO_USD_PER_USD,
    MS_PER_S,
    Call,
    EngineSpec,
    Fate,
    FleetSpec,
    Plan,
    Result,
    WorldOptions,
)
from cli.simulate.fleets import fleet as fleet_named
from cli.simulate.headway import Headway, HeadwayOptions, SimulatedJob
from cli.simulate.recorded import (
    Played,
    RecordedCall,
    RecordedFacts,
    RecordedWorkflow,
    Standing,
    StandingOf,
    plans_of,
)
from cli.simulate.world import World
from controlplane.domain.catalog import GpuType, Model, Role, Scope, SloClass, Tenant
from controlplane.domain.decision import Refuse
from controlplane.domain.ids import ModelName, SloClassName, TenantId
from policies.evaluate import Policy, terms_for
from policies.facts import from_json
from policies.replay import Recorded, Replay

# Most rows of one kind, and most bytes of all of them as JSON, that are read.
ROWS_MAX: Final = 100_000
BYTES_MAX: Final = 256 * 1024 * 1024
ROWS_PER_PAGE: Final = 500
# Facts are large; the server that makes pages of them also serves calls.
FACTS_PER_PAGE: Final = 100
SINCE_S_MAX: Final = 31 * 86_400
SEED: Final = 1
# After the last arrival the world goes on for as long as its workflows take.
TAIL_S: Final = 1.0
ROWS_SHOWN_MAX: Final = 30
SECONDS_PER_HOUR: Final = 3_600.0
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SINCE: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_TOO_LARGE: Final = "ask for a shorter time"

Progress = Callable[[float, str], None]


# ------------------------------------------------------------ the log, as the operator API tells it


@dataclass(slots=True)
class Reader:
    """Pages of the operator API within the limits. Raises CommandFailure beyond them."""

    api: OperatorClient
    rows_max: int = ROWS_MAX
    bytes_max: int = BYTES_MAX
    _bytes: int = 0

    def rows(
        self, path: str, *, until: str = "", since: datetime | None = None, **query: str | int
    ) -> Iterator[JsonObject]:
        """All rows; of a list that is newest first by `until` those from `since` on."""
        count, cursor = 0, None
        query.setdefault("limit", ROWS_PER_PAGE)
        while True:
            page = self.api.get(path, cursor=cursor, **query)
            self._bytes += len(json.dumps(page))
            if self._bytes > self.bytes_max:
                raise CommandFailure(
                    ExitCode.FAILED,
                    f"the log of this time is larger than {self.bytes_max:,} bytes",
                    _TOO_LARGE,
                )
            for row in page["data"]:
                if since is not None and _instant(row[until]) < since:
                    return
                count += 1
                if count > self.rows_max:
                    raise CommandFailure(
                        ExitCode.FAILED,
                        f"the log of this time has more than {self.rows_max:,} rows of `{path}`",
                        _TOO_LARGE,
                    )
                yield row
            cursor = page["next_cursor"]
            if cursor is None:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What was recorded, and what the catalogue says now."""

    seconds: int
    calls: tuple[RecordedCall, ...]
    workflows: Mapping[str, RecordedWorkflow]
    facts: tuple[RecordedFacts, ...]
    rules: tuple[Recorded, ...]
    tenants: Mapping[str, Tenant]
    slo_classes: Mapping[str, SloClass]
    models: frozenset[str]
    fleet: FleetSpec

    def standing_of(self, policy: Policy) -> StandingOf:
        """What a bundle makes of tenant, model, scope and SLO class, as the intake asks it."""
        known: dict[tuple[str, str, Scope, str | None], Standing] = {}
        unnamed = next(iter(self.slo_classes.values()))

        def standing(tenant: str, model: str, scope: Scope, slo_class: str | None) -> Standing:
            key = (tenant, model, scope, slo_class)
            found = known.get(key)
            if found is None:
                who = self.tenants.get(tenant) or _unknown_tenant(tenant, unnamed.name)
                terms = terms_for(policy.bundle, who, ModelName(model), scope)
                name = slo_class or terms.slo_class or who.slo_class
                found = known[key] = Standing(
                    tenant_class=who.tenant_class,
                    is_allowed=terms.is_allowed,
                    priority=terms.priority,
                    weight=terms.weight,
                    slo=self.slo_classes.get(name) or unnamed,
                )
            return found

        return standing


def read_log(reader: Reader, seconds: int, now: datetime) -> Log:
    """The calls, workflows and facts of the last `seconds` before `now`."""
    since = datetime.fromtimestamp(now.timestamp() - seconds, UTC)
    calls = tuple(_call(row) for row in reader.rows("requests", until="opened_at", since=since))
    wanted = {call.workflow for call in calls if call.workflow is not None}
    workflows = {}
    # Of a workflow that was there before, the calls are played alone.
    for row in reader.rows("workflows", until="created_at", since=since):
        if row["id"] in wanted:
            workflows[row["id"]] = _workflow(row)
    facts, rules = [], []
    for row in reader.rows("policies/facts", since_s=seconds, limit=FACTS_PER_PAGE):
        read = _facts(row)
        if read is not None:
            facts.append(read)
        rules.append(
            Recorded(
                request_id=row["request_id"],
                verdict=row["verdict"],
                reason=row["reason"],
                rule=row["rule"],
                weight=row["sample_weight"],
                facts=row["facts"],
            )
        )
    slo_classes = {row["name"]: _slo_class(row) for row in reader.rows("slo-classes")}
    models = {row["name"]: Model(**row) for row in reader.rows("models")}
    if not calls and not any(each.verdict == "refuse" for each in facts):
        raise CommandFailure(
            ExitCode.FAILED,
            f"nothing was recorded in the last {seconds:,} s",
            "ask for a longer time",
        )
    if not slo_classes:
        raise CommandFailure(ExitCode.FAILED, "the catalogue has no SLO class")
    return Log(
        seconds=seconds,
        calls=calls,
        workflows=workflows,
        facts=tuple(facts),
        rules=tuple(rules),
        tenants={row["id"]: _tenant(row) for row in reader.rows("tenants")},
        slo_classes=slo_classes,
        models=frozenset(models),
        fleet=_current_fleet(reader, models),
    )


def _current_fleet(reader: Reader, models: Mapping[str, Model]) -> FleetSpec:
    gpus = {row["name"]: GpuType(**row) for row in reader.rows("gpu-types")}
    engines = tuple(
        EngineSpec(
            name=row["id"],
            model=models[row["model"]],
            gpu=gpus[row["gpu_type"]],
            gpus=row["gpus"],
            role=Role(row["role"]),
            region=row["region"],
            node=row["node_id"],
            seats=row["seats_capacity"],
            kv_tokens=row["kv_tokens_capacity"],
        )
        for row in reader.rows("engines")
        if row["model"] in models and row["seats_capacity"] > 0 and row["kv_tokens_capacity"] > 0
    )
    return FleetSpec(name="as it is", engines=engines)


def _call(row: JsonObject) -> RecordedCall:
    ended_at = row["ended_at"]
    return RecordedCall(
        id=row["id"],
        tenant=row["tenant_id"],
        workflow=row["workflow_id"],
        step=row["step"],
        model=row["model"],
        state=row["state"],
        reason=row["reason"],
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
        completion_tokens=row["completion_tokens"],
        opened_s=_instant(row["opened_at"]).timestamp(),
        ended_s=None if ended_at is None else _instant(ended_at).timestamp(),
        ttft_ms=row["ttft_ms"],
        tpot_ms=row["tpot_ms"],
        settled_micro_usd=row["settled_micro_usd"] or 0,
    )


def _workflow(row: JsonObject) -> RecordedWorkflow:
    return RecordedWorkflow(
        id=row["id"],
        kind=row["kind"],
        scope=Scope(row["scope"]),
        slo_class=row["slo_class"],
        deadline_s=_instant(row["deadline_at"]).timestamp(),
    )


def _facts(row: JsonObject) -> RecordedFacts | None:
    """None of facts that this version can not read."""
    try:
        static, live = from_json(row["facts"])
        scope = Scope(static.workflow_scope) if static.workflow_exists else Scope.CHAT
    except ValueError:
        return None
    return RecordedFacts(
        id=row["request_id"],
        tenant=static.tenant_id,
        model=static.model_name,
        verdict=row["verdict"],
        reason=row["reason"],
        at_s=_instant(row["decided_at"]).timestamp(),
        prompt_tokens=live.request_prompt_tokens,
        scope=scope,
        kind=static.workflow_kind,
        has_workflow=static.workflow_exists,
        step=live.workflow_step,
        client_retries=live.request_client_retries,
        weight=row["sample_weight"],
    )


def _tenant(row: JsonObject) -> Tenant:
    return Tenant(
        id=TenantId(row["id"]),
        name=row["name"],
        tenant_class=row["tenant_class"],
        slo_class=SloClassName(row["slo_class"]),
        is_disabled=row["is_disabled"],
        cache_salt="",
    )


def _unknown_tenant(name: str, slo_class: SloClassName) -> Tenant:
    return Tenant(
        id=TenantId(name), name=name, tenant_class="", slo_class=slo_class, is_disabled=False,
        cache_salt="",
    )  # fmt: skip


def _slo_class(row: JsonObject) -> SloClass:
    return SloClass(**{**row, "name": SloClassName(row["name"])})


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


# ------------------------------------------------------------ what came of it


@dataclass(slots=True)
class Part:
    """Workflows, and calls of theirs that met the targets of their SLO class, of a tenant or a class."""

    workflows: int = 0
    succeeded: int = 0
    calls: int = 0
    on_target: int = 0

    def document(self) -> dict[str, float]:
        return {
            "workflows": self.workflows,
            "succeeded": self.succeeded,
            "success_ratio": round(self.succeeded / max(1, self.workflows), 6),
            "calls": self.calls,
            "slo_ratio": round(self.on_target / max(1, self.calls), 6),
        }


@dataclass(slots=True)
class Tally:
    """What a world, recorded or simulated, came to. `refusals` are workflows that ended with one."""

    total: Part = field(default_factory=Part)
    by_tenant: dict[str, Part] = field(default_factory=lambda: defaultdict(Part))
    by_class: dict[str, Part] = field(default_factory=lambda: defaultdict(Part))
    refusals: Counter[str] = field(default_factory=Counter)
    charged_micro_usd: int = 0
    fleet_usd: float = 0.0

    def parts(self, tenant: str, slo_class: str) -> tuple[Part, Part, Part]:
        return self.total, self.by_tenant[tenant], self.by_class[slo_class]

    def workflow(self, tenant: str, slo_class: str, *, is_success: bool, reason: str) -> None:
        for part in self.parts(tenant, slo_class):
            part.workflows += 1
            part.succeeded += is_success
        if not is_success:
            self.refusals[reason] += 1

    def call(self, tenant: str, slo_class: str, *, is_on_target: bool) -> None:
        for part in self.parts(tenant, slo_class):
            part.calls += 1
            part.on_target += is_on_target

    def document(self) -> dict[str, Any]:
        succeeded = self.total.succeeded
        return {
            **self.total.document(),
            "failures": dict(sorted(self.refusals.items())),
            "fleet_usd": round(self.fleet_usd, 6),
            "cpst_usd": round(self.fleet_usd / succeeded, 6) if succeeded else None,
            "charged_usd": round(self.charged_micro_usd / MICRO_USD_PER_USD, 6),
            "by_tenant": {name: part.document() for name, part in sorted(self.by_tenant.items())},
            "by_slo_class": {name: part.document() for name, part in sorted(self.by_class.items())},
        }


class Watched(Headway):
    """The live code, which also counts who ended how."""

    def __init__(self, options: HeadwayOptions, tally: Tally, ended: Mapping[int, Any]) -> None:
        super().__init__(options)
        self._tally = tally
        self._ended = ended
        self._reasons: dict[int, str] = {}

    def ended(self, call: Call) -> None:
        super().ended(call)
        plan = call.plan
        ttft_ms = call.first_token_ms - call.arrived_ms
        later = call.step.completion_tokens - 1
        tpot_ms = (call.ended_ms - call.first_token_ms) / later if later > 0 else 0.0
        self._tally.call(
            plan.tenant,
            self._ended[plan.number].slo_class,
            is_on_target=ttft_ms <= plan.ttft_s_max * MS_PER_S
            and tpot_ms <= plan.tpot_s_max * MS_PER_S,
        )
        self._tally.charged_micro_usd += self.floor.engines[call.engine].spec.model.cost_micro_usd(
            prompt=call.prompt_tokens,
            cached=call.cached_tokens,
            completion=call.step.completion_tokens,
        )

    def _answer(self, job: SimulatedJob, refuse: Refuse) -> None:
        self._reasons[job.call.plan.number] = str(refuse.reason)
        super()._answer(job, refuse)

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        super().workflow_ended(plan, fate)
        is_refused = fate in (Fate.REFUSED, Fate.REFUSED_LATER)
        reason = self._reasons.pop(plan.number, str(fate))
        self._tally.workflow(
            plan.tenant,
            self._ended[plan.number].slo_class,
            is_success=fate is Fate.SUCCEEDED,
            reason=reason if is_refused else str(fate),
        )


def recorded_tally(played: Played, fleet: FleetSpec) -> Tally:
    """What the log says of the workflows that are played again.

    Its fleet's dollars are those of the fleet as it is now, over the time that was recorded.
    """
    tally = Tally()
    for plan in played.plans:
        ended = played.ended[plan.number]
        tally.workflow(
            ended.tenant, ended.slo_class, is_success=ended.is_success, reason=ended.reason
        )
        for call in played.calls_of[plan.number]:
            tally.charged_micro_usd += call.settled_micro_usd
            if call.is_good:
                tally.call(
                    ended.tenant,
                    ended.slo_class,
                    is_on_target=(call.ttft_ms or 0.0) <= plan.ttft_s_max * MS_PER_S
                    and (call.tpot_ms or 0.0) <= plan.tpot_s_max * MS_PER_S,
                )
    tally.fleet_usd = fleet.usd_per_hour * (played.seconds + TAIL_S) / SECONDS_PER_HOUR
    return tally


def simulated_tally(
    played: Played,
    fleet: FleetSpec,
    policy: Policy,
    progress: Callable[[float], None] | None = None,
) -> tuple[Tally, Result]:
    """The plans on a fleet under a bundle. Raises CommandFailure for what the fleet can not serve."""
    check_fits(played.plans, fleet)
    tally = Tally()
    for tenant, count in played.forbidden.items():
        tally.refusals["forbidden_by_policy"] += count
        tally.by_tenant[tenant].workflows += count
        tally.total.workflows += count
    strategy = Watched(HeadwayOptions(bundle=policy.bundle), tally, played.ended)
    options = WorldOptions(seed=SEED, horizon_s=played.seconds + TAIL_S)
    try:
        world = World(played.plans, fleet, strategy, options)
    except ValueError as error:
        raise CommandFailure(
            ExitCode.FAILED,
            f"the fleet `{fleet.name}` can not hold what was asked for: {error}",
            "add engines with more memory for KV",
        ) from error
    result = world.run(progress)
    tally.fleet_usd = result.fleet_usd
    return tally, result


def check_fits(plans: Sequence[Plan], fleet: FleetSpec) -> None:
    if not fleet.engines:
        raise CommandFailure(
            ExitCode.FAILED, f"the fleet `{fleet.name}` has no engine", "name one with --fleet"
        )
    served = {engine.model.name for engine in fleet.engines if engine.role is not Role.PREFILL}
    missing = Counter(plan.model for plan in plans if plan.model not in served)
    if missing:
        told = ", ".join(f"`{name}` ({count:,} workflows)" for name, count in missing.most_common())
        raise CommandFailure(
            ExitCode.FAILED,
            f"the fleet `{fleet.name}` does not serve what was asked for: {told}",
            "add engines of these models to the document given with --fleet",
        )


# ------------------------------------------------------------ the command


def what_if(
    session_api: OperatorClient,
    since: str,
    fleet: str | None,
    policies: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """The document: recorded, simulated as it is, and simulated otherwise.

    Raises CommandFailure when nothing is recorded, the log is too large, or the fleet does not fit it.
    """
    seconds = seconds_of(since)
    session = Session(api=session_api, out=Output())
    progress(0.0, "reading the log")
    log = read_log(Reader(session_api), seconds, datetime.now(UTC))
    now_policy = compiled(*read_any(session, "active"))
    then_policy = now_policy if policies is None else compiled(*read_any(session, policies))
    then_fleet = log.fleet if fleet is None else fleet_named(fleet)
    return compared(log, now_policy, then_policy, then_fleet, progress)


def compared(
    log: Log, now_policy: Policy, then_policy: Policy, then_fleet: FleetSpec, progress: Progress
) -> dict[str, Any]:
    standing_of = log.standing_of(now_policy)
    # Where no engine is there now, that fleet is unknown: only policies are compared.
    now_fleet = log.fleet if log.fleet.engines else then_fleet
    played = plans_of(log.calls, log.workflows, log.facts, standing_of)
    if not played.plans:
        raise CommandFailure(ExitCode.FAILED, "nothing that was recorded can be played again")
    other = played
    if then_policy is not now_policy:
        other = plans_of(log.calls, log.workflows, log.facts, log.standing_of(then_policy))
    recorded = recorded_tally(played, now_fleet)
    as_is, _ = simulated_tally(
        played, now_fleet, now_policy, lambda part: progress(part / 2, "as it is")
    )
    otherwise, _ = simulated_tally(
        other, then_fleet, then_policy, lambda part: progress(0.5 + part / 2, "what if")
    )
    again = Replay(then_policy)
    again.add_all(log.rules)
    rules = again.report()
    return {
        "since_s": log.seconds,
        "fleet": {"as_it_is": now_fleet.name, "what_if": then_fleet.name},
        "policies": {"as_it_is": now_policy.revision, "what_if": then_policy.revision},
        "plans": len(played.plans),
        "steps": sum(len(plan.steps) for plan in played.plans),
        "notes": {name: count for name, count in sorted(played.notes.items()) if count},
        "rules": {
            "calls": rules.calls,
            "refused_before": rules.calls_denied_before,
            "refused_after": rules.calls_denied_after,
            "changed": rules.calls_changed,
        },
        "worlds": {
            "recorded": recorded.document(),
            "as_it_is": as_is.document(),
            "what_if": otherwise.document(),
        },
    }


def seconds_of(since: str) -> int:
    """Raises CommandFailure for what is no time, or too long a one."""
    found = _SINCE.fullmatch(since)
    seconds = 0 if found is None else int(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds <= SINCE_S_MAX:
        raise CommandFailure(
            ExitCode.USAGE,
            f"`{since}` is not a time of at most {SINCE_S_MAX // 86_400} days",
            "write it as 90s, 30m, 24h or 7d",
        )
    return seconds


WORLDS: Final = {"recorded": "RECORDED", "as_it_is": "AS IT IS", "what_if": "WHAT IF"}


def tables(document: Mapping[str, Any]) -> Iterator[Any]:
    """What was recorded beside what was simulated: sums, then by tenant, by SLO class, by refusal."""
    worlds = document["worlds"]
    columns = ("", *(f">{title}" for title in WORLDS.values()))
    yield table(columns, sums(document), title="The log again")
    for key, title in (("by_tenant", "By tenant"), ("by_slo_class", "By SLO class")):
        names = sorted({name for world in worlds.values() for name in world[key]})
        yield table(
            columns,
            (
                (name, *(_ratios(worlds[world][key].get(name)) for world in WORLDS))
                for name in names[:ROWS_SHOWN_MAX]
            ),
            title=f"{title}: succeeded of workflows, calls within their targets",
        )
    reasons = sorted({name for world in worlds.values() for name in world["failures"]})
    if reasons:
        yield table(
            columns,
            (
                (name, *(worlds[world]["failures"].get(name, 0) for world in WORLDS))
                for name in reasons
            ),
            title="Workflows that did not succeed, by reason",
        )


def sums(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    worlds = document["worlds"]

    def line(title: str, show: Callable[[Mapping[str, Any]], str]) -> tuple[str, ...]:
        return (title, *(show(worlds[name]) for name in WORLDS))

    yield line("workflows", lambda world: f"{world['workflows']:,}")
    yield line("succeeded", lambda world: f"{world['succeeded']:,} ({world['success_ratio']:.1%})")
    yield line("calls within targets", lambda world: f"{world['slo_ratio']:.1%}")
    yield line("dollars of the fleet", lambda world: f"{world['fleet_usd']:,.4f}")
    yield line("dollars per success", lambda world: _or_dash(world["cpst_usd"]))
    yield line("dollars charged", lambda world: f"{world['charged_usd']:,.6f}")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6f}"


def _ratios(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "-"
    return f"{part['succeeded']}/{part['workflows']}, {part['slo_ratio']:.0%}"


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """What must be known to read the tables."""
    for name, count in document["notes"].items():
        yield f"[dim]{count:,} {name}[/]"
    rules = document["rules"]
    yield (
        f"[dim]rules are not simulated: of {rules['calls']:,} recorded calls they refused"
        f" {rules['refused_before']:,}, the bundle asked for would refuse {rules['refused_after']:,}[/]"
    )
