"""Profiles on a real vLLM: its own parser takes every flag; drafts and adapters behind the gateway."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from openai import APIStatusError, AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store.cluster import parse_cluster
from dataplane.engines.base import EngineError
from dataplane.engines.kinds import KINDS, with_profile
from dataplane.engines.profiles import built_in
from dataplane.protocol.messages import EngineSpec
from tests.ports import free_port
from tests.system.conftest import check_invariants, client_of, engines

from .environment import READY_S_MAX, TENANTS, TINY_CATALOGUE, cpu_environment

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(600)]

PROFILES = """
profiles:
  - name: mixed
    eager: true
    context_tokens_max: 4096
    batch: {{seats: 8}}
    kv_cache: {{block_tokens: 32, bytes: 67108864}}
    speculative: {{method: ngram, tokens: 3, lookup_tokens_min: 2, lookup_tokens_max: 4}}
    adapters: {{slots: 1, rank_max: 8, host_slots: 2, at_run_time: true, loaded: {{law: {law}}}}}
"""

CLUSTER = (
    TINY_CATALOGUE
    + """
adapters:
  - {{name: law, adapter_of: tiny, path: {law}}}
  - {{name: med, adapter_of: tiny, path: {med}, price_completion_micro_usd_per_mtok: 4000000}}
"""
    + TENANTS
    + """
nodes:
  - id: n1
    region: lab
    gpu_type: cpu
    gpus: 1
    address: 127.0.0.1
    engines:
      - {{engine_id: v1, kind: vllm, model: tiny, role: both, gpus: 1, profile: mixed,
         options: {options}}}
"""
)


@pytest.fixture(scope="module")
def adapters(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    maker = Path(__file__).with_name("tiny_adapter.py")
    for seed, name in enumerate(("law", "med")):
        subprocess.run(
            [vllm / "bin" / "python", maker, folder / name, str(seed)],
            check=True, capture_output=True,
        )  # fmt: skip
    return {name: folder / name for name in ("law", "med")}


@pytest.fixture(scope="module")
async def cluster(
    anyio_backend: str, server_folder: Path, vllm: Path, model: Path, adapters: dict[str, Path]
) -> AsyncIterator[LocalCluster]:
    own = server_folder / "profiles.yaml"
    own.write_text(PROFILES.format(law=adapters["law"]))
    os.environ.update({**cpu_environment(), "HEADWAY_AGENT_PROFILES": str(own)})
    options = {
        "executable": str(vllm / "bin" / "vllm"),
        "model_path": str(model),
        "startup_s_max": READY_S_MAX,
    }
    document = parse_cluster(CLUSTER.format(options=options, **adapters))
    local = LocalCluster(
        data_dir=server_folder / "profiles", port=free_port(), cluster=document,
        ready_s_max=READY_S_MAX,
    )  # fmt: skip
    await local.start()
    try:
        yield local
    finally:
        del os.environ["HEADWAY_AGENT_PROFILES"]
        await local.stop()


async def answer(client: AsyncOpenAI, model: str, prompt: str, tokens: int = 24) -> tuple[str, str]:
    """The text, and the engine that gave it."""
    raw = await client.completions.with_raw_response.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0
    )
    return raw.parse().choices[0].text, raw.headers["x-headway-engine"]


async def counted(cluster: LocalCluster, engine_id: str, metric: str) -> dict[str, float]:
    """A counter of an engine's own, by data-parallel rank."""
    port = next(row["port"] for row in await engines(cluster) if row["id"] == engine_id)
    async with httpx2.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    found = re.findall(rf'^vllm:{metric}{{engine="(\d+)"[^}}]*}} (\S+)', text, re.MULTILINE)
    return {rank: float(value) for rank, value in found}


