"""Many calls at once against a budget that pays for few: nobody overspends, and the SDK is not made to retry."""

import asyncio

import pytest
from openai import RateLimitError

from cli.processes import LocalCluster
from controlplane.store import budgets
from controlplane.store.session import make_engine

from .conftest import check_invariants, client_of

pytestmark = [pytest.mark.fault, pytest.mark.anyio, pytest.mark.timeout(120)]

CALLS = 64
# 1,600 completion tokens at 600,000 micro-dollars a million cost 960, and the prompt a little; the
# tenant has 10,000. The reserve is a little above the cost.
COMPLETION_TOKENS = 1600


async def test_sixty_four_calls_against_a_budget_for_ten(cluster: LocalCluster) -> None:
    answers = 0
    refusals: list[RateLimitError] = []

    async def call(number: int) -> None:
        nonlocal answers
        try:
            await client.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": f"number {number}"}],
                max_tokens=COMPLETION_TOKENS,
                extra_body={"ignore_eos": True},
            )
            answers += 1
        except RateLimitError as error:
            refusals.append(error)

    highest = 0
    # The SDK's own default of two retries.
    client = client_of(cluster, "brook", retries=2)
    engine = make_engine(cluster.database_url)
    try:
        racing = asyncio.gather(*(call(number) for number in range(CALLS)))
        while not racing.done():
            account = await budgets.read(engine, "tenant:brook")
            assert account is not None
            total = account.spent + account.reserved
            assert total <= account.limit
            highest = max(highest, total)
            await asyncio.sleep(0.02)
        await racing
        await check_invariants(cluster)
        account = await budgets.read(engine, "tenant:brook")
        assert account is not None
    finally:
        await engine.dispose()
        await client.close()
    assert 1 <= answers <= 10
    assert answers + len(refusals) == CALLS
    assert highest > 0
    each = account.spent / answers
    assert account.spent <= account.limit
    assert each >= COMPLETION_TOKENS * 0.6
    # A call that was held up by load first can come back to a budget that is spent by then.
    by_budget = [refusal for refusal in refusals if refusal.code == "insufficient_quota"]
    assert {refusal.code for refusal in refusals} <= {"insufficient_quota", "shed_overload"}
    assert len(by_budget) >= CALLS // 2
    for refusal in by_budget:
        assert refusal.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in refusal.response.headers
