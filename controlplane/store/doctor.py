"""What can be wrong with PostgreSQL and with what is declared in it, asked in one look."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store.session import (
    POOL_CONNECTIONS,
    POOL_CONNECTIONS_EXTRA,
    transaction,
)

# A replica's pool, its journal, and the look at the schema that its readiness takes.
CONNECTIONS_PER_REPLICA: Final = POOL_CONNECTIONS + POOL_CONNECTIONS_EXTRA + 2
NAMES_TOLD_MAX: Final = 20
# A replica's latest decision tells by which policies it rules, when it is this young.
RULED_S_MAX: Final = 60

_SETTINGS: Final = (
    "max_connections",
    "superuser_reserved_connections",
    "synchronous_commit",
    "fsync",
    "full_page_writes",
    "default_transaction_isolation",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """By which revision of the policies a live replica decided last."""

    replica_id: str
    policy_revision: str
    decided_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """`at` is the database's clock. `ruled` are the latest decisions of live replicas that are young enough."""

    at: datetime
    version: int
    settings: dict[str, str]
    connections: int
    replicas_live: int
    tenants_without_keys: tuple[str, ...]
    tenant_classes: dict[str, int]
    operators: int
    ruled: tuple[Ruled, ...]


async def examine(engine: AsyncEngine, *, replica_ttl_s: float) -> DatabaseFacts:
    """Raises StateUnavailable."""
    values = {
        "ttl_s": replica_ttl_s,
        "ruled_s": RULED_S_MAX,
        "most": NAMES_TOLD_MAX,
        "settings": list(_SETTINGS),
    }
    async with transaction(engine) as connection:
        settings = await connection.execute(
            text("SELECT name, setting FROM pg_settings WHERE name = ANY(:settings)"), values
        )
        keyless = await connection.scalars(
            text(
                """
                SELECT id FROM tenants
                WHERE NOT is_disabled AND NOT EXISTS (
                    SELECT FROM api_keys WHERE tenant_id = tenants.id AND revoked_at IS NULL)
                ORDER BY id LIMIT :most
                """
            ),
            values,
        )
        classes = await connection.execute(
            text(
                "SELECT tenant_class, count(*) AS tenants FROM tenants WHERE NOT is_disabled"
                " GROUP BY tenant_class ORDER BY tenant_class"
            )
        )
        ruled = await connection.execute(
            text(
                """
                SELECT DISTINCT ON (replica_id) replica_id, policy_revision, decided_at
                FROM decisions JOIN replicas ON replicas.id = replica_id
                WHERE decided_at > clock_timestamp() - make_interval(secs => :ruled_s)
                      AND ended_at IS NULL
                ORDER BY replica_id, decided_at DESC
                """
            ),
            values,
        )
        row = (
            await connection.execute(
                text(
                    """
                    SELECT clock_timestamp() AS at,
                           current_setting('server_version_num')::int / 10000 AS version,
                           (SELECT count(*) FROM pg_stat_activity
                            WHERE datname IS NOT NULL) AS connections,
                           (SELECT count(*) FROM replicas
                            WHERE ended_at IS NULL AND last_seen_at
                                  > clock_timestamp() - make_interval(secs => :ttl_s))
                               AS replicas_live,
                           (SELECT count(*) FROM api_keys
                            WHERE operator_role = 'admin' AND revoked_at IS NULL) AS operators
                    """
                ),
                values,
            )
        ).one()
        return DatabaseFacts(
            at=row.at,
            version=row.version,
            settings={one.name: one.setting for one in settings},
            connections=row.connections,
            replicas_live=row.replicas_live,
            tenants_without_keys=tuple(keyless),
            tenant_classes={one.tenant_class: one.tenants for one in classes},
            operators=row.operators,
            ruled=tuple(Ruled(**one._mapping) for one in ruled),  # noqa: SLF001
        )
