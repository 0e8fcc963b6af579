"""Answers given again: which calls share one, what the second client gets, who waits for the first."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.ids import ModelName
from controlplane.domain.outcome import RequestState, Usage
from tests.gateway_world import (
    DONE,
    KEY,
    MODEL,
    SECOND_KEY,
    STREAM_HEAD,
    TERMS,
    Answer,
    RoundRobinGate,
    Script,
    ScriptedEngine,
    Seen,
    World,
    answer,
    chunked,
    finish,
    hangs,
    role,
    running,
    sends,
    stream,
    token,
    until,
    used,
    whole,
)

CHAT = {
    "model": "mock",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "temperature": 0,
}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
EVENTS = (role(), token("a"), token("b"), finish(), used(16, 2), DONE)
KEEPS = replace(TERMS, cache_ttl_s=60, cache_price_ratio=0.1)


def caching_gate(*engines: ScriptedEngine, **members: object) -> RoundRobinGate:
    return RoundRobinGate([one.address for one in engines], terms=KEEPS, **members)  # type: ignore[arg-type]


def state_of(got: Answer) -> str | None:
    return got.headers.get("x-headway-cache")


async def test_the_same_call_is_answered_again_without_an_engine() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = caching_gate(engine)
        async with running(gate) as world:
            first = await world.post(CHAT)
            second = await world.post(dict(reversed(CHAT.items())))
    assert (first.status, state_of(first)) == (200, "miss")
    assert first.json() == answer()
    assert (second.status, state_of(second)) == (200, "hit")
    assert second.headers["x-request-id"] == second.headers["x-headway-decision"] == "hit-1"
    assert second.headers["x-headway-cache-ttl"] in {"59", "60"}
    assert "x-headway-engine" not in second.headers
    usage = second.json()["usage"]
    assert usage.pop("prompt_tokens_details") == {"cached_tokens": 16}
    expected = answer()
    del expected["usage"]["prompt_tokens_details"]  # type: ignore[attr-defined]
    expected.pop("kv_transfer_params")
    got = {**second.json(), "usage": usage}
    got.pop("kv_transfer_params")
    assert got == expected
    assert len(engine.seen) == 1
    assert gate.admitted == 1
    assert gate.cached_usages == [Usage(16, 16, 8, is_estimated=False)]
    assert [(one.ticket_id, one.state, one.usage) for one in gate.settlements] == [
        ("req-1", RequestState.SUCCEEDED, Usage(16, 0, 8, is_estimated=False)),
        ("hit-1", RequestState.SUCCEEDED, Usage(16, 16, 8, is_estimated=False)),
    ]
    calls = world.metrics.cached_answers
    assert (calls.value(("gold", "miss")), calls.value(("gold", "hit"))) == (1, 1)
    assert world.metrics.cache_bytes.value() > len(first.body)


async def test_a_stream_is_replayed_with_its_usage() -> None:
    async with ScriptedEngine(sends(stream(*EVENTS))) as engine:
        gate = caching_gate(engine)
        async with running(gate) as world:
            first = await world.post(STREAM)
            second = await world.post(STREAM)
    assert first.body == b"".join(EVENTS)
    assert second.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = second.body.split(b"\n\n")
    assert events[:4] == [one.removesuffix(b"\n\n") for one in EVENTS[:4]]
    assert events[5:] == [b"data: [DONE]", b""]
    shown = json.loads(events[4].removeprefix(b"data: "))
    assert shown["choices"] == []
    assert shown["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert gate.settlements[1].ttft_ms is not None
    assert len(engine.seen) == 1


async def test_hidden_usage_stays_hidden_in_a_replay() -> None:
    body = {**CHAT, "stream": True}
    async with (
        ScriptedEngine(sends(stream(*EVENTS))) as engine,
        running(caching_gate(engine)) as world,
    ):
        first, second = await world.post(body), await world.post(body)
    assert first.body == second.body
    assert b"usage" not in second.body


@pytest.mark.parametrize(
    "other",
    [
        {"max_tokens": 9},
        {"messages": [{"role": "user", "content": "hi "}]},
        {"seed": 1},
        {"stream": True},
        {"cache_salt": "x"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"top_p": 0.5},
    ],
)
async def test_another_call_is_another_answer(other: dict[str, object]) -> None:
    streamed = sends(stream(*EVENTS)) if "stream" in other else whole(200, answer())
    async with (
        ScriptedEngine(whole(200, answer()), streamed) as engine,
        running(caching_gate(engine)) as world,
    ):
        assert state_of(await world.post(CHAT)) == "miss"
        assert state_of(await world.post({**CHAT, **other})) == "miss"
    assert len(engine.seen) == 2


@pytest.mark.parametrize("left_out", [{"user": "u1"}, {"metadata": {"headway_step": "3"}}])
async def test_what_engines_do_not_get_does_not_separate_answers(
    left_out: dict[str, object],
) -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(caching_gate(engine)) as world,
    ):
        await world.post(CHAT)
        assert state_of(await world.post({**CHAT, **left_out})) == "hit"


@pytest.mark.parametrize(
    "member",
    [{"temperature": None}, {"temperature": 0.1}, {"n": 2}, {"best_of": 2}],
)
async def test_calls_that_may_be_answered_otherwise_take_no_part(
    member: dict[str, object],
) -> None:
    async with (
        ScriptedEngine(whole(200, answer())) as engine,
        running(caching_gate(engine)) as world,
    ):
        for _ in range(2):
            assert state_of(await world.post({**CHAT, **member})) is None
    assert len(engine.seen) == 2


async def test_a_class_without_a_cache_takes_no_part() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        for terms in (TERMS, Refuse(Reason.FORBIDDEN_BY_POLICY, "no")):
            gate = RoundRobinGate([engine.address], terms=terms)
            async with running(gate) as world:
                for _ in range(2):
                    assert state_of(await world.post(CHAT)) is None
    assert len(engine.seen) == 4


async def test_no_tenant_gets_anothers_answer() -> None:
    async with (
        ScriptedEngine(whole(200, answer("one")), whole(200, answer("two"))) as engine,
        running(caching_gate(engine)) as world,
    ):
        await world.post(CHAT)
        other = await world.post(CHAT, authorization=f"Bearer {SECOND_KEY}")
        again = await world.post(CHAT, authorization=f"Bearer {SECOND_KEY}")
        first = await world.post(CHAT)
    assert (state_of(other), state_of(again), state_of(first)) == ("miss", "hit", "hit")
    texts = [one.json()["choices"][0]["message"]["content"] for one in (other, again, first)]
    assert texts == ["two", "two", "one"]


async def test_an_answer_expires() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = RoundRobinGate([engine.address], terms=replace(KEEPS, cache_ttl_s=1))
        async with running(gate) as world:
            await world.post(CHAT)
            assert state_of(await world.post(CHAT)) == "hit"
            async with asyncio.timeout(30):
                while state_of(await world.post(CHAT)) == "hit":
                    await asyncio.sleep(0.05)
    assert len(engine.seen) == 2


def ended(reason: str) -> dict[str, object]:
    made = answer()
    made["choices"][0]["finish_reason"] = reason  # type: ignore[index]
    return made


@pytest.mark.parametrize(
    ("script", "members"),
    [
        (whole(500, {"error": {}}), {}),
        (whole(400, {"error": {"message": "x"}}), {}),
        # Ended at a limit that was not the client's own.
        (whole(200, ended("length")), {"max_tokens": None}),
        (sends(stream(role(), token(), finish("length"), DONE)), {"max_tokens": None, "stream": True}),
    ],
    ids=["500", "400", "cut", "cut stream"],
)  # fmt: skip
async def test_what_another_call_might_not_get_is_not_kept(
    script: Script, members: dict[str, object]
) -> None:
    async with (
        ScriptedEngine(script) as engine,
        running(caching_gate(engine, retries_max=0)) as world,
    ):
        for _ in range(2):
            await world.post({**CHAT, **members})
    assert len(engine.seen) == 2


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_an_answer_at_the_clients_own_limit_is_kept(reason: str) -> None:
    async with (
        ScriptedEngine(whole(200, ended(reason))) as engine,
        running(caching_gate(engine)) as world,
    ):
        await world.post(CHAT)
        assert state_of(await world.post(CHAT)) == "hit"


async def test_the_answer_of_another_model_is_not_kept() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = caching_gate(engine, model=replace(MODEL, name=ModelName("cheaper")))
        async with running(gate) as world:
            for _ in range(2):
                assert state_of(await world.post(CHAT)) == "miss"


async def test_an_answer_that_is_too_large_is_not_kept() -> None:
    async with (
        ScriptedEngine(whole(200, answer("x" * 1_100_000))) as engine,
        running(caching_gate(engine)) as world,
    ):
        for _ in range(2):
            assert state_of(await world.post(CHAT)) == "miss"
        assert world.metrics.cache_bytes.value() == 0


async def test_a_hit_can_be_refused() -> None:
    limits = ((b"x-ratelimit-limit-requests", b"1"),)
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = caching_gate(engine, limits_told=limits)
        async with running(gate) as world:
            await world.post(CHAT)
            gate.cached_refusal = Refuse(Reason.RATE_LIMITED, "over the limit", 700, "dec-1")
            got = await world.post(CHAT)
    assert (got.status, got.headers["retry-after-ms"]) == (429, "700")
    assert got.headers["x-ratelimit-limit-requests"] == "1"
    assert len(gate.settlements) == 1


# ---------------------------------------------------------------- one engine call for many


def waits_for(event: asyncio.Event, script: Script) -> Script:
    async def waiting(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await event.wait()
        await script(seen, writer)

    return waiting


async def posted(world: World, count: int, body: object = CHAT) -> list["asyncio.Task[Answer]"]:
    """So many calls, one after the other, none waited for."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(world.post(body)))
        await asyncio.sleep(0.02)
    return tasks


