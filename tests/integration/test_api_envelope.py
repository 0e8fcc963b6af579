"""Whatever goes wrong, the body is the OpenAI envelope, and never one of the framework's own."""

import re
from collections.abc import AsyncIterator

import httpx2
import psycopg
import pytest
from fastapi import FastAPI
from psycopg import sql
from sqlalchemy import make_url

from controlplane.api import failures
from controlplane.api.request_ids import RequestIds
from tests.integration.surfaces import Surfaces, running_surfaces


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        yield running


def assert_envelope(response: httpx2.Response, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert response.headers["x-headway-reason"] == code
    assert response.headers["content-type"].startswith("application/json")
    ids = {response.headers["x-request-id"], response.headers["x-headway-decision"]}
    assert len(ids) == 1
    return str(body["error"]["message"])


async def test_every_answer_has_an_id_of_its_own(surfaces: Surfaces) -> None:
    tenant = surfaces.tenants["aurora"]
    workflow = {"kind": "k", "scope": "chat", "steps_expected": 1, "deadline_s": 60}
    message = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hi"}]}
    seen = []
    for method, path, key, body in (
        ("GET", "/health/live", None, None),
        ("GET", "/metrics", None, None),
        ("GET", "/openapi.json", None, None),
        ("POST", "/v1/workflows", tenant, workflow),
        ("GET", "/v1/workflows", tenant, None),
        ("GET", "/v1/workflows", None, None),
        ("GET", "/v1/models", tenant, None),
        ("GET", "/v1/models/llama-3.1-8b", tenant, None),
        ("GET", "/v1/models/nothing", tenant, None),
        ("POST", "/v1/chat/completions", tenant, message),
        ("POST", "/v1/chat/completions", tenant, {}),
        ("GET", "/operator/v1/status", surfaces.operators["viewer"], None),
        ("POST", "/operator/v1/cluster", surfaces.operators["viewer"], {}),
    ):
        answer = await surfaces.call(method, path, key, body)
        assert answer.headers["x-request-id"] == answer.headers["x-headway-decision"], path
        seen.append(answer.headers["x-request-id"])
    assert len(set(seen)) == len(seen)


async def test_unknown_path(surfaces: Surfaces) -> None:
    response = await surfaces.call("GET", "/v2/nothing")
    assert "/v2/nothing" in assert_envelope(response, 404, "not_found")


async def test_trailing_slash_is_not_redirected(surfaces: Surfaces) -> None:
    assert_envelope(await surfaces.call("GET", "/v1/workflows/"), 404, "not_found")


async def test_wrong_method_names_the_allowed_ones(surfaces: Surfaces) -> None:
    response = await surfaces.call("DELETE", "/v1/workflows")
    assert_envelope(response, 405, "method_not_allowed")
    assert set(response.headers["allow"].split(", ")) & {"GET", "POST"}


async def test_body_that_is_no_json(surfaces: Surfaces) -> None:
    response = await surfaces.client.post(
        "/v1/workflows",
        headers={
            "authorization": f"Bearer {surfaces.tenants['aurora']}",
            "content-type": "application/json",
        },
        content=b'{"kind": ',
    )
    assert_envelope(response, 400, "invalid_request")


async def test_body_over_the_limit(surfaces: Surfaces) -> None:
    response = await surfaces.client.post(
        "/operator/v1/cluster",
        headers={"authorization": f"Bearer {surfaces.operators['admin']}"},
        content=b" " * (1024 * 1024 + 1),
    )
    assert_envelope(response, 413, "request_too_large")


async def test_cursor_of_another_program(surfaces: Surfaces) -> None:
    for cursor in ("nonsense", "bm9uc2Vuc2U=", "%00", "%C3%BC"):
        response = await surfaces.operate("GET", f"requests?cursor={cursor}")
        assert_envelope(response, 400, "invalid_request")


async def test_limit_out_of_bounds(surfaces: Surfaces) -> None:
    for limit in ("0", "501", "many"):
        response = await surfaces.operate("GET", f"requests?limit={limit}")
        assert "query.limit" in assert_envelope(response, 400, "invalid_request")


async def test_no_key_or_a_wrong_one(surfaces: Surfaces) -> None:
    wrong = (None, "", "Bearer", "Bearer ", "Basic abc", "Bearer hw-op-x", "Bearer " + "k" * 900)
    for path in ("/v1/workflows", "/operator/v1/status"):
        for authorization in wrong:
            headers = {} if authorization is None else {"authorization": authorization}
            response = await surfaces.client.get(path, headers=headers)
            assert_envelope(response, 401, "invalid_api_key")
            assert response.headers["x-should-retry"] == "false"


async def test_no_operation_answers_without_a_key(surfaces: Surfaces) -> None:
    """Walks the document, so that an operation that comes later is walked as well."""
    document = (await surfaces.call("GET", "/openapi.json")).json()
    walked = 0
    for path, operations in document["paths"].items():
        if not path.startswith(("/v1/", "/operator/")):
            continue
        target = re.sub(r"\{[^}]*\}", "9", path)
        for method in operations:
            response = await surfaces.client.request(method, target)
            assert_envelope(response, 401, "invalid_api_key")
            walked += 1
    assert walked > 25


async def test_viewers_may_change_nothing(surfaces: Surfaces) -> None:
    document = (await surfaces.call("GET", "/openapi.json")).json()
    walked = 0
    for path, operations in document["paths"].items():
        if not path.startswith("/operator/"):
            continue
        target = re.sub(r"\{[^}]*\}", "9", path)
        for method in operations:
            if method == "get":
                continue
            response = await surfaces.call(method.upper(), target, surfaces.operators["viewer"])
            assert_envelope(response, 403, "forbidden_by_policy")
            walked += 1
    assert walked > 8


async def test_keys_open_only_their_own_api(surfaces: Surfaces) -> None:
    tenant, operator = surfaces.tenants["aurora"], surfaces.operators["admin"]
    assert_envelope(
        await surfaces.call("GET", "/operator/v1/status", tenant), 401, "invalid_api_key"
    )
    assert_envelope(await surfaces.call("GET", "/v1/workflows", operator), 401, "invalid_api_key")


async def test_defect_is_told_without_its_details() -> None:
    app = FastAPI()
    app.add_middleware(RequestIds, new_id=lambda: "req-x")
    failures.install(app)

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret is 42")

    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://headway") as client:
        response = await client.get("/broken")
    assert "42" not in assert_envelope(response, 500, "internal_error")


async def test_database_away_is_503_and_not_ready_and_live(
    surfaces: Surfaces, clean_database_url: str
) -> None:
    url = make_url(clean_database_url)
    name = str(url.database)
    admin = url.set(database="postgres").render_as_string(hide_password=False)
    assert (await surfaces.call("GET", "/health/ready")).status_code == 200
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(
            sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name))
        )
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
        )
        try:
            ready = await surfaces.call("GET", "/health/ready")
            assert ready.status_code == 503
            assert ready.json()["status"] == "not_ready"
            assert "PostgreSQL" in ready.json()["problems"][0]
            assert (await surfaces.call("GET", "/health/live")).status_code == 200
            response = await surfaces.operate("GET", "requests")
            assert_envelope(response, 503, "state_unavailable")
            assert response.headers["retry-after"] == "1"
        finally:
            connection.execute(
                sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(sql.Identifier(name))
            )
    assert (await surfaces.call("GET", "/health/ready")).status_code == 200


