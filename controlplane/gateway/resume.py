"""Which streams another engine can go on with, and how: the class of a body, and the request for the next engine.

Pure: it knows bodies and records, and neither a connection nor a clock.

- *continue*: the next engine gets prompt and answer so far as token ids and goes on behind them. Token-exact
  where nothing but these ids decides the next token: greedy decoding, no grammar, no parser.
- *lossless*: the same, where tokens are drawn by chance: none twice and none lost, but nobody can say that
  the first engine would have drawn the same ones.
- *replay*: the whole request is run again, what was delivered is dropped after a comparison, the rest goes on.
  For answers that are deterministic, but depend on more than the ids: a seed, a grammar, a parser's state.
- *none*: drawn by chance and bound to such a state. The stream ends with an honest error.
"""

from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Raw

from controlplane.domain.outcome import Usage
from controlplane.gateway.body import Body
from controlplane.gateway.relay import BLANK, DONE_EVENT, Tap
from controlplane.gateway.resume_record import IdRecord, Space, Strand, TextRecord
from controlplane.gateway.resume_splice import Continuation, Replay, told

COMPLETIONS_PATH: Final = b"/v1/completions"
# Engines after the first that one stream may be given to.
RESUMES_PER_STREAM_MAX: Final = 3

_TRUE: Final = Raw(b"true")
_NOTHING: Final = frozenset({b"null", b"[]", b"{}", b'""', b"false"})
_ZERO: Final = (None, 0)
# Members of a chat that mean nothing, or something else, in a completion whose prompt is token ids.
_NOT_CONTINUED: Final = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "continue_final_message", "echo",
        "include_reasoning", "max_completion_tokens", "messages", "n", "parallel_tool_calls",
        "prompt", "reasoning_effort", "response_format", "suffix", "tool_choice", "tools",
        "top_logprobs", "truncate_prompt_tokens",
    }
)  # fmt: skip

_encode = msgspec.json.Encoder().encode
_text_format = msgspec.json.Decoder(dict[str, Raw]).decode


class ResumeClass(StrEnum):
    """How a stream can go on elsewhere."""

    CONTINUE = "continue"
    REPLAY = "replay"
    LOSSLESS = "lossless"
    NONE = "none"

    @property
    def needs_ids(self) -> bool:
        return self is ResumeClass.CONTINUE or self is ResumeClass.LOSSLESS


def class_of(body: Body) -> ResumeClass:
    """What the body alone says about going on with its stream elsewhere."""
    read = body.read
    if not body.is_stream or read.use_beam_search or (read.best_of or 1) > 1:
        return ResumeClass.NONE
    is_bound = _is_bound(body)
    is_greedy = read.temperature == 0
    # What counts the tokens of the answer counts none of those that come back as a prompt.
    is_counted = read.presence_penalty not in _ZERO or read.frequency_penalty not in _ZERO
    if is_greedy and not is_bound and not is_counted:
        return ResumeClass.CONTINUE
    if is_greedy or _has(body, "seed"):
        return ResumeClass.REPLAY
    return ResumeClass.NONE if is_bound else ResumeClass.LOSSLESS


def _is_bound(body: Body) -> bool:
    """Whether the answer hangs on a state of the engine that token ids do not bring back."""
    read = body.read
    if _has(body, "structured_outputs") or _has(body, "bad_words") or read.echo:
        return True
    if body.is_chat:
        # A parser's state; and chat tells log probabilities in a shape that completions lack.
        if _has(body, "tools") and not _is(body, "tool_choice", b'"none"'):
            return True
        if _has(body, "logprobs") or _is(body, "include_reasoning", b"false"):
            return True
    if _has(body, "response_format") and not _is_text(body.members["response_format"]):
        return True
    if body.sequences > 1 and read.min_tokens:
        # One request for all answers, which have come to different lengths, has one least length.
        return True
    # With the stop string kept in the output, the text of a stop token is kept as well.
    return trims_stops(body) and (
        _has(body, "stop_token_ids") or _is(body, "skip_special_tokens", b"false")
    )


