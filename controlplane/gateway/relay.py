"""Reads along in a stream of events: counts tokens, finds usage, tells loss from success.

Bytes pass unchanged except for these: usage that the client did not ask for is taken out, events
before the first token are held back (so that until then another engine can take over), what tells of
a loss is never passed on, the blank line after an event is always two LF, and a record that wants to see
the events decides what the client sees of token ids.
"""

import re
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from controlplane.wire.openai import Chunk, UsageWire

# The longest event that is put together from pieces, and the most held back before the first token.
EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
DONE_EVENT: Final = b"data: [DONE]\n\n"

NOT_A_CHUNK: Final = "the engine sent an event that is not a chunk"

BLANK: Final = b"\n\n"
_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_LINE = re.compile(rb"\r?\n")
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')
_DATA: Final = b"data: {"
_NO_FINISH: Final = b'"finish_reason":null'
_USAGE: Final = b'"usage"'
_DONE: Final = b"[DONE]"
# Values of `delta` and `text` that bring no token.
_EMPTY: Final = frozenset({b'""', b"null", b"[]", b"{}"})
# What vLLM says of an answer that it gave up; anything else is a way to end well.
LOST_REASONS: Final = frozenset({"abort", "error"})
_LENGTH: Final = "length"
_NULL: Final = b"null"

_decode = msgspec.json.Decoder(Chunk).decode
_index = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode
_message = msgspec.json.Decoder(dict[str, Raw]).decode


class _Ending(msgspec.Struct, frozen=True):
    """A choice of a chunk, as far as it says which answer it ends."""

    index: int = 0
    finish_reason: str | None = None


class _Endings(msgspec.Struct, frozen=True):
    choices: list[_Ending] = []


_endings = msgspec.json.Decoder(_Endings).decode


class Keeps(Protocol):
    """Is given all events of a stream, whole, and says what the client gets of them."""

    def add(self, events: bytes) -> bytes: ...


