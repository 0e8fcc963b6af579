"""vLLM's OpenAI shapes: request bodies as far as they are read, answers, chunks and errors as
bytes.
"""

import secrets
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
    is_split,
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
    include_stop_str_in_output: bool | None = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, msgspec.Raw] | None = None
    structured_outputs: dict[str, msgspec.Raw] | None = None

    @property
    def restarts(self) -> bool:
        """Whether the answer hangs on more than the tokens before it: a generator, a grammar, counts."""
        return bool(
            (self.seed is not None and self.temperature != 0)
            or self.presence_penalty
            or self.frequency_penalty
            or self.response_format
            or self.structured_outputs
        )


class ChatBody(Sampling, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")
    logprobs: bool | None = None

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs)


class CompletionBody(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


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
        raise WireError(400, "Token id is out of vocabulary") from error


def make_answer(
    body: ChatBody | CompletionBody, request_id: str, options: SimulatedOptions
) -> Answer:
    """The sequences of a request. Raises WireError when it can not be served here."""
    choices = 1 if body.n is None else body.n
    prompts = prompts_of(body)
    check_sampling(body, choices)
    if not prompts or len(prompts) * choices > CHOICES_MAX:
        raise WireError(400, f"at most {CHOICES_MAX} answers to at least one prompt", "prompt")
    # As a server without a connector, which takes no notice.
    remote = body.kv_transfer_params if options.kv_connector else None
    is_pinned = bool(remote and remote.do_remote_decode) and not body.stream
    is_remote = bool(remote and remote.do_remote_prefill)
    if len(prompts) * choices > 1:
        # Nobody could tell whose blocks they are.
        is_pinned = False
    salt = xxhash.xxh3_64_intdigest(body.cache_salt.encode()) if body.cache_salt else 0
    sequences = []
    for prompt in prompts:
        tokens_max = _tokens_max(body, token_count(prompt), options.context_tokens_max)
        for choice in range(choices):
            is_drawn = options.draws_by_chance and body.seed is None and body.temperature != 0
            seed = secrets.randbits(63) if is_drawn else _seed(body, choice)

            def speak(
                prompt: bytes = prompt, seed: int = seed, *, is_drawn: bool = is_drawn
            ) -> Speaker:
                return Speaker(
                    prompt,
                    seed,
                    options.completion_tokens_mean,
                    restarts=body.restarts or is_drawn,
                    split_permille=options.split_characters_permille,
                )

            sequence = Sequence(
                tokens=bytearray(prompt),
                speaker=speak(),
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
                    stops_of(body),
                    speak(),
                    is_shown=bool(body.include_stop_str_in_output),
                )
            sequences.append(sequence)
    return Answer(request_id, sequences, choices, remote)


def check_sampling(body: Sampling, choices: int) -> None:
    """Raise WireError for members that contradict each other."""
    if not 1 <= choices <= CHOICES_MAX:
        raise WireError(400, f"n must be at least 1 and at most {CHOICES_MAX}, got {choices}.")
    if choices > 1 and body.temperature == 0:
        raise WireError(400, f"n must be 1 when using greedy sampling, got {choices}.")
    least, most = body.min_tokens or 0, body.max_tokens
    if most is not None and 0 < most < least:
        raise WireError(
            400, f"min_tokens must be less than or equal to max_tokens={most}, got {least}."
        )
    if body.stream_options is not None and not body.stream:
        raise WireError(
            400, "Stream options can only be defined when `stream=True`.", "stream_options"
        )


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


def stops_of(body: Sampling) -> list[str]:
    stop = body.stop or []
    return [stop] if isinstance(stop, str) else stop


def foresee_stop(
    sequence: Sequence, stops: list[str], speaker: Speaker, *, is_shown: bool = False
) -> None:
    """Cut a sequence at its first stop string, or after it when that `is_shown`. The text is known
    beforehand.
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
            if is_shown:
                sequence.text_max += len(sequence.stop.encode())
            sequence.tokens_max = count
            return
        if wants_end and not sequence.ignores_end:
            return


def shown_text(sequence: Sequence) -> str:
    """Text of whole characters only, as far as it is shown."""
    return _shown_from(sequence).decode(bytes(sequence.text[: sequence.text_max]))


def _shown_from(sequence: Sequence) -> "Detokenizer":
    return Detokenizer(is_open=is_split(sequence.tokens[: sequence.prompt_tokens * TOKEN_BYTES]))


class Detokenizer:
    """Text of tokens as they come; a token that ends inside of a character is held back whole.

    The rest of a character that began in the prompt (`is_open`) is lost.
    """

    __slots__ = ("_held", "_is_open")

    def __init__(self, *, is_open: bool) -> None:
        self._held = b""
        self._is_open = is_open

    def decode(self, data: bytes) -> str:
        """Text of some tokens; what is held back after the last of them is never told."""
        if self._is_open and data:
            self._is_open = False
            data = data[1:]
            ends = range(TOKEN_BYTES - 1, len(data) + TOKEN_BYTES, TOKEN_BYTES)
        else:
            ends = range(TOKEN_BYTES, len(data) + TOKEN_BYTES, TOKEN_BYTES)
        start, texts = 0, []
        for end in ends:
            token, start = self._held + data[start:end], end
            self._held = b""
            try:
                texts.append(token.decode())
            except UnicodeDecodeError:
                self._held = token
        return "".join(texts)


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
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": sequence.prompt_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": sequence.cached_tokens,
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
        text = shown_text(sequence)
        choice: dict[str, Any] = {"index": index}
        if is_chat:
            choice["message"] = {
                "role": "assistant", "content": text, "refusal": None, "annotations": None,
                "audio": None, "function_call": None, "reasoning": None,
            }  # fmt: skip
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": str(sequence.finish),
            "stop_reason": sequence.stop if sequence.finish is Finish.STOP else None,
        }
        choice["token_ids"] = token_ids(bytes(sequence.text)) if has_token_ids else None
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


class _Voice:
    """What was told of one sequence: tokens, bytes of text given to the detokenizer, its text."""

    __slots__ = ("detokenizer", "held", "is_ended", "offset", "opening", "read", "told")

    def __init__(self, sequence: Sequence, opening: bytes) -> None:
        self.detokenizer = _shown_from(sequence)
        self.opening = opening
        self.told = 0
        self.read = 0
        self.held = ""
        self.offset = 0
        self.is_ended = False


class ChunkWriter:
    """Turns what an answer said since the last call into SSE bytes, in vLLM's order of members."""

    def __init__(
        self, answer: Answer, body: ChatBody | CompletionBody, created: int, model: str
    ) -> None:
        options = body.stream_options
        self._answer = answer
        self._is_chat = isinstance(body, ChatBody)
        self._has_ids = bool(body.return_token_ids)
        self._has_logprobs = body.has_logprobs
        self._has_usage = bool(options and options.include_usage)
        self._has_continuous_usage = bool(
            self._has_usage and options and options.continuous_usage_stats
        )
        # The end of the text is held back, for it might be the beginning of a stop string.
        self._hold = (
            0
            if body.include_stop_str_in_output
            else max((len(stop) for stop in stops_of(body)), default=1) - 1
        )
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = msgspec.json.encode(
            {"id": answer.request_id, "object": kind, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        before = '"delta":{"content":' if self._is_chat else '"text":'
        self._close = b"}" if self._is_chat else b""
        self._voices = [
            _Voice(sequence, self._head + f'{{"index":{index},{before}'.encode())
            for index, sequence in enumerate(answer.sequences)
        ]
        # Something has been told.
        self.has_begun = False

    def take(self, tokens_max: int | None = None) -> bytes:
        """Chunks for all that is new, at most `tokens_max` tokens of each choice."""
        parts: list[bytes] = []
        if not self.has_begun and self._is_chat and self._answer.generated:
            parts += [self._role(index) for index in range(len(self._voices))]
        for sequence, voice in zip(self._answer.sequences, self._voices, strict=True):
            finish = sequence.finish
            tokens = len(sequence.text) // TOKEN_BYTES
            if tokens_max is not None:
                tokens = min(tokens, tokens_max)
            if voice.is_ended or (tokens <= voice.told and finish is None):
                continue
            fresh = bytes(sequence.text[voice.told * TOKEN_BYTES : tokens * TOKEN_BYTES])
            is_first, voice.told = voice.told == 0, tokens
            shown = tokens * TOKEN_BYTES
            if sequence.text_max is not None:
                shown = min(shown, sequence.text_max)
            voice.held += voice.detokenizer.decode(bytes(sequence.text[voice.read : shown]))
            voice.read = max(voice.read, shown)
            text = voice.held
            if finish is None and self._hold:
                text = text[: -self._hold]
            voice.held = voice.held[len(text) :]
            logprobs = self._logprobs(fresh, voice) if self._has_logprobs else b"null"
            parts += (
                voice.opening,
                msgspec.json.encode(text),
                self._close,
                b',"logprobs":',
                logprobs,
            )
            if finish is None:
                parts.append(b',"finish_reason":null')
                if not self._is_chat:
                    parts.append(b',"stop_reason":null')
            else:
                voice.is_ended = True
                stop = sequence.stop if finish is Finish.STOP else None
                parts.append(b',"finish_reason":"%b","stop_reason":%b' % (
                    finish.encode(), msgspec.json.encode(stop)
                ))  # fmt: skip
            if not self._is_chat:
                parts += (b',"prompt_token_ids":', self._prompt(sequence) if is_first else b"null")
            ids = msgspec.json.encode(token_ids(fresh)) if self._has_ids else b"null"
            parts += (b',"token_ids":', ids, b"}]")
            if self._has_continuous_usage:
                usage = msgspec.json.encode(usage_of(self._answer, is_final=False))
                parts += (b',"usage":', usage)
            parts.append(b"}\n\n")
        self.has_begun = self.has_begun or bool(parts)
        return b"".join(parts)

    def _prompt(self, sequence: Sequence) -> bytes:
        if not self._has_ids:
            return b"null"
        prompt = bytes(sequence.tokens[: sequence.prompt_tokens * TOKEN_BYTES])
        return msgspec.json.encode(token_ids(prompt))

    def _logprobs(self, fresh: bytes, voice: _Voice) -> bytes:
        """Log probabilities of some tokens: made up of their bytes, so that they repeat everywhere."""
        tokens = [
            fresh[at : at + TOKEN_BYTES].decode(errors="replace")
            for at in range(0, len(fresh), TOKEN_BYTES)
        ]
        values = [-(number % 1000) / 250 for number in token_ids(fresh)]
        if self._is_chat:
            content = [
                {
                    "token": token,
                    "logprob": value,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
                for token, value in zip(tokens, values, strict=True)
            ]
            return msgspec.json.encode({"content": content})
        offsets = []
        for token in tokens:
            offsets.append(voice.offset)
            voice.offset += len(token)
        tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
        return msgspec.json.encode(
            {
                "text_offset": offsets,
                "token_logprobs": values,
                "tokens": tokens,
                "top_logprobs": tops,
            }
        )

    def _role(self, index: int) -> bytes:
        prompt = self._prompt(self._answer.sequences[index])
        body = f'{{"index":{index},"delta":{{"role":"assistant","content":""}}'
        after = b',"logprobs":null,"finish_reason":null}],"prompt_token_ids":%b,"prompt_text":null}'
        return self._head + body.encode() + after % prompt + b"\n\n"

    def ending(self) -> bytes:
        """The usage chunk, when asked for, and the end mark."""
        if not self._has_usage:
            return b"data: [DONE]\n\n"
        usage = msgspec.json.encode(usage_of(self._answer))
        return self._head + b'],"usage":' + usage + b"}\n\ndata: [DONE]\n\n"
