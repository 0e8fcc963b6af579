"""The engine's heart: runs the batcher in steps that end on a precise modelled clock, and wakes
the answers.

The clock of the steps is absolute: a wake-up that comes late is caught up with by running the
steps that have ended meanwhile, and their tokens are delivered together. So short steps cost few
wake-ups.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from dataplane.engines.simulated.batching import Batcher, Finish, Sequence, Step
from dataplane.engines.simulated.faults import initial_faults
from dataplane.engines.simulated.kv_pool import KvPool
from dataplane.engines.simulated.metrics import EngineMetrics, Exposition
from dataplane.engines.simulated.options import BLOCK_TOKENS, SimulatedOptions, kv_blocks
from dataplane.engines.simulated.roofline import step_times
from dataplane.engines.simulated.transfer import Remote, pull

# Deliveries come at most this often; a real step takes longer than this without a speed-up.
WAKE_S_MIN = 0.002
# Time that a stalled process does not try to make up for.
LAG_S_MAX = 0.25
STEPS_PER_WAKE_MAX = 200
HANG_POLL_S = 0.02


class Answer:
    """One request: `choices` sequences for each of its prompts, and whoever waits for their
    tokens.
    """

    __slots__ = (
        "_is_awake",
        "_waiter",
        "choices",
        "is_cancelled",
        "remote",
        "request_id",
        "sequences",
    )

    def __init__(
        self, request_id: str, sequences: list[Sequence], choices: int, remote: Remote | None
    ) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self.choices = choices
        self.remote = remote
        self.is_cancelled = False
        self._is_awake = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def generated(self) -> int:
        return sum(sequence.generated for sequence in self.sequences)

    def wake(self) -> None:
        self._is_awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there is something since the last wait. One waiter."""
        if not self._is_awake:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_awake = False


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Blocks of a finished prefill that wait for the engine that decodes."""

    blocks: list[int]
    tokens: int
    expires_s: float


class Engine:
    def __init__(self, options: SimulatedOptions, *, gpus: int, model: str) -> None:
        self.options = options
        self.model = model
        self.gpus = gpus
        self.faults = initial_faults(options)
        self.metrics = EngineMetrics()
        self.blocks = kv_blocks(options, gpus)
        self.batcher = Batcher(
            KvPool(self.blocks),
            seats=options.max_num_seqs,
            step_tokens_max=options.max_num_batched_tokens,
            has_prefix_cache=options.enable_prefix_caching,
        )
        self._times = step_times(options, gpus)
        self._owner: dict[Sequence, Answer] = {}
        self._pinned: dict[str, _Pinned] = {}
        self._wake = asyncio.Event()
        self._pulls: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return self.batcher.in_flight

    def submit(self, answer: Answer) -> None:
        now = time.perf_counter()
        for sequence in answer.sequences:
            sequence.arrival_s = now
            self._owner[sequence] = answer
            self.batcher.add(sequence)
        self._wake.set()

    def cancel(self, answer: Answer) -> None:
        """End an answer that nobody waits for, and free its blocks at once."""
        answer.is_cancelled = True
        self._end(answer, Finish.ABORT)

    def abort_all(self) -> None:
        for answer in set(self._owner.values()):
            self._end(answer, Finish.ABORT)

    def _end(self, answer: Answer, finish: Finish) -> None:
        for sequence in answer.sequences:
            if sequence.finish is None:
                self.batcher.remove(sequence)
                sequence.finish = finish
                self._owner.pop(sequence, None)
        answer.wake()
        self._wake.set()

    def hand_over(self, request_id: str) -> int | None:
        """Free the blocks that a prefill left for another engine; their tokens, or None when
        there are none.
        """
        self._expire_pinned()
        pinned = self._pinned.pop(request_id, None)
        if pinned is None:
            return None
        self.batcher.unpin(pinned.blocks)
        self._wake.set()
        return pinned.tokens

    async def run(self) -> None:
        """Compute for ever."""
        try:
            await self._run()
        finally:
            for task in self._pulls:
                task.cancel()

    async def _run(self) -> None:
        clock = time.perf_counter
        step: Step | None = None
        ends_s = 0.0
        while True:
            if step is None:
                self._wake.clear()
                step = self._plan(clock())
                if step is None:
                    await self._idle()
                    continue
                ends_s = clock() + self._duration_s(step)
            await asyncio.sleep(max(ends_s - clock(), WAKE_S_MIN))
            while self.faults.hang:
                await asyncio.sleep(HANG_POLL_S)
            now_s = clock()
            ends_s = max(ends_s, now_s - LAG_S_MAX)
            step, ends_s = self._advance(step, ends_s, now_s)

    def _advance(self, step: Step, ends_s: float, now_s: float) -> tuple[Step | None, float]:
        """Complete every step that has ended by `now_s`; the step under way and its end."""
        spoke: set[Answer] = set()
        current: Step | None = step
        for _ in range(STEPS_PER_WAKE_MAX):
            if current is None or ends_s > now_s:
                break
            self._complete(current, ends_s, spoke)
            current = self._plan(ends_s)
            if current is not None:
                ends_s += self._duration_s(current)
        for answer in spoke:
            answer.wake()
        return current, ends_s

    async def _idle(self) -> None:
        """Wait for work, or for the next lease on pinned blocks to end."""
        if not self._pinned:
            await self._wake.wait()
            return
        expires_s = min(pinned.expires_s for pinned in self._pinned.values())
        try:
            async with asyncio.timeout(max(0.0, expires_s - time.perf_counter())):
                await self._wake.wait()
        except TimeoutError:
            self._expire_pinned()

    def _duration_s(self, step: Step) -> float:
        modelled_s = self._times.step_s(step.tokens, step.kv_tokens, step.attention_pairs)
        return modelled_s * self.faults.slow_factor

    def _plan(self, now_s: float) -> Step | None:
        if self._pinned:
            self._expire_pinned()
        step, pulls = self.batcher.plan()
        for sequence in pulls:
            task = asyncio.ensure_future(self._pull(sequence))
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)
        if step is not None:
            for sequence in step.admitted:
                if not sequence.first_step_s:
                    sequence.first_step_s = now_s
        return step

    async def _pull(self, sequence: Sequence) -> None:
        """Fetch the prompt's KV: the modelled time of the bytes, then the other engine frees its
        blocks.
        """
        answer = self._owner.get(sequence)
        remote = answer.remote if answer else None
        tokens = 0
        if remote is not None:
            missing = max(0, sequence.total - sequence.computed)
            size = missing * self.options.kv_bytes_per_token
            transfer_s = (
                self.options.transfer_latency_ms / 1000 + size / self.options.transfer_bytes_per_s
            )
            await asyncio.sleep(transfer_s / self.options.speedup)
            tokens = await pull(remote)
        is_complete = tokens >= sequence.prompt_tokens
        if not is_complete:
            self.metrics.kv_pull_failures += 1
        self.batcher.pulled(sequence, is_complete=is_complete)
        self._wake.set()

    def _complete(self, step: Step, ended_s: float, spoke: set[Answer]) -> None:
        metrics = self.metrics
        for sequence in self.batcher.complete(step):
            answer = self._owner[sequence]
            spoke.add(answer)
            metrics.generation_tokens += 1
            if sequence.generated == 1:
                sequence.first_token_s = max(ended_s, sequence.arrival_s)
                metrics.prompt_tokens += sequence.prompt_tokens
                metrics.ttft.observe(sequence.first_token_s - sequence.arrival_s)
            else:
                metrics.itl.observe(ended_s - sequence.last_token_s)
            sequence.last_token_s = ended_s
            if sequence.finish is not None:
                self._finished(sequence, answer)

    def _finished(self, sequence: Sequence, answer: Answer) -> None:
        del self._owner[sequence]
        metrics = self.metrics
        metrics.finished[str(sequence.finish)] += 1
        last_s = max(sequence.last_token_s, sequence.first_token_s)
        metrics.e2e.observe(last_s - sequence.arrival_s)
        metrics.queue.observe(max(0.0, sequence.first_step_s - sequence.arrival_s))
        metrics.prefill.observe(max(0.0, sequence.first_token_s - sequence.first_step_s))
        metrics.decode.observe(last_s - sequence.first_token_s)
        if sequence.generated > 1:
            metrics.tpot.observe((last_s - sequence.first_token_s) / (sequence.generated - 1))
        if sequence.is_pinned:
            self._pinned[answer.request_id] = _Pinned(
                sequence.blocks,
                sequence.prompt_tokens,
                time.perf_counter() + self.options.kv_lease_s,
            )

    def _expire_pinned(self) -> None:
        now_s = time.perf_counter()
        for request_id, pinned in list(self._pinned.items()):
            if pinned.expires_s <= now_s:
                del self._pinned[request_id]
                self.batcher.unpin(pinned.blocks)
                self.metrics.kv_expired += 1

    def exposition(self) -> bytes:
        """One scrape of `/metrics`."""
        self._expire_pinned()
        metrics = self.metrics
        batcher = self.batcher
        text = Exposition(self.model)
        waiting = len(batcher.waiting) + len(batcher.pulling)
        text.sample("gauge", "num_requests_running", len(batcher.running))
        text.sample("gauge", "num_requests_waiting", waiting)
        text.sample("gauge", "kv_cache_usage_perc", batcher.pool.used_ratio)
        text.sample("counter", "prefix_cache_queries_total", batcher.counters.prefix_queries)
        text.sample("counter", "prefix_cache_hits_total", batcher.counters.prefix_hits)
        text.sample("counter", "external_prefix_cache_hits_total", batcher.counters.prompt_pulled)
        text.sample("counter", "num_preemptions_total", batcher.counters.preemptions)
        text.sample("counter", "prompt_tokens_total", metrics.prompt_tokens)
        text.sample("counter", "generation_tokens_total", metrics.generation_tokens)
        reason = 'reason="max_num_queued_reqs"'
        text.sample("counter", "admission_rejections_total", metrics.rejections, reason)
        text.sample("counter", "nixl_num_kv_expired_reqs_total", metrics.kv_expired)
        text.sample("counter", "nixl_num_failed_transfers_total", metrics.kv_pull_failures)
        for at, (finish, count) in enumerate(metrics.finished.items()):
            add = text.another if at else partial(text.sample, "counter")
            add("request_success_total", count, f'finished_reason="{finish}"')
        text.histogram("time_to_first_token_seconds", metrics.ttft)
        text.histogram("inter_token_latency_seconds", metrics.itl)
        text.histogram("request_time_per_output_token_seconds", metrics.tpot)
        text.histogram("e2e_request_latency_seconds", metrics.e2e)
        text.histogram("request_queue_time_seconds", metrics.queue)
        text.histogram("request_prefill_time_seconds", metrics.prefill)
        text.histogram("request_decode_time_seconds", metrics.decode)
        caching = self.options.enable_prefix_caching
        text.sample(
            "gauge",
            "cache_config_info",
            1.0,
            f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self.blocks}",'
            f'kv_cache_size_tokens="{self.blocks * BLOCK_TOKENS}",'
            f'enable_prefix_caching="{caching}"',
        )
        return text.text()
