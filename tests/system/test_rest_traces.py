"""Traces and logs of a whole Headway: what its clients do, to a collector, and what it writes down about them.

One cluster exports to a collector that decodes OTLP. Secrets are played through every way in, and none is in any log
or span.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cli.processes import LOG_FOLDER, LocalCluster
from controlplane.store.cluster import parse_cluster
from tests.otlp_receiver import Receiver, attributes_of, receiving
from tests.ports import free_port

from .conftest import CLUSTER, engines, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT: Final = "/v1/chat/completions"
SPANS_S_MAX: Final = 20.0
SLOW_MS: Final = 1_500
HELLO: Final = [{"role": "user", "content": "hello, how are you today?"}]


class TracedCluster(LocalCluster):
    """A local cluster that samples nothing by itself and tells a collector at once."""

    collector = ""

    def serve_environment(self) -> dict[str, str]:
        return {
            **super().serve_environment(),
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "HEADWAY_TRACE_SAMPLE_RATIO": "0",
            "HEADWAY_TRACE_SLOW_MS": str(SLOW_MS),
        }


@dataclass
class World:
    cluster: LocalCluster
    receiver: Receiver
    http: httpx2.AsyncClient

    async def post(
        self, body: Any, path: str = CHAT, *, key: str | None = None, **headers: str
    ) -> httpx2.Response:
        sent = {"authorization": f"Bearer {key or self.cluster.tenant_keys['acme']}", **headers}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(
            path, content=content, headers={"content-type": "application/json", **sent}
        )

    async def spans_of(self, trace_id: str, least: int) -> dict[str, Span]:
        """The spans of one trace by name, once there are `least` of them."""
        found: dict[str, Span] = {}
        try:
            async with asyncio.timeout(SPANS_S_MAX):
                while len(found) < least:
                    await asyncio.sleep(0.05)
                    found = {
                        span.name: span
                        for span in self.receiver.spans()
                        if span.trace_id.hex() == trace_id
                    }
        except TimeoutError:
            came = {path: len(bodies) for path, bodies in self.receiver.bodies.items()}
            pytest.fail(f"of {trace_id} only {sorted(found)} came; requests: {came}")
        return found

    def lines(self) -> list[dict[str, Any]]:
        """Every line of the replica's log; each must be one JSON object."""
        log = self.cluster.data_dir / LOG_FOLDER / "serve.log"
        return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture(scope="module")
