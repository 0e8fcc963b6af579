"""Processes of engines: each leads a session of its own, outlives the agent, and is ended with
all it started.

A process is known by pid, boot and start time, so a reused pid is never mistaken for it. Reads
Linux's /proc.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dataplane.engines.base import EngineError, Launch

# An engine's log is cut when it grows over this; the log of the process before is kept.
LOG_BYTES_MAX = 64 * 1024 * 1024
POLL_S = 0.05
KILL_S_MAX = 5.0
# Marks every process of one launch, so that one started just before a crash is found again.
TOKEN_VARIABLE = "HEADWAY_ENGINE_LAUNCH"  # noqa: S105 - a mark, not a secret
# Secrets and settings of Headway itself are none of an engine's business.
_HIDDEN_PREFIXES = ("HEADWAY_", "NATS_", "DATABASE_", "PG")
_HIDDEN = frozenset({"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"})


@dataclass(frozen=True, slots=True)
class Stat:
    """What the kernel says of a process. `start_ticks` counts from boot."""

    state: str
    session: int
    start_ticks: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat_of(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself contain them and spaces.
    fields = line[line.rfind(")") + 2 :].split()
    return Stat(state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def living(pid: int, start_ticks: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def session_members(leader: int, start_ticks: int) -> list[int]:
    """Living processes of the session that `leader` opened, also after its death.

    A session's number can not be given to another process while it has members; a leader that is
    another process than ours therefore means that ours has none left.
    """
    stat = stat_of(leader)
    if stat is not None and stat.start_ticks != start_ticks:
        return []
    return [
        pid
        for pid, member in _processes()
        if member.session == leader
        and member.start_ticks >= start_ticks
        and member.state not in "ZX"
    ]


def _processes() -> Iterator[tuple[int, Stat]]:
    for folder in Path("/proc").iterdir():
        stat = stat_of(int(folder.name)) if folder.name.isdigit() else None
        if stat is not None:
            yield int(folder.name), stat


def find_launch(token: str) -> int | None:
    """The session leader that was started with `token`."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    for pid, stat in _processes():
        if stat.session == pid:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if mark in environment.split(b"\0"):
                return pid
    return None


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


def new_token() -> str:
    return secrets.token_hex(16)


def engine_environment(inherited: Mapping[str, str], launch: Launch, token: str) -> dict[str, str]:
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _HIDDEN and not name.startswith(_HIDDEN_PREFIXES)
    }
    return {**environment, **launch.environment, TOKEN_VARIABLE: token}


class EngineProcess:
    """A session leader: started by this agent (`child` set) or by an earlier one."""

    def __init__(
        self, pid: int, start_ticks: int, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self._child = child

    @classmethod
    def start(cls, launch: Launch, environment: dict[str, str], folder: Path) -> "EngineProcess":
        """Start in a new session, output into `engine.log`. Raises EngineError when it can not be
        executed.
        """
        log = folder / "engine.log"
        if log.exists():
            log.replace(folder / "engine.log.before")
        with log.open("ab") as output:
            try:
                child = subprocess.Popen(
                    launch.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"`{launch.argv[0]}` can not be started: {error}") from error
        stat = stat_of(child.pid)
        if stat is None:
            raise EngineError(f"`{launch.argv[0]}` vanished at its start")
        return cls(child.pid, stat.start_ticks, child)

    def is_alive(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return living(self.pid, self.start_ticks)

    def last_words(self) -> str:
        """How it ended, as far as is known."""
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return "the process is gone"
        if code < 0:
            return f"the process was ended by signal {-code}"
        return f"the process ended with status {code}"

    async def terminate(self, grace_s: float) -> None:
        """SIGTERM to the leader, which ends its own children; after `grace_s` SIGKILL to all that
        is left.
        """
        if self.is_alive():
            _signal(self.pid, signal.SIGTERM)
            ends_s = time.monotonic() + grace_s
            while self.is_alive() and time.monotonic() < ends_s:
                await asyncio.sleep(POLL_S)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to every process of the session, until none is left. Raises EngineError when
        some stay.
        """
        ends_s = time.monotonic() + KILL_S_MAX
        while members := session_members(self.pid, self.start_ticks):
            if time.monotonic() > ends_s:
                raise EngineError(f"processes {members} survive SIGKILL")
            for pid in members:
                _signal(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
            self.is_alive()  # collects the exit status of a child


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def cut_log(folder: Path) -> None:
    """Empty a log that is too long. The engine appends, so it goes on at the start of the file."""
    log = folder / "engine.log"
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES_MAX:
            os.truncate(log, 0)
