"""CPU time per request of a whole replica: key, terms, money, decision, credits, relay, journal, counters.

A real PostgreSQL, a real NATS, a real `headway serve`; behind it mock engines of a load harness whose
agent is played here, since nothing starts them: it says hello and lends their credits. The harness is a
folder with `src/mockd.c` and `src/loadc.c`, named by HEADWAY_BENCH_HARNESS.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx2
import nats
import psutil

from controlplane.domain.ids import TenantId
from controlplane.embedded.nats import EmbeddedNats, agent_user, control_user
from controlplane.embedded.postgres import EmbeddedPostgres
from controlplane.store import keys, migrate
from controlplane.store.catalog import apply_cluster
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from dataplane.protocol import subjects
from dataplane.protocol.messages import (
    Beat,
    CreditGrant,
    CreditRequest,
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Hello,
    Telemetry,
    decode,
    encode,
)

PORT = 19200
MOCK_PORTS = (19001, 19002)
SEATS = 256
KV_TOKENS = 4_000_000
ROUNDS = 3
PEPPER = "benchmark-pepper-benchmark-pepper"
# (body, connections, seconds, pause between tokens in microseconds)
SCENARIOS = {
    "c1": ("small", 1, 3, 0),
    "c64": ("small", 64, 4, 0),
    "s64": ("stream", 64, 5, 20_000),
    "32k": ("32k", 16, 3, 0),
    "512k": ("512k", 8, 3, 0),
}
CLUSTER = """
regions: [local]
gpu_types:
  - {name: h100-sxm, hbm_bytes: 80000000000, bandwidth_bytes_per_s: 3.35e12, flops_per_s: 9.89e14,
     price_micro_usd_per_hour: 3250000, price_source: benchmark, price_date: 2026-11-01}
models:
  - {name: mock, parameters: 8000000000, layers: 32, hidden_size: 4096, weights_bytes: 16000000000,
     kv_bytes_per_token: 131072, context_tokens_max: 1000000, load_ms: 1000,
     price_prompt_micro_usd_per_mtok: 1, price_cached_micro_usd_per_mtok: 1,
     price_completion_micro_usd_per_mtok: 1}
slo_classes:
  - {name: interactive, ttft_ms_max: 2000, tpot_ms_max: 100, e2e_ms_max: 600000,
     value_micro_usd: 10000, late_micro_usd_per_s: 500}
tenants:
  - {id: bench, name: Bench, tenant_class: gold, slo_class: interactive, budget_usd: 1000000.0}
nodes:
  - {id: n1, region: local, gpu_type: h100-sxm, gpus: 2, address: 127.0.0.1}
"""


def build(harness: Path, folder: Path) -> None:
    """Compile the harness's mock engine and load client, and write the bodies that they send."""
    for name in ("mockd", "loadc"):
        subprocess.run(
            ["cc", "-O2", "-w", "-o", str(folder / name), str(harness / f"src/{name}.c")],
            check=True,
        )
    words = "The quick brown fox jumps over the lazy dog near the river bank, in 1984.\n"
    contents = {
        "small": "Say hello to the world, please.",
        "stream": "Say hello to the world, please.",
        "32k": (words * 1000)[: 32 * 1024],
        "512k": (words * 10_000)[: 512 * 1024],
    }
    for name, content in contents.items():
        body: dict[str, object] = {
            "model": "mock",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": content},
            ],
            "temperature": 0,
            "max_tokens": 50 if name == "stream" else 8,
        }
        if name == "stream":
            body["stream"] = True
        (folder / f"{name}.json").write_text(json.dumps(body, separators=(",", ":")))


