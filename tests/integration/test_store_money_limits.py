"""Windows of budgets, budgets of keys and in tokens, limits of keys: as stored, and as a principal has them."""

import asyncio

import psycopg
import pytest
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.admission.budget import Unit, Window
from controlplane.domain.catalog import Limits, OperatorRole, Scope
from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import KeyId, SloClassName
from controlplane.store import budget_limits, budgets, catalog, keys, records, workflows
from controlplane.store.journal import Charge, Journal
from controlplane.store.paging import BadCursor
from tests.integration.store_world import ACME, R1, R2, Rows

PEPPER = b"a pepper for tests, long enough"


async def write(url: str, *rows: object) -> None:
    journal = Journal(url)
    await journal._write(rows)  # type: ignore[arg-type]
    assert (journal.entries_dropped, journal.charges_dropped) == (0, 0)
    await journal._disconnect()


def age(url: str, budget_id: str, interval: str) -> None:
    """As if the window had begun that much earlier."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "UPDATE budgets SET window_started_at = window_started_at - %s::interval WHERE id = %s",
            (interval, budget_id),
        )


async def view(engine: AsyncEngine, budget_id: str) -> tuple[int, int, int]:
    found = await budget_limits.get_budget(engine, budget_id)
    assert found is not None
    return found[0].limit, found[0].spent, found[0].reserved


async def past(engine: AsyncEngine, budget_id: str) -> list[int]:
    found = await budget_limits.get_budget(engine, budget_id)
    assert found is not None
    return [window.spent for window in found[1]]


# ---------------------------------------------------------------- windows


async def test_a_window_that_is_over_ends_with_the_first_lease(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    account = "tenant:acme"
    await budget_limits.set_budget(engine, account, limit=100, window=Window.DAY)
    assert await budgets.lease(engine, account, R1, 60, 60) == 60
    await write(clean_database_url, Rows("q").opened(), Rows("q").settled(40))
    assert await view(engine, account) == (100, 40, 20)
    assert await budgets.lease(engine, account, R2, 60, 60) == 0, "today's money is spent"

    age(clean_database_url, account, "1 day")
    assert await view(engine, account) == (100, 0, 20), "shown as it stands, whoever comes by"
    assert await budgets.lease(engine, account, R2, 80, 80) == 80
    assert await view(engine, account) == (100, 0, 100)
    assert await past(engine, account) == [40]
    assert await budgets.lease(engine, account, R2, 1, 1) == 0
    assert await past(engine, account) == [40]
    assert (await records.invariants(engine))["I2"]


async def test_windows_end_once_whoever_comes_by(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    account = "tenant:acme"
    await budget_limits.set_budget(engine, account, limit=100, window=Window.HOUR)
    await budgets.lease(engine, account, R1, 40, 40)
    await write(clean_database_url, Rows("q").opened(), Rows("q").settled(40))
    age(clean_database_url, account, "3 hours")
    results = await asyncio.gather(
        *(budgets.roll_over(engine) for _ in range(4)),
        *(budgets.lease(engine, account, R1, 1, 1) for _ in range(4)),
    )
    assert sum(results[:4]) <= 1
    assert results[4:] == [1] * 4
    assert await past(engine, account) == [40]
    assert await view(engine, account) == (100, 0, 4)
    assert await budgets.roll_over(engine) == 0
    assert await records.invariants(engine) == {"I1": True, "I2": True}


@pytest.mark.parametrize("window", [window for window in Window if window is not Window.TOTAL])
async def test_a_window_begins_with_its_calendar_unit(engine: AsyncEngine, window: Window) -> None:
    shown = await budget_limits.set_budget(engine, "tenant:acme", limit=100, window=window)
    began, ends = shown.window_started_at, shown.window_ends_at
    assert ends is not None
    assert began.tzinfo is not None
    assert began.utcoffset() == ends.utcoffset()
    assert (began.minute, began.second, began.microsecond) == (0, 0, 0)
    length_h = (ends - began).total_seconds() / 3600
    match window:
        case Window.HOUR:
            assert length_h == 1
        case Window.DAY:
            assert (began.hour, length_h) == (0, 24)
        case Window.WEEK:
            assert (began.weekday(), began.hour, length_h) == (0, 0, 168)
        case Window.MONTH:
            assert (began.day, ends.day, began.hour) == (1, 1, 0)
            assert 672 <= length_h <= 744


async def test_a_change_of_the_window_begins_anew(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    account = "tenant:acme"
    await budgets.lease(engine, account, R1, 40, 40)
    await write(clean_database_url, Rows("q").opened(), Rows("q").settled(30))
    await budget_limits.set_budget(engine, account, limit=50, window=Window.DAY)
    assert await view(engine, account) == (50, 0, 10)
    # Back and forth on one day: the same window twice adds up.
    for window in (Window.WEEK, Window.DAY, Window.TOTAL):
        await budgets.lease(engine, account, R1, 5, 5)
        await budget_limits.set_budget(engine, account, limit=50, window=window)
    assert await past(engine, account) == [30]
    await budget_limits.set_budget(engine, account, limit=5)
    assert await view(engine, account) == (25, 0, 25), "never below what is taken"
    assert (await records.invariants(engine))["I2"]


async def test_a_limit_for_ever_never_ends(engine: AsyncEngine, clean_database_url: str) -> None:
    await budgets.lease(engine, "tenant:acme", R1, 40, 40)
    await write(clean_database_url, Rows("q").opened(), Rows("q").settled(40))
    age(clean_database_url, "tenant:acme", "5 years")
    assert await budgets.roll_over(engine) == 0
    assert (await view(engine, "tenant:acme"))[1] == 40


# ---------------------------------------------------------------- accounts of all kinds


async def test_a_call_is_charged_in_every_account_in_its_unit(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    made = await workflows.create(
        engine,
        tenant=ACME,
        kind="k",
        scope=Scope.CHAT,
        steps_expected=2,
        slo_class=SloClassName("interactive"),
        deadline_ms=60_000,
        budget_micro_usd=1_000,
        budget_tokens=9_000,
    )
    key, _ = await keys.create_tenant_key(engine, PEPPER, ACME, "k")
    own = budgets.key_budget_id(key)
    in_tokens = budgets.tenant_budget_id(ACME, Unit.TOKENS)
    await budget_limits.set_budget(engine, own, limit=500)
    await budget_limits.set_budget(engine, in_tokens, limit=5_000, window=Window.DAY)
    assert made.budget_id is not None
    assert made.token_budget_id == f"workflow:{made.id}:tokens"
    charges = (
        Charge("tenant:acme", 70), Charge(own, 70), Charge(made.budget_id, 70),
        Charge(in_tokens, 1_050), Charge(made.token_budget_id, 1_050), Charge("tenant:nobody", 0),
    )  # fmt: skip
    for charge in charges[:4]:
        assert await budgets.lease(engine, charge.budget_id, R1, 100, 100)
    rows = Rows("q", workflow=made.id)
    settled = rows.settled(70)._replace(charges=charges)
    # Twice in one batch, and the batch twice: once is what counts.
    for _ in range(2):
        await write(clean_database_url, rows.opened(), settled, settled)
    assert await view(engine, "tenant:acme") == (1_000_000, 70, 30)
    assert await view(engine, own) == (500, 70, 30)
    assert await view(engine, in_tokens) == (5_000, 1_050, 0)
    assert await view(engine, made.token_budget_id) == (9_000, 1_050, 0)
    with psycopg.connect(clean_database_url) as connection:
        found = connection.execute("SELECT amount_micro_usd, charges FROM ledger").fetchall()
    assert found == [(70, {charge.budget_id: charge.amount for charge in charges if charge.amount})]
    assert await records.invariants(engine) == {"I1": True, "I2": True}

    with psycopg.connect(clean_database_url) as connection:
        connection.execute("UPDATE budgets SET spent = spent - 1 WHERE id = %s", (in_tokens,))
    assert await records.invariants(engine) == {"I1": True, "I2": False}


async def test_a_principal_comes_with_its_accounts_and_limits(engine: AsyncEngine) -> None:
    limits = Limits(requests_per_minute=60, calls_in_flight_max=4)
    key, plain = await keys.create_tenant_key(engine, PEPPER, ACME, "k", limits)
    other, other_plain = await keys.create_tenant_key(engine, PEPPER, ACME, "other")
    digest = keys.digest(PEPPER, plain)
    bare = await keys.find_principal(engine, digest)
    assert bare is not None
    assert (bare.key_limits, bare.key_budgets, bare.tenant.token_budget) == (limits, (), None)

    for name in ("tenant:acme:tokens", f"key:{key}", f"key:{key}:tokens"):
        before = await catalog.catalog_revision(engine)
        await budget_limits.set_budget(engine, name, limit=10)
        assert await catalog.catalog_revision(engine) == before + 1, "replicas hear of it"
    found = await keys.find_principal(engine, digest)
    assert found is not None
    assert found.key_budgets == (f"key:{key}", f"key:{key}:tokens")
    assert found.tenant.token_budget == "tenant:acme:tokens"
    assert [budgets.unit_of(name) for name in found.key_budgets] == [Unit.MICRO_USD, Unit.TOKENS]
    of_other = await keys.find_principal(engine, keys.digest(PEPPER, other_plain))
    assert of_other is not None
    assert (of_other.key_id, of_other.key_budgets) == (other, ())
    assert of_other.tenant.token_budget == "tenant:acme:tokens"

    assert await budget_limits.remove_budget(engine, f"key:{key}")
    assert not await budget_limits.remove_budget(engine, f"key:{key}")
    found = await keys.find_principal(engine, digest)
    assert found is not None
    assert found.key_budgets == (f"key:{key}:tokens",)


async def test_limits_of_keys_are_replaced_and_lifted(engine: AsyncEngine) -> None:
    key, _ = await keys.create_tenant_key(engine, PEPPER, ACME, "k")
    limits = Limits(tokens_per_minute=9_000)
    changed = await keys.set_limits(engine, key, limits)
    assert changed is not None
    assert changed.limits == limits
    assert await keys.get_key(engine, key) == changed
    lifted = await keys.set_limits(engine, key, Limits())
    assert lifted is not None
    assert lifted.limits == Limits()
    with pytest.raises(IntegrityError):
        await keys.set_limits(engine, key, Limits(requests_per_minute=0))
    operators, _ = await keys.create_operator_key(engine, PEPPER, OperatorRole.VIEWER, "v")
    assert await keys.set_limits(engine, operators, limits) is None
    assert await keys.set_limits(engine, KeyId("nobody"), limits) is None


@pytest.mark.parametrize(
    "budget_id",
    ["tenant:nobody", "key:nobody", "workflow:nobody", "nobody", "", "planet:acme", "tenant:",
     "tenant:acme:tokens:tokens"],
)  # fmt: skip
async def test_an_account_has_an_owner(engine: AsyncEngine, budget_id: str) -> None:
    with pytest.raises(ConfigurationError, match="no owner"):
        await budget_limits.set_budget(engine, budget_id, limit=1)
    assert await budget_limits.get_budget(engine, budget_id) is None


async def test_what_an_owner_needs_is_not_removed(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigurationError, match="higher limit"):
        await budget_limits.remove_budget(engine, "tenant:acme")


async def test_budgets_are_listed_by_id(engine: AsyncEngine) -> None:
    key, _ = await keys.create_tenant_key(engine, PEPPER, ACME, "k")
    await budget_limits.set_budget(engine, f"key:{key}", limit=1)
    await budget_limits.set_budget(engine, "tenant:acme:tokens", limit=1)
    seen, cursor = [], None
    while True:
        page = await budget_limits.list_budgets(engine, limit=2, cursor=cursor)
        seen += [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [f"key:{key}", "tenant:acme", "tenant:acme:tokens", "tenant:bolt"]
    of_keys = await budget_limits.list_budgets(engine, kind="key")
    assert [item.id for item in of_keys.items] == [f"key:{key}"]
    with pytest.raises(BadCursor):
        await budget_limits.list_budgets(engine, cursor="\x00")
