"""The prefix index against an oracle that keeps whole prompts and no digests."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.scheduler.prefix_index import (
    CAPACITY_RATIO_MIN,
    GRID,
    HOLDERS_ENOUGH,
    HOLDERS_SEEN_MAX,
    KIB,
    MEASURED_MAX,
    PrefixIndex,
    chain,
)

ENGINES = 3
# A prompt is a path in a tiny tree: every prefix of the tuple is one chunk chain.
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def digests(prompt):
    """One number per prefix of the prompt, equal only for equal prefixes."""
    return tuple(hash(prompt[: depth + 1]) & 0xFFFF_FFFF for depth in range(len(prompt)))


def sizes_of(each):
    """Tokens up to each of four boundaries, of chunks that are not all of one size."""
    return tuple(each * (depth + 1) + depth // 2 for depth in range(4))


class IndexAgainstPrompts(RuleBasedStateMachine):
    """The oracle holds (prefix, size) pairs, latest used last, and cuts the list where it is too long."""

    @initialize(capacities=st.lists(st.integers(0, 12), min_size=ENGINES, max_size=ENGINES))
    def begin(self, capacities):
        self.index = PrefixIndex()
        self.capacities = capacities
        self.used = [[] for _ in range(ENGINES)]
        for engine, tokens in enumerate(capacities):
            self.index.set_capacity(engine, tokens)

    def use(self, engine, name, tokens):
        kept = [entry for entry in self.used[engine] if entry[0] != name]
        size = next((entry[1] for entry in self.used[engine] if entry[0] == name), tokens)
        self.used[engine] = [*kept, (name, size)]

    def cut(self, engine):
        while sum(size for _, size in self.used[engine]) > self.capacities[engine]:
            del self.used[engine][0]

    def depth(self, engine, prompt):
        names = {name for name, _ in self.used[engine]}
        return max((n for n in range(len(prompt) + 1) if prompt[:n] in names), default=0)

    @rule(engine=st.integers(0, ENGINES - 1), prompt=PROMPT, each=st.integers(0, 3))
    def routed(self, engine, prompt, each):
        tokens = sizes_of(each)[: len(prompt)]
        for size in range(len(prompt), 0, -1):
            before = tokens[size - 2] if size > 1 else 0
            self.use(engine, prompt[:size], tokens[size - 1] - before)
        self.cut(engine)
        self.index.routed(engine, digests(prompt), tokens[-1], tokens)

    @rule(engine=st.integers(0, ENGINES - 1), tokens=st.integers(1, 5))
    def answered(self, engine, tokens):
        """An answer takes room and is never found. Nothing is reported of hits."""
        self.use(engine, object(), tokens)
        self.cut(engine)
        self.index.observed(
            engine, predicted_tokens=9, cached_tokens=0, prompt_tokens=9, completion_tokens=tokens
        )

    @rule(engine=st.integers(0, ENGINES - 1))
    def forget(self, engine):
        self.used[engine].clear()
        self.index.forget(engine)

    @rule(engine=st.integers(0, ENGINES - 1), tokens=st.integers(0, 12))
    def resize(self, engine, tokens):
        self.capacities[engine] = tokens
        self.cut(engine)
        self.index.set_capacity(engine, tokens)

    @rule(prompt=PROMPT, each=st.integers(1, 3), most=st.integers(1, 20))
    def look(self, prompt, each, most):
        expected = {engine: self.depth(engine, prompt) for engine in range(ENGINES)}
        expected = {engine: depth for engine, depth in expected.items() if depth}
        assert self.index.match(digests(prompt)) == expected
        tokens = sizes_of(each)[: len(prompt)]
        found = self.index.cached(digests(prompt), tokens, most)
        assert found == {engine: min(most, tokens[depth - 1]) for engine, depth in expected.items()}

    @invariant()
    def what_is_counted_is_what_is_kept(self):
        if hasattr(self, "index"):
            assert self.index.match((1, 2, 3)) == {}
            assert len(self.index) == sum(map(len, self.used))
            for engine, kept in enumerate(self.index._engines):
                assert kept.first_tokens == sum(size for _, size in self.used[engine])


TestIndexAgainstPrompts = IndexAgainstPrompts.TestCase
TestIndexAgainstPrompts.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 2), PROMPT), max_size=60), st.integers(1, 6))
def test_memory_never_passes_its_bound(steps, holdings_max):
    index = PrefixIndex(holdings_max)
    for engine in range(3):
        index.set_capacity(engine, 1_000, second_tokens=engine)
    for engine, prompt in steps:
        index.routed(engine, digests(prompt), len(prompt))
        index.observed(
            engine, predicted_tokens=0, cached_tokens=0, prompt_tokens=1, completion_tokens=1
        )
        assert len(index) <= holdings_max
        kept = [1 if isinstance(held, int) else len(held) for held in index._holders.values()]
        answers = sum(key >= 1 << 64 for each in index._engines for key in each.first)
        assert sum(kept) + answers == len(index)


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


def test_of_many_holders_each_prompt_sees_some_and_all_are_seen():
    index = PrefixIndex()
    for engine in range(200):
        index.set_capacity(engine, 1_000)
        index.routed(engine, (7,), 10)
    seen = [set(index.match((7, 1_000 + prompt))) for prompt in range(200)]
    assert {len(each) for each in seen} == {HOLDERS_SEEN_MAX}
    assert set().union(*seen) == set(range(200))


def test_an_engine_that_is_not_declared_is_ignored():
    index = PrefixIndex()
    index.routed(7, (1, 2), 10)
    index.forget(7)
    index.observed(7, predicted_tokens=1, cached_tokens=0, prompt_tokens=2, completion_tokens=3)
    assert index.match((1, 2)) == {}


def test_a_slower_tier_counts_in_part():
    index = PrefixIndex()
    index.set_capacity(0, 40, second_tokens=60, second_ratio=0.25)
    index.routed(0, (1, 2), 40, (20, 40))
    index.routed(0, (3,), 20, (20,))
    # The deeper chunk has moved to the second tier: 20 tokens, and a quarter of 20.
    assert index.cached((1, 2), (20, 40), 99) == {0: 25}
    index.routed(0, (4, 5), 40, (20, 40))
    assert index.cached((1, 2), (20, 40), 99) == {0: 10}
    index.routed(0, (1, 2), 40, (20, 40))
    assert index.cached((1, 2), (20, 40), 99) == {0: 40}
    kept = index._engines[0]
    assert kept.second_tokens == sum(kept.second.values())
    for other in range(6, 14, 2):
        index.routed(0, (other, other + 1), 40, (20, 40))
    assert index.cached((1, 2), (20, 40), 99) == {}


def observe(index, predicted, cached, prompt=10_000):
    index.observed(
        0,
        predicted_tokens=predicted,
        cached_tokens=cached,
        prompt_tokens=prompt,
        completion_tokens=0,
    )


def test_fewer_hits_than_predicted_shrink_what_the_engine_is_taken_to_keep():
    index = PrefixIndex()
    index.set_capacity(0, 1_000)
    for prompt in range(10):
        index.routed(0, (prompt,), 100, (100,))
    assert index.match((0,))
    observe(index, 10_000, 5_000)
    observe(index, 10_000, 5_000)
    assert not index.match((0,))
    assert index.match((1,))
    for _ in range(200):
        observe(index, 10_000, 5_000)
    assert not index.match((8,))
    assert index.match((9,)), f"never below {CAPACITY_RATIO_MIN} of what the engine says"
    for _ in range(60):
        observe(index, 0, 5_000)
    for prompt in range(2):
        index.routed(0, (prompt,), 100, (100,))
    assert index.match((9,)), "more hits than predicted widen it again"


def test_an_engine_that_tells_no_hits_is_not_corrected():
    index = PrefixIndex()
    index.set_capacity(0, 100)
    index.routed(0, (1,), 100, (100,))
    for _ in range(9):
        observe(index, 10_000, 0)
    assert index.match((1,))


def test_two_calls_that_find_nothing_mean_an_emptied_cache():
    index = PrefixIndex()
    index.set_capacity(0, 1_000)
    index.routed(0, (1,), 100, (100,))
    observe(index, 100, 100)
    observe(index, 10_000, 0)
    observe(index, 9_000, 9_000)
    observe(index, 10_000, 0)
    assert index.match((1,)), "one may have lost its own prefix only"
    observe(index, 10_000, 0)
    assert not index.match((1,))


@given(st.binary(max_size=6_000), st.binary(max_size=6_000), st.integers(0, 2**64 - 1))
@settings(max_examples=100)
def test_a_prompt_that_goes_on_keeps_its_digests(begin, rest, salt):
    digests_before, boundaries_before = chain(begin, salt)
    digests_after, boundaries_after = chain(begin + rest, salt)
    assert digests_after[: len(digests_before)] == digests_before
    assert boundaries_after[: len(boundaries_before)] == boundaries_before
    assert len(digests_before) == len(begin) // KIB if len(begin) <= 8 * KIB else True


@given(
    st.lists(st.binary(min_size=1, max_size=3_000), min_size=1, max_size=6), st.integers(0, 2**64)
)
@settings(max_examples=100)
def test_the_end_of_an_earlier_prompt_is_found_in_one_that_goes_on(parts, salt):
    """Each step of a conversation finds all of the step before it, to the byte."""
    index = PrefixIndex()
    index.set_capacity(0, 10**6)
    raw = b""
    for part in parts:
        before, raw = raw, raw + part
        prefix, boundaries = index.chain(raw, salt)
        assert list(boundaries) == sorted(set(boundaries))
        assert boundaries[-1] == len(raw)
        assert len(prefix) == len(boundaries)
        found = index.cached(prefix, boundaries, 10**6)
        assert found.get(0, 0) == len(before)
        index.routed(0, prefix, len(raw), boundaries)
        # However many ends there were, what is kept adds up to the prompt, no byte twice.
        kept = index._engines[0]
        assert kept.first_tokens == sum(kept.first.values()) == len(raw)


def test_another_prompt_of_the_same_length_is_no_earlier_one():
    index = PrefixIndex()
    index.set_capacity(0, 10**6)
    prefix, boundaries = index.chain(b"a" * 1_500, 1)
    index.routed(0, prefix, 1_500, boundaries)
    for raw, salt in ((b"a" * 1_400 + b"b" * 400, 1), (b"b" * 1_800, 1), (b"a" * 1_800, 2)):
        prefix, boundaries = index.chain(raw, salt)
        assert index.cached(prefix, boundaries, 10**6).get(0, 0) == (
            1_024 if raw[:1_024] == b"a" * 1_024 and salt == 1 else 0
        )


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


def test_what_an_engine_counted_is_known_of_all_that_goes_on_from_there():
    index = PrefixIndex()
    first = b"a" * 3_000
    prefix, boundaries = index.chain(first, 7)
    # Four bytes a token are thought; the engine counts six.
    assert index.tokens_at(prefix, boundaries, 3_000, 750)[0] == 750
    index.measure(prefix, 500)
    longer = first + b"b" * 1_200
    prefix, boundaries = index.chain(longer, 7)
    total, told = index.tokens_at(prefix, boundaries, 4_200, 1_050)
    assert total == 500 + 300
    assert told[boundaries.index(3_000)] == 500
    assert told[-1] == total
    assert list(told) == sorted(told)
    other, boundaries = index.chain(b"c" * 3_000, 7)
    assert index.tokens_at(other, boundaries, 3_000, 750)[0] == 750


def test_measured_ends_are_bounded_and_nothing_is_learned_of_nothing():
    index = PrefixIndex()
    index.measure((), 5)
    index.measure((5,), 5)
    index.measure((-5,), 0)
    assert not index._measured
    for number in range(MEASURED_MAX + 3):
        index.measure((-1 - number,), 1)
    assert len(index._measured) == MEASURED_MAX
    assert -1 not in index._measured
