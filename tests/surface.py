"""What the running program offers: its commands and options, variables, paths and metrics, read off the code.

Pages, manifests and units are held against it, and the reference is written from it.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import typer
from fastapi import FastAPI
from fastapi.routing import APIRoute

from cli.main import app as cli_app
from controlplane.api.app import create_app
from controlplane.api.services import Services
from controlplane.gateway.hot_path import CHAT, COMPLETIONS, MODELS
from controlplane.settings import Settings
from controlplane.telemetry.metrics import Kind, Metrics
from dataplane.agent.settings import argument_parser

ROOT: Final = Path(__file__).resolve().parents[1]
PROGRAM: Final = "headway"
# Served ahead of FastAPI.
HOT: Final = (("POST", CHAT), ("POST", COMPLETIONS), ("GET", MODELS), ("GET", MODELS + "/{model}"))
# Options that every command has.
HELP: Final = frozenset({"--help"})
COMPLETION: Final = frozenset({"--install-completion", "--show-completion"})
_VARIABLE: Final = re.compile(r"(HEADWAY|NATS|DATABASE|OTEL)_[A-Z][A-Z0-9_]*")
# Of the OpenTelemetry SDK, which reads them itself: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
OTEL_SDK: Final = frozenset({"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_ENDPOINT"})


# ---------------------------------------------------------------- the command line


@dataclass(frozen=True, slots=True)
class Command:
    """One command without further ones below it. `node` is Typer's own object."""

    words: tuple[str, ...]
    node: Any

    @property
    def name(self) -> str:
        return " ".join((PROGRAM, *self.words))


@cache
def root() -> Any:
    return typer.main.get_command(cli_app)


@cache
def commands() -> tuple[Command, ...]:
    """Every command, in the order of `--help`."""

    def below(node: Any, words: tuple[str, ...]) -> Iterator[Command]:
        children = getattr(node, "commands", None)
        if children is None:
            if not node.hidden:
                yield Command(words, node)
            return
        for name, child in children.items():
            yield from below(child, (*words, name))

    return tuple(below(root(), ()))


def options_of(node: Any) -> dict[str, bool]:
    """Options of a command by spelling, and whether each takes a value."""
    found = dict.fromkeys(HELP, False)
    for parameter in node.params:
        if parameter.param_type_name == "option":
            takes_value = not (parameter.is_flag or parameter.count)
            found |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), takes_value)
    return found


def agent_options() -> dict[str, bool]:
    """The same of `headway agent`, which reads its own."""
    return {
        spelling: action.nargs != 0
        for action in argument_parser()._actions
        for spelling in action.option_strings
    }


