"""GPU mixes: the proposer against fleets counted by hand, prices that only scale, types that tight work never meets."""

import json
from dataclasses import replace
from itertools import product

import pytest

from cli.failure import CommandFailure
from cli.simulate.bounds import isolated_s
from cli.simulate.contracts import WorldOptions
from cli.simulate.experiments import Runner, Span, Wanted
from cli.simulate.fleets import fleet
from cli.simulate.gpu_mix import (
    MixQuestion,
    PriceVector,
    engine_spec,
    gpu_mix,
    mixes_around,
    propose,
    read_prices,
)
from cli.simulate.headway import Headway
from cli.simulate.report import render
from cli.simulate.workloads import capacity_per_s, draw_plans, workload
from cli.simulate.world import play
from controlplane.scheduler.axes.gpu_type import types_in_time
from tests.decision_builders import call, engine_row
from tests.planner_builders import demand, pool

TINY = Span(warm_up_s=10.0, measured_s=40.0, cool_down_s=5.0)


# ------------------------------------------------------------ the proposer


def cheapest_by_hand(need, kinds):
    """All fleets of up to 8 engines of each kind, counted."""
    fleets = [
        counts
        for counts in product(range(8), repeat=len(kinds))
        if sum(count * capacity for count, (_, capacity) in zip(counts, kinds, strict=True)) >= need
    ]
    return min(
        sum(count * usd for count, (usd, _) in zip(counts, kinds, strict=True)) for counts in fleets
    )


@pytest.mark.parametrize(
    ("need", "usd", "engines"),
    [(99, 6, {"b": 1}), (199, 10, {"a": 1}), (249, 16, {"a": 1, "b": 1}), (349, 20, {"a": 2})],
)
def test_the_proposal_is_the_cheapest_fleet_in_whole_engines(need, usd, engines):
    prices = {"a": 10.0, "b": 6.0}
    assert cheapest_by_hand(need, [(10, 200), (6, 100)]) == usd
    found = propose([demand(float(need))], [pool("a", 200.0), pool("b", 100.0)], prices)
    assert found == engines


def test_mixes_are_the_proposal_and_one_engine_more_or_less_of_each_other_type():
    mixes = mixes_around({"a": 4, "b": 1}, "a", ("a", "b", "c"))
    besides = [mix.beside for mix in mixes]
    assert besides == [(("b", 1),), (("b", 2),), (("b", 1), ("c", 1))]
    # One engine of each where the planner wants none.
    assert [mix.beside for mix in mixes_around({"a": 4}, "a", ("a", "b", "c"))] == [
        (("b", 1),),
        (("c", 1),),
    ]


# ------------------------------------------------------------ prices


def played(factor):
    usd = {"h100-sxm": 3.25 * factor, "a100-80": 1.5 * factor}
    question = MixQuestion(
        model="8b",
        prices=PriceVector(name="own", usd_per_gpu_hour=usd, source="own", date="2026-01-01"),
        ratio_min=0.75,
    )
    wanted = Wanted(workloads=("coding",), loads=(1.5,), policies=("sticky",), seeds=2, span=TINY)
    with Runner(processes=1) as runner:
        return gpu_mix(wanted, runner, question)


@pytest.fixture(scope="module")
def document():
    return played(1.0)


def test_dollars_follow_the_prices_and_nothing_else_does(document):
    twice = played(2.0)
    reached = 0
    for once, again in zip(document["cells"], twice["cells"], strict=True):
        assert again["fleet"] == once["fleet"]
        assert again["success_ratio"] == once["success_ratio"]
        assert again["composition"] == once["composition"]
        if once["fleet_usd_at_floor"] is not None:
            reached += 1
            assert again["fleet_usd_at_floor"] == pytest.approx(2 * once["fleet_usd_at_floor"])
            # One GPU an engine: engines times price, by hand.
            counts = once["composition"]
            by_hand = 3.25 * counts.get("h100-sxm", 0.0) + 1.5 * counts.get("a100-80", 0.0)
            assert once["fleet_usd_at_floor"] == pytest.approx(by_hand, abs=1e-4)
    assert reached >= 2


def test_the_same_seeds_give_the_same_bytes(document):
    assert json.dumps(played(1.0), allow_nan=False) == json.dumps(document, allow_nan=False)


def test_singles_and_mixes_stand_beside_one_another(document):
    fleets = {cell["fleet"]: cell for cell in document["cells"]}
    assert {"h100-sxm", "a100-80"} <= set(fleets)
    mixes = [cell for cell in document["cells"] if cell["is_mix"]]
    assert mixes
    best = min(
        cell["fleet_usd_at_floor"]
        for cell in document["cells"]
        if not cell["is_mix"] and cell["fleet_usd_at_floor"] is not None
    )
    for cell in mixes:
        if cell["fleet_usd_at_floor"] is not None:
            ratio = cell["fleet_usd_ratio_to_best_single"]["value"]
            assert ratio == pytest.approx(cell["fleet_usd_at_floor"] / best, rel=1e-4)
    text = render(document)
    assert all(cell["fleet"] in text for cell in document["cells"])


