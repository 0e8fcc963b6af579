"""How KV gets from one engine to another: the object, what frees blocks, what fails and how, what is not checked."""

import asyncio
import time
from typing import Any

import pytest

from tests.contract.conftest import Engine, chat

pytestmark = pytest.mark.timeout(900)

ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
OBJECT = {
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
    "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size",
    "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
    "remote_prefill_cached_tokens",
}  # fmt: skip
TOKENS = 12
# How long an engine tries to reach one that is not there.
HANDSHAKE_S = 5.0
BLOCKS = "kv_cache_usage_perc"


def prompt_of(test: str) -> str:
    return f"{test} has " + "a prompt to be moved " * 30


async def leg_1(engine: Engine, prompt: str, **members: Any) -> dict[str, Any]:
    got = await engine.complete(prompt, max_tokens=1, kv_transfer_params=ASKED, **members)
    return got["kv_transfer_params"]


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


async def moved(engine: Engine, prompt: str, params: dict[str, Any] | None, **more: Any) -> str:
    return text(await engine.complete(prompt, max_tokens=TOKENS, kv_transfer_params=params, **more))


async def all_free(engine: Engine) -> None:
    """What earlier tests left is gone."""
    await engine.until_metric(BLOCKS, 0, seconds=3 * engine.lease_s)


async def test_the_object_says_where_the_kv_lies(prefill: Engine) -> None:
    prompt = prompt_of("object")
    got = await prefill.complete(
        prompt, max_tokens=1, kv_transfer_params=ASKED, headers={"x_request_id": "abc"}
    )
    params = got["kv_transfer_params"]
    assert params.keys() >= OBJECT
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["transfer_mode"] == "pull"
    assert params["remote_num_tokens"] == got["usage"]["prompt_tokens"]
    assert params["remote_request_id"].startswith("cmpl-abc")
    assert params["remote_port"] == prefill.side_port
    # A list for each group of layers.
    [blocks] = params["remote_block_ids"]
    assert len(blocks) == len(set(blocks)) > 1
    assert got["choices"][0]["finish_reason"] == "length"


