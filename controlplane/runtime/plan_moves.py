"""Carries out the moves of the plan that is being applied: each watched to its end, or taken back.

Level-triggered: a pass reads moves and answers of agents from PostgreSQL, does what is next, and is safe
to run twice, to lose, or to leave to another leader. When a move fails, its node is brought back to what
it had, and no further move begins.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import CommandId, EngineId
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.loops import Leadership
from controlplane.runtime.plan_steps import Step, StepKind, step_of
from controlplane.store import catalog, commands, plans
from controlplane.store.audit import Change
from controlplane.store.commands import Arguments, CommandRecord
from controlplane.store.plans import Mode, MoveRecord, MoveState, PlannerControl, PlanState
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol.messages import CommandKind, EngineState

log = logging.getLogger(__name__)

MOVES_AT_ONCE_MAX: Final = 8
# A command that an agent refused as one of an old epoch is told again by the leader of the new one.
TRIES_MAX: Final = 3
# GPUs of an engine that has just been unloaded are free when its agent says so.
ROOM_S_MAX: Final = 60.0

_IN_FLIGHT: Final = (MoveState.WAITING, MoveState.RUNNING, MoveState.UNDOING)
_FAILED: Final = (MoveState.FAILED, MoveState.UNDONE, MoveState.STUCK)
_HOLDS_NO_GPU: Final = (EngineState.STOPPED, EngineState.FAILED, EngineState.SLEEPING)


class PlanMoves:
    """Works while its replica leads. `clock_s` is seconds of Unix time."""

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        fleet: FleetState,
        leader: Leadership,
        metrics: Metrics,
        author: str,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._leader = leader
        self._metrics = metrics
        self._author = author
        self._clock_s = clock_s

    async def advance(self) -> None:
        """One pass. Raises StateUnavailable."""
        epoch = self._leader.epoch
        if epoch is None:
            return
        plan = await plans.applying(self._engine)
        if plan is None:
            return
        control = await plans.control(self._engine)
        moves = {move.number: move for move in await plans.moves_of(self._engine, plan.revision)}
        answers = await commands.find(
            self._engine,
            [
                _command_id(move)
                for move in moves.values()
                if move.state in (MoveState.RUNNING, MoveState.UNDOING)
            ],
        )
        for number in sorted(moves):
            move = moves[number]
            if move.state is MoveState.RUNNING:
                await self._go_on(epoch, move, "do", answers, moves)
            elif move.state is MoveState.UNDOING and not _waits_to_undo(move, moves):
                await self._go_on(epoch, move, "undo", answers, moves)
        for number in sorted(moves):
            if moves[number].state is MoveState.WAITING:
                await self._begin(epoch, moves[number], control, moves)
        await self._end(epoch, plan.revision, moves)

    # ------------------------------------------------------------ beginning

    async def _begin(
        self,
        epoch: int,
        move: MoveRecord,
        control: PlannerControl,
        moves: dict[int, MoveRecord],
    ) -> None:
        if control.mode is Mode.OFF:
            await self._set(epoch, move, MoveState.CANCELLED, moves, "the planner was switched off")
            return
        if any(_is_failing(other) for other in moves.values()):
            await self._set(epoch, move, MoveState.CANCELLED, moves, "another move failed")
            return
        before = [moves[number] for number in move.body["after"] if number in moves]
        for other in before:
            if other.state in (MoveState.CANCELLED, MoveState.NOT_EXECUTABLE):
                await self._set(
                    epoch, move, MoveState.CANCELLED, moves,
                    f"move {other.number}, which it comes after, is not done",
                )  # fmt: skip
                return
        if control.is_paused or any(other.state is not MoveState.DONE for other in before):
            return
        running = sum(other.state is MoveState.RUNNING for other in moves.values())
        if running >= MOVES_AT_ONCE_MAX:
            return
        why, may_change = self._obstacle(move)
        if why and may_change and self._waited_s(move) < ROOM_S_MAX:
            if not move.body["since_s"]:
                await self._set(epoch, move, MoveState.WAITING, moves, why, since_s=self._clock_s())
            return
        if why:
            await self._set(epoch, move, MoveState.CANCELLED, moves, why)
            return
        if await self._set(epoch, move, MoveState.RUNNING, moves, "", since_s=self._clock_s()):
            await self._tell(moves[move.number], "do")

    def _waited_s(self, move: MoveRecord) -> float:
        since_s = float(move.body["since_s"])
        return self._clock_s() - since_s if since_s else 0.0

    def _obstacle(self, move: MoveRecord) -> tuple[str, bool]:
        """What stands in the way of a move now, empty when nothing does; and whether it may pass."""
        node = self._fleet.catalog.nodes.get(move.node_id)
        entry = self._fleet.nodes.get(move.node_id)
        if node is None:
            return f"node `{move.node_id}` is not declared any more", False
        if entry is None or entry.heard_ms <= 0.0:
            return f"node `{move.node_id}` is not heard of now", True
        if node.is_cordoned:
            return f"node `{move.node_id}` was cordoned since", False
        there = entry.engines.get(EngineId(move.engine_id))
        if move.kind == "load":
            taken = sum(
                other.facts.gpus
                for other in entry.engines.values()
                if other.facts.state not in _HOLDS_NO_GPU and other is not there
            )
            if taken + int(move.body["gpus"]) > node.gpus:
                return f"node `{move.node_id}` has no {move.body['gpus']} GPUs free", True
        elif move.kind in ("unload", "role", "sleep", "wake"):
            if there is None:
                return f"engine `{move.engine_id}` is gone already", False
            if move.body["model"] is not None and there.facts.model != move.body["model"]:
                return f"engine `{move.engine_id}` serves `{there.facts.model}` by now", False
        return "", False

    # ------------------------------------------------------------ going on

    async def _go_on(
        self,
        epoch: int,
        move: MoveRecord,
        way: str,
        answers: Mapping[CommandId, CommandRecord],
        moves: dict[int, MoveRecord],
    ) -> None:
        """Take the answer to a move's current command, or see that it was told."""
        step = _current(move, way)
        if step is None:
            await self._finish(epoch, move, way, moves)
            return
        if step.kind in (StepKind.CORDON, StepKind.UNCORDON):
            await self._tell(move, way)
            await self._next(epoch, move, way, moves)
            return
        answer = answers.get(_command_id(move))
        if answer is None:
            await self._tell(move, way)
        elif answer.state == "done":
            await self._next(epoch, move, way, moves)
        elif answer.state == "stale_epoch" and move.body["tries"] + 1 < TRIES_MAX:
            tries = move.body["tries"] + 1
            if await self._set(epoch, move, move.state, moves, None, tries=tries):
                await self._tell(moves[move.number], way)
        elif answer.state in ("failed", "refused", "stale_epoch"):
            await self._fail(epoch, move, way, f"{step.kind}: {answer.detail}", moves)
        elif self._waited_s(move) > step.seconds_max:
            why = f"{step.kind} `{step.engine_id}`: no answer within {step.seconds_max:.0f} s"
            await self._fail(epoch, move, way, why, moves)

    async def _next(
        self, epoch: int, move: MoveRecord, way: str, moves: dict[int, MoveRecord]
    ) -> None:
        is_set = await self._set(
            epoch, move, move.state, moves, None,
            step=move.body["step"] + 1, tries=0, since_s=self._clock_s(),
        )  # fmt: skip
        if not is_set:
            return
        following = moves[move.number]
        if _current(following, way) is None:
            await self._finish(epoch, following, way, moves)
        else:
            await self._tell(following, way)

    async def _finish(
        self, epoch: int, move: MoveRecord, way: str, moves: dict[int, MoveRecord]
    ) -> None:
        if way == "undo":
            await self._set(epoch, move, MoveState.UNDONE, moves, None)
        elif any(_is_failing(other) for other in moves.values() if other.node_id == move.node_id):
            # Done, on a node that is being brought back to what it had.
            await self._undo(epoch, move, "another move of its node failed", moves)
        else:
            await self._set(epoch, move, MoveState.DONE, moves, None)

    async def _undo(
        self, epoch: int, move: MoveRecord, why: str, moves: dict[int, MoveRecord]
    ) -> None:
        await self._set(
            epoch, move, MoveState.UNDOING, moves, why,
            step=0, tries=0, since_s=self._clock_s(),
        )  # fmt: skip

    async def _fail(
        self, epoch: int, move: MoveRecord, way: str, why: str, moves: dict[int, MoveRecord]
    ) -> None:
        """Take back what was done on the node of a move that failed, the latest first."""
        if way == "undo":
            log.error(
                "plan_move_stuck",
                extra={"fields": {"node": move.node_id, "engine": move.engine_id, "why": why}},
            )
            await self._set(epoch, move, MoveState.STUCK, moves, f"{move.detail}; undoing {why}")
            return
        log.warning(
            "plan_move_failed",
            extra={"fields": {"node": move.node_id, "engine": move.engine_id, "why": why}},
        )
        self._metrics.plan_moves.add((move.kind, str(MoveState.FAILED)))
        await self._undo(epoch, move, why, moves)
        for other in list(moves.values()):
            if other.node_id == move.node_id and other.state is MoveState.DONE:
                await self._undo(epoch, other, f"move {move.number} failed", moves)

    async def _tell(self, move: MoveRecord, way: str) -> None:
        step = _current(move, way)
        if step is None:
            return
        if step.kind in (StepKind.CORDON, StepKind.UNCORDON):
            await catalog.set_cordon(
                self._engine,
                move.node_id,
                is_cordoned=step.kind is StepKind.CORDON,
                by=self._change(move),
            )
            return
        try:
            await commands.enqueue(
                self._engine,
                node_id=move.node_id,
                engine_id=EngineId(step.engine_id),
                kind=CommandKind(step.kind.value),
                deadline_s=step.deadline_s or commands.DEADLINE_S_DEFAULT,
                spec=step.spec,
                arguments=Arguments(sleep_level=step.sleep_level),
                command_id=_command_id(move),
                by=self._change(move),
            )
        except ConfigurationError as error:
            # The node's declaration is gone: the command is never answered, and times out.
            log.warning("plan_move_untold", extra={"fields": {"why": str(error)}})

    # ------------------------------------------------------------ the end

    async def _end(self, epoch: int, revision: int, moves: Mapping[int, MoveRecord]) -> None:
        states = [move.state for move in moves.values()]
        if any(state in _IN_FLIGHT for state in states):
            return
        done = sum(state is MoveState.DONE for state in states)
        if any(state in _FAILED for state in states):
            state = PlanState.FAILED
        elif any(one is MoveState.CANCELLED for one in states):
            state = PlanState.CANCELLED
        else:
            state = PlanState.APPLIED
        reason = f"{done} of {len(states)} moves done"
        if await plans.end_plan(
            self._engine, epoch, revision, state, author=self._author, reason=reason
        ):
            log.info(
                "plan_ended",
                extra={"fields": {"revision": revision, "state": str(state), "detail": reason}},
            )

    async def _set(
        self,
        epoch: int,
        move: MoveRecord,
        state: MoveState,
        moves: dict[int, MoveRecord],
        detail: str | None,
        **body: Any,
    ) -> bool:
        """Write a move down and keep `moves` in step. False: another leader leads, or has done it."""
        members = {**move.body, **body}
        is_set = await plans.set_move(
            self._engine, epoch, move, state, detail=detail, body=members if body else None
        )
        if is_set:
            moves[move.number] = replace(
                move,
                state=state,
                detail=move.detail if detail is None else detail,
                body=members,
            )
            if state in (MoveState.DONE, MoveState.UNDONE, MoveState.STUCK):
                self._metrics.plan_moves.add((move.kind, str(state)))
        return is_set

    def _change(self, move: MoveRecord) -> Change:
        return Change(actor=self._author, reason=f"move {move.number} of plan {move.revision}")


def _is_failing(move: MoveRecord) -> bool:
    return move.state in (*_FAILED, MoveState.UNDOING)


def _current(move: MoveRecord, way: str) -> Step | None:
    """The command that a move is at; None when all of them are done."""
    steps = move.body[way]
    number = move.body["step"]
    return step_of(steps[number]) if number < len(steps) else None


def _command_id(move: MoveRecord) -> CommandId:
    """The same for every leader, so that a command is written once."""
    way = "undo" if move.state is MoveState.UNDOING else "do"
    step, tries = move.body["step"], move.body["tries"]
    return CommandId(f"plan-{move.revision}-{move.number}-{way}-{step}-{tries}")


def _waits_to_undo(move: MoveRecord, moves: Mapping[int, MoveRecord]) -> bool:
    """Later moves of the same node are taken back first."""
    return any(
        other.state is MoveState.UNDOING
        and other.node_id == move.node_id
        and other.number > move.number
        for other in moves.values()
    )
