"""The migrations build exactly what the tables declare, once, whoever else is migrating too."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import psycopg
import pytest
from alembic import command
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from controlplane.store import migrate
from controlplane.store.migrate import Standing
from controlplane.store.session import driver_url
from controlplane.store.tables import metadata

SHAPE = """
SELECT 'column', table_name, column_name,
       concat_ws(' ', data_type, character_maximum_length, is_nullable, column_default)
FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = 'public'::regnamespace
     AND conrelid <> 'alembic_version'::regclass
UNION ALL
SELECT 'index', tablename, indexname, indexdef
FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version'
ORDER BY 1, 2, 3, 4
"""


def shape(url: str) -> list[tuple[str, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(SHAPE).fetchall()


def test_upgrade_from_empty_builds_what_the_tables_declare(empty_database_url: str) -> None:
    assert migrate.current(empty_database_url) is None
    assert migrate.standing(empty_database_url) is Standing.EMPTY
    migrate.upgrade(empty_database_url)
    assert migrate.standing(empty_database_url) is Standing.CURRENT
    migrated = shape(empty_database_url)

    engine = create_engine(driver_url(empty_database_url), poolclass=NullPool)
    with engine.begin() as connection:
        metadata.drop_all(connection)
        metadata.create_all(connection)
    assert migrated == shape(empty_database_url)


def test_alembic_check_finds_no_difference(clean_database_url: str) -> None:
    engine = create_engine(driver_url(clean_database_url), poolclass=NullPool)
    with engine.begin() as connection:
        command.check(migrate.configuration(connection))


def test_a_newer_schema_serves_an_older_one_and_a_strange_one_do_not(
    clean_database_url: str,
) -> None:
    head = migrate.upgrade(clean_database_url)
    for revision, expected in (
        (head, Standing.CURRENT),
        (f"{int(head) + 1:04}", Standing.NEWER),
        (f"{int(head) - 1:04}", Standing.OLDER),
        ("0001", Standing.OLDER),
        ("0000", Standing.FOREIGN),
        ("fe2c1a90b7d4", Standing.FOREIGN),
    ):
        with psycopg.connect(clean_database_url) as connection:
            connection.execute("UPDATE alembic_version SET version_num = %s", (revision,))
        assert migrate.standing(clean_database_url) is expected, revision
        assert expected.is_usable == (expected in {Standing.CURRENT, Standing.NEWER})
        if expected.is_usable:
            assert migrate.upgrade(clean_database_url) == revision, "and it is left as it is"


def test_three_upgrades_at_once_apply_each_revision_once(empty_database_url: str) -> None:
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=spawned) as pool:
        revisions = set(pool.map(migrate.upgrade, [empty_database_url] * 3))
    assert len(revisions) == 1
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute("SELECT count(*) FROM leader").fetchone() == (1,)
        assert connection.execute("SELECT revision FROM catalog_revision").fetchone() == (1,)


def test_downgrade_leaves_nothing_behind(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    engine = create_engine(driver_url(empty_database_url), poolclass=NullPool)
    with engine.begin() as connection:
        command.downgrade(migrate.configuration(connection), "base")
    with psycopg.connect(empty_database_url) as connection:
        assert (
            connection.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
                " AND relname NOT LIKE 'alembic_version%'"
            ).fetchall()
            == []
        )
        assert (
            connection.execute(
                "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
            ).fetchall()
            == []
        )


@pytest.mark.parametrize(
    "statement",
    ["UPDATE ledger SET amount_micro_usd = 0", "DELETE FROM ledger", "TRUNCATE ledger CASCADE"],
)
def test_the_ledger_refuses_changes(clean_database_url: str, statement: str) -> None:
    with psycopg.connect(clean_database_url) as connection:
        connection.execute(
            """
            INSERT INTO slo_classes VALUES ('s', 1, 1, 1, 0, 0);
            INSERT INTO budgets (id, "limit") VALUES ('tenant:t', 10);
            INSERT INTO tenants (id, name, tenant_class, slo_class, budget_id, cache_salt)
                VALUES ('t', 'T', 'gold', 's', 'tenant:t', 'x');
            INSERT INTO replicas (id) VALUES ('r');
            INSERT INTO requests
                (id, tenant_id, key_id, replica_id, step, model, endpoint, is_stream, opened_at)
                VALUES ('q', 't', 'k', 'r', 0, 'm', 'chat', false, now());
            INSERT INTO ledger (request_id, tenant_id, amount_micro_usd) VALUES ('q', 't', 5);
            """
        )
        with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
            connection.execute(statement)
