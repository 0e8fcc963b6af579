"""A populated database and an engine on it, for the tests of the store."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store.session import make_engine
from tests.integration.store_world import populate


@pytest.fixture
async def engine(clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(clean_database_url)
    await populate(engine)
    yield engine
    await engine.dispose()
