"""Stored answers and their bounds; who makes an answer and who waits for it."""

from controlplane.admission.response_cache import (
    OVERHEAD_BYTES,
    Flights,
    Place,
    ResponseCache,
    StoredAnswer,
)
from controlplane.domain.outcome import Usage

USAGE = Usage(4, 4, 2, is_estimated=False)


def stored(size: int = 10, expires_ms: int = 1_000) -> StoredAnswer:
    return StoredAnswer(b"x" * size, USAGE, expires_ms)


def test_an_answer_is_found_until_the_instant_it_expires() -> None:
    cache = ResponseCache(bytes_max=10_000, answer_bytes_max=100)
    kept = stored(expires_ms=50)
    assert cache.keep(b"a", kept)
    assert cache.find(b"a", 49) is kept
    assert cache.find(b"b", 49) is None
    assert cache.find(b"a", 50) is None
    assert (len(cache), cache.bytes) == (0, 0)


def test_the_answer_not_used_for_longest_goes_first() -> None:
    cache = ResponseCache(bytes_max=3 * (10 + OVERHEAD_BYTES), answer_bytes_max=100)
    for key in (b"a", b"b", b"c"):
        cache.keep(key, stored())
    assert cache.find(b"a", 0) is not None
    cache.keep(b"d", stored())
    assert [cache.find(key, 0) is not None for key in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        True,
        True,
    ]


def test_a_later_answer_replaces_the_earlier_one_and_its_bytes() -> None:
    cache = ResponseCache(bytes_max=10_000, answer_bytes_max=100)
    cache.keep(b"a", stored(100))
    cache.keep(b"a", stored(1))
    assert (len(cache), cache.bytes) == (1, 1 + OVERHEAD_BYTES)
    # One that can not be kept is not a reason to go on giving the old one.
    assert not cache.keep(b"a", stored(101))
    assert (len(cache), cache.bytes) == (0, 0)


def test_an_answer_larger_than_all_room_is_not_kept() -> None:
    cache = ResponseCache(bytes_max=600, answer_bytes_max=1_000)
    assert cache.keep(b"a", stored(88))
    assert not cache.keep(b"b", stored(89))
    assert cache.find(b"a", 0) is not None


def test_the_first_leads_and_the_others_wait_in_order() -> None:
    flights: Flights[str] = Flights()
    assert [flights.join(b"k", who) for who in "abc"] == [Place.LEADS, Place.WAITS, Place.WAITS]
    assert flights.join(b"other", "z") is Place.LEADS
    assert flights.land(b"k", "a") == ("b", "c")
    assert len(flights) == 1
    assert flights.join(b"k", "d") is Place.LEADS


def test_when_the_one_that_leads_fails_the_next_one_leads() -> None:
    flights: Flights[str] = Flights()
    for who in "abc":
        flights.join(b"k", who)
    assert flights.leave(b"k", "b") is None
    assert flights.leave(b"k", "a") == "c"
    assert flights.leave(b"k", "c") is None
    assert len(flights) == 0


def test_only_the_one_that_leads_can_land_and_nobody_twice() -> None:
    flights: Flights[str] = Flights()
    for who in "ab":
        flights.join(b"k", who)
    assert flights.land(b"k", "b") == ()
    assert flights.land(b"k", "a") == ("b",)
    assert flights.land(b"k", "a") == ()
    assert flights.leave(b"k", "b") is None


def test_beyond_the_bound_a_call_goes_by_itself() -> None:
    flights: Flights[int] = Flights(waiters_max=2)
    assert [flights.join(b"k", who) for who in range(4)] == [
        Place.LEADS,
        Place.WAITS,
        Place.WAITS,
        Place.ALONE,
    ]
    assert flights.land(b"k", 3) == ()
    assert flights.leave(b"k", 3) is None
    assert flights.land(b"k", 0) == (1, 2)
