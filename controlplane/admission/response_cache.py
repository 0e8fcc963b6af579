"""Answers of deterministic calls, kept to be given again, and who waits for the one being made.

Pure book-keeping with a bound on bytes: it is told the time, and never whose an answer is or what it
says. A key stands for everything that an answer depends on, the tenant included.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from controlplane.domain.outcome import Usage

# What an answer costs besides its bytes: its key, its usage and its places in two tables.
OVERHEAD_BYTES = 512
WAITERS_MAX = 256


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as a client gets it. `usage` counts the whole prompt as cached."""

    body: bytes
    usage: Usage
    expires_ms: int


class ResponseCache:
    """The most recently used answers within `bytes_max`, each until it expires."""

    def __init__(self, *, bytes_max: int, answer_bytes_max: int) -> None:
        self._answers: OrderedDict[bytes, StoredAnswer] = OrderedDict()
        self._bytes_max = bytes_max
        self.answer_bytes_max = answer_bytes_max
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: bytes, now_ms: int) -> StoredAnswer | None:
        answer = self._answers.get(key)
        if answer is None:
            return None
        if now_ms >= answer.expires_ms:
            self._drop(key)
            return None
        self._answers.move_to_end(key)
        return answer

    def keep(self, key: bytes, answer: StoredAnswer) -> bool:
        """Keep an answer, at the cost of those not used for longest. False: it is too large."""
        if key in self._answers:
            self._drop(key)
        size = _size(answer)
        if len(answer.body) > self.answer_bytes_max or size > self._bytes_max:
            return False
        while self.bytes + size > self._bytes_max:
            self._drop(next(iter(self._answers)))
        self._answers[key] = answer
        self.bytes += size
        return True

    def _drop(self, key: bytes) -> None:
        self.bytes -= _size(self._answers.pop(key))


def _size(answer: StoredAnswer) -> int:
    return len(answer.body) + OVERHEAD_BYTES


class Place(StrEnum):
    """What a call for an answer that is not there does: make it, wait for it, or go on by itself."""

    LEADS = "leads"
    WAITS = "waits"
    ALONE = "alone"


W = TypeVar("W", bound=Hashable)


class Flights(Generic[W]):
    """For each answer that is being made: who makes it, and who waits for it, in order of arrival.

    INVARIANT: whoever has joined a key and has not left it is in its line once; the first one leads.
    """

    def __init__(self, *, waiters_max: int = WAITERS_MAX) -> None:
        # Dictionaries for their order: anybody in the middle can leave at no cost.
        self._lines: dict[bytes, dict[W, None]] = {}
        self._waiters_max = waiters_max

    def __len__(self) -> int:
        return len(self._lines)

    def join(self, key: bytes, who: W) -> Place:
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = {who: None}
            return Place.LEADS
        if len(line) > self._waiters_max:
            return Place.ALONE
        line[who] = None
        return Place.WAITS

    def leave(self, key: bytes, who: W) -> W | None:
        """Give up, as the one who leads or as one who waits. Whoever leads from now on, if that changed."""
        line = self._lines.get(key)
        if line is None or who not in line:
            return None
        was_leading = next(iter(line)) == who
        del line[who]
        if not line:
            del self._lines[key]
            return None
        return next(iter(line)) if was_leading else None

    def land(self, key: bytes, who: W) -> tuple[W, ...]:
        """The one who leads is done for all: those who waited, in order. Nobody is in line any more."""
        line = self._lines.get(key)
        if line is None or next(iter(line)) != who:
            return ()
        del self._lines[key]
        del line[who]
        return tuple(line)
