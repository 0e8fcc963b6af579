"""Plays a plan over real HTTP with the official OpenAI SDK: one client per tenant, steps in order,
outcome reported.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import httpx2
import openai
from openai.types.chat import ChatCompletionMessageParam

from cli.demo.load import WorkflowPlan, text

CALL_S_MAX = 30.0
WORKFLOWS_IN_FLIGHT_MAX = 16
_STREAMED_SHARE = 0.75
# An agent asks for a step again when its answer broke off.
STEP_TRIES_MAX = 3
_HTTP_CREATED = 201


@dataclass(slots=True)
class Tally:
    """Counts while the load runs, for the progress bar and the summary.

    Workflows end in one of three.
    """

    started: int = 0
    succeeded: int = 0
    failed: int = 0
    refused: int = 0
    in_flight: int = 0
    calls: int = 0
    # A failed workflow's own result was wrong, or its calls did not come through.
    failed_by_quality: int = 0
    failed_by_calls: int = 0
    steps_retried: int = 0
    calls_failed: Counter[str] = field(default_factory=Counter)


class Player:
    """Sends the workflows of a plan. `models` maps a plan's model size to a served model's name."""

    def __init__(
        self,
        *,
        url: str,
        keys: Mapping[str, str],
        models: Mapping[str, str],
        seed: int,
        budget_usd: float,
    ) -> None:
        self.tally = Tally()
        self._models = models
        self._seed = seed
        self._budget_usd = budget_usd
        self._slots = asyncio.Semaphore(WORKFLOWS_IN_FLIGHT_MAX)
        self._openai = {
            tenant: openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", timeout=CALL_S_MAX)
            for tenant, key in keys.items()
        }
        self._http = {
            tenant: httpx2.AsyncClient(
                base_url=url,
                headers={"authorization": f"Bearer {key}"},
                timeout=CALL_S_MAX,
                trust_env=False,
            )
            for tenant, key in keys.items()
        }
        # Tools and instructions that all workflows of a tenant share, and its engines can reuse.
        self._prefixes: dict[str, str] = {}

    async def close(self) -> None:
        for client in self._openai.values():
            await client.close()
        for http in self._http.values():
            await http.aclose()

    async def play(self, plans: tuple[WorkflowPlan, ...]) -> None:
        """Runs every workflow at its time of arrival and returns when all have ended."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for plan in plans:
                await asyncio.sleep(max(0.0, start + plan.arrival_s - time.monotonic()))
                await self._slots.acquire()
                tasks.create_task(self._workflow(plan))

    async def _workflow(self, plan: WorkflowPlan) -> None:
        self.tally.started += 1
        self.tally.in_flight += 1
        try:
            ended = await self._run(plan)
        finally:
            self.tally.in_flight -= 1
            self._slots.release()
        match ended:
            case "succeeded":
                self.tally.succeeded += 1
            case "refused":
                self.tally.refused += 1
            case _:
                self.tally.failed += 1

    async def _run(self, plan: WorkflowPlan) -> str:
        http = self._http[plan.tenant]
        workflow = await self._create(http, plan)
        if workflow is None:
            return "refused"
        random = Random(f"{self._seed}:{plan.name}")  # noqa: S311  (a repeatable load, no secret)
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": self._prefix(plan)}
        ]
        for number, step in enumerate(plan.steps):
            await asyncio.sleep(step.gap_s)
            messages.append({"role": "user", "content": text(random, step.prompt_tokens_new)})
            try:
                answer = await self._step(
                    plan,
                    workflow,
                    number,
                    messages,
                    completion_tokens=step.completion_tokens,
                    is_stream=random.random() < _STREAMED_SHARE,
                )
            except openai.OpenAIError as error:
                await self._post(http, f"/v1/workflows/{workflow}/cancel", None)
                if isinstance(error, openai.APIStatusError) and number == 0:
                    return "refused"
                self.tally.failed_by_calls += 1
                return "failed"
            messages.append({"role": "assistant", "content": answer})
        outcome = "success" if plan.is_solved else "failure"
        is_taken = await self._post(
            http, f"/v1/workflows/{workflow}/outcome", {"outcome": outcome, "detail": plan.kind}
        )
        if plan.is_solved and is_taken:
            return "succeeded"
        if plan.is_solved:
            self.tally.failed_by_calls += 1
        else:
            self.tally.failed_by_quality += 1
        return "failed"

    async def _step(
        self,
        plan: WorkflowPlan,
        workflow: str,
        number: int,
        messages: list[ChatCompletionMessageParam],
        *,
        completion_tokens: int,
        is_stream: bool,
    ) -> str:
        """One step, asked for again when its stream broke: the SDK retries only what has no answer yet."""
        tries = 0
        while True:
            try:
                return await self._call(
                    plan,
                    workflow,
                    number,
                    messages,
                    completion_tokens=completion_tokens,
                    is_stream=is_stream,
                )
            except openai.OpenAIError as error:
                self.tally.calls_failed[_code(error)] += 1
                tries += 1
                if isinstance(error, openai.APIStatusError) or tries >= STEP_TRIES_MAX:
                    raise
                self.tally.steps_retried += 1

    async def _create(self, http: httpx2.AsyncClient, plan: WorkflowPlan) -> str | None:
        response = await http.post(
            "/v1/workflows",
            json={
                "kind": plan.kind,
                "scope": plan.scope.value,
                "steps_expected": len(plan.steps),
                "deadline_s": plan.deadline_s,
                "budget_usd": self._budget_usd,
            },
        )
        if response.status_code != _HTTP_CREATED:
            self.tally.calls_failed[response.headers.get("x-headway-reason", "unknown")] += 1
            return None
        return str(response.json()["id"])

    async def _call(
        self,
        plan: WorkflowPlan,
        workflow: str,
        number: int,
        messages: list[ChatCompletionMessageParam],
        *,
        completion_tokens: int,
        is_stream: bool,
    ) -> str:
        client = self._openai[plan.tenant]
        model = self._models[plan.model_size]
        headers = {"x-headway-workflow": workflow, "x-headway-step": str(number)}
        self.tally.calls += 1
        if not is_stream:
            completion = await client.chat.completions.create(
                model=model,
                messages=messages,
                max_tokens=completion_tokens,
                extra_headers=headers,
            )
            return completion.choices[0].message.content or ""
        stream = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=completion_tokens,
            stream=True,
            extra_headers=headers,
        )
        async with stream:
            parts = [
                chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices
            ]
        return "".join(parts)

    async def _post(self, http: httpx2.AsyncClient, path: str, body: dict[str, str] | None) -> bool:
        """Whether the control plane took it: an outcome after the deadline is not taken."""
        try:
            response = await http.post(path, json=body)
        except httpx2.TransportError:
            return False
        return response.is_success

    def _prefix(self, plan: WorkflowPlan) -> str:
        if plan.tenant not in self._prefixes:
            random = Random(f"{self._seed}:{plan.tenant}:prefix")  # noqa: S311  (as above)
            self._prefixes[plan.tenant] = text(random, plan.prefix_tokens)
        return self._prefixes[plan.tenant]


def _code(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.APIError) and error.code:
        return str(error.code)
    return type(error).__name__
