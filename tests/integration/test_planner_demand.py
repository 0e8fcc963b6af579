"""What the planner reads of demand, against a count by hand over random requests."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName
from controlplane.runtime import demand as live
from controlplane.runtime.demand import HISTORY_S, SLOT_S, WINDOW_S, SlotBook, observed, slot_of
from controlplane.runtime.forecasts import Forecasts, as_builtins, learned
from controlplane.scheduler.planner.forecast import ForecastState
from controlplane.scheduler.planner.problem import from_builtins
from controlplane.store import demand, leadership, tables
from controlplane.store.catalog import load_catalog
from controlplane.store.demand import ClassKey
from controlplane.store.session import transaction
from policies.evaluate import Policy, compile_policy
from policies.load import bundle_of, files_of
from tests.integration.store_world import R1

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
SINCE = NOW - timedelta(seconds=WINDOW_S)


def policy() -> Policy:
    return compile_policy(bundle_of(files_of(None)))


async def _write(engine: AsyncEngine, table: Any, rows: list[dict[str, Any]]) -> None:
    if rows:
        async with transaction(engine) as connection:
            await connection.execute(insert(table), rows)


def _request(number: int, at: datetime, **members: Any) -> dict[str, Any]:
    row = {
        "id": f"q{number}",
        "tenant_id": "acme",
        "key_id": "k",
        "replica_id": R1,
        "workflow_id": None,
        "step": 0,
        "model": "org/small",
        "endpoint": "chat",
        "is_stream": False,
        "state": "succeeded",
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "completion_tokens": 10,
        "settled_micro_usd": 1,
        "opened_at": at,
        "ended_at": at + timedelta(seconds=1),
        **members,
    }
    if row["state"] == "open":
        row |= {"settled_micro_usd": None, "ended_at": None}
    return row


def _workflow(name: str, at: datetime, **members: Any) -> dict[str, Any]:
    return {
        "id": name,
        "tenant_id": "acme",
        "kind": "k",
        "scope": "research",
        "steps_expected": 4,
        "slo_class": "interactive",
        "deadline_at": at + timedelta(seconds=60),
        "created_at": at,
        **members,
    }


class World:
    """Random workflows and calls over twice the window, and what a person would count of them."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.workflows: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        for number in range(pick.randrange(1, 25)):
            at = NOW - timedelta(seconds=pick.uniform(1, 2 * WINDOW_S))
            tenant = pick.choice(["acme", "bolt"])
            scope = pick.choice(["chat", "research"])
            if pick.random() < 0.3:
                self._call(pick, at, tenant)
                continue
            workflow = _workflow(
                f"w{number}",
                at,
                tenant_id=tenant,
                scope=scope,
                steps_expected=pick.randrange(1, 9),
                deadline_at=at + timedelta(seconds=pick.randrange(10, 100)),
            )
            self.workflows.append(workflow)
            for _ in range(pick.randrange(0, 5)):
                at += timedelta(seconds=pick.uniform(0.1, 90))
                self._call(pick, at, tenant, workflow["id"])

    def _call(
        self, pick: random.Random, at: datetime, tenant: str, workflow: str | None = None
    ) -> None:
        prompt = pick.randrange(1, 1000)
        self.requests.append(
            _request(
                len(self.requests),
                at,
                tenant_id=tenant,
                workflow_id=workflow,
                state=pick.choice(["succeeded", "succeeded", "failed", "open"]),
                prompt_tokens=prompt,
                cached_tokens=pick.randrange(0, prompt + 1),
                completion_tokens=pick.randrange(1, 50),
                ended_at=at + timedelta(seconds=pick.uniform(0.01, 60)),
            )
        )

    def counted(self) -> dict[tuple[str, str], dict[str, Any]]:
        """By (tenant class, scope)."""
        known = {workflow["id"]: workflow for workflow in self.workflows}
        classes = {"acme": "gold", "bolt": "bronze"}
        found: dict[tuple[str, str], dict[str, Any]] = defaultdict(
            lambda: {"calls": 0, "open": 0, "ended": 0, "prompt": 0, "cached": 0, "completion": 0,
                     "begun": set(), "gaps": [], "steps": [], "deadlines": []}
        )  # fmt: skip
        before: dict[str, dict[str, Any]] = {}
        for request in sorted(self.requests, key=lambda one: one["opened_at"]):
            if not SINCE <= request["opened_at"] < NOW:
                continue
            workflow = known.get(request["workflow_id"])
            scope = "chat" if workflow is None else workflow["scope"]
            entry = found[classes[request["tenant_id"]], scope]
            entry["calls"] += 1
            entry["open"] += request["state"] == "open"
            if request["state"] == "succeeded":
                entry["ended"] += 1
                entry["prompt"] += request["prompt_tokens"]
                entry["cached"] += request["cached_tokens"]
                entry["completion"] += request["completion_tokens"]
            entry["steps"].append(1 if workflow is None else workflow["steps_expected"])
            if workflow is None:
                entry["begun"].add(request["id"])
                continue
            entry["deadlines"].append(
                (workflow["deadline_at"] - workflow["created_at"]).total_seconds()
            )
            if workflow["created_at"] >= SINCE:
                entry["begun"].add(workflow["id"])
            earlier = before.get(workflow["id"])
            if earlier is not None and earlier["ended_at"] is not None:
                gap_s = (request["opened_at"] - earlier["ended_at"]).total_seconds()
                if gap_s >= 0:
                    entry["gaps"].append(gap_s)
            before[workflow["id"]] = request
        return found


