"""Puts what a second engine says behind what the first one said, so that the client reads one answer.

Every event is read and written anew: under the id of the stream, in the shape of its endpoint, without what
was delivered before, which must be said again word for word. The first engine's events pass here too where
stop strings are cut off.
"""

from typing import Any, Final

import msgspec
from msgspec import Raw

from controlplane.gateway.relay import BLANK, DONE_EVENT, NOT_A_CHUNK, Tap, payload_of
from controlplane.gateway.resume_record import (
    IdRecord,
    Piece,
    PieceChoice,
    Strand,
    TextRecord,
    Voice,
    decode_piece,
    parts_of,
    tool_parts,
)
from controlplane.wire.openai import PromptDetails, UsageWire

DIVERGED: Final = "the next engine said something else than the first"

_NULL: Final = Raw(b"null")
_ROLE: Final = "role"
_LENGTH: Final = "length"
_STOP: Final = "stop"

_index = msgspec.json.Decoder(dict[str, Raw]).decode
_list_of_members = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Splice(Tap):
    """What both ways of going on share. `is_diverged`: the engine is well, and the stream is lost."""

    __slots__ = ("is_diverged",)

    def __init__(self, *, hides_usage: bool, answers: int) -> None:
        super().__init__(hides_usage=hides_usage, answers=answers)
        self.is_diverged = False

    def _event(self, event: bytes) -> bytes:
        payload = payload_of(event)
        if payload is None:
            return event + BLANK
        if payload == b"[DONE]":
            return self._done(event)
        try:
            piece = decode_piece(payload)
            if self._is_lost(piece.error, [choice.finish_reason for choice in piece.choices]):
                return b""
            written = self._written(_index(payload), piece, piece.usage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
            self.loss = NOT_A_CHUNK
            return b""
        if written is None:
            return b""
        if self._hides_usage:
            written.pop("usage", None)
        return b"data: " + _encode(written) + BLANK

    def _written(
        self, members: dict[str, Raw], piece: Piece, usage: UsageWire | None
    ) -> dict[str, Any] | None:
        """What the client gets of an event; None: nothing. May set `loss`."""
        raise NotImplementedError

    def _diverged(self) -> None:
        self.loss = DIVERGED
        self.is_diverged = True

    def _ends(self, index: int, reason: str) -> None:
        self.finished += 1
        self._ended |= {index}
        self.is_at_limit = self.is_at_limit or reason == _LENGTH


class Continuation(Splice):
    """Goes on by token ids; `order` names the answers that the engine was asked for, in its own order.

    `order` None: this is the first engine. `stops` are cut off, and the end of a text that might be the
    beginning of one is held back; before `least` tokens they count for nothing. `limit` is the most tokens
    that one answer may have.
    """

    __slots__ = (
        "_caps", "_hold", "_is_chat", "_is_first", "_least", "_limit", "_order", "_record", "_stops",
        "wants_more",
    )  # fmt: skip

    def __init__(
        self,
        record: IdRecord,
        *,
        hides_usage: bool,
        is_chat: bool,
        stops: tuple[str, ...],
        limit: int,
        order: tuple[int, ...] | None = None,
        tokens: int = 0,
        least: int = 0,
    ) -> None:
        super().__init__(hides_usage=hides_usage, answers=record.answers)
        self._record = record
        self._is_chat = is_chat
        self._is_first = order is None
        self._order = tuple(range(record.answers)) if order is None else order
        self._stops = stops
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._least = least
        self._limit = limit
        # Answers that ended at a limit which was another answer's.
        self.wants_more = False
        self._caps: dict[int, int] = {}
        if order is not None:
            # All get as many tokens as the longest may still have: where each of them then ends.
            lengths = {index: len(record.strands[index].ids) for index in order}
            left = limit - max(lengths.values())
            self._caps = {index: length + left for index, length in lengths.items()}
            self.has_token = True
            self.tokens = tokens
            self.finished = record.answers - len(order)
            self._ended = frozenset(range(record.answers)) - frozenset(order)

    def _done(self, event: bytes) -> bytes:
        if self.wants_more:
            self.loss = "the answers have come to different lengths"
            return b""
        return super()._done(event)

    def _event(self, event: bytes) -> bytes:
        shown = super()._event(event)
        if not self.is_cut_short or self.is_done or not self.is_finished:
            return shown
        # A stop string was found here: the engine does not know that it has ended.
        self.is_done = True
        record = self._record
        self.usage = UsageWire(record.prompt_tokens, record.completion_tokens)
        if not self._hides_usage:
            counts = told(record.prompt_tokens, record.completion_tokens)
            shown += b"data: " + _encode({**record.head, "choices": [], "usage": counts}) + BLANK
        return shown + DONE_EVENT

    def held(self) -> dict[int, str]:
        """Text held back of each answer, for whoever ends the stream here."""
        strands = enumerate(self._record.strands)
        return {index: strand.held for index, strand in strands if strand.held}

    def _written(
        self, members: dict[str, Raw], piece: Piece, usage: UsageWire | None
    ) -> dict[str, Any] | None:
        record = self._record
        if self._is_first:
            if not record.head:
                record.note_head(members)
            record.note_prompt(piece)
        choices: list[dict[str, Any]] = []
        raw_choices = _list_of_members(members["choices"]) if piece.choices else []
        for choice, raw in zip(piece.choices, raw_choices, strict=True):
            index = self._order[choice.index]
            spoken = self._choice(index, record.strands[index], choice, raw)
            if self.loss is not None:
                return None
            if spoken is not None:
                choices.append(spoken)
        if usage is not None:
            counts = self._usage(members, piece, usage)
        if piece.choices:
            if not choices:
                return None
        elif usage is None or self.wants_more:
            return None
        written: dict[str, Any] = {**members, **record.head, "choices": choices}
        if "prompt_token_ids" in members:
            written["prompt_token_ids"] = None
        if usage is not None:
            written["usage"] = counts
        return written

    def _choice(
        self, index: int, strand: Strand, choice: PieceChoice, raw: dict[str, Raw]
    ) -> dict[str, Any] | None:
        if strand.is_finished:
            return None
        text = self._record.text_of(choice)
        strand.hear(choice.token_ids, text, choice.logprobs)
        if choice.delta is not None and _ROLE in choice.delta and not choice.token_ids:
            return dict(raw)
        was_repeating = bool(strand.repeat)
        if not strand.passes_repeat():
            self._diverged()
            return None
        reason = choice.finish_reason
        if (
            reason == _LENGTH
            and self._caps.get(index, self._limit) <= len(strand.ids) < self._limit
        ):
            self.wants_more = True
            reason = None
        stop_reason = choice.stop_reason
        out = strand.held
        straddling = self._straddling(strand) if strand.carried else None
        if straddling is not None:
            out, stop_reason, reason = out[: straddling[0]], straddling[1], _STOP
            self.is_cut_short = True
        elif reason is None:
            out = out[: -self._hold] if self._hold else out
        elif self._stops and isinstance(stop_reason, str):
            out = out[: len(out) - len(stop_reason)]
        strand.deliver(out)
        logprobs, entries = self._logprobs(strand, choice, raw)
        if reason is not None:
            if strand.repeat:
                self._diverged()
                return None
            strand.is_finished = True
            self._ends(index, reason)
        elif not out and not entries and (was_repeating or strand.repeat):
            return None
        if choice.token_ids:
            self.tokens += 1
        if out:
            self.has_token = True
        end = None if reason is None else (reason, stop_reason)
        return self._shaped(index, choice, raw, out, logprobs, end)

    def _straddling(self, strand: Strand) -> tuple[int, str] | None:
        """The first stop string that begins in what another engine said, which this one can not see."""
        if len(strand.ids) < self._least:
            return None
        found = ((strand.held.find(stop), stop) for stop in self._stops)
        begun = [(at, stop) for at, stop in found if 0 <= at < strand.carried]
        return min(begun) if begun else None

    def _shaped(
        self,
        index: int,
        choice: PieceChoice,
        raw: dict[str, Raw],
        text: str,
        logprobs: Any,
        end: tuple[str, int | str | None] | None,
    ) -> dict[str, Any]:
        """A choice in the shape of the client's endpoint. A chat goes on as a completion."""
        written: dict[str, Any]
        if choice.delta is not None:
            written = {**raw, "delta": {**choice.delta, "content": text}}
        elif self._is_chat:
            written = {"index": index, "delta": {"content": text}, "logprobs": None}
            written["finish_reason"] = None
            if end is not None:
                written["finish_reason"], written["stop_reason"] = end
            written["token_ids"] = None
            return written
        else:
            written = {**raw, "index": index, "text": text, "logprobs": logprobs}
            written["finish_reason"], written["stop_reason"] = end or (None, None)
        for name in ("token_ids", "prompt_token_ids"):
            if name in written:
                written[name] = None
        return written

    def _logprobs(
        self, strand: Strand, choice: PieceChoice, raw: dict[str, Raw]
    ) -> tuple[Any, int]:
        """Log probabilities without those that were told, and how many are left."""
        told = choice.logprobs
        if told is None:
            return _NULL, 0
        count = told.count
        skipped = min(count, strand.repeated_entries)
        strand.repeated_entries -= skipped
        strand.entries += count - skipped if not self._is_first else count
        if self._is_first:
            return raw["logprobs"], count
        columns = _any(raw["logprobs"])
        for name, column in columns.items():
            if isinstance(column, list):
                columns[name] = column[skipped:]
        offsets = columns.get("text_offset")
        if offsets:
            columns["text_offset"] = [offset + strand.offset_base for offset in offsets]
        return (columns if count > skipped else _NULL), count - skipped

    def _usage(self, members: dict[str, Raw], piece: Piece, usage: UsageWire) -> Any:
        """Usage of the whole: the first engine's prompt, and the tokens of all engines once."""
        if self._is_first:
            self.usage = usage
            return members["usage"]
        record = self._record
        is_final = not piece.choices
        if is_final:
            prompt, completion = record.prompt_tokens, record.completion_tokens
        else:
            strand = record.strands[self._order[piece.choices[0].index]]
            prompt, completion = strand.prompt.count(b",") + 1, len(strand.ids)
        counts = told(prompt, completion)
        details = usage.prompt_tokens_details
        if details is not None:
            cached = min(details.cached_tokens or 0, prompt)
            counts["prompt_tokens_details"] = {"cached_tokens": cached}
            details = PromptDetails(cached)
        if is_final:
            self.usage = UsageWire(prompt, completion, details)
        return counts


class Replay(Splice):
    """The whole answer is said again: what was delivered is compared and dropped."""

    __slots__ = ("_again", "_record")

    def __init__(self, record: TextRecord, *, hides_usage: bool, answers: int, tokens: int) -> None:
        super().__init__(hides_usage=hides_usage, answers=answers)
        self._record = record
        self._again = [Voice() for _ in range(answers)]
        self.has_token = True
        self.tokens = tokens

    def _written(
        self, members: dict[str, Raw], piece: Piece, usage: UsageWire | None
    ) -> dict[str, Any] | None:
        record = self._record
        choices: list[dict[str, Any]] = []
        raw_choices = _list_of_members(members["choices"]) if piece.choices else []
        for choice, raw in zip(piece.choices, raw_choices, strict=True):
            written = self._choice(choice, raw)
            if self.loss is not None:
                return None
            if written is not None:
                choices.append(written)
        if usage is not None:
            self.usage = usage
        if piece.choices and not choices:
            return None
        if not piece.choices and usage is None:
            return None
        return {**members, **record.head, "choices": choices}

    def _choice(self, choice: PieceChoice, raw: dict[str, Raw]) -> dict[str, Any] | None:
        told, again = self._record.voices[choice.index], self._again[choice.index]
        rests = {}
        for name, text in parts_of(choice):
            rest = self._rest(told, again, name, text)
            if rest is None:
                return None
            if rest:
                rests[name] = rest
        written: dict[str, Any] = dict(raw)
        logprobs = choice.logprobs
        entries = 0
        if logprobs is not None:
            skipped = min(logprobs.count, max(0, told.entries - again.entries))
            again.entries += logprobs.count
            entries = logprobs.count - skipped
            told.entries = max(told.entries, again.entries)
            if skipped:
                columns = _any(raw["logprobs"])
                for name, column in columns.items():
                    if isinstance(column, list):
                        columns[name] = column[skipped:]
                written["logprobs"] = columns if entries else None
        is_ending = choice.finish_reason is not None and not again.is_finished
        if is_ending:
            again.is_finished = True
            assert choice.finish_reason is not None
            self._ends(choice.index, choice.finish_reason)
            if any(again.part(name).chars < part.chars for name, part in told.parts.items()):
                self._diverged()
                return None
            if told.is_finished:
                return None
            told.is_finished = True
        if not rests and not entries and not is_ending:
            return None
        if rests:
            self.tokens += 1
        if choice.text is not None:
            written["text"] = rests.get("text", "")
        if choice.delta is not None:
            written["delta"] = _delta(choice.delta, rests)
        return written

    def _rest(self, told: Voice, again: Voice, name: str, text: str) -> str | None:
        """The part of `text` that is new, which counts as told; None: something else was told before."""
        before, now = told.part(name), again.part(name)
        repeated = min(len(text), before.chars - now.chars) if now.chars < before.chars else 0
        if repeated:
            now.add(text[:repeated])
            if now.chars == before.chars and not now.is_as(before):
                self._diverged()
                return None
        rest = text[repeated:]
        if rest:
            now.add(rest)
            before.add(rest)
        return rest


def told(prompt: int, completion: int) -> dict[str, Any]:
    """Usage as it is told to clients."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _delta(delta: dict[str, Raw], rests: dict[str, str]) -> dict[str, Any]:
    """A delta with what is new of its texts; a tool call that has begun is not named again."""
    written: dict[str, Any] = {}
    for name, value in delta.items():
        if name == _ROLE:
            continue
        if name != "tool_calls" or value == _NULL:
            written[name] = rests.get(name, "") if bytes(value).startswith(b'"') else value
            continue
        calls = []
        for call in _list_of_members(value):
            new = _tool_call(call, rests)
            if new is not None:
                calls.append(new)
        if calls:
            written[name] = calls
    return written


def _tool_call(call: dict[str, Raw], rests: dict[str, str]) -> dict[str, Any] | None:
    parts = tool_parts(call)
    new = {name: rests[name] for name, _ in parts if name in rests}
    if not new:
        return None
    if len(new) == len(parts) and all(rests[name] == text for name, text in parts):
        return dict(call)
    function = {name.rsplit(" ", 1)[1]: text for name, text in new.items()}
    return {"index": call.get("index", Raw(b"0")), "function": function}
