"""How a child server is started, found again and ended: it never outlives its parent unnoticed.

A child gets a signal from the kernel when the thread that started it dies. So start children from a
thread that lives as long as the program, which an event loop's is.
"""

import asyncio
import ctypes
import os
import random
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from controlplane.embedded.account import Account

LOG_BYTES_MAX = 16 * 1024 * 1024
# Below the range from which Linux takes the local ports of outgoing connections (32768 and up), so
# that a port stays free for its server while that is being restarted.
PORTS = range(20_000, 30_000)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


async def spawn(
    command: Sequence[str],
    *,
    log: Path,
    on_parent_death: signal.Signals,
    account: Account | None = None,
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start `command` in its own session, as `account` if given; its output goes to the end of `log`."""
    parent = os.getpid()

    def enter() -> None:
        if account is not None:
            os.setgroups([])
            os.setgid(account.gid)
            os.setuid(account.uid)
        # After the change of user, which clears it.
        _libc.prctl(_PR_SET_PDEATHSIG, int(on_parent_death), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with _opened(log) as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(os.environ if environment is None else environment),
            cwd="/",
            start_new_session=True,
            preexec_fn=enter,
        )


def _opened(log: Path) -> BinaryIO:
    """The log, put aside first when it has grown too large."""
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_suffix(".old"))
    return log.open("ab")


async def end(
    process: asyncio.subprocess.Process, steps: Sequence[tuple[signal.Signals, float]]
) -> int:
    """Send each signal in turn, waiting its seconds for the process to end; then SIGKILL."""
    for number, seconds in steps:
        if process.returncode is not None:
            break
        try:
            process.send_signal(number)
            async with asyncio.timeout(seconds):
                return await process.wait()
        except ProcessLookupError:
            break
        except TimeoutError:
            continue
    if process.returncode is None:
        process.kill()
    return await process.wait()


def processes(name: str, is_ours: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Running processes called `name` for which `is_ours` holds; those that may not be asked are
    not.
    """
    found = []
    for process in psutil.process_iter(["name", "status"]):
        if process.info["name"] != name or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            if is_ours(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


async def end_orphans(
    find: Callable[[], list[psutil.Process]], steps: Sequence[tuple[signal.Signals, float]]
) -> int:
    """End what an earlier parent left running, the oldest process first.

    Returns how many there were.
    """
    count = 0
    for number, seconds in (*steps, (signal.SIGKILL, 5.0)):
        orphans = sorted(find(), key=lambda process: process.create_time())
        count = max(count, len(orphans))
        if not orphans:
            break
        targets = orphans if number is signal.SIGKILL else orphans[:1]
        for process in targets:
            try:
                # psutil compares create times, so a reused process id is never signalled.
                process.send_signal(number)
                # A stopped process takes no signal but this one.
                process.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                continue
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while find() and loop.time() < until:
            await asyncio.sleep(0.05)
    return count


def kept_port(path: Path) -> int:
    """The port written in `path` if it can be bound, else another one, written there."""
    try:
        port = int(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        port = 0
    if port and is_free(port):
        return port
    start = random.SystemRandom().randrange(len(PORTS))
    for offset in range(len(PORTS)):
        port = PORTS[(start + offset) % len(PORTS)]
        if is_free(port):
            write_private(path, f"{port}\n")
            return port
    raise OSError(f"no free port in {PORTS.start}..{PORTS.stop - 1}")


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def kept_secret(path: Path) -> str:
    """The secret written in `path`, made on first use: 256 random bits, URL-safe."""
    try:
        secret = path.read_text("ascii").strip()
    except FileNotFoundError:
        secret = ""
    if not secret:
        secret = secrets.token_urlsafe(32)
        write_private(path, f"{secret}\n")
    return secret


class ChildHolder:
    """What everything that owns one child process can tell of it. `_process` is the latest one."""

    _process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """The exit status, once the process has ended. Raises RuntimeError when it never began."""
        if self._process is None:
            raise RuntimeError("the process was never started")
        return await self._process.wait()

    async def _end(self, steps: Sequence[tuple[signal.Signals, float]]) -> None:
        if self._process is not None:
            await end(self._process, steps)
