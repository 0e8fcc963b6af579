"""llama.cpp's `llama-server`: GGUF models on whatever hardware it was built for, a CPU included.

It tells less than vLLM does, and what it lacks is declared, not made up: how full its KV cache is, times to
the first token and between tokens, KV events, and a way to keep one tenant's cached prompt from another.
On SIGTERM it cuts its streams, so that an engine is drained before it is stopped.
"""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dataplane.engines.base import (
    EngineCapacity,
    EngineError,
    EngineTraits,
    Fetch,
    Launch,
    attached_port,
    read_options,
)
from dataplane.protocol.messages import EngineSpec, EngineTelemetry, Feature

_METRIC: Final = re.compile(rb"^llamacpp:(\w+) ([^ \n]+)", re.MULTILINE)
_NEEDED: Final = ("requests_processing", "requests_deferred")
# A sequence that is thrown out of the cache leaves nothing behind, so it has no blocks to speak of.
BLOCK_TOKENS: Final = 1

_LACKS: Final = frozenset(
    {
        Feature.KV_USE, Feature.LATENCIES, Feature.CACHE_SALT, Feature.KV_EVENTS,
        Feature.TOKEN_IDS,
    }
)  # fmt: skip


class LlamaCppOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of kind `llama_cpp`.

    `executable`: the `llama-server` to run. `attach`: the URL of one on this node that runs already and is
    only watched. `model_path`: the GGUF file, when it is not the model's name. Each of `seats` has a
    context of `context_tokens_max` of its own. `threads` 0 and `gpu_layers` -1 leave it to llama.cpp.
    `cache_type` is that of keys and values. `enable_prefix_caching` reuses what was computed for an earlier
    prompt, whoever's it was: a tenant can tell by the time of an answer what another one asked, so it is off
    unless all may know.
    """

    executable: str = "llama-server"
    attach: str = ""
    model_path: str = ""
    seats: int = 4
    context_tokens_max: int = 4096
    batch_tokens: int = 0
    cache_type: str = ""
    enable_prefix_caching: bool = False
    threads: int = 0
    gpu_layers: int = -1
    startup_s_max: float = 600.0


PROFILE_OPTIONS: Final[Mapping[str, str]] = {
    "context_tokens_max": "context_tokens_max",
    "batch.seats": "seats",
    "batch.tokens_per_step": "batch_tokens",
    "prefix_cache.enabled": "enable_prefix_caching",
    "kv_cache.dtype": "cache_type",
}


class _Meta(msgspec.Struct):
    n_ctx: int | None = None


class _Card(msgspec.Struct):
    id: str
    meta: _Meta | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class LlamaCppKind:
    name = "llama_cpp"
    health_path = "/health"
    metrics_path = "/metrics"
    local_options = frozenset({"executable", "attach"})
    profile_options = PROFILE_OPTIONS

    def check_settings(self, spec: EngineSpec) -> None:
        options = read_options(spec, LlamaCppOptions)
        where = f"engine `{spec.engine_id}`"
        if spec.role != "both":
            raise EngineError(f"{where}: kind `llama_cpp` hands no KV over; its role is `both`")
        if spec.model.startswith("-") or options.model_path.startswith("-"):
            raise EngineError(f"{where}: a model's name can not start with `-`")
        for name in ("seats", "context_tokens_max", "startup_s_max"):
            if getattr(options, name) <= 0:
                raise EngineError(f"{where}: `{name}` must be at least 1")
        if options.threads < 0 or options.batch_tokens < 0 or options.gpu_layers < -1:
            raise EngineError(f"{where}: numbers of threads, tokens and layers can not be negative")
        if options.attach:
            try:
                attached_port(options.attach)
            except ValueError as error:
                raise EngineError(f"{where}: {error}") from error

    def check(self, spec: EngineSpec) -> None:
        self.check_settings(spec)
        options = read_options(spec, LlamaCppOptions)
        if not options.attach and shutil.which(options.executable) is None:
            raise EngineError(
                f"engine `{spec.engine_id}`: no executable `{options.executable}`; install"
                " llama.cpp or set option `executable` to the path of a `llama-server`"
            )

    def traits(self, spec: EngineSpec) -> EngineTraits:
        options = read_options(spec, LlamaCppOptions)
        lacks = set(_LACKS)
        if not options.enable_prefix_caching:
            lacks |= {Feature.PREFIX_CACHE, Feature.PREFIX_REPORTS}
        return EngineTraits(gpus=spec.gpus, lacks=frozenset(lacks))

    def ports_needed(self, spec: EngineSpec) -> int:
        del spec
        return 1

    def ports_given(self, spec: EngineSpec, host: str) -> list[int]:
        attach = read_options(spec, LlamaCppOptions).attach
        return [attached_port(attach, host)] if attach else []

    def startup_s_max(self, spec: EngineSpec) -> float:
        return read_options(spec, LlamaCppOptions).startup_s_max

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch:
        options = read_options(spec, LlamaCppOptions)
        if options.attach:
            return Launch(argv=(sys.executable, "-m", "dataplane.engines.attached"))
        argv = [
            options.executable,
            "--model", options.model_path or spec.model, "--alias", spec.model,
            "--host", host, "--port", str(ports[0]),
            "--parallel", str(options.seats),
            "--ctx-size", str(options.seats * options.context_tokens_max),
            # What lies in the slots is prompts, and the pages of the browser are for nobody here.
            "--metrics", "--no-slots", "--no-webui",
            "--cache-prompt" if options.enable_prefix_caching else "--no-cache-prompt",
        ]  # fmt: skip
        if options.threads:
            argv += ["--threads", str(options.threads)]
        if options.gpu_layers >= 0:
            argv += ["--n-gpu-layers", str(options.gpu_layers)]
        if options.batch_tokens:
            argv += ["--batch-size", str(options.batch_tokens)]
        if options.cache_type:
            argv += ["--cache-type-k", options.cache_type, "--cache-type-v", options.cache_type]
        return Launch(argv=tuple(argv))

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        options = read_options(spec, LlamaCppOptions)
        try:
            cards = msgspec.json.decode(await fetch("/v1/models"), type=_Cards).data
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"engine `{spec.engine_id}`: its model list is unreadable: {error}"
            ) from error
        card = next((card for card in cards if card.id == spec.model), None)
        if card is None:
            served = ", ".join(card.id for card in cards) or "no model"
            raise EngineError(f"engine `{spec.engine_id}`: it serves {served}, not `{spec.model}`")
        # The context of one seat, which it may have rounded.
        told = card.meta.n_ctx if card.meta is not None else None
        context = told or options.context_tokens_max
        return EngineCapacity(
            seats=options.seats,
            kv_tokens=options.seats * context,
            block_tokens=BLOCK_TOKENS,
            context_tokens_max=context,
        )

    async def loaded_adapters(self, spec: EngineSpec, fetch: Fetch) -> frozenset[str]:
        del spec, fetch
        return frozenset()

    def telemetry(self, engine_id: str, exposition: bytes, rank: int = -1) -> EngineTelemetry:
        del rank
        try:
            read = {match[1].decode(): float(match[2]) for match in _METRIC.finditer(exposition)}
        except ValueError as error:
            raise EngineError(f"engine `{engine_id}`: a metric is not a number: {error}") from error
        missing = [name for name in _NEEDED if name not in read]
        if missing:
            raise EngineError(f"engine `{engine_id}`: metrics lack {', '.join(missing)}")
        computed = int(read.get("prompt_tokens_total", 0))
        cached = int(read.get("prompt_tokens_cached_total", 0))
        return EngineTelemetry(
            engine_id=engine_id,
            running=int(read["requests_processing"]),
            waiting=int(read["requests_deferred"]),
            kv_used_ratio=None,
            prefix_queries_tokens=computed + cached,
            prefix_hits_tokens=cached,
            prompt_tokens=computed + cached,
            generation_tokens=int(read.get("tokens_predicted_total", 0)),
            steps=int(read.get("n_decode_total", 0)),
            drafts=int(read.get("spec_decode_num_drafts_total", 0)),
            draft_tokens_accepted=int(read.get("spec_decode_num_accepted_tokens_total", 0)),
        )
