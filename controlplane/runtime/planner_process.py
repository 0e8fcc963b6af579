"""Solves plans outside of this process, so that neither a long search nor a crash reaches the event loop.

A solver that crashes, hangs or answers nonsense ends one round: it is ended, and the next round starts
another one.
"""

import asyncio
import contextlib
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Final

from controlplane.runtime import planner_worker
from controlplane.scheduler.planner.problem import (
    JSON_BYTES_MAX,
    Plan,
    Problem,
    as_json,
    from_builtins,
)

WORKER: Final = planner_worker.__name__
# The first problem also pays for the import of the solver.
START_S_MAX: Final = 30.0
# Over what the problem allows the solver itself: reading, pricing, and replaying the last minutes.
SLACK_S_MAX: Final = 20.0
END_S_MAX: Final = 2.0


class SolveFailure(StrEnum):
    """Why a round had no plan; a metric's label."""

    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"


class PlanNotMade(Exception):
    def __init__(self, failure: SolveFailure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


class PlannerProcess:
    """One child at most, kept between rounds. Used by one task at a time."""

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-m", WORKER)) -> None:
        self._command = command
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def solve(self, problem: Problem, *, seconds_max: float | None = None) -> Plan:
        """The plan of a problem.

        Raises PlanNotMade when the child ended, took longer than `seconds_max` (by default what the
        problem allows the solver, and some more), or refused the problem.
        """
        # A problem of a large fleet takes milliseconds to write: not on the event loop.
        line = (await asyncio.to_thread(as_json, problem)).encode() + b"\n"
        if len(line) > JSON_BYTES_MAX:
            raise PlanNotMade(
                SolveFailure.REFUSED, f"the problem takes {len(line)} bytes, over {JSON_BYTES_MAX}"
            )
        limit_s = seconds_max
        if limit_s is None:
            limit_s = problem.limits.solve_s_max + SLACK_S_MAX
            if self._child is None:
                limit_s += START_S_MAX
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._ask(line)
        except TimeoutError as error:
            await self.end()
            raise PlanNotMade(
                SolveFailure.TIMED_OUT, f"no plan within {limit_s:.0f} s; the solver was ended"
            ) from error
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            await self.end()
            raise PlanNotMade(SolveFailure.CRASHED, f"the solver ended: {error}") from error
        except asyncio.CancelledError:
            # Whose answer comes next would not be known.
            await self.end()
            raise
        return await asyncio.to_thread(_plan, answer)

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

    async def _ask(self, line: bytes) -> bytes:
        child = self._child
        if child is None or child.returncode is not None:
            child = self._child = await self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line)
        await child.stdin.drain()
        answer = await child.stdout.readline()
        if not answer.endswith(b"\n"):
            raise ValueError("it closed its output")
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        root = str(Path(__file__).parents[2])
        # The child needs the code and nothing of what this process keeps secret.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV"}
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=JSON_BYTES_MAX,
            env=environment,
        )


def _plan(answer: bytes) -> Plan:
    try:
        document = json.loads(answer)
        if isinstance(document, dict) and "error" in document:
            raise PlanNotMade(SolveFailure.REFUSED, str(document["error"]))
        return from_builtins(Plan, document)
    except ValueError as error:
        raise PlanNotMade(SolveFailure.REFUSED, f"not a plan: {error}") from error
