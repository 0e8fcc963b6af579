"""Continuous batching with chunked prefill over the KV pool: which sequences compute how many
tokens in a step.

Follows vLLM's scheduler: running sequences first, then waiting ones in order of arrival, within a
budget of tokens per step; when blocks run out, the youngest running sequence gives up its blocks
and computes again later. Pure: knows no clock and no connection.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from dataplane.engines.simulated.kv_events import KvEventLog
from dataplane.engines.simulated.kv_pool import KvPool
from dataplane.engines.simulated.options import BLOCK_TOKENS
from dataplane.engines.simulated.text import TOKEN_BYTES, Speaker
from dataplane.engines.simulated.transfer import Pulled

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Finish(StrEnum):
    """Why a sequence ended, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One answer under way. `computed` tokens of `tokens` have their KV in `blocks`."""

    tokens: bytearray
    speaker: Speaker
    salt: int
    prompt_tokens: int
    tokens_min: int
    tokens_max: int
    ignores_end: bool = False
    # The stop string that token `tokens_max` completes; text from `text_max` bytes on is not shown.
    stop: str | None = None
    text_max: int | None = None
    # KV of the prompt comes from another engine, in which case the pull comes before the first
    # step.
    is_remote: bool = False
    # The blocks stay held after the end, until another engine has pulled them.
    is_pinned: bool = False
    # The name under which KV events tell of its blocks.
    session: str | None = None
    digests: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    generated: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None
    has_started: bool = False
    arrival_s: float = 0.0
    first_step_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    text: bytearray = field(default_factory=bytearray)

    @property
    def total(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def extend_digests(self) -> None:
        """Digest every full block of `tokens`, each chained to the one before it."""
        digests = self.digests
        tokens = self.tokens
        parent = digests[-1] if digests else self.salt
        for at in range(len(digests) * _BLOCK_BYTES, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            parent = xxhash.xxh3_64_intdigest(bytes(tokens[at : at + _BLOCK_BYTES]), seed=parent)
            digests.append(parent)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: (sequence, tokens) in order, who joined, and the sizes its duration
    depends on.
    """

    work: list[tuple[Sequence, int]]
    admitted: list[Sequence]
    tokens: int
    kv_tokens: int
    attention_pairs: float


