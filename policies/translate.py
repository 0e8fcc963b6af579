"""From conditions in a closed subset of CEL to Python functions, a tenth of the cost of evaluating CEL.

The subset: comparisons, `&& || !`, `+ - *`, `in` a list of literals, `size`, `startsWith`, `endsWith`,
`contains`. CEL has checked the types before. Python's own order of evaluation gives CEL's answer as long as
nothing overflows; an overflow raises `Overflow`, and then CEL itself is asked, which knows what an error
next to `&&` and `||` comes to.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, cast

from policies.attributes import BY_NAME, INT_MAX, INT_MIN, LIVE, STATIC, Fact, Kind
from policies.facts import LiveFacts, StaticFacts


class Overflow(Exception):
    """A sum, difference or product does not fit in 64 bits."""


# ---------------------------------------------------------------- the tree of a condition


@dataclass(frozen=True, slots=True)
class Literal:
    value: Fact


@dataclass(frozen=True, slots=True)
class Read:
    name: str


@dataclass(frozen=True, slots=True)
class Not:
    of: "Node"


@dataclass(frozen=True, slots=True)
class Negative:
    of: "Node"


@dataclass(frozen=True, slots=True)
class Both:
    """`&&` or `||` of two or more parts."""

    operator: str
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Compare:
    operator: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    operator: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class Among:
    of: "Node"
    values: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """`size(of)`, or a method of text with one argument."""

    method: str
    of: "Node"
    argument: "Node | None"


Node = Literal | Read | Not | Negative | Both | Compare | Arithmetic | Among | Call

COMPARISONS: Final = ("==", "!=", "<", "<=", ">", ">=")
_METHODS: Final = {"startsWith": "startswith", "endsWith": "endswith", "contains": "__contains__"}


class _Outside(Exception):
    """The condition is not in the subset."""


# ---------------------------------------------------------------- parsing

_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*)
  | (?P<int>\d+(?![\w.]))
  | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
  | (?P<text>"[^"\\\n]*"|'[^'\\\n]*')
  | (?P<sign>&&|\|\||[=!<>]=|[<>!+\-*(),\[\]]|\.)
    """,
    re.VERBOSE,
)


def parse(text: str) -> Node | None:
    """The tree of a condition that CEL has taken, or None when it is outside of the subset."""
    try:
        parser = _Parser(list(_tokens(text)))
        node = parser.either()
        parser.expect("")
    except _Outside:
        return None
    return node


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    # Triple quotes are text too, of which the pattern would see three pieces.
    if '"""' in text or "'''" in text:
        raise _Outside
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise _Outside
        place = found.end()
        kind = found.lastgroup
        assert kind is not None
        if kind != "space":
            yield kind, found[0]
    yield "end", ""


