"""The nearest change of one attribute with which a rule that fired would not: what a refusal can advise.

Candidates come from the condition's comparisons; each is tried on the condition itself before it is told.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Final

from policies.attributes import ATTRIBUTES, Attribute, Fact, Kind
from policies.language import Condition, language
from policies.translate import (
    Among,
    Arithmetic,
    Call,
    Compare,
    Literal,
    Negative,
    Node,
    Read,
    kind_of,
    literals,
    reads,
    walk,
)

# A text that no rule compares with.
_OTHER_TEXT: Final = "another-one"


def nearest_pass(condition: Condition, tree: Node | None, facts: Mapping[str, Fact]) -> str:
    """In CEL, as `request.max_tokens <= 812`; what the client can change goes first. Empty: nothing found."""
    if tree is None:
        return ""
    read = reads(tree)
    rows = sorted((row for row in ATTRIBUTES if row.name in read), key=lambda row: not row.is_asked)
    for row in rows:
        told = _told(row, condition, tree, facts)
        if told:
            return told
    return ""


def _told(row: Attribute, condition: Condition, tree: Node, facts: Mapping[str, Fact]) -> str:
    def passes(value: Fact) -> bool:
        return language().evaluate(condition, {**facts, row.name: value}) is False

    now = facts[row.name]
    match row.kind:
        case Kind.BOOL:
            return f"{row.name} == {str(not now).lower()}" if passes(not now) else ""
        case Kind.STRING:
            if not row.is_closed and passes(_OTHER_TEXT):
                return f"{row.name} != {json.dumps(now)}"
            other = next((word for word in row.words if word != now and passes(word)), None)
            return "" if other is None else f"{row.name} == {json.dumps(other)}"
        case Kind.INT:
            assert isinstance(now, int)
            edges = {
                value: passes(value)
                for value in (*_edges(row.name, tree, facts), row.lowest, row.highest)
                if row.lowest <= value <= row.highest
            }
            if not any(edges.values()):
                return ""
            best = min(
                (value for value, is_pass in edges.items() if is_pass),
                key=lambda value: (abs(value - now), value),
            )
            # Beyond the nearest value it may fire again; it turns nowhere but at edges.
            is_lower = best < now
            holds_on = all(
                is_pass
                for value, is_pass in edges.items()
                if (value < best if is_lower else value > best)
            )
            sign = ("<=" if is_lower else ">=") if holds_on else "=="
            return f"{row.name} {sign} {best}"


def _edges(name: str, tree: Node, facts: Mapping[str, Fact]) -> Iterator[int]:
    """Values around which a comparison with the attribute turns, all else being equal."""
    for node in walk(tree):
        if name not in reads(node):
            continue
        if isinstance(node, Among):
            for value in literals(node):
                if isinstance(value, int):
                    yield from (value - 1, value, value + 1)
        elif isinstance(node, Compare) and kind_of(node.left) is Kind.INT:
            at_0, at_1 = (
                _number(node.left, moved) - _number(node.right, moved)
                for moved in ({**facts, name: 0}, {**facts, name: 1})
            )
            slope = at_1 - at_0
            if slope:
                turn = -at_0 // slope
                yield from range(turn - 1, turn + 3)


def _number(node: Node, facts: Mapping[str, Fact]) -> int:
    """Value of a tree of integers, without the bounds of 64 bits."""
    match node:
        case Literal(int(value)):
            return value
        case Read(name):
            return int(facts[name])
        case Negative(of):
            return -_number(of, facts)
        case Arithmetic(operator, left, right):
            one, other = _number(left, facts), _number(right, facts)
            if operator == "*":
                return one * other
            return one + other if operator == "+" else one - other
        case Call("size", of, None):
            return len(_text(of, facts))
        case _:
            raise AssertionError(node)


def _text(node: Node, facts: Mapping[str, Fact]) -> str:
    value = facts[node.name] if isinstance(node, Read) else None
    if isinstance(node, Literal):
        value = node.value
    assert isinstance(value, str)
    return value
