"""The kinds of engine that an agent can start, by the name that specifications use."""

from dataplane.engines.base import EngineError, EngineKind
from dataplane.engines.simulated.adapter import SimulatedKind
from dataplane.engines.vllm import VllmKind
from dataplane.protocol.messages import EngineSpec

_ALL: tuple[EngineKind, ...] = (VllmKind(), SimulatedKind())

KINDS: dict[str, EngineKind] = {kind.name: kind for kind in _ALL}


def kind_of(spec: EngineSpec) -> EngineKind:
    """The kind that `spec` names. Raises EngineError when there is none."""
    kind = KINDS.get(spec.kind)
    if kind is None:
        raise EngineError(
            f"engine `{spec.engine_id}`: no engine kind `{spec.kind}`;"
            f" there are: {', '.join(KINDS)}"
        )
    return kind
