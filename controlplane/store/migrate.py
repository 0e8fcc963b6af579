"""Brings a database to the schema of this program. Blocking: call it from a thread, or before the
loop runs.
"""

import importlib.util
import re
import threading
from enum import StrEnum
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

from controlplane.domain.errors import ConfigurationError, StateUnavailable
from controlplane.store.session import connect_arguments, driver_url

# A migration waits briefly for locks, so that it never queues live traffic behind itself for long.
LOCK_MS_MAX = 4_000
STATEMENT_MS_MAX = 60_000

# Revisions are numbered; a database may be ahead of this program, whose names this program then can not know.
_NUMBERED = re.compile(r"[0-9]{4}")

# Alembic keeps the migration under way in globals of its modules.
_one_at_a_time = threading.Lock()


class Standing(StrEnum):
    """A database's schema as seen from this program. Migrations only add, so NEWER serves as CURRENT does."""

    EMPTY = "empty"
    OLDER = "older"
    CURRENT = "current"
    NEWER = "newer"
    FOREIGN = "foreign"

    @property
    def is_usable(self) -> bool:
        return self in {Standing.CURRENT, Standing.NEWER}


def upgrade(url: str) -> str:
    """Apply what is missing and return the revision. Safe to call from several processes at once.

    A schema that is newer than this program stays as it is.

    Raises StateUnavailable when PostgreSQL can not be reached, a lock can not be had in time, or
    a statement fails for a reason that may pass.
    """
    engine = _engine(url)
    try:
        with _one_at_a_time, engine.begin() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
            if found is not None and standing_of(found) is Standing.NEWER:
                return found
            command.upgrade(configuration(connection), "head")
        return _head()
    except (OperationalError, InterfaceError) as error:
        raise StateUnavailable(f"the schema could not be upgraded: {error.orig}") from error
    finally:
        engine.dispose()


def current(url: str) -> str | None:
    """The revision of the database; None when it is empty."""
    engine = _engine(url)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except (OperationalError, InterfaceError) as error:
        raise StateUnavailable(f"PostgreSQL is not available: {error.orig}") from error
    finally:
        engine.dispose()


def standing(url: str) -> Standing:
    """How the database's schema stands to this program. Raises StateUnavailable."""
    return standing_of(current(url))


def standing_of(revision: str | None) -> Standing:
    """How a schema at `revision` stands to this program; None: there is no schema."""
    if revision is None:
        return Standing.EMPTY
    known = {script.revision for script in _directory().walk_revisions()}
    head = _head()
    if revision == head:
        return Standing.CURRENT
    if revision in known:
        return Standing.OLDER
    is_ahead = _NUMBERED.fullmatch(revision) is not None and revision > head
    return Standing.NEWER if is_ahead else Standing.FOREIGN


def configuration(connection: Connection) -> Config:
    """Alembic's configuration for an open connection, independent of the working directory."""
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _scripts() -> Path:
    spec = importlib.util.find_spec("migrations")
    if spec is None or spec.origin is None:
        raise ConfigurationError("the package `migrations` is missing: install headway completely")
    return Path(spec.origin).parent


def _directory() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    return ScriptDirectory.from_config(config)


def _head() -> str:
    head = _directory().get_current_head()
    assert head is not None
    return head


def _engine(url: str) -> Engine:
    return create_engine(
        driver_url(url),
        poolclass=NullPool,
        connect_args=connect_arguments(statement_ms_max=STATEMENT_MS_MAX, lock_ms_max=LOCK_MS_MAX),
    )
