"""Runs the tests that stand beside rules, and tells how much they would notice.

A mutant is a rule with one thing about its condition changed. The tests of the rule kill it when one of
them comes out otherwise; a mutant that survives is a mistake that nobody would see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from policies.attributes import Fact
from policies.compiled import CompiledRule, compiled_of
from policies.documents import Case
from policies.evaluate import Policy
from policies.facts import as_json, from_json
from policies.language import Condition, Failure, language
from policies.load import Bundle
from policies.translate import (
    Among,
    Arithmetic,
    Both,
    Call,
    Compare,
    Literal,
    Negative,
    Node,
    Not,
    as_cel,
)

# What a comparison is mistaken for most: the neighbour that differs at the edge, and the opposite.
_FLIPS: Final = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
}


@dataclass(frozen=True, slots=True)
class CaseFailure:
    """A test that did not come out as written; `error` when the condition could not be evaluated."""

    rule: str
    case: str
    expected: bool
    error: str


@dataclass(frozen=True, slots=True)
class CaseReport:
    """Rules at level off are tested too."""

    rules: int
    cases: int
    failures: tuple[CaseFailure, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """What was changed in the rule's condition, and the condition that it gave."""

    rule: str
    change: str
    when: str


@dataclass(frozen=True, slots=True)
class MutationReport:
    mutants: int
    killed: int
    survivors: tuple[Mutant, ...]

    @property
    def score_percent(self) -> int:
        """Rounded down: 100 is all of them."""
        return 100 if not self.mutants else self.killed * 100 // self.mutants


def run_cases(policy: Policy) -> CaseReport:
    rules = compiled_of(policy.bundle.rules)
    failures = [
        CaseFailure(
            rule=rule.name,
            case=case.name,
            expected=case.fires,
            error=answer.message if isinstance(answer, Failure) else "",
        )
        for rule in rules
        for case, answer in _answers(rule, rule.condition)
        if answer is not case.fires
    ]
    return CaseReport(len(rules), sum(len(rule.rule.tests) for rule in rules), tuple(failures))


def mutation_score(bundle: Bundle) -> MutationReport:
    """Mutants of every rule that CEL accepts; the others would not have been loaded."""
    killed = 0
    survivors: list[Mutant] = []
    for rule in compiled_of(bundle.rules):
        for mutant in mutants(rule):
            condition = language().compile(mutant.when)
            if not isinstance(condition, Condition):
                continue
            if any(answer is not case.fires for case, answer in _answers(rule, condition)):
                killed += 1
            else:
                survivors.append(mutant)
    return MutationReport(killed + len(survivors), killed, tuple(survivors))


def mutants(rule: CompiledRule) -> Iterator[Mutant]:
    """Every mutant of the rule, once."""
    seen = {rule.rule.when if rule.tree is None else as_cel(rule.tree)}
    whole = ((f"!({rule.rule.when}\n)", "negated"), ("true", "always"), ("false", "never"))
    parts = (
        ()
        if rule.tree is None
        else ((as_cel(tree), change) for tree, change in _mutated(rule.tree))
    )
    for when, change in chain(whole, parts):
        if when not in seen:
            seen.add(when)
            yield Mutant(rule.name, change, when)


def _answers(rule: CompiledRule, condition: Condition) -> Iterator[tuple[Case, bool | Failure]]:
    for case in rule.rule.tests:
        yield case, language().evaluate(condition, as_json(*from_json(case.given)))


def _mutated(node: Node) -> Iterator[tuple[Node, str]]:
    """Trees with one change, and what it was."""
    yield from _changed(node)
    match node:
        case Not(of):
            yield from ((Not(part), change) for part, change in _mutated(of))
        case Negative(of):
            yield from ((Negative(part), change) for part, change in _mutated(of))
        case Both(operator, parts):
            for index, whole in enumerate(parts):
                for part, change in _mutated(whole):
                    yield Both(operator, (*parts[:index], part, *parts[index + 1 :])), change
        case Compare(operator, left, right):
            yield from ((Compare(operator, part, right), change) for part, change in _mutated(left))
            yield from ((Compare(operator, left, part), change) for part, change in _mutated(right))
        case Arithmetic(operator, left, right):
            for part, change in _mutated(left):
                yield Arithmetic(operator, part, right), change
            for part, change in _mutated(right):
                yield Arithmetic(operator, left, part), change
        case Among(of, values):
            yield from ((Among(part, values), change) for part, change in _mutated(of))
        case Call(method, of, argument):
            yield from ((Call(method, part, argument), change) for part, change in _mutated(of))
        case _:
            return


def _changed(node: Node) -> Iterator[tuple[Node, str]]:
    """Changes of this node itself."""
    match node:
        case Compare(operator, left, right):
            for other in _FLIPS[operator]:
                yield Compare(other, left, right), f"`{operator}` became `{other}`"
        case Literal(bool()):
            return
        case Literal(int(value)):
            for other_value in (value - 1, value + 1):
                yield Literal(other_value), f"`{value}` became `{other_value}`"
        case Both(operator, parts):
            other = "||" if operator == "&&" else "&&"
            yield Both(other, parts), f"`{operator}` became `{other}`"
            for index, dropped in enumerate(parts):
                rest = (*parts[:index], *parts[index + 1 :])
                kept = rest[0] if len(rest) == 1 else Both(operator, rest)
                yield kept, f"`{as_cel(dropped)}` was dropped"
        case Not(of):
            yield of, "`!` was dropped"
        case Among(of, values):
            for index, left_out in enumerate(values):
                yield Among(of, _without(values, index)), f"`{left_out}` was dropped from the list"
        case _:
            return


def _without(values: tuple[Fact, ...], index: int) -> tuple[Fact, ...]:
    return (*values[:index], *values[index + 1 :])
