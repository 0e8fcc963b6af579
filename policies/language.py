"""Conditions in CEL: typed against the table of attributes, compiled, and evaluated with errors as values.

The only module that knows the CEL library, whose traps it holds: errors are returned, text is cut at NUL,
an attribute that is missing reads as empty. `self_test` guards against a version that behaves otherwise.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from cel_expr_python import cel

from controlplane.domain.errors import ConfigurationError
from policies.attributes import ATTRIBUTES, Attribute, Fact, Kind
from policies.facts import unclean

# Conditions in one evaluation; more are evaluated in several.
FUSED_MAX: Final = 60

_TYPES: Final = {Kind.INT: cel.Type.INT, Kind.STRING: cel.Type.STRING, Kind.BOOL: cel.Type.BOOL}
_PLACE: Final = re.compile(r"ERROR: <input>:(\d+):(\d+): ([^\n]*)")
_UNKNOWN: Final = re.compile(r"undeclared reference to '([^']*)'")
_SYNTAX_CHARS_TOLD: Final = 120


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why a condition is not taken. Line and column count from 1 within the condition."""

    message: str
    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """An evaluation that ended in an error, such as a division by zero."""

    message: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition of type bool."""

    text: str
    program: cel.Expression


class Language:
    """CEL over the attributes of the table, or over the given ones."""

    def __init__(self, attributes: Sequence[Attribute] = ATTRIBUTES) -> None:
        self._env = cel.NewEnv(variables={row.name: _TYPES[row.kind] for row in attributes})
        self._names = [row.name for row in attributes]

    def compile(self, text: str) -> Condition | Flaw:
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            return Flaw("holds NUL or broken text; remove it")
        try:
            program = self._env.compile(text)
        except RuntimeError as error:
            return self._flaw(str(error))
        kind = program.return_type()
        if kind != cel.Type.BOOL:
            return Flaw(
                f"is of type {kind.name().lower()}; compare it, so that it is true or false"
            )
        return Condition(text, program)

    def evaluate(self, condition: Condition, facts: Mapping[str, Fact]) -> bool | Failure:
        """Facts must hold every attribute, or the condition reads an empty value for it."""
        if _has_unclean(facts):
            return Failure("the facts hold text that is not plain")
        try:
            value = condition.program.eval(self._env.Activation(dict(facts)))
        except RuntimeError as error:
            # Most errors are returned; one over the library's budget of iterations is raised.
            return Failure(str(error))
        plain = value.plain_value()
        if value.type() == cel.Type.BOOL and isinstance(plain, bool):
            return plain
        return Failure(str(plain))

    def fuse(self, conditions: Sequence[Condition]) -> "Fused":
        """The conditions as one, which costs a fraction of evaluating each."""
        chunks: list[cel.Expression | None] = []
        for start in range(0, len(conditions), FUSED_MAX):
            chunk = conditions[start : start + FUSED_MAX]
            # Line breaks end a comment within a condition.
            elements = ",".join(f"(\n{condition.text}\n)" for condition in chunk)
            try:
                chunks.append(self._env.compile(f"[{elements}]"))
            except RuntimeError:
                # One nested so deeply that the list around it is too much: each by itself.
                chunks.append(None)
        return Fused(self, tuple(conditions), tuple(chunks))

    def values(self, program: cel.Expression, facts: Mapping[str, Fact]) -> list[object] | None:
        """Values of a list expression; None when an element is an error, and with it the whole list."""
        try:
            value = program.eval(self._env.Activation(dict(facts)))
        except RuntimeError:
            return None
        plain = value.plain_value()
        return plain if isinstance(plain, list) and value.type() != cel.Type.ERROR else None

    def _flaw(self, said: str) -> Flaw:
        found = _PLACE.search(said)
        if found is None:
            if "recursion" in said:
                return Flaw("is nested too deeply; split the rule")
            return Flaw(f"is not valid CEL ({said[:_SYNTAX_CHARS_TOLD]}); mend it")
        line, column, message = int(found[1]), int(found[2]), found[3]
        unknown = _UNKNOWN.search(message)
        if unknown is not None:
            near = _nearest(unknown[1], self._names)
            hint = (
                f"; did you mean `{near}`?" if near else "; `headway policy attributes` lists them"
            )
            return Flaw(f"the attribute `{unknown[1]}` does not exist{hint}", line, column)
        if "no matching overload" in message:
            applied = message.partition("applied to ")[2].strip("'")
            operator = message.partition("overload for '")[2].partition("'")[0].strip("_")
            return Flaw(
                f"`{operator}` does not take {applied}; compare values of one type,"
                " numbers are whole numbers",
                line,
                column,
            )
        return Flaw(f"{message[:_SYNTAX_CHARS_TOLD]}; mend the condition there", line, column)


@dataclass(frozen=True, slots=True)
class Fused:
    """Conditions that are evaluated together; an error in one is traced to it."""

    language: Language
    conditions: tuple[Condition, ...]
    chunks: tuple[cel.Expression | None, ...]

    def evaluate(self, facts: Mapping[str, Fact]) -> list[bool | Failure]:
        """One answer for each condition."""
        if _has_unclean(facts):
            return [Failure("the facts hold text that is not plain")] * len(self.conditions)
        answers: list[bool | Failure] = []
        for number, program in enumerate(self.chunks):
            chunk = self.conditions[number * FUSED_MAX : (number + 1) * FUSED_MAX]
            values = None if program is None else self.language.values(program, facts)
            if values is None:
                answers += [self.language.evaluate(condition, facts) for condition in chunk]
            else:
                answers += [value is True for value in values]
        return answers


@cache
def language() -> Language:
    """The language of the rules. The first call tests the library. Raises ConfigurationError."""
    self_test()
    return Language()


def _has_unclean(facts: Mapping[str, Fact]) -> bool:
    return any(isinstance(value, str) and unclean(value) for value in facts.values())


def _nearest(name: str, names: Sequence[str]) -> str:
    """The attribute that was probably meant, or empty."""
    from difflib import get_close_matches

    found = get_close_matches(name, names, n=1, cutoff=0.7)
    return found[0] if found else ""


# ---------------------------------------------------------------- what the library must do

_PROBES: Final = (
    Attribute(name="n.i", kind=Kind.INT, unit="", sentence="", is_live=True, usual=0),
    Attribute(name="n.s", kind=Kind.STRING, unit="", sentence="", is_live=True, usual=""),
    Attribute(name="n.b", kind=Kind.BOOL, unit="", sentence="", is_live=True, usual=False),
)
_BIG: Final = 2**63 - 1

Golden = tuple[str, int, str, bool, bool | None]

# Condition, values of n.i, n.s and n.b, and the answer; None is an error.
GOLDEN: Final[tuple[Golden, ...]] = (
    ("n.i > 3", 4, "", False, True),
    ("n.i > 3", 3, "", False, False),
    ("n.i >= -9223372036854775808", -_BIG - 1, "", False, True),
    ("n.i + 1 > 0", _BIG, "", False, None),
    ("n.i - 1 < 0", -_BIG - 1, "", False, None),
    ("n.i * 2 > 0", _BIG, "", False, None),
    ("-n.i > 0", -_BIG - 1, "", False, None),
    ("n.i / 0 == 1", 1, "", False, None),
    ("n.i / 0 == 1 || n.b", 1, "", True, True),
    ("n.b || n.i / 0 == 1", 1, "", True, True),
    ("n.i / 0 == 1 && n.b", 1, "", False, False),
    ("!(n.i / 0 == 1)", 1, "", False, None),
    ("n.i / 0 == 1 || n.b", 1, "", False, None),
    ("-7 / 2 == -3 && -7 % 2 == -1", 0, "", False, True),
    ("n.s == 'gold'", 0, "gold", False, True),
    ("n.s < 'h' && n.s > 'g'", 0, "gold", False, True),
    ("n.s in ['a', 'gold']", 0, "gold", False, True),
    ("n.i in [1, 2]", 3, "", False, False),
    ("size(n.s) == 2", 0, "é\U0001f600", False, True),
    ("n.s < '\U0001f600'", 0, "\uffff", False, True),
    ("n.s.startsWith('g') && n.s.endsWith('d') && n.s.contains('ol')", 0, "gold", False, True),
    ("n.s.matches('^g.*d$')", 0, "gold", False, True),
    ("n.s.matches('(')", 0, "gold", False, None),
    ("n.b == (n.i > 0)", 1, "", True, True),
    ("n.i > 0 // a comment", 1, "", False, True),
)
REFUSED: Final = (
    "n.i", "n.i > 1.0", "n.i == 'a'", "n.s > 1", "n.missing > 1", "n.i >", "n.s.matches(n.i)", "n.b && 1",
    "9223372036854775808 > n.i", "has(n.s)",
)  # fmt: skip


def self_test(golden: Sequence[Golden] = GOLDEN, refused: Sequence[str] = REFUSED) -> None:
    """Evaluates known conditions. Raises ConfigurationError when an answer has changed."""
    probe = Language(_PROBES)
    for text, number, word, flag, expected in golden:
        condition = probe.compile(text)
        if isinstance(condition, Flaw):
            raise _changed(text)
        answer = probe.evaluate(condition, {"n.i": number, "n.s": word, "n.b": flag})
        if (None if isinstance(answer, Failure) else answer) is not expected:
            raise _changed(text)
    for text in refused:
        if not isinstance(probe.compile(text), Flaw):
            raise _changed(text)
    # The library itself cuts text at NUL: "a\0b" would be "a". The wrapper has to stand in front.
    same = probe.compile("n.s == 'a'")
    assert isinstance(same, Condition)
    if not isinstance(probe.evaluate(same, {"n.i": 0, "n.s": "a\0b", "n.b": False}), Failure):
        raise _changed("n.s == 'a' of a text with NUL")


def _changed(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"the CEL library answers `{text}` otherwise than the rules were written for;"
        " install the pinned version of cel-expr-python"
    )
