"""Calls of a prefill and a decode engine through the gateway: connectors, failures of a leg, leases, hanging up."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from controlplane.domain.outcome import AttemptOutcome, RequestState
from controlplane.domain.transfer import Connector, KvSource
from controlplane.gateway import legs as first_leg
from tests.gateway_world import (
    DONE,
    END,
    STREAM_HEAD,
    RoundRobinGate,
    ScriptedEngine,
    answer,
    chunked,
    finish,
    hangs,
    resets_after,
    role,
    running,
    sends,
    stream,
    token,
    until,
    used,
    whole,
)

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
STREAM = {**CHAT, "stream": True}
EVENTS = (role(), token("a"), token("b"), finish(), used(16, 2), DONE)
TRANSFER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
    "remote_engine_id": "p", "remote_request_id": "chatcmpl-req-1-0-aa", "remote_host": "127.0.0.1",
    "remote_port": 5600, "remote_num_tokens": 16,
}  # fmt: skip
NIXL = KvSource(Connector.NIXL)


def prefilled(finish_reason: str = "length", **more: Any) -> dict[str, Any]:
    done: dict[str, Any] = answer(completion=1, kv_transfer_params=TRANSFER, **more)
    done["choices"][0]["finish_reason"] = finish_reason
    return done


def legs(gate: RoundRobinGate) -> list[tuple[str, AttemptOutcome]]:
    return [(leg, outcome) for _, leg, outcome, _ in gate.attempts]


def refused_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[:2]


# ---------------------------------------------------------------- what connectors want


async def both_legs(source: KvSource, first: dict[str, Any]) -> tuple[Any, Any, RoundRobinGate]:
    async with (
        ScriptedEngine(whole(200, first)) as prefill,
        ScriptedEngine(sends(stream(*EVENTS))) as decode,
        running(
            RoundRobinGate(pairs=[(prefill.address, decode.address)], kv_source=source)
        ) as world,
    ):
        got = await world.post(STREAM)
    assert got.status == 200
    assert got.body.endswith(DONE)
    return prefill.seen[0], decode.seen[0], world.gate


async def test_a_pushing_engine_is_told_as_a_pulled_one_with_one_id() -> None:
    pushed = {**TRANSFER, "transfer_mode": "push"}
    first = prefilled()
    first["kv_transfer_params"] = pushed
    prefill, decode, _ = await both_legs(KvSource(Connector.NIXL_PUSH), first)
    assert prefill.body["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.body["kv_transfer_params"] == pushed
    assert prefill.header("x-request-id") == decode.header("x-request-id")


async def test_mooncake_is_told_by_the_gateway_where_the_kv_lies() -> None:
    source = KvSource(Connector.MOONCAKE, 480.0, "p1", "http://10.0.0.7:8998")
    # It answers nothing of its own.
    first = prefilled()
    first["kv_transfer_params"] = None
    prefill, decode, gate = await both_legs(source, first)
    asked, told = prefill.body["kv_transfer_params"], decode.body["kv_transfer_params"]
    assert asked == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": asked["transfer_id"],
    }
    assert told == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": asked["transfer_id"],
        "remote_engine_id": "p1",
        "remote_bootstrap_addr": "http://10.0.0.7:8998",
    }
    assert "req-1" in asked["transfer_id"]
    assert legs(gate) == [("prefill", AttemptOutcome.OK), ("decode", AttemptOutcome.OK)]


async def test_mooncake_holds_nothing_of_an_answer_that_stopped() -> None:
    source = KvSource(Connector.MOONCAKE, 480.0, "p1", "http://10.0.0.7:8998")
    _, decode, gate = await both_legs(source, prefilled("stop"))
    assert "kv_transfer_params" not in decode.body
    assert legs(gate) == [("prefill", AttemptOutcome.SERVER_ERROR), ("whole", AttemptOutcome.OK)]


async def test_a_shared_folder_needs_no_words() -> None:
    first = prefilled()
    first["kv_transfer_params"] = None
    prefill, decode, gate = await both_legs(KvSource(Connector.SHARED_FOLDER), first)
    assert prefill.body["max_tokens"] == 1
    assert "kv_transfer_params" not in prefill.body
    assert "kv_transfer_params" not in decode.body
    assert legs(gate) == [("prefill", AttemptOutcome.OK), ("decode", AttemptOutcome.OK)]


# ---------------------------------------------------------------- the first leg fails

FAILURES = {
    "500": whole(500, {"error": {"message": "x"}}),
    "503": whole(503, {"error": {"message": "busy"}}),
    "reset": resets_after(b""),
    "half an answer": resets_after(b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"id":'),
    "no params": whole(200, {**prefilled(), "kv_transfer_params": None}),
    "no request": whole(
        200, {**prefilled(), "kv_transfer_params": {**TRANSFER, "remote_request_id": None}}
    ),
    "no blocks": whole(
        200, {**prefilled(), "kv_transfer_params": {**TRANSFER, "remote_block_ids": []}}
    ),
    "abort": whole(200, prefilled("abort")),
    "error": whole(200, prefilled("error")),
    "tool calls": whole(200, prefilled("tool_calls")),
    "no choices": whole(200, {**prefilled(), "choices": []}),
    "garbage": whole(200, b"not json"),
}


@pytest.mark.parametrize("failing", FAILURES.values(), ids=FAILURES.keys())
async def test_another_prefill_engine_is_asked_under_another_id(failing: Any) -> None:
    async with (
        ScriptedEngine(failing) as first,
        ScriptedEngine(whole(200, prefilled())) as second,
        ScriptedEngine(whole(200, answer())) as decode,
        running(
            RoundRobinGate(pairs=[(first.address, decode.address)], other_prefills=[second.address])
        ) as world,
    ):
        got = await world.post(CHAT)
    assert got.status == 200
    assert [leg for leg, _ in legs(world.gate)] == ["prefill", "prefill", "decode"]
    assert decode.seen[0].body["kv_transfer_params"] == TRANSFER
    ids = [seen.header("x-request-id") for seen in (*first.seen, *second.seen, *decode.seen)]
    assert ids == ["req-1", "req-1-1", "req-1-1"]


async def test_a_hanging_prefill_leaves_half_of_the_time_to_the_decode_engine() -> None:
    async with (
        ScriptedEngine(hangs()) as first,
        ScriptedEngine(whole(200, answer())) as decode,
        running(RoundRobinGate(pairs=[(first.address, decode.address)]), period_s=0.05) as world,
    ):
        got = await world.post(CHAT, x_headway_deadline_ms="2000")
        assert got.status == 200
        # The engine that hung is not left to compute for nobody.
        await asyncio.wait_for(first.seen[0].hung_up.wait(), 1)
    assert legs(world.gate) == [("prefill", AttemptOutcome.TIMEOUT), ("whole", AttemptOutcome.OK)]
    assert world.gate.settlements[0].e2e_ms < 2_000


@pytest.mark.parametrize(
    ("predicted_ms", "left_s", "lease_s", "patience_s"),
    [
        (100.0, None, 30.0, 5.0),
        (1_000.0, None, 30.0, 10.0),
        (60_000.0, None, 30.0, 24.0),
        (60_000.0, None, 480.0, 384.0),
        (1_000.0, 8.0, 30.0, 4.0),
        (0.0, 1.0, 30.0, 0.5),
    ],
)
async def test_a_first_leg_is_waited_for_as_long_as_that_can_help(
    predicted_ms: float, left_s: float | None, lease_s: float, patience_s: float
) -> None:
    source = KvSource(Connector.NIXL, lease_s=lease_s)
    assert first_leg.patience_s(source, predicted_ms, left_s) == pytest.approx(patience_s)


async def test_a_mistake_of_the_clients_is_told_by_the_decode_engine() -> None:
    complaint = {"error": {"message": "top_k", "type": "BadRequestError", "param": "top_k"}}
    async with (
        ScriptedEngine(whole(400, complaint)) as first,
        ScriptedEngine(whole(400, complaint)) as decode,
        running(RoundRobinGate(pairs=[(first.address, decode.address)])) as world,
    ):
        got = await world.post(CHAT)
    error = got.json()["error"]
    assert (got.status, error["message"], error["param"]) == (400, "top_k", "top_k")
    assert error["code"] == "invalid_request"
    assert [leg for leg, _ in legs(world.gate)] == ["prefill", "whole"]


async def test_kv_is_not_fetched_after_its_lease() -> None:
    async def slow(seen: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await whole(200, prefilled())(seen, writer)

    async with (
        ScriptedEngine(slow) as first,
        ScriptedEngine(whole(200, answer())) as decode,
        running(
            RoundRobinGate(
                pairs=[(first.address, decode.address)],
                kv_source=KvSource(Connector.NIXL, lease_s=0.3),
            )
        ) as world,
    ):
        got = await world.post(CHAT)
    assert got.status == 200
    assert "kv_transfer_params" not in decode.seen[0].body
    assert legs(world.gate) == [("prefill", AttemptOutcome.TIMEOUT), ("whole", AttemptOutcome.OK)]


# ---------------------------------------------------------------- the second leg fails


async def test_kv_that_nobody_asked_for_is_fetched_by_the_next_engine() -> None:
    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(whole(200, prefilled())) as other,
        ScriptedEngine(sends(stream(*EVENTS))) as decode,
        running(
            RoundRobinGate(pairs=[(first.address, refused_port()), (other.address, decode.address)])
        ) as world,
    ):
        got = await world.post(STREAM)
    assert got.body.endswith(DONE)
    assert legs(world.gate) == [
        ("prefill", AttemptOutcome.OK),
        ("decode", AttemptOutcome.CONNECT_ERROR),
        ("decode", AttemptOutcome.OK),
    ]
    assert len(first.seen) == 1
    assert not other.seen
    assert decode.seen[0].body["kv_transfer_params"] == TRANSFER
    # Both engines know the call by the id of the leg that computed.
    assert decode.seen[0].header("x-request-id") == first.seen[0].header("x-request-id")


@pytest.mark.parametrize(
    "dying",
    [
        resets_after(b""),
        whole(500, {"error": {"message": "EngineCore"}}),
        whole(503, {"error": {"message": "busy"}}),
        sends(STREAM_HEAD + END),
    ],
    ids=["reset", "500", "503", "empty"],
)
async def test_kv_that_may_have_been_fetched_is_computed_anew(dying: Any) -> None:
    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(whole(200, prefilled())) as other,
        ScriptedEngine(dying) as dead,
        ScriptedEngine(sends(stream(*EVENTS))) as decode,
        running(
            RoundRobinGate(pairs=[(first.address, dead.address), (other.address, decode.address)])
        ) as world,
    ):
        got = await world.post(STREAM)
    assert got.body.endswith(DONE)
    assert [leg for leg, _ in legs(world.gate)] == ["prefill", "decode", "prefill", "decode"]
    assert len(other.seen) == 1


async def test_without_a_common_connector_the_next_engine_computes() -> None:
    gate = RoundRobinGate(keeps_kv=False)
    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(whole(500, {})) as other,
        ScriptedEngine(whole(200, answer())) as decode,
    ):
        gate.pairs = [(first.address, refused_port()), (other.address, decode.address)]
        async with running(gate) as world:
            got = await world.post(CHAT)
    assert got.status == 200
    assert "kv_transfer_params" not in decode.seen[0].body
    assert [leg for leg, _ in legs(gate)] == ["prefill", "decode", "prefill", "whole"]


# ---------------------------------------------------------------- nobody hangs up on a transfer


def after(gate: asyncio.Event, before: bytes, data: bytes) -> Callable[..., Any]:
    async def script(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(before)
        await writer.drain()
        await gate.wait()
        writer.write(data)
        await writer.drain()
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["no head", "head"])
async def test_a_client_that_leaves_is_not_noticed_before_the_first_token(head: bytes) -> None:
    """An engine sends the head at once, long before its first token, so that the head says nothing."""
    later = asyncio.Event()
    body = stream(*EVENTS).removeprefix(STREAM_HEAD)
    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(after(later, head, (b"" if head else STREAM_HEAD) + body)) as decode,
        running(RoundRobinGate(pairs=[(first.address, decode.address)])) as world,
    ):
        client = await world.dial()
        await client.send(STREAM)
        await until(lambda: len(decode.seen) == 1)
        await asyncio.sleep(0.05)
        client.writer.transport.abort()
        await until(lambda: len(world.gate.settlements) == 1)
        assert world.gate.settlements[0].state is RequestState.CANCELLED
        await asyncio.sleep(0.1)
        assert not decode.seen[0].hung_up.is_set()
        later.set()
        await asyncio.wait_for(decode.seen[0].hung_up.wait(), 1)


async def test_what_is_late_is_answered_in_time_and_hung_up_on_later() -> None:
    async with (
        ScriptedEngine(whole(200, prefilled())) as first,
        ScriptedEngine(hangs(STREAM_HEAD)) as decode,
        running(
            RoundRobinGate(pairs=[(first.address, decode.address)], retries_max=0), period_s=0.05
        ) as world,
    ):
        got = await world.post(STREAM, x_headway_deadline_ms="500")
        assert got.status == 504
        assert legs(world.gate)[-1] == ("decode", AttemptOutcome.TIMEOUT)
        await asyncio.sleep(0.2)
        assert not decode.seen[0].hung_up.is_set()
        # A transfer that takes longer than any does not hold the connection for ever.
        world.sweeper.sweep(world.sweeper.now + 11)
        await asyncio.wait_for(decode.seen[0].hung_up.wait(), 1)


async def test_a_client_that_leaves_in_the_first_leg_stops_it_at_once() -> None:
    async with (
        ScriptedEngine(hangs()) as first,
        ScriptedEngine(hangs()) as decode,
        running(RoundRobinGate(pairs=[(first.address, decode.address)])) as world,
    ):
        client = await world.dial()
        await client.send(STREAM)
        await until(lambda: len(first.seen) == 1)
        client.writer.transport.abort()
        await asyncio.wait_for(first.seen[0].hung_up.wait(), 1)
        await until(lambda: len(world.gate.settlements) == 1)
    assert not decode.seen


async def test_one_byte_at_a_time_is_one_transfer_object() -> None:
    """However the first answer arrives, the second engine gets its object unchanged."""
    later = {**TRANSFER, "a_later_field": {"x": [1.5, None, "ü"]}}
    first = prefilled()
    first["kv_transfer_params"] = later
    data = json.dumps(first, ensure_ascii=False).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data)

    async def drips(_: Any, writer: asyncio.StreamWriter) -> None:
        for byte in head + data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async with (
        ScriptedEngine(drips) as prefill,
        ScriptedEngine(whole(200, answer())) as decode,
        running(RoundRobinGate(pairs=[(prefill.address, decode.address)])) as world,
    ):
        await world.post(CHAT)
    assert json.dumps(later, ensure_ascii=False).encode() in decode.seen[0].raw
    assert chunked(b"") == b"0\r\n\r\n"
