"""The command line, run for real against a served replica: tables, JSON, exit codes, words."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.surfaces import DEMO, Surfaces, running_surfaces, served

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


class Headway:
    """Runs `headway` in a folder of the test's own."""

    def __init__(self, folder: Path, url: str, key: str) -> None:
        self._folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HEADWAY")},
            "HEADWAY_URL": url,
            "HEADWAY_OPERATOR_KEY": key,
            "COLUMNS": str(WIDTH),
        }

    async def __call__(self, *arguments: str, **environment: str | None) -> Ran:
        merged = {**self._environment, **environment}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli",
            *arguments,
            cwd=self._folder,
            env={name: value for name, value in merged.items() if value is not None},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return Ran(process.returncode or 0, out.decode(), err.decode())


@dataclass(frozen=True, slots=True)
class World:
    surfaces: Surfaces
    url: str
    headway: Headway


@pytest.fixture
async def world(
    clean_database_url: str, nats_control_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    async with (
        running_surfaces(clean_database_url, nats_control_url) as surfaces,
        served(surfaces) as url,
    ):
        yield World(surfaces, url, Headway(tmp_path, url, surfaces.operators["admin"]))


async def test_lists_print_tables_that_fit_and_json_that_parses(world: World) -> None:
    for command in (
        ("tenants", "list"), ("keys", "list"), ("models", "list"), ("nodes", "list"),
        ("engines", "list"), ("workflows", "list"), ("requests", "list"), ("commands", "list"),
    ):  # fmt: skip
        people, programs = await asyncio.gather(
            world.headway(*command), world.headway(*command, "--json")
        )
        assert (people.code, people.err) == (0, ""), command
        assert people.out
        assert max(len(line) for line in people.out.splitlines()) <= WIDTH, people.out
        assert programs.code == 0, command
        assert isinstance(json.loads(programs.out), dict)


async def test_tenant_is_created_paid_for_and_disabled(world: World) -> None:
    created = await world.headway(
        "tenants", "create", "dorado", "--class", "gold", "--slo", "batch", "--budget", "3"
    )
    assert (created.code, created.err) == (0, "")
    assert "keys create --tenant dorado" in " ".join(created.out.split())
    budget = await world.headway("tenants", "budget", "dorado", "4.5", "--json")
    assert json.loads(budget.out)["limit_micro_usd"] == 4_500_000
    assert (await world.headway("tenants", "disable", "dorado", "--yes")).code == 0
    listed = json.loads((await world.headway("tenants", "list", "--json")).out)["data"]
    assert {entry["id"]: entry["is_disabled"] for entry in listed}["dorado"] is True


async def test_key_goes_alone_to_standard_output_and_works_until_revoked(world: World) -> None:
    created = await world.headway("keys", "create", "--role", "viewer", "--name", "eye")
    assert created.code == 0
    key = created.out.strip()
    assert "\n" not in key
    assert (await world.headway("nodes", "list", HEADWAY_OPERATOR_KEY=key)).code == 0
    refused = await world.headway("nodes", "cordon", "us-l40s", HEADWAY_OPERATOR_KEY=key)
    assert refused.code == 1
    assert "`operator`" in refused.err
    key_id = created.err.split(":")[0].strip()
    assert (await world.headway("keys", "revoke", key_id, "--yes")).code == 0
    gone = await world.headway("status", HEADWAY_OPERATOR_KEY=key)
    assert gone.code == 1
    assert "HEADWAY_OPERATOR_KEY" in gone.err


async def test_a_rotated_key_works_beside_the_new_one_for_a_while(world: World) -> None:
    created = await world.headway("keys", "create", "--role", "viewer", "--name", "eye")
    key_id = created.err.split(":")[0].strip()
    rotated = await world.headway("keys", "rotate", key_id, "--overlap", "1h")
    assert (rotated.code, f"{key_id} works until" in " ".join(rotated.err.split())) == (0, True)
    for key in (created.out.strip(), rotated.out.strip()):
        assert (await world.headway("nodes", "list", HEADWAY_OPERATOR_KEY=key)).code == 0
    again = await world.headway("keys", "rotate", key_id)
    assert (again.code, "replaced already" in " ".join(again.err.split())) == (1, True)
    wrong = await world.headway("keys", "rotate", key_id, "--overlap", "soon")
    assert (wrong.code, "24h" in wrong.err) == (2, True)


async def test_document_is_applied_and_nodes_are_cordoned(world: World) -> None:
    applied = await world.headway("apply", str(DEMO))
    assert (applied.code, applied.err) == (0, "")
    assert "3 nodes" in " ".join(applied.out.split())
    assert (await world.headway("nodes", "cordon", "us-l40s")).code == 0
    assert (await world.headway("nodes", "drain", "us-l40s", "--json")).code == 0
    assert (await world.headway("nodes", "uncordon", "us-l40s")).code == 0
    told = await world.headway(
        "engines", "load", "extra", "--node", "us-l40s", "--model", "llama-3.1-8b",
        "--kind", "simulated", "--option", "speedup=20", "--json",
    )  # fmt: skip
    assert told.code == 0, told.err
    assert json.loads(told.out)["kind"] == "load"


async def test_workflow_is_shown_and_cancelled(world: World) -> None:
    body = {"kind": "k", "scope": "chat", "steps_expected": 1, "deadline_s": 60}
    key = world.surfaces.tenants["aurora"]
    workflow = (await world.surfaces.call("POST", "/v1/workflows", key, body)).json()["id"]
    shown = await world.headway("workflows", "show", workflow)
    assert shown.code == 0
    assert "running" in shown.out
    assert (await world.headway("workflows", "cancel", workflow, "--yes")).code == 0
    listed = await world.headway("workflows", "list", "--state", "cancelled", "--json")
    assert [entry["id"] for entry in json.loads(listed.out)["data"]] == [workflow]


async def test_explain_of_a_refusal_names_reason_and_fits(world: World) -> None:
    refused = await world.surfaces.call(
        "POST",
        "/v1/chat/completions",
        world.surfaces.tenants["aurora"],
        {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}]},
    )
    decision = refused.headers["x-headway-decision"]
    explained = await world.headway("explain", decision)
    assert (explained.code, explained.err) == (0, "")
    assert decision in explained.out
    assert max(len(line) for line in explained.out.splitlines()) <= WIDTH