async def test_what_was_moved_is_not_computed_and_is_free_on_the_other_side(
    prefill: Engine, decode: Engine
) -> None:
    await all_free(prefill)
    prompt = prompt_of("moving")
    hits = await decode.metric("external_prefix_cache_hits_total")
    expired = await prefill.metric("nixl_num_kv_expired_reqs_total")
    params = await leg_1(prefill, prompt, headers={"x_request_id": "m1"})
    assert await prefill.metric(BLOCKS) > 0
    got = await decode.complete(
        prompt, max_tokens=TOKENS, kv_transfer_params=params, headers={"x_request_id": "m1"}
    )
    await prefill.until_metric(BLOCKS, 0, seconds=prefill.lease_s / 2)
    assert await prefill.metric("nixl_num_kv_expired_reqs_total") == expired
    assert text(got) == await moved(prefill, prompt, None)
    assert got["kv_transfer_params"] is None
    tokens = got["usage"]["prompt_tokens"]
    assert await decode.metric("external_prefix_cache_hits_total") - hits == tokens
    # What came over counts as computed; the prefill engine's own hits are the truth.
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await decode.complete(prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_chats_and_streams_are_moved_too(prefill: Engine, decode: Engine) -> None:
    body = chat(prompt_of("chat"), max_tokens=TOKENS, ignore_eos=True)
    first = await prefill.post(
        "/v1/chat/completions", {**body, "max_tokens": 1, "kv_transfer_params": ASKED}
    )
    params = first.json()["kv_transfer_params"]
    *chunks, end = await decode.events(
        "/v1/chat/completions", {**body, "kv_transfer_params": params}
    )
    assert end == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    whole = (await prefill.post("/v1/chat/completions", body)).json()
    assert text == whole["choices"][0]["message"]["content"]


async def test_a_streamed_first_leg_tells_nothing(prefill: Engine) -> None:
    chunks = await prefill.events(
        "/v1/completions",
        {"prompt": prompt_of("streamed"), "max_tokens": 1, "kv_transfer_params": ASKED},
    )
    assert not any(chunk.get("kv_transfer_params") for chunk in chunks if chunk != "[DONE]")


async def test_what_nobody_fetches_is_free_when_its_lease_ends(prefill: Engine) -> None:
    await all_free(prefill)
    expired = await prefill.metric("nixl_num_kv_expired_reqs_total")
    began = time.monotonic()
    await leg_1(prefill, prompt_of("leased"))
    await prefill.until_metric(BLOCKS, 0, seconds=2 * prefill.lease_s)
    assert time.monotonic() - began > prefill.lease_s * 0.8
    assert await prefill.metric("nixl_num_kv_expired_reqs_total") == expired + 1


async def test_a_first_leg_that_is_left_holds_nothing(prefill: Engine) -> None:
    await all_free(prefill)
    prompt = prompt_of("left")
    tokens = await prefill.metric("prompt_tokens_total")
    # Long, so that it can not have ended by itself.
    body = {"prompt": prompt, "max_tokens": 3500, "ignore_eos": True, "kv_transfer_params": ASKED}
    asked = asyncio.ensure_future(prefill.post("/v1/completions", body))
    await prefill.until_metric("num_requests_running", 1)
    asked.cancel()
    await asyncio.wait({asked})
    assert asked.cancelled()
    await prefill.until_metric(BLOCKS, 0, seconds=prefill.lease_s / 2)
    assert await prefill.metric("prompt_tokens_total") >= tokens


async def test_an_engine_that_is_not_there_costs_the_handshake(
    prefill: Engine, decode: Engine
) -> None:
    prompt = prompt_of("dead")
    failed = await decode.metric("nixl_num_failed_transfers_total")
    params = await leg_1(prefill, prompt)
    params |= {"remote_port": 1, "remote_engine_id": "somebody-else"}
    began = time.monotonic()
    assert await moved(decode, prompt, params) == await moved(prefill, prompt, None)
    assert time.monotonic() - began > HANDSHAKE_S - 0.5
    assert await decode.metric("nixl_num_failed_transfers_total") == failed + 1


async def test_the_head_of_a_stream_comes_while_its_kv_is_fetched(
    prefill: Engine, decode: Engine
) -> None:
    """Who takes the head for a token hangs up in the middle of a transfer."""
    prompt = prompt_of("head")
    params = await leg_1(prefill, prompt)
    params |= {"remote_port": 2, "remote_engine_id": "nobody"}
    body = {"model": decode.model, "prompt": prompt, "max_tokens": 2, "stream": True}
    began = time.monotonic()
    async with decode.http.stream(
        "POST", "/v1/completions", json={**body, "kv_transfer_params": params}
    ) as response:
        head_s = time.monotonic() - began
        async for _ in response.aiter_bytes():
            break
        body_s = time.monotonic() - began
    assert head_s < 2
    assert body_s > HANDSHAKE_S - 0.5


async def test_a_client_that_leaves_while_kv_is_fetched_leaves_a_living_engine(
    prefill: Engine, decode: Engine
) -> None:
    prompt = prompt_of("leaving")
    params = await leg_1(prefill, prompt)
    params |= {"remote_port": 3, "remote_engine_id": "nowhere"}
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await moved(decode, prompt, params)
    await decode.until_metric("num_requests_waiting", 0)
    await decode.until_metric(BLOCKS, 0)
    assert await moved(decode, "still there", None) == await moved(prefill, "still there", None)
    # The handshake goes on by itself; its failure is not to be counted as another test's.
    await asyncio.sleep(max(0.0, began + HANDSHAKE_S + 1 - time.monotonic()))


async def test_an_unknown_call_is_read_where_it_says(prefill: Engine, decode: Engine) -> None:
    prompt = prompt_of("unknown")
    params = await leg_1(prefill, prompt)
    params["remote_request_id"] = "cmpl-never-0-12345678"
    assert await moved(decode, prompt, params) == await moved(prefill, prompt, None)


async def test_nobody_checks_what_is_fetched(prefill: Engine, decode: Engine) -> None:
    """Another prompt's KV is taken, answered from, and kept under the name of this one."""
    prompt = prompt_of("right")
    params = await leg_1(prefill, prompt_of("wrong"))
    right = await moved(prefill, prompt, None)
    assert await moved(decode, prompt, params) != right
    assert await moved(decode, prompt, None) != right
    salted = await moved(decode, prompt, None, cache_salt="another")
    assert salted == right


async def test_without_words_of_transfer_both_engines_serve_whole_calls(
    prefill: Engine, decode: Engine
) -> None:
    prompt = prompt_of("plain")
    assert await moved(prefill, prompt, None) == await moved(decode, prompt, None)
