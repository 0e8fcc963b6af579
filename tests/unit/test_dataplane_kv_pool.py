"""The KV pool against an oracle that remembers everything: who holds a block, its content, when
it was freed.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.engines.simulated.kv_pool import KvPool

DIGESTS = st.integers(1, 8)


class KvPoolMachine(RuleBasedStateMachine):
    """The oracle keeps plain facts per block and searches them; it has no order of its own."""

    @initialize(blocks=st.integers(1, 6))
    def build(self, blocks: int) -> None:
        self.pool = KvPool(blocks)
        self.holders = dict.fromkeys(range(blocks), 0)
        self.content: dict[int, int] = {}
        self.freed_at = dict.fromkeys(range(blocks), 0)
        self.clock = 0
        self.held: list[list[int]] = []

    def free_blocks(self) -> list[int]:
        return [block for block, count in self.holders.items() if count == 0]

    def expected_match(self, digests: list[int]) -> list[int]:
        found = []
        for digest in digests:
            owners = [block for block, kept in self.content.items() if kept == digest]
            if not owners:
                break
            found.append(owners[0])
        return found

    @rule(digests=st.lists(DIGESTS, max_size=4, unique=True), fresh=st.integers(0, 4))
    def acquire(self, digests: list[int], fresh: int) -> None:
        kept = self.pool.match(digests, 4)
        assert kept == self.expected_match(digests)
        free = self.free_blocks()
        usable = [block for block in free if block not in kept]
        taken = self.pool.acquire(kept, fresh)
        if fresh > len(usable):
            assert taken is None
            return
        assert taken is not None
        assert len(taken) == fresh
        for block in taken:
            assert block in usable
            empty = [other for other in usable if other not in self.content]
            if empty:
                assert block in empty
            else:
                assert self.freed_at[block] == min(self.freed_at[other] for other in usable)
            usable.remove(block)
            self.content.pop(block, None)
        for block in [*kept, *taken]:
            self.holders[block] += 1
        self.held.append([*kept, *taken])

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), digest=DIGESTS)
    def publish(self, data: st.DataObject, digest: int) -> None:
        blocks = data.draw(st.sampled_from([held for held in self.held if held]))
        block = data.draw(st.sampled_from(blocks))
        self.pool.publish(block, digest)
        if block not in self.content:
            self.content[block] = digest

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.holders[block] -= 1
            self.clock += 1
            self.freed_at[block] = self.clock

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            free = len(self.free_blocks())
            assert self.pool.free == free
            assert abs(self.pool.used_ratio - (1 - free / len(self.holders))) < 1e-9


TestKvPool = KvPoolMachine.TestCase
