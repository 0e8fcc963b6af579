"""What a running engine of a kind can be told over its own HTTP server, and the one-token call that
proves that it computes.

A kind that is not named here has neither: it can be started, watched and stopped.
"""

from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlencode

import msgspec

from dataplane.protocol.messages import Capability, EngineSpec

SLEEP_LEVELS: Final = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to an engine. A `body` is JSON."""

    path: str
    method: str = "POST"
    body: bytes = b""


class _Asleep(msgspec.Struct):
    is_sleeping: bool


class _Success(msgspec.Struct):
    success: bool


def one_token(spec: EngineSpec) -> Call:
    """A completion of one token, as servers with OpenAI's endpoints understand it."""
    body = {"model": spec.model, "prompt": "1", "max_tokens": 1, "temperature": 0}
    return Call(path="/v1/completions", body=msgspec.json.encode(body))


class Controls(Protocol):
    """What an engine of one kind understands. Of what `capabilities` lack nothing is called."""

    def capabilities(self, spec: EngineSpec) -> frozenset[Capability]: ...

    def canary(self, spec: EngineSpec) -> Call | None:
        """A completion of one token; None when there is no such call."""

    def sleep(self, level: int) -> Call: ...

    def wake(self) -> Call: ...

    def asleep(self) -> Call: ...

    def is_asleep(self, answer: bytes) -> bool:
        """The answer to `asleep`. Raises ValueError when it can not be read."""

    def reset_cache(self) -> Call: ...

    def is_reset(self, answer: bytes) -> bool:
        """Whether the answer to `reset_cache` says that it was done."""

    def load_adapter(self, name: str, path: str) -> Call: ...

    def unload_adapter(self, name: str) -> Call: ...


class NoControls:
    """A kind of which only the process and its numbers are known."""

    def capabilities(self, spec: EngineSpec) -> frozenset[Capability]:
        del spec
        return frozenset()

    def canary(self, spec: EngineSpec) -> Call | None:
        del spec
        return None

    def _none(self) -> Call:
        raise NotImplementedError("a capability that is not declared is not called")

    def sleep(self, level: int) -> Call:
        del level
        return self._none()

    def wake(self) -> Call:
        return self._none()

    def asleep(self) -> Call:
        return self._none()

    def is_asleep(self, answer: bytes) -> bool:
        del answer
        return False

    def reset_cache(self) -> Call:
        return self._none()

    def is_reset(self, answer: bytes) -> bool:
        del answer
        return False

    def load_adapter(self, name: str, path: str) -> Call:
        del name, path
        return self._none()

    def unload_adapter(self, name: str) -> Call:
        del name
        return self._none()


class VllmControls:
    """The endpoints of vLLM 0.32. Sleep and the reset of the cache need VLLM_SERVER_DEV_MODE, sleep
    `--enable-sleep-mode` as well: without it `/sleep` answers 200 and every later call hangs.
    """

    def capabilities(self, spec: EngineSpec) -> frozenset[Capability]:
        found = set()
        options = spec.options
        if options.get("enable_sleep_mode"):
            found |= {Capability.SLEEP, Capability.RESET_CACHE}
        if options.get("dev_mode"):
            found.add(Capability.RESET_CACHE)
        if options.get("lora_at_run_time"):
            found.add(Capability.LORA)
        return frozenset(found)

    def canary(self, spec: EngineSpec) -> Call | None:
        return one_token(spec)

    def sleep(self, level: int) -> Call:
        return Call(path=f"/sleep?{urlencode({'level': level})}")

    def wake(self) -> Call:
        return Call(path="/wake_up")

    def asleep(self) -> Call:
        return Call(method="GET", path="/is_sleeping")

    def is_asleep(self, answer: bytes) -> bool:
        try:
            return msgspec.json.decode(answer, type=_Asleep).is_sleeping
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error

    def reset_cache(self) -> Call:
        return Call(path="/reset_prefix_cache")

    def is_reset(self, answer: bytes) -> bool:
        # Versions before 0.32 answer 200 with an empty body.
        try:
            return not answer or msgspec.json.decode(answer, type=_Success).success
        except msgspec.MsgspecError:
            return False

    def load_adapter(self, name: str, path: str) -> Call:
        body = {"lora_name": name, "lora_path": path}
        return Call(path="/v1/load_lora_adapter", body=msgspec.json.encode(body))

    def unload_adapter(self, name: str) -> Call:
        body = {"lora_name": name}
        return Call(path="/v1/unload_lora_adapter", body=msgspec.json.encode(body))


class SimulatedControls(VllmControls):
    """The simulated engine has vLLM's endpoints, all of them, always."""

    def capabilities(self, spec: EngineSpec) -> frozenset[Capability]:
        del spec
        return frozenset(Capability)


class LlamaCppControls(NoControls):
    """Of `llama-server` only the one-token call is used."""

    def canary(self, spec: EngineSpec) -> Call | None:
        return one_token(spec)


_NONE: Final = NoControls()
_BY_KIND: Final[dict[str, Controls]] = {
    "vllm": VllmControls(),
    "simulated": SimulatedControls(),
    "llama_cpp": LlamaCppControls(),
}


def controls_of(spec: EngineSpec) -> Controls:
    return _BY_KIND.get(spec.kind, _NONE)