def _mean(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


@pytest.mark.parametrize("seed", range(12))
async def test_counts_are_those_of_a_count_by_hand(engine: AsyncEngine, seed: int) -> None:
    world = World(seed)
    await _write(engine, tables.workflows, world.workflows)
    await _write(engine, tables.requests, world.requests)
    counted = await demand.counts(engine, SINCE, NOW)
    expected = world.counted()
    assert {(entry.key.tenant_class, entry.key.scope) for entry in counted} == expected.keys()
    for entry in counted:
        hand = expected[entry.key.tenant_class, entry.key.scope]
        assert (entry.calls, entry.calls_open, entry.calls_ended) == (
            hand["calls"], hand["open"], hand["ended"],
        )  # fmt: skip
        assert (entry.prompt_tokens, entry.cached_tokens, entry.completion_tokens) == (
            hand["prompt"], hand["cached"], hand["completion"],
        )  # fmt: skip
        assert entry.begun == len(hand["begun"])
        assert entry.steps_expected == pytest.approx(_mean(hand["steps"]))
        assert entry.deadline_s == pytest.approx(_mean(hand["deadlines"]))
        assert entry.gap_s == pytest.approx(_mean(hand["gaps"]), abs=1e-6)
    bins = await demand.arrivals(engine, SINCE, NOW, 60)
    assert {key: sum(found.values()) for key, found in bins.items()} == {
        entry.key: entry.begun for entry in counted if entry.begun
    }
    if counted:
        assert [entry.calls for entry in counted] == sorted(
            (entry.calls for entry in counted), reverse=True
        )


async def test_refused_work_counts_as_demand_and_other_refusals_do_not(engine: AsyncEngine) -> None:
    def refusal(number: int, reason: str, weight: int, **facts: Any) -> dict[str, Any]:
        return {
            "request_id": f"r{number}", "number": 0, "replica_id": R1, "verdict": "refuse",
            "reason": reason, "policy_revision": "x", "decided_at": NOW - timedelta(seconds=5),
            "tenant_id": "bolt", "model": "org/small", "sample_weight": weight, "facts": facts,
        }  # fmt: skip

    rows = [
        refusal(0, "shed_overload", 1, **{"workflow.scope": "research"}),
        refusal(1, "queue_full", 5, **{"workflow.scope": "research"}),
        refusal(2, "insufficient_quota", 7, **{"workflow.scope": "research"}),
        refusal(3, "no_capacity", 2),
    ]
    await _write(engine, tables.decisions, rows)
    counted = {
        (entry.key.scope, entry.refused, entry.calls)
        for entry in await demand.counts(engine, SINCE, NOW)
    }
    assert counted == {(Scope.RESEARCH, 6.0, 0), (Scope.CHAT, 2.0, 0)}
    [busiest, *_] = await demand.counts(engine, SINCE, NOW)
    seen = observed(busiest, {})
    assert seen.arrivals_per_s == pytest.approx(busiest.refused / 3 / WINDOW_S)


def test_dispersion_is_that_of_the_bins() -> None:
    counts = demand.ClassCounts(
        key=ClassKey(model=ModelName("m"), tenant_class="gold", scope=Scope.CHAT),
        slo_class="interactive", calls=30, calls_ended=30, calls_open=0, begun=30, refused=0.0,
        steps_expected=1.0, prompt_tokens=1, cached_tokens=0, completion_tokens=1, gap_s=None,
        deadline_s=None,
    )  # fmt: skip
    minutes = HISTORY_S // 60
    steady = observed(counts, dict.fromkeys(range(minutes), 4))
    assert (steady.dispersion_ratio, steady.arrivals_per_s_recent_max) == (1.0, 4 / 60)
    # Everything in one minute of fifteen: mean 4, variance 15 x 4^2 x 14/15 x ... by the definition.
    burst = observed(counts, {7: 4 * minutes})
    mean = 4.0
    variance = ((4 * minutes - mean) ** 2 + (minutes - 1) * mean**2) / (minutes - 1)
    assert burst.dispersion_ratio == pytest.approx(min(50.0, variance / mean))
    assert burst.arrivals_per_s_recent_max == pytest.approx(4 * minutes / 60)


async def test_the_planner_is_told_sizes_values_and_priorities(engine: AsyncEngine) -> None:
    at = await demand.now(engine)
    begun = at - timedelta(seconds=100)
    await _write(engine, tables.workflows, [_workflow("w", begun)])
    await _write(
        engine,
        tables.requests,
        [
            _request(0, begun, workflow_id="w", prompt_tokens=300, cached_tokens=100),
            _request(
                1, begun + timedelta(seconds=3), workflow_id="w", prompt_tokens=500,
                cached_tokens=300, completion_tokens=30, step=1,
            ),
        ],
    )  # fmt: skip
    seen = await live.look(engine)
    catalog = await load_catalog(engine)
    [found] = live.demands(seen, {}, {}, catalog, policy())
    gold = policy().bundle.tenant_classes.classes["gold"]
    assert found.class_id == "org/small/gold/research"
    assert (found.priority, found.weight) == (gold.priority, gold.weight)
    assert (found.steps, found.uncached_tokens, found.context_tokens) == (2.0, 200.0, 400.0)
    assert (found.completion_tokens, found.gap_s, found.deadline_s) == (20.0, 2.0, 60.0)
    assert found.value_micro_usd == 2 * 10_000
    assert found.arrivals_per_s_now == pytest.approx(1 / WINDOW_S)
    [recent] = live.recent_workflows(seen, catalog, policy(), frozenset({ModelName("org/small")}))
    assert (recent.steps, recent.context_tokens, recent.gap_s) == (2, 400.0, 2.0)
    assert recent.arrival_s == pytest.approx(begun.timestamp())
    # A forecast takes the place of what is seen, and nothing else.
    ahead = {
        found.class_id: live.Expected(arrivals_per_s=5.0, spread_per_s=0.5, dispersion_ratio=3.0)
    }
    [grown] = live.demands(seen, ahead, {}, catalog, policy())
    assert (grown.arrivals_per_s_forecast, grown.arrivals_per_s_spread) == (5.0, 0.5)
    assert (grown.arrivals_per_s_now, grown.dispersion_ratio) == (found.arrivals_per_s_now, 3.0)
    # What is expected to come again needs what it needed when it came last.
    quiet = live.DemandSeen(at=at, classes=(), recent=())
    slot = live.Slot(
        key=ClassKey(model=ModelName("org/small"), tenant_class="gold", scope=Scope.RESEARCH),
        slo_class="interactive",
        started_at=at,
        workflows=4,
        needs=live.Sizes(
            steps=3.0, uncached_tokens=10.0, context_tokens=20.0, completion_tokens=5.0,
            gap_s=1.0, deadline_s=9.0,
        ),
    )  # fmt: skip
    [again] = live.demands(quiet, ahead, {slot.key.class_id: slot}, catalog, policy())
    assert (again.arrivals_per_s_now, again.arrivals_per_s_forecast) == (0.0, 5.0)
    assert (again.steps, again.context_tokens, again.deadline_s) == (3.0, 20.0, 9.0)
    assert again.value_micro_usd == 3 * 10_000
    assert live.demands(quiet, ahead, {}, catalog, policy()) == ()


async def test_each_slot_is_written_once_by_the_leader_alone(engine: AsyncEngine) -> None:
    epoch = await leadership.claim(engine, R1, 60.0)
    assert epoch is not None
    start = live.slot_start(NOW)
    await _write(
        engine,
        tables.requests,
        [
            _request(0, start - timedelta(seconds=30), prompt_tokens=40, cached_tokens=10),
            _request(1, start + timedelta(seconds=30), prompt_tokens=70),
            _request(2, start + timedelta(seconds=40), prompt_tokens=90),
        ],
    )
    catalog = await load_catalog(engine)
    old_leader = SlotBook(engine)
    assert await old_leader.close(epoch - 1, start, catalog, policy()) == []
    book = SlotBook(engine)
    assert await book.close(epoch, start + timedelta(seconds=5), catalog, policy()) == []
    end = start + timedelta(seconds=SLOT_S)
    [(at, slots)] = await book.close(epoch, end, catalog, policy())
    assert at == start
    [slot] = slots.values()
    assert (slot.workflows, slot.needs.context_tokens) == (2, 80.0)
    assert await book.close(epoch, end, catalog, policy()) == []
    # Another leader goes on where this one ended, and catches up on a slot that came to nothing.
    later = SlotBook(engine)
    written = await later.close(epoch, end + timedelta(seconds=2 * SLOT_S), catalog, policy())
    assert [len(slots) for _, slots in written] == [0, 0]
    assert await SlotBook(engine).close(epoch, end, catalog, policy()) == []
    kept = await demand.slots(engine, start - timedelta(days=1))
    assert [slot_of(record) for record in kept] == [slot]
    async with transaction(engine) as connection:
        plan = await connection.execute(
            text("SELECT count(*) FROM demand_slots WHERE class_id = ''")
        )
        assert plan.scalar_one() == 3


async def test_what_was_learned_is_kept_under_the_leaders_epoch(engine: AsyncEngine) -> None:
    epoch = await leadership.claim(engine, R1, 60.0)
    assert epoch is not None
    assert await demand.save_forecasts(engine, epoch, {"a": {"level": 1.5}, "b": {}})
    assert await demand.save_forecasts(engine, epoch, {"a": {"level": 2.5}})
    assert not await demand.save_forecasts(engine, epoch - 1, {"a": {"level": 9.0}})
    assert json.dumps(await demand.load_forecasts(engine), sort_keys=True) == json.dumps(
        {"a": {"level": 2.5}, "b": {}}
    )


def test_slots_are_learned_once_each_and_missing_ones_count_as_nothing() -> None:
    start = live.slot_start(NOW)
    every = timedelta(seconds=SLOT_S)
    slots = [(start + every * number, {"a": 90} if number % 2 else {}) for number in range(1, 9)]
    whole = learned({}, slots)
    state = whole["a"]
    assert sum(state.arrivals) + state.bin_arrivals == 4 * 90
    assert sum(state.seconds) + state.bin_seconds == 8 * SLOT_S
    assert state.at_s == (start + every * 9).timestamp()
    # A leader that comes in between, or reads a slot again, learns the same.
    assert learned(learned({}, slots[:3]), slots) == whole
    assert learned(whole, slots) == whole
    assert from_builtins(ForecastState, as_builtins(state)) == state


async def test_a_new_leader_forecasts_what_the_old_one_would_have(engine: AsyncEngine) -> None:
    epoch = await leadership.claim(engine, R1, 60.0)
    assert epoch is not None
    start = live.slot_start(NOW)
    every = timedelta(seconds=SLOT_S)
    needs = live.Sizes(
        steps=1.0, uncached_tokens=1.0, context_tokens=1.0, completion_tokens=1.0, gap_s=0.0,
        deadline_s=1.0,
    )  # fmt: skip
    key = ClassKey(model=ModelName("org/small"), tenant_class="gold", scope=Scope.CHAT)
    old = Forecasts(engine)
    found = {}
    for number in range(1, 7):
        at = start + every * number
        slot = live.Slot(
            key=key, slo_class="interactive", started_at=at, workflows=450, needs=needs
        )
        slots = {key.class_id: slot}
        bodies = {class_id: one.body() for class_id, one in slots.items()}
        assert await demand.add_slot(engine, epoch, at, bodies)
        seen = live.DemandSeen(at=at + every, classes=(), recent=())
        found = await old.expect(epoch, seen, [(at, slots)], 60.0)
    # 450 workflows in each quarter of an hour: half a workflow each second.
    assert found[key.class_id].arrivals_per_s == pytest.approx(0.5, rel=0.05)
    fresh = Forecasts(engine)
    assert await fresh.expect(epoch, seen, [], 60.0) == found
    assert fresh.usual == old.usual
    # Nothing kept but the slots: the same again.
    async with transaction(engine) as connection:
        await connection.execute(text("DELETE FROM forecasts"))
    assert await Forecasts(engine).expect(epoch, seen, [], 60.0) == found
    # What comes in the slot under way counts at once, and is not kept.
    later = replace(seen, at=seen.at + timedelta(seconds=600))
    quiet = (await fresh.expect(epoch, later, [], 60.0))[key.class_id]
    await _write(
        engine,
        tables.requests,
        [_request(n, seen.at + timedelta(seconds=n % 600)) for n in range(1200)],
    )
    busy = (await fresh.expect(epoch, later, [], 60.0))[key.class_id]
    assert busy.arrivals_per_s > found[key.class_id].arrivals_per_s > quiet.arrivals_per_s
    assert await fresh.expect(epoch, seen, [], 60.0) == found
