"""Which engine probably holds which prefix of a prompt. A guess: wrong answers cost money, never data.

Prompts are cut at fixed byte positions and where earlier prompts ended, and hashed in a chain, so that one
digest stands for all that comes before it. Of each engine the chunks are kept in the order of their last
use, as many as its KV cache holds: what is over that is gone, as under the engine's own eviction. What
engines report of their hits corrects how much that is. Deciding costs the same however many engines
there are.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import exp
from typing import Final

import xxhash

KIB: Final = 1024
PROMPT_BYTES_MAX: Final = 16 * 1024 * KIB

# Walking from the longest prefix towards the shortest stops when so many engines are known: who holds
# only less than eight others do is not worth the time.
HOLDERS_ENOUGH: Final = 8
# Of the holders of one chunk so many are looked at, each call beginning with others: a prefix that all
# engines hold must not cost more than one that few do.
HOLDERS_SEEN_MAX: Final = 32
# (digest, engine) pairs kept at most, about 200 bytes each.
HOLDINGS_MAX: Final = 500_000
ENGINES_MAX: Final = 1 << 16
# Ends of earlier prompts: of so many places in prompts, and so many at each, the latest.
TAIL_PLACES_MAX: Final = 50_000
TAILS_PER_PLACE_MAX: Final = 8
# Ends of prompts whose tokens were counted by an engine, the latest.
MEASURED_MAX: Final = 50_000
# Digests have 64 bits; those of grid chunks are positive, those of prompts' ends negative.
ANSWERS: Final = 1 << 64
# What an engine keeps is corrected by at most this much a call, within these bounds of what it says.
CAPACITY_GAIN: Final = 0.05
CAPACITY_RATIO_MIN: Final = 0.1
CAPACITY_RATIO_MAX: Final = 1.5
# Two calls in a row that find nothing where so many tokens were expected: the cache was emptied.
EMPTY_TOKENS_MIN: Final = 4_096
EMPTY_CALLS: Final = 2


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


class _Kept:
    """What one engine is thought to hold: chunks by digest with their tokens, longest unused first.

    `second` is a slower tier (host memory) that takes what the first one drops, and of which a token is
    worth `second_ratio` of one that is in the first. Keys from ANSWERS on are answers, which no prompt
    is looked up by.
    """

    __slots__ = (
        "capacity", "empty_calls", "first", "first_tokens", "has_reported", "ratio", "second", "second_capacity",
        "second_ratio", "second_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.capacity = 0
        self.ratio = 1.0
        self.first: OrderedDict[int, int] = OrderedDict()
        self.first_tokens = 0
        self.second: OrderedDict[int, int] = OrderedDict()
        self.second_tokens = 0
        self.second_capacity = 0
        self.second_ratio = 0.0
        self.has_reported = False
        self.empty_calls = 0


class PrefixIndex:
    """Digest -> engines that hold the prompt up to there, and of each engine what it holds.

    A single holder, the usual case, is one integer; more are a list.

    INVARIANT: an engine that holds a digest in its first tier holds all that come before it there, for
    they are used whenever it is, and a moment later.
    """

    __slots__ = (
        "_answers", "_engines", "_has_second", "_holders", "_holdings", "_holdings_max", "_measured",
        "_next_to_shrink", "_tails",
    )  # fmt: skip

    def __init__(self, holdings_max: int = HOLDINGS_MAX) -> None:
        self._holders: dict[int, int | list[int]] = {}
        self._holdings = 0
        self._holdings_max = holdings_max
        self._engines: list[_Kept] = []
        self._has_second = False
        self._answers = ANSWERS
        self._next_to_shrink = 0
        # Digest of the chunk before -> where earlier prompts ended behind it, and their digests.
        self._tails: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        # Tokens up to the ends of prompts, as engines counted them.
        self._measured: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """(digest, engine) pairs that are kept."""
        return self._holdings

    def set_capacity(
        self,
        engine_index: int,
        tokens: int,
        second_tokens: int = 0,
        second_ratio: float = 0.0,
    ) -> None:
        """Declare an engine, how many KV tokens it holds, and how many more in a slower tier.

        A token of the second tier saves `second_ratio` (0..1) of what one of the first saves.
        """
        if not 0 <= engine_index < ENGINES_MAX:
            msg = f"engine index {engine_index} is not in 0..{ENGINES_MAX - 1}"
            raise ValueError(msg)
        while len(self._engines) <= engine_index:
            self._engines.append(_Kept())
        kept = self._engines[engine_index]
        kept.capacity = tokens
        kept.second_capacity = second_tokens
        kept.second_ratio = second_ratio
        self._has_second = self._has_second or second_tokens > 0
        self._shrink(engine_index, kept)

    def forget(self, engine_index: int) -> None:
        """The engine's cache is empty: restarted, reset, asleep, or another engine under this index."""
        if engine_index >= len(self._engines):
            return
        kept = self._engines[engine_index]
        for tier in (kept.first, kept.second):
            for digest in tier:
                self._left(digest, engine_index)
            tier.clear()
        kept.first_tokens = kept.second_tokens = 0
        kept.ratio = 1.0
        kept.has_reported = False
        kept.empty_calls = 0

    # ------------------------------------------------------------ prompts

    def chain(self, raw: bytes, salt: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `chain`, with two more boundaries: where an earlier prompt ended in this one, and its end.

        A grid alone loses up to an eighth of what the steps of an agent have in common. Digests of ends
        are negative.
        """
        grid_digests, grid = chain(raw, salt)
        view = memoryview(raw)
        size = len(raw)
        digests, boundaries = list(grid_digests), list(grid)
        seed = salt & 0xFFFF_FFFF_FFFF_FFFF
        for at in range(len(grid) - 1, -2, -1):
            before = grid_digests[at] if at >= 0 else seed
            tails = self._tails.get(before)
            if tails is None:
                continue
            begin = grid[at] if at >= 0 else 0
            found = self._tail(view, size, begin, before, tails)
            if found is not None:
                boundaries.insert(at + 1, found[0])
                digests.insert(at + 1, -1 - found[1])
                break
        begin, before = (grid[-1], grid_digests[-1]) if grid else (0, seed)
        if size > begin and (not boundaries or boundaries[-1] != size):
            digest = xxhash.xxh3_64_intdigest(view[begin:], before)
            boundaries.append(size)
            digests.append(-1 - digest)
            self._remember(before, size, digest)
        return tuple(digests), tuple(boundaries)

    def _tail(
        self, view: memoryview, size: int, begin: int, before: int, tails: list[tuple[int, int]]
    ) -> tuple[int, int] | None:
        """The longest of the earlier prompts that ended behind `begin` with which this one goes on."""
        for end, digest in sorted(tails, reverse=True):
            if end <= size and xxhash.xxh3_64_intdigest(view[begin:end], before) == digest:
                return end, digest
        return None

    def _remember(self, before: int, end: int, digest: int) -> None:
        tails = self._tails.get(before)
        if tails is None:
            self._tails[before] = [(end, digest)]
            if len(self._tails) > TAIL_PLACES_MAX:
                self._tails.popitem(last=False)
            return
        if (end, digest) not in tails:
            tails.append((end, digest))
            if len(tails) > TAILS_PER_PLACE_MAX:
                del tails[0]

    def measure(self, prefix: Sequence[int], tokens: int) -> None:
        """An engine has counted the tokens of a whole prompt: what goes on from its end is known exactly."""
        if not prefix or prefix[-1] >= 0 or tokens <= 0:
            return
        self._measured[prefix[-1]] = tokens
        self._measured.move_to_end(prefix[-1])
        if len(self._measured) > MEASURED_MAX:
            self._measured.popitem(last=False)

    def tokens_at(
        self,
        prefix: Sequence[int],
        boundaries: Sequence[int],
        prompt_bytes: int,
        prompt_tokens: int,
    ) -> tuple[int, tuple[int, ...]]:
        """Tokens of a prompt, and up to each of its boundaries in bytes, by what is measured of its beginning.

        `prompt_tokens` are thought to be in `prompt_bytes`; what is not measured is taken to be as dense.
        """
        ratio = prompt_tokens / max(1, prompt_bytes)
        for at in range(len(prefix) - 1, -1, -1):
            measured = self._measured.get(prefix[at]) if prefix[at] < 0 else None
            if measured is None:
                continue
            end = boundaries[at]
            within = measured / max(1, end)
            told = tuple(
                int(boundary * within)
                if boundary < end
                else measured + int((boundary - end) * ratio)
                for boundary in boundaries
            )
            return measured + max(0, int((prompt_bytes - end) * ratio)), told
        return prompt_tokens, tuple(int(boundary * ratio) for boundary in boundaries)

    # ------------------------------------------------------------ reading

    def match(self, prefix: Sequence[int]) -> dict[int, int]:
        """Engine index -> number of leading boundaries that it probably holds; absent when none.

        Exact for every engine until HOLDERS_ENOUGH are known; engines that hold only less than
        those are left out, and of a chunk that many hold all but HOLDERS_SEEN_MAX.
        """
        found: dict[int, int] = {}
        for depth in range(len(prefix), 0, -1):
            holders = self._holders.get(prefix[depth - 1])
            if holders is None:
                continue
            if isinstance(holders, int):
                found.setdefault(holders, depth)
            else:
                for engine in _seen(holders, prefix):
                    if engine not in found:
                        found[engine] = depth
            if len(found) >= HOLDERS_ENOUGH:
                break
        return found

    def cached(
        self, prefix: Sequence[int], prefix_tokens: Sequence[int], tokens_max: int
    ) -> dict[int, int]:
        """Engine index -> prompt tokens that it probably need not compute, at most `tokens_max`.

        Tokens of a slower tier count in part.
        """
        found: dict[int, int] = {}
        depths: dict[int, int] = {}
        for depth in range(len(prefix), 0, -1):
            holders = self._holders.get(prefix[depth - 1])
            if holders is None:
                continue
            tokens = min(prefix_tokens[depth - 1], tokens_max)
            for engine in (holders,) if isinstance(holders, int) else _seen(holders, prefix):
                if engine not in found:
                    found[engine] = tokens
                    depths[engine] = depth
            if len(found) >= HOLDERS_ENOUGH:
                break
        if self._has_second:
            for engine, depth in depths.items():
                worth = self._worth(engine, prefix, prefix_tokens, depth)
                found[engine] = min(worth, tokens_max)
        return found

    def _worth(
        self, engine: int, prefix: Sequence[int], prefix_tokens: Sequence[int], depth: int
    ) -> int:
        tokens = prefix_tokens[depth - 1]
        kept = self._engines[engine]
        if not kept.second or prefix[depth - 1] in kept.first:
            return tokens
        fast = 0
        for at in range(depth - 1, 0, -1):
            if prefix[at - 1] in kept.first:
                fast = prefix_tokens[at - 1]
                break
        return fast + int(kept.second_ratio * (tokens - fast))

    # ------------------------------------------------------------ what happens

    def routed(
        self,
        engine_index: int,
        prefix: Sequence[int],
        tokens: int,
        prefix_tokens: Sequence[int] = (),
    ) -> None:
        """A prompt of `tokens` tokens went to an engine, which takes in what it did not hold.

        `prefix_tokens` are the tokens up to each boundary; without them the boundaries share evenly.
        """
        size = len(prefix)
        if engine_index >= len(self._engines) or not size:
            return
        kept = self._engines[engine_index]
        first = kept.first
        use = first.move_to_end
        # From the end to the beginning: what is shared most is used last, and goes last.
        for at in range(size - 1, -1, -1):
            digest = prefix[at]
            try:
                use(digest)
            except KeyError:
                pass
            else:
                if digest < 0 and at < size - 1 and first[digest]:
                    # A longer prompt goes on from here: the chunk around this end has its tokens.
                    kept.first_tokens -= first[digest]
                    first[digest] = 0
                continue
            if prefix_tokens:
                each = _tokens_of(at, prefix, prefix_tokens)
            else:
                each = tokens * (at + 1) // size - tokens * at // size
            moved = kept.second.pop(digest, None)
            if moved is None:
                self._joined(digest, engine_index)
            else:
                kept.second_tokens -= moved
            first[digest] = each
            kept.first_tokens += each
        self._shrink(engine_index, kept)

    def observed(
        self,
        engine_index: int,
        *,
        predicted_tokens: int,
        cached_tokens: int,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """A call has ended, and its engine tells how much of the prompt it had.

        The answer has taken room. Fewer hits than predicted
        mean that the engine keeps less than was thought, more that it keeps more: what it keeps moves by
        CAPACITY_GAIN x the share of the prompt. An engine that never tells of a hit is not corrected.
        """
        if engine_index >= len(self._engines):
            return
        kept = self._engines[engine_index]
        kept.has_reported = kept.has_reported or cached_tokens > 0
        if kept.has_reported and prompt_tokens > 0:
            is_empty = cached_tokens == 0 and predicted_tokens >= EMPTY_TOKENS_MIN
            kept.empty_calls = kept.empty_calls + 1 if is_empty else 0
            if kept.empty_calls >= EMPTY_CALLS:
                self.forget(engine_index)
            else:
                error = max(-1.0, min(1.0, (cached_tokens - predicted_tokens) / prompt_tokens))
                ratio = kept.ratio * exp(CAPACITY_GAIN * error)
                kept.ratio = min(CAPACITY_RATIO_MAX, max(CAPACITY_RATIO_MIN, ratio))
        if completion_tokens > 0:
            self._answers += 1
            kept.first[self._answers] = completion_tokens
            kept.first_tokens += completion_tokens
            self._holdings += 1
        self._shrink(engine_index, kept)

    # ------------------------------------------------------------ inside

    def _shrink(self, engine: int, kept: _Kept) -> None:
        """Drop what is over the engine's capacity, longest unused first, and what is over the bound of all."""
        limit = kept.capacity * kept.ratio
        while kept.first_tokens > limit and kept.first:
            self._drop(engine, kept)
        while self._holdings > self._holdings_max:
            self._next_to_shrink = (self._next_to_shrink + 1) % len(self._engines)
            victim = self._engines[self._next_to_shrink]
            if victim.second:
                self._drop_second(self._next_to_shrink, victim)
            elif victim.first:
                digest, tokens = victim.first.popitem(last=False)
                victim.first_tokens -= tokens
                self._left(digest, self._next_to_shrink)

    def _drop(self, engine: int, kept: _Kept) -> None:
        """The chunk longest unused leaves the first tier, for the second one where there is one."""
        digest, tokens = kept.first.popitem(last=False)
        kept.first_tokens -= tokens
        if digest >= ANSWERS or not kept.second_capacity:
            self._left(digest, engine)
            return
        kept.second[digest] = tokens
        kept.second_tokens += tokens
        while kept.second_tokens > kept.second_capacity and kept.second:
            self._drop_second(engine, kept)

    def _drop_second(self, engine: int, kept: _Kept) -> None:
        digest, tokens = kept.second.popitem(last=False)
        kept.second_tokens -= tokens
        self._left(digest, engine)

    def _joined(self, digest: int, engine: int) -> None:
        self._holdings += 1
        holders = self._holders.get(digest)
        if holders is None:
            self._holders[digest] = engine
        elif isinstance(holders, int):
            self._holders[digest] = [holders, engine]
        else:
            holders.append(engine)

    def _left(self, digest: int, engine: int) -> None:
        self._holdings -= 1
        if digest >= ANSWERS:
            return
        holders = self._holders[digest]
        if isinstance(holders, int):
            del self._holders[digest]
            return
        holders.remove(engine)
        if len(holders) == 1:
            self._holders[digest] = holders[0]


def _tokens_of(at: int, prefix: Sequence[int], prefix_tokens: Sequence[int]) -> int:
    """Tokens that a boundary adds to the grid boundary before it; an end inside of the prompt adds none."""
    if prefix[at] < 0 and at < len(prefix) - 1:
        return 0
    before = at - 1
    if before >= 0 and prefix[before] < 0:
        before -= 1
    return prefix_tokens[at] - (prefix_tokens[before] if before >= 0 else 0)


def _seen(holders: list[int], prefix: Sequence[int]) -> list[int]:
    """At most HOLDERS_SEEN_MAX of them, from a place that depends on the prompt."""
    many = len(holders)
    if many <= HOLDERS_SEEN_MAX:
        return holders
    begin = prefix[-1] % many
    end = begin + HOLDERS_SEEN_MAX
    return holders[begin:end] + holders[: max(0, end - many)]
