"""Every change that an operator makes is written down with it, in one transaction, and tells no secret.

The oracle is a table of this file: what each change is, and what it must leave in the log.
"""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import psycopg
import pytest

from controlplane.store import audit
from controlplane.store.catalog import upsert_engines
from controlplane.store.session import make_engine
from dataplane.protocol.messages import EngineFacts, EngineState
from tests.integration.surfaces import Surfaces, running_surfaces

# What changes policies, breakers and plans has tests of its own, which look into the log as well.
ELSEWHERE = ("policies/", "breakers", "plans", "model-choice", "keys/{key_id}/rotate")
SECRET_OPTION = "an-option-that-is-a-secret"
WHY = "ticket 4711"


class Made(NamedTuple):
    """A change, the route that makes it, and the log's words for it."""

    method: str
    path: str
    body: object
    route: str
    action: str
    subject: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def limit(micro_usd: int, window: str = "total") -> dict[str, Any]:
    return {"limit": micro_usd, "window": window}


def changes(workflow: str, key: str) -> list[Made]:
    engine = "l40s-8b-a"
    spec = {
        "node_id": "us-l40s",
        "kind": "simulated",
        "model": "llama-3.1-8b",
        "options": {"token": SECRET_OPTION},
    }
    told = {"deadline_s": 30.0, "node": "us-l40s", "spec": None}
    loaded = {"kind": "simulated", "model": "llama-3.1-8b", "role": "both", "gpus": 1}
    no_limits = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "calls_in_flight_max"))
    a_key = {
        "name": "ci", "tenant": "aurora", "operator_role": None, "is_revoked": False, **no_limits,
    }  # fmt: skip
    slower = {**a_key, "requests_per_minute": 9}
    return [
        Made(
            "POST", "tenants",
            {"id": "dorado", "name": "Dorado", "tenant_class": "gold", "slo_class": "batch",
             "budget_usd": 1},
            "/tenants", "tenant.create", "tenant:dorado", None,
            {"name": "Dorado", "tenant_class": "gold", "slo_class": "batch",
             "budget_micro_usd": 1_000_000},
        ),
        Made("PATCH", "tenants/dorado", {"budget_usd": 2}, "/tenants/{tenant_id}", "budget.set",
             "budget:tenant:dorado", {"limit": 1_000_000}, {"limit": 2_000_000}),
        Made("PATCH", "tenants/dorado", {"is_disabled": True}, "/tenants/{tenant_id}",
             "tenant.disable", "tenant:dorado", {"is_disabled": False}, {"is_disabled": True}),
        Made("PATCH", "tenants/dorado", {"is_disabled": False}, "/tenants/{tenant_id}",
             "tenant.enable", "tenant:dorado", {"is_disabled": True}, {"is_disabled": False}),
        Made("PATCH", "budgets/tenant:dorado:tokens", {"limit": 9, "window": "day"},
             "/budgets/{budget_id}", "budget.set", "budget:tenant:dorado:tokens", None,
             limit(9, "day")),
        Made("PATCH", "budgets/tenant:dorado:tokens", {"limit": 8}, "/budgets/{budget_id}",
             "budget.set", "budget:tenant:dorado:tokens", limit(9, "day"), limit(8, "day")),
        Made("DELETE", "budgets/tenant:dorado:tokens", None, "/budgets/{budget_id}",
             "budget.remove", "budget:tenant:dorado:tokens", limit(8, "day"), None),
        Made("PATCH", f"keys/{key}", {"requests_per_minute": 9}, "/keys/{key_id}", "key.limit",
             f"key:{key}", a_key, slower),
        Made("DELETE", f"keys/{key}", None, "/keys/{key_id}", "key.revoke", f"key:{key}", slower,
             {**slower, "is_revoked": True}),
        Made("POST", "cluster", {"regions": ["nowhere"]}, "/cluster", "cluster.apply", "cluster",
             None, {"regions": {"nowhere": {"name": "nowhere"}}}),
        Made("POST", "nodes/us-l40s/cordon", None, "/nodes/{node_id}/cordon", "node.cordon",
             "node:us-l40s", {"is_cordoned": False}, {"is_cordoned": True}),
        Made("POST", "nodes/us-l40s/uncordon", None, "/nodes/{node_id}/uncordon", "node.uncordon",
             "node:us-l40s", {"is_cordoned": True}, {"is_cordoned": False}),
        # Cordons it, and tells its one engine: the latter is what comes last.
        Made("POST", "nodes/us-l40s/drain", None, "/nodes/{node_id}/drain", "engine.drain",
             f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/drain", None, "/engines/{engine_id}/drain",
             "engine.drain", f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/unload", {"deadline_s": 5}, "/engines/{engine_id}/unload",
             "engine.unload", f"engine:{engine}", None, {**told, "deadline_s": 5.0}),
        Made("POST", f"engines/{engine}/stop", None, "/engines/{engine_id}/stop", "engine.stop",
             f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/restart", None, "/engines/{engine_id}/restart",
             "engine.restart", f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/role", {"role": "decode"}, "/engines/{engine_id}/role",
             "engine.role", f"engine:{engine}", None, {**told, "role": "decode"}),
        Made("POST", f"engines/{engine}/sleep", {"level": 2}, "/engines/{engine_id}/sleep",
             "engine.sleep", f"engine:{engine}", None, {**told, "sleep_level": 2}),
        Made("POST", f"engines/{engine}/wake", None, "/engines/{engine_id}/wake",
             "engine.wake", f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/reset-cache", None, "/engines/{engine_id}/reset-cache",
             "engine.reset_cache", f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/cordon", {"reason": "fan"}, "/engines/{engine_id}/cordon",
             "engine.cordon", f"engine:{engine}", None, {**told, "reason": "fan"}),
        Made("POST", f"engines/{engine}/uncordon", None, "/engines/{engine_id}/uncordon",
             "engine.uncordon", f"engine:{engine}", None, told),
        Made("POST", f"engines/{engine}/load-adapter", {"name": "sql", "path": "/a/sql"},
             "/engines/{engine_id}/load-adapter", "engine.lora_load", f"engine:{engine}", None,
             {**told, "adapter": "sql", "adapter_path": "/a/sql"}),
        Made("POST", f"engines/{engine}/unload-adapter", {"name": "sql"},
             "/engines/{engine_id}/unload-adapter", "engine.lora_unload", f"engine:{engine}",
             None, {**told, "adapter": "sql"}),
        Made("POST", "engines/new/load", spec, "/engines/{engine_id}/load", "engine.load",
             "engine:new", None, {**told, "spec": {**loaded, "options": ["token"]}}),
        Made("POST", f"workflows/{workflow}/cancel", None, "/workflows/{workflow_id}/cancel",
             "workflow.end", f"workflow:{workflow}", {"state": "running"},
             {"state": "cancelled"}),
    ]  # fmt: skip


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    facts = EngineFacts(
        engine_id="l40s-8b-a", model="llama-3.1-8b", role="both", port=9000, kind="simulated",
        state=EngineState.SERVING, gpus=1, seats=32, kv_tokens=200_000, block_tokens=16,
        context_tokens_max=32_768, started_ms=1, capabilities=["lora", "reset_cache", "sleep"],
    )  # fmt: skip
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        engine = make_engine(clean_database_url)
        await upsert_engines(engine, "us-l40s", 1, [facts])
        await engine.dispose()
        yield running


