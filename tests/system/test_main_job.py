"""The main job as a tenant sees it: the official SDK against a whole Headway, down to settled money."""

import json

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from cli.processes import LocalCluster
from controlplane.store import records
from controlplane.store.session import make_engine

from .conftest import check_invariants, client_of, operator, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

HELLO = [{"role": "user", "content": "hello, how are you today?"}]


async def last_request(cluster: LocalCluster) -> records.RequestRecord:
    await until_quiet(cluster)
    engine = make_engine(cluster.database_url)
    try:
        return (await records.list_requests(engine, limit=1)).items[0]
    finally:
        await engine.dispose()


async def test_models(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        models = [model async for model in await client.models.list()]
    assert [model.id for model in models] == ["small"]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == 32768


async def test_chat_is_counted_and_settled_to_the_token(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="small", messages=HELLO, max_tokens=32
        )
        answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert raw.headers["x-request-id"]
    record = await last_request(cluster)
    assert record.id == raw.headers["x-headway-decision"]
    assert record.state == "succeeded"
    assert record.prompt_tokens == answer.usage.prompt_tokens
    assert record.completion_tokens == answer.usage.completion_tokens
    cached = record.cached_tokens
    paid = -(-(record.prompt_tokens - cached) * 200_000 // 1_000_000)
    paid += -(-cached * 50_000 // 1_000_000)
    paid += -(-record.completion_tokens * 600_000 // 1_000_000)
    assert record.settled_micro_usd == paid


async def test_stream_hides_the_usage_nobody_asked_for(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        stream = await client.chat.completions.create(
            model="small", messages=HELLO, max_tokens=24, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    assert any(chunk.choices[0].delta.content for chunk in chunks)
    record = await last_request(cluster)
    assert record.completion_tokens > 0
    assert not record.is_usage_estimated
    assert record.ttft_ms is not None


async def test_stream_shows_the_usage_that_was_asked_for(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        stream = await client.completions.create(
            model="small",
            prompt="once upon a time",
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    assert len(usages) == 1
    record = await last_request(cluster)
    assert (record.prompt_tokens, record.completion_tokens) == (
        usages[0].prompt_tokens,
        usages[0].completion_tokens,
    )


async def test_typed_exceptions(cluster: LocalCluster) -> None:
    async with AsyncOpenAI(base_url=cluster.url + "/v1", api_key="hw-tenant-nobody") as nobody:
        with pytest.raises(openai.AuthenticationError) as refused:
            await nobody.chat.completions.create(model="small", messages=HELLO)
        assert refused.value.code == "invalid_api_key"
    async with client_of(cluster, "acme") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="large", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="small", messages=HELLO, extra_body={"kv_transfer_params": {"x": 1}}
            )
        assert bad.value.code == "invalid_request"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(
                model="small", messages=HELLO, extra_headers={"x-headway-workflow": "wf-none"}
            )
        assert unknown.value.code == "workflow_not_found"
        assert unknown.value.response.headers["x-headway-reason"] == "workflow_not_found"


async def test_a_workflow_from_start_to_outcome(cluster: LocalCluster) -> None:
    headers = {"authorization": f"Bearer {cluster.tenant_keys['acme']}"}
    async with (
        httpx2.AsyncClient(base_url=cluster.url, headers=headers, trust_env=False) as http,
        client_of(cluster, "acme") as client,
    ):
        created = await http.post(
            "/v1/workflows",
            json={
                "kind": "fix-a-bug",
                "scope": "autonomous",
                "steps_expected": 3,
                "deadline_s": 60,
                "budget_usd": 0.01,
            },
        )
        assert created.status_code == 201, created.text
        workflow = created.json()["id"]
        messages = [{"role": "user", "content": "begin " + "context " * 400}]
        for step in range(3):
            answer = await client.chat.completions.create(
                model="small",
                messages=messages,
                max_tokens=32,
                extra_headers={"x-headway-workflow": workflow, "x-headway-step": str(step)},
            )
            text = answer.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "go on"},
            ]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        # The later steps went home, to the engine that holds their context.
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 100
        await until_quiet(cluster)
        ended = await http.post(f"/v1/workflows/{workflow}/outcome", json={"outcome": "success"})
        assert ended.status_code == 200, ended.text
        again = await http.post(f"/v1/workflows/{workflow}/outcome", json={"outcome": "success"})
        assert again.status_code == 200
        contrary = await http.post(f"/v1/workflows/{workflow}/outcome", json={"outcome": "failure"})
        assert contrary.status_code == 409
        shown = (await http.get(f"/v1/workflows/{workflow}")).json()
        assert shown["state"] == "succeeded"
        assert shown["steps_done"] == 3
        with pytest.raises(openai.ConflictError) as late:
            await client.chat.completions.create(
                model="small", messages=messages, extra_headers={"x-headway-workflow": workflow}
            )
        assert late.value.code == "workflow_ended"
    await check_invariants(cluster)


async def test_a_workflow_may_not_spend_more_than_its_budget(cluster: LocalCluster) -> None:
    headers = {"authorization": f"Bearer {cluster.tenant_keys['acme']}"}
    async with (
        httpx2.AsyncClient(base_url=cluster.url, headers=headers, trust_env=False) as http,
        client_of(cluster, "acme") as client,
    ):
        created = await http.post(
            "/v1/workflows",
            json={
                "kind": "small", "scope": "chat", "steps_expected": 9,
                "deadline_s": 60, "budget_usd": 0.0001,
            },
        )  # fmt: skip
        workflow = created.json()["id"]

        async def spend() -> None:
            for _ in range(20):
                await client.chat.completions.create(
                    model="small",
                    messages=HELLO,
                    max_tokens=50,
                    extra_headers={"x-headway-workflow": workflow},
                )

        with pytest.raises(openai.RateLimitError) as spent:
            await spend()
        assert spent.value.code == "insufficient_quota"
        assert workflow in str(spent.value)
        await until_quiet(cluster)
        shown = (await http.get(f"/v1/workflows/{workflow}")).json()
        assert shown["spent_micro_usd"] <= 100
    await check_invariants(cluster)


async def test_a_prompt_goes_where_its_beginning_is_cached(cluster: LocalCluster) -> None:
    """Three equal engines and no workflow: only the prefix index tells them apart."""
    begin = "the same long beginning " * 600
    engines, cached = set(), 0
    async with client_of(cluster, "acme") as client:
        for number in range(6):
            raw = await client.chat.completions.with_raw_response.create(
                model="small",
                messages=[{"role": "user", "content": f"{begin} and question {number}"}],
                max_tokens=8,
            )
            engines.add(raw.headers["x-headway-engine"])
            usage = raw.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
        assert len(engines) == 1
        assert cached > usage.prompt_tokens * 0.8
    explained = await operator(
        cluster, f"/operator/v1/requests/{raw.headers['x-headway-decision']}/explain"
    )
    predicted = {row["decode"]: row["cached_tokens"] for row in explained["candidates"]}  # type: ignore[attr-defined]
    [engine] = engines
    assert predicted.pop(engine) == pytest.approx(cached, rel=0.2)
    assert set(predicted.values()) == {0}


async def test_every_decision_can_be_explained(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme") as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="small", messages=HELLO, max_tokens=8
        )
        decision = raw.headers["x-headway-decision"]
    await until_quiet(cluster)
    explained = await operator(cluster, f"/operator/v1/requests/{decision}/explain")
    candidates = explained["candidates"]
    assert isinstance(candidates, list)
    assert {candidate["decode"] for candidate in candidates} == {"n1-a", "n1-b", "n2-a"}
    assert explained["winner"] in {"n1-a", "n1-b", "n2-a"}
    assert explained["sentence"]
    for candidate in candidates:
        assert len(candidate["axes"]) == 7
        if candidate["is_feasible"]:
            total = sum(axis["cost_micro_usd"] for axis in candidate["axes"])
            assert total == pytest.approx(candidate["cost_micro_usd"])


async def test_curl_sees_the_envelope_everywhere(cluster: LocalCluster) -> None:
    async with httpx2.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        for method, path in (
            ("GET", "/nowhere"), ("GET", "/v1/chat/completions"), ("POST", "/v1/workflows"),
            ("POST", "/v1/chat/completions"), ("GET", "/operator/v1/engines"),
        ):  # fmt: skip
            response = await http.request(method, path, content=b"{")
            error = json.loads(response.content)["error"]
            assert set(error) == {"message", "type", "param", "code"}, (method, path)
            assert response.headers["x-headway-reason"] == error["code"]
