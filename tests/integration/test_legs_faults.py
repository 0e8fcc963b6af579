"""Pairs of simulated engines behind the gateway: a leg fails at a random moment, and no answer is lost or wrong.

The oracle is an engine that nothing happens to. Each seed has its own prompts, faults and moments.
"""

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName
from controlplane.domain.outcome import AttemptOutcome, RequestState
from controlplane.domain.transfer import Connector, KvSource
from tests.gateway_world import MODEL, RoundRobinGate, TicketView, World, running
from tests.integration.simulated_world import RunningEngine, running_engine

LEASE_S = 1.0
CALLS = 6
TOKENS = 12
SPEED = {"speedup": 40.0, "kv_lease_s": LEASE_S, "kv_handshake_s": 0.15, "allow_faults": True}

STANDS_STILL: dict[str, Any] = {}
# What happens to one engine for some time, and to which.
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("prefill", {"error_rate": 1.0}),
    ("prefill", {"drop_before_first_byte": True}),
    ("prefill", {"refuse": True}),
    ("prefill", {"hang": True}),
    ("prefill", {"kv_withheld": True}),
    ("prefill", {"kv_finish_reason": "error"}),
    ("prefill", {"kv_finish_reason": "abort"}),
    ("prefill", {"kv_finish_reason": "tool_calls"}),
    ("prefill", {"kv_unreachable": True}),
    ("prefill", {"slow_factor": 20.0}),
    # Its lease runs out while it stands still, and it does not know.
    ("prefill", STANDS_STILL),
    ("decode", {"refuse": True}),
    ("decode", {"drop_before_first_byte": True}),
    ("decode", {"error_rate": 0.5}),
    ("decode", {"slow_factor": 10.0}),
]


class Fleet:
    """Two prefill engines, two that decode, and one that is never disturbed."""

    def __init__(self, engines: list[RunningEngine]) -> None:
        self.prefills, self.decodes, self.plain = engines[:2], engines[2:4], engines[4]
        self.right: dict[str, str] = {}

    async def set(self, engine: RunningEngine, **faults: Any) -> None:
        assert (await engine.http.post("/fault", json=faults)).status_code == 200

    async def answer(self, prompt: str) -> str:
        got = await self.plain.completion(prompt, max_tokens=TOKENS, ignore_eos=True)
        return got.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def fleet(anyio_backend: str) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        starting = [stack.enter_async_context(running_engine(**SPEED)) for _ in range(5)]
        yield Fleet([await one for one in starting])


class LeavingGate(RoundRobinGate):
    """As the scheduler does, it never sends a call again to the engine that has just failed it."""

    def retry(
        self, ticket: TicketView, failed: EngineRow, outcome: AttemptOutcome, detail: str
    ) -> bool:
        left = ticket.decode_url
        is_placed = super().retry(ticket, failed, outcome, detail)
        while is_placed and ticket.decode_url == left:
            self._place(ticket)
        return is_placed


def gate_of(fleet: Fleet) -> RoundRobinGate:
    p, d = (
        [("127.0.0.1", engine.port) for engine in engines]
        for engines in (fleet.prefills, fleet.decodes)
    )
    # A prefill that failed is tried at the other engine; a decode that failed, on the other pair.
    return LeavingGate(
        pairs=[(p[0], d[0]), (p[1], d[1]), (p[0], d[1]), (p[1], d[0])],
        kv_source=KvSource(Connector.NIXL, lease_s=LEASE_S),
        other_prefills=[p[1], p[0]] * CALLS,
        model=replace(MODEL, name=ModelName("m")),
    )


async def ask(world: World, prompt: str, *, is_stream: bool) -> tuple[int, str]:
    body = {
        "model": "m", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": is_stream,
    }  # fmt: skip
    got = await world.post(body, "/v1/completions", x_headway_deadline_ms="20000")
    if not is_stream or got.status != 200:
        return got.status, got.json()["choices"][0]["text"] if got.status == 200 else ""
    text, lines = "", got.body.decode().split("\n\n")
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return 200, "error"
            text += "".join(choice["text"] for choice in event["choices"])
    assert "data: [DONE]" in lines
    return got.status, text


@pytest.mark.parametrize("seed", range(60))
async def test_no_answer_is_lost_or_wrong(fleet: Fleet, seed: int) -> None:
    random_ = random.Random(seed)
    where, faults = random_.choice(FAULTS)
    victim = (fleet.prefills if where == "prefill" else fleet.decodes)[random_.randrange(2)]
    # Prompts share beginnings, so that what one call leaves in a cache is found by the next.
    common = f"the beginning of seed {seed} is the same for all " * random_.randint(2, 12)
    prompts = [common + f"call {number} " * random_.randint(1, 40) for number in range(CALLS)]
    gate = gate_of(fleet)
    async with running(gate, period_s=0.05) as world:
        calls = []
        begins_s, lasts_s = random_.uniform(0, 0.06), random_.uniform(0.02, 0.3)
        trouble = asyncio.ensure_future(disturb(fleet, victim, faults, begins_s, lasts_s))
        for prompt in prompts:
            is_stream = random_.random() < 0.6
            calls.append(asyncio.ensure_future(ask(world, prompt, is_stream=is_stream)))
            await asyncio.sleep(random_.uniform(0, 0.03))
        answers = await asyncio.gather(*calls)
        await trouble
        right = [await fleet.answer(prompt) for prompt in prompts]
        assert answers == [(200, text) for text in right], (where, faults)
        assert {one.state for one in gate.settlements} == {RequestState.SUCCEEDED}
        # What went wrong has left nothing wrong behind: the caches are trusted again.
        again = [await ask(world, prompt, is_stream=False) for prompt in prompts]
        assert again == [(200, text) for text in right], (where, faults)
    failures = [one for one in gate.attempts if one[2] is not AttemptOutcome.OK]
    assert len(failures) <= 3 * CALLS


async def disturb(
    fleet: Fleet, victim: RunningEngine, faults: dict[str, Any], begins_s: float, lasts_s: float
) -> None:
    await asyncio.sleep(begins_s)
    if faults is STANDS_STILL:
        victim.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S * 1.2)
        victim.process.send_signal(signal.SIGCONT)
        return
    await fleet.set(victim, **faults)
    await asyncio.sleep(lasts_s)
    await fleet.set(victim)


async def test_nothing_is_held_in_the_end(fleet: Fleet) -> None:
    """After all seeds: every pinned block was fetched, or its lease has ended."""
    for engine in (*fleet.prefills, *fleet.decodes):
        await engine.until_metric("kv_cache_usage_perc", 0)
        assert await engine.metric("num_requests_running") == 0
        assert await engine.metric("num_requests_waiting") == 0