async def test_exit_codes(world: World, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("regions: [us-east]\nnodes: [{id: n}]\n")
    nothing = {"HEADWAY_URL": None, "HEADWAY_OPERATOR_KEY": None}
    cases = [
        (0, "version", (), {}),
        (1, "there is no node", ("nodes", "cordon", "nothing"), {}),
        (1, "there is no workflow", ("workflows", "show", "nothing"), {}),
        (2, "headway up", ("status",), nothing),
        (2, "nodes.0", ("apply", str(wrong)), {}),
        (2, "can not be read", ("apply", str(tmp_path / "missing.yaml")), {}),
        (2, "--tenant or --role", ("keys", "create"), {}),
        (2, "No such", ("teleport",), {}),
        (2, "is not a URL", ("status",), {"HEADWAY_URL": "ftp//nothing"}),
        (3, "no answer", ("status",), {"HEADWAY_URL": "http://127.0.0.1:9"}),
        (2, "HEADWAY_NODE_ID", ("agent",), {}),
        (2, "DATABASE_URL", ("serve",), {}),
    ]
    for code, words, arguments, environment in cases:
        ran = await world.headway(*(arguments or ("version",)), **environment)
        assert ran.code == code, (arguments, ran)
        assert words in " ".join((ran.out + ran.err).split()) or code == 0, (arguments, ran)
        assert "Traceback" not in ran.err, ran.err


async def test_local_key_is_not_sent_to_another_server(world: World, tmp_path: Path) -> None:
    folder = tmp_path / ".headway"
    folder.mkdir()
    stored = {"url": world.url, "key": world.surfaces.operators["admin"]}
    (folder / "operator.json").write_text(json.dumps(stored))
    nothing = {"HEADWAY_URL": None, "HEADWAY_OPERATOR_KEY": None}
    assert (await world.headway("nodes", "list", **nothing)).code == 0
    other = await world.headway("status", "--url", "http://127.0.0.1:9", **nothing)
    assert other.code == 2
    assert "--key" in other.err


async def test_database_is_upgraded_and_asked(empty_database_url: str, tmp_path: Path) -> None:
    headway = Headway(tmp_path, "", "")
    before = await headway("db", "current", "--json", DATABASE_URL=empty_database_url)
    assert before.code == 1
    assert json.loads(before.out)["revision"] is None
    assert (await headway("db", "upgrade", DATABASE_URL=empty_database_url)).code == 0
    after = await headway("db", "current", "--json", DATABASE_URL=empty_database_url)
    assert after.code == 0
    assert json.loads(after.out)["is_current"] is True
