"""What holds over the whole API: roles by route, tenants apart, tags and races, writes that are sent again, rotation.

Routes are taken from the document, so that one that comes later is walked as well.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import httpx2
import psycopg
import pytest

from controlplane.api import model_calls
from controlplane.gateway import body as bodies
from controlplane.gateway import hints
from controlplane.store.catalog import upsert_engines
from controlplane.store.session import make_engine
from dataplane.protocol.messages import EngineFacts, EngineState
from tests.integration.surfaces import Surfaces, running_surfaces

WORKFLOW: Final = {
    "kind": "review", "scope": "autonomous", "steps_expected": 2, "deadline_s": 60, "budget_usd": 0.5,
}  # fmt: skip
ROLES: Final = ("viewer", "operator", "admin")
RACERS: Final = 6

# Written down by hand: who may make, end or rotate keys, declare, and change what rules everything.
ADMINS: Final = frozenset(
    {
        ("post", "/operator/v1/cluster"),
        ("post", "/operator/v1/tenants"),
        ("post", "/operator/v1/keys"),
        ("delete", "/operator/v1/keys/{key_id}"),
        ("post", "/operator/v1/keys/{key_id}/rotate"),
        ("post", "/operator/v1/plans/mode"),
        ("post", "/operator/v1/policies/revisions"),
        ("post", "/operator/v1/policies/rollout/canary"),
        ("post", "/operator/v1/policies/rollout/promote"),
        ("post", "/operator/v1/policies/rollout/rollback"),
    }
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def surfaces(
    anyio_backend: str, module_database_url: str, nats_control_url: str
) -> AsyncIterator[Surfaces]:
    """One replica for all of these tests, with an engine that the agent of node `us-l40s` declared.

    What a test changes of a tenant it changes back, or it makes things of its own.
    """
    async with running_surfaces(module_database_url, nats_control_url) as running:
        facts = EngineFacts(
            engine_id="l40s-8b-a", model="llama-3.1-8b", role="both", port=9000, kind="simulated",
            state=EngineState.SERVING, gpus=1, seats=32, kv_tokens=200_000, block_tokens=16,
            context_tokens_max=32_768, started_ms=1,
        )  # fmt: skip
        engine = make_engine(module_database_url)
        await upsert_engines(engine, "us-l40s", 1, [facts])
        await engine.dispose()
        yield running


async def document_of(surfaces: Surfaces) -> dict[str, Any]:
    document: dict[str, Any] = (await surfaces.call("GET", "/openapi.json")).json()
    return document


def operations(document: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith(prefix):
                yield method, path, operation


async def ask(
    surfaces: Surfaces, method: str, path: str, body: object = None, key: str = "", **headers: str
) -> httpx2.Response:
    named = {"authorization": f"Bearer {key or surfaces.operators['admin']}"}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return await surfaces.client.request(method, path, json=body, headers={**named, **sent})


def code_of(response: httpx2.Response) -> str:
    return str(response.json()["error"]["code"])


# ---------------------------------------------------------------- roles


async def test_every_route_needs_the_role_that_it_says(surfaces: Surfaces) -> None:
    walked = 0
    for method, path, operation in operations(await document_of(surfaces), "/operator/"):
        needed = (
            "viewer" if method == "get" else "admin" if (method, path) in ADMINS else "operator"
        )
        assert operation["x-headway-role"] == needed, (method, path)
        assert "403" in operation["responses"]
        target = re.sub(r"\{[^}]*\}", "9", path)
        for role in ROLES:
            response = await ask(surfaces, method, target, key=surfaces.operators[role])
            is_below = ROLES.index(role) < ROLES.index(needed)
            assert (response.status_code == 403) == is_below, (method, path, role, response.text)
            assert response.status_code != 401
            walked += 1
    assert walked > 150


# ---------------------------------------------------------------- tenants apart


async def test_what_is_another_tenants_does_not_exist(surfaces: Surfaces) -> None:
    owner, other = surfaces.tenants["aurora"], surfaces.tenants["borealis"]
    made = await ask(surfaces, "POST", "/v1/workflows", WORKFLOW, key=owner)
    foreign = made.json()["id"]
    walked = 0
    for method, path, _ in operations(await document_of(surfaces), "/v1/"):
        if "{workflow_id}" not in path:
            continue
        for body in (None, {"outcome": "success"}):
            told = []
            for name in (foreign, "wf-000000000000000000000000"):
                response = await ask(
                    surfaces, method, path.replace("{workflow_id}", name), body, key=other
                )
                told.append((response.status_code, response.text.replace(name, "…")))
            # As if it was never there: nothing tells the two apart.
            assert told[0] == told[1], (method, path, told)
            assert told[0][0] in {404, 400}, (method, path, told)
            walked += 1
    assert walked >= 8
    for path in ("/v1/workflows?limit=500", "/v1/model-choice"):
        listed = await ask(surfaces, "GET", path, key=other)
        assert foreign not in listed.text
    retried = await ask(
        surfaces, "POST", "/v1/workflows", {**WORKFLOW, "retry_of": foreign}, key=other
    )
    assert (retried.status_code, code_of(retried)) == (404, "workflow_not_found")
    step = await ask(
        surfaces, "POST", "/v1/chat/completions",
        {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "x"}]},
        key=other, x_headway_workflow=foreign,
    )  # fmt: skip
    assert (step.status_code, code_of(step)) == (404, "workflow_not_found")
    # A name that another tenant gave its call is no name here.
    mine = await ask(surfaces, "POST", "/v1/workflows", WORKFLOW, key=owner, idempotency_key="same")
    yours = await ask(
        surfaces, "POST", "/v1/workflows", WORKFLOW, key=other, idempotency_key="same"
    )
    assert mine.json()["id"] != yours.json()["id"]
    assert yours.json()["tenant_id"] == "borealis"


# ---------------------------------------------------------------- tags and races


async def test_who_has_seen_an_answer_is_not_sent_it_again(surfaces: Surfaces) -> None:
    for path in ("tenants/aurora", "tenants", "nodes/us-h100", "policies/rollout", "slo-classes"):
        target = f"/operator/v1/{path}"
        seen = await ask(surfaces, "GET", target)
        tag = seen.headers["etag"]
        for known in (tag, f'"x", {tag}', f"W/{tag}", "*"):
            again = await ask(surfaces, "GET", target, if_none_match=known)
            assert (again.status_code, again.content) == (304, b""), (path, known)
            assert again.headers["etag"] == tag
        assert (await ask(surfaces, "GET", target, if_none_match='"x"')).status_code == 200
        assert "private" in seen.headers["cache-control"]


# What is looked at, how it is changed, and two changes of it.
CHANGES: Final[tuple[tuple[str, str, str, tuple[Any, Any]], ...]] = (
    ("tenants/aurora", "PATCH", "tenants/aurora", ({"budget_usd": 60}, {"budget_usd": 70})),
    ("tenants/aurora", "PATCH", "tenants/aurora", ({"is_disabled": True}, {"budget_usd": 70})),
    ("budgets/tenant:aurora", "PATCH", "budgets/tenant:aurora", ({"limit": 61_000_000}, {"limit": 71_000_000})),
    ("budgets/tenant:aurora", "PATCH", "budgets/tenant:aurora", ({"limit": 59_000_000, "window": "day"}, {"limit": 9})),
    ("nodes/us-h100", "POST", "nodes/us-h100/{}", ("cordon", "uncordon")),
    ("keys/{key}", "PATCH", "keys/{key}", ({"requests_per_minute": 5}, {"requests_per_minute": 6})),
    ("keys/{key}", "PATCH", "keys/{key}", ({"tokens_per_minute": 5}, {"requests_per_minute": 6})),
    ("plans/current", "POST", "plans/{}", ("pause", "resume")),
)  # fmt: skip


async def test_a_change_of_what_has_moved_on_is_refused(surfaces: Surfaces) -> None:
    for path, method, target, changes in CHANGES:
        await check_race(surfaces, path, method, target, changes)
    await ask(surfaces, "PATCH", "/operator/v1/tenants/aurora", {"is_disabled": False})


async def check_race(
    surfaces: Surfaces, path: str, method: str, target: str, bodies_: tuple[Any, Any]
) -> None:
    made = await ask(surfaces, "POST", "/operator/v1/keys", {"name": "k", "tenant_id": "aurora"})
    path, target = (
        path.replace("{key}", made.json()["id"]),
        target.replace("{key}", made.json()["id"]),
    )

    async def change(what: Any, tag: str) -> httpx2.Response:
        body = what if isinstance(what, dict) else {"reason": "t"} if "plans" in target else None
        name = target if isinstance(what, dict) else target.format(what)
        return await ask(surfaces, method, f"/operator/v1/{name}", body, if_match=tag)

    before = await ask(surfaces, "GET", f"/operator/v1/{path}")
    tag = before.headers["etag"]
    first = await change(bodies_[0], tag)
    assert first.status_code == 200, first.text
    seen = await ask(surfaces, "GET", f"/operator/v1/{path}")
    lost = await change(bodies_[1], tag)
    assert (lost.status_code, code_of(lost)) == (412, "precondition_failed")
    assert (await ask(surfaces, "GET", f"/operator/v1/{path}")).headers["etag"] == seen.headers[
        "etag"
    ]
    # What the write itself answered is as good as another look.
    won = await change(bodies_[1], first.headers["etag"])
    assert won.status_code == 200, won.text
    for wrong in ('"nonsense"', "nonsense", f"W/{tag}x", '""'):
        assert (await change(bodies_[0], wrong)).status_code == 412, wrong
    assert (await change(bodies_[0], "*")).status_code == 200


async def test_of_those_who_saw_the_same_one_wins(surfaces: Surfaces) -> None:
    target = "/operator/v1/tenants/aurora"
    tag = (await ask(surfaces, "GET", target)).headers["etag"]
    answers = await asyncio.gather(
        *(
            ask(surfaces, "PATCH", target, {"budget_usd": 100 + number}, if_match=tag)
            for number in range(RACERS)
        )
    )
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, *[412] * (RACERS - 1)]
    [won] = [answer for answer in answers if answer.status_code == 200]
    now = await ask(surfaces, "GET", target)
    assert now.json()["limit_micro_usd"] == won.json()["limit_micro_usd"]


async def test_money_that_is_spent_meanwhile_makes_no_change_fail(
    surfaces: Surfaces, module_database_url: str
) -> None:
    target = "/operator/v1/tenants/cumulus"
    tag = (await ask(surfaces, "GET", target)).headers["etag"]
    with psycopg.connect(module_database_url) as connection:
        connection.execute("UPDATE budgets SET spent = 7 WHERE id = 'tenant:cumulus'")
    again = await ask(surfaces, "GET", target, if_none_match=tag)
    assert (again.status_code, again.json()["spent_micro_usd"]) == (200, 7)
    changed = await ask(surfaces, "PATCH", target, {"budget_usd": 60}, if_match=tag)
    assert changed.status_code == 200, changed.text


async def test_one_change_of_a_tenant_is_one_change(surfaces: Surfaces) -> None:
    """Budget and admission change together, and each is written down under its own subject."""
    answer = await ask(
        surfaces, "PATCH", "/operator/v1/tenants/borealis?reason=why", {"budget_usd": 61, "is_disabled": True}
    )  # fmt: skip
    assert (answer.json()["limit_micro_usd"], answer.json()["is_disabled"]) == (61_000_000, True)
    entries = (await ask(surfaces, "GET", "/operator/v1/audit?limit=2")).json()["data"]
    told = {(entry["action"], entry["subject"]) for entry in entries}
    assert told == {("budget.set", "budget:tenant:borealis"), ("tenant.disable", "tenant:borealis")}
    await ask(surfaces, "PATCH", "/operator/v1/tenants/borealis", {"is_disabled": False})


# ---------------------------------------------------------------- sent again


async def test_a_workflow_is_created_once_however_often_it_is_asked_for(surfaces: Surfaces) -> None:
    key = surfaces.tenants["cumulus"]
    answers = await asyncio.gather(
        *(
            ask(surfaces, "POST", "/v1/workflows", WORKFLOW, key=key, idempotency_key="once")
            for _ in range(RACERS)
        )
    )
    assert {answer.status_code for answer in answers} == {201}, [one.text for one in answers]
    assert len({answer.json()["id"] for answer in answers}) == 1
    fresh = [one for one in answers if "x-headway-idempotent-replay" not in one.headers]
    assert len(fresh) == 1
    assert answers[0].headers["location"] == f"/v1/workflows/{answers[0].json()['id']}"
    listed = await ask(surfaces, "GET", "/v1/workflows?limit=500", key=key)
    assert len(listed.json()["data"]) == 1
    for change in (
        {"kind": "other"},
        {"budget_usd": 0.6},
        {"deadline_s": 600},
        {"steps_expected": 3},
    ):
        other = await ask(
            surfaces, "POST", "/v1/workflows", {**WORKFLOW, **change}, key=key, idempotency_key="once"
        )  # fmt: skip
        assert (other.status_code, code_of(other)) == (422, "idempotency_mismatch"), change


async def test_a_key_is_made_once_and_shown_once(surfaces: Surfaces) -> None:
    body = {"name": "ci", "tenant_id": "aurora"}
    answers = await asyncio.gather(
        *(
            ask(surfaces, "POST", "/operator/v1/keys", body, idempotency_key="once")
            for _ in range(RACERS)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [201, *[409] * (RACERS - 1)]
    [made] = [answer.json() for answer in answers if answer.status_code == 201]
    for answer in answers:
        if answer.status_code == 409:
            assert code_of(answer) == "response_not_stored"
            assert made["id"] in answer.text
            assert made["key"] not in answer.text
    listed = (await ask(surfaces, "GET", "/operator/v1/keys?tenant=aurora&limit=500")).json()[
        "data"
    ]
    assert [key["name"] for key in listed].count("ci") == 1


async def test_a_tenant_and_a_command_are_made_once(surfaces: Surfaces) -> None:
    body = {
        "id": "dune",
        "name": "Dune",
        "tenant_class": "gold",
        "slo_class": "interactive",
        "budget_usd": 5,
    }
    assert (await ask(surfaces, "POST", "/operator/v1/tenants", body)).status_code == 201
    assert code_of(await ask(surfaces, "POST", "/operator/v1/tenants", body)) == "conflict"
    again = await ask(surfaces, "POST", "/operator/v1/tenants", body, idempotency_key="t")
    assert (again.status_code, again.headers["x-headway-idempotent-replay"]) == (201, "true")
    other = await ask(
        surfaces, "POST", "/operator/v1/tenants", {**body, "name": "X"}, idempotency_key="t"
    )
    assert code_of(other) == "idempotency_mismatch"
    target = "/operator/v1/engines/l40s-8b-a/cordon"
    told = [
        await ask(surfaces, "POST", target, {"reason": "r"}, idempotency_key="c") for _ in range(2)
    ]
    assert [answer.status_code for answer in told] == [202, 202]
    assert len({answer.json()["id"] for answer in told}) == 1
    drain = await ask(surfaces, "POST", "/operator/v1/engines/l40s-8b-a/drain", idempotency_key="c")
    assert code_of(drain) == "idempotency_mismatch"


# ---------------------------------------------------------------- rotation


async def test_a_rotated_key_and_the_old_one_work_until_the_named_time(
    surfaces: Surfaces, module_database_url: str
) -> None:
    made = await ask(
        surfaces, "POST", "/operator/v1/keys",
        {"name": "app", "tenant_id": "aurora", "requests_per_minute": 77, "calls_in_flight_max": 3},
    )  # fmt: skip
    old_id, old = made.json()["id"], made.json()["key"]
    for account, limit in ((f"key:{old_id}", 1_000), (f"key:{old_id}:tokens", 500)):
        set_ = await ask(surfaces, "PATCH", f"/operator/v1/budgets/{account}", {"limit": limit})
        assert set_.status_code == 200, set_.text
    with psycopg.connect(module_database_url) as connection:
        connection.execute("UPDATE budgets SET spent = 400 WHERE id = %s", (f"key:{old_id}",))
    assert (await ask(surfaces, "GET", "/v1/models", key=old)).status_code == 200
    turned = await ask(
        surfaces, "POST", f"/operator/v1/keys/{old_id}/rotate", {"overlap_s": 600}, idempotency_key="r"
    )  # fmt: skip
    assert turned.status_code == 201, turned.text
    assert turned.headers["cache-control"] == "no-store"
    new_id, new = turned.json()["id"], turned.json()["key"]
    assert turned.json()["replaces"] == old_id
    for key in (old, new):
        assert (await ask(surfaces, "GET", "/v1/models", key=key)).status_code == 200
    shown = (await ask(surfaces, "GET", f"/operator/v1/keys/{new_id}")).json()
    assert (shown["name"], shown["tenant_id"], shown["requests_per_minute"], shown["calls_in_flight_max"]) == (
        "app", "aurora", 77, 3,
    )  # fmt: skip
    left = (await ask(surfaces, "GET", f"/operator/v1/budgets/key:{new_id}")).json()
    assert (left["limit"], left["spent"]) == (600, 0)
    tokens = (await ask(surfaces, "GET", f"/operator/v1/budgets/key:{new_id}:tokens")).json()
    assert (tokens["unit"], tokens["limit"]) == ("tokens", 500)
    leaving = (await ask(surfaces, "GET", f"/operator/v1/keys/{old_id}")).json()
    assert leaving["revoked_at"] is not None
    assert not leaving["is_revoked"]
    entries = (await ask(surfaces, "GET", f"/operator/v1/audit?subject=key:{old_id}")).json()[
        "data"
    ]
    assert [entry["action"] for entry in entries] == ["key.rotate", "key.create"]
    assert set(entries[0]["after"]) - set(entries[0]["before"]) == {"revoked_at"}
    # Sent again it makes no third key, and a key that has an end is not rotated once more.
    again = await ask(
        surfaces, "POST", f"/operator/v1/keys/{old_id}/rotate", {"overlap_s": 600}, idempotency_key="r"
    )  # fmt: skip
    assert (again.status_code, code_of(again)) == (409, "response_not_stored")
    assert new_id in again.text
    more = await ask(surfaces, "POST", f"/operator/v1/keys/{old_id}/rotate")
    assert (more.status_code, code_of(more)) == (409, "conflict")
    working = (
        await ask(surfaces, "GET", "/operator/v1/keys?tenant=aurora&is_revoked=false")
    ).json()
    assert {old_id, new_id} <= {key["id"] for key in working["data"]}
    with psycopg.connect(module_database_url) as connection:
        connection.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", (old_id,))
    surfaces.replica.gate.principals.forget()
    assert (await ask(surfaces, "GET", "/v1/models", key=old)).status_code == 401
    assert (await ask(surfaces, "GET", "/v1/models", key=new)).status_code == 200
    ended = (await ask(surfaces, "GET", "/operator/v1/keys?tenant=aurora&is_revoked=true")).json()
    assert old_id in [key["id"] for key in ended["data"]]
    assert new_id not in [key["id"] for key in ended["data"]]


async def test_an_overlap_can_be_cut_short_and_an_operator_turns_its_own_key(
    surfaces: Surfaces,
) -> None:
    made = (
        await ask(surfaces, "POST", "/operator/v1/keys", {"name": "a", "operator_role": "admin"})
    ).json()
    own = made["key"]
    refused = await ask(surfaces, "DELETE", f"/operator/v1/keys/{made['id']}", key=own)
    assert (refused.status_code, code_of(refused)) == (409, "conflict")
    turned = await ask(surfaces, "POST", f"/operator/v1/keys/{made['id']}/rotate", key=own)
    fresh = turned.json()["key"]
    assert (await ask(surfaces, "GET", "/operator/v1/status", key=own)).status_code == 200
    gone = await ask(surfaces, "DELETE", f"/operator/v1/keys/{made['id']}", key=fresh)
    assert gone.status_code == 200, gone.text
    assert (await ask(surfaces, "GET", "/operator/v1/status", key=own)).status_code == 401
    assert (await ask(surfaces, "GET", "/operator/v1/status", key=fresh)).status_code == 200
    at_once = await ask(
        surfaces, "POST", f"/operator/v1/keys/{turned.json()['id']}/rotate", {"overlap_s": 0}, key=fresh
    )  # fmt: skip
    assert at_once.status_code == 201
    assert (await ask(surfaces, "GET", "/operator/v1/status", key=fresh)).status_code == 401


# ---------------------------------------------------------------- the framework's own refusals


async def test_a_wrong_path_says_what_there_is(surfaces: Surfaces) -> None:
    for path in ("/v1/embeddings", "/v1/responses", "/v1/images/generations", "/v1/files"):
        response = await ask(surfaces, "POST", path, {"model": "m"}, key=surfaces.tenants["aurora"])
        assert (response.status_code, code_of(response)) == (404, "not_found")
        assert response.headers["x-should-retry"] == "false"
        for offered in ("POST /v1/chat/completions", "GET /v1/models", "POST /v1/workflows"):
            assert offered in response.text, path


async def test_a_wrong_method_names_every_one_that_is_offered(surfaces: Surfaces) -> None:
    document = await document_of(surfaces)
    for prefix in ("/operator/", "/v1/"):
        for path, methods in document["paths"].items():
            if not path.startswith(prefix) or "{engine_id}" in path or "{model}" in path:
                continue
            target = re.sub(r"\{[^}]*\}", "9", path)
            response = await ask(surfaces, "TRACE", target)
            assert (response.status_code, code_of(response)) == (405, "method_not_allowed"), path
            told = {method.lower() for method in response.headers["allow"].split(", ")}
            assert told == set(methods), path


# ---------------------------------------------------------------- the document


async def test_the_document_tells_the_limits_that_hold(surfaces: Surfaces) -> None:
    for told, held in (
        (model_calls.MESSAGES_MAX, bodies.MESSAGES_MAX),
        (model_calls.TOOLS_MAX, bodies.TOOLS_MAX),
        (model_calls.SEQUENCES_MAX, bodies.SEQUENCES_MAX),
        (model_calls.STOPS_MAX, bodies.STOPS_MAX),
        (model_calls.LOGIT_BIASES_MAX, bodies.LOGIT_BIASES_MAX),
        (model_calls.TOKENS_MAX, bodies.TOKENS_MAX),
        (model_calls.TOKEN_ID_MAX, bodies.TOKEN_ID_MAX),
        (model_calls.MODEL_CHARACTERS_MAX, bodies.MODEL_CHARS_MAX),
        (model_calls.SALT_CHARACTERS_MAX, bodies.CACHE_SALT_CHARS_MAX),
        (model_calls.ID_CHARACTERS_MAX, hints.ID_CHARS_MAX),
        (model_calls.KEY_CHARACTERS_MAX, hints.IDEMPOTENCY_KEY_CHARS_MAX),
        (model_calls.STEP_MAX, hints.STEP_MAX),
        (model_calls.DEADLINE_MS_MAX, hints.DEADLINE_MS_MAX),
        (set(model_calls.REFUSED_MEMBERS), set(bodies.REFUSED)),
    ):
        assert told == held
    read = set(model_calls.SCHEMAS["ChatCompletionRequest"]["properties"])
    known = set(bodies.FORWARDED) | set(bodies.STRIPPED) | set(bodies.REFUSED)
    assert read <= known


async def test_every_operation_tells_its_refusals_in_full(surfaces: Surfaces) -> None:
    document = await document_of(surfaces)
    ids = []
    for method, path, operation in operations(document, "/"):
        ids.append(operation["operationId"])
        assert operation["summary"], path
        statuses = set(operation["responses"])
        assert {"408", "431", "500"} <= statuses, path
        if path.startswith(("/v1/", "/operator/")):
            assert {"400", "401", "503"} <= statuses, path
            assert ("413" in statuses) == ("requestBody" in operation), (method, path)
            assert operation["tags"][0] in {tag["name"] for tag in document["tags"]}, path
    assert len(ids) == len(set(ids))
    for link in re.findall(r"'operationId': '(\w+)', 'parameters'", str(document)):
        assert link in ids
    for name, refusal in document["components"]["responses"].items():
        assert refusal["content"]["application/json"]["schema"]["allOf"], name
        assert {"x-headway-reason", "x-should-retry", "x-request-id"} <= set(refusal["headers"])
