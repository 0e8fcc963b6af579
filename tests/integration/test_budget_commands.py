"""Budgets and limits of keys over the operator API and from the command line."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.integration.surfaces import Surfaces, running_surfaces, served

WIDTH = 80


@dataclass(frozen=True, slots=True)
class World:
    surfaces: Surfaces
    url: str

    async def headway(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of `headway` as an administrator."""
        environment = {
            **os.environ,
            "HEADWAY_URL": self.url,
            "HEADWAY_OPERATOR_KEY": self.surfaces.operators["admin"],
            "COLUMNS": str(WIDTH),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli", *arguments,
            env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
async def world(clean_database_url: str, nats_control_url: str) -> AsyncIterator[World]:
    async with (
        running_surfaces(clean_database_url, nats_control_url) as surfaces,
        served(surfaces) as url,
    ):
        yield World(surfaces, url)


async def test_a_budget_is_set_shown_listed_and_removed(world: World) -> None:
    operate = world.surfaces.operate
    tenant = next(iter(world.surfaces.tenants))
    name = f"tenant:{tenant}:tokens"
    assert (await operate("GET", f"budgets/{name}")).status_code == 404
    made = await operate("PATCH", f"budgets/{name}", {"limit": 5_000, "window": "day"}, "operator")
    assert made.status_code == 200, made.text
    answer = made.json()
    assert (answer["unit"], answer["limit"], answer["spent"]) == ("tokens", 5_000, 0)
    assert answer["window_ends_at"] > answer["window_started_at"]
    kept = await operate("PATCH", f"budgets/{name}", {"limit": 6_000})
    assert (kept.json()["limit"], kept.json()["window"]) == (6_000, "day"), "the window stays"
    shown = await operate("GET", f"budgets/{name}", role="viewer")
    assert shown.json() == {**kept.json(), "windows": []}
    listed = await operate("GET", "budgets?kind=tenant&limit=500", role="viewer")
    assert name in [budget["id"] for budget in listed.json()["data"]]
    assert (await operate("DELETE", f"budgets/{name}")).json() == {"id": name, "is_removed": True}
    assert (await operate("DELETE", f"budgets/{name}")).status_code == 404
    assert (await operate("DELETE", f"budgets/tenant:{tenant}")).status_code == 409


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("tenant:nobody", {"limit": 1}, 404),
        ("planet:earth", {"limit": 1}, 404),
        ("tenant:nobody", {"limit": -1}, 400),
        ("tenant:nobody", {"limit": 1.5}, 400),
        ("tenant:nobody", {"window": "day"}, 400),
        ("tenant:nobody", {"limit": 1, "window": "year"}, 400),
    ],
)
async def test_nonsense_changes_nothing(
    world: World, name: str, body: dict[str, object], status: int
) -> None:
    answer = await world.surfaces.operate("PATCH", f"budgets/{name}", body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"]


async def test_money_below_the_least_unit_is_refused_and_not_rounded_away(world: World) -> None:
    surfaces = world.surfaces
    tenant = next(iter(surfaces.tenants))
    before = (await surfaces.operate("GET", f"budgets/tenant:{tenant}")).json()["limit"]
    refused = await surfaces.operate("PATCH", f"tenants/{tenant}", {"budget_usd": 4e-7})
    assert refused.status_code == 400
    assert "least unit" in refused.json()["error"]["message"]
    assert (await surfaces.operate("GET", f"budgets/tenant:{tenant}")).json()["limit"] == before
    workflow = {"kind": "k", "scope": "chat", "steps_expected": 1, "deadline_s": 60}
    body = {**workflow, "budget_usd": 4e-7}
    refused = await surfaces.call("POST", "/v1/workflows", surfaces.tenants[tenant], body)
    assert refused.status_code == 400
    assert "0.000001" in refused.json()["error"]["message"]
    made = {**workflow, "budget_usd": 1e-6}
    answer = await surfaces.call("POST", "/v1/workflows", surfaces.tenants[tenant], made)
    assert answer.status_code == 201, answer.text


async def test_a_viewer_changes_no_budget(world: World) -> None:
    operate = world.surfaces.operate
    tenant = f"budgets/tenant:{next(iter(world.surfaces.tenants))}"
    assert (await operate("PATCH", tenant, {"limit": 1}, "viewer")).status_code == 403
    assert (await operate("DELETE", tenant, role="viewer")).status_code == 403
    assert (await operate("PATCH", "keys/k", {"tokens_per_minute": 1}, "viewer")).status_code == 403


async def test_limits_of_a_key_are_set_and_lifted(world: World) -> None:
    operate = world.surfaces.operate
    tenant = next(iter(world.surfaces.tenants))
    made = await operate(
        "POST", "keys", {"name": "k", "tenant_id": tenant, "requests_per_minute": 60}
    )
    key = made.json()["id"]
    changed = await operate("PATCH", f"keys/{key}", {"tokens_per_minute": 9_000}, "operator")
    assert changed.status_code == 200, changed.text
    limits = ("requests_per_minute", "tokens_per_minute", "calls_in_flight_max")
    assert [changed.json()[name] for name in limits] == [60, 9_000, None]
    lifted = await operate("PATCH", f"keys/{key}", {"requests_per_minute": None})
    assert [lifted.json()[name] for name in limits] == [None, 9_000, None]
    listed = (await operate("GET", "keys?limit=500")).json()["data"]
    assert lifted.json() in listed
    assert (await operate("PATCH", f"keys/{key}", {})).status_code == 400
    assert (await operate("PATCH", f"keys/{key}", {"tokens_per_minute": 0})).status_code == 400
    assert (await operate("PATCH", "keys/nobody", {"tokens_per_minute": 1})).status_code == 404
    refused = await operate(
        "POST", "keys", {"name": "v", "operator_role": "viewer", "tokens_per_minute": 1}
    )
    assert refused.status_code == 400


async def test_budgets_from_the_command_line(world: World) -> None:
    tenant = next(iter(world.surfaces.tenants))
    code, out, err = await world.headway(
        "keys", "create", "--tenant", tenant, "--rpm", "60", "--json"
    )
    assert (code, err) == (0, "")
    key = json.loads(out)["id"]
    code, out, _ = await world.headway("keys", "limit", key, "--concurrency", "4", "--rpm", "0")
    assert (code, out.strip()) == (0, f"{key}: 4 at once")
    assert (await world.headway("keys", "limit", key))[0] == 2

    code, out, _ = await world.headway("budgets", "set", f"key:{key}", "2.5", "--window", "day")
    assert code == 0
    assert " ".join(out.split()) == f"key:{key} may spend $2.50 per day"
    code, out, _ = await world.headway("budgets", "set", f"key:{key}:tokens", "20000")
    assert "20,000 tok per total" in out
    assert (await world.headway("budgets", "set", f"key:{key}:tokens", "0.5"))[0] == 2
    for words in (
        ("budgets", "set", f"key:{key}"),
        ("tenants", "budget", tenant),
        ("tenants", "create", "new", "--class", "gold", "--slo", "chat", "--budget"),
    ):
        code, _, err = await world.headway(*words, "0.0000001")
        assert code == 2, err
        assert "$0.0000001 is less than the least unit, $0.000001" in " ".join(err.split())
        assert (await world.headway(*words, "nan"))[0] == 2
    assert (await world.headway("budgets", "set", f"key:{key}:tokens", "inf"))[0] == 2
    code, out, _ = await world.headway("budgets", "show", f"key:{key}")
    assert "$2.50 per day" in out, "what was refused changed nothing"
    people, programs = await asyncio.gather(
        world.headway("budgets", "list"),
        world.headway("budgets", "list", "--kind", "key", "--json"),
    )
    assert (people[0], people[2]) == (0, "")
    assert max(len(line) for line in people[1].splitlines()) <= WIDTH, people[1]
    assert "0%" in people[1]
    found = json.loads(programs[1])["data"]
    assert [budget["id"] for budget in found] == [f"key:{key}", f"key:{key}:tokens"]
    code, out, _ = await world.headway("budgets", "show", f"key:{key}")
    assert code == 0
    assert "$2.50 per day" in out
    assert (await world.headway("budgets", "remove", f"key:{key}", "--yes"))[0] == 0
    assert (await world.headway("budgets", "show", f"key:{key}"))[0] == 1
    code, out, _ = await world.headway("keys", "list")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= WIDTH, out
