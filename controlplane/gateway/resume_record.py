"""What is kept of a stream while it runs, so that another engine can go on with it.

Events are kept as they came and read only when there are many of them, or when their engine is lost: most
streams end before either. Two kinds: token ids with the places where an engine holds nothing back, and
digests of delivered text. A limit bounds the bytes of one stream, another the bytes of all.
"""

import re
from array import array
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec
import xxhash
from msgspec import Raw

from controlplane.gateway.relay import BLANK, payload_of
from controlplane.wire.openai import UsageWire

# Events of one stream that are kept unread, and that many when there is no room for more.
RAW_BYTES_MAX: Final = 64 * 1024
RAW_BYTES_TIGHT: Final = 4 * 1024
# All records of a process. A stream for which there is no room can not go on elsewhere.
SPACE_BYTES_MAX: Final = 512 * 1024 * 1024

ID_BYTES: Final = 4

_IDS_MARK: Final = b'token_ids":['
_NO_IDS: Final = b'token_ids":null'
_SPACED: Final = b'token_ids": ['
_SPACED_IDS = re.compile(rb'token_ids": \[[^\]]*\]')
_DONE: Final = b"[DONE]"
# Members of a chunk that are the same in all chunks of a stream.
SAME: Final = ("id", "object", "created", "model")
_WORDLESS: Final = frozenset({b"null", b'""', b"[]", b"{}"})

_RAW_NULL: Final = Raw(b"null")


class Logprobs(msgspec.Struct, frozen=True):
    """Log probabilities as far as they are counted: of completions, and `content` of chats."""

    tokens: list[str | None] | None = None
    text_offset: list[int] | None = None
    content: list[Raw] | None = None

    @property
    def count(self) -> int:
        return len(self.tokens or self.content or ())


class PieceChoice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: dict[str, Raw] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = _RAW_NULL


class Piece(msgspec.Struct, frozen=True):
    """One event of a stream, as far as records read it."""

    choices: list[PieceChoice] = []
    usage: UsageWire | None = None
    prompt_token_ids: Raw = _RAW_NULL
    error: Raw = _RAW_NULL


_index = msgspec.json.Decoder(dict[str, Raw]).decode
decode_piece = msgspec.json.Decoder(Piece).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_delta = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_tools = msgspec.json.Decoder(list[dict[str, Raw]]).decode


def hidden(events: bytes) -> bytes:
    """Events as the client would have got them had nobody asked for token ids."""
    first, *others = events.split(_IDS_MARK)
    if others:
        events = b"".join((first, *(_NO_IDS + one[one.find(b"]") + 1 :] for one in others)))
    return _SPACED_IDS.sub(_NO_IDS, events) if _SPACED in events else events


