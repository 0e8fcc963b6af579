"""Every reason for which a call can be refused, over HTTP against a whole Headway: what its client is told."""

import asyncio
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx2
import openai
import pytest
import yaml
from openai import AsyncOpenAI
from sqlalchemy import make_url

from cli.processes import LocalCluster
from controlplane.domain.decision import Reason
from controlplane.store.cluster import ClusterDocument, parse_cluster
from policies.load import files_of
from tests.ports import free_port

from .conftest import check_invariants, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

UNREACHED: Final[dict[Reason, str]] = {
    Reason.INTERNAL_ERROR: "only a mistake of ours answers so, and no call is known that meets one",
}

HELLO: Final = [{"role": "user", "content": "hello, how are you today?"}]
CHAT: Final = "/v1/chat/completions"
CONTEXT_TOKENS_MAX: Final = 4_096
QUEUE_WAIT_MS_MAX: Final = 1_000
LOAD_MS: Final = 20_000
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
API_BODY_BYTES_MAX: Final = 1024 * 1024
MS: Final = 1_000
# What a call on an idle machine takes at the very most; estimates may be off by it.
SLACK_MS: Final = 10_000
ID: Final = re.compile(r"req-[0-9a-f]{8}-[0-9a-f]+")

# One engine each, by model, with a fault of its own; `absent` has none and `cold` never has its weights.
ENGINES: Final[dict[str, dict[str, float | bool]]] = {
    "plain": {"speedup": 5.0},
    "single": {"max_num_seqs": 1, "speedup": 0.5},
    "broken": {"fault_error_rate": 1.0},
    "dropping": {"fault_drop_before_first_byte": True},
    "busy": {"fault_refuse": True},
    "hung": {"fault_hang": True},
    "cut": {"fault_cut_after_tokens": 3},
}
MODELS: Final = (*ENGINES, "absent", "cold", "secret")
TENANTS: Final = ("acme", "denied", "lost", "shed", "later", "poor")
EVERY_ENGINE: Final = {
    "kv_tokens": 65_536,
    "context_tokens_max": CONTEXT_TOKENS_MAX,
    "max_num_seqs": 16,
}


def document() -> ClusterDocument:
    engines = [
        {
            "engine_id": f"n1-{model}", "kind": "simulated", "model": model, "role": "both", "gpus": 1,
            "options": {**EVERY_ENGINE, **options},
        }
        for model, options in ENGINES.items()
    ]  # fmt: skip
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
                "context_tokens_max": CONTEXT_TOKENS_MAX, "load_ms": LOAD_MS if model == "cold" else 10,
                "price_prompt_micro_usd_per_mtok": 200_000,
                "price_cached_micro_usd_per_mtok": 50_000,
                "price_completion_micro_usd_per_mtok": 600_000,
            }
            for model in MODELS
        ],
        "slo_classes": [
            {
                "name": "interactive", "ttft_ms_max": 2_000, "tpot_ms_max": 100, "e2e_ms_max": 60_000,
                "value_micro_usd": 10_000, "late_micro_usd_per_s": 500,
            }
        ],
        "tenants": [
            {
                "id": tenant, "name": tenant, "tenant_class": "gold", "slo_class": "interactive",
                "budget_usd": 0.000001 if tenant == "poor" else 1_000.0,
            }
            for tenant in TENANTS
        ],
        "nodes": [
            {
                "id": "n1", "region": "eu-west", "gpu_type": "h100", "gpus": len(ENGINES) + 1,
                "address": "127.0.0.1", "engines": engines,
            }
        ],
    }  # fmt: skip
    return parse_cluster(yaml.safe_dump(content))


def opening() -> datetime:
    """The full hour from which the calls of `later` may run: an hour ahead at the least, two at most."""
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=2)


