"""Bodies of `/v1/models`, and the parts of an engine's answer that the gateway reads."""

from collections.abc import Iterable
from typing import Any

import msgspec

from controlplane.domain.catalog import Model

OWNER = "headway"

# A member that is not there.
_ABSENT = msgspec.Raw(b"null")


def model_body(model: Model, created_s: int) -> dict[str, Any]:
    """One model as the list shows it. `max_model_len` is vLLM's word for the context window."""
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": OWNER,
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_tokens_max,
        "permission": [],
    }


def model_list_body(models: Iterable[Model], created_s: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(model, created_s) for model in models]}


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class UsageWire(msgspec.Struct, frozen=True):
    """`usage` as engines send it; vLLM leaves the details null unless it is told to fill them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, as far as the gateway reads it."""

    choices: list[AnswerChoice]
    usage: UsageWire | None = None
    kv_transfer_params: msgspec.Raw = _ABSENT


class Detokenized(msgspec.Struct, frozen=True):
    """The text of some tokens, under the name that vLLM gives it."""

    prompt: str


class ChunkChoice(msgspec.Struct, frozen=True):
    """`delta` of chat, `text` of completions."""

    finish_reason: str | None = None
    delta: dict[str, msgspec.Raw] | None = None
    text: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream, as far as the gateway reads it."""

    choices: list[ChunkChoice] = []
    usage: UsageWire | None = None
    error: msgspec.Raw = _ABSENT
