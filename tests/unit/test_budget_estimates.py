"""Lengths of answers as they are learned: close to the true quantiles, recent, and bounded."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.runtime import estimates as module
from controlplane.runtime.estimates import (
    COMPLETION_TOKENS_FIRST,
    COMPLETION_TOKENS_HIGH_FIRST,
    Estimates,
    SizeSketch,
    WorkflowSize,
)
from controlplane.store.estimates import SizeRecord
from tests.decision_builders import call

ACME, BOLT, SMALL = TenantId("acme"), TenantId("bolt"), ModelName("small")
CHAT, RESEARCH = Scope.CHAT, Scope.RESEARCH


class OneCall:
    """What the estimates read of a call."""

    def __init__(self, prompt_bytes: int, n: int) -> None:
        self.prompt_bytes = prompt_bytes
        self.n = n


def learned(
    lengths: list[int], n: int = 1, tenant: TenantId = ACME, into: Estimates | None = None
) -> Estimates:
    estimates = Estimates() if into is None else into
    for length in lengths:
        usage = Usage(100, 0, length * n, is_estimated=False)
        estimates.learn(call(tenant=tenant, model=SMALL, scope=CHAT), OneCall(400, n), usage)
    return estimates


@given(st.lists(st.integers(1, 20_000), min_size=module.ANSWERS_MIN, max_size=40))
def test_quantiles_are_within_a_bucket_of_the_true_ones(lengths: list[int]) -> None:
    while len(lengths) % module.REFRESH_ANSWERS:
        lengths.append(lengths[-1])
    sketch = SizeSketch()
    for length in lengths:
        sketch.add(length)
    # The oracle: weights that halve with age, over the values as they are.
    age = range(len(lengths) - 1, -1, -1)
    weights = [0.5 ** (n / module.HALF_LIFE_ANSWERS) for n in age]
    for found, ratio in ((sketch.quantile(0.5), 0.5), (sketch.quantile(0.9), 0.9)):
        below = sum(w for value, w in zip(lengths, weights, strict=True) if value <= found)
        under = sum(w for value, w in zip(lengths, weights, strict=True) if value <= found / 1.26)
        assert below >= (ratio - 1e-9) * sum(weights), "so many are at most as long"
        assert found <= 2 or under <= (ratio + 1e-9) * sum(weights), (
            "and it is no longer than needed"
        )


def test_nothing_is_believed_before_a_few_answers() -> None:
    estimates = learned([10] * (module.ANSWERS_MIN - 1))
    assert estimates.completion_tokens(ACME, SMALL, 10_000, None) == COMPLETION_TOKENS_FIRST
    assert (
        estimates.completion_tokens_high(ACME, SMALL, 10_000, CHAT) == COMPLETION_TOKENS_HIGH_FIRST
    )
    estimates = learned([10] * module.ANSWERS_MIN, n=3)
    assert 10 <= estimates.completion_tokens(ACME, SMALL, 10_000, None, CHAT) <= 12
    other = ModelName("other")
    assert estimates.completion_tokens(ACME, other, 10_000, None, CHAT) == COMPLETION_TOKENS_FIRST


def test_what_is_seen_too_little_of_is_taken_from_a_wider_level() -> None:
    estimates = learned([1_000] * 20)
    learned([100] * (module.ANSWERS_MIN - 1), tenant=BOLT, into=estimates)
    # Too few of its own: what the scope of the model shows, where long answers are the more.
    assert estimates.completion_tokens(BOLT, SMALL, 10_000, None, CHAT) > 900
    assert estimates.completion_tokens(BOLT, SMALL, 10_000, None, RESEARCH) > 900
    learned([100], tenant=BOLT, into=estimates)
    assert estimates.completion_tokens(BOLT, SMALL, 10_000, None, CHAT) <= 108
    assert estimates.completion_tokens(ACME, SMALL, 10_000, None, CHAT) > 900
    assert estimates.completion_tokens(BOLT, ModelName("x"), 10_000, None, CHAT) == (
        COMPLETION_TOKENS_FIRST
    )


def test_steps_still_to_come_are_those_of_workflows_that_came_as_far() -> None:
    estimates = learned([50] * 20)
    assert estimates.steps_remaining(ACME, CHAT, SMALL, 0) is None
    assert estimates.workflow_size(ACME, CHAT, SMALL) is None
    # Nine in ten take 2 steps, the tenth 32: both are bounds of buckets, so means are exact but for age.
    for number in range(400):
        estimates.learn_steps(ACME, CHAT, SMALL, 32 if number % 10 == 9 else 2)
    assert estimates.steps_remaining(ACME, CHAT, SMALL, 0) == pytest.approx(5, abs=0.4)
    assert estimates.steps_remaining(ACME, CHAT, SMALL, 2) == pytest.approx(30)
    assert estimates.steps_remaining(ACME, CHAT, SMALL, 40) == 1
    assert estimates.workflow_size(BOLT, CHAT, SMALL, 0.5) == WorkflowSize(
        steps=2, completion_tokens=54
    )
    assert estimates.workflow_size(BOLT, CHAT, SMALL, 0.99) == WorkflowSize(
        steps=32, completion_tokens=54
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(1, 300), min_size=1, max_size=9)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([None, "once"]),
)
def test_replicas_add_up_what_each_has_seen(
    turns: list[tuple[int, list[int]]], lost: str | None
) -> None:
    # Each turn one of two replicas sees some answers and shares; the oracle sees all of them in turn.
    replicas, oracle = [Estimates(), Estimates()], Estimates()
    shared: dict[tuple[str, ...], tuple[list[float], int]] = {}
    for at, lengths in turns:
        learned(lengths, into=replicas[at])
        learned(lengths, into=oracle)
        if lost:
            replicas[at].give_back(replicas[at].take_fresh(100))
        for record in replicas[at].take_fresh(100):
            key = (record.model, record.scope, record.tenant_id, record.quantity)
            weights, count = shared.get(key, ([0.0] * module.BUCKETS, 0))
            fade = 0.5 ** (record.observations / module.HALF_LIFE_ANSWERS)
            added = zip(weights, record.weights, strict=True)
            shared[key] = ([was * fade + new for was, new in added], count + record.observations)
        for replica in replicas:
            replica.use(
                SizeRecord(
                    model=model, scope=scope, tenant_id=tenant, quantity=quantity,
                    weights=tuple(weights), observations=count,
                )
                for (model, scope, tenant, quantity), (weights, count) in shared.items()
            )  # fmt: skip
    for replica in replicas:
        assert replica._sketches.keys() == oracle._sketches.keys()
        for key, sketch in replica._sketches.items():
            alone = oracle._sketches[key]
            assert sketch.sizes == alone.sizes
            assert in_newest(sketch) == pytest.approx(in_newest(alone))


def test_what_others_shared_is_older_than_what_is_fresh_here() -> None:
    here = learned([200] * 70)
    here.use(learned([100] * 30).take_fresh(100))
    oracle = learned([100] * 30 + [200] * 70)
    for key, sketch in here._sketches.items():
        assert in_newest(sketch) == pytest.approx(in_newest(oracle._sketches[key]))


def in_newest(sketch: SizeSketch) -> list[float]:
    """Weights of the buckets in those of the latest answer."""
    return [weight / (sketch._weight / module._GROWTH) for weight in sketch._weights]


def test_a_deadline_is_the_time_of_the_size_and_slack() -> None:
    size = WorkflowSize(steps=3, completion_tokens=11)
    # Three answers of 100 + 10 x 20 ms, two pauses of 50 ms between them, twice over.
    found = size.deadline_ms(ttft_ms=100.0, tpot_ms=20.0, gap_ms=50.0, slack_ratio=2.0)
    assert found == 2 * (3 * 300 + 2 * 50)


def test_a_histogram_of_another_shape_is_not_taken() -> None:
    estimates = learned([100] * 20)
    [record, *_] = estimates.take_fresh(1)
    estimates.use([replace(record, weights=(1.0, 2.0)), replace(record, quantity="gap_s")])
    assert 100 <= estimates.completion_tokens(ACME, SMALL, 10_000, None, CHAT) <= 108


def test_old_answers_are_forgotten() -> None:
    estimates = learned([2_000] * 2_000 + [20] * 6 * module.HALF_LIFE_ANSWERS)
    assert estimates.completion_tokens_high(ACME, SMALL, 10_000, CHAT) <= 24


def test_weights_stay_finite() -> None:
    sketch = SizeSketch()
    draw = random.Random(1)
    for _ in range(20_000):
        sketch.add(draw.choice((50, 60, 3_000_000)))
    assert 50 <= sketch.quantile(0.5) <= 76
    assert sketch.quantile(0.9) == 2**20


@pytest.mark.parametrize(
    ("hint", "tokens_max", "expected"),
    [(None, 10_000, 108), (None, 50, 50), (7, 10_000, 7), (900, 10_000, 900), (900, 300, 300),
     (0, 10_000, 108)],
)  # fmt: skip
def test_a_hint_is_believed_within_the_limit(
    hint: int | None, tokens_max: int, expected: int
) -> None:
    estimates = learned([100] * 40)
    assert estimates.completion_tokens(ACME, SMALL, tokens_max, hint, CHAT) == expected
    assert estimates.completion_tokens_high(ACME, SMALL, tokens_max, CHAT) == min(108, tokens_max)


def test_the_number_of_tenants_is_bounded() -> None:
    estimates = Estimates(sketches_max=5)
    for number in range(7):
        usage = Usage(100, 0, 10, is_estimated=False)
        estimates.learn(call(tenant=TenantId(f"t{number}")), OneCall(400, 1), usage)
    assert len(estimates._sketches) == 5
    # The wider levels are used by all and stay, and only what stays is written.
    tenants = [record.tenant_id for record in estimates.take_fresh(100)]
    assert sorted(tenants) == ["", "", "t4", "t5", "t6"]
