"""The agent process against a real bus, with simulated engines."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dataplane.protocol.messages import (
    Acknowledgement,
    Beat,
    Bye,
    Command,
    CommandKind,
    CommandState,
    EngineState,
    Hello,
    Telemetry,
)
from tests.integration.agent_world import (
    AgentProcess,
    agent_world,
    answers,
    read_stream,
    simulated,
    until_gone,
)

BIG = {"e1": (1000, 10_000_000)}


async def test_reports_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        starting = await control.engine("e1", EngineState.STARTING)
        assert (starting.seats, starting.kv_tokens) == (0, 0)
        facts = await control.engine("e1", EngineState.SERVING)
        assert (facts.seats, facts.kv_tokens, facts.block_tokens) == (8, 16384, 16)
        assert facts.context_tokens_max == 8192
        assert (facts.model, facts.role, facts.kind, facts.gpus) == ("m", "both", "simulated", 1)
        await read_stream(facts.port, 20, asyncio.Event())
        seen = await control.until(
            lambda: next(
                (
                    engine
                    for message in control.all(Telemetry)
                    for engine in message.engines
                    if engine.generation_tokens == 20
                ),
                None,
            )
        )
        assert (seen.running, seen.waiting, seen.ttft_count, seen.itl_count) == (0, 0, 1, 19)
        beat = await control.until(lambda: control.all(Beat)[2:])
        assert beat[0].engine_states == {"e1": EngineState.SERVING}
        assert await agent.stop() == 0
        await control.until(lambda: control.all(Bye))
        assert not await answers(facts.port)


async def test_a_roll_call_is_answered(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        before = len(control.heard)
        await control.roll_call()
        assert await control.engine("e1", EngineState.SERVING, since=before)


async def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        first = await control.engine("e1", EngineState.SERVING)
        before = len(control.heard)
        os.kill(agent.record().pid, signal.SIGKILL)
        failed = await control.engine("e1", EngineState.FAILED, since=before)
        assert failed.port == first.port
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.started_ms > first.started_ms
        assert await answers(again.port)


async def test_a_silent_engine_is_failed_and_recovers(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        before = len(control.heard)
        pid = agent.record().pid
        os.kill(pid, signal.SIGSTOP)
        await control.engine("e1", EngineState.FAILED, since=before, seconds=8)
        before = len(control.heard)
        os.kill(pid, signal.SIGCONT)
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert (again.port, again.started_ms) == (facts.port, facts.started_ms)


async def test_an_engine_that_stays_silent_is_replaced(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        first = await control.engine("e1", EngineState.SERVING)
        before = len(control.heard)
        os.kill(agent.record().pid, signal.SIGSTOP)
        await control.engine("e1", EngineState.STARTING, since=before, seconds=30)
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.started_ms > first.started_ms


async def test_a_killed_agent_adopts_its_running_engine(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        epoch = control.all(Hello)[-1].agent_epoch
        started = asyncio.Event()
        whole = await read_stream(facts.port, 600, asyncio.Event())
        stream = asyncio.create_task(read_stream(facts.port, 600, started))
        await started.wait()
        await agent.kill()
        before = len(control.heard)
        pid = agent.record().pid
        await agent.start()
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert (again.port, again.started_ms) == (facts.port, facts.started_ms)
        assert agent.record().pid == pid
        assert control.all(Hello)[-1].agent_epoch == epoch + 1
        # One call of an unknown owner runs, so one seat is not lent.
        assert not stream.done()
        grant = await control.credits("r1", BIG)
        assert grant.holds["e1"][0] == 7
        assert _text(await stream) == _text(whole)
        await _until_lent(control, 8)
        assert await agent.stop() == 0
        await until_gone(facts.port)


async def _until_lent(control, seats: int) -> None:
    for _ in range(40):
        if (await control.credits("r1", BIG)).holds["e1"][0] == seats:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{seats} seats were never lent")


def _text(stream: str) -> str:
    return "".join(part.split('"text":"')[1].split('"')[0] for part in stream.split("\n\n")[:-2])


async def test_an_engine_with_another_specification_is_not_adopted(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        await agent.kill()
        before = len(control.heard)
        agent.declare(simulated(max_num_seqs=3))
        await agent.start()
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.seats == 3
        await until_gone(facts.port)


async def test_an_engine_that_is_not_wanted_any_more_is_ended(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        await agent.kill()
        agent.declare(simulated("e2"))
        await agent.start()
        await control.engine("e2", EngineState.SERVING)
        await until_gone(facts.port)


async def test_engines_can_be_left_running(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start("--keep-engines")
        facts = await control.engine("e1", EngineState.SERVING)
        assert await agent.stop() == 0
        assert await answers(facts.port)
        before = len(control.heard)
        await agent.start()
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.port == facts.port


async def test_a_second_agent_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (bus, control, agent):
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        second = AgentProcess(tmp_path / "agent", bus, simulated())
        await second.start()
        async with asyncio.timeout(60):
            assert await second._process.wait() == 1
        assert await answers(facts.port)
        assert "uses" in (tmp_path / "agent" / "agent.log").read_text()


async def test_the_bus_may_come_late_and_go(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (bus, control, agent):
        await bus.kill()
        await agent.start()
        while not (tmp_path / "agent/data/engines/e1/process.json").exists():
            await asyncio.sleep(0.05)
        await bus.start()
        facts = await control.engine("e1", EngineState.SERVING)
        before = len(control.heard)
        await bus.kill()
        await read_stream(facts.port, 5, asyncio.Event())
        await bus.start()
        again = await control.engine("e1", EngineState.SERVING, since=before)
        assert again.port == facts.port
        assert (await control.credits("r1", BIG)).holds["e1"] == (8, 16384)


async def test_commands_come_again_after_the_bus_was_away(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (bus, control, agent):
        await control.make_queue()
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        before = len(control.heard)
        await bus.kill()
        await bus.start()
        await control.engine("e1", EngineState.SERVING, since=before)
        stop = Command(command_id="s", epoch=1, kind=CommandKind.STOP, engine_id="e1")
        await control.command(stop)
        assert (await control.outcome("s")).state is CommandState.DONE
        assert (await control.engine("e1", EngineState.STOPPED)).model == "m"


async def test_credits_are_lent_once(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        first = await control.credits("r1", {"e1": (5, 10_000), "nothing": (1, 1)})
        assert first.holds == {"e1": (5, 10_000), "nothing": (0, 0)}
        assert first.ttl_ms == 15_000
        second = await control.credits("r2", BIG)
        assert second.holds["e1"] == (3, 6384)
        # Both want all: the first comes down to its half, and keeps until it lets go.
        first = await control.credits("r1", BIG, {"e1": (5, 10_000)})
        assert first.holds["e1"] == (4, 8192)
        second = await control.credits("r2", BIG, {"e1": (3, 6384)})
        assert second.holds["e1"] == (3, 6384)
        await control.credits("r1", {"e1": (0, 0)})
        second = await control.credits("r2", BIG)
        assert second.holds["e1"] == (8, 16384)


async def test_commands_are_obeyed_once(tmp_path: Path) -> None:
    async with agent_world(tmp_path) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        load = Command(
            command_id="c1", epoch=2, kind=CommandKind.LOAD, engine_id="e2", spec=simulated("e2")
        )
        await control.command(load)
        assert (await control.outcome("c1")).state is CommandState.DONE
        facts = await control.engine("e2", EngineState.SERVING)
        before = len(control.heard)
        await control.command(load)
        assert (await control.outcome("c1", since=before)).state is CommandState.DONE
        assert await answers(facts.port)

        stale = Command(command_id="c2", epoch=1, kind=CommandKind.STOP, engine_id="e2")
        await control.command(stale)
        assert (await control.outcome("c2")).state is CommandState.STALE_EPOCH
        assert await answers(facts.port)

        await agent.kill()
        before = len(control.heard)
        await agent.start()
        await control.engine("e2", EngineState.SERVING, since=before)
        await control.command(stale)
        await control.command(
            Command(command_id="c3", epoch=1, kind=CommandKind.UNLOAD, engine_id="e2")
        )
        assert (await control.outcome("c3", since=before)).state is CommandState.STALE_EPOCH
        await control.command(
            Command(command_id="c4", epoch=2, kind=CommandKind.UNLOAD, engine_id="e2")
        )
        assert (await control.outcome("c4")).state is CommandState.DONE
        await until_gone(facts.port)
        # Loaded, then unloaded: the repeated load is answered and not obeyed again.
        before = len(control.heard)
        await control.command(load)
        assert (await control.outcome("c1", since=before)).state is CommandState.DONE
        assert control.all(Hello)[-1].engines == []
        await _until_no_commands(control)


async def _until_no_commands(control) -> None:
    for _ in range(50):
        if await control.pending_commands() == 0:
            return
        await asyncio.sleep(0.1)
    pytest.fail("a command was never acknowledged to the queue")


async def test_impossible_commands_fail_in_words(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        await control.engine("e1", EngineState.SERVING)
        vllm = {"engine_id": "v", "kind": "vllm", "model": "m", "role": "both", "gpus": 1}
        cases = {
            "other specification": ("e1", simulated(max_num_seqs=9)),
            "no option `seats`": ("e9", simulated("e9", seats=9)),
            "no engine kind `gpt`": (
                "e9",
                type(simulated())(**{**vllm, "engine_id": "e9", "kind": "gpt"}),
            ),
            "engine id `../e9`": ("../e9", simulated("../e9")),
            "can not set option `executable`": (
                "v",
                type(simulated())(**vllm, options={"executable": "/bin/sh"}),
            ),
        }
        for number, (words, (engine_id, spec)) in enumerate(cases.items()):
            await control.command(
                Command(
                    command_id=f"c{number}",
                    epoch=1,
                    kind=CommandKind.LOAD,
                    engine_id=engine_id,
                    spec=spec,
                )
            )
            outcome = await control.outcome(f"c{number}")
            assert outcome.state is CommandState.REFUSED
            assert words.split()[-1] in outcome.detail
        await control.command(
            Command(command_id="x", epoch=1, kind=CommandKind.DRAIN, engine_id="missing")
        )
        assert (await control.outcome("x")).state is CommandState.REFUSED


async def test_a_drain_waits_for_running_calls(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated()) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        assert (await control.credits("r1", {"e1": (2, 2000)})).holds == {"e1": (2, 2000)}
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(facts.port, 300, started))
        await started.wait()
        await control.command(
            Command(command_id="d", epoch=1, kind=CommandKind.DRAIN, engine_id="e1", deadline_s=30)
        )
        await control.engine("e1", EngineState.DRAINING)
        # What is lent may stay for the running call; nothing is added.
        kept = await control.credits("r1", {"e1": (1, 1000)}, {"e1": (1, 1000)}, ["e1"])
        assert kept.holds == {"e1": (1, 1000)}
        assert (await control.credits("r2", BIG, closed=["e1"])).holds == {"e1": (0, 0)}
        assert not stream.done()
        await stream
        await asyncio.sleep(1.5)
        # A replica's call may still read what the engine has sent long ago.
        assert not [ack for ack in control.all(Acknowledgement) if ack.command_id == "d"]
        await control.credits("r1", {"e1": (0, 0)}, closed=["e1"])
        assert (await control.outcome("d")).state is CommandState.DONE
        assert "[DONE]" in await stream
        await control.engine("e1", EngineState.STOPPED)
        await until_gone(facts.port)
        # It stays stopped over a restart of the agent, until it is loaded again.
        await agent.kill()
        before = len(control.heard)
        await agent.start()
        await control.engine("e1", EngineState.STOPPED, since=before)
        await control.command(
            Command(
                command_id="l", epoch=1, kind=CommandKind.LOAD, engine_id="e1", spec=simulated()
            )
        )
        assert (await control.outcome("l")).state is CommandState.DONE


async def test_a_drain_ends_at_its_deadline(tmp_path: Path) -> None:
    async with agent_world(tmp_path, simulated(shutdown_timeout_s=0.2)) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        facts = await control.engine("e1", EngineState.SERVING)
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(facts.port, 5000, started))
        await started.wait()
        await control.command(
            Command(command_id="d", epoch=1, kind=CommandKind.DRAIN, engine_id="e1", deadline_s=0.5)
        )
        assert (await control.outcome("d")).state is CommandState.DONE
        assert '"abort"' in await stream


async def test_a_crash_loop_ends_in_failed(tmp_path: Path) -> None:
    broken = type(simulated())(
        engine_id="v",
        kind="vllm",
        model="m",
        role="both",
        gpus=1,
        options={"executable": "/bin/false"},
    )
    async with agent_world(tmp_path, broken) as (_, control, agent):
        await control.make_queue()
        await agent.start()
        await control.command(
            Command(command_id="l", epoch=1, kind=CommandKind.LOAD, engine_id="v", spec=broken)
        )
        outcome = await control.outcome("l")
        assert outcome.state is CommandState.FAILED
        assert "status 1" in outcome.detail
        assert control.all(Hello)[-1].engines[0].state is EngineState.FAILED