class _Parser:
    """Recursive descent; each method takes one level of precedence, loosest first."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0

    def either(self) -> Node:
        return self._joined("||", lambda: self._joined("&&", self._relation))

    def expect(self, sign: str) -> None:
        if not self._take(sign):
            raise _Outside

    def _joined(self, operator: str, part: Callable[[], Node]) -> Node:
        parts = [part()]
        while self._take(operator):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Both(operator, tuple(parts))

    def _relation(self) -> Node:
        node = self._sum()
        while True:
            sign = self._peek()
            if sign in COMPARISONS:
                self._at += 1
                node = Compare(sign, node, self._sum())
            elif self._take("in"):
                node = Among(node, self._list())
                kinds = {kind_of(Literal(value)) for value in node.values}
                if kinds - {kind_of(node.of)}:
                    raise _Outside
            else:
                return node

    def _sum(self) -> Node:
        return self._arithmetic(("+", "-"), lambda: self._arithmetic(("*",), self._unary))

    def _arithmetic(self, operators: tuple[str, ...], part: Callable[[], Node]) -> Node:
        node = part()
        while self._peek() in operators:
            operator = self._peek()
            self._at += 1
            node = Arithmetic(operator, node, part())
            # Text can be joined with `+` too; that is left to CEL.
            if kind_of(node.left) is not Kind.INT:
                raise _Outside
        return node

    def _unary(self) -> Node:
        # A row of `!` may be long: only whether it is odd counts.
        negations = 0
        while self._take("!"):
            negations += 1
        if negations:
            node = self._calls(self._primary())
            return Not(node) if negations % 2 else node
        if not self._take("-"):
            return self._calls(self._primary())
        kind, text = self._tokens[self._at]
        if kind == "int":
            self._at += 1
            return self._calls(Literal(-int(text)))
        return Negative(self._calls(self._primary()))

    def _primary(self) -> Node:
        kind, text = self._tokens[self._at]
        self._at += 1
        match kind:
            case "int":
                return Literal(int(text))
            case "text":
                return Literal(text[1:-1])
            case "name" if text in {"true", "false"}:
                return Literal(text == "true")
            case "name" if text == "size":
                self.expect("(")
                node = self.either()
                self.expect(")")
                return self._size(node)
            case "name":
                return self._name(text)
            case "sign" if text == "(":
                node = self.either()
                self.expect(")")
                return node
            case _:
                raise _Outside

    def _name(self, text: str) -> Node:
        if text in BY_NAME:
            return Read(text)
        name, _, method = text.rpartition(".")
        if name not in BY_NAME:
            raise _Outside
        return self._method(Read(name), method)

    def _calls(self, node: Node) -> Node:
        """Methods of what is not a plain name, as in `("a").size()`."""
        while self._take("."):
            _, method = self._tokens[self._at]
            self._at += 1
            node = self._method(node, method)
        return node

    def _method(self, node: Node, method: str) -> Node:
        self.expect("(")
        if method == "size":
            self.expect(")")
            return self._size(node)
        if method not in _METHODS:
            raise _Outside
        argument = self.either()
        self.expect(")")
        return Call(method, node, argument)

    def _size(self, node: Node) -> Node:
        if kind_of(node) is not Kind.STRING:
            raise _Outside
        return Call("size", node, None)

    def _list(self) -> tuple[Fact, ...]:
        self.expect("[")
        values: list[Fact] = []
        while not self._take("]"):
            value = self._unary()
            if not isinstance(value, Literal):
                raise _Outside
            values.append(value.value)
            if not self._take(","):
                self.expect("]")
                break
        return tuple(values)

    def _peek(self) -> str:
        kind, text = self._tokens[self._at]
        return "" if kind == "text" else text

    def _take(self, sign: str) -> bool:
        if self._peek() != sign or self._tokens[self._at][0] == "text":
            return False
        self._at += 1
        return True


def kind_of(node: Node) -> Kind:
    match node:
        case Literal(value):
            if isinstance(value, bool):
                return Kind.BOOL
            return Kind.INT if isinstance(value, int) else Kind.STRING
        case Read(name):
            return BY_NAME[name].kind
        case Negative() | Arithmetic():
            return Kind.INT
        case Call(method):
            return Kind.INT if method == "size" else Kind.BOOL
        case Not() | Both() | Compare() | Among():
            return Kind.BOOL


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Literal() | Read():
            return ()
        case Not(of) | Negative(of) | Among(of):
            return (of,)
        case Both(_, parts):
            return parts
        case Compare(_, left, right) | Arithmetic(_, left, right):
            return (left, right)
        case Call(_, of, argument):
            return (of,) if argument is None else (of, argument)


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from walk(child)


def reads(node: Node) -> frozenset[str]:
    """Names of the attributes that the tree reads."""
    return frozenset(part.name for part in walk(node) if isinstance(part, Read))


_NAME: Final = re.compile(r"[a-z]+\.[a-z_]+")


def names_in(text: str) -> frozenset[str]:
    """Attributes named in a condition outside of the subset; one in a quoted text counts, harmlessly."""
    return frozenset(name for name in _NAME.findall(text) if name in BY_NAME)


def conjuncts(node: Node) -> tuple[Node, ...]:
    """Parts that all have to hold for the whole to hold."""
    if isinstance(node, Both) and node.operator == "&&":
        return tuple(part for whole in node.parts for part in conjuncts(whole))
    return (node,)


def literals(node: Node) -> Iterator[Fact]:
    for part in walk(node):
        if isinstance(part, Literal):
            yield part.value
        elif isinstance(part, Among):
            yield from part.values


# ---------------------------------------------------------------- back to CEL


def as_cel(node: Node) -> str:
    """The tree as CEL."""
    match node:
        case Literal(value):
            return _literal(value)
        case Read(name):
            return name
        case Not(of):
            return f"!{_group(of)}"
        case Negative(of):
            return f"-{_group(of)}"
        case Both(operator, parts):
            return f" {operator} ".join(_group(part) for part in parts)
        case Compare(operator, left, right) | Arithmetic(operator, left, right):
            return f"{_group(left)} {operator} {_group(right)}"
        case Among(of, values):
            return f"{_group(of)} in [{', '.join(_literal(value) for value in values)}]"
        case Call(method, of, None):
            return f"{method}({as_cel(of)})"
        case Call(method, of, argument):
            assert argument is not None
            return f"{_group(of)}.{method}({as_cel(argument)})"


def _group(node: Node) -> str:
    """In brackets, unless nothing around it can tear it apart. A negative number can be: `-1` after `-`."""
    match node:
        case Read() | Call() | Literal(bool() | str()):
            return as_cel(node)
        case Literal(int(value)) if value >= 0:
            return as_cel(node)
        case _:
            return f"({as_cel(node)})"


def _literal(value: Fact) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return f"'{value}'" if '"' in value else f'"{value}"'


# ---------------------------------------------------------------- to Python

Fires = Callable[[StaticFacts, LiveFacts], int]

_STATIC_INDEX: Final = {row.name: index for index, row in enumerate(STATIC)}
_LIVE_INDEX: Final = {row.name: index for index, row in enumerate(LIVE)}


def overflow() -> NoReturn:
    raise Overflow


def function_of(conditions: Iterable[tuple[int, Sequence[Node]]]) -> Fires:
    """One function of static and live facts, whose answer has the bit of every condition that holds.

    A condition is a bit and the parts that all have to hold. Raises Overflow when evaluated.
    """
    writer = _Writer()
    body = [
        f"    if {' and '.join(writer.python(part) for part in parts) or 'True'}: f |= {bit}"
        for bit, parts in conditions
    ]
    source = "\n".join(
        ["def fires(s, v):", *writer.loads(), "    f = 0", *body, "    return f", ""]
    )
    # Only what `_Writer` wrote is run: names of attributes become indexes, literals go through repr.
    space: dict[str, object] = {"overflow": overflow}
    exec(compile(source, "<rules>", "exec"), space)  # noqa: S102 - see above
    return cast("Fires", space["fires"])


class _Writer:
    """Python source of trees, and the local variables that it reads."""

    def __init__(self) -> None:
        self._locals: dict[str, str] = {}
        self._temporaries = 0

    def loads(self) -> list[str]:
        return [f"    {local} = {source}" for source, local in sorted(self._locals.items())]

    def python(self, node: Node) -> str:
        match node:
            case Literal(value):
                return repr(value)
            case Read(name):
                return self._local(name)
            case Not(of):
                return f"(not {self.python(of)})"
            case Negative(of):
                return self._checked(f"-{self.python(of)}")
            case Both(operator, parts):
                word = " and " if operator == "&&" else " or "
                return f"({word.join(self.python(part) for part in parts)})"
            case Compare(operator, left, right):
                return f"({self.python(left)} {operator} {self.python(right)})"
            case Arithmetic(operator, left, right):
                return self._checked(f"{self.python(left)} {operator} {self.python(right)}")
            case Among(of, values):
                return f"({self.python(of)} in {values!r})"
            case Call(_, of, None):
                return f"len({self.python(of)})"
            case Call(method, of, argument):
                assert argument is not None
                return f"{self.python(of)}.{_METHODS[method]}({self.python(argument)})"

    def _local(self, name: str) -> str:
        source = f"s[{_STATIC_INDEX[name]}]" if name in _STATIC_INDEX else f"v[{_LIVE_INDEX[name]}]"
        return self._locals.setdefault(source, f"a{len(self._locals)}")

    def _checked(self, source: str) -> str:
        name = f"t{self._temporaries}"
        self._temporaries += 1
        return f"({name} if {INT_MIN} <= ({name} := {source}) <= {INT_MAX} else overflow())"
