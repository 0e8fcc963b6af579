"""How vLLM moves KV, to another engine and to the host's memory: the flags that turn it on, and how the
engine then declares itself.

Knows the connectors by the words of the bus. A kind of engine that can not move KV has no method
`transfer` and declares nothing. Facts of vLLM 0.32: `--kv-offloading-size` puts its own connector and role
in the place of those of `--kv-transfer-config`, so both at once go through its MultiConnector; the port of
NIXL counts up with the data-parallel rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from dataplane.engines.base import EngineError
from dataplane.protocol.messages import EngineSpec, KvTransfer

NIXL: Final = "nixl"
NIXL_PUSH: Final = "nixl_push"
MOONCAKE: Final = "mooncake"
SHARED_FOLDER: Final = "shared_folder"

# Names in vLLM's registry.
CONNECTORS: Final = {
    NIXL: "NixlConnector",
    NIXL_PUSH: "NixlPushConnector",
    MOONCAKE: "MooncakeConnector",
    SHARED_FOLDER: "ExampleConnector",
}
_KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
# Connectors that listen on a port of their own.
_LISTENING: Final = frozenset({NIXL, NIXL_PUSH, MOONCAKE})
# A decode engine counts the ends of transfers by consumer rank, and knows one.
_NOT_PIPELINED_DECODE: Final = frozenset({NIXL, NIXL_PUSH})
# vLLM's `kv_lease_duration`, and VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
NIXL_LEASE_S: Final = 30
MOONCAKE_LEASE_S: Final = 480
# By the words of `--kv-offloading-backend`.
_OFFLOADERS: Final = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
OFFLOAD_BACKEND_USUAL: Final = "native"
BYTES_PER_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCache:
    """KV that leaves the GPUs is kept in so much of the host's memory, all GPUs together."""

    gib: float
    backend: str = ""


@runtime_checkable
class MovesKv(Protocol):
    """A kind of engine that can hand KV to others."""

    def transfer(self, spec: EngineSpec, ports: Sequence[int]) -> KvTransfer | None: ...


def transfer_of(kind: object, spec: EngineSpec, ports: Sequence[int]) -> KvTransfer | None:
    """What an engine declares once it has its ports; None when it moves no KV."""
    return kind.transfer(spec, ports) if isinstance(kind, MovesKv) and ports else None


def connector_of(role: str, chosen: str) -> str:
    """The connector of an engine, empty for none: engines with half a role have NIXL unless told otherwise."""
    return chosen or ("" if role == "both" else NIXL)


def check_connector(
    spec: EngineSpec,
    chosen: str,
    shared_folder: str,
    policy: str,
    *,
    lease_s: int = 0,
    ranks: int = 1,
    pipeline: int = 1,
) -> None:
    """Raise EngineError, in words for the operator, when the options do not make sense together."""
    where = f"engine `{spec.engine_id}`"
    connector = connector_of(spec.role, chosen)
    if connector and connector not in CONNECTORS:
        raise EngineError(
            f"{where}: no KV connector `{connector}`; there are: {', '.join(CONNECTORS)}"
        )
    if (connector == SHARED_FOLDER) != bool(shared_folder):
        raise EngineError(
            f"{where}: `kv_shared_folder` goes with `kv_connector: {SHARED_FOLDER}` and only with it"
        )
    if connector == SHARED_FOLDER and spec.gpus > ranks:
        raise EngineError(f"{where}: `{SHARED_FOLDER}` stores the KV of one GPU only")
    if policy not in {"recompute", "fail"}:
        raise EngineError(f"{where}: `kv_load_failure_policy` is `recompute` or `fail`")
    if not connector and (lease_s or policy == "fail"):
        name = "kv_lease_s" if lease_s else "kv_load_failure_policy"
        raise EngineError(f"{where}: `{name}` is set, but no `kv_connector` moves KV")
    if connector == MOONCAKE and ranks > 1:
        raise EngineError(
            f"{where}: `{MOONCAKE}` finds an engine by one id, and each data-parallel rank has its own"
        )
    if spec.role == "decode" and pipeline > 1 and connector in _NOT_PIPELINED_DECODE:
        raise EngineError(
            f"{where}: a decode engine over `{connector}` can not be pipelined"
            f" (`pipeline_parallel_size` {pipeline}); use tensor parallel GPUs"
        )