async def made(surfaces: Surfaces) -> tuple[str, str, str]:
    """A running workflow, a key to change, and that key itself."""
    workflow = await surfaces.call(
        "POST",
        "/v1/workflows",
        surfaces.tenants["aurora"],
        {"kind": "k", "scope": "chat", "steps_expected": 1, "deadline_s": 60},
    )
    answer = await surfaces.operate(
        "POST", f"keys?reason={WHY}", {"name": "ci", "tenant_id": "aurora"}
    )
    return workflow.json()["id"], answer.json()["id"], answer.json()["key"]


async def last(surfaces: Surfaces) -> dict[str, Any]:
    listed = await surfaces.operate("GET", "audit?limit=1", role="viewer")
    return listed.json()["data"][0]


async def test_every_change_leaves_one_entry_that_says_who_what_and_why(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    workflow, key, plain = await made(surfaces)
    created = await last(surfaces)
    assert (created["action"], created["subject"]) == ("key.create", f"key:{key}")
    me = created["actor"]
    assert me.startswith("key:")
    seen = {"/keys"}
    for change in changes(workflow, key):
        before = (await last(surfaces))["id"]
        answer = await surfaces.operate(change.method, f"{change.path}?reason={WHY}", change.body)
        assert answer.is_success, (change.path, answer.text)
        entry = await last(surfaces)
        added = 2 if change.path.startswith("nodes/") and change.action == "engine.drain" else 1
        assert entry["id"] == before + added, change.path
        assert (entry["actor"], entry["reason"]) == (me, WHY)
        assert (entry["action"], entry["subject"]) == (change.action, change.subject)
        assert entry["before"] == change.before
        if entry["after"] is not None:
            entry["after"].pop("command", None)
        assert entry["after"] == change.after
        seen.add(change.route)
    document = (await surfaces.call("GET", "/openapi.json")).json()
    offered = {
        path.removeprefix("/operator/v1")
        for path, verbs in document["paths"].items()
        if path.startswith("/operator/v1/") and set(verbs) & {"post", "patch", "put", "delete"}
    }
    assert {path for path in offered if not path[1:].startswith(ELSEWHERE)} == seen

    with psycopg.connect(clean_database_url) as connection:
        log = str(connection.execute("SELECT * FROM audit_log").fetchall())
        digests = connection.execute("SELECT encode(digest, 'hex') FROM api_keys").fetchall()
        salts = connection.execute("SELECT cache_salt FROM tenants").fetchall()
    secrets = [plain, SECRET_OPTION, *(row[0] for row in digests + salts)]
    assert not [secret for secret in secrets if secret in log]
    engine = make_engine(clean_database_url)
    assert (await audit.verify(engine)).broken_at is None
    await engine.dispose()


async def test_what_changes_nothing_leaves_nothing(surfaces: Surfaces) -> None:
    workflow, key, _ = await made(surfaces)
    for change in changes(workflow, key):
        if change.action.startswith("engine."):
            continue
        await surfaces.operate(change.method, change.path, change.body)
    for method, path, body in (
        ("POST", "nodes/us-l40s/uncordon", None),
        ("PATCH", "tenants/dorado", {"budget_usd": 2, "is_disabled": False}),
        ("DELETE", f"keys/{key}", None),
        ("POST", "cluster", {"regions": ["nowhere"]}),
        ("POST", f"workflows/{workflow}/cancel", None),
        ("PATCH", "tenants/nobody", {"budget_usd": 2}),
        ("DELETE", "budgets/tenant:dorado:tokens", None),
    ):
        before = (await last(surfaces))["id"]
        await surfaces.operate(method, path, body)
        assert (await last(surfaces))["id"] == before, path


async def test_without_its_entry_nothing_is_changed(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    """An entry that can not be written takes its change back."""
    workflow, key, _ = await made(surfaces)
    with psycopg.connect(clean_database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE audit_log ADD CHECK (id < 0) NOT VALID")

        def state() -> list[tuple[Any, ...]]:
            return [
                row
                for table in (
                    "tenants",
                    "api_keys",
                    "nodes",
                    "regions",
                    "commands",
                    "workflows",
                )
                for row in connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            ] + connection.execute('SELECT id, "limit" FROM budgets ORDER BY 1').fetchall()

        before = state()
        for change in changes(workflow, key):
            await surfaces.operate(change.method, change.path, change.body)
        assert state() == before
