"""The prefix index against an oracle that keeps whole prompts and no digests."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.scheduler.prefix_index import GRID, HOLDERS_ENOUGH, KIB, PrefixIndex, chain

ENGINES = 3
# A prompt is a path in a tiny tree: every prefix of the tuple is one chunk chain.
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def digests(prompt):
    """One number per prefix of the prompt, equal only for equal prefixes."""
    return tuple(hash(prompt[: depth + 1]) & 0xFFFF_FFFF for depth in range(len(prompt)))


class IndexAgainstPrompts(RuleBasedStateMachine):
    @initialize(capacities=st.lists(st.integers(0, 12), min_size=ENGINES, max_size=ENGINES))
    def begin(self, capacities):
        self.index = PrefixIndex()
        self.capacities = capacities
        self.taken_in = [0] * ENGINES
        self.last_used = [{} for _ in range(ENGINES)]  # prefix -> tokens taken in up to then
        for engine, tokens in enumerate(capacities):
            self.index.set_capacity(engine, tokens)

    def depth(self, engine, prompt):
        for size in range(len(prompt), 0, -1):
            used = self.last_used[engine].get(prompt[:size])
            if used is not None and self.taken_in[engine] - used <= self.capacities[engine]:
                return size
        return 0

    @rule(engine=st.integers(0, ENGINES - 1), prompt=PROMPT, each=st.integers(0, 3))
    def routed(self, engine, prompt, each):
        self.taken_in[engine] += each * (len(prompt) - self.depth(engine, prompt))
        for size in range(1, len(prompt) + 1):
            self.last_used[engine][prompt[:size]] = self.taken_in[engine]
        self.index.routed(engine, digests(prompt), each * len(prompt))

    @rule(engine=st.integers(0, ENGINES - 1))
    def forget(self, engine):
        self.last_used[engine].clear()
        self.taken_in[engine] += self.capacities[engine] + 1
        self.index.forget(engine)

    @rule(prompt=PROMPT)
    def match(self, prompt):
        expected = {engine: self.depth(engine, prompt) for engine in range(ENGINES)}
        found = self.index.match(digests(prompt))
        assert found == {engine: depth for engine, depth in expected.items() if depth}

    @invariant()
    def unknown_prompts_match_nothing(self):
        if hasattr(self, "index"):
            assert self.index.match((1, 2, 3)) == {}


TestIndexAgainstPrompts = IndexAgainstPrompts.TestCase
TestIndexAgainstPrompts.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 2), PROMPT), max_size=60), st.integers(1, 6))
def test_memory_never_passes_its_bound(steps, holdings_max):
    index = PrefixIndex(holdings_max)
    for engine in range(3):
        index.set_capacity(engine, 1_000)
    for engine, prompt in steps:
        index.routed(engine, digests(prompt), len(prompt))
        assert len(index) <= holdings_max
        kept = [1 if isinstance(held, int) else len(held) for held in index._holders.values()]
        assert sum(kept) == len(index)


def test_the_deepest_holders_are_found_and_the_walk_ends():
    index = PrefixIndex()
    prefix = tuple(range(10, 20))
    for engine in range(HOLDERS_ENOUGH + 5):
        index.set_capacity(engine, 1_000)
    for engine in range(HOLDERS_ENOUGH):
        index.routed(engine, prefix, 10)
    index.routed(HOLDERS_ENOUGH, prefix[:2], 10)
    assert index.match(prefix) == dict.fromkeys(range(HOLDERS_ENOUGH), 10)
    assert index.match(prefix[:2]) == dict.fromkeys(range(HOLDERS_ENOUGH + 1), 2)


def test_an_engine_that_is_not_declared_is_ignored():
    index = PrefixIndex()
    index.routed(7, (1, 2), 10)
    index.forget(7)
    assert index.match((1, 2)) == {}


@given(st.binary(max_size=6_000), st.binary(max_size=6_000), st.integers(0, 2**64 - 1))
@settings(max_examples=100)
def test_a_prompt_that_goes_on_keeps_its_digests(begin, rest, salt):
    digests_before, boundaries_before = chain(begin, salt)
    digests_after, boundaries_after = chain(begin + rest, salt)
    assert digests_after[: len(digests_before)] == digests_before
    assert boundaries_after[: len(boundaries_before)] == boundaries_before
    assert len(digests_before) == len(begin) // KIB if len(begin) <= 8 * KIB else True


@given(st.integers(0, 5_999), st.integers(0, 2**64 - 1))
def test_a_changed_byte_changes_every_digest_from_there_on(position, salt):
    raw = bytes(6_000)
    changed = raw[:position] + b"x" + raw[position + 1 :]
    before, boundaries = chain(raw, salt)
    after, _ = chain(changed, salt)
    for one, other, end in zip(before, after, boundaries, strict=True):
        assert (one == other) == (end <= position)
    assert not set(before) & set(chain(raw, salt ^ 1)[0])


def test_the_grid_is_bounded_and_fine():
    gaps = [end - begin for begin, end in zip((0, *GRID), GRID, strict=False)]
    assert len(GRID) < 100
    assert gaps[0] == KIB
    for begin, gap in zip((0, *GRID), gaps, strict=False):
        assert gap % KIB == 0
        assert KIB <= gap <= max(KIB, begin // 8)
