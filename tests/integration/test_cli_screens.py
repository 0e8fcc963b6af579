"""The operator's screens against a real replica: status, doctor, explain, report, contexts, tail."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from cli import complete
from cli.main import app
from tests.integration.cli_world import World, running_world
from tests.integration.history import write_past
from tests.integration.surfaces import PEPPER


@pytest.fixture
async def world(
    clean_database_url: str, nats_control_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    monkeypatch.chdir(tmp_path)
    async with running_world(clean_database_url, nats_control_url, tmp_path) as world:
        yield world


async def test_status_is_one_screen_that_says_what_to_do(world: World) -> None:
    headway = world.headway
    for _ in range(3):
        assert (await world.chat()).status_code == 503
    example = (await world.chat("borealis")).headers["x-headway-decision"]
    await world.refusal(example)
    narrow, wide = await headway("status"), await headway("status", COLUMNS="160")
    document = (await headway("status", "--json")).document
    as_yaml = await headway("status", "--output", "yaml")
    # Agents are declared and none is there.
    assert {narrow.code, wide.code, as_yaml.code} == {1}
    assert narrow.fits(80)
    assert wide.fits(160)
    for shown in (narrow, wide):
        assert "NOT HEALTHY" in shown.out
        assert "3 of 3 nodes are silent" in shown.words
        assert "$ headway nodes list" in shown.words
        assert "4 of 4 calls (100.0%)" in shown.words
        assert "\x1b" not in shown.out
    assert example in wide.out
    [refusal] = document["refusals"]
    assert (refusal["reason"], refusal["calls"], refusal["tenants"]) == ("no_capacity", 4, 2)
    assert (refusal["tenant_most"], refusal["share_ratio"]) == ("aurora", 1.0)
    assert document["is_healthy"] is False
    errors = {one["words"] for one in document["findings"] if one["severity"] == "error"}
    assert any("silent" in words for words in errors)
    assert yaml.safe_load(as_yaml.out).keys() == document.keys()
    contradiction = await headway("status", "--json", "--output", "yaml")
    assert (contradiction.code, "contradict" in contradiction.err) == (2, True)


async def test_a_refusal_names_numbers_that_would_have_let_it_in(world: World) -> None:
    """What is told is then done, and the call gets past that hurdle."""
    headway = world.headway
    assert (await headway("tenants", "budget", "cumulus", "0.000001")).code == 0
    # More at once than candidates are worked out for: words and numbers are kept of all.
    many = await asyncio.gather(*(world.chat("cumulus", max_tokens=200) for _ in range(24)))
    for answer in many:
        kept = await world.refusal(answer.headers["x-headway-decision"])
        assert kept["detail"] == answer.json()["error"]["message"]
        assert len(kept["hurdles"]) == 1
    assert (await headway("explain", many[-1].headers["x-headway-decision"])).code == 0
    refused = await world.chat("cumulus", max_tokens=200)
    assert refused.json()["error"]["code"] == "insufficient_quota"
    request = refused.headers["x-headway-decision"]
    [hurdle] = (await world.refusal(request))["hurdles"]
    assert (hurdle["quantity"], hurdle["of"]) == ("micro_usd", "tenant:cumulus")
    explained = await headway("explain", request)
    assert explained.fits(80)
    assert "what would have let it in" in explained.words
    assert "headway budgets show tenant:cumulus" in explained.words
    needed = int(hurdle["needed"])
    for micro_usd, code in ((needed - 1, "insufficient_quota"), (needed, "no_capacity")):
        limit = f"{micro_usd / 1e6:.6f}"
        assert (await headway("budgets", "set", "tenant:cumulus", limit)).code == 0
        assert (await world.chat("cumulus", max_tokens=200)).json()["error"]["code"] == code

    keys = (await headway("keys", "list", "--json")).document["data"]
    [key] = [one["id"] for one in keys if one["tenant_id"] == "borealis"]
    assert (await headway("keys", "limit", key, "--rpm", "1")).code == 0
    codes = [(await world.chat("borealis")) for _ in range(3)]
    limited = [one for one in codes if one.json()["error"]["code"] == "rate_limited"]
    told = await world.refusal(limited[-1].headers["x-headway-decision"])
    assert [(one["quantity"], one["there"], one["of"]) for one in told["hurdles"]] == [
        ("requests_per_minute", 1.0, "key")
    ]
    assert told["retry_after_ms"] > 0
    assert (await headway("explain", "nothing")).code == 1


async def test_doctor_names_what_is_wrong_and_what_to_do(world: World) -> None:
    headway = world.headway
    assert (
        await headway(
            "tenants", "create", "keyless", "--class", "marble", "--slo", "batch", "--budget", "1"
        )
    ).code == 0
    found = await headway("doctor", "--json")
    assert found.code == 1
    checks = {(one["area"], one["subject"]): one for one in found.document["checks"]}

    def severity(area: str, subject: str) -> str:
        return str(checks[area, subject]["severity"])

    assert severity("tenants", "tenants without keys") == "warning"
    assert checks["tenants", "tenants without keys"]["measured"] == "keyless"
    assert severity("policy", "classes of tenants") == "error"
    assert checks["policy", "classes of tenants"]["measured"] == "marble"
    assert severity("fleet", "silent nodes") == "error"
    assert severity("catalogue", "models without engines") == "warning"
    # The tests' server does not sync, which none that keeps money may do.
    assert severity("postgres", "fsync") == "error"
    assert checks["postgres", "fsync"]["remedy"] == "set fsync to on"
    # 31 bytes, one fewer than is advised.
    assert severity("secrets", "HEADWAY_PEPPER") == "warning"
    for area, subject in (
        ("postgres", "schema"), ("postgres", "version"),
        ("postgres", "max_connections"), ("nats", "permissions"),
        ("nats", "JetStream"), ("clock", "PostgreSQL"), ("clock", "this machine"),
        ("policy", "bundle"), ("network", "versions"),
    ):  # fmt: skip
        assert severity(area, subject) == "ok", checks[area, subject]
    # How fast they answer depends on the machine.
    assert {severity("network", "server"), severity("nats", "connection")} <= {"ok", "warning"}
    assert all(one["remedy"] for one in checks.values() if one["severity"] in {"error", "warning"})
    people = await headway("doctor")
    assert people.code == 1
    assert people.fits(80)
    assert "marble" in people.words
    assert "max_connections" not in people.words
    assert "max_connections" in (await headway("doctor", "--all")).words
    for secret in (PEPPER, world.surfaces.operators["admin"]):
        assert secret not in found.out + people.out
    gone = await headway("doctor", HEADWAY_URL="http://127.0.0.1:9")
    assert (gone.code, "no answer" in gone.err) == (3, True)


async def test_report_draws_what_happened_on_one_page(world: World, tmp_path: Path) -> None:
    headway = world.headway
    past = write_past(world.database_url, world.surfaces.replica.id, seed=7)
    document = (await headway("report", "--since", "6h", "--json")).document
    spent: dict[str, int] = defaultdict(int)
    for call in past.calls:
        spent[call["tenant"]] += call["cost"]
    found: dict[str, int] = defaultdict(int)
    for point in document["spend"]:
        found[point["tenant_id"]] += point["micro_usd"]
    assert found == spent
    ended = Counter(workflow["state"] for workflow in past.workflows)
    drawn: Counter[str] = Counter()
    for point in document["workflows"]:
        drawn[point["state"]] += point["workflows"]
    assert drawn == ended
    summary = document["summary"]
    assert summary["micro_usd_per_success"] == sum(spent.values()) / ended["succeeded"]
    counted = [call for call in past.calls if call["state"] != "cancelled"]
    attained = [
        call for call in counted if call["state"] == "succeeded" and call["ttft_ms"] < 1_000
    ]
    assert summary["attainment_ratio"] == pytest.approx(len(attained) / len(counted))
    refused = Counter(refusal["reason"] for refusal in past.refusals)
    assert summary["calls_refused"] == refused.total()
    wasted = sum(
        call["cost"]
        for call in past.calls
        if (call["workflow_state"] or call["state"]) != "succeeded"
    )
    assert document["totals"]["wasted_micro_usd"] == wasted
    cost: dict[str, int] = defaultdict(int)
    for call in past.calls:
        if call["workflow"] and call["workflow_state"] != "succeeded":
            cost[call["workflow"]] += call["cost"]
    dearest = sorted(cost.items(), key=lambda item: (item[1], item[0]), reverse=True)
    assert [(one["id"], one["micro_usd"]) for one in document["wasters"]] == dearest
    # The same in pages of two.
    cursor, paged = "", []
    while True:
        query = f"report/wasters?since_s=21600&limit=2{f'&cursor={cursor}' if cursor else ''}"
        page = (await world.surfaces.operate("GET", query)).json()
        paged += [(one["id"], one["micro_usd"]) for one in page["data"]]
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert paged == dearest

    file = tmp_path / "report.html"
    written = await headway("report", "--since", "6h", "--html", str(file))
    assert (written.code, written.fits(80)) == (0, True)
    page_text = file.read_text()
    assert page_text.count("<h2>") == 6
    for words in ("aurora", "Cost per successful task", "shed_overload", dearest[0][0]):
        assert words in page_text
    # Nothing is fetched from anywhere.
    assert 'src="http' not in page_text
    assert "<link" not in page_text
    again = await headway("report", "--html", str(file))
    assert (again.code, "--force" in again.err) == (2, True)
    assert (await headway("report", "--html", str(file), "--force", "--since", "6h")).code == 0


async def test_calls_are_followed_and_a_workflow_is_explained(world: World) -> None:
    headway = world.headway
    past = write_past(world.database_url, world.surfaces.replica.id, seed=3, minutes=2.0)
    tail = await headway("requests", "tail", "--for", "0", "--lines", "200", "--json")
    told = [json.loads(line) for line in tail.out.splitlines()]
    assert Counter(one["id"] for one in told) == Counter(
        one["id"] for one in [*past.calls, *past.refusals]
    )
    assert [one["at"] for one in told] == sorted(one["at"] for one in told)
    only = await headway(
        "requests", "tail", "--for", "0", "-n", "200", "--tenant", "aurora", "--state", "failed"
    )
    wanted = {
        call["id"] for call in past.calls if (call["tenant"], call["state"]) == ("aurora", "failed")
    }
    assert len(only.out.splitlines()) == len(wanted)
    assert only.fits(80)
    workflow = past.workflows[0]
    explained = await headway("explain", workflow["id"], COLUMNS="160")
    assert explained.code == 0
    calls = [call for call in past.calls if call["workflow"] == workflow["id"]]
    assert all(call["id"] in explained.out and call["engine"] in explained.out for call in calls)
    assert workflow["state"] in explained.words
    document = (await headway("explain", workflow["id"], "--json")).document
    assert document["spent_micro_usd"] == sum(call["cost"] for call in calls)
    assert (await headway("explain", "wf-nothing")).code == 1
    assert (await headway("explain", "plan")).code == 0
    assert (await headway("explain", "plan:9")).code == 1
    assert (await headway("explain", "plan:x")).code == 2


async def test_contexts_name_clusters_and_keys_stay_with_their_servers(world: World) -> None:
    headway, key = world.headway, world.surfaces.operators["viewer"]
    nothing: dict[str, str | None] = {"HEADWAY_URL": None, "HEADWAY_OPERATOR_KEY": None}
    assert (await headway("nodes", "list", **nothing)).code == 2
    made = await headway(
        "config", "add", "lab", "--url", world.url, "--key-stdin", stdin=f"{key}\n", **nothing
    )
    assert (made.code, key in made.out) == (0, False)
    file = headway.folder / "config.yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert (await headway("nodes", "list", **nothing)).code == 2
    assert (await headway("nodes", "list", "--context", "lab", **nothing)).code == 0
    assert (await headway("nodes", "list", HEADWAY_CONTEXT="lab", **nothing)).code == 0
    assert (await headway("config", "use", "lab")).code == 0
    shown = await headway("config", "show", "--json", **nothing)
    assert shown.document["client"]["context"] == "lab"
    assert shown.document["client"]["key_source"] == "current context"
    assert {one["name"] for one in shown.document["settings"]} >= {"pepper", "queue_wait_ms_max"}
    for secret in (PEPPER, key, "127.0.0.1:5432"):
        assert secret not in shown.out
    other = await headway("nodes", "list", "--url", "http://127.0.0.1:9", **nothing)
    assert (other.code, "belongs to" in other.words) == (2, True)
    # A key in a file that is its own, which the context only names.
    (headway.folder / "key").write_text(key)
    named = ("config", "add", "two", "--url", world.url, "--key-file", "key", "--use")
    assert (await headway(*named)).code == 0
    assert (await headway("nodes", "list", **nothing)).code == 0
    listed = (await headway("config", "contexts", "--json")).document
    assert (listed["current"], len(listed["contexts"])) == ("two", 2)
    assert key not in (await headway("config", "contexts")).out
    file.chmod(0o644)
    opened = await headway("nodes", "list", **nothing)
    assert (opened.code, "chmod 600" in opened.words) == (2, True)
    file.chmod(0o600)
    assert (await headway("config", "remove", "two")).code == 0
    assert (await headway("config", "use", "two")).code == 2
    for arguments in (
        ("config", "add", "no/name", "--url", world.url, "--key-file", "key"),
        ("config", "add", "x", "--url", "ftp://x", "--key-file", "key"),
        ("config", "add", "x", "--url", world.url),
    ):
        assert (await headway(*arguments)).code == 2


async def test_what_shuts_somebody_out_is_confirmed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    headway = world.headway
    for arguments in (
        ("tenants", "disable", "aurora"),
        ("keys", "revoke", "k-none"),
        ("workflows", "cancel", "wf-none"),
        ("budgets", "remove", "key:none"),
        ("breaker", "open", "pool:llama-3.1-8b/us-east", "--reason", "test"),
    ):
        asked = await headway(*arguments)
        assert (asked.code, "--yes" in asked.err) == (2, True), arguments
    # Nothing runs there, so that it is empty at once.
    watched = await headway("nodes", "cordon", "us-l40s", "--watch", "--json")
    assert (watched.code, watched.document["is_cordoned"], watched.document["calls"]) == (
        0,
        True,
        0,
    )
    tenants = (await headway("tenants", "list", "--json")).document["data"]
    assert not any(tenant["is_disabled"] for tenant in tenants)
    assert (await headway("tenants", "disable", "aurora", "--yes")).code == 0
    # The shell offers what the server knows, and nothing where there is none.
    context = get_command(app).make_context("headway", [], resilient_parsing=True)
    for name in ("HEADWAY_URL", "HEADWAY_OPERATOR_KEY"):
        monkeypatch.setenv(name, str(headway.environment[name]))
    offered = await asyncio.to_thread(complete.nodes, context, "us-")
    assert set(offered) == {"us-l40s", "us-h100"}
    monkeypatch.setenv("HEADWAY_URL", "http://127.0.0.1:9")
    assert await asyncio.to_thread(complete.nodes, context, "us-") == []
