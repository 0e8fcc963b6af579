"""Keeps a child running: started again when it ends, with a growing pause while it keeps ending."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from controlplane.domain.errors import HeadwayError
from controlplane.embedded.process import ChildHolder, spawn

log = logging.getLogger(__name__)

PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 5.0
# Who ran this long was healthy; its next end is not part of a row of failures.
HEALTHY_S = 10.0
STOP_STEPS = ((signal.SIGTERM, 15.0),)


class Child(Protocol):
    """What can be kept alive: EmbeddedPostgres, EmbeddedNats, Program."""

    async def start(self) -> object: ...
    async def wait(self) -> int: ...
    async def stop(self) -> None: ...


class Program(ChildHolder):
    """A command as a child. It gets SIGTERM when its parent dies."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` is added to the parent's."""
        self._command = tuple(command)
        self._log = log
        self._environment = dict(environment or {})

    async def start(self) -> int:
        """Start the command and return its process id."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._process = await spawn(
            self._command,
            log=self._log,
            on_parent_death=signal.SIGTERM,
            environment={**os.environ, **self._environment},
        )
        return self._process.pid

    async def stop(self) -> None:
        await self._end(STOP_STEPS)


async def keep_alive(
    name: str, child: Child, on_end: Callable[[str, int | None, float], None]
) -> None:
    """Keep a started child alive until this is cancelled, then stop it.

    `on_end(name, exit status or None when it could not be started, pause in seconds)` is told of
    each end before the pause that precedes the next start.
    """
    loop = asyncio.get_running_loop()
    pause_s = PAUSE_S_MIN
    try:
        while True:
            since = loop.time()
            status: int | None = await child.wait()
            while True:
                if loop.time() - since >= HEALTHY_S:
                    pause_s = PAUSE_S_MIN
                on_end(name, status, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, PAUSE_S_MAX)
                since = loop.time()
                try:
                    await child.start()
                except (HeadwayError, OSError) as error:
                    log.warning(
                        "child_not_started", extra={"fields": {"child": name, "why": str(error)}}
                    )
                    status = None
                    continue
                break
    finally:
        await asyncio.shield(child.stop())
