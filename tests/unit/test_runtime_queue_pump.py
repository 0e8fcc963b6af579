"""The pump: who waits is placed in order, woken once, and never left behind."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from controlplane.domain.catalog import Limits, Principal, Tenant
from controlplane.domain.decision import Placement, Queue, Reason, Refuse
from controlplane.domain.ids import KeyId, ModelName, RequestId, SloClassName, TenantId
from controlplane.runtime.call import Call, Ticket, monotonic_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.queue_pump import HEARTBEAT_MS, QueuePump
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from policies.evaluate import NEUTRAL, Terms, compile_policy
from policies.facts import from_json
from policies.load import load_bundle
from tests.unit.test_runtime_fleet_state import NOW, catalog, facts, hello
from tests.unit.test_runtime_fleet_state import request as a_request

TERMS = Terms(
    is_allowed=True, denied_by="", region_names=None, gpu_type_names=None, weight=1.0,
    completion_tokens_default=1, completion_tokens_max=1, fan_out_max=1, steps_max=1, step_gap_ms=0,
    reserve_ratio=1.0, slo_class=None, may_disaggregate=True,
    priority=5, over_budget_cuts=True, limits=Limits(), cache_ttl_s=0, cache_price_ratio=1.0,
)  # fmt: skip

POLICY = compile_policy(load_bundle(None))
STATIC, LIVE = from_json({})


class Keeper:
    """Counts for which models credits were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def contended(self, model: str) -> None:
        self.asked.append(model)


class Seats:
    """Places a call while its model has a seat, as the gate does; keeps the order."""

    def __init__(self) -> None:
        fleet = FleetState(PrefixIndex(), TickLog())
        fleet.use_catalog(catalog())
        fleet.hello(hello(facts()), NOW)
        [row] = fleet.rows_for(ModelName("small"))
        self.placement = Placement(row, None, 0, 1, 1.0, 1.0, 1.0)
        self.free: dict[str, int] = {}
        self.order: list[str] = []
        self.tries = 0
        self.is_idle = False

    def place(self, ticket: Ticket) -> Placement | Queue | Refuse:
        self.tries += 1
        model = ticket.request.model
        if self.free.get(model, 0) == 0:
            return Queue(Reason.NO_CAPACITY)
        self.free[model] -= 1
        self.order.append(ticket.id)
        return self.placement


def ticket(
    name: str,
    *,
    model: str = "small",
    deadline_s: int = 60,
    body_bytes: int = 10,
    idle_until_ms: int = 0,
    rule: str = "",
    **changes: Any,
) -> Ticket:
    tenant = Tenant(
        id=TenantId("t"), name="T", tenant_class="gold", slo_class=SloClassName("s"),
        is_disabled=False, cache_salt="salt",
    )  # fmt: skip
    call = Call(
        principal=Principal(key_id=KeyId("k"), tenant=tenant), endpoint="chat", model=model,
        is_stream=False, prompt_bytes=body_bytes, prefix_bytes=b"", tools_digest=0,
        completion_tokens_max=None, n=1, workflow=None, step=None, session=None, deadline_ms=None,
        completion_tokens_hint=None, priority_hint=None, client_retries=0, is_single_engine=False,
        received_ms=NOW,
    )  # fmt: skip
    deadline_ms = int(NOW) + deadline_s * 1_000
    request = replace(
        a_request(), id=RequestId(name), model=ModelName(model), deadline_ms=deadline_ms,
        workflow_deadline_ms=deadline_ms, arrival_ms=int(NOW), **changes,
    )  # fmt: skip
    return Ticket(
        call=call, request=request, model=catalog().models[ModelName("small")], terms=TERMS,
        policy=POLICY, static=STATIC, part=POLICY.static_part(STATIC), live=LIVE,
        completion_tokens_max=1, n=1, cache_salt="salt", reserved_micro_usd=1, tokens_held=1, holds=(),
        queue_class="standard", idle_until_ms=idle_until_ms, rule=rule, warnings=(), ruling=NEUTRAL, opened_at_s=0.0,
    )  # fmt: skip


def a_pump(
    seats: Seats, *, calls_max: int = 8, wait_ms_max: int = 10**9
) -> tuple[QueuePump, Keeper]:
    keeper = Keeper()
    pump = QueuePump(keeper, calls_max=calls_max, bytes_max=1_000, wait_ms_max=wait_ms_max)  # type: ignore[arg-type]
    pump.place = seats.place
    pump.waited = lambda *_: None
    pump.is_idle = lambda _: seats.is_idle
    return pump, keeper


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def waits(pump: QueuePump, *tickets: Ticket) -> list["asyncio.Task[Placement | Refuse]"]:
    return [asyncio.create_task(pump.wait(each, Reason.QUEUE_FULL, 0)) for each in tickets]


@pytest.mark.anyio
async def test_seats_go_by_deadline_and_not_by_arrival() -> None:
    seats = Seats()
    pump, keeper = a_pump(seats)
    tasks = waits(pump, ticket("late", deadline_s=50), ticket("soon", deadline_s=5))
    await settle()
    assert (pump.waiting, pump.depths(), keeper.asked) == (2, {"small": 2}, ["small", "small"])
    seats.free["small"] = 1
    pump.offer()
    await settle()
    assert seats.order == ["soon"]
    assert tasks[1].done()
    assert not tasks[0].done()
    assert pump.is_waiting_for("small")
    seats.free["small"] = 1
    pump.offer()
    await settle()
    assert seats.order == ["soon", "late"]
    assert pump.waiting == 0
    assert not pump.is_waiting_for("small")


