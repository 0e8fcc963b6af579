"""KV events as bytes, the tree of blocks, and what a follower makes of a sequence with holes in it."""

import base64
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from dataplane.agent.kv_events import KvFollower
from dataplane.agent.kv_tree import QUIET_S, KvTree, TooManyBlocks
from dataplane.engines.base import EngineError
from dataplane.engines.kv_wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEndpoints,
    decode_batch,
    kv_sockets,
    number_of,
)
from dataplane.protocol.messages import KvBatch, KvReset, KvResetReason, encode

# Written by the encoder of vLLM 0.32: two blocks of four tokens, one that goes, and all.
WRITTEN = base64.b64decode(
    "k8tB2s2J6BmZmpOMpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzks/+3LqYdlQyEM4QMlR2sXBhcmVudF9i"
    "bG9ja19oYXNowKl0b2tlbl9pZHOYAQIDBM0QAAYHCKpibG9ja19zaXplBKdsb3JhX2lkwKZtZWRpdW2jR1BVqWxv"
    "cmFfbmFtZcCqZXh0cmFfa2V5c5KRqHRlbmFudC1hwKlncm91cF9pZHgAsmt2X2NhY2hlX3NwZWNfa2luZK5mdWxs"
    "X2F0dGVudGlvbqpzZXNzaW9uX2lkqnJlcS0xYTJiLTeEpHR5cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HP"
    "/ty6mHZUMhCmbWVkaXVto0dQValncm91cF9pZHgAgaR0eXBlsEFsbEJsb2Nrc0NsZWFyZWQA"
)


def test_a_message_as_vllm_writes_it_is_read() -> None:
    batch = decode_batch(WRITTEN)
    assert batch.rank == 0
    written, removed, cleared = batch.events
    assert isinstance(written, BlockStored)
    # Unsigned: over 63 bits.
    assert written.block_hashes == [0xFEDC_BA98_7654_3210, 0x1032_5476]
    assert (written.block_size, written.parent_block_hash, written.medium) == (4, None, "GPU")
    assert (written.session_id, written.group_idx) == ("req-1a2b-7", 0)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [0xFEDC_BA98_7654_3210]
    assert isinstance(cleared, AllBlocksCleared)


