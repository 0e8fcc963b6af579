"""Workflows over the tenant API: their life, and that another tenant's do not exist."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.surfaces import Surfaces, running_surfaces

NEW = {
    "kind": "code-review",
    "scope": "autonomous",
    "steps_expected": 4,
    "deadline_s": 60,
    "budget_usd": 0.5,
}


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


async def create(surfaces: Surfaces, tenant: str = "aurora", **changes: object) -> dict[str, Any]:
    response = await surfaces.call(
        "POST", "/v1/workflows", surfaces.tenants[tenant], {**NEW, **changes}
    )
    assert response.status_code == 201, response.text
    return response.json()


async def test_created_workflow_says_what_was_asked_for(surfaces: Surfaces) -> None:
    workflow = await create(surfaces)
    assert workflow["state"] == "running"
    assert workflow["tenant_id"] == "aurora"
    assert workflow["scope"] == "autonomous"
    assert workflow["slo_class"] == "interactive"
    assert workflow["steps_expected"] == 4
    assert workflow["budget_micro_usd"] == 500_000
    assert workflow["spent_micro_usd"] == 0
    again = await surfaces.call(
        "GET", f"/v1/workflows/{workflow['id']}", surfaces.tenants["aurora"]
    )
    assert again.json() == workflow


async def test_workflow_without_budget_has_none(surfaces: Surfaces) -> None:
    body = {name: value for name, value in NEW.items() if name != "budget_usd"}
    response = await surfaces.call("POST", "/v1/workflows", surfaces.tenants["aurora"], body)
    assert response.json()["budget_micro_usd"] is None


async def test_another_tenants_workflow_does_not_exist(surfaces: Surfaces) -> None:
    workflow = await create(surfaces, "aurora")
    path = f"/v1/workflows/{workflow['id']}"
    for method, suffix, body in (
        ("GET", "", None),
        ("POST", "/cancel", None),
        ("POST", "/outcome", {"outcome": "success"}),
    ):
        response = await surfaces.call(method, f"{path}{suffix}", surfaces.tenants["cumulus"], body)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "workflow_not_found"
    own = await surfaces.call("GET", path, surfaces.tenants["aurora"])
    assert own.json()["state"] == "running"


async def test_outcome_is_idempotent_and_another_one_conflicts(surfaces: Surfaces) -> None:
    workflow = await create(surfaces)
    path = f"/v1/workflows/{workflow['id']}"
    key = surfaces.tenants["aurora"]
    success = {"outcome": "success", "detail": "merged"}
    first = await surfaces.call("POST", f"{path}/outcome", key, success)
    assert first.status_code == 200
    assert first.json()["state"] == "succeeded"
    assert first.json()["detail"] == "merged"
    assert (await surfaces.call("POST", f"{path}/outcome", key, success)).json() == first.json()

    other = await surfaces.call("POST", f"{path}/outcome", key, {"outcome": "failure"})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "conflict"
    assert other.headers["x-should-retry"] == "false"
    cancel = await surfaces.call("POST", f"{path}/cancel", key)
    assert cancel.status_code == 409
    assert (await surfaces.call("GET", path, key)).json() == first.json()


async def test_cancel_is_idempotent(surfaces: Surfaces) -> None:
    workflow = await create(surfaces)
    path = f"/v1/workflows/{workflow['id']}/cancel"
    for _ in range(2):
        response = await surfaces.call("POST", path, surfaces.tenants["aurora"])
        assert response.status_code == 200
        assert response.json()["state"] == "cancelled"


async def test_calls_of_an_ended_workflow_are_refused_at_once(surfaces: Surfaces) -> None:
    workflow = await create(surfaces)
    key = surfaces.tenants["aurora"]
    await surfaces.call("POST", f"/v1/workflows/{workflow['id']}/cancel", key)
    response = await surfaces.client.post(
        "/v1/chat/completions",
        headers={"authorization": f"Bearer {key}", "x-headway-workflow": workflow["id"]},
        json={"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}]},
    )
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "workflow_ended"


async def test_list_has_own_workflows_newest_first_in_pages(surfaces: Surfaces) -> None:
    made = [(await create(surfaces, kind=f"kind-{number}"))["id"] for number in range(5)]
    await create(surfaces, "borealis")
    key = surfaces.tenants["aurora"]
    seen, cursor = [], ""
    while True:
        page = (await surfaces.call("GET", f"/v1/workflows?limit=2{cursor}", key)).json()
        assert page["object"] == "list"
        assert len(page["data"]) <= 2
        seen += [workflow["id"] for workflow in page["data"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == made[::-1]


NONSENSE: tuple[tuple[dict[str, object], str], ...] = (
    ({"scope": "galaxy"}, "body.scope"),
    ({"steps_expected": 0}, "body.steps_expected"),
    ({"steps_expected": "4"}, "body.steps_expected"),
    ({"deadline_s": -1}, "body.deadline_s"),
    ({"budget_usd": 0}, "body.budget_usd"),
    ({"kind": "a\u0000b"}, "body.kind"),
    ({"color": "red"}, "body.color"),
)


async def test_nonsense_is_refused_in_the_envelope(surfaces: Surfaces) -> None:
    for change, place in NONSENSE:
        response = await surfaces.call(
            "POST", "/v1/workflows", surfaces.tenants["aurora"], {**NEW, **change}
        )
        assert response.status_code == 400, change
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_request"
        assert place in error["message"]


async def test_unknown_slo_class_lists_the_known_ones(surfaces: Surfaces) -> None:
    response = await surfaces.call(
        "POST", "/v1/workflows", surfaces.tenants["aurora"], {**NEW, "slo_class": "platinum"}
    )
    assert response.status_code == 404
    assert "batch, interactive, standard" in response.json()["error"]["message"]
