"""A runtime that is not vLLM and needs no GPU: llama.cpp through the whole path, and one that is attached."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store import records
from controlplane.store.cluster import parse_cluster
from controlplane.store.session import make_engine
from dataplane.protocol.messages import EngineSpec, EngineState, Feature, Telemetry
from tests.integration.agent_world import agent_world
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of, engines

from .environment import TENANTS

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(300)]

READY_S_MAX = 60.0
SEATS = 4
CONTEXT_TOKENS = 2048

CLUSTER = (
    """
regions: [lab]
gpu_types:
  - {{name: cpu, hbm_bytes: 16000000000, bandwidth_bytes_per_s: 2.0e10, flops_per_s: 1.0e11,
     price_micro_usd_per_hour: 100000, price_source: test, price_date: 2026-11-01}}
models:
  - {{name: tiny, parameters: 110000, layers: 2, hidden_size: 64, weights_bytes: 440000,
     kv_bytes_per_token: 256, context_tokens_max: 2048, load_ms: 2000,
     price_prompt_micro_usd_per_mtok: 1000000, price_cached_micro_usd_per_mtok: 100000,
     price_completion_micro_usd_per_mtok: 2000000}}
"""
    + TENANTS
    + """
nodes:
  - id: n1
    region: lab
    gpu_type: cpu
    gpus: 2
    address: 127.0.0.1
    engines:
      - {{engine_id: l1, kind: llama_cpp, model: tiny, role: both, gpus: 1, options: {options}}}
      - {{engine_id: l2, kind: llama_cpp, model: tiny, role: both, gpus: 1, options: {options}}}
