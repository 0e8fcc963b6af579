"""`headway agent`: one node's agent. Its options are its own."""

import os

import typer

from cli.failure import CommandFailure, ExitCode
from cli.operator import reported

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def agent(context: typer.Context) -> None:
    """Run one node's agent: its engines, their capacity, their health."""
    from dataplane.agent.main import run
    from dataplane.agent.settings import SettingsError, read_settings

    with reported():
        try:
            settings = read_settings(context.args, os.environ)
        except SettingsError as error:
            raise CommandFailure(
                ExitCode.USAGE, str(error), "see `headway agent --help`"
            ) from error
    raise typer.Exit(run(settings))
