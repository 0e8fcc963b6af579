"""Each page of the reference, as text. Whatever the code does not say stands in `meanings.py`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import SecretStr

from controlplane.settings import Settings
from controlplane.telemetry.metrics import Kind, Metrics
from controlplane.wire.outcomes import OUTCOMES
from dataplane.agent.settings import argument_parser
from policies.attributes import reference_page
from tests import surface
from tests.reference.meanings import AGENT_ONLY, HOT_PATHS, OTHERS, REASONS, SERVE

FOLDER: Final = surface.ROOT / "docs" / "reference"
WRITTEN: Final = (
    "Written by `python -m tests.reference` from the code; change that and not this page."
)
# An option that this many commands have in the same words is told once, at the top.
SHARED_BY_MIN: Final = 8


def pages() -> dict[str, str]:
    """All pages by file name."""
    made: dict[str, Callable[[], str]] = {
        "cli.md": cli,
        "rest.md": rest,
        "metrics.md": metrics,
        "settings.md": settings,
        "policy-attributes.md": reference_page,
    }
    return {name: make() for name, make in made.items()}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown; what would end a cell is escaped."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "…", ":")) or not text else f"{text}."


# ---------------------------------------------------------------- command line


def cli() -> str:
    every = surface.commands()
    counts = Counter(
        _option(parameter)
        for command in every
        for parameter in command.node.params
        if parameter.param_type_name == "option"
    )
    shared = {option for option, count in counts.items() if count >= SHARED_BY_MIN}
    lines = [
        "# The command line",
        "",
        WRITTEN,
        "",
        _sentence(surface.root().epilog or ""),
        "",
        "## Options that many commands have",
        "",
        *table(("option", "means"), sorted(shared)),
    ]
    group: tuple[str, ...] | None = None
    for command in sorted(every, key=lambda each: each.words):
        if command.words[:1] != group:
            group = command.words[:1]
            parent = surface.root().commands[group[0]]
            lines += [f"## headway {group[0]}", ""]
            if command.words[1:]:
                lines += [_sentence(parent.help or ""), ""]
        lines += _command(command, shared)
    return "\n".join(lines).rstrip() + "\n"


def _command(command: surface.Command, shared: set[tuple[str, str]]) -> list[str]:
    node = command.node
    arguments = [each for each in node.params if each.param_type_name == "argument"]
    usage = [command.name, *(_metavar(each) for each in arguments)]
    options = [
        _option(each)
        for each in node.params
        if each.param_type_name == "option" and not each.hidden
    ]
    if command.words == ("agent",):
        options = _agent_options()
    own = [option for option in options if option not in shared]
    if options:
        usage.append("[OPTIONS]")
    lines = [f"### {command.name}", ""] if command.words[1:] else []
    lines += [f"`{' '.join(usage)}`", ""]
    for paragraph in (node.help or "").split("\n\n"):
        if paragraph.strip():
            lines += [_sentence(paragraph), ""]
    rows = [(f"`{_metavar(each).strip('[]')}`", _sentence(each.help or "")) for each in arguments]
    rows += own
    if rows:
        lines += table(("argument or option", "means"), rows)
    if rest := [
        f"`{spelling.split('`')[1].split()[0]}`"
        for spelling, _ in options
        if (spelling, _) in shared
    ]:
        lines += [f"Also {', '.join(rest)}.", ""]
    return lines


def _metavar(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]")
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> tuple[str, str]:
    """Spelling and meaning of an option, as two cells."""
    spelling = ", ".join((*parameter.opts, *parameter.secondary_opts))
    words = _sentence(parameter.help or "")
    if not (parameter.is_flag or parameter.count):
        choices = _choices(parameter.type_descriptor.annotation)
        spelling += f" {parameter.metavar or parameter.name.upper()}"
        if choices:
            words += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        bounds = [
            f"{word} {bound}"
            for word, bound in (("at least", parameter.min), ("at most", parameter.max))
            if bound is not None
        ]
        if bounds:
            words += f" {', '.join(bounds).capitalize()}."
        default = parameter.default
        if default not in (None, "", ()) and not callable(default):
            words += f" Default `{getattr(default, 'value', default)}`."
        if parameter.multiple:
            words += " May be repeated."
    if parameter.required:
        words += " Must be given."
    return f"`{spelling}`", words.strip()


def _choices(annotation: Any) -> list[str]:
    members = getattr(annotation, "__members__", None)
    return [str(member.value) for member in members.values()] if members else []


def _agent_options() -> list[tuple[str, str]]:
    rows = []
    for action in argument_parser()._actions:
        spelling = ", ".join(action.option_strings)
        if action.nargs != 0:
            spelling += f" {(action.metavar or action.dest).upper()}"
        words = _sentence((action.help or "").replace("%(default)s", str(action.default)))
        if action.default not in (None, False, "==SUPPRESS=="):
            words += f" Default `{action.default}`."
        rows.append((f"`{spelling}`", words.strip()[:1].upper() + words.strip()[1:]))
    return rows


# ---------------------------------------------------------------- REST


def rest() -> str:
    document = surface.application().openapi()
    lines = [
        "# The REST API",
        "",
        WRITTEN,
        "",
        "Every replica serves all of it, and `/openapi.json`. Bodies are JSON;",
        "a key goes as `authorization: Bearer KEY`.",
        "",
        "## As OpenAI's",
        "",
        *table(
            ("path", "is"), ((f"`{verb} {path}`", HOT_PATHS[path]) for verb, path in surface.HOT)
        ),
        "## Errors",
        "",
        "Every error has OpenAI's envelope; `code` is one of these, and `x-headway-reason` repeats it.",
        "*Again* is what `x-should-retry` tells the official SDKs: no, yes, or yes with a `retry-after`",
        "where there is an honest estimate.",
        "",
        *table(
            ("code", "status", "type", "again", "means"),
            (
                (
                    f"`{reason}`",
                    str(outcome.status),
                    f"`{outcome.error_type}`",
                    {"never": "no", "again": "yes", "later": "later"}[outcome.retry],
                    REASONS[reason],
                )
                for reason, outcome in OUTCOMES.items()
            ),
        ),
    ]
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            tag = (operation.get("tags") or ["openai"])[0]
            by_tag.setdefault(tag, []).append((path, verb.upper(), operation))
    for tag, operations in sorted(by_tag.items()):
        lines += [f"## {tag.capitalize()}", ""]
        for path, verb, operation in sorted(operations, key=lambda each: each[:2]):
            lines += _operation(path, verb, operation)
    lines += ["## Shapes", "", "An optional field is in *italics*.", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _shape(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _operation(path: str, verb: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### {verb} {path}", "", _sentence(operation.get("description", "")), ""]
    security = operation.get("security") or []
    names = {name for scheme in security for name in scheme}
    role = surface.roles().get((verb, path))
    needs = (
        f"an operator key with the role `{role}`"
        if role
        else "a tenant's key"
        if names
        else "no key"
    )
    facts = [f"Needs {needs}."]
    if body := operation.get("requestBody"):
        facts.append(f"Takes {_type(body['content']['application/json']['schema'])}.")
    answers = []
    for status, answer in operation["responses"].items():
        content = next(iter(answer.get("content", {}).values()), {})
        shape = _type(content.get("schema", {}))
        answers.append(f"{status} {shape}" if status.startswith("2") and shape else status)
    lines += [" ".join([*facts, f"Answers {', '.join(answers)}."]), ""]
    if parameters := operation.get("parameters"):
        lines += table(
            ("parameter", "in", "is", "means"),
            (
                (
                    f"`{each['name']}`" if each.get("required") else f"*`{each['name']}`*",
                    each["in"],
                    _type(each["schema"]),
                    _sentence(each.get("description", "")),
                )
                for each in parameters
            ),
        )
    return lines


def _shape(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if words := _sentence(schema.get("description", "")):
        lines += [words, ""]
    fields = schema.get("properties")
    if not fields:
        return [*lines, f"Is {_type(schema)}.", ""]
    required = set(schema.get("required", ()))
    return lines + table(
        ("field", "is", "means"),
        (
            (
                f"`{field}`" if field in required else f"*`{field}`*",
                _type(facts),
                _sentence(facts.get("description", "")),
            )
            for field, facts in fields.items()
        ),
    )


_BOUNDS: Final = (
    ("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"),
    ("minLength", "length ≥"), ("maxLength", "length ≤"), ("minItems", "entries ≥"),
    ("maxItems", "entries ≤"),
)  # fmt: skip


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(_type(each) for each in schema[joined])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "")
    if kind == "array":
        words = f"list of {_type(schema.get('items', {})) or 'values'}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        words = f"object of {_type(schema['additionalProperties']) or 'values'}"
    else:
        words = {"null": "null"}.get(kind, schema.get("format") or kind)
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in _BOUNDS if name in schema]
    if "pattern" in schema:
        bounds.append(f"like `{schema['pattern']}`")
    return ", ".join([words, *bounds]) if words else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


# ---------------------------------------------------------------- metrics


def metrics() -> str:
    rows = []
    for metric in Metrics().all():
        declared = metric.declaration
        suffix = "_total" if declared.kind is Kind.COUNTER else ""
        rows.append(
            (
                f"`{declared.name}{suffix}`",
                str(declared.kind),
                f"`{declared.unit}`",
                ", ".join(f"`{label}`" for label in declared.labels),
                _sentence(declared.help),
            )
        )
    lines = [
        "# Metrics",
        "",
        WRITTEN,
        "",
        "At `/metrics` of every replica, in Prometheus' text format; over OTLP under the names with dots.",
        "A histogram also has `_bucket`, `_sum` and `_count`. Units are UCUM's. Labels take values from",
        "closed or bounded sets: a tenant shows as its class.",
        "",
        *table(("series", "kind", "unit", "labels", "means"), sorted(rows)),
    ]
    return "\n".join(lines).rstrip() + "\n"


# ---------------------------------------------------------------- settings


def settings() -> str:
    lines = [
        "# Settings",
        "",
        WRITTEN,
        "",
        "## headway serve",
        "",
        "From the environment alone.",
        "",
        *table(
            ("variable", "is", "default", "means"),
            (_setting(field) for field in Settings.model_fields),
        ),
        "## headway agent",
        "",
        "An option stands above its variable.",
        "",
        *table(("option", "means"), _agent_options()),
        "By the environment alone:",
        "",
        *table(("variable", "means"), ((f"`{name}`", words) for name, words in AGENT_ONLY.items())),
        "## Elsewhere",
        "",
        *table(("variable", "means"), ((f"`{name}`", words) for name, words in OTHERS.items())),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _setting(field: str) -> tuple[str, str, str, str]:
    info = Settings.model_fields[field]
    kinds = {int: "whole number", float: "number", str: "text", SecretStr: "secret text"}
    words = kinds.get(info.annotation or str, "path")  # type: ignore[arg-type]
    bounds = []
    for fact in info.metadata:
        match fact:
            case Gt(gt=bound):
                bounds.append(f"> {bound}")
            case Ge(ge=bound):
                bounds.append(f"≥ {bound}")
            case Lt(lt=bound):
                bounds.append(f"< {bound}")
            case Le(le=bound):
                bounds.append(f"≤ {bound}")
            case MinLen(min_length=bound):
                bounds.append(f"length ≥ {bound}")
            case _:
                pass
    default = info.default
    if info.is_required():
        shown = "must be set"
    elif isinstance(default, SecretStr) or default in (None, ""):
        shown = "none"
    else:
        shown = f"`{default}`"
    return f"`{surface.variable_of(field)}`", ", ".join([words, *bounds]), shown, SERVE[field]
