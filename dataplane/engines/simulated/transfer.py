"""Pulls KV blocks from a prefill engine: asks it over HTTP to hand over what a request left
there.
"""

import asyncio

import msgspec

PULL_PATH = "/simulated/kv/pull"
PULL_S_MAX = 5.0
_REPLY_BYTES_MAX = 4096


class PullRequest(msgspec.Struct):
    remote_request_id: str


class PullReply(msgspec.Struct):
    tokens: int


class Remote(msgspec.Struct):
    """The members of `kv_transfer_params` that this engine reads. Others are allowed."""

    do_remote_decode: bool | None = False
    do_remote_prefill: bool | None = False
    remote_host: str | None = None
    remote_port: int | None = None
    remote_request_id: str | None = None
    remote_num_tokens: int | None = None


async def pull(remote: Remote) -> int:
    """Tokens handed over; the other engine frees them. 0 when it can not be reached or has none."""
    if not remote.remote_host or not remote.remote_port or not remote.remote_request_id:
        return 0
    body = msgspec.json.encode(PullRequest(remote.remote_request_id))
    head = (
        f"POST {PULL_PATH} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(PULL_S_MAX):
            reader, writer = await asyncio.open_connection(remote.remote_host, remote.remote_port)
            try:
                writer.write(head.encode() + body)
                reply = await reader.read(_REPLY_BYTES_MAX)
                while chunk := await reader.read(_REPLY_BYTES_MAX):
                    reply += chunk
                    if len(reply) > _REPLY_BYTES_MAX:
                        return 0
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    status, _, content = reply.partition(b"\r\n\r\n")
    if not status.startswith(b"HTTP/1.1 200 "):
        return 0
    try:
        return msgspec.json.decode(content, type=PullReply).tokens
    except msgspec.MsgspecError:
        return 0
