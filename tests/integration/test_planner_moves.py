"""Moves of a plan, with agents played by the test: in order, watched, taken back, and fenced."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import CommandId, NodeId, ReplicaId
from controlplane.runtime.loops import Leadership
from controlplane.runtime.plan_moves import MOVES_AT_ONCE_MAX, ROOM_S_MAX, PlanMoves
from controlplane.runtime.plan_steps import new_moves
from controlplane.scheduler.planner.problem import Move, MoveKind
from controlplane.store import audit, catalog, commands, plans, tables
from controlplane.store.plans import Mode, MoveState, PlanConflict, PlanState
from controlplane.store.session import transaction
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol.messages import CommandKind
from tests.integration.planner_world import (
    MODEL,
    OTHER,
    PlayedFleet,
    document,
    move,
    plan,
    played_fleet,
)
from tests.integration.store_world import R1, R2

LEAD_S = 600.0


class Stage:
    """A plan being applied on a played fleet, with a clock of the test's own."""

    def __init__(self, engine: AsyncEngine, played: PlayedFleet) -> None:
        self.engine = engine
        self.played = played
        self.metrics = Metrics()
        self.now_s = 1_000.0
        self.told: list[str] = []
        self.revision = 0

    async def leader(self, replica: ReplicaId = R1) -> PlanMoves:
        async with transaction(self.engine) as connection:
            await connection.execute(text("UPDATE leader SET expires_at = now() - interval '1 s'"))
        leadership = Leadership(self.engine, replica, LEAD_S)
        await leadership.claim()
        assert leadership.epoch is not None
        return PlanMoves(
            engine=self.engine,
            fleet=self.played.fleet,
            leader=leadership,
            metrics=self.metrics,
            author=f"replica:{replica}",
            clock_s=lambda: self.now_s,
        )

    async def apply(self, *moves: Move) -> None:
        epoch = await self._epoch()
        record = await plans.record(
            self.engine, epoch=epoch, digest=f"{self.revision}", problem_digest="0", status="ok",
            document=document(plan(*moves)),
        )  # fmt: skip
        assert record is not None
        self.revision = record.revision
        rows = new_moves(
            moves,
            self.played.fleet.catalog,
            await plans.engine_specs(self.engine),
            {NodeId(node): list(found) for node, found in self.played.nodes.items()},  # type: ignore[arg-type]
        )
        await plans.apply(
            self.engine, record.revision, rows, author="key:k1", reason="a test", age_s_max=60.0
        )

    async def _epoch(self) -> int:
        async with transaction(self.engine) as connection:
            return int((await connection.execute(select(tables.leader.c.epoch))).scalar_one())

    async def open_commands(self) -> list[commands.CommandRecord]:
        found = await commands.unsent(self.engine, 100)
        for command in found:
            if command.id not in self.told:
                self.told.append(command.id)
        return found

    async def obey(
        self, command: commands.CommandRecord, state: str = "done", detail: str = ""
    ) -> None:
        """What an agent does about a command, and what it then says of its engines."""
        engines = self.played.nodes[command.node_id]
        if state == "done":
            match command.kind:
                case CommandKind.LOAD:
                    assert command.spec is not None
                    engines[command.engine_id] = command.spec.model
                case CommandKind.UNLOAD:
                    engines.pop(command.engine_id, None)
                case _:
                    pass
            self.played.say(command.node_id)
        assert await commands.finish(self.engine, command.id, state, detail)

    async def moves(self) -> dict[int, plans.MoveRecord]:
        found = await plans.moves_of(self.engine, self.revision)
        return {record.number: record for record in found}

    async def states(self) -> dict[int, str]:
        return {number: str(record.state) for number, record in (await self.moves()).items()}

    async def run(
        self,
        leader: PlanMoves,
        answer: Callable[[commands.CommandRecord], str] = lambda _: "done",
        passes: int = 50,
    ) -> PlanState:
        for _ in range(passes):
            await leader.advance()
            record = await plans.get_plan(self.engine, self.revision)
            assert record is not None
            if record.state is not PlanState.APPLYING:
                return record.state
            for command in await self.open_commands():
                await self.obey(command, answer(command), "it burned")
        raise AssertionError(await self.states())


