"""Bundles for the tests of their life: the ones that ship, with rules of the test's own beside them."""

from typing import Any

from controlplane.domain.catalog import Scope, Tenant
from controlplane.domain.ids import ModelName, SloClassName, TenantId
from policies.documents import Phase
from policies.evaluate import Policy, compile_policy
from policies.facts import LiveFacts, StaticFacts, from_json
from policies.load import bundle_of, files_of
from policies.replay import Judge

MODEL = ModelName("org/small")
# The command of a process that can not be had: a thread then checks the bundles.
IN_A_THREAD = ("/nonexistent/python",)


def rule(name: str, when: str, effect: str, fires: str, rests: str, phase: str = "admit") -> str:
    """One rule of a document, in YAML; `fires` and `rests` are given attributes of its two cases."""
    return f"""
  - name: {name}
    phase: {phase}
    when: '{when}'
    {effect}
    message: made up for a test
    tests:
      - {{name: fires, given: {{{fires}}}, fires: true}}
      - {{name: rests, given: {{{rests}}}, fires: false}}
"""


def rules(*written: str, name: str = "made-up", level: str = "enforce") -> str:
    return f"kind: rules\nversion: 1\nname: {name}\nlevel: {level}\nrules:{''.join(written)}"


LONG_ANSWERS = rule(
    "long-answers",
    "request.max_tokens > 1000",
    "deny: true",
    '"request.max_tokens": 1001',
    '"request.max_tokens": 1000',
)
EVENINGS = rule(
    "evenings",
    "workflow.step == 0 && time.hour >= 18 && tenant.priority < 5",
    "shed: {retry_after_ms: 2000}",
    '"time.hour": 18, "tenant.priority": 4',
    '"time.hour": 17, "tenant.priority": 4',
)
# Divides by a number that is never 0 within its range, and so gets through the load.
DIVIDES = rule(
    "divides",
    "100 / (request.priority_hint + 10) > 90",
    "deny: true",
    '"request.priority_hint": -9',
    '"request.priority_hint": 0',
)


def without_rules() -> dict[str, str]:
    """The bundle that ships, without its rules."""
    return {name: text for name, text in files_of(None).items() if "kind: rules" not in text}


def files(*written: str, level: str = "enforce", **documents: str) -> dict[str, str]:
    """A bundle with these rules; `documents` replace files by stem."""
    found = without_rules()
    if written:
        found["made-up.yaml"] = rules(*written, level=level)
    return found | {f"{stem}.yaml": text for stem, text in documents.items()}


def policy(given: dict[str, str]) -> Policy:
    return compile_policy(bundle_of(given))


def tenant(name: str, tenant_class: str = "bronze") -> Tenant:
    return Tenant(
        id=TenantId(name), name=name, tenant_class=tenant_class,
        slo_class=SloClassName("standard"), is_disabled=False, cache_salt="",
    )  # fmt: skip


def facts(who: Tenant, **given: Any) -> tuple[StaticFacts, LiveFacts]:
    """Facts of a call; names with `__` for the dot."""
    values = {
        "tenant.id": who.id, "tenant.class": who.tenant_class, "tenant.slo_class": who.slo_class,
        "model.name": MODEL,
    } | {name.replace("__", "."): value for name, value in given.items()}  # fmt: skip
    return from_json(values)


class Caller:
    """Calls of one tenant, as the gate makes them: the bundle in use rules, and the state is told."""

    def __init__(self, state: Any, who: Tenant) -> None:
        self.state = state
        self.who = who
        self.judges: dict[str, Judge] = {}

    def call(self, phase: Phase = Phase.ADMIT, **given: Any) -> bool:
        """Whether the call is let through."""
        in_use = self.state.policy_for(self.who.id)
        judge = self.judges.setdefault(in_use.revision, Judge(in_use))
        static, live = facts(self.who, **given)
        terms = judge.terms(self.who, MODEL, Scope.CHAT)
        ruling = judge.ruling(terms, phase, static, live) if terms.is_allowed else None
        if self.state.candidate is not None:
            self.state.shadow(self.who, MODEL, Scope.CHAT, phase, static, live, ruling)
        return ruling is not None and not ruling.denied_by and not ruling.shed_by
