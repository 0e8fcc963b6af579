"""What engines can say, through the gateway to OpenAI's own SDK: tools, structured output, log probabilities, choices.

The engines follow a script in vLLM's shapes, so that it is known what the SDK must make of it.
"""

import json
from typing import Any, Final

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionToolParam

from tests.gateway_world import (
    DONE,
    KEY,
    RoundRobinGate,
    ScriptedEngine,
    answer,
    event,
    finish,
    hangs,
    role,
    running,
    sends,
    stream,
    token,
    used,
    whole,
)

HELLO: Final[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Final[ChatCompletionToolParam] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Verdict(pydantic.BaseModel):
    is_good: bool
    why: str


def delta(**members: object) -> bytes:
    """A chunk of one choice with this delta."""
    choice = {"index": 0, "delta": members, "logprobs": None, "finish_reason": None}
    return event(
        {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": [choice]}
    )  # fmt: skip


def client_of(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, **options)


async def test_a_tool_call_arrives_whole() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    said = answer()
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    said["choices"] = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    async with (
        ScriptedEngine(whole(200, said)) as engine,
        running(RoundRobinGate([engine.address])) as world,
        client_of(world.url) as client,
    ):
        made = await client.chat.completions.create(
            model="mock", messages=HELLO, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False
        )  # fmt: skip
    [choice] = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [made_call] = choice.message.tool_calls
    assert made_call.type == "function"
    assert json.loads(made_call.function.arguments) == {"city": "Oslo"}
    body = engine.seen[0].body
    assert (body["tools"], body["tool_choice"], body["parallel_tool_calls"]) == (
        [WEATHER],
        "auto",
        False,
    )


async def test_a_tool_call_is_put_together_from_a_stream() -> None:
    parts = ('{"ci', 'ty": "Os', 'lo"}')
    first = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    chunks = [
        role(),
        delta(tool_calls=[first]),
        *(delta(tool_calls=[{"index": 0, "function": {"arguments": part}}]) for part in parts),
        finish("tool_calls"),
        used(16, 9),
        DONE,
    ]
    async with (
        ScriptedEngine(sends(stream(*chunks))) as engine,
        running(RoundRobinGate([engine.address])) as world,
        client_of(world.url) as client,
        client.chat.completions.stream(model="mock", messages=HELLO, tools=[WEATHER]) as events,
    ):
        made = await events.get_final_completion()
    [choice] = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


async def test_structured_output_is_parsed() -> None:
    async with (
        ScriptedEngine(whole(200, answer('{"is_good": true, "why": "it is"}'))) as engine,
        running(RoundRobinGate([engine.address])) as world,
        client_of(world.url) as client,
    ):
        made = await client.chat.completions.parse(
            model="mock", messages=HELLO, response_format=Verdict
        )
    assert made.choices[0].message.parsed == Verdict(is_good=True, why="it is")
    asked = engine.seen[0].body["response_format"]
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["schema"]["required"] == ["is_good", "why"]


async def test_log_probabilities_and_several_choices() -> None:
    def choice(index: int) -> dict[str, object]:
        top = {"token": "b", "logprob": -2.0, "bytes": [98]}
        one = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [top]}
        return {
            "index": index, "message": {"role": "assistant", "content": "a"}, "logprobs": {"content": [one]},
            "finish_reason": "stop",
        }  # fmt: skip

    said = answer()
    said["choices"] = [choice(0), choice(1), choice(2)]
    async with (
        ScriptedEngine(whole(200, said)) as engine,
        running(RoundRobinGate([engine.address])) as world,
        client_of(world.url) as client,
    ):
        made = await client.chat.completions.create(
            model="mock", messages=HELLO, n=3, logprobs=True, top_logprobs=1, temperature=1.0
        )
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    for one in made.choices:
        assert one.logprobs is not None
        assert one.logprobs.content is not None
        [told] = one.logprobs.content
        assert (told.token, told.logprob) == ("a", -0.5)
        assert told.top_logprobs[0].token == "b"
    body = engine.seen[0].body
    assert (body["n"], body["logprobs"], body["top_logprobs"]) == (3, True, 1)


@pytest.mark.parametrize("is_asked", [True, False])
async def test_usage_ends_a_stream_only_where_it_was_asked_for(*, is_asked: bool) -> None:
    chunks = (role(), token("a"), finish(), used(16, 3, 8), DONE)
    async with (
        ScriptedEngine(sends(stream(*chunks))) as engine,
        running(RoundRobinGate([engine.address])) as world,
        client_of(world.url) as client,
    ):
        options: Any = {"stream_options": {"include_usage": True}} if is_asked else {}
        seen = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="mock", messages=HELLO, stream=True, **options
            )
        ]
    told = [chunk for chunk in seen if chunk.usage is not None]
    assert len(told) == (1 if is_asked else 0)
    if told:
        assert seen[-1] is told[0]
        assert told[0].choices == []
        assert told[0].usage is not None
        assert told[0].usage.total_tokens == 19
        assert told[0].usage.prompt_tokens_details is not None
        assert told[0].usage.prompt_tokens_details.cached_tokens == 8
    assert world.gate.settlements[0].usage.completion_tokens == 3


async def test_a_passing_failure_is_asked_again_and_counted() -> None:
    """`x-should-retry: true` makes the SDK come back, and it says how often it has."""
    busy = whole(503, {"error": {"message": "busy"}}, "retry-after: 1")
    async with (
        ScriptedEngine(busy, busy, whole(200, answer("at last"))) as engine,
        running(RoundRobinGate([engine.address], retries_max=0)) as world,
        client_of(world.url, max_retries=3) as client,
    ):
        made = await client.chat.completions.create(model="mock", messages=HELLO)
    assert made.choices[0].message.content == "at last"
    assert [call.client_retries for call in world.gate.calls] == [0, 1, 2]


async def test_an_answer_that_does_not_come_is_a_time_out_of_the_sdk() -> None:
    async with (
        ScriptedEngine(hangs()) as engine,
        running(RoundRobinGate([engine.address], retries_max=0)) as world,
        client_of(world.url, max_retries=0, timeout=0.5) as client,
    ):
        # The gateway keeps the SDK's own deadline, so either may be the first to say so.
        with pytest.raises((openai.APITimeoutError, openai.InternalServerError)) as late:
            await client.chat.completions.create(model="mock", messages=HELLO)
        await world.gate.settled.wait()
    if isinstance(late.value, openai.InternalServerError):
        assert late.value.code == "upstream_timeout"
    assert world.gate.calls[0].deadline_ms == 500
