"""Where the real vLLM of the tests lives, and how its engines run on a small machine without a GPU."""

from pathlib import Path

from dataplane.protocol.messages import EngineSpec

READY_S_MAX = 600.0
# An engine that holds blocks for another one steps all the time, and its transfer library only answers that
# other one when its own progress thread does not sleep; one that only fetches is as fast with a sleeping thread.
PREFILL_ENVIRONMENT = {"NIXL_PTHR_DELAY_US": "0"}

# Parts of cluster documents, to be formatted like the rest of these.
TINY_CATALOGUE = """
regions: [lab]
gpu_types:
  - {{name: cpu, hbm_bytes: 16000000000, bandwidth_bytes_per_s: 2.0e10, flops_per_s: 1.0e11,
     price_micro_usd_per_hour: 100000, price_source: test, price_date: 2026-11-01}}
models:
  - {{name: tiny, parameters: 1340000, layers: 2, hidden_size: 128, weights_bytes: 2950000,
     kv_bytes_per_token: 512, context_tokens_max: 4096, load_ms: 20000,
     price_prompt_micro_usd_per_mtok: 1000000, price_cached_micro_usd_per_mtok: 100000,
     price_completion_micro_usd_per_mtok: 2000000}}
"""
TENANTS = """
slo_classes:
  - {{name: interactive, ttft_ms_max: 5000, tpot_ms_max: 200, e2e_ms_max: 120000,
     value_micro_usd: 10000, late_micro_usd_per_s: 500}}
tenants:
  - {{id: acme, name: Acme, tenant_class: gold, slo_class: interactive, budget_usd: 100.0}}
"""


def cpu_environment() -> dict[str, str]:
    """For engines that share the cores of a small machine, and can not reach a model hub."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "NIXL_PTHR_DELAY_US": "1000",
    }


def tiny_engine(engine_id: str, role: str, vllm: Path, model: Path) -> EngineSpec:
    return EngineSpec(
        engine_id=engine_id,
        kind="vllm",
        model="tiny",
        role=role,
        gpus=1,
        options={
            "executable": str(vllm / "bin" / "vllm"),
            "model_path": str(model),
            "max_num_seqs": 16,
            "max_model_len": 4096,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 * 1024 * 1024,
            "enforce_eager": True,
            "startup_s_max": READY_S_MAX,
        },
    )
