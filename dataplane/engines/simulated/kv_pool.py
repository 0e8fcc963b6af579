"""The KV cache as a pool of equal blocks with a prefix cache: who holds which block, and which
content is kept.

A block is held by any number of sequences, or free. A free block keeps its content, findable by
digest, until it is taken for another use; the block that was freed longest ago is taken first,
and blocks without findable content before all others.

INVARIANT: a block is in the free list exactly when nobody holds it; each digest names at most one
block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KvPool:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._holders = [0] * blocks
        self._digest_of: list[int | None] = [None] * blocks
        self._block_of: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used_ratio(self) -> float:
        return 1.0 - len(self._free) / self.blocks

    def match(self, digests: Sequence[int], blocks_max: int) -> list[int]:
        """The blocks of the longest kept prefix of `digests`, at most `blocks_max`."""
        found: list[int] = []
        block_of = self._block_of
        for digest in digests[:blocks_max]:
            block = block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, kept: Sequence[int], fresh: int) -> list[int] | None:
        """Hold the blocks `kept` and `fresh` more; the fresh ones, or None and no change when too
        few are free.
        """
        revived = sum(1 for block in kept if not self._holders[block])
        if fresh + revived > len(self._free):
            return None
        for block in kept:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1
        return [self._take() for _ in range(fresh)]

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest_of[block] = None
        self._holders[block] = 1
        return block

    def publish(self, block: int, digest: int) -> None:
        """The held `block` has content `digest` from now on. A block that already has this
        content stays the one.
        """
        if digest not in self._block_of and self._digest_of[block] is None:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Iterable[int]) -> None:
        """Give up a sequence's blocks, first to last; its tail is taken again before its head."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if self._digest_of[block] is None:
                    self._free.move_to_end(block, last=False)
