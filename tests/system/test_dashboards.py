"""No dead panel: a whole Headway under a load with everything in it, read by a real Prometheus.

Each query of panels, rules and variables must answer, and exemplars must lead back to the calls that made them.
"""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx2
import openai
import promql_parser
import pytest
import yaml
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store.cluster import ClusterDocument, parse_cluster
from policies.load import files_of
from tests.dashboard_queries import (
    RULES,
    Asked,
    metrics_of,
    panel_queries,
    record_queries,
    rules,
    variable_queries,
)
from tests.ports import free_port

pytestmark = [
    pytest.mark.fault,
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs a Prometheus: on Debian `apt-get install prometheus`",
    ),
]

# Queries that a fleet like this one can not answer, by what they ask for.
UNANSWERED: Final[dict[str, str]] = {
    "headway_gpu_": "simulated engines run on nodes without an NVIDIA driver",
    "headway_plan_moves_total": "the planner proposes; nobody has told it to move engines",
    "headway_kv_gaps_total": "nothing that engines told of their caches was lost",
}
SCRAPE_S: Final = 1
STEP_S: Final = 1
ROUNDS: Final = 2
DEATHS_MAX: Final = 4
READY_S_MAX: Final = 60.0
# Ended workflows are counted, sums read and rules asked within this time.
SETTLED_S: Final = 6.0
TRACES: Final = tuple(f"{number:032x}" for number in range(0xABC0, 0xABC8))
TENANTS: Final = {"acme": "gold", "brook": "silver", "cumulus": "bronze", "poor": "bronze"}
# One engine of two loses its connection before it answers, and the queue is short: retries, breakers, refusals.
ENGINES: Final[Mapping[str, Mapping[str, object]]] = {
    "small-a": {"model": "small", "options": {"max_num_seqs": 6, "speedup": 5.0}},
    "small-b": {"model": "small", "options": {"max_num_seqs": 6, "speedup": 5.0}},
    "frail-a": {"model": "frail", "options": {"fault_drop_before_first_byte": True}},
    "frail-b": {"model": "frail", "options": {"speedup": 5.0}},
    "pair-p": {"model": "pair", "role": "prefill", "options": {"speedup": 5.0}},
    "pair-d": {"model": "pair", "role": "decode", "options": {"speedup": 5.0}},
}


def document() -> ClusterDocument:
    models = sorted({str(engine["model"]) for engine in ENGINES.values()})
    content = {
        "regions": ["eu-west"],
        "gpu_types": [
            {
                "name": "h100", "hbm_bytes": 80_000_000_000, "bandwidth_bytes_per_s": 3.35e12,
                "flops_per_s": 9.89e14, "price_micro_usd_per_hour": 3_250_000, "price_source": "test",
                "price_date": "2026-11-01",
            }
        ],
        "models": [
            {
                "name": model, "parameters": 8_000_000_000, "layers": 32, "hidden_size": 4_096,
                "weights_bytes": 16_000_000_000, "kv_bytes_per_token": 131_072,
                "context_tokens_max": 8_192, "load_ms": 200, "price_prompt_micro_usd_per_mtok": 200_000,
                "price_cached_micro_usd_per_mtok": 50_000, "price_completion_micro_usd_per_mtok": 600_000,
            }
            for model in models
        ],
        "slo_classes": [
            {
                "name": "interactive", "ttft_ms_max": 2_000, "tpot_ms_max": 100, "e2e_ms_max": 60_000,
                "value_micro_usd": 10_000, "late_micro_usd_per_s": 500,
            }
        ],
        "tenants": [
            {
                "id": tenant, "name": tenant, "tenant_class": tenant_class, "slo_class": "interactive",
                "budget_usd": 0.000001 if tenant == "poor" else 100.0,
            }
            for tenant, tenant_class in TENANTS.items()
        ],
        "nodes": [
            {
                "id": "n1", "region": "eu-west", "gpu_type": "h100", "gpus": len(ENGINES),
                "address": "127.0.0.1",
                "engines": [
                    {"engine_id": name, "kind": "simulated", "role": "both", "gpus": 1, **engine}
                    for name, engine in ENGINES.items()
                ],
            }
        ],
    }  # fmt: skip
    return parse_cluster(yaml.safe_dump(content))


