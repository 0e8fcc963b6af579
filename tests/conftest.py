"""Real servers for every test that asks: one PostgreSQL and one NATS per test process."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql
from sqlalchemy import make_url

from controlplane.embedded.nats import EmbeddedNats, NatsUser, agent_user, control_user
from controlplane.embedded.postgres import EmbeddedPostgres
from controlplane.store import migrate

settings.register_profile(
    "dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=1_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Nodes whose agents may speak on the test server's bus.
TEST_NODES = ("n1", "n2", "n3")

T = TypeVar("T")


class ServerLoop:
    """An event loop in a thread of its own, which lives as long as the servers started from it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def server_loop() -> Iterator[ServerLoop]:
    loop = ServerLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def server_folder() -> Iterator[Path]:
    """A folder that PostgreSQL's account can reach, unlike pytest's own temporary ones."""
    folder = Path(tempfile.mkdtemp(prefix="headway-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same for one test."""
    path = Path(tempfile.mkdtemp(prefix="headway-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(server_loop: ServerLoop, server_folder: Path) -> Iterator[EmbeddedPostgres]:
    # The machine is not expected to fail during the tests: no waiting for disks.
    server = EmbeddedPostgres(
        server_folder / "postgres",
        {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"},
    )
    server_loop.run(server.start())
    yield server
    server_loop.run(server.stop())


@pytest.fixture(scope="session")
def template_database(server_loop: ServerLoop, postgres: EmbeddedPostgres) -> str:
    """Name of a database with the schema and no rows, to be cloned."""
    url = server_loop.run(postgres.start())
    _execute(url, sql.SQL("CREATE DATABASE template"))
    migrate.upgrade(_with_database(url, "template"))
    return "template"


@pytest.fixture(scope="session")
def postgres_url(
    server_loop: ServerLoop, postgres: EmbeddedPostgres, template_database: str
) -> str:
    """A migrated database shared by the whole session: for tests that bring names of their own."""
    url = server_loop.run(postgres.start())
    _execute(
        url,
        sql.SQL("CREATE DATABASE shared TEMPLATE {}").format(sql.Identifier(template_database)),
    )
    return _with_database(url, "shared")


_clones = count(1)


@pytest.fixture
def clean_database_url(
    server_loop: ServerLoop, postgres: EmbeddedPostgres, template_database: str
) -> Iterator[str]:
    """A migrated database of the test's own."""
    with _cloned(server_loop.run(postgres.start()), template_database) as url:
        yield url


@pytest.fixture(scope="module")
def module_database_url(
    server_loop: ServerLoop, postgres: EmbeddedPostgres, template_database: str
) -> Iterator[str]:
    """The same for the tests of one module together."""
    with _cloned(server_loop.run(postgres.start()), template_database) as url:
        yield url


@contextmanager
def _cloned(url: str, template_database: str) -> Iterator[str]:
    name = f"clone_{next(_clones)}"
    _execute(
        url,
        sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
            sql.Identifier(name), sql.Identifier(template_database)
        ),
    )
    yield _with_database(url, name)
    _execute(url, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def empty_database_url(server_loop: ServerLoop, postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database without the schema."""
    url = server_loop.run(postgres.start())
    name = f"empty_{next(_clones)}"
    _execute(url, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield _with_database(url, name)
    _execute(url, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def nats_users(server_folder: Path) -> dict[str, NatsUser]:
    """Users of the test server by name: `control`, and the agents of TEST_NODES."""
    home = server_folder / "nats"
    users = [control_user(home), *(agent_user(home, node) for node in TEST_NODES)]
    return {user.name: user for user in users}


@pytest.fixture(scope="session")
def nats(
    server_loop: ServerLoop, server_folder: Path, nats_users: dict[str, NatsUser]
) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(server_folder / "nats", list(nats_users.values()))
    server_loop.run(server.start())
    yield server
    server_loop.run(server.stop())


@pytest.fixture(scope="session")
def nats_url(server_loop: ServerLoop, nats: EmbeddedNats) -> str:
    """URL without a user; see `nats_users` for who may connect, `nats_control_url` for the simple
    way.
    """
    return server_loop.run(nats.start())


@pytest.fixture(scope="session")
def nats_control_url(nats_url: str, nats_users: dict[str, NatsUser]) -> str:
    """URL with the control plane's user in it."""
    user = nats_users["control"]
    return nats_url.replace("nats://", f"nats://{user.name}:{user.password}@")


def _with_database(url: str, name: str) -> str:
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def _execute(url: str, statement: sql.SQL | sql.Composed) -> None:
    with psycopg.connect(_with_database(url, "postgres"), autocommit=True) as connection:
        connection.execute(statement)
