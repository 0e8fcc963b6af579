"""The prefix index of engines that tell what they hold: sessions vouch, and what they lose is gone."""

from controlplane.scheduler.prefix_index import SESSIONS_MAX, PrefixIndex

BLOCK = 16
# Boundaries, the last of them the prompt's end, and the tokens up to them.
PROMPT = (101, 102, 103, -104)
TOKENS = (30, 64, 100, 130)


def followed(capacity: int = 10_000) -> PrefixIndex:
    index = PrefixIndex()
    index.set_capacity(0, capacity)
    index.follow(0, BLOCK)
    return index


def ask(index: PrefixIndex, session: str, prompt=PROMPT, tokens=TOKENS) -> None:
    index.routed(0, prompt, tokens[-1], tokens, session)


def cached(index: PrefixIndex, prompt=PROMPT, tokens=TOKENS) -> int:
    return index.cached(prompt, tokens, tokens[-1] - 1).get(0, 0)


def sizes(index: PrefixIndex) -> tuple[int, ...]:
    kept = index._engines[0]
    return (
        len(index), len(index._holders), len(index._sessions), len(kept.first), kept.first_tokens,
        len(kept.links), len(kept.voucher), len(kept.reach), len(kept.strays), len(kept.doubted),
    )  # fmt: skip


def test_whole_blocks_count_and_the_last_token_is_always_computed():
    index = followed()
    ask(index, "a")
    assert cached(index) == 128
    # A prompt of whole blocks only finds all but its last.
    whole = (30, 64, 100, 128)
    ask(index, "b", (1, 2, 3, -4), whole)
    assert cached(index, (1, 2, 3, -4), whole) == 112


def test_what_a_session_loses_goes_and_what_it_keeps_stays():
    index = followed()
    ask(index, "a")
    index.served(0, "a", 130, 40, 0)
    index.told(0, {"a": 160})
    assert cached(index) == 128
    goes_on = (*PROMPT[:3], PROMPT[3], 105, -106)
    further = (*TOKENS, 200, 250)
    # What the answer took is found by whoever goes on from it.
    assert cached(index, goes_on, further) == 160
    index.told(0, {"a": 96})
    assert cached(index, PROMPT[:3], TOKENS[:3]) == 96, "the boundary lies in a block that is begun"
    index.told(0, {"a": 80})
    assert cached(index) == 80
    assert cached(index, (101, 102, 107), (30, 64, 90)) == 64
    index.told(0, {"a": 0})
    assert cached(index) == 0
    index.settle()
    index.settle()
    assert sizes(index) == (0,) * 10


def test_of_two_sessions_with_one_beginning_each_loses_its_own():
    index = followed()
    ask(index, "a")
    other, lies = (101, 102, 203, -204), (30, 64, 96, 140)
    ask(index, "b", other, lies)
    index.told(0, {"a": 128, "b": 128})
    index.told(0, {"a": 64})
    assert cached(index) == 64
    assert cached(index, other, lies) == 128
    # What one loses and the other has stored again is taken in that order.
    index.told(0, {"b": 0, "a": 0})
    ask(index, "c", other, lies)
    index.told(0, {"c": 128})
    assert cached(index, other, lies) == 128
    assert cached(index) == 64


def test_an_answer_that_does_not_come_back_is_not_counted_on():
    index = followed()
    said, lies = (1, -2), (40, 48)
    ask(index, "a", said, lies)
    index.served(0, "a", 48, 200, 0)
    index.told(0, {"a": 240})
    then, after = (1, -2, 3, -4), (40, 48, 60, 72)
    # It was counted on, as far as the prompt goes, and the engine found the first prompt only.
    assert cached(index, then, after) == 64
    ask(index, "b", then, after)
    index.served(0, "b", 72, 200, 48)
    index.told(0, {"b": 264})
    later, lie_later = (1, -2, 3, -4, 5, -6), (40, 48, 60, 72, 90, 100)
    assert cached(index, later, lie_later) == 64
    ask(index, "c", later, lie_later)
    index.served(0, "c", 100, 20, 96)
    # This one had it: the next is thought to have it too.
    index.told(0, {"c": 112})
    last, lie_last = (*later, 7, -8), (*lie_later, 150, 170)
    assert cached(index, last, lie_last) == 112


