"""`headway policy` and `headway audit`, run for real against the operator API and on folders."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
import uvicorn
from typer.testing import CliRunner

from cli import audit
from cli.policy import command
from policies.attributes import ATTRIBUTES, reference_page
from tests.integration.policy_world import EVENINGS, LONG_ANSWERS, files, policy, without_rules
from tests.integration.test_policy_lifecycle_api import World, record, world

__all__ = ["world"]

WIDTH = 80
PLAIN, STRICT = without_rules(), files(LONG_ANSWERS, EVENINGS)
app = typer.Typer()
app.add_typer(command.app, name="policy")
app.add_typer(audit.app, name="audit")


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join((self.out + self.err).split())

    @property
    def document(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)


class Headway:
    """Runs commands in this process, one at a time, while the loop serves them."""

    def __init__(self, folder: Path, url: str, key: str) -> None:
        self._folder = folder
        self._environment = {
            "HEADWAY_URL": url, "HEADWAY_OPERATOR_KEY": key, "COLUMNS": str(WIDTH),
        }  # fmt: skip

    async def __call__(self, *arguments: str, **environment: str) -> Ran:
        ran = await asyncio.to_thread(
            CliRunner().invoke, app, arguments, env=self._environment | environment
        )
        assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
        return Ran(ran.exit_code, ran.stdout, ran.stderr)

    def folder(self, name: str, given: dict[str, str]) -> str:
        path = self._folder / name
        path.mkdir()
        for file, text in given.items():
            (path / file).write_text(text)
        return name


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Headway:
    """Without a server."""
    monkeypatch.chdir(tmp_path)
    return Headway(tmp_path, "http://127.0.0.1:9", "none")


@pytest.fixture
async def headway(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Headway]:
    monkeypatch.chdir(tmp_path)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(world.app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield Headway(tmp_path, url, world.operators["admin"])
    server.should_exit = True
    await serving
    listener.close()


async def one_by_one(*runs: Awaitable[Ran]) -> list[Ran]:
    return [await run for run in runs]


# ---------------------------------------------------------------- folders


async def test_a_folder_is_checked_without_a_server(offline: Headway) -> None:
    headway = offline
    strict = headway.folder("strict", STRICT)
    typo = headway.folder("typo", files(LONG_ANSWERS.replace("max_tokens >", "max_tokenz >")))
    failing = headway.folder(
        "failing", files(LONG_ANSWERS.replace('max_tokens": 1000}', 'max_tokens": 1001}'))
    )
    weak = headway.folder(
        "weak", files(LONG_ANSWERS.replace('max_tokens": 1001}', 'max_tokens": 5000}'))
    )
    shipped, sound, bad, tested, failed, strong, survived, missing = await one_by_one(
        headway("policy", "lint"),
        headway("policy", "lint", strict, "--json"),
        headway("policy", "lint", typo),
        headway("policy", "test", strict, "--json"),
        headway("policy", "test", failing),
        headway("policy", "test", strict, "--score-min", "50", "--json"),
        headway("policy", "test", weak, "--score-min", "100"),
        headway("policy", "lint", "nothing"),
    )
    assert (shipped.code, shipped.err) == (0, "")
    assert "sound" in shipped.out
    assert sound.document["rules"] == 2
    assert sound.document["revision"] == policy(STRICT).revision
    assert bad.code == 1
    assert "typo/made-up.yaml:8:" in bad.words
    assert "request.max_tokens" in bad.words
    assert tested.document == {
        "revision": policy(STRICT).revision, "rules": 2, "cases": 4, "failures": [],
    }  # fmt: skip
    assert failed.code == 1
    assert "made-up/long-answers: case `rests` should not fire" in failed.words
    assert strong.document["mutants"]["tried"] > 4
    assert survived.code == 1
    assert "not noticed" in survived.words
    assert "made-up/long-answers" in survived.words
    assert missing.code == 2
    assert "not a folder" in missing.words


async def test_attributes_are_listed_in_three_forms(offline: Headway) -> None:
    headway = offline
    people, programs, page = await one_by_one(
        headway("policy", "attributes"),
        headway("policy", "attributes", "--json"),
        headway("policy", "attributes", "--markdown"),
    )
    assert max(len(line) for line in people.out.splitlines()) <= WIDTH
    assert [row["name"] for row in programs.document["attributes"]] == [
        row.name for row in ATTRIBUTES
    ]
    assert page.out == reference_page()


# ---------------------------------------------------------------- rollout


async def test_way_of_a_bundle(headway: Headway) -> None:
    strict = headway.folder("strict", STRICT)
    revision = policy(STRICT).revision
    because = ("--reason", "for the test")
    applied = await headway("policy", "apply", strict, *because)
    assert (applied.code, applied.err) == (0, "")
    assert f"{revision[:12]} rules in shadow" in applied.words
    assert (await headway("policy", "status", "--json")).document["mode"] == "shadow"
    canary = await headway("policy", "canary", "30", *because)
    assert f"{revision[:12]} rules 30 % of the tenants" in canary.words
    promoted = await headway("policy", "promote", *because, "--json")
    assert promoted.document["active_digest"] == revision
    back = await headway("policy", "rollback", *because)
    assert f"{policy(PLAIN).revision[:12]} is active" in back.words
    again = await headway("policy", "apply", strict, "--now", *because)
    assert f"{revision[:12]} is active" in again.words

    status, history, listed, everything, verified = await one_by_one(
        headway("policy", "status"),
        headway("policy", "history"),
        headway("audit", "list", "--subject", "pol*", "--json"),
        headway("audit", "list", "--json"),
        headway("audit", "verify", "--json"),
    )
    for ran in (status, history):
        assert (ran.code, ran.err) == (0, "")
        assert max(len(line) for line in ran.out.splitlines()) <= WIDTH, ran.out
    for word in ("bootstrap", "shadow", "canary", "promote", "rollback", "apply"):
        assert word in history.words
    assert len(listed.document["data"]) == 6
    assert verified.document["entries"] == len(everything.document["data"]) >= 6
    head = listed.document["data"][2]["hash"]
    assert (await headway("audit", "verify", "--head", head)).code == 0


async def test_what_is_refused_says_why_and_leaves_the_old_one(
    headway: Headway, world: World
) -> None:
    bad = headway.folder("bad", {**PLAIN, "x.yaml": "kind: rules\nversion: 1\n"})
    because = ("--reason", "r")
    viewer = world.operators["viewer"]
    cases = [
        (1, "x.yaml:1", ("policy", "apply", bad, "--now", *because), {}),
        (1, "apply a bundle first", ("policy", "promote", *because), {}),
        (1, "nothing to go back", ("policy", "rollback", *because), {}),
        (1, "`admin`", ("policy", "rollback", *because), {"HEADWAY_OPERATOR_KEY": viewer}),
        (1, "you saw 9", ("policy", "promote", "--generation", "9", *because), {}),
        (1, "there is no revision", ("policy", "diff", "abcdef"), {}),
        (2, "is not a folder", ("policy", "diff", "./abcdef"), {}),
        (2, "--reason", ("policy", "promote"), {}),
        (2, "is not a time", ("policy", "replay", "--since", "yesterday"), {}),
        (1, "no facts", ("policy", "explain", "q9"), {}),
        (1, "no entry has the hash", ("audit", "verify", "--head", "1" * 64), {}),
    ]
    ran = await one_by_one(*(headway(*arguments, **given) for _, _, arguments, given in cases))
    for result, (code, word, arguments, _) in zip(ran, cases, strict=True):
        assert result.code == code, (arguments, result)
        # Boxes of the framework put bars between words.
        assert word in result.words.replace("│ ", ""), (arguments, result)
    row = await world.ok("GET", "policies/rollout")
    assert (row["generation"], row["active_digest"]) == (1, policy(PLAIN).revision)


async def test_a_broken_chain_fails_the_command(
    headway: Headway, world: World, clean_database_url: str
) -> None:
    with psycopg.connect(clean_database_url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("UPDATE audit_log SET reason = 'nicer'")
    for extra in ((), ("--json",)):
        ran = await headway("audit", "verify", *extra)
        assert ran.code == 1
        assert "broken at entry 1" in ran.err
    assert json.loads(ran.out)["broken_at"] == 1


# ---------------------------------------------------------------- comparing


async def test_a_difference_is_told_by_rule_and_by_line(headway: Headway) -> None:
    before = headway.folder("before", files(EVENINGS))
    after = headway.folder("after", files(LONG_ANSWERS, EVENINGS.replace(">= 18", ">= 17")
        .replace('"time.hour": 17', '"time.hour": 16').replace('"time.hour": 18', '"time.hour": 17')))  # fmt: skip
    same, people, programs = await one_by_one(
        headway("policy", "diff", before, "--against", before),
        headway("policy", "diff", after),
        headway("policy", "diff", after, "--against", before, "--json"),
    )
    assert same.out.strip() == "no difference"
    assert "added: made-up/evenings" in people.words
    assert programs.document["rules_added"] == ["made-up/long-answers"]
    assert programs.document["rules_changed"] == ["made-up/evenings"]
    assert "+++ b/made-up.yaml" in programs.document["lines"]


async def test_replay_tells_what_a_folder_would_change(headway: Headway, world: World) -> None:
    await record(world, 10)
    strict = headway.folder("strict", STRICT)
    people, programs, nothing = await one_by_one(
        headway("policy", "replay", "--since", "24h", "--against", strict),
        headway("policy", "replay", "--against", strict, "--json"),
        headway("policy", "replay", "--json"),
    )
    assert (people.code, people.err) == (0, "")
    assert max(len(line) for line in people.out.splitlines()) <= WIDTH, people.out
    assert "made-up/long-answers" in people.words
    document = programs.document
    # Of ten calls two ask for more than 1,000 tokens, and each row stands for 32 calls.
    assert (document["rows"], document["calls"], document["calls_changed"]) == (10, 320, 128)
    assert document["calls_denied_after"] == 128
    assert {change["tenant"] for change in document["changes"]} <= {"t0", "t1", "t2"}
    assert document["fired"] == {"made-up/long-answers": 128}
    assert nothing.document["changes"] == []
    assert nothing.document["against"] == "active"


async def test_a_decision_is_explained_down_to_what_was_read(
    headway: Headway, world: World
) -> None:
    await record(world, 5)
    strict = headway.folder("strict", STRICT)
    plain, people, programs = await one_by_one(
        headway("policy", "explain", "q4"),
        headway("policy", "explain", "q4", "--against", strict, "--all"),
        headway("policy", "explain", "q4", "--against", strict, "--json"),
    )
    assert "no rule fires" in plain.words
    assert "request.max_tokens = 1002" in people.words
    assert "request.max_tokens <= 1000" in people.words
    assert "does not fire" in people.words
    assert max(len(line) for line in people.out.splitlines()) <= WIDTH, people.out
    (view,) = programs.document["rules"]
    assert (view["rule"], view["values"]) == (
        "made-up/long-answers", {"request.max_tokens": 1_002},
    )  # fmt: skip
