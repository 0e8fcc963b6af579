"""Pairs in the live fleet: who can be one, and what is taken, given back and believed when a leg fails."""

import random
from dataclasses import replace

import msgspec
import pytest

from cli.simulate.headway import SimulatedJob
from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.outcome import RequestState, Usage
from controlplane.domain.transfer import Connector
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime.desk import Desk
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.waiting_line import WaitingLine
from controlplane.scheduler.place import prefill_choices
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import CreditGrant, KvTransfer
from tests.decision_builders import call, engine_row
from tests.unit.test_runtime_desk import ADMISSION, MODEL, job, row
from tests.unit.test_runtime_fleet_state import NOW, catalog, facts, hello

NIXL = KvTransfer(connector="nixl")
PREFIX = (1, 2, 3)
PREFIX_TOKENS = (300, 600, 1_000)


def a_desk(prefills: int = 2, seats: int = 4, **transfers: KvTransfer | None) -> Desk[SimulatedJob]:
    """Engines `p0`... that prefill and `d0`, `d1` that decode, all by NIXL unless told otherwise."""
    fleet = FleetState(PrefixIndex(), TickLog(), wall_ms=lambda: NOW)
    fleet.use_catalog(catalog())
    roles = {f"p{number}": "prefill" for number in range(prefills)} | {
        "d0": "decode", "d1": "decode",
    }  # fmt: skip
    engines = [
        msgspec.structs.replace(facts(name), role=role, transfer=transfers.get(name, NIXL))
        for name, role in roles.items()
    ]
    assert fleet.hello(hello(*engines), NOW)
    holds = dict.fromkeys(roles, (seats, 10_000))
    fleet.granted(CreditGrant(node_id="n1", agent_epoch=1, ttl_ms=60_000, holds=holds), NOW)
    line: WaitingLine[SimulatedJob] = WaitingLine(calls_max=64, bytes_max=10**9, wait_ms_max=30_000)
    desk: Desk[SimulatedJob] = Desk(fleet, PoolLoads(fleet, ADMISSION), line, RetryBudgets())
    desk.use_rules(ADMISSION)
    return desk


def paired(
    desk: Desk[SimulatedJob], name: str = "a", prefill: str = "p0", decode: str = "d0"
) -> SimulatedJob:
    """A call placed on a pair."""
    taken = job(name, prefix=PREFIX, prefix_tokens=PREFIX_TOKENS)
    placement = Placement(row(desk, decode), row(desk, prefill), 0, 1_100, 50.0, 500.0, 1.0)
    desk._commit(taken, placement, NOW)
    desk.retries.note_request(taken.request.tenant, MODEL, int(NOW), 0)
    return taken


def taken_of(desk: Desk[SimulatedJob]) -> dict[str, tuple[int, int, int]]:
    return {
        each.engine_id: (each.seats_taken, each.kv_tokens_taken, each.prefill_tokens_pending)
        for each in desk.fleet.rows_for(MODEL)
    }


def fail_prefill(desk: Desk[SimulatedJob], failed: SimulatedJob) -> bool:
    """As the gate does when a first leg has failed."""
    prefill = failed.placement.prefill
    assert prefill is not None
    desk.unheld(failed, prefill)
    desk.release_prefill(failed)
    return desk.prefill_failed(failed, prefill, NOW + 10)


def nothing_is_left(desk: Desk[SimulatedJob]) -> None:
    assert set(taken_of(desk).values()) == {(0, 0, 0)}
    desk.fleet.flows.expire(NOW + 10**9)
    assert {each.flows_micro_usd_per_s for each in desk.fleet.rows_for(MODEL)} == {0.0}


# ---------------------------------------------------------------- who can be a pair


@pytest.mark.parametrize(
    ("first", "second", "are_mates"),
    [
        (NIXL, NIXL, True),
        (NIXL, KvTransfer(connector="nixl_push"), False),
        (NIXL, KvTransfer(connector="nixl", domain="rack-2"), False),
        (NIXL, None, False),
        (None, None, False),
        (KvTransfer(connector="pigeon"), KvTransfer(connector="pigeon"), False),
    ],
)
def test_kv_moves_between_engines_of_one_connector_and_domain(
    first: KvTransfer | None, second: KvTransfer | None, are_mates: object
) -> None:
    desk = a_desk(1, p0=first, d0=second, d1=None)
    prefill, decode = row(desk, "p0"), row(desk, "d0")
    found = prefill_choices(call(model=MODEL, gpu_types=1), [prefill], {}, int(NOW))
    assert (decode.pair_key in found) == are_mates
    assert row(desk, "d1").pair_key == 0


def test_stored_prompts_have_blocks_of_one_size_and_gpu_types_may_differ() -> None:
    stored = KvTransfer(connector="shared_folder", domain="/kv")
    desk = a_desk(1, p0=stored, d0=stored)
    assert row(desk, "p0").pair_key == row(desk, "d0").pair_key != 0
    other = msgspec.structs.replace(facts("d0"), role="decode", transfer=stored, block_tokens=32)
    again = msgspec.structs.replace(facts("p0"), role="prefill", transfer=stored)
    desk.fleet.hello(hello(again, other), NOW)
    assert row(desk, "p0").pair_key != row(desk, "d0").pair_key


