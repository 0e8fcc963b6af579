"""OpenAI's own SDK, both clients, against a whole Headway: nothing of it needs to be told that this is not OpenAI."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import openai
import pytest

from cli.processes import LocalCluster

from .conftest import client_of, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

HELLO: Final[Any] = [{"role": "user", "content": "hello, how are you today?"}]


LONG: Final[Any] = {"messages": [{"role": "user", "content": "word " * 40_000}]}


@pytest.fixture
def plain(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    """The blocking client."""
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1", api_key=cluster.tenant_keys["acme"], max_retries=0, timeout=30
    ) as client:
        yield client


async def test_models_are_listed_and_looked_up(cluster: LocalCluster, plain: openai.OpenAI) -> None:
    async with client_of(cluster, "acme", retries=0) as client:
        listed = [model async for model in client.models.list()]
        one = await client.models.retrieve("small")
        with pytest.raises(openai.NotFoundError) as absent:
            await client.models.retrieve("absent")
    assert [model.id for model in listed] == ["small"]
    assert (one.id, one.object, one.owned_by) == ("small", "model", "headway")
    assert (absent.value.code, absent.value.param) == ("model_not_found", "model")
    assert [model.id for model in await asyncio.to_thread(lambda: list(plain.models.list()))] == [
        "small"
    ]


async def test_both_clients_get_the_same_answer_whole_and_in_pieces(
    cluster: LocalCluster, plain: openai.OpenAI
) -> None:
    asked: Any = {"model": "small", "messages": HELLO, "max_tokens": 24, "temperature": 0}

    def wholly() -> openai.types.chat.ChatCompletion:
        return plain.chat.completions.create(**asked)

    def in_pieces() -> tuple[str, Any]:
        text, usage = "", None
        for chunk in plain.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text, usage

    whole = await asyncio.to_thread(wholly)
    text, usage = await asyncio.to_thread(in_pieces)
    async with client_of(cluster, "acme", retries=0) as client:
        again = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as events:
            streamed = await events.get_final_completion()
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens <= 24
    assert text == whole.choices[0].message.content == again.choices[0].message.content
    assert streamed.choices[0].message.content == text
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


async def test_several_choices_and_log_probabilities(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme", retries=0) as client:
        made = await client.chat.completions.create(
            model="small", messages=HELLO, n=3, max_tokens=6, temperature=1.0, seed=7
        )
        assert sorted(choice.index for choice in made.choices) == [0, 1, 2]
        indices, tokens = set(), 0
        async for chunk in await client.chat.completions.create(
            model="small", messages=HELLO, n=2, max_tokens=6, temperature=1.0, logprobs=True, stream=True
        ):  # fmt: skip
            for choice in chunk.choices:
                indices.add(choice.index)
                if choice.logprobs is not None and choice.logprobs.content:
                    tokens += len(choice.logprobs.content)
                    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
        completed = await client.completions.create(
            model="small", prompt=["one", "two"], max_tokens=4
        )
    assert indices == {0, 1}
    assert tokens > 0
    assert [choice.index for choice in completed.choices] == [0, 1]


async def test_every_error_is_the_sdks_own(cluster: LocalCluster) -> None:
    async with client_of(cluster, "acme", retries=2) as client:
        wrong: Any
        for wrong, kind, code, param in (
            ({"model": "absent"}, openai.NotFoundError, "model_not_found", None),
            ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
            ({"max_tokens": 0}, openai.BadRequestError, "invalid_request", "max_tokens"),
            ({"n": 99}, openai.BadRequestError, "invalid_request", "n"),
            (LONG, openai.BadRequestError, "context_length_exceeded", None),
            ({"extra_headers": {"x-headway-workflow": "wf-none"}}, openai.NotFoundError, "workflow_not_found", None),
            ({"extra_headers": {"x-headway-step": "x"}}, openai.BadRequestError, "invalid_request", "x-headway-step"),
        ):  # fmt: skip
            asked = {"model": "small", "messages": HELLO, "max_tokens": 4, **wrong}
            with pytest.raises(kind) as told:
                await client.chat.completions.create(**asked)
            assert told.value.code == code, wrong
            if param is not None:
                assert told.value.param == param, wrong
            assert told.value.request_id, wrong
        for key in ("hw-tenant-wrong", cluster.operator_key):
            with pytest.raises(openai.AuthenticationError) as stranger:
                await client.with_options(api_key=key).models.list()
            assert stranger.value.code == "invalid_api_key"


async def test_what_is_not_offered_says_what_is(cluster: LocalCluster) -> None:
    """Each with a typed error that is not asked again."""
    async with client_of(cluster, "acme", retries=2) as client:
        calls: Any = (
            lambda: client.embeddings.create(model="small", input="x"),
            lambda: client.responses.create(model="small", input="x"),
            lambda: client.moderations.create(input="x"),
            lambda: client.images.generate(prompt="x"),
            client.files.list,
            client.batches.list,
            lambda: client.models.delete("small"),
        )
        for call in calls:
            with pytest.raises(openai.APIStatusError) as told:
                await call()
            error = told.value
            assert error.status_code in {404, 405}
            assert error.code in {"not_found", "method_not_allowed"}
            assert error.response.headers["x-should-retry"] == "false"
            if error.status_code == 404:
                assert isinstance(error, openai.NotFoundError)
                assert "POST /v1/chat/completions" in error.message


async def test_a_limit_of_the_key_is_obeyed_by_the_sdk_itself(cluster: LocalCluster) -> None:
    """What passes is told with a time, and the SDK comes back after it; what does not pass is asked once."""
    named = {"authorization": f"Bearer {cluster.operator_key}"}
    async with httpx2.AsyncClient(base_url=cluster.url, headers=named, trust_env=False) as http:
        body = {"name": "limited", "tenant_id": "acme", "requests_per_minute": 60}
        made = (await http.post("/operator/v1/keys", json=body)).json()
        asked: Any = {"model": "small", "messages": HELLO, "max_tokens": 1}
        url = f"{cluster.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=made["key"], max_retries=0) as client:

            async def until_limited() -> None:
                for _ in range(90):
                    await client.chat.completions.create(**asked)

            with pytest.raises(openai.RateLimitError) as limited:
                await until_limited()
            headers = limited.value.response.headers
            assert limited.value.code == "rate_limited"
            assert (headers["x-should-retry"], int(headers["retry-after-ms"]) > 0) == ("true", True)
            again = await client.with_options(max_retries=5).chat.completions.create(**asked)
            assert again.choices
        await http.patch(f"/operator/v1/budgets/key:{made['id']}", json={"limit": 1})
        spent_body = {"name": "spent", "tenant_id": "acme"}
        spent = (await http.post("/operator/v1/keys", json=spent_body)).json()
        await http.patch(f"/operator/v1/budgets/key:{spent['id']}", json={"limit": 1})
        sent: list[str] = []

        async def note(request: Any) -> None:
            sent.append(request.headers.get("x-stainless-retry-count"))

        async with openai.AsyncOpenAI(base_url=url, api_key=spent["key"], max_retries=5) as client:
            client._client.event_hooks["request"].append(note)
            with pytest.raises(openai.RateLimitError) as quota:
                await client.chat.completions.create(**{**asked, "max_tokens": 500})
        assert quota.value.code == "insufficient_quota"
        assert sent == ["0"]


async def test_tools_and_shapes_are_taken_and_the_answer_stays_an_answer(
    cluster: LocalCluster,
) -> None:
    """The simulated engine calls no tools; that an engine's calls arrive is shown by scripted ones."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"name": "s", "schema": {"type": "object", "properties": {}}}
    async with client_of(cluster, "acme", retries=0) as client:
        made: Any = await client.chat.completions.create(
            model="small", messages=HELLO, max_tokens=4, tools=[tool], tool_choice="auto",  # type: ignore[list-item]
            response_format={"type": "json_schema", "json_schema": schema},
        )  # fmt: skip
    assert made.choices[0].message.role == "assistant"
    json.dumps(made.model_dump())
    await until_quiet(cluster)
