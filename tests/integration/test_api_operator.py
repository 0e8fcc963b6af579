"""The operator API: roles, lists, and every change that an operator can make."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.store.catalog import upsert_engines
from controlplane.store.session import make_engine
from dataplane.protocol.messages import EngineFacts, EngineState
from tests.integration.surfaces import Surfaces, running_surfaces

LISTS = (
    "regions", "gpu-types", "models", "nodes", "engines", "tenants", "keys", "workflows",
    "requests", "decisions", "commands",
)  # fmt: skip


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


@pytest.fixture
async def with_engine(surfaces: Surfaces, clean_database_url: str) -> Surfaces:
    """The same with one engine that the agent of node `us-l40s` declared."""
    facts = EngineFacts(
        engine_id="l40s-8b-a", model="llama-3.1-8b", role="both", port=9000, kind="simulated",
        state=EngineState.SERVING, gpus=1, seats=32, kv_tokens=200_000, block_tokens=16,
        context_tokens_max=32_768, started_ms=1,
    )  # fmt: skip
    engine = make_engine(clean_database_url)
    await upsert_engines(engine, "us-l40s", 1, [facts])
    await engine.dispose()
    return surfaces


async def ok(surfaces: Surfaces, method: str, path: str, body: object = None) -> dict[str, Any]:
    response = await surfaces.operate(method, path, body)
    assert response.is_success, response.text
    return response.json()


async def test_every_list_is_a_page_that_a_viewer_may_see(surfaces: Surfaces) -> None:
    for path in LISTS:
        response = await surfaces.operate("GET", f"{path}?limit=1", role="viewer")
        assert response.status_code == 200, (path, response.text)
        page = response.json()
        assert set(page) == {"object", "data", "next_cursor"}
        assert len(page["data"]) <= 1


async def test_lists_are_whole_over_their_pages(surfaces: Surfaces) -> None:
    for path in ("regions", "gpu-types", "models", "nodes", "tenants", "keys"):
        whole = (await ok(surfaces, "GET", f"{path}?limit=500"))["data"]
        assert whole, path
        seen, cursor = [], ""
        for _ in range(len(whole) + 1):
            page = await ok(surfaces, "GET", f"{path}?limit=1{cursor}")
            seen += page["data"]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert seen == whole, path


NEW_TENANT = {
    "id": "dorado", "name": "Dorado", "tenant_class": "gold", "slo_class": "batch", "budget_usd": 1,
}  # fmt: skip


# What is changed, and the least role that may: (method, path, body, a role below, the role needed).
CHANGES = [
    ("POST", "tenants", NEW_TENANT, "operator", "admin"),
    ("PATCH", "tenants/aurora", {"budget_usd": 1}, "viewer", "operator"),
    ("POST", "keys", {"name": "x", "tenant_id": "aurora"}, "operator", "admin"),
    ("DELETE", "keys/abcdefgh", None, "operator", "admin"),
    ("POST", "cluster", {}, "operator", "admin"),
    ("POST", "nodes/us-l40s/cordon", None, "viewer", "operator"),
    ("POST", "nodes/us-l40s/uncordon", None, "viewer", "operator"),
    ("POST", "nodes/us-l40s/drain", None, "viewer", "operator"),
    ("POST", "engines/l40s-8b-a/stop", None, "viewer", "operator"),
    ("POST", "engines/l40s-8b-a/drain", None, "viewer", "operator"),
    ("POST", "engines/l40s-8b-a/unload", None, "viewer", "operator"),
    (
        "POST",
        "engines/new/load",
        {"node_id": "us-l40s", "kind": "simulated", "model": "llama-3.1-8b"},
        "viewer",
        "operator",
    ),
    ("POST", "workflows/wf-1/cancel", None, "viewer", "operator"),
]


async def test_role_below_is_told_which_one_it_needs(surfaces: Surfaces) -> None:
    for method, path, body, role, needed in CHANGES:
        response = await surfaces.operate(method, path, body, role)
        assert response.status_code == 403, (path, response.text)
        error = response.json()["error"]
        assert error["code"] == "forbidden_by_policy"
        assert f"`{needed}`" in error["message"]
        assert f"`{role}`" in error["message"]


async def test_tenant_is_created_once(surfaces: Surfaces) -> None:
    response = await surfaces.operate("POST", "tenants", NEW_TENANT)
    assert response.status_code == 201, response.text
    assert response.json()["limit_micro_usd"] == 1_000_000
    again = await surfaces.operate("POST", "tenants", NEW_TENANT)
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "conflict"


async def test_tenant_of_an_unknown_slo_class_is_refused(surfaces: Surfaces) -> None:
    response = await surfaces.operate("POST", "tenants", {**NEW_TENANT, "slo_class": "nope"})
    assert response.status_code == 404
    assert "nope" in response.json()["error"]["message"]


async def test_budget_is_set(surfaces: Surfaces) -> None:
    changed = await ok(surfaces, "PATCH", "tenants/aurora", {"budget_usd": 2.5})
    assert changed["limit_micro_usd"] == 2_500_000
    assert (await surfaces.operate("PATCH", "tenants/nobody", {"budget_usd": 1})).status_code == 404
    assert (await surfaces.operate("PATCH", "tenants/aurora", {})).status_code == 400


async def test_disabled_tenant_is_turned_away_at_once(surfaces: Surfaces) -> None:
    key = surfaces.tenants["aurora"]
    call = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}]}
    await ok(surfaces, "PATCH", "tenants/aurora", {"is_disabled": True})
    response = await surfaces.call("POST", "/v1/chat/completions", key, call)
    assert response.status_code in {401, 403}
    workflow = await surfaces.call("GET", "/v1/workflows", key)
    assert workflow.status_code in {401, 403}
    await ok(surfaces, "PATCH", "tenants/aurora", {"is_disabled": False})
    assert (await surfaces.call("GET", "/v1/workflows", key)).status_code == 200


async def test_key_works_until_it_is_revoked(surfaces: Surfaces) -> None:
    created = await ok(surfaces, "POST", "keys", {"name": "laptop", "tenant_id": "aurora"})
    key = created["key"]
    assert (await surfaces.call("GET", "/v1/workflows", key)).status_code == 200
    listed = (await ok(surfaces, "GET", "keys"))["data"]
    assert key not in str(listed)
    assert next(entry for entry in listed if entry["id"] == created["id"])["name"] == "laptop"

    for _ in range(2):
        assert (await ok(surfaces, "DELETE", f"keys/{created['id']}"))["is_revoked"]
    assert (await surfaces.call("GET", "/v1/workflows", key)).status_code == 401
    assert (await surfaces.operate("DELETE", "keys/nothing")).status_code == 404


async def test_operator_key_has_its_role(surfaces: Surfaces) -> None:
    created = await ok(surfaces, "POST", "keys", {"name": "eye", "operator_role": "viewer"})
    assert (await surfaces.call("GET", "/operator/v1/status", created["key"])).status_code == 200
    response = await surfaces.call("POST", "/operator/v1/nodes/us-l40s/cordon", created["key"])
    assert response.status_code == 403


async def test_key_of_nobody_or_of_two_is_refused(surfaces: Surfaces) -> None:
    for body in (
        {"name": "x"},
        {"name": "x", "tenant_id": "aurora", "operator_role": "viewer"},
        {"name": "x", "operator_role": "king"},
        {"name": "", "tenant_id": "aurora"},
    ):
        assert (await surfaces.operate("POST", "keys", body)).status_code == 400, body


async def test_key_of_an_unknown_tenant(surfaces: Surfaces) -> None:
    response = await surfaces.operate("POST", "keys", {"name": "x", "tenant_id": "nobody"})
    assert response.status_code == 404


async def test_cluster_document_is_applied_and_counted(surfaces: Surfaces) -> None:
    before = (await ok(surfaces, "GET", "status"))["catalog_revision"]
    applied = await ok(surfaces, "POST", "cluster", {"regions": ["ap-south"]})
    assert applied["regions"] == 1
    assert applied["nodes"] == 0
    assert applied["revision"] > before
    names = [region["name"] for region in (await ok(surfaces, "GET", "regions"))["data"]]
    assert names == ["ap-south", "eu-west", "us-east"]


async def test_wrong_cluster_document_changes_nothing(surfaces: Surfaces) -> None:
    node = {"id": "n", "region": "moon", "gpu_type": "l40s", "gpus": 1, "address": "127.0.0.1"}
    response = await surfaces.operate("POST", "cluster", {"regions": ["mars"], "nodes": [node]})
    assert response.status_code == 400
    assert "moon" in response.json()["error"]["message"]
    names = [region["name"] for region in (await ok(surfaces, "GET", "regions"))["data"]]
    assert "mars" not in names


async def test_node_is_cordoned_and_uncordoned(surfaces: Surfaces) -> None:
    assert (await ok(surfaces, "POST", "nodes/us-l40s/cordon"))["is_cordoned"]
    assert not (await ok(surfaces, "POST", "nodes/us-l40s/uncordon"))["is_cordoned"]
    assert (await surfaces.operate("POST", "nodes/nothing/cordon")).status_code == 404


async def test_drained_node_is_cordoned_and_its_engines_are_told(with_engine: Surfaces) -> None:
    drained = await ok(with_engine, "POST", "nodes/us-l40s/drain", {"deadline_s": 5})
    assert drained["node"]["is_cordoned"]
    assert [command["engine_id"] for command in drained["commands"]] == ["l40s-8b-a"]
    listed = (await ok(with_engine, "GET", "commands"))["data"]
    assert [command["id"] for command in listed] == [drained["commands"][0]["id"]]


@pytest.mark.parametrize("kind", ["drain", "unload", "stop"])
async def test_engine_command_goes_into_the_outbox(with_engine: Surfaces, kind: str) -> None:
    response = await with_engine.operate("POST", f"engines/l40s-8b-a/{kind}")
    assert response.status_code == 202, response.text
    assert response.json()["kind"] == kind
    assert response.json()["node_id"] == "us-l40s"
    missing = await with_engine.operate("POST", f"engines/nothing/{kind}")
    assert missing.status_code == 404


async def test_engine_is_loaded_on_a_known_node_with_a_known_model(surfaces: Surfaces) -> None:
    spec = {"node_id": "us-l40s", "kind": "simulated", "model": "llama-3.1-8b"}
    response = await surfaces.operate("POST", "engines/new.one/load", spec)
    assert response.status_code == 202, response.text
    unknown = await surfaces.operate("POST", "engines/new/load", {**spec, "model": "gpt-9"})
    assert unknown.json()["error"]["code"] == "model_not_found"
    nowhere = await surfaces.operate("POST", "engines/new/load", {**spec, "node_id": "mars"})
    assert nowhere.status_code == 404
    assert "mars" in nowhere.json()["error"]["message"]


async def test_status_counts_and_is_at_rest(surfaces: Surfaces) -> None:
    status = await ok(surfaces, "GET", "status")
    assert status["is_ready"]
    assert status["problems"] == []
    assert status["nodes_declared"] == 3
    assert set(status["gauges"].values()) == {0}
    assert status["are_credits_within_capacity"]
    assert len(status["tenants"]) == 3


async def test_invariants_are_asked_of_postgres(surfaces: Surfaces) -> None:
    assert (await ok(surfaces, "GET", "invariants"))["invariants"] == {"I1": True, "I2": True}


async def test_operator_sees_and_cancels_every_tenants_workflow(surfaces: Surfaces) -> None:
    body = {"kind": "k", "scope": "chat", "steps_expected": 1, "deadline_s": 60}
    created = await surfaces.call("POST", "/v1/workflows", surfaces.tenants["cumulus"], body)
    workflow = created.json()["id"]
    assert (await ok(surfaces, "GET", "workflows?tenant=cumulus"))["data"][0]["id"] == workflow
    assert (await ok(surfaces, "GET", "workflows?tenant=aurora"))["data"] == []
    assert (await ok(surfaces, "GET", f"workflows/{workflow}"))["state"] == "running"
    assert (await ok(surfaces, "POST", f"workflows/{workflow}/cancel"))["state"] == "cancelled"
    assert (await ok(surfaces, "GET", "workflows?state=running"))["data"] == []


async def test_refused_call_can_be_explained(surfaces: Surfaces) -> None:
    """No agent is there, so the call is refused; the refusal names a decision that can be asked for."""
    refused = await surfaces.call(
        "POST",
        "/v1/chat/completions",
        surfaces.tenants["aurora"],
        {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}]},
    )
    assert refused.status_code == 503, refused.text
    decision = refused.headers["x-headway-decision"]
    explained = await ok(surfaces, "GET", f"requests/{decision}/explain")
    assert explained["request_id"] == decision
    assert explained["winner"] is None
    assert explained["sentence"]
    assert (await surfaces.operate("GET", "requests/nothing/explain")).status_code == 404


async def test_metrics_are_in_the_prometheus_format(surfaces: Surfaces) -> None:
    response = await surfaces.call("GET", "/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE headway_" in response.text