class WatchedCluster(LocalCluster):
    """A local cluster with a short queue, a quick planner, and stores of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(data_dir=folder / "data", port=free_port(), cluster=document())
        self.database_url = self.nats_url = ""

    def serve_environment(self) -> dict[str, str]:
        return {
            **super().serve_environment(),
            "HEADWAY_QUEUE_CALLS_MAX": "6",
            "HEADWAY_QUEUE_WAIT_MS_MAX": "3000",
            "HEADWAY_ENGINE_RAMP_S": "0",
            "HEADWAY_POOL_RAMP_S": "0",
            "HEADWAY_PLANNER_INTERVAL_S": "2",
            "HEADWAY_PLANNER_SOLVE_S_MAX": "1",
        }


class Prometheus:
    """A real one, in a folder of its own, with the committed rules asked every second."""

    def __init__(self, folder: Path, target: str, key: str) -> None:
        """`key` is an operator's: without one no tenant is named."""
        self._folder = folder
        self._key = key
        self._target = target
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port}/api/v1/", trust_env=False, timeout=30
        )

    async def start(self) -> None:
        self._folder.mkdir()
        for path in RULES:
            groups = yaml.safe_load(path.read_text())
            for group in groups["groups"]:
                group.pop("interval", None)
            (self._folder / path.name).write_text(yaml.safe_dump(groups))
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": [path.name for path in RULES],
            "scrape_configs": [
                {
                    "job_name": "headway",
                    "static_configs": [{"targets": [self._target]}],
                    "authorization": {"credentials": self._key},
                }
            ],
        }
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--enable-feature=exemplar-storage",
                ],
                cwd=self._folder, stderr=log, stdout=log,
            )  # fmt: skip
        async with asyncio.timeout(READY_S_MAX):
            while True:
                with suppress(httpx2.TransportError):
                    if (await self.http.get("/-/ready", timeout=1)).status_code < 500:
                        return
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        await self.http.aclose()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)

    async def ask(self, path: str, **parameters: Any) -> Any:
        response = await self.http.get(path, params=parameters)
        answer = response.json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WatchedCluster]:
    made = WatchedCluster(tmp_path_factory.mktemp("dashboards"))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture(scope="module")
async def seen(
    cluster: WatchedCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Prometheus, float, float]]:
    """Prometheus, and from when to when it saw the load (Unix seconds)."""
    folder = tmp_path_factory.mktemp("prometheus") / "run"
    prometheus = Prometheus(folder, cluster.url.removeprefix("http://"), cluster.operator_key)
    try:
        await prometheus.start()
        began_s = time.time()
        await Load(cluster).play()
        await asyncio.sleep(SETTLED_S)
        yield prometheus, began_s, time.time()
    finally:
        await prometheus.stop()


