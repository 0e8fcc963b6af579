"""`headway db`: the schema of the database in DATABASE_URL, or of the embedded one."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from cli.client import DATA_DIR
from cli.failure import CommandFailure, ExitCode
from cli.operator import DataDirOption, JsonOption, OutputOption, reported
from cli.output import Output
from controlplane.domain.errors import ConfigurationError, StateUnavailable

app = typer.Typer(
    no_args_is_help=True,
    help="The schema of the database in DATABASE_URL, or of the embedded one.",
)

POSTGRES_FOLDER = "postgres"

T = TypeVar("T")


@app.command()
def upgrade(
    *, output: OutputOption = None, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR
) -> None:
    """Bring the schema to the newest revision. Safe to repeat."""
    from controlplane.store import migrate

    with reported():
        revision = asyncio.run(_with_database(data_dir, migrate.upgrade))
        Output.of(output, as_json=as_json).say(
            {"revision": revision}, f"the schema is at {revision}"
        )


@app.command()
def current(
    *, output: OutputOption = None, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR
) -> None:
    """Say which revision the schema has. Fails when this program needs more than that."""
    from controlplane.store import migrate

    with reported():
        found = asyncio.run(_with_database(data_dir, migrate.current))
        standing = migrate.standing_of(found)
        more = ", newer than this program" if standing is migrate.Standing.NEWER else ""
        Output.of(output, as_json=as_json).say(
            {
                "revision": found,
                "is_current": standing is migrate.Standing.CURRENT,
                "standing": str(standing),
            },
            f"the schema is at {found}{more}" if found else "the database is empty",
        )
        if not standing.is_usable:
            raise CommandFailure(
                ExitCode.FAILED, "the schema is not current", "run `headway db upgrade`"
            )


async def _with_database(data_dir: Path, use: Callable[[str], T]) -> T:
    from controlplane.embedded.postgres import EmbeddedPostgres

    try:
        url = os.environ.get("DATABASE_URL")
        if url:
            return await asyncio.to_thread(use, url)
        postgres = EmbeddedPostgres(data_dir / POSTGRES_FOLDER)
        try:
            return await asyncio.to_thread(use, await postgres.start())
        finally:
            await postgres.stop()
    except ConfigurationError as error:
        raise CommandFailure(ExitCode.USAGE, str(error)) from error
    except StateUnavailable as error:
        raise CommandFailure(
            ExitCode.UNREACHABLE, f"the database can not be reached: {error}", "check DATABASE_URL"
        ) from error
