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
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.agent import engine_log
from dataplane.engines.base import EngineError, Launch

POLL_S = 0.05
KILL_S_MAX = 5.0
# A server whose workers have all ended answers nobody. vLLM can wait for its open streams so for ever.
ALONE_S_MAX = 2.0
# Marks every process of one launch, so that one started just before a crash is found again.
TOKEN_VARIABLE = "HEADWAY_ENGINE_LAUNCH"  # noqa: S105 - a mark, not a secret
# Marks every process that one agent has started, whatever became of its parent and its session.
OWNER_VARIABLE = "HEADWAY_ENGINE_OWNER"
# Keeps marks readable: vLLM names its processes by setproctitle, which writes over what `/proc` shows of their
# environment unless it is told not to.
_READABLE = {"SPT_NOENV": "1"}
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


@dataclass(frozen=True, slots=True)
class Marked:
    """A living process that carries the mark of an agent, and of one of its launches."""

    pid: int
    start_ticks: int
    session: int
    token: str


def marked_by(owner: str) -> list[Marked]:
    """Every process that the agent `owner` or one before it has started, or that those have."""
    found = []
    mark = f"{OWNER_VARIABLE}={owner}".encode()
    prefix = f"{TOKEN_VARIABLE}=".encode()
    for pid, stat in _processes():
        if stat.state in "ZX":
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environment:
            token = next((one for one in environment if one.startswith(prefix)), prefix)
            words = token.removeprefix(prefix).decode(errors="replace")
            found.append(Marked(pid, stat.start_ticks, stat.session, words))
    return found


def end_marked(process: Marked) -> None:
    """SIGKILL, unless its pid is another process's by now."""
    if living(process.pid, process.start_ticks):
        _signal(process.pid, signal.SIGKILL)


def new_token() -> str:
    return secrets.token_hex(16)


def engine_environment(
    inherited: Mapping[str, str], launch: Launch, token: str, owner: str = ""
) -> dict[str, str]:
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _HIDDEN and not name.startswith(_HIDDEN_PREFIXES)
    }
    marks = {TOKEN_VARIABLE: token, **({OWNER_VARIABLE: owner} if owner else {})}
    return {**environment, **launch.environment, **marks, **_READABLE}


class EngineProcess:
    """A session leader: started by this agent (`child` set) or by an earlier one."""

    def __init__(
        self, pid: int, start_ticks: int, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self._child = child
        self._writer = 0

    @classmethod
    def start(
        cls,
        launch: Launch,
        environment: dict[str, str],
        folder: Path,
        keep_open: Sequence[int] = (),
    ) -> "EngineProcess":
        """Start in a new session, output into `engine.log`, with the descriptors `keep_open`.

        Raises EngineError when it can not be executed.
        """
        engine_log.begin(folder)
        read_end, write_end = os.pipe()
        try:
            writer = _start_writer(read_end, folder, environment)
            child = subprocess.Popen(
                launch.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=environment,
                pass_fds=tuple(keep_open),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"`{launch.argv[0]}` can not be started: {error}") from error
        finally:
            os.close(read_end)
            os.close(write_end)
        stat = stat_of(child.pid)
        if stat is None:
            raise EngineError(f"`{launch.argv[0]}` vanished at its start")
        started = cls(child.pid, stat.start_ticks, child)
        started._writer = writer
        return started

    def is_alive(self) -> bool:
        self._collect_writer()
        if self._child is not None:
            return self._child.poll() is None
        return living(self.pid, self.start_ticks)

    def _collect_writer(self) -> None:
        """Take the exit status of the writer of its log, once that has ended."""
        if self._writer:
            with contextlib.suppress(ChildProcessError):
                ended, _ = os.waitpid(self._writer, os.WNOHANG)
                self._writer = 0 if ended else self._writer

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

        A leader that is alone for long, when it was not before, is not waited for: nothing that
        it could still answer can come.
        """
        if self.is_alive():
            was_alone = self._is_alone()
            _signal(self.pid, signal.SIGTERM)
            now_s = time.monotonic()
            ends_s, company_s = now_s + grace_s, now_s
            while self.is_alive() and now_s < ends_s:
                await asyncio.sleep(POLL_S)
                now_s = time.monotonic()
                if was_alone or not self._is_alone():
                    company_s = now_s
                elif now_s - company_s >= ALONE_S_MAX:
                    break
        await self.kill()

    def _is_alone(self) -> bool:
        return session_members(self.pid, self.start_ticks) == [self.pid]

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


def _start_writer(read_end: int, folder: Path, environment: Mapping[str, str]) -> int:
    """The program that writes an engine's log; its pid. In a session of its own: it ends when nobody
    is left who could write, and so has the last words of an engine that is killed.
    """
    hidden = {
        value
        for name, value in environment.items()
        if engine_log.is_secret_name(name) and len(value) >= engine_log.SECRET_CHARACTERS_MIN
    }
    return os.posix_spawn(
        sys.executable,
        (sys.executable, "-I", "-S", engine_log.__file__, str(folder)),
        {engine_log.SECRETS_VARIABLE: "\n".join(hidden)},
        file_actions=(
            (os.POSIX_SPAWN_DUP2, read_end, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ),
        setsid=True,
    )
