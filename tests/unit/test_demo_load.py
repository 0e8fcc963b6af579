"""The demo's load repeats, and has the statistics that its docstring cites."""

import itertools
import statistics
from random import Random

import pytest

from cli import published
from cli.demo import load
from cli.demo.cost import cost_per_success_usd, fleet_usd_per_hour
from cli.demo.load import TenantLoad, arrivals_s, plan_load, shares, text

TENANTS = (
    TenantLoad(tenant="bronze", rank=1, arrival_cv=3.95, slack=10),
    TenantLoad(tenant="silver", rank=2, arrival_cv=1.21, slack=5),
    TenantLoad(tenant="gold", rank=3, arrival_cv=1.03, slack=3),
)
DRAWS = 20_000


def plan(seed: int, workflows: int = 60) -> tuple[load.WorkflowPlan, ...]:
    return plan_load(seed=seed, window_s=24, workflows=workflows, tenants=TENANTS, speedup=20)


def test_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


def test_plan_is_in_order_of_arrival_inside_its_window() -> None:
    arrivals = [workflow.arrival_s for workflow in plan(1)]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] <= 24


def test_number_of_workflows_follows_the_shares() -> None:
    counts = {
        load.tenant: sum(workflow.tenant == load.tenant for workflow in plan(3, 100))
        for load in TENANTS
    }
    assert counts == {"bronze": 51, "silver": 29, "gold": 21}


def test_shares_fall_as_in_the_source() -> None:
    many = tuple(
        TenantLoad(tenant=str(rank), rank=rank, arrival_cv=1, slack=1) for rank in range(1, 6)
    )
    # ServeGen: the first client has 30 % and the first five 77 %.
    assert shares(many)["1"] == pytest.approx(0.30 / 0.77, abs=0.01)


@pytest.mark.parametrize("cv", [1.03, 1.21, 3.95])
def test_gaps_have_the_coefficient_of_variation(cv: float) -> None:
    instants = arrivals_s(Random(5), DRAWS, cv, 1_000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(instants)]
    assert len(instants) == DRAWS
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


@pytest.mark.parametrize(
    ("spread", "p50", "share", "upper"),
    [
        (published.AGENT_STEPS, 12, 0.99, 37),
        (published.CODING_STEPS, 2, 0.9, 17),
        (published.CODING_GROWTH_TOKENS, 646, 0.9, 3_510),
        (published.CODING_OUTPUT_TOKENS, 216, 0.9, 898),
        (published.CODING_GAP_S, 9, 0.9, 74),
        (published.CHAT_OUTPUT_TOKENS, 350, 0.9, 597),
        (published.CHAT_GAP_S, 126, 0.9, 486),
    ],
)
def test_spreads_pass_through_the_published_quantiles(
    spread: published.Spread, p50: float, share: float, upper: float
) -> None:
    random = Random(11)
    values = [spread.draw(random) for _ in range(DRAWS)]
    assert quantile(values, 0.5) == pytest.approx(p50, rel=0.05)
    assert quantile(values, share) == pytest.approx(upper, rel=0.12)


def test_chat_input_has_the_published_mean() -> None:
    random = Random(13)
    values = [published.CHAT_INPUT_TOKENS.draw(random) for _ in range(DRAWS)]
    assert statistics.mean(values) == pytest.approx(12_035, rel=0.05)


def test_chat_turns_have_the_published_mean_and_p90() -> None:
    chats = [
        len(workflow.steps)
        for seed in range(40)
        for workflow in plan(seed, 300)
        if workflow.kind == "chat"
    ]
    assert min(chats) == 2
    assert statistics.mean(chats) == pytest.approx(2.97, abs=0.1)
    assert quantile([float(turns) for turns in chats], 0.9) == 5


def test_every_step_stays_inside_what_a_laptop_carries() -> None:
    for workflow in plan(2, 500):
        assert 1 <= len(workflow.steps) <= load.STEPS_MAX
        assert workflow.deadline_s > 0
        for step in workflow.steps:
            assert 20 <= step.completion_tokens <= 120
            assert 8 <= step.prompt_tokens_new <= 600
            assert 0 <= step.gap_s <= load.GAP_S_MAX


def test_agents_solve_the_published_share_of_tasks() -> None:
    solved = [
        workflow.is_solved
        for seed in range(20)
        for workflow in plan(seed, 300)
        if workflow.kind == "agent"
    ]
    assert statistics.mean(solved) == pytest.approx(0.65, abs=0.04)


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_text_is_four_bytes_a_token(tokens: int) -> None:
    length = len(text(Random(1), tokens)) / 4
    assert tokens - 1 <= length <= tokens + 2


def test_cost_counts_every_gpu_for_the_modelled_time() -> None:
    per_hour = fleet_usd_per_hour([(4, 3.25), (2, 1.0)])
    assert per_hour == pytest.approx(15.0)
    # 30 s at a speed-up of 20 are 10 minutes of the fleet: $2.50, over 5 tasks.
    assert cost_per_success_usd(per_hour, 30, 20, 5) == pytest.approx(0.5)
    assert cost_per_success_usd(per_hour, 30, 20, 0) is None
