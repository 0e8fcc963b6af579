"""The simulated engine's KV connector, as vLLM's NIXL in pull mode: a finished prompt's blocks stay held
under a lease, another engine asks for them over HTTP, and its word that it has them frees them.

An engine that waits renews the lease; when nobody does, the blocks are free. Who fetches them later gets
what lies there by then. As in vLLM nobody is told: the engine that fetched it answers from another
prompt's KV, wrongly, and so do later calls that find it in the prefix cache.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from dataplane.engines.simulated.kv_pool import KvPool

PULL_PATH = "/simulated/kv/pull"
RENEW_PATH = "/simulated/kv/renew"
# A waiting engine renews a lease so many times within it, by two thirds of it.
RENEWALS = 6
RENEWED_RATIO = 2 / 3
_REPLY_BYTES_MAX = 1024 * 1024


class PullRequest(msgspec.Struct):
    remote_request_id: str
    remote_block_ids: list[list[int]] = []


class PullReply(msgspec.Struct):
    """Digests of what lies in the blocks that were asked for; None where nothing is known of it."""

    digests: list[int | None]


class Pulled(StrEnum):
    """What came of fetching a prompt's KV."""

    COMPLETE = "complete"
    NOTHING = "nothing"
    WRONG = "wrong"


class Remote(msgspec.Struct):
    """The members of `kv_transfer_params` that this engine reads. Others are allowed."""

    do_remote_decode: bool | None = False
    do_remote_prefill: bool | None = False
    remote_host: str | None = None
    remote_port: int | None = None
    remote_request_id: str | None = None
    remote_num_tokens: int | None = None
    remote_block_ids: list[list[int]] | None = None


@dataclass(slots=True)
class Pinned:
    """Blocks of a finished prefill that wait for the engine that decodes."""

    blocks: list[int]
    digests: list[int]
    expires_s: float


class Leases:
    """What this engine holds for others. Instants are seconds of one monotonic clock."""

    def __init__(self, lease_s: float, pool: KvPool) -> None:
        self.lease_s = lease_s
        self.expired = 0
        # Fetched when nothing was held any more: what came is what lay there.
        self.late = 0
        self._pool = pool
        self._pinned: dict[str, Pinned] = {}

    def __len__(self) -> int:
        return len(self._pinned)

    @property
    def expires_s(self) -> float:
        """When the next lease ends."""
        return min(pinned.expires_s for pinned in self._pinned.values())

    def hold(self, request_id: str, blocks: list[int], digests: list[int], now_s: float) -> None:
        """The blocks of a finished prompt are given up when they are fetched, or when the lease ends."""
        self._pinned[request_id] = Pinned(blocks, digests, now_s + self.lease_s)

    def renew(self, request_id: str, now_s: float) -> bool:
        """Another engine still waits for this request."""
        self.expire(now_s)
        pinned = self._pinned.get(request_id)
        if pinned is None:
            return False
        pinned.expires_s = max(pinned.expires_s, now_s + self.lease_s * RENEWED_RATIO)
        return True

    def hand_over(self, asked: PullRequest, now_s: float) -> PullReply:
        """What the blocks hold; those of a request that is still held are free from now on."""
        self.expire(now_s)
        pinned = self._pinned.pop(asked.remote_request_id, None)
        if pinned is None:
            self.late += 1
            wanted = asked.remote_block_ids[0] if asked.remote_block_ids else []
            return PullReply([self._pool.digest_of(block) for block in wanted])
        self._pool.release(pinned.blocks)
        return PullReply(list(pinned.digests))

    def expire(self, now_s: float) -> None:
        for request_id, pinned in list(self._pinned.items()):
            if pinned.expires_s <= now_s:
                del self._pinned[request_id]
                self._pool.release(pinned.blocks)
                self.expired += 1


async def pull(remote: Remote, digests: list[int], seconds_max: float) -> Pulled:
    """Fetch the KV of a prompt whose full blocks have these `digests`.

    An engine that can not be reached costs all of `seconds_max`, as the handshake of vLLM's connector does.
    """
    if not remote.remote_host or not remote.remote_port or not remote.remote_request_id:
        return Pulled.NOTHING
    asked = PullRequest(remote.remote_request_id, remote.remote_block_ids or [])
    clock = asyncio.get_running_loop().time
    began_s = clock()
    try:
        async with asyncio.timeout(seconds_max):
            content = await _ask(remote, PULL_PATH, asked)
        reply = None if content is None else msgspec.json.decode(content, type=PullReply)
    except (OSError, TimeoutError, msgspec.MsgspecError):
        await asyncio.sleep(max(0.0, began_s + seconds_max - clock()))
        return Pulled.NOTHING
    if reply is None or len(reply.digests) < len(digests):
        return Pulled.NOTHING
    is_same = reply.digests[: len(digests)] == digests
    return Pulled.COMPLETE if is_same else Pulled.WRONG


async def keep_renewed(remote: Remote, lease_s: float) -> None:
    """Renew the lease of what this engine is going to fetch, until cancelled."""
    asked = PullRequest(remote.remote_request_id or "")
    while True:
        await asyncio.sleep(lease_s / RENEWALS)
        try:
            async with asyncio.timeout(lease_s):
                await _ask(remote, RENEW_PATH, asked)
        except (OSError, TimeoutError):
            return


async def _ask(remote: Remote, path: str, asked: PullRequest) -> bytes | None:
    """The body of a 200; None for any other answer. Raises OSError."""
    body = msgspec.json.encode(asked)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(remote.remote_host, remote.remote_port)
    try:
        writer.write(head.encode() + body)
        reply = b""
        while chunk := await reader.read(_REPLY_BYTES_MAX):
            reply += chunk
            if len(reply) > _REPLY_BYTES_MAX:
                return None
    finally:
        writer.close()
    status, _, content = reply.partition(b"\r\n\r\n")
    return content if status.startswith(b"HTTP/1.1 200 ") else None
