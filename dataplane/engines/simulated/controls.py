"""What a simulated engine can be told beside completions, under vLLM's names: sleep and wake, the reset
of its cache, and adapters.

As with vLLM 0.32, a request that comes while the engine sleeps is not refused: it waits.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from dataplane.engines.simulated.loop import Engine
from dataplane.engines.simulated.wire import WireError

SLEEP_LEVELS: Final = (1, 2)
# Waking is faster than loading by this much from host memory (level 1) and from the page cache (level 2)
# (blog.vllm.ai, 26 Oct 2025: 18 to 200 times; the slow end for level 2).
WAKE_SPEEDUPS: Final = {1: 100.0, 2: 18.0}

Scope = dict[str, Any]
# Answers one request: its scope and body to the status, whether it is JSON, and the body.
Answer = Callable[[Scope, bytes], Awaitable[tuple[int, bool, bytes]]]


class LoraBody(msgspec.Struct):
    lora_name: str
    lora_path: str = ""


class EngineControls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.adapters: dict[str, str] = {}
        self.routes: dict[tuple[str, str], Answer] = {
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
        }

    async def _sleep(self, scope: Scope, _body: bytes) -> tuple[int, bool, bytes]:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        level = query.get("level", ["1"])[0]
        if level not in map(str, SLEEP_LEVELS):
            raise WireError(400, f"There is no sleep level {level}.")
        self._engine.sleep_level = int(level)
        self._forget()
        return 200, False, b""

    async def _wake_up(self, _scope: Scope, _body: bytes) -> tuple[int, bool, bytes]:
        engine = self._engine
        if level := engine.sleep_level:
            options = engine.options
            wake_ms = options.wake_ms or options.load_ms / WAKE_SPEEDUPS[level]
            await asyncio.sleep(wake_ms / 1000 / options.speedup)
            engine.sleep_level = 0
        return 200, False, b""

    async def _is_sleeping(self, _scope: Scope, _body: bytes) -> tuple[int, bool, bytes]:
        return 200, True, msgspec.json.encode({"is_sleeping": self._engine.sleep_level > 0})

    async def _reset_prefix_cache(self, _scope: Scope, _body: bytes) -> tuple[int, bool, bytes]:
        return 200, True, msgspec.json.encode({"success": self._forget()})

    def _forget(self) -> bool:
        """Drop the content of the cache, unless some sequence holds a block of it."""
        return self._engine.batcher.reset_cache()

    async def _load_adapter(self, _scope: Scope, body: bytes) -> tuple[int, bool, bytes]:
        adapter = _lora(body)
        if adapter.lora_name in self.adapters or adapter.lora_name == self._engine.model:
            raise WireError(400, f"The lora adapter '{adapter.lora_name}' has already been loaded.")
        if not await asyncio.to_thread(Path(adapter.lora_path).exists):
            raise WireError(404, f"Loading lora {adapter.lora_name} failed: No adapter found.")
        self.adapters[adapter.lora_name] = adapter.lora_path
        return 200, False, f"Success: LoRA adapter '{adapter.lora_name}' added.".encode()

    async def _unload_adapter(self, _scope: Scope, body: bytes) -> tuple[int, bool, bytes]:
        adapter = _lora(body)
        if self.adapters.pop(adapter.lora_name, None) is None:
            raise WireError(404, f"The lora adapter '{adapter.lora_name}' cannot be found.")
        return 200, False, f"Success: LoRA adapter '{adapter.lora_name}' removed.".encode()


def _lora(body: bytes) -> LoraBody:
    try:
        return msgspec.json.decode(body, type=LoraBody)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(400, str(error)) from error
