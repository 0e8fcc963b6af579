"""Replicas follow the rollout: hot reload, shadow, canary, taking back, and bundles that can not be used."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.bus import Bus
from controlplane.domain.catalog import Scope
from controlplane.domain.errors import ConfigurationError, StateUnavailable
from controlplane.domain.ids import ReplicaId, TenantId
from controlplane.embedded.nats import NatsUser
from controlplane.runtime.loops import every
from controlplane.runtime.policy_compile import PolicyCompiler, checker
from controlplane.runtime.policy_news import PolicyNews
from controlplane.runtime.policy_state import POLICY_INTERVAL_S, PolicyState, in_canary
from controlplane.store import audit, policies
from controlplane.store.policies import Check, Mode
from controlplane.store.session import make_engine, transaction
from controlplane.store.tables import policy_checks
from controlplane.telemetry.metrics import Metrics
from policies.documents import Phase
from policies.evaluate import NEUTRAL
from policies.rollout import Change
from tests.integration.policy_world import (
    DIVIDES,
    EVENINGS,
    IN_A_THREAD,
    LONG_ANSWERS,
    MODEL,
    Caller,
    facts,
    files,
    policy,
    tenant,
    without_rules,
)

PLAIN = without_rules()
STRICT = files(LONG_ANSWERS)
BROKEN = {**PLAIN, "made-up.yaml": "kind: rules\n"}


@pytest.fixture
async def engine(clean_database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(clean_database_url)
    yield engine
    await engine.dispose()


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms


async def started(
    engine: AsyncEngine,
    given: dict[str, str] = PLAIN,
    name: str = "r1",
    clock: Clock | None = None,
    compiler: PolicyCompiler | None = None,
) -> PolicyState:
    return await PolicyState.start(
        engine, given, where="folder", replica_id=ReplicaId(name), metrics=Metrics(),
        compiler=compiler or PolicyCompiler(IN_A_THREAD), clock_ms=clock or Clock(),
    )  # fmt: skip


async def put(engine: AsyncEngine, given: dict[str, str], mode: Mode = Mode.SHADOW) -> str:
    """Apply a bundle that somebody has checked."""
    digest = policy(given).revision
    await policies.apply(engine, digest, given, author="key:k", reason="test", mode=mode)
    return digest


async def put_unchecked(engine: AsyncEngine, mode: Mode) -> None:
    """A bundle that no version of this program would have let in."""
    await policies.apply(engine, "f" * 64, BROKEN, author="key:k", reason="test", mode=mode)


async def test_the_first_replica_brings_its_folder_and_the_second_follows(
    engine: AsyncEngine,
) -> None:
    first = await started(engine, STRICT)
    second = await started(engine, PLAIN, "r2")
    assert first.policy.revision == second.policy.revision == policy(STRICT).revision
    assert first.is_loaded
    assert second.is_loaded
    assert not Caller(second, tenant("a")).call(request__max_tokens=1001)
    stored = await policies.get_revision(engine, first.policy.revision)
    assert stored is not None
    assert stored.files == STRICT
    assert stored.author == "replica:r1"


async def test_news_of_a_change_reach_every_replica_at_once(
    engine: AsyncEngine, nats_url: str, nats_users: dict[str, NatsUser]
) -> None:
    user = nats_users["control"]
    buses = [
        Bus(nats_url, user=user.name, password=user.password, name=f"control-{name}")
        for name in ("r1", "r2")
    ]
    states = [await started(engine, name=name) for name in ("r1", "r2")]
    news = [PolicyNews(state, bus) for state, bus in zip(states, buses, strict=True)]
    for bus, heard in zip(buses, news, strict=True):
        await bus.connect()
        await heard.join()
    # Nobody looks by itself: that it is time to does not come within this test.
    loops = [
        asyncio.create_task(every(3_600.0, "policies", state.refresh, woken=state.woken))
        for state in states
    ]
    try:
        for given, change in ((STRICT, policy(STRICT)), (PLAIN, None)):
            revision = await put(engine, given, Mode.NONE)
            await news[0].changed(change)
            async with asyncio.timeout(30):
                while any(state.policy.revision != revision for state in states):
                    await asyncio.sleep(0.005)
            assert (states[0].policy is change) == (change is not None), "it is not compiled again"
    finally:
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for bus in buses:
            await bus.close()
    # Without the bus the change is made all the same, and the next look finds it.
    await put(engine, STRICT, Mode.NONE)
    await news[0].changed()
    assert states[0].woken.is_set()


async def test_what_one_replica_has_tried_out_another_of_the_same_program_need_not(
    engine: AsyncEngine,
) -> None:
    state = await started(engine)
    digest = policy(STRICT).revision
    told = {"rules": 1, "inputs": 77, "p99_us": 5, "notes": ["seen by another"]}
    for program, inputs in (("0" * 64, 1_000), (checker(), 77)):
        await policies.apply(
            engine, digest, STRICT, author="k", reason="r", mode=Mode.NONE,
            check=Check(checker=program, report=told),
        )  # fmt: skip
        state = await started(engine)
        assert state.policy.revision == digest
        assert state.policy.bundle.report.inputs == inputs
        await policies.roll_back(engine, author="k", reason="r")
        # What this replica found by itself is forgotten, so that the second program's word counts.
        async with transaction(engine) as connection:
            await connection.execute(delete(policy_checks))
    # And what it finds by itself is kept for the others.
    state = await started(engine, STRICT)
    assert await policies.report_of(engine, state.policy.revision, checker()) is not None


@pytest.mark.parametrize(
    "given", [BROKEN, files(LONG_ANSWERS.replace("max_tokens >", "max_tokenz >"))]
)
async def test_a_broken_bundle_is_not_used_whatever_is_told_of_it(
    engine: AsyncEngine, given: dict[str, str]
) -> None:
    state = await started(engine)
    before = state.policy
    told = {"rules": 1, "inputs": 1_000, "p99_us": 5, "notes": []}
    await policies.apply(
        engine, "f" * 64, given, author="k", reason="r", mode=Mode.NONE,
        check=Check(checker=checker(), report=told),
    )  # fmt: skip
    await state.refresh()
    assert state.policy is before
    assert "made-up" in state.problem


async def test_a_folder_that_can_not_be_used_ends_the_start(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigurationError, match=r"folder/made-up\.yaml"):
        await started(engine, BROKEN)
    assert (await policies.rollout(engine)).active_digest is None


async def test_two_replicas_reload_within_two_seconds_and_no_call_fails(
    engine: AsyncEngine, clean_database_url: str
) -> None:
    other_engine = make_engine(clean_database_url)
    compilers = [PolicyCompiler(), PolicyCompiler()]
    for compiler in compilers:
        await compiler.start()
    states = [
        await started(engine, compiler=compilers[0]),
        await started(other_engine, name="r2", compiler=compilers[1]),
    ]
    loops = [
        asyncio.create_task(every(POLICY_INTERVAL_S, "policies", state.refresh)) for state in states
    ]
    answers: list[list[bool]] = [[], []]

    async def call(number: int) -> None:
        caller = Caller(states[number], tenant("a"))
        while True:
            # Denied by the strict bundle, let through by the other: never anything else, never an error.
            answers[number].append(caller.call(request__max_tokens=1001))
            await asyncio.sleep(0.001)

    calls = [asyncio.create_task(call(number)) for number in range(2)]
    try:
        for given, is_let_through in ((STRICT, False), (PLAIN, True), (STRICT, False)):
            asked = time.monotonic()
            revision = policy(given).revision
            # Two seconds, unless this machine is so busy that compiling alone takes most of that.
            seconds_max = max(2.0, POLICY_INTERVAL_S + 6 * (time.monotonic() - asked))
            await put(engine, given, Mode.NONE)
            changed = time.monotonic()
            while any(state.policy.revision != revision for state in states):
                assert time.monotonic() - changed < seconds_max
                await asyncio.sleep(0.005)
            for seen in answers:
                seen.clear()
            await asyncio.sleep(0.05)
            assert [set(seen) for seen in answers] == [{is_let_through}] * 2
        assert not any(task.done() for task in (*calls, *loops))
    finally:
        for task in (*calls, *loops):
            task.cancel()
        await asyncio.gather(*calls, *loops, return_exceptions=True)
        assert all(compiler.pid is not None for compiler in compilers), "none of it was in a thread"
        for compiler in compilers:
            await compiler.end()
        await other_engine.dispose()


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.SHADOW])
async def test_a_bad_bundle_never_replaces_a_good_one(engine: AsyncEngine, mode: Mode) -> None:
    state = await started(engine, STRICT)
    good = state.policy
    await put_unchecked(engine, mode)
    for _ in range(3):
        await state.refresh()
    assert state.policy is good
    assert state.candidate is None
    assert "made-up.yaml" in state.problem
    assert state._metrics.policy_load_failures.total() == 1
    assert not Caller(state, tenant("a")).call(request__max_tokens=1001)
    # The next good one is taken.
    await policies.roll_back(engine, author="key:k", reason="it is broken")
    await put(engine, PLAIN, Mode.NONE)
    await state.refresh()
    assert state.policy.revision == policy(PLAIN).revision
    assert state.problem == ""


async def test_a_replica_that_starts_on_a_bad_bundle_says_so(engine: AsyncEngine) -> None:
    await started(engine)
    await put_unchecked(engine, Mode.NONE)
    late = await started(engine, STRICT, "r2")
    assert not late.is_loaded
    assert "made-up.yaml" in late.problem


async def test_an_outage_changes_nothing(engine: AsyncEngine) -> None:
    state = await started(engine, STRICT)
    away = PolicyState(
        make_engine("postgresql://nobody@127.0.0.1:9/nothing"), state.policy,
        replica_id=ReplicaId("r2"), metrics=Metrics(), compiler=PolicyCompiler(IN_A_THREAD),
    )  # fmt: skip
    with pytest.raises(StateUnavailable):
        await away.refresh()
    assert away.policy is state.policy


# ---------------------------------------------------------------- shadow and canary


async def test_shadow_rules_without_effect_and_is_compared(engine: AsyncEngine) -> None:
    state = await started(engine)
    await put(engine, STRICT)
    await state.refresh()
    caller = Caller(state, tenant("a"))
    for tokens in (1, 1_000, 1_001, 5_000):
        assert caller.call(request__max_tokens=tokens)
    assert state.watch.changes[Change.NEWLY_DENIED] == 2
    assert state.watch.changes[Change.NEITHER_DENIES] == 2
    assert state._metrics.policy_comparisons.value((Change.NEWLY_DENIED,)) == 2


async def test_shadow_sees_entitlements_and_priorities_of_the_other_bundle(
    engine: AsyncEngine,
) -> None:
    state = await started(engine, files(EVENINGS))
    classes = PLAIN["tenant_classes.yaml"]
    assert "priority: 2" in classes
    candidate = files(
        EVENINGS,
        tenant_classes=classes.replace("priority: 2", "priority: 6"),
        entitlements=PLAIN["entitlements.yaml"].replace("gold, silver, bronze", "silver, bronze"),
    )
    await put(engine, candidate)
    await state.refresh()
    bronze, gold = Caller(state, tenant("b")), Caller(state, tenant("g", "gold"))
    assert not bronze.call(time__hour=20, tenant__priority=2)
    assert gold.call(time__hour=12, tenant__priority=9)
    assert state.watch.changes == {
        Change.NEITHER_DENIES: 0, Change.BOTH_DENY: 0,
        Change.NEWLY_ALLOWED: 1, Change.NEWLY_DENIED: 1,
    }  # fmt: skip


async def test_a_candidate_that_breaks_down_does_not_touch_the_call(engine: AsyncEngine) -> None:
    state = await started(engine)
    await put(engine, STRICT)
    await state.refresh()
    who = tenant("a")
    static, live = facts(who)
    # No fact is ever of a wrong type; this one breaks the generated rules of the candidate.
    odd = live._replace(request_max_tokens="many")  # type: ignore[arg-type]
    state.shadow(who, MODEL, Scope.CHAT, Phase.ADMIT, static, odd, NEUTRAL)
    assert state.watch.calls == 0
    await state.refresh()
    assert state.candidate is None


async def test_canary_rules_its_tenants_and_a_higher_share_only_adds(engine: AsyncEngine) -> None:
    state = await started(engine)
    await put(engine, STRICT)
    tenants = [TenantId(f"tenant-{number}") for number in range(2_000)]
    seen: set[TenantId] = set()
    for percent in (1, 10, 50, 99, 100):
        await policies.canary(engine, percent, author="key:k", reason="more")
        await state.refresh()
        ruled = {name for name in tenants if state.policy_for(name) is state.candidate}
        assert seen <= ruled
        assert abs(len(ruled) / len(tenants) - percent / 100) < 0.04
        for name in tenants[:50]:
            is_let_through = Caller(state, tenant(name)).call(request__max_tokens=1001)
            assert is_let_through == (name not in ruled)
        seen = ruled
    # Whoever rules, the comparison has the same two sides.
    assert state.watch.changes[Change.NEWLY_DENIED] == state.watch.calls
    assert seen == set(tenants)
    assert not any(in_canary(name, 0) for name in tenants)
    assert 10 <= sum(in_canary(name, 1) for name in tenants) <= 30
    assert not all(in_canary(name, 99) for name in tenants)


async def test_promotion_and_rollback_reach_a_replica(engine: AsyncEngine) -> None:
    state = await started(engine)
    strict = await put(engine, STRICT)
    await state.refresh()
    await policies.promote(engine, author="key:k", reason="well")
    await state.refresh()
    assert (state.policy.revision, state.candidate) == (strict, None)
    await policies.roll_back(engine, author="key:k", reason="no")
    await state.refresh()
    assert state.policy.revision == policy(PLAIN).revision


# ---------------------------------------------------------------- taking back


async def test_a_rise_of_denials_takes_the_candidate_back_on_every_replica(
    engine: AsyncEngine,
) -> None:
    clock = Clock()
    states = [await started(engine, clock=clock), await started(engine, name="r2", clock=clock)]
    await put(engine, STRICT)
    await policies.canary(engine, 50, author="key:k", reason="half")
    callers = [Caller(state, tenant(f"t{number}")) for state in states for number in range(10)]
    for second in range(70):
        clock.now_ms = second * 1_000.0
        for number, caller in enumerate(callers):
            caller.call(request__max_tokens=1_001 if number % 10 == 0 else 10)
        for state in states:
            await state.refresh()
        if states[0].candidate is None:
            break
    assert 58 <= second <= 63
    assert [state.candidate for state in states] == [None, None]
    row = await policies.rollout(engine)
    assert (row.mode, row.candidate_digest) == (Mode.NONE, None)
    assert row.active_digest == policy(PLAIN).revision
    entry = (await audit.list_entries(engine)).items[0]
    assert entry.action == "policy.rollback"
    assert entry.actor in {"replica:r1", "replica:r2"}
    assert "automatic" in entry.reason
    assert entry.before is not None
    assert entry.before["mode"] == "canary"
    # Both have seen it; one has done it.
    assert sum(state._metrics.policy_rollbacks.total() for state in states) == 1
    assert (await audit.verify(engine)).broken_at is None


async def test_an_error_of_a_rule_takes_the_candidate_back_at_once(engine: AsyncEngine) -> None:
    state = await started(engine)
    await put(engine, files(DIVIDES))
    await state.refresh()
    caller = Caller(state, tenant("a"))
    assert caller.call(request__priority_hint=0)
    await state.refresh()
    assert state.candidate is not None
    # Out of its range: a hint that the gate let through.
    assert caller.call(request__priority_hint=-10)
    await state.refresh()
    assert state.candidate is None
    entry = (await audit.list_entries(engine)).items[0]
    assert "made-up/divides" in entry.reason


async def test_a_candidate_that_is_tried_again_begins_anew(engine: AsyncEngine) -> None:
    state = await started(engine)
    for _ in range(2):
        await put(engine, files(DIVIDES))
        await state.refresh()
        await state.refresh()
        assert state.candidate is not None
        assert state.watch.calls == 0
        Caller(state, tenant("a")).call(request__priority_hint=-10)
        await state.refresh()
        assert state.candidate is None


async def test_an_operator_is_faster_than_the_replica(engine: AsyncEngine) -> None:
    """What a replica has seen of one rollout does not end the next."""
    state = await started(engine)
    await put(engine, files(DIVIDES))
    await state.refresh()
    Caller(state, tenant("a")).call(request__priority_hint=-10)
    strict = await put(engine, STRICT)
    await state.refresh()
    assert state.candidate is not None
    assert state.candidate.revision == strict
    assert (await policies.rollout(engine)).candidate_digest == strict
    # Even when the operator comes between the look and the act.
    other = await put(engine, files(LONG_ANSWERS, level="warn"))
    await state._take_back("it is the one before")
    row = await policies.rollout(engine)
    assert (row.candidate_digest, row.mode) == (other, Mode.SHADOW)
    assert state._metrics.policy_rollbacks.total() == 0
