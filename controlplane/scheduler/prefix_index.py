"""Which engine probably holds which prefix of a prompt. A guess: wrong answers cost money, never data.

Prompts are cut at fixed byte positions and where earlier prompts ended, and hashed in a chain, so that one
digest stands for all that comes before it. Of each engine the chunks are kept in the order of their last
use, as many as its KV cache holds: what is over that is gone, as under the engine's own eviction. What
engines report of their hits corrects how much that is. Deciding costs the same however many engines
there are.

Of an engine whose cache is followed the guess gives way to what is told: how many leading tokens of a
session, which is one call, are cached there. Chunks that a session vouches for stay until it no longer
does, whatever their age, and go with it.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
# Of an answer of fewer blocks it is not looked whether the next prompt had it; how much each counts for
# the usual, and from which share on an answer is thought to come back.
ANSWER_BLOCKS_MIN: Final = 2
ANSWER_GAIN: Final = 0.05
ANSWERS_MOST: Final = 0.5
# Calls on their way, or just ended, of which engines may yet tell: about 100 bytes and their prefix each.
SESSIONS_MAX: Final = 8_192


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

    `links` holds what each session vouches for: digests and the tokens up to them; `voucher` is the way
    back. `reach` holds, of ends of prompts, the tokens that are cached from the prompt's first one on,
    which may be less than the prompt has or, with its answer, more.

    INVARIANT: a digest is in `voucher` exactly when it is in the links of that session, and then it is in
    the first tier. What is in `reach` or `strays` is in the first tier too. Of `strays` the answer is not
    thought to come back in a longer prompt; `answers_ratio` is the share of those that did of late.
    """

    __slots__ = (
        "answers_ratio", "block_tokens", "capacity", "doubted", "empty_calls", "first", "first_tokens", "has_reported",
        "is_followed", "links", "ratio", "reach", "second", "second_capacity", "second_ratio", "second_tokens",
        "strays", "voucher",
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
        self.is_followed = False
        self.block_tokens = 1
        self.links: dict[str, dict[int, int]] = {}
        self.voucher: dict[int, str] = {}
        self.reach: dict[int, int] = {}
        self.strays: set[int] = set()
        self.answers_ratio = 1.0
        self.doubted: set[str] = set()

    def limit(self) -> float:
        """Tokens from which on the longest unused go. What is told goes when it is told."""
        return self.capacity * (CAPACITY_RATIO_MAX if self.is_followed else self.ratio)


class _Session:
    """One call: its digests, the tokens up to each, where it went, and where it ended with how many tokens."""

    __slots__ = ("ended", "engines", "has_ended", "prefix", "prefix_tokens")

    def __init__(self, prefix: Sequence[int], prefix_tokens: Sequence[int]) -> None:
        self.prefix = prefix
        self.prefix_tokens = prefix_tokens
        self.engines: list[int] = []
        self.ended: dict[int, int] = {}
        self.has_ended = False


class PrefixIndex:
    """Digest -> engines that hold the prompt up to there, and of each engine what it holds.

    A single holder, the usual case, is one integer; more are a list.

    INVARIANT: an engine that holds a digest in its first tier holds all that come before it there, for
    they are used whenever it is, and a moment later.
    """

    __slots__ = (
        "_answers", "_engines", "_has_second", "_holders", "_holdings", "_holdings_max", "_is_following",
        "_measured", "_next_to_shrink", "_sessions", "_tails",
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
        self._is_following = False
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

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
        kept.is_followed = False
        kept.links.clear()
        kept.voucher.clear()
        kept.reach.clear()
        kept.strays.clear()
        kept.doubted.clear()

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
        if self._is_following:
            engines = self._engines
            for engine, depth in depths.items():
                kept = engines[engine]
                if not kept.is_followed:
                    continue
                tokens = found[engine]
                if prefix[depth - 1] in kept.reach:
                    tokens = min(_told(kept, prefix, prefix_tokens, depth), tokens_max)
                found[engine] = tokens - tokens % kept.block_tokens
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
        session: str = "",
    ) -> None:
        """A prompt of `tokens` tokens went to an engine, which takes in what it did not hold.

        `prefix_tokens` are the tokens up to each boundary; without them the boundaries share evenly.
        `session` is the name by which the engine may tell of it.
        """
        size = len(prefix)
        if engine_index >= len(self._engines) or not size:
            return
        kept = self._engines[engine_index]
        if session and kept.is_followed and prefix_tokens:
            self._expect(engine_index, session, prefix, prefix_tokens)
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

    def unrouted(
        self,
        engine_index: int,
        prefix: Sequence[int],
        prefix_tokens: Sequence[int],
        kept_tokens: int,
    ) -> None:
        """A prompt that `routed` told of did not get there: beyond `kept_tokens` it is not believed to be.

        What another call with the same beginning brought meanwhile is forgotten with it.
        """
        if engine_index >= len(self._engines):
            return
        kept = self._engines[engine_index]
        for at in range(len(prefix) - 1, -1, -1):
            if prefix_tokens[at] <= kept_tokens:
                break
            self._disbelieve(engine_index, kept, prefix[at])

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
        if kept.has_reported and prompt_tokens > 0 and not kept.is_followed:
            is_empty = cached_tokens == 0 and predicted_tokens >= EMPTY_TOKENS_MIN
            kept.empty_calls = kept.empty_calls + 1 if is_empty else 0
            if kept.empty_calls >= EMPTY_CALLS:
                self.forget(engine_index)
            else:
                error = max(-1.0, min(1.0, (cached_tokens - predicted_tokens) / prompt_tokens))
                ratio = kept.ratio * exp(CAPACITY_GAIN * error)
                kept.ratio = min(CAPACITY_RATIO_MAX, max(CAPACITY_RATIO_MIN, ratio))
        if completion_tokens > 0 and not kept.is_followed:
            self._answers += 1
            kept.first[self._answers] = completion_tokens
            kept.first_tokens += completion_tokens
            self._holdings += 1
        self._shrink(engine_index, kept)

    # ------------------------------------------------------------ what followed engines tell

    def follow(self, engine_index: int, block_tokens: int) -> None:
        """From now on it is told what the engine's cache holds, in blocks of `block_tokens` tokens.

        What was guessed until now stays a guess.
        """
        if engine_index >= len(self._engines):
            return
        kept = self._engines[engine_index]
        kept.block_tokens = max(1, block_tokens)
        if not kept.is_followed:
            kept.is_followed = True
            self._is_following = True

    def sessions_on(self, engine_index: int) -> int:
        """Sessions that vouch for something on an engine."""
        return len(self._engines[engine_index].links) if engine_index < len(self._engines) else 0

    def unfollow(self, engine_index: int) -> None:
        """Nobody tells any more. What was told stays, as a guess."""
        if engine_index >= len(self._engines):
            return
        kept = self._engines[engine_index]
        kept.is_followed = False
        kept.links.clear()
        kept.voucher.clear()
        kept.reach.clear()
        kept.strays.clear()
        kept.doubted.clear()
        self._shrink(engine_index, kept)

    def doubt(self, engine_index: int) -> None:
        """All sessions are about to be told again: whoever is not by `undoubt` is gone."""
        if engine_index < len(self._engines):
            kept = self._engines[engine_index]
            kept.doubted = set(kept.links)

    def undoubt(self, engine_index: int) -> None:
        if engine_index < len(self._engines):
            kept = self._engines[engine_index]
            doubted, kept.doubted = kept.doubted, set()
            for session in doubted:
                self._cut(engine_index, kept, session, 0)

    def told(self, engine_index: int, held: Mapping[str, int]) -> None:
        """Of each session so many leading tokens are cached, whole blocks only; 0 when none is.

        Losses are taken before gains: what one session lost another may have stored again since.
        """
        if engine_index >= len(self._engines):
            return
        kept = self._engines[engine_index]
        if not kept.is_followed:
            return
        for session, tokens in held.items():
            if session in kept.links:
                kept.doubted.discard(session)
                self._cut(engine_index, kept, session, tokens)
        for session, tokens in held.items():
            known = self._sessions.get(session)
            if known is None:
                continue
            if tokens > 0:
                self._vouch(engine_index, kept, session, known, tokens)
            if known.has_ended:
                # What is running can not be lost, and may only not have been computed yet.
                self._disown(engine_index, known, tokens)
        self._shrink(engine_index, kept)

    def served(
        self,
        engine_index: int,
        session: str,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """A call has ended well, and its engine counted its tokens: 0, or None, where it did not."""
        known = self._sessions.get(session)
        if known is None or engine_index >= len(self._engines):
            return
        known.has_ended = True
        # The last token of an answer is told and not computed.
        tokens = prompt_tokens + max(0, completion_tokens - 1)
        known.ended[engine_index] = tokens
        kept = self._engines[engine_index]
        links = kept.links.get(session)
        if prompt_tokens > 0 and prompt_tokens != known.prefix_tokens[-1]:
            known.prefix_tokens = _stretched(known.prefix, known.prefix_tokens, prompt_tokens)
            if links is not None:
                for digest, upto in zip(known.prefix, known.prefix_tokens, strict=True):
                    if digest in links:
                        links[digest] = upto
        end = known.prefix[-1]
        if end >= 0 or end not in kept.first or not kept.is_followed:
            return
        if cached_tokens is not None and not self._has_answer(kept, known, cached_tokens):
            kept.strays.add(end)
        if links is None or end not in links:
            # Nobody has told yet: until then the engine's own count of the call stands.
            if end not in kept.voucher and tokens:
                kept.reach[end] = tokens
        elif kept.reach[end] >= prompt_tokens - prompt_tokens % kept.block_tokens:
            # A prompt that has lost blocks already would say nothing of what came after it.
            kept.reach[end] = max(kept.reach[end], tokens)

    def _has_answer(self, kept: _Kept, known: _Session, cached_tokens: int) -> bool:
        """Whether the next prompt of this conversation is thought to have this one's answer in it, word by
        word: as this prompt had, or else as those of others.

        Clients leave out what was reasoned, or write the answer anew.
        """
        for at in range(len(known.prefix) - 2, -1, -1):
            digest = known.prefix[at]
            reach = kept.reach.get(digest) if digest < 0 else None
            if reach is None:
                continue
            upto, block_tokens = known.prefix_tokens[at], kept.block_tokens
            if reach < upto + ANSWER_BLOCKS_MIN * block_tokens:
                break
            has_answer = cached_tokens > upto + block_tokens
            kept.answers_ratio += ANSWER_GAIN * (has_answer - kept.answers_ratio)
            return has_answer
        return kept.answers_ratio >= ANSWERS_MOST

    def unserved(self, session: str) -> None:
        """A call has ended otherwise: of what no session vouches for, nothing need have been computed."""
        known = self._sessions.get(session)
        if known is not None:
            known.has_ended = True
            for engine in known.engines:
                self._disown(engine, known, 0)

    def settle(self) -> None:
        """Let go of the calls that had ended when this was called the last time. Now and then, as long
        after a call's end as an engine may take to tell of it.
        """
        for session, known in list(self._sessions.items()):
            if not known.has_ended:
                continue
            if not known.engines:
                del self._sessions[session]
            for engine in known.engines:
                if engine in known.ended:
                    self._adopt(self._engines[engine], known)
                self._disown(engine, known, 0)
            known.engines = []

    def _adopt(self, kept: _Kept, known: _Session) -> None:
        """An engine tells nothing of a call that found every block of its own. Its end stands or falls with
        the boundary before it, if that lies in the same block.
        """
        *before, end = known.prefix
        if end >= 0 or not before or end in kept.voucher or end not in kept.first:
            return
        session = kept.voucher.get(before[-1])
        block = known.prefix_tokens[-1] // kept.block_tokens
        if session is None or known.prefix_tokens[-2] // kept.block_tokens != block:
            return
        kept.voucher[end] = session
        kept.links[session][end] = known.prefix_tokens[-1]
        kept.reach.pop(end, None)

    def _disown(self, engine: int, known: _Session, tokens: int) -> None:
        """Beyond so many tokens, no longer believe what no session vouches for."""
        kept = self._engines[engine]
        if not kept.is_followed:
            return
        for digest, upto in zip(known.prefix, known.prefix_tokens, strict=True):
            if upto - upto % kept.block_tokens > tokens or not tokens:
                self._disbelieve(engine, kept, digest)

    def _disbelieve(self, engine: int, kept: _Kept, digest: int) -> None:
        """What no session vouches for is not there."""
        if digest in kept.voucher:
            return
        size = kept.first.pop(digest, None)
        if size is not None:
            kept.first_tokens -= size
            kept.reach.pop(digest, None)
            kept.strays.discard(digest)
            self._left(digest, engine)

    def _expect(
        self, engine: int, session: str, prefix: Sequence[int], prefix_tokens: Sequence[int]
    ) -> None:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session(prefix, prefix_tokens)
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        if engine not in known.engines:
            known.engines.append(engine)

    def _vouch(self, engine: int, kept: _Kept, session: str, known: _Session, tokens: int) -> None:
        """Take over what the session holds and no other session vouches for."""
        prefix, prefix_tokens = known.prefix, known.prefix_tokens
        block_tokens = kept.block_tokens
        last = len(prefix) - 1
        # From the end to the beginning, as they are used.
        for at in range(last, -1, -1):
            digest, upto = prefix[at], prefix_tokens[at]
            is_end = at == last and digest < 0
            if not is_end and upto - upto % block_tokens > tokens:
                continue
            voucher = kept.voucher.get(digest)
            if voucher is not None and (voucher == session or voucher not in kept.doubted):
                continue
            if voucher is not None:
                _unvouched(kept, digest)
            links = kept.links.setdefault(session, {})
            links[digest] = upto
            kept.voucher[digest] = session
            if is_end:
                kept.reach[digest] = self._reach(engine, known, tokens, block_tokens)
            if digest not in kept.first:
                moved = kept.second.pop(digest, None)
                if moved is None:
                    self._joined(digest, engine)
                else:
                    kept.second_tokens -= moved
                each = _tokens_of(at, prefix, prefix_tokens)
                kept.first[digest] = each
                kept.first_tokens += each

    def _reach(self, engine: int, known: _Session, tokens: int, block_tokens: int) -> int:
        """What is told, or what is known of the call's end where that came first."""
        ended = known.ended.get(engine, 0)
        prompt_tokens = known.prefix_tokens[-1]
        is_whole = tokens >= prompt_tokens - prompt_tokens % block_tokens
        return max(tokens, ended) if is_whole else tokens

    def _cut(self, engine: int, kept: _Kept, session: str, tokens: int) -> None:
        """The session vouches for what lies within `tokens`, and no longer for the rest."""
        links = kept.links.get(session)
        if links is None:
            return
        block_tokens = kept.block_tokens
        gone: list[int] = []
        for digest, upto in links.items():
            if tokens >= block_tokens and digest in kept.reach:
                kept.reach[digest] = tokens
            elif upto - upto % block_tokens > tokens or not tokens:
                gone.append(digest)
        if not gone:
            return
        # Engines drop what was longest unused: of what is only guessed, all is gone that is older than
        # anything that was told of, and so older than this.
        while next(iter(kept.first)) not in kept.voucher:
            self._drop(engine, kept)
        for digest in gone:
            size = kept.first.pop(digest)
            kept.first_tokens -= size
            self._dropped(engine, kept, digest, size)

    # ------------------------------------------------------------ inside

    def _shrink(self, engine: int, kept: _Kept) -> None:
        """Drop what is over the engine's capacity, longest unused first, and what is over the bound of all."""
        limit = kept.limit()
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
                _unvouched(victim, digest)
                self._left(digest, self._next_to_shrink)

    def _drop(self, engine: int, kept: _Kept) -> None:
        """The chunk longest unused leaves the first tier, for the second one where there is one."""
        digest, tokens = kept.first.popitem(last=False)
        kept.first_tokens -= tokens
        self._dropped(engine, kept, digest, tokens)

    def _dropped(self, engine: int, kept: _Kept, digest: int, tokens: int) -> None:
        """What has left the first tier joins the second, or nothing."""
        _unvouched(kept, digest)
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


def _told(kept: _Kept, prefix: Sequence[int], prefix_tokens: Sequence[int], depth: int) -> int:
    """Leading tokens of a prompt that a followed engine holds, whose deepest known boundary is `depth`.

    The end of a prompt that has lost blocks reaches less far than it lies, perhaps less far than a boundary
    before it, which others may have made whole again.
    """
    best = 0
    for at in range(depth - 1, -1, -1):
        digest, upto = prefix[at], prefix_tokens[at]
        if digest not in kept.first:
            continue
        reach = kept.reach.get(digest)
        if reach is None or reach >= upto:
            return max(best, upto if reach is None or digest in kept.strays else reach)
        best = max(best, reach)
    return best


def _unvouched(kept: _Kept, digest: int) -> None:
    """A digest leaves the first tier, and whoever vouched for it need not."""
    kept.reach.pop(digest, None)
    kept.strays.discard(digest)
    session = kept.voucher.pop(digest, None)
    if session is None:
        return
    links = kept.links[session]
    del links[digest]
    if not links:
        del kept.links[session]


def _stretched(
    prefix: Sequence[int], prefix_tokens: Sequence[int], prompt_tokens: int
) -> tuple[int, ...]:
    """Tokens up to each boundary, now that those of the whole prompt are known.

    Up to the end of an earlier prompt they were known before.
    """
    base = 0
    for digest, upto in zip(prefix[:-1], prefix_tokens, strict=False):
        if digest < 0:
            base = upto
    ratio = (prompt_tokens - base) / max(1, prefix_tokens[-1] - base)
    return (
        *(
            upto if upto <= base else base + int((upto - base) * ratio)
            for upto in prefix_tokens[:-1]
        ),
        prompt_tokens,
    )


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