async def test_identical_calls_at_once_are_one_engine_call() -> None:
    go = asyncio.Event()
    async with ScriptedEngine(waits_for(go, whole(200, answer()))) as engine:
        gate = caching_gate(engine)
        async with running(gate) as world:
            tasks = await posted(world, 5)
            assert len(engine.seen) == 1
            go.set()
            got = await asyncio.gather(*tasks)
    assert [state_of(one) for one in got] == ["miss", *["hit"] * 4]
    assert len(engine.seen) == 1
    assert len(gate.settlements) == 5


async def test_when_the_first_fails_the_next_one_goes() -> None:
    go = asyncio.Event()
    failing = waits_for(go, whole(500, {"error": {}}))
    async with (
        ScriptedEngine(failing, failing, whole(200, answer())) as engine,
        running(caching_gate(engine, retries_max=0)) as world,
    ):
        tasks = await posted(world, 4)
        go.set()
        got = await asyncio.gather(*tasks)
    assert [one.status for one in got] == [502, 502, 200, 200]
    assert state_of(got[3]) == "hit"
    assert len(engine.seen) == 3


async def test_when_the_first_clients_leave_the_next_one_goes() -> None:
    async with ScriptedEngine(hangs(), whole(200, answer())) as engine:
        gate = caching_gate(engine)
        async with running(gate) as world:
            clients = [await world.dial() for _ in range(3)]
            for client in clients:
                await client.send(CHAT)
                await asyncio.sleep(0.02)
            # The second one goes first, so that the third must be told by the first.
            clients[1].writer.transport.abort()
            await asyncio.sleep(0.02)
            assert len(engine.seen) == 1
            clients[0].writer.transport.abort()
            got = await asyncio.wait_for(clients[2].answer(), 2)
            clients[2].writer.close()
    assert state_of(got) == "miss"
    assert [one.state for one in gate.settlements] == [
        RequestState.CANCELLED,
        RequestState.SUCCEEDED,
    ]


