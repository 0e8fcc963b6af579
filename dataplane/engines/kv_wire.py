"""KV events as engines publish them over ZeroMQ: frames, batches, and where they are heard.

A message is `[topic, number, batch]`. The number is 8 bytes, big-endian, from 0 in each process; the
batch is MessagePack, `[seconds, [event, ...], rank]`, an event a map with its `type`. Hashes are
unsigned and may pass 63 bits. Token ids are in the batch and are not read.
"""

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from dataplane.engines.base import EngineError
from dataplane.protocol.messages import EngineSpec

NUMBER_BYTES: Final = 8
# A replay ends with this number.
REPLAY_END_NUMBER: Final = -1
# Messages that an engine keeps to be replayed.
REPLAY_MESSAGES: Final = 4_096
# Kinds of attention whose blocks are a sequence's whole past; those of others go on their own.
WHOLE_PAST: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
GPU_MEDIUM: Final = "GPU"
# Begins of the names of sockets. vLLM 0.32 tells the sockets of its data-parallel ranks apart, by a suffix,
# only where the name has the word `inproc`; on any other Unix socket its further ranks do not start.
SOCKET_STEM: Final = "kv"
RANKED_STEM: Final = "kv-inproc"
RANK_SUFFIX: Final = "_dp"
# The kernel's limit on the path of a socket, less its end.
SOCKET_PATH_BYTES_MAX: Final = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEndpoints:
    """ZeroMQ addresses of one engine: where it publishes, and where it replays."""

    events: str
    replay: str


@runtime_checkable
class PublishesKv(Protocol):
    """A kind of engine that may publish KV events."""

    def kv_endpoints(self, spec: EngineSpec, host: str, port: int) -> KvEndpoints | None:
        """Where the engine on `port` publishes; None when it does not."""


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Blocks were cached, each behind the one before, the first behind `parent_block_hash`.

    `session_id` is the name that the request carried in its header `X-Session-ID`.
    """

    block_hashes: list[int | bytes]
    block_size: int
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """Told with the engine's next step, not when it happens."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """Events of one step. `told_s` is in seconds of the Unix epoch."""

    told_s: float
    events: list[Event]
    rank: int | None = None


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode_batch(payload: bytes) -> EventBatch:
    """Raises EngineError when it is not a batch of events."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"KV events can not be read: {error}") from error


def number_of(frame: bytes) -> int:
    """Raises EngineError when the frame is no number."""
    if len(frame) != NUMBER_BYTES:
        raise EngineError(f"the number of a KV event message has {len(frame)} bytes")
    return int.from_bytes(frame, "big", signed=True)


def kv_sockets(host: str, port: int, stem: str = SOCKET_STEM) -> KvEndpoints:
    """Unix sockets for the engine that listens on `host` and `port`, in a folder of this user alone.

    Events carry the token ids of prompts: on a network port whoever reaches it could read them. Raises
    EngineError when there is no folder that is surely this user's.
    """
    folder = _private_folder()
    name = f"{host.replace(':', '_')}-{port}"
    paths = [folder / f"{stem}-{name}", folder / f"{stem}-{name}-replay"]
    for path in paths:
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise EngineError(f"the path {path} is too long for a socket")
    return KvEndpoints(events=f"ipc://{paths[0]}", replay=f"ipc://{paths[1]}")


def remove_sockets(endpoints: KvEndpoints) -> None:
    """Clear away what a killed engine has left."""
    for endpoint in (endpoints.events, endpoints.replay):
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            for each in (path, *path.parent.glob(f"{path.name}{RANK_SUFFIX}*")):
                each.unlink(missing_ok=True)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    is_private = not facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or not is_private:
        raise EngineError(f"{folder} is not a folder of this user alone; remove it")
    return folder