class Lender:
    """The agent of the mock engines: hello, beats, telemetry, and every credit that is asked for."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._url, self._user, self._password = url, user, password
        self._epoch = time.time_ns()

    async def run(self) -> None:
        client = await nats.connect(
            self._url,
            user=self._user,
            password=self._password,
            inbox_prefix=subjects.inbox_prefix("n1").encode(),
        )
        names = [f"mock-{port}" for port in MOCK_PORTS]
        hello = encode(
            Hello(
                node_id="n1",
                agent_epoch=self._epoch,
                version="0",
                engines=[
                    EngineFacts(
                        engine_id=name,
                        model="mock",
                        role="both",
                        port=port,
                        kind="mock",
                        state=EngineState.SERVING,
                        gpus=1,
                        seats=SEATS,
                        kv_tokens=KV_TOKENS,
                        block_tokens=16,
                        context_tokens_max=1_000_000,
                        started_ms=1,
                    )
                    for name, port in zip(names, MOCK_PORTS, strict=True)
                ],
            )
        )

        async def say_hello(_: object = None) -> None:
            await client.publish(subjects.node_subject("n1", "hello"), hello)

        async def lend(message: object) -> None:
            wants = decode(message.data, CreditRequest).wants  # type: ignore[attr-defined]
            grant = CreditGrant(node_id="n1", agent_epoch=self._epoch, ttl_ms=15_000, holds=wants)
            await message.respond(encode(grant))  # type: ignore[attr-defined]

        await client.subscribe(subjects.ROLL_CALL, cb=say_hello)
        await client.subscribe(subjects.node_subject("n1", "credits"), cb=lend)
        beat = encode(
            Beat(
                node_id="n1",
                agent_epoch=self._epoch,
                engine_states=dict.fromkeys(names, EngineState.SERVING),
            )
        )
        telemetry = encode(
            Telemetry(
                node_id="n1",
                agent_epoch=self._epoch,
                engines=[
                    EngineTelemetry(engine_id=name, running=0, waiting=0, kv_used_ratio=0.0)
                    for name in names
                ],
            )
        )
        await say_hello()
        try:
            while True:
                await client.publish(subjects.node_subject("n1", "beat"), beat)
                for _ in range(4):
                    await client.publish(subjects.node_subject("n1", "telemetry"), telemetry)
                    await asyncio.sleep(0.25)
        finally:
            await client.close()


@asynccontextmanager
async def replica(
    folder: Path,
    command: Sequence[str] = (sys.executable, "-m", "controlplane.main"),
    further: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """A running `headway serve` with the mock engines in its fleet, and a tenant's key.

    `command` serves instead, `further` is added to its environment.
    """
    postgres = EmbeddedPostgres(folder / "postgres")
    nats_home = folder / "nats"
    control, agent = control_user(nats_home), agent_user(nats_home, "n1")
    bus = EmbeddedNats(nats_home, [control, agent])
    database_url = await postgres.start()
    (folder / "database.url").write_text(database_url)
    nats_url = await bus.start()
    await asyncio.to_thread(migrate.upgrade, database_url)
    engine = make_engine(database_url)
    await apply_cluster(engine, parse_cluster(CLUSTER))
    _, key = await keys.create_tenant_key(engine, PEPPER.encode(), TenantId("bench"), "bench")
    await engine.dispose()
    lender = asyncio.create_task(Lender(nats_url, agent.name, agent.password).run())
    environment = {
        **os.environ,
        "DATABASE_URL": database_url,
        "NATS_URL": nats_url,
        "HEADWAY_NATS_USER": control.name,
        "HEADWAY_NATS_PASSWORD": control.password,
        "HEADWAY_PEPPER": PEPPER,
        "HEADWAY_PORT": str(PORT),
        "MALLOC_TRIM_THRESHOLD_": "536870912",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        **(further or {}),
    }
    log = (folder / "serve.log").open("wb")
    process = subprocess.Popen([*command], env=environment, stdout=log, stderr=log)
    try:
        await until_served(key, folder / "serve.log")
        yield process, key
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        lender.cancel()
        await asyncio.gather(lender, return_exceptions=True)
        await bus.stop()
        await postgres.stop()
        log.close()


async def until_served(key: str, log: Path) -> None:
    body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    async with httpx2.AsyncClient(trust_env=False, timeout=5.0) as client:
        for _ in range(150):
            try:
                response = await client.post(
                    f"http://127.0.0.1:{PORT}/v1/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {key}"},
                )
                if response.status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the replica did not serve:\n{log.read_text()[-2000:]}")


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def load(folder: Path, key: str, body: str, connections: int, seconds: int, pause_us: int) -> dict:
    """One run of the C client against the replica; its figures as it prints them."""
    arguments = [
        str(folder / "loadc"), "-p", str(PORT), "-c", str(connections), "-d", str(seconds),
        "-b", str(folder / f"{body}.json"), "-a", key, "-m", " tok",
    ]  # fmt: skip
    if pause_us:
        # Streams that start together would send their tokens together, which is the cheap case.
        arguments += ["-j", "1000"]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    figures: dict = json.loads(done.stdout)
    return figures


async def measure(folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with replica(folder) as (process, key):
        await asyncio.to_thread(load, folder, key, "small", 16, 2, 0)
        for name, (body, connections, seconds, pause_us) in SCENARIOS.items():
            for port in MOCK_PORTS:
                httpx2.post(
                    f"http://127.0.0.1:{port}/mock/config?itl_us={pause_us}&ttft_us=0",
                    content=b"{}",
                    trust_env=False,
                )
            costs, p50s, rates = [], [], []
            for _ in range(ROUNDS):
                before = cpu_s(process.pid)
                result = await asyncio.to_thread(
                    load, folder, key, body, connections, seconds, pause_us
                )
                spent = cpu_s(process.pid) - before
                if result["errors"]:
                    raise RuntimeError(f"{name}: {result['errors']} errors: {result['error']}")
                costs.append(spent / result["done"] * 1e6)
                p50s.append(float(result["lat"]["p50"]))
                rates.append(float(result["rps"]))
            figures[f"gateway_{name}_cpu_us"] = median(costs)
            figures[f"gateway_{name}_latency_p50_us"] = median(p50s)
            figures[f"gateway_{name}_rps"] = median(rates)
    return figures


def run() -> dict[str, float]:
    """Figures of the whole path; none without a harness."""
    harness = os.environ.get("HEADWAY_BENCH_HARNESS", "")
    if not harness or shutil.which("cc") is None:
        return {}
    folder = Path(tempfile.mkdtemp(prefix="headway-bench-"))
    folder.chmod(0o755)
    mocks: list[subprocess.Popen[bytes]] = []
    try:
        build(Path(harness), folder)
        mocks = [subprocess.Popen([str(folder / "mockd"), str(port)]) for port in MOCK_PORTS]
        return asyncio.run(measure(folder))
    finally:
        for mock in mocks:
            mock.kill()
            mock.wait()
        shutil.rmtree(folder, ignore_errors=True)
