"""The batcher: every answer is what its prompt alone would give, whatever shared the engine with
it.
"""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dataplane.engines.simulated.batching import Batcher, Finish, Sequence
from dataplane.engines.simulated.kv_pool import KvPool
from dataplane.engines.simulated.options import BLOCK_TOKENS
from dataplane.engines.simulated.text import TOKEN_BYTES, Speaker, token_count
from dataplane.engines.simulated.transfer import Pulled

MEAN = 12


def sequence(prompt: bytes, tokens_max: int = 8, *, ignores_end: bool = True) -> Sequence:
    return Sequence(
        tokens=bytearray(prompt),
        speaker=Speaker(prompt, 0, MEAN),
        salt=0,
        prompt_tokens=token_count(prompt),
        tokens_min=0,
        tokens_max=tokens_max,
        ignores_end=ignores_end,
    )


def batcher(blocks: int = 64, seats: int = 4, budget: int = 64) -> Batcher:
    return Batcher(KvPool(blocks), seats=seats, step_tokens_max=budget, has_prefix_cache=True)


def expected(prompt: bytes, tokens_max: int, *, ignores_end: bool) -> tuple[bytes, Finish]:
    """What the prompt is answered with on an engine of its own: drawn token by token, no batcher."""
    text, grown = b"", prompt
    for _ in range(tokens_max):
        word, wants_end = Speaker(grown, 0, MEAN).next()
        text, grown = text + word, grown + word
        if wants_end and not ignores_end:
            return text, Finish.STOP
    return text, Finish.LENGTH


@dataclass(frozen=True)
class Call:
    prompt: bytes
    tokens_max: int
    ignores_end: bool
    arrives: int
    leaves: int | None
    leaves_in_a_step: bool


# Prompts over two letters share prefixes often; blocks are as long as in the engine.
calls = st.builds(
    Call,
    prompt=st.lists(st.sampled_from([b"aaaa", b"bbbb"]), min_size=1, max_size=3).flatmap(
        lambda parts: st.integers(1, 24).map(lambda times: b"".join(parts) * times)
    ),
    tokens_max=st.integers(1, 20),
    ignores_end=st.booleans(),
    arrives=st.integers(0, 12),
    leaves=st.none() | st.integers(0, 20),
    leaves_in_a_step=st.booleans(),
)


