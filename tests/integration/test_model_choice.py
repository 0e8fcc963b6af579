"""Models by outcomes on PostgreSQL and over the tenant API: chosen once, counted once, climbed on failure."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName, SloClassName, TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.scheduler.model_choice import Evidence, Why, evidence_of, saving_of
from controlplane.store import model_choice as store
from controlplane.store import workflows
from controlplane.store.model_choice import ChoiceRow
from controlplane.store.session import make_engine
from policies.load import DEFAULT_FOLDER
from tests.integration.surfaces import Surfaces, running_surfaces

SMALL, LARGE = "llama-3.1-8b", "llama-3.3-70b"
TENANT = TenantId("aurora")
NEW = {"kind": "fix", "scope": "autonomous", "steps_expected": 4, "deadline_s": 60}
CHOICE = f"""
kind: model_choice
version: 1
is_enabled: true
ladders:
  llama: [{SMALL}, {LARGE}]
classes:
  fix: {{ladder: llama, default: {SMALL}, tenants: [aurora], explore_ratio: 0, holdout_ratio: 0}}
"""


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


@pytest.fixture
async def engine(surfaces: Surfaces, clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    """Another replica's eyes."""
    assert surfaces.replica
    engine = make_engine(clean_database_url)
    yield engine
    await engine.dispose()


async def offer(surfaces: Surfaces, document: str = CHOICE) -> None:
    files = {path.name: path.read_text() for path in Path(DEFAULT_FOLDER).glob("*.yaml")}
    body = {"files": {**files, "model_choice.yaml": document}, "reason": "test", "is_now": True}
    response = await surfaces.operate("POST", "policies/revisions", body)
    assert response.status_code == 201, response.text
    policies = surfaces.replica.gate.policies
    async with asyncio.timeout(10):
        while not policies.policy.bundle.model_choice.is_enabled:
            await policies.refresh()
            await asyncio.sleep(0.01)


async def post(surfaces: Surfaces, path: str, body: object, tenant: str = TENANT) -> Any:
    response = await surfaces.call("POST", path, surfaces.tenants[tenant], body)
    assert response.status_code in (200, 201), response.text
    return response.json()


async def refused(surfaces: Surfaces, body: object, tenant: str = TENANT) -> tuple[int, str]:
    response = await surfaces.call("POST", "/v1/workflows", surfaces.tenants[tenant], body)
    return response.status_code, response.json()["error"]["code"]


async def make(
    engine: AsyncEngine,
    *,
    spent_micro_usd: int,
    state: WorkflowState,
    model: str = SMALL,
    failed: tuple[ModelName, ...] = (),
    task: str | None = None,
    propensity: float = 0.5,
) -> WorkflowId:
    """A workflow that was given a model, cost something and ended."""
    record = await workflows.create(
        engine,
        tenant=TENANT,
        kind="fix",
        scope=Scope.AUTONOMOUS,
        steps_expected=1,
        slo_class=SloClassName("interactive"),
        deadline_ms=60_000,
        budget_micro_usd=None,
        choice=ChoiceRow(
            task_id=None if task is None else WorkflowId(task),
            asked_model="auto:fix",
            model=ModelName(model),
            default_model=ModelName(LARGE),
            failed=failed,
            why=Why.LEARNED,
            propensity=0.5,
            default_propensity=propensity,
            can_climb=True,
            policy_revision="0" * 64,
            record={"chain": [model]},
        ),
    )
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO workflow_steps (workflow_id, step, spent_micro_usd)"
                " VALUES (:id, 0, :spent)"
            ),
            {"id": record.id, "spent": spent_micro_usd},
        )
        if state is WorkflowState.EXPIRED:
            await connection.execute(
                text(
                    "UPDATE workflows SET state = 'expired', ended_at = clock_timestamp()"
                    " WHERE id = :id"
                ),
                {"id": record.id},
            )
    if state not in (WorkflowState.EXPIRED, WorkflowState.RUNNING):
        await workflows.end(engine, record.id, TENANT, state)
    return record.id


# ---------------------------------------------------------------- the API


async def test_off_by_default_a_choice_does_not_exist(surfaces: Surfaces) -> None:
    assert await refused(surfaces, {**NEW, "model": "auto:fix"}) == (404, "model_not_found")
    listed = await surfaces.call("GET", "/v1/model-choice", surfaces.tenants[TENANT])
    assert listed.json()["data"] == []
    plain = await post(surfaces, "/v1/workflows", NEW)
    assert (plain["model"], plain["asked_model"], plain["retry_of"]) == (None, None, None)


