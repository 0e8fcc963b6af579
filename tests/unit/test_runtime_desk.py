"""The desk: waiting calls are asked cheaply, homes are kept, calls and seats weighed together, nothing leaks."""

from dataclasses import replace

import pytest

from cli.simulate.contracts import Call, Plan, Step
from cli.simulate.headway import SimulatedJob
from controlplane.admission.decide import decide
from controlplane.admission.order import turn_of
from controlplane.admission.snapshot import Snapshot
from controlplane.domain.decision import Admit, Placement, Queue, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName
from controlplane.domain.outcome import RequestState, Usage
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime.desk import Desk
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.waiting_line import WaitingLine
from controlplane.scheduler.place import place
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import CreditGrant
from policies.load import load_bundle
from tests.decision_builders import NOW_MS, call, engine_row
from tests.unit.test_admission_decide import TERMS
from tests.unit.test_runtime_fleet_state import NOW, catalog, facts, hello

MODEL = ModelName("small")
ADMISSION = load_bundle(None).admission
PLAN = Plan(
    number=1, tenant="t", workflow_class="c", arrival_s=0.0, steps=(Step(1, 0, 1),), deadline_s=None
)


def a_desk(engines: int = 2, seats: int = 1) -> Desk[SimulatedJob]:
    """Engines that have served for long, each lent `seats` seats."""
    fleet = FleetState(PrefixIndex(), TickLog(), wall_ms=lambda: NOW)
    fleet.use_catalog(catalog())
    names = [f"e{number}" for number in range(engines)]
    assert fleet.hello(hello(*(facts(name) for name in names)), NOW)
    holds = dict.fromkeys(names, (seats, 10_000))
    fleet.granted(CreditGrant(node_id="n1", agent_epoch=1, ttl_ms=10_000, holds=holds), NOW)
    line: WaitingLine[SimulatedJob] = WaitingLine(calls_max=64, bytes_max=10**9, wait_ms_max=30_000)
    desk: Desk[SimulatedJob] = Desk(fleet, PoolLoads(fleet, ADMISSION), line, RetryBudgets())
    desk.use_rules(ADMISSION)
    return desk


def job(name: str, **changes: object) -> SimulatedJob:
    request = call(
        id=name, model=MODEL, arrival_ms=int(NOW), deadline_ms=int(NOW) + 60_000, regions=3, gpu_types=1,
        workflow_deadline_ms=int(NOW) + 60_000, workflow=f"w-{name}", ttft_ms_max=60_000, **changes,
    )  # fmt: skip
    return SimulatedJob(Call(PLAN, 0, 0.0, 0.0), request, TERMS)


def row(desk: Desk[SimulatedJob], name: str) -> EngineRow:
    found = desk.fleet.row_of(name)
    assert found is not None
    return found


def end(desk: Desk[SimulatedJob], ended: SimulatedJob) -> None:
    desk.release(ended)
    usage = Usage(1_000, 0, 100, is_estimated=False)
    desk.ended(ended, RequestState.SUCCEEDED, usage, 10.0, NOW + 100)


def test_credits_are_given_back_once_whatever_becomes_of_a_call() -> None:
    desk = a_desk(1, 2)
    first, second = job("a"), job("b")
    assert isinstance(desk.ask(first, NOW), Placement)
    assert isinstance(desk.ask(second, NOW), Placement)
    assert row(desk, "e0").seats_taken == 2
    desk.first_token(first, 20.0, NOW + 20)
    end(desk, first)
    desk.release(first)
    desk.release(second)
    desk.ended(second, RequestState.CANCELLED, Usage(0, 0, 0, is_estimated=False), None, NOW)
    taken = row(desk, "e0")
    assert (taken.seats_taken, taken.kv_tokens_taken, taken.prefill_tokens_pending) == (0, 0, 0)


def test_a_later_step_goes_home_though_another_engine_is_cheaper() -> None:
    home, other = engine_row(0, decode_ms_base=12.0), engine_row(1)
    late = call(
        workflow="w", step=1, is_begun=True, steps_expected=8, home=home.engine_id, ttft_ms_max=60_000,
        workflow_deadline_ms=NOW_MS + 1_000, late_micro_usd_per_s=10**6, weight=9.0,
    )  # fmt: skip
    cached = {home.index: 900}
    cheapest = place(late, (home, other), cached, NOW_MS)
    assert isinstance(cheapest, Placement)
    assert cheapest.decode is other
    outcome = decide(late, Snapshot((home, other), cached), TERMS, NOW_MS)
    assert isinstance(outcome, Admit)
    assert outcome.placement.decode is home
    # A session that is not a workflow only hints where its context is.
    hint = replace(late, workflow=None)
    outcome = decide(hint, Snapshot((home, other), cached), TERMS, NOW_MS)
    assert isinstance(outcome, Admit)
    # Nor does a home keep a call that would queue inside it for longer than its context is worth.
    slow = engine_row(0, prefill_tokens_pending=10**6)
    outcome = decide(late, Snapshot((slow, other), cached), TERMS, NOW_MS)
    assert isinstance(outcome, Admit)
    assert outcome.placement.decode is other


