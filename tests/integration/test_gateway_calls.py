"""Calls through the whole gateway: uvicorn, hot path, upstream client, against scripted engines."""

import asyncio
import json

import openai
import pytest

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from tests.gateway_world import (
    DONE,
    END,
    KEY,
    STREAM_HEAD,
    RoundRobinGate,
    ScriptedEngine,
    answer,
    chunked,
    event,
    finish,
    hangs,
    resets_after,
    role,
    running,
    sends,
    stream,
    token,
    until,
    used,
    whole,
)

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
STREAM = {**CHAT, "stream": True}
FIVE = (role(), token("a"), token("b"), token("c"), finish(), used(16, 3), DONE)


async def test_a_whole_answer_passes_unchanged_and_is_settled() -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        got = await world.post(CHAT)
        assert got.status == 200
        assert got.json() == answer()
        assert got.headers["x-request-id"] == got.headers["x-headway-decision"] == "req-1"
        assert got.headers["x-headway-engine"] == "e0"
        assert "server" not in got.headers
        [settled] = world.gate.settlements
        assert settled.state is RequestState.SUCCEEDED
        assert settled.usage == Usage(16, 0, 8, is_estimated=False)
        assert world.gate.attempts == [("e0", "whole", AttemptOutcome.OK, "")]
        assert world.metrics.in_flight.value(("mock",)) == 0
        assert world.metrics.requests.value(("chat", "mock", "gold", "succeeded", "")) == 1
        [seen] = engine.seen
        assert seen.body == {**CHAT, "cache_salt": "salt-t1"}
        assert seen.header("authorization") is None
        assert seen.header("x-request-id") == "req-1"
        assert {line.partition(":")[0] for line in seen.head.split("\r\n")[1:] if line} == {
            "host",
            "content-type",
            "accept",
            "x-request-id",
            "x-session-id",
            "content-length",
        }


