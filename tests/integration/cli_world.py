"""The whole command line in this process against a served replica, with terminals of a chosen width."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cli.main import app
from tests.integration.surfaces import Surfaces, running_surfaces, served


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join((self.out + self.err).split())

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    def fits(self, width: int) -> bool:
        return max(map(len, self.out.splitlines()), default=0) <= width


class Headway:
    """Runs commands one at a time while the loop serves them."""

    def __init__(self, folder: Path, url: str, key: str) -> None:
        self.folder = folder
        self.environment: dict[str, str | None] = {
            "HEADWAY_URL": url,
            "HEADWAY_OPERATOR_KEY": key,
            "HEADWAY_CONTEXT": None,
            "HEADWAY_CONFIG": str(folder / "config.yaml"),
            "COLUMNS": "80",
        }

    async def __call__(self, *arguments: str, stdin: str = "", **environment: str | None) -> Ran:
        ran = await asyncio.to_thread(
            CliRunner().invoke,
            app,
            list(arguments),
            input=stdin,
            env=self.environment | environment,
        )
        assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
        return Ran(ran.exit_code, ran.stdout, ran.stderr)


@dataclass(frozen=True, slots=True)
class World:
    surfaces: Surfaces
    url: str
    database_url: str
    headway: Headway

    async def chat(self, tenant: str = "aurora", **body: object) -> Any:
        """One call of a tenant, which no engine can answer."""
        whole = {
            "model": "llama-3.1-8b",
            "messages": [{"role": "user", "content": "hello"}],
            **body,
        }
        return await self.surfaces.call(
            "POST", "/v1/chat/completions", self.surfaces.tenants[tenant], whole
        )

    async def refusal(self, request_id: str) -> dict[str, Any]:
        """What is kept of a refusal, once it is written."""
        async with asyncio.timeout(10):
            while True:
                found = await self.surfaces.operate("GET", f"refusals/{request_id}")
                if found.status_code == 200:
                    document: dict[str, Any] = found.json()
                    return document
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running_world(database_url: str, nats_url: str, folder: Path) -> AsyncIterator[World]:
    async with (
        running_surfaces(database_url, nats_url) as surfaces,
        served(surfaces) as url,
    ):
        key = surfaces.operators["admin"]
        yield World(surfaces, url, database_url, Headway(folder, url, key))
