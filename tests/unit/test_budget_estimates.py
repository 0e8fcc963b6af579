"""Lengths of answers as they are learned: close to the true quantiles, recent, and bounded."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.runtime import estimates as module
from controlplane.runtime.estimates import (
    COMPLETION_TOKENS_FIRST,
    COMPLETION_TOKENS_HIGH_FIRST,
    Estimates,
    LengthSketch,
)
from tests.decision_builders import call

ACME, SMALL = TenantId("acme"), ModelName("small")


class OneCall:
    """What the estimates read of a call."""

    def __init__(self, prompt_bytes: int, n: int) -> None:
        self.prompt_bytes = prompt_bytes
        self.n = n


def learned(lengths: list[int], n: int = 1) -> Estimates:
    estimates = Estimates()
    for length in lengths:
        usage = Usage(100, 0, length * n, is_estimated=False)
        estimates.learn(call(tenant=ACME, model=SMALL), OneCall(400, n), usage)
    return estimates


@given(st.lists(st.integers(1, 20_000), min_size=module.ANSWERS_MIN, max_size=40))
def test_quantiles_are_within_a_bucket_of_the_true_ones(lengths: list[int]) -> None:
    while len(lengths) % module.REFRESH_ANSWERS:
        lengths.append(lengths[-1])
    sketch = LengthSketch()
    for length in lengths:
        sketch.add(length)
    # The oracle: weights that halve with age, over the values as they are.
    age = range(len(lengths) - 1, -1, -1)
    weights = [0.5 ** (n / module.HALF_LIFE_ANSWERS) for n in age]
    for found, ratio in ((sketch.median, 0.5), (sketch.high, 0.9)):
        below = sum(w for value, w in zip(lengths, weights, strict=True) if value <= found)
        under = sum(w for value, w in zip(lengths, weights, strict=True) if value <= found / 1.26)
        assert below >= (ratio - 1e-9) * sum(weights), "so many are at most as long"
        assert found <= 2 or under <= (ratio + 1e-9) * sum(weights), (
            "and it is no longer than needed"
        )


def test_nothing_is_believed_before_a_few_answers() -> None:
    estimates = learned([10] * (module.ANSWERS_MIN - 1))
    assert estimates.completion_tokens(ACME, SMALL, 10_000, None) == COMPLETION_TOKENS_FIRST
    assert estimates.completion_tokens_high(ACME, SMALL, 10_000) == COMPLETION_TOKENS_HIGH_FIRST
    estimates = learned([10] * module.ANSWERS_MIN, n=3)
    assert 10 <= estimates.completion_tokens(ACME, SMALL, 10_000, None) <= 12
    other = TenantId("bolt")
    assert estimates.completion_tokens(other, SMALL, 10_000, None) == COMPLETION_TOKENS_FIRST


def test_old_answers_are_forgotten() -> None:
    estimates = learned([2_000] * 2_000 + [20] * 6 * module.HALF_LIFE_ANSWERS)
    assert estimates.completion_tokens_high(ACME, SMALL, 10_000) <= 24


def test_weights_stay_finite() -> None:
    sketch = LengthSketch()
    draw = random.Random(1)
    for _ in range(20_000):
        sketch.add(draw.choice((50, 60, 3_000_000)))
    assert 50 <= sketch.median <= 76
    assert sketch.high == 2**20


@pytest.mark.parametrize(
    ("hint", "tokens_max", "expected"),
    [(None, 10_000, 108), (None, 50, 50), (7, 10_000, 7), (900, 10_000, 900), (900, 300, 300),
     (0, 10_000, 108)],
)  # fmt: skip
def test_a_hint_is_believed_within_the_limit(
    hint: int | None, tokens_max: int, expected: int
) -> None:
    estimates = learned([100] * 40)
    assert estimates.completion_tokens(ACME, SMALL, tokens_max, hint) == expected
    assert estimates.completion_tokens_high(ACME, SMALL, tokens_max) == min(108, tokens_max)


def test_the_number_of_tenants_is_bounded() -> None:
    estimates = Estimates(kept_max=3)
    for number in range(5):
        usage = Usage(100, 0, 10, is_estimated=False)
        estimates.learn(call(tenant=TenantId(f"t{number}")), OneCall(400, 1), usage)
    assert len(estimates._lengths) == 3
