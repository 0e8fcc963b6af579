"""`headway db admin-key`: the first key of a database that has none."""

import pytest
from typer.testing import CliRunner

from cli.main import app
from controlplane.domain.catalog import OperatorRole
from controlplane.store import audit, keys
from controlplane.store.session import make_engine

PEPPER = "a pepper of sixteen characters"


@pytest.mark.anyio
async def test_the_first_key_is_an_administrators_and_stands_in_the_audit_log(
    clean_database_url: str,
) -> None:
    import anyio.to_thread

    environment = {"DATABASE_URL": clean_database_url, "HEADWAY_PEPPER": PEPPER}
    words = ["db", "admin-key", "--name", "first"]
    done = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, words, env=environment))
    assert done.exit_code == 0, done.output
    # The key alone, for a script to take.
    [key] = done.stdout.splitlines()
    engine = make_engine(clean_database_url)
    try:
        found = await keys.find_operator(engine, keys.digest(PEPPER.encode(), key))
        assert found is not None
        key_id, role = found
        assert role is OperatorRole.ADMIN
        [entry] = (await audit.list_entries(engine)).items
        assert (entry.action, entry.subject) == ("key.create", f"key:{key_id}")
        assert key not in str(entry)
    finally:
        await engine.dispose()


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"HEADWAY_PEPPER": PEPPER}, 2),
        ({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}, 2),
        ({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "HEADWAY_PEPPER": "short"}, 2),
        ({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "HEADWAY_PEPPER": PEPPER}, 3),
    ],
)
def test_what_is_missing_is_said(
    environment: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATABASE_URL", "HEADWAY_PEPPER"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["db", "admin-key"], env=environment)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
