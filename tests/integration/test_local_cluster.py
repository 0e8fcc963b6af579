"""`headway up` for real: one owner per folder, no orphan after a hard kill, the same keys after it."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import psutil
import pytest
import yaml

from tests.integration.surfaces import DEMO
from tests.ports import free_port

READY_S_MAX = 60
GONE_S_MAX = 30


@pytest.fixture
def document(folder: Path) -> Path:
    """One node with one engine of the demo's cluster."""
    cluster = yaml.safe_load(DEMO.read_text())
    node = next(node for node in cluster["nodes"] if node["id"] == "us-l40s")
    cluster["nodes"] = [{**node, "engines": node["engines"][:1]}]
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


class Up:
    """A running `headway up`."""

    def __init__(self, folder: Path, document: Path, port: int) -> None:
        self._arguments = ["--data-dir", str(folder / "data"), "--cluster", str(document)]
        self._arguments += ["--port", str(port)]
        self.process: asyncio.subprocess.Process | None = None

    async def run(self) -> asyncio.subprocess.Process:
        hidden = ("HEADWAY", "DATABASE_URL", "NATS_URL")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli",
            "up",
            *self._arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith(hidden)},
        )
        return self.process

    async def welcome(self) -> str:
        """What it prints once it is ready."""
        process = await self.run()
        assert process.stdout is not None
        async with asyncio.timeout(READY_S_MAX):
            return (await process.stdout.readuntil(b"Ctrl-C")).decode()

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
async def up(folder: Path, document: Path) -> AsyncIterator[Up]:
    running = Up(folder, document, free_port())
    yield running
    process = running.process
    if process is not None:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def until_gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(GONE_S_MAX):
        while any(is_alive(process) for process in processes):
            await asyncio.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def complete(welcome: str) -> int:
    """Sends the request that the welcome offers; its status."""
    url = next(word for word in welcome.split() if word.startswith("http://"))
    key = next(word for word in welcome.split() if word.startswith("hw-tenant-"))
    body = json.loads(welcome.split("-d '")[1].split("'", maxsplit=1)[0])
    async with httpx2.AsyncClient(trust_env=False) as client:
        headers = {"authorization": f"Bearer {key}"}
        response = await client.post(
            f"{url}/v1/chat/completions", headers=headers, json=body, timeout=30
        )
        return response.status_code


@pytest.mark.timeout(180)
async def test_up_serves_dies_without_orphans_and_comes_back(
    up: Up, folder: Path, document: Path
) -> None:
    first = await up.welcome()
    assert await complete(first) == 200
    children = up.descendants()
    # PostgreSQL with its backends, NATS, the replica, one agent, one engine.
    names = {child.name() for child in children}
    assert {"postgres", "nats-server"} <= names
    assert len(children) >= 5
    for name in ("keys.json", "operator.json", "pepper"):
        assert (folder / "data" / name).stat().st_mode & 0o077 == 0

    second = await Up(folder, document, free_port()).run()
    _, words = await second.communicate()
    assert second.returncode == 2
    assert up.process is not None
    assert f"process {up.process.pid}" in " ".join(words.decode().split())

    os.kill(up.process.pid, signal.SIGKILL)
    await up.process.communicate()
    await until_gone(children)

    again = await up.welcome()
    assert await complete(again) == 200
    key = next(word for word in first.split() if word.startswith("hw-tenant-"))
    assert key in again
    children = up.descendants()
    up.process.send_signal(signal.SIGINT)
    await up.process.communicate()
    assert up.process.returncode == 0
    await until_gone(children)


async def test_taken_port_is_named(folder: Path, document: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        process = await Up(folder, document, port).run()
        _, words = await process.communicate()
    assert process.returncode == 2
    said = " ".join(words.decode().split())
    assert f"port {port} is taken by" in said
    assert "--port" in said


async def test_wrong_document_is_refused_before_anything_starts(folder: Path) -> None:
    document = folder / "wrong.yaml"
    document.write_text("regions: [us-east]\nnodes: [{id: n1, region: us-east}]\n")
    process = await Up(folder, document, free_port()).run()
    _, words = await process.communicate()
    assert process.returncode == 2
    assert "nodes.0" in words.decode()
    assert not (folder / "data").exists()
