"""What a hand-over costs: the time to the first token of a call on two engines, over what both engines took themselves.

Simulated engines in processes of their own, the gateway in this one; calls one after the other, and some at once.
Each call is also made without the gateway, by a client that runs both legs itself, in turn with the others, so
that the machine's own state is in both figures. Engines tell their own times: both count from the arrival of
their leg to their first token, the fetching of the KV included.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from controlplane.domain.ids import ModelName
from controlplane.domain.transfer import Connector, KvSource
from tests.gateway_world import MODEL, RoundRobinGate, World, running
from tests.integration.simulated_world import RunningEngine, running_engine

CALLS = 60
AT_ONCE = 8
ROUNDS_AT_ONCE = 12
PROMPT_WORDS = 1_500


class Sums(NamedTuple):
    """Of all first tokens of one engine: seconds, and how many."""

    seconds: float
    count: float


def run() -> dict[str, float]:
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    async with running_engine() as prefill, running_engine() as decode:
        pair = (("127.0.0.1", prefill.port), ("127.0.0.1", decode.port))
        gate = RoundRobinGate(
            pairs=[pair],
            kv_source=KvSource(Connector.NIXL),
            model=replace(MODEL, name=ModelName("m")),
            keeps=False,
        )
        async with running(gate) as world:
            bench = _Bench(world, prefill, decode)
            await bench.added(bench.by_gateway, 5)
            through, direct = [], []
            for _ in range(CALLS):
                through += await bench.added(bench.by_gateway, 1)
                direct += await bench.added(bench.by_hand, 1)
            crowd = []
            for _ in range(ROUNDS_AT_ONCE):
                crowd += await bench.added(bench.by_gateway, AT_ONCE)
    return {
        "pairs_added_p50_ms": statistics.median(through),
        "pairs_added_p95_ms": statistics.quantiles(through, n=20)[-1],
        "pairs_added_by_hand_p50_ms": statistics.median(direct),
        "pairs_added_by_hand_p95_ms": statistics.quantiles(direct, n=20)[-1],
        "pairs_added_c8_mean_ms": statistics.fmean(crowd),
        "pairs_ttft_ratio_p50": bench.ratio(),
    }


class _Bench:
    def __init__(self, world: World, prefill: RunningEngine, decode: RunningEngine) -> None:
        self._world = world
        self._prefill = prefill
        self._decode = decode
        self._number = 0
        self._ratios: list[float] = []

    def ratio(self) -> float:
        """Seen by the client over the engines' own sum, calls one at a time."""
        return statistics.median(self._ratios)

    async def added(self, ask: Callable[[str], Awaitable[float]], at_once: int) -> list[float]:
        """Milliseconds over the engines' own, as a mean of calls made at once."""
        before = [await _sums(engine) for engine in (self._prefill, self._decode)]
        prompts = []
        for _ in range(at_once):
            self._number += 1
            prompts.append(f"number {self._number} " + "word " * PROMPT_WORDS)
        seen = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        after = [await _sums(engine) for engine in (self._prefill, self._decode)]
        own_s = sum(
            (now.seconds - then.seconds) / at_once for now, then in zip(after, before, strict=True)
        )
        for now, then in zip(after, before, strict=True):
            assert now.count - then.count == at_once, "a leg was not where it was to be"
        if at_once == 1 and ask == self.by_gateway:
            self._ratios.append(seen[0] / own_s)
        return [(statistics.fmean(seen) - own_s) * 1_000.0]

    async def by_gateway(self, prompt: str) -> float:
        client = await self._world.dial()
        began = time.perf_counter()
        await client.send(_body(prompt), "/v1/completions")
        status, _ = await client.head()
        assert status == 200
        await client.chunk()
        took_s = time.perf_counter() - began
        while await client.chunk():
            pass
        client.writer.close()
        return took_s

    async def by_hand(self, prompt: str) -> float:
        body = _body(prompt)
        asked = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        began = time.perf_counter()
        first = await self._prefill.http.post("/v1/completions", json={**body, **asked})
        moved = {**body, "kv_transfer_params": first.json()["kv_transfer_params"]}
        async with self._decode.http.stream("POST", "/v1/completions", json=moved) as response:
            async for _ in response.aiter_bytes():
                took_s = time.perf_counter() - began
                break
        return took_s


def _body(prompt: str) -> dict[str, object]:
    return {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}


async def _sums(engine: RunningEngine) -> Sums:
    text = (await engine.http.get("/metrics")).text
    found = {
        name: float(line.rsplit(" ", 1)[1])
        for name in ("sum", "count")
        for line in text.splitlines()
        if line.startswith(f"vllm:time_to_first_token_seconds_{name}{{")
    }
    return Sums(found["sum"], found["count"])
