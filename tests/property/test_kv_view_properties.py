"""What a replica knows of an engine's prefix cache against the cache itself, whatever is lost on the way.

The engine is the simulated one's scheduler and pool; its events go through an agent's follower and a
replica's view as bytes, and both hops lose, repeat and replay.
"""

import asyncio
from collections import deque
from typing import Any

import msgspec
import xxhash
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.kv_view import KvView
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.telemetry.metrics import Metrics
from dataplane.agent.kv_events import RETELL_S_MIN, KvFollower
from dataplane.agent.kv_tree import QUIET_S
from dataplane.engines.kv_wire import KvEndpoints
from dataplane.engines.simulated.batching import Batcher, Sequence
from dataplane.engines.simulated.kv_events import KvEventLog
from dataplane.engines.simulated.kv_pool import KvPool
from dataplane.engines.simulated.options import BLOCK_TOKENS
from dataplane.engines.simulated.text import TOKEN_BYTES, Speaker
from dataplane.protocol.messages import (
    Bye,
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Hello,
    Telemetry,
    encode,
)
from dataplane.protocol.subjects import node_subject
from tests.integration.agent_world import NODE
from tests.integration.kv_world import catalog

BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
# Not a multiple of a block, and smaller.
GRID_BYTES = BLOCK_BYTES * 3 // 4
POOL_BLOCKS = 24
# Messages that the engine can replay.
ENGINE_KEEPS = 4

CONTEXT = zmq.asyncio.Context()
# A prompt is a path in a small tree of blocks, and a rest that fills none.
PROMPT = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), st.integers(0, 2)
)
CALL = st.tuples(st.just("call"), PROMPT, st.integers(1, 40))
STEP = st.one_of(
    CALL,
    CALL,
    CALL,
    st.tuples(st.just("pair"), PROMPT, PROMPT),
    st.tuples(st.just("fail"), PROMPT),
    st.tuples(st.just("mute engine"), st.integers(1, 6)),
    st.tuples(st.just("mute bus"), st.integers(1, 6)),
    st.tuples(st.just("tell")),
    st.tuples(st.just("retell")),
    st.tuples(st.just("clear")),
    st.tuples(st.just("restart")),
)


class MemoryBus:
    """Keeps the latest reports, as the stream does."""

    is_connected = True

    def __init__(self, keeps: int) -> None:
        self.kept: deque[bytes] = deque(maxlen=keeps)

    async def kept_kv(self, _node_id: str) -> list[bytes]:
        return list(self.kept)


def tokens_of(prompt: tuple[tuple[int, ...], int]) -> bytes:
    path, rest = prompt
    whole = b"".join(bytes([65 + step]) * BLOCK_BYTES for step in path)
    return whole + b"zzzz" * rest