class Load:
    """Everything that a dashboard can show, within half a minute."""

    def __init__(self, cluster: WatchedCluster) -> None:
        self._cluster = cluster
        self._clients = {
            tenant: AsyncOpenAI(
                base_url=cluster.url + "/v1", api_key=cluster.tenant_keys[tenant], max_retries=0
            )
            for tenant in TENANTS
        }
        self._number = 0
        self._http = httpx2.AsyncClient(base_url=cluster.url, trust_env=False, timeout=30)

    async def play(self) -> None:
        try:
            await self._play()
        finally:
            for client in self._clients.values():
                await client.close()
            await self._http.aclose()

    async def _play(self) -> None:
        await self._try_policy()
        for number in range(ROUNDS):
            self._number = number
            async with asyncio.TaskGroup() as together:
                together.create_task(self._workflows())
                together.create_task(self._crowd())
                together.create_task(self._broken_engines())
            await self._death()
            await asyncio.sleep(2 * SCRAPE_S)

    async def _try_policy(self) -> None:
        """A candidate in shadow that would deny bronze calls."""
        rule = {
            "name": "no-bronze", "phase": "admit", "when": 'tenant.class == "bronze"', "deny": True,
            "message": "made up for a test",
            "tests": [
                {"name": "fires", "given": {"tenant.class": "bronze"}, "fires": True},
                {"name": "rests", "given": {"tenant.class": "gold"}, "fires": False},
            ],
        }  # fmt: skip
        document = {
            "kind": "rules", "version": 1, "name": "made-up", "level": "enforce", "rules": [rule],
        }  # fmt: skip
        files = {**files_of(None), "made-up.yaml": yaml.safe_dump(document)}
        response = await self._http.post(
            "/operator/v1/policies/revisions",
            headers={"authorization": f"Bearer {self._cluster.operator_key}"},
            json={"files": dict(files), "reason": "to see what it changes"},
        )
        assert response.status_code == 201, response.text

    async def _workflows(self) -> None:
        """One that succeeds, one that fails, one that is cancelled, one that expires half done."""
        await self._workflow("acme", "outcome", {"outcome": "success"})
        await self._workflow("acme", "outcome", {"outcome": "failure"})
        await self._workflow("brook", "cancel", None)
        await self._workflow("cumulus", "", None, deadline_s=2.5)

    async def _workflow(
        self, tenant: str, end: str, body: object, deadline_s: float = 60.0
    ) -> None:
        headers = {"authorization": f"Bearer {self._cluster.tenant_keys[tenant]}"}
        made = await self._http.post(
            "/v1/workflows",
            headers=headers,
            json={
                "kind": "test", "scope": "research", "steps_expected": 2, "deadline_s": deadline_s,
                "budget_usd": 1.0,
            },
        )  # fmt: skip
        assert made.status_code == 201, made.text
        name = made.json()["id"]
        for step in range(2 if end else 1):
            await self._chat(
                tenant, "pair", 16, {"x-headway-workflow": name, "x-headway-step": str(step)}
            )
        if end:
            ended = await self._http.post(f"/v1/workflows/{name}/{end}", headers=headers, json=body)
            assert ended.status_code == 200, ended.text

    async def _crowd(self) -> None:
        """More than there are seats, of all tenants: some run, some wait, some are refused."""
        calls = [
            self._chat(
                ("acme", "brook", "cumulus")[at % 3],
                "small",
                120,
                {
                    "traceparent": f"00-{TRACES[at % len(TRACES)]}-00000000000000{self._number + 1:02x}-01"
                },
                words=f"call {at} {self._number} ",
            )
            for at in range(24)
        ]
        calls += [self._chat("poor", "small", 16) for _ in range(3)]
        calls.append(self._leave())
        await asyncio.gather(*calls)

    async def _broken_engines(self) -> None:
        # Different from the first word on: what is cached somewhere goes there again.
        for turn in range(5):
            await asyncio.gather(
                *(
                    self._chat("acme", "frail", 16, words=f"{self._number} {turn} {at} ")
                    for at in range(6)
                )
            )

    async def _leave(self) -> None:
        """A client that goes away within its stream."""
        with suppress(openai.APIError):
            stream = await self._clients["acme"].chat.completions.create(
                model="pair", messages=[{"role": "user", "content": "never mind"}],
                max_tokens=2_000, stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in stream:
                break
            await stream.close()

    async def _death(self) -> None:
        """An engine is killed under its streams until one went on elsewhere; its agent starts it again."""
        before = await self._sum("headway_stream_resumes_total", 'outcome="resumed"')
        for _ in range(DEATHS_MAX):
            streams = [
                asyncio.create_task(
                    self._chat(
                        "acme", "small", 6_000, words=f"number {at} ",
                        more={"ignore_eos": True, "temperature": 0.0},
                    )
                )
                for at in range(4)
            ]  # fmt: skip
            victim = await self._victim(streams)
            if victim:
                os.kill(self._cluster.engine_pids()[victim], signal.SIGKILL)
            await asyncio.gather(*streams)
            async with asyncio.timeout(READY_S_MAX):
                while await self._sum("headway_pool_engines_accepting", 'model="small"') < 2:
                    await asyncio.sleep(0.2)
            if await self._sum("headway_stream_resumes_total", 'outcome="resumed"') > before:
                return
        pytest.fail(f"no stream went on elsewhere in {DEATHS_MAX} deaths of its engine")

    async def _victim(self, streams: list[asyncio.Task[None]]) -> str:
        """The engine that has most of the streams; empty when all have ended."""
        while not all(stream.done() for stream in streams):
            taken = {
                name: await self._sum("headway_engine_seats_taken", f'engine="{name}"')
                for name in ("small-a", "small-b")
            }
            if max(taken.values()) > 1:
                return max(taken, key=taken.__getitem__)
            await asyncio.sleep(0.1)
        return ""

    async def _sum(self, name: str, label: str) -> float:
        """The sum of the series of a metric that have a label, read off the replica itself."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(name + "{") and label in line
        )

    async def _chat(
        self,
        tenant: str,
        model: str,
        tokens: int,
        headers: Mapping[str, str] | None = None,
        *,
        words: str = "hello ",
        more: Mapping[str, object] | None = None,
    ) -> None:
        """A stream, read to its end; refusals and failures are a part of the load."""
        with suppress(openai.APIError):
            stream = await self._clients[tenant].chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": words * 60}],
                max_tokens=tokens,
                stream=True,
                extra_headers=dict(headers or {}),
                extra_body=dict(more or {}),
            )
            async for _ in stream:
                pass


def reason_to_be_empty(expr: str) -> str:
    return next((why for name, why in UNANSWERED.items() if name in expr), "")


async def test_every_query_is_answered(seen: tuple[Prometheus, float, float]) -> None:
    prometheus, began_s, ended_s = seen
    empty: list[str] = []
    answered: list[str] = []
    for asked in [*panel_queries(), *record_queries(), *alert_selectors()]:
        data = await prometheus.ask(
            "query_range", query=asked.expr, start=began_s, end=ended_s, step=STEP_S
        )
        has_number = any(
            math.isfinite(float(value))
            for series in data["result"]
            for _, value in series["values"]
        )
        if has_number:
            answered.append(asked.where)
        elif not reason_to_be_empty(asked.expr):
            empty.append(f"{asked.where}: {asked.expr}")
    assert not empty, "\n".join(empty)
    assert len(answered) > len(panel_queries())
    for where, metric, label in variable_queries():
        values = await prometheus.ask(
            f"label/{label}/values", **{"match[]": metric, "start": began_s, "end": ended_s}
        )
        assert values, where


def alert_selectors() -> list[Asked]:
    """The metrics that alerts read, one by one: an alert that does not fire is empty as a whole."""
    found: dict[str, Asked] = {}
    for rule in rules():
        if "alert" in rule:
            for name in metrics_of(promql_parser.parse(rule["expr"])):
                found.setdefault(name, Asked(rule["alert"], name))
    return list(found.values())


async def test_every_rule_is_evaluated(seen: tuple[Prometheus, float, float]) -> None:
    prometheus, *_ = seen
    told = await prometheus.ask("rules")
    found = [rule for group in told["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    for rule in found:
        assert rule["health"] == "ok", rule


async def test_exemplars_lead_to_the_calls_that_made_them(
    seen: tuple[Prometheus, float, float],
) -> None:
    prometheus, began_s, ended_s = seen
    for name in (
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_request_duration_seconds_bucket",
    ):
        data = await prometheus.ask("query_exemplars", query=name, start=began_s, end=ended_s)
        traces = {
            exemplar["labels"]["trace_id"] for series in data for exemplar in series["exemplars"]
        }
        assert traces, name
        assert traces <= set(TRACES), name