def trims_stops(body: Body) -> bool:
    """Whether stop strings are cut off here: what an engine holds back for them, its ids do not show."""
    return bool(stops_of(body)) and not _is(body, "include_stop_str_in_output", b"true")


def settled_by(strand: Strand, text: str) -> bool:
    """Whether the text of `strand.unsure`, as an engine tells it, is what was received: no more is held back.

    Blanks at its begin do not count: a token's may be the start of a text for a tokenizer. When it is more,
    the last token is taken to be held back, to be asked again.
    """
    if text.lstrip() == strand.since.lstrip():
        return True
    strand.told -= 1
    return False


def stops_of(body: Body) -> tuple[str, ...]:
    stop = body.read.stop
    if stop is None:
        return ()
    return tuple(one for one in ([stop] if isinstance(stop, str) else stop) if one)


def _has(body: Body, member: str) -> bool:
    value = body.members.get(member)
    return value is not None and bytes(value) not in _NOTHING


def _is(body: Body, member: str, value: bytes) -> bool:
    return bytes(body.members.get(member, b"")) == value


def _is_text(response_format: Raw) -> bool:
    try:
        return bytes(_text_format(response_format).get("type", b"")) == b'"text"'
    except msgspec.DecodeError:
        return False


class Resume:
    """One stream: what has been delivered of it, and what the next engine is to be asked.

    `resume_class` may change from what the body says to what the stream shows.

    `resumes` counts the engines that it was given to after the first.
    """

    __slots__ = ("_body", "_limit", "_space", "record", "resume_class", "resumes")

    def __init__(self, body: Body, space: Space, completion_tokens_max: int) -> None:
        self._body = body
        self._limit = completion_tokens_max
        self._space = space
        resume_class = self.resume_class = class_of(body)
        self.resumes = 0
        self.record: IdRecord | TextRecord | None = None
        if resume_class.needs_ids:
            self.record = IdRecord(space, body.sequences, per_prompt=body.read.n or 1)
        elif resume_class is ResumeClass.REPLAY:
            self.record = TextRecord(space, body.sequences)

    def go_without_ids(self) -> None:
        """The engine that begins the stream tells no token ids: what is deterministic can still be replayed."""
        if not self.resume_class.needs_ids:
            return
        self.close()
        if self.resume_class is ResumeClass.CONTINUE:
            self.resume_class = ResumeClass.REPLAY
            self.record = TextRecord(self._space, self._body.sequences)
        else:
            self.resume_class, self.record = ResumeClass.NONE, None

    @property
    def engine_members(self) -> dict[str, Raw]:
        """What is added to the body for every engine."""
        if not self.resume_class.needs_ids:
            return {}
        if trims_stops(self._body):
            return {"return_token_ids": _TRUE, "include_stop_str_in_output": _TRUE}
        return {"return_token_ids": _TRUE}

    def first_tap(self) -> Tap:
        """For the engine that begins the stream; a record of an engine that failed before is forgotten."""
        body, record = self._body, self.record
        if record is not None:
            record.clear()
        if isinstance(record, IdRecord) and trims_stops(body):
            return Continuation(
                record,
                hides_usage=not body.asks_usage,
                is_chat=body.is_chat,
                stops=stops_of(body),
                limit=self._limit,
            )
        return Tap(hides_usage=not body.asks_usage, answers=body.sequences, record=record)

    def settle(self) -> bool:
        """Read what was kept of the stream; whether it is enough to go on.

        A greedy stream in which a parser turns out to be at work can still be replayed.
        """
        record = self.record
        if record is None:
            return False
        if record.settle():
            return True
        if self.resume_class is not ResumeClass.CONTINUE or not isinstance(record, IdRecord):
            return False
        if record.text is None:
            return False
        self.resume_class, self.record = ResumeClass.REPLAY, record.text
        return self.record.settle()

    def can_go_on(self) -> bool:
        """Whether a next engine could be asked at all. Reads what was kept of the stream."""
        return self.resumes < RESUMES_PER_STREAM_MAX and self.settle()

    def ending(self, usage: Usage) -> bytes | None:
        """What ends the stream, when nothing but its end was lost; None: more than that was.

        `usage` is told where it was asked for. To be called when `settle` has said yes.
        """
        body, record = self._body, self.record
        assert record is not None
        events: list[dict[str, Any]] = []
        if isinstance(record, IdRecord):
            going_on = [(index, record.strands[index]) for index in record.unfinished]
            if any(len(strand.ids) < self._limit for _, strand in going_on):
                return None
            for index, strand in going_on:
                output = (
                    {"delta": {"content": strand.held}} if body.is_chat else {"text": strand.held}
                )
                end = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
                events.append({**record.head, "choices": [{"index": index, **output, **end}]})
        elif not all(voice.is_finished for voice in record.voices):
            return None
        if body.asks_usage:
            counts = told(usage.prompt_tokens, usage.completion_tokens)
            events.append({**record.head, "choices": [], "usage": counts})
        return b"".join((*(b"data: " + _encode(one) + BLANK for one in events), DONE_EVENT))

    def unsure(self) -> list[Strand]:
        """Answers whose last tokens must be looked at (see `settled_by`) before a next engine is asked."""
        record = self.record
        if self.resume_class is not ResumeClass.LOSSLESS or not isinstance(record, IdRecord):
            return []
        return [record.strands[at] for at in record.unfinished if record.strands[at].since]

    def next_tap(self, tokens: int) -> Tap:
        """For the next engine; `tokens` have been counted so far. To be called after `next_request`."""
        body, record = self._body, self.record
        if isinstance(record, TextRecord):
            return Replay(
                record, hides_usage=not body.asks_usage, answers=body.sequences, tokens=tokens
            )
        assert record is not None
        return Continuation(
            record,
            hides_usage=not body.asks_usage,
            is_chat=body.is_chat,
            limit=self._limit,
            order=record.unfinished,
            tokens=tokens,
            stops=stops_of(body) if trims_stops(body) else (),
            least=body.read.min_tokens or 0,
        )

    def next_request(self, path: bytes, cache_salt: str | None) -> tuple[bytes, bytes]:
        """Path and body for the next engine; rewinds the record to where that engine begins."""
        members = self._body.engine_members(self._limit, cache_salt)
        record = self.record
        if isinstance(record, TextRecord):
            return path, _encode(members)
        assert record is not None
        if self.resume_class is ResumeClass.LOSSLESS:
            record.keep()
        else:
            record.rewind()
        going_on = [record.strands[index] for index in record.unfinished]
        kept = {name: value for name, value in members.items() if name not in _NOT_CONTINUED}
        kept |= self.engine_members
        prompts = [strand.prompt_now() for strand in going_on]
        kept["prompt"] = Raw(prompts[0] if len(prompts) == 1 else b"[" + b",".join(prompts) + b"]")
        # All of them get what the longest may still have; who wants more is asked for again.
        come = max(len(strand.ids) for strand in going_on)
        kept["max_tokens"] = Raw(b"%d" % (self._limit - come))
        least = self._body.read.min_tokens
        if least:
            kept["min_tokens"] = Raw(b"%d" % max(0, min(least, self._limit) - come))
        return COMPLETIONS_PATH, _encode(kept)

    def take_repeated(self) -> int:
        """Tokens that an engine had said and that the next one said again, since this was last asked."""
        record = self.record
        if isinstance(record, TextRecord) or record is None:
            return 0
        count, record.given_up_ids = record.given_up_ids, 0
        return count

    def counted(self) -> tuple[int, int] | None:
        """Tokens of prompt and answer by their ids; None where these are not known. Settles the record."""
        record = self.record
        if isinstance(record, TextRecord) or record is None or not record.settle():
            return None
        return record.prompt_tokens, record.completion_tokens

    def close(self) -> None:
        """The stream has ended: its record is given up."""
        if self.record is not None:
            self.record.clear()