async def world(anyio_backend: str, receiver: Receiver) -> AsyncIterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="headway-test-"))
    folder.chmod(0o755)
    cluster = TracedCluster(
        data_dir=folder / "cluster", port=free_port(), cluster=parse_cluster(CLUSTER)
    )
    cluster.collector = receiver.url
    await cluster.start()
    try:
        async with httpx2.AsyncClient(base_url=cluster.url, timeout=30.0, trust_env=False) as http:
            yield World(cluster, receiver, http)
    finally:
        await cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def parent(flags: str = "01") -> tuple[str, str, str]:
    """A trace id, a span id, and the header that tells them."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{flags}"


async def test_one_trace_from_the_client_to_the_settlement(world: World) -> None:
    trace, span, header = parent()
    response = await world.post(
        {"model": "small", "messages": HELLO, "max_tokens": 8, "temperature": 0.5},
        traceparent=header,
    )
    assert response.status_code == 200, response.text
    spans = await world.spans_of(trace, 4)
    assert set(spans) == {"chat small", "admission", "engine whole", "settlement"}
    root = spans["chat small"]
    assert (root.parent_span_id.hex(), root.kind) == (span, Span.SPAN_KIND_SERVER)
    for name, one in spans.items():
        if name != "chat small":
            assert one.parent_span_id == root.span_id, name
            assert root.start_time_unix_nano <= one.start_time_unix_nano, name
            assert one.end_time_unix_nano <= root.end_time_unix_nano, name
    told = attributes_of(root)
    usage = response.json()["usage"]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "small"
    assert told["gen_ai.request.max_tokens"] == 8
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["headway.request"] == response.headers["x-request-id"]
    assert told["http.response.status_code"] == 200
    assert (
        attributes_of(spans["engine whole"])["headway.engine"]
        == response.headers["x-headway-engine"]
    )


async def test_only_what_was_asked_for_or_went_wrong_is_kept(world: World) -> None:
    quiet, _, unsampled = parent("00")
    fine = await world.post(
        {"model": "small", "messages": HELLO, "max_tokens": 2}, traceparent=unsampled
    )
    assert fine.status_code == 200
    refused: dict[str, tuple[str, int]] = {}
    for body, key, reason, status in (
        ({"model": "absent", "messages": HELLO}, None, "model_not_found", 404),
        ({"model": "small", "messages": []}, None, "invalid_request", 400),
        (b"{", None, "invalid_request", 400),
        ({"model": "small", "messages": HELLO}, "hw-tenant-wrong", "invalid_api_key", 401),
    ):
        trace, _, header = parent("00")
        response = await world.post(body, key=key, traceparent=header)
        assert response.status_code == status, response.text
        refused[trace] = (reason, status)
    for trace, (reason, status) in refused.items():
        spans = await world.spans_of(trace, 2)
        [root] = [span for span in spans.values() if span.kind == Span.SPAN_KIND_SERVER]
        told = attributes_of(root)
        assert (told["error.type"], told["http.response.status_code"]) == (reason, status)
        assert attributes_of(spans["admission"])["headway.reason"] == reason
    # Those came later, so the quiet one would have come by now.
    assert not [span for span in world.receiver.spans() if span.trace_id.hex() == quiet]
    assert not [line for line in world.lines() if line.get("trace") == quiet]


async def test_a_stream_that_loses_its_engine_is_one_trace_with_both(world: World) -> None:
    trace, _, header = parent("00")
    body = {
        "model": "small",
        "messages": HELLO,
        "max_tokens": 1_500,
        "stream": True,
        "ignore_eos": True,
    }
    key = world.cluster.tenant_keys["acme"]
    left = ""
    async with world.http.stream(
        "POST", CHAT, json=body, headers={"authorization": f"Bearer {key}", "traceparent": header}
    ) as response:
        assert response.status_code == 200
        count = 0
        async for line in response.aiter_lines():
            count += line.startswith("data: ")
            if count == 20 and not left:
                left = response.headers["x-headway-engine"]
                os.kill(world.cluster.engine_pids()[left], signal.SIGKILL)
        assert line in {"", "data: [DONE]"}
    spans = await world.spans_of(trace, 6)
    legs = [span for name, span in spans.items() if name.startswith("engine ")]
    assert len(legs) >= 2, set(spans)
    assert len({attributes_of(leg)["headway.engine"] for leg in legs}) == 2
    assert "resume 1" in spans
    root = attributes_of(spans["chat small"])
    assert (root["headway.kept"], root["headway.resumes"]) == ("resumed", 1)


async def test_a_kept_call_is_one_line_with_both_ids(world: World) -> None:
    trace, _, header = parent()
    response = await world.post(
        {"model": "small", "messages": HELLO, "max_tokens": 2}, traceparent=header
    )
    await world.spans_of(trace, 4)
    [line] = [line for line in world.lines() if line.get("trace") == trace]
    assert line["event"] == "call_ended"
    assert line["request"] == response.headers["x-request-id"]
    assert (line["state"], line["status"], line["kept"]) == ("succeeded", 200, "sampled")


async def test_no_secret_is_in_a_log_or_a_span(world: World) -> None:
    """Canaries in every place where a client can put text, on good calls and on every kind of error."""
    canary = f"canary{secrets.token_hex(8)}"
    tenant, operator = world.cluster.tenant_keys["acme"], world.cluster.operator_key
    said = [{"role": "user", "content": canary}]
    fine = {"model": "small", "messages": said, "max_tokens": 2}
    named = {"authorization": f"Bearer {tenant}", "traceparent": parent()[2]}
    async with world.http.stream(
        "POST", CHAT, json={**fine, "stream": True}, headers=named
    ) as response:
        async for _ in response.aiter_bytes():
            pass
    for body, path, headers in (
        (fine, CHAT, {}),
        ({"model": "small", "prompt": canary, "max_tokens": 2}, "/v1/completions", {}),
        ({**fine, "stop": canary, "user": canary, "metadata": {"x": canary}}, CHAT, {}),
        ({**fine, "cache_salt": canary, "prompt_cache_key": canary}, CHAT, {}),
        ({**fine, "tools": canary}, CHAT, {}),
        ({**fine, "max_tokens": canary}, CHAT, {}),
        ({**fine, "chat_template": canary}, CHAT, {}),
        ({**fine, "messages": [canary]}, CHAT, {}),
        ({**fine, "messages": [{"role": canary * 40, "content": 5}]}, CHAT, {}),
        ({**fine, "logit_bias": {canary: canary}}, CHAT, {}),
        (f'{{"model": "small", "messages": "{canary}'.encode(), CHAT, {}),
        (fine, CHAT, {"x-headway-step": canary}),
        (fine, CHAT, {"x-headway-workflow": canary}),
        (fine, CHAT, {"x-headway-session": canary, "idempotency-key": canary}),
        (fine, CHAT, {"x-headway-dry-run": canary}),
        ({**fine, "model": canary}, CHAT, {}),
        ({"kind": canary, "scope": canary}, "/v1/workflows", {}),
        ({"outcome": "success", "detail": canary}, "/v1/workflows/wf-none/outcome", {}),
        (fine, f"/v1/{canary}", {}),
    ):
        response = await world.post(body, path, traceparent=parent()[2], **headers)
        assert response.status_code < 500, (path, response.text)
    # Keys that are wrong in every way, and an operator key where a tenant's belongs.
    for key in (canary, f"hw-tenant-{canary}", tenant[:-3] + "abc", operator):
        assert (await world.post(fine, key=key)).status_code == 401
    named = {"authorization": f"Bearer {operator}"}
    made = await world.http.post(
        "/operator/v1/keys", json={"name": "canary", "tenant_id": "brook"}, headers=named
    )
    assert made.status_code == 201
    key_id, fresh = made.json()["id"], made.json()["key"]
    turned = await world.http.post(f"/operator/v1/keys/{key_id}/rotate", headers=named)
    assert turned.status_code == 201
    for method, path, body in (
        (
            "POST",
            "/operator/v1/policies/revisions",
            {"files": {"x.yaml": canary}, "reason": canary},
        ),
        ("POST", "/operator/v1/cluster", {"regions": [canary], "nodes": canary}),
        ("GET", f"/operator/v1/requests?cursor={canary}", None),
        ("GET", f"/operator/v1/{canary}", None),
    ):
        answer = await world.http.request(method, path, json=body, headers=named)
        assert answer.status_code < 500, answer.text
    last = parent()
    await world.post({"model": "small", "messages": HELLO, "max_tokens": 2}, traceparent=last[2])
    await world.spans_of(last[0], 4)
    hidden = (canary, fresh, turned.json()["key"], *world.cluster.tenant_keys.values(), operator)
    secret_parts = [
        part for secret in hidden for part in (secret, secret.rpartition("-")[0]) if part
    ]
    for log in sorted((world.cluster.data_dir / LOG_FOLDER).iterdir()):
        text = log.read_text()
        for secret in secret_parts:
            assert secret not in text, (log.name, secret[:12])
    spans = b"".join(body for bodies in world.receiver.bodies.values() for body in bodies)
    for secret in secret_parts:
        assert secret.encode() not in spans, secret[:12]
    assert all(isinstance(line, dict) for line in world.lines())


async def test_the_cluster_is_quiet_in_the_end(world: World) -> None:
    await until_quiet(world.cluster)
    assert await engines(world.cluster)
