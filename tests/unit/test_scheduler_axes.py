"""Each axis on its own: what it charges, what it refuses, in which words."""

from dataclasses import replace
from math import inf, log
from random import Random

import pytest

from controlplane.domain.decision import Axis
from controlplane.scheduler.axes import AXES
from controlplane.scheduler.legs import DECODE, PREFILL, WHOLE
from controlplane.scheduler.perf_model import Forecast, engine_rates, tpot_ms
from tests.decision_builders import H100, LLAMA_70B_FP8, NOW_MS, call, engine_row

BY_NAME = {entry.axis: entry for entry in AXES}


def ask(axis, request, row, cached=0, leg=WHOLE, before_ms=0.0):
    forecast = Forecast(request, row, cached, NOW_MS, leg, before_ms)
    entry = BY_NAME[axis]
    return entry.cost(request, row, forecast), entry.objection(request, row, forecast)


def test_every_axis_is_asked_in_the_order_of_the_enum():
    assert tuple(entry.axis for entry in AXES) == tuple(Axis)


@pytest.mark.parametrize("axis", list(Axis))
def test_an_idle_engine_is_feasible_for_a_plain_call(axis):
    cost, objection = ask(axis, call(), engine_row())
    assert 0 <= cost < inf
    assert objection is None


# ---------------------------------------------------------------- gpu_type


def test_gpu_time_is_prefill_plus_shared_decode_steps():
    row = engine_row(micro_usd_per_ms=2.0)
    cost, _ = ask(Axis.GPU_TYPE, call(), row)
    prefill = 10 + 1_000 * 0.1
    decode = 100 * (10 / 8 + 0.1 + 1_050 * 0.0001)
    assert cost == pytest.approx(2.0 * (prefill + decode))


def test_cached_tokens_are_not_computed_again_but_for_the_last():
    cost, _ = ask(Axis.GPU_TYPE, call(completion_tokens_expected=0), engine_row(), cached=1_000)
    assert cost == pytest.approx(10 + 0.1)


@pytest.mark.parametrize(
    ("request_", "row", "words"),
    [
        (call(), engine_row(model="other"), "it serves `other`"),
        (call(regions=2), engine_row(), "policy does not allow region `north`"),
        (call(gpu_types=2), engine_row(), "policy does not allow GPU type `h100`"),
        (
            call(),
            engine_row(context_tokens_max=1_099),
            "a context of 1,100 tokens is over its 1,099",
        ),
    ],
)
def test_what_may_not_run_there_is_refused(request_, row, words):
    assert ask(Axis.GPU_TYPE, request_, row) == (inf, words)


def test_a_context_that_just_fits_is_feasible():
    assert ask(Axis.GPU_TYPE, call(), engine_row(context_tokens_max=1_100))[1] is None


# ---------------------------------------------------------------- kv_headroom


def test_kv_is_held_for_the_call_and_cached_tokens_are_free():
    dear, _ = ask(Axis.KV_HEADROOM, call(), engine_row())
    cheap, _ = ask(Axis.KV_HEADROOM, call(), engine_row(), cached=900)
    assert cheap < dear / 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_accepting": False}, "it does not accept calls"),
        ({"is_suspect": True}, "its breaker is open after failures"),
        ({"credits_expire_ms": NOW_MS}, "its agent lends no credits at present"),
        ({"seats_taken": 8}, "all 8 lent seats are taken"),
        ({"kv_tokens_lent": 1_099}, "the call needs 1,100 KV tokens and 1,099 are free"),
        (
            {"kv_tokens_used": 98_901},
            "the call would pin 1,100 KV tokens and the engine reports 1,099 free",
        ),
    ],
)
def test_no_room_is_told(changes, words):
    assert ask(Axis.KV_HEADROOM, call(), engine_row(**changes)) == (inf, words)


def test_room_to_the_token_is_room():
    row = engine_row(kv_tokens_lent=1_100, kv_tokens_used=98_900)
    assert ask(Axis.KV_HEADROOM, call(), row)[1] is None


