"""Publishes what happens in the KV pool as vLLM does: the same frames, the same bytes, the same habits.

One message per step that changed something; a cleared cache is told with the next step; the last
messages are kept to be replayed.
"""

import asyncio
import time
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from dataplane.engines.kv_wire import (
    GPU_MEDIUM,
    NUMBER_BYTES,
    REPLAY_END_NUMBER,
    REPLAY_MESSAGES,
    KvEndpoints,
)
from dataplane.engines.simulated.faults import Faults
from dataplane.engines.simulated.options import BLOCK_TOKENS
from dataplane.engines.simulated.text import token_ids

_REQUEST_FRAMES = 3


class KvEventLog:
    """Events in the order in which they happened, until they are taken."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []

    def stored(
        self, digests: list[int], parent: int | None, tokens: bytes, session: str | None
    ) -> None:
        event: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": digests,
            "parent_block_hash": parent,
            "token_ids": token_ids(tokens),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": GPU_MEDIUM,
            "lora_name": None,
            "extra_keys": [None] * len(digests),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if session is not None:
            event["session_id"] = session
        self._events.append(event)

    def removed(self, digest: int) -> None:
        self._events.append(
            {
                "type": "BlockRemoved",
                "block_hashes": [digest],
                "medium": GPU_MEDIUM,
                "group_idx": 0,
            }
        )

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[dict[str, object]]:
        events, self._events = self._events, []
        return events


class KvPublisher:
    """A publishing socket, and one that replays. `faults` is asked at each message."""

    def __init__(self, endpoints: KvEndpoints) -> None:
        self.log = KvEventLog()
        self.next_number = 0
        self._endpoints = endpoints
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_MESSAGES)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(endpoints.events)
        self._replayer = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        self._replayer.bind(endpoints.replay)

    def flush(self, faults: Faults) -> None:
        """Publish what happened since the last time, if anything did."""
        events = self.log.take()
        if not events:
            return
        number, self.next_number = self.next_number, self.next_number + 1
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        if faults.kv_events_lost > 0:
            faults.kv_events_lost -= 1
            return
        self._kept.append((number, payload))
        if faults.kv_events_dropped > 0:
            faults.kv_events_dropped -= 1
            return
        self._publisher.send_multipart((b"", number.to_bytes(NUMBER_BYTES, "big"), payload))

    async def replay(self) -> None:
        """Answer for ever."""
        while True:
            frames = await self._replayer.recv_multipart()
            if len(frames) != _REQUEST_FRAMES or len(frames[2]) != NUMBER_BYTES:
                continue
            begin = int.from_bytes(frames[2], "big")
            for number, payload in list(self._kept):
                if number >= begin:
                    await self._replayer.send_multipart(
                        (frames[0], b"", b"", number.to_bytes(NUMBER_BYTES, "big"), payload)
                    )
                    await asyncio.sleep(0)
            end = REPLAY_END_NUMBER.to_bytes(NUMBER_BYTES, "big", signed=True)
            await self._replayer.send_multipart((frames[0], b"", b"", end, b""))

    def close(self) -> None:
        self._publisher.close(linger=0)
        self._replayer.close(linger=0)
        self._context.term()
