"""Connections to PostgreSQL with a limit on every wait, and one word for "it is away"."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, make_url
from sqlalchemy.exc import (
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    InternalError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from controlplane.domain.errors import StateUnavailable

POOL_CONNECTIONS = 5
POOL_CONNECTIONS_EXTRA = 5
POOL_WAIT_S_MAX = 1.0
CONNECT_S_MAX = 3
STATEMENT_MS_MAX = 5_000
LOCK_MS_MAX = 2_000
IDLE_IN_TRANSACTION_MS_MAX = 10_000
# A peer that is gone without a word is noticed after about 5 s.
KEEPALIVES_IDLE_S = 5
KEEPALIVES_INTERVAL_S = 2
KEEPALIVES_COUNT = 2
TCP_USER_TIMEOUT_MS = 5_000


def driver_url(url: str) -> URL:
    """`url` in any of PostgreSQL's spellings, for the driver psycopg."""
    parsed = make_url(url)
    if parsed.drivername in {"postgres", "postgresql"}:
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def libpq_url(url: str) -> str:
    """The same for libpq, which knows nothing of drivers."""
    return driver_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def connect_arguments(
    *, statement_ms_max: int = STATEMENT_MS_MAX, lock_ms_max: int = LOCK_MS_MAX
) -> dict[str, Any]:
    """Arguments of libpq that bound every wait on a connection."""
    return {
        "connect_timeout": CONNECT_S_MAX,
        "keepalives": 1,
        "keepalives_idle": KEEPALIVES_IDLE_S,
        "keepalives_interval": KEEPALIVES_INTERVAL_S,
        "keepalives_count": KEEPALIVES_COUNT,
        "tcp_user_timeout": TCP_USER_TIMEOUT_MS,
        "target_session_attrs": "read-write",
        "application_name": "headway",
        "options": (
            f"-c statement_timeout={statement_ms_max} -c lock_timeout={lock_ms_max}"
            f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_MS_MAX}"
            " -c timezone=UTC"
        ),
    }


def make_engine(url: str) -> AsyncEngine:
    return create_async_engine(
        driver_url(url),
        pool_size=POOL_CONNECTIONS,
        max_overflow=POOL_CONNECTIONS_EXTRA,
        pool_timeout=POOL_WAIT_S_MAX,
        pool_pre_ping=True,
        connect_args=connect_arguments(),
        # Errors are written down; what a statement was given is nobody's business.
        hide_parameters=True,
    )


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction, committed at the end.

    Raises StateUnavailable when PostgreSQL is away or too slow.
    """
    try:
        async with engine.begin() as connection:
            yield connection
    except (
        OperationalError,
        InterfaceError,
        InternalError,
        DisconnectionError,
        PoolTimeoutError,
        OSError,
    ) as error:
        raise StateUnavailable(_summary(error)) from error


def _summary(error: Exception) -> str:
    """One line without the statement and its parameters, which SQLAlchemy's own text contains."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    lines = str(cause).strip().splitlines()
    return f"PostgreSQL is not available: {lines[0] if lines else type(cause).__name__}"
