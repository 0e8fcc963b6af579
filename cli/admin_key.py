"""`headway db admin-key`: an operator key made in the database itself, where there is none yet to ask a server with."""

import asyncio
import os
from typing import Annotated

import typer

from cli.failure import CommandFailure, ExitCode
from cli.operator import reported
from controlplane.domain.errors import StateUnavailable

PEPPER_CHARACTERS_MIN = 16


def admin_key(
    *, name: Annotated[str, typer.Option("--name", help="What the key is for.")] = "admin"
) -> None:
    """Make an operator key with the role admin and print it, this once. It stands in the audit log.

    Whoever may do this may reach the database: DATABASE_URL says which, and HEADWAY_PEPPER must be that of
    its replicas. `headway up` makes such a key by itself.
    """
    with reported():
        url, pepper = os.environ.get("DATABASE_URL", ""), os.environ.get("HEADWAY_PEPPER", "")
        if not url or len(pepper) < PEPPER_CHARACTERS_MIN:
            raise CommandFailure(
                ExitCode.USAGE,
                "DATABASE_URL and HEADWAY_PEPPER must be set, as for `headway serve`",
                "run it where a replica runs; a local `headway up` has a key already",
            )
        try:
            key_id, key = asyncio.run(_made(url, pepper, name))
        except StateUnavailable as error:
            raise CommandFailure(
                ExitCode.UNREACHABLE,
                f"the database can not be reached: {error}",
                "check DATABASE_URL",
            ) from error
        # The key alone goes to standard output, so that a script can take it from there.
        print(key)
        typer.echo(f"{key_id}: shown this once, keep it now", err=True)


async def _made(url: str, pepper: str, name: str) -> tuple[str, str]:
    from controlplane.domain.catalog import OperatorRole
    from controlplane.store.keys import create_operator_key
    from controlplane.store.session import make_engine

    engine = make_engine(url)
    try:
        return await create_operator_key(engine, pepper.encode(), OperatorRole.ADMIN, name)
    finally:
        await engine.dispose()
