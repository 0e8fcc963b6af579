"""Single calls without a workflow: at a rate, or from callers who always have another one."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tests.benchmarks.overload.fleet import MODEL, LabCluster
from tests.benchmarks.overload.sdk import Caller, Reply
from tests.benchmarks.overload.workload import text

# A caller whose call failed for good does something else first.
DISAPPOINTED_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A prefix that all calls of a tenant share, what is new in each, and the answer."""

    prefix_tokens: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """`ended_s` is an instant of the monotonic clock."""

    reply: Reply
    ended_s: float


class CallPlayer:
    def __init__(self, cluster: LabCluster, *, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._caller = Caller(cluster.url, seed=seed)
        self._prefixes: dict[tuple[str, Shape], str] = {}

    async def close(self) -> None:
        await self._caller.close()

    async def open_loop(
        self, tenant: str, shape: Shape, *, rate: float, seconds: float
    ) -> list[Done]:
        """Calls of one tenant as they come, `rate` a second, until all have ended."""
        random = Random(f"{self._seed}:{tenant}:calls")
        tasks: list[asyncio.Task[Done]] = []
        started_s = time.monotonic()
        at_s = random.expovariate(rate)
        async with asyncio.TaskGroup() as group:
            while at_s < seconds:
                await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
                tasks.append(group.create_task(self._call(tenant, shape, random)))
                at_s += random.expovariate(rate)
        return [task.result() for task in tasks]

    async def backlog(
        self, callers: Mapping[str, int], shape: Shape, *, seconds: float, counts_from_s: float
    ) -> dict[str, int]:
        """Finished calls by tenant, each with so many callers who never pause."""
        finished: Counter[str] = Counter(dict.fromkeys(callers, 0))
        counts_s = time.monotonic() + counts_from_s

        async def call(tenant: str, number: int) -> None:
            random = Random(f"{self._seed}:{tenant}:{number}")
            while True:
                done = await self._call(tenant, shape, random)
                if not done.reply.is_ok:
                    await asyncio.sleep(DISAPPOINTED_S)
                elif time.monotonic() >= counts_s:
                    finished[tenant] += 1

        tasks = [
            asyncio.create_task(call(tenant, number))
            for tenant, count in callers.items()
            for number in range(count)
        ]
        await asyncio.sleep(counts_from_s + seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return dict(finished)

    async def _call(self, tenant: str, shape: Shape, random: Random) -> Done:
        messages = []
        if shape.prefix_tokens:
            messages.append({"role": "system", "content": self._prefix(tenant, shape)})
        messages.append({"role": "user", "content": text(random, shape.prompt_tokens)})
        reply = await self._caller.post(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": messages,
                "max_tokens": shape.answer_tokens,
                "ignore_eos": True,
            },
            self._cluster.tenant_keys[tenant],
        )
        return Done(reply=reply, ended_s=time.monotonic())

    def _prefix(self, tenant: str, shape: Shape) -> str:
        found = self._prefixes.get((tenant, shape))
        if found is None:
            random = Random(f"{self._seed}:{tenant}:prefix")
            found = self._prefixes[tenant, shape] = text(random, shape.prefix_tokens)
        return found


def succeeded(calls: Sequence[Done]) -> float:
    """Share that got an answer; 1 of none."""
    return sum(call.reply.is_ok for call in calls) / len(calls) if calls else 1.0
