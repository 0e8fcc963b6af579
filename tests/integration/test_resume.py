"""What a client gets of a stream whose engine fails, through the whole gateway: engines that follow a script."""

import asyncio
import json
from typing import Any

import openai
import pytest

from controlplane.domain.decision import Reason
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from dataplane.protocol.messages import Feature
from tests.gateway_world import (
    DONE,
    KEY,
    STREAM_HEAD,
    RoundRobinGate,
    ScriptedEngine,
    chunked,
    event,
    finish,
    hangs,
    resets_after,
    running,
    sends,
    stream,
    until,
    used,
    whole,
)

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
GREEDY = {**CHAT, "stream": True, "temperature": 0}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}


def role() -> bytes:
    delta = {"role": "assistant", "content": ""}
    return event({**HEAD, "choices": [{"index": 0, "delta": delta}], "prompt_token_ids": [7, 8, 9]})


def token(text: str, *ids: int, end: str | None = None, stop: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    choice |= {"token_ids": list(ids)} | ({"stop_reason": stop} if end else {})
    return event({**HEAD, "choices": [choice]})


def more(text: str, *ids: int, end: str | None = None, stop: str | None = None) -> bytes:
    """A chunk of the completion that a chat goes on as."""
    choice = {"index": 0, "text": text, "finish_reason": end, "stop_reason": stop}
    choice |= {"token_ids": list(ids)}
    return event({"id": "cmpl-2", "object": "text_completion", "created": 2, "model": "mock",
                  "choices": [choice]})  # fmt: skip


def begun(*events: bytes) -> bytes:
    return STREAM_HEAD + b"".join(chunked(one) for one in events)


def chunks(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(one[6:]) for one in body.split(b"\n\n") if one.startswith(b"data: {")]


async def test_the_second_engine_is_asked_for_what_is_left_and_nothing_shows() -> None:
    first = begun(role(), token("a", 1), token("", 2), token("é", 3), token("x", 4, 5))
    second = stream(more("x", 4, 5), more("yz", 6, end="stop"), used(6, 3), DONE)
    async with (
        ScriptedEngine(resets_after(first)) as one,
        ScriptedEngine(sends(second)) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
    ):
        got = await world.post({**GREEDY, "stream_options": {"include_usage": True}})
        [asked], [went] = one.seen, two.seen
    assert asked.body["return_token_ids"] is True
    assert went.head.startswith("POST /v1/completions ")
    assert went.body == {
        "model": "mock", "prompt": [7, 8, 9, 1, 2, 3], "max_tokens": 5, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        "cache_salt": "salt-t1",
    }  # fmt: skip
    told = chunks(got.body)
    assert got.body.endswith(DONE)
    assert {(one["id"], one["object"]) for one in told} == {("chatcmpl-1", HEAD["object"])}
    texts = [one["choices"][0]["delta"].get("content") for one in told if one["choices"]]
    assert texts == ["", "a", "", "é", "x", "yz"]
    assert told[-1]["usage"] == {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert b'_ids":[' not in got.body
    assert [(leg, how) for _, leg, how, _ in world.gate.attempts] == [
        ("whole", AttemptOutcome.BROKEN_STREAM),
        ("continue", AttemptOutcome.OK),
    ]
    [settled] = world.gate.settlements
    assert settled.state is RequestState.SUCCEEDED
    assert settled.usage == Usage(3, 0, 6, is_estimated=False)
    metrics = world.metrics
    assert metrics.stream_resumes.value(("continue", "resumed")) == 1
    assert metrics.resume_tokens.value(("continue",)) == 2
    assert metrics.resume_gap.distribution(("continue",)).count == 1
    assert metrics.resume_bytes.value() == 0


async def test_stop_strings_are_cut_off_here_wherever_they_begin() -> None:
    first = begun(role(), token("ab", 1), token("cS", 2))
    second = stream(
        more("ab", 1), more("cS", 2), more("TO", 3), more("P", 4, end="stop", stop="STOP"), DONE
    )
    async with (
        ScriptedEngine(resets_after(first)) as one,
        ScriptedEngine(sends(second)) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
    ):
        got = await world.post({**GREEDY, "stop": ["STOP"]})
        assert one.seen[0].body["include_stop_str_in_output"] is True
        assert two.seen[0].body["prompt"] == [7, 8, 9]
        assert two.seen[0].body["stop"] == ["STOP"]
    told = [one["choices"][0] for one in chunks(got.body)]
    assert "".join(one["delta"].get("content") or "" for one in told) == "abc"
    assert (told[-1]["finish_reason"], told[-1]["stop_reason"]) == ("stop", "STOP")


@pytest.mark.parametrize(
    ("more_of_body", "outcome"),
    [
        ({"temperature": 1, "tools": [{"type": "function"}]}, None),
        ({"temperature": 0}, "no_engine"),
    ],
    ids=["bound to chance", "no engine"],
)
async def test_what_can_not_go_on_ends_with_one_honest_error(
    more_of_body: dict[str, Any], outcome: str | None
) -> None:
    async with (
        ScriptedEngine(resets_after(begun(role(), token("a", 1), token("b", 2)))) as one,
        running(RoundRobinGate([one.address], resumes_max=0)) as world,
    ):
        got = await world.post({**CHAT, "stream": True, **more_of_body})
    assert b"[DONE]" not in got.body
    assert [one["error"]["code"] for one in chunks(got.body) if "error" in one] == [
        "stream_interrupted"
    ]
    [settled] = world.gate.settlements
    assert (settled.state, settled.reason) == (RequestState.FAILED, Reason.STREAM_INTERRUPTED)
    label = ("none", "not_possible") if outcome is None else ("continue", outcome)
    assert world.metrics.stream_resumes.value(label) == 1
    if outcome is not None:
        # What it got is known to the token.
        assert settled.usage == Usage(3, 0, 2, is_estimated=False)


def words(text: str, end: str | None = None) -> bytes:
    """A chunk of an engine that tells no token ids."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return event({**HEAD, "choices": [choice]})


NO_IDS = frozenset({Feature.TOKEN_IDS, Feature.CACHE_SALT})


async def test_an_engine_is_not_asked_for_what_it_lacks_and_its_stream_is_replayed() -> None:
    second = stream(words("a"), words("bc", end="stop"), DONE)
    async with (
        ScriptedEngine(resets_after(begun(words("ab")))) as one,
        ScriptedEngine(sends(second)) as two,
        running(
            RoundRobinGate([one.address, two.address], lacks=dict.fromkeys((0, 1), NO_IDS))
        ) as world,
    ):
        got = await world.post(GREEDY)
        asked = [*one.seen, *two.seen]
    assert len(asked) == 2
    for each in asked:
        assert each.head.startswith("POST /v1/chat/completions ")
        assert not {"return_token_ids", "cache_salt"} & each.body.keys()
    told = [one["choices"][0]["delta"]["content"] for one in chunks(got.body)]
    assert "".join(told) == "abc"
    assert got.body.endswith(DONE)
    assert world.metrics.stream_resumes.value(("replay", "resumed")) == 1


async def test_without_token_ids_what_is_drawn_by_chance_does_not_go_on() -> None:
    async with (
        ScriptedEngine(resets_after(begun(words("ab")))) as one,
        ScriptedEngine(sends(stream(words("abc", end="stop"), DONE))) as two,
        running(RoundRobinGate([one.address, two.address], lacks={0: NO_IDS})) as world,
    ):
        got = await world.post({**GREEDY, "temperature": 1})
        assert two.seen == []
    assert [one["error"]["code"] for one in chunks(got.body) if "error" in one]
    assert world.metrics.stream_resumes.value(("none", "not_possible")) == 1


@pytest.mark.parametrize("has_third", [False, True])
async def test_a_stream_by_token_ids_goes_to_no_engine_without_them(*, has_third: bool) -> None:
    first = begun(role(), token("a", 1), token("b", 2))
    async with (
        ScriptedEngine(resets_after(first)) as one,
        ScriptedEngine(sends(stream(words("c", end="stop"), DONE))) as lacking,
        ScriptedEngine(
            sends(stream(more("b", 2), more("c", 3, end="stop"), used(3, 3), DONE))
        ) as third,
        running(
            RoundRobinGate(
                [one.address, lacking.address, *([third.address] if has_third else [])],
                lacks={1: NO_IDS},
            )
        ) as world,
    ):
        got = await world.post(GREEDY)
        assert lacking.seen == []
        assert len(third.seen) == has_third
    assert got.body.endswith(DONE) == has_third
    outcome = "resumed" if has_third else "no_engine"
    assert world.metrics.stream_resumes.value(("continue", outcome)) == 1


async def test_other_words_of_the_second_engine_are_not_put_behind_the_first_ones() -> None:
    async with (
        ScriptedEngine(resets_after(begun(role(), token("a", 1), token("bc", 2, 3)))) as one,
        ScriptedEngine(sends(stream(more("bx", 4), finish(), DONE))) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
    ):
        got = await world.post(GREEDY)
    assert [one["error"]["code"] for one in chunks(got.body) if "error" in one]
    assert b"bx" not in got.body
    assert world.metrics.stream_resumes.value(("continue", "diverged")) == 1
    # The second engine is not to blame.
    assert world.gate.attempts[-1][2] is AttemptOutcome.CANCELLED


async def test_a_stream_of_which_only_the_end_was_lost_is_ended_here() -> None:
    first = begun(role(), token("a", 1), token("b", 2, end="length"))
    async with (
        ScriptedEngine(resets_after(first)) as one,
        ScriptedEngine(sends(stream(DONE))) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
    ):
        got = await world.post({**GREEDY, "stream_options": {"include_usage": True}})
        assert two.seen == []
    assert got.body.endswith(DONE)
    assert chunks(got.body)[-1]["usage"]["completion_tokens"] == 2
    assert world.gate.settlements[0].state is RequestState.SUCCEEDED
    assert world.metrics.stream_resumes.value(("continue", "ended")) == 1


async def test_a_silent_engine_is_left_only_when_there_is_another() -> None:
    first = begun(role(), token("a", 1), token("b", 2))
    rest = chunked(token("c", 3, end="length")) + chunked(DONE) + b"0\r\n\r\n"
    async with (
        ScriptedEngine(sends(first, 1.4, rest)) as slow,
        running(RoundRobinGate([slow.address], resumes_max=0), period_s=0.1) as world,
    ):
        got = await world.post(GREEDY)
    assert got.body.endswith(DONE)
    assert world.gate.attempts[0][2] is AttemptOutcome.OK
    second = stream(more("c", 3, end="stop"), DONE)
    async with (
        ScriptedEngine(hangs(first)) as silent,
        ScriptedEngine(sends(second)) as two,
        running(RoundRobinGate([silent.address, two.address]), period_s=0.1) as world,
    ):
        got = await world.post(GREEDY)
        assert silent.seen[0].hung_up.is_set() or await silent.seen[0].hung_up.wait()
        assert world.sweeper.looked == set()
    assert got.body.endswith(DONE)
    assert two.seen[0].body["prompt"] == [7, 8, 9, 1, 2]
    assert [how for _, _, how, _ in world.gate.attempts] == [
        AttemptOutcome.TIMEOUT,
        AttemptOutcome.OK,
    ]


async def test_the_official_sdk_notices_nothing() -> None:
    first = begun(role(), token("a", 1), token("b", 2))
    second = stream(more("c", 3), more("", 4, end="stop"), used(5, 2), DONE)
    async with (
        ScriptedEngine(resets_after(first)) as one,
        ScriptedEngine(sends(second)) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            temperature=0,
            stream_options={"include_usage": True},
        )
        pieces = [piece async for piece in answer]
    assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == "abc"
    assert {one.id for one in pieces} == {"chatcmpl-1"}
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("can_go_on_exactly", [True, False])
async def test_of_a_drained_engine_streams_go_on_elsewhere_where_nothing_shows(
    *, can_go_on_exactly: bool
) -> None:
    rest_here = b"".join(
        chunked(one) for one in (token("yz", 3, end="stop"), used(3, 3), DONE)
    ) + b"0\r\n\r\n"  # fmt: skip
    drained = sends(begun(role(), token("a", 1), token("x", 2)), 0.5, rest_here)
    second = stream(more("yz", 3, end="stop"), used(5, 1), DONE)
    body = GREEDY if can_go_on_exactly else {**GREEDY, "temperature": 1}
    async with (
        ScriptedEngine(hangs(begun(role(), token("a", 1), token("x", 2)))
                       if can_go_on_exactly else drained) as one,
        ScriptedEngine(sends(second)) as two,
        running(RoundRobinGate([one.address, two.address])) as world,
    ):  # fmt: skip
        reading = asyncio.create_task(world.post(body))
        await until(lambda: bool(world.upstream.flowing(one.address)))
        await asyncio.sleep(0.1)
        world.upstream.leave(one.address)
        got = await reading
    told = chunks(got.body)
    texts = [one["choices"][0]["delta"].get("content") for one in told if one["choices"]]
    assert "".join(text or "" for text in texts) == "axyz"
    assert got.body.endswith(DONE)
    legs = [(leg, how) for _, leg, how, _ in world.gate.attempts]
    if can_go_on_exactly:
        assert legs == [("whole", AttemptOutcome.CANCELLED), ("continue", AttemptOutcome.OK)]
        assert two.seen[0].body["prompt"] == [7, 8, 9, 1, 2]
    else:
        assert legs == [("whole", AttemptOutcome.OK)]
        assert two.seen == []
    # Nobody is to blame.
    assert world.metrics.upstream_errors.total() == 0
    [settled] = world.gate.settlements
    assert settled.usage.completion_tokens == 3


LONG = 600
KV = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 5,
}  # fmt: skip


@pytest.mark.parametrize("way", ["fetched", "refused", "late", "short", "can not"])
async def test_a_drained_engine_hands_over_the_kv_of_its_streams(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.gateway.exchange.HAND_OVER_S_MAX", 0.1)
    prompt = list(range(LONG if way != "short" else 3))
    delta = {"role": "assistant", "content": ""}
    head = event({**HEAD, "choices": [{"index": 0, "delta": delta}], "prompt_token_ids": prompt})
    leg = {
        "object": "text_completion", "choices": [{"index": 0, "text": "y", "finish_reason": "length"}],
        "usage": {"prompt_tokens": LONG + 2, "completion_tokens": 1}, "kv_transfer_params": KV,
    }  # fmt: skip
    legs = {"refused": whole(500, {}), "late": hangs(b"")}
    async with (
        ScriptedEngine(
            hangs(begun(head, token("a", 1), token("x", 2))), legs.get(way, whole(200, leg))
        ) as one,
        ScriptedEngine(sends(stream(more("yz", 3, end="stop"), used(5, 1), DONE))) as two,
        running(RoundRobinGate([one.address, two.address], hands_over=way != "can not")) as world,
    ):
        held: list[bool] = []
        two.scripts.insert(0, lambda seen, writer: noting(world.gate, held, two, seen, writer))
        reading = asyncio.create_task(world.post(GREEDY))
        await until(lambda: bool(world.upstream.flowing(one.address)))
        await asyncio.sleep(0.1)
        world.upstream.leave(one.address)
        got = await reading
    texts = [
        one["choices"][0]["delta"].get("content") for one in chunks(got.body) if one["choices"]
    ]
    assert "".join(text or "" for text in texts) == "axyz"
    [went] = two.seen
    assert went.body["prompt"] == [*prompt, 1, 2]
    assert went.body["stream"] is True
    asked = one.seen[1:]
    assert len(asked) == (way in {"fetched", "refused", "late"})
    for leg_1 in asked:
        assert leg_1.body["prompt"] == went.body["prompt"]
        assert (leg_1.body["max_tokens"], leg_1.body["stream"]) == (1, False)
        assert leg_1.body["kv_transfer_params"]["do_remote_decode"] is True
        assert "stream_options" not in leg_1.body
    # As long as anything is to be fetched from it, the first engine is not given back.
    assert held == [way == "fetched"]
    assert went.body.get("kv_transfer_params") == (KV if way == "fetched" else None)
    if way == "fetched":
        assert went.header("x-request-id") == asked[0].header("x-request-id")
    assert world.gate.held_left == set()
    [settled] = world.gate.settlements
    assert settled.usage.completion_tokens == 3


async def noting(
    gate: RoundRobinGate, held: list[bool], engine: ScriptedEngine, seen: Any, writer: Any
) -> None:
    held.append(bool(gate.held_left))
    await engine.scripts[1](seen, writer)
