"""The simulated engine over real HTTP: vLLM's surface, batching, prefix cache, P/D transfer,
faults.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from dataplane.engines.exposition import read_capacity, read_telemetry
from tests.integration.simulated_world import CONTEXT, RunningEngine, running_engine


@pytest.fixture
async def engine() -> AsyncIterator[RunningEngine]:
    async with running_engine(allow_faults=True) as running:
        yield running


def client_of(engine: RunningEngine) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none", max_retries=0
    )


async def test_the_official_sdk_streams_a_chat(engine: RunningEngine) -> None:
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert len(text.split()) == 20
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0


async def test_the_official_sdk_lists_models_and_types_errors(engine: RunningEngine) -> None:
    async with client_of(engine) as client:
        models = [model async for model in client.models.list()]
        assert models[0].id == "m"
        assert models[0].max_model_len == CONTEXT
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await client.completions.create(model="m", prompt="x" * 4 * CONTEXT)
        assert caught.value.param == "input_tokens"
        whole = await client.completions.create(model="m", prompt="x", max_tokens=3)
        assert whole.usage.completion_tokens <= 3


async def test_streamed_and_whole_answers_are_the_same(engine: RunningEngine) -> None:
    members = {"prompt": "one two", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = (await engine.completion("one two", max_tokens=60, ignore_eos=True)).json()
    events = await engine.events(
        "/v1/completions", {**members, "stream_options": {"include_usage": True}}
    )
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    streamed = "".join(event["choices"][0]["text"] for event in events[:-2])
    assert streamed == whole["choices"][0]["text"]
    assert events[-2]["usage"]["completion_tokens"] == 60
    assert all("usage" not in event for event in events[:-2])


async def test_continuous_usage_counts_every_token(engine: RunningEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await engine.events(
        "/v1/completions",
        {"prompt": "go", "max_tokens": 40, "ignore_eos": True, "stream_options": options},
    )
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 40
    words = 0
    for event in events[:-2]:
        words += len(event["choices"][0]["text"].split())
        assert event["usage"]["completion_tokens"] == words


async def test_without_usage_asked_none_is_sent(engine: RunningEngine) -> None:
    events = await engine.events("/v1/completions", {"prompt": "go", "max_tokens": 4})
    assert all("usage" not in event for event in events[:-1])
    assert all(event["choices"] for event in events[:-1])


async def test_several_choices_and_prompts(engine: RunningEngine) -> None:
    answer = (await engine.completion(["a", "b b b"], n=2, max_tokens=5, temperature=1)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 1 + 2
    events = await engine.events(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 3},
    )
    ends = [
        event["choices"][0]["index"]
        for event in events[:-1]
        if event["choices"][0]["finish_reason"]
    ]
    assert sorted(ends) == [0, 1]


async def test_a_stop_string_ends_the_text_before_it(engine: RunningEngine) -> None:
    plain = (await engine.completion("q", max_tokens=30, ignore_eos=True)).json()
    words = plain["choices"][0]["text"].split(" ")[1:]
    stop = f"{words[6][-2:]} {words[7]}"
    cut = (await engine.completion("q", max_tokens=30, ignore_eos=True, stop=[stop])).json()
    choice = cut["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == plain["choices"][0]["text"].split(stop)[0]
    assert cut["usage"]["completion_tokens"] == 8
    events = await engine.events(
        "/v1/completions",
        {"prompt": "q", "max_tokens": 30, "ignore_eos": True, "stop": stop, "temperature": 0},
    )
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]


async def test_answers_end_by_themselves_or_at_their_limit(engine: RunningEngine) -> None:
    ended = (await engine.chat("tell me")).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    tokens = ended["usage"]["completion_tokens"]
    again = (await engine.chat("tell me", min_tokens=tokens + 1, max_tokens=tokens + 5)).json()
    assert again["usage"]["completion_tokens"] > tokens
    text = ended["choices"][0]["message"]["content"]
    assert again["choices"][0]["message"]["content"].startswith(text)


async def test_an_answer_goes_on_from_its_own_beginning(engine: RunningEngine) -> None:
    """A stream that is continued elsewhere from prompt and partial text gives the same tokens."""
    first = (await engine.completion("abcd", max_tokens=40, ignore_eos=True)).json()
    text = first["choices"][0]["text"]
    rest = (await engine.completion("abcd" + text[:60], max_tokens=25, ignore_eos=True)).json()
    assert rest["choices"][0]["text"] == text[60:160]


async def test_a_repeated_prompt_is_cached_but_for_its_last_block(engine: RunningEngine) -> None:
    prompt = "word" * 160
    first = (await engine.completion(prompt, max_tokens=1)).json()["usage"]
    again = (await engine.completion(prompt, max_tokens=1)).json()["usage"]
    salted = (await engine.completion(prompt, max_tokens=1, cache_salt="s")).json()["usage"]
    assert (first["prompt_tokens"], first["prompt_tokens_details"]["cached_tokens"]) == (160, 0)
    assert again["prompt_tokens_details"]["cached_tokens"] == 144
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    assert await engine.metric("prefix_cache_hits_total") == 144
    assert await engine.metric("prefix_cache_queries_total") == 480


async def test_the_next_turn_finds_the_last_answer_cached(engine: RunningEngine) -> None:
    messages = [{"role": "user", "content": "a question " * 30}]
    body = {"model": "m", "temperature": 0, "max_tokens": 64, "ignore_eos": True}
    url = "/v1/chat/completions"
    first = (await engine.http.post(url, json={**body, "messages": messages})).json()
    reply = first["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"]}]
    messages += [{"role": "user", "content": "and then?"}]
    second = (await engine.http.post(url, json={**body, "messages": messages})).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    before = first["usage"]["prompt_tokens"] + 64
    assert before - 32 < cached <= before


async def test_requests_share_steps() -> None:
    """Sixteen answers at once take little longer than one, and do not exceed the seats."""
    async with running_engine(speedup=1.0, max_num_seqs=16) as engine:
        members = {"max_tokens": 60, "ignore_eos": True}
        began = time.perf_counter()
        await engine.completion("solo", **members)
        alone_s = time.perf_counter() - began
        began = time.perf_counter()
        await asyncio.gather(*(engine.completion(f"number {n}", **members) for n in range(16)))
        assert time.perf_counter() - began < 3 * alone_s


async def test_waiting_requests_are_seen_and_refused_over_the_limit() -> None:
    async with running_engine(max_num_seqs=2, max_num_queued_reqs=4, speedup=1.0) as engine:
        members = {"max_tokens": 200, "ignore_eos": True}
        calls = [asyncio.create_task(engine.completion(f"p{n}", **members)) for n in range(4)]
        await engine.until_metric("num_requests_waiting", 2)
        assert await engine.metric("num_requests_running") == 2
        refused = await engine.completion("one more", **members)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert {(await call).status_code for call in calls} == {200}
        assert await engine.metric("admission_rejections_total") == 1


async def test_a_full_pool_preempts_and_finishes_all() -> None:
    async with running_engine(kv_tokens=1024, context_tokens_max=1024) as engine:
        members = {"max_tokens": 400, "ignore_eos": True}
        alone = (await engine.completion("p0", **members)).json()["choices"][0]["text"]
        calls = await asyncio.gather(*(engine.completion(f"p{n}", **members) for n in range(6)))
        assert {call.status_code for call in calls} == {200}
        assert calls[0].json()["choices"][0]["text"] == alone
        assert await engine.metric("num_preemptions_total") > 0
        assert await engine.metric("kv_cache_usage_perc") == 0


async def test_a_disconnect_frees_everything_at_once(engine: RunningEngine) -> None:
    body = {"model": "m", "prompt": "x" * 400, "max_tokens": 3900, "ignore_eos": True}
    async with engine.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as one:
        lines = one.aiter_lines()
        await anext(lines)
        assert await engine.metric("kv_cache_usage_perc") > 0
    await engine.until_metric("num_requests_running", 0)
    assert await engine.metric("kv_cache_usage_perc") == 0
    whole = asyncio.create_task(engine.http.post("/v1/completions", json=body))
    await engine.until_metric("num_requests_running", 1)
    whole.cancel()
    await engine.until_metric("num_requests_running", 0)
    assert await engine.metric("kv_cache_usage_perc") == 0


async def prefill(engine: RunningEngine, prompt: str) -> dict:
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = await engine.completion(prompt, max_tokens=1, kv_transfer_params=asked)
    return answer.json()["kv_transfer_params"]


async def test_a_prompt_is_prefilled_here_and_decoded_there() -> None:
    prompt = "some long prompt " * 40
    members = {"max_tokens": 30, "ignore_eos": True}
    async with running_engine() as prefiller, running_engine() as decoder:
        params = await prefill(prefiller, prompt)
        assert params["do_remote_prefill"] is True
        assert params["remote_port"] == prefiller.port
        assert await prefiller.metric("kv_cache_usage_perc") > 0
        there = (await decoder.completion(prompt, kv_transfer_params=params, **members)).json()
        here = (await prefiller.completion(prompt, **members)).json()
        assert there["choices"][0]["text"] == here["choices"][0]["text"]
        assert there["kv_transfer_params"] is None
        prompt_tokens = there["usage"]["prompt_tokens"]
        assert await decoder.metric("external_prefix_cache_hits_total") == prompt_tokens
        # Handed over once: the blocks are free, and whoever knows of them still finds them as they were.
        await prefiller.until_metric("kv_cache_usage_perc", 0)
        twice = (await decoder.completion(prompt, kv_transfer_params=params, **members)).json()
        assert twice["choices"][0]["text"] == here["choices"][0]["text"]
        assert await decoder.metric("nixl_num_failed_transfers_total") == 0


async def test_kv_that_is_fetched_after_its_lease_poisons_the_cache() -> None:
    """The trap in vLLM that a control plane must keep away from: nobody notices, and it lasts."""
    prompt, members = "some long prompt " * 40, {"max_tokens": 30, "ignore_eos": True}
    async with (
        running_engine(kv_lease_s=0.3, kv_tokens=2048, context_tokens_max=2048) as prefiller,
        running_engine() as decoder,
    ):
        here = (await prefiller.completion(prompt, **members)).json()["choices"][0]["text"]
        params = await prefill(prefiller, prompt)
        await prefiller.until_metric("kv_cache_usage_perc", 0)
        for filler in range(8):
            await prefiller.completion(f"{filler} is another prompt " * 60, max_tokens=1)
        late = (await decoder.completion(prompt, kv_transfer_params=params, **members)).json()
        again = (await decoder.completion(prompt, **members)).json()
    assert late["choices"][0]["text"] != here
    assert again["choices"][0]["text"] != here
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_an_engine_that_waits_renews_the_lease() -> None:
    prompt = "some long prompt " * 40
    async with (
        running_engine(kv_lease_s=0.6) as prefiller,
        running_engine(kv_lease_s=0.6, max_num_seqs=1, speedup=1.0) as decoder,
    ):
        params = await prefill(prefiller, prompt)
        # The only seat is taken for longer than the lease.
        other = asyncio.ensure_future(decoder.completion("x", max_tokens=150, ignore_eos=True))
        await decoder.until_metric("num_requests_running", 1)
        fetched = await decoder.completion(prompt, kv_transfer_params=params, max_tokens=2)
        await other
        assert fetched.status_code == 200
        assert await decoder.metric("external_prefix_cache_hits_total") > 0
        assert await prefiller.metric("nixl_num_kv_expired_reqs_total") == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_policy_fail_ends_a_call_whose_kv_does_not_come(is_stream: object) -> None:
    async with running_engine(kv_load_failure_policy="fail", kv_handshake_s=0.2) as decoder:
        params = {
            "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1,
            "remote_request_id": "r", "remote_block_ids": [[0]],
        }  # fmt: skip
        answer = await decoder.completion("words", kv_transfer_params=params, stream=is_stream)
        assert "could not be loaded" in answer.text
        assert answer.status_code == (200 if is_stream else 500)
        await decoder.until_metric("kv_cache_usage_perc", 0)


@pytest.mark.parametrize(
    ("fault", "value"),
    [("kv_withheld", True), ("kv_finish_reason", "error"), ("kv_finish_reason", "tool_calls")],
)
async def test_a_prefill_can_go_wrong(fault: str, value: object) -> None:
    async with running_engine(allow_faults=True, kv_lease_s=0.3) as prefiller:
        await prefiller.http.post("/fault", json={fault: value})
        asked = {"do_remote_decode": True}
        done = (
            await prefiller.completion("x " * 60, max_tokens=1, kv_transfer_params=asked)
        ).json()
        if fault == "kv_withheld":
            assert done["kv_transfer_params"] is None
        else:
            assert done["choices"][0]["finish_reason"] == value
        # Nobody can fetch it, and it does not stay.
        await prefiller.until_metric("kv_cache_usage_perc", 0)
        assert await prefiller.metric("nixl_num_kv_expired_reqs_total") == 1


async def test_an_engine_whose_kv_can_not_be_reached_costs_the_handshake() -> None:
    async with (
        running_engine(allow_faults=True) as prefiller,
        running_engine(kv_handshake_s=0.4) as decoder,
    ):
        params = await prefill(prefiller, "words " * 100)
        await prefiller.http.post("/fault", json={"kv_unreachable": True})
        began = time.monotonic()
        answer = await decoder.completion("words " * 100, kv_transfer_params=params)
        assert answer.status_code == 200
        assert time.monotonic() - began >= 0.4
        assert await decoder.metric("nixl_num_failed_transfers_total") == 1


async def test_blocks_that_nobody_pulls_are_freed_when_their_lease_ends() -> None:
    async with running_engine(kv_lease_s=0.4) as prefiller, running_engine() as decoder:
        params = await prefill(prefiller, "some long prompt " * 40)
        assert await prefiller.metric("kv_cache_usage_perc") > 0
        await prefiller.until_metric("kv_cache_usage_perc", 0)
        assert await prefiller.metric("nixl_num_kv_expired_reqs_total") == 1
        late = await decoder.completion("some long prompt " * 40, kv_transfer_params=params)
        assert late.status_code == 200


async def test_a_dead_prefill_engine_costs_time_only() -> None:
    async with running_engine(kv_handshake_s=0.3) as decoder:
        async with running_engine() as prefiller:
            params = await prefill(prefiller, "words " * 100)
        answer = await decoder.completion("words " * 100, kv_transfer_params=params)
        assert answer.status_code == 200


async def test_without_a_connector_nothing_is_held() -> None:
    async with running_engine(kv_connector="") as alone:
        assert await prefill(alone, "words " * 100) is None
        assert await alone.metric("kv_cache_usage_perc") == 0


async def test_small_routes(engine: RunningEngine) -> None:
    tokens = (await engine.http.post("/tokenize", json={"model": "m", "prompt": "12345678"})).json()
    assert (tokens["count"], tokens["max_model_len"]) == (2, CONTEXT)
    by_ids = await engine.completion(tokens["tokens"], max_tokens=8, ignore_eos=True)
    by_text = await engine.completion("12345678", max_tokens=8, ignore_eos=True)
    assert by_ids.json()["choices"] == by_text.json()["choices"]
    assert "version" in (await engine.http.get("/version")).json()
    assert (await engine.http.get("/health")).status_code == 200
    missing = await engine.http.get("/nothing")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert (await engine.http.post("/v1/completions", content=b"{")).status_code == 400
    assert (await engine.completion("x", max_tokens=0)).status_code == 400
    assert (await engine.completion("x", n=1000)).status_code == 400
    named = await engine.http.post(
        "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "abc"}
    )
    assert named.json()["id"] == "cmpl-abc"


async def test_the_scrape_is_readable_as_vllms(engine: RunningEngine) -> None:
    await engine.completion("hello", max_tokens=11, ignore_eos=True)
    exposition = (await engine.http.get("/metrics")).content
    telemetry = read_telemetry("e", exposition)
    assert (telemetry.generation_tokens, telemetry.ttft_count, telemetry.itl_count) == (11, 1, 10)
    models = (await engine.http.get("/v1/models")).content
    capacity = read_capacity("e", 7, exposition, models)
    assert (capacity.kv_tokens, capacity.block_tokens, capacity.seats) == (16384, 16, 7)
    assert capacity.context_tokens_max == CONTEXT


async def fault(engine: RunningEngine, **members: object) -> None:
    assert (await engine.http.post("/fault", json=members)).status_code == 200


async def test_faults_can_be_had(engine: RunningEngine) -> None:
    await fault(engine, refuse=True)
    assert (await engine.completion("x")).status_code == 503
    await fault(engine, error_rate=0.5)
    statuses = [(await engine.completion("x", max_tokens=1)).status_code for _ in range(6)]
    assert statuses.count(500) == 3
    await fault(engine, drop_before_first_byte=True)
    with pytest.raises(httpx2.RemoteProtocolError):
        await engine.completion("x")
    await fault(engine, cut_after_tokens=5)
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True}
    with pytest.raises(httpx2.RemoteProtocolError):
        await engine.events("/v1/completions", body)
    await fault(engine, error_after_tokens=5)
    events = await engine.events("/v1/completions", body)
    assert events[-2]["error"]["code"] == 500
    await fault(engine, hang=True)
    with pytest.raises(httpx2.ReadTimeout):
        await engine.http.post("/v1/completions", json={"prompt": "x"}, timeout=0.5)
    await fault(engine)
    assert (await engine.completion("x")).status_code == 200
    assert await engine.metric("num_requests_running") == 0


async def test_a_cut_stream_shows_exactly_its_tokens(engine: RunningEngine) -> None:
    await fault(engine, cut_after_tokens=5)
    body = {"model": "m", "prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
    read: list[str] = []

    async def read_all() -> None:
        async with engine.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                read.append(line)  # noqa: PERF401 - what came before the cut counts

    with pytest.raises(httpx2.RemoteProtocolError):
        await read_all()
    texts = "".join(read).split('"text":"')[1:]
    assert sum(len(text.split('"')[0].split()) for text in texts) == 5


async def test_faults_need_permission() -> None:
    async with running_engine() as engine:
        assert (await engine.http.post("/fault", json={"refuse": True})).status_code == 404


async def test_slowness_stretches_steps() -> None:
    async with running_engine(speedup=1.0, allow_faults=True) as engine:
        members = {"max_tokens": 30, "ignore_eos": True}
        await engine.completion("x", **members)
        await fault(engine, slow_factor=3.0)
        before = await engine.metric("inter_token_latency_seconds_sum")
        await engine.completion("x", **members)
        after = await engine.metric("inter_token_latency_seconds_sum")
        assert after - before > 2.5 * before


async def test_sigterm_lets_running_answers_finish(engine: RunningEngine) -> None:
    call = asyncio.create_task(engine.completion("x", max_tokens=300, ignore_eos=True))
    await engine.until_metric("num_requests_running", 1)
    engine.process.send_signal(signal.SIGTERM)
    assert (await call).json()["choices"][0]["finish_reason"] == "length"
    async with asyncio.timeout(30):
        await engine.process.wait()


async def test_sigterm_aborts_what_takes_too_long() -> None:
    async with running_engine(shutdown_timeout_s=0.3, speedup=1.0) as engine:
        call = asyncio.create_task(engine.completion("x", max_tokens=3000, ignore_eos=True))
        await engine.until_metric("num_requests_running", 1)
        engine.process.send_signal(signal.SIGTERM)
        assert (await call).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{"seats": 3}', "seats"),
        ('{"speedup": 0}', "`speedup` must be positive"),
        ('{"kv_tokens": 160}', "lower `context_tokens_max`"),
        ("{", "truncated"),
    ],
)
async def test_bad_options_stop_the_start_in_words(options: str, words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "dataplane.engines.simulated", "--port", "0", "--model", "m"),
        *("--options", options),
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await process.communicate()
    assert process.returncode == 1
    assert words in complaint.decode()
