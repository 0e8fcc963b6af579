"""What both kinds of engine answer over HTTP: fields, chunks, usage, ids, ends, errors, metric names."""

import asyncio
import contextlib
from typing import Any

import httpx2
import msgspec
import pytest

from dataplane.engines.exposition import read_capacity, read_telemetry
from tests.contract.conftest import Engine, chat

pytestmark = pytest.mark.timeout(900)

LONG = "a prompt that is used again and again " * 20

# Members that the gateway, the SDK or an operator read, by where they stand. Engines may send more.
ANSWER = {
    "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
    "kv_transfer_params",
}  # fmt: skip
CHAT_CHOICE = {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"}
COMPLETION_CHOICE = {"index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"}
MESSAGE = {"role", "content", "refusal"}
USAGE = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}
CHUNK = {"id", "object", "created", "model", "choices"}


async def test_small_routes(prefill: Engine) -> None:
    health = await prefill.http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    version = (await prefill.http.get("/version")).json()
    assert version["version"].startswith("0.32.0")
    models = (await prefill.http.get("/v1/models")).json()
    assert models["object"] == "list"
    [card] = models["data"]
    expected = {"id": prefill.model, "object": "model", "owned_by": "vllm", "max_model_len": 4096}
    assert expected.items() <= card.items()
    assert {"created", "root", "parent", "permission"} <= card.keys()


async def test_a_whole_chat(prefill: Engine) -> None:
    got = await prefill.chat("hello", max_tokens=6, headers={"x_request_id": "abc"})
    assert got.keys() >= ANSWER
    assert (got["id"], got["object"], got["model"]) == (
        "chatcmpl-abc", "chat.completion", prefill.model,
    )  # fmt: skip
    [choice] = got["choices"]
    assert choice.keys() >= CHAT_CHOICE
    assert choice["message"].keys() >= MESSAGE
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    usage = got["usage"]
    assert usage.keys() >= USAGE
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert got["kv_transfer_params"] is None


async def test_a_whole_completion(prefill: Engine) -> None:
    got = await prefill.complete("once upon", max_tokens=5, headers={"x_request_id": "abc"})
    assert got.keys() >= ANSWER
    assert (got["id"], got["object"]) == ("cmpl-abc", "text_completion")
    [choice] = got["choices"]
    assert choice.keys() >= COMPLETION_CHOICE
    assert choice["finish_reason"] == "length"
    other = await prefill.complete("once upon", max_tokens=5)
    assert other["id"].startswith("cmpl-")
    assert other["id"] != got["id"]
    assert other["choices"][0]["text"] == choice["text"]


async def test_completion_tokens_have_a_default_and_chats_have_none(prefill: Engine) -> None:
    got = await prefill.complete("once upon", ignore_eos=True)
    assert got["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("asks", [None, "usage", "continuous"])
async def test_a_stream_of_chat(prefill: Engine, asks: str | None) -> None:
    body = chat("hello", max_tokens=6, ignore_eos=True)
    if asks:
        body["stream_options"] = {
            "include_usage": True, "continuous_usage_stats": asks == "continuous",
        }  # fmt: skip
    *chunks, end = await prefill.events("/v1/chat/completions", body, x_request_id="abc")
    assert end == "[DONE]"
    last = chunks.pop() if asks else None
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.keys() >= CHUNK for chunk in chunks)
    role, *words = chunks
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["choices"][0]["finish_reason"] is None
    assert all("role" not in word["choices"][0]["delta"] for word in words)
    finishes = [word["choices"][0]["finish_reason"] for word in words]
    assert finishes[-1] == "length"
    assert set(finishes[:-1]) <= {None}
    whole = await prefill.chat("hello", max_tokens=6, ignore_eos=True)
    text = "".join(word["choices"][0]["delta"]["content"] for word in words)
    assert text == whole["choices"][0]["message"]["content"]
    if asks is None:
        assert not any(chunk.get("usage") for chunk in chunks)
        return
    assert last is not None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    if asks == "continuous":
        counts = [chunk["usage"]["completion_tokens"] for chunk in words]
        assert counts == sorted(counts)
        assert counts[-1] == 6
    else:
        assert not any(chunk.get("usage") for chunk in chunks)


