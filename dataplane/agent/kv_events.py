"""Follows the KV events of the node's engines and reports what their caches hold of each session.

A message that is missing is asked for again; what an engine can no longer replay makes the whole view
of that engine void, which is said. Nothing of this is on the way of a request: an engine whose events
are not heard serves as before, and is guessed about as before.
"""

import asyncio
import contextlib
import time
from collections import deque
from itertools import count
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from dataplane.agent import log
from dataplane.agent.bus import AgentBus
from dataplane.agent.kv_tree import KvTree, TooManyBlocks
from dataplane.agent.supervisor import Supervisor
from dataplane.engines.base import EngineError
from dataplane.engines.kv_wire import (
    GPU_MEDIUM,
    NUMBER_BYTES,
    REPLAY_END_NUMBER,
    WHOLE_PAST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KvEndpoints,
    decode_batch,
    number_of,
    remove_sockets,
)
from dataplane.protocol.messages import EngineState, KvBatch, KvReset, KvResetReason

# Changes of one engine that come within this time are told together.
BATCH_S: Final = 0.1
# A replica takes a report without a pause: about 20 us for each session with a long prompt.
SESSIONS_PER_BATCH_MAX: Final = 64
BATCHES_PER_PASS_MAX: Final = 64
# Names of sessions are given by the gateway; longer ones are none of its.
SESSION_CHARS_MAX: Final = 64
# After this silence the engine is asked whether there was something.
SILENCE_S_MAX: Final = 0.5
REPLAY_S_MAX: Final = 2.0
# An engine that leaves so many questions unanswered in a row is not taken to tell anything.
UNANSWERED_MAX: Final = 5
RETRY_S: Final = 1.0
# Everything is told again at most this often.
RETELL_S_MIN: Final = 5.0
# Messages not yet read, of one engine; more are lost, which is noticed.
UNREAD_MAX: Final = 10_000
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
STORE_S_MAX: Final = 1.0
# Messages read before others of this process have their turn.
MESSAGES_PER_TURN_MAX: Final = 64

_MESSAGE_FRAMES: Final = 3


