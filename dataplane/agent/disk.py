"""What an agent remembers over restarts, in one folder: epochs, wanted engines, processes,
command results.

Files are replaced atomically. One agent per folder, held by a lock.
"""

import fcntl
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from dataplane.protocol.messages import CommandState, EngineSpec

_T = TypeVar("_T")


class DiskError(Exception):
    """The folder can not be used."""


class WantedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and whether it should run. `is_forgotten` hides one that a command has unloaded.

    `cordon` says why it takes nothing new, empty when it does.
    """

    spec: EngineSpec
    is_running: bool
    is_forgotten: bool = False
    is_from_file: bool = False
    cordon: str = ""


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine process, told apart from a later one of the same pid by boot and start time.

    `start_ticks` is the kernel's start time of the process since boot; pid 0 means: about to start.
    """

    spec: EngineSpec
    ports: list[int]
    token: str
    boot_id: str
    pid: int = 0
    start_ticks: int = 0
    started_ms: int = 0
    was_ready: bool = False
    sleep_level: int = 0
    load_ms: int = 0
    load_medium: str = ""


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    command_id: str
    state: CommandState
    detail: str


class CommandMemory(msgspec.Struct, kw_only=True):
    """The highest leader epoch seen, and the last results, oldest first."""

    epoch: int = 0
    results: list[CommandResult] = []


class AgentDisk:
    """The agent's folder. Raises DiskError when another agent has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._lock, 32).decode(errors="replace").strip()
            os.close(self._lock)
            raise DiskError(f"agent {owner or 'unknown'} uses {folder} already") from error
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def close(self) -> None:
        os.close(self._lock)

    def next_agent_epoch(self) -> int:
        """One more than at the last start."""
        epoch = (self._read("epoch.json", int) or 0) + 1
        self._write("epoch.json", epoch)
        return epoch

    def wanted(self) -> dict[str, WantedEngine]:
        return self._read("engines.json", dict[str, WantedEngine]) or {}

    def save_wanted(self, wanted: dict[str, WantedEngine]) -> None:
        self._write("engines.json", wanted)

    def commands(self) -> CommandMemory:
        return self._read("commands.json", CommandMemory) or CommandMemory()

    def save_commands(self, memory: CommandMemory) -> None:
        self._write("commands.json", memory)

    def load_times(self) -> dict[str, int]:
        """Milliseconds of earlier starts, by what was started."""
        return self._read("load_times.json", dict[str, int]) or {}

    def save_load_times(self, load_times: dict[str, int]) -> None:
        self._write("load_times.json", load_times)

    def engine_folder(self, engine_id: str) -> Path:
        folder = self.folder / "engines" / engine_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def process(self, engine_id: str) -> ProcessRecord | None:
        return self._read(f"engines/{engine_id}/process.json", ProcessRecord)

    def save_process(self, engine_id: str, record: ProcessRecord) -> None:
        self.engine_folder(engine_id)
        self._write(f"engines/{engine_id}/process.json", record)

    def forget_process(self, engine_id: str) -> None:
        (self.folder / f"engines/{engine_id}/process.json").unlink(missing_ok=True)

    def recorded_processes(self) -> list[str]:
        """Ids of the engines that have a process record, wanted or not."""
        return [path.parent.name for path in self.folder.glob("engines/*/process.json")]

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        path = self.folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise DiskError(f"{path} is damaged: {error}; remove it to start without") from error

    def _write(self, name: str, value: object) -> None:
        path = self.folder / name
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
