"""The live view driven by keys against a real replica, at both sizes of terminal that it is made for."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from cli.top.app import Explained, Top
from cli.top.poll import Poller
from tests.integration.cli_world import World, running_world
from tests.integration.history import ENGINES, write_past

SIZES = ((80, 24), (160, 50))
FOREVER_S = 60.0


@pytest.fixture
async def world(
    clean_database_url: str, nats_control_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    async with running_world(clean_database_url, nats_control_url, tmp_path) as world:
        yield world


async def until(pilot: Pilot[int], condition: Callable[[], bool]) -> None:
    """Wait for what the program brings about, and fail when it does not."""
    async with asyncio.timeout(20):
        while not condition():
            await pilot.pause(0.02)


@asynccontextmanager
async def running(
    url: str, key: str, size: tuple[int, int], interval_s: float = FOREVER_S
) -> AsyncIterator[tuple[Top, Pilot[int]]]:
    async with Poller(url, key) as poller:
        top = Top(poller, interval_s=interval_s)
        async with top.run_test(size=size) as pilot:
            await until(pilot, lambda: top.overview is not None or top.away is not None)
            yield top, pilot


async def at(pilot: Pilot[int], top: Top, key: str, view: str) -> None:
    """Press a key and wait for what the view that it leads to shows."""
    await pilot.press(key)
    await until(pilot, lambda: top.scope.view == view and top.is_shown)


def keys(top: Top) -> list[str]:
    table = top.query_one(DataTable)
    return [str(key.value) for key in table.rows]


def lines(top: Top) -> list[str]:
    """The screen as a person sees it."""
    return [
        "".join(segment.text for segment in strip)
        for strip in top.screen._compositor.render_strips()
    ]


def words(top: Top, name: str) -> str:
    return str(top.query_one(name, Static).visual)


@pytest.mark.parametrize("size", SIZES)
async def test_views_drill_down_sort_and_filter(world: World, size: tuple[int, int]) -> None:
    past = write_past(world.database_url, world.surfaces.replica.id, seed=5, minutes=1.0)
    key = world.surfaces.operators["viewer"]
    async with running(world.url, key, size) as (top, pilot):
        assert sorted(keys(top)) == ["llama-3.1-8b", "llama-3.3-70b"]
        screen = lines(top)
        assert len(screen) == size[1]
        assert "NOT HEALTHY" in screen[0]
        assert all(word in screen[-1] for word in ("1-6", "Filter", "Sort", "Quit"))
        assert ("PROMISED" in screen[2]) is (size[0] == 160)

        await at(pilot, top, "3", "tenants")
        calls = Counter(call["tenant"] for call in past.calls)
        refused = Counter(refusal["tenant"] for refusal in past.refusals)
        found = {row["id"]: (row["calls"], row["calls_refused"]) for row in top.rows}
        assert found == {
            tenant: (calls[tenant], refused[tenant]) for tenant in ("aurora", "borealis", "cumulus")
        }
        # Sorted by calls, most first; reversed; then by the next column.
        assert [found[tenant][0] for tenant in keys(top)] == sorted(calls.values(), reverse=True)
        await pilot.press("S")
        assert [found[tenant][0] for tenant in keys(top)] == sorted(calls.values())
        await pilot.press("S", "s", "s")
        assert [found[tenant][1] for tenant in keys(top)] == sorted(
            (refused[tenant] for tenant in found), reverse=True
        )

        # Into the tenant under the cursor: its workflows, their calls, and why one is where it is.
        await pilot.press("home", "down")
        tenant = keys(top)[top.query_one(DataTable).cursor_row]
        await at(pilot, top, "enter", "workflows")
        own = [one for one in past.workflows if one["tenant"] == tenant]
        assert {row["id"] for row in top.rows} == {one["id"] for one in own}
        workflow = keys(top)[0]
        await at(pilot, top, "enter", "requests")
        assert {row["id"] for row in top.rows} == {
            call["id"] for call in past.calls if call["workflow"] == workflow
        }
        assert f"tenants {tenant}" in lines(top)[1]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(top.screen, Explained))
        await until(pilot, lambda: "prompt tokens" in " ".join("".join(lines(top)).split()))
        await pilot.press("escape")
        await at(pilot, top, "escape", "workflows")
        await at(pilot, top, "escape", "tenants")

        # An engine's calls, from the pool's side.
        await at(pilot, top, "5", "requests")
        assert {row["id"] for row in top.rows} == {call["id"] for call in past.calls}
        await pilot.press("slash", *ENGINES[0] if size[0] == 160 else "aurora")
        await pilot.press("enter")
        wanted = {
            call["id"]
            for call in past.calls
            if (call["engine"] == ENGINES[0] if size[0] == 160 else call["tenant"] == "aurora")
        }
        assert set(keys(top)) == wanted
        await pilot.press("escape")
        assert len(keys(top)) == len(past.calls)

        await at(pilot, top, "6", "refusals")
        assert {row["reason"]: row["calls"] for row in top.rows} == Counter(
            refusal["reason"] for refusal in past.refusals
        )
        # One request for each view that was looked at, and no more.
        assert top.polls <= 9
        assert all(len(line) == size[0] for line in lines(top))


async def test_it_says_that_the_server_is_away_and_goes_on_when_it_is_back(world: World) -> None:
    """The same replica is served, not served, and served again on one port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    async def serve(listener: socket.socket) -> tuple[uvicorn.Server, "asyncio.Task[None]"]:
        server = uvicorn.Server(
            uvicorn.Config(world.surfaces.replica.app, log_level="warning", lifespan="off")
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        return server, serving

    async def end(server: uvicorn.Server, serving: "asyncio.Task[None]") -> None:
        server.should_exit = True
        await serving

    running_server = await serve(listener)
    key = world.surfaces.operators["viewer"]
    async with running(f"http://127.0.0.1:{port}", key, (80, 24), 0.5) as (top, pilot):
        rows = keys(top)
        await end(*running_server)
        listener.close()
        await until(pilot, lambda: top.away is not None)
        assert "no answer from" in words(top, "#away")
        assert top.query_one("#away").display
        # What was there is still there, marked as old.
        assert keys(top) == rows
        assert "AWAY" in lines(top)[0]
        again = socket.create_server(("127.0.0.1", port))
        running_server = await serve(again)
        await until(pilot, lambda: top.away is None)
        assert not top.query_one("#away").display
        await end(*running_server)
        again.close()


async def test_a_wrong_key_is_told_and_asked_for_rarely(world: World) -> None:
    async with running(world.url, "hw-op-nobody", (80, 24), 0.5) as (top, pilot):
        assert top.away is not None
        assert top.away.is_final
        assert "check --key" in words(top, "#away")
        await pilot.press("q")
    assert top.return_code == 0
