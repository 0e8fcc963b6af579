"""Builders of rows and requests for tests of the decision core: every field has a plain default."""

from collections.abc import Mapping
from typing import Any

from controlplane.domain.catalog import GpuType, Model, Role, Scope
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import UNLIMITED_MICRO_USD, Request

NOW_MS = 1_000_000

_DYNAMIC: Mapping[str, Any] = {
    "is_accepting": True,
    "is_warm": True,
    "is_suspect": False,
    "running": 0,
    "waiting": 0,
    "kv_tokens_used": 0,
    "ttft_correction": 1.0,
    "seats_lent": 8,
    "kv_tokens_lent": 100_000,
    "credits_expire_ms": NOW_MS + 5_000,
    "credits_epoch": 1,
    "seats_taken": 0,
    "kv_tokens_taken": 0,
    "prefill_tokens_pending": 0,
    "generation": 0,
}


def engine_row(index: int = 0, **changes: Any) -> EngineRow:
    """A warm, idle engine with round rates: 10 ms a step, 0.1 ms a prompt token, 1 micro-dollar a ms."""
    declared: dict[str, Any] = {
        "index": index,
        "engine_id": f"engine-{index}",
        "node_id": f"node-{index}",
        "region": "north",
        "region_bit": 1,
        "gpu_type": "h100",
        "gpu_bit": 1,
        "model": "m",
        "role": Role.BOTH,
        "context_tokens_max": 100_000,
        "kv_tokens_capacity": 100_000,
        "seats_capacity": 8,
        "micro_usd_per_ms": 1.0,
        "prefill_base_ms": 10.0,
        "prefill_ms_per_token": 0.1,
        "prefill_ms_per_token_sq": 0.0,
        "decode_ms_base": 10.0,
        "decode_ms_per_seq": 0.1,
        "decode_ms_per_kv_token": 0.0001,
        "kv_price_micro_usd_per_token_s": 0.01,
        "load_ms": 60_000,
    }
    dynamic = dict(_DYNAMIC)
    for name, value in changes.items():
        (declared if name in declared else dynamic)[name] = value
    row = EngineRow(**declared)
    for name, value in dynamic.items():
        setattr(row, name, value)
    return row


def call(**changes: Any) -> Request:
    """A call of 1,000 prompt tokens and 100 expected ones, alone, with a minute of time."""
    fields: dict[str, Any] = {
        "id": "req-1",
        "tenant": "acme",
        "model": "m",
        "arrival_ms": NOW_MS,
        "prompt_tokens": 1_000,
        "completion_tokens_max": 200,
        "completion_tokens_expected": 100,
        "prefix": (),
        "prefix_tokens": (),
        "regions": 0b11,
        "gpu_types": 0b1111,
        "weight": 1.0,
        "ttft_ms_max": 2_000,
        "tpot_ms_max": 100,
        "deadline_ms": NOW_MS + 60_000,
        "value_micro_usd": 5_000,
        "late_micro_usd_per_s": 100,
        "scope": Scope.CHAT,
        "workflow": None,
        "step": 0,
        "steps_expected": 1,
        "workflow_deadline_ms": NOW_MS + 60_000,
        "workflow_spent_micro_usd": 0,
        "workflow_remaining_micro_usd": UNLIMITED_MICRO_USD,
        "calls_in_flight": 0,
        "fan_out_max": 8,
        "step_gap_ms": 0,
        "home": None,
        "is_single_engine": False,
        "priority": 5,
        "is_begun": False,
        "not_before_ms": 0,
        "waits_for_idle": False,
        "is_preferred": False,
    }
    return Request(**(fields | changes))


LLAMA_70B_FP8 = Model(
    name="llama-70b",
    parameters=70_553_706_496,
    layers=80,
    hidden_size=8_192,
    weights_bytes=70_553_706_496,
    kv_bytes_per_token=163_840,
    context_tokens_max=131_072,
    load_ms=60_000,
    price_prompt_micro_usd_per_mtok=600_000,
    price_cached_micro_usd_per_mtok=60_000,
    price_completion_micro_usd_per_mtok=2_400_000,
)

H100 = GpuType(
    name="h100",
    hbm_bytes=80_000_000_000,
    bandwidth_bytes_per_s=3.35e12,
    flops_per_s=1_978e12,
    price_micro_usd_per_hour=3_250_000,
    price_source="a test",
    price_date="2026-09-01",
)
