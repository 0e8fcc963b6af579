"""vLLM's OpenAI shapes: request bodies as far as they are read, answers, chunks and errors as
bytes.
"""

from typing import Any

import msgspec
import xxhash

from dataplane.engines.simulated.batching import Finish, Sequence
from dataplane.engines.simulated.loop import Answer
from dataplane.engines.simulated.options import SimulatedOptions
from dataplane.engines.simulated.text import (
    TOKEN_BYTES,
    Message,
    Speaker,
    chat_tokens,
    id_tokens,
    text_tokens,
    token_count,
    token_ids,
)
from dataplane.engines.simulated.transfer import Remote

CHOICES_MAX = 128
COMPLETION_TOKENS_DEFAULT = 16  # of /v1/completions; a chat may fill its context


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(msgspec.Struct, kw_only=True):
    """Members that both endpoints share. Unknown ones are ignored, as vLLM does."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    ignore_eos: bool | None = False
    cache_salt: str | None = None
    kv_transfer_params: Remote | None = None
    return_token_ids: bool | None = False


class ChatBody(Sampling, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")


class CompletionBody(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class WireError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or {400: "BadRequestError", 404: "NotFoundError"}.get(
            status, "InternalServerError"
        )

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


def check_model(asked: str | None, model: str) -> None:
    if asked is not None and asked != model:
        raise WireError(404, f"The model `{asked}` does not exist.", "model")


def prompts_of(body: ChatBody | CompletionBody) -> list[bytes]:
    """The token sequences that a body asks to continue."""
    if isinstance(body, ChatBody):
        tools = b"" if bytes(body.tools) == b"null" else bytes(body.tools)
        return [chat_tokens(body.messages, tools)]
    prompt = body.prompt
    if isinstance(prompt, str):
        return [text_tokens(prompt)]
    ids = [one for one in prompt if isinstance(one, int)]
    if ids:
        if len(ids) != len(prompt):
            raise WireError(400, "A prompt can not mix token ids with other prompts.", "prompt")
        return [_ids(ids)]
    return [
        text_tokens(one) if isinstance(one, str) else _ids(one)
        for one in prompt
        if not isinstance(one, int)
    ]


def _ids(ids: list[int]) -> bytes:
    try:
        return id_tokens(ids)
    except OverflowError as error:
        raise WireError(400, "Token id is out of vocabulary", "prompt") from error


def make_answer(
    body: ChatBody | CompletionBody, request_id: str, options: SimulatedOptions
) -> Answer:
    """The sequences of a request. Raises WireError when it can not be served here."""
    choices = 1 if body.n is None else body.n
    prompts = prompts_of(body)
    if not 1 <= choices <= CHOICES_MAX or not prompts or len(prompts) * choices > CHOICES_MAX:
        raise WireError(400, f"n must be between 1 and {CHOICES_MAX} with at least one prompt", "n")
    remote = body.kv_transfer_params
    is_pinned = bool(remote and remote.do_remote_decode) and not body.stream
    is_remote = bool(remote and remote.do_remote_prefill)
    if is_pinned and len(prompts) * choices > 1:
        raise WireError(400, "KV transfer works with one choice", "kv_transfer_params")
    salt = xxhash.xxh3_64_intdigest(body.cache_salt.encode()) if body.cache_salt else 0
    sequences = []
    for prompt in prompts:
        tokens_max = _tokens_max(body, token_count(prompt), options.context_tokens_max)
        for choice in range(choices):
            seed = _seed(body, choice)
            sequence = Sequence(
                tokens=bytearray(prompt),
                speaker=Speaker(prompt, seed, options.completion_tokens_mean),
                salt=salt,
                prompt_tokens=token_count(prompt),
                tokens_min=body.min_tokens or 0,
                tokens_max=tokens_max,
                ignores_end=bool(body.ignore_eos),
                is_remote=is_remote,
                is_pinned=is_pinned,
            )
            if body.stop:
                foresee_stop(
                    sequence,
                    [body.stop] if isinstance(body.stop, str) else body.stop,
                    Speaker(prompt, seed, options.completion_tokens_mean),
                )
            sequences.append(sequence)
    return Answer(request_id, sequences, choices, remote)


def _tokens_max(body: ChatBody | CompletionBody, prompt_tokens: int, context_max: int) -> int:
    asked = body.max_tokens
    if isinstance(body, ChatBody):
        asked = asked if body.max_completion_tokens is None else body.max_completion_tokens
    elif asked is None:
        asked = COMPLETION_TOKENS_DEFAULT
    room = context_max - prompt_tokens
    if prompt_tokens < 1:
        raise WireError(400, "The prompt must have at least one token.", "prompt")
    if asked is not None and asked < 1:
        raise WireError(400, f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if room < 1 or (asked is not None and asked > room):
        raise WireError(
            400,
            f"This model's maximum context length is {context_max} tokens. However, your request"
            f" has {prompt_tokens} input tokens"
            + (f" and asks for {asked} output tokens." if asked is not None else ".")
            + " Please reduce the length of the input messages or of the output.",
            "input_tokens",
        )
    return room if asked is None else asked


def _seed(body: Sampling, choice: int) -> int:
    """Greedy answers depend on the prompt alone; sampled ones on seed and choice as well."""
    if body.temperature == 0:
        return 0
    return ((body.seed or 0) * CHOICES_MAX + choice) & 0xFFFF_FFFF_FFFF_FFFF


def foresee_stop(sequence: Sequence, stops: list[str], speaker: Speaker) -> None:
    """Cut a sequence at its first stop string. The text is known beforehand, so nothing is held
    back later.
    """
    wanted = [(stop, stop.encode()) for stop in stops if stop]
    longest = max((len(raw) for _, raw in wanted), default=0)
    text = bytearray()
    for count in range(1, sequence.tokens_max + 1):
        word, wants_end = speaker.next()
        text += word
        if count < sequence.tokens_min:
            continue
        start = max(0, len(text) - TOKEN_BYTES - longest + 1)
        hits = [(at, stop) for stop, raw in wanted if (at := text.find(raw, start)) >= 0]
        if hits:
            sequence.text_max, sequence.stop = min(hits)
            sequence.tokens_max = count
            return
        if wants_end and not sequence.ignores_end:
            return


def shown_text(sequence: Sequence) -> bytes:
    return bytes(sequence.text[: sequence.text_max])


def usage_of(answer: Answer, *, is_final: bool = True) -> dict[str, Any]:
    """Usage of the whole request; each prompt counts once, whatever its choices."""
    firsts = answer.sequences[:: answer.choices]
    prompt_tokens = sum(sequence.prompt_tokens for sequence in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + answer.generated,
        "completion_tokens": answer.generated,
    }
    if is_final:
        cached = sum(sequence.cached_tokens for sequence in firsts)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def transfer_params(answer: Answer, host: str, port: int, gpus: int) -> dict[str, Any] | None:
    """What the decoding engine must be told to pull the prompt's KV; None: nothing is pinned."""
    sequence = answer.sequences[0]
    if not sequence.is_pinned or sequence.finish in {Finish.ABORT, Finish.ERROR}:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(sequence.blocks)],
        "remote_engine_id": f"simulated-{host}-{port}",
        "remote_request_id": answer.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": gpus,
        "remote_num_tokens": sequence.prompt_tokens,
        "transfer_mode": "pull",
    }


