"""Reads a body into an index of raw members, checks what is acted upon, writes engines' bodies.

What is forwarded is always what was checked: the index is encoded again, so that a duplicate key or
bad UTF-8 can not mean one thing here and another to an engine. Text of prompts is never looked at.
"""

import math
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import xxhash
from msgspec import Meta, Raw

from controlplane.domain.decision import Reason, Refuse

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
DEPTH_MAX: Final = 32
# Arrays and objects inside of one member: bounds the work of checking its depth. Not counted in
# members too small to hold that many.
BRACKETS_MAX: Final = 50_000
STRUCTURE_BYTES_UNCOUNTED: Final = 64 * 1024
COUNTED_BYTES_MAX: Final = 2_048
MESSAGES_MAX: Final = 1_024
TOOLS_MAX: Final = 128
SEQUENCES_MAX: Final = 8
STOPS_MAX: Final = 4
LOGIT_BIASES_MAX: Final = 300
MODEL_CHARS_MAX: Final = 255
CACHE_SALT_CHARS_MAX: Final = 128
TOKENS_MAX: Final = 10_000_000
TOKEN_ID_MAX: Final = 2**31 - 1


class Treatment(StrEnum):
    """What becomes of a member: forwarded as sent, left out of what engines get, or refused."""

    FORWARD = "forward"
    STRIP = "strip"
    REFUSE = "refuse"


# Sampling, tools and output shape: OpenAI's members that vLLM knows, and vLLM's own.
# `allowed_token_ids` and `bad_words` narrow one's own answer only, and vLLM checks their range.
FORWARDED: Final = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "best_of",
        "continue_final_message", "echo", "frequency_penalty", "ignore_eos", "include_reasoning",
        "include_stop_str_in_output", "length_penalty", "logit_bias", "logprobs",
        "max_completion_tokens", "max_tokens", "messages", "min_p", "min_tokens", "model", "n",
        "parallel_tool_calls", "presence_penalty", "prompt", "prompt_logprobs", "reasoning_effort",
        "repetition_penalty", "response_format", "seed", "skip_special_tokens",
        "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_options",
        "structured_outputs", "suffix", "temperature", "tool_choice", "tools", "top_k",
        "top_logprobs", "top_p", "truncate_prompt_tokens", "use_beam_search",
    }
)  # fmt: skip

# Not for engines; the value is the reason. What is read first is read in `hints.py` and below.
STRIPPED: Final = {
    "cache_salt": "replaced by the tenant's own salt, with the sent one appended",
    "guided_decoding_backend": "the operator chooses the backend",
    "metadata": "names the workflow; engines have no use for it",
    "nvext": "hints for a control plane",
    "priority": "a hint; the engine's queue is ordered by the control plane",
    "prompt_cache_key": "a hint of the session",
    "request_id": "ids are given here, so that no tenant can take another's",
    "return_token_ids": "token ids are kept between gateway and engine",
    "return_tokens_as_token_ids": "token ids are kept between gateway and engine",
    "service_tier": "a hint of priority",
    "store": "nothing is stored",
    "user": "personal data that an engine does not need",
    # vLLM merges these with its internal arguments, `kv_transfer_params` among them.
    "vllm_xargs": "hints are read; engine-internal arguments are not passed on",
}

# Dangerous to an engine or to other tenants, and not to be ignored in silence.
REFUSED: Final = {
    "bootstrap_host": "where KV is fetched from is decided by the control plane",
    "bootstrap_port": "where KV is fetched from is decided by the control plane",
    "bootstrap_room": "where KV is fetched from is decided by the control plane",
    "chat_template": "templates run as programs inside the engine",
    "chat_template_kwargs": "arguments of templates can replace the template",
    "data_parallel_rank": "the rank is chosen by the control plane",
    "kv_transfer_params": "a wrong transfer stops an engine or corrupts its cache",
    "logits_processors": "names code to be loaded by the engine",
    "media_io_kwargs": "arguments of media loaders are the operator's",
    "mm_processor_kwargs": "arguments of the model's processors are the operator's",
    "prompt_embeds": "serialised tensors are loaded unchecked by the engine",
}


def treatment(member: str) -> Treatment:
    """What becomes of a member of this name. Members that nobody here knows are left out."""
    if member in FORWARDED:
        return Treatment.FORWARD
    return Treatment.REFUSE if member in REFUSED else Treatment.STRIP


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
_Stop = str | Annotated[list[str], Meta(max_length=STOPS_MAX)] | None


