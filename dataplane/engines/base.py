"""What an agent needs to know of a kind of engine: how to start it, where to probe it, how to
read its numbers.

Knows of no particular engine. A kind is a small stateless object; everything that lives belongs
to the agent.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from dataplane.protocol.messages import EngineSpec, EngineTelemetry

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


class EngineKind(Protocol):
    """One kind of engine. Paths are of its HTTP server, whose first port is `ports[0]`."""

    @property
    def name(self) -> str: ...

    @property
    def health_path(self) -> str: ...

    @property
    def metrics_path(self) -> str: ...

    @property
    def local_options(self) -> frozenset[str]:
        """Options whose value only the node's own file may name, not a command."""

    def check(self, spec: EngineSpec) -> None:
        """Raise EngineError, in words for the operator, when `spec` can not be started."""

    def ports_needed(self, spec: EngineSpec) -> int: ...

    def startup_s_max(self, spec: EngineSpec) -> float:
        """Seconds from start to readiness after which a start has failed."""

    def launch(self, spec: EngineSpec, host: str, ports: Sequence[int]) -> Launch: ...

    async def capacity(self, spec: EngineSpec, fetch: Fetch) -> EngineCapacity:
        """Capacity of a ready engine. Raises EngineError when its answers can not be read."""

    def telemetry(self, engine_id: str, exposition: bytes) -> EngineTelemetry:
        """Numbers of one scrape of `metrics_path`. Raises EngineError when a needed one is
        missing.
        """


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
