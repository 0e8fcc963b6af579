"""The pure part of streams that go on elsewhere, against the text of an answer that nothing happened to.

The engine here is a few lines of its own: tokens follow from the tokens before them, some end inside of a
character and are held back, several may come in one chunk. It is cut at any event, several times.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.outcome import Usage
from controlplane.gateway import body as bodies
from controlplane.gateway.body import Body
from controlplane.gateway.relay import DONE_EVENT
from controlplane.gateway.resume import COMPLETIONS_PATH, Resume, ResumeClass, class_of, settled_by
from controlplane.gateway.resume_record import Space
from controlplane.gateway.resume_splice import Continuation, Splice

LIMIT = 24
CHAT = b"/v1/chat/completions"
# The third and the fourth are the two halves of a euro sign; the fifth has two characters.
WORDS = (b"a", b"b", b"\xe2\x82", b"\xac", "é".encode() + b"c", b" d")
HEAD = {"object": "x", "created": 1, "model": "m"}


def follows(ids: list[int]) -> int:
    """The next token, by those before it; half a character is always followed by its other half."""
    if ids and ids[-1] == 2:
        return 3
    state = 7
    for one in ids:
        state = (state * 31 + one + 11) % 1_000_003
    draw = (state >> 3) % 5
    return draw if draw < 3 else draw + 1


def text_of(ids: list[int]) -> str:
    data = b"".join(WORDS[one] for one in ids)
    while data:
        try:
            return data.decode()
        except UnicodeDecodeError:
            data = data[:-1]
    return ""


def loose_text(ids: list[int]) -> str:
    return b"".join(WORDS[one] for one in ids).decode(errors="replace")


def said(prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(follows(ids))
    return ids[len(prompt) :]


@dataclass(frozen=True)
class Call:
    is_chat: bool
    stops: tuple[str, ...]
    is_drawn: bool = False

    def body(self) -> Body:
        members: dict[str, Any] = {
            "model": "m", "stream": True, "max_tokens": LIMIT,
            "temperature": 1 if self.is_drawn else 0,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        members["messages" if self.is_chat else "prompt"] = (
            [{"role": "user", "content": "x"}] if self.is_chat else "x"
        )
        if self.stops:
            members["stop"] = list(self.stops)
        parsed = bodies.parse(json.dumps(members).encode(), is_chat=self.is_chat)
        assert isinstance(parsed, Body)
        return parsed


def uninterrupted(prompt: list[int], stops: tuple[str, ...]) -> tuple[str, str, str | None, int]:
    """Text, reason, stop string and tokens of the answer, by looking at all of it at once."""
    ids = said(prompt, LIMIT)
    for count in range(1, LIMIT + 1):
        text = text_of(ids[:count])
        hits = [(text.find(stop), stop) for stop in stops if stop in text]
        if hits:
            at, stop = min(hits)
            return text[:at], "stop", stop, count
    return text_of(ids), "length", None, LIMIT


def events(asked: dict[str, Any], sizes: Iterator[int], *, is_chat: bool, name: str) -> list[bytes]:
    """What an engine sends: with the end of the text held back for stop strings unless they are shown."""
    prompt = asked["prompt"] if isinstance(asked.get("prompt"), list) else [1, 2, 3, 4]
    stops = asked.get("stop") or []
    shows = asked.get("include_stop_str_in_output", False)
    hold = 0 if shows or not stops else max(map(len, stops)) - 1
    ids = said(prompt, asked["max_tokens"])
    # Bytes of a character that began in the prompt are lost.
    lost = len(WORDS[ids[0]]) if prompt and prompt[-1] == 2 else 0
    total, end, stop = len(ids), "length", None
    full = ""
    for count in range(1, len(ids) + 1):
        data = b"".join(WORDS[one] for one in ids[:count])[lost:]
        full = text_of_bytes(data)
        hits = [(full.find(one), one) for one in stops if one in full]
        if hits:
            at, stop = min(hits)
            total, end = count, "stop"
            full = full[: at + len(stop)] if shows else full[:at]
            break
    found: list[bytes] = []
    if is_chat:
        found.append(chunk(name, {"delta": {"role": "assistant", "content": ""}}, prompt))
    told, at = 0, 0
    while at < total:
        size = min(next(sizes), total - at)
        new, at = ids[at : at + size], at + size
        text = text_of_bytes(b"".join(WORDS[one] for one in ids[:at])[lost:])
        text = full if at == total else text[: max(told, len(text) - hold)]
        piece, told = text[told:], max(told, len(text))
        choice: dict[str, Any] = {"delta": {"content": piece}} if is_chat else {"text": piece}
        choice |= {"logprobs": None, "finish_reason": end if at == total else None}
        choice |= {"stop_reason": stop if at == total else None, "token_ids": new}
        found.append(chunk(name, choice, None if is_chat or found else prompt, is_chat=is_chat))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": total, "total_tokens": 0}
    found.append(event({"id": name, **HEAD, "choices": [], "usage": usage}))
    return [*found, DONE_EVENT]


def text_of_bytes(data: bytes) -> str:
    while data:
        try:
            return data.decode()
        except UnicodeDecodeError:
            data = data[:-1]
    return ""


def event(members: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"
    )


def chunk(
    name: str, choice: dict[str, Any], prompt: list[int] | None, *, is_chat: bool = True
) -> bytes:
    members: dict[str, Any] = {"id": name, **HEAD, "choices": [{"index": 0, **choice}]}
    if is_chat:
        members["prompt_token_ids"] = prompt
    else:
        members["choices"][0]["prompt_token_ids"] = prompt
    return event(members)


def client_sees(data: bytes) -> tuple[str, str | None, str | None, int, set[str]]:
    text, reason, stop, tokens, names = "", None, None, 0, set()
    for one in data.split(b"\n\n")[:-2]:
        members = json.loads(one.removeprefix(b"data: "))
        names.add(members["id"])
        assert members.get("prompt_token_ids") is None
        if members.get("usage"):
            tokens = members["usage"]["completion_tokens"]
            assert members["usage"]["prompt_tokens"] == 4
        for choice in members["choices"]:
            assert reason is None
            assert choice.get("token_ids") is None
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reason = choice.get("finish_reason")
            stop = choice.get("stop_reason") if reason else stop
    return text, reason, stop, tokens, names


_SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=8)
_STOPS = st.lists(st.sampled_from(["ab", "€", "béc", "d a", "c d", "aaa"]), max_size=2, unique=True)


def forever(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


@given(
    is_chat=st.booleans(),
    is_drawn=st.booleans(),
    stops=_STOPS,
    sizes=_SIZES,
    cuts=st.lists(st.integers(1, 40), max_size=3),
)
def test_a_stream_that_goes_on_elsewhere_says_the_same(
    *, is_chat: bool, is_drawn: bool, stops: list[str], sizes: list[int], cuts: list[int]
) -> None:
    call = Call(is_chat, tuple(stops), is_drawn)
    body = call.body()
    space = Space()
    resume = Resume(body, space, LIMIT)
    assert resume.resume_class is (ResumeClass.LOSSLESS if is_drawn else ResumeClass.CONTINUE)
    asked = json.loads(body.for_engine(LIMIT, "", None, resume.engine_members))
    tap = resume.first_tap()
    got = b""
    sends = events(asked, forever(sizes), is_chat=is_chat, name="first")
    for number, cut in enumerate([*cuts, 10_000]):
        for one in sends[:cut]:
            got += tap.feed(one)
            if tap.is_done:
                break
        if tap.is_done:
            break
        assert tap.loss is None, tap.loss
        if not tap.has_token:
            # Nothing was delivered: it begins anew.
            tap, got = resume.first_tap(), b""
            sends = events(asked, forever(sizes), is_chat=is_chat, name="first")
            continue
        assert resume.can_go_on()
        prompt, completion = resume.counted() or (0, 0)
        ending = resume.ending(Usage(prompt, 0, completion, is_estimated=False))
        if ending is not None:
            got += ending
            break
        for strand in resume.unsure():
            # What an engine says of these tokens by themselves.
            while not settled_by(strand, loose_text(strand.unsure)):
                assert strand.unsure
        path, data = resume.next_request(CHAT, "")
        resume.resumes = 0
        assert path == COMPLETIONS_PATH
        following = json.loads(data)
        assert "messages" not in following
        tap = resume.next_tap(tap.tokens)
        sends = events(following, forever(sizes[number % len(sizes) :] + sizes), is_chat=False,
                       name=f"engine {number}")  # fmt: skip
    assert got.endswith(DONE_EVENT)
    text, reason, stop, tokens = uninterrupted([1, 2, 3, 4], call.stops)
    *seen, counted, names = client_sees(got)
    assert (seen, names) == ([text, reason, stop], {"first"})
    # An engine that can not see a stop string's beginning may have said more behind it in the same chunk.
    assert counted == tokens or (is_drawn and stop is not None and tokens < counted <= tokens + 2)
    resume.close()
    assert space.taken == 0


# ---------------------------------------------------------------- replay

_PARTS = st.lists(
    st.tuples(
        st.sampled_from(["content", "reasoning", "tool 0", "tool 1"]),
        st.text('ab€{}\\"', min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=8,
)


def deltas(parts: list[tuple[str, str]], run: str) -> list[bytes]:
    """A chat with parsers: the ids of its tool calls are another each time."""
    found = [chunk(run, {"delta": {"role": "assistant", "content": ""}}, None)]
    begun: set[str] = set()
    for kind, text in parts:
        delta: dict[str, Any] = {kind: text}
        if kind.startswith("tool"):
            number = int(kind[-1])
            call: dict[str, Any] = {"index": number, "function": {"arguments": text}}
            if kind not in begun:
                begun.add(kind)
                call |= {"id": f"{run}-{number}", "type": "function"}
                call["function"]["name"] = f"f{number}"
            delta = {"tool_calls": [call]}
        found.append(chunk(run, {"delta": delta, "finish_reason": None}, None))
    found.append(chunk(run, {"delta": {}, "finish_reason": "tool_calls"}, None))
    usage = {"prompt_tokens": 4, "completion_tokens": len(parts), "total_tokens": 0}
    return [*found, event({"id": run, **HEAD, "choices": [], "usage": usage}), DONE_EVENT]


def joined(data: bytes) -> dict[str, str]:
    parts: dict[str, str] = {}
    for one in data.split(b"\n\n")[:-2]:
        for choice in json.loads(one.removeprefix(b"data: "))["choices"]:
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    parts[name] = parts.get(name, "") + value
                    continue
                for call in value:
                    key = f"tool {call['index']}"
                    for what in ("id", "type"):
                        if what in call:
                            assert f"{key} {what}" not in parts, "a call is named once"
                            parts[f"{key} {what}"] = call[what]
                    for what, text in call["function"].items():
                        parts[f"{key} {what}"] = parts.get(f"{key} {what}", "") + text
            if choice.get("finish_reason"):
                assert "reason" not in parts
                parts["reason"] = choice["finish_reason"]
    return parts


def seeded(**more: object) -> Body:
    members = {"model": "m", "stream": True, "temperature": 1, "seed": 3, "max_tokens": LIMIT}
    members |= {"messages": [], "stream_options": {"include_usage": True}, **more}
    members["messages"] = [{"role": "user", "content": "x"}]
    parsed = bodies.parse(json.dumps(members).encode(), is_chat=True)
    assert isinstance(parsed, Body)
    return parsed


@given(
    parts=_PARTS,
    cuts=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    is_greedy=st.booleans(),
    raw_bytes_max=st.sampled_from([200, 64 * 1024]),
)
def test_a_replayed_stream_says_every_part_once(
    *, parts: list[tuple[str, str]], cuts: list[int], is_greedy: bool, raw_bytes_max: int
) -> None:
    space = Space()
    # A greedy chat shows only by what comes that the model has a parser.
    resume = Resume(seeded(temperature=0) if is_greedy else seeded(), space, LIMIT)
    assert resume.resume_class is (ResumeClass.CONTINUE if is_greedy else ResumeClass.REPLAY)
    assert bool(resume.engine_members) is is_greedy
    assert resume.record is not None
    resume.record.raw_bytes_max = raw_bytes_max
    tap, got = resume.first_tap(), b""
    for number, cut in enumerate([*cuts, 10_000]):
        for one in deltas(parts, f"run{number}")[:cut]:
            got += tap.feed(one)
        if tap.is_done:
            break
        assert tap.loss is None
        assert resume.can_go_on()
        ending = resume.ending(Usage(4, 0, len(parts), is_estimated=False))
        if ending is not None:
            got += ending
            break
        path, data = resume.next_request(CHAT, "")
        assert (path, "return_token_ids" in json.loads(data)) == (CHAT, False)
        resume.resumes = 0
        tap = resume.next_tap(tap.tokens)
    whole = joined(b"".join(deltas(parts, "run0")))
    told = joined(got)
    names = [name for name in told if name.endswith(" id")]
    assert all(told.pop(name).startswith("run") for name in names)
    assert [whole.pop(name) is not None for name in names].count(True) == len(names)
    assert told == whole
    resume.close()
    assert space.taken == 0


@given(parts=_PARTS, at=st.integers(0, 7), cut=st.integers(2, 9))
def test_another_answer_is_not_put_behind_the_first(
    parts: list[tuple[str, str]], at: int, cut: int
) -> None:
    kind, text = parts[at % len(parts)]
    other = list(parts)
    other[at % len(parts)] = (kind, "z" + text[1:])
    resume = Resume(seeded(), Space(), LIMIT)
    tap = resume.first_tap()
    sent = deltas(parts, "a")[:cut]
    got = b"".join(tap.feed(one) for one in sent)
    if cut > len(parts) + 1 or not resume.can_go_on():
        return
    resume.next_request(CHAT, "")
    tap = resume.next_tap(tap.tokens)
    assert isinstance(tap, Splice)
    for one in deltas(other, "b"):
        got += tap.feed(one)
        if tap.loss is not None:
            break
    # What was told is either the first answer's, or the stream is lost; never a mixture.
    was_told = at % len(parts) < cut - 1
    assert tap.is_diverged is (was_told and tap.loss is not None)
    assert (tap.loss is not None) is was_told


# ---------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"temperature": 0}, "continue"),
        ({"temperature": 0, "stop": ["x"]}, "continue"),
        ({"temperature": 0, "response_format": {"type": "text"}}, "continue"),
        ({"temperature": 0, "tools": [{}], "tool_choice": "none"}, "continue"),
        ({"temperature": 0, "tools": []}, "continue"),
        ({"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {"3": 1}}, "continue"),
        ({"temperature": 0, "presence_penalty": 0.5}, "replay"),
        ({"temperature": 0, "frequency_penalty": 0.5}, "replay"),
        ({"temperature": 0, "bad_words": ["a b"]}, "replay"),
        ({"temperature": 0, "tools": [{}]}, "replay"),
        ({"temperature": 0, "response_format": {"type": "json_object"}}, "replay"),
        ({"temperature": 0, "structured_outputs": {"regex": "a"}}, "replay"),
        ({"temperature": 0, "logprobs": True}, "replay"),
        ({"temperature": 0, "include_reasoning": False}, "replay"),
        ({"temperature": 0, "stop": ["x"], "stop_token_ids": [1]}, "replay"),
        ({"temperature": 0, "stop": ["x"], "skip_special_tokens": False}, "replay"),
        ({"temperature": 0, "echo": True}, "replay"),
        ({"seed": 1}, "replay"),
        ({"seed": 1, "n": 3}, "replay"),
        ({"seed": 1, "response_format": {"type": "json_object"}}, "replay"),
        ({}, "lossless"),
        ({"temperature": 0.7, "n": 2}, "lossless"),
        ({"presence_penalty": 0.5}, "lossless"),
        ({"n": 2, "min_tokens": 3}, "none"),
        ({"tools": [{}]}, "none"),
        ({"response_format": {"type": "json_object"}}, "none"),
        ({"temperature": 0, "use_beam_search": True}, "none"),
        ({"temperature": 0, "best_of": 2}, "none"),
        ({"temperature": 0, "stream": False}, "none"),
    ],
)
def test_the_class_is_read_off_the_body(members: dict[str, Any], expected: str) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], **members}
    parsed = bodies.parse(json.dumps(body).encode(), is_chat=True)
    assert isinstance(parsed, Body)
    assert class_of(parsed) == expected


def test_held_back_tokens_of_a_chunk_are_found_by_their_text() -> None:
    members = {"model": "m", "stream": True, "prompt": "x", "max_tokens": 9}
    parsed = bodies.parse(json.dumps(members).encode(), is_chat=False)
    assert isinstance(parsed, Body)
    resume = Resume(parsed, Space(), 9)
    tap = resume.first_tap()
    one = {"text": "ab", "token_ids": [0, 1, 2], "finish_reason": None}
    tap.feed(chunk("a", one, [1, 2, 3, 4], is_chat=False))
    assert resume.can_go_on()
    [strand] = resume.unsure()
    assert strand.unsure == [0, 1, 2]
    assert not settled_by(strand, "ab\ufffd")
    assert settled_by(strand, "ab")
    _, data = resume.next_request(COMPLETIONS_PATH, "")
    asked = json.loads(data)
    assert (asked["prompt"], asked["max_tokens"]) == ([1, 2, 3, 4, 0, 1], 7)


def test_a_record_that_finds_no_room_is_given_up_and_the_stream_goes_on() -> None:
    space = Space(bytes_max=10_000)
    resume = Resume(Call(is_chat=False, stops=()).body(), space, LIMIT)
    tap = resume.first_tap()
    one = chunk(
        "a", {"text": "a" * 90, "token_ids": [1], "finish_reason": None}, None, is_chat=False
    )
    space.taken = 20_000
    shown = b"".join(tap.feed(one) for _ in range(60))
    assert shown.count(b'"token_ids":null') == 60
    assert tap.tokens == 60
    assert not resume.can_go_on()
    resume.close()
    assert space.taken == 20_000


@given(cut=st.integers(1, 8), other=st.integers(5, 60))
def test_an_engine_that_goes_on_with_other_words_is_not_believed(cut: int, other: int) -> None:
    body = Call(is_chat=False, stops=()).body()
    resume = Resume(body, Space(), LIMIT)
    asked = json.loads(body.for_engine(LIMIT, "", None, resume.engine_members))
    tap = resume.first_tap()
    # Chunks of three tokens prove nothing, so that all of the text has to be said again.
    sends = events(asked, forever([3]), is_chat=False, name="a")[:cut]
    told, *_ = client_sees(b"".join(tap.feed(one) for one in sends) + b"data: {}\n\n")
    if not tap.has_token or tap.is_finished or not resume.can_go_on():
        return
    resume.next_request(COMPLETIONS_PATH, "")
    tap = resume.next_tap(tap.tokens)
    assert isinstance(tap, Splice)
    said_then = text_of(said([1, 2, 3, other], LIMIT))
    following = {"prompt": [1, 2, 3, other], "max_tokens": LIMIT}
    for one in events(following, forever([1]), is_chat=False, name="b"):
        tap.feed(one)
        if tap.loss is not None:
            break
    assert tap.is_diverged is not said_then.startswith(told)


def test_answers_of_different_lengths_all_come_to_their_limit() -> None:
    members = {"model": "m", "stream": True, "prompt": "x", "max_tokens": 4, "n": 2}
    parsed = bodies.parse(json.dumps(members).encode(), is_chat=False)
    assert isinstance(parsed, Body)
    resume = Resume(parsed, Space(), 4)
    tap = resume.first_tap()

    def says(index: int, token: int, end: str | None = None) -> bytes:
        choice = {"index": index, "text": "ab"[index], "token_ids": [token], "finish_reason": end}
        return chunk("a", choice, [1, 2], is_chat=False)

    got = b"".join(tap.feed(says(index, 1)) for index in (0, 0, 0, 1))
    assert resume.can_go_on()
    asked = json.loads(resume.next_request(COMPLETIONS_PATH, "")[1])
    assert asked["prompt"] == [[1, 2, 1, 1, 1], [1, 2, 1]]
    assert (asked["max_tokens"], "n" in asked) == (1, False)
    tap = resume.next_tap(tap.tokens)
    got += tap.feed(says(0, 1, "length") + says(1, 1, "length"))
    assert tap.feed(DONE_EVENT) == b""
    assert isinstance(tap, Continuation)
    assert tap.wants_more
    assert resume.can_go_on()
    asked = json.loads(resume.next_request(COMPLETIONS_PATH, "")[1])
    assert (asked["prompt"], asked["max_tokens"]) == ([1, 2, 1, 1], 2)
    tap = resume.next_tap(tap.tokens)
    got += tap.feed(says(0, 1).replace(b'"text":"a"', b'"text":"b"'))
    last = says(0, 1, "length").replace(b'"text":"a"', b'"text":"b"')
    got += tap.feed(last + DONE_EVENT)
    assert tap.is_done
    texts, reasons = ["", ""], []
    for one in got.split(b"\n\n")[:-2]:
        for choice in json.loads(one.removeprefix(b"data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons.append(choice["index"])
    assert (texts, reasons) == (["aaaa", "bbbb"], [0, 1])


def test_the_least_length_is_what_is_left_of_it() -> None:
    members = {"model": "m", "stream": True, "prompt": "x", "max_tokens": 20, "temperature": 0}
    parsed = bodies.parse(json.dumps({**members, "min_tokens": 10}).encode(), is_chat=False)
    assert isinstance(parsed, Body)
    resume = Resume(parsed, Space(), 20)
    tap = resume.first_tap()
    one = {"text": "a", "token_ids": [1], "finish_reason": None}
    for said_so_far, left in ((3, 7), (12, 0)):
        while tap.tokens < said_so_far:
            tap.feed(chunk("a", one, [1, 2], is_chat=False))
        assert resume.can_go_on()
        asked = json.loads(resume.next_request(COMPLETIONS_PATH, "")[1])
        assert (asked["max_tokens"], asked["min_tokens"]) == (20 - said_so_far, left)
        tap = resume.next_tap(tap.tokens)