class Read(msgspec.Struct, frozen=True):
    """Members that are acted upon, strictly typed: no number in quotes, no true for 1."""

    model: Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS_MAX)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    n: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)] | None = None
    stop: _Stop = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=LOGIT_BIASES_MAX)] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    use_beam_search: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=CACHE_SALT_CHARS_MAX)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None


class Flaw(NamedTuple):
    """Why a body is refused, and the member to blame."""

    refuse: Refuse
    param: str | None


_READ: Final = frozenset(Read.__struct_fields__)
# JSON writes 1e999 as a number; an engine would compute with infinity.
_FLOATS: Final = frozenset(
    {
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "length_penalty",
    }
)  # fmt: skip

_INTEGERS: Final = frozenset(
    {
        "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "prompt_logprobs",
    }
)  # fmt: skip

_index = msgspec.json.Decoder(dict[str, Raw]).decode
_read = msgspec.json.Decoder(Read).decode
_list_of_raw = msgspec.json.Decoder(list[Raw]).decode
_list_of_members = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_NOT_OPENING: Final = bytes(set(range(256)) - set(b"[{"))
_BRACKETS: Final = b"[{"
_ARRAY: Final = ord("[")
_TEXT: Final = ord('"')
_EMPTY_TEXT: Final = b'""'
# An array of more bytes than this is not just blanks between brackets, or is the engine's to refuse.
EMPTY_BYTES_MAX: Final = 256
_PARAM = re.compile(r" - at `\$\.?([A-Za-z_]*)[^`]*`$")
NOTHING_MORE: Final[Mapping[str, Raw]] = {}
_NULL: Final = b"null"
_FALSE: Final = Raw(b"false")
_ONE: Final = Raw(b"1")
_INCLUDE_USAGE: Final = Raw(b'{"include_usage":true}')
_CONTINUOUS_USAGE: Final = Raw(b'{"include_usage":true,"continuous_usage_stats":true}')
_TRUE: Final = Raw(b"true")
# What shapes an answer's length or tells of it, and is of no use to an engine that gives one token. All other
# members stay, so that the first engine refuses what the second one would, before it holds any KV.
_NOT_FOR_PREFILL: Final = (
    "stream_options", "min_tokens", "n", "best_of", "stop", "stop_token_ids",
    "include_stop_str_in_output", "logprobs", "top_logprobs", "prompt_logprobs", "echo",
)  # fmt: skip


