"""What is declared, keys, workflows, commands, leadership: each function once for what it promises."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import OperatorRole, Scope
from controlplane.domain.errors import ConfigurationError, StateUnavailable
from controlplane.domain.ids import CommandId, KeyId, NodeId, SloClassName, TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.store import (
    budgets,
    catalog,
    commands,
    keys,
    leadership,
    replicas,
    workflows,
)
from controlplane.store.cluster import parse_cluster
from controlplane.store.paging import BadCursor
from controlplane.store.session import make_engine, transaction
from controlplane.store.workflows import WorkflowConflict, WorkflowRecord
from dataplane.protocol.messages import CommandKind, EngineFacts, EngineSpec, EngineState
from tests.integration.store_world import ACME, BOLT, CLUSTER, R1, R2, cluster

PEPPER = b"pepper"
INTERACTIVE = SloClassName("interactive")


# ---------------------------------------------------------------- cluster document


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        (("regions: [eu, us]", "regions: [eu, eu]"), "`eu` is there twice"),
        (("gpus: 8", "gpus: 0"), "nodes.0.gpus"),
        (("gpus: 8", "gpuz: 8"), "nodes.0"),
        (("gpu_type: h100\n    gpus: 8", "gpu_type: h100\n    gpus: eight"), "nodes.0.gpus"),
        (("role: both, gpus: 1", "role: both, gpus: 9"), "`n1` has 8 GPUs and its engines take 9"),
        (("role: both", "role: all"), "nodes.0.engines.0.role"),
        (("id: n1\n", "id: n.1\n"), "nodes.0.id"),
        (("budget_usd: 1.0", "budget_usd: -1.0"), "tenants.0.budget_usd"),
        (("regions: [eu, us]", "regions: ]"), "not YAML"),
    ],
)
def test_a_bad_document_is_refused_with_the_place(changed: tuple[str, str], place: str) -> None:
    assert changed[0] in CLUSTER
    with pytest.raises(ConfigurationError, match=place):
        parse_cluster(CLUSTER.replace(*changed, 1))


@pytest.mark.parametrize("text_", ["", "[]", "3", "&a [*a]", "!!python/object:os.system {}"])
def test_what_is_no_document_is_refused(text_: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_cluster(text_)


async def test_a_document_is_declared_whole_and_can_be_declared_again(engine: AsyncEngine) -> None:
    first = await catalog.load_catalog(engine)
    assert set(first.nodes) == {"n1", "n2"}
    assert first.regions == ("eu", "us")
    assert first.models["org/small"].kv_bytes_per_token == 131_072
    assert first.gpu_types["h100"].price_micro_usd_per_hour == 2_500_000
    assert first.slo_classes["interactive"].ttft_ms_max == 1000

    summary = await catalog.apply_cluster(engine, cluster())
    assert (summary.nodes, summary.tenants, summary.revision) == (2, 2, first.revision + 1)
    again = await catalog.load_catalog(engine)
    assert replace(again, revision=0) == replace(first, revision=0)
    assert await catalog.catalog_revision(engine) == again.revision


async def test_a_dangling_name_changes_nothing(engine: AsyncEngine) -> None:
    before = await catalog.load_catalog(engine)
    document = parse_cluster(CLUSTER.replace("region: us", "region: mars"))
    with pytest.raises(ConfigurationError, match=r"mars.*declare it first"):
        await catalog.apply_cluster(engine, document)
    assert await catalog.load_catalog(engine) == before


async def test_a_cordon_is_kept_by_the_next_document(engine: AsyncEngine) -> None:
    assert await catalog.set_cordon(engine, NodeId("n1"), is_cordoned=True)
    assert not await catalog.set_cordon(engine, NodeId("nowhere"), is_cordoned=True)
    await catalog.apply_cluster(engine, cluster())
    assert (await catalog.load_catalog(engine)).nodes[NodeId("n1")].is_cordoned


async def test_a_document_never_lowers_a_limit_below_what_is_taken(engine: AsyncEngine) -> None:
    assert await budgets.lease(engine, "tenant:acme", R1, 700_000, 700_000) == 700_000
    await catalog.apply_cluster(
        engine, parse_cluster(CLUSTER.replace("budget_usd: 1.0", "budget_usd: 0.5"))
    )
    account = await budgets.read(engine, "tenant:acme")
    assert account is not None
    assert account.limit == 700_000


async def test_tenants_are_created_once_and_listed_with_their_budget(engine: AsyncEngine) -> None:
    coil = TenantId("coil")
    made = await catalog.create_tenant(
        engine,
        tenant_id=coil,
        name="Coil",
        tenant_class="silver",
        slo_class="interactive",
        budget_micro_usd=5,
    )
    assert made is not None
    assert made.limit_micro_usd == 5
    again = await catalog.create_tenant(
        engine,
        tenant_id=coil,
        name="Other",
        tenant_class="silver",
        slo_class="interactive",
        budget_micro_usd=9,
    )
    assert again is None
    assert await catalog.get_tenant(engine, coil) == made
    with pytest.raises(ConfigurationError, match="nosuch"):
        await catalog.create_tenant(
            engine,
            tenant_id=TenantId("dune"),
            name="Dune",
            tenant_class="silver",
            slo_class="nosuch",
            budget_micro_usd=5,
        )
    assert await budgets.read(engine, "tenant:dune") is None

    first = await catalog.list_tenants(engine, limit=2)
    assert first.items[0].id == "coil"
    rest = await catalog.list_tenants(engine, limit=2, cursor=first.next_cursor)
    assert {item.id for item in (*first.items, *rest.items)} == {"acme", "bolt", "coil"}
    assert rest.next_cursor is None


@pytest.mark.parametrize("cursor", ["", "x", "eA==", "fHw=", "\x00", "é", "MjAyNi0wMS0wMXxh"])
async def test_a_foreign_cursor_is_refused(engine: AsyncEngine, cursor: str) -> None:
    with pytest.raises(BadCursor):
        await catalog.list_tenants(engine, cursor=cursor)


# ---------------------------------------------------------------- engines


def facts(engine_id: str, model: str = "org/small", port: int = 1) -> EngineFacts:
    return EngineFacts(
        engine_id=engine_id,
        model=model,
        role="both",
        port=port,
        kind="simulated",
        state=EngineState.SERVING,
        gpus=1,
        seats=8,
        kv_tokens=100_000,
        block_tokens=16,
        context_tokens_max=32_768,
        started_ms=0,
    )


async def test_engines_are_what_the_agent_last_declared(engine: AsyncEngine) -> None:
    n1, n2 = NodeId("n1"), NodeId("n2")
    assert await catalog.upsert_engines(engine, n1, 5, [facts("n1/0"), facts("n1/1")])
    assert await catalog.upsert_engines(engine, n1, 5, [facts("n1/1", port=7)])
    assert [(e.id, e.port) for e in await catalog.list_engines(engine)] == [("n1/1", 7)]
    # An older start of the agent has nothing to say any more.
    assert not await catalog.upsert_engines(engine, n1, 4, [])
    # Another node's agent does not take an engine over, and an undeclared model is left out.
    assert await catalog.upsert_engines(engine, n2, 1, [facts("n1/1", port=9), facts("x", "no")])
    assert [(e.node_id, e.port) for e in await catalog.list_engines(engine)] == [("n1", 7)]
    assert not await catalog.upsert_engines(engine, NodeId("n9"), 1, [])
    assert await catalog.upsert_engines(engine, n1, 6, [])
    assert await catalog.list_engines(engine) == []
    nodes = {node.id: node for node in (await catalog.list_nodes(engine)).items}
    assert nodes[n1].agent_epoch == 6
    assert nodes[n1].last_seen_at is not None


# ---------------------------------------------------------------- keys


def test_keys_are_well_formed_and_one_changed_character_is_not() -> None:
    for prefix in ("tenant", "op"):
        for _ in range(50):
            plain, key_id = keys.new_key(prefix)  # type: ignore[arg-type]
            assert plain.startswith(f"hw-{prefix}-{key_id}-")
            assert keys.is_well_formed(plain)
            for at in (0, 3, 12, 30, len(plain) - 1):
                other = "A" if plain[at] != "A" else "B"
                assert not keys.is_well_formed(plain[:at] + other + plain[at + 1 :])
    for garbage in ("", "-", "hw-tenant", "sk-" + "x" * 60, "é" * 70, "x" * 10_000):
        assert not keys.is_well_formed(garbage)


async def test_keys_are_found_by_digest_until_they_are_revoked(engine: AsyncEngine) -> None:
    key_id, plain = await keys.create_tenant_key(engine, PEPPER, ACME, "ci")
    found = await keys.find_principal(engine, keys.digest(PEPPER, plain))
    assert found is not None
    assert (found.key_id, found.tenant.id, found.tenant.tenant_class) == (key_id, "acme", "gold")
    assert await keys.find_principal(engine, keys.digest(b"other", plain)) is None
    assert await keys.find_operator(engine, keys.digest(PEPPER, plain)) is None

    before = await catalog.catalog_revision(engine)
    revoked = await keys.revoke_key(engine, key_id)
    assert revoked is not None
    assert revoked.revoked_at is not None
    assert await keys.revoke_key(engine, key_id) == revoked
    assert await catalog.catalog_revision(engine) == before + 1
    assert await keys.find_principal(engine, keys.digest(PEPPER, plain)) is None
    assert await keys.revoke_key(engine, KeyId("nosuch")) is None
    with pytest.raises(ConfigurationError, match="nobody"):
        await keys.create_tenant_key(engine, PEPPER, TenantId("nobody"), "x")


async def test_operator_keys_have_a_role_and_are_no_tenants(engine: AsyncEngine) -> None:
    key_id, plain = await keys.create_operator_key(engine, PEPPER, OperatorRole.VIEWER, "me")
    digest = keys.digest(PEPPER, plain)
    assert await keys.find_operator(engine, digest) == (key_id, OperatorRole.VIEWER)
    assert await keys.find_principal(engine, digest) is None
    await keys.revoke_key(engine, key_id)
    assert await keys.find_operator(engine, digest) is None
    async with transaction(engine) as connection:
        stored = await connection.scalar(text("SELECT string_agg(k::text, ' ') FROM api_keys k"))
    assert plain not in stored
    assert plain.split("-", 3)[3] not in stored


# ---------------------------------------------------------------- workflows


async def make(engine: AsyncEngine, deadline_ms: int = 60_000) -> WorkflowRecord:
    return await workflows.create(
        engine,
        tenant=ACME,
        kind="fix-bug",
        scope=Scope.COPILOT,
        steps_expected=3,
        slo_class=INTERACTIVE,
        deadline_ms=deadline_ms,
        budget_micro_usd=500,
    )


async def test_a_workflow_ends_once(engine: AsyncEngine) -> None:
    made = await make(engine)
    assert made.state is WorkflowState.RUNNING
    assert made.budget_limit_micro_usd == 500
    assert (made.deadline_at - made.created_at).total_seconds() == pytest.approx(60, abs=1)
    assert await workflows.get(engine, made.id, ACME) == made
    assert await workflows.get(engine, made.id, BOLT) is None
    assert await workflows.end(engine, made.id, BOLT, WorkflowState.CANCELLED) is None

    ended = await workflows.end(engine, made.id, ACME, WorkflowState.SUCCEEDED, "solved")
    assert isinstance(ended, WorkflowRecord)
    assert (ended.state, ended.outcome_detail) == (WorkflowState.SUCCEEDED, "solved")
    again = await workflows.end(engine, made.id, ACME, WorkflowState.SUCCEEDED, "twice")
    assert again == ended
    other = await workflows.end(engine, made.id, ACME, WorkflowState.FAILED)
    assert other == WorkflowConflict(ended)


async def test_of_two_outcomes_at_once_one_wins(engine: AsyncEngine) -> None:
    made = await make(engine)
    states = [WorkflowState.SUCCEEDED, WorkflowState.FAILED] * 4
    results = await asyncio.gather(
        *(workflows.end(engine, made.id, ACME, state) for state in states)
    )
    final = await workflows.get(engine, made.id, ACME)
    assert final is not None
    for state, result in zip(states, results, strict=True):
        assert isinstance(result, WorkflowRecord) == (state is final.state)


async def test_past_its_deadline_a_workflow_has_expired(engine: AsyncEngine) -> None:
    late, overdue, running = [await make(engine, ms) for ms in (1, 1, 60_000)]
    ended = await workflows.end(engine, late.id, ACME, WorkflowState.SUCCEEDED, "too late")
    assert isinstance(ended, WorkflowConflict)
    assert ended.record.state is WorkflowState.EXPIRED
    assert len(await workflows.expire_overdue(engine)) == 1
    assert await workflows.expire_overdue(engine) == ()
    listed = await workflows.list_workflows(engine, tenant=ACME, state=WorkflowState.EXPIRED)
    assert {item.id for item in listed.items} == {late.id, overdue.id}
    left = await workflows.list_workflows(engine, state=WorkflowState.RUNNING)
    assert [item.id for item in left.items] == [running.id]


async def test_a_workflow_of_nobody_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigurationError):
        await workflows.create(
            engine,
            tenant=TenantId("nobody"),
            kind="k",
            scope=Scope.CHAT,
            steps_expected=1,
            slo_class=INTERACTIVE,
            deadline_ms=1000,
            budget_micro_usd=None,
            workflow_id=WorkflowId("wf-1"),
        )
    assert await workflows.get(engine, WorkflowId("wf-1"), None) is None


# ---------------------------------------------------------------- leadership, commands, replicas


async def test_the_epoch_grows_with_every_change_of_leader(engine: AsyncEngine) -> None:
    first = await leadership.claim(engine, R1, 60)
    assert first is not None
    assert await leadership.claim(engine, R1, 60) == first
    assert await leadership.claim(engine, R2, 60) is None
    assert await leadership.claim(engine, R1, 0) == first
    second = await leadership.claim(engine, R2, 60)
    assert second == first + 1
    assert await leadership.claim(engine, R1, 60) is None
    await leadership.release(engine, R2)
    assert await leadership.claim(engine, R1, 60) == second + 1


async def test_of_many_claims_at_once_one_leads(engine: AsyncEngine) -> None:
    claims = await asyncio.gather(*(leadership.claim(engine, r, 60) for r in (R1, R2) * 5))
    assert sum(claim is not None for claim in claims) == 5
    assert len({claim for claim in claims if claim is not None}) == 1


async def test_a_command_is_sent_by_the_leader_and_ends_once(engine: AsyncEngine) -> None:
    epoch = await leadership.claim(engine, R1, 0)
    assert epoch is not None
    spec = EngineSpec(
        engine_id="n1/0", kind="simulated", model="org/small", role="both", gpus=1, options={"a": 1}
    )
    made = await commands.enqueue(
        engine,
        node_id=NodeId("n1"),
        engine_id="n1/0",  # type: ignore[arg-type]
        kind=CommandKind.LOAD,
        deadline_s=5.0,
        spec=spec,
        command_id=CommandId("c1"),
    )
    again = await commands.enqueue(
        engine,
        node_id=NodeId("n2"),
        engine_id="other",  # type: ignore[arg-type]
        kind=CommandKind.STOP,
        command_id=CommandId("c1"),
    )
    assert again == made
    assert (made.spec, made.deadline_s, made.epoch) == (spec, 5.0, epoch)
    assert await commands.unsent(engine, 10) == [made]

    later = await leadership.claim(engine, R2, 60)
    assert later is not None
    assert not await commands.mark_sent(engine, made.id, epoch)
    assert await commands.mark_sent(engine, made.id, later)
    assert await commands.unsent(engine, 10) == []
    assert await commands.finish(engine, made.id, "done", "loaded\x00")
    assert not await commands.finish(engine, made.id, "failed", "no")
    listed = (await commands.list_commands(engine)).items
    assert [(c.state, c.detail, c.epoch) for c in listed] == [("done", "loaded", later)]
    with pytest.raises(ConfigurationError, match="nowhere"):
        await commands.enqueue(
            engine,
            node_id=NodeId("nowhere"),
            engine_id="e",  # type: ignore[arg-type]
            kind=CommandKind.STOP,
        )


async def test_a_reaped_replica_is_told_so_by_its_beat(engine: AsyncEngine) -> None:
    assert await replicas.beat(engine, R1) == 1
    await replicas.retire(engine, R1)
    # Told until it hears it: the first answer may be lost.
    assert await replicas.beat(engine, R1) == 2
    assert await replicas.beat(engine, R1) == 2
    assert await replicas.register(engine, R1) == 2
    assert await replicas.beat(engine, R2) == 1


async def test_money_of_one_life_is_not_another_s(engine: AsyncEngine) -> None:
    assert await budgets.lease(engine, "tenant:acme", R1, 100, 100) == 100
    await replicas.retire(engine, R1)
    assert await replicas.register(engine, R1) == 2
    # What the first life still asks for or gives back is not the second's.
    assert await budgets.lease(engine, "tenant:acme", R1, 1, 1) == 0
    assert await budgets.lease(engine, "tenant:acme", R1, 60, 60, 2) == 60
    assert await replicas.register(engine, R1) == 2
    assert await budgets.surrender(engine, "tenant:acme", R1, 50) == 0
    assert await budgets.surrender(engine, "tenant:acme", R1, 50, 2) == 50
    account = await budgets.read(engine, "tenant:acme")
    assert account is not None
    assert account.reserved == 10


async def test_without_postgres_everything_raises_state_unavailable() -> None:
    engine = make_engine("postgresql://u:p@127.0.0.1:1/none")
    for work in (
        catalog.load_catalog(engine),
        budgets.lease(engine, "tenant:acme", R1, 1, 1),
        keys.find_principal(engine, b""),
        workflows.expire_overdue(engine),
    ):
        with pytest.raises(StateUnavailable, match="not available"):
            await work
    await engine.dispose()
