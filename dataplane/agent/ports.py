"""Ports of engines, given to one engine at a time on the whole host, whatever number of agents runs
there.

An engine binds some of its ports minutes after it was started. Until then, and for as long as any of
its processes lives, a port is held by a lock on a file that the engine inherits. The ports lie below
the range from which the kernel takes those of outgoing connections.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
import zlib
from pathlib import Path
from typing import Final

PORT_FIRST: Final = 20_000
PORT_LAST: Final = 29_999


class PortLease:
    """Ports in a row, and the open locks on them. `close` after the engine has inherited the locks."""

    def __init__(self, ports: list[int], locks: list[int]) -> None:
        self.ports = ports
        self.locks = locks

    def close(self) -> None:
        for lock in self.locks:
            os.close(lock)
        self.locks = []


def lease_ports(host: str, count: int, name: str, folder: Path | None = None) -> PortLease:
    """`count` free ports in a row, so that ranks may count up from the first of each.

    `name` decides where the search begins: with another name for each start, what is still meant for
    an engine that has ended reaches none. Raises OSError when the range has none left.
    """
    locks = _folder() if folder is None else folder
    span = PORT_LAST - PORT_FIRST + 2 - count
    begin = zlib.crc32(name.encode()) % span
    at = 0
    while at < span:
        first = PORT_FIRST + (begin + at) % span
        held: list[int] = []
        for port in range(first, first + count):
            lock = _lock(locks, port) if _is_free(host, port) else None
            if lock is None:
                break
            held.append(lock)
        if len(held) == count:
            return PortLease(list(range(first, first + count)), held)
        PortLease([], held).close()
        at += len(held) + 1
    raise OSError(f"no {count} free ports in a row between {PORT_FIRST} and {PORT_LAST}")


def _folder() -> Path:
    """Shared by the agents of one user; another user's ports are seen by trying to bind them."""
    folder = Path(tempfile.gettempdir()) / f"headway-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    return folder


def _lock(folder: Path, port: int) -> int | None:
    lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _is_free(host: str, port: int) -> bool:
    """Nobody listens there, on this address or on all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for address in (host, "::" if family is socket.AF_INET6 else "0.0.0.0"):  # noqa: S104 - a test
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            # What is closing down does not stand in the way of an engine's server either.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True
