"""What an engine declares of itself: ranks, stages, drafts, tiers, connectors, and what it lacks."""

from dataclasses import replace
from typing import Any

import httptools
import msgspec
import pytest

from controlplane.api.operator.engines import _is_of
from controlplane.domain.catalog import Catalog, GpuType, Model, Node, Role, SloClass
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import GpuTypeName, ModelName, NodeId, RegionName, SloClassName
from controlplane.gateway.upstream import _make_pool
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.axes.kv_headroom import is_measured_room
from controlplane.scheduler.legs import WHOLE
from controlplane.scheduler.perf_model import Forecast, engine_rates
from controlplane.scheduler.place import place
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import (
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Feature,
    Hello,
    Telemetry,
    decode,
    encode,
)
from tests.decision_builders import NOW_MS, call, engine_row

GPU = GpuType(
    name=GpuTypeName("h100"), hbm_bytes=80 * 10**9, bandwidth_bytes_per_s=3.35e12,
    flops_per_s=9.89e14, price_micro_usd_per_hour=3_600_000, price_source="test",
    price_date="2026-11-01",
)  # fmt: skip
MODEL = Model(
    name=ModelName("m"), parameters=8 * 10**9, layers=32, hidden_size=4096,
    weights_bytes=16 * 10**9, kv_bytes_per_token=131_072, context_tokens_max=32_768,
    load_ms=1_000, price_prompt_micro_usd_per_mtok=1, price_cached_micro_usd_per_mtok=1,
    price_completion_micro_usd_per_mtok=1,
)  # fmt: skip


def catalog(model: Model = MODEL) -> Catalog:
    return Catalog(
        revision=1,
        regions=(RegionName("eu"), RegionName("us")),
        gpu_types={GPU.name: GPU},
        models={model.name: model},
        slo_classes={
            SloClassName("s"): SloClass(
                name=SloClassName("s"), ttft_ms_max=1, tpot_ms_max=1, e2e_ms_max=1,
                value_micro_usd=1, late_micro_usd_per_s=1,
            )
        },
        nodes={
            NodeId("n"): Node(
                id=NodeId("n"), region=RegionName("us"), gpu_type=GPU.name, gpus=8,
                address="10.0.0.1", is_cordoned=False,
            )
        },
    )  # fmt: skip


def facts(engine_id: str = "e", **changes: Any) -> EngineFacts:
    base: dict[str, Any] = {
        "engine_id": engine_id, "model": "m", "role": "both", "port": 9000, "kind": "simulated",
        "state": EngineState.SERVING, "gpus": 1, "seats": 4, "kv_tokens": 10_000,
        "block_tokens": 16, "context_tokens_max": 32_768, "started_ms": 1,
    }  # fmt: skip
    return EngineFacts(**{**base, **changes})


def fleet_of(*engines: EngineFacts, model: Model = MODEL) -> FleetState:
    fleet = FleetState(PrefixIndex(), TickLog())
    fleet.use_catalog(catalog(model))
    told = Hello(node_id="n", agent_epoch=1, version="0", engines=list(engines))
    assert fleet.hello(decode(encode(told), Hello), 1_000.0)
    return fleet


def report(fleet: FleetState, **changes: Any) -> EngineRow:
    base: dict[str, Any] = {"engine_id": "e", "running": 0, "waiting": 0, "kv_used_ratio": 0.0}
    told = Telemetry(node_id="n", agent_epoch=1, engines=[EngineTelemetry(**{**base, **changes})])
    fleet.telemetry(decode(encode(told), Telemetry), 2_000.0)
    row = fleet.row_of("e")
    assert row is not None
    return row


# ---------------------------------------------------------------- ranks


def test_a_rank_is_dialled_by_its_header() -> None:
    fleet = fleet_of(facts("e/0", rank=0), facts("e/1", rank=1), facts("f"))
    rows = {row.engine_id: row for row in fleet.rows_for(ModelName("m"))}
    heads = {name: _make_pool(fleet.address_of(row)).host_header for name, row in rows.items()}
    plain = b"host: 10.0.0.1:9000\r\n"
    assert heads == {
        "e/0": plain + b"x-data-parallel-rank: 0\r\n",
        "e/1": plain + b"x-data-parallel-rank: 1\r\n",
        "f": plain,
    }


def test_the_header_is_a_header() -> None:
    fleet = fleet_of(facts("e/1", rank=1))
    row = fleet.row_of("e/1")
    assert row is not None
    seen: dict[bytes, bytes] = {}

    class Heard:
        def on_header(self, name: bytes, value: bytes) -> None:
            seen[name] = value

    head = b"POST /v1/completions HTTP/1.1\r\n" + _make_pool(fleet.address_of(row)).host_header
    httptools.HttpRequestParser(Heard()).feed_data(head + b"content-length: 0\r\n\r\n")
    assert seen[b"x-data-parallel-rank"] == b"1"
    assert seen[b"host"] == b"10.0.0.1:9000"


