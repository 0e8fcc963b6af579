"""A stream that goes to another engine: credits follow it, the first move is free, later ones spend a budget."""

from controlplane.domain.decision import Placement, Queue
from controlplane.domain.outcome import RequestState, Usage
from controlplane.reliability.retry_budget import POOL_RULES
from tests.unit.test_runtime_desk import NOW, a_desk, end, job, row


def taken(desk: object, name: str) -> tuple[int, int, int]:
    found = row(desk, name)  # type: ignore[arg-type]
    return found.seats_taken, found.kv_tokens_taken, found.prefill_tokens_pending


def test_credits_follow_a_stream_and_are_given_back_once() -> None:
    desk = a_desk(3, 2)
    stream = job("a", step=1, is_begun=True, steps_expected=3, home="e0")
    assert isinstance(desk.ask(stream, NOW), Placement)
    desk.first_token(stream, 20.0, NOW + 20)
    left = stream.placement.decode
    assert left.engine_id == "e0"
    placement = desk.elsewhere(stream, left, NOW + 30, is_free=True)
    assert isinstance(placement, Placement)
    assert placement.decode is not left
    assert taken(desk, "e0")[0] == 1, "it keeps what it holds until it is moved"
    desk.move(stream, placement, NOW + 30)
    assert taken(desk, "e0") == (0, 0, 0)
    assert taken(desk, placement.decode.engine_id)[0] == 1
    assert taken(desk, placement.decode.engine_id)[2] > 0
    desk.goes_on(stream)
    desk.goes_on(stream)
    assert taken(desk, placement.decode.engine_id)[2] == 0
    assert stream.attempt == 1
    end(desk, stream)
    desk.release(stream)
    assert [taken(desk, f"e{number}") for number in range(3)] == [(0, 0, 0)] * 3


def test_who_lacks_what_a_stream_goes_on_by_is_left_out() -> None:
    desk = a_desk(3, 2)
    stream = job("a", home="e0")
    assert isinstance(desk.ask(stream, NOW), Placement)
    left = stream.placement.decode
    first, second = (one for one in desk.fleet.rows_for(left.model) if one is not left)
    for lacking, other in ((first, second), (second, first)):
        stream.attempts_failed = ()
        lacking.lacks, other.lacks = frozenset({"token_ids"}), frozenset({"cache_salt"})
        desk.leave_out(stream, "token_ids")
        desk.leave_out(stream, "token_ids")
        assert stream.attempts_failed == (lacking,)
        placement = desk.elsewhere(stream, left, NOW + 30, is_free=True)
        assert isinstance(placement, Placement)
        assert placement.decode is other


def test_streams_of_a_dead_engine_spread_over_the_others() -> None:
    desk = a_desk(3, 4)
    streams = [job(f"s{number}") for number in range(12)]
    for stream in streams:
        assert isinstance(desk.ask(stream, NOW), Placement)
    dead = row(desk, "e0")
    for stream in streams:
        if stream.placement.decode is not dead:
            end(desk, stream)
    went = []
    for stream in streams:
        if stream.placement.decode is dead:
            placement = desk.elsewhere(stream, dead, NOW + 10, is_free=True)
            assert isinstance(placement, Placement)
            desk.move(stream, placement, NOW + 10)
            went.append(placement.decode.engine_id)
    assert sorted(went) == ["e1", "e1", "e2", "e2"]
    assert taken(desk, "e0")[0] == 0


def test_later_moves_spend_from_the_retry_budgets_and_the_first_does_not() -> None:
    desk = a_desk(2, 20)
    moved = 0
    for number in range(POOL_RULES.free + 3):
        stream = job(f"s{number}")
        assert isinstance(desk.ask(stream, NOW), Placement)
        left = stream.placement.decode
        assert isinstance(desk.elsewhere(stream, left, NOW, is_free=True), Placement)
        moved += isinstance(desk.elsewhere(stream, left, NOW, is_free=False), Placement)
    assert moved == POOL_RULES.free


def test_a_stream_without_another_place_keeps_its_own() -> None:
    desk = a_desk(2, 1)
    one, two = job("a"), job("b")
    assert isinstance(desk.ask(one, NOW), Placement)
    assert isinstance(desk.ask(two, NOW), Placement)
    outcome = desk.elsewhere(one, one.placement.decode, NOW, is_free=True)
    assert isinstance(outcome, Queue)
    assert one.is_holding_decode
    # When the other ends, a stream that waits meanwhile finds its place by the queue, and not where it failed.
    left = one.placement.decode
    desk.release(one)
    one.charge = None
    assert desk.enter(one, NOW) == []
    assert desk.line.offer(NOW) == ([], False), "the engine that failed it is free, and not for it"
    end(desk, two)
    [(who, placed)], _ = desk.line.offer(NOW + 10)
    assert who is one
    assert isinstance(placed, Placement)
    assert placed.decode is not left


def test_a_moved_stream_teaches_nothing_of_the_last_engines_pace() -> None:
    desk = a_desk(2, 2)
    stream = job("a")
    assert isinstance(desk.ask(stream, NOW), Placement)
    rates = row(desk, stream.placement.decode.engine_id).rates
    usage = Usage(1_000, 0, 100, is_estimated=False)
    desk.release(stream)
    desk.ended(stream, RequestState.SUCCEEDED, usage, 900.0, NOW + 90_000, is_moved=True)
    assert row(desk, stream.placement.decode.engine_id).rates == rates


def test_a_stream_beyond_its_deadline_is_not_moved() -> None:
    desk = a_desk(2, 2)
    stream = job("a")
    assert isinstance(desk.ask(stream, NOW), Placement)
    late = stream.request.deadline_ms
    assert desk.elsewhere(stream, stream.placement.decode, late, is_free=True) is None


def test_streams_that_wait_together_are_not_placed_where_they_failed() -> None:
    """Who waits is placed jointly, but not who can not go everywhere."""
    desk = a_desk(2, 4)
    dead = row(desk, "e0")
    streams = [job(f"s{number}") for number in range(3)]
    for stream in streams:
        stream.attempts_failed = (dead,)
        assert desk.enter(stream, NOW) == []
    placed, _ = desk.line.offer(NOW)
    assert [outcome.decode.engine_id for _, outcome in placed] == ["e1"] * 3  # type: ignore[union-attr]


def test_an_engine_that_hands_over_is_held_until_the_stream_goes_on_or_ends() -> None:
    for ends_by in ("goes_on", "let_go", "release", "next move"):
        desk = a_desk(3, 2)
        stream = job("a", home="e0")
        assert isinstance(desk.ask(stream, NOW), Placement)
        held = taken(desk, "e0")
        desk.first_token(stream, 20.0, NOW + 20)
        placement = desk.elsewhere(stream, row(desk, "e0"), NOW + 30, is_free=True)
        assert isinstance(placement, Placement)
        desk.move(stream, placement, NOW + 30, keeps_left=True)
        assert taken(desk, "e0") == (*held[:2], 0)
        assert taken(desk, placement.decode.engine_id)[0] == 1
        if ends_by == "next move":
            third = desk.elsewhere(stream, placement.decode, NOW + 40, is_free=True)
            assert isinstance(third, Placement)
            desk.move(stream, third, NOW + 40)
            assert taken(desk, placement.decode.engine_id) == (0, 0, 0)
        else:
            getattr(desk, ends_by)(stream)
        assert taken(desk, "e0") == (0, 0, 0), ends_by
        end(desk, stream)
        desk.release(stream)
        assert [taken(desk, f"e{number}") for number in range(3)] == [(0, 0, 0)] * 3
