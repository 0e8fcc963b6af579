"""What an agent needs to know of a kind of engine: how to start it, where to probe it, how to
read its numbers.

Knows of no particular engine. A kind is a small stateless object; everything that lives belongs
to the agent.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from dataplane.protocol.messages import EngineSpec, EngineTelemetry, Feature

# Reads one path of a running engine over HTTP and returns the body. Raises OSError when it can not.
Fetch = Callable[[str], Awaitable[bytes]]

_O = TypeVar("_O", bound=msgspec.Struct)


class EngineError(Exception):
    """An engine specification that can not be started, or an answer of an engine that can not be
    read.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start the process: `argv`, and what is added to the inherited environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacity:
    """What a ready engine holds: concurrent sequences, tokens of KV cache, tokens per block and
    per request.
    """

    seats: int
    kv_tokens: int
    block_tokens: int
    context_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What a specification makes of an engine, as the scheduler has to know it.

    `gpus` are those of one data-parallel rank, of which there are `ranks`; requests name the rank
    where `has_ranks`. `adapters` are there from the start. The rest as in `EngineFacts`.
    """

    gpus: int
    ranks: int = 1
    has_ranks: bool = False
    pipeline: int = 1
    expert_gpus: int = 0
    speculative_tokens: int = 0
    kv_host_bytes: int = 0
    adapter_slots: int = 0
    adapters: tuple[str, ...] = ()
    lacks: frozenset[Feature] = frozenset()


class EngineKind(Protocol):
    """One kind of engine. Paths are of its HTTP server, whose first port is `ports[0]`."""

    @property
    def name(self) -> str: ...

    @property
    def profile_options(self) -> Mapping[str, str]:
        """Which settings of a profile the kind knows, by place, and the option that each becomes."""

    def traits(self, spec: EngineSpec) -> EngineTraits:
        """What is declared of an engine of this specification. Raises EngineError."""

    @property
    def health_path(self) -> str: ...

    @property
    def metrics_path(self) -> str: ...

    @property
    def local_options(self) -> frozenset[str]:
        """Options whose value only the node's own file may name, not a command."""

    def check_settings(self, spec: EngineSpec) -> None:
        """Raise EngineError, in words for the operator, when no node could start `spec`."""

    def check(self, spec: EngineSpec) -> None:
        """The same, and that this node has what it takes."""

    def ports_needed(self, spec: EngineSpec) -> int:
        """How many ports, one after the other, an engine listens on."""

    def ports_given(self, spec: EngineSpec, host: str) -> list[int]:
        """The ports of a server that runs already and is only watched; empty when it is to be started.

        Raises EngineError when that server is not on `host`.
        """

    def startup_s_max(self, spec: EngineSpec) -> float:
        """Seconds from start to readiness after which a start has failed."""

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch: ...

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        """Capacity of a ready engine. Raises EngineError when its answers can not be read."""

    async def loaded_adapters(self, spec: EngineSpec, fetch: Fetch) -> frozenset[str]:
        """Names of the adapters that a ready engine has now. Raises EngineError.

        Asked only of engines that have slots for them.
        """

    def telemetry(self, engine_id: str, exposition: bytes, rank: int = -1) -> EngineTelemetry:
        """Numbers of one scrape of `metrics_path`: of one data-parallel rank, or of all together.

        Raises EngineError when a needed one is missing.
        """


def attached_port(url: str, host: str = "") -> int:
    """The port of a server that runs already, whose URL must be on `host` when that is given.

    Raises ValueError on what is no such URL, EngineError on another host.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("`attach` can not carry a password: engines are asked without one")
    if parts.scheme != "http" or not parts.hostname or parts.path not in {"", "/"} or parts.query:
        raise ValueError(f"`attach` is `{url}`; it must be like http://10.0.0.7:8000")
    if parts.port is None:
        raise ValueError(f"`attach` names no port in `{url}`")
    if host and parts.hostname != host:
        raise EngineError(
            f"`attach` names the host `{parts.hostname}`, but this agent's engines are reached at"
            f" {host}; let the server listen there, or start the agent with --bind-address"
            f" {parts.hostname}"
        )
    return parts.port


def read_options(spec: EngineSpec, shape: type[_O]) -> _O:
    """`spec.options` as `shape`. Raises EngineError that names the option and lists the known
    ones.
    """
    known = shape.__struct_fields__
    for name in spec.options:
        if name not in known:
            raise EngineError(
                f"engine `{spec.engine_id}`: kind `{spec.kind}` has no option `{name}`;"
                f" it has: {', '.join(known)}"
            )
    try:
        return msgspec.convert(spec.options, shape)
    except msgspec.ValidationError as error:
        raise EngineError(f"engine `{spec.engine_id}`: {error}") from error
