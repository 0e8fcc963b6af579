"""A child that answers lines with lines: for work that must not hold up the calls that this process serves."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

# The child needs the code and nothing of what this process keeps secret.
VARIABLES_KEPT: Final = {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV"}
END_S_MAX: Final = 2.0


class LineProcess:
    """One child at most, kept between questions. Used by one task at a time."""

    def __init__(self, command: tuple[str, ...], *, answer_bytes_max: int) -> None:
        self._command = command
        self._answer_bytes_max = answer_bytes_max
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> asyncio.subprocess.Process:
        """The child, started when there is none or it has ended. Raises OSError."""
        child = self._child
        if child is None or child.returncode is not None:
            path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            kept = {name: value for name, value in os.environ.items() if name in VARIABLES_KEPT}
            child = self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=self._answer_bytes_max,
                env={**kept, "PYTHONPATH": os.pathsep.join(path)},
            )
        return child

    async def ask(self, line: bytes) -> bytes:
        """The answer to a line, both with their end.

        Raises OSError or ValueError when there is none. The child is then ended, and so it is when the
        wait is cancelled: whose answer comes next would not be known.
        """
        try:
            child = await self.start()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(line)
            await child.stdin.drain()
            answer = await child.stdout.readline()
            if not answer.endswith(b"\n"):
                raise ValueError("it closed its output")  # noqa: TRY301 (ends the child like the others)
        except BaseException:
            await self.end()
            raise
        return answer

    async def end(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S_MAX):
                await child.wait()
