"""Every command says what it is for and how it is used, and its examples are what it really takes."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cli.examples import EXAMPLES
from cli.main import app

ROOT = get_command(app)


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Everything that can be run, by its words; a group only when it does something by itself."""
    inner = getattr(command, "commands", {})
    if path and (not inner or command.invoke_without_command):
        yield " ".join(path), command
    for name, one in inner.items():
        yield from commands(one, (*path, name))


COMMANDS = dict(commands())


def test_every_command_has_examples_and_no_example_is_of_none() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


def test_every_command_and_every_option_says_what_it_is_for() -> None:
    silent = [
        f"{name} {parameter.name}"
        for name, command in COMMANDS.items()
        for parameter in command.params
        if parameter.name != "help" and not parameter.hidden and not parameter.help
    ]
    assert silent == []
    assert [name for name, command in COMMANDS.items() if not command.help] == []
    assert [name for name, command in COMMANDS.items() if "$ headway" not in command.epilog] == []


# One of each kind: a group's own, nested twice, with characters that mean something to whoever draws it.
@pytest.mark.parametrize("name", ["status", "engines profiles show", "budgets set", "simulate"])
def test_help_shows_examples_as_they_are_typed(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for example in EXAMPLES[name]:
        assert f"$ {example}" in shown.stdout
    assert "Exit codes" in shown.stdout


@pytest.mark.parametrize("example", [one for each in EXAMPLES.values() for one in each])
def test_examples_are_parsed_by_their_commands(example: str) -> None:
    words = shlex.split(example.partition(" < ")[0])
    assert words.pop(0) == "headway"
    command, context = ROOT, ROOT.make_context("headway", [], resilient_parsing=True)
    while words and words[0] in getattr(command, "commands", {}):
        name = words.pop(0)
        command = command.commands[name]
        if getattr(command, "commands", {}) and words and words[0] in command.commands:
            context = command.make_context(name, [], parent=context, resilient_parsing=True)
    # Raises when an option is unknown, a value is none of its kind, or something is missing.
    command.make_context(command.name or "", words, parent=context)
