"""How the KV of a prompt gets from the engine that computed it to the engine that decodes.

Knows what engines declare and nothing of HTTP. An engine without a connector can not be part of a pair.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# vLLM holds KV for another engine for so long (`kv_lease_duration` of its NIXL connector, 30 s; Mooncake's
# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480 s).
NIXL_LEASE_S: Final = 30.0
MOONCAKE_LEASE_S: Final = 480.0


class Connector(StrEnum):
    """What moves KV between two engines, by the word with which an engine declares it.

    `nixl`: the decode engine reads the blocks. `nixl_push`: the prefill engine writes them, as soon as
    both have a call of one id. `mooncake`: the decode engine asks the prefill engine's bootstrap server.
    `shared_folder`: both see one folder and find prompts there by their tokens.
    """

    NIXL = "nixl"
    NIXL_PUSH = "nixl_push"
    MOONCAKE = "mooncake"
    SHARED_FOLDER = "shared_folder"


# With these the decode engine's call waits for bytes of the other engine, and must not be cut off meanwhile.
FETCHING: Final = frozenset({Connector.NIXL, Connector.NIXL_PUSH, Connector.MOONCAKE})


@dataclass(frozen=True, slots=True)
class KvSource:
    """What a decode engine must know of a prefill engine beside what that one answers.

    `lease_s`: seconds from the end of a prefill for which its blocks surely stay what they are.
    `engine_id` and `bootstrap` (an URL) are Mooncake's.
    """

    connector: Connector
    lease_s: float = NIXL_LEASE_S
    engine_id: str = ""
    bootstrap: str = ""
