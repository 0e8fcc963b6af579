"""What supervision leaves in PostgreSQL: loads that were measured, arguments and progress of commands."""

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import CommandId, EngineId, ModelName, NodeId
from controlplane.store import catalog, commands, weight_loads
from controlplane.store.commands import Arguments
from dataplane.protocol.messages import CommandKind, EngineState, Phase, Progress
from tests.integration.test_store_catalog import facts

N1 = NodeId("n1")


async def test_a_start_counts_once_whoever_tells_it(engine: AsyncEngine) -> None:
    first = msgspec.structs.replace(
        facts("n1/0"), load_ms=10_000, load_medium="disk", started_ms=100
    )
    assert await weight_loads.add(engine, N1, [first])
    assert not await weight_loads.add(engine, N1, [first, facts("n1/1")])
    later = msgspec.structs.replace(first, load_ms=20_000, started_ms=200)
    assert await weight_loads.add(engine, N1, [later])
    assert not await weight_loads.add(engine, N1, [first])
    cached = msgspec.structs.replace(first, load_ms=3_000, load_medium="page_cache", started_ms=150)
    assert await weight_loads.add(engine, N1, [cached])
    found = [(one.medium, one.load_ms, one.loads) for one in await weight_loads.load_all(engine)]
    assert found == [("disk", 13_000, 2), ("page_cache", 3_000, 1)]
    # What is not declared is not remembered.
    stranger = msgspec.structs.replace(first, model="no/such")
    assert not await weight_loads.add(engine, N1, [stranger])
    assert not await weight_loads.add(engine, NodeId("n9"), [later])
    assert (await weight_loads.load_all(engine))[0].model == ModelName("org/small")


async def test_a_sleeping_and_cordoned_engine_is_kept_as_it_was_declared(
    engine: AsyncEngine,
) -> None:
    asleep = msgspec.structs.replace(
        facts("n1/0"), state=EngineState.SLEEPING, sleep_level=2, wake_ms=7, load_ms=9,
        load_medium="network", cordon="by command: fan", capabilities=["sleep"],
    )  # fmt: skip
    assert await catalog.upsert_engines(engine, N1, 1, [asleep])
    [record] = await catalog.list_engines(engine)
    assert (record.state, record.sleep_level, record.wake_ms) == ("sleeping", 2, 7)
    assert (record.load_ms, record.load_medium) == (9, "network")
    assert (record.cordon, record.capabilities) == ("by command: fan", ["sleep"])


def told(sequence: int, epoch: int = 1, node: str = "n1", **members: object) -> Progress:
    return Progress(
        node_id=node, agent_epoch=epoch, sequence=sequence, engine_id="n1/0",
        command_ids=["c1", "c2"], phase=Phase.LOADING, **members,
    )  # fmt: skip


async def test_progress_goes_forward_and_ends_with_its_command(engine: AsyncEngine) -> None:
    arguments = Arguments(sleep_level=2, reason="why")
    made = await commands.enqueue(
        engine, node_id=N1, engine_id=EngineId("n1/0"), kind=CommandKind.SLEEP,
        arguments=arguments, command_id=CommandId("c1"),
    )  # fmt: skip
    assert (made.arguments, made.progress) == (arguments, None)

    async def ratio() -> float | None:
        progress = (await commands.find(engine, [made.id]))[made.id].progress
        return None if progress is None else progress.done_ratio

    await commands.note_progress(engine, told(5, done_ratio=0.5, calls_left=3))
    assert await ratio() == 0.5
    await commands.note_progress(engine, told(4, done_ratio=0.1))
    await commands.note_progress(engine, told(9, done_ratio=0.9, node="n2"))
    assert await ratio() == 0.5
    # Numbers begin anew with the agent.
    await commands.note_progress(engine, told(1, epoch=2, done_ratio=0.7))
    assert await ratio() == 0.7
    assert await commands.finish(engine, made.id, "refused", "no such thing")
    await commands.note_progress(engine, told(2, epoch=2, done_ratio=1.0))
    assert await ratio() == 0.7
    record = (await commands.find(engine, [made.id]))[made.id]
    assert (record.state, record.detail) == ("refused", "no such thing")
    listed = await commands.list_commands(engine, engine_id=EngineId("n1/0"))
    assert [one.id for one in listed.items] == ["c1"]
    assert not (await commands.list_commands(engine, engine_id=EngineId("x"))).items
