"""KV events of a real `vllm serve` through a real agent and bus into the prefix index of a replica."""

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import pytest

from dataplane.protocol.messages import EngineSpec, EngineState, Hello, KvBatch, KvReset
from tests.engine.environment import READY_S_MAX, cpu_environment, tiny_engine
from tests.integration.agent_world import agent_world
from tests.integration.kv_world import Replica, replica, user

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
# 512 bytes of KV a token: 4,096 tokens, so that a few prompts are more than it holds.
KV_BYTES = 2 * 1024 * 1024
PROMPT_WORDS = "far away and long ago, when the sea was young, "


def small_engine(vllm: Path, model: Path, folder: Path) -> EngineSpec:
    """With the routes that reset the cache, which only developers of an engine have."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nVLLM_SERVER_DEV_MODE=1 exec {vllm / "bin" / "vllm"} "$@"\n')
    program.chmod(0o700)
    spec = tiny_engine("e1", "both", vllm, model)
    options = {
        **spec.options,
        "executable": str(program),
        "max_model_len": 2048,
        "kv_cache_memory_bytes": KV_BYTES,
    }
    return EngineSpec(
        engine_id="e1", kind="vllm", model="tiny", role="both", gpus=1, options=options
    )


async def post(one: Replica, path: str) -> None:
    entry = one.fleet.entry_of("e1")
    assert entry is not None
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://{entry.address[0]}:{entry.address[1]}{path}")
    assert answer.status_code == 200


async def is_right(one: Replica, said: list[dict[str, str]], tokens: int = 4) -> int:
    called = await one.call(said, tokens=tokens)
    assert called.predicted == called.reported, called
    return called.reported


async def test_what_a_real_engine_tells_is_what_it_holds(
    vllm: Path, model: Path, tmp_path: Path
) -> None:
    spec = small_engine(vllm, model, tmp_path)
    async with (
        agent_world(tmp_path, spec) as (bus, control, agent),
        replica("a", "tiny", bus.url, bus.password) as one,
    ):
        agent.environment = cpu_environment()
        await agent.start()
        await control.engine("e1", EngineState.SERVING, seconds=READY_S_MAX)
        await one.following()

        await repeated_and_continued(one)
        await evicted(one)
        await concurrent(one)
        await emptied(one)
        await retold(one, control, agent)
        await killed(one, control, agent)


async def repeated_and_continued(one: Replica) -> None:
    said = [user(PROMPT_WORDS, 20)]
    assert await is_right(one, said) == 0
    assert await is_right(one, said) > 0
    # Before the agent can have told, and after it has.
    for turn in range(4):
        said += [{"role": "assistant", "content": f"Chapter {turn}."}, user("Go on. ", 30)]
        assert await is_right(one, said) > BLOCK_TOKENS
        if turn % 2:
            await one.quiet()
    assert await is_right(one, said) > BLOCK_TOKENS
    assert one.metrics.kv_events.value(("e1",)) >= 5
    assert one.metrics.kv_gaps.value(("engine",)) == 0


async def evicted(one: Replica) -> None:
    entry = one.fleet.entry_of("e1")
    assert entry is not None
    first = [user("this one is forgotten, " * 60)]
    each = (await one.call(first)).prompt_tokens
    many = 3 * entry.facts.kv_tokens // each
    others = [[user(f"number {turn} of many: " * 60)] for turn in range(many)]
    for other in others:
        await one.call(other)
    await one.quiet()
    assert await is_right(one, first) == 0, f"{many} prompts of {each} tokens"
    # From the latest on, each with what is left of it.
    found = []
    for other in reversed(others):
        await one.quiet()
        found.append(await is_right(one, other))
    assert found[0] > 0
    assert found[-1] == 0


async def concurrent(one: Replica) -> None:
    """Of the same prompt at once an engine may keep the same block twice, and evict it twice."""
    same = [user("all together now: " * 40)]
    await asyncio.gather(*(one.call(same, tokens=60) for _ in range(4)))
    for turn in range(12):
        await asyncio.gather(
            *(one.call([user(f"crowd {turn} {each} " * 40)], tokens=60) for each in range(3))
        )
        await one.quiet()
        predicted = one.predict(same)
        called = await one.call(same, tokens=2)
        assert called.predicted == predicted == called.reported, called


async def emptied(one: Replica) -> None:
    said = [user("written in sand, " * 40)]
    await one.call(said)
    await one.quiet()
    await post(one, "/reset_prefix_cache")
    assert one.predict(said) > 0
    await one.call([user("the next step, " * 10)])
    await one.until(lambda: one.metrics.kv_clears.value(("cleared",)) == 1)
    assert await is_right(one, said) == 0


async def retold(one: Replica, control: object, agent: object) -> None:
    """An agent that begins anew reads up what the engine has told, by its replay."""
    said = [user("kept while nobody listens, " * 30)]
    epoch = control.all(Hello)[-1].agent_epoch  # type: ignore[attr-defined]
    await agent.kill()  # type: ignore[attr-defined]
    await one.call(said)
    await agent.start("--keep-engines")  # type: ignore[attr-defined]
    batch = await control.until(  # type: ignore[attr-defined]
        lambda: next(
            (each for each in control.all(KvBatch) if each.agent_epoch > epoch),  # type: ignore[attr-defined]
            None,
        )
    )
    # The cache was emptied once in what it read up: then nothing that was told before it holds.
    assert batch.reset in {KvReset.RETELL, KvReset.VOID}
    assert batch.replayed > 10
    await one.quiet()
    assert await is_right(one, said) > 0


async def killed(one: Replica, control: object, agent: object) -> None:
    said = [user("before the fall, " * 40)]
    await one.call(said)
    await one.quiet()
    assert one.predict(said) > 0
    before = len(control.heard)  # type: ignore[attr-defined]
    os.kill(agent.record("e1").pid, signal.SIGKILL)  # type: ignore[attr-defined]
    await control.engine("e1", EngineState.SERVING, since=before, seconds=READY_S_MAX)  # type: ignore[attr-defined]
    await one.until(lambda: one.predict(said) == 0)
    await one.following()
    assert await is_right(one, said) == 0
    assert await is_right(one, said) > 0