@pytest.mark.parametrize(
    ("revision", "words"),
    [("9999", ""), ("0001", "older than this program"), ("fe2c1a90b7d4", "none of Headway's")],
)
async def test_a_newer_schema_is_ready_and_an_older_one_is_told(
    surfaces: Surfaces, clean_database_url: str, revision: str, words: str
) -> None:
    with psycopg.connect(clean_database_url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = %s", (revision,))
    answer = await surfaces.call("GET", "/health/ready")
    problems = answer.json()["problems"]
    assert (answer.status_code, len(problems)) == ((503, 1) if words else (200, 0)), problems
    assert words in " ".join(problems)


async def test_document_is_true_about_errors(surfaces: Surfaces) -> None:
    document = (await surfaces.call("GET", "/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    text = str(document)
    assert "HTTPValidationError" not in text
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            told = operation["responses"].get("422", {"$ref": "#/components/responses/Refusal422"})
            assert told["$ref"].endswith("/Refusal422"), (method, path)
            if path.startswith(("/v1/", "/operator/")):
                assert operation["security"], (method, path)
                assert operation["responses"]["401"]["$ref"].endswith("/Refusal401")
                success = next(
                    response
                    for status, response in operation["responses"].items()
                    if status.startswith("2")
                )
                assert success["content"]["application/json"]["schema"], (method, path)