async def test_a_refused_first_call_leaves_the_answer_to_the_next() -> None:
    async with ScriptedEngine(whole(200, answer())) as engine:
        gate = caching_gate(engine)
        gate.gate_open.clear()
        async with running(gate) as world:
            tasks = await posted(world, 2)
            assert gate.admitted == 1
            gate.refusal = Refuse(Reason.QUEUE_FULL, "full", 100)
            gate.gate_open.set()
            assert (await tasks[0]).status == 429
            assert (await tasks[1]).status == 429
            gate.refusal = None
            assert state_of(await world.post(CHAT)) == "miss"


async def test_answers_that_can_not_be_kept_are_made_side_by_side() -> None:
    go = asyncio.Event()
    large = whole(200, answer("x" * 1_100_000))
    async with (
        ScriptedEngine(waits_for(go, large), hangs()) as engine,
        running(caching_gate(engine)) as world,
    ):
        tasks = await posted(world, 4)
        go.set()
        assert (await tasks[0]).status == 200
        await until(lambda: len(engine.seen) == 4)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_nobody_waits_for_another_beyond_its_own_deadline() -> None:
    async with (
        ScriptedEngine(hangs(), whole(200, answer())) as engine,
        running(caching_gate(engine)) as world,
        world.dialled() as first,
    ):
        await first.send(CHAT)
        await until(lambda: len(engine.seen) == 1)
        # Late as it is then, it is the gate that decides on it; this one lets it go on.
        await asyncio.wait_for(world.post(CHAT, x_headway_deadline_ms="100"), 2)
        assert world.gate.admitted == 2


async def test_one_stream_serves_those_who_came_while_it_ran() -> None:
    script = sends(
        STREAM_HEAD, *(piece for one in EVENTS for piece in (chunked(one), 0.02)), b"0\r\n\r\n"
    )
    async with ScriptedEngine(script) as engine, running(caching_gate(engine)) as world:
        got = await asyncio.gather(*await posted(world, 3, STREAM))
    assert [state_of(one) for one in got] == ["miss", "hit", "hit"]
    assert all(one.body.endswith(DONE) and one.is_whole for one in got)
    assert len(engine.seen) == 1


async def test_the_official_sdk_reads_a_hit_as_any_answer() -> None:
    async with (
        ScriptedEngine(sends(stream(*EVENTS))) as engine,
        running(caching_gate(engine)) as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client,
    ):
        texts = []
        for _ in range(2):
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="mock",
                    messages=[{"role": "user", "content": "hi"}],
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
            texts.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    assert texts == ["ab", "ab"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16
    assert len(engine.seen) == 1