def test_vllm_takes_the_flags_of_every_profile(vllm: Path) -> None:
    kind, commands = KINDS["vllm"], {}
    known = built_in()
    for name, each in known.items():
        if each.profile.kind != "vllm":
            continue
        settings = each.profile.settings()
        gpus = 1
        for place in ("parallel.tensor", "parallel.pipeline", "parallel.data"):
            gpus *= int(settings.get(place, 1))
        for role in ("both", "prefill", "decode"):
            made = EngineSpec(
                engine_id="e", kind="vllm", model="m", role=role, gpus=gpus, profile=name
            )
            made = with_profile(made, known)
            try:
                kind.check_settings(made)
            except EngineError:
                assert (name, role) == ("pipeline-2", "decode")
                continue
            ports = range(8000, 8000 + kind.ports_needed(made))
            commands[f"{name} {role}"] = list(kind.launch(made, "127.0.0.1", ports).argv[2:])
    commands["a wrong flag"] = ["m", "--no-such-flag"]
    commands["a wrong member"] = ["m", "--kv-transfer-config", '{"kv_connectr": "NixlConnector"}']
    parsed = subprocess.run(
        [vllm / "bin" / "python", Path(__file__).with_name("parse_flags.py")],
        input=json.dumps(commands), check=True, capture_output=True, text=True,
    )  # fmt: skip
    refused = json.loads(parsed.stdout.splitlines()[-1])
    assert set(refused) == {"a wrong flag", "a wrong member"}, refused


async def test_a_profile_decides_what_is_started(cluster: LocalCluster) -> None:
    [row] = await engines(cluster)
    assert (row["id"], row["gpus"], row["seats_capacity"]) == ("v1", 1, 8)


async def test_an_adapter_is_a_model_that_only_some_engines_have(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        names = {model.id async for model in await client.models.list()}
        assert {"tiny", "law", "med"} <= names
        plain, _ = await answer(client, "tiny", "the quick brown fox")
        texts = [await answer(client, "law", "the quick brown fox") for _ in range(3)]
        assert {engine for _, engine in texts} == {"v1"}
        assert {text for text, _ in texts} != {plain}
        assert len({text for text, _ in texts}) == 1
        with pytest.raises(APIStatusError) as unknown:
            await answer(client, "tax", "hello")
        assert unknown.value.status_code == 404
    await check_invariants(cluster)


async def test_an_adapter_is_served_from_when_it_is_loaded(
    cluster: LocalCluster, adapters: dict[str, Path]
) -> None:
    async with client_of(cluster, "acme", retries=0) as client:
        with pytest.raises(APIStatusError) as missing:
            await answer(client, "med", "hello")
        assert missing.value.status_code == 503
        assert missing.value.response.headers["x-headway-reason"] == "no_capacity"
        assert "`med` is loaded on no engine" in str(missing.value)
        port = next(row["port"] for row in await engines(cluster) if row["id"] == "v1")
        async with httpx2.AsyncClient(trust_env=False, timeout=60) as engine:
            loaded = await engine.post(
                f"http://127.0.0.1:{port}/v1/load_lora_adapter",
                json={"lora_name": "med", "lora_path": str(adapters["med"])},
            )
            assert loaded.status_code == 200, loaded.text
        async with asyncio.timeout(20):
            while True:
                try:
                    text, where = await answer(client, "med", "the quick brown fox")
                    break
                except APIStatusError:
                    await asyncio.sleep(0.2)
        assert where == "v1"
        law, _ = await answer(client, "law", "the quick brown fox")
        assert law != text
    await check_invariants(cluster)


async def test_drafts_are_made_and_kept(cluster: LocalCluster) -> None:
    """One token over and over is what a look at the last tokens predicts."""
    async with client_of(cluster, "acme") as client:
        told = await client.completions.create(
            model="tiny", prompt="again", max_tokens=24, temperature=0,
            extra_body={"allowed_token_ids": [1000]},
        )  # fmt: skip
        # What vLLM can not do together with drafts it says.
        with pytest.raises(APIStatusError, match="logit_bias") as refused:
            await client.completions.create(
                model="tiny", prompt="again", max_tokens=1, logit_bias={"1000": 100}
            )
        assert refused.value.status_code == 400
    assert told.usage is not None
    assert told.usage.completion_tokens == 24
    drafts = await counted(cluster, "v1", "spec_decode_num_drafts_total")
    kept = await counted(cluster, "v1", "spec_decode_num_accepted_tokens_total")
    assert drafts["0"] > 0
    assert kept["0"] > drafts["0"]
    await check_invariants(cluster)
