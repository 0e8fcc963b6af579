"""Solves plans outside of this process, so that neither a long search nor a crash reaches the event loop.

A solver that crashes, hangs or answers nonsense ends one round: it is ended, and the next round starts
another one.
"""

import asyncio
import json
import os
import sys
from enum import StrEnum
from typing import Final

from controlplane.runtime import planner_worker
from controlplane.runtime.line_process import LineProcess
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
        self._child = LineProcess((*command, str(os.getpid())), answer_bytes_max=JSON_BYTES_MAX)

    @property
    def pid(self) -> int | None:
        return self._child.pid

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
            if self.pid is None:
                limit_s += START_S_MAX
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._child.ask(line)
        except TimeoutError as error:
            raise PlanNotMade(
                SolveFailure.TIMED_OUT, f"no plan within {limit_s:.0f} s; the solver was ended"
            ) from error
        except (OSError, ValueError) as error:
            raise PlanNotMade(SolveFailure.CRASHED, f"the solver ended: {error}") from error
        return await asyncio.to_thread(_plan, answer)

    async def end(self) -> None:
        """End the child, if there is one."""
        await self._child.end()


def _plan(answer: bytes) -> Plan:
    try:
        document = json.loads(answer)
        if isinstance(document, dict) and "error" in document:
            raise PlanNotMade(SolveFailure.REFUSED, str(document["error"]))
        return from_builtins(Plan, document)
    except ValueError as error:
        raise PlanNotMade(SolveFailure.REFUSED, f"not a plan: {error}") from error
