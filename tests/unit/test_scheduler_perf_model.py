"""The roofline against published measurements (aiconfigurator's silicon table, Llama-3.1-70B fp8)."""

import pytest

from controlplane.scheduler.perf_model import engine_rates, prefill_ms, tpot_ms
from tests.decision_builders import H100, LLAMA_70B_FP8, engine_row


def row_of(rates):
    names = (
        "prefill_base_ms", "prefill_ms_per_token", "prefill_ms_per_token_sq", "decode_ms_base",
        "decode_ms_per_seq", "decode_ms_per_kv_token", "micro_usd_per_ms", "kv_tokens_capacity",
        "seats_capacity", "kv_price_micro_usd_per_token_s", "load_ms",
    )  # fmt: skip
    return engine_row(**{name: getattr(rates, name) for name in names})


H100_PAIR = row_of(engine_rates(LLAMA_70B_FP8, H100, 2))


@pytest.mark.parametrize(("concurrency", "measured_ms"), [(4, 17.4), (64, 28.8)])
def test_tpot_of_two_h100_is_as_measured(concurrency, measured_ms):
    # Input and output are 1,024 tokens each: a context of 1.5 k on average and, in steady state, one
    # prefill token for each token that is decoded.
    predicted = tpot_ms(H100_PAIR, concurrency, concurrency * 1_536, concurrency)
    assert predicted == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize(("prompt", "measured_ms"), [(1_024, 121), (8_192, 738)])
def test_prefill_of_two_h100_is_as_measured(prompt, measured_ms):
    assert prefill_ms(H100_PAIR, prompt, prompt) == pytest.approx(measured_ms, rel=0.25)


def test_attention_counts_each_pair_of_tokens_once():
    row = engine_row(prefill_base_ms=0.0, prefill_ms_per_token=0.0, prefill_ms_per_token_sq=2.0)
    assert prefill_ms(row, 10, 10) == 100
    # In two halves it is the same work.
    assert prefill_ms(row, 5, 5) + prefill_ms(row, 5, 10) == 100


def test_capacity_is_what_the_weights_leave():
    assert engine_rates(LLAMA_70B_FP8, H100, 2).kv_tokens_capacity == pytest.approx(
        (2 * (72e9 - 2 * 2**30) - 70.55e9) / 163_840, rel=0.001
    )
    assert engine_rates(LLAMA_70B_FP8, H100, 1).kv_tokens_capacity == 0


def test_price_follows_the_gpus():
    one, two = (engine_rates(LLAMA_70B_FP8, H100, gpus) for gpus in (2, 4))
    assert one.micro_usd_per_ms == pytest.approx(2 * 3.25e6 / 3.6e6)
    assert two.micro_usd_per_ms == pytest.approx(2 * one.micro_usd_per_ms)
    assert 2 <= one.seats_capacity <= 256
