"""The response cache and its flights against simple models of them."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.admission.response_cache import (
    OVERHEAD_BYTES,
    Flights,
    Place,
    ResponseCache,
    StoredAnswer,
)
from controlplane.domain.outcome import Usage

USAGE = Usage(1, 1, 1, is_estimated=False)
KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])

Kept = tuple[bytes, int, int]


@given(
    room=st.integers(0, 5),
    steps=st.lists(
        st.tuples(st.sampled_from(["keep", "find"]), KEYS, st.integers(0, 3), st.integers(0, 4))
    ),
)
def test_the_cache_is_a_bounded_list_in_order_of_use(
    room: int, steps: list[tuple[str, bytes, int, int]]
) -> None:
    unit = OVERHEAD_BYTES
    cache = ResponseCache(bytes_max=room * unit + 3, answer_bytes_max=2)
    # The oracle: (key, size, expiry), least recently used first, searched from end to end.
    model: list[Kept] = []
    for now_ms, (step, key, size, lasts_ms) in enumerate(steps):
        mine = [kept for kept in model if kept[0] == key]
        if step == "keep":
            model = [kept for kept in model if kept[0] != key]
            fits = size <= 2 and size + unit <= room * unit + 3
            while fits and sum(kept[1] + unit for kept in model) + size + unit > room * unit + 3:
                model.pop(0)
            if fits:
                model.append((key, size, now_ms + lasts_ms))
            answer = StoredAnswer(b"x" * size, USAGE, now_ms + lasts_ms)
            assert cache.keep(key, answer) is fits
        else:
            found = cache.find(key, now_ms)
            model = [kept for kept in model if kept[0] != key]
            if mine and mine[0][2] > now_ms:
                assert found is not None
                assert (len(found.body), found.expires_ms) == mine[0][1:]
                model.append(mine[0])
            else:
                assert found is None
        assert len(cache) == len(model)
        assert cache.bytes == sum(kept[1] + unit for kept in model)


@given(
    waiters_max=st.integers(0, 3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "land"]), st.sampled_from([b"k", b"l"]),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
)  # fmt: skip
def test_there_is_one_leader_as_long_as_anybody_wants_the_answer(
    waiters_max: int, steps: list[tuple[str, bytes, int]]
) -> None:
    flights: Flights[int] = Flights(waiters_max=waiters_max)
    lines: dict[bytes, list[int]] = {b"k": [], b"l": []}
    leads: dict[bytes, int | None] = {b"k": None, b"l": None}
    for step, key, who in steps:
        line = lines[key]
        if step == "join" and who not in line:
            place = flights.join(key, who)
            if not line:
                assert place is Place.LEADS
                leads[key] = who
            else:
                assert place is (Place.WAITS if len(line) <= waiters_max else Place.ALONE)
            if place is not Place.ALONE:
                line.append(who)
        elif step == "leave":
            told = flights.leave(key, who)
            if who in line:
                line.remove(who)
            if leads[key] == who:
                leads[key] = line[0] if line else None
                assert told == leads[key]
            else:
                assert told is None
        elif step == "land":
            told_all = flights.land(key, who)
            if line and leads[key] == who:
                assert told_all == tuple(line[1:])
                line.clear()
                leads[key] = None
            else:
                assert told_all == ()
        # Whoever was told to lead is the head of the line: nobody waits for nobody.
        for name, waiting in lines.items():
            assert leads[name] == (waiting[0] if waiting else None)
        assert len(flights) == sum(1 for waiting in lines.values() if waiting)
