"""The end of a stream that is cut, and the copy of an answer that is told again, against the json module."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.outcome import Usage
from controlplane.gateway import cut
from controlplane.gateway.answer_heads import WARNING_CHARS_MAX, header_text
from controlplane.gateway.cached import told_again
from controlplane.gateway.relay import Tap
from tests.gateway_world import DONE, event, finish, role, token, used

REFUSE = Refuse(Reason.INSUFFICIENT_QUOTA, "spent\nby 5")
_INDICES = st.integers(0, 2)
_NAMES = st.sampled_from(["id", "object", "created", "model", "system_fingerprint", "x"])


def _choice(index: int, text: str, reason: str | None) -> bytes:
    delta = {"content": text}
    return event(
        {"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}
    )


@given(
    steps=st.lists(st.tuples(_INDICES, st.booleans()), max_size=8),
    answers=st.integers(1, 3),
    asks_usage=st.booleans(),
    is_chat=st.booleans(),
)
def test_a_cut_ends_each_answer_that_had_not_ended_once(
    steps: list[tuple[int, bool]], answers: int, *, asks_usage: bool, is_chat: bool
) -> None:
    tap = Tap(hides_usage=False, answers=answers)
    ended: set[int] = set()
    tap.feed(_choice(0, "first", None))
    for index, is_last in steps:
        if index >= answers or index in ended:
            continue
        tap.feed(_choice(index, "x", "stop" if is_last else None))
        if is_last:
            ended.add(index)
    assert tap.unfinished == tuple(i for i in range(answers) if i not in ended)
    usage = Usage(5, 0, 3, is_estimated=True) if asks_usage else None
    last = role() + token("\n\ndata: {")
    got = cut.ending(last, REFUSE, is_chat=is_chat, unfinished=tap.unfinished, usage=usage, held={})
    assert got.endswith(b"\n\n" + DONE)
    comment, *events, _, _ = got.split(b"\n\n")
    assert comment == b": ended insufficient_quota spent?by 5"
    chunks = [json.loads(one[6:]) for one in events]
    assert len(chunks) == 1 + asks_usage
    assert [choice["index"] for choice in chunks[0]["choices"]] == list(tap.unfinished)
    assert all(choice["finish_reason"] == "length" for choice in chunks[0]["choices"])
    assert all(("delta" in c) is is_chat for c in chunks[0]["choices"])
    for chunk in chunks:
        assert (chunk["id"], chunk["model"]) == ("chatcmpl-1", "mock")
    if asks_usage:
        assert chunks[1]["usage"] == {
            "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8
        }  # fmt: skip


@given(members=st.dictionaries(_NAMES, st.integers() | st.text(), max_size=6))
def test_a_cut_says_of_the_stream_what_its_chunks_said(members: dict[str, object]) -> None:
    last = event({**members, "choices": []})
    got = cut.ending(last, REFUSE, is_chat=True, unfinished=(0,), usage=None, held={})
    chunk = json.loads(got.split(b"\n\n")[1][6:])
    del chunk["choices"]
    assert chunk == {name: value for name, value in members.items() if name != "x"}


@given(last=st.sampled_from([b"", b": ping\n\n", b"data: {broken\n\n", b"data: [DONE]\n\n"]))
def test_a_cut_needs_no_whole_chunk_before_it(last: bytes) -> None:
    got = cut.ending(last, REFUSE, is_chat=True, unfinished=(0,), usage=None, held={})
    assert json.loads(got.split(b"\n\n")[1][6:])["choices"][0]["finish_reason"] == "length"


_TEXTS = st.sampled_from(["a", '"usage":{"prompt_tokens":1}', "\n\ndata: {}", "é", "[DONE]"])
_USAGES = st.sampled_from(
    [
        None,
        {"prompt_tokens": 7, "completion_tokens": 1},
        {"prompt_tokens": 7, "prompt_tokens_details": None},
        {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 1}},
    ]
)


def _retold(body: dict[str, Any]) -> dict[str, Any]:
    usage = body.get("usage")
    if usage is None:
        return body
    details = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": 7}
    return {**body, "usage": {**usage, "prompt_tokens_details": details}}


@given(text=_TEXTS, usage=_USAGES, has_usage=st.booleans())
def test_a_whole_answer_is_told_again_with_its_prompt_cached(
    text: str, usage: dict[str, Any] | None, *, has_usage: bool
) -> None:
    body: dict[str, Any] = {"choices": [{"message": {"content": text}}]}
    if has_usage:
        body["usage"] = usage
    got = told_again(json.dumps(body).encode(), 7, is_stream=False)
    assert json.loads(got) == _retold(body)


@given(texts=st.lists(_TEXTS, max_size=5), usage=_USAGES)
def test_a_stream_is_told_again_event_by_event(
    texts: list[str], usage: dict[str, Any] | None
) -> None:
    events = [role(), b": ping\n\n", *(token(text, usage=usage) for text in texts), finish()]
    events += [used(7, 3), DONE]
    got = told_again(b"".join(events), 7, is_stream=True).split(b"\n\n")
    assert len(got) == len(events) + 1
    for one, told in zip(events, got, strict=False):
        if one in (DONE, b": ping\n\n"):
            assert told + b"\n\n" == one
        else:
            assert json.loads(told[6:]) == _retold(json.loads(one[6:]))


@given(text=st.text(max_size=400))
def test_no_text_breaks_out_of_its_header(text: str) -> None:
    seen = [c if 0x20 <= ord(c) < 0x7F else "?" for c in text[:WARNING_CHARS_MAX]]
    assert header_text(text) == "".join(seen).strip(" ").encode()