def test_cached_tokens_are_not_charged_to_credits_but_are_pinned():
    row = engine_row(kv_tokens_lent=200)
    assert ask(Axis.KV_HEADROOM, call(), row, cached=900)[1] is None
    row = engine_row(kv_tokens_lent=200, kv_tokens_used=99_000)
    assert ask(Axis.KV_HEADROOM, call(), row, cached=900)[0] == inf


def test_a_decode_leg_receives_the_whole_prompt():
    row = engine_row(kv_tokens_lent=1_099)
    assert ask(Axis.KV_HEADROOM, call(), row, cached=900, leg=DECODE)[0] == inf
    assert ask(Axis.KV_HEADROOM, call(), row, leg=PREFILL)[1] is None


@pytest.mark.parametrize("calls", [1, 4, 16, 64])
def test_what_calls_reserve_covers_their_answers_together(calls):
    """Against answers drawn from a tail with these quantiles: median 216, 0.9 at 898 tokens."""
    request = call(prompt_tokens=1, completion_tokens_expected=216, completion_tokens_high=898)
    taken = 0
    row = engine_row(seats_capacity=64, kv_tokens_lent=10**6, seats_lent=64)
    for others in range(calls):
        row.running = others
        taken += Forecast(request, row, 0, NOW_MS, WHOLE, 0.0).kv_tokens - 1
    random = Random(5)
    sigma = log(898 / 216) / 1.2816
    sums = sorted(
        sum(random.lognormvariate(log(216), sigma) for _ in range(calls)) for _ in range(2_000)
    )
    covered = sum(each <= taken for each in sums) / len(sums)
    assert covered >= 0.85
    assert taken <= 1.6 * sums[len(sums) * 9 // 10], "and not much more than that"


# ---------------------------------------------------------------- weight_warmth


def test_warm_weights_are_free_and_cold_ones_cost_a_share_of_the_load():
    assert ask(Axis.WEIGHT_WARMTH, call(), engine_row())[0] == 0
    # Nobody is expected to follow: the call pays all of it.
    assert ask(Axis.WEIGHT_WARMTH, call(), engine_row(is_warm=False, load_ms=1_600))[0] == 1_600
    row = engine_row(is_warm=False, load_ms=1_600, calls_per_load=160.0)
    assert ask(Axis.WEIGHT_WARMTH, call(), row)[0] == pytest.approx(10)


def test_waking_is_told_apart_from_loading():
    row = engine_row(is_warm=False, sleep_level=1, warm_up_ms=70_000)
    assert ask(Axis.WEIGHT_WARMTH, call(), row) == (
        inf,
        "waking takes 70.0 s and the deadline is in 60.0 s",
    )


def test_a_load_that_ends_after_the_deadline_is_refused():
    row = engine_row(is_warm=False, load_ms=60_000)
    assert ask(Axis.WEIGHT_WARMTH, call(), row) == (
        inf,
        "loading takes 60.0 s and the deadline is in 60.0 s",
    )


# ---------------------------------------------------------------- tenant_priority


def test_a_newcomer_pays_for_the_delay_of_those_who_live_there():
    row = engine_row(flows_micro_usd_per_s=100.0)
    # 110 ms of prompt, and 100 steps that are longer by 0.1 + 1,050 x 0.0001 ms.
    caused_ms = 110 + 100 * (0.1 + 0.105)
    assert ask(Axis.TENANT_PRIORITY, call(), row)[0] == pytest.approx(0.1 * caused_ms)
    # Its later steps will come here too: 100 added tokens to compute (20 ms), and as many steps.
    later_ms = 2 * (20 + 100 * (0.1 + 0.105))
    assert ask(Axis.TENANT_PRIORITY, flow(), row)[0] == pytest.approx(0.1 * (caused_ms + later_ms))
    assert ask(Axis.TENANT_PRIORITY, call(), row, leg=PREFILL)[0] == pytest.approx(0.1 * 110)
    assert ask(Axis.TENANT_PRIORITY, call(), row, leg=DECODE)[0] == pytest.approx(0.1 * 20.5)
    at_home = flow(home="engine-0", step=1)
    assert ask(Axis.TENANT_PRIORITY, at_home, row)[0] == 0


def test_who_is_worth_less_pays_for_whom_it_may_displace():
    # Three more fit behind the call; the engine is found half full: 1 in 8 that somebody finds no seat.
    row = engine_row(seats_taken=4, bid_micro_usd=9_000.0, offered_ratio=0.5)
    assert ask(Axis.TENANT_PRIORITY, call(), row)[0] == pytest.approx(4_000 / 8)
    assert ask(Axis.TENANT_PRIORITY, call(weight=2.0), row)[0] == 0
    last = engine_row(seats_taken=7, bid_micro_usd=9_000.0, offered_ratio=0.5)
    assert ask(Axis.TENANT_PRIORITY, call(), last)[0] == pytest.approx(4_000)
    bound = engine_row(seats_bound=5, seats_taken=4, bid_micro_usd=9_000.0, offered_ratio=0.5)
    assert ask(Axis.TENANT_PRIORITY, call(), bound)[0] == pytest.approx(4_000)


def test_kv_that_runs_out_is_scarce_before_seats_are():
    # After the call 2,200 of 100,000 KV tokens are free: room for two more like it.
    row = engine_row(kv_tokens_taken=96_700, bid_micro_usd=9_000.0, offered_ratio=0.5)
    assert ask(Axis.TENANT_PRIORITY, call(), row)[0] == pytest.approx(4_000 / 4)


def test_an_engine_without_a_seat_is_refused():
    assert ask(Axis.TENANT_PRIORITY, call(), engine_row(running=8)) == (
        inf,
        "it runs 8 calls and has 8 seats",
    )
    assert ask(Axis.TENANT_PRIORITY, call(), engine_row(running=7))[1] is None


# ---------------------------------------------------------------- workflow


def flow(**changes):
    return call(**{"workflow": "w", "steps_expected": 3, "step_gap_ms": 1_000} | changes)


def test_lateness_of_the_workflow_counts_the_steps_still_to_come():
    row = engine_row(decode_ms_per_seq=0.0, decode_ms_per_kv_token=0.0)
    # 110 ms to the first token, 99 steps of 10 ms; then two steps of a gap, a prefill of what was
    # added (20 ms) and as many tokens.
    ends_ms = 110 + 990 + 2 * (1_000 + 20 + 990)
    in_time = flow(workflow_deadline_ms=NOW_MS + ends_ms, value_micro_usd=0)
    late = flow(workflow_deadline_ms=NOW_MS + ends_ms - 500, weight=2.0, value_micro_usd=0)
    assert ask(Axis.WORKFLOW, in_time, row)[0] == pytest.approx(0, abs=1e-6)
    assert ask(Axis.WORKFLOW, late, row)[0] == pytest.approx(0.5 * 100 * 2)


def test_time_costs_the_more_the_less_of_it_is_left():
    row = engine_row(decode_ms_per_seq=0.0, decode_ms_per_kv_token=0.0)
    # 1.1 s on the engine, of the value for each second that is left.
    assert ask(Axis.WORKFLOW, call(), row)[0] == pytest.approx(1.1 * 5_000 / 60)
    soon = call(workflow_deadline_ms=NOW_MS + 6_000, weight=2.0)
    assert ask(Axis.WORKFLOW, soon, row)[0] == pytest.approx(1.1 * 2 * 5_000 / 6)
    # Pauses can not be shortened: of 10 s, 2 are for them. The workflow takes 1.1 s and twice 1.01 s.
    steps = flow(workflow_deadline_ms=NOW_MS + 10_000)
    assert ask(Axis.WORKFLOW, steps, row)[0] == pytest.approx(3.12 * 5_000 / 8)
    overdue = call(workflow_deadline_ms=NOW_MS - 5)
    assert ask(Axis.WORKFLOW, overdue, row)[0] == pytest.approx(1.1 * 5_000)


def test_later_steps_meet_the_flows_that_live_there():
    # Steps of 10 ms now; with what lives there of 14 on average, so the later ones take 12.
    row = engine_row(decode_ms_per_seq=0.0, decode_ms_per_kv_token=0.0, flows_ms_per_step=4.0)
    steps = flow(workflow_deadline_ms=NOW_MS + 10_000)
    spent_s = 1.1 + 2 * (0.02 + 99 * 0.012)
    assert ask(Axis.WORKFLOW, steps, row)[0] == pytest.approx(spent_s * 5_000 / 8)


def test_leaving_home_costs_thirty_times_the_recompute():
    home = flow(home="engine-0", value_micro_usd=0)
    assert ask(Axis.WORKFLOW, home, engine_row(0))[0] == 0
    assert ask(Axis.WORKFLOW, home, engine_row(1))[0] == pytest.approx(30 * 110)
    assert ask(Axis.WORKFLOW, home, engine_row(1), cached=900)[0] == pytest.approx(30 * 20)
    assert ask(Axis.WORKFLOW, home, engine_row(1), leg=PREFILL)[0] == 0


def test_a_session_is_a_hint_and_decides_between_near_equals_only():
    session = call(home="engine-0", value_micro_usd=0)
    gpu, _ = ask(Axis.GPU_TYPE, session, engine_row(1))
    assert ask(Axis.WORKFLOW, session, engine_row(0))[0] == 0
    assert ask(Axis.WORKFLOW, session, engine_row(1))[0] == pytest.approx(0.05 * gpu)


def test_what_is_left_of_the_budget_must_cover_the_call():
    cost, objection = ask(Axis.WORKFLOW, flow(workflow_remaining_micro_usd=200), engine_row())
    assert cost == inf
    assert objection is not None
    assert objection.startswith("the call would cost $0.00025")
    assert objection.endswith("and the workflow has $0.000200 left")
    assert ask(Axis.WORKFLOW, flow(workflow_remaining_micro_usd=256), engine_row())[1] is None
    assert ask(Axis.WORKFLOW, call(workflow_remaining_micro_usd=0), engine_row())[1] is None


# ---------------------------------------------------------------- latency_budget


def test_in_time_costs_nothing_and_late_costs_by_the_second():
    assert ask(Axis.LATENCY_BUDGET, call(), engine_row())[0] == 0
    # 50,000 tokens before it take 5 s more; the target is 2 s.
    row = engine_row(prefill_tokens_pending=50_000)
    cost, _ = ask(Axis.LATENCY_BUDGET, call(weight=2.0), row)
    assert cost == pytest.approx(2 * 100 * 3.110)


def test_calls_waiting_inside_the_engine_are_a_backlog_too():
    row = engine_row(waiting=40)
    assert ask(Axis.LATENCY_BUDGET, call(), row)[0] == pytest.approx(100 * (4.096 + 0.11 - 2))


def test_time_already_waited_counts():
    early = call(arrival_ms=NOW_MS - 5_000)
    assert ask(Axis.LATENCY_BUDGET, early, engine_row())[0] == pytest.approx(100 * 3.11)


def test_slow_tokens_cost_by_their_excess():
    cost, _ = ask(Axis.LATENCY_BUDGET, call(tpot_ms_max=5), engine_row())
    step_ms = tpot_ms(engine_row(), 1, 1_050, 0)
    assert cost == pytest.approx(100 * 99 * (step_ms - 5) / 1_000)


def test_value_is_at_risk_as_the_predicted_end_nears_the_deadline():
    # The call takes about 1.13 s: no risk in 2 s, half of its value at 1.13 s.
    row = engine_row()
    e2e_ms = Forecast(call(), row, 0, NOW_MS, WHOLE, 0.0).e2e_ms
    tight = call(deadline_ms=NOW_MS + round(e2e_ms))
    assert ask(Axis.LATENCY_BUDGET, tight, row)[0] == pytest.approx(2_500, rel=0.01)
    assert ask(Axis.LATENCY_BUDGET, call(deadline_ms=NOW_MS + 2_000), row)[0] == 0


def test_only_a_lower_bound_refuses():
    backlog = engine_row(prefill_tokens_pending=1_000_000)
    assert ask(Axis.LATENCY_BUDGET, call(), backlog)[0] < inf
    cost, objection = ask(Axis.LATENCY_BUDGET, call(deadline_ms=NOW_MS + 110), engine_row())
    assert cost == inf
    assert objection == "the first token takes at least 0.11 s and the deadline is in 0.11 s"
    assert ask(Axis.LATENCY_BUDGET, call(deadline_ms=NOW_MS + 111), engine_row())[0] < inf


def test_legs_of_a_pair_add_up_to_the_lateness_of_the_pair():
    request = call(ttft_ms_max=100)
    prefill = Forecast(request, engine_row(), 0, NOW_MS, PREFILL, 0.0)
    first, _ = ask(Axis.LATENCY_BUDGET, request, engine_row(), leg=PREFILL)
    second, _ = ask(
        Axis.LATENCY_BUDGET, request, engine_row(), leg=DECODE, before_ms=prefill.ttft_ms
    )
    decode = Forecast(request, engine_row(), 0, NOW_MS, DECODE, prefill.ttft_ms)
    late_ms = prefill.ttft_ms + decode.ttft_ms - 100
    assert first + second == pytest.approx(100 * late_ms / 1_000)
    assert first > 0


# ---------------------------------------------------------------- agentic_scope


def test_fan_out_is_capped():
    request = call(calls_in_flight=8, workflow="w")
    assert ask(Axis.AGENTIC_SCOPE, request, engine_row()) == (
        inf,
        "8 calls of the workflow are in flight and its scope `chat` allows 8",
    )
    assert ask(Axis.AGENTIC_SCOPE, call(calls_in_flight=7), engine_row())[1] is None


def test_kv_is_held_for_the_time_that_costs_least():
    """Against a search over all times of letting go, with pauses drawn from the tail itself."""
    hold_each, recompute = 1_100 * 0.01, 120.0
    for gap_s in (0.5, 2.0, 9.0, 30.0):
        # P(longer than t) = 1 / (1 + t / median): held until t or used, then computed again.
        least = min(
            hold_each * gap_s * log(1 + t / gap_s) + recompute / (1 + t / gap_s)
            for t in [n * 0.01 for n in range(10_000)]
        )
        cost, _ = ask(Axis.AGENTIC_SCOPE, call(step_gap_ms=int(gap_s * 1_000)), engine_row())
        saturation = 1_100 / 100_000
        assert cost == pytest.approx(least + saturation * (120 - least), rel=1e-4)
    assert ask(Axis.AGENTIC_SCOPE, call(step_gap_ms=600_000), engine_row())[0] == pytest.approx(120)
    assert ask(Axis.AGENTIC_SCOPE, call(step_gap_ms=0), engine_row())[0] == 0


def test_a_full_engine_is_taken_to_evict_before_the_gap_ends():
    row = engine_row(kv_tokens_taken=98_900)
    cost, _ = ask(Axis.AGENTIC_SCOPE, call(step_gap_ms=2_000), row)
    assert cost == pytest.approx(120)


def test_holding_breaks_even_where_the_paper_says():
    """tau* = prefill time per token x capacity: 49 s for a 70B fp8 model on four H100 (traces.md)."""
    rates = engine_rates(LLAMA_70B_FP8, replace(H100), 4)
    tau_s = rates.prefill_ms_per_token * rates.kv_tokens_capacity / 1_000
    per_token = rates.prefill_ms_per_token * rates.micro_usd_per_ms
    assert per_token == pytest.approx(tau_s * rates.kv_price_micro_usd_per_token_s)
