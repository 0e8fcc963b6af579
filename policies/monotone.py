"""Finds rules that refuse a caller for being worth more, or for asking for less: nearly always a slip.

Tried on made-up facts, so what is found is true and what is not found is only likely to be fine.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from policies.attributes import BY_NAME, Fact
from policies.compiled import CompiledRule
from policies.facts import LiveFacts, StaticFacts
from policies.generate import edges_of
from policies.translate import Fires, Overflow, function_of

PRIORITY: Final = "tenant.priority"
MAX_TOKENS: Final = "request.max_tokens"

# Attribute, whether more of it should be refused rather than less, and what it is to refuse otherwise.
_DIRECTIONS: Final = (
    (PRIORITY, False, "a higher priority where it lets a lower one pass"),
    (MAX_TOKENS, True, "fewer tokens where it lets more of them pass"),
)


@dataclass(frozen=True, slots=True)
class Surprise:
    """A rule that refuses at `refused` and not at `passed`, all else being equal."""

    rule: CompiledRule
    name: str
    words: str
    refused: Fact
    passed: Fact


def surprises(
    rules: Sequence[CompiledRule], moments: Iterable[tuple[StaticFacts, LiveFacts]]
) -> Iterator[Surprise]:
    """At most one for each rule and direction."""
    refusing = [
        (rule, rule.tree)
        for rule in rules
        if rule.tree is not None and (rule.rule.deny or rule.rule.shed is not None)
    ]
    edges = edges_of(rule for rule, _ in refusing)
    for rule, tree in refusing:
        fires_with = function_of([(1, (tree,))])
        for name, is_more_worse, words in _DIRECTIONS:
            if name not in rule.reads:
                continue
            values = sorted(
                {BY_NAME[name].lowest, BY_NAME[name].highest}
                | {value for value in edges.get(name, ()) if isinstance(value, int)}
            )
            for static, live in moments:
                fires = [_fires(fires_with, static, live, name, value) for value in values]
                if not is_more_worse:
                    fires.reverse()
                # From the value that should be refused least to the one that should be refused most.
                order = values if is_more_worse else values[::-1]
                first = fires.index(True) if True in fires else len(fires)
                later = next((at for at in range(first, len(fires)) if fires[at] is False), None)
                if later is not None:
                    yield Surprise(rule, name, words, order[first], order[later])
                    break


def _fires(
    fires_with: Fires, static: StaticFacts, live: LiveFacts, name: str, value: int
) -> bool | None:
    """With another value of one attribute; None when it overflows."""
    try:
        if name == PRIORITY:
            return fires_with(static._replace(tenant_priority=value), live) == 1
        return fires_with(static, live._replace(request_max_tokens=value)) == 1
    except Overflow:
        return None
