"""What runs in the foreground: its options, and how signals end it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cli.failure import CommandFailure, ExitCode
from controlplane.domain.errors import ConfigurationError, StateUnavailable

PORT_DEFAULT = 8080

PortOption = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Port of the API on the loopback address.")
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", help="Cluster document, YAML; the demo's when left out."),
]

T = TypeVar("T")


def run_until_signal(main: Callable[[], Awaitable[T]]) -> T | None:
    """Runs `main` until it returns, or SIGINT or SIGTERM cancels it and the result is None.

    Raises CommandFailure for what an operator can put right.
    """
    try:
        return asyncio.run(_until_signal(main))
    except ConfigurationError as error:
        raise CommandFailure(ExitCode.USAGE, str(error)) from error
    except StateUnavailable as error:
        raise CommandFailure(
            ExitCode.UNREACHABLE, str(error), "check DATABASE_URL, or unset it"
        ) from error


async def _until_signal(main: Callable[[], Awaitable[T]]) -> T | None:
    task = asyncio.ensure_future(main())
    is_asked_to_stop = False

    def ask_to_stop() -> None:
        nonlocal is_asked_to_stop
        # Only once: a second Ctrl-C must not interrupt the orderly stop.
        if not is_asked_to_stop:
            is_asked_to_stop = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask_to_stop)
    try:
        return await task
    except asyncio.CancelledError:
        if is_asked_to_stop:
            return None
        raise
