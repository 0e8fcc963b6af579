"""Made-up facts for trying rules out: always the same for the same rules, thick at the edges of conditions.

Knows the rules' literals and cases, and nothing of what the rules should do.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from policies.attributes import BY_NAME, INT_MAX, INT_MIN, LIVE, STATIC, Attribute, Fact, Kind
from policies.compiled import CompiledRule
from policies.facts import LiveFacts, StaticFacts
from policies.translate import Among, Call, Compare, Node, literals, reads, walk

INPUTS: Final = 1_000
# Different callers among the inputs; each is met with as many different moments.
CALLERS: Final = 40
# One input of so many holds numbers from the ends of 64 bits.
WILD_EVERY: Final = 4

_MASK: Final = 2**64 - 1
_WILD: Final = (INT_MIN, INT_MIN + 1, -1, 0, 1, INT_MAX - 1, INT_MAX)


class Dice:
    """SplitMix64: a fixed sequence for each seed, the same on every machine."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, end: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % end

    def pick(self, values: Sequence[Fact]) -> Fact:
        return values[self.below(len(values))]


def inputs(rules: Sequence[CompiledRule]) -> Iterator[tuple[StaticFacts, LiveFacts, bool]]:
    """Facts, and whether they are within the ranges of the table."""
    dice = Dice(len(rules))
    edges = edges_of(rules)
    given: list[dict[str, Fact]] = [
        dict(case.given) for rule in rules for case in rule.rule.tests
    ] or [{}]
    for caller in range(CALLERS):
        base = given[caller * len(given) // CALLERS]
        static = StaticFacts._make(_value(row, edges, dice, base, is_wild=False) for row in STATIC)
        for moment in range(INPUTS // CALLERS):
            is_wild = moment % WILD_EVERY == WILD_EVERY - 1
            # A third of the others near a case that was written down, the rest anywhere.
            near = given[dice.below(len(given))] if moment % WILD_EVERY == 1 else {}
            live = LiveFacts._make(_value(row, edges, dice, near, is_wild=is_wild) for row in LIVE)
            yield static, live, not is_wild


def edges_of(rules: Iterable[CompiledRule]) -> dict[str, tuple[Fact, ...]]:
    """For each attribute the values around which conditions change their answer."""
    found: dict[str, set[Fact]] = {}
    for rule in rules:
        for case in rule.rule.tests:
            for name, value in case.given.items():
                found.setdefault(name, set()).update(_around(value))
        if rule.tree is not None:
            for node in walk(rule.tree):
                for name, value in _met(node):
                    found.setdefault(name, set()).update(_around(value))
    return {name: _within(BY_NAME[name], values) for name, values in found.items()}


def _met(node: Node) -> Iterator[tuple[str, Fact]]:
    """Attributes and literals of one comparison."""
    if isinstance(node, Compare | Among | Call):
        for name in reads(node):
            for value in literals(node):
                yield name, value


def _around(value: Fact) -> tuple[Fact, ...]:
    if isinstance(value, bool):
        return (value,)
    if isinstance(value, int):
        return (value - 1, value, value + 1)
    return (value, f"{value}x", value[:-1])


def _within(row: Attribute, values: set[Fact]) -> tuple[Fact, ...]:
    """Of the row's type and range, in an order that does not depend on hashing."""
    match row.kind:
        case Kind.INT:
            numbers = [
                value for value in values if isinstance(value, int) and not isinstance(value, bool)
            ]
            return tuple(sorted(value for value in numbers if row.lowest <= value <= row.highest))
        case Kind.STRING:
            words = sorted(value for value in values if isinstance(value, str))
            return tuple(word for word in words if not row.is_closed or word in row.words)
        case Kind.BOOL:
            return ()


def _value(
    row: Attribute,
    edges: dict[str, tuple[Fact, ...]],
    dice: Dice,
    near: dict[str, Fact],
    *,
    is_wild: bool,
) -> Fact:
    turn = dice.below(8)
    if row.name in near and turn < 5:  # noqa: PLR2004 - most of a case stays as it is written
        return near[row.name]
    if near and turn < 5:  # noqa: PLR2004 - and so does what it leaves out
        return row.usual
    match row.kind:
        case Kind.BOOL:
            return dice.below(2) == 1
        case Kind.STRING:
            return dice.pick((*row.words, *edges.get(row.name, ())))
        case Kind.INT if is_wild and turn % 2:
            return dice.pick(_WILD)
        case Kind.INT:
            edge = edges.get(row.name, ())
            if edge and turn != 7:  # noqa: PLR2004 - one of eight is anywhere
                return dice.pick(edge)
            return row.lowest + dice.below(row.highest - row.lowest + 1)