def problems_of_command(words: Sequence[str]) -> list[str]:
    """What is wrong with `headway WORDS…`: a command or an option that there is not, too many or too few
    arguments. Words in capitals and `…` stand for what a reader fills in.
    """
    node, at, spoken = root(), 0, [PROGRAM]
    known = options_of(node) | dict.fromkeys(COMPLETION, False)
    while getattr(node, "commands", None) is not None:
        if at < len(words) and words[at].startswith("-"):
            # A group may have options of its own, before a command or without one.
            spelling, has_value, _ = words[at].partition("=")
            if spelling not in known:
                return [f"`{' '.join(spoken)}` has no option `{spelling}`"]
            at += 2 if known[spelling] and not has_value else 1
            continue
        if at >= len(words):
            is_asking = bool(known.keys() & set(words)) or len(spoken) > 1
            return [] if is_asking else [f"`{PROGRAM}` alone does nothing"]
        if words[at] not in node.commands:
            return [f"`{' '.join(spoken)}` has no command `{words[at]}`"]
        spoken.append(words[at])
        node = node.commands[words[at]]
        known = options_of(node)
        at += 1
    name = " ".join(spoken)
    if spoken == [PROGRAM, "agent"]:
        known = agent_options()
    problems, arguments, rest = [], 0, list(words[at:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            arguments += 1
            continue
        spelling, has_value, _ = word.partition("=")
        if spelling not in known:
            problems.append(f"`{name}` has no option `{spelling}`")
        elif known[spelling] and not has_value:
            if not rest:
                problems.append(f"`{name} {spelling}` lacks its value")
            else:
                rest.pop(0)
    return problems + _count_arguments(name, node, arguments, is_asking="--help" in words)


def _count_arguments(name: str, node: Any, given: int, *, is_asking: bool) -> list[str]:
    takes = [each for each in node.params if each.param_type_name == "argument"]
    if any(each.nargs == -1 for each in takes) or is_asking:
        return []
    least = sum(each.required for each in takes)
    if least <= given <= len(takes):
        return []
    return [f"`{name}` takes {least} to {len(takes)} arguments, not {given}"]


# ---------------------------------------------------------------- the environment


def variable_of(field: str) -> str:
    """The environment variable of a setting of `headway serve`."""
    alias = Settings.model_fields[field].validation_alias
    return str(alias) if alias else f"HEADWAY_{field.upper()}"


@cache
def serve_variables() -> frozenset[str]:
    return frozenset(variable_of(field) for field in Settings.model_fields)


@cache
def agent_variables() -> frozenset[str]:
    return _named_in(ROOT / "dataplane" / "agent" / "settings.py")


@cache
def variables() -> frozenset[str]:
    """Every variable that any part of the program names."""
    named = {
        name
        for package in ("cli", "controlplane", "dataplane", "policies")
        for path in (ROOT / package).rglob("*.py")
        for name in _named_in(path)
    }
    return frozenset(named | serve_variables() | OTEL_SDK)


def _named_in(path: Path) -> frozenset[str]:
    """Variables that stand in a module as whole strings."""
    return frozenset(
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _VARIABLE.fullmatch(node.value)
    )


# ---------------------------------------------------------------- REST


@cache
def application() -> FastAPI:
    """The application as it is served, asked for nothing but its routes and its document."""
    gate = SimpleNamespace(new_id=lambda: "req-0")
    services = SimpleNamespace(metrics=Metrics(), gate=gate, engine=None, pepper=b"")
    return create_app(cast("Services", services))


@cache
def roles() -> dict[tuple[str, str], str]:
    """The operator role that a path needs, by method and path; those of tenants and probes need none."""
    needed = [
        (method, route.path, role)
        for route in _flat(application().routes)
        if (role := _role_of(route.dependant)) is not None
        for method in route.methods or ()
    ]
    found = {}
    for method, path in paths():
        ends = [each for each in needed if each[0] == method and path.endswith(each[1])]
        if ends and path.startswith("/operator/"):
            found[method, path] = max(ends, key=lambda each: len(each[1]))[2]
    return found


def _flat(found: Sequence[Any]) -> Iterator[APIRoute]:
    for route in found:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from _flat(router.routes)
        elif isinstance(route, APIRoute):
            yield route


def _role_of(dependant: Any) -> str | None:
    """The role that `operator_with` was given, wherever in the tree of dependencies it stands."""
    call = dependant.call
    if getattr(call, "__name__", "") == "operator_of":
        names = call.__code__.co_freevars
        return str(call.__closure__[names.index("role")].cell_contents)
    for below in dependant.dependencies:
        if (role := _role_of(below)) is not None:
            return role
    return None


@cache
def paths() -> frozenset[tuple[str, str]]:
    """Method and path of everything that a replica serves."""
    document = application().openapi()["paths"]
    return frozenset(
        {(method.upper(), path) for path, operations in document.items() for method in operations}
        | set(HOT)
    )


def is_served(method: str, path: str) -> bool:
    """Whether a path with its parts filled in is one that is served."""
    asked = path.partition("?")[0].rstrip("/").split("/")
    return any(
        verb == method
        and len(known := template.split("/")) == len(asked)
        and all(
            part.startswith("{") or part == given for part, given in zip(known, asked, strict=True)
        )
        for verb, template in paths()
    )


# ---------------------------------------------------------------- metrics


@cache
def metric_names() -> frozenset[str]:
    """Names of series as Prometheus sees them, suffixes included."""
    found = set()
    for metric in Metrics().all():
        name, kind = metric.declaration.name, metric.declaration.kind
        match kind:
            case Kind.COUNTER:
                found.add(f"{name}_total")
            case Kind.HISTOGRAM:
                found |= {f"{name}_bucket", f"{name}_sum", f"{name}_count", name}
            case _:
                found.add(name)
    return frozenset(found)


@cache
def metric_labels() -> dict[str, frozenset[str]]:
    """Labels by name without suffix."""
    return {
        metric.declaration.name: frozenset(metric.declaration.labels) for metric in Metrics().all()
    }
