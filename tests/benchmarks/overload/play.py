"""Plays workflows against a cluster: each step asks, waits, asks again, and hangs up at its deadline."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

from tests.benchmarks.overload.fleet import MODEL, LabCluster
from tests.benchmarks.overload.sdk import Caller, Try
from tests.benchmarks.overload.workload import Kind, Plan, Step, Tier, text


class Fate(StrEnum):
    """How a workflow ended.

    `REFUSED` before any step was done; `KILLED` by a refusal after one was; `LATE`: hung up at the
    deadline; `FAILED`: any other error.
    """

    SUCCEEDED = "succeeded"
    REFUSED = "refused"
    KILLED = "killed"
    LATE = "late"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Ended:
    """What became of one workflow. Instants in seconds from the start of the run."""

    plan: Plan
    began_s: float
    ended_s: float = 0.0
    fate: Fate = Fate.FAILED
    workflow: str = ""
    error: str = ""
    steps_done: int = 0
    calls: int = 0
    tries: list[list[Try]] = field(default_factory=list)

    @property
    def has_died(self) -> bool:
        return self.fate is not Fate.SUCCEEDED

    @property
    def is_late_kill(self) -> bool:
        """It died after the fleet had finished a step of it."""
        return self.has_died and self.steps_done > 0


class Player:
    """`started_s` is the monotonic instant from which a run's seconds count."""

    def __init__(self, cluster: LabCluster, *, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._caller = Caller(cluster.url, seed=seed)
        self._prefixes: dict[tuple[str, str], str] = {}
        self.started_s = 0.0
        self.lateness_s_max = 0.0

    async def close(self) -> None:
        await self._caller.close()

    async def open_loop(self, plans: Iterable[Plan], *, counts_until_s: float) -> list[Ended]:
        """Every plan at its time, however the earlier ones fare.

        Returns when all that arrived before `counts_until_s` have ended; later ones are hung up then.
        """
        self.started_s = time.monotonic()
        counted: list[asyncio.Task[Ended]] = []
        rest: list[asyncio.Task[Ended]] = []
        try:
            for plan in plans:
                behind_s = time.monotonic() - self.started_s - plan.arrival_s
                if behind_s < 0:
                    await asyncio.sleep(-behind_s)
                else:
                    self.lateness_s_max = max(self.lateness_s_max, behind_s)
                task = asyncio.create_task(self.workflow(plan))
                (counted if plan.arrival_s < counts_until_s else rest).append(task)
            return list(await asyncio.gather(*counted))
        finally:
            for task in (*counted, *rest):
                task.cancel()
            await asyncio.gather(*counted, *rest, return_exceptions=True)

    async def closed_loop(
        self, plans: Iterator[Plan], *, slots: int, seconds: float
    ) -> list[Ended]:
        """`slots` workflows at a time, each followed by the next, for `seconds`."""
        self.started_s = time.monotonic()
        ended: list[Ended] = []

        async def slot() -> None:
            for plan in plans:
                done = await self.workflow(plan)
                ended.append(done)

        tasks = [asyncio.create_task(slot()) for _ in range(slots)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ended

    async def workflow(self, plan: Plan) -> Ended:
        ended = Ended(plan=plan, began_s=time.monotonic() - self.started_s)
        try:
            async with asyncio.timeout(plan.deadline_s):
                await self._steps(plan, ended)
        except TimeoutError:
            ended.fate = Fate.LATE
        ended.ended_s = time.monotonic() - self.started_s
        if ended.workflow:
            key = self._key(plan.tier)
            path = f"/v1/workflows/{ended.workflow}"
            if ended.fate is Fate.SUCCEEDED:
                reply = await self._caller.post(f"{path}/outcome", {"outcome": "success"}, key)
                if not reply.is_ok:
                    ended.fate, ended.error = Fate.LATE, reply.error
            else:
                await self._caller.post(f"{path}/cancel", {}, key)
        return ended

    async def _steps(self, plan: Plan, ended: Ended) -> None:
        key = self._key(plan.tier)
        created = await self._caller.post(
            "/v1/workflows",
            {
                "kind": plan.kind.name,
                "scope": plan.kind.scope,
                "steps_expected": len(plan.steps),
                "deadline_s": plan.deadline_s,
            },
            key,
        )
        if not created.is_ok:
            self._refused(ended, created.tries, created.error)
            return
        ended.workflow = created.body["id"]
        random = Random(f"{self._seed}:{plan.number}")
        messages: list[dict[str, str]] = [
            {"role": "system", "content": self._prefix(plan.tier, plan.kind)}
        ]
        for number, step in enumerate(plan.steps):
            if step.gap_s:
                await asyncio.sleep(step.gap_s)
            messages.append({"role": "user", "content": text(random, step.prompt_tokens_new)})
            ended.calls += 1
            reply = await self._caller.post(
                "/v1/chat/completions",
                body(messages, step),
                key,
                {"x-headway-workflow": ended.workflow, "x-headway-step": str(number)},
            )
            ended.tries.append(reply.tries)
            if not reply.is_ok:
                self._refused(ended, reply.tries, reply.error)
                return
            ended.steps_done += 1
            messages.append({"role": "assistant", "content": reply.text})
        ended.fate = Fate.SUCCEEDED

    def _refused(self, ended: Ended, tries: list[Try], error: str) -> None:
        ended.error = error
        if not tries[-1].is_refused:
            ended.fate = Fate.FAILED
        else:
            ended.fate = Fate.KILLED if ended.steps_done else Fate.REFUSED

    def _key(self, tier: Tier) -> str:
        return self._cluster.tenant_keys[tier.tenant]

    def _prefix(self, tier: Tier, kind: Kind) -> str:
        """Instructions that all workflows of a tenant and kind share."""
        found = self._prefixes.get((tier.tenant, kind.name))
        if found is None:
            random = Random(f"{self._seed}:{tier.tenant}:{kind.name}")
            found = self._prefixes[tier.tenant, kind.name] = text(random, kind.prefix_tokens)
        return found


def body(messages: list[dict[str, str]], step: Step) -> dict[str, Any]:
    """A chat call whose answer has just as many tokens as planned."""
    wanted: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": step.answer_tokens,
        "ignore_eos": True,
    }
    if step.is_stream:
        wanted["stream"] = True
    return wanted