class KvFollower:
    """One engine in one life: `started_ms` tells its lives apart."""

    def __init__(
        self, context: zmq.asyncio.Context, engine_id: str, started_ms: int, endpoints: KvEndpoints
    ) -> None:
        self.engine_id = engine_id
        self.started_ms = started_ms
        self.tree = KvTree()
        self.seq = 0
        self.stored_seq = 0
        self.is_answering = False
        # Batches made and not yet stored, oldest first.
        self.unstored: deque[KvBatch] = deque()
        self._context = context
        self._endpoints = endpoints
        self._group: int | None = None
        # Number of the next message, and of the last that came by itself.
        self._next = 0
        self._heard = -1
        self._is_new_peer = False
        # An agent that begins finds what an engine has told before, and tells all of it.
        self._reset: tuple[KvReset, KvResetReason] | None = (
            KvReset.RETELL,
            KvResetReason.FOLLOWED,
        )
        self._is_retelling = True
        self._unanswered = 0
        self._retold_s = 0.0
        self._events = 0
        self._gaps = 0
        self._replayed = 0
        self._oldest_s = 0.0
        self._why_unreadable = ""
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"follow {self.engine_id}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def clear_away(self) -> None:
        """The engine is gone, and with it its sockets."""
        remove_sockets(self._endpoints)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except (zmq.ZMQError, EngineError, OSError) as error:
                log.warning("kv events not followed", engine=self.engine_id, detail=str(error))
            self._void(KvResetReason.LOST)
            self._next, self._heard = 0, -1
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        with self._socket(zmq.SUB) as subscriber, self._socket(zmq.DEALER) as asker:
            subscriber.set(zmq.SUBSCRIBE, b"")
            monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            watching = asyncio.create_task(self._watch(monitor))
            try:
                subscriber.connect(self._endpoints.events)
                asker.connect(self._endpoints.replay)
                # What was told before anybody listened.
                await self._replay(asker)
                while True:
                    await self._listen(subscriber, asker)
            finally:
                watching.cancel()
                await asyncio.wait({watching})
                subscriber.disable_monitor()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        # Questions to nobody are not kept for whoever comes.
        made.set(zmq.IMMEDIATE, 1)
        made.set(zmq.RCVHWM, UNREAD_MAX)
        made.set(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return made

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """A connection that ends is a process that ended: the next one counts from 0 again."""
        while True:
            await recv_monitor_message(monitor)
            self._is_new_peer = True

    # ------------------------------------------------------------ hearing

    async def _listen(self, subscriber: zmq.asyncio.Socket, asker: zmq.asyncio.Socket) -> None:
        if not await subscriber.poll(int(SILENCE_S_MAX * 1000)):
            if self._is_new_peer:
                self._begin_anew()
            # The last message before a silence is missed by asking only.
            await self._replay(asker)
            return
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                frames = await subscriber.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != _MESSAGE_FRAMES:
                raise EngineError(f"a KV event message has {len(frames)} frames")
            number = number_of(frames[1])
            if self._is_new_peer or number <= self._heard:
                self._begin_anew()
                await self._replay(asker)
            self._heard = number
            if number > self._next:
                self._gaps += 1
                await self._replay(asker)
            self._take(number, frames[2])

    def _begin_anew(self) -> None:
        """Another process publishes at the same address."""
        self._is_new_peer = False
        self._next, self._heard = 0, -1
        self._void(KvResetReason.RESTARTED)

    async def _replay(self, asker: zmq.asyncio.Socket) -> None:
        """Ask for everything from the next message on, and take it."""
        try:
            async with asyncio.timeout(REPLAY_S_MAX):
                await asker.send_multipart([b"", self._next.to_bytes(NUMBER_BYTES, "big")])
                for turn in count(1):
                    frames = await asker.recv_multipart()
                    if turn % MESSAGES_PER_TURN_MAX == 0:
                        await asyncio.sleep(0)
                    number = number_of(frames[-2])
                    if number == REPLAY_END_NUMBER:
                        break
                    if number >= self._next:
                        self._replayed += 1
                    self._take(number, frames[-1])
        except TimeoutError:
            # The engine is busy or gone. A late answer is taken by the next call, and does no harm.
            self._unanswered += 1
            self.is_answering = self.is_answering and self._unanswered < UNANSWERED_MAX
            return
        self._unanswered = 0
        self.is_answering = True

    def _take(self, number: int, payload: bytes) -> None:
        """Apply one message, once and in order. What is missing before it is lost for good."""
        if number < self._next:
            return
        if number > self._next and self._next:
            self._void(KvResetReason.LOST)
        self._next = number + 1
        try:
            batch = decode_batch(payload)
        except EngineError as error:
            if str(error) != self._why_unreadable:
                self._why_unreadable = str(error)
                log.warning("kv events unreadable", engine=self.engine_id, detail=str(error))
            self._void(KvResetReason.LOST)
            return
        self._oldest_s = min(self._oldest_s or batch.told_s, batch.told_s)
        now_s = time.monotonic()
        try:
            for event in batch.events:
                self._apply(event, now_s)
        except TooManyBlocks as error:
            log.warning("kv view too large", engine=self.engine_id, detail=str(error))
            self._void(KvResetReason.OVERFLOW)

    def _apply(self, event: Event, now_s: float) -> None:
        if isinstance(event, AllBlocksCleared):
            self._events += 1
            self._void(KvResetReason.CLEARED)
            return
        if event.medium not in {None, GPU_MEDIUM} or event.locality not in {None, "LOCAL"}:
            return
        group = event.group_idx or 0
        if isinstance(event, BlockStored):
            if event.kv_cache_spec_kind not in WHOLE_PAST:
                return
            if self._group is None:
                self._group = group
        if group != self._group:
            return
        self._events += 1
        if isinstance(event, BlockRemoved):
            self.tree.removed(event.block_hashes)
            return
        session = event.session_id
        if session is not None and len(session) > SESSION_CHARS_MAX:
            session = None
        self.tree.stored(
            event.block_hashes, event.parent_block_hash, event.block_size, session, now_s
        )

    def _void(self, reason: KvResetReason) -> None:
        self.tree.clear()
        self.unstored.clear()
        self._reset = (KvReset.VOID, reason)
        self._is_retelling = False

    # ------------------------------------------------------------ telling

    def retell(self, now_s: float) -> None:
        """Whoever hears of this engine is told everything again, unless that was just done."""
        if now_s - self._retold_s < RETELL_S_MIN:
            return
        self._retold_s = now_s
        self.tree.retell()
        self.unstored.clear()
        if self._reset is None:
            self._reset = (KvReset.RETELL, KvResetReason.FOLLOWED)
            self._is_retelling = True

    def emptied(self) -> None:
        """The cache was emptied from outside, which the engine itself tells only with its next step."""
        self._void(KvResetReason.CLEARED)

    def make_batches(self, node_id: str, agent_epoch: int, now_s: float) -> None:
        """Put what changed into `unstored`; nothing while the engine has not answered yet."""
        if not self.is_answering or len(self.unstored) >= BATCHES_PER_PASS_MAX:
            return
        news = self.tree.news(now_s)
        told = [*news.shorter.items(), *news.longer.items()]
        is_silent = not told and self._reset is None and not self._events and not self._gaps
        if is_silent and not self._is_retelling:
            return
        parts = [
            dict(told[at : at + SESSIONS_PER_BATCH_MAX])
            for at in range(0, max(1, len(told)), SESSIONS_PER_BATCH_MAX)
        ]
        for at, held in enumerate(parts):
            reset, reason = self._reset or (KvReset.NONE, None)
            self.seq += 1
            self.unstored.append(
                KvBatch(
                    node_id=node_id,
                    agent_epoch=agent_epoch,
                    engine_id=self.engine_id,
                    started_ms=self.started_ms,
                    seq=self.seq,
                    block_tokens=self.tree.block_tokens,
                    blocks=self.tree.blocks,
                    held=held,
                    reset=reset,
                    reason=reason,
                    is_told=self._is_retelling and at == len(parts) - 1,
                    events=self._events,
                    gaps=self._gaps,
                    replayed=self._replayed,
                    oldest_ms=int(self._oldest_s * 1000),
                )
            )
            self._reset = None
            self._events = self._gaps = self._replayed = 0
            self._oldest_s = 0.0
        self._is_retelling = False


class KvReporter:
    """The followers of a node's engines, and the way of their batches to the bus."""

    def __init__(
        self, bus: AgentBus, supervisor: Supervisor, *, node_id: str, agent_epoch: int
    ) -> None:
        self._bus = bus
        self._supervisor = supervisor
        self._node_id = node_id
        self._agent_epoch = agent_epoch
        self._followers: dict[str, KvFollower] = {}
        self._context = zmq.asyncio.Context()

    def seqs(self) -> dict[str, int]:
        """The number of the last stored batch of each engine that tells."""
        return {
            name: follower.stored_seq
            for name, follower in self._followers.items()
            if follower.is_answering
        }

    def retell(self) -> None:
        """Somebody may have missed something: let all be told again."""
        for follower in self._followers.values():
            follower.retell(time.monotonic())

    def emptied(self, engine_id: str) -> None:
        """A command has emptied an engine's cache."""
        follower = self._followers.get(engine_id)
        if follower is not None:
            follower.emptied()

    async def run(self) -> None:
        """Follow and report for ever."""
        try:
            while True:
                await self._keep_up()
                stored = True
                for follower in self._followers.values():
                    follower.make_batches(self._node_id, self._agent_epoch, time.monotonic())
                    stored = await self._store(follower) and stored
                await asyncio.sleep(BATCH_S if stored else RETRY_S)
        finally:
            for follower in self._followers.values():
                await follower.stop()
            self._context.destroy(linger=0)

    async def _keep_up(self) -> None:
        """Follow the engines that serve, in the lives that they have now; the first of an engine's ranks."""
        wanted: dict[str, tuple[int, KvEndpoints]] = {}
        for keeper in self._supervisor.keepers.values():
            name = keeper.names()[0]
            endpoints = keeper.kv_endpoints()
            is_up = keeper.state in {EngineState.SERVING, EngineState.DRAINING}
            if endpoints is not None and (is_up or name in self._followers):
                wanted[name] = (keeper.started_ms, endpoints)
        for name, follower in list(self._followers.items()):
            if wanted.get(name, (None,))[0] != follower.started_ms:
                del self._followers[name]
                await follower.stop()
                follower.clear_away()
        for name, (started_ms, endpoints) in wanted.items():
            if name not in self._followers:
                follower = KvFollower(self._context, name, started_ms, endpoints)
                self._followers[name] = follower
                follower.start()

    async def _store(self, follower: KvFollower) -> bool:
        """Hand over what is unstored, in order. False when the bus did not take all of it."""
        unstored = follower.unstored
        while unstored:
            batch = unstored[0]
            name = f"{batch.engine_id}:{batch.agent_epoch}:{batch.started_ms}:{batch.seq}"
            if not await self._bus.store("kv", batch, name, STORE_S_MAX):
                return False
            follower.stored_seq = batch.seq
            # The follower may have thrown away what it had told meanwhile.
            with contextlib.suppress(IndexError):
                if unstored[0] is batch:
                    unstored.popleft()
        return True
