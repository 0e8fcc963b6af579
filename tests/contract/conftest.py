"""The engines that the contract is about: simulated ones, and real vLLM where `-m engine` asks for it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from dataplane.engines.kinds import kind_of
from dataplane.protocol.messages import EngineSpec, KvTransfer
from tests.engine.environment import PREFILL_ENVIRONMENT, READY_S_MAX, cpu_environment, tiny_engine
from tests.engine.install_vllm import FINISHED, environment_folder
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SIMULATED, VLLM = "simulated", "vllm"
# A real engine on a busy machine may take seconds to fetch, and renews every sixth of a lease in whole seconds.
LEASE_S = {SIMULATED: 2, VLLM: 12}


@dataclass
class Engine:
    """A running engine of either kind. `block_tokens` as it tells them."""

    kind: str
    model: str
    port: int
    process: asyncio.subprocess.Process
    http: httpx2.AsyncClient
    transfer: KvTransfer | None
    side_port: int = 0

    @property
    def lease_s(self) -> float:
        return LEASE_S[self.kind]

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json={"model": self.model, **body}, headers=given)

    async def complete(self, prompt: Any, **members: Any) -> dict[str, Any]:
        headers = members.pop("headers", {})
        response = await self.post(
            "/v1/completions", {"prompt": prompt, "temperature": 0, **members}, **headers
        )
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content)

    async def chat(self, content: str, **members: Any) -> dict[str, Any]:
        headers = members.pop("headers", {})
        response = await self.post("/v1/chat/completions", chat(content, **members), **headers)
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content)

    async def events(self, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
        """Decoded events of a stream, the end mark as `[DONE]`."""
        found: list[Any] = []
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        members = {"model": self.model, "stream": True, **body}
        async with self.http.stream("POST", path, json=members, headers=given) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line:
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else msgspec.json.decode(data))
        return found

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def metric(self, name: str, labels: str = "") -> float:
        """The sum of a series, 0 when there is none yet."""
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in (await self.metrics()).splitlines()
            if line.startswith(f"vllm:{name}{{") and labels in line
        )

    async def until_metric(self, name: str, wanted: float, seconds: float = 15.0) -> float:
        """Seconds until a metric has a value."""
        began = time.monotonic()
        while (found := await self.metric(name)) != wanted:
            waited = time.monotonic() - began
            assert waited < seconds, f"{name} is {found} after {waited:.1f} s, not {wanted}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began


def chat(content: str, **members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **members}


def spec_of(kind: str, name: str, role: str, folder: Path, **options: Any) -> EngineSpec:
    lease = {"kv_lease_s": LEASE_S[kind]}
    if kind == SIMULATED:
        usual = {"context_tokens_max": 4096, "kv_tokens": 16384, "allow_faults": True, **lease}
        given = {**usual, **options}
        return EngineSpec(engine_id=name, kind=kind, model="m", role=role, gpus=1, options=given)
    environment = environment_folder()
    if not (environment / FINISHED).exists():
        pytest.skip(f"no vLLM in {environment}; run tests/engine/install_vllm.py")
    spec = tiny_engine(name, role, environment, folder)
    more = lease if role != "both" else {}
    return msgspec.structs.replace(spec, options={**spec.options, **more, **options})


@contextlib.asynccontextmanager
async def running(
    kind: str, name: str, role: str, folder: Path, **options: Any
) -> AsyncIterator[Engine]:
    """One engine, started with the flags that an agent starts it with."""
    spec = spec_of(kind, name, role, folder, **options)
    adapter = kind_of(spec)
    adapter.check(spec)
    ports = [free_port() for _ in range(adapter.ports_needed(spec))]
    launch = adapter.launch(spec, "127.0.0.1", ports)
    environment = {**os.environ, **launch.environment, "PYTHONPATH": str(ROOT)}
    if kind == VLLM:
        environment |= cpu_environment()
        if role == "prefill":
            environment |= PREFILL_ENVIRONMENT
        del environment["PYTHONPATH"]
    with (folder.parent / f"{kind}-{name}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *launch.argv, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    ends = time.monotonic() + (READY_S_MAX if kind == VLLM else 20.0)
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{ports[0]}", trust_env=False, timeout=60
        ) as http:
            while True:
                assert process.returncode is None, f"{name} ended at its start; see {log.name}"
                assert time.monotonic() < ends, f"{name} does not start; see {log.name}"
                with contextlib.suppress(httpx2.TransportError):
                    if (await http.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
            transfer = getattr(adapter, "transfer", lambda *_: None)(spec, ports)
            side_port = ports[1] if len(ports) > 1 else ports[0]
            yield Engine(kind, spec.model, ports[0], process, http, transfer, side_port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture(scope="session", params=[SIMULATED, pytest.param(VLLM, marks=pytest.mark.engine)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the real model lies, beside the engines' logs."""
    found = tmp_path_factory.mktemp("contract") / "tiny"
    if kind == VLLM and (environment_folder() / FINISHED).exists():
        maker = ROOT / "tests" / "engine" / "tiny_model.py"
        python = environment_folder() / "bin" / "python"
        subprocess.run([python, maker, found], check=True, capture_output=True)
    return found


@pytest.fixture(scope="session")
async def pair(kind: str, anyio_backend: str, folder: Path) -> AsyncIterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine with the NIXL connector."""
    async with contextlib.AsyncExitStack() as stack:
        starts = [
            stack.enter_async_context(running(kind, name, role, folder))
            for name, role in (("p", "prefill"), ("d", "decode"))
        ]
        yield tuple([await start for start in starts])


@pytest.fixture
def prefill(pair: tuple[Engine, Engine]) -> Engine:
    return pair[0]


@pytest.fixture
def decode(pair: tuple[Engine, Engine]) -> Engine:
    return pair[1]
