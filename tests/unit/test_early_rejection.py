"""Who can not be in time whatever happens is refused; whoever could be is not. The oracle runs the engine."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.runtime.estimates import LEAST_ANSWERS_MIN, Estimates
from controlplane.scheduler.axes import latency_budget
from controlplane.scheduler.legs import PREFILL, WHOLE
from controlplane.scheduler.perf_model import Forecast, tpot_ms, uncached_prefill_ms
from tests.decision_builders import NOW_MS, call, engine_row

TENANT, MODEL = TenantId("acme"), ModelName("model")


class Asked:
    prompt_bytes, n = 4_000, 1


def learned(lengths: list[int]) -> Estimates:
    estimates = Estimates()
    for tokens in lengths:
        estimates.learn(
            call(tenant=TENANT, model=MODEL, scope=Scope.CHAT),
            Asked(),
            Usage(1_000, 0, tokens, is_estimated=False),
        )
    return estimates


@given(
    prompt=st.integers(1, 40_000),
    cached_ratio=st.floats(0.0, 1.0),
    least=st.integers(1, 2_000),
    longer=st.integers(0, 500),
    left_ms=st.integers(0, 30_000),
    correction=st.sampled_from([0.25, 0.8, 1.0, 1.7, 4.0]),
)
def test_what_an_empty_engine_would_finish_in_time_is_never_refused(
    prompt: int, cached_ratio: float, least: int, longer: int, left_ms: int, correction: float
) -> None:
    row = engine_row(ttft_correction=correction, tpot_correction=correction)
    request = call(
        prompt_tokens=prompt, completion_tokens_least=least, deadline_ms=NOW_MS + left_ms
    )
    cached = int(cached_ratio * (prompt - 1))
    # Token by token, on an engine that does nothing else and may be as fast as it was published.
    fast = 1.0 / max(1.0, correction)
    took_ms = fast * uncached_prefill_ms(request, row, cached)
    tokens = least + longer
    for produced in range(1, tokens):
        took_ms += fast * tpot_ms(row, 1, prompt + produced, 0)
    forecast = Forecast(request, row, cached, NOW_MS, WHOLE, 0.0)
    if NOW_MS + took_ms < request.deadline_ms:
        assert latency_budget.is_reachable(request, forecast)
        assert latency_budget.cost(request, row, forecast) < inf
    # And the bound is worth something: not even the first answer's worth of steps is in time.
    if fast * (uncached_prefill_ms(request, row, cached) + (least - 1) * row.decode_ms_base) > (
        left_ms + 1
    ):
        assert not latency_budget.is_reachable(request, forecast)


def test_the_refusal_says_what_takes_too_long() -> None:
    row = engine_row()
    request = call(completion_tokens_least=1_000, deadline_ms=NOW_MS + 1_000)
    forecast = Forecast(request, row, 0, NOW_MS, WHOLE, 0.0)
    words = latency_budget.objection(request, row, forecast)
    assert words is not None
    assert words.startswith("an answer of 1,000 tokens takes at least ")
    assert words.endswith(" and the deadline is in 1.00 s")
    first = Forecast(request, row, 0, NOW_MS, PREFILL, 0.0)
    assert latency_budget.is_reachable(request, first), "the decode leg answers for the decoding"


@given(
    lengths=st.lists(st.integers(1, 5_000), min_size=LEAST_ANSWERS_MIN, max_size=300),
    most=st.integers(1, 6_000),
)
def test_hardly_an_answer_falls_short_of_the_least(lengths: list[int], most: int) -> None:
    estimates = learned(lengths)
    least = estimates.completion_tokens_least(TENANT, MODEL, most, Scope.CHAT)
    assert 1 <= least <= most
    # Recent answers count more: in the weights that are left, at most a hundredth is shorter. The
    # quantile may be as old as the last three answers.
    for seen in range(len(lengths) - 3, len(lengths) + 1):
        weights = [2.0 ** (number / 64) for number in range(seen)]
        short = sum(w for w, tokens in zip(weights, lengths[:seen], strict=True) if tokens < least)
        if short <= 0.01 * sum(weights):
            break
    else:
        raise AssertionError((least, lengths))


def test_too_few_answers_say_nothing() -> None:
    assert (
        learned([500] * (LEAST_ANSWERS_MIN - 1)).completion_tokens_least(
            TENANT, MODEL, 900, Scope.CHAT
        )
        == 1
    )
    known = learned([500] * LEAST_ANSWERS_MIN)
    assert 400 < known.completion_tokens_least(TENANT, MODEL, 900, Scope.CHAT) <= 500
    assert known.completion_tokens_least(TENANT, MODEL, 90, Scope.CHAT) == 90
    assert known.completion_tokens_least(TenantId("x"), ModelName("y"), 900, Scope.CHAT) == 1
