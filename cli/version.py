"""`headway version`."""

from importlib.metadata import version as installed_version

from cli.operator import JsonOption, OutputOption, reported
from cli.output import Output


def version(*, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Print the version."""
    number = installed_version("headway")
    with reported():
        Output.of(output, as_json=as_json).say({"version": number}, f"headway {number}")
