"""The operator API of policies and audit: roles, the way of a bundle, and refusals that say what to do."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.api import failures
from controlplane.api.operator import audit, policies
from controlplane.domain.catalog import OperatorRole
from controlplane.runtime.policy_compile import PolicyCompiler, checked, checker
from controlplane.store import keys
from controlplane.store import policies as store
from controlplane.store.journal import Journal
from controlplane.store.session import make_engine
from policies.evaluate import Policy
from policies.facts import as_json
from tests.integration.policy_world import (
    IN_A_THREAD,
    LONG_ANSWERS,
    facts,
    files,
    policy,
    rule,
    rules,
    tenant,
    without_rules,
)
from tests.integration.store_world import Rows

PEPPER = b"a pepper for tests, long enough"
PLAIN, STRICT = without_rules(), files(LONG_ANSWERS)


@dataclass(frozen=True, slots=True)
class Stored:
    """What these routers need of a replica: its database and the pepper of its keys."""

    engine: AsyncEngine
    pepper: bytes
    compiler: PolicyCompiler
    told: list[Policy | None] = field(default_factory=list)

    async def policies_changed(self, policy: Policy | None) -> None:
        self.told.append(policy)


@dataclass(frozen=True, slots=True)
class World:
    engine: AsyncEngine
    database_url: str
    app: FastAPI
    client: httpx2.AsyncClient
    operators: dict[str, str]

    async def call(
        self, method: str, path: str, body: object = None, role: str = "admin"
    ) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self.operators[role]}"}
        return await self.client.request(method, f"/operator/v1/{path}", headers=headers, json=body)

    async def ok(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        response = await self.call(method, path, body)
        assert response.is_success, response.text
        return response.json()

    async def refused(self, path: str, body: object, status: int) -> str:
        response = await self.call("POST", path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]["message"]


@pytest.fixture
async def world(clean_database_url: str) -> AsyncIterator[World]:
    engine = make_engine(clean_database_url)
    operators = {}
    for role in OperatorRole:
        _, operators[role.value] = await keys.create_operator_key(engine, PEPPER, role, "test")
    app = FastAPI()
    app.state.services = Stored(engine, PEPPER, PolicyCompiler(IN_A_THREAD))
    failures.install(app)
    router = APIRouter(prefix="/operator/v1")
    router.include_router(policies.router)
    router.include_router(audit.router)
    app.include_router(router)
    await store.bootstrap(engine, policy(PLAIN).revision, PLAIN, author="replica:r1")
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://headway") as client:
        yield World(engine, clean_database_url, app, client, operators)
    await engine.dispose()


def bundle(given: dict[str, str], **members: Any) -> dict[str, Any]:
    return {"files": given, "reason": "a try", **members}


READS = (
    "policies/rollout", "policies/revisions", "policies/revisions/active", "policies/facts",
    "audit", "audit/verify",
)  # fmt: skip
CHANGES = (
    ("policies/revisions", bundle(STRICT)),
    ("policies/rollout/canary", {"percent": 10, "reason": "r"}),
    ("policies/rollout/promote", {"reason": "r"}),
    ("policies/rollout/rollback", {"reason": "r"}),
)


async def test_viewers_read_and_only_admins_change(world: World) -> None:
    for path in READS:
        assert (await world.call("GET", path, role="viewer")).status_code == 200, path
    for path, body in CHANGES:
        for role in ("viewer", "operator"):
            response = await world.call("POST", path, body, role)
            assert response.status_code == 403, path
            assert "`admin`" in response.json()["error"]["message"]
    assert (await world.client.get("/operator/v1/audit")).status_code == 401
    assert (await world.ok("GET", "policies/rollout"))["generation"] == 1


async def test_way_of_a_bundle_and_what_the_log_tells_of_it(world: World) -> None:
    strict, plain = policy(STRICT).revision, policy(PLAIN).revision
    response = await world.call("POST", "policies/revisions", bundle(STRICT))
    assert response.status_code == 201
    row = response.json()
    assert (row["active_digest"], row["candidate_digest"], row["mode"]) == (plain, strict, "shadow")
    await world.ok("POST", "policies/rollout/canary", {"percent": 25, "reason": "a few"})
    row = await world.ok("POST", "policies/rollout/promote", {"reason": "well"})
    assert (row["active_digest"], row["previous_digest"]) == (strict, plain)
    row = await world.ok("POST", "policies/rollout/rollback", {"reason": "not so well"})
    assert (row["active_digest"], row["mode"]) == (plain, "none")
    told = world.app.state.services.told
    assert [policy and policy.revision for policy in told] == [strict, None, None, None]
    assert await store.report_of(world.engine, strict, checker()) == dict(checked(told[0]).report)

    entries = (await world.ok("GET", "audit?subject=policy"))["data"]
    assert [entry["reason"] for entry in entries[:4]] == ["not so well", "well", "a few", "a try"]
    assert entries[0]["actor"].startswith("key:")
    assert entries[0]["before"]["active"] == strict
    assert entries[0]["after"]["active"] == plain
    assert (entries[2]["before"]["mode"], entries[2]["after"]["canary_percent"]) == ("shadow", 25)
    verified = await world.ok("GET", "audit/verify")
    assert (verified["is_whole"], verified["head"]) == (True, entries[0]["hash"])
    again = await world.ok("GET", f"audit/verify?head={entries[3]['hash']}")
    assert again["is_whole"]
    other = await world.ok("GET", f"audit/verify?head={'1' * 64}")
    assert not other["is_whole"]


async def test_now_goes_without_shadow(world: World) -> None:
    row = await world.ok("POST", "policies/revisions", bundle(STRICT, is_now=True))
    assert (row["active_digest"], row["candidate_digest"]) == (policy(STRICT).revision, None)


async def test_a_revision_is_found_by_name_digest_and_its_beginning(world: World) -> None:
    strict = policy(STRICT).revision
    await world.ok("POST", "policies/revisions", bundle(STRICT))
    for name in (strict, strict[:8], "candidate"):
        found = await world.ok("GET", f"policies/revisions/{name}")
        assert (found["digest"], found["files"]) == (strict, STRICT)
    for name in ("previous", "abcdef", strict[:3]):
        response = await world.call("GET", f"policies/revisions/{name}")
        assert response.status_code == 404, name
    listed = (await world.ok("GET", "policies/revisions"))["data"]
    assert [item["digest"] for item in listed] == [strict, policy(PLAIN).revision]
    assert "files" not in listed[0]


WRONG_CASE = LONG_ANSWERS.replace('max_tokens": 1000}', 'max_tokens": 1001}')
WRONG = [
    ({}, ("files",)),
    ({"scopes.yaml": PLAIN["scopes.yaml"]}, ("no document of kind", "add one")),
    ({**PLAIN, "x.yaml": "kind: rules\n"}, ("x.yaml:1", "add it")),
    ({**PLAIN, "x.yaml": "kind: [\n"}, ("x.yaml:2", "mend the syntax")),
    (files(LONG_ANSWERS.replace("max_tokens >", "max_tokenz >")), ("made-up.yaml:8:", "max_tokens`?")),
    (files(LONG_ANSWERS.replace("> 1000", "> 1000.0")), ("made-up.yaml:8:", "whole numbers")),
    (files(LONG_ANSWERS.replace("deny: true", "den: true")), ("made-up.yaml:9", "mend its spelling")),
    (
        files(rule("odd", "100 / request.deadline_ms > 1", "deny: true", '"request.deadline_ms": 1',
                   '"request.deadline_ms": 99')),
        ("made-up.yaml:8:", "made-up/odd", "request.deadline_ms = 0"),
    ),
    (files(WRONG_CASE), ("made-up/long-answers", "`rests`", "mend")),
    ({**PLAIN, "../x.yaml": "a"}, ("files",)),
    ({**PLAIN, "x.txt": "a"}, ("files",)),
    ({**PLAIN, "x.yaml": "a\x00"}, ("must not contain nul",)),
]  # fmt: skip


async def test_bad_bundles_are_refused_with_the_place_and_change_nothing(world: World) -> None:
    for given, words in WRONG:
        message = await world.refused("policies/revisions", bundle(given, is_now=True), 400)
        for word in words:
            assert word in message
    row = await world.ok("GET", "policies/rollout")
    assert (row["generation"], row["active_digest"]) == (1, policy(PLAIN).revision)
    assert world.app.state.services.told == []
    assert len((await world.ok("GET", "policies/revisions"))["data"]) == 1


async def test_changes_that_do_not_fit_are_conflicts(world: World) -> None:
    reason = {"reason": "r"}
    assert "apply a bundle first" in await world.refused("policies/rollout/promote", reason, 409)
    canary = {"percent": 5, **reason}
    assert "apply a bundle first" in await world.refused("policies/rollout/canary", canary, 409)
    assert "nothing to go back" in await world.refused("policies/rollout/rollback", reason, 409)
    assert "active already" in await world.refused("policies/revisions", bundle(PLAIN), 409)
    late = bundle(STRICT, generation=0)
    assert "look again" in await world.refused("policies/revisions", late, 409)
    await world.ok("POST", "policies/revisions", bundle(STRICT, generation=1))


async def test_nonsense_is_refused(world: World) -> None:
    for path, body in (
        ("policies/rollout/canary", {"percent": 0, "reason": "r"}),
        ("policies/rollout/canary", {"percent": 101, "reason": "r"}),
        ("policies/rollout/canary", {"percent": 5}),
        ("policies/rollout/promote", {"reason": ""}),
        ("policies/rollout/promote", {"reason": "r", "force": True}),
        ("policies/rollout/promote", {"reason": "r", "generation": -1}),
        ("policies/rollout/rollback", {"reason": "a\x00"}),
        ("policies/revisions", {"files": PLAIN}),
    ):
        assert await world.refused(path, body, 400)
    for path in (
        "policies/facts?since_s=0", "policies/facts?cursor=x", "policies/revisions?cursor=x",
        "audit?cursor=x", "audit?limit=0", "audit?subject=%00", "audit/verify?head=x",
    ):  # fmt: skip
        response = await world.call("GET", path)
        assert response.status_code == 400, response.text


async def record(world: World, count: int = 1, **given: Any) -> None:
    """Rows of the decision log, as the gate writes them."""
    journal = Journal(world.database_url)
    writing = asyncio.create_task(journal.run())
    for number in range(count):
        who = tenant(f"t{number % 3}")
        journal.decided(
            Rows(f"q{number}", at=datetime.now(UTC)).decided()._replace(
                tenant_id=who.id, model="org/small", sample_weight=32,
                policy_revision=policy(PLAIN).revision,
                facts=as_json(*facts(who, request__max_tokens=998 + number % 5, **given)),
            )
        )  # fmt: skip
    assert await journal.drain(5) == 0
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_facts_are_listed_over_pages_and_one_by_one(world: World) -> None:
    await record(world, 5)
    seen: list[dict[str, Any]] = []
    cursor = ""
    for _ in range(5):
        page = await world.ok("GET", f"policies/facts?since_s=60&limit=2{cursor}")
        seen += page["data"]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert {item["request_id"] for item in seen} == {f"q{number}" for number in range(5)}
    one = await world.ok("GET", "policies/facts/q1")
    assert one in seen
    assert one["facts"]["request.max_tokens"] == 999
    assert one["sample_weight"] == 32
    missing = await world.call("GET", "policies/facts/q9")
    assert missing.status_code == 404


async def test_level_is_part_of_the_revision(world: World) -> None:
    """A bundle that differs in one level is another one, and comments do not count."""
    await world.ok("POST", "policies/revisions", bundle(STRICT))
    audited = {**PLAIN, "made-up.yaml": rules(LONG_ANSWERS, level="audit")}
    row = await world.ok("POST", "policies/revisions", bundle(audited))
    assert row["candidate_digest"] == policy(audited).revision != policy(STRICT).revision
    commented = {**PLAIN, "scopes.yaml": "# a comment\n" + PLAIN["scopes.yaml"]}
    assert "active already" in await world.refused("policies/revisions", bundle(commented), 409)
