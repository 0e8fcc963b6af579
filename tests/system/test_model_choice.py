"""Models by outcomes as a tenant sees them: the official SDK against a whole Headway with two models."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from cli.processes import LocalCluster
from controlplane.store.cluster import parse_cluster
from policies.load import DEFAULT_FOLDER
from tests.ports import free_port

from .conftest import CLUSTER, check_invariants, client_of, operator

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

LARGE = """
  - {name: large, parameters: 8000000000, layers: 32, hidden_size: 4096, weights_bytes: 16000000000,
     kv_bytes_per_token: 131072, context_tokens_max: 32768, load_ms: 2000,
     price_prompt_micro_usd_per_mtok: 2000000, price_cached_micro_usd_per_mtok: 500000,
     price_completion_micro_usd_per_mtok: 6000000}
slo_classes:
"""
# The same fleet, with the large model on its second node.
TWO_MODELS = CLUSTER.replace("\nslo_classes:\n", LARGE).replace(
    "n2-a, kind: simulated, model: small", "n2-a, kind: simulated, model: large"
)
CHOICE = """
kind: model_choice
version: 1
is_enabled: true
ladders:
  both: [small, large]
classes:
  fix: {ladder: both, default: small, explore_ratio: 0, holdout_ratio: 0, outcomes_min: 1}
"""
HELLO: list[Any] = [{"role": "user", "content": "please mend this"}]
COUNTED_S_MAX = 30.0


@pytest.fixture(scope="module")
async def two_models(anyio_backend: str, server_folder: Path) -> AsyncIterator[LocalCluster]:
    assert anyio_backend
    local = LocalCluster(
        data_dir=server_folder / "two-models",
        port=free_port(),
        cluster=parse_cluster(TWO_MODELS),
    )
    await local.start()
    try:
        await offer(local)
        yield local
    finally:
        await local.stop()


async def offer(cluster: LocalCluster) -> None:
    files = {path.name: path.read_text() for path in Path(DEFAULT_FOLDER).glob("*.yaml")}
    body = {"files": {**files, "model_choice.yaml": CHOICE}, "reason": "test", "is_now": True}
    async with httpx2.AsyncClient(base_url=cluster.url, trust_env=False, timeout=30.0) as http:
        response = await http.post(
            "/operator/v1/policies/revisions",
            json=body,
            headers={"authorization": f"Bearer {cluster.operator_key}"},
        )
        assert response.status_code == 201, response.text
    async with asyncio.timeout(15):
        while not (await operator(cluster, "/operator/v1/model-choice/classes"))["is_enabled"]:
            await asyncio.sleep(0.1)


async def tell(cluster: LocalCluster, path: str, body: object) -> Any:
    async with httpx2.AsyncClient(base_url=cluster.url, trust_env=False, timeout=10.0) as http:
        response = await http.post(
            path, json=body, headers={"authorization": f"Bearer {cluster.tenant_keys['acme']}"}
        )
        assert response.status_code in (200, 201), response.text
        return response.json()


async def new(cluster: LocalCluster, **more: object) -> Any:
    body = {"kind": "fix", "scope": "autonomous", "steps_expected": 3, "deadline_s": 60, **more}
    return await tell(cluster, "/v1/workflows", body)


async def answered_by(cluster: LocalCluster, workflow: str, steps: int = 3) -> set[str]:
    """Models that answered the calls of a workflow, by the headers and by the bodies."""
    seen = set()
    async with client_of(cluster, "acme") as client:
        for _ in range(steps):
            raw = await client.chat.completions.with_raw_response.create(
                model="auto:fix",
                messages=HELLO,
                max_tokens=8,
                extra_headers={"x-headway-workflow": workflow},
            )
            seen |= {raw.headers["x-headway-model"], raw.parse().model}
    return seen


async def shown(cluster: LocalCluster, *words: str) -> str:
    """What `headway model-choice` prints for people."""
    connection = ("--url", cluster.url, "--key", cluster.operator_key)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", "model-choice", *words, *connection,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    told, _ = await process.communicate()
    assert process.returncode == 0
    return told.decode()


async def test_a_task_climbs_from_the_small_model_to_the_large(two_models: LocalCluster) -> None:
    first = await new(two_models, model="auto:fix")
    assert await answered_by(two_models, first["id"]) == {"small"}
    ended = await tell(two_models, f"/v1/workflows/{first['id']}/outcome", {"outcome": "failure"})
    assert ended["retry"]["model"] == "large"

    second = await new(two_models, retry_of=first["id"])
    assert await answered_by(two_models, second["id"]) == {"large"}
    await tell(two_models, f"/v1/workflows/{second['id']}/outcome", {"outcome": "success"})

    # What was learned is counted once it is settled.
    async with asyncio.timeout(COUNTED_S_MAX):
        while True:
            standing: Any = await operator(two_models, "/operator/v1/model-choice?tenant=acme")
            small = standing["data"][0]["models"][0]
            if small["tries"] > 0:
                break
            await asyncio.sleep(0.2)
    assert small["tries"] == pytest.approx(1.0, abs=0.01)
    assert small["successes"] == 0.0
    assert small["usd"] > 0.0
    told = await operator(two_models, f"/operator/v1/model-choice/workflows/{second['id']}")
    assert told["why"] == "climbed"
    assert told["outcome"] in (None, "succeeded")
    explained = await shown(two_models, "explain", second["id"])
    assert "`large`: `small` failed before" in explained
    assert "small > large" in await shown(two_models, "show", "--tenant", "acme")
    assert "auto:fix" in await shown(two_models, "classes")
    await check_invariants(two_models)


async def test_a_workflow_without_a_model_is_given_one_by_its_first_call(
    two_models: LocalCluster,
) -> None:
    plain = await new(two_models)
    # Steps in parallel, each of which could be the first.
    async with client_of(two_models, "acme") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="auto:fix",
                    messages=HELLO,
                    max_tokens=8,
                    extra_headers={"x-headway-workflow": plain["id"]},
                )
                for _ in range(6)
            )
        )
        assert {answer.model for answer in answers} == {"small"}
        # A class that the workflow did not ask for is refused, a model by its name is not.
        with pytest.raises(openai.BadRequestError, match="keeps"):
            await client.chat.completions.create(
                model="ladder:both",
                messages=HELLO,
                extra_headers={"x-headway-workflow": plain["id"]},
            )
        named = await client.chat.completions.create(
            model="large",
            messages=HELLO,
            max_tokens=8,
            extra_headers={"x-headway-workflow": plain["id"]},
        )
        assert named.model == "large"
        # Without a workflow there is no outcome to learn from.
        alone = await client.chat.completions.create(model="auto:fix", messages=HELLO, max_tokens=8)
        assert alone.model == "small"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="auto:other", messages=HELLO)
    told = await operator(two_models, f"/operator/v1/model-choice/workflows/{plain['id']}")
    assert told["model"] == "small"
