"""The solver lives in another process: what it does wrong ends one round and nothing else."""

import asyncio
import os
import sys
import textwrap

import pytest

from controlplane.runtime.planner_process import PlannerProcess, PlanNotMade, SolveFailure
from controlplane.scheduler.planner.problem import Problem, as_json
from tests.integration.planner_world import move, plan

EMPTY = Problem(now_s=1.0, demands=(), pools=(), shapes=(), nodes=())
PLAN = as_json(plan())


def child(script: str) -> PlannerProcess:
    """A solver that behaves as the script says; `line` is a problem, `answer` a plan."""
    program = f"import os, sys, time\nanswer = {PLAN!r}\n" + textwrap.dedent(script)
    return PlannerProcess((sys.executable, "-c", program))


async def test_a_child_is_kept_between_rounds() -> None:
    solver = child("for line in sys.stdin: print(answer, flush=True)")
    try:
        assert await solver.solve(EMPTY) == plan()
        pid = solver.pid
        assert await solver.solve(EMPTY) == plan()
        assert solver.pid == pid
    finally:
        await solver.end()
    assert solver.pid is None
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("sys.exit(3)", SolveFailure.CRASHED),
        ("sys.stdin.readline(); os.abort()", SolveFailure.CRASHED),
        ("sys.stdin.readline(); print(answer[:50], end='', flush=True)", SolveFailure.CRASHED),
        ("sys.stdin.readline(); time.sleep(60)", SolveFailure.TIMED_OUT),
        ("sys.stdin.readline(); print('{]', flush=True); time.sleep(60)", SolveFailure.REFUSED),
        ("sys.stdin.readline(); print('{}', flush=True); time.sleep(60)", SolveFailure.REFUSED),
        (
            """sys.stdin.readline(); print('{"error": "no"}', flush=True); time.sleep(60)""",
            SolveFailure.REFUSED,
        ),
    ],
)
async def test_a_child_that_misbehaves_ends_the_round_and_not_the_next(
    script: str, failure: SolveFailure, tmp_path: object
) -> None:
    # The first child misbehaves, those after it do not.
    once = f"{tmp_path}/was-there"
    solver = child(
        f"""
        if not os.path.exists({once!r}):
            open({once!r}, "w").close()
            {script}
            sys.exit(0)
        for line in sys.stdin: print(answer, flush=True)
        """
    )
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    try:
        with pytest.raises(PlanNotMade) as told:
            await solver.solve(EMPTY, seconds_max=1.0 if "sleep(60)" in script else None)
        assert told.value.failure is failure
        if failure is SolveFailure.REFUSED:
            # It is there and answers: another problem may suit it.
            assert solver.pid is not None
            await solver.end()
        assert await solver.solve(EMPTY) == plan()
    finally:
        ticking.cancel()
        await solver.end()
    assert ticks > 5, "the event loop stood still"


async def test_a_round_that_is_cancelled_leaves_no_answer_behind() -> None:
    solver = child(
        """
        for line in sys.stdin:
            time.sleep(0.3)
            print(answer, flush=True)
        """
    )
    try:
        first = asyncio.create_task(solver.solve(EMPTY))
        while solver.pid is None:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert solver.pid is None
        assert await solver.solve(EMPTY) == plan()
    finally:
        await solver.end()


async def test_secrets_of_the_parent_are_not_handed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("HEADWAY_PEPPER", "a pepper for tests")
    solver = child(
        """
        for line in sys.stdin:
            told = [name for name in os.environ if "HEADWAY" in name or "URL" in name]
            print('{"error": "%s"}' % told if told else answer, flush=True)
        """
    )
    try:
        assert await solver.solve(EMPTY) == plan()
    finally:
        await solver.end()


def test_moves_survive_the_wire() -> None:
    from controlplane.scheduler.planner.problem import MoveKind, Plan, from_json

    made = plan(
        move(0, MoveKind.LOAD, "n1", "n1/x"), move(1, MoveKind.DRAIN, "n2", None, after=(0,))
    )
    assert from_json(Plan, as_json(made)) == made
