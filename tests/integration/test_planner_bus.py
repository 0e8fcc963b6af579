"""The last plan and the last prices are kept on the bus for replicas to come."""

import asyncio
import secrets

import pytest

from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable
from controlplane.runtime.plan_view import PlanView
from dataplane.protocol import subjects
from dataplane.protocol.messages import encode
from tests.unit.test_plan_view import World, plan, prices


def bus(url: str) -> Bus:
    return Bus(url, user="", password="", name=f"control-{secrets.token_hex(4)}")


async def _until(view: PlanView, revision: int) -> None:
    async with asyncio.timeout(10):
        while view.plan is None or view.plan.revision != revision:
            await asyncio.sleep(0.01)


async def test_a_replica_that_comes_later_knows_the_last_plan(nats_control_url: str) -> None:
    leader, early, late = (bus(nats_control_url) for _ in range(3))
    worlds = World(), World()
    try:
        await leader.connect()
        await early.connect()
        await leader.ensure_control_stream()
        # Twice is once, as replicas do it whenever they connect.
        await leader.ensure_control_stream()
        await worlds[0].view.join(early)
        now_ms = worlds[0].clock.now_ms
        for revision in (1, 2, 3):
            await leader.keep(subjects.CONTROL_PLAN, encode(plan(1, revision, revision)))
            await leader.keep(subjects.CONTROL_PRICES, encode(prices(1, revision, 1.0, now_ms)))
        await _until(worlds[0].view, 3)
        await late.connect()
        await worlds[1].view.join(late)
        assert worlds[1].view.plan is not None
        assert worlds[1].view.plan.revision == 3
        assert worlds[1].view.prices is not None
        # What is no plan is dropped, and what comes after it is heard.
        await leader.keep(subjects.CONTROL_PLAN, b"{]")
        await leader.keep(subjects.CONTROL_PLAN, encode(plan(2, 0, 9)))
        for world in worlds:
            await _until(world.view, 9)
        assert (await leader.last(subjects.CONTROL_PLAN)) == encode(plan(2, 0, 9))
    finally:
        for one in (leader, early, late):
            await one.close()


async def test_without_a_bus_nothing_is_kept(nats_control_url: str) -> None:
    lonely = bus(nats_control_url)
    with pytest.raises(BusUnavailable):
        await lonely.keep(subjects.CONTROL_PLAN, b"")
    with pytest.raises(BusUnavailable):
        await lonely.last(subjects.CONTROL_PLAN)