class Space:
    """Room that all records of a process share, in bytes."""

    __slots__ = ("bytes_max", "taken")

    def __init__(self, bytes_max: int = SPACE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.taken = 0

    @property
    def is_tight(self) -> bool:
        return self.taken * 2 > self.bytes_max

    @property
    def is_full(self) -> bool:
        return self.taken > self.bytes_max


class Record:
    """Events kept unread, and `head`: the members that every event of the stream repeats.

    `is_given_up`: there was no room, or an event that can not be read.
    """

    __slots__ = (
        "_raw", "_raw_bytes", "_space", "_taken", "answers", "head", "is_given_up", "raw_bytes_max",
    )  # fmt: skip

    def __init__(self, space: Space, answers: int) -> None:
        self._space = space
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._taken = 0
        self.raw_bytes_max = RAW_BYTES_MAX
        self.answers = answers
        self.head: dict[str, Raw] = {}
        self.is_given_up = False

    def add(self, events: bytes) -> bytes:
        """Keep whole events that the client is about to get; what it gets of them."""
        if self.is_given_up:
            return self._unkept(events)
        size = len(events)
        self._raw.append(events)
        self._raw_bytes += size
        self._taken += size
        space = self._space
        space.taken += size
        if self._raw_bytes > self.raw_bytes_max or (
            self._raw_bytes > RAW_BYTES_TIGHT and space.is_tight
        ):
            self.settle()
            if space.is_full:
                self.give_up()
        return hidden(events)

    def _unkept(self, events: bytes) -> bytes:
        return hidden(events)

    def settle(self) -> bool:
        """Read what was kept unread. False: the record is no use."""
        if self.is_given_up:
            return False
        raw, self._raw = self._raw, []
        self._raw_bytes = 0
        try:
            for event in b"".join(raw).split(BLANK):
                payload = payload_of(event)
                if payload is None or payload == _DONE:
                    continue
                piece = decode_piece(payload)
                if not self.head:
                    self.note_head(_index(payload))
                self._read(piece)
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            self.give_up()
            return False
        self._account()
        return not self.is_given_up

    def note_head(self, members: dict[str, Raw]) -> None:
        self.head = {name: members[name] for name in SAME if name in members}

    def give_up(self) -> None:
        self.clear()
        self.is_given_up = True

    def clear(self) -> None:
        """Forget all."""
        self._raw.clear()
        self._raw_bytes = 0
        self._space.taken -= self._taken
        self._taken = 0
        self.head = {}
        self.is_given_up = False

    def _account(self) -> None:
        size = self._size()
        self._space.taken += size - self._taken
        self._taken = size

    def _read(self, piece: Piece) -> None:
        raise NotImplementedError

    def _size(self) -> int:
        raise NotImplementedError


# ---------------------------------------------------------------- token ids


class Mark(NamedTuple):
    """A place where an engine holds nothing back: after `ids` tokens and `chars` characters of an answer.

    `offset` is where the text of the next token begins, as log probabilities of completions tell it.
    """

    ids: int
    chars: int
    offset: int


_START: Final = Mark(0, 0, 0)


class Strand:
    """One answer of a stream. Text is counted in characters.

    `held` was received and not delivered; `tail` is what was delivered after `marks[0]`, the last mark that
    lies in delivered text; the other marks lie behind it. `since` is what was received after the last mark,
    and `told` how many tokens that text, or the mark, ended with. `repeat` is what an engine that goes on
    must say again first, `repeated_entries` the log probabilities that it tells again. `offset_base` is
    added to its offsets of text. `carried` characters of what is held are another engine's.
    """

    __slots__ = (
        "_delivered", "_received", "carried", "entries", "held", "ids", "is_finished", "marks",
        "offset", "offset_base", "prompt", "repeat", "repeated_entries", "since", "tail", "told",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt = b""
        self.ids = array("I")
        self.marks: deque[Mark] = deque((_START,))
        self._received = 0
        self._delivered = 0
        self.held = ""
        self.tail = ""
        self.since = ""
        self.told = 0
        self.carried = 0
        self.repeat = ""
        self.entries = 0
        self.repeated_entries = 0
        self.offset = 0
        self.offset_base = 0
        self.is_finished = False

    def hear(self, ids: list[int] | None, text: str, logprobs: Logprobs | None) -> None:
        """Take in what an engine said: a chunk of its stream."""
        new = ids or ()
        self.ids.extend(new)
        self._received += len(text)
        if logprobs is not None and logprobs.tokens and logprobs.text_offset:
            self.offset = (
                self.offset_base + logprobs.text_offset[-1] + len(logprobs.tokens[-1] or "")
            )
        if text:
            self.told = len(self.ids)
            if len(new) == 1:
                self.marks.append(Mark(self.told, self._received, self.offset))
                self.since = ""
            else:
                # Of several tokens in one chunk, the last ones may be held back.
                self.since += text
            self.held += text

    def passes_repeat(self) -> bool:
        """Drop what is said again off the text held. False: it is something else that was said."""
        repeat, held = self.repeat, self.held
        if repeat and held:
            count = min(len(repeat), len(held))
            if repeat[:count] != held[:count]:
                return False
            self.repeat, self.held = repeat[count:], held[count:]
        return True

    def deliver(self, text: str) -> None:
        """Hand this much of the text held to the client."""
        marks, tail = self.marks, self.tail + text
        self.held = self.held[len(text) :]
        self.carried = max(0, self.carried - len(text))
        self._delivered = delivered = self._delivered + len(text)
        while len(marks) > 1 and marks[1].chars <= delivered:
            first = marks.popleft()
            tail = tail[marks[0].chars - first.chars :]
        self.tail = tail

    def rewind(self) -> int:
        """Go back to the last mark in delivered text, where another engine begins; tokens given up."""
        mark = self.marks[0]
        given_up = len(self.ids) - mark.ids
        del self.ids[mark.ids :]
        self.marks = deque((mark,))
        self._received = mark.chars
        self.held = self.since = ""
        self.told = mark.ids
        self.carried = 0
        self.repeat = self.tail
        self.repeated_entries = max(0, self.entries - mark.ids)
        self.offset = self.offset_base = mark.offset
        return given_up

    @property
    def unsure(self) -> list[int]:
        """Tokens since the last mark whose text was received, as far as is known: the last may be held back."""
        return list(self.ids[self.marks[-1].ids : self.told]) if self.since else []

    def keep(self) -> int:
        """Stay where the text received ends, since nobody would say it again; tokens given up, unheard.

        To be called when `told` is known for sure.
        """
        given_up = len(self.ids) - self.told
        del self.ids[self.told :]
        mark = Mark(self.told, self._received, self.offset)
        if not self.held:
            self.marks = deque((mark,))
            self.tail = ""
        else:
            self.marks.append(mark)
        self.since = ""
        self.carried = len(self.held)
        self.repeat = ""
        self.repeated_entries = 0
        self.offset_base = self.offset
        return given_up

    def prompt_now(self) -> bytes:
        """The prompt and the answer so far, as JSON."""
        if not self.ids:
            return self.prompt
        return b"%s,%s]" % (self.prompt[:-1], ",".join(map(str, self.ids)).encode())


class IdRecord(Record):
    """Token ids of every answer of a stream. `per_prompt` answers in a row share their prompt.

    `has_other`: a parser is at work in the engine, whose state no token id brings back; from then on `text`
    records the stream, if that was seen early enough. `given_up_ids` counts tokens that an engine had said
    and that another one has to say again.
    """

    __slots__ = ("_is_read", "_per_prompt", "given_up_ids", "has_other", "strands", "text")

    def __init__(self, space: Space, answers: int, *, per_prompt: int) -> None:
        super().__init__(space, answers)
        self._per_prompt = per_prompt
        self.strands = [Strand() for _ in range(answers)]
        self.has_other = False
        self.given_up_ids = 0
        self.text: TextRecord | None = None
        self._is_read = False

    @property
    def unfinished(self) -> tuple[int, ...]:
        return tuple(index for index, strand in enumerate(self.strands) if not strand.is_finished)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(
            strand.prompt.count(b",") + 1
            for strand in self.strands[:: self._per_prompt]
            if strand.prompt
        )

    @property
    def completion_tokens(self) -> int:
        return sum(len(strand.ids) for strand in self.strands)

    def settle(self) -> bool:
        raw = None if self._is_read else b"".join(self._raw)
        self._is_read = True
        if not super().settle():
            return False
        if self.has_other:
            if raw:
                self._turn_to_text(raw)
            return False
        for index, strand in enumerate(self.strands):
            if not strand.prompt:
                # Another answer to the same prompt may have told it.
                first = index - index % self._per_prompt
                siblings = self.strands[first : first + self._per_prompt]
                strand.prompt = next((one.prompt for one in siblings if one.prompt), b"")
        return all(strand.prompt for strand in self.strands)

    def _turn_to_text(self, raw: bytes) -> None:
        text = self.text = TextRecord(self._space, self.answers)
        text.add(raw)
        text.settle()
        # Room is taken once.
        self._space.taken -= self._taken
        self._taken = 0
        self.is_given_up = True

    def _unkept(self, events: bytes) -> bytes:
        return hidden(events) if self.text is None else self.text.add(events)

    def rewind(self) -> None:
        """Go back to where the next engine begins, and says again what it says like the last one."""
        for index in self.unfinished:
            self.given_up_ids += self.strands[index].rewind()

    def keep(self) -> None:
        """Let the next engine begin where the last one was heard to end."""
        for index in self.unfinished:
            self.given_up_ids += self.strands[index].keep()

    def note_prompt(self, piece: Piece) -> None:
        """Keep the ids of prompts that an event brings: in a chat for all answers, else for each its own."""
        if piece.prompt_token_ids != _RAW_NULL:
            for strand in self.strands:
                strand.prompt = strand.prompt or bytes(piece.prompt_token_ids)
        for choice in piece.choices:
            if choice.prompt_token_ids != _RAW_NULL:
                strand = self.strands[choice.index]
                strand.prompt = strand.prompt or bytes(choice.prompt_token_ids)

    def clear(self) -> None:
        super().clear()
        self.strands = [Strand() for _ in range(self.answers)]
        self.has_other = False
        self.given_up_ids = 0
        self._is_read = False
        if self.text is not None:
            self.text.clear()
            self.text = None

    def text_of(self, choice: PieceChoice) -> str:
        """Text of a choice. A delta of another kind, or text without its ids, ends what ids are good for."""
        text = choice.text or ""
        if choice.delta is not None:
            for name, value in choice.delta.items():
                if name == "content":
                    text = "" if value == _RAW_NULL else _decode_text(value)
                elif name != "role" and bytes(value) not in _WORDLESS:
                    self.has_other = True
        if text and not choice.token_ids:
            self.has_other = True
        return text

    def account(self) -> None:
        """Tell the space how large the record is now; once in a while is enough."""
        self._account()

    def _read(self, piece: Piece) -> None:
        self.note_prompt(piece)
        for choice in piece.choices:
            strand = self.strands[choice.index]
            text = self.text_of(choice)
            logprobs = choice.logprobs
            strand.hear(choice.token_ids, text, logprobs)
            strand.deliver(text)
            if logprobs is not None:
                strand.entries += logprobs.count
            if choice.finish_reason is not None:
                strand.is_finished = True

    def _size(self) -> int:
        return sum(
            len(strand.prompt) + ID_BYTES * len(strand.ids) + len(strand.tail) + len(strand.held)
            for strand in self.strands
        )


# ---------------------------------------------------------------- delivered text


class Told:
    """How much of one part of an answer was told: characters, and their digest."""

    __slots__ = ("chars", "digest")

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        self.chars = 0

    def add(self, text: str) -> None:
        self.chars += len(text)
        self.digest.update(text.encode("utf-8", "surrogatepass"))

    def is_as(self, other: "Told") -> bool:
        return bool(self.chars == other.chars and self.digest.digest() == other.digest.digest())


class Voice:
    """One answer of a stream, part by part: text, reasoning, arguments of each tool call."""

    __slots__ = ("entries", "is_finished", "parts")

    def __init__(self) -> None:
        self.parts: dict[str, Told] = {}
        self.entries = 0
        self.is_finished = False

    def part(self, name: str) -> Told:
        told = self.parts.get(name)
        if told is None:
            told = self.parts[name] = Told()
        return told


class TextRecord(Record):
    """Digests of what every answer of a stream has told."""

    __slots__ = ("voices",)

    def __init__(self, space: Space, answers: int) -> None:
        super().__init__(space, answers)
        self.voices = [Voice() for _ in range(answers)]

    def clear(self) -> None:
        super().clear()
        self.voices = [Voice() for _ in range(self.answers)]

    def _read(self, piece: Piece) -> None:
        for choice in piece.choices:
            voice = self.voices[choice.index]
            for name, text in parts_of(choice):
                voice.part(name).add(text)
            if choice.logprobs is not None:
                voice.entries += choice.logprobs.count
            if choice.finish_reason is not None:
                voice.is_finished = True

    def _size(self) -> int:
        return sum(256 * len(voice.parts) for voice in self.voices)


def parts_of(choice: PieceChoice) -> list[tuple[str, str]]:
    """Texts of a choice by the part of the answer that they belong to."""
    parts = [("text", choice.text)] if choice.text else []
    for name, value in (choice.delta or {}).items():
        if name == "role" or bytes(value) in _WORDLESS:
            continue
        if name == "tool_calls":
            for call in _decode_tools(value):
                parts += tool_parts(call)
        elif bytes(value).startswith(b'"'):
            parts.append((name, _decode_text(value)))
    return parts


def tool_parts(call: dict[str, Raw]) -> list[tuple[str, str]]:
    """The name and the arguments of one tool call of a delta."""
    number = bytes(call.get("index", b"0")).decode()
    function: Any = call.get("function")
    if function is None or function == _RAW_NULL:
        return []
    members = _decode_delta(function)
    return [
        (f"tool {number} {name}", _decode_text(members[name]))
        for name in ("name", "arguments")
        if name in members and bytes(members[name]) not in _WORDLESS
    ]
