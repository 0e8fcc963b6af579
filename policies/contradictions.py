"""Rules that can not be obeyed together: routes to two models, places or windows without a common one.

Two rules are taken to be able to hold at once unless their conditions compare the same attribute with
different constants.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from policies.attributes import Fact
from policies.compiled import CompiledRule, RuleFlaw
from policies.documents import Level
from policies.language import Flaw
from policies.translate import Among, Compare, Literal, Node, Not, Read, conjuncts

# Sets of rules looked at for one without a common place; a bundle that needs more is refused.
SETS_MAX: Final = 20_000


def contradictions(rules: Sequence[CompiledRule]) -> Iterator[RuleFlaw]:
    """What is wrong between rules that are enforced, and with rules that shed begun work."""
    for rule in rules:
        if rule.rule.shed is not None and not _is_of_first_steps(rule):
            yield _flaw(
                rule,
                "could refuse a later step of a workflow that was admitted; add"
                " `workflow.step == 0 &&` to `when`",
            )
    enforced = sorted(
        (rule for rule in rules if rule.level is Level.ENFORCE), key=lambda rule: rule.name
    )
    for first, second in combinations(enforced, 2):
        one, other = first.rule.route, second.rule.route
        if one is None or other is None or one.model is None or other.model is None:
            continue
        if one.model != other.model and _can_meet(first, second):
            yield _flaw(
                second,
                f"routes to `{other.model}` where `{first.name}` routes to `{one.model}`;"
                " compare one attribute with different constants in both",
            )
    for what in ("regions", "gpu_types", "hours", "weekdays"):
        yield from _without_common(what, enforced)


def _without_common(what: str, rules: Sequence[CompiledRule]) -> Iterator[RuleFlaw]:
    """Sets of rules that can hold at once and leave nothing of `what`."""
    narrowing = [(rule, names) for rule in rules if (names := _narrowed(what, rule)) is not None]
    looked_at = 0
    # Each entry: the rules so far, what they leave, and where to go on.
    pending: list[tuple[tuple[CompiledRule, ...], frozenset[Fact], int]] = [
        ((rule,), names, index + 1) for index, (rule, names) in enumerate(narrowing)
    ]
    while pending:
        together, left, start = pending.pop()
        looked_at += 1
        if looked_at > SETS_MAX:
            yield _flaw(together[0], f"too many rules narrow {what}; merge some of them")
            return
        for index in range(start, len(narrowing)):
            rule, names = narrowing[index]
            common = left & names
            if common == left or not all(_can_meet(rule, other) for other in together):
                continue
            if not common:
                others = ", ".join(f"`{other.name}`" for other in together)
                yield _flaw(
                    rule,
                    f"leaves no {what} together with {others}; name a common one, or compare one"
                    " attribute with different constants",
                )
                return
            pending.append(((*together, rule), common, index + 1))


def _narrowed(what: str, rule: CompiledRule) -> frozenset[Fact] | None:
    route, defer = rule.rule.route, rule.rule.defer
    match what:
        case "regions" if route is not None and route.regions is not None:
            return frozenset(route.regions)
        case "gpu_types" if route is not None and route.gpu_types is not None:
            return frozenset(route.gpu_types)
        case "hours" if defer is not None and defer.until != "idle":
            return defer.until.hours_open()
        case "weekdays" if defer is not None and defer.until != "idle":
            return defer.until.weekdays_open()
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The only values of an attribute with which a condition can hold."""

    name: str
    values: frozenset[Fact]


def _can_meet(one: CompiledRule, other: CompiledRule) -> bool:
    """Whether both can fire for the same call, as far as constants tell."""
    allowed = {entry.name: entry.values for entry in _allowed(one)}
    return not any(
        entry.name in allowed and not (entry.values & allowed[entry.name])
        for entry in _allowed(other)
    )


def _allowed(rule: CompiledRule) -> Iterator[_Allowed]:
    if rule.tree is None:
        return
    found: dict[str, frozenset[Fact]] = {}
    for part in conjuncts(rule.tree):
        entry = _equality(part)
        if entry is not None:
            found[entry.name] = found.get(entry.name, entry.values) & entry.values
    for name, values in found.items():
        yield _Allowed(name, values)


def _equality(part: Node) -> _Allowed | None:
    match part:
        case Compare("==", Read(name), Literal(value)) | Compare("==", Literal(value), Read(name)):
            return _Allowed(name, frozenset({value}))
        case Among(Read(name), values):
            return _Allowed(name, frozenset(values))
        case Read(name):
            return _Allowed(name, frozenset({True}))
        case Not(Read(name)):
            return _Allowed(name, frozenset({False}))
        case _:
            return None


def _is_of_first_steps(rule: CompiledRule) -> bool:
    return any(
        entry.name == "workflow.step" and entry.values <= {0} for entry in _allowed(rule)
    ) or any(
        entry.name == "workflow.exists" and entry.values == {False} for entry in _allowed(rule)
    )


def _flaw(rule: CompiledRule, message: str) -> RuleFlaw:
    return RuleFlaw(rule.document, rule.rule.name, Flaw(message), is_in_condition=False)
