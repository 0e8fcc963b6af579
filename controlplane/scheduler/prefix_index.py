"""Which engine probably holds which prefix of a prompt. A guess: wrong answers cost money, never data.

Prompts are cut at fixed byte positions and hashed in a chain, so that one digest stands for all that
comes before it. Residency needs no lists per engine: each has an odometer of tokens taken in, and what
it took in longer ago than its KV capacity is gone, as under least-recently-used eviction.
"""

from collections.abc import Sequence
from typing import Final

import xxhash

KIB: Final = 1024
PROMPT_BYTES_MAX: Final = 16 * 1024 * KIB

# Walking from the longest prefix towards the shortest stops when so many engines are known: who holds
# only less than eight others do is not worth the time.
HOLDERS_ENOUGH: Final = 8
# (digest, engine) pairs kept at most, about 120 bytes each.
HOLDINGS_MAX: Final = 500_000
ENGINES_MAX: Final = 1 << 16
_ENGINE_BITS: Final = 16
_ENGINE_MASK: Final = ENGINES_MAX - 1


def _grid() -> tuple[int, ...]:
    """Boundaries in bytes: the gap is an eighth of the position, whole KiB, at least one.

    The same for all prompts, so equal prefixes have equal digests; loses at most an eighth of a match.
    """
    boundaries: list[int] = []
    position = 0
    while position < PROMPT_BYTES_MAX:
        position += max(KIB, position // 8 // KIB * KIB)
        boundaries.append(position)
    return tuple(boundaries)


GRID: Final = _grid()


def chain(raw: bytes, salt: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """XXH3 digests of `raw` over the grid, each seeded by the one before, and their byte boundaries.

    `salt` (64 bits) separates tenants, models and tools. A prompt below 1 KiB has no boundary.
    """
    view = memoryview(raw)
    size = len(raw)
    digest = salt & 0xFFFF_FFFF_FFFF_FFFF
    digests: list[int] = []
    boundaries: list[int] = []
    begin = 0
    for end in GRID:
        if end > size:
            break
        digest = xxhash.xxh3_64_intdigest(view[begin:end], digest)
        digests.append(digest)
        boundaries.append(end)
        begin = end
    return tuple(digests), tuple(boundaries)


class PrefixIndex:
    """Digest -> engines that took it in, with the odometer reading (stamp) when they last did.

    A single holder, the usual case, is one integer, `stamp << 16 | engine`; more are a dictionary.
    """

    __slots__ = ("_capacity", "_holders", "_holdings", "_holdings_max", "_odometer")

    def __init__(self, holdings_max: int = HOLDINGS_MAX) -> None:
        self._holders: dict[int, int | dict[int, int]] = {}
        self._holdings = 0
        self._holdings_max = holdings_max
        self._odometer: list[int] = []
        self._capacity: list[int] = []

    def __len__(self) -> int:
        """(digest, engine) pairs that are kept, resident or not."""
        return self._holdings

    def set_capacity(self, engine_index: int, tokens: int) -> None:
        """Declare an engine and how many KV tokens it holds."""
        if not 0 <= engine_index < ENGINES_MAX:
            msg = f"engine index {engine_index} is not in 0..{ENGINES_MAX - 1}"
            raise ValueError(msg)
        while len(self._odometer) <= engine_index:
            self._odometer.append(0)
            self._capacity.append(0)
        self._capacity[engine_index] = tokens

    def forget(self, engine_index: int) -> None:
        """The engine's cache is empty: restarted, reset, or another engine under this index."""
        if engine_index < len(self._odometer):
            self._odometer[engine_index] += self._capacity[engine_index] + 1

    def match(self, prefix: Sequence[int]) -> dict[int, int]:
        """Engine index -> number of leading boundaries that it probably holds; absent when none.

        Exact for every engine until HOLDERS_ENOUGH are known; engines that hold only less than
        those are left out.
        """
        found: dict[int, int] = {}
        holders_by_digest = self._holders
        odometer, capacity = self._odometer, self._capacity
        for depth in range(len(prefix), 0, -1):
            holders = holders_by_digest.get(prefix[depth - 1])
            if holders is None:
                continue
            if isinstance(holders, int):
                engine = holders & _ENGINE_MASK
                if (
                    engine not in found
                    and odometer[engine] - (holders >> _ENGINE_BITS) <= capacity[engine]
                ):
                    found[engine] = depth
            else:
                for engine, stamp in holders.items():
                    if engine not in found and odometer[engine] - stamp <= capacity[engine]:
                        found[engine] = depth
            if len(found) >= HOLDERS_ENOUGH:
                break
        return found

    def routed(self, engine_index: int, prefix: Sequence[int], tokens: int) -> None:
        """A prompt of `tokens` tokens went to an engine, which takes in what it did not hold."""
        if engine_index >= len(self._odometer) or not prefix:
            return
        size = len(prefix)
        held = self._depth_of(engine_index, prefix)
        self._odometer[engine_index] += tokens * (size - held) // size
        stamp = self._odometer[engine_index]
        for digest in prefix:
            self._stamp(digest, engine_index, stamp)

    def _depth_of(self, engine: int, prefix: Sequence[int]) -> int:
        for depth in range(len(prefix), 0, -1):
            holders = self._holders.get(prefix[depth - 1])
            if holders is None:
                continue
            if isinstance(holders, int):
                stamp = holders >> _ENGINE_BITS if holders & _ENGINE_MASK == engine else None
            else:
                stamp = holders.get(engine)
            if stamp is not None and self._is_resident(engine, stamp):
                return depth
        return 0

    def _is_resident(self, engine: int, stamp: int) -> bool:
        return self._odometer[engine] - stamp <= self._capacity[engine]

    def _stamp(self, digest: int, engine: int, stamp: int) -> None:
        holders = self._holders.get(digest)
        if holders is None:
            self._holders[digest] = stamp << _ENGINE_BITS | engine
            self._holdings += 1
        elif isinstance(holders, int):
            other = holders & _ENGINE_MASK
            if other == engine or not self._is_resident(other, holders >> _ENGINE_BITS):
                self._holders[digest] = stamp << _ENGINE_BITS | engine
                return
            self._holders[digest] = {other: holders >> _ENGINE_BITS, engine: stamp}
            self._holdings += 1
        else:
            if engine not in holders:
                self._holdings += 1
            holders[engine] = stamp
        if self._holdings > self._holdings_max:
            self._evict()

    def _evict(self) -> None:
        """Drop digests, oldest first, until the bound holds. One in use gets one second chance."""
        is_chance_left = True
        while self._holdings > self._holdings_max and self._holders:
            digest, holders = next(iter(self._holders.items()))
            del self._holders[digest]
            pairs = (
                {holders & _ENGINE_MASK: holders >> _ENGINE_BITS}
                if isinstance(holders, int)
                else holders
            )
            if is_chance_left and any(self._is_resident(*pair) for pair in pairs.items()):
                is_chance_left = False
                self._holders[digest] = holders
                continue
            self._holdings -= len(pairs)
