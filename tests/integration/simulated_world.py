"""Simulated engines as processes, for tests that speak HTTP to them."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from tests.integration.agent_world import answers
from tests.ports import free_port

START_S_MAX = 15.0
CONTEXT = 4096


@dataclass(frozen=True)
class RunningEngine:
    port: int
    process: asyncio.subprocess.Process
    http: httpx2.AsyncClient

    async def completion(self, prompt: Any, **members: Any) -> httpx2.Response:
        body = {"model": "m", "prompt": prompt, "temperature": 0, **members}
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, content: str, **members: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": "m", "messages": messages, "temperature": 0, **members}
        return await self.http.post("/v1/chat/completions", json=body)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Decoded events of a stream; the end mark as the string `[DONE]`."""
        found: list[Any] = []
        async with self.http.stream("POST", path, json={"model": "m", "stream": True, **body}) as r:
            assert r.status_code == 200, await r.aread()
            async for line in r.aiter_lines():
                if line == "data: [DONE]":
                    found.append("[DONE]")
                elif line:
                    found.append(msgspec.json.decode(line.removeprefix("data: ")))
        return found

    async def metric(self, name: str, labels: str = "") -> float:
        text = (await self.http.get("/metrics")).text
        for line in text.splitlines():
            if line.startswith(f"vllm:{name}{{") and labels in line:
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")

    async def until_metric(self, name: str, value: float) -> None:
        ends = time.monotonic() + 10
        while (seen := await self.metric(name)) != value:
            assert time.monotonic() < ends, f"{name} is {seen}, not {value}"
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_engine(gpus: int = 1, **options: Any) -> AsyncIterator[RunningEngine]:
    port = free_port()
    given = {"context_tokens_max": CONTEXT, "kv_tokens": 16384, "speedup": 10.0, **options}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "dataplane.engines.simulated", "--model", "m", "--port", str(port)),
        *("--gpus", str(gpus), "--options", msgspec.json.encode(given).decode()),
    )
    ends = time.monotonic() + START_S_MAX
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30
    ) as http:
        try:
            while not await answers(port):
                assert process.returncode is None, "the engine ended at its start"
                assert time.monotonic() < ends, "the engine does not start"
                await asyncio.sleep(0.02)
            yield RunningEngine(port, process, http)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
