"""Runs revisions on the connection that `controlplane.store.migrate` opened, or on `-x url=...`."""

from alembic import context
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from controlplane.domain.errors import ConfigurationError
from controlplane.store.migrate import LOCK_MS_MAX, STATEMENT_MS_MAX
from controlplane.store.session import connect_arguments, driver_url
from controlplane.store.tables import metadata

# Any constant will do: it names the one lock under which schemas change.
UPGRADE_LOCK = 0x4845_4144_5741_59


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": UPGRADE_LOCK})
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    url = context.get_x_argument(as_dictionary=True).get("url")
    if url is None:
        raise ConfigurationError("say which database: `alembic -x url=postgresql://… upgrade head`")
    limits = connect_arguments(statement_ms_max=STATEMENT_MS_MAX, lock_ms_max=LOCK_MS_MAX)
    engine = create_engine(driver_url(url), poolclass=NullPool, connect_args=limits)
    with engine.begin() as opened:
        run(opened)
