"""Rules of one phase, ready to be asked: split into what is known beforehand and a generated live function.

Answers are sets of rules, as bits of an integer; what a set comes to is the business of `evaluate`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.domain.errors import ConfigurationError
from policies.attributes import STATIC, Fact
from policies.documents import Level, Phase, Rule, Rules
from policies.facts import LiveFacts, StaticFacts, as_json, from_json
from policies.language import Condition, Failure, Flaw, Fused, Language, language
from policies.translate import (
    Fires,
    Node,
    Overflow,
    conjuncts,
    function_of,
    names_in,
    parse,
    reads,
)

# Generated functions kept for each phase: one for every set of rules that some caller is subject to.
VARIANTS_MAX: Final = 256

_STATIC_NAMES: Final = frozenset(row.name for row in STATIC)
_NO_STATIC, _NO_LIVE = from_json({})


@dataclass(frozen=True, slots=True)
class RuleFlaw:
    """What is wrong with a rule of a document. `is_in_condition`: the flaw's place is within `when`."""

    document: str
    rule: str
    flaw: Flaw
    is_in_condition: bool


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule with its condition; `tree` is None when that is outside of the subset that is translated."""

    document: str
    level: Level
    rule: Rule
    condition: Condition
    tree: Node | None

    @property
    def name(self) -> str:
        return f"{self.document}/{self.rule.name}"

    @property
    def reads(self) -> frozenset[str]:
        return names_in(self.rule.when) if self.tree is None else reads(self.tree)


def compile_rule(document: Rules, rule: Rule) -> CompiledRule | RuleFlaw:
    condition = language().compile(rule.when)
    if isinstance(condition, Flaw):
        return RuleFlaw(document.name, rule.name, condition, is_in_condition=True)
    return CompiledRule(document.name, document.level, rule, condition, parse(rule.when))


@dataclass(frozen=True, slots=True)
class PhasePart:
    """What a phase's rules come to once the static facts are known.

    `fires` decides the rules that also depend on live facts; `fused` those of them, of the bits
    `fused_bits`, that are left to CEL.
    """

    static: StaticFacts
    fired: int
    erred: int
    fires: Fires | None
    fused: Fused | None
    fused_bits: tuple[int, ...]

    @property
    def is_settled(self) -> bool:
        """Nothing has fired and nothing can."""
        return not (self.fired or self.erred or self.fires or self.fused)


@dataclass(frozen=True, slots=True)
class _Split:
    """A rule's condition by what it depends on. `knows` is None when nothing of it is static."""

    bit: int
    static_parts: tuple[Node, ...]
    live_parts: tuple[Node, ...]
    knows: Fires | None

    @property
    def parts(self) -> tuple[Node, ...]:
        return self.static_parts + self.live_parts