@dataclass(slots=True)
class Counters:
    """Counted since start. Tokens, except `preemptions` in sequences."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_pulled: int = 0


class Batcher:
    def __init__(
        self,
        pool: KvPool,
        *,
        seats: int,
        step_tokens_max: int,
        has_prefix_cache: bool,
        kv_log: KvEventLog | None = None,
    ) -> None:
        self.pool = pool
        self._kv_log = kv_log
        if kv_log is not None:
            pool.on_evicted = kv_log.removed
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # Sequences that hold blocks and wait for their content from another engine.
        self.pulling: set[Sequence] = set()
        self.counters = Counters()
        self._seats = seats
        self._step_tokens_max = step_tokens_max
        self._has_prefix_cache = has_prefix_cache
        # Kept blocks that hold another prompt's KV than their name says.
        self.tainted: set[int] = set()

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.pulling)

    def add(self, sequence: Sequence) -> None:
        if self._has_prefix_cache:
            sequence.extend_digests()
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is not finished, and free its blocks."""
        if sequence in self.pulling:
            self.pulling.discard(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        self._give_up_blocks(sequence)

    def reset_cache(self) -> bool:
        """Empty the prefix cache; False while sequences hold blocks. It is told with the next step."""
        is_reset = self.pool.clear()
        if is_reset and self._kv_log is not None:
            self._kv_log.cleared()
        return is_reset

    def plan(self) -> tuple[Step | None, list[Sequence]]:
        """The next step, or None when there is nothing to compute, and the sequences whose pull
        must begin now.
        """
        budget = self._step_tokens_max
        work: list[tuple[Sequence, int]] = []
        kv_tokens = 0
        pairs = 0.0
        has_preempted = False
        at = 0
        while at < len(self.running) and budget > 0:
            sequence = self.running[at]
            tokens = min(sequence.total - sequence.computed, budget)
            while not self._reach(sequence, sequence.computed + tokens):
                victim = self.running[-1]
                self._preempt(victim)
                has_preempted = True
                if victim is sequence:
                    break
            else:
                budget -= tokens
                if tokens == 1:
                    kv_tokens += sequence.computed
                else:
                    pairs += _attention_pairs(sequence.computed, tokens)
                work.append((sequence, tokens))
                at += 1
                continue
            break
        pulls: list[Sequence] = []
        admitted: list[Sequence] = []
        while not has_preempted and budget > 0 and self.waiting:
            if len(self.running) + len(self.pulling) >= self._seats:
                break
            sequence = self.waiting[0]
            if not sequence.blocks and not self._start(sequence):
                break
            if sequence.is_remote:
                self.waiting.popleft()
                self.pulling.add(sequence)
                pulls.append(sequence)
                continue
            tokens = min(sequence.total - sequence.computed, budget)
            if not self._reach(sequence, sequence.computed + tokens):
                # INVARIANT: a waiting sequence holds no block, or two of them could wait for each
                # other.
                self._give_up_blocks(sequence)
                break
            self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence)
            budget -= tokens
            pairs += _attention_pairs(sequence.computed, tokens)
            work.append((sequence, tokens))
        if not work:
            return None, pulls
        step = Step(work, admitted, self._step_tokens_max - budget, kv_tokens, pairs)
        return step, pulls

    def complete(self, step: Step) -> list[Sequence]:
        """Account for a computed step; the sequences that have one token more, ended ones with
        `finish` set.

        A sequence that was removed or preempted while the step ran is passed over.
        """
        spoke: list[Sequence] = []
        has_ended = False
        for sequence, tokens in step.work:
            if not sequence.blocks or sequence.finish is not None:
                continue
            sequence.computed += tokens
            self._publish(sequence)
            if sequence.computed < sequence.total:
                continue
            word, wants_end = sequence.speaker.next()
            sequence.tokens += word
            sequence.text += word
            sequence.generated += 1
            spoke.append(sequence)
            if wants_end and not sequence.ignores_end and sequence.generated >= sequence.tokens_min:
                sequence.finish = Finish.STOP
            elif sequence.generated >= sequence.tokens_max:
                sequence.finish = Finish.LENGTH if sequence.stop is None else Finish.STOP
            if sequence.finish is not None:
                has_ended = True
                if not sequence.is_pinned:
                    self._give_up_blocks(sequence)
        if has_ended:
            self.running = [sequence for sequence in self.running if sequence.finish is None]
        return spoke

    def pulled(self, sequence: Sequence, result: Pulled) -> None:
        """End of a pull: with KV for the prompt but for its last token, right or wrong, or with nothing,
        so that it is computed here.
        """
        if sequence not in self.pulling:
            return
        self.pulling.discard(sequence)
        sequence.is_remote = False
        if result is not Pulled.NOTHING:
            before = sequence.published
            self.counters.prompt_pulled += sequence.prompt_tokens - sequence.computed
            sequence.computed = sequence.prompt_tokens - 1
            self._publish(sequence)
            if result is Pulled.WRONG:
                self.tainted.update(sequence.digests[before : sequence.published])
                sequence.speaker.mishear()
        self.waiting.appendleft(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Hold the kept prefix of a waiting sequence; all blocks of the prompt when they are to
        be pulled.
        """
        total = sequence.total
        # At least one token is computed, for there is no answer without it.
        kept = (
            self.pool.match(sequence.digests, (total - 1) // BLOCK_TOKENS)
            if self._has_prefix_cache
            else []
        )
        wanted = -(-total // BLOCK_TOKENS) - len(kept) if sequence.is_remote else 0
        # The chunk's own blocks are asked for at once, so that a start that can not go on holds
        # nothing.
        first = min(total, len(kept) * BLOCK_TOKENS + 1)
        wanted = max(wanted, -(-first // BLOCK_TOKENS) - len(kept))
        fresh = self.pool.acquire(kept, wanted)
        if fresh is None:
            return False
        sequence.blocks = [*kept, *fresh]
        sequence.computed = len(kept) * BLOCK_TOKENS
        sequence.published = len(kept)
        if self.tainted and not self.tainted.isdisjoint(sequence.digests[: len(kept)]):
            sequence.speaker.mishear()
        if not sequence.has_started:
            sequence.has_started = True
            sequence.cached_tokens = sequence.computed
            self.counters.prefix_queries += total
            self.counters.prefix_hits += sequence.computed
        return True

    def _reach(self, sequence: Sequence, tokens: int) -> bool:
        """Hold enough blocks for `tokens` tokens."""
        missing = -(-tokens // BLOCK_TOKENS) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.acquire((), missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // BLOCK_TOKENS
        if full <= sequence.published or not self._has_prefix_cache:
            return
        sequence.extend_digests()
        begin = sequence.published
        for at in range(begin, full):
            if self.tainted and not self.pool.match(sequence.digests[at : at + 1], 1):
                self.tainted.discard(sequence.digests[at])
            self.pool.publish(sequence.blocks[at], sequence.digests[at])
        sequence.published = full
        if self._kv_log is not None:
            self._kv_log.stored(
                sequence.digests[begin:full],
                sequence.digests[begin - 1] if begin else None,
                bytes(sequence.tokens[begin * _BLOCK_BYTES : full * _BLOCK_BYTES]),
                sequence.session,
            )

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_up_blocks(sequence)
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.published = 0


def _attention_pairs(computed: int, tokens: int) -> float:
    """Pairs of tokens that attend to each other when `tokens` are added to `computed`."""
    return tokens * (computed + tokens) - tokens * tokens / 2
