"""KV events from simulated engines through a real agent and a real bus into the prefix index."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from dataplane.protocol.messages import EngineState, Hello, KvBatch, KvReset
from tests.integration.agent_world import (
    AgentProcess,
    Bus,
    Control,
    agent_world,
    simulated,
)
from tests.integration.kv_world import Replica, replica, user

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

World = tuple[Bus, Control, AgentProcess, Replica]

SMALL = simulated(
    kv_tokens=4096, context_tokens_max=4096, allow_faults=True, speedup=50.0, max_num_seqs=8
)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with (
        agent_world(tmp_path, SMALL) as (bus, control, agent),
        replica("a", "m", bus.url, bus.password) as one,
    ):
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        await one.following()
        yield bus, control, agent, one


async def post(one: Replica, path: str, body: object = None) -> object:
    entry = one.fleet.entry_of("e1")
    assert entry is not None
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.post(
            f"http://{entry.address[0]}:{entry.address[1]}{path}", json=body or {}
        )
    return answer.json()


async def converse(one: Replica, words: str, turns: int) -> list[dict[str, str]]:
    """A conversation of which each step finds all of the step before, its answer included."""
    said = [user(words, 20)]
    for turn in range(turns):
        called = await one.call(said)
        assert called.predicted == called.reported, f"turn {turn}: {called}"
        if turn:
            assert called.reported > 0
        said += [{"role": "assistant", "content": called.text}, user(f"and then {turn}? ", 5)]
    return said


async def test_what_is_predicted_is_what_is_reported(world: World) -> None:
    one = world[3]
    said = await converse(one, "the clock of the tower ", 6)
    # The same again, and from the middle on.
    for some in (said[:-1], said[:5], said[:1]):
        if some[-1]["role"] == "user":
            called = await one.call(some)
            assert called.predicted == called.reported, called
            assert called.reported > called.prompt_tokens - 32
    assert one.metrics.kv_events.value(("e1",)) > 0
    assert one.metrics.kv_gaps.value(("engine",)) == 0


async def test_what_the_engine_evicts_is_known_to_be_gone(world: World) -> None:
    one = world[3]
    first = [user("long ago and far away ", 60)]
    await one.call(first)
    assert one.predict(first) > 0
    held = []
    for turn in range(14):
        other = [user(f"something else {turn} ", 60)]
        await one.call(other)
        held.append(other)
    await one.quiet()
    assert one.predict(first) == 0
    for other in held[::-3]:
        called = await one.call(other)
        await one.quiet()
        assert called.predicted == called.reported, called


async def test_a_dropped_message_is_asked_for_again(world: World) -> None:
    one = world[3]
    said = [user("once upon a time ", 40)]
    await post(one, "/fault", {"kv_events_dropped": 3})
    await one.call(said, tokens=100)
    # The last of them is missed in silence too.
    await post(one, "/fault", {"kv_events_dropped": 1})
    await one.call([user("another one ", 10)], tokens=2)
    await one.until(lambda: one.metrics.kv_replayed.value(("engine",)) >= 4)
    await one.quiet()
    assert one.metrics.kv_clears.value(("lost",)) == 0
    called = await one.call(said)
    assert called.predicted == called.reported > 0


async def test_a_lost_message_makes_the_view_void(world: World) -> None:
    one = world[3]
    said = [user("once upon a time ", 40)]
    await one.call(said)
    await one.quiet()
    await post(one, "/fault", {"kv_events_lost": 1})
    await one.call([user("this is not heard of ", 30)], tokens=40)
    await one.until(lambda: one.metrics.kv_clears.value(("lost",)) == 1)
    await one.quiet()
    assert one.predict(said) == 0
    # From here on it is right again, though of what was there before nothing is known.
    await converse(one, "a fresh beginning ", 3)


async def test_a_cleared_cache_is_told_with_the_next_step(world: World) -> None:
    one = world[3]
    said = [user("written in sand ", 40)]
    await one.call(said)
    await one.quiet()
    assert await post(one, "/reset_prefix_cache") == {"success": True}
    assert one.predict(said) > 0
    await one.call([user("the next step ", 10)])
    await one.until(lambda: one.metrics.kv_clears.value(("cleared",)) == 1)
    assert one.predict(said) == 0
    called = await one.call(said)
    assert (called.predicted, called.reported) == (0, 0)


async def test_a_killed_engine_leaves_nothing_behind(world: World) -> None:
    _, control, agent, one = world
    said = await converse(one, "before the fall ", 3)
    before = len(control.heard)
    os.kill(agent.record().pid, signal.SIGKILL)
    await control.engine("e1", EngineState.SERVING, since=before)
    await one.until(lambda: one.predict(said[:1]) == 0)
    await one.following()
    called = await one.call(said[:1])
    assert (called.predicted, called.reported) == (0, 0)
    await converse(one, "after the fall ", 3)


async def test_an_agent_that_begins_anew_tells_all_again(world: World) -> None:
    _, control, agent, one = world
    await converse(one, "while it was away ", 2)
    before = len(control.heard)
    epoch = control.all(Hello)[-1].agent_epoch
    await agent.kill()
    # It happens unheard, and the agent that comes reads it up.
    called = await one.call([user("nobody listens ", 30)])
    assert called.reported == 0
    await agent.start("--keep-engines")
    await control.engine("e1", EngineState.SERVING, since=before)
    retold = await control.until(
        lambda: [each for each in control.all(KvBatch) if each.agent_epoch > epoch]
    )
    assert retold[0].reset is KvReset.RETELL
    await one.quiet()
    again = await one.call([user("nobody listens ", 30)])
    assert again.predicted == again.reported > 0
    said = [user("while it was away ", 20)]
    called = await one.call(said)
    assert called.predicted == called.reported > 0


async def test_reports_that_the_bus_lost_are_fetched(world: World) -> None:
    one = world[3]
    lost: list[KvBatch] = []

    def lose_one(data: bytes) -> bool:
        batch = msgspec.json.decode(data, type=KvBatch)
        if batch.held and not lost:
            lost.append(batch)
            return True
        return False

    one.loses = lose_one
    said = [user("gone on the way ", 40)]
    await one.call(said)
    # Nothing comes after it: the agent's word alone tells that it is missing.
    await one.until(lambda: one.metrics.kv_replayed.value(("bus",)) >= 1)
    assert len(lost) == 1
    assert one.metrics.kv_clears.value(("missed",)) == 0
    called = await one.call(said)
    assert called.predicted == called.reported > 0


async def test_reports_that_nobody_has_make_the_view_void(world: World) -> None:
    _, control, _, one = world
    said = [user("gone for good ", 40)]
    await one.call(said)
    await one.quiet()
    lost: list[bytes] = []
    one.loses = lambda data: bool(lost.append(data) or True)
    await one.call([user("unheard ", 40)])
    await one.until(lambda: bool(lost))
    await control.forget_kv()
    one.loses = lambda _: False
    await one.until(lambda: one.metrics.kv_clears.value(("missed",)) >= 1)
    assert one.predict(said) == 0
    await converse(one, "a fresh beginning ", 3)


async def test_a_replica_that_comes_later_follows_from_there(world: World) -> None:
    bus, _, _, one = world
    said = await converse(one, "for both of us ", 2)
    async with replica("b", "m", bus.url, bus.password) as two:
        await two.following()
        assert two.predict(said[:1]) == 0
        called = await two.call(said[:1])
        assert called.reported > 0
        await converse(two, "mine alone ", 3)
        await one.quiet()
        assert one.metrics.kv_clears.value(("missed",)) == 0
        called = await one.call(said)
        assert called.predicted == called.reported > 0
