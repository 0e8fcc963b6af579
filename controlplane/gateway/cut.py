"""How a stream ends that was cut: a last chunk that says so, usage when it was asked for, `[DONE]`."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from controlplane.domain.decision import Refuse
from controlplane.domain.outcome import Usage
from controlplane.gateway.answer_heads import header_text
from controlplane.gateway.relay import DONE_EVENT

_DATA: Final = b"data:"
# Members of a chunk that are the same in all chunks of a stream.
_SAME: Final = ("id", "object", "created", "model", "system_fingerprint")

_index = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


def ending(
    last_piece: bytes,
    refuse: Refuse,
    *,
    is_chat: bool,
    unfinished: tuple[int, ...],
    usage: Usage | None,
    held: Mapping[int, str],
) -> bytes:
    """The events after `last_piece`, the last that was relayed.

    Every answer in `unfinished` ends as if at its token limit, with the text that is `held` back of it; why
    it does is told to whoever reads the comments. `usage` None: it was not asked for.
    """
    chunk = _same_members(last_piece)
    chunk["choices"] = [
        {
            "index": index,
            **_output(held.get(index, ""), is_chat=is_chat),
            "logprobs": None,
            "finish_reason": "length",
        }
        for index in unfinished
    ]
    events = [chunk]
    if usage is not None:
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        events.append({**chunk, "choices": [], "usage": counts})
    comment = b": ended %s %s\n\n" % (refuse.reason.encode(), header_text(refuse.detail))
    return b"".join(
        (comment, *(b"data: " + _encode(event) + b"\n\n" for event in events), DONE_EVENT)
    )


def _output(text: str, *, is_chat: bool) -> dict[str, Any]:
    if is_chat:
        return {"delta": {"content": text} if text else {}}
    return {"text": text}


def _same_members(piece: bytes) -> dict[str, Any]:
    for event in reversed(piece.split(b"\n\n")):
        if event.startswith(_DATA):
            try:
                members = _index(event[len(_DATA) :])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            return {name: members[name] for name in _SAME if name in members}
    return {}