@pytest.mark.anyio
async def test_a_full_model_does_not_hold_up_another_and_is_asked_once() -> None:
    seats = Seats()
    pump, _ = a_pump(seats)
    waits(pump, *(ticket(f"a{n}", model="full") for n in range(4)), ticket("b", model="small"))
    await settle()
    seats.free["small"] = 1
    seats.tries = 0
    pump.offer()
    pump.offer()
    await settle()
    assert seats.order == ["b"]
    assert seats.tries == 2, "one try for each model, however many wait"
    assert pump.depths() == {"full": 4, "small": 0}


@pytest.mark.anyio
async def test_bounds_are_kept_in_calls_and_in_bytes() -> None:
    pump, _ = a_pump(Seats(), calls_max=2)
    tasks = waits(pump, ticket("a"), ticket("b"), ticket("c"))
    await settle()
    refused = [task.result() for task in tasks if task.done()]
    assert [refuse.reason for refuse in refused if isinstance(refuse, Refuse)] == [
        Reason.QUEUE_FULL
    ]
    pump, _ = a_pump(Seats())
    tasks = waits(pump, ticket("a", body_bytes=900), ticket("b", body_bytes=101))
    await settle()
    assert tasks[1].done()
    assert pump.depths() == {"small": 1}


@pytest.mark.anyio
async def test_who_leaves_gives_the_place_up() -> None:
    seats = Seats()
    pump, _ = a_pump(seats)
    tasks = waits(pump, ticket("a"), ticket("b"))
    await settle()
    tasks[0].cancel()
    await settle()
    assert (pump.waiting, pump.depths()) == (1, {"small": 1})
    seats.free["small"] = 5
    pump.offer()
    await settle()
    assert seats.order == ["b"]


@pytest.mark.anyio
async def test_deadlines_and_patience_end_the_wait_with_words() -> None:
    pump, _ = a_pump(Seats(), wait_ms_max=10**9)
    [task] = waits(pump, ticket("a", deadline_s=5))
    await settle()
    pump.sweep(int(NOW) + 4_999)
    await settle()
    assert not task.done()
    pump.sweep(int(NOW) + 5_000)
    outcome = await task
    assert isinstance(outcome, Refuse)
    assert outcome.reason is Reason.DEADLINE_UNREACHABLE
    assert pump.waiting == 0

    pump, _ = a_pump(Seats(), wait_ms_max=0)
    [task] = waits(pump, ticket("b", deadline_s=10**6))
    await settle()
    pump.sweep(int(monotonic_ms()) + 1_000)
    outcome = await task
    assert isinstance(outcome, Refuse)
    assert outcome.reason is Reason.QUEUE_FULL
    assert outcome.retry_after_ms is not None
    assert pump.waiting == 0


@pytest.mark.anyio
async def test_a_refusal_while_waiting_reaches_the_caller() -> None:
    seats = Seats()
    pump, _ = a_pump(seats)
    refuse = Refuse(Reason.DEADLINE_UNREACHABLE, "too late")
    pump.place = lambda _: refuse
    [task] = waits(pump, ticket("a"))
    assert await task == refuse
    assert pump.waiting == 0


@pytest.mark.anyio
async def test_who_waits_is_told_now_and_then_where_it_stands() -> None:
    pump, _ = a_pump(Seats())
    told: list[tuple[int, int]] = []
    first, second = ticket("a", deadline_s=10**6), ticket("b", deadline_s=2 * 10**6)
    second.call.on_waiting = lambda position, wait_ms: told.append((position, wait_ms))
    waits(pump, first, second)
    await settle()
    now_ms = monotonic_ms()
    pump.sweep(now_ms)
    assert told == []
    for beats in range(1, 4):
        pump.sweep(now_ms + beats * (HEARTBEAT_MS + 100))
        pump.sweep(now_ms + beats * (HEARTBEAT_MS + 100))
    assert [position for position, _ in told] == [2, 2, 2]
    assert pump.place_of(first) == (1, None)
    assert pump.place_of(ticket("c")) is None


@pytest.mark.anyio
async def test_postponed_work_waits_for_idle_capacity_and_then_for_its_time() -> None:
    seats = Seats()
    pump, _ = a_pump(seats)
    now_ms = int(monotonic_ms())
    waits(
        pump,
        ticket("idle", waits_for_idle=True),
        ticket("later", not_before_ms=now_ms + 3_600_000, deadline_s=10**6),
    )
    await settle()
    seats.free["small"] = 4
    pump.offer()
    await settle()
    assert seats.order == []
    seats.is_idle = True
    pump.offer()
    await settle()
    assert seats.order == ["idle"]
    assert pump.waiting == 1


@pytest.mark.anyio
async def test_a_postponement_beyond_the_deadline_is_told_with_its_time() -> None:
    pump, _ = a_pump(Seats())
    now_ms = int(monotonic_ms())
    late = ticket("a", deadline_s=10, not_before_ms=now_ms + 3_600_000, rule="night/batch")
    [task] = waits(pump, late)
    outcome = await task
    assert pump.waiting == 0
    assert isinstance(outcome, Refuse)
    assert (outcome.reason, outcome.rule) == (Reason.DEFERRED, "night/batch")
    assert outcome.retry_after_ms is not None
    assert outcome.retry_after_ms > 3_000_000


@pytest.mark.anyio
async def test_a_higher_priority_takes_the_place_of_a_lower_one_in_a_full_queue() -> None:
    pump, _ = a_pump(Seats(), calls_max=2)
    tasks = waits(pump, ticket("a", priority=5), ticket("b", priority=2), ticket("c", priority=9))
    await settle()
    assert [task.done() for task in tasks] == [False, True, False]
    outcome = tasks[1].result()
    assert isinstance(outcome, Refuse)
    assert outcome.reason is Reason.QUEUE_FULL