@pytest.fixture
async def stage(engine: AsyncEngine) -> Stage:
    nodes = {"n1": {"n1/0": MODEL}, "n2": {"n2/a": MODEL, "n2/b": OTHER}, "n3": {}}
    return Stage(engine, await played_fleet(engine, nodes))


async def test_moves_are_done_in_order_and_written_down(stage: Stage) -> None:
    leader = await stage.leader()
    await stage.apply(
        move(0, MoveKind.LOAD, "n3", "n3/x", OTHER),
        move(1, MoveKind.UNLOAD, "n2", "n2/a", after=(0,)),
        move(2, MoveKind.LOAD, "n2", "n2/c", OTHER, after=(1,)),
    )
    await leader.advance()
    [load] = await stage.open_commands()
    assert (load.kind, load.node_id, load.engine_id) == (CommandKind.LOAD, "n3", "n3/x")
    # The spec of a simulated engine: options of one alike, physics of the catalogue.
    assert load.spec is not None
    assert (load.spec.options["speedup"], load.spec.options["parameters"]) == (20, 8_000_000_000)
    await leader.advance()
    assert [command.id for command in await stage.open_commands()] == [load.id]
    assert await stage.run(leader) is PlanState.APPLIED
    assert stage.played.nodes["n2"] == {"n2/b": OTHER, "n2/c": OTHER}
    assert stage.played.nodes["n3"] == {"n3/x": OTHER}
    assert [name.rsplit("-", 4)[1] for name in stage.told] == ["0", "1", "1", "2"]
    assert stage.metrics.plan_moves.value(("load", "done")) == 2
    entries = (await audit.list_entries(stage.engine, subject=f"plan:{stage.revision}")).items
    assert [entry.action for entry in entries] == ["planner.applied", "planner.apply"]
    assert (await audit.verify(stage.engine)).broken_at is None


async def test_a_failed_move_brings_its_node_back_and_begins_no_other(stage: Stage) -> None:
    before = stage.played.snapshot()
    leader = await stage.leader()
    await stage.apply(
        move(0, MoveKind.UNLOAD, "n2", "n2/a"),
        move(1, MoveKind.LOAD, "n2", "n2/c", OTHER, after=(0,)),
        move(2, MoveKind.LOAD, "n1", "n1/1", after=(1,)),
    )
    ended = await stage.run(leader, lambda command: "failed" if "-1-do-" in command.id else "done")
    assert ended is PlanState.FAILED
    assert await stage.states() == {0: "undone", 1: "undone", 2: "cancelled"}
    assert stage.played.nodes == before
    assert "it burned" in (await stage.moves())[1].detail
    [back] = [name for name in stage.told if "-0-undo-" in name]
    found = await commands.find(stage.engine, [CommandId(back)])
    assert found[CommandId(back)].spec is not None


async def test_what_was_done_last_is_taken_back_first(stage: Stage) -> None:
    before = stage.played.snapshot()
    leader = await stage.leader()
    await stage.apply(
        move(0, MoveKind.UNLOAD, "n2", "n2/a"),
        move(1, MoveKind.LOAD, "n2", "n2/c", OTHER, after=(0,)),
        move(2, MoveKind.LOAD, "n3", "n3/x", OTHER),
        move(3, MoveKind.LOAD, "n2", "n2/d", OTHER, after=(1, 2)),
    )
    ended = await stage.run(leader, lambda command: "failed" if "-3-do-" in command.id else "done")
    assert ended is PlanState.FAILED
    assert await stage.states() == {0: "undone", 1: "undone", 2: "done", 3: "undone"}
    undone = [name.split("-")[2] for name in stage.told if "-undo-" in name]
    assert undone == ["3", "1", "0"]
    assert stage.played.nodes == {**before, "n3": {"n3/x": OTHER}}


