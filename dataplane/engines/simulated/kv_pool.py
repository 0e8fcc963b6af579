"""The KV cache as a pool of equal blocks with a prefix cache: who holds which block, and which
content is kept.

A block is held by any number of sequences, or free. A free block keeps its content, findable by
digest, until it is taken for another use; the block that was freed longest ago is taken first,
and blocks without content before all others. Of blocks with the same content the one that had it
first is found.

INVARIANT: a block is in the free list exactly when nobody holds it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class KvPool:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._holders = [0] * blocks
        self._digest_of: list[int | None] = [None] * blocks
        self._block_of: dict[int, int] = {}
        # Further blocks with content that another has already.
        self._twins: dict[int, list[int]] = {}
        # Told of each block that loses its content.
        self.on_evicted: Callable[[int], None] = _deaf
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used_ratio(self) -> float:
        return 1.0 - len(self._free) / self.blocks

    def digest_of(self, block: int) -> int | None:
        """What is kept in a block; None when that can not be found, or there is no such block."""
        return self._digest_of[block] if 0 <= block < self.blocks else None

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
            self._forget(block, digest)
            self._digest_of[block] = None
            self.on_evicted(digest)
        self._holders[block] = 1
        return block

    def _forget(self, block: int, digest: int) -> None:
        twins = self._twins.get(digest)
        if twins is None:
            del self._block_of[digest]
            return
        if self._block_of[digest] == block:
            self._block_of[digest] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[digest]

    def publish(self, block: int, digest: int) -> None:
        """The held `block` has content `digest` from now on."""
        if self._digest_of[block] is not None:
            return
        self._digest_of[block] = digest
        if digest in self._block_of:
            self._twins.setdefault(digest, []).append(block)
        else:
            self._block_of[digest] = block

    def clear(self) -> bool:
        """Forget all content; False, and no change, while any block is held."""
        if len(self._free) < self.blocks:
            return False
        self._digest_of = [None] * self.blocks
        self._block_of.clear()
        self._twins.clear()
        return True

    def contents(self) -> set[int]:
        """Digests that can be found."""
        return set(self._block_of)

    def release(self, blocks: Iterable[int]) -> None:
        """Give up a sequence's blocks, first to last; its tail is taken again before its head."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if self._digest_of[block] is None:
                    self._free.move_to_end(block, last=False)


def _deaf(_digest: int) -> None: ...
