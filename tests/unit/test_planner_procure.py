"""Purchases against the rules of thumb that are exact for them."""

import importlib.resources
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.ids import GpuTypeName
from controlplane.scheduler.planner.procure import (
    Growth,
    Offer,
    Purchase,
    Step,
    Term,
    offers_of,
    procure,
)

GPU = GpuTypeName("a")
CERTAIN = (Growth(factor=1.0, probability=1.0),)


def offer(term: Term, usd: float, gpu: GpuTypeName = GPU, **facts: float) -> Offer:
    return Offer(
        gpu_type=gpu, term=term, micro_usd_per_gpu_hour=round(usd * 1e6), source="t",
        date="2026-11-01", **facts,
    )  # fmt: skip


def buy(work: tuple[float, ...], *offers: Offer, **facts: object) -> tuple[Step, ...]:
    purchase = Purchase(
        work_per_s=work, work_per_gpu_s={GPU: 1.0}, offers=offers, growth=CERTAIN, gpus_per_node=1
    )
    return procure(replace(purchase, **facts))  # type: ignore[arg-type]


def reserved(step: Step) -> float:
    return sum(one.gpus_max for one in step.bought if one.term is Term.RESERVED)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=24), st.floats(0.1, 0.9))
def test_reserve_what_is_used_for_more_than_its_price(work: list[int], ratio: float) -> None:
    steps = buy(
        tuple(map(float, work)), offer(Term.ON_DEMAND, 1.0), offer(Term.RESERVED, round(ratio, 3))
    )
    # By hand: one GPU more is worth it while the hours that use it exceed its price.
    hours, level, cost = len(work), 0, 0.0
    while sum(one > level for one in work) / hours > round(ratio, 3):
        level += 1
    cost = level * round(ratio, 3) + sum(max(0, one - level) for one in work) / hours
    assert steps[0].micro_usd_per_hour_mean == pytest.approx(1e6 * sum(work) / hours, abs=1.0)
    assert steps[1].micro_usd_per_hour_mean == pytest.approx(1e6 * cost, abs=1.0)


def test_not_knowing_the_growth_costs_the_price_of_the_newsvendor() -> None:
    growth = tuple(Growth(factor=one / 10, probability=0.1) for one in range(1, 11))
    step = buy((10.0,), offer(Term.ON_DEMAND, 1.0), offer(Term.RESERVED, 0.55), growth=growth)[1]
    # Needs of 1..10, equally likely: reserve while more than 55 % of them are above.
    assert reserved(step) == 5
    mean = 0.55 * 5 + sum(max(0, need - 5) for need in range(1, 11)) / 10
    assert step.micro_usd_per_hour_mean == pytest.approx(1e6 * mean)
    # Had it been known, all would have been reserved.
    assert step.regret_ratio == pytest.approx(1.0 - 0.55 * 5.5 / mean)
    assert step.reserved_idle_ratio == pytest.approx(1.0 - (1 + 2 + 3 + 4 + 5 * 6) / 50)
    # Who fears the worst fifth more than the mean reserves more.
    careful = buy(
        (10.0,), offer(Term.ON_DEMAND, 1.0), offer(Term.RESERVED, 0.55), growth=growth,
        risk_ratio=0.8,
    )[1]  # fmt: skip
    assert reserved(careful) > 5
    assert careful.micro_usd_per_hour_tail < step.micro_usd_per_hour_tail
    assert careful.micro_usd_per_hour_mean > step.micro_usd_per_hour_mean