async def test_a_leader_that_was_replaced_writes_nothing_down(stage: Stage) -> None:
    old = await stage.leader(R1)
    await stage.apply(move(0, MoveKind.LOAD, "n3", "n3/x", OTHER))
    epoch = await stage._epoch()
    await stage.leader(R2)
    await old.advance()
    assert await stage.states() == {0: "waiting"}
    assert await stage.open_commands() == []
    [waiting] = (await stage.moves()).values()
    assert not await plans.set_move(stage.engine, epoch, waiting, MoveState.DONE)
    assert not await plans.end_plan(
        stage.engine, epoch, stage.revision, PlanState.APPLIED, author="r1", reason="a test"
    )
    assert await plans.set_move(stage.engine, epoch + 1, waiting, MoveState.RUNNING)


async def test_what_can_not_be_taken_back_is_left_to_a_person(stage: Stage) -> None:
    leader = await stage.leader()
    await stage.apply(move(0, MoveKind.LOAD, "n3", "n3/x", OTHER))
    assert await stage.run(leader, lambda _: "failed") is PlanState.FAILED
    [stuck] = (await stage.moves()).values()
    assert stuck.state is MoveState.STUCK
    assert stuck.detail.count("it burned") == 2
    assert stage.metrics.plan_moves.value(("load", "stuck")) == 1


async def test_an_agent_that_does_not_answer_fails_the_move(stage: Stage) -> None:
    leader = await stage.leader()
    await stage.apply(move(0, MoveKind.LOAD, "n3", "n3/x", OTHER))
    await leader.advance()
    stage.now_s += 899.0
    await leader.advance()
    assert await stage.states() == {0: "running"}
    stage.now_s += 2.0
    await leader.advance()
    assert await stage.states() == {0: "undoing"}
    assert await stage.run(leader) is PlanState.FAILED
    assert "no answer within 900 s" in (await stage.moves())[0].detail


async def test_a_paused_planner_begins_nothing_and_watches_what_runs(stage: Stage) -> None:
    leader = await stage.leader()
    await stage.apply(
        move(0, MoveKind.LOAD, "n3", "n3/x", OTHER),
        move(1, MoveKind.LOAD, "n3", "n3/y", OTHER, after=(0,)),
    )
    await leader.advance()
    await plans.set_control(stage.engine, is_paused=True, author="key:k1", reason="wait")
    for _ in range(3):
        for command in await stage.open_commands():
            await stage.obey(command)
        await leader.advance()
    assert await stage.states() == {0: "done", 1: "waiting"}
    await plans.set_control(stage.engine, is_paused=False, author="key:k1", reason="go on")
    await leader.advance()
    assert await stage.states() == {0: "done", 1: "running"}
    await plans.set_control(stage.engine, mode=Mode.OFF, author="key:k1", reason="enough")
    assert await stage.run(leader) is PlanState.APPLIED


async def test_a_planner_that_is_switched_off_cancels_what_waits(stage: Stage) -> None:
    leader = await stage.leader()
    await stage.apply(
        move(0, MoveKind.LOAD, "n3", "n3/x", OTHER),
        move(1, MoveKind.LOAD, "n3", "n3/y", OTHER, after=(0,)),
    )
    await leader.advance()
    await plans.set_control(stage.engine, mode=Mode.OFF, author="key:k1", reason="enough")
    assert await stage.run(leader) is PlanState.CANCELLED
    assert await stage.states() == {0: "done", 1: "cancelled"}


async def test_a_move_waits_for_room_and_for_its_node_and_then_gives_up(stage: Stage) -> None:
    leader = await stage.leader()
    full = {f"n3/{number}": MODEL for number in range(4)}
    stage.played.nodes["n3"] = dict(full)
    stage.played.say("n3")
    await stage.apply(move(0, MoveKind.LOAD, "n3", "n3/x", OTHER))
    await leader.advance()
    assert await stage.states() == {0: "waiting"}
    stage.now_s += ROOM_S_MAX - 1.0
    del stage.played.nodes["n3"]["n3/0"]
    stage.played.say("n3")
    await leader.advance()
    assert await stage.states() == {0: "running"}
    assert await stage.run(leader) is PlanState.APPLIED
    await stage.apply(move(0, MoveKind.LOAD, "n3", "n3/y", OTHER))
    await leader.advance()
    stage.now_s += ROOM_S_MAX + 1.0
    assert await stage.run(leader) is PlanState.CANCELLED
    assert "no 1 GPUs free" in (await stage.moves())[0].detail


