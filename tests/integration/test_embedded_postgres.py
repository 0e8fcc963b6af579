"""The embedded PostgreSQL: the same data and URL after whatever death, and no orphan that blocks it."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

from controlplane.domain.errors import ConfigurationError
from controlplane.embedded.lock import FolderLock
from controlplane.embedded.postgres import REACHABLE_ROOT, EmbeddedPostgres
from controlplane.embedded.supervise import Program, keep_alive

FAST = {"fsync": "off"}

PARENT = """
import asyncio, sys, time
from pathlib import Path
from controlplane.embedded.nats import EmbeddedNats, control_user
from controlplane.embedded.postgres import EmbeddedPostgres

async def main():
    home = Path(sys.argv[1])
    postgres = EmbeddedPostgres(home / "postgres", {"fsync": "off"})
    nats = EmbeddedNats(home / "nats", [control_user(home / "nats")])
    await postgres.start()
    await nats.start()
    print(postgres.pid, nats.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[EmbeddedPostgres, str]]:
    server = EmbeddedPostgres(folder, FAST)
    url = await server.start()
    try:
        yield server, url
    finally:
        await server.stop()


def write(url: str, value: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value int)")
        connection.execute("INSERT INTO kept VALUES (%s)", (value,))


def read(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT value FROM kept ORDER BY value")]


async def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether none of the processes runs within `seconds`."""
    async with asyncio.timeout(seconds):
        while any(_runs(pid) for pid in pids):
            await asyncio.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_it_keeps_data_url_and_secrets_over_a_restart(folder: Path) -> None:
    home = folder / "postgres"
    async with started(home) as (server, url):
        assert server.is_alive()
        assert await server.start() == url
        write(url, 1)
    assert not server.is_alive()
    async with started(home) as (_, again):
        assert again == url
        assert read(again) == [1]
    assert (home / "password").stat().st_mode & 0o777 == 0o600
    wrong = url.replace("://headway:", "://headway:x")
    async with started(home):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(wrong)


async def test_kill_9_of_the_server_leaves_nothing_that_blocks_it(folder: Path) -> None:
    async with started(folder / "postgres") as (server, url):
        for value in range(3):
            write(url, value)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await server.wait()
            assert not server.is_alive()
            assert await server.start() == url
        assert read(url) == [0, 1, 2]


async def test_a_second_owner_is_refused_and_told_who_the_first_is(folder: Path) -> None:
    async with started(folder / "postgres"):
        other = EmbeddedPostgres(folder / "postgres", FAST)
        with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
            await other.start()


def test_a_lock_ends_with_its_process(folder: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from controlplane.embedded.lock import FolderLock\n"
        "FolderLock(pathlib.Path(sys.argv[1])).acquire()\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock = FolderLock(folder)
        with pytest.raises(ConfigurationError, match=f"process {holder.pid}"):
            lock.acquire()
        holder.kill()
        holder.wait()
        lock.acquire()
        assert lock.is_held
        lock.release()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["ends by itself", "has to be ended"])
async def test_a_killed_parent_leaves_no_orphan(folder: Path, *, is_stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        postgres, nats = map(int, parent.stdout.readline().split())
        if is_stopped:
            # A stopped server does not see its parent die: it is an orphan for the next start.
            os.kill(postgres, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    try:
        if not is_stopped:
            assert await gone([postgres, nats])
        async with started(folder / "postgres") as (server, url):
            assert server.pid != postgres
            assert await gone([postgres, nats])
            write(url, 1)
    finally:
        for pid in (postgres, nats):
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)


async def test_server_and_parent_killed_together(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        postgres, nats = map(int, parent.stdout.readline().split())
        os.kill(postgres, signal.SIGKILL)
        parent.kill()
        parent.wait()
    async with started(folder / "postgres") as (_, url):
        write(url, 1)
        assert read(url) == [1]
    assert await gone([nats])


async def test_a_port_taken_by_somebody_else_is_left_to_them(folder: Path) -> None:
    async with started(folder / "postgres") as (_, url):
        write(url, 7)
    port = int((folder / "postgres" / "port").read_text())
    with socket.create_server(("127.0.0.1", port)):
        async with started(folder / "postgres") as (_, moved):
            assert moved != url
            assert read(moved) == [7]


async def test_a_half_made_cluster_is_made_again(folder: Path) -> None:
    draft = folder / "postgres" / "cluster.new"
    draft.mkdir(parents=True)
    (draft / "PG_VERSION").write_text("18\n")
    async with started(folder / "postgres") as (_, url):
        write(url, 1)
    assert not draft.exists()


async def test_a_cluster_of_another_version_is_left_alone(folder: Path) -> None:
    async with started(folder / "postgres"):
        pass
    version = folder / "postgres" / "cluster" / "PG_VERSION"
    version.write_text("17\n")
    with pytest.raises(ConfigurationError, match="PostgreSQL 17"):
        await EmbeddedPostgres(folder / "postgres", FAST).start()
    # The failed start gave the folder back.
    FolderLock(folder / "postgres").acquire()


async def test_a_server_that_can_not_start_says_what_its_log_says(folder: Path) -> None:
    server = EmbeddedPostgres(folder / "postgres", {"shared_buffers": "nonsense", "fsync": "off"})
    with pytest.raises(ConfigurationError, match="shared_buffers"):
        await server.start()
    assert not server.is_alive()


@pytest.fixture
def private_folder() -> Iterator[Path]:
    """A folder that only its owner may enter, like a home folder."""
    path = Path(tempfile.mkdtemp(prefix="headway-private-"))
    yield path
    link = path / "postgres" / "cluster"
    if link.is_symlink():
        shutil.rmtree(link.resolve().parent, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


async def test_a_folder_that_only_its_owner_may_enter(private_folder: Path) -> None:
    home = private_folder / "postgres"
    async with started(home) as (_, url):
        write(url, 1)
    async with started(home) as (_, again):
        assert again == url
        assert read(again) == [1]
    assert private_folder.stat().st_mode & 0o777 == 0o700
    if os.geteuid() != 0:
        return
    assert (home / "cluster").is_symlink()
    assert (home / "cluster").resolve().is_relative_to(REACHABLE_ROOT)
    # Whoever removes the folder wants the data gone.
    shutil.rmtree(home)
    async with started(home) as (_, fresh):
        write(fresh, 2)
        assert read(fresh) == [2]


@pytest.mark.timeout(180)
async def test_a_supervised_server_comes_back(folder: Path) -> None:
    ends: list[tuple[str, int | None, float]] = []
    server = EmbeddedPostgres(folder / "postgres", FAST)
    url = await server.start()
    write(url, 1)
    keeper = asyncio.create_task(keep_alive("postgres", server, lambda *what: ends.append(what)))
    for _ in range(2):
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(55):
            while server.pid == pid or not _answers(url):
                await asyncio.sleep(0.05)
    assert read(url) == [1]
    # The second kill may have met the server while the keeper still waited for it to start.
    assert [name for name, *_ in ends] == ["postgres"] * 2
    assert ends[0][1] == -signal.SIGKILL
    assert ends[1][1] in {-signal.SIGKILL, None}
    assert [pause for *_, pause in ends] == [0.2, 0.4]
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert not server.is_alive()


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


async def test_a_supervised_program_that_can_not_start_is_tried_again(folder: Path) -> None:
    pauses: list[float] = []
    program = Program([sys.executable, "-c", "raise SystemExit(3)"], log=folder / "p.log")
    await program.start()
    seen = asyncio.Event()

    def on_end(name: str, status: int | None, pause_s: float) -> None:
        pauses.append(pause_s)
        assert (name, status) == ("p", 3)
        if len(pauses) == 3:
            seen.set()

    keeper = asyncio.create_task(keep_alive("p", program, on_end))
    async with asyncio.timeout(55):
        await seen.wait()
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert pauses == [0.2, 0.4, 0.8]
