"""Streams on simulated engines that die at random, in every way and at any token: each seed is a small run.

The oracle is an engine that nothing happens to. HEADWAY_RESUME_SEEDS takes more seeds than CI does; a failure
names its seed.
"""

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain.outcome import RequestState
from dataplane.engines.simulated.faults import Death
from tests.gateway_world import RoundRobinGate, World, running
from tests.resume_world import (
    OPTIONS,
    Simulated,
    asked,
    heard,
    is_lossless,
    simulated_engines,
    through,
)

SEEDS = int(os.environ.get("HEADWAY_RESUME_SEEDS", "200"))
SEEDS_PER_TEST = 20
STREAMS = 10
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
WORDS = ("bad", "z b", " hak", "eb d", "fon lik")
DEATHS = [death for death in Death if death is not Death.NONE]


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A streamed call of any kind that can go on elsewhere."""
    path = rng.choice((COMPLETIONS, CHAT))
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 40)))
    body: dict[str, Any] = {
        "model": "mock",
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": rng.randint(2, 60),
        "stream_options": {"include_usage": True},
    }
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = rng.choice([words, [rng.randint(5, 99) for _ in range(9)]])
    kind = rng.randrange(8)
    if kind == 1:
        body["stop"] = rng.sample(WORDS, 2)
    elif kind == 2:
        body.update(temperature=1, seed=rng.randint(1, 9))
    elif kind == 3:
        body["temperature"] = 1
    elif kind == 4:
        body["response_format"] = {"type": "json_object"}
    elif kind == 5:
        body["logprobs"] = 2 if path == COMPLETIONS else True
    elif kind == 6:
        body.update(n=2, temperature=1, **rng.choice([{}, {"seed": 4}]))
    elif kind == 7:
        body["min_tokens"] = rng.randint(1, body["max_tokens"])
        if path == COMPLETIONS:
            body["prompt"] = [words, words + " fon"]
            del body["min_tokens"]
    return path, body


async def one_seed(
    seed: int,
    world: World,
    engines: list[Simulated],
    streams: int = STREAMS,
    deaths: Sequence[Death] = DEATHS,
) -> None:
    rng = random.Random(seed)
    *served, undisturbed = engines
    calls = [drawn(rng) for _ in range(streams)]
    before = len(world.gate.settlements)
    for engine in served:
        engine.fault()
        engine.engine.answers.clear()
    doomed = rng.sample(served, rng.randint(1, len(served) - 1))
    for engine in doomed:
        engine.fault(death=rng.choice(deaths), death_after_tokens=rng.randint(1, 12 * streams))
    expected, got = await asyncio.gather(
        asyncio.gather(*(asked(undisturbed.address, body, path) for path, body in calls)),
        asyncio.gather(*(through(world, body, path) for path, body in calls)),
    )
    for (path, body), want, have in zip(calls, expected, got, strict=True):
        if body["temperature"] and "seed" not in body:
            # Drawn by chance: no other run says the same.
            assert is_lossless(have, served, body["max_tokens"]), (
                f"seed {seed}: {path} {body} {have}"
            )
            continue
        assert have.same() == heard(want.body).same(), f"seed {seed}: {path} {body}"
        assert len(have.ids) == 1, f"seed {seed}"
    settled = world.gate.settlements[before:]
    used = sorted((one.usage.prompt_tokens, one.usage.completion_tokens) for one in settled)
    told = sorted(
        (have.usage["prompt_tokens"], have.usage["completion_tokens"]) for have in got if have.usage
    )
    assert used == told, f"seed {seed}"
    assert {one.state for one in settled} == {RequestState.SUCCEEDED}, f"seed {seed}"
    assert world.metrics.in_flight.value(("mock",)) == 0
    assert world.metrics.resume_bytes.value() == 0
    assert all(engine.engine.in_flight == 0 or engine in doomed for engine in served)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
async def test_streams_outlive_their_engines(first: int) -> None:
    options = replace(OPTIONS, speedup=4.0)
    async with simulated_engines(4, options) as engines:
        gate = RoundRobinGate([one.address for one in engines[:3]], retries_max=6)
        async with running(gate, period_s=0.1) as world:
            for seed in range(first, min(SEEDS, first + SEEDS_PER_TEST)):
                await one_seed(seed, world, engines)
            assert world.metrics.stream_resumes.total() > 0


async def test_two_hundred_streams_outlive_two_of_three_engines() -> None:
    async with simulated_engines(4, OPTIONS) as engines:
        gate = RoundRobinGate([one.address for one in engines[:3]], retries_max=6)
        # So many streams in one process are slow: silence says nothing here.
        deaths = [death for death in DEATHS if death is not Death.SILENT]
        async with running(gate, period_s=600.0) as world:
            await one_seed(SEEDS + 1, world, engines, 200, deaths)
            assert world.metrics.stream_resumes.total() > 20
