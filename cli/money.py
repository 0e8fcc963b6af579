"""Dollars as somebody gives them on a command line."""

from cli.failure import CommandFailure, ExitCode
from controlplane.domain.money import micro_usd


def micro_usd_given(usd: float) -> int:
    """The amount in micro-dollars. Ends the command when it is none, or below the least unit."""
    try:
        return micro_usd(usd)
    except ValueError as error:
        raise CommandFailure(ExitCode.USAGE, str(error), "give a larger amount, or 0") from error
