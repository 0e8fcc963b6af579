"""Tries the rules of a bundle out before it is used: names, contradictions, errors, CEL's answer everywhere.

Knows rules and made-up facts; where a rule stands in a file is told by `load`.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from policies.attributes import Fact
from policies.compiled import (
    CompiledRule,
    PhasePart,
    PhaseRules,
    RuleFlaw,
    compile_rule,
    phases_of,
)
from policies.contradictions import contradictions
from policies.documents import RULES_MAX, Admission, Phase, Rules
from policies.facts import LiveFacts, StaticFacts, as_json
from policies.generate import inputs
from policies.language import Flaw
from policies.monotone import surprises

# What a condition outside of the translated subset costs each time that it is asked.
CEL_PRICE_US: Final = 30
# Inputs on which a rule is tried with more and less of what is asked for.
MOMENTS: Final = 200


@dataclass(frozen=True, slots=True)
class Tried:
    """Rules that can be used. `p99_us`: the slowest hundredth of asking all of them once; `notes` are
    what works and could be better.
    """

    rules: int
    inputs: int
    p99_us: int
    notes: tuple[RuleFlaw, ...]


def check(documents: Sequence[Rules], admission: Admission) -> Tried | list[RuleFlaw]:
    """Flaws when there are any: the bundle is not to be used."""
    compiled: list[CompiledRule] = []
    flaws: list[RuleFlaw] = []
    for document in documents:
        for rule in document.rules:
            found = compile_rule(document, rule)
            if isinstance(found, RuleFlaw):
                flaws.append(found)
                continue
            compiled.append(found)
            if rule.queue_class is not None and rule.queue_class not in admission.queue_classes:
                known = ", ".join(f"`{name}`" for name in admission.queue_classes)
                flaws.append(
                    _flaw(
                        found,
                        f"the queue class `{rule.queue_class}` does not exist; use one of {known}",
                    )
                )
    if len(compiled) > RULES_MAX:
        over = compiled[RULES_MAX]
        flaws.append(
            _flaw(over, f"{len(compiled)} rules are over the limit of {RULES_MAX}; merge some")
        )
    flaws += contradictions(compiled)
    return flaws or _tried(compiled)


def _tried(compiled: Sequence[CompiledRule]) -> Tried | list[RuleFlaw]:
    phases = phases_of(compiled)
    parts: dict[tuple[Phase, StaticFacts], PhasePart] = {}
    moments: list[tuple[StaticFacts, LiveFacts]] = []
    times_ns: list[int] = []
    tried = 0
    for static, live, is_in_range in inputs(compiled) if compiled else ():
        spent_ns = 0
        for phase, rules in phases.items():
            part = parts.get((phase, static))
            if part is None:
                part = parts[phase, static] = rules.part(static)
            started_ns = time.perf_counter_ns()
            answer = rules.fired(part, live)
            spent_ns += time.perf_counter_ns() - started_ns
            flaw = _compared(rules, answer, static, live)
            if flaw is None and is_in_range and answer[1]:
                flaw = _ends_in_error(rules, rules.named(answer[1])[0], static, live)
            if flaw is not None:
                return [flaw]
        tried += 1
        if is_in_range:
            times_ns.append(spent_ns)
            moments.append((static, live))
    slowest_ns = sorted(times_ns)[len(times_ns) * 99 // 100] if times_ns else 0
    return Tried(
        rules=len(compiled),
        inputs=tried,
        p99_us=slowest_ns // 1_000,
        notes=tuple(_notes(compiled, moments)),
    )


def _compared(
    rules: PhaseRules, answer: tuple[int, int], static: StaticFacts, live: LiveFacts
) -> RuleFlaw | None:
    """A rule whose translation is not the rule. None is expected ever to be found."""
    expected = rules.oracle(static, live)
    if answer == expected:
        return None
    wrong = rules.named((answer[0] ^ expected[0]) | (answer[1] ^ expected[1]))[0]
    return _flaw(
        wrong,
        "its translation answers otherwise than CEL with"
        f" {_facts_read(wrong, as_json(static, live))}; write it another way",
    )


def _ends_in_error(
    rules: PhaseRules, rule: CompiledRule, static: StaticFacts, live: LiveFacts
) -> RuleFlaw:
    facts = as_json(static, live)
    return _flaw(
        rule,
        f"ends in an error ({rules.why(rule, facts)}) with {_facts_read(rule, facts)}, and a call"
        " would be refused for it; guard against that value",
    )


def _facts_read(rule: CompiledRule, facts: Mapping[str, Fact]) -> str:
    return ", ".join(f"{name} = {json.dumps(facts[name])}" for name in sorted(rule.reads))


def _notes(
    compiled: Sequence[CompiledRule], moments: Sequence[tuple[StaticFacts, LiveFacts]]
) -> Iterator[RuleFlaw]:
    for rule in compiled:
        if rule.tree is None:
            yield _flaw(
                rule,
                f"the condition is outside of the fast subset and costs about {CEL_PRICE_US} us each"
                " time; use comparisons, `&& || !`, `+ - *`, `in` a list of constants, size,"
                " startsWith, endsWith and contains",
            )
    for surprise in surprises(compiled, moments[:MOMENTS]):
        yield _flaw(
            surprise.rule,
            f"refuses {surprise.words}: {surprise.name} = {surprise.refused} is refused,"
            f" {surprise.passed} is not; turn the comparison round if that is a slip",
        )


def _flaw(rule: CompiledRule, message: str) -> RuleFlaw:
    return RuleFlaw(rule.document, rule.rule.name, Flaw(message), is_in_condition=False)