async def test_a_failure_that_is_reported_climbs_the_ladder(surfaces: Surfaces) -> None:
    await offer(surfaces)
    first = await post(surfaces, "/v1/workflows", {**NEW, "model": "auto:fix"})
    assert (first["model"], first["asked_model"]) == (SMALL, "auto:fix")

    again = {**NEW, "model": "auto:fix", "retry_of": first["id"]}
    assert await refused(surfaces, again) == (409, "conflict")
    ended = await post(surfaces, f"/v1/workflows/{first['id']}/outcome", {"outcome": "failure"})
    assert ended["retry"]["model"] == LARGE
    assert ended["state"] == "failed"

    # What is asked for is what was asked for before, unless it is said.
    second = await post(surfaces, "/v1/workflows", {**NEW, "retry_of": first["id"]})
    assert (second["model"], second["asked_model"]) == (LARGE, "auto:fix")
    assert second["retry_of"] == first["id"]
    told = await surfaces.call("GET", f"/v1/model-choice/{second['id']}", surfaces.tenants[TENANT])
    assert told.json()["why"] == "climbed"
    assert told.json()["failed_before"] == [SMALL]
    assert told.json()["task_id"] == first["id"]
    assert f"`{SMALL}` failed before" in told.json()["sentence"]

    ended = await post(surfaces, f"/v1/workflows/{second['id']}/outcome", {"outcome": "success"})
    assert ended["retry"] is None
    assert await refused(surfaces, {**NEW, "retry_of": second["id"]}) == (409, "conflict")


async def test_a_ladder_is_climbed_without_learning(surfaces: Surfaces) -> None:
    await offer(surfaces)
    seen = []
    before: str | None = None
    for _ in range(3):
        body = {**NEW, "model": "ladder:llama", **({} if before is None else {"retry_of": before})}
        workflow = await post(surfaces, "/v1/workflows", body)
        seen.append(workflow["model"])
        before = workflow["id"]
        await post(surfaces, f"/v1/workflows/{before}/outcome", {"outcome": "failure"})
    assert seen == [SMALL, LARGE, LARGE]


async def test_who_may_ask_and_for_what(surfaces: Surfaces) -> None:
    await offer(surfaces)
    body = {**NEW, "model": "auto:fix"}
    assert await refused(surfaces, body, "borealis") == (404, "model_not_found")
    assert await refused(surfaces, {**NEW, "model": "auto:other"}) == (404, "model_not_found")
    assert await refused(surfaces, {**NEW, "model": SMALL}) == (400, "invalid_request")
    missing = {**body, "retry_of": "wf-nowhere"}
    assert await refused(surfaces, missing) == (404, "workflow_not_found")
    other = await post(surfaces, "/v1/workflows", NEW, "borealis")
    assert await refused(surfaces, {**body, "retry_of": other["id"]}) == (404, "workflow_not_found")
    own = await post(surfaces, "/v1/workflows", body)
    hidden = await surfaces.call(
        "GET", f"/v1/model-choice/{own['id']}", surfaces.tenants["borealis"]
    )
    assert hidden.status_code == 404


async def test_operators_see_what_is_offered(surfaces: Surfaces) -> None:
    await offer(surfaces)
    offered = (await surfaces.operate("GET", "model-choice/classes")).json()
    assert offered["is_enabled"]
    assert [entry["asked_model"] for entry in offered["data"]] == ["auto:fix"]
    standing = (await surfaces.operate("GET", "model-choice?tenant=aurora")).json()["data"]
    assert [entry["asked_model"] for entry in standing] == ["auto:fix"]
    assert [model["model"] for model in standing[0]["models"]] == [SMALL, LARGE]
    assert standing[0]["saving"] is None
    assert (await surfaces.operate("GET", "model-choice?tenant=nobody")).status_code == 404