class PhaseRules:
    """All rules of one phase, in the order of their names."""

    def __init__(self, rules: Iterable[CompiledRule]) -> None:
        self.rules: Final = tuple(sorted(rules, key=lambda rule: rule.name))
        self._fused = language().fuse([rule.condition for rule in self.rules])
        # Compiles only what reads nothing else: a safe test of which conditions are static.
        static_language = Language(STATIC)
        self._splits: list[_Split] = []
        self._static_cel: list[tuple[int, Condition]] = []
        self._live_cel: list[tuple[int, Condition]] = []
        for index, rule in enumerate(self.rules):
            bit = 1 << index
            if rule.tree is not None:
                self._splits.append(_split(bit, rule.tree))
            elif isinstance(static_language.compile(rule.rule.when), Condition):
                self._static_cel.append((bit, rule.condition))
            else:
                self._live_cel.append((bit, rule.condition))
        self._live_fused = language().fuse([condition for _, condition in self._live_cel])
        self._live_fused_bits = tuple(bit for bit, _ in self._live_cel)
        self._variants: dict[tuple[int, int], Fires | None] = {}

    def part(self, static: StaticFacts) -> PhasePart:
        facts = as_json(static, _NO_LIVE)
        fired = erred = known = whole = 0
        for bit, condition in self._static_cel:
            answer = language().evaluate(condition, facts)
            fired |= bit if answer is True else 0
            erred |= bit if isinstance(answer, Failure) else 0
        for split in self._splits:
            try:
                holds = split.knows is None or split.knows(static, _NO_LIVE) != 0
            except Overflow:
                # Whether the overflow counts depends on the other parts: all are asked together.
                whole |= split.bit
                continue
            if not holds:
                continue
            if split.live_parts:
                known |= split.bit
            else:
                fired |= split.bit
        return PhasePart(
            static=static,
            fired=fired,
            erred=erred,
            fires=self._variant(known, whole),
            fused=self._live_fused if self._live_cel else None,
            fused_bits=self._live_fused_bits,
        )

    def fired(self, part: PhasePart, live: LiveFacts) -> tuple[int, int]:
        """Rules that fire, and rules whose evaluation failed."""
        fired, erred = part.fired, part.erred
        if part.fires is not None:
            try:
                fired |= part.fires(part.static, live)
            except Overflow:
                return self.oracle(part.static, live)
        if part.fused is not None:
            answers = part.fused.evaluate(as_json(part.static, live))
            for bit, answer in zip(part.fused_bits, answers, strict=True):
                fired |= bit if answer is True else 0
                erred |= bit if isinstance(answer, Failure) else 0
        return fired, erred

    def oracle(self, static: StaticFacts, live: LiveFacts) -> tuple[int, int]:
        """The same by CEL alone."""
        fired = erred = 0
        for index, answer in enumerate(self._fused.evaluate(as_json(static, live))):
            fired |= 1 << index if answer is True else 0
            erred |= 1 << index if isinstance(answer, Failure) else 0
        return fired, erred

    def why(self, rule: CompiledRule, facts: Mapping[str, Fact]) -> str:
        """What CEL says of a rule whose evaluation fails; empty when it does not."""
        answer = language().evaluate(rule.condition, facts)
        return answer.message if isinstance(answer, Failure) else ""

    def named(self, bits: int) -> tuple[CompiledRule, ...]:
        return tuple(rule for index, rule in enumerate(self.rules) if bits >> index & 1)

    def _variant(self, known: int, whole: int) -> Fires | None:
        """The function for rules whose static parts hold (`known`) or have to be asked again (`whole`)."""
        key = (known, whole)
        if key in self._variants:
            return self._variants[key]
        if len(self._variants) >= VARIANTS_MAX:
            # Asks everything again: slower, and right for every caller.
            known, whole = 0, (1 << len(self.rules)) - 1
            key = (known, whole)
            if key in self._variants:
                return self._variants[key]
        asked = [
            (split.bit, split.live_parts if known & split.bit else split.parts)
            for split in self._splits
            if (known | whole) & split.bit
        ]
        fires = function_of(asked) if asked else None
        self._variants[key] = fires
        return fires


def _split(bit: int, tree: Node) -> _Split:
    parts = conjuncts(tree)
    static = tuple(part for part in parts if reads(part) <= _STATIC_NAMES)
    live = tuple(part for part in parts if not reads(part) <= _STATIC_NAMES)
    return _Split(bit, static, live, function_of([(1, static)]) if static else None)


def compiled_of(documents: Sequence[Rules]) -> list[CompiledRule]:
    """All rules of documents that were checked.

    Raises ConfigurationError at a rule that checking can not have let through: none is left out.
    """
    compiled: list[CompiledRule] = []
    for document in documents:
        for rule in document.rules:
            found = compile_rule(document, rule)
            if isinstance(found, RuleFlaw):
                raise ConfigurationError(
                    f"rule `{found.document}/{found.rule}`: {found.flaw.message}"
                )
            compiled.append(found)
    return compiled


def phases_of(rules: Sequence[CompiledRule]) -> dict[Phase, PhaseRules]:
    """By phase; a phase without rules is left out."""
    found: dict[Phase, list[CompiledRule]] = {}
    for rule in rules:
        found.setdefault(rule.rule.phase, []).append(rule)
    return {phase: PhaseRules(of_phase) for phase, of_phase in found.items()}
