"""Corrections of an engine's rates against numpy's least squares, and against an engine with known rates."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.fleet import Rates
from controlplane.scheduler import correction as module
from controlplane.scheduler.correction import Correction, Regression

PUBLISHED = Rates(10.0, 0.1, 1e-6, 10.0, 0.1, 1e-4, 1.0, 1.0)


def least_squares(observed: Sequence[tuple[tuple[float, ...], float]]) -> list[float]:
    """The minimum of the documented sum, by numpy: weighted rows, and the prior as rows of their own."""
    parts = len(observed[0][0])
    lam, count = module.FORGETTING_RATIO, len(observed)
    rows, values = [], []
    for at, (shares, measured) in enumerate(observed):
        weight = np.sqrt(lam ** (count - 1 - at))
        total = sum(shares)
        rows.append(weight * np.array(shares) / total)
        values.append(weight * measured / total)
    weight = np.sqrt(lam**count / module.VARIANCE_FIRST)
    for at in range(parts):
        rows.append(weight * np.eye(parts)[at])
        values.append(weight)
    found, *_ = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)
    return [float(each) for each in found]


@given(
    st.lists(
        st.tuples(
            st.tuples(st.floats(1, 9), st.floats(1, 9), st.floats(1, 9)), st.floats(0.7, 1.4)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_factors_are_those_of_least_squares(
    observed: list[tuple[tuple[float, float, float], float]],
) -> None:
    # Near the prediction nothing is clipped, and few observations leave the covariance below its limit.
    regression = Regression(3)
    told = []
    for parts, ratio in observed:
        told.append((parts, ratio * sum(parts)))
        regression.learn(*told[-1])
    trace = sum(regression.covariance[at][at] for at in range(3))
    if trace < 3 * module.VARIANCE_FIRST * 0.999:
        expected = least_squares(told)
        if all(module.FACTOR_MIN < each < module.FACTOR_MAX for each in expected):
            assert regression.factors == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_rates_of_an_engine_are_found_apart() -> None:
    draw, learned = random.Random(7), Correction(PUBLISHED)
    for _ in range(600):
        tokens, backlog = draw.choice((50, 400, 8_000)), draw.choice((0, 0, 3_000))
        actual_ms = 3.0 * 10.0 + 0.7 * 0.1 * (tokens + backlog) + 4.0
        noise = draw.gauss(1.0, 0.1)
        learned.first_token(0.1 * tokens, 0.1 * backlog, 4.0, actual_ms * noise)
        sequences, kv_tokens = draw.randint(1, 200), draw.randint(100, 400_000)
        actual_ms = 1.5 * 10.0 + 0.6 * 0.1 * sequences + 2.0 * 1e-4 * kv_tokens
        learned.paced(sequences, kv_tokens, actual_ms * draw.gauss(1.0, 0.1))
    assert learned.first.factors == pytest.approx([3.0, 0.7], rel=0.1)
    assert learned.pace.factors == pytest.approx([1.5, 0.6, 2.0], rel=0.15)
    rates = learned.rates()
    assert rates.prefill_base_ms == pytest.approx(30.0, rel=0.1)
    assert rates.decode_ms_per_kv_token == pytest.approx(2e-4, rel=0.15)
    # 30 + 71.7 ms of a prompt of 1,024 tokens against 10 + 102.4.
    assert rates.ttft_correction == pytest.approx(101.7 / 112.4, rel=0.1)


def test_an_engine_that_changes_is_followed() -> None:
    learned = Correction(PUBLISHED)
    for factor in (1.0, 3.0, 1.0):
        for number in range(20):
            sequences = 1 + 7 * number % 40
            learned.paced(sequences, 0.0, factor * (10.0 + 0.1 * sequences))
        rates = learned.rates()
        step_ms = rates.decode_ms_base + 20 * rates.decode_ms_per_seq
        assert step_ms == pytest.approx(factor * 12.0, rel=0.1)


def test_one_stall_teaches_little() -> None:
    steady, stalled = Correction(PUBLISHED), Correction(PUBLISHED)
    for number in range(200):
        sequences = 1 + number % 40
        for learned in (steady, stalled):
            learned.paced(sequences, 0.0, 10.0 + 0.1 * sequences)
    stalled.paced(8, 0.0, 60_000.0)
    assert stalled.rates().tpot_correction <= steady.rates().tpot_correction + 0.1


@given(
    st.lists(
        st.tuples(
            st.tuples(*[st.sampled_from([0.0, 1e-9, 1.0, 1e6])] * 3),
            st.sampled_from([0.0, 1e-9, 1.0, 50.0, 1e12]),
        ),
        max_size=300,
    )
)
def test_whatever_is_measured_factors_and_covariance_stay_bounded(
    observed: list[tuple[tuple[float, float, float], float]],
) -> None:
    regression = Regression(3)
    for parts, measured in observed:
        regression.learn(parts, measured)
    assert all(module.FACTOR_MIN <= each <= module.FACTOR_MAX for each in regression.factors)
    matrix = np.array(regression.covariance)
    assert np.allclose(matrix, matrix.T, atol=1e-6)
    assert np.trace(matrix) <= 3 * module.VARIANCE_FIRST * 1.000001
    assert np.linalg.eigvalsh(matrix).min() >= -1e-6


def test_what_is_never_measured_does_not_become_less_certain_than_at_first() -> None:
    regression = Regression(3)
    for number in range(2_000):
        regression.learn((10.0, 0.0, 0.0), 10.0 + number % 3)
    trace = sum(regression.covariance[at][at] for at in range(3))
    assert trace <= 3 * module.VARIANCE_FIRST * 1.000001
    regression.learn((10.0, 10.0, 10.0), 30.0)
    assert regression.factors == pytest.approx([1.1, 1.0, 1.0], abs=0.1)
