"""What an overview says in words: whether all is well, what is short or refused, and what to do about it.

Pure: documents of the operator API in, findings out. `status` and `top` show the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cli.client import JsonObject
from cli.output import dollars

# From this share of its use on a pool is told to be short of seats, or of KV cache.
SATURATED_RATIO: Final = 0.9
# Refusals are told as a trouble from this share of all calls on.
REFUSED_RATIO: Final = 0.01
# A plan is confirmed every ten seconds or so; older than this, nobody plans.
PLAN_AGE_S_MAX: Final = 120.0
BUDGET_ENDED_RATIO: Final = 0.99
NAMES_TOLD_MAX: Final = 3
MS_PER_S: Final = 1_000.0


class Severity(StrEnum):
    """`error`: not healthy. `warning`: somebody should look. `note`: good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, and the command that shows more or mends it."""

    severity: Severity
    words: str
    command: str = ""


# What each reason says of the server, and what an operator does about it. The commands are completed with the
# model, the tenant or an example.
_REMEDIES: Final[dict[str, tuple[Severity, str, str]]] = {
    "shed_overload": (Severity.WARNING, "more is asked for than fits", "headway plan show"),
    "queue_full": (Severity.WARNING, "calls wait longer than they may", "headway plan show"),
    "deferred": (
        Severity.NOTE,
        "a rule lets calls wait for a better time",
        "headway explain {example}",
    ),
    "deadline_unreachable": (
        Severity.WARNING,
        "calls can not end by their deadline",
        "headway explain {example}",
    ),
    "no_capacity": (Severity.ERROR, "no engine can take them", "headway engines list"),
    "warming": (Severity.WARNING, "engines are starting", "headway commands list --watch"),
    "insufficient_quota": (
        Severity.NOTE,
        "a budget is spent",
        "headway budgets show tenant:{tenant}",
    ),
    "rate_limited": (Severity.NOTE, "a tenant is over its rate", "headway explain {example}"),
    "fan_out_exceeded": (
        Severity.NOTE,
        "workflows have too many calls at once",
        "headway explain {example}",
    ),
    "forbidden_by_policy": (
        Severity.WARNING,
        "the rules forbid them",
        "headway policy explain {example}",
    ),
    "policy_error": (Severity.ERROR, "a rule of the policy is broken", "headway policy status"),
    "state_unavailable": (Severity.ERROR, "PostgreSQL is away or slow", "headway doctor"),
    "upstream_error": (Severity.ERROR, "engines fail", "headway breaker list"),
    "upstream_timeout": (Severity.ERROR, "engines do not answer in time", "headway breaker list"),
}


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.severity is not Severity.ERROR for finding in findings)


def findings_of(overview: JsonObject) -> list[Finding]:
    """The worst first; parts that the overview lacks say nothing."""
    found = [
        *_replica(overview["replica"]),
        *_pools(overview.get("pools") or ()),
        *_breakers(overview.get("breakers") or ()),
        *_refusals(overview),
        *_plan(overview.get("plan")),
        *_commands(overview.get("commands") or ()),
        *_budgets(overview.get("budgets") or ()),
    ]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _replica(replica: JsonObject) -> Iterator[Finding]:
    for problem in replica["problems"]:
        yield Finding(severity=Severity.ERROR, words=problem, command="headway doctor")
    if not replica["is_bus_connected"]:
        yield Finding(
            severity=Severity.ERROR,
            words="the bus is away: agents are not heard, capacity runs out as credits expire",
            command="headway doctor",
        )
    silent = replica["nodes_declared"] - replica["nodes_heard"]
    if silent > 0 and replica["is_bus_connected"]:
        # What is missing through some of them shows in the pools.
        yield Finding(
            severity=Severity.WARNING if replica["nodes_heard"] else Severity.ERROR,
            words=f"{silent} of {replica['nodes_declared']} nodes are silent",
            command="headway nodes list",
        )
    if replica["policy_problem"]:
        yield Finding(
            severity=Severity.ERROR,
            words=replica["policy_problem"],
            command="headway policy status",
        )
    if replica["journal"]["is_full"]:
        yield Finding(
            severity=Severity.ERROR,
            words="the journal is full: calls are refused until PostgreSQL follows",
            command="headway doctor",
        )


def _pools(pools: Iterable[JsonObject]) -> Iterator[Finding]:
    for pool in pools:
        model = pool["model"]
        if pool["engines"] and not pool["engines_accepting"]:
            yield Finding(
                severity=Severity.ERROR,
                words=f"no engine of {model} accepts calls",
                command="headway engines list",
            )
            continue
        if pool["regions_open"]:
            yield Finding(
                severity=Severity.ERROR,
                words=f"{model} is left in {_names(pool['regions_open'])}: its calls fail there",
                command=f"headway breaker list   # pool:{model}/{pool['regions_open'][0]}",
            )
        if not pool["engines"]:
            continue
        short = [
            f"{words} {ratio:.0%}"
            for words, ratio in (
                ("seats", pool["saturation_ratio"]),
                ("KV cache", pool["kv_used_ratio"]),
            )
            if ratio >= SATURATED_RATIO
        ]
        if short:
            waits = (
                f", {pool['calls_waiting']} calls wait about {pool['wait_ms'] / MS_PER_S:.1f} s"
                if pool["calls_waiting"]
                else ""
            )
            yield Finding(
                severity=Severity.WARNING,
                words=f"{model} is saturated: {', '.join(short)}{waits}",
                command="headway plan show",
            )
        elif pool["engines_accepting"] < pool["engines"]:
            out = pool["engines"] - pool["engines_accepting"]
            yield Finding(
                severity=Severity.WARNING,
                words=f"{out} of {pool['engines']} engines of {model} take nothing",
                command="headway engines list",
            )


def _breakers(breakers: Iterable[JsonObject]) -> Iterator[Finding]:
    for breaker in breakers:
        if breaker["held"] is not None:
            yield Finding(
                severity=Severity.NOTE,
                words=f"{breaker['target']} is held {breaker['held']}: {breaker['held_because']}",
                command=f"headway breaker auto {breaker['target']} --reason WHY",
            )
        elif breaker["state"] == "open":
            yield Finding(
                severity=Severity.WARNING,
                words=f"the breaker of {breaker['target']} is open: {breaker['why']}",
                command="headway breaker list",
            )


def _refusals(overview: JsonObject) -> Iterator[Finding]:
    for refusal in overview.get("refusals") or ():
        severity, meaning, command = _REMEDIES.get(
            refusal["reason"], (Severity.NOTE, "", "headway explain {example}")
        )
        if refusal["share_ratio"] < REFUSED_RATIO and severity is not Severity.NOTE:
            severity = Severity.NOTE
        whose = [
            f"{'mostly ' if refusal['tenants'] > 1 else ''}{refusal['tenant_most']}"
            if refusal["tenant_most"]
            else "",
            refusal["model_most"] or "",
        ]
        most = ", ".join(name for name in whose if name)
        words = f"{refusal['share_ratio']:.1%} of calls are refused: {refusal['reason']}"
        if meaning:
            words += f", {meaning}"
        yield Finding(
            severity=severity,
            words=f"{words} ({most})" if most else words,
            command=command.format(
                example=refusal["example"], tenant=refusal["tenant_most"] or "TENANT"
            ),
        )


def _plan(plan: JsonObject | None) -> Iterator[Finding]:
    if plan is None or plan["mode"] == "off":
        return
    if plan["problem"]:
        yield Finding(
            severity=Severity.WARNING,
            words=f"no plan in the latest round: {plan['problem']}",
            command="headway plan show",
        )
    elif plan["age_s"] is not None and plan["age_s"] > PLAN_AGE_S_MAX:
        yield Finding(
            severity=Severity.WARNING,
            words=f"the plan is {plan['age_s']:.0f} s old: does a replica lead?",
            command="headway plan show",
        )
    if plan["state"] == "proposed" and plan["moves"] and plan["mode"] == "propose":
        yield Finding(
            severity=Severity.NOTE,
            words=f"plan {plan['revision']} proposes {plan['moves']} moves",
            command=f"headway plan diff, then headway plan apply {plan['revision']} --reason WHY",
        )
    if plan["is_paused"]:
        yield Finding(
            severity=Severity.NOTE,
            words="the planner is paused: no move begins",
            command="headway plan resume --reason WHY",
        )


def _commands(commands: Iterable[JsonObject]) -> Iterator[Finding]:
    told = list(commands)
    if told:
        yield Finding(
            severity=Severity.NOTE,
            words=f"{len(told)} commands are under way",
            command="headway commands list --watch",
        )


def _budgets(budgets: Iterable[JsonObject]) -> Iterator[Finding]:
    for budget in budgets:
        ratio = budget["spent"] / max(1, budget["limit"])
        left = max(0, budget["limit"] - budget["spent"])
        what = f"{left:,} tokens" if budget["unit"] == "tokens" else dollars(left)
        is_ended = ratio >= BUDGET_ENDED_RATIO
        yield Finding(
            severity=Severity.WARNING if is_ended else Severity.NOTE,
            words=f"{budget['id']} has {what} left, {ratio:.0%} is spent",
            command=f"headway budgets show {budget['id']}",
        )


def _names(names: list[str]) -> str:
    told = ", ".join(names[:NAMES_TOLD_MAX])
    return (
        told if len(names) <= NAMES_TOLD_MAX else f"{told} and {len(names) - NAMES_TOLD_MAX} more"
    )