def test_spot_is_priced_with_its_interruptions_and_bounded_by_what_they_fail() -> None:
    offers = (offer(Term.ON_DEMAND, 1.0), offer(Term.SPOT, 0.5, interruptions_per_hour=0.36))
    facts = {"restart_s": 1_000.0, "exposed_s": 100.0}
    # A tenth of its time is lost, so a unit costs .556; one workflow in a hundred fails there.
    step = buy((10.0,), *offers, **facts, failed_ratio_max=0.002)[2]
    assert step.failed_ratio == pytest.approx(0.002)
    spot = sum(one.gpus_mean for one in step.bought if one.term is Term.SPOT)
    assert spot == pytest.approx(2.0)
    assert step.micro_usd_per_hour_mean == pytest.approx(1e6 * (2.0 * 0.5 + 8.2))
    # Half of the work at most, whatever it costs; none where it is dearer in the end.
    step = buy((10.0,), *offers, **facts, failed_ratio_max=1.0)[2]
    assert sum(one.gpus_mean for one in step.bought if one.term is Term.SPOT) == pytest.approx(5.0)
    dear = replace(offers[1], micro_usd_per_gpu_hour=950_000)
    step = buy((10.0,), offers[0], dear, **facts)[2]
    assert step.saved_ratio == pytest.approx(0.0, abs=1e-9)


def test_work_that_waits_fills_valleys_of_what_is_reserved() -> None:
    offers = (offer(Term.ON_DEMAND, 1.0), offer(Term.RESERVED, 0.6))
    day = (10.0,) * 12 + (4.0,) * 12
    tight, _, last = (
        buy(day, *offers, deferrable_ratio=0.3, deferrable_h=12)[index] for index in (1, 2, 3)
    )
    # 10 by day and 4 by night: 4 reserved. Three of ten may wait for the night: 7 by day, 7 by night.
    assert (reserved(tight), reserved(last)) == (4, 7)
    assert last.micro_usd_per_hour_mean == pytest.approx(0.6e6 * 7)
    # What may wait an hour only gains next to nothing.
    short = buy(day, *offers, deferrable_ratio=0.3, deferrable_h=1)[3]
    assert short.micro_usd_per_hour_mean > last.micro_usd_per_hour_mean


def test_a_cheaper_type_is_bought_for_its_rate() -> None:
    other = GpuTypeName("b")
    steps = buy(
        (10.0,), offer(Term.ON_DEMAND, 1.0), offer(Term.ON_DEMAND, 0.6, other),
        work_per_gpu_s={GPU: 1.0, other: 0.5},
    )  # fmt: skip
    assert [one.gpu_type for one in steps[0].bought] == [GPU]
    steps = buy(
        (10.0,), offer(Term.ON_DEMAND, 1.0), offer(Term.ON_DEMAND, 0.4, other),
        work_per_gpu_s={GPU: 1.0, other: 0.5},
    )  # fmt: skip
    assert [(one.gpu_type, one.gpus_max) for one in steps[0].bought] == [(other, 20.0)]


def test_reservations_come_in_whole_nodes() -> None:
    offers = (offer(Term.ON_DEMAND, 1.0), offer(Term.RESERVED, 0.5))
    for work, nodes in ((11.0, 8), (15.0, 16)):
        step = buy((work,), *offers, gpus_per_node=8)[1]
        assert reserved(step) == nodes


def test_shipped_prices_are_well_formed_and_wrong_ones_say_where() -> None:
    path = importlib.resources.files("controlplane.scheduler.planner") / "gpu_prices.yaml"
    offers = offers_of(yaml.safe_load(path.read_text()))
    prices = {(one.gpu_type, one.term): one.micro_usd_per_gpu_hour for one in offers}
    assert len(prices) == len(offers)
    assert all(one.source and one.date for one in offers)
    for (gpu, term), price in prices.items():
        assert term is Term.ON_DEMAND or price < prices[gpu, Term.ON_DEMAND]
    for document in ({}, {"offers": []}, {"offers": ["x"]}, {"offers": [{"gpu_type": "a"}]}):
        with pytest.raises(ValueError, match="offer"):
            offers_of(document)
    with pytest.raises(ValueError, match="on demand"):
        buy((1.0,), offer(Term.SPOT, 1.0))
    with pytest.raises(ValueError, match="add up"):
        buy((1.0,), offer(Term.ON_DEMAND, 1.0), growth=(Growth(factor=1.0, probability=0.5),))
