"""Tokens without a vocabulary: a token is four bytes, and the next one is a hash of all that came
before.

A sequence is one run of padded bytes, `4 n` long for `n` tokens. Because the next token depends on
nothing but the sequence (and the request's seed), greedy output repeats on every engine, and a
stream continued elsewhere from prompt and partial answer goes on with the same tokens. Each piece
of a message is padded on its own, so that an answer sent back in the next turn gives the same
tokens again.
"""

import msgspec
import xxhash

TOKEN_BYTES = 4

# 1,024 words of three letters after a space: exactly one token each.
_CONSONANTS = "bdfghklmnprstvwz"
_WORDS = tuple(f" {a}{b}{c}".encode() for a in _CONSONANTS for b in "aeio" for c in _CONSONANTS)

# Two of the three bytes of U+2080 to U+20BF, and the first of the values that the third one takes.
_OPEN = b"\xe2\x82"
_CONTINUATION = 0x80


class Message(msgspec.Struct):
    """One chat message. What is neither role nor text counts by its JSON."""

    role: str
    content: str | list[dict[str, msgspec.Raw]] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")


def padded(text: bytes) -> bytes:
    return text + bytes(-len(text) % TOKEN_BYTES)


def token_count(sequence: bytes | bytearray) -> int:
    return len(sequence) // TOKEN_BYTES


def text_tokens(text: str) -> bytes:
    return padded(text.encode())


def id_tokens(ids: list[int]) -> bytes:
    """Token ids as they are. Raises OverflowError on an id of more than four bytes."""
    return b"".join(number.to_bytes(TOKEN_BYTES, "little") for number in ids)


def token_ids(sequence: bytes) -> list[int]:
    return [
        int.from_bytes(sequence[at : at + TOKEN_BYTES], "little")
        for at in range(0, len(sequence), TOKEN_BYTES)
    ]


def chat_tokens(messages: list[Message], tools: bytes, *, opens_answer: bool = True) -> bytes:
    """The chat template. `opens_answer` ends with the head of the assistant's turn."""
    parts = [padded(tools)] if tools else []
    for message in messages:
        parts.append(padded(f"<|im_start|>{message.role}\n".encode()))
        parts.append(padded(_content(message)))
        parts.append(padded(b"<|im_end|>\n"))
    if opens_answer:
        parts.append(padded(b"<|im_start|>assistant\n"))
    return b"".join(parts)


def _content(message: Message) -> bytes:
    content = message.content
    if isinstance(content, str):
        text = content.encode()
    elif content is None:
        text = b""
    else:
        text = b"".join(_part(part) for part in content)
    return text + bytes(message.tool_calls)


def _part(part: dict[str, msgspec.Raw]) -> bytes:
    if "text" in part:
        try:
            return msgspec.json.decode(part["text"], type=str).encode()
        except msgspec.ValidationError:
            pass
    return msgspec.json.encode(part)


class Speaker:
    """Draws the tokens that follow a sequence, one at a time.

    `restarts`: a draw depends on how many this speaker has made before, as with a seeded generator or a
    grammar; then a sequence that is continued goes on otherwise than the speaker who began it. Of
    `split_permille` in a thousand tokens the last character goes on in the next token.
    """

    __slots__ = ("_draws", "_is_open", "_length_mean", "_restarts", "_split_permille", "_state")

    def __init__(
        self,
        sequence: bytes | bytearray,
        seed: int,
        length_mean: int,
        *,
        restarts: bool = False,
        split_permille: int = 0,
    ) -> None:
        self._state = xxhash.xxh3_64(bytes(sequence), seed=seed)
        self._length_mean = length_mean
        self._restarts = restarts
        self._split_permille = split_permille
        self._draws = 0
        self._is_open = is_split(sequence)

    def mishear(self) -> None:
        """Go on as after other words than were said."""
        self._state.update(b"\xff")

    def next(self) -> tuple[bytes, bool]:
        """The next token, and whether the speaker would end the answer after it."""
        draw = self._state.intdigest()
        if self._restarts:
            self._draws += 1
            draw = xxhash.xxh3_64_intdigest(self._draws.to_bytes(8, "little"), seed=draw)
        word = _WORDS[draw & 1023]
        if self._is_open:
            word = bytes((_CONTINUATION + (draw >> 32 & 63),)) + word[1:]
            self._is_open = False
        elif self._split_permille and (draw >> 40) % 1000 < self._split_permille:
            word = word[:2] + _OPEN
            self._is_open = True
        self._state.update(word)
        return word, not self._is_open and (draw >> 16) % self._length_mean == 0


def is_split(sequence: bytes | bytearray) -> bool:
    """Whether the last character of a sequence goes on in the token that follows."""
    return sequence.endswith(_OPEN)
