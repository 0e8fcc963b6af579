"""Real sizes of calls as prompts of bytes, and a block cache as engines have it: what an index must predict.

The data sets are read from the folder that HEADWAY_TRACES names.
"""

import csv
import gzip
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from controlplane.scheduler.prefix_index import PrefixIndex

BLOCK_TOKENS = 64
# What a token comes to in bytes differs from text to text.
BYTES_PER_TOKEN = (3, 4, 5)
COMMON_TOKENS = 14_000


def folder() -> Path | None:
    """Where the data sets lie, or None."""
    name = os.environ.get("HEADWAY_TRACES", "")
    path = Path(name)
    return path if name and path.is_dir() else None


@dataclass(frozen=True)
class Text:
    """A prompt: its bytes, and the end of each of its tokens in them, as runs of equal tokens."""

    raw: bytes
    runs: tuple[tuple[int, int], ...]  # (tokens, bytes each), in order

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.runs)

    def first(self, tokens: int) -> "Text":
        runs, size = [], 0
        for many, each in self.runs:
            taken = min(many, tokens)
            tokens -= taken
            size += taken * each
            if taken:
                runs.append((taken, each))
        return Text(self.raw[:size], tuple(runs))

    def then(self, random: Random, tokens: int) -> "Text":
        if tokens <= 0:
            return self
        each = random.choice(BYTES_PER_TOKEN)
        return Text(self.raw + random.randbytes(tokens * each), (*self.runs, (tokens, each)))

    def blocks(self) -> list[int]:
        """Chained digests of whole blocks of tokens."""
        found, digest, at = [], 0, 0
        left = 0
        for tokens, each in self.runs:
            for _ in range((left + tokens) // BLOCK_TOKENS):
                size = BLOCK_TOKENS * each
                digest = hash((digest, self.raw[at : at + size]))
                found.append(digest)
                at += size
            left = (left + tokens) % BLOCK_TOKENS
        return found


class BlockCache:
    """One engine's prefix cache: blocks, the longest unused goes first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK_TOKENS
        self._kept: OrderedDict[object, None] = OrderedDict()

    def cached_tokens(self, blocks: list[int]) -> int:
        kept = 0
        for block in blocks:
            if block not in self._kept:
                break
            kept += 1
        return kept * BLOCK_TOKENS

    def use(self, blocks: list[int], answer: list[object]) -> None:
        for block in [*reversed(answer), *reversed(blocks)]:
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


Played = tuple[str, str, Text, int]  # session, workflow, prompt, completion tokens


def coding(path: Path, sessions: int) -> Iterator[Played]:
    """Sessions of coding agents, begun at random within two hours."""
    random = Random(5)
    begun: dict[str, float] = {}
    rows = []
    with gzip.open(path / "agent_coding_steps.csv.gz", "rt") as lines:
        for row in csv.DictReader(lines):
            if row["trace_id"] not in begun:
                if len(begun) >= sessions:
                    break
                begun[row["trace_id"]] = random.random() * 7_200
            rows.append((begun[row["trace_id"]] + float(row["t_s"]), row))
    common = Text(b"", ()).then(random, COMMON_TOKENS)
    before: dict[str, Text] = {}
    for _, row in sorted(rows, key=lambda entry: entry[0]):
        agent = row["trace_id"] + row["agent"]
        size, reusable = int(row["input_tokens"]), int(row["reusable_prefix_tokens"])
        known = before.get(agent) or before.get(row["trace_id"] + "main") or common
        kept = min(reusable, size, known.tokens)
        # Reuse is told in whole blocks: what ends in the same block as the prompt before is all of it.
        if known.tokens - kept < BLOCK_TOKENS and size >= known.tokens:
            kept = known.tokens
        text = before[agent] = known.first(kept).then(random, size - kept)
        yield row["trace_id"], agent, text, int(row["output_tokens"])


def chat(path: Path, calls: int) -> Iterator[Played]:
    """Conversations as chains of blocks of 512 tokens."""
    with gzip.open(path / "mooncake_conversation.jsonl.gz", "rt") as lines:
        for line in islice(lines, calls):
            row = json.loads(line)
            text, left = Text(b"", ()), row["input_length"]
            for name in row["hash_ids"]:
                text = text.then(Random(name), min(512, left))
                left -= 512
            session = str(row["hash_ids"][:3])
            yield session, session, text, row["output_length"]


def mean_error_ratio(
    played: Iterator[Played], engines: int, kv_tokens: int
) -> tuple[float, float, int]:
    """Mean over calls of |predicted - actual| / prompt tokens, the actual share, and how many calls.

    Every session has one engine, on which its calls follow those of others.
    """
    index = PrefixIndex()
    truth = [BlockCache(kv_tokens) for _ in range(engines)]
    for engine in range(engines):
        index.set_capacity(engine, kv_tokens)
    homes: dict[str, int] = {}
    errors = actual_ratio = 0.0
    calls = 0
    for session, workflow, text, completion in played:
        engine = homes.setdefault(session, len(homes) % engines)
        size, blocks = text.tokens, text.blocks()
        prefix, boundaries = index.chain(text.raw, 1)
        ratio = size / len(text.raw)
        tokens = tuple(int(boundary * ratio) for boundary in boundaries)
        predicted = index.cached(prefix, tokens, size - 1).get(engine, 0)
        actual = min(truth[engine].cached_tokens(blocks), size - 1)
        index.routed(engine, prefix, size, tokens)
        answer = [(workflow, calls, at) for at in range(completion // BLOCK_TOKENS)]
        truth[engine].use(blocks, answer)
        index.observed(
            engine,
            predicted_tokens=predicted,
            cached_tokens=actual,
            prompt_tokens=size,
            completion_tokens=completion,
        )
        errors += abs(predicted - actual) / size
        actual_ratio += actual / size
        calls += 1
    return errors / calls, actual_ratio / calls, calls
