"""The relay against an oracle that sees the whole stream at once: any cut of the bytes gives the same."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.gateway.relay import Tap
from tests.gateway_world import DONE, event, finish, role, token, used

_TEXTS = st.sampled_from(
    [
        " tok",
        "\n\n",
        "data: {",
        '"usage":{',
        '"finish_reason":null',
        "é\u2028",
        '\\"',
        "[DONE]",
        ',"usage":null',
    ]
)
_PLAIN = _TEXTS.map(token)
_SPACED = _TEXTS.map(
    lambda text: (
        b"data: "
        + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": None}]}).encode()
        + b"\r\n\r\n"
    )
)
_NULL_USAGE = _TEXTS.map(lambda text: token(text, usage=None))
_RUNNING_USAGE = st.integers(1, 9).map(
    lambda n: token("x", usage={"prompt_tokens": 5, "completion_tokens": n, "total_tokens": 5 + n})
)
_QUIET = st.sampled_from([b": ping\n\n", b'event: x\ndata: {"choices":[]}\n\n'])
_TOOL = st.just(
    event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]})
)
_MIDDLE = st.lists(
    st.one_of(_PLAIN, _PLAIN, _SPACED, _NULL_USAGE, _RUNNING_USAGE, _QUIET, _TOOL), max_size=8
)
_ENDING = st.sampled_from(
    [
        [finish(), used(5, 3), DONE],
        [finish("length"), DONE],
        [finish("stop", usage=None), used(5, 3, 2), DONE],
        [finish("abort"), DONE],
        [finish("error"), DONE],
        [event({"error": {"message": "dead"}}), DONE],
        [b"data: {broken\n\n", DONE],
        [DONE],
        [finish()],
        [],
        [used(5, 3), DONE, token("late")],
    ]
)


class Expected:
    """What must come out, found by reading the whole stream line by line with the json module."""

    def __init__(self, events: list[bytes], *, hides_usage: bool) -> None:
        self.pieces: list[bytes] = []
        self.tokens = 0
        self.usage: dict[str, Any] | None = None
        self.is_done = False
        self.is_loss = False
        finished = False
        for one in events:
            line = next((x for x in one.split(b"\n") if x.startswith(b"data: ")), None)
            if line is None:
                self.pieces.append(one)
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                # Engines send it after an error as well; the reason of the end is what tells.
                self.is_done, self.is_loss = finished, not finished
                if finished:
                    self.pieces.append(one)
                return
            try:
                chunk = json.loads(data)
            except ValueError:
                self.is_loss = True
                return
            choices = chunk.get("choices", [])
            if chunk.get("error") or any(
                c.get("finish_reason") in ("abort", "error") for c in choices
            ):
                self.is_loss = True
                return
            finished = finished or any(c.get("finish_reason") for c in choices)
            deltas = [c.get("delta", {}) for c in choices]
            if any(d.get("content") or d.get("tool_calls") for d in deltas):
                self.tokens += 1
            self.usage = chunk.get("usage") or self.usage
            self.pieces.append(self._shown(one, chunk) if hides_usage else one)
        if finished:
            self.pieces.append(DONE)
            self.is_done = True
        else:
            self.is_loss = True

    @staticmethod
    def _shown(one: bytes, chunk: dict[str, Any]) -> bytes:
        if "usage" not in chunk:
            return one
        usage = chunk.pop("usage")
        if usage and not chunk["choices"]:
            return b""
        return event(chunk)


@given(middle=_MIDDLE, ending=_ENDING, hides_usage=st.booleans(), data=st.data())
@example(middle=[token("a")], ending=[finish(), used(5, 3), DONE], hides_usage=True, data=None)
def test_any_cut_gives_the_same(
    middle: list[bytes], ending: list[bytes], *, hides_usage: bool, data: st.DataObject | None
) -> None:
    events = [role(), *middle, *ending]
    whole = b"".join(events)
    cuts: list[int] = list(range(1, len(whole)))
    if data is not None:
        # Mostly between events, as engines write them, which is what the short cut is for.
        borders = [len(b"".join(events[: number + 1])) for number in range(len(events) - 1)]
        cuts = sorted(
            data.draw(st.sets(st.sampled_from(borders or [1]), max_size=len(events)))
            | data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=3))
        )
    tap = Tap(hides_usage=hides_usage)
    got = b""
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        got += tap.feed(whole[start:end])
        if tap.is_done or tap.loss is not None:
            break
    else:
        got += tap.end()
    expected = Expected(events, hides_usage=hides_usage)
    assert tap.is_done is expected.is_done
    assert (tap.loss is not None) is expected.is_loss
    assert tap.tokens == expected.tokens
    usage = None if tap.usage is None else tap.usage.completion_tokens
    assert usage == (expected.usage and expected.usage["completion_tokens"])
    if expected.is_loss and expected.tokens == 0:
        # Nothing may have gone out before the first token, so that another engine can take over.
        assert got == b""
    else:
        # The blank line after an event is the only thing that is rewritten.
        assert got == b"".join(expected.pieces).replace(b"\r\n\r\n", b"\n\n")


@given(st.lists(_PLAIN, min_size=1, max_size=6), st.integers(1, 3))
def test_nothing_is_sent_before_the_first_token(middle: list[bytes], size: int) -> None:
    head = role() + b": wait\n\n"
    stream = head + b"".join(middle)
    tap = Tap(hides_usage=True)
    for start in range(0, len(stream), size):
        got = tap.feed(stream[start : start + size])
        if got:
            assert tap.has_token
            assert got.startswith(head)
            return
    raise AssertionError("the first token was never sent")


def test_an_endless_event_is_a_loss() -> None:
    tap = Tap(hides_usage=True)
    tap.feed(role() + token())
    for _ in range(80):
        tap.feed(b"x" * 65_536)
    assert tap.loss is not None


def test_two_answers_are_finished_when_both_are() -> None:
    tap = Tap(hides_usage=True, answers=2)
    tap.feed(role() + token() + token() + finish())
    assert not tap.is_finished
    tap.feed(finish())
    assert tap.is_finished
    assert tap.tokens == 2


def test_a_read_with_both_kinds_of_line_ends_is_counted_event_by_event() -> None:
    spaced = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": null}]}\r\n\r\n'
    tap = Tap(hides_usage=True)
    tap.feed(role() + token())
    tap.feed(spaced + token())
    assert tap.tokens == 3
