"""Bodies: hostile ones are refused, and what engines get is what was checked."""

import json
from typing import Any

import pytest

from controlplane.gateway import body as bodies
from controlplane.gateway.body import Body, Flaw, Treatment, parse, treatment

CHAT: dict[str, Any] = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}


def encoded(**members: object) -> bytes:
    return json.dumps({**CHAT, **members}).encode()


def checked(raw: bytes, *, is_chat: bool = True) -> Body:
    body = parse(raw, is_chat=is_chat)
    assert isinstance(body, Body), body
    return body


def refused(raw: bytes, *, is_chat: bool = True) -> Flaw:
    flaw = parse(raw, is_chat=is_chat)
    assert isinstance(flaw, Flaw)
    return flaw


def nested(depth: int, opening: str, closing: str, inner: str = "1") -> str:
    return opening * depth + inner + closing * depth


_MESSAGES = '"model":"mock","messages":[{"role":"user","content":"hi"}]'
HOSTILE = {
    "empty": b"",
    "not json": b"{",
    "trailing": encoded() + b"x",
    "two documents": encoded() + encoded(),
    "array": b"[1]",
    "text": b'"x"',
    "null": b"null",
    "bom": b"\xef\xbb\xbf" + encoded(),
    "utf-16": encoded().decode().encode("utf-16"),
    "bad utf-8 in a skipped member": b'{%s,"user":"\xff"}' % _MESSAGES.encode(),
    "bad utf-8 in a message": b'{"model":"m","messages":[{"content":"\xc3\x28"}]}',
    "nan": b'{%s,"temperature":NaN}' % _MESSAGES.encode(),
    "nan in a skipped member": b'{%s,"x":NaN}' % _MESSAGES.encode(),
    "infinity": b'{%s,"top_p":1e999}' % _MESSAGES.encode(),
    "minus infinity": b'{%s,"top_p":-Infinity}' % _MESSAGES.encode(),
    "no model": b'{"messages":[{}]}',
    "model is a number": encoded(model=5),
    "model is empty": encoded(model=""),
    "model is long": encoded(model="m" * 300),
    "no messages": b'{"model":"mock"}',
    "messages is text": encoded(messages="hi"),
    "messages is null": encoded(messages=None),
    "messages is empty": encoded(messages=[]),
    "messages is blank": b'{"model":"mock","messages":[ \n ]}',
    "stream is text": encoded(stream="true"),
    "stream is a number": encoded(stream=1),
    "max_tokens is text": encoded(max_tokens="5"),
    "max_tokens is a float": encoded(max_tokens=1.5),
    "max_tokens is a boolean": encoded(max_tokens=True),
    "max_tokens is zero": encoded(max_tokens=0),
    "max_tokens is negative": encoded(max_tokens=-1),
    "max_tokens is huge": b'{%s,"max_tokens":%s}' % (_MESSAGES.encode(), b"9" * 400),
    "n is 9": encoded(n=9),
    "n is 0": encoded(n=0),
    "best_of is 9": encoded(best_of=9),
    "five stops": encoded(stop=["a"] * 5),
    "stop is a number": encoded(stop=5),
    "301 biases": encoded(logit_bias={str(i): 1 for i in range(301)}),
    "1025 messages": encoded(messages=[{"role": "user", "content": "x"}] * 1_025),
    "a message is text": encoded(messages=[{"role": "user"}] * 40 + ["hi"]),
    "129 tools": encoded(tools=[{"type": "function"}] * 129),
    "tools is an object": encoded(tools={"a": 1}),
    "stream_options is text": encoded(stream_options="x"),
    "deep arrays": b'{%s,"x":%s}' % (_MESSAGES.encode(), nested(40, "[", "]").encode()),
    "deep objects": b'{%s,"x":%s}' % (_MESSAGES.encode(), nested(40, '{"a":', "}").encode()),
    "deep content": (
        '{"model":"mock","messages":[{"content":' + nested(40, '[{"a":', "}]") + "}]}"
    ).encode(),
    "deep with closers between": (
        '{"model":"mock","messages":[{"content":' + nested(40, '[[],{"b":{},"a":', "}]") + "}]}"
    ).encode(),
    "deep tools": encoded(tools=[json.loads(nested(33, '{"a":', "}"))]),
    "very deep": b'{%s,"x":%s}' % (_MESSAGES.encode(), nested(100_000, "[", "]").encode()),
    "wide": b'{%s,"x":[%s1]}' % (_MESSAGES.encode(), b"[]," * 60_000),
    "too large": encoded(messages=[{"role": "user", "content": "x" * bodies.BODY_BYTES_MAX}]),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bodies_are_refused_with_words(raw: bytes) -> None:
    flaw = refused(raw)
    assert str(flaw.refuse.reason) in {"invalid_request", "request_too_large"}
    assert flaw.refuse.detail
    assert "\n" not in flaw.refuse.detail


@pytest.mark.parametrize(
    ("member", "value"),
    [("max_tokens", "5"), ("n", 9), ("stop", ["a"] * 5), ("temperature", "warm"), ("stream", 1)],
)
def test_the_member_to_blame_is_named(member: str, value: object) -> None:
    flaw = refused(encoded(**{member: value}))
    assert flaw.param == member
    assert f"`{member}`" in flaw.refuse.detail


@pytest.mark.parametrize(
    "raw",
    [
        encoded(n=8),
        encoded(stop=["a"] * 4),
        encoded(max_tokens=None, stream=None, n=None),
        encoded(messages=[{"role": "user", "content": "x"}] * 1_024),
        encoded(tools=[{"type": "function"}] * 128),
        encoded(messages=[{"role": "user", "content": "héé 日本 \U0001f600"}]),
        encoded(messages=[{"role": "user", "content": "{[" * 10_000 + '\\" \\\\'}]),
        encoded(tools=[json.loads(nested(29, '{"a":', "}"))]),
        encoded(logit_bias={str(i): -1.5 for i in range(300)}),
        encoded(tools=None),
        b" \n" + encoded() + b"\n ",
    ],
)
def test_bodies_at_the_limits_are_taken(raw: bytes) -> None:
    body = checked(raw)
    sent = json.loads(body.for_engine(7, "salt"))
    kept = {k: v for k, v in json.loads(raw).items() if k != "max_tokens"}
    assert sent == {**kept, "max_tokens": 7, "cache_salt": "salt"}


def test_depth_is_bounded_exactly() -> None:
    for depth in range(20, 45):
        raw = encoded(response_format=json.loads(nested(depth, "[", "]")))
        is_taken = isinstance(parse(raw, is_chat=True), Body)
        # The body itself is one level.
        assert is_taken is (depth + 1 <= bodies.DEPTH_MAX), depth


def test_a_duplicate_key_means_the_same_here_and_at_the_engine() -> None:
    raw = b'{%s,"max_tokens":5,"max_\\u0074okens":6,"model":"evil"}' % _MESSAGES.encode()
    body = checked(raw)
    assert body.model == "evil"
    assert body.completion_tokens_max == 6
    sent = body.for_engine(6, "")
    assert sent.count(b'"model"') == sent.count(b'"max_tokens"') == 1
    assert json.loads(sent)["model"] == "evil"


def test_every_member_has_one_treatment_with_a_reason() -> None:
    assert not bodies.FORWARDED & bodies.STRIPPED.keys()
    assert not bodies.FORWARDED & bodies.REFUSED.keys()
    assert not bodies.STRIPPED.keys() & bodies.REFUSED.keys()
    assert all(bodies.STRIPPED.values())
    assert all(bodies.REFUSED.values())
    for member in bodies.REFUSED:
        flaw = refused(encoded(**{member: {"x": 1}}))
        assert flaw.param == member
        assert bodies.REFUSED[member] in flaw.refuse.detail
        assert treatment(member) is Treatment.REFUSE
        assert member not in json.loads(checked(encoded(**{member: None})).for_engine(1, ""))
    for member in bodies.STRIPPED:
        value = {"a": "b"} if member in {"metadata", "nvext", "vllm_xargs"} else "1"
        body = checked(encoded(**{member: value}))
        assert member in body.left_out
        assert json.loads(body.for_engine(1, "")).get(member, None) in (None, ".1")
    assert treatment("something_of_tomorrow") is Treatment.STRIP
    body = checked(encoded(something_of_tomorrow=1))
    assert list(body.left_out) == ["something_of_tomorrow"]


def test_internal_arguments_can_not_be_smuggled() -> None:
    body = checked(encoded(vllm_xargs={"kv_transfer_params": {"remote_host": "evil"}}))
    assert b"kv_transfer_params" not in body.for_engine(5, "s")


def test_the_cache_salt_is_the_tenants_with_the_sent_one_appended() -> None:
    assert json.loads(checked(encoded()).for_engine(5, "t1"))["cache_salt"] == "t1"
    assert (
        json.loads(checked(encoded(cache_salt="t2")).for_engine(5, "t1"))["cache_salt"] == "t1.t2"
    )


def test_the_token_limit_takes_the_name_that_the_client_used() -> None:
    new = json.loads(checked(encoded(max_completion_tokens=9, max_tokens=5)).for_engine(4, ""))
    assert new["max_completion_tokens"] == 4
    assert "max_tokens" not in new
    old = json.loads(checked(encoded(min_tokens=6)).for_engine(4, ""))
    assert (old["max_tokens"], old["min_tokens"]) == (4, 4)
    assert checked(encoded(max_completion_tokens=9, max_tokens=5)).completion_tokens_max == 9
    assert checked(encoded(max_tokens=5)).completion_tokens_max == 5
    assert checked(encoded()).completion_tokens_max is None


def test_a_whole_answer_carries_no_stream_options() -> None:
    body = checked(encoded(stream_options={"include_usage": True}))
    assert "stream_options" not in json.loads(body.for_engine(4, ""))


@pytest.mark.parametrize(
    ("members", "is_single"),
    [
        ({}, False),
        ({"n": 2}, True),
        ({"prompt_logprobs": 1}, True),
        ({"best_of": 2}, True),
        ({"echo": True}, True),
        ({"n": 1, "logprobs": True}, False),
    ],
)
def test_what_can_not_be_split_over_two_engines(
    members: dict[str, object], *, is_single: bool
) -> None:
    assert checked(encoded(**members)).is_single_engine is is_single


@pytest.mark.parametrize(
    ("prompt", "sequences"),
    [("text", 1), ([1, 2, 3], 1), (["a"], 1), (["a", "b"], 2), ([[1, 2], [3]], 2)],
)
def test_prompts_of_completions(prompt: object, sequences: int) -> None:
    raw = json.dumps({"model": "mock", "prompt": prompt, "n": 2}).encode()
    body = checked(raw, is_chat=False)
    assert body.sequences == 2 * sequences
    assert json.loads(body.for_engine(3, ""))["prompt"] == prompt


@pytest.mark.parametrize("prompt", [[], None, 5, {}, ["a"] * 9])
def test_wrong_prompts_of_completions(prompt: object) -> None:
    raw = json.dumps({"model": "mock", "prompt": prompt}).encode()
    assert refused(raw, is_chat=False).param == "prompt"


def test_a_longer_conversation_has_the_shorter_ones_bytes_as_prefix() -> None:
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "yes"}]
    first, second = checked(encoded(messages=one)), checked(encoded(messages=two))
    assert second.prefix.startswith(first.prefix)
    assert first.prompt_bytes == len(json.dumps(one))
    assert first.tools_digest == 0
    assert checked(encoded(tools=[{"a": 1}])).tools_digest != 0


def test_a_whole_number_may_be_written_with_a_point() -> None:
    body = parse(encoded(max_tokens=16.0, n=2.0), is_chat=True)
    assert isinstance(body, Body)
    assert (body.completion_tokens_max, body.sequences) == (16, 2)
    assert bytes(body.members["n"]) == b"2"