def test_the_other_events_are_read_and_fields_may_be_missing_or_more() -> None:
    payload = msgspec.msgpack.encode(
        [
            1.5,
            [
                {"type": "BlockRemoved", "block_hashes": [b"\x01" * 32], "surprise": {"a": [1]}},
                {"type": "AllBlocksCleared"},
            ],
        ]
    )
    removed, cleared = decode_batch(payload).events
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [b"\x01" * 32]
    assert isinstance(cleared, AllBlocksCleared)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 9,
        # Older engines sent events as arrays.
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], 4, None]]]),
        msgspec.msgpack.encode([1.0, [{"type": "Unheard"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": ["x"]}]]),
    ],
)
def test_what_can_not_be_read_is_an_error(payload: bytes) -> None:
    with pytest.raises(EngineError):
        decode_batch(payload)


def test_numbers_are_eight_bytes_and_the_end_is_negative() -> None:
    assert number_of((5).to_bytes(8, "big")) == 5
    assert number_of(b"\xff" * 8) == -1
    with pytest.raises(EngineError):
        number_of(b"\x00" * 4)


def test_sockets_are_of_this_user_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoints = kv_sockets("127.0.0.1", 8000)
    assert endpoints.events.startswith(f"ipc://{tmp_path}/headway-")
    assert endpoints.replay != endpoints.events
    [folder] = list(tmp_path.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(EngineError, match="not a folder of this user alone"):
        kv_sockets("127.0.0.1", 8000)


# ------------------------------------------------------------------ the tree


def told(tree: KvTree, now_s: float = 0.0) -> dict[str, int]:
    news = tree.news(now_s)
    return {**news.shorter, **news.longer}


def test_a_session_shortens_as_its_blocks_go_from_the_end() -> None:
    tree = KvTree()
    tree.stored([1, 2, 3], None, 4, "a", 0.0)
    tree.stored([4, 5], 2, 4, "b", 0.0)
    assert told(tree) == {"a": 12, "b": 16}
    tree.removed([5])
    tree.removed([3])
    assert told(tree) == {"a": 8, "b": 12}
    tree.removed([4, 2])
    assert told(tree) == {"a": 4, "b": 4}
    tree.removed([1])
    assert told(tree) == {"a": 0, "b": 0}
    assert len(tree) == 0


def test_a_block_that_is_there_twice_goes_with_the_second() -> None:
    tree = KvTree()
    tree.stored([1, 2], None, 4, "a", 0.0)
    tree.stored([1, 2], None, 4, "b", 0.0)
    told(tree)
    tree.removed([2])
    assert told(tree) == {}
    assert tree.blocks == 2
    tree.removed([2])
    assert told(tree) == {"a": 4, "b": 4}


def test_behind_a_hole_nothing_is_found_until_it_is_filled() -> None:
    tree = KvTree()
    tree.stored([1, 2, 3, 4], None, 4, "a", 0.0)
    assert told(tree) == {"a": 16}
    tree.removed([2])
    assert (told(tree), tree.blocks) == ({"a": 4}, 3)
    tree.stored([2], 1, 4, None, 1.0)
    assert told(tree, 1.0) == {"a": 16}
    tree.removed([2])
    tree.removed([4])
    tree.removed([3])
    assert told(tree, 2.0) == {"a": 4}
    assert (tree.blocks, tree.held_tokens("a")) == (1, 4)


def test_growth_is_told_when_it_is_worth_it_or_has_ended() -> None:
    tree = KvTree()
    tree.stored(list(range(1, 17)), None, 4, "a", 0.0)
    assert told(tree) == {"a": 64}
    tree.stored([17], 16, 4, "a", 1.0)
    assert told(tree, 1.0) == {}
    tree.stored([18], 17, 4, "a", 1.1)
    assert told(tree, 1.1) == {"a": 72}, "an eighth more"
    tree.stored([19], 18, 4, "a", 1.2)
    assert told(tree, 1.2) == {}
    assert told(tree, 1.2 + QUIET_S) == {"a": 76}


def test_what_hangs_on_unknown_blocks_is_not_placed() -> None:
    tree = KvTree()
    tree.stored([7, 8], 6, 4, "a", 0.0)
    assert (told(tree), tree.blocks, tree.unplaced) == ({}, 0, 2)
    tree.removed([8, 7])
    assert tree.unplaced == 0


def test_the_tree_has_a_bound_on_blocks_and_one_on_sessions() -> None:
    tree = KvTree(blocks_max=3, sessions_max=2)
    for name, block in (("a", 1), ("b", 2), ("c", 3)):
        tree.stored([block], None, 4, name, 0.0)
    assert told(tree) == {"a": 0, "b": 4, "c": 4}, "of the longest known nothing is told any more"
    with pytest.raises(TooManyBlocks):
        tree.stored([4], None, 4, "d", 0.0)


def test_many_sessions_that_end_alike_move_as_one() -> None:
    tree = KvTree()
    trunk = list(range(1, 201))
    tree.stored(trunk, None, 4, None, 0.0)
    for each in range(1_000):
        tree.stored([1_000 + each], 200, 4, f"s{each}", 0.0)
    assert len(told(tree)) == 1_000
    for each in range(1_000):
        tree.removed([1_000 + each])
    for block in reversed(trunk[100:]):
        tree.removed([block])
    assert set(told(tree).values()) == {400}


def test_memory_returns_after_a_thousand_cycles() -> None:
    tree = KvTree()
    for cycle in range(1_000):
        blocks = [cycle * 100 + each for each in range(1, 21)]
        tree.stored(blocks, None, 4, f"s{cycle}", float(cycle))
        tree.stored([cycle * 100 + 50], blocks[4], 4, f"t{cycle}", float(cycle))
        match cycle % 3:
            case 0:
                for block in [cycle * 100 + 50, *reversed(blocks)]:
                    tree.removed([block])
            case 1:
                # From the beginning: holes all the way.
                for block in [*blocks, cycle * 100 + 50]:
                    tree.removed([block])
            case _:
                tree.clear()
        tree.news(float(cycle))
        tree.news(float(cycle) + 2 * QUIET_S)
    assert len(tree) == 0


# ------------------------------------------------------------------ the follower


def follower() -> KvFollower:
    made = KvFollower(zmq.asyncio.Context.instance(), "e", 1, KvEndpoints(events="", replay=""))
    made.is_answering = True
    return made


def message(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(hashes: list[int], parent: int | None, session: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": [1] * 4 * len(hashes), "block_size": 4, "session_id": session, "medium": "GPU",
        **more,
    }  # fmt: skip


def batches(one: KvFollower, now_s: float = 100.0) -> list[KvBatch]:
    one.make_batches("n", 1, now_s)
    made = list(one.unstored)
    one.unstored.clear()
    return made


def test_a_follower_tells_all_at_first_and_then_what_changed() -> None:
    one = follower()
    one._take(0, message(stored([1, 2], None, "a")))
    [first] = batches(one)
    assert (first.reset, first.is_told, first.held) == (KvReset.RETELL, True, {"a": 8})
    assert (first.seq, first.blocks, first.block_tokens, first.events) == (1, 2, 4, 1)
    assert batches(one) == []
    one._take(1, message({"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}))
    [second] = batches(one)
    assert (second.seq, second.reset, second.held) == (2, KvReset.NONE, {"a": 4})


def test_a_number_that_is_skipped_makes_the_view_void_and_one_that_repeats_does_nothing() -> None:
    one = follower()
    one._take(0, message(stored([1, 2], None, "a")))
    batches(one)
    one._take(0, message(stored([3], 2, "a")))
    assert batches(one) == []
    one._take(2, message(stored([9], None, "b")))
    [batch] = batches(one)
    assert (batch.reset, batch.reason) == (KvReset.VOID, KvResetReason.LOST)
    assert batch.held == {"b": 4}


def test_what_was_told_to_nobody_is_void_too() -> None:
    one = follower()
    one._take(0, message(stored([1, 2], None, "a")))
    one.make_batches("n", 1, 100.0)
    assert len(one.unstored) == 1
    one._take(1, message({"type": "AllBlocksCleared"}, stored([5], None, "c")))
    assert len(one.unstored) == 0
    [batch] = batches(one)
    assert (batch.reset, batch.reason, batch.held) == (
        KvReset.VOID,
        KvResetReason.CLEARED,
        {"c": 4},
    )


def test_a_cache_emptied_by_command_is_told_at_once() -> None:
    one = follower()
    one._take(0, message(stored([1, 2], None, "a")))
    batches(one)
    one.emptied()
    [batch] = batches(one)
    assert (batch.reset, batch.reason, batch.blocks) == (KvReset.VOID, KvResetReason.CLEARED, 0)
    # The engine's own word of it comes with what is stored then, and changes nothing.
    one._take(1, message({"type": "AllBlocksCleared"}, stored([3], None, "b")))
    assert batches(one)[0].held == {"b": 4}


def test_all_is_told_again_but_not_all_the_time() -> None:
    one = follower()
    one._take(0, message(stored([1, 2], None, "a")))
    assert batches(one)[0].held == {"a": 8}
    one.retell(100.0)
    [again] = batches(one)
    assert (again.reset, again.is_told, again.held) == (KvReset.RETELL, True, {"a": 8})
    one.retell(101.0)
    assert batches(one) == []


def test_an_unreadable_message_makes_the_view_void() -> None:
    one = follower()
    one._take(0, message(stored([1], None, "a")))
    batches(one)
    one._take(1, b"\xff\xff")
    assert batches(one)[0].reason is KvResetReason.LOST
    one._take(2, message(stored([2], None, "b")))
    assert batches(one)[0].held == {"b": 4}


def test_other_tiers_and_attention_that_forgets_are_passed_over() -> None:
    one = follower()
    one._take(
        0,
        message(
            stored([1], None, "a", medium="CPU"),
            stored([2], None, "a", kv_cache_spec_kind="sliding_window", group_idx=1),
            stored([3], None, "a", kv_cache_spec_kind="full_attention", group_idx=2),
            {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 1},
        ),
    )
    [batch] = batches(one)
    assert (batch.held, batch.blocks) == ({"a": 4}, 1)


def test_a_name_that_no_gateway_gave_is_not_passed_on() -> None:
    one = follower()
    one._take(0, message(stored([1], None, "x" * 65), stored([2], None, "y" * 64)))
    [batch] = batches(one)
    assert batch.held == {"y" * 64: 4}


def test_many_sessions_make_several_batches_each_under_the_limit() -> None:
    one = follower()
    events = [stored([each], None, f"{each:064}") for each in range(1, 201)]
    one._take(0, message(*events))
    made = batches(one)
    assert [len(batch.held) for batch in made] == [64, 64, 64, 8]
    assert [batch.is_told for batch in made] == [False, False, False, True]
    assert [batch.reset for batch in made] == [KvReset.RETELL, *[KvReset.NONE] * 3]
    assert all(len(encode(batch)) < 64 * 1024 for batch in made)