async def test_a_stream_of_a_completion(prefill: Engine) -> None:
    body = {
        "prompt": "once upon", "max_tokens": 6, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    *chunks, usage, end = await prefill.events("/v1/completions", body)
    assert end == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    whole = await prefill.complete("once upon", max_tokens=6, ignore_eos=True)
    assert text == whole["choices"][0]["text"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)


async def test_a_stop_string_is_not_shown_and_is_named(prefill: Engine) -> None:
    whole = (await prefill.complete("once upon", max_tokens=30, ignore_eos=True))["choices"][0]
    stop = whole["text"][40:46]
    members = {"max_tokens": 30, "ignore_eos": True, "stop": [stop]}
    [cut] = (await prefill.complete("once upon", **members))["choices"]
    assert cut["text"] == whole["text"].partition(stop)[0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


async def test_several_answers(prefill: Engine) -> None:
    members = {"max_tokens": 3, "n": 2, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    got = await prefill.complete("once upon", **members)
    assert [choice["index"] for choice in got["choices"]] == [0, 1]
    assert got["usage"]["completion_tokens"] == 6
    again = await prefill.complete("once upon", **members)
    texts = [choice["text"] for choice in got["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]


async def test_token_ids_go_both_ways(prefill: Engine) -> None:
    tokens = (
        await prefill.http.post("/tokenize", json={"model": prefill.model, "prompt": "once upon"})
    ).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert tokens["max_model_len"] == 4096
    members = {"max_tokens": 8, "ignore_eos": True}
    by_text = await prefill.complete("once upon", return_token_ids=True, **members)
    by_ids = await prefill.complete(tokens["tokens"], **members)
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert len(by_text["choices"][0]["token_ids"]) == 8


async def test_a_repeated_prompt_is_cached_up_to_a_whole_block(prefill: Engine) -> None:
    block = read_capacity("e", 1, (await prefill.metrics()).encode(), await models(prefill))
    first = await prefill.complete(LONG, max_tokens=1)
    again = await prefill.complete(LONG, max_tokens=1)
    prompt = first["usage"]["prompt_tokens"]
    # The last token is computed in any case.
    whole_blocks = (prompt - 1) // block.block_tokens * block.block_tokens
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_blocks


async def test_a_salt_keeps_prompts_apart(prefill: Engine) -> None:
    prompt = f"salted {LONG}"
    first = await prefill.complete(prompt, max_tokens=4, cache_salt="a")
    other = await prefill.complete(prompt, max_tokens=4, cache_salt="b")
    again = await prefill.complete(prompt, max_tokens=4, cache_salt="b")
    cached = [
        got["usage"]["prompt_tokens_details"]["cached_tokens"] for got in (first, other, again)
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
    assert first["choices"][0]["text"] == other["choices"][0]["text"]


async def models(engine: Engine) -> bytes:
    return (await engine.http.get("/v1/models")).content


# ---------------------------------------------------------------- errors

ERRORS: dict[str, tuple[str, dict[str, Any], int, str, str | None]] = {
    "unknown model": (
        "/v1/chat/completions", {**chat("x"), "model": "nobody"}, 404, "NotFoundError", "model",
    ),
    "no token": (
        "/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens",
    ),
    "too long": (
        "/v1/completions", {"prompt": "many words " * 9000, "max_tokens": 5}, 400,
        "BadRequestError", "input_tokens",
    ),
    "no answer": ("/v1/completions", {"prompt": "x", "n": 0}, 400, "BadRequestError", None),
    "greedy twins": (
        "/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, 400, "BadRequestError", None,
    ),
    "no messages": ("/v1/chat/completions", {}, 400, "Bad Request", "body.messages"),
    "nothing said": (
        "/v1/completions", {"prompt": ""}, 400, "BadRequestError", "prompt",
    ),
    "no such token": (
        "/v1/completions", {"prompt": [99_999_999_999]}, 400, "BadRequestError", None,
    ),
    "more than the most": (
        "/v1/completions", {"prompt": "x", "min_tokens": 5, "max_tokens": 1}, 400,
        "BadRequestError", None,
    ),
    "options of no stream": (
        "/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400,
        "BadRequestError", "stream_options",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
async def test_errors_are_one_envelope(prefill: Engine, name: str) -> None:
    path, body, status, error_type, param = ERRORS[name]
    got = await prefill.post(path, body)
    assert got.status_code == status, got.text
    assert got.json().keys() == {"error"}
    error = got.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["type"], error["code"], error["param"]) == (error_type, status, param)


async def test_what_is_no_json_is_an_error_of_the_clients(prefill: Engine) -> None:
    got = await prefill.http.post(
        "/v1/chat/completions",
        content=b'{"model":',
        headers={"content-type": "application/json"},
    )
    assert got.status_code == 400
    assert got.json()["error"]["code"] == 400
    unknown = await prefill.http.get("/nothing/here")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    method = await prefill.http.get("/v1/completions")
    assert (method.status_code, method.json()) == (405, {"detail": "Method Not Allowed"})


async def test_unknown_members_are_ignored(prefill: Engine) -> None:
    assert await prefill.complete("x", max_tokens=1, nobody_knows_this={"a": [1]})


# ---------------------------------------------------------------- going away


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(prefill: Engine, is_stream: object) -> None:
    body = {
        "model": prefill.model, "prompt": f"leaving {is_stream}", "max_tokens": 3500,
        "ignore_eos": True, "temperature": 0, "stream": is_stream,
    }  # fmt: skip

    async def ask() -> None:
        async with prefill.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                pass

    asked = asyncio.ensure_future(ask())
    await prefill.until_metric("num_requests_running", 1)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    await prefill.until_metric("num_requests_running", 0)
    await prefill.until_metric("kv_cache_usage_perc", 0)


# ---------------------------------------------------------------- metrics

GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
}
COUNTERS = {
    "prefix_cache_queries_total", "prefix_cache_hits_total", "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
    "prompt_tokens_by_source_total", "generation_tokens_total", "request_success_total",
    "admission_rejections_total", "nixl_num_failed_transfers_total",
    "nixl_num_kv_expired_reqs_total",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds",
}  # fmt: skip
GONE = {"gpu_cache_usage_perc", "time_per_output_token_seconds"}


async def test_metrics_have_the_names_and_kinds_that_agents_read(prefill: Engine) -> None:
    await prefill.complete("once upon", max_tokens=4)
    text = await prefill.metrics()
    kinds = {
        line.split()[2].removeprefix("vllm:"): line.split()[3]
        for line in text.splitlines()
        if line.startswith("# TYPE vllm:")
    }
    expected = (
        dict.fromkeys(GAUGES, "gauge")
        | dict.fromkeys(COUNTERS, "counter")
        | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert {name: kinds.get(name) for name in expected} == expected
    assert not GONE & kinds.keys()
    for sample in (
        "num_requests_running",
        "prompt_tokens_total",
        "inter_token_latency_seconds_sum",
    ):
        assert f'vllm:{sample}{{engine="0",model_name="{prefill.model}"' in text


async def test_telemetry_counts_what_was_answered(prefill: Engine) -> None:
    before = read_telemetry("e", (await prefill.metrics()).encode())
    got = await prefill.complete("counted tokens are", max_tokens=9, ignore_eos=True)
    ends = 0
    while True:
        after = read_telemetry("e", (await prefill.metrics()).encode())
        if after.generation_tokens - before.generation_tokens == 9:
            break
        ends += 1
        assert ends < 200
        await asyncio.sleep(0.05)
    assert after.prompt_tokens - before.prompt_tokens == got["usage"]["prompt_tokens"]
    assert after.ttft_count - before.ttft_count == 1
    assert after.itl_count - before.itl_count == 8
    assert (after.running, after.waiting) == (0, 0)


async def test_ids_of_finished_calls_can_be_used_again(prefill: Engine) -> None:
    async def one() -> dict[str, Any]:
        return await prefill.complete("twice", max_tokens=40, headers={"x_request_id": "same"})

    first, second = await asyncio.gather(one(), one())
    assert first["id"] == second["id"] == "cmpl-same"
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


async def test_the_whole_is_json_that_can_be_decoded_in_one_go(prefill: Engine) -> None:
    response: httpx2.Response = await prefill.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 1}
    )
    assert response.headers["content-type"].startswith("application/json")
    assert msgspec.json.decode(response.content)["object"] == "text_completion"
