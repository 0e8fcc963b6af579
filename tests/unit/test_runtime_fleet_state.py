"""The live fleet: what agents say, what credits allow, what is taken and given back."""

from dataclasses import replace

import msgspec
import pytest

from controlplane.domain.catalog import Catalog, GpuType, Model, Node, Scope, SloClass
from controlplane.domain.decision import Placement, Reason
from controlplane.domain.fleet import fits
from controlplane.domain.ids import (
    GpuTypeName,
    ModelName,
    NodeId,
    RegionName,
    RequestId,
    SloClassName,
    TenantId,
)
from controlplane.domain.request import UNLIMITED_MICRO_USD, Request
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.perf_model import engine_rates, tpot_ms, uncached_prefill_ms
from controlplane.scheduler.place import object_to
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import (
    Beat,
    Bye,
    CreditGrant,
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Hello,
    Telemetry,
)

NOW = 1_000_000.0
TTL_MS = 15_000


def catalog(*, revision: int = 1, is_cordoned: bool = False, model: str = "small") -> Catalog:
    return Catalog(
        revision=revision,
        regions=(RegionName("eu"), RegionName("us")),
        gpu_types={
            GpuTypeName("h100"): GpuType(
                name=GpuTypeName("h100"), hbm_bytes=80 * 10**9, bandwidth_bytes_per_s=3.35e12,
                flops_per_s=9.89e14, price_micro_usd_per_hour=3_250_000, price_source="test",
                price_date="2026-11-01",
            )
        },
        models={
            ModelName(model): Model(
                name=ModelName(model), parameters=8 * 10**9, layers=32, hidden_size=4096,
                weights_bytes=16 * 10**9, kv_bytes_per_token=131_072, context_tokens_max=32_768,
                load_ms=1_000, price_prompt_micro_usd_per_mtok=1, price_cached_micro_usd_per_mtok=1,
                price_completion_micro_usd_per_mtok=1,
            )
        },
        slo_classes={
            SloClassName("s"): SloClass(
                name=SloClassName("s"), ttft_ms_max=1, tpot_ms_max=1, e2e_ms_max=1,
                value_micro_usd=1, late_micro_usd_per_s=1,
            )
        },
        nodes={
            NodeId("n1"): Node(
                id=NodeId("n1"), region=RegionName("us"), gpu_type=GpuTypeName("h100"), gpus=2,
                address="10.0.0.1", is_cordoned=is_cordoned,
            )
        },
    )  # fmt: skip


def facts(
    engine: str = "e1", *, state: EngineState = EngineState.SERVING, started_ms: int = 1
) -> EngineFacts:
    return EngineFacts(
        engine_id=engine, model="small", role="both", port=9000, kind="simulated", state=state,
        gpus=1, seats=4, kv_tokens=10_000, block_tokens=16, context_tokens_max=32_768,
        started_ms=started_ms,
    )  # fmt: skip


def hello(*engines: EngineFacts, epoch: int = 1) -> Hello:
    return Hello(node_id="n1", agent_epoch=epoch, version="0", engines=list(engines))


def grant(seats: int = 4, kv_tokens: int = 10_000, epoch: int = 1) -> CreditGrant:
    return CreditGrant(
        node_id="n1", agent_epoch=epoch, ttl_ms=TTL_MS, holds={"e1": (seats, kv_tokens)}
    )


def request(prompt_tokens: int = 1_000) -> Request:
    return Request(
        id=RequestId("r1"), tenant=TenantId("t"), model=ModelName("small"), arrival_ms=int(NOW),
        prompt_tokens=prompt_tokens, completion_tokens_max=100, completion_tokens_expected=100,
        prefix=(), prefix_tokens=(), regions=3, gpu_types=1, weight=1.0, ttft_ms_max=1,
        tpot_ms_max=1, deadline_ms=int(NOW) + 60_000, value_micro_usd=1, late_micro_usd_per_s=1,
        scope=Scope.CHAT, workflow=None, step=0, steps_expected=1,
        workflow_deadline_ms=int(NOW) + 60_000, workflow_spent_micro_usd=0,
        workflow_remaining_micro_usd=UNLIMITED_MICRO_USD, calls_in_flight=0, fan_out_max=1,
        step_gap_ms=0, home=None, is_single_engine=False,
        priority=5, is_begun=False, not_before_ms=0, waits_for_idle=False, is_preferred=False,
    )  # fmt: skip


@pytest.fixture
def fleet() -> FleetState:
    state = FleetState(PrefixIndex(), TickLog())
    state.use_catalog(catalog())
    assert state.hello(hello(facts()), NOW)
    return state


def placement(fleet: FleetState, kv_tokens: int = 1_100) -> Placement:
    [row] = fleet.rows_for(ModelName("small"))
    return Placement(row, None, 0, kv_tokens, 10.0, 100.0, 1.0)