def test_a_call_that_failed_leaves_only_what_was_told_of_it():
    index = followed()
    ask(index, "a")
    index.told(0, {"a": 64})
    index.unserved("a")
    assert cached(index) == 64
    ask(index, "b", (5, -6), (20, 30))
    index.unserved("b")
    assert cached(index, (5, -6), (20, 30)) == 0


def test_what_is_guessed_goes_with_what_is_younger_and_known_to_be_gone():
    index = PrefixIndex()
    index.set_capacity(0, 10_000)
    index.routed(0, (7, 8), 64, (32, 64))
    index.follow(0, BLOCK)
    ask(index, "a")
    index.routed(0, (9,), 32, (32,))
    index.told(0, {"a": 128})
    index.told(0, {"a": 80})
    assert index.match((8,)) == {}, "older than what has gone"
    assert index.match((9,)) == {0: 1}, "younger: it may be there"


def test_what_is_told_again_stands_and_the_rest_does_not():
    index = followed()
    ask(index, "a")
    ask(index, "b", (5, 6, -7), (20, 40, 60))
    index.told(0, {"a": 128, "b": 48})
    index.doubt(0)
    index.told(0, {"b": 48})
    index.undoubt(0)
    assert cached(index) == 0
    assert cached(index, (5, 6, -7), (20, 40, 60)) == 48


def test_what_is_told_stays_beyond_the_capacity_that_is_guessed():
    index = followed(capacity=140)
    ask(index, "a")
    index.told(0, {"a": 128})
    ask(index, "b", (5, 6, -7), (20, 40, 60))
    assert cached(index) == 128
    # Nobody tells any more: it is a guess again, and is bound as one.
    index.unfollow(0)
    index.routed(0, (11,), 130, (130,))
    assert cached(index) == 0


def test_hits_correct_nothing_where_the_engine_tells():
    index = followed(capacity=1_000)
    ask(index, "a")
    index.told(0, {"a": 128})
    for _ in range(9):
        index.observed(
            0,
            predicted_tokens=9_000,
            cached_tokens=0,
            prompt_tokens=9_000,
            completion_tokens=5_000,
        )
    assert cached(index) == 128


def test_an_engine_that_was_never_declared_or_is_not_followed_is_not_told_of():
    index = PrefixIndex()
    for tell in (
        lambda: index.follow(3, 16),
        lambda: index.told(3, {"a": 1}),
        lambda: index.doubt(3),
        lambda: index.undoubt(3),
        lambda: index.unfollow(3),
        lambda: index.served(3, "a", 1, 1),
        lambda: index.unserved("a"),
        index.settle,
    ):
        tell()
    index.set_capacity(3, 100)
    index.routed(3, (1, 2), 32, (16, 32), "a")
    index.told(3, {"a": 16})
    assert index.match((1, 2)) == {3: 2}


def test_sessions_of_which_nothing_is_heard_are_bounded():
    index = followed(capacity=10**9)
    for each in range(SESSIONS_MAX + 500):
        ask(index, f"s{each}", (each + 1, -each - 2), (20, 40))
    assert len(index._sessions) == SESSIONS_MAX


def test_memory_returns_to_where_it_was_after_a_thousand_cycles():
    index = followed(capacity=4_000)
    before = sizes(index)
    for cycle in range(1_000):
        prompt = (7, cycle * 10 + 1_000, cycle * 10 + 1_001, -cycle - 5_000)
        session = f"s{cycle}"
        ask(index, session, prompt)
        if cycle % 7:
            index.served(0, session, 128 + cycle % 5, 20, 0)
        else:
            index.unserved(session)
        index.told(0, {session: 144})
        match cycle % 5:
            case 0 | 1:
                index.told(0, {session: 64})
                index.told(0, {session: 0})
            case 2:
                index.forget(0)
                index.follow(0, BLOCK)
            case 3:
                index.doubt(0)
                index.undoubt(0)
            case _:
                # Another engine takes the place of this one.
                index.forget(0)
                index.set_capacity(0, 4_000)
                index.follow(0, BLOCK)
        index.settle()
    index.settle()
    index.settle()
    assert sizes(index) == before
    assert index._holders == {}


def test_a_boundary_in_a_block_that_is_begun_stands_with_the_block_before():
    index = followed()
    ask(index, "a")
    index.served(0, "a", 130, 1, 0)
    index.told(0, {"a": 96})
    index.settle()
    index.settle()
    assert cached(index, PROMPT[:3], TOKENS[:3]) == 96
    index.told(0, {"a": 80})
    assert cached(index, PROMPT[:3], TOKENS[:3]) == 64
