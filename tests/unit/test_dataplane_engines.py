"""Adapters and models of engines: arguments, options, metrics, tokens, times."""

import math
from typing import Any

import msgspec
import pytest

from dataplane.engines.base import EngineError
from dataplane.engines.exposition import read_capacity, read_telemetry
from dataplane.engines.kinds import kind_of
from dataplane.engines.simulated.options import SimulatedOptions, check_options, kv_blocks
from dataplane.engines.simulated.roofline import step_times
from dataplane.engines.simulated.text import (
    Message,
    Speaker,
    chat_tokens,
    id_tokens,
    text_tokens,
    token_count,
    token_ids,
)
from dataplane.protocol.messages import EngineSpec

SCRAPE = b"""# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"}\\" b"} 3.0
vllm:num_requests_running{engine="1",model_name="a \\"}\\" b"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:prompt_tokens_total{engine="0"} 1.2e+06
vllm:generation_tokens_total{engine="0"} 40.0
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 60.0
vllm:num_preemptions_total{engine="0"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 9.0
vllm:time_to_first_token_seconds_count{engine="0"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
vllm:inter_token_latency_seconds_count{engine="0"} 31.0
vllm:inter_token_latency_seconds_sum{engine="0"} 0.75
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",engine="1",kv_cache_size_tokens="6400"} 1.0
process_cpu_seconds_total 3.0
"""
MODELS = b'{"object":"list","data":[{"id":"m","max_model_len":4096}]}'


def vllm(**members: Any) -> EngineSpec:
    options = {"executable": "python3", **members.pop("options", {})}
    base = {"engine_id": "v", "kind": "vllm", "model": "org/m", "role": "both", "gpus": 1}
    return EngineSpec(**{**base, **members}, options=options)


def test_telemetry_sums_ranks_and_passes_over_the_rest() -> None:
    telemetry = read_telemetry("e", SCRAPE)
    assert (telemetry.running, telemetry.waiting) == (4, 2)
    assert telemetry.kv_used_ratio == 0.375
    assert (telemetry.prompt_tokens, telemetry.generation_tokens) == (1_200_000, 40)
    assert (telemetry.prefix_queries_tokens, telemetry.prefix_hits_tokens) == (100, 60)
    assert (telemetry.preemptions, telemetry.ttft_count, telemetry.itl_count) == (1, 9, 31)
    assert (telemetry.ttft_seconds_sum, telemetry.itl_seconds_sum) == (1.5, 0.75)


def test_capacity_comes_from_all_ranks() -> None:
    capacity = read_capacity("e", 16, SCRAPE, MODELS)
    assert (capacity.seats, capacity.kv_tokens, capacity.block_tokens) == (16, 3200 + 6400, 32)
    assert capacity.context_tokens_max == 4096


@pytest.mark.parametrize(
    "text",
    [b"", b"<html>", SCRAPE.replace(b"kv_cache_usage", b"gpu_cache_usage"),
     SCRAPE.replace(b" 3.0", b" three")],
)  # fmt: skip
def test_what_is_not_an_engines_scrape_is_an_error(text: bytes) -> None:
    with pytest.raises(EngineError):
        read_telemetry("e", text)


@pytest.mark.parametrize(
    ("scrape", "models"),
    [(b"", MODELS), (SCRAPE, b"{"), (SCRAPE, b'{"data":[]}'),
     (SCRAPE.replace(b'"100"', b'"None"'), MODELS)],
)  # fmt: skip
def test_unreadable_capacity_is_an_error(scrape: bytes, models: bytes) -> None:
    with pytest.raises(EngineError):
        read_capacity("e", 1, scrape, models)


