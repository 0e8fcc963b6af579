"""What is declared: read as one catalogue, written as whole documents.

Every change raises the revision.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

from sqlalchemy import Row, Select, Table, bindparam, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controlplane.domain.catalog import Catalog, GpuType, Model, Node, SloClass
from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import (
    EngineId,
    GpuTypeName,
    ModelName,
    NodeId,
    RegionName,
    SloClassName,
    TenantId,
)
from controlplane.domain.money import MICRO_USD_PER_USD
from controlplane.store import audit, tables
from controlplane.store.audit import LOCAL, Change, Members
from controlplane.store.budgets import tenant_budget_id
from controlplane.store.cluster import ClusterDocument
from controlplane.store.paging import Page, newest_first, page
from controlplane.store.session import transaction
from dataplane.protocol.messages import EngineFacts

CACHE_SALT_BYTES = 16
# Any constant will do: it names the lock.
APPLY_LOCK = 0x4845_4144_4150_50
# Entries of each kind that the audit log tells of one document; the others are counted.
APPLIED_TOLD_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedSummary:
    """How many entries of each kind a document declared, and the revision they made."""

    regions: int
    gpu_types: int
    models: int
    adapters: int
    slo_classes: int
    tenants: int
    nodes: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    id: TenantId
    name: str
    tenant_class: str
    slo_class: SloClassName
    is_disabled: bool
    budget_id: str
    limit_micro_usd: int
    spent_micro_usd: int
    reserved_micro_usd: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """`engines` counts those that the agent declared."""

    id: NodeId
    region: RegionName
    gpu_type: GpuTypeName
    gpus: int
    address: str
    is_cordoned: bool
    agent_epoch: int
    last_seen_at: datetime | None
    created_at: datetime
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    id: EngineId
    node_id: NodeId
    model: ModelName
    role: str
    kind: str
    port: int
    gpus: int
    seats: int
    kv_tokens: int
    state: str
    updated_at: datetime
    cordon: str
    sleep_level: int
    wake_ms: int
    load_ms: int
    load_medium: str
    capabilities: list[str]


# ---------------------------------------------------------------- reading


async def catalog_revision(engine: AsyncEngine) -> int:
    async with transaction(engine) as connection:
        return int(await connection.scalar(select(tables.catalog_revision.c.revision)) or 0)


async def load_catalog(engine: AsyncEngine) -> Catalog:
    """Everything declared, at one revision."""
    async with transaction(engine) as connection:
        # The tables and the revision are read from one snapshot.
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        revision = int(await connection.scalar(select(tables.catalog_revision.c.revision)) or 0)
        regions = await connection.execute(select(tables.regions.c.name).order_by("name"))
        gpu_types = await connection.execute(select(tables.gpu_types).order_by("name"))
        models = await connection.execute(select(tables.models).order_by("name"))
        adapters = await connection.execute(select(tables.adapters).order_by("name"))
        slo_classes = await connection.execute(select(tables.slo_classes).order_by("name"))
        nodes = await connection.execute(select(tables.nodes).order_by("id"))
        declared = {row.name: Model(**_members(row)) for row in models}
        return Catalog(
            revision=revision,
            regions=tuple(RegionName(row.name) for row in regions),
            gpu_types={row.name: GpuType(**_members(row)) for row in gpu_types},
            models=declared,
            adapters={row.name: _adapter(row, declared[row.adapter_of]) for row in adapters},
            slo_classes={row.name: SloClass(**_members(row)) for row in slo_classes},
            nodes={
                row.id: Node(
                    id=row.id,
                    region=row.region,
                    gpu_type=row.gpu_type,
                    gpus=row.gpus,
                    address=row.address,
                    is_cordoned=row.is_cordoned,
                )
                for row in nodes
            },
        )


def _adapter(row: Row[Any], base: Model) -> Model:
    """An adapter has the sizes of its model, and its prices where it has none of its own."""
    prices = {name: price for name in _PRICES if (price := getattr(row, name)) is not None}
    return replace(base, name=row.name, adapter_of=base.name, adapter_path=row.path, **prices)


_PRICES = (
    "price_prompt_micro_usd_per_mtok",
    "price_cached_micro_usd_per_mtok",
    "price_completion_micro_usd_per_mtok",
)


async def list_models(engine: AsyncEngine) -> list[Model]:
    async with transaction(engine) as connection:
        rows = await connection.execute(select(tables.models).order_by("name"))
        return [Model(**_members(row)) for row in rows]


async def list_nodes(
    engine: AsyncEngine,
    *,
    region: str | None = None,
    gpu_type: str | None = None,
    is_cordoned: bool | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[NodeRecord]:
    """Newest first. Raises BadCursor."""
    counted = (
        select(func.count())
        .where(tables.engines.c.node_id == tables.nodes.c.id)
        .scalar_subquery()
        .label("engines")
    )
    statement = select(tables.nodes, counted)
    for column, wanted in (
        (tables.nodes.c.region, region),
        (tables.nodes.c.gpu_type, gpu_type),
        (tables.nodes.c.is_cordoned, is_cordoned),
    ):
        if wanted is not None:
            statement = statement.where(column == wanted)
    statement = newest_first(
        statement,
        tables.nodes.c.created_at,
        tables.nodes.c.id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [NodeRecord(**_members(row)) for row in rows]
    return page(items, [(item.created_at, item.id) for item in items], limit)


async def get_node(engine: AsyncEngine, node_id: NodeId) -> NodeRecord | None:
    counted = (
        select(func.count())
        .where(tables.engines.c.node_id == tables.nodes.c.id)
        .scalar_subquery()
        .label("engines")
    )
    async with transaction(engine) as connection:
        row = (
            await connection.execute(
                select(tables.nodes, counted).where(tables.nodes.c.id == node_id)
            )
        ).one_or_none()
    return None if row is None else NodeRecord(**_members(row))


async def list_engines(engine: AsyncEngine, node_id: NodeId | None = None) -> list[EngineRecord]:
    """What agents last declared, by id."""
    statement = select(tables.engines).order_by("id")
    if node_id is not None:
        statement = statement.where(tables.engines.c.node_id == node_id)
    async with transaction(engine) as connection:
        return [EngineRecord(**_members(row)) for row in await connection.execute(statement)]


_tenant_columns = (
    tables.tenants.c.id,
    tables.tenants.c.name,
    tables.tenants.c.tenant_class,
    tables.tenants.c.slo_class,
    tables.tenants.c.is_disabled,
    tables.tenants.c.budget_id,
    tables.tenants.c.created_at,
    tables.budgets.c.limit.label("limit_micro_usd"),
    tables.budgets.c.spent.label("spent_micro_usd"),
    tables.budgets.c.reserved.label("reserved_micro_usd"),
)


async def list_tenants(
    engine: AsyncEngine,
    *,
    tenant_class: str | None = None,
    is_disabled: bool | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[TenantRecord]:
    """Newest first, with their budgets. Raises BadCursor."""
    statement: Select[Any] = select(*_tenant_columns).join_from(tables.tenants, tables.budgets)
    if tenant_class is not None:
        statement = statement.where(tables.tenants.c.tenant_class == tenant_class)
    if is_disabled is not None:
        statement = statement.where(tables.tenants.c.is_disabled.is_(is_disabled))
    statement = newest_first(
        statement,
        tables.tenants.c.created_at,
        tables.tenants.c.id,
        limit=limit,
        cursor=cursor,
    )
    async with transaction(engine) as connection:
        rows = (await connection.execute(statement)).all()
    items = [TenantRecord(**_members(row)) for row in rows]
    return page(items, [(item.created_at, item.id) for item in items], limit)


async def get_tenant(engine: AsyncEngine, tenant_id: TenantId) -> TenantRecord | None:
    async with transaction(engine) as connection:
        return await _tenant(connection, tenant_id)


async def _tenant(connection: AsyncConnection, tenant_id: TenantId) -> TenantRecord | None:
    statement = select(*_tenant_columns).join_from(tables.tenants, tables.budgets)
    row = (
        await connection.execute(statement.where(tables.tenants.c.id == tenant_id))
    ).one_or_none()
    return None if row is None else TenantRecord(**_members(row))


# ---------------------------------------------------------------- writing


async def apply_cluster(
    engine: AsyncEngine, cluster: ClusterDocument, by: Change = LOCAL
) -> AppliedSummary:
    """Declare what the document says, all or nothing.

    A tenant's limit is never set below what it has spent and reserved. Raises ConfigurationError
    when the document names something that is neither in it nor declared already.
    """
    try:
        async with transaction(engine) as connection:
            # One document at a time, so that what is told as changed is what this one changed.
            await connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": APPLY_LOCK}
            )
            before = await _declared(connection, cluster)
            await _apply(connection, cluster)
            revision = await raise_revision(connection)
            told = _differences(before, await _declared(connection, cluster))
            await audit.note(connection, by, "cluster.apply", "cluster", *told)
    except IntegrityError as error:
        _refuse(error)
    return AppliedSummary(
        regions=len(cluster.regions),
        gpu_types=len(cluster.gpu_types),
        models=len(cluster.models),
        adapters=len(cluster.adapters),
        slo_classes=len(cluster.slo_classes),
        tenants=len(cluster.tenants),
        nodes=len(cluster.nodes),
        revision=revision,
    )


async def create_tenant(
    engine: AsyncEngine,
    *,
    tenant_id: TenantId,
    name: str,
    tenant_class: str,
    slo_class: str,
    budget_micro_usd: int,
    by: Change = LOCAL,
) -> TenantRecord | None:
    """A further tenant; None when the id is taken.

    Raises ConfigurationError on an unknown SLO class.
    """
    try:
        async with transaction(engine) as connection:
            if await _tenant(connection, tenant_id) is not None:
                return None
            budget_id = tenant_budget_id(tenant_id)
            await connection.execute(
                insert(tables.budgets)
                .values(id=budget_id, limit=budget_micro_usd)
                .on_conflict_do_nothing()
            )
            added = await connection.execute(
                insert(tables.tenants)
                .values(
                    id=tenant_id,
                    name=name,
                    tenant_class=tenant_class,
                    slo_class=slo_class,
                    budget_id=budget_id,
                    cache_salt=_new_salt(),
                )
                .on_conflict_do_nothing()
            )
            if added.rowcount == 0:
                return None
            await raise_revision(connection)
            record = await _tenant(connection, tenant_id)
            after = None if record is None else _told_of(record)
            await audit.note(connection, by, "tenant.create", f"tenant:{tenant_id}", None, after)
            return record
    except IntegrityError as error:
        _refuse(error)


async def change_tenant(
    engine: AsyncEngine,
    tenant_id: TenantId,
    *,
    limit_micro_usd: int | None = None,
    is_disabled: bool | None = None,
    by: Change = LOCAL,
) -> TenantRecord | None:
    """Set a tenant's budget, never below what is spent and reserved, and refuse, or let in again, every
    further request of it; what is None stays.

    None when there is no such tenant. Raises PreconditionFailed.
    """
    subject = f"tenant:{tenant_id}"
    tenants, budgets = tables.tenants, tables.budgets
    async with transaction(engine) as connection:
        await connection.execute(
            select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update(key_share=True)
        )
        # The account is locked as well, so that nobody sets its limit between the look and the change.
        await connection.execute(
            select(budgets.c.id)
            .where(budgets.c.id == tenant_budget_id(tenant_id))
            .with_for_update()
        )
        before = await _tenant(connection, tenant_id)
        if before is None:
            return None
        by.hold_to(subject, _members_of_tenant(before))
        if limit_micro_usd is not None:
            floor = budgets.c.spent + budgets.c.reserved
            await connection.execute(
                update(budgets)
                .where(budgets.c.id == before.budget_id)
                .values(limit=func.greatest(limit_micro_usd, floor))
            )
        if is_disabled is not None:
            await connection.execute(
                update(tenants).where(tenants.c.id == tenant_id).values(is_disabled=is_disabled)
            )
            await raise_revision(connection)
        after = await _tenant(connection, tenant_id)
        assert after is not None
        await audit.note(
            connection,
            by,
            "budget.set",
            f"budget:{before.budget_id}",
            {"limit": before.limit_micro_usd},
            {"limit": after.limit_micro_usd},
        )
        await audit.note(
            connection,
            by,
            "tenant.disable" if after.is_disabled else "tenant.enable",
            subject,
            {"is_disabled": before.is_disabled},
            {"is_disabled": after.is_disabled},
        )
        return after


def version_of_tenant(record: TenantRecord) -> str:
    """The version of what `change_tenant` changes."""
    return audit.version_of(_members_of_tenant(record))


def version_of_node(record: NodeRecord) -> str:
    """The version of what `set_cordon` changes."""
    return audit.version_of(_members_of_node(record))


def _members_of_tenant(record: TenantRecord) -> Members:
    return {**_told_of(record), "is_disabled": record.is_disabled}


def _members_of_node(node: "NodeRecord | Row[*tuple[Any, ...]]") -> Members:
    return {
        "region": node.region,
        "gpu_type": node.gpu_type,
        "gpus": node.gpus,
        "address": node.address,
        "is_cordoned": node.is_cordoned,
    }


async def set_cordon(
    engine: AsyncEngine, node_id: NodeId, *, is_cordoned: bool, by: Change = LOCAL
) -> bool:
    """Whether the node exists; it is (un)cordoned then. Raises PreconditionFailed."""
    async with transaction(engine) as connection:
        row = (
            await connection.execute(
                select(tables.nodes)
                .where(tables.nodes.c.id == node_id)
                .with_for_update(key_share=True)
            )
        ).one_or_none()
        if row is None:
            return False
        by.hold_to(f"node:{node_id}", _members_of_node(row))
        was = row.is_cordoned
        await connection.execute(
            update(tables.nodes).where(tables.nodes.c.id == node_id).values(is_cordoned=is_cordoned)
        )
        await raise_revision(connection)
        await audit.note(
            connection,
            by,
            "node.cordon" if is_cordoned else "node.uncordon",
            f"node:{node_id}",
            {"is_cordoned": was},
            {"is_cordoned": is_cordoned},
        )
        return True


async def upsert_engines(
    engine: AsyncEngine, node_id: NodeId, agent_epoch: int, facts: Sequence[EngineFacts]
) -> bool:
    """Write what an agent declared of its node, unless a later start of it has spoken already.

    False when the node is unknown or the epoch is old. Engines of undeclared models are left out,
    as nothing can be placed on them.
    """
    async with transaction(engine) as connection:
        taken = await connection.execute(
            update(tables.nodes)
            .where(tables.nodes.c.id == node_id, tables.nodes.c.agent_epoch <= agent_epoch)
            .values(agent_epoch=agent_epoch, last_seen_at=func.now())
        )
        if taken.rowcount == 0:
            return False
        known = set(
            await connection.scalars(
                select(tables.models.c.name).where(
                    tables.models.c.name.in_({entry.model for entry in facts})
                )
            )
        )
        kept = [entry for entry in facts if entry.model in known]
        await connection.execute(
            delete(tables.engines).where(
                tables.engines.c.node_id == node_id,
                tables.engines.c.id.not_in([entry.engine_id for entry in kept]),
            )
        )
        rows = [
            {
                "id": entry.engine_id,
                "node_id": node_id,
                "model": entry.model,
                "role": entry.role,
                "kind": entry.kind,
                "port": entry.port,
                "gpus": entry.gpus,
                "seats": entry.seats,
                "kv_tokens": entry.kv_tokens,
                "state": str(entry.state),
                "cordon": entry.cordon,
                "sleep_level": entry.sleep_level,
                "wake_ms": entry.wake_ms,
                "load_ms": entry.load_ms,
                "load_medium": entry.load_medium,
                "capabilities": entry.capabilities,
            }
            for entry in kept
        ]
        # An engine's id belongs to the node that declared it first: no agent takes over another's.
        await _upsert(connection, tables.engines, rows, owner="node_id", stamp="updated_at")
    return True


async def touch_nodes(engine: AsyncEngine, node_ids: Iterable[NodeId]) -> None:
    """Note that the agents of these nodes were heard just now."""
    ids = sorted(node_ids)
    if not ids:
        return
    async with transaction(engine) as connection:
        await connection.execute(
            update(tables.nodes).where(tables.nodes.c.id.in_(ids)).values(last_seen_at=func.now())
        )


async def raise_revision(connection: AsyncConnection) -> int:
    """Tell every replica to read again, once the transaction commits."""
    revision = await connection.scalar(
        update(tables.catalog_revision)
        .values(revision=tables.catalog_revision.c.revision + 1)
        .returning(tables.catalog_revision.c.revision)
    )
    return int(revision or 0)


async def _apply(connection: AsyncConnection, cluster: ClusterDocument) -> None:
    # In order of reference, and each kind by id, so that two documents at once never wait in a
    # ring.
    await _upsert(connection, tables.regions, [{"name": name} for name in sorted(cluster.regions)])
    for table, entries in (
        (tables.gpu_types, sorted(cluster.gpu_types, key=lambda entry: entry.name)),
        (tables.models, sorted(cluster.models, key=lambda entry: entry.name)),
        (tables.adapters, sorted(cluster.adapters, key=lambda entry: entry.name)),
        (tables.slo_classes, sorted(cluster.slo_classes, key=lambda entry: entry.name)),
    ):
        await _upsert(connection, table, [entry.model_dump() for entry in entries])
    await _refuse_shared_names(connection)
    nodes = sorted(cluster.nodes, key=lambda entry: entry.id)
    await _upsert(
        connection, tables.nodes, [entry.model_dump(exclude={"engines"}) for entry in nodes]
    )
    await _upsert(
        connection,
        tables.engine_specs,
        [
            {"engine_id": engine.engine_id, "node_id": node.id, "body": engine.model_dump()}
            for node, engine in sorted(
                ((node, engine) for node in nodes for engine in node.engines),
                key=lambda pair: pair[1].engine_id,
            )
        ],
    )
    for tenant in sorted(cluster.tenants, key=lambda entry: entry.id):
        budget_id = tenant_budget_id(TenantId(tenant.id))
        limit = round(tenant.budget_usd * MICRO_USD_PER_USD)
        budget = insert(tables.budgets).values(id=budget_id, limit=limit)
        await connection.execute(
            budget.on_conflict_do_update(
                index_elements=["id"],
                set_={
                    "limit": func.greatest(
                        budget.excluded.limit,
                        tables.budgets.c.spent + tables.budgets.c.reserved,
                    )
                },
            )
        )
        declared = insert(tables.tenants).values(
            id=tenant.id,
            name=tenant.name,
            tenant_class=tenant.tenant_class,
            slo_class=tenant.slo_class,
            budget_id=budget_id,
            cache_salt=_new_salt(),
        )
        # The salt stays: engines hold caches under it.
        await connection.execute(
            declared.on_conflict_do_update(
                index_elements=["id"],
                set_={
                    name: declared.excluded[name] for name in ("name", "tenant_class", "slo_class")
                },
            )
        )


async def _refuse_shared_names(connection: AsyncConnection) -> None:
    shared = await connection.scalar(
        select(tables.adapters.c.name)
        .where(tables.adapters.c.name.in_(select(tables.models.c.name)))
        .limit(1)
    )
    if shared is not None:
        raise ConfigurationError(
            f"nothing was changed: `{shared}` is a model and can not be an adapter too"
        )


def _told_of(record: TenantRecord) -> Members:
    return {
        "name": record.name,
        "tenant_class": record.tenant_class,
        "slo_class": record.slo_class,
        "budget_micro_usd": record.limit_micro_usd,
    }


async def _declared(connection: AsyncConnection, cluster: ClusterDocument) -> dict[str, Members]:
    """What stands of the entries that the document names, by kind and name. No salts, no live state."""
    found: dict[str, Members] = {}
    for kind, table, names, left_out in (
        ("regions", tables.regions, cluster.regions, {"created_at"}),
        ("gpu_types", tables.gpu_types, [entry.name for entry in cluster.gpu_types], set()),
        ("models", tables.models, [entry.name for entry in cluster.models], set()),
        ("adapters", tables.adapters, [entry.name for entry in cluster.adapters], set()),
        ("slo_classes", tables.slo_classes, [entry.name for entry in cluster.slo_classes], set()),
        (
            "nodes",
            tables.nodes,
            [entry.id for entry in cluster.nodes],
            {"is_cordoned", "agent_epoch", "last_seen_at", "created_at"},
        ),
    ):
        key = next(iter(table.primary_key.columns))
        columns = [column for column in table.columns if column.name not in left_out]
        rows = await connection.execute(select(*columns).where(key.in_(names)))
        found[kind] = {row[0]: _members(row) for row in rows}
    ids = [entry.id for entry in cluster.tenants]
    rows = await connection.execute(
        select(*_tenant_columns)
        .join_from(tables.tenants, tables.budgets)
        .where(tables.tenants.c.id.in_(ids))
    )
    found["tenants"] = {row.id: _told_of(TenantRecord(**_members(row))) for row in rows}
    return found


def _differences(
    before: dict[str, Members], after: dict[str, Members]
) -> tuple[Members | None, Members | None]:
    """What differs, around the change: whole entries where one was added, else the members that moved."""
    told_before: Members = {}
    told_after: Members = {}
    for kind, entries in after.items():
        changed = sorted(name for name in entries if entries[name] != before[kind].get(name))
        for name in changed[:APPLIED_TOLD_MAX]:
            old, new = before[kind].get(name), entries[name]
            moved = [member for member in new if old is None or old[member] != new[member]]
            told_after.setdefault(kind, {})[name] = {member: new[member] for member in moved}
            if old is not None:
                told_before.setdefault(kind, {})[name] = {member: old[member] for member in moved}
        if len(changed) > APPLIED_TOLD_MAX:
            told_after[kind]["(more)"] = len(changed) - APPLIED_TOLD_MAX
    return told_before or None, told_after or None


async def _upsert(
    connection: AsyncConnection,
    table: Table,
    rows: list[dict[str, Any]],
    *,
    owner: str | None = None,
    stamp: str | None = None,
) -> None:
    """Insert or overwrite by primary key; with `owner`, only rows whose owner is the same."""
    if not rows:
        return
    key = [column.name for column in table.primary_key.columns]
    statement = insert(table).values({name: bindparam(name) for name in rows[0]})
    changes: dict[str, Any] = {
        name: statement.excluded[name] for name in rows[0] if name not in key
    }
    if stamp is not None:
        changes[stamp] = func.now()
    if not changes:
        await connection.execute(statement.on_conflict_do_nothing(), rows)
        return
    condition = None if owner is None else table.c[owner] == statement.excluded[owner]
    await connection.execute(
        statement.on_conflict_do_update(index_elements=key, set_=changes, where=condition), rows
    )


def _refuse(error: IntegrityError) -> NoReturn:
    """Words for a document that does not fit what is declared. PostgreSQL names the key."""
    diagnosis = getattr(error.orig, "diag", None)
    detail = getattr(diagnosis, "message_detail", None) or "a value breaks a rule of its table"
    raise ConfigurationError(
        f"nothing was changed: {detail.rstrip('.')}; declare it first"
    ) from error


def _new_salt() -> str:
    return secrets.token_hex(CACHE_SALT_BYTES)


def _members(row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    return dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's documented way to a mapping