def test_an_engine_is_dialled_at_its_nodes_address(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    assert fleet.address_of(row) == ("10.0.0.1", 9000)
    assert (row.region_bit, row.gpu_bit) == (2, 1)


def test_nothing_fits_before_credits_are_lent_nor_after_they_expire(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    assert not fits(row, 1, int(NOW))
    assert fleet.granted(grant(), NOW)
    assert fits(row, 10_000, int(NOW))
    assert not fits(row, 10_001, int(NOW))
    assert fits(row, 1, int(NOW) + TTL_MS - 1)
    assert not fits(row, 1, int(NOW) + TTL_MS)


def test_credits_of_an_agents_earlier_life_are_void(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    fleet.granted(grant(), NOW)
    assert fleet.hello(hello(facts(), epoch=2), NOW)
    assert not fits(row, 1, int(NOW))
    assert not fleet.granted(grant(epoch=1), NOW)
    assert not fits(row, 1, int(NOW))
    assert not fleet.hello(hello(epoch=1), NOW), "an older hello changes nothing"
    assert fleet.rows_for(ModelName("small"))
    assert fleet.granted(grant(epoch=2), NOW)
    assert fits(row, 1, int(NOW))


def test_what_is_taken_is_given_back_once(fleet: FleetState) -> None:
    fleet.granted(grant(seats=1), NOW)
    here = placement(fleet)
    fleet.take(request(), here)
    assert not fits(here.decode, 1, int(NOW))
    assert (here.decode.seats_taken, here.decode.kv_tokens_taken) == (1, 1_100)
    assert here.decode.prefill_tokens_pending == 1_000
    fleet.prefilled(request(), here)
    fleet.release_decode(here)
    assert fits(here.decode, 1, int(NOW))
    assert (here.decode.seats_taken, here.decode.kv_tokens_taken) == (0, 0)
    assert here.decode.prefill_tokens_pending == 0
    with pytest.raises(RuntimeError, match="released twice"):
        fleet.release_decode(here)


def test_a_call_gives_back_to_the_row_that_it_took_from(fleet: FleetState) -> None:
    """An engine that leaves and comes back is another row; the old one still ends at zero."""
    fleet.granted(grant(), NOW)
    here = placement(fleet)
    fleet.take(request(), here)
    fleet.hello(hello(), NOW)
    fleet.hello(hello(facts(started_ms=2)), NOW)
    [fresh] = fleet.rows_for(ModelName("small"))
    assert fresh is not here.decode
    assert fresh.seats_taken == 0
    fleet.release_decode(here)
    assert here.decode.seats_taken == 0
    assert fresh.seats_taken == 0


def test_beats_tell_who_must_introduce_itself_again(fleet: FleetState) -> None:
    def beat(state: EngineState = EngineState.SERVING, epoch: int = 1, engine: str = "e1") -> Beat:
        return Beat(node_id="n1", agent_epoch=epoch, engine_states={engine: state})

    [row] = fleet.rows_for(ModelName("small"))
    assert fleet.beat(beat(), NOW)
    assert not fleet.beat(beat(epoch=2), NOW)
    assert not fleet.beat(beat(engine="e2"), NOW)
    assert row.is_accepting
    assert not fleet.beat(beat(EngineState.DRAINING), NOW), "its state changed: a hello is due"
    assert not row.is_accepting
    assert not FleetState(PrefixIndex(), TickLog()).beat(beat(), NOW)


def test_a_silent_node_gets_no_calls_until_it_is_heard(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    fleet.silence(NOW + 3_999, 4_000)
    assert row.is_accepting
    fleet.grace(NOW + 5_000)
    fleet.silence(NOW + 8_000, 4_000)
    assert row.is_accepting, "the bus was away: nobody could be heard"
    fleet.silence(NOW + 9_001, 4_000)
    assert not row.is_accepting
    fleet.beat(Beat(node_id="n1", agent_epoch=1, engine_states={"e1": EngineState.SERVING}), NOW)
    assert row.is_accepting


def test_a_cordoned_node_accepts_nothing(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    fleet.use_catalog(catalog(revision=2, is_cordoned=True))
    assert not row.is_accepting
    fleet.beat(Beat(node_id="n1", agent_epoch=1, engine_states={"e1": EngineState.SERVING}), NOW)
    assert not row.is_accepting
    fleet.use_catalog(catalog(revision=3))
    assert row.is_accepting


def test_engines_of_unknown_nodes_and_models_are_no_candidates(fleet: FleetState) -> None:
    stranger = Hello(node_id="n9", agent_epoch=1, version="0", engines=[facts("x")])
    assert not fleet.hello(stranger, NOW)
    fleet.use_catalog(catalog(revision=2, model="other"))
    assert fleet.rows_for(ModelName("small")) == ()
    fleet.bye(Bye(node_id="n1", agent_epoch=1))
    assert not fleet.nodes


def test_telemetry_of_another_life_is_not_taken(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))

    def report(epoch: int, running: int) -> Telemetry:
        engine = EngineTelemetry(engine_id="e1", running=running, waiting=0, kv_used_ratio=0.5)
        return Telemetry(node_id="n1", agent_epoch=epoch, engines=[engine])

    fleet.telemetry(report(2, 9), NOW)
    assert row.running == 0
    fleet.telemetry(report(1, 3), NOW)
    assert (row.running, row.kv_tokens_used) == (3, 5_000)


def test_predictions_are_corrected_within_bounds(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    published = row.rates
    for factor, most in ((1_000_000.0, 4.0), (0.0, 0.25)):
        for number in range(3_000):
            # Short prompts and long ones, so that both parts of a prefill can be told apart.
            call = request(prompt_tokens=100 if number % 2 else 20_000)
            predicted_ms = uncached_prefill_ms(call, row, 0)
            fleet.first_token(row, predicted_ms, factor * predicted_ms, NOW, request=call)
        assert row.ttft_correction == pytest.approx(most, rel=1e-3)
        assert row.prefill_ms_per_token == pytest.approx(
            most * published.prefill_ms_per_token, rel=1e-3
        )
        assert row.prefill_base_ms == pytest.approx(most * published.prefill_base_ms, rel=1e-3)
    assert row.tpot_correction == 1.0


def test_a_pace_corrects_decoding_and_survives_a_new_declaration(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    published = row.rates
    row.running = 4
    for _ in range(400):
        fleet.paced(row, tpot_ms(row, 4, 0, 0), 2.0 * published.decode_ms_base)
    assert tpot_ms(row, 4, 0, 0) == pytest.approx(2.0 * published.decode_ms_base, rel=0.01)
    assert row.tpot_correction > 1.5
    assert row.ttft_correction == 1.0
    learned = row.rates
    fleet.use_catalog(catalog(revision=2))
    assert row.rates == learned
    fleet.hello(hello(facts(started_ms=2)), NOW)
    assert row.rates == learned


def test_a_pace_is_held_against_the_batch_between_then_and_now(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    published = row.rates
    row.running = 40
    then_ms = tpot_ms(row, 120, 0, 0)
    for _ in range(50):
        fleet.paced(row, then_ms, tpot_ms(row, 80, 0, 0))
    assert row.rates == pytest.approx(published)


def test_what_was_learned_holds_for_rates_that_are_declared_anew(fleet: FleetState) -> None:
    [row] = fleet.rows_for(ModelName("small"))
    for _ in range(100):
        fleet.paced(row, row.decode_ms_base, 2.0 * row.rates.decode_ms_base / row.tpot_correction)
    factor = row.decode_ms_base / engine_ms(catalog())
    assert factor > 1.2
    faster = catalog(revision=2)
    faster.gpu_types[GpuTypeName("h100")] = replace(
        faster.gpu_types[GpuTypeName("h100")], bandwidth_bytes_per_s=6.7e12
    )
    fleet.use_catalog(faster)
    assert row.decode_ms_base == pytest.approx(factor * engine_ms(faster))


def engine_ms(declared: Catalog) -> float:
    model, gpu = declared.models[ModelName("small")], declared.gpu_types[GpuTypeName("h100")]
    return engine_rates(model, gpu, 1).decode_ms_base


@pytest.mark.parametrize(
    ("state", "reason"),
    [(EngineState.STARTING, Reason.WARMING), (EngineState.FAILED, Reason.NO_CAPACITY)],
)
def test_an_engine_that_never_told_its_capacity_is_not_thought_too_small(
    state: EngineState, reason: Reason
) -> None:
    fleet = FleetState(PrefixIndex(), TickLog())
    fleet.use_catalog(catalog())
    untold = msgspec.structs.replace(facts(state=state), seats=0, kv_tokens=0, context_tokens_max=0)
    fleet.hello(hello(untold), NOW)
    rows = fleet.rows_for(ModelName("small"))
    assert object_to(request(), rows, {}, int(NOW)).reason is reason
    assert not fits(rows[0], 1, int(NOW))
    too_long = object_to(request(prompt_tokens=40_000), rows, {}, int(NOW))
    assert too_long.reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_prefixes_are_remembered_once_a_starting_engine_tells_its_capacity() -> None:
    prefixes = PrefixIndex()
    fleet = FleetState(prefixes, TickLog())
    fleet.use_catalog(catalog())
    starting = msgspec.structs.replace(facts(state=EngineState.STARTING), seats=0, kv_tokens=0)
    fleet.hello(hello(starting), NOW)
    fleet.hello(hello(facts()), NOW)
    [row] = fleet.rows_for(ModelName("small"))
    prefixes.routed(row.index, (11, 22), 2_000)
    prefixes.routed(row.index, (33, 44), 2_000)
    assert prefixes.match((11, 22)) == {row.index: 2}
    fleet.hello(hello(facts(started_ms=2)), NOW)
    assert not prefixes.match((11, 22)), "a restarted engine has an empty cache"