async def test_a_bad_document_says_what_is_wrong(surfaces: Surfaces) -> None:
    for wrong, words in (
        (CHOICE.replace("ladder: llama", "ladder: gone"), "which is not here"),
        (CHOICE.replace(f"default: {SMALL}", "default: other"), "is not on its ladder"),
        (CHOICE.replace(f"[{SMALL}, {LARGE}]", f"[{SMALL}, {SMALL}]"), "twice"),
        (CHOICE.replace("explore_ratio: 0,", "explore_ratio: 0.9,"), "explore_ratio"),
    ):
        files = {path.name: path.read_text() for path in Path(DEFAULT_FOLDER).glob("*.yaml")}
        body = {"files": {**files, "model_choice.yaml": wrong}, "reason": "r", "is_now": True}
        response = await surfaces.operate("POST", "policies/revisions", body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


# ---------------------------------------------------------------- the store


async def test_outcomes_are_counted_once_by_however_many(engine: AsyncEngine) -> None:
    """The sums against those that the core's own arithmetic gives."""
    ends = [
        (100, WorkflowState.SUCCEEDED),
        (300, WorkflowState.FAILED),
        (50, WorkflowState.EXPIRED),
        (900, WorkflowState.CANCELLED),
        (700, WorkflowState.RUNNING),
    ]
    for spent, state in ends * 4:
        await make(engine, spent_micro_usd=spent, state=state)
    async with engine.begin() as another:
        # What another replica is counting is left to it.
        await another.execute(text("SELECT FROM model_choices FOR UPDATE"))
        assert await store.count_outcomes(engine, settle_s=0.0) == []
    counted = await asyncio.gather(*(store.count_outcomes(engine, settle_s=0.0) for _ in range(4)))
    assert sum(entry.workflows for one in counted for entry in one) == 16
    assert await store.count_outcomes(engine, settle_s=0.0) == []
    expected = Evidence()
    for spent, state in ends * 4:
        if state in (WorkflowState.SUCCEEDED, WorkflowState.FAILED, WorkflowState.EXPIRED):
            expected = expected.plus(
                evidence_of(
                    is_success=state is WorkflowState.SUCCEEDED,
                    is_reported=state is not WorkflowState.EXPIRED,
                    can_climb=True,
                    spent_micro_usd=spent,
                    seconds=0.0,
                )
            )
    (row,) = await store.evidence_of_tenant(engine, TENANT, "auto:fix")
    found = row.evidence
    assert (found.tries, found.successes, found.reported, found.climbable) == pytest.approx(
        (expected.tries, expected.successes, expected.reported, expected.climbable), rel=1e-6
    )
    assert found.spent_micro_usd == pytest.approx(expected.spent_micro_usd, rel=1e-6)
    assert found.spent_squared == pytest.approx(expected.spent_squared, rel=1e-6)
    assert 0.0 <= found.seconds < 60.0


async def test_evidence_fades_as_the_core_says(engine: AsyncEngine) -> None:
    await make(engine, spent_micro_usd=100, state=WorkflowState.SUCCEEDED)
    await store.count_outcomes(engine, settle_s=0.0)
    age = timedelta(days=45)
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE model_evidence SET updated_at = updated_at - :age"), {"age": age}
        )
    (old,) = await store.evidence_since(engine, None)
    await make(engine, spent_micro_usd=10, state=WorkflowState.FAILED)
    await store.count_outcomes(engine, settle_s=0.0)
    (row,) = await store.evidence_since(engine, old.updated_at + timedelta(days=1))
    expected = old.evidence.aged((row.updated_at - old.updated_at).total_seconds())
    assert row.evidence.successes == pytest.approx(expected.successes, rel=1e-6)
    assert row.evidence.tries == pytest.approx(expected.tries + 1.0, rel=1e-6)
    assert row.evidence.spent_micro_usd == pytest.approx(expected.spent_micro_usd + 10.0, rel=1e-6)


async def test_a_workflow_gets_one_model_whoever_asks_first(engine: AsyncEngine) -> None:
    record = await workflows.create(
        engine,
        tenant=TENANT,
        kind="fix",
        scope=Scope.AUTONOMOUS,
        steps_expected=1,
        slo_class=SloClassName("interactive"),
        deadline_ms=60_000,
        budget_micro_usd=None,
    )

    def row(model: str) -> ChoiceRow:
        return ChoiceRow(
            task_id=None,
            asked_model="auto:fix",
            model=ModelName(model),
            default_model=ModelName(LARGE),
            failed=(),
            why=Why.LEARNED,
            propensity=1.0,
            default_propensity=0.0,
            can_climb=False,
            policy_revision="0" * 64,
            record={},
        )

    given = await asyncio.gather(
        *(store.give_model(engine, record.id, TENANT, row(model)) for model in [SMALL, LARGE] * 5)
    )
    assert len(set(given)) == 1
    kept = await workflows.get(engine, record.id, TENANT)
    assert kept is not None
    assert (kept.asked_model, kept.model) == given[0]
    told = await store.get(engine, record.id, TENANT)
    assert told is not None
    assert told.model == kept.model
    assert await store.get(engine, record.id, TenantId("borealis")) is None
    assert await store.give_model(engine, record.id, TenantId("borealis"), row(SMALL)) is None


async def test_a_saving_is_of_whole_tasks(engine: AsyncEngine) -> None:
    """Small ones that fail are tried again with the large one; what still runs is left out."""
    for number in range(12):
        is_large = number % 2 == 0
        first = await make(
            engine,
            spent_micro_usd=100 if is_large else 10,
            state=WorkflowState.SUCCEEDED if number % 4 else WorkflowState.FAILED,
            model=LARGE if is_large else SMALL,
        )
        if not is_large:
            await make(
                engine,
                spent_micro_usd=80,
                state=WorkflowState.RUNNING if number == 11 else WorkflowState.SUCCEEDED,
                model=LARGE,
                failed=(ModelName(SMALL),),
                task=first,
            )
    await store.count_outcomes(engine, settle_s=0.0)
    tasks = await store.tasks(engine, TENANT, "auto:fix")
    assert len(tasks) == 11
    assert sorted(task.spent_micro_usd for task in tasks) == [90.0] * 5 + [100.0] * 6
    assert [task.is_default_first for task in tasks].count(True) == 6
    assert saving_of(tasks) is None