class Body:
    """One checked body. `members` indexes what engines get; `left_out` what is kept back."""

    __slots__ = (
        "asks_usage", "completion_tokens_max", "is_chat", "is_single_engine", "is_stream",
        "left_out", "members", "prefix", "prompt_bytes", "read", "sequences", "tools_digest",
    )  # fmt: skip

    def __init__(self, read: Read, members: dict[str, Raw], left_out: dict[str, Raw]) -> None:
        self.read = read
        self.members = members
        self.left_out = left_out
        self.is_stream = read.stream is True
        options = read.stream_options
        self.asks_usage = options is not None and options.include_usage is True
        self.is_chat = True
        self.sequences = read.n or 1
        self.completion_tokens_max: int | None = None
        self.prefix = b""
        self.prompt_bytes = 0
        self.tools_digest = 0
        # A split pair has one prefill for one sequence, and its logprobs stay on the other engine.
        self.is_single_engine = (
            self.sequences > 1
            or (read.best_of or 1) > 1
            or read.prompt_logprobs is not None
            or read.echo is True
            or read.use_beam_search is True
        )

    @property
    def model(self) -> str:
        return self.read.model

    def serve_as(self, model: str, sequences: int) -> None:
        """Another model answers than the one that was asked for, or fewer answers are given."""
        if model != self.read.model:
            self.members["model"] = Raw(_encode(model))
        if sequences < self.sequences:
            prompts = self.sequences // (self.read.n or 1)
            each = max(1, sequences // prompts)
            self.members["n"] = Raw(b"%d" % each)
            self.sequences = prompts * each

    def for_engine(
        self,
        completion_tokens_max: int,
        cache_salt: str | None,
        transfer: Raw | None = None,
        more: Mapping[str, Raw] = NOTHING_MORE,
    ) -> bytes:
        """The body for an engine that answers the call: whole, or with KV that `transfer` names.

        `more` is asked of the engine beside what the client asks. No `cache_salt` at all goes to an engine
        that knows none.
        """
        members = self.engine_members(completion_tokens_max, cache_salt)
        if transfer is not None:
            members["kv_transfer_params"] = transfer
        if more:
            members |= more
        return _encode(members)

    def engine_members(self, completion_tokens_max: int, cache_salt: str | None) -> dict[str, Raw]:
        """Members of the body for an engine that answers the call."""
        members = self._bounded(completion_tokens_max, cache_salt)
        if self.is_stream:
            options = self.read.stream_options
            is_continuous = options is not None and options.continuous_usage_stats is True
            members["stream_options"] = (
                _CONTINUOUS_USAGE if is_continuous and self.asks_usage else _INCLUDE_USAGE
            )
        else:
            members.pop("stream_options", None)
        return members

    def for_prefill(self, cache_salt: str | None, asked: Raw | None) -> bytes:
        """The body for an engine that computes the KV and hands it over: one token, no stream.

        `asked` is the connector's word to that engine, None where it needs none. The answer ends at its
        length and by nothing else, for only then KV is held by every connector.
        """
        return _first_leg(self._bounded(1, cache_salt), asked)

    def _bounded(self, completion_tokens_max: int, cache_salt: str | None) -> dict[str, Raw]:
        members = self.members.copy()
        limit = Raw(b"%d" % completion_tokens_max)
        if "max_completion_tokens" in members:
            members["max_completion_tokens"] = limit
            members.pop("max_tokens", None)
        else:
            members["max_tokens"] = limit
        least = self.read.min_tokens
        if least is not None and least > completion_tokens_max:
            members["min_tokens"] = limit
        if cache_salt is not None:
            own = self.read.cache_salt
            salt = f"{cache_salt}.{own}" if own else cache_salt
            if salt:
                members["cache_salt"] = Raw(_encode(salt))
        return members


def _first_leg(members: dict[str, Raw], asked: Raw | None) -> bytes:
    members["stream"] = _FALSE
    members["max_tokens"] = _ONE
    members["ignore_eos"] = _TRUE
    for name in _NOT_FOR_PREFILL:
        members.pop(name, None)
    if asked is not None:
        members["kv_transfer_params"] = asked
    return _encode(members)


def for_hand_over(engine_body: bytes, asked: Raw | None) -> bytes:
    """What an engine's body becomes for one that holds the KV of its prompt and is to hand it over."""
    members = _index(engine_body)
    members.pop("return_token_ids", None)
    return _first_leg(members, asked)


def with_transfer(engine_body: bytes, transfer: Raw | None) -> bytes:
    """An engine's body, with where the KV of its prompt is to be fetched."""
    if transfer is None:
        return engine_body
    return _encode(_index(engine_body) | {"kv_transfer_params": transfer})


def parse(raw: bytes, *, is_chat: bool) -> Body | Flaw:
    """Check a body of `/v1/chat/completions` (or `/v1/completions`); say what is wrong with it."""
    if len(raw) > BODY_BYTES_MAX:
        return Flaw(
            Refuse(
                Reason.REQUEST_TOO_LARGE,
                f"the body has {len(raw)} bytes; at most {BODY_BYTES_MAX} are taken",
            ),
            None,
        )
    try:
        # The index does not look inside its members; engines would meet bad UTF-8 there.
        if not raw.isascii():
            str(raw, "utf-8")
        members = _index(raw)
    except UnicodeDecodeError:
        return _wrong("the body is not UTF-8")
    except RecursionError:
        return _wrong(f"the body is nested deeper than {DEPTH_MAX} levels")
    except msgspec.ValidationError:
        return _wrong("the body is not a JSON object")
    except msgspec.DecodeError as error:
        return _wrong(f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}")
    left_out: dict[str, Raw] = {}
    if not members.keys() <= FORWARDED:
        for member in members.keys() - FORWARDED:
            value = members.pop(member)
            if member in REFUSED and bytes(value) != _NULL:
                return _wrong(f"the member `{member}` is not taken: {REFUSED[member]}", member)
            left_out[member] = value
    small = {name: members[name] for name in members.keys() & _READ}
    if "cache_salt" in left_out:
        small["cache_salt"] = left_out["cache_salt"]
    try:
        read = _read(_encode(small))
    except msgspec.ValidationError as error:
        whole = _whole_numbers(small)
        if not whole:
            return _mistyped(str(error))
        members |= whole
        try:
            read = _read(_encode(small | whole))
        except msgspec.ValidationError as other:
            return _mistyped(str(other))
    for name in small.keys() & _FLOATS:
        number = getattr(read, name)
        if number is not None and not math.isfinite(number):
            return _wrong(f"the member `{name}` is not a finite number", name)
    body = Body(read, members, left_out)
    body.is_chat = is_chat
    flaw = _read_chat(body) if is_chat else _read_completion(body)
    # A body with few brackets has neither many messages nor deep nesting, and most have few.
    if flaw is None and (_has_many(raw, b"{") or _has_many(raw, b"[")):
        flaw = _check_structure(members) or _check_structure(left_out)
    return body if flaw is None else flaw


_Token = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Raw]] | None = None


