"""Reads the Prometheus text of an engine that uses vLLM's metric names: a real vLLM, or the
simulated engine.

Only the series that the agent reports are looked at; a scrape of vLLM holds hundreds of others.
"""

import re

import msgspec

from dataplane.engines.base import EngineCapacity, EngineError
from dataplane.protocol.messages import EngineTelemetry

_READ = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "spec_decode_num_drafts_total",
    "spec_decode_num_accepted_tokens_total",
)
# Without these an engine can not be watched; the others may be absent before the first request.
_NEEDED = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

_LABELS = rb'(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?'
_SAMPLE = re.compile(
    rb"^vllm:(" + "|".join(_READ).encode() + rb")(" + _LABELS + rb") ([^ \n]+)", re.MULTILINE
)
_CACHE_CONFIG = re.compile(
    rb'^vllm:cache_config_info\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} 1(?:\.0)?', re.MULTILINE
)
_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class _ModelCard(msgspec.Struct):
    max_model_len: int | None = None
    id: str = ""
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


def read_telemetry(engine_id: str, exposition: bytes, rank: int = -1) -> EngineTelemetry:
    """One engine's telemetry: of a data-parallel rank, or summed over all of them.

    Raises EngineError when it is no such text.
    """
    sums: dict[str, float] = {}
    ranks = 0
    of_rank = b'engine="%d"' % rank
    try:
        for match in _SAMPLE.finditer(exposition):
            if rank >= 0 and of_rank not in match[2]:
                continue
            name = match[1].decode()
            sums[name] = sums.get(name, 0.0) + float(match[3])
            ranks += name == "kv_cache_usage_perc"
    except ValueError as error:
        raise EngineError(f"engine `{engine_id}`: a metric is not a number: {error}") from error
    missing = [name for name in _NEEDED if name not in sums]
    if len(missing) == len(_NEEDED) and _is_configured(exposition, rank):
        return EngineTelemetry(engine_id=engine_id, running=0, waiting=0, kv_used_ratio=0.0)
    if missing:
        raise EngineError(f"engine `{engine_id}`: metrics lack {', '.join(missing)}")
    return EngineTelemetry(
        engine_id=engine_id,
        running=int(sums["num_requests_running"]),
        waiting=int(sums["num_requests_waiting"]),
        kv_used_ratio=min(1.0, max(0.0, sums["kv_cache_usage_perc"] / ranks)),
        prefix_queries_tokens=int(sums.get("prefix_cache_queries_total", 0)),
        prefix_hits_tokens=int(sums.get("prefix_cache_hits_total", 0)),
        preemptions=int(sums.get("num_preemptions_total", 0)),
        prompt_tokens=int(sums.get("prompt_tokens_total", 0)),
        generation_tokens=int(sums.get("generation_tokens_total", 0)),
        ttft_seconds_sum=sums.get("time_to_first_token_seconds_sum", 0.0),
        ttft_count=int(sums.get("time_to_first_token_seconds_count", 0)),
        itl_seconds_sum=sums.get("inter_token_latency_seconds_sum", 0.0),
        itl_count=int(sums.get("inter_token_latency_seconds_count", 0)),
        drafts=int(sums.get("spec_decode_num_drafts_total", 0)),
        draft_tokens_accepted=int(sums.get("spec_decode_num_accepted_tokens_total", 0)),
    )


def _is_configured(exposition: bytes, rank: int) -> bool:
    """Whether a rank tells what its cache is like.

    Where several API servers tell their gauges together, vLLM 0.32 leaves those out that were never set: one
    that tells none of them has had no call yet. One that tells some of them is another version.
    """
    own = b'engine="%d"' % rank
    return any(rank < 0 or own in match[1] for match in _CACHE_CONFIG.finditer(exposition))


def read_adapters(engine_id: str, models: bytes) -> frozenset[str]:
    """The adapters in a model list: what names a parent. Raises EngineError."""
    return frozenset(card.id for card in _cards(engine_id, models) if card.parent)


def _cards(engine_id: str, models: bytes) -> list[_ModelCard]:
    try:
        return msgspec.json.decode(models, type=_ModelList).data
    except msgspec.MsgspecError as error:
        raise EngineError(f"engine `{engine_id}`: its model list is unreadable: {error}") from error


def read_capacity(
    engine_id: str, seats: int, exposition: bytes, models: bytes, model: str = ""
) -> EngineCapacity:
    """Capacity from `cache_config_info` (all ranks) and the model list, which must name `model`.

    Raises EngineError when one is missing.
    """
    kv_tokens = block_tokens = 0
    for match in _CACHE_CONFIG.finditer(exposition):
        labels = {label[1]: label[2] for label in _LABEL.finditer(match[1])}
        try:
            block_tokens = int(labels[b"block_size"])
            size = labels.get(b"kv_cache_size_tokens", b"None")
            kv_tokens += (
                int(size) if size.isdigit() else int(labels[b"num_gpu_blocks"]) * block_tokens
            )
        except (KeyError, ValueError) as error:
            raise EngineError(f"engine `{engine_id}`: cache_config_info is unreadable") from error
    if not kv_tokens:
        raise EngineError(f"engine `{engine_id}`: metrics lack cache_config_info")
    cards = _cards(engine_id, models)
    if not cards:
        raise EngineError(f"engine `{engine_id}`: it serves no model")
    if model and model not in {card.id for card in cards}:
        served = ", ".join(card.id for card in cards)
        raise EngineError(f"engine `{engine_id}`: it serves {served} and not `{model}`")
    context_tokens_max = cards[0].max_model_len
    if not context_tokens_max:
        raise EngineError(f"engine `{engine_id}`: its model list tells no `max_model_len`")
    return EngineCapacity(
        seats=seats,
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
        context_tokens_max=context_tokens_max,
    )
