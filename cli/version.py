"""`headway version`."""

from importlib.metadata import version as installed_version

from cli.operator import JsonOption
from cli.output import Output


def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    number = installed_version("headway")
    Output(is_json=as_json).say({"version": number}, f"headway {number}")
