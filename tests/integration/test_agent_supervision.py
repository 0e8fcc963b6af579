"""What commands and faults do to engines, by the agent process, a real bus and simulated engines."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dataplane.agent.process import marked_by
from dataplane.agent.settings import AgentSettings
from dataplane.agent.supervisor import owner_mark
from dataplane.protocol.messages import (
    Acknowledgement,
    Beat,
    Command,
    CommandKind,
    CommandState,
    EngineFacts,
    EngineState,
    Phase,
    Progress,
)
from tests.integration.agent_world import (
    NODE,
    AgentProcess,
    Control,
    agent_world,
    read_stream,
    simulated,
    until_gone,
)

BIG = {"e1": (1000, 10_000_000)}


async def tell(
    control: Control, name: str, kind: CommandKind, engine_id: str = "e1", **members: Any
) -> Acknowledgement:
    """Give a command and wait for its end."""
    members.setdefault("epoch", 1)
    await control.command(Command(command_id=name, kind=kind, engine_id=engine_id, **members))
    return await control.outcome(name)


async def done(control: Control, name: str, kind: CommandKind, **members: Any) -> None:
    outcome = await tell(control, name, kind, **members)
    assert outcome.state is CommandState.DONE, outcome.detail


def phases(control: Control, command_id: str) -> list[Phase]:
    """The phases that were told of a command, each once."""
    found: list[Phase] = []
    for message in control.all(Progress):
        if command_id in message.command_ids and message.phase not in found:
            found.append(message.phase)
    return found


async def post(port: int, path: str, body: Any = None) -> httpx2.Response:
    async with httpx2.AsyncClient(trust_env=False, timeout=30) as client:
        return await client.post(f"http://127.0.0.1:{port}{path}", json=body)


async def cached_tokens(port: int) -> int:
    body = {"model": "m", "prompt": "the same words again " * 40, "max_tokens": 1}
    usage = (await post(port, "/v1/completions", body)).json()["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def test_a_load_tells_how_far_it_is_and_what_it_took(tmp_path: Path) -> None:
    async with agent_world(tmp_path) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        spec = simulated("e1", load_ms=2_500)
        await done(control, "l", CommandKind.LOAD, spec=spec)
        told = [one for one in control.all(Progress) if "l" in one.command_ids]
        assert [one.sequence for one in told] == sorted({one.sequence for one in told})
        way = [Phase.STARTING, Phase.LOADING, Phase.WARMING, Phase.SERVING]
        seen = phases(control, "l")
        # A short phase may begin and end between two looks.
        assert seen == [phase for phase in way if phase in seen]
        assert Phase.LOADING in seen
        shares = [one.done_ratio for one in told if one.phase is Phase.LOADING]
        assert shares == sorted(shares)
        assert {0.25, 0.5, 0.75} & set(shares)
        # Nothing like it was loaded here before.
        assert {one.expected_ms for one in told} == {0}
        facts = await control.engine("e1", EngineState.SERVING)
        assert facts.load_ms >= 2_500
        assert facts.load_medium == "unknown"
        await done(control, "r", CommandKind.RESTART)
        expected = [
            one.expected_ms
            for one in control.all(Progress)
            if "r" in one.command_ids and one.phase is Phase.LOADING
        ]
        assert set(expected) == {facts.load_ms}


async def test_sleep_and_wake(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated(wake_ms=300)) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        assert facts.capabilities == ["lora", "reset_cache", "sleep"]
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(facts.port, 200, started))
        await started.wait()
        await done(control, "s", CommandKind.SLEEP, sleep_level=2)
        assert "[DONE]" in await stream, "its calls ended before it slept"
        asleep = await control.engine("e1", EngineState.SLEEPING)
        assert (asleep.sleep_level, asleep.started_ms) == (2, facts.started_ms)
        assert (await control.credits("r1", BIG)).holds == {"e1": (0, 0)}
        # Asleep twice is asleep; another level is not a repetition.
        await done(control, "s2", CommandKind.SLEEP, sleep_level=2)
        again = await tell(control, "s3", CommandKind.SLEEP, sleep_level=1)
        assert (again.state, "wake it first" in again.detail) == (CommandState.REFUSED, True)
        # It sleeps on under another agent.
        await agent.kill()
        before = len(control.heard)
        await agent.start()
        assert (await control.engine("e1", EngineState.SLEEPING, since=before)).sleep_level == 2
        before = len(control.heard)
        await done(control, "w", CommandKind.WAKE)
        awake = await control.engine("e1", EngineState.SERVING, since=before)
        assert awake.sleep_level == 0
        assert awake.wake_ms >= 300
        assert awake.started_ms == facts.started_ms
        assert (await control.credits("r1", BIG)).holds["e1"][0] == 8
        await done(control, "w2", CommandKind.WAKE)
        none = await tell(control, "s4", CommandKind.SLEEP, sleep_level=3)
        assert none.state is CommandState.REFUSED


async def test_an_engine_that_does_not_become_idle_stays_awake(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(facts.port, 2_000, started))
        await started.wait()
        outcome = await tell(control, "s", CommandKind.SLEEP, sleep_level=1, deadline_s=0.5)
        assert outcome.state is CommandState.FAILED
        assert "1 calls still ran" in outcome.detail
        before = len(control.heard)
        await control.until(
            lambda: [
                beat
                for beat in control.heard[before:]
                if isinstance(beat, Beat) and beat.engine_states["e1"] is EngineState.SERVING
            ]
        )
        assert (await control.credits("r1", BIG)).holds["e1"][0] == 8
        stream.cancel()


async def test_role_restart_cache_and_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        await cached_tokens(facts.port)
        assert await cached_tokens(facts.port) > 0
        await done(control, "c", CommandKind.RESET_CACHE)
        assert await cached_tokens(facts.port) == 0

        adapter = str(tmp_path / "adapter")
        before = len(control.heard)
        await done(control, "a", CommandKind.LORA_LOAD, adapter="sql", adapter_path=adapter)
        # Whoever routes is told, and not only at the next look.
        loaded = await control.engine("e1", EngineState.SERVING, since=before)
        assert (loaded.adapters, facts.adapters) == (["sql"], [])
        body = {"model": "sql", "prompt": "x", "max_tokens": 1}
        assert (await post(facts.port, "/v1/completions", body)).status_code == 200
        twice = await tell(
            control, "a2", CommandKind.LORA_LOAD, adapter="sql", adapter_path=adapter
        )
        assert (twice.state, "already been loaded" in twice.detail) == (CommandState.FAILED, True)
        before = len(control.heard)
        await done(control, "a3", CommandKind.LORA_UNLOAD, adapter="sql")
        left = await control.engine("e1", EngineState.SERVING, since=before)
        assert left.adapters == []
        assert (await post(facts.port, "/v1/completions", body)).status_code == 404
        bad = await tell(control, "a4", CommandKind.LORA_LOAD, adapter="../x", adapter_path="/x")
        assert bad.state is CommandState.REFUSED

        before = len(control.heard)
        await done(control, "r", CommandKind.ROLE, role="decode")
        changed = await control.engine("e1", EngineState.SERVING, since=before)
        assert (changed.role, changed.started_ms > facts.started_ms) == ("decode", True)
        await until_gone(facts.port)
        await done(control, "r2", CommandKind.ROLE, role="decode")
        assert agent.record().ports[0] == changed.port, "the same role again restarts nothing"
        none = await tell(control, "r3", CommandKind.ROLE, role="oracle")
        assert (none.state, "no role `oracle`" in none.detail) == (CommandState.REFUSED, True)
        # A new agent knows the engine by its file only, and so does the role that was changed.
        before = len(control.heard)
        await done(control, "u", CommandKind.RESTART)
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert (again.role, again.started_ms > changed.started_ms) == ("decode", True)


async def test_a_cordon_outlives_the_agent_and_old_epochs_do_not_touch_it(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        await done(control, "c", CommandKind.CORDON, epoch=2, reason="fan  is\nloud")
        cordoned = await _cordon(control, "by command: fan is loud")
        assert (cordoned.state, cordoned.port) == (EngineState.SERVING, facts.port)
        assert (await control.credits("r1", BIG)).holds == {"e1": (0, 0)}
        beats = control.all(Beat)
        await control.until(lambda: [b for b in control.all(Beat)[len(beats) :] if b.cordoned])
        stale = await tell(control, "u0", CommandKind.UNCORDON, epoch=1)
        assert stale.state is CommandState.STALE_EPOCH
        await agent.kill()
        before = len(control.heard)
        await agent.start()
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.cordon == "by command: fan is loud"
        await done(control, "u", CommandKind.UNCORDON, epoch=2)
        await _cordon(control, "", since=len(control.heard) - 3)
        assert (await control.credits("r1", BIG)).holds["e1"][0] == 8


async def _cordon(control: Control, why: str, since: int = 0) -> EngineFacts:
    def found() -> EngineFacts | None:
        for message in control.heard[since:]:
            for facts in getattr(message, "engines", ()):
                if isinstance(facts, EngineFacts) and facts.cordon == why:
                    return facts
        return None

    return await control.until(found)


async def test_a_crash_loop_cordons_and_uncordon_tries_again(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    # It lives for long enough to be seen as starting.
    program.write_text("#!/bin/sh\nsleep 0.3\nexit 3\n")
    program.chmod(0o755)
    broken = type(simulated())(
        engine_id="v", kind="vllm", model="m", role="both", gpus=1,
        options={"executable": str(program)},
    )  # fmt: skip
    async with agent_world(tmp_path, broken) as (_, control, agent):
        await control.make_queue()
        await agent.start()

        def given_up() -> EngineFacts | None:
            for message in reversed(control.heard):
                for facts in getattr(message, "engines", ()):
                    if isinstance(facts, EngineFacts) and facts.cordon.startswith("crash loop"):
                        return facts
            return None

        facts = await control.until(given_up)
        assert facts.state is EngineState.FAILED
        assert "status 3" in facts.cordon
        starts = len(list((tmp_path / "agent/data/engines/v").glob("engine.log*")))
        await asyncio.sleep(1.0)
        assert len(list((tmp_path / "agent/data/engines/v").glob("engine.log*"))) == starts
        # Long enough for its start to be told before it ends.
        program.write_text("#!/bin/sh\nsleep 5\nexit 3\n")
        before = len(control.heard)
        await done(control, "u", CommandKind.UNCORDON, engine_id="v")
        await control.engine("v", EngineState.STARTING, since=before)


async def test_calls_that_get_no_tokens_fail_an_engine_whose_health_is_fine(
    tmp_path: Path,
) -> None:
    async with agent_world(tmp_path, simulated(allow_faults=True)) as (_, control, agent):
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(facts.port, 5_000, started))
        await started.wait()
        before = len(control.heard)
        assert (await post(facts.port, "/fault", {"hang": True})).status_code == 200
        await control.engine("e1", EngineState.FAILED, since=before)
        async with httpx2.AsyncClient(trust_env=False) as client:
            health = await client.get(f"http://127.0.0.1:{facts.port}/health")
        assert health.status_code == 200
        before = len(control.heard)
        await post(facts.port, "/fault", {"hang": False})
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.started_ms == facts.started_ms
        stream.cancel()


async def test_what_a_killed_server_leaves_is_ended_though_nobody_recorded_it(
    tmp_path: Path,
) -> None:
    async with agent_world(tmp_path, simulated()) as (bus, control, agent):
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        settings = AgentSettings(
            node_id=NODE, nats_url=bus.url, data_dir=tmp_path / "agent" / "data"
        )
        owner = owner_mark(settings)
        record = agent.record()
        assert {one.pid for one in marked_by(owner)} == {record.pid}
        # An agent whose folder was lost knows its engines no more; another's are none of its business.
        await agent.kill()
        for path in (tmp_path / "agent/data/engines").glob("*/process.json"):
            path.unlink()
        other = AgentProcess(tmp_path / "other", bus, simulated("x"))
        before = len(control.heard)
        await agent.start()
        await control.engine("e1", EngineState.SERVING, since=before)
        assert record.pid not in {one.pid for one in marked_by(owner)}
        del other


@pytest.mark.parametrize("kind", [CommandKind.STOP, CommandKind.UNLOAD])
async def test_nothing_is_signalled_before_every_replica_knows(
    kind: CommandKind, tmp_path: Path
) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        await control.credits("r1", {"e1": (4, 4_000)})
        pid = agent.record().pid
        before = len(control.heard)
        command = Command(command_id="x", epoch=1, kind=kind, engine_id="e1", deadline_s=30)
        await control.command(command)
        await control.engine("e1", EngineState.DRAINING, since=before)
        await asyncio.sleep(1.0 if kind is CommandKind.STOP else 4.0)
        os.kill(pid, 0)
        assert not [ack for ack in control.all(Acknowledgement) if ack.command_id == "x"]
        await control.credits("r1", {"e1": (0, 0)}, closed=["e1"])
        assert (await control.outcome("x")).state is CommandState.DONE
        assert Phase.CLOSING in phases(control, "x")


async def test_an_engine_that_ignores_sigterm_is_ended_within_the_limit(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated(shutdown_timeout_s=3600)) as (_, control, agent):
        await control.make_queue()
        await agent.start("--stop-grace-s", "1")
        facts = await control.engine("e1", EngineState.SERVING)
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(facts.port, 8_000, started))
        await started.wait()
        await done(control, "x", CommandKind.STOP)
        await until_gone(facts.port)
        with pytest.raises(httpx2.HTTPError):
            await stream


async def test_a_drain_tells_how_many_calls_are_left(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        events = [asyncio.Event() for _ in range(3)]
        streams = [
            asyncio.create_task(read_stream(facts.port, 400 + 100 * number, event))
            for number, event in enumerate(events)
        ]
        for event in events:
            await event.wait()
        await done(control, "d", CommandKind.DRAIN)
        left = [one.calls_left for one in control.all(Progress) if "d" in one.command_ids]
        assert 3 in left
        assert left[-1] == 0
        assert left[left.index(3) :] == sorted(left, reverse=True)[: len(left) - left.index(3)]
        for stream in streams:
            assert "[DONE]" in await stream