class _Parts(msgspec.Struct, frozen=True):
    """Members that only engines look into, as far as all of them agree on their types."""

    messages: list[_Message] = []
    tools: list[dict[str, Raw]] | None = None
    response_format: dict[str, Raw] | None = None
    logprobs: bool | int | None = None
    prompt: str | list[str | _Token | Annotated[list[_Token], Meta(min_length=1)]] = ""


_parts = msgspec.json.Decoder(_Parts).decode


def flaw_of_parts(body: Body) -> Flaw | None:
    """What an engine would find wrong with the types of a body, for a call that no engine gets."""
    small = {name: body.members[name] for name in _Parts.__struct_fields__ if name in body.members}
    try:
        parts = _parts(_encode(small))
    except msgspec.ValidationError as error:
        return _mistyped(str(error))
    except RecursionError:
        return _wrong(f"the body is nested deeper than {DEPTH_MAX} levels")
    if body.is_chat and not isinstance(parts.logprobs, bool | None):
        return _wrong("the member `logprobs` is not a boolean", "logprobs")
    if isinstance(parts.prompt, list) and len({type(entry) for entry in parts.prompt}) > 1:
        return _wrong("the member `prompt` mixes texts and token ids", "prompt")
    return None


def _read_chat(body: Body) -> Flaw | None:
    messages = body.members.get("messages")
    if messages is None:
        return _wrong("the member `messages` is missing", "messages")
    body.members.pop("prompt", None)
    text = memoryview(messages)
    if text[0] != _ARRAY:
        return _wrong("the member `messages` is not an array", "messages")
    # Without its closing bracket the text only grows at its end as a conversation goes on.
    body.prefix = bytes(text[:-1])
    body.prompt_bytes = len(text)
    if len(body.prefix) < EMPTY_BYTES_MAX and not body.prefix[1:].strip():
        return _wrong("the member `messages` is empty", "messages")
    read = body.read
    body.completion_tokens_max = read.max_completion_tokens or read.max_tokens
    tools = body.members.get("tools")
    if tools is not None:
        text = memoryview(tools)
        if bytes(text[:4]) != _NULL:
            if text[0] != _ARRAY:
                return _wrong("the member `tools` is not an array", "tools")
            body.tools_digest = xxhash.xxh3_64_intdigest(text)
            body.prompt_bytes += len(text)
    return None


def _read_completion(body: Body) -> Flaw | None:
    prompt = body.members.get("prompt")
    if prompt is None:
        return _wrong("the member `prompt` is missing", "prompt")
    for chat_only in ("messages", "max_completion_tokens", "tools", "tool_choice"):
        body.members.pop(chat_only, None)
    text = memoryview(prompt)
    prompts = 1
    if text[0] == _ARRAY:
        entries = _list_of_raw(prompt)
        if not entries:
            return _wrong("the member `prompt` is empty", "prompt")
        # An array of numbers is one prompt of token ids; one of texts or arrays is many prompts.
        if memoryview(entries[0])[0] in b'"[':
            prompts = len(entries)
        if any(bytes(memoryview(entry)[:2]) == _EMPTY_TEXT for entry in entries):
            return _wrong("the member `prompt` holds an empty text", "prompt")
    elif text[0] != _TEXT:
        return _wrong("the member `prompt` is neither text nor an array", "prompt")
    elif bytes(text) == _EMPTY_TEXT:
        return _wrong("the member `prompt` is empty", "prompt")
    body.sequences *= prompts
    if body.sequences > SEQUENCES_MAX:
        return _wrong(f"one call may have at most {SEQUENCES_MAX} answers", "prompt")
    body.is_single_engine |= body.sequences > 1
    body.prefix = bytes(text[:-1])
    body.prompt_bytes = len(text)
    body.completion_tokens_max = body.read.max_tokens
    return None


