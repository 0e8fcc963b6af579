"""Streams whose budget ends in the middle, and the header lines that tell of limits and warnings."""

import asyncio
import json
from typing import Any

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
    Script,
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

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
STREAM = {**CHAT, "stream": True}


def slowly(*events: bytes) -> Script:
    """Each event alone, so that each is one piece for the gateway; then silence."""
    return sends(STREAM_HEAD, *(piece for one in events for piece in (chunked(one), 0.003)), 600.0)


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    events = body.split(b"\n\n")[:-1]
    assert events[-1] == b"data: [DONE]"
    shown = [one.removeprefix(b"data: ") for one in events[:-1]]
    return [json.loads(one) for one in shown if not one.startswith(b":")]


async def test_a_stream_ends_at_the_chunk_at_which_its_budget_ends() -> None:
    tokens = [token(str(number)) for number in range(20)]
    async with ScriptedEngine(slowly(role(), *tokens)) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=7, check_tokens=3)
        async with running(gate) as world:
            got = await world.post(STREAM)
            await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)
    *relayed, last = chunks_of(got.body)
    assert got.body.startswith(b"".join((role(), *tokens[:9])))
    assert b"\n\n: ended insufficient_quota the tenant's budget is spent\n\n" in got.body
    # Asked at 3 and 6 and, as 7 is not enough for three more, at 9.
    assert gate.checks == [3, 6, 9]
    assert len(relayed) == 1 + 9
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]
    assert {name: last[name] for name in ("id", "object", "created", "model")} == {
        name: relayed[0][name] for name in ("id", "object", "created", "model")
    }
    [settled] = gate.settlements
    assert (settled.state, settled.reason) == (RequestState.FAILED, Reason.INSUFFICIENT_QUOTA)
    assert settled.usage == Usage(8, 0, 9, is_estimated=True)
    assert settled.tpot_ms is not None
    [(_, _, outcome, detail)] = gate.attempts
    assert (outcome, detail) == (AttemptOutcome.CANCELLED, "the tenant's budget is spent")
    assert world.metrics.streams_cut.value(("mock",)) == 1
    assert world.metrics.in_flight.value(("mock",)) == 0
    labels = ("chat", "mock", "gold", "failed", "insufficient_quota")
    assert world.metrics.requests.value(labels) == 1


async def test_many_tokens_in_one_piece_pass_by_one_piece_at_most() -> None:
    piece = b"".join(token(str(number)) for number in range(50))
    async with ScriptedEngine(
        sends(STREAM_HEAD + chunked(role() + piece), 0.05, chunked(piece), 600.0)
    ) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=1)
        async with running(gate) as world:
            got = await world.post(STREAM)
    assert len(chunks_of(got.body)) == 1 + 50 + 1
    assert gate.settlements[0].usage.completion_tokens == 50


@pytest.mark.parametrize("asks", [True, False])
async def test_usage_of_a_cut_stream_is_told_when_it_was_asked_for(*, asks: bool) -> None:
    body = {**STREAM, "stream_options": {"include_usage": True}} if asks else STREAM
    async with ScriptedEngine(slowly(role(), token(), token(), token())) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=2)
        async with running(gate) as world:
            got = await world.post(body)
    chunks = chunks_of(got.body)
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) == asks
    if asks:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 2,
            "total_tokens": 10,
        }


async def test_of_several_answers_only_those_still_running_are_ended() -> None:
    def choice(index: int, text: str, reason: str | None = None) -> bytes:
        return event(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": "mock",
                "choices": [{"index": index, "text": text, "finish_reason": reason}],
            }
        )

    events = (choice(0, "a"), choice(1, "b"), choice(1, "", "stop"), choice(2, "c"), choice(0, "d"))
    async with ScriptedEngine(slowly(*events)) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=4)
        async with running(gate) as world:
            got = await world.post(
                {"model": "mock", "prompt": "x", "n": 3, "stream": True}, "/v1/completions"
            )
    last = chunks_of(got.body)[-1]
    assert last["choices"] == [
        {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        for index in (0, 2)
    ]


async def test_a_stream_that_ends_by_itself_with_its_last_token_is_not_cut() -> None:
    events = (role(), token("a"), token("b"), finish(), used(16, 2), DONE)
    # What is still to come after the end brings no tokens.
    pieces = (chunked(b"".join(events[:4])), 0.02, chunked(b"".join(events[4:])))
    async with ScriptedEngine(sends(STREAM_HEAD, *pieces, END)) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=1)
        async with running(gate) as world:
            got = await world.post(STREAM)
    assert got.body == b"".join((*events[:4], DONE))
    assert gate.settlements[0].state is RequestState.SUCCEEDED


