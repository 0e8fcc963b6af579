"""The command `headway top`: its options, and what it needs of the terminal."""

import asyncio
import sys
from enum import StrEnum
from typing import Annotated, Final

import typer

from cli.client import DATA_DIR
from cli.contexts import connection
from cli.failure import CommandFailure, ExitCode
from cli.operator import ContextOption, DataDirOption, KeyOption, UrlOption, reported

INTERVAL_S_DEFAULT: Final = 2.0


class First(StrEnum):
    """What is shown first."""

    POOLS = "pools"
    ENGINES = "engines"
    TENANTS = "tenants"
    WORKFLOWS = "workflows"
    REQUESTS = "requests"
    REFUSALS = "refusals"


def top(
    *,
    first: Annotated[
        First, typer.Argument(metavar="[VIEW]", help="What is shown first.")
    ] = First.POOLS,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.5, max=60, help="Seconds between two looks.")
    ] = INTERVAL_S_DEFAULT,
    url: UrlOption = None,
    key: KeyOption = None,
    context: ContextOption = None,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Watch pools, engines, tenants, workflows, requests and refusals live.

    Enter opens a row: pool, engine, requests, explanation; or tenant, workflows,
    requests. The footer has the keys.
    """
    with reported():
        # Textual draws on standard error.
        if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            raise CommandFailure(
                ExitCode.USAGE,
                "`headway top` needs a terminal",
                "use `headway status --watch --json` in a script",
            )
        found = connection(url, key, data_dir, context)
        asyncio.run(_run(found.url, found.key, str(first), interval_s))


async def _run(url: str, key: str, first: str, interval_s: float) -> None:
    # Textual takes a third of a second to import; only this command pays for it.
    from cli.top.app import Top
    from cli.top.poll import Poller

    async with Poller(url, key) as poller:
        await Top(poller, view=first, interval_s=interval_s).run_async()
