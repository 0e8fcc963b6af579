"""Plans over HTTP and on the command line: seen by viewers, applied by operators, modes by admins."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, text

from controlplane.domain.catalog import Role, Scope
from controlplane.domain.ids import GpuTypeName, ModelName, RegionName
from controlplane.runtime.demand import SLOT_S, Sizes, Slot, slot_start
from controlplane.runtime.planner_loop import digest_of
from controlplane.scheduler.planner.problem import (
    ClassPrice,
    DesiredCount,
    DesiredNodes,
    Move,
    MoveKind,
    PoolPrice,
    Prices,
)
from controlplane.store import plans, tables
from controlplane.store.demand import ClassKey
from controlplane.store.plans import PlanRecord
from controlplane.store.session import make_engine, transaction
from tests.integration.planner_world import document, move, plan
from tests.integration.surfaces import Surfaces, running_surfaces, served
from tests.integration.test_cli import Headway

MODEL = ModelName("llama-3.1-8b")
L40S = GpuTypeName("l40s")
REGION = RegionName("us-east")


def desired(wanted: int, actual: int, model: ModelName = MODEL) -> DesiredCount:
    return DesiredCount(
        model=model, gpu_type=L40S, gpus=1, role=Role.BOTH, region=REGION,
        desired=wanted, actual=actual,
    )  # fmt: skip


MOVES = (
    move(0, MoveKind.UNLOAD, "us-l40s", "l40s-8b-a", MODEL),
    move(1, MoveKind.LOAD, "us-l40s", "l40s-8b-c", MODEL, after=(0,)),
    move(2, MoveKind.SLEEP, "us-l40s", "l40s-8b-b", MODEL),
)
SHORT = Prices(
    pools=(
        PoolPrice(
            model=MODEL, gpu_type=L40S, gpus=1, role=Role.BOTH, region=REGION,
            micro_usd_per_gpu_ms=3.5, micro_usd_per_kv_token_s=0.01,
        ),
    ),
    classes=(
        ClassPrice(
            class_id=f"{MODEL}/gold/chat", model=MODEL, bid_micro_usd=1_500.0, served_ratio=0.8
        ),
    ),
)  # fmt: skip


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


async def store(url: str, *moves: Move, wanted: int = 3, **members: Any) -> PlanRecord:
    engine = make_engine(url)
    made = plan(
        *moves,
        **{
            "desired": (desired(wanted, 2),),
            "desired_nodes": (
                DesiredNodes(region=REGION, gpu_type=L40S, gpus=2, desired=2, actual=1),
            ),
            "binding": ("GPUs of us-east/l40sx2 are all in use",),
            "prices": SHORT,
            "gap_ratio": 0.004,
            **members,
        },
    )
    try:
        async with transaction(engine) as connection:
            epoch = (await connection.execute(text("SELECT epoch FROM leader"))).scalar_one()
        record = await plans.record(
            engine, epoch=epoch, digest=digest_of(made), problem_digest="0" * 64,
            status=str(made.status),
            document=document(made) | {"not_executable": {"2": "not executable: a test"}},
        )  # fmt: skip
    finally:
        await engine.dispose()
    assert record is not None
    return record


async def test_the_same_wishes_are_one_revision(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    first = await store(clean_database_url, *MOVES)
    again = await store(clean_database_url, *MOVES, gap_ratio=0.001)
    assert again.revision == first.revision
    assert again.confirmed_at > first.confirmed_at
    assert again.document["plan"]["gap_ratio"] == 0.001
    other = await store(clean_database_url, *MOVES[:2])
    assert other.revision > first.revision
    engine = make_engine(clean_database_url)
    stale = await plans.record(
        engine, epoch=10**6, digest="x", problem_digest="y", status="ok", document={}
    )
    await engine.dispose()
    assert stale is None
    listed = (await surfaces.operate("GET", "plans?limit=1", role="viewer")).json()
    assert [entry["revision"] for entry in listed["data"]] == [other.revision]
    rest = (
        await surfaces.operate("GET", f"plans?cursor={listed['next_cursor']}", role="viewer")
    ).json()
    assert [(entry["revision"], entry["moves"]) for entry in rest["data"]] == [(first.revision, 3)]
    assert (await surfaces.operate("GET", "plans?cursor=x", role="viewer")).status_code == 400


async def test_roles_and_conflicts(surfaces: Surfaces, clean_database_url: str) -> None:
    record = await store(clean_database_url, *MOVES)
    path = f"plans/{record.revision}/apply"
    why = {"reason": "a test"}

    async def status(method: str, where: str, body: object, role: str) -> int:
        return (await surfaces.operate(method, where, body, role)).status_code

    assert await status("POST", path, why, "viewer") == 403
    assert await status("POST", "plans/pause", why, "viewer") == 403
    assert await status("POST", "plans/mode", {**why, "mode": "act"}, "operator") == 403
    assert await status("POST", "plans/mode", {**why, "mode": "go"}, "admin") == 400
    assert await status("POST", path, {}, "operator") == 400
    assert await status("GET", "plans/999", None, "viewer") == 404
    assert await status("POST", "plans/999/apply", why, "operator") == 404
    # Before anything was changed, paused is a change and resumed is none.
    current = (await surfaces.operate("GET", "plans/current", role="viewer")).json()
    assert (current["control"]["mode"], current["control"]["is_paused"]) == ("propose", False)
    assert current["newest"]["revision"] == record.revision
    assert await status("POST", "plans/resume", why, "operator") == 200
    assert await status("POST", "plans/pause", {**why, "generation": 7}, "operator") == 409
    assert await status("POST", "plans/pause", {**why, "generation": 0}, "operator") == 200
    off = await surfaces.operate("POST", "plans/mode", {**why, "mode": "off"})
    assert (off.json()["mode"], off.json()["generation"]) == ("off", 2)
    refused = await surfaces.operate("POST", path, why, "operator")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert await status("POST", "plans/mode", {**why, "mode": "propose"}, "admin") == 200
    applied = await surfaces.operate("POST", path, why, "operator")
    assert applied.status_code == 202, applied.text
    told = applied.json()
    assert (told["state"], told["applied_by"][:4]) == ("applying", "key:")
    states = {entry["number"]: entry["state"] for entry in told["move_states"]}
    # The demo declares how l40s-8b-a is started.
    assert states == dict.fromkeys(range(3), "waiting")
    assert await status("POST", path, why, "operator") == 409
    actions = [
        entry["action"]
        for entry in (await surfaces.operate("GET", "audit?subject=plan*")).json()["data"]
    ]
    assert actions == [
        "planner.apply", "planner.mode", "planner.mode", "planner.pause",
    ]  # fmt: skip


async def test_an_autoscaler_is_told_what_is_wanted(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    assert (await surfaces.operate("GET", "plans/desired", role="viewer")).status_code == 404
    record = await store(clean_database_url, *MOVES)
    wanted = (await surfaces.operate("GET", "plans/desired", role="viewer")).json()
    assert wanted["revision"] == record.revision
    assert 0 <= wanted["age_s"] < 60
    assert wanted["nodes"] == [
        {"region": REGION, "gpu_type": L40S, "gpus": 2, "desired": 2, "actual": 1}
    ]
    assert [(entry["model"], entry["desired"]) for entry in wanted["engines"]] == [(MODEL, 3)]


async def test_the_command_line_shows_compares_and_changes(
    surfaces: Surfaces, clean_database_url: str, tmp_path: object
) -> None:
    async with served(surfaces) as url:
        headway = Headway(tmp_path, url, surfaces.operators["admin"])
        assert "no plan yet" in (await headway("plan", "show")).out
        assert (await headway("plan", "diff")).code == 1
        first = await store(clean_database_url, *MOVES)
        second = await store(clean_database_url, wanted=5)
        for command in (
            ("show",), ("show", str(first.revision)), ("diff",), ("history",),
            ("diff", str(first.revision)), ("diff", str(second.revision), str(first.revision)),
        ):  # fmt: skip
            people = await headway("plan", *command)
            assert (people.code, people.err) == (0, ""), command
            assert max(len(line) for line in people.out.splitlines()) <= 80, people.out
            programs = await headway("plan", *command, "--json")
            assert isinstance(json.loads(programs.out), dict), command
        shown = " ".join((await headway("plan", "show", str(first.revision))).out.split())
        for words in ("WHAT HOLDS IT BACK", "not executable: a test", "0.4%", "unload l40s-8b-a"):
            assert words in shown, shown
        compared = json.loads(
            (await headway("plan", "diff", str(second.revision), str(first.revision), "--json")).out
        )
        assert [(entry["before"], entry["after"]) for entry in compared["engines"]] == [(3, 5)]
        assert (await headway("plan", "mode", "perhaps", "--reason", "x")).code == 2
        assert "act" in (await headway("plan", "mode", "act", "--reason", "we trust it")).out
        assert "paused" in (await headway("plan", "pause", "--reason", "we look")).out
        line = " ".join((await headway("plan", "show")).out.split())
        assert "planner: act, paused" in line
        assert "we look" in line
        assert (await headway("plan", "resume", "--reason", "we looked")).code == 0
        refused = await headway("plan", "apply", str(second.revision), "--reason", "now")
        assert refused.code == 1
        assert "has no moves" in refused.err
        applied = await headway("plan", "apply", str(first.revision), "--reason", "now")
        assert applied.code == 0, applied.err


async def test_a_purchase_is_planned_from_what_came(
    surfaces: Surfaces, clean_database_url: str, tmp_path: Path
) -> None:
    assert (await surfaces.operate("GET", "plans/procurement", role="viewer")).status_code == 404
    start = slot_start(datetime.now(UTC)) - timedelta(days=2)
    needs = Sizes(
        steps=2.0, uncached_tokens=1_000.0, context_tokens=2_000.0, completion_tokens=300.0,
        gap_s=1.0, deadline_s=60.0,
    )  # fmt: skip
    rows = []
    for number in range(2 * 96):
        at = start + timedelta(seconds=number * SLOT_S)
        # Twelve hours of day and twelve of night.
        workflows = 40_000.0 if number // 48 % 2 else 4_000.0
        slot = Slot(
            key=ClassKey(model=MODEL, tenant_class="gold", scope=Scope.RESEARCH),
            slo_class="standard", started_at=at, workflows=workflows, needs=needs,
        )  # fmt: skip
        rows.append({"class_id": slot.key.class_id, "started_at": at, "body": slot.body()})
    engine = make_engine(clean_database_url)
    async with transaction(engine) as connection:
        await connection.execute(insert(tables.demand_slots), rows)
    await engine.dispose()
    told = (await surfaces.operate("GET", "plans/procurement", role="viewer")).json()
    assert 48 <= len(told["work"]) <= 49
    assert max(told["work"]) == pytest.approx(10 * min(told["work"][1:-1]))
    assert told["work_per_gpu"][told["unit"]] == pytest.approx(1.0)
    async with served(surfaces) as url:
        headway = Headway(tmp_path, url, surfaces.operators["admin"])
        people = await headway("plan", "procure")
        assert (people.code, people.err) == (0, "")
        assert max(len(line) for line in people.out.splitlines()) <= 80, people.out
        programs = json.loads((await headway("plan", "procure", "--json")).out)
        names = [step["name"] for step in programs["steps"]]
        assert names == ["on demand", "reserved", "spot"]
        costs = [step["micro_usd_per_hour_mean"] for step in programs["steps"]]
        assert costs == sorted(costs, reverse=True)
        waiting = await headway("plan", "procure", "--deferrable", "0.2", "--json")
        assert json.loads(waiting.out)["steps"][-1]["micro_usd_per_hour_mean"] <= costs[-1] * 1.0001
        own = tmp_path / "offers.yaml"
        own.write_text("offers: [{gpu_type: x, term: on_demand}]")
        refused = await headway("plan", "procure", "--prices", str(own))
        assert refused.code == 1
        assert "offer 1 is wrong" in refused.err


def test_a_digest_names_wishes_and_not_circumstances() -> None:
    base = plan(*MOVES)
    same = replace(
        base, gap_ratio=0.5, solve_s=9.0, prices=SHORT, problem_digest="1" * 64, made_at_s=2.0,
        desired=(replace(base.desired[0], actual=7),), binding=("another",),
    )  # fmt: skip
    assert digest_of(same) == digest_of(base)
    for other in (
        replace(base, moves=MOVES[:2]),
        replace(base, desired=(replace(base.desired[0], desired=9),)),
        replace(base, moves=(replace(MOVES[0], engine_id="x"), *MOVES[1:])),
    ):
        assert digest_of(other) != digest_of(base)