@pytest.mark.parametrize(
    ("options", "shows_usage"), [(None, False), ({}, False), ({"include_usage": True}, True)]
)
async def test_usage_is_always_asked_for_and_shown_only_when_asked(
    options: dict[str, bool] | None, *, shows_usage: bool
) -> None:
    events = [
        role(usage=None), token("a", usage=None), token("b", usage=None), finish(usage=None),
        used(16, 2), DONE,
    ]  # fmt: skip
    body = STREAM if options is None else {**STREAM, "stream_options": options}
    async with (
        ScriptedEngine(sends(stream(*events))) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        got = await world.post(body)
        assert engine.seen[0].body["stream_options"] == {"include_usage": True}
    if shows_usage:
        assert got.body == b"".join(events)
    else:
        assert got.body == b"".join((role(), token("a"), token("b"), finish(), DONE))
    [settled] = world.gate.settlements
    assert settled.usage == Usage(16, 0, 2, is_estimated=False)
    assert settled.ttft_ms is not None
    assert len(world.gate.first_tokens) == 1


async def test_usage_is_estimated_when_the_engine_reports_none() -> None:
    events = (role(), token(), token(), token(), finish(), DONE)
    async with (
        ScriptedEngine(sends(stream(*events))) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        got = await world.post(STREAM)
    assert got.body == b"".join(events)
    [settled] = world.gate.settlements
    assert settled.usage == Usage(8, 0, 3, is_estimated=True)


async def test_a_reset_before_the_first_token_is_retried_elsewhere() -> None:
    begun = STREAM_HEAD + chunked(role())
    async with (
        ScriptedEngine(resets_after(begun)) as broken,
        ScriptedEngine(sends(stream(*FIVE))) as sound,
        running(RoundRobinGate([broken.address, sound.address])) as world,
    ):
        got = await world.post(STREAM)
    assert got.body == b"".join((*FIVE[:5], DONE))
    assert [(a[0], a[2]) for a in world.gate.attempts] == [
        ("e0", AttemptOutcome.BROKEN_STREAM),
        ("e1", AttemptOutcome.OK),
    ]
    [settled] = world.gate.settlements
    assert settled.state is RequestState.SUCCEEDED
    assert settled.usage.completion_tokens == 3


async def test_a_reset_after_the_first_token_ends_the_stream_with_one_error() -> None:
    begun = STREAM_HEAD + b"".join(chunked(one) for one in FIVE[:4])
    async with (
        ScriptedEngine(resets_after(begun)) as broken,
        ScriptedEngine(sends(stream(*FIVE))) as other,
        running(RoundRobinGate([broken.address, other.address])) as world,
    ):
        got = await world.post(STREAM)
        assert other.seen == []
    assert got.status == 200
    assert got.is_whole
    prefix = b"".join(FIVE[:4])
    assert got.body.startswith(prefix)
    [last] = got.body[len(prefix) :].split(b"\n\n")[:-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "stream_interrupted"
    assert b"[DONE]" not in got.body
    [settled] = world.gate.settlements
    assert settled.state is RequestState.FAILED
    assert settled.reason == Reason.STREAM_INTERRUPTED
    assert settled.usage == Usage(8, 0, 3, is_estimated=True)


@pytest.mark.parametrize(
    "ending",
    [
        finish("abort") + DONE,
        event({"error": {"message": "EngineCore died", "type": "X", "code": 500}}) + DONE,
        b"data: {not json\n\n",
        b"",
    ],
    ids=["abort", "error event", "garbage", "no end"],
)
async def test_an_ending_that_only_looks_clean_is_a_loss(ending: bytes) -> None:
    events = (role(), token("a"), token("b"))
    data = STREAM_HEAD + b"".join(chunked(one) for one in (*events, ending) if one) + END
    async with (
        ScriptedEngine(sends(data)) as engine,
        running(RoundRobinGate([engine.address], retries_max=0)) as world,
    ):
        got = await world.post(STREAM)
    # All of it came in one read, so that nothing was sent before the loss: an honest status.
    if got.status == 200:
        assert b"[DONE]" not in got.body
        assert got.body.count(b'"error"') == 1
    else:
        assert got.status == 502
    assert world.gate.settlements[0].state is RequestState.FAILED
    assert world.gate.attempts[0][2] is AttemptOutcome.BROKEN_STREAM


async def test_an_abort_in_a_whole_answer_is_a_loss() -> None:
    aborted = answer()
    aborted["choices"][0]["finish_reason"] = "abort"  # type: ignore[index]
    async with (
        ScriptedEngine(whole(200, aborted)) as engine,
        running(RoundRobinGate([engine.address], retries_max=1)) as world,
    ):
        got = await world.post(CHAT)
    assert got.status == 502
    assert got.json()["error"]["code"] == "upstream_error"
    assert got.headers["x-should-retry"] == "true"
    assert len(world.gate.attempts) == 2
    assert len(world.gate.settlements) == 1


async def test_a_truncated_whole_answer_is_a_loss() -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"
    async with (
        ScriptedEngine(resets_after(cut)) as engine,
        running(RoundRobinGate([engine.address], retries_max=0)) as world,
    ):
        got = await world.post(CHAT)
    assert got.status == 502
    assert world.gate.attempts[0][2] is AttemptOutcome.BROKEN_STREAM


async def test_an_engines_complaint_is_told_in_its_words_under_our_code() -> None:
    complaint = {
        "error": {"message": "too long", "type": "BadRequestError", "param": "x", "code": 400}
    }
    async with (
        ScriptedEngine(whole(400, complaint)) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        got = await world.post(STREAM)
    assert got.status == 400
    assert got.json()["error"] == {
        "message": "too long", "type": "invalid_request_error", "param": "x", "code": "invalid_request",
    }  # fmt: skip
    assert got.headers["x-should-retry"] == "false"
    assert world.gate.attempts == [("e0", "whole", AttemptOutcome.CLIENT_ERROR, "status 400")]
    [settled] = world.gate.settlements
    assert (settled.state, settled.usage.completion_tokens) == (RequestState.FAILED, 0)


async def test_an_engines_bare_complaint_is_put_into_one_envelope() -> None:
    async with (
        ScriptedEngine(whole(422, {"detail": "what?"})) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        got = await world.post(CHAT)
    assert got.status == 422
    assert got.json()["error"]["message"] == "what?"
    assert list(got.json()) == ["error"]


async def test_back_pressure_goes_elsewhere_and_then_says_when() -> None:
    busy = whole(503, {"error": {"message": "busy"}}, "retry-after: 2")
    async with (
        ScriptedEngine(busy) as one,
        ScriptedEngine(whole(200, answer())) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
    ):
        assert (await world.post(CHAT)).status == 200
        assert world.gate.attempts[0][2] is AttemptOutcome.BACKPRESSURE
        async with running(RoundRobinGate([one.address], retries_max=0)) as alone:
            got = await alone.post(CHAT)
    assert got.status == 503
    assert got.headers["retry-after"] == "2"
    assert got.json()["error"]["code"] == "no_capacity"


async def test_a_refused_connection_is_a_fault() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        gone = engine.address
    async with running(RoundRobinGate([gone], retries_max=1)) as world:
        got = await world.post(STREAM)
        assert got.status == 502
        assert got.headers["content-type"] == "application/json"
        assert {a[2] for a in world.gate.attempts} == {AttemptOutcome.CONNECT_ERROR}
        assert world.gate.settlements[0].usage == Usage(0, 0, 0, is_estimated=False)


async def test_a_hanging_engine_ends_at_the_calls_deadline() -> None:
    async with (
        ScriptedEngine(hangs()) as engine,
        running(RoundRobinGate([engine.address], retries_max=0), period_s=0.02) as world,
    ):
        got = await world.post(STREAM, x_headway_deadline_ms="60")
        assert got.status == 504
        assert got.json()["error"]["code"] == "upstream_timeout"
        assert world.gate.attempts[0][2] is AttemptOutcome.TIMEOUT
        await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)


# ---------------------------------------------------------------- clients that go away


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    gate = RoundRobinGate([("127.0.0.1", 1)])
    gate.gate_open.clear()
    async with running(gate) as world:
        clients = [await world.dial() for _ in range(20)]
        for client in clients:
            await client.send(STREAM)
        await until(lambda: len(gate.calls) == 20)
        for client in clients:
            client.writer.transport.abort()
        await until(lambda: gate.waiting_cancelled == 20, 1.0)
        assert gate.settlements == []
        assert world.metrics.in_flight.value(("mock",)) == 0


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_a_client_that_leaves_before_the_first_token_stops_the_engine(
    body: dict[str, object],
) -> None:
    async with (
        ScriptedEngine(hangs()) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        client = await world.dial()
        await client.send(body)
        await until(lambda: len(engine.seen) == 1)
        client.writer.transport.abort()
        await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)
        await until(lambda: len(world.gate.settlements) == 1)
        [settled] = world.gate.settlements
        assert settled.state is RequestState.CANCELLED
        assert settled.usage == Usage(8, 0, 0, is_estimated=True)
        assert world.gate.attempts[0][2] is AttemptOutcome.CANCELLED
        assert world.metrics.disconnects.total() == 1


async def test_a_client_that_leaves_after_three_tokens_pays_for_three() -> None:
    begun = STREAM_HEAD + b"".join(chunked(one) for one in FIVE[:4])
    async with (
        ScriptedEngine(hangs(begun)) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        clients = [await world.dial() for _ in range(50)]
        for client in clients:
            await client.send(STREAM)
        for client in clients:
            await client.head()
            assert b"".join([await client.chunk()]) == b"".join(FIVE[:4])
            client.writer.transport.abort()
        await until(lambda: len(world.gate.settlements) == 50)
        await until(lambda: all(seen.hung_up.is_set() for seen in engine.seen), 1.0)
        assert {s.state for s in world.gate.settlements} == {RequestState.CANCELLED}
        assert {s.usage for s in world.gate.settlements} == {Usage(8, 0, 3, is_estimated=True)}
        assert world.metrics.in_flight.value(("mock",)) == 0


async def test_a_reader_that_stops_makes_the_engine_wait() -> None:
    text = "x" * 60_000
    sent = 0

    async def endless(_: object, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        while True:
            data = chunked(token(text))
            writer.write(data)
            await writer.drain()
            sent += len(data)

    async with (
        ScriptedEngine(endless) as engine,
        running(RoundRobinGate([engine.address])) as world,
    ):
        client = await world.dial()
        await client.send(STREAM)
        await client.head()
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.3)
        # What the kernel buffers on both sides, and no more: the gateway does not collect.
        assert sent < 40_000_000
        [link] = world.server.server_state.connections
        assert link.transport.get_write_buffer_size() < 1_000_000
        world.sweeper.sweep(world.sweeper.now + 1)
        world.sweeper.sweep(world.sweeper.now + 40)
        await until(lambda: len(world.gate.settlements) == 1)
        assert world.gate.settlements[0].state is RequestState.CANCELLED
        assert world.metrics.connections_refused.value(("stalled reader",)) == 1
        client.writer.transport.abort()
        await asyncio.sleep(0)


# ---------------------------------------------------------------- two legs

TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "abc",
    "remote_request_id": "chatcmpl-req-1-0-aa",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 203,
    "a_later_field": {"x": [1.5, None]},
}


def prefilled(**more: object) -> dict[str, object]:
    done = answer(prompt=203, completion=1, kv_transfer_params=TRANSFER, **more)
    done["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    done["usage"]["prompt_tokens_details"] = {"cached_tokens": 64}  # type: ignore[index]
    return done


async def test_two_legs_carry_exactly_what_they_must() -> None:
    sent = {
        **STREAM,
        "stream_options": {"include_usage": True},
        "max_tokens": 1,
        "max_completion_tokens": 40,
        "min_tokens": 50,
        "stop": ["x"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_object"},
        "logprobs": True,
    }
    events = (role(), token("a"), token("b"), finish(), used(203, 2, 203), DONE)
    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(sends(stream(*events))) as second,
        running(RoundRobinGate(pairs=[(first.address, second.address)])) as world,
    ):
        got = await world.post(sent)
    assert got.body == b"".join(events)
    prefill, decode = first.seen[0], second.seen[0]
    assert prefill.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert (prefill.body["max_tokens"], prefill.body["max_completion_tokens"]) == (1, 1)
    assert prefill.body["stream"] is False
    assert not {"stream_options", "min_tokens"} & prefill.body.keys()
    assert decode.body["kv_transfer_params"] == TRANSFER
    assert json.dumps(TRANSFER).encode() in decode.raw
    assert decode.body["max_completion_tokens"] == 40
    assert decode.body["min_tokens"] == 40
    assert decode.body["stream"] is True
    for kept in ("messages", "tools", "response_format"):
        assert prefill.body[kept] == decode.body[kept] == sent[kept]
    # One token that nobody sees, and that nothing but its length may end.
    assert not {"stop", "logprobs"} & prefill.body.keys()
    assert prefill.body["ignore_eos"] is True
    for own in ("stop", "logprobs"):
        assert decode.body[own] == sent[own]
    assert "ignore_eos" not in decode.body
    assert prefill.header("accept") == "application/json"
    assert decode.header("accept") == "text/event-stream"
    assert prefill.header("x-request-id") == decode.header("x-request-id") == "req-1"
    assert [(a[1], a[2]) for a in world.gate.attempts] == [
        ("prefill", AttemptOutcome.OK),
        ("decode", AttemptOutcome.OK),
    ]
    # The prompt counts once, and what came over from the other engine is not a cache hit.
    assert world.gate.settlements[0].usage == Usage(203, 64, 2, is_estimated=False)


@pytest.mark.parametrize(
    "failing",
    [
        whole(500, {"error": {"message": "x"}}),
        resets_after(b""),
        whole(200, answer()),
        whole(200, {**prefilled(), "choices": [{"finish_reason": "abort"}]}),
        whole(200, b"not json"),
    ],
    ids=["500", "reset", "no params", "abort", "garbage"],
)
async def test_a_failed_prefill_leaves_the_call_to_the_decode_engine(failing: object) -> None:
    async with (
        ScriptedEngine(failing) as first,  # type: ignore[arg-type]
        ScriptedEngine(whole(200, answer())) as second,
        running(RoundRobinGate(pairs=[(first.address, second.address)])) as world,
    ):
        got = await world.post(CHAT)
    assert got.status == 200
    assert "kv_transfer_params" not in second.seen[0].body
    assert [a[1] for a in world.gate.attempts] == ["prefill", "whole"]
    assert world.gate.attempts[0][2] is not AttemptOutcome.OK
    assert world.gate.settlements[0].usage.completion_tokens == 8


async def test_a_client_that_leaves_while_kv_moves_is_hung_up_at_the_first_byte() -> None:
    later = asyncio.Event()

    async def waits(_: object, writer: asyncio.StreamWriter) -> None:
        await later.wait()
        writer.write(stream(*FIVE))
        await writer.drain()
        await asyncio.Event().wait()

    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(waits) as second,
        running(RoundRobinGate(pairs=[(first.address, second.address)])) as world,
    ):
        client = await world.dial()
        await client.send(STREAM)
        await until(lambda: len(second.seen) == 1)
        client.writer.transport.abort()
        await until(lambda: len(world.gate.settlements) == 1)
        await asyncio.sleep(0.1)
        assert not second.seen[0].hung_up.is_set()
        later.set()
        await asyncio.wait_for(second.seen[0].hung_up.wait(), 1)


async def test_where_kv_lies_is_not_told_to_the_client() -> None:
    async with ScriptedEngine(whole(200, answer(kv_transfer_params=TRANSFER))) as engine:
        # Compact JSON, as engines write it.
        engine.scripts = [
            whole(
                200, json.dumps(answer(kv_transfer_params=TRANSFER), separators=(",", ":")).encode()
            )
        ]
        async with running(RoundRobinGate([engine.address])) as world:
            got = await world.post(CHAT)
    expected = answer()
    del expected["kv_transfer_params"]
    assert got.json() == expected


# ---------------------------------------------------------------- refusals and models


async def test_refusals_of_the_gate_reach_the_client_in_the_envelope() -> None:
    refuse = Refuse(Reason.QUEUE_FULL, "try later", 1_500, "dec-x")
    async with running(RoundRobinGate([("", 0)], refusal=refuse)) as world:
        got = await world.post(STREAM)
        assert (got.status, got.headers["content-type"]) == (429, "application/json")
        assert got.headers["retry-after"] == "2"
        assert got.headers["retry-after-ms"] == "1500"
        assert got.headers["x-headway-reason"] == "queue_full"
        assert got.headers["x-headway-decision"] == got.headers["x-request-id"] == "dec-x"
        assert world.gate.settlements == []
        assert world.gate.refusals == [refuse]


@pytest.mark.parametrize(
    ("sent", "status", "code", "param"),
    [
        (b"{", 400, "invalid_request", None),
        ({**CHAT, "kv_transfer_params": {}}, 400, "invalid_request", "kv_transfer_params"),
        ({**CHAT, "max_tokens": "5"}, 400, "invalid_request", "max_tokens"),
        (b" " * (4 * 1024 * 1024 + 1), 413, "request_too_large", None),
    ],
)
async def test_wrong_bodies_are_refused(
    sent: object, status: int, code: str, param: str | None
) -> None:
    async with running(RoundRobinGate([("", 0)])) as world:
        got = await world.post(sent)
        assert got.status == status
        assert got.json()["error"]["code"] == code
        assert got.json()["error"]["param"] == param
        assert got.headers["x-should-retry"] == "false"


async def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    async with running(RoundRobinGate([("", 0)])) as world:
        got = await world.post(b"{not json", authorization="Bearer nonsense")
        assert (got.status, got.json()["error"]["code"]) == (401, "invalid_api_key")
        got = await world.post(CHAT, authorization="")
        assert got.status == 401


async def test_models_and_other_paths() -> None:
    async with (
        running(RoundRobinGate([("", 0)])) as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
    ):
        [model] = (await client.models.list()).data
        assert (model.id, model.max_model_len) == ("mock", 131_072)  # type: ignore[attr-defined]
        assert (await client.models.retrieve("mock")).id == "mock"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("other")
        assert missing.value.code == "model_not_found"
        got = await world.post({}, "/v1/workflows")
        assert got.body == b"fallback"
        got = await world.post({}, "/v1/models")
        assert (got.status, got.headers["allow"]) == (405, "GET")


# ---------------------------------------------------------------- the official SDK


async def test_the_official_sdk_chats_streams_and_raises_its_own_errors() -> None:
    busy = whole(503, {"error": {"message": "busy"}}, "retry-after: 1")
    scripts = [whole(200, answer("hello there")), sends(stream(*FIVE)), busy]
    async with (
        ScriptedEngine(*scripts) as engine,
        running(RoundRobinGate([engine.address], retries_max=0)) as world,
    ):
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client:
            messages: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
            made = await client.chat.completions.create(model="mock", messages=messages)  # type: ignore[call-overload]
            assert made.choices[0].message.content == "hello there"
            texts = []
            async for chunk in await client.chat.completions.create(  # type: ignore[call-overload]
                model="mock", messages=messages, stream=True,
                stream_options={"include_usage": True},
            ):  # fmt: skip
                texts += [choice.delta.content or "" for choice in chunk.choices]
                usage = chunk.usage
            assert "".join(texts) == "abc"
            assert usage.completion_tokens == 3
            with pytest.raises(openai.InternalServerError) as unavailable:
                await client.with_options(max_retries=0).chat.completions.create(
                    model="mock",
                    messages=messages,  # type: ignore[arg-type]
                )
            assert unavailable.value.code == "no_capacity"
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(
                    model="mock",
                    messages=messages,  # type: ignore[arg-type]
                    extra_body={"chat_template": "{{ x }}"},
                )
            assert wrong.value.param == "chat_template"
        assert world.gate.calls[0].client_retries == 0


async def test_a_quota_refusal_is_asked_once_by_the_official_sdk() -> None:
    refuse = Refuse(Reason.INSUFFICIENT_QUOTA, "the tenant's budget is spent")
    async with (
        running(RoundRobinGate([("", 0)], refusal=refuse)) as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
    ):
        with pytest.raises(openai.RateLimitError) as spent:
            await client.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": "hi"}]
            )
        assert spent.value.code == "insufficient_quota"
        assert len(world.gate.calls) == 1


async def test_an_error_inside_a_stream_is_raised_by_the_official_sdk() -> None:
    begun = STREAM_HEAD + b"".join(chunked(one) for one in FIVE[:3])
    async with (
        ScriptedEngine(resets_after(begun)) as engine,
        running(RoundRobinGate([engine.address])) as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
    ):
        stream_ = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        texts: list[str] = []

        async def read() -> None:
            async for chunk in stream_:
                texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401

        with pytest.raises(openai.APIError) as broken:
            await read()
    assert "".join(texts) == "ab"
    assert broken.value.code == "stream_interrupted"