async def test_what_has_changed_since_is_not_moved(stage: Stage) -> None:
    leader = await stage.leader()
    del stage.played.nodes["n2"]["n2/a"]
    stage.played.say("n2")
    stage.played.nodes["n1"]["n1/0"] = OTHER
    stage.played.say("n1")
    await stage.apply(
        move(0, MoveKind.UNLOAD, "n2", "n2/a"), move(1, MoveKind.UNLOAD, "n1", "n1/0")
    )
    assert await stage.run(leader) is PlanState.CANCELLED
    assert stage.told == []
    details = [record.detail for record in (await stage.moves()).values()]
    assert "gone already" in details[0]
    assert f"serves `{OTHER}` by now" in details[1]


async def test_roles_are_changed_and_nodes_emptied_by_commands_that_agents_know(
    stage: Stage,
) -> None:
    leader = await stage.leader()
    drain = move(0, MoveKind.DRAIN, "n2", None, None)
    await stage.apply(drain)
    assert await stage.run(leader) is PlanState.APPLIED
    assert stage.played.nodes["n2"] == {}
    node = await catalog.get_node(stage.engine, NodeId("n2"))
    assert node is not None
    assert node.is_cordoned
    kinds = [name.rsplit("-", 2)[1] for name in stage.told]
    assert kinds == ["1", "2", "3", "4"]  # 0 is the cordon, which no agent is told of


async def test_what_agents_can_not_do_is_told_and_not_begun(stage: Stage) -> None:
    leader = await stage.leader()
    sleep = move(0, MoveKind.SLEEP, "n1", "n1/unknown")
    with pytest.raises(PlanConflict, match="how `n1/unknown` is started is not known"):
        await stage.apply(sleep)
    await stage.apply(
        sleep,
        move(1, MoveKind.LOAD, "n3", "n3/x", OTHER),
        move(2, MoveKind.LOAD, "n3", "n3/y", OTHER, after=(0,)),
        move(3, MoveKind.UNLOAD, "n2", "n2/unknown"),
    )
    assert await stage.run(leader) is PlanState.CANCELLED
    found = await stage.moves()
    assert [str(record.state) for record in found.values()] == [
        "not_executable", "done", "cancelled", "not_executable",
    ]  # fmt: skip
    assert "could not be brought back" in found[3].detail


async def test_a_command_of_an_old_epoch_is_told_again_by_the_next_leader(stage: Stage) -> None:
    leader = await stage.leader()
    await stage.apply(move(0, MoveKind.LOAD, "n3", "n3/x", OTHER))
    answers = iter(["stale_epoch", "stale_epoch", "done"])
    assert await stage.run(leader, lambda _: next(answers)) is PlanState.APPLIED
    assert [name.rsplit("-", 1)[1] for name in stage.told] == ["0", "1", "2"]


async def test_one_plan_at_a_time_and_only_a_fresh_proposal(stage: Stage) -> None:
    leader = await stage.leader()
    load = move(0, MoveKind.LOAD, "n3", "n3/x", OTHER)
    await stage.apply(load)
    first = stage.revision
    with pytest.raises(PlanConflict, match="another plan is being applied"):
        await stage.apply(load)
    with pytest.raises(PlanConflict, match="applying already"):
        await plans.apply(stage.engine, first, [], author="key:k1", reason="again", age_s_max=60.0)
    with pytest.raises(PlanConflict, match="there is no plan 99999"):
        await plans.apply(stage.engine, 99999, [], author="key:k1", reason="a slip", age_s_max=60.0)
    with pytest.raises(PlanConflict, match="s old"):
        await plans.apply(
            stage.engine, first + 1, [], author="key:k1", reason="late", age_s_max=-1.0
        )
    stage.revision = first
    assert await stage.run(leader) is PlanState.APPLIED
    assert await plans.last_ended(stage.engine) is not None


