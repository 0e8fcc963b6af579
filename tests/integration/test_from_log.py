"""`headway simulate --from-log`, for real: rows in Postgres, the operator API, the command, the live decision code."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.client import OperatorClient
from cli.failure import CommandFailure
from cli.simulate import command
from cli.simulate.from_log import Reader, read_log
from controlplane.domain.catalog import Scope
from controlplane.domain.ids import SloClassName, TenantId, WorkflowId
from controlplane.store import workflows
from controlplane.store.journal import Charge, DecisionRow, Journal, OpenedRow, SettledRow
from controlplane.store.session import make_engine
from policies.facts import as_json, from_json
from policies.load import files_of
from tests.integration.surfaces import DEMO, Surfaces, running_surfaces, served

MODEL = "llama-3.1-8b"
WORKFLOWS, STEPS, ALONE = 6, 3, 4
CHARGED = 1_000
SUCCEEDED = WORKFLOWS - 1 + ALONE
NO_BRONZE = """
  - {name: not-bronze, effect: deny, tenant_classes: [bronze], models: ["*"]}
"""


app = typer.Typer()
app.add_typer(command.app, name="simulate")


@dataclass(frozen=True, slots=True)
class Headway:
    """Runs the command in this process, while the loop serves it."""

    environment: dict[str, str]

    async def __call__(self, *arguments: str) -> Any:
        ran = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=self.environment)
        assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
        return ran


@dataclass(frozen=True, slots=True)
class World:
    surfaces: Surfaces
    headway: Headway
    folder: Path
    url: str


@pytest.fixture
async def world(
    clean_database_url: str, nats_control_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    async with (
        running_surfaces(clean_database_url, nats_control_url) as surfaces,
        served(surfaces) as url,
    ):
        headway = Headway(
            {"HEADWAY_URL": url, "HEADWAY_OPERATOR_KEY": surfaces.operators["viewer"]}
        )
        yield World(surfaces, headway, tmp_path, url)


async def write_log(world: World, database_url: str) -> None:
    """Workflows of three steps of which one was cut short, calls of a bronze tenant, and refusals."""
    began = datetime.now(UTC) - timedelta(minutes=5)
    replica = world.surfaces.replica
    journal = replica.journal
    engine = make_engine(database_url)
    for number in range(WORKFLOWS):
        await workflows.create(
            engine, tenant=TenantId("aurora"), kind="coding", scope=Scope.COPILOT,
            steps_expected=STEPS, slo_class=SloClassName("interactive"), deadline_ms=600_000,
            budget_micro_usd=None, workflow_id=WorkflowId(f"wf-{number}"),
        )  # fmt: skip
        for step in range(STEPS):
            is_cut = number == 0 and step == STEPS - 1
            call(
                journal, replica.id, f"wf-{number}-{step}", "aurora",
                began + timedelta(seconds=5 * number + 8 * step), 1_000 + 500 * step,
                workflow=f"wf-{number}", step=step, state="cancelled" if is_cut else "succeeded",
            )  # fmt: skip
    for number in range(ALONE):
        at = began + timedelta(seconds=3 * number)
        call(journal, replica.id, f"alone-{number}", "cumulus", at, 2_000)
    for name, retries in (("r0", 0), ("r1", 0), ("r0-again", 1)):
        journal.decided(refusal(replica.id, name, began, retries))
    async with asyncio.timeout(10):
        while journal.entries_waiting:
            await asyncio.sleep(0.02)
    await engine.dispose()


def call(
    journal: Journal, replica: str, name: str, tenant: str, at: datetime, prompt_tokens: int,
    *, workflow: str | None = None, step: int = 0, state: str = "succeeded",
) -> None:  # fmt: skip
    journal.opened(
        OpenedRow(
            id=name, tenant_id=tenant, key_id="k", replica_id=replica, workflow_id=workflow, step=step,
            model=MODEL, endpoint="chat", is_stream=True, reserved_micro_usd=0, opened_at=at,
        )
    )  # fmt: skip
    is_good = state == "succeeded"
    journal.settled(
        SettledRow(
            id=name, state=state, reason=None, prompt_tokens=prompt_tokens if is_good else 0,
            cached_tokens=0, completion_tokens=100 if is_good else 0, is_usage_estimated=False,
            ttft_ms=100.0, tpot_ms=10.0, e2e_ms=1_100.0, queue_ms=0.0, settled_micro_usd=CHARGED,
            ended_at=at + timedelta(seconds=1), tenant_id=tenant, workflow_id=workflow, step=step,
            replica_id=replica, charges=(Charge(f"tenant:{tenant}", CHARGED),),
        )
    )  # fmt: skip


def refusal(replica: str, name: str, at: datetime, retries: int) -> DecisionRow:
    facts = from_json(
        {
            "tenant.id": "borealis", "tenant.class": "silver", "tenant.slo_class": "standard",
            "model.name": MODEL, "request.prompt_tokens": 3_000, "request.client_retries": retries,
        }
    )  # fmt: skip
    return DecisionRow(
        request_id=name, number=0, replica_id=replica, verdict="refuse", reason="shed_overload",
        decode_engine_id=None, prefill_engine_id=None, cost_micro_usd=None, ttft_ms_predicted=None,
        cached_tokens_predicted=None, policy_revision="p", decided_at=at, record=None,
        tenant_id="borealis", model=MODEL, facts=as_json(*facts),
    )  # fmt: skip


async def simulated(world: World, *arguments: str) -> dict[str, Any]:
    out = world.folder / "out.json"
    ran = await world.headway("simulate", "--from-log", "1h", "--json", str(out), *arguments)
    assert ran.exit_code == 0, ran.output
    assert "RECORDED" in ran.stdout
    document: dict[str, Any] = json.loads(out.read_text())
    return document


async def test_the_log_is_played_on_another_fleet_and_under_other_policies(
    world: World, clean_database_url: str
) -> None:
    await write_log(world, clean_database_url)
    report = world.folder / "out.html"
    document = await simulated(world, "--fleet", str(DEMO), "--report", str(report))
    assert (document["plans"], document["steps"]) == (
        WORKFLOWS + ALONE + 2,
        WORKFLOWS * STEPS + ALONE + 2,
    )
    recorded, then = document["worlds"]["recorded"], document["worlds"]["what_if"]
    assert (recorded["workflows"], recorded["succeeded"]) == (document["plans"], SUCCEEDED)
    assert recorded["failures"] == {"cancelled": 1, "shed_overload": 2}
    calls = WORKFLOWS * STEPS + ALONE
    assert recorded["charged_usd"] == pytest.approx(calls * CHARGED / 1e6)
    assert {name: part["workflows"] for name, part in recorded["by_tenant"].items()} == {
        "aurora": WORKFLOWS, "borealis": 2, "cumulus": ALONE,
    }  # fmt: skip
    assert recorded["by_slo_class"]["interactive"]["slo_ratio"] == 1.0
    # A fleet with room to spare serves all that was asked for, the refused and the cut short too.
    assert then["succeeded"] == then["workflows"] == document["plans"]
    assert then["failures"] == {}
    # The same calls at the model's prices: 100k, 25k and 200k micro-dollars a million tokens.
    assert 0.002 < then["charged_usd"] < 0.02
    assert document["notes"] == {
        "calls whose sizes are estimated": 1,
        "refusals of later tries, not played again": 1,
        "refused calls, what they needed is estimated": 2,
    }
    assert "The log again" in report.read_text()
    # The same log gives the same document.
    assert await simulated(world, "--fleet", str(DEMO)) == document

    folder = world.folder / "strict"
    folder.mkdir()
    for name, text in files_of(None).items():
        (folder / name).write_text(text + NO_BRONZE if name == "entitlements.yaml" else text)
    strict = await simulated(world, "--fleet", str(DEMO), "--policies", str(folder))
    assert strict["worlds"]["as_it_is"] == document["worlds"]["as_it_is"]
    then = strict["worlds"]["what_if"]
    assert then["failures"] == {"forbidden_by_policy": ALONE}
    assert then["by_tenant"]["cumulus"]["succeeded"] == 0
    assert then["succeeded"] == document["plans"] - ALONE
    assert strict["policies"]["what_if"] != strict["policies"]["as_it_is"]


async def test_it_says_why_it_can_not(world: World, clean_database_url: str) -> None:
    nothing = await world.headway("simulate", "--from-log", "1h", "--fleet", str(DEMO))
    assert nothing.exit_code == 1
    assert "nothing was recorded" in nothing.stderr
    await write_log(world, clean_database_url)
    fleetless = await world.headway("simulate", "--from-log", "1h")
    assert (fleetless.exit_code, "no engine" in fleetless.stderr) == (1, True), fleetless.output
    no_time = await world.headway("simulate", "--from-log", "yesterday")
    assert (no_time.exit_code, "24h" in no_time.stderr) == (2, True)
    alone = await world.headway("simulate", "--policies", "active")
    assert (alone.exit_code, "--from-log" in alone.stderr) == (2, True)
    other = world.folder / "other.yaml"
    other.write_text(DEMO.read_text().replace("model: llama-3.1-8b", "model: llama-3.3-70b"))
    unserved = await world.headway("simulate", "--from-log", "1h", "--fleet", str(other))
    assert unserved.exit_code == 1
    assert f"`{MODEL}`" in unserved.stderr

    def read(**limits: int) -> str:
        with OperatorClient(world.url, world.surfaces.operators["viewer"]) as api:
            try:
                read_log(Reader(api, **limits), 3_600, datetime.now(UTC))
            except CommandFailure as failure:
                return str(failure)
        return ""

    assert await asyncio.to_thread(read) == ""
    assert "more than 5 rows" in await asyncio.to_thread(read, rows_max=5)
    assert "larger than 900 bytes" in await asyncio.to_thread(read, bytes_max=900)