class Tap:
    """Fed with an engine's bytes in any pieces; gives back what the client gets.

    `loss` is set when the stream can not end well; `is_done` when `[DONE]` has passed.
    `tokens` counts pieces that carry output, which is about one per token. `is_at_limit` is set when
    an answer has ended at its token limit.
    """

    __slots__ = (
        "_answers", "_ended", "_held", "_held_bytes", "_hides_usage", "_is_plain", "_keep", "_tail",
        "finished", "has_token", "is_at_limit", "is_cut_short", "is_done", "loss", "tokens", "usage",
    )  # fmt: skip

    def __init__(self, *, hides_usage: bool, answers: int = 1, record: Keeps | None = None) -> None:
        self._hides_usage = hides_usage
        self._answers = answers
        self._keep = None if record is None else record.add
        # Plain tokens pass without a look at each of them.
        self._is_plain = False
        self._tail = b""
        self._held: list[bytes] = []
        self._held_bytes = 0
        # Which of several answers have ended.
        self._ended: frozenset[int] = frozenset()
        self.finished = 0
        self.has_token = False
        self.is_at_limit = False
        self.is_done = False
        # The engine would go on, and is not needed any more.
        self.is_cut_short = False
        self.loss: str | None = None
        self.tokens = 0
        self.usage: UsageWire | None = None

    @property
    def is_finished(self) -> bool:
        """Every answer has given the reason for its end."""
        return self.finished >= self._answers

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the answers that have not ended."""
        if self._answers == 1:
            return () if self.finished else (0,)
        return tuple(index for index in range(self._answers) if index not in self._ended)

    def feed(self, data: bytes) -> bytes:
        """Take in some bytes; the bytes that can go to the client now."""
        # Plain tokens only, one per event: nothing to look at. Quotes inside of a JSON string are
        # escaped, so no text can look like these members. With several answers an event might hold
        # two of them, and counting would not tell; nor where events end in CRLF.
        if (
            self._is_plain
            and not self._tail
            and data.endswith(b"\n\n")
            and data.count(_NO_FINISH) == (events := data.count(b"\n\n"))
            and _USAGE not in data
            and b"\r" not in data
            and self.loss is None
            and not self.is_done
        ):
            self.tokens += events
            return data if self._keep is None else self._keep(data)
        return self._inspect(data)

    def end(self) -> bytes:
        """The engine's answer has ended: what is still owed to the client, or a `loss`."""
        owed = self._inspect(b"\n\n") if self._tail.strip() else b""
        if self.is_done or self.loss is not None:
            return owed
        if not self.is_finished:
            self.loss = "the stream broke off"
            return owed
        self.is_done = True
        return owed + self._released() + DONE_EVENT

    def _inspect(self, data: bytes) -> bytes:
        if self._tail:
            data = self._tail + data
            self._tail = b""
        passed: list[bytes] = []
        *events, tail = _BOUNDARY.split(data) if b"\r" in data else data.split(BLANK)
        for event in events:
            if (
                self._is_plain
                and _NO_FINISH in event
                and _USAGE not in event
                and event.startswith(_DATA)
            ):
                # A plain token among others, as above.
                self.tokens += 1
                whole = event + BLANK
                passed.append(whole if self._keep is None else self._keep(whole))
                continue
            shown = self._event(event)
            if shown:
                passed.append(shown)
            if self.loss is not None or self.is_done:
                break
        else:
            self._tail = tail
            if len(tail) > EVENT_BYTES_MAX:
                self.loss = f"an event of more than {EVENT_BYTES_MAX} bytes"
        if self.has_token or self.is_done or self.is_finished:
            return self._released() + b"".join(passed)
        for event in passed:
            self._held_bytes += len(event)
        self._held += passed
        if self._held_bytes > EVENT_BYTES_MAX:
            self.loss = f"more than {EVENT_BYTES_MAX} bytes before the first token"
        return b""

    def _released(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held

    def _done(self, event: bytes) -> bytes:
        """`[DONE]`, which an engine sends after an error as well."""
        if not self.is_finished:
            self.loss = "the stream ended before its answer"
            return b""
        self.is_done = True
        return event + BLANK

    def _is_lost(self, error: Raw, reasons: list[str | None]) -> bool:
        """Whether the error or the reasons of a chunk say that its engine gave up."""
        if bytes(error) != _NULL:
            self.loss = _words_of(error)
        elif not LOST_REASONS.isdisjoint(reasons):
            self.loss = "the engine aborted the answer"
        return self.loss is not None

    def _event(self, event: bytes) -> bytes:
        """One whole event; what the client gets of it."""
        payload = payload_of(event)
        if payload is None:
            return event + BLANK
        if payload == _DONE:
            return self._done(event)
        try:
            chunk = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.loss = NOT_A_CHUNK
            return b""
        if self._is_lost(chunk.error, [choice.finish_reason for choice in chunk.choices]):
            return b""
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.finished += 1
                self.is_at_limit = self.is_at_limit or choice.finish_reason == _LENGTH
                if self._answers > 1:
                    self._ended |= {
                        one.index for one in _endings(payload).choices if one.finish_reason
                    }
        if chunk.choices and _has_output(chunk):
            self.has_token = True
            self._is_plain = self._answers == 1
            self.tokens += 1
        if self._keep is not None:
            event = self._keep(event + BLANK)[: -len(BLANK)]
            payload = payload_of(event) or payload
        if chunk.usage is not None:
            # The last report counts; each one is the total so far.
            self.usage = chunk.usage
        if not self._hides_usage or _USAGE not in payload:
            return event + BLANK
        if chunk.usage is None:
            return _NULL_USAGE.sub(b"", event) + BLANK
        if not chunk.choices:
            return b""
        members = _index(payload)
        members.pop("usage", None)
        return b"data: " + _encode(members) + BLANK


def payload_of(event: bytes) -> bytes | None:
    """The data of an event, None for a comment or an event without any."""
    if b"\n" not in event:
        return event[5:].strip() if event.startswith(b"data:") else None
    lines = [line[5:].strip() for line in _LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _has_output(chunk: Chunk) -> bool:
    for choice in chunk.choices:
        if choice.text:
            return True
        if choice.delta is not None:
            for name, value in choice.delta.items():
                if name != "role" and bytes(value) not in _EMPTY:
                    return True
    return False


def _words_of(error: Raw) -> str:
    """The engine's own words, when its error has a message."""
    try:
        message = _message(error).get("message")
        words = "" if message is None else msgspec.json.decode(message)
    except msgspec.DecodeError:
        words = ""
    return f"the engine failed: {words}"[:200] if isinstance(words, str) else "the engine failed"