@pytest.mark.parametrize("seed", range(16))
async def test_any_plan_ends_with_each_node_done_or_as_it_was(
    engine: AsyncEngine, seed: int
) -> None:
    """Random moves, answers and changes of leader, against what must hold whatever happens."""
    pick = random.Random(seed)
    nodes: dict[str, dict[str, str]] = {
        f"n{node}": {f"n{node}/{index}": MODEL for index in range(pick.randrange(1, 4))}
        for node in range(1, 5)
    }
    stage = Stage(engine, await played_fleet(engine, nodes))
    original = stage.played.snapshot()
    moves: list[Move] = []
    for number in range(pick.randrange(1, 14)):
        node = pick.choice(sorted(nodes))
        after = tuple(sorted(pick.sample(range(number), min(number, pick.randrange(0, 3)))))
        taken = {one.engine_id for one in moves}
        there = [name for name in original[node] if name not in taken]
        if there and pick.random() < 0.5:
            moves.append(move(number, MoveKind.UNLOAD, node, pick.choice(there), after=after))
        else:
            moves.append(move(number, MoveKind.LOAD, node, f"{node}/x{number}", after=after))
    # Room is not what is tested here.
    async with transaction(engine) as connection:
        await connection.execute(text("UPDATE nodes SET gpus = 64"))
    stage.played.fleet.use_catalog(await catalog.load_catalog(engine))
    failing = {number for number in range(len(moves)) if pick.random() < 0.15}
    leaders = [await stage.leader(R1)]
    await stage.apply(*moves)
    failed_at: int | None = None
    begun: dict[int, int] = {}
    for turn in range(200):
        if turn == 3 and pick.random() < 0.5:
            leaders.append(await stage.leader(R2))
        # One that was replaced does not know it yet, and goes on.
        for leader in pick.sample(leaders, len(leaders)):
            await leader.advance()
        found = await stage.moves()
        for number, record in found.items():
            if record.began_at is not None and number not in begun:
                begun[number] = turn
                assert all(found[other].state != "waiting" for other in moves[number].after)
                assert failed_at is None or turn <= failed_at + 1, "began after a failure"
        assert sum(record.state is MoveState.RUNNING for record in found.values()) <= (
            MOVES_AT_ONCE_MAX
        )
        record = await plans.get_plan(engine, stage.revision)
        assert record is not None
        if record.state is not PlanState.APPLYING:
            break
        for command in await stage.open_commands():
            if pick.random() < 0.3:
                continue
            number = int(command.id.split("-")[2])
            depends = moves[number].after
            if "-do-0-" in command.id:
                assert all(found[other].state is MoveState.DONE or failed_at is not None
                           for other in depends)  # fmt: skip
            is_failing = number in failing and "-do-" in command.id
            if is_failing and failed_at is None:
                failed_at = turn
            await stage.obey(command, "failed" if is_failing else "done", "it burned")
    else:
        raise AssertionError(await stage.states())
    final = await stage.moves()
    bad = {moves[number].node_id for number in failing if final[number].state == "undone"}
    for node, before in original.items():
        expected: dict[str, Any] = dict(before)
        for number, end in final.items():
            if moves[number].node_id == node and node not in bad:
                assert end.state in (MoveState.DONE, MoveState.CANCELLED)
                if end.state is MoveState.DONE and moves[number].kind is MoveKind.LOAD:
                    expected[str(moves[number].engine_id)] = MODEL
                elif end.state is MoveState.DONE:
                    del expected[str(moves[number].engine_id)]
        assert stage.played.nodes[node] == expected, node
    assert len(stage.told) == len(set(stage.told))
    assert record.state is (
        PlanState.FAILED if bad
        else PlanState.CANCELLED if any(one.state == "cancelled" for one in final.values())
        else PlanState.APPLIED
    )  # fmt: skip