# ---------------------------------------------------------------- nesting and numbers of parts


def _has_many(raw: bytes, bracket: bytes) -> bool:
    """Whether there are more than DEPTH_MAX / 2 of a bracket."""
    if len(raw) < COUNTED_BYTES_MAX:
        return raw.count(bracket) > DEPTH_MAX // 2
    # In long texts, searching for so few is much faster than counting all.
    position = -1
    for _ in range(DEPTH_MAX // 2 + 1):
        position = raw.find(bracket, position + 1)
        if position < 0:
            return False
    return True


def _check_structure(members: dict[str, Raw]) -> Flaw | None:
    """Bound the nesting and the numbers of messages and tools.

    What overflows the stack of an engine's parser or template would count as the engine's fault.
    """
    for name, value in members.items():
        if memoryview(value)[0] not in _BRACKETS:
            continue
        try:
            flaw = (
                _check_messages(value)
                if name == "messages"
                else _check_depth(name, value, DEPTH_MAX - 1)
            )
        except RecursionError:
            return _wrong(f"the body is nested deeper than {DEPTH_MAX} levels", name)
        if flaw is not None:
            return flaw
    tools = members.get("tools")
    if tools is not None and memoryview(tools)[0] == _ARRAY:
        count = len(_list_of_raw(tools))
        if count > TOOLS_MAX:
            return _wrong(f"the member `tools` has {count} entries; at most {TOOLS_MAX}", "tools")
    return None


def _check_messages(messages: Raw) -> Flaw | None:
    try:
        entries = _list_of_members(messages)
    except msgspec.ValidationError:
        return _wrong("the member `messages` holds something that is not an object", "messages")
    if len(entries) > MESSAGES_MAX:
        return _wrong(
            f"the member `messages` has {len(entries)} entries; at most {MESSAGES_MAX}", "messages"
        )
    for entry in entries:
        for value in entry.values():
            # Texts, which are nearly all of a prompt, have no depth and are not decoded.
            if memoryview(value)[0] in _BRACKETS:
                flaw = _check_depth("messages", value, DEPTH_MAX - 3)
                if flaw is not None:
                    return flaw
    return None


def _check_depth(name: str, value: Raw, depth_max: int) -> Flaw | None:
    text = memoryview(value)
    if len(text) > STRUCTURE_BYTES_UNCOUNTED:
        brackets = len(bytes(text).translate(None, _NOT_OPENING))
        if brackets > BRACKETS_MAX:
            return _wrong(
                f"the member `{name}` has more than {BRACKETS_MAX} arrays and objects", name
            )
    level: list[Any] = [_decode(value)]
    for _ in range(depth_max):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                below.extend(item.values())
            elif type(item) is list:
                below.extend(item)
        if not below:
            return None
        level = below
    if any(type(item) is dict or type(item) is list for item in level):
        return _wrong(f"the member `{name}` is nested deeper than {DEPTH_MAX} levels", name)
    return None


def _whole_numbers(small: Mapping[str, Raw]) -> dict[str, Raw]:
    """Members that count something and came as 1.0, which JSON takes for the same, as they should be."""
    found = {}
    for name in small.keys() & _INTEGERS:
        value = _decode(small[name])
        if isinstance(value, float) and value.is_integer():
            found[name] = Raw(b"%d" % int(value))
    return found


def _mistyped(message: str) -> Flaw:
    found = _PARAM.search(message)
    param = (found.group(1) or None) if found else None
    words = _PARAM.sub("", message)
    if param is None:
        if "missing required field" in words:
            return _wrong("the member `model` is missing", "model")
        return _wrong(words[:1].lower() + words[1:])
    return _wrong(f"the member `{param}`: {words[:1].lower()}{words[1:]}", param)


def _wrong(detail: str, param: str | None = None) -> Flaw:
    return Flaw(Refuse(Reason.INVALID_REQUEST, detail), param)