def check_host_cache(spec: EngineSpec, cache: HostCache, *, has_prefix_cache: bool) -> None:
    """Raise EngineError, in words for the operator, when KV can not be kept so."""
    where = f"engine `{spec.engine_id}`"
    if cache.backend and not cache.gib:
        raise EngineError(f"{where}: `kv_offloading_backend` is set without `kv_offloading_size`")
    if cache.gib and not has_prefix_cache:
        raise EngineError(f"{where}: `kv_offloading_size` is of no use without prefix caching")


def ports_of(connector: str, ranks: int = 1) -> int:
    """Ports that the connector listens on: one for each data-parallel rank."""
    return ranks if connector in _LISTENING else 0


def host_cache_flags(cache: HostCache) -> list[str]:
    """Arguments of an engine that hands no KV over; one that does is told by `launch_flags`."""
    if not cache.gib:
        return []
    backend = cache.backend or OFFLOAD_BACKEND_USUAL
    return ["--kv-offloading-size", f"{cache.gib:g}", "--kv-offloading-backend", backend]


def launch_flags(
    spec: EngineSpec,
    connector: str,
    host: str,
    ports: Sequence[int],
    *,
    shared_folder: str,
    lease_s: int,
    policy: str,
    cache: HostCache,
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that turn `connector` on. `ports[1]` is its own, the first rank's."""
    config: dict[str, Any] = {
        "kv_connector": CONNECTORS[connector],
        "kv_role": _KV_ROLES[spec.role],
    }
    environment: dict[str, str] = {}
    if spec.role != "prefill":
        # `recompute`: a decode engine that can not get the KV computes it, instead of failing the request.
        config["kv_load_failure_policy"] = policy
    if connector in {NIXL, NIXL_PUSH}:
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports[1])
        if lease_s:
            config["kv_connector_extra_config"] = {"kv_lease_duration": lease_s}
        if connector == NIXL_PUSH:
            # A decode engine that waits for a push that never comes waits for this long.
            extra = config.setdefault("kv_connector_extra_config", {})
            extra["push_registration_timeout"] = lease_s or NIXL_LEASE_S
    elif connector == MOONCAKE:
        config["engine_id"] = spec.engine_id
        environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(ports[1])
        if lease_s:
            environment["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(lease_s)
    else:
        config["kv_connector_extra_config"] = {"shared_storage_path": shared_folder}
    if cache.gib:
        config = _with_host_cache(config, cache)
    return ["--kv-transfer-config", msgspec.json.encode(config).decode()], environment


def _with_host_cache(own: dict[str, Any], cache: HostCache) -> dict[str, Any]:
    backend = cache.backend or OFFLOAD_BACKEND_USUAL
    offload: dict[str, Any] = {"kv_connector": _OFFLOADERS[backend], "kv_role": "kv_both"}
    if backend == OFFLOAD_BACKEND_USUAL:
        offload["kv_connector_extra_config"] = {"cpu_bytes_to_use": int(cache.gib * BYTES_PER_GIB)}
    both: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [own, offload]},
    }
    if "kv_load_failure_policy" in own:
        both["kv_load_failure_policy"] = own["kv_load_failure_policy"]
    return both


def declared(
    spec: EngineSpec, connector: str, ports: Sequence[int], *, shared_folder: str, lease_s: int
) -> KvTransfer | None:
    """How an engine with `connector` declares itself on the bus."""
    if not connector:
        return None
    usual = MOONCAKE_LEASE_S if connector == MOONCAKE else NIXL_LEASE_S
    return KvTransfer(
        connector=connector,
        domain=shared_folder,
        lease_s=float(lease_s or usual),
        engine_id=spec.engine_id if connector == MOONCAKE else "",
        bootstrap_port=ports[1] if connector == MOONCAKE else 0,
    )