def whole_answer(
    answer: Answer,
    *,
    is_chat: bool,
    created: int,
    model: str,
    params: dict[str, Any] | None,
    has_token_ids: bool,
) -> bytes:
    choices: list[dict[str, Any]] = []
    for index, sequence in enumerate(answer.sequences):
        text = shown_text(sequence).decode()
        choice: dict[str, Any] = {"index": index}
        if is_chat:
            choice["message"] = {
                "role": "assistant", "content": text, "refusal": None, "tool_calls": [],
            }  # fmt: skip
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": str(sequence.finish),
            "stop_reason": sequence.stop if sequence.finish is Finish.STOP else None,
        }
        if has_token_ids:
            choice["token_ids"] = token_ids(bytes(sequence.text))
        choices.append(choice)
    return msgspec.json.encode(
        {
            "id": answer.request_id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": created,
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage_of(answer),
            "kv_transfer_params": params,
        }
    )


class ChunkWriter:
    """Turns what an answer said since the last call into SSE bytes. Words need no JSON escapes."""

    def __init__(
        self, answer: Answer, body: ChatBody | CompletionBody, created: int, model: str
    ) -> None:
        options = body.stream_options
        self._answer = answer
        self._is_chat = isinstance(body, ChatBody)
        self._has_usage = bool(options and options.include_usage)
        self._has_continuous_usage = bool(
            self._has_usage and options and options.continuous_usage_stats
        )
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = msgspec.json.encode(
            {"id": answer.request_id, "object": kind, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        before = '"delta":{"content":"' if self._is_chat else '"text":"'
        self._after = (
            b'"},"logprobs":null,"finish_reason":'
            if self._is_chat
            else (b'","logprobs":null,"finish_reason":')
        )
        self._openings = [
            self._head + f'{{"index":{index},{before}'.encode()
            for index in range(len(answer.sequences))
        ]
        self._shown = [0] * len(answer.sequences)
        self._is_ended = [False] * len(answer.sequences)
        self._has_begun = False

    def take(self, text_max: int | None = None) -> bytes:
        """Chunks for all new text, at most `text_max` bytes of each choice."""
        parts: list[bytes] = []
        if not self._has_begun and self._is_chat and self._answer.generated:
            self._has_begun = True
            parts += [self._role(index) for index in range(len(self._openings))]
        for index, sequence in enumerate(self._answer.sequences):
            if self._is_ended[index]:
                continue
            shown = self._shown[index]
            text = sequence.text
            limit = len(text) if sequence.text_max is None else min(len(text), sequence.text_max)
            if text_max is not None:
                limit = min(limit, text_max)
            finish = sequence.finish
            if limit <= shown and finish is None:
                continue
            self._shown[index] = limit
            parts += (self._openings[index], bytes(text[shown:limit]), self._after)
            if finish is None:
                parts.append(b"null}]")
            else:
                self._is_ended[index] = True
                stop = sequence.stop if finish is Finish.STOP else None
                parts.append(b'"%b","stop_reason":%b}]' % (
                    finish.encode(), msgspec.json.encode(stop)
                ))  # fmt: skip
            if self._has_continuous_usage:
                usage = msgspec.json.encode(usage_of(self._answer, is_final=False))
                parts += (b',"usage":', usage)
            parts.append(b"}\n\n")
        return b"".join(parts)

    def _role(self, index: int) -> bytes:
        body = f'{{"index":{index},"delta":{{"role":"assistant","content":""}}'
        return self._head + body.encode() + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def ending(self) -> bytes:
        """The usage chunk, when asked for, and the end mark."""
        if not self._has_usage:
            return b"data: [DONE]\n\n"
        usage = msgspec.json.encode(usage_of(self._answer))
        return self._head + b'],"usage":' + usage + b"}\n\ndata: [DONE]\n\n"