def digests_of(raw: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Boundaries on a grid, and one at the end."""
    digests: list[int] = []
    tokens: list[int] = []
    for end in range(GRID_BYTES, len(raw) + 1, GRID_BYTES):
        digests.append(xxhash.xxh3_64_intdigest(raw[:end]) >> 1)
        tokens.append(end // TOKEN_BYTES)
    digests.append(-1 - xxhash.xxh3_64_intdigest(raw))
    tokens.append(len(raw) // TOKEN_BYTES)
    return tuple(digests), tuple(tokens)


def on_grid(prompt: tuple[tuple[int, ...], int], held: int) -> int:
    """Whole blocks up to the last boundary of the grid that lies in them: more is known only where this very
    prompt was asked before.
    """
    most = 0
    for end in range(GRID_BYTES, len(tokens_of(prompt)) + 1, GRID_BYTES):
        if end // TOKEN_BYTES <= held:
            most = end // TOKEN_BYTES // BLOCK_TOKENS * BLOCK_TOKENS
    return most


class Story:
    """One engine, its agent, and a replica."""

    def __init__(self, bus_keeps: int) -> None:
        self.bus = MemoryBus(bus_keeps)
        self.index = PrefixIndex()
        self.fleet = FleetState(self.index, TickLog())
        self.fleet.use_catalog(catalog("m"))
        self.metrics = Metrics()
        self.view = KvView(self.bus, self.fleet, self.metrics, late_s=0.001)  # type: ignore[arg-type]
        self.asked: dict[tuple[tuple[int, ...], int], str] = {}
        self.calls = 0
        self.life = 0
        self.now_s = 100.0
        self.has_lost = False
        self.engine_mute = self.bus_mute = 0
        self.start_engine()
        self.say()

    def say(self) -> None:
        """The agent's telemetry."""
        seq = self.follower.stored_seq
        engine = EngineTelemetry(engine_id="e1", running=0, waiting=0, kv_used_ratio=0.0)
        self.view.on_telemetry(
            Telemetry(node_id=NODE, agent_epoch=1, engines=[engine], kv_seqs={"e1": seq})
        )

    def start_engine(self) -> None:
        self.life += 1
        self.log = KvEventLog()
        self.pool = KvPool(POOL_BLOCKS)
        self.batcher = Batcher(
            self.pool, seats=4, step_tokens_max=64, has_prefix_cache=True, kv_log=self.log
        )
        self.numbers = 0
        self.engine_kept: deque[tuple[int, bytes]] = deque(maxlen=ENGINE_KEEPS)
        self.follow()
        self.hello()

    def follow(self) -> None:
        endpoints = KvEndpoints(events="", replay="")
        self.follower = KvFollower(CONTEXT, "e1", self.life, endpoints)
        self.follower.is_answering = True

    def hello(self) -> None:
        facts = EngineFacts(
            engine_id="e1", model="m", role="both", port=1, kind="simulated",
            state=EngineState.SERVING, gpus=1, seats=4, kv_tokens=POOL_BLOCKS * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS, context_tokens_max=4096, started_ms=self.life,
        )  # fmt: skip
        self.fleet.hello(
            Hello(node_id=NODE, agent_epoch=1, version="", engines=[facts]), self.now_s * 1000
        )

    # ------------------------------------------------------------ the engine

    def sequence(self, raw: bytes, tokens: int, session: str) -> Sequence:
        return Sequence(
            tokens=bytearray(raw), speaker=Speaker(raw, 0, 10**9), salt=0,
            prompt_tokens=len(raw) // TOKEN_BYTES, tokens_min=1, tokens_max=tokens, ignores_end=True,
            session=session,
        )  # fmt: skip

    def run(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.batcher.add(sequence)
        while True:
            step, _ = self.batcher.plan()
            if step is None:
                return
            self.batcher.complete(step)
            self.flush()

    def flush(self) -> None:
        events = self.log.take()
        if not events:
            return
        number, self.numbers = self.numbers, self.numbers + 1
        payload = msgspec.msgpack.encode([self.now_s, events, 0])
        self.engine_kept.append((number, payload))
        if self.engine_mute:
            self.engine_mute -= 1
            return
        self.hear(number, payload)

    def hear(self, number: int | None, payload: bytes = b"") -> None:
        """As the follower does between its sockets: ask for what is missing, take what comes."""
        follower = self.follower
        if number is None or number > follower._next:
            for kept, old in list(self.engine_kept):
                if kept > follower._next:
                    self.has_lost = True
                follower._take(kept, old)
        if number is not None:
            follower._take(number, payload)

    # ------------------------------------------------------------ the replica

    def route(self, raw: bytes) -> str:
        self.calls += 1
        session = f"s{self.calls}"
        digests, tokens = digests_of(raw)
        self.index.routed(0, digests, tokens[-1], tokens, session)
        return session

    def call(self, *prompts: tuple[tuple[int, ...], int], tokens: int) -> None:
        running = []
        for prompt in prompts:
            raw = tokens_of(prompt)
            session = self.route(raw)
            self.asked[prompt] = session
            running.append((session, raw, self.sequence(raw, tokens, session)))
        self.run(*(sequence for _, _, sequence in running))
        for session, raw, sequence in running:
            prompt_tokens = len(raw) // TOKEN_BYTES
            self.index.served(0, session, prompt_tokens, tokens, sequence.cached_tokens)

    def fail(self, prompt: tuple[tuple[int, ...], int]) -> None:
        self.index.unserved(self.route(tokens_of(prompt)))

    async def tell(self) -> None:
        self.now_s += QUIET_S
        self.follower.make_batches(NODE, 1, self.now_s)
        while self.follower.unstored:
            batch = self.follower.unstored.popleft()
            self.follower.stored_seq = batch.seq
            data = encode(batch)
            self.bus.kept.append(data)
            if self.bus_mute:
                self.bus_mute -= 1
                continue
            self.view.on_report(node_subject(NODE, "kv"), data)
        await self.repaired()

    async def repaired(self) -> None:
        while self.view._repairs:
            await asyncio.gather(*self.view._repairs.values())
            await asyncio.sleep(0)

    async def all_told(self) -> None:
        """The way is free again, and what can be known is known."""
        self.engine_mute = self.bus_mute = 0
        self.hear(None)
        await self.tell()
        self.say()
        await self.repaired()
        # What nobody has told of by now is not so.
        self.index.settle()
        self.index.settle()

    # ------------------------------------------------------------ the truth

    def held(self, prompt: tuple[tuple[int, ...], int]) -> int:
        """Tokens of a prompt that the engine would find."""
        raw = tokens_of(prompt)
        probe = self.sequence(raw, 1, "probe")
        probe.extend_digests()
        tokens = len(raw) // TOKEN_BYTES
        return len(self.pool.match(probe.digests, (tokens - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS

    def predicted(self, prompt: tuple[tuple[int, ...], int]) -> int:
        digests, tokens = digests_of(tokens_of(prompt))
        return self.index.cached(digests, tokens, tokens[-1] - 1).get(0, 0)

    def check(self) -> None:
        gave_up = self.has_lost or sum(
            self.metrics.kv_clears.value((reason,)) for reason in ("lost", "missed", "overflow")
        )
        for prompt in self.asked:
            predicted, held = self.predicted(prompt), self.held(prompt)
            words = f"{prompt}: {predicted} tokens predicted, {held} held"
            assert predicted <= held, words
            if not gave_up:
                assert predicted >= on_grid(prompt, held), words
        if not gave_up:
            assert self.follower.tree.blocks == len(self.pool.contents())


async def play(steps: list[tuple[Any, ...]], bus_keeps: int) -> None:
    story = Story(bus_keeps)
    for step in steps:
        match step:
            case ("call", prompt, tokens):
                story.call(prompt, tokens=tokens)
            case ("pair", one, other):
                story.call(one, other, tokens=20)
            case ("fail", prompt):
                story.fail(prompt)
            case ("mute engine", count):
                story.engine_mute = count
            case ("mute bus", count):
                story.bus_mute = count
            case ("tell",):
                await story.tell()
            case ("retell",):
                story.now_s += RETELL_S_MIN
                story.follower.retell(story.now_s)
            case ("clear",):
                assert story.batcher.reset_cache()
            case ("restart",):
                await story.tell()
                story.start_engine()
                await story.tell()
                story.say()
                await story.repaired()
    story.flush()
    await story.all_told()
    story.check()


@given(st.lists(STEP, max_size=25), st.sampled_from([1, 4]))
@settings(max_examples=150, deadline=None)
def test_the_view_is_the_cache_or_less(steps: list[tuple[Any, ...]], bus_keeps: int) -> None:
    asyncio.run(play(steps, bus_keeps))


async def live_and_die(story: Story, lives: int) -> None:
    for life in range(lives):
        story.call(((life % 2, 1, 0, life % 3 % 2), life % 3), tokens=20)
        if life % 4:
            await story.tell()
        match life % 3:
            case 0:
                story.start_engine()
            case 1:
                story.fleet.bye(Bye(node_id=NODE, agent_epoch=1))
                story.hello()
            case _:
                assert story.batcher.reset_cache()
        story.say()
        await story.view.settle()


def test_memory_returns_after_a_thousand_lives() -> None:
    async def run() -> None:
        story = Story(4)
        await live_and_die(story, 1_000)
        assert len(story.view) == 1
        await story.repaired()
        story.fleet.bye(Bye(node_id=NODE, agent_epoch=1))
        for _ in range(3):
            await story.view.settle()
        index = story.index
        kept = index._engines[0]
        assert len(story.view) == len(index) == len(index._sessions) == len(index._holders) == 0
        assert [len(each) for each in (kept.first, kept.links, kept.voucher, kept.reach)] == [0] * 4
        assert len(index._engines) == 1, "places are given again"

    asyncio.run(run())