def test_an_engine_tells_its_connector_when_it_has_started() -> None:
    desk = a_desk(1, p0=None)
    before = row(desk, "p0")
    assert before.pair_key == 0
    told = [
        msgspec.structs.replace(facts(name), role=role, transfer=NIXL)
        for name, role in (("p0", "prefill"), ("d0", "decode"))
    ]
    desk.fleet.hello(hello(*told), NOW)
    assert row(desk, "p0") is before
    assert before.pair_key == row(desk, "d0").pair_key != 0
    source = desk.fleet.kv_source_of(before)
    assert source is not None
    assert (source.connector, source.lease_s) == (Connector.NIXL, 30.0)


def test_mooncake_is_found_at_its_nodes_address() -> None:
    transfer = KvTransfer(connector="mooncake", lease_s=480, engine_id="p0", bootstrap_port=8998)
    desk = a_desk(1, p0=transfer)
    source = desk.fleet.kv_source_of(row(desk, "p0"))
    assert source is not None
    assert (source.engine_id, source.bootstrap) == ("p0", "http://10.0.0.1:8998")


def test_a_row_of_the_past_keeps_its_domain() -> None:
    mate = engine_row(0, role=Role.PREFILL)
    assert mate.pair_key == mate.region_bit
    mate.pair_key = 7
    assert mate.as_of(mate.dynamic()).pair_key == 7


# ---------------------------------------------------------------- when a pair is worth it


def cheap_pairs() -> Desk[SimulatedJob]:
    """Prefill engines next to nothing, so that only the hand-over speaks against them."""
    desk = a_desk(1)
    row(desk, "p0").micro_usd_per_ms = 1e-6
    return desk


@pytest.mark.parametrize(("tokens", "is_split"), [(4_000, True), (40, False)])
def test_short_prompts_stay_on_one_engine(tokens: int, is_split: object) -> None:
    desk = cheap_pairs()
    asked = job("a", prompt_tokens=tokens)
    outcome = desk.ask(asked, NOW)
    assert isinstance(outcome, Placement)
    assert (outcome.prefill is not None) == is_split
    assert asked.request.is_single_engine != is_split


def test_prompts_that_are_mostly_there_stay_there() -> None:
    desk = cheap_pairs()
    prefix, tokens = (1, 2, 3), (1_500, 3_000, 4_000)
    desk.fleet.prefixes.routed(row(desk, "d1").index, prefix, 4_000, tokens)
    outcome = desk.ask(job("a", prompt_tokens=4_000, prefix=prefix, prefix_tokens=tokens), NOW)
    assert isinstance(outcome, Placement)
    assert (outcome.prefill, outcome.decode) == (None, row(desk, "d1"))


def test_in_a_fleet_without_pairs_no_call_is_looked_at() -> None:
    desk = a_desk(1, p0=None)
    asked = job("a", prompt_tokens=4_000)
    request = asked.request
    desk.ask(asked, NOW)
    assert asked.request is request


# ---------------------------------------------------------------- a first leg fails


def test_the_prompt_goes_to_another_prefill_engine() -> None:
    desk = a_desk(2)
    failed = paired(desk)
    assert fail_prefill(desk, failed)
    assert failed.placement.prefill is row(desk, "p1")
    assert failed.placement.decode is row(desk, "d0")
    assert failed.attempt == 1
    assert taken_of(desk) == {
        "p0": (0, 0, 0),
        "p1": (1, 1_000, 1_000),
        "d0": (1, 1_100, 0),
        "d1": (0, 0, 0),
    }
    desk.release(failed)
    nothing_is_left(desk)


def test_without_another_one_who_decodes_computes_the_prompt() -> None:
    desk = a_desk(1)
    failed = paired(desk)
    assert not fail_prefill(desk, failed)
    assert (failed.placement.prefill, failed.attempt) == (None, 0)
    assert taken_of(desk)["d0"] == (1, 1_100, 1_000)
    desk.first_token(failed, 900.0, NOW + 900)
    assert taken_of(desk)["d0"] == (1, 1_100, 0)
    desk.release(failed)
    nothing_is_left(desk)


def test_another_connector_is_no_other_prefill_engine() -> None:
    desk = a_desk(2, p1=KvTransfer(connector="nixl", domain="rack-2"))
    assert not fail_prefill(desk, paired(desk))


def test_first_legs_are_tried_again_within_the_budget_that_all_retries_share() -> None:
    desk = a_desk(3, seats=100)
    moved = 0
    for number in range(60):
        failed = paired(desk, f"j{number}")
        moved += fail_prefill(desk, failed)
        desk.release(failed)
    # As with whole calls: a tenth of the calls and one a second, over the window of 10 s.
    again = RetryBudgets()
    for _ in range(60):
        again.note_request(job("x").request.tenant, MODEL, int(NOW), 0)
    allowed = 0
    while again.try_spend(
        job("x").request.tenant, MODEL, int(NOW), is_pool_overloaded=False
    ):  # fmt: skip
        allowed += 1
    assert 0 < moved <= allowed < 60