"""
)


def options(llama_server: Path, gguf: Path) -> dict[str, str | int]:
    return {
        "executable": str(llama_server),
        "model_path": str(gguf),
        "seats": SEATS,
        "context_tokens_max": CONTEXT_TOKENS,
        "threads": 1,
    }


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, llama_server: Path, gguf: Path
) -> AsyncIterator[LocalCluster]:
    document = parse_cluster(CLUSTER.format(options=options(llama_server, gguf)))
    local = LocalCluster(
        data_dir=server_folder / "llama",
        port=free_port(),
        cluster=document,
        ready_s_max=READY_S_MAX,
    )
    await local.start()
    try:
        yield local
    finally:
        await local.stop()


async def settled(cluster: LocalCluster) -> records.RequestRecord:
    await check_invariants(cluster)
    engine = make_engine(cluster.database_url)
    try:
        return (await records.list_requests(engine, limit=1)).items[0]
    finally:
        await engine.dispose()


async def stream(client: AsyncOpenAI, prompt: str, tokens: int) -> tuple[str, int]:
    """Text and completion tokens of a streamed chat."""
    text, counted = "", 0
    chunks = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in chunks:
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text, counted


async def until_idle(cluster: LocalCluster) -> None:
    async with asyncio.timeout(20):
        while any(row["running"] for row in await engines(cluster)):
            await asyncio.sleep(0.1)


async def test_streamed_and_whole_answers_agree_and_are_paid(cluster: LocalCluster) -> None:
    prompt = "Tell me about the sea, and about the wind. " * 5
    async with client_of(cluster, "acme") as client:
        text, tokens = await stream(client, prompt, 100)
        record = await settled(cluster)
        assert (len(text), tokens) == (100, 100), "every token of this model is a character"
        assert (record.state, record.completion_tokens) == ("succeeded", 100)
        assert not record.is_usage_estimated
        paid = record.prompt_tokens * 1_000_000 + 100 * 2_000_000
        assert record.settled_micro_usd == pytest.approx(paid / 1_000_000, abs=2)
        whole = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=100,
            temperature=0,
        )
        assert whole.choices[0].message.content == text
        record = await settled(cluster)
        assert record.cached_tokens == 0, "what one asked is not there for another"
        answer = await client.completions.create(
            model="tiny", prompt="once upon a time", max_tokens=16, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16


async def test_a_client_that_leaves_frees_the_seat(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        chunks = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "count for ever"}],
            max_tokens=1900,
            temperature=0,
            stream=True,
        )
        seen = 0
        async for _ in chunks:
            seen += 1
            if seen == 20:
                break
        await chunks.close()
    record = await settled(cluster)
    assert record.state == "cancelled"
    assert 0 < record.completion_tokens < 1900
    await until_idle(cluster)


async def test_the_engines_own_words_reach_the_client(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme", retries=0) as client:
        with pytest.raises(APIStatusError) as refused:
            await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=8,
                response_format={"type": "a poem"},  # type: ignore[arg-type]
            )
    assert refused.value.status_code == 400
    assert "response_format" in str(refused.value)
    await check_invariants(cluster)


async def test_more_calls_than_seats_wait_and_all_are_answered(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        answers = await asyncio.gather(
            *(stream(client, f"call {number}", 60) for number in range(4 * SEATS))
        )
    assert [tokens for _, tokens in answers] == [60] * (4 * SEATS)
    await check_invariants(cluster)


async def test_a_killed_engine_ends_its_streams_honestly_and_comes_back(
    cluster: LocalCluster,
) -> None:
    """Streams that have begun end whole or with an error, never cut and called complete."""
    pids = cluster.engine_pids()
    assert set(pids) == {"l1", "l2"}
    async with client_of(cluster, "acme") as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "a long story"}],
            max_tokens=1800,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        name = raw.headers["x-headway-engine"]
        others = [
            asyncio.create_task(stream(client, f"story {number}", 200)) for number in range(4)
        ]
        text, end = "", ""
        try:
            async for chunk in raw.parse():
                if not text:
                    os.kill(pids[name], signal.SIGKILL)
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                    end = chunk.choices[0].finish_reason or end
        except APIError as error:
            end = f"error: {error}"
        assert end.startswith("error: ") or (end, len(text)) == ("length", 1800), (end, len(text))
        for told in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(told, APIError) or told[1] == 200, told  # type: ignore[index]
        # The other engine serves at once, and the dead one comes back.
        assert (await stream(client, "and now", 20))[1] == 20
        async with asyncio.timeout(READY_S_MAX):
            while {row["id"] for row in await engines(cluster) if row["is_accepting"]} != set(pids):
                await asyncio.sleep(0.2)
    assert cluster.engine_pids()[name] != pids[name]
    await check_invariants(cluster)


async def test_what_it_lacks_is_declared_and_not_made_up(
    llama_server: Path, gguf: Path, tmp_path: Path
) -> None:
    spec = EngineSpec(
        engine_id="l", kind="llama_cpp", model="tiny", role="both", gpus=1,
        options=dict(options(llama_server, gguf)),
    )  # fmt: skip
    async with agent_world(tmp_path, spec) as (_, control, agent):
        await agent.start()
        facts = await control.engine("l", EngineState.SERVING, seconds=READY_S_MAX)
        assert (facts.seats, facts.context_tokens_max) == (SEATS, CONTEXT_TOKENS)
        assert facts.kv_tokens == SEATS * CONTEXT_TOKENS
        assert {Feature.KV_USE, Feature.LATENCIES, Feature.TOKEN_IDS, Feature.CACHE_SALT} <= set(
            facts.lacks
        )
        telemetry = await control.until(
            lambda: next((one for said in control.all(Telemetry) for one in said.engines), None)
        )
        assert telemetry.kv_used_ratio is None
        assert telemetry.ttft_count == 0
        assert await agent.stop() == 0


async def test_a_server_that_runs_already_is_watched_and_left_alone(
    llama_server: Path, gguf: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = [
        llama_server, "--model", gguf, "--alias", "tiny", "--host", "127.0.0.1", "--port",
        str(port), "--parallel", "2", "--ctx-size", "2048", "--threads", "1", "--metrics",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        spec = EngineSpec(
            engine_id="a", kind="llama_cpp", model="tiny", role="both", gpus=1,
            options={"attach": f"http://127.0.0.1:{port}", "seats": 2},
        )  # fmt: skip
        async with agent_world(tmp_path, spec) as (_, control, agent):
            await agent.start()
            facts = await control.engine("a", EngineState.SERVING, seconds=READY_S_MAX)
            assert (facts.port, facts.seats, facts.context_tokens_max) == (port, 2, 1024)
            before = len(control.heard)
            # Silence of a server that is not ours is told, and nothing of it is ended.
            server.send_signal(signal.SIGSTOP)
            await control.engine("a", EngineState.FAILED, since=before)
            server.send_signal(signal.SIGCONT)
            await control.engine("a", EngineState.SERVING, since=before, seconds=READY_S_MAX)
            assert await agent.stop() == 0
        assert server.poll() is None
        async with httpx2.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait()