def rule_of(tenant: str, effect: Mapping[str, object]) -> dict[str, object]:
    """A rule `for-TENANT` with this effect on every first step of the tenant."""
    return {
        "name": f"for-{tenant}", "phase": "admit", "when": f'tenant.id == "{tenant}" && workflow.step == 0',
        **effect,
        "message": "made up for a test",
        "tests": [
            {"name": "fires", "given": {"tenant.id": tenant}, "fires": True},
            {"name": "rests", "given": {"tenant.id": "acme"}, "fires": False},
        ],
    }  # fmt: skip


def write_policies(folder: Path, opens: datetime) -> Path:
    """The bundle that ships, with rules of the test's own, a forbidden model and narrow chats."""
    documents = {name: yaml.safe_load(text) for name, text in files_of(None).items()}
    documents["entitlements.yaml"]["rules"].append(
        {"name": "nobody-sees-secret", "effect": "deny", "models": ["secret"]}
    )
    documents["scopes.yaml"]["scopes"]["chat"]["fan_out_max"] = 1
    window = [opens.hour, (opens.hour + 1) % 24]
    documents["made-up.yaml"] = {
        "kind": "rules", "version": 1, "name": "made-up", "level": "enforce",
        "rules": [
            rule_of("denied", {"deny": True}),
            rule_of("lost", {"route": {"model": "nowhere"}}),
            rule_of("shed", {"shed": {"retry_after_ms": 4_321}}),
            rule_of("later", {"defer": {"until": {"hours": window}}}),
        ],
    }  # fmt: skip
    folder.mkdir()
    for name, content in documents.items():
        (folder / name).write_text(yaml.safe_dump(content))
    return folder