@pytest.mark.parametrize(
    ("declared", "engine_id", "is_of"),
    [("e", "e", True), ("e/0", "e", True), ("e/12", "e", True), ("e/0", "e/0", True),
     ("e/a", "e", False), ("e/", "e", False), ("f/0", "e", False), ("e0", "e", False),
     ("e/0/1", "e", False), ("e/0/1", "e/0", True)],
)  # fmt: skip
def test_who_names_an_engine_names_its_ranks(declared: str, engine_id: str, is_of: bool) -> None:  # noqa: FBT001 - a case of a table
    assert _is_of(declared, engine_id) is is_of


# ---------------------------------------------------------------- what is not told


@pytest.mark.parametrize(("running", "expected"), [(0, 0), (1, 2_500), (3, 7_500), (9, 10_000)])
def test_unknown_kv_use_is_a_seats_part_for_each_call(running: int, expected: int) -> None:
    """Four seats share 10,000 tokens. What is not told is never read as empty."""
    fleet = fleet_of(facts())
    row = report(fleet, running=running, kv_used_ratio=None)
    assert row.kv_tokens_used == expected
    assert report(fleet, running=running, kv_used_ratio=0.25).kv_tokens_used == 2_500


def test_unknown_kv_use_leaves_no_room_on_a_full_engine() -> None:
    fleet = fleet_of(facts())
    row = report(fleet, running=4, kv_used_ratio=None)
    forecast = Forecast(call(prompt_tokens=100), row, 0, NOW_MS, WHOLE, 0.0)
    assert not is_measured_room(row, forecast)
    row = report(fleet, running=0, kv_used_ratio=None)
    assert is_measured_room(row, forecast)


def test_an_engine_without_a_prefix_cache_is_expected_to_hold_nothing() -> None:
    held = {}
    for lacks in ([], [Feature.PREFIX_CACHE]):
        fleet = fleet_of(facts(lacks=lacks))
        row = fleet.row_of("e")
        assert row is not None
        request = call(prefix=(1, 2), prefix_tokens=(500, 1_000))
        fleet.prefixes.routed(row.index, request.prefix, 1_000, request.prefix_tokens)
        held[bool(lacks)] = fleet.prefixes.cached(request.prefix, request.prefix_tokens, 1_000)
    assert held[False]
    assert not held[True]


# ---------------------------------------------------------------- KV between engines


def pair_of(prefill: dict[str, Any], decode_: dict[str, Any]) -> Placement:
    """Where a long prompt goes: the prefill engine computes for a hundredth of the price."""
    rows = (
        engine_row(0, role=Role.PREFILL, micro_usd_per_ms=0.01),
        engine_row(1, role=Role.DECODE),
    )
    for row, changes in zip(rows, (prefill, decode_), strict=True):
        for name, value in changes.items():
            setattr(row, name, value)
    found = place(call(prompt_tokens=20_000), rows, {}, NOW_MS)
    assert isinstance(found, Placement)
    return found


def test_pairs_are_of_engines_that_understand_each_other() -> None:
    assert pair_of({}, {}).prefill is not None
    assert pair_of({"pair_key": 7}, {"pair_key": 7}).prefill is not None
    assert pair_of({"pair_key": 7}, {"pair_key": 8}).prefill is None
    assert pair_of({"pair_key": 0}, {"pair_key": 0}).prefill is None


def test_what_is_lacked_reaches_the_row_and_its_copies() -> None:
    fleet = fleet_of(facts(lacks=[Feature.TOKEN_IDS]), facts("f"))
    rows = {row.engine_id: row for row in fleet.rows_for(ModelName("m"))}
    assert rows["e"].lacks == {"token_ids"}
    assert rows["f"].lacks == frozenset()
    copied = rows["e"].as_of(rows["e"].dynamic())
    assert (copied.lacks, copied.adapter_slots) == (rows["e"].lacks, rows["e"].adapter_slots)


# ---------------------------------------------------------------- stages, experts, drafts, tiers


def test_stages_do_not_shorten_a_step_and_share_what_sequences_add() -> None:
    """By hand: the weights of 16 GB pass one stage's GPU after another, 4.78 ms at 3.35 TB/s in all."""
    one = engine_rates(MODEL, GPU, 1)
    two = engine_rates(MODEL, GPU, 2, pipeline=2)
    assert two.decode_ms_base == pytest.approx(one.decode_ms_base)
    assert two.decode_ms_per_seq == pytest.approx(one.decode_ms_per_seq / 2)
    assert two.decode_ms_per_kv_token == pytest.approx(one.decode_ms_per_kv_token / 2)
    assert two.micro_usd_per_ms == pytest.approx(2 * one.micro_usd_per_ms)
    tensor = engine_rates(MODEL, GPU, 2)
    assert tensor.decode_ms_base < one.decode_ms_base
    # Weights that are held once leave more room than two GPUs' worth of one.
    assert two.kv_tokens_capacity == tensor.kv_tokens_capacity