def test_vllm_is_started_with_what_headway_needs() -> None:
    launch = kind_of(vllm()).launch(
        vllm(options={"max_model_len": 4096, "enforce_eager": True}), "10.0.0.7", [8001]
    )
    argv = list(launch.argv)
    assert argv[:3] == ["python3", "serve", "org/m"]
    for flag, value in {
        "--served-model-name": "org/m",
        "--host": "10.0.0.7",
        "--port": "8001",
        "--max-num-seqs": "256",
        "--shutdown-timeout": "30",
    }.items():
        assert argv[argv.index(flag) + 1] == value
    assert {"--enable-prompt-tokens-details", "--enable-prefix-caching", "--enforce-eager",
            "--max-model-len=4096"} <= set(argv)  # fmt: skip
    assert "--kv-transfer-config" not in argv
    assert "VLLM_SERVER_DEV_MODE" not in launch.environment


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "producer"), ("decode", "consumer")])
def test_a_pair_has_a_connector_and_a_port_for_it(role: str, kv_role: str) -> None:
    spec = vllm(role=role)
    assert kind_of(spec).ports_needed(spec) == 2
    launch = kind_of(spec).launch(spec, "127.0.0.1", [8001, 9001])
    transfer = msgspec.json.decode(launch.argv[launch.argv.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "NixlConnector"
    assert transfer["kv_role"] == f"kv_{kv_role}"
    assert launch.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9001"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (vllm(options={"seats": 1}), "no option `seats`"),
        (vllm(options={"max_num_seqs": "many"}), "Expected `int`"),
        (vllm(options={"max_num_seqs": 0}), "at least 1"),
        (vllm(options={"executable": "no-such-program"}), "option `executable`"),
        (vllm(role="both sides"), "no role `both sides`"),
        (vllm(model="--port=1"), "can not start with `-`"),
        (vllm(kind="simulated", options={}), "no option `executable`"),
    ],
)
def test_impossible_specifications_are_refused_in_words(spec: EngineSpec, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        kind_of(spec).check(spec)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(EngineError, match="there are: vllm, llama_cpp, simulated"):
        kind_of(vllm(kind="tgi"))


def test_the_kv_pool_is_what_the_weights_leave() -> None:
    options = SimulatedOptions()
    tokens = kv_blocks(options, 1) * 16
    assert tokens == (80e9 * 0.9 - options.weights_bytes) // options.kv_bytes_per_token // 16 * 16
    assert kv_blocks(SimulatedOptions(kv_tokens=100), 1) == 6
    with pytest.raises(EngineError, match="less than one context"):
        check_options(SimulatedOptions(weights_bytes=71_000_000_000), 1)


# Llama-3.1-70B fp8 with fp8 KV: measured TPOT in milliseconds at concurrency and prompt length.
LLAMA_70B: dict[str, Any] = {
    "parameters": 70_600_000_000,
    "layers": 80,
    "hidden_size": 8192,
    "weights_bytes": 70_600_000_000,
    "kv_bytes_per_token": 163_840,
}
H100: dict[str, Any] = {"bandwidth_bytes_per_s": 3.35e12, "flops_per_s": 1.978e15}
H200: dict[str, Any] = {"bandwidth_bytes_per_s": 4.8e12, "flops_per_s": 1.978e15}
B200: dict[str, Any] = {"bandwidth_bytes_per_s": 7.7e12, "flops_per_s": 4.5e15}


@pytest.mark.parametrize(
    ("gpu", "gpus", "sequences", "measured_ms"),
    [(H100, 2, 4, 17.4), (H200, 1, 4, 21.5), (B200, 1, 4, 16.3)],
)
def test_decode_steps_are_near_the_measured_ones(
    gpu: dict[str, Any], gpus: int, sequences: int, measured_ms: float
) -> None:
    times = step_times(SimulatedOptions(**LLAMA_70B, **gpu), gpus)
    ms = 1000 * times.step_s(sequences, sequences * 1024, 0)
    assert abs(ms - measured_ms) / measured_ms < 0.2


def test_prefill_is_near_the_measured_one() -> None:
    times = step_times(SimulatedOptions(**LLAMA_70B, **H100), 2)
    ms = 1000 * times.step_s(8192, 0, 8192 * 8192 / 2)
    assert abs(ms - 738) / 738 < 0.25


def test_a_speed_up_divides_every_time() -> None:
    plain = step_times(SimulatedOptions(), 2)
    fast = step_times(SimulatedOptions(speedup=4.0), 2)
    assert math.isclose(plain.step_s(7, 900, 50.0), 4 * fast.step_s(7, 900, 50.0))


def test_tokens_are_four_bytes_and_come_back() -> None:
    sequence = text_tokens("hello")
    assert token_count(sequence) == 2
    assert id_tokens(token_ids(sequence)) == sequence


def test_an_answer_sent_back_gives_its_own_tokens_again() -> None:
    turn = [Message(role="user", content="why so")]
    before = chat_tokens(turn, b"")
    speaker = Speaker(before, 0, 100)
    answer = b"".join(speaker.next()[0] for _ in range(10))
    later = [*turn, Message(role="assistant", content=answer.decode())]
    assert chat_tokens(later, b"").startswith(before + answer)


def test_other_parts_of_a_message_count() -> None:
    parts = msgspec.json.decode(
        b'{"role":"user","content":[{"type":"text","text":"look"},{"type":"image_url","x":1}]}',
        type=Message,
    )
    assert token_count(chat_tokens([parts], b"")) > token_count(
        chat_tokens([Message(role="user", content="look")], b"")
    )
    with_tools = chat_tokens([parts], b'[{"type":"function"}]')
    assert token_count(with_tools) > token_count(chat_tokens([parts], b""))