class Cable:
    """A TCP line from the replica to PostgreSQL that can be cut and mended."""

    def __init__(self) -> None:
        self.port = free_port()
        self.target = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self.port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as both:
            both.create_task(self._carry(reader, back))
            both.create_task(self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()


class OutcomeCluster(LocalCluster):
    """A local cluster with policies of its own, a queue of one call, and its database behind a cable."""

    def __init__(self, folder: Path, cable: Cable, policies: Path) -> None:
        super().__init__(data_dir=folder / "data", port=free_port(), cluster=document())
        # Stores of its own, whatever the environment names.
        self.database_url = self.nats_url = ""
        self._cable = cable
        self._policies = policies

    def serve_environment(self) -> dict[str, str]:
        url = make_url(self.database_url)
        assert url.port is not None
        self._cable.target = url.port
        return {
            **super().serve_environment(),
            "DATABASE_URL": url.set(port=self._cable.port).render_as_string(hide_password=False),
            "HEADWAY_POLICIES_PATH": str(self._policies),
            "HEADWAY_QUEUE_CALLS_MAX": "1",
            "HEADWAY_QUEUE_WAIT_MS_MAX": str(QUEUE_WAIT_MS_MAX),
            "HEADWAY_ENGINE_RAMP_S": "0",
            "HEADWAY_POOL_RAMP_S": "0",
        }


@dataclass(frozen=True, slots=True)
class World:
    cluster: OutcomeCluster
    cable: Cable
    http: httpx2.AsyncClient
    opens: datetime

    def headers(self, who: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """`who` is a tenant, or a key as it is."""
        key = self.cluster.tenant_keys.get(who, who)
        return {"authorization": f"Bearer {key}", **(more or {})}

    async def chat(
        self, model: str = "plain", who: str = "acme", headers: Mapping[str, str] | None = None, **more: Any
    ) -> httpx2.Response:  # fmt: skip
        body = {"model": model, "messages": HELLO, "max_tokens": 16, **more}
        return await self.http.post(CHAT, headers=self.headers(who, headers), json=body)

    @asynccontextmanager
    async def held(
        self, model: str = "plain", who: str = "acme", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[None]:
        """While a long stream is under way."""
        body = {**LONG, "model": model}
        sent = self.headers(who, headers)
        async with self.http.stream("POST", CHAT, headers=sent, json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            yield
        await until_quiet(self.cluster)

    async def api(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The operator's API; what it answers."""
        response = await self.http.request(
            method, f"/operator/v1/{path}", headers=self.headers(self.cluster.operator_key), json=body
        )  # fmt: skip
        assert response.is_success, response.text
        document: dict[str, Any] = response.json()
        return document

    async def key(self, **limits: int) -> tuple[str, str]:
        """A further key of `acme`: its id, and the key."""
        made = await self.api("POST", "keys", {"name": "test", "tenant_id": "acme", **limits})
        return made["id"], made["key"]

    async def workflow(self, **more: object) -> str:
        """A workflow of `acme`; its id."""
        body = {
            "kind": "test", "scope": "chat", "steps_expected": 3, "deadline_s": 60.0, **more
        }  # fmt: skip
        response = await self.http.post("/v1/workflows", headers=self.headers("acme"), json=body)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    async def of_workflow(self, method: str, path: str, body: object = None) -> httpx2.Response:
        return await self.http.request(
            method, f"/v1/workflows{path}", headers=self.headers("acme"), json=body
        )

    @asynccontextmanager
    async def without_database(self) -> AsyncIterator[None]:
        await self.cable.cut()
        try:
            yield
        finally:
            await self.cable.mend()
            async with asyncio.timeout(20):
                while (await self.http.get("/health/ready")).status_code != 200:
                    await asyncio.sleep(0.05)


LONG: Final = {"messages": HELLO, "max_tokens": 3_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
async def world(anyio_backend: str) -> AsyncIterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="headway-outcomes-"))
    # PostgreSQL's own account must be able to reach it.
    folder.chmod(0o755)
    cable, opens = Cable(), opening()
    await cable.mend()
    cluster = OutcomeCluster(folder, cable, write_policies(folder / "policies", opens))
    try:
        await cluster.start()
        async with httpx2.AsyncClient(base_url=cluster.url, trust_env=False, timeout=20.0) as http:
            made = World(cluster, cable, http, opens)
            await load_slowly(made)
            yield made
            await check_invariants(cluster)
    finally:
        await cluster.stop()
        await cable.cut()
        shutil.rmtree(folder, ignore_errors=True)


async def load_slowly(world: World) -> None:
    """Start the engine of `cold`, which takes longer to load its weights than the test lasts."""
    options = {**EVERY_ENGINE, "load_ms": 600_000}
    wanted = {"node_id": "n1", "kind": "simulated", "model": "cold", "gpus": 1, "options": options}
    await world.api("POST", "engines/n1-cold/load", wanted)
    async with asyncio.timeout(20):
        while True:
            engines = (await world.api("GET", "engines"))["data"]
            if any(row["id"] == "n1-cold" and row["state"] == "starting" for row in engines):
                return
            await asyncio.sleep(0.05)


# ---------------------------------------------------------------- how each reason is reached


async def raw_exchange(world: World, sent: bytes) -> httpx2.Response:
    """Bytes that no client library would send, and what comes back."""
    port = httpx2.URL(world.cluster.url).port
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in head[1:] if line]
    response = httpx2.Response(
        int(head[0].split()[1]), headers=headers, content=await reader.read()
    )
    writer.close()
    return response


async def wrong_key(world: World) -> httpx2.Response:
    return await world.chat(who="hw-tenant-nobody")


async def wrong_key_of_workflows(world: World) -> httpx2.Response:
    return await world.http.get("/v1/workflows", headers=world.headers("hw-tenant-nobody"))


async def denied_by_rule(world: World) -> httpx2.Response:
    return await world.chat(who="denied")


async def denied_by_entitlement(world: World) -> httpx2.Response:
    return await world.chat("secret")


async def routed_to_nowhere(world: World) -> httpx2.Response:
    return await world.chat(who="lost")


async def malformed(world: World) -> httpx2.Response:
    return await world.http.post(CHAT, headers=world.headers("acme"), content=b'{"model": ')


async def refused_member(world: World) -> httpx2.Response:
    return await world.chat(kv_transfer_params={"do_remote_prefill": True})


async def unknown_member_of_workflow(world: World) -> httpx2.Response:
    return await world.of_workflow("POST", "", {"kind": "test", "colour": "red"})


async def malformed_head(world: World) -> httpx2.Response:
    return await raw_exchange(world, b"NONSENSE\r\n\r\n")


async def large_body(world: World) -> httpx2.Response:
    content = b" " * (BODY_BYTES_MAX + 1)
    return await world.http.post(CHAT, headers=world.headers("acme"), content=content)


async def large_body_of_workflows(world: World) -> httpx2.Response:
    content = b" " * (API_BODY_BYTES_MAX + 1)
    headers = world.headers("acme", {"content-type": "application/json"})
    return await world.http.post("/v1/workflows", headers=headers, content=content)


async def large_head(world: World) -> httpx2.Response:
    return await raw_exchange(world, b"POST %s HTTP/1.1\r\nx: %s" % (CHAT.encode(), b"x" * 40_000))


async def unknown_path(world: World) -> httpx2.Response:
    return await world.http.get("/v1/nothing", headers=world.headers("acme"))


async def wrong_method(world: World) -> httpx2.Response:
    return await world.http.get(CHAT, headers=world.headers("acme"))


async def wrong_method_of_workflows(world: World) -> httpx2.Response:
    return await world.of_workflow("DELETE", "")


async def unknown_model(world: World) -> httpx2.Response:
    return await world.chat("nowhere")


async def unknown_model_looked_at(world: World) -> httpx2.Response:
    return await world.http.get("/v1/models/nowhere", headers=world.headers("acme"))


async def unknown_workflow(world: World) -> httpx2.Response:
    return await world.chat(headers={"x-headway-workflow": "wf-none"})


async def unknown_workflow_looked_at(world: World) -> httpx2.Response:
    return await world.of_workflow("GET", "/wf-none")


async def ended_workflow(world: World) -> httpx2.Response:
    workflow = await world.workflow()
    assert (await world.of_workflow("POST", f"/{workflow}/cancel")).status_code == 200
    return await world.chat(headers={"x-headway-workflow": workflow})


async def contrary_outcome(world: World) -> httpx2.Response:
    path = f"/{await world.workflow()}/outcome"
    assert (await world.of_workflow("POST", path, {"outcome": "success"})).status_code == 200
    return await world.of_workflow("POST", path, {"outcome": "failure"})


async def change_of_what_moved_on(world: World) -> httpx2.Response:
    headers = {**world.headers(world.cluster.operator_key), "if-match": '"of-another-time"'}
    path = "/operator/v1/tenants/acme"
    return await world.http.patch(path, headers=headers, json={"budget_usd": 1_000.0})


async def long_prompt(world: World) -> httpx2.Response:
    messages = [{"role": "user", "content": "word " * 3 * CONTEXT_TOKENS_MAX}]
    return await world.chat(messages=messages)


async def tenants_budget(world: World) -> httpx2.Response:
    return await world.chat(who="poor")


async def poor_key(world: World, unit: str = "") -> str:
    key_id, key = await world.key()
    await world.api("PATCH", f"budgets/key:{key_id}{unit}", {"limit": 1})
    return key


async def keys_budget(world: World) -> httpx2.Response:
    return await world.chat(who=await poor_key(world))


async def keys_token_budget(world: World) -> httpx2.Response:
    return await world.chat(who=await poor_key(world, ":tokens"))


async def workflows_budget(world: World) -> httpx2.Response:
    workflow = await world.workflow(budget_usd=0.000001)
    return await world.chat(headers={"x-headway-workflow": workflow})


async def workflows_token_budget(world: World) -> httpx2.Response:
    workflow = await world.workflow(budget_tokens=1)
    return await world.chat(headers={"x-headway-workflow": workflow})


async def until_limited(world: World, key: str, calls_max: int) -> httpx2.Response:
    for _ in range(calls_max):
        response = await world.chat(who=key, max_tokens=1)
        if response.status_code != 200:
            return response
    pytest.fail(f"{calls_max} calls were let in")


async def requests_per_minute(world: World) -> httpx2.Response:
    """At the time that is told there is room again."""
    _, key = await world.key(requests_per_minute=60)
    response = await until_limited(world, key, 90)
    assert response.headers["x-ratelimit-limit-requests"] == "60"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.headers["x-ratelimit-reset-requests"].endswith("s")
    await asyncio.sleep(int(response.headers["retry-after-ms"]) / MS)
    again = await world.chat(who=key, max_tokens=1)
    assert again.status_code == 200, again.text
    return response


async def tokens_per_minute(world: World) -> httpx2.Response:
    _, key = await world.key(tokens_per_minute=60)
    response = await until_limited(world, key, 10)
    assert response.headers["x-ratelimit-limit-tokens"] == "60"
    assert int(response.headers["x-ratelimit-remaining-tokens"]) < 60
    assert response.headers["x-ratelimit-reset-tokens"].endswith("s")
    return response


async def calls_in_flight(world: World) -> httpx2.Response:
    _, key = await world.key(calls_in_flight_max=1, requests_per_minute=1_000)
    async with world.held(who=key):
        response = await world.chat(who=key)
    assert response.headers["x-ratelimit-limit-requests"] == "1000"
    return response


async def shed_by_rule(world: World) -> httpx2.Response:
    return await world.chat(who="shed")


async def shed_by_load(world: World) -> httpx2.Response:
    async with world.held("single"):
        return await world.chat("single", max_tokens=3_000)


async def shed_for_good(world: World) -> httpx2.Response:
    """Room comes later than the workflow's deadline, so there is no time at which to come back."""
    workflow = await world.workflow(deadline_s=2.0)
    headers = {"x-headway-workflow": workflow}
    async with world.held("single"):
        return await world.chat("single", max_tokens=3_000, headers=headers)


async def deferred(world: World) -> httpx2.Response:
    response = await world.chat(who="later", headers={"x-headway-deadline-ms": "200"})
    told_ms = int(response.headers["retry-after-ms"])
    comes_at = datetime.now(UTC) + timedelta(milliseconds=told_ms)
    assert abs(comes_at - world.opens) < timedelta(milliseconds=SLACK_MS)
    return response


async def queue_full(world: World) -> httpx2.Response:
    """Of two postponed calls one has the only place in the queue."""
    headers = {"x-headway-deadline-ms": str(3 * HOUR_MS)}
    calls = [asyncio.create_task(world.chat(who="later", headers=headers)) for _ in range(2)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    for call in waiting:
        call.cancel()
    await asyncio.wait(calls)
    await until_quiet(world.cluster)
    [refused] = done
    return refused.result()


async def no_time_left(world: World) -> httpx2.Response:
    return await world.chat(headers={"x-headway-deadline-ms": "1"})


async def fanned_out(world: World) -> httpx2.Response:
    headers = {"x-headway-workflow": await world.workflow()}
    async with world.held(headers=headers):
        return await world.chat(headers=headers)


async def no_engine(world: World) -> httpx2.Response:
    return await world.chat("absent")


async def busy_engine(world: World) -> httpx2.Response:
    return await world.chat("busy")


async def loading(world: World) -> httpx2.Response:
    return await world.chat("cold")


async def unknown_key_without_database(world: World) -> httpx2.Response:
    _, key = await world.key()
    async with world.without_database():
        return await world.chat(who=key)


async def workflows_without_database(world: World) -> httpx2.Response:
    await world.chat()
    async with world.without_database():
        return await world.of_workflow("GET", "")


async def failing_engine(world: World) -> httpx2.Response:
    return await world.chat("broken")


async def dropping_engine(world: World) -> httpx2.Response:
    return await world.chat("dropping", stream=True)


async def silent_engine(world: World) -> httpx2.Response:
    return await world.chat("hung", headers={"x-headway-deadline-ms": "500"})


async def cut_stream(world: World) -> httpx2.Response:
    return await world.chat("cut", stream=True)


async def key_in_use(world: World) -> httpx2.Response:
    headers = {"idempotency-key": secrets.token_hex(8)}
    async with world.held(headers=headers):
        return await world.chat(headers=headers, **LONG)


async def key_of_another_body(world: World) -> httpx2.Response:
    headers = {"idempotency-key": secrets.token_hex(8)}
    assert (await world.chat(headers=headers)).status_code == 200
    return await world.chat(headers=headers, max_tokens=17)


async def answer_too_large_to_keep(world: World) -> httpx2.Response:
    headers = {"idempotency-key": secrets.token_hex(8)}
    large = {"n": 8, "max_tokens": 3_000, "ignore_eos": True, "stream": True}
    first = await world.chat(headers=headers, **large)
    assert first.status_code == 200
    assert len(first.content) > 1024 * 1024
    return await world.chat(headers=headers, **large)


@dataclass(frozen=True, slots=True)
class Case:
    """`wait_ms` bounds the estimate that is told, None: none is. `rule` is the policy rule that is named.

    `has_id` is false for what is refused below or beside the hot path, where no decision is made.
    """

    reason: Reason
    reach: Callable[[World], Awaitable[httpx2.Response]]
    status: int
    should_retry: bool = False
    wait_ms: tuple[int, int] | None = None
    rule: str | None = None
    has_id: bool = True
    is_in_stream: bool = False


HOUR_MS: Final = 3_600_000
CASES: Final = (
    Case(Reason.INVALID_API_KEY, wrong_key, 401),
    Case(Reason.INVALID_API_KEY, wrong_key_of_workflows, 401, has_id=False),
    Case(Reason.FORBIDDEN_BY_POLICY, denied_by_rule, 403, rule="made-up/for-denied"),
    Case(Reason.FORBIDDEN_BY_POLICY, denied_by_entitlement, 403, rule="nobody-sees-secret"),
    Case(Reason.POLICY_ERROR, routed_to_nowhere, 500, rule="made-up/for-lost"),
    Case(Reason.INVALID_REQUEST, malformed, 400),
    Case(Reason.INVALID_REQUEST, refused_member, 400),
    Case(Reason.INVALID_REQUEST, unknown_member_of_workflow, 400, has_id=False),
    Case(Reason.INVALID_REQUEST, malformed_head, 400, has_id=False),
    Case(Reason.REQUEST_TOO_LARGE, large_body, 413),
    Case(Reason.REQUEST_TOO_LARGE, large_body_of_workflows, 413, has_id=False),
    Case(Reason.REQUEST_TOO_LARGE, large_head, 431, has_id=False),
    Case(Reason.NOT_FOUND, unknown_path, 404, has_id=False),
    Case(Reason.METHOD_NOT_ALLOWED, wrong_method, 405),
    Case(Reason.METHOD_NOT_ALLOWED, wrong_method_of_workflows, 405, has_id=False),
    Case(Reason.MODEL_NOT_FOUND, unknown_model, 404),
    Case(Reason.MODEL_NOT_FOUND, unknown_model_looked_at, 404),
    Case(Reason.WORKFLOW_NOT_FOUND, unknown_workflow, 404),
    Case(Reason.WORKFLOW_NOT_FOUND, unknown_workflow_looked_at, 404, has_id=False),
    Case(Reason.WORKFLOW_ENDED, ended_workflow, 409),
    Case(Reason.CONFLICT, contrary_outcome, 409, has_id=False),
    Case(Reason.PRECONDITION_FAILED, change_of_what_moved_on, 412, has_id=False),
    Case(Reason.CONTEXT_LENGTH_EXCEEDED, long_prompt, 400),
    Case(Reason.INSUFFICIENT_QUOTA, tenants_budget, 429),
    Case(Reason.INSUFFICIENT_QUOTA, keys_budget, 429),
    Case(Reason.INSUFFICIENT_QUOTA, keys_token_budget, 429),
    Case(Reason.INSUFFICIENT_QUOTA, workflows_budget, 429),
    Case(Reason.INSUFFICIENT_QUOTA, workflows_token_budget, 429),
    Case(Reason.RATE_LIMITED, requests_per_minute, 429, should_retry=True, wait_ms=(1, 1_000)),
    Case(Reason.RATE_LIMITED, tokens_per_minute, 429, should_retry=True, wait_ms=(1, 60_000)),
    Case(Reason.RATE_LIMITED, calls_in_flight, 429, should_retry=True, wait_ms=(1_000, 1_000)),
    Case(Reason.SHED_OVERLOAD, shed_by_rule, 429, should_retry=True, wait_ms=(4_321, 4_321), rule="made-up/for-shed"),
    Case(Reason.SHED_OVERLOAD, shed_by_load, 429, should_retry=True, wait_ms=(1, 60_000)),
    Case(Reason.SHED_OVERLOAD, shed_for_good, 429),
    Case(
        Reason.DEFERRED, deferred, 429, should_retry=True, wait_ms=(HOUR_MS - SLACK_MS, 2 * HOUR_MS),
        rule="made-up/for-later",
    ),
    Case(Reason.QUEUE_FULL, queue_full, 429, should_retry=True, wait_ms=(1, 60_000)),
    Case(Reason.DEADLINE_UNREACHABLE, no_time_left, 429),
    Case(Reason.FAN_OUT_EXCEEDED, fanned_out, 429, should_retry=True),
    Case(Reason.NO_CAPACITY, no_engine, 503, should_retry=True, wait_ms=(1_000, 60_000)),
    Case(Reason.NO_CAPACITY, busy_engine, 503, should_retry=True, wait_ms=(1_000, 60_000)),
    Case(Reason.WARMING, loading, 503, should_retry=True, wait_ms=(LOAD_MS, 60_000)),
    Case(Reason.STATE_UNAVAILABLE, unknown_key_without_database, 503, should_retry=True, wait_ms=(1_000, 1_000)),
    Case(
        Reason.STATE_UNAVAILABLE, workflows_without_database, 503, should_retry=True,
        wait_ms=(1_000, 1_000), has_id=False,
    ),
    Case(Reason.UPSTREAM_ERROR, failing_engine, 502, should_retry=True),
    Case(Reason.UPSTREAM_ERROR, dropping_engine, 502, should_retry=True),
    Case(Reason.UPSTREAM_TIMEOUT, silent_engine, 504, should_retry=True),
    Case(Reason.STREAM_INTERRUPTED, cut_stream, 200, is_in_stream=True),
    Case(Reason.IDEMPOTENCY_IN_PROGRESS, key_in_use, 409, should_retry=True, wait_ms=(1_000, 1_000)),
    Case(Reason.IDEMPOTENCY_MISMATCH, key_of_another_body, 422),
    Case(Reason.RESPONSE_NOT_STORED, answer_too_large_to_keep, 409),
)  # fmt: skip


# What is refused before a call is known well enough to be decided on has an id and no explanation.
EXPLAINED: Final = {
    Reason.FORBIDDEN_BY_POLICY, Reason.POLICY_ERROR, Reason.CONTEXT_LENGTH_EXCEEDED,
    Reason.INSUFFICIENT_QUOTA, Reason.RATE_LIMITED, Reason.SHED_OVERLOAD, Reason.DEFERRED,
    Reason.QUEUE_FULL, Reason.DEADLINE_UNREACHABLE, Reason.FAN_OUT_EXCEEDED, Reason.NO_CAPACITY,
    Reason.WARMING, Reason.UPSTREAM_ERROR, Reason.UPSTREAM_TIMEOUT, Reason.STREAM_INTERRUPTED,
}  # fmt: skip


# ---------------------------------------------------------------- what is told


def check_error(case: Case, error: Mapping[str, object]) -> None:
    assert error["code"] == case.reason
    assert error["type"]
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def check(case: Case, response: httpx2.Response) -> None:
    told = response.headers
    assert response.status_code == case.status, response.text
    if case.has_id:
        assert ID.fullmatch(told["x-headway-decision"]), told
        assert told["x-request-id"] == told["x-headway-decision"]
    if case.is_in_stream:
        *before, last = [event for event in response.text.split("\n\n") if event]
        assert "[DONE]" not in response.text
        assert all("choices" in json.loads(event.removeprefix("data: ")) for event in before)
        check_error(case, json.loads(last.removeprefix("data: "))["error"])
        return
    check_error(case, response.json()["error"])
    assert told["content-type"] == "application/json"
    assert told["x-headway-reason"] == case.reason
    assert told["x-should-retry"] == ("true" if case.should_retry else "false")
    assert told.get("x-headway-rule") == case.rule
    if case.wait_ms is None:
        assert "retry-after" not in told
        assert "retry-after-ms" not in told
        return
    wait_ms, (least_ms, most_ms) = int(told["retry-after-ms"]), case.wait_ms
    assert least_ms <= wait_ms <= most_ms
    assert int(told["retry-after"]) == -(-wait_ms // MS)


async def check_explained(world: World, case: Case, decision: str) -> None:
    """The id that the client was told leads an operator to the same reason, or to the engine that failed."""
    explained = await world.api("GET", f"requests/{decision}/explain")
    assert explained["reason"] == (None if explained["winner"] else case.reason), explained


@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_tells_its_client_what_to_do(world: World, reason: Reason) -> None:
    cases = [case for case in CASES if case.reason is reason]
    assert bool(cases) != (reason in UNREACHED), f"reach `{reason}`, or say why it can not be"
    for case in cases:
        response = await case.reach(world)
        try:
            check(case, response)
            if reason in EXPLAINED:
                await check_explained(world, case, response.headers["x-headway-decision"])
        except (AssertionError, KeyError) as error:
            told = f"{response.status_code} {dict(response.headers)} {response.text[:500]}"
            pytest.fail(f"{case.reach.__name__}: {error!r}\n{told}")


async def test_a_waiting_call_is_explained_with_its_place(world: World) -> None:
    call = asyncio.create_task(world.chat("cold"))
    place = None
    while place is None and not call.done():
        waiting = await world.api("GET", "requests?state=open")
        for request in waiting["data"]:
            explained = await world.api("GET", f"requests/{request['id']}/explain")
            place = explained["queue"] or place
    await call
    assert place is not None
    assert place["position"] == 1


# ---------------------------------------------------------------- what the official SDK makes of it


class Counting(httpx2.AsyncHTTPTransport):
    """Counts the requests that go over the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests += 1
        return await super().handle_async_request(request)


@asynccontextmanager
async def sdk(world: World, key: str) -> AsyncIterator[tuple[AsyncOpenAI, Counting]]:
    """The official client with its own idea of retries."""
    counting = Counting()
    http = httpx2.AsyncClient(transport=counting)
    async with AsyncOpenAI(
        base_url=world.cluster.url + "/v1", api_key=key, http_client=http
    ) as client:
        yield client, counting


@pytest.mark.parametrize("whose", ["tenant", "key", "workflow"])
async def test_a_spent_budget_is_asked_once(world: World, whose: str) -> None:
    key, headers = world.cluster.tenant_keys["acme"], {}
    match whose:
        case "tenant":
            key = world.cluster.tenant_keys["poor"]
        case "key":
            key = await poor_key(world)
        case _:
            headers = {"x-headway-workflow": await world.workflow(budget_usd=0.000001)}
    async with sdk(world, key) as (client, counting):
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(
                model="plain", messages=HELLO, max_tokens=16, extra_headers=headers
            )
    assert refused.value.code == Reason.INSUFFICIENT_QUOTA
    assert whose in refused.value.message or "API key" in refused.value.message
    assert counting.requests == 1


async def test_a_limit_that_passes_is_asked_again(world: World) -> None:
    """The same client and the same status: only what is told about coming back is another."""
    _, key = await world.key(calls_in_flight_max=1)
    async with world.held("single", who=key), sdk(world, key) as (client, counting):
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="plain", messages=HELLO, max_tokens=16)
    assert refused.value.code == Reason.RATE_LIMITED
    assert counting.requests == 1 + openai.DEFAULT_MAX_RETRIES