def test_experts_are_read_from_all_ranks() -> None:
    moe = replace(
        MODEL, parameters_active=10**9, experts=64, experts_active=4,
        expert_weights_bytes=14 * 10**9,
    )  # fmt: skip
    alone = engine_rates(moe, GPU, 1)
    shared = engine_rates(moe, GPU, 1, expert_gpus=8)
    # By hand: 1.43 x 14 GB at 3.35 TB/s are 5.98 ms for a prompt, and an eighth of it on eight GPUs.
    saved_ms = 1.43 * 14e9 / 3.35e9 * 7 / 8
    assert alone.prefill_base_ms - shared.prefill_base_ms == pytest.approx(saved_ms)
    assert shared.decode_ms_base < alone.decode_ms_base


def test_stages_of_the_facts_reach_the_row() -> None:
    fleet = fleet_of(facts("a", gpus=4), facts("b", gpus=4, pipeline=2))
    rows = {row.engine_id: row for row in fleet.rows_for(ModelName("m"))}
    assert rows["b"].decode_ms_base > rows["a"].decode_ms_base
    assert rows["b"].micro_usd_per_ms == rows["a"].micro_usd_per_ms


def test_drafts_that_are_kept_make_steps_worth_more() -> None:
    fleet = fleet_of(facts(speculative_tokens=4))
    row = fleet.row_of("e")
    assert row is not None
    before = row.published
    # Too few to tell.
    assert report(fleet, drafts=100, draft_tokens_accepted=150).published == before
    row = report(fleet, drafts=1_000, draft_tokens_accepted=1_500)
    # A step gives 1 + 1.5 tokens and computes five for each sequence.
    assert row.decode_ms_base == pytest.approx(before.decode_ms_base / 2.5)
    assert row.decode_ms_per_kv_token == pytest.approx(before.decode_ms_per_kv_token / 2.5)
    assert row.decode_ms_per_seq == pytest.approx(before.decode_ms_per_seq * 5 / 2.5)
    assert row.prefill_ms_per_token == before.prefill_ms_per_token
    # Of the next thousand drafts nothing is kept: back to a token a step, after a restart too.
    row = report(fleet, drafts=2_000, draft_tokens_accepted=1_500)
    assert row.decode_ms_base == pytest.approx(before.decode_ms_base)
    row = report(fleet, drafts=300, draft_tokens_accepted=300)
    assert row.decode_ms_base == pytest.approx(before.decode_ms_base / 2)


def test_drafts_of_an_engine_that_declares_none_mean_nothing() -> None:
    fleet = fleet_of(facts())
    row = fleet.row_of("e")
    assert row is not None
    before = row.published
    assert report(fleet, drafts=1_000, draft_tokens_accepted=1_500).published == before


def test_what_was_learned_of_the_pace_survives_better_drafts() -> None:
    fleet = fleet_of(facts(speculative_tokens=4))
    row = fleet.row_of("e")
    assert row is not None
    for _ in range(200):
        fleet.paced(row, row.decode_ms_base, 2 * row.published.decode_ms_base)
    learned = row.decode_ms_base + row.decode_ms_per_seq
    report(fleet, drafts=1_000, draft_tokens_accepted=1_000)
    # The learned pace was measured with those very drafts; it is not halved once more.
    assert row.decode_ms_base + row.decode_ms_per_seq == pytest.approx(learned, rel=0.15)


def test_prefixes_that_left_the_gpu_are_expected_in_the_hosts_memory() -> None:
    held: dict[int, list[int]] = {}
    for host in (0, 131_072 * 50_000):
        fleet = fleet_of(facts(kv_tokens=2_000, kv_host_bytes=host))
        row = fleet.row_of("e")
        assert row is not None
        for at in range(10):
            fleet.prefixes.routed(row.index, (100 + at,), 1_000, (1_000,))
        held[host] = [
            fleet.prefixes.cached((100 + at,), (1_000,), 1_000).get(row.index, 0)
            for at in range(10)
        ]
    assert held[0] == [0] * 8 + [1_000] * 2
    kept = held[131_072 * 50_000]
    assert kept[8:] == [1_000] * 2
    # By hand: a token's 131,072 bytes come back at 25 GB/s in 5.2 us; computing it takes 2.10 x 16 GFLOP at
    # 989 TFLOP/s, 34.0 us.
    saved_ratio = 1 - 131_072 / 25e9 / (2.10 * 16e9 / 9.89e14)
    assert kept[:8] == [pytest.approx(1_000 * saved_ratio, abs=1)] * 8


def test_old_agents_say_nothing_of_all_this() -> None:
    told = msgspec.json.decode(encode(Hello(
        node_id="n", agent_epoch=1, version="0", engines=[facts()])))  # fmt: skip
    plain = {name: told["engines"][0][name] for name in (
        "engine_id", "model", "role", "port", "kind", "state", "gpus", "seats", "kv_tokens",
        "block_tokens", "context_tokens_max", "started_ms")}  # fmt: skip
    told["engines"] = [plain]
    read = decode(msgspec.json.encode(told), Hello)
    assert read.engines[0] == facts()