async def test_a_stream_within_its_budget_is_asked_about_and_not_touched() -> None:
    tokens = [token(str(number)) for number in range(6)]
    script = sends(
        STREAM_HEAD,
        *(chunked(one) for one in (role(), *tokens, finish(), used(16, 6), DONE)),
        END,
    )
    async with ScriptedEngine(script) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=1_000, check_tokens=2)
        async with running(gate) as world:
            got = await world.post(STREAM)
    assert got.body == b"".join((role(), *tokens, finish(), DONE))
    assert gate.checks
    assert gate.settlements[0].usage == Usage(16, 0, 6, is_estimated=False)


async def test_the_official_sdk_sees_a_cut_as_an_end_by_length() -> None:
    async with ScriptedEngine(slowly(role(), *(token("x") for _ in range(20)))) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=5)
        async with (
            running(gate) as world,
            openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
        ):
            seen = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="mock",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
    assert seen[-2].choices[0].finish_reason == "length"
    assert seen[-1].usage is not None
    assert seen[-1].usage.completion_tokens == 5
    assert {chunk.id for chunk in seen} == {"chatcmpl-1"}


async def test_a_client_that_leaves_at_the_cut_is_settled_once() -> None:
    async with ScriptedEngine(slowly(role(), *(token("x" * 200) for _ in range(40)))) as engine:
        gate = RoundRobinGate([engine.address], budget_tokens=10)
        async with running(gate) as world, world.dialled() as client:
            await client.send(STREAM)
            await client.head()
            client.writer.transport.abort()
            await until(lambda: len(gate.settlements) == 1)
            await asyncio.wait_for(engine.seen[0].hung_up.wait(), 1)


# ---------------------------------------------------------------- headers

LIMITS = (
    (b"x-ratelimit-limit-requests", b"60"),
    (b"x-ratelimit-remaining-requests", b"59"),
    (b"x-ratelimit-reset-requests", b"1s"),
)


def told(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("x-ratelimit-")}


EXPECTED = {name.decode(): value.decode() for name, value in LIMITS}


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (None, 200),
        (whole(400, {"error": {"message": "no"}}), 400),
        (whole(500, {"error": {}}), 502),
        (resets_after(b""), 502),
    ],
    ids=["answer", "client error", "engine error", "reset"],
)
async def test_limits_are_told_with_every_answer(
    body: dict[str, object], script: Script | None, status: int
) -> None:
    if script is None:
        events = (role(), token("a"), finish(), DONE)
        script = sends(stream(*events)) if body is STREAM else whole(200, answer())
    async with ScriptedEngine(script) as engine:
        gate = RoundRobinGate([engine.address], retries_max=0, limits_told=LIMITS)
        async with running(gate) as world:
            got = await world.post(body)
    assert got.status == status
    assert told(got.headers) == EXPECTED


async def test_limits_are_told_with_refusals_of_the_gate() -> None:
    refuse = Refuse(Reason.RATE_LIMITED, "over 60 requests a minute", 900)
    gate = RoundRobinGate([("", 0)], refusal=refuse, limits_told=LIMITS)
    async with running(gate) as world:
        got = await world.post(CHAT)
        assert (got.status, got.headers["retry-after-ms"]) == (429, "900")
        assert told(got.headers) == EXPECTED
        # Of nobody: no limits to tell.
        assert told((await world.post(CHAT, authorization="Bearer x")).headers) == {}


async def test_warnings_and_the_time_in_the_queue_are_told() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        warnings = ("the model `mock` ends in June\r\nx-evil: 1", "päper")
        gate = RoundRobinGate([engine.address], warnings=warnings, queue_ms=1_234.5)
        async with running(gate) as world, world.dialled() as client:
            await client.send(CHAT)
            head = (await client.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            assert "x-headway-warning: the model `mock` ends in June??x-evil: 1" in head
            assert "x-headway-warning: p?per" in head
            assert "x-headway-queue-ms: 1234" in head
        plain = RoundRobinGate([engine.address])
        async with running(plain) as world:
            got = await world.post(CHAT)
    assert not {"x-headway-warning", "x-headway-queue-ms"} & got.headers.keys()


# ---------------------------------------------------------------- dry run


async def test_a_dry_run_decides_and_asks_no_engine() -> None:
    async with ScriptedEngine(hangs()) as engine:
        gate = RoundRobinGate([engine.address])
        async with running(gate) as world:
            got = await world.post(STREAM, x_headway_dry_run="true")
            assert (got.status, got.headers["x-headway-dry-run"]) == (200, "true")
            assert got.headers["content-type"] == "application/json"
            assert got.json() == {"verdict": "admit", "model": "mock", "engine": "e0"}
            assert gate.admitted == 0
            assert gate.settlements == []
            assert engine.seen == []
            wrong = await world.post(STREAM, x_headway_dry_run="yes")
            assert (wrong.status, wrong.json()["error"]["param"]) == (400, "x-headway-dry-run")
            # What is not a call can not be tried either.
            assert (await world.post({}, x_headway_dry_run="true")).status == 400