def test_a_call_that_waits_for_its_full_home_is_not_decided_on_until_a_seat_is_free() -> None:
    desk = a_desk(2, 1)
    prefix, boundaries = tuple(range(11, 27)), tuple(range(500, 8_500, 500))
    desk.fleet.prefixes.routed(row(desk, "e0").index, prefix, 8_000)
    holder = job("holder")
    desk.retry(holder, row(desk, "e1"), NOW)
    assert holder.placement.decode.engine_id == "e0"
    step = job(
        "s", step=1, is_begun=True, steps_expected=3, home="e0", prefix=prefix,
        prefix_tokens=boundaries, prompt_tokens=8_001,
    )  # fmt: skip
    outcome = desk.ask(step, NOW)
    assert isinstance(outcome, Queue), "the other engine is free, and it waits for its home"
    assert desk.enter(step, NOW) == []
    decided: list[str] = []
    rule = desk.rule
    desk.rule = lambda each, now_ms: decided.append(each.id) or rule(each, now_ms)
    assert desk.line.offer(NOW + 10) == ([], False)
    assert decided == []
    end(desk, holder)
    [(left, placed)], _ = desk.line.offer(NOW + 20)
    assert (left, decided) == (step, ["s"])
    assert isinstance(placed, Placement)
    assert placed.decode.engine_id == "e0"


def test_a_call_leaves_a_home_that_stays_full_once_waiting_costs_more_than_computing_anew() -> None:
    desk = a_desk(2, 1)
    prefix, boundaries = tuple(range(11, 15)), tuple(range(250, 1_250, 250))
    desk.fleet.prefixes.routed(row(desk, "e0").index, prefix, 1_000)
    holder = job("holder")
    desk.retry(holder, row(desk, "e1"), NOW)
    step = job(
        "s", step=1, is_begun=True, steps_expected=3, home="e0", prefix=prefix,
        prefix_tokens=boundaries,
    )  # fmt: skip
    assert isinstance(desk.ask(step, NOW), Queue)
    assert desk.enter(step, NOW) == []
    assert 0.0 < step.home_until_ms - NOW < 10_000.0
    assert desk.line.offer(step.home_until_ms - 1)[0] == []
    [(left, placed)], _ = desk.line.offer(step.home_until_ms + 1)
    assert left is step
    assert isinstance(placed, Placement)
    assert placed.decode.engine_id == "e1"


@pytest.mark.parametrize("is_joint", [True, False])
def test_calls_without_a_home_are_weighed_together_when_several_seats_are_free(
    is_joint: bool,  # noqa: FBT001
) -> None:
    """`small` could use either engine; `large` has its context on e0 only, and comes later in the order."""
    desk = a_desk(2, 1)
    desk.is_joint = is_joint
    holders = [job("h0"), job("h1")]
    for holder in holders:
        assert isinstance(desk.ask(holder, NOW), Placement)
    prefix, boundaries = tuple(range(11, 27)), tuple(range(500, 8_500, 500))
    desk.fleet.prefixes.routed(row(desk, "e0").index, prefix, 8_000)
    # A hair of what `small` needs is on e0 as well, so alone it would go there.
    desk.fleet.prefixes.routed(row(desk, "e0").index, (99,), 256)
    small = job("small", prefix=(99,), prefix_tokens=(256,))
    large = job("large", prefix=prefix, prefix_tokens=boundaries, prompt_tokens=8_001)
    small.request = replace(small.request, workflow_deadline_ms=int(NOW) + 50_000)
    for each in (small, large):
        assert isinstance(desk.ask(each, NOW), Queue)
        assert desk.enter(each, NOW) == []
    for holder in holders:
        end(desk, holder)
    left, _ = desk.line.offer(NOW + 10)
    went = {
        each.id: placed.decode.engine_id for each, placed in left if not isinstance(placed, Refuse)
    }
    if is_joint:
        assert went == {"small": "e1", "large": "e0"}
        assert (desk.joint.passes, desk.joint.better) == (1, 1)
        assert desk.joint.gain_micro_usd > 0.0
    else:
        assert went == {"small": "e0", "large": "e1"}
        assert desk.joint.passes == 0


def test_orders_by_hand() -> None:
    urgent = call(
        arrival_ms=1_000, workflow_deadline_ms=9_000, weight=2.0, value_micro_usd=100, step=2, steps_expected=4,
        completion_tokens_expected=50, ttft_ms_max=1_000, tpot_ms_max=10, step_gap_ms=500,
        workflow_spent_micro_usd=5_000, workflow="w",
    )  # fmt: skip
    assert turn_of(urgent, "arrival") == 1_000
    assert turn_of(urgent, "deadline") == 1_000 + 8_000 / 2
    # Two steps are left of 1,000 + 50 x 10 ms each, and one pause between them.
    assert turn_of(urgent, "slack") == 9_000 - (2 * 1_500 + 500)
    # 5 thousandths of a cent attained are three doublings.
    assert turn_of(urgent, "plas") == 1_000 + 3 * 60_000
    assert turn_of(urgent, "index") == pytest.approx(-1e6 * 2.0 * 100 / (2 * 50))
    dearer = replace(urgent, value_micro_usd=1_000)
    assert turn_of(dearer, "index") < turn_of(urgent, "index")