def test_a_failed_prefill_teaches_nothing_of_the_engine_that_did_not_fail() -> None:
    desk = a_desk(1)
    failed = paired(desk)
    fail_prefill(desk, failed)
    before = row(desk, "d0").rates
    desk.first_token(failed, 30_000.0, NOW + 30_000)
    assert row(desk, "d0").rates == before


# ---------------------------------------------------------------- what is believed of caches


def believed(desk: Desk[SimulatedJob], name: str) -> int:
    asked = job("other", prefix=PREFIX, prefix_tokens=PREFIX_TOKENS)
    return desk.cached(asked.request).get(row(desk, name).index, 0)


def test_a_prompt_that_was_not_computed_is_not_thought_to_be_there() -> None:
    desk = a_desk(1)
    failed = paired(desk)
    assert believed(desk, "p0") > 900
    fail_prefill(desk, failed)
    assert believed(desk, "p0") == 0
    assert believed(desk, "d0") > 900
    desk.unheld(failed, row(desk, "d0"))
    assert believed(desk, "d0") == 0


def test_what_was_there_before_stays_believed() -> None:
    desk = a_desk(1)
    index = row(desk, "p0").index
    desk.fleet.prefixes.routed(index, PREFIX[:2], 600, PREFIX_TOKENS[:2])
    failed = paired(desk)
    failed.placement = replace(failed.placement, cached_tokens=600)
    desk.unheld(failed, row(desk, "p0"))
    assert believed(desk, "p0") == 600
    kept = desk.fleet.prefixes._engines[index]
    assert kept.first_tokens == sum(kept.first.values()) == 600


def test_after_a_token_the_prompt_is_there() -> None:
    desk = a_desk(1)
    answered = paired(desk)
    desk.first_token(answered, 60.0, NOW + 60)
    desk.unheld(answered, row(desk, "d0"))
    assert believed(desk, "d0") > 900


# ---------------------------------------------------------------- a second leg fails


def test_kept_kv_goes_to_the_next_engine_of_its_domain() -> None:
    desk = a_desk(2)
    placed = paired(desk)
    holder = row(desk, "p0")
    desk.release_prefill(placed)
    desk.release(placed)
    desk._commit(
        placed, Placement(row(desk, "d1"), row(desk, "p1"), 0, 1_100, 50.0, 500.0, 1.0), NOW
    )
    assert desk.prefill_kept(placed, holder)
    assert placed.placement.prefill is None
    assert taken_of(desk)["p1"] == (0, 0, 0)
    desk.release(placed)
    nothing_is_left(desk)


def test_kept_kv_stays_in_its_domain() -> None:
    desk = a_desk(1, d1=KvTransfer(connector="nixl", domain="rack-2"))
    placed = paired(desk, decode="d1")
    assert not desk.prefill_kept(placed, row(desk, "p0"))


# ---------------------------------------------------------------- all of it, at random


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_nothing_is_taken_in_the_end(seed: int) -> None:
    """Random legs of random calls fail, end and go elsewhere; sums are as if counted by hand, then zero."""
    random_ = random.Random(seed)
    desk = a_desk(3, seats=50)
    live: list[SimulatedJob] = []
    for number in range(60):
        desk.retries.note_request(job("x").request.tenant, MODEL, int(NOW), 0)
        if not live or random_.random() < 0.4:
            prefill, decode = f"p{random_.randrange(3)}", f"d{random_.randrange(2)}"
            live.append(paired(desk, f"j{number}", prefill, decode))
        one = random_.choice(live)
        match random_.randrange(5):
            case 0 if one.is_holding_prefill:
                fail_prefill(desk, one)
            case 1 if one.is_holding_prefill:
                desk.release_prefill(one)
            case 2 if not one.is_holding_prefill:
                desk.first_token(one, 50.0, NOW + 50)
            case 3 if not one.is_holding_prefill and not one.is_first_token_seen:
                desk.prefill_kept(one, row(desk, f"p{random_.randrange(3)}"))
            case _:
                desk.release(one)
                usage = Usage(1_000, 0, 10, is_estimated=False)
                desk.ended(one, RequestState.SUCCEEDED, usage, 10.0, NOW + 100)
                live.remove(one)
        holding: dict[str, int] = dict.fromkeys(taken_of(desk), 0)
        for each in live:
            holding[each.placement.decode.engine_id] += 1
            if each.is_holding_prefill and each.placement.prefill is not None:
                holding[each.placement.prefill.engine_id] += 1
        assert {name: taken[0] for name, taken in taken_of(desk).items()} == holding
        assert min(taken[2] for taken in taken_of(desk).values()) >= 0
    for each in live:
        desk.release(each)
    nothing_is_left(desk)
    assert isinstance(row(desk, "p0"), EngineRow)
