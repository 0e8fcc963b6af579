"""One owner per folder, for as long as the owner lives, however it dies."""

import fcntl
import os
from pathlib import Path

from controlplane.domain.errors import ConfigurationError


class FolderLock:
    """An advisory lock on a folder. The kernel drops it with the process, so none is ever stale."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock. Raises ConfigurationError naming the process that holds it."""
        if self._descriptor is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "lock"
        # Not inherited by children: a child that outlives this process must not keep the lock.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigurationError(
                f"`{self._folder}` is in use by process {holder}:"
                " stop that one first, or work in another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