def test_prices_ship_with_source_and_date_and_nonsense_is_refused(tmp_path):
    vectors = read_prices()
    assert {"low", "mid", "list"} <= set(vectors)
    assert all(each.source and each.date for each in vectors.values())
    spec = engine_spec("70b", "h100-sxm", vectors["mid"])
    assert spec.micro_usd_per_hour == 4 * 3.25e6
    bad = tmp_path / "prices.yaml"
    bad.write_text("vectors: {own: {date: 2026-01-01, source: me, usd_per_gpu_hour: {l4: -1}}}")
    with pytest.raises(CommandFailure):
        read_prices(bad)


# ------------------------------------------------------------ tight work and slow types


class Witness(Headway):
    """Notes where each workflow began."""

    def __init__(self):
        super().__init__()
        self.began = {}

    def _send(self, job):
        if job.call.step_number == 0:
            self.began[job.call.plan.number] = self._engine_of[job.placement.decode.engine_id]
        super()._send(job)


def test_no_workflow_begins_on_a_type_that_can_not_end_it_in_time():
    """L40S engines, four times slower and the cheapest, have seats; those of the H100 engines are scarce."""
    mixed = fleet("mixed")
    rate_per_s = 0.7 * capacity_per_s(workload("coding"), mixed)
    plans = draw_plans(workload("coding"), seed=11, rate_per_s=rate_per_s, horizon_s=1_020.0)
    witness = Witness()
    play(plans, mixed, witness, WorldOptions(seed=11, horizon_s=1_020.0, warm_up_s=300.0))
    begun = [
        (plan, mixed.engines[witness.began[plan.number]])
        for plan in plans
        if plan.number in witness.began and plan.arrival_s >= 300.0
    ]
    # Work with time to spare is welcome there; what can not end there even alone, by its true size, is not.
    assert any(spec.gpu.name == "l40s" for _, spec in begun)
    spoiled = [plan.number for plan, spec in begun if isolated_s(plan, spec) > plan.deadline_s]
    assert spoiled == []
    # Nor is what has half its own time to spare, of which most would be late there beside others.
    tight = [spec.gpu.name for plan, spec in begun if plan.priority == 9]
    assert len(tight) > 70
    assert tight.count("l40s") <= 2


def row_of(at, gpu, bit, rates):
    """An engine that decodes a token in `rates` milliseconds and computes a prompt in no time."""
    row = engine_row(
        at,
        gpu_type=gpu,
        gpu_bit=bit,
        prefill_base_ms=0.0,
        prefill_ms_per_token=0.0,
        prefill_ms_per_token_sq=0.0,
        decode_ms_base=rates,
        decode_ms_per_seq=0.0,
        decode_ms_per_kv_token=0.0,
    )
    row.is_accepting = True
    return row


@pytest.mark.parametrize(
    ("left_ms", "tolerance", "expected"),
    [
        # 2 steps of 100 decodes and a pause of 1 s: 3, 5 and 9 s on engines of 10, 20 and 40 ms a token.
        (10_000, 0.0, 0b111),
        (8_999, 0.0, 0b011),
        (4_999, 0.0, 0b001),
        # Late everywhere: those within a quarter of the fastest.
        (1_000, 0.0, 0b001),
        # The deadline tells of a size that is tight: 5.2 / 2.5 is 2.08 times the fastest, 10.2 / 2.5 is 4.08.
        (60_000, 5.2, 0b011),
        (60_000, 10.2, 0b111),
        (60_000, 1.0, 0b001),
    ],
)
def test_types_in_time_by_hand(left_ms, tolerance, expected):
    rows = [row_of(0, "slow", 4, 40.0), row_of(1, "fast", 1, 10.0), row_of(2, "half", 2, 20.0)]
    request = call(
        workflow="w",
        home=None,
        step=0,
        steps_expected=2,
        step_gap_ms=1_000,
        completion_tokens_expected=101,
        workflow_deadline_ms=left_ms,
        gpu_types=0b111,
    )
    assert types_in_time(request, rows, 0, tolerance) == expected
    # Who has a home stays there, whatever type it is; and a type that is gone is no choice to wait for.
    assert types_in_time(replace(request, home="slow-0"), rows, 0, tolerance) == 0b111
    rows[1].is_accepting = rows[2].is_accepting = False
    assert types_in_time(request, rows, 0, tolerance) == 0b111