@given(
    st.lists(calls, min_size=1, max_size=6),
    st.integers(6, 14),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_answers_do_not_depend_on_company(
    calls: list[Call], blocks: int, seats: int, budget: int
) -> None:
    pool = KvPool(blocks)
    engine = Batcher(pool, seats=seats, step_tokens_max=budget, has_prefix_cache=True)
    # One call alone fits, as the engine checks before it takes a call.
    calls = [c for c in calls if token_count(c.prompt) + c.tokens_max <= blocks * BLOCK_TOKENS]
    live: list[tuple[Call, Sequence]] = []
    gone: list[Sequence] = []
    tick = 0
    while tick <= 20 or engine.in_flight:
        for call in calls:
            if call.arrives == tick:
                one = sequence(call.prompt, call.tokens_max, ignores_end=call.ignores_end)
                live.append((call, one))
                engine.add(one)
        leaving = [(c, one) for c, one in live if c.leaves == tick and one.finish is None]
        for call, one in leaving:
            if not call.leaves_in_a_step:
                engine.remove(one)
                gone.append(one)
        step, pulls = engine.plan()
        assert not pulls
        assert len(engine.running) <= seats
        if step is None:
            assert not engine.in_flight
        else:
            assert 0 < sum(tokens for _, tokens in step.work) == step.tokens <= budget
            assert all(tokens > 0 for _, tokens in step.work)
            for call, one in leaving:
                if call.leaves_in_a_step:
                    engine.remove(one)
                    gone.append(one)
            engine.complete(step)
        tick += 1
        assert tick < 20_000
    for call, one in live:
        if one in gone:
            assert one.finish is None
            continue
        text, finish = expected(call.prompt, call.tokens_max, ignores_end=call.ignores_end)
        assert (bytes(one.text), one.finish) == (text, finish)
        assert one.cached_tokens < token_count(call.prompt)
        assert one.cached_tokens % BLOCK_TOKENS == 0
    assert pool.free == blocks


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = batcher(budget=40)
    long = sequence(b"aaaa" * 100)
    engine.add(long)
    sizes = []
    while long.generated == 0:
        step, _ = engine.plan()
        assert step is not None
        sizes.append((step.tokens, step.attention_pairs))
        engine.complete(step)
    assert [tokens for tokens, _ in sizes] == [40, 40, 20]
    # Chunks attend to as many pairs as the whole prompt at once: n^2 / 2.
    assert sum(pairs for _, pairs in sizes) == 100 * 100 / 2


def test_decoding_goes_before_new_prompts() -> None:
    engine = batcher(budget=17)
    first = sequence(b"aaaa" * 16)
    engine.add(first)
    step, _ = engine.plan()
    engine.complete(step)
    engine.add(sequence(b"bbbb" * 30))
    step, _ = engine.plan()
    assert step is not None
    assert [(one is first, tokens) for one, tokens in step.work] == [(True, 1), (False, 16)]
    assert step.kv_tokens == 16


def test_the_youngest_gives_way_and_starts_again() -> None:
    engine = batcher(blocks=4, seats=2)
    old, young = sequence(b"aaaa" * 31, 20), sequence(b"bbbb" * 31, 20)
    engine.add(old)
    engine.add(young)
    while engine.counters.preemptions == 0:
        step, _ = engine.plan()
        assert step is not None
        engine.complete(step)
    assert engine.running == [old]
    assert list(engine.waiting) == [young]
    assert young.computed == 0
    assert young.generated > 0


def test_who_waits_holds_no_block_that_who_runs_needs() -> None:
    engine = batcher(blocks=4, seats=2)
    old, late = sequence(b"aaaa" * 40, 24), sequence(b"bbbb" * 20, 4)
    engine.add(old)
    step, _ = engine.plan()
    assert step is not None
    engine.complete(step)
    engine.add(late)
    while engine.in_flight:
        step, _ = engine.plan()
        assert step is not None
        engine.complete(step)
    assert engine.counters.preemptions == 0
    assert (old.finish, late.finish) == (Finish.LENGTH, Finish.LENGTH)


def test_a_kept_prefix_is_not_computed_again() -> None:
    engine = batcher()
    prompt = b"aaaa" * 48
    for _ in range(2):
        one = sequence(prompt, 1)
        engine.add(one)
        step, _ = engine.plan()
        assert step is not None
        engine.complete(step)
    # Two of three blocks: the last token is always computed.
    assert (one.cached_tokens, step.tokens) == (32, 16)


def test_pulled_prompts_leave_one_token_to_compute() -> None:
    engine = batcher()
    one = sequence(b"aaaa" * 40)
    one.is_remote = True
    engine.add(one)
    step, pulls = engine.plan()
    assert (step, pulls) == (None, [one])
    assert engine.pool.free == 64 - 3
    engine.pulled(one, Pulled.COMPLETE)
    step, _ = engine.plan()
    assert step is not None
    assert step.tokens == 1


def test_a_failed_pull_computes_the_prompt() -> None:
    engine = batcher()
    one = sequence(b"aaaa" * 40)
    one.is_remote = True
    engine.add(one)
    engine.plan()
    engine.pulled(one, Pulled.NOTHING)
    step, _ = engine.plan()
    assert step is not None
    assert step.tokens == 40


def test_what_was_pulled_wrongly_is_answered_from_until_it_is_computed() -> None:
    """As in vLLM, where a block's name is the prompt that asked for it, whatever came."""
    truth = spoken(batcher(), sequence(b"aaaa" * 40))
    engine = batcher()
    pulled = sequence(b"aaaa" * 40)
    pulled.is_remote = True
    engine.add(pulled)
    engine.plan()
    engine.pulled(pulled, Pulled.WRONG)
    assert spoken(engine, pulled) != truth
    cached = sequence(b"aaaa" * 40)
    engine.add(cached)
    assert spoken(engine, cached) != truth
    assert cached.cached_tokens == 32
    # Other work takes the blocks; then the prompt is computed, and right again.
    filler = sequence(b"bbbb" * (16 * 63))
    engine.add(filler)
    spoken(engine, filler)
    fresh = sequence(b"aaaa" * 40)
    engine.add(fresh)
    assert spoken(engine, fresh) == truth
    assert fresh.cached_tokens == 0
    found = sequence(b"aaaa" * 40)
    engine.add(found)
    assert spoken(engine, found) == truth
    assert found.cached_tokens == 32


def spoken(engine: Batcher, one: Sequence) -> bytes:
    """What a sequence says to its end."""
    if not engine.in_flight:
        engine.add(one)
    while one.finish is None:
        step, _ = engine.plan()
        assert step is not None
        engine.complete(step)
    return bytes(one.text)


def test_words_are_one_token() -> None:
    word, _ = Speaker(b"", 0, MEAN).next()
    assert len(word) == TOKEN_BYTES
